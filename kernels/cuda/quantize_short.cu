/* The common case of quantize by a shorter way: bf16 to bytes or nibbles, 1-D blocks or one scale a
 * member, either direction or both. Tiles lie in shared memory as elements do, the next one on its
 * way while one is worked on. The arithmetic and its order are those of the tiles. */
#include "kernels/cuda/quantize_follow.cuh"
#include "kernels/cuda/quantize_nibbles.cuh"

/* ---- rows -------------------------------------------------------------------------------------
 */

/* Stores codes of segment `at` of a row. Whole warps come here. */
template <int KIND>
static __device__ __forceinline__ void put_row(const target &to, const tile &t, int r, int at,
                                               const uint32_t q[4])
{
    enum { HALF = kind<KIND>::HALF };
    uint8_t *p = to.codes + r * to.pitch + (at * SEGMENT >> HALF);
    if (!to.even) {
        packed codes = { { q[0], q[1], q[2], q[3] } };
        put_codes_at(p, codes, r < t.rows, at, t.cols, HALF);
    } else if (r < t.rows && at * SEGMENT < t.cols) {
        if (HALF)
            *(uint2 *)p = make_uint2(q[0], q[1]);
        else
            store_16(p, q[0], q[1], q[2], q[3]);
    }
}

/* Magnitudes of the blocks of 32 rows of two columns: their scales, and what they are multiplied
 * by. */
template <int KIND>
static __device__ __forceinline__ void measure_planar(const job &j, short_space *sp, const frame &f,
                                                      const uint32_t *words)
{
    const side &s = j.p.sides[MT_COL];
    const target &to = f.to[MT_COL];
    const int pair = (int)threadIdx.x % PAIRS, block = (int)threadIdx.x / PAIRS;
    const uint32_t m = pair_magnitudes<KIND>(words, pair, block);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int c = pair * 2 + i;
        cell e = cell_at<KIND>(j, s, to.l, m >> 16 * i & 0xffff);
        sp->planar[planar_group(block, c >> 2) + (c & 3)] = e.enc;
        if (c < f.t.cols && block * 32 < f.t.rows) put_stored(s, to, e, c, block);
    }
}

/* Codes that lie in rows: of the row direction, and of planar columns. `keep`: they take the place
 * of their elements. */
template <int KIND>
static __device__ __forceinline__ void run_rows(const job &j, short_space *sp, const frame &f,
                                                uint32_t *words, bool keep, uint32_t *most,
                                                int *nans)
{
    const side &s = j.p.sides[MT_ROW], &col = j.p.sides[MT_COL];
    const bool planar = kind<KIND>::IS_PLANAR && col.present;
    const int at = (int)threadIdx.x % SEGMENTS, rows = f.t.rows;
#pragma unroll 2
    for (int r = (int)threadIdx.x / SEGMENTS; r - r % 4 < rows; r += TILE_THREADS / SEGMENTS) {
        uint32_t w[8], q[4];
        get_chunks<KIND>(w, words, r, at);
        int before = *nans;
        uint32_t m = KIND == WHOLE && !is_measured(j) ? 0 : segment_magnitude(w, nans);
        raise(most, m);
        if (s.present) {
            if (KIND == LINES || kind<KIND>::IS_PLANAR) {
                uint32_t other = __shfl_xor_sync(~0u, m, 1);
                m = other > m ? other : m;
            }
            if (KIND == LINES) {
#pragma unroll
                for (int lane = 2; lane < SEGMENTS; lane *= 2) {
                    uint32_t other = __shfl_xor_sync(~0u, m, lane);
                    m = other > m ? other : m;
                }
            }
            cell e = make_segment<KIND>(q, j, s, f.to[MT_ROW].l, m, w, *nans > before);
            if (KIND != WHOLE && (at * SEGMENT & ((1 << s.block_shift) - 1)) == 0 && r < rows &&
                at * SEGMENT < f.t.cols)
                put_stored(s, f.to[MT_ROW], e, r, at * SEGMENT >> s.block_shift);
            put_row<KIND>(f.to[MT_ROW], f.t, r, at, q);
            if (KIND == WHOLE && keep)
                *(uint4 *)(words + chunk_place<KIND>(r, at * 2)) =
                    make_uint4(q[0], q[1], q[2], q[3]);
        }
        if (planar) {
            float enc[SEGMENT];
#pragma unroll
            for (int i = 0; i < SEGMENT; i += 4) {
                float4 g = *(const float4 *)(sp->planar + planar_group(r / 32, at * 4 + i / 4));
                enc[i] = g.x, enc[i + 1] = g.y, enc[i + 2] = g.z, enc[i + 3] = g.w;
            }
            encode_segment<KIND>(q, col, w, enc, *nans > before);
            put_row<KIND>(f.to[MT_COL], f.t, r, at, q);
        }
    }
}

