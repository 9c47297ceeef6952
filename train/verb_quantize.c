/* mixtape quantize: a tensor in any number format, written out for comparison with other programs
 * (NUMERICS section 8). */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/ops.h"
#include "train/cli.h"
#include "train/fileio.h"
#include "train/h5.h"

enum { MEMBERS_MAX = 1 << 24 };

struct options {
    const char *out, *format, *direction, *first_dims, *last_dims;
    int64_t members, seed, stream, step;
    bool swizzled;
};

/* The group that the input is cut into, with its arrays. */
struct cut {
    mt_group group;
    int64_t *first, *last, *offsets; /* rows, columns, first element of each member */
};

/* Everything the verb holds. */
struct job {
    const struct options *o;
    mt_format_spec spec;
    bool asked[MT_DIR_COUNT];
    mt_h5_info x;
    struct cut cut;
    mt_device *device;
    mt_qtensor q;
    size_t source_bytes, result_bytes, value_bytes, nan_bytes;
    void *source, *result, *values, *nan; /* device memory */
};

static const char *const side_names[MT_DIR_COUNT] = { "row", "col" };

/* ---- options -----------------------------------------------------------------------------------
 */

static mt_status check_word(const char *name, int64_t value)
{
    MT_REQUIRE(value >= 0 && value <= UINT32_MAX, MT_ECONFIG, "--%s is %lld, must be 0..%lld", name,
               (long long)value, (long long)UINT32_MAX);
    return MT_OK;
}

static mt_status check_options(struct job *j)
{
    const struct options *o = j->o;
    MT_REQUIRE(o->out, MT_ECONFIG, "quantize: -o OUT.h5 is missing");
    MT_REQUIRE(o->format, MT_ECONFIG, "quantize: --format FMT[:OPTS] is missing");
    MT_TRY(mt_format_spec_parse(&j->spec, o->format));
    bool both = strcmp(o->direction, "both") == 0;
    for (int dir = 0; dir < MT_DIR_COUNT; dir++)
        j->asked[dir] = both || strcmp(o->direction, side_names[dir]) == 0;
    MT_REQUIRE(j->asked[MT_ROW] || j->asked[MT_COL], MT_ECONFIG,
               "--direction is '%s', must be row, col or both", o->direction);
    MT_TRY(check_word("seed", o->seed));
    MT_TRY(check_word("stream", o->stream));
    return check_word("step", o->step);
}

/* Numbers of a list "a,b,..": how many, and the values where `values` is not NULL. */
static mt_status read_list(int64_t *count, int64_t *values, const char *name, const char *text)
{
    const char *at = text;
    *count = 0;
    for (;; at++) {
        char *end;
        errno = 0;
        long long value = strtoll(at, &end, 10);
        MT_REQUIRE(end != at && errno == 0 && (*end == ',' || !*end), MT_ECONFIG,
                   "--%s: '%.40s' is not integers separated by commas", name, at);
        MT_REQUIRE(value >= 0, MT_ECONFIG, "--%s: member %lld has %lld, must not be negative", name,
                   (long long)*count, value);
        if (values) values[*count] = value;
        ++*count;
        if (!*end) return MT_OK;
        at = end;
    }
}

/* Reads a list, or repeats the one extent that all members have. */
static mt_status fill_dims(int64_t *dims, int64_t members, const char *name, const char *text,
                           int64_t uniform)
{
    int64_t count = members;
    if (text) return read_list(&count, dims, name, text);
    for (int64_t i = 0; i < members; i++) dims[i] = uniform;
    return MT_OK;
}

/* ---- the group ---------------------------------------------------------------------------------
 */

static void cut_free(struct cut *c)
{
    free(c->first), free(c->last), free(c->offsets);
}

