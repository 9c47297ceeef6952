/* What hangs on the tape changes no bit: random programs under every combination of recompute,
 * offload and deferral; what each of them saves; the grad-ready hook. */
#include "tests/core/programs.h"

#include <math.h>

/* Three passes each, accumulating; later ones replay the arena's plan. */
static void test_no_option_changes_a_bit(void **state)
{
    (void)state;
    int64_t values = 0, alive = 0;
    for (uint64_t seed = 1; seed <= 40; seed++) {
        struct program plain, other;
        program_make(&plain, seed, NULL);
        for (int pass = 0; pass < 3; pass++) assert_ok(program_pass(&plain));
        for (int bits = 1; bits < OPTIONS; bits++) {
            mt_tape_options options = options_of(bits);
            program_make(&other, seed, &options);
            for (int pass = 0; pass < 3; pass++) assert_ok(program_pass(&other));
            assert_same(&plain, &other);
            mt_tape_destroy(&other.tape);
            mt_param_store_destroy(&other.store);
        }
        for (int i = 0; i < PARAMS; i++)
            for (int j = 0; j < N; j++, values++) {
                double g = ((double *)mt_param_store_get(plain.store, i)->grad)[j];
                alive += g != 0 && isfinite(g);
            }
        program_free(&plain);
    }
    assert_true(2 * alive > values); /* the programs compute something */
}

/* ---- what they save -----------------------------------------------------------------------------
 */

enum { WIDE = 512, DEPTH = 12, BLOCK_BYTES = WIDE * sizeof(double) };

static mt_status four_squares(mt_tape *tape, void *context, mt_value *const *inputs,
                              mt_value **outputs)
{
    (void)context;
    mt_value *x = inputs[0], *y;
    mt_value_hold(x);
    for (int i = 0; i < 4; i++) {
        MT_TRY(toy_square(tape, &y, x));
        mt_value_release(tape, &x);
        x = y;
    }
    outputs[0] = x;
    return MT_OK;
}

struct usage {
    int64_t arena, host, again;
};

static struct usage chain_usage(const mt_tape_options *options, double *dx)
{
    static double x[WIDE], ones[WIDE];
    mt_tape *tape = toy_tape(&stream, options);
    for (int i = 0; i < WIDE; i++) x[i] = 1 + 1e-16 * i, ones[i] = 1;
    for (int pass = 0; pass < 2; pass++) {
        toy_log.again = 0;
        assert_ok(mt_tape_begin(tape, 1, true));
        mt_value *vx = toy_input(tape, x, WIDE), *h = vx, *y;
        mt_value_hold(vx);
        for (int i = 0; i < DEPTH; i++) {
            assert_ok(mt_tape_segment(tape, four_squares, NULL, &h, 1, &y, 1));
            mt_value_release(tape, &h);
            h = y;
        }
        assert_ok(mt_tape_seed_tensor(tape, h, mt_tensor_1d(ones, MT_F64, WIDE)));
        mt_value_release(tape, &h);
        assert_ok(mt_tape_backward(tape));
        memcpy(dx, mt_value_grad(vx).data, sizeof x);
        mt_value_release(tape, &vx);
        assert_ok(mt_tape_end(tape));
    }
    struct usage u = { mt_arena_bytes(mt_tape_arena(tape)), mt_arena_bytes(mt_tape_host_pool(tape)),
                       toy_log.again };
    assert_int_equal(u.arena, test_device()->bytes[MT_MEMORY_ACTIVATIONS]);
    assert_int_equal(u.host, test_device()->bytes[MT_MEMORY_HOST_POOL]);
    mt_tape_destroy(&tape);
    return u;
}

static void test_memory_is_saved(void **state)
{
    (void)state;
    double want[WIDE], dx[WIDE];
    struct usage plain = chain_usage(NULL, want), u;
    assert_int_equal(plain.host, 0);
    assert_int_equal(plain.again, 0);
    assert_true(plain.arena >= 4 * (DEPTH - 1) * (int64_t)BLOCK_BYTES); /* every value is saved */

    u = chain_usage(&(mt_tape_options){ .recompute = true }, dx);
    assert_memory_equal(dx, want, sizeof dx); /* segment inputs, one segment's insides, gradients */
    assert_true(u.arena <= (DEPTH + 10) * (int64_t)BLOCK_BYTES);
    assert_int_equal(u.host, 0);

    u = chain_usage(&(mt_tape_options){ .offload = true }, dx);
    assert_memory_equal(dx, want, sizeof dx);
    assert_true(u.arena <= 8 * (int64_t)BLOCK_BYTES); /* what runs, and what is on its way */
    assert_true(u.host >= 4 * (DEPTH - 1) * (int64_t)BLOCK_BYTES);

    u = chain_usage(&(mt_tape_options){ .recompute = true, .offload = true }, dx);
    assert_memory_equal(dx, want, sizeof dx);
    assert_true(u.arena <= 12 * (int64_t)BLOCK_BYTES);
    assert_true(u.host <= (DEPTH + 1) * (int64_t)BLOCK_BYTES && u.host > 0);
}

