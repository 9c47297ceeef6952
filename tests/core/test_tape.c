/* The tape: gradients of shared values, passes, what is held, misuse, steady state. */
#include "tests/support/toys.h"

#include <string.h>

#include "tests/support/fault.h"

enum { N = 3 };

static mt_stream stream;

static void backward_from(mt_tape *tape, mt_value **y)
{
    double ones[64];
    int64_t n = (*y)->data.shape[0];
    for (int64_t i = 0; i < n; i++) ones[i] = 1;
    assert_ok(mt_tape_seed_tensor(tape, *y, mt_tensor_1d(ones, MT_F64, n)));
    mt_value_release(tape, y);
    assert_ok(mt_tape_backward(tape));
}

static void assert_gradient(const mt_value *x, const double *want)
{
    mt_tensor g = mt_value_grad(x);
    assert_non_null(g.data);
    assert_memory_equal(g.data, want, (size_t)mt_tensor_count(&g) * sizeof(double));
}

/* ---- gradients ----------------------------------------------------------------------------------
 */

/* y = (x + x) x + x^2 c + x: every way a value can be used more than once. Small integers: exact.
 */
static void test_shared_values(void **state)
{
    (void)state;
    double x[N] = { 1, 2, -3 }, c[N] = { 5, -1, 2 }, dx[N], dc[N];
    mt_tape *tape = toy_tape(&stream, NULL);
    mt_value *two, *a, *s, *b, *t, *y;
    assert_ok(mt_tape_begin(tape, 1, true));
    mt_value *vx = toy_input(tape, x, N), *vc = toy_input(tape, c, N);
    assert_ok(toy_add(tape, &two, vx, vx));
    assert_ok(toy_mul(tape, &a, two, vx));
    mt_value_release(tape, &two);
    assert_ok(toy_square(tape, &s, vx));
    assert_ok(toy_mul(tape, &b, s, vc));
    mt_value_release(tape, &s);
    assert_ok(toy_add(tape, &t, a, b));
    mt_value_release(tape, &a);
    mt_value_release(tape, &b);
    assert_ok(toy_add(tape, &y, t, vx));
    mt_value_release(tape, &t);
    backward_from(tape, &y);
    for (int i = 0; i < N; i++) dx[i] = 4 * x[i] + 2 * x[i] * c[i] + 1, dc[i] = x[i] * x[i];
    assert_gradient(vx, dx);
    assert_gradient(vc, dc);
    mt_value_release(tape, &vx);
    mt_value_release(tape, &vc);
    assert_ok(mt_tape_end(tape));
    mt_tape_destroy(&tape);
}

/* A gradient handed on without a copy belongs to two values: adding to one must not change the
 * other. Then it is that value's own, and grows in place. */
static void test_forms_of_accumulation(void **state)
{
    (void)state;
    double u[N] = { 1, 2, 3 }, v[N] = { 4, 5, 6 }, k[N] = { 7, 8, 9 }, du[N], dv[N];
    mt_tape *tape = toy_tape(&stream, NULL);
    mt_value *p, *q, *m[2], *y, *t;
    assert_ok(mt_tape_begin(tape, 1, true));
    mt_value *vu = toy_input(tape, u, N), *vv = toy_input(tape, v, N), *vk;
    assert_ok(mt_tape_input(tape, &vk, mt_tensor_1d(k, MT_F64, N), false));
    assert_ok(toy_square(tape, &p, vu));
    assert_ok(toy_square(tape, &q, vv));
    for (int i = 0; i < 2; i++) assert_ok(toy_mul(tape, &m[i], p, vk));
    assert_ok(toy_add(tape, &t, m[0], m[1])); /* swept last but one */
    assert_ok(toy_add(tape, &y, p, q));       /* swept first: dy is both dp and dq */
    double ones[N] = { 1, 1, 1 };
    assert_ok(mt_tape_seed_tensor(tape, t, mt_tensor_1d(ones, MT_F64, N)));
    mt_value *all[] = { p, q, m[0], m[1], t };
    for (int i = 0; i < 5; i++) mt_value_release(tape, &all[i]);
    backward_from(tape, &y);
    for (int i = 0; i < N; i++) du[i] = 2 * u[i] * (1 + 2 * k[i]), dv[i] = 2 * v[i];
    assert_gradient(vu, du);
    assert_gradient(vv, dv);
    assert_int_equal(toy_log.passed, 4);   /* both inputs of both additions */
    assert_int_equal(toy_log.separate, 1); /* dp, shared with dq until then */
    assert_int_equal(toy_log.in_place, 1); /* dp, by now its own */
    assert_int_equal(toy_log.first, 2);    /* du, dv */
    mt_value *rest[] = { vu, vv, vk };
    for (int i = 0; i < 3; i++) mt_value_release(tape, &rest[i]);
    assert_ok(mt_tape_end(tape));
    mt_tape_destroy(&tape);
}

