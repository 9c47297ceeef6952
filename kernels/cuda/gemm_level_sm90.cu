/* Codes of blocks, brought to one scale for each column of a member (NT) or for each row (TN), so
 * that a product of theirs is scaled by the other operand's blocks alone, and by levels as it is
 * stored.
 *
 * A scale that is 2^-k of its column's largest makes codes of 2^-k of what they were: what lies
 * below E4M3's smallest step, 2^-9, is rounded, so that an element moves by 2^-10 of the largest
 * scale at most (gemm.h). Blocks whose codes are all 0 have a scale, too, 1, and it does not count.
 */
#include <cuda_fp8.h>

#include "kernels/cuda/gemm_places.cuh"
#include "kernels/cuda/gemm_sm90.cuh"

enum {
    THREADS = 256,
    PER_MULTIPROCESSOR = 4,
    VECTOR = 16, /* bytes of a lane */
    BLOCK = MT_PADDED_PART,
    OF_LINE = BLOCK / VECTOR, /* lanes, of a line's part in a step */
    LINES = 32 / OF_LINE,     /* of a warp, beside each other in each step */
    AT_ONCE = 4,              /* steps */
    ONE = 127,                /* the exponent of 1, as f32 has it */
    GONE = 19                 /* 2^-19 of the largest code is under half of the smallest step */
};

/* The exponent of a power of two, of f32's subnormal ones, too. */
static __device__ __forceinline__ int exponent_of(float scale)
{
    const uint32_t bits = __float_as_uint(scale);
    return bits >> 23 ? (int)(bits >> 23 & 255) : 9 - __clz(bits);
}

static __device__ __forceinline__ bool is_zero(const uint8_t *block, int bytes)
{
    uint32_t any = 0;
#pragma unroll
    for (int i = 0; i < BLOCK; i += VECTOR) {
        if (i >= bytes) continue;
        const uint4 w = *(const uint4 *)(block + i);
        any |= w.x | w.y | w.z | w.w;
    }
    return (any & 0x7f7f7f7fu) == 0;
}

/* Four codes by 2^-k, rounded once: where f16 rounds, what is left is under half of a step. */
static __device__ __forceinline__ uint32_t lowered(uint32_t codes, __half2 by)
{
    uint32_t to = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const auto pair = (__nv_fp8x2_storage_t)(codes >> 16 * i);
        const __half2 x = __half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3));
        const __half2 y = __hmul2(x, by);
        to |= (uint32_t)__nv_cvt_halfraw2_to_fp8x2((__half2_raw)y, __NV_SATFINITE, __NV_E4M3)
              << 16 * i;
    }
    return to;
}

/* 2^-k in f16, which holds it down to 2^-24; 0 where nothing would be left. */
static __device__ __forceinline__ __half2 power_of(int k)
{
    const uint32_t half = k >= GONE ? 0 : k < 15 ? (15 - k) << 10 : 1u << (24 - k);
    __half2_raw both;
    both.x = both.y = (unsigned short)half;
    return __half2(both);
}

static __device__ __forceinline__ void lower(uint4 *w, int k)
{
    if (k <= 0) return;
    const __half2 by = power_of(k);
    w->x = lowered(w->x, by), w->y = lowered(w->y, by);
    w->z = lowered(w->z, by), w->w = lowered(w->w, by);
}

/* A line of a member, by the lanes that have its part of each step; a step is `lines` blocks, and
 * as many scales, after the one before. Returns its level. */
static __device__ __forceinline__ int level_line(uint8_t *to, const uint8_t *codes,
                                                 const float *scale, int64_t lines, int steps)
{
    const int lane = threadIdx.x % OF_LINE;
    const int64_t step = lines * BLOCK, part = lane * VECTOR;
    uint4 w[AT_ONCE];
    auto load = [&](int first) __attribute__((always_inline))
    {
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (first + i < steps)
                w[i] = __ldcs((const uint4 *)(codes + (first + i) * step + part));
    };
    load(0); /* while the level is found */
    int most = 0;
    for (int i = lane; i < steps; i += OF_LINE) {
        const int own = max(exponent_of(__ldg(scale + i * lines)), 1);
        if (own != ONE || !is_zero(codes + i * step, BLOCK)) most = max(most, own);
    }
#pragma unroll
    for (int other = OF_LINE / 2; other > 0; other /= 2)
        most = max(most, __shfl_xor_sync(~0u, most, other));
    for (int first = 0; first < steps; first += AT_ONCE) {
        if (first > 0) load(first);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            if (first + i >= steps) continue;
            lower(&w[i], most - exponent_of(__ldg(scale + (first + i) * lines)));
            *(uint4 *)(to + (first + i) * step + part) = w[i];
        }
    }
    return most;
}

