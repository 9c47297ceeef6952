/* AdamW's storage forms, bit for bit against NUMERICS section 6 in plain code that shares nothing
 * with the kernels but Philox: FP8 codes are found by search among all values. */
#include "tests/kernels/threads.h"

#include <float.h>

#include "core/rng.h"

enum { MOST = 20001, BLOCK = 128 };

static const double beta1 = 0.9, beta2 = 0.95, eps = 1e-8, decay = 0.1;

/* ---- elements ----------------------------------------------------------------------------------
 */

/* Values of the E4M3 codes 0 to 0x7E. */
static double e4m3[127];

static void make_values(void)
{
    for (int code = 0; code < 127; code++) {
        int exponent = code >> 3, mantissa = code & 7;
        e4m3[code] = exponent ? ldexp(1 + mantissa / 8.0, exponent - 7) : ldexp(mantissa, -9);
    }
}

static float decode(uint8_t code)
{
    double x = (code & 0x7f) == 0x7f ? (double)NAN : e4m3[code & 0x7f];
    return (float)(code & 0x80 ? -x : x);
}

/* Nearest, ties to the even code, saturating. */
static uint8_t encode_nearest(float y)
{
    double a = fabs((double)y);
    uint8_t sign = signbit(y) ? 0x80 : 0;
    if (isnan(y)) return 0x7f;
    int best = 0;
    for (int code = 1; code < 127; code++) {
        double d = fabs(e4m3[code] - a), least = fabs(e4m3[best] - a);
        if (d < least || (d == least && code % 2 == 0)) best = code;
    }
    if (a >= 448) best = 126;
    return (uint8_t)(best | sign);
}

/* The first at or above y, saturating. */
static uint8_t encode_up(float y)
{
    if (isnan(y)) return 0x7f;
    int code = 0;
    while (code < 126 && e4m3[code] < (double)y) code++;
    return (uint8_t)code;
}

static float scale_of(const float *x, int64_t n)
{
    float amax = 0;
    for (int64_t i = 0; i < n; i++)
        if (fabsf(x[i]) > amax) amax = fabsf(x[i]);
    if (amax == 0 || isinf(amax)) return 1;
    volatile float s = 448 / amax;
    return isinf(s) ? FLT_MAX : s;
}

static uint16_t nearest_bf16(float x)
{
    uint32_t u = mt_f32_bits(x), kept = u >> 16, cut = u & 0xffff;
    if (isnan(x)) return 0x7fff;
    if (cut > 0x8000 || (cut == 0x8000 && kept % 2)) kept++;
    return (uint16_t)kept;
}

static uint16_t stochastic_bf16(float x, uint64_t seed, uint32_t stream, uint32_t step, uint64_t e)
{
    const uint32_t key[2] = { (uint32_t)seed, (uint32_t)(seed >> 32) };
    const uint32_t counter[4] = { (uint32_t)(e >> 3), (uint32_t)(e >> 35), stream, step };
    uint32_t words[4], u = mt_f32_bits(x);
    mt_philox(words, counter, key);
    uint32_t word = words[(e >> 1) & 3], u16 = e % 2 ? word >> 16 : word & 0xffff;
    if (isnan(x)) return 0x7fff;
    /* 2^16 (|x| - lo) / step is the lower half of |x|'s bits */
    uint32_t lo = (u & 0x7fffffff) >> 16;
    return (uint16_t)(lo + (u16 + (u & 0xffff) >= 0x10000 ? 1 : 0) + (u >> 31 << 15));
}

/* ---- one optimizer's arrays --------------------------------------------------------------------
 */

struct form {
    mt_moments moments;
    bool stochastic;
    mt_master master;
};

static const struct form forms[] = {
    { MT_MOMENTS_REAL, false, MT_MASTER_REAL }, { MT_MOMENTS_REAL, false, MT_MASTER_SPLIT },
    { MT_MOMENTS_BF16, false, MT_MASTER_REAL }, { MT_MOMENTS_BF16, true, MT_MASTER_REAL },
    { MT_MOMENTS_BF16, true, MT_MASTER_SPLIT }, { MT_MOMENTS_FP8, false, MT_MASTER_REAL },
    { MT_MOMENTS_FP8, false, MT_MASTER_SPLIT },
};
enum { FORMS = sizeof forms / sizeof *forms };

