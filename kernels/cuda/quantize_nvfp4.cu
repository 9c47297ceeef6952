/* Quantize to nvfp4, to nearest or stochastically: bf16 rows that begin at multiples of 16 bytes. A
 * thread block has a strip of tiles and no more. Threads have eight elements each of eight rows, in
 * shared memory where only they look, whose places those of the next tile take one by one; only
 * codes and scales of columns meet there, to be turned. The arithmetic is that of the tiles. Rows
 * alone that are drawn, which wait less for the memory, have their segments read where they are
 * made. */
#include "kernels/cuda/quantize_nvfp4.cuh"

template <int DIRS> struct nvfp4_elements {
    enum { TURNED = (DIRS & COLUMN_CODES) != 0 };
    uint4 slots[ROWS][TILE_THREADS];                   /* elements, each thread's own */
    alignas(16) uint32_t codes[TURNED ? AREA / 4 : 4]; /* of columns, turned; of two tiles */
    uint8_t scales[2][TURNED ? TILE * SEGMENTS : 16];  /* of columns */
};
template <int DIRS> struct nvfp4_space : nvfp4_elements<DIRS>, nvfp4_tables {
};

/* ---- elements ---------------------------------------------------------------------------------
 */

/* Sends for a patch of a tile, of which `rows` are there. */
static __device__ __forceinline__ void send_patch(uint4 (*slots)[TILE_THREADS], const mt_bf16 *from,
                                                  uint32_t pitch, int rows)
{
    if (rows >= ROWS) {
#pragma unroll
        for (int i = 0; i < ROWS; i++, from += pitch) copy_16(slots[i] + threadIdx.x, from);
        return;
    }
#pragma unroll 1
    for (int i = 0; i < ROWS; i++)
        copy_16(slots[i] + threadIdx.x, from + (i < rows ? (uint64_t)(uint32_t)i * pitch : 0),
                i < rows ? 16 : 0);
}

/* Magnitudes of pairs of rows, of pairs of columns; of NaNs the signs are taken. */
struct spans {
    uint32_t rows[ROWS / 2], pairs[4], all;
    int nans;
};

static __device__ __forceinline__ uint32_t both_rows(uint32_t a, uint32_t b)
{
    return larger_halves(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
}

static __device__ __noinline__ void span_nans(spans *it, uint4 (*slots)[TILE_THREADS])
{
    *it = spans{};
#pragma unroll 1
    for (int i = 0; i < ROWS; i++) {
        uint4 *at = slots[i] + threadIdx.x;
        const uint4 q = *at;
        uint32_t w[4] = { q.x, q.y, q.z, q.w }, most = 0;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const uint32_t clean = without_nans(w[k]), gone = w[k] ^ clean;
            it->nans += (gone & 0x7fff ? 1 : 0) + (gone & 0x7fff0000u ? 1 : 0);
            if (gone & 0x7fff) w[k] &= ~0x8000u;
            if (gone & 0x7fff0000u) w[k] &= ~0x80000000u;
            it->pairs[k] = larger_halves(it->pairs[k], clean & 0x7fff7fffu);
            most = larger_halves(most, clean & 0x7fff7fffu);
        }
        *at = make_uint4(w[0], w[1], w[2], w[3]);
        most = larger_half(most);
#pragma unroll
        for (int k = 0; k < ROWS / 2; k++)
            if (k == i / 2) it->rows[k] |= most << i % 2 * 16;
        it->all = most > it->all ? most : it->all;
    }
}

template <int DIRS>
static __device__ __forceinline__ void find_spans(spans *it, uint4 (*slots)[TILE_THREADS])
{
    uint32_t rows[ROWS], most[2];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const uint4 q = slots[i][threadIdx.x];
        const uint32_t w[4] = { q.x, q.y, q.z, q.w };
        if (DIRS & ROW_CODES) rows[i] = magnitudes<4>(w);
#pragma unroll
        for (int k = 0; (DIRS & COLUMN_CODES) && k < 4; k++)
            it->pairs[k] = i ? larger_pair(it->pairs[k], w[k]) : w[k];
    }
#pragma unroll
    for (int i = 0; (DIRS & ROW_CODES) && i < ROWS / 2; i++)
        it->rows[i] = both_rows(rows[i * 2], rows[i * 2 + 1]);
#pragma unroll
    for (int k = 0; (DIRS & COLUMN_CODES) && k < 4; k++) it->pairs[k] &= 0x7fff7fffu;
#pragma unroll
    for (int k = 0; k < 2; k++)
        most[k] = DIRS & ROW_CODES ? larger_halves(it->rows[k * 2], it->rows[k * 2 + 1])
                                   : larger_halves(it->pairs[k * 2], it->pairs[k * 2 + 1]);
    it->all = larger_half(larger_halves(most[0], most[1]));
    it->nans = 0;
    if (it->all > 0x7f80) {
        spans found; /* has an address */
        span_nans(&found, slots);
        *it = found;
    }
}

