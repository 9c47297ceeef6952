/* Virtual HDF5 datasets: tensors whose elements lie in other files of the directory.
 *
 * They are read here, part after part, not by HDF5's own way through them: that reads fill values,
 * without an error, where a file is missing, and looks for files in more places than one. */
#define H5_USE_110_API 1
#include <hdf5.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "train/h5_priv.h"

static const char set_attribute[] = "set";
enum { MAX_SOURCE_NAME = 255, MAX_OBJECT_NAME = 1024 };

/* ---- writing -----------------------------------------------------------------------------------
 */

/* Part of an extent as a box of the dataset: a stretch of one row, or whole rows. Returns its
 * elements. */
static int64_t next_box(hsize_t at[2], hsize_t extent[2], int64_t first, int64_t count, int64_t k)
{
    int64_t column = first % k, rows = column ? 1 : count / k > 1 ? count / k : 1;
    int64_t columns = count < k - column ? count : k - column;
    at[0] = (hsize_t)(first / k), at[1] = (hsize_t)column;
    extent[0] = (hsize_t)rows, extent[1] = (hsize_t)columns;
    return rows * columns;
}

/* Maps a box to elements [from, from + n) of another file's dataset. HDF5 keeps what is selected,
 * not how much is there beside it. */
static mt_status map_box(mt_h5 *file, const char *name, hid_t list, hid_t space, int ndim,
                         const hsize_t at[2], const hsize_t extent[2], const char *source,
                         int64_t from)
{
    mt_status status = MT_OK;
    const hsize_t start = (hsize_t)from, n = extent[0] * extent[1], end = start + n;
    hid_t theirs = H5Screate_simple(1, &end, NULL);
    MT_H5(file, name, "make a shape", theirs);
    MT_H5(file, name, "select a part",
          H5Sselect_hyperslab(theirs, H5S_SELECT_SET, &start, NULL, &n, NULL));
    MT_H5(file, name, "select a part",
          H5Sselect_hyperslab(space, H5S_SELECT_SET, at + (2 - ndim), NULL, extent + (2 - ndim),
                              NULL));
    MT_H5(file, name, "map a part", H5Pset_virtual(list, space, source, name, theirs));
cleanup:
    if (theirs >= 0) H5Sclose(theirs);
    return status;
}

static mt_status map_extent(mt_h5 *file, const char *name, hid_t list, hid_t space, int ndim,
                            int64_t k, const mt_h5_extent *e)
{
    hsize_t at[2], extent[2];
    for (int64_t done = 0; done < e->count;) {
        int64_t n = next_box(at, extent, e->first + done, e->count - done, k);
        MT_TRY(map_box(file, name, list, space, ndim, at, extent, e->file, e->from + done));
        done += n;
    }
    return MT_OK;
}

mt_status mt_h5_write_virtual(mt_h5 *file, const char *name, int type, int ndim,
                              const int64_t *shape, const mt_h5_extent *extents, int64_t n)
{
    mt_status status;
    hid_t space = -1, list = -1;
    hsize_t dims[2];
    int64_t at = 0, whole = 1;
    MT_REQUIRE(ndim == 1 || ndim == 2, MT_EINVAL, "'%s', %s: a virtual dataset of %d dimensions",
               file->path, name, ndim);
    for (int i = 0; i < ndim; i++) dims[i] = (hsize_t)shape[i], whole *= shape[i];
    for (int64_t i = 0; i < n; at += extents[i++].count)
        MT_REQUIRE(
            extents[i].first == at, MT_EINTERNAL,
            "'%s', %s: elements from %lld on are in no file, or in two: the next part begins "
            "at %lld",
            file->path, name, (long long)at, (long long)extents[i].first);
    MT_REQUIRE(at == whole && whole > 0, MT_EINTERNAL, "'%s', %s: parts of %lld elements of %lld",
               file->path, name, (long long)at, (long long)whole);
    MT_H5(file, name, "make a shape", space = H5Screate_simple(ndim, dims, NULL));
    MT_H5(file, name, "make a creation list", list = H5Pcreate(H5P_DATASET_CREATE));
    MT_H5(file, name, "leave times out", H5Pset_obj_track_times(list, false));
    for (int64_t i = 0; i < n; i++)
        MT_TRY_CLEANUP(map_extent(file, name, list, space, ndim, shape[ndim - 1], &extents[i]));
    H5Sselect_all(space);
    MT_TRY_CLEANUP(mt_h5_make_dataset(file, name, type, space, list));
cleanup:
    if (list >= 0) H5Pclose(list);
    if (space >= 0) H5Sclose(space);
    return status;
}

/* ---- sources -----------------------------------------------------------------------------------
 */

/* A file of the same directory, whatever characters a hostile one would like there. */
static bool plain_name(const char *name)
{
    size_t n = strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-");
    return n > 0 && name[0] != '.' && !name[n];
}

