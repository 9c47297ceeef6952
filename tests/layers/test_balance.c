/* Balancing in whole models, which goes wrong silently elsewhere: both definitions of the auxiliary
 * loss, their gradients, expert load, dropped rows, the router's bias. */
#include "tests/layers/model_rig.h"

/* ---- balancing ----------------------------------------------------------------------------------
 */

/* What the router of each layer saw, gathered by an observer; the losses from it by their
 * definitions. */
struct seen {
    double x[LAYERS][T * D];
    int layers;
};

static mt_status see(void *context, const char *name, const mt_tensor *data)
{
    struct seen *s = context;
    if (!strstr(name, "post_attention_layernorm")) return MT_OK;
    for (int i = 0; i < T * D; i++) s->x[s->layers][i] = mt_load_f64(data->data, data->dtype, i);
    s->layers++;
    return MT_OK;
}

/* P [E] sums of probabilities, f [E] counts, of one layer; returns the sum of squared logsumexp. */
static double route_stats(const double *x, const double *w, double *P, double *f)
{
    double z = 0;
    for (int t = 0; t < T; t++) {
        double p[E], sum = 0;
        bool taken[E] = { false };
        for (int e = 0; e < E; e++) {
            double logit = 0;
            for (int i = 0; i < D; i++) logit += x[t * D + i] * w[e * D + i];
            sum += p[e] = exp(logit);
        }
        z += log(sum) * log(sum);
        for (int e = 0; e < E; e++) P[e] += p[e] / sum;
        for (int s = 0; s < K; s++) {
            int best = -1;
            for (int e = 0; e < E; e++)
                if (!taken[e] && (best < 0 || p[e] > p[best])) best = e;
            taken[best] = true;
            f[best]++;
        }
    }
    return z;
}

static void test_definitions(void **state)
{
    (void)state;
    for (int kind = MT_AUX_SWITCH; kind <= MT_AUX_HF; kind++) {
        mt_model_config c = config_of("qwen3_moe");
        struct rig r;
        struct seen seen = { .layers = 0 };
        double P[LAYERS][E] = { 0 }, f[LAYERS][E] = { 0 }, z = 0, want = 0;
        c.aux_loss = (mt_aux_kind)kind;
        rig_open(&r, &c, MT_F64, NULL);
        shake(&r);
        mt_tape_set_observer(r.tape, see, &seen);
        rig_pass(&r, false);
        assert_int_equal(seen.layers, LAYERS);
        for (int l = 0; l < LAYERS; l++) {
            char name[64];
            snprintf(name, sizeof name, "model.layers.%d.mlp.gate", l);
            z += route_stats(seen.x[l], param(&r, name)->master, P[l], f[l]) / T;
        }
        if (kind == MT_AUX_SWITCH) /* per layer, f shares of all choices; summed */
            for (int l = 0; l < LAYERS; l++)
                for (int e = 0; e < E; e++) want += E * (f[l][e] / (T * K)) * (P[l][e] / T);
        else /* the layers' rows together, f summed over the k slots */
            for (int e = 0; e < E; e++)
                want +=
                    E * ((f[0][e] + f[1][e]) / (LAYERS * T)) * ((P[0][e] + P[1][e]) / (LAYERS * T));
        double limit = 4 * (T * LAYERS + D + E) * 0x1p-53;
        assert_true(fabs(r.aux - want) <= limit * want);
        assert_true(fabs(r.z - z) <= limit * z);
        assert_true(fabs(want - (kind == MT_AUX_SWITCH ? LAYERS : K)) > 1e-3); /* not balanced */
        rig_close(&r);
    }
}

/* A router without opinion: probabilities 1/E, so switch is 1 for each layer and hf is k, whatever
 * is chosen. */
