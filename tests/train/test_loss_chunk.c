/* The loss of some tokens at a time: the same numbers but for the order of sums, less memory, and
 * neutral to what may not change a bit. */
#include "tests/support/test.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/rng.h"
#include "train/trainer.h"

enum { STEPS = 12, BATCH = 4, SEQUENCE = 12, TOKENS = BATCH * SEQUENCE, VOCAB = 301 };

struct history {
    double loss[STEPS], norm[STEPS], validation;
    int64_t peak; /* bytes of the device's memory */
};

static mt_trainer_config config_of(mt_dtype dtype, int64_t chunk)
{
    mt_trainer_config c = { .dtype = dtype,
                            .batch_size = BATCH,
                            .micro_batch_size = 2,
                            .sequence_length = SEQUENCE,
                            .steps = STEPS,
                            .loss_chunk = chunk,
                            .delayed_history = 4,
                            .seed = 5 };
    const mt_architecture *architecture;
    assert_ok(mt_architecture_find(&architecture, "qwen3_moe"));
    mt_model_config_defaults(&c.model, architecture);
    c.model.vocab_size = VOCAB, c.model.hidden_size = 16, c.model.num_hidden_layers = 2;
    c.model.num_attention_heads = 2, c.model.num_key_value_heads = 1, c.model.head_dim = 8;
    c.model.moe_intermediate_size = 8, c.model.num_experts = 4, c.model.num_experts_per_tok = 2;
    mt_optim_config_defaults(&c.optim);
    c.optim.lr = 1e-2, c.optim.warmup_steps = 3;
    return c;
}

static struct history train(const mt_trainer_config *c)
{
    struct history h = { .peak = 0 };
    mt_device *device;
    mt_trainer *t;
    int64_t counted;
    int32_t tokens[TOKENS], targets[TOKENS];
    assert_ok(mt_device_open(&device, test_device_name(), NULL, 1));
    assert_ok(mt_trainer_create(&t, device, c));
    for (int s = 0; s < STEPS; s++) {
        mt_step_result r;
        for (uint64_t i = 0; i < TOKENS; i++) {
            tokens[i] = (int32_t)mt_rng_below(11, 1, i, VOCAB);
            targets[i] = mt_rng_below(11, 2, i, 10) ? (int32_t)mt_rng_below(11, 3, i, VOCAB) : -100;
        }
        assert_ok(mt_trainer_step(t, tokens, targets, &r));
        h.loss[s] = r.loss, h.norm[s] = r.grad_norm;
    }
    assert_ok(mt_trainer_eval(t, tokens, targets, BATCH, &h.validation, &counted));
    h.peak = device->peak[MT_MEMORY_ACTIVATIONS];
    mt_trainer_destroy(&t);
    mt_device_destroy(&device);
    return h;
}

static void close_to(double got, double want, double limit)
{
    if (!(fabs(got - want) <= limit * fabs(want))) fail_msg("%.17g, whole %.17g", got, want);
}

static void assert_close(const struct history *a, const struct history *b, double limit)
{
    for (int s = 0; s < STEPS; s++) {
        close_to(a->loss[s], b->loss[s], limit);
        close_to(a->norm[s], b->norm[s], 10 * limit);
    }
    close_to(a->validation, b->validation, limit);
    assert_true(b->loss[STEPS - 1] < b->loss[0] - 0.2);
}

/* Parts that divide the micro-batch's 24 tokens and ones that do not; one part; single tokens. */
static void test_values(void **state)
{
    (void)state;
    mt_trainer_config c = config_of(MT_F64, 0);
    struct history whole = train(&c);
    static const int64_t chunks[] = { 1, 7, 12, 24, 1000 };
    for (size_t i = 0; i < sizeof chunks / sizeof *chunks; i++)
        for (int tied = 0; tied < (i == 1 ? 2 : 1); tied++) {
            c.loss_chunk = tied ? 0 : chunks[i], c.model.tie_word_embeddings = tied;
            if (tied) whole = train(&c);
            c.loss_chunk = chunks[i];
            struct history parts = train(&c);
            assert_close(&parts, &whole, 1e-12);
            if (tied) c.model.tie_word_embeddings = false, c.loss_chunk = 0, whole = train(&c);
        }
}

/* A quantizer that rounds at random draws for each token by its place among all. */
static void test_draws(void **state)
{
    (void)state;
    mt_trainer_config c = config_of(MT_F64, 0);
    snprintf(c.recipe, sizeof c.recipe, "fprop=mxfp8/mxfp8:sr dgrad=mxfp8/mxfp8:sr wgrad=f64");
    struct history whole = train(&c);
    static const int64_t chunks[] = { 1, 7, 12 };
    for (size_t i = 0; i < sizeof chunks / sizeof *chunks; i++) {
        c.loss_chunk = chunks[i];
        struct history parts = train(&c);
        assert_close(&parts, &whole, 1e-12);
    }
}

/* Two matrices of [24, 301] and no more than two of [3, 301]. */
static void test_memory(void **state)
{
    (void)state;
    mt_trainer_config c = config_of(MT_F32, 0);
    int64_t whole = train(&c).peak;
    c.loss_chunk = 3;
    int64_t parts = train(&c).peak, saved = 2 * (24 - 3) * VOCAB * (int64_t)sizeof(float);
    if (parts > whole - saved / 2)
        fail_msg("%lld bytes, whole %lld, of whose logits %lld should go", (long long)parts,
                 (long long)whole, (long long)saved);
}

static void test_neutral(void **state)
{
    (void)state;
    static const char *const recipes[] = { "none", "fp8_delayed", "mxfp8", "nvfp4" };
    for (int r = 0; r < 4; r++) {
        struct history first = { .peak = 0 };
        for (int bits = 0; bits < 16; bits++) {
            mt_trainer_config c = config_of(r ? MT_BF16 : MT_F32, 7);
            snprintf(c.recipe, sizeof c.recipe, "%s", recipes[r]);
            c.defer_wgrad = bits & 1, c.offload = bits & 2, c.eager = bits & 8;
            c.recompute = bits & 4 ? MT_RECOMPUTE_BLOCK : MT_RECOMPUTE_NONE;
            struct history h = train(&c);
            h.peak = 0;
            if (!bits) first = h;
            if (memcmp(&h, &first, sizeof h) != 0)
                fail_msg("%s, options %d: other losses", recipes[r], bits);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_values), cmocka_unit_test(test_draws),
                                        cmocka_unit_test(test_memory),
                                        cmocka_unit_test(test_neutral) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
