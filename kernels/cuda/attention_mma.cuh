/* Causal attention on tensor cores: heads of a multiple of 8 up to 128, which zeros widen to the
 * next of 16, 32, 64, 96 and 128 in shared memory. Of bf16 (attention_mma.cu), and of f32
 * (attention_planes.cu): an element is then the sum of three bf16, its planes, and a product that
 * of planes p and q with p + q < 3, as in gemm_planes_sm90.cu.
 *
 * A block owns rows (queries, or keys with their gradients) and passes over tiles of STEP columns,
 * copied to shared memory one tile ahead. A warp owns 16 MT rows of every product, so that scores
 * turn into the left operand of the next product in its registers, and sums over columns never
 * leave it. Backward computes scores twice, once owning keys and once owning queries: every sum has
 * one writer and a fixed order. Source: arXiv 2307.08691. */
#pragma once

#include "kernels/cuda/attention_tiles.cuh"

/* ---- forward ----------------------------------------------------------------------------------
 */

enum { FEW_WARPS = 2, WIDE = 96 };

/* FEW_WARPS, for wide heads where a block has too little shared memory for as many as usual: rows
 * are a warp's own, so that their bits are the same. */
template <typename T, int WARPS> struct fwd_block {
    enum { THREADS = WARPS * 32, ROWS = WARPS * 16 * form<T>::FWD_MT };
};

template <typename T, int D, int WARPS> static size_t fwd_bytes(void)
{
    return fwd_block<T, WARPS>::ROWS * padded<D>::PITCH * sizeof(T) + steps<T, D>::BYTES;
}

/* The largest score of each of a lane's rows, and the sum of its exponentials in this lane. */
template <int MT> struct row_state {
    float most[MT][2], sum[MT][2];
};

/* Scores become exp(scale (score - largest so far)); y and sums shrink to that maximum. scale2 =
 * scale LOG > 0. diagonal: row r sees the columns c <= r + diagonal. */
template <typename T, int D, int FWD_MT>
static __device__ __forceinline__ void soften(float (*p)[form<T>::TILES][4],
                                              struct row_state<FWD_MT> *state, float (*y)[D / 8][4],
                                              float scale2, int64_t diagonal)
{
    enum { STEP = form<T>::STEP, TILES = form<T>::TILES };
    bool whole = diagonal >= STEP - 1; /* each row sees all */
    int last = (int)(whole ? STEP : diagonal);
#pragma unroll
    for (int m = 0; m < FWD_MT; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float largest = state->most[m][i];
            if (!whole) {
#pragma unroll
                for (int n = 0; n < TILES; n++)
#pragma unroll
                    for (int e = 2 * i; e < 2 * i + 2; e++)
                        if (n * 8 + column_in(e) > m * 16 + row_in(e) + last)
                            p[m][n][e] = -INFINITY;
            }
#pragma unroll
            for (int n = 0; n < TILES; n++)
                largest = fmaxf(largest, fmaxf(p[m][n][2 * i], p[m][n][2 * i + 1]));
            largest = mt_row_max(largest);
            /* all -Inf so far: any finite base will do */
            float base = largest == -INFINITY ? 0 : largest * scale2, total = 0;
            float shrink = form<T>::exponential(__fmaf_rn(state->most[m][i], scale2, -base));
#pragma unroll
            for (int n = 0; n < TILES; n++)
#pragma unroll
                for (int e = 2 * i; e < 2 * i + 2; e++) {
                    p[m][n][e] = form<T>::exponential(__fmaf_rn(p[m][n][e], scale2, -base));
                    total += p[m][n][e];
                }
            state->most[m][i] = largest;
            state->sum[m][i] = state->sum[m][i] * shrink + total;
            if (!__any_sync(~0u, shrink != 1)) continue; /* more and more often, further on */
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                y[m][n][2 * i] *= shrink;
                y[m][n][2 * i + 1] *= shrink;
            }
        }
}

/* The keys and values from `k` on, to their place in shared memory. */
template <int D, int THREADS, typename T>
static __device__ __forceinline__ void copy_keys(const steps<T, D> &to, int parity, const T *keys,
                                                 const T *values, int64_t k,
                                                 const struct mt_attention_shape &s)
{
    enum { STEP = form<T>::STEP, PITCH = steps<T, D>::ASKED_PITCH };
    copy_rows<D, STEP, THREADS, PITCH>(to.asked(parity, 0), keys + k * s.width, s.width,
                                       s.sequence - k, s.dim);
    copy_rows<D, STEP, THREADS, PITCH>(to.asked(parity, 1), values + k * s.width, s.width,
                                       s.sequence - k, s.dim);
}

