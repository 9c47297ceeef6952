/* The producer of the Hopper GEMM: a warp brings steps of P and Q, others the scales of blocks of
 * codes. Included by gemm_sm90_kernel.cuh. */
#pragma once

/* Read by the consumers after the tile's first full stage. n: 0 where nothing of it is stored;
 * rest: with what else they are told. */
template <class C>
static __device__ __forceinline__ void sm90_describe(uint8_t *shared, int tile, const sm90_tile &t,
                                                     int n, int rest)
{
    int4 *to = (int4 *)(shared + C::TILES + tile % C::RING * C::TILE_BYTES);
    to[0] = make_int4(n, t.len, t.row, t.m0);
    to[1] = make_int4(t.member, t.n0, t.whole, rest);
}

/* This block's part of a step of P, to every block of its row of the cluster. end: of the member's
 * rows. */
template <class C>
static __device__ __forceinline__ void sm90_bring_p(uint32_t to, const gemm_sm90_maps &maps,
                                                    uint32_t bar, const sm90_tile &t, int step,
                                                    int end, int cn, uint16_t blocks)
{
    constexpr bool SHARED = C::CLUSTER_N > 1;
    constexpr int PART = C::TILE / C::CLUSTER_N; /* rows */
    if constexpr (C::BY_ROWS) {
        copy_in_ragged<SHARED>(to + cn * PART * 128, &maps.p, bar, step * C::DEPTH, end,
                               end - t.row, t.m0 + cn * PART, blocks);
    } else if constexpr (C::WGRAD && C::FP8) { /* MT_LAYOUT_PADDED */
        copy_in<SHARED>(to + cn * PART * 128, &maps.p, bar, 0, t.m0 + cn * PART,
                        t.column / C::DEPTH + step, blocks);
    } else if constexpr (!C::ACROSS_P) {
        copy_in<SHARED>(to + cn * PART * 128, &maps.p, bar,
                        (C::WGRAD ? t.column : 0) + step * C::DEPTH, t.m0 + cn * PART,
                        C::WGRAD ? 0 : t.member, blocks);
    } else {
#pragma unroll
        for (int i = 0; i < PART / 64; i++) {
            const int b = cn * (PART / 64) + i;
            if constexpr (C::WGRAD)
                copy_in_ragged<SHARED>(to + b * 8192, &maps.p, bar, t.m0 + b * 64, end, end - t.row,
                                       step * 64, blocks);
            else
                copy_in<SHARED>(to + b * 8192, &maps.p, bar, t.m0 + b * 64, step * 64, t.member,
                                blocks);
        }
    }
}

/* This block's boxes of a step of Q, to every block of its column of the cluster. */
template <class C>
static __device__ __forceinline__ void sm90_bring_q(uint32_t to, const gemm_sm90_maps &maps,
                                                    uint32_t bar, const sm90_tile &t, int step,
                                                    int end, int cm, uint16_t blocks)
{
    constexpr bool SHARED = C::CLUSTER_M > 1;
    int boxes = (t.n + C::BOX_Q - 1) / C::BOX_Q;
    for (int b = cm; b < boxes; b += C::CLUSTER_M) {
        if constexpr (C::BY_ROWS) {
            copy_in<SHARED>(to + b * (C::BOX_Q * 128), &maps.q, bar, step * C::DEPTH,
                            t.n0 + b * C::BOX_Q, t.member, blocks);
        } else if constexpr (C::WGRAD && C::FP8) {
            copy_in<SHARED>(to + b * (C::BOX_Q * 128), &maps.q, bar, 0, t.n0 + b * C::BOX_Q,
                            t.column / C::DEPTH + step, blocks);
        } else if constexpr (C::WGRAD && !C::ACROSS_Q) {
            copy_in<SHARED>(to + b * (C::BOX_Q * 128), &maps.q, bar, t.column + step * C::DEPTH,
                            t.n0 + b * C::BOX_Q, 0, blocks);
        } else if (C::WGRAD) {
            copy_in_ragged<SHARED>(to + b * 8192, &maps.q, bar, t.n0 + b * 64, end, end - t.row,
                                   step * 64, blocks);
        } else {
            copy_in_ragged<SHARED>(to + b * (C::BOX_Q * 128), &maps.q, bar, step * C::DEPTH,
                                   t.row + t.len, t.len, b * C::BOX_Q, blocks);
        }
    }
}

