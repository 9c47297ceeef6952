/* The directory of a run, and what identifies the run in it. */
#include "train/rundir.h"

#include <dirent.h>
#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#include "train/build_info.h"
#include "train/changes.h"
#include "train/checkpoint.h"
#include "train/kind.h"
#include "train/metrics.h"

enum { HOLDER = 340 };

/* The first file of a run; what is there of it where a run was killed as it began is no entry. */
#define RECORD "config.resolved.yaml"
/* How a change of it is said that is not known. */
#define LOST    "lost"
#define WRITTEN "written anew"

static mt_status look_for_entries(bool *any, const char *path)
{
    static const char *const none[] = { ".", "..", RECORD ".tmp" };
    DIR *dir = opendir(path);
    *any = false;
    if (!dir && errno == ENOENT) return MT_OK;
    MT_REQUIRE(dir, MT_EIO, "run %.300s: %s", path, strerror(errno));
    for (struct dirent *d; !*any && (d = readdir(dir));) {
        *any = true;
        for (size_t i = 0; i < sizeof none / sizeof *none; i++)
            if (!strcmp(d->d_name, none[i])) *any = false;
    }
    closedir(dir);
    return MT_OK;
}

/* A directory named by the time; of runs that begin in one second, also on several hosts, each
 * makes its own. */
static mt_status make_dated(mt_rundir *dir, const mt_config *config)
{
    enum { SAME_SECOND = 1000 };
    char date[32], more[16] = "";
    time_t now = time(NULL);
    struct tm local;
    strftime(date, sizeof date, "%Y%m%d-%H%M%S", localtime_r(&now, &local));
    MT_TRY(mt_dir_create("runs"));
    for (int n = 2;; n++) {
        MT_TRY(mt_path_format(dir->path, "runs/%s-%s%s", config->name, date, more));
        if (mkdir(dir->path, 0777) == 0) return MT_OK;
        MT_REQUIRE(errno == EEXIST && n <= SAME_SECOND, MT_EIO, "cannot create directory '%s': %s",
                   dir->path, strerror(errno));
        snprintf(more, sizeof more, "-%d", n);
    }
}

static mt_status choose_path(mt_rundir *dir, const mt_config *config,
                             const mt_rundir_options *options)
{
    if (options->path) return mt_path_format(dir->path, "%s", options->path);
    MT_REQUIRE(!options->resume, MT_ECONFIG, "--resume needs --run DIR");
    return make_dated(dir, config);
}

/* ---- resuming -----------------------------------------------------------------------------------
 */

static mt_status append_change(char **changed, const char *path, const char *from, const char *to)
{
    char *joined = NULL;
    if (asprintf(&joined, "%s%s%s %s -> %s", *changed ? *changed : "", *changed ? ", " : "", path,
                 from, to) < 0)
        return MT_FAIL(MT_ENOMEM, "no memory to list changed keys");
    free(*changed);
    *changed = joined;
    return MT_OK;
}

/* Follows from data.sequence_length, unless it is set: then that is the key that was changed. */
static bool follows(const mt_config_key *key, const mt_config *old, const mt_config *config)
{
    return strcmp(key->path, "model.max_position_embeddings") == 0 &&
           old->trainer.sequence_length != config->trainer.sequence_length &&
           config->trainer.model.max_position_embeddings == config->trainer.sequence_length;
}

static bool has_saved(const mt_rundir *dir)
{
    int64_t there;
    return mt_checkpoint_count_dirs(&there, dir->checkpoints) != MT_OK || there;
}

/* Had its effect when the run began: what it is now would be recorded, and untrue. */
static bool is_past(const mt_config_key *key, const mt_rundir *dir)
{
    return strcmp(key->path, "train.init_from") == 0 && has_saved(dir);
}

/* How a key that belongs to the run may still be another: any, where nothing is saved yet. */
static const char *offer_force(const mt_rundir *dir, const mt_config *old, const mt_config *config)
{
    return !has_saved(dir) || mt_checkpoint_fits(&old->trainer, &config->trainer)
               ? " (--force to go on all the same)"
               : "";
}