template <typename T, int D, int WARPS>
static __global__ void __launch_bounds__(fwd_block<T, WARPS>::THREADS)
    attention_fwd_mma_kernel(struct mt_attention_fwd_args a, struct mt_attention_shape s)
{
    enum {
        THREADS = fwd_block<T, WARPS>::THREADS,
        ROWS = fwd_block<T, WARPS>::ROWS,
        PITCH = padded<D>::PITCH,
        STEP = form<T>::STEP,
        FWD_MT = form<T>::FWD_MT
    };
    extern __shared__ __align__(16) char shared[];
    T *q = (T *)shared;
    const steps<T, D> pairs = { q + ROWS * PITCH };
    struct own o = own_of(s, s.nq, ROWS, true);
    int64_t g = o.h / (s.nq / s.nkv), first = threadIdx.x / 32 * 16 * FWD_MT, row = o.row + first;
    int64_t end = o.row + ROWS < s.sequence ? o.row + ROWS : s.sequence;
    const T *qkv = (const T *)a.qkv;
    const T *keys = qkv + mt_head_at(s, o.b, s.nq + g);
    const T *values = qkv + mt_head_at(s, o.b, s.nq + s.nkv + g);
    float y[FWD_MT][D / 8][4] = {}, p[FWD_MT][form<T>::TILES][4],
                        scale2 = (float)(a.scale * form<T>::LOG);
    struct row_state<FWD_MT> state;
#pragma unroll
    for (int i = 0; i < FWD_MT * 2; i++) {
        state.most[i / 2][i % 2] = -INFINITY;
        state.sum[i / 2][i % 2] = 0;
    }
    copy_rows<D, ROWS, THREADS>(q, qkv + mt_head_at(s, o.b, o.h) + o.row * s.width, s.width,
                                s.sequence - o.row, s.dim);
    copy_keys<D, THREADS>(pairs, 0, keys, values, 0, s);
    int now = 0;
    for (int64_t k = 0; k < end; k += STEP, now ^= 1) {
        mt_copies_wait_all();
        __syncthreads(); /* these are there, and those before them are done with */
        const mt_bf16 *pair = pairs.template landed<THREADS>(now);
        if (k + STEP < end) copy_keys<D, THREADS>(pairs, now ^ 1, keys, values, k + STEP, s);
        if (k >= row + 16 * FWD_MT) continue; /* no row of this warp sees them */
        inner_products<D, FWD_MT>(p, q + first * PITCH, pair);
        soften<T, D>(p, &state, y, scale2, row - k);
        add_product<T, D, FWD_MT>(y, p, pair + steps<T, D>::MATRIX);
    }
    float *lse = (float *)a.lse + (o.b * s.nq + o.h) * s.sequence;
    T *to = (T *)a.y + o.b * s.sequence * s.pitch + o.h * s.dim;
#pragma unroll
    for (int m = 0; m < FWD_MT; m++) {
        float inverse[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float sum = mt_row_sum(state.sum[m][i]);
            int64_t r = row + m * 16 + row_in(2 * i);
            inverse[i] = 1 / sum;
            if (threadIdx.x % 4 == 0 && r < s.sequence)
                lse[r] = state.most[m][i] * (float)a.scale + logf(sum);
        }
        store_rows<D>(to + (row + m * 16) * s.pitch, s.pitch, s.sequence - row - m * 16, s.dim,
                      y[m], inverse);
    }
}

/* ---- backward ---------------------------------------------------------------------------------
 */

enum { BWD_WARPS = 8 };

template <int WARPS> struct bwd_block {
    enum { THREADS = WARPS * 32, ROWS = WARPS * 16 };
};

/* Own rows of two matrices, steps of two others, and twice their lse and dot. */
template <typename T, int D, int WARPS> static size_t bwd_bytes(void)
{
    return 2 * bwd_block<WARPS>::ROWS * padded<D>::PITCH * sizeof(T) + steps<T, D>::BYTES +
           4 * form<T>::STEP * sizeof(float);
}

/* The rows of query head h and its key head in qkv and dy, their lse and dot. */
template <typename T> struct heads {
    const T *q, *dy, *key, *value;
    const float *lse, *dot;
};

