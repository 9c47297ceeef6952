/* Inside fsdp: fragments of wires, and where everything lies. */
#pragma once

#include "dist/fsdp.h"
#include "kernels/ops.h"

/* A run of whole members of a param, or rows of one, in the wire of one rank. */
typedef struct mt_fragment {
    mt_param *param;
    int rank;
    bool real;            /* the masters' own elements; else codes of the wire's direction */
    int64_t first, count; /* elements of the param */
    int64_t member, members, row, rows; /* rows of each member; members > 1: all of them */
    size_t codes, scales;               /* bytes from the start of the rank's wire */
    size_t code_bytes, scale_bytes;
} mt_fragment;

/* One direction of one unit: what is gathered together. */
typedef struct mt_wire {
    mt_fragment *list; /* of every rank, rank after rank, and so param after param */
    int64_t count, room;
    int64_t own, own_count; /* this rank's among them */
    size_t bytes;           /* of a rank's contribution: the most that one needs */
    size_t at;              /* of this rank's in the wire memory */
    size_t copy_bytes;      /* compute copies of the whole */
    bool plain;             /* all of it lies in the copies as it was sent */
    int slot;               /* where it is now; -1: nowhere */
} mt_wire;

/* Memory for the compute copies of one wire. */
typedef struct mt_copy_slot {
    void *memory;   /* of `copies` */
    int64_t wire;   /* which is there; -1: none */
    uint64_t used;  /* when last */
    mt_event ready; /* it has been filled, */
    bool joined;    /* and the passes' stream waits for that */
} mt_copy_slot;

/* How the gradients of a unit are reduced. Backward begins with its large weights, most of its
 * bytes: where gradients lie in order, elements [split, ...) of every rank's part are those of
 * params from `large` on alone, and go ahead of the rest. */
typedef struct mt_reduction {
    int64_t large, split;           /* split INT64_MAX: all at once */
    int64_t pending, pending_large; /* gradients still to come; pending -1: reduced */
    int64_t end;                    /* elements of the parts that are left: [0, end) */
} mt_reduction;

enum { MT_LANES = 2 };

struct mt_fsdp {
    mt_param_store *store;
    mt_device *device;
    mt_comm *comm;
    mt_stream stream;             /* of the passes: the device's own */
    mt_stream gathering;          /* beside it */
    mt_stream reducing[MT_LANES]; /* in turns: the next comes in while one is added up; what has
                                     to be sorted always in the first */
    mt_event asked, gathered;     /* what the passes were given; the end of the last gather, */
    mt_event final;               /* the same of gradients */
    mt_event reduced[MT_LANES];
    int lane;
    mt_fsdp_options options;
    mt_param_source source;
    int64_t units, wires; /* wires: unit u, direction d is 2 u + d */
    bool *single; /* of each unit: both directions are the same values, and its rows' wire is
                     that of both */
    mt_wire *wire;
    mt_copy_slot *slots;
    int64_t slot_count;
    uint64_t clock;
    void *own, *copies;   /* own wires; all slots */
    void *staging, *real; /* what a gather receives that has to be unpacked; a native weight in
                             masters' dtype, on its way to be packed */
    void *outbox, *sum;   /* gradients as they are sent; their sum in bf16 */
    size_t own_bytes, copies_bytes, staging_bytes, real_bytes, outbox_bytes, sum_bytes;
    /* Device: of every packed param, row, column, members; those with some members come last. */
    float *amax;
    size_t amax_bytes;
    int64_t amax_shared; /* before those */
    int64_t *amax_at;    /* of param i: first of its 2 N; -1 none */
    /* What is needed after what: [previous + 1, current] -> next, -1 unknown; and where we are. */
    int32_t *next;
    int64_t previous, current, start; /* start: what the passes after an update begin with */
    int64_t end[2];                   /* previous and current when they ended */
    bool updating;
    bool *written;           /* of each unit: its own wires, since the update began */
    bool last_pass;          /* of a step: gradients that are final are reduced */
    mt_reduction *reduction; /* of each unit */
    int64_t *parts; /* [units, ranks of the world] what each rank owns of a unit's gradients as they
                       lie in memory; the first -1: they have to be sorted */
    mt_fsdp_counts counts;
};

/* The ranks that a unit is cut among. */
static inline mt_comm *mt_fsdp_comm(const mt_fsdp *f, int64_t unit)
{
    bool some = mt_param_store_unit(f->store, unit).some_members;
    return some ? f->options.replicas : f->comm;
}
static inline int mt_fsdp_ranks(const mt_fsdp *f, int64_t unit)
{
    return mt_param_store_unit(f->store, unit).ranks;
}
static inline int64_t *mt_fsdp_parts(const mt_fsdp *f, int64_t unit)
{
    return f->parts + unit * mt_comm_size(f->comm);
}

/* The format of a direction of a weight; NULL result of native: in the activations' dtype. */
mt_format_spec mt_fsdp_spec(const mt_param *param, mt_dir dir);
bool mt_fsdp_native(const mt_param *param, mt_dir dir);
float *mt_fsdp_amax(const mt_fsdp *f, const mt_param *param, mt_dir dir);

/* A fragment of a direction as a tensor of its own, its bytes in a wire at `wire`. */
mt_direction mt_fragment_direction(const mt_fsdp *f, const mt_fragment *x, mt_dir dir, char *wire);
static inline mt_group mt_fragment_group(const mt_fragment *x)
{
    return mt_group_uniform(x->members, x->rows, x->param->group.k);
}

/* Fetches what the passes will begin with, as far as it is written. */
mt_status mt_fsdp_start(mt_fsdp *f);

/* Fragments of every wire, and the sizes that follow. */
mt_status mt_fsdp_cut_wires(mt_fsdp *f);
/* What updates write of the own wires (mt_param.cast). */
void mt_fsdp_place_casts(mt_fsdp *f);
/* Points the params of a wire into the memory of its copies; NULL: they are not here. Sets the
 * wire's copy_bytes. */
void mt_fsdp_place(mt_fsdp *f, int64_t wire, char *memory);
/* Gives up what is in a slot. */
void mt_fsdp_evict(mt_fsdp *f, mt_copy_slot *slot);
/* Gathers a wire into its copies, which have been placed, in the gathers' stream: what lies there
 * as it is sent goes there at once where the ranks reach each other's copies, the rest by way of
 * staging. */
mt_status mt_fsdp_fetch(mt_fsdp *f, int64_t wire, const char *label);
/* Whether what a unit sends depends on its own masters alone, not on amaxes, draws or the step. */
bool mt_fsdp_is_native(const mt_fsdp *f, const mt_unit *u);
/* Whether the ranks of a unit reach each other's copies. */
bool mt_fsdp_reaches(const mt_fsdp *f, int64_t unit);

static inline int64_t mt_wire_of(int64_t unit, mt_dir dir)
{
    return unit * MT_DIR_COUNT + dir;
}

/* Whether a wire is a direction of its own, not the columns of a unit with one for both. */
static inline bool mt_wire_is_own(const mt_fsdp *f, int64_t wire)
{
    return wire % MT_DIR_COUNT == MT_ROW || !f->single[wire / MT_DIR_COUNT];
}