static mt_status compare(char **changed, const mt_rundir *dir, const mt_config *old,
                         const mt_config *config, bool force)
{
    char from[MT_CONFIG_FORMATTED], to[MT_CONFIG_FORMATTED];
    for (int i = 0; i < mt_config_key_count; i++) {
        const mt_config_key *key = &mt_config_keys[i];
        mt_config_format(from, old, key);
        mt_config_format(to, config, key);
        if (key->alias_of || strcmp(from, to) == 0) continue;
        MT_REQUIRE(!is_past(key, dir), MT_ECONFIG,
                   "run %.300s: %s was %.100s and is %.100s now; the run began with the former, "
                   "--force or not",
                   dir->path, key->path, from, to);
        MT_REQUIRE(!key->fixed || force || follows(key, old, config), MT_ECONFIG,
                   "run %.300s: %s was %.100s and is %.100s now; it belongs to the run%s",
                   dir->path, key->path, from, to, offer_force(dir, old, config));
        MT_TRY(append_change(changed, key->path, from, to));
    }
    return MT_OK;
}

/* " (the run is '/a/run')" where `path` is a directory in one, such as a checkpoint's; else "". */
static void name_holder(char text[HOLDER], const char *path)
{
    char *above = realpath(path, NULL);
    *text = '\0';
    for (int levels = 2; above && levels; levels--) {
        char *slash = strrchr(above, '/');
        if (!slash || slash == above) break;
        *slash = '\0';
        if (mt_path_kind_find(above) != MT_KIND_RUN) continue;
        snprintf(text, HOLDER, " (the run is '%.300s')", above);
        break;
    }
    free(above);
}

/* The record is gone. A directory without anything else has nothing to compare with: the run begins
 * in it. */
static mt_status do_without_record(char **changed, const mt_rundir *dir, bool force)
{
    char holder[HOLDER];
    int64_t saved;
    bool any;
    MT_TRY(look_for_entries(&any, dir->path));
    if (!any) return MT_OK;
    MT_TRY(mt_checkpoint_count_dirs(&saved, dir->checkpoints));
    name_holder(holder, dir->path);
    MT_REQUIRE(saved, MT_ECONFIG,
               "%.300s is not empty and has no " RECORD ": not a run to resume%s", dir->path,
               holder);
    MT_REQUIRE(force, MT_ECONFIG,
               "%.300s has checkpoints and no " RECORD " (--force to go on without it)", dir->path);
    return append_change(changed, RECORD, LOST, WRITTEN);
}

static mt_status compare_with_recorded(char **changed, mt_rundir *dir, const mt_config *config,
                                       bool force)
{
    char path[MT_PATH_BYTES];
    mt_config old;
    bool there;
    MT_TRY(mt_path_format(path, "%s/" RECORD, dir->path));
    MT_TRY(mt_path_look(&there, path));
    if (!there) return do_without_record(changed, dir, force);
    mt_status status = mt_config_load_recorded(&old, path);
    if (status == MT_EDAMAGED && !force)
        return MT_FAIL(status, "%.900s (--force to go on without it)", mt_error_message());
    if (status == MT_EDAMAGED) {
        mt_error_clear();
        return append_change(changed, RECORD, LOST, WRITTEN);
    }
    MT_TRY(status);
    dir->checkpoint_every = old.checkpoint_every;
    return compare(changed, dir, &old, config, force);
}

/* ---- opening ------------------------------------------------------------------------------------
 */

static mt_status place_parts(mt_rundir *dir)
{
    MT_TRY(mt_path_format(dir->checkpoints, "%s/ckpt", dir->path));
    return mt_path_format(dir->metrics, "%s/metrics.jsonl", dir->path);
}

mt_status mt_rundir_place(mt_rundir *dir, const char *path)
{
    MT_TRY(mt_path_format(dir->path, "%s", path));
    return place_parts(dir);
}

/* Whether there is anything of a run beside what it was to be. */
static mt_status look_for_steps(bool *any, const mt_rundir *dir)
{
    int64_t there, last;
    MT_TRY(mt_checkpoint_check_moved(dir->checkpoints));
    MT_TRY(mt_checkpoint_count_dirs(&there, dir->checkpoints));
    MT_TRY(mt_metrics_last_step(&last, dir->metrics));
    *any = there > 0 || last > 0;
    return MT_OK;
}

