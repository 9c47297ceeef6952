/* AdamW over a store, its schedules, and which params decay. */
#include "tests/support/test.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "layers/functional.h"
#include "layers/model.h"
#include "optim/optimizer.h"

static mt_stream stream;

static mt_optim_config config_of(mt_schedule schedule, int64_t warmup)
{
    mt_optim_config c;
    mt_optim_config_defaults(&c);
    c.lr = 1, c.min_lr = 0.1, c.schedule = schedule, c.warmup_steps = warmup;
    return c;
}

/* ---- schedules ----------------------------------------------------------------------------------
 */

static void near(double got, double want)
{
    if (!(fabs(got - want) <= 8 * 0x1p-53)) fail_msg("%.17g, must be %.17g", got, want);
}

static void test_schedule_names(void **state)
{
    (void)state;
    for (int i = 0; i < MT_SCHEDULE_COUNT; i++) {
        assert_non_null(mt_schedule_names[i]);
        for (int j = 0; j < i; j++)
            assert_string_not_equal(mt_schedule_names[i], mt_schedule_names[j]);
    }
    assert_null(mt_schedule_names[MT_SCHEDULE_COUNT]);
    assert_string_equal(mt_schedule_names[MT_SCHEDULE_COSINE], "cosine");
}

/* Warm-up is a straight line whose last step is the full rate, in every schedule. */
static void test_warmup(void **state)
{
    (void)state;
    for (int i = 0; i < MT_SCHEDULE_COUNT; i++) {
        mt_optim_config c = config_of((mt_schedule)i, 4);
        for (int64_t step = 0; step < 4; step++)
            near(mt_schedule_lr(&c, step, 100), (double)(step + 1) / 4);
        near(mt_schedule_lr(&c, 4, 100), 1); /* the schedule proper begins at the full rate */
        c.warmup_steps = 1;
        near(mt_schedule_lr(&c, 0, 100), 1);
        c.warmup_steps = 0;
        near(mt_schedule_lr(&c, 0, 100), 1);
        c.warmup_steps = 200; /* longer than the run */
        near(mt_schedule_lr(&c, 99, 100), 0.5);
    }
}

static void test_schedule_shapes(void **state)
{
    (void)state;
    mt_optim_config constant = config_of(MT_SCHEDULE_CONSTANT, 3),
                    linear = config_of(MT_SCHEDULE_LINEAR, 3),
                    cosine = config_of(MT_SCHEDULE_COSINE, 3), wsd = config_of(MT_SCHEDULE_WSD, 3);
    enum { TOTAL = 104 }; /* 101 steps after warm-up: progress in hundredths */
    for (int64_t step = 3; step < TOTAL; step++) {
        double p = (double)(step - 3) / 100;
        near(mt_schedule_lr(&constant, step, TOTAL), 1);
        near(mt_schedule_lr(&linear, step, TOTAL), 0.1 + 0.9 * (1 - p));
        near(mt_schedule_lr(&cosine, step, TOTAL), 0.1 + 0.45 * (1 + cos(acos(-1) * p)));
        near(mt_schedule_lr(&wsd, step, TOTAL), step < 83 ? 1 : 0.1 + 4.5 * (1 - p));
    }
    mt_optim_config *ending[] = { &linear, &cosine, &wsd };
    for (int i = 0; i < 3; i++) {
        near(mt_schedule_lr(ending[i], TOTAL - 1, TOTAL), 0.1);
        near(mt_schedule_lr(ending[i], TOTAL + 5, TOTAL), 0.1); /* a run that goes on too long */
        near(mt_schedule_lr(ending[i], 2, 4), 1);
        near(mt_schedule_lr(ending[i], 3, 4), 0.1); /* the only one behind the warm-up */
        ending[i]->warmup_steps = 0;
        near(mt_schedule_lr(ending[i], 0, 1), 1); /* a run of one step */
    }
}

