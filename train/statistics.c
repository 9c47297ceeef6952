/* Statistics in a run: which tensors, when, and where they are written. */
#include "train/statistics.h"

#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "core/array.h"
#include "layers/functional.h"
#include "train/fileio.h"
#include "train/h5.h"

enum { MOST_WHAT_IF = 16, WORD = 160, PATH = 640 };
static const char *const tensor_names[MT_OPERAND_COUNT] = { "W", "X", "dY" };
static const char *const dir_names[MT_DIR_COUNT] = { "row", "col" };

struct seen {
    const mt_param *weight;
    mt_operand operand;
};

struct mt_statistics {
    mt_trainer *trainer;
    mt_metrics *metrics;
    char folder[MT_PATH_BYTES];
    const char *layers;
    int64_t every, step;
    mt_comm *comm;
    int ranks;
    bool wanted[MT_OPERAND_COUNT][MT_DIR_COUNT];
    mt_format_spec what_if[MOST_WHAT_IF];
    int what_if_count;
    bool looking; /* while a step is measured */
    mt_measure_room room;
    mt_h5 *file;       /* of it, where there are metrics */
    struct seen *seen; /* one micro-batch of each operand counts */
    int64_t seen_count, seen_room;
};

/* ---- what the configuration asks for ------------------------------------------------------------
 */

/* The next item of a comma-joined list; false at its end. */
static bool next_item(char item[WORD], const char **list)
{
    size_t n = strcspn(*list, ",");
    if (!**list) return false;
    snprintf(item, WORD, "%.*s", (int)(n < WORD ? n : WORD - 1), *list);
    *list += n + ((*list)[n] == ',');
    return true;
}

/* "X", or "X_row". */
static mt_status want(mt_statistics *s, const char *item)
{
    bool any = false;
    for (int t = 0; t < MT_OPERAND_COUNT; t++)
        for (int d = 0; d < MT_DIR_COUNT; d++) {
            char name[16];
            snprintf(name, sizeof name, "%s_%s", tensor_names[t], dir_names[d]);
            if (strcmp(item, tensor_names[t]) != 0 && strcmp(item, name) != 0) continue;
            s->wanted[t][d] = any = true;
        }
    MT_REQUIRE(any, MT_ECONFIG,
               "statistics.tensors: '%s' is not one of W X dY, nor one with _row or _col", item);
    return MT_OK;
}

static mt_status read_config(mt_statistics *s, const mt_config *c)
{
    char item[WORD];
    s->layers = *c->statistics_layers ? c->statistics_layers : "*";
    s->every = c->statistics_every;
    for (const char *list = c->statistics_tensors; next_item(item, &list);) MT_TRY(want(s, item));
    if (!*c->statistics_tensors)
        for (int t = 0; t < MT_OPERAND_COUNT; t++) MT_TRY(want(s, tensor_names[t]));
    for (const char *list = c->statistics_what_if; next_item(item, &list);) {
        MT_REQUIRE(s->what_if_count < MOST_WHAT_IF, MT_ECONFIG,
                   "statistics.what_if: more than %d formats", MOST_WHAT_IF);
        mt_status status = mt_format_spec_parse(&s->what_if[s->what_if_count++], item);
        if (status != MT_OK) {
            char reason[300];
            snprintf(reason, sizeof reason, "%s", mt_error_message());
            return MT_FAIL(status, "statistics.what_if: %s", reason);
        }
        for (int i = 0; i + 1 < s->what_if_count; i++) /* each has its own name in the file */
            MT_REQUIRE(!mt_format_spec_equal(&s->what_if[i], &s->what_if[s->what_if_count - 1]),
                       MT_ECONFIG, "statistics.what_if: '%s' is there twice", item);
    }
    return MT_OK;
}

mt_status mt_statistics_check(const mt_config *config)
{
    mt_statistics s = { 0 };
    return read_config(&s, config);
}

mt_status mt_statistics_check_layers(const mt_config *config, mt_trainer *trainer)
{
    if (!config->statistics_every || !*config->statistics_layers) return MT_OK;
    return mt_param_store_check_pattern(mt_model_params(mt_trainer_model(trainer)),
                                        "statistics.layers: ", config->statistics_layers);
}

mt_status mt_statistics_create(mt_statistics **statistics, mt_trainer *trainer,
                               const mt_config *config, mt_metrics *metrics, const char *run_path)
{
    *statistics = NULL;
    if (!config->statistics_every) return MT_OK;
    mt_statistics *s = calloc(1, sizeof *s);
    MT_REQUIRE(s, MT_ENOMEM, "statistics: out of memory");
    s->trainer = trainer, s->metrics = metrics;
    s->comm = mt_trainer_get_config(trainer)->comm;
    s->ranks = mt_comm_size(s->comm);
    mt_status status = read_config(s, config);
    if (status == MT_OK) status = mt_path_format(s->folder, "%s/statistics", run_path);
    if (status != MT_OK) mt_statistics_destroy(&s);
    *statistics = s;
    return status;
}

