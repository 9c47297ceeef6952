/* Every key of config.json: absent, in both spellings, refused, written and read again. */
#include "tests/train/hf.h"

/* What transformers assumes when keys are absent or null. */
static void test_absent_keys(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        double theta, eps, aux;
        bool norm;
        int64_t positions;
    } cases[] = {
        { QWEN(""), 1e4, 1e-6, 0.001, false, 32768 },
        { OLMOE(""), 1e4, 1e-5, 0.01, false, 4096 },
        { MIXTRAL(""), 1e6, 1e-5, 0.001, true, 131072 },
        { MIXTRAL(",\"head_dim\":null,\"num_key_value_heads\":null,\"sliding_window\":null,"
                  "\"rope_scaling\":null,\"rope_parameters\":null,\"attention_dropout\":0"),
          1e6, 1e-5, 0.001, true, 131072 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mt_model_config c;
        assert_ok(parse(&c, cases[i].text));
        assert_true(c.rope_theta == cases[i].theta && c.rms_norm_eps == cases[i].eps);
        assert_true(c.router_aux_loss_coef == cases[i].aux);
        assert_int_equal(c.norm_topk_prob, cases[i].norm);
        assert_int_equal(c.max_position_embeddings, cases[i].positions);
        assert_int_equal(c.num_key_value_heads, 4);
        assert_int_equal(c.head_dim, 8);
        assert_int_equal(c.num_experts, 6);
        assert_int_equal(c.moe_intermediate_size, 24);
        assert_int_equal(c.aux_loss, MT_AUX_HF);
        assert_false(c.tie_word_embeddings);
    }
}

static void test_both_spellings(void **state)
{
    (void)state;
    static const char *const texts[] = {
        QWEN(",\"rope_theta\":5e5,\"head_dim\":16"),
        QWEN(",\"rope_theta\":5e5,\"head_dim\":16,\"sliding_window\":4096"),
        QWEN(",\"rope_theta\":500000,\"num_local_experts\":6,\"head_dim\":16.0"),
        QWEN(",\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":500000.0},\"head_"
             "dim\":16"),
        QWEN(",\"rope_scaling\":{\"type\":\"default\"},\"rope_theta\":5e5,\"head_dim\":16"),
        BASE("qwen3_moe", "num_local_experts", "moe_intermediate_size",
             ",\"rope_theta\":5e5,\"head_dim\":16,\"sliding_window\":4096,\"use_sliding_window\":"
             "false,"
             "\"unknown\":{\"to\":\"us\"},\"layer_types\":[\"full_attention\",\"full_attention\"]"),
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        mt_model_config c;
        assert_ok(parse(&c, texts[i]));
        assert_true(c.rope_theta == 5e5);
        assert_int_equal(c.num_experts, 6);
        assert_int_equal(c.head_dim, 16);
    }
    mt_model_config c;
    assert_ok(parse(&c, QWEN(",\"intermediate_size\":48,\"decoder_sparse_step\":2,"
                             "\"mlp_only_layers\":[1],\"norm_topk_prob\":true")));
    assert_false(mt_model_layer_is_moe(&c, 0));
    assert_false(mt_model_layer_is_moe(&c, 1));
    assert_int_equal(c.intermediate_size, 48);
    assert_true(c.norm_topk_prob);
}

