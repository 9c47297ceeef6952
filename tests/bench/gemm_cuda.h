/* What the benchmarks of the cuda GEMM share: a GPU, its memory, ragged rows, the shapes of
 * `mixtape bench gemm`. */
#pragma once

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/rng.h"
#include "kernels/cuda/gemm_path.h"
#include "tests/support/test.h"

#define CUDA_OK(call)                                                                              \
    do {                                                                                           \
        cudaError_t error_ = (call);                                                               \
        if (error_ != cudaSuccess) fail_msg("%s: %s", #call, cudaGetErrorString(error_));          \
    } while (0)

enum { GUARD = 1 << 16, POISON = 0xff };

static mt_device *device;
static cudaStream_t queue;
static mt_stream stream;

/* ---- memory ------------------------------------------------------------------------------------
 * NaN bytes within and on both sides. */

static inline void *device_buffer(size_t bytes)
{
    char *p;
    CUDA_OK(cudaMalloc((void **)&p, bytes + 2 * GUARD));
    CUDA_OK(cudaMemset(p, POISON, bytes + 2 * GUARD));
    return p + GUARD;
}

static inline void device_free(void *p)
{
    if (p) CUDA_OK(cudaFree((char *)p - GUARD));
}

static inline void expect_poison(const char *what, const void *from, size_t bytes)
{
    unsigned char *p = malloc(bytes);
    assert_non_null(p);
    CUDA_OK(cudaMemcpy(p, from, bytes, cudaMemcpyDefault));
    for (size_t i = 0; i < bytes; i++)
        if (p[i] != POISON) fail_msg("%s: byte %zu was written", what, i);
    free(p);
}

static inline void *upload(const void *from, size_t bytes)
{
    void *p = device_buffer(bytes);
    CUDA_OK(cudaMemcpy(p, from, bytes, cudaMemcpyDefault));
    return p;
}

/* ---- a product ---------------------------------------------------------------------------------
 */

struct rows {
    int64_t members, total, capacity;
    int64_t *counts, *start;        /* host */
    int64_t *first_dims;            /* device */
    int64_t *offsets_n, *offsets_k; /* device, in elements of n and of k columns */
};

static inline int64_t *scaled(const struct rows *r, int64_t width)
{
    int64_t *offsets = malloc((size_t)(r->members + 1) * sizeof *offsets);
    assert_non_null(offsets);
    for (int64_t e = 0; e <= r->members; e++) offsets[e] = r->start[e] * width;
    int64_t *p = upload(offsets, (size_t)(r->members + 1) * sizeof *offsets);
    free(offsets);
    return p;
}

static inline void make_rows(struct rows *r, int64_t members, const int64_t *counts, int64_t tail,
                             int64_t n, int64_t k)
{
    *r = (struct rows){ .members = members };
    r->counts = malloc((size_t)members * sizeof *r->counts);
    r->start = calloc((size_t)members + 1, sizeof *r->start);
    assert_true(r->counts && r->start);
    for (int64_t e = 0; e < members; e++)
        r->counts[e] = counts[e], r->start[e + 1] = r->start[e] + counts[e];
    r->total = r->start[members], r->capacity = r->total + tail;
    r->first_dims = upload(counts, (size_t)members * sizeof *counts);
    r->offsets_n = scaled(r, n), r->offsets_k = scaled(r, k);
}

static inline void free_rows(struct rows *r)
{
    device_free(r->first_dims), device_free(r->offsets_n), device_free(r->offsets_k);
    free(r->counts), free(r->start);
}

static inline void open_gpu(void)
{
    assert_ok(mt_device_open(&device, "cuda", getenv("MIXTAPE_KERNELS"), 0));
    CUDA_OK(cudaStreamCreate(&queue));
    stream = (mt_stream){ device, queue };
    printf("kernel set %s, %s\n", device->kernel_set, device->kernels[MT_BF16]->gemm_path);
}

static inline void close_gpu(void)
{
    CUDA_OK(cudaStreamDestroy(queue));
    mt_device_destroy(&device);
}

/* ---- time --------------------------------------------------------------------------------------
 */

enum { LAUNCHES = 15, MOST_MEMBERS = 256 };
static const size_t FLUSH = (size_t)256 << 20;

static const struct timed_shape {
    const char *name;
    int64_t members, k, n, rows;
} shapes[] = {
    { "Mixtral gate_up", 8, 4096, 28672, 16448 },    { "Mixtral down", 8, 14336, 4096, 16448 },
    { "OLMoE gate_up", 64, 2048, 2048, 66016 },      { "OLMoE down", 64, 1024, 2048, 66016 },
    { "Qwen3-30B gate_up", 128, 2048, 1536, 66464 }, { "Qwen3-30B down", 128, 768, 2048, 66464 },
    { "DSv3 gate_up", 256, 7168, 4096, 67360 },      { "DSv3 down", 256, 2048, 7168, 67360 },
    { "fine7b gate_up", 128, 1536, 512, 197488 },    { "fine7b down", 128, 256, 1536, 197488 },
    { "small gate_up", 16, 512, 1024, 16496 },       { "small down", 16, 512, 512, 16496 },
};

/* Rows of the members drawn evenly. */
static inline void draw_rows(struct rows *r, const struct timed_shape *s)
{
    int64_t counts[MOST_MEMBERS] = { 0 };
    for (int64_t i = 0; i < s->rows; i++)
        counts[(int64_t)(mt_rng_uniform(5, 5, (uint64_t)i) * (double)s->members)]++;
    make_rows(r, s->members, counts, 0, s->n, s->k);
}

static inline int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
