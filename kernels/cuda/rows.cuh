/* What moves and sums rows of activations by a route plan. */
#pragma once

#include "kernels/cuda/words.cuh"

/* Whether rows of row_bytes in each of the operands, NULL or not, are whole vectors of 16 bytes. */
static inline bool mt_rows_aligned(const void *const operands[], int count, int64_t row_bytes)
{
    uintptr_t all = (uintptr_t)row_bytes;
    for (int i = 0; i < count; i++) all |= (uintptr_t)operands[i];
    return all % 16 == 0;
}

/* y[r] = x[index[r]], r < rows, columns [first, last): rows of n pieces V; where index is negative
 * the row stays as it is. A warp takes four rows, all warps of the grid's x take part. */
template <typename V>
static __device__ __forceinline__ void mt_copy_rows(V *y, const V *x, const int32_t *index,
                                                    int64_t rows, int64_t n, int64_t first,
                                                    int64_t last)
{
    enum { ROWS = 4 };
    const int64_t warp = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    const int64_t step = (int64_t)gridDim.x * (blockDim.x / 32) * ROWS;
    for (int64_t r = warp * ROWS; r < rows; r += step) {
        int32_t from[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++) from[i] = r + i < rows ? index[r + i] : -1;
        for (int64_t c = first + threadIdx.x % 32; c < last; c += 32) {
            V in[ROWS];
#pragma unroll
            for (int i = 0; i < ROWS; i++)
                if (from[i] >= 0) in[i] = x[from[i] * n + c];
#pragma unroll
            for (int i = 0; i < ROWS; i++)
                if (from[i] >= 0) __stcs(y + (r + i) * n + c, in[i]);
        }
    }
}

/* Columns that warps take one after another: as many pieces of 16 bytes as let what is read of all
 * `tokens` rows stay in the cache while it is read for each of them again. */
static inline int64_t mt_row_part(int64_t tokens, int64_t n)
{
    enum { ROOM = 6 << 20, LEAST = 32 };
    int64_t part = LEAST;
    while (part < n && 2 * part * tokens * 16 <= ROOM) part *= 2;
    return part < n ? part : n;
}

/* The part of a token's row that a warp sums: vectors [.., n) by 32 lanes. */
struct mt_row_place {
    int64_t token, column;
};
static __host__ __device__ __forceinline__ int64_t mt_row_groups(int64_t n)
{
    return (n + 31) / 32;
}
static __device__ __forceinline__ struct mt_row_place mt_row_place_of(int64_t warp, int64_t groups)
{
    int64_t token = (warp >> 32) == 0 ? (uint32_t)warp / (uint32_t)groups : warp / groups;
    return { token, (warp - token * groups) * 32 + threadIdx.x % 32 };
}

/* sum += [weights[slot]] x[position[slot] n], slots in order, those at -1 left out. Loads run SLOTS
 * ahead of the sums. */
template <typename T, int N, bool WEIGHTED>
static __device__ __forceinline__ void mt_add_slots(mt_real<T> sum[N], const mt_words<T, N> *x,
                                                    int64_t n, const int32_t *position,
                                                    const mt_real<T> *weights, int64_t top_k)
{
    enum { SLOTS = 4 };
    for (int64_t first = 0; first < top_k; first += SLOTS) {
        mt_words<T, N> in[SLOTS];
        mt_real<T> w[SLOTS], e[N];
        int32_t row[SLOTS];
#pragma unroll
        for (int s = 0; s < SLOTS; s++) row[s] = first + s < top_k ? position[first + s] : -1;
#pragma unroll
        for (int s = 0; s < SLOTS; s++) {
            if (row[s] < 0) continue;
            in[s] = x[row[s] * n];
            if (WEIGHTED) w[s] = weights[first + s];
        }
#pragma unroll
        for (int s = 0; s < SLOTS; s++) {
            if (row[s] < 0) continue;
            mt_open<T, N>(e, in[s]);
#pragma unroll
            for (int j = 0; j < N; j++) sum[j] += WEIGHTED ? w[s] * e[j] : e[j];
        }
    }
}

/* to[position[token, slot]] = [weights[token, slot]] x[token], but where position is -1: a warp
 * reads 32 vectors of a token's row once for all of its rows. */
template <typename T, int N, bool WEIGHTED>
static __device__ __forceinline__ void
mt_spread_rows(mt_words<T, N> *to, const mt_words<T, N> *x, int64_t tokens, int64_t n,
               const int32_t *positions, const mt_real<T> *weights, int64_t top_k)
{
    enum { SLOTS = 8 };
    const int64_t groups = mt_row_groups(n), warps = (int64_t)gridDim.x * (blockDim.x / 32);
    int64_t warp = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    for (; warp < tokens * groups; warp += warps) {
        const struct mt_row_place p = mt_row_place_of(warp, groups);
        const int32_t *position = positions + p.token * top_k;
        if (p.column >= n) continue;
        const mt_words<T, N> *from = x + p.token * n + p.column;
        const mt_words<T, N> in = WEIGHTED ? *from : __ldcs(from);
        for (int64_t first = 0; first < top_k; first += SLOTS) {
            mt_real<T> e[N], w[SLOTS];
            int32_t row[SLOTS];
#pragma unroll
            for (int s = 0; s < SLOTS; s++) {
                row[s] = first + s < top_k ? position[first + s] : -1;
                if (WEIGHTED) w[s] = first + s < top_k ? weights[p.token * top_k + first + s] : 0;
            }
            if (WEIGHTED) mt_open<T, N>(e, in);
#pragma unroll
            for (int s = 0; s < SLOTS; s++) {
                mt_words<T, N> *at = to + row[s] * n + p.column;
                if (row[s] < 0) continue;
                if constexpr (WEIGHTED) {
                    mt_real<T> out[N];
#pragma unroll
                    for (int j = 0; j < N; j++) out[j] = w[s] * e[j];
                    __stcs(at, mt_close<T, N>(out));
                } else {
                    mt_store(at, in);
                }
            }
        }
    }
}

/* A block for each `warps` parts of rows: in the card's own order of blocks the rows that are
 * written at a time lie closer than with blocks that stay. */
static inline unsigned mt_spread_blocks(int64_t tokens, int64_t n, int warps)
{
    return (unsigned)mt_ceil_div(tokens * mt_row_groups(n), warps);
}
