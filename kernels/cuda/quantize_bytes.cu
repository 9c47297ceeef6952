/* Both directions of quantize to bytes at a time: bf16 rows that begin at multiples of 16 bytes, as
 * they lie, gathered, with weights, or SwiGLU's; 1-D blocks or one scale a member. Threads have
 * eight elements each of eight rows; those of the next tile are on their way meanwhile, each to
 * where only its thread looks. Only magnitudes, codes of columns and PLANAR scales of rows meet in
 * shared memory. The arithmetic is that of the tiles. */
#include "kernels/cuda/quantize_bytes.cuh"

/* What is looked up of a tile's member. */
static __device__ __forceinline__ void fill_spot(spot *p, const job &j, const member &m, int lane,
                                                 int64_t index)
{
    if (lane < MT_DIR_COUNT && j.p.sides[lane].present) {
        const side &s = j.p.sides[lane];
        const float *given = j.scale[lane];
        fill_part(&p->parts[lane], s, m, lane);
        float enc = 1.0f;
        if (s.whole && !s.delayed)
            enc = mt_encode_scale(j.amax[lane][index], s.max, s.options.pow2, FLT_MAX);
        else if (s.whole && given)
            enc = given[index];
        p->parts[lane].whole = enc;
    }
    if (lane == MT_DIR_COUNT) {
        p->first_row = j.row_token || j.z ? m.offset / m.cols : 0;
        p->plain_down = j.row_token ? 0 : (j.swiglu ? 2 : 1) * m.cols * TILE;
        p->plain = (mt_bf16 *)j.p.sides[SOURCE].codes + (j.row_token ? 0
                                                         : j.swiglu  ? 2 * m.offset
                                                                     : m.offset);
    }
}

/* ---- tiles ------------------------------------------------------------------------------------
 */

/* Codes in rows: elements times enc of their row, and of planar columns, times that of their
 * column. */
template <typename AT, int CODES, bool PLANAR_TOO>
static __device__ __forceinline__ void put_rows(const job &j, const spot &p,
                                                const uint32_t x[ROWS][4], const float row[ROWS],
                                                const float column[RUN])
{
    const int rows = AT::column() < p.width ? p.height - AT::row() : 0;
    const uint32_t pitch = (uint32_t)p.cols;
    const uint64_t at = (uint64_t)(uint32_t)AT::row() * pitch + AT::column();
    uint8_t *by_row = p.parts[MT_ROW].codes + at, *by_column = p.parts[MT_COL].codes + at;
#pragma unroll
    for (int i = 0; i < ROWS; i++, by_row += pitch, by_column += pitch) {
        uint32_t q[2], c[2];
        encode_row<CODES>(q, j.p.sides[MT_ROW], x[i], row[i]);
#pragma unroll
        for (int h = 0; PLANAR_TOO && h < 2; h++)
            c[h] = encode_four<CODES>(j.p.sides[MT_COL], x[i] + h * 2, column + h * 4);
        if (i >= rows) continue;
        store_8(by_row, q[0], q[1]);
        if (PLANAR_TOO) store_8(by_column, c[0], c[1]);
    }
}

/* Leaves codes of a patch's columns, each with its own scale. */
template <typename AT, int CODES>
static __device__ __forceinline__ void leave_columns(uint32_t *codes, int half, const side &s,
                                                     const uint32_t x[ROWS][4],
                                                     const float enc[RUN])
{
#pragma unroll
    for (int c = 0; c < RUN; c++) {
        uint32_t w[4], q[2];
#pragma unroll
        for (int i = 0; i < 4; i++)
            w[i] = __byte_perm(x[i * 2][c / 2], x[i * 2 + 1][c / 2], c % 2 ? 0x7632 : 0x5410);
        encode_row<CODES>(q, s, w, enc[c]);
        leave_codes<LINES>(codes, half, AT::column() + c, q[0], q[1]);
    }
}

