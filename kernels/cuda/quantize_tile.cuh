/* One direction of a tile: amaxes, scales, codes. */
#pragma once

#include "kernels/cuda/quantize_ways.cuh"

/* What there is one of per member, where it goes; NULL: not wanted. */
struct results {
    float *amax[MT_DIR_COUNT], *running[MT_DIR_COUNT];
    bool scales[MT_DIR_COUNT]; /* the one of the member is stored */
    int64_t *nan, *running_nan;
    const unsigned long long *nans;
};

/* What the kernels of a call know; by value. */
struct job {
    plan p;
    mt_codec e4m3;
    const float *scale[MT_DIR_COUNT]; /* of a delayed format */
    float *amax[MT_DIR_COUNT];        /* of members; raised by sweeps that measure */
    unsigned long long *nans;         /* of members; NULL: not counted in this sweep */
    float *sums;                      /* column sums of 128 rows of a member; NULL: not wanted */
    uint32_t key[2], step, first_member, first_row;
    const uint32_t *first_step; /* NULL: 0 */
    bool write[MT_DIR_COUNT];   /* the direction is in `out` and not the source's own bytes */
    bool measure[MT_DIR_COUNT]; /* gather members' amaxes */
    bool codes;                 /* write codes, scales, and the bias gradient's parts */
    results out;
    unsigned long long *blocks_done; /* begins at 0: kernels that give the results at their end */
    bool dequantized;                /* the column direction reads the row direction's values */
    int run;                         /* turns of a block that go down a column; 1: along the rows */
    const int32_t *row_token;        /* rows of the source are gathered; NULL: in place */
    const float *row_weight;         /* and weighted; NULL: not */
    const int64_t *rows_used;        /* with it: how many there are */
    bool swiglu;                     /* they are the SwiGLU of the source's, twice as wide */
    const mt_bf16 *z;                /* they are its gradient, the source's half as wide; NULL */
    const mt_bf16 *da; /* with it: a sweep that measures makes the source of it, as it lies; NULL */
    float *dots;       /* with z: of rows [rows, parts] (dots.cuh); NULL: not wanted */
    strip_table table; /* of strips, for quantize_bytes.cu */
    bool gives;        /* the sweep over codes raises results of members, which the plan begins */
    int shared;        /* bytes of shared memory that a thread block may have */
};

enum {
    CELLS = AREA / (SEGMENT * SEGMENT), /* square ones, at most */
    PLANAR_BLOCKS = 4                   /* scale blocks of 32 rows in a tile */
};

/* Scale of a block: what values are multiplied by, what codes are, what is stored. */
struct cell {
    float enc, dec;
    uint8_t stored;
};

/* Shared memory of a thread block. */
struct space {
    float x[AREA];
    float planar[PLANAR_BLOCKS * TILE]; /* enc of column blocks whose codes lie in rows */
    int32_t cell_amax[CELLS];
    cell cells[CELLS];
    level levels[SIDES];
    tile tiles[2];                                /* this one and the next */
    alignas(16) float errors[2][TILE * SEGMENTS]; /* square cells under 4over6: of segments; hard
                                                     kernels only */
};
/* Behind it where a direction rounds stochastically, and a block may have so much: the 16 bits of
 * every element. */

#include "kernels/cuda/quantize_draws.cuh"

/* ---- amax and scales --------------------------------------------------------------------------
 */

/* The largest magnitude; NaN never wins. */
static __device__ __forceinline__ float amax_of(const float v[SEGMENT])
{
    float most = 0;
#pragma unroll
    for (int i = 0; i < SEGMENT; i++) most = fmaxf(most, fabsf(v[i]));
    return most;
}

/* Over the threads that hold a block of a line. */
static __device__ __forceinline__ float block_amax(float amax, int block_shift)
{
    if (block_shift > 4) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 1));
    if (block_shift > 5) {
        amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 2));
        amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 4));
    }
    return amax;
}

static __device__ __forceinline__ cell nvfp4_cell(const job &j, const level &l, float wanted)
{
    cell e;
    e.stored = (uint8_t)mt_encode_number(j.e4m3, wanted); /* the cast saturates */
    e.dec = mt_decode_number(j.e4m3, e.stored) * l.s_dec;
    e.enc = mt_nvfp4_encode(e.dec);
    return e;
}

