/* Normalisation and rotation of queries and keys. A block takes a token; in it, `lanes` threads
 * take a head, N pairs (i, i + d/2) each at a time. */
#include "kernels/cuda/rope_heads.cuh"
#include "kernels/cuda/scratch.h"

/* ---- forward ----------------------------------------------------------------------------------
 */

/* This thread's part of the sum of squares of a head. */
template <typename T, int N>
static __device__ __forceinline__ mt_real<T> squares(const T *x, const struct shape &s,
                                                     const struct place &p)
{
    mt_real<T> a[N], b[N], sum = 0;
    int64_t half = s.dim / 2;
    for (int64_t i = p.first; i < half; i += p.step) {
        mt_get_vec<N>(a, x + i);
        mt_get_vec<N>(b, x + i + half);
#pragma unroll
        for (int j = 0; j < N; j++) sum += a[j] * a[j] + b[j] * b[j];
    }
    return sum;
}

/* A head normalised by rstd and w (NULL: not at all) and turned by the angles from `angle` on. */
template <typename T, int N>
static __device__ __forceinline__ void
turn_head(T *y, const T *x, mt_real<T> rstd, const mt_real<T> *w, int64_t angle,
          const struct mt_qk_norm_rope_fwd_args &a, const struct shape &s, const struct place &p)
{
    typedef mt_real<T> R;
    int64_t half = s.dim / 2;
    for (int64_t i = p.first; i < half; i += p.step) {
        R low[N], high[N];
        struct turn<R, N> t = turn_of<R, N>(a.cos_table, a.sin_table, angle + i);
        mt_get_vec<N>(low, x + i);
        mt_get_vec<N>(high, x + i + half);
        if (w) {
            norm_vec<T, N>(low, rstd, w + i);
            norm_vec<T, N>(high, rstd, w + i + half);
        }
        rotate<R, N>(low, high, t);
        mt_put_vec<N>(y + i, low);
        mt_put_vec<N>(y + i + half, high);
    }
}

/* The `heads` queries or keys of a token. rstd: where theirs are kept. */
template <typename T, int N>
static __device__ __forceinline__ void
part_fwd(T *y, mt_real<T> *rstd, const T *x, const void *w, int64_t heads, int64_t angle,
         const struct mt_qk_norm_rope_fwd_args &a, const struct shape &s, const struct place &p)
{
    typedef mt_real<T> R;
    R kept = 0, eps = (R)a.eps;
    bool projection = s.norm == MT_QK_NORM_PROJECTION;
    if (projection) {
        R sum = 0;
        for (int64_t h = p.group; h < heads; h += p.groups)
            sum += squares<T, N>(x + h * s.dim, s, p);
        kept = 1 / sqrt(mt_group_sum<THREADS>(sum) / (R)(heads * s.dim) + eps);
        if (threadIdx.x == 0) *rstd = kept;
    }
    for (int64_t first = 0; first < heads; first += p.groups) {
        int64_t h = first + p.group;
        const T *head = x + h * s.dim;
        const R *weight = (const R *)w;
        if (s.norm == MT_QK_NORM_HEAD) {
            R sum = head_total(h < heads ? squares<T, N>(head, s, p) : 0, s.lanes);
            kept = 1 / sqrt(sum / (R)s.dim + eps);
            if (h < heads && p.first == 0) rstd[h] = kept;
        }
        if (projection) weight += h * s.dim;
        if (h < heads)
            turn_head<T, N>(y + h * s.dim, head, kept, s.norm == MT_QK_NORM_NONE ? NULL : weight,
                            angle, a, s, p);
    }
}

/* Values are copied. */
template <typename T, int N>
static __device__ __forceinline__ void copy_values(T *y, const T *x, int64_t count)
{
    for (int64_t i = (int64_t)threadIdx.x * N; i < count; i += THREADS * N)
        *(mt_vec<T, N> *)(y + i) = *(const mt_vec<T, N> *)(x + i);
}

