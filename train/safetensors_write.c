/* Writing safetensors, in one file or in shards. */
#include <dirent.h>
#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "train/fileio.h"
#include "train/safetensors.h"

static const char *const type_names[MT_DTYPE_COUNT] = {
    [MT_F64] = "F64", [MT_F32] = "F32", [MT_BF16] = "BF16", [MT_F16] = "F16", [MT_I64] = "I64",
    [MT_I32] = "I32", [MT_U32] = "U32", [MT_U16] = "U16",   [MT_U8] = "U8",
};

/* An entry of the caller's array and the shard that holds it. */
typedef struct item {
    const mt_st_entry *entry;
    int64_t index, shard;
    size_t bytes;
} item;

/* Widest elements first, so that each tensor is aligned; then by name. */
static int by_width_and_name(const void *a, const void *b)
{
    const item *x = a, *y = b;
    size_t p = mt_dtype_size(x->entry->dtype), q = mt_dtype_size(y->entry->dtype);
    if (x->shard != y->shard) return x->shard < y->shard ? -1 : 1;
    if (p != q) return p > q ? -1 : 1;
    return strcmp(x->entry->name, y->entry->name);
}

static json_t *describe(const item *it, int64_t *offset)
{
    json_t *shape = json_array();
    for (int i = 0; i < it->entry->ndim; i++)
        json_array_append_new(shape, json_integer((json_int_t)it->entry->shape[i]));
    int64_t begin = *offset;
    *offset += (int64_t)it->bytes;
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", type_names[it->entry->dtype], "shape", shape,
                     "data_offsets", (json_int_t)begin, (json_int_t)*offset);
}

/* The header of items[0, count), padded so that the data begin at a multiple of 8; freed by the
 * caller. */
static mt_status make_header(char **text, size_t *bytes, const item *items, int64_t count)
{
    int64_t offset = 0;
    json_t *header = json_pack("{s:{s:s}}", "__metadata__", "format", "pt");
    bool complete = header;
    for (int64_t i = 0; i < count; i++)
        complete &=
            !json_object_set_new(header, items[i].entry->name, describe(&items[i], &offset));
    char *json = complete ? json_dumps(header, JSON_COMPACT) : NULL;
    json_decref(header);
    size_t length = json ? strlen(json) : 0;
    *bytes = 8 + (length + 7) / 8 * 8;
    *text = json ? malloc(*bytes + 1) : NULL;
    if (*text) {
        for (int i = 0; i < 8; i++) (*text)[i] = (char)((*bytes - 8) >> (8 * i));
        snprintf(*text + 8, *bytes - 7, "%-*s", (int)(*bytes - 8), json);
    }
    free(json);
    MT_REQUIRE(*text, MT_ENOMEM, "no memory for a header of %lld tensors", (long long)count);
    return MT_OK;
}

static mt_status write_file(const char *path, const item *items, int64_t count, mt_st_fill *fill,
                            void *user)
{
    mt_status status;
    mt_file_writer *writer = NULL;
    char *header = NULL;
    void *data = NULL;
    size_t bytes, most = 1;
    for (int64_t i = 0; i < count; i++) most = items[i].bytes > most ? items[i].bytes : most;
    MT_TRY_CLEANUP(make_header(&header, &bytes, items, count));
    data = malloc(most);
    if (!data) {
        status = MT_FAIL(MT_ENOMEM, "no memory to write '%s' (%zu bytes)", path, most);
        goto cleanup;
    }
    MT_TRY_CLEANUP(mt_file_writer_open(&writer, path));
    MT_TRY_CLEANUP(mt_file_writer_put(writer, header, bytes));
    for (int64_t i = 0; i < count; i++) {
        MT_TRY_CLEANUP(fill(user, items[i].index, data, items[i].bytes));
        MT_TRY_CLEANUP(mt_file_writer_put(writer, data, items[i].bytes));
    }
    MT_TRY_CLEANUP(mt_file_writer_commit(&writer));
cleanup:
    mt_file_writer_abandon(&writer);
    free(data);
    free(header);
    return status;
}

static void shard_name(char name[64], int64_t shard, int64_t shards)
{
    if (shards == 1)
        snprintf(name, 64, "model.safetensors");
    else
        snprintf(name, 64, "model-%05lld-of-%05lld.safetensors", (long long)shard + 1,
                 (long long)shards);
}

