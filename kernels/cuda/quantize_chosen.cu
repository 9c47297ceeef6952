/* nvfp4 under 4over6 by strips of tiles: of bf16 rows that begin at multiples of 16 bytes. For
 * columns a warp has sixteen rows of a tile in shared memory, and those of the next one on their
 * way, of which its threads take segments of either direction, one after the other; nobody waits
 * for another warp but for turned codes. Rows alone have their segments read where they are made.
 */
#include <type_traits>

#include "kernels/cuda/quantize_nvfp4.cuh"

template <int FOUR> struct chosen_tables : nvfp4_tables {
    float ones[FOUR & WIDE ? 2 : 1][ONES]; /* of make_levels */
};

template <int FOUR> struct chosen_space {
    uint32_t rows[2][WARPS][SEGMENT * PAIRS]; /* elements, of two tiles */
    alignas(16) uint32_t codes[AREA / 4];     /* of columns, turned; of two tiles */
    uint8_t scales[2][TILE * SEGMENTS];
    chosen_tables<FOUR> tables;
};

/* Words of chunk `chunk` of a warp's row r: neither rows nor segments meet in a bank. */
static __device__ __forceinline__ int chunk_of_row(int r, int chunk)
{
    return (r * CHUNKS + (chunk ^ (chunk >> 3 & 1))) * 4;
}

/* Sends for a warp's rows of the tile `down` rows below, of `height` rows. */
static __device__ __forceinline__ void send_rows(uint32_t *rows, const strip &p, int down,
                                                 int height)
{
    const int chunk = lane_of_warp() % CHUNKS, above = lane_of_warp() / CHUNKS;
    const int first = (int)threadIdx.x / 32 * SEGMENT + above;
    const int count = chunk * 8 < p.width ? height - first : 0;
    const uint32_t pitch = (uint32_t)p.cols;
    const mt_bf16 *from =
        p.plain + (count > 0 ? (uint64_t)(uint32_t)(down + first) * pitch + chunk * 8 : 0);
    uint32_t *to = rows + chunk_of_row(above, chunk);
#pragma unroll
    for (int i = 0; i < SEGMENT; i += 2)
        copy_16(to + i * CHUNKS * 4, from + (i < count ? (uint64_t)(uint32_t)i * pitch : 0),
                i < count ? 16 : 0);
    copies_sent();
}

/* Codes of a warp's rows. */
template <int FOUR>
static __device__ __forceinline__ void choose_rows(const job &j, const strip &p,
                                                   const uint32_t *rows, const float *scale_enc,
                                                   const float *ones, const level &l, found *it)
{
    const side &s = j.p.sides[MT_ROW];
    const part &to = p.parts[MT_ROW];
    const int at = lane_of_warp() % SEGMENTS, first = lane_of_warp() / SEGMENTS;
    const int above = (int)threadIdx.x / 32 * SEGMENT;
    const int rows_left = p.height - above, count = at * SEGMENT < p.width ? rows_left : 0;
    const float unit = unit_of(s, l, FOUR & WIDE);
    const lattice scales = scales_of(to);
    const uint32_t pitch = to.pitch;
    const int64_t step = line_step(scales) * (32 / SEGMENTS);
    uint8_t *codes = to.codes + (uint64_t)(uint32_t)(above + first) * pitch + at * SEGMENT / 2;
    uint8_t *scale = scales.at + scale_offset(scales, above + first, at);
    const uint32_t *from = rows + chunk_of_row(first, at * 2);
    const int other = chunk_of_row(0, at * 2 + 1) - chunk_of_row(0, at * 2);
#pragma unroll 1
    for (int r = first; r < SEGMENT && r < rows_left; r += 32 / SEGMENTS) {
        uint32_t w[8], q[2];
        int nans = 0;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint4 x = *(const uint4 *)(from + i * other);
            w[i * 4] = x.x, w[i * 4 + 1] = x.y, w[i * 4 + 2] = x.z, w[i * 4 + 3] = x.w;
        }
        from += 32 / SEGMENTS * CHUNKS * 4;
        const uint32_t m = magnitude_of<8>(w, &nans);
        raise(&it->most[MT_ROW], m), it->nans += nans;
        const uint32_t stored =
            choose_codes<FOUR>(q, j, scale_enc, ones, unit, s, l, m, w, nans > 0);
        if (r < count) store_1(scale, stored), store_8(codes, q[0], q[1]);
        scale += step, codes += 32 / SEGMENTS * pitch;
    }
}

/* Column h of two, from words of both. */
static __device__ __forceinline__ void take_column(uint32_t w[8], const uint32_t v[SEGMENT], int h)
{
#pragma unroll
    for (int i = 0; i < 8; i++) w[i] = __byte_perm(v[i * 2], v[i * 2 + 1], h ? 0x7632 : 0x5410);
}

