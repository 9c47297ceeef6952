/* Argument checks of routing. */
#include "kernels/moe.h"

#include "kernels/check.h"

/* 1 <= top_k <= experts, and the T top_k routed rows are numbered in int32. */
static mt_status check_choice(const char *op, int64_t tokens, int64_t experts, int64_t top_k)
{
    MT_REQUIRE(tokens >= 0, MT_EINVAL, "%s: tokens is %lld, must not be negative", op,
               (long long)tokens);
    MT_REQUIRE(experts > 0 && experts <= INT32_MAX, MT_EINVAL,
               "%s: experts is %lld, must be in 1..2^31-1", op, (long long)experts);
    MT_REQUIRE(top_k > 0 && top_k <= experts, MT_EINVAL, "%s: top_k is %lld, must be in 1..%lld",
               op, (long long)top_k, (long long)experts);
    MT_REQUIRE(tokens <= INT32_MAX / top_k, MT_EINVAL,
               "%s: %lld tokens x top_k %lld rows do not fit int32", op, (long long)tokens,
               (long long)top_k);
    return MT_OK;
}

mt_status mt_router_fwd_check(const struct mt_router_fwd_args *args)
{
    const char *op = "router_fwd";
    int64_t n = args->tokens;
    MT_TRY(check_choice(op, args->tokens, args->experts, args->top_k));
    MT_CHECK_EXTENT(op, args, width);
    MT_CHECK_POINTER(op, args, x, n * args->width);
    MT_CHECK_POINTER(op, args, wr, args->width);
    MT_CHECK_POINTER(op, args, probs, n);
    MT_CHECK_POINTER(op, args, lse, n);
    MT_CHECK_POINTER(op, args, weights, n);
    MT_CHECK_POINTER(op, args, chosen, n);
    MT_CHECK_POINTER(op, args, prob_sum, 1);
    MT_CHECK_POINTER(op, args, z_sum, 1);
    MT_CHECK_POINTER(op, args, counts, 1);
    return MT_OK;
}

mt_status mt_router_bwd_check(const struct mt_router_bwd_args *args)
{
    const char *op = "router_bwd";
    int64_t n = args->tokens;
    MT_TRY(check_choice(op, args->tokens, args->experts, args->top_k));
    MT_CHECK_EXTENT(op, args, width);
    MT_CHECK_POINTER(op, args, dlogits, n);
    MT_CHECK_POINTER(op, args, probs, n);
    MT_REQUIRE(!args->dx || args->wr || args->width == 0, MT_EINVAL, "%s: dx needs wr", op);
    MT_REQUIRE(!args->dwr || args->x || n * args->width == 0, MT_EINVAL, "%s: dwr needs x", op);
    MT_REQUIRE(!args->dweights || (args->weights && args->chosen) || n == 0, MT_EINVAL,
               "%s: dweights needs weights and chosen", op);
    MT_REQUIRE(!args->dz_sum || args->lse || n == 0, MT_EINVAL, "%s: dz_sum needs lse", op);
    return MT_OK;
}

mt_status mt_route_plan_check(const struct mt_route_plan_args *args)
{
    const char *op = "route_plan";
    int64_t n = args->tokens;
    MT_TRY(check_choice(op, args->tokens, args->experts, args->top_k));
    MT_CHECK_EXTENT(op, args, capacity);
    MT_CHECK_POINTER(op, args, chosen, n);
    MT_CHECK_POINTER(op, args, counts, 1);
    MT_CHECK_POINTER(op, args, offsets, 1);
    MT_CHECK_POINTER(op, args, row_token, n);
    MT_CHECK_POINTER(op, args, position, n);
    for (int i = 0; i < MT_ROUTE_WIDTHS; i++) MT_CHECK_EXTENT(op, args, widths[i]);
    return MT_OK;
}

mt_status mt_gather_fwd_check(const struct mt_gather_fwd_args *args)
{
    const char *op = "gather_fwd";
    MT_CHECK_EXTENT(op, args, tokens);
    MT_CHECK_EXTENT(op, args, width);
    MT_CHECK_EXTENT(op, args, rows);
    MT_CHECK_POINTER(op, args, y, args->rows * args->width);
    MT_CHECK_POINTER(op, args, x, args->rows * args->width);
    MT_CHECK_POINTER(op, args, row_token, args->rows);
    MT_CHECK_POINTER(op, args, rows_used, 1);
    if (args->position) MT_CHECK_POSITIVE(op, args, top_k);
    return MT_OK;
}