static mt_status enter(mt_rundir *dir, char **changed, const mt_config *config,
                       const mt_rundir_options *options)
{
    char holder[HOLDER];
    bool any = false;
    MT_TRY(choose_path(dir, config, options));
    MT_TRY(place_parts(dir));
    if (options->resume)
        MT_TRY(compare_with_recorded(changed, dir, config, options->force));
    else
        MT_TRY(look_for_entries(&any, dir->path));
    mt_path_kind kind = mt_path_kind_find(dir->path);
    name_holder(holder, dir->path);
    MT_REQUIRE(!any || kind == MT_KIND_RUN, MT_ECONFIG,
               "run %.300s: it is %s that is not empty, and no run: --run takes a new one%s",
               dir->path, mt_path_kind_name(kind), holder);
    if (any && !options->resume) MT_TRY(look_for_steps(&any, dir));
    MT_REQUIRE(!any, MT_ECONFIG, "run %.300s is not empty: --resume goes on with it", dir->path);
    MT_TRY(mt_dir_create(dir->path));
    return mt_dir_lock(&dir->lock, dir->path);
}

mt_status mt_rundir_open(mt_rundir *dir, char **changed, const mt_config *config,
                         const mt_rundir_options *options)
{
    dir->lock = -1, dir->checkpoint_every = 0;
    *changed = NULL;
    mt_status status = enter(dir, changed, config, options);
    if (status == MT_OK) return MT_OK;
    mt_rundir_close(dir);
    free(*changed);
    *changed = NULL;
    return mt_error_pass(status, __FILE__, __LINE__);
}

void mt_rundir_close(mt_rundir *dir)
{
    if (dir->lock >= 0) close(dir->lock);
    dir->lock = -1;
}

/* ---- going on -----------------------------------------------------------------------------------
 */

/* Appends a blank and the word, in quotes where a shell would read it otherwise; false: no room. */
static bool append_word(char text[MT_RUNDIR_COMMAND], const char *word)
{
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                                "_-+=:,./@%";
    size_t at = strlen(text);
    bool quoted = !*word || word[strspn(word, plain)];
    if (MT_RUNDIR_COMMAND < at + 4 * strlen(word) + 4) return false; /* each a quote: '\'' */
    if (at) text[at++] = ' ';
    if (quoted) text[at++] = '\'';
    for (; *word; word++) {
        if (*word == '\'') {
            memcpy(text + at, "'\\''", 4);
            at += 4;
        } else {
            text[at++] = *word;
        }
    }
    if (quoted) text[at++] = '\'';
    text[at] = '\0';
    return true;
}

/* The words added come first: those given may end in "--" and what follows it. */
static bool write_command(char text[MT_RUNDIR_COMMAND], const char *path,
                          const mt_rundir_options *options)
{
    const char *const run[] = { "--run", path, NULL }, *const go_on[] = { "--resume", NULL };
    char *const *given = options->words;
    bool options_end = false;
    *text = '\0';
    for (int i = 0; i < 2 && given[i]; i++)
        if (!append_word(text, given[i])) return false;
    for (int i = 0; !options->path && run[i]; i++)
        if (!append_word(text, run[i])) return false;
    for (int i = 0; !options->resume && go_on[i]; i++)
        if (!append_word(text, go_on[i])) return false;
    for (int i = 2; given[i]; i++) {
        if (!strcmp(given[i], "--")) options_end = true;
        if (!options_end && !options->force && !strcmp(given[i], "--force")) continue;
        if (!append_word(text, given[i])) return false;
    }
    return true;
}

void mt_rundir_resume_command(char text[MT_RUNDIR_COMMAND], const mt_rundir *dir,
                              const mt_rundir_options *options)
{
    if (!options->words || !write_command(text, dir->path, options))
        snprintf(text, MT_RUNDIR_COMMAND, "--resume");
}

/* ---- what is recorded ---------------------------------------------------------------------------
 */

/* "model name" of /proc/cpuinfo. */
static void read_cpu_name(char name[128])
{
    char line[256];
    FILE *file = fopen("/proc/cpuinfo", "r");
    snprintf(name, 128, "unknown");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "model name : %127[^\n]", name) == 1) break;
    if (file) fclose(file);
}

static json_t *describe(const mt_rundir_record *r)
{
    const mt_device *device = r->device;
    char cpu[128], date[32];
    struct utsname host = { 0 };
    struct tm utc;
    time_t now = time(NULL);
    uname(&host);
    read_cpu_name(cpu);
    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
    return json_pack(
        "{s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:I, s:s, s:i, s:s, s:s, s:s, s:s, s:s}",
        "started", date, "git_revision", mt_build_revision(), "compiler", mt_build_compiler(),
        "libraries", mt_build_libraries(), "host", host.nodename, "system", host.release, "machine",
        host.machine, "cpu", cpu, "cores", (json_int_t)sysconf(_SC_NPROCESSORS_ONLN), "device",
        device->name, "threads", device->threads, "kernel_set",
        device->kernel_set ? device->kernel_set : "", "gemm_path", r->gemm_path, "dtype",
        mt_dtype_name(r->config->trainer.dtype), "train_corpus", r->train_corpus, "valid_corpus",
        r->valid_corpus);
}

