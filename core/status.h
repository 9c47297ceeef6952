/* Status codes, and a thread-local record of the last error: one sentence and where it passed. */
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum mt_status {
    MT_OK = 0,
    MT_EINVAL,       /* a caller's argument breaks a rule */
    MT_ECONFIG,      /* usage, configuration, recipe or model description */
    MT_ENOMEM,       /* host or device memory */
    MT_EIO,          /* the operating system refused a file operation */
    MT_EDAMAGED,     /* a file's contents break its format or its checksum */
    MT_ENUMERIC,     /* non-finite values where the run cannot go on */
    MT_EUNSUPPORTED, /* no row in a table for this operation, format or backend */
    MT_EDEVICE,      /* device, driver or communication fault */
    MT_EPREEMPTED,   /* asked to stop; state was saved */
    MT_EINTERNAL,    /* a broken invariant reported instead of asserted */
    MT_STATUS_COUNT
} mt_status;

#if defined(__GNUC__)
#define MT_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#else
#define MT_PRINTF(fmt, args)
#endif

/* Records a new error (dropping the last one) and returns `code`. The sentence names the thing, its
 * value and the rule. Used through MT_FAIL. */
mt_status mt_error_set(mt_status code, const char *file, int line, const char *format, ...)
    MT_PRINTF(4, 5);

/* Adds a place to the current error's trace (bounded; later places are dropped). Returns `code`. */
mt_status mt_error_pass(mt_status code, const char *file, int line);

/* The current thread's last error: "" when there is none. Valid until the next error on this
 * thread. */
const char *mt_error_message(void);

/* The places the last error passed, origin first, "file:line file:line". */
const char *mt_error_trace(void);

/* Forgets the current thread's error. */
void mt_error_clear(void);

/* The current thread's error, kept while something else is tried, and put back: it is as it was. */
enum { MT_ERROR_BYTES = 1024 };
typedef struct mt_error_kept {
    char message[MT_ERROR_BYTES], trace[MT_ERROR_BYTES];
} mt_error_kept;
void mt_error_keep(mt_error_kept *kept);
void mt_error_put_back(const mt_error_kept *kept);

/* A short name of a code: "damaged file". */
const char *mt_status_name(mt_status code);

#define MT_FAIL(code, ...) mt_error_set((code), __FILE__, __LINE__, __VA_ARGS__)

/* Returns from the enclosing function when `x` fails; only where nothing is held. */
#define MT_TRY(x)                                                                                  \
    do {                                                                                           \
        mt_status mt_try_ = (x);                                                                   \
        if (mt_try_ != MT_OK) return mt_error_pass(mt_try_, __FILE__, __LINE__);                   \
    } while (0)

/* Sets `status` and goes to `cleanup` when `x` fails; for functions that hold something. */
#define MT_TRY_CLEANUP(x)                                                                          \
    do {                                                                                           \
        status = (x);                                                                              \
        if (status != MT_OK) {                                                                     \
            mt_error_pass(status, __FILE__, __LINE__);                                             \
            goto cleanup;                                                                          \
        }                                                                                          \
    } while (0)

/* Fails with the sentence when the rule does not hold. */
#define MT_REQUIRE(rule, code, ...)                                                                \
    do {                                                                                           \
        if (!(rule)) return MT_FAIL((code), __VA_ARGS__);                                          \
    } while (0)

/* A broken invariant of ours: stops the process, never used for a caller's mistake. */
#define MT_ASSERT(x) ((x) ? (void)0 : mt_assert_failed(#x, __FILE__, __LINE__))
#if defined(__GNUC__)
__attribute__((noreturn))
#endif
void mt_assert_failed(const char *what, const char *file, int line);

#ifdef __cplusplus
}
#endif
