/* Whole models: tied embeddings, ignored targets, layer patterns, exported names, refusals. */
#include "tests/layers/model_rig.h"

/* ---- embeddings and loss ------------------------------------------------------------------------
 */

/* The gradient of a tied matrix is the sum of those of two matrices with the same values. Deferral,
 * which queues the head's and must queue the embedding's behind it, changes no bit. */
static void test_tied_embeddings(void **state)
{
    (void)state;
    struct rig tied[2], untied;
    mt_model_config c = config_of("olmoe");
    double want[V * D], most = 0;
    rig_open(&untied, &c, MT_F64, NULL);
    c.tie_word_embeddings = true;
    for (int defer = 0; defer < 2; defer++) {
        rig_open(&tied[defer], &c, MT_F64, &(mt_tape_options){ .defer_wgrad = defer });
        mt_param_store *from = mt_model_params(untied.model),
                       *to = mt_model_params(tied[defer].model);
        assert_int_equal(mt_param_store_count(to), mt_param_store_count(from) - 1);
        memcpy(param(&untied, "lm_head")->master, param(&untied, "model.embed_tokens")->master,
               sizeof want);
        for (int64_t i = 0; i < mt_param_store_count(to); i++) {
            mt_param *p = mt_param_store_get(to, i);
            memcpy(p->master, param(&untied, p->name)->master,
                   (size_t)mt_param_count(p) * sizeof(double));
        }
        rig_step(&tied[defer]);
        rig_pass(&tied[defer], true); /* a second micro-batch: the order of four sums */
    }
    rig_step(&untied);
    rig_pass(&untied, true);
    assert_true(untied.loss == tied[0].loss);
    const double *embed = param(&untied, "model.embed_tokens")->grad,
                 *head = param(&untied, "lm_head")->grad;
    for (int i = 0; i < V * D; i++) {
        want[i] = embed[i] + head[i];
        most = fmax(most, fabs(embed[i]) + fabs(head[i]));
    }
    test_assert_near("tied", param(&tied[0], "model.embed_tokens")->grad, MT_F64, want, V * D,
                     8 * T * 0x1p-53 * most, 0);
    mt_param_store *a = mt_model_params(tied[0].model), *b = mt_model_params(tied[1].model);
    assert_memory_equal(mt_param_store_grad(a), mt_param_store_grad(b),
                        (size_t)mt_param_store_elements(a) * sizeof(double));
    for (int i = 0; i < 2; i++) rig_close(&tied[i]);
    rig_close(&untied);
}

/* The same in f32, where the order shows in more bits, over more micro-batches. */
static void test_tied_embeddings_f32(void **state)
{
    (void)state;
    struct rig r[2];
    mt_model_config c = config_of("qwen3_moe");
    c.tie_word_embeddings = true;
    for (int defer = 0; defer < 2; defer++) {
        rig_open(&r[defer], &c, MT_F32, &(mt_tape_options){ .defer_wgrad = defer });
        assert_ok(mt_model_begin_step(r[defer].model));
        for (int pass = 0; pass < 5; pass++) {
            r[defer].tokens[pass] = pass;
            rig_pass(&r[defer], true);
        }
    }
    mt_param_store *a = mt_model_params(r[0].model), *b = mt_model_params(r[1].model);
    assert_memory_equal(mt_param_store_grad(a), mt_param_store_grad(b),
                        (size_t)mt_param_store_elements(a) * sizeof(float));
    for (int i = 0; i < 2; i++) rig_close(&r[i]);
}

static double plain_loss(const struct rig *r, double scale)
{
    double loss = 0;
    for (int t = 0; t < T; t++) {
        double sum = 0;
        if (r->targets[t] == -100) continue;
        for (int v = 0; v < V; v++) sum += exp(r->logits[t * V + v]);
        loss += log(sum) - r->logits[t * V + r->targets[t]];
    }
    return scale * loss;
}

