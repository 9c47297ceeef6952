/* A whole run from the outside: what it writes, and that stopping, killing and resuming change no
 * bit of it. */
#include "tests/train/runs.h"

#include <math.h>

#include "train/config.h"
#include "train/rundir.h"

/* ---- going straight through
 * ----------------------------------------------------------------------
 */

static void a_run_leaves_what_it_promises(void **state)
{
    (void)state;
    assert_int_equal(access("straight/config.resolved.yaml", F_OK), 0);
    assert_int_equal(access("straight/ckpt/latest", F_OK), 0);
    assert_int_equal(access("straight/ckpt/step_00000020/DONE", F_OK), 0);
    assert_int_equal(access("straight/ckpt/step_00000024/DONE", F_OK), 0);
    assert_int_equal(access("straight/ckpt/step_00000015", F_OK), -1); /* keep_last: 2 */
    json_t *env = json_load_file("straight/env.json", 0, NULL);
    assert_non_null(json_object_get(env, "kernel_set"));
    assert_non_null(json_object_get(env, "gemm_path"));
    static const char *const corpora[] = { "train_corpus", "valid_corpus" };
    for (int i = 0; i < 2; i++) {
        const char *holds = json_string_value(json_object_get(env, corpora[i]));
        assert_non_null(holds);
        assert_true(strstr(holds, "sha256 ") && strstr(holds, " tokens"));
    }
    json_decref(env);
    json_t *lines = read_metrics("straight");
    assert_int_equal(json_array_size(lines),
                     24 + 3 + 1); /* steps; evaluations at 6, 12, 18; the last */
    double first = json_number_value(json_object_get(json_array_get(lines, 0), "loss"));
    json_t *final = json_array_get(lines, json_array_size(lines) - 1);
    assert_true(json_is_true(json_object_get(final, "full")));
    assert_true(json_number_value(json_object_get(final, "valid_loss")) < first);
    json_decref(lines);
    assert_program("eval straight", 0, "bits/byte");
    assert_program("sample straight --prompt and --tokens 5", 0, "and");
    assert_program("train t.yaml --run straight", 2, "not empty: --resume");
    assert_program("train t.yaml --run straight --resume", 0,
                   "done: 24 steps, all made before, straight/ckpt/step_00000024");
    assert_non_null(strstr(program_text, ", 1 thread\n"));
    assert_program("train straight/config.resolved.yaml --run again", 0, "done");
    assert_same_run("straight", "again");
}

/* The last evaluation of the run, made again by the verb that does nothing else. */
static void assert_evaluates_alike(const char *run)
{
    json_t *lines = read_metrics(run);
    json_t *final = json_array_get(lines, json_array_size(lines) - 1);
    char words[64], line[64];
    snprintf(words, sizeof words, "loss %.6f, %.4f bits/byte",
             json_number_value(json_object_get(final, "valid_loss")),
             json_number_value(json_object_get(final, "valid_bits_per_byte")));
    json_decref(lines);
    snprintf(line, sizeof line, "eval %s", run);
    assert_program(line, 0, words);
}

static void eval_repeats_the_last_evaluation(void **state)
{
    (void)state;
    assert_evaluates_alike("straight");
    char text[2048];
    snprintf(text, sizeof text, "%srecipe: fprop=nvfp4:sr backward=high_precision\n", config);
    write_file("drawn.yaml", text);
    assert_program("train drawn.yaml --run drawn --set train.steps=3", 0, "done: 3 steps in ");
    assert_evaluates_alike("drawn"); /* stochastic rounding draws the same */
}

static void samples_depend_on_the_seed_alone(void **state)
{
    (void)state;
    static char first[PROGRAM_OUTPUT];
    assert_program("sample straight --prompt the --tokens 80 --seed 5 --top-k 20", 0, "the");
    strcpy(first, program_text);
    assert_program("sample straight --prompt the --tokens 80 --seed 5 --top-k 20", 0, "the");
    assert_string_equal(first, program_text);
    assert_program("sample straight --prompt the --tokens 80 --seed 6 --top-k 20", 0, "the");
    assert_string_not_equal(first, program_text);
    assert_null(strstr(program_text, "of the prompt"));
    assert_program("sample straight --prompt a-prompt-of-as-many-as-33-letters --tokens 1", 0,
                   "of the prompt's 33 tokens only the last 32 are read");
    assert_program("sample straight --prompt a-prompt-of-33-letters --tokens 1 --sequence 8", 0,
                   "of the prompt's 22 tokens only the last 8 are read");
    assert_program("sample straight --sequence 33", 2,
                   "sequences of 33 tokens: the model takes 1 to 32");
}