/* ---- columns ----------------------------------------------------------------------------------
 */

/* Lines of codes to where they go: in chunks from the first multiple of 16 on, bytes around them.
 */
template <int KIND>
static __device__ __forceinline__ void put_lines(const uint32_t *lines, const target &to, int cols,
                                                 int rows)
{
    enum { HALF = kind<KIND>::HALF, PITCH = kind<KIND>::PITCH, LANES = TILE / 16 >> HALF };
    const int bytes = (rows + HALF) >> HALF;
    const int64_t pitch = to.pitch;
    const int first = (int)threadIdx.x / LANES, at = (int)threadIdx.x % LANES * 16;
    uint8_t *p = to.codes + first * pitch;
#pragma unroll 2
    for (int c = first; c < cols; c += TILE_THREADS / LANES, p += TILE_THREADS / LANES * pitch) {
        int from = (int)(0 - (uintptr_t)p & 15) + at, up = from % 4 * 8;
        if (from + 16 > bytes) continue;
        const uint32_t *w = lines + c * PITCH + from / 4;
        store_16(p + from, __funnelshift_r(w[0], w[1], up), __funnelshift_r(w[1], w[2], up),
                 __funnelshift_r(w[2], w[3], up), __funnelshift_r(w[3], w[4], up));
    }
    if (to.even) return;
    const int b = (int)threadIdx.x % 16, start = (int)threadIdx.x / 16;
    const uint8_t *from = (const uint8_t *)(lines + start * PITCH) + b;
    p = to.codes + start * pitch + b;
#pragma unroll 2
    for (int c = start; c < cols; c += TILE_THREADS / 16) {
        int head = (b - (int)(uintptr_t)p) & 15; /* bytes before the first chunk */
        int tail = head + (bytes > head ? (bytes - head) & ~15 : 0);
        if (b < head && b < bytes) p[0] = from[0];
        if (tail + b < bytes) p[tail] = from[tail];
        p += TILE_THREADS / 16 * pitch, from += TILE_THREADS / 16 * PITCH * 4;
    }
}

/* Where chunk `at` of a whole line of bytes lies. SHIFT: lines of neighbouring threads differ by
 * 2^SHIFT, and meet in no bank. */
template <int SHIFT> static __device__ __forceinline__ int line_place(int c, int at)
{
    return (c * SEGMENTS + (at ^ (c >> SHIFT & 7))) * 4;
}
template <int SHIFT>
static __device__ __forceinline__ void put_whole_lines(const uint32_t *lines, const target &to,
                                                       int cols, int rows)
{
    const int at = (int)threadIdx.x % SEGMENTS, first = (int)threadIdx.x / SEGMENTS;
    const int64_t step = TILE_THREADS / SEGMENTS * to.pitch;
    uint8_t *p = to.codes + first * to.pitch + at * SEGMENT;
    if (at * SEGMENT >= rows) return;
#pragma unroll
    for (int i = 0; i < TILE * SEGMENTS / TILE_THREADS; i++, p += step) {
        int c = first + i * (TILE_THREADS / SEGMENTS);
        if (c >= cols) return;
        uint4 q = *(const uint4 *)(lines + line_place<SHIFT>(c, at));
        store_16(p, q.x, q.y, q.z, q.w);
    }
}

/* Bytes of a line of a tile on their way out. */
static __device__ __forceinline__ int line_rows(const target &to, const tile &t)
{
    return to.padded ? (int)TILE : t.rows;
}

/* Columns whose codes are those of the rows, which lie in place of their elements. The whole thread
 * block comes here. */
static __device__ __forceinline__ void turn_rows(const frame &f, uint32_t *words)
{
    enum { GROUPS = TILE / 4 };
    const int group = (int)threadIdx.x % GROUPS, part = (int)threadIdx.x / GROUPS;
    uint32_t q[4][4];
    __syncthreads(); /* the codes are there */
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t x[4], y[4];
#pragma unroll
        for (int r = 0; r < 4; r++) {
            int row = part * SEGMENT + i * 4 + r;
            x[r] = row < f.t.rows ? words[chunk_place<WHOLE>(row, group / 4 * 2) + group % 4] : 0;
        }
        turn_bytes(y, x);
#pragma unroll
        for (int c = 0; c < 4; c++) q[c][i] = y[c];
    }
    __syncthreads(); /* they have been read */
