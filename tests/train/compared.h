/* Made-up runs whose comparison is known by hand: what the tests of compare share. */
#pragma once

#include "tests/train/verbs.h"

#include "train/compare.h"

enum { STEPS = 30, EVERY = 10 };

static char line[4096];

static inline void put_in(const char *run, const char *name, const char *text)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", in_dir(run), name);
    put_text(path, text);
}

static inline void put_config(const char *run, const char *recipe, int seed, const char *valid)
{
    char text[1024];
    assert_ok(mt_dir_create(in_dir(run)));
    snprintf(text, sizeof text,
             "model: {vocab_size: 256, hidden_size: 64, num_hidden_layers: 2, num_attention_heads: "
             "4, moe_intermediate_size: 32, num_experts: 4, num_experts_per_tok: 2}\n"
             "data: {train: a.h5, valid: %s}\n"
             "train: {steps: %d, seed: %d}\nrecipe: {use: \"%s\"}\n",
             valid, STEPS, seed, recipe);
    put_in(run, "config.resolved.yaml", text);
}

/* Training losses begin at `bits` + 3 and fall by 1 a line; a statistics line stands between. */
static inline void put_run(const char *run, const char *recipe, int seed, double bits)
{
    char text[2048];
    int used = 0;
    put_config(run, recipe, seed, "b.h5");
    for (int i = 1; i <= STEPS / EVERY; i++)
        used += snprintf(text + used, sizeof text - (size_t)used,
                         "{\"step\":%d,\"loss\":%.17g,\"lr\":1}\n"
                         "{\"step\":%d,\"statistics\":\"x\",\"tensor\":\"W\",\"loss_of\":null}\n",
                         EVERY * i, bits + 4 - i, EVERY * i);
    snprintf(text + used, sizeof text - (size_t)used,
             "{\"step\":10,\"valid_loss\":9,\"valid_bits_per_byte\":9,\"full\":false}\n"
             "{\"step\":%d,\"valid_loss\":8,\"valid_bits_per_byte\":8,\"full\":false}\n"
             "{\"step\":%d,\"valid_loss\":1,\"valid_bits_per_byte\":%.17g,\"full\":true}\n",
             STEPS, STEPS, bits);
    put_in(run, "metrics.jsonl", text);
}

/* Three seeds in bf16; higher by 0.25 +- 0.125; by 0.125 +- 0.25; the same; one pair. All values
 * are binary fractions, so the means and errors are exact. */
static inline void put_runs(void)
{
    static const struct {
        const char *recipe;
        double difference[3];
    } groups[] = { { "bf16", { 0, 0, 0 } },
                   { "mxfp8", { 0.25, 0.25 + 0.125 * 1.5, 0.25 - 0.125 * 1.5 } },
                   { "nvfp4", { 0.125, 0.125 + 0.25 * 1.5, 0.125 - 0.25 * 1.5 } },
                   { "fp8_current", { 0, 0, 0 } },
                   { "fp8_block", { -0.5, 0, 0 } } };
    for (int g = 0; g < 5; g++)
        for (int seed = 0; seed < 3; seed++) {
            char name[32];
            snprintf(name, sizeof name, "%s-%d", groups[g].recipe, seed);
            /* the one pair's other runs have seeds that nobody else has */
            put_run(name, groups[g].recipe, g == 4 && seed ? 70 + seed : seed,
                    2 + seed + groups[g].difference[seed]);
        }
}

/* "compare" with the runs of a list of names, and options. */
static inline const char *compare(const char *names, const char *options)
{
    char words[1024];
    int used = snprintf(line, sizeof line, "compare");
    snprintf(words, sizeof words, "%s", names);
    char *rest = words;
    for (char *name; (name = strsep(&rest, " "));)
        used += snprintf(line + used, sizeof line - (size_t)used, " %s", in_dir(name));
    snprintf(line + used, sizeof line - (size_t)used, "%s", options);
    return line;
}

#define ALL                                                                                        \
    "bf16-0 mxfp8-0 nvfp4-0 fp8_current-0 fp8_block-0 fp8_block-1 bf16-1 mxfp8-1 nvfp4-1 "         \
    "fp8_current-1 fp8_block-2 nvfp4-2 bf16-2 fp8_current-2 mxfp8-2"
