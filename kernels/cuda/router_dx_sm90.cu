/* dx of the router on Hopper, dx_add + dlogits wr, where experts are so few that the planes of wr
 * (router_tensor.cuh) stay in shared memory for 128 columns of dx. Blocks are persistent; each of
 * a block's warpgroups has tiles of 64 tokens of its own, whose planes it holds in registers. They
 * multiply in turns, so that one does while the others store. */
#include "kernels/cuda/gemm_sm90_kernel.cuh"
#include "kernels/cuda/router_sm90.cuh"

enum { TOKENS = 64, COLUMNS = 128, BOX = 8192, PLANES = MT_ROUTER_DX_PLANES, PAIRS = 3 };

/* Places in shared memory, of BLOCKS times 64 experts: boxes of 64 lines of 128 bytes. */
template <int BLOCKS> struct dx_room {
    enum {
        GROUPS = 3,        /* warpgroups */
        TURN = 1 + GROUPS, /* the barriers of their turns; before these, of each alone */
        WR = PLANES * BLOCKS * 2 * BOX,
        DLOGITS = PLANES * BLOCKS * BOX,
        RESULT = 2 * BOX,
        AT_DLOGITS = WR,
        AT_RESULT = AT_DLOGITS + GROUPS * DLOGITS,
        WR_FULL = AT_RESULT + GROUPS * RESULT,
        DLOGITS_FULL = WR_FULL + 8,
        OLD_FULL = DLOGITS_FULL + GROUPS * 8,
        BYTES = OLD_FULL + GROUPS * 8
    };
};

/* One thread of a warpgroup: the planes of a tile's dlogits; what is added, in the result's place.
 */
template <int BLOCKS>
static __device__ __forceinline__ void bring_dlogits(uint32_t base, const gemm_sm90_maps &maps,
                                                     int group, int tile)
{
    typedef dx_room<BLOCKS> room;
    const uint32_t bar = base + room::DLOGITS_FULL + group * 8;
    barrier_expect(bar, room::DLOGITS);
    for (int i = 0; i < PLANES * BLOCKS; i++)
        copy_in<false>(base + room::AT_DLOGITS + group * room::DLOGITS + i * BOX, &maps.q, bar,
                       i * 64, tile * TOKENS, 0, 0);
}
template <int BLOCKS>
static __device__ __forceinline__ void bring_old(uint32_t base, const gemm_sm90_maps &maps,
                                                 int group, int column, int tile)
{
    typedef dx_room<BLOCKS> room;
    const uint32_t bar = base + room::OLD_FULL + group * 8;
    barrier_expect(bar, room::RESULT);
    for (int i = 0; i < 2; i++)
        copy_in<false>(base + room::AT_RESULT + group * room::RESULT + i * BOX, &maps.c, bar,
                       column + i * 64, tile * TOKENS, 0, 0);
}

/* The planes of a tile's dlogits as wgmma takes them: four words of each 16 experts. */
template <int BLOCKS>
static __device__ __forceinline__ void read_dlogits(uint32_t (&a)[PLANES * BLOCKS * 16],
                                                    uint32_t from)
{
    const uint32_t lane = threadIdx.x % 32, line = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < PLANES * BLOCKS * 4; k++) {
        const uint32_t at = (k % 4 * 2 + lane / 16) ^ (line % 8);
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(a[k * 4]), "=r"(a[k * 4 + 1]), "=r"(a[k * 4 + 2]), "=r"(a[k * 4 + 3])
                     : "r"(from + k / 4 * BOX + line * 128 + at * 16)
                     : "memory");
    }
}

/* The products of planes, those of the first ones last, a group of their own: planes of dlogits lie
 * 0 1, those of wr 1 0. */
template <int BLOCKS>
static __device__ __forceinline__ void
multiply(float (&d)[COLUMNS / 2], const uint32_t (&a)[PLANES * BLOCKS * 16], uint32_t wr)
{
    constexpr uint64_t HIGH = (uint64_t)((1024u >> 4) | 1u << 30) << 32;
    const uint32_t q = (wr & 0x3ffff) >> 4 | 512u << 16;
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < PAIRS; s++) {
        const int of_dlogits = s == 1, of_wr = s > 0;
        if (s == PAIRS - 1) wgmma_commit();
#pragma unroll
        for (int k = 0; k < BLOCKS * 4; k++) /* 16 experts */
            wgmma_kept<COLUMNS, 1>(
                d, a + (of_dlogits * BLOCKS * 4 + k) * 4,
                HIGH | (q + (of_wr * BLOCKS + k / 4) * (2 * BOX >> 4) + k % 4 * 128), s + k > 0);
    }
    wgmma_commit();
}

