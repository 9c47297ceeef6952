/* The configuration: the key table, reading, errors with places and nearest names, conflicts,
 * writing back. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/fault.h"
#include "tests/support/test.h"

#include "core/rng.h"
#include "train/config_priv.h"

static const char base[] = "model:\n"
                           "  vocab_size: 256\n"
                           "  hidden_size: 64\n"
                           "  num_hidden_layers: 2\n"
                           "  num_attention_heads: 4\n"
                           "  moe_intermediate_size: 32\n"
                           "  num_experts: 4\n"
                           "  num_experts_per_tok: 2\n"
                           "data:\n"
                           "  train: a.h5\n";

static mt_status parse(mt_config *config, const char *more, const char *set)
{
    char text[8192];
    snprintf(text, sizeof text, "%s%s", base, more);
    return mt_config_parse(config, "x/t.yaml", text, strlen(text), &set, set ? 1 : 0);
}

static mt_status parse_alone(const char *text)
{
    mt_config config;
    return mt_config_parse(&config, "t.yaml", text, strlen(text), NULL, 0);
}

static void the_table_is_sound(void **state)
{
    (void)state;
    mt_config config;
    assert_ok(mt_config_defaults(&config));
    for (int i = 0; i < mt_config_key_count; i++) {
        const mt_config_key *key = &mt_config_keys[i];
        assert_true(key->path && key->help && *key->help);
        assert_true(key->kind != MT_KEY_ENUM || key->names);
        for (int j = 0; j < i; j++) assert_string_not_equal(key->path, mt_config_keys[j].path);
    }
}

static void reads_values_and_defaults(void **state)
{
    (void)state;
    mt_config c;
    assert_ok(parse(&c,
                    "train: {steps: 12, batch_size: 6, micro_batch_size: 3, dtype: bf16}\n"
                    "optim:\n  lr: 5e-3\n  schedule: wsd\n  warmup_steps: 4\n"
                    "memory: {offload: saved, recompute: activation, defer_wgrad: true}\n"
                    "checkpoint:\n"
                    "device: cpu\n",
                    NULL));
    assert_string_equal(c.name, "t");
    assert_string_equal(c.trainer.model.architecture->model_type, "qwen3_moe");
    assert_int_equal(c.trainer.model.hidden_size, 64);
    assert_int_equal(c.trainer.model.head_dim, 16);
    assert_int_equal(c.trainer.model.num_key_value_heads, 4);
    assert_int_equal(c.trainer.model.max_position_embeddings, 256);
    assert_true(c.trainer.model.norm_topk_prob);
    assert_int_equal(c.trainer.steps, 12);
    assert_int_equal(c.trainer.micro_batch_size, 3);
    assert_int_equal(c.trainer.dtype, MT_BF16);
    assert_true(c.trainer.optim.lr == 5e-3);
    assert_int_equal(c.trainer.optim.schedule, MT_SCHEDULE_WSD);
    assert_true(c.trainer.offload && c.trainer.defer_wgrad);
    assert_int_equal(c.trainer.recompute, MT_RECOMPUTE_ACTIVATION);
    assert_string_equal(c.train_corpus, "a.h5");
    assert_string_equal(c.valid_corpus, "");
    assert_int_equal(c.log_every, 10);
}

static void model_type_sets_defaults_wherever_it_stands(void **state)
{
    (void)state;
    mt_config c;
    assert_ok(parse(&c, "", "model.model_type=olmoe"));
    assert_false(c.trainer.model.norm_topk_prob);
    assert_true(c.trainer.model.rope_theta == 1e4 && c.trainer.model.rms_norm_eps == 1e-5);
    static const char mixtral[] =
        "data: {train: a}\n"
        "model: {norm_topk_prob: true, num_local_experts: 4, num_experts_per_tok: 2, "
        "intermediate_size: 48, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, "
        "vocab_size: 9, mlp_only_layers: [], model_type: mixtral}\n";
    assert_ok(mt_config_parse(&c, "t", mixtral, sizeof mixtral - 1, NULL, 0));
    assert_int_equal(c.trainer.model.num_experts, 4);
    assert_int_equal(c.trainer.model.moe_intermediate_size, 48);
    const char *set = "model.moe_intermediate_size=32";
    assert_fails(mt_config_parse(&c, "t", mixtral, sizeof mixtral - 1, &set, 1), MT_ECONFIG,
                 "--set model.moe_intermediate_size=32: moe_intermediate_size is 32 and "
                 "intermediate_size 48");
    assert_fails(parse(&c, "", "model.model_type=qwen2"), MT_ECONFIG, "qwen3_moe");
}

static void later_sets_win(void **state)
{
    (void)state;
    mt_config c;
    const char *sets[] = { "train.steps=7", "train.steps=09", "model.mlp_only_layers=[1]",
                           "model.intermediate_size=24", "data.valid=v: #1.h5" };
    assert_ok(mt_config_parse(&c, "t", base, sizeof base - 1, sets, 5));
    assert_int_equal(c.trainer.steps, 9);
    assert_int_equal(c.trainer.model.mlp_only_layer_count, 1);
    assert_int_equal(c.trainer.model.mlp_only_layers[0], 1);
    assert_string_equal(c.valid_corpus, "v: #1.h5");
}

/* A recipe is checked where it is in force. */
static void replaced_recipes_are_not_checked(void **state)
{
    (void)state;
    static const char *const recipes[] = { "recipe: nvfp5\n", "recipe:\n- {use: nvfp5}\n",
                                           "recipe: {use: [{use: bf16}, {layers: a, use: 7}]}\n" };
    const char *sets[] = { "recipe=[{use: nvfp5}]",
                           "recipe=[{use: mxfp8}, {steps: 9-, use: bf16}]" };
    mt_config c;
    for (int i = 0; i < 3; i++) {
        char text[2048];
        snprintf(text, sizeof text, "%s%s", base, recipes[i]);
        assert_fails(mt_config_parse(&c, "t", text, strlen(text), NULL, 0), MT_ECONFIG,
                     "recipe: '");
        assert_fails(mt_config_parse(&c, "t", text, strlen(text), sets, 1), MT_ECONFIG,
                     "--set recipe=[{use: nvfp5}]: recipe: 'nvfp5'");
        assert_ok(mt_config_parse(&c, "t", text, strlen(text), sets, 2));
        assert_string_equal(c.trainer.recipe, "mxfp8; steps=9.. bf16");
    }
}

