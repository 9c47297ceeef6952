/* The common case of quantize by a shorter way: bf16 to bytes or nibbles, 1-D blocks or one scale a
 * member, either direction or both. Tiles lie in shared memory as elements do, the next one on its
 * way while one is worked on. The arithmetic and its order are those of the tiles. */
#include "kernels/cuda/quantize_packed.cuh"
#include "kernels/cuda/quantize_tile.cuh"

/* Formats by where their scale blocks lie. */
enum {
    WHOLE,   /* one scale for the member; columns are transposed */
    LINES,   /* of 128, f32; columns are transposed */
    PLANAR,  /* of 32, E8M0; columns' codes lie in rows */
    NIBBLES, /* of 16, E4M3, codes of four bits; columns are transposed */
    PLANAR_NIBBLES,
    KINDS
};
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
    uint8_t *codes; /* the tile's first */
    int64_t pitch;
    lattice scales;
    level l;
    bool even; /* every segment of codes begins at a multiple of its size and is whole */
};

/* A tile, where it comes from and goes to. */
struct frame {
    tile t;
    const mt_bf16 *source; /* its first element */
    target to[MT_DIR_COUNT];
    bool aligned; /* its rows */
};

struct short_space {
    alignas(16) uint32_t tiles[2][AREA / 2]; /* the one that is worked on and the next */
    alignas(16) float planar[PLANAR_BLOCKS * TILE];
    uint32_t partial[TILE / 32][PAIRS]; /* magnitudes of 32 rows of two columns */
    uint8_t scales[TILE * SEGMENTS];
    frame frames[3]; /* of both and of the one after */
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

/* The word of two elements: chunks of 16 bytes change places so that segments of a row do not meet
 * in a bank. */
static __device__ __forceinline__ int chunk_place(int r, int chunk)
{
    return (r * CHUNKS + (chunk ^ chunk >> 3)) * 4;
}
static __device__ __forceinline__ int pair_place(int r, int pair)
{
    return chunk_place(r, pair >> 2) + (pair & 3);
}

/* Segment `at` of row r. */
static __device__ __forceinline__ void get_chunks(uint32_t w[8], const uint32_t *words, int r,
                                                  int at)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint4 q = *(const uint4 *)(words + chunk_place(r, at * 2 + i));
        w[i * 4] = q.x, w[i * 4 + 1] = q.y, w[i * 4 + 2] = q.z, w[i * 4 + 3] = q.w;
    }
}

static __device__ __forceinline__ void set_target(target *to, const job &j, const tile &t, int dir)
{
    const side &s = j.p.sides[dir];
    if (!s.present) return;
    const bool columns = dir == MT_COL, across = columns && s.transposed;
    const int half = s.codes_per_byte - 1;
    const int64_t *at = j.p.members[t.index].at; /* in memory: dir is a lane's */
    shape p = shape_of(s, t.m.rows, t.m.cols);
    int64_t line0 = across ? t.c0 : t.r0, along0 = across ? t.r0 : t.c0;
    uint8_t *scales = s.scales + at[AT_SCALES + dir] * (s.scale == MT_SCALE_F32 ? 4 : 1);
    const float *given = j.scale[dir];
    to->pitch = p.pitch;
    to->codes = s.codes + at[AT_CODES + dir] + line0 * p.pitch + (along0 >> half);
    to->scales = lattice_of(s, p, scales, columns ? t.c0 : t.r0, columns ? t.r0 : t.c0);
    to->l = member_level(s, j.amax[dir][t.index], given ? given + t.index : NULL);
    int bytes = across ? 16 : SEGMENT >> half;
    to->even = (((uintptr_t)to->codes | (uintptr_t)p.pitch) & (bytes - 1)) == 0 &&
               ((across ? t.rows : t.cols) & ((bytes << half) - 1)) == 0;
}

