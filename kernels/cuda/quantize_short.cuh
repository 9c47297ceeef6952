/* Inside the short way of quantize: tiles, where they come from and go to, segments of them. */
#pragma once

#include "kernels/cuda/quantize_packed.cuh"
#include "kernels/cuda/quantize_tile.cuh"
#include "kernels/cuda/swiglu.cuh"

/* Formats by where their scale blocks lie. */
enum {
    WHOLE,   /* one scale for the member; columns are transposed */
    LINES,   /* of 128, f32; columns are transposed */
    PLANAR,  /* of 32, E8M0; columns' codes lie in rows */
    NIBBLES, /* of 16, E4M3, codes of four bits; columns are transposed */
    PLANAR_NIBBLES,
    KINDS
};
enum { NIBBLE_SCALES = 128 }; /* that a block may have */
enum { CHUNKS = TILE * 2 / 16, PAIRS = TILE / 2, WARPS = TILE_THREADS / 32 };

template <int KIND> struct kind {
    enum {
        HALF = KIND == NIBBLES || KIND == PLANAR_NIBBLES,
        IS_PLANAR = KIND == PLANAR || KIND == PLANAR_NIBBLES,
        WORDS = HALF ? 2 : 4,        /* of codes of a segment */
        PITCH = SEGMENTS * WORDS + 1 /* of a line of codes on its way out */
    };
};

/* Where a direction's part of a tile goes. */
struct target {
    uint8_t *codes; /* the tile's first; of a decoded direction its elements */
    int64_t pitch;
    lattice scales;
    level l;
    bool even;   /* every segment of codes begins at a multiple of its size and is whole */
    bool padded; /* lines of a tile are as long as a tile, zeros at their end */
};

/* A tile, where it comes from and goes to. */
struct frame {
    tile t;
    const mt_bf16 *source; /* its first element; of gathered rows, that of token 0 */
    target to[MT_DIR_COUNT];
    bool aligned;   /* its rows */
    int64_t row0;   /* its first row among those of all members, and their tokens: where they */
    int32_t *token; /* are gathered */
};

struct short_space {
    alignas(16) uint32_t tiles[2][AREA / 2];        /* the one that is worked on and the next */
    alignas(16) float planar[PLANAR_BLOCKS * TILE]; /* of nibbles make_scales' ones */
    uint32_t partial[TILE / 32][PAIRS];             /* magnitudes of 32 rows of two columns */
    uint8_t scales[TILE * SEGMENTS];
    float enc[2][MT_DIR_COUNT][NIBBLE_SCALES]; /* of this member and the next: what elements under
                                                  each are multiplied by */
    frame frames[4]; /* of both, of the one after, of the one that is looked up */
    int32_t tokens[4][TILE];
    block_found found[2];
};
/* Behind it where a direction rounds stochastically: the bits of every element, placed as it is. */

/* What a thread has found of a member. */
struct found {
    uint32_t most[MT_DIR_COUNT];
    int nans;
};

static __device__ __forceinline__ void raise(uint32_t *most, uint32_t m)
{
    *most = m > *most ? m : *most;
}

/* ---- tiles ------------------------------------------------------------------------------------
 */

/* The words of a chunk of 16 bytes of row r. Chunks change places so that segments of a row do not
 * meet in a bank; for nibbles, whose columns warps read in squares, the sixteen columns of a warp
 * lie together and rows do not meet either. */
template <int KIND> static __device__ __forceinline__ int chunk_place(int r, int chunk)
{
    if (KIND != NIBBLES) return (r * CHUNKS + (chunk ^ chunk >> 3)) * 4;
    const int strip = chunk >> 1, rows = (r & 4) | (r >> 3 & 1), strips = (strip * 2 | strip >> 2);
    return (strip * TILE * 2 + ((r * 2 + (chunk & 1)) ^ rows ^ (strips & 7))) * 4;
}
/* From a chunk of a row to that of the row 16 below. */
template <int KIND>
static constexpr int ROWS_WORDS = KIND == NIBBLES ? 2 * 16 * 4 : CHUNKS * 16 * 4;

