/* Want of memory: every allocation of every create, and of a training step, fails in turn, alone
 * and with all that follow. Each failure is MT_ENOMEM with a sentence, keeps nothing, and what
 * failed works the next time. */
#include "tests/support/test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/arena.h"
#include "tests/support/fault.h"
#include "train/trainer.h"

static mt_device *device; /* of what is made on a device; opened without faults */

/* ---- the sweep ----------------------------------------------------------------------------------
 */

typedef mt_status (*attempt)(void);

static void assert_nothing_kept(const char *what, int64_t n)
{
    for (int m = 0; m < MT_MEMORY_COUNT; m++)
        if (m != MT_MEMORY_WORKSPACE && device->bytes[m] != 0)
            fail_msg("%s, allocation %lld: %lld bytes of %s stay", what, (long long)n,
                     (long long)device->bytes[m], mt_memory_name((mt_memory)m));
}

/* Runs `try` with its n-th allocation failing, n = 1, 2, ... until there is no n-th. */
static void sweep(const char *what, attempt try, int64_t least)
{
    assert_ok(try()); /* one-off allocations: scratch, threads, stdio */
    for (int mode = FAULT_ONCE; mode <= FAULT_FROM; mode++) {
        int64_t n = 1;
        for (;; n++) {
            int64_t before = fault_live();
            mt_error_clear();
            fault_arm(n, (fault_mode)mode);
            mt_status status = try();
            bool hit = fault_disarm();
            assert_nothing_kept(what, n);
            assert_int_equal(fault_live(), before);
            if (!hit) {
                assert_ok(status);
                break;
            }
            if (status != MT_ENOMEM || !*mt_error_message())
                fail_msg("%s, allocation %lld: %s '%s'", what, (long long)n, mt_status_name(status),
                         mt_error_message());
        }
        assert_true(n > least);
    }
}

/* ---- creates ------------------------------------------------------------------------------------
 */

static mt_status open_cpu(void)
{
    mt_device *d;
    mt_status status = mt_device_open(&d, "cpu", NULL, 1);
    assert_int_equal(status == MT_OK, d != NULL);
    mt_device_destroy(&d);
    return status;
}

static mt_status open_plan(void)
{
    mt_device *d;
    mt_status status = mt_device_open(&d, "plan", NULL, 1);
    assert_int_equal(status == MT_OK, d != NULL);
    mt_device_destroy(&d);
    return status;
}

static void test_devices(void **state)
{
    (void)state;
    sweep("cpu", open_cpu, 1);
    sweep("plan", open_plan, 2);
}

/* Two passes of one key, with blocks of several sizes: recording, colouring, the slab, replay. */
static mt_status arena_passes(mt_arena *arena)
{
    for (int pass = 0; pass < 2; pass++) {
        int64_t ids[40];
        int taken = 0;
        mt_status status = mt_arena_begin(arena, 3);
        for (; status == MT_OK && taken < 40; taken++) {
            void *p;
            status = mt_arena_alloc(arena, &p, &ids[taken], (size_t)(100 * taken));
            if (status != MT_OK) break;
        }
        while (taken-- > 0) mt_arena_free(arena, ids[taken]);
        if (status == MT_OK) status = mt_arena_end(arena);
        if (status != MT_OK) return status;
    }
    return MT_OK;
}

static mt_status make_arena(void)
{
    mt_arena *arena = NULL;
    mt_status status = mt_arena_create(&arena, device, MT_MEMORY_ACTIVATIONS);
    if (status == MT_OK) status = arena_passes(arena);
    mt_arena_destroy(&arena);
    return status;
}

static void test_arena(void **state)
{
    (void)state;
    sweep("arena", make_arena, 40);
}

static mt_status fill_store(mt_param_store *store)
{
    for (int i = 0; i < 40; i++) {
        char name[16];
        mt_param *p;
        snprintf(name, sizeof name, "w%d", i);
        mt_param_spec spec = {
            .name = name, .members = 2, .m = 3, .k = 5, .init = MT_INIT_NORMAL, .init_std = 1
        };
        MT_TRY(mt_param_store_add(store, &p, &spec));
        for (int j = 0; j < 2; j++) MT_TRY(mt_param_add_part(p, j, 0, 3, 2, "%s.%d", name, j));
        mt_param_reserve_compute(p, 100);
    }
    MT_TRY(mt_param_store_allocate(store, true));
    return mt_param_store_init(store, 1);
}