/* room: levels of a member, of more lines than there are. */
static __global__ void __launch_bounds__(THREADS, PER_MULTIPROCESSOR)
    level_kernel(uint8_t *to, uint8_t *levels, const uint8_t *codes, const float *scales,
                 const __grid_constant__ mt_group rows, int64_t lines, int64_t room)
{
    extern __shared__ int first[];
    const int members = (int)rows.members, lane = threadIdx.x % 32;
    int *const place = first + members + 1;
    gemm_find_places(first, place, &rows);
    const int64_t runs = room / LINES, every = (int64_t)gridDim.x * (THREADS / 32);
    const int64_t warp = (int64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    const int64_t members_on = every / runs, runs_on = every % runs;
    int64_t e = warp / runs, run = warp % runs;
    while (e < members) {
        const int64_t n = run * LINES + lane / OF_LINE;
        const int steps = n < lines ? (place[e + 1] - place[e]) / BLOCK : 0;
        const int64_t at = gemm_padded_place(place[e], n, lines);
        const int level =
            level_line(to + at, codes + at, scales + place[e] / BLOCK * lines + n, lines, steps);
        if (lane % OF_LINE == 0) levels[e * room + n] = (uint8_t)level;
        e += members_on, run += runs_on;
        if (run >= runs) run -= runs, e++;
    }
}

static unsigned blocks_of(mt_stream *stream, int64_t warps)
{
    const int64_t most = (int64_t)mt_cuda_multiprocessors(stream) * PER_MULTIPROCESSOR;
    const int64_t blocks = mt_ceil_div(warps, THREADS / 32);
    return (unsigned)(blocks < most ? blocks : most);
}

mt_status mt_cuda_gemm_level(mt_stream *stream, void *to, uint8_t *levels, const gemm_operand *x,
                             const float *scales, const mt_group *rows, int64_t lines)
{
    const int64_t room = mt_cuda_gemm_levels(lines);
    level_kernel<<<blocks_of(stream, rows->members * (room / LINES)), THREADS,
                   gemm_places_bytes(rows->members), mt_cuda_stream(stream)>>>(
        (uint8_t *)to, levels, (const uint8_t *)x->data, scales, *rows, lines, room);
    MT_LAUNCHED(stream, "gemm (levels)");
    return MT_OK;
}

/* A row, by a warp: `scale` are its own, `rows` apart. Returns its level. */
static __device__ __forceinline__ int level_row(uint8_t *to, const uint8_t *codes,
                                                const float *scale, int64_t rows, int depth)
{
    const int lane = threadIdx.x % 32, part = lane * VECTOR;
    uint4 w[AT_ONCE];
    auto load = [&](int from) __attribute__((always_inline))
    {
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (from + i * 32 * VECTOR + part < depth)
                w[i] = __ldcs((const uint4 *)(codes + from + i * 32 * VECTOR + part));
    };
    load(0); /* while the level is found */
    int most = 0;
    for (int b = lane; b * BLOCK < depth; b += 32) {
        const int own = max(exponent_of(__ldg(scale + b * rows)), 1);
        if (own != ONE || !is_zero(codes + b * BLOCK, depth - b * BLOCK)) most = max(most, own);
    }
    most = __reduce_max_sync(~0u, most);
    for (int from = 0; from < depth; from += AT_ONCE * 32 * VECTOR) {
        if (from > 0) load(from);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int at = from + i * 32 * VECTOR + part;
            if (at >= depth) continue;
            lower(&w[i], most - exponent_of(__ldg(scale + at / BLOCK * rows)));
            *(uint4 *)(to + at) = w[i];
        }
    }
    return most;
}

/* The member that a row is of, found by a warp: its first row and how many there are; no rows, past
 * the last. */
static __device__ __forceinline__ int2 member_of(const mt_group &rows, int row)
{
    const int lane = threadIdx.x % 32, members = (int)rows.members;
    if (!rows.offsets) {
        const int e = row / (int)rows.m;
        return make_int2(e * (int)rows.m, e < members ? (int)rows.m : 0);
    }
    const int64_t at = row * rows.k;
    int before = 0; /* members that begin at the row or before */
    for (int base = 0; base < members; base += 32) {
        const bool begun = base + lane < members && __ldg(rows.offsets + base + lane) <= at;
        const int count = __popc(__ballot_sync(~0u, begun));
        before += count;
        if (count < 32) break;
    }
    const int64_t from = __ldg(rows.offsets + before - 1), to = __ldg(rows.offsets + before);
    return to <= at ? make_int2(0, 0)
                    : make_int2((int)(from / rows.k), (int)((to - from) / rows.k));
}

/* A block has few rows and ends: blocks that go on from row to row were slower. */
static __global__ void __launch_bounds__(THREADS, PER_MULTIPROCESSOR)
    level_rows_kernel(uint8_t *to, uint8_t *levels, const uint8_t *codes, const float *scales,
                      const __grid_constant__ mt_group rows, int depth)
{
    const int row = (int)blockIdx.x * (THREADS / 32) + (int)threadIdx.x / 32;
    const int2 member = member_of(rows, row);
    if (member.y == 0 || member.y > MT_GEMM_FP8_LEVELED) return;
    const int64_t at = (int64_t)row * depth, blocks = (depth + BLOCK - 1) / BLOCK;
    const float *scale = scales + member.x * blocks + (row - member.x);
    const int level = level_row(to + at, codes + at, scale, member.y, depth);
    if (threadIdx.x % 32 == 0) levels[row] = (uint8_t)level;
}

mt_status mt_cuda_gemm_level_rows(mt_stream *stream, void *to, uint8_t *levels,
                                  const gemm_operand *x, const float *scales, const mt_group *rows,
                                  int64_t room)
{
    level_rows_kernel<<<(unsigned)mt_ceil_div(room, THREADS / 32), THREADS, 0,
                        mt_cuda_stream(stream)>>>((uint8_t *)to, levels, (const uint8_t *)x->data,
                                                  scales, *rows, (int)x->width);
    MT_LAUNCHED(stream, "gemm (levels)");
    return MT_OK;
}
