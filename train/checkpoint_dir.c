/* Checkpoint directories: staging, the newest, pruning. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/array.h"
#include "train/checkpoint_priv.h"
#include "train/kind.h"
#include "train/signals.h"

enum { MAX_NAME = 255, MOST_LOOKS = 16 };

/* ---- staging -----------------------------------------------------------------------------------
 */

/* Who has moved a checkpoint elsewhere and left a link wants it kept. */
static bool is_link(const char *path)
{
    struct stat st;
    return lstat(path, &st) == 0 && S_ISLNK(st.st_mode);
}

/* Without the slashes at its end: "<path>.tmp" must be beside it, not in it. */
static mt_status trim_path(char to[MT_PATH_BYTES], const char *path)
{
    MT_TRY(mt_path_format(to, "%s", path));
    size_t n = strlen(to);
    while (n > 1 && to[n - 1] == '/') to[--n] = '\0';
    MT_REQUIRE(n, MT_EINVAL, "a checkpoint needs a name");
    return MT_OK;
}

mt_status mt_checkpoint_stage_join(mt_checkpoint_stage *stage, const char *path)
{
    stage->file = NULL;
    stage->lock = -1;
    stage->temp[0] = '\0';
    MT_TRY(trim_path(stage->path, path));
    return mt_path_format(stage->temp, "%s.tmp", stage->path);
}

/* Makes the stage this process's alone, and empties it of what a writer that died has left. */
static mt_status enter_stage(mt_checkpoint_stage *stage)
{
    MT_TRY(mt_dir_create(stage->temp));
    mt_status status = mt_dir_lock(&stage->lock, stage->temp);
    if (status == MT_ECONFIG)
        status = MT_FAIL(status, "cannot write '%s': another process is writing it", stage->path);
    if (status != MT_OK) stage->temp[0] = '\0'; /* another's */
    MT_TRY(status);
    mt_signals_begun(stage->temp);
    return mt_dir_empty(stage->temp);
}

mt_status mt_checkpoint_check_untrained(const char *path)
{
    char model[MT_PATH_BYTES];
    mt_h5 *file = NULL;
    bool training = false;
    int64_t step = 0;
    mt_status status;
    MT_TRY(mt_path_format(model, "%s/model.h5", path));
    if (!mt_path_exists(model)) return MT_OK;
    MT_TRY_CLEANUP(mt_h5_open(&file, model));
    MT_TRY_CLEANUP(mt_h5_exists(file, "/optim", &training));
    if (training) MT_TRY_CLEANUP(mt_h5_get_i64(file, "/meta", "step", &step));
cleanup:
    mt_h5_close(&file);
    MT_REQUIRE(!training, MT_EIO,
               "'%s' is a run's checkpoint of step %lld, with optimizer state: not replaced", path,
               (long long)step);
    return status == MT_EDAMAGED ? MT_OK : status; /* no run can go on from it */
}

mt_status mt_checkpoint_stage_begin(mt_checkpoint_stage *stage, const char *path)
{
    char file[MT_PATH_BYTES];
    stage->file = NULL;
    stage->lock = -1;
    stage->temp[0] = '\0';
    MT_TRY(trim_path(stage->path, path));
    MT_REQUIRE(!is_link(stage->path), MT_EIO, "'%s' is a symbolic link: not replaced", stage->path);
    MT_TRY(mt_path_format(file, "%s/DONE", stage->path));
    MT_REQUIRE(!mt_path_exists(stage->path) || mt_path_exists(file), MT_EIO,
               "'%s' exists and is not a checkpoint: not replaced", stage->path);
    MT_TRY(mt_checkpoint_stage_join(stage, path));
    MT_TRY(enter_stage(stage));
    MT_TRY(mt_path_format(file, "%s/model.h5", stage->temp));
    return mt_h5_create(&stage->file, file);
}

/* Puts the finished directory under its name; an older one of that name changes places with it, at
 * once where the file system can. */
static mt_status rename_stage(const mt_checkpoint_stage *stage)
{
    mt_status status = MT_OK;
    bool there = mt_path_exists(stage->path);
    int old = -1; /* under the stage's name it is no stage that the next writer may take */
    if (there) MT_TRY(mt_dir_lock(&old, stage->path));
    bool changed =
        there && renameat2(AT_FDCWD, stage->temp, AT_FDCWD, stage->path, RENAME_EXCHANGE) == 0;
    if (!changed &&
        ((there && mt_dir_remove(stage->path) != MT_OK) || rename(stage->temp, stage->path) != 0))
        status = MT_FAIL(MT_EIO, "cannot rename '%s' to '%s': %s", stage->temp, stage->path,
                         strerror(errno));
    if (status == MT_OK) status = mt_parent_sync(stage->path);
    if (status == MT_OK && changed) status = mt_dir_remove(stage->temp);
    if (old >= 0) close(old);
    return status;
}

