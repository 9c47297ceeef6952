/* Checkpoints: a directory with model.h5, which shows everything, and DONE. In model.h5:
 *
 * - /meta: attributes format_version, config (JSON, train/hf.h), run_config, source_config,
 *   git_revision, seed, step, kernel_set, compute, corpus
 * - /model/<HF name>: one tensor each, in the dtype it is stored in: masters (f32, f64) of a
 *   training run, or what an imported model came with
 * - /optim, only in training checkpoints: the attribute master = "/model" says that masters are
 *   there and are not stored twice; the step state, field by field, as attributes; `dropped`: rows
 *   that experts had no room for so far (not in older files)
 * - /optim/{m,v}/<HF name>: moments, elements as they are stored (f32, f64, bf16, or u8 codes of
 *   E4M3; attribute moments of /optim), and /optim/{m,v}_scales/<our name>: f32 [blocks] of fp8
 * - /rng, /data: attributes: seed and position of the next step's draws and batch, which follows on
 *   /data's `tokens` of the training data (older files: on `step` batches as in run_config)
 * - /state/router_bias/<i>: f32 [E] of MoE layer i
 * - /state/delayed/<layer>.<slot>.{scale,history}: f32 [N] and [length, N] of fp8_delayed
 *
 * One rank writes all of it there. Of several, each writes the elements that it owns into a file of
 * its own, rank_0000.h5 and on, at the same time as the others; model.h5 then shows the tensors of
 * /model, /optim/{m,v} and /optim/{m,v}_scales as virtual datasets, whole, with the number of ranks
 * in /meta and, in all of these files, the same attribute "set" of "/". Whoever reads model.h5 sees
 * no difference: one process, or any number of ranks, each reading its own part. The directory can
 * be moved as a whole. Ranks of several hosts need a file system that all of them see.
 *
 * DONE has a line with the version, one for each file: size, XXH3-128, name; and a line that guards
 * these lines. A directory without it is not a checkpoint.
 *
 * A checkpoint is written under a temporary name, fsynced and renamed; whatever interrupts a save,
 * the one before it loads. Everything is verified against DONE before it is opened. */
#pragma once

#include "layers/model.h"
#include "train/trainer.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MT_CHECKPOINT_VERSION = 1, MT_CHECKPOINT_PATH = 4096 };

typedef struct mt_checkpoint mt_checkpoint;

/* What a save records beside the state; texts may be NULL. */
typedef struct mt_checkpoint_info {
    const char *run_config;    /* the resolved configuration */
    const char *source_config; /* config.json that the model came with */
    const char *git_revision;
    const char *corpus; /* identity of the training data: a resume with another is refused */
} mt_checkpoint_info;

/* ---- training runs -----------------------------------------------------------------------------
 */

/* With ranks, saving and loading are collective.
 *
 * Saves DIR/step_00001000 (of the trainer's step); `path`, if not NULL, receives the checkpoint's.
 * On failure (a full disk) of any rank, all fail, nothing of it is left and older ones are
 * untouched. */
mt_status mt_checkpoint_save(const char *dir, const mt_trainer *trainer,
                             const mt_checkpoint_info *info, char path[MT_CHECKPOINT_PATH]);
/* Brings everything back: a run goes on bit for bit as if it had not stopped. Another model or
 * (where `corpus` is not NULL) another corpus is refused with MT_ECONFIG, which names the key and,
 * where that would do, --force, unless `force`; shapes must match in any case. The trainer is
 * unchanged where the checkpoint is refused. */
mt_status mt_checkpoint_load(mt_trainer *trainer, const char *path, const char *corpus, bool force);
/* The same of the checkpoint that mt_checkpoint_find_latest finds in `dir`, whose path it is. */
mt_status mt_checkpoint_load_latest(mt_trainer *trainer, char path[MT_CHECKPOINT_PATH],
                                    char *skipped, size_t skipped_bytes, const char *dir,
                                    const char *corpus, bool force);
/* Opens the checkpoint that a run of this model is to begin with, train.init_from (`given` and
 * `skipped` as of mt_checkpoint_open_given); before there is a trainer. Collective over `comm`, for
 * whose ranks it is the one that rank 0 finds. Errors: MT_ECONFIG names the key that makes it
 * another model, or the tensor that has no place in it; *source may be open then. */
mt_status mt_checkpoint_open_source(mt_checkpoint **source, char *skipped, size_t skipped_bytes,
                                    const char *given, const mt_model_config *config,
                                    mt_comm *comm);
/* Its weights and router biases, into a trainer that has made no step, which begins with them:
 * moments stay 0, scales are those of a beginning. Collective with ranks. */
mt_status mt_checkpoint_begin(mt_trainer *trainer, mt_checkpoint *source);
/* Whether checkpoints of a run of the one configuration fit another: if they do, what else is
 * another can be forced. */
bool mt_checkpoint_fits(const mt_trainer_config *saved, const mt_trainer_config *now);
/* Weights and router bias of any checkpoint into a model, converted to its masters' dtype; the
 * recipes of its step hold, with the scales of delayed scaling that a run in these formats left;
 * and refreshes it. */
mt_status mt_checkpoint_restore_model(mt_model *model, mt_checkpoint *checkpoint);
/* Opens, does that, closes. */
mt_status mt_checkpoint_load_model(mt_model *model, const char *path);

