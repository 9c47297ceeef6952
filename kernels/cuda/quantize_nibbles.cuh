/* Inside the short way of quantize: nvfp4. Rows go by segments, columns by warps: each has sixteen
 * of a tile's. */
#pragma once

#include "kernels/cuda/quantize_choose.cuh"
#include "kernels/cuda/quantize_decoded.cuh"

/* ---- rows -------------------------------------------------------------------------------------
 */

static __device__ __forceinline__ void get_segment(uint32_t w[8], const uint32_t *words,
                                                   const int places[2])
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint4 q = *(const uint4 *)(words + places[i]);
        w[i * 4] = q.x, w[i * 4 + 1] = q.y, w[i * 4 + 2] = q.z, w[i * 4 + 3] = q.w;
    }
}

template <bool SR, int FOUR>
static __device__ __forceinline__ void
run_nibble_rows(const job &j, const frame &f, const uint32_t *words, const uint32_t *random,
                const float *scale_enc, const float *ones, found *it)
{
    enum { STEP = TILE_THREADS / SEGMENTS };
    static_assert(STEP == 32, "a turn is 32 lines");
    const side &s = j.p.sides[MT_ROW];
    const target &to = f.to[MT_ROW];
    const int at = (int)threadIdx.x % SEGMENTS, first = (int)threadIdx.x / SEGMENTS;
    const int rows = f.t.rows, inside = at * SEGMENT < f.t.cols ? rows : 0;
    const bool draws = SR && s.options.sr, even = to.even;
    const float g = to.l.g, unit = FOUR ? unit_of(s, to.l) : 0;
    const int64_t pitch = to.pitch, step = lines_step(to.scales);
    uint8_t *scales = to.scales.at + scale_offset(to.scales, first, at);
    uint8_t *codes = to.codes + first * pitch + at * (s.decoded ? SEGMENT * 2 : SEGMENT / 2);
    const int places[2] = { chunk_place<NIBBLES>(first, at * 2),
                            chunk_place<NIBBLES>(first, at * 2 + 1) };
    int turn = 0;
#pragma unroll 1
    for (int r = first; r - r % 4 < rows; r += STEP, scales += step, codes += STEP * pitch) {
        uint32_t w[8], bits[8], q[2], stored;
        int nans = 0;
        get_segment(w, words + turn, places);
        if (draws) get_segment(bits, random + turn, places);
        turn += 2 * ROWS_WORDS<NIBBLES>;
        const uint32_t m = magnitude_of<8>(w, &nans);
        raise(&it->most[MT_ROW], m), it->nans += nans;
        if (FOUR && s.options.four_over_six) {
            stored = choose_codes<FOUR>(q, j, scale_enc, ones, unit, s, to.l, m, w, nans > 0);
        } else {
            float enc[8];
            stored = stored_pair(j, mt_f32_from_bits(m << 16) * g, 0) & 0xff;
#pragma unroll
            for (int i = 0; i < 8; i++) enc[i] = scale_enc[stored];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                q[i] = draws ? magnitude_nibbles(w + i * 4, enc, bits + i * 4)
                             : magnitude_nibbles(w + i * 4, enc, NULL);
                if (!s.decoded) q[i] |= nibble_signs(w + i * 4, nans > 0);
            }
        }
        if (s.decoded) {
            if (r < inside)
                put_segment_values(codes, q, w, stored, nans > 0, f.t.cols - at * SEGMENT);
            continue;
        }
        if (r < inside) store_1(scales, stored);
        if (even) {
            if (r < inside) store_8(codes, q[0], q[1]);
        } else {
            packed p = { { q[0], q[1], 0, 0 } };
            put_codes_at(codes, p, r < rows, at, f.t.cols, 1);
        }
    }
}

/* ---- columns ----------------------------------------------------------------------------------
 * Lines of a warp's codes take the place of its squares, once they are read: sixteen bytes of each
 * for two of them. */

static __device__ __forceinline__ int line_place(int line, int at)
{
    return at * 2 * SQUARE_WORDS + (line ^ at * 2) * 4;
}
/* Sixteen bytes of a line, from any one on; what is not of it is anything. */
static __device__ __forceinline__ void get_window(uint32_t w[4], const uint32_t *lines, int line,
                                                  int byte)
{
    const int at = byte >> 4, word = byte >> 2, up = byte % 4 * 8;
    const uint4 a = *(const uint4 *)(lines + line_place(line, at & 3));
    const uint4 b = *(const uint4 *)(lines + line_place(line, (at + 1) & 3));
    const uint32_t all[8] = { a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w };
    uint32_t half[6], q[5];
#pragma unroll
    for (int i = 0; i < 6; i++) half[i] = word & 2 ? all[i + 2] : all[i];
#pragma unroll
    for (int i = 0; i < 5; i++) q[i] = word & 1 ? half[i + 1] : half[i];
#pragma unroll
    for (int i = 0; i < 4; i++) w[i] = __funnelshift_r(q[i], q[i + 1], up);
}