template <typename AT, int CODES>
static __device__ __forceinline__ void run_whole(const job &j, uint32_t *codes, const spot &p,
                                                 int half, const uint32_t x[ROWS][4])
{
    const float enc = p.parts[MT_COL].whole, row = p.parts[MT_ROW].whole;
    const bool alike = mt_f32_bits(enc) == mt_f32_bits(row);
    const int rows = AT::column() < p.width ? p.height - AT::row() : 0;
    const uint32_t pitch = (uint32_t)p.cols;
    uint8_t *to = p.parts[MT_ROW].codes + (uint64_t)(uint32_t)AT::row() * pitch + AT::column();
    uint32_t q[ROWS][2];
    if (!alike) {
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            encode_row<CODES>(q[0], j.p.sides[MT_ROW], x[i], row);
            if (i < rows) store_8(to + (uint64_t)pitch * i, q[0][0], q[0][1]);
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++, to += pitch) {
        encode_row<CODES>(q[i], j.p.sides[MT_COL], x[i], enc);
        if (alike && i < rows) store_8(to, q[i][0], q[i][1]);
    }
    leave_turned(codes, half, AT::column(), q);
}

/* Scales of the rows of `count` tiles beside each other, the last of which is p. */
static __device__ __forceinline__ void put_collected(const uint8_t scales[TILE][COLLECTED * 4],
                                                     const spot &p, int count)
{
    const lattice l = scales_of(p.parts[MT_ROW]);
    const int r = (int)threadIdx.x, last = (p.width + 31) / 32;
    if (r >= p.height) return;
    const uint32_t *w = (const uint32_t *)scales[r];
    const int64_t step = p.parts[MT_ROW].scales_across;
    uint8_t *to = l.at + scale_offset(l, r, 0) - (count - 1) * step;
    if (!l.swizzled && count == COLLECTED && last == 4 && (uintptr_t)to % 16 == 0) {
        store_16(to, w[0], w[1], w[2], w[3]);
        return;
    }
    for (int n = 0; n < count; n++, to += step) {
        const int blocks = n + 1 < count ? 4 : last;
        if (blocks == 4 && (uintptr_t)to % 4 == 0)
            store_4(to, w[n]);
        else
            for (int b = 0; b < blocks; b++) store_1(to + b, w[n] >> b * 8);
    }
}

/* ---- the kernel -------------------------------------------------------------------------------
 */

/* At turn n a block's threads have the elements of its tile in hand, those of turn n + 1 are on
 * their way. Where lines begin anywhere, `run` tiles down a column follow each other. */
