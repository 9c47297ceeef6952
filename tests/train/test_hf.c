/* Hugging Face directories: tensors that come back to the byte, and what is wrong with others. */
#include "tests/train/hf.h"
#include "train/checkpoint.h"
#include "train/safetensors.h"

enum { MAX_TENSORS = 128, MAX_BYTES = 97 * 32 * 8 };

/* What a directory shall hold: names, and contents drawn from the name's number. */
typedef struct contents {
    mt_st_entry entries[MAX_TENSORS];
    char names[MAX_TENSORS][128];
    int count;
} contents;

static void add(contents *c, const char *name, mt_dtype dtype, int ndim, int64_t a, int64_t b,
                int64_t d)
{
    assert_true(c->count < MAX_TENSORS);
    snprintf(c->names[c->count], sizeof c->names[0], "%s", name);
    c->entries[c->count] = (mt_st_entry){ c->names[c->count], dtype, ndim, { a, b, d, 0 } };
    c->count++;
}

static int find(const contents *c, const char *name)
{
    for (int i = 0; i < c->count; i++)
        if (!strcmp(c->names[i], name)) return i;
    fail_msg("no tensor %s", name);
    return -1;
}

/* All parts of the model as transformers saves it; dtypes in turn. */
static void list_model(contents *c, const char *config_text, const mt_dtype *dtypes,
                       int dtype_count)
{
    mt_model_config config;
    mt_device *plan;
    mt_model *model;
    c->count = 0;
    assert_ok(parse(&config, config_text));
    assert_ok(mt_device_open(&plan, "plan", NULL, 1));
    assert_ok(mt_model_create(&model, plan, &config, MT_F32, 1, false, NULL));
    const mt_param_store *store = mt_model_params(model);
    for (int64_t i = 0; i < mt_param_store_count(store); i++) {
        const mt_param *p = mt_param_store_get(store, i);
        for (int64_t j = 0; j < p->part_count; j++) {
            bool vector = p->parts[j].ndim == 1;
            add(c, p->parts[j].name, dtypes[c->count % dtype_count], vector ? 1 : 2,
                vector ? p->group.k : p->parts[j].rows, vector ? 0 : p->group.k, 0);
        }
    }
    mt_model_destroy(&model);
    mt_device_destroy(&plan);
}

static mt_status fill(void *user, int64_t i, void *data, size_t bytes)
{
    (void)user;
    for (size_t b = 0; b < bytes; b++)
        ((unsigned char *)data)[b] = (unsigned char)mt_rng_u32(8, (uint32_t)i, b);
    return MT_OK;
}

static void put_model(const char *dir, const contents *c, const char *config_text,
                      int64_t shard_bytes)
{
    char path[300];
    assert_ok(mt_dir_remove(dir));
    assert_ok(mt_dir_create(dir));
    assert_ok(mt_safetensors_write_dir(dir, c->entries, c->count, shard_bytes, fill, NULL));
    snprintf(path, sizeof path, "%s/config.json", dir);
    put_text(path, config_text);
}

/* Dir holds exactly these tensors with their bytes. */
static void expect_model(const char *dir, const contents *c)
{
    mt_safetensors *set;
    unsigned char want[MAX_BYTES];
    assert_ok(mt_safetensors_open_dir(&set, dir));
    assert_int_equal(mt_safetensors_count(set), c->count);
    for (int i = 0; i < c->count; i++) {
        const mt_st_tensor *t = mt_safetensors_find(set, c->names[i]);
        mt_dtype dtype;
        if (!t) fail_msg("%s is missing", c->names[i]);
        assert_ok(mt_st_tensor_dtype(&dtype, t));
        assert_int_equal(dtype, c->entries[i].dtype);
        assert_int_equal(t->ndim, c->entries[i].ndim);
        for (int d = 0; d < t->ndim; d++) assert_int_equal(t->shape[d], c->entries[i].shape[d]);
        assert_true(t->bytes <= sizeof want);
        fill(NULL, i, want, t->bytes);
        assert_memory_equal(t->data, want, t->bytes);
    }
    mt_safetensors_close(&set);
}

