/* A token's choice of experts by a warp. Its lanes hold the experts in registers: each has PER of
 * them, in runs of RUN, 32 runs beside each other. */
#pragma once

#include "kernels/cuda/element.cuh"

template <int PER> struct expert_runs {
    enum { RUN = PER < 4 ? PER : 4, RUNS = PER / RUN };
};
template <typename R, int PER> using expert_run = mt_vec<R, expert_runs<PER>::RUN>;

/* The lane's expert j. */
template <int PER> static __device__ __forceinline__ int expert_at(int j)
{
    enum { RUN = expert_runs<PER>::RUN };
    return (j / RUN * 32 + (int)threadIdx.x % 32) * RUN + j % RUN;
}

/* The lane's experts of a row of reals; past the last, `other`. vectors: runs are whole and
 * aligned.
 */
template <typename R, int PER>
static __device__ __forceinline__ void read_experts(R x[PER], const R *row, int experts,
                                                    bool vectors, R other)
{
    enum { RUN = expert_runs<PER>::RUN };
    typedef expert_run<R, PER> run;
#pragma unroll
    for (int j = 0; j < PER; j += RUN) {
        const int e = expert_at<PER>(j);
        run in;
#pragma unroll
        for (int i = 0; i < RUN; i++) in.at[i] = other;
        if (vectors && e < experts) in = *(const run *)(row + e);
#pragma unroll
        for (int i = 0; i < RUN; i++) {
            if (!vectors && e + i < experts) in.at[i] = row[e + i];
            x[j + i] = in.at[i];
        }
    }
}

template <typename R, int PER>
static __device__ __forceinline__ void write_experts(R *row, const R x[PER], int experts,
                                                     bool vectors)
{
    enum { RUN = expert_runs<PER>::RUN };
    typedef expert_run<R, PER> run;
#pragma unroll
    for (int j = 0; j < PER; j += RUN) {
        const int e = expert_at<PER>(j);
        run out;
#pragma unroll
        for (int i = 0; i < RUN; i++) {
            out.at[i] = x[j + i];
            if (!vectors && e + i < experts) row[e + i] = x[j + i];
        }
        if (vectors && e < experts) *(run *)(row + e) = out;
    }
}

/* Numbers in the order of scores, above 0; -0 is 0. */
static __device__ __forceinline__ uint32_t key_of(float x)
{
    uint32_t bits = __float_as_uint(x + 0.0f);
    return bits ^ ((uint32_t)((int32_t)bits >> 31) | 1u << 31);
}
static __device__ __forceinline__ uint64_t key_of(double x)
{
    uint64_t bits = (uint64_t)__double_as_longlong(x + 0.0);
    return bits >> 63 ? ~bits : bits | 1ull << 63;
}

static __device__ __forceinline__ float of_key(uint32_t key)
{
    return __uint_as_float(key >> 31 ? key & ~(1u << 31) : ~key);
}
static __device__ __forceinline__ double of_key(uint64_t key)
{
    return __longlong_as_double((int64_t)(key >> 63 ? key & ~(1ull << 63) : ~key));
}

static __device__ __forceinline__ uint32_t largest(uint32_t key)
{
    return __reduce_max_sync(~0u, key);
}
static __device__ __forceinline__ uint64_t largest(uint64_t key)
{
    for (int lane = 16; lane; lane >>= 1) {
        uint64_t other = __shfl_xor_sync(~0u, key, lane);
        key = other > key ? other : key;
    }
    return key;
}

/* A lane's keys in lists of at most four, the largest of each first, equal ones by index, with the
 * experts that they are of. */
template <int PER, typename K> struct key_lists {
    enum { LIST = PER < 4 ? PER : 4, LISTS = PER / LIST };
    K key[LISTS][LIST];
    int of[LISTS][LIST];

    __device__ __forceinline__ void sort(const K from[PER])
    {
#pragma unroll
        for (int l = 0; l < LISTS; l++) {
#pragma unroll
            for (int i = 0; i < LIST; i++) {
                key[l][i] = from[l * LIST + i];
                of[l][i] = expert_at<PER>(l * LIST + i);
#pragma unroll
                for (int j = i; j > 0; j--) {
                    const K lower = key[l][j - 1], here = key[l][j];
                    const int lower_of = of[l][j - 1], here_of = of[l][j];
                    const bool up = here > lower;
                    key[l][j - 1] = up ? here : lower, key[l][j] = up ? lower : here;
                    of[l][j - 1] = up ? here_of : lower_of, of[l][j] = up ? lower_of : here_of;
                }
            }
        }
    }

    /* The expert of the warp's largest key, ties by index, which leaves its list. */
    __device__ __forceinline__ int take()
    {
        K best = key[0][0];
        int at = of[0][0];
#pragma unroll
        for (int l = 1; l < LISTS; l++)
            if (key[l][0] > best) best = key[l][0], at = of[l][0];
        const unsigned taken = __reduce_min_sync(~0u, best == largest(best) ? (unsigned)at : ~0u);
#pragma unroll
        for (int l = 0; l < LISTS; l++) {
            if (of[l][0] != (int)taken) continue;
#pragma unroll
            for (int i = 1; i < LIST; i++) key[l][i - 1] = key[l][i], of[l][i - 1] = of[l][i];
            key[l][LIST - 1] = 0;
        }
        return (int)taken;
    }
};

/* p = e / sum, rounded once, of e in [0, 1] and sum at least 1, or NaN: by the rounded inverse of
 * sum and what is left of e, which is exact (P. Markstein, IBM J. Res. Dev. 34, 1990), but for e so
 * small that it may not be. */
