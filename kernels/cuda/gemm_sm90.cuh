/* The grouped GEMM of bf16, or of fp8 codes, on Hopper, D(i, j) = sum_p P(i, p) Q(j, p):
 *
 * |    | P: the 64-row side of wgmma | Q: its columns      | D                     | depth       |
 * |----|-----------------------------|---------------------|-----------------------|-------------|
 * | TN | W [M, K], along the depth   | rows of X           | Y[row j, i], bf16     | K           |
 * | NN | W [K, M], across            | rows of dY          | dX[row j, i], bf16    | K: W's rows |
 * | NT | dY [rows, M], across        | X [rows, N], across | dW[i, j], f32 or bf16 | the rows    |
 *
 * With the weights as P, the rows of a member are the columns of the instruction, whose number is
 * chosen while it runs in steps of 8: a member's rows are cut into even pieces of at most `width`
 * and almost nothing is padded. Operands come and results go through tensor maps made on the host;
 * those of ragged matrices end where a member does, so there is no padding in memory either.
 *
 * Codes with scales of blocks are faster the other way round (MT_CUDA_GEMM_FP8_ROWS): with rows of
 * X or dY as P, a thread has two scales for 64 columns, while tiles of 128 rows are padded. Both
 * are faster by three multiplying warpgroups (MT_CUDA_GEMM_FP8_TALL, _ROWS_TALL) where that is cut
 * as well. Members of few rows, whose pieces are narrow, are faster by 256 weights at a time
 * (MT_CUDA_GEMM_FP8_HIGH, _HIGH_LEVEL).
 *
 * A cluster of two blocks shares a tile of P (CLUSTER_N 2: two pieces of Q beside each other) or of
 * Q. The number of pieces is rounded up to an even one (they get smaller), so that no cluster has
 * two members. Blocks are persistent: each takes tiles in turn, in an order that follows from the
 * counts alone. */
#pragma once

#include <cuda.h>

#include "kernels/cuda/gemm.cuh"
#include "kernels/cuda/gemm_path.h"

struct gemm_sm90_maps {
    CUtensorMap p, q, d, c;
};

struct gemm_sm90_args {
    mt_group rows;
    int m, n, k;     /* see the table; n: NT, and by rows; k, NT: padded rows, of fp8 */
    int width;       /* most columns of a tile */
    int super;       /* tiles along the fast direction that are taken together */
    int least, most; /* TN of codes: rows of the members that are multiplied */
    bool add;        /* C */
    bool half;       /* D and C are bf16; f32 only with NT */
    int factors;     /* where those of members are in shared memory; 0: there are none */
    const float *bias;
    int64_t room;                     /* of dots */
    const float *scales_p, *scales_q; /* fp8 with scales of blocks */
    const int32_t *row_token;         /* of gathered rows, */
    const void *gathered;             /* and where they are */
    float *dots;             /* [m / SM90_DOTS][room], sums of rows (moe_gemm_sm90.cuh), or NULL */
    const float *row_weight; /* of gathered rows, after the product, */
    void *weighted;          /* and where the weighted SwiGLU goes, or NULL */
    const uint8_t *levels;   /* of Q's columns, see mt_cuda_gemm_level */
    mt_gemm_factor factor;   /* of gemm_problem */
};

/* One way to cut and to schedule a layout's product; `kernel` takes the maps and the args. */
struct gemm_sm90_variant {
    const void *kernel;
    int threads;
    int tile, width;          /* rows of P in a tile, its most columns */
    int cluster_m, cluster_n; /* blocks that share Q, P */
    int box_q;                /* rows of Q that one copy brings; columns for NT */
    bool by_rows;             /* TN of codes with P rows and Q weights */
    bool turned;              /* NT: P is X, and Q dY */
    bool leveled;             /* of codes that mt_cuda_gemm_level, _level_rows made: Q's */
    bool plain;               /* of codes: to bf16, without C or a bias */
    size_t shared;            /* bytes of shared memory, without the table of members */
};

/* What the result is: the sums, their product with their member's factor, or what the arguments say
 * (C, a bias and a factor, or none of them). */
enum sm90_sums { SM90_PLAIN, SM90_TIMES, SM90_ANY, SM90_SUMS };

/* Of bf16, in the order of mt_cuda_gemm_path's variants; no kernel: there is no such one. */
extern "C" const gemm_sm90_variant mt_cuda_gemm_sm90_fwd[MT_CUDA_GEMM_BF16],
    mt_cuda_gemm_sm90_fwd_times[MT_CUDA_GEMM_BF16], mt_cuda_gemm_sm90_fwd_any[MT_CUDA_GEMM_BF16],
    mt_cuda_gemm_sm90_dgrad[MT_CUDA_GEMM_BF16], mt_cuda_gemm_sm90_dgrad_times[MT_CUDA_GEMM_BF16],
    mt_cuda_gemm_sm90_dgrad_any[MT_CUDA_GEMM_BF16], mt_cuda_gemm_sm90_wgrad[MT_CUDA_GEMM_BF16],
    mt_cuda_gemm_sm90_wgrad_times[MT_CUDA_GEMM_BF16],
    mt_cuda_gemm_sm90_wgrad_any[MT_CUDA_GEMM_BF16];

