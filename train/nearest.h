/* The known name that a mistaken one was meant to be. */
#pragma once

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The name among `count` (each `stride` bytes after the last, pointing to a string) that is most
 * like `text`, by edit distance counting swapped neighbours as one; NULL when none is near. */
const char *mt_nearest(const char *text, const void *names, int count, size_t stride);

#ifdef __cplusplus
}
#endif
