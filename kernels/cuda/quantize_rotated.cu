/* Columns of nvfp4, rotated (rht), by the shortest way: of bf16 rows that begin at multiples of 16
 * bytes. Threads have sixteen elements each of four rows in registers, as the tensor cores take
 * them: nothing of a tile is shared but its turned codes. */
#include "kernels/cuda/quantize_ring.cuh"
#include "kernels/cuda/quantize_squares.cuh"

enum { LANE_ROWS = 4, COLUMNS = 8, CHUNK_WORDS = COLUMNS / 2 };

/* A warp has sixteen rows. Of four threads each has four of them: eight elements from its first
 * column on, and eight TILE / 2 columns further. */
static __device__ __forceinline__ int first_column(void)
{
    return lane_of_warp() / 4 * COLUMNS;
}

static __device__ __forceinline__ void load_lanes(uint32_t x[LANE_ROWS][2 * CHUNK_WORDS],
                                                  const frame &f)
{
    const int first = (int)threadIdx.x / 32 * SEGMENT + lane_of_warp() % 4 * LANE_ROWS;
    const int64_t pitch = f.t.m.cols;
    const mt_bf16 *from = f.source + first * pitch + first_column();
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++, from += pitch)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint4 q = make_uint4(0, 0, 0, 0);
            if (first + i < f.t.rows && first_column() + h * TILE / 2 < f.t.cols)
                q = __ldg((const uint4 *)(from + h * TILE / 2));
            x[i][h * 4] = q.x, x[i][h * 4 + 1] = q.y, x[i][h * 4 + 2] = q.z, x[i][h * 4 + 3] = q.w;
        }
}

/* The square of column c of each of a warp's sixteen times eight. */
static __device__ __forceinline__ void
take_square(uint32_t square[4], const uint32_t x[LANE_ROWS][2 * CHUNK_WORDS], int c)
{
    const uint32_t half = c % 2 ? 0x7632 : 0x5410;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = i / 2 * 2, word = i % 2 * CHUNK_WORDS + c / 2;
        square[i] = __byte_perm(x[row][word], x[row + 1][word], half);
    }
}

/* Squares of a warp whose sums may round: a bit each. Threads take half of the words from others
 * twice: each ends with two. */
static __device__ __forceinline__ uint32_t odd_squares(const uint32_t x[LANE_ROWS][2 * CHUNK_WORDS])
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    const int q = lane_of_warp() % 4;
    uint32_t most[CHUNK_WORDS], least[CHUNK_WORDS], odd[2], bits = 0;
#pragma unroll
    for (int k = 0; k < CHUNK_WORDS; k++) {
        uint32_t a[2], b[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int w = h * CHUNK_WORDS + k;
            a[h] = larger_pair(larger_pair(x[0][w], x[1][w]), larger_pair(x[2][w], x[3][w]));
            b[h] = smaller_pair(smaller_pair(x[0][w], x[1][w]), smaller_pair(x[2][w], x[3][w]));
        }
        most[k] = larger_pair(q & 1 ? a[1] : a[0], __shfl_xor_sync(~0u, q & 1 ? a[0] : a[1], 1));
        least[k] = smaller_pair(q & 1 ? b[1] : b[0], __shfl_xor_sync(~0u, q & 1 ? b[0] : b[1], 1));
    }
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const uint32_t a = __shfl_xor_sync(~0u, q & 2 ? most[k] : most[k + 2], 2);
        const uint32_t b = __shfl_xor_sync(~0u, q & 2 ? least[k] : least[k + 2], 2);
        odd[k] = rounds(larger_pair(q & 2 ? most[k + 2] : most[k], a) & 0x7fff7fffu,
                        smaller_pair(q & 2 ? least[k + 2] : least[k], b) & 0x7fff7fffu);
    }
    if (!__any_sync(~0u, odd[0] | odd[1])) return 0;
#pragma unroll
    for (int k = 0; k < 2; k++)
        bits |= (odd[k] & 0xffff ? 1u : 0) << k * 2 | (odd[k] >> 16 ? 2u : 0) << k * 2;
    return __reduce_or_sync(~0u, bits << (q & 2) * 2);
#else
    (void)x;
    return (1u << COLUMNS) - 1;
#endif
}

/* What is found of the columns of a warp's rows. */
static __device__ __forceinline__ void measure_lanes(const job &j, const frame &f,
                                                     const uint32_t x[LANE_ROWS][2 * CHUNK_WORDS],
                                                     const uint32_t rotation[4], found *it)
{
    const uint32_t mask = j.p.sides[MT_COL].options.rht_mask;
    const bool whole = ((int)threadIdx.x / 32 + 1) * SEGMENT <= f.t.rows;
    uint32_t all[4];
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++) all[i] = magnitude_of<8>(x[i], &it->nans);
    raise(&it->most[MT_ROW],
          larger_halves(larger_halves(all[0], all[1]), larger_halves(all[2], all[3])));
    int again = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint32_t near = 0; /* as measure_rotated looks */