static __device__ __forceinline__ void find_frame(frame *f, const job &j, int64_t unit)
{
    int64_t member = member_at_by_warp(j.p.units, j.p.group.members, unit);
    int lane = lane_of_warp();
    if (lane >= MT_DIR_COUNT) return;
    tile t = tile_of(j.p, member, unit);
    set_target(&f->to[lane], j, t, lane);
    if (lane) return;
    f->t = t;
    f->source = (const mt_bf16 *)j.p.sides[SOURCE].codes + t.m.offset + t.r0 * t.m.cols + t.c0;
    f->aligned = (uintptr_t)f->source % 16 == 0 && t.m.cols % 8 == 0;
}

/* Sends for a tile: 0 beyond its rows and columns. */
static __device__ __forceinline__ void load_tile(uint32_t *words, const frame &f)
{
    const int chunk = (int)threadIdx.x % CHUNKS, rows = f.t.rows, cols = f.t.cols - chunk * 8;
    const int64_t pitch = f.t.m.cols;
    const mt_bf16 *from = f.source + (cols > 0 ? chunk * 8 : 0);
    const int bytes = cols > 8 ? 16 : cols > 0 ? cols * 2 : 0;
    if (f.aligned && rows == TILE && f.t.cols == TILE) {
        const int64_t step = TILE_THREADS / CHUNKS * pitch;
        const int first = (int)threadIdx.x / CHUNKS;
        from += first * pitch;
#pragma unroll
        for (int i = 0; i < TILE * CHUNKS / TILE_THREADS; i++, from += step)
            copy_16(words + chunk_place(first + i * (TILE_THREADS / CHUNKS), chunk), from);
        return;
    }
    if (f.aligned) {
#pragma unroll 1
        for (int i = 0; i < TILE * CHUNKS / TILE_THREADS; i++) {
            int r = (int)threadIdx.x / CHUNKS + i * (TILE_THREADS / CHUNKS);
            copy_16(words + chunk_place(r, chunk), from + (r < rows ? r * pitch : 0),
                    r < rows ? bytes : 0);
        }
        return;
    }
    for (int r = (int)threadIdx.x / CHUNKS; r < TILE; r += TILE_THREADS / CHUNKS) {
        uint16_t *to = (uint16_t *)(words + chunk_place(r, chunk));
        for (int e = 0; e < 8; e++)
            to[e] = r < rows && e < cols ? __bfloat16_as_ushort(from[r * pitch + e]) : 0;
    }
}

/* The bits of a tile's elements; a draw is a chunk. */
static __device__ __forceinline__ void draw_tile_bits(uint32_t *random, const job &j, const tile &t)
{
    const uint32_t row = (uint32_t)t.r0 + (t.index ? 0 : j.first_row), step = draw_step(j);
    for (int i = threadIdx.x; i < t.rows * CHUNKS; i += TILE_THREADS) {
        int r = i / CHUNKS, chunk = i % CHUNKS;
        uint32_t counter[4] = { (uint32_t)(t.c0 / 8) + (uint32_t)chunk, row + (uint32_t)r,
                                j.first_member + (uint32_t)t.index, step };
        uint32_t w[4];
        mt_philox(w, counter, j.key);
        *(uint4 *)(random + chunk_place(r, chunk)) = make_uint4(w[0], w[1], w[2], w[3]);
    }
}