static __device__ __forceinline__ cell cell_of(const job &j, const side &s, const level &l,
                                               float amax)
{
    cell e = { l.enc, l.dec, 0 };
    if (s.scale == MT_SCALE_E4M3) return nvfp4_cell(j, l, amax * l.g);
    if (s.scale == MT_SCALE_E8M0) {
        int32_t exponent = mt_e8m0_exponent(amax, s.inverse, s.emax, s.options.scale_floor);
        e.enc = mt_e8m0_scale(254 - exponent);
        e.dec = mt_e8m0_scale(exponent);
        e.stored = (uint8_t)exponent;
    } else if (!s.whole) {
        e.enc = mt_encode_scale(amax, s.max, s.options.pow2, s.overflow);
        e.dec = 1.0f / e.enc;
    }
    return e;
}

/* ---- casts ------------------------------------------------------------------------------------
 */

/* A cast of a product. */
static __device__ __forceinline__ uint32_t encode_product(const mt_codec &c, float y)
{
#if defined(__CUDA_ARCH__)
    /* The NaN of a product has no sign: where NaN becomes the largest code, saturation does it. */
    if (c.nan_code == c.max_code) return (uint32_t)mt_encode_number(c, y);
#endif
    return (uint32_t)mt_encode(c, y);
}

/* Codes of products y, rounded stochastically where there are bits. */
template <bool SR>
static __device__ __forceinline__ packed encode(const side &s, const float y[SEGMENT],
                                                const int32_t bits[SEGMENT])
{
    packed q = {};
    if (MT_NATIVE_FP8(s) && !(SR && s.options.sr)) {
#pragma unroll
        for (int i = 0; i < SEGMENT; i += 2)
            q.words[i / 4] |= native_pair(s.options.element, y[i], y[i + 1]) << i % 4 * 8;
        return q;
    }
    uint32_t codes[SEGMENT];
#pragma unroll
    for (int i = 0; i < SEGMENT; i++)
        codes[i] = SR && s.options.sr ? (uint32_t)mt_encode_stochastic(s.codec, y[i], bits[i])
                                      : encode_product(s.codec, y[i]);
    if (s.codes_per_byte == 1) {
#pragma unroll
        for (int i = 0; i < SEGMENT; i++) q.words[i / 4] |= codes[i] << i % 4 * 8;
    } else {
#pragma unroll
        for (int i = 0; i < SEGMENT; i++) q.words[i / 8] |= codes[i] << i % 8 * 4;
    }
    return q;
}

template <bool SR>
static __device__ __forceinline__ packed encode_scaled(const side &s, const float v[SEGMENT],
                                                       float enc, const int32_t bits[SEGMENT])
{
    float y[SEGMENT];
#pragma unroll
    for (int i = 0; i < SEGMENT; i++) y[i] = v[i] * enc;
    return encode<SR>(s, y, bits);
}

/* ---- 4over6 -----------------------------------------------------------------------------------
 */

/* The sum of |RN(RN(RN(q sf) A) / (6 bound)) - x|, or of squares, in order. */
template <bool SR>
static __device__ __forceinline__ float candidate_error(const job &j, const side &s, const level &l,
                                                        const cell &e, const float v[SEGMENT],
                                                        const int32_t bits[SEGMENT])
{
    packed q = encode_scaled<SR>(s, v, e.enc, bits);
    float sf = mt_decode_number(j.e4m3, e.stored), range = 6.0f * (float)s.options.four_over_six;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < SEGMENT; i++) {
        float value = mt_decode_number(s.codec, (uint8_t)code_of(q, i, 2)) * sf;
        float d = fabsf(value * l.amax / range - v[i]);
        sum += s.options.squared_error ? d * d : d;
    }
    return sum;
}

/* The candidates of a block: its amax maps to 6, or to 4. */
struct candidates {
    cell six, four;
};

static __device__ __forceinline__ candidates candidates_of(const job &j, const level &l, float amax)
{
    float base = amax / 6.0f * l.s_enc;
    return candidates{ nvfp4_cell(j, l, base), nvfp4_cell(j, l, base * 1.5f) };
}

