/* Where the members of padded codes begin (MT_LAYOUT_PADDED), found by a block. */
#pragma once

#include "kernels/cuda/gemm.cuh"

/* Shared memory for the two tables: as large as the GEMM's own of members, for which there is room
 * beside its stages (mt_cuda_gemm_sm90_fits): far below 48 KB. */
static inline size_t gemm_places_bytes(int64_t members)
{
    return (size_t)(members + 1) * 2 * sizeof(int);
}

/* Where row `row` of line n lies, of padded codes of so many lines. */
static __host__ __device__ __forceinline__ int64_t gemm_padded_place(int64_t row, int64_t n,
                                                                     int64_t lines)
{
    return (row / MT_PADDED_PART * lines + n) * MT_PADDED_PART + row % MT_PADDED_PART;
}

/* first: rows before a member; place: those before it as padded; [members + 1] each. By every
 * thread of the block. */
static __device__ __forceinline__ void gemm_find_places(int *first, int *place,
                                                        const mt_group *rows)
{
    const int members = (int)rows->members, lane = threadIdx.x % 32;
    for (int e = threadIdx.x; e <= members; e += blockDim.x)
        first[e] = (int)(rows->offsets ? rows->offsets[e] / rows->k : e * rows->m);
    __syncthreads();
    if (threadIdx.x < 32) {
        int64_t before = 0;
        for (int base = 0; base < members; base += 32) {
            const int e = base + lane, count = e < members ? first[e + 1] - first[e] : 0;
            const int64_t end = before + gemm_warp_scan(mt_ceil_div(count, MT_PADDED_PART), lane);
            if (e < members) place[e + 1] = (int)end * MT_PADDED_PART;
            before = __shfl_sync(~0u, end, 31);
        }
        if (lane == 0) place[0] = 0;
    }
    __syncthreads();
}
