/* Reading runs, grouping them, pairing them. */
#include "train/compare.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/array.h"
#include "train/fileio.h"
#include "train/kind.h"

enum { PATH_SHOWN = 200, ENV_LIMIT = 1 << 20 };

const char *const mt_compare_verdicts[MT_COMPARE_VERDICTS] = {
    [MT_COMPARE_BASELINE] = "baseline", [MT_COMPARE_UNKNOWN] = "no error known",
    [MT_COMPARE_EQUAL] = "equal",       [MT_COMPARE_NOISE] = "within noise",
    [MT_COMPARE_LOWER] = "lower",       [MT_COMPARE_HIGHER] = "higher",
};

/* ---- one run -----------------------------------------------------------------------------------
 */

static mt_status add_point(mt_compare_run *run, int64_t *room, int64_t step, double loss)
{
    MT_TRY(
        mt_array_reserve(&run->points, room, run->point_count + 1, sizeof *run->points, "losses"));
    run->points[run->point_count++] = (mt_compare_point){ step, loss };
    return MT_OK;
}

/* Takes a line of metrics.jsonl; *step becomes that of the last training line. */
static mt_status take_line(mt_compare_run *run, int64_t *room, int64_t *step, const json_t *line)
{
    const json_t *loss = json_object_get(line, "loss");
    const json_t *bytes = json_object_get(line, "valid_bits_per_byte");
    const json_t *bits = bytes ? bytes : json_object_get(line, "valid_bits_per_token");
    int64_t at = json_integer_value(json_object_get(line, "step"));
    if (bits && at == run->config.trainer.steps && json_is_true(json_object_get(line, "full"))) {
        run->bits = json_is_number(bits) ? json_number_value(bits) : (double)INFINITY;
        run->unit = bytes ? "byte" : "token";
    }
    if (!loss || at <= *step) return MT_OK;
    *step = at;
    return json_is_number(loss) ? add_point(run, room, at, json_number_value(loss)) : MT_OK;
}

static mt_status take_lines(mt_compare_run *run, int64_t *step, const char *path,
                            const mt_file_map *map)
{
    const char *line = (const char *)map->data, *end = line + map->bytes;
    int64_t room = 0;
    for (int64_t number = 1; line < end; number++) {
        const char *stop = memchr(line, '\n', (size_t)(end - line));
        bool ended = stop;
        if (!ended) stop = end;
        json_error_t error;
        json_t *object = json_loadb(line, (size_t)(stop - line), 0, &error);
        if (!object && !ended) break; /* a writer was cut off here */
        bool sound = json_is_integer(json_object_get(object, "step"));
        mt_status status = sound ? take_line(run, &room, step, object)
                                 : MT_FAIL(MT_EDAMAGED, "%.*s line %" PRId64 ": %s", PATH_SHOWN,
                                           path, number, object ? "no step" : error.text);
        json_decref(object);
        MT_TRY(status);
        line = stop + 1;
    }
    return MT_OK;
}

static mt_status read_metrics(mt_compare_run *run)
{
    char path[MT_PATH_BYTES];
    mt_file_map map = { 0 };
    int64_t step = 0, steps = run->config.trainer.steps;
    run->bits = (double)NAN;
    MT_TRY(mt_path_format(path, "%s/metrics.jsonl", run->path));
    if (mt_path_exists(path)) {
        MT_TRY(mt_file_map_open(&map, path));
        mt_status status = map.bytes ? take_lines(run, &step, path, &map) : MT_OK;
        mt_file_map_close(&map);
        MT_TRY(status);
    }
    if (!isnan(run->bits)) {
        MT_REQUIRE(isfinite(run->bits), MT_ECONFIG,
                   "'%.*s' ended with a validation loss of no "
                   "finite value: it has no difference to others",
                   PATH_SHOWN, run->path);
        return MT_OK;
    }
    MT_REQUIRE(*run->config.valid_corpus, MT_ECONFIG,
               "'%.*s' has no validation loss: its data.valid is empty", PATH_SHOWN, run->path);
    return MT_FAIL(MT_ECONFIG,
                   "'%.*s' is not finished: no validation loss of step %" PRId64
                   ", its last line is of step %" PRId64 " (train --resume finishes it)",
                   PATH_SHOWN, run->path, steps, step);
}

static void take_text(char *to, size_t bytes, const json_t *env, const char *key)
{
    const char *text = json_string_value(json_object_get(env, key));
    snprintf(to, bytes, "%s", text ? text : "");
}

