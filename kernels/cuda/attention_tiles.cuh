/* What attention's kernels on tensor cores are made of (attention_mma.cuh): how elements meet
 * these, tiles in shared memory, products of tiles, rows of results. */
#pragma once

#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/mma.cuh"

/* How elements meet the tensor cores: their planes, the columns of a tile, how many blocks of 16
 * rows forward gives to each of how many warps, and the exponential. Probabilities and the
 * gradients of scores are rounded to the planes where they meet the next product: to bf16 as on the
 * CPU's tiles. */
template <typename T> struct form;
template <> struct form<mt_bf16> {
    enum { PLANES = 1, STEP = 64, TILES = STEP / 8, FWD_MT = 2, FWD_WARPS = 4 };
    static constexpr double LOG = M_LOG2E; /* of e, to the exponential's base */
    static __device__ __forceinline__ float exponential(float x) { return mt_exp2(x); }
};
template <> struct form<float> {
    enum { PLANES = 3, STEP = 32, TILES = STEP / 8, FWD_MT = 1, FWD_WARPS = 8 };
    static constexpr double LOG = 1;
    static __device__ __forceinline__ float exponential(float x) { return expf(x); }
};

/* Rows of D elements in shared memory, padded so that the same columns of eight rows lie in
 * different banks. */
template <int D> struct padded {
    enum { PITCH = D + 8 };
};

/* ---- copies -----------------------------------------------------------------------------------
 */

/* to [ROWS][PITCH] = `count` rows of `dim`, `pitch` apart; the others, and columns up to D, 0. A
 * tile spans less than 2^31 elements (suits). */
template <int D, int ROWS, int THREADS, int PITCH = padded<D>::PITCH, typename T>
static __device__ __forceinline__ void copy_rows(T *to, const T *from, int64_t pitch, int64_t count,
                                                 int64_t dim)
{
    enum { RUN = 16 / sizeof(T), EACH = D / RUN, LINES = THREADS / EACH };
    int r = (int)threadIdx.x / EACH, c = (int)threadIdx.x % EACH * RUN, line = (int)pitch;
    int rows = c < dim ? (int)(count < ROWS ? count : ROWS) : 0;
    if (THREADS % EACH && r >= LINES) return;
    to += r * PITCH + c;
#pragma unroll
    for (int i = 0; i < ROWS; i += LINES) {
        bool valid = i + r < rows;
        if (ROWS % LINES && i + r >= ROWS) break;
        mt_copy_ask<16>(to + i * PITCH, from + (valid ? (i + r) * line + c : 0), valid ? 16 : 0);
    }
}

/* Two elements as planes, a word each. */
template <int PLANES>
static __device__ __forceinline__ void split(uint32_t (&plane)[PLANES], float2 x)
{
#pragma unroll
    for (int p = 0; p < PLANES; p++) {
        plane[p] = mt_pack(x.x, x.y);
        x.x -= __uint_as_float(plane[p] << 16), x.y -= __uint_as_float(plane[p] & 0xffff0000);
    }
}

/* Where a block's steps lie: tiles of STEP rows of two matrices, each with all its planes. Of bf16
 * there are two steps of these, of which one is asked for while the other is multiplied; of f32
 * one, and what is asked for lies apart until it is split. */
