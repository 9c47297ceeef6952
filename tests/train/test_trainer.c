/* The training step: what must not change a bit, what micro-batches mean, what a step allocates,
 * learning, and steps that are not finite. */
#include "tests/support/test.h"

#include <malloc.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/rng.h"
#include "tests/support/fault.h"
#include "tests/support/guard.h"
#include "train/trainer.h"

enum { STEPS = 8, MAX_TOKENS = 512 };

static mt_trainer_config config_of(mt_dtype dtype)
{
    mt_trainer_config c = { .dtype = dtype,
                            .batch_size = 4,
                            .micro_batch_size = 2,
                            .sequence_length = 12,
                            .steps = STEPS,
                            .seed = 5 };
    const mt_architecture *architecture;
    assert_ok(mt_architecture_find(&architecture, "qwen3_moe"));
    mt_model_config_defaults(&c.model, architecture);
    c.model.vocab_size = 23, c.model.hidden_size = 24, c.model.num_hidden_layers = 2;
    c.model.num_attention_heads = 4, c.model.num_key_value_heads = 2, c.model.head_dim = 8;
    c.model.moe_intermediate_size = 10, c.model.num_experts = 5, c.model.num_experts_per_tok = 2;
    c.model.z_loss_coef = 1e-3, c.model.router_bias_update_rate = 1e-3;
    mt_optim_config_defaults(&c.optim);
    c.optim.lr = 1e-2, c.optim.warmup_steps = 3;
    return c;
}

static void draw_batch(const mt_trainer_config *c, int64_t step, int32_t *tokens, int32_t *targets)
{
    int64_t n = c->batch_size * c->sequence_length;
    for (int64_t i = 0; i < n; i++) {
        uint64_t at = (uint64_t)(step * n + i), vocab = (uint64_t)c->model.vocab_size;
        tokens[i] = (int32_t)mt_rng_below(11, 1, at, vocab);
        targets[i] = mt_rng_below(11, 2, at, 10) ? (int32_t)mt_rng_below(11, 3, at, vocab) : -100;
    }
}

/* `kernels`: a set of the device under test, NULL for its best, or "guarded" for the device whose
 * memory the host cannot touch. */
static mt_trainer *open_trainer(const mt_trainer_config *c, const char *kernels, int threads)
{
    mt_device *device;
    mt_trainer *trainer;
    if (kernels && !strcmp(kernels, "guarded"))
        assert_ok(guard_open(&device, NULL, threads));
    else
        assert_ok(mt_device_open(&device, test_device_name(), kernels, threads));
    assert_ok(mt_trainer_create(&trainer, device, c));
    return trainer;
}

static void close_trainer(mt_trainer **trainer)
{
    mt_device *device = mt_trainer_device(*trainer);
    mt_trainer_destroy(trainer);
    assert_null(*trainer);
    for (int m = 0; m < MT_MEMORY_COUNT; m++)
        if (m != MT_MEMORY_WORKSPACE) assert_int_equal(device->bytes[m], 0);
    mt_device_destroy(&device);
}

/* ---- runs that must be one ----------------------------------------------------------------------
 */

/* Everything a run leaves: results of each step, what an evaluation finds then, and a fingerprint
 * of weights, moments and router biases. */
struct outcome {
    double numbers[STEPS][6], evaluated;
    uint64_t state;
};

/* data is device memory */
static uint64_t mix(mt_device *device, uint64_t hash, const void *data, size_t bytes)
{
    unsigned char *p = malloc(bytes + 1);
    assert_non_null(p);
    assert_ok(mt_device_copy(device, p, data, bytes));
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ p[i]) * 0x100000001b3u;
    free(p);
    return hash;
}

