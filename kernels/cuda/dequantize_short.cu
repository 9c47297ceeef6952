/* The common case of dequantize by a shorter way: bytes or nibbles of codes to bf16. The arithmetic
 * is that of the tiles. */
#include "kernels/cuda/quantize_find.cuh"

enum { RUN = 8 };

/* A tile of codes and what is made of it. */
struct frame {
    const uint8_t *codes; /* the tile's first */
    int64_t y_pitch;
    uint32_t pitch;
    mt_bf16 *y;
    lattice scales;
    const float *member; /* its scale, or what that of nvfp4's scales follows from; NULL: neither */
    const uint8_t *end;  /* of codes that may be read */
    int rows, cols;
    int down, right; /* the tile's first row, or column of codes, among those of the scales */
    bool aligned;
    bool inside; /* it is whole, and so is what lies around its columns' ends */
};

static __device__ __forceinline__ void set_frame(frame *f, const decode_job &j, const tile &t)
{
    const side &s = j.p.sides[SOURCE];
    const bool columns = s.transposed;
    const int half = s.codes_per_byte - 1, bytes = RUN >> half;
    int64_t line0 = columns ? t.c0 : t.r0, along0 = columns ? t.r0 : t.c0;
    shape p = shape_of(s, t.m.rows, t.m.cols);
    uint8_t *scales = s.scales + t.m.at[AT_SCALES + SOURCE] * (s.scale == MT_SCALE_F32 ? 4 : 1);
    const uint8_t *codes = s.codes + t.m.at[AT_CODES + SOURCE];
    f->pitch = (uint32_t)p.pitch, f->y_pitch = t.m.cols;
    f->codes = codes + line0 * p.pitch + (along0 >> half);
    f->end = codes + p.code_bytes;
    f->y = (mt_bf16 *)j.p.sides[MT_ROW].codes + t.m.offset + t.r0 * t.m.cols + t.c0;
    f->down = columns ? 0 : (int)(t.r0 % TILE), f->right = columns ? (int)(t.c0 % TILE) : 0;
    const int64_t row0 = t.r0 - f->down, col0 = t.c0 - f->right;
    f->scales = s.dir == MT_COL ? lattice_of(s, p, scales, col0, row0)
                                : lattice_of(s, p, scales, row0, col0);
    f->rows = t.rows, f->cols = t.cols;
    f->member = NULL;
    if (s.whole && !s.bare) f->member = (const float *)scales;
    if (s.second_level && !s.bare) f->member = s.amax + t.index;
    f->aligned = t.m.cols % RUN == 0 && (uintptr_t)f->y % 16 == 0 &&
                 (columns || (((uintptr_t)f->codes | (uintptr_t)f->pitch) & (bytes - 1)) == 0);
}

/* What all of a member is multiplied by, or its scales are. */
static __device__ __forceinline__ float member_scale(const side &s, const frame &f)
{
    if (!f.member) return 1.0f;
    const float x = __ldg(f.member);
    return s.whole ? x : mt_nvfp4_decode_scale(&s.options, x);
}

/* COUNT scales as they are stored, `step` apart, as far as wanted(i); nothing of whole members. */
template <int COUNT, typename F>
static __device__ __forceinline__ void load_scales(uint32_t raw[COUNT], const side &s,
                                                   const frame &f, int64_t first, int64_t step,
                                                   F wanted)
{
    if (s.whole) return;
    if (s.scale == MT_SCALE_F32) {
        const uint32_t *p = (const uint32_t *)f.scales.at + first;
#pragma unroll
        for (int i = 0; i < COUNT; i++) raw[i] = wanted(i) ? __ldg(p + i * step) : 0;
    } else {
        const uint8_t *p = f.scales.at + first;
#pragma unroll
        for (int i = 0; i < COUNT; i++) raw[i] = wanted(i) ? __ldg(p + i * step) : 0;
    }
}

