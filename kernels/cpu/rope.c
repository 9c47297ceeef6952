/* Normalisation and rotation of queries and keys. */
#include "kernels/cpu/lanes.h"

#include "kernels/cpu/backend.h"
#include "kernels/cpu/rowblocks.h"

/* Fewer elements than this are done by one thread: starting the others costs more. */
enum { SERIAL = 1 << 14 };

/* The queries or the keys of one token: `heads` heads of `dim`, normalised in spans of `span` heads
 * (0: not at all). */
struct part {
    int64_t heads, dim, span;
    const mt_real *cos, *sin; /* [dim / 2], of the token's position */
};

/* Heads that share one sum of squares. */
static int64_t span_of(mt_qk_norm norm, int64_t heads)
{
    return norm == MT_QK_NORM_NONE ? 0 : norm == MT_QK_NORM_HEAD ? 1 : heads;
}

MT_INLINE mt_real rstd_of(const mt_elem *x, int64_t width, mt_real eps)
{
    return 1 / (mt_real)sqrt((double)(dot_of(x, x, width) / (mt_real)width + eps));
}

MT_INLINE void rotate(mt_elem *y, const mt_elem *x, const struct part *p)
{
    int64_t half = p->dim / 2;
    const mt_real *cosine = p->cos, *sine = p->sin;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        mt_real a = mt_get(x + i), b = mt_get(x + i + half);
        mt_put(y + i, a * cosine[i] - b * sine[i]);
        mt_put(y + i + half, b * cosine[i] + a * sine[i]);
    }
}

/* What rmsnorm_fwd would store. */
MT_INLINE mt_real normed(const mt_elem *x, mt_real rstd, const mt_real *w)
{
    return mt_rounded(mt_rounded(mt_get(x) * rstd) * *w);
}

MT_INLINE void norm_rotate(mt_elem *y, const mt_elem *x, mt_real rstd, const mt_real *w,
                           const struct part *p)
{
    int64_t half = p->dim / 2;
    const mt_real *cosine = p->cos, *sine = p->sin;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        mt_real a = normed(x + i, rstd, w + i), b = normed(x + i + half, rstd, w + i + half);
        mt_put(y + i, a * cosine[i] - b * sine[i]);
        mt_put(y + i + half, b * cosine[i] + a * sine[i]);
    }
}

MT_INLINE void part_fwd(mt_elem *y, mt_real *rstd, const mt_elem *x, const mt_real *w, mt_real eps,
                        const struct part *p)
{
    int64_t dim = p->dim;
    for (int64_t h = 0; h < p->heads; h++) {
        if (!p->span) {
            rotate(y + h * dim, x + h * dim, p);
            continue;
        }
        int64_t within = h % p->span;
        if (within == 0) rstd[h / p->span] = rstd_of(x + h * dim, p->span * dim, eps);
        norm_rotate(y + h * dim, x + h * dim, rstd[h / p->span], w + within * dim, p);
    }
}

/* One token. `dim` is the heads': where it is a constant, loops over a head are a few vectors. */
MT_INLINE void token_fwd_of(const struct mt_qk_norm_rope_fwd_args *args, int64_t t, int64_t dim)
{
    int64_t nq = args->query_heads, nkv = args->kv_heads, width = (nq + 2 * nkv) * dim;
    int64_t angle = t % args->sequence * (dim / 2), values = (nq + nkv) * dim;
    const mt_real *cosine = (const mt_real *)args->cos_table + angle;
    const mt_real *sine = (const mt_real *)args->sin_table + angle;
    struct part q = { nq, dim, span_of(args->norm, nq), cosine, sine };
    struct part k = { nkv, dim, span_of(args->norm, nkv), cosine, sine };
    int64_t q_sums = q.span ? nq / q.span : 0, k_sums = k.span ? nkv / k.span : 0;
    const mt_elem *x = (const mt_elem *)args->x + t * width;
    mt_elem *y = (mt_elem *)args->y + t * width;
    mt_real *rstd = q.span ? (mt_real *)args->rstd + t * (q_sums + k_sums) : NULL;
    part_fwd(y, rstd, x, args->w_q, (mt_real)args->eps, &q);
    part_fwd(y + nq * dim, rstd ? rstd + q_sums : NULL, x + nq * dim, args->w_k, (mt_real)args->eps,
             &k);
    if (y != x) memcpy(y + values, x + values, (size_t)(nkv * dim) * sizeof *y);
}

