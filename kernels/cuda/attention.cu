/* Causal attention in tiles of TILE queries by TILE keys, for every dtype and width of a head.
 *
 * A block owns TILE rows (queries, or keys with their gradients) and 16 W columns of their result,
 * W up to TILE / 16; wider heads take several blocks, each of which computes the scores anew.
 * Thread (y, x) of 16 x 16 holds EACH = TILE / 16 rows from EACH y on and as many columns from EACH
 * x on of a tile, W columns from W x on of the result, so that the threads of a row are half a
 * warp. Masked probabilities are 0 and so is what they multiply, unless it is not finite. */
#include <type_traits>

#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/rowsums.cuh"
#include "kernels/cuda/scratch.h"

enum { SIDE = 16, THREADS = SIDE * SIDE, DEPTH = 16 };

/* What a block keeps in shared memory: slices of the two factors, and a tile of probabilities. */
template <typename T> struct tile {
    typedef mt_real<T> R;
    enum { SIZE = sizeof(R) == 8 ? 32 : 64, EACH = SIZE / SIDE, RUN = 16 / sizeof(R) };
    enum { PITCH = SIZE + RUN };
    alignas(16) R left[DEPTH][PITCH], right[DEPTH][PITCH], product[SIZE][PITCH];
};

static __device__ __forceinline__ int first_row(int each)
{
    return (int)threadIdx.x / SIDE * each;
}
static __device__ __forceinline__ int first_column(int each)
{
    return (int)threadIdx.x % SIDE * each;
}

/* The rows of a matrix that a tile meets: `count` of them from `p` on; the others read as 0. */
template <typename T> struct rows {
    const T *p;
    int64_t pitch, count;
};

template <typename T>
static __device__ __forceinline__ struct rows<T> rows_from(const T *p, int64_t pitch, int64_t from,
                                                           int64_t sequence) {
    return { p + from * pitch, pitch, sequence - from };
}

/* slice[c][r] = row r, column from + c, of a matrix `dim` wide. */
template <typename T>
static __device__ __forceinline__ void
load_slice(mt_real<T> (*slice)[tile<T>::PITCH], const struct rows<T> &m, int64_t from, int64_t dim)
{
    int c = threadIdx.x % DEPTH;
    for (int r = threadIdx.x / DEPTH; r < tile<T>::SIZE; r += THREADS / DEPTH)
        slice[c][r] = r < m.count && from + c < dim ? mt_get(m.p + r * m.pitch + from + c) : 0;
}

/* sum = a b^T: element (i, j) is the inner product of rows i of a and j of b. */
template <typename T>
static __device__ __forceinline__ void
inner_products(mt_real<T> (*sum)[tile<T>::EACH], struct tile<T> &shared, const struct rows<T> &a,
               const struct rows<T> &b, int64_t dim)
{
    enum { EACH = tile<T>::EACH };
    typedef mt_vec<mt_real<T>, EACH> vec;
    const int row = first_row(EACH), column = first_column(EACH);
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int j = 0; j < EACH; j++) sum[i][j] = 0;
    for (int64_t from = 0; from < dim; from += DEPTH) {
        __syncthreads();
        load_slice<T>(shared.left, a, from, dim);
        load_slice<T>(shared.right, b, from, dim);
        __syncthreads();
#pragma unroll
        for (int c = 0; c < DEPTH; c++) {
            const vec left = *(const vec *)&shared.left[c][row];
            const vec right = *(const vec *)&shared.right[c][column];
#pragma unroll
            for (int i = 0; i < EACH; i++)
#pragma unroll
                for (int j = 0; j < EACH; j++) sum[i][j] = fma(left.at[i], right.at[j], sum[i][j]);
        }
    }
}

