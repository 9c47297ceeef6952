/* nvfp4 by warps: each has sixteen columns of its block's tiles, sends for them itself and waits
 * for nobody but where a member begins. Columns, as codes or decoded, beside rows that are kept
 * decoded or none; and what is measured of columns that are rotated. */
#include "kernels/cuda/quantize_nibbles.cuh"

struct warp_space {
    alignas(16) uint32_t tiles[2][AREA / 2]; /* of each warp sixteen columns, and the next ones */
    uint8_t scales[TILE * SEGMENTS];
    float enc[MT_DIR_COUNT][NIBBLE_SCALES];
    frame first;         /* tile that the block has of a member */
    frame frames[WARPS]; /* of warps: rows, columns, where codes of columns go */
    block_found found;
};
/* Behind it where a direction rounds stochastically: the bits of every element, placed as it is. */

/* ---- where a warp is --------------------------------------------------------------------------
 */

struct place {
    int row, col;   /* of the member, the tile's first */
    int rows, cols; /* of this one */
};

static __device__ __forceinline__ void set_size(place *p, int rows, int cols)
{
    p->rows = min(rows - p->row, (int)TILE), p->cols = min(cols - p->col, (int)TILE);
}

/* To the tile that follows, or comes before. */
static __device__ __forceinline__ void step_on(place *p, int rows, int cols, bool back)
{
    if (back && p->col == 0)
        p->row -= TILE, p->col = (cols - 1) / TILE * TILE;
    else if (!back && p->col + TILE >= cols)
        p->row += TILE, p->col = 0;
    else
        p->col += back ? -TILE : TILE;
    set_size(p, rows, cols);
}

/* ---- loads ------------------------------------------------------------------------------------
 */

/* The tokens of a tile's rows: a lane has four. */
static __device__ __forceinline__ void get_tokens(int32_t tokens[TILE / 32], const job &j,
                                                  const frame &first, const place &p)
{
    const int64_t row = first.row0 - first.t.r0 + p.row;
#pragma unroll
    for (int i = 0; i < TILE / 32; i++) {
        const int r = i * 32 + lane_of_warp();
        tokens[i] = r < p.rows ? j.row_token[row + r] : 0;
    }
}

/* Sends for a warp's columns; zeros beyond rows, as far as a pair of squares. */
static __device__ __forceinline__ void load_strip(uint32_t *words, const job &j, const frame &first,
                                                  const place &p, const int32_t tokens[TILE / 32])
{
    const int strip = (int)threadIdx.x / 32, half = lane_of_warp() % 2, line = lane_of_warp() / 2;
    const int chunk = strip * 2 + half, bytes = chunk * 8 < p.cols ? 16 : 0;
    const int pitch = (int)first.t.m.cols;
    const mt_bf16 *from = (const mt_bf16 *)j.p.sides[SOURCE].codes +
                          (j.row_token ? 0 : first.t.m.offset + (int64_t)p.row * pitch) + p.col +
                          (bytes ? chunk * 8 : 0);
    uint32_t *to = words + chunk_place<NIBBLES>(line, chunk);
    if (strip * SEGMENT < p.cols) {
#pragma unroll
        for (int i = 0; i < SEGMENTS; i++) {
            const int r = i * SEGMENT + line;
            const int32_t token = __shfl_sync(~0u, tokens[i / 2], i % 2 * SEGMENT + line);
            const int row = j.row_token ? token : r < p.rows ? r : 0;
            if (i / 2 * 2 * SEGMENT < p.rows)
                copy_16(to + i * ROWS_WORDS<NIBBLES>, from + (int64_t)row * pitch,
                        r < p.rows ? bytes : 0);
        }
    }
    copies_sent();
}

/* ---- rows -------------------------------------------------------------------------------------
 * Two lanes have a segment, eight elements each. */

