/* The common case of dequantize by a shorter way: bytes or nibbles of codes to bf16. The arithmetic
 * is that of the tiles. */
#include "kernels/cuda/quantize_packed.cuh"

enum { WARPS = TILE_THREADS / 32, RUN = 8, ACROSS = TILE / RUN };

/* A tile and where its parts lie. */
struct frame {
    int64_t index, pitch, y_pitch; /* of codes, in bytes; of y */
    const uint8_t *codes, *scales; /* the tile's first code; the member's scales */
    mt_bf16 *y;
    shape p;
    float s_dec;
    int64_t line0, along0; /* of codes */
    int rows, cols;
    bool aligned;
};

/* Where codes lie in rows: `line` is a row. */
static __device__ __forceinline__ void set_frame(frame *f, const decode_job &j, const tile &t)
{
    const side &s = j.p.sides[SOURCE];
    bool columns = s.transposed;
    int64_t line0 = columns ? t.c0 : t.r0, along0 = columns ? t.r0 : t.c0;
    f->p = shape_of(s, t.m.rows, t.m.cols);
    f->index = t.index, f->pitch = f->p.pitch, f->y_pitch = t.m.cols;
    f->line0 = line0, f->along0 = along0;
    f->codes =
        s.codes + t.m.at[AT_CODES + SOURCE] + line0 * f->pitch + (along0 >> (s.codes_per_byte - 1));
    f->scales = s.scales + t.m.at[AT_SCALES + SOURCE] * (s.scale == MT_SCALE_F32 ? 4 : 1);
    f->y = (mt_bf16 *)j.p.sides[MT_ROW].codes + t.m.offset + t.r0 * t.m.cols + t.c0;
    f->rows = t.rows, f->cols = t.cols;
    f->s_dec = s.second_level && !s.bare ? mt_nvfp4_decode_scale(&s.options, s.amax[t.index]) : 1;
    int bytes = RUN >> (s.codes_per_byte - 1);
    f->aligned = t.m.cols % RUN == 0 && (uintptr_t)f->y % 16 == 0 &&
                 (columns || (((uintptr_t)f->codes | (uintptr_t)f->pitch) & (bytes - 1)) == 0);
}

static __device__ __forceinline__ void find_frame(frame *f, const decode_job &j, int64_t unit)
{
    int64_t member = member_at_by_warp(j.p.units, j.p.group.members, unit);
    if (lane_of_warp() == 0) set_frame(f, j, tile_of(j.p, member, unit));
}

/* What codes at (line, along) of a member are multiplied by; not of planar directions. */
static __device__ __forceinline__ float scale_at(const side &s, const decode_job &j, const frame &f,
                                                 int64_t line, int64_t along)
{
    if (s.whole) return s.bare ? 1.0f : *(const float *)f.scales;
    if (s.shared) line >>= s.block_shift;
    int64_t place = scale_place(s, f.p, line, along >> s.block_shift);
    if (s.scale == MT_SCALE_F32) return ((const float *)f.scales)[place];
    level l = {};
    l.s_dec = f.s_dec;
    return scale_value(s, j.e4m3, l, f.scales[place]);
}

/* y[0..8) = values times dec. */
static __device__ __forceinline__ void put_run(mt_bf16 *y, const float v[RUN], const float dec[RUN])
{
    *(uint4 *)y = make_uint4(
        bf16_pair(v[0] * dec[0], v[1] * dec[1]), bf16_pair(v[2] * dec[2], v[3] * dec[3]),
        bf16_pair(v[4] * dec[4], v[5] * dec[5]), bf16_pair(v[6] * dec[6], v[7] * dec[7]));
}