template <bool SR>
static __device__ __forceinline__ cell four_over_six(const job &j, const side &s, const level &l,
                                                     float amax, const float v[SEGMENT],
                                                     const int32_t bits[SEGMENT])
{
    candidates c = candidates_of(j, l, amax);
    float six = candidate_error<SR>(j, s, l, c.six, v, bits);
    float four = candidate_error<SR>(j, s, l, c.four, v, bits);
    return four < six ? c.four : c.six; /* NaN keeps 6 */
}

/* ---- square cells -----------------------------------------------------------------------------
 */

/* 4over6 by errors of rows of a cell in order, then of these sums in order. */
template <bool SR>
static __device__ void square_errors(const job &j, space *sp, const source_of_bits &random,
                                     const side &s, const level &l, const tile &t)
{
    MT_SEGMENTS(segment, TILE)
    {
        int r = segment / SEGMENTS, at = segment % SEGMENTS;
        float v[SEGMENT];
        int32_t bits[SEGMENT] = {};
        sp->errors[0][segment] = sp->errors[1][segment] = 0;
        if (r >= t.rows) continue;
        get_segment<MT_ROW>(v, sp->x, r, at);
        if (SR) get_random<MT_ROW>(bits, random, r, at);
        candidates c =
            candidates_of(j, l, mt_from_bits(sp->cell_amax[r / SEGMENT * SEGMENTS + at]));
        sp->errors[0][segment] = candidate_error<SR>(j, s, l, c.six, v, bits);
        sp->errors[1][segment] = candidate_error<SR>(j, s, l, c.four, v, bits);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < CELLS; i += TILE_THREADS) {
        float sums[2] = { 0, 0 };
        int first = i / SEGMENTS * SEGMENT * SEGMENTS + i % SEGMENTS;
        for (int r = 0; r < SEGMENT; r++)
            for (int k = 0; k < 2; k++) sums[k] += sp->errors[k][first + r * SEGMENTS];
        candidates c = candidates_of(j, l, mt_from_bits(sp->cell_amax[i]));
        sp->cells[i] = sums[1] < sums[0] ? c.four : c.six;
    }
}

/* Amaxes of a tile's square cells. The whole thread block comes here. */
static __device__ __forceinline__ void find_cells(const float *x, int32_t cell_amax[CELLS],
                                                  const side &s, const tile &t)
{
    int across = TILE >> s.block_shift;
    __syncthreads(); /* cells of the other direction are no longer read; x is written */
    for (int i = threadIdx.x; i < CELLS; i += TILE_THREADS) cell_amax[i] = 0;
    __syncthreads();
    MT_SEGMENTS(segment, t.rows)
    {
        int r = segment / SEGMENTS, at = segment % SEGMENTS;
        float v[SEGMENT];
        get_segment<MT_ROW>(v, x, r, at);
        atomicMax(&cell_amax[(r >> s.block_shift) * across + (at * SEGMENT >> s.block_shift)],
                  mt_bits(amax_of(v)));
    }
    __syncthreads();
}

/* sp->cells of a side whose scale blocks are square. The whole thread block comes here. */
template <bool SR>
static __device__ void make_cells(const job &j, space *sp, const source_of_bits &random,
                                  const side &s, const level &l, const tile &t)
{
    int across = TILE >> s.block_shift;
    find_cells(sp->x, sp->cell_amax, s, t);
    if (s.options.four_over_six) {
        square_errors<SR>(j, sp, random, s, l, t);
    } else {
        for (int i = threadIdx.x; i < across * across; i += TILE_THREADS)
            sp->cells[i] = cell_of(j, s, l, mt_from_bits(sp->cell_amax[i]));
    }
    __syncthreads();
}

/* ---- a direction ------------------------------------------------------------------------------
 */

/* Where a direction's parts of a tile go. */
struct output {
    shape p;
    uint8_t *codes, *scales; /* of the member */
    int64_t line0, along0;
    int lines, length;
};

