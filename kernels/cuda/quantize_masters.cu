/* Quantize of weights from f32 masters to E4M3: members alike, of whole segments. One scale a
 * member, or one a tile, so that both directions have the same codes but for their places; or
 * directions that are kept decoded, of 1-D blocks of 32 too. A thread block has a tile, a warp
 * sixteen of its rows, a thread four columns of these in registers: only what warps find of
 * columns, and codes turned, meet in shared memory. Nothing is looked up, so that elements are on
 * their way at once. The arithmetic is that of the tiles. */
#include "kernels/cuda/quantize_turns.cuh"

enum { ROW_CODES = 1, COLUMN_CODES = 2, BOTH_CODES = 3 };
/* One scale a member, a tile, a block of 32 of a line. */
enum { WHOLES, SQUARES, DECODED_WHOLES, DECODED_SQUARES, DECODED_LINES, MASTER_KINDS };
enum { RESIDENT = 2, ROWS = SEGMENT /* of a thread */, LINE = TILE / SEGMENT };

struct masters_space {
    union {
        uint4 codes[TILE * LINE];        /* of columns, turned */
        float4 columns[WARPS][TILE / 4]; /* magnitudes of a warp's rows */
    };
    uint32_t most[WARPS]; /* bits of what warps have found */
};

/* A block's tile: rows of all members follow each other. */
struct place {
    int64_t first; /* a thread's first element */
    uint32_t pitch, index, down, right;
    bool within; /* the member has the thread's elements; otherwise they are 0 */
};

static __device__ __forceinline__ uint32_t tiles_of(int64_t extent)
{
    return (uint32_t)(extent + TILE - 1) / TILE;
}

static __device__ __forceinline__ place place_of(const mt_group &g)
{
    const uint32_t across = tiles_of(g.k), below = tiles_of(g.m), n = blockIdx.x / across;
    place p;
    p.pitch = (uint32_t)g.k;
    p.right = blockIdx.x - n * across;
    p.index = n / below, p.down = n - p.index * below;
    const uint32_t row = p.down * TILE + threadIdx.x / 32 * ROWS;
    const uint32_t column = p.right * TILE + (uint32_t)lane_of_warp() * 4;
    p.first = ((int64_t)p.index * g.m + row) * g.k + column;
    p.within = row < g.m && column < g.k;
    return p;
}

/* A thread's elements. */
static __device__ __forceinline__ void load_rows(float4 x[ROWS], const job &j, const place &p)
{
    const float *from = (const float *)j.p.sides[SOURCE].codes + p.first;
#pragma unroll
    for (int i = 0; i < ROWS; i++, from += p.pitch)
        x[i] = p.within ? __ldg((const float4 *)from) : make_float4(0, 0, 0, 0);
}

/* ---- magnitudes -------------------------------------------------------------------------------
 */

static __device__ __forceinline__ float largest(const float4 &x)
{
    return fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w)));
}

/* That of all; counts NaNs, which are none. */
static __device__ __forceinline__ float find(int *nans, const float4 x[ROWS])
{
    float most = 0;
#pragma unroll
    for (int i = 0; i < ROWS; i++)
        most = mt_larger_or_nan(mt_larger_or_nan(most, x[i].x),
                                mt_larger_or_nan(mt_larger_or_nan(x[i].y, x[i].z), x[i].w));
    if (most == most) return most;
    most = 0;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        most = fmaxf(most, largest(x[i]));
        *nans += (x[i].x != x[i].x) + (x[i].y != x[i].y) + (x[i].z != x[i].z) + (x[i].w != x[i].w);
    }
    return most;
}

/* Those of a thread's columns. */
static __device__ __forceinline__ float4 find_columns(const float4 x[ROWS])
{
    float4 most = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        most.x = fmaxf(most.x, fabsf(x[i].x)), most.y = fmaxf(most.y, fabsf(x[i].y));
        most.z = fmaxf(most.z, fabsf(x[i].z)), most.w = fmaxf(most.w, fabsf(x[i].w));
    }
    return most;
}

/* ---- codes ------------------------------------------------------------------------------------
 */

/* Codes of two products in the low half of a word. */
static __device__ __forceinline__ uint32_t code_pair(const side &s, float low, float high)
{
#if MT_CONVERTS_FP8
    return native_pair(MT_ELEMENT_E4M3, low, high);
#else
    return (uint32_t)mt_encode(s.codec, low) | (uint32_t)mt_encode(s.codec, high) << 8;
#endif
}

