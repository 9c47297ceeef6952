/* Causal attention, blocked: tiles of BQ queries by BK keys, scores stay in the cache.
 *
 * A task is one (batch, key head) with its group of query heads, so that the gradients of its keys
 * and values have one writer. It copies what it needs of a head into scratch as real, rows padded
 * with zeros to whole vectors; K^T and V^T are stored in panels of PANEL keys. Every product is
 * then one kernel: a tile of rows of A, one element broadcast at a time, times a panel of B. Work
 * above the diagonal is left out by limits on each tile of rows; what is masked within a tile has
 * probability 0, so a value that is not finite also spoils up to ROWS - 1 queries before it. */
#include "kernels/cpu/vecmath.h"

#include "kernels/cpu/backend.h"
#if MT_ISA_LEVEL > 0
#include <immintrin.h>
#endif

/* ---- vectors ---- */

/* VECTOR: bytes of one. ROWS x 2 vectors of accumulators, 2 of B and 1 of A fill the registers. */
#if MT_ISA_LEVEL == 512
enum { VECTOR = 64, ROWS = 12 };
#elif MT_ISA_LEVEL == 2
enum { VECTOR = 32, ROWS = 6 };
#else
enum { VECTOR = 16, ROWS = 6 };
#endif
enum { LANES = VECTOR / sizeof(mt_real), PANEL = 2 * LANES, BQ = 48, BK = 192 };
_Static_assert(BQ % ROWS == 0 && BK % BQ == 0 && BK % PANEL == 0, "blocks are whole tiles");

typedef mt_real vec __attribute__((vector_size(VECTOR), may_alias));

MT_INLINE vec broadcast(mt_real x)
{
    return x - (vec){ 0 };
}