/* sum += p m, of m the columns from `from` on; p is a tile held by the threads. */
template <typename T, int W>
static __device__ __forceinline__ void
add_product(mt_real<T> (*sum)[W], struct tile<T> &shared, const mt_real<T> (*p)[tile<T>::EACH],
            const struct rows<T> &m, int64_t from, int64_t dim)
{
    typedef mt_real<T> R;
    enum { SIZE = tile<T>::SIZE, EACH = tile<T>::EACH, RUN = tile<T>::RUN, WIDTH = SIDE * W };
    typedef mt_vec<R, EACH> vec;
    typedef mt_vec<R, RUN> run;
    R *slice = shared.left[0]; /* [DEPTH][WIDTH], no larger than it */
    const int row = first_row(EACH), column = first_column(EACH), own = first_column(W);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        vec line;
#pragma unroll
        for (int j = 0; j < EACH; j++) line.at[j] = p[i][j];
        *(vec *)&shared.product[row + i][column] = line;
    }
    for (int k = 0; k < SIZE; k += DEPTH) {
        if (k >= m.count) break; /* for all threads: rows of 0 from here on */
        __syncthreads();
        for (int i = threadIdx.x; i < DEPTH * WIDTH; i += THREADS) {
            int64_t r = k + i / WIDTH, c = from + i % WIDTH;
            slice[i] = r < m.count && c < dim ? mt_get(m.p + r * m.pitch + c) : 0;
        }
        __syncthreads();
#pragma unroll
        for (int d = 0; d < DEPTH; d += RUN) {
            run left[EACH];
#pragma unroll
            for (int i = 0; i < EACH; i++) left[i] = *(const run *)&shared.product[row + i][k + d];
#pragma unroll
            for (int e = 0; e < RUN; e++) {
                const mt_vec<R, W> right = *(const mt_vec<R, W> *)&slice[(d + e) * WIDTH + own];
#pragma unroll
                for (int i = 0; i < EACH; i++)
#pragma unroll
                    for (int j = 0; j < W; j++)
                        sum[i][j] = fma(left[i].at[e], right.at[j], sum[i][j]);
            }
        }
    }
}

/* What a block owns: rows from `row` of head h (of queries, or of keys) of sequence b, columns of
 * the result from `column`. Blocks with the longest sums are started first. */
struct own {
    int64_t row, column, h, b;
};

static __device__ __forceinline__ struct own
own_of(const struct mt_attention_shape &s, int64_t heads, int size, int width, bool last_first)
{
    int64_t tiles = mt_ceil_div(s.sequence, size), parts = mt_ceil_div(s.dim, width);
    int64_t each = heads * parts * s.batch, i = blockIdx.x / each, rest = blockIdx.x % each;
    return { (last_first ? tiles - 1 - i : i) * size, rest % parts * width, rest / parts % heads,
             rest / parts / heads };
}

static unsigned blocks_of(const struct mt_attention_shape &s, int64_t heads, int size, int width)
{
    return (unsigned)(mt_ceil_div(s.sequence, size) * mt_ceil_div(s.dim, width) * heads * s.batch);
}

/* to[r][c] = scale * sum, of the rows and columns that there are. */
template <typename T, int W>
static __device__ __forceinline__ void store_tile(T *to, int64_t pitch, const mt_real<T> (*sum)[W],
                                                  mt_real<T> scale, const struct own &o,
                                                  const struct mt_attention_shape &s)
{
#pragma unroll
    for (int i = 0; i < tile<T>::EACH; i++)
#pragma unroll
        for (int j = 0; j < W; j++) {
            int64_t r = o.row + first_row(tile<T>::EACH) + i, c = o.column + first_column(W) + j;
            if (r < s.sequence && c < s.dim) mt_put(to + r * pitch + c, scale * sum[i][j]);
        }
}

/* Launches with the W that a head needs. */
template <typename T, typename F> static mt_status by_width(int64_t dim, F launch)
{
    if (dim <= SIDE) return launch(std::integral_constant<int, 1>());
    if constexpr (tile<T>::EACH > 2)
        if (dim <= 2 * SIDE) return launch(std::integral_constant<int, 2>());
    return launch(std::integral_constant<int, tile<T>::EACH>());
}

/* ---- forward ----------------------------------------------------------------------------------
 */

/* Over the threads of a row. */
template <typename R> static __device__ __forceinline__ R row_max(R x)
{
    for (int lane = SIDE / 2; lane; lane /= 2) x = fmax(x, __shfl_xor_sync(~0u, x, lane));
    return x;
}
template <typename R> static __device__ __forceinline__ R row_sum(R x)
{
    for (int lane = SIDE / 2; lane; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
    return x;
}

/* Scores become exp(score - largest so far), masked ones 0; y and sum shrink to that maximum.
 * diagonal: row r sees the columns c <= r + diagonal. */
template <typename R, int EACH, int W>
static __device__ __forceinline__ void soften(R (*p)[EACH], R *most, R *sum, R (*y)[W], R scale,
                                              int64_t diagonal)
{
    const R least = -(R)INFINITY;
    const int from = first_column(EACH), row = first_row(EACH);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        R largest = most[i], total = 0;
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            p[i][j] = from + j <= row + i + diagonal ? p[i][j] * scale : least;
            largest = fmax(largest, p[i][j]);
        }
        largest = row_max(largest);
        R base = largest == least ? 0 : largest; /* all -Inf so far: any finite base will do */
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            p[i][j] = exp(p[i][j] - base);
            total += p[i][j];
        }
        R shrink = exp(most[i] - base);
        most[i] = largest;
        sum[i] = sum[i] * shrink + row_sum(total);
