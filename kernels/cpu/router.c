/* The router: logits, softmax, top-k, and its backward. Three small matrix products share one tile;
 * each output element has one writer, and sums over tokens go through fixed blocks of tokens in
 * order. */
#include "kernels/cpu/backend.h"
#include "kernels/cpu/lanes.h"

enum {
    ROWS =
        MT_ISA_LEVEL == 512 ? 8 : 4, /* of a tile: with VECS, sums enough to hide their latency */
    COLS = 64 / sizeof(mt_real),     /* of a tile: a cache line */
    VECS = COLS / LANES,
    TOKENS = LANES < ROWS ? ROWS : LANES, /* whose logits there is room for */
    TREE = 8,                             /* experts whose probabilities are summed side by side */
    MIN_BLOCK = 64,
    MAX_BLOCKS = 256, /* tokens of a block of partial sums, at least; and blocks at most */
    SUM_TOKENS = 256, /* tokens summed in one go in dwr */
    GROUP = 16        /* experts of a task of dwr */
};
_Static_assert(COLS % LANES == 0 && COLS % TREE == 0, "experts come in whole vectors and trees");

/* out[i, c] = sum_k a[i ai + k ak] b[k bk + c] for ROWS rows and COLS columns, in order of k.
 * Vectors are loaded and stored one by one, so that the sums stay in registers. */
MT_INLINE void tile(mt_real *out, int64_t out_stride, const mt_real *a, int64_t ai, int64_t ak,
                    const mt_real *b, int64_t bk, int64_t n)
{
    vec acc[ROWS][VECS] = { { { 0 } } };
    for (int64_t k = 0; k < n; k++) {
        vec w[VECS];
        for (int j = 0; j < VECS; j++) w[j] = *(const vec_at *)(b + k * bk + j * LANES);
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < VECS; j++)
                acc[i][j] = multiply_add(w[j], broadcast(a[i * ai + k * ak]), acc[i][j]);
    }
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < VECS; j++) *(vec_at *)(out + i * out_stride + j * LANES) = acc[i][j];
}

/* Carves the next piece of a scratch block, at a multiple of 64 bytes; returns where it starts. */
MT_INLINE size_t carve(size_t *used, int64_t count, size_t element)
{
    size_t at = *used;
    *used += ((size_t)count * element + 63) / 64 * 64;
    return at;
}

/* ---- forward ----------------------------------------------------------------------------------
 */

/* Sums over a block of tokens. */
struct partial {
    double *prob_sum; /* [E] */
    int64_t *counts;  /* [E] */
    double z_sum;
};

/* The lowest index not among the first `n` chosen. */
static int32_t lowest_left(const int32_t *chosen, int64_t n)
{
    for (int32_t e = 0;; e++) {
        int64_t i = 0;
        while (i < n && chosen[i] != e) i++;
        if (i == n) return e;
    }
}

/* A thread's buffers, for LANES tokens. Columns hold a value of each token. */
struct buffers {
    mt_real *x;        /* [ROWS, D] */
    mt_real *logits;   /* [LANES, padded experts], then the probabilities */
    int32_t *chosen;   /* [LANES, top_k] */
    vec *score, *prob; /* columns [padded experts] */
    vec top, sum;      /* of the logits, and of their exponentials */
};

/* columns [padded] = the transpose of rows [LANES, padded]; and back. */
static void to_columns(vec *columns, const mt_real *rows, int64_t padded)
{
    for (int64_t e = 0; e < padded; e += LANES, columns += LANES) {
        MT_UNROLL
        for (int i = 0; i < LANES; i++) columns[i] = *(const vec_at *)(rows + i * padded + e);
        transpose(columns);
    }
}

static void to_rows(mt_real *rows, const vec *columns, int64_t padded)
{
    for (int64_t e = 0; e < padded; e += LANES, columns += LANES) {
        vec x[LANES];
        MT_UNROLL
        for (int i = 0; i < LANES; i++) x[i] = columns[i];
        transpose(x);
        MT_UNROLL
        for (int i = 0; i < LANES; i++) *(vec_at *)(rows + i * padded + e) = x[i];
    }
}

/* Probabilities of n experts from their logits, which are the scores. Those of TREE experts are
 * summed side by side. */