static void test_config_rules(void **state)
{
    (void)state;
    mt_optim_config c;
    const struct {
        double *field, bad;
        const char *word;
    } rules[] = {
        { &c.lr, -1, "optim.lr" },
        { &c.min_lr, -1e-9, "optim.min_lr" },
        { &c.min_lr, 2e-3, "optim.min_lr" },
        { &c.weight_decay, -1, "optim.weight_decay" },
        { &c.beta1, 1, "optim.beta1" },
        { &c.beta1, -0.1, "optim.beta1" },
        { &c.beta2, 1.5, "optim.beta2" },
        { &c.eps, -1e-8, "optim.eps" },
        { &c.eps, 0, "optim.eps" }, /* 0 / 0 wherever a gradient has always been zero */
        { &c.grad_clip, -1, "optim.grad_clip" },
        { &c.lr, (double)INFINITY, "optim.lr is" },
        { &c.weight_decay, (double)INFINITY, "optim.weight_decay is" },
    };
    mt_optim_config_defaults(&c);
    assert_ok(mt_optim_config_check(&c));
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        for (int nan = 0; nan < 2; nan++) {
            mt_optim_config_defaults(&c);
            *rules[i].field = nan ? (double)NAN : rules[i].bad;
            assert_fails(mt_optim_config_check(&c), MT_ECONFIG, rules[i].word);
        }
    mt_optim_config_defaults(&c);
    c.warmup_steps = -1;
    assert_fails(mt_optim_config_check(&c), MT_ECONFIG, "optim.warmup_steps");
}

/* ---- the update ---------------------------------------------------------------------------------
 */

enum { PARAMS = 5 };
static const int64_t sizes[PARAMS] = { 3, 130, 1, 77, 256 };

/* bf16: the gradients of w1 and w4 are. */
static mt_param_store *make_store_of(mt_dtype dtype, bool bf16)
{
    mt_param_store *store;
    mt_param *p;
    char name[16];
    stream.device = test_device();
    assert_ok(mt_param_store_create(&store, stream.device, dtype, bf16 ? MT_BF16 : dtype));
    if (bf16) assert_ok(mt_param_store_set_grad_dtype(store, MT_BF16));
    for (int i = 0; i < PARAMS; i++) { /* decay, frozen: no, yes, no+frozen, yes, yes */
        snprintf(name, sizeof name, "w%d", i);
        mt_param_spec spec = { .name = name,
                               .members = 1,
                               .m = 1,
                               .k = sizes[i],
                               .decay = i == 1 || i > 2,
                               .frozen = i == 2,
                               .packed = i % 3 == 1 };
        assert_ok(mt_param_store_add(store, &p, &spec));
    }
    assert_ok(mt_param_store_allocate(store, true));
    for (int i = 0; i < PARAMS; i++)
        test_random(mt_param_store_get(store, i)->master, sizes[i], dtype, 2, (uint64_t)i);
    return store;
}

static mt_param_store *make_store(mt_dtype dtype)
{
    return make_store_of(dtype, false);
}

static void draw_grads(mt_param_store *store, uint64_t seed, double scale)
{
    for (int i = 0; i < PARAMS; i++) {
        mt_param *p = mt_param_store_get(store, i);
        if (!p->frozen)
            test_random(p->grad, sizes[i], p->grad_dtype, scale, seed + 10 * (uint64_t)i);
    }
}

/* One param by NUMERICS section 6, each operation rounded to f32 (f64). */
struct plain {
    double p[256], m[256], v[256];
};

static double rounded(mt_dtype dtype, double x)
{
    return dtype == MT_F32 ? (double)(float)x : x;
}

static void plain_update(struct plain *s, const mt_param *p, const mt_optim_config *c, double lr,
                         double clip, int t)
{
    mt_dtype d = p->dtype;
#define R(x) rounded(d, (x))
    double power1 = 1, power2 = 1;
    for (int i = 0; i < t; i++) power1 *= c->beta1, power2 *= c->beta2;
    double b1 = R(c->beta1), b2 = R(c->beta2), r1 = R(1 - c->beta1), r2 = R(1 - c->beta2);
    double bc1 = R(1 - power1), bc2 = R(1 - power2), wd = p->decay ? R(c->weight_decay) : 0;
    for (int64_t i = 0; i < mt_param_count(p); i++) {
        double g = R(mt_load_f64(p->grad, p->grad_dtype, i) * R(clip));
        s->m[i] = R(R(b1 * s->m[i]) + R(r1 * g));
        s->v[i] = R(R(b2 * s->v[i]) + R(R(r2 * g) * g));
        double u = R(R(s->m[i] / bc1) / R(R(sqrt(R(s->v[i] / bc2))) + R(c->eps)));
        s->p[i] = R(s->p[i] - R(R(lr) * R(u + R(wd * s->p[i]))));
    }
#undef R
}

/* Double rounding is harmless: an f64 holds sums, products, quotients and roots of two f32 with
 * more than 2 * 24 + 2 bits, so rounding twice gives what rounding once does. */
