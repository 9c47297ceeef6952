/* A trainer that only runs forward, as eval and sample use it; and how they open a checkpoint. */
#include <math.h>

#include "tests/train/verbs.h"

#include "train/h5.h"
#include "train/inference.h"

enum { VOCAB = 23, SEQUENCES = 4, LENGTH = 12, TOKENS = SEQUENCES * LENGTH, BEYOND_BYTES = 300 };

static mt_trainer_config config_of(mt_dtype dtype)
{
    mt_trainer_config c = { .dtype = dtype,
                            .batch_size = SEQUENCES,
                            .micro_batch_size = 2,
                            .sequence_length = LENGTH,
                            .steps = 1,
                            .delayed_history = 16,
                            .seed = 5 };
    const mt_architecture *architecture;
    assert_ok(mt_architecture_find(&architecture, "qwen3_moe"));
    mt_model_config_defaults(&c.model, architecture);
    c.model.vocab_size = VOCAB, c.model.hidden_size = 32, c.model.num_hidden_layers = 2;
    c.model.num_attention_heads = 4, c.model.num_key_value_heads = 2, c.model.head_dim = 8;
    c.model.moe_intermediate_size = 16, c.model.num_experts = 5, c.model.num_experts_per_tok = 2;
    mt_optim_config_defaults(&c.optim);
    return c;
}

static void assert_no_step(mt_trainer *t, const int32_t *tokens)
{
    mt_step_result result;
    const char *words = "forward passes only";
    assert_fails(mt_trainer_step(t, tokens, tokens, &result), MT_EINVAL, words);
    assert_fails(mt_trainer_gradients(t, tokens, tokens, &result), MT_EINVAL, words);
    assert_fails(mt_trainer_update(t, 1e-3, &result), MT_EINVAL, words);
}

/* Without gradients and moments: the same logits and losses, and no step. */
static void check_forward_only(mt_trainer_config c)
{
    static double logits[2][TOKENS * VOCAB];
    double sums[2];
    int32_t tokens[TOKENS];
    int64_t all[2] = { 0 };
    for (int i = 0; i < TOKENS; i++) tokens[i] = i * i % VOCAB;
    for (int only = 0; only < 2; only++) {
        mt_trainer *t;
        int64_t count;
        c.forward_only = only;
        assert_ok(mt_trainer_create(&t, test_device(), &c));
        const int64_t *bytes = test_device()->bytes;
        assert_ok(mt_trainer_logits(t, tokens, SEQUENCES, LENGTH, -1, logits[only]));
        for (int row = 0; row < TOKENS; row += 17) { /* nothing else is given */
            double one[VOCAB + 1] = { [VOCAB] = 7 };
            assert_ok(mt_trainer_logits(t, tokens, SEQUENCES, LENGTH, row, one));
            assert_memory_equal(one, logits[only] + row * VOCAB, VOCAB * sizeof *one);
            assert_true(one[VOCAB] == 7);
        }
        assert_fails(mt_trainer_logits(t, tokens, 1, LENGTH, LENGTH, logits[only]), MT_EINVAL,
                     "row 12 of 12");
        assert_ok(mt_trainer_eval(t, tokens, tokens, 2, &sums[only], &count));
        for (int m = 0; m < MT_MEMORY_COUNT; m++) all[only] += bytes[m];
        if (only) {
            assert_int_equal(bytes[MT_MEMORY_GRAD] + bytes[MT_MEMORY_MOMENTS], 0);
            assert_no_step(t, tokens);
        }
        mt_trainer_destroy(&t);
    }
    assert_true(all[1] < all[0]);
    assert_memory_equal(logits[0], logits[1], sizeof logits[0]);
    assert_memory_equal(&sums[0], &sums[1], sizeof sums[0]);
}

static void test_forward_only(void **state)
{
    (void)state;
    check_forward_only(config_of(MT_F64));
    mt_trainer_config c = config_of(MT_BF16);
    snprintf(c.recipe, sizeof c.recipe, "mxfp8");
    check_forward_only(c);
    c = config_of(MT_BF16), c.optim.master = MT_MASTER_SPLIT, c.grad_dtype = MT_BF16;
    check_forward_only(c);
    c = config_of(MT_F32), c.optim.offload = true;
    check_forward_only(c);
}

/* Makes "<folder>/v.h5", a corpus of a vocabulary of 29. */
static void make_corpus(void)
{
    char line[512], text[64];
    for (int i = 0; i < 63; i++) text[i] = (char)(i * i % 29);
    put_file(in_dir("v.txt"), text, 63);
    snprintf(line, sizeof line, "data pack %s -o %s --vocab-size 29", in_dir("v.txt"),
             in_dir("v.h5"));
    assert_verb(line, 0, "tokens");
}

