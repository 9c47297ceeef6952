/* The gradient checker: every built-in case holds, and a wrong backward does not pass. */
#include "tests/support/test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "train/gradcheck_priv.h"

/* One thread: the cases are tiny, and that results do not depend on threads is tested elsewhere. */
static mt_device *device;

static int open_device(void **state)
{
    (void)state;
    return mt_device_open(&device, "cpu", getenv("MIXTAPE_KERNELS"), 1);
}

static int close_device(void **state)
{
    (void)state;
    mt_device_destroy(&device);
    return 0;
}

/* ---- the built-in cases -------------------------------------------------------------------------
 */

struct tally {
    int64_t cases, over;
    char ops[64][32]; /* those that reported */
    int op_count;
};

static void tally_case(void *context, const mt_gradcheck_result *r)
{
    struct tally *t = context;
    t->cases++;
    int i = 0;
    while (i < t->op_count && strcmp(t->ops[i], r->op) != 0) i++;
    if (i == t->op_count && i < 64) strncpy(t->ops[t->op_count++], r->op, 31);
    if (!(r->worst < MT_GRADCHECK_LIMIT) || r->checked == 0) {
        t->over++;
        print_error("%s %s: %lld elements, worst %g at %s: tape %.17g, difference %.17g\n", r->op,
                    r->name, (long long)r->checked, r->worst, r->where, r->analytic, r->numeric);
    }
}

static void test_every_op(void **state)
{
    (void)state;
    struct tally t = { 0 };
    int64_t failed = 0;
    assert_ok(mt_gradcheck_ops(device, NULL, tally_case, &t, &failed));
    assert_int_equal(t.over, 0);
    assert_int_equal(failed, 0);
    assert_int_equal(t.op_count, mt_layer_op_count);
    assert_true(t.cases >= 100); /* grouped_linear alone has bias x deferred x ... */
}

static void test_glob(void **state)
{
    (void)state;
    struct tally t = { 0 };
    int64_t failed = 0;
    assert_ok(mt_gradcheck_ops(device, "r*d", tally_case, &t, &failed));
    assert_int_equal(t.op_count, 1);
    assert_string_equal(t.ops[0], "residual_add");
    t = (struct tally){ 0 };
    assert_ok(mt_gradcheck_ops(device, "no_such_op", tally_case, &t, &failed));
    assert_int_equal(t.cases, 0);
}

static void test_every_model(void **state)
{
    (void)state;
    struct tally t = { 0 };
    int64_t failed = 0;
    assert_ok(mt_gradcheck_models(device, tally_case, &t, &failed));
    assert_int_equal(t.over, 0);
    assert_int_equal(failed, 0);
    assert_true(t.cases >= 12);
}

static void take_defaults(mt_model_config *m)
{
    const mt_architecture *architecture;
    assert_ok(mt_architecture_find(&architecture, "qwen3_moe"));
    mt_model_config_defaults(m, architecture);
}

static void test_one_model(void **state)
{
    (void)state;
    mt_trainer_config config = { 0 };
    mt_model_config *m = &config.model;
    struct tally t = { 0 };
    int64_t failed = 0;
    take_defaults(m);
    m->vocab_size = 7, m->hidden_size = 6, m->num_hidden_layers = 1;
    m->num_attention_heads = 1, m->num_key_value_heads = 1, m->head_dim = 4;
    m->moe_intermediate_size = 3, m->num_experts = 3, m->num_experts_per_tok = 2;
    assert_ok(mt_gradcheck_model(device, &config, 1, 5, 4, "tiny", tally_case, &t, &failed));
    assert_int_equal(failed, 0);
    assert_int_equal(t.cases, 12); /* one for each param */
    assert_fails(mt_gradcheck_model(device, &config, 8, 8, 4, "", NULL, NULL, &failed), MT_EINVAL,
                 "8 x 8");

    /* Memory options hold: less is kept, or goes to the host. */
    int64_t *host = &device->peak[MT_MEMORY_HOST_POOL];
    int64_t *activations = &device->peak[MT_MEMORY_ACTIVATIONS], before;
    config.recompute = MT_RECOMPUTE_BLOCK, config.loss_chunk = 2;
    *host = *activations = 0;
    assert_ok(mt_gradcheck_model(device, &config, 1, 5, 1, "", NULL, NULL, &failed));
    before = *activations;
    config.recompute = MT_RECOMPUTE_NONE, config.loss_chunk = 0;
    *activations = 0;
    assert_ok(mt_gradcheck_model(device, &config, 1, 5, 1, "", NULL, NULL, &failed));
    assert_true(before < *activations);
    assert_int_equal(*host, 0);
    config.offload = config.defer_wgrad = true;
    assert_ok(mt_gradcheck_model(device, &config, 1, 5, 1, "", NULL, NULL, &failed));
    assert_true(*host > 0);
    assert_int_equal(failed, 0);
}

/* With one expert a token, the router has a small gradient, of the balancing losses alone: 1e-6 of
 * it is less than differences of the loss resolve. */
static void test_small_gradients(void **state)
{
    (void)state;
    mt_trainer_config config = { 0 };
    mt_model_config *m = &config.model;
    int64_t failed = 0;
    take_defaults(m);
    m->vocab_size = 32, m->hidden_size = 16, m->num_hidden_layers = 2;
    m->num_attention_heads = 4, m->num_key_value_heads = 2, m->head_dim = 8;
    m->moe_intermediate_size = 8, m->num_experts = 4, m->num_experts_per_tok = 1;
    m->z_loss_coef = 0.001;
    struct tally t = { 0 };
    assert_ok(mt_gradcheck_model(device, &config, 2, 5, 8, "small", tally_case, &t, &failed));
    assert_int_equal(failed, 0);
}

