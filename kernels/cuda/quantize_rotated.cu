/* Codes of nvfp4's columns, rotated (rht), by the shortest way: of bf16 rows that begin at
 * multiples of 16 bytes, gathered or not. Threads have sixteen elements each of four rows in
 * registers, as the tensor cores take them: nothing of a tile is shared but its turned codes. What
 * needs no codes of columns is by strands (quantize_strands.cu). */
#include "kernels/cuda/quantize_lanes.cuh"
#include "kernels/cuda/quantize_ring.cuh"

/* Tiles of turned codes: while the last one's are stored, with ends of those of the one before, the
 * next one's are made. */
enum { RING = 4 };

/* Of a column that follow each other in a block, where lines of codes begin anywhere; blocks of a
 * multiprocessor. */
enum { RUN_TILES = 8, BLOCKS = 2 };

enum { FRAMES = 2 * WARPS };
struct rotated_space {
    alignas(16) uint32_t codes[TILE * LINE_WORDS * RING]; /* turned */
    alignas(16) int32_t tokens[FRAMES][TILE];
    uint8_t scales[2][TILE * SEGMENTS];
    float enc[2][NIBBLE_SCALES]; /* of columns of this member and of the next */
    int64_t units;               /* of all */
    int64_t taken;               /* the first unit of those that the block took last */
    int end;                     /* the first turn that has not been looked up */
    frame frames[FRAMES];        /* of turns; member -1: there is none */
    block_found found[2];
};

/* Where a thread leaves what it has of its columns: the word of a line of codes. */
static __device__ __forceinline__ void leave_code(uint32_t *codes, uint32_t code, int word, int c)
{
    const int q = lane_of_warp() % 4, line = first_column() + (q & 1) * (TILE / 2) + c;
    const uint32_t other = __shfl_xor_sync(~0u, code, 1);
    codes[line * LINE_WORDS * RING + (word ^ line_mask(line))] =
        __byte_perm(code, other, q & 1 ? 0x3276 : 0x5410);
}

/* Leaves scales of four squares. */
static __device__ __forceinline__ void leave_scales(uint8_t *scales, uint32_t stored, int c0)
{
    const int c = first_column() + c0 + lane_of_warp() % 4;
    uint8_t *to = scales + c * SEGMENTS + threadIdx.x / 32;
    to[0] = (uint8_t)stored, to[TILE / 2 * SEGMENTS] = (uint8_t)(stored >> 8);
}

/* Codes of the columns of a warp's rows, left turned. Where no bits are drawn, registers suffice
 * for all eight squares at a time. */
template <bool SR>
static __device__ __forceinline__ void
encode_lanes(const job &j, rotated_space *sp, const float *scale_enc, const frame &f, int n,
             const uint32_t x[LANE_ROWS][2 * CHUNK_WORDS], const uint32_t rotation[4], found *it)
{
    enum { GROUPS = COLUMNS / 4, EACH = SR ? 1 : GROUPS };
    const uint32_t mask = j.p.sides[MT_COL].options.rht_mask;
    const int warp = (int)threadIdx.x / 32;
    const bool whole = (warp + 1) * SEGMENT <= f.t.rows, measured = is_measured(j);
    const int word = n % RING * LINE_WORDS + warp * 2 + lane_of_warp() % 4 / 2;
    if (warp * SEGMENT >= f.t.rows && !f.to[MT_COL].padded) return; /* nothing of it is stored */
    const uint32_t odd = whole ? odd_squares(x) : ~0u;
    const float g = f.to[MT_COL].l.g;
    uint32_t bits[LANE_ROWS][2 * CHUNK_WORDS];
    if (SR) draw_lanes(bits, j, f.t, warp * SEGMENT);
    if (measured) {
#pragma unroll
        for (int i = 0; i < LANE_ROWS; i++)
            raise(&it->most[MT_ROW], magnitude_of<8>(x[i], &it->nans));
    }
#pragma unroll
    for (int first = 0; first < GROUPS; first += EACH) {
        uint32_t z[EACH][4][4], most[EACH][4], stored[EACH];
        float enc[EACH][4][2];
#pragma unroll
        for (int k = 0; k < EACH; k++)
            rotate_squares(z[k], most[k], x, (first + k) * 4, rotation, mask, odd, whole);
#pragma unroll
        for (int k = 0; k < EACH; k++) stored[k] = stored_of_squares(j, g, most[k]);
#pragma unroll
        for (int k = 0; k < EACH; k++) {
#pragma unroll
            for (int i = 0; measured && i < 4; i++)
                raise(&it->most[MT_COL], larger_half(most[k][i]));
            leave_scales(sp->scales[n & 1], stored[k], (first + k) * 4);
            enc_of_squares(enc[k], scale_enc, stored[k]);
        }
#pragma unroll
        for (int i = 0; i < EACH * 4; i++) {
            const int k = i / 4, c = first * 4 + i;
            uint32_t drawn[4];
            if (SR) take_pairs(drawn, bits, c);
            const uint32_t code = SR ? drawn_nibbles(z[k][i % 4], enc[k][i % 4], drawn)
                                     : nearest_nibbles(z[k][i % 4], enc[k][i % 4]);
            leave_code(sp->codes, code | signs_of_columns(z[k][i % 4]), word, c);
        }
    }
}

