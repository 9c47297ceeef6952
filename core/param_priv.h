/* Inside the param store: its buffers, and how they are cut into shards. */
#pragma once

#include "core/param.h"

enum { MT_SHARD_ALIGN = 128 }; /* elements: params begin, and shards end, at multiples */

struct mt_param_store {
    mt_device *device;
    mt_dtype dtype, compute;
    bool bf16_grads;
    mt_param **params;
    int64_t count, reserved;
    int rank, world;
    int member_rank, member_ranks; /* the same of params with some members */
    int64_t units;
    mt_unit *unit;
    int64_t *cuts;    /* [units, world + 1]: of the elements of a unit's params back to back */
    int64_t elements; /* of a flat buffer */
    int64_t added;    /* elements of all params */
    size_t compute_bytes;
    bool allocated;
    /* Gradients in bf16, the last of their buffer. */
    int64_t bf16_elements;
    mt_master form;
    bool offloaded;
    void *mirror; /* on the device: offloaded masters that kernels read as they are */
    size_t mirror_bytes;
    void *master, *grad, *codes, *view;
    void *whole; /* gradients as backward writes them, where `grad` is only of a shard */
    size_t flat_bytes, grad_bytes, view_bytes, whole_bytes;
};

static inline int64_t mt_round_up(int64_t x, int64_t to)
{
    return (x + to - 1) / to * to;
}

/* Cuts every unit, and places the units in the flat buffers. */
mt_status mt_param_store_cut(mt_param_store *store);