/* ---- wrong gradients ----------------------------------------------------------------------------
 */

/* y = x^2 w, with a backward that is off by `error` in one place or another. */
static struct {
    double dx, dw; /* relative errors */
    int64_t only;  /* the element that is wrong, -1: all */
    bool drop_dx;  /* dx is never written */
    bool alone;    /* what other consumers gave is lost */
} wrong;

static double off(double error, int64_t i)
{
    return 1 + (wrong.only < 0 || wrong.only == i ? error : 0);
}

static mt_status odd_backward(mt_tape *tape, mt_node *node)
{
    mt_param *w = mt_node_param(node, 0);
    mt_tensor x, dx, add, dy = mt_node_grad_out(node, 0);
    bool accumulate, skip;
    MT_TRY(mt_node_saved(tape, node, 0, &x));
    MT_TRY(mt_param_grad_begin(tape, w, &accumulate, &skip));
    const double *px = x.data, *pw = w->master, *g = dy.data;
    double *dw = w->grad;
    for (int64_t i = 0; i < mt_tensor_count(&x); i++)
        dw[i] = (accumulate ? dw[i] : 0) + g[i] * px[i] * px[i] * off(wrong.dw, i);
    MT_TRY(mt_param_grad_end(tape, w));
    if (wrong.drop_dx) return MT_OK;
    MT_TRY(mt_node_grad_in(tape, node, 0, &dx, &add));
    for (int64_t i = 0; i < mt_tensor_count(&x); i++)
        ((double *)dx.data)[i] = (add.data && !wrong.alone ? ((double *)add.data)[i] : 0) +
                                 2 * g[i] * px[i] * pw[i] * off(wrong.dx, i);
    return MT_OK;
}

static mt_status odd_forward(mt_tape *tape, check *c, mt_value *const *in, mt_value **out)
{
    static const mt_op op = { "odd", odd_backward, NULL };
    mt_param *w = c->params[0];
    MT_TRY(mt_tape_value(tape, &out[0], MT_F64, 2, in[0]->data.shape));
    const double *x = in[0]->data.data, *pw = w->master;
    for (int64_t i = 0; i < mt_tensor_count(&in[0]->data); i++)
        ((double *)out[0]->data.data)[i] = x[i] * x[i] * pw[i];
    return mt_tape_record(tape, &(mt_node_spec){ .op = &op,
                                                 .inputs = { in[0] },
                                                 .outputs = { out[0] },
                                                 .saved = { in[0] },
                                                 .params = { w } });
}

struct last {
    mt_gradcheck_result result;
};

static void keep_last(void *context, const mt_gradcheck_result *r)
{
    ((struct last *)context)->result = *r;
}

static mt_status run_odd(struct last *last, int64_t *failed)
{
    check *c;
    *failed = 0;
    assert_ok(mt_check_create(&c, device, "odd", NULL, 3));
    assert_ok(mt_check_param(c, &c->params[0], "w", 1, 4, 5, false, false));
    assert_ok(mt_check_draw(c, 0));
    assert_ok(mt_check_input(c, 4, 5));
    c->forward = odd_forward;
    mt_status status = mt_check_run(c, keep_last, last, false, failed);
    mt_check_destroy(&c);
    return status;
}

static void test_the_checker_can_fail(void **state)
{
    (void)state;
    static const struct {
        double dx, dw;
        int64_t only;
        const char *where; /* NULL: passes */
    } cases[] = {
        { 0, 0, -1, NULL },
        { 1e-5, 0, -1, "input0" },
        { 0, -1e-5, -1, "w[" },
        { 3e-6, 0, 13, "input0[13]" },
        { 0, 3e-6, 19, "w[19]" },
        { -2, 0, -1, "input0" },
        { (double)NAN, 0, 7, "input0[7]" },
        { 0, (double)INFINITY, 2, "w[" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct last last;
        int64_t failed;
        wrong.dx = cases[i].dx, wrong.dw = cases[i].dw, wrong.only = cases[i].only;
        assert_ok(run_odd(&last, &failed));
        assert_int_equal(last.result.checked, 40);
        assert_int_equal(failed, cases[i].where != NULL);
        assert_int_equal(last.result.worst < MT_GRADCHECK_LIMIT, !cases[i].where);
        if (cases[i].where && !strstr(last.result.where, cases[i].where))
            fail_msg("case %zu: the worst is %s, must be %s", i, last.result.where, cases[i].where);
    }
    wrong.drop_dx = true, wrong.dx = wrong.dw = 0;
    struct last last;
    int64_t failed;
    assert_fails(run_odd(&last, &failed), MT_EINTERNAL, "no gradient reached input 0");
    wrong.drop_dx = false, wrong.alone = true;
    assert_fails(run_odd(&last, &failed), MT_EINTERNAL, "beside another consumer's");
    wrong.alone = false;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_op),        cmocka_unit_test(test_glob),
        cmocka_unit_test(test_every_model),     cmocka_unit_test(test_one_model),
        cmocka_unit_test(test_small_gradients), cmocka_unit_test(test_the_checker_can_fail),
    };
    return cmocka_run_group_tests(tests, open_device, close_device);
}
