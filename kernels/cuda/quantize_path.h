/* How quantize goes about its work, where tests have to choose. */
#pragma once

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Strips have several tiles even of groups so small that each tile would get a thread block; not so
 * at first. */
void mt_cuda_quantize_in_strips(bool always);

#ifdef __cplusplus
}
#endif
