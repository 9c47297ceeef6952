/* Balancing losses against their definitions, and the selection bias. */
#include "tests/kernels/threads.h"

#include "core/rng.h"

enum { L = 3, E = 6, T = 40, K = 2 };

/* The losses by their definitions (one expression per definition). */
static double naive_aux(mt_aux_kind kind, const double *p, const int64_t *counts, int64_t layers)
{
    double loss = 0;
    if (kind == MT_AUX_SWITCH)
        for (int64_t l = 0; l < layers; l++)
            for (int64_t e = 0; e < E; e++)
                loss += E * ((double)counts[l * E + e] / (T * K)) * (p[l * E + e] / T);
    if (kind == MT_AUX_HF)
        for (int64_t e = 0; e < E; e++) {
            double f = 0, mean = 0;
            for (int64_t l = 0; l < layers; l++) {
                f += (double)counts[l * E + e] / (double)(layers * T);
                mean += p[l * E + e] / (double)(layers * T);
            }
            loss += E * f * mean;
        }
    return loss;
}

static void check_aux(mt_aux_kind kind, mt_dtype dtype, int64_t layers)
{
    mt_dtype real = mt_dtype_wide(dtype);
    mt_stream stream = on_threads(1);
    size_t size = mt_dtype_size(real);
    char *p = test_alloc(L * E, real), *z = test_alloc(L, real), *dp = test_alloc(L * E, real),
         *dz = test_alloc(L, real);
    int64_t *counts = test_alloc(L * E, MT_I64);
    double prob[L * E], loss[2], dloss[2], want[2], z_sum = 0, eps = real_epsilon(dtype);
    const void *ps[L], *zs[L];
    void *dps[L], *dzs[L];
    const int64_t *cs[L];
    test_random(p, L * E, real, 1, 81);
    test_random(z, L, real, 9, 82);
    for (int l = 0; l < L; l++) {
        ps[l] = p + (size_t)(l * E) * size, zs[l] = z + (size_t)l * size, cs[l] = counts + l * E;
        dps[l] = dp + (size_t)(l * E) * size, dzs[l] = l == 1 ? NULL : dz + (size_t)l * size;
        for (int e = 0; e < E; e++)
            counts[l * E + e] = (int64_t)mt_rng_below(8, 1, (uint64_t)(l * E + e), T);
    }
    for (int i = 0; i < L * E; i++) prob[i] = mt_load_f64(p, real, i);
    for (int64_t l = 0; l < layers; l++) z_sum += mt_load_f64(z, real, l);
    assert_ok(
        mt_aux_loss_fwd(&stream, &(struct mt_aux_loss_fwd_args){ dtype, kind, layers, T, E, K,
                                                                 &loss[0], &loss[1], ps, cs, zs }));
    want[0] = naive_aux(kind, prob, counts, layers), want[1] = z_sum / T;
    for (int i = 0; i < 2; i++)
        test_assert_near("aux loss", &loss[i], real, &want[i], 1, 1e-12, eps * 1.01);

    mt_store_f64(&dloss[0], real, 0, 0.75), mt_store_f64(&dloss[1], real, 0, -1.5);
    assert_ok(
        mt_aux_loss_bwd(&stream, &(struct mt_aux_loss_bwd_args){ dtype, kind, layers, T, E, K, dps,
                                                                 dzs, &dloss[0], &dloss[1], cs }));
    for (int64_t i = 0; i < layers * E; i++) { /* the losses are linear in prob_sum */
        double keep = prob[i], up, down;
        prob[i] = keep + 1, up = naive_aux(kind, prob, counts, layers);
        prob[i] = keep - 1, down = naive_aux(kind, prob, counts, layers);
        prob[i] = keep, want[0] = 0.75 * (up - down) / 2;
        test_assert_near("dprob_sum", dp + (size_t)i * size, real, want, 1, 1e-12, eps * 1.01);
    }
    want[0] = -1.5 / T;
    for (int64_t l = 0; l < layers; l++)
        if (dzs[l]) test_assert_near("dz_sum", dzs[l], real, want, 1, 0, eps * 1.01);
    assert_ok(
        mt_aux_loss_bwd(&stream, &(struct mt_aux_loss_bwd_args){ dtype, kind, layers, T, E, K, dps,
                                                                 NULL, NULL, NULL, cs }));
    for (int64_t i = 0; i < layers * E; i++) assert_true(mt_load_f64(dp, real, i) == 0);
    test_free(p), test_free(z), test_free(dp), test_free(dz), test_free(counts);
}

