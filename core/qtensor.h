/* A quantized grouped tensor: a group and up to two directions, each with its own format, codes and
 * scales in one contiguous buffer for all members. "Hybrid" is a qtensor whose directions differ. */
#pragma once

#include "core/format.h"
#include "core/group.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum mt_dir { MT_ROW, MT_COL, MT_DIR_COUNT } mt_dir;

/* How a direction's codes lie in memory. The codes are the same. */
typedef enum mt_layout {
    MT_LAYOUT_COMPACT, /* NUMERICS section 3 */
    MT_LAYOUT_PADDED,  /* line pitch a multiple of 16 bytes, members at 128 bytes */
    MT_LAYOUT_PACKED   /* the order a backend's GEMM reads a weight in; private to that backend */
} mt_layout;

typedef struct mt_direction {
    const mt_format *format; /* NULL: this direction is absent */
    mt_layout layout;
    bool swizzled; /* scales in the GEMM layout of NUMERICS section 3 */
    void *codes;
    void *scales;
    float *amax; /* f32[members] */
} mt_direction;

typedef struct mt_qtensor {
    mt_group group;
    mt_direction dir[MT_DIR_COUNT];
} mt_qtensor;

/* A plain tensor seen as a qtensor: both directions are the same borrowed bytes. */
static inline mt_qtensor mt_qtensor_plain(mt_group group, mt_dtype dtype, void *data)
{
    mt_direction d = { mt_format_plain(dtype), MT_LAYOUT_COMPACT, false, data, NULL, NULL };
    mt_qtensor q = { group, { d, d } };
    return q;
}

#ifdef __cplusplus
}
#endif
