/* Whole runs of the program over ranks: what their tests share. */
#pragma once

#include "tests/dist/ranks.h"

#include "tests/train/program.h"

enum { STEPS = 8 };

static const char config[] =
    "model: {vocab_size: 256, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4,\n"
    "  moe_intermediate_size: 40, num_experts: 3, num_experts_per_tok: 2}\n"
    "data: {train: train.h5, valid: valid.h5, sequence_length: 16}\n"
    "train: {steps: 8, batch_size: 4, micro_batch_size: 1, dtype: f64, log_every: 1}\n"
    "optim: {lr: 0.01}\n"
    "checkpoint: {every: 4, keep_last: 9}\n"
    "parallel: {timeout: 30}\n"
    "device: %s\n";

static void write_text(const char *name, int words)
{
    FILE *file = fopen(name, "w");
    assert_non_null(file);
    for (int i = 0; i < words; i++) fprintf(file, "%d in the beginning ", i * 7919 % 101);
    fclose(file);
}

static int setup(void **state)
{
    program_setup(state);
    write_text("train.txt", 600);
    write_text("valid.txt", 12);
    char text[2048];
    snprintf(text, sizeof text, config, test_device_name());
    write_file("t.yaml", text);
    assert_program("data pack train.txt -o train.h5", 0, "tokens");
    assert_program("data pack valid.txt -o valid.h5", 0, "tokens");
    assert_program("train t.yaml --run one", 0, "done: 8 steps");
    return 0;
}

/* `mixtape train t.yaml ARGUMENTS` on so many ranks; what it wrote is in ranks_output. */
static int train(int ranks, const char *arguments)
{
    char command[8192];
    snprintf(command, sizeof command, "%s train t.yaml %s", program_path, arguments);
    if (!on_gpus()) return run_ranks(ranks, command);
    snprintf(command, sizeof command, "timeout 300 %s train t.yaml --gpus %d %s 2>&1", program_path,
             ranks, arguments);
    return run_line(command);
}

static void assert_train(int ranks, const char *arguments, int code, const char *words)
{
    int got = train(ranks, arguments);
    if (got != code || !strstr(ranks_output, words))
        fail_msg("%d ranks, %s: exit code %d, want %d with '%s':\n%s", ranks, arguments, got, code,
                 words, ranks_output);
}
