/* mixtape data pack, mixtape data info */
#include <stdio.h>
#include <string.h>

#include "train/cli.h"
#include "train/corpus.h"
#include "train/nearest.h"

enum { INPUTS_MAX = 65536 };

/* What packing lacks, by its option. */
static mt_status name_option(mt_status status, mt_corpus_argument missing)
{
    static const char *const options[] = {
        [MT_CORPUS_INPUT] = "--format NAME",          [MT_CORPUS_INPUT_BYTES] = "--format bytes",
        [MT_CORPUS_VOCAB_SIZE] = "--vocab-size N",    [MT_CORPUS_SPLIT] = "--split RULE",
        [MT_CORPUS_VALID_OUTPUT] = "--valid FILE.h5",
    };
    _Static_assert(sizeof options / sizeof *options == MT_CORPUS_ARGUMENT_COUNT, "one for each");
    if (status != MT_ECONFIG || missing == MT_CORPUS_NO_ARGUMENT) return status;
    return MT_FAIL(status, "%.900s: %s", mt_error_message(), options[missing]);
}

static mt_status pack(int argc, char **argv)
{
    mt_corpus_pack_args args = { .input = MT_INPUT_AUTO };
    mt_corpus_pack_result result;
    const char *format = "auto";
    bool help;
    int count;
    const mt_option options[] = {
        { "o", MT_OPTION_PATH, &args.output, "FILE.h5", "the corpus to write" },
        { "format", MT_OPTION_TEXT, &format, "NAME",
          "of the inputs: auto (by name), bytes, u16, u32, npy" },
        { "vocab-size", MT_OPTION_INT, &args.vocab_size, "N", "of token files; bytes have 256" },
        { "tokenizer", MT_OPTION_TEXT, &args.tokenizer, "NAME", "recorded in the corpus" },
        { "split", MT_OPTION_TEXT, &args.split, "RULE",
          "hold out: documents:N (every N-th input), tail:N (the last N-th of each), kjv" },
        { "valid", MT_OPTION_PATH, &args.valid_output, "FILE.h5",
          "the corpus of what is held out" },
        { "sha256", MT_OPTION_TEXT, &args.sha256, "HEX", "what the inputs must hash to" },
    };
    const mt_command command = {
        .usage = "mixtape data pack FILE... -o CORPUS.h5 [--split RULE --valid CORPUS.h5]",
        .about =
            "Packs text, or files of tokens, into a corpus to train on. Text becomes bytes; .bin\n"
            "files (u16, or u32 for a vocabulary above 65536) and .npy arrays hold tokens.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
        .min_arguments = 1,
        .max_arguments = INPUTS_MAX,
    };
    MT_TRY(mt_command_parse(&command, argc, argv, &count, &help));
    if (help) return MT_OK;
    MT_REQUIRE(args.output, MT_ECONFIG, "no -o FILE.h5 given; usage: %s", command.usage);
    MT_TRY(mt_corpus_input_parse(&args.input, format));
    args.inputs = (const char *const *)argv + 1;
    args.input_count = count;
    mt_status status = mt_corpus_pack(&result, &args);
    if (status != MT_OK) return name_option(status, result.missing);
    printf("%s: %lld tokens", args.output, (long long)result.tokens);
    if (args.valid_output)
        printf("; %s: %lld tokens", args.valid_output, (long long)result.valid_tokens);
    printf("; sha256 %s\n", result.sha256);
    return MT_OK;
}

static mt_status info(int argc, char **argv)
{
    bool help;
    int count;
    const mt_command command = {
        .usage = "mixtape data info CORPUS.h5",
        .about = "Verifies a corpus and describes it.",
        .min_arguments = 1,
        .max_arguments = 1,
    };
    mt_corpus *corpus = NULL;
    MT_TRY(mt_command_parse(&command, argc, argv, &count, &help));
    if (help) return MT_OK;
    MT_TRY(mt_corpus_open(&corpus, argv[1]));
    const mt_corpus_info *i = mt_corpus_get_info(corpus);
    printf("tokens      %lld, %s\ndocuments   %lld\nvocabulary  %lld, largest token %lld\n"
           "tokenizer   %s\nsplit       %s\nsource      sha256 %s\n",
           (long long)i->tokens, mt_dtype_name(i->dtype), (long long)i->documents,
           (long long)i->vocab_size, (long long)i->largest, i->tokenizer,
           *i->split ? i->split : "none", i->sha256);
    mt_corpus_close(&corpus);
    return MT_OK;
}

static const struct {
    const char *name;
    mt_status (*run)(int argc, char **argv);
} actions[] = { { "pack", pack }, { "info", info } };
enum { ACTIONS = sizeof actions / sizeof actions[0] };

mt_status mt_verb_data(int argc, char **argv)
{
    if (argc < 2 || strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0) {
        puts("usage: mixtape data pack FILE... -o CORPUS.h5\n"
             "       mixtape data info CORPUS.h5\n\n"
             "mixtape data pack --help lists its options.");
        return argc < 2 ? MT_FAIL(MT_ECONFIG, "pack or info?") : MT_OK;
    }
    for (int i = 0; i < ACTIONS; i++)
        if (strcmp(actions[i].name, argv[1]) == 0) return actions[i].run(argc - 1, argv + 1);
    const char *near = mt_nearest(argv[1], &actions[0].name, ACTIONS, sizeof actions[0]);
    return MT_FAIL(MT_ECONFIG, "unknown action '%s'%s%s (pack, info)", argv[1],
                   near ? ": did you mean " : "", near ? near : "");
}