static uint64_t fingerprint(const mt_trainer *t)
{
    const mt_model *model = mt_trainer_model(t);
    const mt_optimizer *o = mt_trainer_optimizer(t);
    const mt_param_store *store = mt_model_params(model);
    mt_device *device = mt_trainer_device(t);
    size_t bytes =
        (size_t)mt_param_store_elements(store) * mt_dtype_size(mt_param_store_get(store, 0)->dtype);
    uint64_t h = mix(device, 0xcbf29ce484222325u, mt_param_store_master(store), bytes);
    h = mix(device, mix(device, h, mt_optimizer_m(o), bytes), mt_optimizer_v(o), bytes);
    for (int64_t l = 0; l < mt_model_moe_layers(model); l++)
        h = mix(device, h, mt_model_router_bias(model, l),
                (size_t)mt_model_get_config(model)->num_experts * sizeof(float));
    return h;
}

static struct outcome run(const mt_trainer_config *c, const char *kernels, int threads)
{
    struct outcome o;
    int32_t tokens[MAX_TOKENS], targets[MAX_TOKENS];
    mt_trainer *t = open_trainer(c, kernels, threads);
    for (int64_t step = 0; step < STEPS; step++) {
        mt_step_result r;
        draw_batch(c, step, tokens, targets);
        assert_ok(mt_trainer_step(t, tokens, targets, &r));
        assert_int_equal(r.step, step);
        assert_true(r.loss_finite && !r.skipped && r.grad_norm > 0);
        const double numbers[6] = { r.loss, r.aux_loss, r.z_loss, r.grad_norm, r.lr, r.max_vio };
        memcpy(o.numbers[step], numbers, sizeof numbers);
    }
    int64_t counted;
    o.state = fingerprint(t);
    assert_ok(mt_trainer_eval(t, tokens, targets, c->micro_batch_size, &o.evaluated, &counted));
    close_trainer(&t);
    return o;
}

static void assert_same(const struct outcome *a, const struct outcome *b, const char *what)
{
    for (int i = 0; i < STEPS; i++)
        if (memcmp(a->numbers[i], b->numbers[i], sizeof a->numbers[i]) != 0)
            fail_msg("%s: step %d has loss %.17g and norm %.17g, must be %.17g and %.17g", what, i,
                     b->numbers[i][0], b->numbers[i][3], a->numbers[i][0], a->numbers[i][3]);
    if (a->state != b->state) fail_msg("%s: weights or moments differ", what);
    if (memcmp(&a->evaluated, &b->evaluated, sizeof a->evaluated) != 0)
        fail_msg("%s: an evaluation finds %.17g, must find %.17g", what, b->evaluated,
                 a->evaluated);
}

static const mt_dtype dtypes[] = { MT_F32, MT_BF16, MT_F64, MT_BF16 };
/* Of the gradients of weights. */
static const mt_dtype grad_dtypes[] = { MT_F32, MT_F32, MT_F64, MT_BF16 };
enum { DTYPES = sizeof dtypes / sizeof *dtypes };

static void test_memory_options(void **state)
{
    (void)state;
    static const char *const recipes[] = {
        "", "", "nvfp4", "fp8_delayed; steps=1.. fprop=mxfp8:sr dgrad=nvfp4 wgrad=mxfp6_e3m2"
    };
    for (int d = 0; d < DTYPES; d++)
        for (int way = 0; way < 4; way++) {
            mt_trainer_config c = config_of(dtypes[d]);
            c.grad_dtype = grad_dtypes[d];
            bool tied = c.model.tie_word_embeddings = way == 1;
            c.delayed_history = 2;
            snprintf(c.recipe, sizeof c.recipe, "%s", recipes[way]);
            struct outcome plain = run(&c, NULL, 1);
            struct outcome guarded = run(&c, "guarded", 1);
            if (!strcmp(test_device_name(), "cpu")) assert_same(&plain, &guarded, "guarded memory");
            for (int bits = 1; bits < 12; bits++) {
                char what[1200];
                c.recompute = (mt_recompute)(bits % 3), c.offload = bits / 3 & 1,
                c.defer_wgrad = bits / 6;
                c.save_original_input = bits % 5 == 1;
                c.eager = bits & 1; /* else recorded, where the device can */
                snprintf(what, sizeof what,
                         "%s, gradients %s%s %s, recompute %d, offload %d, deferred %d",
                         mt_dtype_name(dtypes[d]), mt_dtype_name(grad_dtypes[d]),
                         tied ? ", tied" : "", c.recipe, (int)c.recompute, c.offload,
                         c.defer_wgrad);
                struct outcome other = run(&c, bits == 11 ? "guarded" : NULL, 1);
                if (bits < 11 || !strcmp(test_device_name(), "cpu"))
                    assert_same(&plain, &other, what);
            }
        }
}

