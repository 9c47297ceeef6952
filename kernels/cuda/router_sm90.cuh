/* The router's kernels (router_sm90.cu). */
#pragma once

#include "kernels/cuda/gemm_sm90.cuh"

enum {
    MT_ROUTER_PLANES = 3,    /* of a real (router_tensor.cuh), */
    MT_ROUTER_DX_PLANES = 2, /* of which dx reads so many */
    MT_ROUTER_EXPERTS = 64,  /* of a tile: their three planes beside each other, */
    MT_ROUTER_FEW = 32,      /* where there are no more than these */
    MT_ROUTER_KEPT = 128     /* most experts whose planes stay in shared memory */
};

/* dx: NN with C, whose tiles' ends the next tiles hide, as their depth is short. */
extern "C" const gemm_sm90_variant mt_cuda_router_logits, mt_cuda_router_dx;
/* The same of the planes of dlogits [tokens, MT_ROUTER_PLANES, columns] and of wr
 * [MT_ROUTER_DX_PLANES, columns, width], the second first; columns are 64 or MT_ROUTER_KEPT, and
 * hold zeros past the experts. */
extern "C" mt_status mt_cuda_router_dx_kept(mt_stream *stream, const struct mt_router_bwd_args *a,
                                            int64_t columns, const void *dlogits, const void *wr);