/* What computed the run, and from what, where it says so. */
static mt_status read_origin(mt_compare_run *run)
{
    char path[MT_PATH_BYTES], *text;
    size_t bytes;
    MT_TRY(mt_path_format(path, "%s/env.json", run->path));
    if (!mt_path_exists(path)) return MT_OK;
    MT_TRY(mt_file_read_all(&text, &bytes, path, ENV_LIMIT));
    json_error_t error;
    json_t *env = json_loadb(text, bytes, 0, &error);
    free(text);
    MT_REQUIRE(env, MT_EDAMAGED, "%.*s line %d: %s", PATH_SHOWN, path, error.line, error.text);
    const char *revision = json_string_value(json_object_get(env, "git_revision"));
    const char *set = json_string_value(json_object_get(env, "kernel_set"));
    if (revision && set)
        snprintf(run->origin, sizeof run->origin, "revision %s, kernel set %s", revision, set);
    take_text(run->device, sizeof run->device, env, "device");
    take_text(run->train_corpus, sizeof run->train_corpus, env, "train_corpus");
    take_text(run->valid_corpus, sizeof run->valid_corpus, env, "valid_corpus");
    json_decref(env);
    return MT_OK;
}

static mt_status read_run(mt_compare_run *run, const char *path)
{
    char config[MT_PATH_BYTES], changes[MT_PATH_BYTES];
    run->path = path;
    MT_TRY(mt_path_format(config, "%s/config.resolved.yaml", path));
    MT_TRY(mt_path_format(changes, "%s/changes.jsonl", path));
    MT_REQUIRE(mt_path_exists(path), MT_EIO, "there is no run '%.*s'", PATH_SHOWN, path);
    MT_REQUIRE(mt_path_exists(config), MT_ECONFIG,
               "'%.*s' is %s, not the directory of a run: it has no config.resolved.yaml",
               PATH_SHOWN, path, mt_path_kind_of(path));
    MT_TRY(mt_config_load_recorded(&run->config, config));
    MT_TRY(read_metrics(run));
    MT_TRY(mt_changes_read(&run->changes, changes));
    return read_origin(run);
}

/* ---- groups ------------------------------------------------------------------------------------
 */

static bool is_seed(const mt_config_key *key)
{
    return strcmp(key->path, "train.seed") == 0;
}

static bool same_known(const char *a, const char *b)
{
    return *a && strcmp(a, b) == 0;
}

/* A corpus is what the run has read of it, where both say so: it may lie elsewhere now. A device is
 * the one that was found. */
static bool same_value(const mt_config_key *key, const mt_compare_run *a, const mt_compare_run *b)
{
    char first[MT_CONFIG_FORMATTED], second[MT_CONFIG_FORMATTED];
    if (!strcmp(key->path, "data.train") && same_known(a->train_corpus, b->train_corpus))
        return true;
    if (!strcmp(key->path, "data.valid") && same_known(a->valid_corpus, b->valid_corpus))
        return true;
    if (!strcmp(key->path, "device") && same_known(a->device, b->device)) return true;
    mt_config_format(first, &a->config, key);
    mt_config_format(second, &b->config, key);
    return strcmp(first, second) == 0;
}

/* But for the seed; and, unless these count, keys that change no result. */
static bool same_configuration(const mt_compare_run *a, const mt_compare_run *b, bool neutral_count)
{
    for (int i = 0; i < mt_config_key_count; i++) {
        const mt_config_key *key = &mt_config_keys[i];
        if (key->alias_of || is_seed(key) || (key->neutral && !neutral_count)) continue;
        if (!same_value(key, a, b)) return false;
    }
    return true;
}

/* The next change after change `after` (-1: the first) on which the result may depend, or NULL. */
static const mt_change *next_change(const mt_compare_run *run, int64_t *after)
{
    while (++*after < run->changes.count)
        if (mt_compare_change_counts(run, &run->changes.items[*after]))
            return &run->changes.items[*after];
    return NULL;
}

/* Whether both became what they are at the same steps. */
static bool same_changes(const mt_compare_run *a, const mt_compare_run *b)
{
    int64_t i = -1, j = -1;
    const mt_change *x, *y;
    do {
        x = next_change(a, &i), y = next_change(b, &j);
        if (!x || !y) return x == y;
    } while (x->step == y->step && !strcmp(x->key, y->key) && !strcmp(x->from, y->from) &&
             !strcmp(x->to, y->to));
    return false;
}

static uint64_t seed_of(const mt_compare_run *run)
{
    return run->config.trainer.seed;
}

