/* The step arena: replay gives the recorded calls memory that never overlaps, without allocating.
 */
#include "tests/support/test.h"

#include <string.h>

#include "core/arena.h"
#include "core/rng.h"

/* A device whose allocations are counted, and fail after `fuse` more of them (-1: never). */
static struct mt_device_ops counted_ops;
static const struct mt_device_ops *real_ops;
static int64_t allocations, fuse = -1;

static mt_status counted_alloc(mt_device *device, void **p, size_t bytes, bool on_host)
{
    if (fuse == 0) return MT_ENOMEM;
    if (fuse > 0) fuse--;
    allocations++;
    return real_ops->alloc(device, p, bytes, on_host);
}

/* What is given back is spoiled first, so that a block still in use shows it. */
static void spoiling_release(mt_device *device, void *p, size_t bytes, bool on_host)
{
    if (device->computes) memset(p, 0xdd, bytes);
    real_ops->release(device, p, bytes, on_host);
}

static mt_device *open_counted(const char *name)
{
    mt_device *device;
    assert_ok(mt_device_open(&device, name, NULL, 1));
    real_ops = device->ops;
    counted_ops = *real_ops;
    counted_ops.alloc = counted_alloc;
    counted_ops.release = spoiling_release;
    device->ops = &counted_ops;
    allocations = 0;
    return device;
}

enum { MAX_BLOCKS = 4000 };

/* A block that the test holds, filled with its own byte. */
struct held {
    unsigned char *p;
    int64_t id;
    size_t bytes;
    unsigned char fill;
};

static bool touch; /* the device's memory can be written */

static void take(mt_arena *arena, struct held *h, size_t bytes, unsigned char fill)
{
    void *p;
    h->bytes = bytes, h->fill = fill;
    assert_ok(mt_arena_alloc(arena, &p, &h->id, bytes));
    h->p = p;
    assert_true(bytes == 0 ? !p : p != NULL);
    assert_int_equal((uintptr_t)p % 64, 0);
    if (touch && bytes) memset(p, fill, bytes);
}

static void give(mt_arena *arena, struct held *h)
{
    for (size_t i = 0; touch && i < h->bytes; i++)
        if (h->p[i] != h->fill) fail_msg("block %lld overwritten", (long long)h->id);
    mt_arena_free(arena, h->id);
}

/* `steps` random allocations and frees; then everything is freed in a random order. The calls are a
 * function of seed; from step `change` on, of seed + 1. */
static void random_calls(mt_arena *arena, uint64_t seed, int64_t steps, int64_t change)
{
    static struct held held[MAX_BLOCKS];
    int64_t live = 0;
    for (int64_t i = 0; i < steps || live; i++) {
        uint64_t s = i < change ? seed : seed + 1;
        bool grow = i < steps && (live == 0 || mt_rng_below(s, 1, (uint64_t)i, 100) < 55);
        if (grow) {
            size_t scale = (size_t)1 << mt_rng_below(s, 2, (uint64_t)i, 14);
            take(arena, &held[live++], mt_rng_below(s, 3, (uint64_t)i, scale + 1),
                 (unsigned char)i);
        } else {
            int64_t j = (int64_t)mt_rng_below(s, 4, (uint64_t)i, (uint64_t)live);
            give(arena, &held[j]);
            held[j] = held[--live];
        }
    }
}

static void pass(mt_arena *arena, uint64_t key, uint64_t seed, int64_t steps, int64_t change)
{
    assert_ok(mt_arena_begin(arena, key));
    random_calls(arena, seed, steps, change);
    assert_ok(mt_arena_end(arena));
}

static void replays(mt_arena *arena, mt_device *device, uint64_t key, uint64_t seed, int64_t steps,
                    int64_t change)
{
    int64_t before = allocations;
    pass(arena, key, seed, steps, change);
    assert_int_equal(allocations, before);
    assert_int_equal(device->bytes[MT_MEMORY_ACTIVATIONS], mt_arena_bytes(arena));
}

