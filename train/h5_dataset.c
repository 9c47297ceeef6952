/* HDF5 datasets of our types: checked before they are trusted. */
#define H5_USE_110_API 1
#include <hdf5.h>
#include <stdlib.h>
#include <string.h>

#include "train/h5_priv.h"

enum {
    CHUNK_BYTES = 1 << 20,
    MAX_CHUNK_BYTES = 1 << 28, /* of other programs' files: HDF5 holds a whole chunk in memory */
    DEFLATE_RATIO = 1032       /* the most that deflate can expand */
};

static const H5Z_filter_t known_filters[] = { H5Z_FILTER_DEFLATE, H5Z_FILTER_SHUFFLE,
                                              H5Z_FILTER_FLETCHER32 };

static const char bf16_attribute[] = "dtype";

/* ---- types -------------------------------------------------------------------------------------
 */

static size_t type_size(int type)
{
    return type == MT_H5_U64 ? 8 : mt_dtype_size((mt_dtype)type);
}

void mt_h5_format(char text[96], int type, int ndim, const int64_t *shape)
{
    int n = snprintf(text, 96, "%s[", type == MT_H5_U64 ? "u64" : mt_dtype_name((mt_dtype)type));
    for (int i = 0; i < ndim && n < 90; i++)
        if (shape[i] < 0) /* any */
            n += snprintf(text + n, (size_t)(96 - n), i ? ",*" : "*");
        else
            n += snprintf(text + n, (size_t)(96 - n), i ? ",%lld" : "%lld", (long long)shape[i]);
    if (n < 95) memcpy(text + n, "]", 2);
}

int64_t mt_h5_make_type(int type, bool little_endian)
{
    const hid_t types[MT_H5_TYPE_COUNT][2] = {
        [MT_F64] = { H5T_IEEE_F64BE, H5T_IEEE_F64LE },
        [MT_F32] = { H5T_IEEE_F32BE, H5T_IEEE_F32LE },
        [MT_BF16] = { H5T_STD_U16BE, H5T_STD_U16LE },
        [MT_F16] = { H5T_IEEE_F32BE, H5T_IEEE_F32LE },
        [MT_I64] = { H5T_STD_I64BE, H5T_STD_I64LE },
        [MT_I32] = { H5T_STD_I32BE, H5T_STD_I32LE },
        [MT_U32] = { H5T_STD_U32BE, H5T_STD_U32LE },
        [MT_U16] = { H5T_STD_U16BE, H5T_STD_U16LE },
        [MT_U8] = { H5T_STD_U8BE, H5T_STD_U8LE },
        [MT_H5_U64] = { H5T_STD_U64BE, H5T_STD_U64LE },
    };
    hid_t id = H5Tcopy(types[type][little_endian]);
    if (type != MT_F16 || id < 0) return id;
    if (H5Tset_fields(id, 15, 10, 5, 0, 10) < 0 || H5Tset_size(id, 2) < 0 ||
        H5Tset_ebias(id, 15) < 0) {
        H5Tclose(id);
        return -1;
    }
    return id;
}

bool mt_h5_host_is_little_endian(void)
{
    const uint16_t one = 1;
    unsigned char first;
    memcpy(&first, &one, 1);
    return first == 1;
}

/* Which of our types a dataset has; -1 when none. */
static int find_type(hid_t id, bool *little_endian)
{
    for (int type = 0; type < MT_H5_TYPE_COUNT; type++)
        for (int little = 0; little < 2 && type != MT_BF16; little++) {
            hid_t ours = mt_h5_make_type(type, little);
            htri_t equal = ours < 0 ? 0 : H5Tequal(ours, id);
            if (ours >= 0) H5Tclose(ours);
            *little_endian = little;
            if (equal > 0) return type;
        }
    return -1;
}