static void softmax(struct buffers *b, int64_t n)
{
    vec top = broadcast((mt_real)-INFINITY), sum[TREE] = { { 0 } };
    for (int64_t e = 0; e < n; e++) top = larger(top, b->score[e]); /* NaN is passed over */
    for (int64_t e = 0; e < n; e += TREE) {
        vec *p = b->prob + e;
        MT_UNROLL
        for (int i = 0; i < TREE; i++) p[i] = b->score[e + i] - top;
        exp_vectors(p, TREE);
        for (int i = 0; i < TREE && e + i < n; i++) sum[i] += p[i];
    }
    for (int i = 1; i < TREE; i++) sum[0] += sum[i];
    for (int64_t e = 0; e < n; e++) b->prob[e] /= sum[0];
    b->top = top, b->sum = sum[0];
}

/* The top_k largest scores, best first, ties to the lowest index; NaN and -Inf come last, by index.
 * chosen [LANES, top_k]; spoils the scores. */
static void select_top(int32_t *chosen, int64_t top_k, vec *score, int64_t n)
{
    const vec least = broadcast((mt_real)-INFINITY);
    vec_bits last = { 0 };
    last -= 1;
    for (int64_t i = 0; i < top_k; i++) {
        vec top = least;
        vec_bits best = { 0 };
        best -= 1;
        for (int64_t e = 0; e < n; e++) {
            vec x = choose(last == (mt_real_bits)e, least, score[e]);
            best = (vec_bits)choose(x > top, (vec)((vec_bits){ 0 } + (mt_real_bits)e), (vec)best);
            top = larger(top, x);
            score[e] = x;
        }
        for (int l = 0; l < LANES; l++) {
            int32_t *own = chosen + l * top_k;
            own[i] = best[l] < 0 ? lowest_left(own, i) : (int32_t)best[l];
        }
        last = best;
    }
}

/* What is kept of a token whose choices are made. */
static void finish_token(const struct mt_router_fwd_args *a, int64_t t, const mt_real *probs,
                         double lse, struct partial *sums)
{
    mt_real *weights = (mt_real *)a->weights + t * a->top_k, total = 0;
    const int32_t *chosen = a->chosen + t * a->top_k;
    ((mt_real *)a->lse)[t] = (mt_real)lse;
    lse = (double)((mt_real *)a->lse)[t];
    sums->z_sum += lse * lse;
    mt_real *kept = (mt_real *)a->probs + t * a->experts;
    double *prob_sum = sums->prob_sum;
#pragma omp simd
    for (int64_t e = 0; e < a->experts; e++) {
        kept[e] = probs[e];
        prob_sum[e] += (double)probs[e];
    }
    for (int64_t i = 0; i < a->top_k; i++) {
        weights[i] = probs[chosen[i]];
        total += weights[i];
        sums->counts[chosen[i]]++;
    }
    if (a->normalize)
        for (int64_t i = 0; i < a->top_k; i++)
            weights[i] = weights[i] / (total + (mt_real)MT_LEAST_SHARE);
}

/* `rows` tokens, at most LANES, from t on, with their logits. */
static void route_tokens(const struct mt_router_fwd_args *a, int64_t t, int64_t rows,
                         struct buffers *b, struct partial *sums)
{
    int64_t n = a->experts, padded = mt_ceil_div(n, COLS) * COLS;
    for (int64_t i = 0; a->logits && i < rows; i++)
        memcpy((mt_real *)a->logits + (t + i) * n, b->logits + i * padded,
               (size_t)n * sizeof(mt_real));
    to_columns(b->score, b->logits, padded);
    softmax(b, n);
    to_rows(b->logits, b->prob, padded);
    for (int64_t e = 0; a->bias && e < n; e++) b->score[e] = b->prob[e] + (mt_real)a->bias[e];
    select_top(b->chosen, a->top_k, b->score, n);
    memcpy(a->chosen + t * a->top_k, b->chosen, (size_t)(rows * a->top_k) * sizeof *b->chosen);
    double lse[LANES];
#pragma omp simd
    for (int i = 0; i < LANES; i++) lse[i] = (double)b->top[i] + mt_log((double)b->sum[i]);
    for (int64_t i = 0; i < rows; i++) finish_token(a, t + i, b->logits + i * padded, lse[i], sums);
}

/* wr^T in panels of COLS experts: panels[p, d, c] = wr[p COLS + c, d], 0 past E. */
static void fill_panels(mt_real *panels, const mt_real *wr, int64_t experts, int64_t width,
                        int threads)
{
    int64_t count = mt_ceil_div(experts, COLS);
#pragma omp parallel for num_threads(threads) schedule(static) if (experts * width > 1 << 16)
    for (int64_t p = 0; p < count; p++) {
        mt_real *panel = panels + p * width * COLS;
        for (int64_t c = 0; c < COLS; c++) {
            int64_t e = p * COLS + c;
            for (int64_t d = 0; d < width; d++)
                panel[d * COLS + c] = e < experts ? wr[e * width + d] : 0;
        }
    }
}