/* Makes "<folder>/ckpt", of a run with this recipe. */
static void make_recipe_checkpoint(const char *recipe)
{
    char text[1024];
    mt_model_config c = small_model(false);
    snprintf(text, sizeof text,
             "model: {vocab_size: 29, hidden_size: 12, num_hidden_layers: 3, "
             "num_attention_heads: 4, head_dim: 6, moe_intermediate_size: 10, num_experts: 8, "
             "num_experts_per_tok: 2}\n"
             "data: {train: none.h5, sequence_length: 8}\n"
             "train: {steps: 9, batch_size: 4}\n"
             "recipe: %s\n",
             recipe);
    make_run_checkpoint(in_dir("ckpt"), &c, text);
}

/* "VERB <folder>/ckpt MORE" */
static const char *on_checkpoint(const char *name, const char *more)
{
    static char line[1024];
    snprintf(line, sizeof line, "%s %s %s", name, in_dir("ckpt"), more);
    return line;
}

/* What recipes may be has changed since: weights are weights all the same, and whoever computes
 * with them can say in what. */
static void test_refused_recipe(void **state)
{
    (void)state;
    static const char said[] = "the recipe of its run is refused: recipe: wgrad X column: "
                               "source=dequantized takes what the codes of the row direction hold";
    char plain[VERB_OUTPUT], more[512];
    make_corpus();
    snprintf(more, sizeof more, "--data %s --recipe none", in_dir("v.h5"));
    make_recipe_checkpoint("none");
    assert_verb(on_checkpoint("eval", more), 0, "bits/");
    snprintf(plain, sizeof plain, "%s", verb_output);

    make_recipe_checkpoint("fprop=bf16 dgrad=bf16 wgrad=mxfp8:source=dequantized/mxfp8");
    assert_verb(on_checkpoint("eval", more), 0, plain);
    more[strlen(more) - strlen("none")] = '\0';
    strcat(more, "mxfp4");
    assert_verb(on_checkpoint("eval", more), 2, "'mxfp4' is neither a preset");
    more[strlen(more) - strlen(" --recipe mxfp4")] = '\0';
    assert_verb(on_checkpoint("eval", more), 2, said);
    assert_non_null(strstr(verb_output, "the recipe none computes in f32"));
    assert_verb(on_checkpoint("sample", "--tokens 3"), 2, said);
    assert_verb(on_checkpoint("sample", "--tokens 3 --recipe mxfp8"), 0, "");
    snprintf(more, sizeof more, "%s", in_dir("exported"));
    assert_verb(on_checkpoint("export", more), 0, "");
    assert_verb(on_checkpoint("inspect", ""), 0, "tensors");
}

/* The most likely token behind `count` tokens, which nothing follows. */
static int32_t likeliest(const mt_inference *inference, const int32_t *tokens, int64_t count)
{
    static double logits[BEYOND_BYTES];
    int32_t best = 0;
    assert_ok(mt_trainer_logits(inference->trainer, tokens, 1, count, count - 1, logits));
    for (int32_t v = 1; v < BEYOND_BYTES; v++) best = logits[v] > logits[best] ? v : best;
    return best;
}

static void check_sampled_text(const char *recipe)
{
    enum { LENGTH_OF_TEXT = 32, TEXTS = 3 };
    char line[256], want[256];
    mt_inference *inference;
    assert_ok(mt_inference_open(&inference, in_dir("ckpt"),
                                &(mt_inference_options){ .device = "cpu", .recipe = recipe }));
    for (int text = 0; text < TEXTS; text++) {
        int32_t tokens[LENGTH_OF_TEXT] = { 30 * text };
        int at = snprintf(want, sizeof want, "%d", 30 * text);
        for (int n = 1; n < LENGTH_OF_TEXT; n++) {
            tokens[n] = likeliest(inference, tokens, n);
            at += snprintf(want + at, sizeof want - (size_t)at, " %d", (int)tokens[n]);
        }
        snprintf(line, sizeof line,
                 "--device cpu --recipe %s --temperature 0 --tokens %d --prompt %d", recipe,
                 LENGTH_OF_TEXT - 1, 30 * text);
        assert_verb(on_checkpoint("sample", line), 0, want);
    }
    mt_inference_close(&inference);
}

/* A text alone decides how it goes on, nothing that a pass may be padded with: also where experts
 * have room for a share of the tokens that there are, and where rows share scales. */
