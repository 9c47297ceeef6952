/* The weighted sum of each token's expert outputs, and its backward. Each routed row belongs to
 * exactly one (token, slot), so tokens are independent in both directions. */
#include "kernels/cpu/backend.h"
#include "kernels/cpu/lanes.h"

enum { SMALL = 1 << 14, CHUNK = 256 };

/* Columns [begin, begin + n) of a token's y. */
static void combine_chunk(const struct mt_combine_fwd_args *a, int64_t t, int64_t begin, int64_t n)
{
    mt_real sum[CHUNK];
    const int32_t *position = a->position + t * a->top_k;
    const mt_real *weights = (const mt_real *)a->weights + t * a->top_k;
    mt_elem *y = (mt_elem *)a->y + t * a->width + begin;
    for (int64_t j = 0; j < n; j++) sum[j] = 0;
    for (int64_t slot = 0; slot < a->top_k; slot++) {
        if (position[slot] < 0) continue;
        const mt_elem *x = (const mt_elem *)a->x + position[slot] * a->width + begin;
        mt_real w = weights[slot];
        for (int64_t j = 0; j < n; j++) sum[j] += w * mt_get(x + j);
    }
    for (int64_t j = 0; j < n; j++) mt_put(y + j, sum[j]);
}

/* The usual two slots, in one pass: the same sum in the same order. */
static void combine_two(mt_elem *restrict y, const mt_elem *restrict x0, mt_real w0,
                        const mt_elem *restrict x1, mt_real w1, int64_t width)
{
    for (int64_t j = 0; j < width; j++)
        mt_put(y + j, (0 + w0 * mt_get(x0 + j)) + w1 * mt_get(x1 + j));
}

static void combine_token(const struct mt_combine_fwd_args *a, int64_t t)
{
    int64_t width = a->width;
    const int32_t *position = a->position + t * a->top_k;
    const mt_elem *x = a->x;
    const mt_real *w = (const mt_real *)a->weights + t * a->top_k;
    if (a->top_k == 2 && position[0] >= 0 && position[1] >= 0) {
        combine_two((mt_elem *)a->y + t * width, x + position[0] * width, w[0],
                    x + position[1] * width, w[1], width);
        return;
    }
    for (int64_t j = 0; j < width; j += CHUNK) combine_chunk(a, t, j, mt_min(CHUNK, width - j));
}

mt_status MT_CPU(combine_fwd)(mt_stream *stream, const struct mt_combine_fwd_args *a)
{
#pragma omp parallel for num_threads(stream->device->threads)                                      \
    schedule(static) if (a->tokens * a->width > SMALL)
    for (int64_t t = 0; t < a->tokens; t++) combine_token(a, t);
    return MT_OK;
}

/* dx = w dy of one row. */
static void weigh_row(mt_elem *restrict dx, const mt_elem *restrict dy, mt_real w, int64_t width)
{
#pragma omp simd
    for (int64_t j = 0; j < width; j++) mt_put(dx + j, w * mt_get(dy + j));
}

mt_status MT_CPU(combine_bwd)(mt_stream *stream, const struct mt_combine_bwd_args *a)
{
    int64_t width = a->width;
    const mt_elem *dy = a->dy, *x = a->x;
    const mt_real *weights = a->weights;
    mt_real *dweights = a->dweights;
    mt_elem *dx = a->dx;
#pragma omp parallel for num_threads(stream->device->threads)                                      \
    schedule(static) if (a->tokens * width > SMALL)
    for (int64_t t = 0; t < a->tokens; t++)
        for (int64_t i = t * a->top_k; i < (t + 1) * a->top_k; i++) {
            int64_t row = a->position[i];
            const mt_elem *g = dy + t * width;
            if (dweights) dweights[i] = row < 0 ? 0 : dot_of(g, x + row * width, width);
            if (dx && row >= 0) weigh_row(dx + row * width, g, weights[i], width);
        }
    return MT_OK;
}

mt_status MT_CPU(weights_bwd)(mt_stream *stream, const struct mt_weights_bwd_args *a)
{
    int64_t width = a->width, slots = a->tokens * a->top_k;
    const mt_real *weights = a->weights;
    mt_real *dweights = a->dweights;
#pragma omp parallel for num_threads(stream->device->threads)                                      \
    schedule(static) if (slots * width > SMALL)
    for (int64_t i = 0; i < slots; i++) {
        int64_t row = a->position[i], up = (2 * row + 1) * width;
        dweights[i] = 0;
        if (row < 0 || (weights && weights[i] == 0)) continue;
        dweights[i] = dot_of((const mt_elem *)a->dz + up, (const mt_elem *)a->z + up, width);
        if (weights) dweights[i] /= weights[i];
    }
    return MT_OK;
}
