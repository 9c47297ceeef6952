/* Groups, inputs and results for the tests of quantize and dequantize. */
#pragma once

#include <stdlib.h>
#include <string.h>

#include "kernels/codec.h"
#include "tests/support/test.h"

#ifdef MT_HAVE_cuda
#include "kernels/cuda/quantize_path.h"
#endif

enum { CASE_MEMBERS = 304 };

/* A group with its arrays, in any of the four modes. */
struct quantize_case {
    mt_group group;
    int64_t first[CASE_MEMBERS], last[CASE_MEMBERS], offsets[CASE_MEMBERS + 1];
    int64_t total; /* elements of all members */
};

/* Rows and columns of n members; what the mode keeps uniform is taken from the first. `tail`: rows
 * (varying last: columns, varying both: elements) of capacity past the last member. */
static inline void case_make(struct quantize_case *c, mt_group_mode mode, int64_t n,
                             const int64_t *rows, const int64_t *cols, int64_t tail)
{
    bool vary_rows = mode == MT_GROUP_VARYING_FIRST || mode == MT_GROUP_VARYING_BOTH;
    bool vary_cols = mode == MT_GROUP_VARYING_LAST || mode == MT_GROUP_VARYING_BOTH;
    int64_t m = n ? rows[0] : 0, k = n ? cols[0] : 0, sum_rows = 0, sum_cols = 0;
    c->offsets[0] = 0;
    for (int64_t i = 0; i < n; i++) {
        c->first[i] = vary_rows ? rows[i] : m;
        c->last[i] = vary_cols ? cols[i] : k;
        c->offsets[i + 1] = c->offsets[i] + c->first[i] * c->last[i];
        sum_rows += c->first[i], sum_cols += c->last[i];
    }
    c->total = c->offsets[n];
    c->group = (mt_group){ .members = n, .m = m, .k = k };
    if (mode == MT_GROUP_VARYING_FIRST) c->group.m = sum_rows + tail;
    if (mode == MT_GROUP_VARYING_LAST) c->group.k = sum_cols + tail;
    if (mode == MT_GROUP_VARYING_BOTH) c->group.m = 1, c->group.k = c->total + tail;
    if (vary_rows) c->group.first_dims = c->first;
    if (vary_cols) c->group.last_dims = c->last;
    if (vary_rows || vary_cols) c->group.offsets = c->offsets;
}

/* Bytes that a direction of exactly these members takes. */
static inline size_t case_code_bytes(const struct quantize_case *c, const mt_direction *d,
                                     mt_dir dir)
{
    int64_t bytes = 0;
    for (int64_t i = 0; i < c->group.members; i++)
        bytes += mt_direction_shape_of(d, dir, c->first[i], c->last[i]).code_bytes;
    assert_true((size_t)bytes <= mt_direction_code_bytes(d, dir, &c->group));
    return (size_t)bytes;
}

static inline size_t case_scale_bytes(const struct quantize_case *c, const mt_direction *d,
                                      mt_dir dir)
{
    size_t bytes = 0;
    for (int64_t i = 0; i < c->group.members; i++) {
        mt_direction_shape s = mt_direction_shape_of(d, dir, c->first[i], c->last[i]);
        bytes += (size_t)s.scale_count * s.scale_size;
    }
    assert_true(bytes <= mt_direction_scale_bytes(d, dir, &c->group));
    return bytes;
}

/* A result with canaries right after the bytes its members need. */
struct quantize_result {
    mt_qtensor q;
    size_t code_bytes[MT_DIR_COUNT], scale_bytes[MT_DIR_COUNT];
};

