/* Linked into a copy of the program: a GPU on which things go wrong. In the environment,
 * GPU_FAULT=OP:N: behind the N-th call of an op a kernel writes where nothing is, in the same
 * stream, recorded with the rest when a graph is; GPU_LEAVE=MIB or, of one rank, MIB:RANK: all
 * memory but so much is taken. */
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

#include "tests/cuda/bad.h"

mt_status __real_mt_device_open(mt_device **device, const char *name, const char *kernel_set,
                                int threads);
mt_status __wrap_mt_device_open(mt_device **device, const char *name, const char *kernel_set,
                                int threads);

static const struct mt_kernels *real[MT_DTYPE_COUNT];
static struct mt_kernels faulty[MT_DTYPE_COUNT];

static bool due(const char *op)
{
    static long seen;
    const char *fault = getenv("GPU_FAULT"), *colon = fault ? strchr(fault, ':') : NULL;
    if (!colon || strlen(op) != (size_t)(colon - fault) || strncmp(fault, op, strlen(op)))
        return false;
    return ++seen == atol(colon + 1);
}

#define FAULTY(op)                                                                                 \
    static mt_status faulty_##op(mt_stream *stream, const struct mt_##op##_args *args)             \
    {                                                                                              \
        MT_TRY(real[args->dtype]->op(stream, args));                                               \
        return due(#op) ? bad_launch(stream) : MT_OK;                                              \
    }
MT_OPS(FAULTY)

/* In pieces as large as there are, until the process ends. */
static mt_status take_memory(void)
{
    const char *leave = getenv("GPU_LEAVE"), *whose = leave ? strchr(leave, ':') : NULL;
    const char *rank = getenv("MIXTAPE_RANK");
    size_t available = 0, total = 0, kept = leave ? (size_t)atol(leave) << 20 : 0, piece = SIZE_MAX;
    if (!leave || (whose && (!rank || strcmp(rank, whose + 1) != 0))) return MT_OK;
    for (;;) {
        void *taken;
        MT_CUDA(cudaMemGetInfo(&available, &total));
        if (available <= kept) return MT_OK;
        if (piece > available - kept) piece = available - kept;
        if (cudaMalloc(&taken, piece) == cudaSuccess) continue;
        (void)cudaGetLastError();
        piece /= 2;
        if (piece < (size_t)1 << 20) return MT_OK; /* no more is to be had */
    }
}

mt_status __wrap_mt_device_open(mt_device **device, const char *name, const char *kernel_set,
                                int threads)
{
    MT_TRY(__real_mt_device_open(device, name, kernel_set, threads));
    if (strcmp((*device)->name, "cuda") != 0) return MT_OK;
    for (int i = 0; i < MT_DTYPE_COUNT; i++) {
        if (!(*device)->kernels[i]) continue;
        real[i] = (*device)->kernels[i];
        faulty[i] = *real[i];
#define ENTRY(op) faulty[i].op = faulty_##op;
        MT_OPS(ENTRY)
#undef ENTRY
        (*device)->kernels[i] = &faulty[i];
    }
    return take_memory();
}