/* a b + c, fused where there is an instruction for it. */
MT_INLINE vec multiply_add(vec a, vec b, vec c)
{
#if MT_ISA_LEVEL == 512 && MT_ELEM_BITS == 64
    return (vec)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif MT_ISA_LEVEL == 512
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif MT_ISA_LEVEL == 2 && MT_ELEM_BITS == 64
    return (vec)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#elif MT_ISA_LEVEL == 2
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

/* ---- the one product ---- */

/* C [ROWS, PANEL] = A [ROWS, depth] B [depth, PANEL] (+ C). A's element (r, i) is at a[r * row + i
 * * col]. */
MT_INLINE void multiply_panel(mt_real *c, int64_t ldc, const mt_real *a, int64_t row, int64_t col,
                              const mt_real *b, int64_t ldb, int64_t depth, bool add)
{
    vec sum[ROWS][2];
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < 2; j++)
            sum[r][j] = add ? *(const vec *)(c + r * ldc + j * LANES) : (vec){ 0 };
    for (int64_t i = 0; i < depth; i++) {
        vec left = *(const vec *)(b + i * ldb), right = *(const vec *)(b + i * ldb + LANES);
        for (int r = 0; r < ROWS; r++) {
            vec x = broadcast(a[r * row + i * col]);
            sum[r][0] = multiply_add(x, left, sum[r][0]);
            sum[r][1] = multiply_add(x, right, sum[r][1]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < 2; j++) *(vec *)(c + r * ldc + j * LANES) = sum[r][j];
}

/* A block of the lower triangle: query row r of `queries` sees key columns c <= r + diagonal of
 * `keys`. The diagonal is a multiple of ROWS, so that tiles of rows and of columns meet on it. */
struct block {
    int64_t queries, keys, diagonal;
};

/* Keys that row r sees; and those that the tile of rows from r on sees. */
MT_INLINE int64_t row_keys(const struct block *at, int64_t r)
{
    return mt_min(at->keys, r + at->diagonal + 1);
}

MT_INLINE int64_t tile_keys(const struct block *at, int64_t r)
{
    return row_keys(at, mt_min(r + ROWS, at->queries) - 1);
}

/* Columns that `scores` writes in row r. */
MT_INLINE int64_t row_columns(const struct block *at, int64_t r)
{
    return mt_ceil_div(tile_keys(at, r - r % ROWS), PANEL) * PANEL;
}

/* tile [queries, keys] = x y^T: x [queries, dim] of pitch ld, y in panels. */
static void scores(mt_real *tile, const mt_real *x, int64_t ld, const mt_real *panels, int64_t dim,
                   const struct block *at)
{
    for (int64_t r = 0; r < at->queries; r += ROWS)
        for (int64_t c = 0; c < tile_keys(at, r); c += PANEL)
            multiply_panel(tile + r * BK + c, BK, x + r * ld, ld, 1, panels + c * dim, PANEL, dim,
                           false);
}

/* out [queries, ld] += tile y, y [keys, ld]. */
static void add_by_query(mt_real *out, const mt_real *tile, const mt_real *y, int64_t ld,
                         int64_t padded, const struct block *at)
{
    for (int64_t r = 0; r < at->queries; r += ROWS)
        for (int64_t c = 0; c < padded; c += PANEL)
            multiply_panel(out + r * ld + c, ld, tile + r * BK, BK, 1, y + c, ld, tile_keys(at, r),
                           true);
}

/* out [keys, ld] += tile^T x, x [queries, ld]. */
static void add_by_key(mt_real *out, const mt_real *tile, const mt_real *x, int64_t ld,
                       int64_t padded, const struct block *at)
{
    for (int64_t k = 0; k < at->keys; k += ROWS) {
        int64_t first = k > at->diagonal ? k - at->diagonal : 0; /* query that sees key k */
        for (int64_t c = 0; c < padded && first < at->queries; c += PANEL)
            multiply_panel(out + k * ld + c, ld, tile + first * BK + k, 1, BK, x + first * ld + c,
                           ld, at->queries - first, true);
    }
}

/* ---- heads in scratch ---- */

/* The shape of a call, and of its scratch: rows have a pitch of ld, an odd number of panels so that
 * they spread over the cache's sets, of which the first `padded` elements are used; keys are the
 * sequence in whole blocks. */
struct shape {
    int64_t sequence, nq, nkv, dim, width; /* width of a row of qkv */
    int64_t padded, ld, keys;
};

static struct shape shape_of(int64_t sequence, int64_t nq, int64_t nkv, int64_t dim)
{
    int64_t panels = mt_ceil_div(dim, PANEL), blocks = mt_ceil_div(sequence, BK);
    struct shape s = { .sequence = sequence, .nq = nq, .nkv = nkv, .dim = dim };
    s.width = (nq + 2 * nkv) * dim;
    s.padded = panels * PANEL;
    s.ld = (panels | 1) * PANEL;
    s.keys = blocks * BK;
    return s;
}

/* rows [count, ld] = scale * source rows of `stride`; the rest up to `total` rows, and of each row,
 * zeros. */
static void load_rows(mt_real *rows, const mt_elem *from, int64_t stride, int64_t count,
                      int64_t total, mt_real scale, const struct shape *s)
{
    for (int64_t r = 0; r < count; r++) {
        const mt_elem *x = from + r * stride;
        mt_real *y = rows + r * s->ld;
#pragma omp simd
        for (int64_t c = 0; c < s->dim; c++) y[c] = scale * mt_get(x + c);
        for (int64_t c = s->dim; c < s->padded; c++) y[c] = 0;
    }
    for (int64_t r = count; r < total; r++)
        memset(rows + r * s->ld, 0, (size_t)s->padded * sizeof *rows);
}

/* The transpose of a head's rows in panels [dim][PANEL] of PANEL keys each, the last one filled up
 * with zeros. */
static void load_panels(mt_real *panels, const mt_elem *from, const struct shape *s)
{
    for (int64_t k = 0; k < s->sequence; k += PANEL) {
        mt_real *panel = panels + k * s->dim;
        int64_t count = mt_min(PANEL, s->sequence - k);
        if (count < PANEL) memset(panel, 0, (size_t)(s->dim * PANEL) * sizeof *panel);
        for (int64_t i = 0; i < count; i++) {
            const mt_elem *x = from + (k + i) * s->width;
            for (int64_t c = 0; c < s->dim; c++) panel[c * PANEL + i] = mt_get(x + c);
        }
    }
}

static void store_row(mt_elem *to, const mt_real *row, mt_real scale, const struct shape *s)
{
#pragma omp simd
    for (int64_t c = 0; c < s->dim; c++) mt_put(to + c, scale * row[c]);
}

/* Columns from `seen` on become `value`. By whole vectors: a vector load of what was just stored
 * piecemeal would stall. */
MT_INLINE void mask_row(mt_real *p, int64_t seen, int64_t columns, mt_real value)
{
    for (int64_t from = seen / LANES * LANES; from < columns; from += LANES) {
        vec x = *(vec *)(p + from);
        for (int i = 0; i < LANES; i++) x[i] = from + i < seen ? x[i] : value;
        *(vec *)(p + from) = x;
    }
}

/* The next `count` of a thread's scratch; NULL while scratch is NULL and sizes are only added up.
 */
static mt_real *take(mt_real *scratch, int64_t *used, int64_t count)
{
    mt_real *p = scratch ? scratch + *used : NULL;
    *used += mt_ceil_div(count, 64) * 64;
    return p;
}

/* ---- forward ---- */

struct forward {
    mt_real *keys, *values;             /* panels; rows */
    mt_real *q, *y, *tile, *most, *sum; /* of one block of queries */
};

static int64_t forward_scratch(struct forward *f, mt_real *scratch, const struct shape *s)
{
    int64_t used = 0;
    f->keys = take(scratch, &used, s->keys * s->dim);
    f->values = take(scratch, &used, s->keys * s->ld);
    f->q = take(scratch, &used, BQ * s->ld);
    f->y = take(scratch, &used, BQ * s->ld);
    f->tile = take(scratch, &used, BQ * BK);
    f->most = take(scratch, &used, BQ);
    f->sum = take(scratch, &used, BQ);
    return used;
}

/* The largest of `most` and a row of scores. */
MT_INLINE mt_real row_max(const mt_real *p, int64_t columns, mt_real most)
{
    mt_real_bits order = mt_to_order(most);
    columns &= -PANEL; /* as it is; tells the compiler that no column is left over */
#pragma omp simd reduction(max : order)
    for (int64_t c = 0; c < columns; c++) {
        mt_real_bits o = mt_to_order(p[c]);
        order = o > order ? o : order;
    }
    return mt_from_order(order);
}

/* p = exp(p - base) of a row, masked ones 0, and the sum. */
MT_INLINE mt_real row_exp(mt_real *p, int64_t seen, int64_t columns, mt_real base)
{
    mt_real sum = 0;
    columns &= -PANEL;
#pragma omp simd
    for (int64_t c = 0; c < columns; c++) p[c] = mt_exp(p[c] - base);
    mask_row(p, seen, columns, 0);
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < columns; c++) sum += p[c];
    return sum;
}

/* Scores become exp(score - new maximum), those masked 0, and what was summed so far shrinks to
 * that maximum. A pass at a time over all rows, since the steps of a row wait for each other. */
static void soften(const struct forward *f, const struct block *at, const struct shape *s)
{
    mt_real base[BQ], sum[BQ], shrink[BQ];
    for (int64_t r = 0; r < at->queries; r++) {
        /* Masked scores become the row's first, which is neither a new maximum nor, as -Inf, slow
         * in exp. */
        mt_real *p = f->tile + r * BK;
        mask_row(p, row_keys(at, r), row_columns(at, r), p[0]);
        base[r] = row_max(p, row_columns(at, r), f->most[r]);
    }
    for (int64_t r = 0; r < at->queries; r++) {
        mt_real most = base[r];
        /* All -Inf so far: any finite base gives sums of 0. */
        base[r] = most == -(mt_real)INFINITY ? 0 : most;
        shrink[r] = f->most[r] - base[r];
        f->most[r] = most;
    }
    for (int64_t r = 0; r < at->queries; r++)
        sum[r] = row_exp(f->tile + r * BK, row_keys(at, r), row_columns(at, r), base[r]);
#pragma omp simd
    for (int64_t r = 0; r < at->queries; r++) {
        shrink[r] = mt_exp(shrink[r]);
        f->sum[r] = f->sum[r] * shrink[r] + sum[r];
    }
    for (int64_t r = 0; r < at->queries; r++) {
        mt_real *y = f->y + r * s->ld;
#pragma omp simd
        for (int64_t c = 0; c < s->padded; c++) y[c] *= shrink[r];
    }
}

/* Queries [from, from + queries) of a head against all the keys they see. */
static void forward_block(const struct forward *f, int64_t from, int64_t queries,
                          const struct shape *s)
{
    for (int64_t r = 0; r < queries; r++) f->most[r] = -(mt_real)INFINITY, f->sum[r] = 0;
    memset(f->y, 0, (size_t)(BQ * s->ld) * sizeof *f->y);
    for (int64_t k = 0; k < from + queries; k += BK) {
        struct block at = { queries, mt_min(BK, s->sequence - k), from - k };
        scores(f->tile, f->q, s->ld, f->keys + k * s->dim, s->dim, &at);
        soften(f, &at, s);
        add_by_query(f->y, f->tile, f->values + k * s->ld, s->ld, s->padded, &at);
    }
}

/* All queries of key head g of a sequence. */
static void forward_task(const struct mt_attention_fwd_args *args, int64_t batch, int64_t g,
                         const struct forward *f, const struct shape *s)
{
    int64_t group = s->nq / s->nkv;
    const mt_elem *qkv = (const mt_elem *)args->qkv + batch * s->sequence * s->width;
    load_panels(f->keys, qkv + (s->nq + g) * s->dim, s);
    load_rows(f->values, qkv + (s->nq + s->nkv + g) * s->dim, s->width, s->sequence, s->sequence, 1,
              s);
    for (int64_t h = g * group; h < (g + 1) * group; h++)
        for (int64_t from = 0; from < s->sequence; from += BQ) {
            int64_t queries = mt_min(BQ, s->sequence - from), pitch = s->nq * s->dim;
            load_rows(f->q, qkv + from * s->width + h * s->dim, s->width, queries, BQ,
                      (mt_real)args->scale, s);
            forward_block(f, from, queries, s);
            mt_real *lse = (mt_real *)args->lse + (batch * s->nq + h) * s->sequence + from;
            mt_elem *y = (mt_elem *)args->y + (batch * s->sequence + from) * pitch + h * s->dim;
            for (int64_t r = 0; r < queries; r++) {
                lse[r] = f->most[r] + (mt_real)log((double)f->sum[r]);
                store_row(y + r * pitch, f->y + r * s->ld, 1 / f->sum[r], s);
            }
        }
}

mt_status MT_CPU(attention_fwd)(mt_stream *stream, const struct mt_attention_fwd_args *args)
{
    struct shape s = shape_of(args->sequence, args->query_heads, args->kv_heads, args->head_dim);
    int64_t tasks = args->sequence ? args->batch * s.nkv : 0;
    if (tasks == 0) return MT_OK;
    int64_t threads = mt_min(omp_get_max_threads(), tasks);
    struct forward sizes;
    int64_t each = forward_scratch(&sizes, NULL, &s);
    void *scratch;
    MT_TRY(mt_cpu_scratch(stream, &scratch, (size_t)(threads * each) * sizeof(mt_real)));
#pragma omp parallel num_threads((int)threads)
    {
        struct forward f;
        forward_scratch(&f, (mt_real *)scratch + omp_get_thread_num() * each, &s);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < tasks; i++) forward_task(args, i / s.nkv, i % s.nkv, &f, &s);
    }
    return MT_OK;
}