/* Logits of `rows` tokens from t on; of those missing to a whole tile, 0. */
static void find_logits(const struct mt_router_fwd_args *a, int64_t t, int64_t rows,
                        const mt_real *panels, mt_real *x, mt_real *logits)
{
    int64_t width = a->width, count = mt_ceil_div(a->experts, COLS), stride = count * COLS;
    const mt_elem *from = (const mt_elem *)a->x + t * width;
    for (int64_t i = 0; i < rows * width; i++) x[i] = mt_get(from + i);
    for (int64_t i = rows * width; i < ROWS * width; i++) x[i] = 0;
    for (int64_t p = 0; p < count; p++)
        tile(logits + p * COLS, stride, x, width, 1, panels + p * width * COLS, COLS, width);
}

static void route_block(const struct mt_router_fwd_args *a, int64_t begin, int64_t end,
                        const mt_real *panels, struct buffers *b, struct partial *sums)
{
    int64_t stride = mt_ceil_div(a->experts, COLS) * COLS;
    for (int64_t t = begin; t < end; t += LANES) {
        int64_t rows = mt_min(LANES, end - t);
        for (int64_t i = 0; i < rows; i += ROWS)
            find_logits(a, t + i, mt_min(ROWS, rows - i), panels, b->x, b->logits + i * stride);
        route_tokens(a, t, rows, b, sums);
    }
}

static void add_partials(const struct mt_router_fwd_args *a, const struct partial *partials,
                         int64_t blocks, double *total)
{
    double z_sum = 0;
    for (int64_t e = 0; e < a->experts; e++) total[e] = 0, a->counts[e] = 0;
    for (int64_t i = 0; i < blocks; i++) {
        for (int64_t e = 0; e < a->experts; e++) {
            total[e] += partials[i].prob_sum[e];
            a->counts[e] += partials[i].counts[e];
        }
        z_sum += partials[i].z_sum;
    }
    for (int64_t e = 0; e < a->experts; e++) ((mt_real *)a->prob_sum)[e] = (mt_real)total[e];
    for (int64_t e = 0; e < a->experts && a->load; e++) a->load[e] += a->counts[e];
    *(mt_real *)a->z_sum = (mt_real)z_sum;
}

mt_status MT_CPU(router_fwd)(mt_stream *stream, const struct mt_router_fwd_args *a)
{
    int threads = stream->device->threads;
    int64_t experts = a->experts, width = a->width, padded = mt_ceil_div(experts, COLS) * COLS;
    int64_t block = mt_ceil_div(a->tokens, MAX_BLOCKS);
    if (block < MIN_BLOCK) block = MIN_BLOCK;
    int64_t blocks = mt_ceil_div(a->tokens, block);

    size_t own = 0; /* a thread's part */
    size_t x_at = carve(&own, ROWS * width, sizeof(mt_real));
    size_t logits_at = carve(&own, TOKENS * padded, sizeof(mt_real));
    size_t chosen_at = carve(&own, LANES * a->top_k, sizeof(int32_t));
    size_t score_at = carve(&own, padded, sizeof(vec));
    size_t prob_at = carve(&own, padded, sizeof(vec));
    size_t used = 0;
    size_t panels_at = carve(&used, padded * width, sizeof(mt_real));
    size_t partials_at = carve(&used, blocks, sizeof(struct partial));
    size_t sums_at = carve(&used, (blocks + 1) * experts, sizeof(double));
    size_t counts_at = carve(&used, blocks * experts, sizeof(int64_t));
    size_t own_at = carve(&used, threads, own);
    void *scratch;
    MT_TRY(mt_cpu_scratch(stream, &scratch, used));
    char *base = scratch;
    mt_real *panels = (mt_real *)(base + panels_at);
    struct partial *partials = (struct partial *)(base + partials_at);
    double *sums = (double *)(base + sums_at);
    int64_t *counts = (int64_t *)(base + counts_at);

    fill_panels(panels, a->wr, experts, width, threads);
#pragma omp parallel for num_threads(threads) schedule(static) if (blocks > 1)
    for (int64_t i = 0; i < blocks; i++) {
        char *part = base + own_at + (size_t)omp_get_thread_num() * own;
        struct buffers b = { .x = (mt_real *)(part + x_at),
                             .logits = (mt_real *)(part + logits_at),
                             .chosen = (int32_t *)(part + chosen_at),
                             .score = (vec *)(part + score_at),
                             .prob = (vec *)(part + prob_at) };
        struct partial sum = { sums + (i + 1) * experts, counts + i * experts, 0 };
        memset(sum.prob_sum, 0, (size_t)experts * sizeof(double));
        memset(sum.counts, 0, (size_t)experts * sizeof(int64_t));
        route_block(a, i * block, mt_min(a->tokens, (i + 1) * block), panels, &b, &sum);
        partials[i] = sum;
    }
    add_partials(a, partials, blocks, sums);
    return MT_OK;
}

