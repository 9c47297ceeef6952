/* compare: groups, pairs, means and errors of made-up runs whose answers are known by hand; what is
 * no finished run is refused. */
#include <jansson.h>
#include <math.h>

#include "tests/support/fault.h"
#include "tests/train/compared.h"

static mt_status open_all(mt_comparison **c, const char *baseline)
{
    static char paths[32][64];
    static char *list[32];
    char words[1024];
    int count = 0;
    snprintf(words, sizeof words, "%s", ALL);
    char *rest = words;
    for (char *name; (name = strsep(&rest, " ")); count++) {
        snprintf(paths[count], sizeof paths[count], "%s", in_dir(name));
        list[count] = paths[count];
    }
    return mt_compare_open(c, list, count, baseline);
}

/* ---- means and errors --------------------------------------------------------------------------
 */

static void assert_mean(const mt_compare_mean *d, int64_t pairs, double mean, double error)
{
    assert_int_equal(d->pairs, pairs);
    assert_true(d->mean == mean);
    if (pairs < 2)
        assert_true(isnan(d->error));
    else /* of three values at 0 and +-1.5 a: variance 2.25 a^2, over 3: sqrt(0.75) a */
        assert_true(fabs(d->error - sqrt(0.75) * error) < 1e-15);
}

static void differences_are_over_pairs(void **state)
{
    (void)state;
    mt_comparison *c;
    put_runs();
    assert_ok(open_all(&c, NULL));
    assert_int_equal(c->run_count, 15);
    assert_int_equal(c->group_count, 5);
    assert_int_equal(c->baseline, 0);
    for (int64_t g = 0; g < 5; g++) assert_int_equal(c->groups[g].count, 3);
    assert_true(c->groups[0].bits == 3 && c->groups[1].bits == 3.25);
    assert_mean(&c->groups[1].difference, 3, 0.25, 0.125);
    assert_mean(&c->groups[2].difference, 3, 0.125, 0.25);
    assert_mean(&c->groups[3].difference, 3, 0, 0);
    assert_mean(&c->groups[4].difference, 1, -0.5, 0);
    static const mt_compare_verdict verdicts[] = { MT_COMPARE_BASELINE, MT_COMPARE_HIGHER,
                                                   MT_COMPARE_NOISE, MT_COMPARE_EQUAL,
                                                   MT_COMPARE_UNKNOWN };
    for (int64_t g = 0; g < 5; g++) assert_int_equal(mt_compare_judge(c, g), verdicts[g]);
    mt_compare_mean d = mt_compare_difference_at(c, 1, 20);
    assert_mean(&d, 3, 0.25, 0.125);
    d = mt_compare_difference_at(c, 1, 25); /* no line of that step */
    assert_mean(&d, 0, 0, 0);
    assert_true(mt_compare_loss_at(c, 0, 20) == 3 + 2);
    assert_true(isnan(mt_compare_loss_at(c, 0, 40)));
    mt_compare_close(&c);
    assert_null(c);
}

static void any_group_can_be_the_baseline(void **state)
{
    (void)state;
    mt_comparison *c;
    put_runs();
    char chosen[64];
    snprintf(chosen, sizeof chosen, "%s", in_dir("mxfp8-2"));
    assert_ok(open_all(&c, chosen));
    assert_int_equal(c->baseline, 1);
    assert_mean(&c->groups[0].difference, 3, -0.25, 0.125);
    assert_int_equal(mt_compare_judge(c, 0), MT_COMPARE_LOWER);
    mt_compare_close(&c);
    char options[256];
    snprintf(options, sizeof options, " --baseline %s/", in_dir("mxfp8-0"));
    assert_verb(compare("bf16-0 mxfp8-0 bf16-1 mxfp8-1 bf16-2 mxfp8-2", options), 0, "-0.2500");
    assert_verb(compare("bf16-0 bf16-1", options), MT_EXIT_USAGE, "the baseline '");
}

/* ---- what is printed and written ---------------------------------------------------------------
 */

