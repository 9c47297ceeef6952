/* Sharded weights against one rank: training, and what moves. */
#include "tests/dist/training.h"

#include <math.h>

/* For runs of many steps. */
static mt_trainer_config few(mt_dtype dtype, const char *recipe)
{
    return small_config(dtype, recipe, 3, 2);
}

/* ---- training ----------------------------------------------------------------------------------
 */

typedef struct history {
    mt_step_result step[STEPS];
} history;

static mt_status train(const mt_trainer_config *c, history *h, mt_fsdp_counts *counts,
                       double *validation)
{
    mt_trainer *t;
    int64_t counted;
    int32_t tokens[BATCH * SEQUENCE], targets[BATCH * SEQUENCE];
    MT_TRY(mt_trainer_create(&t, rank_device, c));
    for (int s = 0; s < STEPS; s++) {
        draw_batch(c, s % 4, tokens, targets);
        MT_TRY(mt_trainer_step(t, tokens, targets, &h->step[s]));
    }
    MT_TRY(mt_trainer_eval(t, tokens, targets, 1, validation, &counted));
    mt_fsdp *fsdp = mt_precision_fsdp(mt_model_precision(mt_trainer_model(t)));
    if (fsdp && counts) *counts = mt_fsdp_get_counts(fsdp);
    mt_trainer_destroy(&t);
    return MT_OK;
}

static mt_status close_to(const char *what, int step, double got, double want, double limit)
{
    rank_check(fabs(got - want) <= limit * fabs(want), "step %d: %s is %.17g, on one rank %.17g",
               step, what, got, want);
    return MT_OK;
}

static mt_status train_alone(mt_comm *comm, const mt_trainer_config *c, history *h,
                             double *validation)
{
    mt_status status = mt_comm_rank(comm) ? MT_OK : train(c, h, NULL, validation);
    MT_TRY(share_first(comm, status, h, sizeof *h));
    return share_first(comm, MT_OK, validation, sizeof *validation);
}

/* `limit`: relative; 0: to the bit. `counts` of the run over ranks, or NULL. */
static mt_status compare_training(mt_comm *comm, mt_trainer_config c, double limit,
                                  mt_fsdp_counts *counts)
{
    static history one, many, again;
    double valid[3];
    MT_TRY(train_alone(comm, &c, &one, &valid[0]));
    c.comm = comm;
    MT_TRY(train(&c, &many, counts, &valid[1]));
    again = many, valid[2] = valid[1];
    if (mt_comm_size(comm) == 2) MT_TRY(train(&c, &again, NULL, &valid[2]));
    rank_check(!memcmp(&many, &again, sizeof many) && valid[1] == valid[2],
               "the same run again gives other bits");
    for (int s = 0; s < STEPS; s++) {
        const mt_step_result *a = &many.step[s], *b = &one.step[s];
        MT_TRY(close_to("loss", s, a->loss, b->loss, limit));
        MT_TRY(close_to("aux loss", s, a->aux_loss, b->aux_loss, limit));
        MT_TRY(close_to("gradient norm", s, a->grad_norm, b->grad_norm, limit * 100));
        rank_check(a->max_vio == b->max_vio, "step %d: max_vio %g, on one rank %g", s, a->max_vio,
                   b->max_vio);
    }
    rank_check(one.step[STEPS - 1].loss < one.step[0].loss - 0.2, "nothing was learned");
    return close_to("validation", STEPS, valid[1], valid[0], limit * 10);
}

static mt_status training(mt_comm *comm)
{
    mt_trainer_config c = few(MT_F64, "none");
    MT_TRY(compare_training(comm, c, 1e-12, NULL));
    if (mt_comm_size(comm) > 2) return MT_OK;
    c.recompute = MT_RECOMPUTE_BLOCK, c.defer_wgrad = true, c.keep_gathered = true;
    c.model.tie_word_embeddings = true;
    return compare_training(comm, c, 1e-12, NULL);
}

/* Under recipes one rank's run is met in f64, where sums in another order are too close to change a
 * code. Otherwise the first loss is: the same codes, the same draws; later ones part, and differ no
 * more from run to run. */