/* Several losses; an input that wants no gradient; a branch that no gradient reaches. */
static void test_seeds_and_dead_branches(void **state)
{
    (void)state;
    double x[N] = { 1, 2, 3 }, c[N] = { 2, 2, 2 }, s[1] = { 3 }, want[N];
    mt_tape *tape = toy_tape(&stream, NULL);
    mt_param_store *store = toy_store(1, N, 5);
    mt_param *w = mt_param_store_get(store, 0);
    mt_value *a, *b, *dead, *c2, *z;
    assert_ok(mt_tape_begin(tape, 1, true));
    mt_value *vx = toy_input(tape, x, N), *vs = toy_input(tape, s, 1), *vc;
    assert_ok(mt_tape_input(tape, &vc, mt_tensor_1d(c, MT_F64, N), false));
    assert_ok(toy_square(tape, &a, vx));
    assert_ok(toy_mul(tape, &b, vx, vc));
    assert_ok(toy_scale(tape, &dead, vx, w, 0));
    assert_ok(toy_square(tape, &c2, vc)); /* of constants: not recorded */
    assert_ok(toy_square(tape, &z, vs));
    double seed_a[N] = { 1, 10, 100 }, seed_b[N] = { -1, 0, 1 };
    assert_ok(mt_tape_seed_tensor(tape, a, mt_tensor_1d(seed_a, MT_F64, N)));
    assert_ok(mt_tape_seed_tensor(tape, b, mt_tensor_1d(seed_b, MT_F64, N)));
    assert_ok(mt_tape_seed(tape, z, 0.5));
    assert_fails(mt_tape_seed(tape, z, 1), MT_EINVAL, "seeded twice");
    mt_param_store_begin_step(store);
    assert_ok(mt_tape_backward(tape));
    for (int i = 0; i < N; i++) want[i] = 2 * x[i] * seed_a[i] + c[i] * seed_b[i];
    assert_gradient(vx, want);
    assert_gradient(vs, (double[]){ 3 });
    assert_null(mt_value_grad(vc).data);
    assert_int_equal(w->uses, 0);
    for (int i = 0; i < N; i++) /* nothing reached w: zero, not what an earlier step left */
        assert_true(((double *)w->grad)[i] == 0);
    mt_value *all[] = { a, b, dead, c2, z, vx, vs, vc };
    for (int i = 0; i < 8; i++) mt_value_release(tape, &all[i]);
    assert_ok(mt_tape_end(tape));
    mt_param_store_destroy(&store);
    mt_tape_destroy(&tape);
}

/* ---- params -------------------------------------------------------------------------------------
 */

/* y = x w0 + w1, seeded with ones: dw0 = x, dw1 = 1, dx = w0. */
static void affine_pass(mt_tape *tape, mt_param_store *store, double *x, double *dx)
{
    mt_value *a, *y;
    assert_ok(mt_tape_begin(tape, 1, true));
    mt_value *vx = toy_input(tape, x, N);
    assert_ok(toy_scale(tape, &a, vx, mt_param_store_get(store, 0), 0));
    assert_ok(toy_shift(tape, &y, a, mt_param_store_get(store, 1)));
    mt_value_release(tape, &a);
    backward_from(tape, &y);
    assert_ok(mt_tape_run_deferred(tape));
    memcpy(dx, mt_value_grad(vx).data, N * sizeof *dx);
    mt_value_release(tape, &vx);
    assert_ok(mt_tape_end(tape));
}

