/* Blocks of rows for experts of other ranks: plan, pack and arrivals against naive loops, and a
 * trip of rows to every rank and back. Integers and copies: exact, for every number of threads. */
#include "tests/kernels/threads.h"

#include "core/rng.h"

enum { MOST_RANKS = 5 };

/* Routing of one rank, by mt_route_plan, and where its rows go. */
struct sender {
    struct mt_blocks blocks;
    int64_t tokens, top_k, width, most;
    int32_t *chosen, *row_token, *position, *token_line, *line_token;
    int64_t *counts, *offsets, *heads, *most_seen;
};

static struct mt_blocks blocks_of(int64_t ranks, int64_t experts, int64_t width, mt_dtype dtype,
                                  int64_t room)
{
    int64_t line = width * (int64_t)mt_dtype_size(dtype);
    int64_t head = (mt_exchange_head(dtype, experts, room + 7) + line - 1) / line;
    return (struct mt_blocks){ ranks, experts, (head + room + 7) / 8 * 8, head };
}

/* skew 0: random choices; 1: all the last experts; 2: none of the last rank's. */
static struct sender sender_make(struct mt_blocks b, int64_t tokens, int64_t top_k, int64_t width,
                                 int64_t capacity, mt_dtype dtype, int skew, uint64_t seed)
{
    int64_t all = b.ranks * b.experts, rows = tokens * top_k, lines = b.ranks * b.lines;
    int64_t open = skew == 2 ? all - b.experts : all;
    struct sender s = { .blocks = b, .tokens = tokens, .top_k = top_k, .width = width };
    s.chosen = test_alloc(rows, MT_I32), s.row_token = test_alloc(rows, MT_I32);
    s.position = test_alloc(rows, MT_I32), s.token_line = test_alloc(rows, MT_I32);
    s.line_token = test_alloc(lines, MT_I32);
    s.counts = test_alloc(all, MT_I64), s.offsets = test_alloc(all + 1, MT_I64);
    s.heads = test_alloc(b.ranks * (b.experts + 1), MT_I64), s.most_seen = test_alloc(1, MT_I64);
    for (int64_t t = 0; t < tokens; t++) {
        int64_t first =
            skew == 1 ? all - top_k : (int64_t)mt_rng_below(seed, 1, (uint64_t)t, (uint64_t)open);
        for (int64_t i = 0; i < top_k; i++)
            s.chosen[t * top_k + i] = (int32_t)((first + i) % (skew == 1 ? all : open));
    }
    mt_stream stream = on_threads(1);
    assert_ok(mt_route_plan(&stream, &(struct mt_route_plan_args){ .dtype = dtype,
                                                                   .tokens = tokens,
                                                                   .experts = all,
                                                                   .top_k = top_k,
                                                                   .capacity = capacity,
                                                                   .chosen = s.chosen,
                                                                   .counts = s.counts,
                                                                   .offsets = s.offsets,
                                                                   .row_token = s.row_token,
                                                                   .position = s.position }));
    *s.most_seen = 3;
    assert_ok(mt_exchange_plan(&stream, &(struct mt_exchange_plan_args){ .dtype = dtype,
                                                                         .blocks = b,
                                                                         .tokens = tokens,
                                                                         .top_k = top_k,
                                                                         .width = width,
                                                                         .chosen = s.chosen,
                                                                         .position = s.position,
                                                                         .row_token = s.row_token,
                                                                         .offsets = s.offsets,
                                                                         .heads = s.heads,
                                                                         .token_line = s.token_line,
                                                                         .line_token = s.line_token,
                                                                         .most = s.most_seen }));
    assert_ok(mt_device_synchronize(stream.device));
    s.most = *s.most_seen;
    return s;
}

static void sender_free(struct sender *s)
{
    void *all[] = { s->chosen, s->row_token, s->position, s->token_line, s->line_token,
                    s->counts, s->offsets,   s->heads,    s->most_seen };
    for (int i = 0; i < 9; i++) test_free(all[i]);
}