/* What codes are multiplied by under them. */
template <int COUNT>
static __device__ __forceinline__ void scale_values(float dec[COUNT], const side &s,
                                                    const decode_job &j, float member,
                                                    const uint32_t raw[COUNT])
{
    if (s.whole) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) dec[i] = member;
    } else if (s.scale == MT_SCALE_F32) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) dec[i] = mt_f32_from_bits(raw[i]);
    } else if (s.scale == MT_SCALE_E4M3) {
#pragma unroll
        for (int i = 0; i < COUNT; i += 2) {
            float v[2];
            byte_pair_values<CODES_E4M3>(v, j.e4m3, raw[i] | raw[i + 1] << 8);
            dec[i] = v[0] * member, dec[i + 1] = v[1] * member;
        }
    } else {
        const level none = {};
#pragma unroll
        for (int i = 0; i < COUNT; i++) dec[i] = scale_value(s, j.e4m3, none, (uint8_t)raw[i]);
    }
}

/* y[0..8) = values times dec. */
static __device__ __forceinline__ void put_run(mt_bf16 *y, const float v[RUN], const float dec[RUN])
{
    store_16(y, bf16_pair(v[0] * dec[0], v[1] * dec[1]), bf16_pair(v[2] * dec[2], v[3] * dec[3]),
             bf16_pair(v[4] * dec[4], v[5] * dec[5]), bf16_pair(v[6] * dec[6], v[7] * dec[7]));
}

/* ---- codes in rows ----------------------------------------------------------------------------
 */

template <int CODES>
static __device__ __forceinline__ void run_values(float v[RUN], const mt_codec &c, const uint2 &q)
{
    if (CODES == CODES_E2M1) {
        nibble_pair_values<false>(v, q.x), nibble_pair_values<true>(v + 2, q.x);
        nibble_pair_values<false>(v + 4, q.x >> 8), nibble_pair_values<true>(v + 6, q.x >> 8);
        float w[RUN] = { v[0], v[2], v[4], v[6], v[1], v[3], v[5], v[7] };
#pragma unroll
        for (int i = 0; i < RUN; i++) v[i] = w[i];
    } else {
        byte_pair_values<CODES>(v, c, q.x), byte_pair_values<CODES>(v + 2, c, q.x >> 16);
        byte_pair_values<CODES>(v + 4, c, q.y), byte_pair_values<CODES>(v + 6, c, q.y >> 16);
    }
}

/* A tile that does not lie as it should, by `step` threads. */
static __device__ __noinline__ void put_singly(const decode_job &j, const frame &f, int first,
                                               int step)
{
    const side &s = j.p.sides[SOURCE];
    const bool columns = s.transposed, down_first = s.dir == MT_COL;
    const int half = s.codes_per_byte - 1;
    const float member = member_scale(s, f);
    for (int i = first; i < f.rows * f.cols; i += step) {
        const int r = i / f.cols, c = i % f.cols, down = f.down + r, right = f.right + c;
        const int line = down_first ? right : down, along = down_first ? down : right;
        const int at = columns ? r : c;
        const uint8_t *codes = f.codes + (columns ? c : r) * (int64_t)f.pitch;
        const uint32_t code = codes[at >> half] >> (half & at) * 4;
        uint32_t raw[2] = { 0, 0 };
        float dec[2];
        load_scales<1>(raw, s, f, scale_offset(f.scales, line, along >> s.block_shift), 0,
                       [](int) { return true; });
        scale_values<2>(dec, s, j, member, raw);
        from_f32(f.y + r * f.y_pitch + c, mt_decode(s.codec, (uint8_t)code) * dec[0]);
    }
}

enum { ROWS = 8 }; /* of a thread, below each other: in one block of scales */
static_assert((int)ROWS == (int)RUN, "scales are of either");

/* By a warp: the block's tile, of rows of a member and as wide as its threads; false: there is
 * none. */
static __device__ __forceinline__ bool find_frame(frame *f, const decode_job &j)
{
    const side &s = j.p.sides[SOURCE];
    const mt_group &g = j.p.group;
    const int wide = RUN << j.shift, tall = ROWS * TILE_THREADS >> j.shift;
    const unsigned across = ((unsigned)g.k + wide - 1) / wide, n = blockIdx.x / across;
    const int k = (int)(blockIdx.x - n * across) * wide;
    located it;
    if (!locate_strip(&it, g, tall, (int)n)) return false;
    if (lane_of_warp()) return true;
    tile t = {};
    t.m.rows = it.rows, t.m.cols = g.k, t.m.offset = it.before.rows * g.k;
    t.m.at[AT_CODES + SOURCE] = codes_before(s, g.k, it.before);
    t.m.at[AT_SCALES + SOURCE] = scales_before(s, g.k, it.index, it.before);
    t.index = it.index, t.r0 = (int64_t)it.at * tall, t.c0 = k;
    t.rows = (int)(it.rows - t.r0 < tall ? it.rows - t.r0 : tall);
    t.cols = (int)(g.k - k < wide ? g.k - k : wide);
    set_frame(f, j, t);
    return true;
}