static void test_accumulates_over_passes(void **state)
{
    (void)state;
    mt_tape *tape = toy_tape(&stream, NULL);
    mt_param_store *store = toy_store(2, N, 9);
    double x[3][N] = { { 1, 2, 3 }, { 0.1, 0.2, 0.3 }, { -7, 1e-9, 1e9 } }, dx[N];
    for (int step = 0; step < 2; step++) { /* the second step starts anew */
        mt_param_store_begin_step(store);
        for (int pass = 0; pass < 3; pass++) affine_pass(tape, store, x[pass], dx);
        assert_ok(mt_param_store_end_step(store));
        const double *dw = mt_param_store_get(store, 0)->grad,
                     *db = mt_param_store_get(store, 1)->grad;
        for (int i = 0; i < N; i++) {
            assert_true(dw[i] == x[0][i] + x[1][i] + x[2][i]);
            assert_true(db[i] == 3);
            assert_true(dx[i] == ((double *)mt_param_store_get(store, 0)->master)[i]);
        }
    }
    mt_param_store_destroy(&store);
    mt_tape_destroy(&tape);
}

/* A frozen param passes gradients on and is not written; with nothing else to learn a node is not
 * kept. */
static void test_frozen_params(void **state)
{
    (void)state;
    for (int defer = 0; defer < 2; defer++) {
        mt_tape *tape = toy_tape(&stream, &(mt_tape_options){ .defer_wgrad = defer });
        mt_param_store *store = toy_store(2, N, 9);
        unsigned char before[2][N * sizeof(double)];
        double x[N] = { 1, 2, 3 }, dx[N];
        for (int i = 0; i < 2; i++) {
            mt_param *p = mt_param_store_get(store, i);
            p->frozen = true;
            memcpy(before[i], p->grad, sizeof before[i]);
        }
        mt_param_store_begin_step(store);
        affine_pass(tape, store, x, dx);
        for (int i = 0; i < 2; i++) {
            mt_param *p = mt_param_store_get(store, i);
            assert_memory_equal(p->grad, before[i], sizeof before[i]);
            assert_int_equal(p->uses, 0);
        }
        assert_memory_equal(dx, mt_param_store_get(store, 0)->master, sizeof dx);

        mt_value *vx, *y;
        double ones[N] = { 1, 1, 1 };
        toy_log.fuse = 1; /* a backward that ran would fail */
        assert_ok(mt_tape_begin(tape, 2, true));
        assert_ok(mt_tape_input(tape, &vx, mt_tensor_1d(x, MT_F64, N), false));
        assert_ok(toy_scale(tape, &y, vx, mt_param_store_get(store, 0), 0));
        assert_ok(mt_tape_seed_tensor(tape, y, mt_tensor_1d(ones, MT_F64, N)));
        assert_ok(mt_tape_backward(tape));
        mt_value_release(tape, &y);
        mt_value_release(tape, &vx);
        assert_ok(mt_tape_end(tape));
        mt_param_store_destroy(&store);
        mt_tape_destroy(&tape);
    }
}

/* ---- passes -------------------------------------------------------------------------------------
 */

/* y = x^(2^depth); returns y. */
static mt_value *tower(mt_tape *tape, mt_value *x, int depth)
{
    mt_value *y;
    mt_value_hold(x);
    for (int i = 0; i < depth; i++) {
        assert_ok(toy_square(tape, &y, x));
        mt_value_release(tape, &x);
        x = y;
    }
    return x;
}

static void test_forward_only_frees_as_it_goes(void **state)
{
    (void)state;
    enum { DEPTH = 600, WIDE = 64 }; /* more values than one chunk of the tape's pools */
    double x[WIDE] = { 1 };
    mt_tape *tape = toy_tape(&stream, &(mt_tape_options){ .offload = true });
    for (int pass = 0; pass < 2; pass++) {
        assert_ok(mt_tape_begin(tape, 1, false));
        mt_value *vx = toy_input(tape, x, WIDE), *y = tower(tape, vx, DEPTH);
        assert_true(((double *)y->data.data)[0] == 1);
        assert_fails(mt_tape_backward(tape), MT_EINVAL, "outside a training pass");
        mt_value_release(tape, &vx);
        mt_value_release(tape, &y);
        assert_ok(mt_tape_end(tape));
    }
    assert_int_equal(mt_arena_bytes(mt_tape_arena(tape)), 2 * WIDE * sizeof(double));
    assert_int_equal(mt_arena_bytes(mt_tape_host_pool(tape)), 0);
    mt_tape_destroy(&tape);
}