/* Routers' biases are in the run, and have no place in what is exported. */
static void what_an_export_leaves_out_is_said(void **state)
{
    (void)state;
    const char *left = "not in it: the biases that routers choose experts with";
    assert_program("export straight straight-hf", 0, left);
    assert_null(strstr(program_text, "capacity_factor"));
    assert_null(strstr(program_text, "heads of"));
    assert_program("import straight-hf -o imported", 0, "imported");
    assert_program("export imported imported-hf", 0, "imported-hf: from imported");
    assert_null(strstr(program_text, "not in it"));
    assert_program("train t.yaml --run full-experts --set train.steps=1 "
                   "--set optim.warmup_steps=0 --set model.router_bias_update_rate=0 "
                   "--set model.capacity_factor=1.5",
                   0, "done");
    assert_program("export full-experts full-hf", 0,
                   "experts that drop rows (capacity_factor 1.5)");
    assert_null(strstr(program_text, "biases"));
    assert_program("train t.yaml --run wide-heads --set train.steps=1 --set optim.warmup_steps=0 "
                   "--set model.model_type=olmoe --set model.head_dim=32",
                   0, "done");
    assert_program("export wide-heads wide-hf", 0, "not in it: heads of 32");
    pid_t child = program_start("export straight cut-hf", "1", 4096); /* bytes of any file */
    assert_int_equal(program_wait(child), MT_EXIT_FILES);
    assert_int_equal(access("cut-hf", F_OK), -1);
}

/* Also where training keeps moments, gradients and masters as that dtype could not. */
static void eval_and_sample_compute_in_any_dtype(void **state)
{
    (void)state;
    static const char *const dtypes[] = { "f64", "f32", "bf16" };
    assert_program("train t.yaml --run stored --set train.steps=1 --set optim.warmup_steps=0 "
                   "--set train.dtype=bf16 --set train.grad_dtype=bf16 --set optim.moments=bf16 "
                   "--set optim.master=bf16+i16",
                   0, "done");
    for (int i = 0; i < 3; i++) {
        char line[128];
        snprintf(line, sizeof line, "eval stored --dtype %s", dtypes[i]);
        assert_program(line, 0, "bits/byte");
        snprintf(line, sizeof line, "sample stored --prompt and --tokens 1 --dtype %s", dtypes[i]);
        assert_program(line, 0, "and");
    }
}

static void nothing_that_should_be_neutral_changes_a_bit(void **state)
{
    (void)state;
    static const struct {
        const char *threads, *options;
    } variants[] = {
        { "2", "" },
        { "1", " --set memory.recompute=block" },
        { "1", " --set memory.recompute=activation" },
        { "1", " --set memory.offload=saved" },
        { "2", " --set memory.defer_wgrad=true --set memory.offload=saved --set "
               "memory.recompute=block" },
    };
    for (size_t i = 0; i < sizeof variants / sizeof variants[0]; i++) {
        char line[512];
        snprintf(line, sizeof line, "train t.yaml --run neutral%zu%s", i, variants[i].options);
        assert_int_equal(program_wait(program_start(line, variants[i].threads, 0)), 0);
        snprintf(line, sizeof line, "neutral%zu", i);
        assert_same_run("straight", line);
    }
}

/* ---- stopping and going on
 * -----------------------------------------------------------------------
 */

/* Runs and interrupts at moments drawn from `seed` within `longest` seconds, in the end longer ones
 * (a busy machine may come no further than a checkpoint in these), until a session comes to its
 * end. Returns how many were interrupted. */
static int interrupt_run(const char *run, const char *file, int signal_number, uint64_t seed,
                         double longest)
{
    char line[256];
    snprintf(line, sizeof line, "train %s --run %s --resume", file, run);
    for (int session = 0; session < 200; session++) {
        pid_t child = program_start(line, "1", 0);
        nap(longest * (1 + session / 8.0) * mt_rng_uniform(seed, 1, (uint64_t)session));
        kill(child, signal_number);
        int code = program_wait(child);
        bool killed = code == 1000 + signal_number; /* SIGTERM: before it is listened for */
        bool saved = signal_number != SIGKILL && code == MT_EXIT_PREEMPTED;
        if (code == 0) return session;
        if (!killed && !saved)
            fail_msg("session %d ended with %d:\n%s", session, code, program_text);
    }
    fail_msg("run %s does not end", run);
    return 0;
}

