/* Quantize to bytes of bf16 rows that are gathered, with weights or not, or gradients of what
 * SwiGLU is of, in both directions or columns alone, whose codes are padded; blocks of 128
 * or one scale a member. A thread has four columns of 32 rows in registers, or, of a gradient, of
 * 16 rows of both halves, which share what they are made of; other blocks compute while rows come
 * to one. Codes pass by L2, in which the rows' source is to stay. The arithmetic is that of the
 * tiles. */
#include "kernels/cuda/quantize_bytes.cuh"

/* A thread's registers: four columns of DEEP rows, in each half of a gradient. */
enum { WIDE = 4, HELD = 32 };
template <int FROM> struct held {
    enum {
        HALVES = FROM == GRADIENT ? 2 : 1,
        DEEP = HELD / HALVES,
        WARPS = TILE / DEEP,
        THREADS = WARPS * 32,
        RESIDENT = 512 / THREADS
    };
    static __device__ __forceinline__ int row(void) { return (int)threadIdx.x / 32 * DEEP; }
};

template <int FROM> struct gathered_space {
    typedef held<FROM> at;
    uint4 lines[at::HALVES][TILE][SEGMENTS];  /* codes of columns, in chunks that change places */
    uint2 partial[at::HALVES][at::WARPS][32]; /* magnitudes of each warp's columns */
    strip strips[at::WARPS];                  /* each warp's own */
    uint32_t most[at::WARPS];                 /* what warps found of the member */
    int nans[at::WARPS];
};

/* ---- elements ---------------------------------------------------------------------------------
 */

static __device__ __forceinline__ uint2 weigh(const uint2 &x, float weight)
{
    return make_uint2(bf16_pair(weight * low_bf16(x.x), weight * high_bf16(x.x)),
                      bf16_pair(weight * low_bf16(x.y), weight * high_bf16(x.y)));
}

/* Of row `lane` of the warp's: where it is gathered from, what it is weighted by. */
struct origin {
    int token;
    float weight;
};

/* In the tile `down` rows below. */
template <int FROM>
static __device__ __forceinline__ origin origin_of(const job &j, const strip &p, int down,
                                                   int height)
{
    const int row = held<FROM>::row() + lane_of_warp();
    origin o = { 0, 0 };
    if (FROM == GRADIENT || row >= height) return o;
    o.token = j.row_token[p.first_row + down + row];
    if (FROM == WEIGHTED) o.weight = j.row_weight[p.first_row + down + row];
    return o;
}

template <int FROM>
static __device__ __forceinline__ void get_rows(uint2 x[HELD], const job &j, const strip &p,
                                                const origin &o)
{
    typedef held<FROM> at;
    const int left = p.height - at::row(), column = lane_of_warp() * WIDE;
    const bool here = column < p.width;
    const uint64_t pitch = (uint64_t)(uint32_t)p.cols * sizeof(mt_bf16);
    const char *from = (const char *)(p.plain + (here ? column : 0));
    const int rows = here ? left : 0;
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        const char *row = from + __shfl_sync(~0u, o.token, i) * pitch;
        x[i] = make_uint2(0, 0);
        if (i < rows) x[i] = __ldg((const uint2 *)row);
    }
#pragma unroll
    for (int i = 0; FROM == WEIGHTED && i < HELD; i++) {
        const float by = __shfl_sync(~0u, o.weight, i);
        x[i] = weigh(x[i], here ? by : 0);
    }
}