template <int DIR> static __device__ __forceinline__ output output_of(const side &s, const tile &t)
{
    output o;
    o.p = shape_of(s, t.m.rows, t.m.cols);
    o.codes = s.codes + t.m.at[AT_CODES + DIR];
    o.scales = s.scales + t.m.at[AT_SCALES + DIR] * (s.scale == MT_SCALE_F32 ? 4 : 1);
    o.line0 = DIR == MT_ROW ? t.r0 : t.c0, o.along0 = DIR == MT_ROW ? t.c0 : t.r0;
    o.lines = DIR == MT_ROW ? t.rows : t.cols, o.length = DIR == MT_ROW ? t.cols : t.rows;
    return o;
}

/* Stores the scale of the block that begins at a segment, if one does. */
static __device__ __forceinline__ void put_scale(const side &s, const output &o, const cell &e,
                                                 int line, int at)
{
    if (line >= o.lines || at * SEGMENT >= o.length) return;
    if ((at * SEGMENT & ((1 << s.block_shift) - 1)) || (s.shared && line > 0)) return;
    int64_t i = s.shared ? o.line0 >> s.block_shift : o.line0 + line;
    int64_t place = scale_place(s, o.p, i, (o.along0 + at * SEGMENT) >> s.block_shift);
    if (s.scale == MT_SCALE_F32)
        ((float *)o.scales)[place] = e.dec;
    else
        o.scales[place] = e.stored;
}

/* The words of a segment where the line does not begin at a multiple of four: each word takes the
 * last bytes of the one before it (`before`: that of the thread before). `first`, `last`: no thread
 * writes the other part of the word that the segment begins, ends in. */
static __device__ __forceinline__ void put_shifted(uint8_t *p, const packed &q, int words,
                                                   uint32_t before, bool first, bool last)
{
    int k = (int)((uintptr_t)p & 3), up = 8 * k;
    uint32_t *to = (uint32_t *)(p - k);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (i >= words) break;
        uint32_t w = q.words[i] << up | before >> (32 - up);
        before = q.words[i];
        if (i > 0 || !first) {
            to[i] = w;
            continue;
        }
#pragma unroll
        for (int b = 1; b < 4; b++)
            if (b >= k) p[b - k] = (uint8_t)(w >> b * 8);
    }
    if (!last) return;
#pragma unroll
    for (int b = 0; b < 3; b++)
        if (b < k) ((uint8_t *)(to + words))[b] = (uint8_t)(before >> (32 - up) >> b * 8);
}

/* Stores the codes of segment `at` of a line, at p, if the line `exists`. Whole warps come here. */
static __device__ __forceinline__ void put_codes_at(uint8_t *p, const packed &q, bool exists,
                                                    int at, int length, int half)
{
    int n = codes_in(length, at);
    uint32_t before = __shfl_up_sync(~0u, half ? q.words[1] : q.words[3], 1);
    if (!exists || n == 0) return;
    if (n == SEGMENT && (uintptr_t)p % 4)
        put_shifted(p, q, 4 >> half, before, at == 0,
                    at + 1 == SEGMENTS || codes_in(length, at + 1) < SEGMENT);
    else
        put_packed(p, q, (int)shift_up(n, half));
}

static __device__ __forceinline__ void put_codes(const side &s, const output &o, const packed &q,
                                                 int line, int at, int lines, int length,
                                                 int64_t line0, int64_t along0)
{
    int half = s.codes_per_byte - 1;
    uint8_t *p =
        o.codes + (line0 + line) * o.p.pitch + along0 / TILE * o.p.tile + (at * SEGMENT >> half);
    put_codes_at(p, q, line < lines, at, length, half);
}

/* enc of column c in block b of a planar direction, places as those of values. */
static __device__ __forceinline__ int planar_group(int b, int group)
{
    return b * TILE + (group ^ group >> 3) * 4;
}

/* x = the values of a segment's codes, for a decoded direction. dec: of the block, without the
 * member's scale. */
template <int DIR>
static __device__ __forceinline__ void put_decoded(float *x, const side &s, const packed &q,
                                                   const float dec[SEGMENT], int line, int at)
{
    float v[SEGMENT];
    values_of(v, s, q);
#pragma unroll
    for (int i = 0; i < SEGMENT; i++) v[i] = scaled(v[i], dec[i]);
    put_segment<DIR>(x, v, line, at);
}

