/* Products by cublasLtMatmul: one call for a uniform group, and one a member over several streams
 * for a ragged one, whose row counts are then read on the host. */
#include "kernels/cuda/cublaslt_priv.h"

#include <math.h>
#include <stdlib.h>

/* ---- one call ----------------------------------------------------------------------------------
 */

mt_status mt_lt_operation(mt_cublaslt *lt, mt_lt_call *call, const mt_lt_shape *s, bool on_device)
{
    int32_t op_a = s->a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    int32_t op_b = s->b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    int32_t mode = on_device ? CUBLASLT_POINTER_MODE_DEVICE : CUBLASLT_POINTER_MODE_HOST;
    cublasLtMatmulDesc_t to = &call->operation;
    MT_LT(lt, MatmulDescInit_internal(to, sizeof *to, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    MT_LT(lt, MatmulDescSetAttribute(to, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof op_a));
    MT_LT(lt, MatmulDescSetAttribute(to, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof op_b));
    MT_LT(lt, MatmulDescSetAttribute(to, CUBLASLT_MATMUL_DESC_POINTER_MODE, &mode, sizeof mode));
    return MT_OK;
}

mt_status mt_lt_prefer_bytes(mt_cublaslt *lt, mt_lt_call *call, int attribute, const void *value,
                             size_t bytes)
{
    MT_LT(lt, MatmulPreferenceSetAttribute((cublasLtMatmulPreference_t)&call->preference,
                                           (cublasLtMatmulPreferenceAttributes_t)attribute, value,
                                           bytes));
    return MT_OK;
}

mt_status mt_lt_prefer(mt_cublaslt *lt, mt_lt_call *call, unsigned reductions)
{
    uint64_t workspace = MT_LT_WORKSPACE;
    uint32_t schemes = reductions;
    MT_LT(lt, MatmulPreferenceInit_internal((cublasLtMatmulPreference_t)&call->preference,
                                            sizeof call->preference));
    MT_TRY(mt_lt_prefer_bytes(lt, call, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                              sizeof workspace));
    return mt_lt_prefer_bytes(lt, call, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes,
                              sizeof schemes);
}

mt_status mt_lt_ask(mt_cublaslt *lt, mt_lt_call *call, const char **why)
{
    cublasLtMatmulHeuristicResult_t found = { 0 };
    cublasLtMatrixLayout_t d = (cublasLtMatrixLayout_t)&call->d;
    int count = 0;
    cublasStatus_t status = lt->MatmulAlgoGetHeuristic(
        lt->handle, &call->operation, (cublasLtMatrixLayout_t)&call->a,
        (cublasLtMatrixLayout_t)&call->b, d, d, (cublasLtMatmulPreference_t)&call->preference, 1,
        &found, &count);
    if (status != CUBLAS_STATUS_SUCCESS && status != CUBLAS_STATUS_NOT_SUPPORTED)
        return mt_lt_error(lt, status, "cublasLtMatmulAlgoGetHeuristic", __FILE__, __LINE__);
    if (status != CUBLAS_STATUS_SUCCESS || count == 0 || found.state != CUBLAS_STATUS_SUCCESS)
        *why = "cuBLASLt has no algorithm for it";
    call->algorithm = found.algo;
    return MT_OK;
}

/* `members` matrices, each `stride` elements after the one before. */
static mt_status layout(mt_cublaslt *lt, mt_lt_descriptor *to, cudaDataType type,
                        const mt_lt_matrix *x, int64_t members, int64_t stride)
{
    int32_t count = (int32_t)members;
    cublasLtMatrixLayout_t l = (cublasLtMatrixLayout_t)to;
    MT_LT(lt, MatrixLayoutInit_internal(l, sizeof *to, type, (uint64_t)x->rows, (uint64_t)x->cols,
                                        x->ld));
    if (members == 1) return MT_OK;
    MT_LT(lt,
          MatrixLayoutSetAttribute(l, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count));
    MT_LT(lt, MatrixLayoutSetAttribute(l, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride,
                                       sizeof stride));
    return MT_OK;
}

/* Addresses of a part. */
typedef struct lt_data {
    const void *a, *b, *c; /* c is d where nothing is added */
    void *d;
} lt_data;

static lt_data data_of(const mt_lt_product *p, mt_lt_place at)
{
    size_t size = p->d_real ? sizeof(float) : sizeof(uint16_t);
    lt_data x = { (const uint16_t *)p->a + at.a, (const uint16_t *)p->b + at.b, NULL,
                  (char *)p->d + (size_t)at.d * size };
    x.c = p->c ? (const char *)p->c + (size_t)at.d * size : (const char *)x.d;
    return x;
}

static mt_status align(mt_cublaslt *lt, mt_lt_call *call, const mt_lt_product *p,
                       const mt_lt_shape *s, const lt_data *x)
{
    size_t element = sizeof(uint16_t), result = p->d_real ? sizeof(float) : element;
    const struct {
        int attribute;
        uint32_t bytes;
    } of[] = {
        { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, mt_lt_alignment(x->a, s->a.ld, element) },
        { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, mt_lt_alignment(x->b, s->b.ld, element) },
        { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, mt_lt_alignment(x->c, s->d.ld, result) },
        { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, mt_lt_alignment(x->d, s->d.ld, result) },
    };
    for (size_t i = 0; i < sizeof of / sizeof *of; i++)
        MT_TRY(mt_lt_prefer_bytes(lt, call, of[i].attribute, &of[i].bytes, sizeof of[i].bytes));
    return MT_OK;
}

/* How `members` members of as many rows each are multiplied, the first at `at`. */
static mt_status plan(mt_cublaslt *lt, mt_lt_call *call, const mt_lt_product *p, mt_lt_place at,
                      int64_t rows, int64_t members, const char **why)
{
    mt_lt_shape s = mt_lt_shape_of(p->layout, p->n, p->k, rows);
    mt_lt_place next = mt_lt_place_of(p->layout, p->n, p->k, 1, rows);
    lt_data x = data_of(p, at);
    cudaDataType type = p->d_real ? CUDA_R_32F : CUDA_R_16BF;
    MT_TRY(mt_lt_operation(lt, call, &s, false));
    MT_TRY(layout(lt, &call->a, CUDA_R_16BF, &s.a, members, next.a));
    MT_TRY(layout(lt, &call->b, CUDA_R_16BF, &s.b, members, next.b));
    MT_TRY(layout(lt, &call->d, type, &s.d, members, next.d));
    MT_TRY(mt_lt_prefer(lt, call, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    MT_TRY(align(lt, call, p, &s, &x));
    return mt_lt_ask(lt, call, why);
}

static mt_status launch(mt_cublaslt *lt, mt_lt_call *call, const mt_lt_product *p, mt_lt_place at,
                        float alpha, void *workspace, cudaStream_t stream)
{
    lt_data x = data_of(p, at);
    float beta = p->c ? 1 : 0;
    cublasLtMatrixLayout_t d = (cublasLtMatrixLayout_t)&call->d;
    MT_LT(lt, Matmul(lt->handle, &call->operation, &alpha, x.a, (cublasLtMatrixLayout_t)&call->a,
                     x.b, (cublasLtMatrixLayout_t)&call->b, &beta, x.c, d, x.d, d, &call->algorithm,
                     workspace, MT_LT_WORKSPACE, stream));
    return MT_OK;
}

static mt_status uniform(mt_stream *stream, mt_cublaslt *lt, const mt_lt_product *p, bool run,
                         const char **why)
{
    mt_lt_call call;
    mt_lt_place at = { 0, 0, 0 };
    MT_TRY(plan(lt, &call, p, at, p->rows.m, p->rows.members, why));
    if (*why || !run) return MT_OK;
    MT_TRY(launch(lt, &call, p, at, 1, lt->workspace, mt_cuda_stream(stream)));
    MT_LAUNCHED(stream, "gemm (cuBLASLt)");
    return MT_OK;
}

/* ---- a call per member -------------------------------------------------------------------------
 */

static mt_status make_room(mt_cublaslt *lt, int64_t members)
{
    if (members <= lt->room) return MT_OK;
    size_t n = (size_t)members;
    free(lt->parts), free(lt->first_dims), free(lt->offsets);
    for (int i = 0; i < 2; i++) free(lt->scales[i]);
    lt->room = 0;
    lt->parts = malloc(n * sizeof *lt->parts);
    lt->first_dims = malloc(n * sizeof *lt->first_dims);
    lt->offsets = malloc((n + 1) * sizeof *lt->offsets);
    for (int i = 0; i < 2; i++) lt->scales[i] = malloc(n * sizeof *lt->scales[i]);
    MT_REQUIRE(lt->parts && lt->first_dims && lt->offsets && lt->scales[0] && lt->scales[1],
               MT_ENOMEM, "gemm: no memory for the calls of %lld members", (long long)members);
    lt->room = members;
    return MT_OK;
}

static mt_status fetch(void *to, const void *from, size_t bytes, cudaStream_t stream)
{
    if (from) MT_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream));
    return MT_OK;
}

/* The same scale, of values on the host. */
static mt_gemm_scale on_host(mt_gemm_scale s, const float *values)
{
    if (s.values) s.values = values;
    return s;
}

/* Row counts, offsets and scales as the device has them now. */
static mt_status read_members(mt_stream *stream, mt_cublaslt *lt, const mt_lt_product *p)
{
    cudaStream_t queue = mt_cuda_stream(stream);
    enum cudaStreamCaptureStatus capture;
    size_t n = (size_t)p->rows.members;
    MT_CUDA(cudaStreamIsCapturing(queue, &capture));
    MT_REQUIRE(capture == cudaStreamCaptureStatusNone, MT_EUNSUPPORTED,
               "gemm: kernel set cublaslt_loop reads row counts on the host, which no recorded "
               "graph can");
    MT_TRY(make_room(lt, p->rows.members));
    MT_TRY(fetch(lt->first_dims, p->rows.first_dims, n * sizeof *lt->first_dims, queue));
    MT_TRY(fetch(lt->offsets, p->rows.offsets, (n + 1) * sizeof *lt->offsets, queue));
    MT_TRY(fetch(lt->scales[0], p->factor.a.values, n * sizeof *lt->scales[0], queue));
    MT_TRY(fetch(lt->scales[1], p->factor.b.values, n * sizeof *lt->scales[1], queue));
    MT_CUDA(cudaStreamSynchronize(queue));
    return MT_OK;
}

/* A member's place and factor, of which one f32 is made. */
static mt_status read_part(mt_cublaslt *lt, const mt_lt_product *p, int64_t e, const char **why)
{
    mt_lt_part *part = &lt->parts[e];
    mt_group rows = p->rows;
    rows.first_dims = rows.first_dims ? lt->first_dims : NULL;
    rows.offsets = rows.offsets ? lt->offsets : NULL;
    int64_t start = mt_group_offset(&rows, e) / rows.k;
    int64_t capacity = rows.first_dims ? rows.m : rows.members * rows.m;
    part->rows = mt_group_rows(&rows, e);
    MT_REQUIRE(part->rows >= 0 && start >= 0 && part->rows <= capacity - start, MT_EINVAL,
               "gemm: member %lld has %lld rows from row %lld on, of %lld", (long long)e,
               (long long)part->rows, (long long)start, (long long)capacity);
    part->at = mt_lt_place_of(p->layout, p->n, p->k, e, start);
    mt_gemm_factor factor = { on_host(p->factor.a, lt->scales[0]),
                              on_host(p->factor.b, lt->scales[1]) };
    part->alpha = (float)mt_gemm_factor_of(&factor, e);
    if (!isnormal(part->alpha)) *why = "a member's factor is no normal f32";
    return MT_OK;
}

static mt_status plan_members(mt_cublaslt *lt, const mt_lt_product *p, const char **why)
{
    for (int64_t e = 0; e < p->rows.members && !*why; e++) {
        mt_lt_part *part = &lt->parts[e];
        MT_TRY(read_part(lt, p, e, why));
        if (part->rows > 0 && !*why) MT_TRY(plan(lt, &part->call, p, part->at, part->rows, 1, why));
    }
    return MT_OK;
}

/* The gradient of a member without rows is c, or zeros; other results of it have no elements. */
static mt_status finish_empty(const mt_lt_product *p, mt_lt_place at, cudaStream_t stream)
{
    lt_data x = data_of(p, at);
    size_t bytes = (size_t)(p->n * p->k) * (p->d_real ? sizeof(float) : sizeof(uint16_t));
    if (p->layout != MT_GEMM_NT || (p->c && x.c == x.d)) return MT_OK;
    if (p->c)
        MT_CUDA(cudaMemcpyAsync(x.d, x.c, bytes, cudaMemcpyDefault, stream));
    else
        MT_CUDA(cudaMemsetAsync(x.d, 0, bytes, stream));
    return MT_OK;
}

static mt_status launch_members(mt_cublaslt *lt, const mt_lt_product *p)
{
    for (int64_t e = 0; e < p->rows.members; e++) {
        mt_lt_part *part = &lt->parts[e];
        int s = (int)(e % MT_LT_STREAMS);
        void *own = (char *)lt->workspace + (size_t)s * MT_LT_WORKSPACE;
        if (part->rows > 0)
            MT_TRY(launch(lt, &part->call, p, part->at, part->alpha, own, lt->streams[s]));
        else
            MT_TRY(finish_empty(p, part->at, lt->streams[s]));
    }
    return MT_OK;
}

/* The op's stream waits for the members' also when one of them failed. */
static mt_status loop(mt_stream *stream, mt_cublaslt *lt, const mt_lt_product *p, bool run,
                      const char **why)
{
    cudaStream_t queue = mt_cuda_stream(stream);
    if (!run && mt_gemm_has_factor(&p->factor)) return MT_OK; /* they are not there yet */
    MT_TRY(read_members(stream, lt, p));
    MT_TRY(plan_members(lt, p, why));
    if (*why || !run) return MT_OK;
    MT_CUDA(cudaEventRecord(lt->fork, queue));
    for (int s = 0; s < MT_LT_STREAMS; s++)
        MT_CUDA(cudaStreamWaitEvent(lt->streams[s], lt->fork, 0));
    mt_status status = launch_members(lt, p);
    for (int s = 0; s < MT_LT_STREAMS; s++) {
        MT_CUDA(cudaEventRecord(lt->joined[s], lt->streams[s]));
        MT_CUDA(cudaStreamWaitEvent(queue, lt->joined[s], 0));
    }
    MT_TRY(status);
    MT_LAUNCHED(stream, "gemm (cuBLASLt, a call per member)");
    return MT_OK;
}

/* ---- the choice --------------------------------------------------------------------------------
 */

bool mt_cublaslt_is_uniform(const mt_lt_product *p)
{
    return !p->rows.first_dims && !mt_gemm_has_factor(&p->factor);
}

static const char *refusal(const mt_cublaslt *lt, const mt_lt_product *p)
{
    int64_t rows = p->rows.first_dims ? p->rows.m : p->rows.members * p->rows.m;
    if (p->bias) return "cuBLASLt adds no f32 bias to a result of bf16";
    if (p->c && !p->d_real) return "cuBLASLt rounds twice where it adds to a matrix of bf16";
    if (p->n <= 0 || p->k <= 0 || rows <= 0) return "there is nothing to multiply";
    if (p->n > INT32_MAX || p->k > INT32_MAX || rows > INT32_MAX || p->rows.members > INT32_MAX)
        return "an extent is over 2^31";
    if (mt_cublaslt_is_uniform(p)) return NULL;
    if (lt->groups != MT_LT_OURS) return NULL;
    return mt_gemm_has_factor(&p->factor) ? "the members have factors of their own"
                                          : "ragged rows are ours in this set";
}

mt_status mt_cublaslt_gemm(mt_stream *stream, mt_cublaslt *lt, const mt_lt_product *p, bool run,
                           const char **why)
{
    *why = refusal(lt, p);
    if (*why) return MT_OK;
    if (mt_cublaslt_is_uniform(p)) return uniform(stream, lt, p, run, why);
    return lt->groups == MT_LT_GROUPED ? mt_lt_grouped(stream, lt, p, run, why)
                                       : loop(stream, lt, p, run, why);
}