static mt_status read_type(mt_h5 *file, const char *name, hid_t dataset, mt_h5_info *info)
{
    mt_status status = MT_OK;
    bool has = false;
    char *text = NULL;
    hid_t id = H5Dget_type(dataset);
    MT_H5(file, name, "read the type", id);
    info->type = find_type(id, &info->little_endian);
    if (info->type < 0) {
        status = MT_H5_DAMAGED(file, name,
                               "its type is not one of f64 f32 f16 bf16 u8 u16 u32 "
                               "u64 i32 i64");
        goto cleanup;
    }
    if (type_size(info->type) == 1) info->little_endian = true;
    if (info->type != MT_U16) goto cleanup;
    MT_TRY_CLEANUP(mt_h5_has_attribute(file, name, bf16_attribute, &has));
    if (!has) goto cleanup;
    MT_TRY_CLEANUP(mt_h5_get_string(file, name, bf16_attribute, &text));
    if (!strcmp(text, "bf16"))
        info->type = MT_BF16;
    else
        status = MT_H5_DAMAGED(file, name, "u16 with dtype = '%.20s', which is not 'bf16'", text);
cleanup:
    free(text);
    if (id >= 0) H5Tclose(id);
    return status;
}

/* ---- checks ------------------------------------------------------------------------------------
 */

static mt_status read_shape(mt_h5 *file, const char *name, hid_t dataset, mt_h5_info *info)
{
    mt_status status = MT_OK;
    hsize_t dims[H5S_MAX_RANK];
    hid_t space = H5Dget_space(dataset);
    MT_H5(file, name, "read the shape", space);
    H5S_class_t class = H5Sget_simple_extent_type(space);
    info->ndim = class == H5S_SCALAR ? 0 : H5Sget_simple_extent_dims(space, dims, NULL);
    MT_H5(file, name, "read the shape", info->ndim);
    if (class != H5S_SCALAR && class != H5S_SIMPLE) {
        status = MT_H5_DAMAGED(file, name, "has no shape");
        goto cleanup;
    }
    if (info->ndim > MT_MAX_DIMS) {
        status =
            MT_H5_DAMAGED(file, name, "has %d dimensions, more than %d", info->ndim, MT_MAX_DIMS);
        goto cleanup;
    }
    int64_t bytes = (int64_t)type_size(info->type);
    info->count = 1;
    for (int i = 0; i < info->ndim; i++) {
        info->shape[i] = (int64_t)dims[i];
        if (dims[i] > INT64_MAX || __builtin_mul_overflow(bytes, (int64_t)dims[i], &bytes)) {
            status = MT_H5_DAMAGED(file, name, "its extents overflow (%llu in dimension %d)",
                                   (unsigned long long)dims[i], i);
            goto cleanup;
        }
        info->count *= (int64_t)dims[i];
    }
    info->bytes = bytes;
cleanup:
    if (space >= 0) H5Sclose(space);
    return status;
}

/* Refuses unknown filters; *ratio is what the known ones can expand by. */
static mt_status check_filters(mt_h5 *file, const char *name, hid_t list, int64_t *ratio)
{
    int filters = H5Pget_nfilters(list);
    MT_TRY(mt_h5_check(file, name, "read the filters", filters));
    *ratio = 1;
    for (int i = 0; i < filters; i++) {
        unsigned flags, config;
        size_t values = 0, known = sizeof known_filters / sizeof *known_filters, k = 0;
        H5Z_filter_t id =
            H5Pget_filter2(list, (unsigned)i, &flags, &values, NULL, 0, NULL, &config);
        while (k < known && known_filters[k] != id) k++;
        if (k == known)
            return MT_H5_DAMAGED(file, name,
                                 "compressed with filter %d; only deflate, shuffle and "
                                 "fletcher32 are read",
                                 (int)id);
        if (id == H5Z_FILTER_DEFLATE) *ratio *= *ratio > 1 ? 1 : DEFLATE_RATIO;
    }
    return MT_OK;
}

