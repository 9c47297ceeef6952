/* A trainable weight: an f32 (f64) master, a gradient accumulator, a compute copy. `layers` and
 * `optim` meet only here. Params are made by a store, which keeps each kind of memory in one flat
 * buffer. */
#pragma once

#include "core/device.h"
#include "core/master.h"
#include "core/recipe.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How a param is drawn at the start of a run. */
typedef enum mt_init { MT_INIT_ZERO, MT_INIT_ONE, MT_INIT_NORMAL } mt_init;

/* A named piece of a param as other programs know it: rows [row, row + rows) of one member. */
typedef struct mt_param_part {
    char *name;                /* "model.layers.0.mlp.experts.3.gate_proj.weight" */
    int64_t member, row, rows; /* member: among all_members; not all need be on this rank */
    int ndim;                  /* 1 for vectors (then rows x cols = 1 x n), 2 for matrices */
} mt_param_part;

typedef struct mt_param mt_param;

/* What one rank owns of a param: elements [first, first + count). */
typedef struct mt_piece {
    int64_t first, count;
    int64_t offset; /* of the first in each of the rank's flat buffers */
} mt_piece;

/* Brings what a pass reads of a param to this rank, where it is not here all the time. */
typedef struct mt_param_source {
    mt_status (*need)(void *context, mt_param *param, mt_dir dir);
    void *context;
} mt_param_source;

/* What the GEMMs of a linear layer compute in at present, and what its formats carry from step to
 * step. Without one they compute in the activations' dtype. */
typedef struct mt_linear_state {
    mt_recipe recipe;
    bool save_original_input; /* wgrad quantizes the saved input again; its column codes are not
                                 kept */
    bool save_expert_output;  /* of a down projection: the routing weights' gradient is made of its
                                 rows, which are kept */
    /* Stochastic rounding: a direction draws from (seed, stream + its number), and the
     * micro-batch's number in the run: *pass in its step, and *first_pass (device), where the step
     * begins. */
    uint32_t seed, stream;
    const uint32_t *pass, *first_pass;
    /* fp8_delayed: device f32 [N] scales and [length, N] amaxes, slot 0 gathering; else NULL. */
    struct mt_delayed {
        float *scale, *history;
    } delayed[MT_OPERAND_COUNT][MT_DIR_COUNT];
    /* Device int64 [N] of each operand: NaNs met in quantizing it, += in training, and in every
     * other pass where counts_all; or NULL. */
    int64_t *nan[MT_OPERAND_COUNT];
    bool counts_all;
    /* Sees X in forward and dY in backward, before they are quantized; or NULL. */
    mt_status (*observe)(void *observer, const mt_param *weight, mt_operand operand,
                         const mt_qtensor *plain);
    void *observer;
} mt_linear_state;

struct mt_param {
    char *name;     /* our name: "layers.0.mlp.experts.gate_up_proj" */
    mt_group group; /* uniform: N members of [m, k] */
    /* Where ranks have different members of it (experts): the number of the first that is here,
       among all. Elsewhere 0, and all_members is group.members. */
    int64_t first_member, all_members;
    mt_dtype dtype;   /* of the master: f32, or f64 under f64 compute */
    mt_dtype compute; /* activations' dtype: what the compute copy is quantized for */
    bool decay;       /* weight decay applies */
    bool frozen;      /* no gradient, no update */
    bool packed;      /* a GEMM operand: has a compute copy in the backend's packed layout */
    bool direct;      /* kernels read the master of this GEMM operand, too: a tied embedding */
    mt_init init;
    double init_std;
    int64_t unit;     /* of the params that are gathered and reduced together */
    int64_t atom;     /* rows of a member at whose multiples a shard may end */
    int64_t offset;   /* own.offset */
    mt_piece own;     /* what this rank keeps: all of it, unless the store is sharded */
    void *own_master; /* of the own piece; NULL where it is split */
    void *own_grad;   /* of the own piece, of the whole step */
    uint16_t *high;   /* of the own piece of a split master, with `low`; else NULL */
    int16_t *low;
    bool lends;   /* split, and whole in the device's memory: a compute copy may be `high` */
    float *view;  /* room for the own piece of a split master, shared by all params */
    void *master; /* the whole, as kernels read it: NULL where split or elsewhere */
    void *grad;   /* the whole, as backward writes it */
    /* Of the gradient as backward writes it: dtype, or bf16. */
    mt_dtype grad_dtype;
    const mt_param_source *source; /* NULL: everything is here */
    mt_qtensor weight; /* compute copy; directions borrow `compute_memory`, or are `high` */
    void *compute_memory;
    size_t compute_bytes;
    /* The native directions of `weight` where they are an f32 master's cast, in its order: what
       updates the master writes them, too (NULL: they are none, or `high`), and says so until they
       are refreshed or the master is written otherwise; a refresh then has nothing to write. Of a
       sharded one: what the own piece sends of a native direction. */
    uint16_t *cast;
    bool cast_written;
    const mt_linear_state *linear; /* of the linear layer it is the weight of; may be NULL */
    mt_param_part *parts;
    int64_t part_count;