/* Several runs, each the same as the straight one, the later ones with less time before a signal:
 * the time that a run takes was measured once, on a machine that may do other things. */
static void run_with_interruptions(const char *name, const char *straight, const char *file,
                                   int signal_number, uint64_t seed, int times)
{
    int interrupted = 0;
    for (int round = 1; interrupted < times; round++) {
        char run[32];
        assert_true(round < 20);
        snprintf(run, sizeof run, "%s%d", name, round);
        interrupted += interrupt_run(run, file, signal_number, seed + (uint64_t)round,
                                     straight_seconds / round);
        assert_same_run(straight, run);
    }
}

static void killed_runs_go_on_bit_for_bit(void **state)
{
    (void)state;
    run_with_interruptions("killed", "straight", "t.yaml", SIGKILL, 1, 3);
}

/* Killed while its first file was written, which is begun anew. */
static void a_run_that_had_hardly_begun_begins(void **state)
{
    (void)state;
    static const char *const lines[] = { "train t.yaml --run hardly0 --resume",
                                         "train t.yaml --run hardly1" };
    for (int i = 0; i < 2; i++) {
        char run[16], path[64];
        snprintf(run, sizeof run, "hardly%d", i);
        snprintf(path, sizeof path, "%s/config.resolved.yaml.tmp", run);
        assert_int_equal(mkdir(run, 0700), 0);
        write_file(path, "seed: 1, cut off");
        assert_program(lines[i], 0, "done: 24 steps");
        assert_same_run("straight", run);
        assert_int_equal(access(path, F_OK), -1);
    }
}

static void stopped_runs_go_on_bit_for_bit(void **state)
{
    (void)state;
    run_with_interruptions("stopped", "straight", "t.yaml", SIGTERM, 2, 3);
}

/* Amax histories, scales, draws and the step at which recipes change come back as well. */
static void quantized_runs_go_on_bit_for_bit(void **state)
{
    (void)state;
    char text[2048];
    snprintf(text, sizeof text,
             "%srecipe:\n  delayed: {history: 4}\n  use:\n  - {use: fp8_delayed}\n"
             "  - {steps: 10-16, use: nvfp4}\n  - {layers: '*experts*', steps: 20-, "
             "use: fprop=mxfp8:sr dgrad=nvfp4 wgrad=mxfp4}\n",
             config);
    write_file("q.yaml", text);
    assert_program("train q.yaml --run quantized", 0, "done: 24 steps");
    run_with_interruptions("interrupted", "quantized", "q.yaml", SIGKILL, 3, 2);
}

/* Puts a NaN into a weight of the run's checkpoint after five steps, or into the first moment that
 * will be the weight's at the next step. */
static void poison_checkpoint(const char *run, const char *weight, bool moment)
{
    const float nan = (float)NAN;
    char path[256], *text = NULL;
    size_t bytes = 0;
    mt_config c;
    mt_trainer *trainer;
    snprintf(path, sizeof path, "%s/config.resolved.yaml", run);
    assert_ok(mt_file_read_all(&text, &bytes, path, 1 << 20));
    assert_ok(mt_config_parse(&c, path, text, bytes, NULL, 0));
    assert_ok(mt_trainer_create(&trainer, test_device(), &c.trainer));
    snprintf(path, sizeof path, "%s/ckpt/step_00000005", run);
    assert_ok(mt_checkpoint_load(trainer, path, NULL, true));
    mt_checkpoint *checkpoint;
    assert_ok(mt_checkpoint_open(&checkpoint, path));
    char *corpus = strdup(mt_checkpoint_get_meta(checkpoint)->corpus);
    mt_checkpoint_close(&checkpoint);
    mt_param_store *params = mt_model_params(mt_trainer_model(trainer));
    mt_param *w = mt_param_store_find(params, weight);
    assert_non_null(w);
    if (moment)
        ((float *)mt_optimizer_m(mt_trainer_optimizer(trainer)))[w->offset] = nan;
    else
        assert_ok(mt_param_write_master(params, w, 0, 1, &nan));
    const mt_checkpoint_info info = { .run_config = text, .git_revision = "", .corpus = corpus };
    snprintf(path, sizeof path, "%s/ckpt", run);
    assert_ok(mt_checkpoint_save(path, trainer, &info, NULL));
    mt_trainer_destroy(&trainer);
    free(corpus), free(text);
}