/* Who of the producer's warp brings a step: where the compiler sees that it is one thread, it does
 * not ask for each operand of a copy in a loop. Of codes it is the only thread: with a warp, what
 * the compiler makes of the rest was no faster, and on long rows slower. */
template <class C> static __device__ __forceinline__ bool sm90_leads()
{
    return C::FP8 || elected();
}

template <class C>
static __device__ __forceinline__ void
sm90_produce(uint8_t *shared, uint32_t base, const gemm_sm90_maps &maps, const gemm_sm90_args &a,
             sm90_order<C> order, int cm, int cn)
{
    uint16_t row = (uint16_t)(((1 << C::CLUSTER_N) - 1) << (cm * C::CLUSTER_N)), column = 0;
#pragma unroll
    for (int i = 0; i < C::CLUSTER_M; i++) column |= (uint16_t)(1 << (i * C::CLUSTER_N + cn));
    int stage = 0;
    uint32_t parity = 1;
    sm90_tile t;
    for (int tile = 0; order.next(&t, a, cm, cn); tile++) {
        if (sm90_leads<C>())
            sm90_describe<C>(shared, tile, t, C::AHEAD || t.m0 < a.m ? t.n : 0, t.rest);
        const int end = order.start[t.member + 1];
        int boxes = (t.n + C::BOX_Q - 1) / C::BOX_Q, steps = t.whole + (t.rest > 0);
        uint32_t bytes = C::P_BYTES + boxes * (C::BOX_Q * 128);
        for (int step = 0; step < steps; step++) {
            uint32_t p = base + stage * C::STAGE, full = base + C::FULL + stage * 8;
            barrier_wait(base + C::EMPTY + stage * 8, parity);
            if (sm90_leads<C>()) {
                barrier_expect(full, bytes);
                sm90_bring_p<C>(p, maps, full, t, step, end, cn, row);
                sm90_bring_q<C>(p + C::P_BYTES, maps, full, t, step, end, cm, column);
            }
            if (++stage == C::STAGES) stage = 0, parity ^= 1;
        }
    }
}

/* The scales of a step into its stage, by a warp: those of Q's columns (TN: by that of the 128 x
 * 128 of P), and after them, NT, those of P's rows. Of the columns a thread multiplies, 16 bytes
 * hold the four of two groups of eight, or, PACKED, the eight of four groups, two in a word. */
template <class C>
static __device__ __forceinline__ void sm90_bring_step(uint32_t base, int stage, uint32_t parity,
                                                       const float *q, int len, const float *p,
                                                       int height, int blocks)
{
    enum { PAIRS = (C::WIDTH + 63) / 64, ROWS = C::WGRAD ? C::TILE / 32 : (int)C::BLOCKS_M };
    const uint32_t lane = threadIdx.x % 32, line = base + C::SCALES + stage * C::SCALE_LINE;
    float pair[PAIRS][2], row[ROWS];
#pragma unroll
    for (int i = 0; i < PAIRS; i++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int at = i * 64 + (int)lane * 2 + e;
            pair[i][e] = at < len ? __ldg(q + at) : 0;
        }
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        int at = C::WGRAD ? i * 32 + (int)lane : i * 128;
        row[i] = at < height ? __ldg(p + (C::WGRAD ? at : i * blocks)) : 0;
    }
    barrier_wait(base + C::EMPTY + stage * 8, parity);
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        const uint32_t group = i * 8 + lane / 4; /* of eight columns */
        if constexpr (C::PACKED) {
#pragma unroll
            for (int m = 0; m < (C::WGRAD ? 1 : (int)C::BLOCKS_M); m++) {
                const float by = C::WGRAD ? 1 : row[m];
                uint32_t both =
                    __byte_perm(__float_as_uint(pair[i][0] * by), __float_as_uint(pair[i][1] * by),
                                0x7632); /* their upper halves */
                put_shared(line + m * C::SCALES_P + group / 4 * 64 + lane % 4 * 16 + group % 4 * 4,
                           __uint_as_float(both));
            }
        } else {
            if (!C::WGRAD) pair[i][0] *= row[0], pair[i][1] *= row[0];
#pragma unroll
            for (int e = 0; e < 2; e++)
                put_shared(line + group / 2 * 64 + lane % 4 * 16 + group % 2 * 8 + e * 4,
                           pair[i][e]);
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++)
        if (C::WGRAD) put_shared(line + C::SCALES_P + (i * 32 + lane) * 4, row[i]);
    barrier_arrive(base + C::FULL + stage * 8);
}