#pragma unroll
    for (int c = 0; whole && c < COLUMNS; c++) {
        uint32_t square[4];
        take_square(square, x, c);
        near = larger_pair(near, magnitudes_near(square, rotation));
    }
    near = larger_half(near & 0x7fff7fffu);
    const uint32_t most = it->most[MT_COL];
    if (!__any_sync(~0u, !whole || near >= most || most < LEAST || most > MOST)) return;
#endif
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
        uint32_t square[4];
        take_square(square, x, c);
        if (whole) rotate_square(square, rotation, mask);
        raise(&it->most[MT_COL], magnitude_of<4>(square, &again));
    }
    it->most[MT_COL] = __reduce_max_sync(~0u, it->most[MT_COL]);
}

/* Scales of the columns of four squares, one of them a thread's; left. What they are multiplied by.
 */
static __device__ __forceinline__ void scale_squares(float enc[4][2], const job &j, patch_space *sp,
                                                     const target &to, const uint32_t most[4],
                                                     int c0)
{
    const int q = lane_of_warp() % 4;
    uint32_t a = q & 1 ? most[1] : most[0], b = q & 1 ? most[3] : most[2];
    a = larger_halves(a, __shfl_xor_sync(~0u, q & 1 ? most[0] : most[1], 1));
    b = larger_halves(b, __shfl_xor_sync(~0u, q & 1 ? most[2] : most[3], 1));
    const uint32_t own = q & 2 ? b : a;
    const uint32_t mine = larger_halves(own, __shfl_xor_sync(~0u, q & 2 ? a : b, 2));
    uint8_t *stored = sp->scales + (first_column() + c0 + q) * SEGMENTS + threadIdx.x / 32;
    float by[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const cell e = cell_at<NIBBLES>(j, j.p.sides[MT_COL], to.l, mine >> 16 * h & 0xffff);
        stored[h * (TILE / 2) * SEGMENTS] = e.stored, by[h] = e.enc;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) enc[i][h] = __shfl_sync(~0u, by[h], i, 4);
}

/* Codes of the columns of a warp's rows, left turned. */
template <bool SR>
static __device__ __forceinline__ void
encode_lanes(const job &j, patch_space *sp, const frame &f, int half,
             const uint32_t x[LANE_ROWS][2 * CHUNK_WORDS], const uint32_t rotation[4], found *it)
{
    const uint32_t mask = j.p.sides[MT_COL].options.rht_mask;
    const int warp = (int)threadIdx.x / 32, q = lane_of_warp() % 4;
    const bool whole = (warp + 1) * SEGMENT <= f.t.rows;
    const int word = half * patches<NIBBLES>::LINE + warp * 2 + q / 2;
    const int line = first_column() + (q & 1) * (TILE / 2);
    if (warp * SEGMENT >= f.t.rows && !f.to[MT_COL].padded) return; /* nothing of it is stored */
    const uint32_t odd = whole ? odd_squares(x) : 0;
    uint32_t bits[LANE_ROWS][2 * CHUNK_WORDS];
#pragma unroll
    for (int h = 0; SR && h < 2; h++) {
        const draws d =
            draws_of(j, f.t, warp * SEGMENT + q * LANE_ROWS, first_column() + h * (TILE / 2));
#pragma unroll
        for (int i = 0; i < LANE_ROWS; i++) draw_row(bits[i] + h * CHUNK_WORDS, j, d, i);
    }
    const bool measured = is_measured(j);
    if (measured) {
#pragma unroll
        for (int i = 0; i < LANE_ROWS; i++)
            raise(&it->most[MT_ROW], magnitude_of<8>(x[i], &it->nans));
    }
#pragma unroll
    for (int c0 = 0; c0 < COLUMNS; c0 += 4) {
        uint32_t square[4][4], most[4];
        float enc[4][2];
        int nans = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            take_square(square[i], x, c0 + i);
            if (whole) rotate_square(square[i], rotation, mask, !(odd >> (c0 + i) & 1));
            most[i] = larger_of_columns(square[i]);
        }
        const uint32_t all = larger_half(
            larger_halves(larger_halves(most[0], most[1]), larger_halves(most[2], most[3])));
        if (all > 0x7f80) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint32_t left[2] = { square[i][0], square[i][2] };
                const uint32_t right[2] = { square[i][1], square[i][3] };
                most[i] = magnitude_of<2>(left, &nans) | magnitude_of<2>(right, &nans) << 16;
            }
        }
        if (measured) {
#pragma unroll
            for (int i = 0; i < 4; i++) raise(&it->most[MT_COL], larger_half(most[i]));
        }
        scale_squares(enc, j, sp, f.to[MT_COL], most, c0);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float left = enc[i][0], right = enc[i][1];
            const float by[8] = { left, left, left, left, right, right, right, right };
            const uint32_t w[4] = { square[i][0], square[i][2], square[i][1], square[i][3] };
            uint32_t b[4], code = nibble_signs(w, nans > 0);
            if (SR) take_square(b, bits, c0 + i);
            const uint32_t drawn[4] = { b[0], b[2], b[1], b[3] };
            code |= magnitude_nibbles(w, by, SR ? drawn : NULL);
            const uint32_t other = __shfl_xor_sync(~0u, code, 1);
            const int c = line + c0 + i;
            sp->codes[c * patches<NIBBLES>::LINE * 2 + (word ^ line_mask<NIBBLES>(c))] =
                __byte_perm(code, other, q & 1 ? 0x3276 : 0x5410);
        }
    }
}

