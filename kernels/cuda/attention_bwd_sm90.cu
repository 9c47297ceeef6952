/* Causal attention backward on Hopper: bf16, heads of 64 or 128.
 *
 * Every gradient has one writer and a fixed order of sums, so scores are computed twice: by blocks
 * that own 128 keys and pass over the queries that see them (dk, dv), and by blocks that own 128
 * queries and pass over the keys that they see (dq). Blocks are persistent; one thread brings
 * tiles, two warpgroups have 64 of the rows each. Scores stay in registers: with the own rows as
 * rows of the product they are the left operand of the next one. Source: arXiv 2407.08608. */
#include "kernels/cuda/attention_sm90.cuh"

enum { ROWS = 128, HALF = 64 * LINE, STEP = 64 }; /* own rows; of a warpgroup; queries of a step */

/* Of each query: log sum exp in powers of 2, and <dy, y>; past the last Inf, for which
 * probabilities are 0, and 0. [batch, nq, line / STEP, 2, STEP], the sequence padded to whole
 * tiles. */
struct query_sums {
    float *at;
    int line;
};
static __host__ __device__ __forceinline__ int64_t sums_at(const struct query_sums &q, int64_t head,
                                                           int row)
{
    return (head * q.line + row / STEP * STEP) * 2 + row % STEP;
}

struct bwd_maps {
    CUtensorMap wide, narrow;       /* qkv in boxes of 128 and 64 rows */
    CUtensorMap dy_wide, dy_narrow; /* dy likewise */
    CUtensorMap out;                /* dqkv in boxes of 64 */
};

struct bwd_problem {
    int nq, nkv, group, steps; /* heads, queries' to a key's; steps of a sequence */
    struct tile_order order;
    struct query_sums sums;
    float scale;
};

/* The number of the next tile to the warpgroups, with the own rows of two matrices. F: the layout
 * of shared memory. */
template <class F>
static __device__ __forceinline__ struct head_tile next_tile(uint8_t *shared, uint32_t base,
                                                             const struct bwd_problem &f, int turn)
{
    int i = atomicAdd(f.order.next, 1);
    const struct head_tile t = tile_at(f.order, i);
    barrier_wait(base + F::OWN_EMPTY, (turn & 1) ^ 1);
    *(int *)(shared + F::NUMBER) = i;
    if (t.tile < 0)
        barrier_arrive(base + F::OWN_FULL);
    else
        barrier_expect(base + F::OWN_FULL, 2 * F::TILE);
    return t;
}

template <class F>
static __device__ __forceinline__ struct head_tile this_tile(uint8_t *shared, uint32_t base,
                                                             const struct bwd_problem &f, int turn)
{
    barrier_wait(base + F::OWN_FULL, turn & 1);
    return tile_at(f.order, __shfl_sync(~0u, *(volatile int *)(shared + F::NUMBER), 0));
}

/* The warpgroup's rows of a gradient, on their way from a tile in shared memory. */
template <int D>
static __device__ __forceinline__ void give_rows(const CUtensorMap *map, uint32_t out,
                                                 const float (&d)[D / 2], float scale, int column,
                                                 int row, int batch, int barrier)
{
    put_rows<D, ROWS>(out, d, scale, scale);
    shared_to_copies();
    barrier_threads(barrier, 128);
    if (threadIdx.x % 128 == 0) store_rows<D, ROWS>(map, out, column, row, batch);
}

template <int N> static __device__ __forceinline__ void clear(float (&d)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) d[i] = 0;
}

template <class F> static __device__ __forceinline__ void init_barriers(uint32_t base)
{
    barrier_init(base + F::OWN_FULL, 1);
    barrier_init(base + F::OWN_EMPTY, 8);
    for (int i = 0; i < F::STAGES; i++) {
        barrier_init(base + F::FULL + i * 8, 1);
        barrier_init(base + F::EMPTY + i * 8, 8);
    }
    barrier_init_done();
}

/* ---- keys and values ---------------------------------------------------------------------------
 */

