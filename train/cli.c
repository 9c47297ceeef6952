/* The verb table, option parsing, exit codes. */
#include "train/cli.h"

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "dist/launch.h"
#include "train/build_info.h"
#include "train/nearest.h"
#include "train/signals.h"

typedef struct verb {
    const char *name, *arguments, *about;
    mt_status (*run)(int argc, char **argv);
} verb;

#define VERB_ROW(name, arguments, about) { #name, arguments, about, mt_verb_##name },
static const verb verbs[] = { MT_VERBS(VERB_ROW) };
enum { VERBS = sizeof verbs / sizeof verbs[0], OPTION_TEXT = 64 };
enum { TURN_S = 3 }; /* a second after rank 0's end, mpirun and --gpus end the others */

static const int exit_codes[MT_STATUS_COUNT] = {
    [MT_OK] = MT_EXIT_DONE,
    [MT_EINVAL] = MT_EXIT_USAGE,
    [MT_ECONFIG] = MT_EXIT_USAGE,
    [MT_ENOMEM] = MT_EXIT_INTERNAL,
    [MT_EIO] = MT_EXIT_FILES,
    [MT_EDAMAGED] = MT_EXIT_FILES,
    [MT_ENUMERIC] = MT_EXIT_NUMERICS,
    [MT_EUNSUPPORTED] = MT_EXIT_USAGE,
    [MT_EDEVICE] = MT_EXIT_DEVICE,
    [MT_EPREEMPTED] = MT_EXIT_PREEMPTED,
    [MT_EINTERNAL] = MT_EXIT_INTERNAL,
};

int mt_exit_code(mt_status status)
{
    return (unsigned)status < MT_STATUS_COUNT ? exit_codes[status] : MT_EXIT_INTERNAL;
}

/* ---- options -----------------------------------------------------------------------------------
 */

static const char *dashes(const mt_option *option)
{
    return option->name[1] ? "--" : "-";
}

static void print_command(const mt_command *command)
{
    printf("usage: %s\n\n%s\n", command->usage, command->about);
    if (command->option_count) printf("\noptions:\n");
    for (int i = 0; i < command->option_count; i++) {
        const mt_option *o = &command->options[i];
        char left[64];
        snprintf(left, sizeof left, "%s%s%s%s", dashes(o), o->name, o->argument ? " " : "",
                 o->argument ? o->argument : "");
        printf("  %-22s %s\n", left, o->help);
    }
}

static mt_status store_value(const mt_option *option, const char *text)
{
    char *end = NULL;
    errno = 0;
    switch (option->kind) {
    case MT_OPTION_FLAG: *(bool *)option->value = true; return MT_OK;
    case MT_OPTION_PATH:
        MT_REQUIRE(*text, MT_ECONFIG, "%s%s: the name is empty: %s", dashes(option), option->name,
                   option->argument);
        *(const char **)option->value = text;
        return MT_OK;
    case MT_OPTION_TEXT: *(const char **)option->value = text; return MT_OK;
    case MT_OPTION_INT:
    case MT_OPTION_COUNT:
        *(int64_t *)option->value = strtoll(text, &end, 10);
        MT_REQUIRE(errno != ERANGE, MT_ECONFIG, "%s%s: %s is not in -2^63..2^63-1", dashes(option),
                   option->name, text);
        MT_REQUIRE(end != text && !*end && errno == 0, MT_ECONFIG, "%s%s: '%s' is not an integer",
                   dashes(option), option->name, text);
        MT_REQUIRE(option->kind == MT_OPTION_INT || *(int64_t *)option->value > 0, MT_ECONFIG,
                   "%s%s is %lld, must be positive", dashes(option), option->name,
                   (long long)*(int64_t *)option->value);
        return MT_OK;
    case MT_OPTION_REAL:
        *(double *)option->value = strtod(text, &end);
        MT_REQUIRE(end != text && !*end && errno == 0 && !strpbrk(text, "xX"), MT_ECONFIG,
                   "%s%s: '%s' is not a number in decimal", dashes(option), option->name, text);
        return MT_OK;
    case MT_OPTION_LIST: {
        mt_option_list *list = option->value;
        MT_REQUIRE(list->count < MT_OPTION_LIST_MAX, MT_ECONFIG, "%s%s given more than %d times",
                   dashes(option), option->name, MT_OPTION_LIST_MAX);
        list->items[list->count++] = text;
        return MT_OK;
    }
    }
    return MT_FAIL(MT_EINTERNAL, "option %s has no kind", option->name);
}

