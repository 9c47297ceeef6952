/* Quantize and dequantize of more than a GPU works on at a time, bit for bit the CPU's: kernels
 * that go from tile to tile do so several times, over members of any size. */
#include <string.h>

#include "tests/kernels/quantize_case.h"

enum { N = 24, K = 1040, MOST = 1600, NARROW = 272 };
enum { MANY = CASE_MEMBERS, FEW_COLUMNS = 136, FEW_ROWS = 40, FEW_PAIRS = 5 };

static const struct pair {
    const char *row, *col;
} pairs[] = { { "fp8_tensor", "fp8_tensor" }, { "fp8_delayed:e5m2", "fp8_delayed:e5m2" },
              { "fp8_block", "fp8_block" },   { "mxfp8", "mxfp8" },
              { "mxfp4", "mxfp4" },           { "nvfp4", "nvfp4:rht" },
              { "nvfp4:sr", "nvfp4:rht+sr" }, { "nvfp4:4over6", "nvfp4:4over6" },
              { "fp8_block", NULL },          { NULL, "nvfp4" },
              { NULL, "fp8_tensor" },         { NULL, "fp8_block:pow2=off" },
              { NULL, "mxfp8:e5m2" },         { "mxfp4:scale=floor", NULL },
              { "nvfp4", "nvfp4" },           { "nvfp4:sr", "nvfp4:sr" },
              { NULL, "nvfp4:rht" },          { NULL, "nvfp4:rht+sr" },
              { NULL, "nvfp4:rht+4over6" },   { "nvfp4:4over6+err=sq", "nvfp4:4over6=448" },
              { NULL, "nvfp4:4over6" },       { "nvfp4:4over6=448", "nvfp4:4over6=448" },
              { "nvfp4:4over6", NULL },       { "nvfp4:4over6+err=sq", "nvfp4:4over6+err=sq" } };

/* Pairs that are rotated, of directions that may be kept decoded. */
static const struct kept {
    struct pair pair;
    int decoded; /* bits of those that are */
} kept[] = {
    { { "nvfp4", "nvfp4:rht" }, 3 },    { { "nvfp4:sr", "nvfp4:rht+sr" }, 3 },
    { { "nvfp4:sr", "nvfp4:rht" }, 3 }, { { "nvfp4", "nvfp4:rht+sr" }, 3 },
    { { NULL, "nvfp4:rht" }, 2 },       { { NULL, "nvfp4:rht+sr" }, 2 },
    { { "nvfp4", "nvfp4:rht" }, 1 },    { { "nvfp4:sr", "nvfp4:rht+sr" }, 0 },
};

static void quantize_on(mt_device *device, const struct quantize_case *c, void *x,
                        const struct quantize_result *r, mt_quantize_pass pass, int64_t *nan)
{
    mt_stream stream = { device, NULL };
    mt_qtensor source = mt_qtensor_plain(c->group, MT_BF16, x);
    assert_ok(mt_quantize(&stream, &(struct mt_quantize_args){ .dtype = MT_F32,
                                                               .pass = pass,
                                                               .src = &source,
                                                               .out = &r->q,
                                                               .nan = nan,
                                                               .seed = 7,
                                                               .stream = 2,
                                                               .step = 3 }));
}

/* Of few binades, as activations are: what kernels do faster where sums are exact. */
static void *near_source(const struct quantize_case *c, float scale)
{
    uint16_t *x = test_alloc(mt_group_capacity(&c->group), MT_BF16);
    for (int64_t i = 0; i < c->total; i++) {
        float v = (float)(int64_t)(case_mix((uint64_t)i) >> 40) * 0x1p-21f - 4;
        x[i] = mt_f32_to_bf16((i % 997 ? v : v * 0x1p-9f) * scale);
    }
    return x;
}

/* NEARLY_ZERO: squares of errors are no f32 any more, or subnormal. */
enum { NEAR, SPECIAL, NEARLY_ZERO };

