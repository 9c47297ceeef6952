/* mixtape sample */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "train/cli.h"
#include "train/corpus.h"
#include "train/inference.h"
#include "train/nan_watch.h"
#include "train/sampler.h"

enum { ROUND = 64, BYTES = 256 };

/* What is being written. A model of bytes reads and writes text, any other one numbers of tokens.
 */
typedef struct writer {
    mt_trainer *trainer;
    int64_t vocab, sequence;
    int64_t round; /* what lengths are padded to a multiple of */
    bool text;
    int32_t *tokens; /* [sequence]: the end of the text so far, then padding */
    double *logits;  /* [V], of the last token */
    mt_nan_watch *nans;
    int64_t count;
} writer;

static void append(writer *w, int32_t token)
{
    if (w->count > 0 && w->count == w->sequence) {
        w->count--;
        memmove(w->tokens, w->tokens + 1, (size_t)w->count * sizeof *w->tokens);
    }
    w->tokens[w->count++] = token;
}

static mt_status append_prompt(writer *w, const char *prompt)
{
    int64_t given = 0;
    for (const char *p = prompt; *p; given++) {
        char *end = (char *)p + 1;
        long long token = w->text ? (unsigned char)*p : strtoll(p, &end, 10);
        MT_REQUIRE(end != p, MT_ECONFIG,
                   "--prompt: '%.40s' is no number of a token: this model reads numbers from 0 to "
                   "%lld, as in --prompt \"7 0 12\"",
                   p, (long long)w->vocab - 1);
        MT_REQUIRE(token >= 0 && token < w->vocab, MT_ECONFIG,
                   "--prompt: token %lld is not in the vocabulary of %lld", token,
                   (long long)w->vocab);
        append(w, (int32_t)token);
        p = end;
        if (!w->text) p += strspn(p, " ,");
    }
    if (given > w->count)
        fprintf(stderr,
                "of the prompt's %lld tokens only the last %lld are read, a whole sequence\n",
                (long long)given, (long long)w->count);
    if (!given) append(w, w->vocab > '\n' ? '\n' : 0); /* something has to come first */
    return MT_OK;
}

/* Texts are padded to few lengths, so that the arena sees few shapes, where what comes later
 * changes nothing before it: not where experts have room by the number of tokens, or rows share
 * scales. */
static int64_t round_of(const mt_model *model)
{
    return mt_model_get_config(model)->capacity_factor > 0 ||
                   mt_precision_rows_share(mt_model_precision(model))
               ? 1
               : ROUND;
}

static mt_status next_logits(writer *w)
{
    int64_t length = (w->count + w->round - 1) / w->round * w->round;
    if (length > w->sequence) length = w->sequence;
    memset(w->tokens + w->count, 0, (size_t)(length - w->count) * sizeof *w->tokens);
    return mt_trainer_logits(w->trainer, w->tokens, 1, length, w->count - 1, w->logits);
}

/* A vocabulary for bytes may have more tokens, which no text has taught: they are seen. */
static void put_token(const writer *w, int32_t token)
{
    if (!w->text)
        printf(" %d", (int)token);
    else if (token < BYTES)
        putchar(token);
    else
        printf("<%d>", (int)token);
}

static mt_status write_tokens(writer *w, const char *prompt, int64_t count, mt_sampler *sampler)
{
    int32_t token;
    MT_TRY(append_prompt(w, prompt));
    fputs(prompt, stdout);
    for (int64_t i = 0; i < count; i++) {
        MT_TRY(next_logits(w));
        if (i == 0 || i == count - 1) MT_TRY(mt_nan_watch_check(w->nans));
        MT_TRY(mt_sampler_draw(sampler, &token, w->logits, i));
        append(w, token);
        put_token(w, token);
        fflush(stdout);
    }
    putchar('\n');
    return MT_OK;
}

/* Where neither corpus of the run can be read. */
static bool guess_text(int64_t vocab, const char *why)
{
    if (vocab == BYTES)
        fprintf(stderr,
                "the corpus that the model was trained on cannot be read (%s): its tokens are "
                "taken for bytes of text, as its vocabulary has %d\n",
                why, BYTES);
    else
        fprintf(stderr,
                "the corpus that the model was trained on cannot be read (%s): its tokens are read "
                "and written as numbers, as its vocabulary has %lld, and bytes are %d\n",
                why, (long long)vocab, BYTES);
    return vocab == BYTES;
}

/* Whether tokens are bytes of text: as the corpus says that the model was trained on, or the one
 * that it was held against, whose tokens are bytes if and only if the other's are. */
