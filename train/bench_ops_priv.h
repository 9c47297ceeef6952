/* Inside `bench ops`: the buffers that serve all ops of a shape, and a row for each op. */
#pragma once

#include "train/bench.h"

#ifdef __cplusplus
extern "C" {
#endif

struct mt_bench_job {
    const mt_bench_layer *s;
    int64_t rows;   /* R = T top_k */
    int64_t params; /* of the experts: what AdamW updates */
    mt_dtype dtype, real;
    void *rows_d[2], *rows_2f[2], *rows_f; /* [R, D], [R, 2F], [R, F] */
    void *x;                               /* [T, D] */
    void *gain, *dgain, *rstd;             /* [D], [D], [R] */
    void *logits, *dlogits, *lse;          /* [T, V], [T, V], [T] */
    int32_t *targets;
    void *qkv, *dqkv, *y, *dy, *attention_lse; /* [T, (nq + 2 nkv) d], [T, nq d], [T, nq] */
    void *head_gain, *dhead_gain, *head_rstd;  /* [d], 2 of [d], [T, nq + nkv] */
    void *cosine, *sine;                       /* [S, d / 2] */
    void *router, *probs, *router_lse, *weights, *dweights, *prob_sum, *z_sum;
    int32_t *chosen, *row_token, *position;
    int64_t *counts, *offsets, *element_offsets;
    void *p, *grad, *bf16_grad, *m, *v, *m_scales, *v_scales;
    int16_t *p_low;
    struct mt_step_state *state;
    void *one; /* 1 in real */
};

struct mt_bench_op {
    const char *name;
    mt_bench_launch launch;
    double td, rd, rf, tv; /* matrices of the dtype that are read or written: [T, D], ... */
    double choices;        /* int32 [T, top_k] */
    double qkv;            /* matrices [T, (nq + nkv) d]: heads in and out */
    double values;         /* matrices [T, nkv d] */
    double params;         /* bytes for each parameter, where real is f32 */
    double attention;      /* products of the causal half of [S, S] scores with a head's width */
    double router;         /* products [T, D] with [D, E] */
    bool updates;          /* masters and moments, which begin as zeros: so every form reads them */
    bool f32_only;         /* forms of storage that f64 does not have */
};

/* bench_ops_launch.c; the three also make what others read. */
mt_status mt_bench_launch_router_fwd(mt_bench *b, void *context, int64_t turn);
mt_status mt_bench_launch_route_plan(mt_bench *b, void *context, int64_t turn);
mt_status mt_bench_launch_grad_norm(mt_bench *b, void *context, int64_t turn);
extern const struct mt_bench_op mt_bench_op_rows[];
extern const int mt_bench_op_count;

#ifdef __cplusplus
}
#endif
