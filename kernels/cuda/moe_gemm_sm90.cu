/* The fused Hopper kernels of moe_gemm on the host: what they take, their tensor maps, their
 * launch.
 */
#include "kernels/cuda/moe_gemm_sm90_variants.cuh"

enum { ROWS_OF_GATE = 64, PIECE = 32, TILE = 256 };

/* Gated, ping-pong has neither bias nor factor. */
static const gemm_sm90_variant *variant_of(const struct mt_moe_gemm_args *args,
                                           const gemm_problem *g, int variant)
{
    if (g->layout == MT_GEMM_TN && variant == MT_CUDA_GEMM_PINGPONG &&
        (g->bias || mt_gemm_has_factor(&g->factor)))
        variant = MT_CUDA_GEMM_ALONE;
    if (args->gathers_b) return &mt_cuda_moe_gemm_wgrad_turned;
    if (args->gemm.layout == MT_GEMM_NN && args->row_token) return &mt_cuda_moe_gemm_after;
    if (args->gemm.layout == MT_GEMM_TN)
        return &mt_cuda_moe_gemm_fwd[args->row_token != NULL][variant];
    return args->gemm.layout == MT_GEMM_NN ? &mt_cuda_moe_gemm_dgrad[variant]
                                           : &mt_cuda_moe_gemm_wgrad[variant];
}

static bool fits(const void *p)
{
    return (uintptr_t)p % 16 == 0;
}

bool mt_cuda_moe_gemm_sm90_suits(const struct mt_moe_gemm_args *args, const gemm_problem *g,
                                 const mt_cuda_gemm_path *path)
{
    const bool wgrad = g->layout == MT_GEMM_NT;
    if (path->variant < 0 ||
        path->variant >= (wgrad ? (int)MT_CUDA_GEMM_PINGPONG : (int)MT_CUDA_GEMM_VARIANTS))
        return false;
    const gemm_sm90_variant *variant = variant_of(args, g, path->variant);
    const bool after = args->gemm.layout == MT_GEMM_NN && args->row_token; /* has no factor */
    if (after && (mt_gemm_has_factor(&g->factor) || g->cols > TILE || !fits(args->act)))
        return false;
    if (!mt_cuda_gemm_sm90_fits(g, path, variant)) return false;
    if (wgrad) return args->row_token && (!args->gathers_b || g->height % TILE == 0);
    int64_t f = g->layout == MT_GEMM_TN ? g->cols / 2 : g->cols;
    const void *beside = g->layout == MT_GEMM_TN ? args->act : args->z;
    return beside && fits(beside) && f % ROWS_OF_GATE == 0;
}

static mt_status make_maps(gemm_sm90_maps *maps, const struct mt_moe_gemm_args *args,
                           const gemm_problem *g, const gemm_sm90_variant *variant)
{
    bool wgrad = g->layout == MT_GEMM_NT, gated = g->layout == MT_GEMM_TN;
    int64_t members = g->rows.members, z = gated ? g->cols : 2 * g->cols;
    gemm_sm90_matrix rows = { "b",     g->a.data,      g->a.width,     0,
                              members, variant->box_q, sizeof(mt_bf16) };
    gemm_sm90_matrix weight = { "a",     g->b.data, g->b.width,     gated ? g->cols : g->depth,
                                members, 64,        sizeof(mt_bf16) };
    if (wgrad) { /* P is dY; Q comes line by line */
        rows.box_rows = 64;
        size_t size = g->d_real ? sizeof(float) : sizeof(mt_bf16);
        gemm_sm90_matrix d = { "d", g->d, g->cols, g->height, members, 64, size }, c = d;
        if (args->gathers_b)
            d.columns = g->height, d.rows = g->cols, d.box_rows = g->d_real ? 32 : 64, c = d;
        if (g->c) c.data = g->c;
        MT_TRY(mt_cuda_gemm_sm90_map(&maps->p, &rows));
        MT_TRY(mt_cuda_gemm_sm90_map(&maps->q, &rows));
        MT_TRY(mt_cuda_gemm_sm90_map(&maps->d, &d));
        return mt_cuda_gemm_sm90_map(&maps->c, &c);
    }
    gemm_sm90_matrix d = { "d", g->d, z, 0, members, PIECE, sizeof(mt_bf16) };
    gemm_sm90_matrix c = { "act", args->act, g->cols / 2, 0, members, PIECE, sizeof(mt_bf16) };
    if (!gated) c.name = "z", c.data = args->z, c.columns = z;
    MT_TRY(mt_cuda_gemm_sm90_map(&maps->p, &weight));
    MT_TRY(mt_cuda_gemm_sm90_map(&maps->q, &rows)); /* not read where lines are gathered */
    MT_TRY(mt_cuda_gemm_sm90_map(&maps->d, &d));
    return mt_cuda_gemm_sm90_map(&maps->c, &c);
}

mt_status mt_cuda_moe_gemm_sm90_prepare(gemm_sm90_maps *maps, gemm_sm90_args *kernel_args,
                                        const gemm_sm90_variant **variant,
                                        const struct mt_moe_gemm_args *args, const gemm_problem *g,
                                        const mt_cuda_gemm_path *path)
{
    *variant = variant_of(args, g, path->variant);
    MT_TRY(make_maps(maps, args, g, *variant));
    *kernel_args = mt_cuda_gemm_sm90_args(g, path);
    if (args->dweights) {
        kernel_args->dots = (float *)args->scratch;
        kernel_args->room = mt_cuda_moe_gemm_room(&g->rows);
    }
    if (args->row_token && args->z) {
        kernel_args->row_weight = mt_cuda_moe_gemm_row_weights(args, g);
        kernel_args->weighted = args->act;
    }
    kernel_args->row_token = args->row_token;
    kernel_args->gathered = g->layout == MT_GEMM_NT ? g->b.data : g->a.data;
    return MT_OK;
}

mt_status mt_cuda_moe_gemm_sm90(mt_stream *stream, const struct mt_moe_gemm_args *args,
                                const gemm_problem *g, const mt_cuda_gemm_path *path)
{
    gemm_sm90_maps maps;
    gemm_sm90_args kernel_args;
    const gemm_sm90_variant *variant;
    MT_TRY(mt_cuda_moe_gemm_sm90_prepare(&maps, &kernel_args, &variant, args, g, path));
    return mt_cuda_gemm_sm90_launch(stream, variant, &maps, &kernel_args);
}
