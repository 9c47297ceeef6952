/* Windows in order, as many at once as a micro-batch holds. */
#include "train/evaluate.h"

#include <math.h>
#include <stdlib.h>

#include "train/signals.h"

double mt_bits(double nats)
{
    return nats / log(2);
}

static mt_status run_windows(mt_evaluation *e, mt_trainer *trainer, const mt_corpus *corpus,
                             int64_t all, int32_t *tokens, int32_t *targets)
{
    const mt_trainer_config *c = mt_trainer_get_config(trainer);
    int64_t s = c->sequence_length;
    double sum = 0;
    for (int64_t first = 0; first < e->windows; first += c->micro_batch_size) {
        int64_t count = e->windows - first, counted = 0;
        double part = 0;
        if (count > c->micro_batch_size) count = c->micro_batch_size;
        if (mt_signals_pending()) {
            e->stopped = true;
            return MT_OK;
        }
        for (int64_t i = 0; i < count; i++)
            MT_TRY(mt_corpus_window(corpus, s, (first + i) * all / e->windows, tokens + i * s,
                                    targets + i * s));
        MT_TRY(mt_trainer_eval(trainer, tokens, targets, count, &part, &counted));
        sum += part;
        e->tokens += counted;
    }
    e->loss = sum / (double)e->tokens;
    MT_REQUIRE(isfinite(e->loss), MT_ENUMERIC, "the validation loss is %g", e->loss);
    return MT_OK;
}

mt_status mt_evaluate(mt_evaluation *result, mt_trainer *trainer, const mt_corpus *corpus,
                      int64_t windows)
{
    const mt_trainer_config *c = mt_trainer_get_config(trainer);
    int64_t all = mt_corpus_windows(corpus, c->sequence_length);
    MT_REQUIRE(all > 0, MT_ECONFIG,
               "the validation corpus has %lld tokens, not one window of sequence_length %lld + 1",
               (long long)mt_corpus_get_info(corpus)->tokens, (long long)c->sequence_length);
    *result = (mt_evaluation){ .windows = windows && windows < all ? windows : all };
    result->full = result->windows == all;
    size_t bytes = (size_t)(c->micro_batch_size * c->sequence_length) * sizeof(int32_t);
    int32_t *tokens = malloc(bytes), *targets = malloc(bytes);
    mt_status status = tokens && targets
                           ? run_windows(result, trainer, corpus, all, tokens, targets)
                           : MT_FAIL(MT_ENOMEM, "evaluation: no memory for a batch");
    free(tokens);
    free(targets);
    return status;
}