static const char dense_qwen[] = QWEN(",\"intermediate_size\":40,\"mlp_only_layers\":[1],"
                                      "\"head_dim\":16,\"num_key_value_heads\":2");
static const char tied_qwen[] = QWEN(",\"tie_word_embeddings\":true,\"eos_token_id\":5");

static void test_round_trip(void **state)
{
    (void)state;
    static const mt_dtype mixed[] = { MT_BF16, MT_F32, MT_F16, MT_F64 }, bf16[] = { MT_BF16 };
    static const char *const texts[] = { dense_qwen, tied_qwen, OLMOE(""), MIXTRAL("") };
    static contents c;
    for (int i = 0; i < 4; i++) {
        for (int kind = 0; kind < 2; kind++) {
            list_model(&c, texts[i], kind ? mixed : bf16, kind ? 4 : 1);
            put_model(in_dir("model"), &c, texts[i], kind ? 20000 : 0);
            assert_ok(mt_hf_import(in_dir("ckpt"), in_dir("model")));
            assert_ok(mt_hf_export(in_dir("out"), in_dir("ckpt"), kind ? 0 : 30000, NULL));
            expect_model(in_dir("out"), &c);
            mt_model_config a, b;
            assert_ok(mt_hf_config_read(&a, NULL, in_dir("model")));
            assert_ok(mt_hf_config_read(&b, NULL, in_dir("out")));
            expect_same(&a, &b);
            assert_ok(mt_checkpoint_read_model_config(in_dir("ckpt"), &b));
            expect_same(&a, &b);
        }
        size_t bytes;
        char *text = get_file(in_dir("out/config.json"), &bytes);
        assert_int_equal(strstr(text, "\"eos_token_id\": 5") != NULL, i == 1);
        assert_int_equal(text[bytes - 1], '\n');
        free(text);
        assert_ok(mt_dir_remove(in_dir("ckpt")));
        assert_ok(mt_dir_remove(in_dir("out")));
    }
}

/* The names and shapes that the architectures are known by elsewhere: counted and spot-checked. */
static void test_names(void **state)
{
    (void)state;
    static const mt_dtype f32[] = { MT_F32 };
    static contents c;
    list_model(&c, dense_qwen, f32, 1);
    /* embed, norm, head; 8 per layer; router and 6 x 3 experts in two layers; 3 in the dense one */
    assert_int_equal(c.count, 3 + 3 * 8 + 2 * 19 + 3);
    const mt_st_entry *e = &c.entries[find(&c, "model.layers.0.self_attn.k_norm.weight")];
    assert_true(e->ndim == 1 && e->shape[0] == 16);
    e = &c.entries[find(&c, "model.layers.2.self_attn.v_proj.weight")];
    assert_true(e->ndim == 2 && e->shape[0] == 32 && e->shape[1] == 32);
    e = &c.entries[find(&c, "model.layers.2.mlp.experts.5.down_proj.weight")];
    assert_true(e->shape[0] == 32 && e->shape[1] == 24);
    e = &c.entries[find(&c, "model.layers.1.mlp.up_proj.weight")];
    assert_true(e->shape[0] == 40 && e->shape[1] == 32);
    list_model(&c, MIXTRAL(""), f32, 1);
    assert_int_equal(c.count, 3 + 3 * 6 + 3 * 19);
    find(&c, "model.layers.2.block_sparse_moe.experts.0.w3.weight");
    find(&c, "model.layers.2.block_sparse_moe.gate.weight");
    list_model(&c, OLMOE(",\"num_key_value_heads\":2"), f32, 1);
    e = &c.entries[find(&c, "model.layers.0.self_attn.k_norm.weight")];
    assert_true(e->ndim == 1 && e->shape[0] == 16);
    find(&c, "lm_head.weight");
    list_model(&c, tied_qwen, f32, 1);
    for (int i = 0; i < c.count; i++) assert_string_not_equal(c.names[i], "lm_head.weight");
}

/* Experts as [E, 2F, D] and [E, D, F], as transformers 5 keeps them in memory; Mixtral's block is
 * then called mlp. */
