/* Corpora against the model, and against each other. */
#include "train/corpora.h"

#include <stdio.h>
#include <string.h>

mt_status mt_corpora_open(mt_corpus **corpus, const char *key, const char *path,
                          const mt_config *config)
{
    const mt_trainer_config *t = &config->trainer;
    mt_status status = mt_corpus_open(corpus, path);
    if (status == MT_OK) status = mt_corpus_check_vocab(*corpus, t->model.vocab_size);
    if (status != MT_OK) return MT_FAIL(status, "%s: %.900s", key, mt_error_message());
    MT_REQUIRE(mt_corpus_windows(*corpus, t->sequence_length) > 0, MT_ECONFIG,
               "%s: %.300s has %lld tokens, not one window of data.sequence_length %lld + 1", key,
               path, (long long)mt_corpus_get_info(*corpus)->tokens, (long long)t->sequence_length);
    return MT_OK;
}

void mt_corpora_identify(char text[MT_CORPORA_IDENTITY], const mt_corpus *corpus)
{
    const mt_corpus_info *info = mt_corpus_get_info(corpus);
    snprintf(text, MT_CORPORA_IDENTITY, "sha256 %s, split %s, %lld tokens", info->sha256,
             info->split, (long long)info->tokens);
}

/* What `data pack` records of tokens that came without a name. */
static bool is_named(const mt_corpus_info *info)
{
    return strcmp(info->tokenizer, "unknown") != 0;
}

mt_status mt_corpora_check_pair(const mt_corpus_info *train, const char *key,
                                const mt_corpus_info *valid)
{
    bool known = (is_named(train) && is_named(valid)) || mt_corpus_of_bytes(train) ||
                 mt_corpus_of_bytes(valid);
    MT_REQUIRE(!known || !strcmp(train->tokenizer, valid->tokenizer), MT_ECONFIG,
               "%s: its tokens are of tokenizer '%.100s', those of data.train of '%.100s': a loss "
               "of one says nothing of the other",
               key, valid->tokenizer, train->tokenizer);
    return MT_OK;
}

void mt_corpora_doubts(const mt_corpus *train, const mt_corpus *valid, int64_t vocab_size,
                       mt_corpora_line line, void *context)
{
    char a[MT_CORPORA_IDENTITY], b[MT_CORPORA_IDENTITY], text[256];
    const mt_corpus_info *info = mt_corpus_get_info(train);
    mt_corpora_identify(a, train);
    if (valid) mt_corpora_identify(b, valid);
    if (valid && !strcmp(a, b))
        line(context,
             "data.valid holds what data.train holds: the validation loss is of tokens that "
             "were trained on");
    if (info->vocab_size <= vocab_size) return;
    snprintf(text, sizeof text,
             "model.vocab_size %lld is below the vocabulary of data.train, %lld: its largest token "
             "is %lld, but other text may have larger ones",
             (long long)vocab_size, (long long)info->vocab_size, (long long)info->largest);
    line(context, text);
}