static mt_status check_chunks(mt_h5 *file, const char *name, hid_t list, const mt_h5_info *info)
{
    hsize_t dims[H5S_MAX_RANK];
    int n = H5Pget_chunk(list, H5S_MAX_RANK, dims);
    MT_TRY(mt_h5_check(file, name, "read the chunk shape", n));
    int64_t bytes = (int64_t)type_size(info->type);
    for (int i = 0; i < n; i++)
        if (dims[i] > MAX_CHUNK_BYTES || (bytes *= (int64_t)dims[i]) > MAX_CHUNK_BYTES)
            return MT_H5_DAMAGED(file, name, "its chunks are larger than %d bytes",
                                 MAX_CHUNK_BYTES);
    return MT_OK;
}

static mt_status check_contiguous(mt_h5 *file, const char *name, hid_t dataset, hid_t list,
                                  mt_h5_info *info)
{
    if (H5Pget_external_count(list) != 0)
        return MT_H5_DAMAGED(file, name, "its data are in another file: refused");
    haddr_t offset = H5Dget_offset(dataset);
    if (!info->count) return MT_OK;
    if (offset == HADDR_UNDEF) return MT_H5_DAMAGED(file, name, "its data were never written");
    if (offset > (haddr_t)file->bytes || info->bytes > file->bytes - (int64_t)offset)
        return MT_H5_DAMAGED(file, name, "claims %lld bytes at %llu of a file of %lld",
                             (long long)info->bytes, (unsigned long long)offset,
                             (long long)file->bytes);
    info->offset = (int64_t)offset;
    return MT_OK;
}

/* Where and how the data lie; `parts`: of a virtual dataset, too, which reading it checks anyway.
 */
static mt_status check_storage(mt_h5 *file, const char *name, hid_t dataset, mt_h5_info *info,
                               bool parts)
{
    mt_status status = MT_OK;
    int64_t ratio = 1;
    hid_t list = H5Dget_create_plist(dataset);
    MT_H5(file, name, "read how it is stored", list);
    H5D_layout_t layout = H5Pget_layout(list);
    if (layout == H5D_CONTIGUOUS) {
        MT_TRY_CLEANUP(check_contiguous(file, name, dataset, list, info));
    } else if (layout == H5D_CHUNKED) {
        MT_TRY_CLEANUP(check_filters(file, name, list, &ratio));
        MT_TRY_CLEANUP(check_chunks(file, name, list, info));
    } else if (layout != H5D_COMPACT) {
        if (parts) status = mt_h5_read_virtual(file, name, list, info, NULL);
        goto cleanup; /* its bytes are in other files */
    }
    if (info->bytes / ratio > file->bytes)
        status = MT_H5_DAMAGED(file, name, "claims %lld bytes, more than a file of %lld can hold",
                               (long long)info->bytes, (long long)file->bytes);
cleanup:
    if (list >= 0) H5Pclose(list);
    return status;
}

/* Opens and, in a file that others may have written, checks. */
static mt_status open_dataset(hid_t *dataset, mt_h5 *file, const char *name, mt_h5_info *info,
                              bool parts)
{
    mt_status status;
    *dataset = -1;
    *info = (mt_h5_info){ .offset = -1 };
    MT_TRY_CLEANUP(mt_h5_check_path(file, name));
    H5O_info_t object;
    MT_H5(file, name, "look at the object",
          H5Oget_info_by_name(file->id, name, &object, H5P_DEFAULT));
    if (object.type != H5O_TYPE_DATASET) {
        status = MT_H5_DAMAGED(file, name, "is not a dataset");
        goto cleanup;
    }
    MT_H5(file, name, "open the dataset", *dataset = H5Dopen2(file->id, name, H5P_DEFAULT));
    MT_TRY_CLEANUP(read_type(file, name, *dataset, info));
    MT_TRY_CLEANUP(read_shape(file, name, *dataset, info));
    if (!file->writing) MT_TRY_CLEANUP(check_storage(file, name, *dataset, info, parts));
cleanup:
    if (status != MT_OK && *dataset >= 0) H5Dclose(*dataset);
    return status;
}

/* ---- creating ----------------------------------------------------------------------------------
 */

