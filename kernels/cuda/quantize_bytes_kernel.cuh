/* The kernel of the way of quantize to bytes: codes of rows and columns, or what they decode to. */
#pragma once

#include "kernels/cuda/quantize_bytes.cuh"
#include "kernels/cuda/quantize_find.cuh"

/* ---- tiles ------------------------------------------------------------------------------------
 */

/* Codes in rows: elements times enc of their row, of planar columns times that of their column. */
template <typename AT, int KIND, int DIRS, int CODES, bool POW2>
static __device__ __forceinline__ void put_rows(const job &j, const strip &p,
                                                const uint32_t x[ROWS][4], const float row[ROWS],
                                                const float column[RUN])
{
    const int rows = AT::column() < p.width ? p.height - AT::row() : 0;
    const uint32_t pitch = (uint32_t)p.cols >> kind<KIND>::HALF;
    const uint64_t at = (uint64_t)(uint32_t)AT::row() * pitch + (AT::column() >> kind<KIND>::HALF);
    uint8_t *by_row = p.parts[MT_ROW].codes + at, *by_column = p.parts[MT_COL].codes + at;
#pragma unroll
    for (int i = 0; i < ROWS; i++, by_row += pitch, by_column += pitch) {
        uint32_t q[2], c[2];
        float same[RUN];
#pragma unroll
        for (int e = 0; e < RUN; e++) same[e] = row[i];
        if (DIRS & ROW_CODES) encode_run<CODES, POW2>(q, j.p.sides[MT_ROW], x[i], same);
        if (DIRS & COLUMN_CODES) encode_run<CODES, POW2>(c, j.p.sides[MT_COL], x[i], column);
        if (i >= rows) continue;
        if (DIRS & ROW_CODES) store_run<KIND>(by_row, q);
        if (DIRS & COLUMN_CODES) store_run<KIND>(by_column, c);
    }
}

/* Of one of two columns. Words of one column first, or the compiler keeps the reals that codes of
 * rows were made of. */
template <int CODES>
static __device__ __forceinline__ void encode_column(uint32_t q[2], const side &s,
                                                     const uint32_t x[ROWS], bool second, float enc)
{
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        w[i] = __byte_perm(x[i * 2], x[i * 2 + 1], second ? 0x7632 : 0x5410);
    encode_row<CODES>(q, s, w, enc);
}
/* Of products. */
template <int CODES>
static __device__ __forceinline__ void encode_column(uint32_t q[2], const side &s,
                                                     const uint32_t y[ROWS], bool second)
{
    float v[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) v[i] = second ? high_bf16(y[i]) : low_bf16(y[i]);
#pragma unroll
    for (int h = 0; h < 2; h++)
        q[h] = encode_products<CODES>(s, v[h * 4], v[h * 4 + 1], v[h * 4 + 2], v[h * 4 + 3]);
}