template <int KIND, int CODES, int FROM>
static __global__ void __launch_bounds__(TILE_THREADS, (layout<KIND, FROM>::RESIDENT))
    bytes_kernel(const __grid_constant__ job j)
{
    typedef layout<KIND, FROM> at;
    extern __shared__ uint4 mt_shared[];
    bytes_space<KIND, FROM> *sp = (bytes_space<KIND, FROM> *)mt_shared;
    uint32_t most = 0; /* what a thread has found of a member */
    float weight = 0, next_weight = 0;
    int nans = 0, token = 0, given = 0, collected = 0, flushed = 0;
    bool after = false; /* the tile before has left ends of its lines to this one */
    if (threadIdx.x < 2) sp->found[threadIdx.x] = block_found{};
    const auto fill = [&](spot *to, const member &m, int lane, int64_t index) {
        fill_spot(to, j, m, lane, index);
    };
    wait_for_results();
    for (int n = -2;; n++) {
        const spot &p = sp->spots[n & (SPOTS - 1)], &next = sp->spots[(n + 1) & (SPOTS - 1)];
        const spot &third = sp->spots[(n + 2) & (SPOTS - 1)];
        uint32_t x[ROWS][4];
        float row[ROWS] = {}, column[RUN] = {};
        reach e = {};
        if (n >= 0 && !p.exists) break;
        look_ahead(sp->spots, j.p, n, j.many, j.run, j.strips, fill);
        copies_done();
        /* the spots are there; the codes of two tiles ago and of the last one have been read
         * (LINES: since all have met to have the magnitudes) */
        if (is_met(n) || (KIND == WHOLE && j.run > 1)) __syncthreads();
        /* before turn 0 nobody looks at it */
        if (FROM != GRADIENT) take_patch<at, FROM>(x, sp->slots, weight, p.width);
        if (FROM == GRADIENT && n >= 0) make_patch<at>(x, j, p);
        weight = next_weight;
        if (FROM != GRADIENT && n >= -1 && next.exists)
            send_patch<at, FROM>(sp->slots, next, token);
        if ((FROM == GATHERED || FROM == WEIGHTED) && third.exists)
            token = row_value<at>(j.row_token, third);
        if (FROM == WEIGHTED && third.exists) next_weight = row_value<at>(j.row_weight, third);
        if (n < 0) continue;
        if (KIND != WHOLE || is_measured(j)) find_reach<KIND != WHOLE>(&e, x);
        nans += e.nans, raise(&most, e.all);
        if (KIND == WHOLE) run_whole<at, CODES>(j, sp->codes, p, n & 1, x);
        if (KIND == PLANAR) {
            planar_rows<at>(row, j, sp->scales[flushed & 1], collected, e);
            planar_columns<at>(column, j, p, e);
            put_rows<at, CODES, true>(j, p, x, row, column);
        }
        if (KIND == LINES) {
            leave_pairs(sp->partial[n & 1], e);
            line_rows<at>(row, j, p, e);
            put_rows<at, CODES, false>(j, p, x, row, column);
            __syncthreads(); /* the magnitudes are there */
            line_columns(column, j, p, sp->partial[n & 1], n & (WARPS - 1));
            leave_columns<at, CODES>(sp->codes, n & 1, j.p.sides[MT_COL], x, column);
        }
        if (at::TURNED) {
            const bool even = is_even(p, MT_COL), on = !even && j.run > 1 && is_below(next, p);
            const uneven u = { sp->codes, n & 1, after, on };
            const part &to = p.parts[MT_COL];
            const int bytes = to.padded ? (int)TILE : p.height;
            after = on;
            __syncthreads(); /* all codes are there */
            if (even)
                put_even_lines<WHOLE>(u.codes, u.half, to.codes, to.pitch, p.width, bytes);
            else
                put_uneven_lines<WHOLE>(u, to.codes, to.pitch, p.width, bytes);
        } else if (++collected == COLLECTED || !is_beside(next, p)) {
            __syncthreads(); /* the scales are there */
            put_collected(sp->scales[flushed & 1], p, collected);
            collected = 0, flushed++;
        }
        if (next.exists && next.index == p.index) continue;
        found it = { { most, most }, nans };
        give_found(&sp->found[given & 1], j, &it);
        __syncthreads(); /* all have given */
        if (threadIdx.x == 0) pass_on(&sp->found[given & 1], j, p.index);
        given++, most = 0, nans = 0;
    }
    end_block(j);
}

/* ---- the host's part --------------------------------------------------------------------------
 */

template <int KIND, int CODES, int FROM> static mt_status launch(mt_stream *stream, const job *j)
{
    enum { BYTES = sizeof(bytes_space<KIND, FROM>) };
    const int64_t units = mt_cuda_plan_units(&j->p.group);
    const int64_t most = (int64_t)mt_cuda_multiprocessors(stream) * layout<KIND, FROM>::RESIDENT;
    MT_CUDA(cudaFuncSetAttribute(bytes_kernel<KIND, CODES, FROM>,
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES));
    MT_TRY(follow(stream, bytes_kernel<KIND, CODES, FROM>, (unsigned)(units < most ? units : most),
                  TILE_THREADS, BYTES, *j));
    MT_LAUNCHED(stream, "quantize: bytes");
    return MT_OK;
}

typedef mt_status (*launcher)(mt_stream *, const job *);