/* Column sums of a tile's rows, in order. */
static __device__ __forceinline__ void sum_pairs(const job &j, const uint32_t *words, const tile &t)
{
    int pair = threadIdx.x;
    if (pair * 2 >= t.cols) return;
    float low = 0, high = 0;
#pragma unroll 8
    for (int r = 0; r < t.rows; r++) {
        uint32_t w = words[pair_place(r, pair)];
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
static __device__ __forceinline__ uint32_t pair_magnitudes(const uint32_t *words, int pair,
                                                           int part)
{
    uint32_t m = 0, low = 0, high = 0;
#pragma unroll 16
    for (int i = 0; i < 32; i++)
        m = larger_halves(m, words[pair_place(part * 32 + i, pair)] & 0x7fff7fffu);
    if ((m & 0xffff) <= 0x7f80 && m >> 16 <= 0x7f80) return m;
#pragma unroll 1
    for (int i = 0; i < 32; i++) {
        uint32_t w = words[pair_place(part * 32 + i, pair)];
        low = found_among_nans(w & 0xffff, low), high = found_among_nans(w >> 16, high);
    }
    return (low & 0xffff) | high << 16;
}

/* Codes of a segment; enc of each element. */
template <int KIND, bool SR>
static __device__ __forceinline__ void encode_segment(uint32_t q[4], const side &s,
                                                      const uint32_t w[8], const float enc[SEGMENT],
                                                      const uint32_t random[8], bool nans)
{
    if (!kind<KIND>::HALF) {
        encode_bytes(q, s, w, enc);
    } else {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t *bits = random + i * 4;
            q[i] = SR && s.options.sr ? magnitude_nibbles(w + i * 4, enc + i * 8, bits)
                                      : magnitude_nibbles(w + i * 4, enc + i * 8, NULL);
            q[i] |= nibble_signs(w + i * 4, nans);
        }
        q[2] = q[3] = 0;
    }
}

/* Codes and scale of a segment under 4over6: its amax becomes 6, or 4 if the error is then smaller
 * (a NaN keeps 6). */
template <bool FAST>
static __device__ __forceinline__ cell choose(uint32_t q[4], const job &j, const side &s,
                                              const level &l, uint32_t magnitude,
                                              const uint32_t w[8])
{
    float base = mt_f32_from_bits(magnitude << 16) / 6.0f * l.s_enc, error[2];
    uint32_t codes[2][2];
    cell e[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float enc[SEGMENT], v[2];
        e[i] = nibbles_cell(j, l, i ? base * 1.5f : base);
#pragma unroll
        for (int k = 0; k < SEGMENT; k++) enc[k] = e[i].enc;
        byte_pair_values<CODES_E4M3>(v, j.e4m3, e[i].stored);
        error[i] = nibbles_error<FAST>(codes[i], s, l.amax, v[0], enc, w);
    }
    bool four = error[1] < error[0];
    q[0] = four ? codes[1][0] : codes[0][0], q[1] = four ? codes[1][1] : codes[0][1];
    return four ? e[1] : e[0];
}

static __device__ __forceinline__ cell choose_codes(uint32_t q[4], const job &j, const side &s,
                                                    const level &l, uint32_t magnitude,
                                                    const uint32_t w[8], bool nans)
{
    cell e = is_in_range(l.amax) ? choose<true>(q, j, s, l, magnitude, w)
                                 : choose<false>(q, j, s, l, magnitude, w);
    q[0] |= nibble_signs(w, nans), q[1] |= nibble_signs(w + 4, nans);
    return e;
}

/* Codes and scale of a segment of a block with this magnitude. FOUR: under 4over6. */
template <int KIND, bool SR, bool FOUR>
static __device__ __forceinline__ cell make_segment(uint32_t q[4], const job &j, const side &s,
                                                    const level &l, uint32_t magnitude,
                                                    const uint32_t w[8], const uint32_t random[8],
                                                    bool nans)
{
    float enc[SEGMENT];
    if (FOUR && s.options.four_over_six) return choose_codes(q, j, s, l, magnitude, w, nans);
    cell e = cell_at<KIND>(j, s, l, magnitude);
#pragma unroll
    for (int i = 0; i < SEGMENT; i++) enc[i] = e.enc;
    encode_segment<KIND, SR>(q, s, w, enc, random, nans);
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

/* ---- rows -------------------------------------------------------------------------------------
 */

/* Stores codes of segment `at` of a row. Whole warps come here. */
template <int KIND>
static __device__ __forceinline__ void put_row(const target &to, const tile &t, int r, int at,
                                               const uint32_t q[4])
{
    enum { HALF = kind<KIND>::HALF };
    uint8_t *p = to.codes + r * to.pitch + (at * SEGMENT >> HALF);
    if (!to.even) {
        packed codes = { { q[0], q[1], q[2], q[3] } };
        put_codes_at(p, codes, r < t.rows, at, t.cols, HALF);
    } else if (r < t.rows && at * SEGMENT < t.cols) {
        if (HALF)
            *(uint2 *)p = make_uint2(q[0], q[1]);
        else
            store_16(p, q[0], q[1], q[2], q[3]);
    }
}

/* Magnitudes of the blocks of 32 rows of two columns: their scales, and what they are multiplied
 * by. */
template <int KIND>
static __device__ __forceinline__ void measure_planar(const job &j, short_space *sp, const frame &f,
                                                      const uint32_t *words)
{
    const side &s = j.p.sides[MT_COL];
    const target &to = f.to[MT_COL];
    const int pair = (int)threadIdx.x % PAIRS, block = (int)threadIdx.x / PAIRS;
    const uint32_t m = pair_magnitudes(words, pair, block);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int c = pair * 2 + i;
        cell e = cell_at<KIND>(j, s, to.l, m >> 16 * i & 0xffff);
        sp->planar[planar_group(block, c >> 2) + (c & 3)] = e.enc;
        if (c < f.t.cols && block * 32 < f.t.rows) put_stored(s, to, e, c, block);
    }
}

/* Codes that lie in rows: of the row direction, and of planar columns. */
template <int KIND, bool SR, bool FOUR>
static __device__ __forceinline__ void run_rows(const job &j, short_space *sp, const frame &f,
                                                const uint32_t *words, const uint32_t *random,
                                                uint32_t *most, int *nans)
{
    const side &s = j.p.sides[MT_ROW], &col = j.p.sides[MT_COL];
    const bool planar = kind<KIND>::IS_PLANAR && col.present;
    const int at = (int)threadIdx.x % SEGMENTS, rows = f.t.rows;
#pragma unroll 2
    for (int r = (int)threadIdx.x / SEGMENTS; r - r % 4 < rows; r += TILE_THREADS / SEGMENTS) {
        uint32_t w[8], bits[8] = {}, q[4];
        get_chunks(w, words, r, at);
        if (SR) get_chunks(bits, random, r, at);
        int before = *nans;
        uint32_t m = segment_magnitude(w, nans);
        raise(most, m);
        if (s.present) {
            if (KIND == LINES || kind<KIND>::IS_PLANAR) {
                uint32_t other = __shfl_xor_sync(~0u, m, 1);
                m = other > m ? other : m;
            }
            if (KIND == LINES) {
#pragma unroll
                for (int lane = 2; lane < SEGMENTS; lane *= 2) {
                    uint32_t other = __shfl_xor_sync(~0u, m, lane);
                    m = other > m ? other : m;
                }
            }
            cell e =
                make_segment<KIND, SR, FOUR>(q, j, s, f.to[MT_ROW].l, m, w, bits, *nans > before);
            if (KIND != WHOLE && (at * SEGMENT & ((1 << s.block_shift) - 1)) == 0 && r < rows &&
                at * SEGMENT < f.t.cols)
                put_stored(s, f.to[MT_ROW], e, r, at * SEGMENT >> s.block_shift);
            put_row<KIND>(f.to[MT_ROW], f.t, r, at, q);
        }
        if (planar) {
            float enc[SEGMENT];
#pragma unroll
            for (int i = 0; i < SEGMENT; i += 4) {
                float4 g = *(const float4 *)(sp->planar + planar_group(r / 32, at * 4 + i / 4));
                enc[i] = g.x, enc[i + 1] = g.y, enc[i + 2] = g.z, enc[i + 3] = g.w;
            }
            encode_segment<KIND, SR>(q, col, w, enc, bits, *nans > before);
            put_row<KIND>(f.to[MT_COL], f.t, r, at, q);
        }
    }
}

/* ---- columns ----------------------------------------------------------------------------------
 */

/* Sixteen tokens of a column rotated, rounded to bf16 (rht). */
static __device__ __forceinline__ void rotate_segment(uint32_t w[8], uint32_t mask)
{
    float v[SEGMENT], y[SEGMENT];
#pragma unroll
    for (int i = 0; i < SEGMENT; i++) v[i] = element_of(w, i) * (mask >> i & 1 ? -0.25f : 0.25f);
#pragma unroll
    for (int k = 0; k < SEGMENT; k++) {
        y[k] = 0;
#pragma unroll
        for (int i = 0; i < SEGMENT; i++) {
            bool minus = ((i & k) ^ (i & k) >> 1 ^ (i & k) >> 2 ^ (i & k) >> 3) & 1;
            y[k] = minus ? y[k] - v[i] : y[k] + v[i];
        }
    }
#pragma unroll
    for (int i = 0; i < SEGMENT; i += 2) w[i / 2] = bf16_pair(y[i], y[i + 1]);
}

/* Lines of codes to where they go: in chunks from the first multiple of 16 on, bytes around them.
 */
template <int KIND>
static __device__ __forceinline__ void put_lines(const uint32_t *lines, const target &to, int cols,
                                                 int rows)
{
    enum { HALF = kind<KIND>::HALF, PITCH = kind<KIND>::PITCH, LANES = TILE / 16 >> HALF };
    const int bytes = (rows + HALF) >> HALF;
    uint8_t *const codes = to.codes;
    const int64_t pitch = to.pitch;
#pragma unroll 2
    for (int i = threadIdx.x; i < cols * LANES; i += TILE_THREADS) {
        int c = i / LANES, at = i % LANES * 16;
        uint8_t *p = codes + c * pitch;
        int head = (int)(0 - (uintptr_t)p & 15), first = head + at, up = head % 4 * 8;
        if (first + 16 > bytes) continue;
        const uint32_t *w = lines + c * PITCH + first / 4;
        store_16(p + first, __funnelshift_r(w[0], w[1], up), __funnelshift_r(w[1], w[2], up),
                 __funnelshift_r(w[2], w[3], up), __funnelshift_r(w[3], w[4], up));
    }
    if (to.even) return;
    for (int i = threadIdx.x; i < cols * 16; i += TILE_THREADS) {
        int c = i / 16, b = i % 16;
        uint8_t *p = codes + c * pitch;
        const uint8_t *from = (const uint8_t *)(lines + c * PITCH);
        int head = (int)(0 - (uintptr_t)p & 15),
            tail = head + (bytes > head ? (bytes - head) & ~15 : 0);
        if (b < head && b < bytes) p[b] = from[b];
        if (tail + b < bytes) p[tail + b] = from[tail + b];
    }
}

/* Codes that lie in columns; again: the rows have been measured. The whole thread block comes here;
 * the tile's words are used up. */
template <int KIND, bool SR, bool FOUR>
static __device__ __forceinline__ void run_columns(const job &j, short_space *sp, const frame &f,
                                                   uint32_t *words, const uint32_t *random,
                                                   bool again, found *it)
{
    enum { HALF = kind<KIND>::HALF, WORDS = kind<KIND>::WORDS, PITCH = kind<KIND>::PITCH };
    const side &s = j.p.sides[MT_COL];
    const target &to = f.to[MT_COL];
    const int pair = (int)threadIdx.x % PAIRS, part = (int)threadIdx.x / PAIRS;
    const bool rotated = KIND == NIBBLES && s.options.rht;
    uint32_t q[2][2][4];
    if (KIND == LINES) {
        sp->partial[part][pair] = pair_magnitudes(words, pair, part);
        __syncthreads();
    }
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const int at = part + n * (TILE_THREADS / PAIRS);
        uint32_t v[SEGMENT], bits[SEGMENT] = {};
#pragma unroll
        for (int i = 0; i < SEGMENT; i++) {
            v[i] = words[pair_place(at * SEGMENT + i, pair)];
            if (SR) bits[i] = random[pair_place(at * SEGMENT + i, pair)];
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint32_t w[8], r[8];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                w[i] = __byte_perm(v[i * 2], v[i * 2 + 1], h ? 0x7632 : 0x5410);
                r[i] = SR ? __byte_perm(bits[i * 2], bits[i * 2 + 1], h ? 0x7632 : 0x5410) : 0;
            }
            int nans = 0;
            uint32_t m = again && rotated ? 0 : segment_magnitude(w, &nans);
            if (!again) it->nans += nans, raise(&it->most[MT_ROW], m);
            if (rotated) {
                if (at * SEGMENT + SEGMENT <= f.t.rows) rotate_segment(w, s.options.rht_mask);
                nans = 0, m = segment_magnitude(w, &nans);
            }
            raise(&it->most[MT_COL], m);
            if (KIND == LINES) {
#pragma unroll
                for (int k = 0; k < TILE / 32; k++) {
                    uint32_t other = sp->partial[k][pair] >> 16 * h & 0xffff;
                    m = other > m ? other : m;
                }
            }
            cell e = make_segment<KIND, SR, FOUR>(q[n][h], j, s, to.l, m, w, r, nans > 0);
            if (KIND == NIBBLES) sp->scales[(pair * 2 + h) * SEGMENTS + at] = e.stored;
            if (KIND == LINES && at == 0 && pair * 2 + h < f.t.cols)
                put_stored(s, to, e, pair * 2 + h, 0);
        }
    }
    __syncthreads(); /* the words have been read */
    if (!j.codes) return;
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int i = 0; i < WORDS; i++)
                words[(pair * 2 + h) * PITCH + (part + n * (TILE_THREADS / PAIRS)) * WORDS + i] =
                    q[n][h][i];
    __syncthreads();
    put_lines<KIND>(words, to, f.t.cols, f.t.rows);
    for (int i = threadIdx.x; KIND == NIBBLES && i < f.t.cols * SEGMENTS; i += TILE_THREADS)
        if (i % SEGMENTS * SEGMENT < f.t.rows)
            to.scales.at[scale_offset(to.scales, i / SEGMENTS, i % SEGMENTS)] = sp->scales[i];
}