#pragma unroll
        for (int j = 0; j < W; j++) y[i][j] *= shrink;
    }
}

template <typename T, int W>
static __global__ void __launch_bounds__(THREADS)
    attention_fwd_kernel(struct mt_attention_fwd_args a, struct mt_attention_shape s)
{
    typedef mt_real<T> R;
    enum { SIZE = tile<T>::SIZE, EACH = tile<T>::EACH };
    __shared__ struct tile<T> shared;
    struct own o = own_of(s, s.nq, SIZE, SIDE * W, true);
    int64_t g = o.h / (s.nq / s.nkv);
    const T *qkv = (const T *)a.qkv;
    const T *keys = qkv + mt_head_at(s, o.b, s.nq + g);
    const T *values = qkv + mt_head_at(s, o.b, s.nq + s.nkv + g);
    struct rows<T> q = rows_from(qkv + mt_head_at(s, o.b, o.h), s.width, o.row, s.sequence);
    R y[EACH][W] = {}, p[EACH][EACH], most[EACH], sum[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        most[i] = -(R)INFINITY;
        sum[i] = 0;
    }
    for (int64_t k = 0; k <= o.row; k += SIZE) {
        inner_products<T>(p, shared, q, rows_from(keys, s.width, k, s.sequence), s.dim);
        soften<R, EACH, W>(p, most, sum, y, (R)a.scale, o.row - k);
        add_product<T, W>(y, shared, p, rows_from(values, s.width, k, s.sequence), o.column, s.dim);
    }
    R *lse = (R *)a.lse + (o.b * s.nq + o.h) * s.sequence;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int64_t r = o.row + first_row(EACH) + i;
        if (o.column == 0 && threadIdx.x % SIDE == 0 && r < s.sequence)
            lse[r] = most[i] + log(sum[i]);
#pragma unroll
        for (int j = 0; j < W; j++) y[i][j] *= 1 / sum[i];
    }
    store_tile<T, W>((T *)a.y + o.b * s.sequence * s.pitch + o.h * s.dim, s.pitch, y, 1, o, s);
}

/* What the kernels of Hopper count their tiles by. */
template <typename T>
static size_t attention_fwd_scratch(const mt_stream *stream, const struct mt_attention_fwd_args *a)
{
    (void)stream;
    return a->dtype == MT_BF16 ? sizeof(int) : 0;
}
MT_CUDA_SCRATCH(attention_fwd)

template <typename T>
static mt_status attention_fwd(mt_stream *stream, const struct mt_attention_fwd_args *a)
{
    struct mt_attention_shape s =
        mt_attention_shape_of(a->batch, a->sequence, a->query_heads, a->kv_heads, a->head_dim);
    if (!s.batch || !s.sequence) return MT_OK;
    bool done = false;
    if (a->dtype == MT_BF16) MT_TRY(mt_attention_fwd_sm90(stream, a, &done));
    if (a->dtype == MT_BF16 && !done) MT_TRY(mt_attention_fwd_mma(stream, a, &done));
    if (a->dtype == MT_F32) MT_TRY(mt_attention_fwd_planes(stream, a, &done));
    if (done) return MT_OK;
    return by_width<T>(s.dim, [&](auto wide) {
        enum { SIZE = tile<T>::SIZE, W = decltype(wide)::value };
        attention_fwd_kernel<T, W>
            <<<blocks_of(s, s.nq, SIZE, SIDE * W), THREADS, 0, mt_cuda_stream(stream)>>>(*a, s);
        MT_LAUNCHED(stream, "attention_fwd");
        return MT_OK;
    });
}
MT_CUDA_OP(attention_fwd)

/* ---- backward ---------------------------------------------------------------------------------
 */

/* dot [batch, nq, sequence] = <dy, y>: 16 threads for each, N elements at a time. */
template <typename T, int N>
static __global__ void __launch_bounds__(THREADS)
    dot_kernel(mt_real<T> *dot, const T *dy, const T *y, struct mt_attention_shape s)
{
    int64_t i = (int64_t)blockIdx.x * SIDE + threadIdx.x / SIDE, row = i / s.nq, h = i % s.nq;
    int64_t end = i < s.batch * s.sequence * s.nq ? s.dim : 0;
    mt_real<T> sum = 0, a[N], b[N];
    for (int64_t c = threadIdx.x % SIDE * N; c < end; c += SIDE * N) {
        mt_get_vec<N>(a, dy + i * s.dim + c);
        mt_get_vec<N>(b, y + i * s.dim + c);
#pragma unroll
        for (int j = 0; j < N; j++) sum = fma(a[j], b[j], sum);
    }
    sum = row_sum(sum);
    if (end && threadIdx.x % SIDE == 0)
        dot[(row / s.sequence * s.nq + h) * s.sequence + row % s.sequence] = sum;
}

