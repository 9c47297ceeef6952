/* Rows to experts of other ranks that travel as codes: fewer bytes, and the same bits in all that
 * is computed and counted, against one rank and against rows that travel as they are. */
#include "tests/dist/history.h"
#include "tests/dist/moe_layer.h"

#include "layers/linear_priv.h"

#define FROM_ROWS  " wgrad=mxfp8:source=dequantized"
#define MXFP4_ROWS "fprop=mxfp4 dgrad=mxfp4 wgrad=mxfp4:source=dequantized"

/* ---- one layer ---------------------------------------------------------------------------------
 */

enum { X_CODED = 1, DY_CODED = 2 };

/* A line of what is coded: bytes of codes and scales of D = 24 elements, in whole 16. */
static const struct layer_case {
    const char *recipe;
    int line;
    int trained, frozen, evaluated; /* what travels as codes */
} layer_cases[] = {
    { "mxfp8" FROM_ROWS, 32, X_CODED | DY_CODED, X_CODED | DY_CODED, X_CODED },
    { "mxfp8", 32, 0, X_CODED | DY_CODED, X_CODED },
    { "fprop=mxfp8:e5m2+scale=floor dgrad=mxfp8:e5m2" FROM_ROWS, 32, X_CODED | DY_CODED,
      X_CODED | DY_CODED, X_CODED },
    { "fprop=mxfp8 dgrad=bf16 wgrad=mxfp4:source=dequantized/mxfp8", 32, X_CODED, X_CODED,
      X_CODED },
    { "fprop=mxfp8 dgrad=mxfp8 wgrad=bf16/mxfp8:source=dequantized", 32, DY_CODED,
      X_CODED | DY_CODED, X_CODED },
    { "fprop=mxfp8 dgrad=mxfp8:sr" FROM_ROWS, 32, X_CODED, X_CODED, X_CODED },
    { "fprop=mxfp8/mxfp8:2d dgrad=mxfp8 wgrad=mxfp8", 32, 0, DY_CODED, 0 },
    { "fp8_block wgrad=fp8_block:source=dequantized", 32, X_CODED | DY_CODED, X_CODED | DY_CODED,
      X_CODED },
    { "fp8_block fprop=fp8_block/fp8_block:pow2=off", 32, 0, DY_CODED, 0 },
    { MXFP4_ROWS, 16, 0, 0, X_CODED }, /* E2M1 has no NaN, and passes that train count them */
    { "fprop=mxfp6_e3m2 dgrad=mxfp6_e2m3 wgrad=mxfp8", 32, 0, 0, X_CODED },
    { "nvfp4", 16, 0, 0, 0 },
    { "fp8_current", 32, 0, 0, 0 },
    { "bf16", 32, 0, 0, 0 },
};
enum { LAYER_CASES = sizeof layer_cases / sizeof layer_cases[0] };

/* The same number, or NaN both. */
static mt_status same(const char *recipe, const char *what, const double *a, const double *b,
                      int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        rank_check(
            (isnan(a[i]) && isnan(b[i])) || (a[i] == b[i] && !signbit(a[i]) == !signbit(b[i])),
            "%s: %s: element %lld is %.17g, must be %.17g", recipe, what, (long long)i, a[i], b[i]);
    return MT_OK;
}

/* b: of the same rank, or (`rank`) of one that has everything. */
static mt_status same_outcomes(const layer_run *run, const outcome *a, const outcome *b,
                               int64_t rank, int64_t ranks)
{
    int64_t here = EXPERTS / mt_comm_size(run->comm), first = rank * here,
            all = ranks > 1 ? EXPERTS : here;
    MT_TRY(same(run->recipe, "y", a->y, b->y + rank * T * D, T * D));
    for (int i = 0; i < 6; i++)
        for (int64_t e = 0; e < here; e++)
            rank_check(a->nans[i * here + e] == b->nans[i * all + first + e],
                       "%s: expert %lld has met %lld NaNs of kind %d, must be %lld", run->recipe,
                       (long long)(first + e), (long long)a->nans[i * here + e], i,
                       (long long)b->nans[i * all + first + e]);
    if (run->evaluation) return MT_OK;
    MT_TRY(same(run->recipe, "dx", a->dx, b->dx + rank * T * D, T * D));
    for (int w = 1; w < 3 && !run->frozen; w++) {
        int64_t each = w == 1 ? 2 * F * D : D * F;
        MT_TRY(same(run->recipe, w == 1 ? "dW gate_up" : "dW down", a->grads[w],
                    b->grads[w] + first * each, here * each));
    }
    return MT_OK;
}

/* Blocks have as many lines, whatever a line is. */
static mt_status check_bytes(const layer_run *run, const struct layer_case *c, int64_t coded,
                             int64_t plain, int which)
{
    int64_t line = D * (int64_t)mt_dtype_size(run->dtype), trips = run->evaluation ? 2 : 4;
    int64_t n = (which & X_CODED ? 1 : 0) + (which & DY_CODED ? 1 : 0);
    rank_check(plain > 0 && coded * trips * line == plain * (trips * line - n * (line - c->line)),
               "%s of %s: %lld bytes, as they are %lld, want %lld of %lld as codes", run->recipe,
               mt_dtype_name(run->dtype), (long long)coded, (long long)plain, (long long)n,
               (long long)trips);
    return MT_OK;
}

