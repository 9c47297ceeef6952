/* Quantize to NIBBLES by the shortest way: bf16 rows that begin at multiples of 16 bytes, to
 * nearest or stochastically. Threads have eight elements each of eight rows in registers; only
 * codes of columns go through shared memory, to be turned. The arithmetic is that of the tiles. */
#include "kernels/cuda/quantize_ring.cuh"

/* ---- columns ----------------------------------------------------------------------------------
 */

/* Scales of columns' blocks, a warp's rows each, which are left, and what a patch's columns are
 * multiplied by. */
static __device__ __forceinline__ void
make_column_scales(float enc[RUN], const job &j, patch_space *sp, const frame &f, const extent &it)
{
    const int mine = lane_of_warp() / 16;
    uint8_t *scales = sp->scales + patch_column() * SEGMENTS + threadIdx.x / 32;
    uint32_t most[4];
    float own[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        most[k] = it.pair[k] & 0x7fff7fffu;
        most[k] = larger_halves(most[k], __shfl_xor_sync(~0u, most[k], 16));
    }
#pragma unroll
    for (int i = 0; i < 4; i++) { /* half warps have four of the eight */
        const uint32_t pair = mine ? most[2 + i / 2] : most[i / 2];
        cell e =
            cell_at<NIBBLES>(j, j.p.sides[MT_COL], f.to[MT_COL].l, pair >> i % 2 * 16 & 0xffff);
        own[i] = e.enc;
        scales[(mine * 4 + i) * SEGMENTS] = e.stored;
    }
#pragma unroll
    for (int e = 0; e < RUN; e++)
        enc[e] = __shfl_sync(~0u, own[e % 4], lane_of_warp() % 16 + e / 4 * 16);
}

/* Leaves the codes of a patch's columns. */
template <bool SR>
static __device__ __forceinline__ void turn_patch(uint32_t *codes, int half, const side &s,
                                                  const uint32_t x[ROWS][4], const float enc[RUN],
                                                  const uint32_t bits[ROWS][4], bool nans)
{
#pragma unroll
    for (int c = 0; c < RUN; c++) {
        uint32_t w[4], r[4], q[2];
        float same[RUN];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t half = c % 2 ? 0x7632 : 0x5410;
            w[i] = __byte_perm(x[i * 2][c / 2], x[i * 2 + 1][c / 2], half);
            r[i] = SR ? __byte_perm(bits[i * 2][c / 2], bits[i * 2 + 1][c / 2], half) : 0;
        }
#pragma unroll
        for (int i = 0; i < RUN; i++) same[i] = enc[c];
        encode_run<NIBBLES, CODES_E2M1>(q, s, w, same, nans, SR ? r : NULL);
        leave_codes<NIBBLES>(codes, half, patch_column() + c, q[0], 0);
    }
}

/* ---- the kernel -------------------------------------------------------------------------------
 */

/* Codes and scales of a patch; those of turned columns are left in shared memory. */
template <int DIRS, bool SR>
static __device__ __forceinline__ void run_patch(const job &j, patch_space *sp, const frame &f,
                                                 int half, const uint32_t x[ROWS][4], found *it)
{
    extent e = {};
    find_extent(&e, x);
    it->nans += e.nans, raise(&it->most[MT_ROW], e.all), raise(&it->most[MT_COL], e.all);
    float row[ROWS] = {}, column[RUN] = {};
    uint32_t bits[ROWS][4];
    const draws d = SR ? draws_of(j, f.t, patch_row(), patch_column()) : draws{};
#pragma unroll
    for (int i = 0; SR && !(DIRS & ROW_CODES) && i < ROWS; i++) draw_row(bits[i], j, d, i);
    if (DIRS & ROW_CODES) {
        make_row_scales(row, j, f, e);
        store_rows<NIBBLES, CODES_E2M1, SR>(j, f, x, row, d, bits, e.nans > 0);
    }
    if (!(DIRS & COLUMN_CODES)) return;
    make_column_scales(column, j, sp, f, e);
    turn_patch<SR>(sp->codes, half, j.p.sides[MT_COL], x, column, bits, e.nans > 0);
}

/* Of a multiprocessor: bits of whole patches take registers. */
template <int DIRS, bool SR> static constexpr int BLOCKS = SR && (DIRS & COLUMN_CODES) ? 2 : 3;

/* The patches of the next tile are on their way while turned codes of one go out. Warps look up a
 * turn each, all at the same time, two turns before the first of them: none waits for another. */