/* The number of members: that of the lists, of --members, or 1; they must agree. */
static mt_status count_members(int64_t *members, const struct options *o)
{
    int64_t given = o->members, first = 0, last = 0;
    MT_REQUIRE(given == MT_OPTION_ABSENT || (given >= 0 && given <= MEMBERS_MAX), MT_ECONFIG,
               "--members is %lld, must be 0..%d", (long long)given, MEMBERS_MAX);
    if (o->first_dims) MT_TRY(read_list(&first, NULL, "first-dims", o->first_dims));
    if (o->last_dims) MT_TRY(read_list(&last, NULL, "last-dims", o->last_dims));
    MT_REQUIRE(!o->first_dims || !o->last_dims || first == last, MT_ECONFIG,
               "--first-dims has %lld members, --last-dims %lld", (long long)first,
               (long long)last);
    bool lists = o->first_dims || o->last_dims;
    if (!o->first_dims) first = last;
    MT_REQUIRE(!lists || given == MT_OPTION_ABSENT || given == first, MT_ECONFIG,
               "--members is %lld, the dims are of %lld", (long long)given, (long long)first);
    *members = lists ? first : given == MT_OPTION_ABSENT ? 1 : given;
    return MT_OK;
}

/* Offsets of the members. What varies (NULL: their elements) must add up to no more than `room`. */
static mt_status fill_offsets(struct cut *c, const int64_t *varying, const char *name, int64_t room,
                              const char *what)
{
    int64_t sum = 0;
    c->offsets[0] = 0;
    for (int64_t i = 0; i < c->group.members; i++) {
        int64_t elements;
        bool over = __builtin_mul_overflow(c->first[i], c->last[i], &elements) ||
                    __builtin_add_overflow(c->offsets[i], elements, &c->offsets[i + 1]) ||
                    __builtin_add_overflow(sum, varying ? varying[i] : elements, &sum);
        MT_REQUIRE(!over && sum <= room, MT_ECONFIG,
                   "--%s: members 0..%lld exceed the %lld %s of the input", name, (long long)i,
                   (long long)room, what);
    }
    return MT_OK;
}

/* Cuts [rows, cols] as the options say. */
static mt_status make_cut(struct cut *c, const struct options *o, int64_t rows, int64_t cols)
{
    int64_t n = 0;
    MT_TRY(count_members(&n, o));
    size_t bytes = (size_t)(n + 1) * sizeof(int64_t);
    c->first = malloc(bytes), c->last = malloc(bytes), c->offsets = malloc(bytes);
    MT_REQUIRE(c->first && c->last && c->offsets, MT_ENOMEM, "quantize: no memory for %lld members",
               (long long)n);
    bool uniform = !o->first_dims && !o->last_dims;
    MT_REQUIRE(!uniform || (n ? rows % n == 0 : rows == 0), MT_ECONFIG,
               "--members: the %lld rows of the input cannot be cut into %lld equal members",
               (long long)rows, (long long)n);
    c->group = (mt_group){ .members = n, .m = uniform && n ? rows / n : rows, .k = cols };
    MT_TRY(fill_dims(c->first, n, "first-dims", o->first_dims, c->group.m));
    MT_TRY(fill_dims(c->last, n, "last-dims", o->last_dims, cols));
    if (o->first_dims && o->last_dims) {
        c->group.m = 1, c->group.k = rows * cols;
        MT_TRY(fill_offsets(c, NULL, "first-dims and --last-dims", c->group.k, "elements"));
    } else if (o->last_dims) {
        MT_TRY(fill_offsets(c, c->last, "last-dims", cols, "columns"));
    } else {
        MT_TRY(fill_offsets(c, c->first, o->first_dims ? "first-dims" : "members", rows, "rows"));
    }
    if (uniform) return MT_OK;
    c->group.first_dims = o->first_dims ? c->first : NULL;
    c->group.last_dims = o->last_dims ? c->last : NULL;
    c->group.offsets = c->offsets;
    return MT_OK;
}

/* ---- quantize, dequantize ----------------------------------------------------------------------
 */

