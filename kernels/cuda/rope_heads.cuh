/* Queries and keys whose heads are normalised by themselves, each of them one vector of pairs of
 * each of its threads: a thread keeps what it has read of a head, its weights and what it adds to
 * their gradients, and the pass over memory is one. */
#pragma once

#include "kernels/cuda/rope.cuh"

enum { HEADS = 2 }; /* of a thread forward */

/* Whether a call is of such heads, counted in 32 bits, when vectors are of n elements. */
static bool one_pass(const struct shape &s, int n)
{
    int64_t heads = s.tokens * (s.nq + 2 * s.nkv);
    return s.norm == MT_QK_NORM_HEAD && s.dim == 2 * (int64_t)n * s.lanes && heads > 0 &&
           heads <= INT32_MAX - HEADS * THREADS;
}

/* N pairs of a head: as reals, and as they are stored. */
template <typename R, int N> struct pairs_of {
    R low[N], high[N];
};
template <typename T, int N> struct stored_pairs {
    mt_words<T, N> low, high;
};

template <typename T, int N>
static __device__ __forceinline__ void put_pairs(T *y, int64_t half,
                                                 const struct stored_pairs<T, N> &pairs)
{
    mt_leave<N>(y, pairs.low);
    mt_leave<N>(y + half, pairs.high);
}

template <typename T, int N>
static __device__ __forceinline__ struct stored_pairs<T, N> ask_pairs(const T *x, int64_t half) {
    return { mt_ask<N>(x), mt_ask<N>(x + half) };
}

template <typename T, int N>
static __device__ __forceinline__ void open_pairs(mt_real<T> *low, mt_real<T> *high,
                                                  const struct stored_pairs<T, N> &in)
{
    mt_open<T, N>(low, in.low);
    mt_open<T, N>(high, in.high);
}

/* Heads that are normalised by themselves, each a thread's pairs wide: all heads of all tokens, one
 * after another, values among them; a thread takes HEADS of them. */
template <typename T, int N>
static __global__ void __launch_bounds__(THREADS)
    heads_fwd_kernel(struct mt_qk_norm_rope_fwd_args a, struct shape s)
{
    typedef mt_real<T> R;
    const struct place p = place_of<N>(s);
    const int64_t half = s.dim / 2;
    const unsigned normed = (unsigned)(s.nq + s.nkv), heads = normed + (unsigned)s.nkv;
    const unsigned rows = (unsigned)s.tokens * heads, groups = (unsigned)p.groups;
    const unsigned first = blockIdx.x * groups * HEADS + (unsigned)p.group;
    const R inverse = 1 / (R)s.dim; /* a power of two */
    struct stored_pairs<T, N> in[HEADS];
#pragma unroll
    for (int i = 0; i < HEADS; i++)
        if (first + i * groups < rows)
            in[i] = ask_pairs<T, N>((const T *)a.x + (first + i * groups) * s.dim + p.first, half);
#pragma unroll
    for (int i = 0; i < HEADS; i++) {
        const unsigned row = first + i * groups, t = row / heads, h = row - t * heads;
        T *y = (T *)a.y + row * s.dim + p.first;
        R low[N], high[N], sum = 0;
        open_pairs(low, high, in[i]);
#pragma unroll
        for (int j = 0; j < N; j++) sum += low[j] * low[j] + high[j] * high[j];
        sum = head_total(sum, s.lanes);
        if (row >= rows) continue;
        if (h >= normed) {
            put_pairs<T, N>(y, half, in[i]);
            continue;
        }
        const R *w = (const R *)(h < (unsigned)s.nq ? a.w_q : a.w_k) + p.first;
        R rstd = 1 / sqrt(sum * inverse + (R)a.eps);
        if (p.first == 0) ((R *)a.rstd)[(int64_t)t * normed + h] = rstd;
        norm_vec<T, N>(low, rstd, w);
        norm_vec<T, N>(high, rstd, w + half);
        rotate(low, high,
               turn_of<R, N>(a.cos_table, a.sin_table, t % (unsigned)s.sequence * half + p.first));
        mt_put_vec<N>(y, low);
        mt_put_vec<N>(y + half, high);
    }
}

template <typename T, int N>
static mt_status forward_of_heads(mt_stream *stream, const struct mt_qk_norm_rope_fwd_args *a,
                                  const struct shape &s)
{
    int64_t heads = s.tokens * (s.nq + 2 * s.nkv);
    unsigned blocks = (unsigned)mt_ceil_div(heads, HEADS * THREADS / s.lanes);
    heads_fwd_kernel<T, N><<<blocks, THREADS, 0, mt_cuda_stream(stream)>>>(*a, s);
    MT_LAUNCHED(stream, "qk_norm_rope_fwd");
    return MT_OK;
}