template <int DIRS, bool SR>
static __global__ void __launch_bounds__(TILE_THREADS, (BLOCKS<DIRS, SR>))
    patch_kernel(const __grid_constant__ job j)
{
    enum { FRAMES = 2 * WARPS };
    __shared__ patch_space space;
    patch_space *sp = &space;
    const bool turned = DIRS & COLUMN_CODES;
    wait_for_results();
    const int warp = (int)threadIdx.x / 32;
    if (threadIdx.x == 0) sp->turns = order_of(j.p.units[j.p.group.members], turned ? j.run : 1);
    __syncthreads();
    const auto look_up = [&](int n) {
        frame *f = &sp->frames[n % FRAMES];
        const int64_t unit = unit_at(sp->turns, n);
        if (unit < sp->turns.units)
            find_tile(f, j, unit, turned ? j.run : 1);
        else
            f->t.index = -1;
        __syncwarp();
        const int dir = lane_of_warp();
        if (f->t.index >= 0 && dir < MT_DIR_COUNT) set_target(&f->to[dir], j, f->t, dir);
    };
    uint32_t x[ROWS][4];
    found it = {};
    int64_t given = -1; /* the member that the block has found something of */
    bool after = false; /* the tile before has left ends of its lines to this one */
    if (threadIdx.x < 2) sp->found[threadIdx.x] = block_found{};
    look_up(warp);
    __syncthreads();
    if (sp->frames[0].t.index >= 0) load_patch(x, sp->frames[0]);
    int n = 0;
    for (; sp->frames[n % FRAMES].t.index >= 0; n++) {
        const frame &f = sp->frames[n % FRAMES], &next = sp->frames[(n + 1) % FRAMES];
        __syncthreads(); /* the frames are there; the codes of the last tile have been read */
        const bool more = next.t.index >= 0;
        if (n % WARPS == WARPS - 2) look_up(n + 2 + warp);
        if (warp == n % WARPS && given >= 0 && lane_of_warp() == 0)
            pass_on(&sp->found[~n & 1], j, given);
        given = -1;
        run_patch<DIRS, SR>(j, sp, f, n & 1, x, &it);
        if (more) load_patch(x, next);
        if (turned) {
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

bool mt_cuda_patches_suffice(const job *j)
{
    const side *row = &j->p.sides[MT_ROW], *col = &j->p.sides[MT_COL];
    const mt_group *g = &j->p.group;
    if (!j->codes || j->row_token || j->swiglu || j->z || j->sums || g->last_dims || g->k % RUN)
        return false;
    if ((uintptr_t)j->p.sides[SOURCE].codes % 16) return false;
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
        const side *s = &j->p.sides[dir];
        if (!s->present) continue;
        if (s->options.rht || s->options.four_over_six) return false;
        if (!s->transposed && (uintptr_t)s->codes % (s->codes_per_byte == 1 ? 8 : 4)) return false;
    }
    if (mt_cuda_short_kind(j) != NIBBLES) return false;
    return !row->present || !col->present || row->options.sr == col->options.sr;
}

template <int DIRS, bool SR> static mt_status launch(mt_stream *stream, const job *j)
{
    int64_t units = mt_cuda_plan_units(&j->p.group);
    int64_t most = (int64_t)mt_cuda_multiprocessors(stream) * BLOCKS<DIRS, SR>;
    MT_TRY(follow(stream, patch_kernel<DIRS, SR>, (unsigned)(units < most ? units : most),
                  TILE_THREADS, 0, *j));
    MT_LAUNCHED(stream, "quantize: patches");
    return MT_OK;
}

mt_status mt_cuda_quantize_patches(mt_stream *stream, const job *j)
{
    enum { BOTH = ROW_CODES | COLUMN_CODES };
    static mt_status (*const launches[][2])(
        mt_stream *, const job *) = { { launch<ROW_CODES, false>, launch<ROW_CODES, true> },
                                      { launch<COLUMN_CODES, false>, launch<COLUMN_CODES, true> },
                                      { launch<BOTH, false>, launch<BOTH, true> } };
    static_assert(ROW_CODES == 1 && COLUMN_CODES == 2, "order of the table");
    const side *row = &j->p.sides[MT_ROW], *col = &j->p.sides[MT_COL];
    const int dirs = (row->present ? ROW_CODES : 0) + (col->present ? COLUMN_CODES : 0);
    job with_run = *j;
    with_run.run = has_even_lines(j) ? 1 : RUN_TILES;
    return launches[dirs - 1][(row->present ? row : col)->options.sr](stream, &with_run);
}