/* What codes of a cell are multiplied by, without the member's scale. */
static __device__ __forceinline__ float bare_dec(const job &j, const side &s, const cell &e)
{
    if (s.scale == MT_SCALE_E4M3) return mt_decode_number(j.e4m3, e.stored);
    return s.whole ? 1.0f : e.dec;
}

/* Row codes of a direction whose scale blocks run along columns: sp->planar has the scales. */
template <bool SR, bool HARD>
static __device__ __forceinline__ void encode_planar(space *sp, const source_of_bits &random,
                                                     const side &s, const output &o, const tile &t)
{
    MT_SEGMENTS(segment, t.rows)
    {
        int r = segment / SEGMENTS, at = segment % SEGMENTS;
        float v[SEGMENT];
        int32_t bits[SEGMENT] = {};
        get_segment<MT_ROW>(v, sp->x, r, at);
        if (SR && s.options.sr) get_random<MT_ROW>(bits, random, r, at);
        float dec[SEGMENT];
#pragma unroll
        for (int i = 0; i < SEGMENT; i += 4) {
            float4 enc = *(const float4 *)(sp->planar + planar_group(r / 32, at * 4 + i / 4));
            v[i] *= enc.x, v[i + 1] *= enc.y, v[i + 2] *= enc.z, v[i + 3] *= enc.w;
            dec[i] = enc.x, dec[i + 1] = enc.y, dec[i + 2] = enc.z, dec[i + 3] = enc.w;
        }
        packed q = encode<SR>(s, v, bits);
        if (HARD && s.decoded) {
#pragma unroll
            for (int i = 0; i < SEGMENT; i++) dec[i] = 1.0f / dec[i]; /* powers of two: exact */
            put_decoded<MT_ROW>(sp->x, s, q, dec, r, at);
        } else {
            put_codes(s, o, q, r, at, t.rows, t.cols, t.r0, t.c0);
        }
    }
}

/* Raises the member's amax by what the threads of a block found. */
static __device__ __forceinline__ void raise_amax(float *amax, float most)
{
    for (int lane = 16; lane; lane >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, lane));
    if (threadIdx.x % 32 == 0 && most > 0) atomicMax((int *)amax, mt_bits(most));
}

/* The same for NaNs, where they are counted. */
static __device__ __forceinline__ void raise_nans(const job &j, int64_t member, int nans)
{
    if (!j.nans) return;
    for (int lane = 16; lane; lane >>= 1) nans += __shfl_xor_sync(~0u, nans, lane);
    if (threadIdx.x % 32 == 0 && nans) atomicAdd(j.nans + member, (unsigned long long)nans);
}

/* What the warps of a block found of a member, in shared memory: one block raises the member's
 * values once, or all of its warps would wait for each other at one address. Two of them are used
 * in turn; of one, warps give between two barriers, and one thread passes on after the second. */
struct block_found {
    int most[MT_DIR_COUNT], nans; /* the bits of amaxes */
};

static __device__ __forceinline__ void give_block(block_found *to, const job &j,
                                                  const uint32_t most[MT_DIR_COUNT], int nans)
{
#pragma unroll
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
        if (!j.measure[dir]) continue;
        uint32_t bits = __reduce_max_sync(~0u, most[dir]);
        if (threadIdx.x % 32 == 0 && bits) atomicMax(&to->most[dir], (int)bits);
    }
    if (!j.nans) return;
    nans = __reduce_add_sync(~0u, nans);
    if (threadIdx.x % 32 == 0 && nans) atomicAdd(&to->nans, nans);
}

static __device__ __forceinline__ void pass_on(block_found *from, const job &j, int64_t member)
{
    for (int dir = 0; dir < MT_DIR_COUNT; dir++)
        if (j.measure[dir] && from->most[dir])
            atomicMax((int *)j.amax[dir] + member, from->most[dir]);
    if (j.nans && from->nans) atomicAdd(j.nans + member, (unsigned long long)from->nans);
    *from = block_found{};
}

