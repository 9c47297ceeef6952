/* Compute copies of weights, and gradients of biases. */
#include "kernels/cuda/element.cuh"

enum { THREADS = 256, COLS = 32, WARPS = 16, ROWS = 128, RUN = 4 };

/* ---- weights -----------------------------------------------------------------------------------
 * The GEMM reads a packed weight as it reads a compact one: both directions are the master cast to
 * dtype, in its order. */

size_t mt_cuda_packed_bytes(mt_dtype dtype, mt_dir dir, int64_t members, int64_t m, int64_t k)
{
    (void)dir;
    return (size_t)(members * m * k) * mt_dtype_size(dtype);
}

/* y and z (NULL: none) = x; `runs` of RUN elements are aligned, the rest is moved one by one. */
template <typename T>
static __global__ void pack_kernel(T *y, T *z, const mt_real<T> *x, int64_t count, int64_t runs)
{
    MT_GRID_STRIDE(i, runs)
    {
        mt_vec<mt_real<T>, RUN> from = ((const mt_vec<mt_real<T>, RUN> *)x)[i];
        mt_vec<T, RUN> to;
#pragma unroll
        for (int j = 0; j < RUN; j++) mt_put(&to.at[j], from.at[j]);
        ((mt_vec<T, RUN> *)y)[i] = to;
        if (z) ((mt_vec<T, RUN> *)z)[i] = to;
    }
    for (int64_t i = runs * RUN + (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count;
         i += (int64_t)gridDim.x * blockDim.x) {
        mt_put(y + i, x[i]);
        if (z) mt_put(z + i, x[i]);
    }
}

/* Values that have been rounded already, which may lie in the host's memory. */
static mt_status copy_halves(mt_stream *stream, void *y, void *z, const void *x, size_t bytes)
{
    MT_TRY(mt_device_copy_async(stream, y, x, bytes));
    return z ? mt_device_copy_async(stream, z, y, bytes) : MT_OK;
}

template <typename T>
static mt_status pack_weight(mt_stream *stream, const struct mt_pack_weight_args *args)
{
    int64_t count = mt_group_capacity(&args->out->group);
    T *row = (T *)args->out->dir[MT_ROW].codes, *col = (T *)args->out->dir[MT_COL].codes;
    T *y = row ? row : col, *z = col == y ? NULL : col;
    if (!count || !y) return MT_OK;
    if (args->halves) return copy_halves(stream, y, z, args->master, (size_t)count * sizeof(T));
    bool aligned = (uintptr_t)args->master % (RUN * sizeof(mt_real<T>)) == 0 &&
                   ((uintptr_t)y | (uintptr_t)z) % (RUN * sizeof(T)) == 0;
    int64_t runs = aligned ? count / RUN : 0;
    pack_kernel<T>
        <<<mt_blocks(stream, runs ? runs : count, THREADS), THREADS, 0, mt_cuda_stream(stream)>>>(
            y, z, (const mt_real<T> *)args->master, count, runs);
    MT_LAUNCHED(stream, "pack_weight");
    return MT_OK;
}
MT_CUDA_OP(pack_weight)

/* ---- bias gradients ----------------------------------------------------------------------------
 */

/* A block for each member and COLS of its columns. Each warp sums ROWS rows, then these sums are
 * added in order. */
template <typename T>
static __global__ void bias_grad_kernel(mt_group g, const T *dy, mt_real<T> *db, bool accumulate,
                                        int64_t parts)
{
    typedef mt_real<T> R;
    __shared__ R sums[WARPS][COLS];
    int64_t e = blockIdx.x / parts, j = blockIdx.x % parts * COLS + threadIdx.x % COLS;
    int64_t rows = mt_group_rows(&g, e), warp = threadIdx.x / COLS;
    const T *from = dy + mt_group_offset(&g, e) + j;
    R total = 0;
    for (int64_t base = 0; base < rows; base += WARPS * ROWS) {
        int64_t r0 = base + warp * ROWS, end = r0 + ROWS < rows ? r0 + ROWS : rows;
        R sum = 0;
        if (j < g.k) {
#pragma unroll 8
            for (int64_t r = r0; r < end; r++) sum += mt_get(from + r * g.k);
        }
        sums[warp][threadIdx.x % COLS] = sum;
        __syncthreads();
        for (int w = 0; warp == 0 && w < WARPS && base + w * ROWS < rows; w++)
            total += sums[w][threadIdx.x];
        __syncthreads();
    }
    if (warp == 0 && j < g.k) {
        R *to = db + e * g.k + j;
        *to = (accumulate ? *to : 0) + total;
    }
}

template <typename T>
static mt_status bias_grad(mt_stream *stream, const struct mt_bias_grad_args *args)
{
    const mt_group *g = &args->dy->group;
    int64_t parts = mt_ceil_div(g->k, COLS), blocks = g->members * parts;
    if (!blocks) return MT_OK;
    MT_REQUIRE(blocks <= INT32_MAX, MT_EUNSUPPORTED,
               "bias_grad: %lld blocks, a grid has at most %d", (long long)blocks, INT32_MAX);
    bias_grad_kernel<T><<<(unsigned)blocks, COLS * WARPS, 0, mt_cuda_stream(stream)>>>(
        *g, (const T *)args->dy->dir[MT_ROW].codes, (mt_real<T> *)args->db, args->accumulate,
        parts);
    MT_LAUNCHED(stream, "bias_grad");
    return MT_OK;
}
MT_CUDA_OP(bias_grad)
