/* Cross-entropy. */
#include "kernels/cpu/lanes.h"

#include "kernels/cpu/backend.h"

/* SERIAL: fewer elements are done by one thread. BLOCK: logits whose maximum and sum are taken
 * while in the L1 cache. STEP: those taken side by side. */
enum { SERIAL = 1 << 14, BLOCK = 2048, STEP = 4 * LANES };

/* x = STEP logits. */
MT_INLINE void load_step(vec *x, const mt_elem *logits)
{
    MT_UNROLL
    for (int j = 0; j < 4; j++) x[j] = load_elements(logits + j * LANES);
}

/* The maximum, and sum exp(x - maximum), of a row. A NaN anywhere, or +Inf, makes the sum NaN. */
static double sum_exp(mt_real *maximum, const mt_elem *logits, int64_t vocab)
{
    mt_real most = -(mt_real)INFINITY;
    double total = 0;
    for (int64_t from = 0; from < vocab; from += BLOCK) {
        const mt_elem *logit = logits + from;
        int64_t count = mt_min(BLOCK, vocab - from), v = 0;
        mt_real before = most;
        vec x[4], top[4], sums[4] = { { 0 } };
        for (int j = 0; j < 4; j++) top[j] = broadcast(most);
        for (; v + STEP <= count; v += STEP) { /* NaN is passed over */
            load_step(x, logit + v);
            for (int j = 0; j < 4; j++) top[j] = larger(top[j], x[j]);
        }
        most = lanes_max(larger(larger(top[0], top[1]), larger(top[2], top[3])));
        for (; v < count; v++) most = mt_get(logit + v) > most ? mt_get(logit + v) : most;
        /* All -Inf so far: any finite base gives the sum 0. */
        mt_real base = most == -(mt_real)INFINITY ? 0 : most;
        for (v = 0; v + STEP <= count; v += STEP) {
            load_step(x, logit + v);
            for (int j = 0; j < 4; j++) x[j] -= broadcast(base);
            exp_vectors(x, 4);
            for (int j = 0; j < 4; j++) sums[j] += x[j];
        }
        mt_real sum = lanes_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
        for (; v < count; v++) sum += mt_exp(mt_get(logit + v) - base);
        if (from) total *= exp((double)before - (double)base);
        total += (double)sum;
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
        double log_sum = mt_log(sum_exp(&most, logits, vocab));
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
        int64_t v = 0;
#if MT_ELEM_BITS != 16
        for (; v + STEP <= vocab; v += STEP) {
            vec x[4];
            load_step(x, logits + v);
            for (int j = 0; j < 4; j++) x[j] -= broadcast(lse);
            exp_vectors(x, 4);
            for (int j = 0; j < 4; j++)
                *(vec_at *)(dlogits + v + j * LANES) = broadcast(scale) * x[j];
        }
#endif
#pragma omp simd
        for (int64_t i = v; i < vocab; i++)
            mt_put(dlogits + i, scale * mt_exp(mt_get(logits + i) - lse));
        if (known) mt_put(dlogits + target, scale * at_target);
    }
    return MT_OK;
}