/* The option that `word` ("--name", "--name=value", "-o") names; *value is what follows '=', or
 * NULL. */
static mt_status find_option(const mt_option **option, const char **value,
                             const mt_command *command, const char *word)
{
    bool is_long = word[1] == '-';
    const char *name = word + (is_long ? 2 : 1), *equals = is_long ? strchr(name, '=') : NULL;
    size_t length = equals ? (size_t)(equals - name) : strlen(name);
    *value = equals ? equals + 1 : NULL;
    for (int i = 0; i < command->option_count; i++) {
        const mt_option *o = &command->options[i];
        if (strlen(o->name) != length || strncmp(o->name, name, length) != 0) continue;
        if ((length > 1) != is_long) continue;
        *option = o;
        return MT_OK;
    }
    char text[OPTION_TEXT];
    snprintf(text, sizeof text, "%.*s", (int)length, name);
    const char *near = command->option_count
                           ? mt_nearest(text, &command->options[0].name, command->option_count,
                                        sizeof command->options[0])
                           : NULL;
    return MT_FAIL(MT_ECONFIG, "unknown option %.*s%s%s%s; usage: %s",
                   (int)(length + (is_long ? 2 : 1)), word, near ? ": did you mean " : "",
                   near ? (near[1] ? "--" : "-") : "", near ? near : "", command->usage);
}

mt_status mt_command_parse(const mt_command *command, int argc, char **argv, int *count, bool *help)
{
    bool options_over = false;
    *count = 0;
    *help = false;
    for (int i = 1; i < argc; i++) {
        const char *word = argv[i];
        if (options_over || word[0] != '-' || !word[1]) {
            argv[++*count] = argv[i];
        } else if (strcmp(word, "--") == 0) {
            options_over = true;
        } else if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0) {
            print_command(command);
            *help = true;
            return MT_OK;
        } else {
            const mt_option *option = NULL;
            const char *value = NULL;
            MT_TRY(find_option(&option, &value, command, word));
            bool flag = option->kind == MT_OPTION_FLAG;
            MT_REQUIRE(!flag || !value, MT_ECONFIG, "--%s takes no value", option->name);
            if (!flag && !value) {
                MT_REQUIRE(i + 1 < argc, MT_ECONFIG, "%s%s needs a value: %s", dashes(option),
                           option->name, option->argument);
                value = argv[++i];
            }
            MT_TRY(store_value(option, value));
        }
    }
    MT_REQUIRE(*count >= command->min_arguments && *count <= command->max_arguments, MT_ECONFIG,
               "%d arguments given; usage: %s", *count, command->usage);
    return MT_OK;
}

/* ---- main --------------------------------------------------------------------------------------
 */

static void print_help(void)
{
    printf(
        "mixtape: mixture-of-experts language models, trained in C\n\n"
        "usage: mixtape VERB [arguments] [options]\n\nverbs (mixtape VERB --help tells more):\n");
    for (int i = 0; i < VERBS; i++) {
        char left[64];
        snprintf(left, sizeof left, "%s %s", verbs[i].name, verbs[i].arguments);
        printf("  %-26s %s\n", left, verbs[i].about);
    }
    printf("\nmixtape train --help-config lists every configuration key with its default,\n"
           "mixtape --version says what was built.\n"
           "\nexit codes:\n"
           "  %d  done\n"
           "  %d  out of memory, or a fault of the program\n"
           "  %d  usage, configuration, or something not supported here\n"
           "  %d  numerics: a non-finite loss, a failed gradient check\n"
           "  %d  preempted: asked to stop by SIGTERM, SIGUSR1 or Ctrl-C, state was saved\n"
           "  %d  input/output, or a damaged file\n"
           "  %d  device\n"
           "  128+N  a second signal N: quit at once\n"
           "\nenvironment: OMP_NUM_THREADS (default: every core), MIXTAPE_KERNELS=portable|avx2|"
           "avx512|avx512_bf16|amx\n  or, on cuda, "
           "sm_90a|sm_90a_fp8|cublaslt_grouped|cublaslt|cublaslt_loop|"
           "generic,\n  MIXTAPE_CUBLASLT=FILE (the libcublasLt to load), MIXTAPE_TRACE=1 (errors "
           "with the places they passed)\n",
           MT_EXIT_DONE, MT_EXIT_INTERNAL, MT_EXIT_USAGE, MT_EXIT_NUMERICS, MT_EXIT_PREEMPTED,
           MT_EXIT_FILES, MT_EXIT_DEVICE);
}

