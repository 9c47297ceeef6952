/* Causal attention forward on Hopper: bf16, heads of 64 or 128.
 *
 * Blocks are persistent. One thread brings tiles of 128 queries and, from the diagonal backwards,
 * of 128 keys and values; two warpgroups own 64 of the queries each. A warpgroup multiplies the
 * next scores while it adds the last product with values; the two take turns at that, so that one's
 * exponentials run beside the other's products. Source: arXiv 2407.08608. */
#include "kernels/cuda/attention_sm90.cuh"

template <int D> struct fwd {
    enum {
        ROWS = 128, /* queries of a tile, and keys */
        TILE = ROWS * D * 2,
        HALF = 64 * LINE, /* from a warpgroup's rows of a tile to the other's */
        STAGES = 2,       /* of keys, and of values */
        Q = 0,
        KEYS = Q + TILE,
        VALUES = KEYS + STAGES * TILE,
        OUT = VALUES + STAGES * TILE,
        Q_FULL = OUT + TILE,
        Q_EMPTY = Q_FULL + 8,
        KEYS_FULL = Q_EMPTY + 8,
        KEYS_EMPTY = KEYS_FULL + STAGES * 8,
        VALUES_FULL = KEYS_EMPTY + STAGES * 8,
        VALUES_EMPTY = VALUES_FULL + STAGES * 8,
        NUMBER = VALUES_EMPTY + STAGES * 8, /* of the tile of queries */
        BYTES = NUMBER + 16
    };
};

/* Barriers of threads: a warpgroup's turn, its own. */
enum { TURN = 1, GROUP = 3 };

struct fwd_maps {
    CUtensorMap rows, y; /* qkv in boxes of 128 rows; y in boxes of 64 */
};

struct fwd_problem {
    struct mt_attention_shape s;
    struct tile_order order;
    float scale;
    float *lse;
};

/* ---- the loader: one thread --------------------------------------------------------------------
 */

/* A tile of a ring, when all warps have read what was there before it. */
template <int D>
static __device__ __forceinline__ void bring_stage(uint32_t base, int tiles, int full, int empty,
                                                   int turn, const CUtensorMap *map, int column,
                                                   int row, int batch)
{
    const int stage = turn % fwd<D>::STAGES;
    const uint32_t bar = base + full + stage * 8;
    barrier_wait(base + empty + stage * 8, (turn / fwd<D>::STAGES & 1) ^ 1);
    barrier_expect(bar, fwd<D>::TILE);
    bring_rows<D, fwd<D>::ROWS>(base + tiles + stage * fwd<D>::TILE, map, bar, column, row, batch);
}

template <int D>
static __device__ __forceinline__ void
load(uint8_t *shared, uint32_t base, const struct fwd_maps &maps, const struct fwd_problem &f)
{
    typedef fwd<D> F;
    const int nq = (int)f.s.nq, nkv = (int)f.s.nkv, group = nq / nkv;
    int keys = 0, values = 0; /* so far */
    for (int turn = 0;; turn++) {
        int i = atomicAdd(f.order.next, 1);
        const struct head_tile t = tile_at(f.order, i);
        barrier_wait(base + F::Q_EMPTY, (turn & 1) ^ 1);
        *(int *)(shared + F::NUMBER) = i;
        if (t.tile < 0) {
            barrier_arrive(base + F::Q_FULL);
            return;
        }
        const int key = (nq + t.head / group) * D, value = key + nkv * D;
        barrier_expect(base + F::Q_FULL, F::TILE);
        bring_rows<D, F::ROWS>(base + F::Q, &maps.rows, base + F::Q_FULL, t.head * D,
                               t.tile * F::ROWS, t.batch);
        for (int n = t.tile; n >= -1; n--) { /* values one tile behind keys, as they are used */
            if (n >= 0)
                bring_stage<D>(base, F::KEYS, F::KEYS_FULL, F::KEYS_EMPTY, keys++, &maps.rows, key,
                               n * F::ROWS, t.batch);
            if (n < t.tile)
                bring_stage<D>(base, F::VALUES, F::VALUES_FULL, F::VALUES_EMPTY, values++,
                               &maps.rows, value, (n + 1) * F::ROWS, t.batch);
        }
    }
}

/* ---- the warpgroups ----------------------------------------------------------------------------
 */

/* The largest score of each of a thread's two rows, and the sum of its exponentials in this lane.
 */
struct row_state {
    float most[2], sum[2];
};

/* Scores become exp(scale (score - largest so far)); y is to shrink by `shrink`. scale2 = scale
 * log2 e > 0. */
