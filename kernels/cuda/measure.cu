/* Statistics of what quantize made. A member's tiles are shared out among so many blocks, whatever
 * the card; each adds up what its threads find, and a warp adds up a member's blocks in order. */
#include "kernels/cuda/quantize_rotate.cuh"
#include "kernels/cuda/scratch.h"

/* Counts and sums of a block, or of a thread: mt_measured without codes and amax. */
struct tally {
    int64_t count, nonfinite, nonzero, vanished, saturated, scales;
    double sum, squares, errors, product, decoded;
    float min, max, scale_min, scale_max;
};

struct measure_job {
    plan
        p; /* sides: the direction that is measured at its place, rows it was made of, the source */
    mt_codec e4m3;
    const float *given; /* of a delayed format; NULL: 1 */
    bool chained;       /* the direction was made of the row direction's values */
    int parts;          /* blocks of a member */
    tally *parted;      /* [members][parts] */
    mt_measured *measured;
};

enum { MEASURE_WARPS = TILE_THREADS / 32, CODES = 256 };

struct measure_space {
    float x[AREA];
    int32_t cell_amax[CELLS];         /* square cells */
    uint16_t finite[TILE * SEGMENTS]; /* a bit an element of a segment: of the source, where what is
                                         cast is other values */
    unsigned codes[MEASURE_WARPS][CODES];
    tally warps[MEASURE_WARPS];
};

static __device__ __forceinline__ tally no_tally(void)
{
    tally f = {};
    f.min = f.scale_min = mt_from_bits(0x7f800000), f.max = f.scale_max = -f.min;
    return f;
}

static __device__ __forceinline__ void add(tally *to, const tally &f)
{
    to->count += f.count, to->nonfinite += f.nonfinite, to->nonzero += f.nonzero;
    to->vanished += f.vanished, to->saturated += f.saturated, to->scales += f.scales;
    to->sum += f.sum, to->squares += f.squares, to->errors += f.errors;
    to->product += f.product, to->decoded += f.decoded;
    to->min = fminf(to->min, f.min), to->max = fmaxf(to->max, f.max);
    to->scale_min = fminf(to->scale_min, f.scale_min);
    to->scale_max = fmaxf(to->scale_max, f.scale_max);
}

/* Over a warp, in lane 0. */
static __device__ __forceinline__ tally add_lanes(tally f)
{
    for (int down = 16; down; down /= 2) {
        tally other;
        static_assert(sizeof(tally) % sizeof(uint32_t) == 0, "words");
#pragma unroll
        for (int i = 0; i < (int)(sizeof(tally) / sizeof(uint32_t)); i++)
            ((uint32_t *)&other)[i] = __shfl_down_sync(~0u, ((const uint32_t *)&f)[i], down);
        add(&f, other);
    }
    return f;
}

/* ---- one segment ------------------------------------------------------------------------------
 */

/* The n codes of a segment; those of columns may lie in rows. */
template <int DIR>
static __device__ __forceinline__ packed segment_codes(const side &s, const output &o, int line,
                                                       int at, int n)
{
    const int half = s.codes_per_byte - 1;
    const int64_t i = o.line0 + line, first = o.along0 + at * SEGMENT;
    if (DIR == MT_COL && !s.transposed) {
        packed q = {};
#pragma unroll
        for (int e = 0; e < SEGMENT; e++) {
            if (e >= n) continue;
            const uint32_t byte = o.codes[(first + e) * o.p.pitch + (i >> half)];
            if (half)
                q.words[e / 8] |= (byte >> (i & 1) * 4 & 15) << e % 8 * 4;
            else
                q.words[e / 4] |= byte << e % 4 * 8;
        }
        return q;
    }
    return get_packed(o.codes + i * o.p.pitch + (first >> half), (int)shift_up(n, half));
}

static __device__ __forceinline__ int64_t segment_scale(const side &s, const output &o, int line,
                                                        int at)
{
    const int64_t i = o.line0 + line, first = o.along0 + at * SEGMENT;
    if (s.whole) return 0;
    return scale_place(s, o.p, s.shared ? i >> s.block_shift : i, first >> s.block_shift);
}

static __device__ __forceinline__ float plain_value(const side &s, int64_t i)
{
    if (s.dtype == MT_BF16) return to_f32(((const mt_bf16 *)s.codes)[i]);
    if (s.dtype == MT_F32) return to_f32(((const float *)s.codes)[i]);
    if (s.dtype == MT_F16) return to_f32(((const __half *)s.codes)[i]);
    return to_f32(((const double *)s.codes)[i]);
}