template <int BLOCKS>
static __global__ void __launch_bounds__(dx_room<BLOCKS>::GROUPS * 128, 1)
    dx_kernel(const __grid_constant__ gemm_sm90_maps maps, int tiles, int columns, bool add)
{
    typedef dx_room<BLOCKS> room;
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t base = shared_address(shared);
    const int group = __shfl_sync(~0u, (int)threadIdx.x / 128, 0), thread = threadIdx.x % 128;
    const int64_t all = (int64_t)tiles * columns;
    const int end = (int)(all * (blockIdx.x + 1) / gridDim.x);
    const uint32_t dlogits = base + room::AT_DLOGITS + group * room::DLOGITS;
    const uint32_t result = base + room::AT_RESULT + group * room::RESULT;
    const int turn = room::TURN + group, after = room::TURN + (group + 1) % room::GROUPS;
    const sm90_factor by = { false, 1, 0, !add };
    uint32_t wr_parity = 0, parity = 0;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 1 + 2 * room::GROUPS; i++)
            barrier_init(base + room::WR_FULL + i * 8, 1);
        barrier_init_done();
    }
    if (group == room::GROUPS - 1) barrier_threads_arrive(after, 256);
    for (int at = (int)(all * blockIdx.x / gridDim.x), stop; at < end; at = stop) {
        const int block = at / tiles, first = block * tiles, column = block * COLUMNS;
        stop = min(end, first + tiles);
        __syncthreads(); /* the planes of wr have been read */
        if (threadIdx.x == 0) {
            barrier_expect(base + room::WR_FULL, room::WR);
            for (int i = 0; i < PLANES * BLOCKS * 2; i++)
                copy_in<false>(base + i * BOX, &maps.p, base + room::WR_FULL, column + i % 2 * 64,
                               i / 2 * 64, 0, 0);
        }
        if (thread == 0 && at + group < stop) {
            bring_dlogits<BLOCKS>(base, maps, group, at + group - first);
            if (add) bring_old<BLOCKS>(base, maps, group, column, at + group - first);
        }
        barrier_wait(base + room::WR_FULL, wr_parity);
        wr_parity ^= 1;
        for (int i = at + group; i - group < stop; i += room::GROUPS) {
            float d[COLUMNS / 2];
            uint32_t a[PLANES * BLOCKS * 16];
            const bool more = i + room::GROUPS < stop;
            if (i >= stop) { /* its turn goes by */
                barrier_threads(turn, 256);
                barrier_threads_arrive(after, 256);
                continue;
            }
            barrier_wait(base + room::DLOGITS_FULL + group * 8, parity);
            read_dlogits<BLOCKS>(a, dlogits);
            barrier_threads(1 + group, 128);
            if (thread == 0 && more)
                bring_dlogits<BLOCKS>(base, maps, group, i + room::GROUPS - first);
            barrier_threads(turn, 256);
            multiply<BLOCKS>(d, a, base);
            wgmma_wait<1>();
            barrier_threads_arrive(after, 256);
            wgmma_finish<COLUMNS, 0>(d);
            if (add) barrier_wait(base + room::OLD_FULL + group * 8, parity);
#pragma unroll
            for (int j = 0; j < COLUMNS / 32; j++)
                sm90_put_wgrad(result + j / 2 * BOX, &d[j * 16], true, j % 2 * 4, add, by);
            shared_to_copies();
            barrier_threads(1 + group, 128);
            if (thread == 0) {
                for (int j = 0; j < 2; j++)
                    copy_out(&maps.d, result + j * BOX, column + j * 64, (i - first) * TOKENS, 0);
                copies_commit();
                copies_read<0>();
                if (add && more)
                    bring_old<BLOCKS>(base, maps, group, column, i + room::GROUPS - first);
            }
            parity ^= 1;
        }
    }
    if (thread == 0) copies_done<0>();
}

mt_status mt_cuda_router_dx_kept(mt_stream *stream, const struct mt_router_bwd_args *a,
                                 int64_t columns, const void *dlogits, const void *wr)
{
    const size_t size = 2;
    gemm_sm90_matrix w = { "wr", wr, a->width, PLANES * columns, 1, 64, size };
    gemm_sm90_matrix y = { "dlogits", dlogits, MT_ROUTER_PLANES * columns, a->tokens, 1,
                           TOKENS,    size };
    gemm_sm90_matrix d = { "dx", a->dx, a->width, a->tokens, 1, TOKENS, size }, c = d;
    if (a->dx_add) c.data = a->dx_add;
    gemm_sm90_maps maps;
    MT_TRY(mt_cuda_gemm_sm90_map(&maps.p, &w));
    MT_TRY(mt_cuda_gemm_sm90_map(&maps.q, &y));
    MT_TRY(mt_cuda_gemm_sm90_map(&maps.d, &d));
    MT_TRY(mt_cuda_gemm_sm90_map(&maps.c, &c));
    const int64_t tiles = mt_ceil_div(a->tokens, TOKENS), blocks = mt_ceil_div(a->width, COLUMNS);
    const bool few = columns == 64;
    auto kernel = few ? dx_kernel<1> : dx_kernel<2>;
    const int bytes = few ? (int)dx_room<1>::BYTES : (int)dx_room<2>::BYTES;
    const int groups = few ? (int)dx_room<1>::GROUPS : (int)dx_room<2>::GROUPS;
    const int64_t most = mt_cuda_multiprocessors(stream),
                  wanted = mt_ceil_div(tiles * blocks, groups);
    MT_CUDA(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 bytes));
    kernel<<<(unsigned)(wanted < most ? wanted : most), groups * 128, bytes,
             mt_cuda_stream(stream)>>>(maps, (int)tiles, (int)blocks, a->dx_add != NULL);
    MT_LAUNCHED(stream, "router_bwd");
    return MT_OK;
}