/* The same for what does not lie as it should: element by element. */
static __device__ void put_single(const decode_job &j, const frame &f, int r, int c, uint8_t code,
                                  float dec)
{
    from_f32(f.y + r * f.y_pitch + c, mt_decode(j.p.sides[SOURCE].codec, code) * dec);
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

/* What the columns of a run are multiplied by in a planar direction. */
static __device__ __forceinline__ void
planar_scales(float dec[RUN], const side &s, const decode_job &j, const frame &f, int r, int c)
{
    const level none = {};
#pragma unroll
    for (int e = 0; e < RUN; e++) {
        int64_t place = scale_place(s, f.p, f.along0 + c + e, (f.line0 + r) >> s.block_shift);
        dec[e] = c + e < f.cols ? scale_value(s, j.e4m3, none, f.scales[place]) : 0;
    }
}

static __device__ void rows_singly(const decode_job &j, const frame &f, int first, int c,
                                   bool planar)
{
    const side &s = j.p.sides[SOURCE];
    const level none = {};
    int half = s.codes_per_byte - 1;
    for (int r = first; r < f.rows && r < first + SEGMENT; r += 32 / ACROSS)
        for (int e = c; e < c + RUN && e < f.cols; e++) {
            uint8_t code = (uint8_t)(f.codes[r * f.pitch + (e >> half)] >> (half & e) * 4);
            int64_t place =
                planar ? scale_place(s, f.p, f.along0 + e, (f.line0 + r) >> s.block_shift) : 0;
            put_single(j, f, r, e, code,
                       planar ? scale_value(s, j.e4m3, none, f.scales[place])
                              : scale_at(s, j, f, f.line0 + r, f.along0 + e));
        }
}

/* Half warps have a row of the tile, warps 16 rows; warps wait for nobody. */
template <int CODES>
static __global__ void __launch_bounds__(TILE_THREADS, 4)
    rows_kernel(const __grid_constant__ decode_job j)
{
    enum { ROWS = SEGMENT * ACROSS / 32, STEP = 32 / ACROSS };
    __shared__ frame frames[WARPS][2];
    const side &s = j.p.sides[SOURCE];
    const bool planar = s.dir == MT_COL;
    int64_t units = j.p.units[j.p.group.members];
    frame *mine = frames[threadIdx.x / 32];
    int first = (int)threadIdx.x / 32 * SEGMENT + lane_of_warp() / ACROSS, k = 0;
    int c = lane_of_warp() % ACROSS * RUN;
    if (blockIdx.x < units) find_frame(&mine[0], j, blockIdx.x);
    for (int64_t u = blockIdx.x; u < units; u += gridDim.x, k ^= 1) {
        __syncwarp(); /* the frame is there */
        const frame &f = mine[k];
        bool fast = f.aligned && c < f.cols;
        const uint8_t *p = f.codes + first * f.pitch + (CODES == CODES_E2M1 ? c / 2 : c);
        uint2 q[ROWS];
        float dec[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            q[i] = make_uint2(0, 0), dec[i] = 0;
            if (!fast || first + i * STEP >= f.rows) continue;
            if (CODES == CODES_E2M1)
                q[i].x = *(const uint32_t *)(p + i * STEP * f.pitch);
            else
                q[i] = *(const uint2 *)(p + i * STEP * f.pitch);
            if (!planar) dec[i] = scale_at(s, j, f, f.line0 + first + i * STEP, f.along0 + c);
        }
        if (u + gridDim.x < units) find_frame(&mine[k ^ 1], j, u + gridDim.x);
        if (!f.aligned) rows_singly(j, f, first, c, planar);
        float decs[RUN];
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            int r = first + i * STEP;
            if (!fast || r >= f.rows) continue;
            if (!planar) {
#pragma unroll
                for (int e = 0; e < RUN; e++) decs[e] = dec[i];
            } else if (i == 0) { /* a warp's rows have one scale block */
                planar_scales(decs, s, j, f, r, c);
            }
            float v[RUN];
            run_values<CODES>(v, s.codec, q[i]);
            put_run(f.y + r * f.y_pitch + c, v, decs);
        }
        __syncwarp(); /* the frame is done with */
    }
}

/* ---- codes in columns -------------------------------------------------------------------------
 */

/* The codes of a tile's columns as they lie: each begins at a multiple of 16 bytes before its first
 * code. Groups of eight columns are set off from each other, so that they meet in no bank. */
template <int CODES> struct columns {
    enum {
        HALF = CODES == CODES_E2M1,
        BYTES = TILE >> HALF,    /* of a whole column */
        CHUNKS = BYTES / 16 + 1, /* that it may touch */
        PITCH = CHUNKS * 4 + 28, /* words */
        LINES = 4 << HALF        /* codes of a word */
    };
    frame frames[2];
    alignas(16) uint32_t words[TILE * PITCH];
};

template <int CODES> static __device__ __forceinline__ int column_place(int c, int word)
{
    return c * columns<CODES>::PITCH + (c / RUN & 7) * 4 + word;
}

/* Chunks that lie within the buffer of codes come as they are; of the others what exists. */
template <int CODES>
static __device__ __forceinline__ void load_columns(uint32_t *words, const frame &f,
                                                    const uint8_t *begin, const uint8_t *end)
{
    enum { CHUNKS = columns<CODES>::CHUNKS, HALF = columns<CODES>::HALF };
    int bytes = (f.rows + HALF) >> HALF;
    for (int i = threadIdx.x; i < TILE * CHUNKS; i += TILE_THREADS) {
        int c = i / CHUNKS, chunk = i % CHUNKS;
        if (c >= f.cols) continue;
        const uint8_t *p = f.codes + c * f.pitch;
        int a = (int)((uintptr_t)p & 15), at = chunk * 16 - a;
        uint32_t *to = words + column_place<CODES>(c, chunk * 4);
        if (at >= bytes) continue;
        if (p + at >= begin && p + at + 16 <= end) {
            copy_16(to, p + at, 16);
        } else {
            for (int b = 0; b < 16; b++)
                if (at + b >= 0 && at + b < bytes) ((uint8_t *)to)[b] = p[at + b];
        }
    }
    copies_done();
}