/* Leaves codes of a patch's columns, each with its own scale. */
template <typename AT, int CODES, bool POW2>
static __device__ __forceinline__ void leave_columns(uint8_t *codes, int half, const side &s,
                                                     const uint32_t x[ROWS][4],
                                                     const float enc[RUN])
{
    const bool above = is_left_above(half, AT::row());
    uint8_t *to = tile_lines(codes, half) + line_place(AT::column()) + AT::row();
#pragma unroll
    for (int c = 0; c < RUN; c += 2) {
        uint32_t y[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            y[i] = POW2 ? times_powers(x[i][c / 2], power_words(enc[c], enc[c + 1])) : x[i][c / 2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            uint32_t q[2];
            if (POW2)
                encode_column<CODES>(q, s, y, e);
            else
                encode_column<CODES>(q, s, y, e, enc[c + e]);
            leave_column(to, c + e, above, q[0], q[1]);
        }
    }
}

/* ---- what codes are worth ----------------------------------------------------------------------
 */

/* Of a code whose element was multiplied by a power of two. */
static __device__ __forceinline__ float inverse_power(float enc)
{
    const uint32_t bits = 0x7f000000u - (mt_f32_bits(enc) & 0x7f800000u);
    return mt_f32_from_bits(bits ? bits : 0x00400000u);
}

template <int CODES>
static __device__ __forceinline__ uint32_t encode_pair(const side &s, float low, float high)
{
#if MT_CONVERTS_FP8
    return native_pair(CODES == CODES_E4M3 ? MT_ELEMENT_E4M3 : MT_ELEMENT_E5M2, low, high);
#else
    return (uint32_t)mt_encode(s.codec, low) | (uint32_t)mt_encode(s.codec, high) << 8;
#endif
}

/* Of codes of two elements, each under a scale. */
template <int CODES>
static __device__ __forceinline__ uint32_t value_pair(const side &s, uint32_t w, float low,
                                                      float high)
{
    const uint32_t y = times_powers(w, power_words(low, high));
    float v[2];
    byte_pair_values<CODES>(v, s.codec, encode_pair<CODES>(s, low_bf16(y), high_bf16(y)));
    return bf16_pair(v[0] * inverse_power(low), v[1] * inverse_power(high));
}

/* Where a patch lies in a direction that is kept decoded. */
template <typename AT> static __device__ __forceinline__ mt_bf16 *values_at(const strip &p, int dir)
{
    return (mt_bf16 *)p.parts[dir].codes + (uint64_t)(uint32_t)AT::row() * (uint32_t)p.cols +
           AT::column();
}

/* Of rows' codes. */
template <typename AT, int CODES>
static __device__ __forceinline__ void
put_row_values(const side &s, const strip &p, const uint32_t x[ROWS][4], const float enc[ROWS])
{
    const int rows = AT::column() < p.width ? p.height - AT::row() : 0;
    mt_bf16 *to = values_at<AT>(p, MT_ROW);
#pragma unroll
    for (int i = 0; i < ROWS; i++, to += (uint32_t)p.cols) {
        uint32_t y[4];
#pragma unroll
        for (int k = 0; k < 4; k++) y[k] = value_pair<CODES>(s, x[i][k], enc[i], enc[i]);
        if (i < rows) store_16(to, y[0], y[1], y[2], y[3]);
    }
}

/* Of columns' codes; the elements are used up. */
template <typename AT, int CODES>
static __device__ __forceinline__ void put_column_values(const side &s, const strip &p,
                                                         uint32_t x[ROWS][4], const float enc[RUN])
{
    const int rows = AT::column() < p.width ? p.height - AT::row() : 0;
    mt_bf16 *to = values_at<AT>(p, MT_COL);
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            x[i][k] = value_pair<CODES>(s, x[i][k], enc[k * 2], enc[k * 2 + 1]);
#pragma unroll
    for (int i = 0; i < ROWS; i++, to += (uint32_t)p.cols)
        if (i < rows) store_16(to, x[i][0], x[i][1], x[i][2], x[i][3]);
}

/* ---- members with one scale --------------------------------------------------------------------
 */

/* Codes of a patch of a member with one scale. */
template <typename AT, int DIRS, int CODES>
static __device__ __forceinline__ void run_whole(const job &j, uint8_t *codes, const strip &p,
                                                 int half, const uint32_t x[ROWS][4])
{
    enum { LAST = DIRS & COLUMN_CODES ? MT_COL : MT_ROW };
    const float enc = p.parts[LAST].whole, row = p.parts[MT_ROW].whole;
    const bool alike = LAST == MT_ROW || mt_f32_bits(enc) == mt_f32_bits(row);
    const int rows = AT::column() < p.width ? p.height - AT::row() : 0;
    const uint32_t pitch = (uint32_t)p.cols;
    uint8_t *to = p.parts[MT_ROW].codes + (uint64_t)(uint32_t)AT::row() * pitch + AT::column();
    uint32_t q[ROWS][2];
    if ((DIRS & ROW_CODES) && !alike) {
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            encode_row<CODES>(q[0], j.p.sides[MT_ROW], x[i], row);
            if (i < rows) store_8(to + (uint64_t)pitch * i, q[0][0], q[0][1]);
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++, to += pitch) {
        encode_row<CODES>(q[i], j.p.sides[LAST], x[i], enc);
        if ((DIRS & ROW_CODES) && alike && i < rows) store_8(to, q[i][0], q[i][1]);
    }
    if (DIRS & COLUMN_CODES)
        leave_turned(tile_lines(codes, half) + line_place(AT::column()) + AT::row(),
                     is_left_above(half, AT::row()), q);
}

/* What eight codes are worth without the scale. */
template <int CODES>
static __device__ __forceinline__ void put_eight_values(mt_bf16 *to, const side &s,
                                                        const uint32_t q[2])
{
    float v[RUN];
#pragma unroll
    for (int i = 0; i < RUN; i += 2) byte_pair_values<CODES>(v + i, s.codec, q[i / 4] >> i % 4 * 8);
    store_16(to, bf16_pair(v[0], v[1]), bf16_pair(v[2], v[3]), bf16_pair(v[4], v[5]),
             bf16_pair(v[6], v[7]));
}

/* The same where a direction is kept decoded. */
template <typename AT, int DIRS, int CODES>
static __device__ __forceinline__ void
run_whole_values(const job &j, uint8_t *codes, const strip &p, int half, const uint32_t x[ROWS][4])
{
    enum { FIRST = AT::IN_ROWS ? MT_ROW : MT_COL, BOTH = AT::IN_ROWS && AT::IN_COLUMNS };
    const float enc = p.parts[FIRST].whole, other = p.parts[MT_COL].whole;
    const bool alike = mt_f32_bits(enc) == mt_f32_bits(other);
    const int rows = AT::column() < p.width ? p.height - AT::row() : 0;
    const uint32_t pitch = (uint32_t)p.cols;
    const uint64_t at = (uint64_t)(uint32_t)AT::row() * pitch + AT::column();
    uint8_t *row_codes = p.parts[MT_ROW].codes + at;
    mt_bf16 *row = values_at<AT>(p, MT_ROW), *column = values_at<AT>(p, MT_COL);
    uint32_t q[ROWS][2];
#pragma unroll
    for (int i = 0; i < ROWS; i++, row_codes += pitch, row += pitch, column += pitch) {
        encode_row<CODES>(q[i], j.p.sides[FIRST], x[i], enc);
        if ((DIRS & ROW_CODES) && i < rows) store_8(row_codes, q[i][0], q[i][1]);
        if ((DIRS & ROW_VALUES) && i < rows) put_eight_values<CODES>(row, j.p.sides[MT_ROW], q[i]);
        if (BOTH && !alike) encode_row<CODES>(q[i], j.p.sides[MT_COL], x[i], other);
        if ((DIRS & COLUMN_VALUES) && i < rows)
            put_eight_values<CODES>(column, j.p.sides[MT_COL], q[i]);
    }
    if (DIRS & COLUMN_CODES)
        leave_turned(tile_lines(codes, half) + line_place(AT::column()) + AT::row(),
                     is_left_above(half, AT::row()), q);
}

/* ---- the kernel -------------------------------------------------------------------------------
 */

/* From so many rows on, columns of tiles are written from end to end. */
enum { LONG = 64 * TILE };

/* Results of members that a sweep before has found. */
static __device__ __noinline__ void give_found(const job &j)
{
    const int64_t count = j.p.group.members, step = (int64_t)gridDim.x * TILE_THREADS;
    int64_t i = (int64_t)blockIdx.x * TILE_THREADS + threadIdx.x;
    for (; i < count; i += step) give_results(j, i);
}
/* Whether nothing more is found of them. */
static __host__ __device__ __forceinline__ bool gives_found(const job &j)
{
    return !j.gives && !j.nans && !j.measure[MT_ROW] && !j.measure[MT_COL];
}

template <int KIND, int DIRS, int CODES, int FROM>
static __global__ void __launch_bounds__(TILE_THREADS, (layout<KIND, DIRS, FROM>::RESIDENT))
    bytes_kernel(const __grid_constant__ job j)
{
    typedef layout<KIND, DIRS, FROM> at;
    extern __shared__ uint4 mt_shared[];
    bytes_space<KIND, DIRS, FROM> *sp = (bytes_space<KIND, DIRS, FROM> *)mt_shared;
    const int lane = lane_of_warp();
    strip &p = sp->strips[threadIdx.x / 32];
    uint32_t x[ROWS][4], most = 0; /* what a thread has found */
    bool after = false;            /* the tile before has left ends of its lines to this one */
    const bool lines = FROM == LYING && DIRS == COLUMN_CODES && at::TURNED;
    const bool down = at::BY_TOKEN || (lines && !j.p.group.first_dims && j.p.group.m >= LONG);
    const bool early = blockIdx.x < j.table.early;
    if (!early) wait_for_results();
    let_follow();
    if (!(early ? find_strip(&p, j.p, j.table, down)
                : take_strip(&p, j.table, j.p.group.k, down))) {
        wait_for_results();
        if (KIND == WHOLE && gives_found(j)) give_found(j);
        return;
    }
    if (lane == 0) sp->nans[threadIdx.x / 32] = 0;
    float weight = FROM == WEIGHTED ? row_value<at>(j.row_weight, p, 0, p.height) : 0;
    if (FROM == LYING)
        load_patch<at>(x, p);
    else if (FROM != GRADIENT)
        send_patch<at, FROM>(sp->slots, p, 0, p.height, p.width,
                             at::BY_TOKEN ? row_value<at>(j.row_token, p, 0, p.height) : 0);
    if (threadIdx.x < MT_DIR_COUNT && j.measure[lane])
        p.seen[lane] = early ? 0 : __ldcg((const uint32_t *)j.amax[lane] + p.index);
    if (KIND == WHOLE && FROM == LYING && early && !j.gives)
        wait_for_results(); /* for amaxes of the sweep before */
    if (KIND == WHOLE && lane < MT_DIR_COUNT && j.p.sides[lane].present)
        p.parts[lane].whole = whole_scale(j, lane, p.index);
    __syncwarp();
    /* a strip goes along the rows, or down the columns */
    const bool right = FROM == LYING && at::IS_PLANAR && j.table.wide > 1;
    for (int left = (right ? p.span : p.rows) - TILE, turn = 0;; left -= TILE, turn++) {
        const bool more = left > 0; /* rows below the tile, or columns to its right */
        const int next = left < TILE ? left : (int)TILE, n = left >> 7;
        const int below = right ? p.height : next;
        if (FROM == GRADIENT) {
            make_patch<at>(x, j, p);
        } else if (FROM != LYING || turn) {
            copies_done();
            take_patch<at, FROM>(x, sp->slots, weight, p.width);
        }
        const int token = at::BY_TOKEN && more ? row_value<at>(j.row_token, p, TILE, below) : 0;
        if (FROM == WEIGHTED && more) weight = row_value<at>(j.row_weight, p, TILE, below);
        float row[ROWS] = {}, column[RUN] = {};
        reach e = {};
        if (FROM != GRADIENT && more)
            send_patch<at, FROM>(sp->slots, p, right ? TILE : p.plain_down, below,
                                 right ? next : p.width, token);
        if (KIND != WHOLE || is_measured(j)) find_reach<KIND != WHOLE && at::IN_ROWS>(&e, x);
        if (e.nans) { /* seldom */
            atomicAdd(&sp->nans[threadIdx.x / 32], e.nans);
#pragma unroll
            for (int i = 0; CODES == CODES_E2M1 && i < ROWS * 4; i++)
                x[i / 4][i % 4] = without_nan_signs(x[i / 4][i % 4]);
        }
        raise(&most, e.all);
        if (KIND == WHOLE && at::WORTH)
            run_whole_values<at, DIRS, CODES>(j, sp->codes, p, n & 1, x);
        if (KIND == WHOLE && !at::WORTH) run_whole<at, DIRS, CODES>(j, sp->codes, p, n & 1, x);
        if (at::IS_PLANAR) {
            const int slot = right ? turn : n & 1; /* of scales */
            if (at::IN_ROWS) planar_rows<at>(row, j, sp->scales[slot], e);
            if (at::IN_COLUMNS) planar_columns<at>(column, j, p, e);
            if (DIRS & ROW_VALUES) put_row_values<at, CODES>(j.p.sides[MT_ROW], p, x, row);
            if (DIRS & (ROW_CODES | COLUMN_CODES))
                put_rows<at, KIND, DIRS, CODES, true>(j, p, x, row, column);
            if (DIRS & COLUMN_VALUES) put_column_values<at, CODES>(j.p.sides[MT_COL], p, x, column);
            if constexpr (at::IS_PLANAR && at::ROW_SCALES) {
                if (!right || !more) {
                    __syncthreads(); /* the scales are there */
                    put_row_scales(sp->scales + (right ? 0 : slot), p, right ? p.span : p.width);
                }
            }
        }
        if (KIND == LINES) {
            if (at::IN_COLUMNS) {
                leave_pairs(sp->partial, e);
                __syncthreads(); /* the magnitudes are there */
                line_columns<at>(sp->enc, j, p, sp->partial);
            }
            if (at::IN_ROWS) {
                line_rows<at>(row, j, p, e);
                if (DIRS & ROW_VALUES)
                    put_row_values<at, CODES>(j.p.sides[MT_ROW], p, x, row);
                else if (at::BY_POWERS && j.p.sides[MT_ROW].options.pow2)
                    put_rows<at, KIND, ROW_CODES, CODES, true>(j, p, x, row, column);
                else
                    put_rows<at, KIND, ROW_CODES, CODES, false>(j, p, x, row, column);
            }
            if (at::IN_COLUMNS) {
                __syncthreads(); /* what columns are multiplied by is there */
#pragma unroll
                for (int i = 0; i < RUN; i += 4) {
                    const float4 q = *(const float4 *)(sp->enc + at::column() + i);
                    column[i] = q.x, column[i + 1] = q.y, column[i + 2] = q.z, column[i + 3] = q.w;
                }
                const side &to = j.p.sides[MT_COL];
                if (DIRS & COLUMN_VALUES)
                    put_column_values<at, CODES>(to, p, x, column);
                else if (at::BY_POWERS && to.options.pow2)
                    leave_columns<at, CODES, true>(sp->codes, n & 1, to, x, column);
                else
                    leave_columns<at, CODES, false>(sp->codes, n & 1, to, x, column);
            }
        }
        if (at::TURNED) {
            const bool even = is_even(p, MT_COL), on = !even && more;
            const unevenly u = { tile_lines(sp->codes, n & 1), after, on };
            const part &to = p.parts[MT_COL];
            const int bytes = to.padded ? (int)TILE : p.height;
            after = on;
            __syncthreads(); /* all codes are there */
            if (even)
                put_even_codes(u.lines, to.codes, to.pitch, p.width, bytes);
            else
                put_uneven_codes(u, to.codes, to.pitch, p.width, bytes);
            if (on) __syncthreads(); /* those of two tiles have been read */
        }
        if (!more) break;
        right ? step_right(&p, next) : step_down(&p, below);
    }
    wait_for_results(); /* early blocks do so here */
    if (KIND == WHOLE && gives_found(j)) give_found(j);
    if (!is_measured(j)) return;
    most = __reduce_max_sync(~0u, most);
    if (lane == 0) sp->most[threadIdx.x / 32] = most;
    raise_by<WARPS>(j, sp, p);
}

/* ---- the host's part --------------------------------------------------------------------------
 */

template <int KIND, int DIRS, int CODES, int FROM>
static mt_status launch(mt_stream *stream, const job *j)
{
    enum { BYTES = sizeof(bytes_space<KIND, DIRS, FROM>) };
    enum { MANY = 1024 /* members that a warp may count in time */ };
    const int64_t blocks = j->table.most * mt_ceil_div(j->p.group.k, TILE * j->table.wide);
    job own = *j;
    /* who clears swizzled scales comes between */
    const bool cleared = j->p.sides[MT_ROW].swizzled || j->p.sides[MT_COL].swizzled;
    const bool few = j->p.group.members <= MANY && mt_cuda_plan_rows(&j->p.group) <= MOST_FOUND;
    if ((j->gives || (KIND == WHOLE && FROM == LYING)) && !cleared && few)
        own.table.early =
            (unsigned)mt_cuda_multiprocessors(stream) * layout<KIND, DIRS, FROM>::RESIDENT;
    MT_TRY(mt_cuda_give_shared(stream, (const void *)bytes_kernel<KIND, DIRS, CODES, FROM>, BYTES,
                               "quantize: bytes"));
    MT_TRY(follow(stream, bytes_kernel<KIND, DIRS, CODES, FROM>, (unsigned)blocks, TILE_THREADS,
                  BYTES, own));
    MT_LAUNCHED(stream, "quantize: bytes");
    return MT_OK;
}

/* Whether strips know elements and places of a job of kinds of theirs. */
static bool strips_suffice(const job *j)
{
    const side *row = &j->p.sides[MT_ROW], *col = &j->p.sides[MT_COL];
    const mt_group *g = &j->p.group;
    const int kind = mt_cuda_short_kind(j), run = kind == PLANAR_NIBBLES ? 4 : 8; /* bytes */
    if (kind == NIBBLES || kind == KINDS) return false;
    if (j->sums || g->last_dims || g->k % RUN) return false;
    if (g->m > INT32_MAX || g->k > INT32_MAX || mt_cuda_plan_units(g) > INT32_MAX) return false;
    if ((uintptr_t)j->p.sides[SOURCE].codes % 16) return false;
    if (j->z && (g->k % (2 * RUN) || (uintptr_t)j->z % 16)) return false;
    if (row->present && (uintptr_t)row->codes % (row->decoded ? 16 : run)) return false;
    if (col->present && (col->decoded || !col->transposed) &&
        (uintptr_t)col->codes % (col->decoded ? 16 : run))
        return false;
    return !row->present || !col->present || row->options.element == col->options.element;
}
