/* Random programs of toy ops on a tape, for tests of what hangs on it. */
#pragma once

#include "tests/support/toys.h"

#include <string.h>

#include "core/rng.h"

enum { N = 24, PARAMS = 6, INPUTS = 3, BLOCKS = 7, OPS = 9, OPTIONS = 16 };

static mt_stream stream;

static inline mt_tape_options options_of(int bits)
{
    return (mt_tape_options){ .recompute = bits & 1,
                              .recompute_activation = bits & 2,
                              .offload = bits & 4,
                              .defer_wgrad = bits & 8 };
}

/* A block of a program is a pure function of (seed, index): random toy ops on the values made so
 * far. Params 0-2 are used through weight gradients only, the others directly only; both kinds are
 * used again and again. */
struct block {
    uint64_t seed;
    int index;
    mt_param_store *store;
};

static inline int draw(const struct block *b, int op, int what, int below)
{
    return (int)mt_rng_below(b->seed, (uint32_t)(b->index * 100 + op), (uint64_t)what,
                             (uint64_t)below);
}

static inline mt_status random_op(mt_tape *tape, const struct block *b, int op, mt_value **made,
                                  int count)
{
    mt_value *x = made[draw(b, op, 0, count)], *z = made[draw(b, op, 1, count)];
    mt_param *w = mt_param_store_get(b->store, draw(b, op, 2, 3));
    mt_param *bias = mt_param_store_get(b->store, 3 + draw(b, op, 3, 3));
    switch (draw(b, op, 4, 5)) {
    case 0: return toy_add(tape, &made[count], x, z);
    case 1: return toy_mul(tape, &made[count], x, z);
    case 2: return toy_square(tape, &made[count], x);
    case 3: return toy_scale(tape, &made[count], x, w, 100 * b->index + op);
    default: return toy_shift(tape, &made[count], x, bias);
    }
}

/* An mt_segment_fn of two inputs and two outputs. Values are released in a random order as soon as
 * they may be. */
static inline mt_status run_block(mt_tape *tape, void *context, mt_value *const *inputs,
                                  mt_value **outputs)
{
    const struct block *b = context;
    mt_value *made[2 + OPS + 2] = { inputs[0], inputs[1] };
    for (int i = 0; i < OPS; i++) MT_TRY(random_op(tape, b, i, made, 2 + i));
    MT_TRY(toy_add(tape, &outputs[0], made[OPS + 1], inputs[0]));
    MT_TRY(toy_mul(tape, &outputs[1], made[OPS], inputs[1]));
    for (int i = 0; i < OPS; i++) mt_value_release(tape, &made[2 + (i * 5 + 3) % OPS]);
    return MT_OK;
}

struct program {
    uint64_t seed;
    double x[INPUTS][N], dx[INPUTS][N];
    mt_param_store *store;
    mt_tape *tape;
    struct block blocks[BLOCKS];
};

static inline void program_make(struct program *p, uint64_t seed, const mt_tape_options *options)
{
    memset(p, 0, sizeof *p);
    p->seed = seed;
    p->store = toy_store(PARAMS, N, 100 * seed);
    for (int i = 0; i < INPUTS; i++) test_random(p->x[i], N, MT_F64, 1, seed + 50 + (uint64_t)i);
    p->tape = toy_tape(&stream, options);
    for (int i = 0; i < BLOCKS; i++) p->blocks[i] = (struct block){ seed, i, p->store };
    mt_param_store_begin_step(p->store);
}

static inline void program_free(struct program *p)
{
    mt_tape_destroy(&p->tape);
    mt_param_store_destroy(&p->store);
    assert_int_equal(test_device()->bytes[MT_MEMORY_ACTIVATIONS], 0);
    assert_int_equal(test_device()->bytes[MT_MEMORY_HOST_POOL], 0);
}

static inline mt_status program_body(struct program *p)
{
    mt_value *in[INPUTS], *h[2], *next[2];
    double seed[N];
    for (int i = 0; i < INPUTS; i++)
        MT_TRY(mt_tape_input(p->tape, &in[i], mt_tensor_1d(p->x[i], MT_F64, N), true));
    h[0] = in[0], h[1] = in[1];
    for (int i = 0; i < 2; i++) mt_value_hold(h[i]);
    for (int i = 0; i < BLOCKS; i++) {
        mt_value *const inputs[2] = { h[0], i == 3 ? in[2] : h[1] }; /* the third joins late */
        MT_TRY(mt_tape_segment(p->tape, run_block, &p->blocks[i], inputs, 2, next, 2));
        for (int j = 0; j < 2; j++) {
            mt_value_release(p->tape, &h[j]);
            h[j] = next[j];
        }
    }
    test_random(seed, N, MT_F64, 1, p->seed + 7);
    for (int i = 0; i < 2; i++) {
        MT_TRY(mt_tape_seed_tensor(p->tape, h[i], mt_tensor_1d(seed, MT_F64, N)));
        mt_value_release(p->tape, &h[i]);
    }
    MT_TRY(mt_tape_backward(p->tape));
    MT_TRY(mt_tape_run_deferred(p->tape));
    for (int i = 0; i < INPUTS; i++) {
        mt_tensor g = mt_value_grad(in[i]);
        if (g.data) memcpy(p->dx[i], g.data, sizeof p->dx[i]);
        mt_value_release(p->tape, &in[i]);
    }
    return MT_OK;
}

static inline mt_status program_pass(struct program *p)
{
    MT_TRY(mt_tape_begin(p->tape, p->seed, true));
    mt_status status = program_body(p);
    if (status == MT_OK) return mt_tape_end(p->tape);
    mt_tape_abort(p->tape);
    return status;
}

static inline void assert_same(const struct program *a, const struct program *b)
{
    assert_memory_equal(a->dx, b->dx, sizeof a->dx);
    for (int i = 0; i < PARAMS; i++)
        assert_memory_equal(mt_param_store_get(a->store, i)->grad,
                            mt_param_store_get(b->store, i)->grad, N * sizeof(double));
}

/* Of the hook: how often it was told of a param, and the gradient then. */
struct ready {
    mt_param_store *store;
    int fired[PARAMS];
    double grads[PARAMS][N];
};

static inline mt_status on_ready(void *context, mt_param *param)
{
    struct ready *r = context;
    for (int i = 0; i < PARAMS; i++)
        if (mt_param_store_get(r->store, i) == param) {
            r->fired[i]++;
            memcpy(r->grads[i], param->grad, sizeof r->grads[i]);
        }
    return MT_OK;
}
