/* A device: memory, streams, and the kernels that run on it. Two tables give it behaviour, one for
 * memory (here) and one for computing (kernels/ops.h); core never looks inside the second.
 *
 * Devices: `cpu`, `cuda`, and `plan`, which hands out addresses, computes nothing and so measures
 * what a step would need before anything is allocated. */
#pragma once

#include "core/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

struct mt_kernels;
typedef struct mt_device mt_device;

/* Work queue of a device. On the CPU every call has finished when it returns. */
typedef struct mt_stream {
    mt_device *device;
    void *impl;
} mt_stream;

/* What memory is for: the rows of `mixtape plan`. */
typedef enum mt_memory {
    MT_MEMORY_MASTER,      /* f32 (f64) master weights */
    MT_MEMORY_GRAD,        /* gradient accumulators */
    MT_MEMORY_MOMENTS,     /* optimizer moments */
    MT_MEMORY_COMPUTE,     /* compute copies of weights: codes, scales, packs */
    MT_MEMORY_ACTIVATIONS, /* the step arena */
    MT_MEMORY_HOST_POOL,   /* offloaded values */
    MT_MEMORY_WORKSPACE,   /* kernels' scratch */
    MT_MEMORY_STATE,       /* counters, step state, tables, batches */
    MT_MEMORY_COUNT
} mt_memory;

const char *mt_memory_name(mt_memory memory);

struct mt_device_ops {
    /* 64-byte aligned or better (CUDA: 256). Never called with 0 bytes. */
    mt_status (*alloc)(mt_device *device, void **p, size_t bytes, bool on_host);
    void (*release)(mt_device *device, void *p, size_t bytes, bool on_host);
    /* Any of the four directions; returns when the host may reuse its side. */
    mt_status (*copy)(mt_device *device, void *to, const void *from, size_t bytes);
    /* In the stream's order, without waiting; NULL: copy. */
    mt_status (*copy_async)(mt_stream *stream, void *to, const void *from, size_t bytes);
    mt_status (*zero)(mt_device *device, void *p, size_t bytes);
    mt_status (*synchronize)(mt_device *device);
    /* Graphs: see below. All NULL where a device has none. */
    mt_status (*graph_begin)(mt_device *device);
    mt_status (*graph_end)(mt_device *device, void **graph, bool keep);
    mt_status (*graph_launch)(mt_device *device, void *graph);
    void (*graph_destroy)(mt_device *device, void *graph);
    /* Timers: see below. */
    mt_status (*timer_create)(mt_device *device, void **timer);
    void (*timer_destroy)(mt_device *device, void *timer);
    mt_status (*timer_mark)(mt_stream *stream, void *timer, bool end);
    mt_status (*timer_read)(mt_device *device, void *timer, double *seconds);
    void (*destroy)(mt_device *device); /* releases impl */
};

struct mt_device {
    const char *name;       /* "cpu", "cuda", "plan" */
    const char *kernel_set; /* "portable", "avx2", "avx512", "amx"; recorded in checkpoints */
    bool computes;          /* false for plan: contents are meaningless */
    int threads;
    const struct mt_device_ops *ops;
    const struct mt_kernels
        *kernels[MT_DTYPE_COUNT]; /* by the dtype an op computes in; NULL where none */
    int64_t bytes[MT_MEMORY_COUNT], peak[MT_MEMORY_COUNT];
    int64_t frees; /* blocks freed so far: while it stands still, no address has lost its meaning */
    void *impl;
};

/* Memory with its purpose accounted; *p is NULL for 0 bytes. Errors: MT_ENOMEM names purpose and
 * size. */
mt_status mt_device_alloc(mt_device *device, void **p, size_t bytes, mt_memory memory);
/* NULL-safe; sets *p to NULL. `bytes` and `memory` as allocated. */
void mt_device_free(mt_device *device, void **p, size_t bytes, mt_memory memory);
mt_status mt_device_copy(mt_device *device, void *to, const void *from, size_t bytes);
/* Returns before the copy is made: later work of the stream finds it done. Host memory must be of
 * MT_MEMORY_HOST_POOL and stay as it is until then. */
mt_status mt_device_copy_async(mt_stream *stream, void *to, const void *from, size_t bytes);
mt_status mt_device_zero(mt_device *device, void *p, size_t bytes);
mt_status mt_device_synchronize(mt_device *device);

/* A graph is what was launched on the device's own stream between begin and end: recorded, not run,
 * and launched again as a whole. Nothing may be allocated, freed or waited for in between; the
 * addresses in it must live as long as it. `keep` false ends a recording that failed. */
typedef struct mt_graph {
    mt_device *device; /* NULL: no graph */
    void *impl;
} mt_graph;
bool mt_device_records(const mt_device *device);
mt_status mt_graph_begin(mt_device *device);
mt_status mt_graph_end(mt_graph *graph, mt_device *device, bool keep);
mt_status mt_graph_launch(const mt_graph *graph);
void mt_graph_destroy(mt_graph *graph); /* also one that is all zero */

/* A timer measures what its device does in a stream between two marks, by the device's own clock
 * (cuda: events; elsewhere the host's clock). */
typedef struct mt_timer {
    mt_device *device;
    void *impl;
} mt_timer;
mt_status mt_timer_create(mt_timer *timer, mt_device *device);
void mt_timer_destroy(mt_timer *timer); /* also one that is all zero */
mt_status mt_timer_start(mt_timer *timer, mt_stream *stream);
mt_status mt_timer_stop(mt_timer *timer, mt_stream *stream);
/* Waits for the second mark. Both must have been set since the timer was made. */
mt_status mt_timer_read(mt_timer *timer, double *seconds);

/* NULL-safe; sets *device to NULL. Everything allocated on it must have been freed. */
void mt_device_destroy(mt_device **device);

#ifdef __cplusplus
}
#endif
