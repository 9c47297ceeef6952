/* Operands of the grouped GEMM that are of other formats, made plain. */
#include "kernels/cuda/gemm.cuh"
#include "kernels/cuda/scratch.h"

enum { ALIGN = 256 };

/* ---- what an operand is read as ----------------------------------------------------------------
 * The one f32 scale that a member has stays outside, as a factor of its sums. What bf16 does not
 * hold, f32 scales of blocks that are no powers of two, is decoded to real. */

static mt_dtype decoded(const mt_format_spec *spec, mt_dtype dtype)
{
    const mt_format *format = spec->format;
    mt_dtype real = mt_dtype_wide(dtype);
    if (format == mt_format_plain(dtype) || format == mt_format_plain(real)) return format->dtype;
    return dtype == MT_BF16 && mt_format_spec_fits_bf16(spec) ? MT_BF16 : real;
}

mt_dtype mt_cuda_gemm_operand_f64(const mt_format_spec *spec)
{
    return decoded(spec, MT_F64);
}
mt_dtype mt_cuda_gemm_operand_f32(const mt_format_spec *spec)
{
    return decoded(spec, MT_F32);
}
mt_dtype mt_cuda_gemm_operand_bf16(const mt_format_spec *spec)
{
    return decoded(spec, MT_BF16);
}

/* ---- the factor of a member's sums -------------------------------------------------------------
 */

static mt_gemm_scale scale_of(const mt_direction *d, mt_dtype as)
{
    enum { BOUND = 448 };
    if (as != MT_BF16 || !mt_format_has_factor(d->format)) return {};
    if (!d->format->second_level) return { (const float *)d->scales, 0 };
    return { d->amax, d->options.four_over_six ? d->options.four_over_six : (int)BOUND };
}

extern "C" mt_gemm_factor mt_cuda_gemm_factor(const struct mt_gemm_args *args)
{
    return { scale_of(mt_gemm_a(args), MT_BF16), scale_of(mt_gemm_b(args), MT_BF16) };
}

/* ---- operands ----------------------------------------------------------------------------------
 */

static bool decodes(mt_dtype *as, const mt_direction *d, mt_dtype dtype)
{
    mt_format_spec spec = mt_direction_spec(d);
    *as = decoded(&spec, dtype);
    return d->format != mt_format_plain(*as) && d->layout != MT_LAYOUT_DECODED;
}

static size_t padded(size_t bytes)
{
    return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

static size_t decoded_bytes(const mt_qtensor *q, const mt_direction *d, mt_dtype dtype)
{
    mt_dtype as;
    if (!decodes(&as, d, dtype)) return 0;
    return padded((size_t)mt_group_capacity(&q->group) * mt_dtype_size(as));
}

static mt_status decode(mt_stream *stream, mt_qtensor *out, const mt_qtensor *q,
                        const mt_direction *d, mt_dtype dtype, void *to)
{
    mt_dtype as;
    *out = *q;
    if (d->layout == MT_LAYOUT_DECODED) *out = mt_qtensor_plain(q->group, MT_BF16, d->codes);
    if (!decodes(&as, d, dtype)) return MT_OK;
    struct mt_dequantize_args args = {};
    args.dtype = dtype, args.src = q, args.dir = (mt_dir)(d - q->dir);
    args.y = to, args.y_dtype = as;
    MT_TRY(mt_cuda_decode(stream, &args, as == MT_BF16));
    *out = mt_qtensor_plain(q->group, as, to);
    return MT_OK;
}

/* A product's operands made plain: the scales that stay outside, and bytes. */
struct plain_plan {
    mt_gemm_factor factor;
    size_t first, second;
};

static plain_plan plan_plain(const struct mt_gemm_args *args)
{
    plain_plan p = {};
    const mt_direction *a = mt_gemm_a(args), *b = mt_gemm_b(args);
    mt_dtype as_a, as_b;
    decodes(&as_a, a, args->dtype), decodes(&as_b, b, args->dtype);
    p.factor.a = scale_of(a, as_a), p.factor.b = scale_of(b, as_b);
    p.first = decoded_bytes(args->a, a, args->dtype);
    p.second = decoded_bytes(args->b, b, args->dtype);
    return p;
}

static bool foresee_operand(mt_qtensor *as, const mt_qtensor *q, const mt_direction *d)
{
    mt_format_spec spec = mt_direction_spec(d);
    *as = *q;
    if (d->layout == MT_LAYOUT_DECODED) {
        *as = mt_qtensor_plain(q->group, MT_BF16, d->codes);
        return true;
    }
    if (d->format != mt_format_plain(MT_BF16))
        *as = mt_qtensor_plain(q->group, MT_BF16, (void *)(uintptr_t)ALIGN);
    return mt_cuda_gemm_operand_bf16(&spec) == MT_BF16;
}

bool mt_cuda_gemm_foresee(gemm_problem *g, const struct mt_gemm_args *args)
{
    mt_qtensor a, b;
    struct mt_gemm_args plain = *args;
    if (args->dtype != MT_BF16 || !foresee_operand(&a, args->a, mt_gemm_a(args)) ||
        !foresee_operand(&b, args->b, mt_gemm_b(args)))
        return false;
    plain.a = &a, plain.b = &b;
    if (mt_cuda_gemm_describe(g, &plain) != MT_OK) return false;
    g->factor = plan_plain(args).factor;
    return true;
}

size_t mt_cuda_gemm_plain_bytes(const struct mt_gemm_args *args)
{
    plain_plan p = plan_plain(args);
    return p.first + p.second;
}

static size_t decode_scratch(const mt_stream *stream, const mt_qtensor *q)
{
    struct mt_dequantize_args args = {};
    args.src = q;
    return mt_cuda_dequantize_scratch(stream, &args);
}

size_t mt_cuda_gemm_plain_scratch(const mt_stream *stream, const struct mt_gemm_args *args)
{
    plain_plan p = plan_plain(args);
    size_t a = p.first ? decode_scratch(stream, args->a) : 0;
    size_t b = p.second ? decode_scratch(stream, args->b) : 0;
    return a > b ? a : b;
}

mt_status mt_cuda_gemm_plain(mt_stream *stream, gemm_plain *out, const struct mt_gemm_args *args)
{
    const mt_direction *a = mt_gemm_a(args), *b = mt_gemm_b(args);
    const plain_plan plan = plan_plain(args);
    const size_t bytes = plan.first + plan.second;
    char *p = NULL;
    if (bytes) MT_TRY(mt_cuda_operands(stream, (void **)&p, bytes));
    MT_TRY(decode(stream, &out->a, args->a, a, args->dtype, p));
    MT_TRY(decode(stream, &out->b, args->b, b, args->dtype, p + plan.first));
    out->factor = plan.factor;
    out->args = *args;
    out->args.a = &out->a, out->args.b = &out->b;
    return MT_OK;
}
