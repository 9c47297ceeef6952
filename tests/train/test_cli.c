/* The command line: options, nearest names, exit codes; the program as a child where the whole of
 * it matters. */
#include "tests/train/program.h"

#include "train/build_info.h"
#include "train/nearest.h"

typedef struct given {
    bool flag, help;
    const char *text, *path;
    int64_t count;
    double rate;
    mt_option_list list;
    int positional;
} given;

static mt_status parse(given *g, char **argv)
{
    int argc = 0;
    while (argv[argc]) argc++;
    *g = (given){ .count = -7 };
    const mt_option options[] = {
        { "flag", MT_OPTION_FLAG, &g->flag, NULL, "a flag" },
        { "o", MT_OPTION_TEXT, &g->text, "FILE", "a text" },
        { "run", MT_OPTION_PATH, &g->path, "DIR", "a path" },
        { "count", MT_OPTION_INT, &g->count, "N", "an integer" },
        { "rate", MT_OPTION_REAL, &g->rate, "X", "a number" },
        { "set", MT_OPTION_LIST, &g->list, "a=b", "a list" },
    };
    const mt_command command = { .usage = "mixtape verb FILE [options]",
                                 .about = "",
                                 .options = options,
                                 .option_count = 6,
                                 .min_arguments = 1,
                                 .max_arguments = 2 };
    return mt_command_parse(&command, argc, argv, &g->positional, &g->help);
}

#define ARGV(...)                                                                                  \
    (char *[])                                                                                     \
    {                                                                                              \
        (char *)"verb", __VA_ARGS__, NULL                                                          \
    }

static void options_are_read_in_any_order(void **state)
{
    (void)state;
    given g;
    char **argv = ARGV((char *)"--flag", (char *)"a", (char *)"-o", (char *)"x",
                       (char *)"--count=-3", (char *)"b", (char *)"--rate", (char *)"1e-3",
                       (char *)"--set", (char *)"a=1", (char *)"--set=b=2", (char *)"--run=r");
    assert_ok(parse(&g, argv));
    assert_string_equal(g.path, "r");
    assert_true(g.flag);
    assert_string_equal(g.text, "x");
    assert_int_equal(g.count, -3);
    assert_true(g.rate == 1e-3);
    assert_int_equal(g.positional, 2);
    assert_string_equal(argv[1], "a");
    assert_string_equal(argv[2], "b");
    assert_int_equal(g.list.count, 2);
    assert_string_equal(g.list.items[0], "a=1");
    assert_string_equal(g.list.items[1], "b=2");
    argv = ARGV((char *)"--", (char *)"--flag", (char *)"-");
    assert_ok(parse(&g, argv));
    assert_false(g.flag);
    assert_string_equal(argv[1], "--flag");
}

static void mistakes_are_named(void **state)
{
    (void)state;
    given g;
    assert_fails(parse(&g, ARGV((char *)"a", (char *)"--flga")), MT_ECONFIG,
                 "unknown option --flga: did you mean --flag");
    assert_fails(parse(&g, ARGV((char *)"a", (char *)"-q")), MT_ECONFIG, "unknown option -q");
    assert_fails(parse(&g, ARGV((char *)"a", (char *)"-flag")), MT_ECONFIG, "unknown option -flag");
    assert_fails(parse(&g, ARGV((char *)"a", (char *)"--count")), MT_ECONFIG,
                 "--count needs a value: N");
    assert_fails(parse(&g, ARGV((char *)"a", (char *)"--count=x")), MT_ECONFIG,
                 "'x' is not an integer");
    assert_fails(parse(&g, ARGV((char *)"a", (char *)"--count=18446744073709551615")), MT_ECONFIG,
                 "--count: 18446744073709551615 is not in -2^63..2^63-1");
    assert_fails(parse(&g, ARGV((char *)"a", (char *)"--rate=1.5.")), MT_ECONFIG,
                 "'1.5.' is not a number");
    assert_fails(parse(&g, ARGV((char *)"a", (char *)"--rate=0x1p3")), MT_ECONFIG,
                 "'0x1p3' is not a number in decimal");
    assert_fails(parse(&g, ARGV((char *)"a", (char *)"--flag=1")), MT_ECONFIG, "takes no value");
    assert_fails(parse(&g, ARGV((char *)"a", (char *)"--run", (char *)"")), MT_ECONFIG,
                 "--run: the name is empty: DIR");
    assert_ok(parse(&g, ARGV((char *)"a", (char *)"-o", (char *)"")));
    assert_fails(parse(&g, ARGV((char *)"--flag")), MT_ECONFIG, "0 arguments given");
    assert_fails(parse(&g, ARGV((char *)"a", (char *)"b", (char *)"c")), MT_ECONFIG,
                 "3 arguments given");
}

