/* HDF5 files: the part of the library that mixtape uses, with its errors. The only door to hdf5.h
 * is here.
 *
 * Files are written under a temporary name, fsynced and renamed: a name never shows half a file.
 * All structure is written in the checksummed format. What is read may be hostile: only hard links,
 * only the types below, only known filters, and no dataset that claims more than its file can hold.
 * A virtual dataset shows what lies in other files of the same directory, and reads like any other;
 * a file that is missing, or of another set than this one, is an error (MT_EIO, MT_EDAMAGED).
 * Errors: MT_EIO when the system refuses (a full disk), MT_EDAMAGED when contents break a rule;
 * both name the file and the object. */
#pragma once

#include "core/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A type beside the dtypes: unsigned 64 bits. "type" below is a mt_dtype or this. */
enum { MT_H5_U64 = MT_DTYPE_COUNT, MT_H5_TYPE_COUNT };

typedef struct mt_h5 mt_h5;

/* Begins a file that will be called `path`; MT_ECONFIG where another process does so. */
mt_status mt_h5_create(mt_h5 **file, const char *path);
/* Closes it, fsyncs, renames. On failure the old file, if any, is untouched and the temporary one
 * is gone. Sets *file to NULL in both cases. */
mt_status mt_h5_commit(mt_h5 **file);
/* The same, with its size and XXH128, made while the file goes to the disk. */
mt_status mt_h5_commit_sealed(mt_h5 **file, char *hex, int64_t *bytes);
/* Opens a file for reading. */
mt_status mt_h5_open(mt_h5 **file, const char *path);
/* The same of a file that was named for what it should be: one that is empty, or of another kind,
 * is not damaged but not `what` (MT_EIO). */
mt_status mt_h5_open_given(mt_h5 **file, const char *path, const char *what);
/* Closes a file opened for reading; drops an uncommitted one. NULL-safe. */
void mt_h5_close(mt_h5 **file);
const char *mt_h5_path(const mt_h5 *file);
/* Descriptor of the open file, for mapping; borrowed. */
int mt_h5_descriptor(const mt_h5 *file);

typedef enum mt_h5_storage {
    MT_H5_CONTIGUOUS, /* at one place in the file, so that it can be mapped; no checksum */
    MT_H5_CHECKED     /* chunks of whole rows with Fletcher32 */
} mt_h5_storage;

typedef struct mt_h5_info {
    int type;
    int ndim; /* 0: a scalar */
    int64_t shape[MT_MAX_DIMS];
    int64_t count;  /* elements */
    int64_t bytes;  /* of all elements */
    int64_t offset; /* in the file, contiguous data only; else -1 */
    bool little_endian;
} mt_h5_info;

/* "bf16[2048,128]" of a type and shape. */
void mt_h5_format(char text[96], int type, int ndim, const int64_t *shape);

/* Makes a group and those above it; one that exists is fine. */
mt_status mt_h5_group(mt_h5 *file, const char *name);
/* Names of the objects in a group, sorted; release with mt_h5_names_free. */
mt_status mt_h5_list(mt_h5 *file, const char *group, char ***names, int64_t *count);
void mt_h5_names_free(char ***names, int64_t count);
mt_status mt_h5_exists(mt_h5 *file, const char *name, bool *exists);

/* Datasets; `name` is a path, the groups in it are made. bf16 is u16 with the attribute dtype =
 * "bf16". */
mt_status mt_h5_dataset_create(mt_h5 *file, const char *name, int type, int ndim,
                               const int64_t *shape, mt_h5_storage storage);
/* Writes the box of extents `count` at `start`; NULL start: everything. */
mt_status mt_h5_write_slab(mt_h5 *file, const char *name, const int64_t *start,
                           const int64_t *count, const void *data);
/* Creates a checked dataset (contiguous for scalars and empty ones) and writes all of it. */
mt_status mt_h5_write(mt_h5 *file, const char *name, int type, int ndim, const int64_t *shape,
                      const void *data);

/* Where elements [first, first + count) of a flattened dataset are: from element `from` on in the
 * dataset of the same name of another file; that has one dimension. */
typedef struct mt_h5_extent {
    const char *file; /* its name, in the directory of this one */
    int64_t first, count, from;
} mt_h5_extent;

/* Makes a virtual dataset of 1 or 2 dimensions. Extents are in the order of their elements and
 * cover the whole: MT_EINTERNAL names the elements that they leave out. The attribute "set" of "/",
 * text, must be the same in all these files. */
mt_status mt_h5_write_virtual(mt_h5 *file, const char *name, int type, int ndim,
                              const int64_t *shape, const mt_h5_extent *extents, int64_t n);
/* Fails with MT_EDAMAGED where two files are of different sets. */
mt_status mt_h5_check_set(mt_h5 *file, mt_h5 *source);
/* Opens the file NAME beside `file`, which virtual datasets of `file` lead to: they are read from
 * it even after its removal, as far as a process can have so many open. */
mt_status mt_h5_hold_beside(mt_h5 *file, const char *name);

/* Describes a dataset after checking that it can be read at all. */
mt_status mt_h5_dataset_info(mt_h5 *file, const char *name, mt_h5_info *info);
/* Reads all of it, in `info`'s type and shape, into memory for info->bytes; fails if the dataset is
 * anything else. */
mt_status mt_h5_read(mt_h5 *file, const char *name, const mt_h5_info *info, void *data);
/* The box of extents `count` at `start`, in the dataset's type, which must be `type`. */
mt_status mt_h5_read_slab(mt_h5 *file, const char *name, int type, const int64_t *start,
                          const int64_t *count, void *data);
/* Describes, and fails unless type and shape are these; an extent of -1 matches any. */
mt_status mt_h5_expect(mt_h5 *file, const char *name, int type, int ndim, const int64_t *shape,
                       mt_h5_info *info);

/* Attributes of the group or dataset `object`. */
mt_status mt_h5_set_string(mt_h5 *file, const char *object, const char *name, const char *text);
mt_status mt_h5_set_i64(mt_h5 *file, const char *object, const char *name, int64_t x);
mt_status mt_h5_set_u64(mt_h5 *file, const char *object, const char *name, uint64_t x);
mt_status mt_h5_set_f64(mt_h5 *file, const char *object, const char *name, double x);
mt_status mt_h5_has_attribute(mt_h5 *file, const char *object, const char *name, bool *has);
/* NUL-terminated text (either kind of HDF5 string) up to 16 MiB; freed by the caller. */
mt_status mt_h5_get_string(mt_h5 *file, const char *object, const char *name, char **text);
/* Any integer type that fits. */
mt_status mt_h5_get_i64(mt_h5 *file, const char *object, const char *name, int64_t *x);
mt_status mt_h5_get_u64(mt_h5 *file, const char *object, const char *name, uint64_t *x);
mt_status mt_h5_get_f64(mt_h5 *file, const char *object, const char *name, double *x);

#ifdef __cplusplus
}
#endif
