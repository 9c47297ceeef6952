/* RMSNorm. A row belongs to a warp, or to a block where it is long; a lane keeps up to K
 * vectors of it in registers between the sum and what follows, and reads the rest twice. */
#include "kernels/cuda/rowsums.cuh"
#include "kernels/cuda/scratch.h"

enum { THREADS = 256, GROUPS = 384 };

/* Where `lane` of a group finds its i-th vector of N elements. */
template <int LANES, int N> static __device__ __forceinline__ int64_t column(int i, int lane)
{
    return ((int64_t)i * LANES + lane) * N;
}

/* ---- forward ----------------------------------------------------------------------------------
 */

template <typename T, int N>
static __device__ __forceinline__ void add_squares(mt_real<T> *sum, const mt_real<T> *x)
{
#pragma unroll
    for (int j = 0; j < N; j++) *sum += x[j] * x[j];
}

/* x, normalised and weighted. */
template <typename T, int N>
static __device__ __forceinline__ void norm(mt_real<T> *x, mt_real<T> rstd, const mt_real<T> *w)
{
    mt_real<T> weight[N];
    mt_get_constant<N>(weight, w);
#pragma unroll
    for (int j = 0; j < N; j++) x[j] = x[j] * rstd;
    mt_round<T, N>(x);
#pragma unroll
    for (int j = 0; j < N; j++) x[j] = x[j] * weight[j];
}

/* WHOLE: the row is what its lanes keep. Where it ends before, the last vector is read for those
 * past it. */
template <typename T, int LANES, int K, int N, bool WHOLE>
static __global__ void __launch_bounds__(THREADS) rmsnorm_fwd_kernel(struct mt_rmsnorm_fwd_args a)
{
    typedef mt_real<T> R;
    int lane = threadIdx.x % LANES;
    int64_t row = (int64_t)blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
    if (row >= a.rows) return; /* a whole group: with LANES = THREADS there is no such block */
    const T *x = (const T *)a.x + row * a.width;
    const R *w = (const R *)a.w;
    T *y = (T *)a.y + row * a.width;
    const int all = K * LANES * N, end = WHOLE || a.width > all ? all : (int)a.width;
    mt_words<T, N> kept[K];
    R in[N], sum = 0;
#pragma unroll
    for (int i = 0; i < K; i++) {
        const int c = (i * LANES + lane) * N;
        kept[i] = mt_ask<N>(x + (WHOLE ? c : min(c, end - N)));
    }
#pragma unroll
    for (int i = 0; i < K; i++) {
        if (!WHOLE && (i * LANES + lane) * N >= end) kept[i] = mt_no_words<mt_words<T, N>>();
        mt_open<T, N>(in, kept[i]);
        add_squares<T, N>(&sum, in);
    }
    for (int64_t c = column<LANES, N>(K, lane); !WHOLE && c < a.width; c += LANES * N) {
        mt_get_vec<N>(in, x + c);
        add_squares<T, N>(&sum, in);
    }
    sum = mt_group_sum<LANES>(sum);
    R rstd = 1 / sqrt(sum / (R)a.width + (R)a.eps);
    if (lane == 0) ((R *)a.rstd)[row] = rstd;
#pragma unroll
    for (int i = 0; i < K; i++) {
        const int c = (i * LANES + lane) * N;
        mt_forget(kept[i]);
        mt_open<T, N>(in, kept[i]);
        if (!WHOLE && c >= end) continue;
        norm<T, N>(in, rstd, w + c);
        mt_put_vec<N>(y + c, in);
    }
    for (int64_t c = column<LANES, N>(K, lane); !WHOLE && c < a.width; c += LANES * N) {
        mt_get_vec<N>(in, x + c);
        norm<T, N>(in, rstd, w + c);
        mt_put_vec<N>(y + c, in);
    }
}

/* Whether rows of `width` elements, the first at each of these addresses, lie on 16 bytes. */
static bool aligned(int64_t width, size_t size, uintptr_t addresses)
{
    return (addresses | (uintptr_t)width * size) % 16 == 0;
}

/* The shapes of a group, LANES and K, by the vectors of a row: the first that keeps all of it. A
 * warp forward where it can: rows that wait for nobody keep more loads in flight. */
enum { SHAPES = 3, WIDE = 8 };
static int shape_of(int64_t vectors)
{
    static_assert(THREADS == WIDE * 32, "the second shape keeps as much in either direction");
    return vectors <= 2 * 32 ? 0 : vectors <= THREADS ? 1 : 2;
}
#define SHAPES_OF(launch, T, N, LANES, K)                                                          \
    {                                                                                              \
        launch<T, 32, 2, N>, launch<T, LANES, K, N>, launch<T, THREADS, 4, N>                      \
    }

