/* What blocked causal attention does between its products, shared by those that differ in them: the
 * limits of the triangle, softmax row by row, its gradient. */
#pragma once

#include "kernels/cpu/vecmath.h"

#include "kernels/cpu/backend.h"

/* VECTOR: bytes of one. ROWS: queries that see equally many key columns, which come in multiples of
 * PANEL. BQ x BK: queries and keys of a block. */
#if defined(MT_AMX)
enum { VECTOR = 64, ROWS = 32, BQ = 64, BK = 128 };
#elif MT_ISA_LEVEL == 512 /* ROWS x 2 sums, 2 vectors of B and 1 of A fill the registers */
enum { VECTOR = 64, ROWS = 12, BQ = 48, BK = 192 };
#elif MT_ISA_LEVEL == 2
enum { VECTOR = 32, ROWS = 6, BQ = 48, BK = 192 };
#else
enum { VECTOR = 16, ROWS = 6, BQ = 48, BK = 192 };
#endif
enum { LANES = VECTOR / sizeof(mt_real), PANEL = 2 * LANES };
_Static_assert(BQ % ROWS == 0 && BK % BQ == 0 && BK % PANEL == 0, "blocks are whole tiles");

typedef mt_real vec __attribute__((vector_size(VECTOR), may_alias));

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

/* Of one block of queries: scores [BQ, BK], then their exponentials; the largest score of each row
 * and the sum of its exponentials so far; and y [BQ, ld], of which `padded` columns are used. */
struct softmax {
    mt_real *tile, *most, *sum, *y;
    int64_t ld, padded;
};

/* Scores become exp(score - new maximum), those masked 0, and what was summed so far shrinks to
 * that maximum. A pass at a time over all rows, since the steps of a row wait for each other. */
static inline void soften(const struct softmax *f, const struct block *at)
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
        mt_real *y = f->y + r * f->ld;
#pragma omp simd
        for (int64_t c = 0; c < f->padded; c++) y[c] *= shrink[r];
    }
}

/* p becomes the probabilities, dp the gradient of the scores, dp = p (dp - dot); masked ones 0. */
MT_INLINE void row_bwd(mt_real *p, mt_real *dp, mt_real lse, mt_real dot, int64_t seen,
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