static void test_update_is_exact(void **state)
{
    (void)state;
    const mt_dtype dtypes[] = { MT_F32, MT_F64, MT_F32 };
    for (int t = 0; t < 3; t++) {
        mt_dtype dtype = dtypes[t];
        static struct plain plain[PARAMS];
        mt_param_store *store = make_store_of(dtype, t == 2);
        mt_optimizer *optimizer;
        mt_optim_config c = config_of(MT_SCHEDULE_COSINE, 0);
        c.grad_clip = 1;
        assert_ok(mt_optimizer_create(&optimizer, store, &c));
        memset(plain, 0, sizeof plain);
        for (int i = 0; i < PARAMS; i++)
            for (int64_t j = 0; j < sizes[i]; j++)
                plain[i].p[j] = mt_load_f64(mt_param_store_get(store, i)->master, dtype, j);
        for (int step = 1; step <= 6; step++) {
            double lr = 0.01 / step;
            draw_grads(store, (uint64_t)step, step % 2 ? 1e-3 : 5); /* below and above the clip */
            assert_ok(mt_optimizer_set_lr(optimizer, lr));
            assert_ok(mt_optimizer_step(optimizer, &stream, NULL));
            const struct mt_step_state *s = mt_optimizer_state(optimizer);
            double sum = 0;
            for (int i = 0; i < PARAMS; i++)
                for (int64_t j = 0; j < sizes[i]; j++)
                    sum += pow(mt_load_f64(mt_param_store_get(store, i)->grad,
                                           mt_param_store_get(store, i)->grad_dtype, j),
                               2);
            assert_true(fabs(s->grad_norm - sqrt(sum)) <= 600 * 0x1p-53 * sqrt(sum));
            assert_true(s->clip == fmin(1, 1 / (s->grad_norm + 1e-6)));
            assert_int_equal(s->clip < 1, step % 2 == 0);
            for (int i = 0; i < PARAMS; i++) {
                mt_param *p = mt_param_store_get(store, i);
                if (!p->frozen) plain_update(&plain[i], p, &c, lr, s->clip, step);
                test_assert_near(p->name, p->master, dtype, plain[i].p, sizes[i], 0, 0);
                size_t at = (size_t)p->offset * mt_dtype_size(dtype);
                test_assert_near("m", (char *)mt_optimizer_m(optimizer) + at, dtype, plain[i].m,
                                 sizes[i], 0, 0);
                test_assert_near("v", (char *)mt_optimizer_v(optimizer) + at, dtype, plain[i].v,
                                 sizes[i], 0, 0);
            }
        }
        assert_int_equal(mt_optimizer_state(optimizer)->applied, 6);
        mt_optimizer_destroy(&optimizer);
        assert_null(optimizer);
        mt_optimizer_destroy(&optimizer);
        mt_param_store_destroy(&store);
        assert_int_equal(stream.device->bytes[MT_MEMORY_MOMENTS], 0);
    }
}

static void test_stores_without_memory(void **state)
{
    (void)state;
    mt_param_store *store;
    mt_param *p;
    mt_optimizer *optimizer;
    mt_optim_config c = config_of(MT_SCHEDULE_CONSTANT, 0);
    assert_ok(mt_param_store_create(&store, test_device(), MT_F32, MT_F32));
    assert_fails(mt_optimizer_create(&optimizer, store, &c), MT_EINVAL, "no params");
    assert_ok(mt_param_store_add(store, &p,
                                 &(mt_param_spec){ .name = "w", .members = 1, .m = 1, .k = 3 }));
    assert_fails(mt_optimizer_create(&optimizer, store, &c), MT_EINVAL, "no memory yet");
    assert_null(optimizer);
    assert_ok(mt_param_store_allocate(store, false));
    assert_ok(mt_optimizer_create(&optimizer, store, &c));
    assert_ok(mt_optimizer_set_lr(optimizer, 0.1));
    stream.device = test_device();
    assert_fails(mt_optimizer_step(optimizer, &stream, NULL), MT_EINVAL, "has no gradients");
    assert_int_equal(mt_optimizer_state(optimizer)->applied, 0); /* refused before it is counted */
    assert_true(mt_optimizer_state(optimizer)->power1 == 1);
    mt_optimizer_destroy(&optimizer);
    mt_param_store_destroy(&store);
}

/* A master that is written after a step is what a refresh writes: the cast that AdamW made is of
 * the one before. Nor does a step that failed say that it has made one. */
