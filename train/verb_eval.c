/* mixtape eval */
#include <stdio.h>

#include "train/cli.h"
#include "train/corpora.h"
#include "train/evaluate.h"
#include "train/inference.h"

/* What the run was trained on may have been moved since: then nothing is known of its tokens. */
static mt_status check_tokenizer(const mt_inference *inference, const char *key,
                                 const mt_corpus *corpus)
{
    mt_corpus_info trained;
    if (!inference->has_run) return MT_OK;
    if (mt_corpus_read_info(&trained, inference->config.train_corpus) == MT_OK)
        return mt_corpora_check_pair(&trained, key, mt_corpus_get_info(corpus));
    mt_error_clear();
    return MT_OK;
}

static mt_status evaluate(const mt_inference *inference, const char *data)
{
    mt_corpus *corpus = NULL;
    mt_evaluation e = { 0 };
    mt_status status;
    MT_REQUIRE(*data, MT_ECONFIG, "%.300s names no validation corpus: --data CORPUS.h5 is needed",
               inference->path);
    const bool own = data == inference->config.valid_corpus;
    status = mt_corpus_open(&corpus, data);
    if (status != MT_OK && own)
        MT_TRY_CLEANUP(MT_FAIL(status,
                               "data.valid of the run: %.700s (--data CORPUS.h5 names another)",
                               mt_error_message()));
    MT_TRY_CLEANUP(status);
    MT_TRY_CLEANUP(mt_corpus_check_vocab(corpus, inference->config.trainer.model.vocab_size));
    MT_TRY_CLEANUP(check_tokenizer(inference, own ? "data.valid" : "--data", corpus));
    MT_TRY_CLEANUP(mt_evaluate(&e, inference->trainer, corpus, 0));
    printf("%s on %s: loss %.6f, %.4f bits/%s over %lld windows of %lld tokens\n", inference->path,
           data, e.loss, mt_bits(e.loss), mt_corpus_unit(mt_corpus_get_info(corpus)),
           (long long)e.windows, (long long)inference->config.trainer.sequence_length);
cleanup:
    mt_corpus_close(&corpus);
    return status;
}

mt_status mt_verb_eval(int argc, char **argv)
{
    mt_inference_options how = { .device = NULL };
    const char *data = NULL;
    bool help;
    int count;
    const mt_option options[] = {
        { "data", MT_OPTION_PATH, &data, "CORPUS.h5", "corpus (default: data.valid of the run)" },
        { "sequence", MT_OPTION_COUNT, &how.sequence_length, "N",
          "tokens of a window (default: the run's, or 512)" },
        { "batch", MT_OPTION_COUNT, &how.batch_size, "N",
          "windows at once (default: the run's, or 8)" },
        { "dtype", MT_OPTION_TEXT, &how.dtype, "NAME", "f64, f32 or bf16 (default: the run's)" },
        { "recipe", MT_OPTION_TEXT, &how.recipe, "RECIPE",
          "number formats, none: those of --dtype (default: the run's)" },
        { "device", MT_OPTION_TEXT, &how.device, "NAME",
          "auto, cpu, cuda or cuda:N (default: the run's)" },
    };
    const mt_command command = {
        .usage = "mixtape eval CKPT|RUN [--data CORPUS.h5]",
        .about = "Prints the loss over every window of a validation corpus, and the same in bits a "
                 "byte,\nor in bits a token of a corpus of tokens.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
        .min_arguments = 1,
        .max_arguments = 1,
    };
    MT_TRY(mt_command_parse(&command, argc, argv, &count, &help));
    if (help) return MT_OK;
    mt_inference *inference = NULL;
    MT_TRY(mt_inference_open(&inference, argv[1], &how));
    if (*inference->skipped) fprintf(stderr, "left aside: %s\n", inference->skipped);
    mt_status status = evaluate(inference, data ? data : inference->config.valid_corpus);
    mt_inference_close(&inference);
    return status;
}
