/* The wrapped allocators. */
#include "tests/support/fault.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>

static atomic_llong allocations, live, left;
static atomic_bool armed, from, hit;

void fault_arm(int64_t n, fault_mode mode)
{
    left = n;
    from = mode == FAULT_FROM;
    hit = false;
    armed = true;
}

bool fault_disarm(void)
{
    armed = false;
    return hit;
}

int64_t fault_allocations(void)
{
    return allocations;
}

int64_t fault_live(void)
{
    return live;
}

static bool fails(void)
{
    allocations++;
    if (!armed) return false;
    long long n = left--;
    if (from ? n > 1 : n != 1) return false;
    hit = true;
    errno = ENOMEM;
    return true;
}

/* Each allocator by its declaration, its call, and whether it makes an allocation where there was
 * none. */
#define ALLOCATORS(X)                                                                              \
    X(void *, malloc, (size_t n), (n), true)                                                       \
    X(void *, calloc, (size_t n, size_t size), (n, size), true)                                    \
    X(void *, realloc, (void *p, size_t n), (p, n), !p)                                            \
    X(void *, aligned_alloc, (size_t align, size_t n), (align, n), true)                           \
    X(char *, strdup, (const char *s), (s), true)                                                  \
    X(char *, strndup, (const char *s, size_t n), (s, n), true)                                    \
    X(FILE *, open_memstream, (char **text, size_t *size), (text, size), true)

#define WRAP(type, name, declaration, call, fresh)                                                 \
    type __real_##name declaration;                                                                \
    type __wrap_##name declaration;                                                                \
    type __wrap_##name declaration                                                                 \
    {                                                                                              \
        bool counts = (fresh);                                                                     \
        type made = fails() ? NULL : __real_##name call;                                           \
        live += made && counts;                                                                    \
        return made;                                                                               \
    }
ALLOCATORS(WRAP)

void __real_free(void *p);
void __wrap_free(void *p);
void __wrap_free(void *p)
{
    live -= p != NULL;
    __real_free(p);
}

int __wrap_asprintf(char **text, const char *format, ...);
int __wrap_asprintf(char **text, const char *format, ...)
{
    if (fails()) return -1;
    va_list args;
    va_start(args, format);
    int n = vasprintf(text, format, args);
    va_end(args);
    live += n >= 0;
    return n;
}
