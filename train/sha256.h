/* SHA-256 (FIPS 180-4): the identity of training text. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { MT_SHA256_HEX_BYTES = 65 };

typedef struct mt_sha256 {
    uint32_t state[8];
    uint64_t bytes;
    unsigned char block[64];
} mt_sha256;

void mt_sha256_begin(mt_sha256 *s);
void mt_sha256_add(mt_sha256 *s, const void *data, size_t bytes);
/* Lower-case hexadecimal, NUL-terminated. */
void mt_sha256_end(mt_sha256 *s, char hex[MT_SHA256_HEX_BYTES]);

#ifdef __cplusplus
}
#endif
