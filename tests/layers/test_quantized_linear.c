/* GroupedLinear under every preset and many other recipes: each GEMM against the f64 product of the
 * dequantized operands that its slots name, and options that may change no bit. */
#include "tests/support/test.h"

#include <math.h>
#include <stdlib.h>

#include "layers/functional.h"
#include "train/gradcheck.h"

enum { E = 3, IN = 48, OUT = 40, ROWS = 58, USED = 51, DENSE_ROWS = 37, PASS = 5 };
static const int64_t counts[E] = { 17, 0, 34 }; /* the last ROWS - USED rows belong to nobody */

enum option {
    BIAS = 1,
    ACCUMULATED = 2,
    FROZEN = 4,
    DEFERRED = 8,
    SAVED = 16,
    RECOMPUTED = 32,
    HALF = 64 /* the gradient in bf16 */
};
enum { NEUTRAL = DEFERRED | SAVED | RECOMPUTED, OPTIONS = 64 };

/* A layer, its input and the gradient of its output. */
struct rig {
    mt_dtype dtype, real;
    bool dense;
    int options;
    int64_t members, rows, used;
    mt_stream stream;
    mt_param_store *store;
    mt_tape *tape;
    mt_linear_state state;
    mt_grouped_linear_layer layer;
    uint32_t pass;
    void *x, *dy;
    int64_t offsets[E + 1], elements[MT_ROUTE_WIDTHS][E + 1];
};

static mt_param *add(struct rig *r, const char *name, int64_t m, int64_t k, bool packed)
{
    mt_param *p;
    mt_param_spec spec = { .name = name,
                           .members = r->members,
                           .m = m,
                           .k = k,
                           .packed = packed,
                           .frozen = packed && (r->options & FROZEN) };
    assert_ok(mt_param_store_add(r->store, &p, &spec));
    return p;
}

static void open_rig(struct rig *r, const mt_recipe *recipe, mt_dtype dtype, bool dense,
                     int options)
{
    *r = (struct rig){ .dtype = dtype, .real = mt_dtype_wide(dtype), .dense = dense };
    r->options = options, r->pass = PASS;
    r->members = dense ? 1 : E, r->rows = dense ? DENSE_ROWS : ROWS;
    r->used = dense ? DENSE_ROWS : USED;
    r->stream.device = test_device();
    r->state = (mt_linear_state){ .recipe = *recipe,
                                  .save_original_input = options & SAVED,
                                  .seed = 7,
                                  .stream = 30,
                                  .pass = &r->pass };
    mt_tape_options tape = { .defer_wgrad = options & DEFERRED, .recompute = options & RECOMPUTED };
    assert_ok(mt_tape_create(&r->tape, &r->stream, &tape));
    assert_ok(mt_param_store_create(&r->store, r->stream.device, r->real, dtype));
    if (options & HALF) assert_ok(mt_param_store_set_grad_dtype(r->store, MT_BF16));
    mt_param *w = r->layer.weight = add(r, "w", OUT, IN, true);
    if (options & BIAS) r->layer.bias = add(r, "b", 1, OUT, false);
    assert_ok(mt_linear_reserve(w, r->stream.device, recipe));
    assert_ok(mt_param_store_allocate(r->store, true));
    w->linear = &r->state;
    assert_ok(mt_linear_place(w, r->stream.device));
    test_random(w->master, mt_param_count(w), r->real, 1, 1);
    if (r->layer.bias) test_random(r->layer.bias->master, r->members * OUT, r->real, 1, 2);
    assert_ok(mt_linear_refresh(w, &r->stream));
    r->x = test_alloc(r->rows * IN, dtype), r->dy = test_alloc(r->rows * OUT, dtype);
    test_random(r->x, r->used * IN, dtype, 2, 3), test_random(r->dy, r->used * OUT, dtype, 0.01, 4);
    const int64_t widths[MT_ROUTE_WIDTHS] = { IN, OUT, 1 };
    for (int e = 0; e < E; e++) r->offsets[e + 1] = r->offsets[e] + counts[e];
    for (int i = 0; i < MT_ROUTE_WIDTHS; i++)
        for (int e = 0; e <= E; e++) r->elements[i][e] = r->offsets[e] * widths[i];
}

