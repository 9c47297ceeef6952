/* Storage forms of optimizer state in whole runs: split masters change no bit but those of exact
 * ties, where their bf16 half is the parameter; every form resumes to the bit, checkpoints hold
 * plain f32 masters, another form is refused, the plan counts it. */
#include "tests/train/files.h"

#include <math.h>

#include "train/checkpoint.h"
#include "train/plan.h"

enum { BATCH = 2, SEQUENCE = 8, VOCAB = 50, WIDTH = 16 };

static mt_config config_of(mt_dtype dtype, mt_moments moments, bool sr, mt_master master)
{
    mt_config config;
    assert_ok(mt_config_defaults(&config));
    mt_trainer_config *c = &config.trainer;
    c->dtype = dtype, c->seed = 42;
    c->batch_size = BATCH, c->micro_batch_size = 1, c->sequence_length = SEQUENCE, c->steps = 100;
    const mt_architecture *architecture;
    assert_ok(mt_architecture_find(&architecture, "qwen3_moe"));
    mt_model_config_defaults(&c->model, architecture);
    c->model.vocab_size = VOCAB, c->model.hidden_size = WIDTH, c->model.num_hidden_layers = 2;
    c->model.num_attention_heads = 2, c->model.num_key_value_heads = 1, c->model.head_dim = 8;
    c->model.num_experts = 4, c->model.num_experts_per_tok = 2;
    c->model.moe_intermediate_size = 12;
    c->optim.moments = moments, c->optim.moments_sr = sr, c->optim.master = master;
    return config;
}

static mt_trainer *trainer_of(const mt_config *config)
{
    mt_trainer *trainer;
    assert_ok(mt_trainer_create(&trainer, test_device(), &config->trainer));
    return trainer;
}

static double step(mt_trainer *trainer)
{
    int32_t tokens[BATCH * SEQUENCE], targets[BATCH * SEQUENCE];
    uint64_t s = (uint64_t)mt_trainer_steps(trainer);
    mt_step_result result;
    for (uint64_t i = 0; i < BATCH * SEQUENCE; i++) {
        tokens[i] = (int32_t)mt_rng_below(1, 1, s * 1000 + i, VOCAB);
        targets[i] = (int32_t)mt_rng_below(1, 2, s * 1000 + i, VOCAB);
    }
    assert_ok(mt_trainer_step(trainer, tokens, targets, &result));
    return result.loss;
}

/* Masters as reals, whatever they are stored as. */
static float *masters_of(const mt_trainer *trainer)
{
    mt_param_store *store = mt_model_params(mt_trainer_model(trainer));
    float *all = calloc((size_t)mt_param_store_elements(store), sizeof *all);
    assert_non_null(all);
    for (int64_t i = 0; i < mt_param_store_count(store); i++) {
        const mt_param *p = mt_param_store_get(store, i);
        assert_ok(mt_param_read_master(store, p, 0, mt_param_count(p), all + p->offset));
    }
    return all;
}

static void expect_same(const mt_trainer *a, const mt_trainer *b)
{
    const mt_optimizer *p = mt_trainer_optimizer(a), *q = mt_trainer_optimizer(b);
    size_t elements = (size_t)mt_param_store_elements(mt_model_params(mt_trainer_model(a)));
    size_t moment = elements * mt_moments_size(mt_optimizer_moments(p), MT_F32);
    float *x = masters_of(a), *y = masters_of(b);
    assert_memory_equal(x, y, elements * sizeof *x);
    free(x), free(y);
    assert_memory_equal(mt_optimizer_m(p), mt_optimizer_m(q), moment);
    assert_memory_equal(mt_optimizer_v(p), mt_optimizer_v(q), moment);
    assert_int_equal(mt_optimizer_m_scales(p) != NULL, mt_optimizer_moments(p) == MT_MOMENTS_FP8);
    if (!mt_optimizer_m_scales(p)) return;
    assert_memory_equal(mt_optimizer_m_scales(p), mt_optimizer_m_scales(q), elements / 128 * 4);
    assert_memory_equal(mt_optimizer_v_scales(p), mt_optimizer_v_scales(q), elements / 128 * 4);
}

