/* Causal attention, blocked: tiles of BQ queries by BK keys, scores stay in the cache.
 *
 * A task is one (batch, key head) with its group of query heads, so that the gradients of its keys
 * and values have one writer. It copies what it needs of a head into scratch as real, rows padded
 * with zeros to whole vectors; K^T and V^T are stored in panels of PANEL keys. Every product is
 * then one kernel: a tile of rows of A, one element broadcast at a time, times a panel of B. Work
 * above the diagonal is left out by limits on each tile of rows; what is masked within a tile has
 * probability 0, so a value that is not finite also spoils up to ROWS - 1 queries before it. */
#include "kernels/cpu/attention_rows.h"

/* ---- the one product ---- */

/* A part of a product: rows and vectors of its tile of C, and how far it sums. */
struct part {
    int rows, vecs;
    int64_t depth;
    bool add;
};

/* C [rows, vecs LANES] = A [rows, depth] B [depth, PANEL] (+ C). A's element (r, i) is at a[r * row
 * + i * col]. */
MT_INLINE void multiply_tile(mt_real *c, int64_t ldc, const mt_real *a, int64_t row, int64_t col,
                             const mt_real *b, int64_t ldb, struct part p)
{
    vec sum[ROWS][2];
    for (int r = 0; r < p.rows; r++)
        for (int j = 0; j < p.vecs; j++)
            sum[r][j] = p.add ? *(const vec *)(c + r * ldc + j * LANES) : (vec){ 0 };
    for (int64_t i = 0; i < p.depth; i++) {
        vec right[2];
        for (int j = 0; j < p.vecs; j++) right[j] = *(const vec *)(b + i * ldb + j * LANES);
        for (int r = 0; r < p.rows; r++) {
            vec x = broadcast(a[r * row + i * col]);
            for (int j = 0; j < p.vecs; j++) sum[r][j] = multiply_add(x, right[j], sum[r][j]);
        }
    }
    for (int r = 0; r < p.rows; r++)
        for (int j = 0; j < p.vecs; j++) *(vec *)(c + r * ldc + j * LANES) = sum[r][j];
}

/* The same for `rows` rows, of which those up to the next THIRD of a tile are there to be written.
 */
enum { THIRD = ROWS / 3 };
MT_INLINE void multiply_rows(mt_real *c, int64_t ldc, const mt_real *a, int64_t row, int64_t col,
                             const mt_real *b, int64_t ldb, int64_t rows, struct part p)
{
    if (rows > 2 * THIRD) {
        p.rows = ROWS;
        multiply_tile(c, ldc, a, row, col, b, ldb, p);
    } else if (rows > THIRD) {
        p.rows = 2 * THIRD;
        multiply_tile(c, ldc, a, row, col, b, ldb, p);
    } else {
        p.rows = THIRD;
        multiply_tile(c, ldc, a, row, col, b, ldb, p);
    }
}

/* And for the first `width` columns of a panel, in whole vectors. */
MT_INLINE void multiply_panel(mt_real *c, int64_t ldc, const mt_real *a, int64_t row, int64_t col,
                              const mt_real *b, int64_t ldb, int64_t rows, int64_t width,
                              int64_t depth)
{
    struct part p = { .vecs = 2, .depth = depth, .add = true };
    if (width > LANES) {
        multiply_rows(c, ldc, a, row, col, b, ldb, rows, p);
    } else {
        p.vecs = 1;
        multiply_rows(c, ldc, a, row, col, b, ldb, rows, p);
    }
}

/* tile [queries, keys] = x y^T: x [queries, dim] of pitch ld, y in panels. Of the last panel that a
 * tile of rows sees only what it sees, in whole vectors. */
static void scores(mt_real *tile, const mt_real *x, int64_t ld, const mt_real *panels, int64_t dim,
                   const struct block *at)
{
    for (int64_t r = 0; r < at->queries; r += ROWS) {
        int64_t rows = at->queries - r, keys = tile_keys(at, r), c = 0;
        for (; keys - c > LANES || (c < keys && rows <= 2 * THIRD); c += PANEL)
            multiply_rows(tile + r * BK + c, BK, x + r * ld, ld, 1, panels + c * dim, PANEL, rows,
                          (struct part){ .vecs = 2, .depth = dim });
        if (c < keys)
            multiply_tile(tile + r * BK + c, BK, x + r * ld, ld, 1, panels + c * dim, PANEL,
                          (struct part){ ROWS, 1, dim, false });
    }
}