template <int PER>
static __device__ __forceinline__ void divide_all(float p[PER], const float e[PER], float sum)
{
    const float inverse = 1 / sum, least = 0x1p-90f;
    bool small = false;
#pragma unroll
    for (int j = 0; j < PER; j++) {
        p[j] = e[j] * inverse;
        p[j] = fmaf(fmaf(-p[j], sum, e[j]), inverse, p[j]);
        p[j] = fmaf(fmaf(-p[j], sum, e[j]), inverse, p[j]);
        small |= e[j] < least && e[j] != 0;
    }
    if (!small) return;
#pragma unroll
    for (int j = 0; j < PER; j++)
        if (e[j] < least) p[j] = e[j] / sum;
}
template <int PER>
static __device__ __forceinline__ void divide_all(double p[PER], const double e[PER], double sum)
{
#pragma unroll
    for (int j = 0; j < PER; j++) p[j] = e[j] / sum;
}

/* Selects by the scores' keys, and writes the choice and its weights, of the probabilities in
 * `row`; lane l has the slots l, l + 32, ... Weights are added slot by slot. */
template <typename R, int PER, typename K>
static __device__ __forceinline__ void select(const struct mt_router_fwd_args &a, int64_t t,
                                              const K key[PER], const R *row, int32_t *counts)
{
    R *weights = (R *)a.weights + t * a.top_k, total = 0, mine = 0;
    int32_t *chosen = a.chosen + t * a.top_k;
    const int top_k = (int)a.top_k, lane = threadIdx.x % 32;
    key_lists<PER, K> keys;
    keys.sort(key);
    for (int base = 0; base < top_k; base += 32) {
        const int slots = min(32, top_k - base);
        int choice = 0;
#pragma unroll 1
        for (int i = 0; i < slots; i++) {
            const int e = keys.take();
            const R weight = row[e];
            total += weight;
            if (lane == i) choice = e, mine = weight;
        }
        if (lane >= slots) continue;
        chosen[base + lane] = choice, atomicAdd(counts + choice, 1);
        if (top_k > 32) weights[base + lane] = mine;
    }
    if (top_k <= 32) {
        if (lane < top_k) weights[lane] = a.normalize ? mine / total : mine;
        return;
    }
    for (int i = lane; i < top_k && a.normalize; i += 32) weights[i] = weights[i] / total;
}

/* Where logits come from: a logit is the sum of its parts [count, tokens, line], in order. vectors:
 * runs of experts are whole and aligned wherever they lie. */
template <typename R> struct logit_parts {
    const R *at;
    int count, line;
    bool vectors;
};

template <typename R, int PER>
static __device__ __forceinline__ void read_logits(R x[PER], const struct mt_router_fwd_args &a,
                                                   int64_t t, const logit_parts<R> &parts)
{
    const int experts = (int)a.experts;
    read_experts<R, PER>(x, parts.at + t * parts.line, experts, parts.vectors, -(R)INFINITY);
#pragma unroll 1
    for (int i = 1; i < parts.count; i++) {
        R more[PER];
        read_experts<R, PER>(more, parts.at + (i * a.tokens + t) * parts.line, experts,
                             parts.vectors, 0);
#pragma unroll
        for (int j = 0; j < PER; j++) x[j] += more[j];
    }
    if (a.logits && a.logits != parts.at)
        write_experts<R, PER>((R *)a.logits + t * experts, x, experts, parts.vectors);
}

/* Softmax and choice of token t by a warp, which adds its probabilities to its own `sums` and has
 * room for a `row` of experts; *top and *sum are the largest logit and the sum of exponentials. */
template <typename R, int PER>
static __device__ __forceinline__ void
choose_token(const struct mt_router_fwd_args &a, int64_t t, R x[PER], bool vectors, double *sums,
             expert_run<R, PER> *row, int32_t *counts, R *top, R *sum)
{
    enum { RUN = expert_runs<PER>::RUN };
    typedef decltype(key_of(R())) K;
    const int lane = threadIdx.x % 32, experts = (int)a.experts;
    R p[PER];
    K key[PER], best = 0;
#pragma unroll
    for (int j = 0; j < PER; j++) { /* NaN is last */
        key[j] = key_of(x[j] == x[j] ? x[j] : -(R)INFINITY);
        if (expert_at<PER>(j) >= experts) key[j] = 0;
        best = key[j] > best ? key[j] : best;
    }
    *top = of_key(largest(best)), *sum = 0;
#pragma unroll
    for (int j = 0; j < PER; j++) { /* 0 past the experts */
        x[j] = exp(x[j] - *top);
        *sum += x[j];
    }
    *sum = mt_warp_sum(*sum);
    divide_all<PER>(p, x, *sum);
    write_experts<R, PER>((R *)a.probs + t * experts, p, experts, vectors);
    __syncwarp(); /* the token before has read its row */
#pragma unroll
    for (int j = 0; j < PER; j += RUN) {
        expert_run<R, PER> out;
#pragma unroll
        for (int i = 0; i < RUN; i++) out.at[i] = p[j + i];
        row[j / RUN * 32 + lane] = out;
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < PER; j++) sums[j * 32 + lane] += (double)p[j];
#pragma unroll
    for (int j = 0; a.bias && j < PER; j++) {
        if (expert_at<PER>(j) >= experts) continue;
        const R score = p[j] + (R)a.bias[expert_at<PER>(j)];
        key[j] = key_of(score == score ? score : -(R)INFINITY);
    }
    select<R, PER>(a, t, key, (const R *)row, counts);
}
