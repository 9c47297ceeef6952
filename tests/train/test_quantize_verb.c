/* quantize: the file it writes is what the kernels give member by member, in the shapes and under
 * the names promised; mistakes are refused. */
#include <math.h>

#include "tests/train/verbs.h"
#include "train/h5.h"

enum { ROWS = 37, COLS = 41, MOST = ROWS * COLS, N = 4 };

static char line[2048];
#define QUANTIZE(options)                                                                          \
    (snprintf(line, sizeof line, "quantize %s -o %s " options, in_dir("in.h5"), in_dir("out.h5")), \
     line)

/* ---- files -------------------------------------------------------------------------------------
 */

static void put_input(mt_dtype dtype, int ndim, const int64_t *shape, const void *x)
{
    mt_h5 *file;
    assert_ok(mt_h5_create(&file, in_dir("in.h5")));
    assert_ok(mt_h5_write(file, "x", (int)dtype, ndim, shape, x));
    assert_ok(mt_h5_commit(&file));
}

static float source[MOST];

/* in.h5 with ROWS x COLS values that bf16 and f16 hold too, a NaN and an Inf among them. */
static void make_input(mt_dtype dtype)
{
    const int64_t shape[] = { ROWS, COLS };
    uint16_t narrow[MOST];
    for (int64_t i = 0; i < MOST; i++) {
        source[i] = (float)((int)(mt_rng_u32(4, 0, (uint64_t)i) % 511) - 255) / 64;
        source[i] = i == 5 ? NAN : i == 900 ? INFINITY : mt_bf16_to_f32(mt_f32_to_bf16(source[i]));
        narrow[i] = dtype == MT_BF16 ? mt_f32_to_bf16(source[i]) : mt_f32_to_f16(source[i]);
    }
    put_input(dtype, 2, shape, dtype == MT_F32 ? (const void *)source : narrow);
}

/* A dataset of out.h5 as the caller expects it: 1-D of this type. Freed by the caller. */
static void *get(const char *name, int type, int64_t *count)
{
    mt_h5 *file;
    mt_h5_info info;
    assert_ok(mt_h5_open(&file, in_dir("out.h5")));
    assert_ok(mt_h5_dataset_info(file, name, &info));
    assert_int_equal(info.type, type);
    assert_int_equal(info.ndim, 1);
    void *data = malloc((size_t)info.bytes + 1);
    assert_non_null(data);
    if (info.count) assert_ok(mt_h5_read(file, name, &info, data));
    mt_h5_close(&file);
    *count = info.count;
    return data;
}

static void assert_dataset(const char *name, int type, const void *want, int64_t want_count)
{
    int64_t count;
    void *data = get(name, type, &count);
    size_t size = mt_dtype_size((mt_dtype)type);
    if (count != want_count)
        fail_msg("%s has %lld elements, not %lld", name, (long long)count, (long long)want_count);
    for (int64_t i = 0; i < count; i++) {
        if (memcmp((char *)data + (size_t)i * size, (const char *)want + (size_t)i * size, size))
            fail_msg("%s: element %lld of %lld differs", name, (long long)i, (long long)count);
    }
    free(data);
}

static bool exists(const char *name)
{
    mt_h5 *file;
    bool is;
    assert_ok(mt_h5_open(&file, in_dir("out.h5")));
    assert_ok(mt_h5_exists(file, name, &is));
    mt_h5_close(&file);
    return is;
}

/* ---- what the kernels give, a member at a time -------------------------------------------------
 */

struct part {
    uint8_t *codes, *scales;
    float *amax, *values;
    int64_t code_bytes, scale_bytes, elements, members;
};

static void part_free(struct part *p)
{
    free(p->codes), free(p->scales), free(p->amax), free(p->values);
}

/* Appends member `i`, [m, k] from `x`, in direction `dir`. */
static void append_member(struct part *p, const char *format, mt_dir dir, bool swizzled, int64_t i,
                          int64_t m, int64_t k, float *x)
{
    mt_stream stream = { .device = test_device() };
    mt_format_spec spec;
    assert_ok(mt_format_spec_parse(&spec, format));
    if (dir == MT_ROW) spec.options.rht = spec.options.from_dequantized = false;
    if (dir == MT_ROW) spec.options.rht_mask = 0;
    mt_group group = mt_group_uniform(1, m, k);
    mt_qtensor from = mt_qtensor_plain(group, MT_F32, x), q = { .group = group };
    mt_direction *d = &q.dir[dir];
    *d = mt_direction_of(spec);
    d->swizzled = swizzled;
    mt_direction_shape s = mt_direction_shape_of(d, dir, m, k);
    d->codes = p->codes + p->code_bytes;
    d->scales = p->scales + p->scale_bytes;
    d->amax = p->amax + p->members;
    assert_ok(mt_quantize(&stream, &(struct mt_quantize_args){ .dtype = MT_F32,
                                                               .src = &from,
                                                               .out = &q,
                                                               .seed = 5,
                                                               .stream = 6,
                                                               .step = 7,
                                                               .first_member = (uint32_t)i }));
    assert_ok(mt_dequantize(&stream, &(struct mt_dequantize_args){ .dtype = MT_F32,
                                                                   .src = &q,
                                                                   .dir = dir,
                                                                   .y = p->values + p->elements,
                                                                   .y_dtype = MT_F32 }));
    p->code_bytes += s.code_bytes, p->scale_bytes += s.scale_count * (int64_t)s.scale_size;
    p->elements += m * k, p->members++;
}

