/* Amaxes of members whose source is plain, as it lies: what sweeps over codes need before them. */
#include "kernels/cuda/quantize_packed.cuh"
#include "kernels/cuda/quantize_tile.cuh"

enum { MEASURERS = 4 /* blocks of a multiprocessor */ };

/* Elements that lie one after another: a share of a member's, as large as a tile. */
template <typename T> struct share {
    int64_t index, count;
    const T *from;
};

template <typename T>
static __device__ __forceinline__ void find_share(share<T> *to, const job &j, int64_t unit)
{
    int64_t i = member_at_by_warp(j.p.units, j.p.group.members, unit);
    const member *m = j.p.members + i;
    int64_t first = (unit - m->at[AT_UNIT]) * AREA, count = m->rows * m->cols - first;
    if (lane_of_warp()) return;
    to->index = i;
    to->from = (const T *)j.p.sides[SOURCE].codes + m->offset + first;
    to->count = count < 0 ? 0 : count < AREA ? count : AREA;
}

/* What a thread has found of a member. */
struct found {
    float most;
    int nans;
};

template <typename T>
static __device__ __forceinline__ void find_in(found *it, const mt_vec<T, 16 / sizeof(T)> &x)
{
#pragma unroll
    for (int e = 0; e < 16 / (int)sizeof(T); e++) {
        float v = to_f32(x.at[e]);
        it->most = fmaxf(it->most, fabsf(v)), it->nans += v != v;
    }
}
template <> __device__ __forceinline__ void find_in<mt_bf16>(found *it, const mt_vec<mt_bf16, 8> &x)
{
    uint32_t w[4], most;
#pragma unroll
    for (int i = 0; i < 4; i++)
        w[i] = __bfloat16_as_ushort(x.at[i * 2]) | (uint32_t)__bfloat16_as_ushort(x.at[i * 2 + 1])
                                                       << 16;
    most = larger_half(magnitudes<4>(w));
    if (most > 0x7f80) {
        most = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) most = found_among_nans(w[i], most);
        it->nans += (int)(most >> 16), most &= 0xffff;
    }
    it->most = fmaxf(it->most, mt_f32_from_bits(most << 16));
}

/* What a thread finds in a share; calls meanwhile() once, while loads are under way. */
template <typename T, typename F>
static __device__ __forceinline__ void find_in_share(found *it, const share<T> &s, F meanwhile)
{
    enum { V = 16 / sizeof(T), STEP = TILE_THREADS * V, MANY = 8 };
    typedef mt_vec<T, V> vec;
    const int count = (int)s.count, whole = (uintptr_t)s.from % 16 ? 0 : count / V * V;
    const T *from = s.from;
    vec x[MANY];
    int at = threadIdx.x * V;
    for (int turn = 0; turn < AREA / (MANY * STEP); turn++, at += MANY * STEP) {
#pragma unroll
        for (int i = 0; i < MANY; i++) {
            x[i] = vec();
            if (at + i * STEP < whole) x[i] = *(const vec *)(from + at + i * STEP);
        }
        if (turn == 0) meanwhile();
#pragma unroll
        for (int i = 0; i < MANY; i++) find_in(it, x[i]);
    }
    for (at = whole + threadIdx.x; at < count; at += TILE_THREADS) {
        x[0] = vec();
        x[0].at[0] = from[at];
        find_in(it, x[0]);
    }
}

/* Sources whose amax is that of both directions as they lie: no tile is kept. From the last share
 * to the first: the sweep over codes begins with what was read last. */
template <typename T>
static __global__ void __launch_bounds__(TILE_THREADS, MEASURERS)
    measure_kernel(const __grid_constant__ job j)
{
    __shared__ share<T> shares[2];
    __shared__ block_found blocks[2];
    wait_for_results();
    let_follow();
    const int64_t units = j.p.units[j.p.group.members], last = units - 1 - blockIdx.x;
    found it = {};
    int k = 0, n = 0;
    int64_t given = -1; /* the member that the block has found something of */
    if (threadIdx.x < 2) blocks[threadIdx.x] = block_found{};
    if (threadIdx.x < 32 && last >= 0) find_share(&shares[0], j, last);
    for (int64_t u = last; u >= 0; u -= gridDim.x, k ^= 1, n++) {
        __syncthreads(); /* the share is there, the other one done with */
        if (threadIdx.x == 0 && given >= 0) pass_on(&blocks[~n & 1], j, given);
        given = -1;
        const int64_t index = shares[k].index;
        find_in_share(&it, shares[k], [&] {
            if ((int)threadIdx.x / 32 == n % (TILE_THREADS / 32) && u >= gridDim.x)
                find_share(&shares[k ^ 1], j, u - gridDim.x);
        });
        if (u >= gridDim.x && j.p.units[index] <= u - gridDim.x) continue; /* the same member */
        const uint32_t bits = mt_f32_bits(it.most), most[MT_DIR_COUNT] = { bits, bits };
        give_block(&blocks[n & 1], j, most, it.nans);
        given = index;
        it = found();
    }
    __syncthreads(); /* all have given */
    if (threadIdx.x == 0 && given >= 0) pass_on(&blocks[~n & 1], j, given);
}

template <typename T> static mt_status launch(mt_stream *stream, const job *j, unsigned blocks)
{
    const unsigned most = (unsigned)mt_cuda_multiprocessors(stream) * MEASURERS;
    MT_TRY(follow(stream, measure_kernel<T>, blocks < most ? blocks : most, TILE_THREADS, 0, *j));
    MT_LAUNCHED(stream, "quantize: amax");
    return MT_OK;
}

mt_status mt_cuda_quantize_measure(mt_stream *stream, const job *j, unsigned blocks)
{
    static mt_status (*const launches[MT_F16 + 1])(mt_stream *, const job *,
                                                   unsigned) = { launch<double>, launch<float>,
                                                                 launch<mt_bf16>, launch<__half> };
    static_assert(MT_F64 == 0 && MT_F32 == 1 && MT_BF16 == 2 && MT_F16 == 3, "order of the table");
    return launches[j->p.sides[SOURCE].dtype](stream, j, blocks);
}