static void test_balanced_values(void **state)
{
    (void)state;
    for (int kind = MT_AUX_NONE; kind <= MT_AUX_HF; kind++) {
        mt_model_config c = config_of("olmoe");
        struct rig r;
        c.aux_loss = (mt_aux_kind)kind;
        rig_open(&r, &c, MT_F64, NULL);
        for (int l = 0; l < LAYERS; l++) {
            char name[64];
            snprintf(name, sizeof name, "model.layers.%d.mlp.gate", l);
            memset(param(&r, name)->master, 0, E * D * sizeof(double));
        }
        rig_pass(&r, false);
        double want = kind == MT_AUX_NONE ? 0 : kind == MT_AUX_SWITCH ? LAYERS : K;
        assert_true(fabs(r.aux - want) <= 16 * 0x1p-53 * want);
        assert_true(fabs(r.z - LAYERS * log(E) * log(E)) <= 64 * 0x1p-53);
        rig_close(&r);
    }
}

/* The gradient is linear in the coefficients: each loss reaches the router (and, through its input,
 * what is below), once, with recompute or without. */
static void test_losses_reach_the_router(void **state)
{
    (void)state;
    for (int which = 0; which < 2; which++)
        for (int kind = MT_AUX_SWITCH; kind <= MT_AUX_HF; kind++) {
            double *grads[3] = { NULL };
            int64_t elements = 0;
            struct rig r;
            for (int coef = 0; coef < 3; coef++)
                for (int recompute = 0; recompute < 2; recompute++) {
                    mt_model_config c = config_of("qwen3_moe");
                    c.aux_loss = (mt_aux_kind)kind;
                    c.router_aux_loss_coef = which ? 0 : coef;
                    c.z_loss_coef = which ? coef : 0;
                    rig_open(&r, &c, MT_F64, &(mt_tape_options){ .recompute = recompute });
                    rig_step(&r);
                    mt_param_store *store = mt_model_params(r.model);
                    elements = mt_param_store_elements(store);
                    size_t bytes = (size_t)elements * sizeof(double);
                    if (recompute) {
                        assert_memory_equal(grads[coef], mt_param_store_grad(store), bytes);
                    } else {
                        grads[coef] = malloc(bytes);
                        memcpy(grads[coef], mt_param_store_grad(store), bytes);
                    }
                    if (coef < 2 || !recompute) rig_close(&r);
                }
            double most = 0;
            for (int64_t i = 0; i < elements; i++) most = fmax(most, fabs(grads[2][i]));
            for (int64_t i = 0; i < elements; i++) {
                double once = grads[1][i] - grads[0][i], twice = grads[2][i] - grads[0][i];
                assert_true(fabs(twice - 2 * once) <= 64 * (T + D) * 0x1p-53 * most);
            }
            for (int l = 0; l < LAYERS; l++) {
                char name[64];
                snprintf(name, sizeof name, "model.layers.%d.mlp.gate", l);
                const mt_param *gate = param(&r, name);
                double moved = 0;
                for (int64_t i = 0; i < E * D; i++)
                    moved =
                        fmax(moved, fabs(grads[1][gate->offset + i] - grads[0][gate->offset + i]));
                assert_true(moved > 1e-4 * most);
            }
            rig_close(&r);
            for (int i = 0; i < 3; i++) free(grads[i]);
        }
}

/* ---- load, dropped rows, bias -------------------------------------------------------------------
 */