static __device__ __forceinline__ void encode_rows(uint32_t q[ROWS], const side &s,
                                                   const float4 x[ROWS], float enc)
{
#pragma unroll
    for (int i = 0; i < ROWS; i++)
        q[i] = code_pair(s, x[i].x * enc, x[i].y * enc) | code_pair(s, x[i].z * enc, x[i].w * enc)
                                                              << 16;
}

/* Where sixteen codes of a column lie, chunk `at` of its line: neither patches nor lines meet in a
 * bank. */
static __device__ __forceinline__ int turned_place(int c, int at)
{
    return c * LINE + (at ^ (c >> 2 & (LINE - 1)));
}

/* Columns of a tile's codes, height x width of them; all threads have left theirs when lines go
 * out. */
static __device__ __forceinline__ void put_columns(uint4 *turned, const uint32_t q[ROWS],
                                                   uint8_t *codes, uint32_t pitch, uint32_t height,
                                                   uint32_t width)
{
    enum { STEP = TILE_THREADS / LINE };
    const int c0 = lane_of_warp() * 4, warp = (int)threadIdx.x / 32;
    const int at = (int)threadIdx.x % LINE, first = (int)threadIdx.x / LINE;
    uint32_t y[4][4];
#pragma unroll
    for (int g = 0; g < 4; g++) turn_bytes(y[g], q + g * 4);
#pragma unroll
    for (int c = 0; c < 4; c++)
        turned[turned_place(c0 + c, warp)] = make_uint4(y[0][c], y[1][c], y[2][c], y[3][c]);
    __syncthreads();
    codes += (uint64_t)(uint32_t)first * pitch + at * SEGMENT;
#pragma unroll
    for (int i = 0; i < TILE; i += STEP, codes += (uint64_t)pitch * STEP) {
        const uint4 w = turned[turned_place(first + i, at)];
        if (at * SEGMENT < height && first + i < width) store_16(codes, w.x, w.y, w.z, w.w);
    }
}

/* Codes of a thread's elements in the directions there are; they are used up. */
template <int DIRS>
static __device__ __forceinline__ void put_codes(const job &j, uint4 *turned, const place &p,
                                                 float4 x[ROWS], float row, float column)
{
    const side &to_row = j.p.sides[MT_ROW], &to_col = j.p.sides[MT_COL];
    const uint32_t lines = (uint32_t)j.p.group.m;
    uint32_t q[ROWS];
    encode_rows(q, DIRS & ROW_CODES ? to_row : to_col, x, DIRS & ROW_CODES ? row : column);
    if (DIRS & ROW_CODES) {
        uint8_t *to = to_row.codes + p.first;
#pragma unroll
        for (int i = 0; i < ROWS; i++, to += p.pitch)
            if (p.within) store_4(to, q[i]);
    }
    if (!(DIRS & COLUMN_CODES)) return;
    if ((DIRS & ROW_CODES) && mt_f32_bits(row) != mt_f32_bits(column)) { /* seldom */
        load_rows(x, j, p);
        encode_rows(q, to_col, x, column);
    }
    const uint32_t down = p.down * TILE, right = p.right * TILE;
    put_columns(turned, q, to_col.codes + ((int64_t)p.index * p.pitch + right) * lines + down,
                lines, lines - down, p.pitch - right);
}

/* That of a tile. */
template <int DIRS>
static __device__ __forceinline__ void put_square_scales(const job &j, const place &p, float dec)
{
    const uint32_t down = tiles_of(j.p.group.m), across = tiles_of(p.pitch);
    float *row = (float *)j.p.sides[MT_ROW].scales, *column = (float *)j.p.sides[MT_COL].scales;
    if (DIRS & ROW_CODES) row[(p.index * down + p.down) * across + p.right] = dec;
    if (DIRS & COLUMN_CODES) column[(p.index * across + p.right) * down + p.down] = dec;
}

/* ---- decoded ----------------------------------------------------------------------------------
 */

/* What elements of a block are multiplied by, and their codes' values. */
static __device__ __forceinline__ float2 micro_scale(const side &s, float most)
{
    const int32_t e = mt_e8m0_exponent(most, s.inverse, s.emax, s.options.scale_floor);
    return make_float2(mt_e8m0_scale(254 - e), mt_e8m0_scale(e));
}

static __device__ __forceinline__ uint32_t decoded_pair(const side &s, float low, float high,
                                                        const float2 &a, const float2 &b)
{
    const uint32_t q = code_pair(s, low * a.x, high * b.x);
    float v[2];
    byte_pair_values<CODES_E4M3>(v, s.codec, q);
    return bf16_pair(v[0] * a.y, v[1] * b.y);
}