/* Text after `base`, whose lines are 1 to 10; --set; code; words of the sentence. */
static const struct bad {
    const char *yaml, *set;
    mt_status code;
    const char *words;
} bad[] = {
    { "train:\n  stpes: 3\n", NULL, MT_ECONFIG,
      "t.yaml:12: unknown key train.stpes: did you mean train.steps" },
    { "train:\n  lr: 3\n", NULL, MT_ECONFIG, "unknown key train.lr: did you mean optim.lr" },
    { "trian:\n  steps: 3\n", NULL, MT_ECONFIG,
      "t.yaml:11: unknown key trian: did you mean train" },
    { "batch_size: 3\n", NULL, MT_ECONFIG, "did you mean train.batch_size" },
    { "", "optim.betta2=.9", MT_ECONFIG,
      "--set optim.betta2=.9: unknown key optim.betta2: did you mean optim.beta2" },
    { "", "optm.beta2=.9", MT_ECONFIG, "did you mean optim.beta2" },
    { "", "model.num_expert=2", MT_ECONFIG, "did you mean model.num_experts" },
    { "", "qqqqqqqq.zzzzzzzzzzz=1", MT_ECONFIG,
      "unknown key qqqqqqqq.zzzzzzzzzzz (`mixtape train --help-config` lists all)" },
    { "", "optim=3", MT_ECONFIG, "optim is a section" },
    { "", "steps", MT_ECONFIG, "section.key=value" },
    { "train: 3\n", NULL, MT_ECONFIG, "t.yaml:11: train: a mapping" },
    { "train: {steps: [3]}\n", NULL, MT_ECONFIG, "t.yaml:11: train.steps: a single value" },
    { "train: {steps: {a: 3}}\n", NULL, MT_ECONFIG, "a value is expected" },
    { "train: {steps: 3k}\n", NULL, MT_ECONFIG, "train.steps: '3k' is not an integer" },
    { "train: {steps: 99999999999999999999}\n", NULL, MT_ECONFIG, "is not in -2^63..2^63-1" },
    { "train: {steps: -1}\n", NULL, MT_ECONFIG, "train.steps: -1 is not in 0.." },
    { "train: {seed: -1}\n", NULL, MT_ECONFIG, "train.seed: -1 is not in" },
    { "train: {seed: 2305843009213693953}\n", NULL, MT_ECONFIG,
      "train.seed: 2305843009213693953 is not in 0..2305843009213693952" },
    { "optim: {lr: fast}\n", NULL, MT_ECONFIG, "optim.lr: 'fast' is not a finite number" },
    { "optim: {lr: nan}\n", NULL, MT_ECONFIG, "is not a finite number" },
    { "optim: {lr: 0x1}\n", NULL, MT_ECONFIG, "'0x1' is not a finite number in decimal" },
    { "train: {steps: 0x10}\n", NULL, MT_ECONFIG, "'0x10' is not an integer" },
    { "optim: {beta1: 1.5}\n", NULL, MT_ECONFIG, "1.5 is not in 0..1" },
    { "optim: {schedule: cosin}\n", NULL, MT_ECONFIG,
      "'cosin' is not one of constant, linear, cosine, wsd (did you mean cosine?)" },
    { "train: {dtype: fp32}\n", NULL, MT_ECONFIG, "'fp32' is not one of f64, f32, bf16" },
    { "memory: {recompute: blocks}\n", NULL, MT_ECONFIG, "did you mean block?" },
    { "memory: {defer_wgrad: yes}\n", NULL, MT_ECONFIG, "'yes' is not one of false, true" },
    { "train: {steps: 3}\ntrain: {steps: 4}\n", NULL, MT_ECONFIG,
      "t.yaml:12: train.steps is given twice, first in line 11" },
    { "train: {steps: 3\n", NULL, MT_ECONFIG, "t.yaml:12: not YAML" },
    { "--- \na: 1\n", NULL, MT_ECONFIG, "t.yaml:12: a second document" },
    { "? [a]\n: 1\n", NULL, MT_ECONFIG, "no name of a key" },
    { "\x01", NULL, MT_ECONFIG, "not YAML" },
    { "", "data.train=\xff", MT_ECONFIG, "not UTF-8" },
    { "", "data.train=\n", MT_ECONFIG, "control character" },
    { "", "statistics.tensors=[a, 'b,c']", MT_ECONFIG, "holds a comma" },
    { "", "model.mlp_only_layers=[0,-1]", MT_ECONFIG, "model.mlp_only_layers: -1 is not in" },
    { "", "model.mlp_only_layers=1", MT_ECONFIG, "a list is expected" },
    { "", "model.mlp_only_layers=[[1]]", MT_ECONFIG, "items are single values" },
    /* conflicts */
    { "", "model.num_experts_per_tok=5", MT_ECONFIG,
      "--set model.num_experts_per_tok=5: num_experts_per_tok is 5, must not exceed num_experts "
      "4" },
    { "", "model.num_attention_heads=5", MT_ECONFIG, "hidden_size 64 is not divisible" },
    { "", "model.num_key_value_heads=3", MT_ECONFIG, "is not divisible by num_key_value_heads 3" },
    { "", "model.head_dim=7", MT_ECONFIG, "head_dim is 7" },
    { "", "train.micro_batch_size=3", MT_ECONFIG,
      "3 does not divide train.batch_size 8: take a micro_batch_size of 2 or 4, or a batch_size of "
      "6 or 9" },
    { "", "train.micro_batch_size=9", MT_ECONFIG,
      "take a micro_batch_size of 8, or a batch_size of 9" },
    { "", "parallel.expert=3", MT_ECONFIG, "must divide model.num_experts 4: take 2 or 4" },
    { "", "parallel.expert=9", MT_ECONFIG, "must divide model.num_experts 4: take 4" },
    { "", "data.train=", MT_ECONFIG, "data.train is empty: `mixtape data pack` makes" },
    { "", "optim.warmup_steps=2000", MT_ECONFIG, "is 2000, above train.steps 1000" },
    { "", "train.eval_every=5", MT_ECONFIG, "data.valid names no corpus" },
    { "", "optim.eps=1e-46", MT_ECONFIG, "--set optim.eps=1e-46: optim.eps is 1e-46, which is 0" },
    { "", "model.max_position_embeddings=128", MT_ECONFIG, "data.sequence_length is 256" },
    { "device: tpu\n", NULL, MT_ECONFIG, "t.yaml:11: device 'tpu' is not one of" },
    { "device: 'cuda:'\n", NULL, MT_ECONFIG, "device 'cuda:' is not one of" },
    { "", "device=cuda:-1", MT_ECONFIG, "device 'cuda:-1' is not one of auto, cpu, cuda, cuda:N" },
    { "", "device=cuda:1x", MT_ECONFIG, "is not one of" },
    { "", "device=cpu:0", MT_ECONFIG, "is not one of" },
    { "statistics: {every: 1, tensors: [Y]}\n", "statistics.every=2", MT_ECONFIG,
      "t.yaml:11: statistics.tensors: 'Y' is not one of W X dY" },
    { "statistics: {what_if: [nvfp5]}\n", NULL, MT_ECONFIG, "nvfp5" },
    { "statistics: {what_if: [mxfp8, mxfp4, 'mxfp8:scale=up']}\n", NULL, MT_ECONFIG,
      "'mxfp8:scale=up' is there twice" },
    { "recipe: nvfp5\n", NULL, MT_ECONFIG, "t.yaml:11: recipe: 'nvfp5'" },
    { "recipe: fprop=mxfp8:rht dgrad=bf16 wgrad=bf16\n", NULL, MT_ECONFIG, "fprop W row" },
    { "recipe:\n- {layers: '*', use: nvfp4}\n", NULL, MT_ECONFIG, "first clause" },
    { "recipe:\n- {layer: '*', use: nvfp4}\n", NULL, MT_ECONFIG, "not 'layer'" },
    { "recipe:\n- {layers: '*'}\n", NULL, MT_ECONFIG, "without 'use'" },
    { "recipe:\n- {use: nvfp4}\n- {layers: a, use: bf61}\n- {use: mxfp8}\n", NULL, MT_ECONFIG,
      "t.yaml:13: recipe: 'bf61' is neither a preset" },
    { "recipe:\n- {use: nvfp4}\n- {use: mxfp8}\n- {steps: 9-5, use: bf16}\n", NULL, MT_ECONFIG,
      "t.yaml:14: recipe rule: steps 9..5 are not a range" },
    { "recipe:\n- {use: bf16}\n- {layers: a, layers: b, use: nvfp4}\n", NULL, MT_ECONFIG,
      "t.yaml:13: recipe: 'layers' of a rule is given twice" },
    { "recipe:\n- {use: bf16}\n- {layers: '*', use: bf16; mxfp8}\n", NULL, MT_ECONFIG,
      "'use' of a rule is 'bf16; mxfp8': it holds no ';'" },
    { "recipe:\n- {use: bf16}\n- {layers: '*a fprop=bf16', use: mxfp8}\n", NULL, MT_ECONFIG,
      "'layers' of a rule is '*a fprop=bf16': it holds no blank" },
    { "recipe: {delayed: {history: 1}}\n", NULL, MT_ECONFIG, "recipe.delayed.history" },
    { "recipe: {delayed: {margin: 9}}\n", NULL, MT_ECONFIG,
      "recipe.delayed.margin: 9 is not in 0..8" },
    { "recipe: {delayed: {histroy: 16}}\n", NULL, MT_ECONFIG,
      "did you mean recipe.delayed.history" },
    { "parallel: {timeout: 0}\n", NULL, MT_ECONFIG,
      "t.yaml:11: parallel.timeout: 0 is not in 1.." },
    { "", "parallel.timeout=3e6", MT_ECONFIG, "parallel.timeout: 3e+06 is not in 1..1e+06" },
    /* storage forms */
    { "", "train.grad_dtype=bf16", MT_ECONFIG,
      "--set train.grad_dtype=bf16: train.grad_dtype is bf16, must be f32 or the same as "
      "train.dtype, f32" },
    { "train: {dtype: bf16}\n", "train.grad_dtype=f64", MT_ECONFIG, "train.grad_dtype is f64" },
    { "", "optim.moments=fp4", MT_ECONFIG, "optim.moments" },
    { "", "optim.master=bf16", MT_ECONFIG, "optim.master" },
    { "", "optim.moments_sr=true", MT_ECONFIG,
      "--set optim.moments_sr=true: optim.moments_sr is true, but optim.moments f32 is not" },
    { "optim: {moments: fp8, moments_sr: true}\n", NULL, MT_ECONFIG, "it must be bf16" },
    { "optim: {moments: bf16}\n", "train.dtype=f64", MT_ECONFIG,
      "optim.moments is bf16, must be f32 under train.dtype f64" },
    { "", "optim.moments=fp8 train.dtype=f64", MT_ECONFIG, "optim.moments" },
    { "train: {dtype: f64}\n", "optim.master=bf16+i16", MT_ECONFIG,
      "--set optim.master=bf16+i16: optim.master is bf16+i16, must be f32 under train.dtype f64" },
};

