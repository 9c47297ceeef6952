/* The router's products on tensor cores, for bf16 activations. A real is the sum of three bf16, 8
 * bits of its significand each (planes); a product of planes is exact in f32, and those of planes p
 * and q with p + q < PLANES give a product of reals to half a unit of f32. Tensor cores cut what
 * they add, so a sum is theirs over STEP terms only, the smallest products first, and such sums are
 * added in f32, rounded, in order. */
#pragma once

#include "kernels/cuda/router_product.cuh"

namespace mma
{

enum {
    PLANES = 3,
    STEP = 32,  /* terms that lie in shared memory together */
    STAGES = 3, /* of them on their way */
    ROWS = 128, /* of a tile */
    WARP = 32,  /* a warp's part of a tile: rows and columns */
    CHUNK = 8,  /* elements of 16 bytes */
    GAP = 8     /* elements between lines in shared memory, against bank conflicts */
};

/* Planes [planes, lines, line] of bf16, which begin at multiples of 16 bytes as their lines do. */
struct operand {
    const mt_bf16 *data;
    int64_t count; /* rows i of the product's A or B */
    int64_t line;  /* elements of a line: along the sum, or across it */
    int64_t plane; /* elements of a plane */
};

/* Elements of a line of planes. */
static inline int64_t line_of(int64_t cols)
{
    return mt_ceil_div(cols, CHUNK) * CHUNK;
}

static inline size_t plane_bytes(int64_t rows, int64_t cols)
{
    return mt_ceil_div(rows * line_of(cols) * PLANES * (int64_t)sizeof(mt_bf16), 256) * 256;
}

/* planes = x, real [rows, cols]; lines end in zeros. What is left of an Inf would be NaN, which no
 * plane but the first needs: 0. */
static __global__ void split_kernel(mt_bf16 *planes, const float *x, int64_t rows, int64_t cols,
                                    int64_t line)
{
    MT_GRID_STRIDE(i, rows * line)
    {
        int64_t c = i % line;
        float left = c < cols ? x[i / line * cols + c] : 0;
#pragma unroll
        for (int p = 0; p < PLANES; p++) {
            mt_bf16 high = __float2bfloat16_rn(left);
            planes[p * rows * line + i] = high;
            float rest = left - __bfloat162float(high);
            left = isfinite(rest) ? rest : 0;
        }
    }
}

static __device__ __forceinline__ void copy16(void *to, const void *from, int bytes)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     (uint32_t)__cvta_generic_to_shared(to)),
                 "l"(from), "r"(bytes));
}

/* Four 8 x 8 matrices; lane l gives the address of row l % 8 of matrix l / 8. */
template <bool TRANSPOSED>
static __device__ __forceinline__ void load_matrices(uint32_t r[4], const mt_bf16 *row)
{
    uint32_t at = (uint32_t)__cvta_generic_to_shared(row);
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(at));
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(at));
}

static __device__ __forceinline__ void multiply(float c[4], const uint32_t a[4],
                                                const uint32_t b[2])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* STEP terms of TILE rows of an operand in shared memory, a line of the operand to a line. */