/* Of fp8, TN and then NT: E4M3 throughout, rows (NT: those of dY) of E5M2, scales of blocks that
 * are powers of two, any scales of blocks. */
enum {
    MT_CUDA_FP8_E4M3,
    MT_CUDA_FP8_E5M2,
    MT_CUDA_FP8_BLOCKS,
    MT_CUDA_FP8_BLOCKS_ANY,
    MT_CUDA_FP8_WGRAD,
    MT_CUDA_FP8_VARIANTS = 2 * MT_CUDA_FP8_WGRAD
};
struct gemm_sm90_codes {
    const char *name;
    gemm_sm90_variant of[MT_CUDA_FP8_VARIANTS]; /* no kernel: it does not multiply those */
};
/* In the order of mt_cuda_gemm_path's variants, from MT_CUDA_GEMM_FP8 on. */
extern "C" const gemm_sm90_codes mt_cuda_gemm_sm90_codes[MT_CUDA_GEMM_CUBLASLT - MT_CUDA_GEMM_FP8];

enum {
    SM90_WIDTH = 192,                    /* most columns of a tile */
    SM90_DOTS = 16,                      /* columns in a partial sum of gemm_sm90_args.dots */
    SM90_SHARED = 232448,                /* bytes that a block can have */
    SM90_MEMBER_BYTES = 2 * sizeof(int), /* of the table of members: rows and units before each, */
    SM90_FACTOR_BYTES = sizeof(float2),  /* and after those of all their factors */
};

/* The problem of operands that are codes; false: none of these kernels reads them. */
extern "C" bool mt_cuda_gemm_codes(gemm_problem *g, const struct mt_gemm_args *args);
/* Its operands where the kernels read them, as the path reads them, and their factor, in operand
 * memory. */
extern "C" mt_status mt_cuda_gemm_place_codes(mt_stream *stream, gemm_problem *g,
                                              const struct mt_gemm_args *args,
                                              const mt_cuda_gemm_path *path);
/* Padded codes of one operand of NT, `lines` columns, by their column's largest scale in the
 * member: to `to`, which may be where they are; levels [members, mt_cuda_gemm_levels]: the scales'
 * exponents, as f32 has them, 0 where all codes are 0 and all scales 1. */
extern "C" mt_status mt_cuda_gemm_level(mt_stream *stream, void *to, uint8_t *levels,
                                        const gemm_operand *x, const float *scales,
                                        const mt_group *rows, int64_t lines);
/* The same of TN's rows, of which there are at most `room`, each by its own largest scale, but for
 * members of more than MT_GEMM_FP8_LEVELED; levels [room]. */
extern "C" mt_status mt_cuda_gemm_level_rows(mt_stream *stream, void *to, uint8_t *levels,
                                             const gemm_operand *x, const float *scales,
                                             const mt_group *rows, int64_t room);
/* Of so many lines. */
static inline int64_t mt_cuda_gemm_levels(int64_t lines)
{
    return mt_ceil_div(lines, MT_PADDED_PART) * MT_PADDED_PART;
}
/* NT in the roles that the turned kernels have: X and dY, and the extents of the result, exchanged.
 */
extern "C" void mt_cuda_gemm_sm90_turn(gemm_problem *g);
/* Whether a kernel can run the product so: dtypes, alignment, extents. */
extern "C" bool mt_cuda_gemm_sm90_fits(const gemm_problem *g, const mt_cuda_gemm_path *path,
                                       const gemm_sm90_variant *variant);
/* Whether there is a kernel for the path, and it can. */
extern "C" bool mt_cuda_gemm_sm90_suits(const gemm_problem *g, const mt_cuda_gemm_path *path);
/* Pieces of rows that ping-pong takes together for each tile of TN's or NN's weights: one, where a
 * member's weights stay in the L2 while it goes on to the next piece. */
extern "C" int mt_cuda_gemm_sm90_together(const gemm_problem *g);
/* The best way to cut it, as far as the host can know: from capacities, not counts. */
extern "C" void mt_cuda_gemm_sm90_plan(mt_cuda_gemm_path *path, const gemm_problem *g,
                                       int multiprocessors);
/* The width of NT by tiles of 256 rows. */
extern "C" int mt_cuda_gemm_sm90_wgrad_width(const gemm_problem *g, int multiprocessors);
/* A matrix for the copies: members of `rows` rows beside each other, or, where rows is 0, ragged
 * ones. */
struct gemm_sm90_matrix {
    const char *name;
    const void *data;
    int64_t columns, rows, members;
    int box_rows;
    size_t size; /* of an element */
};
extern "C" mt_status mt_cuda_gemm_sm90_map(CUtensorMap *map, const gemm_sm90_matrix *x);
extern "C" gemm_sm90_args mt_cuda_gemm_sm90_args(const gemm_problem *g,
                                                 const mt_cuda_gemm_path *path);
extern "C" mt_status mt_cuda_gemm_sm90_launch(mt_stream *stream, const gemm_sm90_variant *variant,
                                              const gemm_sm90_maps *maps,
                                              const gemm_sm90_args *args);
extern "C" mt_status mt_cuda_gemm_sm90(mt_stream *stream, const gemm_problem *g,
                                       const mt_cuda_gemm_path *path);