/* Whole rows (of the last dimensions) up to about CHUNK_BYTES, halving the leading extents. */
static void choose_chunk(hsize_t chunk[], int ndim, const int64_t *shape, size_t size)
{
    int64_t bytes = (int64_t)size;
    for (int i = 0; i < ndim; i++) chunk[i] = (hsize_t)shape[i], bytes *= shape[i];
    for (int i = 0; i < ndim; i++)
        while (bytes > CHUNK_BYTES && chunk[i] > 1) {
            bytes /= (int64_t)chunk[i];
            chunk[i] = (chunk[i] + 1) / 2;
            bytes *= (int64_t)chunk[i];
        }
}

static mt_status make_creation_list(hid_t *list, mt_h5 *file, const char *name, int type, int ndim,
                                    const int64_t *shape, mt_h5_storage storage)
{
    mt_status status = MT_OK;
    hsize_t chunk[MT_MAX_DIMS];
    MT_H5(file, name, "make a creation list", *list = H5Pcreate(H5P_DATASET_CREATE));
    MT_H5(file, name, "leave times out", H5Pset_obj_track_times(*list, false));
    MT_H5(file, name, "leave filling out", H5Pset_fill_time(*list, H5D_FILL_TIME_NEVER));
    if (storage == MT_H5_CHECKED) {
        choose_chunk(chunk, ndim, shape, type_size(type));
        MT_H5(file, name, "choose chunks", H5Pset_chunk(*list, ndim, chunk));
        MT_H5(file, name, "add checksums", H5Pset_fletcher32(*list));
    } else {
        MT_H5(file, name, "choose a place", H5Pset_alloc_time(*list, H5D_ALLOC_TIME_EARLY));
    }
cleanup:
    return status;
}

/* Makes the groups above it, too. */
mt_status mt_h5_make_dataset(mt_h5 *file, const char *name, int type, int64_t space, int64_t list)
{
    mt_status status = MT_OK;
    hid_t id = -1, dataset = -1;
    const char *slash = strrchr(name, '/');
    char group[1024];
    if (slash && slash > name) {
        snprintf(group, sizeof group, "%.*s", (int)(slash - name), name);
        MT_TRY(mt_h5_group(file, group));
    }
    MT_H5(file, name, "make a type", id = mt_h5_make_type(type, true));
    dataset = H5Dcreate2(file->id, name, id, space, H5P_DEFAULT, list, H5P_DEFAULT);
    MT_H5(file, name, "create the dataset", dataset);
    if (type == MT_BF16) MT_TRY_CLEANUP(mt_h5_set_string(file, name, bf16_attribute, "bf16"));
cleanup:
    if (dataset >= 0) H5Dclose(dataset);
    if (id >= 0) H5Tclose(id);
    return status;
}

mt_status mt_h5_dataset_create(mt_h5 *file, const char *name, int type, int ndim,
                               const int64_t *shape, mt_h5_storage storage)
{
    MT_REQUIRE(ndim >= 0 && ndim <= MT_MAX_DIMS, MT_EINVAL, "'%s', %s: %d dimensions, at most %d",
               file->path, name, ndim, MT_MAX_DIMS);
    mt_status status;
    hid_t space = -1, list = -1;
    hsize_t dims[MT_MAX_DIMS];
    for (int i = 0; i < ndim; i++) dims[i] = (hsize_t)shape[i];
    space = ndim ? H5Screate_simple(ndim, dims, NULL) : H5Screate(H5S_SCALAR);
    MT_H5(file, name, "make a shape", space);
    MT_TRY_CLEANUP(make_creation_list(&list, file, name, type, ndim, shape, storage));
    MT_TRY_CLEANUP(mt_h5_make_dataset(file, name, type, space, list));
cleanup:
    if (list >= 0) H5Pclose(list);
    if (space >= 0) H5Sclose(space);
    return status;
}

/* ---- reading and writing -----------------------------------------------------------------------
 */

/* The box of extents `count` at `start` (NULL: everything) as a selection in the dataset, and the
 * same box alone, as it is in memory. */
