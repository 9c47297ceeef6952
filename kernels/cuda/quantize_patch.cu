/* The commonest case of quantize by the shortest way: codes of bf16 rows that begin at multiples of
 * 16 bytes, 1-D blocks or one scale a member. Threads have eight elements each of eight rows in
 * registers; only codes of columns go through shared memory, to be turned. The arithmetic is that
 * of the tiles. */
#include "kernels/cuda/quantize_patch.cuh"

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
    const side &s = j.p.sides[MT_COL];
    __syncthreads(); /* the magnitudes are there */
#pragma unroll
    for (int i = threadIdx.x; i < TILE * TILE / BLOCK_ROWS; i += TILE_THREADS) {
        const int c = i % TILE, block = i / TILE;
        uint32_t most = 0;
#pragma unroll
        for (int w = 0; w < BLOCK_WARPS; w++)
            most = larger_halves(most, sp->partial[block * BLOCK_WARPS + w][c / 2]);
        cell e = cell_at<KIND>(j, s, f.to[MT_COL].l, most >> c % 2 * 16 & 0xffff);
        sp->enc[block][c] = e.enc;
        if (c < f.t.cols && block * BLOCK_ROWS < f.t.rows) put_stored(s, f.to[MT_COL], e, c, block);
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

/* Where the codes of eight rows of a column begin, and of a word of a line: eight columns beside
 * each other have theirs in the same place, the next eight in another, so that they meet in no
 * bank. */
template <int KIND> static __device__ __forceinline__ int turned_place(int c, int group)
{
    return c * patches<KIND>::LINE + (group ^ (c >> 3)) * patches<KIND>::WORDS;
}
template <int KIND> static __device__ __forceinline__ int word_place(int c, int word)
{
    enum { WORDS = patches<KIND>::WORDS };
    return turned_place<KIND>(c, word / WORDS) + word % WORDS;
}

/* Leaves the codes of a patch's columns. */
template <int KIND, int CODES, bool SR>
static __device__ __forceinline__ void turn_patch(uint32_t *codes, const side &s,
                                                  const uint32_t x[ROWS][4], const float enc[RUN],
                                                  const uint32_t bits[ROWS][4], bool nans)
{
    const int group = patch_row() / ROWS, column = patch_column();
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
        uint32_t *to = codes + turned_place<KIND>(column + c, group);
        if (patches<KIND>::HALF)
            *to = q[0];
        else
            *(uint2 *)to = make_uint2(q[0], q[1]);
    }
}

/* Lines that begin at multiples of 16 bytes. */
template <int KIND>
static __device__ __forceinline__ void put_even_lines(const uint32_t *codes, const target &to,
                                                      int cols, int bytes)
{
    enum { LANES = patches<KIND>::LINE / 4, STEP = TILE_THREADS / LANES };
    const int at = (int)threadIdx.x % LANES, first = (int)threadIdx.x / LANES;
    uint8_t *p = to.codes + first * to.pitch + at * 16;
    if (at * 16 >= bytes) return;
#pragma unroll
    for (int c = first; c < TILE; c += STEP, p += STEP * to.pitch) {
        const int k = c >> 3; /* how its words have changed places */
        uint4 q;
        if (patches<KIND>::HALF) {
            q = *(const uint4 *)(codes + c * patches<KIND>::LINE + (at ^ k >> 2) * 4);
            if (k & 2) q = make_uint4(q.z, q.w, q.x, q.y);
            if (k & 1) q = make_uint4(q.y, q.x, q.w, q.z);
        } else {
            q = *(const uint4 *)(codes + c * patches<KIND>::LINE + (at ^ k >> 1) * 4);
            if (k & 1) q = make_uint4(q.z, q.w, q.x, q.y);
        }
        if (c < cols) store_16(p, q.x, q.y, q.z, q.w);
    }
}

/* Lines that begin anywhere: whole words, each with the last bytes of the word before it; bytes
 * before and after them, whose words are also those of others. */
