/* Inside the tape: storage, values, nodes, and the pools they come from. */
#pragma once

#include "core/tape.h"

/* A block of arena memory shared by values, gradients and deferred jobs. */
typedef struct storage {
    void *p;
    int64_t id;
    size_t bytes;
    int64_t refs;
    bool borrowed; /* memory of somebody outside the tape */
} storage;

typedef enum residency { RESIDENT, OFFLOADED, ARRIVING, DROPPED } residency;

typedef struct value {
    mt_value pub; /* first: an mt_value is the head of a value */
    storage *data;
    storage *grad;
    int64_t holds; /* references of forward code */
    int64_t saved; /* nodes that will read it in the sweep */
    bool wants_grad;
    bool again; /* may be dropped and made again by its producer */
    residency where;
    void *host; /* while OFFLOADED */
    int64_t host_id;
    mt_node *producer;
} value;

struct mt_node {
    const mt_op *op;
    void *attrs;
    value *inputs[MT_NODE_MAX], *outputs[MT_NODE_MAX], *saved[MT_NODE_MAX];
    mt_param *params[MT_NODE_MAX];
    int input_count, output_count, saved_count, param_count;
    int param_done; /* contributions counted so far */
};

typedef struct deferred_job {
    struct mt_wgrad job;
    storage *held[2 + MT_WGRAD_EXTRAS];
} deferred_job;

/* Objects of one size, handed out in order and all taken back at once; chunks stay. */
typedef struct pool {
    size_t size;
    char **chunks;
    int64_t chunk_count, used;
} pool;

/* A value on its way to the host, until whose copy is made its memory is kept. */
typedef struct leaving {
    storage *data;
    mt_event gone;
} leaving;

enum { POOL_CHUNK = 256, ATTRS_BYTES = 512, NODE_TEMPORARIES = 16, OFFLOADS_AT_ONCE = 2 };

struct mt_tape {
    mt_stream *stream;
    mt_tape_options options;
    mt_arena *arena, *host_pool;
    pool values, storages, nodes, attrs, jobs;
    mt_node **list; /* recorded nodes, in order */
    int64_t count, reserved;
    mt_param **touched; /* params with contributions to come in this pass */
    int64_t touched_count, touched_room;
    int64_t job_count, job_done;
    storage *temporaries[NODE_TEMPORARIES]; /* freed after the running node's backward */
    int temporary_count;
    mt_stream side; /* of offloaded values; a stream of its own where the device has several */
    mt_event turn;
    leaving leaving[OFFLOADS_AT_ONCE];
    int64_t left, retired, arriving; /* since the last drain */
    mt_status late;                  /* of a value that was released: told by the next that can */
    mt_error_kept late_error;
    bool active, training, recomputing;
    int suspended; /* > 0: forward of a segment that keeps nothing */
    mt_observer observer;
    void *observer_context;
};

/* A zeroed object, NULL when out of memory. */
void *mt_pool_get(pool *p);
void mt_pool_reset(pool *p);
void mt_pool_destroy(pool *p);

/* Appends a node, whatever is counted. */
mt_status mt_tape_add_node(mt_tape *tape, const mt_node_spec *spec);

mt_status mt_storage_create(mt_tape *tape, storage **s, size_t bytes);
void mt_storage_release(mt_tape *tape, storage *s);
/* tape_offload.c. Streams and events, where the tape offloads; */
mt_status mt_offload_open(mt_tape *tape);
void mt_offload_close(mt_tape *tape);
/* everything under way has arrived before what the tape's stream is given next; */
mt_status mt_offload_drain(mt_tape *tape);
/* a resident value leaves; one that is OFFLOADED sets out, and is there for the tape's stream. */
mt_status mt_value_offload(mt_tape *tape, value *v);
mt_status mt_value_bring(mt_tape *tape, value *v);
mt_status mt_value_land(mt_tape *tape, value *v);
/* Brings a saved value back. */
mt_status mt_value_fetch(mt_tape *tape, value *v);
/* Frees, drops or offloads a value's storage if nothing needs it where it is. */
void mt_value_settle(mt_tape *tape, value *v);
/* A reader of a saved value is done with it. */
void mt_value_unsave(mt_tape *tape, value *v);

/* Of a segment that has run: MT_EINVAL where an output has no gradient of its own. */
mt_status mt_segment_check_outputs(mt_value *const *inputs, int input_count,
                                   mt_value *const *outputs, int output_count);

static inline value *mt_value_of(mt_value *v)
{
    return (value *)v;
}