static void the_table_says_what_is_noise(void **state)
{
    (void)state;
    put_runs();
    assert_verb(compare(ALL, ""), 0, "group");
    static const char *const rows[] = {
        "    1     3     3.0000                               baseline        recipe.use: bf16\n",
        "    2     3     3.2500     +0.2500     0.1083     3  higher          recipe.use: mxfp8\n",
        "    3     3     3.1250     +0.1250     0.2165     3  within noise    recipe.use: nvfp4\n",
        "    4     3     3.0000     +0.0000     0.0000     3  equal           recipe.use: fp8_curr",
        "          ?     1  no error known  recipe.use: fp8_block\n",
        "1 of the differences is within noise.",
        "1 of the differences rests on one pair: no error is known",
        "2 runs have no run of the same seed in the baseline",
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (!strstr(verb_output, rows[i])) fail_msg("no '%s' in:\n%s", rows[i], verb_output);
    assert_null(strstr(verb_output, "build"));
    assert_verb(compare("bf16-0 bf16-1", ""), 0, "there is nothing to compare");
    put_in("bf16-1", "env.json", "{\"git_revision\": \"abc\", \"kernel_set\": \"avx2\"}");
    assert_verb(compare("bf16-0 bf16-1", ""), 0, "bf16-1 of revision abc, kernel set avx2");
}

static void other_programs_read_the_files(void **state)
{
    (void)state;
    size_t bytes;
    char options[256];
    put_runs();
    snprintf(options, sizeof options, " -o %s", in_dir("out.json"));
    assert_verb(compare(ALL, options), 0, "group");
    json_t *all = json_load_file(in_dir("out.json"), 0, NULL);
    assert_non_null(all);
    assert_int_equal(json_integer_value(json_object_get(all, "baseline")), 1);
    json_t *groups = json_object_get(all, "groups"), *second = json_array_get(groups, 1);
    assert_int_equal(json_array_size(groups), 5);
    assert_string_equal(json_string_value(json_object_get(second, "verdict")), "higher");
    assert_true(json_real_value(json_object_get(second, "difference")) == 0.25);
    json_t *run = json_array_get(json_object_get(second, "runs"), 2);
    assert_int_equal(json_integer_value(json_object_get(run, "seed")), 2);
    assert_true(json_real_value(json_object_get(run, "valid_bits_per_byte")) == 4.0625);
    assert_true(json_is_null(json_object_get(json_array_get(groups, 0), "difference")));
    assert_true(json_is_null(json_object_get(json_array_get(groups, 4), "standard_error")));
    json_decref(all);
    snprintf(options, sizeof options, " -o %s", in_dir("out.csv"));
    assert_verb(compare(ALL, options), 0, "group");
    char *text = get_file(in_dir("out.csv"), &bytes);
    assert_non_null(strstr(text, "bf16-0\",3,0 1 2,3,0,,,baseline,\"recipe.use: bf16\"\n"));
    assert_non_null(strstr(text, "0 1 2,3.25,3,0.25,0.108"));
    assert_non_null(strstr(text, "0 71 72,"));
    free(text);
    assert_verb(compare(ALL, " -o out.txt"), MT_EXIT_USAGE, "must end in .json or .csv");
    snprintf(options, sizeof options, " -o %s", in_dir("nowhere/out.csv"));
    assert_verb(compare(ALL, options), MT_EXIT_FILES, "nowhere");
}

/* They would change the checkpoint, and be removed with it. */
static void results_stay_out_of_checkpoints(void **state)
{
    (void)state;
    static const char *const names[] = { "-o %s/table.json", "-o %s/table.csv",
                                         "--plot %s/curves.png" };
    char options[512] = " ";
    put_runs();
    assert_ok(mt_dir_create(in_dir("whole")));
    put_text(in_dir("whole/DONE"), "");
    put_text(in_dir("whole/model.h5"), "");
    for (int i = 0; i < 3; i++) {
        snprintf(options + 1, sizeof options - 1, names[i], in_dir("whole"));
        assert_verb(compare(ALL, options), MT_EXIT_USAGE,
                    "whole' is a complete checkpoint and would be changed by '");
    }
    assert_false(mt_path_exists(in_dir("whole/table.json")));
}

/* ---- mistakes ----------------------------------------------------------------------------------
 */

static void what_is_no_finished_run_is_refused(void **state)
{
    (void)state;
    static const struct {
        const char *metrics, *words;
        int code;
    } cases[] = {
        { "", "is not finished: no validation loss of step 30, its last line is of step 0", 2 },
        { "{\"step\":10,\"loss\":1}\n{\"step\":20,\"loss\":null}\n{\"step\":30,\"lo",
          "its last line is of step 20", 2 },
        { "{\"step\":30,\"valid_bits_per_byte\":2,\"full\":false}\n", "is not finished", 2 },
        { "{\"step\":20,\"valid_bits_per_byte\":2,\"full\":true}\n", "is not finished", 2 },
        { "{\"step\":30,\"valid_bits_per_byte\":null,\"full\":true}\n", "no finite value", 2 },
        { "{\"step\":10,\"loss\":1}\n{\"step\":20,\n", "metrics.jsonl line 2", 5 },
        { "{\"loss\":1}\n", "metrics.jsonl line 1: no step", 5 },
        { "[]\n", "metrics.jsonl line 1: no step", 5 },
    };
    put_runs();
    put_config("bad", "bf16", 7, "b.h5");
    assert_verb(compare("bad bf16-0", ""), MT_EXIT_USAGE, "bad' is not finished");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        put_in("bad", "metrics.jsonl", cases[i].metrics);
        assert_verb(compare("bf16-0 bad", ""), cases[i].code, cases[i].words);
    }
    put_config("bad", "bf16", 7, "\"\"");
    put_in("bad", "metrics.jsonl", "{\"step\":30,\"loss\":1}\n");
    assert_verb(compare("bad", ""), MT_EXIT_USAGE, "its data.valid is empty");
    put_in("bad", "config.resolved.yaml", "modle: {}\n");
    assert_verb(compare("bad", ""), MT_EXIT_FILES, "modle");
    assert_ok(mt_dir_create(in_dir("empty")));
    assert_verb(compare("bf16-0 empty", ""), MT_EXIT_USAGE,
                "empty' is a directory, not the directory of a run");
    assert_verb(compare("nothing", ""), MT_EXIT_FILES, "there is no run '");
    assert_verb("compare", MT_EXIT_USAGE, "0 arguments given");
}

