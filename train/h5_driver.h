/* The file driver under train/h5.c: plain reads and writes on one file descriptor. Private to h5.
 *
 * HDF5 cannot close a file whose last writes fail: identifiers stay open and every later call on
 * them fails again. So this driver remembers the first error of a write and from then on reports
 * success and writes nothing: HDF5 always closes cleanly, and the owner of the state asks for the
 * error. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "train/write_back.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mt_h5_driver_state {
    int fd;              /* borrowed: the driver never closes it */
    int error;           /* errno of the first failure: of a read, a write, an allocation */
    size_t fresh;        /* bytes that write-back was not asked for */
    mt_write_back *back; /* of much, else NULL */
} mt_h5_driver_state;

/* Registers the driver; a negative number on failure. The caller unregisters it after its file. */
int64_t mt_h5_driver_register(void);
/* Makes a file access property list open files through `driver` on `state`; negative on failure. */
int mt_h5_driver_attach(int64_t access_list, int64_t driver, mt_h5_driver_state *state);

#ifdef __cplusplus
}
#endif
