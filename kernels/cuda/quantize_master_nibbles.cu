/* Quantize to E2M1 from f32 whose extents are multiples of a tile's (of 16 where it is kept
 * decoded), as those of weights' masters are: nvfp4 under square blocks, mxfp4 under blocks of
 * lines. A thread block has one tile and no more, a warp 32 x 64 elements of it, a thread sixteen
 * rows of four columns, from memory to registers to memory; only nvfp4's codes of columns meet in
 * shared memory. The arithmetic is that of the tiles. */
#include "kernels/cuda/quantize_choose.cuh"
#include "kernels/cuda/quantize_decoded.cuh"

enum { ROWS = 16, RUN = 4, LANES = 16, WARP_COLUMNS = LANES * RUN };
enum { ROW_CODES = 1, COLUMN_CODES = 2 };

/* Where a block's tile is among the rows of all members, and what a warp has of it. */
struct place {
    int64_t row, first; /* the thread's; the member's, in columns */
    uint32_t pitch;     /* the group's k */
    int member, column; /* the thread's first */
    bool within;        /* the member has the thread's elements; otherwise they are 0 */
};

static __device__ __forceinline__ int lane_across(void)
{
    return lane_of_warp() % LANES;
}
/* The thread's sixteen rows, of those of a tile. */
static __device__ __forceinline__ int part_of_rows(void)
{
    return (int)threadIdx.x / 64 * 2 + lane_of_warp() / LANES;
}

static __device__ __forceinline__ place place_of(const mt_group &g)
{
    const uint32_t across = (uint32_t)((g.k + TILE - 1) / TILE);
    const uint32_t down = (uint32_t)((g.m + TILE - 1) / TILE);
    const uint32_t n = blockIdx.x / across, column = blockIdx.x - n * across;
    place p;
    p.member = (int)(n / down);
    const uint32_t row = (n - p.member * down) * TILE + part_of_rows() * ROWS;
    p.first = p.member * g.k;
    p.pitch = (uint32_t)g.k;
    p.row = p.member * g.m + row;
    p.column =
        (int)(column * TILE) + (int)threadIdx.x / 32 % 2 * WARP_COLUMNS + lane_across() * RUN;
    p.within = row < g.m && p.column < g.k;
    return p;
}

/* ---- magnitudes -------------------------------------------------------------------------------
 */

/* Those of columns; returns the number of NaNs, which do not count, and lose their signs. */
static __device__ __forceinline__ int find_columns(float most[RUN], float x[ROWS][RUN])
{
    int nans = 0;
#pragma unroll
    for (int c = 0; c < RUN; c++) most[c] = fabsf(x[0][c]);
#pragma unroll
    for (int i = 1; i < ROWS; i++)
#pragma unroll
        for (int c = 0; c < RUN; c++) most[c] = mt_larger_or_nan(most[c], x[i][c]);
    const float all =
        mt_larger_or_nan(mt_larger_or_nan(most[0], most[1]), mt_larger_or_nan(most[2], most[3]));
    if (all == all) return 0;
#pragma unroll
    for (int c = 0; c < RUN; c++) {
        most[c] = 0;
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const bool gone = x[i][c] != x[i][c];
            if (gone) x[i][c] = mt_from_bits(0x7fc00000);
            most[c] = fmaxf(most[c], fabsf(x[i][c])), nans += gone;
        }
    }
    return nans;
}

static __device__ __forceinline__ float larger_of_four(const float x[RUN])
{
    return fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3])));
}
static __device__ __forceinline__ float larger_of_lanes(float x, int lane)
{
    return fmaxf(x, __shfl_xor_sync(~0u, x, lane));
}

/* Raises what is wanted of the member. */
static __device__ __forceinline__ void raise_member(const job &j, int member, const float most[RUN],
                                                    int nans)
{
    if (!is_measured(j)) return;
    const uint32_t bits = __reduce_max_sync(~0u, mt_f32_bits(larger_of_four(most)));
    nans = __reduce_add_sync(~0u, nans);
    const int lane = lane_of_warp();
    if (lane < MT_DIR_COUNT && j.measure[lane] &&
        bits > __ldcg((const uint32_t *)j.amax[lane] + member))
        raise_amax(j, lane, member, bits);
    if (lane == 0 && j.nans && nans) add_nans(j, member, nans);
}

/* ---- codes ------------------------------------------------------------------------------------
 * Of two rows: eight codes to a word. */