/* Elements of p and its cast (or both halves), m and v as stored, and scales. */
struct arrays {
    struct form form;
    int64_t count, blocks;
    void *p, *low, *cast, *m, *v;
    float *m_scales, *v_scales;
    float *grad;
    struct mt_step_state *state;
};

static struct arrays make(struct form form, int64_t count)
{
    bool split = form.master == MT_MASTER_SPLIT;
    mt_dtype stored = mt_moments_dtype(form.moments, MT_F32);
    struct arrays a = { .form = form, .count = count };
    a.blocks = mt_moments_blocks(form.moments, count);
    a.p = test_alloc(count, split ? MT_U16 : MT_F32), a.low = test_alloc(split ? count : 0, MT_U16);
    if (!split) a.cast = memset(test_alloc(count, MT_U16), 0, (size_t)count * sizeof(uint16_t));
    a.m = test_alloc(count, stored), a.v = test_alloc(count, stored);
    a.m_scales = test_alloc(a.blocks, MT_F32), a.v_scales = test_alloc(a.blocks, MT_F32);
    a.grad = test_alloc(count, MT_F32);
    a.state = test_alloc(sizeof *a.state, MT_U8);
    memset(a.m, 0, (size_t)count * mt_dtype_size(stored));
    memset(a.v, 0, (size_t)count * mt_dtype_size(stored));
    memset(a.m_scales, 0, (size_t)a.blocks * sizeof(float));
    memset(a.v_scales, 0, (size_t)a.blocks * sizeof(float));
    *a.state = (struct mt_step_state){ .lr = 1e-3, .power1 = 1, .power2 = 1 };
    float *draws = test_alloc(count, MT_F32);
    test_random(draws, count, MT_F32, 1, 1);
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits = mt_f32_bits(draws[i]);
        if (split)
            ((uint16_t *)a.p)[i] = (uint16_t)((bits >> 16) + (bits >> 15 & 1)),
                       ((uint16_t *)a.low)[i] = (uint16_t)bits;
        else
            ((float *)a.p)[i] = draws[i];
    }
    test_free(draws);
    return a;
}

static void release(struct arrays *a)
{
    void *all[] = { a->p, a->low, a->m, a->v, a->m_scales, a->v_scales, a->grad, a->state };
    test_free(a->cast);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) test_free(all[i]);
}

/* All sizes: zeros, what has subnormal squares, what has squares beyond f32, blocks of zeros. */
static void set_grad(struct arrays *a, uint64_t step)
{
    test_random(a->grad, a->count, MT_F32, 1, 100 + step);
    for (int64_t i = 0; i < a->count; i++) {
        if (i % 5 == 0) a->grad[i] *= 1e-21f;
        if (i % 7 == 0) a->grad[i] = 0;
        if (i / BLOCK % 3 == 1) a->grad[i] *= 1e-19f;
        if (i / BLOCK % 11 == 2) a->grad[i] = 0;
        if (i == 1300 && step == 2) a->grad[i] = 1e25f;
        if (i == 700) a->grad[i] = 1e3f;
    }
}

static struct mt_adamw_args args_of(const struct arrays *a)
{
    bool scaled = a->blocks > 0;
    return (struct mt_adamw_args){ .dtype = MT_F32,
                                   .count = a->count,
                                   .beta1 = beta1,
                                   .beta2 = beta2,
                                   .eps = eps,
                                   .decay = decay,
                                   .master = a->form.master,
                                   .moments = a->form.moments,
                                   .stochastic = a->form.stochastic,
                                   .p = a->p,
                                   .p_low = a->low,
                                   .cast = a->cast,
                                   .m = a->m,
                                   .v = a->v,
                                   .m_scales = scaled ? a->m_scales : NULL,
                                   .v_scales = scaled ? a->v_scales : NULL,
                                   .grad = a->grad,
                                   .seed = 0x123456789abcdefu,
                                   .param = 77,
                                   .state = a->state };
}

static void norm_of(const struct arrays *a, mt_stream *stream, double max_norm)
{
    assert_ok(mt_grad_norm(stream, &(struct mt_grad_norm_args){ .dtype = MT_F32,
                                                                .count = a->count,
                                                                .max_norm = max_norm,
                                                                .beta1 = beta1,
                                                                .beta2 = beta2,
                                                                .grad = a->grad,
                                                                .state = a->state }));
}

/* ---- the same in plain code --------------------------------------------------------------------
 */