static mt_status quantized_training(mt_comm *comm)
{
    static const char *const recipes[] = { "fp8_delayed", "nvfp4; steps=6.. mxfp8" };
    static history one, many, again;
    double valid[3];
    for (int i = 0; i < 2; i++) {
        mt_trainer_config c = few(MT_F64, recipes[i]);
        c.recompute = i ? MT_RECOMPUTE_BLOCK : MT_RECOMPUTE_NONE;
        MT_TRY(compare_training(comm, c, 1e-9, NULL));
        c = few(MT_BF16, recipes[i]);
        c.optim.moments = i ? MT_MOMENTS_FP8 : MT_MOMENTS_BF16, c.optim.moments_sr = !i;
        c.optim.master = i ? MT_MASTER_SPLIT : MT_MASTER_REAL;
        c.recompute = i ? MT_RECOMPUTE_BLOCK : MT_RECOMPUTE_NONE;
        MT_TRY(train_alone(comm, &c, &one, &valid[0]));
        c.comm = comm;
        MT_TRY(train(&c, &many, NULL, &valid[1]));
        MT_TRY(train(&c, &again, NULL, &valid[2]));
        rank_check(!memcmp(&many, &again, sizeof many) && valid[1] == valid[2],
                   "%s: the same run again gives other bits", recipes[i]);
        MT_TRY(close_to("loss", 0, many.step[0].loss, one.step[0].loss, 1e-6));
        MT_TRY(close_to("gradient norm", 0, many.step[0].grad_norm, one.step[0].grad_norm, 1e-5));
    }
    return MT_OK;
}

/* Widths of which no shard leaves a gap: gradients are sent from where backward wrote them. */
static mt_status in_place(mt_comm *comm)
{
    mt_fsdp_counts counts;
    mt_trainer_config c = few(MT_F64, "none");
    c.model.vocab_size = c.model.hidden_size = c.model.moe_intermediate_size = 128;
    c.model.head_dim = 128, c.model.num_attention_heads = c.model.num_key_value_heads = 1;
    MT_TRY(compare_training(comm, c, 1e-12, &counts));
    rank_check(counts.reduces > 0 && counts.in_place == counts.reduces,
               "%lld of %lld reductions in place", (long long)counts.in_place,
               (long long)counts.reduces);
    /* Blocks, and the last norm with the head; the embedding is one param. */
    rank_check(counts.early == (int64_t)STEPS * 3, "%lld reductions began early",
               (long long)counts.early);
    return MT_OK;
}

/* Gradients that cross the wire in bf16: another rounding of each, half the bytes, the same run. */
static mt_status narrow_reduction(mt_comm *comm)
{
    static history wide, narrow, again;
    mt_fsdp_counts counts[2];
    double valid[2];
    mt_trainer_config c = few(MT_F32, "none");
    c.comm = comm;
    MT_TRY(train(&c, &wide, &counts[0], &valid[0]));
    c.reduce_bf16 = true;
    MT_TRY(train(&c, &narrow, &counts[1], &valid[1]));
    MT_TRY(train(&c, &again, NULL, &valid[0]));
    rank_check(!memcmp(&narrow, &again, sizeof narrow) && valid[0] == valid[1],
               "the same run again gives other bits");
    /* about half: padding differs where gradients are sent as they lie */
    double share = (double)counts[1].reduced_bytes / (double)counts[0].reduced_bytes;
    rank_check(share > 0.4 && share < 0.6, "%lld bytes, %lld in f32",
               (long long)counts[1].reduced_bytes, (long long)counts[0].reduced_bytes);
    MT_TRY(close_to("loss", 0, narrow.step[0].loss, wide.step[0].loss, 1e-12));
    MT_TRY(close_to("gradient norm", 0, narrow.step[0].grad_norm, wide.step[0].grad_norm, 0x1p-7));
    rank_check(narrow.step[0].grad_norm != wide.step[0].grad_norm, "nothing was rounded");
    for (int s = 0; s < STEPS; s++)
        MT_TRY(close_to("loss", s, narrow.step[s].loss, wide.step[s].loss, 0.02));
    return MT_OK;
}

/* Many steps twice, with everything that runs beside the passes, which is on GPUs: the same bits.
 */
