/* Causal attention by pairs of bf16 (pairs.h), sums and softmax f32. Compiled beside the bf16
 * variant of avx512.
 *
 * Tasks and blocks are those of attention.c. Of each head it packs what steps take into scratch,
 * widths padded with zeros to whole steps: rows (of A), columns (B of a product with a transpose)
 * and pairs (B of any other). Probabilities and the gradients of scores are rounded to bf16 where
 * they meet values, keys, queries and dy. */
#include "kernels/cpu/pairs.h"

#include "kernels/cpu/attention_rows.h"

enum { QUERY_STEPS = BQ / STEP };
_Static_assert((int)ROWS == STEP && (int)PANEL == STEP, "a tile of scores is a step");

struct shape {
    int64_t sequence, nq, nkv, dim, width; /* width of a row of qkv */
    int64_t steps, padded;                 /* of a head's width */
    int64_t key_steps;
};

static struct shape shape_of(int64_t sequence, int64_t nq, int64_t nkv, int64_t dim)
{
    int64_t steps = mt_ceil_div(dim, STEP);
    return (struct shape){ sequence,
                           nq,
                           nkv,
                           dim,
                           (nq + 2 * nkv) * dim,
                           steps,
                           steps * STEP,
                           mt_ceil_div(sequence, STEP) };
}

/* ---- packing ---- */

/* Rows [BQ, padded] of a block of queries. */
static void load_rows(mt_elem *rows, const mt_elem *from, int64_t stride, int64_t count,
                      const struct shape *s)
{
    memset(rows, 0, (size_t)(BQ * s->padded) * sizeof *rows);
    for (int64_t r = 0; r < count; r++)
        memcpy(rows + r * s->padded, from + r * stride, (size_t)s->dim * sizeof *rows);
}

/* A tile of B: HALF rows of STEP elements become pairs of depths. */
static void transpose_pairs(mt_elem *to, const mt_elem *from, int64_t ld)
{
    __m512i r[HALF];
    for (int i = 0; i < HALF; i++) r[i] = _mm512_loadu_si512(from + i * ld);
    for (int i = 0; i < HALF; i += 4) transpose_lanes(r + i); /* unit 4 l + j of 4 rows: lane l */
    for (int j = 0; j < 4; j++) {
        __m512i even = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);
        __m512i odd = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
        __m512i even2 = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
        __m512i odd2 = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
        _mm512_store_si512(to + j * STEP, _mm512_shuffle_i32x4(even, even2, 0x88));
        _mm512_store_si512(to + (4 + j) * STEP, _mm512_shuffle_i32x4(odd, odd2, 0x88));
        _mm512_store_si512(to + (8 + j) * STEP, _mm512_shuffle_i32x4(even, even2, 0xdd));
        _mm512_store_si512(to + (12 + j) * STEP, _mm512_shuffle_i32x4(odd, odd2, 0xdd));
    }
}

/* The keys or values of a head as columns: panels of HALF of them, each `steps` tiles. */
static void load_columns(mt_elem *columns, const mt_elem *from, const struct shape *s)
{
    _Alignas(64) mt_elem edge[STEP * STEP];
    for (int64_t k = 0; k < s->key_steps * STEP; k += HALF)
        for (int64_t c = 0; c < s->padded; c += STEP, columns += TILE) {
            int64_t height = mt_min(HALF, s->sequence - k), width = mt_min(STEP, s->dim - c);
            const mt_elem *at = from + k * s->width + c;
            bool whole = height == HALF && width == STEP;
            if (!whole) at = copy_edge(edge, at, s->width, height, width);
            transpose_pairs(columns, at, whole ? s->width : STEP);
        }
}

/* Lines of a head as pairs: panels of HALF of its columns, each ceil(lines / STEP) tiles. */
static void load_pairs(mt_elem *pairs, const mt_elem *from, int64_t stride, int64_t lines,
                       const struct shape *s)
{
    _Alignas(64) mt_elem edge[STEP * STEP];
    pack_lines(pairs, from, stride, edge, lines, s->dim, mt_ceil_div(lines, STEP) * TILE,
               pair_step);
}

/* to [BQ, BK] = a block of scores or of what became of them, in whole steps of rows: zeros past the
 * last query. */
