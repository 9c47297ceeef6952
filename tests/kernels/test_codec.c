/* The element casts against a search of each element's values in f64: over patterns from all of
 * f32, in the scalar form and through the kernels of every set. */
#include <math.h>
#include <string.h>

#include "kernels/codec.h"
#include "tests/kernels/quantize_case.h"

enum { STRIDE = 4099, PATTERNS = (int)(0x100000000 / STRIDE), LINE = 32 };

/* Non-negative values of an element, by code. */
struct values {
    const mt_element_info *e;
    int count;
    double value[128];
};

static struct values values_of(mt_element element)
{
    struct values v = { .e = &mt_elements[element] };
    v.count = v.e->max_code + 1;
    for (int code = 0; code < v.count; code++) {
        int exponent = code >> v.e->mantissa, mantissa = code & ((1 << v.e->mantissa) - 1);
        double fraction = ldexp(mantissa, -v.e->mantissa);
        v.value[code] =
            exponent ? ldexp(1 + fraction, exponent - v.e->bias) : ldexp(fraction, 1 - v.e->bias);
    }
    return v;
}

/* The last code whose value is at most a. */
static int code_below(const struct values *v, double a)
{
    int low = 0, high = v->count;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (v->value[middle] <= a)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static int with_sign(const struct values *v, float x, int code)
{
    return code | (signbit(x) ? 1 << v->e->sign : 0);
}

/* Nearest, ties to the even code. */
static int nearest_code(const struct values *v, float x)
{
    if (isnan(x)) return v->e->nan_code;
    double a = fabs((double)x);
    int low = code_below(v, a), code = low;
    if (low + 1 < v->count) {
        double down = a - v->value[low], up = v->value[low + 1] - a;
        if (up < down || (up == down && low % 2)) code = low + 1;
    }
    return with_sign(v, x, code);
}

static int stochastic_code(const struct values *v, float x, int random)
{
    if (isnan(x)) return v->e->nan_code;
    double a = fmin(fabs((double)x), (double)v->e->max);
    int low = code_below(v, a);
    double step = low + 1 < v->count ? v->value[low + 1] - v->value[low] : 1;
    return with_sign(v, x, low + (random + floor(65536 * (a - v->value[low]) / step) >= 65536));
}

static uint32_t pattern(int i)
{
    return (uint32_t)((uint64_t)i * STRIDE + 1);
}

static void check_scalar_cast(const struct values *v, mt_codec codec, uint32_t bits, int random)
{
    float x = mt_f32_from_bits(bits);
    int code = mt_encode(codec, x), drawn = mt_encode_stochastic(codec, x, random);
    if (code != nearest_code(v, x) || drawn != stochastic_code(v, x, random))
        fail_msg("%s of %a: 0x%02x 0x%02x, must be 0x%02x 0x%02x", v->e->name, (double)x, code,
                 drawn, nearest_code(v, x), stochastic_code(v, x, random));
    if (!isnan(x)) assert_int_equal(mt_encode_number(codec, x), code);
}

static void test_scalar_casts(void **state)
{
    (void)state;
    /* zero, subnormals, the ends of the range, Inf, NaNs; both signs */
    static const uint32_t odd[] = { 0,          1,          0x7fffff,   0x800000,   0x7f7fffff,
                                    0x7f800000, 0x7f800001, 0x7fc00000, 0x7fffffff, 0x3f800000 };
    static const int draws[] = { 0, 1, 0x7fff, 0x8000, 0xffff };
    for (int element = MT_ELEMENT_E4M3; element < MT_ELEMENT_COUNT; element++) {
        const struct values v = values_of((mt_element)element);
        const mt_codec codec = mt_codec_of((mt_element)element);
        for (int i = 0; i < PATTERNS; i++)
            check_scalar_cast(&v, codec, pattern(i), (int)(case_mix((uint64_t)i) & 0xffff));
        for (size_t i = 0; i < 2 * sizeof odd / sizeof odd[0]; i++)
            for (size_t j = 0; j < sizeof draws / sizeof draws[0]; j++)
                check_scalar_cast(&v, codec, odd[i / 2] | (uint32_t)(i % 2) << 31, draws[j]);
        for (int code = 0; code < v.count; code++) {
            assert_true((double)mt_decode(codec, (uint8_t)code) == v.value[code]);
            assert_true((double)mt_decode_number(codec, (uint8_t)code) == v.value[code]);
        }
    }
}

/* f16 as core/dtype.h has it, for every half and over patterns of f32. */
static void test_f16(void **state)
{
    (void)state;
    for (int h = 0; h < 65536; h++) {
        float want = mt_f16_to_f32((uint16_t)h), got = mt_f16_load((uint16_t)h);
        assert_int_equal(mt_f32_bits(got), mt_f32_bits(want));
    }
    for (int i = 0; i < PATTERNS; i++) {
        float x = mt_f32_from_bits(pattern(i));
        assert_int_equal(mt_f16_store(x), mt_f32_to_f16(x));
    }
}

/* The same patterns through a kernel, in the row or the column direction. The mx blocks hold the
 * element's largest value, so that their scale is 1, and no larger one. */
static void cast_through(mt_device *device, const char *spec, mt_element element, bool row)
{
    enum { LINES = 8192 };
    const struct values v = values_of(element);
    struct quantize_case c;
    struct quantize_result r;
    int64_t m = row ? LINES : LINE, k = row ? LINE : LINES;
    bool mx = spec[0] == 'm';
    case_make(&c, MT_GROUP_UNIFORM, 1, &m, &k, 0);
    float *x = test_alloc(c.total, MT_F32);
    for (int64_t i = 0; i < c.total; i++) {
        int64_t place = row ? i % LINE : i / LINES;
        x[i] = mt_f32_from_bits(pattern((int)(i * (PATTERNS / c.total))));
        if (mx && fabsf(x[i]) > v.e->max) x[i] = 0;
        if (mx && place == 0) x[i] = v.e->max;
    }
    result_make(&r, &c, row ? spec : NULL, row ? NULL : spec, false);
    assert_ok(case_quantize(device, &c, x, MT_F32, &r, 0));
    mt_dir dir = row ? MT_ROW : MT_COL;
    const uint8_t *codes = r.q.dir[dir].codes;
    bool packed = r.q.dir[dir].format->codes_per_byte == 2;
    bool turned = !row && r.q.dir[dir].format->column_transposed;
    for (int64_t i = 0; i < c.total; i++) {
        int64_t at = turned ? i % k * m + i / k : i;
        int code = packed ? codes[at / 2] >> (at % 2 * 4) & 15 : codes[at];
        if (code != nearest_code(&v, x[i]))
            fail_msg("%s of %a on %s: 0x%02x, must be 0x%02x", spec, (double)x[i],
                     device->kernel_set, code, nearest_code(&v, x[i]));
    }
    result_free(&r);
    test_free(x);
}

static void casts_on(mt_device *device)
{
    static const struct {
        const char *spec;
        mt_element element;
    } rows[] = {
        { "fp8_delayed", MT_ELEMENT_E4M3 }, { "fp8_delayed:e5m2", MT_ELEMENT_E5M2 },
        { "mxfp8", MT_ELEMENT_E4M3 },       { "mxfp6_e3m2", MT_ELEMENT_E3M2 },
        { "mxfp6_e2m3", MT_ELEMENT_E2M3 },  { "mxfp4", MT_ELEMENT_E2M1 },
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        for (int row = 0; row < 2; row++) cast_through(device, rows[i].spec, rows[i].element, row);
}

static void test_kernel_casts(void **state)
{
    (void)state;
    for_each_kernel_set(casts_on);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_scalar_casts),
        cmocka_unit_test(test_f16),
        cmocka_unit_test(test_kernel_casts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