/* A copy, or an editor, may have left its newline out. */
static void a_last_line_needs_no_newline(void **state)
{
    (void)state;
    size_t bytes;
    char path[256];
    put_runs();
    snprintf(path, sizeof path, "%s", in_dir("bf16-0/metrics.jsonl"));
    char *text = get_file(path, &bytes);
    text[bytes - 1] = '\0';
    put_in("bf16-0", "metrics.jsonl", text);
    assert_verb(compare("bf16-0 bf16-1 mxfp8-0 mxfp8-1", ""), 0, "    2     2.5000 ");
    text[bytes - 2] = '\0'; /* what is cut off is none */
    put_in("bf16-0", "metrics.jsonl", text);
    assert_verb(compare("bf16-0 bf16-1 mxfp8-0 mxfp8-1", ""), MT_EXIT_USAGE,
                "its last line is of step 30");
    free(text);
}

static void runs_must_pair(void **state)
{
    (void)state;
    put_runs();
    assert_verb(compare("bf16-0 mxfp8-1 mxfp8-2", ""), MT_EXIT_USAGE, "share no seed");
    assert_non_null(strstr(verb_output, "its configuration (recipe.use: "));
    assert_verb(compare("bf16-0 mxfp8-0 bf16-0", ""), MT_EXIT_USAGE, "is given twice");
    put_run("copy", "mxfp8", 1, 3);
    assert_verb(compare("bf16-1 mxfp8-1 copy", ""), MT_EXIT_USAGE, "mxfp8-1' and");
    /* without the seed only: another key is another group, and both keys are named */
    put_run("wide", "mxfp8", 1, 3);
    put_config("wide", "mxfp8\"}\nmemory: {loss_chunk: \"64", 1, "b.h5");
    assert_verb(compare("bf16-1 wide", ""), 0, "memory.loss_chunk: 64");
    assert_non_null(strstr(verb_output, "recipe.use: mxfp8"));
    assert_non_null(strstr(verb_output, "memory.loss_chunk: 0"));
}

static void keys_that_change_no_result_make_no_group(void **state)
{
    (void)state;
    static const char *const sections[] = {
        "memory: {recompute: block, offload: saved, defer_wgrad: true",
        "optim: {offload: true",
        "statistics: {every: 7, what_if: [mxfp4], layers: \"*\", tensors: [X]",
        "checkpoint: {every: 7, keep_last: 3, keep_every: 14",
        "parallel: {timeout: 20, keep_gathered: true, expert_capacity: 3",
    };
    char words[256];
    int neutral = 0;
    put_runs();
    for (int i = 0; i < mt_config_key_count; i++) {
        neutral += mt_config_keys[i].neutral;
        assert_false(mt_config_keys[i].neutral && mt_config_keys[i].fixed);
    }
    assert_int_equal(neutral, 14 + 4); /* and train.{eval_every,eval_batches,eager,log_every} */
    for (size_t i = 0; i < sizeof sections / sizeof *sections; i++) {
        snprintf(words, sizeof words, "bf16\"}\n%s}\n# \"", sections[i]);
        put_run("other-1", "bf16", 1, 3);
        put_config("other-1", words, 1, "b.h5");
        assert_verb(compare("bf16-0 other-1 mxfp8-0 mxfp8-1", ""), 0, "    1     2     2.5000 ");
        assert_non_null(strstr(verb_output, "  recipe.use: bf16\n"));
        /* of one seed they are two, which may be what is asked */
        assert_verb(compare("bf16-0 bf16-1 other-1", ""), 0, "    2     1     3.0000 ");
        if (i == 0) assert_non_null(strstr(verb_output, "memory.recompute: block"));
    }
}

