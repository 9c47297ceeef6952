/* Balancing: the auxiliary losses over all layers, and the selection bias. All sums in f64. */
#include "kernels/cpu/variant.h"

/* Which of a loss's two factors are summed over the layers first, and how both are scaled. */
static const struct aux_rule {
    bool pooled;     /* f and P are sums over layers, else one product per layer */
    bool per_choice; /* f counts shares of all T k choices, else of tokens */
} rules[] = {
    [MT_AUX_NONE] = { false, false },
    [MT_AUX_SWITCH] = { false, true },
    [MT_AUX_HF] = { true, false },
};

/* What a product count_e prob_sum_e is multiplied by; 0 where there is no loss. */
static double aux_factor(mt_aux_kind kind, int64_t layers, int64_t tokens, int64_t experts,
                         int64_t top_k)
{
    if (kind == MT_AUX_NONE || tokens == 0 || layers == 0) return 0;
    double n = (double)tokens * (rules[kind].pooled ? (double)layers : 1);
    return (double)experts / n / n / (rules[kind].per_choice ? (double)top_k : 1);
}

/* Layers [begin, end) are pooled into one product, or are one layer. */
static double pooled_product(const struct mt_aux_loss_fwd_args *a, int64_t begin, int64_t end)
{
    double sum = 0;
    for (int64_t e = 0; e < a->experts; e++) {
        double f = 0, p = 0;
        for (int64_t l = begin; l < end; l++) {
            f += (double)a->counts[l][e];
            p += (double)((const mt_real *)a->prob_sums[l])[e];
        }
        sum += f * p;
    }
    return sum;
}

mt_status MT_CPU(aux_loss_fwd)(mt_stream *stream, const struct mt_aux_loss_fwd_args *a)
{
    (void)stream;
    double factor = aux_factor(a->kind, a->layers, a->tokens, a->experts, a->top_k), loss = 0;
    int64_t step = rules[a->kind].pooled ? a->layers : 1;
    for (int64_t l = 0; l < a->layers && factor != 0; l += step)
        loss += factor * pooled_product(a, l, l + step);
    *(mt_real *)a->loss = (mt_real)loss;
    if (a->z_sums) {
        double z = 0;
        for (int64_t l = 0; l < a->layers; l++) z += (double)*(const mt_real *)a->z_sums[l];
        *(mt_real *)a->z_loss = (mt_real)(a->tokens ? z / (double)a->tokens : 0);
    }
    return MT_OK;
}

mt_status MT_CPU(aux_loss_bwd)(mt_stream *stream, const struct mt_aux_loss_bwd_args *a)
{
    (void)stream;
    double dloss = a->dloss ? (double)*(const mt_real *)a->dloss : 0;
    double dz =
        a->dz_loss && a->tokens ? (double)*(const mt_real *)a->dz_loss / (double)a->tokens : 0;
    double factor = dloss * aux_factor(a->kind, a->layers, a->tokens, a->experts, a->top_k);
    bool pooled = rules[a->kind].pooled;
    for (int64_t l = 0; l < a->layers; l++) {
        mt_real *dprob_sum = a->dprob_sums[l];
        for (int64_t e = 0; e < a->experts; e++) {
            double f = 0;
            for (int64_t i = pooled ? 0 : l; i < (pooled ? a->layers : l + 1); i++)
                f += (double)a->counts[i][e];
            dprob_sum[e] = (mt_real)(factor * f);
        }
        if (a->dz_sums && a->dz_sums[l]) *(mt_real *)a->dz_sums[l] = (mt_real)dz;
    }
    return MT_OK;
}

mt_status MT_CPU(router_bias_update)(mt_stream *stream, const struct mt_router_bias_update_args *a)
{
    (void)stream;
    int64_t total = 0;
    double sum = 0;
    if (a->skip && *a->skip) return MT_OK;
    for (int64_t e = 0; e < a->experts; e++) total += a->load[e];
    for (int64_t e = 0; e < a->experts; e++) {
        int64_t load =
            a->load[e] * a->experts; /* compared with total: the mean, without rounding */
        a->bias[e] = (float)((double)a->bias[e] + a->rate * ((load < total) - (load > total)));
        sum += (double)a->bias[e];
    }
    double mean = sum / (double)a->experts;
    for (int64_t e = 0; e < a->experts; e++) a->bias[e] = (float)((double)a->bias[e] - mean);
    return MT_OK;
}