template <typename T, int N>
static __global__ void __launch_bounds__(THREADS)
    qk_norm_rope_fwd_kernel(struct mt_qk_norm_rope_fwd_args a, struct shape s)
{
    typedef mt_real<T> R;
    struct place p = place_of<N>(s);
    int64_t t = blockIdx.x, keys = s.nq * s.dim, values = keys + s.nkv * s.dim;
    int64_t angle = (int64_t)(blockIdx.x % (unsigned)s.sequence) * (s.dim / 2);
    const T *x = (const T *)a.x + t * s.width;
    T *y = (T *)a.y + t * s.width;
    R *rstd = (R *)a.rstd + t * s.sums;
    int64_t q_sums = s.norm == MT_QK_NORM_HEAD ? s.nq : 1;
    part_fwd<T, N>(y, rstd, x, a.w_q, s.nq, angle, a, s, p);
    part_fwd<T, N>(y + keys, rstd + q_sums, x + keys, a.w_k, s.nkv, angle, a, s, p);
    if (y != x) copy_values<T, N>(y + values, x + values, s.nkv * s.dim);
}

/* Whether every vector of N elements of a head, of a token and of the tables lies on 16 bytes. */
static bool aligned(const struct shape &s, int n, uintptr_t addresses)
{
    return addresses % 16 == 0 && s.dim % (2 * n) == 0;
}

static uintptr_t either(const void *a, const void *b)
{
    return (uintptr_t)a | (uintptr_t)b;
}

template <typename T>
static mt_status qk_norm_rope_fwd(mt_stream *stream, const struct mt_qk_norm_rope_fwd_args *a)
{
    enum { N = 16 / sizeof(T) };
    struct shape s =
        shape_of(a->batch, a->sequence, a->query_heads, a->kv_heads, a->head_dim, a->norm, N);
    if (!s.tokens || !s.dim) return MT_OK;
    bool by_vector = aligned(s, N,
                             either(a->x, a->y) | either(a->cos_table, a->sin_table) |
                                 (s.sums ? either(a->w_q, a->w_k) : 0));
    if (by_vector && one_pass(s, N)) return forward_of_heads<T, N>(stream, a, s);
    if (by_vector) {
        qk_norm_rope_fwd_kernel<T, N>
            <<<(unsigned)s.tokens, THREADS, 0, mt_cuda_stream(stream)>>>(*a, s);
    } else {
        s = shape_of(a->batch, a->sequence, a->query_heads, a->kv_heads, a->head_dim, a->norm, 1);
        qk_norm_rope_fwd_kernel<T, 1>
            <<<(unsigned)s.tokens, THREADS, 0, mt_cuda_stream(stream)>>>(*a, s);
    }
    MT_LAUNCHED(stream, "qk_norm_rope_fwd");
    return MT_OK;
}
MT_CUDA_OP(qk_norm_rope_fwd)

/* ---- backward ---------------------------------------------------------------------------------
 */

/* N pairs of a head: the gradient before rotation, and xhat. */
template <typename T, int N> struct pairs {
    mt_real<T> low[N], high[N], x_low[N], x_high[N];
};

template <typename T, int N>
static __device__ __forceinline__ void unrotated(struct pairs<T, N> *g, const T *dy, int64_t half,
                                                 const struct turn<mt_real<T>, N> &t)
{
    mt_real<T> u[N], v[N];
    mt_get_vec<N>(u, dy);
    mt_get_vec<N>(v, dy + half);
#pragma unroll
    for (int j = 0; j < N; j++) {
        g->low[j] = u[j] * t.cosine[j] + v[j] * t.sine[j];
        g->high[j] = v[j] * t.cosine[j] - u[j] * t.sine[j];
    }
}

template <typename T, int N>
static __device__ __forceinline__ void get_pairs(struct pairs<T, N> *g, const T *dy, const T *x,
                                                 mt_real<T> rstd, int64_t half,
                                                 const struct turn<mt_real<T>, N> &t)
{
    unrotated(g, dy, half, t);
    mt_get_vec<N>(g->x_low, x);
    mt_get_vec<N>(g->x_high, x + half);
#pragma unroll
    for (int j = 0; j < N; j++) {
        g->x_low[j] = g->x_low[j] * rstd;
        g->x_high[j] = g->x_high[j] * rstd;
    }
}

