/* Members' amaxes of rows that are made on the way: gathered, weighted or not, or SwiGLU's. */
#include "kernels/cuda/quantize_short.cuh"

enum { MEASURERS = 256, MEASURING_WARPS = MEASURERS / 32 };

/* Raises what a member has by what a warp found, whose lanes may have rows of several. */
static __device__ __forceinline__ void give_rows(const job &j, int64_t member, float most, int nans)
{
    if (!__all_sync(~0u, member == __shfl_sync(~0u, member, 0))) {
        for (int dir = 0; dir < MT_DIR_COUNT && member >= 0; dir++)
            if (j.measure[dir]) atomicMax((int *)(j.amax[dir] + member), mt_bits(most));
        if (j.nans && nans > 0) atomicAdd(j.nans + member, (unsigned long long)nans);
        return;
    }
    if (member < 0) return; /* all of them */
    for (int dir = 0; dir < MT_DIR_COUNT; dir++)
        if (j.measure[dir]) raise_amax(j.amax[dir] + member, most);
    raise_nans(j, member, nans);
}

/* ---- gathered rows ----------------------------------------------------------------------------
 * Each token is measured once, however many rows it has. */

static __device__ __forceinline__ void find_in(uint32_t *most, int *nans, const uint4 &x)
{
    const uint32_t w[4] = { x.x, x.y, x.z, x.w };
    uint32_t m = larger_half(magnitudes<4>(w));
    if (m > 0x7f80) {
        m = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) m = found_among_nans(w[i], m);
        *nans += (int)(m >> 16), m &= 0xffff;
    }
    raise(most, m);
}

struct token_job {
    float2 *found; /* a token's amax and the number of its NaNs */
    const uint4 *x;
    int64_t tokens, chunks;
};

/* A warp for each token, while the plan is made: the plan's kernel follows nobody early, so that x
 * is there. */
static __global__ void __launch_bounds__(MEASURERS)
    token_kernel(const __grid_constant__ token_job j)
{
    enum { MANY = 4 };
    const int64_t chunks = j.chunks;
    int64_t t = ((int64_t)blockIdx.x * MEASURERS + threadIdx.x) / 32;
    let_follow();
    for (; t < j.tokens; t += (int64_t)gridDim.x * MEASURING_WARPS) {
        const uint4 *row = j.x + t * chunks;
        uint32_t most = 0;
        int nans = 0;
        for (int64_t first = lane_of_warp(); first < chunks; first += 32 * MANY) {
            uint4 v[MANY];
#pragma unroll
            for (int i = 0; i < MANY; i++)
                v[i] =
                    first + i * 32 < chunks ? __ldg(row + first + i * 32) : make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int i = 0; i < MANY; i++) find_in(&most, &nans, v[i]);
        }
        most = __reduce_max_sync(~0u, most);
        nans = __reduce_add_sync(~0u, nans);
        if (lane_of_warp() == 0)
            j.found[t] = make_float2(mt_f32_from_bits(most << 16), __int_as_float(nans));
    }
    wait_for_results(); /* who waits for this one waits for the plan, too */
}

