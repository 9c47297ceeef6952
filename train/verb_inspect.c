/* mixtape inspect: what a checkpoint, an HDF5 file or a model directory holds. */
#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/array.h"
#include "kernels/codec.h"
#include "train/checkpoint.h"
#include "train/cli.h"
#include "train/corpus.h"
#include "train/fileio.h"
#include "train/h5.h"
#include "train/kind.h"
#include "train/safetensors.h"

enum { NAME_BYTES = 256, REASON_BYTES = 1024 };

/* ---- a table of tensors ------------------------------------------------------------------------
 */

/* A tensor, or the same tensor of every expert of a layer. */
struct line {
    char name[NAME_BYTES], shape[96];
    int64_t tensors, bytes, bad; /* bad: elements that are not finite */
    double squares, most;        /* of the finite ones; most: largest magnitude */
    bool numbers;                /* squares and most say something */
};

struct table {
    struct line *lines;
    int64_t count, room;
    bool each_expert;
    int64_t unread; /* what is in the file and not read here, and why the first of it is not */
    char reason[REASON_BYTES];
};

/* "a.experts.12.b" becomes "a.experts.*.b". */
static void fold_expert(char name[NAME_BYTES])
{
    static const char mark[] = ".experts.";
    char *at = strstr(name, mark);
    if (!at) return;
    at += sizeof mark - 1;
    size_t digits = strspn(at, "0123456789");
    if (digits == 0 || at[digits] != '.') return;
    *at = '*';
    memmove(at + 1, at + digits, strlen(at + digits) + 1);
}

/* The line of this name and shape, made if there is none. */
static mt_status find_line(struct table *t, const char *tensor, const char *shape,
                           struct line **line)
{
    char name[NAME_BYTES];
    snprintf(name, sizeof name, "%s", tensor);
    if (!t->each_expert) fold_expert(name);
    for (int64_t i = t->count - 1; i >= 0; i--) {
        *line = &t->lines[i];
        if (strcmp((*line)->name, name) == 0 && strcmp((*line)->shape, shape) == 0) return MT_OK;
    }
    MT_TRY(mt_array_reserve(&t->lines, &t->room, t->count + 1, sizeof *t->lines, "tensors"));
    *line = &t->lines[t->count++];
    **line = (struct line){ 0 };
    memcpy((*line)->name, name, sizeof name);
    snprintf((*line)->shape, sizeof(*line)->shape, "%s", shape);
    return MT_OK;
}

static double element(const void *data, int type, int64_t i)
{
    return type == MT_H5_U64 ? (double)((const uint64_t *)data)[i]
                             : mt_load_f64(data, (mt_dtype)type, i);
}

static void measure_one(struct line *line, double x)
{
    if (!isfinite(x)) {
        line->bad++;
        return;
    }
    line->squares += x * x;
    if (fabs(x) > line->most) line->most = fabs(x);
}

/* Adds `count` elements to a line. */
static void measure(struct line *line, const void *data, int type, int64_t count)
{
    line->numbers = true;
    for (int64_t i = 0; i < count; i++) measure_one(line, element(data, type, i));
}

static void print_table(const struct table *t)
{
    int width = 6;
    int64_t bytes = 0, tensors = 0;
    for (int64_t i = 0; i < t->count; i++) {
        int n = (int)strlen(t->lines[i].name);
        if (n > width) width = n;
    }
    printf("%-*s %22s %6s %13s %12s %12s\n", width, "tensor", "shape", "times", "bytes", "norm",
           "largest");
    for (int64_t i = 0; i < t->count; i++) {
        const struct line *l = &t->lines[i];
        printf("%-*s %22s %6lld %13lld", width, l->name, l->shape, (long long)l->tensors,
               (long long)l->bytes);
        if (l->numbers) printf(" %12.6g %12.6g", sqrt(l->squares), l->most);
        if (l->bad) printf("  %lld NOT FINITE", (long long)l->bad);
        putchar('\n');
        bytes += l->bytes, tensors += l->tensors;
    }
    printf("%lld tensors, %lld bytes\n", (long long)tensors, (long long)bytes);
}

/* ---- checkpoints -------------------------------------------------------------------------------
 */