/* p, scores, becomes the probabilities, dp the gradient of the scores; masked ones 0. Queries lie
 * along rows, or along columns; `first` and lse, dot are those of the tile's first query, `seen` =
 * first - the tile's first key. */
template <typename R, int EACH>
static __device__ __forceinline__ void soften_bwd(R (*p)[EACH], R (*dp)[EACH], const R *lse,
                                                  const R *dot, R scale, bool by_row,
                                                  int64_t queries, int64_t seen)
{
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            int row = first_row(EACH) + i, column = first_column(EACH) + j;
            int query = by_row ? row : column, key = by_row ? column : row;
            bool sees = query < queries && key <= query + seen;
            p[i][j] = sees ? exp(p[i][j] * scale - lse[query]) : 0;
            dp[i][j] = sees ? p[i][j] * (dp[i][j] - dot[query]) : 0;
        }
}

/* The heads that a block of backward meets: of a key head g, or of a query head h. */
template <typename T> struct heads {
    const T *q, *dy, *key, *value;
    const mt_real<T> *lse, *dot;
};

template <typename T>
static __device__ __forceinline__ struct heads<T>
heads_of(const struct mt_attention_bwd_args &a, const mt_real<T> *dot, int64_t b, int64_t h,
         const struct mt_attention_shape &s) {
    int64_t g = h / (s.nq / s.nkv), sums = (b * s.nq + h) * s.sequence;
    const T *qkv = (const T *)a.qkv;
    return { qkv + mt_head_at(s, b, h),        (const T *)a.dy + b *s.sequence *s.pitch + h *s.dim,
             qkv + mt_head_at(s, b, s.nq + g), qkv + mt_head_at(s, b, s.nq + s.nkv + g),
             (const mt_real<T> *)a.lse + sums, dot + sums };
}

/* A block owns keys: it adds up their gradients over the query heads of their group, in order, and
 * over the queries that see them. Rows of a tile are keys. */
template <typename T, int W>
static __global__ void __launch_bounds__(THREADS)
    attention_bwd_keys_kernel(struct mt_attention_bwd_args a, const mt_real<T> *dot,
                              struct mt_attention_shape s)
{
    typedef mt_real<T> R;
    enum { SIZE = tile<T>::SIZE, EACH = tile<T>::EACH };
    __shared__ struct tile<T> shared;
    struct own o = own_of(s, s.nkv, SIZE, SIDE * W, false);
    int64_t group = s.nq / s.nkv;
    R dk[EACH][W] = {}, dv[EACH][W] = {}, p[EACH][EACH], dp[EACH][EACH];
    for (int64_t h = o.h * group; h < (o.h + 1) * group; h++) {
        struct heads<T> of = heads_of<T>(a, dot, o.b, h, s);
        struct rows<T> key = rows_from(of.key, s.width, o.row, s.sequence);
        struct rows<T> value = rows_from(of.value, s.width, o.row, s.sequence);
        for (int64_t from = o.row; from < s.sequence; from += SIZE) {
            struct rows<T> q = rows_from(of.q, s.width, from, s.sequence);
            struct rows<T> dy = rows_from(of.dy, s.pitch, from, s.sequence);
            inner_products<T>(p, shared, key, q, s.dim);
            inner_products<T>(dp, shared, value, dy, s.dim);
            soften_bwd<R, EACH>(p, dp, of.lse + from, of.dot + from, (R)a.scale, false, q.count,
                                from - o.row);
            add_product<T, W>(dv, shared, p, dy, o.column, s.dim);
            add_product<T, W>(dk, shared, dp, q, o.column, s.dim);
        }
    }
    T *dqkv = (T *)a.dqkv;
    store_tile<T, W>(dqkv + mt_head_at(s, o.b, s.nq + o.h), s.width, dk, (R)a.scale, o, s);
    store_tile<T, W>(dqkv + mt_head_at(s, o.b, s.nq + s.nkv + o.h), s.width, dv, 1, o, s);
}