/* What a segment's codes are worth; its codes are counted. */
template <int DIR>
static __device__ __forceinline__ void
segment_values(float v[SEGMENT], unsigned *counts, const measure_job &j, const level &l,
               const output &o, const tile &t, int line, int at, int n)
{
    const side &s = j.p.sides[DIR];
    if (s.plain) {
        const int64_t r = DIR == MT_ROW ? t.r0 + line : t.r0 + at * SEGMENT;
        const int64_t c = DIR == MT_ROW ? t.c0 + at * SEGMENT : t.c0 + line;
        const int64_t step = DIR == MT_ROW ? 1 : t.m.cols;
#pragma unroll
        for (int e = 0; e < SEGMENT; e++)
            v[e] = e < n ? plain_value(s, t.m.offset + r * t.m.cols + c + e * step) : 0;
        return;
    }
    const packed q = segment_codes<DIR>(s, o, line, at, n);
    const int64_t place = segment_scale(s, o, line, at);
    const float dec = s.scale == MT_SCALE_F32 ? ((const float *)o.scales)[place]
                                              : scale_value(s, j.e4m3, l, o.scales[place]);
    values_of(v, s, q);
#pragma unroll
    for (int e = 0; e < SEGMENT; e++) {
        v[e] = scaled(v[e], dec);
        if (e < n) atomicAdd(&counts[code_of(q, e, s.codes_per_byte)], 1u);
    }
}

/* Elements of the source and what they became; a bit of the result an element that is finite. */
static __device__ __forceinline__ uint32_t take_values(tally *f, const float x[SEGMENT],
                                                       const float q[SEGMENT], int n)
{
    uint32_t finite = 0;
#pragma unroll
    for (int e = 0; e < SEGMENT; e++) {
        if (e >= n) continue;
        if (!(fabsf(x[e]) <= FLT_MAX)) {
            f->nonfinite++;
            continue;
        }
        const double a = (double)x[e], b = (double)q[e];
        finite |= 1u << e;
        f->nonzero += x[e] != 0, f->vanished += x[e] != 0 && q[e] == 0;
        f->min = fminf(f->min, x[e]), f->max = fmaxf(f->max, x[e]);
        f->sum += a, f->squares += a * a, f->errors += (a - b) * (a - b);
        f->product += a * b, f->decoded += b * b;
    }
    f->count += __popc(finite);
    return finite;
}

/* ---- cells ------------------------------------------------------------------------------------
 */

/* What a cell's elements were multiplied by, from its amax or its stored scale; dec: what its codes
 * are. */
static __device__ __forceinline__ float cell_scale(float *dec, const measure_job &j, const side &s,
                                                   const level &l, const output &o, float amax,
                                                   int line, int at)
{
    *dec = l.dec;
    if (s.whole) return l.enc;
    if (s.scale == MT_SCALE_F32) {
        const float enc = mt_encode_scale(amax, s.max, s.options.pow2, s.overflow);
        *dec = 1.0f / enc;
        return enc;
    }
    const uint8_t stored = o.scales[segment_scale(s, o, line, at)];
    *dec = scale_value(s, j.e4m3, l, stored);
    return s.scale == MT_SCALE_E4M3 ? mt_nvfp4_encode(*dec) : mt_e8m0_scale(254 - stored);
}

/* Saturation, and the scales of cells that begin in the tile. */
template <int DIR>
static __device__ __forceinline__ void take_cells(tally *f, measure_space *sp, const measure_job &j,
                                                  const level &l, const output &o, const tile &t)
{
    const side &s = j.p.sides[DIR];
    const bool square = s.options.two_d;
    const int block = 1 << s.block_shift, across = TILE >> s.block_shift;
    if (square) find_cells(sp->x, sp->cell_amax, s, t);
    MT_SEGMENTS(segment, o.lines)
    {
        const int line = segment / SEGMENTS, at = segment % SEGMENTS, n = codes_in(o.length, at);
        float v[SEGMENT], dec;
        get_segment<DIR>(v, sp->x, line, at);
        float amax = square ? 0 : block_amax(amax_of(v), s.whole ? 0 : s.block_shift);
        if (line >= o.lines || n == 0) continue;
        if (square) {
            const int i = line >> s.block_shift, k = at * SEGMENT >> s.block_shift;
            amax = mt_from_bits(sp->cell_amax[DIR == MT_ROW ? i * across + k : k * across + i]);
        }
        if (s.whole) amax = l.amax;
        const float enc = cell_scale(&dec, j, s, l, o, amax, line, at);
        const bool first = s.whole ? t.r0 == 0 && t.c0 == 0 && segment == 0
                                   : at * SEGMENT % block == 0 && (!square || line % block == 0);
        if (first && amax > 0) {
            f->scales++;
            f->scale_min = fminf(f->scale_min, dec), f->scale_max = fmaxf(f->scale_max, dec);
        }
        const uint32_t finite = sp->finite[segment];
#pragma unroll
        for (int e = 0; e < SEGMENT; e++)
            f->saturated += (finite >> e & 1) && fabsf(v[e] * enc) > s.max;
    }
}

