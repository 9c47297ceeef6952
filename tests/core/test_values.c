/* Values: status, dtypes, random numbers, tensor and group descriptors. */
#include "tests/support/test.h"

#include <math.h>
#include <string.h>

#include "core/format.h"
#include "core/group.h"
#include "core/rng.h"

/* ---- status -----------------------------------------------------------------------------------
 */

static mt_status fail_deep(int depth)
{
    if (depth == 0) return MT_FAIL(MT_EIO, "the file '%s' has %d bytes", "x.h5", 7);
    MT_TRY(fail_deep(depth - 1));
    return MT_OK;
}

static mt_status fail_held(int *released)
{
    mt_status status;
    MT_TRY_CLEANUP(fail_deep(0));
cleanup:
    *released = 1;
    return status;
}

static void test_status(void **state)
{
    (void)state;
    mt_error_clear();
    assert_string_equal(mt_error_message(), "");
    assert_int_equal(fail_deep(2), MT_EIO);
    assert_string_equal(mt_error_message(), "the file 'x.h5' has 7 bytes");
    int places = 0;
    for (const char *s = mt_error_trace(); (s = strstr(s, "test_values.c:")); s++) places++;
    assert_int_equal(places, 3);
    assert_int_equal(fail_deep(1000), MT_EIO); /* the trace is bounded */
    assert_true(strlen(mt_error_trace()) < 2000);
    int released = 0;
    assert_int_equal(fail_held(&released), MT_EIO);
    assert_int_equal(released, 1);
    assert_int_equal(MT_FAIL(MT_EINVAL, "again: %s", mt_error_message()), MT_EINVAL);
    assert_string_equal(mt_error_message(), "again: the file 'x.h5' has 7 bytes");
    for (int i = 0; i < MT_STATUS_COUNT; i++) assert_true(strlen(mt_status_name((mt_status)i)) > 0);
    assert_string_equal(mt_status_name((mt_status)99), "unknown status");
}

/* ---- dtypes -----------------------------------------------------------------------------------
 */

static void test_dtype_names(void **state)
{
    (void)state;
    for (int i = 0; i < MT_DTYPE_COUNT; i++) {
        mt_dtype back;
        assert_ok(mt_dtype_parse(&back, mt_dtype_name((mt_dtype)i)));
        assert_int_equal(back, i);
        assert_int_equal(mt_dtype_wide((mt_dtype)i), i == MT_F64 ? MT_F64 : MT_F32);
    }
    mt_dtype d;
    assert_fails(mt_dtype_parse(&d, "fp32"), MT_ECONFIG, "'fp32'");
    assert_fails(mt_dtype_parse(&d, NULL), MT_EINVAL, "no name");
}

struct narrow {
    const char *name;
    float (*widen)(uint16_t h);
    uint16_t (*round)(float x);
    uint16_t infinity;
};

static float widen_bf16(uint16_t h)
{
    return mt_bf16_to_f32(h);
}
static uint16_t round_bf16(float x)
{
    return mt_f32_to_bf16(x);
}

static const struct narrow narrows[] = {
    { "bf16", widen_bf16, round_bf16, 0x7f80 },
    { "f16", mt_f16_to_f32, mt_f32_to_f16, 0x7c00 },
};

/* The value of a code by its definition. */
static double value_of(const struct narrow *t, uint16_t h)
{
    int mantissa_bits = t->infinity == 0x7f80 ? 7 : 10, bias = t->infinity == 0x7f80 ? 127 : 15;
    int e = (h & 0x7fff) >> mantissa_bits, m = h & ((1 << mantissa_bits) - 1);
    double x =
        e ? ldexp(1 + ldexp(m, -mantissa_bits), e - bias) : ldexp(m, 1 - bias - mantissa_bits);
    return h & 0x8000 ? -x : x;
}

static void want_code(const struct narrow *t, float x, uint16_t want)
{
    uint16_t got = t->round(x), negative = t->round(-x);
    if (got != want || negative != (want ^ 0x8000))
        fail_msg("%s of %a is %04x, of its negative %04x, want %04x", t->name, (double)x, got,
                 negative, want);
}

/* All codes there and back; and around every midpoint of neighbours, the tie goes to the even code.
 */
static void test_narrow_floats(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        const struct narrow *t = &narrows[i];
        for (uint32_t h = 0; h < 0x10000; h++) {
            uint16_t code = (uint16_t)h;
            float x = t->widen(code);
            if ((code & 0x7fff) > t->infinity) {
                assert_true(isnan(x));
                assert_int_equal(t->round(x), 0x7fff);
                continue;
            }
            if ((code & 0x7fff) < t->infinity && (double)x != value_of(t, code))
                fail_msg("%s %04x is %a", t->name, code, (double)x);
            assert_int_equal(t->round(x), code);
            assert_int_equal(signbit(x) != 0, code >> 15);
        }
        assert_true(isinf(t->widen(t->infinity)));
        for (uint16_t h = 0; h + 1 < t->infinity; h++) {
            float middle = (float)((value_of(t, h) + value_of(t, h + 1)) / 2); /* exact in f32 */
            want_code(t, middle, h & 1 ? h + 1 : h);
            want_code(t, nextafterf(middle, -INFINITY), h);
            want_code(t, nextafterf(middle, INFINITY), h + 1);
        }
        uint16_t last =
            t->infinity - 1; /* the largest finite code is odd: the tie above it overflows */
        double gap = value_of(t, last) - value_of(t, last - 1);
        float limit = (float)(value_of(t, last) + gap / 2);
        want_code(t, limit, t->infinity);
        want_code(t, nextafterf(limit, 0), last);
        want_code(t, INFINITY, t->infinity);
    }
}

