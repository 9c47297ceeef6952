/* Quantize of f32 masters of uniform members, as the compute copies of weights are made: bit for
 * bit the CPU's, whole tiles and ragged ones, decoded directions too. */
#include <math.h>
#include <string.h>

#include "tests/kernels/quantize_case.h"

enum { DECODED = 1, FEW = 70000 };

static const struct pair {
    const char *row, *col;
    int decoded;
} pairs[] = { { "fp8_tensor", "fp8_tensor", 0 },
              { "fp8_tensor", NULL, 0 },
              { NULL, "fp8_tensor", 0 },
              { "fp8_tensor:pow2", "fp8_tensor", 0 },
              { "fp8_tensor:e5m2", "fp8_tensor:e5m2", 0 },
              { "fp8_delayed", "fp8_delayed", 0 },
              { "fp8_delayed", NULL, 0 },
              { NULL, "fp8_delayed", 0 },
              { "fp8_tensor", "fp8_delayed", 0 },
              { "fp8_block:2d", "fp8_block:2d", 0 },
              { "fp8_block:2d", NULL, 0 },
              { NULL, "fp8_block:2d", 0 },
              { "fp8_block:2d+pow2=off", "fp8_block:2d+pow2=off", 0 },
              { "fp8_block:2d+pow2=off", "fp8_block:2d", 0 },
              { "fp8_block", "fp8_block:2d", 0 },
              { "mxfp8", "mxfp8", 0 },
              { "mxfp8", "mxfp8", DECODED },
              { "mxfp8", NULL, DECODED },
              { NULL, "mxfp8", DECODED },
              { "mxfp8:scale=floor", "mxfp8", DECODED },
              { "mxfp8:2d", "mxfp8", DECODED },
              { "fp8_tensor", "fp8_tensor", DECODED },
              { "fp8_tensor", NULL, DECODED },
              { NULL, "fp8_delayed", DECODED },
              { "fp8_delayed", "fp8_delayed", DECODED },
              { "fp8_block:2d", "fp8_block:2d", DECODED },
              { NULL, "fp8_block:2d", DECODED },
              { "fp8_block", "fp8_block:2d", DECODED },
              { "mxfp8", "nvfp4:2d", DECODED } };

/* What a source is made of. */
enum values { PLAIN, SPECIAL, ODD_TILES, VALUES };

static void *source_of(const struct quantize_case *c, enum values kind)
{
    static const uint32_t odd[] = { 0,           0x80000000u, 1,          0x807fffffu,
                                    0x7f800000u, 0x7fc00001u, 0x7f7fffffu };
    enum { ODD = sizeof odd / sizeof *odd, RUN = 128 };
    uint32_t *x = case_source(c, MT_F32, 6, kind == SPECIAL);
    for (int64_t i = 0; i < c->total && kind == ODD_TILES; i++) {
        int64_t k = c->group.k, tile = i % k / RUN + i / k / RUN * 3;
        uint64_t u = case_mix((uint64_t)i);
        x[i] = tile % (ODD + 1) < ODD ? odd[tile % (ODD + 1)] ^ (uint32_t)(u & 1) << 31
                                      : (uint32_t)(u % 0x800000u); /* subnormals */
    }
    return x;
}

static void quantize_on(mt_device *device, const struct quantize_case *c, void *x,
                        const mt_qtensor *out, const struct beside *b, bool passes)
{
    mt_stream stream = { device, NULL };
    mt_qtensor source = mt_qtensor_plain(c->group, MT_F32, x);
    struct mt_quantize_args args = {
        .dtype = MT_BF16, .src = &source, .out = out, .nan = b->nan, .running_nan = b->running_nan
    };
    for (int d = 0; d < MT_DIR_COUNT; d++)
        args.scale[d] = b->scale[d], args.running_amax[d] = b->running[d];
    for (int pass = passes ? MT_QUANTIZE_AMAX : MT_QUANTIZE_ALL;
         pass <= (passes ? MT_QUANTIZE_CODES : MT_QUANTIZE_ALL); pass++) {
        args.pass = (mt_quantize_pass)pass;
        assert_ok(mt_quantize(&stream, &args));
    }
    assert_ok(mt_device_synchronize(device));
}

/* The same result with directions decoded. */
static struct quantize_result decoded_of(const struct quantize_case *c, const struct pair *p)
{
    struct quantize_result r;
    int64_t capacity = mt_group_capacity(&c->group);
    result_make(&r, c, p->row, p->col, false);
    for (int d = 0; d < MT_DIR_COUNT; d++) {
        if (!r.q.dir[d].format) continue;
        test_free(r.q.dir[d].codes);
        r.q.dir[d].layout = MT_LAYOUT_DECODED, r.q.dir[d].codes = test_alloc(capacity, MT_BF16);
        r.code_bytes[d] = (size_t)capacity * sizeof(uint16_t), r.scale_bytes[d] = 0;
    }
    return r;
}

