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

/* `lines` runs of `bytes` each, from one pitch to another; they do not overlap. */
struct mt_copy_lines {
    void *to;
    const void *from;
    size_t to_pitch, from_pitch; /* bytes from line to line, at least `bytes` */
    size_t bytes;
    int64_t lines;
};

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
    /* As copy_async and zero, of lines, and in any stream; NULL: line by line, zero. */
    mt_status (*copy_lines)(mt_stream *stream, const struct mt_copy_lines *lines);
    mt_status (*zero_async)(mt_stream *stream, void *p, size_t bytes);
    /* Streams beside the device's own, and events: see below. All NULL where every call has
     * finished when it returns. */
    mt_status (*stream_create)(mt_device *device, void **stream);
    void (*stream_destroy)(mt_device *device, void *stream);
    mt_status (*stream_synchronize)(mt_stream *stream);
    mt_status (*event_create)(mt_device *device, void **event);
    void (*event_destroy)(mt_device *device, void *event);
    mt_status (*event_record)(mt_stream *stream, void *event);
    mt_status (*event_wait)(mt_stream *stream, void *event);
    mt_status (*event_done)(mt_device *device, void *event, bool *done);
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
    const char *kernel_set; /* "portable", "avx2", "avx512", "avx512_bf16", "amx", or one of cuda's
                               (kernels/backends.h); recorded in checkpoints */
    bool computes;          /* false for plan: contents are meaningless */
    int threads;
    double bf16_flops; /* what its maker states for products of bf16, a second; 0: not known */
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
/* The same in any stream, and copies of lines: the stream's later work finds them done. */
mt_status mt_device_zero_async(mt_stream *stream, void *p, size_t bytes);
mt_status mt_device_copy_lines(mt_stream *stream, const struct mt_copy_lines *lines);
/* Waits for all that the device was given. */
mt_status mt_device_synchronize(mt_device *device);

/* A stream beside the device's own (whose impl is NULL): what is ready in both runs here first.
 * Streams know nothing of each other's order but what events say. For transfers, and for kernels:
 * of such streams 64 at most may have scratch (kernels/cuda/backend.h), each its own, and
 * products of operands that are decoded belong to the device's own. Where every call has finished
 * when it returns (CPU), impl stays NULL. */
mt_status mt_stream_create(mt_stream *stream, mt_device *device);
void mt_stream_destroy(mt_stream *stream); /* waits for its work; also one that is all zero */
/* Waits for all that the stream was given. */
mt_status mt_stream_synchronize(mt_stream *stream);

/* A place in a stream's work, that other streams can wait for. One that was never recorded is over.
 */
typedef struct mt_event {
    mt_device *device;
    void *impl;
} mt_event;
mt_status mt_event_create(mt_event *event, mt_device *device);
void mt_event_destroy(mt_event *event); /* also one that is all zero */
/* The event is over when what the stream has been given so far is done. */
mt_status mt_event_record(mt_event *event, mt_stream *stream);
/* What the stream is given from now on begins after the event as it was recorded last. The host
 * does not wait. */
mt_status mt_event_wait(const mt_event *event, mt_stream *stream);
/* Whether it is over; on any thread. */
mt_status mt_event_done(const mt_event *event, bool *done);

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
