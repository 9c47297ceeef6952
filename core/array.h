/* Arrays that grow. */
#pragma once

#include <stddef.h>

#include "core/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Room for `count` elements of `element` bytes in an array from malloc, or NULL, to which `array`
 * points; it doubles, and *room follows. MT_ENOMEM, in which `what` names them, leaves both. */
mt_status mt_array_reserve(void *array, int64_t *room, int64_t count, size_t element,
                           const char *what);

#ifdef __cplusplus
}
#endif
