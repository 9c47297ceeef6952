/* JSON, read. */
#pragma once

#include <jansson.h>

#include "core/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* json_loadb, but that want of memory is told from a text that is wrong, of which jansson says the
 * same: MT_ENOMEM, and MT_OK with *json NULL, where *error says what is wrong with the text. */
mt_status mt_json_parse(json_t **json, const char *text, size_t bytes, size_t flags,
                        json_error_t *error);

#ifdef __cplusplus
}
#endif
