/* What quantization must obey whatever the values: NUMERICS sections 1 to 3 as properties. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tests/kernels/quantize_case.h"

enum { MAX_MEMBERS = 300 };

static const char *const formats[] = { "fp8_tensor",
                                       "fp8_tensor:e5m2+pow2",
                                       "fp8_delayed",
                                       "fp8_block",
                                       "fp8_block:2d",
                                       "mxfp8",
                                       "mxfp8:e5m2+scale=floor",
                                       "mxfp8:2d",
                                       "mxfp6_e3m2",
                                       "mxfp6_e2m3",
                                       "mxfp4",
                                       "mxfp4:2d",
                                       "nvfp4",
                                       "nvfp4:2d",
                                       "nvfp4:4over6",
                                       "mxfp6_e2m3:2d",
                                       "nvfp4:2d+4over6=448+err=sq",
                                       "f32",
                                       "f16",
                                       "bf16" };
enum { FORMATS = sizeof formats / sizeof formats[0] };

static mt_stream stream_of(mt_device *device)
{
    return (mt_stream){ device, NULL };
}

/* ---- rows and columns ---- */

/* A direction's values and amax are those of the other direction of the transpose; so are the codes
 * where the column direction is stored transposed. */
static void test_row_is_column_of_transpose(void **state)
{
    (void)state;
    static const int64_t sizes[][2] = {
        { 1, 1 }, { 7, 16 }, { 33, 50 }, { 129, 31 }, { 130, 257 }
    };
    for (int f = 0; f < FORMATS; f++)
        for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
            int64_t m = sizes[s][0], k = sizes[s][1];
            struct quantize_case c, t;
            struct quantize_result row, col;
            case_make(&c, MT_GROUP_UNIFORM, 1, &m, &k, 0);
            case_make(&t, MT_GROUP_UNIFORM, 1, &k, &m, 0);
            float *x = case_source(&c, MT_F32, (uint64_t)f, s % 2), *xt = test_alloc(m * k, MT_F32);
            for (int64_t i = 0; i < m * k; i++) xt[i % k * m + i / k] = x[i];
            result_make(&row, &c, formats[f], NULL, false);
            result_make(&col, &t, NULL, formats[f], false);
            assert_ok(case_quantize(test_device(), &c, x, MT_F32, &row, 0));
            assert_ok(case_quantize(test_device(), &t, xt, MT_F32, &col, 0));
            const mt_format *format = row.q.dir[MT_ROW].format;
            if (format->column_transposed) {
                assert_memory_equal(row.q.dir[MT_ROW].codes, col.q.dir[MT_COL].codes,
                                    row.code_bytes[0]);
                assert_memory_equal(row.q.dir[MT_ROW].scales, col.q.dir[MT_COL].scales,
                                    row.scale_bytes[0]);
            }
            assert_memory_equal(row.q.dir[MT_ROW].amax, col.q.dir[MT_COL].amax, sizeof(float));
            uint32_t *a = case_values(test_device(), &row.q, MT_ROW, MT_F32);
            uint32_t *b = case_values(test_device(), &col.q, MT_COL, MT_F32);
            for (int64_t i = 0; i < m * k; i++) assert_int_equal(a[i], b[i % k * m + i / k]);
            test_free(a), test_free(b), test_free(x), test_free(xt);
            result_free(&row), result_free(&col);
        }
}

/* Code (r, c) of a member [m, k] that is all of its group. */
static int code_at(const mt_direction *d, mt_dir dir, int64_t m, int64_t k, int64_t r, int64_t c)
{
    mt_direction_shape s = mt_direction_shape_of(d, dir, m, k);
    int64_t line = s.transposed ? c : r, at = s.transposed ? r : c;
    const uint8_t *codes = (const uint8_t *)d->codes + line * s.code_pitch;
    return d->format->codes_per_byte == 1 ? codes[at] : codes[at / 2] >> (at % 2 * 4) & 15;
}