#pragma unroll
    for (int c = 0; c < 4; c++)
        *(uint4 *)(words + line_place<2>(group * 4 + c, part)) =
            make_uint4(q[c][0], q[c][1], q[c][2], q[c][3]);
    __syncthreads();
    put_whole_lines<2>(words, f.to[MT_COL], f.t.cols, line_rows(f.to[MT_COL], f.t));
}

/* Whether they are so. */
static __device__ __forceinline__ bool turns_rows(const job &j, const frame &f)
{
    const side &row = j.p.sides[MT_ROW], &col = j.p.sides[MT_COL];
    return row.present && col.present && f.to[MT_COL].even &&
           row.options.element == col.options.element && f.to[MT_ROW].l.enc == f.to[MT_COL].l.enc;
}

/* Codes that lie in columns; again: the rows have been measured. The whole thread block comes here;
 * the tile's words are used up. */
template <int KIND>
static __device__ __forceinline__ void run_columns(const job &j, short_space *sp, const frame &f,
                                                   uint32_t *words, bool again, found *it)
{
    enum { WORDS = kind<KIND>::WORDS, PITCH = kind<KIND>::PITCH };
    const side &s = j.p.sides[MT_COL];
    const target &to = f.to[MT_COL];
    const int pair = (int)threadIdx.x % PAIRS, part = (int)threadIdx.x / PAIRS;
    uint32_t q[2][2][4] = {};
    if (KIND == LINES) {
        sp->partial[part][pair] = pair_magnitudes<KIND>(words, pair, part);
        __syncthreads();
    }
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const int at = part + n * (TILE_THREADS / PAIRS);
        if (at * SEGMENT >= f.t.rows) continue; /* nothing of it is stored */
        uint32_t v[SEGMENT];
#pragma unroll
        for (int i = 0; i < SEGMENT; i++) v[i] = words[pair_place<KIND>(at * SEGMENT + i, pair)];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint32_t w[8];
#pragma unroll
            for (int i = 0; i < 8; i++)
                w[i] = __byte_perm(v[i * 2], v[i * 2 + 1], h ? 0x7632 : 0x5410);
            int nans = 0;
            uint32_t m = !again && is_measured(j) ? segment_magnitude(w, &nans) : 0;
            if (!again) it->nans += nans, raise(&it->most[MT_ROW], m);
            if (KIND == LINES) {
#pragma unroll
                for (int k = 0; k < TILE / 32; k++) {
                    uint32_t other = sp->partial[k][pair] >> 16 * h & 0xffff;
                    m = other > m ? other : m;
                }
            }
            raise(&it->most[MT_COL], m);
            cell e = make_segment<KIND>(q[n][h], j, s, to.l, m, w, nans > 0);
            if (KIND == LINES && at == 0 && pair * 2 + h < f.t.cols)
                put_stored(s, to, e, pair * 2 + h, 0);
        }
    }
    if (KIND == WHOLE && again) raise(&it->most[MT_COL], it->most[MT_ROW]); /* the same elements */
    __syncthreads(); /* the words have been read */
    if (to.even) {
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                *(uint4 *)(words + line_place<1>(pair * 2 + h, part + n * (TILE_THREADS / PAIRS))) =
                    make_uint4(q[n][h][0], q[n][h][1], q[n][h][2], q[n][h][3]);
        __syncthreads();
        put_whole_lines<1>(words, to, f.t.cols, line_rows(to, f.t));
        return;
    }
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int i = 0; i < WORDS; i++)
                words[(pair * 2 + h) * PITCH + (part + n * (TILE_THREADS / PAIRS)) * WORDS + i] =
                    q[n][h][i];
    __syncthreads();
    put_lines<KIND>(words, to, f.t.cols, line_rows(to, f.t));
}

/* ---- the kernel -------------------------------------------------------------------------------
 */