/* This thread's part of the sum over a head of dn w xhat, dn the gradient before rotation. */
template <typename T, int N>
static __device__ __forceinline__ mt_real<T>
products(const T *dy, const T *x, mt_real<T> rstd, const mt_real<T> *w, int64_t angle,
         const struct mt_qk_norm_rope_bwd_args &a, const struct shape &s, const struct place &p)
{
    typedef mt_real<T> R;
    R sum = 0;
    int64_t half = s.dim / 2;
    for (int64_t i = p.first; i < half; i += p.step) {
        R low[N], high[N];
        struct pairs<T, N> g;
        get_pairs(&g, dy + i, x + i, rstd, half,
                  turn_of<R, N>(a.cos_table, a.sin_table, angle + i));
        mt_get_vec<N>(low, w + i);
        mt_get_vec<N>(high, w + i + half);
#pragma unroll
        for (int j = 0; j < N; j++)
            sum += g.low[j] * low[j] * g.x_low[j] + g.high[j] * high[j] * g.x_high[j];
    }
    return sum;
}

/* dx may be dy: a thread reads the pairs that it writes, after all that reads them for a sum. */
template <typename T, int N>
static __device__ __forceinline__ void head_bwd(T *dx, const T *dy, const T *x, mt_real<T> rstd,
                                                mt_real<T> mean, const mt_real<T> *w, int64_t angle,
                                                const struct mt_qk_norm_rope_bwd_args &a,
                                                const struct shape &s, const struct place &p)
{
    typedef mt_real<T> R;
    int64_t half = s.dim / 2;
    for (int64_t i = p.first; i < half; i += p.step) {
        R low[N], high[N];
        struct pairs<T, N> g;
        struct turn<R, N> t = turn_of<R, N>(a.cos_table, a.sin_table, angle + i);
        if (!w) {
            unrotated(&g, dy + i, half, t);
        } else {
            get_pairs(&g, dy + i, x + i, rstd, half, t);
            mt_get_vec<N>(low, w + i);
            mt_get_vec<N>(high, w + i + half);
#pragma unroll
            for (int j = 0; j < N; j++) {
                g.low[j] = rstd * (g.low[j] * low[j] - g.x_low[j] * mean);
                g.high[j] = rstd * (g.high[j] * high[j] - g.x_high[j] * mean);
            }
        }
        mt_put_vec<N>(dx + i, g.low);
        mt_put_vec<N>(dx + i + half, g.high);
    }
}

template <typename T, int N>
static __device__ __forceinline__ void
part_bwd(T *dx, const T *dy, const T *x, const mt_real<T> *rstd, const void *w, int64_t heads,
         int64_t angle, const struct mt_qk_norm_rope_bwd_args &a, const struct shape &s,
         const struct place &p)
{
    typedef mt_real<T> R;
    bool projection = s.norm == MT_QK_NORM_PROJECTION;
    R mean = 0;
    const R *weights = (const R *)w;
    if (projection) {
        R sum = 0;
        for (int64_t h = p.group; h < heads; h += p.groups)
            sum += products<T, N>(dy + h * s.dim, x + h * s.dim, *rstd, weights + h * s.dim, angle,
                                  a, s, p);
        mean = mt_group_sum<THREADS>(sum) / (R)(heads * s.dim);
    }
    for (int64_t first = 0; first < heads; first += p.groups) {
        int64_t h = first + p.group, at = h * s.dim;
        R r = h >= heads || !s.sums ? 0 : projection ? *rstd : rstd[h];
        if (s.norm == MT_QK_NORM_HEAD) {
            R sum = h < heads ? products<T, N>(dy + at, x + at, r, weights, angle, a, s, p) : 0;
            mean = head_total(sum, s.lanes) / (R)s.dim;
        }
        if (h < heads)
            head_bwd<T, N>(dx + at, dy + at, x + at, r, mean,
                           projection ? weights + at
                           : s.sums   ? weights
                                      : NULL,
                           angle, a, s, p);
    }
}

