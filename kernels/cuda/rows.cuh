/* What moves and sums rows of activations by a route plan. */
#pragma once

#include "kernels/cuda/element.cuh"

/* Whether rows of row_bytes in each of the operands, NULL or not, are whole vectors of 16 bytes. */
static inline bool mt_rows_aligned(const void *const operands[], int count, int64_t row_bytes)
{
    uintptr_t all = (uintptr_t)row_bytes;
    for (int i = 0; i < count; i++) all |= (uintptr_t)operands[i];
    return all % 16 == 0;
}

/* sum += [weights[slot]] x[position[slot] n], slots in order, those at -1 left out. Loads run SLOTS
 * ahead of the sums. */
template <typename T, int N, bool WEIGHTED>
static __device__ __forceinline__ void mt_add_slots(mt_real<T> sum[N], const mt_vec<T, N> *x,
                                                    int64_t n, const int32_t *position,
                                                    const mt_real<T> *weights, int64_t top_k)
{
    enum { SLOTS = 4 };
    for (int64_t first = 0; first < top_k; first += SLOTS) {
        mt_vec<T, N> in[SLOTS];
        mt_real<T> w[SLOTS];
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
#pragma unroll
            for (int j = 0; j < N; j++) {
                mt_real<T> e = mt_get(&in[s].at[j]);
                sum[j] += WEIGHTED ? w[s] * e : e;
            }
        }
    }
}