static void close_rig(struct rig *r)
{
    mt_tape_destroy(&r->tape);
    mt_param_store_destroy(&r->store);
    test_free(r->x), test_free(r->dy);
}

static mt_group group_of(const struct rig *r, int64_t width)
{
    if (r->dense) return mt_group_uniform(1, r->rows, width);
    return mt_group_ragged_rows(E, r->rows, width, counts, r->elements[width == IN ? 0 : 1]);
}

/* ---- the layer on the tape ----------------------------------------------------------------------
 */

static mt_status forward(mt_tape *tape, void *context, mt_value *const *in, mt_value **out)
{
    struct rig *r = context;
    mt_ragged rows = { .members = E, .widths = { IN, OUT, 1 } };
    const int64_t cells[] = { MT_ROUTE_WIDTHS, E + 1 };
    if (r->dense) return mt_grouped_linear(tape, &out[0], in[0], &r->layer, NULL);
    mt_tensor t[] = { mt_tensor_1d((void *)(uintptr_t)counts, MT_I64, E),
                      mt_tensor_1d(r->offsets, MT_I64, E + 1),
                      mt_tensor_2d(r->elements, MT_I64, cells[0], cells[1]) };
    mt_value **values[] = { &rows.counts, &rows.offsets, &rows.elements };
    for (int i = 0; i < 3; i++) MT_TRY(mt_tape_input(tape, values[i], t[i], false));
    MT_TRY(mt_grouped_linear(tape, &out[0], in[0], &r->layer, &rows));
    for (int i = 0; i < 3; i++) mt_value_release(tape, values[i]);
    return MT_OK;
}

struct result {
    double y[ROWS * OUT], dx[ROWS * IN], dw[E * OUT * IN], db[E * OUT];
};

static void fetch(double *to, const void *from, int64_t n, mt_dtype dtype)
{
    for (int64_t i = 0; i < n; i++) to[i] = mt_load_f64(from, dtype, i);
}

static void run(struct rig *r, struct result *out)
{
    memset(out, 0, sizeof *out);
    mt_param_store_begin_step(r->store);
    for (int pass = 0; pass < (r->options & ACCUMULATED ? 2 : 1); pass++) {
        mt_value *x, *y;
        assert_ok(mt_tape_begin(r->tape, 1, true));
        assert_ok(mt_tape_input(r->tape, &x, mt_tensor_2d(r->x, r->dtype, r->rows, IN), true));
        assert_ok(mt_tape_segment(r->tape, forward, r, &x, 1, &y, 1));
        fetch(out->y, y->data.data, r->used * OUT, r->dtype);
        assert_ok(mt_tape_seed_tensor(r->tape, y, mt_tensor_2d(r->dy, r->dtype, r->rows, OUT)));
        mt_value_release(r->tape, &y);
        assert_ok(mt_tape_backward(r->tape));
        assert_ok(mt_tape_run_deferred(r->tape));
        fetch(out->dx, mt_value_grad(x).data, r->used * IN, r->dtype);
        mt_value_release(r->tape, &x);
        assert_ok(mt_tape_end(r->tape));
    }
    assert_ok(mt_param_store_end_step(r->store));
    if (!(r->options & FROZEN))
        fetch(out->dw, r->layer.weight->grad, r->members * OUT * IN, r->layer.weight->grad_dtype);
    if (r->layer.bias) fetch(out->db, r->layer.bias->grad, r->members * OUT, r->real);
}

/* ---- the same, from dequantized operands
 * --------------------------------------------------------- */

