/* HDF5 files: opening, committing, groups, errors. */
#define H5_USE_110_API 1
#include "train/h5.h"

#include <errno.h>
#include <hdf5.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/array.h"
#include "train/h5_priv.h"
#include "train/kind.h"

/* ---- errors ------------------------------------------------------------------------------------
 */

typedef struct reason {
    char text[160];
    bool memory;
} reason;

/* Called from the innermost error outwards. */
static herr_t take_reason(unsigned n, const H5E_error2_t *error, void *user)
{
    reason *r = user;
    if (n == 0 && error->desc) snprintf(r->text, sizeof r->text, "%s", error->desc);
    if (error->maj_num == H5E_RESOURCE) r->memory = true;
    return 0;
}

mt_status mt_h5_check(const mt_h5 *file, const char *object, const char *doing, int64_t result)
{
    if (result >= 0 && !(file->writing && file->state.error)) return MT_OK;
    if (file->state.error)
        return MT_FAIL(file->state.error == ENOMEM ? MT_ENOMEM : MT_EIO, "cannot %s '%s': %s",
                       file->writing ? "write" : "read", file->path, strerror(file->state.error));
    reason r = { "unknown reason", false };
    H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, take_reason, &r);
    mt_status code = r.memory ? MT_ENOMEM : file->writing ? MT_EIO : MT_EDAMAGED;
    return MT_FAIL(code, "'%s', %s: cannot %s: %s", file->path, object, doing, r.text);
}

mt_status mt_h5_damaged(const mt_h5 *file, const char *object, const char *source, int line,
                        const char *format, ...)
{
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return mt_error_set(MT_EDAMAGED, source, line, "'%s', %s: %s", file->path, object, text);
}

/* ---- opening and closing -----------------------------------------------------------------------
 */

/* An access list on this file's descriptor. */
static mt_status make_access_list(hid_t *list, mt_h5 *file)
{
    mt_status status = MT_OK;
    *list = H5Pcreate(H5P_FILE_ACCESS);
    MT_H5(file, "/", "make an access list", *list);
    MT_H5(file, "/", "register a driver", file->driver = mt_h5_driver_register());
    MT_H5(file, "/", "use a driver", mt_h5_driver_attach(*list, file->driver, &file->state));
    /* the newest format checksums every piece of structure */
    MT_H5(file, "/", "choose the format",
          H5Pset_libver_bounds(*list, H5F_LIBVER_LATEST, H5F_LIBVER_LATEST));
    if (file->writing) MT_H5(file, "/", "align data", H5Pset_alignment(*list, 1 << 18, 4096));
cleanup:
    return status;
}

/* What HDF5 could not open and begins otherwise: damaged where it is one of ours, of another kind
 * where it was given (mt_h5_open_given). */
static mt_status check_signature(const mt_h5 *file)
{
    static const char signature[] = "\211HDF\r\n\032\n";
    char begin[sizeof signature - 1];
    ssize_t n = file->state.error ? -1 : pread(file->state.fd, begin, sizeof begin, 0);
    MT_REQUIRE(n < 0 || memcmp(begin, signature, (size_t)n) == 0, MT_EDAMAGED,
               "'%s' is %s, not an HDF5 file", file->path, mt_path_kind_of(file->path));
    return MT_OK;
}

static mt_status open_hdf5(mt_h5 *file)
{
    mt_status status;
    hid_t access = -1, create = -1;
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL); /* errors are ours to report; per thread */
    MT_TRY_CLEANUP(make_access_list(&access, file));
    if (file->writing) {
        create = H5Pcreate(H5P_FILE_CREATE);
        MT_H5(file, "/", "make a creation list", create);
        MT_H5(file, "/", "leave times out", H5Pset_obj_track_times(create, false));
        file->id = H5Fcreate(file->temp, H5F_ACC_TRUNC, create, access);
    } else {
        file->id = H5Fopen(file->path, H5F_ACC_RDONLY, access);
        if (file->id < 0) MT_TRY_CLEANUP(check_signature(file));
    }
    MT_H5(file, "/", file->writing ? "create the file" : "open it as HDF5", file->id);
cleanup:
    if (create >= 0) H5Pclose(create);
    if (access >= 0) H5Pclose(access);
    return status;
}