/* ---- the kernel -------------------------------------------------------------------------------
 */

static __device__ __forceinline__ void give_found(const job &j, const tile &t, found *it)
{
#pragma unroll
    for (int dir = 0; dir < MT_DIR_COUNT; dir++)
        if (j.measure[dir])
            raise_amax(j.amax[dir] + t.index, mt_f32_from_bits(it->most[dir] << 16));
    raise_nans(j, t.index, it->nans);
    *it = found{};
}

template <int KIND, bool SR, bool FOUR>
static __device__ __forceinline__ void run_frame(const job &j, short_space *sp, const frame &f,
                                                 uint32_t *words, uint32_t *random, found *it)
{
    const side &row = j.p.sides[MT_ROW], &col = j.p.sides[MT_COL];
    const bool planar = kind<KIND>::IS_PLANAR && col.present;
    const bool rows = j.codes && (row.present || planar);
    if (SR && j.codes) draw_tile_bits(random, j, f.t);
    if (j.codes && j.sums) sum_pairs(j, words, f.t);
    if (planar) measure_planar<KIND>(j, sp, f, words);
    if ((SR && j.codes) || planar) __syncthreads();
    if (rows) {
        uint32_t most = 0;
        run_rows<KIND, SR, FOUR>(j, sp, f, words, random, &most, &it->nans);
        raise(&it->most[MT_ROW], most);
        if (planar) raise(&it->most[MT_COL], most);
    }
    if (!kind<KIND>::IS_PLANAR && col.present)
        run_columns<KIND, SR, FOUR>(j, sp, f, words, random, rows, it);
}

