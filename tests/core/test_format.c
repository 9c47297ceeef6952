/* The format table, options, their text and rules; geometry of quantized tensors. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "core/format_spec.h"
#include "tests/support/test.h"

static void test_table(void **state)
{
    (void)state;
    for (int i = 0; i < MT_FORMAT_COUNT; i++) {
        const mt_format *f = &mt_formats[i], *found;
        assert_int_equal(f->id, i);
        assert_ok(mt_format_find(&found, f->name));
        assert_ptr_equal(found, f);
        bool plain = f->element == MT_ELEMENT_PLAIN;
        assert_int_equal(plain, f->scale == MT_SCALE_NONE);
        assert_int_equal(plain, f->options == 0);
        assert_true(plain ? mt_format_plain(f->dtype) == f : f->dtype == MT_U8);
        if (f->block) assert_int_equal(128 % f->block, 0); /* blocks lie within tiles of 128 */
        assert_true(f->block == 0 || f->shard_atom % f->block == 0);
    }
    assert_null(mt_format_plain(MT_I32));
    const mt_format *none;
    assert_fails(mt_format_find(&none, "fp8"), MT_ECONFIG, "format 'fp8' is not one of f64");
    assert_fails(mt_format_find(&none, NULL), MT_EINVAL, "no name");
}

/* The maxima follow from the layout of the bits. */
static void test_elements(void **state)
{
    (void)state;
    for (int i = MT_ELEMENT_E4M3; i < MT_ELEMENT_COUNT; i++) {
        const mt_element_info *e = &mt_elements[i];
        int exponent = e->max_code >> e->mantissa,
            mantissa = e->max_code & ((1 << e->mantissa) - 1);
        double max = ldexp(1 + ldexp(mantissa, -e->mantissa), exponent - e->bias);
        assert_true(max == (double)e->max);
        assert_int_equal(e->emax, ilogb(max));
        assert_true(e->max_code < 1 << e->sign);
    }
    assert_true(1.0f / 448 == 0x1.24924ap-9f && 1.0f / 57344 == 0x1.24924ap-16f);
}

static void test_text(void **state)
{
    (void)state;
    static const struct {
        const char *text, *printed;
    } rows[] = {
        { "bf16", "bf16" },
        { "nvfp4:2d+sr", "nvfp4:2d+sr" },
        { "nvfp4:sr+2d", "nvfp4:2d+sr" },
        { "nvfp4:sr=on+4over6", "nvfp4:sr+4over6" },
        { "nvfp4:4over6=448+err=sq", "nvfp4:4over6=448+err=sq" },
        { "nvfp4:4over6=256+err=abs", "nvfp4:4over6" },
        { "fp8_block", "fp8_block" },
        { "fp8_block:pow2=on+1d+sr=off", "fp8_block" },
        { "fp8_block:pow2=off+e5m2", "fp8_block:e5m2+pow2=off" },
        { "fp8_tensor:pow2", "fp8_tensor:pow2=on" },
        { "mxfp8:e4m3+scale=up+source=original", "mxfp8" },
        { "mxfp8:rht=0xD7E8", "mxfp8:rht" },
        { "mxfp8:rht=4660", "mxfp8:rht=0x1234" },
        { "mxfp8:rht=010", "mxfp8:rht=0x000A" },
        { "mxfp8:rht=0X00a", "mxfp8:rht=0x000A" },
        { "mxfp8:rht=0+scale=floor+source=dequantized",
          "mxfp8:rht=0x0000+scale=floor+source=dequantized" },
        { "fp8_tensor:source=original", "fp8_tensor" },
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        mt_format_spec spec, again;
        char text[MT_FORMAT_SPEC_TEXT];
        assert_ok(mt_format_spec_parse(&spec, rows[i].text));
        mt_format_spec_print(text, &spec, 0);
        assert_string_equal(text, rows[i].printed);
        assert_ok(mt_format_spec_parse(&again, text));
        assert_true(mt_format_spec_equal(&spec, &again));
    }
}