/* ---- backward ---------------------------------------------------------------------------------
 */

/* Blocks take `rows` heads each: the first `queries` blocks of queries, those up to `normed` of
 * keys; the rest, where dx is not dy, copy values. */
struct head_blocks {
    int64_t rows, queries, normed, all;
};

static struct head_blocks head_blocks_of(const struct shape &s, bool copies)
{
    struct head_blocks b;
    const int64_t groups = THREADS / s.lanes; /* no thread without a head */
    b.rows = mt_ceil_div(mt_row_block(s.tokens * (s.nq + s.nkv), BLOCKS), groups) * groups;
    b.queries = mt_ceil_div(s.tokens * s.nq, b.rows);
    b.normed = b.queries + mt_ceil_div(s.tokens * s.nkv, b.rows);
    b.all = b.normed + (copies ? b.normed - b.queries : 0);
    return b;
}

/* What a block takes: heads [from, to) of all those that tokens have `each` of, the first of them
 * the token's head `before`. */
struct head_part {
    int64_t each, before, from, to;
    bool keys, values;
};

static __device__ __forceinline__ struct head_part head_part_of(const struct head_blocks &b,
                                                                const struct shape &s)
{
    struct head_part h = { s.nkv, s.nq, blockIdx.x - b.queries, 0, true, false };
    if (blockIdx.x < b.queries)
        h = { s.nq, 0, blockIdx.x, 0, false, false };
    else if (blockIdx.x >= b.normed)
        h = { s.nkv, s.nq + s.nkv, blockIdx.x - b.normed, 0, false, true };
    h.from *= b.rows;
    h.to = min(h.from + b.rows, s.tokens * h.each);
    return h;
}

/* No less for a thread's pair of elements than for its pairs of vectors. */
template <typename T> static size_t heads_bytes(const struct shape &s)
{
    return (size_t)(head_blocks_of(s, false).normed * s.dim) * sizeof(mt_real<T>);
}

/* A walk over the heads of tokens, `step` at a time. */
struct head_walk {
    int64_t t, h, each, whole, part;

    __device__ __forceinline__ head_walk(int64_t row, int64_t step, int64_t each)
        : t((unsigned)row / (unsigned)each), h((unsigned)row % (unsigned)each), each(each),
          whole((unsigned)step / (unsigned)each), part((unsigned)step % (unsigned)each)
    {
    }
    __device__ __forceinline__ void on()
    {
        t += whole, h += part;
        if (h >= each) h -= each, t++;
    }
};

template <typename T, int N> struct head_in {
    struct stored_pairs<T, N> dy, x;
    mt_real<T> rstd;
};

/* dx of a head, whose weights are w; adds to dw. Every thread of the warp calls it, those without a
 * head too (dx NULL). */
template <typename T, int N>
static __device__ __forceinline__ void
one_head(T *dx, struct pairs_of<mt_real<T>, N> &dw, const struct head_in<T, N> &in,
         const struct pairs_of<mt_real<T>, N> &w, const struct turn<mt_real<T>, N> &t,
         const struct shape &s, mt_real<T> inverse)
{
    typedef mt_real<T> R;
    R u[N], v[N], low[N], high[N], x_low[N], x_high[N], sum = 0;
    open_pairs(u, v, in.dy);
    open_pairs(x_low, x_high, in.x);
#pragma unroll
    for (int j = 0; j < N; j++) {
        low[j] = u[j] * t.cosine[j] + v[j] * t.sine[j];
        high[j] = v[j] * t.cosine[j] - u[j] * t.sine[j];
        x_low[j] = x_low[j] * in.rstd;
        x_high[j] = x_high[j] * in.rstd;
        if (dx) dw.low[j] += low[j] * x_low[j], dw.high[j] += high[j] * x_high[j];
        low[j] = low[j] * w.low[j];
        high[j] = high[j] * w.high[j];
        sum += low[j] * x_low[j] + high[j] * x_high[j];
    }
    R mean = head_total(sum, s.lanes) * inverse;
    if (!dx) return;
#pragma unroll
    for (int j = 0; j < N; j++) {
        low[j] = in.rstd * (low[j] - x_low[j] * mean);
        high[j] = in.rstd * (high[j] - x_high[j] * mean);
    }
    mt_put_vec<N>(dx, low);
    mt_put_vec<N>(dx + s.dim / 2, high);
}

/* The sums of a block's threads to its row of partials: those of neighbouring groups in order, as
 * many as give each thread a column, then theirs. */