/* ---- kernels ----------------------------------------------------------------------------------
 */

template <int DIR>
static __device__ __forceinline__ void measure_tile(tally *f, measure_space *sp,
                                                    const measure_job &j, const level levels[SIDES],
                                                    const tile &t)
{
    const side &s = j.p.sides[DIR];
    const output o = output_of<DIR>(s, t);
    const bool rotated = s.options.rht;
    load_plain(sp->x, j.p.sides[SOURCE], t, false);
    __syncthreads();
    if (rotated) rotate_tile(sp->x, t, s.options.rht_mask), __syncthreads();
    MT_SEGMENTS(segment, o.lines)
    {
        const int line = segment / SEGMENTS, at = segment % SEGMENTS, n = codes_in(o.length, at);
        float x[SEGMENT], q[SEGMENT];
        if (line >= o.lines || n == 0) continue;
        get_segment<DIR>(x, sp->x, line, at);
        segment_values<DIR>(q, sp->codes[threadIdx.x / 32], j, levels[DIR], o, t, line, at, n);
        sp->finite[segment] = (uint16_t)take_values(f, x, q, n);
    }
    if (s.plain) return;
    if (j.chained) {
        __syncthreads(); /* x has been read */
        load_quantized(sp->x, j.p.sides[MT_ROW], j.e4m3, levels[MT_ROW], t, MT_ROW);
        __syncthreads();
        if (rotated) rotate_tile(sp->x, t, s.options.rht_mask), __syncthreads();
    }
    take_cells<DIR>(f, sp, j, levels[DIR], o, t);
}

template <int DIR>
static __global__ void __launch_bounds__(TILE_THREADS, 2)
    measure_kernel(const __grid_constant__ measure_job j)
{
    extern __shared__ uint4 mt_shared[];
    measure_space *sp = (measure_space *)mt_shared;
    const int64_t index = blockIdx.x / j.parts;
    const int part = (int)(blockIdx.x % j.parts);
    tally f = no_tally();
    tile t;
    t.m = j.p.members[index], t.index = index;
    level levels[SIDES];
    for (int i = 0; i < SOURCE; i++) {
        const side &s = j.p.sides[i];
        if (!s.present) continue;
        levels[i] = member_level(s, s.amax ? s.amax[index] : 0,
                                 i == DIR && j.given ? j.given + index : NULL);
    }
    for (int i = threadIdx.x; i < MEASURE_WARPS * CODES; i += TILE_THREADS)
        sp->codes[i / CODES][i % CODES] = 0;
    const int64_t across = shift_up(t.m.cols, 7), tiles = across * shift_up(t.m.rows, 7);
    for (int64_t u = part; u < tiles; u += j.parts) {
        t.r0 = u / across * TILE, t.c0 = u % across * TILE;
        t.rows = (int)(t.m.rows - t.r0 < TILE ? t.m.rows - t.r0 : TILE);
        t.cols = (int)(t.m.cols - t.c0 < TILE ? t.m.cols - t.c0 : TILE);
        __syncthreads(); /* the tile before has been read */
        measure_tile<DIR>(&f, sp, j, levels, t);
    }
    f = add_lanes(f);
    if (threadIdx.x % 32 == 0) sp->warps[threadIdx.x / 32] = f;
    __syncthreads();
    for (int code = threadIdx.x; code < CODES; code += TILE_THREADS) {
        unsigned long long n = 0;
        for (int w = 0; w < MEASURE_WARPS; w++) n += sp->codes[w][code];
        if (n) atomicAdd((unsigned long long *)&j.measured[index].codes[code], n);
    }
    if (threadIdx.x) return;
    for (int w = 1; w < MEASURE_WARPS; w++) add(&f, sp->warps[w]);
    j.parted[blockIdx.x] = f;
}