/* Their elements' signs, as bf16. */
static __device__ __forceinline__ void upper_halves(uint32_t w[4], const float x[2][RUN])
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        w[i] = __byte_perm(mt_f32_bits(x[i / 2][i % 2 * 2]), mt_f32_bits(x[i / 2][i % 2 * 2 + 1]),
                           0x7632);
}

/* Less their signs. */
static __device__ __forceinline__ uint32_t codes_of_two(const float x[2][RUN],
                                                        const float enc[2][RUN])
{
    uint32_t q = 0u - E2M1_BASE * 0x11111111u;
#pragma unroll
    for (int i = 0; i < 2 * RUN; i++)
        q += e2m1_above(fabsf(x[i / RUN][i % RUN]) * enc[i / RUN][i % RUN]) << 4 * i;
    return q;
}

/* As codes, or as what they decode to under scales of pairs of elements. */
template <bool DECODED>
static __device__ __forceinline__ void put_two(uint8_t *to, uint32_t pitch, uint32_t codes,
                                               const uint32_t w[4], const uint32_t scales[4])
{
    if (DECODED) {
        uint32_t y[4];
        signed_nibbles(y, codes, w, false);
#pragma unroll
        for (int i = 0; i < 4; i++) y[i] = times_scale(y[i], scales[i]);
        store_8(to, y[0], y[1]), store_8(to + pitch, y[2], y[3]);
    } else {
        store_2(to, codes), store_2(to + pitch, codes >> 16);
    }
}

/* Where the thread's first row goes, and the bytes from a row to the next. */
template <bool DECODED>
static __device__ __forceinline__ uint8_t *rows_at(const side &s, const place &p, uint32_t *pitch)
{
    *pitch = DECODED ? p.pitch * 2 : p.pitch / 2;
    return s.codes + p.row * *pitch + (DECODED ? p.column * 2 : p.column / 2);
}

/* Columns of eight codes from two rows of four at a time. */
static __device__ __forceinline__ void turn_nibbles(uint32_t y[RUN], const uint32_t x[4])
{
    uint32_t even[4], odd[4];
#pragma unroll
    for (int i = 0; i < 4; i++) { /* the lower two bytes: of two columns each */
        const uint32_t e = x[i] & 0x0f0f0f0fu, o = x[i] & 0xf0f0f0f0u;
        even[i] = e | e >> 12, odd[i] = o >> 4 | o >> 16;
    }
    const uint32_t a = __byte_perm(even[0], even[1], 0x5140);
    const uint32_t b = __byte_perm(even[2], even[3], 0x5140);
    const uint32_t c = __byte_perm(odd[0], odd[1], 0x5140);
    const uint32_t d = __byte_perm(odd[2], odd[3], 0x5140);
    y[0] = __byte_perm(a, b, 0x5410), y[2] = __byte_perm(a, b, 0x7632);
    y[1] = __byte_perm(c, d, 0x5410), y[3] = __byte_perm(c, d, 0x7632);
}

/* ---- square blocks ----------------------------------------------------------------------------
 * Four threads have one. */

/* Codes of columns on their way out: of sixteen rows two words, which change places so that lines
 * of neighbouring threads do not meet in a bank. */
struct turned {
    alignas(16) uint2 codes[TILE][SEGMENTS];
    alignas(8) uint8_t scales[SEGMENTS][SEGMENTS]; /* of squares that lie below each other */
};

static __device__ __forceinline__ int pair_mask(int column)
{
    return column / RUN & (SEGMENTS - 1);
}

/* Codes of the whole tile's columns, and their scales, to where they go. */
static __device__ __forceinline__ void put_turned_lines(const turned &from, const side &s,
                                                        const place &p, const mt_group &g)
{
    enum { CHUNKS_OF_LINE = TILE / 32, STEP = TILE_THREADS / CHUNKS_OF_LINE };
    const int64_t pitch = g.m / 2, line0 = p.first + p.column / TILE * TILE;
    const int64_t row0 = p.row / TILE * TILE - p.member * g.m;
    const int at = (int)threadIdx.x % CHUNKS_OF_LINE, first = (int)threadIdx.x / CHUNKS_OF_LINE;
    uint8_t *to = s.codes + (line0 + first) * pitch + row0 / 2 + at * 16;
#pragma unroll
    for (int c = first; c < first + TILE; c += STEP, to += STEP * pitch) {
        const int mask = pair_mask(c);
        const uint4 q = *(const uint4 *)&from.codes[c][(at ^ mask / 2) * 2];
        if (mask & 1)
            store_16(to, q.z, q.w, q.x, q.y);
        else
            store_16(to, q.x, q.y, q.z, q.w);
    }
    if (threadIdx.x >= TILE) return;
    const uint2 scales = *(const uint2 *)from.scales[threadIdx.x / SEGMENT];
    store_8(s.scales + (line0 + threadIdx.x) * (g.m / SEGMENT) + row0 / SEGMENT, scales.x,
            scales.y);
}

