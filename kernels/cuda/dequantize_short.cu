/* The common case of dequantize by a shorter way: bytes or nibbles of codes to bf16. The arithmetic
 * is that of the tiles. */
#include "kernels/cuda/quantize_find.cuh"

enum { RESIDENT = 3, RUN = 8, ACROSS = TILE / RUN };

/* A tile of codes and what is made of it. */
struct frame {
    const uint8_t *codes; /* the tile's first */
    int64_t pitch, y_pitch;
    mt_bf16 *y;
    lattice scales;
    float dec; /* of the whole member; of nvfp4 what its scales are multiplied by */
    int rows, cols;
    int down; /* the tile's first row among those of the scales */
    bool aligned;
};

static __device__ __forceinline__ void set_frame(frame *f, const decode_job &j, const tile &t)
{
    const side &s = j.p.sides[SOURCE];
    bool columns = s.transposed, planar = !columns && s.dir == MT_COL;
    int half = s.codes_per_byte - 1, bytes = RUN >> half;
    int64_t line0 = columns ? t.c0 : t.r0, along0 = columns ? t.r0 : t.c0;
    shape p = shape_of(s, t.m.rows, t.m.cols);
    uint8_t *scales = s.scales + t.m.at[AT_SCALES + SOURCE] * (s.scale == MT_SCALE_F32 ? 4 : 1);
    f->pitch = p.pitch, f->y_pitch = t.m.cols;
    f->codes = s.codes + t.m.at[AT_CODES + SOURCE] + line0 * p.pitch + (along0 >> half);
    f->y = (mt_bf16 *)j.p.sides[MT_ROW].codes + t.m.offset + t.r0 * t.m.cols + t.c0;
    f->down = (int)(t.r0 % TILE);
    const int64_t row0 = t.r0 - f->down;
    f->scales = columns  ? lattice_of(s, p, scales, line0, along0)
                : planar ? lattice_of(s, p, scales, t.c0, row0)
                         : lattice_of(s, p, scales, row0, t.c0);
    f->rows = t.rows, f->cols = t.cols;
    f->dec = 1.0f;
    if (s.whole && !s.bare) f->dec = *(const float *)scales;
    if (s.second_level && !s.bare) f->dec = mt_nvfp4_decode_scale(&s.options, s.amax[t.index]);
    f->aligned = t.m.cols % RUN == 0 && (uintptr_t)f->y % 16 == 0 &&
                 (columns || (((uintptr_t)f->codes | (uintptr_t)f->pitch) & (bytes - 1)) == 0);
}

/* A block's turns: the frame of turn n is frames[n & 3], its tile ahead[n & 1]. While a block is at
 * turn n the codes of n + 1 are on their way; one warp makes the frame of n + 2, another looks up
 * the tile of n + 3. */
struct turns {
    frame frames[4];
    tile ahead[2];
};

static __device__ __forceinline__ void find_turn(turns *t, const decode_job &j, int64_t units,
                                                 int turn)
{
    const int64_t unit = blockIdx.x + turn * (int64_t)gridDim.x;
    if (unit >= units) return;
    int64_t member = member_at_by_warp(j.p.units, j.p.group.members, unit);
    if (lane_of_warp() == 0) t->ahead[turn & 1] = tile_of(j.p, member, unit);
}
static __device__ __forceinline__ void set_turn(turns *t, const decode_job &j, int64_t units,
                                                int turn)
{
    if (lane_of_warp() == 0 && blockIdx.x + turn * (int64_t)gridDim.x < units)
        set_frame(&t->frames[turn & 3], j, t->ahead[turn & 1]);
}

static __device__ __forceinline__ void begin_turns(turns *t, const decode_job &j, int64_t units)
{
    const int warp = (int)threadIdx.x / 32;
    if (warp < 2) find_turn(t, j, units, warp);
    __syncthreads();
    if (warp < 2) set_turn(t, j, units, warp);
    __syncthreads();
    if (warp == 2) find_turn(t, j, units, 2);
}

/* At turn n: what is to be done for the next ones, by warps in their turn. */
static __device__ __forceinline__ void prepare_turns(turns *t, const decode_job &j, int64_t units,
                                                     int n)
{
    const int place = ((int)threadIdx.x / 32 - n) & (TILE_THREADS / 32 - 1);
    if (place == 0) find_turn(t, j, units, n + 3);
    if (place == 1) set_turn(t, j, units, n + 2);
}