/* Which params are split: GEMM weights that nothing else reads. */
static void test_split_masters_change_nothing(void **state)
{
    (void)state;
    static const struct {
        mt_dtype dtype;
        const char *recipe;
        bool quantized_init, tied;
    } cases[] = { { MT_F32, "none", false, false },
                  { MT_BF16, "none", false, true },
                  { MT_BF16, "mxfp8", false, false },
                  { MT_F32, "fp8_block", true, false } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mt_trainer *t[2];
        for (int k = 0; k < 2; k++) {
            mt_config c = config_of(cases[i].dtype, MT_MOMENTS_REAL, false, (mt_master)k);
            snprintf(c.trainer.recipe, sizeof c.trainer.recipe, "%s", cases[i].recipe);
            c.trainer.quantized_init = cases[i].quantized_init;
            c.trainer.model.tie_word_embeddings = cases[i].tied;
            t[k] = trainer_of(&c);
        }
        expect_same(t[0], t[1]);
        for (int s = 0; s < 4; s++) {
            double plain = step(t[0]), split = step(t[1]);
            assert_true(plain == split);
        }
        expect_same(t[0], t[1]);
        mt_param_store *store = mt_model_params(mt_trainer_model(t[1]));
        int64_t split = 0;
        for (int64_t j = 0; j < mt_param_store_count(store); j++) {
            const mt_param *p = mt_param_store_get(store, j);
            bool embedding = strstr(p->name, "embed") != NULL;
            assert_int_equal(p->high != NULL, p->packed && !embedding);
            assert_int_equal(p->master == NULL, p->high != NULL);
            split += p->high != NULL;
        }
        assert_int_equal(split, 2 * 4 + !cases[i].tied); /* qkv, o, gate_up, down; the head */
        mt_trainer_destroy(&t[0]), mt_trainer_destroy(&t[1]);
    }
}

/* Every weight becomes an exact tie between two bf16; `halves`: becomes the split master's of them.
 */
static void put_ties(const mt_trainer *trainer, bool halves)
{
    mt_param_store *store = mt_model_params(mt_trainer_model(trainer));
    mt_stream stream = { test_device(), NULL };
    int64_t even = 0;
    for (int64_t i = 0; i < mt_param_store_count(store); i++) {
        mt_param *p = mt_param_store_get(store, i);
        int64_t n = mt_param_count(p);
        if (!p->packed || p->direct) continue;
        float *x = malloc((size_t)n * sizeof *x);
        assert_non_null(x);
        assert_ok(mt_param_read_master(store, p, 0, n, x));
        for (int64_t j = 0; j < n; j++) {
            uint32_t tie = (mt_f32_bits(x[j]) & 0xffff0000u) | 0x8000u, half = mt_master_high(tie);
            even += half != mt_f32_to_bf16(mt_f32_from_bits(tie));
            x[j] = mt_f32_from_bits(halves ? half << 16 : tie);
        }
        assert_ok(mt_param_write_master(store, p, 0, n, x));
        free(x);
    }
    assert_true(halves || even > 1000); /* where a cast would take the other bf16 */
    assert_ok(mt_model_refresh(mt_trainer_model(trainer), &stream));
}