template <int D> struct by_keys {
    enum {
        TILE = ROWS * D * 2,
        PART = STEP * D * 2,
        STAGE = 2 * PART, /* queries, then dy */
        STAGES = 3,
        LINE_OF_SUMS = 2 * STEP * 4,
        KEYS = 0,
        VALUES = TILE,
        OUT = 2 * TILE, /* dk, dv */
        RING = 4 * TILE,
        SUMS = RING + STAGES * STAGE, /* of each stage */
        OWN_FULL = SUMS + STAGES * LINE_OF_SUMS,
        OWN_EMPTY = OWN_FULL + 8,
        FULL = OWN_EMPTY + 8,
        EMPTY = FULL + STAGES * 8,
        NUMBER = EMPTY + STAGES * 8,
        BYTES = NUMBER + 16
    };
};

template <int D>
static __device__ __forceinline__ void load_queries(uint8_t *shared, uint32_t base,
                                                    const struct bwd_maps &maps,
                                                    const struct bwd_problem &f)
{
    typedef by_keys<D> F;
    int stage = 0;
    uint32_t parity = 1;
    for (int turn = 0;; turn++) {
        const struct head_tile t = next_tile<F>(shared, base, f, turn);
        if (t.tile < 0) return;
        const int key = (f.nq + t.head) * D, row = t.tile * ROWS;
        bring_rows<D, ROWS>(base + F::KEYS, &maps.wide, base + F::OWN_FULL, key, row, t.batch);
        bring_rows<D, ROWS>(base + F::VALUES, &maps.wide, base + F::OWN_FULL, key + f.nkv * D, row,
                            t.batch);
        for (int h = t.head * f.group; h < (t.head + 1) * f.group; h++)
            for (int q = row / STEP; q < f.steps; q++) {
                const uint32_t to = base + F::RING + stage * F::STAGE;
                const uint32_t full = base + F::FULL + stage * 8;
                barrier_wait(base + F::EMPTY + stage * 8, parity);
                barrier_expect(full, F::STAGE + F::LINE_OF_SUMS);
                bring_rows<D, STEP>(to, &maps.narrow, full, h * D, q * STEP, t.batch);
                bring_rows<D, STEP>(to + F::PART, &maps.dy_narrow, full, h * D, q * STEP, t.batch);
                copy_bytes(base + F::SUMS + stage * F::LINE_OF_SUMS,
                           f.sums.at + sums_at(f.sums, t.batch * f.nq + h, q * STEP),
                           F::LINE_OF_SUMS, full);
                if (++stage == F::STAGES) stage = 0, parity ^= 1;
            }
    }
}

/* Scores [keys, queries] become probabilities. lse2: that of a thread's first column. On the
 * diagonal, which is where the first query is the first key, queries see no later keys. */
static __device__ __forceinline__ void soften_keys(float (&p)[32], uint32_t lse2, float scale2,
                                                   bool diagonal)
{
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float2 l = shared_pair(lse2 + n * 32);
#pragma unroll
        for (int e = 0; e < 4; e++)
            p[n * 4 + e] = mt_exp2(__fmaf_rn(p[n * 4 + e], scale2, e % 2 ? -l.y : -l.x));
    }
    if (!diagonal) return;
#pragma unroll
    for (int i = 0; i < 32; i++)
        if (row + i / 2 % 2 * 8 > column + i / 4 * 8 + i % 2) p[i] = 0;
}

/* dp becomes the gradient of the scores. */
static __device__ __forceinline__ void gradient_keys(float (&dp)[32], const float (&p)[32],
                                                     uint32_t dot)
{
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float2 d = shared_pair(dot + n * 32);
#pragma unroll
        for (int e = 0; e < 4; e++)
            dp[n * 4 + e] = p[n * 4 + e] * (dp[n * 4 + e] - (e % 2 ? d.y : d.x));
    }
}