template <int KIND>
static __device__ __forceinline__ void put_uneven_lines(const uint32_t *codes, const target &to,
                                                        int cols, int bytes)
{
    enum { LANES = patches<KIND>::LINE, STEP = TILE_THREADS / LANES };
    const int at = (int)threadIdx.x % LANES, first = (int)threadIdx.x / LANES;
    uint8_t *p = to.codes + first * to.pitch;
#pragma unroll 4
    for (int c = first; c < TILE; c += STEP, p += STEP * to.pitch) {
        const int skew = (int)((uintptr_t)p & 3), begin = at * 4 - skew;
        const uint32_t w = codes[word_place<KIND>(c, at)];
        const uint32_t before = __shfl_up_sync(~0u, w, 1);
        if (c >= cols) continue; /* threads of a line, which is of one warp; the others come here */
        if (begin >= 0 && begin + 4 <= bytes)
            store_4(p + begin, __funnelshift_l(before, w, 8 * skew));
        const int head = (4 - skew) & 3, tail = ((bytes + skew) & ~3) - skew;
        const int b = at < 4 ? at : (tail > head ? tail : head) + at - 4;
        if (at < 4 ? b < head && b < bytes : at < 8 && b < bytes)
            p[b] = ((const uint8_t *)(codes + word_place<KIND>(c, b / 4)))[b % 4];
    }
}

/* Turned codes, and scales of nibbles, to where they go. */
template <int KIND>
static __device__ __forceinline__ void put_turned(const patch_space *sp, const frame &f)
{
    enum { HALF = patches<KIND>::HALF };
    const target &to = f.to[MT_COL];
    const int bytes = ((to.padded ? (int)TILE : f.t.rows) + HALF) >> HALF;
    if (to.even)
        put_even_lines<KIND>(sp->codes, to, f.t.cols, bytes);
    else
        put_uneven_lines<KIND>(sp->codes, to, f.t.cols, bytes);
    for (int i = threadIdx.x; KIND == NIBBLES && i < f.t.cols * SEGMENTS; i += TILE_THREADS)
        if (i % SEGMENTS * SEGMENT < f.t.rows)
            to.scales.at[scale_offset(to.scales, i / SEGMENTS, i % SEGMENTS)] = sp->scales[i];
}

/* ---- the kernel -------------------------------------------------------------------------------
 */

/* Codes and scales of a patch; those of turned columns are left in shared memory. */
template <int KIND, int DIRS, int CODES, bool SR>
static __device__ __forceinline__ void run_patch(const job &j, patch_space *sp, const frame &f,
                                                 const uint32_t x[ROWS][4], found *it)
{
    enum { PLANAR = patches<KIND>::PLANAR };
    extent e = {};
    if (KIND != WHOLE || is_measured(j)) find_extent(&e, x);
    it->nans += e.nans, raise(&it->most[MT_ROW], e.all), raise(&it->most[MT_COL], e.all);
    if ((KIND == LINES || PLANAR) && (DIRS & COLUMN_CODES)) leave_magnitudes(sp, e);
    float row[ROWS] = {}, column[RUN] = {};
    uint32_t bits[ROWS][4];
    if (SR) draw_patch(bits, j, f.t);
    if (DIRS & ROW_CODES) {
        if (KIND != WHOLE) make_row_scales<KIND>(row, j, f, e);
#pragma unroll
        for (int i = 0; KIND == WHOLE && i < ROWS; i++) row[i] = f.to[MT_ROW].l.enc;
    }
    if (PLANAR && (DIRS & COLUMN_CODES)) make_shared_scales<KIND>(column, j, sp, f);
    if (PLANAR || (DIRS & ROW_CODES))
        store_rows<KIND, PLANAR ? DIRS : ROW_CODES, CODES, SR>(j, f, x, row, column, bits,
                                                               e.nans > 0);
    if (PLANAR || !(DIRS & COLUMN_CODES)) return;
    if (KIND == LINES) make_shared_scales<KIND>(column, j, sp, f);
    if (KIND == NIBBLES) make_nibble_scales(column, j, sp, f, e);
#pragma unroll
    for (int i = 0; KIND == WHOLE && i < RUN; i++) column[i] = f.to[MT_COL].l.enc;
    turn_patch<KIND, CODES, SR>(sp->codes, j.p.sides[MT_COL], x, column, bits, e.nans > 0);
}