template <typename T, int D> struct steps {
    enum {
        PLANES = form<T>::PLANES,
        STEP = form<T>::STEP,
        PITCH = padded<D>::PITCH,
        TILE = STEP * PITCH, /* of a plane */
        MATRIX = PLANES * TILE,
        ASKED_PITCH = PLANES == 1 ? (int)PITCH : D,
        ASKED = STEP * ASKED_PITCH, /* of a matrix that is asked for */
        BYTES = 2 * (PLANES == 1 ? 2 * MATRIX : (int)MATRIX) * (int)sizeof(mt_bf16) +
                (PLANES == 1 ? 0 : 2 * ASKED * (int)sizeof(T))
    };
    T *memory;

    /* The place of matrix `which` of a step of that parity. */
    __device__ __forceinline__ T *asked(int parity, int which) const
    {
        return memory + (PLANES == 1 ? parity * 2 * ASKED : 0) + which * ASKED;
    }
    /* What has come as it is multiplied; all threads. */
    template <int THREADS> __device__ __forceinline__ const mt_bf16 *landed(int parity) const
    {
        if constexpr (PLANES == 1) {
            return memory + parity * 2 * MATRIX;
        } else {
            mt_bf16 *to = (mt_bf16 *)(memory + 2 * ASKED);
#pragma unroll
            for (int first = 0; first < 2 * ASKED / 4; first += THREADS) {
                const int i = first + (int)threadIdx.x, row = i / (D / 4);
                if (2 * ASKED / 4 % THREADS && i >= 2 * ASKED / 4) break;
                const float4 x = ((const float4 *)memory)[i];
                uint32_t a[PLANES], b[PLANES];
                split(a, make_float2(x.x, x.y)), split(b, make_float2(x.z, x.w));
#pragma unroll
                for (int p = 0; p < PLANES; p++)
                    *(uint2 *)(to + row / STEP * MATRIX + p * TILE + row % STEP * PITCH +
                               i % (D / 4) * 4) = make_uint2(a[p], b[p]);
            }
            __syncthreads();
            return to;
        }
    }
};

/* ---- products ---------------------------------------------------------------------------------
 */

/* Fragments of all planes: of 16 rows and 16 of the depth; of 16 of the depth and 32 columns. */
template <int PLANES> struct left_fragments {
    uint32_t of[PLANES][4];
};
template <int PLANES> struct right_fragments {
    uint32_t of[PLANES][2][4];
};

/* Of sum [MT][N], COUNT columns of tiles from n on, if there are so many; the smallest products
 * first. Sums that wait for each other lie far apart. */
template <int MT, int COUNT, int N, int PLANES>
static __device__ __forceinline__ void multiply(float (*sum)[N][4],
                                                const left_fragments<PLANES> (&left)[MT],
                                                const right_fragments<PLANES> &right, int n)
{
#pragma unroll
    for (int both = PLANES - 1; both >= 0; both--)
#pragma unroll
        for (int q = 0; q <= both; q++)
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int j = 0; j < COUNT && n + j < N; j++)
                    mt_mma(sum[m][n + j], left[m].of[both - q], right.of[q][j / 2][j % 2 * 2],
                           right.of[q][j / 2][j % 2 * 2 + 1]);
}

/* A lane's place in a block's own rows, and what it reads there. */
template <int D> static __device__ __forceinline__ const mt_bf16 *own_place(const mt_bf16 *a)
{
    const int lane = threadIdx.x % 32;
    return a + (lane % 16) * padded<D>::PITCH + lane / 16 * 8;
}
template <int D> static __device__ __forceinline__ const float *own_place(const float *a)
{
    const int lane = threadIdx.x % 32;
    return a + (lane / 4) * padded<D>::PITCH + lane % 4 * 2;
}
template <int D>
static __device__ __forceinline__ void load_own(left_fragments<1> &left, const mt_bf16 *a)
{
    mt_load_matrices(left.of[0], a);
}
template <int D, int PLANES>
static __device__ __forceinline__ void load_own(left_fragments<PLANES> &left, const float *a)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t plane[PLANES];
        split(plane, *(const float2 *)(a + i % 2 * 8 * padded<D>::PITCH + i / 2 * 8));
#pragma unroll
        for (int p = 0; p < PLANES; p++) left.of[p][i] = plane[p];
    }
}