template <int DIRS, bool DECODED>
static __device__ __forceinline__ void run_squares(const job &j, const place &p, float x[ROWS][RUN])
{
    enum { TURNED = (DIRS & COLUMN_CODES) != 0, IN_ROWS = (DIRS & ROW_CODES) != 0 };
    const int dir = j.p.sides[MT_ROW].present ? MT_ROW : MT_COL, lane = lane_across();
    const side &s = j.p.sides[dir];
    const level l = member_level(s, j.amax[dir][p.member], NULL);
    float most[RUN], v[2], enc[2][RUN];
    const int nans = find_columns(most, x);
    raise_member(j, p.member, most, nans);
    const float amax = larger_of_lanes(larger_of_lanes(larger_of_four(most), 1), 2);
    const uint32_t stored = stored_pair(j, amax * l.g, 0) & 0xff, twice = scale_twice(stored);
    const uint32_t scales[4] = { twice, twice, twice, twice };
    byte_pair_values<CODES_E4M3>(v, j.e4m3, stored);
    const float by = mt_nvfp4_encode(v[0] * l.s_dec);
#pragma unroll
    for (int i = 0; i < 2 * RUN; i++) enc[i / RUN][i % RUN] = by;
    if (IN_ROWS && !DECODED) {
        uint32_t four = stored << lane / RUN * 8;
        four |= __shfl_xor_sync(~0u, four, 4), four |= __shfl_xor_sync(~0u, four, 8);
        store_4(s.scales + (p.row + lane) * (p.pitch / SEGMENT) + (p.column - lane * RUN) / SEGMENT,
                four);
    }
    uint32_t pitch, q[ROWS / 2];
    uint8_t *to = rows_at<DECODED>(s, p, &pitch);
    const side &col = j.p.sides[MT_COL];
    const int64_t other = DECODED && col.present ? col.codes - s.codes : 0; /* 0: there is none */
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++, to += 2 * pitch) {
        uint32_t w[4];
        upper_halves(w, x + i * 2);
        q[i] = codes_of_two(x + i * 2, enc);
        if (!DECODED) q[i] |= nibble_signs(w, false);
        if (IN_ROWS && p.within) put_two<DECODED>(to, pitch, q[i], w, scales);
        if (other && p.within) put_two<DECODED>(to + other, pitch, q[i], w, scales);
    }
    if constexpr (TURNED) {
        __shared__ turned space;
        const int column = p.column % TILE, part = part_of_rows();
        uint32_t low[RUN], high[RUN];
        turn_nibbles(low, q), turn_nibbles(high, q + 4);
#pragma unroll
        for (int c = 0; c < RUN; c++)
            space.codes[column + c][part ^ pair_mask(column)] = make_uint2(low[c], high[c]);
        if (lane % RUN == 0) space.scales[column / SEGMENT][part] = (uint8_t)stored;
        __syncthreads();
        put_turned_lines(space, j.p.sides[MT_COL], p, j.p.group);
    }
}

/* ---- blocks of lines --------------------------------------------------------------------------
 * Eight threads beside each other have one of a row, two below each other those of their columns.
 */

enum { SHIFT = 5 /* of a block */ };

static __device__ __forceinline__ int exponent_of(const side &s, float amax)
{
    return mt_e8m0_exponent(amax, s.inverse, s.emax, s.options.scale_floor);
}
static __device__ __forceinline__ uint32_t scale_bits(int exponent)
{
    return mt_f32_bits(mt_e8m0_scale(exponent));
}

/* Those of four rows, of eight threads' elements; returns that of row `lane / 2 % 4`, which two of
 * them find. */
