/* Operands of a GEMM that its blocks do not read become plain ones in scratch: any format
 * multiplies any other. */
#include "kernels/cpu/gemm_priv.h"
#include "kernels/cpu/isa.h"

static bool fits_elements(const mt_format_spec *spec)
{
    return spec->format == mt_format_plain(MT_ELEM_DTYPE) || mt_format_spec_fits_bf16(spec);
}

mt_dtype MT_CPU(decoded)(const mt_format_spec *spec, bool pairs)
{
    if (pairs && fits_elements(spec)) return MT_ELEM_DTYPE;
    return spec->format == mt_format_plain(MT_ELEM_DTYPE) ? MT_ELEM_DTYPE : MT_REAL_DTYPE;
}

mt_dtype MT_CPU(gemm_operand)(const mt_format_spec *spec)
{
    return MT_CPU(decoded)(spec, false);
}

/* The dtype that a direction is decoded to; false: it is read in place. */
static bool decodes(mt_dtype *dtype, const mt_direction *d, bool pairs)
{
    mt_format_spec spec = mt_direction_spec(d);
    *dtype = MT_CPU(decoded)(&spec, pairs);
    return d->format != mt_format_plain(*dtype);
}

static size_t rounded(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

static size_t bytes_of(const mt_qtensor *q, const mt_direction *d, bool pairs)
{
    mt_dtype dtype;
    if (!decodes(&dtype, d, pairs)) return 0;
    return rounded((size_t)mt_group_capacity(&q->group) * mt_dtype_size(dtype));
}

/* factors: where the members' go if they have any; *found is then that. */
static mt_status decode(mt_stream *stream, mt_qtensor *out, const float **found,
                        const mt_qtensor *q, const mt_direction *d, bool pairs, void *to,
                        float *factors)
{
    mt_dtype dtype;
    *out = *q, *found = NULL;
    if (!decodes(&dtype, d, pairs)) return MT_OK;
    const struct mt_dequantize_args args = {
        .dtype = MT_ELEM_DTYPE, .src = q, .dir = (mt_dir)(d - q->dir), .y = to, .y_dtype = dtype
    };
    if (pairs && mt_format_has_factor(d->format)) {
        MT_TRY(MT_CPU_ISA(decode)(stream, &args, factors));
        *found = factors;
    } else {
        MT_TRY(mt_dequantize(stream, &args));
    }
    *out = mt_qtensor_plain(q->group, dtype, to);
    return MT_OK;
}

mt_status MT_CPU(gemm_decode)(mt_stream *stream, struct gemm_decoded *out,
                              const struct mt_gemm_args *args, bool pairs)
{
    const mt_direction *a = mt_gemm_a(args), *b = mt_gemm_b(args);
    const mt_format_spec first = mt_direction_spec(a), second = mt_direction_spec(b);
    out->pairs = pairs = pairs && fits_elements(&first) && fits_elements(&second);
    size_t bytes_a = bytes_of(args->a, a, pairs), bytes_b = bytes_of(args->b, b, pairs);
    size_t members = (size_t)args->a->group.members;
    bool any = pairs && (mt_format_has_factor(a->format) || mt_format_has_factor(b->format));
    size_t bytes = (any ? rounded(2 * members * sizeof(float)) : 0) + bytes_a + bytes_b;
    char *p = NULL;
    if (bytes) MT_TRY(mt_cpu_operands(stream, (void **)&p, bytes));
    float *factors = any && members ? (float *)(void *)(p + bytes_a + bytes_b) : NULL;
    MT_TRY(decode(stream, &out->a, &out->factors[0], args->a, a, pairs, p, factors));
    MT_TRY(decode(stream, &out->b, &out->factors[1], args->b, b, pairs, p ? p + bytes_a : NULL,
                  factors ? factors + members : NULL));
    out->args = *args;
    out->args.a = &out->a, out->args.b = &out->b;
    return MT_OK;
}