/* Gradients of z: of the gate, then of up; dots of rows, where they are wanted. */
template <>
__device__ __forceinline__ void get_rows<GRADIENT>(uint2 x[HELD], const job &j, const strip &p,
                                                   const origin &)
{
    typedef held<GRADIENT> at;
    enum { MANY = 8 }; /* rows whose loads are under way */
    const mt_bf16 *source = (const mt_bf16 *)j.p.sides[SOURCE].codes;
    const int half = p.cols / 2, rows = p.height - at::row();
    const int column = (int)(p.plain - source) + lane_of_warp() * WIDE;
    const int64_t row = p.first_row + at::row();
    const mt_bf16 *d = source + row * half + column, *g = j.z + row * p.cols + column;
#pragma unroll
    for (int first = 0; first < at::DEEP; first += MANY) {
        uint2 in[MANY][3];
        mt_eight_dots dots;
        static_assert(MANY == 8, "dots");
#pragma unroll
        for (int i = 0; i < MANY; i++, d += half, g += p.cols) {
            in[i][0] = in[i][1] = in[i][2] = make_uint2(0, 0);
            if (first + i >= rows) continue;
            in[i][0] = __ldg((const uint2 *)d), in[i][1] = __ldg((const uint2 *)g);
            in[i][2] = __ldg((const uint2 *)(g + half));
        }
#pragma unroll
        for (int i = 0; i < MANY; i += 2) {
            uint4 two[3], dg, du;
#pragma unroll
            for (int k = 0; k < 3; k++)
                two[k] = make_uint4(in[i][k].x, in[i][k].y, in[i + 1][k].x, in[i + 1][k].y);
            swiglu_gradients(&dg, &du, two[0], two[1], two[2]);
            uint2 *gate = x + first + i, *up = gate + at::DEEP;
            gate[0] = make_uint2(dg.x, dg.y), gate[1] = make_uint2(dg.z, dg.w);
            up[0] = make_uint2(du.x, du.y), up[1] = make_uint2(du.z, du.w);
            dots.take(i, mt_dot_of_four(up[0], in[i][2]), 1);
            dots.take(i + 1, mt_dot_of_four(up[1], in[i + 1][2]), 1);
        }
        const int own = first + (lane_of_warp() & 7);
        const float dot = dots.of[0] + __shfl_xor_sync(~0u, dots.of[0], 8);
        if (j.dots && own < rows && !(lane_of_warp() & 8))
            j.dots[(row + own) * mt_dot_parts(half) + column / DOTS_PART] = dot;
    }
}

/* ---- magnitudes -------------------------------------------------------------------------------
 */

/* Of two columns a word, of two rows a word, with any sign; of all without. */
template <int FROM> struct span {
    uint32_t pairs[held<FROM>::HALVES][2], rows[HELD / 2], all;
    int nans;
};

/* CLEAN: NaNs do not count, but are counted. */
template <bool ROWS_TOO, bool CLEAN, int FROM>
static __device__ __forceinline__ void find_larger(span<FROM> *it, const uint2 x[HELD])
{
    typedef held<FROM> at;
    uint32_t all = 0;
#pragma unroll
    for (int i = 0; i < HELD; i += 2) {
        uint32_t w[2][2] = { { x[i].x, x[i].y }, { x[i + 1].x, x[i + 1].y } };
#pragma unroll
        for (int k = 0; CLEAN && k < 4; k++) {
            const uint32_t was = w[k / 2][k % 2], now = without_nans(was);
            it->nans += ((now ^ was) & 0x7fff ? 1 : 0) + ((now ^ was) & 0x7fff0000u ? 1 : 0);
            w[k / 2][k % 2] = now;
        }
        if (ROWS_TOO) {
            const uint32_t a = larger_pair(w[0][0], w[0][1]), b = larger_pair(w[1][0], w[1][1]);
            it->rows[i / 2] = larger_pair(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
        }
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const uint32_t both = larger_pair(w[0][k], w[1][k]);
            uint32_t &pair = it->pairs[i / at::DEEP][k];
            pair = i % at::DEEP ? larger_pair(pair, both) : both;
        }
    }
#pragma unroll
    for (int k = 0; k < 2 * at::HALVES; k++) all = larger_pair(all, it->pairs[k / 2][k % 2]);
    it->all = larger_half(all & 0x7fff7fffu);
}

template <bool ROWS_TOO, int FROM>
static __device__ __forceinline__ void find_span(span<FROM> *it, const uint2 x[HELD])
{
    find_larger<ROWS_TOO, false>(it, x);
    if (it->all > 0x7f80) find_larger<ROWS_TOO, true>(it, x);
}