static void test_loss(void **state)
{
    (void)state;
    const char *types[] = { "qwen3_moe", "olmoe", "mixtral" };
    for (int i = 0; i < 3; i++) {
        struct rig r;
        mt_model_config c = config_of(types[i]);
        rig_open(&r, &c, MT_F64, NULL);
        rig_pass(&r, false);
        assert_true(fabs(r.loss - plain_loss(&r, 0.125)) <= 4 * (V + T) * 0x1p-53 * r.loss);
        double before = r.loss;
        r.tokens[T - 1] =
            (r.tokens[T - 1] + 1) % V; /* causal: no earlier logit of any sequence moves */
        double logits[T * V];
        memcpy(logits, r.logits, sizeof logits);
        rig_pass(&r, false);
        assert_true(before != r.loss);
        /* BLAS alone may sum in another order when an expert has another number of rows */
        bool blas = strcmp(r.stream.device->kernel_set, "portable") == 0;
        for (int j = 0; j < (T - 1) * V; j++)
            assert_true(fabs(logits[j] - r.logits[j]) <= (blas ? 1e-13 : 0));
        for (int t = 0; t < T; t++)
            r.targets[t] = -100; /* nothing to predict: no loss, no gradient */
        c.aux_loss = MT_AUX_NONE;
        rig_step(&r);
        assert_true(r.loss == 0);
        const double *head = param(&r, "lm_head")->grad;
        for (int j = 0; j < V * D; j++) assert_true(head[j] == 0);
        rig_close(&r);
    }
}

/* ---- descriptions -------------------------------------------------------------------------------
 */

static void test_layer_pattern(void **state)
{
    (void)state;
    mt_model_config c = config_of("qwen3_moe");
    c.num_hidden_layers = 6, c.decoder_sparse_step = 2, c.mlp_only_layers[0] = 3,
    c.mlp_only_layer_count = 1;
    static const bool moe[6] = { false, true, false, false, false, true };
    struct rig r;
    for (int l = 0; l < 6; l++) assert_int_equal(mt_model_layer_is_moe(&c, l), moe[l]);
    rig_open(&r, &c, MT_F32, NULL);
    assert_int_equal(mt_model_moe_layers(r.model), 2);
    for (int l = 0; l < 6; l++) {
        char name[64];
        snprintf(name, sizeof name, "model.layers.%d.mlp.%s", l, moe[l] ? "gate" : "gate_up");
        assert_int_equal(param(&r, name)->group.m, moe[l] ? E : 2 * 7);
    }
    rig_step(&r);
    for (int l = 0; l < 2; l++) {
        int64_t sum = 0;
        for (int e = 0; e < E; e++) sum += mt_model_load(r.model, l)[e];
        assert_int_equal(sum, T * K);
    }
    rig_close(&r);
    c.num_experts = c.num_experts_per_tok = 0; /* a dense model */
    rig_open(&r, &c, MT_F32, NULL);
    rig_step(&r);
    assert_true(isfinite(r.loss) && r.aux == 0);
    rig_close(&r);
}

/* Parts tile each param without gap or overlap, and no two have one name. */
static void test_exported_names(void **state)
{
    (void)state;
    static const char *const want[] = { "model.layers.1.mlp.experts.3.up_proj.weight",
                                        "model.layers.0.mlp.experts.0.down_proj.weight",
                                        "model.layers.1.block_sparse_moe.experts.2.w3.weight" };
    for (int a = 0; a < mt_architecture_count; a++) {
        mt_model_config c = config_of(mt_architectures[a].model_type);
        struct rig r;
        const char *names[256];
        int count = 0, found = 0;
        rig_open(&r, &c, MT_F32, NULL);
        mt_param_store *store = mt_model_params(r.model);
        for (int64_t i = 0; i < mt_param_store_count(store); i++) {
            const mt_param *p = mt_param_store_get(store, i);
            int64_t rows = 0;
            for (int64_t j = 0; j < p->part_count; j++) {
                const mt_param_part *part = &p->parts[j];
                rows += part->rows;
                assert_true(part->member < p->group.members &&
                            part->row + part->rows <= p->group.m);
                for (int64_t k = 0; k < j; k++) {
                    const mt_param_part *o = &p->parts[k];
                    assert_true(o->member != part->member || o->row + o->rows <= part->row ||
                                part->row + part->rows <= o->row);
                }
                for (int k = 0; k < count; k++) assert_string_not_equal(names[k], part->name);
                for (int k = 0; k < 3; k++) found |= !strcmp(part->name, want[k]) << k;
                names[count++] = part->name;
            }
            assert_int_equal(rows, p->group.members * p->group.m);
        }
        assert_int_equal(found, strcmp(mt_architectures[a].moe_block, "mlp") ? 4 : 3);
        rig_close(&r);
    }
}