static void test_random_replay(void **state)
{
    (void)state;
    mt_device *device = open_counted("cpu");
    touch = true;
    for (uint64_t seed = 0; seed < 20; seed++) {
        mt_arena *arena;
        assert_ok(mt_arena_create(&arena, device, MT_MEMORY_ACTIVATIONS));
        int64_t steps = (int64_t)(1 + seed * 100);
        pass(arena, 5, seed, steps, steps);
        assert_true(mt_arena_bytes(arena) >= mt_arena_floor(arena));
        assert_true(mt_arena_bytes(arena) <= 2 * mt_arena_floor(arena));
        for (int i = 0; i < 2; i++) replays(arena, device, 5, seed, steps, steps);
        mt_arena_destroy(&arena);
        assert_null(arena);
        assert_int_equal(device->bytes[MT_MEMORY_ACTIVATIONS], 0);
    }
    mt_device_destroy(&device);
}

/* Saved values pile up and go in reverse, temporaries between them: nested lifetimes pack
 * perfectly. */
static void test_nested_is_perfect(void **state)
{
    (void)state;
    enum { LAYERS = 200 };
    static struct held saved[LAYERS];
    mt_device *device = open_counted("plan");
    mt_arena *arena;
    touch = false;
    assert_ok(mt_arena_create(&arena, device, MT_MEMORY_ACTIVATIONS));
    for (int i = 0; i < 2; i++) {
        int64_t before = allocations;
        assert_ok(mt_arena_begin(arena, 0));
        for (int l = 0; l < LAYERS; l++) {
            struct held temporary;
            take(arena, &saved[l], (size_t)(1 + 977 * l % 5000), 1);
            take(arena, &temporary, (size_t)(1 + 613 * l % 7000), 2);
            give(arena, &temporary);
        }
        for (int l = LAYERS; l-- > 0;) give(arena, &saved[l]);
        assert_ok(mt_arena_end(arena));
        assert_int_equal(mt_arena_bytes(arena), mt_arena_floor(arena));
        if (i) assert_int_equal(allocations, before);
    }
    mt_arena_destroy(&arena);
    mt_device_destroy(&device);
}

/* A pass that departs keeps the blocks it has, and is the recording of the next. */
static void test_departure(void **state)
{
    (void)state;
    mt_device *device = open_counted("cpu");
    touch = true;
    for (int64_t change = 0; change <= 301; change += 43) {
        mt_arena *arena;
        assert_ok(mt_arena_create(&arena, device, MT_MEMORY_ACTIVATIONS));
        pass(arena, 1, 77, 300, 300);
        pass(arena, 1, 77, 300, change);
        replays(arena, device, 1, 77, 300, change);
        pass(arena, 1, 77, 150, 150); /* ends early or departs in its frees */
        replays(arena, device, 1, 77, 150, 150);
        pass(arena, 1, 77, 300, 300); /* goes on for longer */
        replays(arena, device, 1, 77, 300, 300);
        mt_arena_destroy(&arena);
    }
    mt_device_destroy(&device);
}

static void test_keys_share_the_slab(void **state)
{
    (void)state;
    mt_device *device = open_counted("cpu");
    mt_arena *arena;
    touch = true;
    assert_ok(mt_arena_create(&arena, device, MT_MEMORY_ACTIVATIONS));
    int64_t most = 0;
    for (uint64_t key = 0; key < 5; key++) {
        pass(arena, key, key, 100 + 50 * (int64_t)(key * 3 % 5), 1000);
        assert_true(mt_arena_bytes(arena) >= most);
        most = mt_arena_bytes(arena);
    }
    for (uint64_t key = 0; key < 5; key++)
        replays(arena, device, key, key, 100 + 50 * (int64_t)(key * 3 % 5), 1000);
    assert_int_equal(mt_arena_bytes(arena), most);
    mt_arena_destroy(&arena);
    mt_device_destroy(&device);
}