/* FP4 has no NaN: the loss stays finite, and the run says what it trains with, until it would save
 * it; it does not begin with it. */
static void nans_are_reported(void **state)
{
    (void)state;
    char text[2048];
    snprintf(text, sizeof text, "%srecipe: fprop=mxfp4 dgrad=mxfp4 wgrad=mxfp4\n", config);
    write_file("n.yaml", text);
    assert_program("train n.yaml --run poisoned --set train.steps=5", 0, "done: 5 steps");
    assert_true(has_line("poisoned", "\"nan\":0,"));
    poison_checkpoint("poisoned", "model.layers.1.mlp.experts.down", true);
    assert_program("train n.yaml --run poisoned --resume --set train.steps=10 "
                   "--set train.log_every=5 --set train.eval_every=0 --set data.valid=",
                   3,
                   "numerics: step 10: the weight model.layers.1.mlp.experts.down holds a NaN or "
                   "an infinity; nothing was saved after poisoned/ckpt/step_00000005");
    assert_non_null(strstr(program_text, "NaN met in quantizing W of "
                                         "model.layers.1.mlp.experts.down, members 0\n"));
    assert_true(has_line("poisoned", "{\"step\":10,"));
    assert_true(has_line("poisoned", "\"nan\":5,"));
    poison_checkpoint("poisoned", "model.layers.1.mlp.experts.down", false);
    assert_program("train n.yaml --run poisoned --resume", 3,
                   "numerics: poisoned/ckpt/step_00000005: the weight "
                   "model.layers.1.mlp.experts.down holds a NaN or an infinity");
}

/* Waits until the run's metrics hold `words`. */
static void await_line(const char *run, const char *words)
{
    for (int i = 0; i < 6000 && !has_line(run, words); i++) nap(0.01);
    assert_true(has_line(run, words));
}

static const char slow_eval[] =
    "train t.yaml --run %s --resume --set data.valid=large.h5 --set data.sequence_length=8 "
    "--set train.eval_batches=0 --set train.eval_every=1 --set train.steps=%d";
enum { FEW = 2, ENDLESS = 1000000 };

static void a_signal_in_an_evaluation_stops_the_run_there(void **state)
{
    (void)state;
    char line[512];
    snprintf(line, sizeof line, slow_eval, "inside", FEW);
    pid_t child = program_start(line, "1", 0);
    await_line("inside", "{\"step\":1,");
    kill(child, SIGUSR1); /* the evaluation of step 1 has begun */
    assert_int_equal(program_wait(child), MT_EXIT_PREEMPTED);
    assert_non_null(strstr(program_text, "SIGUSR1 after step 1 of 2"));
    assert_false(has_line("inside", "valid_loss"));
    assert_int_equal(program(line), 0);
    snprintf(line, sizeof line, slow_eval, "outside", FEW);
    assert_int_equal(program(line), 0);
    assert_same_metrics("inside", "outside");
    assert_same_weights("inside", "outside", 2);
}

static void a_second_signal_quits_at_once(void **state)
{
    (void)state;
    char line[512];
    snprintf(line, sizeof line, slow_eval, "twice", ENDLESS);
    pid_t child = program_start(line, "1", 0);
    await_line("twice", "{\"step\":1,");
    kill(child, SIGSTOP); /* so that both arrive before it can act on one */
    kill(child, SIGTERM);
    kill(child, SIGUSR1);
    kill(child, SIGCONT);
    int code = program_wait(child);
    if (code != 128 + SIGTERM && code != 128 + SIGUSR1) fail_msg("ended with %d", code);
    assert_int_equal(access("twice/ckpt/step_00000001", F_OK), -1);
}

/* What is said of going on is a command for a shell, which goes on: also where the directory was
 * chosen by the program, and where words are not plain. */
