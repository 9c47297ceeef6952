/* Whole runs of the program from the outside, and what two of them have in common: what their tests
 * share. */
#pragma once

#include "tests/train/program.h"

#include <jansson.h>

#include "core/clock.h"
#include "core/rng.h"
#include "train/checkpoint.h"

static const char config[] =
    "model: {vocab_size: 256, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2,\n"
    "        num_key_value_heads: 1, moe_intermediate_size: 32, num_experts: 4,\n"
    "        num_experts_per_tok: 2, router_bias_update_rate: 0.001}\n"
    "data: {train: train.h5, valid: valid.h5, sequence_length: 32}\n"
    "train: {steps: 24, batch_size: 4, micro_batch_size: 2, log_every: 1, eval_every: 6, "
    "eval_batches: 2}\n"
    "optim: {lr: 3e-3, warmup_steps: 2}\n"
    "checkpoint: {every: 5, keep_last: 2}\n";

static inline void write_words(const char *path, int64_t count, uint64_t seed)
{
    static const char *const words[] = { "and ", "the ",   "of ",   "lord ", "that ",
                                         "he ",  "shall ", "unto ", ".\n" };
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    for (int64_t i = 0; i < count; i++)
        fputs(words[mt_rng_below(seed, 0, (uint64_t)i, sizeof words / sizeof *words)], file);
    assert_int_equal(fclose(file), 0);
}

static double straight_seconds; /* that a whole run takes here */

static inline int setup(void **state)
{
    program_setup(state);
    write_words("train.txt", 6000, 1);
    write_words("valid.txt", 500, 2);
    write_words("other.txt", 6000, 3);
    write_words("large.txt", 90000, 4);
    write_words("short.txt", 4, 5);
    write_file("t.yaml", config);
    static const char *const names[] = { "train", "valid", "other", "large", "short" };
    for (int i = 0; i < 5; i++) {
        char line[128];
        snprintf(line, sizeof line, "data pack %s.txt -o %s.h5", names[i], names[i]);
        assert_program(line, 0, "tokens");
    }
    double began = mt_now();
    assert_program("train t.yaml --run straight", 0, "done: 24 steps");
    straight_seconds = mt_now() - began;
    return 0;
}

/* ---- comparing runs
 * ------------------------------------------------------------------------------
 */

/* The lines of a run's metrics without what depends on the clock. */
static inline json_t *read_metrics(const char *run)
{
    char path[640], line[4096];
    snprintf(path, sizeof path, "%s/metrics.jsonl", run);
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    json_t *lines = json_array();
    while (fgets(line, sizeof line, file)) {
        json_error_t error;
        json_t *object = json_loads(line, 0, &error);
        if (!object) fail_msg("%s: '%s': %s", path, line, error.text);
        json_object_del(object, "seconds");
        json_object_del(object, "tokens_per_second");
        json_object_del(object, "mfu");
        json_object_del(object, "memory_bytes");
        json_array_append_new(lines, object);
    }
    fclose(file);
    return lines;
}

static inline void assert_same_metrics(const char *run, const char *other)
{
    json_t *a = read_metrics(run), *b = read_metrics(other);
    if (!json_equal(a, b))
        fail_msg("metrics of %s and %s differ:\n%s\n%s", run, other, json_dumps(a, JSON_COMPACT),
                 json_dumps(b, JSON_COMPACT));
    json_decref(a);
    json_decref(b);
}

static inline void *read_tensor(mt_checkpoint *c, const char *group, const char *name,
                                size_t *bytes)
{
    mt_tensor t;
    assert_ok(mt_checkpoint_tensor(c, group, name, &t));
    *bytes = mt_tensor_bytes(&t);
    t.data = malloc(*bytes);
    assert_non_null(t.data);
    assert_ok(mt_checkpoint_read(c, group, name, &t));
    return t.data;
}

static inline void assert_same_tensor(mt_checkpoint *a, mt_checkpoint *b, const char *group,
                                      const char *name)
{
    size_t x_bytes, y_bytes;
    void *x = read_tensor(a, group, name, &x_bytes), *y = read_tensor(b, group, name, &y_bytes);
    if (x_bytes != y_bytes || memcmp(x, y, x_bytes) != 0) fail_msg("%s/%s differs", group, name);
    free(x);
    free(y);
}

/* Weights, moments and router biases of the last step, bit for bit. */
static inline void assert_same_weights(const char *run, const char *other, int64_t step)
{
    static const char *const groups[] = { "/model", "/optim/m", "/optim/v" };
    char path[256];
    mt_checkpoint *a = NULL, *b = NULL;
    snprintf(path, sizeof path, "%s/ckpt/step_%08lld", run, (long long)step);
    assert_ok(mt_checkpoint_open(&a, path));
    snprintf(path, sizeof path, "%s/ckpt/step_%08lld", other, (long long)step);
    assert_ok(mt_checkpoint_open(&b, path));
    assert_int_equal(mt_checkpoint_get_meta(a)->step, step);
    assert_int_equal(mt_checkpoint_count(a), mt_checkpoint_count(b));
    for (int64_t i = 0; i < mt_checkpoint_count(a); i++)
        for (int g = 0; g < 3; g++) assert_same_tensor(a, b, groups[g], mt_checkpoint_name(a, i));
    assert_same_tensor(a, b, "/state/router_bias", "0");
    assert_same_tensor(a, b, "/state/router_bias", "1");
    mt_checkpoint_close(&a);
    mt_checkpoint_close(&b);
}

static inline void assert_same_run(const char *run, const char *other)
{
    assert_same_metrics(run, other);
    assert_same_weights(run, other, 24);
}

static inline bool file_has(const char *path, const char *words)
{
    char line[4096];
    bool found = false;
    FILE *file = fopen(path, "r");
    while (file && !found && fgets(line, sizeof line, file)) found = strstr(line, words) != NULL;
    if (file) fclose(file);
    return found;
}

static inline bool has_line(const char *run, const char *words)
{
    char path[256];
    snprintf(path, sizeof path, "%s/metrics.jsonl", run);
    return file_has(path, words);
}