static bool takes_text(const mt_inference *inference)
{
    const mt_config *c = &inference->config;
    const int64_t vocab = c->trainer.model.vocab_size;
    char why[512];
    mt_corpus_info info;
    if (!inference->has_run) return vocab == BYTES;
    if (mt_corpus_read_info(&info, c->train_corpus) == MT_OK) return mt_corpus_of_bytes(&info);
    snprintf(why, sizeof why, "%s", mt_error_message());
    bool read = *c->valid_corpus && mt_corpus_read_info(&info, c->valid_corpus) == MT_OK;
    mt_error_clear();
    return read ? mt_corpus_of_bytes(&info) : guess_text(vocab, why);
}

static mt_status sample(const mt_inference *inference, const char *prompt, int64_t count,
                        const mt_sampler_config *config)
{
    const mt_trainer_config *t = mt_trainer_get_config(inference->trainer);
    writer w = { .trainer = inference->trainer,
                 .vocab = t->model.vocab_size,
                 .sequence = t->sequence_length,
                 .round = round_of(mt_trainer_model(inference->trainer)),
                 .text = takes_text(inference) };
    mt_sampler *sampler = NULL;
    mt_status status;
    MT_TRY(mt_trainer_check_weights(mt_trainer_model(inference->trainer), NULL));
    MT_TRY(mt_nan_watch_create_forward(&w.nans, mt_trainer_model(inference->trainer)));
    w.tokens = malloc((size_t)w.sequence * sizeof *w.tokens);
    w.logits = malloc((size_t)w.vocab * sizeof *w.logits);
    if (!w.tokens || !w.logits)
        MT_TRY_CLEANUP(MT_FAIL(MT_ENOMEM, "no memory for %lld tokens and %lld logits",
                               (long long)w.sequence, (long long)w.vocab));
    MT_TRY_CLEANUP(mt_sampler_create(&sampler, config, w.vocab));
    MT_TRY_CLEANUP(write_tokens(&w, prompt, count, sampler));
cleanup:
    mt_sampler_destroy(&sampler);
    mt_nan_watch_destroy(&w.nans);
    free(w.tokens);
    free(w.logits);
    return status;
}

mt_status mt_verb_sample(int argc, char **argv)
{
    mt_inference_options how = { .batch_size = 1 };
    mt_sampler_config config = { .temperature = 1, .top_p = 1 };
    const char *prompt = "";
    int64_t tokens = 200, seed = 0;
    bool help;
    int count;
    const mt_option options[] = {
        { "prompt", MT_OPTION_TEXT, &prompt, "TEXT",
          "what to go on from (numbers of tokens, \"7 0 12\", unless the model reads bytes)" },
        { "tokens", MT_OPTION_INT, &tokens, "N", "tokens to write (200)" },
        { "temperature", MT_OPTION_REAL, &config.temperature, "X",
          "0: always the most likely token (1)" },
        { "top-k", MT_OPTION_INT, &config.top_k, "K", "only the K most likely tokens; 0: all (0)" },
        { "top-p", MT_OPTION_REAL, &config.top_p, "P",
          "only the most likely tokens that make up P (1)" },
        { "seed", MT_OPTION_INT, &seed, "N", "of the draws (0)" },
        { "sequence", MT_OPTION_COUNT, &how.sequence_length, "N",
          "the most tokens that are read (default: the run's, or 512)" },
        { "dtype", MT_OPTION_TEXT, &how.dtype, "NAME", "f64, f32 or bf16 (default: the run's)" },
        { "recipe", MT_OPTION_TEXT, &how.recipe, "RECIPE",
          "number formats, none: those of --dtype (default: the run's)" },
        { "device", MT_OPTION_TEXT, &how.device, "NAME",
          "auto, cpu, cuda or cuda:N (default: the run's)" },
    };
    const mt_command command = {
        .usage = "mixtape sample CKPT|RUN [--prompt TEXT] [--tokens N]",
        .about = "Writes text: the prompt, then one token after another.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
        .min_arguments = 1,
        .max_arguments = 1,
    };
    MT_TRY(mt_command_parse(&command, argc, argv, &count, &help));
    if (help) return MT_OK;
    MT_REQUIRE(tokens >= 0, MT_ECONFIG, "--tokens is %lld, must not be negative",
               (long long)tokens);
    config.seed = (uint64_t)seed;
    mt_inference *inference = NULL;
    MT_TRY(mt_inference_open(&inference, argv[1], &how));
    if (*inference->skipped) fprintf(stderr, "left aside: %s\n", inference->skipped);
    mt_status status = sample(inference, prompt, tokens, &config);
    mt_inference_close(&inference);
    return status;
}