/* A block has as much of a few rows as its threads reach across. */
template <int CODES>
static __global__ void __launch_bounds__(TILE_THREADS, 5)
    rows_kernel(const __grid_constant__ decode_job j)
{
    __shared__ frame own;
    __shared__ bool is;
    const side &s = j.p.sides[SOURCE];
    const bool planar = s.dir == MT_COL;
    wait_for_results();
    if (threadIdx.x < 32) {
        const bool found = find_frame(&own, j);
        if (threadIdx.x == 0) is = found;
    }
    __syncthreads();
    if (!is) return;
    const frame &f = own;
    const int across = (1 << j.shift) - 1;
    const int first = ((int)threadIdx.x >> j.shift) * ROWS, c = ((int)threadIdx.x & across) * RUN;
    if (!f.aligned) put_singly(j, f, (int)threadIdx.x, TILE_THREADS);
    const int rows = f.aligned && c < f.cols ? f.rows - first : 0;
    if (rows <= 0) return;
    uint2 q[ROWS];
    uint32_t raw[ROWS];
    const int64_t pitch = f.pitch;
    const uint8_t *from = f.codes + first * pitch + (CODES == CODES_E2M1 ? c / 2 : c);
#pragma unroll
    for (int i = 0; i < ROWS; i++, from += pitch) {
        q[i] = make_uint2(0, 0);
        if (i >= rows) continue;
        if (CODES == CODES_E2M1)
            q[i].x = __ldg((const uint32_t *)from);
        else
            q[i] = __ldg((const uint2 *)from);
    }
    const int down = f.down + first;
    if (planar) /* of eight columns */
        load_scales<RUN>(raw, s, f, scale_offset(f.scales, c, down >> s.block_shift),
                         line_step(f.scales), [](int) { return true; });
    else
        load_scales<ROWS>(raw, s, f, scale_offset(f.scales, down, c >> s.block_shift),
                          line_step(f.scales), [&](int i) { return i < rows; });
    float dec[ROWS], decs[RUN];
    scale_values<ROWS>(dec, s, j, member_scale(s, f), raw);
    const int64_t y_pitch = f.y_pitch;
    mt_bf16 *y = f.y + first * y_pitch + c;
#pragma unroll
    for (int i = 0; i < ROWS; i++, y += y_pitch) {
        float v[RUN];
        run_values<CODES>(v, s.codec, q[i]);
#pragma unroll
        for (int e = 0; e < RUN; e++) decs[e] = planar ? dec[e] : dec[i];
        if (i < rows) put_run(y, v, decs);
    }
}

/* ---- codes in columns -------------------------------------------------------------------------
 */

/* The codes of a tile's columns as they lie, by lines of 128 bytes: a line is read at once, and is
 * a row of shared memory. Pieces of 16 bytes change places in it, so that groups of eight columns
 * meet in no bank. A thread has eight columns of two words of codes, ROWS rows below each other
 * from `first` on and as many LEAP rows further: of one block of nvfp4's scales, of one each of
 * others. */
template <int CODES, int COLUMN> struct columns {
    enum {
        HALF = CODES == CODES_E2M1,
        BYTES = COLUMN, /* of a whole one */
        THREADS = BYTES,
        BLOCKS = (HALF ? 1024 : 1280) / THREADS, /* of a multiprocessor */
        TALL = BYTES << HALF,
        WIDE = 64,
        ACROSS = WIDE / RUN,
        LINE = 128,
        LINES = (BYTES + LINE - 2) / LINE + 1, /* that a column may touch */
        PIECES = LINE / 16,
        PITCH = LINES * LINE,
        WORD_ROWS = 4 << HALF,
        FIRST = HALF ? (int)SEGMENT : (int)WORD_ROWS, /* of a thread's group */
        LEAP = HALF ? (int)WORD_ROWS : (int)TILE
    };
    static_assert(HALF || BYTES == 2 * LEAP, "two groups of rows");
    static_assert(!HALF || TALL / SEGMENT % 4 == 0, "swizzled scales lie in fours");
};
/* Their bytes: of long ones most would lie beyond the end of a member of few rows. */
enum { LONG = 256, SHORT = 160 };