template <typename T, int N>
static __global__ void __launch_bounds__(THREADS)
    qk_norm_rope_bwd_kernel(struct mt_qk_norm_rope_bwd_args a, struct shape s)
{
    struct place p = place_of<N>(s);
    int64_t t = blockIdx.x, keys = s.nq * s.dim, values = keys + s.nkv * s.dim;
    int64_t angle = (int64_t)(blockIdx.x % (unsigned)s.sequence) * (s.dim / 2);
    const T *dy = (const T *)a.dy + t * s.width;
    const T *x = s.sums ? (const T *)a.x + t * s.width : dy; /* unread without norm */
    T *dx = (T *)a.dx + t * s.width;
    const mt_real<T> *rstd = (const mt_real<T> *)a.rstd + t * s.sums;
    int64_t q_sums = s.norm == MT_QK_NORM_HEAD ? s.nq : 1;
    part_bwd<T, N>(dx, dy, x, rstd, a.w_q, s.nq, angle, a, s, p);
    part_bwd<T, N>(dx + keys, dy + keys, x + keys, rstd + q_sums, a.w_k, s.nkv, angle, a, s, p);
    if (dx != dy) copy_values<T, N>(dx + values, dy + values, s.nkv * s.dim);
}

/* ---- gradients of the weights -----------------------------------------------------------------
 */

/* Queries or keys as a matrix: a row for each sum of squares, `each` of them a token, of `span`
 * heads. first, sum: where in a token's row, and in its rstd, they begin. */
struct weight_rows {
    int64_t each, span, first, sum;
};

/* Rows are cut into blocks (blockIdx.y); in one, 32 runs of rows are added by 32 threads that share
 * a vector of N pairs, then those sums in order. partials [blocks, span * dim]. */
template <typename T, int N>
static __global__ void __launch_bounds__(THREADS)
    weight_grad_kernel(mt_real<T> *partials, struct mt_qk_norm_rope_bwd_args a, struct shape s,
                       struct weight_rows m, int64_t block)
{
    typedef mt_real<T> R;
    enum { VECTORS = THREADS / 32 };
    __shared__ R sums[32][VECTORS][2 * N + 1];
    int slot = threadIdx.x / VECTORS, vector = threadIdx.x % VECTORS;
    int64_t half = s.dim / 2, c = ((int64_t)blockIdx.x * VECTORS + vector) * N, head = c / half,
            i = c % half, rows = s.tokens * m.each;
    int64_t from = blockIdx.y * block, to = from + block < rows ? from + block : rows;
    R low[N] = {}, high[N] = {};
    int64_t t = (from + slot) / m.each, which = (from + slot) % m.each; /* of the row */
    for (int64_t row = from + slot; row < to && head < m.span; row += 32) {
        int64_t at = t * s.width + m.first + (which * m.span + head) * s.dim + i;
        struct pairs<T, N> g;
        get_pairs(&g, (const T *)a.dy + at, (const T *)a.x + at,
                  ((const R *)a.rstd)[t * s.sums + m.sum + which], half,
                  turn_of<R, N>(a.cos_table, a.sin_table,
                                (int64_t)((unsigned)t % (unsigned)s.sequence) * half + i));
#pragma unroll
        for (int j = 0; j < N; j++) {
            low[j] += g.low[j] * g.x_low[j];
            high[j] += g.high[j] * g.x_high[j];
        }
        for (which += 32; which >= m.each; which -= m.each) t++;
    }
#pragma unroll
    for (int j = 0; j < N; j++) {
        sums[slot][vector][j] = low[j];
        sums[slot][vector][N + j] = high[j];
    }
    __syncthreads();
    for (int k = threadIdx.x; k < VECTORS * 2 * N; k += THREADS) {
        int v = k / (2 * N), j = k % (2 * N);
        int64_t column = ((int64_t)blockIdx.x * VECTORS + v) * N;
        if (column >= m.span * half) continue;
        R sum = 0;
        for (int r = 0; r < 32; r++) sum += sums[r][v][j];
        int64_t to_head = column / half * s.dim + column % half;
        partials[blockIdx.y * m.span * s.dim + to_head + (j < N ? j : half + j - N)] = sum;
    }
}

template <typename T>
static size_t weight_grad_bytes(int64_t tokens, int64_t dim, const struct weight_rows &m)
{
    int64_t rows = tokens * m.each, blocks = mt_ceil_div(rows, mt_row_block(rows, BLOCKS));
    return (size_t)(blocks * m.span * dim) * sizeof(mt_real<T>);
}

