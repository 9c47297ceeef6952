/* A whole run from the outside: what it writes, and that stopping, killing and resuming change no
 * bit of it; damaged files, full disks and bad numbers end it with the code of their class. */
#include "tests/train/program.h"

#include <jansson.h>
#include <math.h>

#include "core/rng.h"
#include "train/checkpoint.h"
#include "train/config.h"
#include "train/progress.h"

static const char config[] =
    "model: {vocab_size: 256, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2,\n"
    "        num_key_value_heads: 1, moe_intermediate_size: 32, num_experts: 4,\n"
    "        num_experts_per_tok: 2, router_bias_update_rate: 0.001}\n"
    "data: {train: train.h5, valid: valid.h5, sequence_length: 32}\n"
    "train: {steps: 24, batch_size: 4, micro_batch_size: 2, log_every: 1, eval_every: 6, "
    "eval_batches: 2}\n"
    "optim: {lr: 3e-3, warmup_steps: 2}\n"
    "checkpoint: {every: 5, keep_last: 2}\n";

static void write_words(const char *path, int64_t count, uint64_t seed)
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

static int setup(void **state)
{
    program_setup(state);
    write_words("train.txt", 6000, 1);
    write_words("valid.txt", 500, 2);
    write_words("other.txt", 6000, 3);
    write_words("large.txt", 60000, 4);
    write_words("short.txt", 4, 5);
    write_file("t.yaml", config);
    static const char *const names[] = { "train", "valid", "other", "large", "short" };
    for (int i = 0; i < 5; i++) {
        char line[128];
        snprintf(line, sizeof line, "data pack %s.txt -o %s.h5", names[i], names[i]);
        assert_program(line, 0, "tokens");
    }
    double began = mt_progress_clock();
    assert_program("train t.yaml --run straight", 0, "done: 24 steps");
    straight_seconds = mt_progress_clock() - began;
    return 0;
}

/* ---- comparing runs
 * ------------------------------------------------------------------------------
 */

/* The lines of a run's metrics without what depends on the clock. */
static json_t *read_metrics(const char *run)
{
    char path[256], line[4096];
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
        json_object_del(object, "memory_bytes");
        json_array_append_new(lines, object);
    }
    fclose(file);
    return lines;
}

static void assert_same_metrics(const char *run, const char *other)
{
    json_t *a = read_metrics(run), *b = read_metrics(other);
    if (!json_equal(a, b))
        fail_msg("metrics of %s and %s differ:\n%s\n%s", run, other, json_dumps(a, JSON_COMPACT),
                 json_dumps(b, JSON_COMPACT));
    json_decref(a);
    json_decref(b);
}

static void *read_tensor(mt_checkpoint *c, const char *group, const char *name, size_t *bytes)
{
    mt_tensor t;
    assert_ok(mt_checkpoint_tensor(c, group, name, &t));
    *bytes = mt_tensor_bytes(&t);
    t.data = malloc(*bytes);
    assert_non_null(t.data);
    assert_ok(mt_checkpoint_read(c, group, name, &t));
    return t.data;
}

static void assert_same_tensor(mt_checkpoint *a, mt_checkpoint *b, const char *group,
                               const char *name)
{
    size_t x_bytes, y_bytes;
    void *x = read_tensor(a, group, name, &x_bytes), *y = read_tensor(b, group, name, &y_bytes);
    if (x_bytes != y_bytes || memcmp(x, y, x_bytes) != 0) fail_msg("%s/%s differs", group, name);
    free(x);
    free(y);
}

/* Weights, moments and router biases of the last step, bit for bit. */
static void assert_same_weights(const char *run, const char *other, int64_t step)
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

static void assert_same_run(const char *run, const char *other)
{
    assert_same_metrics(run, other);
    assert_same_weights(run, other, 24);
}

static bool has_line(const char *run, const char *words)
{
    char path[256], line[4096];
    bool found = false;
    snprintf(path, sizeof path, "%s/metrics.jsonl", run);
    FILE *file = fopen(path, "r");
    while (file && !found && fgets(line, sizeof line, file)) found = strstr(line, words) != NULL;
    if (file) fclose(file);
    return found;
}

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
    assert_program("train t.yaml --run straight --resume", 0, "done");
    assert_program("train straight/config.resolved.yaml --run again", 0, "done");
    assert_same_run("straight", "again");
}