static void a_stopped_run_says_how_to_go_on(void **state)
{
    (void)state;
    static const char begin[] = "; to go on: ";
    static const char *const lines[] = {
        "train t.yaml --set train.steps=1500 --set checkpoint.every=1000 --set train.eval_every=0 "
        "--set statistics.layers=*",
        "train --run it's --set train.steps=1500 --set checkpoint.every=1000 --set "
        "train.eval_every=0 -- t.yaml",
        "train t.yaml --run it's --resume --force --set train.seed=9 --set train.steps=3000 "
        "--set checkpoint.every=1000 --set train.eval_every=0",
    };
    for (int i = 0; i < 3; i++) {
        char command[2048];
        unlink("out");
        pid_t child = program_start(lines[i], "1", 0);
        for (int k = 0; k < 30000 && !file_has("out", "step 1"); k++) nap(0.002);
        kill(child, SIGINT);
        assert_int_equal(program_wait(child), MT_EXIT_PREEMPTED);
        const char *said = strstr(program_text, begin);
        if (!said) fail_msg("no '%s':\n%s", begin, program_text);
        said += sizeof begin - 1;
        assert_null(strstr(said, "--force")); /* what is saved is of this seed */
        snprintf(command, sizeof command, "{ %.*s\n} > out 2>&1", (int)strcspn(said, "\n"), said);
        if (system(command) != 0) fail_msg("%s", command);
        assert_true(file_has("out", "resumed from"));
        assert_true(file_has("out", i < 2 ? "done: 1500 steps" : "done: 3000 steps"));
    }
}

static void a_run_has_one_process(void **state)
{
    (void)state;
    char line[512];
    snprintf(line, sizeof line, slow_eval, "busy", ENDLESS);
    pid_t child = program_start(line, "1", 0);
    await_line("busy", "{\"step\":1,");
    assert_program(line, 2, "in use by another process");
    kill(child, SIGKILL);
    program_wait(child);
}

/* A small vocabulary is not one of bytes unless the corpus says so; a large one may be. */
static void the_corpus_says_what_tokens_are(void **state)
{
    (void)state;
    FILE *file = fopen("numbers.bin", "wb");
    assert_non_null(file);
    for (uint16_t i = 0; i < 2000; i++) fwrite(&(uint16_t){ i % 64 }, sizeof i, 1, file);
    assert_int_equal(fclose(file), 0);
    assert_program("data pack numbers.bin --vocab-size 64 -o numbers.h5", 0, "2000 tokens");
    assert_program("train t.yaml --run numbers --set train.steps=1 --set optim.warmup_steps=0 "
                   "--set data.train=numbers.h5 --set data.valid=numbers.h5 "
                   "--set model.vocab_size=64",
                   0, "bits/token");
    json_t *lines = read_metrics("numbers"); /* nobody knows their bytes */
    const json_t *last = json_array_get(lines, json_array_size(lines) - 1);
    assert_null(json_object_get(last, "valid_bits_per_byte"));
    assert_true(fabs(json_number_value(json_object_get(last, "valid_bits_per_token")) * log(2) -
                     json_number_value(json_object_get(last, "valid_loss"))) < 1e-9);
    json_decref(lines);
    assert_program("compare numbers", 0, "bits/token");
    assert_program("compare straight numbers", 2, "'numbers' bits per token");
    assert_program("sample numbers --prompt 40,41 --tokens 2 --temperature 0", 0, "40,41 ");
    assert_int_equal(strspn(program_text, "0123456789, \n"), strlen(program_text));
    assert_program("sample numbers --prompt and", 2, "'and' is no number of a token");
    assert_program("eval numbers", 0, "bits/token");
    assert_program("train t.yaml --run padded --set train.steps=1 --set optim.warmup_steps=0 "
                   "--set model.vocab_size=300",
                   0, "bits/byte");
    assert_program("sample padded --prompt and --tokens 2", 0, "and");
    assert_int_equal(rename("train.h5", "elsewhere.h5"), 0); /* data.valid says it, too */
    assert_program("sample padded --prompt and --tokens 2", 0, "and");
    assert_null(strstr(program_text, "cannot be read"));
    assert_int_equal(rename("elsewhere.h5", "train.h5"), 0);
    assert_int_equal(rename("numbers.h5", "elsewhere.h5"), 0);
    assert_program("sample numbers --prompt and --tokens 1", 2,
                   "): its tokens are read and written as numbers, as its vocabulary has 64");
    assert_non_null(strstr(program_text, "'and' is no number of a token: this model reads numbers "
                                         "from 0 to 63, as in --prompt \"7 0 12\""));
    assert_program("sample numbers --prompt 40,41 --tokens 2", 0, "40,41 ");
}

