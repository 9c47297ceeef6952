/* Reading safetensors. */
#include "train/safetensors.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "train/fileio.h"

enum {
    MAX_HEADER = 100 << 20, /* as the reference implementation */
    MAX_INDEX = 100 << 20,
    MAX_FILES = 10000,
    NO_DTYPE = MT_DTYPE_COUNT
};

static const struct {
    const char *name;
    int bits;
    int dtype; /* NO_DTYPE: listed, not used */
} types[] = {
    { "F64", 64, MT_F64 },      { "F32", 32, MT_F32 },      { "BF16", 16, MT_BF16 },
    { "F16", 16, MT_F16 },      { "I64", 64, MT_I64 },      { "I32", 32, MT_I32 },
    { "U32", 32, MT_U32 },      { "U16", 16, MT_U16 },      { "U8", 8, MT_U8 },
    { "BOOL", 8, NO_DTYPE },    { "I8", 8, NO_DTYPE },      { "I16", 16, NO_DTYPE },
    { "U64", 64, NO_DTYPE },    { "C64", 64, NO_DTYPE },    { "F8_E5M2", 8, NO_DTYPE },
    { "F8_E4M3", 8, NO_DTYPE }, { "F8_E8M0", 8, NO_DTYPE }, { "F6_E2M3", 6, NO_DTYPE },
    { "F6_E3M2", 6, NO_DTYPE }, { "F4", 4, NO_DTYPE },
};
enum { TYPES = sizeof types / sizeof *types };

typedef struct st_file {
    char path[MT_PATH_BYTES];
    mt_file_map map;
    json_t *header; /* owns the names */
} st_file;

struct mt_safetensors {
    st_file **files;
    int64_t file_count;
    mt_st_tensor *tensors;
    int64_t count;
};

/* ---- one header --------------------------------------------------------------------------------
 */

static mt_status read_header(st_file *f, size_t *start)
{
    const unsigned char *p = f->map.data;
    MT_REQUIRE(f->map.bytes >= 8, MT_EDAMAGED, "'%s': %zu bytes are too few for a safetensors file",
               f->path, f->map.bytes);
    uint64_t length = 0;
    for (int i = 0; i < 8; i++) length |= (uint64_t)p[i] << (8 * i);
    MT_REQUIRE(length <= MAX_HEADER && length <= f->map.bytes - 8, MT_EDAMAGED,
               "'%s': a header of %llu bytes, more than the file's %zu or than %d", f->path,
               (unsigned long long)length, f->map.bytes, MAX_HEADER);
    MT_REQUIRE(length > 0 && p[8] == '{', MT_EDAMAGED, "'%s': the header does not begin with '{'",
               f->path);
    json_error_t error;
    f->header = json_loadb((const char *)p + 8, (size_t)length, JSON_REJECT_DUPLICATES, &error);
    MT_REQUIRE(f->header || json_error_code(&error) != json_error_out_of_memory, MT_ENOMEM,
               "no memory for the header of '%s'", f->path);
    MT_REQUIRE(f->header, MT_EDAMAGED, "'%s': the header is not JSON: %s (byte %d)", f->path,
               error.text, error.position);
    *start = 8 + (size_t)length;
    return MT_OK;
}

static mt_status read_shape(mt_st_tensor *t, const st_file *f, const json_t *shape, int64_t *count)
{
    size_t ndim = json_array_size(shape);
    MT_REQUIRE(json_is_array(shape) && ndim <= MT_ST_MAX_DIMS, MT_EDAMAGED,
               "'%s', tensor '%s': shape is not an array of at most %d extents", f->path, t->name,
               MT_ST_MAX_DIMS);
    t->ndim = (int)ndim;
    *count = 1;
    for (size_t i = 0; i < ndim; i++) {
        const json_t *extent = json_array_get(shape, i);
        int64_t n = json_is_integer(extent) ? (int64_t)json_integer_value(extent) : -1;
        MT_REQUIRE(n >= 0 && !__builtin_mul_overflow(*count, n, count), MT_EDAMAGED,
                   "'%s', tensor '%s': extent %zu of its shape is not a number in range", f->path,
                   t->name, i);
        t->shape[i] = n;
    }
    return MT_OK;
}

