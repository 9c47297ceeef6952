/* Inside quantize and dequantize: work is cut into tiles of 128 x 128 elements of one member, one
 * thread block each. Every scale block lies within a tile, so tiles need nothing of each other
 * beyond whole-member amaxes.
 *
 * A tile's values lie in shared memory as f32, in the source's orientation. Threads work on
 * segments: 16 consecutive elements of a line (a row, or a column), which no scale block divides.
 * Eight neighbouring threads hold a line of a tile. */
#pragma once

#include <cuda_fp16.h>

#include "core/rng.h"
#include "kernels/codec.h"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/follow.cuh"
#include "kernels/cuda/fp8.cuh"

enum {
    TILE = 128,
    AREA = TILE * TILE,
    SEGMENT = 16,
    SEGMENTS = TILE / SEGMENT, /* of a line */
    TILE_THREADS = 256,
    SIDES = 3, /* row and column direction of the result; the source */
    SOURCE = MT_DIR_COUNT
};

/* A direction as the device knows it: nothing in it points at tables of the host. */
struct side {
    uint8_t *codes, *scales;
    const float *amax;
    mt_codec codec;
    mt_format_options options;
    float max, inverse; /* of the element, and 1 / max */
    float overflow;     /* F's ovf */
    int emax, dtype, scale, block_shift, codes_per_byte, dir;
    bool present, plain, whole, delayed, second_level;
    bool square; /* a cell is block x block values */
    bool shared; /* and has one stored scale; else every line has its own */
    bool transposed, swizzled, block_major;
    bool bare;    /* when reading: without the scale of the whole member */
    bool decoded; /* plain elements of dtype in place of codes, without the whole member's scale */
    bool padded;  /* MT_LAYOUT_PADDED */
};

/* Running totals over members; what a member's parts begin at. */
enum {
    AT_UNIT,
    AT_COLUMN,
    AT_SUMS,
    AT_CODES,
    AT_SCALES = AT_CODES + SIDES,
    ATS = AT_SCALES + SIDES
};

struct member {
    int64_t rows, cols;
    int64_t offset; /* elements */
    int64_t at[ATS];
};

/* The members of a call, made on the device. */
struct plan {
    mt_group group;
    side sides[SIDES];
    member *members; /* [members + 1]: the last has the totals */
    int64_t *units;  /* the first tile of each; [members + 1] */
    uint64_t *zeros; /* cleared along with it */
    int64_t zero_count;
};

/* The part of a member that is worked on: rows [r0, r0 + rows), columns [c0, c0 + cols). */
struct tile {
    member m;
    int64_t index, r0, c0;
    int rows, cols;
};

/* Where codes and scales lie in a member; as mt_direction_shape. */
struct shape {
    int64_t pitch, code_bytes; /* of lines of codes; of the member */
    int64_t tile;              /* bytes of codes from a tile of a line to the next */
    int64_t scale_lines, scale_blocks, line_stride, block_stride, scale_count;
};

/* Scales that follow from a member's amax. */
struct level {
    float amax;
    float enc, dec;        /* formats with one f32 scale for the member */
    float s_enc, g, s_dec; /* nvfp4 */
};

/* Where the plan writes strips of tiles ahead (quantize_strips.cuh), and how large one is. */
struct strip_table {
    struct strip *strips; /* NULL: they are not wanted */
    int64_t most;         /* that there may be */
    int rows;
    int wide;       /* tiles beside each other in one; if more than 1, none below each other */
    bool gathered;  /* kernels know where elements of a row lie */
    bool swiglu;    /* they are made of rows twice as wide */
    unsigned early; /* the first blocks, which do not wait for it */
};

/* What dequantize's kernels know; by value. */
struct decode_job {
    plan p; /* sides: y, none, the source */
    mt_codec e4m3;
    int shift; /* where rows are decoded: a block's threads beside each other, a power of two */
};

