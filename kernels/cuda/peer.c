/* Memory that processes share, and the words by which their streams wait for each other. */
#include "kernels/cuda/peer.h"

#include <assert.h>
#include <cuda.h>
#include <string.h>

#include "kernels/cuda/backend.h"

static_assert(sizeof(mt_cuda_export) == sizeof(cudaIpcMemHandle_t), "the size of a handle");

/* What cannot be shared is no fault of the device: others go on without it. */
static mt_status refused(cudaError_t error, const char *doing)
{
    if (error == cudaSuccess) return MT_OK;
    (void)cudaGetLastError();
    return MT_FAIL(MT_EUNSUPPORTED, "cuda: %s another process: %s", doing,
                   cudaGetErrorString(error));
}

mt_status mt_cuda_export_memory(mt_cuda_export *exported, mt_device *device, void *memory)
{
    cudaIpcMemHandle_t handle;
    (void)device;
    MT_TRY(refused(cudaIpcGetMemHandle(&handle, memory), "sharing memory with"));
    memcpy(exported->handle, &handle, sizeof handle);
    return MT_OK;
}

mt_status mt_cuda_map_memory(void **mapped, mt_device *device, const mt_cuda_export *exported)
{
    cudaIpcMemHandle_t handle;
    (void)device;
    *mapped = NULL;
    memcpy(&handle, exported->handle, sizeof handle);
    return refused(cudaIpcOpenMemHandle(mapped, handle, cudaIpcMemLazyEnablePeerAccess),
                   "mapping memory of");
}

void mt_cuda_unmap_memory(mt_device *device, void *mapped)
{
    (void)device;
    if (mapped) (void)cudaIpcCloseMemHandle(mapped);
}

/* The driver's own calls, which the runtime has no names for. */
typedef CUresult (*word_call)(CUstream, CUdeviceptr, cuuint32_t, unsigned);

static mt_status find(word_call *call, const char *name)
{
    void *p = NULL;
    enum cudaDriverEntryPointQueryResult found;
    if (*call) return MT_OK;
    MT_CUDA(cudaGetDriverEntryPointByVersion(name, &p, 12000, cudaEnableDefault, &found));
    MT_REQUIRE(p && found == cudaDriverEntryPointSuccess, MT_EDEVICE, "cuda: the driver has no %s",
               name);
    *(void **)call = p;
    return MT_OK;
}

mt_status mt_cuda_post(mt_stream *stream, uint32_t *word, uint32_t value)
{
    static word_call call;
    MT_TRY(find(&call, "cuStreamWriteValue32"));
    CUresult code = call(mt_cuda_stream(stream), (CUdeviceptr)(uintptr_t)word, value,
                         CU_STREAM_WRITE_VALUE_DEFAULT);
    MT_REQUIRE(code == CUDA_SUCCESS, MT_EDEVICE, "cuda: cuStreamWriteValue32: %d", (int)code);
    return MT_OK;
}

mt_status mt_cuda_await(mt_stream *stream, uint32_t *word, uint32_t value)
{
    static word_call call;
    MT_TRY(find(&call, "cuStreamWaitValue32"));
    CUresult code =
        call(mt_cuda_stream(stream), (CUdeviceptr)(uintptr_t)word, value, CU_STREAM_WAIT_VALUE_GEQ);
    MT_REQUIRE(code == CUDA_SUCCESS, MT_EDEVICE, "cuda: cuStreamWaitValue32: %d", (int)code);
    return MT_OK;
}
