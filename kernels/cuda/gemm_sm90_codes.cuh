/* fp8 codes on the Hopper GEMM: what the tensor cores summed over a step of the depth, added to the
 * sums by the scales of the step. Included by gemm_sm90_consumer.cuh. */
#pragma once

/* The scales of a step, as a thread multiplies its sums by them: NT, of its two rows of P, and of
 * its columns. They come before the tensor cores begin: shared memory is then busy with what these
 * read, and answers late. Scales that registers do not hold all are read in between. */
template <class C, int N> struct sm90_scales {
    enum {
        GROUPS = C::PACKED ? 4 : 2, /* of eight columns, in 16 bytes */
        COUNT = (N / 8 + GROUPS - 1) / GROUPS,
        MOST = C::WGRAD ? 3 : 6,
        FIRST = COUNT < (int)MOST ? (int)COUNT : (int)MOST,
        LATE = C::SCALED && COUNT > FIRST
    };
    uint32_t line;
    float above, below;
    float4 first[FIRST];

    __device__ __forceinline__ float4 four(int i) const { return shared_four(line + i * 64); }
    __device__ __forceinline__ void begin(uint32_t scales)
    {
        const uint32_t thread = thread_now(); /* warps 4 to 11 have 16 rows of P each */
        const uint32_t row = C::WGRAD ? (thread / 32 - 4) * 16 + thread % 32 / 4 : 0;
        const uint32_t rows = scales + C::SCALES_P + row * 4;
        line = scales + thread % 4 * 16;
        above = C::WGRAD ? __int_as_float(shared_now(rows)) : 1;
        below = C::WGRAD ? __int_as_float(shared_now(rows + 32)) : 1;
#pragma unroll
        for (int i = 0; i < FIRST; i++) first[i] = four(i);
    }
    /* Nothing is made of them before. */
    __device__ __forceinline__ void settle()
    {
#pragma unroll
        for (int i = 0; i < FIRST; i++)
            asm volatile(""
                         : "+f"(first[i].x), "+f"(first[i].y), "+f"(first[i].z), "+f"(first[i].w));
    }
};

/* What the tensor cores summed over 128 of the depth, to the sums, or, FIRST, in their place: as it
 * is, or by the scales of the columns and of the rows. */
template <class C, int N, bool FIRST>
static __device__ __forceinline__ void
sm90_promote(float (&d)[WGMMA_SUMS], float (&part)[WGMMA_SUMS], const sm90_scales<C, N> &scales)
{
    if constexpr (!C::SCALED) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) d[i] = (FIRST ? 0 : d[i]) + part[i];
    } else {
        constexpr int GROUPS = sm90_scales<C, N>::GROUPS, READY = sm90_scales<C, N>::FIRST;
#pragma unroll
        for (int i = 0; i < N / 8; i += GROUPS) {
            const int at = i / GROUPS;
            const float4 four = at < READY ? scales.first[at < READY ? at : 0] : scales.four(at);
            const float word[4] = { four.x, four.y, four.z, four.w };
#pragma unroll
            for (int j = i; j < i + GROUPS && j < N / 8; j++) {
                const uint32_t pair = __float_as_uint(word[j - i]);
                const float s[2] = {
                    C::PACKED ? __uint_as_float(pair << 16) : word[(j - i) * 2 % 4],
                    C::PACKED ? __uint_as_float(pair & 0xffff0000u) : word[(j - i) * 2 % 4 + 1]
                };
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float x = s[e % 2];
                    if (C::WGRAD) x *= e < 2 ? scales.above : scales.below;
                    d[j * 4 + e] = fma(part[j * 4 + e], x, FIRST ? 0 : d[j * 4 + e]);
                }
            }
        }
    }
}
