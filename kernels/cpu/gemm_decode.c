/* Operands of a GEMM that its blocks do not read become plain ones in scratch: any format
 * multiplies any other. */
#include "kernels/cpu/gemm_priv.h"

/* bf16 holds what E8M0 scales make of any code: at most 4 significant bits times a power of two
 * (but for exponents at the ends of f32's own range, see NUMERICS section 5). */
mt_dtype MT_CPU(decoded)(const mt_format *format, bool tiles)
{
    bool plain =
        format == mt_format_plain(MT_ELEM_DTYPE) || format == mt_format_plain(MT_REAL_DTYPE);
    if (plain || (tiles && format->scale == MT_SCALE_E8M0))
        return plain ? format->dtype : MT_ELEM_DTYPE;
    return MT_REAL_DTYPE;
}

mt_dtype MT_CPU(gemm_operand)(const mt_format_spec *spec)
{
    return MT_CPU(decoded)(spec->format, false);
}

/* The dtype that a direction is decoded to; false: it is read in place. */
static bool decodes(mt_dtype *dtype, const mt_direction *d, bool tiles)
{
    *dtype = MT_CPU(decoded)(d->format, tiles);
    return d->format != mt_format_plain(*dtype);
}

static size_t bytes_of(const mt_qtensor *q, const mt_direction *d, bool tiles)
{
    mt_dtype dtype;
    if (!decodes(&dtype, d, tiles)) return 0;
    return ((size_t)mt_group_capacity(&q->group) * mt_dtype_size(dtype) + 63) / 64 * 64;
}

static mt_status decode(mt_stream *stream, mt_qtensor *out, const mt_qtensor *q,
                        const mt_direction *d, bool tiles, void *to)
{
    mt_dtype dtype;
    *out = *q;
    if (!decodes(&dtype, d, tiles)) return MT_OK;
    MT_TRY(mt_dequantize(stream, &(struct mt_dequantize_args){ .dtype = MT_ELEM_DTYPE,
                                                               .src = q,
                                                               .dir = (mt_dir)(d - q->dir),
                                                               .y = to,
                                                               .y_dtype = dtype }));
    *out = mt_qtensor_plain(q->group, dtype, to);
    return MT_OK;
}

mt_status MT_CPU(gemm_decode)(mt_stream *stream, struct gemm_decoded *out,
                              const struct mt_gemm_args *args, bool tiles)
{
    const mt_direction *a = mt_gemm_a(args), *b = mt_gemm_b(args);
    size_t first = bytes_of(args->a, a, tiles), second = bytes_of(args->b, b, tiles);
    char *p = NULL;
    if (first + second) MT_TRY(mt_cpu_operands(stream, (void **)&p, first + second));
    MT_TRY(decode(stream, &out->a, args->a, a, tiles, p));
    MT_TRY(decode(stream, &out->b, args->b, b, tiles, p + first));
    out->args = *args;
    out->args.a = &out->a, out->args.b = &out->b;
    return MT_OK;
}