static void what_changed_on_the_way_is_said(void **state)
{
    (void)state;
#define CHANGE(step, key, from, to)                                                                \
    "{\"step\":" #step ",\"key\":\"" key "\",\"from\":\"" from "\",\"to\":\"" to "\"}\n"
    char options[256];
    put_runs();
    put_in("mxfp8-0", "changes.jsonl",
           CHANGE(10, "train.steps", "20", "30") CHANGE(10, "optim.lr", "1", "2")
               CHANGE(20, "optim.lr", "2", "3") CHANGE(20, "train.log_every", "5", "10"));
    put_in("bf16-0", "changes.jsonl",
           CHANGE(10, "checkpoint.every", "1", "2") CHANGE(10, "data.valid", "c.h5", "b.h5"));
    snprintf(options, sizeof options, " -o %s", in_dir("changed.json"));
    assert_verb(compare("bf16-0 bf16-1 mxfp8-0 mxfp8-1", options), 0,
                "/mxfp8-0 changed after step 10: train.steps 20 -> 30, optim.lr 1 -> 2.\n");
    assert_non_null(strstr(verb_output, "/mxfp8-0 changed after step 20: optim.lr 2 -> 3.\n"));
    assert_null(strstr(verb_output, "log_every"));
    assert_null(strstr(verb_output, "/bf16-0 changed"));
    json_t *all = json_load_file(in_dir("changed.json"), 0, NULL);
    json_t *group = json_array_get(json_object_get(all, "groups"), 1);
    json_t *changes = json_object_get(json_array_get(json_object_get(group, "runs"), 0), "changes");
    assert_int_equal(json_array_size(changes), 3);
    const json_t *last = json_array_get(changes, 2);
    assert_int_equal(json_integer_value(json_object_get(last, "step")), 20);
    assert_string_equal(json_string_value(json_object_get(last, "to")), "3");
    json_decref(all);
    /* runs of one configuration and seed, of which one came to it later */
    put_run("later-0", "mxfp8", 0, 3);
    put_in("later-0", "changes.jsonl", CHANGE(10, "optim.lr", "1", "3"));
    assert_verb(compare("bf16-0 mxfp8-0 later-0", ""), 0,
                "changed after step 10: optim.lr 1 -> 3\n");
    assert_non_null(strstr(verb_output,
                           "recipe.use: mxfp8, changed after step 10: train.steps 20 -> "
                           "30, optim.lr 1 -> 2, after step 20: optim.lr 2 -> 3\n"));
    assert_verb(compare("mxfp8-0 mxfp8-1 later-0", ""), 0, "");
    put_in("later-0", "changes.jsonl",
           CHANGE(10, "train.steps", "20", "30") CHANGE(10, "optim.lr", "1", "2")
               CHANGE(20, "optim.lr", "2", "3"));
    assert_verb(compare("mxfp8-0 later-0", ""), MT_EXIT_USAGE,
                "have the same configuration and the same seed");
    /* validated when all was done; what its training data held is known */
    put_in("bf16-0", "changes.jsonl",
           CHANGE(10, "data.train", "c.h5", "a.h5") CHANGE(30, "data.valid", "c.h5", "b.h5"));
    put_in("bf16-0", "env.json", "{\"train_corpus\": \"sha256 a\"}");
    assert_verb(compare("bf16-0 mxfp8-0", ""), 0,
                "/bf16-0 changed after step 30: data.valid c.h5 -> b.h5.\n");
    put_in("bf16-0", "changes.jsonl", CHANGE(10, "optim.lr", "1", "2") "{\n");
    assert_verb(compare("bf16-0 mxfp8-0", ""), MT_EXIT_FILES, "bf16-0/changes.jsonl line 2: ");
    assert_int_equal(unlink(in_dir("bf16-0/env.json")), 0);
    assert_int_equal(unlink(in_dir("bf16-0/changes.jsonl")), 0);
    assert_int_equal(unlink(in_dir("mxfp8-0/changes.jsonl")), 0);
#undef CHANGE
}