/* Fills t from its JSON; offsets are relative to the `room` bytes after the header. */
static mt_status read_tensor(mt_st_tensor *t, const st_file *f, const json_t *value,
                             const unsigned char *buffer, size_t room)
{
    const char *type = json_string_value(json_object_get(value, "dtype"));
    const json_t *offsets = json_object_get(value, "data_offsets");
    int64_t count = 0;
    size_t k = 0;
    MT_REQUIRE(json_is_object(value) && type, MT_EDAMAGED, "'%s', tensor '%s' has no dtype",
               f->path, t->name);
    while (k < TYPES && strcmp(types[k].name, type)) k++;
    MT_REQUIRE(k < TYPES, MT_EDAMAGED, "'%s', tensor '%s': dtype '%.20s' is not known", f->path,
               t->name, type);
    t->type = types[k].name;
    MT_TRY(read_shape(t, f, json_object_get(value, "shape"), &count));
    MT_REQUIRE(json_array_size(offsets) == 2 && json_is_integer(json_array_get(offsets, 0)) &&
                   json_is_integer(json_array_get(offsets, 1)),
               MT_EDAMAGED, "'%s', tensor '%s': data_offsets is not a pair of integers", f->path,
               t->name);
    int64_t begin = (int64_t)json_integer_value(json_array_get(offsets, 0));
    int64_t end = (int64_t)json_integer_value(json_array_get(offsets, 1)), bits;
    MT_REQUIRE(begin >= 0 && end >= begin && (uint64_t)end <= room, MT_EDAMAGED,
               "'%s', tensor '%s': data_offsets [%lld, %lld] are not within the %zu bytes of data",
               f->path, t->name, (long long)begin, (long long)end, room);
    MT_REQUIRE(!__builtin_mul_overflow(count, types[k].bits, &bits) && bits % 8 == 0 &&
                   bits / 8 == end - begin,
               MT_EDAMAGED, "'%s', tensor '%s': %lld bytes of data for %lld elements of %s",
               f->path, t->name, (long long)(end - begin), (long long)count, type);
    t->data = buffer + begin;
    t->bytes = (size_t)(end - begin);
    return MT_OK;
}

static int by_place(const void *a, const void *b)
{
    const mt_st_tensor *x = a, *y = b;
    uintptr_t p = (uintptr_t)x->data, q = (uintptr_t)y->data;
    if (p != q) return p < q ? -1 : 1;
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

/* The format leaves no byte of the buffer out and gives none to two tensors. */
static mt_status check_cover(mt_st_tensor *tensors, int64_t count, const st_file *f,
                             const unsigned char *buffer, size_t room)
{
    qsort(tensors, (size_t)count, sizeof *tensors, by_place);
    size_t at = 0;
    for (int64_t i = 0; i < count; i++) {
        size_t begin = (size_t)((const unsigned char *)tensors[i].data - buffer);
        MT_REQUIRE(begin >= at, MT_EDAMAGED,
                   "'%s', tensor '%s' begins at byte %zu of the data, before the end of '%s' at "
                   "%zu: tensors may not overlap",
                   f->path, tensors[i].name, begin, tensors[i - 1].name, at);
        MT_REQUIRE(begin == at, MT_EDAMAGED,
                   "'%s', tensor '%s' begins at byte %zu of the data, and no tensor has the bytes "
                   "before it from %zu on: there may be no gap",
                   f->path, tensors[i].name, begin, at);
        at += tensors[i].bytes;
    }
    MT_REQUIRE(at == room, MT_EDAMAGED, "'%s': %zu bytes of data, but the tensors end at %zu",
               f->path, room, at);
    return MT_OK;
}

/* ---- sets --------------------------------------------------------------------------------------
 */

static int by_name(const void *a, const void *b)
{
    return strcmp(((const mt_st_tensor *)a)->name, ((const mt_st_tensor *)b)->name);
}

/* Appends the tensors of a file whose header has been read. */
static mt_status add_tensors(mt_safetensors *set, st_file *f, size_t start)
{
    const unsigned char *buffer = f->map.data + start;
    size_t room = f->map.bytes - start;
    int64_t more = (int64_t)json_object_size(f->header), added = 0;
    mt_st_tensor *tensors =
        realloc(set->tensors, (size_t)(set->count + more + 1) * sizeof *tensors);
    MT_REQUIRE(tensors, MT_ENOMEM, "no memory for the %lld tensors of '%s'", (long long)more,
               f->path);
    set->tensors = tensors;
    const char *name;
    json_t *value;
    json_object_foreach(f->header, name, value)
    {
        if (!strcmp(name, "__metadata__")) continue;
        mt_st_tensor *t = &tensors[set->count + added++];
        *t = (mt_st_tensor){ .name = name, .file = f->path };
        MT_TRY(read_tensor(t, f, value, buffer, room));
    }
    MT_TRY(check_cover(tensors + set->count, added, f, buffer, room));
    set->count += added;
    return MT_OK;
}

static mt_status add_file(mt_safetensors *set, const char *path)
{
    size_t start;
    st_file **files = realloc(set->files, (size_t)(set->file_count + 1) * sizeof *files);
    MT_REQUIRE(files, MT_ENOMEM, "no memory to open '%s'", path);
    set->files = files;
    st_file *f = calloc(1, sizeof *f);
    MT_REQUIRE(f, MT_ENOMEM, "no memory to open '%s'", path);
    set->files[set->file_count++] = f;
    MT_TRY(mt_path_format(f->path, "%s", path));
    MT_TRY(mt_file_map_open(&f->map, path));
    MT_TRY(read_header(f, &start));
    return add_tensors(set, f, start);
}

static mt_status sort_tensors(mt_safetensors *set, const char *where)
{
    if (set->count) qsort(set->tensors, (size_t)set->count, sizeof *set->tensors, by_name);
    for (int64_t i = 1; i < set->count; i++)
        MT_REQUIRE(strcmp(set->tensors[i - 1].name, set->tensors[i].name), MT_EDAMAGED,
                   "'%s': tensor '%s' is in two files", where, set->tensors[i].name);
    return MT_OK;
}

mt_status mt_safetensors_open(mt_safetensors **set, const char *path)
{
    mt_status status;
    *set = calloc(1, sizeof **set);
    MT_REQUIRE(*set, MT_ENOMEM, "no memory to open '%s'", path);
    MT_TRY_CLEANUP(add_file(*set, path));
    MT_TRY_CLEANUP(sort_tensors(*set, path));
cleanup:
    if (status != MT_OK) mt_safetensors_close(set);
    return status;
}

/* Opens every file that the map names, once. */
static mt_status add_indexed(mt_safetensors *set, const char *dir, const char *index, json_t *map)
{
    char path[MT_PATH_BYTES];
    const char *name;
    json_t *value;
    json_object_foreach(map, name, value)
    {
        const char *file = json_string_value(value);
        MT_REQUIRE(file && *file && *file != '.' && !strchr(file, '/'), MT_EDAMAGED,
                   "'%s': tensor '%s' is not given a plain file name", index, name);
        MT_TRY(mt_path_format(path, "%s/%s", dir, file));
        int64_t i = 0;
        while (i < set->file_count && strcmp(set->files[i]->path, path)) i++;
        if (i < set->file_count) continue;
        MT_REQUIRE(i < MAX_FILES, MT_EDAMAGED, "'%s' names more than %d files", index, MAX_FILES);
        MT_TRY(add_file(set, path));
    }
    return MT_OK;
}

/* Every tensor of the map must be in the set; in which file is settled by the files themselves. */
static mt_status check_index(const mt_safetensors *set, const char *index, json_t *map)
{
    const char *name;
    json_t *value;
    json_object_foreach(map, name, value)
        MT_REQUIRE(mt_safetensors_find(set, name), MT_EDAMAGED,
                   "'%s': tensor '%s' is in none of its files", index, name);
    return MT_OK;
}

static mt_status open_index(mt_safetensors *set, const char *dir, const char *index)
{
    mt_status status = MT_OK;
    char *text = NULL;
    size_t bytes;
    json_t *json = NULL;
    json_error_t error;
    MT_TRY_CLEANUP(mt_file_read_all(&text, &bytes, index, MAX_INDEX));
    json = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &error);
    json_t *map = json_object_get(json, "weight_map");
    if (!json_is_object(map)) {
        status = MT_FAIL(MT_EDAMAGED, "'%s' is not an index with a weight_map%s%s", index,
                         json ? "" : ": ", json ? "" : error.text);
        goto cleanup;
    }
    MT_TRY_CLEANUP(add_indexed(set, dir, index, map));
    MT_TRY_CLEANUP(sort_tensors(set, index));
    MT_TRY_CLEANUP(check_index(set, index, map));
cleanup:
    json_decref(json);
    free(text);
    return status;
}