/* The run of a group that has this seed, -1 when there is none. */
static int64_t find_seed(const mt_comparison *c, int64_t group, uint64_t seed)
{
    for (int64_t i = mt_compare_next(c, group, -1); i >= 0; i = mt_compare_next(c, group, i))
        if (seed_of(&c->runs[i]) == seed) return i;
    return -1;
}

/* The group of a run's configuration, -1 when there is none yet. Runs of one seed that differ in
 * keys alone that change no result are in two: that they are equal may be what is asked. So are
 * those that came to one configuration by other ways. */
static int64_t find_group(mt_comparison *c, const mt_compare_run *run)
{
    for (int64_t g = 0; g < c->group_count; g++) {
        if (!same_configuration(&c->runs[c->groups[g].first], run, false)) continue;
        int64_t twin = find_seed(c, g, seed_of(run));
        if (twin < 0) return g;
        bool equal = same_configuration(&c->runs[twin], run, true);
        if (equal && same_changes(&c->runs[twin], run)) return g;
        if (!equal) c->apart = true;
    }
    return -1;
}

/* Whether a run was validated on what those before it were, as far as they say. */
static mt_status check_validated_alike(const mt_comparison *c, int64_t i)
{
    const mt_compare_run *run = &c->runs[i], *first = c->runs;
    while (first < run && !*first->valid_corpus) first++;
    MT_REQUIRE(!*run->valid_corpus || !strcmp(run->valid_corpus, first->valid_corpus), MT_ECONFIG,
               "'%.*s' was validated on %s, '%.*s' on %s: they have no difference", PATH_SHOWN,
               first->path, first->valid_corpus, PATH_SHOWN, run->path, run->valid_corpus);
    return MT_OK;
}

/* Runs that do not say what they read may be from when losses on every corpus were called those of
 * bytes: a run on the same data.valid knows better. */
static void settle_units(mt_comparison *c)
{
    for (int64_t i = 0; i < c->run_count; i++) {
        mt_compare_run *run = &c->runs[i];
        if (*run->valid_corpus || strcmp(run->unit, "byte") != 0) continue;
        for (int64_t j = 0; j < c->run_count && !run->unit_from; j++)
            if (!strcmp(run->config.valid_corpus, c->runs[j].config.valid_corpus) &&
                !strcmp(c->runs[j].unit, "token") && !c->runs[j].unit_from)
                run->unit = "token", run->unit_from = c->runs[j].path;
    }
}

/* Puts a run into its group. */
static mt_status place(mt_comparison *c, int64_t i)
{
    mt_compare_run *run = &c->runs[i];
    int64_t g = find_group(c, run);
    MT_REQUIRE(!strcmp(run->unit, c->runs[0].unit), MT_ECONFIG,
               "'%.*s' has bits per %s, '%.*s' bits per %s: they have no difference", PATH_SHOWN,
               c->runs[0].path, c->runs[0].unit, PATH_SHOWN, run->path, run->unit);
    MT_TRY(check_validated_alike(c, i));
    if (g < 0) {
        g = c->group_count++;
        c->groups[g] = (mt_compare_group){ .first = i };
    }
    int64_t twin = find_seed(c, g, seed_of(run));
    MT_REQUIRE(twin < 0 || !mt_path_same(c->runs[twin].path, run->path), MT_ECONFIG,
               "'%.*s' is given twice", PATH_SHOWN, run->path);
    MT_REQUIRE(twin < 0, MT_ECONFIG,
               "'%.*s' and '%.*s' have the same configuration and the same seed %" PRIu64,
               PATH_SHOWN, c->runs[twin].path, PATH_SHOWN, run->path, seed_of(run));
    run->group = g;
    c->groups[g].count++;
    c->groups[g].bits += run->bits;
    return MT_OK;
}

static mt_status choose_baseline(mt_comparison *c, const char *path)
{
    if (!path) return MT_OK;
    for (int64_t i = 0; i < c->run_count; i++) {
        if (!mt_path_same(c->runs[i].path, path)) continue;
        c->baseline = c->runs[i].group;
        return MT_OK;
    }
    return MT_FAIL(MT_ECONFIG, "the baseline '%.*s' is not one of the runs given", PATH_SHOWN,
                   path);
}

/* ---- differences -------------------------------------------------------------------------------
 */

/* Welford's update: exact where all values are equal. */
typedef struct moments {
    int64_t count;
    double mean, squares;
} moments;

static void add_value(moments *m, double x)
{
    double delta = x - m->mean;
    m->mean += delta / (double)++m->count;
    m->squares += delta * (x - m->mean);
}