static void test_load_is_counted_once(void **state)
{
    (void)state;
    for (int bits = 0; bits < 16; bits++) {
        mt_tape_options options = { .recompute = bits & 1,
                                    .recompute_activation = bits & 2,
                                    .offload = bits & 4,
                                    .defer_wgrad = bits & 8 };
        mt_model_config c = config_of("qwen3_moe");
        struct rig r;
        int64_t dropped[2];
        c.capacity_factor = 1;
        rig_open(&r, &c, MT_F32, &options);
        assert_int_equal(mt_model_moe_layers(r.model), LAYERS);
        for (int step = 0; step < 2; step++) { /* the second begins at zero again */
            assert_ok(mt_model_begin_step(r.model));
            for (int pass = 0; pass < 3; pass++) {
                rig_pass(&r, true);
                rig_pass(&r, false); /* an evaluation, which counts nothing */
            }
            dropped[step] = *mt_model_dropped(r.model);
            int64_t over = 0;
            for (int l = 0; l < LAYERS; l++) {
                int64_t sum = 0;
                for (int e = 0; e < E; e++) {
                    int64_t load = mt_model_load(r.model, l)[e];
                    assert_int_equal(load % 3, 0);
                    sum += load;
                    over += load / 3 > T * K / E ? load - 3 * (T * K / E) : 0;
                }
                assert_int_equal(sum, 3 * T * K);
            }
            assert_true(dropped[step] > 0);
            assert_int_equal(dropped[step], over);
        }
        rig_close(&r);
    }
}

/* bias_e += u sign(mean load - load_e), then centred; it chooses, and weighs nothing. */
static void test_router_bias(void **state)
{
    (void)state;
    mt_model_config c = config_of("qwen3_moe");
    struct rig r;
    c.router_bias_update_rate = 0.125, c.norm_topk_prob = false;
    rig_open(&r, &c, MT_F32, NULL);
    for (int l = 0; l < LAYERS; l++)
        for (int e = 0; e < E; e++) assert_true(mt_model_router_bias(r.model, l)[e] == 0);
    for (int step = 0; step < 3; step++) {
        double want[LAYERS][E];
        rig_step(&r);
        for (int l = 0; l < LAYERS; l++) {
            double mean = 0;
            for (int e = 0; e < E; e++) {
                double gap = (double)(T * K) / E - (double)mt_model_load(r.model, l)[e];
                want[l][e] =
                    (double)mt_model_router_bias(r.model, l)[e] + 0.125 * ((gap > 0) - (gap < 0));
                mean += want[l][e] / E;
            }
            for (int e = 0; e < E; e++) want[l][e] -= mean;
        }
        assert_ok(mt_model_update_router_bias(r.model, &r.stream, NULL));
        for (int l = 0; l < LAYERS; l++)
            test_assert_near("bias", mt_model_router_bias(r.model, l), MT_F32, want[l], E,
                             4 * 0x1p-24, 0);
    }
    for (int l = 0; l < LAYERS; l++) /* expert 3 and, of the others, the best one */
        mt_model_router_bias(r.model, l)[3] = 100;
    rig_step(&r);
    for (int l = 0; l < LAYERS; l++) assert_int_equal(mt_model_load(r.model, l)[3], T);
    assert_true(isfinite(r.loss) && r.loss < 10); /* weights of 100 would show */
    rig_close(&r);

    c.router_bias_update_rate = 0; /* off: the update leaves the bias as it is */
    rig_open(&r, &c, MT_F32, NULL);
    rig_step(&r);
    assert_ok(mt_model_update_router_bias(r.model, &r.stream, NULL));
    for (int l = 0; l < LAYERS; l++)
        for (int e = 0; e < E; e++) assert_true(mt_model_router_bias(r.model, l)[e] == 0);
    for (int l = 0; l < LAYERS; l++) /* what a checkpoint brings is used, and stays */
        mt_model_router_bias(r.model, l)[3] = 100;
    assert_ok(mt_model_use_router_bias(r.model));
    rig_step(&r);
    assert_ok(mt_model_update_router_bias(r.model, &r.stream, NULL));
    for (int l = 0; l < LAYERS; l++) {
        assert_int_equal(mt_model_load(r.model, l)[3], T);
        for (int e = 0; e < E; e++)
            assert_true(mt_model_router_bias(r.model, l)[e] == (e == 3 ? 100 : 0));
    }
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_definitions),
        cmocka_unit_test(test_balanced_values),
        cmocka_unit_test(test_losses_reach_the_router),
        cmocka_unit_test(test_load_is_counted_once),
        cmocka_unit_test(test_router_bias),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