/* Turned nibbles and their scales to where they go. */
static __device__ __forceinline__ void put_turned(const uint8_t *scales, const frame &f,
                                                  const uneven &u)
{
    const target &to = f.to[MT_COL];
    const int bytes = ((to.padded ? (int)TILE : f.t.rows) + 1) / 2;
    if (to.even)
        put_even_lines<RING>(u.codes, u.half, to.codes, to.pitch, f.t.cols, bytes);
    else
        put_uneven_lines<RING>(u, to.codes, to.pitch, f.t.cols, bytes);
    const int block = (int)(threadIdx.x % SEGMENTS), line = (int)(threadIdx.x / SEGMENTS);
    if (block * SEGMENT >= f.t.rows) return;
    static_assert(TILE_THREADS == 32 * SEGMENTS, "a turn is 32 lines");
    const int64_t step = lines_step(to.scales);
    uint8_t *p = to.scales.at + scale_offset(to.scales, line, block);
#pragma unroll
    for (int i = 0; i < TILE; i += 32, p += step)
        if (line + i < f.t.cols) store_1(p, scales[threadIdx.x + i * SEGMENTS]);
}

/* Whether the tile of `next` is below that of f, in the same member. */
static __device__ __forceinline__ bool is_below(const frame &next, const frame &f)
{
    return next.t.index == f.t.index && next.t.c0 == f.t.c0 && next.t.r0 == f.t.r0 + TILE;
}

/* A turn's tile, by a thread. */
static __device__ __forceinline__ void place_tile(frame *f, const job &j, int64_t unit)
{
    const int64_t member = member_at(j.p.units, j.p.group.members, unit);
    const tile t = tile_of(j.p, member, unit, j.run);
    const int64_t first = t.m.offset + t.r0 * t.m.cols;
    f->t = t;
    f->row0 = j.row_token ? first / t.m.cols : 0;
    f->source = (const mt_bf16 *)j.p.sides[SOURCE].codes + (j.row_token ? 0 : first) + t.c0;
    set_target(&f->to[MT_COL], j, t, MT_COL);
}

/* Takes units that nobody has, as many as there are lanes to look them up, and fewer when few are
 * left: rows of tiles are of many heights. Their count is above that of the blocks that are done.
 */
static __device__ __forceinline__ int take_units(rotated_space *sp, const job &j)
{
    const int64_t left = (sp->units - sp->taken) / (2 * gridDim.x);
    const int count = left < 1 ? 1 : left < WARPS ? (int)left : (int)WARPS;
    __syncwarp();
    if (lane_of_warp() == 0)
        sp->taken = (int64_t)(atomicAdd(j.blocks_done, (unsigned long long)count << 32) >> 32);
    __syncwarp();
    return count;
}