static void test_load_store(void **state)
{
    (void)state;
    unsigned char memory[4 * 8];
    for (int d = 0; d < MT_DTYPE_COUNT; d++) {
        for (int i = 0; i < 4; i++) mt_store_f64(memory, (mt_dtype)d, i, i * 3);
        for (int i = 0; i < 4; i++) assert_true(mt_load_f64(memory, (mt_dtype)d, i) == i * 3);
    }
    mt_store_f64(memory, MT_BF16, 1, 1.00390625); /* 1 + 2^-8: a tie, to even */
    assert_true(mt_load_f64(memory, MT_BF16, 1) == 1);
}

/* ---- random numbers ---------------------------------------------------------------------------
 */

/* Known answers of Random123 (philox4x32, 10 rounds). */
static void test_philox(void **state)
{
    (void)state;
    static const struct {
        uint32_t counter[4], key[2], out[4];
    } known[] = {
        { { 0, 0, 0, 0 }, { 0, 0 }, { 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8 } },
        { { 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff },
          { 0xffffffff, 0xffffffff },
          { 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd } },
        { { 0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344 },
          { 0xa4093822, 0x299f31d0 },
          { 0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1 } },
    };
    for (int i = 0; i < 3; i++) {
        uint32_t out[4];
        mt_philox(out, known[i].counter, known[i].key);
        assert_memory_equal(out, known[i].out, sizeof out);
    }
    /* seed 0, stream 0: counter (index / 4, 0, 0, 0), word index % 4 */
    for (uint32_t i = 0; i < 4; i++) assert_int_equal(mt_rng_u32(0, 0, i), known[0].out[i]);
}

/* Mean and variance of 2^16 draws within five standard errors; counts of `below` likewise. */
static void test_draws(void **state)
{
    (void)state;
    enum { N = 1 << 16, BOUND = 10 };
    double u = 0, uu = 0, z = 0, zz = 0;
    int64_t counts[BOUND] = { 0 };
    for (uint64_t i = 0; i < N; i++) {
        double a = mt_rng_uniform(11, 3, i), b = mt_rng_normal(11, 4, i);
        assert_true(a >= 0 && a < 1 && isfinite(b));
        u += a, uu += a * a, z += b, zz += b * b;
        uint64_t k = mt_rng_below(11, 5, i, BOUND);
        assert_true(k < BOUND);
        counts[k]++;
    }
    double error = 5 / sqrt(N);
    assert_true(fabs(u / N - 0.5) < error * sqrt(1.0 / 12));
    assert_true(fabs(uu / N - 1.0 / 3) < error * sqrt(4.0 / 45));
    assert_true(fabs(z / N) < error);
    assert_true(fabs(zz / N - 1) < error * sqrt(2));
    for (int k = 0; k < BOUND; k++)
        assert_true(fabs((double)counts[k] - N / 10.0) < 5 * sqrt(N * 0.1 * 0.9));
    assert_int_equal(mt_rng_below(1, 2, 3, 1), 0);
    assert_true(mt_rng_u32(1, 0, 0) != mt_rng_u32(2, 0, 0));
    assert_true(mt_rng_u32(1, 0, 0) != mt_rng_u32(1, 1, 0));
    assert_true(mt_rng_u32(1, 0, 0) != mt_rng_u32((uint64_t)1 << 32 | 1, 0, 0));
}

/* ---- tensors and groups -----------------------------------------------------------------------
 */