/* Large enough that every kernel goes parallel. */
static mt_trainer_config wide_config(mt_dtype dtype)
{
    mt_trainer_config c = config_of(dtype);
    c.batch_size = 8, c.micro_batch_size = 8, c.sequence_length = 64;
    c.model.vocab_size = 300, c.model.hidden_size = 64, c.model.moe_intermediate_size = 48;
    c.model.num_attention_heads = 4, c.model.head_dim = 16, c.model.num_experts = 8;
    return c;
}

static void test_threads(void **state)
{
    (void)state;
    for (int d = 0; d < DTYPES; d++) {
        mt_trainer_config c = wide_config(dtypes[d]);
        c.grad_dtype = grad_dtypes[d];
        struct outcome one = run(&c, NULL, 1), two = run(&c, NULL, 2), three = run(&c, NULL, 3);
        assert_same(&one, &two, "2 threads");
        assert_same(&one, &three, "3 threads");
        c.recompute = MT_RECOMPUTE_BLOCK, c.offload = c.defer_wgrad = true;
        struct outcome all = run(&c, NULL, 2);
        assert_same(&one, &all, "2 threads and every option");
    }
}

static void test_kernel_sets(void **state)
{
    (void)state;
    const char *sets[] = {
        "portable", "avx2", "avx512", "avx512_bf16", "amx", "sm_90a", "generic"
    };
    int ran = 0;
    for (int i = 0; i < TEST_SETS; i++) {
        mt_device *device;
        if (mt_device_open(&device, test_device_name(), sets[i], 1) != MT_OK) continue;
        mt_device_destroy(&device);
        for (int d = 0; d < DTYPES; d++) {
            mt_trainer_config c = wide_config(dtypes[d]);
            c.grad_dtype = grad_dtypes[d];
            struct outcome a = run(&c, sets[i], 2), b = run(&c, sets[i], 1);
            assert_same(&a, &b, sets[i]);
            ran++;
        }
    }
    assert_true(ran >= 3);
}

/* ---- micro-batches ------------------------------------------------------------------------------
 */

/* Gradients of one batch, and the results, cut into micro-batches of `size`. */
static double *gradients(const mt_trainer_config *base, int64_t size, mt_step_result *r, int64_t *n)
{
    mt_trainer_config c = *base;
    int32_t tokens[MAX_TOKENS], targets[MAX_TOKENS];
    c.micro_batch_size = size;
    draw_batch(&c, 0, tokens, targets);
    mt_trainer *t = open_trainer(&c, NULL, 1);
    assert_ok(mt_trainer_gradients(t, tokens, targets, r));
    const mt_param_store *store = mt_model_params(mt_trainer_model(t));
    *n = mt_param_store_elements(store);
    double *g = malloc((size_t)*n * sizeof *g);
    assert_ok(mt_device_copy(mt_trainer_device(t), g, mt_param_store_grad(store),
                             (size_t)*n * sizeof *g));
    close_trainer(&t);
    return g;
}

/* Cross-entropy is divided by the targets of the whole step, so its gradient does not depend on how
 * the batch is cut (beyond rounding); the balancing losses are means over micro-batches. */