/* Square blocks: both directions hold the same codes and values, under sr and 4over6 too. */
static void test_square_blocks(void **state)
{
    (void)state;
    static const char *const square[] = { "fp8_block:2d", "mxfp8:2d+sr", "mxfp6_e2m3:2d",
                                          "mxfp4:2d+sr",  "nvfp4:2d",    "nvfp4:2d+sr+4over6" };
    struct quantize_case c;
    case_make(&c, MT_GROUP_VARYING_FIRST, 3, (int64_t[]){ 50, 0, 130 }, &(int64_t){ 77 }, 0);
    for (size_t f = 0; f < sizeof square / sizeof square[0]; f++) {
        struct quantize_result r;
        void *x = case_source(&c, MT_BF16, f, false);
        result_make(&r, &c, square[f], square[f], false);
        assert_ok(case_quantize(test_device(), &c, x, MT_BF16, &r, 5));
        void *a = case_values(test_device(), &r.q, MT_ROW, MT_F32);
        void *b = case_values(test_device(), &r.q, MT_COL, MT_F32);
        assert_memory_equal(a, b, (size_t)c.total * sizeof(float));
        mt_qtensor views[3];
        assert_ok(mt_qtensor_split(views, &r.q));
        for (int i = 0; i < 3; i++)
            for (int64_t e = 0; e < c.first[i] * 77; e++)
                assert_int_equal(
                    code_at(&views[i].dir[MT_ROW], MT_ROW, c.first[i], 77, e / 77, e % 77),
                    code_at(&views[i].dir[MT_COL], MT_COL, c.first[i], 77, e / 77, e % 77));
        test_free(a), test_free(b), test_free(x);
        result_free(&r);
    }
}

/* ---- groups ---- */

/* The group's parts equal each member quantized by itself. */
static void check_members(const struct quantize_case *c, const char *spec, mt_dtype dtype,
                          bool swizzled)
{
    struct quantize_result all, one;
    mt_qtensor views[MAX_MEMBERS];
    char *x = case_source(c, dtype, 77, true);
    result_make(&all, c, spec, spec, swizzled);
    assert_ok(case_quantize(test_device(), c, x, dtype, &all, 9));
    assert_ok(mt_qtensor_split(views, &all.q));
    for (int64_t i = 0; i < c->group.members; i++) {
        struct quantize_case single;
        case_make(&single, MT_GROUP_UNIFORM, 1, &c->first[i], &c->last[i], 0);
        result_make(&one, &single, spec, spec, swizzled);
        mt_qtensor source =
            mt_qtensor_plain(single.group, dtype, x + (size_t)c->offsets[i] * mt_dtype_size(dtype));
        mt_stream stream = stream_of(test_device());
        assert_ok(mt_quantize(&stream, &(struct mt_quantize_args){ .dtype = MT_F32,
                                                                   .src = &source,
                                                                   .out = &one.q,
                                                                   .seed = 9,
                                                                   .stream = 2,
                                                                   .step = 3,
                                                                   .first_member = (uint32_t)i }));
        for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
            const mt_direction *a = &views[i].dir[dir], *b = &one.q.dir[dir];
            assert_memory_equal(a->codes, b->codes, one.code_bytes[dir]);
            assert_memory_equal(a->scales, b->scales, one.scale_bytes[dir]);
            assert_memory_equal(a->amax, b->amax, sizeof(float));
        }
        result_free(&one);
    }
    result_free(&all);
    test_free(x);
}

static void test_grouped_is_member_by_member(void **state)
{
    (void)state;
    static const int64_t rows[] = { 0, 1, 7, 16, 33, 127, 128, 129 },
                         cols[] = { 40, 3, 0, 65, 16, 1, 129, 32 };
    static const char *const specs[] = { "fp8_tensor",
                                         "fp8_block",
                                         "mxfp8:sr",
                                         "mxfp4:rht",
                                         "nvfp4:sr+rht+4over6",
                                         "nvfp4:source=dequantized",
                                         "fp8_block:2d",
                                         "fp8_delayed",
                                         "mxfp6_e3m2:sr",
                                         "mxfp6_e2m3:2d",
                                         "f16" };
    struct quantize_case c;
    for (size_t f = 0; f < sizeof specs / sizeof specs[0]; f++)
        for (int mode = 0; mode < 4; mode++) {
            case_make(&c, (mt_group_mode)mode, 8,
                      mode == MT_GROUP_UNIFORM ? &(int64_t){ 33 } : rows, cols, 2);
            check_members(&c, specs[f], mode % 2 ? MT_BF16 : MT_F32,
                          specs[f][0] == 'm' && mode == MT_GROUP_VARYING_BOTH);
        }
    for (int i = 0; i < 8; i++) {
        case_make(&c, MT_GROUP_UNIFORM, 3, &rows[i], &cols[7 - i], 0);
        for (size_t f = 0; f < sizeof specs / sizeof specs[0]; f++)
            check_members(&c, specs[f], MT_BF16, false);
    }
    int64_t many[MAX_MEMBERS], wide[MAX_MEMBERS];
    for (int i = 0; i < MAX_MEMBERS; i++) many[i] = rows[i % 5], wide[i] = rows[(i + 2) % 5];
    many[0] = 7, wide[0] = 24; /* what a uniform mode takes */
    for (int mode = 0; mode < 4; mode++) {
        case_make(&c, (mt_group_mode)mode, MAX_MEMBERS, many, wide, 5);
        check_members(&c, "nvfp4:sr", MT_F16, true);
        check_members(&c, "fp8_tensor", MT_BF16, false);
        check_members(&c, "mxfp8:rht", MT_F32, false);
    }
    case_make(&c, MT_GROUP_UNIFORM, 0, NULL, NULL, 0);
    check_members(&c, "mxfp8", MT_F32, false);
}