/* y = (x^2)^2 k many times over: x^2 is dropped and made again, once for each. */
static void test_dropped_values_are_made_again(void **state)
{
    (void)state;
    static double x[WIDE], k[WIDE], dx[2][WIDE];
    int64_t bytes[2];
    test_random(x, WIDE, MT_F64, 1, 1);
    test_random(k, WIDE, MT_F64, 1, 2);
    for (int drop = 0; drop < 2; drop++) {
        mt_tape *tape = toy_tape(&stream, &(mt_tape_options){ .recompute_activation = drop });
        assert_ok(mt_tape_begin(tape, 1, true));
        mt_value *vx = toy_input(tape, x, WIDE), *vk = toy_input(tape, k, WIDE), *h = vx, *s, *p;
        mt_value_hold(vx);
        for (int i = 0; i < DEPTH; i++) {
            assert_ok(toy_square(tape, &s, h));
            mt_value_release(tape, &h);
            assert_ok(toy_mul(tape, &p, s, vk)); /* saves s */
            mt_value_release(tape, &s);
            h = p;
        }
        assert_ok(mt_tape_seed_tensor(tape, h, mt_tensor_1d(k, MT_F64, WIDE)));
        mt_value_release(tape, &h);
        assert_ok(mt_tape_backward(tape));
        memcpy(dx[drop], mt_value_grad(vx).data, sizeof dx[drop]);
        mt_value_release(tape, &vx);
        mt_value_release(tape, &vk);
        assert_ok(mt_tape_end(tape));
        bytes[drop] = mt_arena_bytes(mt_tape_arena(tape));
        assert_int_equal(toy_log.again, drop * DEPTH);
        mt_tape_destroy(&tape);
    }
    assert_memory_equal(dx[0], dx[1], sizeof dx[0]);
    assert_true(bytes[1] <= bytes[0] - (DEPTH - 3) * (int64_t)BLOCK_BYTES);
}

/* An op that cannot make its output again keeps it. */
static void test_recompute_needs_again(void **state)
{
    (void)state;
    double x[N] = { 3 }, ones[N] = { 1 };
    mt_tape *tape = toy_tape(&stream, &(mt_tape_options){ .recompute_activation = true });
    assert_ok(mt_tape_begin(tape, 1, true));
    mt_value *vx = toy_input(tape, x, N), *a, *y;
    assert_ok(toy_mul(tape, &a, vx, vx));
    mt_value_recompute(tape, a);
    assert_ok(toy_mul(tape, &y, a, a));
    mt_value_release(tape, &a);
    assert_ok(mt_tape_seed_tensor(tape, y, mt_tensor_1d(ones, MT_F64, N)));
    mt_value_release(tape, &y);
    assert_ok(mt_tape_backward(tape));
    assert_true(((double *)mt_value_grad(vx).data)[0] == 108);
    mt_value_release(tape, &vx);
    assert_ok(mt_tape_end(tape));
    mt_tape_destroy(&tape);
}

/* ---- the hook -----------------------------------------------------------------------------------
 */

static void test_hook_fires_once_when_final(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 10; seed++)
        for (int bits = 0; bits < OPTIONS; bits++) {
            struct ready r;
            struct program p;
            mt_tape_options options = options_of(bits);
            options.grad_ready = on_ready, options.context = &r;
            program_make(&p, seed, &options);
            r.store = p.store;
            mt_param_store_get(p.store, 1)->frozen = true;
            bool used[PARAMS] = { false }; /* by the program: param 1 never shows */
            for (int i = 0; i < BLOCKS; i++)
                for (int op = 0; op < OPS; op++) {
                    int kind = draw(&p.blocks[i], op, 4, 5);
                    if (kind == 3) used[draw(&p.blocks[i], op, 2, 3)] = true;
                    if (kind == 4) used[3 + draw(&p.blocks[i], op, 3, 3)] = true;
                }
            used[1] = false;
            for (int pass = 0; pass < 2; pass++) {
                memset(r.fired, 0, sizeof r.fired);
                assert_ok(program_pass(&p));
                for (int i = 0; i < PARAMS; i++) {
                    assert_int_equal(r.fired[i], used[i]);
                    if (used[i])
                        assert_memory_equal(r.grads[i], mt_param_store_get(p.store, i)->grad,
                                            sizeof r.grads[i]);
                }
            }
            program_free(&p);
        }
}