/* The last evaluation of the run, made again by the verb that does nothing else. */
static void eval_repeats_the_last_evaluation(void **state)
{
    (void)state;
    json_t *lines = read_metrics("straight");
    json_t *final = json_array_get(lines, json_array_size(lines) - 1);
    char words[64];
    snprintf(words, sizeof words, "loss %.6f, %.4f bits/byte",
             json_number_value(json_object_get(final, "valid_loss")),
             json_number_value(json_object_get(final, "valid_bits_per_byte")));
    json_decref(lines);
    assert_program("eval straight", 0, words);
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

/* Runs and interrupts at moments drawn from `seed` within `longest` seconds, until a session comes
 * to its end. Returns how many were interrupted. */
static int interrupt_run(const char *run, const char *file, int signal_number, uint64_t seed,
                         double longest)
{
    char line[256];
    snprintf(line, sizeof line, "train %s --run %s --resume", file, run);
    for (int session = 0; session < 200; session++) {
        pid_t child = program_start(line, "1", 0);
        nap(longest * mt_rng_uniform(seed, 1, (uint64_t)session));
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

/* Puts a NaN into a weight of the run's checkpoint after five steps. */
static void poison_checkpoint(const char *run, const char *weight)
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
    assert_ok(mt_param_write_master(params, w, 0, 1, &nan));
    const mt_checkpoint_info info = { .run_config = text, .git_revision = "", .corpus = corpus };
    snprintf(path, sizeof path, "%s/ckpt", run);
    assert_ok(mt_checkpoint_save(path, trainer, &info, NULL));
    mt_trainer_destroy(&trainer);
    free(corpus), free(text);
}

/* FP4 has no NaN: the loss stays finite, and the run says what it trains with. Counts go on over
 * an interruption between two lines of the log. */
static void nans_are_reported(void **state)
{
    (void)state;
    char text[2048], line[256];
    static const char *const runs[] = { "poisoned", "interrupted-poisoned" };
    snprintf(text, sizeof text, "%srecipe: fprop=mxfp4 dgrad=mxfp4 wgrad=mxfp4\n", config);
    write_file("n.yaml", text);
    for (int i = 0; i < 2; i++) {
        snprintf(line, sizeof line, "train n.yaml --run %s --set train.steps=5", runs[i]);
        assert_program(line, 0, "done: 5 steps");
        assert_true(has_line(runs[i], "\"nan\":0,"));
        poison_checkpoint(runs[i], "model.layers.1.mlp.experts.down");
    }
    assert_program("train n.yaml --run interrupted-poisoned --resume --set train.steps=11 --set "
                   "train.log_every=8",
                   0, "done: 11 steps");
    for (int i = 0; i < 2; i++) {
        snprintf(line, sizeof line,
                 "train n.yaml --run %s --resume --set train.steps=14 --set train.log_every=8",
                 runs[i]);
        assert_program(line, 0,
                       "NaN met in quantizing W of model.layers.1.mlp.experts.down, "
                       "members 0\n");
        assert_true(has_line(runs[i], "{\"step\":14,"));
        assert_true(has_line(runs[i], "\"nan\":9,"));
    }
}

/* Waits until the run's metrics hold `words`. */
static void await_line(const char *run, const char *words)
{
    for (int i = 0; i < 6000 && !has_line(run, words); i++) nap(0.01);
    assert_true(has_line(run, words));
}

static const char slow_eval[] =
    "train t.yaml --run %s --resume --set data.valid=large.h5 --set data.sequence_length=8 "
    "--set train.eval_batches=0 --set train.eval_every=1 --set train.steps=2";

static void a_signal_in_an_evaluation_stops_the_run_there(void **state)
{
    (void)state;
    char line[512];
    snprintf(line, sizeof line, slow_eval, "inside");
    pid_t child = program_start(line, "1", 0);
    await_line("inside", "{\"step\":1,");
    kill(child, SIGUSR1); /* the evaluation of step 1 has begun */
    assert_int_equal(program_wait(child), MT_EXIT_PREEMPTED);
    assert_non_null(strstr(program_text, "SIGUSR1 after step 1 of 2"));
    assert_false(has_line("inside", "valid_loss"));
    assert_int_equal(program(line), 0);
    snprintf(line, sizeof line, slow_eval, "outside");
    assert_int_equal(program(line), 0);
    assert_same_metrics("inside", "outside");
    assert_same_weights("inside", "outside", 2);
}

static void a_second_signal_quits_at_once(void **state)
{
    (void)state;
    char line[512];
    snprintf(line, sizeof line, slow_eval, "twice");
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

static void a_run_has_one_process(void **state)
{
    (void)state;
    char line[512];
    snprintf(line, sizeof line, slow_eval, "busy");
    pid_t child = program_start(line, "1", 0);
    await_line("busy", "{\"step\":1,");
    assert_program(line, 2, "in use by another process");
    kill(child, SIGKILL);
    program_wait(child);
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
    assert_program("train t.yaml --run moved --resume --force --set model.hidden_size=64", 5, "");
    assert_program("train t.yaml --run moved --resume --set train.steps=2", 2, "has made 3 steps");
    assert_program("train t.yaml --run moved --resume --set train.steps=5 --set optim.lr=1e-3", 0,
                   "optim.lr 0.003 -> 0.001");
    assert_program(
        "train t.yaml --run moved --resume --force --set train.steps=7 --set data.train=other.h5",
        0, "done");
    assert_program("train t.yaml --resume", 2, "--resume needs --run");
}

/* ---- what goes wrong
 * -----------------------------------------------------------------------------
 */

static void bad_input_has_the_code_of_its_class(void **state)
{
    (void)state;
    static const struct {
        const char *options;
        int code;
        const char *words;
    } cases[] = {
        { "--set model.num_expertz=4", 2, "did you mean model.num_experts" },
        { "--set model.num_experts_per_tok=5", 2, "num_experts_per_tok is 5" },
        { "--set model.num_key_value_heads=3", 2, "num_key_value_heads" },
        { "--set model.vocab_size=100", 2, "100" },
        { "--set data.train=short.h5", 2, "not one window of data.sequence_length" },
        { "--set data.valid=short.h5", 2, "not one window of data.sequence_length" },
        { "--set data.train=none.h5", 5, "none.h5" },
        { "--set data.train=train.txt", 5, "train.txt" },
        { "--set recipe=nvfp5", 2, "nvfp5" },
        { "--set optim.moments_sr=true", 2, "it must be bf16" },
#ifdef MT_HAVE_cuda
        { "--device cuda", 6, "cuda" },
        { "--device cuda:7", 6, "cuda" },
#else
        { "--device cuda", 2, "cuda" },
        { "--device cuda:7", 2, "cuda" },
#endif
        { "--device cuda:x", 2, "not one of auto, cpu, cuda, cuda:N" },
        { "--device cuda:1 --gpus 2", 2, "one GPU" },
        { "--gpus -1", 2, "--gpus -1: must be from 1" },
        { "--device tpu", 2, "tpu" },
    };
    setenv("CUDA_VISIBLE_DEVICES", "", 1); /* no GPU here, whatever the machine has */
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char line[256];
        snprintf(line, sizeof line, "train t.yaml --run refused %s", cases[i].options);
        assert_program(line, cases[i].code, cases[i].words);
        assert_int_equal(access("refused", F_OK), -1); /* before anything is written */
    }
    unsetenv("CUDA_VISIBLE_DEVICES");
    assert_program("train t.yaml --run t.yaml", 5, "run t.yaml: Not a directory");
    assert_program("eval straight --device plan", 2, "device 'plan' is not one of auto, cpu, cuda");
    assert_program(
        "train t.yaml --run typed --set statistics.every=1 --set statistics.layers=*up_proj", 2,
        "*up_proj fits no linear layer; the first of them: model.layers.0.self_attn");
    write_file("typed.yaml", config);
    FILE *file = fopen("typed.yaml", "a");
    assert_non_null(file);
    fputs("recipe: [{use: mxfp8}, {layers: '*.0.up_proj', use: bf16}]\n", file);
    assert_int_equal(fclose(file), 0);
    assert_program("train typed.yaml --run typed", 2, "layers=*.0.up_proj fits no linear layer");
    assert_program("train t.yaml --run typed --set train.steps=2 --set model.capacity_factor=1e30",
                   0, "done: 2 steps");
}

/* A file that takes the place of a closed standard one would get what is printed. */
static void records_stay_whole_without_standard_files(void **state)
{
    (void)state;
    char command[8192];
    snprintf(command, sizeof command, "%s train t.yaml --run closed <&- >&- 2>&-", program_path);
    int status = system(command);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), MT_EXIT_FILES); /* nobody could read of its progress */
    assert_same_metrics("closed", "straight");
    assert_same_weights("closed", "straight", 24);
}