/* Of nibbles. */
template <bool SR, int FOUR>
static __device__ __forceinline__ void run_nibbles(const job &j, short_space *sp, const frame &f,
                                                   uint32_t *words, uint32_t *random, int table,
                                                   const uint32_t rotation[4], found *it)
{
    const bool rows = j.codes && j.p.sides[MT_ROW].present, columns = j.p.sides[MT_COL].present;
    const bool sums = j.codes && j.sums;
    const float(*enc)[NIBBLE_SCALES] = sp->enc[table];
    const float *ones = FOUR ? sp->planar + table * TILE_THREADS : NULL;
    if (SR && j.codes) draw_tile_bits<NIBBLES>(random, j, f.t);
    if (sums) sum_pairs<NIBBLES>(j, words, f.t);
    if (SR && j.codes) __syncthreads();
    if (rows) run_nibble_rows<SR, FOUR>(j, f, words, random, enc[MT_ROW], ones, it);
    if (!columns) return;
    if (!j.codes) return measure_strip(j, f, words, rotation, it);
    if (rows || sums) __syncthreads(); /* the words have been read */
    if (FOUR && j.p.sides[MT_COL].options.four_over_six)
        run_chosen_columns<FOUR>(j, sp, f, words, enc[MT_COL], ones + NIBBLE_SCALES, rotation, rows,
                                 it);
    else
        run_strip<SR>(j, sp->scales, f, words, random, enc[MT_COL], rotation, rows, it);
}

template <int KIND>
static __device__ __forceinline__ void run_frame(const job &j, short_space *sp, const frame &f,
                                                 uint32_t *words, found *it)
{
    const side &row = j.p.sides[MT_ROW], &col = j.p.sides[MT_COL];
    const bool planar = kind<KIND>::IS_PLANAR && col.present;
    const bool rows = row.present || planar;
    if (j.sums) sum_pairs<KIND>(j, words, f.t);
    if (planar) measure_planar<KIND>(j, sp, f, words);
    if (planar) __syncthreads();
    const bool turned = KIND == WHOLE && turns_rows(j, f);
    if (turned && j.sums) __syncthreads(); /* the sums are taken */
    if (rows) {
        uint32_t most = 0;
        run_rows<KIND>(j, sp, f, words, turned, &most, &it->nans);
        raise(&it->most[MT_ROW], most);
        if (planar || turned) raise(&it->most[MT_COL], most);
    }
    if (turned) return turn_rows(f, words);
    if (!kind<KIND>::IS_PLANAR && col.present) run_columns<KIND>(j, sp, f, words, rows, it);
}

/* The tokens of its rows, where they are gathered. */
static __device__ __forceinline__ void set_tokens(frame *f, const job &j, int64_t units,
                                                  int64_t turn)
{
    if (turn >= units) return;
#pragma unroll
    for (int i = 0; i < TILE / 32; i++) {
        int r = i * 32 + lane_of_warp();
        f->token[r] = r < f->t.rows ? j.row_token[f->row0 + r] : 0;
    }
}

/* Of a multiprocessor. */
template <bool SR, int FOUR> static constexpr int BLOCKS = SR || FOUR ? 2 : 3;

/* The tile of a block's turn n lies in tiles[n & 1], its frame in frames[n & 3]. While a block is
 * at turn n the tile of n + 1 is on its way; warps in their turn look up n + 3, and where the parts
 * of n + 2 go: a chain of loads that nobody waits for. A block's tiles of nibbles follow each
 * other: what is made of a member lasts, as does what has been found of it. */