/* A block whose outputs go nowhere: its params' gradients are final, and zero. */
static void test_hook_of_unreached_blocks(void **state)
{
    (void)state;
    for (int bits = 0; bits < OPTIONS; bits++) {
        struct ready r = { 0 };
        struct program p;
        mt_tape_options options = options_of(bits);
        options.grad_ready = on_ready, options.context = &r;
        program_make(&p, 3, &options);
        r.store = p.store;
        assert_ok(mt_tape_begin(p.tape, 1, true));
        mt_value *in[2], *out[2];
        for (int i = 0; i < 2; i++) in[i] = toy_input(p.tape, p.x[i], N);
        for (int i = 0; i < BLOCKS; i++) {
            assert_ok(mt_tape_segment(p.tape, run_block, &p.blocks[i], in, 2, out, 2));
            for (int j = 0; j < 2; j++) mt_value_release(p.tape, &out[j]);
        }
        assert_ok(mt_tape_backward(p.tape));
        assert_ok(mt_tape_run_deferred(p.tape));
        for (int i = 0; i < PARAMS; i++) {
            assert_int_equal(r.fired[i], 1);
            for (int j = 0; j < N; j++) assert_true(r.grads[i][j] == 0);
            assert_int_equal(mt_param_store_get(p.store, i)->uses, 0);
        }
        for (int i = 0; i < 2; i++) mt_value_release(p.tape, &in[i]);
        assert_ok(mt_tape_end(p.tape));
        program_free(&p);
    }
}

/* ---- deferral -----------------------------------------------------------------------------------
 */

/* w twice and another param between: the queue keeps the order of the sweep, and holds what its
 * jobs read. */
static void test_deferred_order(void **state)
{
    (void)state;
    static const double order[] = { 3, 2, 1 };
    double x[N], dw[2][N];
    test_random(x, N, MT_F64, 1, 1);
    for (int defer = 0; defer < 2; defer++) {
        mt_param_store *store = toy_store(2, N, 4);
        mt_param *w = mt_param_store_get(store, 0), *v = mt_param_store_get(store, 1);
        mt_tape *tape = toy_tape(&stream, &(mt_tape_options){ .defer_wgrad = defer });
        mt_value *a, *b, *c;
        mt_param_store_begin_step(store);
        assert_ok(mt_tape_begin(tape, 1, true));
        mt_value *vx = toy_input(tape, x, N);
        assert_ok(toy_scale(tape, &a, vx, w, 1));
        assert_ok(toy_scale(tape, &b, a, v, 2));
        assert_ok(toy_scale(tape, &c, b, w, 3));
        mt_value *all[] = { vx, a, b };
        assert_ok(mt_tape_seed_tensor(tape, c, mt_tensor_1d(x, MT_F64, N)));
        for (int i = 0; i < 3; i++) mt_value_release(tape, &all[i]);
        mt_value_release(tape, &c);
        assert_ok(mt_tape_backward(tape));
        assert_int_equal(toy_log.wgrads, defer ? 0 : 3);
        assert_int_equal(w->deferred, defer ? 2 : 0);
        assert_int_equal(w->uses, w->deferred);
        if (defer) { /* a direct write would come before its turn */
            bool accumulate, skip;
            assert_fails(mt_param_grad_begin(tape, w, &accumulate, &skip), MT_EINTERNAL, "queued");
        }
        assert_ok(mt_tape_run_deferred(tape));
        assert_ok(mt_tape_run_deferred(tape)); /* an empty queue */
        assert_int_equal(toy_log.wgrads, 3);
        assert_memory_equal(toy_log.order, order, sizeof order);
        assert_ok(mt_tape_end(tape));
        memcpy(dw[defer], w->grad, sizeof dw[defer]);
        mt_tape_destroy(&tape);
        mt_param_store_destroy(&store);
    }
    assert_memory_equal(dw[0], dw[1], sizeof dw[0]);
}

/* Gives its input back, or one square twice. */
static mt_status run_sharing(mt_tape *tape, void *context, mt_value *const *inputs,
                             mt_value **outputs)
{
    outputs[0] = inputs[0];
    if (context) return toy_square(tape, &outputs[1], inputs[0]);
    MT_TRY(toy_square(tape, &outputs[0], inputs[0]));
    outputs[1] = outputs[0];
    return MT_OK;
}

static void test_segment_misuse(void **state)
{
    (void)state;
    double x[WIDE] = { 0 };
    for (int recompute = 0; recompute < 2; recompute++) {
        mt_tape *tape = toy_tape(&stream, &(mt_tape_options){ .recompute = recompute });
        assert_ok(mt_tape_begin(tape, 1, true));
        mt_value *vx = toy_input(tape, x, WIDE), *twice[] = { vx, vx }, *out[2];
        assert_fails(mt_tape_segment(tape, run_block, NULL, twice, 2, out, 2), MT_EINVAL,
                     "same value");
        assert_fails(mt_tape_segment(tape, run_sharing, x, &vx, 1, out, 2), MT_EINVAL,
                     "output 0 of a segment is one of its inputs");
        assert_fails(mt_tape_segment(tape, run_sharing, NULL, &vx, 1, out, 2), MT_EINVAL,
                     "output 1 of a segment is the same value");
        mt_tape_abort(tape);
        mt_tape_destroy(&tape);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_option_changes_a_bit),
        cmocka_unit_test(test_memory_is_saved),
        cmocka_unit_test(test_dropped_values_are_made_again),
        cmocka_unit_test(test_recompute_needs_again),
        cmocka_unit_test(test_hook_fires_once_when_final),
        cmocka_unit_test(test_hook_of_unreached_blocks),
        cmocka_unit_test(test_deferred_order),
        cmocka_unit_test(test_segment_misuse),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
