/* The command line: verbs, their options, exit codes.
 *
 * A verb is one file train/verb_<name>.c with one function mt_verb_<name>, and one row of MT_VERBS.
 * It describes itself in a struct mt_command, lets mt_command_parse read its arguments, prints
 * results to stdout, and returns a status: main prints the error's sentence and turns the status
 * into the exit code. Verbs are the program, not the library: they may print; they never call exit.
 */
#pragma once

#include <stdbool.h>

#include "core/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* X(name, arguments, what it does) */
#define MT_VERBS(X)                                                                                \
    X(train, "CONFIG.yaml", "train a model, or go on with a run")                                  \
    X(eval, "CKPT|RUN", "loss and bits/byte over a whole validation set")                          \
    X(sample, "CKPT|RUN", "write text")                                                            \
    X(data, "pack|info", "make and describe corpora")                                              \
    X(export, "CKPT|RUN DIR", "write a Hugging Face directory")                                    \
    X(import, "DIR -o CKPT", "read a Hugging Face directory")                                      \
    X(compare, "RUN...", "loss differences between runs, with their errors")                       \
    X(quantize, "IN.h5 -o OUT.h5", "a tensor in any number format, to compare bit for bit")        \
    X(gradcheck, "[--op GLOB]", "the tape's gradients against central differences")                \
    X(trace, "CKPT --tokens IN.h5", "what a model computes, written out for comparison")           \
    X(inspect, "CKPT|RUN|FILE|DIR", "what a checkpoint, a corpus or another file holds")           \
    X(plan, "CONFIG.yaml", "memory, parameters and work of a run, before it starts")               \
    X(bench, "[FAMILY]", "how fast this build computes here, against what is possible")            \
    X(doctor, "", "what was found on this machine, and a self-check")

/* argv[0] is the verb's name, the rest its arguments. */
#define MT_VERB_DECLARE(name, arguments, about) mt_status mt_verb_##name(int argc, char **argv);
MT_VERBS(MT_VERB_DECLARE)
#undef MT_VERB_DECLARE

typedef enum mt_option_kind {
    MT_OPTION_FLAG,  /* bool */
    MT_OPTION_TEXT,  /* const char *, borrowed from argv */
    MT_OPTION_PATH,  /* the same, of a file or a directory: not empty */
    MT_OPTION_INT,   /* int64_t */
    MT_OPTION_COUNT, /* the same, positive: 0 stays where it is absent */
    MT_OPTION_REAL,  /* double */
    MT_OPTION_LIST   /* mt_option_list: given any number of times */
} mt_option_kind;

/* What an MT_OPTION_INT begins as that may be any number, to show that it was given. */
#define MT_OPTION_ABSENT INT64_MIN

enum { MT_OPTION_LIST_MAX = 256 };
typedef struct mt_option_list {
    const char *items[MT_OPTION_LIST_MAX];
    int count;
} mt_option_list;

typedef struct mt_option {
    const char *name; /* "run" for --run, "o" for -o */
    mt_option_kind kind;
    void *value;          /* where it goes; left alone when the option is absent */
    const char *argument; /* "DIR"; NULL for a flag */
    const char *help;
} mt_option;

typedef struct mt_command {
    const char *usage; /* "mixtape eval CKPT|RUN [options]" */
    const char *about; /* a paragraph for --help */
    const mt_option *options;
    int option_count;
    int min_arguments, max_arguments; /* positional ones */
} mt_command;

/* Reads options ("--name value", "--name=value", "-o value", "--" ends them) and moves the
 * positional arguments to argv[1..*count]. With --help it prints the command and sets *help: the
 * verb then returns MT_OK at once. Errors: MT_ECONFIG names the option, its value, the rule, and
 * the nearest known name. */
mt_status mt_command_parse(const mt_command *command, int argc, char **argv, int *count,
                           bool *help);

/* The exit code of a status' class; `mixtape --help` lists them. */
enum {
    MT_EXIT_DONE = 0,
    MT_EXIT_INTERNAL = 1, /* out of memory, or a fault of ours */
    MT_EXIT_USAGE = 2,    /* usage, configuration, unsupported */
    MT_EXIT_NUMERICS = 3,
    MT_EXIT_PREEMPTED = 4, /* asked to stop; state was saved */
    MT_EXIT_FILES = 5,     /* input/output, damaged files */
    MT_EXIT_DEVICE = 6
};
int mt_exit_code(mt_status status);

/* All of main: finds the verb, runs it, reports its error on stderr, returns the exit code. */
int mt_cli_main(int argc, char **argv);

#ifdef __cplusplus
}
#endif
