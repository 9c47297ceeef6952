/* Blocks of rows for experts of other ranks: where rows go, packing, and what has arrived. */
#include "kernels/cpu/backend.h"
#include "kernels/coding.h"
#include "kernels/cpu/variant.h"

enum {
    SMALL = 1 << 14, /* elements below which a parallel region costs more than it saves */
    MOST_BLOCK = 128 /* elements that share a scale, at most */
};

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

/* Codes and scales of a row. */
static void encode_row(uint8_t *y, const mt_elem *x, int64_t width, const struct mt_coding *c)
{
    const mt_codec codec = c->codec;
    float v[MOST_BLOCK];
    int32_t codes[MOST_BLOCK];
    memset(y, 0, (size_t)c->line);
    for (int64_t at = 0; at < width; at += c->block) {
        int n = (int)mt_min(width - at, c->block);
        int32_t most = 0;
        uint32_t stored;
        for (int i = 0; i < n; i++) {
            v[i] = (float)mt_get(x + at + i);
            int32_t magnitude = mt_magnitude_bits(v[i]);
            most = most > magnitude ? most : magnitude;
        }
        float scale = mt_coding_scale(c, mt_from_bits(most), &stored);
        memcpy(y + c->scales + at / c->block * (c->bytes ? 1 : 4), &stored, c->bytes ? 1 : 4);
#pragma omp simd
        for (int i = 0; i < n; i++) codes[i] = mt_encode(codec, v[i] * scale);
        for (int i = 0; i < n; i++)
            if (c->codes_per_byte == 1)
                y[at + i] = (uint8_t)codes[i];
            else
                y[(at + i) / 2] |= (uint8_t)(codes[i] << i % 2 * 4);
    }
}

static void decode_row(mt_elem *y, const uint8_t *x, int64_t width, const struct mt_coding *c)
{
    for (int64_t at = 0; at < width; at += c->block) {
        int n = (int)mt_min(width - at, c->block), per = c->codes_per_byte;
        uint32_t stored = 0;
        float largest;
        memcpy(&stored, x + c->scales + at / c->block * (c->bytes ? 1 : 4), c->bytes ? 1 : 4);
        float scale = mt_coding_value(c, stored, &largest);
        for (int i = 0; i < n; i++) {
            int32_t code = per == 1 ? x[at + i] : x[(at + i) / 2] >> i % 2 * 4 & 15;
            mt_put(y + at + i, (mt_real)mt_coding_decode(c, code, scale, largest));
        }
    }
}

/* Lines of a block in use, of so many bytes, by a head. */
MT_INLINE int64_t lines_used(const int64_t *head, size_t line)
{
    return (head[0] + 8) / (int64_t)line;
}

static void pack_coded(mt_stream *stream, const struct mt_exchange_pack_args *a)
{
    const struct mt_blocks *b = &a->blocks;
    const struct mt_coding c = mt_coding_of(a->dtype, a->width, &a->coded);
    int64_t words = b->experts + 1, lines = b->ranks * b->lines;
    size_t plain = (size_t)a->width * sizeof(mt_elem);
    for (int64_t r = 0; r < b->ranks; r++) {
        int64_t *head = (int64_t *)((char *)a->y + r * b->lines * c.line);
        memcpy(head, a->heads + r * words, (size_t)words * sizeof *head);
        head[0] = lines_used(a->heads + r * words, plain) * c.line - 8;
    }
#pragma omp parallel for num_threads(stream->device->threads)                                      \
    schedule(static) if (lines * a->width > SMALL)
    for (int64_t l = 0; l < lines; l++) {
        int64_t r = l / b->lines, j = l % b->lines, from = l;
        if (a->index)
            from = a->index[l];
        else if (j < b->head_lines || j >= lines_used(a->heads + r * words, plain))
            from = -1;
        if (from >= 0)
            encode_row((uint8_t *)a->y + l * c.line, (const mt_elem *)a->x + from * a->width,
                       a->width, &c);
    }
}

mt_status MT_CPU(exchange_unpack)(mt_stream *stream, const struct mt_exchange_unpack_args *a)
{
    const struct mt_blocks *b = &a->blocks;
    const struct mt_coding c = mt_coding_of(a->dtype, a->width, &a->coded);
    int64_t words = b->experts + 1, lines = b->ranks * b->lines;
    size_t plain = (size_t)a->width * sizeof(mt_elem);
    const uint8_t *x = a->x;
    for (int64_t r = 0; r < b->ranks; r++) {
        int64_t *head = (int64_t *)((char *)a->y + (size_t)(r * b->lines) * plain);
        memcpy(head, x + r * b->lines * c.line, (size_t)words * sizeof *head);
        head[0] = lines_used(head, (size_t)c.line) * (int64_t)plain - 8;
    }
#pragma omp parallel for num_threads(stream->device->threads)                                      \
    schedule(static) if (lines * a->width > SMALL)
    for (int64_t l = 0; l < lines; l++) {
        const int64_t *head = (const int64_t *)(x + l / b->lines * b->lines * c.line);
        int64_t j = l % b->lines;
        if (j >= b->head_lines && j < lines_used(head, (size_t)c.line))
            decode_row((mt_elem *)a->y + l * a->width, x + l * c.line, a->width, &c);
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
    if (a->coded.format) {
        pack_coded(stream, a);
        return MT_OK;
    }
    for (int64_t r = 0; r < b->ranks; r++) {
        const int64_t *head = a->heads + r * words;
        char *to = y + (size_t)(r * b->lines) * bytes;
        memcpy(to, head, (size_t)words * sizeof *head);
        if (!a->reals) continue;
        int64_t rows = lines_used(head, bytes) - b->head_lines;
        memcpy(to + (size_t)words * sizeof *head,
               (const mt_real *)a->reals + r * b->lines + b->head_lines,
               (size_t)rows * sizeof(mt_real));
    }
#pragma omp parallel for num_threads(stream->device->threads)                                      \
    schedule(static) if (lines * width > SMALL)
    for (int64_t l = 0; l < lines; l++)
        if (a->index[l] >= 0) memcpy(y + (size_t)l * bytes, x + (size_t)a->index[l] * bytes, bytes);
    return MT_OK;
}

mt_status MT_CPU(exchange_weights_bwd)(mt_stream *stream,
                                       const struct mt_exchange_weights_bwd_args *a)
{
    const struct mt_blocks *b = &a->blocks;
    const mt_real *weights = a->weights;
    mt_real *dweights = a->dweights;
    size_t block = (size_t)(b->lines * a->width) * sizeof(mt_elem);
    (void)stream;
    for (int64_t i = 0; i < a->tokens * a->top_k; i++) {
        int64_t line = a->token_line[i], r = line / b->lines;
        const mt_real *reals =
            (const mt_real *)((const char *)a->x + (size_t)r * block + 8 * (b->experts + 1));
        dweights[i] = 0;
        if (line >= 0 && weights[i] != 0)
            dweights[i] = reals[line - r * b->lines - b->head_lines] / weights[i];
    }
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
