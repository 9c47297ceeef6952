/* GEMMs of the expert layer with the ops beside them: one kernel on Hopper where operands are bf16,
 * once they are plain, and aligned, else the ops in turn. */
#include <stdio.h>

#include "kernels/check.h"
#include "kernels/cuda/cublaslt.h"
#include "kernels/cuda/moe_gemm_path.h"
#include "kernels/cuda/moe_gemm_sm90_variants.cuh"

enum {
    THREADS = 256,
    LONG_DEPTH = 4096,  /* ping-pong moves too much past it, */
    SHORT_DEPTH = 1024, /* and past this where tiles of rows are gated, */
    FAIR_DEPTH = 1536,  /* or this, if they are gathered (timed in layers: TRIED.md) */
    TOGETHER = 8,
    FEW_DOTS = 8, /* parts of a sum that are added as they are asked for */
    RATE = 155,   /* FLOP in the time of a byte, on an H200 */
    /* Where a tile has room for all of F, dY is gathered rather than spread; measured with D 1536,
     * while layers of larger F lose by the weighted activations alone. */
    AFTER_F = 256,
    AFTER_D = 2048,
    LOSS = 15,    /* percent of the product's time that one kernel loses to the other work: a tile's
                     epilogue is not hidden, lines come later than boxes; */
    LOSS_F32 = 25 /* with gradients of f32 there is more of it */
};

static bool weighs_after(const struct mt_moe_gemm_args *args)
{
    return args->gemm.layout == MT_GEMM_NN && args->row_token;
}

bool mt_cuda_weighs_after(int64_t d, int64_t f)
{
    return f == AFTER_F && d <= AFTER_D && d % 8 == 0;
}

/* The product where a fused kernel may run it: on Hopper, of bf16, where the kernel set's product
 * would be ours, too; fp8 multiplies faster alone. */
static bool describe(gemm_problem *g, mt_stream *stream, const struct mt_moe_gemm_args *args)
{
    mt_cublaslt *lt = mt_cuda_cublaslt(stream);
    *g = gemm_problem();
    if (lt && mt_cublaslt_groups(lt) != MT_LT_OURS) return false;
    if (!mt_cuda_is_hopper(stream) || args->dtype != MT_BF16) return false;
    if (mt_cuda_reads_fp8(stream) && mt_cuda_gemm_codes(g, &args->gemm)) return false;
    *g = gemm_problem();
    if (!mt_cuda_gemm_foresee(g, &args->gemm)) return false;
    if (args->gathers_b) mt_cuda_gemm_sm90_turn(g);
    const bool uniform = !g->rows.first_dims && !mt_gemm_has_factor(&g->factor);
    return !gemm_is_empty(g) && !(lt && uniform);
}

/* dots [parts, room]: a row's first becomes their sum. */
static __global__ void __launch_bounds__(THREADS)
    add_dots_kernel(float *dots, int parts, int64_t room, const int64_t *rows_used)
{
    const int64_t rows = rows_used ? min(room, *rows_used) : room;
    MT_GRID_STRIDE(row, rows)
    {
        float sum = 0;
#pragma unroll 8
        for (int p = 0; p < parts; p++) sum += dots[p * room + row];
        dots[row] = sum;
    }
}

/* A thread for each (token, slot): the sum of its row, which lies in so many parts, over the
 * weight. */
static __global__ void __launch_bounds__(THREADS)
    dots_kernel(struct mt_moe_gemm_args a, int parts, int64_t room)
{
    MT_GRID_STRIDE(i, a.tokens * a.top_k)
    {
        const float w = ((const float *)a.weights)[i], *dots = (const float *)a.scratch;
        const int64_t row = a.position[i];
        const bool after = a.row_token; /* the dots are of unweighted rows */
        float sum = after ? -0.0f : 0;  /* of one part: as it is */
#pragma unroll 8
        for (int p = 0; p < parts && row >= 0; p++) sum += dots[p * room + row];
        ((float *)a.dweights)[i] = row < 0 ? 0 : after ? sum : w != 0 ? sum / w : 0;
    }
}

