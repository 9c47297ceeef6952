/* Products of bf16 by cuBLASLt, which is loaded while the program runs: nothing of it is needed to
 * build, or to run another kernel set.
 *
 *   cublaslt_layout.h        how its column-major matrices lie in our groups
 *   cublaslt.c               the library: where it is found, its version, its calls
 *   gemm_cublaslt.c          one call, products of uniform groups, and the loop over members
 *   gemm_cublaslt_grouped.c  all members in one call, their row counts on the device
 *
 * Uniform groups (a dense weight is one of a single member) are one call. Ragged groups are what
 * mt_lt_groups says. Sums are f32; results are bf16 or f32. The algorithm is the heuristic's, from
 * shapes, types and alignment alone, never from a timing, and only one that adds the parts of a sum
 * in a fixed order: no atomics, no reduction in place. So the same product gives the same bits on
 * the same kind of card with the same version of the library. */
#pragma once

#include "kernels/cuda/cublaslt_layout.h"
#include "kernels/cuda/gemm_factor.h"
#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Who multiplies ragged groups. */
typedef enum mt_lt_groups {
    MT_LT_OURS,
    MT_LT_GROUPED, /* cuBLASLt's grouped layout */
    MT_LT_LOOP     /* a call per member over several streams: row counts are read on the host */
} mt_lt_groups;

typedef struct mt_cublaslt mt_cublaslt;

/* Loads the library that MIXTAPE_CUBLASLT names, or libcublasLt.so.13 as the loader finds it, or
 * else from CUDA_HOME or /usr/local/cuda. MT_EDEVICE says which cannot be loaded, or what this
 * version or card (major * 10 + minor) cannot do. */
mt_status mt_cublaslt_open(mt_cublaslt **lt, mt_lt_groups groups, int capability);
void mt_cublaslt_close(mt_cublaslt **lt); /* NULL-safe, sets NULL */

/* "cuBLASLt 13.8.2, a call per member; biases": what is not its work comes last. */
const char *mt_cublaslt_text(const mt_cublaslt *lt);
mt_lt_groups mt_cublaslt_groups(const mt_cublaslt *lt);
/* Its workspace, which is device memory from the beginning: a recorded call needs no more. */
size_t mt_cublaslt_bytes(const mt_cublaslt *lt);
size_t mt_cublaslt_workspace(mt_lt_groups groups);

/* A product of plain bf16 operands. */
typedef struct mt_lt_product {
    mt_gemm_layout layout;
    mt_group rows;     /* members' rows */
    int64_t n, k;      /* of the weight or its gradient */
    const void *a, *b; /* as in mt_gemm_args: W (NT: X), and rows */
    const void *c;     /* NULL: beta 0 */
    void *d;
    bool d_real; /* f32, else bf16 */
    bool bias;
    mt_gemm_factor factor; /* of gemm_problem */
} mt_lt_product;

/* Whether this is one call of a uniform group; else it is as mt_cublaslt_groups says. */
bool mt_cublaslt_is_uniform(const mt_lt_product *p);

/* Multiplies, or (run false) only finds how. *why is NULL where it can; else nothing was done, and
 * it says why not, in static words. MT_EUNSUPPORTED: the loop while a graph is recorded. */
mt_status mt_cublaslt_gemm(mt_stream *stream, mt_cublaslt *lt, const mt_lt_product *p, bool run,
                           const char **why);

#ifdef __cplusplus
}
#endif
