/* What a mistaken name was meant to be, and what would do in the place of a number that does not.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The name among `count` (each `stride` bytes after the last, pointing to a string) that is most
 * like `text`, by edit distance counting swapped neighbours as one; NULL when none is near. */
const char *mt_nearest(const char *text, const void *names, int count, size_t stride);

enum { MT_NEAREST_NUMBERS = 64 };
/* "2 or 4": of the numbers from 1 to `most` that fit, those next to `x`, below and above; `x` alone
 * where it fits, "" where none does. */
void mt_nearest_numbers(char text[MT_NEAREST_NUMBERS], int64_t x, int64_t most,
                        bool (*fits)(void *context, int64_t n), void *context);

#ifdef __cplusplus
}
#endif
