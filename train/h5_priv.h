/* What the files of h5 share. They include hdf5.h themselves; its identifiers are int64_t. */
#pragma once

#include "train/fileio.h"
#include "train/h5.h"
#include "train/h5_driver.h"

struct mt_h5 {
    int64_t id, driver;
    mt_h5_driver_state state;
    bool writing;
    int64_t bytes; /* when opened for reading */
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

/* Fails unless every step of the path is a hard link that exists: a hostile file cannot lead
 * elsewhere. */
mt_status mt_h5_check_path(const mt_h5 *file, const char *name);
