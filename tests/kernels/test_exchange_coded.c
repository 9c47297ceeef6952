/* Coded lines of the expert exchange: what is packed are the codes and scales that quantize gives,
 * what is unpacked their values, and quantizing those again changes nothing. Exact. */
#include "tests/kernels/threads.h"

#include "core/rng.h"

static const char *const formats[] = {
    "mxfp8",
    "mxfp8:e5m2",
    "mxfp6_e3m2",
    "mxfp6_e2m3",
    "mxfp4",
    "mxfp8:scale=floor",
    "mxfp8:e5m2+scale=floor",
    "mxfp6_e3m2:scale=floor",
    "mxfp6_e2m3:scale=floor",
    "mxfp4:scale=floor",
    "fp8_block",
    "fp8_block:e5m2",
};
enum { FORMATS = sizeof formats / sizeof formats[0] };

static mt_format_spec spec_of(const char *text)
{
    mt_format_spec spec;
    assert_ok(mt_format_spec_parse(&spec, text));
    return spec;
}

/* Rows quantized, and what their codes decode to, in f32. */
struct coded_rows {
    mt_qtensor q;
    int64_t rows, width;
    float *values;
    int64_t *nan;
};

static mt_direction direction_for(const mt_group *g, mt_format_spec spec, mt_dir dir)
{
    mt_direction d = mt_direction_of(spec);
    d.codes = test_alloc((int64_t)mt_direction_code_bytes(&d, dir, g), MT_U8);
    d.scales = test_alloc((int64_t)mt_direction_scale_bytes(&d, dir, g), MT_U8);
    return d;
}

/* column: the direction that wgrad reads under source=dequantized, too. */
static struct coded_rows quantize_rows(const void *x, mt_dtype dtype, int64_t rows, int64_t width,
                                       const char *text, bool column)
{
    mt_stream stream = on_threads(1);
    mt_group g = mt_group_uniform(1, rows, width);
    mt_qtensor src = mt_qtensor_plain(g, dtype, (void *)(uintptr_t)x);
    struct coded_rows c = { .q = { .group = g }, .rows = rows, .width = width };
    mt_format_spec spec = spec_of(text);
    c.q.dir[MT_ROW] = direction_for(&g, spec, MT_ROW);
    spec.options.from_dequantized = true;
    if (column) c.q.dir[MT_COL] = direction_for(&g, spec, MT_COL);
    c.values = test_alloc(rows * width, MT_F32), c.nan = test_alloc(1, MT_I64);
    struct mt_quantize_args args = { .dtype = dtype, .src = &src, .out = &c.q, .nan = c.nan };
    assert_ok(mt_quantize(&stream, &args));
    assert_ok(mt_dequantize(&stream,
                            &(struct mt_dequantize_args){ dtype, &c.q, MT_ROW, c.values, MT_F32 }));
    assert_ok(mt_device_synchronize(stream.device));
    return c;
}

static void coded_rows_free(struct coded_rows *c)
{
    for (int d = 0; d < MT_DIR_COUNT; d++)
        test_free(c->q.dir[d].codes), test_free(c->q.dir[d].scales);
    test_free(c->values), test_free(c->nan);
}

static float scale_of(const struct coded_rows *c, int64_t row, int64_t block, uint8_t *byte)
{
    const mt_direction *d = &c->q.dir[MT_ROW];
    mt_direction_shape s = mt_direction_shape_of(d, MT_ROW, c->rows, c->width);
    int64_t place = mt_scale_place(d, &s, row, block);
    *byte = d->format->scale == MT_SCALE_E8M0 ? ((const uint8_t *)d->scales)[place] : 0;
    return d->format->scale == MT_SCALE_E8M0 ? 0 : ((const float *)d->scales)[place];
}

/* A line against row `row` of c. */
static void check_line(const unsigned char *line, const struct coded_rows *c, int64_t row)
{
    const mt_direction *d = &c->q.dir[MT_ROW];
    int64_t per = d->format->codes_per_byte, codes = (c->width + per - 1) / per;
    const unsigned char *scales = line + (codes + 3) / 4 * 4;
    assert_memory_equal(line, (char *)d->codes + row * codes, (size_t)codes);
    for (int64_t b = 0; b * d->format->block < c->width; b++) {
        uint8_t byte;
        float scale = scale_of(c, row, b, &byte);
        if (d->format->scale == MT_SCALE_E8M0)
            assert_int_equal(scales[b], byte);
        else
            assert_memory_equal(scales + 4 * b, &scale, 4);
    }
}