static __global__ void __launch_bounds__(THREADS)
    row_weights_kernel(struct mt_moe_gemm_args a, float *rows)
{
    MT_GRID_STRIDE(i, a.tokens * a.top_k)
    if (a.position[i] >= 0) rows[a.position[i]] = ((const float *)a.weights)[i];
}
static mt_status place_weights(mt_stream *stream, const struct mt_moe_gemm_args *args,
                               const gemm_problem *g)
{
    const int64_t slots = args->tokens * args->top_k;
    if (!weighs_after(args) || !slots) return MT_OK;
    row_weights_kernel<<<mt_blocks(stream, slots, THREADS), THREADS, 0, mt_cuda_stream(stream)>>>(
        *args, mt_cuda_moe_gemm_row_weights(args, g));
    MT_LAUNCHED(stream, "moe_gemm weights");
    return MT_OK;
}

/* A line of partial sums lies along the rows, in which those of a token's slots are apart: but for
 * few, they are added where they lie before they are asked for. */
static mt_status add_dots(mt_stream *stream, const struct mt_moe_gemm_args *args,
                          const gemm_problem *g)
{
    const int64_t slots = args->dweights ? args->tokens * args->top_k : 0;
    const int64_t room = mt_cuda_moe_gemm_room(&g->rows);
    cudaStream_t on = mt_cuda_stream(stream);
    if (!slots) return MT_OK;
    int parts = weighs_after(args) ? 1 : (int)(g->cols / SM90_DOTS);
    if (parts > FEW_DOTS) {
        add_dots_kernel<<<mt_blocks(stream, room, THREADS), THREADS, 0, on>>>(
            (float *)args->scratch, parts, room, args->rows_used);
        MT_LAUNCHED(stream, "moe_gemm dweights");
        parts = 1;
    }
    dots_kernel<<<mt_blocks(stream, slots, THREADS), THREADS, 0, on>>>(*args, parts, room);
    MT_LAUNCHED(stream, "moe_gemm dweights");
    return MT_OK;
}

/* The fused kernel on operands made plain. */
static mt_status run(mt_stream *stream, const struct mt_moe_gemm_args *args,
                     const mt_cuda_gemm_path *path)
{
    gemm_plain plain;
    gemm_problem g = {};
    MT_REQUIRE(args->scratch || !(args->dweights || weighs_after(args)), MT_EINVAL,
               "moe_gemm: scratch is NULL");
    MT_TRY(mt_cuda_gemm_plain(stream, &plain, &args->gemm));
    MT_TRY(mt_cuda_gemm_describe(&g, &plain.args));
    g.factor = plain.factor;
    if (args->gathers_b) mt_cuda_gemm_sm90_turn(&g);
    MT_TRY(place_weights(stream, args, &g));
    MT_TRY(mt_cuda_moe_gemm_sm90(stream, args, &g, path));
    return add_dots(stream, args, &g);
}

/* Whether one kernel loses less than the parts take to move rows and z once more. */
static bool gains(const struct mt_moe_gemm_args *args, const gemm_problem *g)
{
    bool wgrad = g->layout == MT_GEMM_NT;
    int64_t k = wgrad ? g->cols : g->depth, n = wgrad ? g->height : g->cols;
    int64_t bytes = (args->row_token ? 4 * k : 0) + (args->act ? 3 * n : 0); /* of a row */
    int64_t loss = wgrad && g->d_real ? LOSS_F32 : LOSS;
    return args->z || args->gathers_b || 100 * RATE * bytes > loss * (2 * k * n);
}

/* As the product alone, but for what was measured otherwise: a pair stalls wherever one of its
 * blocks waits for lines; ping-pong hides the work of SwiGLU's gradient. False: no
 * kernel of them all. */