/* The block that is done last gives the members' results. */
static __device__ __forceinline__ void end_block(const job &j)
{
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(j.blocks_done, 1ull) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (int64_t i = threadIdx.x; i < j.p.group.members; i += TILE_THREADS) give_results(j, i);
}

template <int KIND, bool SR, bool FOUR>
static __global__ void __launch_bounds__(TILE_THREADS, SR || FOUR ? 2 : 3)
    short_kernel(const __grid_constant__ job j)
{
    extern __shared__ uint4 mt_shared[];
    short_space *sp = (short_space *)mt_shared;
    uint32_t *random = (uint32_t *)(sp + 1);
    const int64_t units = j.p.units[j.p.group.members];
    const int warp = (int)threadIdx.x / 32;
    found it = {};
    if (warp < 2 && blockIdx.x + warp * gridDim.x < units)
        find_frame(&sp->frames[warp], j, blockIdx.x + (int64_t)warp * gridDim.x);
    __syncthreads();
    if (blockIdx.x < units) load_tile(sp->tiles[0], sp->frames[0]);
    int n = 0, k = 0; /* frames[k] is that of the tile in tiles[n & 1] */
    for (int64_t u = blockIdx.x; u < units; u += gridDim.x, n++) {
        const frame &f = sp->frames[k], &next = sp->frames[k == 2 ? 0 : k + 1];
        const bool more = u + gridDim.x < units;
        copies_done();
        __syncthreads(); /* the tile is there, and the next frame; the last tile is done with */
        if (more) load_tile(sp->tiles[~n & 1], next);
        if (warp == n % WARPS && u + 2 * (int64_t)gridDim.x < units)
            find_frame(&sp->frames[k == 0 ? 2 : k - 1], j, u + 2 * (int64_t)gridDim.x);
        run_frame<KIND, SR, FOUR>(j, sp, f, sp->tiles[n & 1], random, &it);
        if (!more || next.t.index != f.t.index) give_found(j, f.t, &it);
        k = k == 2 ? 0 : k + 1;
    }
    if (j.codes) end_block(j);
}