/* A row of the plain buffer against the values of row `row`. */
static void check_row(const void *y, mt_dtype dtype, const struct coded_rows *c, int64_t row)
{
    double largest = dtype == MT_BF16 ? 0x1.fep127 : (double)FLT_MAX;
    unsigned char want[8];
    for (int64_t i = 0; i < c->width; i++) {
        uint8_t byte;
        double v = (double)c->values[row * c->width + i];
        scale_of(c, row, i / c->q.dir[MT_ROW].format->block, &byte);
        if (byte < 0xfe && fabs(v) > largest) v = copysign(largest, v);
        mt_store_f64(want, dtype, 0, v);
        const char *got = (const char *)y + (size_t)i * mt_dtype_size(dtype);
        if (v != v) {
            assert_true(isnan(mt_load_f64(got, dtype, 0)));
            continue;
        }
        if (memcmp(got, want, mt_dtype_size(dtype)))
            fail_msg("row %lld, element %lld is %.9g, must be %.9g", (long long)row, (long long)i,
                     mt_load_f64(got, dtype, 0), v);
    }
}

/* ---- packing and unpacking ---------------------------------------------------------------------
 */

static bool in_use(const struct mt_blocks *b, const int64_t *rows, int64_t l)
{
    return l % b->lines >= b->head_lines && l % b->lines < b->head_lines + rows[l / b->lines];
}

static void check_head(const void *buffer, const struct mt_blocks *b, const int64_t *heads,
                       const int64_t *rows, int64_t line)
{
    for (int64_t r = 0; r < b->ranks; r++) {
        const int64_t *head = (const int64_t *)((const char *)buffer + r * b->lines * line);
        assert_int_equal(head[0], (b->head_lines + rows[r]) * line - 8);
        for (int64_t e = 1; e <= b->experts; e++)
            assert_int_equal(head[e], heads[r * (b->experts + 1) + e]);
    }
}

/* Heads of blocks that are empty, full, and in between. */
static int64_t *draw_heads(const struct mt_blocks *b, int64_t rows[], int64_t line)
{
    int64_t *heads = test_alloc(b->ranks * (b->experts + 1), MT_I64);
    for (int64_t r = 0; r < b->ranks; r++) {
        int64_t *head = heads + r * (b->experts + 1), room = b->lines - b->head_lines;
        rows[r] = r ? room / r : 0;
        head[0] = (b->head_lines + rows[r]) * line - 8;
        for (int64_t e = 0; e < b->experts; e++)
            head[1 + e] = rows[r] * (e + 1) / b->experts - rows[r] * e / b->experts;
    }
    return heads;
}

/* Lines by an index, or in place, of `threads`; then back. */
static void check_trip(const char *text, mt_dtype dtype, int64_t width, bool in_place, int threads)
{
    const mt_format_spec spec = spec_of(text), plain = { 0 };
    int64_t line = mt_exchange_line(dtype, width, &spec),
            bytes = mt_exchange_line(dtype, width, &plain);
    int64_t least = line < bytes ? line : bytes, rows[3];
    struct mt_blocks b = { 3, 5, 0, (8 * 6 + least - 1) / least };
    b.lines = (b.head_lines + 21 + 7) / 8 * 8;
    int64_t lines = b.ranks * b.lines, *heads = draw_heads(&b, rows, bytes);
    mt_stream stream = on_threads(threads);
    void *x = test_alloc(lines * width, dtype), *back = test_alloc(lines * width, dtype);
    unsigned char *y = test_alloc(lines * line, MT_U8);
    int32_t *index = test_alloc(lines, MT_I32);
    unsigned char *before = malloc((size_t)(lines * line)),
                  *poison = malloc((size_t)(lines * bytes));
    assert_non_null(before), assert_non_null(poison);
    assert_int_equal(line % 16, 0);
    test_random(x, lines * width, dtype, 3, 17);
    for (int64_t l = 0; l < lines; l++)
        index[l] =
            in_use(&b, rows, l) ? (int32_t)mt_rng_below(3, 1, (uint64_t)l, (uint64_t)lines) : -1;
    memcpy(before, y, (size_t)(lines * line));
    memcpy(poison, back, (size_t)(lines * bytes));
    struct coded_rows c = quantize_rows(x, dtype, lines, width, text, false);
    assert_ok(
        mt_exchange_pack(&stream, &(struct mt_exchange_pack_args){ .dtype = dtype,
                                                                   .blocks = b,
                                                                   .width = width,
                                                                   .y = y,
                                                                   .x = x,
                                                                   .index = in_place ? NULL : index,
                                                                   .heads = heads,
                                                                   .coded = spec }));
    assert_ok(mt_exchange_unpack(
        &stream,
        &(struct mt_exchange_unpack_args){
            .dtype = dtype, .blocks = b, .width = width, .y = back, .x = y, .coded = spec }));
    assert_ok(mt_device_synchronize(stream.device));
    check_head(y, &b, heads, rows, line);
    check_head(back, &b, heads, rows, bytes);
    for (int64_t l = 0; l < lines; l++) {
        const char *row = (char *)back + l * bytes;
        int64_t head = l % b.lines ? 0 : 48, skip = head < line ? head : line;
        if (in_use(&b, rows, l)) {
            check_line(y + l * line, &c, in_place ? l : index[l]);
            check_row(row, dtype, &c, in_place ? l : index[l]);
        } else if (l % b.lines >= b.head_lines) {
            assert_memory_equal(y + l * line + skip, before + l * line + skip,
                                (size_t)(line - skip));
            assert_memory_equal(row, poison + l * bytes, (size_t)bytes);
        }
    }
    coded_rows_free(&c);
    free(before), free(poison);
    test_free(x), test_free(back), test_free(y), test_free(index), test_free(heads);
}