/* COUNT scales as they are stored, `step` apart, as far as wanted(i); nothing of whole members. */
template <int COUNT, typename F>
static __device__ __forceinline__ void load_scales(uint32_t raw[COUNT], const side &s,
                                                   const frame &f, int64_t first, int64_t step,
                                                   F wanted)
{
    if (s.whole) return;
    if (s.scale == MT_SCALE_F32) {
        const uint32_t *p = (const uint32_t *)f.scales.at + first;
#pragma unroll
        for (int i = 0; i < COUNT; i++) raw[i] = wanted(i) ? __ldg(p + i * step) : 0;
    } else {
        const uint8_t *p = f.scales.at + first;
#pragma unroll
        for (int i = 0; i < COUNT; i++) raw[i] = wanted(i) ? __ldg(p + i * step) : 0;
    }
}

/* What codes are multiplied by under them. */
template <int COUNT>
static __device__ __forceinline__ void scale_values(float dec[COUNT], const side &s,
                                                    const decode_job &j, float member,
                                                    const uint32_t raw[COUNT])
{
    if (s.whole) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) dec[i] = member;
    } else if (s.scale == MT_SCALE_F32) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) dec[i] = mt_f32_from_bits(raw[i]);
    } else if (s.scale == MT_SCALE_E4M3) {
#pragma unroll
        for (int i = 0; i < COUNT; i += 2) {
            float v[2];
            byte_pair_values<CODES_E4M3>(v, j.e4m3, raw[i] | raw[i + 1] << 8);
            dec[i] = v[0] * member, dec[i + 1] = v[1] * member;
        }
    } else {
        const level none = {};
#pragma unroll
        for (int i = 0; i < COUNT; i++) dec[i] = scale_value(s, j.e4m3, none, (uint8_t)raw[i]);
    }
}

/* y[0..8) = values times dec. */
static __device__ __forceinline__ void put_run(mt_bf16 *y, const float v[RUN], const float dec[RUN])
{
    store_16(y, bf16_pair(v[0] * dec[0], v[1] * dec[1]), bf16_pair(v[2] * dec[2], v[3] * dec[3]),
             bf16_pair(v[4] * dec[4], v[5] * dec[5]), bf16_pair(v[6] * dec[6], v[7] * dec[7]));
}

/* ---- codes in rows ----------------------------------------------------------------------------
 */

template <int CODES>
static __device__ __forceinline__ void run_values(float v[RUN], const mt_codec &c, const uint2 &q)
{
    if (CODES == CODES_E2M1) {
        nibble_pair_values<false>(v, q.x), nibble_pair_values<true>(v + 2, q.x);
        nibble_pair_values<false>(v + 4, q.x >> 8), nibble_pair_values<true>(v + 6, q.x >> 8);
        float w[RUN] = { v[0], v[2], v[4], v[6], v[1], v[3], v[5], v[7] };
#pragma unroll
        for (int i = 0; i < RUN; i++) v[i] = w[i];
    } else {
        byte_pair_values<CODES>(v, c, q.x), byte_pair_values<CODES>(v + 2, c, q.x >> 16);
        byte_pair_values<CODES>(v + 4, c, q.y), byte_pair_values<CODES>(v + 6, c, q.y >> 16);
    }
}

/* A tile that does not lie as it should. */
static __device__ void rows_singly(const decode_job &j, const frame &f, bool planar)
{
    const side &s = j.p.sides[SOURCE];
    int half = s.codes_per_byte - 1;
    for (int i = threadIdx.x; i < f.rows * f.cols; i += TILE_THREADS) {
        int r = i / f.cols, c = i % f.cols;
        int line = planar ? c : f.down + r, along = planar ? f.down + r : c;
        uint32_t code = f.codes[r * f.pitch + (c >> half)] >> (half & c) * 4, raw[2] = { 0, 0 };
        float dec[2];
        load_scales<1>(raw, s, f, scale_offset(f.scales, line, along >> s.block_shift), 0,
                       [](int) { return true; });
        scale_values<2>(dec, s, j, f.dec, raw);
        from_f32(f.y + r * f.y_pitch + c, mt_decode(s.codec, (uint8_t)code) * dec[0]);
    }
}