template <int TILE, bool ALONG, int COUNT> struct stage {
    enum {
        LINES = ALONG ? TILE : STEP,
        WIDTH = ALONG ? STEP : TILE,
        PITCH = WIDTH + GAP,
        CHUNKS = WIDTH / CHUNK, /* of a line */
        ELEMENTS = COUNT * LINES * PITCH
    };

    /* Terms [k0, k0 + STEP) of rows [i0, i0 + TILE), zeros past `end` and past the rows. */
    static __device__ __forceinline__ void fetch(mt_bf16 *to, const operand &o, int64_t i0,
                                                 int64_t k0, int64_t end, int threads)
    {
        int64_t line0 = ALONG ? i0 : k0, lines = ALONG ? o.count : end;
        int64_t col0 = ALONG ? k0 : i0, cols = ALONG ? end : o.count;
#pragma unroll 1 /* addresses kept ahead would be spilled */
        for (int id = threadIdx.x; id < COUNT * LINES * CHUNKS; id += threads) {
            int c = id % CHUNKS * CHUNK, l = id / CHUNKS % LINES, p = id / (CHUNKS * LINES);
            int64_t left = line0 + l < lines ? cols - (col0 + c) : 0;
            int n = (int)(left < 0 ? 0 : left < CHUNK ? left : CHUNK);
            const mt_bf16 *from = o.data + p * o.plane + (line0 + l) * o.line + col0 + c;
            copy16(to + (p * LINES + l) * PITCH + c, n ? from : o.data, n * (int)sizeof(mt_bf16));
        }
    }

    /* Where lane l's row of four matrices lies that make 16 rows i from `i` on and 16 terms from
     * `k` on. Matrix m: rows 8 (m % 2), terms 8 (m / 2); SWAP: rows 8 (m / 2), terms 8 (m % 2). */
    template <bool SWAP>
    static __device__ __forceinline__ const mt_bf16 *row_of(const mt_bf16 *at, int p, int i, int k)
    {
        int m = threadIdx.x % 32 / 8, r = threadIdx.x % 8;
        i += 8 * (SWAP ? m / 2 : m % 2), k += 8 * (SWAP ? m % 2 : m / 2);
        return at + (ALONG ? (p * LINES + i + r) * PITCH + k : (p * LINES + k + r) * PITCH + i);
    }
};

/* A tile of ROWS x COLS; blocks as those of product_kernel. */
template <int COLS, bool A_ALONG, int A_PLANES, bool B_ALONG, int B_PLANES, typename Put>
static __global__ void __launch_bounds__(COLS * 4)
    product_kernel(operand a, operand b, int64_t depth, int64_t split, Put put)
{
    enum { THREADS = COLS * 4, MT = WARP / 16, NT = WARP / 8 };
    typedef stage<ROWS, A_ALONG, A_PLANES> in_a;
    typedef stage<COLS, B_ALONG, B_PLANES> in_b;
    enum { BOTH = in_a::ELEMENTS + in_b::ELEMENTS };
    extern __shared__ uint4 stages[]; /* vectors of 16 bytes */
    mt_bf16 *room = (mt_bf16 *)stages;
    int64_t i0 = (int64_t)blockIdx.x * ROWS, j0 = (int64_t)blockIdx.y * COLS;
    int64_t from = blockIdx.z * split, end = min(depth, from + split);
    int steps = (int)((end - from + STEP - 1) / STEP), lane = threadIdx.x % 32;
    int warp_i = threadIdx.x / 32 % (ROWS / WARP) * WARP;
    int warp_j = threadIdx.x / 32 / (ROWS / WARP) * WARP;
    bool idle = i0 + warp_i >= a.count || j0 + warp_j >= b.count;
    float sum[MT][NT][4] = {};
    for (int s = 0; s < STAGES - 1; s++) {
        mt_bf16 *to = room + s * BOTH;
        if (s < steps) {
            in_a::fetch(to, a, i0, from + s * STEP, end, THREADS);
            in_b::fetch(to + in_a::ELEMENTS, b, j0, from + s * STEP, end, THREADS);
        }
        asm volatile("cp.async.commit_group;");
    }
    for (int s = 0; s < steps; s++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
        __syncthreads(); /* this stage is there, and the one before is free */
        int next = s + STAGES - 1;
        if (next < steps) {
            mt_bf16 *to = room + next % STAGES * BOTH;
            in_a::fetch(to, a, i0, from + (int64_t)next * STEP, end, THREADS);
            in_b::fetch(to + in_a::ELEMENTS, b, j0, from + (int64_t)next * STEP, end, THREADS);
        }
        asm volatile("cp.async.commit_group;");
        if (idle) continue;
        const mt_bf16 *as = room + s % STAGES * BOTH, *bs = as + in_a::ELEMENTS;
        int terms = (int)min(end - from - (int64_t)s * STEP, (int64_t)STEP);
        float part[MT][NT][4] = {};
#pragma unroll
        for (int small = PLANES - 1; small >= 0; small--)
#pragma unroll
            for (int p = 0; p < A_PLANES; p++) {
                int q = small - p;
                if (q < 0 || q >= B_PLANES) continue;
#pragma unroll
                for (int k = 0; k < STEP; k += 16) {
                    if (k >= terms) continue;
                    uint32_t x[MT][4], y[NT / 2][4];
#pragma unroll
                    for (int m = 0; m < MT; m++)
                        load_matrices<!A_ALONG>(
                            x[m], in_a::template row_of<false>(as, p, warp_i + m * 16, k));
#pragma unroll
                    for (int n = 0; n < NT / 2; n++)
                        load_matrices<!B_ALONG>(
                            y[n], in_b::template row_of<true>(bs, q, warp_j + n * 16, k));
#pragma unroll
                    for (int m = 0; m < MT; m++)
#pragma unroll
                        for (int n = 0; n < NT; n++)
                            multiply(part[m][n], x[m], &y[n / 2][n % 2 * 2]);
                }
            }
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int c = 0; c < 4; c++) sum[m][n][c] += part[m][n][c];
    }
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int64_t i = i0 + warp_i + m * 16 + half * 8 + lane / 4;
                int64_t j = j0 + warp_j + n * 8 + lane % 4 * 2;
                if (i < a.count && j < b.count)
                    put.template put<2>(blockIdx.z, i, j, &sum[m][n][half * 2]);
            }
}