static __device__ __forceinline__ void soften(float (&p)[64], struct row_state &state,
                                              float (&shrink)[2], float scale2)
{
    enum { CHAINS = 4 }; /* of maxima and of sums, which would wait for each other */
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float most[CHAINS], total[CHAINS];
#pragma unroll
        for (int c = 0; c < CHAINS; c++)
            most[c] = fmaxf(p[c * 4 + 2 * i], p[c * 4 + 2 * i + 1]), total[c] = 0;
#pragma unroll
        for (int n = CHAINS; n < 16; n++)
            most[n % CHAINS] =
                fmaxf(most[n % CHAINS], fmaxf(p[n * 4 + 2 * i], p[n * 4 + 2 * i + 1]));
        float largest = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
        largest = mt_row_max(fmaxf(largest, state.most[i]));
        /* all -Inf so far: any finite base will do */
        const float base = largest == -INFINITY ? 0 : largest * scale2;
        shrink[i] = mt_exp2(__fmaf_rn(state.most[i], scale2, -base));
#pragma unroll
        for (int n = 0; n < 16; n++)
#pragma unroll
            for (int e = n * 4 + 2 * i; e < n * 4 + 2 * i + 2; e++) {
                p[e] = mt_exp2(__fmaf_rn(p[e], scale2, -base));
                total[n % CHAINS] += p[e];
            }
        state.most[i] = largest;
        state.sum[i] =
            __fmaf_rn(state.sum[i], shrink[i], (total[0] + total[1]) + (total[2] + total[3]));
    }
}

/* On the diagonal, the warpgroup's rows begin `above` keys after the tile's first. */
static __device__ __forceinline__ void mask(float (&p)[64], int above)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    const int row = above + warp * 16 + lane / 4, column = lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 64; i++)
        if (column + i / 4 * 8 + i % 2 > row + i / 2 % 2 * 8) p[i] = -INFINITY;
}

/* The sums of a tile of queries to y and lse. */
template <int D>
static __device__ __forceinline__ void
finish(uint32_t base, const struct fwd_maps &maps, const struct fwd_problem &f,
       const struct head_tile &t, const float (&y)[D / 2], const struct row_state &state)
{
    typedef fwd<D> F;
    const int wg = threadIdx.x / 128 - 1, lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    const int row = t.tile * F::ROWS + wg * 64;
    float *lse = f.lse + ((int64_t)t.batch * f.s.nq + t.head) * f.s.sequence;
    float inverse[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float sum = mt_row_sum(state.sum[i]);
        int r = row + warp * 16 + lane / 4 + i * 8;
        inverse[i] = 1 / sum;
        if (lane % 4 == 0 && r < f.s.sequence) lse[r] = state.most[i] * f.scale + logf(sum);
    }
    const uint32_t out = base + F::OUT + wg * F::HALF;
    if (threadIdx.x % 128 == 0) copies_read<0>(); /* the tile before has left it */
    barrier_threads(GROUP + wg, 128);
    put_rows<D, F::ROWS>(out, y, inverse[0], inverse[1]);
    shared_to_copies();
    barrier_threads(GROUP + wg, 128);
    if (threadIdx.x % 128 == 0) store_rows<D, F::ROWS>(&maps.y, out, t.head * D, row, t.batch);
}

template <int D>
static __device__ __forceinline__ void
attend(uint8_t *shared, uint32_t base, const struct fwd_maps &maps, const struct fwd_problem &f)
{
    typedef fwd<D> F;
    /* the shuffle shows the compiler that this is uniform */
    const int wg = __shfl_sync(~0u, (int)threadIdx.x / 128 - 1, 0);
    const float scale2 = f.scale * (float)M_LOG2E;
    const uint32_t q = base + F::Q + wg * F::HALF;
    int at = 0;                                     /* tiles of keys so far */
    if (wg == 1) barrier_threads_arrive(TURN, 256); /* the first turn is the other's */
#pragma unroll 1
    for (int turn = 0;; turn++) {
        barrier_wait(base + F::Q_FULL, turn & 1);
        const struct head_tile t =
            tile_at(f.order, __shfl_sync(~0u, *(volatile int *)(shared + F::NUMBER), 0));
        if (t.tile < 0) break;
        float y[D / 2], p[64], shrink[2];
        uint32_t kept[32];
        struct row_state state = { { -INFINITY, -INFINITY }, { 0, 0 } };
        barrier_wait(base + F::KEYS_FULL + at % 2 * 8, at / 2 & 1);
        sums_stay(p);
        wgmma_fence();
        scores_of<D, F::ROWS, 128>(p, q, base + F::KEYS + at % 2 * F::TILE);
        wgmma_commit();
        wgmma_wait<0>();
        sums_stay(p);
        release(base + F::KEYS_EMPTY + at % 2 * 8);
        mask(p, wg * 64);
        soften(p, state, shrink, scale2);
        pack_sums<128>(kept, p);
#pragma unroll
        for (int i = 0; i < D / 2; i++) y[i] = 0;
#pragma unroll 1
        for (int n = t.tile - 1; n >= 0; n--) {
            const int last = at++;
            barrier_wait(base + F::KEYS_FULL + at % 2 * 8, at / 2 & 1);
            barrier_threads(TURN + wg, 256);
            sums_stay(p);
            sums_stay(y);
            wgmma_fence();
            scores_of<D, F::ROWS, 128>(p, q, base + F::KEYS + at % 2 * F::TILE);
            wgmma_commit();
            barrier_wait(base + F::VALUES_FULL + last % 2 * 8, last / 2 & 1);
            wgmma_fence();
            add_weighted<D, 128>(y, kept, base + F::VALUES + last % 2 * F::TILE, true);
            wgmma_commit();
            barrier_threads_arrive(TURN + (wg ^ 1), 256);
            wgmma_wait<1>();
            sums_stay(p);
            release(base + F::KEYS_EMPTY + at % 2 * 8);
            soften(p, state, shrink, scale2);
            wgmma_wait<0>();
            sums_stay(y);
            release(base + F::VALUES_EMPTY + last % 2 * 8);
            pack_sums<128>(kept, p);
#pragma unroll
            for (int i = 0; i < D / 2; i++) y[i] *= shrink[i / 2 % 2];
        }
        release(base + F::Q_EMPTY);
        barrier_wait(base + F::VALUES_FULL + at % 2 * 8, at / 2 & 1);
        sums_stay(y);
        wgmma_fence();
        add_weighted<D, 128>(y, kept, base + F::VALUES + at % 2 * F::TILE, true);
        wgmma_commit();
        wgmma_wait<0>();
        sums_stay(y);
        release(base + F::VALUES_EMPTY + at % 2 * 8);
        at++;
        finish<D>(base, maps, f, t, y, state);
    }
    if (threadIdx.x % 128 == 0) copies_done<0>();
}

