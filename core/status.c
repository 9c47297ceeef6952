/* The thread-local error record. */
#include "core/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static _Thread_local mt_error_kept error;

static const char *const names[MT_STATUS_COUNT] = {
    [MT_OK] = "ok",
    [MT_EINVAL] = "invalid argument",
    [MT_ECONFIG] = "configuration",
    [MT_ENOMEM] = "out of memory",
    [MT_EIO] = "input/output",
    [MT_EDAMAGED] = "damaged file",
    [MT_ENUMERIC] = "numerics",
    [MT_EUNSUPPORTED] = "unsupported",
    [MT_EDEVICE] = "device",
    [MT_EPREEMPTED] = "preempted",
    [MT_EINTERNAL] = "internal",
};

mt_status mt_error_set(mt_status code, const char *file, int line, const char *format, ...)
{
    char text[MT_ERROR_BYTES]; /* the arguments may point into the old message */
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    memcpy(error.message, text, sizeof error.message);
    error.trace[0] = '\0';
    return mt_error_pass(code, file, line);
}

mt_status mt_error_pass(mt_status code, const char *file, int line)
{
    size_t used = strlen(error.trace);
    char place[160];
    int n = snprintf(place, sizeof place, "%s%s:%d", used ? " " : "", file, line);
    if (n > 0 && used + (size_t)n < sizeof error.trace)
        memcpy(error.trace + used, place, (size_t)n + 1);
    return code;
}

const char *mt_error_message(void)
{
    return error.message;
}

const char *mt_error_trace(void)
{
    return error.trace;
}

void mt_error_clear(void)
{
    error.message[0] = error.trace[0] = '\0';
}

void mt_error_keep(mt_error_kept *kept)
{
    *kept = error;
}

void mt_error_put_back(const mt_error_kept *kept)
{
    error = *kept;
}

const char *mt_status_name(mt_status code)
{
    return (unsigned)code < MT_STATUS_COUNT ? names[code] : "unknown status";
}

void mt_assert_failed(const char *what, const char *file, int line)
{
    fprintf(stderr, "%s:%d: broken invariant: %s\n", file, line, what);
    abort();
}
