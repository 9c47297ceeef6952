/* group_dequantize, scale layouts, delayed scales. */
#include "kernels/cuda/quantize.cuh"
#include "kernels/cuda/scratch.h"

enum { THREADS = 256 };

/* ---- dequantize -------------------------------------------------------------------------------
 */

struct decode_space {
    float x[AREA];
    tile tiles[2]; /* this one and the next */
};

static __global__ void __launch_bounds__(TILE_THREADS, 3)
    dequantize_kernel(const __grid_constant__ decode_job j)
{
    extern __shared__ uint4 mt_shared[];
    decode_space *sp = (decode_space *)mt_shared;
    float *x = sp->x;
    const side &source = j.p.sides[SOURCE];
    int64_t units = j.p.units[j.p.group.members];
    if (threadIdx.x == 0 && blockIdx.x < units) sp->tiles[0] = tile_at(j.p, blockIdx.x);
    __syncthreads();
    int k = 0;
    for (int64_t u = blockIdx.x; u < units; u += gridDim.x, k ^= 1) {
        const tile &t = sp->tiles[k];
        if (threadIdx.x == 0 && u + gridDim.x < units)
            sp->tiles[k ^ 1] = tile_at(j.p, u + gridDim.x);
        if (source.plain) {
            load_plain(x, source, t, false);
        } else {
            float amax = source.second_level ? source.amax[t.index] : 0;
            level l = member_level(source, amax, NULL);
            if (source.bare) l.s_dec = 1.0f;
            load_quantized(x, source, j.e4m3, l, t, SOURCE);
        }
        __syncthreads();
        store_plain(j.p.sides[MT_ROW], x, t);
        __syncthreads();
    }
}

extern "C" mt_status mt_cuda_decode(mt_stream *stream, const struct mt_dequantize_args *args,
                                    bool codes)
{
    enum { PER_MULTIPROCESSOR = 8, BYTES = sizeof(decode_space) };
    decode_job j = {};
    mt_direction y = mt_direction_of(mt_format_spec_default(mt_format_plain(args->y_dtype)->id));
    void *scratch;
    j.p.group = args->src->group;
    j.e4m3 = mt_codec_of(MT_ELEMENT_E4M3);
    y.codes = args->y;
    j.p.sides[MT_ROW] = mt_cuda_side_of(&y, MT_ROW, false);
    j.p.sides[SOURCE] = mt_cuda_side_of(&args->src->dir[args->dir], args->dir, true);
    j.p.sides[SOURCE].bare = codes;
    int64_t units = mt_cuda_plan_units(&j.p.group);
    int64_t most = (int64_t)mt_cuda_multiprocessors(stream) * PER_MULTIPROCESSOR;
    if (units == 0) return MT_OK;
    if (mt_cuda_decode_is_short(&j)) return mt_cuda_decode_short(stream, &j);
    MT_TRY(mt_cuda_scratch(stream, &scratch, mt_cuda_plan_bytes(&j.p.group)));
    mt_cuda_plan_place(&j.p, scratch);
    MT_TRY(mt_cuda_plan_members(stream, &j.p));
    MT_TRY(mt_cuda_give_shared(stream, (const void *)dequantize_kernel, BYTES, "dequantize"));
    dequantize_kernel<<<(unsigned)(units < most ? units : most), TILE_THREADS, BYTES,
                        mt_cuda_stream(stream)>>>(j);
    MT_LAUNCHED(stream, "dequantize");
    return MT_OK;
}

extern "C" size_t mt_cuda_dequantize_scratch(const mt_stream *stream,
                                             const struct mt_dequantize_args *args)
{
    (void)stream;
    return mt_cuda_plan_units(&args->src->group) ? mt_cuda_plan_bytes(&args->src->group) : 0;
}

extern "C" mt_status mt_cuda_dequantize(mt_stream *stream, const struct mt_dequantize_args *args)
{
    return mt_cuda_decode(stream, args, false);
}

/* ---- scale layouts ----------------------------------------------------------------------------
 */