static void round_rows(mt_elem *to, const float *tile, const struct block *at)
{
    for (int64_t r = 0; r < at->queries; r++)
        for (int64_t c = 0; c < row_columns(at, r); c += STEP)
            _mm512_store_si512(to + r * BK + c, (__m512i)_mm512_cvtne2ps_pbh(
                                                    _mm512_load_ps(tile + r * BK + c + HALF),
                                                    _mm512_load_ps(tile + r * BK + c)));
    for (int64_t r = at->queries; r % STEP; r++) memset(to + r * BK, 0, BK * sizeof *to);
}

/* Rounded rows as rows of keys: panels of STEP keys, each QUERY_STEPS steps of two tiles. */
static void transpose_rows(mt_elem *to, const mt_elem *rows, const struct block *at)
{
    for (int64_t i = 0; i * STEP < at->queries; i++)
        for (int64_t k = 0; k < row_columns(at, i * STEP); k += STEP) {
            mt_elem *step = to + (k / STEP * QUERY_STEPS + i) * 2 * TILE;
            transpose_step(step, step + TILE, rows + i * STEP * BK + k, BK);
        }
}

/* ---- products ---- */

MT_INLINE void scale_block(float *x, float scale)
{
    __m512 factor = _mm512_set1_ps(scale);
    for (int64_t r = 0; r < STEP; r++, x += BK)
        for (int64_t c = 0; c < STEP; c += HALF)
            _mm512_store_ps(x + c, _mm512_mul_ps(factor, _mm512_load_ps(x + c)));
}

/* tile [BQ, BK] = scale rows columns. */
static void scores(float *tile, const mt_elem *rows, const mt_elem *columns, float scale,
                   const struct block *at, const struct shape *s)
{
    for (int64_t r = 0; r < at->queries; r += STEP)
        for (int64_t c = 0; c < row_columns(at, r); c += STEP) {
            float *to = tile + r * BK + c;
            multiply(to, BK, false, STEP,
                     &(struct steps){ .a = rows + r * s->padded,
                                      .b = columns + c * s->padded,
                                      .pitch = s->padded,
                                      .stride = STEP,
                                      .apart = HALF * s->padded,
                                      .count = s->steps });
            if (scale != 1) scale_block(to, scale);
        }
}

/* out [BQ, padded] += rows pairs, where the pairs are those of keys from `key` on. */
static void add_by_query(float *out, const mt_elem *rows, const mt_elem *pairs, int64_t key,
                         const struct block *at, const struct shape *s)
{
    for (int64_t r = 0; r < at->queries; r += STEP)
        for (int64_t c = 0; c < s->padded; c += STEP)
            multiply(out + r * s->padded + c, s->padded, true, STEP,
                     &(struct steps){ .a = rows + r * BK,
                                      .b = pairs + (c / HALF * s->key_steps + key / STEP) * TILE,
                                      .pitch = BK,
                                      .stride = STEP,
                                      .apart = s->key_steps * TILE,
                                      .count = row_columns(at, r) / STEP });
}

/* out [keys, padded] += transposed pairs, where the pairs are those of the block's queries. */
static void add_by_key(float *out, const mt_elem *transposed, const mt_elem *pairs,
                       const struct block *at, const struct shape *s)
{
    int64_t steps = mt_ceil_div(at->queries, STEP);
    for (int64_t k = 0; k < row_columns(at, at->queries - 1); k += STEP) {
        int64_t first = k > at->diagonal ? (k - at->diagonal) / STEP : 0; /* that sees key k */
        for (int64_t c = 0; c < s->padded; c += STEP)
            multiply(out + k * s->padded + c, s->padded, true, STEP,
                     &(struct steps){ .a = transposed + (k / STEP * QUERY_STEPS + first) * 2 * TILE,
                                      .b = pairs + (c / HALF * steps + first) * TILE,
                                      .pitch = STEP,
                                      .stride = 2 * TILE,
                                      .apart = steps * TILE,
                                      .count = steps - first });
    }
}

/* The next `count` elements of a thread's scratch, as `take`. */
MT_INLINE mt_elem *take_elements(float *scratch, int64_t *used, int64_t count)
{
    return (mt_elem *)take(scratch, used, mt_ceil_div(count, 2));
}

/* ---- forward ---- */

struct forward {
    mt_elem *keys, *values; /* columns; pairs */
    mt_elem *q, *p;         /* of one block of queries: rows; rounded */
    struct softmax sums;
};