static struct part make_part(const char *format, mt_dir dir, bool swizzled, const int64_t *rows,
                             const int64_t *cols)
{
    enum { ROOM = 1 << 17 };
    struct part p = { malloc(ROOM), malloc(ROOM), malloc(ROOM), malloc(ROOM), 0, 0, 0, 0 };
    assert_true(p.codes && p.scales && p.amax && p.values);
    for (int64_t i = 0; i < N; i++)
        append_member(&p, format, dir, swizzled, i, rows[i], cols[i], source + p.elements);
    return p;
}

/* Asserts that out.h5 holds these members in a quantized format, with `scale_type` of scales. */
static void check_file(const char *format, int scale_type, bool swizzled, const int64_t *rows,
                       const int64_t *cols)
{
    static const char *const sides[] = { "row", "col" };
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
        char name[4][32];
        static const char *const parts[] = { "codes", "scales", "amax", "dequantized" };
        for (int i = 0; i < 4; i++)
            snprintf(name[i], sizeof name[i], "%s/%s", sides[dir], parts[i]);
        struct part p = make_part(format, (mt_dir)dir, swizzled, rows, cols);
        assert_dataset(name[0], MT_U8, p.codes, p.code_bytes);
        assert_dataset(name[1], scale_type, p.scales,
                       p.scale_bytes / (int64_t)mt_dtype_size((mt_dtype)scale_type));
        assert_dataset(name[2], MT_F32, p.amax, N);
        assert_dataset(name[3], MT_F32, p.values, p.elements);
        part_free(&p);
    }
    int64_t offsets[N + 1] = { 0 }, nan[N] = { 0 };
    for (int i = 0; i < N; i++) {
        offsets[i + 1] = offsets[i] + rows[i] * cols[i];
        for (int64_t j = offsets[i]; j < offsets[i + 1]; j++) nan[i] += isnan(source[j]);
    }
    assert_dataset("group/first_dims", MT_I64, rows, N);
    assert_dataset("group/last_dims", MT_I64, cols, N);
    assert_dataset("group/offsets", MT_I64, offsets, N + 1);
    assert_dataset("group/nan", MT_I64, nan, N);
}

/* ---- tests -------------------------------------------------------------------------------------
 */

static void a_small_file_by_hand(void **state)
{
    (void)state;
    const float x[] = { 1, -2, 3, 448, 0, -0.0f };
    const int64_t shape[] = { 2, 3 };
    put_input(MT_F32, 2, shape, x);
    assert_verb(QUANTIZE("--format fp8_tensor"), 0, "6 elements in 1 member, fp8_tensor, both");
    assert_dataset("row/codes", MT_U8, (uint8_t[]){ 0x38, 0xc0, 0x44, 0x7e, 0x00, 0x80 }, 6);
    assert_dataset("col/codes", MT_U8, (uint8_t[]){ 0x38, 0x7e, 0xc0, 0x00, 0x44, 0x80 }, 6);
    assert_dataset("col/scales", MT_F32, (float[]){ 1 }, 1);
    assert_dataset("row/amax", MT_F32, (float[]){ 448 }, 1);
    assert_dataset("col/dequantized", MT_F32, x, 6);
    assert_verb(QUANTIZE("--format mxfp4 --direction row"), 0, "");
    assert_dataset("row/codes", MT_U8, (uint8_t[]){ 0xe4, 0x07, 0x06, 0x08 }, 4);
    assert_dataset("row/scales", MT_U8, (uint8_t[]){ 126, 134 }, 2);
}

