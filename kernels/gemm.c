/* Argument checks of the grouped GEMM and what feeds it. */
#include "kernels/gemm.h"

#include "kernels/check.h"

static const char *const layout_names[MT_GEMM_LAYOUT_COUNT] = {
    [MT_GEMM_TN] = "TN",
    [MT_GEMM_NN] = "NN",
    [MT_GEMM_NT] = "NT",
};

/* A direction that is read or written: there, and with codes unless it has no elements. */
static mt_status check_direction(const char *op, const char *name, const mt_qtensor *q,
                                 const mt_direction *dir)
{
    MT_REQUIRE(dir->format, MT_EINVAL, "%s: %s has no %s direction", op, name,
               dir == &q->dir[MT_ROW] ? "row" : "column");
    MT_REQUIRE(dir->codes || mt_group_is_empty(&q->group), MT_EINVAL,
               "%s: %s has no codes in its %s direction", op, name,
               dir == &q->dir[MT_ROW] ? "row" : "column");
    return MT_OK;
}

/* A group of rows: ragged or of equal members. */
static mt_status check_rows(const char *op, const char *name, const mt_group *g)
{
    MT_TRY(mt_group_check(g, name));
    MT_REQUIRE(!g->last_dims, MT_EINVAL, "%s: the members of %s vary in width", op, name);
    return MT_OK;
}

static mt_status check_weight(const char *op, const char *name, const mt_group *g)
{
    MT_TRY(mt_group_check(g, name));
    MT_REQUIRE(mt_group_mode_of(g) == MT_GROUP_UNIFORM, MT_EINVAL,
               "%s: %s is a weight, its members must have one shape", op, name);
    return MT_OK;
}

/* What must agree between the two operands of each layout. */
static mt_status check_shapes(const struct mt_gemm_args *args)
{
    const char *layout = layout_names[args->layout];
    const mt_group *a = &args->a->group, *b = &args->b->group;
    MT_TRY(check_rows("gemm", "b", b));
    if (args->layout == MT_GEMM_NT)
        MT_TRY(check_rows("gemm", "a", a));
    else
        MT_TRY(check_weight("gemm", "a", a));
    MT_REQUIRE(a->members == b->members, MT_EINVAL, "gemm %s: a has %lld members, b %lld", layout,
               (long long)a->members, (long long)b->members);
    if (args->layout == MT_GEMM_NT) {
        MT_REQUIRE(!a->first_dims == !b->first_dims && (a->first_dims || a->m == b->m), MT_EINVAL,
                   "gemm NT: the members of a and b differ in rows (%lld, %lld)", (long long)a->m,
                   (long long)b->m);
        return MT_OK;
    }
    int64_t depth = args->layout == MT_GEMM_TN ? a->k : a->m;
    MT_REQUIRE(b->k == depth, MT_EINVAL, "gemm %s: b is %lld wide, a needs %lld", layout,
               (long long)b->k, (long long)depth);
    return MT_OK;
}

static int64_t result_count(const struct mt_gemm_args *args)
{
    const mt_group *a = &args->a->group, *b = &args->b->group;
    if (args->layout == MT_GEMM_NT) return b->members * b->k * a->k;
    int64_t rows = b->first_dims ? b->m : b->members * b->m;
    return rows * (args->layout == MT_GEMM_TN ? a->m : a->k);
}

/* What the codes decode with. Kept decoded, they lack no more than the factor of a member. */
static mt_status check_scales(const char *name, const mt_qtensor *q, const mt_direction *dir)
{
    const mt_format *format = dir->format;
    if (format->scale == MT_SCALE_NONE || mt_group_is_empty(&q->group)) return MT_OK;
    MT_REQUIRE(dir->scales || (dir->layout == MT_LAYOUT_DECODED && format->block > 0), MT_EINVAL,
               "gemm: %s is %s, its scales are NULL", name, format->name);
    MT_REQUIRE(dir->amax || !format->second_level, MT_EINVAL,
               "gemm: %s is %s, its amax, of which a scale is made, is NULL", name, format->name);
    return MT_OK;
}

