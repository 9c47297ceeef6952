/* What blocked causal attention does between its products, shared by those that differ in them: the
 * limits of the triangle, softmax row by row, its gradient. */
#pragma once

#include "kernels/cpu/backend.h"
#include "kernels/cpu/lanes.h"

/* ROWS: queries that see equally many key columns, which come in multiples of PANEL. BQ x BK:
 * queries and keys of a block. */
#if defined(MT_PAIRS)
enum { ROWS = 32, BQ = 64, BK = 128 };
#elif MT_ISA_LEVEL == 512 /* ROWS x 2 sums, 2 vectors of B and 1 of A fill the registers */
enum { ROWS = 12, BQ = 48, BK = 192 };
#else
enum { ROWS = 6, BQ = 48, BK = 192 };
#endif
enum { PANEL = 2 * LANES, PAIR = 2, STRIP = 2 * PAIR };
_Static_assert(BQ % ROWS == 0 && BK % BQ == 0 && BK % PANEL == 0, "blocks are whole tiles");
_Static_assert(ROWS % PAIR == 0, "tiles are whole pairs of rows");

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

/* Softmax takes a strip at a time: PANEL columns of PAIR rows, which is STRIP vectors, two of each
 * row. It takes rows up to a whole tile; those past the last query are of no use. */
MT_INLINE void load_strip(vec *x, const mt_real *p)
{
    MT_UNROLL
    for (int j = 0; j < STRIP; j++) x[j] = *(const vec *)(p + j / 2 * BK + j % 2 * LANES);
}

MT_INLINE void store_strip(mt_real *p, const vec *x)
{
    MT_UNROLL
    for (int j = 0; j < STRIP; j++) *(vec *)(p + j / 2 * BK + j % 2 * LANES) = x[j];
}

/* Of a strip from column c on, masked elements become those of `other`: `seen` of the first row. */
MT_INLINE void mask_strip(vec *x, int64_t c, int64_t seen, const vec *other)
{
    MT_UNROLL
    for (int j = 0; j < STRIP; j++)
        x[j] = choose(lanes_below(seen + j / 2 - c - j % 2 * LANES), x[j], other[j]);
}

/* Of one block of queries: scores [BQ, BK], then their exponentials; the largest score of each row
 * and the sum of its exponentials so far; and y [BQ, ld], of which `padded` columns are used. */
struct softmax {
    mt_real *tile, *most, *sum, *y;
    int64_t ld, padded;
};

/* A value of each row, in every lane of a strip. */
MT_INLINE void spread_strip(vec *x, const mt_real *value)
{
    MT_UNROLL
    for (int j = 0; j < STRIP; j++) x[j] = broadcast(value[j / 2]);
}

/* most[0 .. PAIR) = the largest scores of rows, lane by lane. NaN may be passed over: its
 * exponential is not. */
MT_INLINE void pair_max(vec *most, const mt_real *p, int64_t seen, int64_t columns)
{
    vec first[STRIP], top[STRIP], x[STRIP];
    spread_strip(first, (const mt_real[PAIR]){ p[0], p[BK] });
    memcpy(top, first, sizeof top);
    for (int64_t c = 0; c < columns; c += PANEL) {
        load_strip(x, p + c);
        if (c + PANEL > seen) mask_strip(x, c, seen, first);
        MT_UNROLL
        for (int j = 0; j < STRIP; j++) top[j] = larger(top[j], x[j]);
    }
    for (int i = 0; i < PAIR; i++) most[i] = larger(top[2 * i], top[2 * i + 1]);
}

