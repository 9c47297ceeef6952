/* Failures in the middle of a pass: of a backward, of memory, of events. What was computed before
 * and after is as if nothing had been. */
#include "tests/core/programs.h"

/* Every backward in turn fails; the pass is given up and the next one is as if nothing had been. */
static void test_abort_leaves_a_usable_tape(void **state)
{
    (void)state;
    for (int bits = 0; bits < OPTIONS; bits++) {
        struct ready r = { 0 };
        struct program plain, p;
        mt_tape_options options = options_of(bits);
        program_make(&plain, 2, NULL);
        assert_ok(program_pass(&plain));
        options.grad_ready = on_ready, options.context = &r;
        program_make(&p, 2, &options);
        r.store = p.store;
        int64_t failures = 0;
        for (;; failures++) {
            mt_param_store_begin_step(p.store);
            memset(r.fired, 0, sizeof r.fired);
            toy_log.fuse = failures + 1;
            mt_status status = program_pass(&p);
            if (status == MT_OK) break;
            assert_int_equal(status, MT_ENUMERIC);
            assert_string_equal(strstr(mt_error_message(), "blown"), "blown fuse");
            for (int i = 0; i < PARAMS; i++) {
                assert_int_equal(mt_param_store_get(p.store, i)->uses, 0);
                assert_int_equal(mt_param_store_get(p.store, i)->deferred, 0);
            }
        }
        assert_true(failures >= BLOCKS * OPS / 2);
        assert_same(&plain, &p);
        for (int i = 0; i < PARAMS; i++) assert_int_equal(r.fired[i], 1);
        mt_tape_destroy(&plain.tape);
        mt_param_store_destroy(&plain.store);
        program_free(&p);
    }
}

/* Events as a GPU has them, the one before `event_fuse` runs out fails. */
static int64_t event_fuse;

static mt_status make_event(mt_device *device, void **event)
{
    *event = device;
    return MT_OK;
}

static void drop_event(mt_device *device, void *event)
{
    (void)device, (void)event;
}

static mt_status record_event(mt_stream *on, void *event)
{
    (void)on, (void)event;
    return --event_fuse == 0 ? MT_FAIL(MT_EDEVICE, "no event") : MT_OK;
}

static mt_status wait_event(mt_stream *on, void *event)
{
    (void)on, (void)event;
    return MT_OK;
}

/* Whichever event fails while values go to the host and come back, no pass after it is kept from
 * beginning. */
static void test_events_that_fail(void **state)
{
    (void)state;
    struct program plain, p;
    mt_device *device = test_device();
    const struct mt_device_ops *before = device->ops;
    struct mt_device_ops ops = *before;
    ops.event_create = make_event, ops.event_destroy = drop_event;
    ops.event_record = record_event, ops.event_wait = wait_event;
    program_make(&plain, 2, NULL);
    assert_ok(program_pass(&plain));
    device->ops = &ops;
    program_make(&p, 2, &(mt_tape_options){ .offload = true });
    int64_t failures = 0;
    for (int64_t n = 1; event_fuse <= 0; n++) {
        mt_param_store_begin_step(p.store);
        event_fuse = n;
        mt_status status = program_pass(&p);
        failures += status != MT_OK;
        if (status != MT_OK) assert_fails(status, MT_EDEVICE, "no event");
    }
    assert_true(failures > 0);
    assert_same(&plain, &p);
    mt_tape_destroy(&plain.tape);
    mt_param_store_destroy(&plain.store);
    program_free(&p);
    device->ops = before;
}

/* A device whose allocations are counted, and whose host has so much room for its pool, in pages as
 * large as the arena's steps. */
static const struct mt_device_ops *usual;
static int64_t allocations, refused, host_bytes, room;

static int64_t pages(size_t bytes)
{
    return ((int64_t)bytes + 255) / 256 * 256;
}

static mt_status scarce_alloc(mt_device *device, void **p, size_t bytes, bool on_host)
{
    allocations++;
    if (on_host && host_bytes + pages(bytes) > room) {
        refused++;
        return MT_ENOMEM;
    }
    if (on_host) host_bytes += pages(bytes);
    return usual->alloc(device, p, bytes, on_host);
}

static void scarce_release(mt_device *device, void *p, size_t bytes, bool on_host)
{
    if (on_host) host_bytes -= pages(bytes);
    usual->release(device, p, bytes, on_host);
}