/* out [queries, ld] += tile y, y [keys, ld]. */
static void add_by_query(mt_real *out, const mt_real *tile, const mt_real *y, int64_t ld,
                         int64_t padded, const struct block *at)
{
    for (int64_t r = 0; r < at->queries; r += ROWS)
        for (int64_t c = 0; c < padded; c += PANEL)
            multiply_panel(out + r * ld + c, ld, tile + r * BK, BK, 1, y + c, ld, at->queries - r,
                           padded - c, tile_keys(at, r));
}

/* out [keys, ld] += tile^T x, x [queries, ld]. */
static void add_by_key(mt_real *out, const mt_real *tile, const mt_real *x, int64_t ld,
                       int64_t padded, const struct block *at)
{
    for (int64_t k = 0; k < at->keys; k += ROWS) {
        int64_t first = k > at->diagonal ? k - at->diagonal : 0; /* query that sees key k */
        for (int64_t c = 0; c < padded && first < at->queries; c += PANEL)
            multiply_panel(out + k * ld + c, ld, tile + first * BK + k, 1, BK, x + first * ld + c,
                           ld, at->keys - k, padded - c, at->queries - first);
    }
}

/* ---- heads in scratch ---- */

/* The shape of a call, and of its scratch: rows have a pitch of ld, an odd number of vectors or of
 * panels so that they spread over the cache's sets, of which the first `padded` elements are used;
 * keys are the sequence in whole blocks. */
struct shape {
    int64_t sequence, nq, nkv, dim, width; /* width of a row of qkv */
    int64_t padded, ld, keys;
};

static struct shape shape_of(int64_t sequence, int64_t nq, int64_t nkv, int64_t dim)
{
    int64_t vecs = mt_ceil_div(dim, LANES), blocks = mt_ceil_div(sequence, BK);
    struct shape s = { .sequence = sequence, .nq = nq, .nkv = nkv, .dim = dim };
    s.width = (nq + 2 * nkv) * dim;
    s.padded = vecs * LANES;
    s.ld = vecs % 2 ? s.padded : (vecs / 2 | 1) * PANEL;
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
        int64_t c = 0;
        ask_for_row(x + AHEAD * stride, s->dim);
        for (; c + LANES <= s->dim; c += LANES)
            *(vec *)(y + c) = broadcast(scale) * load_elements(x + c);
        for (; c < s->dim; c++) y[c] = scale * mt_get(x + c);
        for (; c < s->padded; c++) y[c] = 0;
    }
    for (int64_t r = count; r < total; r++)
        memset(rows + r * s->ld, 0, (size_t)s->padded * sizeof *rows);
}

/* LANES columns from `from` on, of LANES rows, to lines of a panel. */
MT_INLINE void load_square(mt_real *panel, const mt_elem *from, int64_t stride)
{
    vec x[LANES];
    MT_UNROLL
    for (int i = 0; i < LANES; i++) x[i] = load_elements(from + i * stride);
    transpose(x);
    MT_UNROLL
    for (int i = 0; i < LANES; i++) *(vec *)(panel + i * PANEL) = x[i];
}

/* The transpose of a head's rows in panels [dim][PANEL] of PANEL keys each, the last one filled up
 * with zeros. */
static void load_panels(mt_real *panels, const mt_elem *from, const struct shape *s)
{
    for (int64_t k = 0; k < s->sequence; k += PANEL) {
        mt_real *panel = panels + k * s->dim;
        int64_t count = mt_min(PANEL, s->sequence - k), c = 0;
        if (count < PANEL) memset(panel, 0, (size_t)(s->dim * PANEL) * sizeof *panel);
        const mt_elem *x = from + k * s->width;
        for (int64_t i = 0; i < count; i++) ask_for_row(x + (i + PANEL) * s->width, s->dim);
        for (; count == PANEL && c + LANES <= s->dim; c += LANES)
            for (int64_t i = 0; i < PANEL; i += LANES)
                load_square(panel + c * PANEL + i, x + i * s->width + c, s->width);
        for (; c < s->dim; c++)
            for (int64_t i = 0; i < count; i++) panel[c * PANEL + i] = mt_get(x + i * s->width + c);
    }
}

/* ---- forward ---- */

struct forward {
    mt_real *keys, *values; /* panels; rows */
    mt_real *q;             /* of one block of queries */
    struct softmax sums;
};