static void refuses_bad_input_and_says_where(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        mt_config c;
        print_message("  %s%s\n", bad[i].yaml, bad[i].set ? bad[i].set : "");
        assert_fails(parse(&c, bad[i].yaml, bad[i].set), bad[i].code, bad[i].words);
    }
    mt_config numbered;
    assert_ok(parse(&numbered, "", "device=cuda:7"));
    assert_string_equal(numbered.device, "cuda:7");
    assert_fails(parse_alone(""), MT_ECONFIG, "model.vocab_size must be set");
    assert_fails(parse_alone("model: {vocab_size: 9, hidden_size: 8, num_hidden_layers: 1, "
                             "num_attention_heads: 1, num_experts: 2, num_experts_per_tok: 1}\n"),
                 MT_ECONFIG, "model.moe_intermediate_size must be set: width F of an expert");
    assert_fails(parse_alone("model: {model_type: mixtral, vocab_size: 9, hidden_size: 8, "
                             "num_hidden_layers: 1, num_attention_heads: 1, num_experts: 2, "
                             "num_experts_per_tok: 1, intermediate_size: 8}\n"),
                 MT_ECONFIG, "data.train must be set");
    assert_fails(parse_alone("- a\n"), MT_ECONFIG, "sections with keys");
    assert_fails(parse_alone("a: &a [*a]\n"), MT_ECONFIG, "unknown key a");
    assert_fails(parse_alone("model: &a {model: *a}\n"), MT_ECONFIG, "unknown key model.model");
    mt_config c;
    assert_fails(mt_config_load(&c, "/nowhere/x.yaml", NULL, 0), MT_EIO, "/nowhere/x.yaml");
}