static void test_fused(void **state)
{
    (void)state;
    static const mt_dtype bf16[] = { MT_BF16 };
    static const char *const texts[] = { QWEN(""), MIXTRAL("") };
    enum { E = 6, F = 24, D = 32 };
    for (int k = 0; k < 2; k++) {
        static contents whole, fused;
        const char *const *n = k ? (const char *const[]){ "w1", "w3", "w2" }
                                 : (const char *const[]){ "gate_proj", "up_proj", "down_proj" };
        const char *block = k ? "block_sparse_moe" : "mlp";
        char name[128];
        list_model(&whole, texts[k], bf16, 1);
        fused.count = 0;
        for (int i = 0; i < whole.count; i++) {
            const mt_st_entry *e = &whole.entries[i];
            const char *at = strstr(e->name, ".block_sparse_moe.");
            if (strstr(e->name, ".experts.")) continue;
            snprintf(name, sizeof name, "%.*s%s%s", at ? (int)(at - e->name) : 127, e->name,
                     at ? ".mlp." : "", at ? at + 18 : "");
            add(&fused, name, e->dtype, e->ndim, e->shape[0], e->shape[1], 0);
        }
        for (int l = 0; l < 3; l++) {
            snprintf(name, sizeof name, "model.layers.%d.mlp.experts.gate_up_proj", l);
            add(&fused, name, MT_BF16, 3, E, 2 * F, D);
            snprintf(name, sizeof name, "model.layers.%d.mlp.experts.down_proj", l);
            add(&fused, name, MT_BF16, 3, E, D, F);
        }
        put_model(in_dir("fused"), &fused, texts[k], 0);
        assert_ok(mt_hf_import(in_dir("fckpt"), in_dir("fused")));
        assert_ok(mt_hf_export(in_dir("fout"), in_dir("fckpt"), 0, NULL));
        mt_safetensors *out;
        assert_ok(mt_safetensors_open_dir(&out, in_dir("fout")));
        assert_int_equal(mt_safetensors_count(out), whole.count);
        static uint16_t gate_up[E * 2 * F * D], down[E * D * F];
        for (int l = 0; l < 3; l++) {
            snprintf(name, sizeof name, "model.layers.%d.mlp.experts.gate_up_proj", l);
            fill(NULL, find(&fused, name), gate_up, sizeof gate_up);
            snprintf(name, sizeof name, "model.layers.%d.mlp.experts.down_proj", l);
            fill(NULL, find(&fused, name), down, sizeof down);
            for (int e = 0; e < E; e++)
                for (int p = 0; p < 3; p++) {
                    snprintf(name, sizeof name, "model.layers.%d.%s.experts.%d.%s.weight", l, block,
                             e, n[p]);
                    const mt_st_tensor *t = mt_safetensors_find(out, name);
                    const uint16_t *want =
                        p == 2 ? down + e * D * F : gate_up + (e * 2 + p) * F * D;
                    assert_non_null(t);
                    assert_int_equal(t->bytes, F * D * 2);
                    assert_memory_equal(t->data, want, t->bytes);
                }
        }
        mt_safetensors_close(&out);
        assert_ok(mt_dir_remove(in_dir("fckpt")));
        assert_ok(mt_dir_remove(in_dir("fout")));
        /* nor is it guessed which of two is meant */
        snprintf(name, sizeof name, "model.layers.1.%s.experts.2.%s.weight", block, n[2]);
        add(&fused, name, MT_BF16, 2, D, F, 0);
        put_model(in_dir("fused"), &fused, texts[k], 0);
        assert_fails(mt_hf_import(in_dir("fckpt"), in_dir("fused")), MT_ECONFIG,
                     "and the same in 'model.layers.1.mlp.experts.down_proj'");
        fused.count--;
        /* transposed experts are not guessed at */
        int i = find(&fused, "model.layers.1.mlp.experts.gate_up_proj");
        fused.entries[i].shape[1] = D, fused.entries[i].shape[2] = 2 * F;
        put_model(in_dir("fused"), &fused, texts[k], 0);
        assert_fails(mt_hf_import(in_dir("fckpt"), in_dir("fused")), MT_ECONFIG,
                     "gate_up_proj' has shape [6,32,48], must be [6,48,32]");
    }
}

