/* Cross-entropy. */
#include "kernels/cpu/vecmath.h"

#include "kernels/cpu/backend.h"

/* SERIAL: fewer elements are done by one thread. BLOCK: logits whose maximum and sum are taken
 * while in the L1 cache. */
enum { SERIAL = 1 << 14, BLOCK = 2048 };

/* The maximum, and sum exp(x - maximum), of a row. A NaN anywhere, or +Inf, makes the sum NaN. */
static double sum_exp(mt_real *maximum, const mt_elem *logits, int64_t vocab)
{
    mt_real most = -(mt_real)INFINITY;
    double total = 0;
    for (int64_t from = 0; from < vocab; from += BLOCK) {
        const mt_elem *x = logits + from;
        int64_t count = mt_min(BLOCK, vocab - from);
        mt_real_bits order = mt_to_order(most);
#pragma omp simd reduction(max : order)
        for (int64_t v = 0; v < count; v++) {
            mt_real_bits o = mt_to_order(mt_get(x + v));
            order = o > order ? o : order;
        }
        mt_real block_most = mt_from_order(order);
        /* All -Inf so far: any finite base gives the sum 0. */
        mt_real base = block_most == -(mt_real)INFINITY ? 0 : block_most, sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t v = 0; v < count; v++) sum += mt_exp(mt_get(x + v) - base);
        if (from) total *= exp((double)most - (double)base);
        total += (double)sum;
        most = block_most;
    }
    *maximum = most;
    return total;
}

mt_status MT_CPU(cross_entropy_fwd)(mt_stream *stream, const struct mt_cross_entropy_fwd_args *args)
{
    int64_t tokens = args->tokens, vocab = args->vocab;
    void *token_loss = args->token_loss;
    if (!token_loss && tokens)
        MT_TRY(mt_cpu_scratch(stream, &token_loss, (size_t)tokens * sizeof(mt_real)));
    mt_real *losses = token_loss, *lse = args->lse;
#pragma omp parallel for schedule(static) if (tokens * vocab >= SERIAL)
    for (int64_t t = 0; t < tokens; t++) {
        int32_t target = args->targets[t];
        const mt_elem *logits = (const mt_elem *)args->logits + t * vocab;
        losses[t] = 0;
        if (target == args->ignore) continue;
        mt_real most;
        double log_sum = log(sum_exp(&most, logits, vocab));
        bool known = target >= 0 && target < vocab;
        mt_real at_target = known ? mt_get(logits + target) : (mt_real)NAN;
        lse[t] = (mt_real)((double)most + log_sum);
        /* Not lse - logit, which would lose what log_sum says of a confident prediction. */
        losses[t] = (mt_real)(((double)most - (double)at_target) + log_sum);
    }
    double sum = 0;
    for (int64_t first = 0; first < tokens; first += MT_LOSS_RUN) {
        double run = 0;
        for (int64_t t = first; t < mt_min(tokens, first + MT_LOSS_RUN); t++)
            run += (double)losses[t];
        sum += run;
    }
    *(mt_real *)args->loss = (mt_real)(sum * (double)*(const mt_real *)args->scale);
    return MT_OK;
}

mt_status MT_CPU(cross_entropy_bwd)(mt_stream *stream, const struct mt_cross_entropy_bwd_args *args)
{
    (void)stream;
    int64_t tokens = args->tokens, vocab = args->vocab;
    if (tokens == 0) return MT_OK;
    mt_real scale = *(const mt_real *)args->dloss * *(const mt_real *)args->scale;
#pragma omp parallel for schedule(static) if (tokens * vocab >= SERIAL)
    for (int64_t t = 0; t < tokens; t++) {
        int32_t target = args->targets[t];
        const mt_elem *logits = (const mt_elem *)args->logits + t * vocab;
        mt_elem *dlogits = (mt_elem *)args->dlogits + t * vocab;
        if (target == args->ignore) {
            memset(dlogits, 0, (size_t)vocab * sizeof *dlogits);
            continue;
        }
        mt_real lse = ((const mt_real *)args->lse)[t];
        bool known = target >= 0 && target < vocab;
        mt_real at_target = known ? mt_exp(mt_get(logits + target) - lse) - 1 : 0;
#pragma omp simd
        for (int64_t v = 0; v < vocab; v++)
            mt_put(dlogits + v, scale * mt_exp(mt_get(logits + v) - lse));
        if (known) mt_put(dlogits + target, scale * at_target);
    }
    return MT_OK;
}
