/* Quantize and dequantize against golden vectors of an independent implementation
 * (golden_quantize.py, numpy and ml_dtypes), on every kernel set this machine runs. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tests/kernels/quantize_case.h"

#include "tests/kernels/golden_quantize.h"

static const struct element_row {
    const char *format; /* an mx format with these elements */
    const uint32_t *decode;
    int codes; /* of `decode` */
    const uint8_t *cast;
    const uint8_t *e8m0;
    const uint32_t *e8m0_hash; /* where there is no table */
} element_rows[] = {
    { "mxfp8", golden_decode_e4m3, 256, golden_cast_e4m3, golden_e8m0_e4m3, NULL },
    { "mxfp8:e5m2", golden_decode_e5m2, 256, golden_cast_e5m2, NULL, golden_e8m0_e5m2 },
    { "mxfp6_e3m2", golden_decode_e3m2, 64, golden_cast_e3m2, NULL, golden_e8m0_e3m2 },
    { "mxfp6_e2m3", golden_decode_e2m3, 64, golden_cast_e2m3, NULL, golden_e8m0_e2m3 },
    { "mxfp4", golden_decode_e2m1, 16, golden_cast_e2m1, golden_e8m0_e2m1, NULL },
};
enum { ELEMENTS = sizeof element_rows / sizeof element_rows[0] };

static const mt_element_info *element_of(const struct element_row *row)
{
    mt_format_spec spec;
    assert_ok(mt_format_spec_parse(&spec, row->format));
    return &mt_elements[spec.options.element];
}

static uint32_t hash_of(const void *data, size_t bytes)
{
    uint64_t h = 0xCBF29CE484222325u;
    for (size_t i = 0; i < bytes; i++) h = (h ^ ((const uint8_t *)data)[i]) * 0x100000001B3u;
    return (uint32_t)(h >> 32 ^ h);
}

/* ---- elements ---- */

/* Every code, both signs, under the scale 1: one line of codes in blocks of 32. */
static void check_decode(mt_device *device, const struct element_row *row)
{
    struct quantize_case c;
    struct quantize_result r;
    case_make(&c, MT_GROUP_UNIFORM, 1, &(int64_t){ 1 }, &(int64_t){ row->codes }, 0);
    result_make(&r, &c, row->format, NULL, false);
    uint8_t *codes = r.q.dir[MT_ROW].codes;
    for (int i = 0; i < row->codes; i++) {
        if (r.q.dir[MT_ROW].format->codes_per_byte == 1)
            codes[i] = (uint8_t)i;
        else if (i % 2 == 0)
            codes[i / 2] = (uint8_t)(i | (i + 1) << 4);
    }
    memset(r.q.dir[MT_ROW].scales, 127, r.scale_bytes[MT_ROW]);
    uint32_t *got = case_values(device, &r.q, MT_ROW, MT_F32);
    for (int i = 0; i < row->codes; i++)
        if (got[i] != row->decode[i])
            fail_msg("%s code 0x%02x decodes to 0x%08x, must be 0x%08x", row->format, i, got[i],
                     row->decode[i]);
    test_free(got);
    result_free(&r);
}

/* Every E8M0 exponent: code 1.0 decodes to 2^(e - 127), NaN for 255. */
static void check_e8m0_decode(mt_device *device)
{
    enum { N = 256 };
    struct quantize_case c;
    struct quantize_result r;
    case_make(&c, MT_GROUP_UNIFORM, 1, &(int64_t){ N }, &(int64_t){ 1 }, 0);
    result_make(&r, &c, "mxfp8", NULL, false);
    memset(r.q.dir[MT_ROW].codes, 0x38, N);
    for (int e = 0; e < N; e++) ((uint8_t *)r.q.dir[MT_ROW].scales)[e] = (uint8_t)e;
    float *got = case_values(device, &r.q, MT_ROW, MT_F32);
    for (int e = 0; e < 255; e++) assert_true(got[e] == ldexpf(1, e - 127));
    assert_true(isnan(got[255]));
    test_free(got);
    result_free(&r);
}