/* From the first half's tiles to the second's. */
template <typename T> static __device__ __forceinline__ T *beyond(T *p, int64_t across, int cols)
{
    return p + cols / 2 / TILE * across;
}

/* That of row `lane` of the warp's, which is stored; what it is multiplied by. */
template <int FROM>
static __device__ __forceinline__ float scale_rows(const job &j, const strip &p, uint32_t rows[])
{
    typedef held<FROM> at;
    const int lane = lane_of_warp(), row = at::row() + lane % at::DEEP;
#pragma unroll
    for (int k = 2; k < 6; k++) {
        const int n = HELD >> k;
        const bool up = lane & n * 2;
#pragma unroll
        for (int i = 0; i < HELD / 4; i++) {
            if (i >= n) continue;
            const uint32_t keep = up ? rows[n + i] : rows[i], give = up ? rows[i] : rows[n + i];
            rows[i] = larger_pair(keep, __shfl_xor_sync(~0u, give, n * 2));
        }
    }
    const uint32_t most = larger_pair(rows[0], __shfl_xor_sync(~0u, rows[0], 1)) & 0x7fff7fffu;
    const float2 e = line_cell(j.p.sides[MT_ROW], lane & 1 ? most >> 16 : most & 0xffff);
    const part &to = p.parts[MT_ROW];
    lattice l = scales_of(to);
    if (lane >= at::DEEP) l.at = beyond(l.at, to.scales_across, p.cols);
    if (row < p.height) store_4(l.at + scale_offset(l, row, 0) * 4, mt_f32_bits(e.y));
    return e.x;
}

/* Of the thread's columns of a half; warp `storing` stores them. */
template <int FROM>
static __device__ __forceinline__ void scale_columns(float enc[WIDE], const job &j, const strip &p,
                                                     const gathered_space<FROM> *sp, int half,
                                                     int storing)
{
    const int lane = lane_of_warp();
    uint2 most = sp->partial[half][0][lane];
    float2 e[WIDE];
#pragma unroll
    for (int w = 1; w < held<FROM>::WARPS; w++) {
        const uint2 m = sp->partial[half][w][lane];
        most.x = larger_halves(most.x, m.x), most.y = larger_halves(most.y, m.y);
    }
    e[0] = line_cell(j.p.sides[MT_COL], most.x & 0xffff);
    e[1] = line_cell(j.p.sides[MT_COL], most.x >> 16);
    e[2] = line_cell(j.p.sides[MT_COL], most.y & 0xffff);
    e[3] = line_cell(j.p.sides[MT_COL], most.y >> 16);
#pragma unroll
    for (int c = 0; c < WIDE; c++) enc[c] = e[c].x;
    if ((int)threadIdx.x / 32 != storing || lane * WIDE >= p.width) return;
    const part &to = p.parts[MT_COL];
    lattice l = scales_of(to);
    if (half) l.at = beyond(l.at, to.scales_across, p.cols);
    uint8_t *at = l.at + scale_offset(l, lane * WIDE, 0) * 4;
#pragma unroll
    for (int c = 0; c < WIDE; c++) store_4(at + c * l.line * 4, mt_f32_bits(e[c].y));
}

/* ---- codes ------------------------------------------------------------------------------------
 */

template <int CODES>
static __device__ __forceinline__ uint32_t encode_across(const side &s, const uint2 &x, float enc)
{
    return encode_products<CODES>(s, low_bf16(x.x) * enc, high_bf16(x.x) * enc, low_bf16(x.y) * enc,
                                  high_bf16(x.y) * enc);
}

/* Where the chunk of sixteen rows of a column lies. */
template <int FROM>
static __device__ __forceinline__ uint4 *chunk_of(gathered_space<FROM> *sp, int half, int column,
                                                  int chunk)
{
    return &sp->lines[half][column][chunk ^ (column / WIDE & (SEGMENTS - 1))];
}

static __device__ __forceinline__ float element_at(const uint2 &x, int c)
{
    const uint32_t w = c < 2 ? x.x : x.y;
    return c % 2 ? high_bf16(w) : low_bf16(w);
}