/* The results of member i, of whose source these are the amaxes and the NaNs. */
static __device__ __forceinline__ void give_member(const job &j, int64_t i,
                                                   const float most[MT_DIR_COUNT], int64_t nans)
{
    const results &out = j.out;
#pragma unroll
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
        const side &s = j.p.sides[dir];
        const float amax = most[dir];
        if (out.amax[dir]) out.amax[dir][i] = amax;
        if (out.running[dir] && amax > out.running[dir][i]) out.running[dir][i] = amax;
        if (out.scales[dir])
            ((float *)s.scales)[i] =
                member_level(s, amax, j.scale[dir] ? j.scale[dir] + i : NULL).dec;
    }
    if (out.nan) out.nan[i] = nans;
    if (out.running_nan) out.running_nan[i] += nans;
}

/* Other blocks have raised them: not from the nearer cache. */
static __device__ __forceinline__ void give_results(const job &j, int64_t i)
{
    const float most[MT_DIR_COUNT] = { __ldcg(j.amax[MT_ROW] + i), __ldcg(j.amax[MT_COL] + i) };
    give_member(j, i, most, (int64_t)__ldcg(j.out.nans + i));
}

/* Measures a direction, makes its codes (`make`) and stores them (`write`). HARD: square blocks,
 * 4over6 and values for the column direction are in the code. */
template <int DIR, bool SR, bool HARD>
static __device__ __forceinline__ void run_direction(const job &j, space *sp,
                                                     const source_of_bits &random, const tile &t,
                                                     bool make, bool write)
{
    const side &s = j.p.sides[DIR];
    const level l = sp->levels[DIR];
    const output o = output_of<DIR>(s, t);
    bool planar = DIR == MT_COL && !s.transposed && !s.plain;
    bool decode = HARD && DIR == MT_ROW && j.dequantized, square = HARD && s.square && make;
    float most = 0;
    if (square) make_cells<SR>(j, sp, random, s, l, t);
    MT_SEGMENTS(segment, o.lines)
    {
        int line = segment / SEGMENTS, at = segment % SEGMENTS;
        float v[SEGMENT], amax = 0;
        int32_t bits[SEGMENT] = {};
        get_segment<DIR>(v, sp->x, line, at);
        if (j.measure[DIR] || (make && !s.whole && !square)) amax = amax_of(v);
        most = fmaxf(most, amax);
        if (!make) continue;
        if (SR && s.options.sr) get_random<DIR>(bits, random, line, at);
        cell e;
        if (square) {
            int i = line >> s.block_shift, k = at * SEGMENT >> s.block_shift;
            int across = TILE >> s.block_shift;
            e = sp->cells[DIR == MT_ROW ? i * across + k : k * across + i];
        } else if (HARD && s.options.four_over_six) {
            e = four_over_six<SR>(j, s, l, amax, v, bits);
        } else {
            e = cell_of(j, s, l, block_amax(amax, s.whole ? 0 : s.block_shift));
        }
        if (write && !s.whole && !(HARD && s.decoded)) put_scale(s, o, e, line, at);
        if (planar) {
            if (at % 2 == 0) sp->planar[planar_group(at / 2, line >> 2) + (line & 3)] = e.enc;
            continue;
        }
        packed q = encode_scaled<SR>(s, v, e.enc, bits);
        if (HARD && s.decoded) {
            float dec[SEGMENT];
#pragma unroll
            for (int i = 0; i < SEGMENT; i++) dec[i] = bare_dec(j, s, e);
            put_decoded<DIR>(sp->x, s, q, dec, line, at);
            continue;
        }
        if (write) put_codes(s, o, q, line, at, o.lines, o.length, o.line0, o.along0);
        if (decode && line < o.lines) {
            values_of(v, s, q);
#pragma unroll
            for (int i = 0; i < SEGMENT; i++)
                v[i] = i < codes_in(o.length, at) ? scaled(v[i], e.dec) : 0;
            put_segment<MT_ROW>(sp->x, v, line, at);
        }
    }
    if (planar && make && write) {
        __syncthreads();
        encode_planar<SR, HARD>(sp, random, s, o, t);
    }
    if (HARD && s.decoded && make) { /* the only direction: x is no longer needed */
        __syncthreads();
        store_plain(s, sp->x, t);
    }
    if (j.measure[DIR]) raise_amax(j.amax[DIR] + t.index, most);
}