/* Every kept choice has a line of its own in its expert's block, in the order of the plan. */
static void check_plan(const struct sender *s, mt_dtype dtype)
{
    const struct mt_blocks *b = &s->blocks;
    int64_t room = b->lines - b->head_lines, most = 3;
    int64_t line_bytes = s->width * (int64_t)mt_dtype_size(dtype);
    for (int64_t r = 0; r < b->ranks; r++) {
        const int64_t *head = s->heads + r * (b->experts + 1);
        int64_t line = b->head_lines, all = 0;
        for (int64_t j = 0; j < b->head_lines; j++)
            assert_int_equal(s->line_token[r * b->lines + j], -1);
        for (int64_t e = 0; e < b->experts; e++) {
            int64_t count = 0, global = r * b->experts + e;
            all += s->counts[global];
            for (int64_t i = 0; i < s->tokens * s->top_k; i++) {
                if (s->chosen[i] != global) continue;
                if (s->position[i] < 0 || line == b->lines) {
                    assert_int_equal(s->token_line[i], -1);
                    continue;
                }
                assert_int_equal(s->token_line[i], r * b->lines + line);
                assert_int_equal(s->line_token[r * b->lines + line], i / s->top_k);
                line++, count++;
            }
            assert_int_equal(head[1 + e], count);
        }
        assert_int_equal(head[0], line * line_bytes - 8);
        for (; line < b->lines; line++) assert_int_equal(s->line_token[r * b->lines + line], -1);
        most = all > most ? all : most;
        assert_true(all > room || head[0] == (b->head_lines + all) * line_bytes - 8);
    }
    assert_int_equal(s->most, most);
}

static struct mt_exchange_pack_args pack_of(const struct sender *s, mt_dtype dtype, void *y,
                                            const void *x, const int32_t *index)
{
    return (struct mt_exchange_pack_args){ .dtype = dtype,
                                           .blocks = s->blocks,
                                           .width = s->width,
                                           .y = y,
                                           .x = x,
                                           .index = index,
                                           .heads = s->heads };
}

/* Packs the tokens' rows; lines of nobody stay as they were. */
static void *check_pack(const struct sender *s, mt_dtype dtype, const void *x, int threads)
{
    const struct mt_blocks *b = &s->blocks;
    mt_stream stream = on_threads(threads);
    int64_t lines = b->ranks * b->lines;
    size_t line = (size_t)s->width * mt_dtype_size(dtype), words = (size_t)b->experts + 1;
    char *y = test_alloc(lines * s->width, dtype);
    unsigned char *before = malloc((size_t)lines * line + 1);
    assert_non_null(before);
    memcpy(before, y, (size_t)lines * line);
    struct mt_exchange_pack_args args = pack_of(s, dtype, y, NULL, NULL);
    assert_ok(mt_exchange_pack(&stream, &args)); /* heads alone */
    args.x = x, args.index = s->line_token;
    for (int64_t r = 0; r < b->ranks; r++)
        memcpy(before + (size_t)(r * b->lines) * line, s->heads + (size_t)r * words, 8 * words);
    assert_ok(mt_device_synchronize(stream.device));
    same_bits("packed heads", y, before, (size_t)lines * line);
    assert_ok(mt_exchange_pack(&stream, &args));
    for (int64_t l = 0; l < lines; l++)
        if (s->line_token[l] >= 0)
            memcpy(before + (size_t)l * line, (const char *)x + (size_t)s->line_token[l] * line,
                   line);
    assert_ok(mt_device_synchronize(stream.device));
    same_bits("packed rows", y, before, (size_t)lines * line);
    free(before);
    return y;
}

/* What a receiver makes of its blocks. */
struct receiver {
    int64_t *heads, *counts, *offsets, *elements;
    int32_t *row_line, *line_row;
};

