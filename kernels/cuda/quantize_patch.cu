/* Quantize by the shortest way, but for what quantize_bytes.cu takes: codes of bf16 rows that begin
 * at multiples of 16 bytes, 1-D blocks or one scale a member. Threads have eight elements each of
 * eight rows in registers; only codes of columns go through shared memory, to be turned. The
 * arithmetic is that of the tiles. */
#include "kernels/cuda/quantize_ring.cuh"

/* ---- columns ----------------------------------------------------------------------------------
 */

/* Leaves the magnitudes of a warp's columns. */
static __device__ __forceinline__ void leave_magnitudes(patch_space *sp, const extent &it)
{
    uint32_t most[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        most[k] = it.pair[k] & 0x7fff7fffu;
        most[k] = larger_halves(most[k], __shfl_xor_sync(~0u, most[k], 16));
    }
    if (lane_of_warp() < 16)
        *(uint4 *)(sp->partial[threadIdx.x / 32] + lane_of_warp() * 4) =
            make_uint4(most[0], most[1], most[2], most[3]);
}

/* Scales of columns' blocks of some warps' rows, whose magnitudes have been left, and what a
 * patch's columns are multiplied by. The whole thread block comes here. */
template <int KIND>
static __device__ __forceinline__ void make_shared_scales(float enc[RUN], const job &j,
                                                          patch_space *sp, const frame &f)
{
    enum { BLOCK_WARPS = KIND == LINES ? WARPS : 2, BLOCK_ROWS = BLOCK_WARPS * SEGMENT };
    enum { STEP = TILE_THREADS / TILE }; /* blocks */
    const side &s = j.p.sides[MT_COL];
    const lattice &l = f.to[MT_COL].scales;
    const int c = (int)threadIdx.x % TILE, first = (int)threadIdx.x / TILE;
    __syncthreads(); /* the magnitudes are there */
    const int64_t step = block_step(l) * STEP * patches<KIND>::SCALE;
    uint8_t *p = scale_at<KIND>(l, c, first);
#pragma unroll
    for (int block = first; block < TILE / BLOCK_ROWS; block += STEP, p += step) {
        uint32_t most = 0;
#pragma unroll
        for (int w = 0; w < BLOCK_WARPS; w++)
            most = larger_halves(most, sp->partial[block * BLOCK_WARPS + w][c / 2]);
        cell e = cell_at<KIND>(j, s, f.to[MT_COL].l, most >> c % 2 * 16 & 0xffff);
        sp->enc[block][c] = e.enc;
        if (c < f.t.cols && block * BLOCK_ROWS < f.t.rows) store_scale<KIND>(p, e);
    }
    __syncthreads();
#pragma unroll
    for (int e = 0; e < RUN; e += 4) {
        float4 q = *(const float4 *)(sp->enc[patch_row() / BLOCK_ROWS] + patch_column() + e);
        enc[e] = q.x, enc[e + 1] = q.y, enc[e + 2] = q.z, enc[e + 3] = q.w;
    }
}

/* The same where a warp's rows are a block; scales are left. */
static __device__ __forceinline__ void
make_nibble_scales(float enc[RUN], const job &j, patch_space *sp, const frame &f, const extent &it)
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
template <int KIND, int CODES, bool SR>
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
        encode_run<KIND, CODES>(q, s, w, same, nans, SR ? r : NULL);
        leave_codes<KIND>(codes, half, patch_column() + c, q[0], q[1]);
    }
}

/* Turned codes, and scales of nibbles, to where they go. */
template <int KIND>
static __device__ __forceinline__ void put_turned(const patch_space *sp, const frame &f,
                                                  const uneven &u)
{
    enum { HALF = patches<KIND>::HALF };
    const target &to = f.to[MT_COL];
    const int bytes = ((to.padded ? (int)TILE : f.t.rows) + HALF) >> HALF;
    if (to.even)
        put_even_lines<KIND>(u.codes, u.half, to.codes, to.pitch, f.t.cols, bytes);
    else
        put_uneven_lines<KIND>(u, to.codes, to.pitch, f.t.cols, bytes);
    const int block = (int)threadIdx.x % SEGMENTS, rows = f.t.rows;
    if (KIND != NIBBLES || block * SEGMENT >= rows) return;
    static_assert(TILE_THREADS == 32 * SEGMENTS, "a turn is 32 lines");
    const int64_t step = lines_step(to.scales);
    uint8_t *p = scale_at<KIND>(to.scales, (int)threadIdx.x / SEGMENTS, block);
#pragma unroll
    for (int i = threadIdx.x; i < TILE * SEGMENTS; i += TILE_THREADS, p += step)
        if (i / SEGMENTS < f.t.cols) store_1(p, sp->scales[i]);
}

