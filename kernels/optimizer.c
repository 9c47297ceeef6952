/* Argument checks of the optimizer ops. */
#include "kernels/optimizer.h"

#include "kernels/check.h"

const mt_moments_form mt_moments_forms[MT_MOMENTS_COUNT] = {
    [MT_MOMENTS_REAL] = { .name = "f32", .dtype = MT_F32 },
    [MT_MOMENTS_BF16] = { .name = "bf16", .dtype = MT_BF16, .stochastic = true },
    [MT_MOMENTS_FP8] = { .name = "fp8", .dtype = MT_U8, .block = 128 },
};

mt_dtype mt_moments_dtype(mt_moments moments, mt_dtype real)
{
    return moments == MT_MOMENTS_REAL ? real : mt_moments_forms[moments].dtype;
}

size_t mt_moments_size(mt_moments moments, mt_dtype real)
{
    return mt_dtype_size(mt_moments_dtype(moments, real));
}

int64_t mt_moments_blocks(mt_moments moments, int64_t count)
{
    int64_t block = mt_moments_forms[moments].block;
    return block ? (count + block - 1) / block : 0;
}

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
    MT_REQUIRE((unsigned)args->pass < MT_NORM_PASS_COUNT, MT_EINVAL, "%s: pass %d", op,
               (int)args->pass);
    MT_CHECK_EXTENT(op, args, bf16_count);
    MT_CHECK_POINTER(op, args, grad, args->pass == MT_NORM_FINISH ? 0 : args->count);
    MT_CHECK_POINTER(op, args, bf16_grad, args->pass == MT_NORM_FINISH ? 0 : args->bf16_count);
    MT_REQUIRE(args->dtype == MT_F32 || !args->bf16_count, MT_EINVAL,
               "%s: f64 has no gradients in bf16", op);
    MT_CHECK_POINTER(op, args, sum, args->pass != MT_NORM_ALL);
    MT_CHECK_POINTER(op, args, state, args->pass != MT_NORM_SUM);
    return check_betas(op, args->beta1, args->beta2);
}

/* What the storage forms need, and what they exclude. */
static mt_status check_forms(const char *op, const struct mt_adamw_args *a)
{
    MT_REQUIRE((unsigned)a->moments < MT_MOMENTS_COUNT && (unsigned)a->master < MT_MASTER_COUNT,
               MT_EINVAL, "%s: moments form %d, master form %d: no such forms", op, (int)a->moments,
               (int)a->master);
    const mt_moments_form *form = &mt_moments_forms[a->moments];
    MT_REQUIRE(a->dtype == MT_F32 || (!a->moments && !a->master), MT_EINVAL,
               "%s: f64 has no moments in %s and no master in %s", op, form->name,
               mt_master_name(a->master));
    MT_REQUIRE(a->dtype == MT_F32 || !a->grad_bf16, MT_EINVAL, "%s: f64 has no gradient in bf16",
               op);
    MT_REQUIRE(!a->cast || (a->dtype == MT_F32 && a->master == MT_MASTER_REAL), MT_EINVAL,
               "%s: a cast of a master of %s in %s, must be f32 as it is", op,
               mt_dtype_name(a->dtype), mt_master_name(a->master));
    MT_REQUIRE(!a->stochastic || form->stochastic, MT_EINVAL,
               "%s: moments in %s are not rounded stochastically", op, form->name);
    MT_REQUIRE(a->first >= 0 && a->first % 128 == 0, MT_EINVAL,
               "%s: first is %lld, must be a multiple of 128", op, (long long)a->first);
    MT_CHECK_POINTER(op, a, m_scales, form->block ? a->count : 0);
    MT_CHECK_POINTER(op, a, v_scales, form->block ? a->count : 0);
    MT_CHECK_POINTER(op, a, p_low, a->master == MT_MASTER_SPLIT ? a->count : 0);
    return MT_OK;
}

/* Whether params may be updated in one call. */
static bool go_together(const struct mt_adamw_args *a, const struct mt_adamw_args *b)
{
    return a->dtype == b->dtype && a->beta1 == b->beta1 && a->beta2 == b->beta2 &&
           a->eps == b->eps && a->master == b->master && a->moments == b->moments &&
           a->stochastic == b->stochastic && a->seed == b->seed && a->state == b->state;
}

mt_status mt_adamw_check(const struct mt_adamw_args *args)
{
    const char *op = "adamw";
    MT_TRY(check_dtype(op, args->dtype));
    MT_CHECK_POINTER(op, args, state, 1);
    MT_TRY(check_betas(op, args->beta1, args->beta2));
    for (const struct mt_adamw_args *a = args; a; a = a->next) {
        MT_REQUIRE(go_together(a, args), MT_EINVAL,
                   "%s: param %u goes with param %u, but dtype, betas, eps, master, moments, "
                   "stochastic, seed or state are others",
                   op, a->param, args->param);
        MT_CHECK_EXTENT(op, a, count);
        MT_CHECK_POINTER(op, a, p, a->count);
        MT_CHECK_POINTER(op, a, m, a->count);
        MT_CHECK_POINTER(op, a, v, a->count);
        MT_CHECK_POINTER(op, a, grad, a->count);
        MT_TRY(check_forms(op, a));
    }
    return MT_OK;
}

mt_status mt_join_master_check(const struct mt_join_master_args *args)
{
    const char *op = "join_master";
    MT_REQUIRE(args->dtype == MT_F32, MT_EINVAL, "%s: dtype is %s, must be f32", op,
               mt_dtype_name(args->dtype));
    MT_CHECK_EXTENT(op, args, count);
    MT_CHECK_POINTER(op, args, y, args->count);
    MT_CHECK_POINTER(op, args, high, args->count);
    MT_CHECK_POINTER(op, args, low, args->count);
    return MT_OK;
}