static void test_refusals(void **state)
{
    (void)state;
    static const struct {
        const char *text, *words;
    } rows[] = {
        { "", "format '' is not one of" },
        { "nvfp8", "format 'nvfp8' is not one of" },
        { "mxfp8:", "option '' is not one of e4m3 e5m2" },
        { "mxfp8:+sr", "option '' is not one of" },
        { "mxfp8:3d", "option '3d' is not one of" },
        { "mxfp8:sr+sr", "given twice" },
        { "mxfp8:e4m3+e5m2", "contradicts" },
        { "mxfp8:sr=maybe", "option sr is maybe, must be on or off" },
        { "mxfp8:2d=on", "option 2d takes no value, not 'on'" },
        { "mxfp8:rht=65536", "must be a 16-bit mask" },
        { "mxfp8:rht=-1", "must be a 16-bit mask" },
        { "mxfp8:rht=0x", "must be a 16-bit mask" },
        { "mxfp8:rht=0b1", "must be a 16-bit mask" },
        { "mxfp8:rht=", "must be a 16-bit mask" },
        { "mxfp8:scale", "option scale is without a value, must be up or floor" },
        { "mxfp8:source=row", "must be original or dequantized" },
        { "nvfp4:4over6=128", "must be 256 or 448" },
        /* options without a meaning */
        { "bf16:sr", "format bf16 takes no option sr: a plain format has no options" },
        { "f32:e5m2", "a plain format has no options" },
        { "nvfp4:e5m2", "format nvfp4 takes no option e5m2: its elements have one type" },
        { "mxfp4:e4m3", "format mxfp4 takes no option e4m3: its elements have one type" },
        { "fp8_tensor:1d", "format fp8_tensor takes no option 1d: square blocks are for" },
        { "mxfp4:pow2", "only fp8_tensor and fp8_block choose" },
        { "fp8_delayed:pow2", "only fp8_tensor and fp8_block choose" },
        { "fp8_tensor:2d", "square blocks are for mx, nvfp4 and fp8_block" },
        { "mxfp8:4over6", "only nvfp4 blocks" },
        { "nvfp4:scale=up", "only mx scales" },
        { "fp8_block:scale=floor", "only mx scales" },
        { "nvfp4:err=sq", "err= chooses the error of 4over6, which is not on" },
        /* clashes */
        { "nvfp4:2d+rht", "nvfp4 cannot have 2d and rht" },
        { "mxfp8:source=dequantized+2d", "source=dequantized and 2d" },
        { "fp8_tensor:source=dequantized", "both directions share one scale" },
        { "fp8_delayed:source=dequantized", "both directions share one scale" },
        { "fp8_delayed:rht", "fp8_delayed cannot have rht: the amax history" },
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        mt_format_spec spec;
        assert_fails(mt_format_spec_parse(&spec, rows[i].text), MT_ECONFIG, rows[i].words);
    }
    char longest[400];
    mt_format_spec spec;
    assert_fails(mt_format_spec_parse(&spec, NULL), MT_EINVAL, "format: no text");
    memset(longest, 'x', sizeof longest - 1);
    longest[sizeof longest - 1] = '\0';
    assert_fails(mt_format_spec_parse(&spec, longest), MT_ECONFIG, "is longer than");
    spec = mt_format_spec_default(MT_FORMAT_NVFP4);
    spec.options.four_over_six = 300;
    assert_fails(mt_format_spec_check(&spec), MT_ECONFIG, "the bound 256 or 448, not 300");
    spec = mt_format_spec_default(MT_FORMAT_MXFP8);
    spec.options.element = MT_ELEMENT_E2M1;
    assert_fails(mt_format_spec_check(&spec), MT_ECONFIG, "no elements of type");
}

