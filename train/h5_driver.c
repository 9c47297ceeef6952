/* The file driver under train/h5.c. */
#define H5_USE_110_API 1
#include "train/h5_driver.h"

#include <errno.h>
#include <hdf5.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#if H5_VERSION_GE(1, 13, 0)
#include <H5FDdevelop.h>
#endif

#include "train/fileio.h"

typedef struct file {
    H5FD_t pub; /* HDF5's part comes first */
    mt_h5_driver_state *state;
    haddr_t eoa, eof;
} file;

typedef struct access_info {
    mt_h5_driver_state *state;
} access_info;

static H5FD_t *driver_open(const char *name, unsigned flags, hid_t access_list, haddr_t maxaddr)
{
    (void)name, (void)flags, (void)maxaddr;
    const access_info *info = H5Pget_driver_info(access_list);
    struct stat st;
    if (!info || fstat(info->state->fd, &st)) return NULL;
    file *f = calloc(1, sizeof *f);
    if (!f) {
        info->state->error = ENOMEM;
        return NULL;
    }
    f->state = info->state;
    f->eof = (haddr_t)st.st_size;
    return &f->pub;
}

static herr_t driver_close(H5FD_t *f)
{
    free(f);
    return 0;
}

static herr_t driver_query(const H5FD_t *f, unsigned long *flags)
{
    (void)f;
    *flags = H5FD_FEAT_AGGREGATE_METADATA | H5FD_FEAT_ACCUMULATE_METADATA | H5FD_FEAT_DATA_SIEVE |
             H5FD_FEAT_AGGREGATE_SMALLDATA | H5FD_FEAT_DEFAULT_VFD_COMPATIBLE;
    return 0;
}

static haddr_t driver_get_eoa(const H5FD_t *f, H5FD_mem_t type)
{
    (void)type;
    return ((const file *)f)->eoa;
}

static herr_t driver_set_eoa(H5FD_t *f, H5FD_mem_t type, haddr_t eoa)
{
    (void)type;
    ((file *)f)->eoa = eoa;
    return 0;
}

static haddr_t driver_get_eof(const H5FD_t *f, H5FD_mem_t type)
{
    (void)type;
    return ((const file *)f)->eof;
}

static herr_t driver_read(H5FD_t *fd, H5FD_mem_t type, hid_t transfer, haddr_t at, size_t bytes,
                          void *buffer)
{
    (void)type, (void)transfer;
    file *f = (file *)fd;
    size_t got;
    if (at == HADDR_UNDEF || at + bytes < at || at + bytes > f->eoa) return -1;
    const int error = mt_read_at(f->state->fd, buffer, bytes, (int64_t)at, &got);
    if (error && !f->state->error) f->state->error = error;
    if (error) return -1;
    memset((char *)buffer + got, 0, bytes - got); /* allocated, not yet written */
    return 0;
}

/* Every so many bytes go on to the disk. */
static void write_back(mt_h5_driver_state *state, size_t bytes)
{
    enum { MUCH = 64 << 20 };
    state->fresh += bytes;
    if (state->fresh < MUCH) return;
    state->fresh = 0;
    if (!state->back) state->back = mt_write_back_begin(state->fd);
    if (state->back) mt_write_back_ask(state->back);
}

static herr_t driver_write(H5FD_t *fd, H5FD_mem_t type, hid_t transfer, haddr_t at, size_t bytes,
                           const void *buffer)
{
    (void)type, (void)transfer;
    file *f = (file *)fd;
    if (at == HADDR_UNDEF || at + bytes < at || at + bytes > f->eoa) return -1;
    if (!f->state->error && mt_write_fully(f->state->fd, buffer, bytes, (int64_t)at))
        f->state->error = errno;
    write_back(f->state, bytes);
    if (at + bytes > f->eof) f->eof = at + bytes;
    return 0;
}

static herr_t driver_truncate(H5FD_t *fd, hid_t transfer, hbool_t closing)
{
    (void)transfer, (void)closing;
    file *f = (file *)fd;
    if (f->eoa == f->eof) return 0;
    if (!f->state->error && ftruncate(f->state->fd, (off_t)f->eoa)) f->state->error = errno;
    f->eof = f->eoa;
    return 0;
}

static const H5FD_class_t driver_class = {
#if H5_VERSION_GE(1, 13, 0)
    .version = H5FD_CLASS_VERSION,
    .value = 512, /* the first value that HDF5 leaves to unregistered drivers */
#endif
    .name = "mixtape",
    .maxaddr = (haddr_t)INT64_MAX,
    .fc_degree = H5F_CLOSE_STRONG,
    .fapl_size = sizeof(access_info),
    .open = driver_open,
    .close = driver_close,
    .query = driver_query,
    .get_eoa = driver_get_eoa,
    .set_eoa = driver_set_eoa,
    .get_eof = driver_get_eof,
    .read = driver_read,
    .write = driver_write,
    .truncate = driver_truncate,
    .fl_map = H5FD_FLMAP_DICHOTOMY,
};

int64_t mt_h5_driver_register(void)
{
    return H5FDregister(&driver_class);
}

int mt_h5_driver_attach(int64_t access_list, int64_t driver, mt_h5_driver_state *state)
{
    access_info info = { state };
    return H5Pset_driver(access_list, driver, &info);
}
