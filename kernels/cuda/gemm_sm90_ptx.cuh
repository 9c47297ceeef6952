/* What the Hopper GEMM uses of PTX: barriers in shared memory, bulk tensor copies, fences.
 * Addresses of shared memory are 32 bits wide. */
#pragma once

#include <cuda.h>
#include <stdint.h>

static __device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* Read again at each use, so that it holds no register in between. */
static __device__ __forceinline__ uint32_t thread_now()
{
    uint32_t t;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
    return t;
}
/* Blocks; likewise. */
static __device__ __forceinline__ uint32_t grid_now()
{
    uint32_t n;
    asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(n));
    return n;
}
/* x, of which nothing is made before it is asked for here. */
static __device__ __forceinline__ uint32_t anew(uint32_t x)
{
    asm volatile("" : "+r"(x));
    return x;
}
static __device__ __forceinline__ uint32_t shared_anew(const void *p)
{
    asm volatile("" : "+l"(p));
    return shared_address(p);
}
static __device__ __forceinline__ int shared_now(uint32_t address)
{
    int v;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}

static __device__ __forceinline__ float2 shared_pair_now(uint32_t address)
{
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address));
    return v;
}

static __device__ __forceinline__ float4 shared_four(uint32_t address)
{
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

static __device__ __forceinline__ void put_shared_pair(uint32_t address, float x, float y)
{
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

static __device__ __forceinline__ void put_shared(uint32_t address, float x)
{
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}

static __device__ __forceinline__ float2 shared_pair(uint32_t address)
{
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(v.x), "=f"(v.y)
                 : "r"(address)
                 : "memory");
    return v;
}

/* ---- barriers ----------------------------------------------------------------------------------
 */

static __device__ __forceinline__ void barrier_init(uint32_t bar, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
static __device__ __forceinline__ void barrier_init_done()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
static __device__ __forceinline__ void barrier_expect(uint32_t bar, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
}
static __device__ __forceinline__ void barrier_arrive(uint32_t bar)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
/* Not .release.cluster, which waits for all of the memory: who arrives here has only read shared
 * memory through wgmma and has nothing to release. */
static __device__ __forceinline__ void barrier_arrive_at(uint32_t bar, uint32_t block)
{
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n}\n" ::"r"(bar),
                 "r"(block)
                 : "memory");
}
static __device__ __forceinline__ void barrier_wait(uint32_t bar, uint32_t parity)
{
    uint32_t done;
    do
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n}\n"
                     : "=r"(done)
                     : "r"(bar), "r"(parity)
                     : "memory");
    while (!done);
}
static __device__ __forceinline__ void barrier_threads(int id, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Counts for those who come to the barrier without waiting there. */
static __device__ __forceinline__ void barrier_threads_arrive(int id, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* One thread of a warp. */
static __device__ __forceinline__ bool elected()
{
    uint32_t is;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}\n"
                 : "=r"(is)::"memory");
    return is;
}

static __device__ __forceinline__ uint32_t cluster_rank()
{
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
/* All blocks of the cluster are there, and barriers initialised before barrier_init_done are seen;
 * nothing else is ordered, so that no write to memory is waited for. */
static __device__ __forceinline__ void cluster_meet()
{
    asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;\n" ::: "memory");
}
static __device__ __forceinline__ void cluster_sync()
{
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;\n" ::: "memory");
}

/* ---- bulk tensor copies ------------------------------------------------------------------------
 * A plain map has three dimensions: columns, rows, members. A ragged one shows rows [end - rows,
 * end) of a matrix: its boxes read zeros and write nothing outside them, wherever they lie. */

enum { RAGGED_ROWS = 1 << 30 };

template <bool SHARED>
static __device__ __forceinline__ void copy_in(uint32_t to, const CUtensorMap *map, uint32_t bar,
                                               int col, int row, int member, uint16_t blocks)
{
    if (SHARED)
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
                     ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
                     "l"((uint64_t)map), "r"(bar), "r"(col), "r"(row), "r"(member), "h"(blocks)
                     : "memory");
    else
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
                     " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
                     "l"((uint64_t)map), "r"(bar), "r"(col), "r"(row), "r"(member)
                     : "memory");
}
/* The box begins `row` rows into the segment. */
template <bool SHARED>
static __device__ __forceinline__ void copy_in_ragged(uint32_t to, const CUtensorMap *map,
                                                      uint32_t bar, int col, int end, int rows,
                                                      int row, uint16_t blocks)
{
    int from = RAGGED_ROWS - rows + row, wrap = RAGGED_ROWS;
    if (SHARED)
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                     ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
                     "l"((uint64_t)map), "r"(bar), "r"(col), "r"(from), "r"(wrap), "r"(end),
                     "h"(blocks)
                     : "memory");
    else
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                     " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
                     "l"((uint64_t)map), "r"(bar), "r"(col), "r"(from), "r"(wrap), "r"(end)
                     : "memory");
}
static __device__ __forceinline__ void copy_out(const CUtensorMap *map, uint32_t from, int col,
                                                int row, int member)
{
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], "
                 "[%1];" ::"l"((uint64_t)map),
                 "r"(from), "r"(col), "r"(row), "r"(member)
                 : "memory");
}
static __device__ __forceinline__ void copy_out_ragged(const CUtensorMap *map, uint32_t from,
                                                       int col, int end, int rows, int row)
{
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], "
                 "[%1];" ::"l"((uint64_t)map),
                 "r"(from), "r"(col), "r"(RAGGED_ROWS - rows + row), "r"(RAGGED_ROWS), "r"(end)
                 : "memory");
}
static __device__ __forceinline__ void copies_commit()
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/* Until all but the last N groups of stores have read their shared memory; have been done. */
template <int N> static __device__ __forceinline__ void copies_read()
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
template <int N> static __device__ __forceinline__ void copies_done()
{
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}
/* A run of bytes, a multiple of 16 and on 16. */
static __device__ __forceinline__ void copy_bytes(uint32_t to, const void *from, uint32_t bytes,
                                                  uint32_t bar)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], "
                 "%2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(bar)
                 : "memory");
}
static __device__ __forceinline__ void map_prefetch(const CUtensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"((uint64_t)map) : "memory");
}
/* What threads wrote to shared memory is seen by the copies after it. */
static __device__ __forceinline__ void shared_to_copies()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* ---- wgmma's surroundings ----------------------------------------------------------------------
 */

static __device__ __forceinline__ void wgmma_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
static __device__ __forceinline__ void wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N> static __device__ __forceinline__ void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
template <int N> static __device__ __forceinline__ void registers_up()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> static __device__ __forceinline__ void registers_down()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