/* Whether the tile of `next` is below that of f, in the same member. */
static __device__ __forceinline__ bool is_below(const frame &next, const frame &f)
{
    return next.t.index == f.t.index && next.t.c0 == f.t.c0 && next.t.r0 == f.t.r0 + TILE;
}

/* ---- the kernel -------------------------------------------------------------------------------
 */

/* Codes of a patch with one scale: those of the row direction go out, columns are left turned. */
template <int DIRS, int CODES>
static __device__ __forceinline__ void run_whole(const job &j, patch_space *sp, const frame &f,
                                                 int half, const uint32_t x[ROWS][4])
{
    enum { LAST = DIRS & COLUMN_CODES ? MT_COL : MT_ROW };
    const float enc = f.to[LAST].l.enc, row = f.to[MT_ROW].l.enc;
    const bool alike = LAST == MT_ROW || mt_f32_bits(enc) == mt_f32_bits(row);
    const int rows = patch_column() < f.t.cols ? f.t.rows - patch_row() : 0;
    const int64_t pitch = f.to[MT_ROW].pitch;
    uint8_t *const to = f.to[MT_ROW].codes + patch_row() * pitch + patch_column();
    uint32_t q[ROWS][2];
    if ((DIRS & ROW_CODES) && !alike) {
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            encode_row<CODES>(q[0], j.p.sides[MT_ROW], x[i], row);
            if (i < rows) store_8(to + i * pitch, q[0][0], q[0][1]);
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        encode_row<CODES>(q[i], j.p.sides[LAST], x[i], enc);
        if ((DIRS & ROW_CODES) && alike && i < rows) store_8(to + i * pitch, q[i][0], q[i][1]);
    }
    if (DIRS & COLUMN_CODES) leave_turned(sp->codes, half, patch_column(), q);
}

/* Codes and scales of a patch; those of turned columns are left in shared memory. */
template <int KIND, int DIRS, int CODES, bool SR>
static __device__ __forceinline__ void run_patch(const job &j, patch_space *sp, const frame &f,
                                                 int half, const uint32_t x[ROWS][4], found *it)
{
    enum { PLANAR = patches<KIND>::PLANAR };
    extent e = {};
    if (KIND != WHOLE || is_measured(j)) find_extent(&e, x);
    it->nans += e.nans, raise(&it->most[MT_ROW], e.all), raise(&it->most[MT_COL], e.all);
    if (KIND == WHOLE) return run_whole<DIRS, CODES>(j, sp, f, half, x);
    if ((KIND == LINES || PLANAR) && (DIRS & COLUMN_CODES)) leave_magnitudes(sp, e);
    float row[ROWS] = {}, column[RUN] = {};
    uint32_t bits[ROWS][4];
#pragma unroll
    for (int i = 0; SR && !(DIRS & ROW_CODES) && i < ROWS; i++) draw_row(bits[i], j, f.t, i);
    if (DIRS & ROW_CODES) make_row_scales<KIND>(row, j, f, e);
    if (PLANAR && (DIRS & COLUMN_CODES)) make_shared_scales<KIND>(column, j, sp, f);
    if (PLANAR || (DIRS & ROW_CODES))
        store_rows<KIND, PLANAR ? DIRS : ROW_CODES, CODES, SR>(j, f, x, row, column, bits,
                                                               e.nans > 0);
    if (PLANAR || !(DIRS & COLUMN_CODES)) return;
    if (KIND == LINES) make_shared_scales<KIND>(column, j, sp, f);
    if (KIND == NIBBLES) make_nibble_scales(column, j, sp, f, e);
    turn_patch<KIND, CODES, SR>(sp->codes, half, j.p.sides[MT_COL], x, column, bits, e.nans > 0);
}