/* p = exp(p - base), masked ones 0, and the sums of rows, lane by lane. */
MT_INLINE void pair_exp(vec *sum, mt_real *p, const mt_real *base, int64_t seen, int64_t columns)
{
    const vec zero[STRIP] = { { 0 } };
    vec total[STRIP] = { { 0 } }, x[STRIP], off[STRIP];
    spread_strip(off, base);
    for (int64_t c = 0; c < columns; c += PANEL) {
        load_strip(x, p + c);
        /* As 0, since -Inf would be slow in exp. */
        if (c + PANEL > seen) mask_strip(x, c, seen, off);
        MT_UNROLL
        for (int j = 0; j < STRIP; j++) x[j] -= off[j];
        exp_vectors(x, STRIP);
        if (c + PANEL > seen) mask_strip(x, c, seen, zero);
        MT_UNROLL
        for (int j = 0; j < STRIP; j++) total[j] += x[j];
        store_strip(p + c, x);
    }
    for (int i = 0; i < PAIR; i++) sum[i] = total[2 * i] + total[2 * i + 1];
}

/* Scores become exp(score - new maximum), those masked 0, and what was summed so far shrinks to
 * that maximum. A pass at a time over all rows, since the steps of a row wait for each other. */
static inline void soften(const struct softmax *f, const struct block *at)
{
    vec lanes[BQ];
    mt_real base[BQ], shrink[BQ];
    memset(lanes, 0, sizeof lanes);
    for (int64_t r = 0; r < at->queries; r += PAIR)
        pair_max(lanes + r, f->tile + r * BK, row_keys(at, r), row_columns(at, r));
    for (int64_t r = 0; r < at->queries; r += LANES) {
        vec top = maxima_of_lanes(lanes + r), old = *(const vec *)(f->most + r);
        vec most = choose(top > old, top, old);
        /* All -Inf so far: any finite base gives sums of 0. */
        top = choose(most == -(mt_real)INFINITY, (vec){ 0 }, most);
        *(vec *)(f->most + r) = most;
        *(vec_at *)(base + r) = top;
        /* Of nothing so far anything will do, but a result below the normal range is slow. */
        *(vec_at *)(shrink + r) =
            exp_lanes(choose(old == -(mt_real)INFINITY, (vec){ 0 }, old - top));
    }
    for (int64_t r = 0; r < at->queries; r += PAIR)
        pair_exp(lanes + r, f->tile + r * BK, base + r, row_keys(at, r), row_columns(at, r));
    for (int64_t r = 0; r < at->queries; r += LANES) {
        vec *sum = (vec *)(f->sum + r);
        *sum = *sum * *(const vec_at *)(shrink + r) + sums_of_lanes(lanes + r);
    }
    for (int64_t r = 0; r < at->queries; r++)
        for (int64_t c = 0; c < f->padded; c += LANES)
            *(vec *)(f->y + r * f->ld + c) *= broadcast(shrink[r]);
}

/* Nothing summed yet. */
static inline void soften_begin(const struct softmax *f)
{
    for (int64_t r = 0; r < BQ; r++) f->most[r] = -(mt_real)INFINITY, f->sum[r] = 0;
    memset(f->y, 0, (size_t)(BQ * f->ld) * sizeof *f->y);
}

/* Scores p become probabilities, dp the gradient of the scores, p (dp - dot); masked ones 0. */
static inline void rows_bwd(mt_real *p, mt_real *dp, const mt_real *lse, const mt_real *dot,
                            const struct block *at)
{
    const vec zero[STRIP] = { { 0 } };
    for (int64_t r = 0; r < at->queries; r += PAIR) {
        int64_t seen = row_keys(at, r), columns = row_columns(at, r),
                next = mt_min(r + 1, at->queries - 1);
        vec x[STRIP], d[STRIP], off[STRIP], mean[STRIP];
        spread_strip(off, (const mt_real[PAIR]){ lse[r], lse[next] });
        spread_strip(mean, (const mt_real[PAIR]){ dot[r], dot[next] });
        for (int64_t c = 0; c < columns; c += PANEL) {
            load_strip(x, p + r * BK + c);
            MT_UNROLL
            for (int j = 0; j < STRIP; j++) x[j] -= off[j];
            exp_vectors(x, STRIP);
            load_strip(d, dp + r * BK + c);
            MT_UNROLL
            for (int j = 0; j < STRIP; j++) d[j] = x[j] * (d[j] - mean[j]);
            if (c + PANEL > seen) {
                mask_strip(x, c, seen, zero);
                mask_strip(d, c, seen, zero);
            }
            store_strip(p + r * BK + c, x);
            store_strip(dp + r * BK + c, d);
        }
    }
}

