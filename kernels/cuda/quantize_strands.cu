/* nvfp4 with rotated columns (rht) by warps that wait for nobody: each has strands of sixteen rows,
 * as the tensor cores take them, from memory to registers to memory. Directions that are kept
 * decoded, both from the same elements and draws or columns alone, and what is measured of both, as
 * SwiGLU's gradient is made or later. Of bf16 rows that begin at multiples of 16 bytes, gathered or
 * not. */
#include "kernels/cuda/dots.cuh"
#include "kernels/cuda/quantize_find.cuh"
#include "kernels/cuda/quantize_halves.cuh"
#include "kernels/cuda/quantize_lanes.cuh"

/* What a sweep does. */
enum { MEASURES, MAKES, COLUMNS_ALONE, BOTH }; /* MAKES: and measures */
template <int SWEEP> static constexpr bool DECODES = SWEEP >= COLUMNS_ALONE;

/* Of a multiprocessor; words of a row that a thread has; columns of a strand that a warp takes at a
 * time, of each half if it makes. Code that warps run at their own pace should stay below 32 KB. */
template <int SWEEP, bool SR>
static constexpr int BLOCKS = SWEEP == MAKES || (SWEEP == BOTH && SR) ? 2 : 3;
template <int SWEEP> static constexpr int WORDS = DECODES<SWEEP> ? CHUNK_WORDS : 2 * CHUNK_WORDS;
template <int SWEEP>
static constexpr int PART = SWEEP == MAKES ? (int)DOTS_PART : 16 * WORDS<SWEEP>;

/* ---- where a warp is --------------------------------------------------------------------------
 */

struct strand {
    int64_t row0;    /* the member's first among those of all */
    int index, rows; /* the member, how many it has */
    int at;          /* its first, of the member */
};

/* A warp's own. */
struct strand_space {
    strand at;
    int32_t tokens[SEGMENT];                /* of its rows, where they are gathered */
    float g[MT_DIR_COUNT];                  /* what the member's blocks' scales follow from */
    float enc[MT_DIR_COUNT][NIBBLE_SCALES]; /* what elements under each are multiplied by */
};

/* Strands of all members. */
static __device__ __forceinline__ int count_strands(const mt_group &g)
{
    int strands = 0;
    for (int i = lane_of_warp(); i < (int)g.members; i += 32)
        strands += strips_of_rows(g, rows_of_member(g, i), SEGMENT);
    return __reduce_add_sync(~0u, strands);
}

static __device__ __forceinline__ bool find_strand(strand *to, const mt_group &g, int n)
{
    located it;
    if (!locate_strip(&it, g, SEGMENT, n)) return false;
    *to = strand{ it.before.rows, it.index, it.rows, it.at * SEGMENT };
    return true;
}

/* To the next one, which there is. */
static __device__ __forceinline__ void step_on(strand *s, const mt_group &g)
{
    for (s->at += SEGMENT; s->at >= s->rows; s->at = 0)
        s->row0 += s->rows, s->rows = rows_of_member(g, ++s->index);
}

static __device__ __forceinline__ void get_tokens(strand_space *sp, const job &j)
{
    const int own = lane_of_warp(), rows = sp->at.rows - sp->at.at;
    if (own < SEGMENT)
        sp->tokens[own] = own < rows ? j.row_token[sp->at.row0 + sp->at.at + own] : 0;
}

/* ---- decoding ---------------------------------------------------------------------------------
 */

/* Rows to where they go, as their codes are times their scales, two at a time: two lanes have a
 * segment. */
static __device__ __forceinline__ void put_rows(const uint32_t x[LANE_ROWS][CHUNK_WORDS],
                                                const uint32_t (*bits)[CHUNK_WORDS], const job &j,
                                                float g, const float *scale_enc, mt_bf16 *to,
                                                int64_t pitch, int rows, int cols)
{
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i += 2) {
        __syncwarp(); /* or rows are mixed, for which there are no registers */
        const uint4 in[2] = { make_uint4(x[i][0], x[i][1], x[i][2], x[i][3]),
                              make_uint4(x[i + 1][0], x[i + 1][1], x[i + 1][2], x[i + 1][3]) };
        uint4 y[2];
        decode_halves<32 / COLUMNS>(y, j, in, g, scale_enc, bits ? bits + i : NULL);
#pragma unroll
        for (int h = 0; h < 2; h++, to += pitch)
            if (first_row() + i + h < rows && first_column() < cols)
                store_16(to, y[h].x, y[h].y, y[h].z, y[h].w);
    }
}