/* Describes the input and cuts it. */
static mt_status read_shape(struct job *j, mt_h5 *in)
{
    mt_tensor x = { .ndim = 0 };
    char type[96];
    bool there;
    MT_TRY(mt_h5_exists(in, "x", &there));
    MT_REQUIRE(there, MT_EIO,
               "'%s' has no dataset x, which is what quantize reads (`mixtape inspect` lists what "
               "a file has)",
               mt_h5_path(in));
    MT_TRY(mt_h5_dataset_info(in, "x", &j->x));
    mt_h5_format(type, j->x.type, j->x.ndim, j->x.shape);
    MT_REQUIRE(j->x.type == MT_F32 || j->x.type == MT_F16 || j->x.type == MT_BF16, MT_EUNSUPPORTED,
               "'%s', x: it is %s, must be f32, f16, or u16 with the attribute dtype = \"bf16\"",
               mt_h5_path(in), type);
    MT_REQUIRE(j->x.ndim > 0, MT_EUNSUPPORTED,
               "'%s', x: it is a scalar, must have rows and columns", mt_h5_path(in));
    x.ndim = j->x.ndim;
    memcpy(x.shape, j->x.shape, sizeof x.shape);
    return make_cut(&j->cut, j->o, mt_tensor_rows(&x), mt_tensor_cols(&x));
}

static mt_status allocate(struct job *j)
{
    j->q.group = j->cut.group;
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
        if (!j->asked[dir]) continue;
        j->q.dir[dir] = mt_direction_of(dir == MT_ROW ? mt_format_spec_of_rows(j->spec) : j->spec);
        j->q.dir[dir].swizzled = j->o->swizzled;
    }
    MT_TRY(mt_qtensor_check(&j->q, "quantize"));
    j->source_bytes = (size_t)j->x.bytes;
    j->result_bytes = mt_qtensor_bytes(&j->q);
    j->value_bytes = (size_t)j->x.count * sizeof(float);
    j->nan_bytes = (size_t)j->cut.group.members * sizeof(int64_t);
    mt_device *d = j->device;
    MT_TRY(mt_device_alloc(d, &j->source, j->source_bytes, MT_MEMORY_WORKSPACE));
    MT_TRY(mt_device_alloc(d, &j->result, j->result_bytes, MT_MEMORY_WORKSPACE));
    MT_TRY(mt_device_alloc(d, &j->values, j->value_bytes, MT_MEMORY_WORKSPACE));
    MT_TRY(mt_device_alloc(d, &j->nan, j->nan_bytes, MT_MEMORY_WORKSPACE));
    mt_qtensor_place(&j->q, j->result);
    return MT_OK;
}

static void job_free(struct job *j)
{
    mt_device *d = j->device;
    if (d) {
        mt_device_free(d, &j->source, j->source_bytes, MT_MEMORY_WORKSPACE);
        mt_device_free(d, &j->result, j->result_bytes, MT_MEMORY_WORKSPACE);
        mt_device_free(d, &j->values, j->value_bytes, MT_MEMORY_WORKSPACE);
        mt_device_free(d, &j->nan, j->nan_bytes, MT_MEMORY_WORKSPACE);
    }
    mt_device_destroy(&j->device);
    cut_free(&j->cut);
}

static mt_status quantize(struct job *j)
{
    mt_stream stream = { .device = j->device };
    mt_qtensor source = mt_qtensor_plain(j->cut.group, (mt_dtype)j->x.type, j->source);
    return mt_quantize(&stream, &(struct mt_quantize_args){ .dtype = MT_F32,
                                                            .src = &source,
                                                            .out = &j->q,
                                                            .nan = j->nan,
                                                            .seed = (uint32_t)j->o->seed,
                                                            .stream = (uint32_t)j->o->stream,
                                                            .step = (uint32_t)j->o->step });
}

static mt_status dequantize(struct job *j, mt_dir dir)
{
    mt_stream stream = { .device = j->device };
    return mt_dequantize(
        &stream,
        &(struct mt_dequantize_args){
            .dtype = MT_F32, .src = &j->q, .dir = dir, .y = j->values, .y_dtype = MT_F32 });
}

/* ---- the file ----------------------------------------------------------------------------------
 */

static mt_status write_1d(mt_h5 *file, const char *group, const char *name, int type, int64_t count,
                          const void *data)
{
    char path[64];
    static const char nothing[sizeof(double)];
    snprintf(path, sizeof path, "%s/%s", group, name);
    return mt_h5_write(file, path, type, 1, &count, data ? data : nothing);
}