/* BY_ROWS: those of P's rows by those of the weights, for each 64 of Q's columns, which are of one
 * 128 x 128. weights: of the first; that of the next 128 columns is `blocks` after it. */
template <class C>
static __device__ __forceinline__ void
sm90_bring_rows(uint32_t base, int stage, uint32_t parity, const float *rows, int height,
                const float *weights, int n0, int n, int blocks)
{
    enum { ROWS = C::TILE / 32, BLOCKS = C::WIDTH / 64 };
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t line = base + C::SCALES + stage * C::SCALE_LINE + lane * 4;
    float row[ROWS], column[BLOCKS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        int at = i * 32 + (int)lane;
        row[i] = at < height ? __ldg(rows + at) : 0;
    }
#pragma unroll
    for (int b = 0; b < BLOCKS; b++)
        column[b] = n0 + b * 64 < n ? __ldg(weights + (n0 % 128 + b * 64) / 128 * blocks) : 0;
    barrier_wait(base + C::EMPTY + stage * 8, parity);
#pragma unroll
    for (int b = 0; b < BLOCKS; b++)
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            put_shared(line + (b * C::TILE + i * 32) * 4, row[i] * column[b]);
    barrier_arrive(base + C::FULL + stage * 8);
}

/* Of the levels of a tile's columns, of which a lane has four of each 128, the largest. */
template <class C>
static __device__ __forceinline__ uint32_t
sm90_most_level(const uint32_t (&four)[(C::WIDTH + 127) / 128])
{
    uint32_t most = 0;
#pragma unroll
    for (int s = 0; s < (C::WIDTH + 127) / 128; s++) most = __vmaxu4(most, four[s]);
    most = __vmaxu4(most, most >> 16);
    most = __vmaxu4(most, most >> 8) & 255;
    return __reduce_max_sync(~0u, most);
}

/* Each column's level over that largest, in the order in which threads read them
 * (sm90_apply_levels). */
template <class C>
static __device__ __forceinline__ void
sm90_put_levels(uint32_t base, int tile, const uint32_t (&four)[(C::WIDTH + 127) / 128],
                uint32_t most)
{
    enum { ONE = 127 };
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t to = base + C::LEVELS + tile % C::RING * 4 * C::LEVEL_PITCH +
                        lane % 2 * 2 * C::LEVEL_PITCH + lane / 2 * 8;
#pragma unroll
    for (int i = 0; i < (C::WIDTH + 127) / 128 * 2; i++) { /* two columns, a thread's */
        uint32_t part[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int own = (int)(four[i / 2] >> 8 * (i % 2 * 2 + e) & 255);
            part[e] = (own ? max(0, ONE + own - (int)most) : 0) << 23;
        }
        if (i / 2 * 128 + lane * 4 >= C::WIDTH) continue;
        const uint32_t at = to + i / 2 * 128 + i % 2 * C::LEVEL_PITCH;
        put_shared_pair(at, __uint_as_float(part[0]), __uint_as_float(part[1]));
    }
}

/* LEVELED: the scales of P's rows (TN: of its 128 x 128, `blocks` apart) by the largest level of
 * the tile's columns; with the tile's first step their own. */
template <class C>
static __device__ __forceinline__ void
sm90_bring_leveled(uint32_t base, int stage, uint32_t parity, const float *rows, int height,
                   int blocks, const uint32_t (&four)[(C::WIDTH + 127) / 128], bool first, int tile)
{
    enum { ROWS = C::WGRAD ? C::TILE / 32 : 1 };
    const uint32_t lane = threadIdx.x % 32, line = base + C::SCALES + stage * C::SCALE_LINE;
    const bool bring = C::WGRAD || lane < C::BLOCKS_M;
    float row[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int at = C::WGRAD ? i * 32 + (int)lane : (int)lane * 128;
        row[i] = bring && at < height ? __ldg(rows + (C::WGRAD ? at : (int)lane * blocks)) : 0;
    }
    const uint32_t most = sm90_most_level<C>(four);
    barrier_wait(base + C::EMPTY + stage * 8, parity);
    if (first) sm90_put_levels<C>(base, tile, four, most);
#pragma unroll
    for (int i = 0; i < ROWS; i++)
        if (bring) put_shared(line + (i * 32 + lane) * 4, row[i] * __uint_as_float(most << 23));
    barrier_arrive(base + C::FULL + stage * 8);
}

