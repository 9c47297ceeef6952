/* Argument checks of the elementwise ops. */
#include "kernels/elementwise.h"

#include "kernels/check.h"

mt_status mt_fill_check(const struct mt_fill_args *args)
{
    MT_CHECK_EXTENT("fill", args, count);
    MT_CHECK_POINTER("fill", args, y, args->count);
    return MT_OK;
}

mt_status mt_cast_check(const struct mt_cast_args *args)
{
    MT_CHECK_EXTENT("cast", args, count);
    MT_CHECK_POINTER("cast", args, y, args->count);
    MT_CHECK_POINTER("cast", args, x, args->count);
    MT_REQUIRE(args->x_dtype == MT_F64 || args->x_dtype == MT_F32 || args->x_dtype == MT_BF16 ||
                   args->x_dtype == MT_F16,
               MT_EINVAL, "cast: x_dtype is %s, must be one of f64 f32 bf16 f16",
               mt_dtype_name(args->x_dtype));
    return MT_OK;
}

mt_status mt_add_check(const struct mt_add_args *args)
{
    MT_CHECK_EXTENT("add", args, count);
    MT_CHECK_POINTER("add", args, y, args->count);
    MT_CHECK_POINTER("add", args, a, args->count);
    MT_CHECK_POINTER("add", args, b, args->count);
    return MT_OK;
}

mt_status mt_swiglu_fwd_check(const struct mt_swiglu_fwd_args *args)
{
    MT_CHECK_EXTENT("swiglu_fwd", args, rows);
    MT_CHECK_EXTENT("swiglu_fwd", args, width);
    int64_t count = args->rows * args->width;
    MT_CHECK_POINTER("swiglu_fwd", args, y, count);
    MT_CHECK_POINTER("swiglu_fwd", args, x, count);
    return MT_OK;
}

mt_status mt_swiglu_bwd_check(const struct mt_swiglu_bwd_args *args)
{
    MT_CHECK_EXTENT("swiglu_bwd", args, rows);
    MT_CHECK_EXTENT("swiglu_bwd", args, width);
    int64_t count = args->rows * args->width;
    MT_CHECK_POINTER("swiglu_bwd", args, dx, count);
    MT_CHECK_POINTER("swiglu_bwd", args, dy, count);
    MT_CHECK_POINTER("swiglu_bwd", args, x, count);
    return MT_OK;
}

mt_status mt_embedding_fwd_check(const struct mt_embedding_fwd_args *args)
{
    MT_CHECK_EXTENT("embedding_fwd", args, tokens_count);
    MT_CHECK_EXTENT("embedding_fwd", args, vocab);
    MT_CHECK_EXTENT("embedding_fwd", args, width);
    int64_t count = args->tokens_count * args->width;
    MT_CHECK_POINTER("embedding_fwd", args, y, count);
    MT_CHECK_POINTER("embedding_fwd", args, w, count);
    MT_CHECK_POINTER("embedding_fwd", args, tokens, count);
    MT_REQUIRE(args->vocab > 0 || count == 0, MT_EINVAL,
               "embedding_fwd: vocab is 0 with %lld tokens", (long long)args->tokens_count);
    return MT_OK;
}

mt_status mt_embedding_bwd_check(const struct mt_embedding_bwd_args *args)
{
    MT_CHECK_EXTENT("embedding_bwd", args, tokens_count);
    MT_CHECK_EXTENT("embedding_bwd", args, vocab);
    MT_CHECK_EXTENT("embedding_bwd", args, width);
    int64_t count = args->tokens_count * args->width;
    MT_CHECK_POINTER("embedding_bwd", args, dw, args->vocab * args->width);
    MT_CHECK_POINTER("embedding_bwd", args, dy, count);
    MT_CHECK_POINTER("embedding_bwd", args, tokens, count);
    MT_REQUIRE(args->vocab > 0 || count == 0, MT_EINVAL,
               "embedding_bwd: vocab is 0 with %lld tokens", (long long)args->tokens_count);
    return MT_OK;
}