static mt_status write_group(mt_h5 *file, const struct job *j)
{
    const struct cut *c = &j->cut;
    int64_t n = c->group.members;
    MT_TRY(write_1d(file, "group", "first_dims", MT_I64, n, c->first));
    MT_TRY(write_1d(file, "group", "last_dims", MT_I64, n, c->last));
    MT_TRY(write_1d(file, "group", "offsets", MT_I64, n + 1, c->offsets));
    return write_1d(file, "group", "nan", MT_I64, n, j->nan);
}

static mt_status write_direction(mt_h5 *file, const struct job *j, mt_dir dir)
{
    static const int scale_types[] = {
        [MT_SCALE_F32] = MT_F32, [MT_SCALE_E8M0] = MT_U8, [MT_SCALE_E4M3] = MT_U8
    };
    const struct cut *c = &j->cut;
    const mt_direction *d = &j->q.dir[dir];
    const mt_format *f = d->format;
    const char *side = side_names[dir];
    int64_t n = c->group.members, code_bytes = 0, scales = 0;
    for (int64_t i = 0; i < n; i++) {
        mt_direction_shape s = mt_direction_shape_of(d, dir, c->first[i], c->last[i]);
        code_bytes += s.code_bytes;
        scales += s.scale_count;
    }
    int type = f->dtype == MT_F16 ? MT_U16 : (int)f->dtype;
    int64_t codes = code_bytes / (int64_t)mt_dtype_size(f->dtype);
    MT_TRY(write_1d(file, side, "codes", type, codes, d->codes));
    if (f->scale != MT_SCALE_NONE)
        MT_TRY(write_1d(file, side, "scales", scale_types[f->scale], scales, d->scales));
    MT_TRY(write_1d(file, side, "amax", MT_F32, n, d->amax));
    return write_1d(file, side, "dequantized", MT_F32, c->offsets[n], j->values);
}

/* What made the file. */
static mt_status write_attributes(mt_h5 *file, const struct job *j)
{
    char format[MT_FORMAT_SPEC_TEXT];
    mt_format_spec_print(format, &j->spec, 0);
    MT_TRY(mt_h5_set_string(file, "/", "format", format));
    MT_TRY(mt_h5_set_string(file, "/", "source_dtype", mt_dtype_name((mt_dtype)j->x.type)));
    MT_TRY(mt_h5_set_i64(file, "/", "swizzled", j->o->swizzled));
    MT_TRY(mt_h5_set_i64(file, "/", "seed", j->o->seed));
    MT_TRY(mt_h5_set_i64(file, "/", "stream", j->o->stream));
    return mt_h5_set_i64(file, "/", "step", j->o->step);
}

static mt_status write_all(struct job *j, mt_h5 *file)
{
    MT_TRY(write_attributes(file, j));
    MT_TRY(write_group(file, j));
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
        if (!j->asked[dir]) continue;
        if (j->cut.group.members) MT_TRY(dequantize(j, (mt_dir)dir));
        MT_TRY(write_direction(file, j, (mt_dir)dir));
    }
    return MT_OK;
}

/* ---- the verb ----------------------------------------------------------------------------------
 */

static const char *plural(int64_t n)
{
    return n == 1 ? "" : "s";
}

static void print_result(const struct job *j)
{
    char format[MT_FORMAT_SPEC_TEXT];
    const struct cut *c = &j->cut;
    int64_t nans = 0, n = c->group.members;
    for (int64_t i = 0; i < n; i++) nans += ((const int64_t *)j->nan)[i];
    mt_format_spec_print(format, &j->spec, 0);
    printf("%s: %lld element%s in %lld member%s, %s, %s\n", j->o->out, (long long)c->offsets[n],
           plural(c->offsets[n]), (long long)n, plural(n), format, j->o->direction);
    if (c->offsets[n] < j->x.count)
        printf("%lld of the input's %lld elements are past the members and left out\n",
               (long long)(j->x.count - c->offsets[n]), (long long)j->x.count);
    if (nans)
        printf("%lld element%s of the input %s NaN\n", (long long)nans, plural(nans),
               nans == 1 ? "is" : "are");
}