    /* Used by the tape within a step; frozen ones are not counted. */
    const struct mt_tape *tape; /* whose open pass has recorded a use of it; NULL: no tape's */
    int64_t uses;               /* recorded contributions still to come in this backward */
    int64_t deferred;           /* contributions waiting in the deferred queue */
    bool grad_started;          /* grad holds this step's sum (else its contents are stale) */
};

typedef struct mt_param_spec {
    const char *name;
    int64_t members, m, k;
    int64_t first_member, all_members; /* all_members 0: members */
    bool decay, frozen, packed, direct;
    mt_init init;
    double init_std;
} mt_param_spec;

typedef struct mt_param_store mt_param_store;

/* Ownership: `device` is borrowed. `dtype` of masters and gradients, `compute` of activations: f64
 * with f64, f32 with any other (MT_EINVAL). */
mt_status mt_param_store_create(mt_param_store **store, mt_device *device, mt_dtype dtype,
                                mt_dtype compute);
void mt_param_store_destroy(mt_param_store **store);

/* Params added from now on belong to the next unit. */
void mt_param_store_next_unit(mt_param_store *store);
/* Adds a param (before allocation); the store owns it, `*param` borrows. MT_EINVAL: no name, one
 * that the store has, negative extents, members that are not among all. */
mt_status mt_param_store_add(mt_param_store *store, mt_param **param, const mt_param_spec *spec);
/* Names a piece of it as an exported tensor, printf-like. */
mt_status mt_param_add_part(mt_param *param, int64_t member, int64_t row, int64_t rows, int ndim,
                            const char *format, ...) MT_PRINTF(6, 7);
/* Asks for at least `bytes` of memory for its compute copy (before allocation). */
void mt_param_reserve_compute(mt_param *param, size_t bytes);
/* A shard of it may end only at multiples of so many rows of a member (before allocation). Several
 * calls: at their largest, of which the others must be divisors. */
void mt_param_reserve_atom(mt_param *param, int64_t rows);
/* Every rank keeps a part of each unit (before allocation): about as many elements each, cut where
 * no scale block of a format and no block of 128 elements of a param (moments) straddles two. Then
 * there are no compute copies in the store, `master` is NULL unless a source brings it, and flat
 * buffers hold what this rank owns, unit after unit, equally many elements on every rank; gradients
 * are written whole beside them. */
void mt_param_store_shard(mt_param_store *store, int rank, int world);
/* Params of which this rank has only some members are cut among those ranks that have the same
 * (before allocation, and beside mt_param_store_shard): `rank` of `ranks`. A unit has params of one
 * kind. */
void mt_param_store_shard_members(mt_param_store *store, int rank, int ranks);
/* Stores the gradients of GEMM weights in bf16 (before allocation), or leaves them as they are.
 *
 * A contribution is summed in f32 and rounded once, as it is stored; a later one of the same step,
 * of another micro-batch or another use, is added in f32 to what is stored before that sum is
 * rounded, so that each costs half a unit in the last place of bf16. Gradients of params that
 * kernels read as they are (norms, biases, routers, embeddings) stay f32: their kernels write them
 * so, and they are few. Of a sharded store, gradients are stored so as backward writes them, whole;
 * what the ranks' add up to is real. MT_ECONFIG: masters must be f32 and activations bf16. */
mt_status mt_param_store_set_grad_dtype(mt_param_store *store, mt_dtype dtype);
/* Keeps masters and optimizer state in the host's memory (before allocation): pinned, where a
 * device reads and writes them as its own, across the bus; no bit depends on it. What kernels read
 * of masters in every pass has a copy on the device (mt_param_store_refresh). On the CPU it is only
 * accounted as host memory. */
void mt_param_store_offload(mt_param_store *store);
/* Allocates master (zeroed), compute copies and, if asked, gradient buffers, and sets every param's
 * pointers. */
mt_status mt_param_store_allocate(mt_param_store *store, bool grads);

/* Splits the masters of GEMM weights, or keeps them as they are. When all are added and the store
 * was sharded or offloaded, before compute copies are reserved; f64 masters cannot be split
 * (MT_ECONFIG).
 *
 * A split master has as many bytes as an f32 one, in the same place of the flat buffer: first every
 * bf16, then every int16. The bf16 half is the parameter that an unquantized layer with activations
 * of bf16 computes in, on every device, on one rank or many: what it multiplies in (where a GEMM
 * reads packed weights in their order, as on cuda, without a copy or memory for one, where not,
 * packed) and what ranks exchange. It is the nearest bf16, ties away from zero, where the compute
 * copy of an f32 master is a cast, ties to even: the two part in exact ties alone (and in NaNs, of
 * which the half may be any bf16: they are met in the master).
 *
 * Other formats, and activations in f32, are made of the whole value. For them splitting saves
 * nothing and costs: an f32 view as large as the largest split weight, and one more pass over a
 * weight (4 bytes read, 4 written for each element) whenever its compute copy is written. Params
 * that kernels read as they are (norms, biases, routers, embeddings) stay f32: they would need
 * their view all the time. */