/* The last `count` bytes of sixteen, the first ones: of those at p. */
static __device__ __forceinline__ void put_last(uint8_t *p, const uint32_t w[4], int count)
{
    const uint32_t third = count & 8 ? w[1] : w[3];
    const uint32_t half = count & 4 ? (count & 8 ? w[0] : w[2]) : third;
    if (count & 8) store_8(p + 8, w[2], w[3]);
    if (count & 4) store_4(p + (count & 8 ? 4 : 12), third);
    if (count & 2) store_2(p + 14 - (count & 12), half >> 16);
    if (count & 1) store_1(p + 15 - (count & 14), count & 2 ? half >> 8 : half >> 24);
}
static __device__ __forceinline__ void put_first(uint8_t *p, const uint32_t w[4], int count)
{
    const uint32_t third = count & 8 ? w[2] : w[0];
    const uint32_t half = count & 4 ? (count & 8 ? w[3] : w[1]) : third;
    if (count & 8) store_8(p, w[0], w[1]);
    if (count & 4) store_4(p + (count & 8), third);
    if (count & 2) store_2(p + (count & 12), half);
    if (count & 1) store_1(p + (count & 14), count & 2 ? half >> 16 : half);
}

/* Lines that do not begin and end at multiples of 16 bytes: what is before the first one, by the
 * lower threads of a warp, and behind the last one. */
static __device__ __forceinline__ void put_line_ends(const uint32_t *lines, uint8_t *p, int line,
                                                     int bytes, bool behind)
{
    const int before = (int)(0 - (uintptr_t)p & 15), count = (bytes - before) & 15;
    uint32_t w[4];
    if (before > bytes) { /* no multiple of 16 */
        get_window(w, lines, line, 0);
        for (int b = 0; !behind && b < bytes; b++) {
            const uint32_t word = b & 8 ? (b & 4 ? w[3] : w[2]) : b & 4 ? w[1] : w[0];
            store_1(p + b, word >> b % 4 * 8);
        }
        return;
    }
    const int start = behind ? bytes - count : before - 16;
    get_window(w, lines, line, start);
    if (behind)
        put_first(p + start, w, count);
    else
        put_last(p + start, w, before);
}

/* A warp's lines of codes, and their scales, to where they go. */
static __device__ __forceinline__ void put_strip(const uint32_t *lines, const uint8_t *scales,
                                                 const target &to, const frame &f, int strip)
{
    const int lane = lane_of_warp(), c0 = strip * SEGMENT, cols = f.t.cols - c0;
    const int rows = f.t.rows, bytes = (rows + 1) / 2;
    const int64_t pitch = to.pitch;
    uint8_t *const codes = to.codes + c0 * pitch;
    const bool even = to.even;
    const int line = lane % 16, block = lane / 16 * (SEGMENTS / 2);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int whole = lane / 4 + i * 8, k = lane % 4;
        uint8_t *p = codes + whole * pitch;
        const int from = (int)(0 - (uintptr_t)p & 15) + k * 16;
        uint32_t w[4];
        if (whole >= cols || from + 16 > bytes) continue;
        if (even) {
            uint4 q = *(const uint4 *)(lines + line_place(whole, k));
            w[0] = q.x, w[1] = q.y, w[2] = q.z, w[3] = q.w;
        } else {
            get_window(w, lines, whole, from);
        }
        store_16(p + from, w[0], w[1], w[2], w[3]);
    }
    if (line >= cols) return;
    if (!even) put_line_ends(lines, codes + line * pitch, line, bytes, lane >= 16);
    const uint32_t stored = *(const uint32_t *)(scales + line * SEGMENTS + block);
    const int64_t step = block_step(to.scales);
    uint8_t *p = to.scales.at + scale_offset(to.scales, c0 + line, block);
#pragma unroll
    for (int i = 0; i < SEGMENTS / 2; i++, p += step)
        if ((block + i) * SEGMENT < rows) store_1(p, stored >> i * 8);
}