/* ---- backward ---- */

struct backward {
    mt_real *key_panels, *value_panels, *keys; /* of the key head: transposes, and rows */
    mt_real *dkeys, *dvalues;
    mt_real *q, *dy, *dq, *p, *dp, *dot; /* of one block of queries; dot = <dy, y> */
};

static int64_t backward_scratch(struct backward *b, mt_real *scratch, const struct shape *s)
{
    int64_t used = 0;
    b->key_panels = take(scratch, &used, s->keys * s->dim);
    b->value_panels = take(scratch, &used, s->keys * s->dim);
    b->keys = take(scratch, &used, s->keys * s->ld);
    b->dkeys = take(scratch, &used, s->keys * s->ld);
    b->dvalues = take(scratch, &used, s->keys * s->ld);
    b->q = take(scratch, &used, BQ * s->ld);
    b->dy = take(scratch, &used, BQ * s->ld);
    b->dq = take(scratch, &used, BQ * s->ld);
    b->p = take(scratch, &used, BQ * BK);
    b->dp = take(scratch, &used, BQ * BK);
    b->dot = take(scratch, &used, BQ);
    return used;
}

/* p becomes the probabilities, dp the gradient of the scores, dp = p (dp - dot); masked ones 0. */
static void row_bwd(mt_real *p, mt_real *dp, mt_real lse, mt_real dot, int64_t seen,
                    int64_t columns)
{
    columns &= -PANEL;
#pragma omp simd
    for (int64_t c = 0; c < columns; c++) {
        p[c] = mt_exp(p[c] - lse);
        dp[c] = p[c] * (dp[c] - dot);
    }
    mask_row(p, seen, columns, 0);
    mask_row(dp, seen, columns, 0);
}