/* Sign bits of eight elements of column h of such words, as nibble_signs. */
static __device__ __forceinline__ uint32_t signs_of_rows(const uint32_t v[8], int h, bool nans)
{
    uint32_t turned[2], signs;
#pragma unroll
    for (int i = 0; i < 2; i++)
        turned[i] = __byte_perm(__byte_perm(v[i], v[i + 2], 0x7351),
                                __byte_perm(v[i + 4], v[i + 6], 0x7351), h ? 0x7632 : 0x5410);
    signs = (turned[0] >> 4 & 0x08080808u) | (turned[1] & 0x80808080u);
    if (nans) {
#pragma unroll
        for (int i = 0; i < 8; i++)
            if ((v[i] >> h * 16 & 0x7fff) > 0x7f80) signs &= ~(8u << 4 * i);
    }
    return signs;
}

/* Codes of the columns of a warp's rows, left turned; again: the rows have been measured. */
template <int FOUR>
static __device__ __forceinline__ void
choose_columns(const job &j, const strip &p, uint32_t *codes, uint8_t *scales, int half,
               const uint32_t *rows, const float *scale_enc, const float *ones, const level &l,
               bool again, found *it)
{
    const side &s = j.p.sides[MT_COL];
    const int warp = (int)threadIdx.x / 32, word = half * LINE_WORDS + warp * 2;
    const float unit = unit_of(s, l, FOUR & WIDE);
    if (warp * SEGMENT >= p.height && !p.parts[MT_COL].padded) return; /* nothing of it is stored */
#pragma unroll 1
    for (int pair = lane_of_warp(); pair < PAIRS; pair += 32) {
        uint32_t v[SEGMENT];
        const uint32_t *from = rows + chunk_of_row(0, pair >> 2) + (pair & 3);
#pragma unroll
        for (int i = 0; i < SEGMENT; i++) v[i] = from[i * CHUNKS * 4];
        uint32_t most = magnitudes<SEGMENT>(v), m[2] = { most & 0xffff, most >> 16 }, signs[2][2];
        int nans[2] = { 0, 0 };
        if (larger_half(most) > 0x7f80) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                uint32_t w[8];
                take_column(w, v, h);
                m[h] = magnitude_of<8>(w, &nans[h]);
            }
        }
        if (!again)
            raise(&it->most[MT_ROW], m[0] > m[1] ? m[0] : m[1]), it->nans += nans[0] + nans[1];
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int k = 0; k < 2; k++) signs[h][k] = signs_of_rows(v + k * 8, h, nans[h] > 0);
#pragma unroll
        for (int i = 0; i < SEGMENT; i++) v[i] &= 0x7fff7fffu;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int c = pair * 2 + h;
            uint32_t q[2];
            const uint32_t stored = choose<(FOUR & 3) == BY_SQUARES, (FOUR & WIDE) != 0, false>(
                q, j, scale_enc, ones, unit, s, l, m[h],
                [&](int i) { return h ? high_bf16(v[i]) : low_bf16(v[i]); },
                [&](uint32_t w[8]) { take_column(w, v, h); });
            scales[c * SEGMENTS + warp] = (uint8_t)stored;
            uint32_t *line = codes + c * LINE_WORDS * 2;
#pragma unroll
            for (int k = 0; k < 2; k++) line[(word + k) ^ line_mask(c)] = q[k] | signs[h][k];
        }
    }
}

template <int FOUR>
static __global__ void __launch_bounds__(TILE_THREADS, 3)
    chosen_rows_kernel(const __grid_constant__ job j)
{
    extern __shared__ uint4 mt_shared[];
    chosen_tables<FOUR> *t = (chosen_tables<FOUR> *)mt_shared;
    strip &p = t->strips[threadIdx.x / 32];
    found it = {};
    wait_for_results();
    let_follow();
    if (!take_strip(&p, j.table, j.p.group.k, false)) return;
    fill_tables<(FOUR & WIDE) != 0>(t, t->ones[0], &p, j);
    __syncthreads(); /* the tables are there */
    const side &s = j.p.sides[MT_ROW];
    const level l = t->levels[MT_ROW];
    const float unit = unit_of(s, l, FOUR & WIDE);
    const auto choose_by = [&](auto known) {
        make_rows(p, &it, [&](uint32_t q[2], int, const uint32_t w[8], uint32_t most, bool nans) {
            return choose_codes<FOUR, decltype(known)::value>(q, j, t->enc[MT_ROW], t->ones[0],
                                                              unit, s, l, most, w, nans);
        });
    };
    if (unit != 0)
        choose_by(std::true_type());
    else
        choose_by(std::false_type());
    if (is_measured(j)) raise_member(j, t, p, it.most[MT_ROW], it.nans);
}