template <typename SPACE>
static __device__ __forceinline__ unsigned column_place(unsigned c, unsigned at)
{
    return c * SPACE::PITCH + (at ^ c / RUN % 8 * 16);
}

/* Of a tile at the edge of its member: pieces that lie within the buffer of codes come as they are;
 * of the others what exists. */
template <typename space>
static __device__ __noinline__ void load_edge(uint8_t *shared, const frame &f, const uint8_t *begin)
{
    enum { PIECES = space::LINES * space::PIECES };
    const int bytes = (f.rows + space::HALF) >> space::HALF;
    for (int i = (int)threadIdx.x; i < f.cols * PIECES; i += space::THREADS) {
        const int c = i / PIECES, piece = i % PIECES;
        const uint8_t *p = f.codes + c * (int64_t)f.pitch;
        const int at = piece * 16 - (int)((uintptr_t)p % space::LINE);
        uint8_t *to = shared + column_place<space>(c, piece * 16);
        if (at <= -16 || at >= bytes) continue;
        if (p + at >= begin && p + at + 16 <= f.end) {
            copy_16(to, p + at);
        } else {
            for (int b = 0; b < 16; b++)
                if (at + b >= 0 && at + b < bytes) to[b] = p[at + b];
        }
    }
}

template <typename space>
static __device__ __forceinline__ void load_columns(uint8_t *shared, const frame &f,
                                                    const uint8_t *begin)
{
    enum { EACH = space::THREADS / space::PIECES };
    if (!f.inside) return load_edge<space>(shared, f, begin);
    const int piece = (int)(threadIdx.x % space::PIECES);
#pragma unroll
    for (int i = 0; i < (space::WIDE + EACH - 1) / EACH; i++) {
        const unsigned c = threadIdx.x / space::PIECES + i * EACH;
        if (space::WIDE % EACH && c >= space::WIDE) break;
        const uint8_t *p = f.codes + (uint64_t)c * f.pitch;
        const int before = (int)((uintptr_t)p % space::LINE) - piece * 16;
        uint8_t *to = shared + column_place<space>(c, piece * 16);
#pragma unroll
        for (int l = 0; l < space::LINES; l++) {
            const int at = l * space::LINE - before; /* in the column */
            if (at > -16 && at < space::BYTES)
                copy_16(to + l * space::LINE, p - before + l * space::LINE);
        }
    }
}

/* y = the values of words of codes of eight columns, as far as `rows`. */
template <int CODES>
static __device__ __forceinline__ void put_rows(mt_bf16 *y, int64_t pitch, const mt_codec &codec,
                                                const uint32_t w[RUN], const float dec[RUN],
                                                int rows)
{
#pragma unroll
    for (int i = 0; i < columns<CODES, LONG>::WORD_ROWS; i++, y += pitch) {
        float v[RUN];
#pragma unroll
        for (int e = 0; e < RUN; e += 2) {
            if (CODES == CODES_E2M1) {
                uint32_t pair = __byte_perm(w[e], w[e + 1], i / 2 | (i / 2 + 4) << 8);
                i % 2 ? nibble_pair_values<true>(v + e, pair)
                      : nibble_pair_values<false>(v + e, pair);
            } else {
                byte_pair_values<CODES>(v + e, codec,
                                        __byte_perm(w[e], w[e + 1], i | (i + 4) << 4));
            }
        }
        if (i < rows) put_run(y, v, dec);
    }
}

/* Scales of eight columns from `at` on, `line` apart: bytes, or f32, which mostly lie together. */
template <bool BYTES>
static __device__ __forceinline__ void column_scales(uint32_t raw[RUN], const uint8_t *scales,
                                                     int64_t at, int64_t line)
{
    const uint32_t *p = (const uint32_t *)scales + at;
    if (!BYTES && line == 1 && (uintptr_t)p % 16 == 0) {
        const uint4 x = __ldg((const uint4 *)p), y = __ldg((const uint4 *)p + 1);
        raw[0] = x.x, raw[1] = x.y, raw[2] = x.z, raw[3] = x.w;
        raw[4] = y.x, raw[5] = y.y, raw[6] = y.z, raw[7] = y.w;
        return;
    }
#pragma unroll
    for (int e = 0; e < RUN; e++)
        raw[e] = BYTES ? __ldg(scales + at + e * line) : __ldg(p + e * line);
}