/* Columns in place of x, as their codes are times their scales; whole: there are sixteen rows. */
static __device__ __forceinline__ void decode_lanes(uint32_t x[LANE_ROWS][CHUNK_WORDS],
                                                    const uint32_t (*bits)[CHUNK_WORDS],
                                                    const job &j, float g, const float *scale_enc,
                                                    const uint32_t rotation[4], bool whole)
{
    const uint32_t mask = j.p.sides[MT_COL].options.rht_mask;
    const uint32_t odd = whole ? odd_squares(x) : ~0u;
    uint32_t z[4][4], most[4];
    float enc[4][2];
    rotate_squares(z, most, x, 0, rotation, mask, odd, whole);
    const uint32_t stored = stored_of_squares(j, g, most);
    const uint32_t both = __byte_perm(scale_twice(stored & 0xff), scale_twice(stored >> 8), 0x5410);
    enc_of_squares(enc, scale_enc, stored);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float by[8] = { enc[i][0], enc[i][1], enc[i][0], enc[i][1],
                              enc[i][0], enc[i][1], enc[i][0], enc[i][1] };
        const uint32_t scale = __shfl_sync(~0u, both, i, 4), scales[2] = { scale, scale };
        uint32_t drawn[4], v[4];
        if (bits) take_pairs(drawn, bits, i);
        nibble_values(v, magnitude_nibbles(z[i], by, bits ? drawn : NULL), z[i], scales, false);
#pragma unroll
        for (int k = 0; k < 4; k++) z[i][k] = v[k];
    }
#pragma unroll
    for (int i = 0; i < 4; i += 2)
#pragma unroll
        for (int k = 0; k < LANE_ROWS; k++) {
            x[k][i / 2] = __byte_perm(z[i][k], z[i + 1][k], 0x5410);
            x[k][CHUNK_WORDS / 2 + i / 2] = __byte_perm(z[i][k], z[i + 1][k], 0x7632);
        }
}

/* A warp's rows to where they go. */
static __device__ __forceinline__ void store_lanes(const uint32_t x[LANE_ROWS][CHUNK_WORDS],
                                                   mt_bf16 *to, int64_t pitch, int rows, int cols)
{
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++, to += pitch)
        if (first_row() + i < rows && first_column() < cols)
            store_16(to, x[i][0], x[i][1], x[i][2], x[i][3]);
}

/* ---- making -----------------------------------------------------------------------------------
 */

/* The gradient of z, stored and measured: a part of DOTS_PART columns from c0 on of the gate's
 * half, and of the other. Dots as dots.cuh has them: eight threads have a part of a row. */