static void a_reader_that_leaves_does_not_end_the_run(void **state)
{
    (void)state;
    char command[8192];
    snprintf(command, sizeof command, "(%s train t.yaml --run piped; echo $? >code) 2>out | true",
             program_path);
    assert_int_equal(system(command), 0);
    FILE *code = fopen("code", "r");
    int number = 0;
    assert_non_null(code);
    assert_int_equal(fscanf(code, "%d", &number), 1);
    fclose(code);
    assert_int_equal(number, MT_EXIT_FILES);
    assert_same_metrics("piped", "straight");
    assert_same_weights("piped", "straight", 24);
}

static void copy_file(const char *from, const char *to)
{
    char *text = NULL;
    size_t bytes = 0;
    assert_ok(mt_file_read_all(&text, &bytes, from, 1 << 26));
    assert_ok(mt_file_write_all(to, text, bytes));
    free(text);
}

static void flip_bit(const char *path, long at_thousandth)
{
    FILE *file = fopen(path, "r+");
    assert_non_null(file);
    fseek(file, 0, SEEK_END);
    long at = ftell(file) / 1000 * at_thousandth;
    fseek(file, at, SEEK_SET);
    int byte = fgetc(file);
    fseek(file, at, SEEK_SET);
    fputc(byte ^ 16, file);
    assert_int_equal(fclose(file), 0);
}