/* The plan device measures what the cpu device will need. */
static void test_plan_measures(void **state)
{
    (void)state;
    int64_t bytes[2], floors[2];
    const char *names[2] = { "cpu", "plan" };
    for (int i = 0; i < 2; i++) {
        mt_device *device = open_counted(names[i]);
        mt_arena *arena;
        touch = device->computes;
        assert_ok(mt_arena_create(&arena, device, MT_MEMORY_ACTIVATIONS));
        pass(arena, 9, 3, 500, 500);
        replays(arena, device, 9, 3, 500, 500);
        bytes[i] = mt_arena_bytes(arena), floors[i] = mt_arena_floor(arena);
        mt_arena_destroy(&arena);
        mt_device_destroy(&device);
    }
    assert_int_equal(bytes[0], bytes[1]);
    assert_int_equal(floors[0], floors[1]);
}

static void test_misuse(void **state)
{
    (void)state;
    mt_device *device = open_counted("cpu");
    mt_arena *arena;
    struct held h;
    void *p;
    int64_t id;
    touch = true;
    assert_ok(mt_arena_create(&arena, device, MT_MEMORY_ACTIVATIONS));
    assert_fails(mt_arena_alloc(arena, &p, &id, 8), MT_EINVAL, "outside a pass");
    assert_fails(mt_arena_try(arena, &p, &id, 8), MT_EINVAL, "outside a pass");
    assert_fails(mt_arena_end(arena), MT_EINVAL, "not begun");
    for (int i = 0; i < 3; i++) { /* a block that outlives the pass is freed before the next */
        assert_ok(mt_arena_begin(arena, 1));
        take(arena, &h, 100, 7);
        assert_ok(mt_arena_end(arena));
        assert_fails(mt_arena_begin(arena, 1), MT_EINVAL, "1 blocks");
        give(arena, &h);
    }
    struct held large;
    assert_ok(mt_arena_begin(arena,
                             1)); /* a block in the slab outlives a pass that needs a larger slab */
    take(arena, &h, 100, 9);
    take(arena, &large, 100000, 1);
    give(arena, &large);
    assert_ok(mt_arena_end(arena));
    give(arena, &h);
    assert_ok(mt_arena_begin(arena, 2)); /* a pass with nothing */
    assert_fails(mt_arena_try(arena, &p, &id, (size_t)PTRDIFF_MAX), MT_ENOMEM, "a block of");
    assert_ok(mt_arena_end(arena));
    assert_ok(mt_arena_begin(arena, 3)); /* a pass given up: the next records */
    take(arena, &h, 5000, 1);
    give(arena, &h);
    pass(arena, 3, 1, 50, 50);
    replays(arena, device, 3, 1, 50, 50);
    assert_ok(mt_arena_begin(arena, 4));
    take(arena, &h, 300, 3); /* destroy with a live block releases it */
    mt_arena_destroy(&arena);
    assert_int_equal(device->bytes[MT_MEMORY_ACTIVATIONS], 0);
    mt_arena_destroy(&arena);
    mt_device_destroy(&device);
}

/* Every allocation of a recording, and that of the slab, may fail; the arena then works again. */
static void test_out_of_memory(void **state)
{
    (void)state;
    mt_device *device = open_counted("cpu");
    touch = true;
    for (int64_t at = 0; at < 5; at++) {
        mt_arena *arena;
        struct held h[4];
        int taken = 0;
        mt_status status = MT_OK;
        assert_ok(mt_arena_create(&arena, device, MT_MEMORY_ACTIVATIONS));
        assert_ok(mt_arena_begin(arena, 1));
        fuse = at;
        for (; taken < 4; taken++) {
            void *p;
            status = mt_arena_alloc(arena, &p, &h[taken].id, 1000);
            if (status != MT_OK) break;
            h[taken].bytes = 0;
        }
        while (taken-- > 0) give(arena, &h[taken]);
        if (status == MT_OK) status = mt_arena_end(arena);
        assert_fails(status, MT_ENOMEM, "activations");
        fuse = -1;
        pass(arena, 1, 4, 60, 60);
        replays(arena, device, 1, 4, 60, 60);
        mt_arena_destroy(&arena);
    }
    mt_device_destroy(&device);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_replay), cmocka_unit_test(test_nested_is_perfect),
        cmocka_unit_test(test_departure),     cmocka_unit_test(test_keys_share_the_slab),
        cmocka_unit_test(test_plan_measures), cmocka_unit_test(test_misuse),
        cmocka_unit_test(test_out_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