static int64_t forward_scratch(struct forward *f, mt_real *scratch, const struct shape *s)
{
    int64_t used = 0;
    f->keys = take(scratch, &used, s->keys * s->dim);
    f->values = take(scratch, &used, s->keys * s->ld);
    f->q = take(scratch, &used, BQ * s->ld);
    f->sums.y = take(scratch, &used, BQ * s->ld);
    f->sums.tile = take(scratch, &used, BQ * BK);
    f->sums.most = take(scratch, &used, BQ);
    f->sums.sum = take(scratch, &used, BQ);
    f->sums.ld = s->ld, f->sums.padded = s->padded;
    return used;
}

/* Queries [from, from + queries) of a head against all the keys they see. */
static void forward_block(const struct forward *f, int64_t from, int64_t queries,
                          const struct shape *s)
{
    soften_begin(&f->sums);
    for (int64_t k = 0; k < from + queries; k += BK) {
        struct block at = { queries, mt_min(BK, s->sequence - k), from - k };
        scores(f->sums.tile, f->q, s->ld, f->keys + k * s->dim, s->dim, &at);
        soften(&f->sums, &at);
        add_by_query(f->sums.y, f->sums.tile, f->values + k * s->ld, s->ld, s->padded, &at);
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
            soften_end(y, lse, pitch, queries, s->dim, &f->sums);
        }
}

static void forward_thread(const void *args, const void *shape, int64_t batch, int64_t g,
                           mt_real *scratch)
{
    struct forward f;
    forward_scratch(&f, scratch, shape);
    forward_task(args, batch, g, &f, shape);
}

mt_status MT_CPU(attention_fwd)(mt_stream *stream, const struct mt_attention_fwd_args *args)
{
    struct shape s = shape_of(args->sequence, args->query_heads, args->kv_heads, args->head_dim);
    struct forward sizes;
    return run_tasks(stream, forward_thread, args, &s, args->sequence ? args->batch : 0, s.nkv,
                     forward_scratch(&sizes, NULL, &s));
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

static void backward_block(const struct backward *b, const mt_real *lse, int64_t from,
                           int64_t queries, const struct shape *s)
{
    memset(b->dq, 0, (size_t)(BQ * s->ld) * sizeof *b->dq);
    for (int64_t k = 0; k < from + queries; k += BK) {
        struct block at = { queries, mt_min(BK, s->sequence - k), from - k };
        scores(b->p, b->q, s->ld, b->key_panels + k * s->dim, s->dim, &at);
        scores(b->dp, b->dy, s->ld, b->value_panels + k * s->dim, s->dim, &at);
        rows_bwd(b->p, b->dp, lse, b->dot, &at);
        add_by_key(b->dvalues + k * s->ld, b->p, b->dy, s->ld, s->padded, &at);
        add_by_key(b->dkeys + k * s->ld, b->dp, b->q, s->ld, s->padded, &at);
        add_by_query(b->dq, b->dp, b->keys + k * s->ld, s->ld, s->padded, &at);
    }
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
            dot_rows(b->dot, dy, y, pitch, queries, s->dim);
            backward_block(b, (const mt_real *)args->lse + (batch * s->nq + h) * s->sequence + from,
                           from, queries, s);
            for (int64_t r = 0; r < queries; r++)
                store_row(dqkv + q + r * s->width, b->dq + r * s->ld, scale, s->dim);
        }
    for (int64_t r = 0; r < s->sequence; r++) {
        store_row(dqkv + key + r * s->width, b->dkeys + r * s->ld, 1, s->dim);
        store_row(dqkv + value + r * s->width, b->dvalues + r * s->ld, 1, s->dim);
    }
}

static void backward_thread(const void *args, const void *shape, int64_t batch, int64_t g,
                            mt_real *scratch)
{
    struct backward b;
    backward_scratch(&b, scratch, shape);
    backward_task(args, batch, g, &b, shape);
}

mt_status MT_CPU(attention_bwd)(mt_stream *stream, const struct mt_attention_bwd_args *args)
{
    struct shape s = shape_of(args->sequence, args->query_heads, args->kv_heads, args->head_dim);
    struct backward sizes;
    return run_tasks(stream, backward_thread, args, &s, args->sequence ? args->batch : 0, s.nkv,
                     backward_scratch(&sizes, NULL, &s));
}