static void every_mode_equals_the_kernels(void **state)
{
    (void)state;
    static const struct {
        const char *format;
        int scale_type;
    } formats[] = { { "fp8_tensor:e5m2+rht", MT_F32 },
                    { "fp8_delayed", MT_F32 },
                    { "fp8_block:2d", MT_F32 },
                    { "fp8_block:pow2=off+source=dequantized", MT_F32 },
                    { "mxfp8:scale=floor", MT_U8 },
                    { "mxfp6_e2m3:sr", MT_U8 },
                    { "mxfp4:2d", MT_U8 },
                    { "nvfp4:rht+sr+4over6", MT_U8 } };
    static const struct {
        const char *options;
        int64_t rows[N], cols[N];
    } modes[] = {
        { "--first-dims 9,0,17,1", { 9, 0, 17, 1 }, { COLS, COLS, COLS, COLS } },
        { "--last-dims 1,33,0,5", { ROWS, ROWS, ROWS, ROWS }, { 1, 33, 0, 5 } },
        { "--first-dims 20,1,16,3 --last-dims 33,7,16,1", { 20, 1, 16, 3 }, { 33, 7, 16, 1 } },
    };
    make_input(MT_F32);
    for (size_t f = 0; f < sizeof formats / sizeof *formats; f++)
        for (size_t m = 0; m < sizeof modes / sizeof *modes; m++) {
            bool swizzled = formats[f].scale_type == MT_U8 && m % 2 == 1;
            snprintf(line, sizeof line,
                     "quantize %s -o %s --format %s %s --seed 5 --stream 6 --step 7%s",
                     in_dir("in.h5"), in_dir("out.h5"), formats[f].format, modes[m].options,
                     swizzled ? " --swizzled" : "");
            assert_verb(line, 0, "");
            check_file(formats[f].format, formats[f].scale_type, swizzled, modes[m].rows,
                       modes[m].cols);
        }
}

/* [4, 9, 41] cut into 4; the NaN is counted, in the file and on the terminal. */
static void members_cut_the_rows(void **state)
{
    (void)state;
    const int64_t shape[] = { N, 9, COLS }, rows[] = { 9, 9, 9, 9 },
                  cols[] = { COLS, COLS, COLS, COLS };
    make_input(MT_F32);
    put_input(MT_F32, 3, shape, source);
    assert_verb(QUANTIZE("--format nvfp4:sr --members 4 --seed 5 --stream 6 --step 7"), 0,
                "1 element of the input is NaN");
    check_file("nvfp4:sr", MT_U8, false, rows, cols);
    assert_verb(QUANTIZE("--format nvfp4:sr --members 4 --first-dims 9,9,9,9 --seed 5 --stream 6 "
                         "--step 7"),
                0, "");
    check_file("nvfp4:sr", MT_U8, false, rows, cols);
}

/* 37 rows of 41 columns. */
static void what_members_leave_out_is_said(void **state)
{
    (void)state;
    const char *some = "elements are past the members and left out";
    make_input(MT_F32);
    assert_verb(QUANTIZE("--format mxfp8 --last-dims 30,4"), 0,
                "259 of the input's 1517 elements are past the members and left out");
    assert_verb(QUANTIZE("--format mxfp8 --first-dims 30,6"), 0, "41 of the input's 1517");
    assert_verb(QUANTIZE("--format mxfp8 --first-dims 3,1 --last-dims 5,2"), 0,
                "1500 of the input's 1517");
    assert_verb(QUANTIZE("--format mxfp8 --last-dims 30,11"), 0, "1517 elements");
    assert_null(strstr(verb_output, some));
    assert_verb(QUANTIZE("--format mxfp8"), 0, "1517 elements");
    assert_null(strstr(verb_output, some));
    static const char *const dims[] = { "--first-dims", "--last-dims" };
    assert_verb("quantize --help", 0, "");
    for (int i = 0; i < 2; i++) {
        const char *at = strstr(verb_output, dims[i]);
        assert_true(at && memmem(at, strcspn(at, "\n"), "left out", 8));
    }
}

/* The values are the same in all three types, so are codes and scales. */
static void narrow_inputs_give_the_same_codes(void **state)
{
    (void)state;
    static const mt_dtype types[] = { MT_F32, MT_BF16, MT_F16 };
    const int64_t rows[] = { 10, 10, 0, 3 }, cols[] = { COLS, COLS, COLS, COLS };
    for (int i = 0; i < 3; i++) {
        make_input(types[i]);
        assert_verb(QUANTIZE("--format mxfp8:sr+rht --first-dims 10,10,0,3 --seed 5 --stream 6 "
                             "--step 7"),
                    0, "");
        check_file("mxfp8:sr+rht", MT_U8, false, rows, cols);
    }
}

