/* Sharded checkpoints: a file for each rank, and what shows them as one. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "core/array.h"
#include "train/checkpoint_priv.h"

enum { MAX_INDEX_LINE = 1200, INDEX_DIMS = 2 };
static const char index_name[] = "/index";

void mt_checkpoint_shard_name(char name[MT_SEAL_NAME], int rank)
{
    snprintf(name, MT_SEAL_NAME, "rank_%04d.h5", rank);
}

/* ---- a rank's file -----------------------------------------------------------------------------
 */

/* The same on every rank, and in no other save but one of the same state by the same program. */
static mt_status name_set(char **set, const mt_checkpoint_state *s, const mt_checkpoint_info *info)
{
    const char *const texts[] = { info->run_config, info->git_revision, info->corpus };
    uint64_t hash = 0;
    for (int i = 0; i < 3; i++)
        if (texts[i]) hash = XXH3_64bits_withSeed(texts[i], strlen(texts[i]), hash);
    *set = malloc(128);
    MT_REQUIRE(*set, MT_ENOMEM, "no memory for a checkpoint's name");
    snprintf(*set, 128, "step %lld, seed %llu, %d ranks, run %016llx", (long long)s->step,
             (unsigned long long)s->seed, mt_comm_size(s->comm), (unsigned long long)hash);
    return MT_OK;
}

mt_status mt_checkpoint_shard_begin(mt_checkpoint_shard *shard, const mt_checkpoint_stage *stage,
                                    const mt_checkpoint_state *s, const mt_checkpoint_info *info)
{
    int ranks = mt_comm_size(s->comm);
    char path[MT_PATH_BYTES], name[MT_SEAL_NAME];
    *shard = (mt_checkpoint_shard){ .state = s, .file = stage->file };
    if (ranks == 1) return MT_OK;
    shard->file = NULL;
    shard->seals = calloc((size_t)ranks, sizeof *shard->seals);
    MT_REQUIRE(shard->seals, MT_ENOMEM, "no memory for what %d ranks write", ranks);
    MT_TRY(name_set(&shard->set, s, info));
    mt_checkpoint_shard_name(name, mt_comm_rank(s->comm));
    MT_TRY(mt_path_format(path, "%s/%s", stage->temp, name));
    MT_TRY(mt_h5_create(&shard->file, path));
    return mt_h5_set_string(shard->file, "/", "set", shard->set);
}

static mt_status add_line(mt_checkpoint_shard *shard, const char *name, mt_dtype dtype, int ndim,
                          const int64_t *shape, mt_range range)
{
    if (shard->room - shard->used < MAX_INDEX_LINE) {
        size_t room = 2 * shard->room + MAX_INDEX_LINE;
        char *index = realloc(shard->index, room);
        MT_REQUIRE(index, MT_ENOMEM, "no memory for an index of %zu bytes", room);
        shard->index = index, shard->room = room;
    }
    int n = snprintf(shard->index + shard->used, MAX_INDEX_LINE, "%lld %lld %s %d %lld %lld %s\n",
                     (long long)range.first, (long long)range.count, mt_dtype_name(dtype), ndim,
                     (long long)(ndim == 2 ? shape[0] : 1), (long long)shape[ndim - 1], name);
    MT_REQUIRE(n < MAX_INDEX_LINE, MT_EINVAL, "'%.80s' is too long for a tensor's name", name);
    shard->used += (size_t)n;
    return MT_OK;
}

mt_status mt_checkpoint_put(mt_checkpoint_shard *shard, const char *name, mt_dtype dtype, int ndim,
                            const int64_t *shape, const mt_range *ranges, int64_t count,
                            const void *data)
{
    int64_t elements = 0;
    if (mt_comm_size(shard->state->comm) == 1)
        return mt_h5_write(shard->file, name, dtype, ndim, shape, data);
    MT_REQUIRE(ndim == 1 || ndim == INDEX_DIMS, MT_EINVAL, "%s has %d dimensions, must have 1 or 2",
               name, ndim);
    for (int64_t i = 0; i < count; i++) {
        MT_TRY(add_line(shard, name, dtype, ndim, shape, ranges[i]));
        elements += ranges[i].count;
    }
    return elements ? mt_h5_write(shard->file, name, dtype, 1, &elements, data) : MT_OK;
}

