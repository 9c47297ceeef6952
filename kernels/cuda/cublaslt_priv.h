/* Inside the cuBLASLt products: the library's calls, and one product of its own as it is told. */
#pragma once

#include <cublasLt.h>

#include "kernels/cuda/backend.h"
#include "kernels/cuda/cublaslt.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What is called, by name; Init is what the header's inline functions call. */
#define MT_LT_CALLS(X)                                                                             \
    X(GetVersion)                                                                                  \
    X(GetStatusName)                                                                               \
    X(Create)                                                                                      \
    X(Destroy)                                                                                     \
    X(Matmul)                                                                                      \
    X(MatmulAlgoGetHeuristic)                                                                      \
    X(MatmulDescInit_internal)                                                                     \
    X(MatmulDescSetAttribute)                                                                      \
    X(MatrixLayoutInit_internal)                                                                   \
    X(MatrixLayoutSetAttribute)                                                                    \
    X(MatmulPreferenceInit_internal)                                                               \
    X(MatmulPreferenceSetAttribute)

/* What the headers of cuBLAS 13.1 lack of grouped layouts (cublaslt.c holds it against those that
 * have it). The averages are 8 bytes long, whatever those headers say. */
typedef cublasStatus_t (*mt_lt_grouped_init)(cublasLtMatrixLayout_t layout, size_t bytes,
                                             cudaDataType type, int groups, const void *rows,
                                             const void *cols, const void *ld);
enum {
    MT_LT_PREFERENCE_AVERAGE_DEPTH = 13,
    MT_LT_PREFERENCE_AVERAGE_ROWS = 14,
    MT_LT_PREFERENCE_AVERAGE_COLS = 15
};

/* Descriptors in the size of the newest known version. */
typedef struct mt_lt_descriptor {
    uint64_t data[16];
} mt_lt_descriptor;

enum { MT_LT_STREAMS = 4, MT_LT_WORKSPACE = 32 << 20 };

/* One call of cublasLtMatmul: what was asked, and the algorithm that was answered. */
typedef struct mt_lt_call {
    cublasLtMatmulDescOpaque_t operation;
    mt_lt_descriptor a, b, d, preference;
    cublasLtMatmulAlgo_t algorithm;
} mt_lt_call;

/* A member's part in the loop. */
typedef struct mt_lt_part {
    mt_lt_call call;
    mt_lt_place at;
    int64_t rows;
    float alpha;
} mt_lt_part;

struct mt_cublaslt {
#define MT_LT_FIELD(name) __typeof__(cublasLt##name) *name;
    MT_LT_CALLS(MT_LT_FIELD)
#undef MT_LT_FIELD
    mt_lt_grouped_init GroupedMatrixLayoutInit_internal; /* NULL: not in this version */
    cublasLtHandle_t handle;
    mt_lt_groups groups;
    char text[96];
    void *workspace; /* MT_LT_WORKSPACE bytes; of the loop, for each stream */
    /* of the loop */
    cudaStream_t streams[MT_LT_STREAMS];
    cudaEvent_t fork, joined[MT_LT_STREAMS];
    mt_lt_part *parts;             /* [room] */
    int64_t *first_dims, *offsets; /* [room], [room + 1] */
    float *scales[2];              /* [room]: of a, of b, or their amaxes */
    int64_t room;
};

mt_status mt_lt_error(const mt_cublaslt *lt, cublasStatus_t status, const char *call,
                      const char *file, int line);
#define MT_LT(lt, call)                                                                            \
    do {                                                                                           \
        cublasStatus_t mt_lt_ = (lt)->call;                                                        \
        if (mt_lt_ != CUBLAS_STATUS_SUCCESS)                                                       \
            return mt_lt_error((lt), mt_lt_, "cublasLt" #call, __FILE__, __LINE__);                \
    } while (0)

/* A descriptor of the operation, and preferences: workspace, reductions in a fixed order only. */
mt_status mt_lt_operation(mt_cublaslt *lt, mt_lt_call *call, const mt_lt_shape *s, bool on_device);
mt_status mt_lt_prefer(mt_cublaslt *lt, mt_lt_call *call, unsigned reductions);
mt_status mt_lt_prefer_bytes(mt_cublaslt *lt, mt_lt_call *call, int attribute, const void *value,
                             size_t bytes);
/* The heuristic's first algorithm; *why: it has none. */
mt_status mt_lt_ask(mt_cublaslt *lt, mt_lt_call *call, const char **why);

/* gemm_cublaslt_grouped.c, gemm_cublaslt_members.cu */
mt_status mt_lt_grouped(mt_stream *stream, mt_cublaslt *lt, const mt_lt_product *p, bool run,
                        const char **why);

/* Arrays on the device, an entry a member, that the grouped layouts point at. */
enum { MT_LT_ZERO_ROWS = 8 };
typedef struct mt_lt_members {
    const void **a, **b, **c;
    void **d;
    int *a_rows, *a_cols, *b_rows, *b_cols, *d_rows, *d_cols;
    float *scalars; /* alpha, beta */
    void *zeros;    /* MT_LT_ZERO_ROWS rows: the operands of an empty member, NT */
} mt_lt_members;
mt_status mt_lt_write_members(mt_stream *stream, const mt_lt_members *to, const mt_lt_product *p);

#ifdef __cplusplus
}
#endif