static void test_deep_chain(void **state)
{
    (void)state;
    enum { DEPTH = 700 };
    double one[1] = { 1 };
    mt_param_store *store = toy_store(1, 1, 1);
    mt_param *w = mt_param_store_get(store, 0);
    *(double *)w->master = 1;
    mt_tape *tape = toy_tape(&stream, &(mt_tape_options){ .defer_wgrad = true });
    mt_param_store_begin_step(store);
    assert_ok(mt_tape_begin(tape, 1, true));
    mt_value *x = toy_input(tape, one, 1), *y, *top = x;
    mt_value_hold(x);
    for (int i = 0; i < DEPTH; i++) {
        assert_ok(toy_scale(tape, &y, x, w, i));
        mt_value_release(tape, &x);
        x = y;
    }
    backward_from(tape, &x);
    assert_gradient(top, one);
    assert_int_equal(w->deferred, DEPTH);
    assert_ok(mt_tape_run_deferred(tape));
    assert_true(*(double *)w->grad == DEPTH);
    mt_value_release(tape, &top);
    assert_ok(mt_tape_end(tape));
    mt_param_store_destroy(&store);
    mt_tape_destroy(&tape);
}

static void test_held_values_are_reported(void **state)
{
    (void)state;
    double x[N] = { 1, 2, 3 };
    mt_tape *tape = toy_tape(&stream, NULL);
    for (int training = 0; training < 2; training++) {
        assert_ok(mt_tape_begin(tape, 1, training));
        mt_value *vx = toy_input(tape, x, N), *y = tower(tape, vx, 2), *z = tower(tape, y, 2);
        mt_value_release(tape, &z);
        (void)y; /* still held; so is vx, whose memory is not the tape's */
        assert_fails(mt_tape_end(tape), MT_EINTERNAL, "1 values still held");
        assert_ok(mt_tape_begin(tape, 1, training)); /* and yet it goes on */
        assert_ok(mt_tape_end(tape));
        assert_int_equal(test_device()->bytes[MT_MEMORY_ACTIVATIONS],
                         mt_arena_bytes(mt_tape_arena(tape)));
    }
    mt_tape_destroy(&tape);
}