/* Turns from n on, by a warp: a lane each. */
static __device__ __forceinline__ void look_up(rotated_space *sp, const job &j, int n)
{
    const int lane = lane_of_warp(), count = take_units(sp, j);
    if (lane < count) {
        frame *f = &sp->frames[(n + lane) % FRAMES];
        f->t.index = -1;
        if (sp->taken + lane < sp->units) place_tile(f, j, sp->taken + lane);
    }
    if (lane == 0) sp->end = n + count;
    __syncwarp();
    for (int i = 0; j.row_token && i < count; i++) {
        const frame &f = sp->frames[(n + i) % FRAMES];
        for (int r = lane; f.t.index >= 0 && r < TILE; r += 32)
            sp->tokens[(n + i) % FRAMES][r] = r < f.t.rows ? j.row_token[f.row0 + r] : 0;
    }
}

/* The warp's rows of a turn's tile; tokens: of all of its rows, where they are gathered. */
static __device__ __forceinline__ void load_rows(uint32_t x[LANE_ROWS][2 * CHUNK_WORDS],
                                                 const job &j, const frame &f,
                                                 const int32_t *tokens)
{
    const int above = (int)threadIdx.x / 32 * SEGMENT, first = above + first_row();
    int4 at = make_int4(first, first + 1, first + 2, first + 3);
    if (j.row_token) at = *(const int4 *)(tokens + first);
    const uint32_t row[LANE_ROWS] = { (uint32_t)at.x, (uint32_t)at.y, (uint32_t)at.z,
                                      (uint32_t)at.w };
    load_lanes(x, f.source, (uint32_t)f.t.m.cols * (uint32_t)sizeof(mt_bf16), row, f.t.rows - above,
               f.t.cols);
}

/* A table of what elements under the scales of f's member are multiplied by. */
static __device__ __forceinline__ void make_column_scales(float enc[NIBBLE_SCALES], const job &j,
                                                          const frame &f)
{
    if (threadIdx.x < NIBBLE_SCALES)
        enc[threadIdx.x] = enc_of_stored(j, f.to[MT_COL].l, threadIdx.x);
}

template <bool SR>
static __global__ void __launch_bounds__(TILE_THREADS, BLOCKS)
    rotated_kernel(const __grid_constant__ job j)
{
    __shared__ rotated_space space;
    rotated_space *sp = &space;
    wait_for_results();
    const int warp = (int)threadIdx.x / 32;
    if (threadIdx.x == 0) sp->units = j.p.units[j.p.group.members], sp->taken = 0;
    __syncthreads();
    uint32_t x[LANE_ROWS][2 * CHUNK_WORDS], rotation[4];
    found it = {};
    int64_t given = -1;  /* the member that the block has found something of */
    bool passed = false; /* it passed that on in the turn before */
    bool after = false;  /* the tile before has left ends of its lines to this one */
    make_rotation(rotation, j.p.sides[MT_COL].options.rht_mask);
    if (threadIdx.x < 2) sp->found[threadIdx.x] = block_found{};
    if (warp == 0) {
        look_up(sp, j, 0);
        if (sp->end < 2) look_up(sp, j, 1);
    }
    __syncthreads();
    if (sp->frames[0].t.index >= 0) {
        make_column_scales(sp->enc[0], j, sp->frames[0]);
        load_rows(x, j, sp->frames[0], sp->tokens[0]);
    }
    __syncthreads();      /* scales are there */
    int n = 0, table = 0; /* of the member's scales */
    for (; sp->frames[n % FRAMES].t.index >= 0; n++) {
        const frame &f = sp->frames[n % FRAMES], &next = sp->frames[(n + 1) % FRAMES];
        if (given >= 0 || passed) __syncthreads(); /* what was found is there */
        passed = given >= 0;
        const bool more = next.t.index >= 0;
        const bool changes = more && next.t.index != f.t.index;
        if (warp == n % WARPS && n == sp->end - 2) look_up(sp, j, n + 2);
        if (warp == n % WARPS && given >= 0 && lane_of_warp() == 0)
            pass_on(&sp->found[~n & 1], j, given);
        given = -1;
        encode_lanes<SR>(j, sp, sp->enc[table], f, n, x, rotation, &it);
        if (more) load_rows(x, j, next, sp->tokens[(n + 1) % FRAMES]);
        const bool on = more && !f.to[MT_COL].even && is_below(next, f);
        const uneven u = { sp->codes, n % RING, after, on };
        after = on;
        if (changes) make_column_scales(sp->enc[table ^= 1], j, next);
        __syncthreads(); /* all codes are there; those of the last tile have been read */
        put_turned(sp->scales[n & 1], f, u);
        if (more && !changes) continue;
        give_found(&sp->found[n & 1], j, &it);
        if (is_measured(j)) given = f.t.index;
    }
    __syncthreads(); /* all have given */
    if (threadIdx.x == 0 && given >= 0) pass_on(&sp->found[~n & 1], j, given);
    const side &row = j.p.sides[MT_ROW];
    if (!row.present || row.decoded) end_block(j);
}