static void token_fwd(const struct mt_qk_norm_rope_fwd_args *args, int64_t t)
{
    if (args->head_dim == 16)
        token_fwd_of(args, t, 16);
    else if (args->head_dim == 32)
        token_fwd_of(args, t, 32);
    else if (args->head_dim == 64)
        token_fwd_of(args, t, 64);
    else
        token_fwd_of(args, t, args->head_dim);
}

mt_status MT_CPU(qk_norm_rope_fwd)(mt_stream *stream, const struct mt_qk_norm_rope_fwd_args *args)
{
    (void)stream;
    int64_t dim = args->head_dim, tokens = args->batch * args->sequence;
    int64_t width = (args->query_heads + 2 * args->kv_heads) * dim;
    if (dim == 0) return MT_OK;
#pragma omp parallel for schedule(static) if (tokens * width >= SERIAL)
    for (int64_t t = 0; t < tokens; t++) token_fwd(args, t);
    return MT_OK;
}

/* The gradient before rotation of the pair (i, i + half). */
MT_INLINE void unrotated(mt_real *a, mt_real *b, const mt_elem *dy, int64_t i, int64_t half,
                         mt_real cosine, mt_real sine)
{
    mt_real p = mt_get(dy + i), q = mt_get(dy + i + half);
    *a = p * cosine + q * sine;
    *b = q * cosine - p * sine;
}

/* sum over a head of dn w xhat; dw += dn xhat unless NULL. dn is the gradient before rotation. */
MT_INLINE mt_real head_sum(mt_real *dw, const mt_elem *dy, const mt_elem *x, mt_real rstd,
                           const mt_real *w, const struct part *p)
{
    int64_t half = p->dim / 2;
    const mt_real *cosine = p->cos, *sine = p->sin;
    mt_real sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < half; i++) {
        mt_real a, b;
        unrotated(&a, &b, dy, i, half, cosine[i], sine[i]);
        sum += a * w[i] * (mt_get(x + i) * rstd) + b * w[i + half] * (mt_get(x + i + half) * rstd);
    }
    if (!dw) return sum;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        mt_real a, b;
        unrotated(&a, &b, dy, i, half, cosine[i], sine[i]);
        dw[i] += a * (mt_get(x + i) * rstd);
        dw[i + half] += b * (mt_get(x + i + half) * rstd);
    }
    return sum;
}

MT_INLINE void head_bwd(mt_elem *dx, const mt_elem *dy, const mt_elem *x, mt_real rstd,
                        mt_real mean, const mt_real *w, const struct part *p)
{
    int64_t half = p->dim / 2;
    const mt_real *cosine = p->cos, *sine = p->sin;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        mt_real a, b;
        unrotated(&a, &b, dy, i, half, cosine[i], sine[i]);
        mt_put(dx + i, rstd * (a * w[i] - mt_get(x + i) * rstd * mean));
        mt_put(dx + i + half, rstd * (b * w[i + half] - mt_get(x + i + half) * rstd * mean));
    }
}

MT_INLINE void head_bwd_plain(mt_elem *dx, const mt_elem *dy, const struct part *p)
{
    int64_t half = p->dim / 2;
    const mt_real *cosine = p->cos, *sine = p->sin;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        mt_real a, b;
        unrotated(&a, &b, dy, i, half, cosine[i], sine[i]);
        mt_put(dx + i, a);
        mt_put(dx + i + half, b);
    }
}

/* dx may be dy: a span's sums are complete before its first element is written. */
MT_INLINE void part_bwd(mt_elem *dx, mt_real *dw, const mt_elem *dy, const mt_elem *x,
                        const mt_real *rstd, const mt_real *w, const struct part *p)
{
    int64_t dim = p->dim;
    if (!p->span) {
        for (int64_t h = 0; h < p->heads; h++) head_bwd_plain(dx + h * dim, dy + h * dim, p);
        return;
    }
    for (int64_t first = 0; first < p->heads; first += p->span) {
        mt_real r = rstd[first / p->span], sum = 0;
        for (int64_t i = 0; i < p->span; i++) {
            int64_t at = (first + i) * dim;
            sum += head_sum(dw ? dw + i * dim : NULL, dy + at, x + at, r, w + i * dim, p);
        }
        mt_real mean = sum / (mt_real)(p->span * dim);
        for (int64_t i = 0; i < p->span; i++) {
            int64_t at = (first + i) * dim;
            head_bwd(dx + at, dy + at, x + at, r, mean, w + i * dim, p);
        }
    }
}

