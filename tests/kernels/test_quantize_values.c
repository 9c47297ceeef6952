/* Quantize of bf16 to bytes where directions are kept decoded: bit for bit what the CPU's codes
 * decode to, and what comes with them as with codes. */
#include <math.h>
#include <string.h>

#include "tests/kernels/quantize_case.h"

enum { PADDED = 1 << MT_DIR_COUNT, MOST = 7 };

static const struct pair {
    const char *row, *col;
    int decoded; /* bits of directions that are kept so; PADDED: the column direction is so */
} pairs[] = { { "fp8_tensor", "fp8_tensor", 1 },
              { "fp8_tensor", "fp8_tensor", 1 | PADDED },
              { "fp8_tensor", "fp8_tensor", 2 },
              { "fp8_tensor", "fp8_tensor", 3 },
              { "fp8_tensor:pow2", "fp8_tensor", 1 },
              { "fp8_tensor:pow2", "fp8_tensor", 3 },
              { "fp8_tensor:e5m2", "fp8_tensor:e5m2", 1 },
              { "fp8_tensor:e5m2", "fp8_tensor:e5m2", 3 },
              { "fp8_tensor", NULL, 1 },
              { "fp8_tensor:e5m2", NULL, 1 },
              { NULL, "fp8_tensor", 2 },
              { NULL, "fp8_tensor:e5m2", 2 },
              { "fp8_delayed", "fp8_delayed", 1 },
              { "fp8_delayed", "fp8_delayed", 1 | PADDED },
              { "fp8_delayed", "fp8_delayed", 2 },
              { "fp8_delayed", "fp8_delayed", 3 },
              { "fp8_delayed:e5m2", "fp8_delayed:e5m2", 3 },
              { "fp8_delayed", NULL, 1 },
              { "fp8_delayed:e5m2", NULL, 1 },
              { NULL, "fp8_delayed", 2 },
              { NULL, "fp8_delayed:e5m2", 2 },
              { "fp8_tensor", "fp8_delayed", 3 },
              { "fp8_block", "fp8_block", 1 },
              { "fp8_block", "fp8_block", 1 | PADDED },
              { "fp8_block", "fp8_block:pow2=off", 1 },
              { "fp8_block", "fp8_block:pow2=off", 1 | PADDED },
              { "fp8_block", "fp8_block", 2 },
              { "fp8_block", "fp8_block", 3 },
              { "fp8_block:e5m2", "fp8_block:e5m2", 1 },
              { "fp8_block:e5m2", "fp8_block:e5m2", 3 },
              { "fp8_block", NULL, 1 },
              { "fp8_block:e5m2", NULL, 1 },
              { NULL, "fp8_block", 2 },
              { NULL, "fp8_block:e5m2", 2 },
              { "mxfp8", "mxfp8", 1 },
              { "mxfp8", "mxfp8", 2 },
              { "mxfp8", "mxfp8", 3 },
              { "mxfp8:scale=floor", "mxfp8", 1 },
              { "mxfp8", "mxfp8:scale=floor", 3 },
              { "mxfp8:e5m2", "mxfp8:e5m2", 1 },
              { "mxfp8:e5m2", "mxfp8:e5m2", 3 },
              { "mxfp8", NULL, 1 },
              { "mxfp8:e5m2", NULL, 1 },
              { NULL, "mxfp8", 2 },
              { NULL, "mxfp8:e5m2", 2 },
              { "mxfp8", "mxfp8:e5m2", 3 },
              { "fp8_tensor", "mxfp8", 1 },
              { "fp8_tensor:e5m2", "mxfp8", 3 },
              { "mxfp8", "fp8_block", 1 | PADDED },
              { "fp8_block", "fp8_delayed", 3 },
              { "fp8_block:pow2=off", "fp8_block", 2 },
              { "fp8_block:2d", "fp8_block", 3 },
              { "mxfp8:sr", "mxfp8", 3 } };

/* What a source is made of. */
enum values { PLAIN, SPECIAL, ODD_TILES, VALUES };

static void *source_of(const struct quantize_case *c, enum values kind)
{
    static const uint16_t odd[] = { 0, 0x8000, 1, 0x807f, 0x7f80, 0x7fc1, 0x7f7f, 0x0080, 0x7f00 };
    enum { ODD = sizeof odd / sizeof *odd, RUN = 32 };
    uint16_t *x = case_source(c, MT_BF16, 9, kind == SPECIAL);
    for (int64_t i = 0; i < c->total && kind == ODD_TILES; i++) {
        int64_t k = c->group.k, tile = i % k / RUN + i / k / RUN * 3;
        uint64_t u = case_mix((uint64_t)i);
        bool other = (u >> 8) % 64 == 0; /* seldom one that is not like those around it */
        uint16_t own = tile % (ODD + 1) < ODD ? odd[tile % (ODD + 1)] : (uint16_t)(u >> 20 & 0x7f);
        x[i] = (uint16_t)(other ? u >> 32 & 0x3fff : own ^ (u & 1) << 15);
    }
    return x;
}