template <int KIND, bool SR, int FOUR>
static __global__ void __launch_bounds__(TILE_THREADS, (BLOCKS<SR, FOUR>))
    short_kernel(const __grid_constant__ job j)
{
    enum { FOLLOW = KIND == NIBBLES && FOUR == NO_CHOICE };
    extern __shared__ uint4 mt_shared[];
    short_space *sp = (short_space *)mt_shared;
    uint32_t *random = (uint32_t *)(sp + 1);
    wait_for_results();
    const int64_t units = j.p.units[j.p.group.members];
    const int64_t step = FOLLOW ? 1 : gridDim.x;
    const int64_t first = FOLLOW ? units * blockIdx.x / gridDim.x : blockIdx.x;
    const int64_t end = FOLLOW ? units * (blockIdx.x + 1) / gridDim.x : units;
    const int warp = (int)threadIdx.x / 32;
    found it = {};
    int64_t given = -1; /* the member that the block has found something of */
    int table = 0;      /* of the member's scales */
    uint32_t rotation[4];
    if (KIND == NIBBLES) make_rotation(rotation, j.p.sides[MT_COL].options.rht_mask);
    if (threadIdx.x < 2) sp->found[threadIdx.x] = block_found{};
    if (threadIdx.x < 4) sp->frames[threadIdx.x].token = sp->tokens[threadIdx.x];
    const auto ones = [&](int of) { return FOUR ? sp->planar + of * TILE_THREADS : NULL; };
    const auto at = [&](int64_t turn) { return turn < end ? turn : units; };
    if (warp < 3) find_turn(&sp->frames[warp], j, units, at(first + warp * step));
    __syncthreads();
    if (warp < 4) set_turn(&sp->frames[warp / 2], j, units, at(first + warp / 2 * step), warp % 2);
    if (j.row_token) {
        if (warp < 2) set_tokens(&sp->frames[warp], j, units, at(first + warp * step));
        __syncthreads();
    }
    if (first < end) load_tile<KIND>(sp->tiles[0], sp->frames[0], j);
    int n = 0;
    for (int64_t u = first; u < end; u += step, n++) {
        const frame &f = sp->frames[n & 3], &next = sp->frames[(n + 1) & 3];
        const bool more = u + step < end;
        const int place = (warp - n) & (WARPS - 1);
        copies_done();
        __syncthreads(); /* the tile is there, and its frame; the last tile is done with */
        if (more) load_tile<KIND>(sp->tiles[~n & 1], next, j);
        frame *second = &sp->frames[(n + 2) & 3], *third = &sp->frames[(n + 3) & 3];
        if (place == 0 && FOLLOW)
            follow_turn(third, *second, j, units, at(u + 3 * step));
        else if (place == 0)
            find_turn(third, j, units, at(u + 3 * step));
        else if (place <= MT_DIR_COUNT && FOLLOW)
            set_next(second, next, j, units, at(u + 2 * step), place - 1);
        else if (place <= MT_DIR_COUNT)
            set_turn(second, j, units, at(u + 2 * step), place - 1);
        else if (place == MT_DIR_COUNT + 1 && j.row_token)
            set_tokens(second, j, units, at(u + 2 * step));
        else if (place == WARPS - 1 && given >= 0 && lane_of_warp() == 0)
            pass_on(&sp->found[~n & 1], j, given);
        given = -1;
        if (KIND == NIBBLES && n == 0) {
            make_scales(sp->enc[0], ones(0), j, f);
            __syncthreads();
        }
        const bool changes = more && next.t.index != f.t.index;
        if (KIND == NIBBLES && changes) make_scales(sp->enc[table ^ 1], ones(table ^ 1), j, next);
        if constexpr (KIND == NIBBLES)
            run_nibbles<SR, FOUR>(j, sp, f, sp->tiles[n & 1], random, table, rotation, &it);
        else
            run_frame<KIND>(j, sp, f, sp->tiles[n & 1], &it);
        if (more && !changes) continue;
        table ^= 1;
        give_found(&sp->found[n & 1], j, &it);
        given = f.t.index;
    }
    __syncthreads(); /* all have given */
    if (threadIdx.x == 0 && given >= 0) pass_on(&sp->found[~n & 1], j, given);
    if (j.codes) end_block(j);
}

/* ---- the host's part --------------------------------------------------------------------------
 */

/* Whether codes of a direction are drawn (sr). */
static bool any_draws(const job *j)
{
    bool any = false;
    for (int dir = 0; dir < MT_DIR_COUNT; dir++)
        any |= j->codes && j->p.sides[dir].present && j->p.sides[dir].options.sr;
    return any;
}

/* Whether they are chosen (4over6), by squares or by magnitudes. */
static bool any_choice(const job *j, bool squared)
{
    bool any = false;
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
        const side *s = &j->p.sides[dir];
        any |= j->codes && s->present && s->options.four_over_six &&
               s->options.squared_error == squared;
    }
    return any;
}

/* The kind of a direction, KINDS where there is none. */
static int kind_of(const side *s)
{
    bool nibbles = s->options.element == MT_ELEMENT_E2M1;
    if (!mt_is_short(*s) || s->square || (s->decoded && s->options.four_over_six)) return KINDS;
    if (s->options.sr || s->options.rht) return s->scale == MT_SCALE_E4M3 ? NIBBLES : KINDS;
    if (s->scale == MT_SCALE_E4M3) return NIBBLES;
    if (s->decoded && (nibbles || !(s->whole || s->scale == MT_SCALE_E8M0 || s->options.pow2)))
        return KINDS;
    if (s->scale == MT_SCALE_E8M0) return nibbles ? PLANAR_NIBBLES : PLANAR;
    return s->whole ? WHOLE : LINES;
}