/* ---- the host's part --------------------------------------------------------------------------
 */

/* Whether codes of a direction are drawn (sr), or chosen (4over6). */
static bool any_option(const job *j, bool sr)
{
    bool any = false;
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
        const mt_format_options *o = &j->p.sides[dir].options;
        any |= j->codes && j->p.sides[dir].present && (sr ? o->sr : o->four_over_six > 0);
    }
    return any;
}

/* The kind of a direction, KINDS where there is none. */
static int kind_of(const side *s)
{
    bool nibbles = s->options.element == MT_ELEMENT_E2M1;
    if (!mt_is_short(*s) || s->square) return KINDS;
    if (s->options.sr || s->options.rht) return s->scale == MT_SCALE_E4M3 ? NIBBLES : KINDS;
    if (s->scale == MT_SCALE_E4M3) return NIBBLES;
    if (s->scale == MT_SCALE_E8M0) return nibbles ? PLANAR_NIBBLES : PLANAR;
    return s->whole ? WHOLE : LINES;
}

static int kind_of_job(const job *j)
{
    const side *source = &j->p.sides[SOURCE];
    int of = KINDS;
    if (!source->plain || source->dtype != MT_BF16 || j->dequantized) return KINDS;
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
        const side *s = &j->p.sides[dir];
        if (!s->present) continue;
        int k = kind_of(s);
        if (k == KINDS || !j->write[dir] || (of != KINDS && of != k)) return KINDS;
        of = k;
    }
    return any_option(j, true) && any_option(j, false) ? KINDS : of;
}