static void plain_formats_are_casts(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        int type;
    } formats[] = { { "f64", MT_F64 }, { "f32", MT_F32 }, { "bf16", MT_BF16 }, { "f16", MT_U16 } };
    make_input(MT_F32);
    for (int i = 0; i < 4; i++) {
        snprintf(line, sizeof line, "quantize %s -o %s --format %s --first-dims 30",
                 in_dir("in.h5"), in_dir("out.h5"), formats[i].name);
        assert_verb(line, 0, "");
        assert_false(exists("row/scales") || exists("col/scales"));
        int64_t count;
        for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
            char *codes = get(dir ? "col/codes" : "row/codes", formats[i].type, &count);
            assert_int_equal(count, 30 * COLS);
            mt_dtype dtype = formats[i].type == MT_U16 ? MT_F16 : (mt_dtype)formats[i].type;
            for (int64_t j = 0; j < count; j++) {
                double got = mt_load_f64(codes, dtype, j), want = (double)source[j];
                assert_true(got == want || (isnan(got) && isnan(want)));
            }
            free(codes);
        }
        assert_dataset("col/amax", MT_F32, (float[]){ INFINITY }, 1);
    }
}

static void only_what_is_asked_for(void **state)
{
    (void)state;
    make_input(MT_BF16);
    assert_verb(QUANTIZE("--format mxfp8 --direction col"), 0, "");
    assert_true(exists("col/codes") && exists("group/nan") && !exists("row"));
    assert_verb(QUANTIZE("--format nvfp4:rht --direction row"), 0, "");
    assert_true(exists("row/codes") && !exists("col"));
}

static void empty_groups_make_empty_files(void **state)
{
    (void)state;
    const int64_t none[] = { 0, COLS };
    static const char *const options[] = { "--first-dims 0,0,0 --swizzled", "--members 0",
                                           "--members 3", "--first-dims 0,0 --last-dims 5,0" };
    for (int i = 0; i < 4; i++) {
        static const int64_t members[] = { 3, 0, 3, 2 };
        make_input(MT_F32);
        if (i == 1 || i == 2) put_input(MT_F32, 2, none, source);
        snprintf(line, sizeof line, "quantize %s -o %s --format nvfp4 %s", in_dir("in.h5"),
                 in_dir("out.h5"), options[i]);
        assert_verb(line, 0, "0 elements");
        const float zeros[3] = { 0 };
        assert_dataset("row/codes", MT_U8, NULL, 0);
        assert_dataset("col/scales", MT_U8, NULL, 0);
        assert_dataset("col/dequantized", MT_F32, NULL, 0);
        assert_dataset("row/amax", MT_F32, zeros, members[i]);
    }
}

static void the_file_says_what_made_it(void **state)
{
    (void)state;
    mt_h5 *file;
    char *text;
    int64_t number;
    make_input(MT_F16);
    assert_verb(QUANTIZE("--format nvfp4:sr+rht=0xD7E8+4over6=256 --step 4294967295 --swizzled"), 0,
                "");
    assert_ok(mt_h5_open(&file, in_dir("out.h5")));
    assert_ok(mt_h5_get_string(file, "/", "format", &text));
    assert_string_equal(text, "nvfp4:sr+rht+4over6");
    free(text);
    assert_ok(mt_h5_get_string(file, "/", "source_dtype", &text));
    assert_string_equal(text, "f16");
    free(text);
    assert_ok(mt_h5_get_i64(file, "/", "step", &number));
    assert_true(number == UINT32_MAX);
    assert_ok(mt_h5_get_i64(file, "/", "swizzled", &number));
    assert_int_equal(number, 1);
    mt_h5_close(&file);
}

