/* The param store: names, placement in flat buffers, initial values, the bookkeeping of a step. */
#include "tests/support/test.h"

#include <math.h>
#include <string.h>

#include "core/param.h"
#include "core/rng.h"

static mt_param *add(mt_param_store *store, const char *name, int64_t members, int64_t m, int64_t k)
{
    mt_param *p;
    mt_param_spec spec = {
        .name = name, .members = members, .m = m, .k = k, .init = MT_INIT_NORMAL, .init_std = 0.5
    };
    assert_ok(mt_param_store_add(store, &p, &spec));
    return p;
}

static void test_placement(void **state)
{
    (void)state;
    mt_device *device = test_device();
    const mt_dtype dtypes[] = { MT_F32, MT_F64 };
    for (int t = 0; t < 2; t++) {
        mt_param_store *store;
        mt_dtype dtype = dtypes[t];
        size_t size = mt_dtype_size(dtype);
        assert_ok(mt_param_store_create(&store, device, dtype, dtype));
        mt_param *p[] = { add(store, "a", 1, 1, 1), add(store, "b", 3, 7, 33),
                          add(store, "empty", 0, 4, 4), add(store, "c", 1, 128, 1) };
        mt_param_reserve_compute(p[1], 1000);
        mt_param_reserve_compute(p[1], 1);
        mt_param_reserve_compute(p[3], 300);
        assert_ok(mt_param_store_allocate(store, true));
        char *master = mt_param_store_master(store), *grad = mt_param_store_grad(store),
             *end = NULL;
        for (int i = 0; i < 4; i++) {
            assert_ptr_equal(mt_param_store_get(store, i), p[i]);
            assert_ptr_equal(mt_param_store_find(store, p[i]->name), p[i]);
            assert_ptr_equal(p[i]->master, master + (size_t)p[i]->offset * size);
            assert_ptr_equal(p[i]->grad, grad + (size_t)p[i]->offset * size);
            assert_int_equal((uintptr_t)p[i]->master % 64, 0);
            assert_true((char *)p[i]->master >= end || !end);
            end = (char *)p[i]->master + (size_t)mt_param_count(p[i]) * size;
        }
        int64_t elements = mt_param_store_elements(store);
        assert_true(end <= master + (size_t)elements * size);
        for (size_t i = 0; i < (size_t)elements * size; i++)
            assert_int_equal(master[i] | grad[i], 0);
        char *copy = p[1]->compute_memory, *other = p[3]->compute_memory;
        assert_true(other >= copy + 1000);
        assert_int_equal(((uintptr_t)copy | (uintptr_t)other) % 64, 0);
        assert_null(p[0]->compute_memory);
        assert_null(mt_param_store_find(store, "d"));
        assert_int_equal(device->bytes[MT_MEMORY_MASTER], elements * (int64_t)size);
        assert_int_equal(device->bytes[MT_MEMORY_GRAD], elements * (int64_t)size);
        mt_param_store_destroy(&store);
        assert_null(store);
        mt_param_store_destroy(&store);
        for (int m = 0; m < MT_MEMORY_COUNT; m++)
            if (m != MT_MEMORY_WORKSPACE) assert_int_equal(device->bytes[m], 0);
    }
}

static void test_without_gradients(void **state)
{
    (void)state;
    mt_param_store *store;
    assert_ok(mt_param_store_create(&store, test_device(), MT_F32, MT_BF16));
    mt_param *p = add(store, "a", 1, 2, 3);
    assert_ok(mt_param_store_allocate(store, false));
    assert_null(p->grad);
    assert_null(mt_param_store_grad(store));
    mt_param_store_begin_step(store);
    assert_ok(mt_param_store_end_step(store));
    assert_int_equal(p->dtype, MT_F32);
    assert_int_equal(p->compute, MT_BF16);
    mt_param_store_destroy(&store);
}