static void backward_block(const struct backward *b, const mt_real *lse, int64_t from,
                           int64_t queries, const struct shape *s)
{
    memset(b->dq, 0, (size_t)(BQ * s->ld) * sizeof *b->dq);
    for (int64_t k = 0; k < from + queries; k += BK) {
        struct block at = { queries, mt_min(BK, s->sequence - k), from - k };
        scores(b->p, b->q, s->ld, b->key_panels + k * s->dim, s->dim, &at);
        scores(b->dp, b->dy, s->ld, b->value_panels + k * s->dim, s->dim, &at);
        for (int64_t r = 0; r < queries; r++)
            row_bwd(b->p + r * BK, b->dp + r * BK, lse[r], b->dot[r], row_keys(&at, r),
                    row_columns(&at, r));
        add_by_key(b->dvalues + k * s->ld, b->p, b->dy, s->ld, s->padded, &at);
        add_by_key(b->dkeys + k * s->ld, b->dp, b->q, s->ld, s->padded, &at);
        add_by_query(b->dq, b->dp, b->keys + k * s->ld, s->ld, s->padded, &at);
    }
}

static mt_real dot_rows(const mt_elem *a, const mt_elem *b, int64_t dim)
{
    mt_real sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < dim; c++) sum += mt_get(a + c) * mt_get(b + c);
    return sum;
}