static mt_status end_file(mt_checkpoint_shard *shard)
{
    int rank = mt_comm_rank(shard->state->comm);
    const int64_t bytes = (int64_t)shard->used;
    mt_checkpoint_seal *seal = &shard->seals[rank];
    MT_TRY(mt_h5_write(shard->file, index_name, MT_U8, 1, &bytes, shard->index));
    mt_checkpoint_shard_name(seal->name, rank);
    return mt_h5_commit_sealed(&shard->file, seal->hex, &seal->bytes);
}

mt_status mt_checkpoint_shard_end(mt_checkpoint_shard *shard, mt_status status)
{
    const mt_checkpoint_state *s = shard->state;
    if (mt_comm_size(s->comm) == 1) return status;
    if (status == MT_OK) status = end_file(shard);
    if (status != MT_OK) mt_h5_close(&shard->file); /* before rank 0 removes the directory */
    MT_TRY(mt_comm_agree(s->comm, status, "its file of a checkpoint"));
    return mt_comm_all_gather(s->comm, NULL, shard->seals, &shard->seals[mt_comm_rank(s->comm)],
                              sizeof *shard->seals, "seals of a checkpoint's files");
}

void mt_checkpoint_shard_close(mt_checkpoint_shard *shard)
{
    if (mt_comm_size(shard->state->comm) > 1) mt_h5_close(&shard->file);
    free(shard->set);
    free(shard->index);
    free(shard->seals);
}

/* ---- all of them -------------------------------------------------------------------------------
 */

/* A line of an index. */
typedef struct index_line {
    char *name; /* in the index */
    mt_h5_extent extent;
    mt_dtype dtype;
    int ndim;
    int64_t shape[INDEX_DIMS]; /* the last `ndim` of them */
} index_line;

typedef struct index_list {
    index_line *lines;
    int64_t count, room;
    char **texts; /* of each rank */
} index_list;

static mt_status read_index(char **text, mt_h5 *file)
{
    mt_h5_info info;
    const int64_t any = -1;
    MT_TRY(mt_h5_expect(file, index_name, MT_U8, 1, &any, &info));
    *text = calloc(1, (size_t)info.bytes + 1);
    MT_REQUIRE(*text, MT_ENOMEM, "no memory for an index of %lld bytes", (long long)info.bytes);
    return mt_h5_read(file, index_name, &info, *text);
}

/* The text after it; the name is cut off in place. */
static mt_status parse_line(index_line *line, char **text, const char *file)
{
    char dtype[16];
    long long first, count, rows, columns;
    int used = 0, n = sscanf(*text, "%lld %lld %15s %d %lld %lld %n", &first, &count, dtype,
                             &line->ndim, &rows, &columns, &used);
    char *end = n == 6 ? strchr(*text + used, '\n') : NULL;
    MT_REQUIRE(end, MT_EDAMAGED, "'%s', index: a line is '%.80s'", file, *text);
    *end = '\0';
    line->name = *text + used;
    line->extent = (mt_h5_extent){ file, first, count, 0 };
    line->shape[0] = rows, line->shape[1] = columns;
    *text = end + 1;
    return mt_dtype_parse(&line->dtype, dtype);
}