/* "auto" and "cpu" were the same device, where it was found. */
static void a_device_is_the_one_that_was_found(void **state)
{
    (void)state;
    put_runs();
    put_config("bf16-1", "bf16\"}\ndevice: \"cpu\"\ncheckpoint: {every: \"7", 1, "b.h5");
    assert_verb(compare("bf16-0 bf16-1 mxfp8-0 mxfp8-1", ""), MT_EXIT_USAGE, "(device: cpu)");
    for (int i = 0; i < 2; i++)
        put_in(i ? "bf16-1" : "bf16-0", "env.json", "{\"device\": \"cpu\"}");
    assert_verb(compare("bf16-0 bf16-1 mxfp8-0 mxfp8-1", ""), 0, "    1     2     2.5000 ");
    put_in("bf16-0", "env.json", "{\"device\": \"cuda\"}");
    assert_verb(compare("bf16-0 bf16-1 mxfp8-0 mxfp8-1", ""), MT_EXIT_USAGE, "(device: cpu)");
    for (int i = 0; i < 2; i++)
        assert_int_equal(unlink(in_dir(i ? "bf16-1/env.json" : "bf16-0/env.json")), 0);
}

/* Metrics once called bits a token those of a byte. */
static void the_old_name_of_bits_a_token_is_known(void **state)
{
    (void)state;
    static const char tokens[] = "{\"step\":30,\"valid_bits_per_token\":2,\"full\":true}\n";
    put_runs();
    put_in("mxfp8-0", "metrics.jsonl", tokens);
    for (int i = 0; i < 2; i++) {
        assert_verb(compare(i ? "bf16-0 mxfp8-0" : "mxfp8-0 bf16-0", ""), 0, "bits/token");
        assert_non_null(strstr(verb_output, "/bf16-0 are taken for bits per token, as /"));
        assert_non_null(strstr(verb_output, "/mxfp8-0 has them on the same data.valid.\n"));
    }
    assert_verb(compare("bf16-0 bf16-1 mxfp8-0", ""), 0, "/bf16-0 and 1 more are taken for bits");
    assert_verb(compare("mxfp8-0", ""), 0, "bits/token");
    assert_null(strstr(verb_output, "are taken for"));
    put_in("bf16-0", "env.json", "{\"valid_corpus\": \"sha256 v\"}");
    assert_verb(compare("bf16-0 mxfp8-0", ""), MT_EXIT_USAGE, "bits per token: they have no");
    assert_int_equal(unlink(in_dir("bf16-0/env.json")), 0);
    put_config("mxfp8-0", "mxfp8", 0, "c.h5");
    assert_verb(compare("bf16-0 mxfp8-0", ""), MT_EXIT_USAGE, "bits per token: they have no");
}

/* It was allowed when the run was made. */
static void a_recipe_that_is_refused_now_is_compared(void **state)
{
    (void)state;
    put_runs();
    put_run("old-0", "fprop=bf16 dgrad=bf16 wgrad=mxfp8:source=dequantized", 0, 2);
    assert_verb(compare("bf16-0 old-0", ""), 0, "recipe.use: \"fprop=bf16");
}

