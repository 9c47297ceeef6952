/* A call of the router and its buffers. */
#pragma once

#include "tests/kernels/threads.h"

struct shape {
    int64_t tokens, width, experts, top_k;
};

/* Buffers of one router call. */
struct router {
    struct shape s;
    mt_dtype dtype, real;
    void *x, *wr, *logits, *probs, *lse, *weights, *prob_sum, *z_sum;
    float *bias;
    int32_t *chosen;
    int64_t *counts, *load;
};

static inline struct router router_make(struct shape s, mt_dtype dtype, bool bias)
{
    mt_dtype real = mt_dtype_wide(dtype);
    int64_t te = s.tokens * s.experts, tk = s.tokens * s.top_k;
    struct router r = {
        .s = s,
        .dtype = dtype,
        .real = real,
        .x = test_alloc(s.tokens * s.width, dtype),
        .wr = test_alloc(s.experts * s.width, real),
        .logits = test_alloc(te, real),
        .probs = test_alloc(te, real),
        .lse = test_alloc(s.tokens, real),
        .weights = test_alloc(tk, real),
        .prob_sum = test_alloc(s.experts, real),
        .z_sum = test_alloc(1, real),
        .bias = bias ? test_alloc(s.experts, MT_F32) : NULL,
        .chosen = test_alloc(tk, MT_I32),
        .counts = test_alloc(s.experts, MT_I64),
        .load = test_alloc(s.experts, MT_I64),
    };
    test_random(r.x, s.tokens * s.width, dtype, 1, 21);
    test_random(r.wr, s.experts * s.width, real, 1, 22);
    if (bias) test_random(r.bias, s.experts, MT_F32, 0.1, 23);
    for (int64_t e = 0; e < s.experts; e++) r.load[e] = e;
    return r;
}

static inline void router_free(struct router *r)
{
    void *all[] = { r->x,        r->wr,    r->logits, r->probs,  r->lse,    r->weights,
                    r->prob_sum, r->z_sum, r->bias,   r->chosen, r->counts, r->load };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) test_free(all[i]);
}

static inline void router_run(struct router *r, int threads, bool normalize)
{
    mt_stream stream = on_threads(threads);
    assert_ok(mt_router_fwd(&stream, &(struct mt_router_fwd_args){ .dtype = r->dtype,
                                                                   .tokens = r->s.tokens,
                                                                   .width = r->s.width,
                                                                   .experts = r->s.experts,
                                                                   .top_k = r->s.top_k,
                                                                   .normalize = normalize,
                                                                   .x = r->x,
                                                                   .wr = r->wr,
                                                                   .bias = r->bias,
                                                                   .logits = r->logits,
                                                                   .probs = r->probs,
                                                                   .lse = r->lse,
                                                                   .weights = r->weights,
                                                                   .chosen = r->chosen,
                                                                   .prob_sum = r->prob_sum,
                                                                   .z_sum = r->z_sum,
                                                                   .counts = r->counts,
                                                                   .load = r->load }));
}