/* The word of two elements. */
template <int KIND> static __device__ __forceinline__ int pair_place(int r, int pair)
{
    return chunk_place<KIND>(r, pair >> 2) + (pair & 3);
}

/* Segment `at` of row r. */
template <int KIND>
static __device__ __forceinline__ void get_chunks(uint32_t w[8], const uint32_t *words, int r,
                                                  int at)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint4 q = *(const uint4 *)(words + chunk_place<KIND>(r, at * 2 + i));
        w[i * 4] = q.x, w[i * 4 + 1] = q.y, w[i * 4 + 2] = q.z, w[i * 4 + 3] = q.w;
    }
}

/* known: the member's level, NULL: from its amax. */
static __device__ __forceinline__ void set_target(target *to, const job &j, const tile &t, int dir,
                                                  const level *known = NULL)
{
    const side &s = j.p.sides[dir];
    if (!s.present) return;
    const bool columns = dir == MT_COL, across = columns && s.transposed;
    const int half = s.codes_per_byte - 1;
    shape p = shape_of(s, t.m.rows, t.m.cols);
    int64_t line0 = across ? t.c0 : t.r0, along0 = across ? t.r0 : t.c0;
    uint8_t *scales = s.scales + t.m.at[AT_SCALES + dir] * (s.scale == MT_SCALE_F32 ? 4 : 1);
    const float *given = j.scale[dir];
    to->pitch = p.pitch;
    to->codes = s.codes + t.m.at[AT_CODES + dir] + line0 * p.pitch + along0 / TILE * p.tile;
    to->scales = lattice_of(s, p, scales, columns ? t.c0 : t.r0, columns ? t.r0 : t.c0);
    to->l = known ? *known : member_level(s, j.amax[dir][t.index], given ? given + t.index : NULL);
    if (s.decoded) {
        to->pitch = t.m.cols * 2;
        to->codes = s.codes + (t.m.offset + t.r0 * t.m.cols + t.c0) * 2;
    }
    int bytes = across ? 16 : SEGMENT >> half, length = across ? t.rows : t.cols;
    to->padded = s.padded;
    to->even = (((uintptr_t)to->codes | (uintptr_t)p.pitch) & (bytes - 1)) == 0 &&
               (to->padded || (length & ((bytes << half) - 1)) == 0);
}

/* Looks a tile up, by a warp; its targets are set afterwards, each by another. */
static __device__ __forceinline__ void find_tile(frame *f, const job &j, int64_t unit,
                                                 unsigned run = 1)
{
    int64_t member = member_at_by_warp(j.p.units, j.p.group.members, unit);
    if (lane_of_warp()) return;
    tile t = tile_of(j.p, member, unit, run);
    f->t = t;
    const int64_t first = t.m.offset + t.r0 * t.m.cols;
    if (j.row_token) f->row0 = first / t.m.cols;
    f->source = (const mt_bf16 *)j.p.sides[SOURCE].codes +
                (j.row_token ? 0
                 : j.swiglu  ? 2 * first
                             : first) +
                t.c0;
    f->aligned = (uintptr_t)f->source % 16 == 0 && t.m.cols % 8 == 0;
}