template <typename T, int LANES, int K, int N>
static void launch_fwd(cudaStream_t on, const struct mt_rmsnorm_fwd_args *a)
{
    unsigned blocks = (unsigned)mt_ceil_div(a->rows, THREADS / LANES);
    auto kernel = a->width == LANES * K * N ? rmsnorm_fwd_kernel<T, LANES, K, N, true>
                                            : rmsnorm_fwd_kernel<T, LANES, K, N, false>;
    kernel<<<blocks, THREADS, 0, on>>>(*a);
}

template <typename T>
static mt_status rmsnorm_fwd(mt_stream *stream, const struct mt_rmsnorm_fwd_args *a)
{
    enum { N = 16 / sizeof(T) };
    if (!a->rows || !a->width) return MT_OK;
    static void (*const launch[2][SHAPES])(cudaStream_t, const struct mt_rmsnorm_fwd_args *) = {
        SHAPES_OF(launch_fwd, T, 1, 32, WIDE), SHAPES_OF(launch_fwd, T, N, 32, WIDE)
    };
    bool by_vector =
        aligned(a->width, sizeof(T), (uintptr_t)a->x | (uintptr_t)a->y | (uintptr_t)a->w);
    launch[by_vector][shape_of(by_vector ? a->width / N : a->width)](mt_cuda_stream(stream), a);
    MT_LAUNCHED(stream, "rmsnorm_fwd");
    return MT_OK;
}
MT_CUDA_OP(rmsnorm_fwd)

/* ---- backward ---------------------------------------------------------------------------------
 */

/* N columns of a row: dy and x, and what becomes of them; as they are stored. */
template <typename T, int N> struct piece {
    mt_real<T> dy[N], x[N];
};
template <typename T, int N> struct stored_piece {
    mt_words<T, N> dy, x;
};

template <typename T, int N>
static __device__ __forceinline__ void get_piece(struct stored_piece<T, N> *p, const T *dy,
                                                 const T *x)
{
    p->dy = mt_ask<N>(dy);
    p->x = mt_ask<N>(x);
}

template <typename T, int N>
static __device__ __forceinline__ void open_piece(struct piece<T, N> *p,
                                                  const struct stored_piece<T, N> &from)
{
    mt_open<T, N>(p->dy, from.dy);
    mt_open<T, N>(p->x, from.x);
}

/* x becomes xhat. Returns the piece's part of sum dy w xhat. */
template <typename T, int N>
static __device__ __forceinline__ mt_real<T> normalise(struct piece<T, N> *p, mt_real<T> rstd,
                                                       const mt_real<T> *weight)
{
    mt_real<T> sum = 0;
#pragma unroll
    for (int j = 0; j < N; j++) {
        p->x[j] = p->x[j] * rstd;
        sum += p->dy[j] * weight[j] * p->x[j];
    }
    return sum;
}

template <typename T, int N>
static __device__ __forceinline__ void put_dx(T *dx, bool add, const mt_words<T, N> &old,
                                              const struct piece<T, N> &p, mt_real<T> rstd,
                                              mt_real<T> mean, const mt_real<T> *weight)
{
    mt_real<T> z[N], before[N];
    mt_open<T, N>(before, old);
#pragma unroll
    for (int j = 0; j < N; j++) {
        z[j] = rstd * (p.dy[j] * weight[j] - p.x[j] * mean);
        if (add) z[j] = before[j] + z[j];
    }
    mt_put_vec<N>(dx, z);
}