/* ---- the host's part --------------------------------------------------------------------------
 */

/* Whether all lines of columns are known to begin and end at multiples of 16 bytes. */
static inline bool has_even_lines(const job *j)
{
    const side *col = &j->p.sides[MT_COL];
    const mt_group *g = &j->p.group;
    const bool whole = mt_group_mode_of(g) == MT_GROUP_UNIFORM && g->m % 32 == 0;
    return (whole || col->padded) && (uintptr_t)col->codes % 16 == 0;
}

bool mt_cuda_rotated_suffices(const job *j)
{
    const side *col = &j->p.sides[MT_COL], *row = &j->p.sides[MT_ROW];
    const mt_group *g = &j->p.group;
    if (!col->present || !col->options.rht || j->swiglu || g->last_dims || g->k % COLUMNS ||
        g->k > INT32_MAX - TILE || (uintptr_t)j->p.sides[SOURCE].codes % 16)
        return false;
    if (j->codes &&
        (mt_cuda_plan_units(g) > INT32_MAX / 2 || col->options.four_over_six || j->sums))
        return false;
    if (!j->codes || col->decoded) return mt_cuda_strands_suffice(j);
    if (row->present && row->decoded) return mt_cuda_kept_suffices(j);
    return !row->present || (!row->options.four_over_six && !j->row_token);
}

template <bool SR> static mt_status launch(mt_stream *stream, const job *j)
{
    const int64_t units = mt_cuda_plan_units(&j->p.group);
    const int64_t most = (int64_t)mt_cuda_multiprocessors(stream) * BLOCKS;
    const unsigned blocks = (unsigned)(units < most ? units : most);
    job with_run = *j;
    with_run.run = has_even_lines(j) ? 1 : RUN_TILES;
    MT_TRY(follow(stream, rotated_kernel<SR>, blocks, TILE_THREADS, 0, with_run));
    MT_LAUNCHED(stream, "quantize: rotated columns");
    return MT_OK;
}

/* Rows first, which other ways of nvfp4 know: those that are codes give the results, and count. */
mt_status mt_cuda_quantize_rotated(mt_stream *stream, const job *j)
{
    job columns = *j;
    if (!j->codes || j->p.sides[MT_COL].decoded) return mt_cuda_quantize_strands(stream, j);
    if (j->p.sides[MT_ROW].present) {
        job rows = *j;
        rows.p.sides[MT_COL].present = false, columns.nans = NULL;
        MT_TRY(rows.p.sides[MT_ROW].decoded ? mt_cuda_quantize_kept(stream, &rows)
                                            : mt_cuda_quantize_short(stream, &rows));
    }
    return (j->p.sides[MT_COL].options.sr ? launch<true> : launch<false>)(stream, &columns);
}
