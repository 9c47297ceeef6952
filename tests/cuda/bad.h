/* A kernel that writes where nothing is. */
#pragma once

#include "kernels/cuda/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

mt_status bad_launch(mt_stream *stream);

#ifdef __cplusplus
}
#endif