static void test_misuse(void **state)
{
    (void)state;
    mt_param_store *store;
    mt_param *p;
    mt_param_spec spec = { .name = "a", .members = 1, .m = 1, .k = 1 };
    assert_fails(mt_param_store_create(&store, test_device(), MT_BF16, MT_BF16), MT_EINVAL, "bf16");
    assert_null(store);
    assert_fails(mt_param_store_create(&store, test_device(), MT_F32, MT_I32), MT_EINVAL,
                 "computed in i32");
    assert_fails(mt_param_store_create(&store, test_device(), MT_F32, MT_F64), MT_EINVAL,
                 "masters are f32, must be f64 where activations are f64");
    assert_fails(mt_param_store_create(&store, test_device(), MT_F64, MT_F32), MT_EINVAL,
                 "masters are f64, must be f32 where activations are f32");
    assert_fails(mt_param_store_create(&store, test_device(), MT_F64, MT_BF16), MT_EINVAL,
                 "masters are f64, must be f32 where activations are bf16");
    assert_null(store);
    assert_fails(mt_param_store_create(&store, NULL, MT_F32, MT_F32), MT_EINVAL, "no device");
    assert_ok(mt_param_store_create(&store, test_device(), MT_F32, MT_F32));
    assert_ok(mt_param_store_add(store, &p, &spec));
    double none;
    assert_fails(mt_param_read_master(store, p, 0, -1, &none), MT_EINVAL, "a: -1 elements");
    assert_fails(mt_param_store_add(store, &p, &spec), MT_EINVAL, "'a' added twice");
    assert_null(p);
    static const struct {
        mt_param_spec spec;
        const char *words;
    } bad[] = {
        { { .members = 1, .m = 1, .k = 1 }, "a param without a name" },
        { { .name = "", .members = 1, .m = 1, .k = 1 }, "a param without a name" },
        { { .name = "b", .members = -1, .m = 1, .k = 1 }, "'b' is -1 x [1, 1], must not be" },
        { { .name = "b", .members = 1, .m = -2, .k = 1 }, "'b' is 1 x [-2, 1], must not be" },
        { { .name = "b", .members = 1, .m = 1, .k = -3 }, "'b' is 1 x [1, -3], must not be" },
        { { .name = "b", .members = 2, .m = 1, .k = 1, .first_member = 3, .all_members = 4 },
          "'b': 2 members from 3 on are not among 4" },
        { { .name = "b", .members = 2, .m = 1, .k = 1, .first_member = -1, .all_members = 4 },
          "'b': 2 members from -1 on are not among 4" },
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_fails(mt_param_store_add(store, &p, &bad[i].spec), MT_EINVAL, bad[i].words);
    spec = (mt_param_spec){ .name = "b", .members = 1 << 16, .m = 1 << 21, .k = 1 << 20 };
    assert_fails(mt_param_store_add(store, &p, &spec), MT_ECONFIG, "more than 2^56 elements");
    assert_ok(mt_param_store_allocate(store, true));
    assert_fails(mt_param_store_add(store, &p, &spec), MT_EINVAL, "after allocation");
    assert_fails(mt_param_store_set_master(store, MT_MASTER_SPLIT), MT_EINVAL, "after allocation");
    assert_fails(mt_param_store_allocate(store, true), MT_EINVAL, "twice");
    mt_param_store_destroy(&store);
    assert_ok(mt_param_store_create(&store, test_device(), MT_F64, MT_F64));
    assert_fails(mt_param_store_set_master(store, MT_MASTER_SPLIT), MT_ECONFIG, "f64");
    mt_param_store_destroy(&store);
}

static void test_parts(void **state)
{
    (void)state;
    mt_param_store *store;
    assert_ok(mt_param_store_create(&store, test_device(), MT_F32, MT_F32));
    mt_param *p = add(store, "experts", 2, 6, 4);
    for (int i = 0; i < 4; i++)
        assert_ok(mt_param_add_part(p, i / 2, i % 2 * 3, 3, 2, "experts.%d.%s", i / 2,
                                    i % 2 ? "up" : "gate"));
    assert_fails(mt_param_add_part(p, 2, 0, 3, 2, "x"), MT_EINVAL, "of member 2, it has 6 of 2");
    assert_fails(mt_param_add_part(p, 0, 4, 3, 2, "x"), MT_EINVAL, "3 rows from 4 on of member 0");
    assert_fails(mt_param_add_part(p, 0, -1, 3, 2, "x"), MT_EINVAL, "3 rows from -1 on");
    assert_fails(mt_param_add_part(p, 0, 0, 3, 3, "x"), MT_EINVAL, "a part of 3 dims");
    assert_int_equal(p->part_count, 4);
    assert_string_equal(p->parts[0].name, "experts.0.gate");
    assert_string_equal(p->parts[3].name, "experts.1.up");
    assert_int_equal(p->parts[3].member, 1);
    assert_int_equal(p->parts[3].row, 3);
    assert_int_equal(p->parts[3].rows, 3);
    mt_param_store_destroy(&store);
}

/* Initial values are a function of (seed, the param's place, element): the same in f32 and f64,
 * with any compute dtype. */
static void test_initial_values(void **state)
{
    (void)state;
    enum { M = 100, K = 97, KINDS = 3 };
    static const mt_dtype kinds[KINDS][2] = { { MT_F32, MT_F32 },
                                              { MT_F64, MT_F64 },
                                              { MT_F32, MT_BF16 } };
    static double first[KINDS][M * K];
    mt_param_store *store;
    for (int t = 0; t < KINDS; t++) {
        assert_ok(mt_param_store_create(&store, test_device(), kinds[t][0], kinds[t][1]));
        mt_param *p, *zero, *one, *normal = add(store, "normal", 1, M, K);
        mt_param_spec spec = { .name = "one", .members = 1, .m = 1, .k = 5, .init = MT_INIT_ONE };
        assert_ok(mt_param_store_add(store, &one, &spec));
        spec.name = "zero", spec.init = MT_INIT_ZERO;
        assert_ok(mt_param_store_add(store, &zero, &spec));
        p = add(store, "other", 1, M, K);
        assert_ok(mt_param_store_allocate(store, false));
        test_random(zero->master, 5, zero->dtype, 1, 1);
        assert_ok(mt_param_store_init(store, 42));
        double sum = 0, squares = 0, product = 0;
        for (int64_t i = 0; i < M * K; i++) {
            double x = mt_load_f64(normal->master, normal->dtype, i),
                   y = mt_load_f64(p->master, p->dtype, i);
            assert_true(x == (double)(float)(0.5 * mt_rng_normal(42, 0, (uint64_t)i)));
            sum += x, squares += x * x, product += x * y;
            first[t][i] = x;
        }
        /* five standard errors of a mean, a variance and a correlation of n independent draws */
        double n = M * K;
        assert_true(fabs(sum / n) < 5 * 0.5 / sqrt(n));
        assert_true(fabs(squares / n - 0.25) < 5 * 0.25 * sqrt(2 / n));
        assert_true(fabs(product / n) < 5 * 0.25 / sqrt(n));
        for (int64_t i = 0; i < 5; i++) {
            assert_true(mt_load_f64(one->master, one->dtype, i) == 1);
            assert_true(mt_load_f64(zero->master, zero->dtype, i) == 0);
        }
        assert_ok(mt_param_store_init(store, 43));
        assert_true(mt_load_f64(normal->master, normal->dtype, 0) != first[t][0]);
        mt_param_store_destroy(&store);
    }
    for (int t = 1; t < KINDS; t++) assert_memory_equal(first[0], first[t], sizeof first[0]);
}

/* Gradients of weights in bf16 come after the others, aligned as those are; the rest of the store
 * does not change. */
static void test_bf16_gradients(void **state)
{
    (void)state;
    mt_param_store *store;
    mt_device *device = test_device();
    assert_ok(mt_param_store_create(&store, device, MT_F32, MT_BF16));
    const struct {
        const char *name;
        int64_t k;
        bool packed, direct;
    } specs[] = { { "norm", 5, false, false },
                  { "w", 300, true, false },
                  { "embed", 129, true, true },
                  { "v", 7, true, false } };
    mt_param *p[4];
    for (int i = 0; i < 4; i++) {
        mt_param_spec spec = { .name = specs[i].name, .members = 1, .m = 2, .k = specs[i].k };
        spec.packed = specs[i].packed, spec.direct = specs[i].direct;
        assert_ok(mt_param_store_add(store, &p[i], &spec));
    }
    assert_ok(mt_param_store_set_grad_dtype(store, MT_F32)); /* as they are */
    assert_ok(mt_param_store_set_grad_dtype(store, MT_BF16));
    assert_ok(mt_param_store_allocate(store, true));
    mt_flat_grads g = mt_param_store_grads(store);
    assert_int_equal(g.real_count, 128 + 384);
    assert_int_equal(g.bf16_count, 640 + 128);
    assert_ptr_equal(g.real, mt_param_store_grad(store));
    assert_ptr_equal(g.bf16, (const float *)g.real + g.real_count);
    assert_int_equal(device->bytes[MT_MEMORY_GRAD], g.real_count * 4 + g.bf16_count * 2);
    assert_int_equal(mt_param_store_elements(store), g.real_count + g.bf16_count);
    const void *const places[] = { g.real, g.bf16, (const float *)g.real + 128, g.bf16 + 640 };
    for (int i = 0; i < 4; i++) {
        assert_int_equal(p[i]->grad_dtype, i % 2 ? MT_BF16 : MT_F32);
        assert_ptr_equal(p[i]->grad, places[i]);
        assert_ptr_equal(p[i]->own_grad, places[i]);
        memset(p[i]->grad, 0x3f, (size_t)mt_param_count(p[i]) * mt_dtype_size(p[i]->grad_dtype));
    }
    mt_param_store_begin_step(store);
    assert_ok(mt_param_store_end_step(store));
    for (int64_t i = 0; i < device->bytes[MT_MEMORY_GRAD]; i++)
        assert_int_equal(((const char *)g.real)[i], 0);
    assert_fails(mt_param_store_set_grad_dtype(store, MT_BF16), MT_EINVAL, "after allocation");
    mt_param_store_destroy(&store);
    static const mt_dtype no[][3] = { { MT_F64, MT_F64, MT_BF16 },
                                      { MT_F32, MT_F32, MT_BF16 },
                                      { MT_F32, MT_BF16, MT_F16 } };
    for (int i = 0; i < 3; i++) {
        assert_ok(mt_param_store_create(&store, device, no[i][0], no[i][1]));
        assert_fails(mt_param_store_set_grad_dtype(store, no[i][2]), MT_ECONFIG,
                     mt_dtype_name(no[i][2]));
        mt_param_store_destroy(&store);
    }
    assert_ok(mt_param_store_create(&store, device, MT_F32, MT_BF16));
    add(store, "a", 1, 2, 3);
    assert_ok(mt_param_store_set_grad_dtype(store, MT_BF16));
    mt_param_spec spec = { .name = "w", .members = 2, .m = 128, .k = 8, .packed = true };
    assert_ok(mt_param_store_add(store, &p[0], &spec));
    mt_param_store_shard(store, 0, 2);
    assert_ok(mt_param_store_allocate(store, true)); /* whole in bf16, own pieces in f32 */
    assert_int_equal(p[0]->grad_dtype, MT_BF16);
    assert_int_equal(mt_param_own_grad_dtype(p[0]), MT_F32);
    g = mt_param_store_grads(store);
    assert_int_equal(g.bf16_count, 0);
    assert_int_equal(g.real_count, mt_param_store_elements(store));
    assert_int_equal(device->bytes[MT_MEMORY_GRAD],
                     g.real_count * 4 + 128 * 4 + mt_param_count(p[0]) * 2);
    mt_param_store_destroy(&store);
}

/* What nothing wrote in a step is zeroed at its end; what was written stays. */
static void test_step(void **state)
{
    (void)state;
    mt_param_store *store;
    assert_ok(mt_param_store_create(&store, test_device(), MT_F32, MT_F32));
    mt_param *p[] = { add(store, "a", 1, 1, 3), add(store, "b", 1, 1, 3) };
    assert_ok(mt_param_store_allocate(store, true));
    for (int step = 0; step < 2; step++) {
        mt_param_store_begin_step(store);
        for (int i = 0; i < 2; i++) {
            assert_false(p[i]->grad_started);
            for (int j = 0; j < 3; j++) ((float *)p[i]->grad)[j] = (float)(j + 1);
        }
        p[step]->grad_started = true;
        assert_ok(mt_param_store_end_step(store));
        for (int i = 0; i < 2; i++)
            for (int j = 0; j < 3; j++)
                assert_true(((float *)p[i]->grad)[j] == (i == step ? (float)(j + 1) : 0));
    }
    mt_param_store_destroy(&store);
}

/* Members spread over ranks: every element of all members has one owner, in a place of its own, and
 * begins as the same draw wherever it is. */
static void test_spread_members(void **state)
{
    (void)state;
    enum { E = 4, M = 24, K = 16, RANKS = 4, DEGREE = 2, ALL = E * M * K };
    mt_param_store *store;
    mt_param *p;
    static float whole[ALL], got[ALL];
    static int owners[ALL];
    mt_param_spec spec = { .name = "w", .members = E, .m = M, .k = K, .packed = true };
    spec.init = MT_INIT_NORMAL, spec.init_std = 1;
    assert_ok(mt_param_store_create(&store, test_device(), MT_F32, MT_F32));
    add(store, "a", 1, 1, 3);
    assert_ok(mt_param_store_add(store, &p, &spec));
    assert_ok(mt_param_store_allocate(store, false));
    assert_ok(mt_param_store_init(store, 7));
    assert_ok(mt_param_read_master(store, p, 0, ALL, whole));
    assert_int_equal(p->all_members, E);
    mt_param_store_destroy(&store);
    memset(owners, 0, sizeof owners);
    for (int r = 0; r < RANKS; r++) {
        spec.members = E / DEGREE, spec.all_members = E, spec.first_member = r % DEGREE * 2;
        assert_ok(mt_param_store_create(&store, test_device(), MT_F32, MT_F32));
        mt_param *a = add(store, "a", 1, 1, 3);
        mt_param_store_next_unit(store);
        assert_ok(mt_param_store_add(store, &p, &spec));
        mt_param_store_shard(store, r, RANKS);
        mt_param_store_shard_members(store, r / DEGREE, RANKS / DEGREE);
        assert_ok(mt_param_store_allocate(store, false));
        assert_ok(mt_param_store_init(store, 7));
        assert_int_equal(mt_param_store_unit(store, a->unit).ranks, RANKS);
        assert_int_equal(mt_param_store_unit(store, p->unit).ranks, RANKS / DEGREE);
        assert_int_equal(mt_param_store_unit(store, p->unit).rank, r / DEGREE);
        assert_true(p->own.count > 0 && mt_param_base(p) == p->first_member * M * K);
        assert_ok(mt_param_read_master(store, p, p->own.first, p->own.count, got));
        for (int64_t i = 0; i < p->own.count; i++) {
            int64_t at = mt_param_base(p) + p->own.first + i;
            owners[at]++;
            assert_true(got[i] == whole[at]);
        }
        mt_param_store_destroy(&store);
    }
    for (int i = 0; i < ALL; i++) assert_int_equal(owners[i], 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_placement),      cmocka_unit_test(test_without_gradients),
        cmocka_unit_test(test_misuse),         cmocka_unit_test(test_parts),
        cmocka_unit_test(test_initial_values), cmocka_unit_test(test_step),
        cmocka_unit_test(test_bf16_gradients), cmocka_unit_test(test_spread_members),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