static mt_status select_box(hid_t *space, hid_t *memory, mt_h5 *file, const char *name,
                            hid_t dataset, const mt_h5_info *info, const int64_t *start,
                            const int64_t *count)
{
    mt_status status = MT_OK;
    hsize_t at[MT_MAX_DIMS], n[MT_MAX_DIMS];
    for (int i = 0; start && i < info->ndim; i++) {
        MT_REQUIRE(start[i] >= 0 && count[i] >= 0 && start[i] <= info->shape[i] &&
                       count[i] <= info->shape[i] - start[i],
                   MT_EINVAL, "'%s', %s: [%lld, +%lld) is outside its extent %lld", file->path,
                   name, (long long)start[i], (long long)count[i], (long long)info->shape[i]);
        at[i] = (hsize_t)start[i], n[i] = (hsize_t)count[i];
    }
    MT_H5(file, name, "read the shape", *space = H5Dget_space(dataset));
    if (!start || !info->ndim) {
        MT_H5(file, name, "read the shape", *memory = H5Scopy(*space));
        goto cleanup;
    }
    MT_H5(file, name, "make a shape", *memory = H5Screate_simple(info->ndim, n, NULL));
    MT_H5(file, name, "select a part",
          H5Sselect_hyperslab(*space, H5S_SELECT_SET, at, NULL, n, NULL));
cleanup:
    return status;
}

static mt_status read_box(mt_h5 *file, const char *name, hid_t dataset, const mt_h5_info *info,
                          struct mt_h5_box *box)
{
    mt_status status = MT_OK;
    hid_t list = -1, type = mt_h5_make_type(info->type, mt_h5_host_is_little_endian());
    box->type = type;
    MT_H5(file, name, "make a type", type);
    MT_H5(file, name, "read how it is stored", list = H5Dget_create_plist(dataset));
    if (H5Pget_layout(list) == H5D_VIRTUAL)
        MT_TRY_CLEANUP(mt_h5_read_virtual(file, name, list, info, box));
    else
        MT_H5(file, name, "read the data",
              H5Dread(dataset, type, box->memory, box->space, H5P_DEFAULT, box->to));
cleanup:
    if (type >= 0) H5Tclose(type);
    if (list >= 0) H5Pclose(list);
    return status;
}

static mt_status write_box(mt_h5 *file, const char *name, hid_t dataset, const mt_h5_info *info,
                           hid_t space, hid_t memory, const void *from)
{
    hid_t type = mt_h5_make_type(info->type, mt_h5_host_is_little_endian());
    MT_TRY(mt_h5_check(file, name, "make a type", type));
    mt_status status = mt_h5_check(file, name, "write the data",
                                   H5Dwrite(dataset, type, memory, space, H5P_DEFAULT, from));
    H5Tclose(type);
    return status;
}

/* Whether a box (NULL start: everything) is a run of elements; which. */
static bool find_run(int64_t *first, int64_t *length, const mt_h5_info *info, const int64_t *start,
                     const int64_t *count)
{
    int d = info->ndim - 1;
    int64_t step = 1;
    *first = 0, *length = info->count;
    if (!start) return true;
    for (*length = 1; d >= 0 && count[d] == info->shape[d]; d--) step *= info->shape[d];
    *length = step;
    if (d < 0) return true;
    *length *= count[d];
    for (int i = d; i >= 0; step *= info->shape[i--]) {
        if (i < d && count[i] != 1) return false;
        *first += start[i] * step;
    }
    return true;
}

/* Moves a box between memory (`to` or `from`) and an open dataset: by whole chunks, if they can be.
 */
static mt_status transfer(mt_h5 *file, const char *name, hid_t dataset, const mt_h5_info *info,
                          const int64_t *start, const int64_t *count, void *to, const void *from)
{
    mt_status status;
    hid_t memory = -1, space = -1;
    int64_t first, length;
    bool done = false;
    MT_TRY_CLEANUP(select_box(&space, &memory, file, name, dataset, info, start, count));
    if (!find_run(&first, &length, info, start, count)) length = 0;
    if (length && to)
        MT_TRY_CLEANUP(mt_h5_read_chunks(&done, file, name, dataset, info, first, length, to));
    else if (length == info->count)
        MT_TRY_CLEANUP(mt_h5_write_chunks(&done, file, name, dataset, info, from));
    if (done) goto cleanup;
    status = to ? read_box(file, name, dataset, info,
                           &(struct mt_h5_box){ -1, space, memory, to, first, length })
                : write_box(file, name, dataset, info, space, memory, from);
cleanup:
    if (space >= 0) H5Sclose(space);
    if (memory >= 0) H5Sclose(memory);
    return status;
}