static mt_status add_group(struct table *t, mt_checkpoint *c, const char *group, const char *prefix)
{
    for (int64_t i = 0; i < mt_checkpoint_count(c); i++) {
        const char *name = mt_checkpoint_name(c, i);
        char shape[96], full[NAME_BYTES];
        mt_tensor x;
        struct line *line;
        MT_TRY(mt_checkpoint_tensor(c, group, name, &x));
        mt_tensor_format(shape, &x);
        snprintf(full, sizeof full, "%s%s", prefix, name);
        MT_TRY(find_line(t, full, shape, &line));
        size_t bytes = mt_tensor_bytes(&x);
        x.data = malloc(bytes + 1);
        MT_REQUIRE(x.data, MT_ENOMEM, "inspect: no memory for %zu bytes of %s", bytes, name);
        mt_status status = mt_checkpoint_read(c, group, name, &x);
        bool codes = x.dtype == MT_U8; /* of fp8 moments: they say nothing without their scales */
        if (status == MT_OK && !codes) measure(line, x.data, (int)x.dtype, mt_tensor_count(&x));
        free(x.data);
        MT_TRY(status);
        line->tensors++, line->bytes += (int64_t)bytes;
    }
    return MT_OK;
}

static void print_text(const char *name, const char *text)
{
    if (text && *text) printf("%s: %s\n", name, text);
}

static mt_status inspect_checkpoint(const char *given, struct table *t, bool moments)
{
    char skipped[1024];
    mt_checkpoint *c;
    MT_TRY(mt_checkpoint_open_given(&c, skipped, sizeof skipped, given));
    if (*skipped) fprintf(stderr, "left aside: %s\n", skipped);
    const mt_checkpoint_meta *meta = mt_checkpoint_get_meta(c);
    printf("%s: verified against DONE\n", mt_checkpoint_path(c));
    printf("%s, step %lld, seed %llu\n",
           meta->training ? "checkpoint of a run" : "model without optimizer state",
           (long long)meta->step, (unsigned long long)meta->seed);
    print_text("compute", meta->compute);
    print_text("kernel set", meta->kernel_set);
    print_text("revision", meta->git_revision);
    print_text("corpus", meta->corpus);
    print_text("model", meta->config_text);
    print_text("run configuration", meta->run_config);
    mt_status status = add_group(t, c, "/model", "");
    if (status == MT_OK && moments && meta->training) status = add_group(t, c, "/optim/m", "m ");
    if (status == MT_OK && moments && meta->training) status = add_group(t, c, "/optim/v", "v ");
    mt_checkpoint_close(&c);
    if (status == MT_OK) print_table(t);
    return status;
}

/* ---- other files -------------------------------------------------------------------------------
 */

enum { SLAB = 1 << 20, DEPTH = 8 }; /* elements read at a time; nested groups */

/* Reads a dataset in slabs of whole rows. */
static mt_status measure_dataset(struct line *line, mt_h5 *file, const char *name,
                                 const mt_h5_info *info)
{
    int64_t start[MT_MAX_DIMS] = { 0 }, count[MT_MAX_DIMS];
    memcpy(count, info->shape, sizeof count);
    int64_t rows = info->ndim ? info->shape[0] : 1, row = info->count / (rows ? rows : 1);
    int64_t step = row && SLAB / row ? SLAB / row : 1;
    if (info->count == 0) return MT_OK;
    if (step > rows) step = rows;
    size_t bytes = (size_t)(info->bytes / rows * step);
    void *data = malloc(bytes);
    MT_REQUIRE(data, MT_ENOMEM, "inspect: no memory for %zu bytes of %s", bytes, name);
    mt_status status = MT_OK;
    if (info->ndim == 0) {
        status = mt_h5_read(file, name, info, data);
        if (status == MT_OK) measure(line, data, info->type, 1);
    }
    for (int64_t at = 0; info->ndim && at < rows && status == MT_OK; at += step) {
        start[0] = at;
        count[0] = step < rows - at ? step : rows - at;
        status = mt_h5_read_slab(file, name, info->type, start, count, data);
        if (status == MT_OK) measure(line, data, info->type, count[0] * row);
    }
    free(data);
    return status;
}

/* Other programs' files hold texts, records, links: the rest of the file is to be seen all the
 * same.
 */
static mt_status add_unread(struct table *t, const char *name)
{
    struct line *line;
    if (!t->unread++) snprintf(t->reason, sizeof t->reason, "%s", mt_error_message());
    mt_error_clear();
    return find_line(t, name, "not read", &line);
}