static inline uint64_t case_mix(uint64_t index)
{
    uint64_t z = (index + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

/* Whether a GPU works on little as it would on more than it has at a time. */
static inline void case_in_strips(bool always)
{
#ifdef MT_HAVE_cuda
    if (strcmp(test_device_name(), "cpu") != 0) mt_cuda_quantize_in_strips(test_device(), always);
#else
    (void)always;
#endif
}

/* Whether a GPU's blocks have the shared memory of cards that have least, 99 KB, or their own. */
static inline void case_in_99_kb(bool limited)
{
#ifdef MT_HAVE_cuda
    static int own;
    if (strcmp(test_device_name(), "cpu") == 0) return;
    if (!own) own = mt_cuda_shared(test_device());
    mt_cuda_limit_shared(test_device(), limited ? 99 << 10 : own);
#else
    (void)limited;
#endif
}

/* Formats as texts, NULL for an absent direction. rht and source are dropped from the row
 * direction. */
static inline void result_make(struct quantize_result *r, const struct quantize_case *c,
                               const char *row, const char *col, bool swizzled)
{
    const char *texts[MT_DIR_COUNT] = { row, col };
    static uint64_t results;
    const uint64_t mix = case_mix(results++); /* in no order: */
    case_in_strips(mix & 1);                  /* every other one, */
    case_in_99_kb((mix & 6) == 0);            /* every fourth one */
    *r = (struct quantize_result){ .q = { .group = c->group } };
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
        if (!texts[dir]) continue;
        mt_format_spec spec;
        assert_ok(mt_format_spec_parse(&spec, texts[dir]));
        if (dir == MT_ROW) spec.options.rht = spec.options.from_dequantized = false;
        if (dir == MT_ROW) spec.options.rht_mask = 0;
        mt_direction *d = &r->q.dir[dir];
        *d = mt_direction_of(spec);
        d->swizzled = swizzled;
        r->code_bytes[dir] = case_code_bytes(c, d, (mt_dir)dir);
        r->scale_bytes[dir] = case_scale_bytes(c, d, (mt_dir)dir);
        d->codes = test_alloc((int64_t)r->code_bytes[dir], MT_U8);
        d->scales = test_alloc((int64_t)r->scale_bytes[dir], MT_U8);
        d->amax = test_alloc(c->group.members, MT_F32);
    }
}

/* The direction's result as what codes decode to (MT_LAYOUT_DECODED), over 0xAA; of scales it has
 * those of whole members. */
static inline void result_decode(struct quantize_result *r, const struct quantize_case *c,
                                 mt_dir dir)
{
    mt_direction *d = &r->q.dir[dir];
    int64_t capacity = mt_group_capacity(&c->group);
    test_free(d->codes);
    d->layout = MT_LAYOUT_DECODED, d->codes = test_alloc(capacity, MT_BF16);
    memset(d->codes, 0xAA, (size_t)capacity * sizeof(uint16_t));
    r->code_bytes[dir] = (size_t)capacity * sizeof(uint16_t);
    if (d->format->block) r->scale_bytes[dir] = 0;
}

static inline void result_free(struct quantize_result *r)
{
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
        test_free(r->q.dir[dir].codes);
        test_free(r->q.dir[dir].scales);
        test_free(r->q.dir[dir].amax);
    }
}

/* What a call gives beside directions. */
struct beside {
    int64_t *nan, *running_nan;
    float *running[MT_DIR_COUNT], *scale[MT_DIR_COUNT];
};

static inline struct beside beside_make(int64_t n, bool scales)
{
    struct beside b = { .nan = test_alloc(n, MT_I64), .running_nan = test_alloc(n, MT_I64) };
    for (int64_t i = 0; i < n; i++) b.running_nan[i] = 5 * i;
    for (int d = 0; d < MT_DIR_COUNT; d++) {
        b.running[d] = test_alloc(n, MT_F32);
        if (scales) b.scale[d] = test_alloc(n, MT_F32);
        for (int64_t i = 0; i < n; i++) {
            b.running[d][i] = i % 2 ? 3e38f : 0;
            if (scales) b.scale[d][i] = (i + d) % 3 ? 12.5f : 1;
        }
    }
    return b;
}

static inline void assert_same_beside(const struct beside *a, const struct beside *b,
                                      const mt_qtensor *q)
{
    const size_t n = (size_t)q->group.members;
    assert_memory_equal(a->nan, b->nan, n * sizeof *a->nan);
    assert_memory_equal(a->running_nan, b->running_nan, n * sizeof *a->nan);
    for (int d = 0; d < MT_DIR_COUNT; d++)
        if (q->dir[d].format) assert_memory_equal(a->running[d], b->running[d], n * sizeof(float));
}

static inline void beside_free(struct beside *b)
{
    test_free(b->nan), test_free(b->running_nan);
    for (int d = 0; d < MT_DIR_COUNT; d++) test_free(b->running[d]), test_free(b->scale[d]);
}

static inline void assert_same_direction(const struct quantize_result *a,
                                         const struct quantize_result *b, mt_dir dir)
{
    const mt_direction *x = &a->q.dir[dir], *y = &b->q.dir[dir];
    assert_memory_equal(x->codes, y->codes, a->code_bytes[dir]);
    assert_memory_equal(x->scales, y->scales, a->scale_bytes[dir]);
    if (x->amax) assert_memory_equal(x->amax, y->amax, (size_t)a->q.group.members * sizeof(float));
}