static float read_moment(const struct arrays *a, int which, int64_t i)
{
    const void *from = which ? a->v : a->m;
    if (a->form.moments == MT_MOMENTS_REAL) return ((const float *)from)[i];
    if (a->form.moments == MT_MOMENTS_BF16) return mt_bf16_to_f32(((const uint16_t *)from)[i]);
    float inverse = (which ? a->v_scales : a->m_scales)[i / BLOCK];
    volatile float d = decode(((const uint8_t *)from)[i]) * inverse;
    return which ? d * d : d;
}

static void write_moment(struct arrays *a, int which, const float *x)
{
    const struct mt_adamw_args args = args_of(a);
    void *to = which ? a->v : a->m;
    for (int64_t i = 0; i < a->count && a->form.moments != MT_MOMENTS_FP8; i++)
        if (a->form.moments == MT_MOMENTS_REAL)
            ((float *)to)[i] = x[i];
        else
            ((uint16_t *)to)[i] =
                a->form.stochastic
                    ? stochastic_bf16(x[i], args.seed, 2 * args.param + (uint32_t)which,
                                      (uint32_t)a->state->applied, (uint64_t)i)
                    : nearest_bf16(x[i]);
    for (int64_t b = 0; b < a->blocks; b++) {
        float block[BLOCK] = { 0 };
        int64_t n = a->count - b * BLOCK < BLOCK ? a->count - b * BLOCK : BLOCK;
        for (int64_t i = 0; i < n; i++)
            block[i] = which ? sqrtf(x[b * BLOCK + i]) : x[b * BLOCK + i];
        float s = scale_of(block, n);
        (which ? a->v_scales : a->m_scales)[b] = 1 / s;
        for (int64_t i = 0; i < n; i++) {
            volatile float y = block[i] * s;
            ((uint8_t *)to)[b * BLOCK + i] = which ? encode_up(y) : encode_nearest(y);
        }
    }
}

static float read_master(const struct arrays *a, int64_t i)
{
    if (a->form.master == MT_MASTER_REAL) return ((const float *)a->p)[i];
    uint32_t high = ((const uint16_t *)a->p)[i];
    int16_t low = ((const int16_t *)a->low)[i];
    return mt_f32_from_bits((high - (low < 0)) << 16 | (uint16_t)low);
}

static void write_master(struct arrays *a, int64_t i, float x)
{
    uint32_t bits = mt_f32_bits(x);
    if (a->form.master == MT_MASTER_REAL) {
        ((float *)a->p)[i] = x;
        ((uint16_t *)a->cast)[i] = mt_f32_to_bf16(x);
        return;
    }
    ((uint16_t *)a->p)[i] = (uint16_t)((bits >> 16) + (bits >> 15 & 1));
    ((int16_t *)a->low)[i] = (int16_t)bits;
}

static void plain_step(struct arrays *a)
{
    static float m[MOST], v[MOST];
    const struct mt_step_state *s = a->state;
    volatile float b1 = (float)beta1, b2 = (float)beta2, r1 = (float)(1 - beta1),
                   r2 = (float)(1 - beta2);
    for (int64_t i = 0; i < a->count; i++) {
        volatile float g = a->grad[i] * (float)s->clip, kept = b1 * read_moment(a, 0, i),
                       added = r1 * g;
        m[i] = kept + added;
        volatile float scaled = r2 * g, square = scaled * g, old = b2 * read_moment(a, 1, i);
        v[i] = old + square;
        volatile float mean = m[i] / (float)s->bias1, variance = v[i] / (float)s->bias2,
                       root = sqrtf(variance), below = root + (float)eps, u = mean / below;
        volatile float p = read_master(a, i), shrink = (float)decay * p, both = u + shrink,
                       step = (float)s->lr * both;
        write_master(a, i, p - step);
    }
    write_moment(a, 0, m), write_moment(a, 1, v);
}