/* The member of a row: the last that begins at or before it. */
static __device__ __forceinline__ int64_t member_of_row(const plan &p, int64_t element)
{
    int64_t low = 0, high = p.group.members;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (mt_group_offset(&p.group, middle) <= element)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* A token's amax and NaNs times a weight: elements keep their order when they are rounded, and
 * whether they are NaNs, unless the weight is 0, Inf or a NaN. */
static __device__ float2 times(const job &j, int32_t token, float2 of, float weight)
{
    if (fabsf(weight) > 0 && fabsf(weight) < INFINITY)
        return make_float2(mt_rounded<mt_bf16>(fabsf(weight) * of.x), of.y);
    const int64_t k = j.p.group.k;
    const mt_bf16 *x = (const mt_bf16 *)j.p.sides[SOURCE].codes + token * k;
    float2 found = make_float2(0, 0);
    int nans = 0;
    for (int64_t i = 0; i < k; i++) {
        const float y = mt_rounded<mt_bf16>(weight * to_f32(x[i]));
        found.x = fmaxf(found.x, fabsf(y)), nans += y != y;
    }
    found.y = __int_as_float(nans);
    return found;
}

struct rows_job {
    job j;
    const float2 *found; /* of tokens */
};

static __global__ void __launch_bounds__(MEASURERS) rows_kernel(const __grid_constant__ rows_job of)
{
    const job &j = of.j;
    const int64_t rows = *j.rows_used, step = (int64_t)gridDim.x * MEASURERS;
    int64_t first = (int64_t)blockIdx.x * MEASURERS + (threadIdx.x & ~31u);
    let_follow();
    wait_for_results();
    for (; first < rows; first += step) {
        int64_t r = first + lane_of_warp(), member = -1;
        float2 x = make_float2(0, 0);
        if (r < rows) {
            const int32_t token = j.row_token[r];
            x = of.found[token];
            member = member_of_row(j.p, r * j.p.group.k);
            if (j.row_weight) x = times(j, token, x, j.row_weight[r]);
        }
        give_rows(j, member, x.x, __float_as_int(x.y));
    }
}

static __global__ void __launch_bounds__(MEASURERS)
    weigh_kernel(float *row_weight, const float *weights, const int32_t *position, int64_t count)
{
    MT_GRID_STRIDE(i, count)
    if (position[i] >= 0) row_weight[position[i]] = weights[i];
}

/* ---- SwiGLU -----------------------------------------------------------------------------------
 */

/* A block takes tiles; a warp in its turn looks the next one up. GRADIENT: those of its columns in
 * the first half give the second half's too. */
template <bool GRADIENT>
static __global__ void __launch_bounds__(MEASURERS, GRADIENT ? 3 : 4)
    swiglu_kernel(const __grid_constant__ job j)
{
    enum { STEP = MEASURERS / CHUNKS, MANY = 2 };
    __shared__ tile tiles[2];
    __shared__ block_found blocks[2];
    let_follow();
    wait_for_results();
    const int64_t units = j.p.units[j.p.group.members], cols = j.p.group.k;
    const int chunk = (int)threadIdx.x % CHUNKS, first = (int)threadIdx.x / CHUNKS;
    uint32_t most = 0;
    int nans = 0, n = 0;
    int64_t given = -1; /* the member that the block has found something of */
    if (threadIdx.x < 2) blocks[threadIdx.x] = block_found{};
    auto find = [&](int64_t unit) {
        int64_t member = member_at_by_warp(j.p.units, j.p.group.members, unit);
        if (lane_of_warp() == 0) tiles[n & 1] = tile_of(j.p, member, unit);
    };
    if (threadIdx.x < 32 && blockIdx.x < units) find(blockIdx.x);
    for (int64_t u = blockIdx.x; u < units; u += gridDim.x) {
        __syncthreads(); /* the tile is there, the other one done with */
        if (threadIdx.x == 0 && given >= 0) pass_on(&blocks[~n & 1], j, given);
        given = -1;
        const tile &t = tiles[n & 1];
        const int64_t half = GRADIENT ? cols / 2 : cols, column = t.c0 + chunk * 8;
        const int rows = chunk * 8 < t.cols && column < half ? t.rows : 0;
        const int64_t row = t.m.offset / cols + t.r0 + first;
        const mt_bf16 *z = GRADIENT ? j.z : (const mt_bf16 *)j.p.sides[SOURCE].codes;
        const mt_bf16 *from = z + row * 2 * half + column;
        const mt_bf16 *d = (const mt_bf16 *)j.p.sides[SOURCE].codes + row * half + column;
        const int64_t index = t.index, next = u + gridDim.x;
        n++;
        if ((int)threadIdx.x / 32 == n % MEASURING_WARPS && next < units) find(next);
#pragma unroll 1
        for (int r = first; r < rows; r += MANY * STEP, from += MANY * STEP * 2 * half) {
            uint4 g[MANY], up[MANY], down[MANY];
#pragma unroll
            for (int i = 0; i < MANY; i++) {
                const mt_bf16 *p = from + i * STEP * 2 * half;
                g[i] = up[i] = down[i] = make_uint4(0, 0, 0, 0);
                if (r + i * STEP >= rows) continue;
                g[i] = __ldg((const uint4 *)p), up[i] = __ldg((const uint4 *)(p + half));
                if (GRADIENT) down[i] = __ldg((const uint4 *)(d + (r - first + i * STEP) * half));
            }
#pragma unroll
            for (int i = 0; i < MANY; i++) {
                uint4 y = make_uint4(0, 0, 0, 0);
                if (GRADIENT)
                    swiglu_gradients(&down[i], &y, down[i], g[i], up[i]);
                else
                    down[i] = swiglu_of(g[i], up[i]);
                find_in(&most, &nans, down[i]);
                if (GRADIENT) find_in(&most, &nans, y);
            }
        }
        if (next < units && j.p.units[index + 1] > next) continue; /* the same member */
        const uint32_t both[MT_DIR_COUNT] = { most << 16, most << 16 };
        give_block(&blocks[~n & 1], j, both, nans);
        given = index, most = 0, nans = 0;
    }
    __syncthreads(); /* all have given */
    if (threadIdx.x == 0 && given >= 0) pass_on(&blocks[~n & 1], j, given);
}

/* ---- the host's part --------------------------------------------------------------------------
 */

mt_status mt_cuda_weigh_rows(mt_stream *stream, float *row_weight, const float *weights,
                             const int32_t *position, int64_t count)
{
    if (count == 0) return MT_OK;
    weigh_kernel<<<mt_blocks(stream, count, MEASURERS), MEASURERS, 0, mt_cuda_stream(stream)>>>(
        row_weight, weights, position, count);
    MT_LAUNCHED(stream, "quantize: weights of rows");
    return MT_OK;
}

mt_status mt_cuda_measure_made(mt_stream *stream, const job *j, int64_t tokens, void *found)
{
    enum { PER_MULTIPROCESSOR = 8 };
    const int64_t most = (int64_t)mt_cuda_multiprocessors(stream) * PER_MULTIPROCESSOR;
    const int64_t k = j->p.group.k, units = mt_cuda_plan_units(&j->p.group);
    if (j->swiglu || j->z) {
        auto kernel = j->z ? swiglu_kernel<true> : swiglu_kernel<false>;
        MT_TRY(follow(stream, kernel, (unsigned)(units < most ? units : most), MEASURERS, 0, *j));
        MT_LAUNCHED(stream, "quantize: amax of SwiGLU");
        return MT_OK;
    }
    if (tokens == 0) return MT_OK;
    const token_job of_tokens = { (float2 *)found, (const uint4 *)j->p.sides[SOURCE].codes, tokens,
                                  k / 8 };
    MT_TRY(follow(stream, token_kernel, (unsigned)most, MEASURERS, 0, of_tokens));
    MT_LAUNCHED(stream, "quantize: amax of tokens");
    const rows_job of_rows = { *j, (const float2 *)found };
    MT_TRY(follow(stream, rows_kernel, (unsigned)most, MEASURERS, 0, of_rows));
    MT_LAUNCHED(stream, "quantize: amax of gathered rows");
    return MT_OK;
}