static void the_nearest_name_is_the_one_with_fewest_edits(void **state)
{
    (void)state;
    static const char *const names[] = { "train", "eval", "trace", "steps" };
    static const struct {
        const char *text, *near;
    } cases[] = { { "trian", "train" }, { "trac", "trace" },  { "evla", "eval" },
                  { "STEPS", NULL },    { "xxxxxxxx", NULL }, { "step", "steps" } };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const char *near = mt_nearest(cases[i].text, names, 4, sizeof names[0]);
        if (!cases[i].near)
            assert_null(near);
        else
            assert_string_equal(near, cases[i].near);
    }
}

static void each_class_of_error_has_its_code(void **state)
{
    (void)state;
    static const int codes[MT_STATUS_COUNT] = {
        [MT_OK] = 0,      [MT_EINVAL] = 2,     [MT_ECONFIG] = 2,   [MT_ENOMEM] = 1,
        [MT_EIO] = 5,     [MT_EDAMAGED] = 5,   [MT_ENUMERIC] = 3,  [MT_EUNSUPPORTED] = 2,
        [MT_EDEVICE] = 6, [MT_EPREEMPTED] = 4, [MT_EINTERNAL] = 1,
    };
    for (int i = 0; i < MT_STATUS_COUNT; i++)
        assert_int_equal(mt_exit_code((mt_status)i), codes[i]);
}

#define VERB_NAME(name, arguments, about) #name,
static const char *const verbs[] = { MT_VERBS(VERB_NAME) };

static void every_verb_has_help(void **state)
{
    (void)state;
    assert_program("--help", 0, "exit codes");
    for (size_t i = 0; i < sizeof verbs / sizeof verbs[0]; i++) {
        char line[64];
        assert_program("--help", 0, verbs[i]);
        snprintf(line, sizeof line, "%s --help", verbs[i]);
        assert_program(line, 0, verbs[i]);
        snprintf(line, sizeof line, "%s --no-such-option", verbs[i]);
        assert_int_equal(program(line), MT_EXIT_USAGE);
    }
    assert_program("data --help", 0, "data pack --help");
    assert_program("--help", 0, "mixtape --version");
}

static void the_version_and_revision_are_said(void **state)
{
    (void)state;
    char words[128];
    snprintf(words, sizeof words, "mixtape %s, revision %s\n", mt_build_version(),
             mt_build_revision());
    assert_program("--version", 0, words);
    assert_true(mt_build_version()[0] >= '0' && mt_build_version()[0] <= '9');
}

static void the_program_refuses_what_it_does_not_know(void **state)
{
    (void)state;
    write_file("bad.yaml", "model: {hiden_size: 3}\n");
    assert_program("", 2, "usage: mixtape VERB");
    assert_program("trian", 2, "unknown verb 'trian': did you mean train");
    assert_program("train", 2, "no configuration given");
    assert_program("train none.yaml", 5, "none.yaml");
    assert_program("train bad.yaml", 2,
                   "bad.yaml:1: unknown key model.hiden_size: did you mean model.hidden_size");
    write_file("rule.yaml", "recipe: {use: mxfp8, layers: lm_head}\n");
    assert_program("train rule.yaml", 2,
                   "unknown key recipe.layers: rules are items of a list, recipe: [{use: ..., "
                   "layers: ...}]");
    assert_program("train bad.yaml --force", 2, "--force without --resume");
    assert_program("train bad.yaml --rum x", 2, "unknown option --rum: did you mean --run");
    assert_program("train --help-config", 0, "optim:");
    assert_program("data pakc", 2, "did you mean pack");
    assert_program("data info bad.yaml", 5, "'bad.yaml' is a text, not a corpus");
    assert_program("data pack bad.yaml", 2, "no -o");
    assert_program("eval nowhere", 5, "nowhere");
    assert_program("doctor --device tpu", 2, "device 'tpu' is not one of auto, cpu, cuda");
    assert_program("gradcheck --samples -1", 2, "--samples is -1");
    assert_program("gradcheck --set train.steps=1", 2, "--set is for the model");
    static const char *const empty[] = { "eval nowhere --data=", "train bad.yaml --run=",
                                         "trace c --tokens=",    "compare r --baseline=",
                                         "compare r --plot=",    "data pack bad.yaml --valid=",
                                         "gradcheck --model=",   "bench --json=" };
    for (size_t i = 0; i < sizeof empty / sizeof *empty; i++)
        assert_program(empty[i], 2, ": the name is empty: ");
    assert_program("eval nowhere --sequence 0", 2, "--sequence is 0, must be positive");
    assert_program("eval nowhere --batch -1", 2, "--batch is -1, must be positive");
    assert_program("sample nowhere --sequence 0", 2, "--sequence is 0, must be positive");
    assert_program("sample nowhere --top-p 2x", 2, "'2x' is not a number");
    assert_program("gradcheck --model bad.yaml --op rms*", 2,
                   "is checked as a whole, without --op");
    assert_program("gradcheck --op nosuch", 2, "'nosuch': gradcheck without --op lists them");
    assert_null(strstr(program_text, "worst case")); /* no head of an empty table */
    assert_program("gradcheck --model bad.yaml", 2, "did you mean model.hidden_size");
    assert_null(strstr(program_text, "worst case"));
    write_file("small.yaml", "model: {vocab_size: 9, hidden_size: 16, num_hidden_layers: 1, "
                             "num_attention_heads: 1, moe_intermediate_size: 8, num_experts: 2, "
                             "num_experts_per_tok: 1}\n"
                             "data: {train: none.h5}\nrecipe: nvfp4\n");
    assert_program("gradcheck --model small.yaml --samples 1", 0,
                   "model of small.yaml in f64, 2 x 5 tokens, unquantized: without its recipe, "
                   "nvfp4\n");
    assert_program("gradcheck --op residual_add", 0, "worst case");
    assert_program("help train", 0, "usage: mixtape train CONFIG.yaml");
    assert_program("version", 0, "revision");
    assert_program("export nowhere there", 5, "nowhere");
    assert_program("import nowhere", 2, "no -o CKPT");
    assert_program("import nowhere -o c", 5, "nowhere");
    assert_int_equal(access("c", F_OK), -1);
}