static mt_compare_mean mean_of(const moments *m)
{
    double n = (double)m->count;
    return (mt_compare_mean){ .pairs = m->count,
                              .mean = m->mean,
                              .error =
                                  m->count > 1 ? sqrt(m->squares / (n - 1) / n) : (double)NAN };
}

static double bits_of(const mt_compare_run *run, int64_t step)
{
    (void)step;
    return run->bits;
}

static int order_points(const void *a, const void *b)
{
    int64_t x = ((const mt_compare_point *)a)->step, y = ((const mt_compare_point *)b)->step;
    return (x > y) - (x < y);
}

/* NaN where the run has no such step. */
static double loss_of(const mt_compare_run *run, int64_t step)
{
    const mt_compare_point key = { step, 0 }, *at = NULL;
    if (run->point_count)
        at = bsearch(&key, run->points, (size_t)run->point_count, sizeof key, order_points);
    return at ? at->loss : (double)NAN;
}

/* Mean difference of a group to the baseline over the pairs that have a value. */
static mt_compare_mean difference_of(const mt_comparison *c, int64_t group, int64_t step,
                                     double (*value)(const mt_compare_run *run, int64_t step))
{
    moments m = { 0 };
    if (group == c->baseline) return mean_of(&m);
    for (int64_t i = mt_compare_next(c, group, -1); i >= 0; i = mt_compare_next(c, group, i)) {
        int64_t pair = find_seed(c, c->baseline, seed_of(&c->runs[i]));
        if (pair < 0) continue;
        double difference = value(&c->runs[i], step) - value(&c->runs[pair], step);
        if (isfinite(difference)) add_value(&m, difference);
    }
    return mean_of(&m);
}

static mt_status take_differences(mt_comparison *c)
{
    for (int64_t g = 0; g < c->group_count; g++) {
        mt_compare_group *group = &c->groups[g];
        group->bits /= (double)group->count;
        group->difference = difference_of(c, g, 0, bits_of);
        if (g == c->baseline || group->difference.pairs) continue;
        char *differs;
        MT_TRY(mt_compare_configuration(&differs, c, g));
        mt_status status =
            MT_FAIL(MT_ECONFIG,
                    "'%.*s' and the runs of its configuration (%.300s) share no seed with the "
                    "baseline, the configuration of '%.*s'",
                    PATH_SHOWN, c->runs[group->first].path, differs, PATH_SHOWN,
                    c->runs[c->groups[c->baseline].first].path);
        free(differs);
        return status;
    }
    return MT_OK;
}

/* ---- public ------------------------------------------------------------------------------------
 */

mt_status mt_compare_open(mt_comparison **comparison, char *const *paths, int count,
                          const char *baseline)
{
    mt_status status = MT_OK;
    *comparison = NULL;
    MT_REQUIRE(count > 0, MT_EINVAL, "compare: no runs");
    mt_comparison *c = calloc(1, sizeof *c);
    MT_REQUIRE(c, MT_ENOMEM, "compare: no memory");
    c->runs = calloc((size_t)count, sizeof *c->runs);
    c->groups = calloc((size_t)count, sizeof *c->groups);
    if (!c->runs || !c->groups)
        MT_TRY_CLEANUP(MT_FAIL(MT_ENOMEM, "compare: no memory for %d runs", count));
    for (int i = 0; i < count; i++) {
        c->runs[c->run_count++].group = -1;
        MT_TRY_CLEANUP(read_run(&c->runs[i], paths[i]));
    }
    settle_units(c);
    for (int i = 0; i < count; i++) MT_TRY_CLEANUP(place(c, i));
    MT_TRY_CLEANUP(choose_baseline(c, baseline));
    MT_TRY_CLEANUP(take_differences(c));
cleanup:
    if (status != MT_OK) mt_compare_close(&c);
    *comparison = c;
    return status;
}

void mt_compare_close(mt_comparison **comparison)
{
    mt_comparison *c = *comparison;
    if (!c) return;
    for (int64_t i = 0; i < c->run_count; i++) {
        free(c->runs[i].points);
        mt_changes_free(&c->runs[i].changes);
    }
    free(c->runs);
    free(c->groups);
    free(c);
    *comparison = NULL;
}

int64_t mt_compare_next(const mt_comparison *c, int64_t group, int64_t after)
{
    for (int64_t i = after + 1; i < c->run_count; i++)
        if (c->runs[i].group == group) return i;
    return -1;
}