static void damaged_corpora_are_refused(void **state)
{
    (void)state;
    copy_file("train.h5", "flipped.h5");
    flip_bit("flipped.h5", 700);
    assert_program("train t.yaml --run hurt --set data.train=flipped.h5", 5, "flipped.h5");
    copy_file("train.h5", "cut.h5");
    assert_int_equal(truncate("cut.h5", 20000), 0);
    assert_program("train t.yaml --run hurt --set data.train=cut.h5", 5, "cut.h5");
}

static void a_damaged_checkpoint_gives_way_to_the_one_before(void **state)
{
    (void)state;
    assert_int_equal(program("train t.yaml --run fallback"), 0);
    flip_bit("fallback/ckpt/step_00000024/model.h5", 500);
    assert_program("eval fallback", 0, "left aside: step_00000024");
    assert_program("train t.yaml --run fallback --resume", 0,
                   "resumed from fallback/ckpt/step_00000020");
    assert_same_run("straight", "fallback");
    assert_int_equal(unlink("fallback/ckpt/step_00000024/DONE"), 0);
    assert_program("train t.yaml --run fallback --resume", 0,
                   "resumed from fallback/ckpt/step_00000020");
    assert_same_run("straight", "fallback");
    flip_bit("fallback/ckpt/step_00000024/model.h5", 500);
    flip_bit("fallback/ckpt/step_00000020/model.h5", 500);
    assert_program("train t.yaml --run fallback --resume", 5, "no complete checkpoint");
}