/* Native directions hold the same bits, in the master itself where the device can read it there. */
static void expect_same_weights(const mt_trainer *split, const mt_trainer *plain, bool offload)
{
    mt_device *device = test_device();
    mt_param_store *stores[2] = { mt_model_params(mt_trainer_model(split)),
                                  mt_model_params(mt_trainer_model(plain)) };
    const struct mt_kernels *kernels;
    int64_t compared = 0;
    assert_ok(mt_device_kernels(device, MT_BF16, &kernels));
    for (int64_t i = 0; i < mt_param_store_count(stores[0]); i++)
        for (int d = 0; d < MT_DIR_COUNT; d++) {
            const mt_param *p = mt_param_store_get(stores[0], i),
                           *q = mt_param_store_get(stores[1], i);
            const mt_direction *a = &p->weight.dir[d], *b = &q->weight.dir[d];
            const mt_group *g = &p->group;
            if (!p->high || a->layout != MT_LAYOUT_PACKED) continue;
            size_t bytes = kernels->packed_bytes(MT_BF16, (mt_dir)d, g->members, g->m, g->k);
            char *x = malloc(2 * bytes);
            assert_non_null(x);
            assert_ok(mt_device_copy(device, x, a->codes, bytes));
            assert_ok(mt_device_copy(device, x + bytes, b->codes, bytes));
            assert_memory_equal(x, x + bytes, bytes);
            free(x);
            assert_int_equal(a->codes == (void *)p->high, kernels->packed_shared && !offload);
            compared++;
        }
    assert_true(compared >= 2 * 4 + 1);
}

/* Layers with activations of bf16 multiply the bf16 half of a split master. */
static void test_the_half_is_the_parameter(void **state)
{
    (void)state;
    static const char *const recipes[] = { "none", "fprop=bf16/bf16 dgrad=mxfp8/bf16 wgrad=bf16" };
    for (int r = 0; r < 2; r++) {
        mt_trainer *t[3];
        for (int k = 0; k < 3; k++) {
            mt_config c =
                config_of(MT_BF16, MT_MOMENTS_REAL, false, k ? MT_MASTER_SPLIT : MT_MASTER_REAL);
            snprintf(c.trainer.recipe, sizeof c.trainer.recipe, "%s", recipes[r]);
            c.trainer.optim.offload = k == 2;
            t[k] = trainer_of(&c);
            put_ties(t[k], k == 0);
        }
        for (int k = 1; k < 3; k++) expect_same_weights(t[k], t[0], k == 2);
        double plain = step(t[0]);
        for (int k = 1; k < 3; k++) {
            double split = step(t[k]);
            assert_true(split == plain);
        }
        expect_same(t[1], t[2]);
        for (int k = 0; k < 3; k++) mt_trainer_destroy(&t[k]);
    }
}

static const mt_checkpoint_info info = { .corpus = "text 1" };

/* Compute copies of f32 masters are their casts, whoever wrote them; returns how many the optimizer
 * writes. */
static int64_t expect_casts(const mt_trainer *trainer)
{
    mt_device *device = test_device();
    mt_stream stream = { device, NULL };
    mt_param_store *store = mt_model_params(mt_trainer_model(trainer));
    const struct mt_kernels *kernels;
    int64_t written = 0;
    assert_ok(mt_device_kernels(device, MT_BF16, &kernels));
    for (int64_t i = 0; i < mt_param_store_count(store); i++)
        for (int d = 0; d < MT_DIR_COUNT; d++) {
            const mt_param *p = mt_param_store_get(store, i);
            const mt_group *g = &p->group;
            mt_qtensor made = mt_qtensor_select(&p->weight, (mt_dir)d);
            if (!p->packed || made.dir[d].layout != MT_LAYOUT_PACKED) continue;
            size_t bytes = kernels->packed_bytes(MT_BF16, (mt_dir)d, g->members, g->m, g->k);
            char *x = malloc(bytes), *want = test_alloc((int64_t)bytes, MT_U8);
            assert_non_null(x);
            assert_ok(mt_device_copy(device, x, made.dir[d].codes, bytes));
            made.dir[d].codes = want;
            assert_ok(mt_pack_weight(&stream, &(struct mt_pack_weight_args){ .dtype = MT_BF16,
                                                                             .master = p->master,
                                                                             .out = &made }));
            assert_ok(mt_device_synchronize(device));
            assert_memory_equal(x, want, bytes);
            assert_false(p->cast_written);
            assert_int_equal(p->cast != NULL, kernels->packed_shared);
            free(x), test_free(want);
            written += p->cast != NULL;
        }
    return written;
}

/* In every step, applied or skipped, before and after a recipe changes and a checkpoint is loaded;
 * of tied embeddings, offloaded masters and weights that are quantized in one direction. */
