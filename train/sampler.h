/* Draws the next token from logits: temperature, top-k, top-p. */
#pragma once

#include <stdint.h>

#include "core/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mt_sampler_config {
    double temperature; /* 0: always the most likely token */
    int64_t top_k;      /* only the k most likely; 0: all */
    double top_p;       /* only the fewest most likely whose sum reaches this; 1: all */
    uint64_t seed;
} mt_sampler_config;

typedef struct mt_sampler mt_sampler;

/* For a vocabulary. Errors: MT_ECONFIG names the value and the rule. */
mt_status mt_sampler_create(mt_sampler **sampler, const mt_sampler_config *config, int64_t vocab);
void mt_sampler_destroy(mt_sampler **sampler);

/* Token number `index` of a text: a pure function of logits [V], configuration and index. Equally
 * likely tokens rank by number. Errors: MT_ENUMERIC when a logit is NaN, or none is finite. */
mt_status mt_sampler_draw(mt_sampler *sampler, int32_t *token, const double *logits, int64_t index);

#ifdef __cplusplus
}
#endif