static void test_refusals(void **state)
{
    (void)state;
    mt_model_config c;
    const mt_architecture *none;
    assert_fails(mt_architecture_find(&none, NULL), MT_EINVAL, "no name");
    const struct {
        int64_t *field, value;
        const char *words;
    } rules[] = {
        { &c.vocab_size, 0, "vocab_size is 0" },
        { &c.hidden_size, -8, "hidden_size is -8" },
        { &c.num_hidden_layers, MT_MAX_LAYERS + 1, "num_hidden_layers" },
        { &c.num_key_value_heads, 3, "not divisible by num_key_value_heads 3" },
        { &c.head_dim, 5, "head_dim is 5" },
        { &c.num_experts_per_tok, E + 1, "num_experts_per_tok is 5" },
        { &c.num_experts_per_tok, 0, "num_experts_per_tok is 0" },
        { &c.moe_intermediate_size, 0, "moe_intermediate_size is 0" },
        { &c.decoder_sparse_step, 0, "decoder_sparse_step is 0" },
        { &c.intermediate_size, INT64_C(1) << 62, "must be from 0 to 1048576" },
        { &c.mlp_only_layer_count, 1000, "mlp_only_layers has 1000 layers, must have from 0" },
    };
    struct rig r;
    mt_model *model;
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        c = config_of("qwen3_moe");
        *rules[i].field = rules[i].value;
        assert_fails(mt_model_create(&model, test_device(), &c, MT_F32, S, true, NULL), MT_ECONFIG,
                     rules[i].words);
        assert_null(model);
    }
    c = config_of("qwen3_moe");
    c.head_dim = 0, c.hidden_size = 10; /* 4 heads */
    assert_fails(mt_model_config_check(&c), MT_ECONFIG, "hidden_size 10 is not divisible");
    c = config_of("mixtral");
    c.norm_topk_prob = false;
    assert_fails(mt_model_config_check(&c), MT_ECONFIG, "norm_topk_prob");
    c = config_of("mixtral");
    c.decoder_sparse_step = 2;
    assert_fails(
        mt_model_config_check(&c), MT_ECONFIG,
        "decoder_sparse_step is 2 and mlp_only_layers has 0 layers: every layer of mixtral");
    c = config_of("olmoe");
    c.mlp_only_layers[0] = 0, c.mlp_only_layer_count = 1;
    assert_fails(mt_model_config_check(&c), MT_ECONFIG, "mlp_only_layers has 1 layers");
    c = config_of("qwen3_moe");
    c.mlp_only_layers[0] = 2, c.mlp_only_layer_count = 1;
    assert_fails(mt_model_config_check(&c), MT_ECONFIG, "mlp_only_layers has 2");
    c = config_of("qwen3_moe");
    const double bad[] = { -1, (double)NAN };
    double *rates[] = { &c.router_aux_loss_coef, &c.z_loss_coef,  &c.router_bias_update_rate,
                        &c.capacity_factor,      &c.rms_norm_eps, &c.rope_theta };
    for (int i = 0; i < 6; i++)
        for (int j = 0; j < 2; j++) {
            c = config_of("qwen3_moe");
            *rates[i] = bad[j];
            assert_int_equal(mt_model_config_check(&c), MT_ECONFIG);
        }
    c = config_of("qwen3_moe");
    assert_fails(mt_model_create(&model, test_device(), &c, MT_F16, S, true, NULL), MT_ECONFIG,
                 "f16");
    rig_open(&r, &c, MT_F32, NULL);
    mt_model_batch long_batch = { 1, S + 1, r.tokens, NULL, NULL, 0 },
                   no_targets = { B, S, r.tokens, NULL, NULL, 0 };
    mt_model_output out;
    assert_ok(mt_tape_begin(r.tape, 1, true));
    assert_fails(mt_model_forward(r.model, r.tape, &long_batch, false, &out), MT_EINVAL,
                 "6 tokens");
    mt_tape_abort(r.tape);
    assert_ok(mt_model_refresh(r.model, &r.stream));
    assert_ok(mt_tape_begin(r.tape, 1, true));
    assert_ok(mt_model_forward(r.model, r.tape, &no_targets, false, &out));
    assert_fails(mt_model_seed(r.model, r.tape, &out, 1), MT_EINVAL, "without targets");
    mt_tape_abort(r.tape);
    rig_close(&r);
}