/* What is found of a warp's columns, rotated. */
static __device__ __forceinline__ void measure_strip(const job &j, const frame &f,
                                                     const uint32_t *words,
                                                     const uint32_t rotation[4], found *it)
{
    const side &s = j.p.sides[MT_COL];
    const int strip = (int)threadIdx.x / 32, rows = f.t.rows;
    uint32_t from = shared_address(words + square_place(strip));
    if (strip * SEGMENT >= f.t.cols) return;
#pragma unroll 2
    for (int row = 0; row < rows; row += SEGMENT, from += SQUARE_WORDS * 4) {
        uint32_t x[4];
        get_square(x, from);
        const uint32_t m = magnitude_of<4>(x, &it->nans);
        raise(&it->most[MT_ROW], m);
        if (s.options.rht && row + SEGMENT <= rows)
            measure_rotated(&it->most[MT_COL], x, rotation, s.options.rht_mask);
        else
            raise(&it->most[MT_COL], m);
    }
}

/* Codes of a warp's columns; again: the rows have been measured. */
template <bool SR>
static __device__ __forceinline__ void run_strip(const job &j, uint8_t *all_scales, const frame &f,
                                                 uint32_t *words, const uint32_t *random,
                                                 const float *scale_enc, const uint32_t rotation[4],
                                                 bool again, found *it)
{
    const side &s = j.p.sides[MT_COL];
    const target &to = f.to[MT_COL];
    const int strip = (int)threadIdx.x / 32, lane = lane_of_warp(), g = lane / 4, q = lane % 4;
    const bool rotated = s.options.rht, looks = !again && is_measured(j);
    const bool draws = SR && s.options.sr;
    const int rows = f.t.rows;
    const float scale = to.l.g;
    uint32_t *const lines = words + strip * STRIP_WORDS;
    uint8_t *const scales = all_scales + strip * SEGMENT * SEGMENTS;
    uint32_t from = shared_address(words + square_place(strip));
    uint32_t bits_from = SR ? shared_address(random + square_place(strip)) : 0;
    if (strip * SEGMENT >= f.t.cols) return;
#pragma unroll 1
    for (int k = 0; k * 2 * SEGMENT < rows; k++) {
        uint32_t x[2][4], bits[2][4], most[2];
        int nans[2] = { 0, 0 };
#pragma unroll
        for (int u = 0; u < 2; u++) {
            get_square(x[u], from), from += SQUARE_WORDS * 4;
            if (draws) get_square(bits[u], bits_from), bits_from += SQUARE_WORDS * 4;
        }
        __syncwarp(); /* codes may take their place */
#pragma unroll
        for (int u = 0; u < 2; u++) {
            if (looks) raise(&it->most[MT_ROW], magnitude_of<4>(x[u], &it->nans));
            if (rotated && (k * 2 + u + 1) * SEGMENT <= rows)
                rotate_square(x[u], rotation, s.options.rht_mask);
            most[u] = larger_of_columns(x[u]);
            if ((most[u] & 0xffff) > 0x7f80 || most[u] >> 16 > 0x7f80) {
                const uint32_t left[2] = { x[u][0], x[u][2] }, right[2] = { x[u][1], x[u][3] };
                most[u] = magnitude_of<2>(left, &nans[u]) | magnitude_of<2>(right, &nans[u]) << 16;
            }
            raise(&it->most[MT_COL], larger_half(most[u]));
        }
        /* of four threads, the even ones have the first square's scales, the odd ones the other's
         */
        uint32_t own = q % 2 ? most[1] : most[0], other = q % 2 ? most[0] : most[1];
        own = larger_halves(own, __shfl_xor_sync(~0u, other, 1));
        own = larger_halves(own, __shfl_xor_sync(~0u, own, 2));
        own = stored_pair(j, low_bf16(own) * scale, high_bf16(own) * scale);
        other = __shfl_xor_sync(~0u, own, 1);
        if (q < 2 && !s.decoded) {
            uint8_t *stored = scales + g * SEGMENTS + k * 2 + q;
            stored[0] = (uint8_t)own, stored[8 * SEGMENTS] = (uint8_t)(own >> 8);
        }
#pragma unroll
        for (int u = 0; u < 2; u++) {
            const uint32_t stored = q % 2 == u ? own : other;
            const float left = scale_enc[stored & 0xff];
            const float right = scale_enc[stored >> 8];
            const float enc[8] = { left, left, left, left, right, right, right, right };
            const uint32_t w[4] = { x[u][0], x[u][2], x[u][1], x[u][3] };
            const uint32_t drawn[4] = { bits[u][0], bits[u][2], bits[u][1], bits[u][3] };
            uint32_t code =
                draws ? magnitude_nibbles(w, enc, drawn) : magnitude_nibbles(w, enc, NULL);
            if (s.decoded) {
                put_square_values(from - (2 - u) * SQUARE_WORDS * 4, code, w, stored & 0xff,
                                  stored >> 8 & 0xff, nans[u] > 0);
                continue;
            }
            code |= nibble_signs(w, nans[u] > 0);
            uint16_t *to_line = (uint16_t *)(lines + line_place(g, k)) + u * 4 + q;
            to_line[0] = (uint16_t)code, to_line[8 * 8] = (uint16_t)(code >> 16);
        }
    }
    __syncwarp();
    if (s.decoded)
        put_strip_values(words, to, f, strip);
    else
        put_strip(lines, scales, to, f, strip);
}