static mt_status add_lines(index_list *list, char *text, const char *file)
{
    const index_line *before = NULL;
    while (*text) {
        MT_TRY(mt_array_reserve(&list->lines, &list->room, list->count + 1, sizeof *list->lines,
                                "parts of tensors"));
        index_line *line = &list->lines[list->count];
        MT_TRY(parse_line(line, &text, file));
        before = line > list->lines ? line - 1 : NULL;
        if (before && before->extent.file == file && !strcmp(before->name, line->name))
            line->extent.from = before->extent.from + before->extent.count;
        list->count++;
    }
    return MT_OK;
}

static int by_name_and_place(const void *a, const void *b)
{
    const index_line *x = a, *y = b;
    int names = strcmp(x->name, y->name);
    if (names) return names;
    return x->extent.first < y->extent.first ? -1 : x->extent.first > y->extent.first;
}

/* The indexes of all ranks' files, which must be of this save. */
static mt_status read_indexes(index_list *list, const mt_checkpoint_shard *shard,
                              const mt_checkpoint_stage *stage)
{
    char path[MT_PATH_BYTES];
    int ranks = mt_comm_size(shard->state->comm);
    list->texts = calloc((size_t)ranks, sizeof *list->texts);
    MT_REQUIRE(list->texts, MT_ENOMEM, "no memory for the files of %d ranks", ranks);
    for (int r = 0; r < ranks; r++) {
        mt_h5 *file;
        MT_TRY(mt_path_format(path, "%s/%s", stage->temp, shard->seals[r].name));
        MT_TRY(mt_h5_open(&file, path));
        mt_status status = mt_h5_check_set(stage->file, file);
        if (status == MT_OK) status = read_index(&list->texts[r], file);
        mt_h5_close(&file);
        MT_TRY(status);
        MT_TRY(add_lines(list, list->texts[r], shard->seals[r].name));
    }
    if (list->count)
        qsort(list->lines, (size_t)list->count, sizeof *list->lines, by_name_and_place);
    return MT_OK;
}

/* The tensor of lines[0], of which there are `count`. */
static mt_status show_tensor(mt_h5 *file, const index_line *lines, int64_t count)
{
    const index_line *first = &lines[0];
    mt_h5_extent *extents = malloc((size_t)count * sizeof *extents);
    MT_REQUIRE(extents, MT_ENOMEM, "no memory for %lld parts of %s", (long long)count, first->name);
    mt_status status = MT_OK;
    for (int64_t i = 0; i < count && status == MT_OK; i++) {
        const index_line *x = &lines[i];
        extents[i] = x->extent;
        if (x->dtype != first->dtype || x->ndim != first->ndim ||
            memcmp(x->shape, first->shape, sizeof x->shape) != 0)
            status = MT_FAIL(MT_EINTERNAL, "'%s' and '%s' have %s in another shape or type",
                             first->extent.file, x->extent.file, x->name);
    }
    if (status == MT_OK)
        status = mt_h5_write_virtual(file, first->name, first->dtype, first->ndim,
                                     first->shape + (INDEX_DIMS - first->ndim), extents, count);
    free(extents);
    return status;
}

mt_status mt_checkpoint_show_shards(const mt_checkpoint_shard *shard,
                                    const mt_checkpoint_stage *stage)
{
    index_list list = { NULL, 0, 0, NULL };
    int ranks = mt_comm_size(shard->state->comm);
    mt_status status;
    if (ranks == 1) return MT_OK;
    MT_TRY(mt_h5_set_string(stage->file, "/", "set", shard->set));
    MT_TRY(mt_h5_set_i64(stage->file, "/meta", "ranks", ranks));
    MT_TRY_CLEANUP(read_indexes(&list, shard, stage));
    for (int64_t i = 0, n; i < list.count; i += n) {
        for (n = 1; i + n < list.count && !strcmp(list.lines[i + n].name, list.lines[i].name);
             n++) {
        }
        MT_TRY_CLEANUP(show_tensor(stage->file, &list.lines[i], n));
    }
cleanup:
    for (int r = 0; list.texts && r < ranks; r++) free(list.texts[r]);
    free(list.texts);
    free(list.lines);
    return status;
}