template <int D>
static __device__ __forceinline__ void
own_keys(uint8_t *shared, uint32_t base, const struct bwd_maps &maps, const struct bwd_problem &f)
{
    typedef by_keys<D> F;
    const int wg = __shfl_sync(~0u, (int)threadIdx.x / 128 - 1, 0);
    const float scale2 = f.scale * (float)M_LOG2E;
    const uint32_t keys = base + F::KEYS + wg * HALF, values = base + F::VALUES + wg * HALF;
    const uint32_t lane = threadIdx.x % 4 * 8;
    int stage = 0;
    uint32_t parity = 0;
#pragma unroll 1
    for (int turn = 0;; turn++) {
        const struct head_tile t = this_tile<F>(shared, base, f, turn);
        if (t.tile < 0) break;
        const int first = t.tile * (ROWS / STEP); /* the step of the tile's first key */
        float dk[D / 2], dv[D / 2], p[32], dp[32];
        uint32_t kept_p[16], kept_dp[16];
        clear(dk);
        clear(dv);
#pragma unroll 1
        for (int left = (f.steps - first) * f.group, q = first; left > 0; left--) {
            const uint32_t queries = base + F::RING + stage * F::STAGE, dy = queries + F::PART;
            const uint32_t sums = base + F::SUMS + stage * F::LINE_OF_SUMS + lane;
            const uint32_t empty = base + F::EMPTY + stage * 8;
            barrier_wait(base + F::FULL + stage * 8, parity);
            const int seen = q - first - wg; /* steps from the first key to the first query */
            if (++q == f.steps) q = first;
            if (++stage == F::STAGES) stage = 0, parity ^= 1;
            if (seen < 0) { /* of these keys no query here sees any */
                release(empty);
                continue;
            }
            sums_stay(p);
            sums_stay(dp);
            wgmma_fence();
            scores_of<D, ROWS, STEP>(p, keys, queries);
            wgmma_commit();
            scores_of<D, ROWS, STEP>(dp, values, dy);
            wgmma_commit();
            wgmma_wait<1>();
            sums_stay(p);
            soften_keys(p, sums, scale2, seen == 0);
            pack_sums<STEP>(kept_p, p);
            sums_stay(dv);
            wgmma_fence();
            add_weighted<D, STEP>(dv, kept_p, dy, true);
            wgmma_commit();
            wgmma_wait<1>();
            sums_stay(dp);
            gradient_keys(dp, p, sums + STEP * 4);
            pack_sums<STEP>(kept_dp, dp);
            sums_stay(dk);
            wgmma_fence();
            add_weighted<D, STEP>(dk, kept_dp, queries, true);
            wgmma_commit();
            wgmma_wait<0>();
            sums_stay(dv);
            sums_stay(dk);
            release(empty);
        }
        release(base + F::OWN_EMPTY);
        const int column = (f.nq + t.head) * D, row = t.tile * ROWS + wg * 64;
        const uint32_t out = base + F::OUT + wg * HALF;
        if (threadIdx.x % 128 == 0) copies_read<0>(); /* the tile before has left it */
        barrier_threads(1 + wg, 128);
        give_rows<D>(&maps.out, out, dk, f.scale, column, row, t.batch, 1 + wg);
        give_rows<D>(&maps.out, out + F::TILE, dv, 1, column + f.nkv * D, row, t.batch, 1 + wg);
    }
    if (threadIdx.x % 128 == 0) copies_done<0>();
}

template <int D>
static __global__ void __launch_bounds__(ATTENTION_THREADS, 1)
    attention_bwd_keys_sm90_kernel(const __grid_constant__ struct bwd_maps maps,
                                   const __grid_constant__ struct bwd_problem f)
{
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t base = shared_address(shared);
    if (threadIdx.x == 0) init_barriers<by_keys<D>>(base);
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_down<LOADER_REGISTERS>();
        if (threadIdx.x == 0) load_queries<D>(shared, base, maps, f);
        __syncwarp();
    } else {
        registers_up<REGISTERS>();
        own_keys<D>(shared, base, maps, f);
    }
}

/* ---- queries -----------------------------------------------------------------------------------
 */

template <int D> struct by_queries {
    enum {
        TILE = ROWS * D * 2,
        STAGE = 2 * TILE, /* keys, then values */
        STAGES = 2,
        QUERIES = 0,
        DY = TILE,
        OUT = 2 * TILE,
        RING = 3 * TILE,
        OWN_FULL = RING + STAGES * STAGE,
        OWN_EMPTY = OWN_FULL + 8,
        FULL = OWN_EMPTY + 8,
        EMPTY = FULL + STAGES * 8,
        NUMBER = EMPTY + STAGES * 8,
        BYTES = NUMBER + 16
    };
};

