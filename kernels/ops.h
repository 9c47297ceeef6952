/* The op table: one contract per op, one row per backend and dtype behind it.
 *
 * Callers use the functions mt_<op>(stream, args): they check the arguments (the same checks for
 * every backend), look the kernel up by args->dtype, and fail with MT_EUNSUPPORTED naming op, dtype
 * and device where a table has no entry. Every argument record begins with `mt_dtype dtype`, the
 * storage type of its activations; sums are kept in f32 (f64 for f64): "real" below. All pointers
 * are device memory. An empty tensor (a zero extent) is legal everywhere and touches nothing,
 * unless a contract says that outputs are zeroed. Results do not depend on the number of threads.
 */
#pragma once

#include "core/device.h"
#include "kernels/attention.h"
#include "kernels/elementwise.h"
#include "kernels/exchange.h"
#include "kernels/gemm.h"
#include "kernels/loss.h"
#include "kernels/measure.h"
#include "kernels/moe.h"
#include "kernels/norm.h"
#include "kernels/optimizer.h"
#include "kernels/quantize.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Ops with a kernel per dtype of the activations. */
#define MT_DTYPE_OPS(X)                                                                            \
    X(fill)                                                                                        \
    X(cast)                                                                                        \
    X(add)                                                                                         \
    X(swiglu_fwd)                                                                                  \
    X(swiglu_bwd)                                                                                  \
    X(embedding_fwd)                                                                               \
    X(embedding_bwd)                                                                               \
    X(rmsnorm_fwd)                                                                                 \
    X(rmsnorm_bwd)                                                                                 \
    X(qk_norm_rope_fwd)                                                                            \
    X(qk_norm_rope_bwd)                                                                            \
    X(attention_fwd)                                                                               \
    X(attention_bwd)                                                                               \
    X(router_fwd)                                                                                  \
    X(router_bwd)                                                                                  \
    X(route_plan)                                                                                  \
    X(gather_fwd)                                                                                  \
    X(gather_bwd)                                                                                  \
    X(combine_fwd)                                                                                 \
    X(combine_bwd)                                                                                 \
    X(weights_bwd)                                                                                 \
    X(exchange_plan)                                                                               \
    X(exchange_pack)                                                                               \
    X(exchange_unpack)                                                                             \
    X(exchange_arrivals)                                                                           \
    X(exchange_weights_bwd)                                                                        \
    X(moe_gemm)                                                                                    \
    X(aux_loss_fwd)                                                                                \
    X(aux_loss_bwd)                                                                                \
    X(router_bias_update)                                                                          \
    X(gemm)                                                                                        \
    X(bias_grad)                                                                                   \
    X(pack_weight)                                                                                 \
    X(cross_entropy_fwd)                                                                           \
    X(cross_entropy_bwd)                                                                           \
    X(grad_norm)                                                                                   \
    X(adamw)                                                                                       \
    X(join_master)

/* Ops whose kernels do not depend on it: the same in the table of every dtype. */
#define MT_FORMAT_OPS(X)                                                                           \
    X(quantize)                                                                                    \
    X(dequantize)                                                                                  \
    X(swizzle_scales)                                                                              \
    X(delayed_update)                                                                              \
    X(measure)

#define MT_OPS(X) MT_DTYPE_OPS(X) MT_FORMAT_OPS(X)

enum { MT_GEMM_TEXT = 160 };

struct mt_kernels {
#define MT_KERNEL_FIELD(op) mt_status (*op)(mt_stream *, const struct mt_##op##_args *);
    MT_OPS(MT_KERNEL_FIELD)
#undef MT_KERNEL_FIELD
    /* Bytes of one direction of a packed weight group (pack_weight, gemm). */
    size_t (*packed_bytes)(mt_dtype dtype, mt_dir dir, int64_t members, int64_t m, int64_t k);
    /* Whether moe_gemm is one kernel for these arguments, and the scratch that it takes; NULL:
     * never. */
    bool (*moe_gemm_fuses)(mt_stream *stream, const struct mt_moe_gemm_args *args, size_t *scratch);
    /* Whether quantize is one with the ops before it for these arguments; NULL: never. */
    bool (*quantize_fuses)(mt_stream *stream, const struct mt_quantize_args *args);
    /* Where fprop and dgrad are not quantized, too, the routing weights' gradient is taken from
     * that of the down projection's input (mt_weights_bwd), not from its output: for memory, and
     * where reading that output takes time. */
    bool weights_from_dz;
    /* A packed group is its values in their order: both directions may be the same memory, and any
     * memory that holds the values so, aligned to 16 bytes, is one. */
    bool packed_shared;
    /* A GEMM reads weights of bf16 decoded (MT_LAYOUT_DECODED) where gemm_operand is bf16 and codes
     * are not multiplied, both operands of wgrad padded where they are. */
    bool decoded_weights;
    /* The dtype that a GEMM reads an operand of this format as: its own, or what it is decoded to
     * first. */
    mt_dtype (*gemm_operand)(const mt_format_spec *spec);
    /* Whether a GEMM multiplies operands of these formats as codes. NULL: none. */
    mt_gemm_reading (*gemm_codes)(mt_gemm_layout layout, const mt_format_spec *a,
                                  const mt_format_spec *b);
    /* One line for `doctor` and the log: which GEMM path runs on operands of the table's dtype. */
    const char *gemm_path;
    /* One line: the path of gemm for these arguments, and why it is not the one that its kernel set
     * is named after. NULL: gemm_path. */
    mt_status (*gemm_chosen)(char text[MT_GEMM_TEXT], mt_stream *stream,
                             const struct mt_gemm_args *args);
    /* Whether quantize of bf16 elements makes directions of this format decoded no slower than
     * their codes, rows being multiples of 16 bytes; NULL: never. */
    bool (*quantize_decodes)(const mt_format_spec *spec);
    /* Whether the rows of dY of a down projection [D, F] are gathered in its products, and weighted
     * after the first of them (mt_moe_gemm_args); NULL: they are weighted before, for all. */
    bool (*weighs_after)(int64_t d, int64_t f);
    int64_t most_experts; /* that a token can be routed among; 0: any number */
};

#define MT_OP_DECLARE(op) mt_status mt_##op(mt_stream *stream, const struct mt_##op##_args *args);
MT_OPS(MT_OP_DECLARE)
#undef MT_OP_DECLARE

/* The kernels of a device for a dtype; MT_EUNSUPPORTED names both when there are none. */
mt_status mt_device_kernels(const mt_device *device, mt_dtype dtype,
                            const struct mt_kernels **kernels);

/* Opens a device: "cpu", "plan" (needs nothing, computes nothing), "cuda", or "auto" (cuda where
 * there is one, else cpu). `kernel_set` forces one of the device's kernel sets
 * (kernels/backends.h); NULL: the one that MIXTAPE_KERNELS names, if it is one of that device's, or
 * the best that this machine runs. `threads` 0 takes OMP_NUM_THREADS or every core. "cuda:1" is the
 * second GPU that this process sees, and then the one of the calling thread.
 */
mt_status mt_device_open(mt_device **device, const char *name, const char *kernel_set, int threads);
/* How many "cuda" there are for this process; of others one. */
mt_status mt_device_count(int *count, const char *name);

#ifdef __cplusplus
}
#endif
