/* Corpora of a run: what the model cannot read, and what can be meant but mostly is not; rules of
 * recipes that are never in use, which a run says as it begins. */
#include "tests/train/runs.h"

#define SHORT " --set train.steps=2 --set optim.warmup_steps=0 --set train.eval_every=0"

static int corpora_setup(void **state)
{
    setup(state);
    FILE *file = fopen("numbers.bin", "wb");
    assert_non_null(file);
    for (uint16_t i = 0; i < 2000; i++) fwrite(&(uint16_t){ i % 300 }, sizeof i, 1, file);
    assert_int_equal(fclose(file), 0);
    assert_program("data pack numbers.bin --vocab-size 400 -o unknown.h5", 0, "2000 tokens");
    assert_program("data pack numbers.bin --vocab-size 400 --tokenizer a -o a.h5", 0, "2000");
    assert_program("data pack numbers.bin --vocab-size 400 --tokenizer bytes -o never.h5", 2,
                   "tokenizer 'bytes' has 256 tokens, vocab_size is 400");
    assert_program("data pack train.txt --tokenizer a -o never.h5", 2,
                   "text becomes bytes, its tokenizer is 'bytes', not 'a'");
    assert_int_equal(access("never.h5", F_OK), -1);
    assert_program("data pack numbers.bin --vocab-size 400 --tokenizer b -o b.h5", 0, "2000");
    return 0;
}

static void the_vocabulary_wanted_is_said(void **state)
{
    (void)state;
    assert_program("train t.yaml --run no --set data.train=a.h5", 2,
                   "data.train: corpus 'a.h5' holds token 299, the model's vocab_size is 256: it "
                   "must be above every token there, 300 or more (the corpus's own vocabulary is "
                   "400)");
    assert_program("eval straight --data a.h5", 2, "must be above every token there, 300 or more");
    assert_program("train t.yaml --run small --set data.train=a.h5 --set data.valid=b.h5 "
                   "--set model.vocab_size=300",
                   2, "data.valid: its tokens are of tokenizer 'b', those of data.train of 'a'");
    assert_program("train t.yaml --run small --set data.train=a.h5 --set data.valid=unknown.h5 "
                   "--set model.vocab_size=300" SHORT,
                   0,
                   "model.vocab_size 300 is below the vocabulary of data.train, 400: its largest");
}

static void corpora_of_other_tokenizers_are_refused(void **state)
{
    (void)state;
    assert_program("train t.yaml --run no --set data.train=unknown.h5 --set model.vocab_size=400",
                   2, "its tokens are of tokenizer 'bytes', those of data.train of 'unknown'");
    assert_int_equal(access("no", F_OK), -1);
    assert_program("train t.yaml --run of-a --set data.train=a.h5 --set data.valid=a.h5 "
                   "--set model.vocab_size=400" SHORT,
                   0, "bits/token");
    assert_program("eval of-a --data unknown.h5", 0, "bits/token");
    assert_program("eval of-a --data b.h5", 2,
                   "--data: its tokens are of tokenizer 'b', those of data.train of 'a'");
    assert_program("eval of-a --data valid.h5", 2, "of tokenizer 'bytes', those of data.train");
    assert_int_equal(rename("a.h5", "moved.h5"), 0);
    assert_program("eval of-a --data b.h5", 0, "bits/token");
    assert_int_equal(rename("moved.h5", "a.h5"), 0);
}

/* Of a vocabulary that u16 would hold, too. */
static void a_file_of_u32_is_not_taken_for_u16(void **state)
{
    (void)state;
    FILE *file = fopen("wide.bin", "wb");
    assert_non_null(file);
    for (uint32_t i = 0; i < 1000; i++) fwrite(&(uint32_t){ i % 300 }, sizeof i, 1, file);
    assert_int_equal(fclose(file), 0);
    assert_program("data pack wide.bin --vocab-size 400 -o wide.h5", 2,
                   "every second of its 2000 tokens is 0, as if they were u32: what it holds has "
                   "to be said: --format NAME");
    assert_int_equal(access("wide.h5", F_OK), -1);
    assert_program("data pack wide.bin --vocab-size 400 --format u32 -o wide.h5", 0, "1000 tokens");
    assert_program("data pack wide.bin --vocab-size 400 --format u16 -o wide.h5", 0, "2000 tokens");
    assert_program("data pack numbers.bin --vocab-size 65537 -o no.h5", 5, "token");
}

static void validation_on_training_text_is_said(void **state)
{
    (void)state;
    assert_program("train t.yaml --run same --set data.valid=train.h5" SHORT, 0,
                   "data.valid holds what data.train holds");
    assert_program("train t.yaml --run seldom --set statistics.every=9" SHORT, 0,
                   "statistics.every is 9, train.steps 2: no statistics will be made");
    assert_program("train t.yaml --run layers --set statistics.layers=*" SHORT, 0,
                   "statistics.every is 0, train.steps 2: no statistics will be made");
    assert_program("train t.yaml --run tensors --set statistics.tensors=[X]" SHORT, 0,
                   "statistics.every is 0, train.steps 2: no statistics will be made");
    assert_program("train t.yaml --run what-if --set statistics.what_if=[mxfp4]" SHORT, 0,
                   "statistics.every is 0, train.steps 2: no statistics will be made");
    assert_int_equal(program("train t.yaml --run other" SHORT), 0);
    assert_null(strstr(program_text, "data.valid holds"));
    assert_null(strstr(program_text, "no statistics"));
}

static void write_rules(const char *rules)
{
    char text[2048];
    snprintf(text, sizeof text, "%srecipe: %s\n", config, rules);
    write_file("rules.yaml", text);
}

static void rules_never_in_use_are_said(void **state)
{
    (void)state;
    write_rules("[{use: bf16}, {steps: 3-, use: mxfp8}]");
    assert_program("train rules.yaml --run late" SHORT, 0,
                   "recipe of every layer, steps 3..: never in use, train.steps is 2\n");
    write_rules("[{use: bf16}, {steps: 2-, use: mxfp8}]");
    assert_program("train rules.yaml --run last" SHORT, 0,
                   "steps 2..: for the last evaluation alone, train.steps is 2\n");
    write_rules("[{use: bf16}, {steps: 1-, use: mxfp8}]");
    assert_program("train rules.yaml --run used" SHORT, 0, "recipe of every layer, steps 1..\n");
    assert_null(strstr(program_text, "never in use"));
    write_rules("[{use: bf16}, {layers: '*down', use: mxfp8}, {use: nvfp4}]");
    assert_program("plan rules.yaml", 0,
                   "recipe of layers *down: never in use, a later rule is for all of it\n");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_vocabulary_wanted_is_said),
        cmocka_unit_test(corpora_of_other_tokenizers_are_refused),
        cmocka_unit_test(a_file_of_u32_is_not_taken_for_u16),
        cmocka_unit_test(validation_on_training_text_is_said),
        cmocka_unit_test(rules_never_in_use_are_said),
    };
    return cmocka_run_group_tests(tests, corpora_setup, program_teardown);
}
