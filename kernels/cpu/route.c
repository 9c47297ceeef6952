/* The route plan, and moving rows by it: gather and its backward. */
#include "kernels/cpu/backend.h"
#include "kernels/cpu/variant.h"

/* Rows or tokens below which a parallel region costs more than it saves, in elements. */
enum { SMALL = 1 << 14, CHUNK = 256 };

/* offsets (CSR in rows), counts cut to the capacity, the number dropped, and offsets in elements.
 */
static void cut_and_sum(const struct mt_route_plan_args *a)
{
    int64_t dropped = 0;
    a->offsets[0] = 0;
    for (int64_t e = 0; e < a->experts; e++) {
        int64_t kept = a->capacity ? mt_min(a->counts[e], a->capacity) : a->counts[e];
        dropped += a->counts[e] - kept;
        a->counts[e] = kept;
        a->offsets[e + 1] = a->offsets[e] + kept;
    }
    if (a->dropped) *a->dropped += dropped;
    for (int i = 0; a->element_offsets && i < MT_ROUTE_WIDTHS; i++)
        for (int64_t e = 0; e <= a->experts; e++)
            a->element_offsets[i * (a->experts + 1) + e] = a->offsets[e] * a->widths[i];
}

/* One counting sort. Consecutive choices are counted in different histograms, so that a popular
 * expert's counter is not a chain of dependent additions. */
mt_status MT_CPU(route_plan)(mt_stream *stream, const struct mt_route_plan_args *a)
{
    enum { HISTOGRAMS = 4 };
    int64_t experts = a->experts, rows = a->tokens * a->top_k, i = 0;
    void *scratch;
    MT_TRY(mt_cpu_scratch(stream, &scratch, (size_t)(HISTOGRAMS * experts) * sizeof(int32_t)));
    int32_t *h = scratch, *next = scratch;
    memset(h, 0, (size_t)(HISTOGRAMS * experts) * sizeof *h);
    for (; i + HISTOGRAMS <= rows; i += HISTOGRAMS)
        for (int j = 0; j < HISTOGRAMS; j++) h[j * experts + a->chosen[i + j]]++;
    for (; i < rows; i++) h[a->chosen[i]]++;
    for (int64_t e = 0; e < experts; e++)
        a->counts[e] = (int64_t)h[e] + h[experts + e] + h[2 * experts + e] + h[3 * experts + e];
    cut_and_sum(a);

    int32_t *end = next + experts;
    for (int64_t e = 0; e < experts; e++) {
        next[e] = (int32_t)a->offsets[e];
        end[e] = (int32_t)a->offsets[e + 1];
    }
    i = 0;
    for (int64_t t = 0; t < a->tokens; t++)
        for (int64_t slot = 0; slot < a->top_k; slot++, i++) {
            int32_t e = a->chosen[i], row = next[e];
            bool kept = row < end[e];
            a->position[i] = kept ? row : -1;
            if (!kept) continue;
            next[e] = row + 1;
            a->row_token[row] = (int32_t)t;
        }
    return MT_OK;
}

mt_status MT_CPU(gather_fwd)(mt_stream *stream, const struct mt_gather_fwd_args *a)
{
    int64_t rows = mt_min(a->rows, *a->rows_used), width = a->width;
    const mt_elem *x = a->x;
    mt_elem *y = a->y;
#pragma omp parallel for num_threads(stream->device->threads)                                      \
    schedule(static) if (rows * width > SMALL)
    for (int64_t r = 0; r < rows; r++)
        memcpy(y + r * width, x + a->row_token[r] * width, (size_t)width * sizeof *y);
    return MT_OK;
}

/* Columns [begin, begin + n) of a token's dx. */
static void gather_bwd_chunk(const struct mt_gather_bwd_args *a, int64_t t, int64_t begin,
                             int64_t n)
{
    mt_real sum[CHUNK];
    const int32_t *position = a->position + t * a->top_k;
    int64_t at = t * a->width + begin;
    const mt_elem *add = a->dx_add;
    mt_elem *dx = (mt_elem *)a->dx + at;
    for (int64_t j = 0; j < n; j++) sum[j] = add ? mt_get(add + at + j) : 0;
    for (int64_t slot = 0; slot < a->top_k; slot++) {
        if (position[slot] < 0) continue;
        const mt_elem *dy = (const mt_elem *)a->dy + position[slot] * a->width + begin;
        for (int64_t j = 0; j < n; j++) sum[j] += mt_get(dy + j);
    }
    for (int64_t j = 0; j < n; j++) mt_put(dx + j, sum[j]);
}

/* The usual two slots, in one pass: the same sum in the same order. dx may alias add. */
static void gather_bwd_two(mt_elem *dx, const mt_elem *add, const mt_elem *dy0, const mt_elem *dy1,
                           int64_t width)
{
#pragma omp simd
    for (int64_t j = 0; j < width; j++)
        mt_put(dx + j, ((add ? mt_get(add + j) : 0) + mt_get(dy0 + j)) + mt_get(dy1 + j));
}

static void gather_bwd_token(const struct mt_gather_bwd_args *a, int64_t t)
{
    int64_t width = a->width;
    const int32_t *position = a->position + t * a->top_k;
    const mt_elem *dy = a->dy, *add = a->dx_add ? (const mt_elem *)a->dx_add + t * width : NULL;
    if (a->top_k == 2 && position[0] >= 0 && position[1] >= 0) {
        gather_bwd_two((mt_elem *)a->dx + t * width, add, dy + position[0] * width,
                       dy + position[1] * width, width);
        return;
    }
    for (int64_t j = 0; j < width; j += CHUNK) gather_bwd_chunk(a, t, j, mt_min(CHUNK, width - j));
}

mt_status MT_CPU(gather_bwd)(mt_stream *stream, const struct mt_gather_bwd_args *a)
{
#pragma omp parallel for num_threads(stream->device->threads)                                      \
    schedule(static) if (a->tokens * a->width > SMALL)
    for (int64_t t = 0; t < a->tokens; t++) gather_bwd_token(a, t);
    return MT_OK;
}
