/* Balancing: the auxiliary losses over all layers, and the selection bias. All sums in f64. */
#include "kernels/cuda/element.cuh"

enum { THREADS = 512 };

/* Which of a loss's two factors are summed over the layers first, and how both are scaled. */
static const struct aux_rule {
    bool pooled;     /* f and P are sums over layers, else one product per layer */
    bool per_choice; /* f counts shares of all T k choices, else of tokens */
} rules[] = { { false, false }, { false, true }, { true, false } };
static_assert(MT_AUX_NONE == 0 && MT_AUX_SWITCH == 1 && MT_AUX_HF == 2, "the order of `rules`");

/* What a product count_e prob_sum_e is multiplied by; 0 where there is no loss. */
static double aux_factor(mt_aux_kind kind, int64_t layers, int64_t tokens, int64_t experts,
                         int64_t top_k)
{
    if (kind == MT_AUX_NONE || tokens == 0 || layers == 0) return 0;
    double n = (double)tokens * (rules[kind].pooled ? (double)layers : 1);
    return (double)experts / n / n / (rules[kind].per_choice ? (double)top_k : 1);
}

/* The layers' pointers, which the caller keeps in host memory. */
struct layers {
    const void *prob_sums[MT_AUX_MAX_LAYERS];
    const int64_t *counts[MT_AUX_MAX_LAYERS];
    const void *z_sums[MT_AUX_MAX_LAYERS];
};

/* Sum over the block, the same tree for everyone; `room` holds a double per warp. */
static __device__ __forceinline__ double block_sum(double x, double *room)
{
    x = mt_warp_sum(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
    __syncthreads();
    double sum = 0;
    for (int w = 0; w < THREADS / 32; w++) sum += room[w];
    return sum;
}

template <typename R>
static __global__ void __launch_bounds__(THREADS)
    aux_fwd_kernel(struct layers l, int64_t count, int64_t experts, double factor, bool pooled,
                   int64_t tokens, R *loss, R *z_loss)
{
    __shared__ double room[THREADS / 32];
    double sum = 0, z = 0;
    for (int64_t e = threadIdx.x; e < experts && factor != 0; e += THREADS) {
        double f = 0, p = 0;
        for (int64_t i = 0; i < count; i++) {
            double fi = (double)l.counts[i][e], pi = (double)((const R *)l.prob_sums[i])[e];
            if (pooled)
                f += fi, p += pi;
            else
                sum += fi * pi;
        }
        sum += f * p;
    }
    sum = block_sum(sum, room);
    if (threadIdx.x == 0) *loss = (R)(factor != 0 ? factor * sum : 0);
    if (!z_loss) return;
    for (int64_t i = threadIdx.x; i < count; i += THREADS) z += (double)*(const R *)l.z_sums[i];
    z = block_sum(z, room);
    if (threadIdx.x == 0) *z_loss = (R)(tokens ? z / (double)tokens : 0);
}

template <typename T>
static mt_status aux_loss_fwd(mt_stream *stream, const struct mt_aux_loss_fwd_args *a)
{
    typedef mt_real<T> R;
    struct layers l = {};
    for (int64_t i = 0; i < a->layers; i++) {
        l.prob_sums[i] = a->prob_sums[i], l.counts[i] = a->counts[i];
        l.z_sums[i] = a->z_sums ? a->z_sums[i] : NULL;
    }
    double factor = aux_factor(a->kind, a->layers, a->tokens, a->experts, a->top_k);
    aux_fwd_kernel<R><<<1, THREADS, 0, mt_cuda_stream(stream)>>>(
        l, a->layers, a->experts, factor, rules[a->kind].pooled, a->tokens, (R *)a->loss,
        a->z_sums ? (R *)a->z_loss : NULL);
    MT_LAUNCHED(stream, "aux_loss_fwd");
    return MT_OK;
}
MT_CUDA_OP(aux_loss_fwd)

/* A block for each layer; here prob_sums and z_sums are gradients, which are written. */
template <typename R>
static __global__ void __launch_bounds__(THREADS)
    aux_bwd_kernel(struct layers l, int64_t count, int64_t experts, double factor, bool pooled,
                   int64_t tokens, const R *dloss, const R *dz_loss)
{
    int64_t layer = blockIdx.x, first = pooled ? 0 : layer, end = pooled ? count : layer + 1;
    factor *= dloss ? (double)*dloss : 0;
    for (int64_t e = threadIdx.x; e < experts; e += THREADS) {
        double f = 0;
        for (int64_t i = first; i < end; i++) f += (double)l.counts[i][e];
        ((R *)l.prob_sums[layer])[e] = (R)(factor * f);
    }
    if (threadIdx.x || !l.z_sums[layer]) return;
    *(R *)l.z_sums[layer] = (R)(dz_loss && tokens ? (double)*dz_loss / (double)tokens : 0);
}

template <typename T>
static mt_status aux_loss_bwd(mt_stream *stream, const struct mt_aux_loss_bwd_args *a)
{
    typedef mt_real<T> R;
    if (!a->layers) return MT_OK;
    struct layers l = {};
    for (int64_t i = 0; i < a->layers; i++) {
        l.prob_sums[i] = a->dprob_sums[i], l.counts[i] = a->counts[i];
        l.z_sums[i] = a->dz_sums ? a->dz_sums[i] : NULL;
    }
    double factor = aux_factor(a->kind, a->layers, a->tokens, a->experts, a->top_k);
    aux_bwd_kernel<R><<<(unsigned)a->layers, THREADS, 0, mt_cuda_stream(stream)>>>(
        l, a->layers, a->experts, factor, rules[a->kind].pooled, a->tokens, (const R *)a->dloss,
        (const R *)a->dz_loss);
    MT_LAUNCHED(stream, "aux_loss_bwd");
    return MT_OK;
}
MT_CUDA_OP(aux_loss_bwd)

/* ---- selection bias ---------------------------------------------------------------------------
 */

/* One block: once a step, E numbers. The sum is the first thread's, in order, as the CPU's is. */
static __global__ void __launch_bounds__(THREADS)
    bias_update_kernel(struct mt_router_bias_update_args a)
{
    __shared__ unsigned long long total;
    __shared__ double mean;
    if (a.skip && *a.skip) return;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    unsigned long long mine = 0;
    for (int64_t e = threadIdx.x; e < a.experts; e += THREADS)
        mine += (unsigned long long)a.load[e];
    atomicAdd(&total, mine);
    __syncthreads();
    int64_t all = (int64_t)total;
    for (int64_t e = threadIdx.x; e < a.experts; e += THREADS) {
        int64_t load = a.load[e] * a.experts; /* compared with all: the mean, without rounding */
        a.bias[e] = (float)((double)a.bias[e] + a.rate * ((load < all) - (load > all)));
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        double sum = 0;
#pragma unroll 8
        for (int64_t e = 0; e < a.experts; e++) sum += (double)a.bias[e];
        mean = sum / (double)a.experts;
    }
    __syncthreads();
    for (int64_t e = threadIdx.x; e < a.experts; e += THREADS)
        a.bias[e] = (float)((double)a.bias[e] - mean);
}

template <typename T>
static mt_status router_bias_update(mt_stream *stream, const struct mt_router_bias_update_args *a)
{
    if (!a->experts) return MT_OK;
    bias_update_kernel<<<1, THREADS, 0, mt_cuda_stream(stream)>>>(*a);
    MT_LAUNCHED(stream, "router_bias_update");
    return MT_OK;
}
MT_CUDA_OP(router_bias_update)