template <int D>
static __device__ __forceinline__ void
load_keys(uint8_t *shared, uint32_t base, const struct bwd_maps &maps, const struct bwd_problem &f)
{
    typedef by_queries<D> F;
    int stage = 0;
    uint32_t parity = 1;
    for (int turn = 0;; turn++) {
        const struct head_tile t = next_tile<F>(shared, base, f, turn);
        if (t.tile < 0) return;
        const int key = (f.nq + t.head / f.group) * D, row = t.tile * ROWS;
        bring_rows<D, ROWS>(base + F::QUERIES, &maps.wide, base + F::OWN_FULL, t.head * D, row,
                            t.batch);
        bring_rows<D, ROWS>(base + F::DY, &maps.dy_wide, base + F::OWN_FULL, t.head * D, row,
                            t.batch);
        for (int k = t.tile; k >= 0; k--) {
            const uint32_t to = base + F::RING + stage * F::STAGE;
            const uint32_t full = base + F::FULL + stage * 8;
            barrier_wait(base + F::EMPTY + stage * 8, parity);
            barrier_expect(full, F::STAGE);
            bring_rows<D, ROWS>(to, &maps.wide, full, key, k * ROWS, t.batch);
            bring_rows<D, ROWS>(to + F::TILE, &maps.wide, full, key + f.nkv * D, k * ROWS, t.batch);
            if (++stage == F::STAGES) stage = 0, parity ^= 1;
        }
    }
}

/* Scores [queries, keys] become probabilities, on the diagonal those of the keys that the rows,
 * which begin `above` keys after the first, see. */
static __device__ __forceinline__ void soften_queries(float (&p)[64], const float (&lse2)[2],
                                                      float scale2, bool diagonal, int above)
{
    const int row = above + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 64; i++) p[i] = mt_exp2(__fmaf_rn(p[i], scale2, -lse2[i / 2 % 2]));
    if (!diagonal) return;
#pragma unroll
    for (int i = 0; i < 64; i++)
        if (column + i / 4 * 8 + i % 2 > row + i / 2 % 2 * 8) p[i] = 0;
}

template <int D>
static __device__ __forceinline__ void own_queries(uint8_t *shared, uint32_t base,
                                                   const struct bwd_maps &maps,
                                                   const struct bwd_problem &f)
{
    typedef by_queries<D> F;
    const int wg = __shfl_sync(~0u, (int)threadIdx.x / 128 - 1, 0);
    const float scale2 = f.scale * (float)M_LOG2E;
    const uint32_t queries = base + F::QUERIES + wg * HALF, dy = base + F::DY + wg * HALF;
    int stage = 0;
    uint32_t parity = 0;
#pragma unroll 1
    for (int turn = 0;; turn++) {
        const struct head_tile t = this_tile<F>(shared, base, f, turn);
        if (t.tile < 0) break;
        const int row = t.tile * ROWS + wg * 64;
        float dq[D / 2], p[64], dp[64], lse2[2], dot[2];
        uint32_t kept[32];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int r = row + i * 8 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
            const float *sums = f.sums.at + sums_at(f.sums, t.batch * f.nq + t.head, r);
            lse2[i] = sums[0], dot[i] = sums[STEP];
        }
        clear(dq);
#pragma unroll 1
        for (int k = t.tile; k >= 0; k--) {
            const uint32_t keys = base + F::RING + stage * F::STAGE;
            barrier_wait(base + F::FULL + stage * 8, parity);
            sums_stay(p);
            sums_stay(dp);
            wgmma_fence();
            scores_of<D, ROWS, ROWS>(p, queries, keys);
            wgmma_commit();
            scores_of<D, ROWS, ROWS>(dp, dy, keys + F::TILE);
            wgmma_commit();
            wgmma_wait<1>();
            sums_stay(p);
            soften_queries(p, lse2, scale2, k == t.tile, wg * 64);
            wgmma_wait<0>();
            sums_stay(dp);
#pragma unroll
            for (int i = 0; i < 64; i++) dp[i] = p[i] * (dp[i] - dot[i / 2 % 2]);
            pack_sums<ROWS>(kept, dp);
            sums_stay(dq);
            wgmma_fence();
            add_weighted<D, ROWS>(dq, kept, keys, true);
            wgmma_commit();
            wgmma_wait<0>();
            sums_stay(dq);
            release(base + F::EMPTY + stage * 8);
            if (++stage == F::STAGES) stage = 0, parity ^= 1;
        }
        release(base + F::OWN_EMPTY);
        if (threadIdx.x % 128 == 0) copies_read<0>(); /* the tile before has left it */
        barrier_threads(1 + wg, 128);
        give_rows<D>(&maps.out, base + F::OUT + wg * HALF, dq, f.scale, t.head * D, row, t.batch,
                     1 + wg);
    }
    if (threadIdx.x % 128 == 0) copies_done<0>();
}

