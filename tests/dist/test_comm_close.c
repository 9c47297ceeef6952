/* The end of a comm whose backend is broken: what it meets there is not what is told. */
#include "tests/support/test.h"

#include <stdlib.h>

#include "dist/comm_priv.h"

static mt_status breaks(mt_comm *c)
{
    (void)c;
    return MT_FAIL(MT_EDEVICE, "the end fails, too");
}

static void breaks_unheard(mt_comm *c)
{
    (void)breaks(c);
}

static const struct mt_comm_ops broken = {
    .name = "broken",
    .barrier = breaks,
    .give_up = breaks_unheard,
    .retire = breaks_unheard,
    .close = breaks_unheard,
};

static mt_comm *open_world(void)
{
    const mt_watch_options options = { .world = 1, .timeout_s = 60 };
    char address[MT_HOST_ADDRESS];
    int listener;
    mt_comm *c = calloc(1, sizeof *c);
    assert_non_null(c);
    c->ops = &broken, c->size = 1;
    assert_ok(mt_watch_listen(&listener, address));
    assert_ok(mt_watch_start(&c->watch, &options, listener, ""));
    return c;
}

static mt_comm *open_part(mt_comm *world)
{
    mt_comm *c = calloc(1, sizeof *c);
    assert_non_null(c);
    c->ops = &broken, c->size = 1, c->world = world;
    c->next = world->parts, world->parts = c;
    return c;
}

static void expect_reason(void)
{
    assert_string_equal(mt_error_message(), "the reason");
    assert_non_null(strstr(mt_error_trace(), "test_comm_close.c:"));
}

static void closes(void **state)
{
    (void)state;
    mt_comm *world = open_world(), *part = open_part(world);
    (void)MT_FAIL(MT_EIO, "the reason");
    mt_comm_close(&part);
    expect_reason();
    mt_comm_close(&world);
    expect_reason();
    assert_null(part);
    assert_null(world);
    mt_error_clear();
}

/* The same of a world that is left, whose parts are closed after that. */
static void is_left(void **state)
{
    (void)state;
    mt_comm *world = open_world(), *part = open_part(world), *kept = part;
    (void)MT_FAIL(MT_EIO, "the reason");
    mt_comm_abort(world, mt_error_message());
    expect_reason();
    mt_comm_close(&part);
    expect_reason();
    mt_watch_stop(&world->watch);
    free(kept);
    free(world);
    mt_error_clear();
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(closes), cmocka_unit_test(is_left) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