static mt_status make_store(void)
{
    mt_param_store *store;
    mt_status status = mt_param_store_create(&store, device, MT_F32, MT_F32);
    assert_int_equal(status == MT_OK, store != NULL);
    if (status == MT_OK) status = fill_store(store);
    mt_param_store_destroy(&store);
    return status;
}

static void test_param_store(void **state)
{
    (void)state;
    sweep("param store", make_store, 200);
}

static mt_trainer_config config_of(mt_dtype dtype)
{
    mt_trainer_config c = {
        .dtype = dtype, .batch_size = 2, .micro_batch_size = 1, .sequence_length = 4, .steps = 9
    };
    const mt_architecture *architecture;
    assert_ok(mt_architecture_find(&architecture, "qwen3_moe"));
    mt_model_config_defaults(&c.model, architecture);
    c.model.vocab_size = 9, c.model.hidden_size = 8, c.model.num_hidden_layers = 2;
    c.model.num_attention_heads = 2, c.model.moe_intermediate_size = 5;
    c.model.num_experts = 3, c.model.num_experts_per_tok = 2;
    c.model.mlp_only_layer_count = 1, c.model.intermediate_size = 6;
    mt_optim_config_defaults(&c.optim);
    return c;
}

static mt_status make_model(void)
{
    mt_model *model;
    mt_trainer_config c = config_of(MT_BF16);
    mt_status status = mt_model_create(&model, device, &c.model, MT_BF16, 4, true, NULL);
    assert_int_equal(status == MT_OK, model != NULL);
    mt_model_destroy(&model);
    return status;
}

static mt_status make_tape(void)
{
    mt_tape *tape;
    mt_stream stream = { .device = device };
    mt_status status = mt_tape_create(&tape, &stream, NULL);
    assert_int_equal(status == MT_OK, tape != NULL);
    mt_tape_destroy(&tape);
    return status;
}

static mt_status make_trainer(void)
{
    mt_trainer *trainer;
    mt_trainer_config c = config_of(MT_F32);
    c.optim.moments = MT_MOMENTS_FP8, c.optim.master = MT_MASTER_SPLIT; /* what has most parts */
    mt_status status = mt_trainer_create(&trainer, device, &c);
    assert_int_equal(status == MT_OK, trainer != NULL);
    mt_trainer_destroy(&trainer);
    return status;
}

static void test_model_tape_trainer(void **state)
{
    (void)state;
    sweep("tape", make_tape, 3);
    sweep("model", make_model, 60);
    sweep("trainer", make_trainer, 70);
}

static mt_param_store *shared_store;

static mt_status make_optimizer(void)
{
    mt_optimizer *optimizer;
    mt_optim_config c;
    mt_optim_config_defaults(&c);
    c.moments = MT_MOMENTS_FP8;
    mt_status status = mt_optimizer_create(&optimizer, shared_store, &c);
    assert_int_equal(status == MT_OK, optimizer != NULL);
    mt_optimizer_destroy(&optimizer);
    return status;
}

static void test_optimizer(void **state)
{
    (void)state;
    mt_device *own, *kept = device;
    assert_ok(mt_device_open(&own, "cpu", NULL, 1));
    assert_ok(mt_param_store_create(&shared_store, own, MT_F32, MT_F32));
    assert_ok(fill_store(shared_store));
    sweep("optimizer", make_optimizer, 6);
    mt_param_store_destroy(&shared_store);
    device = own;
    assert_nothing_kept("optimizer", 0);
    device = kept;
    mt_device_destroy(&own);
}

/* ---- a training step ----------------------------------------------------------------------------
 */

static void batch_of(int64_t step, int32_t tokens[8], int32_t targets[8])
{
    for (int i = 0; i < 8; i++) {
        tokens[i] = (int32_t)((step + 5 * i) % 9);
        targets[i] = (int32_t)((step * i + 2) % 9);
    }
}

static void copy_master(const mt_trainer *t, float *to)
{
    const mt_param_store *store = mt_model_params(mt_trainer_model(t));
    memcpy(to, mt_param_store_master(store), (size_t)mt_param_store_elements(store) * sizeof *to);
}

/* The first steps of a trainer record, colour and allocate. One allocation fails in them: that step
 * says so, leaves the weights as they were, and made again it is the step it would have been.
 * (Offload alone may go on without its memory: then the values stay where they are.) */
