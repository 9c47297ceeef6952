/* A file of few lines, read whole and written anew each time that a run goes on. */
#include "train/changes.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/array.h"
#include "train/fileio.h"

enum { PATH_SHOWN = 300, LIMIT = 1 << 26 };

static void drop(mt_changes *c, int64_t i)
{
    free(c->items[i].key);
    free(c->items[i].from);
    free(c->items[i].to);
    c->count--;
    memmove(&c->items[i], &c->items[i + 1], (size_t)(c->count - i) * sizeof *c->items);
}

static mt_status append(mt_changes *c, int64_t step, const char *key, const char *from,
                        const char *to)
{
    MT_TRY(
        mt_array_reserve(&c->items, &c->room, c->count + 1, sizeof *c->items, "changes of a run"));
    mt_change *x = &c->items[c->count++];
    *x = (mt_change){ step, strdup(key), strdup(from), strdup(to) };
    if (x->key && x->from && x->to) return MT_OK;
    drop(c, c->count - 1);
    return MT_FAIL(MT_ENOMEM, "no memory for a change of %.100s", key);
}

mt_status mt_changes_add(mt_changes *c, int64_t step, const char *key, const char *from,
                         const char *to)
{
    if (step <= 0) return MT_OK;
    for (int64_t i = 0; i < c->count; i++) {
        mt_change *x = &c->items[i];
        if (x->step != step || strcmp(x->key, key) != 0) continue;
        char *now = strdup(to);
        MT_REQUIRE(now, MT_ENOMEM, "no memory for a change of %.100s", key);
        free(x->to);
        x->to = now;
        if (!strcmp(x->from, to)) drop(c, i);
        return MT_OK;
    }
    return strcmp(from, to) ? append(c, step, key, from, to) : MT_OK;
}

mt_status mt_changes_rewind(mt_changes *c, int64_t step)
{
    mt_changes kept = { 0 };
    mt_status status = MT_OK;
    for (int64_t i = 0; i < c->count && status == MT_OK; i++) {
        const mt_change *x = &c->items[i];
        status = mt_changes_add(&kept, x->step < step ? x->step : step, x->key, x->from, x->to);
    }
    mt_changes *gone = status == MT_OK ? c : &kept;
    mt_changes_free(gone);
    if (status == MT_OK) *c = kept;
    return status;
}

static mt_status take_line(mt_changes *c, const char *line, size_t length, const char *path,
                           int64_t number)
{
    json_error_t error;
    json_int_t step;
    const char *key, *from, *to;
    json_t *object = json_loadb(line, length, 0, &error);
    bool sound = object && json_unpack(object, "{s:I, s:s, s:s, s:s}", "step", &step, "key", &key,
                                       "from", &from, "to", &to) == 0;
    mt_status status =
        sound ? append(c, step, key, from, to)
              : MT_FAIL(MT_EDAMAGED, "%.*s line %lld: %s", PATH_SHOWN, path, (long long)number,
                        object ? "not an object of step, key, from and to" : error.text);
    json_decref(object);
    return status;
}

mt_status mt_changes_read(mt_changes *c, const char *path)
{
    char *text;
    size_t bytes;
    bool there;
    mt_status status = MT_OK;
    *c = (mt_changes){ 0 };
    MT_TRY(mt_path_look(&there, path));
    if (!there) return MT_OK;
    MT_TRY(mt_file_read_all(&text, &bytes, path, LIMIT));
    const char *line = text, *end = text + bytes;
    for (int64_t number = 1; line < end && status == MT_OK; number++) {
        const char *stop = memchr(line, '\n', (size_t)(end - line));
        if (!stop) stop = end;
        status = take_line(c, line, (size_t)(stop - line), path, number);
        line = stop + 1;
    }
    free(text);
    if (status != MT_OK) mt_changes_free(c);
    return status;
}

static bool put_line(FILE *file, const mt_change *x)
{
    json_t *object = json_pack("{s:I, s:s, s:s, s:s}", "step", (json_int_t)x->step, "key", x->key,
                               "from", x->from, "to", x->to);
    bool put = object && json_dumpf(object, file, JSON_COMPACT) == 0 && fputc('\n', file) != EOF;
    json_decref(object);
    return put;
}

mt_status mt_changes_write(const mt_changes *c, const char *path)
{
    char *text = NULL;
    size_t length = 0;
    bool put = true;
    if (!c->count) {
        unlink(path);
        return MT_OK;
    }
    FILE *file = open_memstream(&text, &length);
    for (int64_t i = 0; file && put && i < c->count; i++) put = put_line(file, &c->items[i]);
    put &= file && fclose(file) == 0;
    mt_status status = put ? mt_file_write_all(path, text, length)
                           : MT_FAIL(MT_ENOMEM, "%.*s: no memory", PATH_SHOWN, path);
    free(text);
    return status;
}

void mt_changes_free(mt_changes *c)
{
    while (c->count) drop(c, c->count - 1);
    free(c->items);
    *c = (mt_changes){ 0 };
}
