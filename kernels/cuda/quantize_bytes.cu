/* Quantize to bytes and to PLANAR_NIBBLES: bf16 rows that begin at multiples of 16 bytes, as they
 * lie, gathered, with weights, or SwiGLU's; 1-D blocks or one scale a member. A thread block has a
 * strip of tiles and no more. Threads have eight elements each of eight rows; those of the next
 * tile are on their way meanwhile, each to where only its thread looks. Only magnitudes, codes of
 * columns and planar scales of rows meet in shared memory. The arithmetic is that of the tiles. */
#include "kernels/cuda/quantize_bytes.cuh"
#include "kernels/cuda/quantize_find.cuh"

/* ---- tiles ------------------------------------------------------------------------------------
 */

/* Codes in rows: elements times enc of their row, of planar columns times that of their column. */
template <typename AT, int KIND, int DIRS, int CODES, bool POW2>
static __device__ __forceinline__ void put_rows(const job &j, const strip &p,
                                                const uint32_t x[ROWS][4], const float row[ROWS],
                                                const float column[RUN])
{
    const int rows = AT::column() < p.width ? p.height - AT::row() : 0;
    const uint32_t pitch = (uint32_t)p.cols >> kind<KIND>::HALF;
    const uint64_t at = (uint64_t)(uint32_t)AT::row() * pitch + (AT::column() >> kind<KIND>::HALF);
    uint8_t *by_row = p.parts[MT_ROW].codes + at, *by_column = p.parts[MT_COL].codes + at;
#pragma unroll
    for (int i = 0; i < ROWS; i++, by_row += pitch, by_column += pitch) {
        uint32_t q[2], c[2];
        float same[RUN];
#pragma unroll
        for (int e = 0; e < RUN; e++) same[e] = row[i];
        if (DIRS & ROW_CODES) encode_run<CODES, POW2>(q, j.p.sides[MT_ROW], x[i], same);
        if (DIRS & COLUMN_CODES) encode_run<CODES, POW2>(c, j.p.sides[MT_COL], x[i], column);
        if (i >= rows) continue;
        if (DIRS & ROW_CODES) store_run<KIND>(by_row, q);
        if (DIRS & COLUMN_CODES) store_run<KIND>(by_column, c);
    }
}

/* Of one of two columns. Words of one column first, or the compiler keeps the reals that codes of
 * rows were made of. */
template <int CODES>
static __device__ __forceinline__ void encode_column(uint32_t q[2], const side &s,
                                                     const uint32_t x[ROWS], bool second, float enc)
{
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        w[i] = __byte_perm(x[i * 2], x[i * 2 + 1], second ? 0x7632 : 0x5410);
    encode_row<CODES>(q, s, w, enc);
}
/* Of products. */
template <int CODES>
static __device__ __forceinline__ void encode_column(uint32_t q[2], const side &s,
                                                     const uint32_t y[ROWS], bool second)
{
    float v[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) v[i] = second ? high_bf16(y[i]) : low_bf16(y[i]);
#pragma unroll
    for (int h = 0; h < 2; h++)
        q[h] = encode_products<CODES>(s, v[h * 4], v[h * 4 + 1], v[h * 4 + 2], v[h * 4 + 3]);
}