/* By a warp: the block's tile; false: there is none. */
template <typename space>
static __device__ __forceinline__ bool find_columns(frame *f, const decode_job &j)
{
    enum { TALL = space::TALL, WIDE = space::WIDE };
    const side &s = j.p.sides[SOURCE];
    const mt_group &g = j.p.group;
    const int lane = lane_of_warp();
    const unsigned across = ((unsigned)g.k + WIDE - 1) / WIDE;
    const unsigned n = blockIdx.x / across;
    located it;
    if (!locate_strip(&it, g, TALL, (int)n)) return false;
    tile t = {};
    t.m.at[AT_CODES + SOURCE] = codes_before(s, g.k, it.before);
    t.m.at[AT_SCALES + SOURCE] = scales_before(s, g.k, it.index, it.before);
    if (space::HALF) { /* two codes of a column a byte, sixteen a scale */
        const int shift = s.swizzled ? 6 : 4;
        int bytes = 0, scales = 0;
        for (int i = lane; i < it.index; i += 32) {
            const int rows = rows_of_member(g, i);
            bytes += (rows + 1) / 2, scales += (int)shift_up(rows, shift);
        }
        bytes = __reduce_add_sync(~0u, bytes), scales = __reduce_add_sync(~0u, scales);
        t.m.at[AT_CODES + SOURCE] = bytes * g.k;
        t.m.at[AT_SCALES + SOURCE] = scales * (s.swizzled ? shift_up(g.k, 7) * 512 : g.k);
    }
    if (lane) return true;
    t.m.rows = it.rows, t.m.cols = g.k, t.m.offset = it.before.rows * g.k;
    t.index = it.index;
    t.r0 = (int64_t)it.at * TALL, t.c0 = (int64_t)(blockIdx.x - n * across) * WIDE;
    t.rows = (int)(it.rows - t.r0 < TALL ? it.rows - t.r0 : TALL);
    t.cols = (int)(g.k - t.c0 < WIDE ? g.k - t.c0 : WIDE);
    set_frame(f, j, t);
    f->inside = t.rows == TALL && t.cols == WIDE && f->codes >= s.codes + 15 &&
                f->codes + (WIDE - 1) * (uint64_t)f->pitch + space::BYTES + 15 <= f->end;
    return true;
}

template <int CODES, int COLUMN>
static __global__ void __launch_bounds__((columns<CODES, COLUMN>::THREADS),
                                         (columns<CODES, COLUMN>::BLOCKS))
    columns_kernel(const __grid_constant__ decode_job j)
{
    typedef columns<CODES, COLUMN> space;
    enum { PARTS = 2, SCALES = space::HALF ? 1 : (int)PARTS };
    extern __shared__ __align__(128) uint8_t mt_lines[];
    __shared__ frame own;
    __shared__ bool is;
    const side &s = j.p.sides[SOURCE];
    wait_for_results();
    if (threadIdx.x < 32) {
        const bool found = find_columns<space>(&own, j);
        if (threadIdx.x == 0) is = found;
    }
    __syncthreads();
    if (!is) return;
    const frame &f = own;
    if (!f.aligned) return put_singly(j, f, (int)threadIdx.x, space::THREADS);
    load_columns<space>(mt_lines, f, s.codes);
    const int c = (int)(threadIdx.x % space::ACROSS) * RUN;
    const int first = (int)(threadIdx.x / space::ACROSS) * space::FIRST;
    const int rows = c < f.cols ? f.rows - first : 0;
    uint32_t raw[SCALES][RUN] = {}, w[PARTS][RUN];
    const float member = member_scale(s, f);
    const int64_t line = line_step(f.scales);
#pragma unroll
    for (int i = 0; i < SCALES; i++) {
        const int block = (first + i * space::LEAP) >> s.block_shift;
        if (s.whole || i * space::LEAP >= rows) continue;
        const int64_t at = scale_offset(f.scales, f.right + c, block);
        column_scales<space::HALF>(raw[i], f.scales.at, at, line);
    }
    const uint32_t pitch = f.pitch, start = (uint32_t)(uintptr_t)f.codes + c * pitch;
    copies_done();
    __syncthreads(); /* the codes are there */
    if (rows <= 0) return;
#pragma unroll
    for (int e = 0; e < RUN; e++) {
        const uint32_t at = (start + e * pitch) % space::LINE + (first >> space::HALF);
        const auto word = [&](int i) {
            return *(const uint32_t *)(mt_lines + column_place<space>(c, (at & ~3u) + i % 4 * 4) +
                                       e * space::PITCH + i / 4 * space::LINE);
        };
        const uint32_t a = word(0), b = word(1);
        w[0][e] = __funnelshift_r(a, b, at * 8);
        w[1][e] = space::HALF ? __funnelshift_r(b, word(2), at * 8)
                              : __funnelshift_r(word(4), word(5), at * 8);
    }
    float dec[RUN];
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        if (i < SCALES) scale_values<RUN>(dec, s, j, member, raw[i]);
        put_rows<CODES>(f.y + (first + i * space::LEAP) * f.y_pitch + c, f.y_pitch, s.codec, w[i],
                        dec, rows - i * space::LEAP);
    }
}