/* ---- views ---- */

/* A view reads, and requantizes, as its part of the group does. */
static void check_view(const struct quantize_case *c, const mt_qtensor *view, int64_t i, mt_dir dir,
                       const float *values, const mt_qtensor *again)
{
    mt_stream stream = stream_of(test_device());
    size_t bytes = (size_t)(c->first[i] * c->last[i]) * sizeof(float);
    void *y = case_values(test_device(), view, dir, MT_F32);
    assert_memory_equal(y, values + c->offsets[i], bytes);
    struct quantize_case single;
    struct quantize_result r;
    case_make(&single, MT_GROUP_UNIFORM, 1, &c->first[i], &c->last[i], 0);
    result_make(&r, &single, "mxfp8", "nvfp4", false);
    assert_ok(mt_quantize(
        &stream,
        &(struct mt_quantize_args){ .dtype = MT_F32, .src = view, .src_dir = dir, .out = &r.q }));
    for (int d = 0; d < MT_DIR_COUNT; d++) {
        assert_memory_equal(r.q.dir[d].codes, again->dir[d].codes, r.code_bytes[d]);
        assert_memory_equal(r.q.dir[d].scales, again->dir[d].scales, r.scale_bytes[d]);
    }
    result_free(&r);
    test_free(y);
}

/* Every format, direction and shape mode, with swizzled scales where there are any: the direction
 * selected from the group, and its members, by themselves and by splitting. */
static void check_views(const struct quantize_case *c, const char *spec, bool swizzled)
{
    struct quantize_result all, to;
    mt_stream stream = stream_of(test_device());
    float *x = case_source(c, MT_F32, 5, false);
    result_make(&all, c, spec, spec, swizzled);
    assert_ok(case_quantize(test_device(), c, x, MT_F32, &all, 9));
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
        mt_qtensor views[8], again[8], one, selected = mt_qtensor_select(&all.q, (mt_dir)dir);
        assert_null(selected.dir[!dir].format);
        float *values = case_values(test_device(), &selected, (mt_dir)dir, MT_F32);
        result_make(&to, c, "mxfp8", "nvfp4", false);
        assert_ok(mt_quantize(&stream, &(struct mt_quantize_args){ .dtype = MT_F32,
                                                                   .src = &selected,
                                                                   .src_dir = (mt_dir)dir,
                                                                   .out = &to.q }));
        assert_ok(mt_qtensor_split(views, &selected));
        assert_ok(mt_qtensor_split(again, &to.q));
        for (int64_t i = 0; i < c->group.members; i++) {
            assert_ok(mt_qtensor_member(&one, &all.q, i));
            assert_ptr_equal(one.dir[dir].codes, views[i].dir[dir].codes);
            check_view(c, &one, i, (mt_dir)dir, values, &again[i]);
        }
        result_free(&to);
        test_free(values);
    }
    result_free(&all);
    test_free(x);
}

static void test_views(void **state)
{
    (void)state;
    static const int64_t rows[] = { 0, 1, 7, 33, 129 }, cols[] = { 40, 3, 0, 65, 17 };
    struct quantize_case c;
    for (int f = 0; f < FORMATS; f++)
        for (int mode = 0; mode < 4; mode++) {
            bool tiles = formats[f][0] == 'm' || formats[f][0] == 'n';
            case_make(&c, (mt_group_mode)mode, 5,
                      mode == MT_GROUP_UNIFORM ? &(int64_t){ 33 } : rows, cols, 2);
            check_views(&c, formats[f], false);
            if (tiles) check_views(&c, formats[f], true);
        }
}