/* Columns, or both directions. */
template <bool ROWS_TOO, int FOUR>
static __global__ void __launch_bounds__(TILE_THREADS, 2)
    chosen_kernel(const __grid_constant__ job j)
{
    extern __shared__ uint4 mt_shared[];
    chosen_space<FOUR> *sp = (chosen_space<FOUR> *)mt_shared;
    chosen_tables<FOUR> *t = &sp->tables;
    const int warp = (int)threadIdx.x / 32;
    strip &p = t->strips[warp];
    found it = {};
    wait_for_results();
    let_follow();
    if (!take_strip(&p, j.table, j.p.group.k, false)) return;
    int n = (p.rows - TILE) >> 7 & 1;
    send_rows(sp->rows[n][warp], p, 0, p.height);
    fill_tables<(FOUR & WIDE) != 0>(t, t->ones[0], &p, j);
    __syncthreads(); /* the tables are there */
    const level col = t->levels[MT_COL], row = ROWS_TOO ? t->levels[MT_ROW] : col;
    for (int left = p.rows - TILE;; left -= TILE, n ^= 1) { /* rows below the tile */
        const bool more = left > 0;
        const int below = left < TILE ? left : (int)TILE;
        const uint32_t *rows = sp->rows[n][warp];
        if (more) send_rows(sp->rows[n ^ 1][warp], p, TILE, below);
        copies_before(more);
        if (ROWS_TOO) choose_rows<FOUR>(j, p, rows, t->enc[MT_ROW], t->ones[0], row, &it);
        choose_columns<FOUR>(j, p, sp->codes, sp->scales[n], n, rows, t->enc[MT_COL],
                             t->ones[0] + NIBBLE_SCALES, col, ROWS_TOO, &it);
        const uneven u = uneven_of(p, sp->codes, n, left);
        __syncthreads(); /* all codes are there */
        put_columns(sp->scales[n], p, u);
        if (u.on) __syncthreads(); /* those of two tiles have been read */
        if (!more) break;
        step_down(&p, below); /* the rows have been read, too */
    }
    if (is_measured(j)) raise_member(j, t, p, it.most[MT_ROW], it.nans);
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
    if (!j->codes || (squared && magnitudes) || mt_cuda_short_kind(j) != NIBBLES) return false;
    if (g->m > INT32_MAX || g->k > INT32_MAX || mt_cuda_plan_units(g) > INT32_MAX) return false;
    if (row->present && ((uintptr_t)row->codes % 8 || g->k % SEGMENT)) return false;
    return !j->row_token && !j->swiglu && !j->sums && !g->last_dims && g->k % 8 == 0 &&
           (uintptr_t)j->p.sides[SOURCE].codes % 16 == 0;
}

template <int DIRS, int FOUR> static mt_status launch(mt_stream *stream, const job *j)
{
    constexpr bool in_columns = DIRS & COLUMN_CODES;
    constexpr int bytes = in_columns ? sizeof(chosen_space<FOUR>) : sizeof(chosen_tables<FOUR>);
    const int64_t blocks = j->table.most * mt_ceil_div(j->p.group.k, TILE);
    auto kernel =
        in_columns ? chosen_kernel<(DIRS & ROW_CODES) != 0, FOUR> : chosen_rows_kernel<FOUR>;
    MT_TRY(mt_cuda_give_shared(stream, (const void *)kernel, bytes, "quantize: 4over6"));
    MT_TRY(follow(stream, kernel, (unsigned)blocks, TILE_THREADS, bytes, *j));
    MT_LAUNCHED(stream, "quantize: 4over6");
    return MT_OK;
}

mt_status mt_cuda_quantize_chosen(mt_stream *stream, const job *j)
{
    enum { BOTH = ROW_CODES | COLUMN_CODES };
    static mt_status (*const launches[][2][2])(mt_stream *, const job *) = {
        { { launch<ROW_CODES, BY_MAGNITUDES>, launch<ROW_CODES, BY_SQUARES> },
          { launch<ROW_CODES, BY_MAGNITUDES | WIDE>, launch<ROW_CODES, BY_SQUARES | WIDE> } },
        { { launch<COLUMN_CODES, BY_MAGNITUDES>, launch<COLUMN_CODES, BY_SQUARES> },
          { launch<COLUMN_CODES, BY_MAGNITUDES | WIDE>, launch<COLUMN_CODES, BY_SQUARES | WIDE> } },
        { { launch<BOTH, BY_MAGNITUDES>, launch<BOTH, BY_SQUARES> },
          { launch<BOTH, BY_MAGNITUDES | WIDE>, launch<BOTH, BY_SQUARES | WIDE> } }
    };
    static_assert(ROW_CODES == 1 && COLUMN_CODES == 2, "order of the table");
    const side *row = &j->p.sides[MT_ROW], *col = &j->p.sides[MT_COL];
    const int dirs = (row->present ? ROW_CODES : 0) + (col->present ? COLUMN_CODES : 0);
    const bool wide = (row->present && row->options.four_over_six != 256) ||
                      (col->present && col->options.four_over_six != 256);
    const bool squared = (row->present ? row : col)->options.squared_error;
    return launches[dirs - 1][wide][squared](stream, j);
}