/* libyaml alone takes minutes over as many brackets. */
static void refuses_deep_nesting_at_once(void **state)
{
    (void)state;
    enum { DEPTH = 100000 };
    mt_config c;
    char *text = malloc(DEPTH + 1);
    assert_non_null(text);
    memset(text, '[', DEPTH), text[DEPTH] = '\0';
    assert_fails(mt_config_parse(&c, "t.yaml", text, DEPTH, NULL, 0), MT_ECONFIG,
                 "t.yaml:1: lists and mappings nested more than 16 deep");
    free(text);
    assert_fails(parse(&c, "", "model.mlp_only_layers=[[[[[[[[[[[[[[[[[["), MT_ECONFIG,
                 "more than 16 deep");
}

/* libyaml alone compares each anchor with all before it: a minute for so many. */
static void refuses_many_anchors_at_once(void **state)
{
    (void)state;
    enum { ANCHORS = 80000 };
    mt_config c;
    char *text = NULL;
    size_t length = 0;
    FILE *file = open_memstream(&text, &length);
    assert_non_null(file);
    for (int i = 0; i < ANCHORS; i++) fprintf(file, "%s&a%d 1", i ? ", " : "[", i);
    fprintf(file, "]\n");
    assert_int_equal(fclose(file), 0);
    assert_fails(mt_config_parse(&c, "t.yaml", text, length, NULL, 0), MT_ECONFIG,
                 "t.yaml:1: more than 256 anchors");
    free(text);
    assert_ok(parse(&c, "train: {steps: &n 1000, seed: *n}\n", NULL));
    assert_int_equal(c.trainer.seed, 1000);
}

