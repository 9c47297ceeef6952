/* A small model with a tape and a batch, and passes over it. */
#pragma once

#include "tests/support/test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "layers/model.h"

enum { B = 2, S = 5, T = B * S, V = 11, D = 8, E = 4, K = 2, LAYERS = 2 };

struct rig {
    mt_stream stream;
    mt_model *model;
    mt_tape *tape;
    int32_t tokens[T], targets[T];
    double scale; /* in the model's real type */
    double loss, aux, z, logits[T * V];
};

static inline mt_model_config config_of(const char *model_type)
{
    const mt_architecture *architecture;
    mt_model_config c;
    assert_ok(mt_architecture_find(&architecture, model_type));
    mt_model_config_defaults(&c, architecture);
    c.vocab_size = V, c.hidden_size = D, c.num_hidden_layers = LAYERS;
    c.num_attention_heads = 4, c.num_key_value_heads = 2, c.head_dim = 4;
    c.moe_intermediate_size = 6, c.num_experts = E, c.num_experts_per_tok = K;
    if (architecture->dense_layers) c.intermediate_size = 7;
    return c;
}

static inline void rig_open(struct rig *r, const mt_model_config *c, mt_dtype dtype,
                            const mt_tape_options *options)
{
    memset(r, 0, sizeof *r);
    r->stream.device = test_device();
    assert_ok(mt_model_create(&r->model, r->stream.device, c, dtype, S, true, NULL));
    assert_ok(mt_tape_create(&r->tape, &r->stream, options));
    assert_ok(mt_model_init(r->model, 7));
    for (int i = 0; i < T; i++) r->tokens[i] = (7 * i + 3) % V, r->targets[i] = (5 * i + 1) % V;
    r->targets[2] = r->targets[7] = -100;
    mt_store_f64(&r->scale, mt_dtype_wide(dtype), 0, 0.125);
}

static inline void rig_close(struct rig *r)
{
    mt_tape_destroy(&r->tape);
    mt_model_destroy(&r->model);
}

/* One micro-batch of a step: forward, and with `training` backward. */
static inline void rig_pass(struct rig *r, bool training)
{
    const mt_model_batch batch = { B, S, r->tokens, r->targets, &r->scale, 0 };
    mt_model_output out;
    assert_ok(mt_model_refresh(r->model, &r->stream));
    assert_ok(mt_tape_begin(r->tape, training, training));
    assert_ok(mt_model_forward(r->model, r->tape, &batch, true, &out));
    r->loss = mt_load_f64(out.loss->data.data, out.loss->data.dtype, 0);
    r->aux = out.aux_loss ? mt_load_f64(out.aux_loss->data.data, out.aux_loss->data.dtype, 0) : 0;
    r->z = out.z_loss ? mt_load_f64(out.z_loss->data.data, out.z_loss->data.dtype, 0) : 0;
    for (int i = 0; i < T * V; i++)
        r->logits[i] = mt_load_f64(out.logits->data.data, out.logits->data.dtype, i);
    if (training) assert_ok(mt_model_seed(r->model, r->tape, &out, 1));
    mt_model_output_release(r->tape, r->model, &out);
    if (training) {
        assert_ok(mt_tape_backward(r->tape));
        assert_ok(mt_tape_run_deferred(r->tape));
    }
    assert_ok(mt_tape_end(r->tape));
}

static inline void rig_step(struct rig *r)
{
    assert_ok(mt_model_begin_step(r->model));
    rig_pass(r, true);
    assert_ok(mt_param_store_end_step(mt_model_params(r->model)));
}

static inline mt_param *param(struct rig *r, const char *name)
{
    mt_param *p = mt_param_store_find(mt_model_params(r->model), name);
    if (!p) fail_msg("no param %s", name);
    return p;
}

static inline void shake(struct rig *r)
{
    mt_param_store *store = mt_model_params(r->model);
    for (int64_t i = 0; i < mt_param_store_count(store); i++) {
        mt_param *p = mt_param_store_get(store, i);
        if (strstr(p->name, "norm"))
            test_random(p->master, mt_param_count(p), p->dtype, 1, 60 + (uint64_t)i);
    }
}