static void test_tensor(void **state)
{
    (void)state;
    float data[24];
    char text[96];
    mt_tensor t = mt_tensor_3d(data, MT_F32, 2, 3, 4);
    assert_int_equal(mt_tensor_count(&t), 24);
    assert_int_equal(mt_tensor_bytes(&t), 96);
    assert_int_equal(mt_tensor_rows(&t), 6);
    assert_int_equal(mt_tensor_cols(&t), 4);
    mt_tensor_format(text, &t);
    assert_string_equal(text, "f32[2,3,4]");
    assert_ok(mt_tensor_check(&t, "x", MT_F32, 3, (int64_t[]){ 2, -1, 4 }));
    assert_fails(mt_tensor_check(&t, "x", MT_F32, 3, (int64_t[]){ 2, -1, 5 }), MT_EINVAL,
                 "x is f32[2,3,4], must be f32[2,*,5]");
    assert_fails(mt_tensor_check(&t, "x", MT_BF16, 3, t.shape), MT_EINVAL, "must be bf16");
    assert_fails(mt_tensor_check(&t, "x", MT_F32, 2, t.shape), MT_EINVAL, "must be f32[2,3]");
    t.data = NULL;
    assert_fails(mt_tensor_check(&t, "x", MT_F32, 3, t.shape), MT_EINVAL, "no data");
    t.shape[1] = 0;
    assert_ok(mt_tensor_check(&t, "x", MT_F32, 3, t.shape));
    mt_tensor scalar = { data, MT_F32, 0, { 0 } };
    assert_int_equal(mt_tensor_count(&scalar), 1);
    assert_int_equal(mt_tensor_cols(&scalar), 1);
    mt_tensor wide = { data, MT_BF16, 4, { INT64_MAX, INT64_MAX, INT64_MAX, INT64_MAX } };
    mt_tensor_format(text, &wide);
    assert_int_equal(text[strlen(text) - 1], ']');
}

static void test_group(void **state)
{
    (void)state;
    int64_t rows[3] = { 2, 0, 5 }, offsets[4] = { 0, 8, 8, 28 };
    mt_group g = mt_group_uniform(3, 4, 5);
    assert_int_equal(mt_group_mode_of(&g), MT_GROUP_UNIFORM);
    assert_int_equal(mt_group_capacity(&g), 60);
    assert_false(mt_group_is_empty(&g));
    assert_int_equal(mt_group_offset(&g, 2), 40);
    assert_ok(mt_group_check_members(&g, "w"));
    g = mt_group_ragged_rows(3, 9, 4, rows, offsets);
    assert_int_equal(mt_group_mode_of(&g), MT_GROUP_VARYING_FIRST);
    assert_int_equal(mt_group_capacity(&g), 36);
    assert_int_equal(mt_group_rows(&g, 2), 5);
    assert_int_equal(mt_group_cols(&g, 2), 4);
    assert_int_equal(mt_group_offset(&g, 2), 8);
    assert_ok(mt_group_check_members(&g, "x"));
    g.m = 6;
    assert_fails(mt_group_check_members(&g, "x"), MT_EINVAL, "capacity of 24");
    g.m = 9, offsets[2] = 9;
    assert_fails(mt_group_check_members(&g, "x"), MT_EINVAL, "member 2 starts at 9");
    offsets[2] = 8, offsets[3] = 29;
    assert_fails(mt_group_check_members(&g, "x"), MT_EINVAL,
                 "offsets end at 29, the members at 28");
    offsets[3] = 28, rows[1] = -1;
    assert_fails(mt_group_check_members(&g, "x"), MT_EINVAL, "member 1 is -1");
    g = mt_group_ragged_rows(0, 9, 4, rows, offsets);
    assert_true(mt_group_is_empty(&g));
    g.members = 3, g.m = 0;
    assert_true(mt_group_is_empty(&g));
    g = (mt_group){ 3, 9, 4, rows, NULL, NULL };
    assert_fails(mt_group_check(&g, "x"), MT_EINVAL, "needs offsets");
    g = (mt_group){ 3, 2, 40, rows, rows, offsets };
    assert_int_equal(mt_group_mode_of(&g), MT_GROUP_VARYING_BOTH);
    assert_fails(mt_group_check(&g, "x"), MT_EINVAL, "m = 1, not 2");
    g = (mt_group){ 3, 2, 40, NULL, rows, offsets };
    assert_int_equal(mt_group_mode_of(&g), MT_GROUP_VARYING_LAST);
    assert_ok(mt_group_check(&g, "x"));
    g = mt_group_uniform(-1, 2, 3);
    assert_fails(mt_group_check(&g, "x"), MT_EINVAL, "members -1");
}

static void test_plain_formats(void **state)
{
    (void)state;
    static const mt_dtype plain[] = { MT_F64, MT_F32, MT_BF16, MT_F16 };
    for (int i = 0; i < 4; i++) {
        const mt_format *f = mt_format_plain(plain[i]), *found;
        assert_non_null(f);
        assert_int_equal(f->dtype, plain[i]);
        assert_int_equal(f->scale, MT_SCALE_NONE);
        assert_ok(mt_format_find(&found, mt_dtype_name(plain[i])));
        assert_ptr_equal(found, f);
    }
    assert_null(mt_format_plain(MT_I32));
    for (int i = 0; i < MT_FORMAT_COUNT; i++) assert_int_equal(mt_formats[i].id, i);
    const mt_format *f;
    assert_fails(mt_format_find(&f, "fp9"), MT_ECONFIG, "nvfp4");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_status),        cmocka_unit_test(test_dtype_names),
        cmocka_unit_test(test_narrow_floats), cmocka_unit_test(test_load_store),
        cmocka_unit_test(test_philox),        cmocka_unit_test(test_draws),
        cmocka_unit_test(test_tensor),        cmocka_unit_test(test_group),
        cmocka_unit_test(test_plain_formats),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