/* It may be whole: nothing is begun again, cut back or removed in its place. */
static void a_checkpoint_that_cannot_be_read_ends_the_run(void **state)
{
    (void)state;
    assert_int_equal(program("train t.yaml --run unread"), 0);
    assert_int_equal(rename("unread/ckpt/step_00000024/model.h5", "unread/kept"), 0);
    assert_int_equal(mkdir("unread/ckpt/step_00000024/model.h5", 0700), 0);
    assert_program("train t.yaml --run unread --resume", 5, "model.h5': not a regular file");
    assert_program("eval unread", 5, "model.h5': not a regular file");
    assert_int_equal(rmdir("unread/ckpt/step_00000024/model.h5"), 0);
    assert_int_equal(rename("unread/kept", "unread/ckpt/step_00000024/model.h5"), 0);
    assert_same_run("straight", "unread");
    assert_int_equal(rename("unread/ckpt", "unread/kept"), 0);
    write_file("unread/ckpt", "");
    assert_program("train t.yaml --run unread --resume", 5, "cannot list 'unread/ckpt'");
    assert_int_equal(unlink("unread/ckpt"), 0);
    assert_int_equal(rename("unread/kept", "unread/ckpt"), 0);
    assert_same_run("straight", "unread");
}

static void a_full_disk_leaves_the_old_checkpoint(void **state)
{
    (void)state;
    assert_int_equal(program("train t.yaml --run full --set train.steps=5"), 0);
    /* room for the metrics and the configuration, not for a checkpoint */
    pid_t child = program_start("train t.yaml --run full --resume", "1", 50000);
    assert_int_equal(program_wait(child), MT_EXIT_FILES);
    assert_non_null(strstr(program_text, "the checkpoint of step 10 was not saved"));
    assert_non_null(strstr(program_text, "there is still full/ckpt/step_00000005"));
    assert_program("eval full", 0, "step_00000005");
    assert_program("train t.yaml --run full --resume", 0, "resumed from full/ckpt/step_00000005");
}

static void a_loss_that_is_not_finite_ends_the_run(void **state)
{
    (void)state;
    assert_program("train t.yaml --run bad --set optim.lr=1e30 --set optim.grad_clip=0 --set "
                   "optim.warmup_steps=0 "
                   "--set checkpoint.every=1",
                   3, "the first tensor that is not finite: ");
    assert_null(strstr(program_text, "not finite: none"));
    assert_program("inspect bad/ckpt/step_00000001", 0, "step 1");
    assert_int_equal(access("bad/ckpt/step_00000002", F_OK), -1);
}

/* Gradients that overflow under a loss that does not: embeddings of 1e-15 without an epsilon under
 * the norm. */
static void ten_skipped_updates_end_the_run(void **state)
{
    (void)state;
    assert_program(
        "train t.yaml --run skips --set model.z_loss_coef=1e30 --set model.rms_norm_eps=0 "
        "--set train.embed_init_std=1e-15",
        3, "10 updates in a row were skipped");
    assert_true(has_line("skips", "\"step\":10,"));
    assert_true(has_line("skips", "\"skipped\":10,"));
    assert_false(has_line("skips", "\"step\":11,"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_run_leaves_what_it_promises),
        cmocka_unit_test(eval_repeats_the_last_evaluation),
        cmocka_unit_test(samples_depend_on_the_seed_alone),
        cmocka_unit_test(nothing_that_should_be_neutral_changes_a_bit),
        cmocka_unit_test(killed_runs_go_on_bit_for_bit),
        cmocka_unit_test(stopped_runs_go_on_bit_for_bit),
        cmocka_unit_test(quantized_runs_go_on_bit_for_bit),
        cmocka_unit_test(nans_are_reported),
        cmocka_unit_test(a_signal_in_an_evaluation_stops_the_run_there),
        cmocka_unit_test(a_second_signal_quits_at_once),
        cmocka_unit_test(a_run_has_one_process),
        cmocka_unit_test(another_model_or_corpus_is_refused),
        cmocka_unit_test(bad_input_has_the_code_of_its_class),
        cmocka_unit_test(records_stay_whole_without_standard_files),
        cmocka_unit_test(a_reader_that_leaves_does_not_end_the_run),
        cmocka_unit_test(damaged_corpora_are_refused),
        cmocka_unit_test(a_damaged_checkpoint_gives_way_to_the_one_before),
        cmocka_unit_test(a_checkpoint_that_cannot_be_read_ends_the_run),
        cmocka_unit_test(a_full_disk_leaves_the_old_checkpoint),
        cmocka_unit_test(a_loss_that_is_not_finite_ends_the_run),
        cmocka_unit_test(ten_skipped_updates_end_the_run),
    };
    return cmocka_run_group_tests(tests, setup, program_teardown);
}
