/* Attention on Hopper: what forward and backward share. Rows of a head come in tiles through tensor
 * maps that end where a sequence does: lines of 128 bytes, D / 64 of them abreast, one block of a
 * tile's rows after the other. */
#pragma once

#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/gemm_sm90.cuh"
#include "kernels/cuda/gemm_sm90_ptx.cuh"
#include "kernels/cuda/gemm_sm90_wgmma.cuh"

enum { LINE = 128, PER_LINE = 64, ATTENTION_THREADS = 384, LOADER_REGISTERS = 24, REGISTERS = 240 };

/* A warp has read what it waited for. */
static __device__ __forceinline__ void release(uint32_t bar)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(bar);
}

/* Sums are not moved across here, neither before a wgmma that adds to them nor after it. */
template <int N> static __device__ __forceinline__ void sums_stay(float (&d)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

/* Descriptors of a tile of ROWS rows. The high word is the same for all: 1024 bytes between groups
 * of eight lines, whose parts of 16 bytes are exchanged. The low word is the address; for an
 * operand whose lines run across the depth also the distance of its blocks. */
static __device__ __forceinline__ uint64_t line_descriptor(uint32_t low)
{
    return (uint64_t)((1024u >> 4) | 1u << 30) << 32 | low;
}
template <int ROWS> static __device__ __forceinline__ uint32_t along_depth(uint32_t address)
{
    return ((address & 0x3ffff) >> 4) | 1u << 16;
}
template <int ROWS> static __device__ __forceinline__ uint32_t across_depth(uint32_t address)
{
    return ((address & 0x3ffff) >> 4) | (uint32_t)(ROWS * LINE >> 4) << 16;
}

/* d [64, N] = a b^T, both along the depth D, tiles of A_ROWS and N rows. */
template <int D, int A_ROWS, int N>
static __device__ __forceinline__ void scores_of(float (&d)[N / 2], uint32_t a, uint32_t b)
{
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        uint32_t left = along_depth<A_ROWS>(a + k / 4 * (A_ROWS * LINE)) + k % 4 * 2;
        uint32_t right = along_depth<N>(b + k / 4 * (N * LINE)) + k % 4 * 2;
        wgmma<N, 0, 0>(d, line_descriptor(left), line_descriptor(right), k > 0);
    }
}

/* d [64, D] += p b: p [64, K] in registers, b a tile of K rows. */
template <int D, int K>
static __device__ __forceinline__ void add_weighted(float (&d)[D / 2], const uint32_t (&p)[K / 4],
                                                    uint32_t b, bool add)
{
#pragma unroll
    for (int k = 0; k < K / 16; k++)
        wgmma_kept<D, 1>(d, p + k * 4, line_descriptor(across_depth<K>(b) + k * (16 * LINE >> 4)),
                         add || k > 0);
}

/* Sums as the left operand of the next product. */
template <int N>
static __device__ __forceinline__ void pack_sums(uint32_t (&p)[N / 4], const float (&d)[N / 2])
{
#pragma unroll
    for (int i = 0; i < N / 4; i++) p[i] = mt_pack(d[2 * i], d[2 * i + 1]);
}

/* The warpgroup's 64 rows of D sums, times the factors of a thread's two rows, to a tile of ROWS
 * rows in shared memory, `to` being the first of them, in the copies' order. */
template <int D, int ROWS>
static __device__ __forceinline__ void put_rows(uint32_t to, const float (&d)[D / 2], float above,
                                                float below)
{
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    to += (warp * 16 + lane % 16) * LINE;
#pragma unroll
    for (int c = 0; c < D / 16; c++) {
        const float *x = d + c * 8;
        uint32_t part = (c % 4 * 2 + lane / 16) ^ (lane % 8);
        uint32_t m0 = mt_pack(above * x[0], above * x[1]), m1 = mt_pack(below * x[2], below * x[3]);
        uint32_t m2 = mt_pack(above * x[4], above * x[5]), m3 = mt_pack(below * x[6], below * x[7]);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         to + c / 4 * (ROWS * LINE) + part * 16),
                     "r"(m0), "r"(m1), "r"(m2), "r"(m3)
                     : "memory");
    }
}

/* All blocks of a tile's rows, from column `column` on, to ROWS * D * 2 bytes at `to`. */
template <int D, int ROWS>
static __device__ __forceinline__ void bring_rows(uint32_t to, const CUtensorMap *map, uint32_t bar,
                                                  int column, int row, int batch)
{
#pragma unroll
    for (int i = 0; i < D / PER_LINE; i++)
        copy_in<false>(to + i * (ROWS * LINE), map, bar, column + i * PER_LINE, row, batch, 0);
}

/* One thread stores 64 rows that put_rows left in a tile of ROWS. */
template <int D, int ROWS>
static __device__ __forceinline__ void store_rows(const CUtensorMap *map, uint32_t from, int column,
                                                  int row, int batch)
{
#pragma unroll
    for (int i = 0; i < D / PER_LINE; i++)
        copy_out(map, from + i * (ROWS * LINE), column + i * PER_LINE, row, batch);
    copies_commit();
}

/* ---- the order of tiles ------------------------------------------------------------------------
 * Tiles are taken from a counter by whichever block is free. Heads are taken `together`, as many as
 * leave what they read in the L2 cache; of them, tiles with the longest sums come first. */
struct tile_order {
    int *next; /* 0 before the first is taken */
    int tiles; /* of a head, */
    int heads; /* in a batch, */
    int pairs; /* and of these in all */
    int together;
    bool last_first; /* the last tiles of a sequence have the longest sums */
};
struct head_tile {
    int tile, head, batch; /* tile < 0: none is left */
};

static __device__ __forceinline__ struct head_tile tile_at(const struct tile_order &o, int i)
{
    if (i >= o.pairs * o.tiles) return { -1, 0, 0 };
    int group = o.together * o.tiles, first = i / group * o.together, rest = i % group;
    int each = min(o.together, o.pairs - first);
    int level = rest / each, pair = first + rest % each;
    return { o.last_first ? o.tiles - 1 - level : level, pair % o.heads, pair / o.heads };
}

/* ---- on the host -------------------------------------------------------------------------------
 */

/* Rows of [batch, sequence, width] in boxes. */
static inline mt_status attention_map(CUtensorMap *map, const char *name, const void *data,
                                      const struct mt_attention_shape &s, int64_t width, int rows)
{
    gemm_sm90_matrix x = { name, data, width, s.sequence, s.batch, rows, sizeof(mt_bf16) };
    return mt_cuda_gemm_sm90_map(map, &x);
}

/* Whether maps and int counters hold it. */
static inline bool attention_fits_sm90(const mt_stream *stream, const struct mt_attention_shape &s)
{
    const int64_t most = 1 << 30;
    return mt_cuda_is_hopper(stream) && s.sequence < most && s.width < most && s.batch < most &&
           mt_ceil_div(s.sequence, 64) * s.nq < most / s.batch;
}

/* `heads` of a batch, each of which reads `each` bytes that its neighbours of `sharing` read too.
 */
static inline struct tile_order tile_order_of(int *next, const struct mt_attention_shape &s,
                                              int64_t heads, int rows, int64_t each,
                                              int64_t sharing, bool last_first)
{
    const int64_t room = 16 << 20; /* a third of an H200's L2 */
    int64_t together = room / each * sharing, pairs = heads * s.batch;
    together = together < 1 ? 1 : together > pairs ? pairs : together;
    return { next,      (int)mt_ceil_div(s.sequence, rows), (int)heads, (int)pairs, (int)together,
             last_first };
}
