/* Blocks of rows for experts of other ranks: where rows go, packing, and what has arrived. */
#include "kernels/cpu/backend.h"
#include "kernels/cpu/variant.h"

enum { SMALL = 1 << 14 }; /* elements below which a parallel region costs more than it saves */

MT_INLINE int64_t room_of(const struct mt_blocks *b)
{
    return b->lines - b->head_lines;
}

/* Block r's head, and the tokens of its lines. */
static void plan_block(const struct mt_exchange_plan_args *a, int64_t r)
{
    const struct mt_blocks *b = &a->blocks;
    const int64_t *offsets = a->offsets + r * b->experts;
    int64_t *head = a->heads + r * (b->experts + 1), first = offsets[0];
    int64_t all = offsets[b->experts] - first, rows = mt_min(all, room_of(b));
    int32_t *line_token = a->line_token + r * b->lines;
    if (all > *a->most) *a->most = all;
    head[0] = (b->head_lines + rows) * a->width * (int64_t)sizeof(mt_elem) - 8;
    for (int64_t e = 0; e < b->experts; e++)
        head[1 + e] = mt_min(offsets[e + 1] - first, rows) - mt_min(offsets[e] - first, rows);
    for (int64_t j = 0; j < b->lines; j++) {
        int64_t row = j - b->head_lines;
        line_token[j] = row >= 0 && row < rows ? a->row_token[first + row] : -1;
    }
}

mt_status MT_CPU(exchange_plan)(mt_stream *stream, const struct mt_exchange_plan_args *a)
{
    (void)stream;
    const struct mt_blocks *b = &a->blocks;
    for (int64_t r = 0; r < b->ranks; r++) plan_block(a, r);
    for (int64_t i = 0; i < a->tokens * a->top_k; i++) {
        int64_t r = a->chosen[i] / b->experts;
        int64_t row = a->position[i] - a->offsets[r * b->experts];
        bool kept = a->position[i] >= 0 && row < room_of(b);
        a->token_line[i] = kept ? (int32_t)(r * b->lines + b->head_lines + row) : -1;
    }
    return MT_OK;
}

mt_status MT_CPU(exchange_pack)(mt_stream *stream, const struct mt_exchange_pack_args *a)
{
    const struct mt_blocks *b = &a->blocks;
    int64_t lines = a->index ? b->ranks * b->lines : 0, width = a->width, words = b->experts + 1;
    size_t bytes = (size_t)width * sizeof(mt_elem);
    char *y = a->y;
    const char *x = a->x;
    for (int64_t r = 0; r < b->ranks; r++)
        memcpy(y + (size_t)(r * b->lines) * bytes, a->heads + r * words,
               (size_t)words * sizeof *a->heads);
#pragma omp parallel for num_threads(stream->device->threads)                                      \
    schedule(static) if (lines * width > SMALL)
    for (int64_t l = 0; l < lines; l++)
        if (a->index[l] >= 0) memcpy(y + (size_t)l * bytes, x + (size_t)a->index[l] * bytes, bytes);
    return MT_OK;
}

/* counts, offsets, and offsets in elements, from the heads. */
static void sum_heads(const struct mt_exchange_arrivals_args *a)
{
    const struct mt_blocks *b = &a->blocks;
    int64_t s = b->experts;
    a->offsets[0] = 0;
    for (int64_t e = 0; e < s; e++) {
        a->counts[e] = 0;
        for (int64_t r = 0; r < b->ranks; r++) a->counts[e] += a->heads[r * (s + 1) + 1 + e];
        a->offsets[e + 1] = a->offsets[e] + a->counts[e];
    }
    for (int i = 0; a->element_offsets && i < MT_ROUTE_WIDTHS; i++)
        for (int64_t e = 0; e <= s; e++)
            a->element_offsets[i * (s + 1) + e] = a->offsets[e] * a->widths[i];
}

mt_status MT_CPU(exchange_arrivals)(mt_stream *stream, const struct mt_exchange_arrivals_args *a)
{
    const struct mt_blocks *b = &a->blocks;
    int64_t s = b->experts;
    const char *y = a->y;
    void *scratch;
    for (int64_t r = 0; r < b->ranks; r++)
        memcpy(a->heads + r * (s + 1), y + (size_t)(r * b->lines * a->width) * sizeof(mt_elem),
               (size_t)(s + 1) * sizeof *a->heads);
    sum_heads(a);
    MT_TRY(mt_cpu_scratch(stream, &scratch, (size_t)s * sizeof(int64_t)));
    int64_t *next = scratch;
    memcpy(next, a->offsets, (size_t)s * sizeof *next);
    for (int64_t l = 0; l < b->ranks * b->lines; l++) a->line_row[l] = -1;
    for (int64_t r = 0; r < b->ranks; r++) {
        int64_t line = r * b->lines + b->head_lines;
        for (int64_t e = 0; e < s; e++)
            for (int64_t j = 0; j < a->heads[r * (s + 1) + 1 + e]; j++, line++) {
                a->line_row[line] = (int32_t)next[e];
                a->row_line[next[e]++] = (int32_t)line;
            }
    }
    return MT_OK;
}