/* A warp a member. */
static __global__ void sum_parts_kernel(const __grid_constant__ measure_job j)
{
    tally f = no_tally();
    for (int i = threadIdx.x; i < j.parts; i += 32)
        add(&f, j.parted[(int64_t)blockIdx.x * j.parts + i]);
    f = add_lanes(f);
    if (threadIdx.x) return;
    mt_measured *m = j.measured + blockIdx.x;
    m->count = f.count, m->nonfinite = f.nonfinite, m->nonzero = f.nonzero;
    m->vanished = f.vanished, m->saturated = f.saturated, m->scales = f.scales;
    m->sum = f.sum, m->squares = f.squares, m->error_squares = f.errors;
    m->product = f.product, m->decoded_squares = f.decoded;
    if (f.count) {
        m->min = (double)f.min, m->max = (double)f.max;
        m->amax = (double)fmaxf(fabsf(f.min), fabsf(f.max));
    }
    if (f.scales) m->scale_min = (double)f.scale_min, m->scale_max = (double)f.scale_max;
}

/* ---- the host's part --------------------------------------------------------------------------
 */

/* Blocks of a member: of all members some 2,048, whatever the card. */
static int parts_of(const mt_group *g)
{
    enum { ALL = 2048, MOST = 256 };
    const int64_t parts = ALL / (g->members ? g->members : 1);
    return (int)(parts < 1 ? 1 : parts < MOST ? parts : (int64_t)MOST);
}

static size_t parted_bytes(const mt_group *g)
{
    return ((size_t)g->members * (size_t)parts_of(g) * sizeof(tally) + 255) / 256 * 256;
}

extern "C" size_t mt_cuda_measure_scratch(const mt_stream *stream,
                                          const struct mt_measure_args *args)
{
    (void)stream;
    const mt_group *g = &args->src->group;
    return mt_group_is_empty(g) ? 0 : parted_bytes(g) + mt_cuda_plan_bytes(g);
}

extern "C" mt_status mt_cuda_measure(mt_stream *stream, const struct mt_measure_args *args)
{
    const mt_group *g = &args->src->group;
    cudaStream_t to = mt_cuda_stream(stream);
    measure_job j = {};
    void *scratch;
    if (g->members == 0) return MT_OK;
    MT_CUDA(cudaMemsetAsync(args->measured, 0, (size_t)g->members * sizeof *args->measured, to));
    if (mt_group_is_empty(g)) return MT_OK;
    MT_TRY(mt_cuda_scratch(stream, &scratch, mt_cuda_measure_scratch(stream, args)));
    j.p.group = *g;
    j.e4m3 = mt_codec_of(MT_ELEMENT_E4M3);
    j.given = args->scale, j.parts = parts_of(g);
    j.chained = args->out->dir[args->dir].options.from_dequantized;
    j.parted = (tally *)scratch, j.measured = args->measured;
    if (j.chained) j.p.sides[MT_ROW] = mt_cuda_side_of(&args->out->dir[MT_ROW], MT_ROW, true);
    j.p.sides[args->dir] = mt_cuda_side_of(&args->out->dir[args->dir], args->dir, true);
    j.p.sides[args->dir].overflow = mt_measure_overflow(args);
    j.p.sides[SOURCE] = mt_cuda_side_of(&args->src->dir[MT_ROW], MT_ROW, true);
    mt_cuda_plan_place(&j.p, (char *)scratch + parted_bytes(g));
    MT_TRY(mt_cuda_plan_members(stream, &j.p));
    const void *kernel = args->dir == MT_ROW ? (const void *)measure_kernel<MT_ROW>
                                             : (const void *)measure_kernel<MT_COL>;
    const int64_t blocks = g->members * j.parts;
    MT_TRY(mt_cuda_give_shared(stream, kernel, sizeof(measure_space), "measure"));
    if (args->dir == MT_ROW)
        measure_kernel<MT_ROW><<<(unsigned)blocks, TILE_THREADS, sizeof(measure_space), to>>>(j);
    else
        measure_kernel<MT_COL><<<(unsigned)blocks, TILE_THREADS, sizeof(measure_space), to>>>(j);
    MT_LAUNCHED(stream, "measure");
    sum_parts_kernel<<<(unsigned)g->members, 32, 0, to>>>(j);
    MT_LAUNCHED(stream, "measure: parts");
    return MT_OK;
}