static mt_status add_dataset(struct table *t, mt_h5 *file, const char *name)
{
    mt_h5_info info;
    struct line *line;
    char shape[96];
    mt_status status = mt_h5_dataset_info(file, name, &info);
    if (status == MT_EDAMAGED) return add_unread(t, name);
    MT_TRY(status);
    mt_h5_format(shape, info.type, info.ndim, info.shape);
    MT_TRY(find_line(t, name, shape, &line));
    line->tensors++, line->bytes += info.bytes;
    return measure_dataset(line, file, name, &info);
}

/* A dataset, or all that a group holds. Links may form cycles, so the depth is bounded. */
static mt_status add_object(struct table *t, mt_h5 *file, const char *name, int depth)
{
    char **names;
    int64_t count;
    if (mt_h5_list(file, name, &names, &count) != MT_OK) return add_dataset(t, file, name);
    mt_status status = MT_OK;
    if (depth > DEPTH)
        status = MT_FAIL(MT_EDAMAGED, "'%s', %.100s...: groups deeper than %d", mt_h5_path(file),
                         name, DEPTH);
    for (int64_t i = 0; i < count && status == MT_OK; i++) {
        char path[NAME_BYTES];
        int n = snprintf(path, sizeof path, "%s/%s", depth ? name : "", names[i]);
        status = n < NAME_BYTES
                     ? add_object(t, file, path, depth + 1)
                     : MT_FAIL(MT_EDAMAGED, "'%s', %.100s...: a name of more than %d bytes",
                               mt_h5_path(file), path, NAME_BYTES - 1);
    }
    mt_h5_names_free(&names, count);
    return status;
}

static mt_status inspect_h5(const char *path, struct table *t)
{
    mt_h5 *file;
    MT_TRY(mt_h5_open_given(&file, path, "an HDF5 file"));
    mt_status status = add_object(t, file, "/", 0);
    mt_h5_close(&file);
    MT_TRY(status);
    print_table(t);
    MT_REQUIRE(!t->unread, MT_EIO, "%lld datasets are not read here; the first: %s",
               (long long)t->unread, t->reason);
    return MT_OK;
}

static mt_status is_corpus(const char *path, bool *is)
{
    mt_h5 *file;
    bool tokens = false, sums = false;
    MT_TRY(mt_h5_open_given(&file, path, "an HDF5 file"));
    mt_status status = mt_h5_exists(file, "tokens", &tokens);
    if (status == MT_OK) status = mt_h5_exists(file, "tokens_xxh3", &sums);
    mt_h5_close(&file);
    *is = tokens && sums;
    return status;
}

static mt_status inspect_corpus(const char *path)
{
    mt_corpus *corpus;
    MT_TRY(mt_corpus_open(&corpus, path));
    const mt_corpus_info *i = mt_corpus_get_info(corpus);
    printf("%s: a corpus, checksums verified\n", path);
    printf("%lld tokens of %s in %lld document%s, vocabulary %lld, largest token %lld\n",
           (long long)i->tokens, mt_dtype_name(i->dtype), (long long)i->documents,
           i->documents == 1 ? "" : "s", (long long)i->vocab_size, (long long)i->largest);
    printf("tokenizer %s, split %s, source sha256 %s\n", i->tokenizer, i->split, i->sha256);
    mt_corpus_close(&corpus);
    return MT_OK;
}

/* Elements of FP8, which no dtype of ours is. */
static void measure_fp8(struct line *line, const mt_st_tensor *x)
{
    static const char *const names[MT_ELEMENT_COUNT] = {
        [MT_ELEMENT_E4M3] = "F8_E4M3",
        [MT_ELEMENT_E5M2] = "F8_E5M2",
    };
    mt_element element = MT_ELEMENT_E4M3;
    while (element < MT_ELEMENT_COUNT && !(names[element] && !strcmp(names[element], x->type)))
        element++;
    if (element == MT_ELEMENT_COUNT) return;
    mt_codec codec = mt_codec_of(element);
    line->numbers = true;
    for (size_t i = 0; i < x->bytes; i++)
        measure_one(line, (double)mt_decode(codec, ((const uint8_t *)x->data)[i]));
}

