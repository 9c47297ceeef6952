/* A quantized grouped tensor: a group and up to two directions, each with its own format, codes and
 * scales in one contiguous buffer for all members. "Hybrid" is a qtensor whose directions differ.
 */
#pragma once

#include <float.h>

#include "core/format_spec.h"
#include "core/group.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum mt_dir { MT_ROW, MT_COL, MT_DIR_COUNT } mt_dir;

/* How a direction's codes lie in memory. The codes are the same. */
typedef enum mt_layout {
    MT_LAYOUT_COMPACT, /* NUMERICS section 3 */
    MT_LAYOUT_PADDED, /* of transposed bytes, as products read them: [mt_padded_rows / 128][k][128],
                         each 128 rows of a member after the ones before; zeros past its last row;
                         at a multiple of MT_PADDED_ALIGN bytes */
    MT_LAYOUT_DECODED, /* in place of codes what they decode to, in bf16 that holds it exactly, as a
                          plain tensor lies; the scale that a whole member has is not in it */
    MT_LAYOUT_PACKED   /* the order a backend's GEMM reads a weight in; private to that backend */
} mt_layout;
enum { MT_PADDED_PART = 128, MT_PADDED_ALIGN = 16 };

typedef struct mt_direction {
    const mt_format *format; /* NULL: this direction is absent */
    mt_layout layout;
    bool swizzled; /* scales in the GEMM layout of NUMERICS section 3; mx and nvfp4 only */
    void *codes;
    void *scales;
    float *amax;               /* f32[members]; the second-level scale of nvfp4 is made from it */
    mt_format_options options; /* element and four_over_six also tell how to read the codes */
} mt_direction;

typedef struct mt_qtensor {
    mt_group group;
    mt_direction dir[MT_DIR_COUNT];
} mt_qtensor;

/* A direction without memory yet: compact, scales not swizzled. */
static inline mt_direction mt_direction_of(mt_format_spec spec)
{
    mt_direction d = { spec.format, MT_LAYOUT_COMPACT, false, NULL, NULL, NULL, spec.options };
    return d;
}

static inline mt_format_spec mt_direction_spec(const mt_direction *d)
{
    mt_format_spec s = { d->format, d->options };
    return s;
}

/* A plain tensor seen as a qtensor: both directions are the same borrowed bytes. */
static inline mt_qtensor mt_qtensor_plain(mt_group group, mt_dtype dtype, void *data)
{
    mt_direction d = mt_direction_of(mt_format_spec_default(mt_format_plain(dtype)->id));
    mt_qtensor q = { group, { d, d } };
    q.dir[MT_ROW].codes = q.dir[MT_COL].codes = data;
    return q;
}

/* Where the codes and scales of one member [m, k] lie in a compact direction. A *line* is what
 * scale blocks run along: a row of the source in the row direction, a column in the column
 * direction. */
typedef struct mt_direction_shape {
    bool transposed;    /* codes are stored [k, m] */
    int64_t code_lines; /* lines of codes as stored, of `code_pitch` bytes each */
    int64_t code_pitch;
    int64_t code_bytes;   /* code_lines * code_pitch */
    int64_t scale_lines;  /* lines that have scales: 128 share one under fp8_block:2d */
    int64_t scale_blocks; /* scales along a line */
    int64_t line_stride;  /* from the scale of a line to that of the next, in scales */
    int64_t block_stride; /* from a scale to the next along the line */
    int64_t scale_count;  /* of this member; with the padding of swizzled tiles */
    size_t scale_size;    /* bytes of one scale */
} mt_direction_shape;

mt_direction_shape mt_direction_shape_of(const mt_direction *d, mt_dir dir, int64_t m, int64_t k);

/* Place of line i's scale of block b among the member's. */
MT_HOST_DEVICE int64_t mt_swizzled_scale(int64_t i, int64_t b, int64_t scale_blocks)
{
    int64_t tile = i / 128 * ((scale_blocks + 3) / 4) + b / 4;
    return tile * 512 + i % 32 * 16 + i % 128 / 32 * 4 + b % 4;
}
MT_HOST_DEVICE int64_t mt_scale_place(const mt_direction *d, const mt_direction_shape *s, int64_t i,
                                      int64_t b)
{
    return d->swizzled ? mt_swizzled_scale(i, b, s->scale_blocks)
                       : i * s->line_stride + b * s->block_stride;
}

/* Bytes that codes and scales of a whole group take, in any layout but a packed one. Exact for
 * uniform groups; otherwise the most that any members within the capacity need, so that nothing is
 * read from the device. 0 scales for plain formats. */
size_t mt_direction_code_bytes(const mt_direction *d, mt_dir dir, const mt_group *group);
size_t mt_direction_scale_bytes(const mt_direction *d, mt_dir dir, const mt_group *group);

/* Rows of a padded group: at least those of all members, each member's rounded up to 128. */
static inline int64_t mt_padded_rows(const mt_group *g)
{
    int64_t rows = g->first_dims ? g->m : g->members * g->m;
    return (rows + g->members * (MT_PADDED_PART - 1) + MT_PADDED_PART - 1) / MT_PADDED_PART *
           MT_PADDED_PART;
}
/* Whether this direction of such a group can be padded: transposed codes of a byte each, of one
 * width k. */
bool mt_direction_pads(const mt_direction *d, mt_dir dir, const mt_group *group);

/* Bytes of everything mt_qtensor_place lays out, and the layout itself: pointers of both directions
 * into `memory`, each part at a multiple of 256 bytes. Two plain directions of one dtype share
 * their bytes, and so do two decoded ones of the same square blocks. `q` holds the group and the
 * directions' formats. */
size_t mt_qtensor_bytes(const mt_qtensor *q);
void mt_qtensor_place(mt_qtensor *q, void *memory);

/* The same tensor with one direction only. */
mt_qtensor mt_qtensor_select(const mt_qtensor *q, mt_dir dir);

/* Member i as a group of one, and all members at once (`views` holds group.members of them). They
 * borrow the memory. The group's arrays are read: host mirrors or a CPU device; compact only.
 * Errors: MT_EINVAL where the index or the group is bad, MT_EUNSUPPORTED for another layout. */
mt_status mt_qtensor_member(mt_qtensor *view, const mt_qtensor *q, int64_t i);
mt_status mt_qtensor_split(mt_qtensor *views, const mt_qtensor *q);

/* Fails unless present directions have known formats with options that go with them, and lie as
 * their layout asks. */
mt_status mt_qtensor_check(const mt_qtensor *q, const char *what);

/* NUMERICS section 2, nvfp4: S_enc = min(RN(6 bound / amax), FLT_MAX), 1 where amax or S_enc is 0;
 * and what the codes decode with, RN(1 / S_enc). bound is 448, or that of 4over6. */
MT_HOST_DEVICE float mt_nvfp4_encode_scale(const mt_format_options *options, float amax)
{
    float largest = 6.0f * (float)(options->four_over_six ? options->four_over_six : 448);
    if (amax == 0.0f) return 1.0f;
    float scale = largest / amax;
    if (scale > FLT_MAX) scale = FLT_MAX;
    return scale == 0.0f ? 1.0f : scale;
}

MT_HOST_DEVICE float mt_nvfp4_decode_scale(const mt_format_options *options, float amax)
{
    return 1.0f / mt_nvfp4_encode_scale(options, amax);
}

#ifdef __cplusplus
}
#endif