extern "C" {
/* dequantize_short.cu: whether the short way knows a call; its launch. */
bool mt_cuda_decode_is_short(const struct decode_job *j);
mt_status mt_cuda_decode_short(mt_stream *stream, const struct decode_job *j);
/* quantize_plan.cu: bytes of scratch for a plan; its layout there; the launch that fills it. */
size_t mt_cuda_plan_bytes(const mt_group *group);
void mt_cuda_plan_place(struct plan *plan, void *scratch);
mt_status mt_cuda_plan_members(mt_stream *stream, const struct plan *plan);
mt_status mt_cuda_plan_job(mt_stream *stream, const struct job *j);
/* At least the number of strips of `rows` rows; bytes of scratch for them. */
int64_t mt_cuda_plan_strips(const mt_group *group, int64_t rows);
size_t mt_cuda_strip_bytes(int64_t strips);
/* Rows of all members of one width, capacity included. */
int64_t mt_cuda_plan_rows(const mt_group *group);
/* At least the number of tiles; at least the sum of ceil(rows / a) ceil(cols / b). */
int64_t mt_cuda_plan_units(const mt_group *group);
int64_t mt_cuda_plan_blocks(const mt_group *group, int64_t a, int64_t b);
/* A direction of a group as a side. When reading, square blocks of mx and nvfp4 are the lines they
 * are stored as. An absent direction gives an absent side. */
struct side mt_cuda_side_of(const mt_direction *d, mt_dir dir, bool reading);
}

/* ---- where things lie -------------------------------------------------------------------------
 */

static __host__ __device__ __forceinline__ int64_t shift_up(int64_t n, int shift)
{
    return (n + ((int64_t)1 << shift) - 1) >> shift;
}

static __host__ __device__ __forceinline__ int64_t plain_size(int dtype)
{
    return dtype == MT_F64 ? 8 : dtype == MT_F32 ? 4 : 2;
}

static __device__ __forceinline__ shape shape_of(const side &s, int64_t m, int64_t k)
{
    shape p = {};
    int64_t code_lines = s.transposed ? k : m, length = s.transposed ? m : k;
    p.pitch = s.plain ? length * plain_size(s.dtype) : shift_up(length, s.codes_per_byte - 1);
    p.code_bytes = code_lines * p.pitch;
    p.tile = TILE >> (s.codes_per_byte - 1);
    if (s.padded)
        p.pitch = TILE, p.tile = code_lines * TILE, p.code_bytes = shift_up(length, 7) * p.tile;
    if (s.scale == MT_SCALE_NONE) return p;
    if (s.whole) {
        p.scale_lines = p.scale_blocks = p.scale_count = 1;
        return p;
    }
    int64_t lines = s.dir == MT_ROW ? m : k, along = s.dir == MT_ROW ? k : m;
    p.scale_lines = s.shared ? shift_up(lines, s.block_shift) : lines;
    p.scale_blocks = shift_up(along, s.block_shift);
    p.line_stride = s.block_major ? 1 : p.scale_blocks;
    p.block_stride = s.block_major ? p.scale_lines : 1;
    p.scale_count = s.swizzled ? shift_up(lines, 7) * shift_up(p.scale_blocks, 2) * 512
                               : p.scale_lines * p.scale_blocks;
    return p;
}

static __device__ __forceinline__ int64_t scale_place(const side &s, const shape &p, int64_t line,
                                                      int64_t block)
{
    return s.swizzled ? mt_swizzled_scale(line, block, p.scale_blocks)
                      : line * p.line_stride + block * p.block_stride;
}