/* The columns of a row that a lane does not keep: they are read again after the sum. */
template <typename T, int LANES, int K, int N> struct beyond {
    const T *dy, *x, *add;
    T *dx;
    const mt_real<T> *w;
    int64_t width;
    int lane;

    __device__ __forceinline__ void open(struct piece<T, N> *p, mt_real<T> *weight, int64_t c) const
    {
        struct stored_piece<T, N> in;
        get_piece(&in, dy + c, x + c);
        open_piece(p, in);
        mt_get_constant<N>(weight, w + c);
    }
    /* Their part of the sum; what they give to dw is added to `sums`. */
    __device__ __forceinline__ mt_real<T> sum(mt_real<T> *sums, bool first, mt_real<T> rstd) const
    {
        struct piece<T, N> p;
        mt_real<T> weight[N], total = 0;
        for (int64_t c = column<LANES, N>(K, lane); c < width; c += LANES * N) {
            open(&p, weight, c);
            total += normalise(&p, rstd, weight);
#pragma unroll
            for (int j = 0; j < N; j++)
                if (sums) sums[c + j] = (first ? 0 : sums[c + j]) + p.dy[j] * p.x[j];
        }
        return total;
    }
    __device__ __forceinline__ void put(mt_real<T> rstd, mt_real<T> mean) const
    {
        struct piece<T, N> p;
        mt_real<T> weight[N];
        mt_words<T, N> old = mt_no_words<mt_words<T, N>>();
        for (int64_t c = column<LANES, N>(K, lane); c < width; c += LANES * N) {
            open(&p, weight, c);
            normalise(&p, rstd, weight);
            if (add) old = mt_ask<N>(add + c);
            put_dx(dx + c, add != NULL, old, p, rstd, mean, weight);
        }
    }
};

/* A block's sums to its row of partials, those of its warps in order. By every thread. */
template <typename R, int K, int N>
static __device__ __forceinline__ void put_block(R *partials, const R (&dw)[K][N], int64_t width)
{
    __shared__ R sums[WIDE][K * 32 * N];
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < K; i++)
#pragma unroll
        for (int j = 0; j < N; j++) sums[threadIdx.x / 32][column<32, N>(i, lane) + j] = dw[i][j];
    __syncthreads();
    for (int c = threadIdx.x; c < width; c += THREADS) {
        R sum = sums[0][c];
#pragma unroll
        for (int warp = 1; warp < WIDE; warp++) sum += sums[warp][c];
        partials[blockIdx.x * width + c] = sum;
    }
}

/* A group takes `block` rows, one after another, and adds their dy xhat to its row of partials
 * (NULL: none wanted), or, where it is a warp, to its block's: in registers for its cached vectors,
 * in place for the rest. AHEAD: a row is asked for while the one before it is summed, and weights
 * are kept; there is no rest. */
template <typename T, int LANES, int K, int N>
static __global__ void __launch_bounds__(THREADS, K == 1 ? 3 : 1)
    rmsnorm_bwd_kernel(struct mt_rmsnorm_bwd_args a, mt_real<T> *partials, int64_t block)
{
    typedef mt_real<T> R;
    enum { AHEAD = K < 4 };
    int lane = threadIdx.x % LANES;
    int64_t group = (int64_t)blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
    int64_t first = group * block, last = first + block < a.rows ? first + block : a.rows;
    if (first >= a.rows && LANES > 32) return;
    R dw[K][N] = {}, weight[K][N];
    R *sums = partials && LANES > 32 ? partials + group * a.width : NULL;
    const T *const add = (const T *)a.dx_add;
    struct stored_piece<T, N> next[K];
    mt_words<T, N> next_old[K];
    R next_rstd;
    auto ask = [&](int64_t row) {
        next_rstd = ((const R *)a.rstd)[row];
#pragma unroll
        for (int i = 0; i < K; i++) {
            int64_t c = column<LANES, N>(i, lane), at = row * a.width + c;
            if (c >= a.width) continue;
            get_piece(&next[i], (const T *)a.dy + at, (const T *)a.x + at);
            if (add && AHEAD) next_old[i] = mt_ask<N>(add + at);
        }
    };
    auto weigh = [&](int i) {
        int64_t c = column<LANES, N>(i, lane);
        if (c < a.width) mt_get_constant<N>(weight[i], (const R *)a.w + c);
    };
#pragma unroll
    for (int i = 0; i < K; i++)
        if (AHEAD) weigh(i);
    if (first < last) ask(first);
    for (int64_t row = first; row < last; row++) {
        const int64_t at = row * a.width;
        const R rstd = next_rstd;
        R sum = 0;
        struct piece<T, N> kept[K];
        mt_words<T, N> old[K];
        const struct beyond<T, LANES, K, N> rest = {
            (const T *)a.dy + at, (const T *)a.x + at, add ? add + at : NULL, (T *)a.dx + at,
                (const R *)a.w, a.width, lane
        };
#pragma unroll
        for (int i = 0; i < K; i++) {
            int64_t c = column<LANES, N>(i, lane);
            if (c >= a.width) continue;
            open_piece(&kept[i], next[i]);
            old[i] = add && AHEAD ? next_old[i] : mt_no_words<mt_words<T, N>>();
        }
        if (AHEAD && row + 1 < last) ask(row + 1);
#pragma unroll
        for (int i = 0; i < K; i++) {
            if (column<LANES, N>(i, lane) >= a.width) continue;
            if (!AHEAD) weigh(i);
            sum += normalise(&kept[i], rstd, weight[i]);
#pragma unroll
            for (int j = 0; j < N; j++) dw[i][j] += kept[i].dy[j] * kept[i].x[j];
        }
        if (!AHEAD) sum += rest.sum(sums, row == first, rstd);
        R mean = mt_group_sum_in<LANES>(sum, (int)(row - first)) / (R)a.width;
#pragma unroll
        for (int i = 0; i < K; i++) {
            int64_t c = column<LANES, N>(i, lane);
            if (c >= a.width) continue;
            if (!AHEAD) weigh(i);
            if (add && !AHEAD) old[i] = mt_ask<N>(add + at + c);
            put_dx((T *)a.dx + at + c, add != NULL, old[i], kept[i], rstd, mean, weight[i]);
        }
        if (!AHEAD) rest.put(rstd, mean);
        if (!AHEAD && row + 1 < last) ask(row + 1);
    }
    if constexpr (LANES == 32) {
        static_assert(AHEAD, "a warp's columns are in registers");
        if (partials) put_block(partials, dw, a.width);
    } else {
#pragma unroll
        for (int i = 0; i < K; i++) {
            int64_t c = column<LANES, N>(i, lane);
            if (sums && c < a.width) mt_put_vec<N>(sums + c, dw[i]);
        }
    }
}