mt_status mt_param_store_set_master(mt_param_store *store, mt_master master);
mt_master mt_param_store_master_form(const mt_param_store *store);
/* Writes the copies of offloaded masters that kernels read as they are: when masters have changed,
 * before compute copies are written. */
mt_status mt_param_store_refresh(mt_param_store *store, mt_stream *stream);
/* Memory of the optimizer, zeroed, where the masters are. Freed before the store. */
mt_status mt_param_store_alloc_state(mt_param_store *store, void **p, size_t bytes,
                                     mt_memory memory);
void mt_param_store_free_state(mt_param_store *store, void **p, size_t bytes, mt_memory memory);
/* Copies elements [first, first + count) of a param's master to or from host memory, in
 * mt_param.dtype whatever the master is stored as; exact. Of a sharded one only own elements can be
 * read (MT_EINVAL), and only own elements are written. */
mt_status mt_param_read_master(const mt_param_store *store, const mt_param *param, int64_t first,
                               int64_t count, void *host);
mt_status mt_param_write_master(mt_param_store *store, mt_param *param, int64_t first,
                                int64_t count, const void *host);
/* Splits what a param's view holds into the own piece of its master. */
mt_status mt_param_split_view(mt_param_store *store, mt_param *param);

mt_device *mt_param_store_device(const mt_param_store *store);
int64_t mt_param_store_count(const mt_param_store *store);
mt_param *mt_param_store_get(const mt_param_store *store, int64_t i);
mt_param *mt_param_store_find(const mt_param_store *store, const char *name);
/* MT_ECONFIG, with the first names, where the glob `pattern` fits no weight of a linear layer;
 * `key` stands before it in the error. */
mt_status mt_param_store_check_pattern(const mt_param_store *store, const char *key,
                                       const char *pattern);
/* A unit: its params, its place in the flat buffers, the same on every rank, and this rank among
 * those that it is cut among: all, or those with the same members. */
typedef struct mt_unit {
    int64_t first, count;     /* params */
    int64_t offset, elements; /* in the flat buffers of a rank, with alignment gaps */
    int rank, ranks;
    bool some_members;
} mt_unit;
int64_t mt_param_store_units(const mt_param_store *store);
/* After allocation. */
mt_unit mt_param_store_unit(const mt_param_store *store, int64_t unit);
/* What a rank, of those that the unit is cut among, owns of a param, after allocation. A piece of a
 * packed param is of whole rows. */
mt_piece mt_param_piece(const mt_param_store *store, const mt_param *param, int rank);
int mt_param_store_world(const mt_param_store *store);
/* Elements of a flat buffer, alignment gaps (always 0) included. */
int64_t mt_param_store_elements(const mt_param_store *store);
/* Flat master and gradient buffers, elements of mt_param.dtype (split masters: as many bytes). */
void *mt_param_store_master(const mt_param_store *store);
void *mt_param_store_grad(const mt_param_store *store);
/* The gradient buffer in parts, alignment gaps included: in mt_param.dtype, then those in bf16. */
typedef struct mt_flat_grads {
    const void *real;
    int64_t real_count;
    const uint16_t *bf16;
    int64_t bf16_count;
} mt_flat_grads;
mt_flat_grads mt_param_store_grads(const mt_param_store *store);

/* Elements of a param. */
static inline int64_t mt_param_count(const mt_param *p)
{
    return p->group.members * p->group.m * p->group.k;
}

/* Number of its first element among those of all members. */
static inline int64_t mt_param_base(const mt_param *p)
{
    return p->first_member * p->group.m * p->group.k;
}

/* Of own_grad: what ranks have added up is not rounded again. */
static inline mt_dtype mt_param_own_grad_dtype(const mt_param *p)
{
    return p->own_grad == p->grad ? p->grad_dtype : p->dtype;
}

/* Before kernels read a param in forward (MT_ROW) or backward (MT_COL): what they read is here when
 * this returns, until another unit's is needed. Collective where the store is sharded. */
static inline mt_status mt_param_need(mt_param *p, mt_dir dir)
{
    return p->source ? p->source->need(p->source->context, p, dir) : MT_OK;
}

/* Draws the master by `init`: element i of the param, of all members, is draw i of (seed, stream =
 * index in the store). */
mt_status mt_param_store_init(mt_param_store *store, uint64_t seed);

/* Forgets this step's gradients: the next contribution of each param overwrites. */
void mt_param_store_begin_step(mt_param_store *store);
/* Zeroes gradients that no contribution has written in this step. */
mt_status mt_param_store_end_step(mt_param_store *store);

#ifdef __cplusplus
}
#endif