static void test_misuse(void **state)
{
    (void)state;
    double x[N] = { 1, 2, 3 }, one = 1;
    float narrow[N] = { 1, 1, 1 };
    mt_tape *tape = toy_tape(&stream, &(mt_tape_options){ .defer_wgrad = true });
    mt_param_store *store = toy_store(1, N, 1);
    mt_value *v, *y;
    mt_tape *none;
    assert_fails(mt_tape_create(&none, NULL, NULL), MT_EINVAL, "no stream");
    assert_fails(mt_tape_create(&none, &(mt_stream){ 0 }, NULL), MT_EINVAL, "no device");
    assert_fails(mt_tape_value(tape, &v, MT_F64, 1, (int64_t[]){ 1 }), MT_EINVAL, "outside a pass");
    assert_fails(mt_tape_end(tape), MT_EINVAL, "not begun");
    assert_fails(mt_tape_backward(tape), MT_EINVAL, "outside a training pass");
    mt_tape_abort(tape); /* of nothing */
    assert_ok(mt_tape_begin(tape, 1, true));
    assert_fails(mt_tape_begin(tape, 1, true), MT_EINVAL, "within a pass");
    assert_fails(mt_tape_value(tape, &v, MT_F64, 5, NULL), MT_EINVAL, "5 dims");
    assert_fails(mt_tape_value(tape, &v, MT_F64, 2, (int64_t[]){ 2, -1 }), MT_EINVAL,
                 "-1 elements in dimension 1");
    assert_fails(mt_tape_value(tape, &v, MT_DTYPE_COUNT, 1, (int64_t[]){ 1 }), MT_EINVAL, "dtype");
    assert_fails(mt_tape_input(tape, &v, (mt_tensor){ x, MT_F64, 5, { 1 } }, true), MT_EINVAL,
                 "5 dims");
    assert_fails(mt_tape_input(tape, &v, mt_tensor_2d(x, MT_F64, -1, 3), true), MT_EINVAL,
                 "-1 elements in dimension 0");
    assert_fails(mt_tape_value(tape, &v, MT_F64, 2, (int64_t[]){ 1 << 20, INT64_C(1) << 41 }),
                 MT_ENOMEM, "more bytes than there are addresses");
    mt_value *vx = toy_input(tape, x, N);
    assert_ok(toy_scale(tape, &y, vx, mt_param_store_get(store, 0), 0));
    assert_fails(mt_tape_seed(tape, y, 1), MT_EINVAL, "scalar");
    assert_fails(mt_tape_seed_tensor(tape, y, mt_tensor_1d(&one, MT_F64, 1)), MT_EINVAL, "8 bytes");
    assert_fails(mt_tape_seed_tensor(tape, y, mt_tensor_1d(narrow, MT_F32, N)), MT_EINVAL, "seed");
    char attrs[513] = { 0 };
    mt_node_spec fat = { .op = &(mt_op){ "fat", NULL, NULL },
                         .attrs = attrs,
                         .attrs_bytes = sizeof attrs,
                         .inputs = { vx } };
    assert_fails(mt_tape_record(tape, &fat), MT_EINVAL, "513 bytes");
    mt_node_spec wide = { .op = fat.op };
    for (int i = 0; i < MT_NODE_MAX; i++) wide.inputs[i] = vx;
    assert_fails(mt_tape_record(tape, &wide), MT_EINVAL,
                 "fat: 10 inputs, 0 outputs, 0 saved values and 0 params, at most 9 each");
    wide = (mt_node_spec){ .op = fat.op, .inputs = { vx } };
    for (int i = 0; i < MT_NODE_MAX; i++) wide.params[i] = mt_param_store_get(store, 0);
    assert_fails(mt_tape_record(tape, &wide), MT_EINVAL, "and 10 params");
    mt_value *many[16];
    assert_fails(mt_tape_segment(tape, NULL, NULL, many, MT_NODE_MAX, many, 1), MT_EINVAL,
                 "at most");
    backward_from(tape, &y);
    mt_value_release(tape, &vx);
    assert_fails(mt_tape_end(tape), MT_EINVAL, "1 deferred weight gradients");
    mt_tape_abort(tape);
    assert_int_equal(mt_param_store_get(store, 0)->deferred, 0);
    assert_ok(mt_tape_begin(tape, 2, true));
    mt_tape_destroy(&tape); /* within a pass */
    mt_param_store_destroy(&store);
    assert_int_equal(test_device()->bytes[MT_MEMORY_ACTIVATIONS], 0);
}

/* A param's uses are those of one pass: while it is open no other tape's records one, but to go
 * through a frozen param, or forward only, disturbs nobody. */