static void test_compute_copies_follow(void **state)
{
    (void)state;
    static const struct {
        const char *recipe;
        bool tied, offload;
    } cases[] = { { "none", false, false },
                  { "none", true, true },
                  { "fprop=bf16/bf16 dgrad=mxfp8/bf16 wgrad=bf16; steps=3..4 mxfp8", true, false },
                  { "mxfp8; layers=*down* steps=2.. fprop=mxfp8/bf16 dgrad=bf16/bf16 wgrad=bf16",
                    false, false } };
    const float good = 0.5f, bad = INFINITY;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mt_config c = config_of(MT_BF16, MT_MOMENTS_REAL, false, MT_MASTER_REAL);
        snprintf(c.trainer.recipe, sizeof c.trainer.recipe, "%s", cases[i].recipe);
        c.trainer.model.tie_word_embeddings = cases[i].tied;
        c.trainer.optim.offload = cases[i].offload;
        char path[MT_CHECKPOINT_PATH];
        mt_trainer *t = trainer_of(&c), *loaded = trainer_of(&c);
        mt_param_store *store = mt_model_params(mt_trainer_model(t));
        mt_param *norm = mt_param_store_find(store, "model.norm");
        assert_non_null(norm);
        for (int s = 0; s < 7; s++) {
            assert_ok(mt_param_write_master(store, norm, 0, 1, s == 5 ? &bad : &good));
            if (norm->master != norm->own_master)
                assert_ok(mt_device_copy(test_device(), norm->master, s == 5 ? &bad : &good, 4));
            step(t);
            expect_casts(t);
            int64_t skipped = 0;
            assert_ok(mt_device_copy(test_device(), &skipped,
                                     &mt_optimizer_state(mt_trainer_optimizer(t))->skip,
                                     sizeof skipped));
            assert_int_equal(skipped, s == 5);
        }
        assert_ok(mt_checkpoint_save(in_dir("run"), t, &info, path));
        assert_ok(mt_checkpoint_load(loaded, path, "text 1", false));
        expect_casts(loaded);
        double want = step(t), got = step(loaded);
        assert_true(want == got);
        assert_int_equal(expect_casts(loaded), expect_casts(t));
        mt_trainer_destroy(&t), mt_trainer_destroy(&loaded);
        assert_ok(mt_dir_remove(in_dir("run")));
    }
}

static const struct form {
    mt_moments moments;
    bool sr;
    mt_master master;
} forms[] = {
    { MT_MOMENTS_REAL, false, MT_MASTER_SPLIT }, { MT_MOMENTS_BF16, false, MT_MASTER_REAL },
    { MT_MOMENTS_BF16, true, MT_MASTER_SPLIT },  { MT_MOMENTS_FP8, false, MT_MASTER_REAL },
    { MT_MOMENTS_FP8, false, MT_MASTER_SPLIT },
};
enum { FORMS = sizeof forms / sizeof *forms };

static void test_resume(void **state)
{
    (void)state;
    for (int d = 0; d < 3; d++)
        for (int f = 0; f < FORMS; f++) {
            mt_config c =
                config_of(d ? MT_BF16 : MT_F32, forms[f].moments, forms[f].sr, forms[f].master);
            if (d == 2) c.trainer.grad_dtype = MT_BF16;
            char path[MT_CHECKPOINT_PATH];
            mt_trainer *straight = trainer_of(&c), *resumed = trainer_of(&c);
            for (int i = 0; i < 3; i++) step(straight);
            assert_ok(mt_checkpoint_save(in_dir("run"), straight, &info, path));
            assert_ok(mt_checkpoint_load(resumed, path, "text 1", false));
            expect_same(straight, resumed);
            for (int i = 0; i < 4; i++) {
                double want = step(straight), got = step(resumed);
                assert_true(want == got);
            }
            expect_same(straight, resumed);
            mt_trainer_destroy(&straight);
            mt_trainer_destroy(&resumed);
            assert_ok(mt_dir_remove(in_dir("run")));
        }
}