static void test_micro_batches(void **state)
{
    (void)state;
    mt_trainer_config c = config_of(MT_F64);
    mt_step_result whole, part;
    int64_t n;
    c.model.router_aux_loss_coef = c.model.z_loss_coef = 0;
    double *want = gradients(&c, 4, &whole, &n);
    for (int64_t size = 1; size <= 2; size++) {
        double *got = gradients(&c, size, &part, &n), off = 0, norm = 0;
        for (int64_t i = 0; i < n; i++) off += pow(got[i] - want[i], 2), norm += want[i] * want[i];
        /* sums of 48 tokens in another order, through two layers */
        assert_true(sqrt(off) <= 256 * 48 * 0x1p-53 * sqrt(norm));
        assert_true(fabs(part.loss - whole.loss) <= 48 * 0x1p-53 * whole.loss);
        assert_true(fabs(part.z_loss - whole.z_loss) <=
                    48 * 0x1p-53 * whole.z_loss); /* a mean over tokens */
        assert_true(part.max_vio == whole.max_vio);
        free(got);
    }
    free(want);

    c = config_of(MT_F64);
    double aux = 0;
    for (int64_t first = 0; first < 4; first += 2) { /* two steps of one micro-batch each */
        mt_trainer_config half = c;
        int32_t tokens[MAX_TOKENS], targets[MAX_TOKENS];
        draw_batch(&c, 0, tokens, targets);
        half.batch_size = 2;
        mt_trainer *t = open_trainer(&half, NULL, 1);
        assert_ok(mt_trainer_gradients(t, tokens + first * 12, targets + first * 12, &part));
        aux += part.aux_loss / 2;
        close_trainer(&t);
    }
    free(gradients(&c, 2, &whole, &n));
    assert_true(fabs(whole.aux_loss - aux) <= 8 * 0x1p-53 * aux);
}

/* ---- steady state -------------------------------------------------------------------------------
 */

static void test_a_step_allocates_nothing(void **state)
{
    (void)state;
#ifdef __clang__
    const size_t cached = 1024; /* by its OpenMP runtime, in all the steps together */
#else
    const size_t cached = 0;
#endif
    int32_t tokens[MAX_TOKENS], targets[MAX_TOKENS];
    for (int bits = 0; bits < 12; bits++) {
        mt_trainer_config c = wide_config(dtypes[bits % DTYPES]);
        c.micro_batch_size = 4, c.grad_dtype = grad_dtypes[bits % DTYPES];
        c.recompute = (mt_recompute)(bits % 3), c.offload = bits / 3 & 1, c.defer_wgrad = bits / 6;
        mt_trainer *t = open_trainer(&c, NULL, 2);
        const mt_device *device = mt_trainer_device(t);
        int64_t ours = 0, memory[MT_MEMORY_COUNT];
        size_t heap = 0;
        for (int64_t step = 0; step < 5; step++) {
            mt_step_result r;
            double loss;
            int64_t count;
            draw_batch(&c, step, tokens, targets);
            assert_ok(mt_trainer_step(t, tokens, targets, &r));
            assert_ok(mt_trainer_eval(t, tokens, targets, 4, &loss, &count));
            if (step >= 2) {
                assert_int_equal(fault_allocations(), ours);
                assert_memory_equal(device->bytes, memory, sizeof memory);
                /* nor does anybody keep more (the heap is a GPU's driver's, too) */
                if (!strcmp(device->name, "cpu"))
                    assert_true(mallinfo2().uordblks <= heap + cached);
            }
            ours = fault_allocations();
            memcpy(memory, device->bytes, sizeof memory);
            if (step < 2) heap = mallinfo2().uordblks;
        }
        close_trainer(&t);
    }
}

/* ---- learning -----------------------------------------------------------------------------------
 */

/* What follows a token is a function of it: the loss falls to almost nothing. */
static void test_learns(void **state)
{
    (void)state;
    for (int d = 0; d < DTYPES; d++) {
        mt_trainer_config c = config_of(dtypes[d]);
        c.grad_dtype = grad_dtypes[d];
        int32_t tokens[MAX_TOKENS], targets[MAX_TOKENS];
        double first = 0, loss = 0, evaluated;
        int64_t count;
        c.steps = 60, c.batch_size = c.micro_batch_size = 8;
        mt_trainer *t = open_trainer(&c, NULL, 1);
        for (int64_t step = 0; step < c.steps; step++) {
            mt_step_result r;
            for (int i = 0; i < 96; i++) {
                tokens[i] = (int32_t)mt_rng_below(3, 1, (uint64_t)(step * 96 + i), 23);
                targets[i] = (tokens[i] * 5 + 2) % 23;
            }
            assert_ok(mt_trainer_step(t, tokens, targets, &r));
            assert_true(r.lr == mt_schedule_lr(&c.optim, step, c.steps));
            if (step == 0) first = r.loss;
            loss = r.loss;
        }
        assert_int_equal(mt_trainer_steps(t), c.steps);
        assert_true(fabs(first - log(23)) < 1); /* an untrained model knows nothing */
        assert_true(loss < 0.05);
        assert_ok(mt_trainer_eval(t, tokens, targets, 8, &evaluated, &count));
        assert_int_equal(count, 96);
        assert_true(evaluated / 96 < 0.05);
        close_trainer(&t);
    }
}