/* Heads lie in rows far apart, which no prefetcher follows: they are asked for, AHEAD rows ahead.
 */
enum { AHEAD = 8 };

MT_INLINE void ask_for_row(const mt_elem *x, int64_t dim)
{
    for (int64_t c = 0; c < dim; c += 64 / (int64_t)sizeof *x) __builtin_prefetch(x + c);
}

/* dot[r] = <a, b> of `rows` rows, at most BQ; written up to a whole vector. */
static inline void dot_rows(mt_real *dot, const mt_elem *a, const mt_elem *b, int64_t pitch,
                            int64_t rows, int64_t dim)
{
    for (int64_t from = 0; from < rows; from += LANES) {
        vec sum[LANES] = { { 0 } };
        for (int64_t r = from; r < mt_min(rows, from + LANES); r++) {
            const mt_elem *x = a + r * pitch, *y = b + r * pitch;
            vec total = { 0 };
            int64_t c = 0;
            ask_for_row(y + AHEAD * pitch, dim);
            for (; c + LANES <= dim; c += LANES)
                total += load_elements(x + c) * load_elements(y + c);
            for (; c < dim; c++) total[0] += mt_get(x + c) * mt_get(y + c);
            sum[r - from] = total;
        }
        *(vec *)(dot + from) = sums_of_lanes(sum);
    }
}

MT_INLINE void store_row(mt_elem *to, const mt_real *row, mt_real scale, int64_t dim)
{
    int64_t c = 0;
    for (; c + LANES <= dim; c += LANES)
        store_lanes(to + c, broadcast(scale) * *(const vec_at *)(row + c));
    for (; c < dim; c++) mt_put(to + c, scale * row[c]);
}

/* y = the rows' sums over their weights, and lse, of `queries` rows whose keys are all summed. */
static inline void soften_end(mt_elem *y, mt_real *lse, int64_t pitch, int64_t queries, int64_t dim,
                              const struct softmax *f)
{
    const mt_real *most = f->most, *sum = f->sum;
#pragma omp simd
    for (int64_t r = 0; r < queries; r++) lse[r] = most[r] + (mt_real)mt_log((double)sum[r]);
    for (int64_t r = 0; r < queries; r++)
        store_row(y + r * pitch, f->y + r * f->ld, 1 / sum[r], dim);
}

/* The next `count` of a thread's scratch; NULL while scratch is NULL and sizes are only added up.
 */
MT_INLINE mt_real *take(mt_real *scratch, int64_t *used, int64_t count)
{
    mt_real *p = scratch ? scratch + *used : NULL;
    *used += mt_ceil_div(count, 64) * 64;
    return p;
}

/* One (batch, key head) with the scratch of a thread. */
typedef void attention_task(const void *args, const void *shape, int64_t batch, int64_t g,
                            mt_real *scratch);

/* Every task of a call, the threads taking them in turn; `each` reals of scratch for a thread. */
static inline mt_status run_tasks(mt_stream *stream, attention_task *task, const void *args,
                                  const void *shape, int64_t batch, int64_t nkv, int64_t each)
{
    int64_t tasks = batch * nkv, threads = mt_min(stream->device->threads, tasks);
    void *scratch;
    if (tasks == 0) return MT_OK;
    MT_TRY(mt_cpu_scratch(stream, &scratch, (size_t)(threads * each) * sizeof(mt_real)));
#pragma omp parallel for num_threads((int)threads) schedule(dynamic)
    for (int64_t i = 0; i < tasks; i++)
        task(args, shape, i / nkv, i % nkv, (mt_real *)scratch + omp_get_thread_num() * each);
    return MT_OK;
}