static void check_steps(const mt_trainer_config *c, int64_t n, fault_mode mode, const float *want,
                        bool *hit)
{
    static float weights[2][1 << 14];
    mt_trainer *t;
    int32_t tokens[8], targets[8];
    mt_step_result r;
    mt_device *own;
    assert_ok(mt_device_open(&own, "cpu", NULL, 1));
    assert_ok(mt_trainer_create(&t, own, c));
    size_t bytes =
        (size_t)mt_param_store_elements(mt_model_params(mt_trainer_model(t))) * sizeof(float);
    assert_true(bytes <= sizeof weights[0]);
    fault_arm(n, mode);
    *hit = false;
    for (int64_t step = 0; step < 3; step++) {
        batch_of(step, tokens, targets);
        copy_master(t, weights[0]);
        mt_status status = mt_trainer_step(t, tokens, targets, &r);
        if (status == MT_OK) continue;
        assert_int_equal(status, MT_ENOMEM);
        *hit |= fault_disarm();
        copy_master(t, weights[1]);
        assert_memory_equal(weights[0], weights[1], bytes);
        assert_int_equal(mt_trainer_steps(t), step);
        assert_ok(mt_trainer_step(t, tokens, targets, &r));
    }
    *hit |= fault_disarm();
    copy_master(t, weights[0]);
    if (want) assert_memory_equal(weights[0], want, bytes);
    mt_trainer_destroy(&t);
    for (int m = 0; m < MT_MEMORY_COUNT; m++)
        if (m != MT_MEMORY_WORKSPACE) assert_int_equal(own->bytes[m], 0);
    mt_device_destroy(&own);
}

static void test_training_steps(void **state)
{
    (void)state;
    static float want[1 << 14];
    for (int bits = 0; bits < 4; bits++) {
        mt_trainer_config c = config_of(MT_F32);
        mt_trainer *t;
        int32_t tokens[8], targets[8];
        mt_step_result r;
        c.recompute = bits & 1 ? MT_RECOMPUTE_BLOCK : MT_RECOMPUTE_ACTIVATION;
        c.offload = c.defer_wgrad = bits >> 1;
        assert_ok(mt_trainer_create(&t, device, &c));
        for (int64_t step = 0; step < 3; step++) {
            batch_of(step, tokens, targets);
            assert_ok(mt_trainer_step(t, tokens, targets, &r));
        }
        copy_master(t, want);
        mt_trainer_destroy(&t);
        for (int mode = FAULT_ONCE; mode <= FAULT_FROM; mode++) {
            bool hit = true;
            int64_t n = 1;
            for (; hit; n++) check_steps(&c, n, (fault_mode)mode, want, &hit);
            assert_true(n > 100);
        }
    }
}

static mt_trainer *shared_trainer;

/* Evaluation, logits and the search for a bad tensor, each for the first time on a fresh tape. */
static mt_status forward_only(void)
{
    mt_trainer_config c = config_of(MT_BF16);
    int32_t tokens[8], targets[8];
    double loss, *logits = calloc(8 * 9, sizeof *logits);
    int64_t count;
    char name[128];
    batch_of(0, tokens, targets);
    mt_status status = logits ? mt_trainer_create(&shared_trainer, device, &c)
                              : MT_FAIL(MT_ENOMEM, "the test itself has no memory");
    if (status == MT_OK)
        status = mt_trainer_eval(shared_trainer, tokens, targets, 2, &loss, &count);
    if (status == MT_OK) status = mt_trainer_logits(shared_trainer, tokens, 2, 4, -1, logits);
    if (status == MT_OK) status = mt_trainer_find_nonfinite(shared_trainer, tokens, targets, name);
    mt_trainer_destroy(&shared_trainer);
    free(logits);
    return status;
}

static void test_forward_only(void **state)
{
    (void)state;
    sweep("forward", forward_only, 150);
}

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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_devices),      cmocka_unit_test(test_arena),
        cmocka_unit_test(test_param_store),  cmocka_unit_test(test_model_tape_trainer),
        cmocka_unit_test(test_optimizer),    cmocka_unit_test(test_training_steps),
        cmocka_unit_test(test_forward_only),
    };
    return cmocka_run_group_tests(tests, open_device, close_device);
}