/* SwiGLU of sixteen bytes of each, rounded. */
static __device__ __forceinline__ uint4 swiglu_of(const uint4 &g, const uint4 &u)
{
    const uint32_t gate[4] = { g.x, g.y, g.z, g.w }, up[4] = { u.x, u.y, u.z, u.w };
    uint32_t y[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        y[i] = bf16_pair(mt_swiglu_of<mt_bf16>(low_bf16(gate[i]), low_bf16(up[i])),
                         mt_swiglu_of<mt_bf16>(high_bf16(gate[i]), high_bf16(up[i])));
    return make_uint4(y[0], y[1], y[2], y[3]);
}

/* Gradients of sixteen bytes of each half, rounded. */
static __device__ __forceinline__ void swiglu_gradients(uint4 *dg, uint4 *du, const uint4 &d,
                                                        const uint4 &g, const uint4 &u)
{
    const uint32_t in[4] = { d.x, d.y, d.z, d.w }, gate[4] = { g.x, g.y, g.z, g.w };
    const uint32_t up[4] = { u.x, u.y, u.z, u.w };
    uint32_t of_gate[4], of_up[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float a, b, c, e;
        mt_swiglu_gradient<mt_bf16>(&a, &b, low_bf16(in[i]), low_bf16(gate[i]), low_bf16(up[i]));
        mt_swiglu_gradient<mt_bf16>(&c, &e, high_bf16(in[i]), high_bf16(gate[i]), high_bf16(up[i]));
        of_gate[i] = bf16_pair(a, c), of_up[i] = bf16_pair(b, e);
    }
    *dg = make_uint4(of_gate[0], of_gate[1], of_gate[2], of_gate[3]);
    *du = make_uint4(of_up[0], of_up[1], of_up[2], of_up[3]);
}

/* Makes a tile of SwiGLU's of rows twice as wide. */
template <int KIND>
static __device__ __forceinline__ void make_tile(uint32_t *words, const frame &f)
{
    enum { STEP = TILE_THREADS / CHUNKS, MANY = 2 }; /* rows whose loads are under way */
    const int chunk = (int)threadIdx.x % CHUNKS, first = (int)threadIdx.x / CHUNKS;
    const int rows = chunk * 8 < f.t.cols ? f.t.rows : 0;
    const int64_t up = f.t.m.cols;
    const mt_bf16 *from = f.source + chunk * 8 + first * 2 * up;
#pragma unroll 1
    for (int r = first; r < TILE; r += MANY * STEP, from += MANY * STEP * 2 * up) {
        uint4 g[MANY], u[MANY];
#pragma unroll
        for (int i = 0; i < MANY; i++) {
            const mt_bf16 *p = from + i * STEP * 2 * up;
            g[i] = u[i] = make_uint4(0, 0, 0, 0);
            if (r + i * STEP < rows)
                g[i] = __ldg((const uint4 *)p), u[i] = __ldg((const uint4 *)(p + up));
        }
#pragma unroll
        for (int i = 0; i < MANY; i++)
            *(uint4 *)(words + chunk_place<KIND>(r + i * STEP, chunk)) = swiglu_of(g[i], u[i]);
    }
}

/* Sends for a tile of gathered rows. */
template <int KIND>
static __device__ __forceinline__ void gather_tile(uint32_t *words, const frame &f)
{
    const int chunk = (int)threadIdx.x % CHUNKS, first = (int)threadIdx.x / CHUNKS;
    const bool inside = chunk * 8 < f.t.cols;
    const mt_bf16 *from = f.source + (inside ? chunk * 8 : 0);
    const int64_t pitch = f.t.m.cols;
    uint32_t *to = words + chunk_place<KIND>(first, chunk);
#pragma unroll
    for (int i = 0; i < TILE * CHUNKS / TILE_THREADS; i++) {
        int r = first + i * (TILE_THREADS / CHUNKS);
        copy_16(to + i * ROWS_WORDS<KIND>, from + f.token[r] * pitch,
                inside && r < f.t.rows ? 16 : 0);
    }
}

/* Sends for a tile: 0 beyond its rows and columns. */
template <int KIND>
static __device__ __forceinline__ void load_tile(uint32_t *words, const frame &f, const job &j)
{
    if (j.swiglu) return make_tile<KIND>(words, f);
    if (j.row_token) return gather_tile<KIND>(words, f);
    const int chunk = (int)threadIdx.x % CHUNKS, rows = f.t.rows, cols = f.t.cols - chunk * 8;
    const int64_t pitch = f.t.m.cols;
    const mt_bf16 *from = f.source + (cols > 0 ? chunk * 8 : 0);
    const int first = (int)threadIdx.x / CHUNKS;
    uint32_t *to = words + chunk_place<KIND>(first, chunk);
    static_assert(TILE_THREADS / CHUNKS == 16, "of ROWS_WORDS");
    const int bytes = cols > 8 ? 16 : cols > 0 ? cols * 2 : 0;
    if (f.aligned && rows == TILE && f.t.cols == TILE) {
        const int64_t step = TILE_THREADS / CHUNKS * pitch;
        from += first * pitch;
#pragma unroll
        for (int i = 0; i < TILE * CHUNKS / TILE_THREADS; i++, from += step)
            copy_16(to + i * ROWS_WORDS<KIND>, from);
        return;
    }
    if (f.aligned) {
#pragma unroll 1
        for (int i = 0; i < TILE * CHUNKS / TILE_THREADS; i++) {
            int r = first + i * (TILE_THREADS / CHUNKS);
            copy_16(to + i * ROWS_WORDS<KIND>, from + (r < rows ? r * pitch : 0),
                    r < rows ? bytes : 0);
        }
        return;
    }
    for (int r = (int)threadIdx.x / CHUNKS; r < TILE; r += TILE_THREADS / CHUNKS) {
        uint16_t *one = (uint16_t *)(words + chunk_place<KIND>(r, chunk));
        for (int e = 0; e < 8; e++)
            one[e] = r < rows && e < cols ? __bfloat16_as_ushort(from[r * pitch + e]) : 0;
    }
}

/* The bits of a tile's elements; a draw is a chunk. */
template <int KIND>
static __device__ __forceinline__ void draw_tile_bits(uint32_t *random, const job &j, const tile &t)
{
    const uint32_t row = (uint32_t)t.r0 + (t.index ? 0 : j.first_row), step = draw_step(j);
    for (int i = threadIdx.x; i < t.rows * CHUNKS; i += TILE_THREADS) {
        int r = i / CHUNKS, chunk = i % CHUNKS;
        uint32_t counter[4] = { (uint32_t)(t.c0 / 8) + (uint32_t)chunk, row + (uint32_t)r,
                                j.first_member + (uint32_t)t.index, step };
        uint32_t w[4];
        mt_philox(w, counter, j.key);
        *(uint4 *)(random + chunk_place<KIND>(r, chunk)) = make_uint4(w[0], w[1], w[2], w[3]);
    }
}

/* Column sums of a tile's rows, in order. */
template <int KIND>
static __device__ __forceinline__ void sum_pairs(const job &j, const uint32_t *words, const tile &t)
{
    int pair = threadIdx.x;
    if (pair * 2 >= t.cols) return;
    float low = 0, high = 0;
#pragma unroll 8
    for (int r = 0; r < t.rows; r++) {
        uint32_t w = words[pair_place<KIND>(r, pair)];
        low += low_bf16(w), high += high_bf16(w);
    }
    float *sums = j.sums + t.m.at[AT_SUMS] + t.r0 / TILE * t.m.cols + t.c0 + pair * 2;
    sums[0] = low;
    if (pair * 2 + 1 < t.cols) sums[1] = high;
}

/* ---- scales -----------------------------------------------------------------------------------
 */

/* F(amax, max) where the scale is a power of two: max is 1.75 of one, amax has bf16's bits. */
static __device__ __forceinline__ cell pow2_cell(const side &s, uint32_t amax)
{
    const int top = (int)(mt_f32_bits(s.max) >> 23) + 127;
    int exponent = top - (int)((amax + 0x1fffffu) >> 23);
    uint32_t bits = (uint32_t)(exponent < 254 ? exponent : 254) << 23;
    if (amax == 0 || amax >= 0x7f800000u) bits = 0x3f800000u;
    cell e;
    e.enc = mt_f32_from_bits(bits);
    e.dec = mt_f32_from_bits(bits == 0x7f000000u ? 0x00400000u : 0x7f000000u - bits);
    e.stored = 0;
    return e;
}

/* As nvfp4_cell. */
static __device__ __forceinline__ cell nibbles_cell(const job &j, const level &l, float wanted)
{
#if MT_CONVERTS_FP8
    float v[2];
    cell e;
    e.stored = (uint8_t)native_pair(MT_ELEMENT_E4M3, wanted, 0.0f);
    native_values(v, MT_ELEMENT_E4M3, e.stored);
    e.dec = v[0] * l.s_dec;
    e.enc = mt_nvfp4_encode(e.dec);
    return e;
#else
    return nvfp4_cell(j, l, wanted);
#endif
}

/* Of a block with this magnitude. */
template <int KIND>
static __device__ __forceinline__ cell cell_at(const job &j, const side &s, const level &l,
                                               uint32_t magnitude)
{
    float amax = mt_f32_from_bits(magnitude << 16);
    cell e = { l.enc, l.dec, 0 };
    if (KIND == LINES)
        return s.options.pow2 ? pow2_cell(s, magnitude << 16) : cell_of(j, s, l, amax);
    if (kind<KIND>::IS_PLANAR) {
        int32_t exponent = mt_e8m0_exponent(amax, s.inverse, s.emax, s.options.scale_floor);
        e.enc = mt_e8m0_scale(254 - exponent), e.dec = 0;
        e.stored = (uint8_t)exponent;
    }
    return KIND == NIBBLES ? nibbles_cell(j, l, amax * l.g) : e;
}

/* The magnitude of a segment. */
static __device__ __forceinline__ uint32_t segment_magnitude(const uint32_t w[8], int *nans)
{
    uint32_t most = larger_half(magnitudes<8>(w));
    if (most <= 0x7f80) return most;
    most = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) most = found_among_nans(w[i], most);
    *nans += (int)(most >> 16);
    return most & 0xffff;
}