static mt_status check_operand(const struct mt_gemm_args *args, const char *name,
                               const mt_qtensor *q, const mt_direction *dir)
{
    MT_TRY(check_direction("gemm", name, q, dir));
    MT_TRY(check_scales(name, q, dir));
    MT_REQUIRE(dir->layout != MT_LAYOUT_DECODED || args->dtype == MT_BF16, MT_EUNSUPPORTED,
               "gemm %s of %s: %s is kept decoded, in bf16: only a gemm of bf16 reads it",
               layout_names[args->layout], mt_dtype_name(args->dtype), name);
    return MT_OK;
}

mt_status mt_gemm_check(const struct mt_gemm_args *args)
{
    MT_REQUIRE((unsigned)args->layout < MT_GEMM_LAYOUT_COUNT, MT_EINVAL,
               "gemm: layout %d is not TN, NN or NT", (int)args->layout);
    MT_REQUIRE(args->a && args->b, MT_EINVAL, "gemm: operand %s is NULL", args->a ? "b" : "a");
    MT_TRY(check_shapes(args));
    MT_TRY(check_operand(args, "a", args->a, mt_gemm_a(args)));
    MT_TRY(check_operand(args, "b", args->b, mt_gemm_b(args)));
    mt_dtype real = mt_dtype_wide(args->dtype);
    MT_REQUIRE(args->d_dtype == real || args->d_dtype == args->dtype, MT_EINVAL,
               "gemm %s of %s: the result cannot be %s", layout_names[args->layout],
               mt_dtype_name(args->dtype), mt_dtype_name(args->d_dtype));
    MT_REQUIRE(!args->bias || args->layout == MT_GEMM_TN, MT_EINVAL, "gemm %s: only TN adds a bias",
               layout_names[args->layout]);
    MT_CHECK_POINTER("gemm", args, d, result_count(args));
    return MT_OK;
}

mt_status mt_bias_grad_check(const struct mt_bias_grad_args *args)
{
    MT_REQUIRE(args->dy, MT_EINVAL, "bias_grad: dy is NULL");
    const mt_direction *dy = &args->dy->dir[MT_ROW];
    MT_TRY(check_rows("bias_grad", "dy", &args->dy->group));
    MT_TRY(check_direction("bias_grad", "dy", args->dy, dy));
    MT_REQUIRE(dy->format == mt_format_plain(args->dtype) && dy->layout == MT_LAYOUT_COMPACT,
               MT_EINVAL, "bias_grad: dy is %s, must be plain %s", dy->format->name,
               mt_dtype_name(args->dtype));
    MT_CHECK_POINTER("bias_grad", args, db, args->dy->group.members * args->dy->group.k);
    return MT_OK;
}

mt_status mt_pack_weight_check(const struct mt_pack_weight_args *args)
{
    MT_REQUIRE(args->out, MT_EINVAL, "pack_weight: out is NULL");
    MT_TRY(check_weight("pack_weight", "out", &args->out->group));
    MT_CHECK_POINTER("pack_weight", args, master, mt_group_capacity(&args->out->group));
    MT_REQUIRE(!args->halves || args->dtype == MT_BF16, MT_EINVAL,
               "pack_weight: dtype is %s, must be bf16 for a master of bf16",
               mt_dtype_name(args->dtype));
    for (int i = 0; i < MT_DIR_COUNT; i++) {
        const mt_direction *dir = &args->out->dir[i];
        if (!dir->codes) continue;
        MT_REQUIRE(dir->format == mt_format_plain(args->dtype) && dir->layout == MT_LAYOUT_PACKED,
                   MT_EINVAL, "pack_weight: out is %s in layout %d, must be packed %s",
                   dir->format ? dir->format->name : "nothing", (int)dir->layout,
                   mt_dtype_name(args->dtype));
    }
    return MT_OK;
}