static int64_t forward_scratch(struct forward *f, float *scratch, const struct shape *s)
{
    int64_t used = 0, head = s->key_steps * STEP * s->padded;
    f->keys = take_elements(scratch, &used, head);
    f->values = take_elements(scratch, &used, head);
    f->q = take_elements(scratch, &used, BQ * s->padded);
    f->p = take_elements(scratch, &used, BQ * BK);
    f->sums.y = take(scratch, &used, BQ * s->padded);
    f->sums.tile = take(scratch, &used, BQ * BK);
    f->sums.most = take(scratch, &used, BQ);
    f->sums.sum = take(scratch, &used, BQ);
    f->sums.ld = f->sums.padded = s->padded;
    return used;
}

static void forward_block(const struct forward *f, int64_t from, int64_t queries, float scale,
                          const struct shape *s)
{
    soften_begin(&f->sums);
    for (int64_t k = 0; k < from + queries; k += BK) {
        struct block at = { queries, mt_min(BK, s->sequence - k), from - k };
        scores(f->sums.tile, f->q, f->keys + k * s->padded, scale, &at, s);
        soften(&f->sums, &at);
        round_rows(f->p, f->sums.tile, &at);
        add_by_query(f->sums.y, f->p, f->values, k, &at, s);
    }
}

static void forward_task(const struct mt_attention_fwd_args *args, int64_t batch, int64_t g,
                         const struct forward *f, const struct shape *s)
{
    int64_t group = s->nq / s->nkv, pitch = s->nq * s->dim;
    const mt_elem *qkv = (const mt_elem *)args->qkv + batch * s->sequence * s->width;
    load_columns(f->keys, qkv + (s->nq + g) * s->dim, s);
    load_pairs(f->values, qkv + (s->nq + s->nkv + g) * s->dim, s->width, s->sequence, s);
    for (int64_t h = g * group; h < (g + 1) * group; h++)
        for (int64_t from = 0; from < s->sequence; from += BQ) {
            int64_t queries = mt_min(BQ, s->sequence - from);
            load_rows(f->q, qkv + from * s->width + h * s->dim, s->width, queries, s);
            forward_block(f, from, queries, (float)args->scale, s);
            float *lse = (float *)args->lse + (batch * s->nq + h) * s->sequence + from;
            mt_elem *y = (mt_elem *)args->y + (batch * s->sequence + from) * pitch + h * s->dim;
            soften_end(y, lse, pitch, queries, s->dim, &f->sums);
        }
}

static void forward_thread(const void *args, const void *shape, int64_t batch, int64_t g,
                           mt_real *scratch)
{
    struct forward f;
    forward_scratch(&f, scratch, shape);
    begin_steps(STEP);
    forward_task(args, batch, g, &f, shape);
    end_steps();
}

mt_status MT_PAIRS_CPU(attention_fwd)(mt_stream *stream, const struct mt_attention_fwd_args *args)
{
    struct shape s = shape_of(args->sequence, args->query_heads, args->kv_heads, args->head_dim);
    struct forward sizes;
    return run_tasks(stream, forward_thread, args, &s, args->sequence ? args->batch : 0, s.nkv,
                     forward_scratch(&sizes, NULL, &s));
}

/* ---- backward ---- */

struct backward {
    mt_elem *key_columns, *value_columns, *keys; /* of the key head; `keys`: pairs */
    float *dkeys, *dvalues;
    /* Of one block of queries: rows and pairs; p and dp, rounded, and transposed; <dy, y>. */
    mt_elem *q, *dy, *q_pairs, *dy_pairs, *rounded, *transposed;
    float *dq, *p, *dp, *dot;
};

static int64_t backward_scratch(struct backward *b, float *scratch, const struct shape *s)
{
    int64_t used = 0, head = s->key_steps * STEP * s->padded, block = BQ * s->padded;
    b->key_columns = take_elements(scratch, &used, head);
    b->value_columns = take_elements(scratch, &used, head);
    b->keys = take_elements(scratch, &used, head);
    b->dkeys = take(scratch, &used, head);
    b->dvalues = take(scratch, &used, head);
    b->q = take_elements(scratch, &used, block);
    b->dy = take_elements(scratch, &used, block);
    b->q_pairs = take_elements(scratch, &used, block);
    b->dy_pairs = take_elements(scratch, &used, block);
    b->rounded = take_elements(scratch, &used, BQ * BK);
    b->transposed = take_elements(scratch, &used, BQ * BK);
    b->dq = take(scratch, &used, block);
    b->p = take(scratch, &used, BQ * BK);
    b->dp = take(scratch, &used, BQ * BK);
    b->dot = take(scratch, &used, BQ);
    return used;
}

