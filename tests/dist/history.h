/* What training steps say and leave behind, for tests that compare runs to the bit. */
#pragma once

#include "tests/dist/training.h"

typedef struct history {
    mt_step_result step[STEPS];
    double validation;
} history;

static inline mt_status steps(mt_trainer *t, history *h)
{
    const mt_trainer_config *c = mt_trainer_get_config(t);
    int32_t tokens[BATCH * SEQUENCE], targets[BATCH * SEQUENCE];
    int64_t counted;
    for (int s = 0; s < STEPS; s++) {
        draw_batch(c, s % 4, tokens, targets);
        MT_TRY(mt_trainer_step(t, tokens, targets, &h->step[s]));
    }
    return mt_trainer_eval(t, tokens, targets, BATCH, &h->validation, &counted);
}

/* The same numbers, whatever was begun again. */
static inline mt_status same_histories(const char *what, const history *a, const history *b)
{
    for (int s = 0; s < STEPS; s++) {
        mt_step_result x = a->step[s], y = b->step[s];
        x.voided = y.voided = 0;
        rank_check(!memcmp(&x, &y, sizeof x),
                   "%s: step %d: loss %.17g and %.17g, gradient norm %.17g and %.17g", what, s,
                   x.loss, y.loss, x.grad_norm, y.grad_norm);
    }
    rank_check(a->validation == b->validation, "%s: validation %.17g and %.17g", what,
               a->validation, b->validation);
    return MT_OK;
}

static inline void mix(uint64_t *hash, const void *bytes, size_t count)
{
    for (size_t i = 0; i < count; i++)
        *hash = (*hash ^ ((const unsigned char *)bytes)[i]) * 0x100000001b3u;
}

static inline mt_status mix_device(uint64_t *hash, const void *p, size_t bytes)
{
    void *host = malloc(bytes + 1);
    rank_check(host, "no memory");
    mt_status status = bytes ? mt_device_copy(rank_device, host, p, bytes) : MT_OK;
    mix(hash, host, bytes);
    free(host);
    return status;
}

/* Everything that a step leaves behind on this rank. */
static inline mt_status fingerprint(uint64_t *hash, mt_trainer *t)
{
    mt_model *model = mt_trainer_model(t);
    mt_param_store *store = mt_model_params(model);
    const mt_precision *p = mt_model_precision(model);
    mt_optimizer *o = mt_trainer_optimizer(t);
    const mt_model_config *c = &mt_trainer_get_config(t)->model;
    size_t flat = (size_t)mt_param_store_elements(store) *
                  mt_dtype_size(mt_dtype_wide(mt_trainer_get_config(t)->dtype));
    mt_tensor nans = mt_precision_nans(p);
    char name[256];
    *hash = 0xcbf29ce484222325u;
    MT_TRY(mix_device(hash, mt_param_store_master(store), flat));
    MT_TRY(mix_device(hash, mt_optimizer_m(o), flat));
    MT_TRY(mix_device(hash, mt_optimizer_v(o), flat));
    MT_TRY(mix_device(hash, mt_optimizer_state(o), sizeof(struct mt_step_state)));
    MT_TRY(mix_device(hash, nans.data, mt_tensor_bytes(&nans)));
    for (int64_t i = 0; i < mt_precision_state_count(p); i++) {
        mt_tensor state = mt_precision_state(p, i, name);
        MT_TRY(mix_device(hash, state.data, mt_tensor_bytes(&state)));
    }
    for (int64_t i = 0; i < mt_model_moe_layers(model); i++)
        MT_TRY(mix_device(hash, mt_model_router_bias(model, i),
                          (size_t)c->num_experts * sizeof(float)));
    return MT_OK;
}