static __device__ __forceinline__ int exponents_of_rows(int of[4], const side &s,
                                                        const float x[4][RUN])
{
    const int lane = lane_of_warp();
    const bool lower = lane & 4, odd = lane & 2;
    float most[4], pair[2];
#pragma unroll
    for (int r = 0; r < 4; r++) most[r] = larger_of_four(x[r]);
#pragma unroll
    for (int r = 0; r < 2; r++)
        pair[r] = fmaxf(lower ? most[2 + r] : most[r],
                        __shfl_xor_sync(~0u, lower ? most[r] : most[2 + r], 4));
    const float one =
        fmaxf(odd ? pair[1] : pair[0], __shfl_xor_sync(~0u, odd ? pair[0] : pair[1], 2));
    const int own = exponent_of(s, fmaxf(larger_of_lanes(one, 1), 0)); /* of NaNs alone 0 */
#pragma unroll
    for (int r = 0; r < 4; r++) of[r] = __shfl_sync(~0u, own, r * 2, 8);
    return own;
}

/* Codes under scales of rows. */
template <bool DECODED>
static __device__ __forceinline__ void run_rows(const side &s, const place &p,
                                                const float x[ROWS][RUN])
{
    const int lane = lane_of_warp();
    const uint32_t blocks = p.pitch >> SHIFT;
    uint32_t pitch;
    uint8_t *to = rows_at<DECODED>(s, p, &pitch);
    uint8_t *at = s.scales + (p.row + lane / 2 % 4) * blocks + (p.column >> SHIFT);
#pragma unroll
    for (int i = 0; i < ROWS; i += 4, at += 4 * blocks) {
        int exponent[4];
        const int own = exponents_of_rows(exponent, s, x + i);
        if (!DECODED && lane % 2 == 0) store_1(at, (uint32_t)own);
#pragma unroll
        for (int k = 0; k < 4; k += 2, to += 2 * pitch) {
            float enc[2][RUN];
            uint32_t scales[4], w[4];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const uint32_t bits = scale_bits(exponent[k + r]);
                scales[r * 2] = scales[r * 2 + 1] = __byte_perm(bits, bits, 0x3232);
#pragma unroll
                for (int c = 0; c < RUN; c++) enc[r][c] = mt_e8m0_scale(254 - exponent[k + r]);
            }
            upper_halves(w, x + i + k);
            uint32_t q = codes_of_two(x + i + k, enc);
            if (!DECODED) q |= nibble_signs(w, false);
            if (p.within) put_two<DECODED>(to, pitch, q, w, scales);
        }
    }
}

/* Under scales of columns. */
template <bool DECODED>
static __device__ __forceinline__ void run_columns(const side &s, const place &p,
                                                   const float x[ROWS][RUN], const float most[RUN])
{
    uint32_t pitch, bits[RUN], stored = 0;
    uint8_t *to = rows_at<DECODED>(s, p, &pitch);
    float enc[2][RUN];
#pragma unroll
    for (int c = 0; c < RUN; c++) {
        const int exponent = exponent_of(s, larger_of_lanes(most[c], LANES));
        enc[0][c] = enc[1][c] = mt_e8m0_scale(254 - exponent);
        bits[c] = scale_bits(exponent), stored |= (uint32_t)exponent << c * 8;
    }
    const uint32_t left = __byte_perm(bits[0], bits[1], 0x7632);
    const uint32_t right = __byte_perm(bits[2], bits[3], 0x7632);
    const uint32_t scales[4] = { left, right, left, right };
    if (!DECODED && lane_of_warp() < LANES)
        store_4(s.scales + (p.row >> SHIFT) * p.pitch + p.column, stored);
#pragma unroll
    for (int i = 0; i < ROWS; i += 2, to += 2 * pitch) {
        uint32_t w[4];
        upper_halves(w, x + i);
        uint32_t q = codes_of_two(x + i, enc);
        if (!DECODED) q |= nibble_signs(w, false);
        if (p.within) put_two<DECODED>(to, pitch, q, w, scales);
    }
}

/* ---- the kernel -------------------------------------------------------------------------------
 */