/* ---- backward ---------------------------------------------------------------------------------
 */

/* dlogits of a token becomes dP; returns <dP, P>, lane by lane. */
MT_INLINE vec token_dprobs(const struct mt_router_bwd_args *a, int64_t t)
{
    int64_t n = a->experts;
    const mt_real *p = (const mt_real *)a->probs + t * n, *dprob_sum = a->dprob_sum;
    mt_real *d = (mt_real *)a->dlogits + t * n;
    for (int64_t e = 0; e < n; e++) d[e] = dprob_sum ? dprob_sum[e] : 0;
    if (a->dweights) {
        const mt_real *dw = (const mt_real *)a->dweights + t * a->top_k;
        const mt_real *w = (const mt_real *)a->weights + t * a->top_k;
        const int32_t *chosen = a->chosen + t * a->top_k;
        mt_real mean = 0, total = 0; /* w = p / total: dp = (dw - <dw, w>) / total */
        for (int64_t i = 0; i < a->top_k && a->normalize; i++) {
            mean += dw[i] * w[i];
            total += p[chosen[i]];
        }
        total += (mt_real)MT_LEAST_SHARE;
        for (int64_t i = 0; i < a->top_k; i++)
            d[chosen[i]] += a->normalize ? (dw[i] - mean) / total : dw[i];
    }
    vec dot = { 0 };
    int64_t e = 0;
    for (; e + LANES <= n; e += LANES) dot += *(const vec_at *)(d + e) * *(const vec_at *)(p + e);
    for (; e < n; e++) dot[0] += d[e] * p[e];
    return dot;
}

/* dlogits of `rows` tokens, at most LANES, from t on. */
static void find_dlogits(const struct mt_router_bwd_args *a, int64_t t, int64_t rows)
{
    vec dots[LANES] = { { 0 } };
    for (int64_t i = 0; i < rows; i++) dots[i] = token_dprobs(a, t + i);
    vec dot = sums_of_lanes(dots);
    for (int64_t i = 0; i < rows; i++) {
        const mt_real *p = (const mt_real *)a->probs + (t + i) * a->experts;
        mt_real *d = (mt_real *)a->dlogits + (t + i) * a->experts, z = 0, mean = dot[i];
        if (a->dz_sum) z = *(const mt_real *)a->dz_sum * 2 * ((const mt_real *)a->lse)[t + i];
#pragma omp simd
        for (int64_t e = 0; e < a->experts; e++) d[e] = p[e] * (d[e] - mean) + z * p[e];
    }
}

/* dx = add + from; `add` NULL is 0, and may be dx. */
MT_INLINE void add_row(mt_elem *dx, const mt_elem *add, const mt_real *from, int64_t count)
{
    if (add) {
#pragma omp simd
        for (int64_t j = 0; j < count; j++) mt_put(dx + j, mt_get(add + j) + from[j]);
    } else {
#pragma omp simd
        for (int64_t j = 0; j < count; j++) mt_put(dx + j, 0 + from[j]);
    }
}

/* Rows [t, t + rows) of dx from dlogits rows `d` (ROWS of them) and wr padded to `stride` columns.
 */
static void dx_rows(const struct mt_router_bwd_args *a, int64_t t, int64_t rows, const mt_real *d,
                    const mt_real *wr, int64_t stride)
{
    int64_t width = a->width;
    mt_elem *dx = a->dx;
    const mt_elem *add = a->dx_add;
    for (int64_t c = 0; c < width; c += COLS) {
        mt_real out[ROWS * COLS];
        int64_t cols = mt_min(COLS, width - c);
        tile(out, COLS, d, a->experts, 1, wr + c, stride, a->experts);
        for (int64_t i = 0; i < rows; i++) {
            int64_t at = (t + i) * width + c;
            if (cols == COLS)
                add_row(dx + at, add ? add + at : NULL, out + i * COLS, COLS);
            else
                add_row(dx + at, add ? add + at : NULL, out + i * COLS, cols);
        }
    }
}