static void test_lines(void **state)
{
    (void)state;
    static const int64_t widths[] = { 1, 7, 32, 33, 128, 136, 200, 264, 520 };
    for (int f = 0; f < FORMATS; f++)
        for (int d = 0; d < 3; d++)
            for (int w = 0; w < 9; w++)
                for (int threads = 1; threads <= MAX_THREADS; threads += 2)
                    check_trip(formats[f], dtypes[d], widths[w], threads == 1 || w % 2, threads);
}

/* ---- quantized again ---------------------------------------------------------------------------
 */

enum { ROWS = 4096, WIDTH = 256, STRIDE = 8, GRAIN = 32 };

/* Blocks whose largest is every bf16 there is, or f32 all over their range and around the places
 * where scales and codes change, infinite, NaN; the others up to it, some by many binades less. */
static float *draw_extremes(bool narrow)
{
    static const float places[] = { 448, 57344, 28, 7.5f, 6, 1.9375f, 1, 240, 3.75f, 5 };
    float *x = test_alloc(ROWS * WIDTH, MT_F32);
    for (int64_t i = 0; i < ROWS * WIDTH; i++) {
        uint64_t block = (uint64_t)(i / GRAIN), u = mt_rng_below(5, 1, (uint64_t)i, 1u << 31);
        uint32_t top = (uint32_t)block << 16, half = mt_rng_below(5, 2, block, 2) ? 0 : 64;
        if (!narrow && block % 2) {
            float place = places[block / 2 % 10];
            int power = (int)mt_rng_below(5, 3, block, 276) - 149;
            top = mt_f32_bits(ldexpf(place, power)) + (uint32_t)mt_rng_below(5, 4, block, 5) - 2;
            top &= 0x7fffffff;
        }
        uint32_t bits = top, less = (uint32_t)(u % 40) << 23, sign = (uint32_t)(u & 64) << 25;
        bool first = i % GRAIN == (int64_t)(block % GRAIN);
        if (!first) bits = top > less ? top - less : (uint32_t)(u % (top + 1u));
        if (!first && bits > half) bits -= (uint32_t)mt_rng_below(5, 6, (uint64_t)i, bits / 8 + 1);
        if (narrow) bits &= 0xffff0000;
        x[i] = mt_f32_from_bits(bits | sign);
    }
    return x;
}

static void same_values(const struct coded_rows *a, const struct coded_rows *b, const char *text,
                        mt_dtype dtype)
{
    for (int64_t i = 0; i < a->rows * a->width; i++)
        if (mt_f32_bits(a->values[i]) != mt_f32_bits(b->values[i]))
            fail_msg("%s of %s: element %lld becomes %.9g, then %.9g", text, mt_dtype_name(dtype),
                     (long long)i, (double)a->values[i], (double)b->values[i]);
    const mt_direction *p = &a->q.dir[MT_COL], *q = &b->q.dir[MT_COL];
    assert_memory_equal(p->codes, q->codes, mt_direction_code_bytes(p, MT_COL, &a->q.group));
    assert_memory_equal(p->scales, q->scales, mt_direction_scale_bytes(p, MT_COL, &a->q.group));
    const mt_element_info *e = &mt_elements[p->options.element];
    if (e->nan_code != e->max_code) assert_int_equal(*a->nan, *b->nan);
}

