/* Quantize of weights from f32 masters to E2M1, bit for bit the CPU's: codes of either direction or
 * both, and what they decode to, of extents that are multiples of a tile's and others. */
#include <string.h>

#include "kernels/codec.h"
#include "tests/kernels/quantize_case.h"

static const struct shape {
    int64_t members, rows, cols;
} shapes[] = { { 3, 256, 384 }, { 1, 128, 128 }, { 5, 128, 640 }, { 40, 384, 128 }, { 3, 200, 272 },
               { 2, 128, 40 },  { 2, 40, 128 },  { 2, 0, 128 },   { 2, 128, 0 },    { 4, 144, 208 },
               { 5, 64, 64 },   { 3, 16, 400 },  { 6, 208, 16 } };

static const struct pair {
    const char *row, *col;
} pairs[] = { { "nvfp4:2d", "nvfp4:2d" },    { "nvfp4:2d", NULL },
              { NULL, "nvfp4:2d" },          { "mxfp4", "mxfp4" },
              { "mxfp4:scale=floor", NULL }, { NULL, "mxfp4:scale=floor" },
              { "nvfp4:2d", "mxfp4" },       { "mxfp4", "nvfp4:2d" },
              { "nvfp4:2d", "nvfp4" },       { "nvfp4:2d+sr", "nvfp4:2d+sr" },
              { "mxfp4:2d", "mxfp4:2d" } };

enum { ORDINARY, SPECIAL, SELDOM, SOURCES };
enum { FEW_MEMBERS = 4, FEW = 60000 };

/* SELDOM: zeros of both signs, subnormals, few elements that are no numbers, whole blocks. */
static float *source_of(const struct quantize_case *c, int kind)
{
    static const uint32_t odd[] = { 0x7fc00000, 0xff800001, 0x7f800000, 0xff800000, 0x7f7fffff };
    uint32_t *x = case_source(c, MT_F32, 11, kind == SPECIAL);
    const int64_t area = c->group.m * c->group.k;
    for (int64_t i = 0; kind == SELDOM && i < c->total; i++) {
        const uint32_t sign = x[i] & 0x80000000u;
        const int64_t member = i / area;
        if (member == 0) x[i] = sign;
        if (member == 1) x[i] = sign | (x[i] & 0x7fffff);
        if (member == 2 && i % 4099 == 7) x[i] = odd[i % 5];
        if (member > 2 && i % 1021 == 5) x[i] = odd[i % 2];
        if (member == 2 && i / c->group.k % 128 / 32 == 1) x[i] = odd[i % 2];
    }
    return (float *)x;
}

static void quantize_on(mt_device *device, const struct quantize_case *c, float *x,
                        struct quantize_result *r, const struct beside *b, mt_quantize_pass pass)
{
    mt_stream stream = { device, NULL };
    mt_qtensor source = mt_qtensor_plain(c->group, MT_F32, x);
    struct mt_quantize_args args = { .dtype = MT_BF16,
                                     .pass = pass,
                                     .src = &source,
                                     .out = &r->q,
                                     .seed = 7,
                                     .stream = 2,
                                     .step = 3 };
    if (b) args.nan = b->nan, args.running_nan = b->running_nan;
    for (int d = 0; b && d < MT_DIR_COUNT; d++) args.running_amax[d] = b->running[d];
    assert_ok(mt_quantize(&stream, &args));
    assert_ok(mt_device_synchronize(device));
}

/* What a direction's codes decode to, without the scale of the whole member. */
static uint16_t *decoded(const struct quantize_case *c, const mt_direction *d, mt_dir dir)
{
    const mt_group *g = &c->group;
    const bool turned = dir == MT_COL && d->format->column_transposed;
    const mt_codec e2m1 = mt_codec_of(MT_ELEMENT_E2M1), e4m3 = mt_codec_of(MT_ELEMENT_E4M3);
    const mt_direction_shape s = mt_direction_shape_of(d, dir, g->m, g->k);
    uint16_t *y = test_alloc(c->total, MT_BF16);
    for (int64_t i = 0; i < c->total; i++) {
        const int64_t member = i / (g->m * g->k), r = i / g->k % g->m, col = i % g->k;
        const int64_t line = turned ? col : r, along = turned ? r : col;
        const uint8_t *codes = (const uint8_t *)d->codes + member * s.code_bytes;
        const uint8_t *scales = (const uint8_t *)d->scales + member * s.scale_count;
        const int code = codes[line * s.code_pitch + along / 2] >> along % 2 * 4 & 15;
        const int64_t of = dir == MT_ROW ? r : col,
                      block = (dir == MT_ROW ? col : r) / d->format->block;
        const uint8_t stored = scales[mt_scale_place(d, &s, of, block)];
        const float scale =
            d->format->second_level ? mt_decode_number(e4m3, stored) : mt_e8m0_scale(stored);
        y[i] = mt_f32_to_bf16(mt_decode_number(e2m1, (uint8_t)code) * scale);
    }
    return y;
}