mt_status mt_gather_bwd_check(const struct mt_gather_bwd_args *args)
{
    const char *op = "gather_bwd";
    int64_t n = args->tokens * args->width;
    MT_CHECK_EXTENT(op, args, tokens);
    MT_CHECK_EXTENT(op, args, width);
    MT_CHECK_POSITIVE(op, args, top_k);
    MT_CHECK_POINTER(op, args, dx, n);
    MT_CHECK_POINTER(op, args, dy, n);
    MT_CHECK_POINTER(op, args, position, n);
    return MT_OK;
}

mt_status mt_combine_fwd_check(const struct mt_combine_fwd_args *args)
{
    const char *op = "combine_fwd";
    int64_t n = args->tokens * args->width;
    MT_CHECK_EXTENT(op, args, tokens);
    MT_CHECK_EXTENT(op, args, width);
    MT_CHECK_POSITIVE(op, args, top_k);
    MT_CHECK_POINTER(op, args, y, n);
    MT_CHECK_POINTER(op, args, x, n);
    MT_CHECK_POINTER(op, args, weights, n);
    MT_CHECK_POINTER(op, args, position, n);
    return MT_OK;
}

mt_status mt_combine_bwd_check(const struct mt_combine_bwd_args *args)
{
    const char *op = "combine_bwd";
    int64_t n = args->tokens * args->width;
    MT_CHECK_EXTENT(op, args, tokens);
    MT_CHECK_EXTENT(op, args, width);
    MT_CHECK_POSITIVE(op, args, top_k);
    MT_REQUIRE(args->dx || args->dweights || n == 0, MT_EINVAL, "%s: dx and dweights are NULL", op);
    MT_CHECK_POINTER(op, args, dy, n);
    MT_REQUIRE(!args->dweights || args->x || n == 0, MT_EINVAL, "%s: dweights needs x", op);
    MT_REQUIRE(args->dweights || !args->x, MT_EINVAL, "%s: x is for dweights", op);
    MT_CHECK_POINTER(op, args, weights, args->tokens);
    MT_CHECK_POINTER(op, args, position, args->tokens);
    return MT_OK;
}

mt_status mt_weights_bwd_check(const struct mt_weights_bwd_args *args)
{
    const char *op = "weights_bwd";
    MT_CHECK_EXTENT(op, args, tokens);
    MT_CHECK_EXTENT(op, args, width);
    MT_CHECK_POSITIVE(op, args, top_k);
    MT_CHECK_POINTER(op, args, dweights, args->tokens);
    MT_REQUIRE(!args->dz == !args->z, MT_EINVAL, "%s: dz and z go together", op);
    MT_CHECK_POINTER(op, args, position, args->tokens);
    return MT_OK;
}

static mt_status check_aux(const char *op, mt_aux_kind kind, int64_t layers, int64_t tokens,
                           int64_t experts, int64_t top_k)
{
    MT_REQUIRE(kind == MT_AUX_NONE || kind == MT_AUX_SWITCH || kind == MT_AUX_HF, MT_EINVAL,
               "%s: kind %d is not known", op, (int)kind);
    MT_REQUIRE(layers >= 0 && layers <= MT_AUX_MAX_LAYERS, MT_EINVAL,
               "%s: layers is %lld, must be in 0..%d", op, (long long)layers, MT_AUX_MAX_LAYERS);
    return check_choice(op, tokens, experts, top_k);
}

mt_status mt_aux_loss_fwd_check(const struct mt_aux_loss_fwd_args *args)
{
    const char *op = "aux_loss_fwd";
    MT_TRY(check_aux(op, args->kind, args->layers, args->tokens, args->experts, args->top_k));
    MT_CHECK_POINTER(op, args, loss, 1);
    MT_CHECK_POINTER(op, args, prob_sums, args->layers);
    MT_CHECK_POINTER(op, args, counts, args->layers);
    MT_REQUIRE(!args->z_sums || args->z_loss, MT_EINVAL, "%s: z_sums needs z_loss", op);
    return MT_OK;
}

mt_status mt_aux_loss_bwd_check(const struct mt_aux_loss_bwd_args *args)
{
    const char *op = "aux_loss_bwd";
    MT_TRY(check_aux(op, args->kind, args->layers, args->tokens, args->experts, args->top_k));
    MT_CHECK_POINTER(op, args, dprob_sums, args->layers);
    MT_CHECK_POINTER(op, args, counts, args->layers);
    return MT_OK;
}

mt_status mt_router_bias_update_check(const struct mt_router_bias_update_args *args)
{
    const char *op = "router_bias_update";
    MT_CHECK_EXTENT(op, args, experts);
    MT_CHECK_POINTER(op, args, bias, args->experts);
    MT_CHECK_POINTER(op, args, load, args->experts);
    return MT_OK;
}