static void backward_block(const struct backward *b, const float *lse, int64_t from,
                           int64_t queries, float scale, const struct shape *s)
{
    memset(b->dq, 0, (size_t)(BQ * s->padded) * sizeof *b->dq);
    for (int64_t k = 0; k < from + queries; k += BK) {
        struct block at = { queries, mt_min(BK, s->sequence - k), from - k };
        scores(b->p, b->q, b->key_columns + k * s->padded, scale, &at, s);
        scores(b->dp, b->dy, b->value_columns + k * s->padded, 1, &at, s);
        rows_bwd(b->p, b->dp, lse, b->dot, &at);
        round_rows(b->rounded, b->p, &at);
        transpose_rows(b->transposed, b->rounded, &at);
        add_by_key(b->dvalues + k * s->padded, b->transposed, b->dy_pairs, &at, s);
        round_rows(b->rounded, b->dp, &at);
        transpose_rows(b->transposed, b->rounded, &at);
        add_by_key(b->dkeys + k * s->padded, b->transposed, b->q_pairs, &at, s);
        add_by_query(b->dq, b->rounded, b->keys, k, &at, s);
    }
}

static void backward_task(const struct mt_attention_bwd_args *args, int64_t batch, int64_t g,
                          const struct backward *b, const struct shape *s)
{
    int64_t group = s->nq / s->nkv, first = batch * s->sequence, pitch = s->nq * s->dim;
    int64_t key = (s->nq + g) * s->dim, value = key + s->nkv * s->dim;
    const mt_elem *qkv = (const mt_elem *)args->qkv + first * s->width;
    mt_elem *dqkv = (mt_elem *)args->dqkv + first * s->width;
    float scale = (float)args->scale;
    load_columns(b->key_columns, qkv + key, s);
    load_columns(b->value_columns, qkv + value, s);
    load_pairs(b->keys, qkv + key, s->width, s->sequence, s);
    size_t sums = (size_t)(s->key_steps * STEP * s->padded) * sizeof(float);
    memset(b->dkeys, 0, sums);
    memset(b->dvalues, 0, sums);
    for (int64_t h = g * group; h < (g + 1) * group; h++)
        for (int64_t from = 0; from < s->sequence; from += BQ) {
            int64_t queries = mt_min(BQ, s->sequence - from);
            int64_t at = (first + from) * pitch + h * s->dim, q = from * s->width + h * s->dim;
            const mt_elem *dy = (const mt_elem *)args->dy + at;
            const mt_elem *y = (const mt_elem *)args->y + at;
            load_rows(b->q, qkv + q, s->width, queries, s);
            load_rows(b->dy, dy, pitch, queries, s);
            load_pairs(b->q_pairs, qkv + q, s->width, queries, s);
            load_pairs(b->dy_pairs, dy, pitch, queries, s);
            dot_rows(b->dot, dy, y, pitch, queries, s->dim);
            backward_block(b, (const float *)args->lse + (batch * s->nq + h) * s->sequence + from,
                           from, queries, scale, s);
            for (int64_t r = 0; r < queries; r++)
                store_row(dqkv + q + r * s->width, b->dq + r * s->padded, scale, s->dim);
        }
    for (int64_t r = 0; r < s->sequence; r++) {
        store_row(dqkv + key + r * s->width, b->dkeys + r * s->padded, scale, s->dim);
        store_row(dqkv + value + r * s->width, b->dvalues + r * s->padded, 1, s->dim);
    }
}

static void backward_thread(const void *args, const void *shape, int64_t batch, int64_t g,
                            mt_real *scratch)
{
    struct backward b;
    backward_scratch(&b, scratch, shape);
    begin_steps(STEP);
    backward_task(args, batch, g, &b, shape);
    end_steps();
}

mt_status MT_PAIRS_CPU(attention_bwd)(mt_stream *stream, const struct mt_attention_bwd_args *args)
{
    struct shape s = shape_of(args->sequence, args->query_heads, args->kv_heads, args->head_dim);
    struct backward sizes;
    return run_tasks(stream, backward_thread, args, &s, args->sequence ? args->batch : 0, s.nkv,
                     backward_scratch(&sizes, NULL, &s));
}