/* Magnitudes of 32 rows of two columns. */
template <int KIND>
static __device__ __forceinline__ uint32_t pair_magnitudes(const uint32_t *words, int pair,
                                                           int part)
{
    uint32_t m = 0, low = 0, high = 0;
#pragma unroll 16
    for (int i = 0; i < 32; i++) m = larger_pair(m, words[pair_place<KIND>(part * 32 + i, pair)]);
    m &= 0x7fff7fffu;
    if ((m & 0xffff) <= 0x7f80 && m >> 16 <= 0x7f80) return m;
#pragma unroll 1
    for (int i = 0; i < 32; i++) {
        uint32_t w = words[pair_place<KIND>(part * 32 + i, pair)];
        low = found_among_nans(w & 0xffff, low), high = found_among_nans(w >> 16, high);
    }
    return (low & 0xffff) | high << 16;
}

/* Codes of a segment; enc of each element. */
template <int KIND>
static __device__ __forceinline__ void encode_segment(uint32_t q[4], const side &s,
                                                      const uint32_t w[8], const float enc[SEGMENT],
                                                      bool nans)
{
    if (!kind<KIND>::HALF) {
        encode_bytes(q, s, w, enc);
    } else {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            q[i] = magnitude_nibbles(w + i * 4, enc + i * 8, NULL) | nibble_signs(w + i * 4, nans);
        }
        q[2] = q[3] = 0;
    }
}

/* Codes and scale of a segment of a block with this magnitude. */
template <int KIND>
static __device__ __forceinline__ cell make_segment(uint32_t q[4], const job &j, const side &s,
                                                    const level &l, uint32_t magnitude,
                                                    const uint32_t w[8], bool nans)
{
    float enc[SEGMENT];
    cell e = cell_at<KIND>(j, s, l, magnitude);
#pragma unroll
    for (int i = 0; i < SEGMENT; i++) enc[i] = e.enc;
    encode_segment<KIND>(q, s, w, enc, nans);
    return e;
}

static __device__ __forceinline__ void put_stored(const side &s, const target &to, const cell &e,
                                                  int line, int block)
{
    int64_t at = scale_offset(to.scales, line, block);
    if (s.scale == MT_SCALE_F32)
        ((float *)to.scales.at)[at] = e.dec;
    else
        to.scales.at[at] = e.stored;
}
