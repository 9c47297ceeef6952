/* The plan device as the cuda backend: the memory that its weights, operands and scratch take, by
 * the code of the backend itself, which needs no GPU for it. */
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/device_priv.h"
#include "kernels/cuda/moe_gemm_path.h"
#include "kernels/cuda/scratch.h"

/* Of an H200, where there is no card to ask; its compute capability, also where the set does not
 * run on the card. */
enum { PROCESSORS = 132, CAPABILITY = 90, SHARED = 232448 };

/* ---- ops that ask for memory --------------------------------------------------------------------
 */

static mt_status take(mt_stream *stream, size_t scratch, size_t operands)
{
    void *p;
    if (operands) MT_TRY(mt_cuda_operands(stream, &p, operands));
    return scratch ? mt_cuda_scratch(stream, &p, scratch) : MT_OK;
}

#define PLAN(op, dtype)                                                                            \
    static mt_status plan_##op##_##dtype(mt_stream *stream, const struct mt_##op##_args *args)     \
    {                                                                                              \
        return take(stream, mt_cuda_##op##_scratch_##dtype(stream, args), 0);                      \
    }
#define PLAN_OP(op) MT_CUDA_DTYPES(PLAN, op)
MT_CUDA_SCRATCH_OPS(PLAN_OP)

#define PLAN_FORMAT_OP(op)                                                                         \
    static mt_status plan_##op(mt_stream *stream, const struct mt_##op##_args *args)               \
    {                                                                                              \
        return take(stream, mt_cuda_##op##_scratch(stream, args), 0);                              \
    }
MT_CUDA_SCRATCH_FORMAT_OPS(PLAN_FORMAT_OP)

static mt_status plan_gemm(mt_stream *stream, const struct mt_gemm_args *args)
{
    size_t scratch, operands;
    mt_cuda_gemm_bytes(stream, args, &scratch, &operands);
    return take(stream, scratch, operands);
}

static mt_status plan_moe_gemm(mt_stream *stream, const struct mt_moe_gemm_args *args)
{
    mt_cuda_gemm_path path;
    return mt_cuda_moe_gemm_choose(stream, args, &path) ? plan_gemm(stream, &args->gemm)
                                                        : mt_moe_gemm_parts(stream, args);
}

#define TAKE_f64(op)       k->op = plan_##op##_f64;
#define TAKE_f32(op)       k->op = plan_##op##_f32;
#define TAKE_bf16(op)      k->op = plan_##op##_bf16;
#define TAKE_FORMAT_OP(op) k->op = plan_##op;

static void take_ops(struct mt_kernels *k, mt_dtype dtype)
{
    if (dtype == MT_F64) {
        MT_CUDA_SCRATCH_OPS(TAKE_f64)
    } else if (dtype == MT_F32) {
        MT_CUDA_SCRATCH_OPS(TAKE_f32)
    } else {
        MT_CUDA_SCRATCH_OPS(TAKE_bf16)
    }
    MT_CUDA_SCRATCH_FORMAT_OPS(TAKE_FORMAT_OP)
    k->gemm = plan_gemm, k->moe_gemm = plan_moe_gemm;
}

/* ---- opening ----------------------------------------------------------------------------------
 */

static const struct mt_cuda_set *find_set(const char *name)
{
    for (int i = 0; i < MT_CUDA_SET_COUNT; i++)
        if (!strcmp(mt_cuda_sets[i].name, name)) return &mt_cuda_sets[i];
    return NULL;
}

static size_t workspace_of(const struct mt_cuda_set *set)
{
    return set->cublaslt ? mt_cublaslt_workspace(set->groups) : 0;
}

/* The card's multiprocessors, and whether Hopper's kernels run: those of a set that has others
 * beside cuBLASLt, too. */
static void take_card(struct cuda *cuda, const struct mt_cuda_set *set)
{
    int capability;
    cuda->multiprocessors = mt_cuda_processors(&capability, &cuda->shared);
    if (!cuda->multiprocessors) cuda->multiprocessors = PROCESSORS, cuda->shared = SHARED;
    if (capability < set->least || capability > set->most)
        capability = CAPABILITY, cuda->shared = SHARED;
    cuda->hopper = set->hopper && capability == CAPABILITY;
}

mt_status mt_cuda_plan(mt_device *device, const char *kernel_set,
                       struct mt_kernels tables[MT_DTYPE_COUNT])
{
    static const struct mt_kernels *const real[MT_DTYPE_COUNT] = {
        [MT_F64] = &mt_cuda_kernels_f64,
        [MT_F32] = &mt_cuda_kernels_f32,
        [MT_BF16] = &mt_cuda_kernels_bf16,
    };
    const struct mt_cuda_set *set = find_set(kernel_set);
    MT_REQUIRE(set, MT_ECONFIG, "kernel set '%s' is not one of cuda's", kernel_set);
    struct cuda *cuda = calloc(1, sizeof *cuda);
    MT_REQUIRE(cuda, MT_ENOMEM, "device plan: no %zu bytes for a GPU's", sizeof *cuda);
    take_card(cuda, set);
    cuda->fp8 = set->fp8;
    const char *path =
        set->hopper && !cuda->hopper ? mt_cuda_sets[MT_CUDA_SET_generic].gemm_path : set->gemm_path;
    device->impl = cuda, device->kernel_set = set->name, device->threads = 1;
    device->bytes[MT_MEMORY_WORKSPACE] = device->peak[MT_MEMORY_WORKSPACE] =
        (int64_t)workspace_of(set);
    for (int i = 0; i < MT_DTYPE_COUNT; i++) {
        if (!real[i]) continue;
        struct mt_kernels *k = &tables[i];
        k->packed_bytes = real[i]->packed_bytes, k->packed_shared = real[i]->packed_shared;
        k->moe_gemm_fuses = real[i]->moe_gemm_fuses, k->gemm_operand = real[i]->gemm_operand;
        k->quantize_fuses = real[i]->quantize_fuses;
        k->quantize_decodes = real[i]->quantize_decodes;
        k->weights_from_dz = real[i]->weights_from_dz;
        k->decoded_weights = real[i]->decoded_weights;
        k->most_experts = real[i]->most_experts;
        k->gemm_codes = set->fp8 && i == MT_BF16 ? mt_cuda_gemm_reads_codes : NULL;
        k->weighs_after =
            cuda->hopper && set->groups == MT_LT_OURS && i == MT_BF16 ? mt_cuda_weighs_after : NULL;
        const char *wide = mt_cuda_wide_gemm_path((mt_dtype)i, cuda->hopper);
        k->gemm_path = wide ? wide : path;
        take_ops(k, (mt_dtype)i);
        if (set->groups != MT_LT_OURS) /* no kernel has cuBLASLt's products and more */
            k->moe_gemm = mt_moe_gemm_parts, k->moe_gemm_fuses = NULL;
        device->kernels[i] = k;
    }
    return MT_OK;
}
