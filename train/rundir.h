/* A run's directory: config.resolved.yaml, env.json, changes.jsonl, metrics.jsonl, ckpt/. */
#pragma once

#include "train/config.h"
#include "train/fileio.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mt_rundir {
    char path[MT_PATH_BYTES], checkpoints[MT_PATH_BYTES], metrics[MT_PATH_BYTES];
    int lock;                 /* descriptor that keeps other processes out while the run is open */
    int64_t checkpoint_every; /* as recorded by the run when it was last begun or gone on with; 0 */
} mt_rundir;

typedef struct mt_rundir_options {
    const char *path; /* NULL: runs/<config name>-<date>[-n]; needed to resume */
    bool resume; /* go on with what is there; otherwise a directory that is not empty is refused */
    bool force;  /* resume although keys differ that belong to the run, but for train.init_from,
                  * which decides nothing any more once there are checkpoints */
    char *const
        *words; /* "./mixtape", "train", ...: the command, for the one that goes on; or NULL */
} mt_rundir_options;

/* Makes or enters the directory. Resuming compares the configuration with the one recorded: a key
 * marked `fixed` in mt_config_keys must not differ, others are listed in *changed (freed by the
 * caller; NULL: none). Errors: MT_ECONFIG names the key and both values; MT_EIO. On failure nothing
 * was made or changed. */
mt_status mt_rundir_open(mt_rundir *dir, char **changed, const mt_config *config,
                         const mt_rundir_options *options);
/* The same directory by another path. */
mt_status mt_rundir_place(mt_rundir *dir, const char *path);
/* Lets other processes in. */
void mt_rundir_close(mt_rundir *dir);

enum { MT_RUNDIR_COMMAND = 560 };
/* The command that goes on with the run, for a shell: the one given, with --run and --resume where
 * it has them not, and without --force unless options have it. "--resume" where it is not known, or
 * too long to be said. */
void mt_rundir_resume_command(char text[MT_RUNDIR_COMMAND], const mt_rundir *dir,
                              const mt_rundir_options *options);

/* What a run is made of. */
typedef struct mt_rundir_record {
    const mt_config *config;
    const mt_device *device;
    const char *gemm_path;
    const char *train_corpus, *valid_corpus; /* what identifies their contents; "" for none */
    int64_t step;                            /* that it goes on from */
} mt_rundir_record;

/* Records the configuration, and with what and where it runs: corpora, machine, kernel set, GEMM
 * path, libraries, revision. Keys, the kernel set and the corpora that were others when the run was
 * last recorded go to changes.jsonl, the latter are listed in *changed (freed by the caller; NULL:
 * none). Errors: MT_EIO; MT_EDAMAGED where changes.jsonl is, with nothing written. */
mt_status mt_rundir_write(char **changed, const mt_rundir *dir, const mt_rundir_record *record);

#ifdef __cplusplus
}
#endif