static void test_refusals(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        mt_status code;
        const char *words;
    } bad[] = {
        { "", MT_ECONFIG, "not JSON" },
        { "[]", MT_ECONFIG, "not a JSON object" },
        { "{}", MT_ECONFIG, "no model_type" },
        { "{\"model_type\":7}", MT_ECONFIG, "model_type is not a string" },
        { "{\"model_type\":\"llama\"}", MT_ECONFIG, "'llama'" },
        { "{\"model_type\":\"olmoe\"}", MT_ECONFIG, "no key vocab_size" },
        { QWEN(",\"vocab_size\":98"), MT_ECONFIG, "not JSON" },
        { QWEN(",\"num_local_experts\":7"), MT_ECONFIG,
          "num_experts is 6 but num_local_experts 7" },
        { BASE("olmoe", "experts", "intermediate_size", ""), MT_ECONFIG, "neither num_experts" },
        { BASE("olmoe", "num_experts", "moe_intermediate_size", ""), MT_ECONFIG,
          "no key intermediate_size" },
        { QWEN(",\"head_dim\":\"16\""), MT_ECONFIG, "head_dim is \"16\", must be an integer" },
        { QWEN(",\"head_dim\":16.5"), MT_ECONFIG, "head_dim is 16.5" },
        { QWEN(",\"head_dim\":1e300"), MT_ECONFIG, "head_dim" },
        { QWEN(",\"head_dim\":-16"), MT_ECONFIG, "head_dim" },
        { QWEN(",\"head_dim\":15"), MT_ECONFIG, "head_dim" },
        { QWEN(",\"num_key_value_heads\":3"), MT_ECONFIG, "num_key_value_heads" },
        { QWEN(",\"norm_topk_prob\":1"), MT_ECONFIG, "norm_topk_prob is 1" },
        { QWEN(",\"rms_norm_eps\":\"1e-6\""), MT_ECONFIG, "rms_norm_eps" },
        { QWEN(",\"attention_bias\":true"), MT_EUNSUPPORTED, "attention_bias is true" },
        { QWEN(",\"use_sliding_window\":true"), MT_EUNSUPPORTED, "use_sliding_window" },
        { MIXTRAL(",\"sliding_window\":4096"), MT_EUNSUPPORTED, "sliding_window is 4096" },
        { MIXTRAL(",\"sliding_window\":4096,\"use_sliding_window\":false"), MT_EUNSUPPORTED,
          "sliding_window is 4096" },
        { OLMOE(",\"clip_qkv\":8.0"), MT_EUNSUPPORTED, "clip_qkv is 8.0" },
        { MIXTRAL(",\"router_jitter_noise\":0.1"), MT_EUNSUPPORTED, "router_jitter_noise" },
        { OLMOE(",\"attention_dropout\":0.1"), MT_EUNSUPPORTED, "attention_dropout" },
        { QWEN(",\"quantization_config\":{\"bits\":4}"), MT_EUNSUPPORTED, "quantization_config" },
        { QWEN(",\"partial_rotary_factor\":0.5"), MT_EUNSUPPORTED, "partial_rotary_factor" },
        { QWEN(",\"hidden_act\":\"gelu\""), MT_ECONFIG, "hidden_act is \"gelu\"" },
        { QWEN(",\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":4}"), MT_EUNSUPPORTED,
          "yarn" },
        { QWEN(",\"rope_scaling\":{\"type\":\"linear\"}"), MT_EUNSUPPORTED, "linear" },
        { QWEN(",\"rope_parameters\":{\"rope_type\":\"llama3\"}"), MT_EUNSUPPORTED, "llama3" },
        { QWEN(",\"rope_parameters\":{\"partial_rotary_factor\":0.5}"), MT_ECONFIG,
          "partial_rotary_factor" },
        { QWEN(",\"rope_theta\":1,\"rope_parameters\":{\"rope_theta\":2}"), MT_ECONFIG,
          "the same as rope_theta" },
        { QWEN(",\"rope_theta\":\"big\""), MT_ECONFIG, "rope_theta is \"big\"" },
        { QWEN(",\"rope_parameters\":7"), MT_ECONFIG, "rope_parameters is 7" },
        { QWEN(",\"rope_parameters\":{\"a_type\":{}}"), MT_ECONFIG, "a_type is {}" },
        { QWEN(",\"n_group\":8"), MT_EUNSUPPORTED, "n_group is 8" },
        { QWEN(",\"scoring_func\":\"sigmoid\""), MT_ECONFIG, "scoring_func is \"sigmoid\"" },
        { QWEN(",\"layer_types\":[\"sliding_attention\"]"), MT_ECONFIG, "layer_types" },
        { QWEN(",\"layer_types\":\"sliding_attention\""), MT_ECONFIG, "must be a list" },
        { QWEN(",\"mlp_only_layers\":[3],\"intermediate_size\":8"), MT_ECONFIG, "mlp_only_layers" },
        { QWEN(",\"mlp_only_layers\":\"all\""), MT_ECONFIG, "mlp_only_layers" },
        { QWEN(",\"mlp_only_layers\":[null]"), MT_ECONFIG, "mlp_only_layers is null" },
        { MIXTRAL(",\"norm_topk_prob\":false"), MT_ECONFIG, "norm_topk_prob" },
        { QWEN(",\"num_experts_per_tok\":7"), MT_ECONFIG, "not JSON" },
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        mt_model_config c;
        assert_fails(parse(&c, bad[i].text), bad[i].code, bad[i].words);
    }
}

/* Written and read again, everything is the same to the bit; in our own form with our keys too. */
static void test_config_round_trip(void **state)
{
    (void)state;
    static const char *const texts[] = {
        QWEN(",\"intermediate_size\":48,\"mlp_only_layers\":[1],\"norm_topk_prob\":true,"
             "\"rope_theta\":123456.789,\"rms_norm_eps\":1.0000000000000002e-06,\"head_dim\":16,"
             "\"num_key_value_heads\":2,\"tie_word_embeddings\":true,\"router_aux_loss_coef\":0.1"),
        OLMOE(""),
        MIXTRAL(",\"num_key_value_heads\":1"),
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        for (int own = 0; own < 2; own++) {
            mt_model_config a, b;
            char *text;
            assert_ok(parse(&a, texts[i]));
            if (own) {
                a.aux_loss = MT_AUX_SWITCH, a.z_loss_coef = 1.0 / 3, a.capacity_factor = 1.25;
                a.router_bias_update_rate = 1e-3, a.init_std = 0.02, a.embed_init_std = 0.1;
            }
            assert_ok(mt_hf_config_format(&text, &a, MT_BF16, NULL, own));
            assert_ok(mt_hf_config_parse(&b, text, strlen(text), "again", own));
            expect_same(&a, &b);
            assert_true(a.rope_theta == b.rope_theta && a.rms_norm_eps == b.rms_norm_eps);
            assert_true(a.z_loss_coef == b.z_loss_coef && a.init_std == b.init_std);
            assert_int_equal(a.aux_loss, b.aux_loss);
            assert_non_null(strstr(text, "\"num_experts\": 6"));
            assert_non_null(strstr(text, "\"num_local_experts\": 6"));
            assert_non_null(strstr(text, "\"rope_type\": \"default\""));
            assert_non_null(strstr(text, "\"dtype\": \"bfloat16\""));
            assert_non_null(strstr(text, "\"torch_dtype\": \"bfloat16\""));
            assert_int_equal(strstr(text, "aux_loss\"") != NULL, own);
            free(text);
        }
    mt_model_config c;
    char *text;
    assert_ok(parse(&c, texts[1]));
    assert_ok(
        mt_hf_config_format(&text, &c, MT_F32, "{\"eos_token_id\":50279,\"vocab_size\":1}", false));
    assert_non_null(strstr(text, "\"eos_token_id\": 50279"));
    assert_non_null(strstr(text, "\"vocab_size\": 97"));
    assert_null(strstr(text, "z_loss_coef"));
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_absent_keys),
        cmocka_unit_test(test_both_spellings),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_config_round_trip),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