/* What set of files a file belongs to; "" if it does not say. */
static mt_status read_set(char **set, mt_h5 *file)
{
    bool has;
    MT_TRY(mt_h5_has_attribute(file, "/", set_attribute, &has));
    if (has) return mt_h5_get_string(file, "/", set_attribute, set);
    *set = strdup("");
    MT_REQUIRE(*set, MT_ENOMEM, "no memory to read '%s'", file->path);
    return MT_OK;
}

mt_status mt_h5_check_set(mt_h5 *file, mt_h5 *source)
{
    char *ours = NULL, *theirs = NULL;
    mt_status status;
    MT_TRY_CLEANUP(read_set(&ours, file));
    MT_TRY_CLEANUP(read_set(&theirs, source));
    if (strcmp(ours, theirs) != 0)
        status = MT_H5_DAMAGED(source, "/", "is of another save: of '%.200s', not of '%.200s'",
                               theirs, ours);
cleanup:
    free(ours);
    free(theirs);
    return status;
}

/* A checkpoint may be in more files than a process can have open: it takes half of what it can. */
static int64_t most_sources(void)
{
    struct rlimit limit;
    return getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur > 2 ? limit.rlim_cur / 2 : 1;
}

/* Tensor after tensor leads through the files in their order: while the last one gives way to the
 * next, all before it stay and need not be opened again. */
static mt_status open_source(mt_h5 **source, mt_h5 *file, const char *path)
{
    while (file->source_count >= most_sources()) mt_h5_close(&file->sources[--file->source_count]);
    mt_h5 **grown =
        realloc(file->sources, (size_t)(file->source_count + 1) * sizeof *file->sources);
    MT_REQUIRE(grown, MT_ENOMEM, "no memory to open '%s'", path);
    file->sources = grown;
    MT_TRY(mt_h5_open(source, path));
    (*source)->source = true;
    mt_status status = mt_h5_check_set(file, *source);
    if (status == MT_OK)
        file->sources[file->source_count++] = *source;
    else
        mt_h5_close(source);
    return status;
}

static mt_status find_source(mt_h5 **source, mt_h5 *file, const char *object, const char *name)
{
    char path[MT_PATH_BYTES];
    const char *slash = strrchr(file->path, '/');
    if (!plain_name(name))
        return MT_H5_DAMAGED(file, object, "its data would be in '%.200s', not a file beside it",
                             name);
    MT_TRY(mt_path_format(path, "%.*s%s", slash ? (int)(slash + 1 - file->path) : 0, file->path,
                          name));
    for (int64_t i = 0; i < file->source_count; i++)
        if (!strcmp(file->sources[i]->path, path)) {
            *source = file->sources[i];
            return MT_OK;
        }
    return open_source(source, file, path);
}

mt_status mt_h5_hold_beside(mt_h5 *file, const char *name)
{
    mt_h5 *source;
    return find_source(&source, file, "/", name);
}

/* ---- parts -------------------------------------------------------------------------------------
 */

/* Part i of a virtual dataset: where its elements are. */
typedef struct part {
    mt_h5 *source;
    char object[MAX_OBJECT_NAME]; /* in it: a dataset of one dimension */
    mt_h5_info info;              /* of that */
    int64_t from, count;          /* elements of it */
    int64_t first;                /* of the whole; */
    hid_t ours;                   /* as a selection in it */
} part;

/* The elements [*first, *first + *count) of a flattened dataset that a selection is; false where it
 * is anything else. */
static bool find_span(hid_t space, int ndim, const int64_t *shape, int64_t *first, int64_t *count)
{
    hsize_t low[H5S_MAX_RANK], high[H5S_MAX_RANK];
    int64_t last = 0;
    *first = 0, *count = H5Sget_select_npoints(space);
    if (H5Sget_simple_extent_ndims(space) != ndim || *count <= 0 ||
        H5Sget_select_bounds(space, low, high) < 0)
        return false;
    for (int i = 0; i < ndim; i++) {
        if (high[i] >= (hsize_t)shape[i]) return false;
        *first = *first * shape[i] + (int64_t)low[i];
        last = last * shape[i] + (int64_t)high[i];
    }
    return *count == last - *first + 1;
}

static mt_status read_names(part *p, char source[MAX_SOURCE_NAME + 1], mt_h5 *file,
                            const char *name, hid_t list, size_t i)
{
    ssize_t n = H5Pget_virtual_filename(list, i, source, MAX_SOURCE_NAME + 1);
    ssize_t m = H5Pget_virtual_dsetname(list, i, p->object, sizeof p->object);
    MT_TRY(mt_h5_check(file, name, "read where a part is", n < m ? n : m));
    if (n > MAX_SOURCE_NAME || m >= MAX_OBJECT_NAME)
        return MT_H5_DAMAGED(file, name, "the name of a part's place is too long");
    return MT_OK;
}

