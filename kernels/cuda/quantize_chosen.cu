/* nvfp4 under 4over6 by the shortest way: of bf16 rows that begin at multiples of 16 bytes. A warp
 * has sixteen rows of a tile in shared memory, of which its threads take segments of either
 * direction, one after the other; nobody waits for another warp but for turned codes. */
#include "kernels/cuda/quantize_ring.cuh"
#include "kernels/cuda/quantize_choose.cuh"

enum { BLOCKS = 2 /* of a multiprocessor */ };

struct chosen_space {
    order turns;
    frame frames[2 * WARPS]; /* of turns; member -1: there is none */
    block_found found[2];
    alignas(16) uint32_t codes[AREA / 4];              /* of columns, turned; of two tiles */
    alignas(16) uint32_t rows[WARPS][SEGMENT * PAIRS]; /* elements */
    float enc[MT_DIR_COUNT][NIBBLE_SCALES], ones[MT_DIR_COUNT][NIBBLE_SCALES]; /* of make_scales */
    uint8_t scales[TILE * SEGMENTS];
};

/* Words of chunk `chunk` of a warp's row r: neither rows nor segments meet in a bank. */
static __device__ __forceinline__ int chunk_of_row(int r, int chunk)
{
    return (r * CHUNKS + (chunk ^ (chunk >> 3 & 1))) * 4;
}

/* Sends for a warp's rows. */
static __device__ __forceinline__ void send_rows(uint32_t *rows, const frame &f)
{
    const int chunk = lane_of_warp() % CHUNKS, above = lane_of_warp() / CHUNKS;
    const int first = (int)threadIdx.x / 32 * SEGMENT + above;
    const int count = chunk * 8 < f.t.cols ? f.t.rows - first : 0;
    const int64_t pitch = f.t.m.cols;
    const mt_bf16 *from = f.source + (count > 0 ? first * pitch + chunk * 8 : 0);
    __syncwarp(); /* those of the last tile have been read */
#pragma unroll
    for (int i = 0; i < SEGMENT; i += 2)
        copy_16(rows + chunk_of_row(above + i, chunk), from + (i < count ? i * pitch : 0),
                i < count ? 16 : 0);
}

/* Codes of a warp's rows. */
template <int FOUR>
static __device__ __forceinline__ void choose_rows(const job &j, const frame &f,
                                                   const uint32_t *rows, const float *scale_enc,
                                                   const float *ones, found *it)
{
    const side &s = j.p.sides[MT_ROW];
    const target &to = f.to[MT_ROW];
    const int at = lane_of_warp() % SEGMENTS, above = (int)threadIdx.x / 32 * SEGMENT;
    const int rows_left = f.t.rows - above, count = at * SEGMENT < f.t.cols ? rows_left : 0;
    const float unit = unit_of(s, to.l);
    const bool measured = is_measured(j);
    uint8_t *const codes = to.codes + above * to.pitch + at * SEGMENT / 2;
#pragma unroll 1
    for (int r = lane_of_warp() / SEGMENTS; r < SEGMENT && r < rows_left; r += 32 / SEGMENTS) {
        uint32_t w[8], q[2];
        int nans = 0;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint4 x = *(const uint4 *)(rows + chunk_of_row(r, at * 2 + i));
            w[i * 4] = x.x, w[i * 4 + 1] = x.y, w[i * 4 + 2] = x.z, w[i * 4 + 3] = x.w;
        }
        const uint32_t m = magnitude_of<8>(w, &nans);
        if (measured) raise(&it->most[MT_ROW], m), it->nans += nans;
        const uint32_t stored =
            choose_codes<FOUR>(q, j, scale_enc, ones, unit, s, to.l, m, w, nans > 0);
        if (r >= count) continue;
        store_1(to.scales.at + scale_offset(to.scales, above + r, at), stored);
        store_8(codes + r * to.pitch, q[0], q[1]);
    }
}

/* Codes of the columns of a warp's rows, left turned; again: the rows have been measured. */
template <int FOUR>
static __device__ __forceinline__ void
choose_columns(const job &j, chosen_space *sp, const frame &f, int half, const uint32_t *rows,
               const float *scale_enc, const float *ones, bool again, found *it)
{
    enum { LINE = patches<NIBBLES>::LINE };
    const side &s = j.p.sides[MT_COL];
    const int warp = (int)threadIdx.x / 32, word = half * LINE + warp * 2;
    const float unit = unit_of(s, f.to[MT_COL].l);
    const bool measured = is_measured(j);
    if (warp * SEGMENT >= f.t.rows && !f.to[MT_COL].padded) return; /* nothing of it is stored */
#pragma unroll 1
    for (int pair = lane_of_warp(); pair < PAIRS; pair += 32) {
        uint32_t v[SEGMENT];
#pragma unroll
        for (int i = 0; i < SEGMENT; i++) v[i] = rows[chunk_of_row(i, pair >> 2) + (pair & 3)];
#pragma unroll 1
        for (int h = 0; h < 2; h++) {
            const int c = pair * 2 + h;
            uint32_t w[8], q[2];
            int nans = 0;
#pragma unroll
            for (int i = 0; i < 8; i++)
                w[i] = __byte_perm(v[i * 2], v[i * 2 + 1], 0x5410 + h * 0x2222);
            const uint32_t m = magnitude_of<8>(w, &nans);
            if (measured) raise(&it->most[MT_COL], m);
            if (measured && !again) raise(&it->most[MT_ROW], m), it->nans += nans;
            sp->scales[c * SEGMENTS + warp] = (uint8_t)choose_codes<FOUR>(
                q, j, scale_enc, ones, unit, s, f.to[MT_COL].l, m, w, nans > 0);
            uint32_t *line = sp->codes + c * LINE * 2;
            line[word ^ line_mask<NIBBLES>(c)] = q[0];
            line[(word + 1) ^ line_mask<NIBBLES>(c)] = q[1];
        }
    }
}