/* Columns of a half, each with its own scale. */
template <int CODES, int FROM>
static __device__ __forceinline__ void leave_down(gathered_space<FROM> *sp, int half, const side &s,
                                                  const uint2 x[], const float enc[WIDE])
{
    enum { CHUNKS_DOWN = held<FROM>::DEEP / SEGMENT };
    const int first = (int)threadIdx.x / 32 * CHUNKS_DOWN;
#pragma unroll
    for (int c = 0; c < WIDE; c++)
#pragma unroll
        for (int h = 0; h < CHUNKS_DOWN; h++) {
            uint32_t q[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const uint2 *four = x + h * SEGMENT + k * 4;
                q[k] = encode_products<CODES>(
                    s, element_at(four[0], c) * enc[c], element_at(four[1], c) * enc[c],
                    element_at(four[2], c) * enc[c], element_at(four[3], c) * enc[c]);
            }
            *chunk_of(sp, half, lane_of_warp() * WIDE + c, first + h) =
                make_uint4(q[0], q[1], q[2], q[3]);
        }
}

/* Columns with codes of rows. */
template <int FROM>
static __device__ __forceinline__ void leave_turned_rows(gathered_space<FROM> *sp,
                                                         const uint32_t q[HELD])
{
    enum { CHUNKS_DOWN = held<FROM>::DEEP / SEGMENT };
    const int first = (int)threadIdx.x / 32 * CHUNKS_DOWN;
#pragma unroll
    for (int h = 0; h < HELD / SEGMENT; h++) {
        uint32_t y[4][4];
#pragma unroll
        for (int k = 0; k < 4; k++) turn_bytes(y[k], q + h * SEGMENT + k * 4);
#pragma unroll
        for (int c = 0; c < WIDE; c++)
            *chunk_of(sp, h / CHUNKS_DOWN, lane_of_warp() * WIDE + c, first + h % CHUNKS_DOWN) =
                make_uint4(y[0][c], y[1][c], y[2][c], y[3][c]);
    }
}

/* Codes leave L2 before what rows are gathered from does. */
static __device__ __forceinline__ void put_4(void *to, uint32_t x)
{
    __stcs((unsigned int *)to, x);
}
static __device__ __forceinline__ void put_16(void *to, const uint4 &x)
{
    __stcs((uint4 *)to, x);
}

template <int FROM>
static __device__ __forceinline__ void put_columns(gathered_space<FROM> *sp, const strip &p)
{
    enum { STEP = held<FROM>::THREADS / SEGMENTS };
    const int at = (int)threadIdx.x % SEGMENTS, first = (int)threadIdx.x / SEGMENTS;
    const part &to = p.parts[MT_COL];
    const uint64_t step = (uint64_t)STEP * to.pitch;
#pragma unroll
    for (int h = 0; h < held<FROM>::HALVES; h++) {
        uint8_t *q = (h ? beyond(to.codes, to.codes_across, p.cols) : to.codes) +
                     (uint64_t)first * to.pitch + at * 16;
#pragma unroll
        for (int i = 0; i < TILE / STEP; i++, q += step) {
            const int c = first + i * STEP;
            const uint4 w = *chunk_of(sp, h, c, at);
            if (c < p.width) put_16(q, w);
        }
    }
}

/* ---- the kernel -------------------------------------------------------------------------------
 */

/* Adds what a warp has found in a tile to what it has. */
template <int FROM>
static __device__ __forceinline__ void leave_found(gathered_space<FROM> *sp, const span<FROM> &e)
{
    const uint32_t most = __reduce_max_sync(~0u, e.all);
    const int nans = __reduce_add_sync(~0u, e.nans), warp = (int)threadIdx.x / 32;
    if (lane_of_warp()) return;
    sp->most[warp] = max(sp->most[warp], most), sp->nans[warp] += nans;
}