template <typename T>
static __device__ __forceinline__ struct heads<T> heads_of(const struct mt_attention_bwd_args &a,
                                                           const float *dot, int64_t b, int64_t h,
                                                           const struct mt_attention_shape &s) {
    int64_t g = h / (s.nq / s.nkv), sums = (b * s.nq + h) * s.sequence;
    const T *qkv = (const T *)a.qkv;
    return { qkv + mt_head_at(s, b, h),        (const T *)a.dy + b *s.sequence *s.pitch + h *s.dim,
             qkv + mt_head_at(s, b, s.nq + g), qkv + mt_head_at(s, b, s.nq + s.nkv + g),
             (const float *)a.lse + sums,      dot + sums };
}

/* A stage: rows from `from` on of queries and dy, with lse and dot, or of keys and values. */
template <int D, bool KEYS, int THREADS, typename T>
static __device__ __forceinline__ void copy_step(const steps<T, D> &to, int parity, float *sums,
                                                 const struct heads<T> &of, int64_t from,
                                                 const struct mt_attention_shape &s)
{
    enum { STEP = form<T>::STEP, PITCH = steps<T, D>::ASKED_PITCH };
    int64_t count = s.sequence - from, pitch = KEYS ? s.pitch : s.width;
    sums += parity * 2 * STEP;
    copy_rows<D, STEP, THREADS, PITCH>(to.asked(parity, 0), (KEYS ? of.q : of.key) + from * s.width,
                                       s.width, count, s.dim);
    copy_rows<D, STEP, THREADS, PITCH>(
        to.asked(parity, 1), (KEYS ? of.dy : of.value) + from * pitch, pitch, count, s.dim);
#pragma unroll
    for (int first = 0; KEYS && first < 2 * STEP; first += THREADS) {
        const int at = first + (int)threadIdx.x, i = at % STEP;
        if (at >= 2 * STEP) return;
        const float *p = (at < STEP ? of.lse : of.dot) + from;
        mt_copy_ask<4>(sums + at, i < count ? p + i : p, i < count ? 4 : 0);
    }
}

/* p, scores, becomes the probabilities, dp the gradient of the scores, masked ones 0. lse (times
 * LOG) and dot are those of a lane's two rows, or, for KEYS, in `sums` by column. Queries past
 * the last have zeros everywhere: their p meets dy = 0, their dp is 0. seen: query - key of the
 * first row and column. */
template <typename T, bool KEYS>
static __device__ __forceinline__ void soften_bwd(float (*p)[4], float (*dp)[4], const float *lse,
                                                  const float *dot, const float *sums, float scale2,
                                                  int64_t seen)
{
    enum { STEP = form<T>::STEP, TILES = form<T>::TILES };
    bool whole = KEYS ? seen >= 15 : seen >= STEP - 1; /* each query sees each key */
    int first = (int)(whole ? 0 : seen);
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int row = row_in(e), column = n * 8 + column_in(e);
            float l = KEYS ? sums[column] * (float)form<T>::LOG : lse[e / 2];
            float d = KEYS ? sums[STEP + column] : dot[e / 2];
            float x = form<T>::exponential(__fmaf_rn(p[n][e], scale2, -l));
            bool sees = whole || (KEYS ? row <= column + first : column <= row + first);
            p[n][e] = sees ? x : 0;
            dp[n][e] = sees ? x * (dp[n][e] - d) : 0;
        }
}

/* Owning keys: dk and dv, over the query heads of their group in order and the queries that see
 * them. Owning queries: dq, over the keys that they see. */