static void test_writes_after_a_step(void **state)
{
    (void)state;
    enum { M = 4, K = 8, COUNT = M * K };
    const mt_param_spec spec = { .name = "w", .members = 1, .m = M, .k = K, .packed = true };
    int casts = 0;
    for (int set = 0; set < TEST_SETS; set++) {
        mt_stream s = { 0 };
        const char *name;
        mt_param_store *store;
        mt_param *w;
        mt_optimizer *optimizer;
        mt_optim_config c = config_of(MT_SCHEDULE_CONSTANT, 0);
        float threes[COUNT];
        if (!test_open_set(&s.device, &name, set, 1)) continue;
        assert_ok(mt_param_store_create(&store, s.device, MT_F32, MT_BF16));
        assert_ok(mt_param_store_add(store, &w, &spec));
        assert_ok(mt_linear_reserve(w, s.device, NULL));
        assert_ok(mt_param_store_allocate(store, true));
        assert_ok(mt_linear_place(w, s.device));
        assert_ok(mt_param_store_init(store, 1));
        assert_ok(mt_linear_refresh(w, &s));
        assert_ok(mt_optimizer_create(&optimizer, store, &c));
        assert_ok(mt_optimizer_set_lr(optimizer, 0.5));
        assert_ok(mt_optimizer_step(optimizer, &s, NULL));
        assert_int_equal(w->cast_written, w->cast != NULL);
        for (int i = 0; i < COUNT; i++) threes[i] = 3;
        assert_ok(mt_param_write_master(store, w, 0, COUNT, threes));
        assert_false(w->cast_written);
        assert_ok(mt_linear_refresh(w, &s));
        assert_ok(mt_device_synchronize(s.device));
        for (int i = 0; w->cast && i < COUNT; i++) assert_true(mt_bf16_to_f32(w->cast[i]) == 3);
        casts += w->cast != NULL;
        w->own_grad = NULL;
        assert_fails(mt_optimizer_step(optimizer, &s, NULL), MT_EINVAL, "grad is NULL");
        assert_false(w->cast_written);
        mt_optimizer_destroy(&optimizer);
        mt_param_store_destroy(&store);
        mt_device_destroy(&s.device);
    }
    assert_true(casts > 0);
}

/* Without gradients only decay moves a weight: by lr * wd * p where it applies, not at all
 * elsewhere. Gaps stay 0. */
static void test_decay_alone(void **state)
{
    (void)state;
    mt_param_store *store = make_store(MT_F64);
    mt_optimizer *optimizer;
    mt_optim_config c = config_of(MT_SCHEDULE_CONSTANT, 0);
    double before[PARAMS][256];
    c.weight_decay = 0.25;
    assert_ok(mt_optimizer_create(&optimizer, store, &c));
    for (int i = 0; i < PARAMS; i++)
        memcpy(before[i], mt_param_store_get(store, i)->master, (size_t)sizes[i] * sizeof(double));
    mt_param_store_begin_step(store);
    assert_ok(mt_param_store_end_step(store));
    assert_fails(mt_optimizer_set_lr(optimizer, (double)NAN), MT_EINVAL, "must be finite");
    assert_fails(mt_optimizer_set_lr(optimizer, -1), MT_EINVAL, "is -1, must be finite and not");
    assert_ok(mt_optimizer_set_lr(optimizer, 0.5));
    assert_ok(mt_optimizer_step(optimizer, &stream, NULL));
    for (int i = 0; i < PARAMS; i++) {
        const mt_param *p = mt_param_store_get(store, i);
        for (int64_t j = 0; j < sizes[i]; j++) {
            double b = before[i][j], want = p->decay ? b - 0.5 * (0.25 * b) : b;
            assert_true(((double *)p->master)[j] == want);
        }
        const double *next = i + 1 < PARAMS ? mt_param_store_get(store, i + 1)->master : NULL;
        for (const double *gap = (double *)p->master + sizes[i]; next && gap < next; gap++)
            assert_true(*gap == 0);
    }
    mt_optimizer_destroy(&optimizer);
    mt_param_store_destroy(&store);
}

/* A skipped step changes no weight, no moment and no power; the step after it is as if it had not
 * been. */
