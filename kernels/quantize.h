/* Group quantize and dequantize: any format, both directions (NUMERICS sections 2 and 3). */
#pragma once

#include "core/qtensor.h"

#ifdef __cplusplus
extern "C" {
#endif

#ifdef __cplusplus
}
#endif