static mt_precision *precision_of(const mt_statistics *s)
{
    return mt_model_precision(mt_trainer_model(s->trainer));
}

void mt_statistics_destroy(mt_statistics **statistics)
{
    mt_statistics *s = *statistics;
    if (!s) return;
    if (s->looking) mt_precision_observe(precision_of(s), "*", NULL, NULL);
    mt_h5_close(&s->file);
    mt_measure_room_free(&s->room);
    free(s->seen);
    free(s);
    *statistics = NULL;
}

/* ---- one direction ------------------------------------------------------------------------------
 */

/* What is measured: a direction of a layer's operand, in the recipe's format or another. */
struct subject {
    const char *layer, *tensor, *direction;
    char format[MT_FORMAT_SPEC_TEXT];
    bool what_if;
};

/* Ranks that share a weight's members; 1: each has all. */
static int sharers(const mt_param *w)
{
    return (int)(w->all_members / w->group.members);
}

/* What the ranks have measured of their micro-batches, in their order; of all of them, what each
 * rank measures. Weights that each has are rank 0's own affair; of others, each is measured by
 * those that have it, and the first of them counts. */
static mt_status merge_ranks(mt_statistics *s, const mt_param *w, mt_operand operand,
                             mt_measured *m)
{
    int64_t n = w->group.members;
    int parts = sharers(w);
    mt_status status = MT_OK;
    if (s->ranks == 1 || (operand == MT_OPERAND_W && parts == 1)) return MT_OK;
    size_t bytes = (size_t)n * sizeof *m;
    mt_measured *all = calloc((size_t)s->ranks, bytes);
    MT_REQUIRE(all, MT_ENOMEM, "statistics: no memory for %d ranks", s->ranks);
    MT_TRY_CLEANUP(mt_comm_all_gather(s->comm, NULL, all, m, bytes, "statistics"));
    for (int r = 0; r < s->ranks; r++) { /* dist/mesh.h */
        mt_measured *to = m + r % parts * n;
        if (r < parts) memcpy(to, all + r * n, bytes);
        for (int64_t i = 0; r >= parts && operand != MT_OPERAND_W && i < n; i++)
            mt_measure_merge(&to[i], &all[r * n + i]);
    }
cleanup:
    free(all);
    return status;
}

/* values f64 [N + 1, fields] and codes i64 [N + 1, 256], the last row of all members. */
static mt_status write_tables(mt_statistics *s, const struct subject *what, const mt_measured *m,
                              int64_t rows)
{
    char path[PATH], name[PATH + 16], fields[256] = "";
    mt_status status = MT_OK;
    snprintf(path, sizeof path, "/%s/%s_%s/%s%s", what->layer, what->tensor, what->direction,
             what->format, what->what_if ? " (what if)" : "");
    double *values = malloc((size_t)(rows * mt_measure_field_count) * sizeof *values);
    int64_t *codes = malloc((size_t)(rows * 256) * sizeof *codes);
    if (!values || !codes) {
        status = MT_FAIL(MT_ENOMEM, "statistics: no memory for %lld members", (long long)rows);
        goto cleanup;
    }
    for (int64_t i = 0; i < rows; i++) {
        memcpy(codes + i * 256, m[i].codes, 256 * sizeof *codes);
        for (int f = 0; f < mt_measure_field_count; f++)
            values[i * mt_measure_field_count + f] = mt_measure_fields[f].value(&m[i]);
    }
    for (int f = 0; f < mt_measure_field_count; f++)
        snprintf(fields + strlen(fields), sizeof fields - strlen(fields), "%s%s", f ? " " : "",
                 mt_measure_fields[f].name);
    MT_TRY_CLEANUP(mt_h5_group(s->file, path));
    MT_TRY_CLEANUP(mt_h5_set_string(s->file, path, "fields", fields));
    snprintf(name, sizeof name, "%s/values", path);
    MT_TRY_CLEANUP(
        mt_h5_write(s->file, name, MT_F64, 2, (int64_t[]){ rows, mt_measure_field_count }, values));
    snprintf(name, sizeof name, "%s/codes", path);
    MT_TRY_CLEANUP(mt_h5_write(s->file, name, MT_I64, 2, (int64_t[]){ rows, 256 }, codes));
cleanup:
    free(values), free(codes);
    return status;
}

