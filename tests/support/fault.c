/* The wrapped allocators. */
#include "tests/support/fault.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>

static atomic_llong allocations, left;
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

/* Each allocator by its declaration and its call. */
#define ALLOCATORS(X)                                                                              \
    X(void *, malloc, (size_t n), (n))                                                             \
    X(void *, calloc, (size_t n, size_t size), (n, size))                                          \
    X(void *, realloc, (void *p, size_t n), (p, n))                                                \
    X(void *, aligned_alloc, (size_t align, size_t n), (align, n))                                 \
    X(char *, strdup, (const char *s), (s))                                                        \
    X(char *, strndup, (const char *s, size_t n), (s, n))                                          \
    X(FILE *, open_memstream, (char **text, size_t *size), (text, size))

#define WRAP(type, name, declaration, call)                                                        \
    type __real_##name declaration;                                                                \
    type __wrap_##name declaration;                                                                \
    type __wrap_##name declaration                                                                 \
    {                                                                                              \
        return fails() ? NULL : __real_##name call;                                                \
    }
ALLOCATORS(WRAP)

int __wrap_asprintf(char **text, const char *format, ...);
int __wrap_asprintf(char **text, const char *format, ...)
{
    if (fails()) return -1;
    va_list args;
    va_start(args, format);
    int n = vasprintf(text, format, args);
    va_end(args);
    return n;
}