/* ---- stochastic rounding ---- */

/* The mean over 10^6 draws is x within 5 standard errors, for steps of every kind; values of the
 * grid stay. */
static void test_sr_unbiased(void **state)
{
    (void)state;
    enum { N = 1000, TENSORS = 1000 };
    static const struct {
        const char *spec; /* whole-member or block scale 1 by an element `top` */
        float x, top;
    } rows[] = {
        { "fp8_delayed:sr", 1.03f, 0 },
        { "fp8_delayed:sr", -0.0027f, 0 },
        { "fp8_delayed:e5m2+sr", 5.3f, 0 },
        { "mxfp6_e3m2:sr", 0.101f, 28 },
        { "mxfp6_e2m3:sr", -3.3f, 7.5f },
        { "mxfp4:sr", 0.2f, 6 },
        { "mxfp4:sr", 3.9f, 6 },
        { "nvfp4:sr", 4.25f, 2688 },
        { "mxfp4:sr", 0.5f, 6 },
    };
    struct quantize_case c;
    case_make(&c, MT_GROUP_UNIFORM, 1, &(int64_t){ TENSORS }, &(int64_t){ N }, 0);
    float *x = test_alloc(c.total, MT_F32);
    for (size_t f = 0; f < sizeof rows / sizeof rows[0]; f++) {
        struct quantize_result r;
        bool nvfp4 = rows[f].spec[0] == 'n';
        for (int64_t i = 0; i < c.total; i++) {
            bool top = rows[f].top && i % N % 16 == 0;
            x[i] = top ? (nvfp4 && i ? 6 : rows[f].top) : rows[f].x; /* nvfp4: block scales of 1 */
        }
        result_make(&r, &c, rows[f].spec, NULL, false);
        assert_ok(case_quantize(test_device(), &c, x, MT_F32, &r, (uint32_t)f));
        float *y = case_values(test_device(), &r.q, MT_ROW, MT_F32);
        double sum = 0, squares = 0;
        int64_t count = 0;
        for (int64_t i = N; i < c.total; i++) {
            if (rows[f].top && i % N % 16 == 0) continue;
            double d = (double)y[i] - (double)rows[f].x;
            sum += d, squares += d * d, count++;
        }
        double error = sqrt(squares / (double)count / (double)count);
        if (fabs(sum / (double)count) > 5 * error)
            fail_msg("%s of %g: mean error %g over %lld draws, standard error %g", rows[f].spec,
                     (double)rows[f].x, sum / (double)count, (long long)count, error);
        test_free(y);
        result_free(&r);
    }
    test_free(x);
}

/* The same bits for any number of threads and kernel set, and for any part of a group. */
static void test_sr_is_a_function_of_place(void **state)
{
    (void)state;
    struct quantize_case c, part;
    struct quantize_result whole, other, piece;
    case_make(&c, MT_GROUP_UNIFORM, 1, &(int64_t){ 300 }, &(int64_t){ 70 }, 0);
    case_make(&part, MT_GROUP_UNIFORM, 1, &(int64_t){ 300 - 160 }, &(int64_t){ 70 }, 0);
    float *x = case_source(&c, MT_F32, 4, false);
    result_make(&whole, &c, "mxfp4:sr", "mxfp8:sr", false);
    assert_ok(case_quantize(test_device(), &c, x, MT_F32, &whole, 11));
    for (int threads = 1; threads <= 4; threads++) {
        mt_device *device;
        assert_ok(mt_device_open(&device, "cpu", "portable", threads));
        result_make(&other, &c, "mxfp4:sr", "mxfp8:sr", false);
        assert_ok(case_quantize(device, &c, x, MT_F32, &other, 11));
        assert_same_direction(&whole, &other, MT_ROW);
        assert_same_direction(&whole, &other, MT_COL);
        result_free(&other);
        mt_device_destroy(&device);
    }
    /* rows 160 on: a multiple of the block, so scales agree too */
    mt_qtensor source = mt_qtensor_plain(part.group, MT_F32, x + 160 * 70);
    mt_stream stream = stream_of(test_device());
    result_make(&piece, &part, "mxfp4:sr", "mxfp8:sr", false);
    assert_ok(mt_quantize(&stream, &(struct mt_quantize_args){ .dtype = MT_F32,
                                                               .src = &source,
                                                               .out = &piece.q,
                                                               .seed = 11,
                                                               .stream = 2,
                                                               .step = 3,
                                                               .first_row = 160 }));
    assert_memory_equal((char *)whole.q.dir[MT_ROW].codes + 160 * 35, piece.q.dir[MT_ROW].codes,
                        piece.code_bytes[MT_ROW]);
    assert_memory_equal((char *)whole.q.dir[MT_COL].codes + 160 * 70, piece.q.dir[MT_COL].codes,
                        piece.code_bytes[MT_COL]);
    result_make(&other, &c, "mxfp4:sr", "mxfp8:sr", false);
    assert_ok(case_quantize(test_device(), &c, x, MT_F32, &other, 12));
    assert_memory_not_equal(whole.q.dir[MT_ROW].codes, other.q.dir[MT_ROW].codes,
                            whole.code_bytes[MT_ROW]);
    result_free(&other), result_free(&piece), result_free(&whole);
    test_free(x);
}