static mt_status write_subject(mt_statistics *s, const struct subject *what, const mt_measured *m,
                               int64_t rows)
{
    for (int64_t i = 0; i < rows; i++) {
        int64_t member = i < rows - 1 ? i : -1;
        if (rows == 2 && member == 0) continue; /* one member: only what is merged */
        MT_TRY(mt_metrics_statistics(s->metrics,
                                     &(mt_metrics_subject){ .step = s->step,
                                                            .layer = what->layer,
                                                            .tensor = what->tensor,
                                                            .direction = what->direction,
                                                            .format = what->format,
                                                            .what_if = what->what_if,
                                                            .member = member },
                                     &m[i]));
    }
    return write_tables(s, what, m, rows);
}

/* What the scale of delayed scaling, that of the elements in use, is times for others. */
static float rescale_of(const mt_param *w, mt_operand operand, mt_dir dir,
                        const mt_format_spec *spec)
{
    const mt_format_spec *used = mt_recipe_direction(&w->linear->recipe, operand, dir);
    bool both = spec->format->delayed && used->format->delayed;
    return both ? mt_elements[spec->options.element].max / mt_elements[used->options.element].max
                : 1;
}

/* `out` has the formats of what is measured in direction `dir`. */
static mt_status measure(mt_statistics *s, const mt_param *w, mt_operand operand, mt_dir dir,
                         const mt_qtensor *plain, const mt_qtensor *out, bool what_if)
{
    int64_t n = w->all_members;
    struct mt_quantize_args args = mt_linear_quantize_args(w, operand);
    mt_format_spec spec = mt_direction_spec(&out->dir[dir]);
    struct subject what = { w->name, tensor_names[operand], dir_names[dir], "", what_if };
    mt_format_spec_print(what.format, &spec, 0);
    mt_measured *m = calloc((size_t)n + 1, sizeof *m);
    MT_REQUIRE(m, MT_ENOMEM, "statistics: no memory for %lld members", (long long)n);
    for (int d = 0; d < MT_DIR_COUNT; d++) args.running_amax[d] = NULL;
    mt_stream stream = { .device = mt_trainer_device(s->trainer) };
    mt_status status = mt_measure_direction(m, &stream, plain, out, dir, &args,
                                            rescale_of(w, operand, dir, &spec), &s->room);
    if (status == MT_OK) status = merge_ranks(s, w, operand, m);
    for (int64_t i = 0; i < n; i++) mt_measure_merge(&m[n], &m[i]);
    if (status == MT_OK && s->metrics) status = write_subject(s, &what, m, n + 1);
    free(m);
    return status;
}

/* Format i of what_if in a direction; false where one before it is the same there. */
static bool next_format(mt_format_spec *spec, const mt_statistics *s, int i, mt_dir dir)
{
    *spec = s->what_if[i];
    if (dir == MT_COL) return true;
    *spec = mt_format_spec_of_rows(*spec);
    for (int j = 0; j < i; j++) {
        mt_format_spec before = mt_format_spec_of_rows(s->what_if[j]);
        if (mt_format_spec_equal(&before, spec)) return false;
    }
    return true;
}

static mt_status see(void *observer, const mt_param *w, mt_operand operand, const mt_qtensor *plain)
{
    mt_statistics *s = observer;
    for (int64_t i = 0; i < s->seen_count; i++)
        if (s->seen[i].weight == w && s->seen[i].operand == operand) return MT_OK;
    MT_TRY(
        mt_array_reserve(&s->seen, &s->seen_room, s->seen_count + 1, sizeof *s->seen, "operands"));
    s->seen[s->seen_count++] = (struct seen){ w, operand };
    mt_qtensor used = { .group = plain->group };
    for (int d = 0; d < MT_DIR_COUNT; d++)
        used.dir[d] = mt_direction_of(*mt_recipe_direction(&w->linear->recipe, operand, (mt_dir)d));
    for (int d = 0; d < MT_DIR_COUNT; d++) {
        if (!s->wanted[operand][d]) continue;
        MT_TRY(measure(s, w, operand, (mt_dir)d, plain, &used, false));
        for (int i = 0; i < s->what_if_count; i++) {
            mt_qtensor other = { .group = plain->group };
            mt_format_spec spec;
            if (!next_format(&spec, s, i, (mt_dir)d)) continue;
            other.dir[d] = mt_direction_of(spec);
            MT_TRY(measure(s, w, operand, (mt_dir)d, plain, &other, true));
        }
    }
    return MT_OK;
}

/* ---- a step -------------------------------------------------------------------------------------
 */

static mt_status see_weight(mt_statistics *s, mt_param *w, void *master)
{
    mt_qtensor plain = mt_qtensor_plain(w->group, w->dtype, master);
    return see(s, w, MT_OPERAND_W, &plain);
}

/* The master of all members that are here, from the ranks' pieces, into the host's memory; `whole`
 * is NULL where it is not wanted. */
