/* Argument checks of the normalisations. */
#include "kernels/norm.h"

#include "kernels/check.h"

mt_status mt_rmsnorm_fwd_check(const struct mt_rmsnorm_fwd_args *args)
{
    MT_CHECK_EXTENT("rmsnorm_fwd", args, rows);
    MT_CHECK_EXTENT("rmsnorm_fwd", args, width);
    MT_REQUIRE(args->eps >= 0, MT_EINVAL, "rmsnorm_fwd: eps is %g, must not be negative",
               args->eps);
    int64_t count = args->rows * args->width;
    MT_CHECK_POINTER("rmsnorm_fwd", args, y, count);
    MT_CHECK_POINTER("rmsnorm_fwd", args, rstd, count);
    MT_CHECK_POINTER("rmsnorm_fwd", args, x, count);
    MT_CHECK_POINTER("rmsnorm_fwd", args, w, count);
    return MT_OK;
}

mt_status mt_rmsnorm_bwd_check(const struct mt_rmsnorm_bwd_args *args)
{
    MT_CHECK_EXTENT("rmsnorm_bwd", args, rows);
    MT_CHECK_EXTENT("rmsnorm_bwd", args, width);
    int64_t count = args->rows * args->width;
    MT_CHECK_POINTER("rmsnorm_bwd", args, dx, count);
    MT_CHECK_POINTER("rmsnorm_bwd", args, dy, count);
    MT_CHECK_POINTER("rmsnorm_bwd", args, x, count);
    MT_CHECK_POINTER("rmsnorm_bwd", args, rstd, count);
    MT_CHECK_POINTER("rmsnorm_bwd", args, w, count);
    return MT_OK;
}

/* What both passes of qk_norm_rope ask of the shape. */
static mt_status check_heads(const char *op, int64_t query_heads, int64_t kv_heads,
                             int64_t head_dim, mt_qk_norm norm)
{
    MT_REQUIRE(query_heads > 0 && kv_heads > 0, MT_EINVAL,
               "%s: query_heads is %lld, kv_heads is %lld, both must be positive", op,
               (long long)query_heads, (long long)kv_heads);
    MT_REQUIRE(head_dim >= 0 && head_dim % 2 == 0, MT_EINVAL,
               "%s: head_dim is %lld, must be even: it is rotated in pairs", op,
               (long long)head_dim);
    MT_REQUIRE((unsigned)norm <= MT_QK_NORM_PROJECTION, MT_EINVAL, "%s: norm is %d, unknown", op,
               (int)norm);
    return MT_OK;
}

mt_status mt_qk_norm_rope_fwd_check(const struct mt_qk_norm_rope_fwd_args *args)
{
    MT_CHECK_EXTENT("qk_norm_rope_fwd", args, batch);
    MT_CHECK_EXTENT("qk_norm_rope_fwd", args, sequence);
    MT_TRY(check_heads("qk_norm_rope_fwd", args->query_heads, args->kv_heads, args->head_dim,
                       args->norm));
    MT_REQUIRE(args->eps >= 0, MT_EINVAL, "qk_norm_rope_fwd: eps is %g, must not be negative",
               args->eps);
    int64_t count = args->batch * args->sequence * args->head_dim;
    int64_t normed = args->norm == MT_QK_NORM_NONE ? 0 : count;
    MT_CHECK_POINTER("qk_norm_rope_fwd", args, y, count);
    MT_CHECK_POINTER("qk_norm_rope_fwd", args, x, count);
    MT_CHECK_POINTER("qk_norm_rope_fwd", args, cos_table, count);
    MT_CHECK_POINTER("qk_norm_rope_fwd", args, sin_table, count);
    MT_CHECK_POINTER("qk_norm_rope_fwd", args, rstd, normed);
    MT_CHECK_POINTER("qk_norm_rope_fwd", args, w_q, normed);
    MT_CHECK_POINTER("qk_norm_rope_fwd", args, w_k, normed);
    MT_REQUIRE(args->y != args->x || normed == 0, MT_EINVAL,
               "qk_norm_rope_fwd: y is x, allowed without normalisation only");
    return MT_OK;
}

mt_status mt_qk_norm_rope_bwd_check(const struct mt_qk_norm_rope_bwd_args *args)
{
    MT_CHECK_EXTENT("qk_norm_rope_bwd", args, batch);
    MT_CHECK_EXTENT("qk_norm_rope_bwd", args, sequence);
    MT_TRY(check_heads("qk_norm_rope_bwd", args->query_heads, args->kv_heads, args->head_dim,
                       args->norm));
    int64_t count = args->batch * args->sequence * args->head_dim;
    int64_t normed = args->norm == MT_QK_NORM_NONE ? 0 : count;
    MT_CHECK_POINTER("qk_norm_rope_bwd", args, dx, count);
    MT_CHECK_POINTER("qk_norm_rope_bwd", args, dy, count);
    MT_CHECK_POINTER("qk_norm_rope_bwd", args, cos_table, count);
    MT_CHECK_POINTER("qk_norm_rope_bwd", args, sin_table, count);
    MT_CHECK_POINTER("qk_norm_rope_bwd", args, x, normed);
    MT_CHECK_POINTER("qk_norm_rope_bwd", args, rstd, normed);
    MT_CHECK_POINTER("qk_norm_rope_bwd", args, w_q, normed);
    MT_CHECK_POINTER("qk_norm_rope_bwd", args, w_k, normed);
    MT_REQUIRE(!args->dw_q || args->dw_q != args->dw_k, MT_EINVAL,
               "qk_norm_rope_bwd: dw_q is dw_k, and they are not added to each other");
    return MT_OK;
}