/* Every key that has bounds refuses what lies outside. */
static void the_table_is_enforced(void **state)
{
    (void)state;
    for (int i = 0; i < mt_config_key_count; i++) {
        const mt_config_key *key = &mt_config_keys[i];
        mt_config c;
        char set[256];
        bool number = key->kind == MT_KEY_INT || key->kind == MT_KEY_REAL;
        if (number && (key->min != 0 || key->max != 0)) {
            snprintf(set, sizeof set, "%s=%.0f", key->path, key->max * 2);
            assert_fails(parse(&c, "", set), MT_ECONFIG, "is not in");
            snprintf(set, sizeof set, "%s=%.0f", key->path, key->min - 1);
            assert_fails(parse(&c, "", set), MT_ECONFIG, "is not in");
        }
    }
}

static void assert_same_config(const mt_config *a, const mt_config *b)
{
    for (int i = 0; i < mt_config_key_count; i++) {
        char x[MT_CONFIG_FORMATTED], y[MT_CONFIG_FORMATTED];
        mt_config_format(x, a, &mt_config_keys[i]);
        mt_config_format(y, b, &mt_config_keys[i]);
        assert_string_equal(x, y);
    }
}

static mt_config reread(const mt_config *config)
{
    char *text = NULL;
    assert_ok(mt_config_text(&text, config));
    mt_config again;
    assert_ok(mt_config_parse(&again, "resolved.yaml", text, strlen(text), NULL, 0));
    free(text);
    return again;
}