static bool choose(gemm_problem *g, mt_stream *stream, const struct mt_moe_gemm_args *args,
                   mt_cuda_gemm_path *path)
{
    path->variant = MT_CUDA_GEMM_TILED;
    if (!describe(g, stream, args)) return false;
    mt_cuda_gemm_sm90_plan(path, g, mt_cuda_multiprocessors(stream));
    if (path->variant == MT_CUDA_GEMM_DEEP) path->variant = MT_CUDA_GEMM_PINGPONG;
    const int gated_depth = args->row_token ? FAIR_DEPTH : SHORT_DEPTH;
    if (g->layout == MT_GEMM_NT || (args->act && g->depth > gated_depth) ||
        (args->row_token && path->variant == MT_CUDA_GEMM_WIDE))
        path->variant = MT_CUDA_GEMM_ALONE, path->super = TOGETHER;
    if (path->variant == MT_CUDA_GEMM_PINGPONG) path->super = mt_cuda_gemm_sm90_together(g);
    if (g->layout == MT_GEMM_NT)
        path->width = mt_cuda_gemm_sm90_wgrad_width(g, mt_cuda_multiprocessors(stream));
    if (args->gathers_b) path->width = SM90_WIDTH;
    if (weighs_after(args)) {
        path->variant = MT_CUDA_GEMM_PINGPONG, path->width = SM90_AFTER_WIDTH, path->super = 1;
        return mt_cuda_weighs_after(g->depth, g->cols) &&
               mt_cuda_moe_gemm_sm90_suits(args, g, path);
    }
    if (args->act && mt_gemm_has_factor(&g->factor) &&
        path->variant == MT_CUDA_GEMM_PINGPONG) /* gated, has no factor */
        path->variant = MT_CUDA_GEMM_ALONE, path->super = TOGETHER;
    if (args->z && path->width == SM90_WIDTH && g->depth <= LONG_DEPTH)
        path->variant = MT_CUDA_GEMM_PINGPONG, path->super = mt_cuda_gemm_sm90_together(g);
    return mt_cuda_moe_gemm_sm90_suits(args, g, path) && gains(args, g);
}

bool mt_cuda_moe_gemm_choose(mt_stream *stream, const struct mt_moe_gemm_args *args,
                             mt_cuda_gemm_path *path)
{
    gemm_problem g;
    return choose(&g, stream, args, path);
}

bool mt_cuda_moe_gemm_fuses(mt_stream *stream, const struct mt_moe_gemm_args *args, size_t *scratch)
{
    mt_cuda_gemm_path path;
    gemm_problem g;
    if (!choose(&g, stream, args, &path)) return false;
    int64_t dots = weighs_after(args) ? 2 : args->dweights ? g.cols / SM90_DOTS : 0;
    *scratch = (size_t)(dots * mt_cuda_moe_gemm_room(&g.rows)) * sizeof(float);
    return true;
}

mt_status mt_cuda_moe_gemm_by(mt_stream *stream, const struct mt_moe_gemm_args *args,
                              const mt_cuda_gemm_path *path)
{
    gemm_problem g;
    MT_TRY(mt_moe_gemm_check(args));
    MT_REQUIRE(describe(&g, stream, args) && !mt_cuda_gemm_is_tiled(path->variant) &&
                   mt_cuda_moe_gemm_sm90_suits(args, &g, path),
               MT_EUNSUPPORTED, "moe_gemm: variant %d, width %d, %d together cannot run this",
               path->variant, path->width, path->super);
    return run(stream, args, path);
}

void mt_cuda_moe_gemm_print(char text[MT_CUDA_MOE_GEMM_TEXT], const struct mt_moe_gemm_args *args,
                            const mt_cuda_gemm_path *path, bool fused)
{
    const char *join = fused ? " + " : ", then ";
    snprintf(text, MT_CUDA_MOE_GEMM_TEXT, "%s%s%s%s%s%s", args->row_token ? "gather" : "",
             args->row_token ? join : "", mt_cuda_gemm_path_name(path),
             args->act || args->z ? join : "",
             args->act ? "swiglu"
             : args->z ? "swiglu backward"
                       : "",
             fused ? ", one kernel" : "");
}

template <typename T>
static mt_status moe_gemm(mt_stream *stream, const struct mt_moe_gemm_args *args)
{
    gemm_problem g;
    mt_cuda_gemm_path path;
    if (!choose(&g, stream, args, &path)) return mt_moe_gemm_parts(stream, args);
    return run(stream, args, &path);
}
MT_CUDA_OP(moe_gemm)