/* What a slot's codes hold, quantized here again. */
static void decode(double *to, const struct rig *r, mt_operand operand, mt_dir dir)
{
    const mt_param *w = r->layer.weight;
    bool weight = operand == MT_OPERAND_W;
    int64_t width = operand == MT_OPERAND_DY ? OUT : IN;
    mt_group group = weight ? w->group : group_of(r, width);
    mt_dtype dtype = weight ? r->real : r->dtype;
    int64_t n = weight ? mt_param_count(w) : r->used * width;
    void *source = weight ? w->master : operand == MT_OPERAND_X ? r->x : r->dy;
    mt_format_spec spec = *mt_recipe_direction(&r->state.recipe, operand, dir);
    mt_qtensor plain = mt_qtensor_plain(group, dtype, source), codes = { .group = group };
    codes.dir[dir] = mt_direction_of(spec);
    if (spec.options.from_dequantized)
        codes.dir[MT_ROW] =
            mt_direction_of(*mt_recipe_direction(&r->state.recipe, operand, MT_ROW));
    void *memory = calloc(1, mt_qtensor_bytes(&codes) + 256);
    mt_qtensor_place(&codes, memory);
    mt_stream stream = r->stream;
    assert_ok(mt_quantize(&stream,
                          &(struct mt_quantize_args){ .dtype = r->dtype,
                                                      .src = &plain,
                                                      .out = &codes,
                                                      .seed = r->state.seed,
                                                      .stream = r->state.stream + (uint32_t)operand,
                                                      .step = PASS }));
    double *values = calloc((size_t)(mt_group_capacity(&group)) + 1, sizeof *values);
    assert_ok(mt_dequantize(
        &stream,
        &(struct mt_dequantize_args){
            .dtype = r->dtype, .src = &codes, .dir = dir, .y = values, .y_dtype = MT_F64 }));
    memcpy(to, values, (size_t)n * sizeof *to);
    free(values), free(memory);
}

static const char *running = ""; /* the recipe that a failure is about */

/* A sum of products, the sum of their sizes, their number, and the largest of them and of the sums
 * on the way. */
struct sum {
    double value, size, terms, largest;
};

static void add_product(struct sum *s, double a, double b)
{
    s->value += a * b, s->size += fabs(a * b), s->terms++;
    s->largest = fmax(s->largest, fmax(fabs(a * b), fabs(s->value)));
}

/* Whether a pass multiplies codes on tensor cores that cut sums (mt_gemm_fp8_loss). */
static bool multiplies_codes(const struct rig *r, mt_pass pass)
{
    const struct mt_kernels *kernels = r->stream.device->kernels[r->dtype];
    const mt_format_spec *slot = r->state.recipe.slot[pass];
    return kernels->gemm_codes && kernels->gemm_codes((mt_gemm_layout)pass, &slot[0], &slot[1]);
}

/* gamma_K, what tiles that flush subnormals lose, one rounding more, those of scales, what tensor
 * cores of codes cut (K is less than their 128), and the rounding of the result, each time one is
 * stored. */
static void check(const char *what, int64_t i, double got, struct sum s, double repeat,
                  const struct rig *r, mt_pass pass, mt_dtype out)
{
    const mt_format_spec *slot = r->state.recipe.slot[pass];
    int scales = mt_gemm_scale_roundings(slot[0].format, slot[1].format);
    double epsilon = test_epsilon(r->real), want = s.value * repeat;
    bool codes = multiplies_codes(r, pass);
    if (codes) scales = 3;
    double bound = repeat * ((s.terms + 2 + scales) * (epsilon * s.size + 0x1p-126));
    if (codes) bound += repeat * mt_gemm_fp8_loss(s.largest);
    bound += repeat * test_epsilon(out) * (fabs(want) + bound);
    if (!(fabs(got - want) <= bound))
        fail_msg("%s, %s%s: %s[%lld] is %.17g, must be %.17g within %.3g", running,
                 mt_dtype_name(r->dtype), r->dense ? ", dense" : "", what, (long long)i, got, want,
                 bound);
}

static int64_t member_of(const struct rig *r, int64_t row)
{
    int64_t e = 0;
    while (!r->dense && row >= r->offsets[e + 1]) e++;
    return e;
}

static void check_y(const struct rig *r, const struct result *got)
{
    static double w[E * OUT * IN], x[ROWS * IN];
    decode(w, r, MT_OPERAND_W, MT_ROW), decode(x, r, MT_OPERAND_X, MT_ROW);
    for (int64_t t = 0; t < r->used; t++)
        for (int64_t j = 0; j < OUT; j++) {
            struct sum s = { 0 };
            int64_t line = member_of(r, t) * OUT + j;
            for (int64_t k = 0; k < IN; k++) add_product(&s, w[line * IN + k], x[t * IN + k]);
            if (r->layer.bias)
                add_product(&s, mt_load_f64(r->layer.bias->master, r->real, line), 1);
            check("y", t * OUT + j, got->y[t * OUT + j], s, 1, r, MT_FPROP, r->dtype);
        }
}