/* The levels of the lane's columns; of a tile of TN, of its rows. */
template <class C>
static __device__ __forceinline__ void sm90_find_levels(uint32_t (&four)[(C::WIDTH + 127) / 128],
                                                        const gemm_sm90_args &a, const sm90_tile &t)
{
#pragma unroll
    for (int s = 0; s < (C::WIDTH + 127) / 128; s++) {
        const int at = s * 128 + (int)threadIdx.x % 32 * 4, room = (a.n + 127) / 128 * 128;
        four[s] = 0;
        if (C::WGRAD) {
            if (t.n0 + at < room)
                four[s] =
                    __ldg((const uint32_t *)(a.levels + (int64_t)t.member * room + t.n0 + at));
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (at + i < t.len) four[s] |= (uint32_t)__ldg(a.levels + t.row + at + i) << 8 * i;
        }
    }
}

/* The first warp that brings scales, after that which brings tiles and that which stores them. */
template <class C> static constexpr int sm90_first_of_scales()
{
    return C::CARRIED ? 2 : 1;
}

/* Two or three warps take steps in turn, so that the loads of one are long under way as its stage
 * becomes empty. */
template <class C>
static __device__ __forceinline__ void sm90_bring_scales(uint32_t base, const gemm_sm90_args &a,
                                                         sm90_order<C> order, int cm, int cn)
{
    enum { FIRST = sm90_first_of_scales<C>(), WARPS = 4 - FIRST };
    int stage = 0, turn = (int)threadIdx.x / 32 + 1 - FIRST;
    uint32_t parity = 1;
    sm90_tile t;
    for (int tile = 0; order.next(&t, a, cm, cn); tile++) {
        const int blocks = (anew(a.k) + C::DEPTH - 1) / C::DEPTH;
        const int first = order.start[t.member], rows = order.start[t.member + 1] - first;
        const float *q = a.scales_q, *p = a.scales_p;
        const int next_q = C::WGRAD ? a.n : C::BY_ROWS ? 1 : rows;
        const int next_p = C::WGRAD ? a.m : C::BY_ROWS ? rows : 1;
        int len = t.len, height = max(0, min((int)C::TILE, (C::BY_ROWS ? rows : a.m) - t.m0));
        if (C::BY_ROWS) {
            q += ((int64_t)t.member * ((a.n + 127) / 128) + t.n0 / 128) * blocks;
            p += (int64_t)first * blocks + t.m0;
        } else if (C::WGRAD) {
            if (rows == 0) len = height = 0;
            q += (int64_t)(t.column / 128) * a.n + t.n0;
            p += (int64_t)(t.column / 128) * a.m + t.m0;
        } else {
            q += (int64_t)first * blocks + (t.row - first);
            if (height) p += ((int64_t)t.member * ((anew(a.m) + 127) / 128) + t.m0 / 128) * blocks;
        }
        uint32_t levels[(C::WIDTH + 127) / 128];
        if constexpr (C::LEVELED) sm90_find_levels<C>(levels, a, t);
        const int steps = t.whole + (t.rest > 0);
        for (int step = 0; step < steps; step++, q += next_q, p += next_p) {
            if (--turn == 0) {
                if constexpr (C::LEVELED)
                    sm90_bring_leveled<C>(base, stage, parity, p, height, blocks, levels, step == 0,
                                          tile);
                else if constexpr (C::BY_ROWS)
                    sm90_bring_rows<C>(base, stage, parity, p, height, q, t.n0, a.n, blocks);
                else
                    sm90_bring_step<C>(base, stage, parity, q, len, p, height, blocks);
                turn = WARPS;
            }
            if (++stage == C::STAGES) stage = 0, parity ^= 1;
        }
    }
}
