/* Scratch of the cuda device's streams, kept between calls. */
#include "kernels/cuda/device_priv.h"
#include "kernels/cuda/scratch.h"

enum { GRAIN = 1 << 20 };

/* Memory in use may move only when nothing runs; a plan's is never used. */
static mt_status stand_still(mt_stream *stream, size_t has, size_t wanted)
{
    enum cudaStreamCaptureStatus capture;
    if (!stream->device->computes) return MT_OK;
    MT_CUDA(cudaStreamIsCapturing(mt_cuda_stream(stream), &capture));
    MT_REQUIRE(capture == cudaStreamCaptureStatusNone, MT_EINTERNAL,
               "cuda: scratch of %zu bytes must grow to %zu while a graph is captured", has,
               wanted);
    MT_CUDA(cudaDeviceSynchronize());
    return MT_OK;
}

static mt_status grow(mt_stream *stream, struct mt_cuda_scratch *s, void **p, size_t bytes)
{
    mt_device *device = stream->device;
    if (bytes > s->bytes) {
        size_t padded = (bytes + GRAIN - 1) / GRAIN * GRAIN;
        MT_TRY(stand_still(stream, s->bytes, bytes));
        mt_device_free(device, &s->p, s->bytes, MT_MEMORY_WORKSPACE);
        s->bytes = 0;
        MT_TRY(mt_device_alloc(device, &s->p, padded, MT_MEMORY_WORKSPACE));
        s->bytes = padded;
    }
    *p = s->p;
    return MT_OK;
}

/* The lane of a stream, or, of NULL, one that is free; NULL: there is none. */
static struct mt_cuda_lane *lane_of(struct cuda *cuda, const void *stream)
{
    for (int i = 0; i < MT_CUDA_LANES; i++)
        if (cuda->lanes[i].stream == stream) return &cuda->lanes[i];
    return NULL;
}

mt_status mt_cuda_scratch(mt_stream *stream, void **p, size_t bytes)
{
    struct cuda *cuda = stream->device->impl;
    if (!stream->impl) return grow(stream, &cuda->scratch, p, bytes);
    struct mt_cuda_lane *lane = lane_of(cuda, stream->impl);
    if (!lane) lane = lane_of(cuda, NULL);
    MT_REQUIRE(lane, MT_EINTERNAL, "cuda: kernels of more than %d streams ask for scratch",
               MT_CUDA_LANES);
    lane->stream = stream->impl;
    return grow(stream, &lane->scratch, p, bytes);
}

void mt_cuda_leave_lane(mt_device *device, const void *stream)
{
    struct mt_cuda_lane *lane = lane_of(device->impl, stream);
    if (!lane) return;
    mt_device_free(device, &lane->scratch.p, lane->scratch.bytes, MT_MEMORY_WORKSPACE);
    *lane = (struct mt_cuda_lane){ 0 };
}

mt_status mt_cuda_operands(mt_stream *stream, void **p, size_t bytes)
{
    struct cuda *cuda = stream->device->impl;
    return grow(stream, &cuda->operands, p, bytes);
}