static void same(const char *what, const struct arrays *a, const struct arrays *b)
{
    size_t moment = mt_moments_size(a->form.moments, MT_F32);
    const struct {
        const char *name;
        const void *x, *y;
        size_t size;
        int64_t count;
    } parts[] = {
        { "p", a->p, b->p, a->form.master == MT_MASTER_SPLIT ? 2 : 4, a->count },
        { "low", a->low, b->low, 2, a->form.master == MT_MASTER_SPLIT ? a->count : 0 },
        { "cast", a->cast, b->cast, 2, a->cast ? a->count : 0 },
        { "m", a->m, b->m, moment, a->count },
        { "v", a->v, b->v, moment, a->count },
        { "m scales", a->m_scales, b->m_scales, 4, a->blocks },
        { "v scales", a->v_scales, b->v_scales, 4, a->blocks },
    };
    for (size_t k = 0; k < sizeof parts / sizeof *parts; k++)
        for (int64_t i = 0; i < parts[k].count; i++) {
            size_t at = (size_t)i * parts[k].size;
            if (memcmp((const char *)parts[k].x + at, (const char *)parts[k].y + at, parts[k].size))
                fail_msg("%s: moments %s%s, master %s, %lld elements: %s[%lld] differs", what,
                         mt_moments_forms[a->form.moments].name, a->form.stochastic ? " sr" : "",
                         mt_master_name(a->form.master), (long long)a->count, parts[k].name,
                         (long long)i);
        }
}

static void test_bits(void **state)
{
    (void)state;
    static const int64_t counts[] = { 0, 1, 7, 127, 128, 129, 1023, 1025, 2000, MOST };
    for (int f = 0; f < FORMS; f++)
        for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
            struct arrays a[MAX_THREADS], want = make(forms[f], counts[c]);
            for (int j = 0; j < MAX_THREADS; j++) a[j] = make(forms[f], counts[c]);
            for (uint64_t step = 0; step < 4; step++) {
                set_grad(&want, step);
                for (int j = 0; j < MAX_THREADS; j++) {
                    mt_stream stream = on_threads(j + 1);
                    struct mt_adamw_args args = args_of(&a[j]);
                    set_grad(&a[j], step);
                    norm_of(&a[j], &stream, step % 2 ? 0.5 : 0);
                    assert_ok(mt_adamw(&stream, &args));
                }
                *want.state = *a[0].state;
                plain_step(&want);
                for (int j = 0; j < MAX_THREADS; j++) same("adamw", &a[j], &want);
            }
            for (int j = 0; j < MAX_THREADS; j++) release(&a[j]);
            release(&want);
        }
}

static void test_kernel_sets(void **state)
{
    (void)state;
    for (int f = 0; f < FORMS; f++)
        for (int i = 0; i < TEST_SETS; i++) {
            mt_device *device;
            const char *name;
            if (!test_open_set(&device, &name, i, 1)) continue;
            mt_stream stream = { device, NULL };
            struct arrays a = make(forms[f], 3000), want = make(forms[f], 3000);
            for (uint64_t step = 1; step < 4; step++) {
                set_grad(&a, step), set_grad(&want, step);
                norm_of(&a, &stream, 1);
                struct mt_adamw_args args = args_of(&a);
                assert_ok(mt_adamw(&stream, &args));
                *want.state = *a.state;
                plain_step(&want);
                same(name, &a, &want);
            }
            release(&a), release(&want);
            mt_device_destroy(&device);
        }
}

/* A gradient in bf16, wherever it begins, counts as the f32 that it is. */
static void test_bf16_gradients(void **state)
{
    (void)state;
    enum { N = 3000 };
    uint16_t *room = test_alloc(N + 1, MT_U16);
    for (int f = 0; f < FORMS; f++)
        for (int i = 0; i < TEST_SETS; i++) {
            mt_device *device;
            const char *name;
            if (!test_open_set(&device, &name, i, 2)) continue;
            mt_stream stream = { device, NULL };
            struct arrays a = make(forms[f], N), want = make(forms[f], N);
            for (uint64_t step = 1; step < 4; step++) {
                uint16_t *grad = room + step % 2;
                set_grad(&want, step);
                for (int j = 0; j < N; j++) grad[j] = mt_f32_to_bf16(want.grad[j]);
                for (int j = 0; j < N; j++) want.grad[j] = mt_bf16_to_f32(grad[j]);
                norm_of(&want, &stream, 1);
                *a.state = *want.state;
                struct mt_adamw_args args = args_of(&a), real = args_of(&want);
                args.grad = grad, args.grad_bf16 = true;
                assert_ok(mt_adamw(&stream, &args));
                assert_ok(mt_adamw(&stream, &real));
                same(name, &a, &want);
            }
            release(&a), release(&want);
            mt_device_destroy(&device);
        }
    test_free(room);
}