static void check_pair(mt_device *cpu, const struct quantize_case *c, const struct pair *p,
                       int source, bool swizzled)
{
    struct quantize_result ours, theirs;
    void *x = source == SPECIAL ? case_source(c, MT_BF16, 4, true)
                                : near_source(c, source == NEAR ? 1 : 0x1p-58f);
    const int64_t n = c->group.members;
    int64_t *nan = test_alloc(2 * n, MT_I64);
    result_make(&ours, c, p->row, p->col, swizzled);
    result_make(&theirs, c, p->row, p->col, swizzled);
    quantize_on(cpu, c, x, &theirs, MT_QUANTIZE_ALL, nan + n);
    for (int strips = 1; strips >= 0; strips--) {
        case_in_strips(strips);
        quantize_on(test_device(), c, x, &ours, MT_QUANTIZE_ALL, nan);
        assert_memory_equal(nan, nan + n, (size_t)n * sizeof *nan);
        for (int dir = 0; dir < MT_DIR_COUNT; dir++)
            if (ours.q.dir[dir].format) assert_same_direction(&ours, &theirs, (mt_dir)dir);
    }
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
        if (!ours.q.dir[dir].format) continue;
        void *y = case_values(test_device(), &ours.q, (mt_dir)dir, MT_BF16),
             *z = case_values(cpu, &theirs.q, (mt_dir)dir, MT_BF16);
        assert_memory_equal(y, z, (size_t)c->total * mt_dtype_size(MT_BF16));
        test_free(y), test_free(z);
    }
    result_free(&ours), result_free(&theirs);
    test_free(nan), test_free(x);
}

static void test_many_tiles(void **state)
{
    (void)state;
    mt_device *cpu;
    struct quantize_case c;
    int64_t rows[N];
    bool small = strcmp(test_device_name(), "cpu") == 0; /* the CPU has no turns to take */
    for (int i = 0; i < N; i++)
        rows[i] = (int64_t)(case_mix((uint64_t)i) % MOST) / (small ? 16 : 1);
    rows[5] = 0, rows[9] = 1;
    assert_ok(mt_device_open(&cpu, "cpu", "portable", 2));
    case_make(&c, MT_GROUP_VARYING_FIRST, N, rows, &(int64_t){ test_small() ? NARROW : K }, 3);
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        for (int source = NEAR; source <= NEARLY_ZERO; source++)
            if (source != NEARLY_ZERO || (pairs[i].row && strstr(pairs[i].row, "4over6")))
                check_pair(cpu, &c, &pairs[i], source, false);
    mt_device_destroy(&cpu);
}

/* More members than the block that plans has threads. */
static void test_many_members(void **state)
{
    (void)state;
    mt_device *cpu;
    struct quantize_case c;
    int64_t rows[MANY];
    const int by = test_small() ? 8 : 1;
    for (int i = 0; i < MANY; i++) rows[i] = (int64_t)(case_mix((uint64_t)i) % FEW_ROWS) / by;
    rows[0] = rows[7] = rows[8] = rows[MANY - 1] = 0, rows[200] = MOST / by;
    assert_ok(mt_device_open(&cpu, "cpu", "portable", 2));
    case_make(&c, MT_GROUP_VARYING_FIRST, MANY, rows, &(int64_t){ FEW_COLUMNS }, 3);
    for (size_t i = 0; i < FEW_PAIRS; i++) check_pair(cpu, &c, &pairs[i], SPECIAL, false);
    mt_device_destroy(&cpu);
}

/* Columns of nvfp4 where members have few rows: about as many as a tile of theirs may have, none,
 * or more, over lines of codes that begin anywhere. */