template <typename T, int D, bool KEYS, int WARPS>
static __global__ void __launch_bounds__(bwd_block<WARPS>::THREADS, 1)
    attention_bwd_mma_kernel(struct mt_attention_bwd_args a, const float *dot,
                             struct mt_attention_shape s)
{
    enum {
        THREADS = bwd_block<WARPS>::THREADS,
        ROWS = bwd_block<WARPS>::ROWS,
        PITCH = padded<D>::PITCH,
        STEP = form<T>::STEP,
        TILES = form<T>::TILES
    };
    extern __shared__ __align__(16) char shared[];
    T *left = (T *)shared, *right = left + ROWS * PITCH;
    const steps<T, D> pairs = { right + ROWS * PITCH };
    float *sums = (float *)((char *)pairs.memory + steps<T, D>::BYTES);
    struct own o = own_of(s, KEYS ? s.nkv : s.nq, ROWS, !KEYS);
    int64_t group = KEYS ? s.nq / s.nkv : 1, h = o.h * group, last = h + group;
    int64_t place = threadIdx.x / 32 * 16, row = o.row + place, count = s.sequence - o.row;
    int64_t begin = KEYS ? o.row : 0;
    int64_t end = KEYS || o.row + ROWS > s.sequence ? s.sequence : o.row + ROWS;
    struct heads<T> of = heads_of<T>(a, dot, o.b, h, s);
    copy_rows<D, ROWS, THREADS>(left, (KEYS ? of.key : of.q) + o.row * s.width, s.width, count,
                                s.dim);
    copy_rows<D, ROWS, THREADS>(right, KEYS ? of.value + o.row * s.width : of.dy + o.row * s.pitch,
                                KEYS ? s.width : s.pitch, count, s.dim);
    copy_step<D, KEYS, THREADS>(pairs, 0, sums, of, begin, s);
    float dleft[1][D / 8][4] = {}, dright[1][KEYS ? D / 8 : 1][4] = {}, p[1][TILES][4],
                       dp[1][TILES][4], scale2 = (float)(a.scale * form<T>::LOG), row_lse[2] = {},
                       row_dot[2] = {};
#pragma unroll
    for (int i = 0; i < 2 && !KEYS; i++) {
        int64_t r = row + row_in(2 * i);
        row_lse[i] = r < s.sequence ? of.lse[r] * (float)form<T>::LOG : 0;
        row_dot[i] = r < s.sequence ? of.dot[r] : 0;
    }
    int now = 0;
    for (int64_t at = begin; h < last; now ^= 1) {
        int64_t next = at + STEP;
        bool more = next < end;
        mt_copies_wait_all();
        __syncthreads(); /* these are there, and those before them are done with */
        if (!more) {
            next = begin;
            if (++h < last) of = heads_of<T>(a, dot, o.b, h, s);
        }
        const mt_bf16 *pair = pairs.template landed<THREADS>(now),
                      *other = pair + steps<T, D>::MATRIX;
        if (h < last) copy_step<D, KEYS, THREADS>(pairs, now ^ 1, sums, of, next, s);
        int64_t seen = KEYS ? at - row : row - at;
        at = next;
        if (seen <= (KEYS ? -STEP : -16)) continue; /* no query here sees a key here */
        inner_products<D, 1>(p, left + place * PITCH, pair);
        inner_products<D, 1>(dp, right + place * PITCH, other);
        soften_bwd<T, KEYS>(p[0], dp[0], row_lse, row_dot, sums + now * 2 * STEP, scale2, seen);
        if constexpr (KEYS) add_product<T, D, 1>(dright, p, other);
        add_product<T, D, 1>(dleft, dp, pair);
    }
    const float scale[2] = { (float)a.scale, (float)a.scale }, one[2] = { 1, 1 };
    T *to = (T *)a.dqkv + row * s.width;
    store_rows<D>(to + mt_head_at(s, o.b, KEYS ? s.nq + o.h : o.h), s.width, s.sequence - row,
                  s.dim, dleft[0], scale);
    if constexpr (KEYS)
        store_rows<D>(to + mt_head_at(s, o.b, s.nq + s.nkv + o.h), s.width, s.sequence - row, s.dim,
                      dright[0], one);
}

/* ---- launches ---------------------------------------------------------------------------------
 */

template <typename T, int D, int WARPS>
static mt_status forward_by(mt_stream *stream, const struct mt_attention_fwd_args *a,
                            const struct mt_attention_shape &s, bool *done)
{
    typedef fwd_block<T, WARPS> block;
    const size_t bytes = fwd_bytes<T, D, WARPS>();
    const void *kernel = (const void *)attention_fwd_mma_kernel<T, D, WARPS>;
    *done = bytes <= (size_t)mt_cuda_block_shared(stream);
    if (!*done) return MT_OK;
    MT_TRY(mt_cuda_give_shared(stream, kernel, bytes, "attention_fwd"));
    const unsigned blocks = (unsigned)(mt_ceil_div(s.sequence, block::ROWS) * s.nq * s.batch);
    attention_fwd_mma_kernel<T, D, WARPS>
        <<<blocks, block::THREADS, bytes, mt_cuda_stream(stream)>>>(*a, s);
    MT_LAUNCHED(stream, "attention_fwd");
    return MT_OK;
}