/* How many checkpoints DIR has, complete or not; 0 where it is not there. */
mt_status mt_checkpoint_count_dirs(int64_t *count, const char *dir);
/* Writes the name of the checkpoint at `path` to the file DIR/latest, for people and scripts; NULL:
 * removes it. */
mt_status mt_checkpoint_name_latest(const char *dir, const char *path);
/* MT_EIO where DIR/latest names a checkpoint and DIR has none: they were moved away. */
mt_status mt_checkpoint_check_moved(const char *dir);
/* The newest complete checkpoint in DIR. `skipped` receives a line for each newer one that is not
 * complete and why ("" if none). MT_EIO when there is none, which says the same of all, or a newer
 * one cannot be read; MT_EUNSUPPORTED when a newer one was written by a newer version. Over the
 * ranks of `comm` (NULL: alone) each verifies a share of its files; collective. */
mt_status mt_checkpoint_find_latest(char path[MT_CHECKPOINT_PATH], char *skipped,
                                    size_t skipped_bytes, const char *dir, mt_comm *comm);
/* Removes checkpoints of DIR except the newest keep_last (at least 1) and those of steps divisible
 * by keep_every (0: none), and what interrupted saves left behind. Symbolic links stay, and what
 * they lead to. */
mt_status mt_checkpoint_prune(const char *dir, int64_t keep_last, int64_t keep_every);
/* Removes what stands in DIR under steps after `step`: damaged checkpoints, for a run that goes on
 * from one before them and would else count them among those it keeps. MT_EIO if one is a link. */
mt_status mt_checkpoint_prune_after(const char *dir, int64_t step);

/* ---- reading -----------------------------------------------------------------------------------
 */

/* Verifies all files against DONE, then opens. Errors: MT_EIO (no such directory), MT_EDAMAGED (no
 * DONE, what it does not say), MT_EUNSUPPORTED (written by a newer version). */
mt_status mt_checkpoint_open(mt_checkpoint **checkpoint, const char *path);
/* The checkpoint that a user means: a checkpoint, or the newest complete one of a directory of them
 * or of a run with a ckpt/ directory; `skipped` as in mt_checkpoint_find_latest. A run that goes on
 * may remove it: before it is open, newer ones are looked for again; then it can be read to its
 * end. */
mt_status mt_checkpoint_open_given(mt_checkpoint **checkpoint, char *skipped, size_t skipped_bytes,
                                   const char *given);
/* NULL-safe; sets *checkpoint to NULL. */
void mt_checkpoint_close(mt_checkpoint **checkpoint);

typedef struct mt_checkpoint_meta {
    mt_model_config config;
    int64_t step, tokens; /* of the training data so far; tokens -1: not recorded */
    uint64_t seed;
    bool training; /* has optimizer state */
    /* texts; "" where none was recorded */
    char *config_text, *run_config, *source_config, *git_revision, *kernel_set, *compute, *corpus;
} mt_checkpoint_meta;

const mt_checkpoint_meta *mt_checkpoint_get_meta(const mt_checkpoint *checkpoint);
/* Where it was opened. */
const char *mt_checkpoint_path(const mt_checkpoint *checkpoint);
/* Tensors of /model, sorted by name. */
int64_t mt_checkpoint_count(const mt_checkpoint *checkpoint);
const char *mt_checkpoint_name(const mt_checkpoint *checkpoint, int64_t i);
/* dtype and shape of any dataset: `group` is "/model", "/optim/m", "/optim/v",
 * "/state/router_bias". `data` of *tensor is NULL. */
mt_status mt_checkpoint_tensor(mt_checkpoint *checkpoint, const char *group, const char *name,
                               mt_tensor *tensor);
/* Reads it into tensor->data, host memory for what mt_checkpoint_tensor described. */
mt_status mt_checkpoint_read(mt_checkpoint *checkpoint, const char *group, const char *name,
                             const mt_tensor *tensor);

/* Opens, takes the model's description, closes. */
mt_status mt_checkpoint_read_model_config(const char *path, mt_model_config *config);

/* ---- the pieces a save is made of --------------------------------------------------------------
 */

/* What is saved, wherever it lives; device memory unless said otherwise. */
typedef struct mt_checkpoint_state {
    const mt_model_config *config;
    mt_param_store *params;
    void *m, *v;        /* flat moments; NULL: a model without optimizer state */
    mt_moments moments; /* how they are stored, with scales where the form has them */
    float *m_scales, *v_scales;
    struct mt_step_state *step_state;
    int64_t step, tokens; /* as in mt_checkpoint_meta */
    int64_t dropped;      /* mt_trainer_dropped */
    uint64_t seed;
    mt_dtype compute;
    int64_t moe_layers;
    float *router_bias[MT_MAX_LAYERS]; /* f32 [num_experts] */
    const mt_precision *precision;     /* delayed scaling */
    mt_comm *comm;                     /* ranks that hold shards of it; NULL: all is here */
    bool misfit; /* mt_checkpoint_restore failed before all was found to fit */
} mt_checkpoint_state;

/* Writes the checkpoint directory `path`, replacing a checkpoint of that name at once. */
mt_status mt_checkpoint_write(const char *path, const mt_checkpoint_state *state,
                              const mt_checkpoint_info *info);
/* Fills the memory that `state` points to, and its step and seed. Every tensor is checked before
 * any is read. */
mt_status mt_checkpoint_restore(mt_checkpoint_state *state, mt_checkpoint *checkpoint);

#ifdef __cplusplus
}
#endif