static void test_aux_loss(void **state)
{
    (void)state;
    for (int d = 0; d < 3; d++)
        for (int kind = MT_AUX_NONE; kind <= MT_AUX_HF; kind++)
            for (int64_t layers = 0; layers <= L; layers++)
                check_aux((mt_aux_kind)kind, dtypes[d], layers);
    mt_stream stream = on_threads(1);
    float loss = 5, p[E] = { 0 };
    int64_t counts[E] = { 0 };
    const void *ps[1] = { p };
    const int64_t *cs[1] = { counts };
    assert_ok(mt_aux_loss_fwd(&stream, &(struct mt_aux_loss_fwd_args){ MT_F32, MT_AUX_HF, 1, 0, E,
                                                                       K, &loss, NULL, ps, cs,
                                                                       NULL })); /* no tokens */
    assert_true(loss == 0);
    assert_fails(
        mt_aux_loss_fwd(&stream, &(struct mt_aux_loss_fwd_args){ MT_F32, MT_AUX_HF, 129, 1, E, K,
                                                                 &loss, NULL, ps, cs, NULL }),
        MT_EINVAL, "129");
    assert_fails(
        mt_aux_loss_fwd(&stream, &(struct mt_aux_loss_fwd_args){ MT_F32, (mt_aux_kind)7, 1, 1, E, K,
                                                                 &loss, NULL, ps, cs, NULL }),
        MT_EINVAL, "kind 7");
}

/* A perfectly balanced router has loss 1 (switch) or k (hf). */
static void test_balanced_loss(void **state)
{
    (void)state;
    mt_stream stream = on_threads(1);
    double p[E], loss, want[] = { [MT_AUX_SWITCH] = 1, [MT_AUX_HF] = K };
    int64_t counts[E];
    const void *ps[1] = { p };
    const int64_t *cs[1] = { counts };
    for (int e = 0; e < E; e++)
        p[e] = (double)T / E, counts[e] = T * K; /* E times each, so that it divides */
    for (int kind = MT_AUX_SWITCH; kind <= MT_AUX_HF; kind++) {
        assert_ok(mt_aux_loss_fwd(
            &stream, &(struct mt_aux_loss_fwd_args){ MT_F64, (mt_aux_kind)kind, 1, T, E, K, &loss,
                                                     NULL, ps, cs, NULL }));
        assert_true(fabs(loss / E - want[kind]) < E * 0x1p-50);
    }
}

static void test_router_bias_update(void **state)
{
    (void)state;
    mt_stream stream = on_threads(1);
    float *bias = test_alloc(4, MT_F32);
    int64_t *load = test_alloc(4, MT_I64);
    static const float start[4] = { 0.5f, -0.25f, 0, 0.125f };
    static const int64_t loads[4] = { 10, 4, 6, 4 }; /* mean 6 */
    static const double sign[4] = { -1, 1, 0, 1 };
    memcpy(bias, start, sizeof start);
    memcpy(load, loads, sizeof loads);
    struct mt_router_bias_update_args args = { MT_BF16, 4, 0.001, bias, load, load };
    assert_ok(mt_router_bias_update(&stream, &args)); /* its first word is not 0: skipped */
    assert_memory_equal(bias, start, sizeof start);
    args.skip = NULL;
    assert_ok(mt_router_bias_update(&stream, &args));
    float moved[4];
    double sum = 0;
    for (int e = 0; e < 4; e++)
        sum += (double)(moved[e] = (float)((double)start[e] + 0.001 * sign[e]));
    for (int e = 0; e < 4; e++) assert_true(bias[e] == (float)((double)moved[e] - sum / 4));
    assert_memory_equal(load, loads, sizeof loads);
    assert_ok(mt_router_bias_update(
        &stream, &(struct mt_router_bias_update_args){ MT_F32, 0, 0.001, NULL, NULL, NULL }));
    test_free(bias), test_free(load);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_aux_loss),
        cmocka_unit_test(test_balanced_loss),
        cmocka_unit_test(test_router_bias_update),
    };
    return cmocka_run_group_tests(tests, open_devices, close_devices);
}
