/* Next-token sampling: the edges of its options, and frequencies against the probabilities they
 * come from. */
#include <math.h>

#include "tests/support/fault.h"
#include "tests/support/test.h"

#include "train/sampler.h"

enum { V = 6, DRAWS = 20000 };

static const double logits[V] = { 0.5, 2, -1, 2, 1, -3 };

static int32_t draw(const mt_sampler_config *config, int64_t index)
{
    mt_sampler *sampler = NULL;
    int32_t token;
    assert_ok(mt_sampler_create(&sampler, config, V));
    assert_ok(mt_sampler_draw(sampler, &token, logits, index));
    mt_sampler_destroy(&sampler);
    assert_null(sampler);
    return token;
}

static void count_draws(int64_t counts[V], const mt_sampler_config *config)
{
    mt_sampler *sampler = NULL;
    for (int i = 0; i < V; i++) counts[i] = 0;
    assert_ok(mt_sampler_create(&sampler, config, V));
    for (int64_t i = 0; i < DRAWS; i++) {
        int32_t token;
        assert_ok(mt_sampler_draw(sampler, &token, logits, i));
        assert_in_range(token, 0, V - 1);
        counts[token]++;
    }
    mt_sampler_destroy(&sampler);
}

/* Within five standard deviations of a binomial: one token of one test in three million is outside.
 */
static void assert_frequencies(const mt_sampler_config *config, const bool kept[V])
{
    int64_t counts[V];
    double sum = 0;
    for (int i = 0; i < V; i++) sum += kept[i] ? exp(logits[i] / config->temperature) : 0;
    count_draws(counts, config);
    for (int i = 0; i < V; i++) {
        double p = kept[i] ? exp(logits[i] / config->temperature) / sum : 0;
        double limit = 5 * sqrt(DRAWS * p * (1 - p));
        if (fabs((double)counts[i] - DRAWS * p) > limit)
            fail_msg("token %d drawn %lld times, expected %.0f within %.0f", i,
                     (long long)counts[i], DRAWS * p, limit);
    }
}

static void frequencies_are_the_probabilities(void **state)
{
    (void)state;
    const bool all[V] = { true, true, true, true, true, true };
    assert_frequencies(&(mt_sampler_config){ 1, 0, 1, 1 }, all);
    assert_frequencies(&(mt_sampler_config){ 0.5, 0, 1, 2 }, all);
    assert_frequencies(&(mt_sampler_config){ 3, V, 1, 3 }, all);
}

static void top_k_and_top_p_cut_the_tail(void **state)
{
    (void)state;
    const bool two[V] = { false, true, false, true, false, false };
    const bool three[V] = { false, true, false, true, true, false };
    assert_frequencies(&(mt_sampler_config){ 1, 2, 1, 1 }, two);
    assert_frequencies(&(mt_sampler_config){ 1, 3, 1, 1 }, three);
    /* probabilities 0.366, 0.366, 0.135, ...: 0.7 needs two tokens, 0.8 needs three */
    assert_frequencies(&(mt_sampler_config){ 1, 0, 0.7, 1 }, two);
    assert_frequencies(&(mt_sampler_config){ 1, 0, 0.8, 1 }, three);
    /* top-p among the three of top-k: 0.422, 0.422, 0.155 */
    assert_frequencies(&(mt_sampler_config){ 1, 3, 0.8, 1 }, two);
}

static void without_temperature_the_best_wins_and_the_first_of_equals(void **state)
{
    (void)state;
    for (int64_t i = 0; i < 20; i++) {
        assert_int_equal(draw(&(mt_sampler_config){ 0, 0, 1, (uint64_t)i }, i), 1);
        assert_int_equal(draw(&(mt_sampler_config){ 1, 1, 1, (uint64_t)i }, i), 1);
        assert_int_equal(draw(&(mt_sampler_config){ 1, 0, 1e-9, (uint64_t)i }, i), 1);
    }
}

static void draws_are_a_function_of_seed_and_index(void **state)
{
    (void)state;
    bool differs = false;
    for (int64_t i = 0; i < 50; i++) {
        mt_sampler_config a = { 1, 0, 1, 7 }, b = { 1, 0, 1, 8 };
        assert_int_equal(draw(&a, i), draw(&a, i));
        differs = differs || draw(&a, i) != draw(&b, i);
    }
    assert_true(differs);
}

static void what_cannot_be_drawn_from_is_refused(void **state)
{
    (void)state;
    mt_sampler *s = NULL;
    int32_t token;
    assert_fails(mt_sampler_create(&s, &(mt_sampler_config){ -1, 0, 1, 0 }, V), MT_ECONFIG,
                 "temperature");
    assert_fails(mt_sampler_create(&s, &(mt_sampler_config){ (double)NAN, 0, 1, 0 }, V), MT_ECONFIG,
                 "temperature");
    assert_fails(mt_sampler_create(&s, &(mt_sampler_config){ 1, -1, 1, 0 }, V), MT_ECONFIG,
                 "top-k");
    assert_fails(mt_sampler_create(&s, &(mt_sampler_config){ 1, 0, 0, 0 }, V), MT_ECONFIG, "top-p");
    assert_fails(mt_sampler_create(&s, &(mt_sampler_config){ 1, 0, 1.5, 0 }, V), MT_ECONFIG,
                 "top-p");
    assert_null(s);
    assert_ok(mt_sampler_create(&s, &(mt_sampler_config){ 1, 0, 1, 0 }, 2));
    const double nan[2] = { 0, (double)NAN }, none[2] = { -(double)INFINITY, -(double)INFINITY };
    const double one[2] = { -(double)INFINITY, -1e300 };
    assert_fails(mt_sampler_draw(s, &token, nan, 0), MT_ENUMERIC, "token 1");
    assert_fails(mt_sampler_draw(s, &token, none, 0), MT_ENUMERIC, "no logit");
    for (int64_t i = 0; i < 50; i++) {
        assert_ok(mt_sampler_draw(s, &token, one, i));
        assert_int_equal(token, 1);
    }
    mt_sampler_destroy(&s);
}

static void creation_survives_want_of_memory(void **state)
{
    (void)state;
    const mt_sampler_config config = { 1, 0, 1, 0 };
    bool failed = true;
    for (int64_t n = 1; failed; n++) {
        mt_sampler *s = NULL;
        fault_arm(n, FAULT_ONCE);
        mt_status status = mt_sampler_create(&s, &config, V);
        failed = fault_disarm();
        assert_int_equal(status, failed ? MT_ENOMEM : MT_OK);
        assert_true(failed == (s == NULL));
        mt_sampler_destroy(&s);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(frequencies_are_the_probabilities),
        cmocka_unit_test(top_k_and_top_p_cut_the_tail),
        cmocka_unit_test(without_temperature_the_best_wins_and_the_first_of_equals),
        cmocka_unit_test(draws_are_a_function_of_seed_and_index),
        cmocka_unit_test(what_cannot_be_drawn_from_is_refused),
        cmocka_unit_test(creation_survives_want_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