/* ---- scales -----------------------------------------------------------------------------------
 */

/* The scales of eight blocks, of which two threads whose lanes differ by `far` know the magnitudes
 * of their parts, two to a word: the upper one makes the last four. */
static __device__ __forceinline__ uint2 scales_of_eight(const job &j, const uint32_t most[4],
                                                        float wanted, int far, uint32_t *own)
{
    const bool up = lane_of_warp() & far;
    uint32_t m[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        m[i] = up ? most[2 + i] : most[i];
        m[i] = larger_halves(m[i], __shfl_xor_sync(~0u, up ? most[i] : most[2 + i], far));
    }
    *own = stored_pair(j, low_bf16(m[0]) * wanted, high_bf16(m[0]) * wanted) |
           stored_pair(j, low_bf16(m[1]) * wanted, high_bf16(m[1]) * wanted) << 16;
    const uint32_t other = __shfl_xor_sync(~0u, *own, far);
    return up ? make_uint2(other, *own) : make_uint2(*own, other);
}

/* ---- codes ------------------------------------------------------------------------------------
 */

/* Of rows eight codes are a word; of columns one joins those of the rows below, where codes are
 * drawn with its sign. u: draws' bits from bit 12 on. */
template <bool SR, bool SIGNED>
static __device__ __forceinline__ uint32_t join_code(uint32_t q, float x, float enc, uint32_t u)
{
    const float a = fabsf(x) * enc;
    if (!SR) return (q << 4) + e2m1_above(a);
    uint32_t code = (e2m1_units_above(a) << 12) + u;
    if (SIGNED) code = (code & 0x7fffffffu) | (mt_f32_bits(x) & 0x80000000u);
    return __funnelshift_l(code, q, 4);
}

/* Joined codes less what they are more by, with signs where codes have them. */
template <bool SR> static __device__ __forceinline__ uint32_t with_signs(uint32_t q, uint32_t signs)
{
    if (!SR) return q - E2M1_BASE * 0x11111111u + (signs & 0x88888888u);
    static_assert((E2M1_UNITS_BASE >> 16 & 7) == 2, "6 is added");
    return (((q & 0x77777777u) + 0x66666666u) & 0x77777777u) | (signs & 0x88888888u);
}

/* How often the loop over a patch's rows is unrolled. */
template <int DIRS, bool SR> static constexpr int unrolled(void)
{
    if (DIRS == COLUMN_CODES) return 4;
    return SR ? 1 : DIRS == ROW_CODES ? 2 : 8;
}