/* Every E4M3 scale that nvfp4 can store, with every code: RN(code * RN(sf * S_dec)). */
static void check_e4m3_decode(mt_device *device)
{
    enum { SCALES = 127, N = 16 };
    static const float amaxes[] = { 0, 2688, 1.7f, 1e-30f, 3e38f, INFINITY };
    const mt_format_options options = { 0 };
    struct quantize_case c;
    case_make(&c, MT_GROUP_UNIFORM, 1, &(int64_t){ SCALES }, &(int64_t){ N }, 0);
    for (size_t a = 0; a < sizeof amaxes / sizeof amaxes[0]; a++) {
        struct quantize_result r;
        result_make(&r, &c, "nvfp4", NULL, false);
        mt_direction *d = &r.q.dir[MT_ROW];
        d->amax[0] = amaxes[a];
        for (int i = 0; i < SCALES * N / 2; i++)
            ((uint8_t *)d->codes)[i] = (uint8_t)(i * 2 % N | (i * 2 % N + 1) << 4);
        for (int i = 0; i < SCALES; i++) ((uint8_t *)d->scales)[i] = (uint8_t)i;
        float *got = case_values(device, &r.q, MT_ROW, MT_F32);
        for (int i = 0; i < SCALES * N; i++) {
            float sf = mt_f32_from_bits(golden_decode_e4m3[i / N]);
            float dec = sf * mt_nvfp4_decode_scale(&options, amaxes[a]);
            float want = mt_f32_from_bits(golden_decode_e2m1[i % N]) * dec;
            assert_int_equal(mt_f32_bits(got[i]), mt_f32_bits(want));
        }
        test_free(got);
        result_free(&r);
    }
}

/* The values of golden_cast: around value v and around the tie above it. */
static int cast_points(float points[6], const struct element_row *row, int code, int last)
{
    float v[2] = { 0 };
    memcpy(&v[0], &row->decode[code], sizeof v[0]);
    memcpy(&v[1], &row->decode[code < last ? code + 1 : code - 1], sizeof v[1]);
    float above = code < last ? v[1] : 2 * v[0] - v[1], centers[2] = { v[0], (v[0] + above) / 2 };
    for (int i = 0; i < 2; i++) {
        uint32_t u = mt_f32_bits(centers[i]);
        points[3 * i] = mt_f32_from_bits(u ? u - 1 : 0);
        points[3 * i + 1] = centers[i];
        points[3 * i + 2] = mt_f32_from_bits(u + 1);
    }
    return 6;
}

/* Every rounding boundary with its neighbours, both signs. The scale is made 1 by an element in
 * each block: the format's largest value. What lies beyond saturates; fp8_delayed has no such
 * element. */
static void check_cast(mt_device *device, const struct element_row *row)
{
    const mt_element_info *e = element_of(row);
    int last = e->max_code, count = 6 * (last + 1);
    bool fp8 = row->codes == 256;
    struct quantize_case c;
    struct quantize_result r;
    int64_t cols = fp8 ? 2 : 32;
    case_make(&c, MT_GROUP_UNIFORM, 1, &(int64_t){ count }, &cols, 0);
    const char *delayed = e->mantissa == 2 ? "fp8_delayed:e5m2" : "fp8_delayed";
    result_make(&r, &c, fp8 ? delayed : row->format, NULL, false);
    float *x = test_alloc(count * cols, MT_F32);
    for (int code = 0; code <= last; code++) {
        float points[6];
        cast_points(points, row, code, last);
        for (int i = 0; i < 6; i++) {
            float *line = x + (code * 6 + i) * cols;
            for (int64_t j = 0; j < cols; j++) line[j] = 0;
            line[0] = points[i], line[1] = -points[i];
            if (!fp8) line[2] = e->max;
        }
    }
    assert_ok(case_quantize(device, &c, x, MT_F32, &r, 0));
    const uint8_t *codes = r.q.dir[MT_ROW].codes;
    int sign = 1 << e->sign, per_byte = r.q.dir[MT_ROW].format->codes_per_byte;
    for (int i = 0; i < count; i++) {
        if (!fp8 && x[i * cols] > e->max) continue; /* it moves the block's scale */
        const uint8_t *line = codes + i * (cols / per_byte);
        int plus = per_byte == 1 ? line[0] : line[0] & 15,
            minus = per_byte == 1 ? line[1] : line[0] >> 4;
        if (plus != row->cast[i] || minus != (row->cast[i] | sign))
            fail_msg("%s: +-%a has codes 0x%02x 0x%02x, must be 0x%02x and its negative",
                     row->format, (double)x[i * cols], plus, minus, row->cast[i]);
    }
    test_free(x);
    result_free(&r);
}

