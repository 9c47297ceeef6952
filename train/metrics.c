/* Lines are built in a buffer and written with one call, so that a reader never sees half of one.
 */
#include "train/metrics.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "train/fileio.h"

enum { LINE_BYTES = 2048, PATH_SHOWN = 300 };

struct mt_metrics {
    int fd;
    char path[MT_PATH_BYTES];
};

/* ---- what is there already ----------------------------------------------------------------------
 */

/* jansson says of want of memory what it says of any text that is wrong. */
static _Thread_local bool starved;

static void *room_for_json(size_t bytes)
{
    void *p = malloc(bytes);
    starved |= !p;
    return p;
}

/* A line's object and its step; MT_EDAMAGED names it. */
static mt_status read_line(json_t **object, int64_t *step, const char *path, int64_t number,
                           const char *line, size_t length)
{
    json_error_t error;
    starved = false;
    json_set_alloc_funcs(room_for_json, free);
    *object = json_loadb(line, length, 0, &error);
    MT_REQUIRE(*object || !starved, MT_ENOMEM, "metrics: no memory for a line");
    json_t *at = *object ? json_object_get(*object, "step") : NULL;
    mt_status status = MT_OK;
    if (json_is_integer(at))
        *step = json_integer_value(at);
    else
        status = MT_FAIL(MT_EDAMAGED, "%.*s line %lld: %s", PATH_SHOWN, path, (long long)number,
                         *object ? "no step" : error.text);
    return status;
}

static void remember(mt_metrics_past *past, const json_t *object, int64_t step)
{
    const json_t *seconds = json_object_get(object, "seconds");
    past->last_step = step;
    if (json_is_number(seconds)) past->seconds = json_number_value(seconds);
    if (json_object_get(object, "valid_loss"))
        *(json_is_true(json_object_get(object, "full")) ? &past->last_full_eval
                                                        : &past->last_eval) = step;
}

/* The bytes of `text` that stay: lines up to `step`, up to the first that is not, or that cannot be
 * read. The last line may lack the end that it was to have: that counts as its byte. */
static mt_status scan(size_t *kept, const char *path, const char *text, size_t bytes, int64_t step,
                      mt_metrics_past *past)
{
    size_t at = 0;
    *kept = 0;
    for (int64_t number = 1; at < bytes; number++) {
        const char *line = text + at, *end = memchr(line, '\n', bytes - at);
        json_t *object;
        int64_t of = step + 1;
        if (!end) end = text + bytes;
        mt_status status = read_line(&object, &of, path, number, line, (size_t)(end - line));
        if (status == MT_OK && of <= step && !past->unread_line) remember(past, object, of);
        json_decref(object);
        if (status == MT_ENOMEM || (status == MT_OK && of > step)) return status;
        if (status != MT_OK && !past->unread_line) past->unread_line = number;
        MT_REQUIRE(status != MT_OK || !past->unread_line, MT_EDAMAGED,
                   "%.*s line %lld cannot be read, and line %lld behind it is of step %lld",
                   PATH_SHOWN, path, (long long)past->unread_line, (long long)number,
                   (long long)of);
        at += (size_t)(end - line) + 1;
        if (status == MT_OK) *kept = at;
    }
    return MT_OK;
}

/* *ended: the bytes that stay are all there. */
static mt_status scan_file(size_t *kept, bool *ended, const char *path, int64_t step,
                           mt_metrics_past *past)
{
    mt_file_map map;
    *kept = 0;
    *past = (mt_metrics_past){ .last_eval = -1, .last_full_eval = -1 };
    MT_TRY(mt_file_map_open(&map, path));
    mt_status status = scan(kept, path, (const char *)map.data, map.bytes, step, past);
    *ended = *kept <= map.bytes;
    mt_file_map_close(&map);
    if (status == MT_OK && past->unread_line) mt_error_clear();
    return status;
}

mt_status mt_metrics_last_step(int64_t *step, const char *path)
{
    mt_metrics_past past = { 0 };
    size_t kept;
    bool ended, there;
    MT_TRY(mt_path_look(&there, path));
    if (there) MT_TRY(scan_file(&kept, &ended, path, INT64_MAX - 1, &past));
    *step = past.last_step;
    return MT_OK;
}

mt_status mt_metrics_check(const char *path, int64_t step)
{
    mt_metrics_past past;
    size_t kept;
    bool ended, there;
    MT_TRY(mt_path_look(&there, path));
    return there ? scan_file(&kept, &ended, path, step, &past) : MT_OK;
}

static mt_status cut_back(mt_metrics *m, mt_metrics_past *past, int64_t step)
{
    size_t kept;
    bool ended;
    MT_TRY(scan_file(&kept, &ended, m->path, step, past));
    int failed = ended ? ftruncate(m->fd, (off_t)kept) : mt_write_fully(m->fd, "\n", 1, -1);
    MT_REQUIRE(failed == 0, MT_EIO, "%.*s: %s", PATH_SHOWN, m->path, strerror(errno));
    return MT_OK;
}