/* Masters are f32 in the file, part by part; a run with whole masters reads them as its own. */
static void test_file(void **state)
{
    (void)state;
    char path[MT_CHECKPOINT_PATH];
    mt_config c = config_of(MT_F32, MT_MOMENTS_FP8, false, MT_MASTER_SPLIT);
    mt_trainer *trainer = trainer_of(&c);
    step(trainer);
    assert_ok(mt_checkpoint_save(in_dir("run"), trainer, &info, path));
    mt_checkpoint *file;
    mt_tensor t;
    static const char name[] = "model.layers.1.mlp.experts.3.up_proj.weight";
    float up[12 * WIDTH], *masters = masters_of(trainer);
    assert_ok(mt_checkpoint_open(&file, path));
    assert_ok(mt_checkpoint_tensor(file, "/model", name, &t));
    assert_true(t.dtype == MT_F32 && t.shape[0] == 12 && t.shape[1] == WIDTH);
    t.data = up;
    assert_ok(mt_checkpoint_read(file, "/model", name, &t));
    const mt_param *p = mt_param_store_find(mt_model_params(mt_trainer_model(trainer)),
                                            "model.layers.1.mlp.experts.gate_up");
    assert_non_null(p);
    assert_memory_equal(up, masters + p->offset + (3 * 24 + 12) * WIDTH, sizeof up);
    assert_ok(mt_checkpoint_tensor(file, "/optim/m", name, &t));
    assert_int_equal(t.dtype, MT_U8);
    assert_ok(mt_checkpoint_tensor(file, "/optim/v_scales", p->name, &t));
    assert_true(t.dtype == MT_F32 && t.shape[0] == 4 * 24 * WIDTH / 128);
    mt_checkpoint_close(&file);
    mt_config whole = config_of(MT_F32, MT_MOMENTS_FP8, false, MT_MASTER_REAL);
    mt_trainer *other = trainer_of(&whole);
    assert_ok(mt_checkpoint_load_model(mt_trainer_model(other), path));
    float *read = masters_of(other);
    assert_memory_equal(read, masters,
                        (size_t)mt_param_store_elements(mt_model_params(mt_trainer_model(other))) *
                            sizeof *read);
    free(read), free(masters);
    mt_trainer_destroy(&other);
    mt_trainer_destroy(&trainer);
    assert_ok(mt_dir_remove(in_dir("run")));
}

static void test_another_form_is_refused(void **state)
{
    (void)state;
    static const char *const names[] = { "f32", "bf16", "fp8" };
    for (int from = 0; from < MT_MOMENTS_COUNT; from++) {
        char path[MT_CHECKPOINT_PATH], words[64];
        mt_config c = config_of(MT_F32, (mt_moments)from, false, MT_MASTER_REAL);
        mt_trainer *trainer = trainer_of(&c);
        step(trainer);
        assert_ok(mt_checkpoint_save(in_dir("run"), trainer, &info, path));
        for (int to = 0; to < MT_MOMENTS_COUNT; to++) {
            mt_config other = config_of(MT_F32, (mt_moments)to, false, MT_MASTER_REAL);
            mt_trainer *t = trainer_of(&other);
            float *before = masters_of(t);
            snprintf(words, sizeof words, "its moments in %s, this run in %s", names[from],
                     names[to]);
            if (from == to)
                assert_ok(mt_checkpoint_load(t, path, NULL, true));
            else
                assert_fails(mt_checkpoint_load(t, path, NULL, true), MT_ECONFIG, words);
            float *after = masters_of(t);
            assert_int_equal(memcmp(before, after, 1000) == 0, from != to);
            free(before), free(after);
            mt_trainer_destroy(&t);
        }
        mt_trainer_destroy(&trainer);
        assert_ok(mt_dir_remove(in_dir("run")));
    }
    mt_trainer *t;
    mt_config c = config_of(MT_F64, MT_MOMENTS_FP8, false, MT_MASTER_REAL);
    assert_fails(mt_trainer_create(&t, test_device(), &c.trainer), MT_ECONFIG, "optim.moments");
    c = config_of(MT_F64, MT_MOMENTS_REAL, false, MT_MASTER_SPLIT);
    assert_fails(mt_trainer_create(&t, test_device(), &c.trainer), MT_ECONFIG, "optim.master");
    c = config_of(MT_F32, MT_MOMENTS_FP8, true, MT_MASTER_REAL);
    assert_fails(mt_trainer_create(&t, test_device(), &c.trainer), MT_ECONFIG, "moments_sr");
    for (int i = 0; i < mt_config_key_count; i++) {
        const char *path = mt_config_keys[i].path;
        if (strstr(path, "optim.m") == path && strcmp(path, "optim.min_lr") != 0)
            assert_true(mt_config_keys[i].fixed); /* --resume refuses another value */
    }
}

