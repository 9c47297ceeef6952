/* An allocator that fails on demand: allocation number failing_at of those that the program itself
 * makes, not the shared libraries it calls. Included by one source of a test program. Sanitizers
 * bring their own allocator, so there the sweep is skipped. */
#pragma once

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define FAILING_ALLOC_OFF 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || !defined(__GLIBC__)
#define FAILING_ALLOC_OFF 1
#endif

static long failing_at = -1; /* -1: none */
static long failing_count;   /* allocations since it was set */

#ifdef FAILING_ALLOC_OFF
enum { failing_alloc_works = 0 };
#else
enum { failing_alloc_works = 1 };

extern char __executable_start, etext;
void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *p, size_t bytes);
void *__libc_memalign(size_t alignment, size_t bytes);

static inline bool failing_now(const void *caller)
{
    uintptr_t at = (uintptr_t)caller;
    if (at < (uintptr_t)&__executable_start || at >= (uintptr_t)&etext || failing_at < 0)
        return false;
    if (failing_count++ != failing_at) return false;
    errno = ENOMEM;
    return true;
}

void *malloc(size_t bytes)
{
    return failing_now(__builtin_return_address(0)) ? NULL : __libc_malloc(bytes);
}

void *calloc(size_t count, size_t size)
{
    return failing_now(__builtin_return_address(0)) ? NULL : __libc_calloc(count, size);
}

void *realloc(void *p, size_t bytes)
{
    return failing_now(__builtin_return_address(0)) ? NULL : __libc_realloc(p, bytes);
}

void *aligned_alloc(size_t alignment, size_t bytes)
{
    return failing_now(__builtin_return_address(0)) ? NULL : __libc_memalign(alignment, bytes);
}
#endif
