/* A MoE layer in plain loops and f64, forward and backward: what the layers are held against. */
#pragma once

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum { PLAIN_T = 9, PLAIN_D = 6, PLAIN_F = 5, PLAIN_E = 5, PLAIN_K = 3 };

struct plain_moe {
    int64_t top_k;
    bool normalize;
    int64_t capacity; /* 0: all */
    double x[PLAIN_T][PLAIN_D], wr[PLAIN_E][PLAIN_D], bias[PLAIN_E];
    double gate_up[PLAIN_E][2 * PLAIN_F][PLAIN_D], down[PLAIN_E][PLAIN_D][PLAIN_F];
    /* forward */
    double probs[PLAIN_T][PLAIN_E], weights[PLAIN_T][PLAIN_K], y[PLAIN_T][PLAIN_D];
    double prob_sum[PLAIN_E], z_sum;
    int chosen[PLAIN_T][PLAIN_K];
    bool kept[PLAIN_T][PLAIN_K];
    int64_t counts[PLAIN_E], kept_counts[PLAIN_E], dropped;
    /* backward, from dy, the gradients of prob_sum and z_sum, and that of the weights by what else
     * they are used for */
    double dy[PLAIN_T][PLAIN_D], dprob_sum[PLAIN_E], dz_sum, dweights[PLAIN_T * PLAIN_K];
    double dx[PLAIN_T][PLAIN_D], dwr[PLAIN_E][PLAIN_D];
    double dgate_up[PLAIN_E][2 * PLAIN_F][PLAIN_D], ddown[PLAIN_E][PLAIN_D][PLAIN_F];
};