static bool box_is_empty(const mt_h5_info *info, const int64_t *start, const int64_t *count)
{
    bool empty = info->count == 0;
    for (int i = 0; start && i < info->ndim; i++) empty |= count[i] == 0;
    return empty;
}

mt_status mt_h5_write_slab(mt_h5 *file, const char *name, const int64_t *start,
                           const int64_t *count, const void *data)
{
    mt_h5_info info;
    hid_t dataset;
    MT_TRY(open_dataset(&dataset, file, name, &info, false));
    mt_status status = MT_OK;
    if (!box_is_empty(&info, start, count))
        status = transfer(file, name, dataset, &info, start, count, NULL, data);
    mt_status closed = mt_h5_check(file, name, "close the dataset", H5Dclose(dataset));
    return status == MT_OK ? closed : status;
}

mt_status mt_h5_write(mt_h5 *file, const char *name, int type, int ndim, const int64_t *shape,
                      const void *data)
{
    bool checked = ndim > 0;
    for (int i = 0; i < ndim; i++) checked &= shape[i] > 0;
    MT_TRY(mt_h5_dataset_create(file, name, type, ndim, shape,
                                checked ? MT_H5_CHECKED : MT_H5_CONTIGUOUS));
    return mt_h5_write_slab(file, name, NULL, NULL, data);
}

mt_status mt_h5_dataset_info(mt_h5 *file, const char *name, mt_h5_info *info)
{
    hid_t dataset;
    MT_TRY(open_dataset(&dataset, file, name, info, true));
    H5Dclose(dataset);
    return MT_OK;
}

static mt_status check_same(mt_h5 *file, const char *name, const mt_h5_info *info, int type,
                            int ndim, const int64_t *shape)
{
    bool same = info->type == type && info->ndim == ndim;
    for (int i = 0; same && i < ndim; i++) same = shape[i] == -1 || info->shape[i] == shape[i];
    if (same) return MT_OK;
    char got[96], want[96];
    mt_h5_format(got, info->type, info->ndim, info->shape);
    mt_h5_format(want, type, ndim, shape);
    return MT_H5_DAMAGED(file, name, "is %s, must be %s", got, want);
}

mt_status mt_h5_expect(mt_h5 *file, const char *name, int type, int ndim, const int64_t *shape,
                       mt_h5_info *info)
{
    MT_TRY(mt_h5_dataset_info(file, name, info));
    return check_same(file, name, info, type, ndim, shape);
}

mt_status mt_h5_read(mt_h5 *file, const char *name, const mt_h5_info *info, void *data)
{
    mt_h5_info found;
    hid_t dataset;
    MT_TRY(open_dataset(&dataset, file, name, &found, false));
    mt_status status = check_same(file, name, &found, info->type, info->ndim, info->shape);
    if (status == MT_OK && found.count)
        status = transfer(file, name, dataset, &found, NULL, NULL, data, NULL);
    H5Dclose(dataset);
    return status;
}

mt_status mt_h5_read_slab(mt_h5 *file, const char *name, int type, const int64_t *start,
                          const int64_t *count, void *data)
{
    mt_h5_info info;
    hid_t dataset;
    MT_TRY(open_dataset(&dataset, file, name, &info, false));
    mt_status status = check_same(file, name, &info, type, info.ndim, info.shape);
    if (status == MT_OK && !box_is_empty(&info, start, count))
        status = transfer(file, name, dataset, &info, start, count, data, NULL);
    H5Dclose(dataset);
    return status;
}