/* The last member of [0, count) whose `first` is at or before `at`. */
static __device__ __forceinline__ int64_t member_at(const int64_t *first, int64_t count, int64_t at)
{
    int64_t low = 0, high = count;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (first[middle] <= at)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Tile `unit`, which is one of member `index`. They follow each other along the rows, or where a
 * run is longer than 1, down the columns for at least as many tiles before the next column's. */
static __device__ __forceinline__ tile tile_of(const plan &p, int64_t index, int64_t unit,
                                               unsigned run = 1)
{
    tile t;
    t.index = index;
    t.m = p.members[t.index];
    unsigned across = (unsigned)shift_up(t.m.cols, 7), at = (unsigned)(unit - t.m.at[AT_UNIT]);
    unsigned down = (unsigned)shift_up(t.m.rows, 7), parts = down / run;
    unsigned most = parts > 1 ? (down + parts - 1) / parts : down; /* of a run */
    if (run == 1) most = 1;
    unsigned first = at / (most * across) * most, place = at - first * across;
    if (run > 1 && down - first < most) most = down - first;
    t.r0 = (int64_t)(first + place % most) * TILE;
    t.c0 = (int64_t)(place / most) * TILE;
    t.rows = (int)(t.m.rows - t.r0 < TILE ? t.m.rows - t.r0 : TILE);
    t.cols = (int)(t.m.cols - t.c0 < TILE ? t.m.cols - t.c0 : TILE);
    return t;
}

static __device__ __forceinline__ tile tile_at(const plan &p, int64_t unit)
{
    return tile_of(p, member_at(p.units, p.group.members, unit), unit);
}

/* The tile's values in shared memory: groups of four columns change places so that neither rows
 * nor columns of segments meet in a bank. */
static __device__ __forceinline__ int group_place(int r, int group)
{
    return r * TILE + (group ^ group >> 3 ^ (r / SEGMENT & 7)) * 4;
}
static __device__ __forceinline__ int value_place(int r, int c)
{
    return group_place(r, c >> 2) + (c & 3);
}

/* Segment `at` of line `line` of a tile. */
template <int DIR>
static __device__ __forceinline__ void get_segment(float v[SEGMENT], const float *x, int line,
                                                   int at)
{
#pragma unroll
    for (int i = 0; i < SEGMENT; i++)
        if (DIR == MT_COL) {
            v[i] = x[value_place(at * SEGMENT, line) + i * TILE];
        } else if (i % 4 == 0) {
            float4 q = *(const float4 *)(x + group_place(line, at * 4 + i / 4));
            v[i] = q.x, v[i + 1] = q.y, v[i + 2] = q.z, v[i + 3] = q.w;
        }
}
template <int DIR>
static __device__ __forceinline__ void put_segment(float *x, const float v[SEGMENT], int line,
                                                   int at)
{
#pragma unroll
    for (int i = 0; i < SEGMENT; i++)
        if (DIR == MT_COL)
            x[value_place(at * SEGMENT, line) + i * TILE] = v[i];
        else if (i % 4 == 0)
            *(float4 *)(x + group_place(line, at * 4 + i / 4)) =
                make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]);
}
/* for each segment of a tile's `lines`: whole warps go on or stop */
#define MT_SEGMENTS(segment, lines)                                                                \
    for (int segment = threadIdx.x; (segment & ~31) / SEGMENTS < (lines); segment += TILE_THREADS)

/* ---- scales -----------------------------------------------------------------------------------
 */

/* `given`: the scale of a delayed format, NULL for 1. */
static __device__ __forceinline__ level member_level(const side &s, float amax, const float *given)
{
    level l = { amax, 1.0f, 1.0f, 0, 0, 0 };
    if (s.whole) {
        if (!s.delayed)
            l.enc = mt_encode_scale(amax, s.max, s.options.pow2, FLT_MAX);
        else if (given)
            l.enc = *given;
    }
    l.dec = 1.0f / l.enc;
    if (s.second_level) {
        l.s_enc = mt_nvfp4_encode_scale(&s.options, amax);
        l.g = l.s_enc * (1.0f / 6.0f);
        l.s_dec = mt_nvfp4_decode_scale(&s.options, amax);
    }
    return l;
}

/* What a stored scale of one byte multiplies decoded codes by. */
static __device__ __forceinline__ float scale_value(const side &s, const mt_codec &e4m3,
                                                    const level &l, uint8_t stored)
{
    if (s.scale == MT_SCALE_E4M3) return mt_decode(e4m3, stored) * l.s_dec;
    return stored == 255 ? mt_from_bits(0x7fc00000) : mt_e8m0_scale(stored);
}

/* The value of a code by its scale; the NaN is the CPU's. */
static __device__ __forceinline__ float scaled(float value, float dec)
{
    float y = value * dec;
    return y == y ? y : mt_from_bits(0x7fc00000);
}

/* ---- plain elements ---------------------------------------------------------------------------
 */