template <int FOUR>
static __global__ void __launch_bounds__(TILE_THREADS, BLOCKS)
    chosen_kernel(const __grid_constant__ job j)
{
    enum { FRAMES = 2 * WARPS };
    extern __shared__ uint4 mt_shared[];
    chosen_space *sp = (chosen_space *)mt_shared;
    const bool rows = j.p.sides[MT_ROW].present, columns = j.p.sides[MT_COL].present;
    wait_for_results();
    const int warp = (int)threadIdx.x / 32, run = columns ? j.run : 1;
    if (threadIdx.x == 0) sp->turns = order_of(j.p.units[j.p.group.members], run);
    __syncthreads();
    const auto look_up = [&](int n) {
        frame *f = &sp->frames[n % FRAMES];
        const int64_t unit = unit_at(sp->turns, n);
        if (unit < sp->turns.units)
            find_tile(f, j, unit, run);
        else
            f->t.index = -1;
        __syncwarp();
        const int dir = lane_of_warp();
        if (f->t.index >= 0 && dir < MT_DIR_COUNT) set_target(&f->to[dir], j, f->t, dir);
    };
    found it = {};
    int64_t given = -1; /* the member that the block has found something of */
    bool after = false; /* the tile before has left ends of its lines to this one */
    int64_t made = -1;  /* the member that scales have been made of */
    if (threadIdx.x < 2) sp->found[threadIdx.x] = block_found{};
    look_up(warp);
    __syncthreads();
    if (sp->frames[0].t.index >= 0) send_rows(sp->rows[warp], sp->frames[0]);
    int n = 0;
    for (; sp->frames[n % FRAMES].t.index >= 0; n++) {
        const frame &f = sp->frames[n % FRAMES], &next = sp->frames[(n + 1) % FRAMES];
        __syncthreads(); /* the frames are there; the codes of the last tile have been read */
        const bool more = next.t.index >= 0;
        if (n % WARPS == WARPS - 2) look_up(n + 2 + warp);
        if (warp == n % WARPS && given >= 0 && lane_of_warp() == 0)
            pass_on(&sp->found[~n & 1], j, given);
        given = -1;
        if (made != f.t.index) {
            make_scales(sp->enc, sp->ones[0], j, f);
            made = f.t.index;
            __syncthreads();
        }
        copies_done();
        __syncwarp();
        if (rows) choose_rows<FOUR>(j, f, sp->rows[warp], sp->enc[MT_ROW], sp->ones[MT_ROW], &it);
        if (columns)
            choose_columns<FOUR>(j, sp, f, n & 1, sp->rows[warp], sp->enc[MT_COL], sp->ones[MT_COL],
                                 rows, &it);
        if (more) send_rows(sp->rows[warp], next);
        if (columns) {
            const bool on = more && !f.to[MT_COL].even && is_below(next, f);
            const uneven u = { sp->codes, n & 1, after, on };
            after = on;
            __syncthreads(); /* all codes are there */
            put_turned(sp->scales, f, u);
        }
        if (more && next.t.index == f.t.index) continue;
        give_found(&sp->found[n & 1], j, &it);
        given = f.t.index;
    }
    __syncthreads(); /* all have given */
    if (threadIdx.x == 0 && given >= 0) pass_on(&sp->found[~n & 1], j, given);
    end_block(j);
}

/* ---- the host's part --------------------------------------------------------------------------
 */

bool mt_cuda_chosen_suffices(const job *j)
{
    const side *row = &j->p.sides[MT_ROW];
    const mt_group *g = &j->p.group;
    bool squared = false, magnitudes = false;
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
        const side *s = &j->p.sides[dir];
        if (!s->present) continue;
        if (!s->options.four_over_six || s->decoded || (dir == MT_COL && s->options.rht))
            return false;
        squared |= s->options.squared_error, magnitudes |= !s->options.squared_error;
    }
    if (!j->codes || (squared && magnitudes)) return false;
    if (row->present && ((uintptr_t)row->codes % 8 || g->k % SEGMENT)) return false;
    return !j->row_token && !j->swiglu && !j->sums && !g->last_dims && g->k % 8 == 0 &&
           (uintptr_t)j->p.sides[SOURCE].codes % 16 == 0;
}

template <int FOUR> static mt_status launch(mt_stream *stream, const job *j)
{
    const int64_t units = mt_cuda_plan_units(&j->p.group);
    const int64_t most = (int64_t)mt_cuda_multiprocessors(stream) * BLOCKS;
    job with_run = *j;
    with_run.run = has_even_lines(j) ? 1 : RUN_TILES;
    MT_CUDA(cudaFuncSetAttribute(chosen_kernel<FOUR>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 (int)sizeof(chosen_space)));
    MT_TRY(follow(stream, chosen_kernel<FOUR>, (unsigned)(units < most ? units : most),
                  TILE_THREADS, sizeof(chosen_space), with_run));
    MT_LAUNCHED(stream, "quantize: 4over6");
    return MT_OK;
}

mt_status mt_cuda_quantize_chosen(mt_stream *stream, const job *j)
{
    const side *row = &j->p.sides[MT_ROW], *col = &j->p.sides[MT_COL];
    const bool squared = (row->present ? row : col)->options.squared_error;
    return squared ? launch<BY_SQUARES>(stream, j) : launch<BY_MAGNITUDES>(stream, j);
}