static mt_status quantize_on(mt_device *device, const struct quantize_case *c, void *x,
                             const mt_qtensor *out, const struct beside *b, bool passes)
{
    mt_stream stream = { device, NULL };
    mt_qtensor source = mt_qtensor_plain(c->group, MT_BF16, x);
    struct mt_quantize_args args = { .dtype = MT_BF16,
                                     .src = &source,
                                     .out = out,
                                     .nan = b->nan,
                                     .running_nan = b->running_nan,
                                     .seed = 3,
                                     .stream = 1,
                                     .step = 2 };
    for (int d = 0; d < MT_DIR_COUNT; d++)
        args.scale[d] = b->scale[d], args.running_amax[d] = b->running[d];
    for (int pass = passes ? MT_QUANTIZE_AMAX : MT_QUANTIZE_ALL;
         pass <= (passes ? MT_QUANTIZE_CODES : MT_QUANTIZE_ALL); pass++) {
        args.pass = (mt_quantize_pass)pass;
        MT_TRY(mt_quantize(&stream, &args));
    }
    return mt_device_synchronize(device);
}

/* The column direction's codes padded, over 0xAA. */
static void pad(struct quantize_result *r, const struct quantize_case *c)
{
    mt_direction *d = &r->q.dir[MT_COL];
    int64_t bytes = c->group.k * mt_padded_rows(&c->group);
    test_free(d->codes);
    d->layout = MT_LAYOUT_PADDED, d->codes = test_alloc(bytes, MT_U8);
    memset(d->codes, 0xAA, (size_t)bytes);
    r->code_bytes[MT_COL] = (size_t)bytes;
}

/* The values of a direction without the scale that a whole member has; past the members 0xAAAA. */
static void assert_values(mt_device *cpu, const struct quantize_case *c, const mt_direction *got,
                          const struct quantize_result *codes, mt_dir dir)
{
    mt_qtensor bare = codes->q;
    mt_direction *q = &bare.dir[dir];
    float ones[MOST] = { 1, 1, 1, 1, 1, 1, 1 };
    if (!q->format->block) q->scales = ones;
    uint16_t *want = case_values(cpu, &bare, dir, MT_BF16), *have = got->codes;
    for (int64_t i = 0; i < c->total; i++)
        if (have[i] != want[i])
            fail_msg("element %lld: 0x%04x, must be 0x%04x", (long long)i, have[i], want[i]);
    for (int64_t i = c->total; i < mt_group_capacity(&c->group); i++)
        assert_int_equal(have[i], 0xAAAA);
    test_free(want);
}

/* Codes that products read, as far as there are any. */
static void assert_padded(const struct quantize_case *c, const mt_direction *got,
                          const mt_direction *codes)
{
    const uint8_t *have = got->codes, *want = codes->codes;
    int64_t k = c->group.k, at = 0;
    for (int64_t i = 0; i < c->group.members; i++) {
        int64_t rows = c->first[i], end = at + (rows + 127) / 128 * 128;
        for (int64_t j = 0; j < k; j++)
            for (int64_t p = at; p < end; p++) {
                uint8_t code = p < at + rows ? want[j * rows + p - at] : 0;
                if (have[(p / 128 * k + j) * 128 + p % 128] != code)
                    fail_msg("member %d, column %d", (int)i, (int)j);
            }
        want += rows * k, at = end;
    }
}

static void check_direction(mt_device *cpu, const struct quantize_case *c, const struct pair *p,
                            const struct quantize_result *ours,
                            const struct quantize_result *theirs, mt_dir dir)
{
    const mt_direction *a = &ours->q.dir[dir], *b = &theirs->q.dir[dir];
    if (!b->format) return;
    assert_memory_equal(a->amax, b->amax, (size_t)c->group.members * sizeof(float));
    assert_memory_equal(a->scales, b->scales, ours->scale_bytes[dir]);
    if (a->layout == MT_LAYOUT_DECODED)
        assert_values(cpu, c, a, theirs, dir);
    else if (a->layout == MT_LAYOUT_PADDED)
        assert_padded(c, a, b);
    else
        assert_memory_equal(a->codes, b->codes, ours->code_bytes[dir]);
    assert_true(p->decoded);
}