static struct receiver receive(const struct mt_blocks *b, int64_t width, mt_dtype dtype,
                               const void *y)
{
    int64_t lines = b->ranks * b->lines, s = b->experts;
    mt_stream stream = on_threads(1);
    struct receiver r = { test_alloc(b->ranks * (s + 1), MT_I64),
                          test_alloc(s, MT_I64),
                          test_alloc(s + 1, MT_I64),
                          test_alloc(3 * (s + 1), MT_I64),
                          test_alloc(lines, MT_I32),
                          test_alloc(lines, MT_I32) };
    struct mt_exchange_arrivals_args args = { .dtype = dtype,
                                              .blocks = *b,
                                              .width = width,
                                              .y = y,
                                              .heads = r.heads,
                                              .counts = r.counts,
                                              .offsets = r.offsets,
                                              .widths = { 1, 8, 100 },
                                              .row_line = r.row_line,
                                              .line_row = r.line_row };
    assert_ok(mt_exchange_arrivals(&stream, &args));
    args.element_offsets = r.elements;
    assert_ok(mt_exchange_arrivals(&stream, &args));
    assert_ok(mt_device_synchronize(stream.device));
    return r;
}

static void receiver_free(struct receiver *r)
{
    void *all[] = { r->heads, r->counts, r->offsets, r->elements, r->row_line, r->line_row };
    for (int i = 0; i < 6; i++) test_free(all[i]);
}

/* Rows by expert, then by sender, then as sent; nothing else has a row. */
static void check_arrivals(const struct receiver *r, const struct mt_blocks *b,
                           const struct sender *senders, int64_t rank)
{
    static const int64_t widths[] = { 1, 8, 100 };
    int64_t row = 0, s = b->experts, used = 0;
    int64_t next[MOST_RANKS];
    for (int64_t p = 0; p < b->ranks; p++) next[p] = p * b->lines + b->head_lines;
    for (int64_t e = 0; e < s; e++) {
        int64_t count = 0;
        assert_int_equal(r->offsets[e], row);
        for (int64_t p = 0; p < b->ranks; p++) {
            int64_t n = senders[p].heads[rank * (s + 1) + 1 + e];
            assert_int_equal(r->heads[p * (s + 1) + 1 + e], n);
            for (int64_t j = 0; j < n; j++, row++, count++) {
                assert_int_equal(r->row_line[row], next[p]);
                assert_int_equal(r->line_row[next[p]++], row);
            }
        }
        assert_int_equal(r->counts[e], count);
    }
    assert_int_equal(r->offsets[s], row);
    for (int64_t l = 0; l < b->ranks * b->lines; l++) used += r->line_row[l] >= 0;
    assert_int_equal(used, row);
    for (int i = 0; i < 3; i++)
        for (int64_t e = 0; e <= s; e++)
            assert_int_equal(r->elements[i * (s + 1) + e], r->offsets[e] * widths[i]);
}

/* The gradients of weights, from the reals that each receiver gave to its lines; `back`: the blocks
 * that came back to sender p. */
static void check_weights(const struct sender *s, int64_t p, mt_dtype dtype, const void *back,
                          void *const *reals, int threads)
{
    const struct mt_blocks *b = &s->blocks;
    mt_dtype real = mt_dtype_wide(dtype);
    mt_stream stream = on_threads(threads);
    int64_t slots = s->tokens * s->top_k;
    void *weights = test_alloc(slots, real), *dweights = test_alloc(slots, real);
    test_random(weights, slots, real, 1, 40 + (uint64_t)p);
    for (int64_t i = 3; i < slots; i += 7) mt_store_f64(weights, real, i, 0);
    assert_ok(mt_exchange_weights_bwd(
        &stream, &(struct mt_exchange_weights_bwd_args){ .dtype = dtype,
                                                         .blocks = *b,
                                                         .tokens = s->tokens,
                                                         .top_k = s->top_k,
                                                         .width = s->width,
                                                         .dweights = dweights,
                                                         .x = back,
                                                         .weights = weights,
                                                         .token_line = s->token_line }));
    assert_ok(mt_device_synchronize(stream.device));
    for (int64_t i = 0; i < slots; i++) {
        int64_t line = s->token_line[i];
        double w = mt_load_f64(weights, real, i), want = 0;
        if (line >= 0 && w != 0) {
            want = mt_load_f64(reals[line / b->lines], real, p * b->lines + line % b->lines);
            want = real == MT_F64 ? want / w : (double)((float)want / (float)w);
        }
        assert_true(mt_load_f64(dweights, real, i) == want);
    }
    test_free(weights), test_free(dweights);
}