/* Parts of a param, each with its place, give what the whole gives. */
static void test_parts(void **state)
{
    (void)state;
    mt_stream stream = on_threads(2);
    for (int f = 0; f < FORMS; f++) {
        struct arrays whole = make(forms[f], 3000), parts = make(forms[f], 3000);
        size_t size = mt_moments_size(forms[f].moments, MT_F32);
        for (uint64_t step = 1; step < 3; step++) {
            set_grad(&whole, step), set_grad(&parts, step);
            norm_of(&whole, &stream, 1);
            *parts.state = *whole.state;
            struct mt_adamw_args args = args_of(&whole);
            assert_ok(mt_adamw(&stream, &args));
            static const int64_t cuts[] = { 0, 256, 1280, 1408, 3000 };
            for (int i = 0; i < 4; i++) {
                int64_t at = cuts[i], first_block = mt_moments_blocks(forms[f].moments, at);
                struct mt_adamw_args part = args_of(&parts);
                part.count = cuts[i + 1] - at, part.first = at;
                part.p = (char *)part.p + at * (forms[f].master == MT_MASTER_SPLIT ? 2 : 4);
                if (forms[f].master == MT_MASTER_SPLIT) part.p_low += at;
                part.m = (char *)part.m + (size_t)at * size;
                part.v = (char *)part.v + (size_t)at * size;
                if (part.m_scales) part.m_scales += first_block, part.v_scales += first_block;
                part.grad = parts.grad + at, part.cast += part.cast ? at : 0;
                assert_ok(mt_adamw(&stream, &part));
            }
            same("parts", &parts, &whole);
        }
        release(&whole), release(&parts);
    }
}

/* ---- properties --------------------------------------------------------------------------------
 */

/* v over the whole of f32, mixed within blocks: its code is 0 exactly where v is, what is read back
 * is then not 0 either, and at least v but for the last bits. */
static void test_v_is_zero_only_where_it_was(void **state)
{
    (void)state;
    enum { N = 4096 };
    mt_stream stream = on_threads(1);
    struct arrays a = make((struct form){ MT_MOMENTS_FP8, false, MT_MASTER_REAL }, N);
    struct mt_adamw_args args = args_of(&a);
    static float v[N];
    args.beta2 = 0;
    for (int pass = 0; pass < 8; pass++) {
        *a.state = (struct mt_step_state){ .lr = 0, .clip = 1, .bias1 = 1, .bias2 = 1 };
        for (int i = 0; i < N; i++) {
            double power = mt_rng_uniform(5, (uint32_t)pass, (uint64_t)i) * 84 - 22.4;
            a.grad[i] = i % 9 ? (float)pow(10, i / BLOCK % 2 ? power / 2 : power) : 0;
            if (pass == 7) a.grad[i] = i % 9 ? 0x1.8p-75f : 0; /* squares are the least f32 */
            volatile float square = a.grad[i] * a.grad[i];
            if (isinf(square)) a.grad[i] = 1e19f, square = 1e19f * 1e19f;
            v[i] = square;
        }
        assert_ok(mt_adamw(&stream, &args));
        for (int i = 0; i < N; i++) {
            uint8_t code = ((uint8_t *)a.v)[i];
            float back = read_moment(&a, 1, i);
            assert_int_equal(code == 0, v[i] == 0);
            assert_int_equal(back == 0, v[i] == 0);
            assert_true((double)back >= (double)v[i] * (1 - 8 * 0x1p-24) - 0x1p-150);
        }
    }
    release(&a);
}

/* The mean of 2^20 roundings of one number is the number, within 5 standard errors of what chance
 * decides; draws of other steps, params and seeds differ. */