static void router_dx(const struct mt_router_bwd_args *a, mt_real *wr, int64_t stride,
                      mt_real *tail, int threads)
{
    int64_t width = a->width, experts = a->experts, whole = a->tokens / ROWS * ROWS;
    const mt_real *d = a->dlogits;
    for (int64_t e = 0; e < experts; e++) {
        memcpy(wr + e * stride, (const mt_real *)a->wr + e * width, (size_t)width * sizeof *wr);
        memset(wr + e * stride + width, 0, (size_t)(stride - width) * sizeof *wr);
    }
    memset(tail, 0, (size_t)(ROWS * experts) * sizeof *tail);
    memcpy(tail, d + whole * experts, (size_t)((a->tokens - whole) * experts) * sizeof *tail);
#pragma omp parallel for num_threads(threads) schedule(static) if (a->tokens > MIN_BLOCK)
    for (int64_t t = 0; t < a->tokens; t += ROWS)
        dx_rows(a, t, mt_min(ROWS, a->tokens - t), t < whole ? d + t * experts : tail, wr, stride);
}

/* dwr for experts [e, e + GROUP) and columns [c, c + COLS): sums of SUM_TOKENS tokens, added in
 * order. */
static void dwr_part(const struct mt_router_bwd_args *a, int64_t e, int64_t c)
{
    mt_real x[SUM_TOKENS * COLS], d[SUM_TOKENS * GROUP], out[ROWS * COLS], total[GROUP * COLS];
    int64_t width = a->width, experts = mt_min(GROUP, a->experts - e),
            cols = mt_min(COLS, width - c);
    memset(total, 0, sizeof total);
    memset(x, 0, sizeof x);
    memset(d, 0, sizeof d);
    for (int64_t t = 0; t < a->tokens; t += SUM_TOKENS) {
        int64_t n = mt_min(SUM_TOKENS, a->tokens - t);
        for (int64_t i = 0; i < n; i++) {
            const mt_elem *from = (const mt_elem *)a->x + (t + i) * width + c;
            const mt_real *dl = (const mt_real *)a->dlogits + (t + i) * a->experts + e;
            if (cols == COLS && experts == GROUP) { /* constants: no calls of memcpy */
                for (int64_t j = 0; j < COLS; j++) x[i * COLS + j] = mt_get(from + j);
                for (int64_t j = 0; j < GROUP; j++) d[i * GROUP + j] = dl[j];
                continue;
            }
            for (int64_t j = 0; j < cols; j++) x[i * COLS + j] = mt_get(from + j);
            for (int64_t j = 0; j < experts; j++) d[i * GROUP + j] = dl[j];
        }
        for (int64_t g = 0; g < experts; g += ROWS) {
            tile(out, COLS, d + g, 1, GROUP, x, COLS, n);
            for (int64_t j = 0; j < ROWS * COLS; j++) total[g * COLS + j] += out[j];
        }
    }
    for (int64_t i = 0; i < experts; i++) {
        mt_real *dwr = (mt_real *)a->dwr + (e + i) * width + c;
        for (int64_t j = 0; j < cols; j++)
            dwr[j] = (a->accumulate ? dwr[j] : 0) + total[i * COLS + j];
    }
}

mt_status MT_CPU(router_bwd)(mt_stream *stream, const struct mt_router_bwd_args *a)
{
    int threads = stream->device->threads;
    int64_t stride = mt_ceil_div(a->width, COLS) * COLS;
    size_t used = 0;
    size_t wr_at = carve(&used, a->experts * stride, sizeof(mt_real));
    size_t tail_at = carve(&used, ROWS * a->experts, sizeof(mt_real));
    void *scratch;
    MT_TRY(mt_cpu_scratch(stream, &scratch, used));
    char *base = scratch;

#pragma omp parallel for num_threads(threads) schedule(static) if (a->tokens > MIN_BLOCK)
    for (int64_t t = 0; t < a->tokens; t += LANES) find_dlogits(a, t, mt_min(LANES, a->tokens - t));
    if (a->dx)
        router_dx(a, (mt_real *)(base + wr_at), stride, (mt_real *)(base + tail_at), threads);
    if (a->dwr) {
        int64_t tiles = mt_ceil_div(a->width, COLS), tasks = tiles * mt_ceil_div(a->experts, GROUP);
#pragma omp parallel for num_threads(threads) schedule(static) if (a->tokens > MIN_BLOCK)
        for (int64_t i = 0; i < tasks; i++) dwr_part(a, i / tiles * GROUP, i % tiles * COLS);
    }
    return MT_OK;
}