static mt_status open_file(mt_h5 **file, const char *path, bool writing)
{
    mt_h5 *f = calloc(1, sizeof *f);
    *file = NULL;
    MT_REQUIRE(f, MT_ENOMEM, "no memory to open '%s'", path);
    f->id = f->driver = -1;
    f->state.fd = -1;
    f->writing = writing;
    mt_status status;
    size_t bytes = 0;
    MT_TRY_CLEANUP(mt_path_format(f->path, "%s", path));
    MT_TRY_CLEANUP(writing ? mt_file_begin(&f->state.fd, f->temp, path)
                           : mt_file_open(&f->state.fd, &bytes, path));
    f->bytes = (int64_t)bytes;
    MT_TRY_CLEANUP(open_hdf5(f));
cleanup:
    *file = f;
    if (status != MT_OK) mt_h5_close(file);
    return status;
}

mt_status mt_h5_create(mt_h5 **file, const char *path)
{
    return open_file(file, path, true);
}

mt_status mt_h5_open(mt_h5 **file, const char *path)
{
    return open_file(file, path, false);
}

mt_status mt_h5_open_given(mt_h5 **file, const char *path, const char *what)
{
    const mt_status status = mt_h5_open(file, path);
    if (status != MT_EIO && status != MT_EDAMAGED) return status;
    const mt_path_kind kind = mt_path_kind_find(path);
    MT_REQUIRE(kind <= MT_KIND_UNREADABLE || kind == MT_KIND_HDF5, MT_EIO, "'%s' is %s, not %s",
               path, mt_path_kind_name(kind), what);
    return status;
}

/* Ends HDF5's part; everything has reached the descriptor afterwards. */
static mt_status close_hdf5(mt_h5 *file)
{
    mt_status status = MT_OK;
    if (file->id >= 0) status = mt_h5_check(file, "/", "close the file", H5Fclose(file->id));
    if (file->driver >= 0) H5Idec_ref(file->driver);
    file->id = file->driver = -1;
    return status;
}

mt_status mt_h5_commit(mt_h5 **file)
{
    return mt_h5_commit_sealed(file, NULL, NULL);
}

/* All is there: on the disk, and its checksum made meanwhile. */
static mt_status sync_file(mt_h5 *f, char *hex, int64_t *bytes)
{
    mt_status status = MT_OK;
    const bool apart = f->state.back != NULL;
    if (apart) mt_write_back_sync(f->state.back);
    if (hex) status = mt_file_xxh128_of(hex, bytes, f->state.fd, f->temp);
    int error = mt_write_back_end(&f->state.back);
    if (!apart && fsync(f->state.fd)) error = errno;
    if (status == MT_OK && error)
        status = MT_FAIL(MT_EIO, "cannot write '%s': %s", f->path, strerror(error));
    return status;
}

mt_status mt_h5_commit_sealed(mt_h5 **file, char *hex, int64_t *bytes)
{
    mt_h5 *f = *file;
    mt_status status = close_hdf5(f);
    if (status == MT_OK) status = sync_file(f, hex, bytes);
    if (status == MT_OK && rename(f->temp, f->path))
        status = MT_FAIL(MT_EIO, "cannot write '%s': %s", f->path, strerror(errno));
    f->writing = status != MT_OK; /* drops the temporary file */
    if (status == MT_OK) status = mt_parent_sync(f->path);
    mt_h5_close(file);
    return status;
}

void mt_h5_close(mt_h5 **file)
{
    mt_h5 *f = *file;
    if (!f) return;
    for (int64_t i = 0; i < f->source_count; i++) mt_h5_close(&f->sources[i]);
    free(f->sources);
    free(f->room);
    if (f->id >= 0) H5Fclose(f->id);
    if (f->driver >= 0) H5Idec_ref(f->driver);
    mt_write_back_end(&f->state.back);
    if (f->state.fd >= 0) {
        if (f->writing) unlink(f->temp);
        close(f->state.fd);
    }
    free(f);
    *file = NULL;
}

const char *mt_h5_path(const mt_h5 *file)
{
    return file->path;
}

int mt_h5_descriptor(const mt_h5 *file)
{
    return file->state.fd;
}

/* ---- groups and names --------------------------------------------------------------------------
 */