/* ---- passes -------------------------------------------------------------------------------------
 */

static mt_status stop(void *context, const char *name, const mt_tensor *data)
{
    (void)data;
    return strcmp(name, context) ? MT_OK : MT_FAIL(MT_ENUMERIC, "told to stop at %s", name);
}

/* What an aborted pass has made is not released by the next, however early that fails. */
static void test_passes_that_fail(void **state)
{
    (void)state;
    struct rig r;
    mt_model_config c = config_of("olmoe");
    rig_open(&r, &c, MT_F32, NULL);
    assert_ok(mt_model_refresh(r.model, &r.stream));
    mt_model_batch batch = { B, S, r.tokens, r.targets, &r.scale, 0 };
    mt_model_output out;
    assert_ok(mt_tape_begin(r.tape, 1, true));
    mt_tape_set_observer(r.tape, stop, "model.layers.1.mlp");
    assert_fails(mt_model_forward(r.model, r.tape, &batch, false, &out), MT_ENUMERIC, "told to");
    mt_tape_abort(r.tape);
    mt_tape_set_observer(r.tape, NULL, NULL);
    batch.sequence = S + 1;
    assert_ok(mt_tape_begin(r.tape, 1, true));
    assert_fails(mt_model_forward(r.model, r.tape, &batch, false, &out), MT_EINVAL, "6 tokens");
    mt_model_output_release(r.tape, r.model, &out);
    mt_tape_abort(r.tape);
    rig_step(&r);
    rig_close(&r);
}

/* A batch without tokens has a loss of 0 and no gradient, in parts or not. */
static void test_no_tokens(void **state)
{
    (void)state;
    for (int chunk = 0; chunk <= 4; chunk += 4) {
        struct rig r;
        mt_model_config c = config_of("qwen3_moe");
        rig_open(&r, &c, MT_F32, NULL);
        assert_ok(mt_model_refresh(r.model, &r.stream));
        mt_model_batch batch = { 0, S, r.tokens, r.targets, &r.scale, chunk };
        mt_model_output out;
        assert_ok(mt_model_begin_step(r.model));
        assert_ok(mt_tape_begin(r.tape, 1, true));
        assert_ok(mt_model_forward(r.model, r.tape, &batch, false, &out));
        assert_true(mt_load_f64(out.loss->data.data, MT_F32, 0) == 0);
        assert_ok(mt_model_seed(r.model, r.tape, &out, 1));
        mt_model_output_release(r.tape, r.model, &out);
        assert_ok(mt_tape_backward(r.tape));
        assert_ok(mt_tape_end(r.tape));
        mt_param_store *store = mt_model_params(r.model);
        assert_ok(mt_param_store_end_step(store));
        const float *grad = mt_param_store_grad(store);
        for (int64_t i = 0; i < mt_param_store_elements(store); i++) assert_true(grad[i] == 0);
        rig_close(&r);
    }
}

static void test_recipes_refused(void **state)
{
    (void)state;
    mt_model *model;
    mt_recipe_rules *rules;
    mt_model_config c = config_of("olmoe");
    bool changed;
    assert_ok(mt_recipe_rules_create(&rules, "fp8_delayed", MT_F32));
    mt_precision_options options = { .rules = rules };
    static const int64_t bad[] = { 1, MT_HISTORY_MAX + 1, (INT64_C(1) << 62) + 1024 };
    for (int i = 0; i < 3; i++) {
        options.history = bad[i];
        assert_fails(mt_model_create(&model, test_device(), &c, MT_F32, S, true, &options),
                     MT_ECONFIG, "must be from 2 to 65536");
    }
    options.history = 2;
    assert_ok(mt_model_create(&model, test_device(), &c, MT_F32, S, true, &options));
    assert_fails(mt_precision_set_step(mt_model_precision(model), -1, &changed), MT_EINVAL,
                 "step -1, must not be negative");
    mt_model_destroy(&model);
    mt_recipe_rules_destroy(&rules);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tied_embeddings),
        cmocka_unit_test(test_tied_embeddings_f32),
        cmocka_unit_test(test_loss),
        cmocka_unit_test(test_layer_pattern),
        cmocka_unit_test(test_exported_names),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_passes_that_fail),
        cmocka_unit_test(test_no_tokens),
        cmocka_unit_test(test_recipes_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