/* NUMERICS section 3, in numbers. */
static void test_shapes(void **state)
{
    (void)state;
    static const struct {
        const char *spec;
        mt_dir dir;
        int64_t m, k, codes, scales;
    } rows[] = {
        { "bf16", MT_ROW, 5, 7, 70, 0 },
        { "f64", MT_COL, 5, 7, 280, 0 },
        { "fp8_tensor", MT_ROW, 5, 7, 35, 1 },
        { "fp8_delayed", MT_COL, 0, 7, 0, 1 },
        { "fp8_block", MT_ROW, 130, 257, 33410, 3 * 130 },
        { "fp8_block", MT_COL, 130, 257, 33410, 2 * 257 },
        { "fp8_block:2d", MT_ROW, 130, 257, 33410, 6 },
        { "fp8_block:2d", MT_COL, 130, 257, 33410, 6 },
        { "mxfp8", MT_ROW, 33, 65, 2145, 33 * 3 },
        { "mxfp8", MT_COL, 33, 65, 2145, 2 * 65 },
        { "mxfp8:2d", MT_COL, 33, 65, 2145, 2 * 65 },
        { "mxfp6_e2m3", MT_ROW, 33, 65, 2145, 33 * 3 },
        { "mxfp4", MT_ROW, 33, 65, 33 * 33, 33 * 3 },
        { "mxfp4", MT_COL, 33, 65, 33 * 33, 2 * 65 },
        { "nvfp4", MT_ROW, 33, 65, 33 * 33, 33 * 5 },
        { "nvfp4", MT_COL, 33, 65, 65 * 17, 65 * 3 },
        { "nvfp4:2d", MT_ROW, 33, 65, 33 * 33, 33 * 5 },
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        mt_format_spec spec;
        assert_ok(mt_format_spec_parse(&spec, rows[i].spec));
        mt_direction d = mt_direction_of(spec);
        mt_direction_shape s = mt_direction_shape_of(&d, rows[i].dir, rows[i].m, rows[i].k);
        assert_int_equal(s.code_bytes, rows[i].codes);
        assert_int_equal(s.scale_count, rows[i].scales);
        mt_group one = mt_group_uniform(3, rows[i].m, rows[i].k);
        assert_int_equal(mt_direction_code_bytes(&d, rows[i].dir, &one), 3 * rows[i].codes);
        assert_int_equal(mt_direction_scale_bytes(&d, rows[i].dir, &one),
                         3 * (size_t)rows[i].scales * s.scale_size);
    }
    mt_direction d = mt_direction_of(mt_format_spec_default(MT_FORMAT_NVFP4));
    d.swizzled = true; /* 129 lines of 65 / 16 = 5 blocks: 2 x 2 tiles */
    assert_int_equal(mt_direction_shape_of(&d, MT_ROW, 129, 65).scale_count, 4 * 512);
    assert_int_equal(mt_swizzled_scale(0, 0, 5), 0);
    assert_int_equal(mt_swizzled_scale(1, 3, 5), 19);
    assert_int_equal(mt_swizzled_scale(33, 1, 5), 16 + 4 + 1);
    assert_int_equal(mt_swizzled_scale(127, 3, 5), 511);
    assert_int_equal(mt_swizzled_scale(128, 4, 5), 3 * 512);
}