enum { ROWS = 8 }; /* of a thread, below each other: in one block of scales */
static_assert((int)ROWS == (int)RUN, "scales are of either");

/* By a warp: the block's tile, of rows of a member and as wide as its threads; false: there is
 * none. */
static __device__ __forceinline__ bool find_frame(frame *f, const decode_job &j)
{
    const side &s = j.p.sides[SOURCE];
    const mt_group &g = j.p.group;
    const int wide = RUN << j.shift, tall = ROWS * TILE_THREADS >> j.shift;
    const unsigned across = ((unsigned)g.k + wide - 1) / wide, n = blockIdx.x / across;
    const int k = (int)(blockIdx.x - n * across) * wide;
    located it;
    if (!locate_strip(&it, g, tall, (int)n)) return false;
    if (lane_of_warp()) return true;
    tile t = {};
    t.m.rows = it.rows, t.m.cols = g.k, t.m.offset = it.before.rows * g.k;
    t.m.at[AT_CODES + SOURCE] = codes_before(s, g.k, it.before);
    t.m.at[AT_SCALES + SOURCE] = scales_before(s, g.k, it.index, it.before);
    t.index = it.index, t.r0 = (int64_t)it.at * tall, t.c0 = k;
    t.rows = (int)(it.rows - t.r0 < tall ? it.rows - t.r0 : tall);
    t.cols = (int)(g.k - k < wide ? g.k - k : wide);
    set_frame(f, j, t);
    return true;
}

/* A block has as much of a few rows as its threads reach across. */
template <int CODES>
static __global__ void __launch_bounds__(TILE_THREADS, 5)
    rows_kernel(const __grid_constant__ decode_job j)
{
    __shared__ frame own;
    __shared__ bool is;
    const side &s = j.p.sides[SOURCE];
    const bool planar = s.dir == MT_COL;
    wait_for_results();
    if (threadIdx.x < 32) {
        const bool found = find_frame(&own, j);
        if (threadIdx.x == 0) is = found;
    }
    __syncthreads();
    if (!is) return;
    const frame &f = own;
    const int across = (1 << j.shift) - 1;
    const int first = ((int)threadIdx.x >> j.shift) * ROWS, c = ((int)threadIdx.x & across) * RUN;
    if (!f.aligned) rows_singly(j, f, planar);
    const int rows = f.aligned && c < f.cols ? f.rows - first : 0;
    if (rows <= 0) return;
    uint2 q[ROWS];
    uint32_t raw[ROWS];
    const int64_t pitch = f.pitch;
    const uint8_t *from = f.codes + first * pitch + (CODES == CODES_E2M1 ? c / 2 : c);
#pragma unroll
    for (int i = 0; i < ROWS; i++, from += pitch) {
        q[i] = make_uint2(0, 0);
        if (i >= rows) continue;
        if (CODES == CODES_E2M1)
            q[i].x = __ldg((const uint32_t *)from);
        else
            q[i] = __ldg((const uint2 *)from);
    }
    const int down = f.down + first;
    if (planar) /* of eight columns */
        load_scales<RUN>(raw, s, f, scale_offset(f.scales, c, down >> s.block_shift),
                         line_step(f.scales), [](int) { return true; });
    else
        load_scales<ROWS>(raw, s, f, scale_offset(f.scales, down, c >> s.block_shift),
                          line_step(f.scales), [&](int i) { return i < rows; });
    float dec[ROWS], decs[RUN];
    scale_values<ROWS>(dec, s, j, f.dec, raw);
    const int64_t y_pitch = f.y_pitch;
    mt_bf16 *y = f.y + first * y_pitch + c;
#pragma unroll
    for (int i = 0; i < ROWS; i++, y += y_pitch) {
        float v[RUN];
        run_values<CODES>(v, s.codec, q[i]);
#pragma unroll
        for (int e = 0; e < RUN; e++) decs[e] = planar ? dec[e] : dec[i];
        if (i < rows) put_run(y, v, decs);
    }
}

/* ---- codes in columns -------------------------------------------------------------------------
 */

/* The codes of a tile's columns as they lie: each begins at a multiple of 16 bytes before its first
 * code. Groups of eight columns are set off from each other, so that they meet in no bank. */
