/* Argument checks, one per op, shared by every backend. Each names the op, the argument, its value
 * and the rule; none reads device memory. */
#pragma once

#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MT_OP_CHECK(op) mt_status mt_##op##_check(const struct mt_##op##_args *args);
MT_OPS(MT_OP_CHECK)
#undef MT_OP_CHECK

/* A direction of q that is read: compact codes or padded, and what they decode with. */
mt_status mt_check_source(const mt_qtensor *q, mt_dir dir, const char *op);
bool mt_check_same_group(const mt_group *a, const mt_group *b);

/* Building blocks: `count` elements need a pointer unless count is 0. */
#define MT_CHECK_EXTENT(op, args, field)                                                           \
    MT_REQUIRE((args)->field >= 0, MT_EINVAL, "%s: " #field " is %lld, must not be negative", op,  \
               (long long)(args)->field)
#define MT_CHECK_POSITIVE(op, args, field)                                                         \
    MT_REQUIRE((args)->field > 0, MT_EINVAL, "%s: " #field " is %lld, must be positive", op,       \
               (long long)(args)->field)
#define MT_CHECK_POINTER(op, args, field, count)                                                   \
    MT_REQUIRE((args)->field || (count) == 0, MT_EINVAL, "%s: " #field " is NULL", op)

#ifdef __cplusplus
}
#endif