/* Codes of rows, code(i) of row i of those held, two halves beside each other; stored or not. */
template <int FROM, typename F>
static __device__ __forceinline__ void put_rows_of(const strip &p, bool stored, F code)
{
    typedef held<FROM> at;
    const bool here = stored && lane_of_warp() * WIDE < p.width;
    const int rows = here ? p.height - at::row() : 0;
    const uint32_t pitch = (uint32_t)p.cols;
#pragma unroll
    for (int h = 0; h < at::HALVES; h++) {
        uint8_t *to = p.parts[MT_ROW].codes + (uint64_t)(uint32_t)at::row() * pitch +
                      lane_of_warp() * WIDE + h * (pitch / 2);
#pragma unroll
        for (int i = 0; i < at::DEEP; i++, to += pitch) {
            const uint32_t w = code(h * at::DEEP + i);
            if (i < rows) put_4(to, w);
        }
    }
}

/* Codes of a member with one scale. */
template <int DIRS, int CODES, int FROM>
static __device__ __forceinline__ void run_member(const job &j, gathered_space<FROM> *sp,
                                                  const strip &p, const uint2 x[HELD])
{
    const float enc = p.parts[MT_COL].whole, row = p.parts[MT_ROW].whole;
    const bool alike = mt_f32_bits(enc) == mt_f32_bits(row);
    uint32_t q[HELD];
    if ((DIRS & ROW_CODES) && !alike)
        put_rows_of<FROM>(
            p, true, [&](int i) { return encode_across<CODES>(j.p.sides[MT_ROW], x[i], row); });
    put_rows_of<FROM>(p, (DIRS & ROW_CODES) && alike, [&](int i) {
        return q[i] = encode_across<CODES>(j.p.sides[MT_COL], x[i], enc);
    });
    leave_turned_rows(sp, q);
}

/* Codes of blocks of 128; the thread block comes here. */
template <int DIRS, int CODES, int FROM>
static __device__ __forceinline__ void run_blocks(const job &j, gathered_space<FROM> *sp,
                                                  const strip &p, const uint2 x[HELD],
                                                  span<FROM> *e)
{
    typedef held<FROM> at;
#pragma unroll
    for (int h = 0; h < at::HALVES; h++)
        sp->partial[h][threadIdx.x / 32][lane_of_warp()] =
            make_uint2(e->pairs[h][0] & 0x7fff7fffu, e->pairs[h][1] & 0x7fff7fffu);
    if (DIRS & ROW_CODES) {
        const float own = scale_rows<FROM>(j, p, e->rows);
        put_rows_of<FROM>(p, true, [&](int i) {
            return encode_across<CODES>(j.p.sides[MT_ROW], x[i], __shfl_sync(~0u, own, i));
        });
    }
    __syncthreads(); /* the magnitudes are there */
#pragma unroll
    for (int h = 0; h < at::HALVES; h++) {
        float enc[WIDE];
        scale_columns(enc, j, p, sp, h, (int)(blockIdx.x * at::HALVES + h) & (at::WARPS - 1));
        leave_down<CODES>(sp, h, j.p.sides[MT_COL], x + h * at::DEEP, enc);
    }
}

template <int KIND, int DIRS, int CODES, int FROM>
static __global__ void __launch_bounds__(held<FROM>::THREADS, (held<FROM>::RESIDENT))
    gathered_kernel(const __grid_constant__ job j)
{
    typedef held<FROM> at;
    __shared__ gathered_space<FROM> space;
    gathered_space<FROM> *sp = &space;
    const int lane = lane_of_warp();
    strip &p = sp->strips[threadIdx.x / 32];
    wait_for_results();
    let_follow();
    if (!take_strip(&p, j.table, j.p.group.k / at::HALVES, FROM != GRADIENT)) return;
    if (lane == 0) sp->most[threadIdx.x / 32] = 0, sp->nans[threadIdx.x / 32] = 0;
    if (FROM == GRADIENT && lane == 0) p.width = TILE;
    if (threadIdx.x < MT_DIR_COUNT && j.measure[lane])
        p.seen[lane] = __ldcg((const uint32_t *)j.amax[lane] + p.index);
    if (KIND == WHOLE && lane < MT_DIR_COUNT && j.p.sides[lane].present)
        p.parts[lane].whole = whole_scale(j, lane, p.index);
    __syncwarp();
    origin o = origin_of<FROM>(j, p, 0, p.height);
    for (int left = p.rows - TILE;; left -= TILE) { /* rows below the tile */
        uint2 x[HELD];
        span<FROM> e = {};
        get_rows<FROM>(x, j, p, o);
        if (left > 0) o = origin_of<FROM>(j, p, TILE, left < TILE ? left : (int)TILE);
        if (KIND != WHOLE || is_measured(j))
            find_span<KIND != WHOLE && (DIRS & ROW_CODES) != 0>(&e, x);
        if (is_measured(j)) leave_found(sp, e);
        if (KIND == WHOLE)
            run_member<DIRS, CODES>(j, sp, p, x);
        else
            run_blocks<DIRS, CODES>(j, sp, p, x, &e);
        __syncthreads(); /* all codes are there */
        put_columns(sp, p);
        if (left <= 0) break;
        if (KIND == WHOLE) __syncthreads(); /* they have been read */
        step_down(&p, left < TILE ? left : (int)TILE);
    }
    if (is_measured(j)) raise_by<held<FROM>::WARPS>(j, sp, p);
}