/* ---- rht, 4over6 ---- */

/* Small integers survive rotation and rounding exactly, so the products of rotated columns must be
 * those of the columns, to the last bit; rows past the last whole 16 are not rotated. */
static void test_rht_is_orthogonal(void **state)
{
    (void)state;
    enum { K = 5 };
    static const int64_t rows[] = { 1, 15, 16, 17, 40, 130, 144 };
    for (size_t s = 0; s < sizeof rows / sizeof rows[0]; s++) {
        struct quantize_case c;
        struct quantize_result r;
        int64_t m = rows[s];
        case_make(&c, MT_GROUP_UNIFORM, 1, &m, &(int64_t){ K }, 0);
        float *x = test_alloc(m * K, MT_F32);
        for (int64_t i = 0; i < m * K; i++)
            x[i] = 4 * (float)((int)(case_mix((uint64_t)i) % 3) - 1);
        result_make(&r, &c, NULL, "mxfp8:rht", false);
        assert_ok(case_quantize(test_device(), &c, x, MT_F32, &r, 0));
        float *y = case_values(test_device(), &r.q, MT_COL, MT_F32);
        bool rotated = false;
        for (int a = 0; a < K; a++)
            for (int b = 0; b < K; b++) {
                double plain = 0, turned = 0;
                for (int64_t i = 0; i < m; i++) {
                    plain += (double)x[i * K + a] * (double)x[i * K + b];
                    turned += (double)y[i * K + a] * (double)y[i * K + b];
                    rotated |= x[i * K + a] != y[i * K + a];
                }
                assert_true(plain == turned);
            }
        assert_int_equal(rotated, m >= 16);
        for (int64_t i = m / 16 * 16 * K; i < m * K; i++) assert_true(x[i] == y[i]);
        test_free(y), test_free(x);
        result_free(&r);
    }
}

/* The error of a block as NUMERICS measures it, sequentially, for one candidate scale. */
static float candidate_error(const float *x, float wanted, float amax, float bound, bool squares)
{
    static const float grid[8] = { 0, 0.5f, 1, 1.5f, 2, 3, 4, 6 };
    struct quantize_case c;
    struct quantize_result r;
    mt_format_options options = { .four_over_six = (int)bound };
    case_make(&c, MT_GROUP_UNIFORM, 1, &(int64_t){ 1 }, &(int64_t){ 1 }, 0);
    result_make(&r, &c, "fp8_delayed", NULL, false); /* the cast to E4M3 */
    assert_ok(case_quantize(test_device(), &c, &wanted, MT_F32, &r, 0));
    float *sf = case_values(test_device(), &r.q, MT_ROW, MT_F32), sum = 0;
    float dec = *sf * mt_nvfp4_decode_scale(&options, amax), enc = fminf(1 / dec, 0x1.fffffep127f);
    for (int i = 0; i < 16; i++) {
        float y = fabsf(x[i] * enc), q = 0;
        for (int g = 1; g < 8; g++) /* nearest; ties to the even code */
            if (fabsf(grid[g] - y) < fabsf(q - y) ||
                (fabsf(grid[g] - y) == fabsf(q - y) && g % 2 == 0))
                q = grid[g];
        float d = fabsf(copysignf(q, x[i]) * *sf * amax / (6 * bound) - x[i]);
        sum += squares ? d * d : d;
    }
    test_free(sf);
    result_free(&r);
    return sum;
}