/* What codes of four elements decode to. */
static __device__ __forceinline__ uint2 decoded(const side &s, const float4 &x,
                                                const float2 scales[4])
{
    return make_uint2(decoded_pair(s, x.x, x.y, scales[0], scales[1]),
                      decoded_pair(s, x.z, x.w, scales[2], scales[3]));
}
static __device__ __forceinline__ uint2 decoded(const side &s, const float4 &x, const float2 &e)
{
    const float2 same[4] = { e, e, e, e };
    return decoded(s, x, same);
}

/* Elements with one scale in each direction. */
template <int DIRS>
static __device__ __forceinline__ void put_decoded_alike(const job &j, const place &p,
                                                         const float4 x[ROWS], const float2 &row,
                                                         const float2 &column)
{
    const side &to_row = j.p.sides[MT_ROW], &to_col = j.p.sides[MT_COL];
    const bool alike = DIRS != BOTH_CODES || mt_f32_bits(row.x) == mt_f32_bits(column.x);
    const bool one = DIRS == BOTH_CODES && to_row.codes == to_col.codes; /* memory of both */
    const side &own = DIRS & ROW_CODES ? to_row : to_col;
    const float2 first = DIRS & ROW_CODES ? row : column;
    int64_t at = p.first;
#pragma unroll
    for (int i = 0; i < ROWS; i++, at += p.pitch) {
        uint2 w = decoded(own, x[i], first);
        if ((DIRS & ROW_CODES) && p.within) store_8((mt_bf16 *)to_row.codes + at, w.x, w.y);
        if (!(DIRS & COLUMN_CODES) || one) continue;
        if (!alike) w = decoded(to_col, x[i], column); /* seldom */
        if (p.within) store_8((mt_bf16 *)to_col.codes + at, w.x, w.y);
    }
}

/* Eight threads have a block of 32 of a row. */
static __device__ __forceinline__ void put_decoded_rows(const side &s, const place &p,
                                                        const float4 x[ROWS])
{
    mt_bf16 *to = (mt_bf16 *)s.codes + p.first;
#pragma unroll
    for (int i = 0; i < ROWS; i++, to += p.pitch) {
        float most = largest(x[i]);
#pragma unroll
        for (int lane = 1; lane < 8; lane *= 2)
            most = fmaxf(most, __shfl_xor_sync(~0u, most, lane));
        const uint2 w = decoded(s, x[i], micro_scale(s, most));
        if (p.within) store_8(to, w.x, w.y);
    }
}

/* Two warps have a block of 32 of a column; columns: what both have left. */
static __device__ __forceinline__ void put_decoded_columns(const side &s, const place &p,
                                                           const float4 x[ROWS], const float4 &a,
                                                           const float4 &b)
{
    const float2 scales[4] = { micro_scale(s, fmaxf(a.x, b.x)), micro_scale(s, fmaxf(a.y, b.y)),
                               micro_scale(s, fmaxf(a.z, b.z)), micro_scale(s, fmaxf(a.w, b.w)) };
    mt_bf16 *to = (mt_bf16 *)s.codes + p.first;
#pragma unroll
    for (int i = 0; i < ROWS; i++, to += p.pitch) {
        const uint2 w = decoded(s, x[i], scales);
        if (p.within) store_8(to, w.x, w.y);
    }
}

/* ---- the kernel -------------------------------------------------------------------------------
 */

template <int KIND, int DIRS>
static __global__ void __launch_bounds__(TILE_THREADS, RESIDENT)
    masters_kernel(const __grid_constant__ job j)
{
    enum { ANY = DIRS & ROW_CODES ? MT_ROW : MT_COL };
    __shared__ masters_space sp;
    const int lane = lane_of_warp(), warp = (int)threadIdx.x / 32;
    const place p = place_of(j.p.group);
    float4 x[ROWS], columns = {};
    int nans = 0;
    let_follow();
    load_rows(x, j, p);
    float most = find(&nans, x);
    if (KIND == DECODED_LINES && (DIRS & COLUMN_CODES))
        sp.columns[warp][lane] = columns = find_columns(x);
    const uint32_t bits = __reduce_max_sync(~0u, mt_f32_bits(most));
    if (lane == 0) sp.most[warp] = bits;
    wait_for_results();
    __syncthreads(); /* all have left what they found */
    most = mt_f32_from_bits(__reduce_max_sync(~0u, sp.most[lane % WARPS]));
    if (threadIdx.x < MT_DIR_COUNT && j.measure[threadIdx.x])
        raise_amax(j, (int)threadIdx.x, (int)p.index, mt_f32_bits(most));
    if (nans && j.nans) add_nans(j, (int)p.index, nans); /* seldom */
    if (KIND == WHOLES || KIND == DECODED_WHOLES) {
        const float row = DIRS & ROW_CODES ? whole_scale(j, MT_ROW, (int)p.index) : 0;
        const float column = DIRS & COLUMN_CODES ? whole_scale(j, MT_COL, (int)p.index) : 0;
        if (KIND == WHOLES)
            put_codes<DIRS>(j, sp.codes, p, x, row, column);
        else
            put_decoded_alike<DIRS>(j, p, x, make_float2(row, 1), make_float2(column, 1));
    }
    if (KIND == SQUARES || KIND == DECODED_SQUARES) {
        const side &s = j.p.sides[ANY];
        const float enc = mt_encode_scale(most, s.max, s.options.pow2, s.overflow);
        const float2 e = make_float2(enc, 1.0f / enc);
        if (KIND == SQUARES) {
            if (threadIdx.x == 0) put_square_scales<DIRS>(j, p, e.y);
            put_codes<DIRS>(j, sp.codes, p, x, enc, enc);
        } else {
            put_decoded_alike<DIRS>(j, p, x, e, e);
        }
    }
    if (KIND == DECODED_LINES && (DIRS & ROW_CODES)) put_decoded_rows(j.p.sides[MT_ROW], p, x);
    if (KIND == DECODED_LINES && (DIRS & COLUMN_CODES))
        put_decoded_columns(j.p.sides[MT_COL], p, x, columns, sp.columns[warp ^ 1][lane]);
}