static void check_dx(const struct rig *r, const struct result *got)
{
    static double w[E * OUT * IN], dy[ROWS * OUT];
    decode(w, r, MT_OPERAND_W, MT_COL), decode(dy, r, MT_OPERAND_DY, MT_ROW);
    for (int64_t t = 0; t < r->used; t++)
        for (int64_t k = 0; k < IN; k++) {
            struct sum s = { 0 };
            for (int64_t j = 0; j < OUT; j++)
                add_product(&s, w[(member_of(r, t) * OUT + j) * IN + k], dy[t * OUT + j]);
            check("dx", t * IN + k, got->dx[t * IN + k], s, 1, r, MT_DGRAD, r->dtype);
        }
}

static void check_dw(const struct rig *r, const struct result *got)
{
    static double x[ROWS * IN], dy[ROWS * OUT];
    static struct sum sums[E * OUT * IN];
    memset(sums, 0, sizeof sums);
    decode(x, r, MT_OPERAND_X, MT_COL), decode(dy, r, MT_OPERAND_DY, MT_COL);
    for (int64_t t = 0; t < r->used; t++)
        for (int64_t j = 0; j < OUT; j++)
            for (int64_t k = 0; k < IN; k++)
                add_product(&sums[(member_of(r, t) * OUT + j) * IN + k], dy[t * OUT + j],
                            x[t * IN + k]);
    for (int64_t i = 0; i < r->members * OUT * IN; i++)
        check("dw", i, got->dw[i], sums[i], r->options & ACCUMULATED ? 2 : 1, r, MT_WGRAD,
              r->layer.weight->grad_dtype);
}

static void check_db(const struct rig *r, const struct result *got)
{
    struct sum sums[E * OUT] = { 0 };
    for (int64_t t = 0; t < r->used; t++)
        for (int64_t j = 0; j < OUT; j++)
            add_product(&sums[member_of(r, t) * OUT + j], mt_load_f64(r->dy, r->dtype, t * OUT + j),
                        1);
    for (int64_t i = 0; i < r->members * OUT; i++)
        check("db", i, got->db[i], sums[i], r->options & ACCUMULATED ? 2 : 1, r, MT_WGRAD, r->real);
}

/* ---- recipes
 * ------------------------------------------------------------------------------------- */

/* `all` options, or one set of them. */
static void check_recipe(const mt_recipe *recipe, mt_dtype dtype, bool dense, bool all)
{
    static struct result base, got;
    for (int varying = 0; varying < OPTIONS; varying++) {
        struct rig r;
        if (varying & NEUTRAL || (!all && varying != (BIAS | ACCUMULATED))) continue;
        open_rig(&r, recipe, dtype, dense, varying);
        run(&r, &base);
        check_y(&r, &base);
        check_dx(&r, &base);
        if (!(varying & FROZEN)) check_dw(&r, &base);
        if (varying & BIAS) check_db(&r, &base);
        close_rig(&r);
        for (int neutral = DEFERRED; all && neutral <= NEUTRAL; neutral += DEFERRED) {
            open_rig(&r, recipe, dtype, dense, varying | neutral);
            run(&r, &got);
            assert_memory_equal(&got, &base, sizeof got);
            close_rig(&r);
        }
    }
}

/* Each in every dtype, ragged and dense; in one of these six ways over the whole cross product of
 * options. */
static void every_recipe(void **state)
{
    (void)state;
    static const mt_dtype dtypes[] = { MT_F64, MT_F32, MT_BF16 };
    char name[MT_RECIPE_TEXT];
    mt_recipe recipe;
    bool found;
    for (int i = 0;; i++) {
        assert_ok(mt_gradcheck_recipe(&recipe, name, i, &found));
        if (!found) break;
        running = name;
        for (int way = 0; way < 6; way++)
            check_recipe(&recipe, dtypes[way % 3], way / 3, way == i % 6);
    }
    running = "";
}

/* Columns that are made from their rows' values, whatever formats either has. */
static void columns_of_rows(void **state)
{
    (void)state;
    static const mt_dtype dtypes[] = { MT_F64, MT_F32, MT_BF16 };
    static const char *const texts[] = {
        "fprop=mxfp8 dgrad=nvfp4:1d+source=dequantized/nvfp4 wgrad=bf16",
        "fprop=nvfp4:1d/bf16 dgrad=fp8_block:1d+pow2=off+source=dequantized/bf16 wgrad=bf16",
        "fprop=mxfp4/bf16 dgrad=mxfp8:source=dequantized/mxfp8 wgrad=bf16",
        "fprop=fp8_tensor dgrad=mxfp4:source=dequantized/mxfp4 wgrad=mxfp8:source=dequantized",
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        mt_recipe recipe;
        assert_ok(mt_recipe_parse(&recipe, texts[i]));
        running = texts[i];
        for (int way = 0; way < 6; way++) check_recipe(&recipe, dtypes[way % 3], way / 3, false);
    }
    running = "";
}