/* Directions decoded, in memory of their own or in one, are what the CPU's codes decode to. */
static void check_decoded(const struct quantize_case *c, float *x, const struct pair *p,
                          const struct quantize_result *want, bool shared)
{
    struct quantize_result r;
    if (strcmp(test_device_name(), "cpu") == 0) return; /* it keeps codes */
    result_make(&r, c, p->row, p->col, false);
    void *codes[MT_DIR_COUNT];
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
        mt_direction *d = &r.q.dir[dir];
        if (!d->format) continue;
        codes[dir] = test_alloc(c->total, MT_BF16);
        test_free(d->codes);
        d->layout = MT_LAYOUT_DECODED, d->codes = codes[shared ? MT_ROW : dir];
    }
    quantize_on(test_device(), c, x, &r, NULL, MT_QUANTIZE_ALL);
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
        mt_direction *d = &r.q.dir[dir];
        if (!d->format) continue;
        uint16_t *y = decoded(c, &want->q.dir[dir], (mt_dir)dir);
        assert_memory_equal(d->codes, y, (size_t)c->total * sizeof *y);
        assert_memory_equal(d->amax, want->q.dir[dir].amax,
                            (size_t)c->group.members * sizeof(float));
        d->codes = codes[dir];
        test_free(y);
    }
    result_free(&r);
}

static void check_pair(mt_device *cpu, const struct quantize_case *c, const struct pair *p,
                       int kind)
{
    struct quantize_result ours, theirs;
    float *x = source_of(c, kind);
    const int64_t n = c->group.members;
    result_make(&ours, c, p->row, p->col, false), result_make(&theirs, c, p->row, p->col, false);
    for (int parts = 0; parts < 2; parts++) { /* at once; amaxes before codes */
        struct beside a = beside_make(n, false), b = beside_make(n, false);
        for (int pass = parts ? MT_QUANTIZE_AMAX : MT_QUANTIZE_ALL;
             pass <= (parts ? MT_QUANTIZE_CODES : MT_QUANTIZE_ALL); pass++) {
            quantize_on(cpu, c, x, &theirs, &b, (mt_quantize_pass)pass);
            quantize_on(test_device(), c, x, &ours, &a, (mt_quantize_pass)pass);
        }
        assert_same_beside(&a, &b, &ours.q);
        beside_free(&a), beside_free(&b);
        for (int dir = 0; dir < MT_DIR_COUNT; dir++)
            if (ours.q.dir[dir].format) assert_same_direction(&ours, &theirs, (mt_dir)dir);
    }
    check_decoded(c, x, p, &theirs, false);
    if (p->row && p->col && strcmp(p->row, p->col) == 0 && strstr(p->row, "2d"))
        check_decoded(c, x, p, &theirs, true);
    result_free(&ours), result_free(&theirs);
    test_free(x);
}

static void test_masters(void **state)
{
    (void)state;
    mt_device *cpu;
    assert_ok(mt_device_open(&cpu, "cpu", "portable", 2));
    const bool small = test_small();
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        struct quantize_case c;
        int64_t members = shapes[s].members;
        if (small && shapes[s].rows * shapes[s].cols > FEW) continue;
        if (small && members > FEW_MEMBERS) members = FEW_MEMBERS;
        case_make(&c, MT_GROUP_UNIFORM, members, &shapes[s].rows, &shapes[s].cols, 0);
        for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
            for (int kind = 0; kind < SOURCES; kind++) check_pair(cpu, &c, &pairs[i], kind);
    }
    mt_device_destroy(&cpu);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_masters) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