/* model.h5 first, for a reader to see what the others are. */
static mt_status write_seals(const mt_checkpoint_stage *stage, const mt_checkpoint_seal *model,
                             const mt_checkpoint_seal *seals, int count)
{
    mt_checkpoint_seal *all = calloc((size_t)count + 1, sizeof *all);
    MT_REQUIRE(all, MT_ENOMEM, "no memory for the names of %d files", count);
    all[0] = *model;
    if (count) memcpy(all + 1, seals, (size_t)count * sizeof *all);
    mt_status status = mt_checkpoint_write_done(stage->temp, all, count + 1);
    free(all);
    return status;
}

mt_status mt_checkpoint_stage_publish(mt_checkpoint_stage *stage, const mt_checkpoint_seal *seals,
                                      int count)
{
    char path[MT_PATH_BYTES];
    mt_checkpoint_seal model = { .name = "model.h5" };
    MT_TRY(mt_h5_commit_sealed(&stage->file, model.hex, &model.bytes));
    MT_TRY(mt_path_format(path, "%s/model.h5", stage->temp));
    mt_signals_begun(path); /* until the stage has its name, neither it nor DONE is done */
    MT_TRY(write_seals(stage, &model, seals, count));
    MT_TRY(mt_path_format(path, "%s/DONE", stage->temp));
    mt_signals_begun(path);
    MT_TRY(mt_dir_sync(stage->temp));
    MT_TRY(rename_stage(stage));
    stage->temp[0] = '\0';
    return MT_OK;
}

void mt_checkpoint_stage_abandon(mt_checkpoint_stage *stage)
{
    char reason[1024]; /* why it is given up outlives a removal that fails too */
    mt_h5_close(&stage->file);
    snprintf(reason, sizeof reason, "%s", mt_error_message());
    if (stage->temp[0] && mt_dir_remove(stage->temp) != MT_OK) MT_FAIL(MT_EIO, "%s", reason);
    stage->temp[0] = '\0';
    if (stage->lock >= 0) close(stage->lock);
    stage->lock = -1;
}

/* ---- directories of checkpoints ----------------------------------------------------------------
 */

typedef struct step_dir {
    int64_t step;
    char name[MAX_NAME + 1];
} step_dir;

typedef struct step_list {
    step_dir *items;
    int64_t count, room;
} step_list;

static int newest_first(const void *a, const void *b)
{
    int64_t x = ((const step_dir *)a)->step, y = ((const step_dir *)b)->step;
    return x > y ? -1 : x < y;
}

/* "step_00001000" and nothing after the digits. */
static bool parse_step(int64_t *step, const char *name)
{
    char *end;
    if (strncmp(name, "step_", 5) || name[5] < '0' || name[5] > '9') return false;
    errno = 0;
    *step = strtoll(name + 5, &end, 10);
    return !*end && errno == 0;
}

static mt_status add_step(step_list *list, int64_t step, const char *name)
{
    MT_TRY(mt_array_reserve(&list->items, &list->room, list->count + 1, sizeof *list->items,
                            "checkpoints"));
    step_dir *item = &list->items[list->count++];
    item->step = step;
    snprintf(item->name, sizeof item->name, "%s", name);
    return MT_OK;
}

/* Or a link to one; what cannot be looked at may be one. */
static bool is_directory(DIR *dir, const char *name)
{
    struct stat st;
    return fstatat(dirfd(dir), name, &st, 0) != 0 || S_ISDIR(st.st_mode);
}

/* All step_* directories, newest first, complete or not; the caller frees list->items, also on
 * failure. */
static mt_status list_steps(step_list *list, const char *dir)
{
    *list = (step_list){ NULL, 0, 0 };
    DIR *d = opendir(dir);
    MT_REQUIRE(d, MT_EIO, "cannot list '%s': %s", dir, strerror(errno));
    mt_status status = MT_OK;
    int64_t step;
    for (struct dirent *e; status == MT_OK && (e = readdir(d));)
        if (parse_step(&step, e->d_name) && is_directory(d, e->d_name))
            status = add_step(list, step, e->d_name);
    closedir(d);
    if (list->count) qsort(list->items, (size_t)list->count, sizeof *list->items, newest_first);
    return status;
}