static void test_few_rows(void **state)
{
    (void)state;
    static const int64_t rows[] = { 320, 0, 641, 1, 33, 330, 7, 17, 0, 960, 15, 319, 0, 321 },
                         widths[] = { 136, 64, 37 };
    static const struct pair columns = { NULL, "nvfp4" };
    mt_device *cpu;
    struct quantize_case c;
    assert_ok(mt_device_open(&cpu, "cpu", "portable", 2));
    for (size_t w = 0; w < sizeof widths / sizeof *widths; w++) {
        case_make(&c, MT_GROUP_VARYING_FIRST, sizeof rows / sizeof *rows, rows, &widths[w], 3);
        for (int swizzled = 0; swizzled < 2; swizzled++)
            check_pair(cpu, &c, &columns, swizzled ? SPECIAL : NEAR, swizzled);
        case_make(&c, MT_GROUP_UNIFORM, 3, rows, &widths[w], 0);
        check_pair(cpu, &c, &columns, NEAR, false);
    }
    mt_device_destroy(&cpu);
}

/* Of what codes decode to, those of the CPU's codes. split: amaxes first, by a call of their own.
 */
static void check_kept(mt_device *cpu, const struct quantize_case *c, const struct kept *k,
                       bool special, bool split)
{
    struct quantize_result ours, theirs;
    const bool keeps = strcmp(test_device_name(), "cpu") != 0;
    const int decoded = keeps ? k->decoded : 0;
    void *x = special ? case_source(c, MT_BF16, 6, true) : near_source(c, 1);
    const int64_t n = c->group.members;
    int64_t *nan = test_alloc(2 * n, MT_I64);
    result_make(&ours, c, k->pair.row, k->pair.col, false);
    result_make(&theirs, c, k->pair.row, k->pair.col, false);
    for (int dir = 0; dir < MT_DIR_COUNT; dir++)
        if (decoded >> dir & 1) result_decode(&ours, c, (mt_dir)dir);
    quantize_on(test_device(), c, x, &ours, split ? MT_QUANTIZE_AMAX : MT_QUANTIZE_ALL, nan);
    if (split) quantize_on(test_device(), c, x, &ours, MT_QUANTIZE_CODES, NULL);
    quantize_on(cpu, c, x, &theirs, MT_QUANTIZE_ALL, nan + n);
    assert_memory_equal(nan, nan + n, (size_t)n * sizeof *nan);
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
        const mt_direction *a = &ours.q.dir[dir], *b = &theirs.q.dir[dir];
        if (!b->format) continue;
        if (!(decoded >> dir & 1)) {
            assert_same_direction(&ours, &theirs, (mt_dir)dir);
            continue;
        }
        uint16_t *want = case_bare_values(c, b, (mt_dir)dir);
        assert_memory_equal(a->codes, want, ours.code_bytes[dir]);
        assert_memory_equal(a->amax, b->amax, (size_t)n * sizeof(float));
        test_free(want);
    }
    result_free(&ours), result_free(&theirs);
    test_free(nan), test_free(x);
}

/* More parts of sixteen rows than a GPU has warps, each of which then goes from one to the next and
 * from member to member, over such as have no rows or few. */
static void test_many_strands(void **state)
{
    (void)state;
    static const int64_t few[] = { 0, 1, 7, 15, 16, 17, 33, 0 }, widths[] = { 24, 136 };
    const bool small = strcmp(test_device_name(), "cpu") == 0;
    mt_device *cpu;
    struct quantize_case c;
    int64_t rows[MANY];
    for (int i = 0; i < MANY; i++)
        rows[i] = i % 2 ? few[i / 2 % 8]
                        : (500 + (int64_t)(case_mix((uint64_t)i) % 500)) / (small ? 16 : 1);
    assert_ok(mt_device_open(&cpu, "cpu", "portable", 2));
    for (size_t w = 0; w < sizeof widths / sizeof *widths; w++) {
        case_make(&c, MT_GROUP_VARYING_FIRST, MANY, rows, &widths[w], 3);
        for (size_t i = 0; i < sizeof kept / sizeof *kept; i++)
            check_kept(cpu, &c, &kept[i], i % 2 == w, (i / 2 + w) % 2);
    }
    mt_device_destroy(&cpu);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_many_tiles),
        cmocka_unit_test(test_many_members),
        cmocka_unit_test(test_few_rows),
        cmocka_unit_test(test_many_strands),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
