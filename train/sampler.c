/* Tokens are ranked, cut by top-k and top-p, and one is drawn by inverting the cumulative sum. */
#include "train/sampler.h"

#include <math.h>
#include <stdlib.h>

#include "core/rng.h"

enum { STREAM = 0x5a3b1e };

typedef struct candidate {
    double logit, weight;
    int32_t token;
} candidate;

struct mt_sampler {
    mt_sampler_config config;
    int64_t vocab;
    candidate *candidates;
};

mt_status mt_sampler_create(mt_sampler **sampler, const mt_sampler_config *config, int64_t vocab)
{
    *sampler = NULL;
    MT_REQUIRE(config->temperature >= 0 && config->temperature <= 1e6, MT_ECONFIG,
               "temperature is %g, must be in 0..1e6", config->temperature);
    MT_REQUIRE(config->top_k >= 0, MT_ECONFIG, "top-k is %lld, must not be negative",
               (long long)config->top_k);
    MT_REQUIRE(config->top_p > 0 && config->top_p <= 1, MT_ECONFIG,
               "top-p is %g, must be in (0, 1]", config->top_p);
    MT_REQUIRE(vocab > 0, MT_EINVAL, "sampler: vocabulary is %lld", (long long)vocab);
    mt_sampler *s = malloc(sizeof *s);
    candidate *candidates = calloc((size_t)vocab, sizeof *candidates);
    if (!s || !candidates) {
        free(s);
        free(candidates);
        return MT_FAIL(MT_ENOMEM, "sampler: no memory for %lld tokens", (long long)vocab);
    }
    *s = (mt_sampler){ *config, vocab, candidates };
    *sampler = s;
    return MT_OK;
}

void mt_sampler_destroy(mt_sampler **sampler)
{
    if (!*sampler) return;
    free((*sampler)->candidates);
    free(*sampler);
    *sampler = NULL;
}

static int by_rank(const void *a, const void *b)
{
    const candidate *x = a, *y = b;
    if (x->logit != y->logit) return x->logit > y->logit ? -1 : 1;
    return (x->token > y->token) - (x->token < y->token);
}

/* Weights exp((logit - best) / temperature) of the ranked candidates that stay; returns their sum.
 */
static double weigh(const mt_sampler *s, int64_t *kept)
{
    candidate *c = s->candidates;
    int64_t count = s->config.top_k && s->config.top_k < s->vocab ? s->config.top_k : s->vocab;
    double sum = 0, reached = 0;
    for (int64_t i = 0; i < count; i++) {
        c[i].weight = exp((c[i].logit - c[0].logit) / s->config.temperature);
        sum += c[i].weight;
    }
    *kept = count;
    if (s->config.top_p == 1) return sum;
    for (int64_t i = 0; i < count; i++) {
        reached += c[i].weight;
        *kept = i + 1;
        if (reached >= s->config.top_p * sum) break;
    }
    return reached;
}

mt_status mt_sampler_draw(mt_sampler *s, int32_t *token, const double *logits, int64_t index)
{
    candidate *c = s->candidates;
    for (int64_t i = 0; i < s->vocab; i++) {
        MT_REQUIRE(!isnan(logits[i]) && logits[i] < (double)INFINITY, MT_ENUMERIC,
                   "sampler: the logit of token %lld is %g", (long long)i, fabs(logits[i]));
        c[i] = (candidate){ .logit = logits[i], .token = (int32_t)i };
    }
    qsort(c, (size_t)s->vocab, sizeof *c, by_rank);
    MT_REQUIRE(isfinite(c[0].logit), MT_ENUMERIC, "sampler: no logit is finite");
    *token = c[0].token;
    if (s->config.temperature == 0) return MT_OK;
    int64_t kept;
    double at = weigh(s, &kept) * mt_rng_uniform(s->config.seed, STREAM, (uint64_t)index);
    for (int64_t i = 0; i < kept; i++) {
        *token = c[i].token;
        if (at < c[i].weight) break;
        at -= c[i].weight;
    }
    return MT_OK;
}