template <bool SR>
static __device__ __forceinline__ void run_pairs(const job &j, const frame &first, const place &p,
                                                 const uint32_t *words, uint32_t *random,
                                                 const float *scale_enc, found *it)
{
    const side &s = j.p.sides[MT_ROW];
    const int strip = (int)threadIdx.x / 32, line = lane_of_warp() / 2;
    const int chunk = strip * 2 + lane_of_warp() % 2, rows = p.rows;
    const bool inside = chunk * 8 < p.cols, draws = SR && s.options.sr;
    const member &m = first.t.m;
    const float g = first.to[MT_ROW].l.g;
    const int pitch = (int)m.cols;
    const int64_t step = (int64_t)SEGMENT * pitch;
    mt_bf16 *to =
        (mt_bf16 *)s.codes + m.offset + (int64_t)(p.row + line) * pitch + p.col + chunk * 8;
    int place = chunk_place<NIBBLES>(line, chunk);
    if (strip * SEGMENT >= p.cols) return;
#pragma unroll 1
    for (int r = line; r - line < rows; r += SEGMENT, to += step, place += ROWS_WORDS<NIBBLES>) {
        const uint4 q = *(const uint4 *)(words + place);
        const uint32_t w[4] = { q.x, q.y, q.z, q.w };
        uint32_t bits[4], y[4];
        int nans = 0;
        if (SR) {
            const uint32_t index = (uint32_t)first.t.index;
            const uint32_t row = (uint32_t)p.row + (index ? 0 : j.first_row) + (uint32_t)r;
            const uint32_t counter[4] = { (uint32_t)(p.col / 8 + chunk), row,
                                          j.first_member + index, draw_step(j) };
            mt_philox(bits, counter, j.key);
            *(uint4 *)(random + place) = make_uint4(bits[0], bits[1], bits[2], bits[3]);
        }
        if (!s.present) continue;
        const uint32_t own = magnitude_of<4>(w, &nans), other = __shfl_xor_sync(~0u, own, 1);
        const uint32_t most = own > other ? own : other;
        raise(&it->most[MT_ROW], own), it->nans += nans;
        const uint32_t stored = stored_pair(j, mt_f32_from_bits(most << 16) * g, 0) & 0xff;
        const uint32_t scale = scale_twice(stored), scales[2] = { scale, scale };
        float enc[8];
#pragma unroll
        for (int i = 0; i < 8; i++) enc[i] = scale_enc[stored];
        nibble_values(y, magnitude_nibbles(w, enc, draws ? bits : NULL), w, scales, nans > 0);
        if (inside && r < rows) store_16(to, y[0], y[1], y[2], y[3]);
    }
}

/* ---- the kernel -------------------------------------------------------------------------------
 */

/* Where codes of a tile's columns go: a tile further along its rows than the one before, or anew.
 */
static __device__ __forceinline__ void set_columns(frame *f, const job &j, const frame &first,
                                                   const place &p, bool along)
{
    target *to = &f->to[MT_COL];
    f->t.rows = p.rows, f->t.cols = p.cols;
    if (along && !to->scales.swizzled) {
        to->codes += TILE * (j.p.sides[MT_COL].decoded ? (int64_t)sizeof(mt_bf16) : to->pitch);
        to->scales.at += TILE * to->scales.line;
        return;
    }
    tile t = { first.t.m, first.t.index, p.row, p.col, p.rows, p.cols };
    set_target(to, j, t, MT_COL, &first.to[MT_COL].l);
}

/* A warp's part of `turns` tiles that follow each other in a member. */
template <bool SR, bool MEASURES>
static __device__ __forceinline__ void run_turns(const job &j, warp_space *sp, uint32_t *random,
                                                 const uint32_t rotation[4], int turns, found *it)
{
    const frame &first = sp->first;
    frame &f = sp->frames[threadIdx.x / 32];
    const member &m = first.t.m;
    const int height = (int)m.rows, width = (int)m.cols;
    const bool rows = j.p.sides[MT_ROW].present;
    int32_t tokens[TILE / 32] = {};
    place at = { (int)first.t.r0, (int)first.t.c0, 0, 0 }, next;
    bool along = false; /* the turn before was in these rows */
    set_size(&at, height, width);
    if (j.row_token) get_tokens(tokens, j, first, at);
    load_strip(sp->tiles[0], j, first, at, tokens);
    for (int n = 0; n < turns; n++, at = next) {
        uint32_t *words = sp->tiles[n & 1];
        const bool more = n + 1 < turns;
        next = at;
        __syncwarp(); /* the other strip and the frame are done with */
        if (more) {
            step_on(&next, height, width, MEASURES);
            if (j.row_token && next.row != at.row) get_tokens(tokens, j, first, next);
            load_strip(sp->tiles[~n & 1], j, first, next, tokens);
        }
        if (lane_of_warp() == 0 && !MEASURES)
            set_columns(&f, j, first, at, along);
        else if (lane_of_warp() == 0)
            f.t.rows = at.rows, f.t.cols = at.cols;
        along = next.row == at.row;
        copies_before(more);
        if (MEASURES) {
            measure_strip(j, f, words, rotation, it);
            continue;
        }
        if (rows || SR) run_pairs<SR>(j, first, at, words, random, sp->enc[MT_ROW], it);
        if (SR) __syncwarp(); /* the bits are there */
        run_strip<SR>(j, sp->scales, f, words, random, sp->enc[MT_COL], rotation, rows, it);
    }
}