/* The scale that a whole member has stays out of what it is decoded to; nvfp4 is test_layouts'. */
static void assert_decodes(mt_device *cpu, const struct quantize_case *c,
                           const struct quantize_result *ours, const struct quantize_result *codes)
{
    for (int d = 0; d < MT_DIR_COUNT; d++) {
        mt_qtensor bare = codes->q;
        mt_direction *q = &bare.dir[d];
        int64_t n = c->group.members;
        if (!q->format) continue;
        bool whole = mt_format_has_factor(q->format) && !q->format->second_level;
        assert_memory_equal(ours->q.dir[d].amax, q->amax, (size_t)n * sizeof(float));
        if (whole) assert_memory_equal(ours->q.dir[d].scales, q->scales, (size_t)n * sizeof(float));
        if (q->format->second_level) continue;
        for (int64_t i = 0; i < n && whole; i++) ((float *)q->scales)[i] = 1;
        void *want = case_values(cpu, &bare, (mt_dir)d, MT_BF16);
        assert_memory_equal(ours->q.dir[d].codes, want, (size_t)c->total * sizeof(uint16_t));
        test_free(want);
    }
}

static void check_pair(mt_device *cpu, const struct quantize_case *c, void *x, void *apart,
                       const struct pair *p, int variant)
{
    const bool scales = variant % 2, passes = variant / 2 % 2, kept = p->decoded;
    const bool asks = passes || variant / 4 % 3; /* amaxes go from one pass to the next */
    const int64_t n = c->group.members;
    struct quantize_result ours, theirs;
    struct beside a = beside_make(n, scales), b = beside_make(n, scales);
    if (kept && strcmp(test_device_name(), "cpu") == 0) goto done;
    result_make(&theirs, c, p->row, p->col, false);
    if (kept)
        ours = decoded_of(c, p);
    else
        result_make(&ours, c, p->row, p->col, false);
    float *kept_amax[2][MT_DIR_COUNT];
    for (int d = 0; d < MT_DIR_COUNT; d++) { /* nobody asks for amaxes, or for NaNs of this call */
        kept_amax[0][d] = ours.q.dir[d].amax, kept_amax[1][d] = theirs.q.dir[d].amax;
        if (!asks) ours.q.dir[d].amax = theirs.q.dir[d].amax = NULL;
    }
    int64_t *nan[2] = { a.nan, b.nan };
    if (!asks) a.nan = b.nan = NULL;
    quantize_on(cpu, c, x, &theirs.q, &b, passes);
    quantize_on(test_device(), c, apart, &ours.q, &a, passes);
    a.nan = nan[0], b.nan = nan[1];
    for (int d = 0; d < MT_DIR_COUNT; d++)
        ours.q.dir[d].amax = kept_amax[0][d], theirs.q.dir[d].amax = kept_amax[1][d];
    assert_same_beside(&a, &b, &ours.q);
    if (kept)
        assert_decodes(cpu, c, &ours, &theirs);
    else
        for (int d = 0; d < MT_DIR_COUNT; d++)
            if (ours.q.dir[d].format) assert_same_direction(&ours, &theirs, (mt_dir)d);
    result_free(&ours), result_free(&theirs);
done:
    beside_free(&a), beside_free(&b);
}

/* shift: elements by which the source misses a multiple of 16 bytes. */
static void check(mt_device *cpu, int64_t members, int64_t m, int64_t k, int shift)
{
    struct quantize_case c;
    case_make(&c, MT_GROUP_UNIFORM, members, &m, &k, 0);
    if (members == 0) c.group.m = m, c.group.k = k;
    for (int kind = 0; kind < VALUES; kind++) {
        void *x = source_of(&c, (enum values)kind);
        float *apart = test_alloc(c.total + shift, MT_F32);
        memcpy(apart + shift, x, (size_t)c.total * sizeof *apart);
        for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
            check_pair(cpu, &c, x, apart + shift, &pairs[i], (int)i + kind);
        test_free(x), test_free(apart);
    }
}

static void test_masters(void **state)
{
    (void)state;
    static const struct {
        int64_t members, m, k;
        int shift;
    } sizes[] = { { 3, 128, 128, 0 }, { 2, 256, 384, 0 }, { 1, 128, 1024, 0 }, { 5, 384, 128, 0 },
                  { 2, 130, 256, 0 }, { 2, 128, 72, 0 },  { 4, 96, 64, 0 },    { 2, 256, 128, 1 },
                  { 3, 144, 80, 0 },  { 2, 16, 272, 0 },  { 5, 208, 16, 0 },   { 2, 400, 144, 0 },
                  { 3, 0, 128, 0 },   { 3, 128, 0, 0 },   { 0, 128, 128, 0 },  { 7, 256, 640, 0 } };
    mt_device *cpu;
    assert_ok(mt_device_open(&cpu, "cpu", "portable", 2));
    const bool small = test_small();
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (!small || sizes[i].members * sizes[i].m * sizes[i].k < FEW)
            check(cpu, sizes[i].members, sizes[i].m, sizes[i].k, sizes[i].shift);
    mt_device_destroy(&cpu);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_masters) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