/* Rows of every rank to every rank, and back to where they came from. */
static void check_trip(struct sender *senders, mt_dtype dtype, int threads)
{
    const struct mt_blocks *b = &senders[0].blocks;
    int64_t lines = b->ranks * b->lines, width = senders[0].width;
    size_t block = (size_t)(b->lines * width) * mt_dtype_size(dtype);
    size_t line = (size_t)width * mt_dtype_size(dtype);
    char *sent[MOST_RANKS], *back[MOST_RANKS];
    void *x[MOST_RANKS], *reals[MOST_RANKS];
    for (int64_t p = 0; p < b->ranks; p++) {
        x[p] = test_alloc(senders[p].tokens * width, dtype);
        test_random(x[p], senders[p].tokens * width, dtype, 1, 90 + (uint64_t)p);
        sent[p] = check_pack(&senders[p], dtype, x[p], threads);
        back[p] = test_alloc(lines * width, dtype);
    }
    char *got = test_alloc(lines * width, dtype), *rows = test_alloc(lines * width, dtype);
    char *reply = test_alloc(lines * width, dtype);
    mt_stream stream = on_threads(threads);
    for (int64_t p = 0; p < b->ranks; p++) {
        for (int64_t q = 0; q < b->ranks; q++)
            memcpy(got + (size_t)q * block, sent[q] + (size_t)p * block, block);
        reals[p] = test_alloc(lines, mt_dtype_wide(dtype));
        test_random(reals[p], lines, mt_dtype_wide(dtype), 1, 20 + (uint64_t)p);
        struct receiver r = receive(b, width, dtype, got);
        check_arrivals(&r, b, senders, p);
        assert_ok(mt_gather_fwd(
            &stream, &(struct mt_gather_fwd_args){ .dtype = dtype,
                                                   .tokens = lines,
                                                   .width = width,
                                                   .top_k = 1,
                                                   .rows = lines,
                                                   .y = rows,
                                                   .x = got,
                                                   .row_token = r.row_line,
                                                   .rows_used = r.offsets + b->experts }));
        assert_ok(mt_exchange_pack(&stream, &(struct mt_exchange_pack_args){ .dtype = dtype,
                                                                             .blocks = *b,
                                                                             .width = width,
                                                                             .y = reply,
                                                                             .x = rows,
                                                                             .index = r.line_row,
                                                                             .heads = r.heads,
                                                                             .reals = reals[p] }));
        assert_ok(mt_device_synchronize(stream.device));
        for (int64_t q = 0; q < b->ranks; q++)
            memcpy(back[q] + (size_t)p * block, reply + (size_t)q * block, block);
        receiver_free(&r);
    }
    for (int64_t p = 0; p < b->ranks; p++) {
        for (int64_t i = 0; i < senders[p].tokens * senders[p].top_k; i++)
            if (senders[p].token_line[i] >= 0)
                assert_memory_equal(back[p] + (size_t)senders[p].token_line[i] * line,
                                    (char *)x[p] + (size_t)(i / senders[p].top_k) * line, line);
        check_weights(&senders[p], p, dtype, back[p], reals, threads);
    }
    for (int64_t p = 0; p < b->ranks; p++) {
        test_free(reals[p]);
        test_free(x[p]), test_free(sent[p]), test_free(back[p]);
    }
    test_free(got), test_free(rows), test_free(reply);
}