/* Tiles of a block follow each other; those of a member at a time. */
template <bool SR, bool MEASURES>
static __global__ void __launch_bounds__(TILE_THREADS, SR ? 2 : 3)
    warps_kernel(const __grid_constant__ job j)
{
    extern __shared__ uint4 mt_shared[];
    warp_space *sp = (warp_space *)mt_shared;
    uint32_t *random = (uint32_t *)(sp + 1);
    wait_for_results();
    const int64_t units = j.p.units[j.p.group.members];
    const int begin = (int)(units * blockIdx.x / gridDim.x);
    const int end = (int)(units * (blockIdx.x + 1) / gridDim.x), warp = (int)threadIdx.x / 32;
    found it = {};
    int given = -1, turns; /* the member that the block has found something of */
    uint32_t rotation[4];
    make_rotation(rotation, j.p.sides[MT_COL].options.rht_mask);
    if (threadIdx.x == 0) sp->found = block_found{};
    for (int u = begin; u < end; u += turns) {
        __syncthreads(); /* all are done with the last member */
        if (threadIdx.x == 0 && given >= 0) pass_on(&sp->found, j, given);
        const int unit = MEASURES ? (int)units - 1 - u : u;
        if (warp == 0) find_tile(&sp->first, j, unit);
        __syncthreads();
        const tile &t = sp->first.t;
        if (!MEASURES && warp < MT_DIR_COUNT && lane_of_warp() == 0)
            set_target(&sp->first.to[warp], j, t, warp);
        __syncthreads();
        if (!MEASURES) make_scales(sp->enc, NULL, j, sp->first);
        __syncthreads();
        const int at = unit - (int)t.m.at[AT_UNIT];
        const int count = (int)(shift_up(t.m.rows, 7) * shift_up(t.m.cols, 7));
        turns = min(MEASURES ? at + 1 : count - at, end - u);
        run_turns<SR, MEASURES>(j, sp, random, rotation, turns, &it);
        give_found(&sp->found, j, &it);
        given = (int)t.index;
    }
    __syncthreads(); /* all have given */
    if (threadIdx.x == 0 && given >= 0) pass_on(&sp->found, j, given);
    if (!MEASURES) end_block(j);
}

/* ---- the host's part --------------------------------------------------------------------------
 */

static bool draws(const job *j)
{
    const side *row = &j->p.sides[MT_ROW], *col = &j->p.sides[MT_COL];
    return (row->present && row->options.sr) || col->options.sr;
}

bool mt_cuda_warps_suffice(const job *j)
{
    const side *row = &j->p.sides[MT_ROW], *col = &j->p.sides[MT_COL];
    const mt_group *g = &j->p.group;
    if (mt_cuda_short_kind(j) != NIBBLES || !col->present || j->swiglu || g->last_dims)
        return false;
    if (g->m > INT32_MAX - TILE || mt_cuda_plan_units(g) > INT32_MAX || g->k > INT32_MAX - TILE)
        return false;
    if (g->k % 8 || (uintptr_t)j->p.sides[SOURCE].codes % 16 || col->options.four_over_six)
        return false;
    return !j->codes || (!j->sums && (!row->present || row->decoded));
}

template <bool SR, bool MEASURES> static mt_status launch(mt_stream *stream, const job *j)
{
    const size_t bytes = sizeof(warp_space) + (SR ? AREA * sizeof(uint16_t) : 0);
    const int64_t units = mt_cuda_plan_units(&j->p.group);
    const int64_t most = (int64_t)mt_cuda_multiprocessors(stream) * (SR ? 2 : 3);
    MT_TRY(mt_cuda_give_shared(stream, (const void *)warps_kernel<SR, MEASURES>, bytes,
                               "quantize: nvfp4 by warps"));
    MT_TRY(follow(stream, warps_kernel<SR, MEASURES>, (unsigned)(units < most ? units : most),
                  TILE_THREADS, bytes, *j));
    MT_LAUNCHED(stream, "quantize: nvfp4 by warps");
    return MT_OK;
}

mt_status mt_cuda_quantize_warps(mt_stream *stream, const job *j)
{
    if (!j->codes) return launch<false, true>(stream, j);
    return draws(j) ? launch<true, false>(stream, j) : launch<false, false>(stream, j);
}
