/* compare --plot: the picture, and what is left where there is none. */
#include "tests/train/compared.h"

static void a_picture_is_drawn(void **state)
{
    (void)state;
    size_t bytes;
    char options[256];
    put_runs();
    snprintf(options, sizeof options, " --plot %s", in_dir("it's.png"));
    assert_verb(compare(ALL, " --plot a.pdf"), MT_EXIT_USAGE, "the plot 'a.pdf' must end in .png");
    const char *before = getenv("PATH");
    char *path = strdup(before ? before : "");
    setenv("PATH", "/nonexistent", 1);
    assert_verb(compare(ALL, options), MT_EXIT_USAGE, "gnuplot does not start");
    setenv("PATH", path, 1);
    free(path);
    assert_false(mt_path_exists(in_dir("it's.png.gnuplot")));
    if (system("gnuplot --version >/dev/null 2>&1") != 0) skip();
    static const char *const cases[] = { ALL, "bf16-0", "bf16-0 mxfp8-0" };
    for (int i = 0; i < 3; i++) {
        unlink(in_dir("it's.png"));
        assert_verb(compare(cases[i], options), 0, "group");
        assert_null(strstr(verb_output, "arning"));
        char *data = get_file(in_dir("it's.png"), &bytes);
        assert_true(bytes > 1000 && memcmp(data, "\x89PNG", 4) == 0);
        free(data);
        assert_false(mt_path_exists(in_dir("it's.png.gnuplot")));
    }
}

/* compare --plot with `program`, which fails, in gnuplot's place. */
static void plot_by(const char *program, const char *runs, const char *picture)
{
    char options[300], path[4096];
    const char *before = getenv("PATH");
    char *kept = strdup(before ? before : "");
    assert_ok(mt_dir_create(in_dir("bin")));
    put_text(in_dir("bin/gnuplot"), program);
    assert_int_equal(chmod(in_dir("bin/gnuplot"), 0700), 0);
    snprintf(options, sizeof options, " --plot %s", in_dir(picture));
    snprintf(path, sizeof path, "%s:%s", in_dir("bin"), kept);
    setenv("PATH", path, 1);
    assert_verb(compare(runs, options), MT_EXIT_FILES, "gnuplot failed");
    setenv("PATH", kept, 1);
    free(kept);
}

/* A plot that fails half-way leaves the one before, and no other file. */
static void a_failed_plot_leaves_the_old_one(void **state)
{
    (void)state;
    static const char program[] = "#!/bin/sh\n"
                                  "out=$(sed -n \"s/^set output '\\(.*\\)'/\\1/p\" \"$1\")\n"
                                  "echo half >\"$out\"\nexit 1\n";
    size_t bytes;
    put_text(in_dir("old.png"), "old");
    plot_by(program, "bf16-0", "old.png");
    char *text = get_file(in_dir("old.png"), &bytes);
    assert_string_equal(text, "old");
    free(text);
    assert_false(mt_path_exists(in_dir("old.png.tmp")));
}

/* A run whose losses are `losses`, in mxfp8 or bf16. */
static void put_losses(const char *run, const char *recipe, const char *losses)
{
    char text[512];
    snprintf(text, sizeof text, "%s{\"step\":30,\"valid_bits_per_byte\":2,\"full\":true}\n",
             losses);
    put_config(run, recipe, 0, "b.h5");
    put_in(run, "metrics.jsonl", text);
}

/* Nothing is said of ranges, of which gnuplot would warn, nor of curves without a point. */
static void what_cannot_be_drawn_is_left_out(void **state)
{
    (void)state;
#define LOSS(step, loss) "{\"step\":" #step ",\"loss\":" #loss "}\n"
    static const struct {
        const char *losses;
        bool alone, differs; /* drawn by itself, and against the last one */
    } cases[] = {
        { "", false, false },
        { LOSS(10, null), false, false },
        { LOSS(30, 3), true, true },
        { LOSS(10, 3) LOSS(30, 3), true, true },
        { LOSS(5, 4) LOSS(15, 3), true, false },
        { LOSS(10, 4) LOSS(20, 3.5) LOSS(30, 3), true, true },
    };
    enum { CASES = sizeof cases / sizeof *cases };
    char options[256];
    size_t bytes;
    if (system("gnuplot --version >/dev/null 2>&1") != 0) skip();
    snprintf(options, sizeof options, " --plot %s", in_dir("few.png"));
    put_losses("last", "mxfp8", cases[CASES - 1].losses);
    for (int i = 0; i < CASES; i++) {
        unlink(in_dir("few.png"));
        put_losses("one", "bf16", cases[i].losses);
        assert_verb(compare("one", options), cases[i].alone ? 0 : MT_EXIT_USAGE,
                    cases[i].alone ? "nothing to compare.\n" : "few.png' would be empty: no group");
        assert_true(cases[i].alone == mt_path_exists(in_dir("few.png")));
        assert_verb(compare("one last", options), 0, "");
        static const char *const words[] = { "arning", "gnuplot", "undefined" };
        for (int w = 0; w < 3; w++) assert_null(strstr(verb_output, words[w]));
        plot_by("#!/bin/sh\ncp \"$1\" \"$1.seen\"\nexit 1\n", "one last", "seen.png");
        assert_non_null(strstr(verb_output, "seen.png' was not drawn: gnuplot failed"));
        char *text = get_file(in_dir("seen.png.gnuplot.seen"), &bytes);
        text[bytes - 1] = '\0';
        assert_true(!strstr(text, "difference over paired seeds") == !cases[i].differs);
        assert_true(!strstr(text, "set title \"no differences: ") == cases[i].differs);
        free(text);
    }
#undef LOSS
}

/* gnuplot draws no legend at all where a title is wider than the picture. */
static void long_titles_are_cut(void **state)
{
    (void)state;
    char recipe[512] = "bf16; layers=a";
    size_t bytes;
    put_run("short-0", "bf16", 0, 2);
    for (int i = 0; i < 100; i++) strcat(recipe, "\xc3\xa4");
    strcat(recipe, " mxfp8");
    for (int skip = 0; skip < 2; skip++) { /* a character is whole, wherever it begins */
        char shifted[512];
        snprintf(shifted, sizeof shifted, "bf16;%s", recipe + strlen("bf16;") + skip);
        put_run("long-0", shifted, 0, 3);
        plot_by("#!/bin/sh\ncp \"$1\" \"$1.seen\"\nexit 1\n", "short-0 long-0", "long.png");
        char *text;
        assert_ok(mt_file_read_all(&text, &bytes, in_dir("long.png.gnuplot.seen"), 1 << 20));
        assert_non_null(strstr(text, " title '1: recipe.use: bf16'"));
        const char *title = strstr(text, " title '2: recipe.use: ");
        assert_non_null(title);
        const char *end = strstr(title, "\xa4 ...'");
        assert_non_null(end);
        assert_in_range(end - title, 100, 130);
        free(text);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_picture_is_drawn),
        cmocka_unit_test(a_failed_plot_leaves_the_old_one),
        cmocka_unit_test(what_cannot_be_drawn_is_left_out),
        cmocka_unit_test(long_titles_are_cut),
    };
    return cmocka_run_group_tests(tests, files_setup, files_teardown);
}