/* NaN, Inf, what lies far beyond, zeros and subnormals, under the scale 1. */
static void check_odd_values(mt_device *device)
{
    static const uint32_t values[] = { 0x7f800000, 0xff800000, 0x7fc00000, 0xffc00000,
                                       0x7f800001, 0x7f7fffff, 0xff7fffff, 0,
                                       0x80000000, 1,          0x80000001, 0x807fffff };
    static const uint8_t want[2][12] = {
        { 0x7e, 0xfe, 0x7f, 0x7f, 0x7f, 0x7e, 0xfe, 0, 0x80, 0, 0x80, 0x80 },
        { 0x7b, 0xfb, 0x7f, 0x7f, 0x7f, 0x7b, 0xfb, 0, 0x80, 0, 0x80, 0x80 },
    };
    static const char *const specs[2] = { "fp8_delayed", "fp8_delayed:e5m2" };
    struct quantize_case c;
    case_make(&c, MT_GROUP_UNIFORM, 1, &(int64_t){ 1 }, &(int64_t){ 12 }, 0);
    for (int i = 0; i < 2; i++) {
        struct quantize_result r;
        uint32_t x[12];
        memcpy(x, values, sizeof x);
        result_make(&r, &c, specs[i], specs[i], false);
        assert_ok(case_quantize(device, &c, x, MT_F32, &r, 0));
        assert_memory_equal(r.q.dir[MT_ROW].codes, want[i], sizeof want[i]);
        assert_memory_equal(r.q.dir[MT_COL].codes, want[i], sizeof want[i]);
        assert_true(isinf(r.q.dir[MT_ROW].amax[0])); /* NaN never wins */
        result_free(&r);
    }
}

static void elements_on(mt_device *device)
{
    for (int i = 0; i < ELEMENTS; i++) {
        check_decode(device, &element_rows[i]);
        check_cast(device, &element_rows[i]);
    }
    check_e8m0_decode(device);
    check_e4m3_decode(device);
    check_odd_values(device);
}

static void test_elements(void **state)
{
    (void)state;
    for_each_kernel_set(elements_on);
}

/* ---- scales ---- */

/* E8M0 scales around every exponent's thresholds, rounded up and down. */
static void check_e8m0(mt_device *device, const struct element_row *row)
{
    enum { EXPONENTS = 255, POINTS = 6, N = EXPONENTS * POINTS };
    const mt_element_info *e = element_of(row);
    struct quantize_case c;
    case_make(&c, MT_GROUP_UNIFORM, 1, &(int64_t){ N }, &(int64_t){ 1 }, 0);
    uint32_t *x = test_alloc(N, MT_F32);
    for (int i = 0; i < EXPONENTS; i++)
        for (int j = 0; j < 2; j++) {
            double center = ldexp(j ? (double)e->max : 1, i - 127);
            uint32_t u = center < 0x1.fffffep127 ? mt_f32_bits((float)center) : 0x7f7fffffu;
            uint32_t *at = x + i * POINTS + j * 3;
            at[0] = u ? u - 1 : 0, at[1] = u, at[2] = u < 0x7f7fffffu ? u + 1 : u;
        }
    uint8_t got[N][2];
    for (int floor = 0; floor < 2; floor++) {
        struct quantize_result r;
        char spec[64];
        snprintf(spec, sizeof spec, "%s%cscale=%s", row->format,
                 strchr(row->format, ':') ? '+' : ':', floor ? "floor" : "up");
        result_make(&r, &c, spec, NULL, false);
        assert_ok(case_quantize(device, &c, x, MT_F32, &r, 0));
        for (int i = 0; i < N; i++) got[i][floor] = ((uint8_t *)r.q.dir[MT_ROW].scales)[i];
        result_free(&r);
    }
    if (row->e8m0)
        assert_memory_equal(got, row->e8m0, sizeof got);
    else
        assert_int_equal(hash_of(got, sizeof got), row->e8m0_hash[0]);
    test_free(x);
}

static void scales_on(mt_device *device)
{
    for (int i = 0; i < ELEMENTS; i++) check_e8m0(device, &element_rows[i]);
    struct quantize_case c;
    case_make(&c, MT_GROUP_UNIFORM, 1, &(int64_t){ 1 }, &(int64_t){ 1 }, 0);
    for (size_t i = 0; i < sizeof golden_f / sizeof golden_f[0]; i++) {
        const struct golden_f *g = &golden_f[i];
        char spec[64];
        for (int block = 0; block < 2; block++) { /* fp8_tensor, fp8_block */
            struct quantize_result r;
            uint32_t x = g->amax;
            snprintf(spec, sizeof spec, "%s:%s+pow2=%s", block ? "fp8_block" : "fp8_tensor",
                     g->max == 448 ? "e4m3" : "e5m2", g->pow2 ? "on" : "off");
            result_make(&r, &c, spec, NULL, false);
            assert_ok(case_quantize(device, &c, &x, MT_F32, &r, 0));
            assert_memory_equal(r.q.dir[MT_ROW].scales, &g->inverse, 4);
            result_free(&r);
        }
    }
    for (size_t i = 0; i < sizeof golden_nv / sizeof golden_nv[0]; i++) {
        const struct golden_nv *g = &golden_nv[i];
        mt_format_options options = { .four_over_six = g->bound == 448 ? 0 : g->bound };
        float amax = mt_f32_from_bits(g->amax);
        assert_int_equal(mt_f32_bits(mt_nvfp4_encode_scale(&options, amax)), g->encode);
        assert_int_equal(mt_f32_bits(mt_nvfp4_decode_scale(&options, amax)), g->decode);
    }
}

