/* The gradient checker's cases of attention. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "train/gradcheck_priv.h"

static mt_status attention_setup(check *c, int64_t b, int64_t s, int64_t nq, int64_t nkv, int64_t d,
                                 mt_qk_norm norm)
{
    int64_t half = d / 2;
    double *table = malloc((size_t)(2 * s * half) * sizeof *table + 1);
    MT_REQUIRE(table, MT_ENOMEM, "gradcheck: out of memory");
    c->table = mt_tensor_2d(table, MT_F64, 2, s * half);
    for (int64_t i = 0; i < s; i++)
        for (int64_t j = 0; j < half; j++) {
            double angle = (double)i * pow(10, -2.0 * (double)j / (double)d);
            table[i * half + j] = cos(angle);
            table[s * half + i * half + j] = sin(angle);
        }
    c->attention = (mt_attention_shape){ .batch = b,
                                         .sequence = s,
                                         .query_heads = nq,
                                         .kv_heads = nkv,
                                         .head_dim = d,
                                         .norm = norm,
                                         .eps = 1e-6,
                                         .cos_table = table,
                                         .sin_table = table + s * half };
    return mt_check_input(c, b * s, (nq + 2 * nkv) * d);
}

static mt_status rope_forward(mt_tape *tape, check *c, mt_value *const *in, mt_value **out)
{
    return mt_qk_norm_rope(tape, &out[0], in[0], c->params[0], c->params[1], &c->attention);
}

static mt_status rope_setup(check *c, int variant)
{
    static const char *const names[] = { "no norm", "norm per head", "norm of the projection" };
    mt_qk_norm norm = (mt_qk_norm)variant;
    int64_t nq = 3, nkv = norm == MT_QK_NORM_HEAD ? 1 : 3, d = 4;
    snprintf(c->name, sizeof c->name, "%s", names[variant]);
    c->forward = rope_forward;
    MT_TRY(attention_setup(c, 2, 3, nq, nkv, d, norm));
    if (norm == MT_QK_NORM_NONE) return MT_OK;
    bool head = norm == MT_QK_NORM_HEAD;
    MT_TRY(mt_check_param(c, &c->params[0], "w_q", 1, 1, head ? d : nq * d, false, false));
    return mt_check_param(c, &c->params[1], "w_k", 1, 1, head ? d : nkv * d, false, false);
}

mt_status mt_check_rope_cases(const mt_check_session *s)
{
    return mt_check_variants(s, "qk_norm_rope", rope_setup, 3, 1);
}

static mt_status attention_forward(mt_tape *tape, check *c, mt_value *const *in, mt_value **out)
{
    return mt_attention(tape, &out[0], in[0], &c->attention);
}

static mt_status attention_case_setup(check *c, int variant)
{
    static const int64_t shapes[][5] = {
        { 2, 5, 4, 2, 6 }, { 1, 1, 1, 1, 2 }, { 1, 33, 2, 1, 2 }, { 1, 7, 3, 3, 8 }
    };
    const int64_t *n = shapes[variant];
    snprintf(c->name, sizeof c->name, "B%lld S%lld heads %lld/%lld x %lld", (long long)n[0],
             (long long)n[1], (long long)n[2], (long long)n[3], (long long)n[4]);
    c->forward = attention_forward;
    return attention_setup(c, n[0], n[1], n[2], n[3], n[4], MT_QK_NORM_NONE);
}

mt_status mt_check_attention_cases(const mt_check_session *s)
{
    return mt_check_variants(s, "attention", attention_case_setup, 4, 0);
}