static void reads_back_what_it_writes(void **state)
{
    (void)state;
    static const char *const paths[] = { "a.h5",
                                         "null",
                                         "~",
                                         "true",
                                         "-",
                                         "- a",
                                         "a: b",
                                         "a #b",
                                         " a ",
                                         "\"",
                                         "\\n\\",
                                         "[x",
                                         "{",
                                         "3",
                                         "\xc3\xa4",
                                         "a'b\"c",
                                         "%TAG",
                                         "&a *b",
                                         "!x",
                                         "@",
                                         "0x1p3",
                                         "...",
                                         "\xf0\x9f\x8e\xb5.h5" };
    for (size_t i = 0; i < sizeof paths / sizeof paths[0]; i++) {
        mt_config c;
        assert_ok(parse(&c, "", NULL));
        snprintf(c.train_corpus, sizeof c.train_corpus, "%s", paths[i]);
        mt_config again = reread(&c);
        assert_string_equal(again.train_corpus, paths[i]);
        assert_same_config(&c, &again);
    }
}

static void numbers_read_back_to_the_same_bits(void **state)
{
    (void)state;
    for (uint64_t i = 0; i < 200; i++) {
        mt_config c;
        assert_ok(parse(&c, "", NULL));
        c.trainer.optim.lr = mt_rng_uniform(1, 0, i);
        c.trainer.dtype = MT_F64; /* in which such an eps is not 0 */
        c.trainer.optim.eps = ldexp(1 + mt_rng_uniform(1, 1, i), -1000 - (int)i / 3);
        c.trainer.seed = mt_rng_u32(1, 2, i) * 1000003ull;
        mt_config again = reread(&c);
        assert_memory_equal(&c.trainer.optim.lr, &again.trainer.optim.lr, sizeof(double));
        assert_memory_equal(&c.trainer.optim.eps, &again.trainer.optim.eps, sizeof(double));
        assert_true(c.trainer.seed == again.trainer.seed);
        assert_same_config(&c, &again);
    }
}