static inline double plain_dot(const double *a, const double *b, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

/* The k largest of probs + bias, best first, ties to the lowest index. */
static inline void plain_choose(struct plain_moe *m, int t)
{
    bool taken[PLAIN_E] = { false };
    for (int s = 0; s < m->top_k; s++) {
        int best = -1;
        for (int e = 0; e < PLAIN_E; e++)
            if (!taken[e] &&
                (best < 0 || m->probs[t][e] + m->bias[e] > m->probs[t][best] + m->bias[best]))
                best = e;
        taken[best] = true;
        m->chosen[t][s] = best;
        m->kept[t][s] = !m->capacity || m->kept_counts[best] < m->capacity;
        m->counts[best]++;
        m->kept_counts[best] += m->kept[t][s];
        m->dropped += !m->kept[t][s];
    }
}

static inline void plain_route(struct plain_moe *m, int t)
{
    double logits[PLAIN_E], most = -(double)INFINITY, sum = 0;
    for (int e = 0; e < PLAIN_E; e++) {
        logits[e] = plain_dot(m->x[t], m->wr[e], PLAIN_D);
        most = fmax(most, logits[e]);
    }
    for (int e = 0; e < PLAIN_E; e++) sum += m->probs[t][e] = exp(logits[e] - most);
    for (int e = 0; e < PLAIN_E; e++) m->prob_sum[e] += m->probs[t][e] /= sum;
    double lse = most + log(sum);
    m->z_sum += lse * lse;
    plain_choose(m, t);
    double share = 0;
    for (int s = 0; s < m->top_k; s++) share += m->probs[t][m->chosen[t][s]];
    for (int s = 0; s < m->top_k; s++)
        m->weights[t][s] = m->probs[t][m->chosen[t][s]] / (m->normalize ? share : 1);
}

/* One token through one expert: h = W x, a = silu(gate) up, out = V a. */
static inline void plain_expert(const struct plain_moe *m, int e, const double *x, double *h,
                                double *a, double *out)
{
    for (int i = 0; i < 2 * PLAIN_F; i++) h[i] = plain_dot(m->gate_up[e][i], x, PLAIN_D);
    for (int i = 0; i < PLAIN_F; i++) a[i] = h[i] / (1 + exp(-h[i])) * h[PLAIN_F + i];
    for (int i = 0; i < PLAIN_D; i++) out[i] = plain_dot(m->down[e][i], a, PLAIN_F);
}

static inline void plain_forward(struct plain_moe *m)
{
    memset(m->probs, 0, (size_t)((char *)m->dy - (char *)m->probs));
    for (int t = 0; t < PLAIN_T; t++) plain_route(m, t);
    for (int t = 0; t < PLAIN_T; t++)
        for (int s = 0; s < m->top_k; s++) {
            double h[2 * PLAIN_F], a[PLAIN_F], out[PLAIN_D];
            if (!m->kept[t][s]) continue;
            plain_expert(m, m->chosen[t][s], m->x[t], h, a, out);
            for (int i = 0; i < PLAIN_D; i++) m->y[t][i] += m->weights[t][s] * out[i];
        }
}

/* Gradients of one token's choice; returns that of its weight. */
static inline double plain_expert_backward(struct plain_moe *m, int t, int s)
{
    int e = m->chosen[t][s];
    double h[2 * PLAIN_F], a[PLAIN_F], out[PLAIN_D], dout[PLAIN_D], da[PLAIN_F], dh[2 * PLAIN_F];
    plain_expert(m, e, m->x[t], h, a, out);
    for (int i = 0; i < PLAIN_D; i++) dout[i] = m->weights[t][s] * m->dy[t][i];
    for (int j = 0; j < PLAIN_F; j++) {
        da[j] = 0;
        for (int i = 0; i < PLAIN_D; i++) {
            da[j] += m->down[e][i][j] * dout[i];
            m->ddown[e][i][j] += dout[i] * a[j];
        }
        double g = h[j], u = h[PLAIN_F + j], sigmoid = 1 / (1 + exp(-g));
        dh[j] = da[j] * u * sigmoid * (1 + g * (1 - sigmoid));
        dh[PLAIN_F + j] = da[j] * g * sigmoid;
    }
    for (int j = 0; j < 2 * PLAIN_F; j++)
        for (int i = 0; i < PLAIN_D; i++) {
            m->dgate_up[e][j][i] += dh[j] * m->x[t][i];
            m->dx[t][i] += dh[j] * m->gate_up[e][j][i];
        }
    return plain_dot(m->dy[t], out, PLAIN_D);
}

static inline void plain_router_backward(struct plain_moe *m, int t, const double *dweights)
{
    double dp[PLAIN_E], share = 0, mean = 0, logits[PLAIN_E], sum = 0;
    for (int e = 0; e < PLAIN_E; e++) dp[e] = m->dprob_sum[e];
    for (int s = 0; s < m->top_k; s++) share += m->probs[t][m->chosen[t][s]];
    for (int s = 0; s < m->top_k; s++) mean += dweights[s] * m->weights[t][s];
    for (int s = 0; s < m->top_k; s++)
        dp[m->chosen[t][s]] += m->normalize ? (dweights[s] - mean) / share : dweights[s];
    double inner = plain_dot(dp, m->probs[t], PLAIN_E);
    for (int e = 0; e < PLAIN_E; e++) sum += exp(logits[e] = plain_dot(m->x[t], m->wr[e], PLAIN_D));
    for (int e = 0; e < PLAIN_E; e++) {
        double dlogit = m->probs[t][e] * (dp[e] - inner + m->dz_sum * 2 * log(sum));
        for (int i = 0; i < PLAIN_D; i++) {
            m->dwr[e][i] += dlogit * m->x[t][i];
            m->dx[t][i] += dlogit * m->wr[e][i];
        }
    }
}

static inline void plain_backward(struct plain_moe *m)
{
    memset(m->dx, 0, sizeof *m - (size_t)((char *)m->dx - (char *)m));
    for (int t = 0; t < PLAIN_T; t++) {
        double dweights[PLAIN_K];
        for (int s = 0; s < m->top_k; s++)
            dweights[s] = m->dweights[t * m->top_k + s] +
                          (m->kept[t][s] ? plain_expert_backward(m, t, s) : 0);
        plain_router_backward(m, t, dweights);
    }
}