/* Each block takes the better of two scales: never worse than its own map-to-6 candidate. */
static void test_4over6_chooses_the_better(void **state)
{
    (void)state;
    enum { BLOCKS = 200 };
    int fours = 0;
    struct quantize_case c;
    case_make(&c, MT_GROUP_UNIFORM, 1, &(int64_t){ BLOCKS }, &(int64_t){ 16 }, 0);
    for (int v = 0; v < 4; v++) {
        float bound = v & 1 ? 448 : 256;
        char spec[64];
        struct quantize_result r;
        snprintf(spec, sizeof spec, "nvfp4:4over6=%d+err=%s", (int)bound, v & 2 ? "sq" : "abs");
        float *x = test_alloc(c.total, MT_F32);
        test_random(x, c.total, MT_F32, 2, (uint64_t)v);
        result_make(&r, &c, spec, NULL, false);
        assert_ok(case_quantize(test_device(), &c, x, MT_F32, &r, 0));
        float amax = r.q.dir[MT_ROW].amax[0];
        mt_format_options options = { .four_over_six = (int)bound };
        float s_enc = mt_nvfp4_encode_scale(&options, amax),
              s_dec = mt_nvfp4_decode_scale(&options, amax);
        float *y = case_values(test_device(), &r.q, MT_ROW, MT_F32);
        for (int b = 0; b < BLOCKS; b++) {
            float most = 0, error = 0;
            for (int i = 0; i < 16; i++) most = fmaxf(most, fabsf(x[b * 16 + i]));
            float base = most / 6 * s_enc;
            float six = candidate_error(x + b * 16, base, amax, bound, v & 2);
            float four = candidate_error(x + b * 16, fminf(1.5f * base, 448), amax, bound, v & 2);
            float sf = mt_f32_from_bits(0); /* the scale that was stored, decoded by hand */
            uint8_t code = ((uint8_t *)r.q.dir[MT_ROW].scales)[b];
            sf = ldexpf((float)(code >> 3 ? 8 + (code & 7) : code & 7),
                        (code >> 3 ? code >> 3 : 1) - 10);
            for (int i = 0; i < 16; i++) { /* of what was stored: q sf = value / S_dec */
                float q = rintf(y[b * 16 + i] / (sf * s_dec) * 2) / 2;
                float d = fabsf(q * sf * amax / (6 * bound) - x[b * 16 + i]);
                error += v & 2 ? d * d : d;
            }
            assert_true(error == (four < six ? four : six));
            assert_true(error <= six);
            fours += four < six;
        }
        test_free(y), test_free(x);
        result_free(&r);
    }
    assert_in_range(fours, BLOCKS / 2, 4 * BLOCKS - BLOCKS / 2); /* both happen */
}

/* ---- requantize ---- */

/* `src`'s direction `dir` requantized equals its dequantized `values` quantized, in both
 * directions.
 */
static void check_requantize(const struct quantize_case *c, const mt_qtensor *src, mt_dir dir,
                             float *values, const char *to)
{
    struct quantize_result direct, indirect;
    mt_stream stream = stream_of(test_device());
    result_make(&indirect, c, to, to, false);
    assert_ok(case_quantize(test_device(), c, values, MT_F32, &indirect, 0));
    result_make(&direct, c, to, to, false);
    assert_ok(mt_quantize(&stream, &(struct mt_quantize_args){ .dtype = MT_F32,
                                                               .src = src,
                                                               .src_dir = dir,
                                                               .out = &direct.q,
                                                               .stream = 2,
                                                               .step = 3 }));
    assert_same_direction(&direct, &indirect, MT_ROW);
    assert_same_direction(&direct, &indirect, MT_COL);
    result_free(&direct), result_free(&indirect);
}