template <typename T, int N>
static __device__ __forceinline__ void put_sums(mt_real<T> *partials,
                                                const struct pairs_of<mt_real<T>, N> &dw,
                                                const struct shape &s, const struct place &p)
{
    typedef mt_real<T> R;
    __shared__ R sums[THREADS * 2 * N], runs[THREADS];
    const int dim = (int)s.dim, parts = max(1, THREADS / dim), each = (int)p.groups / parts;
    R *mine = sums + p.group * dim + p.first;
#pragma unroll
    for (int j = 0; j < N; j++) mine[j] = dw.low[j], mine[dim / 2 + j] = dw.high[j];
    __syncthreads();
    for (int i = threadIdx.x; i < dim * parts; i += THREADS) {
        const R *from = sums + i / dim * each * dim + i % dim;
        R sum = 0;
        for (int g = 0; g < each; g++) sum += from[g * dim];
        if (parts == 1)
            partials[blockIdx.x * s.dim + i] = sum;
        else
            runs[i] = sum;
    }
    __syncthreads();
    if (parts == 1 || (int)threadIdx.x >= dim) return;
    R sum = 0;
    for (int i = 0; i < parts; i++) sum += runs[i * dim + threadIdx.x];
    partials[blockIdx.x * s.dim + threadIdx.x] = sum;
}

/* partials [blocks.normed, dim]: what a block's heads give to the gradient of their weights. */
template <typename T, int N>
static __global__ void __launch_bounds__(THREADS, 2)
    heads_bwd_kernel(struct mt_qk_norm_rope_bwd_args a, struct shape s, struct head_blocks b,
                     mt_real<T> *partials)
{
    typedef mt_real<T> R;
    const struct place p = place_of<N>(s);
    const struct head_part h = head_part_of(b, s);
    const int64_t half = s.dim / 2;
    const R inverse = 1 / (R)s.dim; /* a power of two */
    struct head_walk next(h.from + p.group, p.groups, h.each);
    struct head_in<T, N> in;
    struct pairs_of<R, N> w, dw = {
    };
    auto at = [&] { return next.t * s.width + (h.before + next.h) * s.dim + p.first; };
    if (h.values) {
        for (int64_t row = h.from + p.group; row < h.to; row += p.groups, next.on())
            put_pairs<T, N>((T *)a.dx + at(), half, ask_pairs<T, N>((const T *)a.dy + at(), half));
        return;
    }
    auto ask = [&] {
        in.dy = ask_pairs<T, N>((const T *)a.dy + at(), half);
        in.x = ask_pairs<T, N>((const T *)a.x + at(), half);
        in.rstd = ((const R *)a.rstd)[next.t * s.sums + h.before + next.h];
    };
    mt_get_vec<N>(w.low, (const R *)(h.keys ? a.w_k : a.w_q) + p.first);
    mt_get_vec<N>(w.high, (const R *)(h.keys ? a.w_k : a.w_q) + p.first + half);
    if (h.from + p.group < h.to) ask();
    for (int64_t base = h.from; base < h.to; base += p.groups) {
        const int64_t row = base + p.group;
        const struct head_in<T, N> now = in;
        T *dx = row < h.to ? (T *)a.dx + at() : NULL;
        struct turn<R, N> t = turn_of<R, N>(
            a.cos_table, a.sin_table, (unsigned)next.t % (unsigned)s.sequence * half + p.first);
        next.on();
        if (row + p.groups < h.to) ask();
        one_head<T, N>(dx, dw, now, w, t, s, inverse);
    }
    put_sums<T, N>(partials, dw, s, p);
}

/* In one pass. Partial sums of keys' weights come after those of queries'. */
template <typename T, int N>
static mt_status backward_of_heads(mt_stream *stream, const struct mt_qk_norm_rope_bwd_args *a,
                                   const struct shape &s)
{
    typedef mt_real<T> R;
    const char *op = "qk_norm_rope_bwd";
    const struct head_blocks b = head_blocks_of(s, a->dx != a->dy);
    void *partials;
    MT_TRY(mt_cuda_scratch(stream, &partials, heads_bytes<T>(s)));
    R *q = (R *)partials, *k = q + b.queries * s.dim;
    heads_bwd_kernel<T, N><<<(unsigned)b.all, THREADS, 0, mt_cuda_stream(stream)>>>(*a, s, b, q);
    MT_LAUNCHED(stream, op);
    return mt_add_partials<R>(stream, op, { (R *)a->dw_q, a->accumulate_q, q, b.queries },
                              { (R *)a->dw_k, a->accumulate_k, k, b.normed - b.queries }, s.dim);
}