static void check_pair(mt_device *cpu, const struct quantize_case *c, void *x, const struct pair *p,
                       int variant)
{
    const bool scales = variant % 2, passes = variant / 2 % 2;
    const int64_t n = c->group.members;
    struct quantize_result ours, theirs;
    struct beside a = beside_make(n, scales), b = beside_make(n, scales);
    result_make(&theirs, c, p->row, p->col, false);
    result_make(&ours, c, p->row, p->col, false);
    for (int d = 0; d < MT_DIR_COUNT; d++)
        if (p->decoded >> d & 1) result_decode(&ours, c, (mt_dir)d);
    if (p->decoded & PADDED) pad(&ours, c);
    assert_ok(quantize_on(cpu, c, x, &theirs.q, &b, passes));
    bool has_kernels = strcmp(test_device_name(), "cpu") != 0;
    mt_status status = quantize_on(test_device(), c, x, &ours.q, &a, passes);
    assert_int_equal(status, has_kernels ? MT_OK : MT_EUNSUPPORTED);
    if (status == MT_OK) {
        assert_memory_equal(a.nan, b.nan, (size_t)n * sizeof *a.nan);
        assert_memory_equal(a.running_nan, b.running_nan, (size_t)n * sizeof *a.nan);
        for (int d = 0; d < MT_DIR_COUNT; d++) {
            if (!ours.q.dir[d].format) continue;
            assert_memory_equal(a.running[d], b.running[d], (size_t)n * sizeof(float));
            check_direction(cpu, c, p, &ours, &theirs, (mt_dir)d);
        }
    }
    result_free(&ours), result_free(&theirs);
    beside_free(&a), beside_free(&b);
}

/* turn: each pair is that of another variant. */
static void check(mt_device *cpu, int turn, mt_group_mode mode, int64_t n, const int64_t *rows,
                  int64_t k, int64_t tail)
{
    struct quantize_case c;
    case_make(&c, mode, n, rows, &k, tail);
    for (int kind = 0; kind < VALUES; kind++) {
        void *x = source_of(&c, (enum values)kind);
        for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
            check_pair(cpu, &c, x, &pairs[i], (int)i + kind + turn);
        test_free(x);
    }
}

static void run(mt_device *cpu)
{
    static const int64_t ragged[MOST] = { 33, 0, 128, 257, 1, 0, 300 };
    static const int64_t one[MOST] = { 0, 0, 1100 }, none[MOST] = { 0 };
    static const int64_t widths[] = { 16, 72, 128, 256, 328, 1040 };
    const bool small = strcmp(test_device_name(), "cpu") == 0;
    for (int w = 0; w < (small ? 2 : (int)(sizeof widths / sizeof *widths)); w++) {
        check(cpu, w, MT_GROUP_VARYING_FIRST, MOST, ragged, widths[w], 3);
        check(cpu, w + 2, MT_GROUP_VARYING_FIRST, MOST, one, widths[w], 0);
    }
    check(cpu, 0, MT_GROUP_VARYING_FIRST, MOST, none, 64, 5);
    for (int turn = 0; turn < 4; turn++) {
        check(cpu, turn, MT_GROUP_UNIFORM, 3, (int64_t[]){ 384 }, 384, 0);
        /* no rows are at 16 bytes */
        check(cpu, turn, MT_GROUP_UNIFORM, 2, (int64_t[]){ 145 }, 37, 0);
    }
}

static void test_values(void **state)
{
    (void)state;
    mt_device *cpu;
    assert_ok(mt_device_open(&cpu, "cpu", "portable", 2));
    run(cpu);
    mt_device_destroy(&cpu);
}

/* The bias gradient beside decoded directions is that beside codes. */
static void test_bias(void **state)
{
    (void)state;
    static const int64_t rows[MOST] = { 33, 0, 128, 257, 1, 0, 300 };
    static const char *const formats[] = { "mxfp8", "fp8_block", "fp8_tensor:e5m2" };
    struct quantize_case c;
    mt_stream stream = { test_device(), NULL };
    const int64_t k = 136;
    if (strcmp(test_device_name(), "cpu") == 0) return;
    case_make(&c, MT_GROUP_VARYING_FIRST, MOST, rows, &k, 3);
    void *x = case_source(&c, MT_BF16, 11, true);
    mt_qtensor source = mt_qtensor_plain(c.group, MT_BF16, x);
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        struct quantize_result r[2];
        float *bias[2] = { test_alloc(MOST * k, MT_F32), test_alloc(MOST * k, MT_F32) };
        for (int kept = 0; kept < 2; kept++) {
            result_make(&r[kept], &c, formats[i], formats[i], false);
            for (int d = 0; d < MT_DIR_COUNT && kept; d++) result_decode(&r[kept], &c, (mt_dir)d);
            for (int again = 0; again < 2; again++)
                assert_ok(mt_quantize(&stream, &(struct mt_quantize_args){ .dtype = MT_BF16,
                                                                           .src = &source,
                                                                           .out = &r[kept].q,
                                                                           .bias_grad = bias[kept],
                                                                           .accumulate = again }));
        }
        assert_ok(mt_device_synchronize(test_device()));
        for (int64_t e = 0; e < MOST * k; e++)
            assert_true(bias[0][e] == bias[1][e] || (isnan(bias[0][e]) && isnan(bias[1][e])));
        test_free(bias[0]), test_free(bias[1]);
        result_free(&r[0]), result_free(&r[1]);
    }
    test_free(x);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_values),
                                        cmocka_unit_test(test_bias) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