template <bool SQUARE, int DIRS, bool DECODED>
static __global__ void __launch_bounds__(TILE_THREADS, 2)
    master_kernel(const __grid_constant__ job j)
{
    float x[ROWS][RUN];
    let_follow();
    const place p = place_of(j.p.group);
    const float *from = (const float *)j.p.sides[SOURCE].codes + p.row * p.pitch + p.column;
#pragma unroll
    for (int i = 0; i < ROWS; i++, from += p.pitch) {
        const float4 q = p.within ? __ldg((const float4 *)from) : make_float4(0, 0, 0, 0);
        x[i][0] = q.x, x[i][1] = q.y, x[i][2] = q.z, x[i][3] = q.w;
    }
    wait_for_results(); /* none of them is the source */
    if constexpr (SQUARE) {
        run_squares<DIRS, DECODED>(j, p, x);
    } else {
        float most[RUN];
        const int nans = find_columns(most, x);
        raise_member(j, p.member, most, nans);
        if (DIRS & ROW_CODES) run_rows<DECODED>(j.p.sides[MT_ROW], p, x);
        if (DIRS & COLUMN_CODES) run_columns<DECODED>(j.p.sides[MT_COL], p, x, most);
    }
}

/* ---- the host's part --------------------------------------------------------------------------
 */

static bool knows(const job *j, int dir)
{
    const side *s = &j->p.sides[dir];
    const bool e4m3 = s->scale == MT_SCALE_E4M3 && s->square;
    const bool e8m0 = s->scale == MT_SCALE_E8M0 && !s->square;
    const mt_format_options *o = &s->options;
    return !s->plain && o->element == MT_ELEMENT_E2M1 && (e4m3 || e8m0) && j->write[dir] &&
           !o->sr && !o->rht && !o->four_over_six && !s->swizzled && !s->padded &&
           (((uintptr_t)s->codes | (uintptr_t)s->scales) & 15) == 0;
}

bool mt_cuda_master_nibbles_suffice(const job *j, const struct mt_quantize_args *args)
{
    const side *source = &j->p.sides[SOURCE];
    const side *row = &j->p.sides[MT_ROW], *col = &j->p.sides[MT_COL];
    const mt_group *g = &j->p.group;
    const bool both = row->present && col->present, decoded = (row->present ? row : col)->decoded;
    const int whole = decoded ? SEGMENT : TILE;
    if (!source->plain || source->dtype != MT_F32 || (uintptr_t)source->codes % 16) return false;
    if (j->dequantized || j->sums || j->row_token || j->swiglu || j->z) return false;
    if (mt_group_mode_of(g) != MT_GROUP_UNIFORM || g->m % whole || g->k % whole) return false;
    if (mt_cuda_plan_units(g) > INT32_MAX || g->m > INT32_MAX || g->k > INT32_MAX / 8) return false;
    if ((row->present && !knows(j, MT_ROW)) || (col->present && !knows(j, MT_COL))) return false;
    /* square blocks are those of both directions where they have one amax */
    return !both || (row->scale == col->scale && row->decoded == col->decoded &&
                     (!row->second_level || args->pass == MT_QUANTIZE_ALL));
}

template <bool SQUARE, int DIRS, bool DECODED>
static mt_status launch(mt_stream *stream, const job *j)
{
    MT_TRY(follow(stream, master_kernel<SQUARE, DIRS, DECODED>,
                  (unsigned)mt_cuda_plan_units(&j->p.group), TILE_THREADS, 0, *j));
    MT_LAUNCHED(stream, "quantize: nibbles of masters");
    return MT_OK;
}

mt_status mt_cuda_quantize_master_nibbles(mt_stream *stream, const job *j)
{
    enum { BOTH = ROW_CODES | COLUMN_CODES };
    const side *row = &j->p.sides[MT_ROW], *col = &j->p.sides[MT_COL];
    const side *one = row->present ? row : col;
    const int dirs = (row->present ? ROW_CODES : 0) | (col->present ? COLUMN_CODES : 0);
    static mt_status (*const codes[2][BOTH])(mt_stream *, const job *) = {
        { launch<false, ROW_CODES, false>, launch<false, COLUMN_CODES, false>,
          launch<false, BOTH, false> },
        { launch<true, ROW_CODES, false>, launch<true, COLUMN_CODES, false>,
          launch<true, BOTH, false> }
    };
    static mt_status (*const values[2][BOTH])(mt_stream *, const job *) = {
        { launch<false, ROW_CODES, true>, launch<false, COLUMN_CODES, true>,
          launch<false, BOTH, true> },
        { launch<true, ROW_CODES, true>, launch<true, ROW_CODES, true>,
          launch<true, ROW_CODES, true> }
    };
    return (one->decoded ? values : codes)[one->square][dirs - 1](stream, j);
}
