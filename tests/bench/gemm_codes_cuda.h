/* Quantized operands of the cuda GEMM's benchmark: random codes and scales in memory of the GPU,
 * and products of them. */
#pragma once

#include "tests/bench/gemm_cuda.h"

#include "core/recipe.h"
#include "kernels/codec.h"

/* Formats of W, X and dY, as presets have them. */
static const struct coding {
    const char *name;
    mt_format_id id;
    bool wide_dy, two_d_w, pow2;
} codings[] = {
    { "fp8_tensor", MT_FORMAT_FP8_TENSOR, true, false, false },
    { "fp8_delayed", MT_FORMAT_FP8_DELAYED, false, false, false },
    { "fp8_block", MT_FORMAT_FP8_BLOCK, false, true, true },
    { "fp8_block:pow2=off", MT_FORMAT_FP8_BLOCK, false, true, false },
    { "mxfp8", MT_FORMAT_MXFP8, false, false, true },
    { "nvfp4", MT_FORMAT_NVFP4, false, true, false },
};
enum { CODINGS = sizeof codings / sizeof *codings };

static const char *const layout_names[] = { "fprop", "dgrad", "wgrad" };

/* ---- operands ----------------------------------------------------------------------------------
 */

enum values { INTEGERS, /* of at most 4: fp8 tensor cores lose nothing of sums of 128 */ NORMAL };

/* `bytes` of memory on the device: a block of `size`-byte values, again and again. */
static void *repeated(const void *block, size_t block_bytes, size_t bytes)
{
    char *p = device_buffer(bytes);
    for (size_t at = 0; at < bytes; at = at ? 2 * at : block_bytes) {
        size_t n = at ? at : block_bytes;
        if (n > bytes - at) n = bytes - at;
        CUDA_OK(cudaMemcpy(p + at, at ? (const void *)p : block, n, cudaMemcpyDefault));
    }
    return p;
}

static void *random_codes(const mt_direction *d, size_t bytes, enum values values, uint64_t seed)
{
    enum { BLOCK = (1 << 19) - 4099 };
    mt_codec codec = mt_codec_of(d->options.element);
    uint8_t *codes = malloc(BLOCK);
    assert_non_null(codes);
    for (int64_t i = 0; i < BLOCK; i++) {
        double u = mt_rng_uniform(seed, 0, (uint64_t)i);
        double v = values == INTEGERS ? floor(9 * u) - 4 : 16 * mt_rng_normal(seed, 1, (uint64_t)i);
        codes[i] = d->format->codes_per_byte == 2 ? (uint8_t)(256 * u)
                                                  : (uint8_t)mt_encode(codec, (float)v);
    }
    void *p = repeated(codes, BLOCK, bytes);
    free(codes);
    return p;
}

static void *random_scales(const mt_direction *d, size_t bytes, uint64_t seed)
{
    enum { BLOCK = 99991 };
    mt_codec e4m3 = mt_codec_of(MT_ELEMENT_E4M3);
    size_t size = d->format->scale == MT_SCALE_F32 ? sizeof(float) : 1;
    float *real = malloc(BLOCK * sizeof *real);
    uint8_t *byte = malloc(BLOCK);
    assert_true(real && byte);
    for (int64_t i = 0; i < BLOCK; i++) {
        double u = mt_rng_uniform(seed, 2, (uint64_t)i);
        int e = (int)(5 * u) - 2;
        real[i] = d->options.pow2 ? ldexpf(1, e) : (float)(0.5 + u);
        byte[i] = (uint8_t)(d->format->scale == MT_SCALE_E8M0 ? 127 + e
                                                              : mt_encode(e4m3, (float)(0.5 + u)));
    }
    void *p = repeated(size == 1 ? (void *)byte : real, BLOCK * size, bytes);
    free(real), free(byte);
    return p;
}

/* A direction of random codes; padded, if it can be, with codes between members, too. */
static void make_coded(mt_qtensor *q, mt_group group, mt_dir dir, const struct coding *c,
                       mt_operand operand, enum values values, bool padded, uint64_t seed)
{
    mt_format_spec spec = mt_format_spec_default(c->id);
    *q = (mt_qtensor){ .group = group };
    mt_direction *d = &q->dir[dir];
    bool weight = operand == MT_OPERAND_W;
    if (operand == MT_OPERAND_DY && c->wide_dy) spec.options.element = MT_ELEMENT_E5M2;
    spec.options.pow2 = spec.format->scale == MT_SCALE_F32 && c->pow2;
    spec.options.two_d = weight && c->two_d_w;
    *d = mt_direction_of(spec);
    if (padded && !weight && mt_direction_pads(d, dir, &group)) d->layout = MT_LAYOUT_PADDED;
    d->codes = random_codes(d, mt_direction_code_bytes(d, dir, &group), values, seed);
    d->scales = random_scales(d, mt_direction_scale_bytes(d, dir, &group), seed + 1);
    float *amax = malloc((size_t)group.members * sizeof *amax);
    assert_non_null(amax);
    for (int64_t e = 0; e < group.members; e++)
        amax[e] = (float)(1 + mt_rng_uniform(seed, 3, (uint64_t)e));
    d->amax = upload(amax, (size_t)group.members * sizeof *amax);
    free(amax);
}

static void free_coded(mt_qtensor *q)
{
    for (int d = 0; d < MT_DIR_COUNT; d++) {
        if (!q->dir[d].format) continue;
        device_free(q->dir[d].codes), device_free(q->dir[d].scales), device_free(q->dir[d].amax);
    }
}

struct product {
    mt_gemm_layout layout;
    const struct coding *coding;
    int64_t n, k, depth, columns, count; /* elements of the result */
    mt_qtensor a, b;
    struct mt_gemm_args args;
};

static void make_product(struct product *p, const struct rows *r, mt_gemm_layout layout,
                         const struct coding *c, int64_t n, int64_t k, enum values values,
                         bool padded)
{
    mt_group rows_k = mt_group_ragged_rows(r->members, r->capacity, k, r->first_dims, r->offsets_k);
    mt_group rows_n = mt_group_ragged_rows(r->members, r->capacity, n, r->first_dims, r->offsets_n);
    mt_group w = mt_group_uniform(r->members, n, k);
    bool wgrad = layout == MT_GEMM_NT, along = layout == MT_GEMM_TN;
    *p = (struct product){ .layout = layout, .coding = c, .n = n, .k = k };
    p->depth = along ? k : n, p->columns = along ? n : k;
    p->count = (wgrad ? r->members * n : r->total) * p->columns;
    make_coded(&p->a, wgrad ? rows_k : w, along ? MT_ROW : MT_COL, c,
               wgrad ? MT_OPERAND_X : MT_OPERAND_W, values, padded, 10);
    make_coded(&p->b, along ? rows_k : rows_n, wgrad ? MT_COL : MT_ROW, c,
               along ? MT_OPERAND_X : MT_OPERAND_DY, values, padded, 20);
    p->args = (struct mt_gemm_args){ .dtype = MT_BF16,
                                     .layout = layout,
                                     .a = &p->a,
                                     .b = &p->b,
                                     .d_dtype = wgrad ? MT_F32 : MT_BF16 };
}

static void free_product(struct product *p)
{
    free_coded(&p->a), free_coded(&p->b);
}