/* Entry i of rank 0's list as a path on every rank; "" past its end. */
static mt_status share_path(char path[MT_CHECKPOINT_PATH], const char *dir, const step_list *list,
                            int64_t i, mt_comm *comm)
{
    mt_status status = MT_OK;
    path[0] = '\0';
    if (i < list->count) status = mt_path_format(path, "%s/%s", dir, list->items[i].name);
    if (!comm) return status;
    MT_TRY(mt_comm_agree(comm, status, "a checkpoint's path"));
    return mt_comm_broadcast(comm, NULL, path, MT_CHECKPOINT_PATH, 0, "a checkpoint's path");
}

mt_status mt_checkpoint_count_dirs(int64_t *count, const char *dir)
{
    step_list list = { NULL, 0, 0 };
    bool there;
    *count = 0;
    MT_TRY(mt_path_look(&there, dir));
    mt_status status = there ? list_steps(&list, dir) : MT_OK;
    *count = list.count;
    free(list.items);
    return status;
}

mt_status mt_checkpoint_name_latest(const char *dir, const char *path)
{
    char latest[MT_PATH_BYTES], name[MT_PATH_BYTES];
    MT_TRY(mt_path_format(latest, "%s/latest", dir));
    if (!path) {
        MT_REQUIRE(remove(latest) == 0 || !mt_path_exists(latest), MT_EIO, "cannot remove '%s': %s",
                   latest, strerror(errno));
        return MT_OK;
    }
    const char *slash = strrchr(path, '/');
    MT_TRY(mt_path_format(name, "%s\n", slash ? slash + 1 : path));
    return mt_file_write_all(latest, name, strlen(name));
}

mt_status mt_checkpoint_check_moved(const char *dir)
{
    char latest[MT_PATH_BYTES];
    int64_t there;
    bool named;
    MT_TRY(mt_checkpoint_count_dirs(&there, dir));
    MT_TRY(mt_path_format(latest, "%s/latest", dir));
    MT_TRY(mt_path_look(&named, latest));
    MT_REQUIRE(there || !named, MT_EIO,
               "'%s' names a checkpoint, and there is none beside it: put it back, or --force to "
               "begin again without it",
               latest);
    return MT_OK;
}

/* The name in `latest` is for people and scripts: a kill between rename and marker leaves it one
 * behind, so the steps decide here. */
static mt_status find_latest(char path[MT_CHECKPOINT_PATH], int64_t *files, char *skipped,
                             size_t skipped_bytes, const char *dir, mt_comm *comm)
{
    step_list list = { NULL, 0, 0 };
    size_t used = 0;
    bool found = false, lead = mt_comm_rank(comm) == 0;
    if (skipped_bytes) skipped[0] = '\0';
    mt_status status = lead ? list_steps(&list, dir) : MT_OK;
    status = mt_comm_agree(comm, status, "a list of checkpoints");
    for (int64_t i = 0; status == MT_OK && !found; i++) {
        status = share_path(path, dir, &list, i, comm);
        if (status != MT_OK || !*path) break;
        status = mt_checkpoint_verify(path, comm, files);
        found = status == MT_OK;
        if (status != MT_EDAMAGED) continue; /* what cannot be read may well be whole */
        status = MT_OK;
        if (used < skipped_bytes)
            used += (size_t)snprintf(skipped + used, skipped_bytes - used, "%s%s: %s",
                                     used ? "\n" : "", strrchr(path, '/') + 1, mt_error_message());
    }
    free(list.items);
    if (status == MT_OK && !found) {
        status = MT_FAIL(MT_EIO, "there is no complete checkpoint in '%s'%s%s", dir,
                         used ? "; " : "", used ? skipped : "");
        if (skipped_bytes) skipped[0] = '\0'; /* said already */
        status = mt_comm_agree(comm, status, "a complete checkpoint");
    }
    return status;
}

mt_status mt_checkpoint_find_latest(char path[MT_CHECKPOINT_PATH], char *skipped,
                                    size_t skipped_bytes, const char *dir, mt_comm *comm)
{
    int64_t files;
    return find_latest(path, &files, skipped, skipped_bytes, dir, comm);
}

mt_status mt_checkpoint_open_latest(mt_checkpoint **checkpoint, char *skipped, size_t skipped_bytes,
                                    const char *dir, mt_comm *comm, bool hold)
{
    char path[MT_CHECKPOINT_PATH];
    int64_t files;
    *checkpoint = NULL;
    MT_TRY(find_latest(path, &files, skipped, skipped_bytes, dir, comm));
    return mt_checkpoint_open_verified(checkpoint, path, files, comm, hold);
}