static void another_model_or_corpus_is_refused(void **state)
{
    (void)state;
    assert_program("train t.yaml --run moved --set train.steps=3", 0, "done");
    assert_program("train t.yaml --run moved --resume --set model.num_experts=8", 2,
                   "model.num_experts was 4 and is 8 now");
    assert_program("train t.yaml --run moved --resume --set train.batch_size=8", 2,
                   "train.batch_size");
    assert_program("train t.yaml --run moved --resume --set recipe=mxfp8", 2,
                   "recipe.use was none and is mxfp8 now; it belongs to the run");
    assert_program("train t.yaml --run moved --resume --set recipe.delayed.history=16", 2,
                   "recipe.delayed.history was 1024 and is 16 now");
    assert_program("train t.yaml --run moved --resume --set data.train=other.h5", 2, "corpus");
    assert_program("train t.yaml --run moved --resume --force --set model.hidden_size=64", 2, "");
    assert_program("train t.yaml --run moved --resume --set train.steps=2", 2, "has made 3 steps");
    assert_program("train t.yaml --run moved --resume --set train.steps=5 --set optim.lr=1e-3", 0,
                   "optim.lr 0.003 -> 0.001");
    assert_program("train t.yaml --run moved --resume --set train.steps=6 "
                   "--set model.router_aux_loss_coef=0.02",
                   0, "model.router_aux_loss_coef 0.01 -> 0.02");
    assert_program(
        "train t.yaml --run moved --resume --force --set train.steps=7 --set data.train=other.h5",
        0, "done");
    assert_program("train t.yaml --resume", 2, "--resume needs --run");
}

/* What changes bits or losses without being in the configuration. */
static void other_kernels_or_another_validation_are_said(void **state)
{
    (void)state;
    const char *const set = getenv("MIXTAPE_KERNELS");
    char *before = set ? strdup(set) : NULL;
    assert_int_equal(system("cp valid.h5 own.h5"), 0);
    assert_program("train t.yaml --run told --set data.valid=own.h5 --set train.steps=2", 0,
                   "done");
    bool portable = strstr(program_text, "kernels portable");
    assert_program("train t.yaml --run told --resume --set data.valid=own.h5 --set train.steps=3",
                   0, "done");
    assert_null(strstr(program_text, "kernel_set"));
    assert_null(strstr(program_text, "valid_corpus"));
    assert_int_equal(system("cp other.h5 own.h5"), 0);
    setenv("MIXTAPE_KERNELS", "portable", 1);
    assert_program("train t.yaml --run told --resume --set data.valid=own.h5 --set train.steps=4",
                   0, "valid_corpus sha256 ");
    assert_true(portable || strstr(program_text, " -> portable"));
    if (before)
        setenv("MIXTAPE_KERNELS", before, 1);
    else
        unsetenv("MIXTAPE_KERNELS");
    free(before);
}

/* Puts another recipe into what a run has recorded, one that was allowed then. */
static void record_recipe(const char *run, const char *recipe)
{
    char path[256], *text, *changed;
    size_t bytes;
    snprintf(path, sizeof path, "%s/config.resolved.yaml", run);
    assert_ok(mt_file_read_all(&text, &bytes, path, 1 << 20));
    char *use = strstr(text, "  use: ");
    assert_non_null(use);
    *use = '\0';
    assert_true(asprintf(&changed, "%s  use: %s%s", text, recipe, strchr(use + 1, '\n')) > 0);
    write_file(path, changed);
    free(text), free(changed);
}

static void a_run_whose_recipe_is_refused_now_takes_another(void **state)
{
    (void)state;
    assert_program("train t.yaml --run refused --set train.steps=3", 0, "done");
    record_recipe("refused", "fprop=bf16 dgrad=bf16 wgrad=mxfp8:source=dequantized");
    assert_program("train t.yaml --run refused --resume --set train.steps=4", 2,
                   "recipe.use was \"fprop=bf16 dgrad=bf16 wgrad=mxfp8:source=dequantized\" and is "
                   "none now");
    assert_program("train t.yaml --run refused --resume --force --set train.steps=4", 0, "done");
}