template <int D>
static __global__ void __launch_bounds__(ATTENTION_THREADS, 1)
    attention_bwd_queries_sm90_kernel(const __grid_constant__ struct bwd_maps maps,
                                      const __grid_constant__ struct bwd_problem f)
{
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t base = shared_address(shared);
    if (threadIdx.x == 0) init_barriers<by_queries<D>>(base);
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_down<LOADER_REGISTERS>();
        if (threadIdx.x == 0) load_keys<D>(shared, base, maps, f);
        __syncwarp();
    } else {
        registers_up<REGISTERS>();
        own_queries<D>(shared, base, maps, f);
    }
}

/* ---- sums of queries ---------------------------------------------------------------------------
 */

enum { SUM_THREADS = 256, SUM_LANES = 16 };

/* SUM_LANES threads a head of a row. */
static __global__ void __launch_bounds__(SUM_THREADS)
    query_sums_kernel(struct query_sums to, struct mt_attention_bwd_args a,
                      struct mt_attention_shape s)
{
    typedef mt_vec<mt_bf16, 8> vec;
    const int64_t i = (int64_t)blockIdx.x * (SUM_THREADS / SUM_LANES) + threadIdx.x / SUM_LANES;
    const int64_t h = i % s.nq, row = i / s.nq, b = row / to.line, r = row % to.line;
    const bool there = b < s.batch && r < s.sequence;
    float sum = 0;
    if (there) {
        const int64_t at = (b * s.sequence + r) * s.pitch + h * s.dim;
        for (int c = threadIdx.x % SUM_LANES * 8; c < s.dim; c += SUM_LANES * 8) {
            const vec dy = *(const vec *)((const mt_bf16 *)a.dy + at + c);
            const vec y = *(const vec *)((const mt_bf16 *)a.y + at + c);
#pragma unroll
            for (int j = 0; j < 8; j++) sum = __fmaf_rn(mt_get(&dy.at[j]), mt_get(&y.at[j]), sum);
        }
    }
    for (int lane = SUM_LANES / 2; lane; lane /= 2) sum += __shfl_xor_sync(~0u, sum, lane);
    if (b >= s.batch || threadIdx.x % SUM_LANES) return;
    const float *lse = (const float *)a.lse + (b * s.nq + h) * s.sequence;
    float *sums = to.at + sums_at(to, b * s.nq + h, (int)r);
    sums[0] = there ? lse[r] * (float)M_LOG2E : INFINITY;
    sums[STEP] = sum;
}

/* ---- launches ----------------------------------------------------------------------------------
 */

template <class F>
static mt_status launch(mt_stream *stream,
                        void (*kernel)(const struct bwd_maps, const struct bwd_problem),
                        const struct bwd_maps *maps, const struct bwd_problem *f)
{
    const int tiles = f->order.pairs * f->order.tiles, most = mt_cuda_multiprocessors(stream);
    MT_CUDA(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)F::BYTES));
    kernel<<<(unsigned)(tiles < most ? tiles : most), ATTENTION_THREADS, F::BYTES,
             mt_cuda_stream(stream)>>>(*maps, *f);
    MT_LAUNCHED(stream, "attention_bwd");
    return MT_OK;
}