static void test_broken_models(void **state)
{
    (void)state;
    static const mt_dtype f32[] = { MT_F32 };
    static contents c;
    const char *ckpt = in_dir("broken_ckpt"), *dir = in_dir("broken");
    list_model(&c, QWEN(""), f32, 1);
    int i = find(&c, "model.layers.1.mlp.experts.3.up_proj.weight");
    snprintf(c.names[i], sizeof c.names[i], "model.layers.1.mlp.experts.6.up_proj.weight");
    put_model(dir, &c, QWEN(""), 0);
    assert_fails(mt_hf_import(ckpt, dir), MT_ECONFIG,
                 "no tensor 'model.layers.1.mlp.experts.3.up_proj.weight'");
    list_model(&c, QWEN(""), f32, 1);
    add(&c, "model.layers.0.self_attn.q_proj.bias", MT_F32, 1, 32, 0, 0);
    put_model(dir, &c, QWEN(""), 0);
    assert_fails(mt_hf_import(ckpt, dir), MT_ECONFIG,
                 "'model.layers.0.self_attn.q_proj.bias' has no place in this qwen3_moe");
    list_model(&c, QWEN(""), f32, 1);
    c.entries[find(&c, "model.norm.weight")].shape[0] = 31;
    put_model(dir, &c, QWEN(""), 0);
    assert_fails(
        mt_hf_import(ckpt, dir), MT_ECONFIG,
        "broken/model.safetensors': tensor 'model.norm.weight' has shape [31], must be [32]");
    list_model(&c, QWEN(""), f32, 1);
    c.entries[find(&c, "model.norm.weight")].dtype = MT_I32;
    put_model(dir, &c, QWEN(""), 0);
    assert_fails(mt_hf_import(ckpt, dir), MT_EUNSUPPORTED,
                 "broken/model.safetensors': tensor 'model.norm.weight' is I32");
    put_model(dir, &c, QWEN(", \"tie_word_embeddings\": false, \"rms_norm_eps\": 5"), 0);
    assert_fails(mt_hf_import(ckpt, dir), MT_ECONFIG,
                 "broken/config.json: rms_norm_eps is 5, must be in [0, 1)");
    list_model(&c, QWEN(""), f32, 1);
    add(&c, "model.layers.0.self_attn.rotary_emb.inv_freq", MT_F32, 1, 4, 0, 0);
    put_model(dir, &c, QWEN(""), 0);
    assert_false(mt_path_exists(ckpt));
    assert_false(mt_path_exists(in_dir("broken_ckpt.tmp")));
    assert_ok(mt_hf_import(ckpt, dir));
    assert_ok(mt_hf_import(in_dir("broken_ckpt/"), dir)); /* replaced */
    assert_int_equal(symlink("broken_ckpt", in_dir("link")), 0);
    assert_fails(mt_hf_import(in_dir("link"), in_dir("broken")), MT_EIO,
                 "symbolic link: not replaced");
    assert_false(mt_path_exists(in_dir("link.tmp")));
    assert_ok(mt_dir_remove(in_dir("broken_ckpt")));
    assert_ok(mt_dir_create(in_dir("broken_ckpt")));
    put_text(in_dir("broken_ckpt/precious"), "do not delete");
    assert_fails(mt_hf_import(in_dir("broken_ckpt"), in_dir("broken")), MT_EIO, "not replaced");
    assert_true(mt_path_exists(in_dir("broken_ckpt/precious")));
    assert_fails(mt_hf_import(in_dir("n"), in_dir("absent")), MT_EIO, "absent/config.json");
    put_text(in_dir("broken/model.safetensors"), "not tensors");
    assert_fails(mt_hf_import(in_dir("n"), in_dir("broken")), MT_EDAMAGED, "model.safetensors");
    assert_false(mt_path_exists(in_dir("n")));
}

static mt_status fill_tied(void *user, int64_t i, void *data, size_t bytes)
{
    const contents *c = user;
    return fill(NULL,
                strcmp(c->names[i], "lm_head.weight") ? i : find(c, "model.embed_tokens.weight"),
                data, bytes);
}

