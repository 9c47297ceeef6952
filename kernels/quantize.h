/* Group quantize and dequantize: any format, both directions (NUMERICS sections 2 and 3).
 *
 * These kernels do not depend on the activations' type: `dtype` only chooses the device's table.
 * The arithmetic is f32 throughout, bit for bit as NUMERICS writes it, on every backend and kernel
 * set. */
#pragma once

#include "core/device.h"
#include "core/qtensor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum mt_quantize_pass {
    MT_QUANTIZE_ALL,   /* amax where a scale needs it, then codes and scales */
    MT_QUANTIZE_AMAX,  /* only out->dir[].amax (and nan): what a sharded caller max-reduces */
    MT_QUANTIZE_CODES, /* out->dir[].amax is read, not written: it came from a producer, or over
                          ranks */
    MT_QUANTIZE_PASS_COUNT
} mt_quantize_pass;

/* Writes the directions of `out` that are present from the direction `src_dir` of `src`.
 *
 * src: the same group as out; plain (f64 is rounded to f32 first) or quantized (then its
 * dequantized f32 values are the source: requantize, without a tensor of them). Codes compact,
 * scales either way; a backend may take padded columns, and decoded directions alone or, as it
 * says, beside others (for its GEMM: mt_kernels). Capacity past the last member is neither read nor
 * written. out: options per direction; rht and from_dequantized are for the column direction. A
 * plain direction is the source cast (none if its codes are the source's own). from_dequantized
 * takes what the codes of out's row direction hold, which must not be plain, or where that is
 * absent those of a row direction in the column's own format. Codes, scales and amax must not
 * overlap src. amax f32[N] is written whole: of the rotated values under rht, of the row
 * direction's dequantized values under from_dequantized, 0 for an empty member. It may be NULL but
 * for formats with a second-level scale. ovf of fp8_block (section 2) is that of the source's dtype
 * (f32 for quantized sources, f64 and from_dequantized). scale: fp8_delayed's s, f32[N] per
 * direction; NULL: 1. running_amax: f32[N] per direction or NULL, running = max(running, what amax
 * is): slot 0 of the history.
 * bias_grad f32, members' columns back to back ([N, k] where k is uniform), or NULL: the sum over
 * each member's rows of the source, in f32: rows in order within each 128, these sums in order;
 * then added to what is there if accumulate. Not under AMAX. nan: int64[N] or NULL: NaNs in the
 * source. running_nan: int64[N] or NULL: running += NaNs in the source; not under AMAX. Stochastic
 * rounding draws from (seed, stream), the element's place, and step + *first_step (section 2). A
 * call on part of a group says which: first_member is the index of out's member 0, first_row the
 * row in its whole member of member 0's first row.
 *
 * The ops before it that make the source may be a part of the call; the result is then, to the bit,
 * that of the same device's ops in turn. src is plain, of dtype, and its group that of the rows
 * they make, of one width k. row_token int32 [rows]: row r is row row_token[r] of src's codes
 * [tokens, k], position int32 [tokens, top_k] of the same plan or NULL (mt_gather_fwd); with
 * weights real [tokens, top_k] and position, times its weight, rounded (mt_combine_bwd's dx).
 * swiglu: rows are the SwiGLU, rounded to dtype, of those of src's codes [rows, 2k]
 * (mt_swiglu_fwd). z [rows, k]: rows are its gradient, rounded, from src's codes [rows, k / 2],
 * that of its SwiGLU (mt_swiglu_bwd); dweights real [tokens, top_k] with it, or NULL: the gradient
 * of weights (NULL: of factors of 1) at position, by which the rows that a down projection made of
 * that SwiGLU are weighted (mt_weights_bwd), not under AMAX. rows_used: device int64 [1], rows of
 * all members; NULL, but not with row_token: all there is room for. scratch: mt_quantize_scratch
 * bytes. */
struct mt_quantize_args {
    mt_dtype dtype;
    mt_quantize_pass pass;
    const mt_qtensor *src;
    mt_dir src_dir;
    const mt_qtensor *out;
    const float *scale[MT_DIR_COUNT];
    float *running_amax[MT_DIR_COUNT];
    float *bias_grad;
    bool accumulate;
    int64_t *nan, *running_nan;
    uint32_t seed, stream, step;
    const uint32_t *first_step; /* device; NULL: 0 */
    uint32_t first_member, first_row;
    const int32_t *row_token; /* NULL: rows are in place */
    int64_t tokens, top_k;
    const void *weights; /* NULL: rows have none */
    const int32_t *position;
    bool swiglu;
    const void *z; /* NULL: rows are not its gradient */
    void *dweights;
    const int64_t *rows_used;
    void *scratch;
};

/* Bytes that a call with row_token, swiglu or z needs where the device does it in parts, else 0. */
mt_status mt_quantize_scratch(mt_stream *stream, const struct mt_quantize_args *args,
                              size_t *bytes);
/* The ops in turn: for backends, where they have nothing better. */
mt_status mt_quantize_parts(mt_stream *stream, const struct mt_quantize_args *args);

/* y = the values of direction `dir` of src, in the source's orientation and group layout, rounded
 * to y_dtype (f64 exact). Elements past the last member are not written. y must not overlap src. */
struct mt_dequantize_args {
    mt_dtype dtype;
    const mt_qtensor *src;
    mt_dir dir;
    void *y;
    mt_dtype y_dtype;
};

/* The scales of a direction in the other layout: compact ones swizzled (padding 0), swizzled ones
 * compact. `out` holds mt_direction_scale_bytes of it; it must not overlap the direction's scales.
 */
struct mt_swizzle_scales_args {
    mt_dtype dtype;
    const mt_qtensor *src;
    mt_dir dir;
    void *out;
};

/* fp8_delayed, once per step (section 2): rolls the amax histories of `members` and sets their
 * scales. history f32 [length, members], slot 0 (the step's amax, over ranks) first; scale f32
 * [members]. max: of the element type. most_recent: A is the last amax, else the largest of the
 * history. other f32 [members]: slot 0 of the operand's other direction, or NULL; both become the
 * larger, for an operand has one amax whichever of its directions a step quantizes. */
struct mt_delayed_update_args {
    mt_dtype dtype;
    int64_t members, length;
    int margin;
    mt_element element;
    bool most_recent;
    float *history;
    float *scale;
    float *other;
};

#ifdef __cplusplus
}
#endif