static __device__ __forceinline__ void make_part(const job &j, const strand_space *sp, int64_t c0,
                                                 const uint32_t rotation[4], found *it)
{
    const int64_t k = j.p.group.k, half = k / 2, row = sp->at.row0 + sp->at.at + first_row();
    const int64_t column = c0 + first_column();
    const int strand_rows = sp->at.rows - sp->at.at, left = strand_rows - first_row();
    const int rows = column < half ? left : 0;
    const mt_bf16 *d = j.da + row * half + column, *z = j.z + row * k + column;
    mt_bf16 *to = (mt_bf16 *)j.p.sides[SOURCE].codes + row * k + column;
    uint32_t x[LANE_ROWS][2 * CHUNK_WORDS];
    uint4 in[LANE_ROWS][3];
    mt_eight_dots dots;
    static_assert(TILE / 2 == DOTS_PART && LANE_ROWS == 4, "halves of lanes' columns, dots");
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++, d += half, z += k) {
        in[i][0] = in[i][1] = in[i][2] = make_uint4(0, 0, 0, 0);
        if (i >= rows) continue;
        in[i][0] = __ldg((const uint4 *)d), in[i][1] = __ldg((const uint4 *)z);
        in[i][2] = __ldg((const uint4 *)(z + half));
    }
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++, to += k) {
        uint4 dg, du;
        swiglu_gradients(&dg, &du, in[i][0], in[i][1], in[i][2]);
        x[i][0] = dg.x, x[i][1] = dg.y, x[i][2] = dg.z, x[i][3] = dg.w;
        x[i][4] = du.x, x[i][5] = du.y, x[i][6] = du.z, x[i][7] = du.w;
        dots.take(i, mt_dot_of_eight(du, in[i][2]), 32 / COLUMNS);
        if (i >= rows) continue;
        store_16(to, dg.x, dg.y, dg.z, dg.w), store_16(to + half, du.x, du.y, du.z, du.w);
    }
    const int own = lane_of_warp() / 4 % LANE_ROWS; /* the row of a thread's sum */
    const float dot = dots.of[2] + __shfl_xor_sync(~0u, dots.of[2], 16);
    if (j.dots && own < left && lane_of_warp() < 16)
        j.dots[(row + own) * mt_dot_parts(half) + c0 / DOTS_PART] = dot;
    measure_lanes(j, strand_rows >= SEGMENT, x, rotation, it);
}

/* ---- the kernel -------------------------------------------------------------------------------
 */

/* The member's scales of a direction. */
static __device__ __forceinline__ void take_member(strand_space *sp, const job &j, int dir)
{
    const level l = member_level(j.p.sides[dir], j.amax[dir][sp->at.index], NULL);
    for (int i = lane_of_warp(); i < NIBBLE_SCALES; i += 32)
        sp->enc[dir][i] = enc_of_stored(j, l, (uint32_t)i);
    if (lane_of_warp() == 0) sp->g[dir] = l.g;
}

/* Raises the member's values by what a warp has found. */
static __device__ __forceinline__ void give_strands(const job &j, int index, found *it)
{
#pragma unroll
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
        const uint32_t most = __reduce_max_sync(~0u, it->most[dir]) << 16;
        if (lane_of_warp() == 0 && j.measure[dir] && most)
            atomicMax((int *)j.amax[dir] + index, (int)most);
    }
    raise_nans(j, index, it->nans);
    *it = found{};
}

/* A part of the warp's strand, from column c0 on. */
template <int SWEEP, bool SR>
static __device__ __forceinline__ void run_part(const job &j, const strand_space *sp, int64_t c0,
                                                const uint32_t rotation[4], found *it)
{
    const strand &s = sp->at;
    const int64_t k = j.p.group.k, first = s.row0 + s.at;
    const int rows = s.rows - s.at, cols = (int)(k - c0);
    const mt_bf16 *from = (const mt_bf16 *)j.p.sides[SOURCE].codes + c0;
    uint32_t x[LANE_ROWS][WORDS<SWEEP>], row[LANE_ROWS];
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++)
        row[i] = (uint32_t)(j.row_token ? sp->tokens[first_row() + i] : first_row() + i);
    load_lanes(x, j.row_token ? from : from + first * k, (uint32_t)k * 2, row, rows, cols);
    if constexpr (!DECODES<SWEEP>) {
        measure_lanes(j, rows >= SEGMENT, x, rotation, it);
    } else {
        uint32_t bits[LANE_ROWS][WORDS<SWEEP>];
        tile t = {};
        t.index = s.index, t.r0 = s.at, t.c0 = c0;
        if (SR) draw_lanes(bits, j, t, 0);
        const int64_t to = (first + first_row()) * k + c0 + first_column();
        if (SWEEP == BOTH)
            put_rows(x, SR ? bits : NULL, j, sp->g[MT_ROW], sp->enc[MT_ROW],
                     (mt_bf16 *)j.p.sides[MT_ROW].codes + to, k, rows, cols);
        decode_lanes(x, SR ? bits : NULL, j, sp->g[MT_COL], sp->enc[MT_COL], rotation,
                     rows >= SEGMENT);
        store_lanes(x, (mt_bf16 *)j.p.sides[MT_COL].codes + to, k, rows, cols);
    }
}