static void test_tied(void **state)
{
    (void)state;
    static const mt_dtype f32[] = { MT_F32 };
    static contents c;
    list_model(&c, tied_qwen, f32, 1);
    add(&c, "lm_head.weight", MT_F32, 2, 97, 32, 0);
    put_model(in_dir("tied"), &c, tied_qwen, 0);
    assert_fails(mt_hf_import(in_dir("tckpt"), in_dir("tied")), MT_ECONFIG,
                 "lm_head.weight differs");
    assert_ok(mt_safetensors_write_dir(in_dir("tied"), c.entries, c.count, 0, fill_tied, &c));
    assert_ok(mt_hf_import(in_dir("tckpt"), in_dir("tied")));
    assert_ok(mt_hf_export(in_dir("tout"), in_dir("tckpt"), 0, NULL));
    c.count--;
    expect_model(in_dir("tout"), &c);
    put_model(in_dir("tied"), &c, QWEN(""), 0);
    assert_fails(mt_hf_import(in_dir("uckpt"), in_dir("tied")), MT_ECONFIG,
                 "no tensor 'lm_head.weight'");
}

/* A checkpoint of this configuration with the tensors of another model. */
static void put_checkpoint(const char *path, const mt_model_config *config,
                           const mt_model_config *other)
{
    mt_device *device;
    mt_model *model;
    assert_ok(mt_device_open(&device, "cpu", NULL, 1));
    assert_ok(mt_model_create(&model, device, other, MT_F32, 1, false, NULL));
    assert_ok(mt_model_init(model, 3));
    const mt_checkpoint_state state = { .config = config,
                                        .params = mt_model_params(model),
                                        .compute = MT_F32 };
    assert_ok(mt_checkpoint_write(path, &state, &(mt_checkpoint_info){ .run_config = NULL }));
    mt_model_destroy(&model);
    mt_device_destroy(&device);
}

/* What the configuration does not describe is no model: nothing of it is written. */
static void test_broken_checkpoints(void **state)
{
    (void)state;
    static const char *const words[] = {
        "wrong' has no tensor 'model.layers.2.input_layernorm.weight', which its configuration has",
        "wrong': tensor 'model.layers.3.input_layernorm.weight' has no place in the qwen3_moe of "
        "its configuration",
        "wrong': tensor 'model.layers.0.mlp.experts.0.gate_proj.weight' is f32[25,32], must be "
        "f32[24,32] by its configuration",
        "wrong': tensor 'lm_head.weight' has no place in",
    };
    mt_model_config config, other;
    for (int i = 0; i < 4; i++) {
        assert_ok(parse(&config, QWEN("")));
        assert_ok(parse(&other, QWEN("")));
        assert_ok(mt_model_config_check(&config));
        if (i < 2) other.num_hidden_layers = i ? 4 : 2;
        if (i == 2) other.moe_intermediate_size = 25;
        if (i == 3) config.tie_word_embeddings = true;
        put_checkpoint(in_dir("wrong"), &config, &other);
        assert_fails(mt_hf_export(in_dir("wout"), in_dir("wrong"), 0, NULL), MT_EDAMAGED, words[i]);
        assert_false(mt_path_exists(in_dir("wout")));
    }
    put_checkpoint(in_dir("wrong"), &other, &other);
    assert_ok(mt_hf_export(in_dir("wout"), in_dir("wrong"), 0, NULL));
}

/* It would be removed with the checkpoint, or change it. */
static void test_export_stays_out_of_checkpoints(void **state)
{
    (void)state;
    static const char *const dirs[] = { "whole", "whole/", "whole/hf" };
    mt_model_config config;
    assert_ok(parse(&config, QWEN("")));
    assert_ok(mt_model_config_check(&config));
    put_checkpoint(in_dir("whole"), &config, &config);
    for (int i = 0; i < 3; i++) {
        mt_checkpoint *checkpoint;
        assert_fails(mt_hf_export(in_dir(dirs[i]), in_dir("whole"), 0, NULL), MT_ECONFIG,
                     "whole' is a complete checkpoint and would be changed by '");
        assert_false(mt_path_exists(in_dir("whole/config.json")));
        assert_false(mt_path_exists(in_dir("whole/hf")));
        assert_ok(mt_checkpoint_open(&checkpoint, in_dir("whole")));
        mt_checkpoint_close(&checkpoint);
    }
}

