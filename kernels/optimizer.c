/* Argument checks of the optimizer ops. */
#include "kernels/optimizer.h"

#include "kernels/check.h"

static mt_status check_dtype(const char *op, mt_dtype dtype)
{
    MT_REQUIRE(dtype == MT_F32 || dtype == MT_F64, MT_EINVAL, "%s: dtype is %s, must be f32 or f64",
               op, mt_dtype_name(dtype));
    return MT_OK;
}

static mt_status check_betas(const char *op, double beta1, double beta2)
{
    MT_REQUIRE(beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1, MT_EINVAL,
               "%s: beta1 %g, beta2 %g must be in [0, 1)", op, beta1, beta2);
    return MT_OK;
}

mt_status mt_grad_norm_check(const struct mt_grad_norm_args *args)
{
    const char *op = "grad_norm";
    MT_TRY(check_dtype(op, args->dtype));
    MT_CHECK_EXTENT(op, args, count);
    MT_CHECK_POINTER(op, args, grad, args->count);
    MT_CHECK_POINTER(op, args, state, 1);
    return check_betas(op, args->beta1, args->beta2);
}

mt_status mt_adamw_check(const struct mt_adamw_args *args)
{
    const char *op = "adamw";
    MT_TRY(check_dtype(op, args->dtype));
    MT_CHECK_EXTENT(op, args, count);
    MT_CHECK_POINTER(op, args, p, args->count);
    MT_CHECK_POINTER(op, args, m, args->count);
    MT_CHECK_POINTER(op, args, v, args->count);
    MT_CHECK_POINTER(op, args, grad, args->count);
    MT_CHECK_POINTER(op, args, state, 1);
    return check_betas(op, args->beta1, args->beta2);
}