/* Leaves codes of a patch's columns, each with its own scale. */
template <typename AT, int CODES, bool POW2>
static __device__ __forceinline__ void leave_columns(uint8_t *codes, int half, const side &s,
                                                     const uint32_t x[ROWS][4],
                                                     const float enc[RUN])
{
    const bool above = is_left_above(half, AT::row());
    uint8_t *to = tile_lines(codes, half) + line_place(AT::column()) + AT::row();
#pragma unroll
    for (int c = 0; c < RUN; c += 2) {
        uint32_t y[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            y[i] = POW2 ? times_powers(x[i][c / 2], power_words(enc[c], enc[c + 1])) : x[i][c / 2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            uint32_t q[2];
            if (POW2)
                encode_column<CODES>(q, s, y, e);
            else
                encode_column<CODES>(q, s, y, e, enc[c + e]);
            leave_column(to, c + e, above, q[0], q[1]);
        }
    }
}

/* Codes of a patch of a member with one scale. */
template <typename AT, int DIRS, int CODES>
static __device__ __forceinline__ void run_whole(const job &j, uint8_t *codes, const strip &p,
                                                 int half, const uint32_t x[ROWS][4])
{
    enum { LAST = DIRS & COLUMN_CODES ? MT_COL : MT_ROW };
    const float enc = p.parts[LAST].whole, row = p.parts[MT_ROW].whole;
    const bool alike = LAST == MT_ROW || mt_f32_bits(enc) == mt_f32_bits(row);
    const int rows = AT::column() < p.width ? p.height - AT::row() : 0;
    const uint32_t pitch = (uint32_t)p.cols;
    uint8_t *to = p.parts[MT_ROW].codes + (uint64_t)(uint32_t)AT::row() * pitch + AT::column();
    uint32_t q[ROWS][2];
    if ((DIRS & ROW_CODES) && !alike) {
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            encode_row<CODES>(q[0], j.p.sides[MT_ROW], x[i], row);
            if (i < rows) store_8(to + (uint64_t)pitch * i, q[0][0], q[0][1]);
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++, to += pitch) {
        encode_row<CODES>(q[i], j.p.sides[LAST], x[i], enc);
        if ((DIRS & ROW_CODES) && alike && i < rows) store_8(to, q[i][0], q[i][1]);
    }
    if (DIRS & COLUMN_CODES)
        leave_turned(tile_lines(codes, half) + line_place(AT::column()) + AT::row(),
                     is_left_above(half, AT::row()), q);
}

/* ---- the kernel -------------------------------------------------------------------------------
 */

/* From so many rows on, columns of tiles are written from end to end. */
enum { LONG = 64 * TILE };

/* Results of members that a sweep before has found. */
static __device__ __noinline__ void give_found(const job &j)
{
    const int64_t count = j.p.group.members, step = (int64_t)gridDim.x * TILE_THREADS;
    int64_t i = (int64_t)blockIdx.x * TILE_THREADS + threadIdx.x;
    for (; i < count; i += step) give_results(j, i);
}
/* Whether nothing more is found of them. */
static __host__ __device__ __forceinline__ bool gives_found(const job &j)
{
    return !j.gives && !j.nans && !j.measure[MT_ROW] && !j.measure[MT_COL];
}

template <int KIND, int DIRS, int CODES, int FROM>
static __global__ void __launch_bounds__(TILE_THREADS, (layout<KIND, DIRS, FROM>::RESIDENT))
    bytes_kernel(const __grid_constant__ job j)
{
    typedef layout<KIND, DIRS, FROM> at;
    extern __shared__ uint4 mt_shared[];
    bytes_space<KIND, DIRS, FROM> *sp = (bytes_space<KIND, DIRS, FROM> *)mt_shared;
    const int lane = lane_of_warp();
    strip &p = sp->strips[threadIdx.x / 32];
    uint32_t x[ROWS][4], most = 0; /* what a thread has found */
    bool after = false;            /* the tile before has left ends of its lines to this one */
    const bool lines = FROM == LYING && DIRS == COLUMN_CODES && at::TURNED;
    const bool down = at::BY_TOKEN || (lines && !j.p.group.first_dims && j.p.group.m >= LONG);
    const bool early = blockIdx.x < j.table.early;
    if (!early) wait_for_results();
    let_follow();
    if (!(early ? find_strip(&p, j.p, j.table, down)
                : take_strip(&p, j.table, j.p.group.k, down))) {
        wait_for_results();
        if (KIND == WHOLE && gives_found(j)) give_found(j);
        return;
    }
    if (lane == 0) sp->nans[threadIdx.x / 32] = 0;
    float weight = FROM == WEIGHTED ? row_value<at>(j.row_weight, p, 0, p.height) : 0;
    if (FROM == LYING)
        load_patch<at>(x, p);
    else if (FROM != GRADIENT)
        send_patch<at, FROM>(sp->slots, p, 0, p.height, p.width,
                             at::BY_TOKEN ? row_value<at>(j.row_token, p, 0, p.height) : 0);
    if (threadIdx.x < MT_DIR_COUNT && j.measure[lane])
        p.seen[lane] = early ? 0 : __ldcg((const uint32_t *)j.amax[lane] + p.index);
    if (KIND == WHOLE && FROM == LYING && early && !j.gives)
        wait_for_results(); /* for amaxes of the sweep before */
    if (KIND == WHOLE && lane < MT_DIR_COUNT && j.p.sides[lane].present)
        p.parts[lane].whole = whole_scale(j, lane, p.index);
    __syncwarp();
    /* a strip goes along the rows, or down the columns */
    const bool right = FROM == LYING && at::IS_PLANAR && j.table.wide > 1;
    for (int left = (right ? p.span : p.rows) - TILE, turn = 0;; left -= TILE, turn++) {
        const bool more = left > 0; /* rows below the tile, or columns to its right */
        const int next = left < TILE ? left : (int)TILE, n = left >> 7;
        const int below = right ? p.height : next;
        if (FROM == GRADIENT) {
            make_patch<at>(x, j, p);
        } else if (FROM != LYING || turn) {
            copies_done();
            take_patch<at, FROM>(x, sp->slots, weight, p.width);
        }
        const int token = at::BY_TOKEN && more ? row_value<at>(j.row_token, p, TILE, below) : 0;
        if (FROM == WEIGHTED && more) weight = row_value<at>(j.row_weight, p, TILE, below);
        float row[ROWS] = {}, column[RUN] = {};
        reach e = {};
        if (FROM != GRADIENT && more)
            send_patch<at, FROM>(sp->slots, p, right ? TILE : p.plain_down, below,
                                 right ? next : p.width, token);
        if (KIND != WHOLE || is_measured(j)) find_reach<KIND != WHOLE && at::IN_ROWS>(&e, x);
        if (e.nans) { /* seldom */
            atomicAdd(&sp->nans[threadIdx.x / 32], e.nans);
#pragma unroll
            for (int i = 0; CODES == CODES_E2M1 && i < ROWS * 4; i++)
                x[i / 4][i % 4] = without_nan_signs(x[i / 4][i % 4]);
        }
        raise(&most, e.all);
        if (KIND == WHOLE) run_whole<at, DIRS, CODES>(j, sp->codes, p, n & 1, x);
        if (at::IS_PLANAR) {
            const int slot = right ? turn : n & 1; /* of scales */
            if (at::IN_ROWS) planar_rows<at>(row, j, sp->scales[slot], e);
            if (at::IN_COLUMNS) planar_columns<at>(column, j, p, e);
            put_rows<at, KIND, DIRS, CODES, true>(j, p, x, row, column);
            if constexpr (at::IS_PLANAR && at::IN_ROWS) {
                if (!right || !more) {
                    __syncthreads(); /* the scales are there */
                    put_row_scales(sp->scales + (right ? 0 : slot), p, right ? p.span : p.width);
                }
            }
        }
        if (KIND == LINES) {
            if (at::IN_COLUMNS) {
                leave_pairs(sp->partial, e);
                __syncthreads(); /* the magnitudes are there */
                line_columns(sp->enc, j, p, sp->partial);
            }
            if (at::IN_ROWS) {
                line_rows<at>(row, j, p, e);
                if (at::BY_POWERS && j.p.sides[MT_ROW].options.pow2)
                    put_rows<at, KIND, ROW_CODES, CODES, true>(j, p, x, row, column);
                else
                    put_rows<at, KIND, ROW_CODES, CODES, false>(j, p, x, row, column);
            }
            if (at::IN_COLUMNS) {
                __syncthreads(); /* what columns are multiplied by is there */
#pragma unroll
                for (int i = 0; i < RUN; i += 4) {
                    const float4 q = *(const float4 *)(sp->enc + at::column() + i);
                    column[i] = q.x, column[i + 1] = q.y, column[i + 2] = q.z, column[i + 3] = q.w;
                }
                const side &to = j.p.sides[MT_COL];
                if (at::BY_POWERS && to.options.pow2)
                    leave_columns<at, CODES, true>(sp->codes, n & 1, to, x, column);
                else
                    leave_columns<at, CODES, false>(sp->codes, n & 1, to, x, column);
            }
        }
        if (at::TURNED) {
            const bool even = is_even(p, MT_COL), on = !even && more;
            const unevenly u = { tile_lines(sp->codes, n & 1), after, on };
            const part &to = p.parts[MT_COL];
            const int bytes = to.padded ? (int)TILE : p.height;
            after = on;
            __syncthreads(); /* all codes are there */
            if (even)
                put_even_codes(u.lines, to.codes, to.pitch, p.width, bytes);
            else
                put_uneven_codes(u, to.codes, to.pitch, p.width, bytes);
            if (on) __syncthreads(); /* those of two tiles have been read */
        }
        if (!more) break;
        right ? step_right(&p, next) : step_down(&p, below);
    }
    wait_for_results(); /* early blocks do so here */
    if (KIND == WHOLE && gives_found(j)) give_found(j);
    if (!is_measured(j)) return;
    most = __reduce_max_sync(~0u, most);
    if (lane == 0) sp->most[threadIdx.x / 32] = most;
    raise_by<WARPS>(j, sp, p);
}

/* ---- the host's part --------------------------------------------------------------------------
 */

template <int KIND, int DIRS, int CODES, int FROM>
static mt_status launch(mt_stream *stream, const job *j)
{
    enum { BYTES = sizeof(bytes_space<KIND, DIRS, FROM>) };
    enum { MANY = 1024 /* members that a warp may count in time */ };
    const int64_t blocks = j->table.most * mt_ceil_div(j->p.group.k, TILE * j->table.wide);
    job own = *j;
    /* who clears swizzled scales comes between */
    const bool cleared = j->p.sides[MT_ROW].swizzled || j->p.sides[MT_COL].swizzled;
    const bool few = j->p.group.members <= MANY && mt_cuda_plan_rows(&j->p.group) <= MOST_FOUND;
    if ((j->gives || (KIND == WHOLE && FROM == LYING)) && !cleared && few)
        own.table.early =
            (unsigned)mt_cuda_multiprocessors(stream) * layout<KIND, DIRS, FROM>::RESIDENT;
    MT_TRY(mt_cuda_give_shared((const void *)bytes_kernel<KIND, DIRS, CODES, FROM>, BYTES,
                               "quantize: bytes"));
    MT_TRY(follow(stream, bytes_kernel<KIND, DIRS, CODES, FROM>, (unsigned)blocks, TILE_THREADS,
                  BYTES, own));
    MT_LAUNCHED(stream, "quantize: bytes");
    return MT_OK;
}

typedef mt_status (*launcher)(mt_stream *, const job *);

template <int KIND, int CODES> static launcher launcher_of(int dirs, const job *j)
{
    if constexpr (KIND != PLANAR_NIBBLES) {
        enum { BOTH = ROW_CODES | COLUMN_CODES };
        if (j->row_weight) return launch<KIND, BOTH, CODES, WEIGHTED>;
        if (j->row_token) return launch<KIND, BOTH, CODES, GATHERED>;
        if (j->swiglu) return launch<KIND, BOTH, CODES, SWIGLU>;
        if (j->z) return launch<KIND, BOTH, CODES, GRADIENT>;
    }
    return dirs == ROW_CODES      ? launch<KIND, ROW_CODES, CODES, LYING>
           : dirs == COLUMN_CODES ? launch<KIND, COLUMN_CODES, CODES, LYING>
                                  : launch<KIND, ROW_CODES | COLUMN_CODES, CODES, LYING>;
}

bool mt_cuda_bytes_suffice(const job *j)
{
    const side *row = &j->p.sides[MT_ROW], *col = &j->p.sides[MT_COL];
    const mt_group *g = &j->p.group;
    const int kind = mt_cuda_short_kind(j), run = kind == PLANAR_NIBBLES ? 4 : 8; /* bytes */
    const bool both = row->present && col->present, made = j->row_token || j->swiglu || j->z;
    if (!j->codes || j->sums || g->last_dims || g->k % RUN) return false;
    if (kind == NIBBLES || kind == KINDS) return false;
    if (made && (!both || kind == PLANAR_NIBBLES)) return false;
    if (g->m > INT32_MAX || g->k > INT32_MAX || mt_cuda_plan_units(g) > INT32_MAX) return false;
    if ((uintptr_t)j->p.sides[SOURCE].codes % 16) return false;
    if (j->z && (g->k % (2 * RUN) || (uintptr_t)j->z % 16)) return false;
    if (row->present && (uintptr_t)row->codes % run) return false;
    if (col->present && !col->transposed && (uintptr_t)col->codes % run) return false;
    return !both || row->options.element == col->options.element;
}

bool mt_cuda_bytes_give(const job *j)
{
    return mt_cuda_bytes_suffice(j) && !mt_cuda_gathered_suffice(j) &&
           mt_cuda_short_kind(j) == WHOLE && gives_found(*j);
}

/* Where scales of rows are bytes, strips go along the rows, so that more of them are written at
 * once. */
int mt_cuda_bytes_wide(const job *j)
{
    const side *row = &j->p.sides[MT_ROW], *col = &j->p.sides[MT_COL];
    const int kind = mt_cuda_short_kind(j);
    const bool lying = !j->row_token && !j->swiglu && !j->z;
    if (!lying || j->p.group.k <= TILE) return 1;
    if (kind == PLANAR) return col->present ? 2 : 4;
    return kind == PLANAR_NIBBLES && row->present ? 4 : 1;
}

int mt_cuda_bytes_rows(const job *j)
{
    if (j->row_token || j->swiglu || j->z) return 4 * TILE;
    if (mt_cuda_bytes_wide(j) > 1) return TILE;
    return (j->p.sides[MT_ROW].present ? 2 : 3) * TILE;
}

mt_status mt_cuda_quantize_bytes(mt_stream *stream, const job *j)
{
    /* by kind; to E4M3, E5M2 */
    static launcher (*const kinds[KINDS][2])(
        int, const job *) = { { launcher_of<WHOLE, CODES_E4M3>, launcher_of<WHOLE, CODES_E5M2> },
                              { launcher_of<LINES, CODES_E4M3>, launcher_of<LINES, CODES_E5M2> },
                              { launcher_of<PLANAR, CODES_E4M3>, launcher_of<PLANAR, CODES_E5M2> },
                              { NULL, NULL },
                              { launcher_of<PLANAR_NIBBLES, CODES_E2M1>, NULL } };
    static_assert(WHOLE == 0 && LINES == 1 && PLANAR == 2 && NIBBLES == 3, "order of the table");
    const side *row = &j->p.sides[MT_ROW], *col = &j->p.sides[MT_COL];
    const int dirs = (row->present ? ROW_CODES : 0) + (col->present ? COLUMN_CODES : 0);
    const bool e5m2 = mt_codes_kind(row->present ? *row : *col) == CODES_E5M2;
    return kinds[mt_cuda_short_kind(j)][e5m2](dirs, j)(stream, j);
}