template <typename T, int LANES, int K, int N>
static void launch_bwd(cudaStream_t on, const struct mt_rmsnorm_bwd_args *a, mt_real<T> *partials,
                       int64_t block)
{
    unsigned blocks = (unsigned)mt_ceil_div(mt_ceil_div(a->rows, block), THREADS / LANES);
    rmsnorm_bwd_kernel<T, LANES, K, N><<<blocks, THREADS, 0, on>>>(*a, partials, block);
}

/* Rows that a group takes: as many groups as there is room for at once, more of them where a row is
 * a warp's. */
template <typename T> static int64_t rows_of(const struct mt_rmsnorm_bwd_args *a)
{
    bool narrow = shape_of(a->width * (int64_t)sizeof(T) / 16) == 0;
    return mt_row_block(a->rows, narrow ? GROUPS * WIDE : GROUPS);
}

/* Partial sums of dw. */
template <typename T>
static size_t rmsnorm_bwd_scratch(const mt_stream *stream, const struct mt_rmsnorm_bwd_args *a)
{
    (void)stream;
    int64_t groups = mt_ceil_div(a->rows, rows_of<T>(a));
    return a->dw ? (size_t)(groups * a->width) * sizeof(mt_real<T>) : 0;
}
MT_CUDA_SCRATCH(rmsnorm_bwd)

template <typename T>
static mt_status rmsnorm_bwd(mt_stream *stream, const struct mt_rmsnorm_bwd_args *a)
{
    enum { N = 16 / sizeof(T) };
    static void (*const launch[2][SHAPES])(cudaStream_t, const struct mt_rmsnorm_bwd_args *,
                                           mt_real<T> *,
                                           int64_t) = { SHAPES_OF(launch_bwd, T, 1, THREADS, 1),
                                                        SHAPES_OF(launch_bwd, T, N, THREADS, 1) };
    if (!a->width) return MT_OK;
    int64_t block = rows_of<T>(a), groups = mt_ceil_div(a->rows, block);
    void *partials = NULL;
    if (a->dw && groups)
        MT_TRY(mt_cuda_scratch(stream, &partials, rmsnorm_bwd_scratch<T>(stream, a)));
    mt_real<T> *sums = (mt_real<T> *)partials;
    uintptr_t addresses = (uintptr_t)a->x | (uintptr_t)a->dy | (uintptr_t)a->dx |
                          (uintptr_t)a->dx_add | (uintptr_t)a->w;
    bool by_vector = aligned(a->width, sizeof(T), addresses);
    const int shape = shape_of(by_vector ? a->width / N : a->width);
    if (groups) {
        launch[by_vector][shape](mt_cuda_stream(stream), a, sums, block);
        MT_LAUNCHED(stream, "rmsnorm_bwd");
    }
    if (shape == 0) groups = mt_ceil_div(groups, WIDE); /* rows of partials */
    return mt_add_partials<mt_real<T>>(
        stream, "rmsnorm_bwd", { (mt_real<T> *)a->dw, a->accumulate, sums, groups }, {}, a->width);
}
MT_CUDA_OP(rmsnorm_bwd)