static void test_scales(void **state)
{
    (void)state;
    for_each_kernel_set(scales_on);
}

/* ---- whole tensors: every format and option, four modes, both directions ---- */

enum { GROUPS = 4, MEMBERS = 6, PARTS = 4 };

static const struct golden_group {
    mt_group_mode mode;
    int64_t n, rows[MEMBERS], cols[MEMBERS];
} golden_groups[GROUPS] = {
    { MT_GROUP_UNIFORM, 3, { 33 }, { 50 } },
    { MT_GROUP_VARYING_FIRST, 6, { 0, 1, 7, 16, 33, 129 }, { 97 } },
    { MT_GROUP_VARYING_LAST, 6, { 20 }, { 0, 1, 7, 16, 33, 130 } },
    { MT_GROUP_VARYING_BOTH, 4, { 1, 130, 0, 17 }, { 259, 5, 7, 48 } },
};

/* Hashes of a direction's parts, as golden_quantize.py makes them. */
static void hash_parts(uint32_t parts[PARTS], mt_device *device, const struct quantize_result *r,
                       mt_dir dir, const struct quantize_case *c)
{
    const mt_direction *d = &r->q.dir[dir];
    uint32_t *values = case_values(device, &r->q, dir, MT_F32);
    for (int64_t i = 0; i < c->total; i++)
        if ((values[i] & 0x7fffffffu) > 0x7f800000u) values[i] = 0x7fc00000u;
    for (int64_t i = c->total; i < mt_group_capacity(&c->group); i++)
        assert_int_equal(values[i], 0xffffffffu); /* the tail is not written */
    parts[0] = hash_of(d->codes, r->code_bytes[dir]);
    parts[1] = hash_of(d->scales, r->scale_bytes[dir]);
    parts[2] = hash_of(d->amax, (size_t)c->group.members * sizeof(float));
    parts[3] = hash_of(values, (size_t)c->total * sizeof(float));
    test_free(values);
}

static void check_tensor(mt_device *device, int spec, int group, bool row, bool col)
{
    static const mt_dtype types[3] = { MT_F32, MT_BF16, MT_F16 };
    static const char *const part_names[PARTS] = { "codes", "scales", "amax", "dequantized" };
    const struct golden_group *g = &golden_groups[group];
    const char *text = golden_specs[spec];
    mt_format_spec parsed;
    assert_ok(mt_format_spec_parse(&parsed, text));
    bool tiles = parsed.format->scale == MT_SCALE_E8M0 || parsed.format->scale == MT_SCALE_E4M3;
    mt_dtype dtype = types[(spec + group) % 3];
    struct quantize_case c;
    struct quantize_result r;
    case_make(&c, g->mode, g->n, g->rows, g->cols, 3);
    void *x = case_source(&c, dtype, (uint64_t)(100 + spec), (spec + group) % 2);
    result_make(&r, &c, row ? text : NULL, col ? text : NULL, tiles && group % 2);
    assert_ok(case_quantize(device, &c, x, dtype, &r, (uint32_t)(1 + spec)));
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
        if (!r.q.dir[dir].format) continue;
        uint32_t parts[PARTS];
        hash_parts(parts, device, &r, (mt_dir)dir, &c);
        for (int p = 0; p < PARTS; p++) {
            size_t at =
                (((size_t)spec * GROUPS + (size_t)group) * 2 + (size_t)dir) * PARTS + (size_t)p;
            if (parts[p] != golden_tensors[at])
                fail_msg("%s, group %d, %s: %s differ", text, group, dir ? "column" : "row",
                         part_names[p]);
        }
    }
    result_free(&r);
    test_free(x);
}

static void tensors_on(mt_device *device)
{
    for (size_t spec = 0; spec < sizeof golden_specs / sizeof golden_specs[0]; spec++)
        for (int group = 0; group < GROUPS; group++) {
            check_tensor(device, (int)spec, group, true, true);
            check_tensor(device, (int)spec, group, true, false);
            check_tensor(device, (int)spec, group, false, true);
        }
}

static void test_tensors(void **state)
{
    (void)state;
    for_each_kernel_set(tensors_on);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_elements),
        cmocka_unit_test(test_scales),
        cmocka_unit_test(test_tensors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