/* From a quantized source, either direction of it: as if its dequantized values had been given. */
static void test_requantize(void **state)
{
    (void)state;
    static const char *const sources[] = { "mxfp8",        "nvfp4",      "fp8_tensor",
                                           "fp8_block:2d", "mxfp6_e3m2", "mxfp4" };
    static const char *const results[] = { "nvfp4",      "mxfp8:sr",     "fp8_block", "mxfp4:rht",
                                           "fp8_tensor", "nvfp4:sr+rht", "bf16" };
    struct quantize_case c;
    case_make(&c, MT_GROUP_VARYING_FIRST, 3, (int64_t[]){ 33, 0, 140 }, &(int64_t){ 70 }, 0);
    void *x = case_source(&c, MT_BF16, 3, false);
    for (size_t s = 0; s < sizeof sources / sizeof sources[0]; s++)
        for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
            struct quantize_result first;
            result_make(&first, &c, dir ? NULL : sources[s], dir ? sources[s] : NULL, s < 2);
            assert_ok(case_quantize(test_device(), &c, x, MT_BF16, &first, 0));
            float *values = case_values(test_device(), &first.q, (mt_dir)dir, MT_F32);
            for (size_t t = 0; t < sizeof results / sizeof results[0]; t++)
                check_requantize(&c, &first.q, (mt_dir)dir, values, results[t]);
            result_free(&first);
            test_free(values);
        }
    test_free(x);
}

/* Values of a grid stay themselves where scales are powers of two or given. */
static void test_requantize_is_idempotent(void **state)
{
    (void)state;
    static const char *const specs[] = { "fp8_delayed", "fp8_block",  "fp8_block:2d", "mxfp8",
                                         "mxfp8:e5m2",  "mxfp6_e3m2", "mxfp6_e2m3",   "mxfp4:2d" };
    struct quantize_case c;
    case_make(&c, MT_GROUP_VARYING_LAST, 3, &(int64_t){ 70 }, (int64_t[]){ 33, 0, 140 }, 0);
    void *x = case_source(&c, MT_F32, 8, false);
    for (size_t f = 0; f < sizeof specs / sizeof specs[0]; f++) {
        struct quantize_result once, again;
        result_make(&once, &c, specs[f], NULL, false);
        result_make(&again, &c, specs[f], NULL, false);
        assert_ok(case_quantize(test_device(), &c, x, MT_F32, &once, 0));
        float *a = case_values(test_device(), &once.q, MT_ROW, MT_F32);
        assert_ok(case_quantize(test_device(), &c, a, MT_F32, &again, 0));
        float *b = case_values(test_device(), &again.q, MT_ROW, MT_F32);
        assert_memory_equal(a, b, (size_t)c.total * sizeof(float));
        result_free(&once), result_free(&again);
        test_free(a), test_free(b);
    }
    test_free(x);
}

/* Row codes become column codes through tiles: scratch does not grow with the tensor but for a few
 * bytes a tile. */
static void test_requantize_needs_no_tensor(void **state)
{
    (void)state;
    enum { M = 2048, K = 2048 };
    mt_device *device;
    struct quantize_case c;
    struct quantize_result row, col;
    assert_ok(mt_device_open(&device, "cpu", NULL, 1));
    mt_stream stream = stream_of(device);
    case_make(&c, MT_GROUP_UNIFORM, 1, &(int64_t){ M }, &(int64_t){ K }, 0);
    float *x = case_source(&c, MT_F32, 8, false);
    result_make(&row, &c, "fp8_block", NULL, false);
    result_make(&col, &c, NULL, "nvfp4:rht+sr", false);
    assert_ok(case_quantize(device, &c, x, MT_F32, &row, 0));
    assert_ok(mt_quantize(
        &stream, &(struct mt_quantize_args){ .dtype = MT_F32, .src = &row.q, .out = &col.q }));
    assert_in_range(device->peak[MT_MEMORY_WORKSPACE], 1, (int64_t)M * K / 4); /* bytes */
    result_free(&row), result_free(&col);
    test_free(x);
    mt_device_destroy(&device);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_row_is_column_of_transpose),
        cmocka_unit_test(test_square_blocks),
        cmocka_unit_test(test_grouped_is_member_by_member),
        cmocka_unit_test(test_views),
        cmocka_unit_test(test_sr_unbiased),
        cmocka_unit_test(test_sr_is_a_function_of_place),
        cmocka_unit_test(test_rht_is_orthogonal),
        cmocka_unit_test(test_4over6_chooses_the_better),
        cmocka_unit_test(test_requantize),
        cmocka_unit_test(test_requantize_is_idempotent),
        cmocka_unit_test(test_requantize_needs_no_tensor),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