/* One token; dw_q, dw_k are the partial sums of its block, or NULL. */
MT_INLINE void token_bwd_of(const struct mt_qk_norm_rope_bwd_args *args, int64_t t, mt_real *dw_q,
                            mt_real *dw_k, int64_t dim)
{
    int64_t nq = args->query_heads, nkv = args->kv_heads;
    int64_t at = t * (nq + 2 * nkv) * dim, keys = nq * dim, values = (nq + nkv) * dim;
    int64_t angle = t % args->sequence * (dim / 2);
    const mt_real *cosine = (const mt_real *)args->cos_table + angle;
    const mt_real *sine = (const mt_real *)args->sin_table + angle;
    struct part q = { nq, dim, span_of(args->norm, nq), cosine, sine };
    struct part k = { nkv, dim, span_of(args->norm, nkv), cosine, sine };
    int64_t q_sums = q.span ? nq / q.span : 0, k_sums = k.span ? nkv / k.span : 0;
    const mt_elem *dy = (const mt_elem *)args->dy + at;
    const mt_elem *x = q.span ? (const mt_elem *)args->x + at : dy; /* unread without norm */
    const mt_real *rstd = q.span ? (const mt_real *)args->rstd + t * (q_sums + k_sums) : NULL;
    mt_elem *dx = (mt_elem *)args->dx + at;
    part_bwd(dx, dw_q, dy, x, rstd, args->w_q, &q);
    part_bwd(dx + keys, dw_k, dy + keys, x + keys, q.span ? rstd + q_sums : NULL, args->w_k, &k);
    if (dx != dy) memcpy(dx + values, dy + values, (size_t)(nkv * dim) * sizeof *dx);
}

static void token_bwd(const struct mt_qk_norm_rope_bwd_args *args, int64_t t, mt_real *dw_q,
                      mt_real *dw_k)
{
    if (args->head_dim == 16)
        token_bwd_of(args, t, dw_q, dw_k, 16);
    else if (args->head_dim == 32)
        token_bwd_of(args, t, dw_q, dw_k, 32);
    else if (args->head_dim == 64)
        token_bwd_of(args, t, dw_q, dw_k, 64);
    else
        token_bwd_of(args, t, dw_q, dw_k, args->head_dim);
}

mt_status MT_CPU(qk_norm_rope_bwd)(mt_stream *stream, const struct mt_qk_norm_rope_bwd_args *args)
{
    int64_t nq = args->query_heads, nkv = args->kv_heads, dim = args->head_dim;
    int64_t tokens = args->batch * args->sequence, work = tokens * (nq + 2 * nkv) * dim;
    if (dim == 0) return MT_OK;
    int64_t q_span = span_of(args->norm, nq), k_span = span_of(args->norm, nkv);
    mt_real *dw_q = q_span ? args->dw_q : NULL, *dw_k = k_span ? args->dw_k : NULL;
    int64_t block = mt_row_block(tokens), blocks = mt_ceil_div(tokens, block);
    int64_t stride = (q_span + k_span) * dim;
    size_t bytes = (size_t)stride * sizeof(mt_real);
    void *scratch = NULL;
    if ((dw_q || dw_k) && blocks) MT_TRY(mt_cpu_scratch(stream, &scratch, (size_t)blocks * bytes));
    mt_real *partials = scratch;
#pragma omp parallel for schedule(static) if (work >= SERIAL)
    for (int64_t b = 0; b < blocks; b++) {
        mt_real *sums = partials ? partials + b * stride : NULL;
        if (sums) memset(sums, 0, bytes);
        for (int64_t t = b * block; t < mt_min(tokens, (b + 1) * block); t++)
            token_bwd(args, t, dw_q ? sums : NULL, dw_k ? sums + q_span * dim : NULL);
    }
    if (dw_q) mt_add_partials(dw_q, args->accumulate_q, partials, blocks, stride, q_span * dim);
    if (dw_k)
        mt_add_partials(dw_k, args->accumulate_k, partials ? partials + q_span * dim : NULL, blocks,
                        stride, k_span * dim);
    return MT_OK;
}
