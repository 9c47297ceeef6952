/* All members of a product in one call of cublasLtMatmul: extents and addresses lie in arrays on
 * the device, written there from the row counts, so nothing waits for the host. */
#include "kernels/cuda/cublaslt_priv.h"

enum { ARRAY = 16, ALIGN = 256 }; /* alignment of arrays, of what follows them */

static size_t padded(size_t bytes, size_t unit)
{
    return (bytes + unit - 1) / unit * unit;
}

/* Bytes of the arrays: four of addresses, six of extents, two scalars. */
static size_t array_bytes(int64_t members)
{
    size_t n = (size_t)members;
    return 4 * padded(n * sizeof(void *), ARRAY) + 6 * padded(n * sizeof(int), ARRAY) + ARRAY;
}

static void divide(mt_lt_members *to, char *p, int64_t members)
{
    size_t wide = padded((size_t)members * sizeof(void *), ARRAY);
    size_t narrow = padded((size_t)members * sizeof(int), ARRAY);
    to->a = (const void **)p, p += wide;
    to->b = (const void **)p, p += wide;
    to->c = (const void **)p, p += wide;
    to->d = (void **)p, p += wide;
    to->a_rows = (int *)p, p += narrow;
    to->a_cols = (int *)p, p += narrow;
    to->b_rows = (int *)p, p += narrow;
    to->b_cols = (int *)p, p += narrow;
    to->d_rows = (int *)p, p += narrow;
    to->d_cols = (int *)p, p += narrow;
    to->scalars = (float *)p;
}

/* The arrays, and the zeros after them, in the device's scratch. */
static mt_status place(mt_stream *stream, mt_lt_members *to, const mt_lt_product *p)
{
    void *memory;
    size_t arrays = padded(array_bytes(p->rows.members), ALIGN);
    size_t line = (size_t)(p->n > p->k ? p->n : p->k) * sizeof(uint16_t);
    size_t zeros = p->layout == MT_GEMM_NT ? padded(MT_LT_ZERO_ROWS * line, ALIGN) : 0;
    MT_TRY(mt_cuda_scratch(stream, &memory, arrays + zeros));
    divide(to, memory, p->rows.members);
    to->zeros = (char *)memory + arrays;
    if (zeros) MT_CUDA(cudaMemsetAsync(to->zeros, 0, zeros, mt_cuda_stream(stream)));
    return MT_OK;
}

static mt_status layout(mt_cublaslt *lt, mt_lt_descriptor *to, cudaDataType type, int64_t members,
                        const int *rows, const int *cols)
{
    MT_LT(lt, GroupedMatrixLayoutInit_internal((cublasLtMatrixLayout_t)to, sizeof *to, type,
                                               (int)members, rows, cols, rows));
    return MT_OK;
}

/* What the heuristic goes by: the shape of a member of as many rows as each has when all have the
 * same. */
static mt_status prefer(mt_cublaslt *lt, mt_lt_call *call, const mt_lt_product *p)
{
    int64_t members = p->rows.members, each = (p->rows.m + members - 1) / members;
    mt_lt_shape s = mt_lt_shape_of(p->layout, p->n, p->k, p->rows.first_dims ? each : p->rows.m);
    MT_TRY(mt_lt_prefer(lt, call, CUBLASLT_REDUCTION_SCHEME_NONE));
    MT_TRY(mt_lt_prefer_bytes(lt, call, MT_LT_PREFERENCE_AVERAGE_ROWS, &s.m, sizeof s.m));
    MT_TRY(mt_lt_prefer_bytes(lt, call, MT_LT_PREFERENCE_AVERAGE_COLS, &s.n, sizeof s.n));
    return mt_lt_prefer_bytes(lt, call, MT_LT_PREFERENCE_AVERAGE_DEPTH, &s.k, sizeof s.k);
}

static mt_status plan(mt_cublaslt *lt, mt_lt_call *call, const mt_lt_product *p,
                      const mt_lt_members *m, const char **why)
{
    mt_lt_shape s = mt_lt_shape_of(p->layout, p->n, p->k, 0);
    cudaDataType type = p->d_real ? CUDA_R_32F : CUDA_R_16BF;
    int64_t members = p->rows.members;
    MT_TRY(mt_lt_operation(lt, call, &s, true));
    MT_TRY(layout(lt, &call->a, CUDA_R_16BF, members, m->a_rows, m->a_cols));
    MT_TRY(layout(lt, &call->b, CUDA_R_16BF, members, m->b_rows, m->b_cols));
    MT_TRY(layout(lt, &call->d, type, members, m->d_rows, m->d_cols));
    MT_TRY(prefer(lt, call, p));
    return mt_lt_ask(lt, call, why);
}

/* Every line of every operand at a multiple of 16 bytes, whatever the row counts. */
static bool aligned(const mt_lt_product *p)
{
    mt_lt_shape s = mt_lt_shape_of(p->layout, p->n, p->k, 0);
    size_t element = sizeof(uint16_t), result = p->d_real ? sizeof(float) : element;
    return mt_lt_alignment(p->a, s.a.ld, element) == MT_LT_ALIGNED &&
           mt_lt_alignment(p->b, s.b.ld, element) == MT_LT_ALIGNED &&
           mt_lt_alignment(p->c ? p->c : p->d, s.d.ld, result) == MT_LT_ALIGNED &&
           mt_lt_alignment(p->d, s.d.ld, result) == MT_LT_ALIGNED;
}

mt_status mt_lt_grouped(mt_stream *stream, mt_cublaslt *lt, const mt_lt_product *p, bool run,
                        const char **why)
{
    mt_lt_call call;
    mt_lt_members m;
    if (mt_gemm_has_factor(&p->factor))
        *why = "the members have factors of their own";
    else if (!aligned(p))
        *why = "lines are not at multiples of 16 bytes";
    if (*why) return MT_OK;
    MT_TRY(place(stream, &m, p));
    MT_TRY(plan(lt, &call, p, &m, why));
    if (*why || !run) return MT_OK;
    MT_TRY(mt_lt_write_members(stream, &m, p));
    cublasLtMatrixLayout_t d = (cublasLtMatrixLayout_t)&call.d;
    MT_LT(lt, Matmul(lt->handle, &call.operation, m.scalars, m.a, (cublasLtMatrixLayout_t)&call.a,
                     m.b, (cublasLtMatrixLayout_t)&call.b, m.scalars + 1, m.c, d, m.d, d,
                     &call.algorithm, lt->workspace, MT_LT_WORKSPACE, mt_cuda_stream(stream)));
    MT_LAUNCHED(stream, "gemm (cuBLASLt, grouped)");
    return MT_OK;
}