/* A file in the place of a directory; the error says which directory, where it is a part of one. */
static mt_status refuse_file(const char *given)
{
    char dir[MT_PATH_BYTES], done[MT_PATH_BYTES];
    struct stat st;
    if (stat(given, &st) != 0 || S_ISDIR(st.st_mode)) return MT_OK;
    const char *slash = strrchr(given, '/');
    MT_TRY(mt_path_format(dir, "%.*s", slash ? (int)(slash - given) : 1, slash ? given : "."));
    MT_TRY(mt_path_format(done, "%s/DONE", dir));
    MT_REQUIRE(!mt_path_exists(done), MT_EIO,
               "'%s' is a file of a checkpoint, which is the directory '%s'", given, dir);
    return MT_FAIL(MT_EIO, "'%s' is %s: a checkpoint is a directory", given,
                   mt_path_kind_of(given));
}

/* A directory that is no checkpoint. What lacks one of DONE and model.h5 is one that is not whole:
 * who opens it says so. */
static mt_status refuse_directory(const char *given)
{
    char done[MT_PATH_BYTES], model[MT_PATH_BYTES], config[MT_PATH_BYTES];
    MT_TRY(mt_path_format(done, "%s/DONE", given));
    MT_TRY(mt_path_format(model, "%s/model.h5", given));
    MT_TRY(mt_path_format(config, "%s/config.json", given));
    if (mt_path_exists(done) || mt_path_exists(model)) return MT_OK;
    MT_REQUIRE(!mt_path_exists(config), MT_EIO,
               "'%s' is a Hugging Face directory, not a checkpoint: `mixtape import %s -o CKPT` "
               "makes one of it",
               given, given);
    return MT_FAIL(
        MT_EIO,
        "'%s' is %s that holds no checkpoint: a run, or a checkpoint with its file DONE, "
        "is wanted",
        given, mt_path_kind_of(given));
}

/* The step of the newest directory, complete or not; -1 where there is none. */
static mt_status newest_step(int64_t *step, const char *dir)
{
    step_list list;
    mt_status status = list_steps(&list, dir);
    *step = list.count ? list.items[0].step : -1;
    free(list.items);
    return status;
}

/* The directory of checkpoints that is meant; "" where what is given must be one itself. */
static mt_status find_directory(char dir[MT_PATH_BYTES], const char *given)
{
    int64_t newest;
    MT_REQUIRE(mt_path_exists(given), MT_EIO, "there is no checkpoint or run '%s'", given);
    MT_TRY(refuse_file(given));
    MT_TRY(mt_path_format(dir, "%s/ckpt", given));
    if (mt_path_exists(dir)) return MT_OK;
    MT_TRY(mt_path_format(dir, "%s", given));
    MT_TRY(newest_step(&newest, given));
    if (newest >= 0) return MT_OK;
    dir[0] = '\0';
    return refuse_directory(given);
}

/* What is meant, as a path: `dir` of find_directory, or a checkpoint. */
typedef struct meant {
    char path[MT_PATH_BYTES];
    int64_t is_dir;
} meant;

static mt_status find_meant(meant *m, const char *given, bool whole)
{
    MT_TRY(find_directory(m->path, given));
    m->is_dir = *m->path != '\0';
    if (!m->is_dir) MT_TRY(mt_path_format(m->path, "%s", given));
    char *path = whole ? realpath(m->path, NULL) : NULL;
    mt_status status = path ? mt_path_format(m->path, "%s", path) : MT_OK;
    free(path);
    return status;
}

static mt_status share_meant(meant *m, const char *given, mt_comm *comm)
{
    const bool alone = mt_comm_size(comm) == 1;
    *m = (meant){ .is_dir = false };
    mt_status status = mt_comm_rank(comm) == 0 ? find_meant(m, given, !alone) : MT_OK;
    if (alone) return status;
    MT_TRY(mt_comm_agree(comm, status, "a checkpoint that was given"));
    return mt_comm_broadcast(comm, NULL, m, sizeof *m, 0, "a checkpoint that was given");
}

/* What failed before stays what is said. Rank 0 looks. */
static mt_status has_newer(int64_t *newer, const char *dir, int64_t step, mt_comm *comm)
{
    int64_t newest;
    mt_error_kept kept;
    mt_error_keep(&kept);
    *newer = mt_comm_rank(comm) == 0 && newest_step(&newest, dir) == MT_OK && newest > step;
    mt_error_put_back(&kept);
    if (mt_comm_size(comm) == 1) return MT_OK;
    return mt_comm_all_reduce(comm, NULL, newer, 1, MT_I64, MT_REDUCE_MAX, "a newer checkpoint");
}