/* YAML 1.1 takes 3e-05 for a text. */
static void numbers_with_an_exponent_have_a_point(void **state)
{
    (void)state;
    static const struct {
        double x;
        const char *text;
    } cases[] = { { 3e-5, "3.0e-05" }, { 1.5e-7, "1.5e-07" }, { 1e6, "1.0e+06" },
                  { 1e5, "100000" },   { 0.25, "0.25" },      { 0, "0" } };
    mt_config c;
    assert_ok(parse(&c, "", NULL));
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char text[MT_CONFIG_FORMATTED];
        c.trainer.optim.lr = cases[i].x;
        mt_config_format(text, &c, &mt_config_keys[mt_config_find("optim.lr")]);
        assert_string_equal(text, cases[i].text);
    }
}

static void the_shipped_configurations_load(void **state)
{
    (void)state;
    static const char *const files[] = { "demo", "tiny", "larger" };
    for (size_t i = 0; i < 3; i++) {
        char path[128];
        mt_config c;
        snprintf(path, sizeof path, "train/configs/%s.yaml", files[i]);
        assert_ok(mt_config_load(&c, path, NULL, 0));
        assert_string_equal(c.name, files[i]);
    }
}

static void help_names_every_key(void **state)
{
    (void)state;
    char *text = NULL;
    size_t length = 0;
    FILE *file = open_memstream(&text, &length);
    assert_ok(mt_config_help(file));
    fclose(file);
    for (int i = 0; i < mt_config_key_count; i++) {
        const char *leaf = strrchr(mt_config_keys[i].path, '.');
        assert_non_null(strstr(text, leaf ? leaf + 1 : mt_config_keys[i].path));
        assert_non_null(strstr(text, mt_config_keys[i].help));
    }
    assert_non_null(strstr(text, "timeout: 300 "));
    assert_non_null(strstr(text, "# required: width F of an expert"));
    assert_non_null(strstr(text, "a tie between two bf16 then goes away from zero"));
    free(text);
}

static void reading_survives_want_of_memory(void **state)
{
    (void)state;
    bool failed = true;
    for (int64_t n = 1; failed; n++) {
        mt_config c;
        char *text = NULL;
        fault_arm(n, FAULT_ONCE);
        mt_status status = mt_config_load(&c, "train/configs/demo.yaml", NULL, 0);
        if (status == MT_OK) status = mt_config_text(&text, &c);
        failed = fault_disarm();
        assert_int_equal(status, failed ? MT_ENOMEM : MT_OK);
        assert_true(failed == (text == NULL));
        free(text);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_table_is_sound),
        cmocka_unit_test(reads_values_and_defaults),
        cmocka_unit_test(model_type_sets_defaults_wherever_it_stands),
        cmocka_unit_test(later_sets_win),
        cmocka_unit_test(replaced_recipes_are_not_checked),
        cmocka_unit_test(refuses_bad_input_and_says_where),
        cmocka_unit_test(refuses_deep_nesting_at_once),
        cmocka_unit_test(refuses_many_anchors_at_once),
        cmocka_unit_test(the_table_is_enforced),
        cmocka_unit_test(reads_back_what_it_writes),
        cmocka_unit_test(numbers_read_back_to_the_same_bits),
        cmocka_unit_test(numbers_with_an_exponent_have_a_point),
        cmocka_unit_test(the_shipped_configurations_load),
        cmocka_unit_test(help_names_every_key),
        cmocka_unit_test(reading_survives_want_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