/* ---- the host's part --------------------------------------------------------------------------
 */

bool mt_cuda_decode_is_short(const decode_job *j)
{
    const mt_group *g = &j->p.group;
    return j->p.sides[MT_ROW].dtype == MT_BF16 && mt_is_short(j->p.sides[SOURCE]) &&
           !j->p.sides[SOURCE].padded && !g->last_dims && mt_cuda_plan_rows(g) <= MOST_FOUND &&
           g->k <= INT32_MAX && mt_cuda_plan_units(g) <= INT32_MAX;
}

template <int CODES, int COLUMN>
static mt_status launch_columns(mt_stream *stream, const decode_job *j)
{
    typedef columns<CODES, COLUMN> space;
    enum { BYTES = space::WIDE * space::PITCH };
    const mt_group *g = &j->p.group;
    const unsigned blocks =
        (unsigned)(mt_cuda_plan_strips(g, space::TALL) * mt_ceil_div(g->k, space::WIDE));
    MT_TRY(mt_cuda_give_shared(stream, (const void *)columns_kernel<CODES, COLUMN>, BYTES,
                               "dequantize: columns"));
    MT_TRY(follow(stream, columns_kernel<CODES, COLUMN>, blocks, space::THREADS, BYTES, *j));
    MT_LAUNCHED(stream, "dequantize: bf16");
    return MT_OK;
}

/* Whether most members' columns of nibbles are short. */
static bool are_short(const mt_group *g)
{
    return g->members * (int64_t)columns<CODES_E2M1, SHORT>::TALL >= mt_cuda_plan_rows(g);
}

template <int CODES> static mt_status launch(mt_stream *stream, const decode_job *j)
{
    const side *s = &j->p.sides[SOURCE];
    const mt_group *g = &j->p.group;
    if (CODES == CODES_E2M1 && s->transposed && are_short(g))
        return launch_columns<CODES_E2M1, SHORT>(stream, j);
    if (s->transposed) return launch_columns<CODES, LONG>(stream, j);
    decode_job own = *j;
    own.shift = 4;
    while (!(s->swizzled && s->dir == MT_COL) && own.shift < 8 && g->k > RUN << own.shift)
        own.shift++;
    const unsigned blocks = (unsigned)(mt_cuda_plan_strips(g, ROWS * TILE_THREADS >> own.shift) *
                                       mt_ceil_div(g->k, RUN << own.shift));
    MT_TRY(follow(stream, rows_kernel<CODES>, blocks, TILE_THREADS, 0, own));
    MT_LAUNCHED(stream, "dequantize: bf16");
    return MT_OK;
}

mt_status mt_cuda_decode_short(mt_stream *stream, const decode_job *j)
{
    static mt_status (*const launches[])(mt_stream *, const decode_job *) = { launch<CODES_E4M3>,
                                                                              launch<CODES_E5M2>,
                                                                              launch<CODES_E2M1> };
    return launches[mt_codes_kind(j->p.sides[SOURCE])](stream, j);
}