/* Types that nothing here decodes are listed as the file names them, without statistics. */
static mt_status add_safetensor(struct table *t, const mt_st_tensor *x)
{
    char extents[96], shape[96];
    mt_dtype dtype;
    struct line *line;
    bool known = mt_st_tensor_dtype(&dtype, x) == MT_OK;
    if (!known) mt_error_clear();
    mt_h5_format(extents, (int)(known ? dtype : MT_U8), x->ndim, x->shape);
    snprintf(shape, sizeof shape, "%s%s", known ? "" : x->type,
             known ? extents : strchr(extents, '['));
    MT_TRY(find_line(t, x->name, shape, &line));
    line->tensors++, line->bytes += (int64_t)x->bytes;
    if (!known) {
        measure_fp8(line, x);
        return MT_OK;
    }
    void *aligned = malloc(x->bytes + 1);
    MT_REQUIRE(aligned, MT_ENOMEM, "inspect: no memory for %s", x->name);
    memcpy(aligned, x->data, x->bytes);
    measure(line, aligned, (int)dtype, (int64_t)(x->bytes / mt_dtype_size(dtype)));
    free(aligned);
    return MT_OK;
}

static mt_status inspect_safetensors(const char *path, bool file, struct table *t)
{
    mt_safetensors *set;
    mt_status status = MT_OK;
    MT_TRY(file ? mt_safetensors_open(&set, path) : mt_safetensors_open_dir(&set, path));
    for (int64_t i = 0; i < mt_safetensors_count(set); i++)
        MT_TRY_CLEANUP(add_safetensor(t, mt_safetensors_get(set, i)));
    printf("%s: a %s\n", path, file ? "safetensors file" : "Hugging Face directory");
    print_table(t);
cleanup:
    mt_safetensors_close(&set);
    return status;
}

static bool is_safetensors(const char *path)
{
    static const char end[] = ".safetensors";
    size_t n = strlen(path), m = sizeof end - 1;
    return n > m && !strcmp(path + n - m, end);
}

/* ---- the verb ----------------------------------------------------------------------------------
 */

static mt_status inspect(const char *given, struct table *t, bool moments)
{
    const mt_path_kind kind = mt_path_kind_find(given);
    bool corpus = false;
    MT_REQUIRE(kind != MT_KIND_NOTHING, MT_EIO, "there is no file or directory '%s'", given);
    if (kind == MT_KIND_UNREADABLE) MT_TRY(mt_file_check_readable(given));
    if (kind >= MT_KIND_EMPTY) {
        if (kind == MT_KIND_SAFETENSORS || is_safetensors(given))
            return inspect_safetensors(given, true, t);
        MT_REQUIRE(kind == MT_KIND_HDF5, MT_EIO,
                   "'%s' is %s: inspect reads HDF5 and safetensors files, and the directories of "
                   "checkpoints, runs and Hugging Face models",
                   given, mt_path_kind_name(kind));
        MT_TRY(is_corpus(given, &corpus));
        return corpus ? inspect_corpus(given) : inspect_h5(given, t);
    }
    if (kind == MT_KIND_HUGGING_FACE) return inspect_safetensors(given, false, t);
    return inspect_checkpoint(given, t, moments);
}

mt_status mt_verb_inspect(int argc, char **argv)
{
    struct table table = { 0 };
    bool moments = false;
    const mt_option options[] = {
        { "experts", MT_OPTION_FLAG, &table.each_expert, NULL, "a line for every expert" },
        { "moments", MT_OPTION_FLAG, &moments, NULL, "the optimizer's moments too" },
    };
    const mt_command command = {
        .usage = "mixtape inspect CKPT|RUN|FILE.h5|FILE.safetensors|DIR [options]",
        .about = "What a checkpoint (verified against DONE), a corpus, any HDF5 file, a "
                 "safetensors\nfile or a Hugging Face directory holds: configuration, tensors, "
                 "shapes, types, bytes,\nnorms, and whether every number is finite.",
        .options = options,
        .option_count = sizeof options / sizeof *options,
        .min_arguments = 1,
        .max_arguments = 1,
    };
    int count;
    bool help;
    MT_TRY(mt_command_parse(&command, argc, argv, &count, &help));
    if (help) return MT_OK;
    mt_status status = inspect(argv[1], &table, moments);
    free(table.lines);
    return status;
}