static mt_status gather_master(mt_statistics *s, const mt_param *w, char *whole)
{
    mt_param_store *params = mt_model_params(mt_trainer_model(s->trainer));
    size_t size = mt_dtype_size(w->dtype), most = 0;
    mt_status status = MT_OK;
    int parts = sharers(w), part = mt_comm_rank(s->comm) % parts;
    for (int r = 0; r < s->ranks / parts; r++) {
        size_t bytes = (size_t)mt_param_piece(params, w, r).count * size;
        if (bytes > most) most = bytes;
    }
    char *own = calloc(1, most + 1), *all = calloc((size_t)s->ranks, most + 1);
    if (!own || !all) status = MT_FAIL(MT_ENOMEM, "statistics: no memory for %s", w->name);
    if (status == MT_OK && w->own.count)
        status = mt_param_read_master(params, w, w->own.first, w->own.count, own);
    MT_TRY_CLEANUP(mt_comm_agree(s->comm, status, "statistics"));
    MT_TRY_CLEANUP(mt_comm_all_gather(s->comm, NULL, all, own, most, w->name));
    for (int r = 0; whole && r < s->ranks / parts; r++) {
        mt_piece piece = mt_param_piece(params, w, r);
        memcpy(whole + (size_t)piece.first * size, all + (size_t)(r * parts + part) * most,
               (size_t)piece.count * size);
    }
cleanup:
    free(own), free(all);
    return status;
}

/* Of a whole weight on this rank's device: rank 0 has it for the moment, and each does where they
 * have different members. */
static size_t bytes_here(const mt_param *w, const mt_comm *comm)
{
    bool here = mt_comm_rank(comm) == 0 || sharers(w) > 1;
    return here ? (size_t)mt_param_count(w) * mt_dtype_size(w->dtype) : 0;
}

/* Measures it where it is. */
static mt_status see_sharded(mt_statistics *s, mt_param *w)
{
    mt_device *device = mt_trainer_device(s->trainer);
    size_t bytes = bytes_here(w, s->comm);
    bool lead = bytes > 0, read = device->computes; /* where nothing is, it only takes room */
    void *master = NULL;
    char *whole = lead && read ? malloc(bytes + 1) : NULL;
    mt_status status = whole || !lead || !read
                           ? MT_OK
                           : MT_FAIL(MT_ENOMEM, "statistics: no memory for %s", w->name);
    MT_TRY_CLEANUP(mt_comm_agree(s->comm, status, "statistics"));
    if (read) MT_TRY_CLEANUP(gather_master(s, w, whole));
    if (!lead) goto cleanup;
    MT_TRY_CLEANUP(mt_device_alloc(device, &master, bytes, MT_MEMORY_STATE));
    if (read) MT_TRY_CLEANUP(mt_device_copy(device, master, whole, bytes));
    MT_TRY_CLEANUP(see_weight(s, w, master));
cleanup:
    mt_device_free(device, &master, bytes, MT_MEMORY_STATE);
    free(whole);
    return status;
}

static mt_status see_weights(mt_statistics *s)
{
    mt_param_store *params = mt_model_params(mt_trainer_model(s->trainer));
    mt_stream stream = { .device = mt_trainer_device(s->trainer) };
    for (int64_t i = 0; i < mt_param_store_count(params); i++) {
        mt_param *w = mt_param_store_get(params, i);
        void *master;
        if (!w->packed || fnmatch(s->layers, w->name, 0) != 0) continue;
        if (s->ranks > 1) {
            MT_TRY(see_sharded(s, w));
            continue;
        }
        MT_TRY(mt_linear_master(w, &stream, &master));
        MT_TRY(see_weight(s, w, master));
    }
    return MT_OK;
}

/* The file of a step is rank 0's. */
static mt_status create_file(mt_statistics *s)
{
    char path[MT_PATH_BYTES];
    if (!s->metrics) return MT_OK;
    mkdir(s->folder, 0777); /* it may be there; what is missing fails below */
    MT_TRY(mt_path_format(path, "%s/step_%08lld.h5", s->folder, (long long)s->step));
    return mt_h5_create(&s->file, path);
}

mt_status mt_statistics_begin(mt_statistics *s, int64_t step)
{
    if (!s || step % s->every != 0) return MT_OK;
    s->step = step, s->seen_count = 0, s->looking = true;
    MT_TRY(create_file(s));
    MT_TRY(see_weights(s));
    mt_precision_observe(precision_of(s), s->layers, see, s);
    return MT_OK;
}

mt_status mt_statistics_end(mt_statistics *s)
{
    if (!s || !s->looking) return MT_OK;
    s->looking = false;
    mt_precision_observe(precision_of(s), "*", NULL, NULL);
    return s->file ? mt_h5_commit(&s->file) : MT_OK;
}
