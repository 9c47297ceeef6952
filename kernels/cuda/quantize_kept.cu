/* Rows of nvfp4 that are kept decoded, by the shortest way: of bf16 rows that begin at multiples of
 * 16 bytes, gathered or not. From memory to registers to memory, two lanes to a segment. */
#include "kernels/cuda/quantize_halves.cuh"
#include "kernels/cuda/quantize_nibbles.cuh"

enum {
    PART = 512, /* elements of a line that a block has, of up to TILE lines */
    HALVES =
        PART / 8 / 32, /* of segments, that a lane has of a line: as decode_halves takes them */
    STEP = PART / HALVES,
    MANY = 4 /* lines whose loads are under way */
};

/* A block for each part of TILE lines of a member. Parts that begin at the same column follow each
 * other through all members: tokens that several have are still at hand. */
template <bool SR>
static __global__ void __launch_bounds__(TILE_THREADS, SR ? 3 : 4)
    kept_kernel(const __grid_constant__ job j)
{
    __shared__ frame space;
    __shared__ float enc[MT_DIR_COUNT][NIBBLE_SCALES];
    frame &f = space;
    wait_for_results();
    const unsigned parts = (unsigned)mt_ceil_div(j.p.group.k, PART), lines = gridDim.x / parts;
    const unsigned part = blockIdx.x / lines, across = (unsigned)shift_up(j.p.group.k, 7);
    const int64_t unit = (int64_t)(blockIdx.x - part * lines) * across;
    const int warp = (int)threadIdx.x / 32, lane = lane_of_warp();
    if (unit >= j.p.units[j.p.group.members]) return;
    if (warp == 0) find_tile(&f, j, unit);
    __syncthreads();
    if (threadIdx.x == 0) set_target(&f.to[MT_ROW], j, f.t, MT_ROW);
    __syncthreads();
    make_scales(enc, NULL, j, f);
    __syncthreads();
    const int rows = f.t.rows;
    const int64_t pitch = f.t.m.cols, line = (int64_t)WARPS * pitch;
    const int column = (int)part * PART + lane * 8;
    const bool inside[HALVES] = { column < pitch, column + STEP < pitch };
    const float g = f.to[MT_ROW].l.g;
    const mt_bf16 *from = f.source + column;
    mt_bf16 *to = (mt_bf16 *)f.to[MT_ROW].codes + warp * pitch + column;
    draws d[HALVES];
    int32_t own = warp + lane * WARPS; /* a line of the warp, or its token */
    if (j.row_token) own = own < rows ? j.row_token[f.row0 + own] : 0;
#pragma unroll
    for (int h = 0; SR && h < HALVES; h++) d[h] = draws_of(j, f.t, warp, column + h * STEP);
#pragma unroll 1
    for (int i = 0; warp + i * WARPS < rows; i += MANY) {
        uint4 x[MANY][HALVES];
#pragma unroll
        for (int n = 0; n < MANY; n++) {
            const mt_bf16 *p = from + __shfl_sync(~0u, own, i + n) * pitch;
#pragma unroll
            for (int h = 0; h < HALVES; h++) {
                x[n][h] = make_uint4(0, 0, 0, 0);
                if (inside[h] && warp + (i + n) * WARPS < rows)
                    x[n][h] = __ldg((const uint4 *)(p + h * STEP));
            }
        }
#pragma unroll
        for (int n = 0; n < MANY; n++, to += line) {
            uint32_t bits[HALVES][4];
            uint4 y[HALVES];
            if (warp + (i + n) * WARPS >= rows) break;
#pragma unroll
            for (int h = 0; SR && h < HALVES; h++) draw_row(bits[h], j, d[h], (i + n) * WARPS);
            decode_halves<1>(y, j, x[n], g, enc[MT_ROW], SR ? bits : NULL);
#pragma unroll
            for (int h = 0; h < HALVES; h++)
                if (inside[h]) store_16(to + h * STEP, y[h].x, y[h].y, y[h].z, y[h].w);
        }
    }
}

/* ---- the host's part --------------------------------------------------------------------------
 */

bool mt_cuda_kept_suffices(const job *j)
{
    const side *row = &j->p.sides[MT_ROW];
    const bool counts = j->nans || j->measure[MT_ROW];
    return row->decoded && !counts && !row->options.four_over_six &&
           j->p.group.k <= INT32_MAX - PART;
}

mt_status mt_cuda_quantize_kept(mt_stream *stream, const job *j)
{
    const int64_t parts = mt_ceil_div(j->p.group.k, PART);
    const int64_t lines = mt_cuda_plan_strips(&j->p.group, TILE);
    auto kernel = j->p.sides[MT_ROW].options.sr ? kept_kernel<true> : kept_kernel<false>;
    MT_TRY(follow(stream, kernel, (unsigned)(lines * parts), TILE_THREADS, 0, *j));
    MT_LAUNCHED(stream, "quantize: rows that are kept decoded");
    return MT_OK;
}