static void test_sample_reads_the_text_alone(void **state)
{
    (void)state;
    mt_model_config c = small_model(false);
    c.vocab_size = BEYOND_BYTES; /* numbers are written */
    make_checkpoint(in_dir("ckpt"), &c);
    static const char *const recipes[] = { "none", "mxfp8", "fp8_current", "nvfp4" };
    for (int i = 0; i < 4; i++) check_sampled_text(recipes[i]);
    c.capacity_factor = 0.5;
    make_checkpoint(in_dir("ckpt"), &c);
    check_sampled_text("none");
}

/* What is computed from no numbers is not passed off as numbers, also where formats have no NaN. */
static void test_numbers_that_are_none(void **state)
{
    (void)state;
    static const char *const recipes[] = { "none", "fprop=mxfp4 dgrad=mxfp4 wgrad=mxfp4" };
    static const char words[] = "numerics: the weight model.norm holds a NaN or an infinity";
    char data[256], sets[256], more[512];
    mt_model_config c = small_model(false);
    mt_h5 *file;
    make_corpus();
    assert_ok(mt_h5_create(&file, in_dir("in.h5")));
    assert_ok(mt_h5_write(file, "tokens", MT_I64, 2, (int64_t[]){ 1, 3 }, (int64_t[]){ 4, 5, 6 }));
    assert_ok(mt_h5_commit(&file));
    snprintf(data, sizeof data, "--sequence 8 --data %s", in_dir("v.h5"));
    for (int i = 0; i < 2; i++) {
        make_recipe_checkpoint(recipes[i]);
        assert_verb(on_checkpoint("eval", data), 0, "bits/");
        change_weight(in_dir("ckpt"), "model.norm", i ? INFINITY : NAN);
        assert_verb(on_checkpoint("eval", data), MT_EXIT_NUMERICS, words);
        assert_verb(on_checkpoint("sample", "--tokens 3"), MT_EXIT_NUMERICS, words);
        snprintf(sets, sizeof sets, "--tokens %s -o %s", in_dir("in.h5"), in_dir("out.h5"));
        assert_verb(on_checkpoint("trace", sets), MT_EXIT_NUMERICS, words);
        assert_false(mt_path_exists(in_dir("out.h5")));
    }
    make_checkpoint(in_dir("ckpt"), &c); /* a loss that overflows is written, and an error */
    change_weight(in_dir("ckpt"), "model.norm", 3e38f);
    assert_verb(on_checkpoint("trace", sets), 0, "");
    snprintf(more, sizeof more, "%s --targets", sets);
    assert_verb(on_checkpoint("trace", more), MT_EXIT_NUMERICS, "numerics: the total loss is ");
    assert_non_null(strstr(verb_output, "all that was computed is in '/"));
    assert_ok(mt_h5_open(&file, in_dir("out.h5")));
    mt_h5_close(&file);
}

/* Whoever opens the newest checkpoint that is whole says which newer one is not. */
static void test_left_aside(void **state)
{
    (void)state;
    char line[1024];
    mt_model_config c = small_model(false);
    assert_ok(mt_dir_create(in_dir("run/ckpt/step_00000002")));
    make_checkpoint(in_dir("run/ckpt/step_00000001"), &c);
    static const char *const lines[] = { "inspect %s", "sample %s --tokens 1", "export %s %s/hf",
                                         "trace %s --tokens %s/none.h5 -o %s/out.h5" };
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        const char *run = in_dir("run");
        snprintf(line, sizeof line, lines[i], run, run, run);
        (void)verb(line);
        if (!strstr(verb_output, "left aside: ") || !strstr(verb_output, "step_00000002' has no"))
            fail_msg("%s: %s", line, verb_output);
    }
    snprintf(line, sizeof line, "eval %s/ckpt/step_00000001/model.h5", in_dir("run"));
    assert_verb(line, MT_EXIT_FILES, "model.h5' is a file of a checkpoint, which is the directory");
    assert_non_null(strstr(verb_output, "/run/ckpt/step_00000001'\n"));
    put_text(in_dir("any"), "");
    snprintf(line, sizeof line, "eval %s", in_dir("any"));
    assert_verb(line, MT_EXIT_FILES, "/any' is an empty file: a checkpoint is a directory");
    snprintf(line, sizeof line, "eval %s --batch 2000000", in_dir("run"));
    assert_verb(line, 2, "batches of 2000000 sequences, must be from 1 to 1048576");
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_forward_only),
                                        cmocka_unit_test(test_refused_recipe),
                                        cmocka_unit_test(test_sample_reads_the_text_alone),
                                        cmocka_unit_test(test_numbers_that_are_none),
                                        cmocka_unit_test(test_left_aside) };
    return cmocka_run_group_tests(tests, files_setup, files_teardown);
}
