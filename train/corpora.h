/* The corpora of a run: whether the model can read them, and what about the two is likely a
 * mistake.
 */
#pragma once

#include "train/config.h"
#include "train/corpus.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MT_CORPORA_IDENTITY = 256 };

/* Opens the corpus that `key` names, for a model of the configuration: its tokens are in the
 * vocabulary, and there is a window of them. Errors: MT_ECONFIG names the key; those of
 * mt_corpus_open after it. */
mt_status mt_corpora_open(mt_corpus **corpus, const char *key, const char *path,
                          const mt_config *config);

/* What it holds, wherever it lies. */
void mt_corpora_identify(char text[MT_CORPORA_IDENTITY], const mt_corpus *corpus);

/* Refuses a validation corpus, which `key` names, of another tokenizer than the training data's. */
mt_status mt_corpora_check_pair(const mt_corpus_info *train, const char *key,
                                const mt_corpus_info *valid);

typedef void (*mt_corpora_line)(void *context, const char *text);

/* A line for each thing that can be meant but mostly is not; `valid`: NULL for none. */
void mt_corpora_doubts(const mt_corpus *train, const mt_corpus *valid, int64_t vocab_size,
                       mt_corpora_line line, void *context);

#ifdef __cplusplus
}
#endif