/* One thread per byte of the result. Sides: from, to. */
static __global__ void swizzle_kernel(const __grid_constant__ plan p)
{
    const side &from = p.sides[0], &to = p.sides[1];
    int64_t count = p.group.members;
    MT_GRID_STRIDE(i, p.members[count].at[AT_SCALES + 1])
    {
        int64_t low = 0, high = count;
        while (high - low > 1) {
            int64_t middle = (low + high) / 2;
            if (p.members[middle].at[AT_SCALES + 1] <= i)
                low = middle;
            else
                high = middle;
        }
        const member *m = p.members + low;
        shape source = shape_of(from, m->rows, m->cols), d = shape_of(to, m->rows, m->cols);
        int64_t at = i - m->at[AT_SCALES + 1], line, block;
        if (to.swizzled) { /* the inverse of mt_swizzled_scale */
            int64_t tile = at / 512, across = (d.scale_blocks + 3) / 4;
            int in = (int)(at % 512);
            line = tile / across * 128 + in / 16 + in % 16 / 4 * 32;
            block = tile % across * 4 + in % 4;
        } else {
            line = to.block_major ? at % d.scale_lines : at / d.scale_blocks;
            block = to.block_major ? at / d.scale_lines : at % d.scale_blocks;
        }
        bool padding = line >= d.scale_lines || block >= d.scale_blocks;
        const uint8_t *scales = from.scales + m->at[AT_SCALES];
        to.scales[i] = padding ? 0 : scales[scale_place(from, source, line, block)];
    }
}

extern "C" size_t mt_cuda_swizzle_scales_scratch(const mt_stream *stream,
                                                 const struct mt_swizzle_scales_args *args)
{
    (void)stream;
    return args->src->group.members ? mt_cuda_plan_bytes(&args->src->group) : 0;
}

extern "C" mt_status mt_cuda_swizzle_scales(mt_stream *stream,
                                            const struct mt_swizzle_scales_args *args)
{
    plan p = {};
    mt_direction to = args->src->dir[args->dir];
    void *scratch;
    p.group = args->src->group;
    p.sides[0] = mt_cuda_side_of(&to, args->dir, true);
    to.swizzled = !to.swizzled;
    to.scales = args->out;
    p.sides[1] = mt_cuda_side_of(&to, args->dir, true);
    size_t bytes = mt_direction_scale_bytes(&to, args->dir, &p.group);
    if (p.group.members == 0 || bytes == 0) return MT_OK;
    MT_TRY(mt_cuda_scratch(stream, &scratch, mt_cuda_plan_bytes(&p.group)));
    mt_cuda_plan_place(&p, scratch);
    MT_TRY(mt_cuda_plan_members(stream, &p));
    swizzle_kernel<<<mt_blocks(stream, (int64_t)bytes, THREADS), THREADS, 0,
                     mt_cuda_stream(stream)>>>(p);
    MT_LAUNCHED(stream, "swizzle_scales");
    return MT_OK;
}

/* ---- delayed scales ---------------------------------------------------------------------------
 */

/* NUMERICS section 2: s = (max 2^-margin) / A where A is finite and above 0, else as before. One
 * block a member: entry t > 1 moves to t - 1, a block's width of them at a time. */
static __global__ void delayed_update_kernel(struct mt_delayed_update_args a, float largest)
{
    __shared__ float warps[THREADS / 32];
    int64_t n = a.members;
    float *slot = a.history + blockIdx.x, last = slot[0];
    const float other = a.other ? a.other[blockIdx.x] : 0;
    if (other > last || isnan(other)) last = other;
    if (last == 0.0f) return;
    float most = fmaxf(last, slot[n]);
    for (int64_t first = 2; first < a.length; first += THREADS) {
        int64_t t = first + threadIdx.x;
        float x = t < a.length ? slot[t * n] : 0;
        most = fmaxf(most, x);
        __syncthreads();
        if (t < a.length) slot[(t - 1) * n] = x;
    }
    for (int lane = 16; lane; lane /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, lane));
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = most;
    __syncthreads();
    if (threadIdx.x) return;
    slot[(a.length - 1) * n] = last;
    slot[0] = 0;
    if (a.other) a.other[blockIdx.x] = last;
    for (int i = 1; i < THREADS / 32; i++) most = fmaxf(most, warps[i]);
    if (a.most_recent || isnan(last)) most = last;
    if (!(most > 0.0f && most <= FLT_MAX)) return;
    float s = largest / most;
    a.scale[blockIdx.x] = s > FLT_MAX ? FLT_MAX : s;
}

extern "C" mt_status mt_cuda_delayed_update(mt_stream *stream,
                                            const struct mt_delayed_update_args *args)
{
    if (args->members == 0) return MT_OK;
    float largest = ldexpf(mt_elements[args->element].max, -args->margin);
    delayed_update_kernel<<<(unsigned)args->members, THREADS, 0, mt_cuda_stream(stream)>>>(*args,
                                                                                           largest);
    MT_LAUNCHED(stream, "delayed_update");
    return MT_OK;
}
