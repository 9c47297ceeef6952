/* What the files of h5 share. They include hdf5.h themselves; its identifiers are int64_t. */
#pragma once

#include "train/fileio.h"
#include "train/h5.h"
#include "train/h5_driver.h"

struct mt_h5 {
    int64_t id, driver;
    mt_h5_driver_state state;
    bool writing;
    mt_h5 **sources; /* files beside it that its virtual datasets lead to, as far as opened */
    int64_t source_count;
    bool source;         /* is one of these */
    int64_t bytes;       /* when opened for reading */
    unsigned char *room; /* of chunks on their way */
    size_t room_bytes;
    char path[MT_PATH_BYTES], temp[MT_PATH_BYTES];
};

/* MT_OK when `result`, what an HDF5 function returned, is not negative; otherwise an error that
 * names file, object, what was being done, and HDF5's own innermost reason. */
mt_status mt_h5_check(const mt_h5 *file, const char *object, const char *doing, int64_t result);
#define MT_H5(file, object, doing, x) MT_TRY_CLEANUP(mt_h5_check((file), (object), (doing), (x)))

/* An error about the contents of an object. */
#define MT_H5_DAMAGED(file, object, ...)                                                           \
    mt_h5_damaged((file), (object), __FILE__, __LINE__, __VA_ARGS__)
mt_status mt_h5_damaged(const mt_h5 *file, const char *object, const char *source, int line,
                        const char *format, ...) MT_PRINTF(5, 6);

/* The HDF5 type of one of ours, to be closed by the caller; negative on failure. */
int64_t mt_h5_make_type(int type, bool little_endian);
bool mt_h5_host_is_little_endian(void);

/* Makes a dataset of this shape and creation list, and the groups above it. */
mt_status mt_h5_make_dataset(mt_h5 *file, const char *name, int type, int64_t space, int64_t list);

/* What is read of a dataset: a selection in it, to the same elements of `to`, of HDF5's `type`, in
 * the shape `memory`. */
struct mt_h5_box {
    int64_t type, space, memory;
    void *to;
    int64_t first, count; /* the run of elements that it is; count 0: it is none */
};
/* Reads of a virtual dataset with this creation list; NULL box: nothing. Fails unless its parts
 * cover it in their order and are in the files beside this one. */
mt_status mt_h5_read_virtual(mt_h5 *file, const char *name, int64_t list, const mt_h5_info *info,
                             const struct mt_h5_box *box);

/* Moves all elements to a dataset, or [first, first + count) of one, by all threads, where its
 * chunks are those of mt_h5_write; else, and where something is wrong with them, *done is false:
 * HDF5 moves them, or says why it cannot. */
mt_status mt_h5_write_chunks(bool *done, mt_h5 *file, const char *name, int64_t dataset,
                             const mt_h5_info *info, const void *from);
mt_status mt_h5_read_chunks(bool *done, mt_h5 *file, const char *name, int64_t dataset,
                            const mt_h5_info *info, int64_t first, int64_t count, void *to);

/* Fails unless every step of the path is a hard link that exists: a hostile file cannot lead
 * elsewhere. */
mt_status mt_h5_check_path(const mt_h5 *file, const char *name);