mt_status mt_metrics_open(mt_metrics **metrics, mt_metrics_past *past, const char *path,
                          int64_t step)
{
    *metrics = NULL;
    mt_metrics *m = malloc(sizeof *m);
    MT_REQUIRE(m, MT_ENOMEM, "metrics: no memory");
    m->fd = -1;
    mt_status status = mt_path_format(m->path, "%s", path);
    if (status == MT_OK) {
        m->fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
        status = m->fd >= 0 ? cut_back(m, past, step)
                            : MT_FAIL(MT_EIO, "%.*s: %s", PATH_SHOWN, path, strerror(errno));
    }
    if (status != MT_OK) mt_metrics_close(&m);
    *metrics = m;
    return status;
}

/* ---- writing ------------------------------------------------------------------------------------
 */

typedef struct line_out {
    char text[LINE_BYTES];
    size_t used;
} line_out;

static void add(line_out *out, const char *format, ...) MT_PRINTF(2, 3);
static void add(line_out *out, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int n = vsnprintf(out->text + out->used, sizeof out->text - out->used, format, args);
    va_end(args);
    if (n > 0) out->used += (size_t)n;
    MT_ASSERT(out->used < sizeof out->text);
}

static void add_int(line_out *out, const char *key, int64_t x)
{
    add(out, "%s\"%s\":%lld", out->used ? "," : "{", key, (long long)x);
}

/* All digits: equal numbers are equal text. JSON has no infinity. */
static void add_real(line_out *out, const char *key, double x)
{
    add(out, "%s\"%s\":", out->used ? "," : "{", key);
    if (isfinite(x))
        add(out, "%.17g", x);
    else
        add(out, "null");
}

static mt_status write_line(mt_metrics *m, line_out *out)
{
    add(out, "}\n");
    MT_REQUIRE(mt_write_fully(m->fd, out->text, out->used, -1) == 0, MT_EIO, "%.*s: %s", PATH_SHOWN,
               m->path, strerror(errno));
    return MT_OK;
}

static void add_ranks(line_out *out, const mt_metrics_ranks *r)
{
    add_int(out, "ranks", r->ranks);
    add_int(out, "slowest_rank", r->slowest);
    add_real(out, "slowest_seconds", r->slowest_seconds);
    add_real(out, "fastest_seconds", r->fastest_seconds);
    add_int(out, "fullest_rank", r->fullest);
    add_int(out, "most_memory_bytes", r->most_bytes);
    add_int(out, "least_memory_bytes", r->least_bytes);
}

mt_status mt_metrics_train(mt_metrics *metrics, const mt_metrics_step *line)
{
    line_out out = { .used = 0 };
    add_int(&out, "step", line->step);
    add_int(&out, "tokens", line->tokens);
    add_real(&out, "seconds", line->seconds);
    add_real(&out, "loss", line->loss);
    add_real(&out, "aux_loss", line->aux_loss);
    add_real(&out, "grad_norm", line->grad_norm);
    add_real(&out, "lr", line->lr);
    add_real(&out, "tokens_per_second", line->tokens_per_second);
    if (line->mfu > 0) add_real(&out, "mfu", line->mfu);
    add_real(&out, "max_vio", line->max_vio);
    add_int(&out, "dropped", line->dropped);
    add_int(&out, "skipped", line->skipped);
    add_int(&out, "nan", line->nan);
    add_int(&out, "memory_bytes", line->memory_bytes);
    if (line->ranks.ranks > 1) add_ranks(&out, &line->ranks);
    return write_line(metrics, &out);
}

mt_status mt_metrics_eval(mt_metrics *metrics, int64_t step, double loss, const char *unit,
                          bool full)
{
    line_out out = { .used = 0 };
    char bits[32];
    snprintf(bits, sizeof bits, "valid_bits_per_%s", unit);
    add_int(&out, "step", step);
    add_real(&out, "valid_loss", loss);
    add_real(&out, bits, loss / log(2));
    add(&out, ",\"full\":%s", full ? "true" : "false");
    return write_line(metrics, &out);
}

mt_status mt_metrics_statistics(mt_metrics *metrics, const mt_metrics_subject *s,
                                const mt_measured *measure)
{
    line_out out = { .used = 0 };
    add_int(&out, "step", s->step);
    add(&out, ",\"statistics\":\"%s\",\"tensor\":\"%s\",\"direction\":\"%s\"", s->layer, s->tensor,
        s->direction);
    add(&out, ",\"format\":\"%s\",\"what_if\":%s", s->format, s->what_if ? "true" : "false");
    add_int(&out, "member", s->member);
    for (int i = 0; i < mt_measure_field_count; i++)
        add_real(&out, mt_measure_fields[i].name, mt_measure_fields[i].value(measure));
    return write_line(metrics, &out);
}

mt_status mt_metrics_sync(mt_metrics *metrics)
{
    MT_REQUIRE(fdatasync(metrics->fd) == 0, MT_EIO, "%.*s: %s", PATH_SHOWN, metrics->path,
               strerror(errno));
    return MT_OK;
}

void mt_metrics_close(mt_metrics **metrics)
{
    if (!*metrics) return;
    if ((*metrics)->fd >= 0) close((*metrics)->fd);
    free(*metrics);
    *metrics = NULL;
}