static double number_at(const char *run, int line, const char *key)
{
    json_t *lines = read_metrics(run);
    double x = json_number_value(json_object_get(json_array_get(lines, (size_t)line), key));
    json_decref(lines);
    return x;
}

/* Three batches of four sequences, then batches of two: as after six of them. The rate is too small
 * to change a weight. */
static void other_batches_go_on_at_the_same_place_in_the_data(void **state)
{
    (void)state;
#define STILL " --set optim.lr=1e-30 --set model.router_bias_update_rate=0 --set train.eval_every=0"
    assert_program("train t.yaml --run twos --set train.steps=9 --set train.batch_size=2" STILL, 0,
                   "done");
    assert_program("train t.yaml --run place --set train.steps=3" STILL, 0, "done");
    assert_program("train t.yaml --run place --resume --force --set train.steps=5 "
                   "--set train.batch_size=2" STILL,
                   0, "place/ckpt/step_00000003, after 12 sequences of 32 tokens");
    assert_program("train t.yaml --run place --resume --set train.steps=6 "
                   "--set train.batch_size=2" STILL,
                   0, "place/ckpt/step_00000005, after 16 sequences of 32 tokens");
    /* an evaluation stands after the third line, and one after the fifth */
    static const int same[][2] = { { 4, 6 }, { 5, 7 }, { 7, 8 } };
    for (int i = 0; i < 3; i++) {
        assert_true(number_at("place", same[i][0], "loss") ==
                    number_at("twos", same[i][1], "loss"));
        assert_true(number_at("place", same[i][0], "tokens") ==
                    number_at("twos", same[i][1], "tokens"));
    }
    assert_program("train t.yaml --run place --resume --force --set train.steps=7 "
                   "--set train.batch_size=2 --set data.sequence_length=64" STILL,
                   0, "after 9 sequences of 64 tokens");
#undef STILL
}

/* Also within one second, and one after the other has ended. */
static void runs_begun_together_have_directories_of_their_own(void **state)
{
    (void)state;
    enum { RUNS = 3 };
    static mt_config c;
    static mt_rundir dirs[RUNS];
    char *changed;
    assert_ok(mt_config_defaults(&c));
    snprintf(c.name, sizeof c.name, "sweep");
    for (int i = 0; i < RUNS; i++) {
        assert_ok(mt_rundir_open(&dirs[i], &changed, &c, &(mt_rundir_options){ .path = NULL }));
        if (i == 1) mt_rundir_close(&dirs[i]);
        for (int j = 0; j < i; j++) assert_string_not_equal(dirs[i].path, dirs[j].path);
    }
    for (int i = 0; i < RUNS; i++) mt_rundir_close(&dirs[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_run_leaves_what_it_promises),
        cmocka_unit_test(eval_repeats_the_last_evaluation),
        cmocka_unit_test(samples_depend_on_the_seed_alone),
        cmocka_unit_test(what_an_export_leaves_out_is_said),
        cmocka_unit_test(eval_and_sample_compute_in_any_dtype),
        cmocka_unit_test(nothing_that_should_be_neutral_changes_a_bit),
        cmocka_unit_test(killed_runs_go_on_bit_for_bit),
        cmocka_unit_test(a_run_that_had_hardly_begun_begins),
        cmocka_unit_test(stopped_runs_go_on_bit_for_bit),
        cmocka_unit_test(quantized_runs_go_on_bit_for_bit),
        cmocka_unit_test(nans_are_reported),
        cmocka_unit_test(a_signal_in_an_evaluation_stops_the_run_there),
        cmocka_unit_test(a_second_signal_quits_at_once),
        cmocka_unit_test(a_stopped_run_says_how_to_go_on),
        cmocka_unit_test(a_run_has_one_process),
        cmocka_unit_test(runs_begun_together_have_directories_of_their_own),
        cmocka_unit_test(the_corpus_says_what_tokens_are),
        cmocka_unit_test(another_model_or_corpus_is_refused),
        cmocka_unit_test(other_kernels_or_another_validation_are_said),
        cmocka_unit_test(a_run_whose_recipe_is_refused_now_takes_another),
        cmocka_unit_test(other_batches_go_on_at_the_same_place_in_the_data),
    };
    return cmocka_run_group_tests(tests, setup, program_teardown);
}
