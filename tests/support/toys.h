/* Toy differentiable ops on vectors of f64, for the tests of the tape: each does one thing that
 * real ops do. They read device memory directly, so only on the cpu device. */
#pragma once

#include "core/tape.h"
#include "tests/support/test.h"

/* What backward calls have met since the last reset. */
struct toy_log {
    int64_t first, in_place, separate; /* forms of mt_node_grad_in */
    int64_t passed;                    /* gradients handed on without a copy */
    int64_t again;                     /* values made anew */
    int64_t wgrads;                    /* weight gradients that ran */
    double order[64];                  /* tag of each weight gradient, in the order they ran */
    int64_t fuse;                      /* > 0: the fuse-th backward from now fails */
};
extern struct toy_log toy_log;

/* y = a + b; hands its gradient on where it can */
mt_status toy_add(mt_tape *tape, mt_value **y, mt_value *a, mt_value *b);
/* y = a * b, elementwise; a and b may be the same */
mt_status toy_mul(mt_tape *tape, mt_value **y, mt_value *a, mt_value *b);
/* y = x * x, and can be made again */
mt_status toy_square(mt_tape *tape, mt_value **y, mt_value *x);
/* y = x * w elementwise; dw through mt_tape_wgrad. `tag` goes to toy_log.order. */
mt_status toy_scale(mt_tape *tape, mt_value **y, mt_value *x, mt_param *w, double tag);
/* y = x + b; db written directly */
mt_status toy_shift(mt_tape *tape, mt_value **y, mt_value *x, mt_param *b);

/* A store with `count` params of n elements each on test_device, masters drawn from the seed, grads
 * poisoned. */
mt_param_store *toy_store(int64_t count, int64_t n, uint64_t seed);
mt_tape *toy_tape(mt_stream *stream, const mt_tape_options *options);
/* A vector over host memory. */
mt_value *toy_input(mt_tape *tape, double *x, int64_t n);