/* A run removes old checkpoints when it has saved a new one: what is not whole, or not there any
 * more, where there is a newer one since, was not damaged. */
mt_status mt_checkpoint_open_given_among(mt_checkpoint **checkpoint, char *skipped,
                                         size_t skipped_bytes, const char *given, mt_comm *comm)
{
    meant m;
    int64_t newest = -1, newer;
    *checkpoint = NULL;
    skipped[0] = '\0';
    MT_TRY(share_meant(&m, given, comm));
    if (!m.is_dir) return mt_checkpoint_open_among(checkpoint, m.path, comm, true);
    for (int look = 1;; look++) {
        mt_status status = mt_comm_rank(comm) == 0 ? newest_step(&newest, m.path) : MT_OK;
        MT_TRY(mt_comm_agree(comm, status, "a list of checkpoints"));
        status = mt_checkpoint_open_latest(checkpoint, skipped, skipped_bytes, m.path, comm, true);
        bool doubtful = status == MT_EIO || status == MT_EDAMAGED || *skipped;
        if (!doubtful || look == MOST_LOOKS) return status;
        MT_TRY(has_newer(&newer, m.path, newest, comm));
        if (!newer) return status;
        mt_checkpoint_close(checkpoint);
        mt_error_clear();
    }
}

mt_status mt_checkpoint_open_given(mt_checkpoint **checkpoint, char *skipped, size_t skipped_bytes,
                                   const char *given)
{
    return mt_checkpoint_open_given_among(checkpoint, skipped, skipped_bytes, given, NULL);
}

/* A checkpoint goes in two steps: without DONE it is none any more, however far the removal comes.
 */
static mt_status remove_checkpoint(const char *path)
{
    char done[MT_PATH_BYTES];
    MT_REQUIRE(!is_link(path), MT_EIO, "'%s' is a symbolic link: not removed", path);
    MT_TRY(mt_path_format(done, "%s/DONE", path));
    MT_REQUIRE(unlink(done) == 0 || errno == ENOENT || errno == EISDIR, MT_EIO,
               "cannot remove '%s': %s", done, strerror(errno));
    return mt_dir_remove(path);
}

/* Directories "step_*.tmp" of saves that were killed. */
static mt_status remove_stages(const char *dir)
{
    char path[MT_PATH_BYTES];
    DIR *d = opendir(dir);
    MT_REQUIRE(d, MT_EIO, "cannot list '%s': %s", dir, strerror(errno));
    mt_status status = MT_OK;
    for (struct dirent *e; status == MT_OK && (e = readdir(d));) {
        size_t n = strlen(e->d_name);
        if (strncmp(e->d_name, "step_", 5) || n < 4 || strcmp(e->d_name + n - 4, ".tmp")) continue;
        status = mt_path_format(path, "%s/%s", dir, e->d_name);
        if (status == MT_OK) status = mt_dir_remove(path);
    }
    closedir(d);
    return status;
}

mt_status mt_checkpoint_prune(const char *dir, int64_t keep_last, int64_t keep_every)
{
    char path[MT_PATH_BYTES], done[MT_PATH_BYTES];
    step_list list;
    mt_status status;
    int64_t kept = 0;
    MT_TRY_CLEANUP(list_steps(&list, dir));
    for (int64_t i = 0; i < list.count; i++) {
        MT_TRY_CLEANUP(mt_path_format(path, "%s/%s", dir, list.items[i].name));
        MT_TRY_CLEANUP(mt_path_format(done, "%s/DONE", path));
        bool complete;
        MT_TRY_CLEANUP(mt_path_look(&complete, done)); /* what is not seen may well be there */
        bool wanted = complete && (kept < (keep_last > 1 ? keep_last : 1) ||
                                   (keep_every > 0 && list.items[i].step % keep_every == 0));
        kept += complete;
        if (!wanted && !is_link(path)) MT_TRY_CLEANUP(remove_checkpoint(path));
    }
    MT_TRY_CLEANUP(remove_stages(dir));
cleanup:
    free(list.items);
    return status;
}

mt_status mt_checkpoint_prune_after(const char *dir, int64_t step)
{
    char path[MT_PATH_BYTES];
    step_list list;
    mt_status status;
    MT_TRY_CLEANUP(list_steps(&list, dir));
    for (int64_t i = 0; i < list.count && list.items[i].step > step; i++) {
        MT_TRY_CLEANUP(mt_path_format(path, "%s/%s", dir, list.items[i].name));
        MT_TRY_CLEANUP(remove_checkpoint(path));
    }
cleanup:
    free(list.items);
    return status;
}
