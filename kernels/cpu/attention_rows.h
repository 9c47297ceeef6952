/* What blocked causal attention does between its products, shared by those that differ in them: the
 * limits of the triangle, softmax row by row, its gradient. */
#pragma once

#include "kernels/cpu/backend.h"
#include "kernels/cpu/lanes.h"

/* ROWS: queries that see equally many key columns, which come in multiples of PANEL. BQ x BK:
 * queries and keys of a block. */
#if defined(MT_AMX)
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

/* most[0 .. PAIR) = the largest scores of rows. NaN may be passed over: its exponential is not. */
MT_INLINE void pair_max(mt_real *most, const mt_real *p, int64_t seen, int64_t columns)
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
    for (int i = 0; i < PAIR; i++) most[i] = lanes_max(larger(top[2 * i], top[2 * i + 1]));
}

/* p = exp(p - base), masked ones 0, and the sums of rows. */
MT_INLINE void pair_exp(mt_real *sum, mt_real *p, const mt_real *base, int64_t seen,
                        int64_t columns)
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
    for (int i = 0; i < PAIR; i++) sum[i] = lanes_sum(total[2 * i] + total[2 * i + 1]);
}

/* Scores become exp(score - new maximum), those masked 0, and what was summed so far shrinks to
 * that maximum. A pass at a time over all rows, since the steps of a row wait for each other. */
static inline void soften(const struct softmax *f, const struct block *at)
{
    mt_real base[BQ], sum[BQ], shrink[BQ];
    for (int64_t r = 0; r < at->queries; r += PAIR)
        pair_max(base + r, f->tile + r * BK, row_keys(at, r), row_columns(at, r));
    for (int64_t r = 0; r < at->queries; r++) {
        mt_real most = base[r] > f->most[r] ? base[r] : f->most[r];
        /* All -Inf so far: any finite base gives sums of 0. */
        base[r] = most == -(mt_real)INFINITY ? 0 : most;
        shrink[r] = f->most[r] - base[r];
        f->most[r] = most;
    }
    for (int64_t r = 0; r < at->queries; r += PAIR)
        pair_exp(sum + r, f->tile + r * BK, base + r, row_keys(at, r), row_columns(at, r));
#pragma omp simd
    for (int64_t r = 0; r < at->queries; r++) {
        shrink[r] = mt_exp(shrink[r]);
        f->sum[r] = f->sum[r] * shrink[r] + sum[r];
    }
    for (int64_t r = 0; r < at->queries; r++) {
        mt_real *y = f->y + r * f->ld;
#pragma omp simd
        for (int64_t c = 0; c < f->padded; c++) y[c] *= shrink[r];
    }
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

MT_INLINE mt_real dot_rows(const mt_elem *a, const mt_elem *b, int64_t dim)
{
    mt_real sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < dim; c++) sum += mt_get(a + c) * mt_get(b + c);
    return sum;
}

MT_INLINE void store_row(mt_elem *to, const mt_real *row, mt_real scale, int64_t dim)
{
#pragma omp simd
    for (int64_t c = 0; c < dim; c++) mt_put(to + c, scale * row[c]);
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