static void what_cannot_be_printed_is_an_error(void **state)
{
    (void)state;
    static const char *const lines[] = { "help", "--help", "--version", "train --help",
                                         "train --help-config" };
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        char command[8192];
        snprintf(command, sizeof command, "%s %s >/dev/full 2>out", program_path, lines[i]);
        int status = system(command);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), MT_EXIT_FILES);
    }
}

/* A limit of files is met like a full disk, whatever the verb. */
static void what_does_not_fit_is_an_error(void **state)
{
    (void)state;
    static char text[100000];
    memset(text, 'a', sizeof text);
    FILE *file = fopen("long.txt", "w");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, sizeof text, file), sizeof text);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(program_wait(program_start("data pack long.txt -o long.h5", "1", 20000)),
                     MT_EXIT_FILES);
    assert_non_null(strstr(program_text, "File too large"));
    assert_int_equal(access("long.h5", F_OK), -1);
    assert_int_equal(access("long.h5.tmp", F_OK), -1);
}

/* Tokens under a name that does not say so are not text; text may have room above its bytes. */
static void what_a_file_holds_is_not_guessed_against_its_vocabulary(void **state)
{
    (void)state;
    assert_int_equal(system("printf text > x.tokens"), 0);
    assert_program("data pack x.tokens -o x.h5 --vocab-size 50257", 2, "vocab_size is 50257");
    assert_non_null(strstr(program_text, "has to be said: --format NAME\n"));
    assert_program("data pack x.tokens -o x.h5 --format u16", 2, "said: --vocab-size N\n");
    assert_int_equal(access("x.h5", F_OK), -1);
    assert_program("data pack x.tokens -o x.h5 --vocab-size 50257 --format u16", 0, "2 tokens");
    assert_program("data pack x.tokens -o x.h5 --vocab-size 257 --format bytes", 0, "4 tokens");
    assert_program("data pack x.tokens -o no/such/x.h5 --format bytes", 5,
                   "cannot create 'no/such/x.h5': there is no directory 'no/such'\n");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(options_are_read_in_any_order),
        cmocka_unit_test(mistakes_are_named),
        cmocka_unit_test(the_nearest_name_is_the_one_with_fewest_edits),
        cmocka_unit_test(each_class_of_error_has_its_code),
        cmocka_unit_test(every_verb_has_help),
        cmocka_unit_test(the_version_and_revision_are_said),
        cmocka_unit_test(the_program_refuses_what_it_does_not_know),
        cmocka_unit_test(what_cannot_be_printed_is_an_error),
        cmocka_unit_test(what_does_not_fit_is_an_error),
        cmocka_unit_test(what_a_file_holds_is_not_guessed_against_its_vocabulary),
    };
    return cmocka_run_group_tests(tests, program_setup, program_teardown);
}