/* Codes of a patch, and the sending for the next one, of a tile `below` rows high. */
template <int DIRS, bool SR, typename SPACE>
static __device__ __forceinline__ void put_patch(const drawn_job &drawn, SPACE *sp, const strip &p,
                                                 int n, const spans &e, const draws &d, bool more,
                                                 int below)
{
    enum { TIMES = unrolled<DIRS, SR>() };
    const job &j = drawn.j;
    const int rows = patch_column() < p.width ? p.height - patch_row() : 0;
    const auto next_rows = [&]() { return patch_column() < p.width ? below - patch_row() : 0; };
    const bool sends = more && next_rows() >= ROWS;
    const uint32_t cols = (uint32_t)p.cols, pitch = cols / 2;
    const mt_bf16 *next =
        p.plain + (uint64_t)(uint32_t)(TILE + patch_row() + ROWS - 1) * cols + patch_column();
    uint8_t *to = p.parts[MT_ROW].codes + (uint64_t)(uint32_t)(patch_row() + ROWS - 1) * pitch +
                  patch_column() / 2;
    uint2 by_row = make_uint2(0, 0);
    float column[RUN];
    uint32_t q[RUN] = {}, signs[RUN] = {};
    if (DIRS & ROW_CODES) {
        const int mine = lane_of_warp() % 2, block = patch_column() / SEGMENT;
        const int row0 = patch_row() + mine * 4, count = block * SEGMENT < p.width ? p.height : 0;
        const lattice l = scales_of(p.parts[MT_ROW]);
        uint32_t own;
        by_row = scales_of_eight(j, e.rows, sp->levels[MT_ROW].g, 1, &own);
        const int64_t step = line_step(l);
        uint8_t *at = l.at + scale_offset(l, row0, block);
#pragma unroll
        for (int i = 0; i < 4; i++, at += step)
            if (row0 + i < count) store_1(at, own >> i * 8);
    }
    if (DIRS & COLUMN_CODES) {
        uint32_t own;
        const uint2 s = scales_of_eight(j, e.pairs, sp->levels[MT_COL].g, 16, &own);
        uint8_t *at = sp->scales[n] + (patch_column() + lane_of_warp() / 16 * 4) * SEGMENTS +
                      threadIdx.x / 32;
#pragma unroll
        for (int i = 0; i < 4; i++) at[i * SEGMENTS] = (uint8_t)(own >> i * 8);
#pragma unroll
        for (int c = 0; c < RUN; c++)
            column[c] = sp->enc[MT_COL][(c < 4 ? s.x : s.y) >> c % 4 * 8 & 0xff];
    }
#pragma unroll(TIMES)
    for (int i = ROWS - 1; i >= 0; i--, to -= pitch, next -= cols) {
        const uint4 v = sp->slots[i][threadIdx.x];
        const uint32_t w[4] = { v.x, v.y, v.z, v.w };
        uint32_t bits[4], codes = 0;
        if (SR) draw_row(bits, drawn, d, i);
        if (sends) copy_16(sp->slots[i] + threadIdx.x, next);
        const float row = DIRS & ROW_CODES ? sp->enc[MT_ROW][by_row.y >> 24] : 0;
        by_row.y = __funnelshift_l(by_row.x, by_row.y, 8), by_row.x <<= 8;
#pragma unroll
        for (int c = RUN - 1; c >= 0; c--) {
            const float x = element_of(w, c);
            uint32_t u = 0;
            if (SR) u = c % 2 ? bits[c / 2] >> 4 : bits[c / 2] << 12 & 0x0fffffffu;
            if (DIRS & ROW_CODES) codes = join_code<SR, false>(codes, x, row, u);
            if (DIRS & COLUMN_CODES) {
                q[c] = join_code<SR, true>(q[c], x, column[c], u);
                if (!SR) signs[c] = __funnelshift_l(mt_f32_bits(x), signs[c], 4);
            }
        }
        if (DIRS & ROW_CODES) {
            codes = with_signs<SR>(codes, nibble_signs(w, false));
            if (i < rows) store_4(to, codes);
        }
    }
    if (more && !sends) {
        const int count = next_rows();
        const uint64_t first = (uint64_t)(uint32_t)(TILE + patch_row()) * cols + patch_column();
        send_patch(sp->slots, p.plain + (count > 0 ? first : 0), cols, count);
    }
#pragma unroll
    for (int c = 0; (DIRS & COLUMN_CODES) && c < RUN; c++)
        leave_codes(sp->codes, n, patch_column() + c, with_signs<SR>(q[c], SR ? q[c] : signs[c]));
}

/* ---- the kernel -------------------------------------------------------------------------------
 */

/* Of a multiprocessor. */
template <int DIRS> static constexpr int RESIDENT = DIRS == ROW_CODES ? 4 : 3;

/* The first column of a block's strip, one tile wide. */
static __device__ __forceinline__ int column_of_strip(const job &j)
{
    const unsigned across = (unsigned)((j.p.group.k + TILE - 1) / TILE);
    return (int)(blockIdx.x % across) * TILE;
}

template <int DIRS, bool SR>
static __global__ void __launch_bounds__(TILE_THREADS, RESIDENT<DIRS>)
    nvfp4_kernel(const __grid_constant__ drawn_job drawn)
{
    const job &j = drawn.j;
    extern __shared__ uint4 mt_shared[];
    nvfp4_space<DIRS> *sp = (nvfp4_space<DIRS> *)mt_shared;
    strip &p = sp->strips[threadIdx.x / 32];
    uint32_t it = 0; /* what a thread has found: the largest magnitude, NaNs above it */
    wait_for_results();
    let_follow();
    if (!take_strip(&p, j.table, j.p.group.k, false)) return;
    {
        const int rows = patch_column() < p.width ? p.height - patch_row() : 0;
        const mt_bf16 *from =
            p.plain +
            (rows > 0 ? (uint64_t)(uint32_t)patch_row() * (uint32_t)p.cols + patch_column() : 0);
        send_patch(sp->slots, from, (uint32_t)p.cols, rows);
    }
    fill_tables<false>(sp, NULL, &p, j);
    draws d = {};
    if (SR) {
        tile t = {};
        t.index = p.index, t.r0 = p.row, t.c0 = column_of_strip(j);
        d = draws_of(j, t, patch_row(), patch_column());
    }
    __syncthreads();                                /* the table is there */
    for (int left = p.rows - TILE;; left -= TILE) { /* rows below the tile */
        const bool more = left > 0;
        const int below = left < TILE ? left : (int)TILE, n = left >> 7 & 1;
        spans e;
        copies_done();
        find_spans<DIRS>(&e, sp->slots);
        it = larger_halves(it, e.all) + ((uint32_t)e.nans << 16);
        put_patch<DIRS, SR>(drawn, sp, p, n, e, d, more, below);
        if (DIRS & COLUMN_CODES) {
            const uneven u = uneven_of(p, sp->codes, n, left);
            __syncthreads(); /* all codes are there */
            put_columns(sp->scales[n], p, u);
            if (u.on) __syncthreads(); /* those of two tiles have been read */
        }
        if (!more) break;
        step_down(&p, below);
        d.first += TILE;
    }
    if (is_measured(j)) raise_member(j, sp, p, it & 0xffff, (int)(it >> 16));
}