static mt_status repeated(mt_comm *comm)
{
    enum { MOST = 50 };
    static mt_step_result runs[2][MOST];
    const int count = on_gpus() ? MOST : STEPS;
    mt_trainer_config c = wide_config(MT_BF16, "mxfp8; layers=*experts* fp8_current");
    int32_t tokens[BATCH * SEQUENCE], targets[BATCH * SEQUENCE];
    c.comm = comm, c.reduce_bf16 = true, c.steps = count;
    memset(runs, 0, sizeof runs);
    for (int again = 0; again < 2; again++) {
        mt_trainer *t;
        MT_TRY(mt_trainer_create(&t, rank_device, &c));
        for (int s = 0; s < count; s++) {
            draw_batch(&c, s % 4, tokens, targets);
            MT_TRY(mt_trainer_step(t, tokens, targets, &runs[again][s]));
        }
        mt_trainer_destroy(&t);
    }
    for (int s = 0; s < count; s++)
        rank_check(!memcmp(&runs[0][s], &runs[1][s], sizeof runs[0][s]),
                   "step %d: losses %.9g and %.9g, gradient norms %.9g and %.9g", s,
                   runs[0][s].loss, runs[1][s].loss, runs[0][s].grad_norm, runs[1][s].grad_norm);
    rank_check(runs[0][count - 1].loss < runs[0][0].loss - 0.2, "nothing was learned");
    return MT_OK;
}

/* Gradients that backward stores in bf16: as one rank would, over a wire of either type. */
static mt_status bf16_gradients(mt_comm *comm)
{
    static history wide, one, many, again;
    double valid[2];
    mt_trainer_config c = few(MT_BF16, "none");
    c.comm = comm;
    MT_TRY(train(&c, &wide, NULL, &valid[0]));
    c.grad_dtype = MT_BF16, c.comm = NULL;
    MT_TRY(train_alone(comm, &c, &one, &valid[0]));
    c.comm = comm;
    for (int narrow = 0; narrow < 2; narrow++) {
        c.reduce_bf16 = narrow;
        MT_TRY(train(&c, &many, NULL, &valid[0]));
        c.defer_wgrad = true;
        MT_TRY(train(&c, &again, NULL, &valid[1]));
        c.defer_wgrad = false;
        rank_check(!memcmp(&many, &again, sizeof many) && valid[0] == valid[1],
                   "deferred gradients give other bits");
        MT_TRY(close_to("loss", 0, many.step[0].loss, wide.step[0].loss, 1e-12));
        MT_TRY(
            close_to("gradient norm", 0, many.step[0].grad_norm, wide.step[0].grad_norm, 0x1p-7));
        rank_check(many.step[0].grad_norm != wide.step[0].grad_norm, "nothing was rounded");
        for (int s = 0; s < STEPS; s++)
            MT_TRY(close_to("loss", s, many.step[s].loss, one.step[s].loss, 0.02));
    }
    return MT_OK;
}

/* What moves in steps of several micro-batches: gradients once, weights once for each pass and
 * direction, all but the first of each order ahead of use; with kept units once a step. */
static mt_status traffic(mt_comm *comm)
{
    static history h;
    mt_fsdp_counts counts[2];
    double valid;
    int ranks = mt_comm_size(comm), units = 4;
    for (int keep = 0; keep < 2; keep++) {
        mt_trainer_config c = few(MT_F32, "mxfp8");
        c.comm = comm, c.keep_gathered = keep;
        MT_TRY(train(&c, &h, &counts[keep], &valid));
    }
    int64_t passes = STEPS * BATCH / ranks;
    rank_check(counts[0].reduces == (int64_t)STEPS * units, "%lld reductions",
               (long long)counts[0].reduces);
    /* A pass: each unit forward and back; the embedding has nothing that backward reads. Beside
     * them what was fetched ahead in vain: until an order is known, and before weights change. */
    int64_t each = passes * (2 * units - 1) + units;
    rank_check(counts[0].gathers >= each - passes && counts[0].gathers <= each + 2 * STEPS,
               "%lld gathers in %lld passes", (long long)counts[0].gathers, (long long)passes);
    rank_check(counts[0].ahead >= counts[0].gathers - 4 * STEPS - 8, "%lld of %lld gathers ahead",
               (long long)counts[0].ahead, (long long)counts[0].gathers);
    rank_check(counts[1].gathers <= (int64_t)(STEPS + 1) * (2 * units - 1),
               "%lld gathers with kept units", (long long)counts[1].gathers);
    rank_check(counts[1].gathered_bytes < counts[0].gathered_bytes || passes <= STEPS,
               "keeping saves nothing");
    return MT_OK;
}