/* sum [16 MT, STEP] = a b^T: a [16 MT, D], b [STEP, D] in shared memory. */
template <int D, int MT, typename T>
static __device__ __forceinline__ void inner_products(float (*sum)[form<T>::TILES][4], const T *a,
                                                      const mt_bf16 *b)
{
    enum {
        PITCH = padded<D>::PITCH,
        PLANES = form<T>::PLANES,
        TILES = form<T>::TILES,
        TILE = steps<T, D>::TILE,
        COUNT = PLANES == 1 ? 2 : 4
    };
    int lane = threadIdx.x % 32;
    a = own_place<D>(a);
    b += (lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 8;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) sum[m][n][e] = 0;
#pragma unroll
    for (int d = 0; d < D; d += 16) {
        left_fragments<PLANES> left[MT];
        right_fragments<PLANES> right;
#pragma unroll
        for (int m = 0; m < MT; m++) load_own<D>(left[m], a + m * 16 * PITCH + d);
#pragma unroll
        for (int n = 0; n < TILES; n += COUNT) {
#pragma unroll
            for (int q = 0; q < PLANES; q++)
#pragma unroll
                for (int j = 0; j < COUNT; j += 2)
                    mt_load_matrices(right.of[q][j / 2], b + q * TILE + (n + j) * 8 * PITCH + d);
            multiply<MT, COUNT>(sum, left, right, n);
        }
    }
}

/* sum [16 MT, D] += p b: p [16 MT, STEP] as a product left it, b [STEP, D] in shared memory. */
template <typename T, int D, int MT>
static __device__ __forceinline__ void
add_product(float (*sum)[D / 8][4], const float (*p)[form<T>::TILES][4], const mt_bf16 *b)
{
    enum { PITCH = padded<D>::PITCH, PLANES = form<T>::PLANES, TILE = steps<T, D>::TILE };
    int lane = threadIdx.x % 32;
    b += (lane % 16) * PITCH + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < form<T>::TILES; k += 2) {
        left_fragments<PLANES> left[MT];
        right_fragments<PLANES> right;
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float *x = &p[m][k + i / 2][i % 2 * 2];
                uint32_t plane[PLANES];
                split(plane, make_float2(x[0], x[1]));
#pragma unroll
                for (int q = 0; q < PLANES; q++) left[m].of[q][i] = plane[q];
            }
#pragma unroll
        for (int n = 0; n < D / 8; n += 4) {
#pragma unroll
            for (int q = 0; q < PLANES; q++)
#pragma unroll
                for (int j = 0; j < 4 && n + j < D / 8; j += 2)
                    mt_load_transposed(right.of[q][j / 2],
                                       b + q * TILE + k * 8 * PITCH + (n + j) * 8);
            multiply<MT, 4>(sum, left, right, n);
        }
    }
}

/* Of a 16 x 8 product a lane holds elements e: row row_in(e), columns column_in(e). */
static __device__ __forceinline__ int row_in(int e)
{
    return threadIdx.x % 32 / 4 + e / 2 * 8;
}
static __device__ __forceinline__ int column_in(int e)
{
    return threadIdx.x % 4 * 2 + e % 2;
}

static __device__ __forceinline__ void store_two(mt_bf16 *to, float x, float y)
{
    *(uint32_t *)to = mt_pack(x, y);
}
static __device__ __forceinline__ void store_two(float *to, float x, float y)
{
    *(float2 *)to = make_float2(x, y);
}

/* The first `count` rows of to, `pitch` apart, = scale * sum [16, D]; for each of a lane's two. Of
 * D columns the first `dim`. */
template <int D, typename T>
static __device__ __forceinline__ void store_rows(T *to, int64_t pitch, int64_t count, int64_t dim,
                                                  const float (*sum)[4], const float *scale)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int r = row_in(2 * i);
        if (r >= count) continue;
        T *row = to + r * pitch + column_in(0);
#pragma unroll
        for (int n = 0; n < D / 8; n++)
            if (n * 8 < dim)
                store_two(row + n * 8, scale[i] * sum[n][2 * i], scale[i] * sum[n][2 * i + 1]);
    }
}

/* What a block owns: the rows from `row` on of head h of sequence b. Blocks with the longest sums
 * are started first, those of one row beside each other. */
struct own {
    int64_t row, h, b;
};

static __device__ __forceinline__ struct own own_of(const struct mt_attention_shape &s,
                                                    int64_t heads, int size, bool last_first)
{
    int64_t tiles = mt_ceil_div(s.sequence, size), each = heads * s.batch;
    int64_t i = blockIdx.x / each, rest = blockIdx.x % each;
    return { (last_first ? tiles - 1 - i : i) * size, rest % heads, rest / heads };
}