/* Conversions by way of bits where a NaN's payload would not survive the instruction. */
static __device__ __forceinline__ float to_f32(float x)
{
    return x;
}
static __device__ __forceinline__ float to_f32(mt_bf16 x)
{
    return mt_bf16_to_f32(__bfloat16_as_ushort(x));
}
static __device__ __forceinline__ float to_f32(__half x)
{
    return mt_f16_load(__half_as_ushort(x));
}
static __device__ __forceinline__ float to_f32(double x)
{
    uint64_t u = (uint64_t)__double_as_longlong(x);
    if (x == x) return (float)x;
    return mt_f32_from_bits((uint32_t)(u >> 32 & 0x80000000u) | 0x7fc00000u |
                            ((uint32_t)(u >> 29) & 0x3fffffu));
}
static __device__ __forceinline__ void from_f32(float *y, float x)
{
    *y = x;
}
static __device__ __forceinline__ void from_f32(mt_bf16 *y, float x)
{
    *y = __float2bfloat16_rn(x); /* NaN becomes 0x7FFF, as NUMERICS has it */
}
static __device__ __forceinline__ void from_f32(__half *y, float x)
{
    *y = __ushort_as_half(mt_f16_store(x));
}
static __device__ __forceinline__ void from_f32(double *y, float x)
{
    uint64_t u = mt_f32_bits(x);
    *y = x == x ? (double)x
                : __longlong_as_double((long long)((u & 0x80000000u) << 32 | 0x7ff8000000000000u |
                                                   (u & 0x3fffffu) << 29));
}

template <typename T, typename F>
static __device__ __forceinline__ void give_vector(const mt_vec<T, 16 / sizeof(T)> &x, int r, int c,
                                                   F f)
{
    float v[16 / sizeof(T)];
#pragma unroll
    for (int e = 0; e < 16 / (int)sizeof(T); e++) v[e] = to_f32(x.at[e]);
    f(r, c, v);
}

/* Calls f(r, c, v) for every vector of V values of the whole tile of plain elements: 0 beyond its
 * rows and columns, so that nothing there is read. Several loads are under way at a time. */
template <typename T, typename F>
static __device__ __forceinline__ void each_vector(const T *elements, const tile &t, F f)
{
    enum { V = 16 / sizeof(T), ACROSS = TILE / V, STEP = TILE_THREADS / ACROSS, MANY = 8 };
    typedef mt_vec<T, V> vec;
    const int64_t pitch = t.m.cols;
    const int rows = t.rows, cols = t.cols, c = threadIdx.x % ACROSS * V;
    const T *first = elements + t.m.offset + t.r0 * pitch + t.c0 + c;
    if ((uintptr_t)first % 16 == 0 && pitch % V == 0) {
        for (int r = threadIdx.x / ACROSS; r < TILE; r += MANY * STEP) {
            vec x[MANY];
#pragma unroll
            for (int i = 0; i < MANY; i++) {
                x[i] = vec();
                if (r + i * STEP < rows && c < cols)
                    x[i] = *(const vec *)(first + (r + i * STEP) * pitch);
            }
#pragma unroll
            for (int i = 0; i < MANY; i++) give_vector(x[i], r + i * STEP, c, f);
        }
        return;
    }
#pragma unroll 1
    for (int r = threadIdx.x / ACROSS; r < TILE; r += STEP) {
        vec x = vec();
#pragma unroll
        for (int e = 0; e < V; e++)
            if (r < rows && c + e < cols) x.at[e] = first[r * pitch + e];
        give_vector(x, r, c, f);
    }
}

/* The tile's values to plain elements. */
template <typename T>
static __device__ __forceinline__ void store_tile(T *elements, const float *x, const tile &t)
{
    enum { V = 16 / sizeof(T), ACROSS = TILE / V };
    T *first = elements + t.m.offset + t.r0 * t.m.cols + t.c0;
    bool aligned = (uintptr_t)first % 16 == 0 && t.m.cols % V == 0;
    for (int at = threadIdx.x; at < t.rows * ACROSS; at += TILE_THREADS) {
        int r = at / ACROSS, c = at % ACROSS * V;
        mt_vec<T, V> y;
        T *p = first + r * t.m.cols + c;
        if (c >= t.cols) continue;
#pragma unroll
        for (int e = 0; e < V; e++) from_f32(&y.at[e], x[value_place(r, c + e)]);
        if (aligned) {
            *(mt_vec<T, V> *)p = y;
        } else {
#pragma unroll
            for (int e = 0; e < V; e++)
                if (c + e < t.cols) p[e] = y.at[e];
        }
    }
}

