/* The Hopper GEMM of fp8 codes: which kernels there are. */
#include "kernels/cuda/gemm_sm90_kernel.cuh"

/* Elements of P and Q where all are E4M3, or those of the rows (NT: of dY) E5M2. */
enum { ALL = WGMMA_E4M3_E4M3, WIDE_P = WGMMA_E5M2_E4M3, WIDE_Q = WGMMA_E4M3_E5M2 };
/* Scales of blocks: none; powers of two; any; powers of two, of which Q's columns have one each. */
enum scales { NO_SCALES, PACKED, ANY, LEVELED };

/* Of sm90_fp8 in this order: layout, elements, scaled, packed, by rows, parts, pairs, warpgroups,
 * turned, leveled, blocks of 64 rows of a warpgroup. */
template <int LAYOUT, int ELEMENTS, scales S> static gemm_sm90_variant square()
{
    return sm90_variant_of<sm90_fp8<LAYOUT, ELEMENTS, S != NO_SCALES, S == PACKED, false,
                                    LAYOUT == MT_GEMM_NT && S != NO_SCALES ? 2 : 1>>();
}

template <int ELEMENTS, scales S> static gemm_sm90_variant high()
{
    return sm90_variant_of<sm90_fp8<MT_GEMM_TN, ELEMENTS, S != NO_SCALES, S == PACKED, false, 1,
                                    true, 2, false, S == LEVELED, 2>>();
}

template <int ELEMENTS, scales S, int WARPGROUPS> static gemm_sm90_variant by_rows()
{
    return sm90_variant_of<
        sm90_fp8<MT_GEMM_TN, ELEMENTS, S != NO_SCALES, false, true, 1, false, WARPGROUPS>>();
}

template <int ELEMENTS, scales S, bool TURNED> static gemm_sm90_variant tall()
{
    return sm90_variant_of<sm90_fp8<MT_GEMM_NT, ELEMENTS, S != NO_SCALES, S == PACKED, false, 1,
                                    true, 3, TURNED, S == LEVELED>>();
}

template <int ELEMENTS, scales S, bool TURNED> static gemm_sm90_variant broad()
{
    return sm90_variant_of<sm90_fp8<MT_GEMM_NT, ELEMENTS, S != NO_SCALES, false, false, 1, true, 2,
                                    TURNED, S == LEVELED, 2>>();
}

static const gemm_sm90_variant none = {};

/* By MT_CUDA_FP8_E4M3, _E5M2, _BLOCKS, _BLOCKS_ANY, of TN and then of NT. By rows scales are any.
 */
const gemm_sm90_codes mt_cuda_gemm_sm90_codes[MT_CUDA_GEMM_CUBLASLT - MT_CUDA_GEMM_FP8] = {
    /* MT_CUDA_GEMM_FP8 */
    { "wgmma fp8 128x192, f32 sums of 128",
      { square<MT_GEMM_TN, ALL, NO_SCALES>(), square<MT_GEMM_TN, WIDE_Q, NO_SCALES>(),
        square<MT_GEMM_TN, ALL, PACKED>(), square<MT_GEMM_TN, ALL, ANY>(),
        square<MT_GEMM_NT, ALL, NO_SCALES>(), square<MT_GEMM_NT, WIDE_P, NO_SCALES>(),
        square<MT_GEMM_NT, ALL, PACKED>(), square<MT_GEMM_NT, ALL, ANY>() } },
    /* MT_CUDA_GEMM_FP8_HIGH */
    { "wgmma fp8 256x144, f32 sums of 128",
      { high<ALL, NO_SCALES>(), high<WIDE_Q, NO_SCALES>(), high<ALL, PACKED>() } },
    /* MT_CUDA_GEMM_FP8_ROWS */
    { "wgmma fp8 128x192 by rows, f32 sums of 128",
      { by_rows<ALL, NO_SCALES, 2>(), by_rows<WIDE_P, NO_SCALES, 2>(), by_rows<ALL, ANY, 2>(),
        by_rows<ALL, ANY, 2>() } },
    /* MT_CUDA_GEMM_FP8_ROWS_TALL */
    { "wgmma fp8 192x128 by rows, f32 sums of 128",
      { by_rows<ALL, NO_SCALES, 3>(), by_rows<WIDE_P, NO_SCALES, 3>(), by_rows<ALL, ANY, 3>(),
        by_rows<ALL, ANY, 3>() } },
    /* MT_CUDA_GEMM_FP8_HIGH_LEVEL */
    { "wgmma fp8 256x144, rows leveled, f32 sums of 128", { none, none, high<ALL, LEVELED>() } },
    /* MT_CUDA_GEMM_FP8_TALL, _TURNED */
    { "wgmma fp8 192x128, f32 sums of 128",
      { none, none, none, none, tall<ALL, NO_SCALES, false>(), tall<WIDE_P, NO_SCALES, false>(),
        tall<ALL, PACKED, false>() } },
    { "wgmma fp8 192x128 turned, f32 sums of 128",
      { none, none, none, none, tall<ALL, NO_SCALES, true>(), tall<WIDE_Q, NO_SCALES, true>(),
        tall<ALL, PACKED, true>() } },
    /* MT_CUDA_GEMM_FP8_BROAD, _TURNED */
    { "wgmma fp8 256x128, f32 sums of 128",
      { none, none, none, none, broad<ALL, NO_SCALES, false>(),
        broad<WIDE_P, NO_SCALES, false>() } },
    { "wgmma fp8 256x128 turned, f32 sums of 128",
      { none, none, none, none, broad<ALL, NO_SCALES, true>(), broad<WIDE_Q, NO_SCALES, true>() } },
    /* MT_CUDA_GEMM_FP8_LEVEL, _TURNED */
    { "wgmma fp8 192x128, X leveled, f32 sums of 128",
      { none, none, none, none, none, none, tall<ALL, LEVELED, false>() } },
    { "wgmma fp8 192x128 turned, dY leveled, f32 sums of 128",
      { none, none, none, none, none, none, tall<ALL, LEVELED, true>() } },
    /* MT_CUDA_GEMM_FP8_LEVEL_BROAD, _TURNED */
    { "wgmma fp8 256x128, X leveled, f32 sums of 128",
      { none, none, none, none, none, none, broad<ALL, LEVELED, false>() } },
    { "wgmma fp8 256x128 turned, dY leveled, f32 sums of 128",
      { none, none, none, none, none, none, broad<ALL, LEVELED, true>() } },
};