/* ---- the host's part --------------------------------------------------------------------------
 */

/* MASTER_KINDS: it is none. */
static int kind_of(const side &s)
{
    const mt_format_options &o = s.options;
    if (!s.present || s.plain || o.element != MT_ELEMENT_E4M3 || o.sr || o.rht || s.padded ||
        s.swizzled)
        return MASTER_KINDS;
    if ((uintptr_t)s.codes % 16) return MASTER_KINDS;
    if (s.whole) return s.decoded ? DECODED_WHOLES : WHOLES;
    if (s.shared) return s.decoded ? DECODED_SQUARES : SQUARES;
    return s.decoded && s.scale == MT_SCALE_E8M0 && !s.square ? DECODED_LINES : MASTER_KINDS;
}

bool mt_cuda_masters_suffice(const job *j)
{
    const side *row = &j->p.sides[MT_ROW], *col = &j->p.sides[MT_COL];
    const side *source = &j->p.sides[SOURCE];
    const mt_group *g = &j->p.group;
    const int kind = kind_of(row->present ? *row : *col);
    if (!source->plain || source->dtype != MT_F32 || (uintptr_t)source->codes % 16) return false;
    if (j->sums || j->dequantized || kind == MASTER_KINDS) return false;
    if (mt_group_mode_of(g) != MT_GROUP_UNIFORM || g->m % SEGMENT || g->k % SEGMENT) return false;
    if (g->m > INT32_MAX || g->k > INT32_MAX || mt_cuda_plan_units(g) > INT32_MAX) return false;
    if (!row->present || !col->present) return true;
    return kind_of(*col) == kind &&
           ((kind != SQUARES && kind != DECODED_SQUARES) || row->options.pow2 == col->options.pow2);
}

template <int KIND, int DIRS> static mt_status launch(mt_stream *stream, const job *j)
{
    const unsigned blocks = (unsigned)mt_cuda_plan_units(&j->p.group);
    MT_TRY(follow(stream, masters_kernel<KIND, DIRS>, blocks, TILE_THREADS, 0, *j));
    MT_LAUNCHED(stream, "quantize: masters");
    return MT_OK;
}

mt_status mt_cuda_quantize_masters(mt_stream *stream, const job *j)
{
    static mt_status (*const kinds[MASTER_KINDS][BOTH_CODES])(mt_stream *, const job *) = {
        { launch<WHOLES, 1>, launch<WHOLES, 2>, launch<WHOLES, 3> },
        { launch<SQUARES, 1>, launch<SQUARES, 2>, launch<SQUARES, 3> },
        { launch<DECODED_WHOLES, 1>, launch<DECODED_WHOLES, 2>, launch<DECODED_WHOLES, 3> },
        { launch<DECODED_SQUARES, 1>, launch<DECODED_SQUARES, 2>, launch<DECODED_SQUARES, 3> },
        { launch<DECODED_LINES, 1>, launch<DECODED_LINES, 2>, launch<DECODED_LINES, 3> }
    };
    const side *row = &j->p.sides[MT_ROW], *col = &j->p.sides[MT_COL];
    const int dirs = (row->present ? ROW_CODES : 0) + (col->present ? COLUMN_CODES : 0);
    return kinds[kind_of(row->present ? *row : *col)][dirs - 1](stream, j);
}