static __device__ __forceinline__ void store_plain(const side &s, const float *x, const tile &t)
{
    if (s.dtype == MT_F64) store_tile((double *)s.codes, x, t);
    if (s.dtype == MT_F32) store_tile((float *)s.codes, x, t);
    if (s.dtype == MT_BF16) store_tile((mt_bf16 *)s.codes, x, t);
    if (s.dtype == MT_F16) store_tile((__half *)s.codes, x, t);
}

/* ---- reading quantized tiles ------------------------------------------------------------------
 */

/* The codes of one segment, packed as they are stored. */
struct packed {
    uint32_t words[4];
};

static __device__ __forceinline__ uint32_t code_of(const packed &p, int i, int per_byte)
{
    return per_byte == 1 ? p.words[i / 4] >> i % 4 * 8 & 255 : p.words[i / 8] >> i % 8 * 4 & 15;
}

/* `bytes` of a segment, the rest 0. */
static __device__ __forceinline__ packed get_packed(const uint8_t *p, int bytes)
{
    packed q = {};
    if (bytes == 16 && (uintptr_t)p % 16 == 0) {
        uint4 w = *(const uint4 *)p;
        q.words[0] = w.x, q.words[1] = w.y, q.words[2] = w.z, q.words[3] = w.w;
    } else if (bytes == 8 && (uintptr_t)p % 8 == 0) {
        uint2 w = *(const uint2 *)p;
        q.words[0] = w.x, q.words[1] = w.y;
    } else {
#pragma unroll
        for (int i = 0; i < 16; i++)
            if (i < bytes) q.words[i / 4] |= (uint32_t)p[i] << i % 4 * 8;
    }
    return q;
}

static __device__ __forceinline__ void put_packed(uint8_t *p, const packed &q, int bytes)
{
    if (bytes == 16 && (uintptr_t)p % 16 == 0) {
        *(uint4 *)p = make_uint4(q.words[0], q.words[1], q.words[2], q.words[3]);
    } else if (bytes == 8 && (uintptr_t)p % 8 == 0) {
        *(uint2 *)p = make_uint2(q.words[0], q.words[1]);
    } else if (bytes >= 8 && bytes % 4 == 0 && (uintptr_t)p % 4 == 0) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (i * 4 < bytes) ((uint32_t *)p)[i] = q.words[i];
    } else {
#pragma unroll
        for (int i = 0; i < 16; i++)
            if (i < bytes) p[i] = (uint8_t)(q.words[i / 4] >> i % 4 * 8);
    }
}

/* Whether the element's codes are bytes that the GPU converts. */
#define MT_NATIVE_FP8(s) (MT_HAS_NATIVE_FP8 && (s).codec.sign == 24)

/* The values of a segment's codes, before their scale. */
static __device__ __forceinline__ void values_of(float v[SEGMENT], const side &s, const packed &q)
{
    if (MT_NATIVE_FP8(s)) {
#pragma unroll
        for (int i = 0; i < SEGMENT; i += 2)
            native_values(v + i, s.options.element, q.words[i / 4] >> i % 4 * 8 & 0xffff);
    } else if (s.codec.magnitude == s.codec.max_code) { /* every code is a number */
#pragma unroll
        for (int i = 0; i < SEGMENT; i++)
            v[i] = mt_decode_number(s.codec, (uint8_t)code_of(q, i, s.codes_per_byte));
    } else {
#pragma unroll
        for (int i = 0; i < SEGMENT; i++) v[i] = mt_decode(s.codec, (uint8_t)code_of(q, i, 1));
    }
}

/* Codes of a segment that exist: up to the end of the line. */
static __device__ __forceinline__ int codes_in(int length, int at)
{
    int n = length - at * SEGMENT;
    return n < 0 ? 0 : n < SEGMENT ? n : SEGMENT;
}