/* What the codes of a direction of nvfp4 are times their blocks' scales; past the members 0xAAAA;
 * free with test_free. */
static inline uint16_t *case_bare_values(const struct quantize_case *c, const mt_direction *d,
                                         mt_dir dir)
{
    const mt_codec e2m1 = mt_codec_of(MT_ELEMENT_E2M1), e4m3 = mt_codec_of(MT_ELEMENT_E4M3);
    const uint8_t *codes = d->codes, *scales = d->scales;
    uint16_t *y = test_alloc(mt_group_capacity(&c->group), MT_BF16), *to = y;
    memset(y, 0xAA, (size_t)mt_group_capacity(&c->group) * sizeof *y);
    for (int64_t i = 0; i < c->group.members; i++) {
        mt_direction_shape s = mt_direction_shape_of(d, dir, c->first[i], c->last[i]);
        for (int64_t e = 0; e < c->first[i] * c->last[i]; e++, to++) {
            int64_t r = e / c->last[i], k = e % c->last[i];
            int64_t line = dir == MT_ROW ? r : k, along = dir == MT_ROW ? k : r;
            uint8_t code = codes[line * s.code_pitch + along / 2] >> along % 2 * 4 & 15;
            uint8_t scale = scales[line * s.line_stride + along / 16 * s.block_stride];
            *to = mt_f32_to_bf16(mt_decode(e2m1, code) * mt_decode(e4m3, scale));
        }
        codes += s.code_bytes, scales += s.scale_count;
    }
    return y;
}

/* ---- inputs: those of golden_quantize.py ---- */

/* Bits of an f32 in 24 binades around 1; with `special` one in 32 is NaN, Inf, 0 or subnormal. */
static inline uint32_t case_draw(uint64_t seed, int64_t i, bool special)
{
    static const uint32_t odd[4] = { 0x7fc00000u, 0x7f800000u, 0, 0x123u };
    uint64_t u = case_mix((uint64_t)i + (seed << 32)), kind = u >> 1 & 127;
    uint32_t sign = (uint32_t)(u & 1) << 31;
    if (special && kind < 4) return odd[kind] | sign;
    return sign | (uint32_t)(111 + (u >> 8) % 24) << 23 | (uint32_t)(u >> 41);
}

/* The elements of the whole capacity; f32, or the upper half of its bits read as bf16 or f16. */
static inline void *case_source(const struct quantize_case *c, mt_dtype dtype, uint64_t seed,
                                bool special)
{
    int64_t count = mt_group_capacity(&c->group);
    void *p = test_alloc(count, dtype);
    for (int64_t i = 0; i < c->total; i++) {
        uint32_t u = case_draw(seed, i, special);
        if (dtype == MT_F32)
            ((uint32_t *)p)[i] = u;
        else
            ((uint16_t *)p)[i] = (uint16_t)(u >> 16);
    }
    return p; /* the tail stays poisoned: NaN */
}

/* ---- calls ---- */

/* dtype of a source as a table that the device has: quantize does not depend on it. */
static inline mt_status case_quantize(mt_device *device, const struct quantize_case *c, void *x,
                                      mt_dtype dtype, const struct quantize_result *r,
                                      uint32_t seed)
{
    mt_qtensor source = mt_qtensor_plain(c->group, dtype, x);
    mt_stream stream = { device, NULL };
    return mt_quantize(
        &stream,
        &(struct mt_quantize_args){
            .dtype = MT_F32, .src = &source, .out = &r->q, .seed = seed, .stream = 2, .step = 3 });
}

/* The values of a direction over the whole capacity; free with test_free. */
static inline void *case_values(mt_device *device, const mt_qtensor *q, mt_dir dir, mt_dtype dtype)
{
    mt_stream stream = { device, NULL };
    void *y = test_alloc(mt_group_capacity(&q->group), dtype);
    assert_ok(mt_dequantize(&stream,
                            &(struct mt_dequantize_args){
                                .dtype = MT_F32, .src = q, .dir = dir, .y = y, .y_dtype = dtype }));
    return y;
}

/* The kernel sets that run here; `run` gets a device of each. */
static inline void for_each_kernel_set(void (*run)(mt_device *device))
{
    const char *only = getenv("MIXTAPE_KERNELS");
    for (int i = 0; i < TEST_SETS; i++) {
        mt_device *device;
        const char *name;
        if (!test_open_set(&device, &name, i, 2)) continue;
        if (!only || !strcmp(name, only)) run(device);
        mt_device_destroy(&device);
    }
}
