/* Memory of other processes' GPUs on the same host: what one process exports, others map, and write
 * to by copy engines, beside all kernels. Words in it are what their streams wait for. */
#pragma once

#include <stdint.h>

#include "core/device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a process tells the others of memory: an address of mt_device_alloc's, 2 MiB at least
 * (smaller ones share a page with others). */
typedef struct mt_cuda_export {
    unsigned char handle[64];
} mt_cuda_export;

/* MT_EUNSUPPORTED where the driver shares no memory, or its GPU cannot be reached from this one. */
mt_status mt_cuda_export_memory(mt_cuda_export *exported, mt_device *device, void *memory);
mt_status mt_cuda_map_memory(void **mapped, mt_device *device, const mt_cuda_export *exported);
void mt_cuda_unmap_memory(mt_device *device, void *mapped); /* NULL-safe */

/* Writes a word, here or in mapped memory, when all is done and seen that the stream was given
 * before. */
mt_status mt_cuda_post(mt_stream *stream, uint32_t *word, uint32_t value);
/* What the stream is given from now on begins when a word of this GPU has reached `value`: is not
 * more than 2^31 - 1 behind it. */
mt_status mt_cuda_await(mt_stream *stream, uint32_t *word, uint32_t value);

#ifdef __cplusplus
}
#endif
