/* A typed, shaped, contiguous row-major view of memory that somebody else owns. */
#pragma once

#include "core/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MT_MAX_DIMS = 4 };

typedef struct mt_tensor {
    void *data; /* device memory; NULL means "no tensor" where an argument is optional */
    mt_dtype dtype;
    int ndim;
    int64_t shape[MT_MAX_DIMS];
} mt_tensor;

static inline int64_t mt_tensor_count(const mt_tensor *t)
{
    int64_t n = 1;
    for (int i = 0; i < t->ndim; i++) n *= t->shape[i];
    return n;
}

static inline size_t mt_tensor_bytes(const mt_tensor *t)
{
    return (size_t)mt_tensor_count(t) * mt_dtype_size(t->dtype);
}

/* Rows and columns of the matrix that a tensor is to a matrix op: last dimension, and the rest. */
static inline int64_t mt_tensor_cols(const mt_tensor *t)
{
    return t->ndim ? t->shape[t->ndim - 1] : 1;
}

static inline int64_t mt_tensor_rows(const mt_tensor *t)
{
    int64_t n = 1;
    for (int i = 0; i + 1 < t->ndim; i++) n *= t->shape[i];
    return n;
}

static inline mt_tensor mt_tensor_1d(void *data, mt_dtype dtype, int64_t n)
{
    mt_tensor t = { data, dtype, 1, { n, 0, 0, 0 } };
    return t;
}

static inline mt_tensor mt_tensor_2d(void *data, mt_dtype dtype, int64_t rows, int64_t cols)
{
    mt_tensor t = { data, dtype, 2, { rows, cols, 0, 0 } };
    return t;
}

static inline mt_tensor mt_tensor_3d(void *data, mt_dtype dtype, int64_t a, int64_t b, int64_t c)
{
    mt_tensor t = { data, dtype, 3, { a, b, c, 0 } };
    return t;
}

/* Fails unless `t` has this dtype and shape; the sentence names `what` and both shapes.
 * `ndim` extents follow; an extent of -1 matches any. */
mt_status mt_tensor_check(const mt_tensor *t, const char *what, mt_dtype dtype, int ndim,
                          const int64_t *shape);

/* "bf16[2048,128]" into `text`. */
void mt_tensor_format(char text[96], const mt_tensor *t);

#ifdef __cplusplus
}
#endif