template <int CODES> struct columns {
    enum {
        HALF = CODES == CODES_E2M1,
        BYTES = TILE >> HALF,    /* of a whole column */
        CHUNKS = BYTES / 16 + 1, /* that it may touch */
        PITCH = CHUNKS * 4 + 28, /* words */
        LINES = 4 << HALF        /* codes of a word */
    };
    turns turned;
    alignas(16) uint32_t words[2][TILE * PITCH]; /* of this tile and the next */
};

template <int CODES> static __device__ __forceinline__ int column_place(int c, int word)
{
    return c * columns<CODES>::PITCH + (c / RUN & 7) * 4 + word;
}

/* Chunks that lie within the buffer of codes come as they are; of the others what exists. */
template <int CODES>
static __device__ __forceinline__ void load_columns(uint32_t *words, const frame &f,
                                                    const uint8_t *begin, const uint8_t *end)
{
    enum { CHUNKS = columns<CODES>::CHUNKS, HALF = columns<CODES>::HALF };
    int bytes = (f.rows + HALF) >> HALF;
    for (int i = threadIdx.x; i < TILE * CHUNKS; i += TILE_THREADS) {
        int c = i / CHUNKS, chunk = i % CHUNKS;
        if (c >= f.cols) continue;
        const uint8_t *p = f.codes + c * f.pitch;
        int a = (int)((uintptr_t)p & 15), at = chunk * 16 - a;
        uint32_t *to = words + column_place<CODES>(c, chunk * 4);
        if (at >= bytes) continue;
        if (p + at >= begin && p + at + 16 <= end) {
            copy_16(to, p + at);
        } else {
            for (int b = 0; b < 16; b++)
                if (at + b >= 0 && at + b < bytes) ((uint8_t *)to)[b] = p[at + b];
        }
    }
}

/* y = the values of words of codes of eight columns, as far as `rows` and `columns`. */
template <int CODES>
static __device__ __forceinline__ void put_rows(mt_bf16 *y, int64_t pitch, const mt_codec &codec,
                                                const uint32_t w[RUN], const float dec[RUN],
                                                int rows, int columns, bool aligned)
{
#pragma unroll
    for (int i = 0; i < ::columns<CODES>::LINES; i++) {
        float v[RUN];
#pragma unroll
        for (int e = 0; e < RUN; e += 2) {
            if (CODES == CODES_E2M1) {
                uint32_t pair = __byte_perm(w[e], w[e + 1], i / 2 | (i / 2 + 4) << 8);
                i % 2 ? nibble_pair_values<true>(v + e, pair)
                      : nibble_pair_values<false>(v + e, pair);
            } else {
                byte_pair_values<CODES>(v + e, codec,
                                        __byte_perm(w[e], w[e + 1], i | (i + 4) << 4));
            }
        }
        if (i < rows && aligned) {
            put_run(y + i * pitch, v, dec);
        } else if (i < rows) {
#pragma unroll
            for (int e = 0; e < RUN; e++)
                if (e < columns) from_f32(y + i * pitch + e, v[e] * dec[e]);
        }
    }
}