/* Bytes of moments are those of the forms' elements and scales; a split master costs the view. */
static void test_plan(void **state)
{
    (void)state;
    mt_config c = config_of(MT_F32, MT_MOMENTS_REAL, false, MT_MASTER_REAL);
    mt_trainer *trainer = trainer_of(&c);
    mt_param_store *store = mt_model_params(mt_trainer_model(trainer));
    int64_t elements = mt_param_store_elements(store), largest = 0;
    for (int64_t i = 0; i < mt_param_store_count(store); i++) {
        const mt_param *p = mt_param_store_get(store, i);
        if (p->packed && mt_param_count(p) > largest) largest = mt_param_count(p);
    }
    mt_trainer_destroy(&trainer);
    const int64_t moments[] = { 8 * elements, 4 * elements, 2 * elements + 8 * (elements / 128) };
    for (int m = 0; m < MT_MOMENTS_COUNT; m++)
        for (int split = 0; split < MT_MASTER_COUNT; split++) {
            mt_plan plan;
            c = config_of(MT_F32, (mt_moments)m, false, (mt_master)split);
            assert_ok(mt_plan_make(&plan, &c, 0, 1));
            assert_int_equal(plan.peak[MT_MEMORY_MOMENTS], moments[m]);
            assert_int_equal(plan.peak[MT_MEMORY_MASTER], 4 * elements + (split ? 4 * largest : 0));
        }
}

/* Gradients in bf16 take two bytes for each element of the weights that kernels only multiply. */
static void test_gradient_plan(void **state)
{
    (void)state;
    mt_config c = config_of(MT_BF16, MT_MOMENTS_BF16, true, MT_MASTER_SPLIT);
    mt_plan plan[2];
    assert_ok(mt_plan_make(&plan[0], &c, 0, 1));
    c.trainer.grad_dtype = MT_BF16;
    assert_ok(mt_plan_make(&plan[1], &c, 0, 1));
    mt_trainer *trainer = trainer_of(&c);
    mt_param_store *store = mt_model_params(mt_trainer_model(trainer));
    int64_t saved = 0, weights = 0;
    for (int64_t i = 0; i < mt_param_store_count(store); i++) {
        const mt_param *p = mt_param_store_get(store, i);
        bool weight = p->packed && !p->direct;
        assert_int_equal(p->grad_dtype, weight ? MT_BF16 : MT_F32);
        if (weight) saved += 2 * ((mt_param_count(p) + 127) / 128 * 128), weights++;
    }
    assert_int_equal(weights, 2 * 4 + 1); /* qkv, o, gate_up, down; the head */
    assert_int_equal(plan[0].peak[MT_MEMORY_GRAD], 4 * mt_param_store_elements(store));
    assert_int_equal(plan[1].peak[MT_MEMORY_GRAD], plan[0].peak[MT_MEMORY_GRAD] - saved);
    assert_int_equal(test_device()->bytes[MT_MEMORY_GRAD], plan[1].peak[MT_MEMORY_GRAD]);
    mt_trainer_destroy(&trainer);
}