/* A warp's columns rotated in place; looks: at their elements. */
static __device__ __forceinline__ void rotate_strip(uint32_t *words, int strip, int rows,
                                                    const uint32_t rotation[4], uint32_t mask,
                                                    bool looks, found *it)
{
    const int g = lane_of_warp() / 4, first = lane_of_warp() % 4 * 4;
#pragma unroll 1
    for (int at = 0; (at + 1) * SEGMENT <= rows; at++) {
        uint32_t x[4];
        get_square(x, shared_address(words + square_place(strip) + at * SQUARE_WORDS));
        if (looks) raise(&it->most[MT_ROW], magnitude_of<4>(x, &it->nans));
        rotate_square(x, rotation, mask);
        __syncwarp(); /* it has been read */
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int row = at * SEGMENT + first + i % 4, column = strip * SEGMENT + g + i / 4 * 8;
            ((uint16_t *)(words + pair_place<NIBBLES>(row, column / 2)))[column % 2] =
                (uint16_t)(x[i % 4 / 2 * 2 + i / 4] >> i % 2 * 16);
        }
    }
}

/* Codes of columns under 4over6: threads have segments of two, whose errors are sums in order. */
template <int FOUR>
static __device__ __forceinline__ void
run_chosen_columns(const job &j, short_space *sp, const frame &f, uint32_t *words,
                   const float *scale_enc, const float *ones, const uint32_t rotation[4],
                   bool again, found *it)
{
    enum { PARTS = TILE_THREADS / PAIRS, TURNS = SEGMENTS / PARTS };
    const side &s = j.p.sides[MT_COL];
    const int pair = (int)threadIdx.x % PAIRS, part = (int)threadIdx.x / PAIRS;
    const int strip = (int)threadIdx.x / 32, rows = f.t.rows;
    const float unit = unit_of(s, f.to[MT_COL].l);
    uint32_t q[2 * TURNS][2];
    if (s.options.rht) {
        rotate_strip(words, strip, rows, rotation, s.options.rht_mask, !again, it);
        __syncthreads();
    }
#pragma unroll 1
    for (int n = 0; n < TURNS; n++) {
        const int at = part + n * PARTS;
        uint32_t v[SEGMENT];
        if (at * SEGMENT >= rows) break; /* nothing of it is stored */
#pragma unroll
        for (int i = 0; i < SEGMENT; i++) v[i] = words[pair_place<NIBBLES>(at * SEGMENT + i, pair)];
#pragma unroll 1
        for (int h = 0; h < 2; h++) { /* registers have no index, and code should be short */
            uint32_t w[8], codes[2];
            int nans = 0;
#pragma unroll
            for (int i = 0; i < 8; i++)
                w[i] = __byte_perm(v[i * 2], v[i * 2 + 1], 0x5410 + h * 0x2222);
            const uint32_t m = magnitude_of<8>(w, &nans);
            if (!again && !(s.options.rht && (at + 1) * SEGMENT <= rows))
                it->nans += nans, raise(&it->most[MT_ROW], m);
            raise(&it->most[MT_COL], m);
            sp->scales[(pair * 2 + h) * SEGMENTS + at] = (uint8_t)choose_codes<FOUR>(
                codes, j, scale_enc, ones, unit, s, f.to[MT_COL].l, m, w, nans > 0);
#pragma unroll
            for (int i = 0; i < 2; i++) /* of words that nobody else reads */
                words[pair_place<NIBBLES>(at * SEGMENT + h * 2 + i, pair)] = codes[i];
        }
    }
#pragma unroll
    for (int i = 0; i < 4 * TURNS; i++)
        q[i / 2][i % 2] =
            words[pair_place<NIBBLES>((part + i / 4 * PARTS) * SEGMENT + i % 4, pair)];
    __syncthreads(); /* the words have been read */
#pragma unroll
    for (int n = 0; n < TURNS; n++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int at = part + n * PARTS, c = pair * 2 + h;
            uint32_t *line = words + c / SEGMENT * STRIP_WORDS + line_place(c % SEGMENT, at / 2);
            if (at * SEGMENT < rows)
                *(uint2 *)(line + at % 2 * 2) = make_uint2(q[n * 2 + h][0], q[n * 2 + h][1]);
        }
    __syncthreads();
    if (strip * SEGMENT < f.t.cols)
        put_strip(words + strip * STRIP_WORDS, sp->scales + strip * SEGMENT * SEGMENTS,
                  f.to[MT_COL], f, strip);
}