static void test_stochastic_rounding(void **state)
{
    (void)state;
    enum { N = 1 << 20 };
    static const float values[] = { 1 + 0x1.3p-9f, -1.7e-3f, 0x1.fffffep5f, 3e-39f, 1.5f };
    mt_stream stream = on_threads(2);
    struct arrays a = make((struct form){ MT_MOMENTS_BF16, true, MT_MASTER_REAL }, N);
    struct mt_adamw_args args = args_of(&a);
    args.beta1 = args.beta2 = 0;
    for (size_t k = 0; k < sizeof values / sizeof *values; k++) {
        float x = values[k];
        *a.state =
            (struct mt_step_state){ .clip = 1, .bias1 = 1, .bias2 = 1, .applied = (int64_t)k + 1 };
        for (int i = 0; i < N; i++) a.grad[i] = x;
        assert_ok(mt_adamw(&stream, &args));
        double low = (double)mt_f32_from_bits(mt_f32_bits(x) & 0xffff0000u), sum = 0;
        double step = (double)mt_f32_from_bits((mt_f32_bits(x) & 0xffff0000u) + 0x10000u) - low;
        double share = ((double)x - low) / step;
        for (int i = 0; i < N; i++) {
            double got = (double)mt_bf16_to_f32(((uint16_t *)a.m)[i]);
            assert_true(got == low || got == low + step);
            sum += (got - low) / step;
        }
        assert_true(fabs(sum / N - share) <= 5 * sqrt(share * (1 - share) / N));
    }
    static uint16_t first[1024];
    const struct {
        uint64_t seed;
        uint32_t param;
        int64_t applied;
    } others[] = { { 1, 0, 1 }, { 2, 0, 1 }, { 1ull << 40 | 1, 0, 1 }, { 1, 1, 1 }, { 1, 0, 2 } };
    for (int i = 0; i < N; i++) a.grad[i] = 1 + 0x1p-8f;
    for (int k = 0; k < 5; k++) {
        args.count = 1024, args.seed = others[k].seed, args.param = others[k].param;
        a.state->applied = others[k].applied;
        assert_ok(mt_adamw(&stream, &args));
        if (k == 0) memcpy(first, a.m, sizeof first);
        int differ = 0;
        for (int i = 0; i < 1024; i++) differ += first[i] != ((uint16_t *)a.m)[i];
        assert_true(k == 0 ? differ == 0 : differ > 400 && differ < 624);
    }
    release(&a);
}

static void test_skip(void **state)
{
    (void)state;
    mt_stream stream = on_threads(2);
    for (int f = 0; f < FORMS; f++) {
        struct arrays a = make(forms[f], 500), before = make(forms[f], 500);
        struct mt_adamw_args args = args_of(&a);
        set_grad(&a, 1);
        a.state->skip = 1;
        assert_ok(mt_adamw(&stream, &args));
        same("a skipped step", &a, &before);
        release(&a), release(&before);
    }
}

static void test_arguments(void **state)
{
    (void)state;
    mt_stream stream = on_threads(1);
    struct arrays a = make((struct form){ MT_MOMENTS_FP8, false, MT_MASTER_SPLIT }, 200);
    struct mt_adamw_args args = args_of(&a);
    args.v_scales = NULL;
    assert_fails(mt_adamw(&stream, &args), MT_EINVAL, "v_scales is NULL");
    args = args_of(&a), args.p_low = NULL;
    assert_fails(mt_adamw(&stream, &args), MT_EINVAL, "p_low is NULL");
    args = args_of(&a), args.stochastic = true;
    assert_fails(mt_adamw(&stream, &args), MT_EINVAL, "fp8 are not rounded stochastically");
    args = args_of(&a), args.first = 64;
    assert_fails(mt_adamw(&stream, &args), MT_EINVAL, "first is 64");
    args = args_of(&a), args.moments = MT_MOMENTS_COUNT;
    assert_fails(mt_adamw(&stream, &args), MT_EINVAL, "no such forms");
    args = args_of(&a), args.dtype = MT_F64;
    assert_fails(mt_adamw(&stream, &args), MT_EINVAL, "f64 has no moments in fp8");
    struct mt_join_master_args join = { .dtype = MT_F64, .count = 1 };
    assert_fails(mt_join_master(&stream, &join), MT_EINVAL, "must be f32");
    join.dtype = MT_F32;
    assert_fails(mt_join_master(&stream, &join), MT_EINVAL, "y is NULL");
    release(&a);
}

static int open_all(void **state)
{
    make_values();
    return open_devices(state);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bits),
        cmocka_unit_test(test_kernel_sets),
        cmocka_unit_test(test_bf16_gradients),
        cmocka_unit_test(test_parts),
        cmocka_unit_test(test_v_is_zero_only_where_it_was),
        cmocka_unit_test(test_stochastic_rounding),
        cmocka_unit_test(test_skip),
        cmocka_unit_test(test_arguments),
    };
    return cmocka_run_group_tests(tests, open_all, close_devices);
}
