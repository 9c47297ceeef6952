/* The gradient of a token's logits, by LANES lanes of a warp, which has 32 / LANES tokens. */
#pragma once

#include "kernels/cuda/router_choice.cuh"
#include "kernels/cuda/router_tensor.cuh"

/* Adds what the weights' gradients say to `row`, the gradient of a token's probabilities: lane l of
 * the token's has the slots l, l + LANES, ..., whose experts differ. */
template <typename R, int LANES>
static __device__ __forceinline__ void add_dweights(R *row, const struct mt_router_bwd_args &a,
                                                    int64_t t)
{
    const R *dw = (const R *)a.dweights + t * a.top_k, *w = (const R *)a.weights + t * a.top_k;
    const R *p = (const R *)a.probs + t * a.experts;
    const int32_t *chosen = a.chosen + t * a.top_k;
    R mean = 0, total = 1; /* w = p / total, MT_LEAST_SHARE in it: dp = (dw - <dw, w>) / total */
    int top_k = (int)a.top_k, lane = threadIdx.x % LANES;
    if (a.normalize) {
        R means[32 / LANES] = {}, totals[32 / LANES] = {};
        for (int i = lane; i < top_k; i += LANES) {
            means[0] += dw[i] * w[i];
            totals[0] += p[chosen[i]];
        }
        mean = lanes_sum<LANES>(means);
        total = lanes_sum<LANES>(totals) + (R)MT_LEAST_SHARE;
    }
    for (int i = lane; i < top_k; i += LANES) row[chosen[i]] += (dw[i] - mean) / total;
}

/* The gradient of token t's logits, 0 past the experts, by its LANES; its row of experts is in
 * shared memory for a moment. */
template <typename R, int PER, int LANES>
static __device__ __forceinline__ void token_dlogits(R x[PER], const struct mt_router_bwd_args &a,
                                                     int64_t t, R *row, bool vectors)
{
    enum { TOKENS = 32 / LANES };
    const int experts = (int)a.experts;
    R d[PER] = {}, p[PER], dots[TOKENS] = {}, z = 0;
    read_experts<R, PER, LANES>(p, (const R *)a.probs + t * experts, experts, vectors, 0);
    if (a.dprob_sum) read_experts<R, PER, LANES>(d, (const R *)a.dprob_sum, experts, vectors, 0);
    if (a.dweights) {
        write_experts<R, PER, LANES>(row, d, PER * LANES, true);
        __syncwarp();
        add_dweights<R, LANES>(row, a, t);
        __syncwarp();
        read_experts<R, PER, LANES>(d, row, PER * LANES, true, 0);
    }
#pragma unroll
    for (int j = 0; j < PER; j++) dots[j / (PER / TOKENS)] += d[j] * p[j];
    const R dot = lanes_sum<LANES>(dots);
    if (a.dz_sum) z = *(const R *)a.dz_sum * 2 * ((const R *)a.lse)[t];
#pragma unroll
    for (int j = 0; j < PER; j++) {
        x[j] = p[j] * (d[j] - dot) + z * p[j];
        if (expert_at<PER, LANES>(j) >= experts) x[j] = 0;
    }
}

/* Where they go. */
template <typename R, int PER, int LANES>
static __device__ __forceinline__ void
put_dlogits(const R x[PER], const struct mt_router_bwd_args &a, int64_t t,
            const tensor::dlogits_planes &planes, bool vectors)
{
    enum { RUN = expert_runs<PER, LANES>::RUN };
    write_experts<R, PER, LANES>((R *)a.dlogits + t * a.experts, x, (int)a.experts, vectors);
#pragma unroll
    for (int j = 0; j < PER; j += RUN)
        if (expert_at<PER, LANES>(j) < planes.columns)
            planes.template put<RUN>(t, expert_at<PER, LANES>(j), x + j);
}