/* Masters and moments in the host's memory: no bit depends on it. */
static mt_status offload(mt_comm *comm)
{
    static const char *const recipes[] = { "none", "nvfp4", "fp8_current" };
    static history here, there;
    double valid[2];
    for (int i = 0; i < 3; i++) {
        mt_trainer_config c = few(i ? MT_BF16 : MT_F32, recipes[i]);
        c.comm = comm, c.keep_gathered = i == 1, c.model.tie_word_embeddings = i == 2;
        c.optim.moments = i == 1 ? MT_MOMENTS_FP8 : MT_MOMENTS_REAL;
        c.optim.master = i == 1 ? MT_MASTER_SPLIT : MT_MASTER_REAL;
        MT_TRY(train(&c, &here, NULL, &valid[0]));
        c.optim.offload = true;
        MT_TRY(train(&c, &there, NULL, &valid[1]));
        rank_check(!memcmp(&here, &there, sizeof here) && valid[0] == valid[1],
                   "%s: other bits from the host's memory", recipes[i]);
    }
    return MT_OK;
}

/* A weight that is NaN on one rank: no rank updates, and all learn its name. */
static mt_status nonfinite(mt_comm *comm)
{
    mt_trainer_config c = few(MT_F32, "none");
    mt_trainer *t;
    mt_step_result result;
    int32_t tokens[BATCH * SEQUENCE], targets[BATCH * SEQUENCE];
    char name[128];
    float bad = NAN;
    c.comm = comm;
    draw_batch(&c, 0, tokens, targets);
    MT_TRY(mt_trainer_create(&t, rank_device, &c));
    mt_param_store *store = mt_model_params(mt_trainer_model(t));
    mt_param *p = mt_param_store_find(store, "model.layers.1.mlp.experts.down");
    rank_check(p, "no such param");
    MT_TRY(mt_param_write_master(store, p, mt_param_count(p) - 1, 1, &bad));
    rank_check((p->own.first + p->own.count == mt_param_count(p)) ==
                   (mt_param_read_master(store, p, mt_param_count(p) - 1, 1, &bad) == MT_OK),
               "an element of another rank was read");
    MT_TRY(mt_trainer_set_steps(t, 0));
    MT_TRY(mt_trainer_step(t, tokens, targets, &result));
    rank_check(!result.loss_finite && result.skipped, "a step of a NaN was made");
    MT_TRY(mt_trainer_find_nonfinite(t, tokens, targets, name));
    rank_check(!strcmp(name, p->name), "the first bad tensor is '%s'", name);
    mt_trainer_destroy(&t);
    return MT_OK;
}

static const rank_case cases[] = {
    { "nonfinite", nonfinite },
    { "training", training },
    { "quantized_training", quantized_training },
    { "traffic", traffic },
    { "narrow_reduction", narrow_reduction },
    { "in_place", in_place },
    { "repeated", repeated },
    { "bf16_gradients", bf16_gradients },
    { "offload", offload },
};
enum { CASES = sizeof cases / sizeof cases[0] };

int main(int argc, char **argv)
{
    if (argc > 3 && !strcmp(argv[1], "--ranks")) return ranks_main(argv);
    if (argc > 1) return rank_main(cases, CASES, argv[1], on_gpus() ? 60 : 20);
    const struct CMUnitTest tests[] = {
        RANKS_TEST(on_two_and_four, "training"),
        RANKS_TEST(on_two, "quantized_training"),
        RANKS_TEST(on_two, "nonfinite"),
        RANKS_TEST(on_two, "traffic"),
        RANKS_TEST(on_two_and_four, "narrow_reduction"),
        RANKS_TEST(on_two_and_four, "bf16_gradients"),
        RANKS_TEST(on_two_and_four, "in_place"),
        RANKS_TEST(on_two_and_four, "offload"),
        RANKS_TEST(on_two_and_four, "repeated"),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