/* The path up to its component `n` (0-based), in `part`; false when there are fewer. */
static bool path_prefix(char *part, size_t size, const char *name, int n)
{
    const char *p = name;
    for (; *p == '/'; p++) {
    }
    for (; *p; n--) {
        while (*p && *p != '/') p++;
        if (n == 0) return snprintf(part, size, "%.*s", (int)(p - name), name) < (int)size;
        while (*p == '/') p++;
    }
    return false;
}

mt_status mt_h5_check_path(const mt_h5 *file, const char *name)
{
    char part[1024];
    for (int i = 0; path_prefix(part, sizeof part, name, i); i++) {
        H5L_info_t link;
        htri_t there = H5Lexists(file->id, part, H5P_DEFAULT);
        MT_TRY(mt_h5_check(file, part, "look up the name", there));
        if (!there) return MT_H5_DAMAGED(file, name, "there is no such object");
        MT_TRY(mt_h5_check(file, part, "look at the link",
                           H5Lget_info(file->id, part, &link, H5P_DEFAULT)));
        if (link.type != H5L_TYPE_HARD)
            return MT_H5_DAMAGED(file, part, "is a soft or external link: refused");
    }
    return MT_OK;
}

mt_status mt_h5_exists(mt_h5 *file, const char *name, bool *exists)
{
    char part[1024];
    *exists = true;
    for (int i = 0; *exists && path_prefix(part, sizeof part, name, i); i++) {
        htri_t there = H5Lexists(file->id, part, H5P_DEFAULT);
        MT_TRY(mt_h5_check(file, part, "look up the name", there));
        *exists = there > 0;
    }
    return MT_OK;
}

mt_status mt_h5_group(mt_h5 *file, const char *name)
{
    char part[1024];
    mt_status status = MT_OK;
    hid_t list = H5Pcreate(H5P_GROUP_CREATE);
    MT_H5(file, name, "make a creation list", list);
    MT_H5(file, name, "leave times out", H5Pset_obj_track_times(list, false));
    for (int i = 0; path_prefix(part, sizeof part, name, i); i++) {
        htri_t there = H5Lexists(file->id, part, H5P_DEFAULT);
        MT_H5(file, part, "look up the name", there);
        if (there) continue;
        hid_t group = H5Gcreate2(file->id, part, H5P_DEFAULT, list, H5P_DEFAULT);
        MT_H5(file, part, "create the group", group);
        H5Gclose(group);
    }
cleanup:
    if (list >= 0) H5Pclose(list);
    return status;
}

typedef struct name_list {
    char **names;
    int64_t count, room;
    bool full; /* out of memory */
} name_list;

static herr_t add_name(hid_t group, const char *name, const H5L_info_t *link, void *user)
{
    (void)group, (void)link;
    name_list *list = user;
    char *copy = strdup(name);
    list->full = !copy || mt_array_reserve(&list->names, &list->room, list->count + 1,
                                           sizeof *list->names, "names") != MT_OK;
    if (list->full) {
        free(copy);
        return -1;
    }
    list->names[list->count++] = copy;
    return 0;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* In the order in which they lie: to sort them libhdf5 makes a table, which it frees half filled,
 * and crashes, where a link of the file is damaged. */
mt_status mt_h5_list(mt_h5 *file, const char *group, char ***names, int64_t *count)
{
    name_list list = { NULL, 0, 0, false };
    mt_status status;
    hid_t id = -1;
    *names = NULL, *count = 0;
    MT_TRY_CLEANUP(mt_h5_check_path(file, group));
    MT_H5(file, group, "open the group", id = H5Gopen2(file->id, group, H5P_DEFAULT));
    herr_t listed = H5Literate(id, H5_INDEX_NAME, H5_ITER_NATIVE, NULL, add_name, &list);
    if (list.full) {
        status = MT_FAIL(MT_ENOMEM, "no memory for the names in '%s', %s", file->path, group);
        goto cleanup;
    }
    MT_H5(file, group, "list the group", listed);
    if (list.count) qsort(list.names, (size_t)list.count, sizeof *list.names, by_name);
    *names = list.names, *count = list.count;
cleanup:
    if (id >= 0) H5Gclose(id);
    if (status != MT_OK) mt_h5_names_free(&list.names, list.count);
    return status;
}

void mt_h5_names_free(char ***names, int64_t count)
{
    for (int64_t i = 0; i < count; i++) free((*names)[i]);
    free(*names);
    *names = NULL;
}
