/* Windows in order, as many at once as a micro-batch holds. */
#include "train/evaluate.h"

#include <math.h>
#include <stdlib.h>

#include "train/nan_watch.h"
#include "train/signals.h"

double mt_bits(double nats)
{
    return nats / log(2);
}

/* What a rank found in one micro-batch. */
typedef struct finding {
    double sum;
    int64_t counted, signal;
    bool unread; /* its windows could not be read: what it ran is none of them */
} finding;

/* A round: each rank runs the micro-batch of its place; what they found comes back in their order,
 * which is that of one rank. A rank past the end runs the first one again, for the others' sake:
 * they need its part of the weights; so does one that cannot read its windows, until all know. */
static mt_status run_round(finding *all, const mt_evaluation *e, mt_trainer *trainer,
                           const mt_corpus *corpus, int64_t first, int32_t *tokens,
                           int32_t *targets)
{
    const mt_trainer_config *c = mt_trainer_get_config(trainer);
    int64_t s = c->sequence_length, windows = mt_corpus_windows(corpus, s);
    int rank = mt_comm_rank(c->comm);
    finding own = { .signal = mt_signals_pending() };
    int64_t at = first + rank * c->micro_batch_size;
    bool idle = at >= e->windows;
    if (idle) at = 0;
    int64_t count = e->windows - at < c->micro_batch_size ? e->windows - at : c->micro_batch_size;
    mt_status read = MT_OK;
    for (int64_t i = 0; i < count && read == MT_OK; i++)
        read = mt_corpus_window(corpus, s, (at + i) * windows / e->windows, tokens + i * s,
                                targets + i * s);
    own.unread = read != MT_OK;
    if (!c->comm) MT_TRY(read);
    MT_TRY(mt_trainer_eval(trainer, tokens, targets, count, &own.sum, &own.counted));
    if (idle) own.sum = 0, own.counted = 0;
    all[rank] = own;
    if (!c->comm) return MT_OK;
    MT_TRY(mt_comm_all_gather(c->comm, NULL, all, &all[rank], sizeof own, "validation"));
    bool unread = false;
    for (int r = 0; r < mt_comm_size(c->comm); r++) unread |= all[r].unread;
    return unread ? mt_comm_agree(c->comm, read, "the validation data") : MT_OK;
}

static mt_status run_windows(mt_evaluation *e, mt_trainer *trainer, const mt_corpus *corpus,
                             int32_t *tokens, int32_t *targets)
{
    const mt_trainer_config *c = mt_trainer_get_config(trainer);
    int ranks = mt_comm_size(c->comm);
    finding *all = calloc((size_t)ranks, sizeof *all);
    MT_REQUIRE(all, MT_ENOMEM, "evaluation: no memory for %d ranks", ranks);
    mt_status status = MT_OK;
    double sum = 0;
    for (int64_t first = 0; first < e->windows && !e->stopped && status == MT_OK;
         first += c->micro_batch_size * ranks) {
        status = run_round(all, e, trainer, corpus, first, tokens, targets);
        for (int r = 0; r < ranks; r++) {
            sum += all[r].sum;
            e->tokens += all[r].counted;
            e->stopped |= all[r].signal != 0;
        }
    }
    free(all);
    MT_TRY(status);
    if (e->stopped) return MT_OK;
    e->loss = sum / (double)e->tokens;
    if (isfinite(e->loss)) return MT_OK;
    status = MT_FAIL(MT_ENUMERIC, "the validation loss is %g", fabs(e->loss)); /* every rank's */
    return mt_comm_agree(c->comm, status, "validation");
}

/* Where formats have no NaN, the loss does not show one. */
static mt_status check_nans(mt_nan_watch *nans, mt_comm *comm)
{
    mt_status status = mt_nan_watch_check(nans);
    return status == MT_ENUMERIC ? mt_comm_agree(comm, status, "validation") : status;
}

mt_status mt_evaluate(mt_evaluation *result, mt_trainer *trainer, const mt_corpus *corpus,
                      int64_t windows)
{
    const mt_trainer_config *c = mt_trainer_get_config(trainer);
    int64_t all = mt_corpus_windows(corpus, c->sequence_length);
    MT_REQUIRE(all > 0, MT_ECONFIG,
               "the validation corpus has %lld tokens, not one window of sequence_length %lld + 1",
               (long long)mt_corpus_get_info(corpus)->tokens, (long long)c->sequence_length);
    MT_REQUIRE(windows >= 0, MT_EINVAL, "evaluation: %lld windows", (long long)windows);
    mt_model *model = mt_trainer_model(trainer);
    mt_nan_watch *nans;
    MT_TRY(mt_trainer_check_weights(model, c->comm));
    MT_TRY(mt_nan_watch_create_forward(&nans, model));
    *result = (mt_evaluation){ .windows = windows && windows < all ? windows : all };
    result->full = result->windows == all;
    size_t bytes = (size_t)(c->micro_batch_size * c->sequence_length) * sizeof(int32_t);
    int32_t *tokens = calloc(1, bytes), *targets = calloc(1, bytes);
    mt_status status = tokens && targets ? run_windows(result, trainer, corpus, tokens, targets)
                                         : MT_FAIL(MT_ENOMEM, "evaluation: no memory for a batch");
    if (status == MT_OK) status = check_nans(nans, c->comm);
    mt_nan_watch_destroy(&nans);
    free(tokens);
    free(targets);
    return status;
}