/* ---- the host's part --------------------------------------------------------------------------
 */

template <int KIND, int DIRS, int CODES, int FROM>
static mt_status launch(mt_stream *stream, const job *j)
{
    const int64_t blocks = j->table.most * mt_ceil_div(j->p.group.k / held<FROM>::HALVES, TILE);
    MT_TRY(follow(stream, gathered_kernel<KIND, DIRS, CODES, FROM>, (unsigned)blocks,
                  held<FROM>::THREADS, 0, *j));
    MT_LAUNCHED(stream, "quantize: gathered");
    return MT_OK;
}

template <int KIND> static mt_status run(mt_stream *stream, const job *j)
{
    enum { BOTH = ROW_CODES | COLUMN_CODES };
    const bool e5m2 = mt_codes_kind(j->p.sides[MT_COL]) == CODES_E5M2;
    if (j->z)
        return (e5m2 ? launch<KIND, BOTH, CODES_E5M2, GRADIENT>
                     : launch<KIND, BOTH, CODES_E4M3, GRADIENT>)(stream, j);
    if (j->row_weight)
        return (e5m2 ? launch<WHOLE, BOTH, CODES_E5M2, WEIGHTED>
                     : launch<WHOLE, BOTH, CODES_E4M3, WEIGHTED>)(stream, j);
    return launch<KIND, COLUMN_CODES, CODES_E4M3, GATHERED>(stream, j);
}

/* Measured on an H200: of blocks in both directions, and of rows as they are, the other way is no
 * slower. */
bool mt_cuda_gathered_suffice(const job *j)
{
    const side *row = &j->p.sides[MT_ROW], *col = &j->p.sides[MT_COL];
    const mt_group *g = &j->p.group;
    const int kind = mt_cuda_short_kind(j);
    const bool both = row->present;
    if (keeps_values(j) || !col->present || !col->padded || (uintptr_t)col->codes % 16)
        return false;
    if (j->z && (!both || g->k % (2 * TILE) || (uintptr_t)j->z % 16)) return false;
    if ((!j->row_token && !j->z) || !j->codes || j->sums || g->last_dims || g->k % RUN)
        return false;
    if (kind != WHOLE && kind != LINES) return false;
    if (both && !j->z && (kind == LINES || !j->row_weight)) return false;
    if (!both && (j->row_weight || mt_codes_kind(*col) != CODES_E4M3)) return false;
    if (both && row->options.element != col->options.element) return false;
    if (g->m > INT32_MAX || g->k > INT32_MAX || mt_cuda_plan_units(g) > INT32_MAX) return false;
    if ((uintptr_t)j->p.sides[SOURCE].codes % 16) return false;
    return !both || (uintptr_t)row->codes % RUN == 0;
}

mt_status mt_cuda_quantize_gathered(mt_stream *stream, const job *j)
{
    return mt_cuda_short_kind(j) == LINES ? run<LINES>(stream, j) : run<WHOLE>(stream, j);
}