/* The weight's gradient in bf16 is the one in f32, rounded; all else keeps its bits. */
static void check_bf16_gradient(const mt_recipe *recipe, bool dense, int options)
{
    static struct result base, half, got;
    struct rig r;
    open_rig(&r, recipe, MT_BF16, dense, options);
    run(&r, &base);
    close_rig(&r);
    open_rig(&r, recipe, MT_BF16, dense, options | HALF | DEFERRED);
    run(&r, &half);
    close_rig(&r);
    open_rig(&r, recipe, MT_BF16, dense, options | HALF);
    assert_int_equal(r.layer.bias->grad_dtype, MT_F32);
    run(&r, &got);
    assert_memory_equal(&got, &half, sizeof got);
    check_dw(&r, &got);
    for (int64_t i = 0; i < r.members * OUT * IN && !(options & ACCUMULATED); i++)
        assert_true(got.dw[i] == (double)mt_bf16_to_f32(mt_f32_to_bf16((float)base.dw[i])));
    memcpy(got.dw, base.dw, sizeof got.dw);
    assert_memory_equal(&got, &base, sizeof got);
    close_rig(&r);
}

static void bf16_gradients(void **state)
{
    (void)state;
    char name[MT_RECIPE_TEXT];
    mt_recipe recipe;
    bool found;
    for (int i = 0;; i++) {
        assert_ok(mt_gradcheck_recipe(&recipe, name, i, &found));
        if (!found) break;
        running = name;
        check_bf16_gradient(&recipe, i % 2, BIAS);
        check_bf16_gradient(&recipe, i % 2, BIAS | ACCUMULATED);
    }
    running = "";
}

/* Six slots that are a preset's give the preset's bits. */
static void slots_equal_presets(void **state)
{
    (void)state;
    static const char *const texts[][2] = {
        { "bf16", "fprop=bf16/bf16 dgrad=bf16/bf16 wgrad=bf16/bf16" },
        { "fp8_delayed", "fprop=fp8_delayed/fp8_delayed dgrad=fp8_delayed/fp8_delayed:e5m2 "
                         "wgrad=fp8_delayed/fp8_delayed:e5m2" },
        { "fp8_current", "fprop=fp8_tensor/fp8_tensor dgrad=fp8_tensor/fp8_tensor:e5m2 "
                         "wgrad=fp8_tensor/fp8_tensor:e5m2" },
        { "fp8_block", "fprop=fp8_block:2d/fp8_block dgrad=fp8_block:2d/fp8_block "
                       "wgrad=fp8_block/fp8_block" },
        { "mxfp8", "fprop=mxfp8/mxfp8 dgrad=mxfp8/mxfp8 wgrad=mxfp8/mxfp8" },
        { "nvfp4", "fprop=nvfp4:2d/nvfp4 dgrad=nvfp4:2d/nvfp4:sr wgrad=nvfp4:rht/nvfp4:rht+sr" },
    };
    static struct result got[2];
    for (int i = 0; mt_recipe_preset(i); i++) { /* none is left out */
        bool found = false;
        for (size_t j = 0; j < sizeof texts / sizeof *texts; j++)
            found |= strcmp(texts[j][0], mt_recipe_preset(i)) == 0;
        assert_true(found);
    }
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        for (int j = 0; j < 2; j++) {
            struct rig r;
            mt_recipe recipe;
            assert_ok(mt_recipe_parse(&recipe, texts[i][j]));
            open_rig(&r, &recipe, MT_BF16, false, BIAS);
            run(&r, &got[j]);
            close_rig(&r);
        }
        assert_memory_equal(&got[0], &got[1], sizeof got[0]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_recipe),
        cmocka_unit_test(columns_of_rows),
        cmocka_unit_test(bf16_gradients),
        cmocka_unit_test(slots_equal_presets),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