/* Members with one scale, as they lie, are faster by patches. */
bool mt_cuda_bytes_suffice(const job *j)
{
    const side *row = &j->p.sides[MT_ROW], *col = &j->p.sides[MT_COL];
    const mt_group *g = &j->p.group;
    const int kind = mt_cuda_short_kind(j);
    const bool lies = !j->row_token && !j->swiglu && !j->z;
    if (!j->codes || !row->present || !col->present || j->sums || g->last_dims || g->k % RUN)
        return false;
    if (kind > PLANAR || (kind == WHOLE && lies)) return false;
    if (g->m > INT32_MAX || g->k > INT32_MAX || mt_cuda_plan_units(g) > INT32_MAX) return false;
    if ((uintptr_t)j->p.sides[SOURCE].codes % 16 || (uintptr_t)row->codes % 8) return false;
    if (j->z && (g->k % (2 * RUN) || (uintptr_t)j->z % 16)) return false;
    if (!col->transposed && (uintptr_t)col->codes % 8) return false;
    return row->options.element == col->options.element;
}

mt_status mt_cuda_quantize_bytes(mt_stream *stream, const job *j)
{
    /* by kind; to E4M3, E5M2 */
    static const launcher lying[][2] = {
        { NULL, NULL },
        { launch<LINES, CODES_E4M3, LYING>, launch<LINES, CODES_E5M2, LYING> },
        { launch<PLANAR, CODES_E4M3, LYING>, launch<PLANAR, CODES_E5M2, LYING> }
    };
    static const launcher gathered[][2] = {
        { launch<WHOLE, CODES_E4M3, GATHERED>, launch<WHOLE, CODES_E5M2, GATHERED> },
        { launch<LINES, CODES_E4M3, GATHERED>, launch<LINES, CODES_E5M2, GATHERED> },
        { launch<PLANAR, CODES_E4M3, GATHERED>, launch<PLANAR, CODES_E5M2, GATHERED> }
    };
    static const launcher with_weights[][2] = {
        { launch<WHOLE, CODES_E4M3, WEIGHTED>, launch<WHOLE, CODES_E5M2, WEIGHTED> },
        { launch<LINES, CODES_E4M3, WEIGHTED>, launch<LINES, CODES_E5M2, WEIGHTED> },
        { launch<PLANAR, CODES_E4M3, WEIGHTED>, launch<PLANAR, CODES_E5M2, WEIGHTED> }
    };
    static const launcher of_swiglu[][2] = {
        { launch<WHOLE, CODES_E4M3, SWIGLU>, launch<WHOLE, CODES_E5M2, SWIGLU> },
        { launch<LINES, CODES_E4M3, SWIGLU>, launch<LINES, CODES_E5M2, SWIGLU> },
        { launch<PLANAR, CODES_E4M3, SWIGLU>, launch<PLANAR, CODES_E5M2, SWIGLU> }
    };
    static const launcher of_gradient[][2] = {
        { launch<WHOLE, CODES_E4M3, GRADIENT>, launch<WHOLE, CODES_E5M2, GRADIENT> },
        { launch<LINES, CODES_E4M3, GRADIENT>, launch<LINES, CODES_E5M2, GRADIENT> },
        { launch<PLANAR, CODES_E4M3, GRADIENT>, launch<PLANAR, CODES_E5M2, GRADIENT> }
    };
    static_assert(WHOLE == 0 && LINES == 1 && PLANAR == 2, "order of the tables");
    const side *row = &j->p.sides[MT_ROW], *col = &j->p.sides[MT_COL];
    const int kind = mt_cuda_short_kind(j);
    const bool e5m2 = mt_codes_kind(*row) == CODES_E5M2;
    job ordered = *j;
    ordered.run = col->transposed && !has_even_lines(j) ? (int)RUN_TILES : 1;
    ordered.many = kind == PLANAR ? (int)COLLECTED : ordered.run;
    /* of gathered rows, a strip of all tokens stays in the cache for as long as it is read */
    ordered.strips = j->row_token && kind != PLANAR ? (int)mt_ceil_div(j->p.group.k, TILE) : 1;
    if (j->swiglu) return of_swiglu[kind][e5m2](stream, &ordered);
    if (j->z) return of_gradient[kind][e5m2](stream, &ordered);
    if (j->row_weight) return with_weights[kind][e5m2](stream, &ordered);
    return (j->row_token ? gathered : lying)[kind][e5m2](stream, &ordered);
}