bool mt_cuda_short_suffices(const job *j)
{
    return kind_of_job(j) != KINDS;
}

template <int KIND, bool SR, bool FOUR> static mt_status launch(mt_stream *stream, const job *j)
{
    size_t bytes = sizeof(short_space) + (SR ? AREA * sizeof(uint16_t) : 0);
    int64_t units = mt_cuda_plan_units(&j->p.group);
    int64_t most = (int64_t)mt_cuda_multiprocessors(stream) * (SR || FOUR ? 2 : 3);
    MT_CUDA(cudaFuncSetAttribute(short_kernel<KIND, SR, FOUR>,
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    short_kernel<KIND, SR, FOUR>
        <<<(unsigned)(units < most ? units : most), TILE_THREADS, bytes, mt_cuda_stream(stream)>>>(
            *j);
    MT_LAUNCHED(stream, "quantize: bf16");
    return MT_OK;
}

mt_status mt_cuda_quantize_short(mt_stream *stream, const job *j)
{
    static mt_status (*const launches[KINDS])(mt_stream *, const job *) = {
        launch<WHOLE, false, false>, launch<LINES, false, false>, launch<PLANAR, false, false>,
        launch<NIBBLES, false, false>, launch<PLANAR_NIBBLES, false, false>
    };
    if (any_option(j, true)) return launch<NIBBLES, true, false>(stream, j);
    if (any_option(j, false)) return launch<NIBBLES, false, true>(stream, j);
    return launches[kind_of_job(j)](stream, j);
}