/* Rows alone, drawn. */
static __global__ void __launch_bounds__(TILE_THREADS, 3)
    drawn_rows_kernel(const __grid_constant__ drawn_job drawn)
{
    const job &j = drawn.j;
    extern __shared__ uint4 mt_shared[];
    nvfp4_tables *t = (nvfp4_tables *)mt_shared;
    strip &p = t->strips[threadIdx.x / 32];
    found it = {};
    wait_for_results();
    let_follow();
    if (!take_strip(&p, j.table, j.p.group.k, false)) return;
    fill_tables<false>(t, NULL, &p, j);
    tile of = {};
    of.index = p.index, of.r0 = p.row, of.c0 = column_of_strip(j);
    const int at = (int)(threadIdx.x % SEGMENTS) * SEGMENT;
    const draws d[2] = { draws_of(j, of, 0, at), draws_of(j, of, 0, at + RUN) };
    __syncthreads(); /* the table is there */
    const float g = t->levels[MT_ROW].g, *encs = t->enc[MT_ROW];
    make_rows(p, &it, [&](uint32_t q[2], int row, const uint32_t w[8], uint32_t most, bool nans) {
        const uint32_t stored = stored_pair(j, low_bf16(most) * g, 0) & 0xff;
        const float by = encs[stored], enc[RUN] = { by, by, by, by, by, by, by, by };
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint32_t bits[4];
            draw_row(bits, drawn, d[h], row);
            q[h] = magnitude_nibbles(w + h * 4, enc, bits) | nibble_signs(w + h * 4, nans);
        }
        return stored;
    });
    if (is_measured(j)) raise_member(j, t, p, it.most[MT_ROW], it.nans);
}

/* ---- the host's part --------------------------------------------------------------------------
 */

bool mt_cuda_nvfp4_suffices(const job *j)
{
    const side *row = &j->p.sides[MT_ROW], *col = &j->p.sides[MT_COL];
    const mt_group *g = &j->p.group;
    if (!j->codes || j->row_token || j->swiglu || j->z || j->sums || g->last_dims || g->k % RUN)
        return false;
    if (g->m > INT32_MAX || g->k > INT32_MAX || mt_cuda_plan_units(g) > INT32_MAX) return false;
    if ((uintptr_t)j->p.sides[SOURCE].codes % 16 || mt_cuda_short_kind(j) != NIBBLES) return false;
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
        const side *s = &j->p.sides[dir];
        if (s->present && (s->decoded || s->options.rht || s->options.four_over_six)) return false;
    }
    if (row->present && (uintptr_t)row->codes % 4) return false;
    return !row->present || !col->present || row->options.sr == col->options.sr;
}

template <int DIRS, bool SR> static mt_status launch(mt_stream *stream, const job *j)
{
    constexpr bool drawn_rows = DIRS == ROW_CODES && SR;
    const int bytes = drawn_rows ? sizeof(nvfp4_tables) : sizeof(nvfp4_space<DIRS>);
    const int64_t blocks = j->table.most * mt_ceil_div(j->p.group.k, TILE);
    void (*kernel)(drawn_job) = drawn_rows_kernel;
    if constexpr (!drawn_rows) kernel = nvfp4_kernel<DIRS, SR>;
    MT_TRY(mt_cuda_give_shared(stream, (const void *)kernel, bytes, "quantize: nvfp4"));
    MT_TRY(follow(stream, kernel, (unsigned)blocks, TILE_THREADS, bytes, with_keys(j)));
    MT_LAUNCHED(stream, "quantize: nvfp4");
    return MT_OK;
}

mt_status mt_cuda_quantize_nvfp4(mt_stream *stream, const job *j)
{
    enum { BOTH = ROW_CODES | COLUMN_CODES };
    static mt_status (*const launches[][2])(
        mt_stream *, const job *) = { { launch<ROW_CODES, false>, launch<ROW_CODES, true> },
                                      { launch<COLUMN_CODES, false>, launch<COLUMN_CODES, true> },
                                      { launch<BOTH, false>, launch<BOTH, true> } };
    static_assert(ROW_CODES == 1 && COLUMN_CODES == 2, "order of the table");
    const side *row = &j->p.sides[MT_ROW], *col = &j->p.sides[MT_COL];
    const int dirs = (row->present ? ROW_CODES : 0) + (col->present ? COLUMN_CODES : 0);
    return launches[dirs - 1][(row->present ? row : col)->options.sr](stream, j);
}
