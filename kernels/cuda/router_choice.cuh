/* A token's choice of experts by LANES lanes of a warp, which has 32 / LANES tokens. They hold the
 * experts in registers: each has PER of them, in runs of RUN, LANES runs beside each other. */
#pragma once

#include "kernels/cuda/element.cuh"

template <int PER, int LANES = 32> struct expert_runs {
    enum { MOST = PER * LANES / 32, RUN = MOST < 4 ? MOST : 4 };
};
template <typename R, int PER, int LANES = 32>
using expert_run = mt_vec<R, expert_runs<PER, LANES>::RUN>;

/* The lane's expert j. */
template <int PER, int LANES = 32> static __device__ __forceinline__ int expert_at(int j)
{
    enum { RUN = expert_runs<PER, LANES>::RUN };
    return (j / RUN * LANES + (int)threadIdx.x % LANES) * RUN + j % RUN;
}

/* The lane's experts of a row of reals; past the last, `other`. vectors: runs are whole and
 * aligned.
 */
template <typename R, int PER, int LANES = 32>
static __device__ __forceinline__ void read_experts(R x[PER], const R *row, int experts,
                                                    bool vectors, R other)
{
    enum { RUN = expert_runs<PER, LANES>::RUN };
    typedef expert_run<R, PER, LANES> run;
#pragma unroll
    for (int j = 0; j < PER; j += RUN) {
        const int e = expert_at<PER, LANES>(j);
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

template <typename R, int PER, int LANES = 32>
static __device__ __forceinline__ void write_experts(R *row, const R x[PER], int experts,
                                                     bool vectors)
{
    enum { RUN = expert_runs<PER, LANES>::RUN };
    typedef expert_run<R, PER, LANES> run;
#pragma unroll
    for (int j = 0; j < PER; j += RUN) {
        const int e = expert_at<PER, LANES>(j);
        run out;
#pragma unroll
        for (int i = 0; i < RUN; i++) {
            out.at[i] = x[j + i];
            if (!vectors && e + i < experts) row[e + i] = x[j + i];
        }
        if (vectors && e < experts) *(run *)(row + e) = out;
    }
}

/* The sum over a token's lanes, each of which has those of 32 / LANES lanes of a warp, in the order
 * of that warp's. */
template <int LANES, typename R> static __device__ __forceinline__ R lanes_sum(R sum[32 / LANES])
{
#pragma unroll
    for (int part = 16 / LANES; part; part >>= 1)
#pragma unroll
        for (int i = 0; i < part; i++) sum[i] += sum[i + part];
#pragma unroll
    for (int lane = LANES / 2; lane; lane >>= 1) sum[0] += __shfl_xor_sync(~0u, sum[0], lane);
    return sum[0];
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

/* Of LANES lanes. */
template <int LANES, typename K> static __device__ __forceinline__ K largest(K key)
{
    if constexpr (LANES == 32 && sizeof(K) == 4) {
        return __reduce_max_sync(~0u, key);
    } else {
#pragma unroll
        for (int lane = LANES / 2; lane; lane >>= 1) {
            const K other = __shfl_xor_sync(~0u, key, lane);
            key = other > key ? other : key;
        }
        return key;
    }
}

/* A lane's keys in lists of at most four, the largest of each first, equal ones by index, with the
 * experts that they are of. */
template <int PER, int LANES, typename K> struct key_lists {
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
                of[l][i] = expert_at<PER, LANES>(l * LIST + i);
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

    /* The expert of the lanes' largest key, ties by index, which leaves its list. */
    __device__ __forceinline__ int take()
    {
        K best = key[0][0];
        int taken = of[0][0];
#pragma unroll
        for (int l = 1; l < LISTS; l++)
            if (key[l][0] > best) best = key[l][0], taken = of[l][0];
        if constexpr (LANES == 32) {
            const bool mine = best == largest<LANES>(best);
            taken = (int)__reduce_min_sync(~0u, mine ? (unsigned)taken : ~0u);
        }
#pragma unroll
        for (int lane = LANES < 32 ? LANES / 2 : 0; lane; lane >>= 1) {
            const K other = __shfl_xor_sync(~0u, best, lane);
            const int other_of = __shfl_xor_sync(~0u, taken, lane);
            const bool up = other > best || (other == best && other_of < taken);
            best = up ? other : best, taken = up ? other_of : taken;
        }
#pragma unroll
        for (int l = 0; l < LISTS; l++) {
            if (of[l][0] != taken) continue;
#pragma unroll
            for (int i = 1; i < LIST; i++) key[l][i - 1] = key[l][i], of[l][i - 1] = of[l][i];
            key[l][LIST - 1] = 0;
        }
        return taken;
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
 * `row`, if it is wanted; lane l of the token's has the slots l, l + LANES, ... Weights are added
 * slot by slot. */
template <typename R, int PER, int LANES, typename K>
static __device__ __forceinline__ void select(const struct mt_router_fwd_args &a, int64_t t,
                                              bool wanted, const K key[PER], const R *row,
                                              int32_t *counts)
{
    R *weights = (R *)a.weights + t * a.top_k, total = 0, mine = 0;
    int32_t *chosen = a.chosen + t * a.top_k;
    const int top_k = (int)a.top_k, lane = threadIdx.x % LANES;
    key_lists<PER, LANES, K> keys;
    keys.sort(key);
    for (int base = 0; base < top_k; base += LANES) {
        const int slots = min(LANES, top_k - base);
        int choice = 0;
#pragma unroll 1
        for (int i = 0; i < slots; i++) {
            const int e = keys.take();
            const R weight = row[e];
            total += weight;
            if (lane == i) choice = e, mine = weight;
        }
        if (lane >= slots || !wanted) continue;
        chosen[base + lane] = choice, atomicAdd(counts + choice, 1);
        if (top_k > LANES) weights[base + lane] = mine;
    }
    if (!wanted) return;
    total += (R)MT_LEAST_SHARE;
    if (top_k <= LANES) {
        if (lane < top_k) weights[lane] = a.normalize ? mine / total : mine;
        return;
    }
    for (int i = lane; i < top_k && a.normalize; i += LANES) weights[i] = weights[i] / total;
}

/* Where logits come from: a logit is the sum of its parts [count, tokens, line], in order. vectors:
 * runs of experts are whole and aligned wherever they lie. */
template <typename R> struct logit_parts {
    /* Of a block, 0: threads_of; blocks that registers are left for, 0: as it comes */
    enum { THREADS_OF = 0, BLOCKS = 0 };
    const R *at;
    int count, line;
    bool vectors;

    __device__ __forceinline__ void begin(const struct mt_router_fwd_args &) const {}
    template <int PER, int LANES>
    __device__ __forceinline__ void read(R x[PER], const struct mt_router_fwd_args &a,
                                         int64_t t) const
    {
        const int experts = (int)a.experts;
        read_experts<R, PER, LANES>(x, at + t * line, experts, vectors, -(R)INFINITY);
#pragma unroll 1
        for (int i = 1; i < count; i++) {
            R more[PER];
            read_experts<R, PER, LANES>(more, at + (i * a.tokens + t) * line, experts, vectors, 0);
#pragma unroll
            for (int j = 0; j < PER; j++) x[j] += more[j];
        }
        if (a.logits && a.logits != at)
            write_experts<R, PER, LANES>((R *)a.logits + t * experts, x, experts, vectors);
    }
};

/* Softmax and choice of token t, written and counted if wanted, by lanes that add its probabilities
 * to their own `sums` and have room for a `row` of experts; *top and *sum are the largest logit and
 * the sum of exponentials. */
template <typename R, int PER, int LANES>
static __device__ __forceinline__ void
choose_token(const struct mt_router_fwd_args &a, int64_t t, bool wanted, R x[PER], bool vectors,
             double *sums, R *row, int32_t *counts, R *top, R *sum)
{
    typedef decltype(key_of(R())) K;
    const int experts = (int)a.experts;
    R p[PER], sums_of[32 / LANES] = {};
    K key[PER], best = 0;
#pragma unroll
    for (int j = 0; j < PER; j++) { /* NaN is last */
        key[j] = key_of(x[j] == x[j] ? x[j] : -(R)INFINITY);
        if (expert_at<PER, LANES>(j) >= experts) key[j] = 0;
        best = key[j] > best ? key[j] : best;
    }
    *top = of_key(largest<LANES>(best));
#pragma unroll
    for (int j = 0; j < PER; j++) { /* 0 past the experts */
        x[j] = exp(x[j] - *top);
        sums_of[j / (PER * LANES / 32)] += x[j];
    }
    *sum = lanes_sum<LANES>(sums_of);
    divide_all<PER>(p, x, *sum);
    if (wanted) write_experts<R, PER, LANES>((R *)a.probs + t * experts, p, experts, vectors);
    __syncwarp(); /* the token before has read its row */
    write_experts<R, PER, LANES>(row, p, PER * LANES, true);
    __syncwarp();
#pragma unroll
    for (int j = 0; j < PER; j++) sums[j * 32] += wanted ? (double)p[j] : 0;
#pragma unroll
    for (int j = 0; a.bias && j < PER; j++) {
        if (expert_at<PER, LANES>(j) >= experts) continue;
        const R score = p[j] + (R)a.bias[expert_at<PER, LANES>(j)];
        key[j] = key_of(score == score ? score : -(R)INFINITY);
    }
    select<R, PER, LANES>(a, t, wanted, key, row, counts);
}