static void mistakes_are_refused(void **state)
{
    (void)state;
    static const struct {
        const char *options, *words;
    } cases[] = {
        { "", "--format FMT[:OPTS] is missing" },
        { "--format fp9", "format 'fp9' is not one of f64 f32" },
        { "--format mxfp8:fast", "option 'fast' is not one of" },
        { "--format bf16:sr", "a plain format has no options" },
        { "--format fp8_tensor:scale=floor", "takes no option scale" },
        { "--format nvfp4:2d+rht", "2d and rht" },
        { "--format fp8_delayed:rht", "history" },
        { "--format fp8_tensor:source=dequantized", "share one scale" },
        { "--format fp8_tensor --swizzled", "have no swizzled layout" },
        { "--format f32 --swizzled", "have no swizzled layout" },
        { "--format mxfp4 --direction up", "must be row, col or both" },
        { "--format mxfp4 --first-dims 30,8", "members 0..1 exceed the 37 rows" },
        { "--format mxfp4 --first-dims 3,-1", "member 1 has -1, must not be negative" },
        { "--format mxfp4 --first-dims 9223372036854775807,1", "exceed the 37 rows" },
        { "--format mxfp4 --first-dims 9223372036854775808", "is not integers" },
        { "--format mxfp4 --first-dims 1,,2", "is not integers separated by commas" },
        { "--format mxfp4 --first-dims 3,", "'' is not integers separated by commas" },
        { "--format mxfp4 --first-dims=", "--first-dims: '' is not integers separated by commas" },
        { "--format mxfp4 --last-dims=", "--last-dims: '' is not integers separated by commas" },
        { "--format mxfp4 --last-dims 41,1", "exceed the 41 columns" },
        { "--format mxfp4 --first-dims 40,1 --last-dims 30,318", "exceed the 1517 elements" },
        { "--format mxfp4 --first-dims 1,2 --last-dims 3", "has 2 members, --last-dims 1" },
        { "--format mxfp4 --members 2 --first-dims 1", "--members is 2, the dims are of 1" },
        { "--format mxfp4 --members 2", "37 rows of the input cannot be cut into 2" },
        { "--format mxfp4 --members -1", "must be 0.." },
        { "--format mxfp4 --seed -1", "--seed is -1, must be 0..4294967295" },
        { "--format mxfp4 --step 4294967296", "--step is 4294967296" },
    };
    make_input(MT_F32);
    unlink(in_dir("out.h5"));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        snprintf(line, sizeof line, "quantize %s -o %s%s%s", in_dir("in.h5"), in_dir("out.h5"),
                 *cases[i].options ? " " : "", cases[i].options);
        assert_verb(line, MT_EXIT_USAGE, cases[i].words);
        assert_false(mt_path_exists(in_dir("out.h5")));
    }
    snprintf(line, sizeof line, "quantize %s --format f32", in_dir("in.h5"));
    assert_verb(line, MT_EXIT_USAGE, "-o OUT.h5 is missing");
    snprintf(line, sizeof line, "quantize %s -o %s --format f32", in_dir("none.h5"),
             in_dir("out.h5"));
    assert_verb(line, MT_EXIT_FILES, "none.h5");
    snprintf(line, sizeof line, "quantize %s -o %s --format f32", in_dir("in.h5"), in_dir("in.h5"));
    assert_verb(line, MT_EXIT_USAGE, "the result needs another name");
    const int64_t shape[] = { 2 };
    put_input(MT_F64, 1, shape, (double[]){ 1, 2 });
    assert_verb(QUANTIZE("--format f32"), MT_EXIT_USAGE,
                "x: it is f64[2], must be f32, f16, or u16 with the attribute dtype = \"bf16\"");
    put_input(MT_F32, 0, shape, source);
    assert_verb(QUANTIZE("--format f32"), MT_EXIT_USAGE, "a scalar");
}

/* Whatever is no regular file keeps its name: of a device, a result would take the place. */
static void only_files_are_replaced(void **state)
{
    (void)state;
    struct stat st;
    char name[300], target[300];
    snprintf(name, sizeof name, "%s/special", files_dir);
    snprintf(target, sizeof target, "%s/target", files_dir);
    make_input(MT_F32);
    put_text(target, "kept");
    for (int kind = 0; kind < 3; kind++) {
        assert_int_equal(kind == 0   ? mkfifo(name, 0600)
                         : kind == 1 ? mkdir(name, 0700)
                                     : symlink(target, name),
                         0);
        snprintf(line, sizeof line, "quantize %s -o %s --format f32", in_dir("in.h5"), name);
        assert_verb(line, MT_EXIT_FILES, "not a regular file");
        assert_int_equal(lstat(name, &st), 0);
        assert_false(S_ISREG(st.st_mode));
        assert_int_equal(remove(name), 0);
    }
    assert_int_equal(stat(target, &st), 0);
    assert_int_equal(st.st_size, 4);
    for (int i = 0; i < 2; i++) assert_verb(QUANTIZE("--format f32"), 0, "1517 elements");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_small_file_by_hand),
        cmocka_unit_test(every_mode_equals_the_kernels),
        cmocka_unit_test(members_cut_the_rows),
        cmocka_unit_test(what_members_leave_out_is_said),
        cmocka_unit_test(narrow_inputs_give_the_same_codes),
        cmocka_unit_test(plain_formats_are_casts),
        cmocka_unit_test(only_what_is_asked_for),
        cmocka_unit_test(empty_groups_make_empty_files),
        cmocka_unit_test(the_file_says_what_made_it),
        cmocka_unit_test(mistakes_are_refused),
        cmocka_unit_test(only_files_are_replaced),
    };
    return cmocka_run_group_tests(tests, files_setup, files_teardown);
}