static void test_exchange(void **state)
{
    (void)state;
    static const struct {
        int64_t ranks, experts, tokens, top_k, capacity, width, room;
        int skew;
    } cases[] = {
        { 1, 1, 0, 1, 0, 1, 0, 0 },    { 1, 4, 9, 2, 0, 8, 18, 0 },
        { 2, 2, 33, 3, 0, 7, 40, 0 },  { 2, 1, 33, 2, 5, 64, 70, 0 },
        { 4, 8, 40, 2, 0, 33, 80, 2 }, { 4, 8, 40, 2, 0, 33, 9, 1 },
        { 5, 33, 70, 4, 3, 5, 20, 0 }, { 3, 65, 257, 3, 0, 128, 300, 0 },
        { 2, 3, 1, 1, 0, 6, 0, 0 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        for (int d = 0; d < 3; d++) {
            struct sender senders[MOST_RANKS];
            struct mt_blocks b = blocks_of(cases[i].ranks, cases[i].experts, cases[i].width,
                                           dtypes[d], cases[i].room);
            for (int64_t p = 0; p < b.ranks; p++) { /* ranks need not have as many tokens */
                int64_t tokens = p == 1 ? cases[i].tokens / 2 : cases[i].tokens;
                senders[p] =
                    sender_make(b, tokens, cases[i].top_k, cases[i].width, cases[i].capacity,
                                dtypes[d], cases[i].skew, 7 + (uint64_t)p);
                check_plan(&senders[p], dtypes[d]);
            }
            for (int threads = 1; threads <= MAX_THREADS; threads++)
                check_trip(senders, dtypes[d], threads);
            for (int64_t p = 0; p < b.ranks; p++) sender_free(&senders[p]);
        }
}

static void test_refusals(void **state)
{
    (void)state;
    struct mt_blocks b = blocks_of(2, 2, 8, MT_F32, 30);
    struct sender s = sender_make(b, 9, 2, 8, 0, MT_F32, 0, 1);
    float *y = test_alloc(2 * b.lines * 8, MT_F32);
    mt_stream stream = on_threads(1);
    struct mt_exchange_pack_args args = pack_of(&s, MT_F32, y, NULL, NULL);
    args.blocks.experts = 4, args.blocks.head_lines = 1;
    assert_fails(mt_exchange_pack(&stream, &args), MT_EINVAL, "a head of 32 bytes for 4 experts");
    args.blocks.experts = 2, args.blocks.lines = INT32_MAX / 2 + 1;
    assert_fails(mt_exchange_pack(&stream, &args), MT_EINVAL, "int32");
    args.blocks.lines = 9, args.width = 7, args.blocks.head_lines = 1;
    assert_fails(mt_exchange_pack(&stream, &args), MT_EINVAL, "multiple of 8");
    args.width = 8, args.blocks.lines = 0;
    assert_fails(mt_exchange_pack(&stream, &args), MT_EINVAL, "0 lines");
    args.blocks = b, args.heads = NULL;
    assert_fails(mt_exchange_pack(&stream, &args), MT_EINVAL, "heads is NULL");
    args = pack_of(&s, MT_F32, y, NULL, NULL), args.reals = y, args.blocks.head_lines = 1;
    assert_fails(mt_exchange_pack(&stream, &args), MT_EINVAL,
                 "a head of 32 bytes, with a real of each of 39 rows it needs 180");
    assert_ok(mt_format_spec_parse(&args.coded, "mxfp8"));
    args.blocks = b, args.x = y;
    assert_fails(mt_exchange_pack(&stream, &args), MT_EINVAL, "reals are for lines");
    test_free(y);
    sender_free(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exchange),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, open_devices, close_devices);
}