template <typename T, int D, int WARPS>
static mt_status backward_by(mt_stream *stream, const struct mt_attention_bwd_args *a,
                             const float *dot, const struct mt_attention_shape &s, bool *done)
{
    typedef bwd_block<WARPS> block;
    const size_t bytes = bwd_bytes<T, D, WARPS>();
    const void *keys = (const void *)attention_bwd_mma_kernel<T, D, true, WARPS>;
    const void *queries = (const void *)attention_bwd_mma_kernel<T, D, false, WARPS>;
    const int64_t tiles = mt_ceil_div(s.sequence, block::ROWS) * s.batch;
    cudaStream_t on = mt_cuda_stream(stream);
    *done = bytes <= (size_t)mt_cuda_block_shared(stream);
    if (!*done) return MT_OK;
    MT_TRY(mt_cuda_give_shared(stream, keys, bytes, "attention_bwd"));
    MT_TRY(mt_cuda_give_shared(stream, queries, bytes, "attention_bwd"));
    attention_bwd_mma_kernel<T, D, true, WARPS>
        <<<(unsigned)(tiles * s.nkv), block::THREADS, bytes, on>>>(*a, dot, s);
    MT_LAUNCHED(stream, "attention_bwd");
    attention_bwd_mma_kernel<T, D, false, WARPS>
        <<<(unsigned)(tiles * s.nq), block::THREADS, bytes, on>>>(*a, dot, s);
    MT_LAUNCHED(stream, "attention_bwd");
    return MT_OK;
}

template <typename T, int D>
static mt_status forward(mt_stream *stream, const struct mt_attention_fwd_args *a,
                         const struct mt_attention_shape &s, bool *done)
{
    MT_TRY((forward_by<T, D, form<T>::FWD_WARPS>(stream, a, s, done)));
    if constexpr (D >= WIDE)
        if (!*done) return forward_by<T, D, FEW_WARPS>(stream, a, s, done);
    return MT_OK;
}

template <typename T, int D>
static mt_status backward(mt_stream *stream, const struct mt_attention_bwd_args *a,
                          const float *dot, const struct mt_attention_shape &s, bool *done)
{
    MT_TRY((backward_by<T, D, BWD_WARPS>(stream, a, dot, s, done)));
    if constexpr (D >= WIDE)
        if (!*done) return backward_by<T, D, FEW_WARPS>(stream, a, dot, s, done);
    return MT_OK;
}

/* The widths of a head, ascending, the kernels for them. */
template <typename T> struct width {
    int64_t dim;
    mt_status (*forward)(mt_stream *, const struct mt_attention_fwd_args *,
                         const struct mt_attention_shape &, bool *);
    mt_status (*backward)(mt_stream *, const struct mt_attention_bwd_args *, const float *,
                          const struct mt_attention_shape &, bool *);
};
template <typename T>
static const width<T> widths[] = { { 16, forward<T, 16>, backward<T, 16> },
                                   { 32, forward<T, 32>, backward<T, 32> },
                                   { 64, forward<T, 64>, backward<T, 64> },
                                   { 96, forward<T, 96>, backward<T, 96> },
                                   { 128, forward<T, 128>, backward<T, 128> } };

/* Whether all lies on 16 bytes, heads among them, and a tile's elements are counted in 32 bits. */
template <typename T>
static bool suits(const struct mt_attention_shape &s, uintptr_t addresses, double scale)
{
    enum {
        FWD = fwd_block<T, form<T>::FWD_WARPS>::ROWS,
        BWD = bwd_block<BWD_WARPS>::ROWS,
        MOST = (int)FWD > (int)BWD ? (int)FWD : (int)BWD
    };
    return s.dim % 8 == 0 && addresses % 16 == 0 && scale > 0 && s.width <= INT32_MAX / MOST;
}

template <typename T>
static mt_status forward_any(mt_stream *stream, const struct mt_attention_fwd_args *a, bool *done)
{
    struct mt_attention_shape s =
        mt_attention_shape_of(a->batch, a->sequence, a->query_heads, a->kv_heads, a->head_dim);
    *done = false;
    if (!suits<T>(s, (uintptr_t)a->qkv | (uintptr_t)a->y, a->scale)) return MT_OK;
    for (const width<T> &w : widths<T>)
        if (w.dim >= s.dim) return w.forward(stream, a, s, done);
    return MT_OK;
}

template <typename T>
static mt_status backward_any(mt_stream *stream, const struct mt_attention_bwd_args *a,
                              const float *dot, bool *done)
{
    struct mt_attention_shape s =
        mt_attention_shape_of(a->batch, a->sequence, a->query_heads, a->kv_heads, a->head_dim);
    *done = false;
    if (!suits<T>(s, (uintptr_t)a->qkv | (uintptr_t)a->dqkv | (uintptr_t)a->dy, a->scale))
        return MT_OK;
    for (const width<T> &w : widths<T>)
        if (w.dim >= s.dim) return w.backward(stream, a, dot, s, done);
    return MT_OK;
}
