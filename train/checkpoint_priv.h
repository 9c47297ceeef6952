/* What the files of checkpoint share with train/hf_import.c. */
#pragma once

#include "train/checkpoint.h"
#include "train/fileio.h"
#include "train/h5.h"

/* ---- directories --------------------------------------------------------------------------------
 */

enum { MT_SEAL_NAME = 64 };

/* What DONE says of a file. */
typedef struct mt_checkpoint_seal {
    int64_t bytes;
    char hex[MT_HEX128_BYTES], name[MT_SEAL_NAME];
} mt_checkpoint_seal;

/* A checkpoint directory being written: `<path>.tmp` until published. */
typedef struct mt_checkpoint_stage {
    char path[MT_PATH_BYTES], temp[MT_PATH_BYTES];
    mt_h5 *file; /* model.h5 */
    int lock;    /* descriptor of `temp`, of whoever began: one writer at a time; -1: none */
} mt_checkpoint_stage;

/* Begins. Refuses a path that exists and is not a checkpoint, or that another process writes. */
mt_status mt_checkpoint_stage_begin(mt_checkpoint_stage *stage, const char *path);
/* Refuses, with MT_EIO, the path of a checkpoint with optimizer state, which only the run that made
 * it may replace. */
mt_status mt_checkpoint_check_untrained(const char *path);
/* Only the names, for a rank other than the one that begins. */
mt_status mt_checkpoint_stage_join(mt_checkpoint_stage *stage, const char *path);
/* Commits model.h5, writes DONE for it and for `count` other files, renames the directory. On
 * failure the caller abandons. */
mt_status mt_checkpoint_stage_publish(mt_checkpoint_stage *stage, const mt_checkpoint_seal *seals,
                                      int count);
/* Removes what was written so far; harmless after publishing. */
void mt_checkpoint_stage_abandon(mt_checkpoint_stage *stage);

/* /meta. */
mt_status mt_checkpoint_write_meta(mt_h5 *file, const mt_checkpoint_state *state,
                                   const mt_checkpoint_info *info);

/* ---- shards -------------------------------------------------------------------------------------
 */

/* Where a rank puts the tensors that are sharded. Alone, it has them whole, and they go to
 * model.h5. Among others it puts the elements that it owns into a file of its own, rank_0003.h5: a
 * dataset of one dimension for each tensor, and `index`, text of a line "first count dtype ndim
 * extents name" for each range of elements, in the order in which they are there. */
typedef struct mt_checkpoint_shard {
    const mt_checkpoint_state *state;
    mt_h5 *file; /* alone: borrowed */
    char *set;   /* what the files of this save, and no others, have in common */
    char *index;
    size_t used, room;
    mt_checkpoint_seal *seals; /* of every rank's file, once it is ended */
} mt_checkpoint_shard;

typedef struct mt_range {
    int64_t first, count; /* elements of a flattened tensor */
} mt_range;

/* "rank_0003.h5" */
void mt_checkpoint_shard_name(char name[MT_SEAL_NAME], int rank);
mt_status mt_checkpoint_shard_begin(mt_checkpoint_shard *shard, const mt_checkpoint_stage *stage,
                                    const mt_checkpoint_state *state,
                                    const mt_checkpoint_info *info);
/* Writes what this rank owns of a tensor: `count` ranges of it, packed in `data`. A tensor is put
 * once by a rank; its ranges on all ranks are the whole, each element once. 0 ranges: nothing. */
mt_status mt_checkpoint_put(mt_checkpoint_shard *shard, const char *name, mt_dtype dtype, int ndim,
                            const int64_t *shape, const mt_range *ranges, int64_t count,
                            const void *data);
/* Ends the file; seals of all ranks' are here then. Collective: fails on all if on one. */
mt_status mt_checkpoint_shard_end(mt_checkpoint_shard *shard, mt_status status);
/* Shows the tensors of all ranks in model.h5, whole. Nothing where one rank has all. */
mt_status mt_checkpoint_show_shards(const mt_checkpoint_shard *shard,
                                    const mt_checkpoint_stage *stage);
/* Frees it, and drops a file that is not ended. */
void mt_checkpoint_shard_close(mt_checkpoint_shard *shard);

/* Writes the DONE of a directory's files, whose first is model.h5. */
mt_status mt_checkpoint_write_done(const char *dir, const mt_checkpoint_seal *seals, int count);
/* Verifies every file that DONE lists, and counts them. Over the ranks of `comm`, each verifies a
 * share, and all fail if one does; NULL: alone. */
mt_status mt_checkpoint_verify(const char *path, mt_comm *comm, int64_t *files);

/* mt_checkpoint_open; over the ranks of `comm` each verifies a share of the files. `hold`: it can
 * be read to its end though it is removed, as nobody does with that of a run that goes on.
 * Collective there: fails on all if on one. */