static const verb *find_verb(const char *name)
{
    for (int i = 0; i < VERBS; i++)
        if (strcmp(verbs[i].name, name) == 0) return &verbs[i];
    return NULL;
}

/* Its number among the processes that a launcher has started together. */
static int find_rank(void)
{
    mt_launch launch;
    bool known = mt_launch_detect(&launch) == MT_OK;
    mt_error_clear(); /* who needs to know finds it again */
    return known ? launch.rank : 0;
}

/* Of connected ranks rank 0 alone comes here (mt_ranks_close). Before they are, mostly all fail
 * alike: rank 0 speaks at once, the others TURN_S later, where its end has not ended them yet. */
static bool wait_turn(int rank)
{
    const struct timespec turn = { .tv_sec = TURN_S };
    return rank == 0 || nanosleep(&turn, NULL) == 0;
}

static void say(const char *name, int rank, mt_status status)
{
    const char *traced = getenv("MIXTAPE_TRACE"), *message = mt_error_message();
    char who[32] = "";
    if (!wait_turn(rank)) return;
    if (rank > 0 && !strstr(message, "rank ")) snprintf(who, sizeof who, "rank %d: ", rank);
    fprintf(stderr, "mixtape %s: %s: %s%s\n", name, mt_status_name(status), who, message);
    if (traced && *traced) fprintf(stderr, "  passed %s\n", mt_error_trace());
}

/* What was printed has arrived, or it is an error; errors are said on stderr. Returns the exit
 * code.
 */
static int end(const char *name, int rank, mt_status status)
{
    if (status == MT_OK) {
        errno = 0;
        if (fflush(stdout) != 0 || ferror(stdout))
            status = MT_FAIL(MT_EIO, "standard output: %s",
                             errno ? strerror(errno) : "a write to it has failed");
    }
    if (status != MT_OK) say(name, rank, status);
    return mt_exit_code(status);
}

int mt_cli_main(int argc, char **argv)
{
    static char help[] = "--help";
    if (argc == 3 && strcmp(argv[1], "help") == 0 && find_verb(argv[2])) {
        char *words[] = { argv[2], help, NULL };
        return end(argv[2], 0, find_verb(argv[2])->run(2, words));
    }
    if (argc < 2 || strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 ||
        strcmp(argv[1], "help") == 0) {
        print_help();
        return argc < 2 ? MT_EXIT_USAGE : end("help", 0, MT_OK);
    }
    if (strcmp(argv[1], "--version") == 0 || strcmp(argv[1], "version") == 0) {
        printf("mixtape %s, revision %s\n", mt_build_version(), mt_build_revision());
        return end("version", 0, MT_OK);
    }
    const int rank = find_rank();
    const verb *found = find_verb(argv[1]);
    if (!found) {
        const char *near = mt_nearest(argv[1], &verbs[0].name, VERBS, sizeof verbs[0]);
        if (wait_turn(rank))
            fprintf(stderr, "mixtape: unknown verb '%s'%s%s (mixtape --help lists them)\n", argv[1],
                    near ? ": did you mean " : "", near ? near : "");
        return MT_EXIT_USAGE;
    }
    mt_signals_clean_up();
    return end(found->name, rank, found->run(argc - 1, argv + 1));
}