static mt_status make_maps(struct bwd_maps *maps, const struct mt_attention_bwd_args *a,
                           const struct mt_attention_shape &s)
{
    MT_TRY(attention_map(&maps->wide, "qkv", a->qkv, s, s.width, ROWS));
    MT_TRY(attention_map(&maps->narrow, "qkv", a->qkv, s, s.width, STEP));
    MT_TRY(attention_map(&maps->dy_wide, "dy", a->dy, s, s.pitch, ROWS));
    MT_TRY(attention_map(&maps->dy_narrow, "dy", a->dy, s, s.pitch, STEP));
    return attention_map(&maps->out, "dqkv", a->dqkv, s, s.width, 64);
}

enum { COUNTERS = 256 }; /* bytes: those of tiles, before the sums of queries */

static size_t scratch_bytes(const struct mt_attention_shape &s)
{
    int64_t line = mt_ceil_div(s.sequence, ROWS) * ROWS, lines = s.batch * s.nq;
    return COUNTERS + (size_t)(2 * lines * line) * sizeof(float);
}

template <int D>
static mt_status backward(mt_stream *stream, const struct mt_attention_bwd_args *a,
                          const struct mt_attention_shape &s)
{
    struct bwd_maps maps;
    struct bwd_problem f = {};
    const int64_t line = mt_ceil_div(s.sequence, ROWS) * ROWS, lines = s.batch * s.nq;
    const int64_t each = s.sequence * D * 2 * (int64_t)sizeof(mt_bf16);
    cudaStream_t on = mt_cuda_stream(stream);
    void *scratch;
    MT_TRY(mt_cuda_scratch(stream, &scratch, scratch_bytes(s)));
    int *next = (int *)scratch;
    f.sums.at = (float *)((char *)scratch + COUNTERS);
    f.sums.line = (int)line;
    f.nq = (int)s.nq, f.nkv = (int)s.nkv, f.group = f.nq / f.nkv;
    f.steps = (int)mt_ceil_div(s.sequence, STEP);
    f.scale = (float)a->scale;
    MT_TRY(make_maps(&maps, a, s));
    MT_CUDA(cudaMemsetAsync(next, 0, COUNTERS, on));
    query_sums_kernel<<<(unsigned)mt_ceil_div(lines * line * SUM_LANES, SUM_THREADS), SUM_THREADS,
                        0, on>>>(f.sums, *a, s);
    MT_LAUNCHED(stream, "attention_bwd");
    f.order = tile_order_of(next, s, s.nkv, ROWS, each * (s.nq / s.nkv), 1, false);
    MT_TRY(launch<by_keys<D>>(stream, attention_bwd_keys_sm90_kernel<D>, &maps, &f));
    f.order = tile_order_of(next + 1, s, s.nq, ROWS, each, s.nq / s.nkv, true);
    return launch<by_queries<D>>(stream, attention_bwd_queries_sm90_kernel<D>, &maps, &f);
}

static struct mt_attention_shape shape_of(const struct mt_attention_bwd_args *a)
{
    return mt_attention_shape_of(a->batch, a->sequence, a->query_heads, a->kv_heads, a->head_dim);
}

static bool suits(const mt_stream *stream, const struct mt_attention_bwd_args *a,
                  const struct mt_attention_shape &s)
{
    uintptr_t all = (uintptr_t)a->qkv | (uintptr_t)a->dqkv | (uintptr_t)a->dy | (uintptr_t)a->y;
    return attention_fits_sm90(stream, s) && a->scale > 0 && (s.dim == 64 || s.dim == 128) &&
           all % 16 == 0;
}

size_t mt_attention_bwd_sm90_scratch(const mt_stream *stream, const struct mt_attention_bwd_args *a)
{
    struct mt_attention_shape s = shape_of(a);
    return s.batch && s.sequence && suits(stream, a, s) ? scratch_bytes(s) : 0;
}

mt_status mt_attention_bwd_sm90(mt_stream *stream, const struct mt_attention_bwd_args *a,
                                bool *done)
{
    struct mt_attention_shape s = shape_of(a);
    *done = suits(stream, a, s);
    if (!*done) return MT_OK;
    return s.dim == 64 ? backward<64>(stream, a, s) : backward<128>(stream, a, s);
}