template <int COLS, bool A_ALONG, int A_PLANES, bool B_ALONG, int B_PLANES, typename Put>
static mt_status run(mt_stream *stream, const char *op, operand a, operand b, int64_t depth,
                     int64_t split, const Put &put)
{
    void (*kernel)(operand, operand, int64_t, int64_t, Put) =
        product_kernel<COLS, A_ALONG, A_PLANES, B_ALONG, B_PLANES, Put>;
    int64_t parts = split < depth ? mt_ceil_div(depth, split) : 1;
    int64_t steps = mt_ceil_div(parts > 1 ? split : depth, STEP); /* few take few stages */
    const int bytes =
        (int)(steps < STAGES ? steps : (int64_t)STAGES) * (int)sizeof(mt_bf16) *
        (stage<ROWS, A_ALONG, A_PLANES>::ELEMENTS + stage<COLS, B_ALONG, B_PLANES>::ELEMENTS);
    dim3 grid((unsigned)mt_ceil_div(a.count, ROWS), (unsigned)mt_ceil_div(b.count, COLS),
              (unsigned)parts);
    MT_CUDA(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 bytes));
    kernel<<<grid, COLS * 4, bytes, mt_cuda_stream(stream)>>>(a, b, depth, split, put);
    MT_LAUNCHED(stream, op);
    return MT_OK;
}

/* The planes of x, real [rows, cols], as an operand with `count` rows. */
static mt_status split(mt_stream *stream, const char *op, operand *o, void *planes, const void *x,
                       int64_t rows, int64_t cols, int64_t count)
{
    int64_t line = line_of(cols);
    *o = { (const mt_bf16 *)planes, count, line, rows * line };
    split_kernel<<<mt_blocks(stream, rows * line, 256), 256, 0, mt_cuda_stream(stream)>>>(
        (mt_bf16 *)planes, (const float *)x, rows, cols, line);
    MT_LAUNCHED(stream, op);
    return MT_OK;
}

/* Whether x, [.., width] of T, is an operand as it lies, on a card with the shared memory. */
template <typename T> static bool takes(const mt_stream *stream, const void *x, int64_t width)
{
    return mt_dtype_of<T>::value == MT_BF16 && mt_cuda_is_hopper(stream) && width % CHUNK == 0 &&
           (uintptr_t)x % 16 == 0;
}

} /* namespace mma */
