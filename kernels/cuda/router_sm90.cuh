/* The router's kernels (router_sm90.cu). */
#pragma once

#include "kernels/cuda/gemm_sm90.cuh"

enum {
    MT_ROUTER_EXPERTS = 64, /* of a tile: their three planes beside each other, */
    MT_ROUTER_FEW = 32      /* where there are no more than these */
};

/* dx: NN with C, whose tiles' ends the next tiles hide, as their depth is short. */
extern "C" const gemm_sm90_variant mt_cuda_router_logits, mt_cuda_router_dx;