/* Of a multiprocessor. */
template <bool MEASURES> static constexpr int BLOCKS = MEASURES ? 3 : 2;

template <bool MEASURES, bool SR>
static __global__ void __launch_bounds__(TILE_THREADS, BLOCKS<MEASURES>)
    rotated_kernel(const __grid_constant__ job j)
{
    enum { FRAMES = 2 * WARPS };
    __shared__ patch_space space;
    patch_space *sp = &space;
    wait_for_results();
    const int warp = (int)threadIdx.x / 32;
    if (threadIdx.x == 0) sp->turns = order_of(j.p.units[j.p.group.members], j.run);
    __syncthreads();
    const auto look_up = [&](int n) {
        frame *f = &sp->frames[n % FRAMES];
        const int64_t unit = unit_at(sp->turns, n);
        if (unit < sp->turns.units)
            find_tile(f, j, MEASURES ? sp->turns.units - 1 - unit : unit, MEASURES ? 1 : j.run);
        else
            f->t.index = -1;
        __syncwarp();
        if (!MEASURES && f->t.index >= 0 && lane_of_warp() == MT_COL)
            set_target(&f->to[MT_COL], j, f->t, MT_COL);
    };
    uint32_t x[LANE_ROWS][2 * CHUNK_WORDS], rotation[4];
    found it = {};
    int64_t given = -1;  /* the member that the block has found something of */
    bool passed = false; /* it passed that on in the turn before */
    bool after = false;  /* the tile before has left ends of its lines to this one */
    make_rotation(rotation, j.p.sides[MT_COL].options.rht_mask);
    if (threadIdx.x < 2) sp->found[threadIdx.x] = block_found{};
    look_up(warp);
    __syncthreads();
    if (sp->frames[0].t.index >= 0) load_lanes(x, sp->frames[0]);
    int n = 0;
    for (; sp->frames[n % FRAMES].t.index >= 0; n++) {
        const frame &f = sp->frames[n % FRAMES], &next = sp->frames[(n + 1) % FRAMES];
        /* the frames are there, and what was found; the codes of the last tile have been read */
        if (!MEASURES || n % WARPS >= WARPS - 2 || given >= 0 || passed) __syncthreads();
        passed = given >= 0;
        const bool more = next.t.index >= 0;
        if (n % WARPS == WARPS - 2) look_up(n + 2 + warp);
        if (warp == n % WARPS && given >= 0 && lane_of_warp() == 0)
            pass_on(&sp->found[~n & 1], j, given);
        given = -1;
        if (MEASURES)
            measure_lanes(j, f, x, rotation, &it);
        else
            encode_lanes<SR>(j, sp, f, n & 1, x, rotation, &it);
        if (more) load_lanes(x, next);
        if (!MEASURES) {
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
    if (!MEASURES && !j.p.sides[MT_ROW].present) end_block(j);
}

/* ---- the host's part --------------------------------------------------------------------------
 */

bool mt_cuda_rotated_suffices(const job *j)
{
    const side *col = &j->p.sides[MT_COL], *row = &j->p.sides[MT_ROW];
    const mt_group *g = &j->p.group;
    if (!col->present || !col->options.rht || col->options.four_over_six || col->decoded)
        return false;
    if (row->present && (row->options.four_over_six || row->decoded)) return false;
    return !j->row_token && !j->swiglu && !j->sums && !g->last_dims && g->k % COLUMNS == 0 &&
           (uintptr_t)j->p.sides[SOURCE].codes % 16 == 0;
}

template <bool MEASURES, bool SR> static mt_status launch(mt_stream *stream, const job *j)
{
    const int64_t units = mt_cuda_plan_units(&j->p.group);
    const int64_t most = (int64_t)mt_cuda_multiprocessors(stream) * BLOCKS<MEASURES>;
    const unsigned blocks = (unsigned)(units < most ? units : most);
    job with_run = *j; /* what a sweep that measures has found of a member lasts */
    with_run.run = MEASURES ? (int)mt_ceil_div(units, blocks) : has_even_lines(j) ? 1 : RUN_TILES;
    MT_TRY(follow(stream, rotated_kernel<MEASURES, SR>, blocks, TILE_THREADS, 0, with_run));
    MT_LAUNCHED(stream, "quantize: rotated columns");
    return MT_OK;
}

/* Rows first, which the way of nvfp4 without rotations knows: they give the results, and count. */
mt_status mt_cuda_quantize_rotated(mt_stream *stream, const job *j)
{
    job columns = *j;
    if (!j->codes) return launch<true, false>(stream, j);
    if (j->p.sides[MT_ROW].present) {
        job rows = *j;
        rows.p.sides[MT_COL].present = false, columns.nans = NULL;
        MT_TRY(mt_cuda_quantize_short(stream, &rows));
    }
    return j->p.sides[MT_COL].options.sr ? launch<false, true>(stream, &columns)
                                         : launch<false, false>(stream, &columns);
}