/* All warps have as many parts of strands, which follow each other. */
template <int SWEEP, bool SR>
static __global__ void __launch_bounds__(TILE_THREADS, BLOCKS<SWEEP, SR>)
    strand_kernel(const __grid_constant__ job j)
{
    __shared__ strand_space space[WARPS];
    strand_space *sp = &space[threadIdx.x / 32];
    wait_for_results();
    const mt_group &g = j.p.group;
    const int across = (int)mt_ceil_div(SWEEP == MAKES ? g.k / 2 : g.k, PART<SWEEP>);
    const int64_t parts = (int64_t)count_strands(g) * across, warps = (int64_t)gridDim.x * WARPS;
    const int64_t own = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32, begin = parts * own / warps;
    int left = (int)(parts * (own + 1) / warps - begin), part = (int)(begin % across);
    int member = -1; /* the last one */
    uint32_t rotation[4];
    found it = {};
    strand first;
    make_rotation(rotation, j.p.sides[MT_COL].options.rht_mask);
    if (left && !find_strand(&first, g, (int)(begin / across))) left = 0;
    if (left && lane_of_warp() == 0) sp->at = first;
    for (bool anew = true; left > 0; left--) {
        if (anew) {
            __syncwarp(); /* the strand is there, all are done with the last one's */
            const int index = sp->at.index;
            if (!DECODES<SWEEP> && member >= 0 && member != index) give_strands(j, member, &it);
            if (DECODES<SWEEP> && member != index) take_member(sp, j, MT_COL);
            if (SWEEP == BOTH && member != index) take_member(sp, j, MT_ROW);
            if (j.row_token) get_tokens(sp, j);
            member = index;
            __syncwarp();
        }
        if constexpr (SWEEP == MAKES)
            make_part(j, sp, (int64_t)part * PART<SWEEP>, rotation, &it);
        else
            run_part<SWEEP, SR>(j, sp, (int64_t)part * PART<SWEEP>, rotation, &it);
        anew = ++part == across;
        if (!anew || left == 1) continue;
        part = 0;
        __syncwarp();
        if (lane_of_warp() == 0) step_on(&sp->at, g);
    }
    if (!DECODES<SWEEP> && member >= 0) give_strands(j, member, &it);
    if (DECODES<SWEEP>) end_block(j);
}

/* ---- the host's part --------------------------------------------------------------------------
 */

template <int SWEEP, bool SR> static mt_status launch(mt_stream *stream, const job *j)
{
    const unsigned blocks = (unsigned)mt_cuda_multiprocessors(stream) * BLOCKS<SWEEP, SR>;
    MT_TRY(follow(stream, strand_kernel<SWEEP, SR>, blocks, TILE_THREADS, 0, *j));
    MT_LAUNCHED(stream, "quantize: strands");
    return MT_OK;
}

bool mt_cuda_strands_suffice(const job *j)
{
    const side *row = &j->p.sides[MT_ROW], *col = &j->p.sides[MT_COL];
    const bool counts = j->nans || j->measure[MT_ROW] || j->measure[MT_COL];
    if (!col->present || !col->options.rht || mt_cuda_plan_rows(&j->p.group) > MOST_FOUND)
        return false;
    return !j->codes || (col->decoded && !counts && (!row->present || mt_cuda_kept_suffices(j)));
}

mt_status mt_cuda_quantize_strands(mt_stream *stream, const job *j)
{
    const side *row = &j->p.sides[MT_ROW], *col = &j->p.sides[MT_COL];
    const bool sr = col->options.sr;
    if (!j->codes) return (j->da ? launch<MAKES, false> : launch<MEASURES, false>)(stream, j);
    if (row->present && row->options.sr == sr)
        return (sr ? launch<BOTH, true> : launch<BOTH, false>)(stream, j);
    job columns = *j;
    if (row->present) {
        job rows = *j;
        rows.p.sides[MT_COL].present = columns.p.sides[MT_ROW].present = false;
        MT_TRY(mt_cuda_quantize_kept(stream, &rows));
    }
    return (sr ? launch<COLUMNS_ALONE, true> : launch<COLUMNS_ALONE, false>)(stream, &columns);
}
