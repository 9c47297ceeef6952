/* What the files of checkpoint share with train/hf_import.c. */
#pragma once

#include "train/checkpoint.h"
#include "train/fileio.h"
#include "train/h5.h"

/* A checkpoint directory being written: `<path>.tmp` until published. */
typedef struct mt_checkpoint_stage {
    char path[MT_PATH_BYTES], temp[MT_PATH_BYTES];
    mt_h5 *file; /* model.h5 */
} mt_checkpoint_stage;

/* Begins. Refuses a path that exists and is not a checkpoint. */
mt_status mt_checkpoint_stage_begin(mt_checkpoint_stage *stage, const char *path);
/* Commits model.h5, writes DONE, renames the directory. On failure the caller abandons. */
mt_status mt_checkpoint_stage_publish(mt_checkpoint_stage *stage);
/* Removes what was written so far; harmless after publishing. */
void mt_checkpoint_stage_abandon(mt_checkpoint_stage *stage);

/* /meta. */
mt_status mt_checkpoint_write_meta(mt_h5 *file, const mt_checkpoint_state *state,
                                   const mt_checkpoint_info *info);

/* What moments have beside their elements: the storage form, an attribute of /optim, and the scales
 * of a form with blocks, f32 [blocks] in /optim/{m,v}_scales/<our name of the param>. A checkpoint
 * without the attribute has moments as real. */
mt_status mt_checkpoint_write_moments(mt_h5 *file, const mt_checkpoint_state *state);
/* MT_ECONFIG when it is of another form; MT_EDAMAGED when scales are missing. */
mt_status mt_checkpoint_check_moments(mt_h5 *file, const mt_checkpoint_state *state,
                                      const char *path);
mt_status mt_checkpoint_read_moments(mt_h5 *file, const mt_checkpoint_state *state);

/* Host memory in which every rank has filled in what it owns, and zeros elsewhere, becomes the
 * whole on every rank. Room for up to 3 bytes more. Collective; nothing with one rank. */
mt_status mt_checkpoint_collect(const mt_checkpoint_state *state, void *whole, size_t bytes);
/* Whether this rank writes the file; the others give it their parts with a `file` of NULL. */
bool mt_checkpoint_leads(const mt_checkpoint_state *state);

/* Verifies every file that DONE lists. */
mt_status mt_checkpoint_verify(const char *path);

/* A part of a param as a tensor without data: its shape, and where its elements begin in the flat
 * buffers. */
mt_tensor mt_part_tensor(const mt_param *param, const mt_param_part *part, mt_dtype dtype);
int64_t mt_part_offset(const mt_param *param, const mt_param_part *part);

/* Whether model.h5 has this group. */
mt_status mt_checkpoint_has(mt_checkpoint *checkpoint, const char *group, bool *has);

/* Delayed scaling: writes it; checks that it fits, or reads it. */
mt_status mt_checkpoint_write_delayed(mt_h5 *file, const mt_checkpoint_state *state);
mt_status mt_checkpoint_delayed(const mt_checkpoint_state *state, mt_checkpoint *checkpoint,
                                bool read);
/* Counts of NaN in quantized operands. Read last: writing compute copies counts, too. */
mt_status mt_checkpoint_write_nans(mt_h5 *file, const mt_checkpoint_state *state);
mt_status mt_checkpoint_read_nans(const mt_checkpoint_state *state, mt_checkpoint *checkpoint);