/* What decides the run's bits and losses without being in its configuration, where `now` has it
 * otherwise than the file did. One that cannot be read says nothing: it is about to be replaced. */
static mt_status compare_env(char **changed, mt_changes *changes, int64_t step, const char *path,
                             const json_t *now)
{
    enum { ENV_LIMIT = 1 << 20 };
    static const char *const keys[] = { "kernel_set", "train_corpus", "valid_corpus" };
    char *text;
    size_t bytes;
    if (!mt_path_exists(path) || mt_file_read_all(&text, &bytes, path, ENV_LIMIT) != MT_OK)
        return MT_OK;
    json_t *old = json_loadb(text, bytes, 0, NULL);
    free(text);
    mt_status status = MT_OK;
    for (size_t i = 0; i < sizeof keys / sizeof *keys && status == MT_OK; i++) {
        const char *from = json_string_value(json_object_get(old, keys[i]));
        const char *to = json_string_value(json_object_get(now, keys[i]));
        if (!from || !*from || !to || !*to || strcmp(from, to) == 0) continue;
        status = append_change(changed, keys[i], from, to);
        if (status == MT_OK) status = mt_changes_add(changes, step, keys[i], from, to);
    }
    json_decref(old);
    return status;
}

/* The keys that the file had otherwise; of one that is not whole, that this is not known. */
static mt_status compare_record(mt_changes *changes, const mt_rundir_record *r, const char *path)
{
    char from[MT_CONFIG_FORMATTED], to[MT_CONFIG_FORMATTED];
    mt_config old;
    mt_status status = MT_EDAMAGED;
    bool there;
    MT_TRY(mt_path_look(&there, path));
    if (there) status = mt_config_load_recorded(&old, path);
    if (status == MT_EDAMAGED) {
        mt_error_clear();
        return mt_changes_add(changes, r->step, RECORD, LOST, WRITTEN);
    }
    MT_TRY(status);
    for (int i = 0; i < mt_config_key_count; i++) {
        const mt_config_key *key = &mt_config_keys[i];
        if (key->alias_of) continue;
        mt_config_format(from, &old, key);
        mt_config_format(to, r->config, key);
        if (strcmp(from, to) != 0) MT_TRY(mt_changes_add(changes, r->step, key->path, from, to));
    }
    return MT_OK;
}

/* A kill may come between the files: changes are written before what they are taken from. */
static mt_status write_records(char **changed, mt_changes *changes, const mt_rundir *dir,
                               const mt_rundir_record *r, const json_t *env)
{
    char record[MT_PATH_BYTES], environment[MT_PATH_BYTES], path[MT_PATH_BYTES];
    char *config = NULL, *machine = NULL;
    mt_status status;
    MT_TRY(mt_path_format(record, "%s/" RECORD, dir->path));
    MT_TRY(mt_path_format(environment, "%s/env.json", dir->path));
    MT_TRY(mt_path_format(path, "%s/changes.jsonl", dir->path));
    MT_TRY(mt_changes_read(changes, path));
    MT_TRY(mt_changes_rewind(changes, r->step));
    MT_TRY(compare_record(changes, r, record));
    MT_TRY(compare_env(changed, changes, r->step, environment, env));
    MT_TRY(mt_changes_write(changes, path));
    MT_TRY(mt_config_text(&config, r->config));
    MT_TRY_CLEANUP(mt_file_write_all(record, config, strlen(config)));
    machine = json_dumps(env, JSON_INDENT(2));
    status = machine ? mt_file_write_all(environment, machine, strlen(machine))
                     : MT_FAIL(MT_ENOMEM, "env.json: no memory");
cleanup:
    free(config);
    free(machine);
    return status;
}

mt_status mt_rundir_write(char **changed, const mt_rundir *dir, const mt_rundir_record *record)
{
    mt_changes changes = { 0 };
    json_t *env = describe(record);
    *changed = NULL;
    mt_status status = env ? write_records(changed, &changes, dir, record, env)
                           : MT_FAIL(MT_ENOMEM, "env.json: no memory");
    mt_changes_free(&changes);
    json_decref(env);
    if (status == MT_OK) return MT_OK;
    free(*changed);
    *changed = NULL;
    return status;
}
