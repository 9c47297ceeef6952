/* mt_gather_fwd on Hopper: rows go through shared memory by bulk copies, and no registers. A warp
 * brings as many rows as a stage has room for, a lane each, and stores them as one run. */
#include "kernels/cuda/gather_sm90.cuh"
#include "kernels/cuda/gemm_sm90_ptx.cuh"

namespace {
enum {
    STAGES = 6,
    STAGE = 16 << 10,
    STORING = 2, /* stages whose stores may still be reading */
    BYTES = STAGES * STAGE + STAGES * 8,
    PER_MULTIPROCESSOR = 2
};
}

static __global__ void __launch_bounds__(32)
    gather_kernel(struct mt_gather_fwd_args a, uint32_t row_bytes, int rows_of_stage)
{
    extern __shared__ __align__(128) uint8_t shared[];
    const uint32_t base = shared_address(shared), full = base + STAGES * STAGE;
    const int64_t rows = min(a.rows, *a.rows_used), step = (int64_t)gridDim.x * rows_of_stage;
    const int lane = (int)threadIdx.x;
    if (lane == 0) {
        for (int i = 0; i < STAGES; i++) barrier_init(full + i * 8, 1);
        barrier_init_done();
    }
    __syncwarp();
    auto token_of = [&](int64_t first) {
        const int64_t r = first + lane;
        return lane < rows_of_stage && r < rows ? a.row_token[r] : 0;
    };
    int64_t brought = (int64_t)blockIdx.x * rows_of_stage;
    int32_t token = token_of(brought);
    auto bring = [&](int stage) {
        if (brought >= rows) return;
        const int n = (int)min((int64_t)rows_of_stage, rows - brought);
        if (lane == 0) barrier_expect(full + stage * 8, n * row_bytes);
        __syncwarp();
        if (lane < n)
            copy_bytes(base + stage * STAGE + lane * row_bytes,
                       (const uint8_t *)a.x + token * (int64_t)row_bytes, row_bytes,
                       full + stage * 8);
        brought += step;
        token = token_of(brought);
    };
    for (int i = 0; i < STAGES - STORING; i++) bring(i);
    int stage = 0, next = STAGES - STORING;
    uint32_t parity = 0;
    for (int64_t r = (int64_t)blockIdx.x * rows_of_stage; r < rows; r += step) {
        barrier_wait(full + stage * 8, parity);
        if (lane == 0) {
            copy_bytes_out((uint8_t *)a.y + r * row_bytes, base + stage * STAGE,
                           (uint32_t)min((int64_t)rows_of_stage, rows - r) * row_bytes);
            copies_commit();
            copies_read<STORING>(); /* the stage that is brought into now is free */
        }
        __syncwarp();
        bring(next);
        if (++stage == STAGES) stage = 0, parity ^= 1;
        if (++next == STAGES) next = 0;
    }
    if (lane == 0) copies_done<0>();
}

bool mt_cuda_gather_sm90_suits(const struct mt_gather_fwd_args *a, int64_t row_bytes)
{
    return row_bytes <= STAGE && a->tokens <= INT32_MAX;
}

mt_status mt_cuda_gather_sm90(mt_stream *stream, const struct mt_gather_fwd_args *a,
                              int64_t row_bytes)
{
    const int64_t room = STAGE / row_bytes, each = room < 32 ? room : 32;
    const int64_t most = (int64_t)mt_cuda_multiprocessors(stream) * PER_MULTIPROCESSOR;
    const int64_t wanted = mt_ceil_div(a->rows, each);
    MT_CUDA(cudaFuncSetAttribute((const void *)gather_kernel,
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES));
    gather_kernel<<<(unsigned)(wanted < most ? wanted : most), 32, BYTES, mt_cuda_stream(stream)>>>(
        *a, (uint32_t)row_bytes, (int)each);
    MT_LAUNCHED(stream, "gather_fwd");
    return MT_OK;
}