/* All gradients of key head g of a sequence and of its queries. q is loaded scaled, which gives
 * dkeys its factor. */
static void backward_task(const struct mt_attention_bwd_args *args, int64_t batch, int64_t g,
                          const struct backward *b, const struct shape *s)
{
    int64_t group = s->nq / s->nkv, first = batch * s->sequence, pitch = s->nq * s->dim;
    int64_t key = (s->nq + g) * s->dim, value = key + s->nkv * s->dim;
    const mt_elem *qkv = (const mt_elem *)args->qkv + first * s->width;
    mt_elem *dqkv = (mt_elem *)args->dqkv + first * s->width;
    mt_real scale = (mt_real)args->scale;
    load_panels(b->key_panels, qkv + key, s);
    load_panels(b->value_panels, qkv + value, s);
    load_rows(b->keys, qkv + key, s->width, s->sequence, s->sequence, 1, s);
    size_t sums = (size_t)(mt_ceil_div(s->sequence, ROWS) * ROWS * s->ld) * sizeof(mt_real);
    memset(b->dkeys, 0, sums);
    memset(b->dvalues, 0, sums);
    for (int64_t h = g * group; h < (g + 1) * group; h++)
        for (int64_t from = 0; from < s->sequence; from += BQ) {
            int64_t queries = mt_min(BQ, s->sequence - from);
            int64_t at = (first + from) * pitch + h * s->dim, q = from * s->width + h * s->dim;
            const mt_elem *dy = (const mt_elem *)args->dy + at;
            const mt_elem *y = (const mt_elem *)args->y + at;
            load_rows(b->q, qkv + q, s->width, queries, BQ, scale, s);
            load_rows(b->dy, dy, pitch, queries, BQ, 1, s);
            for (int64_t r = 0; r < queries; r++)
                b->dot[r] = dot_rows(dy + r * pitch, y + r * pitch, s->dim);
            backward_block(b, (const mt_real *)args->lse + (batch * s->nq + h) * s->sequence + from,
                           from, queries, s);
            for (int64_t r = 0; r < queries; r++)
                store_row(dqkv + q + r * s->width, b->dq + r * s->ld, scale, s);
        }
    for (int64_t r = 0; r < s->sequence; r++) {
        store_row(dqkv + key + r * s->width, b->dkeys + r * s->ld, 1, s);
        store_row(dqkv + value + r * s->width, b->dvalues + r * s->ld, 1, s);
    }
}

mt_status MT_CPU(attention_bwd)(mt_stream *stream, const struct mt_attention_bwd_args *args)
{
    struct shape s = shape_of(args->sequence, args->query_heads, args->kv_heads, args->head_dim);
    int64_t tasks = args->sequence ? args->batch * s.nkv : 0;
    if (tasks == 0) return MT_OK;
    int64_t threads = mt_min(omp_get_max_threads(), tasks);
    struct backward sizes;
    int64_t each = backward_scratch(&sizes, NULL, &s);
    void *scratch;
    MT_TRY(mt_cpu_scratch(stream, &scratch, (size_t)(threads * each) * sizeof(mt_real)));
#pragma omp parallel num_threads((int)threads)
    {
        struct backward b;
        backward_scratch(&b, (mt_real *)scratch + omp_get_thread_num() * each, &s);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < tasks; i++) backward_task(args, i / s.nkv, i % s.nkv, &b, &s);
    }
    return MT_OK;
}