static void make_scarce(struct mt_device_ops *ops, int64_t with_room)
{
    usual = test_device()->ops;
    *ops = *usual;
    ops->alloc = scarce_alloc, ops->release = scarce_release;
    test_device()->ops = ops;
    allocations = refused = host_bytes = 0, room = with_room;
}

/* Where the host has no room for some of what would leave, that stays, in that pass and whenever it
 * is replayed: a device that records a graph then is not asked again. */
static void test_no_room_on_the_host(void **state)
{
    (void)state;
    struct program plain, p;
    struct mt_device_ops ops;
    program_make(&plain, 3, NULL);
    for (int pass = 0; pass < 3; pass++) assert_ok(program_pass(&plain));
    mt_tape_destroy(&plain.tape);
    for (int64_t with_room = 0; with_room < 30000; with_room += 3000) {
        make_scarce(&ops, with_room);
        program_make(&p, 3, &(mt_tape_options){ .offload = true });
        mt_error_clear();
        assert_ok(program_pass(&p));
        assert_string_equal(mt_error_message(), "");
        if (with_room < 9000) assert_true(refused > 0);
        allocations = 0, room = INT64_MAX;
        for (int pass = 0; pass < 2; pass++) assert_ok(program_pass(&p));
        assert_int_equal(allocations, 0);
        assert_same(&plain, &p);
        program_free(&p);
        test_device()->ops = usual;
    }
    mt_param_store_destroy(&plain.store);
}

/* A pass that is given up is forgotten: the next goes as recorded before it, and of a first one
 * nothing is left, no memory either. */
static void test_abort_learns_nothing(void **state)
{
    (void)state;
    for (int bits = 0; bits < OPTIONS; bits++) {
        struct program p;
        struct mt_device_ops ops;
        mt_tape_options options = options_of(bits);
        make_scarce(&ops, INT64_MAX);
        program_make(&p, 2, &options);
        for (int64_t fuse = 1; fuse < BLOCKS * OPS / 2; fuse += 7) {
            toy_log.fuse = fuse;
            assert_fails(program_pass(&p), MT_ENUMERIC, "blown fuse");
            assert_int_equal(test_device()->bytes[MT_MEMORY_ACTIVATIONS], 0);
            assert_int_equal(test_device()->bytes[MT_MEMORY_HOST_POOL], 0);
        }
        assert_ok(program_pass(&p));
        for (int64_t fuse = 1; fuse < BLOCKS * OPS / 2; fuse += 7) {
            const int64_t frees = test_device()->frees;
            allocations = 0;
            toy_log.fuse = fuse;
            assert_fails(program_pass(&p), MT_ENUMERIC, "blown fuse");
            assert_ok(program_pass(&p));
            assert_int_equal(allocations, 0);
            assert_int_equal(test_device()->frees, frees);
        }
        program_free(&p);
        test_device()->ops = usual;
    }
}

/* What fails as a value is released, while an error is on its way, does not take its place. */
static void test_release_keeps_the_error(void **state)
{
    (void)state;
    double x[N] = { 1 };
    struct mt_device_ops ops;
    mt_value *y, *z;
    make_scarce(&ops, 0);
    mt_tape *tape = toy_tape(&stream, &(mt_tape_options){ .offload = true });
    assert_ok(mt_tape_begin(tape, 1, true));
    mt_value *vx = toy_input(tape, x, N);
    assert_ok(toy_square(tape, &y, vx));
    assert_ok(toy_square(tape, &z, y));
    const mt_status status = MT_FAIL(MT_EINVAL, "the reason");
    mt_value_release(tape, &y);
    mt_value_release(tape, &z);
    mt_value_release(tape, &vx);
    assert_fails(status, MT_EINVAL, "the reason");
    assert_true(refused > 0);
    mt_tape_abort(tape);
    assert_fails(status, MT_EINVAL, "the reason");
    mt_tape_destroy(&tape);
    test_device()->ops = usual;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_abort_leaves_a_usable_tape),
        cmocka_unit_test(test_events_that_fail),
        cmocka_unit_test(test_no_room_on_the_host),
        cmocka_unit_test(test_abort_learns_nothing),
        cmocka_unit_test(test_release_keeps_the_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
