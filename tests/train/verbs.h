/* Runs a verb within the test, and makes small checkpoints for it: what the tests of trace,
 * inspect, plan and doctor share. */
#pragma once

#include "tests/train/files.h"

#include <fcntl.h>

#include "train/checkpoint.h"
#include "train/cli.h"

enum { VERB_WORDS = 32, VERB_OUTPUT = 1 << 16 };
static char verb_output[VERB_OUTPUT]; /* of the last verb: stdout and stderr */

/* Runs "VERB argument ..." (single spaces) and returns its exit code. */
static inline int verb(const char *line)
{
    char words[4096], *argv[VERB_WORDS] = { (char *)(uintptr_t) "mixtape" };
    const char *path = in_dir("output");
    int argc = 1;
    snprintf(words, sizeof words, "%s", line);
    for (char *word = strtok(words, " "); word && argc < VERB_WORDS; word = strtok(NULL, " "))
        argv[argc++] = word;
    fflush(NULL);
    int out = dup(1), err = dup(2), file = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    assert_true(out >= 0 && err >= 0 && file >= 0);
    dup2(file, 1), dup2(file, 2);
    int code = mt_cli_main(argc, argv);
    fflush(NULL);
    dup2(out, 1), dup2(err, 2);
    close(out), close(err), close(file);
    size_t bytes;
    char *text = get_file(path, &bytes);
    snprintf(verb_output, sizeof verb_output, "%s", text);
    free(text);
    return code;
}

/* Asserts the exit code, and words of the output. */
static inline void assert_verb(const char *line, int code, const char *words)
{
    int got = verb(line);
    if (got != code || !strstr(verb_output, words))
        fail_msg("mixtape %s: exit code %d, want %d with '%s'; it wrote:\n%s", line, got, code,
                 words, verb_output);
}

/* Eight experts, so that a few tokens leave some idle; a dense layer; odd sizes. */
static inline mt_model_config small_model(bool tied)
{
    const mt_architecture *architecture;
    mt_model_config c;
    assert_ok(mt_architecture_find(&architecture, "qwen3_moe"));
    mt_model_config_defaults(&c, architecture);
    c.vocab_size = 29, c.hidden_size = 12, c.num_hidden_layers = 3;
    c.num_attention_heads = 4, c.num_key_value_heads = 2, c.head_dim = 6;
    c.moe_intermediate_size = 10, c.intermediate_size = 14;
    c.num_experts = 8, c.num_experts_per_tok = 2;
    c.mlp_only_layers[0] = 1, c.mlp_only_layer_count = 1;
    c.max_position_embeddings = 32;
    c.router_aux_loss_coef = 0.05, c.z_loss_coef = 0.01;
    c.tie_word_embeddings = tied;
    return c;
}

/* Writes a checkpoint of random weights, of a run with this configuration; NULL: of none. */
static inline void make_run_checkpoint(const char *path, const mt_model_config *config,
                                       const char *run_config)
{
    mt_device *device;
    mt_model *model;
    assert_ok(mt_device_open(&device, "cpu", NULL, 1));
    assert_ok(mt_model_create(&model, device, config, MT_F32, 8, false, NULL));
    assert_ok(mt_model_init(model, 3));
    mt_checkpoint_state state = { .config = mt_model_get_config(model),
                                  .params = mt_model_params(model),
                                  .seed = 3,
                                  .compute = MT_F32,
                                  .moe_layers = mt_model_moe_layers(model) };
    for (int64_t i = 0; i < state.moe_layers; i++)
        state.router_bias[i] = mt_model_router_bias(model, i);
    assert_ok(mt_checkpoint_write(path, &state, &(mt_checkpoint_info){ .run_config = run_config }));
    mt_model_destroy(&model);
    mt_device_destroy(&device);
}
static inline void make_checkpoint(const char *path, const mt_model_config *config)
{
    make_run_checkpoint(path, config, NULL);
}

/* Sets all of a weight of a checkpoint, which is of no run then. */
static inline void change_weight(const char *path, const char *name, float value)
{
    mt_device *device;
    mt_model *model;
    mt_model_config config;
    assert_ok(mt_checkpoint_read_model_config(path, &config));
    assert_ok(mt_device_open(&device, "cpu", NULL, 1));
    assert_ok(mt_model_create(&model, device, &config, MT_F32, 8, false, NULL));
    assert_ok(mt_checkpoint_load_model(model, path));
    mt_param *p = mt_param_store_find(mt_model_params(model), name);
    assert_non_null(p);
    for (int64_t i = 0; i < mt_param_count(p); i++)
        assert_ok(mt_param_write_master(mt_model_params(model), p, i, 1, &value));
    mt_checkpoint_state state = { .config = mt_model_get_config(model),
                                  .params = mt_model_params(model),
                                  .compute = MT_F32 };
    assert_ok(mt_checkpoint_write(path, &state, &(mt_checkpoint_info){ .run_config = NULL }));
    mt_model_destroy(&model);
    mt_device_destroy(&device);
}