/* Fails unless it begins at element *at and is in its file; on failure nothing is open. */
static mt_status open_part(part *p, mt_h5 *file, const char *name, hid_t list, size_t i,
                           const mt_h5_info *info, int64_t *at)
{
    char source[MAX_SOURCE_NAME + 1];
    int64_t count;
    hid_t space = -1;
    mt_status status;
    *p = (part){ .ours = -1 };
    MT_TRY_CLEANUP(read_names(p, source, file, name, list, i));
    MT_TRY_CLEANUP(find_source(&p->source, file, name, source));
    MT_H5(file, name, "read a part's place", p->ours = H5Pget_virtual_vspace(list, i));
    MT_H5(file, name, "read a part's place", space = H5Pget_virtual_srcspace(list, i));
    MT_TRY_CLEANUP(mt_h5_dataset_info(p->source, p->object, &p->info));
    if (!find_span(p->ours, info->ndim, info->shape, &p->first, &count) || p->first != *at)
        status = MT_H5_DAMAGED(file, name, "part %zu is not the elements from %lld on", i,
                               (long long)*at);
    else if (p->info.type != info->type || p->info.ndim != 1 ||
             !find_span(space, 1, p->info.shape, &p->from, &p->count) || p->count != count)
        status = MT_H5_DAMAGED(p->source, p->object, "is not what '%s' expects there", file->path);
    *at += count;
cleanup:
    if (space >= 0) H5Sclose(space);
    if (status != MT_OK && p->ours >= 0) H5Sclose(p->ours);
    return status;
}

/* The same of a box that is a run of elements, by whole chunks; false: it is HDF5's to do. */
static mt_status read_run(bool *done, const part *p, const struct mt_h5_box *box)
{
    const int64_t box_end = box->first + box->count, end = p->first + p->count;
    const int64_t a = box->first > p->first ? box->first : p->first,
                  z = box_end < end ? box_end : end;
    const int64_t size = p->info.count ? p->info.bytes / p->info.count : 0;
    *done = box->count > 0 && a >= z;
    if (*done || !box->count) return MT_OK;
    const hid_t dataset = H5Dopen2(p->source->id, p->object, 0);
    if (dataset < 0) return MT_OK;
    mt_status status =
        mt_h5_read_chunks(done, p->source, p->object, dataset, &p->info, p->from + a - p->first,
                          z - a, (char *)box->to + (a - box->first) * size);
    H5Dclose(dataset);
    free(p->source->room); /* of many files that are open */
    p->source->room = NULL, p->source->room_bytes = 0;
    return status;
}

/* What a part has of a box, to the same elements of the memory. */
static mt_status read_part(mt_h5 *file, const char *name, const part *p,
                           const struct mt_h5_box *box)
{
    bool done;
    MT_TRY(read_run(&done, p, box));
    if (done) return MT_OK;
    mt_status status = MT_OK;
    const hsize_t start = (hsize_t)p->from, n = (hsize_t)p->count;
    hid_t theirs = -1, from = -1, into = -1, dataset = H5Dopen2(p->source->id, p->object, 0);
    MT_H5(p->source, p->object, "open the dataset", dataset);
    MT_H5(p->source, p->object, "read the shape", theirs = H5Dget_space(dataset));
    MT_H5(p->source, p->object, "select a part",
          H5Sselect_hyperslab(theirs, H5S_SELECT_SET, &start, NULL, &n, NULL));
    MT_H5(file, name, "find a part",
          from = H5Sselect_project_intersection(p->ours, theirs, box->space));
    if (H5Sget_select_npoints(from) == 0) goto cleanup;
    MT_H5(file, name, "find a part",
          into = H5Sselect_project_intersection(box->space, box->memory, p->ours));
    MT_H5(p->source, p->object, "read the data",
          H5Dread(dataset, box->type, into, from, H5P_DEFAULT, box->to));
cleanup:
    if (into >= 0) H5Sclose(into);
    if (from >= 0) H5Sclose(from);
    if (theirs >= 0) H5Sclose(theirs);
    if (dataset >= 0) H5Dclose(dataset);
    return status;
}

mt_status mt_h5_read_virtual(mt_h5 *file, const char *name, int64_t list, const mt_h5_info *info,
                             const struct mt_h5_box *box)
{
    size_t parts;
    int64_t at = 0;
    part p;
    if (file->source)
        return MT_H5_DAMAGED(file, name, "is virtual, and so is what leads here: refused");
    MT_TRY(mt_h5_check(file, name, "read how it is stored", H5Pget_virtual_count(list, &parts)));
    for (size_t i = 0; i < parts; i++) {
        MT_TRY(open_part(&p, file, name, list, i, info, &at));
        mt_status status = box ? read_part(file, name, &p, box) : MT_OK;
        H5Sclose(p.ours);
        MT_TRY(status);
    }
    if (at != info->count)
        return MT_H5_DAMAGED(file, name, "its parts are %lld elements of %lld", (long long)at,
                             (long long)info->count);
    return MT_OK;
}