static int import_limited(void)
{
    mt_status status = mt_hf_import(in_dir("lckpt"), in_dir("limited"));
    if (status != MT_EIO || !strstr(mt_error_message(), "File too large")) return 1;
    if (mt_path_exists(in_dir("lckpt")) || mt_path_exists(in_dir("lckpt.tmp"))) return 2;
    status = mt_hf_export(in_dir("lout"), in_dir("good"), 0, NULL);
    return status == MT_EIO && !mt_path_exists(in_dir("lout/model.safetensors")) ? 0 : 3;
}

/* Two exports to one directory would leave files of both. */
static void test_one_export(void **state)
{
    (void)state;
    static const mt_dtype f32[] = { MT_F32 };
    static contents c;
    int other;
    list_model(&c, QWEN(""), f32, 1);
    put_model(in_dir("single"), &c, QWEN(""), 0);
    assert_ok(mt_hf_import(in_dir("sckpt"), in_dir("single")));
    assert_ok(mt_dir_create(in_dir("sout")));
    assert_ok(mt_dir_lock(&other, in_dir("sout")));
    assert_fails(mt_hf_export(in_dir("sout"), in_dir("sckpt"), 0, NULL), MT_ECONFIG,
                 "sout is in use by another process");
    assert_false(mt_path_exists(in_dir("sout/model.safetensors")));
    assert_int_equal(close(other), 0);
    assert_ok(mt_hf_export(in_dir("sout"), in_dir("sckpt"), 0, NULL));
    expect_model(in_dir("sout"), &c);
}

/* And two imports into one checkpoint; what one that died has left holds nobody. */
static void test_one_import(void **state)
{
    (void)state;
    static const mt_dtype f32[] = { MT_F32 };
    static contents c;
    int other, old;
    list_model(&c, QWEN(""), f32, 1);
    put_model(in_dir("only"), &c, QWEN(""), 0);
    for (int again = 0; again < 2; again++) {
        assert_ok(mt_dir_create(in_dir("ickpt.tmp")));
        put_text(in_dir("ickpt.tmp/left"), "by another");
        assert_ok(mt_dir_lock(&other, in_dir("ickpt.tmp")));
        assert_fails(mt_hf_import(in_dir("ickpt"), in_dir("only")), MT_ECONFIG,
                     "ickpt': another process is writing it");
        assert_true(mt_path_exists(in_dir("ickpt.tmp/left")));
        assert_int_equal(mt_path_exists(in_dir("ickpt")), again);
        assert_int_equal(close(other), 0);
        assert_ok(mt_hf_import(in_dir("ickpt"), in_dir("only")));
        assert_false(mt_path_exists(in_dir("ickpt.tmp")));
        assert_false(mt_path_exists(in_dir("ickpt/left")));
    }
    /* one that is being removed in favour of another's */
    assert_ok(mt_dir_lock(&old, in_dir("ickpt")));
    assert_fails(mt_hf_import(in_dir("ickpt"), in_dir("only")), MT_ECONFIG, "ickpt is in use");
    assert_int_equal(close(old), 0);
    assert_ok(mt_hf_export(in_dir("iout"), in_dir("ickpt"), 0, NULL));
    expect_model(in_dir("iout"), &c);
}

static void test_full_disk(void **state)
{
    (void)state;
    static const mt_dtype f32[] = { MT_F32 };
    static contents c;
    list_model(&c, QWEN(""), f32, 1);
    put_model(in_dir("limited"), &c, QWEN(""), 0);
    assert_ok(mt_hf_import(in_dir("good"), in_dir("limited")));
    assert_int_equal(with_file_limit(50000, import_limited), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_fused),
        cmocka_unit_test(test_broken_models),
        cmocka_unit_test(test_tied),
        cmocka_unit_test(test_one_export),
        cmocka_unit_test(test_one_import),
        cmocka_unit_test(test_full_disk),
        cmocka_unit_test(test_broken_checkpoints),
        cmocka_unit_test(test_export_stays_out_of_checkpoints),
    };
    return cmocka_run_group_tests(tests, files_setup, files_teardown);
}
