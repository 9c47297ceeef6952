/* Whether the cuda backend runs a moe_gemm as one kernel, and which. */
#pragma once

#include "kernels/cuda/gemm_path.h"

#ifdef __cplusplus
extern "C" {
#endif

/* False: gather, gemm and SwiGLU run in turn, the gemm by the path of mt_cuda_gemm_choose, which
 * *path does not tell. */
bool mt_cuda_moe_gemm_choose(mt_stream *stream, const struct mt_moe_gemm_args *args,
                             mt_cuda_gemm_path *path);

/* The fused kernel by a given path, for tests and benchmarks; MT_EUNSUPPORTED where there is none
 * for these arguments. */
mt_status mt_cuda_moe_gemm_by(mt_stream *stream, const struct mt_moe_gemm_args *args,
                              const mt_cuda_gemm_path *path);

/* One line: "gather + wgmma 256x192, pairs + swiglu, one kernel", "gather, then ..., then swiglu".
 */
enum { MT_CUDA_MOE_GEMM_TEXT = 96 };
void mt_cuda_moe_gemm_print(char text[MT_CUDA_MOE_GEMM_TEXT], const struct mt_moe_gemm_args *args,
                            const mt_cuda_gemm_path *path, bool fused);

#ifdef __cplusplus
}
#endif