/* A weight that is not finite is found in a split master, too. */
static void test_nonfinite(void **state)
{
    (void)state;
    mt_config c = config_of(MT_F32, MT_MOMENTS_REAL, false, MT_MASTER_SPLIT);
    mt_trainer *trainer = trainer_of(&c);
    mt_param_store *store = mt_model_params(mt_trainer_model(trainer));
    mt_param *p = mt_param_store_find(store, "model.layers.1.mlp.experts.down");
    const float bad = INFINITY;
    int32_t tokens[BATCH * SEQUENCE] = { 0 };
    char name[128];
    assert_non_null(p);
    assert_ok(mt_param_write_master(store, p, 100, 1, &bad));
    assert_ok(mt_trainer_find_nonfinite(trainer, tokens, tokens, name));
    assert_string_equal(name, p->name);
    mt_trainer_destroy(&trainer);
}

/* Masters and moments in the host's memory: the same bits, steps recorded or not; a checkpoint of
 * one is the other's; the device keeps what kernels read of masters as they are, which is planned.
 */
static void test_offload(void **state)
{
    (void)state;
    static const struct {
        mt_dtype dtype;
        int form; /* -1: f32, f32 */
        const char *recipe;
        bool quantized_init, tied;
    } cases[] = { { MT_F32, -1, "none", false, false },     { MT_BF16, 2, "mxfp8", false, true },
                  { MT_BF16, 3, "nvfp4", true, true },      { MT_BF16, 4, "none", false, false },
                  { MT_F32, -1, "fp8_block", true, false }, { MT_F64, -1, "none", false, true } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct form *f = cases[i].form < 0 ? NULL : &forms[cases[i].form];
        mt_config c = config_of(cases[i].dtype, f ? f->moments : MT_MOMENTS_REAL, f ? f->sr : false,
                                f ? f->master : MT_MASTER_REAL);
        char path[MT_CHECKPOINT_PATH];
        mt_trainer *t[3];
        mt_plan plan[2];
        snprintf(c.trainer.recipe, sizeof c.trainer.recipe, "%s", cases[i].recipe);
        c.trainer.quantized_init = cases[i].quantized_init;
        c.trainer.model.tie_word_embeddings = cases[i].tied;
        for (int k = 0; k < 3; k++) {
            c.trainer.optim.offload = k > 0;
            if (k < 2) assert_ok(mt_plan_make(&plan[k], &c, 0, 1));
            t[k] = trainer_of(&c);
        }
        for (int s = 0; s < 4; s++) {
            double here = step(t[0]), there = step(t[1]);
            assert_true(here == there);
        }
        assert_ok(mt_checkpoint_save(in_dir("run"), t[0], &info, path));
        assert_ok(mt_checkpoint_load(t[2], path, "text 1", false));
        double here = step(t[0]), there = step(t[1]), loaded = step(t[2]);
        assert_true(here == there && here == loaded);
        if (cases[i].dtype != MT_F64) expect_same(t[0], t[1]), expect_same(t[0], t[2]);
        for (int k = 0; k < 3; k++) mt_trainer_destroy(&t[k]);
        assert_ok(mt_dir_remove(in_dir("run")));
        assert_int_equal(plan[1].peak[MT_MEMORY_MOMENTS], 0);
        assert_true(plan[1].peak[MT_MEMORY_MASTER] < plan[0].peak[MT_MEMORY_MASTER]);
        assert_true(plan[1].peak[MT_MEMORY_HOST_POOL] >=
                    plan[0].peak[MT_MEMORY_MOMENTS] + plan[0].peak[MT_MEMORY_MASTER] / 2);
        assert_int_equal(plan[1].peak[MT_MEMORY_GRAD], plan[0].peak[MT_MEMORY_GRAD]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_split_masters_change_nothing),
        cmocka_unit_test(test_the_half_is_the_parameter),
        cmocka_unit_test(test_compute_copies_follow),
        cmocka_unit_test(test_resume),
        cmocka_unit_test(test_file),
        cmocka_unit_test(test_another_form_is_refused),
        cmocka_unit_test(test_plan),
        cmocka_unit_test(test_gradient_plan),
        cmocka_unit_test(test_nonfinite),
        cmocka_unit_test(test_offload),
    };
    return cmocka_run_group_tests(tests, files_setup, files_teardown);
}