/* Another file may lie under a name by the time of the next run. */
static void corpora_are_compared_by_what_they_hold(void **state)
{
    (void)state;
#define CORPORA(train, valid) "{\"train_corpus\": \"" train "\", \"valid_corpus\": \"" valid "\"}"
    put_runs();
    put_in("bf16-0", "env.json", CORPORA("sha256 a", "sha256 v"));
    put_in("mxfp8-0", "env.json", CORPORA("sha256 a", "sha256 v"));
    assert_verb(compare("bf16-1 bf16-0 mxfp8-1 mxfp8-0", ""), 0, "configuration");
    assert_null(strstr(verb_output, "Not all runs read"));
    put_in("mxfp8-0", "env.json", CORPORA("sha256 b", "sha256 v"));
    assert_verb(compare("bf16-1 bf16-0 mxfp8-1 mxfp8-0", ""), 0,
                "Not all runs read the same in a.h5: ");
    assert_non_null(strstr(verb_output, "bf16-0 sha256 a, "));
    assert_non_null(strstr(verb_output, "mxfp8-0 sha256 b.\n"));
    put_in("mxfp8-1", "env.json", CORPORA("sha256 b", "sha256 v")); /* wherever they lie */
    put_run("mxfp8-1", "mxfp8", 1, 3.5);
    put_config("mxfp8-1", "mxfp8", 1, "elsewhere/b.h5");
    assert_verb(compare("bf16-0 bf16-1 mxfp8-1 mxfp8-0", ""), 0, "configuration");
    assert_null(strstr(verb_output, "elsewhere"));
    put_run("mxfp8-1", "mxfp8", 1, 3.5);
    assert_int_equal(unlink(in_dir("mxfp8-1/env.json")), 0);
    put_in("mxfp8-0", "env.json", CORPORA("sha256 a", "sha256 w"));
    assert_verb(compare("bf16-1 bf16-0 mxfp8-1 mxfp8-0", ""), MT_EXIT_USAGE,
                "bf16-0' was validated on sha256 v, ");
    assert_non_null(strstr(verb_output, "mxfp8-0' on sha256 w: they have no difference"));
    assert_verb(compare("bf16-1 mxfp8-1 mxfp8-0", ""), 0, "configuration");
    assert_int_equal(unlink(in_dir("bf16-0/env.json")), 0);
    assert_int_equal(unlink(in_dir("mxfp8-0/env.json")), 0);
#undef CORPORA
}

static void a_damaged_environment_is_named(void **state)
{
    (void)state;
    put_runs();
    put_in("mxfp8-0", "env.json", "{\"git_revision\": \"abc\",\n\"kernel_s");
    assert_verb(compare("bf16-0 mxfp8-0", ""), MT_EXIT_FILES, "mxfp8-0/env.json line 2: ");
    assert_int_equal(unlink(in_dir("mxfp8-0/env.json")), 0);
}

static void every_allocation_may_fail(void **state)
{
    (void)state;
    mt_comparison *c;
    char out[64], *text;
    put_runs();
    assert_ok(open_all(&c, NULL)); /* what stays allocated after the first call is allocated now */
    mt_compare_close(&c);
    int64_t live = fault_live();
    bool failed = true;
    for (int64_t n = 1; failed; n++) {
        fault_arm(n, FAULT_ONCE);
        mt_status status = open_all(&c, NULL);
        failed = fault_disarm();
        assert_true((status == MT_OK) == !failed && (c != NULL) == !failed);
        if (failed) assert_int_equal(status, MT_ENOMEM);
        mt_compare_close(&c);
        assert_int_equal(fault_live(), live);
    }
    assert_ok(open_all(&c, NULL));
    live = fault_live();
    static const char *const names[] = { "f.json", "f.csv" };
    for (int i = 0; i < 2; i++) {
        snprintf(out, sizeof out, "%s", in_dir(names[i]));
        failed = true;
        for (int64_t n = 1; failed; n++) {
            fault_arm(n, FAULT_ONCE);
            mt_status status = mt_compare_write(c, out);
            failed = fault_disarm();
            assert_int_equal(status, failed ? MT_ENOMEM : MT_OK);
            assert_int_equal(fault_live(), live);
        }
    }
    fault_arm(1, FAULT_ONCE);
    assert_int_equal(mt_compare_configuration(&text, c, 0), MT_ENOMEM);
    assert_true(fault_disarm() && !text);
    mt_compare_close(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(differences_are_over_pairs),
        cmocka_unit_test(any_group_can_be_the_baseline),
        cmocka_unit_test(the_table_says_what_is_noise),
        cmocka_unit_test(other_programs_read_the_files),
        cmocka_unit_test(results_stay_out_of_checkpoints),
        cmocka_unit_test(what_is_no_finished_run_is_refused),
        cmocka_unit_test(a_last_line_needs_no_newline),
        cmocka_unit_test(runs_must_pair),
        cmocka_unit_test(keys_that_change_no_result_make_no_group),
        cmocka_unit_test(what_changed_on_the_way_is_said),
        cmocka_unit_test(a_device_is_the_one_that_was_found),
        cmocka_unit_test(the_old_name_of_bits_a_token_is_known),
        cmocka_unit_test(a_recipe_that_is_refused_now_is_compared),
        cmocka_unit_test(corpora_are_compared_by_what_they_hold),
        cmocka_unit_test(a_damaged_environment_is_named),
        cmocka_unit_test(every_allocation_may_fail),
    };
    return cmocka_run_group_tests(tests, files_setup, files_teardown);
}