static mt_status compare(mt_comm *comm, const struct layer_case *c, layer_run run, int which)
{
    outcome one, plain, coded;
    int64_t ranks = mt_comm_size(comm), rank = mt_comm_rank(comm);
    run.recipe = c->recipe, run.tokens = ranks * T;
    MT_TRY(run_layer_alone(comm, &one, &run));
    int64_t met = 0;
    for (int i = 0; i < 6 * EXPERTS; i++) met += one.nans[i];
    rank_check(!run.odd == !met || run.evaluation || !strcmp(c->recipe, "bf16"), "%s: %lld NaNs",
               c->recipe, (long long)met);
    run.comm = comm, run.first = rank * T, run.tokens = T;
    MT_TRY(run_layer(&coded, &run));
    run.plain = true;
    MT_TRY(run_layer(&plain, &run));
    if (!on_gpus()) MT_TRY(same_outcomes(&run, &coded, &one, rank, ranks));
    MT_TRY(same_outcomes(&run, &coded, &plain, 0, 1));
    if (!run.evaluation)
        MT_TRY(same(c->recipe, "router", coded.grads[0], plain.grads[0], EXPERTS * D));
    MT_TRY(check_bytes(&run, c, coded.bytes, plain.bytes, which));
    outcome_free(&one), outcome_free(&plain), outcome_free(&coded);
    return MT_OK;
}

static mt_status one_layer(mt_comm *comm)
{
    static const mt_dtype dtypes[] = { MT_BF16, MT_F32, MT_F64 };
    for (int i = 0; i < LAYER_CASES; i++)
        for (int d = 0; d < 3; d++)
            for (int odd = 0; odd < 2; odd++) {
                const struct layer_case *c = &layer_cases[i];
                layer_run run = {
                    .dtype = dtypes[d], .odd = odd, .defer = d == 1, .kept = (i + d) % 3 == 2
                };
                if (!strcmp(c->recipe, "bf16") && d) continue;
                MT_TRY(compare(comm, c, run, c->trained));
                run.lonely = !odd;
                MT_TRY(compare(comm, c, run, c->trained));
                run.lonely = false, run.frozen = true;
                MT_TRY(compare(comm, c, run, c->frozen));
                run.frozen = false, run.evaluation = true;
                MT_TRY(compare(comm, c, run, c->evaluated));
            }
    return MT_OK;
}

/* ---- training ----------------------------------------------------------------------------------
 */

struct result {
    history h;
    uint64_t hash;
    int64_t bytes, voided;
};

static mt_status train(const mt_trainer_config *c, bool plain, struct result *r)
{
    mt_trainer *t;
    memset(r, 0, sizeof *r);
    MT_TRY(mt_trainer_create(&t, rank_device, c));
    mt_exchange *exchange = mt_model_exchange(mt_trainer_model(t));
    mt_exchange_set_plain(exchange, plain);
    MT_TRY(steps(t, &r->h));
    MT_TRY(fingerprint(&r->hash, t));
    r->bytes = mt_exchange_bytes(exchange);
    for (int s = 0; s < STEPS; s++) r->voided += r->h.step[s].voided;
    mt_trainer_destroy(&t);
    return MT_OK;
}

static mt_status training(mt_comm *comm)
{
    static const struct {
        const char *recipe;
        mt_recompute recompute;
        double capacity;
    } cases[] = {
        { "mxfp8" FROM_ROWS, MT_RECOMPUTE_NONE, 0 },
        { "mxfp8" FROM_ROWS, MT_RECOMPUTE_BLOCK, 0.3 }, /* steps begin again */
        { "mxfp8", MT_RECOMPUTE_BLOCK, 0 },             /* the first forward is not recorded */
        { MXFP4_ROWS, MT_RECOMPUTE_BLOCK, 0 },          /* X again, and evaluation */
        { "fp8_block; layers=*experts* steps=6.. fp8_block wgrad=fp8_block:source=dequantized",
          MT_RECOMPUTE_NONE, 0 },
    };
    static struct result coded, plain;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        mt_trainer_config c = small_config(MT_BF16, cases[i].recipe, 8, 3);
        c.comm = comm, c.recompute = cases[i].recompute, c.defer_wgrad = i == 0;
        c.expert_capacity = cases[i].capacity;
        for (c.expert_parallel = 2; c.expert_parallel <= mt_comm_size(comm);
             c.expert_parallel *= 2) {
            MT_TRY(train(&c, false, &coded));
            MT_TRY(train(&c, true, &plain));
            MT_TRY(same_histories(c.recipe, &coded.h, &plain.h));
            rank_check(coded.hash == plain.hash, "%s: another end", c.recipe);
            rank_check(coded.bytes < plain.bytes - plain.bytes / 50,
                       "%s: %lld bytes, as they are %lld", c.recipe, (long long)coded.bytes,
                       (long long)plain.bytes);
            rank_check(!cases[i].capacity == !coded.voided, "%s: %lld steps were void", c.recipe,
                       (long long)coded.voided);
            rank_check(coded.h.step[STEPS - 1].loss < coded.h.step[0].loss - 0.2,
                       "nothing was learned");
        }
    }
    return MT_OK;
}