template <typename T, int N>
static mt_status weight_grad(mt_stream *stream, void *dw, bool accumulate,
                             const struct mt_qk_norm_rope_bwd_args *a, const struct shape &s,
                             const struct weight_rows &m)
{
    typedef mt_real<T> R;
    int64_t rows = s.tokens * m.each, width = m.span * s.dim;
    int64_t block = mt_row_block(rows, BLOCKS), blocks = mt_ceil_div(rows, block);
    void *partials = NULL;
    if (blocks) {
        MT_TRY(mt_cuda_scratch(stream, &partials, weight_grad_bytes<T>(s.tokens, s.dim, m)));
        dim3 grid((unsigned)mt_ceil_div(width / 2, THREADS / 32 * N), (unsigned)blocks);
        weight_grad_kernel<T, N>
            <<<grid, THREADS, 0, mt_cuda_stream(stream)>>>((R *)partials, *a, s, m, block);
        MT_LAUNCHED(stream, "qk_norm_rope_bwd");
    }
    return mt_add_partials<R>(stream, "qk_norm_rope_bwd",
                              { (R *)dw, accumulate, (const R *)partials, blocks }, {}, width);
}

/* Which rows the weights of queries and keys are summed over. */
static void weight_rows_of(struct weight_rows *q, struct weight_rows *k, const struct shape &s)
{
    bool by_head = s.norm == MT_QK_NORM_HEAD;
    *q = { by_head ? s.nq : 1, by_head ? 1 : s.nq, 0, 0 };
    *k = { by_head ? s.nkv : 1, by_head ? 1 : s.nkv, s.nq * s.dim, q->each };
}

template <typename T>
static size_t qk_norm_rope_bwd_scratch(const mt_stream *stream,
                                       const struct mt_qk_norm_rope_bwd_args *a)
{
    (void)stream;
    struct weight_rows q, k;
    struct shape s =
        shape_of(a->batch, a->sequence, a->query_heads, a->kv_heads, a->head_dim, a->norm, 1);
    weight_rows_of(&q, &k, s);
    if (!s.dim || !s.sums || !s.tokens) return 0;
    size_t of_q = a->dw_q ? weight_grad_bytes<T>(s.tokens, s.dim, q) : 0;
    size_t of_k = a->dw_k ? weight_grad_bytes<T>(s.tokens, s.dim, k) : 0;
    size_t of_heads = s.norm == MT_QK_NORM_HEAD ? heads_bytes<T>(s) : 0, most = max(of_q, of_k);
    return max(most, of_heads);
}
MT_CUDA_SCRATCH(qk_norm_rope_bwd)

/* dx may be dy, so the gradients of the weights come first. */
template <typename T, int N>
static mt_status backward(mt_stream *stream, const struct mt_qk_norm_rope_bwd_args *a,
                          const struct shape &s)
{
    struct weight_rows q, k;
    if (one_pass(s, N)) return backward_of_heads<T, N>(stream, a, s);
    weight_rows_of(&q, &k, s);
    if (s.sums && a->dw_q) MT_TRY((weight_grad<T, N>(stream, a->dw_q, a->accumulate_q, a, s, q)));
    if (s.sums && a->dw_k) MT_TRY((weight_grad<T, N>(stream, a->dw_k, a->accumulate_k, a, s, k)));
    if (!s.tokens) return MT_OK;
    qk_norm_rope_bwd_kernel<T, N>
        <<<(unsigned)s.tokens, THREADS, 0, mt_cuda_stream(stream)>>>(*a, s);
    MT_LAUNCHED(stream, "qk_norm_rope_bwd");
    return MT_OK;
}

template <typename T>
static mt_status qk_norm_rope_bwd(mt_stream *stream, const struct mt_qk_norm_rope_bwd_args *a)
{
    enum { N = 16 / sizeof(T) };
    struct shape s =
        shape_of(a->batch, a->sequence, a->query_heads, a->kv_heads, a->head_dim, a->norm, N);
    if (!s.dim) return MT_OK;
    if (aligned(s, N,
                either(a->dy, a->dx) | either(a->cos_table, a->sin_table) |
                    (s.sums ? either(a->w_q, a->w_k) | (uintptr_t)a->x : 0)))
        return backward<T, N>(stream, a, s);
    s = shape_of(a->batch, a->sequence, a->query_heads, a->kv_heads, a->head_dim, a->norm, 1);
    return backward<T, 1>(stream, a, s);
}
MT_CUDA_OP(qk_norm_rope_bwd)