/* Fills x with the values of lines of codes, rows (DIR row) or columns; `planar`: rows of codes
 * whose scale blocks run along the columns. */
template <int DIR>
static __device__ __forceinline__ void load_lines(float *x, const side &s, const mt_codec &e4m3,
                                                  const level &l, const tile &t, int which,
                                                  bool planar)
{
    shape p = shape_of(s, t.m.rows, t.m.cols);
    const uint8_t *codes =
        s.codes + t.m.at[AT_CODES + which] + (DIR == MT_ROW ? t.c0 : t.r0) / TILE * p.tile;
    const uint8_t *scales =
        s.scales + t.m.at[AT_SCALES + which] * (s.scale == MT_SCALE_F32 ? 4 : 1);
    int64_t line0 = DIR == MT_ROW ? t.r0 : t.c0, along0 = DIR == MT_ROW ? t.c0 : t.r0;
    int lines = DIR == MT_ROW ? t.rows : t.cols, length = DIR == MT_ROW ? t.cols : t.rows;
    MT_SEGMENTS(segment, TILE)
    {
        int line = segment / SEGMENTS, at = segment % SEGMENTS, n = codes_in(length, at);
        int64_t i = line0 + line, first = along0 + at * SEGMENT;
        float v[SEGMENT] = {}, dec = 0;
        if (line < lines && n > 0) {
            packed q = get_packed(codes + i * p.pitch + (at * SEGMENT >> (s.codes_per_byte - 1)),
                                  (int)shift_up(n, s.codes_per_byte - 1));
            int64_t scale_line = s.shared ? i >> s.block_shift : i;
            int64_t place =
                s.whole || planar ? 0 : scale_place(s, p, scale_line, first >> s.block_shift);
            if (s.scale == MT_SCALE_F32)
                dec = s.bare && s.whole ? 1.0f : ((const float *)scales)[place];
            else if (!planar)
                dec = scale_value(s, e4m3, l, scales[place]);
            values_of(v, s, q);
#pragma unroll
            for (int e = 0; e < SEGMENT; e++) {
                if (planar && e < n)
                    dec = scale_value(s, e4m3, l,
                                      scales[scale_place(s, p, first + e, i >> s.block_shift)]);
                v[e] = e < n ? scaled(v[e], dec) : 0;
            }
        }
        put_segment<DIR>(x, v, line, at);
    }
}

static __device__ __forceinline__ void load_quantized(float *x, const side &s, const mt_codec &e4m3,
                                                      const level &l, const tile &t, int which)
{
    if (s.transposed)
        load_lines<MT_COL>(x, s, e4m3, l, t, which, false);
    else
        load_lines<MT_ROW>(x, s, e4m3, l, t, which, s.dir == MT_COL);
}

/* x = the values of plain elements; returns the number of NaNs if `count`. */
template <typename T>
static __device__ __forceinline__ int load_elements(float *x, const T *elements, const tile &t,
                                                    bool count)
{
    enum { V = 16 / sizeof(T) };
    int nans = 0;
    each_vector(elements, t, [&](int r, int c, const float *v) {
        if (count) {
#pragma unroll
            for (int e = 0; e < V; e++) nans += v[e] != v[e];
        }
        if (V == 2) {
            *(float2 *)(x + value_place(r, c)) = make_float2(v[0], v[1]);
        } else {
#pragma unroll
            for (int e = 0; e + 3 < V; e += 4)
                *(float4 *)(x + value_place(r, c + e)) =
                    make_float4(v[e], v[e + 1], v[e + 2], v[e + 3]);
        }
    });
    return nans;
}

static __device__ __forceinline__ int load_plain(float *x, const side &s, const tile &t, bool count)
{
    if (s.dtype == MT_BF16) return load_elements(x, (const mt_bf16 *)s.codes, t, count);
    if (s.dtype == MT_F32) return load_elements(x, (const float *)s.codes, t, count);
    if (s.dtype == MT_F16) return load_elements(x, (const __half *)s.codes, t, count);
    return load_elements(x, (const double *)s.codes, t, count);
}