static void check_again(const char *text, mt_dtype dtype, const float *from)
{
    const mt_format_spec spec = spec_of(text);
    const struct mt_blocks b = { 1, 1, ROWS + STRIDE, STRIDE };
    int64_t line = mt_exchange_line(dtype, WIDTH, &spec), lines = b.lines;
    size_t size = mt_dtype_size(dtype);
    mt_stream stream = on_threads(MAX_THREADS);
    char *x = test_alloc(lines * WIDTH, dtype), *y = test_alloc(lines * WIDTH, dtype);
    void *coded = test_alloc(lines * line, MT_U8);
    int64_t *head = test_alloc(2, MT_I64);
    head[0] = lines * WIDTH * (int64_t)size - 8, head[1] = ROWS;
    for (int64_t i = 0; i < ROWS * WIDTH; i++)
        mt_store_f64(x, dtype, STRIDE * WIDTH + i, (double)from[i]);
    assert_ok(mt_exchange_pack(&stream, &(struct mt_exchange_pack_args){ .dtype = dtype,
                                                                         .blocks = b,
                                                                         .width = WIDTH,
                                                                         .y = coded,
                                                                         .x = x,
                                                                         .heads = head,
                                                                         .coded = spec }));
    assert_ok(mt_exchange_unpack(
        &stream,
        &(struct mt_exchange_unpack_args){
            .dtype = dtype, .blocks = b, .width = WIDTH, .y = y, .x = coded, .coded = spec }));
    assert_ok(mt_device_synchronize(stream.device));
    x += STRIDE * WIDTH * size, y += STRIDE * WIDTH * size;
    struct coded_rows once = quantize_rows(x, dtype, ROWS, WIDTH, text, true);
    struct coded_rows twice = quantize_rows(y, dtype, ROWS, WIDTH, text, true);
    same_values(&once, &twice, text, dtype);
    coded_rows_free(&once), coded_rows_free(&twice);
    test_free(x - STRIDE * WIDTH * size), test_free(y - STRIDE * WIDTH * size);
    test_free(coded), test_free(head);
}

static void test_again(void **state)
{
    (void)state;
    for (int narrow = 0; narrow < 2; narrow++) {
        float *from = draw_extremes(narrow);
        for (int f = 0; f < FORMATS; f++)
            for (int d = narrow ? 2 : 0; d < 2 + narrow; d++)
                check_again(formats[f], dtypes[d], from);
        test_free(from);
    }
}

/* ---- what cannot be ----------------------------------------------------------------------------
 */

static void test_refusals(void **state)
{
    (void)state;
    static const char *const refused[] = { "bf16",     "fp8_tensor",         "fp8_delayed",
                                           "nvfp4",    "mxfp8:2d",           "mxfp8:sr",
                                           "mxfp4:sr", "fp8_block:pow2=off", "fp8_block:2d" };
    int64_t heads[] = { 8 * 64 - 8, 0 };
    char buffer[8 * 64];
    mt_stream stream = on_threads(1);
    struct mt_exchange_unpack_args args = {
        .dtype = MT_BF16, .blocks = { 1, 1, 8, 1 }, .width = 32, .y = buffer, .x = heads
    };
    assert_fails(mt_exchange_unpack(&stream, &args), MT_EINVAL, "no format");
    for (int i = 0; i < 9; i++) {
        args.coded = spec_of(refused[i]);
        assert_false(mt_exchange_codes(&args.coded));
        assert_fails(mt_exchange_unpack(&stream, &args), MT_EINVAL, "cannot be coded in");
    }
    args.coded = spec_of("mxfp8"), args.y = NULL;
    assert_fails(mt_exchange_unpack(&stream, &args), MT_EINVAL, "y is NULL");
    args.y = buffer, args.blocks.experts = 6;
    assert_fails(mt_exchange_unpack(&stream, &args), MT_EINVAL, "a head of 48 bytes for 6 experts");
    struct mt_exchange_pack_args pack = { .dtype = MT_BF16,
                                          .blocks = { 1, 1, 8, 1 },
                                          .width = 32,
                                          .y = buffer,
                                          .heads = heads,
                                          .coded = args.coded };
    assert_fails(mt_exchange_pack(&stream, &pack), MT_EINVAL, "x is NULL");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lines),
        cmocka_unit_test(test_again),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, open_devices, close_devices);
}