template <int CODES>
static __global__ void __launch_bounds__(TILE_THREADS, RESIDENT)
    columns_kernel(const __grid_constant__ decode_job j)
{
    typedef columns<CODES> space;
    extern __shared__ uint4 mt_shared[];
    space *sp = (space *)mt_shared;
    const side &s = j.p.sides[SOURCE];
    wait_for_results();
    const uint8_t *begin = s.codes,
                  *end = begin + (s.line ? s.line * j.p.group.k
                                         : j.p.members[j.p.group.members].at[AT_CODES + SOURCE]);
    const int64_t units = j.p.units[j.p.group.members], step = gridDim.x;
    const int c = (int)threadIdx.x % ACROSS * RUN, first = (int)threadIdx.x / ACROSS * space::LINES;
    uint32_t raw[RUN];
    int n = 0;
    const auto load = [&](uint32_t *words, const frame &f) {
        load_columns<CODES>(words, f, begin, end);
        /* a thread's rows are of one block */
        load_scales<RUN>(raw, s, f, scale_offset(f.scales, c, first >> s.block_shift),
                         line_step(f.scales),
                         [&](int e) { return e < f.cols - c && first < f.rows; });
    };
    begin_turns(&sp->turned, j, units);
    if (blockIdx.x < units) load(sp->words[0], sp->turned.frames[0]);
    for (int64_t u = blockIdx.x; u < units; u += step, n++) {
        float dec[RUN];
        copies_done();
        __syncthreads(); /* the codes and the frames are there, the last tile done with */
        const frame &f = sp->turned.frames[n & 3];
        const int rows = c < f.cols ? f.rows : 0, columns = f.cols - c;
        const uint32_t *words = sp->words[n & 1], pitch = (uint32_t)f.pitch;
        const uint32_t start = (uint32_t)(uintptr_t)f.codes + c * pitch;
        scale_values<RUN>(dec, s, j, f.dec, raw);
        if (u + step < units) load(sp->words[~n & 1], sp->turned.frames[(n + 1) & 3]);
        prepare_turns(&sp->turned, j, units, n);
        const int64_t y_pitch = f.y_pitch;
        const bool aligned = f.aligned;
        mt_bf16 *y = f.y + c;
#pragma unroll 1
        for (int r = first; r < rows; r += TILE_THREADS / ACROSS * space::LINES) {
            uint32_t w[RUN];
#pragma unroll
            for (int e = 0; e < RUN; e++) {
                int at = (int)((start + e * pitch) & 15) + (r >> space::HALF);
                const uint32_t *from = words + column_place<CODES>(c + e, at / 4);
                w[e] = __funnelshift_r(from[0], from[1], at % 4 * 8);
            }
            put_rows<CODES>(y + r * y_pitch, y_pitch, s.codec, w, dec, rows - r, columns, aligned);
        }
    }
}

/* ---- the host's part --------------------------------------------------------------------------
 */

/* Rows are found by the blocks themselves, without a plan. */
static bool finds_rows(const decode_job *j)
{
    const mt_group *g = &j->p.group;
    return !j->p.sides[SOURCE].transposed && !g->last_dims && g->m <= INT32_MAX &&
           g->k <= INT32_MAX && mt_cuda_plan_units(g) <= INT32_MAX;
}

bool mt_cuda_decode_is_short(const decode_job *j)
{
    const side *y = &j->p.sides[MT_ROW];
    return y->dtype == MT_BF16 && mt_is_short(j->p.sides[SOURCE]) &&
           (j->p.sides[SOURCE].transposed || finds_rows(j));
}

template <int CODES> static mt_status launch(mt_stream *stream, const decode_job *j, int64_t units)
{
    enum { BYTES = sizeof(columns<CODES>) };
    int64_t most = (int64_t)mt_cuda_multiprocessors(stream) * RESIDENT;
    unsigned blocks = (unsigned)(units < most ? units : most);
    if (j->p.sides[SOURCE].transposed) {
        MT_CUDA(cudaFuncSetAttribute(columns_kernel<CODES>,
                                     cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES));
        MT_TRY(follow(stream, columns_kernel<CODES>, blocks, TILE_THREADS, BYTES, *j));
    } else {
        const side *s = &j->p.sides[SOURCE];
        const mt_group *g = &j->p.group;
        decode_job own = *j;
        own.shift = 4;
        while (!(s->swizzled && s->dir == MT_COL) && own.shift < 8 && g->k > RUN << own.shift)
            own.shift++;
        blocks = (unsigned)(mt_cuda_plan_strips(g, ROWS * TILE_THREADS >> own.shift) *
                            mt_ceil_div(g->k, RUN << own.shift));
        MT_TRY(follow(stream, rows_kernel<CODES>, blocks, TILE_THREADS, 0, own));
    }
    MT_LAUNCHED(stream, "dequantize: bf16");
    return MT_OK;
}

bool mt_cuda_decode_needs_plan(const decode_job *j)
{
    return !mt_cuda_decode_is_short(j) || j->p.sides[SOURCE].transposed;
}

mt_status mt_cuda_decode_short(mt_stream *stream, const decode_job *j, int64_t units)
{
    static mt_status (*const launches[])(mt_stream *, const decode_job *,
                                         int64_t) = { launch<CODES_E4M3>, launch<CODES_E5M2>,
                                                      launch<CODES_E2M1> };
    return launches[mt_codes_kind(j->p.sides[SOURCE])](stream, j, units);
}