/* Of a multiprocessor: bits of whole patches take registers. */
template <int DIRS, bool SR> static constexpr int BLOCKS = SR && (DIRS & COLUMN_CODES) ? 2 : 3;

/* The patches of the next tile are on their way while turned codes of one go out. Warps look up a
 * turn each, all at the same time, two turns before the first of them: none waits for another. */
template <int KIND, int DIRS, int CODES, bool SR>
static __global__ void __launch_bounds__(TILE_THREADS, (BLOCKS<DIRS, SR>))
    patch_kernel(const __grid_constant__ job j)
{
    enum { FRAMES = 2 * WARPS };
    __shared__ patch_space space;
    patch_space *sp = &space;
    const bool turned = !patches<KIND>::PLANAR && (DIRS & COLUMN_CODES);
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
        run_patch<KIND, DIRS, CODES, SR>(j, sp, f, n & 1, x, &it);
        if (more) load_patch(x, next);
        if (turned) {
            const bool on = more && !f.to[MT_COL].even && is_below(next, f);
            const uneven u = { sp->codes, n & 1, after, on };
            after = on;
            __syncthreads(); /* all codes are there */
            put_turned<KIND>(sp, f, u);
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
    if (!row->present || !col->present) return true;
    const int kind = mt_cuda_short_kind(j); /* of which both directions are quantize_bytes.cu's */
    return kind != LINES && kind != PLANAR && row->options.element == col->options.element &&
           row->options.sr == col->options.sr;
}

template <int KIND, int DIRS, int CODES, bool SR>
static mt_status launch(mt_stream *stream, const job *j)
{
    int64_t units = mt_cuda_plan_units(&j->p.group);
    int64_t most = (int64_t)mt_cuda_multiprocessors(stream) * BLOCKS<DIRS, SR>;
    MT_TRY(follow(stream, patch_kernel<KIND, DIRS, CODES, SR>,
                  (unsigned)(units < most ? units : most), TILE_THREADS, 0, *j));
    MT_LAUNCHED(stream, "quantize: patches");
    return MT_OK;
}

typedef mt_status (*launcher)(mt_stream *, const job *);

template <int KIND, int CODES, bool SR> static launcher launcher_of(int dirs)
{
    if (dirs == ROW_CODES) return launch<KIND, ROW_CODES, CODES, SR>;
    if (dirs == COLUMN_CODES) return launch<KIND, COLUMN_CODES, CODES, SR>;
    if constexpr (KIND == LINES || KIND == PLANAR)
        return NULL;
    else
        return launch<KIND, ROW_CODES | COLUMN_CODES, CODES, SR>;
}

mt_status mt_cuda_quantize_patches(mt_stream *stream, const job *j)
{
    /* each to nearest E4M3 or E2M1; to E5M2, or stochastically */
    static launcher (*const kinds[KINDS][2])(int) = {
        { launcher_of<WHOLE, CODES_E4M3, false>, launcher_of<WHOLE, CODES_E5M2, false> },
        { launcher_of<LINES, CODES_E4M3, false>, launcher_of<LINES, CODES_E5M2, false> },
        { launcher_of<PLANAR, CODES_E4M3, false>, launcher_of<PLANAR, CODES_E5M2, false> },
        { launcher_of<NIBBLES, CODES_E2M1, false>, launcher_of<NIBBLES, CODES_E2M1, true> },
        { launcher_of<PLANAR_NIBBLES, CODES_E2M1, false> }
    };
    const side *row = &j->p.sides[MT_ROW], *col = &j->p.sides[MT_COL];
    const side *any = row->present ? row : col;
    const int dirs = (row->present ? ROW_CODES : 0) + (col->present ? COLUMN_CODES : 0);
    const bool second = any->options.sr || mt_codes_kind(*any) == CODES_E5M2;
    job with_run = *j;
    with_run.run = has_even_lines(j) ? 1 : RUN_TILES;
    return kinds[mt_cuda_short_kind(j)][second](dirs)(stream, &with_run);
}