/* Evaluation and logits in between change nothing, and agree with each other. */
static void test_evaluation(void **state)
{
    (void)state;
    mt_trainer_config c = config_of(MT_F64);
    int32_t tokens[MAX_TOKENS], targets[MAX_TOKENS];
    struct outcome plain = run(&c, NULL, 1);
    double *logits = malloc(sizeof *logits * 4 * 12 * 23),
           *short_logits = malloc(sizeof *logits * 4 * 5 * 23);
    mt_trainer *t = open_trainer(&c, NULL, 1);
    for (int64_t step = 0; step < STEPS; step++) {
        mt_step_result r;
        double sum, want = 0;
        int64_t count, counted = 0;
        draw_batch(&c, step, tokens, targets);
        for (int64_t sequences = 0; sequences <= 4; sequences += 2) {
            assert_ok(mt_trainer_eval(t, tokens, targets, sequences, &sum, &count));
            assert_true(sequences > 0 || (sum == 0 && count == 0));
        }
        assert_ok(mt_trainer_logits(t, tokens, 4, 12, -1, logits));
        for (int i = 0; i < 48; i++) {
            double lse = 0;
            if (targets[i] == -100) continue;
            for (int v = 0; v < 23; v++) lse += exp(logits[i * 23 + v]);
            want += log(lse) - logits[i * 23 + targets[i]];
            counted++;
        }
        assert_int_equal(count, counted);
        assert_true(fabs(sum - want) <= 4 * (48 + 23) * 0x1p-53 * want);
        assert_ok(mt_trainer_step(t, tokens, targets, &r));
        assert_memory_equal(&r.loss, &plain.numbers[step][0], sizeof r.loss);
    }
    assert_true(fingerprint(t) == plain.state);
    assert_ok(mt_trainer_logits(t, tokens, 4, 12, -1, logits));
    assert_ok(mt_trainer_logits(t, tokens, 1, 5, -1,
                                short_logits)); /* causal: a prefix has the same logits */
    test_assert_near("prefix", short_logits, MT_F64, logits, 5 * 23, 256 * 24 * 0x1p-53,
                     256 * 24 * 0x1p-53);
    free(logits), free(short_logits);
    close_trainer(&t);
}

/* ---- what is not finite -------------------------------------------------------------------------
 */

static void poke(mt_trainer *t, const char *name, int64_t i, double x)
{
    mt_param *p = mt_param_store_find(mt_model_params(mt_trainer_model(t)), name);
    mt_stream stream = { .device = mt_trainer_device(t) };
    assert_non_null(p);
    double bits = 0;
    size_t size = mt_dtype_size(p->dtype);
    mt_store_f64(&bits, p->dtype, 0, x);
    assert_ok(mt_device_copy(stream.device, (char *)p->master + (size_t)i * size, &bits, size));
    assert_ok(mt_model_refresh(mt_trainer_model(t), &stream));
}

static struct mt_step_state state_of(mt_trainer *t)
{
    struct mt_step_state s;
    assert_ok(mt_device_copy(mt_trainer_device(t), &s, mt_optimizer_state(mt_trainer_optimizer(t)),
                             sizeof s));
    return s;
}

/* A loss that is not finite makes no update, and the first bad tensor is named: a weight, or what a
 * layer made of finite weights. */