static void test_one_tape_at_a_time(void **state)
{
    (void)state;
    double x[N] = { 1, 2, 3 };
    for (int aborts = 0; aborts < 2; aborts++) {
        mt_tape *a = toy_tape(&stream, NULL), *b = toy_tape(&stream, NULL);
        mt_param_store *store = toy_store(2, N, 4);
        mt_param *w = mt_param_store_get(store, 0), *frozen = mt_param_store_get(store, 1);
        mt_value *y, *z;
        frozen->frozen = true;
        assert_ok(mt_tape_begin(a, 1, true));
        mt_value *xa = toy_input(a, x, N);
        assert_ok(toy_scale(a, &y, xa, w, 0));
        assert_ok(toy_shift(a, &z, y, frozen));
        mt_value_release(a, &y);
        assert_ok(mt_tape_begin(b, 1, false));
        mt_value *xb = toy_input(b, x, N);
        assert_ok(toy_scale(b, &y, xb, w, 0));
        mt_value_release(b, &y);
        mt_value_release(b, &xb);
        assert_ok(mt_tape_end(b));
        assert_ok(mt_tape_begin(b, 2, true));
        xb = toy_input(b, x, N);
        assert_ok(toy_shift(b, &y, xb, frozen));
        backward_from(b, &y);
        assert_fails(toy_scale(b, &y, xb, w, 0), MT_EINVAL, "w0 is in a pass of another tape");
        mt_tape_abort(b);
        assert_int_equal(w->uses, 1);
        backward_from(a, &z);
        assert_int_equal(w->uses, 0);
        mt_value_release(a, &xa);
        if (aborts)
            mt_tape_abort(a);
        else
            assert_ok(mt_tape_end(a));
        assert_ok(mt_tape_begin(b, 3, true));
        xb = toy_input(b, x, N);
        assert_ok(toy_scale(b, &y, xb, w, 0));
        backward_from(b, &y);
        mt_value_release(b, &xb);
        assert_ok(mt_tape_end(b));
        mt_tape_destroy(&a);
        mt_tape_destroy(&b);
        mt_param_store_destroy(&store);
    }
}

/* ---- steady state -------------------------------------------------------------------------------
 */

static mt_status steady_block(mt_tape *tape, void *context, mt_value *const *inputs,
                              mt_value **outputs)
{
    mt_param_store *store = context;
    mt_value *a, *b;
    MT_TRY(toy_scale(tape, &a, inputs[0], mt_param_store_get(store, 0), 0));
    MT_TRY(toy_square(tape, &b, a));
    mt_value_release(tape, &a);
    MT_TRY(toy_shift(tape, &a, b, mt_param_store_get(store, 1)));
    mt_value_release(tape, &b);
    MT_TRY(toy_add(tape, &outputs[0], a, inputs[0]));
    mt_value_release(tape, &a);
    return MT_OK;
}

static void steady_pass(mt_tape *tape, mt_param_store *store, bool training)
{
    double x[16] = { 0 };
    assert_ok(mt_tape_begin(tape, training, training));
    mt_value *vx = toy_input(tape, x, 16), *h = vx, *y;
    mt_value_hold(vx);
    for (int i = 0; i < 40; i++) {
        assert_ok(mt_tape_segment(tape, steady_block, store, &h, 1, &y, 1));
        mt_value_release(tape, &h);
        h = y;
    }
    if (training) {
        backward_from(tape, &h);
        assert_ok(mt_tape_run_deferred(tape));
    } else {
        mt_value_release(tape, &h);
    }
    mt_value_release(tape, &vx);
    assert_ok(mt_tape_end(tape));
}

static void test_steady_state_allocates_nothing(void **state)
{
    (void)state;
    mt_param_store *store = toy_store(2, 16, 3);
    for (int bits = 0; bits < 16; bits++) {
        mt_tape *tape = toy_tape(&stream, &(mt_tape_options){ .recompute = bits & 1,
                                                              .recompute_activation = bits & 2,
                                                              .offload = bits & 4,
                                                              .defer_wgrad = bits & 8 });
        for (int pass = 0; pass < 6; pass++) {
            int64_t before = fault_allocations();
            mt_param_store_begin_step(store);
            steady_pass(tape, store, true);
            steady_pass(tape, store, false); /* evaluation between steps has a plan of its own */
            assert_ok(mt_param_store_end_step(store));
            if (pass == 0) assert_true(fault_allocations() > before); /* the counter counts */
            if (pass >= 2) assert_int_equal(fault_allocations(), before);
        }
        mt_tape_destroy(&tape);
    }
    mt_param_store_destroy(&store);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shared_values),
        cmocka_unit_test(test_forms_of_accumulation),
        cmocka_unit_test(test_seeds_and_dead_branches),
        cmocka_unit_test(test_accumulates_over_passes),
        cmocka_unit_test(test_frozen_params),
        cmocka_unit_test(test_forward_only_frees_as_it_goes),
        cmocka_unit_test(test_deep_chain),
        cmocka_unit_test(test_held_values_are_reported),
        cmocka_unit_test(test_misuse),
        cmocka_unit_test(test_one_tape_at_a_time),
        cmocka_unit_test(test_steady_state_allocates_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