template <int CODES>
static __global__ void __launch_bounds__(TILE_THREADS, 4)
    columns_kernel(const __grid_constant__ decode_job j)
{
    typedef columns<CODES> space;
    extern __shared__ uint4 mt_shared[];
    space *sp = (space *)mt_shared;
    const side &s = j.p.sides[SOURCE];
    const uint8_t *begin = s.codes,
                  *end = begin + j.p.members[j.p.group.members].at[AT_CODES + SOURCE];
    int64_t units = j.p.units[j.p.group.members];
    int c = (int)threadIdx.x % ACROSS * RUN, k = 0;
    if (threadIdx.x < 32 && blockIdx.x < units) find_frame(&sp->frames[0], j, blockIdx.x);
    __syncthreads();
    for (int64_t u = blockIdx.x; u < units; u += gridDim.x, k ^= 1) {
        const frame &f = sp->frames[k];
        load_columns<CODES>(sp->words, f, begin, end);
        if (threadIdx.x < 32 && u + gridDim.x < units)
            find_frame(&sp->frames[k ^ 1], j, u + gridDim.x);
        __syncthreads();
#pragma unroll 1
        for (int r = (int)threadIdx.x / ACROSS * space::LINES; r < f.rows && c < f.cols;
             r += TILE_THREADS / ACROSS * space::LINES) {
            uint32_t w[RUN];
            float dec[RUN];
#pragma unroll
            for (int e = 0; e < RUN; e++) {
                int at = ((int)((uintptr_t)f.codes + (uintptr_t)(c + e) * f.pitch) & 15) +
                         (r >> space::HALF);
                const uint32_t *from = sp->words + column_place<CODES>(c + e, at / 4);
                w[e] = __funnelshift_r(from[0], from[1], at % 4 * 8);
                dec[e] = c + e < f.cols ? scale_at(s, j, f, f.line0 + c + e, f.along0 + r) : 0;
            }
#pragma unroll
            for (int i = 0; i < space::LINES; i++) {
                float v[RUN];
                if (r + i >= f.rows) break;
#pragma unroll
                for (int e = 0; e < RUN; e += 2) {
                    if (CODES == CODES_E2M1) {
                        uint32_t pair = __byte_perm(w[e], w[e + 1], i / 2 | (i / 2 + 4) << 8);
                        i % 2 ? nibble_pair_values<true>(v + e, pair)
                              : nibble_pair_values<false>(v + e, pair);
                    } else {
                        byte_pair_values<CODES>(v + e, s.codec,
                                                __byte_perm(w[e], w[e + 1], i | (i + 4) << 4));
                    }
                }
                mt_bf16 *y = f.y + (r + i) * f.y_pitch + c;
                if (f.aligned) {
                    put_run(y, v, dec);
                } else {
#pragma unroll
                    for (int e = 0; e < RUN; e++)
                        if (c + e < f.cols) from_f32(y + e, v[e] * dec[e]);
                }
            }
        }
        __syncthreads(); /* the tile is done with */
    }
}

/* ---- the host's part --------------------------------------------------------------------------
 */

bool mt_cuda_decode_is_short(const decode_job *j)
{
    const side *y = &j->p.sides[MT_ROW];
    return y->dtype == MT_BF16 && mt_is_short(j->p.sides[SOURCE]);
}

template <int CODES> static mt_status launch(mt_stream *stream, const decode_job *j, int64_t units)
{
    enum { RESIDENT = 4, BYTES = sizeof(columns<CODES>) };
    int64_t most = (int64_t)mt_cuda_multiprocessors(stream) * RESIDENT;
    unsigned blocks = (unsigned)(units < most ? units : most);
    if (j->p.sides[SOURCE].transposed) {
        MT_CUDA(cudaFuncSetAttribute(columns_kernel<CODES>,
                                     cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES));
        columns_kernel<CODES><<<blocks, TILE_THREADS, BYTES, mt_cuda_stream(stream)>>>(*j);
    } else {
        rows_kernel<CODES><<<blocks, TILE_THREADS, 0, mt_cuda_stream(stream)>>>(*j);
    }
    MT_LAUNCHED(stream, "dequantize: bf16");
    return MT_OK;
}

mt_status mt_cuda_decode_short(mt_stream *stream, const decode_job *j, int64_t units)
{
    static mt_status (*const launches[])(mt_stream *, const decode_job *,
                                         int64_t) = { launch<CODES_E4M3>, launch<CODES_E5M2>,
                                                      launch<CODES_E2M1> };
    return launches[mt_codes_kind(j->p.sides[SOURCE])](stream, j, units);
}