static void test_loss_not_finite(void **state)
{
    (void)state;
    static const struct {
        const char *param;
        double value;
        const char *named;
    } cases[] = {
        { "model.layers.1.self_attn.o_proj", (double)INFINITY, "model.layers.1.self_attn.o_proj" },
        { "model.norm", (double)NAN, "model.norm" },
        { "model.layers.0.input_layernorm", 6e37, "model.layers.0.self_attn.qkv_proj" },
        { "model.norm", 6e37, "lm_head" },
    };
    for (int d = 0; d < 2; d++)
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            mt_trainer_config c = config_of(dtypes[d]);
            int32_t tokens[MAX_TOKENS], targets[MAX_TOKENS];
            char name[128];
            mt_step_result r;
            c.model.init_std = 10;
            mt_trainer *t = open_trainer(&c, NULL, 1);
            draw_batch(&c, 0, tokens, targets);
            assert_ok(mt_trainer_step(t, tokens, targets, &r));
            assert_ok(mt_trainer_find_nonfinite(t, tokens, targets, name));
            assert_string_equal(name, "");
            poke(t, cases[i].param, 3, cases[i].value);
            uint64_t before = fingerprint(t);
            struct mt_step_state first = state_of(t);
            assert_ok(mt_trainer_step(t, tokens, targets, &r));
            assert_false(r.loss_finite);
            assert_true(r.skipped);
            assert_true(fingerprint(t) == before);
            assert_true(state_of(t).power1 == first.power1 && state_of(t).applied == 1);
            assert_ok(mt_trainer_find_nonfinite(t, tokens, targets, name));
            assert_string_equal(name, cases[i].named);
            close_trainer(&t);
        }
}

/* A gradient that is not finite under a finite loss: skipped and counted, and the run goes on. Be
 * it among those in f32 or in bf16. */
static void check_gradient_not_finite(bool half)
{
    mt_trainer_config c = config_of(half ? MT_BF16 : MT_F32);
    c.grad_dtype = half ? MT_BF16 : MT_F32;
    int32_t tokens[MAX_TOKENS], targets[MAX_TOKENS];
    mt_step_result r;
    mt_trainer *t = open_trainer(&c, NULL, 1);
    mt_flat_grads grads = mt_param_store_grads(mt_model_params(mt_trainer_model(t)));
    const float bad_gradient = INFINITY;
    const uint16_t bad_half = 0x7f80;
    assert_int_equal(grads.bf16_count > 0, half);
    draw_batch(&c, 0, tokens, targets);
    for (int round = 0; round < 2; round++) {
        for (int bad = 1; bad <= 3; bad++) {
            uint64_t before = fingerprint(t);
            assert_ok(mt_trainer_gradients(t, tokens, targets, &r));
            void *to =
                half ? (char *)(uintptr_t)(grads.bf16 + 7) : (char *)(uintptr_t)grads.real + 28;
            assert_ok(mt_device_copy(mt_trainer_device(t), to,
                                     half ? (const void *)&bad_half : &bad_gradient,
                                     half ? sizeof bad_half : sizeof bad_gradient));
            assert_ok(mt_trainer_update(t, 0.1, &r));
            assert_true(r.loss_finite && r.skipped && !isfinite(r.grad_norm));
            assert_int_equal(r.skipped_in_a_row, bad);
            assert_true(fingerprint(t) == before);
        }
        uint64_t before = fingerprint(t);
        assert_ok(mt_trainer_step(t, tokens, targets, &r));
        assert_false(r.skipped);
        assert_int_equal(r.skipped_in_a_row, 0);
        assert_true(fingerprint(t) != before);
    }
    assert_int_equal(mt_trainer_steps(t), 8); /* skipped steps are steps of the schedule */
    close_trainer(&t);
}

static void test_gradient_not_finite(void **state)
{
    (void)state;
    for (int half = 0; half < 2; half++) check_gradient_not_finite(half);
}

/* ---- refusals -----------------------------------------------------------------------------------
 */