int mt_cuda_short_kind(const job *j)
{
    const side *source = &j->p.sides[SOURCE];
    const mt_group *g = &j->p.group;
    int of = KINDS;
    if (!source->plain || source->dtype != MT_BF16 || j->dequantized) return KINDS;
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
        const side *s = &j->p.sides[dir];
        if (!s->present) continue;
        int k = kind_of(s);
        if (k == KINDS || !j->write[dir] || (of != KINDS && of != k)) return KINDS;
        if (s->decoded && (g->last_dims || g->k % 8 || (uintptr_t)s->codes % 16)) return KINDS;
        of = k;
    }
    return any_draws(j) + any_choice(j, true) + any_choice(j, false) > 1 ? KINDS : of;
}

static constexpr size_t short_bytes(bool draws)
{
    return sizeof(short_space) + (draws ? AREA * sizeof(uint16_t) : 0);
}

/* Whether a block has the memory for what is drawn: the ways of tiles with bits of each element ask
 * for more than 99 KB, the rest for none. */
static bool has_room(const job *j)
{
    return !any_draws(j) || short_bytes(true) <= (size_t)j->shared || mt_cuda_rotated_suffices(j) ||
           (!keeps_values(j) && mt_cuda_nvfp4_suffices(j));
}

bool mt_cuda_short_suffices(const job *j)
{
    const int kind = mt_cuda_short_kind(j);
    if (kind == NIBBLES && !has_room(j)) return false;
    if (kind != KINDS && kind != NIBBLES && keeps_values(j)) return mt_cuda_values_suffice(j);
    return kind != KINDS && (!(j->row_weight || j->z) || mt_cuda_bytes_suffice(j));
}

template <int KIND, bool SR, int FOUR> static mt_status launch(mt_stream *stream, const job *j)
{
    constexpr size_t bytes = short_bytes(SR);
    int64_t units = mt_cuda_plan_units(&j->p.group);
    int64_t most = (int64_t)mt_cuda_multiprocessors(stream) * BLOCKS<SR, FOUR>;
    MT_TRY(mt_cuda_give_shared(stream, (const void *)short_kernel<KIND, SR, FOUR>, bytes,
                               "quantize: bf16"));
    MT_TRY(follow(stream, short_kernel<KIND, SR, FOUR>, (unsigned)(units < most ? units : most),
                  TILE_THREADS, bytes, *j));
    MT_LAUNCHED(stream, "quantize: bf16");
    return MT_OK;
}

/* By the fastest way that knows the call; the kernel of this file takes the rest. */
mt_status mt_cuda_quantize_short(mt_stream *stream, const job *j)
{
    static mt_status (*const launches[KINDS])(mt_stream *, const job *) = {
        launch<WHOLE, false, NO_CHOICE>, launch<LINES, false, NO_CHOICE>,
        launch<PLANAR, false, NO_CHOICE>, launch<NIBBLES, false, NO_CHOICE>,
        launch<PLANAR_NIBBLES, false, NO_CHOICE>
    };
    if (mt_cuda_rotated_suffices(j)) return mt_cuda_quantize_rotated(stream, j);
    if ((keeps_values(j) || !j->codes) && mt_cuda_warps_suffice(j))
        return mt_cuda_quantize_warps(stream, j);
    if (mt_cuda_values_suffice(j)) return mt_cuda_quantize_values(stream, j);
    if (mt_cuda_gathered_suffice(j)) return mt_cuda_quantize_gathered(stream, j);
    if (mt_cuda_bytes_suffice(j)) return mt_cuda_quantize_bytes(stream, j);
    if (mt_cuda_nvfp4_suffices(j)) return mt_cuda_quantize_nvfp4(stream, j);
    if (mt_cuda_chosen_suffices(j)) return mt_cuda_quantize_chosen(stream, j);
    if (any_draws(j)) return launch<NIBBLES, true, NO_CHOICE>(stream, j);
    if (any_choice(j, true)) return launch<NIBBLES, false, BY_SQUARES>(stream, j);
    if (any_choice(j, false)) return launch<NIBBLES, false, BY_MAGNITUDES>(stream, j);
    return launches[mt_cuda_short_kind(j)](stream, j);
}