mt_status mt_checkpoint_open_among(mt_checkpoint **checkpoint, const char *path, mt_comm *comm,
                                   bool hold);
/* The same of one whose `files` have been verified. */
mt_status mt_checkpoint_open_verified(mt_checkpoint **checkpoint, const char *path, int64_t files,
                                      mt_comm *comm, bool hold);
/* Opens what mt_checkpoint_find_latest finds. */
mt_status mt_checkpoint_open_latest(mt_checkpoint **checkpoint, char *skipped, size_t skipped_bytes,
                                    const char *dir, mt_comm *comm, bool hold);
/* mt_checkpoint_open_given; over the ranks of `comm`, the one that rank 0 finds, wherever the
 * others were started. Collective there: fails on all if on one. */
mt_status mt_checkpoint_open_given_among(mt_checkpoint **checkpoint, char *skipped,
                                         size_t skipped_bytes, const char *given, mt_comm *comm);

/* ---- parts of params ----------------------------------------------------------------------------
 */

enum { MT_DATASET_NAME = 1024 };

/* A part of a param as a tensor without data: its shape, and which of the param's elements, of all
 * members, is its first. */
mt_tensor mt_part_tensor(const mt_param *param, const mt_param_part *part, mt_dtype dtype);
int64_t mt_part_first(const mt_param *param, const mt_param_part *part);

/* What this rank owns of a part, among the part's elements; *from: where that begins among its own
 * elements of the param. */
mt_range mt_checkpoint_own(const mt_param *param, const mt_param_part *part, int64_t *from);
/* The type that a part is stored in: of its master, or of a moment. */
mt_dtype mt_checkpoint_dtype(const mt_checkpoint_state *state, const mt_param *param,
                             const void *moment);
mt_status mt_checkpoint_dataset(char text[MT_DATASET_NAME], const char *group, const char *name);

/* Calls `visit` for every part, with memory for the largest one, in the params' dtype. Fails when
 * the parts of a param do not add up to it: something would be left out. */
typedef mt_status mt_checkpoint_visit(void *user, mt_param *param, const mt_param_part *part,
                                      void *buffer);
mt_status mt_checkpoint_each_part(const mt_param_store *params, mt_checkpoint_visit *visit,
                                  void *user);

/* ---- what a state has beside them ---------------------------------------------------------------
 */

/* The step state, as attributes of /optim, and state->dropped. */
mt_status mt_checkpoint_write_step(mt_h5 *file, const mt_checkpoint_state *state);
mt_status mt_checkpoint_read_step(struct mt_step_state *step, mt_checkpoint_state *state,
                                  mt_h5 *file);

/* What moments have beside their elements: the storage form, an attribute of /optim, and the scales
 * of a form with blocks, f32 [blocks] in /optim/{m,v}_scales/<our name of the param>. A checkpoint
 * without the attribute has moments as real. */
mt_status mt_checkpoint_write_moments(mt_h5 *file, const mt_checkpoint_state *state);
mt_status mt_checkpoint_put_scales(mt_checkpoint_shard *shard);
/* MT_ECONFIG when it is of another form; MT_EDAMAGED when scales are missing. */
mt_status mt_checkpoint_check_moments(mt_h5 *file, const mt_checkpoint_state *state,
                                      const char *path);
mt_status mt_checkpoint_read_moments(mt_h5 *file, const mt_checkpoint_state *state);

/* Fails unless all that is to be restored is there, in the shapes and types that it must have; the
 * step state is what it says. */
mt_status mt_checkpoint_check_fit(mt_checkpoint_state *state, mt_checkpoint *checkpoint,
                                  struct mt_step_state *step);

/* Whether model.h5 has this group. */
mt_status mt_checkpoint_has(mt_checkpoint *checkpoint, const char *group, bool *has);

/* Delayed scaling: all of it in host memory, freed by the caller, NULL where there is none; amaxes
 * that are being gathered are the largest of all ranks' (collective). Writes that; checks that it
 * fits, or reads it. */
mt_status mt_checkpoint_gather_delayed(float **values, const mt_checkpoint_state *state);
mt_status mt_checkpoint_write_delayed(mt_h5 *file, const mt_checkpoint_state *state,
                                      const float *values);
mt_status mt_checkpoint_delayed(const mt_checkpoint_state *state, mt_checkpoint *checkpoint,
                                bool read);
/* Counts of NaN in quantized operands: the sums over ranks in host memory, freed by the caller,
 * NULL where nothing is counted (collective). Read last: writing compute copies counts, too. */
mt_status mt_checkpoint_sum_nans(int64_t **counts, const mt_checkpoint_state *state);
mt_status mt_checkpoint_write_nans(mt_h5 *file, const mt_checkpoint_state *state,
                                   const int64_t *counts);
mt_status mt_checkpoint_read_nans(const mt_checkpoint_state *state, mt_checkpoint *checkpoint);
