/* The common case by a shorter way: a row direction with 1-D blocks or one scale, from aligned
 * plain elements. Segments go from memory to registers to memory, warps wait for nobody; the
 * arithmetic and its order are those of the tiles. */
#include "kernels/cuda/quantize_tile.cuh"

enum { WARPS = TILE_THREADS / 32, TURNS = TILE * SEGMENTS / TILE_THREADS };

/* The tile of a warp and the scales of its member; this one and the next. */
struct turn {
    tile t;
    level l;
};

static __device__ __forceinline__ void find_turn(turn *to, const job &j, int64_t unit)
{
    const side &s = j.p.sides[MT_ROW];
    to->t = tile_at(j.p, unit);
    int64_t i = to->t.index;
    to->l = member_level(s, j.amax[MT_ROW][i], j.scale[MT_ROW] ? j.scale[MT_ROW] + i : NULL);
}

/* The 16 elements of a segment as they lie; those past the end of the row 0. */
template <typename T> struct raw_segment {
    enum { V = 16 / sizeof(T), VECTORS = SEGMENT / V };
    mt_vec<T, V> at[VECTORS];
};

template <typename T>
static __device__ __forceinline__ raw_segment<T> get_raw(const T *elements, const tile &t, int r,
                                                         int c)
{
    enum { V = raw_segment<T>::V };
    raw_segment<T> x;
    const mt_vec<T, V> *p =
        (const mt_vec<T, V> *)(elements + t.m.offset + (t.r0 + r) * t.m.cols + t.c0 + c);
#pragma unroll
    for (int i = 0; i < raw_segment<T>::VECTORS; i++) {
        x.at[i] = mt_vec<T, V>();
        if (r < t.rows && c + i * V < t.cols) x.at[i] = p[i];
    }
    return x;
}

/* The bits of a row's segment: two draws. */
static __device__ __forceinline__ void draw_segment(int32_t bits[SEGMENT], const job &j,
                                                    const tile &t, int r, int at)
{
    uint32_t row = (uint32_t)t.r0 + (t.index ? 0 : j.first_row) + (uint32_t)r;
#pragma unroll
    for (int d = 0; d < 2; d++) {
        uint32_t counter[4] = { (uint32_t)(t.c0 / 8) + (uint32_t)(at * 2 + d), row,
                                j.first_member + (uint32_t)t.index, draw_step(j) };
        uint32_t w[4];
        mt_philox(w, counter, j.key);
#pragma unroll
        for (int i = 0; i < 8; i++)
            bits[d * 8 + i] = (int32_t)(i % 2 ? w[i / 2] >> 16 : w[i / 2] & 0xffff);
    }
}

/* Codes and scale of one segment; `most` is raised to its amax. */
template <bool SR>
static __device__ __forceinline__ void run_segment(const job &j, const level &l, const output &o,
                                                   const tile &t, int line, int at,
                                                   const float v[SEGMENT], float *most)
{
    const side &s = j.p.sides[MT_ROW];
    float amax = 0;
    int32_t bits[SEGMENT] = {};
    if (j.measure[MT_ROW] || !s.whole) amax = amax_of(v);
    *most = fmaxf(*most, amax);
    if (SR) draw_segment(bits, j, t, line, at);
    cell e = cell_of(j, s, l, block_amax(amax, s.whole ? 0 : s.block_shift));
    if (!s.whole) put_scale(s, o, e, line, at);
    put_codes(s, o, encode_scaled<SR>(s, v, e.enc, bits), line, at, o.lines, o.length, o.line0,
              o.along0);
}

template <typename T, bool SR>
static __global__ void __launch_bounds__(TILE_THREADS, SR ? 2 : 3)
    rows_kernel(const __grid_constant__ job j)
{
    enum { MANY = 4 / raw_segment<T>::VECTORS, /* four loads under way */ V = raw_segment<T>::V };
    __shared__ turn turns[WARPS][2];
    int64_t units = j.p.units[j.p.group.members];
    const T *elements = (const T *)j.p.sides[SOURCE].codes;
    turn *mine = turns[threadIdx.x / 32];
    int lane = threadIdx.x % 32, at = threadIdx.x % SEGMENTS, k = 0;
    if (lane == 0 && blockIdx.x < units) find_turn(&mine[0], j, blockIdx.x);
    for (int64_t u = blockIdx.x; u < units; u += gridDim.x, k ^= 1) {
        __syncwarp(); /* the turn is there */
        const tile &t = mine[k].t;
        const level l = mine[k].l;
        const output o = output_of<MT_ROW>(j.p.sides[MT_ROW], t);
        float most = 0;
        int nans = 0;
#pragma unroll 1
        for (int i = 0; i < TURNS; i += MANY) {
            raw_segment<T> x[MANY];
            int line = (i * TILE_THREADS + (int)threadIdx.x) / SEGMENTS;
            if (i > 0 && line - line % 4 >= o.lines) break;
#pragma unroll
            for (int m = 0; m < MANY; m++)
                x[m] = get_raw(elements, t, line + m * (TILE_THREADS / SEGMENTS), at * SEGMENT);
            if (i == 0 && lane == 0 && u + gridDim.x < units)
                find_turn(&mine[k ^ 1], j, u + gridDim.x);
#pragma unroll
            for (int m = 0; m < MANY; m++) {
                float v[SEGMENT];
#pragma unroll
                for (int e = 0; e < SEGMENT; e++) v[e] = to_f32(x[m].at[e / V].at[e % V]);
                if (j.nans) {
#pragma unroll
                    for (int e = 0; e < SEGMENT; e++) nans += v[e] != v[e];
                }
                run_segment<SR>(j, l, o, t, line + m * (TILE_THREADS / SEGMENTS), at, v, &most);
            }
        }
        if (j.measure[MT_ROW]) raise_amax(j.amax[MT_ROW] + t.index, most);
        raise_nans(j, t.index, nans);
        __syncwarp(); /* the turn is done with */
    }
}

bool mt_cuda_rows_suffice(const job *j)
{
    const side *row = &j->p.sides[MT_ROW], *source = &j->p.sides[SOURCE];
    const mt_group *g = &j->p.group;
    bool sources = source->plain && (source->dtype == MT_BF16 || source->dtype == MT_F32);
    if (!sources || !row->present || row->plain || row->square || row->decoded) return false;
    if (!j->write[MT_ROW] || row->options.four_over_six) return false;
    return !j->p.sides[MT_COL].present && !j->sums && !g->last_dims &&
           (uintptr_t)source->codes % 16 == 0 && g->k * plain_size(source->dtype) % 16 == 0;
}

template <typename T, bool SR> static void launch(mt_stream *stream, const job *j, unsigned blocks)
{
    rows_kernel<T, SR><<<blocks, TILE_THREADS, 0, mt_cuda_stream(stream)>>>(*j);
}

mt_status mt_cuda_quantize_rows(mt_stream *stream, const job *j, unsigned blocks)
{
    static void (*const kernels[2][2])(
        mt_stream *, const job *, unsigned) = { { launch<mt_bf16, false>, launch<mt_bf16, true> },
                                                { launch<float, false>, launch<float, true> } };
    bool wide = j->p.sides[SOURCE].dtype == MT_F32;
    kernels[wide][j->p.sides[MT_ROW].options.sr](stream, j, blocks);
    MT_LAUNCHED(stream, "quantize: rows");
    return MT_OK;
}
