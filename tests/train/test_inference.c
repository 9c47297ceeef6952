/* A trainer that only runs forward, as eval and sample use it. */
#include "tests/support/test.h"

#include <stdio.h>

#include "train/trainer.h"

enum { VOCAB = 23, SEQUENCES = 4, LENGTH = 12, TOKENS = SEQUENCES * LENGTH };

static mt_trainer_config config_of(mt_dtype dtype)
{
    mt_trainer_config c = { .dtype = dtype,
                            .batch_size = SEQUENCES,
                            .micro_batch_size = 2,
                            .sequence_length = LENGTH,
                            .steps = 1,
                            .delayed_history = 16,
                            .seed = 5 };
    const mt_architecture *architecture;
    assert_ok(mt_architecture_find(&architecture, "qwen3_moe"));
    mt_model_config_defaults(&c.model, architecture);
    c.model.vocab_size = VOCAB, c.model.hidden_size = 32, c.model.num_hidden_layers = 2;
    c.model.num_attention_heads = 4, c.model.num_key_value_heads = 2, c.model.head_dim = 8;
    c.model.moe_intermediate_size = 16, c.model.num_experts = 5, c.model.num_experts_per_tok = 2;
    mt_optim_config_defaults(&c.optim);
    return c;
}

static void assert_no_step(mt_trainer *t, const int32_t *tokens)
{
    mt_step_result result;
    const char *words = "forward passes only";
    assert_fails(mt_trainer_step(t, tokens, tokens, &result), MT_EINVAL, words);
    assert_fails(mt_trainer_gradients(t, tokens, tokens, &result), MT_EINVAL, words);
    assert_fails(mt_trainer_update(t, 1e-3, &result), MT_EINVAL, words);
}

/* Without gradients and moments: the same logits and losses, and no step. */
static void check_forward_only(mt_trainer_config c)
{
    static double logits[2][TOKENS * VOCAB];
    double sums[2];
    int32_t tokens[TOKENS];
    int64_t all[2] = { 0 };
    for (int i = 0; i < TOKENS; i++) tokens[i] = i * i % VOCAB;
    for (int only = 0; only < 2; only++) {
        mt_trainer *t;
        int64_t count;
        c.forward_only = only;
        assert_ok(mt_trainer_create(&t, test_device(), &c));
        const int64_t *bytes = test_device()->bytes;
        assert_ok(mt_trainer_logits(t, tokens, SEQUENCES, LENGTH, -1, logits[only]));
        for (int row = 0; row < TOKENS; row += 17) { /* nothing else is given */
            double one[VOCAB + 1] = { [VOCAB] = 7 };
            assert_ok(mt_trainer_logits(t, tokens, SEQUENCES, LENGTH, row, one));
            assert_memory_equal(one, logits[only] + row * VOCAB, VOCAB * sizeof *one);
            assert_true(one[VOCAB] == 7);
        }
        assert_fails(mt_trainer_logits(t, tokens, 1, LENGTH, LENGTH, logits[only]), MT_EINVAL,
                     "row 12 of 12");
        assert_ok(mt_trainer_eval(t, tokens, tokens, 2, &sums[only], &count));
        for (int m = 0; m < MT_MEMORY_COUNT; m++) all[only] += bytes[m];
        if (only) {
            assert_int_equal(bytes[MT_MEMORY_GRAD] + bytes[MT_MEMORY_MOMENTS], 0);
            assert_no_step(t, tokens);
        }
        mt_trainer_destroy(&t);
    }
    assert_true(all[1] < all[0]);
    assert_memory_equal(logits[0], logits[1], sizeof logits[0]);
    assert_memory_equal(&sums[0], &sums[1], sizeof sums[0]);
}

static void test_forward_only(void **state)
{
    (void)state;
    check_forward_only(config_of(MT_F64));
    mt_trainer_config c = config_of(MT_BF16);
    snprintf(c.recipe, sizeof c.recipe, "mxfp8");
    check_forward_only(c);
    c = config_of(MT_BF16), c.optim.master = MT_MASTER_SPLIT, c.grad_dtype = MT_BF16;
    check_forward_only(c);
    c = config_of(MT_F32), c.optim.offload = true;
    check_forward_only(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_forward_only) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