/* As short_kernel's turns; the patches of the next tile are on their way while turned codes of one
 * go out. */
template <int KIND, int DIRS, int CODES, bool SR>
static __global__ void __launch_bounds__(TILE_THREADS, SR ? 2 : 3)
    patch_kernel(const __grid_constant__ job j)
{
    __shared__ patch_space space;
    patch_space *sp = &space;
    const bool turned = !patches<KIND>::PLANAR && (DIRS & COLUMN_CODES);
    wait_for_results();
    const int64_t units = j.p.units[j.p.group.members], step = gridDim.x;
    const int warp = (int)threadIdx.x / 32;
    uint32_t x[ROWS][4];
    found it = {};
    int64_t given = -1; /* the member that the block has found something of */
    if (threadIdx.x < 2) sp->found[threadIdx.x] = block_found{};
    if (warp < 3) find_turn(&sp->frames[warp], j, units, blockIdx.x + warp * step);
    __syncthreads();
    if (blockIdx.x < units) load_patch(x, sp->frames[0]);
    if (warp < 4) set_turn(&sp->frames[warp / 2], j, units, blockIdx.x + warp / 2 * step, warp % 2);
    int n = 0;
    for (int64_t u = blockIdx.x; u < units; u += step, n++) {
        const frame &f = sp->frames[n & 3], &next = sp->frames[(n + 1) & 3];
        const bool more = u + step < units;
        const int place = (warp - n) & (WARPS - 1);
        __syncthreads(); /* the frame is there; the codes of the last tile have been read */
        if (place == 0)
            find_turn(&sp->frames[(n + 3) & 3], j, units, u + 3 * step);
        else if (place <= MT_DIR_COUNT)
            set_turn(&sp->frames[(n + 2) & 3], j, units, u + 2 * step, place - 1);
        else if (place == WARPS - 1 && given >= 0 && lane_of_warp() == 0)
            pass_on(&sp->found[~n & 1], j, given);
        given = -1;
        run_patch<KIND, DIRS, CODES, SR>(j, sp, f, x, &it);
        if (more) load_patch(x, next);
        if (turned) {
            __syncthreads(); /* all codes are there */
            put_turned<KIND>(sp, f);
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
    if (!j->codes || j->row_token || j->swiglu || j->sums || g->last_dims || g->k % RUN)
        return false;
    if ((uintptr_t)j->p.sides[SOURCE].codes % 16) return false;
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
        const side *s = &j->p.sides[dir];
        if (!s->present) continue;
        if (s->options.rht || s->options.four_over_six) return false;
        if (!s->transposed && (uintptr_t)s->codes % (s->codes_per_byte == 1 ? 8 : 4)) return false;
    }
    return !row->present || !col->present ||
           (row->options.element == col->options.element && row->options.sr == col->options.sr);
}

template <int KIND, int DIRS, int CODES, bool SR>
static mt_status launch(mt_stream *stream, const job *j)
{
    int64_t units = mt_cuda_plan_units(&j->p.group);
    int64_t most = (int64_t)mt_cuda_multiprocessors(stream) * (SR ? 2 : 3);
    MT_TRY(follow(stream, patch_kernel<KIND, DIRS, CODES, SR>,
                  (unsigned)(units < most ? units : most), TILE_THREADS, 0, *j));
    MT_LAUNCHED(stream, "quantize: patches");
    return MT_OK;
}

typedef mt_status (*launcher)(mt_stream *, const job *);

template <int KIND, int CODES, bool SR> static launcher launcher_of(int dirs)
{
    static const launcher launches[] = { launch<KIND, ROW_CODES, CODES, SR>,
                                         launch<KIND, COLUMN_CODES, CODES, SR>,
                                         launch<KIND, ROW_CODES | COLUMN_CODES, CODES, SR> };
    return launches[dirs - 1];
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
    return kinds[mt_cuda_short_kind(j)][second](dirs)(stream, j);
}