/* ---- the kernel --------------------------------------------------------------------------------
 */

template <int D>
static __global__ void __launch_bounds__(ATTENTION_THREADS, 1)
    attention_fwd_sm90_kernel(const __grid_constant__ struct fwd_maps maps,
                              const __grid_constant__ struct fwd_problem f)
{
    typedef fwd<D> F;
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t base = shared_address(shared);
    if (threadIdx.x == 0) {
        barrier_init(base + F::Q_FULL, 1);
        barrier_init(base + F::Q_EMPTY, 8);
        for (int i = 0; i < F::STAGES; i++) {
            barrier_init(base + F::KEYS_FULL + i * 8, 1);
            barrier_init(base + F::KEYS_EMPTY + i * 8, 8);
            barrier_init(base + F::VALUES_FULL + i * 8, 1);
            barrier_init(base + F::VALUES_EMPTY + i * 8, 8);
        }
        barrier_init_done();
        map_prefetch(&maps.rows);
        map_prefetch(&maps.y);
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_down<LOADER_REGISTERS>();
        if (threadIdx.x == 0) load<D>(shared, base, maps, f);
        __syncwarp();
    } else {
        registers_up<REGISTERS>();
        attend<D>(shared, base, maps, f);
    }
}

template <int D>
static mt_status forward(mt_stream *stream, const struct mt_attention_fwd_args *a,
                         const struct mt_attention_shape &s)
{
    struct fwd_maps maps;
    void *next;
    MT_TRY(attention_map(&maps.rows, "qkv", a->qkv, s, s.width, fwd<D>::ROWS));
    MT_TRY(attention_map(&maps.y, "y", a->y, s, s.pitch, 64));
    MT_TRY(mt_cuda_scratch(stream, &next, sizeof(int)));
    MT_CUDA(cudaMemsetAsync(next, 0, sizeof(int), mt_cuda_stream(stream)));
    struct fwd_problem f = { s,
                             tile_order_of((int *)next, s, s.nq, fwd<D>::ROWS,
                                           s.sequence * D * 2 * (int64_t)sizeof(mt_bf16),
                                           s.nq / s.nkv, true),
                             (float)a->scale, (float *)a->lse };
    const int64_t tiles = f.order.pairs * f.order.tiles, most = mt_cuda_multiprocessors(stream);
    MT_CUDA(cudaFuncSetAttribute(attention_fwd_sm90_kernel<D>,
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, fwd<D>::BYTES));
    attention_fwd_sm90_kernel<D><<<(unsigned)(tiles < most ? tiles : most), ATTENTION_THREADS,
                                   fwd<D>::BYTES, mt_cuda_stream(stream)>>>(maps, f);
    MT_LAUNCHED(stream, "attention_fwd");
    return MT_OK;
}

mt_status mt_attention_fwd_sm90(mt_stream *stream, const struct mt_attention_fwd_args *a,
                                bool *done)
{
    struct mt_attention_shape s =
        mt_attention_shape_of(a->batch, a->sequence, a->query_heads, a->kv_heads, a->head_dim);
    *done = attention_fits_sm90(stream, s) && a->scale > 0 && (s.dim == 64 || s.dim == 128) &&
            ((uintptr_t)a->qkv | (uintptr_t)a->y) % 16 == 0;
    if (!*done) return MT_OK;
    return s.dim == 64 ? forward<64>(stream, a, s) : forward<128>(stream, a, s);
}