/* Amax histories of other steps gather at every step: what they hold then, and so what comes after,
 * is the same whether blocks run again or not, whose first forward travels coded elsewhere. */
static mt_status histories(mt_comm *comm)
{
    static const char *const recipes[] = {
        "mxfp8; layers=*experts* steps=6.. fp8_delayed",
        "mxfp8" FROM_ROWS "; layers=*experts* steps=4..9 fp8_delayed",
    };
    static struct result first, other;
    for (size_t i = 0; i < sizeof recipes / sizeof recipes[0]; i++) {
        mt_trainer_config c = small_config(MT_BF16, recipes[i], 8, 3);
        c.comm = comm, c.expert_parallel = 2;
        MT_TRY(train(&c, true, &first));
        for (int recompute = MT_RECOMPUTE_NONE; recompute <= MT_RECOMPUTE_BLOCK; recompute++) {
            c.recompute = (mt_recompute)recompute;
            MT_TRY(train(&c, false, &other));
            MT_TRY(same_histories(c.recipe, &first.h, &other.h));
            rank_check(first.hash == other.hash, "%s: another end", c.recipe);
        }
    }
    return MT_OK;
}

/* ---- who watches, and biases -------------------------------------------------------------------
 */

static mt_status watch(void *observer, const mt_param *weight, mt_operand operand,
                       const mt_qtensor *plain)
{
    (void)observer, (void)weight, (void)operand, (void)plain;
    return MT_OK;
}

/* The rule where the recipe allows codes. */
static void test_readers(void **state)
{
    (void)state;
    mt_tape *tape;
    mt_stream stream = { test_device(), NULL };
    mt_linear_state linear = { 0 };
    mt_param w = { .compute = MT_BF16, .linear = &linear }, b = { .compute = MT_BF16 };
    mt_grouped_linear_layer reader = { .weight = &w };
    mt_format_spec spec;
    float amaxes[1];
    assert_ok(mt_recipe_parse(&linear.recipe, "mxfp8" FROM_ROWS));
    assert_ok(mt_tape_create(&tape, &stream, &(mt_tape_options){ 0 }));
    assert_ok(mt_tape_begin(tape, 1, true));
    assert_true(mt_linear_travels_coded(tape, &reader, MT_OPERAND_X, &spec));
    assert_int_equal(spec.format->id, MT_FORMAT_MXFP8);
    assert_true(mt_linear_travels_coded(tape, &reader, MT_OPERAND_DY, &spec));
    reader.bias = &b;
    assert_true(mt_linear_travels_coded(tape, &reader, MT_OPERAND_X, &spec));
    assert_false(mt_linear_travels_coded(tape, &reader, MT_OPERAND_DY, &spec));
    reader.bias = NULL, linear.observe = watch;
    assert_false(mt_linear_travels_coded(tape, &reader, MT_OPERAND_X, &spec));
    assert_false(mt_linear_travels_coded(tape, &reader, MT_OPERAND_DY, &spec));
    linear.observe = NULL, linear.delayed[MT_OPERAND_X][MT_ROW].history = amaxes;
    assert_false(mt_linear_travels_coded(tape, &reader, MT_OPERAND_X, &spec));
    assert_true(mt_linear_travels_coded(tape, &reader, MT_OPERAND_DY, &spec));
    linear.delayed[MT_OPERAND_DY][MT_COL].history = amaxes;
    assert_false(mt_linear_travels_coded(tape, &reader, MT_OPERAND_DY, &spec));
    assert_ok(mt_tape_end(tape));
    assert_ok(mt_tape_begin(tape, 2, false)); /* which no history gathers */
    assert_true(mt_linear_travels_coded(tape, &reader, MT_OPERAND_X, &spec));
    w.linear = NULL;
    assert_false(mt_linear_travels_coded(tape, &reader, MT_OPERAND_X, &spec));
    assert_ok(mt_tape_end(tape));
    mt_tape_destroy(&tape);
}

static const rank_case cases[] = { { "one_layer", one_layer },
                                   { "training", training },
                                   { "histories", histories } };
enum { CASES = sizeof cases / sizeof cases[0] };

int main(int argc, char **argv)
{
    if (argc > 3 && !strcmp(argv[1], "--ranks")) return ranks_main(argv);
    if (argc > 1) return rank_main(cases, CASES, argv[1], on_gpus() ? 60 : 20);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_readers),
        RANKS_TEST(on_two_and_four, "one_layer"),
        RANKS_TEST(on_two_and_four, "training"),
        RANKS_TEST(on_two, "histories"),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
