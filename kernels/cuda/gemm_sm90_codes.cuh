/* fp8 codes on the Hopper GEMM: what the tensor cores summed over a step of the depth, added to the
 * sums by the scales of the step. Included by gemm_sm90_consumer.cuh. */
#pragma once

/* The scales of a step, as a thread multiplies its sums by them: NT, of its two rows of P, and of
 * its columns. They come before the tensor cores are done: shared memory is busy with what these
 * read, and answers late. Where registers do not hold all, those of some columns give way to those
 * of the ones that come MOST later. With BLOCKS_M 2, whose sums are
 * twice as many, one or two of them fit. */
template <class C, int N> struct sm90_scales {
    enum {
        GROUPS = C::PACKED ? 4 : 2, /* of eight columns, in 16 bytes */
        COUNT = (N / 8 + GROUPS - 1) / GROUPS,
        MOST = C::WGRAD          ? 3
               : C::BLOCKS_M > 1 ? (N > 136 ? 1 : 2)
               : C::PACKED       ? 6
                                 : 5,
        FIRST = COUNT < (int)MOST ? (int)COUNT : (int)MOST
    };
    uint32_t line_at, rows_at, line; /* in the scales of a step */
    float above, below;
    float4 next[FIRST];

    __device__ __forceinline__ sm90_scales()
    {
        const uint32_t thread = thread_now(); /* warps have 16 rows of P each, from the fourth on */
        line_at = thread % 4 * 16 + (C::BLOCKS_M > 1 ? (thread / 128 - 1) * C::SCALES_P : 0);
        rows_at = C::SCALES_P + ((thread / 32 - 4) * 16 + thread % 32 / 4) * 4;
    }
    __device__ __forceinline__ void bring(int i) { next[i % FIRST] = shared_four(line + i * 64); }
    __device__ __forceinline__ void begin(uint32_t scales)
    {
        line = scales + line_at;
        above = C::WGRAD ? __int_as_float(shared_now(scales + rows_at)) : 1;
        below = C::WGRAD ? __int_as_float(shared_now(scales + rows_at + 32)) : 1;
#pragma unroll
        for (int i = 0; i < FIRST; i++) bring(i);
    }
    /* Whether all have been asked for before those of this column are used. */
    static constexpr bool all_before(int column)
    {
        return COUNT - FIRST <= column / 8 / GROUPS;
    }
    /* They are here; nothing is made of them before. */
    __device__ __forceinline__ void settle()
    {
#pragma unroll
        for (int i = 0; i < FIRST; i++)
            asm volatile("" : "+f"(next[i].x), "+f"(next[i].y), "+f"(next[i].z), "+f"(next[i].w));
    }
};

/* BY_ROWS: of two rows of P, by those of each 64 columns; LEVELED: of all columns, in TN (ONE) of
 * all rows of a warpgroup, too, in NT of two rows of each 64. */
template <class C> struct sm90_row_scales {
    enum {
        COLUMNS = C::LEVELED ? (int)C::WIDTH : 64,
        ONE = C::LEVELED && !C::WGRAD,
        BLOCKS = ONE || !C::LEVELED ? C::WIDTH / COLUMNS : (int)C::BLOCKS_M,
        APART = (C::LEVELED ? 64 : (int)C::TILE) * 4
    };
    uint32_t rows_at;
    float above[BLOCKS], below[BLOCKS];

    __device__ __forceinline__ sm90_row_scales()
    {
        const uint32_t thread = thread_now();
        rows_at = ONE ? (thread / 128 - 1) * 4 : ((thread / 32 - 4) * 16 + thread % 32 / 4) * 4;
        if (!ONE && C::BLOCKS_M > 1) rows_at += (thread / 128 - 1) * (C::BLOCKS_M - 1) * 256;
    }
    static constexpr bool all_before(int) { return true; }
    __device__ __forceinline__ void begin(uint32_t scales)
    {
        const uint32_t rows = scales + rows_at;
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            above[b] = __int_as_float(shared_now(rows + b * APART));
            below[b] = ONE ? above[b] : __int_as_float(shared_now(rows + b * APART + 32));
        }
    }
    __device__ __forceinline__ void settle()
    {
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) asm volatile("" : "+f"(above[b]), "+f"(below[b]));
    }
};

/* What the tensor cores summed over 128 of the depth for columns FROM to TO, to the sums, or,
 * FIRST, in their place: as it is, or by the scales of the columns and of the rows. BACK: from the
 * last columns to the first, by the scales that those of 64 rows before have left. */
template <class C, int FROM, int TO, bool FIRST, bool BACK, class S>
static __device__ __forceinline__ void sm90_promote(float (&d)[C::WIDTH / 2], const float *part,
                                                    S &scales)
{
    if constexpr (!C::SCALED) {
#pragma unroll
        for (int i = 0; i < (TO - FROM) / 2; i++)
            d[FROM / 2 + i] = (FIRST ? 0 : d[FROM / 2 + i]) + part[i];
    } else if constexpr (C::BY_ROWS || C::LEVELED) {
#pragma unroll
        for (int i = 0; i < (TO - FROM) / 2; i++) {
            const int at = FROM / 2 + i;
            const int block = at * 2 / S::COLUMNS + (C::WGRAD && BACK);
            d[at] = fma(part[i], i % 4 < 2 ? scales.above[block] : scales.below[block],
                        FIRST ? 0 : d[at]);
        }
    } else {
        constexpr int GROUPS = S::GROUPS, LEAST = FROM / 8 / GROUPS;
        constexpr int PAST = (TO / 8 + GROUPS - 1) / GROUPS;
#pragma unroll
        for (int to = LEAST; to < PAST; to++) {
            const int at = BACK ? LEAST + PAST - 1 - to : to, i = at * GROUPS;
            const int after = BACK ? at - S::FIRST : at + S::FIRST;
            const float4 four = scales.next[at % S::FIRST];
            const float word[4] = { four.x, four.y, four.z, four.w };
            if (after >= 0 && after < S::COUNT) scales.bring(after);
#pragma unroll
            for (int j = i; j < i + GROUPS && j < TO / 8; j++) {
                const uint32_t pair = __float_as_uint(word[j - i]);
                const float s[2] = {
                    C::PACKED ? __uint_as_float(pair << 16) : word[(j - i) * 2 % 4],
                    C::PACKED ? __uint_as_float(pair & 0xffff0000u) : word[(j - i) * 2 % 4 + 1]
                };
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float x = s[e % 2], &sum = d[j * 4 + e];
                    if (C::WGRAD) x *= e < 2 ? scales.above : scales.below;
                    sum = fma(part[j * 4 + e - FROM / 2], x, FIRST ? 0 : sum);
                }
            }
        }
    }
}

/* LEVELED: a tile's sums by what its columns' levels are of the largest of them, which the sums
 * were scaled by. */
template <class C>
static __device__ __forceinline__ void sm90_apply_levels(uint32_t base, int tile,
                                                         float (&d)[C::WIDTH / 2])
{
    const uint32_t at =
        base + C::LEVELS + (anew(tile) % C::RING * 4 + thread_now() % 4) * C::LEVEL_PITCH;
#pragma unroll
    for (int i = 0; i < C::WIDTH / 16; i++) { /* two of eight columns and of the next eight */
        const float4 by = shared_four(at + i * 16);
        float *const sum = &d[i * 8];
        sum[0] *= by.x, sum[2] *= by.x, sum[1] *= by.y, sum[3] *= by.y;
        sum[4] *= by.z, sum[6] *= by.z, sum[5] *= by.w, sum[7] *= by.w;
    }
}