/* place, member, split and select agree about where things lie. */
static void test_views(void **state)
{
    (void)state;
    enum { N = 4 };
    static const int64_t first[N] = { 3, 0, 33, 5 }, offsets[N + 1] = { 0, 60, 60, 720, 820 };
    mt_qtensor q = { .group = mt_group_ragged_rows(N, 50, 20, first, offsets) }, parts[N];
    q.dir[MT_ROW] = mt_direction_of(mt_format_spec_default(MT_FORMAT_NVFP4));
    q.dir[MT_COL] = mt_direction_of(mt_format_spec_default(MT_FORMAT_MXFP8));
    size_t bytes = mt_qtensor_bytes(&q);
    char *memory = test_alloc((int64_t)bytes, MT_U8);
    mt_qtensor_place(&q, memory);
    assert_ok(mt_qtensor_split(parts, &q));
    int64_t codes[2] = { 0, 0 }, scales[2] = { 0, 0 };
    for (int64_t i = 0; i < N; i++) {
        mt_qtensor one;
        assert_ok(mt_qtensor_member(&one, &q, i));
        assert_int_equal(one.group.m, first[i]);
        assert_int_equal(one.group.k, 20);
        for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
            const mt_direction *d = &one.dir[dir];
            assert_ptr_equal(d->codes, (char *)q.dir[dir].codes + codes[dir]);
            assert_ptr_equal(d->scales, (char *)q.dir[dir].scales + scales[dir]);
            assert_ptr_equal(d->amax, q.dir[dir].amax + i);
            assert_ptr_equal(d->codes, parts[i].dir[dir].codes);
            assert_ptr_equal(d->scales, parts[i].dir[dir].scales);
            mt_direction_shape s = mt_direction_shape_of(d, (mt_dir)dir, first[i], 20);
            codes[dir] += s.code_bytes, scales[dir] += s.scale_count;
        }
    }
    mt_qtensor row = mt_qtensor_select(&q, MT_ROW);
    assert_null(row.dir[MT_COL].format);
    assert_ptr_equal(row.dir[MT_ROW].codes, q.dir[MT_ROW].codes);
    assert_fails(mt_qtensor_member(&row, &q, N), MT_EINVAL, "member 4 of 4");
    q.dir[MT_ROW].layout = MT_LAYOUT_PADDED;
    assert_fails(mt_qtensor_split(parts, &q), MT_EUNSUPPORTED, "not compact");
    test_free(memory);
    /* two plain directions share their bytes */
    mt_format_spec bf16 = mt_format_spec_default(MT_FORMAT_BF16);
    mt_qtensor plain = { .group = mt_group_uniform(2, 16, 16),
                         .dir = { mt_direction_of(bf16), mt_direction_of(bf16) } };
    char *shared = test_alloc((int64_t)mt_qtensor_bytes(&plain), MT_U8);
    assert_in_range(mt_qtensor_bytes(&plain), 1024, 1024 + 2 * 256);
    mt_qtensor_place(&plain, shared);
    assert_ptr_equal(plain.dir[MT_ROW].codes, plain.dir[MT_COL].codes);
    test_free(shared);
    /* so do decoded ones of square blocks, but for their amaxes; of lines not */
    for (int square = 0; square < 2; square++) {
        mt_format_spec nvfp4 = mt_format_spec_default(MT_FORMAT_NVFP4);
        nvfp4.options.two_d = square;
        mt_direction d = mt_direction_of(nvfp4);
        d.layout = MT_LAYOUT_DECODED;
        mt_qtensor decoded = { .group = mt_group_uniform(2, 16, 16), .dir = { d, d } };
        assert_int_equal(mt_qtensor_bytes(&decoded), (square ? 1 : 2) * 1024 + 2 * 256);
        shared = test_alloc((int64_t)mt_qtensor_bytes(&decoded), MT_U8);
        mt_qtensor_place(&decoded, shared);
        assert_int_equal(decoded.dir[MT_ROW].codes == decoded.dir[MT_COL].codes, square);
        assert_ptr_not_equal(decoded.dir[MT_ROW].amax, decoded.dir[MT_COL].amax);
        test_free(shared);
    }
    mt_direction swizzled = mt_direction_of(mt_format_spec_default(MT_FORMAT_FP8_BLOCK));
    swizzled.swizzled = true;
    plain.dir[MT_ROW] = swizzled;
    assert_fails(mt_qtensor_check(&plain, "thing"), MT_EINVAL, "fp8_block have no swizzled layout");
}

static void test_padded_codes_are_aligned(void **state)
{
    (void)state;
    _Alignas(16) uint8_t codes[32];
    mt_direction padded = mt_direction_of(mt_format_spec_default(MT_FORMAT_FP8_BLOCK));
    padded.layout = MT_LAYOUT_PADDED;
    mt_qtensor q = { .group = mt_group_uniform(2, 16, 16), .dir[MT_COL] = padded };
    q.dir[MT_COL].codes = codes + 16;
    assert_ok(mt_qtensor_check(&q, "thing"));
    q.dir[MT_COL].codes = codes + 8;
    assert_fails(mt_qtensor_check(&q, "thing"), MT_EINVAL,
                 "thing: padded codes begin 8 bytes past a multiple of 16, must begin at one");
}

static void test_nvfp4_scales(void **state)
{
    (void)state;
    mt_format_options plain = { 0 }, four = { .four_over_six = 256 };
    assert_true(mt_nvfp4_encode_scale(&plain, 0) == 1.0f);
    assert_true(mt_nvfp4_encode_scale(&plain, INFINITY) == 1.0f);
    assert_true(mt_nvfp4_encode_scale(&plain, FLT_MIN * 0x1p-10f) == FLT_MAX);
    assert_true(mt_nvfp4_encode_scale(&plain, 2688) == 1.0f);
    assert_true(mt_nvfp4_encode_scale(&four, 1536) == 1.0f);
    assert_true(mt_nvfp4_decode_scale(&plain, 3) == 1.0f / (2688.0f / 3.0f));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_table),        cmocka_unit_test(test_elements),
        cmocka_unit_test(test_text),         cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_shapes),       cmocka_unit_test(test_views),
        cmocka_unit_test(test_nvfp4_scales), cmocka_unit_test(test_padded_codes_are_aligned),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