mt_compare_verdict mt_compare_judge(const mt_comparison *c, int64_t group)
{
    const mt_compare_mean *d = &c->groups[group].difference;
    if (group == c->baseline) return MT_COMPARE_BASELINE;
    if (d->pairs < 2) return MT_COMPARE_UNKNOWN;
    if (d->mean == 0 && d->error == 0) return MT_COMPARE_EQUAL;
    if (fabs(d->mean) < 2 * d->error) return MT_COMPARE_NOISE;
    return d->mean < 0 ? MT_COMPARE_LOWER : MT_COMPARE_HIGHER;
}

/* What was found under a name is noted beside it, where it is known: corpora, and the kernel set of
 * a device. The loss is that on the last validation corpus, unless that came when all was done. */
bool mt_compare_change_counts(const mt_compare_run *run, const mt_change *change)
{
    const char *key = change->key;
    bool valid = !strcmp(key, "data.valid");
    if (valid || !strcmp(key, "valid_corpus"))
        return change->step >= run->config.trainer.steps && !(valid && *run->valid_corpus);
    if (!strcmp(key, "data.train")) return !*run->train_corpus;
    if (!strcmp(key, "device")) return !*run->origin;
    for (int i = 0; i < mt_config_key_count; i++)
        if (!strcmp(mt_config_keys[i].path, key)) return !mt_config_keys[i].neutral;
    return true;
}

double mt_compare_loss_at(const mt_comparison *c, int64_t group, int64_t step)
{
    moments m = { 0 };
    for (int64_t i = mt_compare_next(c, group, -1); i >= 0; i = mt_compare_next(c, group, i)) {
        double loss = loss_of(&c->runs[i], step);
        if (!isfinite(loss)) return (double)NAN;
        add_value(&m, loss);
    }
    return m.mean;
}

mt_compare_mean mt_compare_difference_at(const mt_comparison *c, int64_t group, int64_t step)
{
    return difference_of(c, group, step, loss_of);
}

/* Whether what a group is called by may have the key. */
static bool names_groups(const mt_comparison *c, const mt_config_key *key)
{
    return !key->alias_of && !is_seed(key) && (c->apart || !key->neutral);
}

/* Whether any group differs from the baseline in a key. */
static bool varies(const mt_comparison *c, const mt_config_key *key)
{
    const mt_compare_run *base = &c->runs[c->groups[c->baseline].first];
    for (int64_t g = 0; g < c->group_count; g++)
        if (!same_value(key, &c->runs[c->groups[g].first], base)) return true;
    return false;
}

/* Whether another group has come to the same configuration. */
static bool has_double(const mt_comparison *c, int64_t group)
{
    for (int64_t g = 0; g < c->group_count; g++)
        if (g != group && same_configuration(&c->runs[c->groups[g].first],
                                             &c->runs[c->groups[group].first], c->apart))
            return true;
    return false;
}

bool mt_compare_put_changes(FILE *to, const mt_compare_run *run, const char *first,
                            const char *next)
{
    int64_t at = -1, step = -1;
    for (const mt_change *x; (x = next_change(run, &at)) != NULL; step = x->step) {
        if (x->step == step)
            fprintf(to, ", ");
        else
            fprintf(to, "%safter step %" PRId64 ": ", step < 0 ? first : next, x->step);
        fprintf(to, "%s %s -> %s", x->key, x->from, x->to);
    }
    return step >= 0;
}

mt_status mt_compare_configuration(char **text, const mt_comparison *c, int64_t group)
{
    const mt_compare_run *run = &c->runs[c->groups[group].first];
    const mt_compare_run *base = &c->runs[c->groups[c->baseline].first];
    size_t length = 0;
    char value[MT_CONFIG_FORMATTED];
    const char *between = "";
    *text = NULL;
    FILE *file = open_memstream(text, &length);
    MT_REQUIRE(file, MT_ENOMEM, "compare: no memory for a configuration");
    for (int i = 0; i < mt_config_key_count; i++) {
        const mt_config_key *key = &mt_config_keys[i];
        if (!names_groups(c, key)) continue;
        if (group == c->baseline ? !varies(c, key) : same_value(key, run, base)) continue;
        mt_config_format(value, &run->config, key);
        fprintf(file, "%s%s: %s", between, key->path, value);
        between = ", ";
    }
    if (has_double(c, group)) {
        fprintf(file, "%s", between);
        if (!mt_compare_put_changes(file, run, "changed ", ", "))
            fprintf(file, "from the beginning");
    }
    bool failed = ferror(file) != 0;
    if (fclose(file) == 0 && !failed) return MT_OK;
    free(*text);
    *text = NULL;
    return MT_FAIL(MT_ENOMEM, "compare: no memory for a configuration");
}
