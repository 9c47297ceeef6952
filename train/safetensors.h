/* safetensors: u64 LE header length, JSON header, tensor bytes. A file is mapped and its header
 * checked whole before anything is believed: sizes match shapes, the tensors cover the buffer
 * without gaps or overlaps. */
#pragma once

#include "core/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MT_ST_MAX_DIMS = 8 };

/* A tensor of a file; borrows from it. */
typedef struct mt_st_tensor {
    const char *name;
    const char *file; /* the path that it was opened by */
    const char *type; /* as the file says: "BF16" */
    int ndim;
    int64_t shape[MT_ST_MAX_DIMS];
    const void *data; /* aligned as the file has it: copy with memcpy */
    size_t bytes;
    bool used; /* the reader's mark: false when opened */
} mt_st_tensor;

/* One file, or the files of an index, as one set of tensors. */
typedef struct mt_safetensors mt_safetensors;

/* Opens one file. Errors: MT_EIO; MT_EDAMAGED names file, tensor and rule. */
mt_status mt_safetensors_open(mt_safetensors **set, const char *path);
/* Opens DIR/model.safetensors, else the files of DIR/model.safetensors.index.json. */
mt_status mt_safetensors_open_dir(mt_safetensors **set, const char *dir);
/* NULL-safe; sets *set to NULL. */
void mt_safetensors_close(mt_safetensors **set);

int64_t mt_safetensors_count(const mt_safetensors *set);
/* Sorted by name. */
mt_st_tensor *mt_safetensors_get(const mt_safetensors *set, int64_t i);
/* NULL when absent. */
mt_st_tensor *mt_safetensors_find(const mt_safetensors *set, const char *name);
/* The dtype of a tensor's elements; MT_EUNSUPPORTED names file, tensor and type. */
mt_status mt_st_tensor_dtype(mt_dtype *dtype, const mt_st_tensor *tensor);

/* Writing. */
typedef struct mt_st_entry {
    const char *name;
    mt_dtype dtype;
    int ndim;
    int64_t shape[MT_MAX_DIMS];
} mt_st_entry;

/* Fills `data` with entry i of the caller's array. */
typedef mt_status mt_st_fill(void *user, int64_t i, void *data, size_t bytes);

/* Writes DIR/model.safetensors, or, when the tensors exceed `shard_bytes` (0: never), shards with
 * an index; then removes what an earlier export has left there: a single file, an index, the shards
 * of a set of another size. Each file appears whole or not at all. */
mt_status mt_safetensors_write_dir(const char *dir, const mt_st_entry *entries, int64_t count,
                                   int64_t shard_bytes, mt_st_fill *fill, void *user);

#ifdef __cplusplus
}
#endif
