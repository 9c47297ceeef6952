/* How the cuda GEMM runs a product of bf16 or of fp8 codes: what it chooses, and, for tests and
 * benchmarks, any other way that can run it. */
#pragma once

#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    MT_CUDA_GEMM_SMALL = -2, /* mma.sync: any size and alignment; tiles of 64 x 64 */
    MT_CUDA_GEMM_TILED = -1, /* the same by 128 x 128, of operands at 16 bytes */
    MT_CUDA_GEMM_WIDE,       /* wgmma, not NT: 256 x 192, pairs of blocks share the weights */
    MT_CUDA_GEMM_ALONE,      /* wgmma: 256 x 192; NT: moe_gemm has it, of gathered rows */
    MT_CUDA_GEMM_PINGPONG,   /* wgmma: 128 x 192, pairs share rows (NT: X), one warpgroup stores
                                while the other multiplies */
    MT_CUDA_GEMM_VARIANTS,   /* that moe_gemm has as well */
    /* With C or a bias: ALONE or, for NT, PINGPONG, TURNED and ADDING. With a factor: all but
     * ADDING. */
    MT_CUDA_GEMM_DEEP = MT_CUDA_GEMM_VARIANTS, /* wgmma: ping-pong by five stages */
    MT_CUDA_GEMM_TURNED,      /* wgmma, NT: ping-pong, the result turned, pairs share dY */
    MT_CUDA_GEMM_TURNED_DEEP, /* the same by five stages */
    MT_CUDA_GEMM_ADDING,      /* wgmma, NT with C: ping-pong, more of C ahead */
    MT_CUDA_GEMM_BF16,        /* the variants of bf16 */
    /* wgmma of fp8 codes (gemm_fp8_sm90.cu has a row for each): 128 x 192, pairs share rows, sums
     * of 128 are added up in f32 */
    MT_CUDA_GEMM_FP8 = MT_CUDA_GEMM_BF16,
    MT_CUDA_GEMM_FP8_HIGH, /* TN: 256 x 144, pairs share the weights: no C, no bias */
    /* TN of fp8 with rows on the side of 128, pairs share them: no C, no bias; members of many rows
     */
    MT_CUDA_GEMM_FP8_ROWS,
    MT_CUDA_GEMM_FP8_ROWS_TALL, /* the same by 192 x 128 and three multiplying warpgroups, pairs
                                   share the rows */
    /* HIGH of scales of blocks that are powers of two, by codes of rows that are brought to one
     * scale each first (gemm_level_sm90.cu); members of many rows by one of the two before */
    MT_CUDA_GEMM_FP8_HIGH_LEVEL,
    MT_CUDA_GEMM_FP8_TALL, /* NT of fp8, no scales or powers of two: 192 x 128 by three multiplying
                              warpgroups, pairs share dY */
    MT_CUDA_GEMM_FP8_TALL_TURNED, /* the result turned, pairs share X */
    /* NT of fp8 without scales of blocks, to bf16 without C: 256 x 128, pairs as of the two before;
     * members of few rows */
    MT_CUDA_GEMM_FP8_BROAD,
    MT_CUDA_GEMM_FP8_BROAD_TURNED,
    /* NT of scales of blocks that are powers of two, TALL and TALL_TURNED by codes of X (turned: of
     * dY) that are brought to one scale for a column of a member first (gemm_level_sm90.cu) */
    MT_CUDA_GEMM_FP8_LEVEL,
    MT_CUDA_GEMM_FP8_LEVEL_TURNED,
    /* the same two by 256 x 128, to bf16 without C; members of few rows */
    MT_CUDA_GEMM_FP8_LEVEL_BROAD,
    MT_CUDA_GEMM_FP8_LEVEL_BROAD_TURNED,
    /* cuBLASLt, in the kernel sets that have it (cublaslt.h): one call of a uniform group, one for
     * all members, one a member */
    MT_CUDA_GEMM_CUBLASLT,
    MT_CUDA_GEMM_CUBLASLT_GROUPED,
    MT_CUDA_GEMM_CUBLASLT_LOOP,
    MT_CUDA_GEMM_NAMES
};

enum { MT_CUDA_GEMM_PARTS = 8 }; /* at most */

typedef struct mt_cuda_gemm_path {
    int variant;
    int width;    /* wgmma: most columns of a tile, a multiple of 8 (NT: 64) up to 192 (high: 144,
                     tall, broad: 128) */
    int super;    /* wgmma: tiles of one direction that are taken together */
    int parts;    /* bf16, NT of one member: of its rows, whose results are added; 0, 1: one
                   */
    bool aligned; /* bf16: what does not lie at 16 bytes of equal members' product is moved there
                     first */
    const char *why; /* it is not cuBLASLt, in a kernel set that has it; else NULL */
} mt_cuda_gemm_path;

static inline bool mt_cuda_gemm_is_tiled(int variant)
{
    return variant < 0;
}
static inline bool mt_cuda_gemm_of_codes(int variant)
{
    return variant >= MT_CUDA_GEMM_FP8 && variant < MT_CUDA_GEMM_CUBLASLT;
}

/* "wgmma 256x192, pairs", "mma.sync 128x128", ... */
const char *mt_cuda_gemm_path_name(const mt_cuda_gemm_path *path);

/* The path of mt_gemm for these arguments; operands that are multiplied as bf16 (they are decoded),
 * or as fp8 codes. */
mt_status mt_cuda_gemm_choose(mt_stream *stream, const struct mt_gemm_args *args,
                              mt_cuda_gemm_path *path);
/* Whether a path can run the product; width and super are looked at in those by wgmma. */
bool mt_cuda_gemm_can(mt_stream *stream, const struct mt_gemm_args *args,
                      const mt_cuda_gemm_path *path);
/* Which operand's codes a path that can brings to levels: 1 a, 2 b, 0 neither. */
int mt_cuda_gemm_leveled(const struct mt_gemm_args *args, const mt_cuda_gemm_path *path);
/* mt_gemm by a given path; MT_EUNSUPPORTED where it cannot. */
mt_status mt_cuda_gemm_by(mt_stream *stream, const struct mt_gemm_args *args,
                          const mt_cuda_gemm_path *path);

#ifdef __cplusplus
}
#endif