mt_status mt_safetensors_open_dir(mt_safetensors **set, const char *dir)
{
    char path[MT_PATH_BYTES];
    mt_status status;
    *set = NULL;
    MT_TRY(mt_path_format(path, "%s/model.safetensors", dir));
    if (mt_path_exists(path)) return mt_safetensors_open(set, path);
    MT_TRY(mt_path_format(path, "%s/model.safetensors.index.json", dir));
    MT_REQUIRE(mt_path_exists(path), MT_EIO,
               "'%s' has neither model.safetensors nor model.safetensors.index.json", dir);
    *set = calloc(1, sizeof **set);
    MT_REQUIRE(*set, MT_ENOMEM, "no memory to open '%s'", path);
    MT_TRY_CLEANUP(open_index(*set, dir, path));
cleanup:
    if (status != MT_OK) mt_safetensors_close(set);
    return status;
}

void mt_safetensors_close(mt_safetensors **set)
{
    mt_safetensors *s = *set;
    if (!s) return;
    for (int64_t i = 0; i < s->file_count; i++) {
        json_decref(s->files[i]->header);
        mt_file_map_close(&s->files[i]->map);
        free(s->files[i]);
    }
    free(s->files);
    free(s->tensors);
    free(s);
    *set = NULL;
}

int64_t mt_safetensors_count(const mt_safetensors *set)
{
    return set->count;
}

mt_st_tensor *mt_safetensors_get(const mt_safetensors *set, int64_t i)
{
    return &set->tensors[i];
}

mt_st_tensor *mt_safetensors_find(const mt_safetensors *set, const char *name)
{
    mt_st_tensor key = { .name = name };
    if (!set->count) return NULL;
    return bsearch(&key, set->tensors, (size_t)set->count, sizeof key, by_name);
}

mt_status mt_st_tensor_dtype(mt_dtype *dtype, const mt_st_tensor *tensor)
{
    for (size_t k = 0; k < TYPES; k++)
        if (!strcmp(types[k].name, tensor->type) && types[k].dtype != NO_DTYPE) {
            *dtype = (mt_dtype)types[k].dtype;
            return MT_OK;
        }
    return MT_FAIL(MT_EUNSUPPORTED, "'%s': tensor '%s' is %s, which is not read", tensor->file,
                   tensor->name, tensor->type);
}