/* A block owns queries. Rows of a tile are queries. */
template <typename T, int W>
static __global__ void __launch_bounds__(THREADS)
    attention_bwd_queries_kernel(struct mt_attention_bwd_args a, const mt_real<T> *dot,
                                 struct mt_attention_shape s)
{
    typedef mt_real<T> R;
    enum { SIZE = tile<T>::SIZE, EACH = tile<T>::EACH };
    __shared__ struct tile<T> shared;
    struct own o = own_of(s, s.nq, SIZE, SIDE * W, true);
    struct heads<T> of = heads_of<T>(a, dot, o.b, o.h, s);
    struct rows<T> q = rows_from(of.q, s.width, o.row, s.sequence);
    struct rows<T> dy = rows_from(of.dy, s.pitch, o.row, s.sequence);
    R dq[EACH][W] = {}, p[EACH][EACH], dp[EACH][EACH];
    for (int64_t k = 0; k <= o.row; k += SIZE) {
        struct rows<T> key = rows_from(of.key, s.width, k, s.sequence);
        inner_products<T>(p, shared, q, key, s.dim);
        inner_products<T>(dp, shared, dy, rows_from(of.value, s.width, k, s.sequence), s.dim);
        soften_bwd<R, EACH>(p, dp, of.lse + o.row, of.dot + o.row, (R)a.scale, true, q.count,
                            o.row - k);
        add_product<T, W>(dq, shared, dp, key, o.column, s.dim);
    }
    store_tile<T, W>((T *)a.dqkv + mt_head_at(s, o.b, o.h), s.width, dq, (R)a.scale, o, s);
}

/* <dy, y> of each query, and what the kernels of Hopper keep beside it */
template <typename T>
static size_t attention_bwd_scratch(const mt_stream *stream, const struct mt_attention_bwd_args *a)
{
    size_t hopper = a->dtype == MT_BF16 ? mt_attention_bwd_sm90_scratch(stream, a) : 0;
    return hopper ? hopper : (size_t)(a->batch * a->sequence * a->query_heads) * sizeof(mt_real<T>);
}
MT_CUDA_SCRATCH(attention_bwd)

template <typename T>
static mt_status attention_bwd(mt_stream *stream, const struct mt_attention_bwd_args *a)
{
    typedef mt_real<T> R;
    struct mt_attention_shape s =
        mt_attention_shape_of(a->batch, a->sequence, a->query_heads, a->kv_heads, a->head_dim);
    if (!s.batch || !s.sequence) return MT_OK;
    cudaStream_t on = mt_cuda_stream(stream);
    int64_t sums = s.batch * s.sequence * s.nq;
    void *scratch;
    bool done = false;
    if (a->dtype == MT_BF16) MT_TRY(mt_attention_bwd_sm90(stream, a, &done));
    if (done) return MT_OK;
    MT_TRY(mt_cuda_scratch(stream, &scratch, attention_bwd_scratch<T>(stream, a)));
    R *dot = (R *)scratch;
    unsigned blocks = (unsigned)mt_ceil_div(sums, SIDE);
    bool by_vector = ((uintptr_t)a->dy | (uintptr_t)a->y | (uintptr_t)s.dim * sizeof(T)) % 16 == 0;
    auto kernel = by_vector ? dot_kernel<T, 16 / sizeof(T)> : dot_kernel<T, 1>;
    kernel<<<blocks, THREADS, 0, on>>>(dot, (const T *)a->dy, (const T *)a->y, s);
    MT_LAUNCHED(stream, "attention_bwd");
    if (a->dtype == MT_BF16) MT_TRY(mt_attention_bwd_mma(stream, a, (const float *)scratch, &done));
    if (a->dtype == MT_F32)
        MT_TRY(mt_attention_bwd_planes(stream, a, (const float *)scratch, &done));
    if (done) return MT_OK;
    return by_width<T>(s.dim, [&](auto wide) {
        enum { SIZE = tile<T>::SIZE, W = decltype(wide)::value, WIDTH = SIDE * W };
        attention_bwd_keys_kernel<T, W>
            <<<blocks_of(s, s.nkv, SIZE, WIDTH), THREADS, 0, on>>>(*a, dot, s);
        MT_LAUNCHED(stream, "attention_bwd");
        attention_bwd_queries_kernel<T, W>
            <<<blocks_of(s, s.nq, SIZE, WIDTH), THREADS, 0, on>>>(*a, dot, s);
        MT_LAUNCHED(stream, "attention_bwd");
        return MT_OK;
    });
}
MT_CUDA_OP(attention_bwd)