static void test_bad_batches(void **state)
{
    (void)state;
    mt_trainer_config c = config_of(MT_F32);
    int32_t tokens[MAX_TOKENS], targets[MAX_TOKENS], kept;
    double loss;
    int64_t count;
    mt_step_result r;
    mt_trainer *t = open_trainer(&c, NULL, 1);
    draw_batch(&c, 0, tokens, targets);
    const int32_t bad[] = { -1, 23, INT32_MIN };
    for (int i = 0; i < 3; i++) {
        kept = tokens[47], tokens[47] = bad[i];
        assert_fails(mt_trainer_step(t, tokens, targets, &r), MT_EINVAL, "token 47");
        assert_fails(mt_trainer_eval(t, tokens, targets, 4, &loss, &count), MT_EINVAL, "token 47");
        tokens[47] = kept, kept = targets[5], targets[5] = bad[i];
        assert_fails(mt_trainer_step(t, tokens, targets, &r), MT_EINVAL, "target 5");
        targets[5] = kept;
    }
    assert_fails(mt_trainer_step(t, tokens, NULL, &r), MT_EINVAL, "without targets");
    assert_fails(mt_trainer_eval(t, tokens, targets, 5, &loss, &count), MT_EINVAL, "5 sequences");
    assert_fails(mt_trainer_eval(t, tokens, targets, -1, &loss, &count), MT_EINVAL, "-1 sequences");
    assert_fails(mt_trainer_logits(t, tokens, 5, 12, -1, &loss), MT_EINVAL, "60 tokens");
    assert_fails(mt_trainer_logits(t, tokens, -1, 12, -1, &loss), MT_EINVAL, "-12 tokens");
    assert_fails(mt_trainer_logits(t, tokens, 2, 13, -1, &loss), MT_EINVAL, "2 sequences of 13");
    int32_t ignored[MAX_TOKENS];
    for (int i = 0; i < 48; i++) ignored[i] = -100;
    assert_fails(mt_trainer_step(t, tokens, ignored, &r), MT_EINVAL, "every target");
    assert_int_equal(mt_trainer_steps(t), 0);
    assert_ok(mt_trainer_step(t, tokens, targets, &r));
    close_trainer(&t);
}

static void test_bad_configurations(void **state)
{
    (void)state;
    mt_trainer_config c;
    mt_trainer *t;
    const struct {
        int64_t *field, value;
        const char *words;
    } rules[] = {
        { &c.sequence_length, 0, "sequence_length is 0" },
        { &c.batch_size, 0, "batch_size 0" },
        { &c.micro_batch_size, 3, "micro_batch_size 3" },
        { &c.micro_batch_size, -2, "micro_batch_size -2" },
        { &c.model.num_experts_per_tok, 6, "num_experts_per_tok is 6" },
    };
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        c = config_of(MT_F32);
        *rules[i].field = rules[i].value;
        assert_fails(mt_trainer_create(&t, test_device(), &c), MT_ECONFIG, rules[i].words);
        assert_null(t);
    }
    c = config_of(MT_F32);
    c.grad_dtype = MT_BF16;
    assert_fails(mt_trainer_create(&t, test_device(), &c), MT_ECONFIG, "activations of bf16");
    c = config_of(MT_F32);
    c.optim.beta1 = 2;
    assert_fails(mt_trainer_create(&t, test_device(), &c), MT_ECONFIG, "beta1");
    for (int m = 0; m < MT_MEMORY_COUNT; m++)
        if (m != MT_MEMORY_WORKSPACE) assert_int_equal(test_device()->bytes[m], 0);
}

int main(void)
{
    setenv("MT_SYNC", "0", 1); /* nothing here looks at device memory: steps can be recorded */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_memory_options),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_kernel_sets),
        cmocka_unit_test(test_micro_batches),
        cmocka_unit_test(test_a_step_allocates_nothing),
        cmocka_unit_test(test_learns),
        cmocka_unit_test(test_evaluation),
        cmocka_unit_test(test_loss_not_finite),
        cmocka_unit_test(test_gradient_not_finite),
        cmocka_unit_test(test_bad_batches),
        cmocka_unit_test(test_bad_configurations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