static mt_status run_job(struct job *j, const char *path)
{
    mt_status status = MT_OK;
    mt_h5 *in = NULL, *out = NULL;
    MT_TRY(check_options(j));
    MT_TRY(mt_file_check_result(j->o->out, path));
    MT_TRY(mt_h5_open_given(&in, path, "an HDF5 file"));
    MT_TRY_CLEANUP(read_shape(j, in));
    MT_TRY_CLEANUP(mt_device_open(&j->device, "cpu", NULL, 0));
    MT_TRY_CLEANUP(allocate(j));
    if (j->x.count) MT_TRY_CLEANUP(mt_h5_read(in, "x", &j->x, j->source));
    if (j->cut.group.members) MT_TRY_CLEANUP(quantize(j));
    MT_TRY_CLEANUP(mt_h5_create(&out, j->o->out));
    MT_TRY_CLEANUP(write_all(j, out));
    MT_TRY_CLEANUP(mt_h5_commit(&out));
    print_result(j);
cleanup:
    mt_h5_close(&in);
    mt_h5_close(&out);
    return status;
}

mt_status mt_verb_quantize(int argc, char **argv)
{
    struct options o = { .direction = "both", .members = MT_OPTION_ABSENT };
    const mt_option options[] = {
        { "o", MT_OPTION_PATH, &o.out, "OUT.h5", "where to write" },
        { "format", MT_OPTION_TEXT, &o.format, "FMT[:OPTS]",
          "a number format and its options joined with +, such as nvfp4:rht+sr" },
        { "direction", MT_OPTION_TEXT, &o.direction, "DIR", "row, col or both (default)" },
        { "members", MT_OPTION_INT, &o.members, "N",
          "cut the rows into N equal members (default 1)" },
        { "first-dims", MT_OPTION_TEXT, &o.first_dims, "A,B,..",
          "rows of each member; what the input has past them is left out" },
        { "last-dims", MT_OPTION_TEXT, &o.last_dims, "A,B,..",
          "columns of each member, one member after the other; what the input has past them is "
          "left out; with --first-dims both vary" },
        { "swizzled", MT_OPTION_FLAG, &o.swizzled, NULL,
          "scales in the order of tiles that tensor cores read (mx, nvfp4)" },
        { "seed", MT_OPTION_INT, &o.seed, "S", "of stochastic rounding, u32 (default 0)" },
        { "stream", MT_OPTION_INT, &o.stream, "K", "of stochastic rounding, u32 (default 0)" },
        { "step", MT_OPTION_INT, &o.step, "T", "of stochastic rounding, u32 (default 0)" },
    };
    const mt_command command = {
        .usage = "mixtape quantize IN.h5 -o OUT.h5 --format FMT[:OPTS] [options]",
        .about =
            "Quantizes dataset x of an HDF5 file (f32, f16, or u16 with the attribute dtype =\n"
            "\"bf16\"; last dimension: columns, the others: rows) and writes, for each direction,\n"
            "codes, scales, amax and the dequantized values, and the group's dims, offsets and\n"
            "counts of NaN: all that another implementation needs to compare bit for bit.\n"
            "Options of column directions (rht, source) leave the row direction as it is.\n"
            "What sr draws in a run is drawn here with --seed its train.seed, --step the steps "
            "made\n"
            "before (times their micro-batches, plus the micro-batch), and --stream 3 i, 3 i + 1 "
            "or\n"
            "3 i + 2 for W, X or dY of tensor i, from 0 on, as gradcheck --model lists them.",
        .options = options,
        .option_count = sizeof options / sizeof *options,
        .min_arguments = 1,
        .max_arguments = 1,
    };
    int count;
    bool help;
    MT_TRY(mt_command_parse(&command, argc, argv, &count, &help));
    if (help) return MT_OK;
    struct job job = { .o = &o };
    mt_status status = run_job(&job, argv[1]);
    job_free(&job);
    return status;
}