static void test_skipped_steps(void **state)
{
    (void)state;
    const double bad[] = { (double)NAN, (double)INFINITY, -(double)INFINITY };
    for (int by_loss = 0; by_loss < 2; by_loss++) {
        mt_param_store *store[2] = { make_store(MT_F32), make_store(MT_F32) };
        mt_optimizer *optimizer[2];
        mt_optim_config c = config_of(MT_SCHEDULE_CONSTANT, 0);
        float loss = 1;
        for (int i = 0; i < 2; i++) assert_ok(mt_optimizer_create(&optimizer[i], store[i], &c));
        const struct mt_step_state *s = mt_optimizer_state(optimizer[0]);
        for (int step = 1; step <= 3; step++) {
            for (int k = 0; k < 3; k++) { /* only the first run meets these */
                draw_grads(store[0], 99, 1);
                if (by_loss)
                    loss = (float)bad[k];
                else
                    ((float *)mt_param_store_get(store[0], 3)->grad)[k] = (float)bad[k];
                assert_ok(mt_optimizer_set_lr(optimizer[0], 0.1));
                assert_ok(mt_optimizer_step(optimizer[0], &stream, &loss));
                assert_int_equal(s->skip, 1);
                assert_int_equal(s->skipped_in_a_row, k + 1);
                assert_int_equal(s->applied, step - 1);
                loss = 1;
            }
            for (int i = 0; i < 2; i++) {
                draw_grads(store[i], (uint64_t)step, 1);
                assert_ok(mt_optimizer_set_lr(optimizer[i], 0.1));
                assert_ok(mt_optimizer_step(optimizer[i], &stream, &loss));
            }
            assert_int_equal(s->skip, 0);
            assert_int_equal(s->skipped_in_a_row, 0);
            assert_int_equal(s->skipped, 3 * step);
            assert_true(s->power1 == mt_optimizer_state(optimizer[1])->power1);
            assert_true(s->power2 == mt_optimizer_state(optimizer[1])->power2);
            size_t bytes = (size_t)mt_param_store_elements(store[0]) * sizeof(float);
            assert_memory_equal(mt_param_store_master(store[0]), mt_param_store_master(store[1]),
                                bytes);
            assert_memory_equal(mt_optimizer_m(optimizer[0]), mt_optimizer_m(optimizer[1]), bytes);
            assert_memory_equal(mt_optimizer_v(optimizer[0]), mt_optimizer_v(optimizer[1]), bytes);
        }
        for (int i = 0; i < 2; i++) {
            mt_optimizer_destroy(&optimizer[i]);
            mt_param_store_destroy(&store[i]);
        }
    }
}

/* ---- which params decay -------------------------------------------------------------------------
 */

static void test_decay_by_kind(void **state)
{
    (void)state;
    static const char *const decayed[] = { "_proj", "experts", "gate", "lm_head", "mlp.gate_up" };
    for (int a = 0; a < mt_architecture_count; a++)
        for (int tied = 0; tied < 2; tied++) {
            mt_model_config c;
            mt_model *model;
            int kinds[5] = { 0 }, norms = 0, embeddings = 0;
            mt_model_config_defaults(&c, &mt_architectures[a]);
            c.vocab_size = 9, c.hidden_size = 8, c.num_hidden_layers = 2, c.num_attention_heads = 2;
            c.moe_intermediate_size = 4, c.num_experts = 3, c.num_experts_per_tok = 1;
            c.intermediate_size = 4, c.tie_word_embeddings = tied;
            if (mt_architectures[a].dense_layers) c.mlp_only_layer_count = 1;
            assert_ok(mt_model_create(&model, test_device(), &c, MT_F32, 4, false, NULL));
            mt_param_store *store = mt_model_params(model);
            for (int64_t i = 0; i < mt_param_store_count(store); i++) {
                const mt_param *p = mt_param_store_get(store, i);
                bool norm = strstr(p->name, "norm"), embedding = strstr(p->name, "embed");
                norms += norm, embeddings += embedding;
                assert_int_equal(p->decay, !norm && !embedding);
                for (int k = 0; k < 5; k++) kinds[k] += p->decay && strstr(p->name, decayed[k]);
            }
            assert_int_equal(embeddings, 1); /* tied: the one matrix counts as an embedding */
            assert_int_equal(kinds[3], !tied);
            assert_true(norms >= 5 && kinds[0] >= 4 && kinds[1] >= 2 && kinds[2] >= 1);
            mt_model_destroy(&model);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_schedule_names),      cmocka_unit_test(test_warmup),
        cmocka_unit_test(test_schedule_shapes),     cmocka_unit_test(test_config_rules),
        cmocka_unit_test(test_update_is_exact),     cmocka_unit_test(test_stores_without_memory),
        cmocka_unit_test(test_writes_after_a_step), cmocka_unit_test(test_decay_alone),
        cmocka_unit_test(test_skipped_steps),       cmocka_unit_test(test_decay_by_kind),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