static mt_status write_index(const char *path, const item *items, int64_t count, int64_t shards)
{
    char name[64];
    json_int_t total = 0;
    json_t *map = json_object();
    bool complete = map;
    for (int64_t i = 0; i < count; i++) {
        shard_name(name, items[i].shard, shards);
        complete &= !json_object_set_new(map, items[i].entry->name, json_string(name));
        total += (json_int_t)items[i].bytes;
    }
    json_t *index = json_pack("{s:{s:I}, s:o}", "metadata", "total_size", total, "weight_map", map);
    char *text = complete && index ? json_dumps(index, JSON_INDENT(2) | JSON_SORT_KEYS) : NULL;
    json_decref(index);
    MT_REQUIRE(text, MT_ENOMEM, "no memory for an index of %lld tensors", (long long)count);
    mt_status status = mt_file_write_all(path, text, strlen(text));
    free(text);
    return status;
}

/* Fills shards in the order given; returns how many. */
static int64_t assign_shards(item *items, const mt_st_entry *entries, int64_t count,
                             int64_t shard_bytes)
{
    int64_t shard = 0, used = 0;
    for (int64_t i = 0; i < count; i++) {
        size_t bytes = mt_dtype_size(entries[i].dtype);
        for (int d = 0; d < entries[i].ndim; d++) bytes *= (size_t)entries[i].shape[d];
        if (shard_bytes && used && used + (int64_t)bytes > shard_bytes) shard++, used = 0;
        used += (int64_t)bytes;
        items[i] = (item){ &entries[i], i, shard, bytes };
    }
    return shard + 1;
}

static mt_status remove_file(const char *dir, const char *name)
{
    char path[MT_PATH_BYTES];
    MT_TRY(mt_path_format(path, "%s/%s", dir, name));
    MT_REQUIRE(unlink(path) == 0 || errno == ENOENT, MT_EIO,
               "'%s' of an earlier export cannot be removed: %s", path, strerror(errno));
    return MT_OK;
}

/* Whether a name is that of a shard, of a set of another size than `shards`. */
static bool is_stale(const char *name, int64_t shards)
{
    char same[64];
    long long shard, of;
    if (sscanf(name, "model-%lld-of-%lld.safetensors", &shard, &of) != 2) return false;
    if (shard < 1 || of < shard || of == shards) return false;
    shard_name(same, shard - 1, of);
    return !strcmp(same, name);
}

/* Removes what an earlier export has left: readers would prefer its single file or its index, and
 * many read every .safetensors that they find. */
static mt_status remove_stale(const char *dir, int64_t shards)
{
    mt_status status = MT_OK;
    MT_TRY(remove_file(dir, shards > 1 ? "model.safetensors" : "model.safetensors.index.json"));
    DIR *entries = opendir(dir);
    MT_REQUIRE(entries, MT_EIO, "'%s': %s", dir, strerror(errno));
    for (const struct dirent *e; status == MT_OK && (e = readdir(entries));)
        if (is_stale(e->d_name, shards)) status = remove_file(dir, e->d_name);
    closedir(entries);
    return status;
}

mt_status mt_safetensors_write_dir(const char *dir, const mt_st_entry *entries, int64_t count,
                                   int64_t shard_bytes, mt_st_fill *fill, void *user)
{
    char path[MT_PATH_BYTES], name[64], index[MT_PATH_BYTES];
    mt_status status;
    item *items = malloc((size_t)(count + 1) * sizeof *items);
    MT_REQUIRE(items, MT_ENOMEM, "no memory for %lld tensors", (long long)count);
    int64_t shards = assign_shards(items, entries, count, shard_bytes);
    qsort(items, (size_t)count, sizeof *items, by_width_and_name);
    MT_TRY_CLEANUP(mt_path_format(index, "%s/model.safetensors.index.json", dir));
    if (shards > 1) /* until all shards are there it would name old and new ones */
        MT_TRY_CLEANUP(remove_file(dir, "model.safetensors.index.json"));
    for (int64_t shard = 0, first = 0; shard < shards; shard++) {
        int64_t n = 0;
        while (first + n < count && items[first + n].shard == shard) n++;
        shard_name(name, shard, shards);
        MT_TRY_CLEANUP(mt_path_format(path, "%s/%s", dir, name));
        MT_TRY_CLEANUP(write_file(path, items + first, n, fill, user));
        first += n;
    }
    if (shards > 1) MT_TRY_CLEANUP(write_index(index, items, count, shards));
    MT_TRY_CLEANUP(remove_stale(dir, shards));
cleanup:
    free(items);
    return status;
}
