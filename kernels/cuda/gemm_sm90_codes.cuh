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

/* ---- multiplying -------------------------------------------------------------------------------
 */

/* DEEP times 32 of a step's depth of 64 of P's rows, in PARTS of N columns. */
template <int N, int DEEP, class C>
static __device__ __forceinline__ void
sm90_multiply_part(const sm90_consumer<C> &w, float (&part)[C::PARTS][C::WIDTH / 2 / C::PARTS],
                   int mi)
{
    constexpr int EACH = N / C::PARTS;
    const uint64_t high = (uint64_t)sm90_consumer<C>::HIGH << 32;
    const uint32_t p = w.p0 + w.stage * (C::STAGE >> 4) + mi * 512,
                   q = w.q0 + w.stage * (C::STAGE >> 4);
#pragma unroll
    for (int i = 0; i < C::PARTS; i++) {
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < DEEP; k++)
            wgmma_fp8<EACH, C::ELEMENTS>(part[i], high | (p + k * 2),
                                         high | (q + i * EACH * 8 + k * 2), k > 0);
        wgmma_commit();
    }
}

/* As many 32s of the depth as are left of it. */
template <int N, class C>
static __device__ __forceinline__ void
sm90_multiply_left(const sm90_consumer<C> &w, float (&part)[C::PARTS][C::WIDTH / 2 / C::PARTS],
                   int mi, int left)
{
    if (!C::WGRAD || left >= 4)
        sm90_multiply_part<N, 4>(w, part, mi);
    else if (left == 3)
        sm90_multiply_part<N, 3>(w, part, mi);
    else if (left == 2)
        sm90_multiply_part<N, 2>(w, part, mi);
    else
        sm90_multiply_part<N, 1>(w, part, mi);
}

/* What the tensor cores summed, once they are done, to the sums; the stage is given back as soon as
 * nothing of it is needed. FIRST: of the tile. */
template <int N, bool FIRST, int MI, class C, class S>
static __device__ __forceinline__ void
sm90_add_part(sm90_consumer<C> &w, float (&part)[C::PARTS][C::WIDTH / 2 / C::PARTS], S &scales)
{
    constexpr int HALF = C::GRAIN % 64 == 0 ? N / 2 : 0;
    constexpr bool AT_ONCE = C::PARTS == 1 && S::all_before(0);
    constexpr bool BETWEEN = !AT_ONCE && S::all_before(HALF);
    auto release_step = [&](bool now) __attribute__((always_inline))
    {
        if (!now) return;
        if (C::SCALED) scales.settle();
        if (MI + 1 < C::BLOCKS_M) return;
        __syncwarp();
        w.release(w.stage);
    };
    wgmma_finish<N / C::PARTS, C::PARTS - 1>(part[0]);
    release_step(AT_ONCE);
    if (HALF) sm90_promote<C, 0, HALF, FIRST, MI == 1>(w.d[MI], part[0], scales);
    if constexpr (C::PARTS == 2) wgmma_finish<N / C::PARTS, 0>(part[C::PARTS - 1]);
    release_step(BETWEEN);
    sm90_promote<C, HALF, N, FIRST, MI == 1>(
        w.d[MI], C::PARTS == 2 ? part[C::PARTS - 1] : &part[0][HALF / 2], scales);
    release_step(!AT_ONCE && !BETWEEN);
    if (MI + 1 == C::BLOCKS_M) w.advance();
}

/* A tile: what the tensor cores summed over each 128 of the depth, or over as many 32s of it as
 * there are (NT), is added to the sums. Each warpgroup goes at its own pace: taking turns, one
 * adding while the other multiplies, was slower. AHEAD: the tile before is stored while the first
 * products are under way. */
template <int N, class C>
static __device__ __forceinline__ void sm90_multiply_codes(sm90_consumer<C> &w)
{
    float part[C::PARTS][C::WIDTH / 2 / C::PARTS];
#pragma unroll
    for (int i = 0; i < N / 2; i++) /* they were anything: or wgmmas are serialised */
        asm volatile("" : "=f"(part[i % C::PARTS][i / C::PARTS]));
    typename std::conditional<C::BY_ROWS || C::LEVELED, sm90_row_scales<C>, sm90_scales<C, N>>::type
        scales;
    auto begin_scales = [&]() __attribute__((always_inline))
    {
        if (C::SCALED) scales.begin(w.base + C::SCALES + w.stage * C::SCALE_LINE);
    };
    if (C::AHEAD) { /* past the depth there are zeros */
        sm90_multiply_part<N, 4>(w, part, 0);
        if (w.tile > 0) w.store_last();
        w.begin_result();
        begin_scales();
        sm90_add_part<N, true, 0>(w, part, scales);
        if constexpr (C::BLOCKS_M == 2) {
            sm90_multiply_part<N, 4>(w, part, 1);
            sm90_add_part<N, true, 1>(w, part, scales);
        }
        w.begin_factor();
    } else {
#pragma unroll
        for (int mi = 0; mi < C::BLOCKS_M; mi++)
#pragma unroll
            for (int i = 0; i < N / 2; i++) w.d[mi][i] = 0;
    }
    for (int left = w.whole * 4 + w.rest - C::AHEAD * 4; left > 0; left -= 4) {
        w.wait_step();
        begin_scales();
        sm90_multiply_left<N>(w, part, 0, left);
        sm90_add_part<N, false, 0>(w, part, scales);
        if constexpr (C::BLOCKS_M == 2) {
            sm90_multiply_left<N>(w, part, 1, left);
            sm90_add_part<N, false, 1>(w, part, scales);
        }
    }
}
