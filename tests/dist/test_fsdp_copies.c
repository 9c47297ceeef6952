/* Compute copies of sharded weights: what every pass reads, bit for bit as one rank has it. */
#include "tests/dist/copies.h"
#include "tests/dist/training.h"

#include <math.h>

#include "dist/comm_priv.h"

enum { RANDOM_RECIPES = 10 };

/* ---- copies ------------------------------------------------------------------------------------
 */

static mt_status same(const mt_param *p, const char *what, const void *a, const void *b,
                      size_t bytes)
{
    rank_check(!bytes || (a && b), "%s: %s is not here", p->name, what);
    unsigned char *ours = malloc(2 * bytes + 1), *theirs = ours + bytes;
    rank_check(ours, "no memory for %zu bytes", bytes);
    mt_status status = mt_device_copy(rank_device, ours, a, bytes);
    if (status == MT_OK) status = mt_device_copy(rank_device, theirs, b, bytes);
    size_t i = 0;
    while (status == MT_OK && i < bytes && ours[i] == theirs[i]) i++;
    if (status == MT_OK && i < bytes)
        status = MT_FAIL(MT_EINTERNAL, "%s: %s differ at byte %zu of %zu: %02x, one rank has %02x",
                         p->name, what, i, bytes, ours[i], theirs[i]);
    free(ours);
    return status;
}

static mt_status same_direction(const mt_param *p, const mt_direction *b, mt_dir dir)
{
    const mt_device *device = rank_device;
    const mt_direction *a = &p->weight.dir[dir];
    const mt_group *g = &p->group;
    rank_check(a->format == b->format && a->layout == b->layout, "%s: another format", p->name);
    if (a->layout == MT_LAYOUT_PACKED)
        return same(
            p, "packed weights", a->codes, b->codes,
            device->kernels[p->compute]->packed_bytes(p->compute, dir, g->members, g->m, g->k));
    MT_TRY(same(p, dir ? "column codes" : "row codes", a->codes, b->codes,
                mt_direction_code_bytes(a, dir, g)));
    MT_TRY(same(p, dir ? "column scales" : "row scales", a->scales, b->scales,
                mt_direction_scale_bytes(a, dir, g)));
    if (!a->format->second_level) return MT_OK;
    return same(p, "amaxes", a->amax, b->amax, (size_t)g->members * sizeof *a->amax);
}

/* Whatever a pass reads of every param, in the order of a pass. */
static mt_status same_copies(mt_trainer *sharded, mt_trainer *one)
{
    mt_param_store *stores[2] = { mt_model_params(mt_trainer_model(sharded)),
                                  mt_model_params(mt_trainer_model(one)) };
    int64_t n = mt_param_store_count(stores[0]);
    for (int64_t k = 0; k < 2 * n; k++) {
        mt_dir dir = k < n ? MT_ROW : MT_COL;
        int64_t i = k < n ? k : 2 * n - 1 - k;
        mt_param *p = mt_param_store_get(stores[0], i), *q = mt_param_store_get(stores[1], i);
        MT_TRY(mt_param_need(p, dir));
        if (p->packed) MT_TRY(same_as_one_rank(p, q, dir, same_direction));
        if (!p->packed || (p->direct && dir == MT_ROW))
            MT_TRY(same(p, "masters", p->master, q->master,
                        (size_t)mt_param_count(p) * mt_dtype_size(p->dtype)));
    }
    return MT_OK;
}

/* Every element is owned once; pieces of GEMM weights are whole rows. */
static mt_status check_pieces(const mt_param_store *store)
{
    for (int64_t i = 0; i < mt_param_store_count(store); i++) {
        const mt_param *p = mt_param_store_get(store, i);
        int64_t at = 0;
        for (int r = 0; r < mt_param_store_world(store); r++) {
            mt_piece piece = mt_param_piece(store, p, r);
            if (!piece.count) continue;
            rank_check(piece.first == at && piece.first % 128 == 0, "%s: rank %d begins at %lld",
                       p->name, r, (long long)piece.first);
            rank_check(!p->packed || piece.first / p->group.k % p->group.m % p->atom == 0,
                       "%s: rank %d begins within a block", p->name, r);
            at += piece.count;
        }
        rank_check(at == mt_param_count(p), "%s: %lld elements are owned", p->name, (long long)at);
    }
    return MT_OK;
}

static mt_status compare_copies(mt_comm *comm, const mt_trainer_config *config)
{
    mt_trainer *one = NULL, *sharded = NULL;
    mt_trainer_config c = *config;
    mt_status status = mt_trainer_create(&one, rank_device, &c);
    c.comm = comm;
    if (status == MT_OK) status = mt_trainer_create(&sharded, rank_device, &c);
    if (status == MT_OK) status = check_pieces(mt_model_params(mt_trainer_model(sharded)));
    if (status == MT_OK) status = same_copies(sharded, one);
    if (status == MT_OK) status = same_copies(sharded, one); /* from what was fetched ahead */
    if (status == MT_OK && c.dtype != MT_F64) {
        status = put_ties(one);
        if (status == MT_OK) status = put_ties(sharded);
        if (status == MT_OK) status = same_copies(sharded, one);
    }
    if (status != MT_OK) {
        char reason[500];
        snprintf(reason, sizeof reason, "%s", mt_error_message());
        status = MT_FAIL(status, "recipe %.200s: %s", c.recipe, reason);
    }
    status = mt_comm_agree(comm, status, "copies");
    mt_trainer_destroy(&sharded);
    mt_trainer_destroy(&one);
    return status;
}

/* A recipe that parses, from the seed. */
static void random_recipe(char text[MT_RECIPE_RULES_TEXT], uint64_t seed)
{
    static const char *const weights[] = { "f32",
                                           "bf16",
                                           "f16",
                                           "fp8_tensor",
                                           "fp8_delayed",
                                           "fp8_tensor:pow2+e5m2",
                                           "fp8_block",
                                           "fp8_block:1d",
                                           "mxfp8",
                                           "mxfp8:2d+sr",
                                           "mxfp6_e3m2",
                                           "mxfp6_e2m3:scale=floor",
                                           "mxfp4",
                                           "mxfp4:sr",
                                           "nvfp4",
                                           "nvfp4:1d",
                                           "nvfp4:1d+sr",
                                           "nvfp4:4over6",
                                           "nvfp4:1d+4over6=448+err=sq",
                                           "mxfp8:source=dequantized" };
    enum { WEIGHTS = sizeof weights / sizeof weights[0], PLAIN = 3 };
    uint64_t fprop = mt_rng_below(seed, 1, 0, WEIGHTS - 1);
    uint64_t dgrad = mt_rng_below(seed, 2, 0, WEIGHTS);
    if (dgrad == WEIGHTS - 1 && fprop < PLAIN) dgrad = fprop; /* rows without codes */
    snprintf(text, MT_RECIPE_RULES_TEXT, "fprop=%s/bf16 dgrad=%s/bf16 wgrad=bf16", weights[fprop],
             weights[dgrad]);
}

static mt_status copies(mt_comm *comm)
{
    for (int i = 0; mt_recipe_preset(i); i++) {
        mt_trainer_config c = wide_config(i % 2 ? MT_BF16 : MT_F32, mt_recipe_preset(i));
        MT_TRY(compare_copies(comm, &c));
    }
    for (int i = 0; i < RANDOM_RECIPES; i++) {
        char recipe[MT_RECIPE_RULES_TEXT];
        random_recipe(recipe, 77 + (uint64_t)i);
        mt_trainer_config c = wide_config(i % 2 ? MT_F32 : MT_BF16, recipe);
        MT_TRY(compare_copies(comm, &c));
    }
    const mt_dtype dtypes[] = { MT_F64, MT_F32, MT_BF16 };
    for (int i = 0; i < 3; i++) { /* masters that are split, a tied embedding, all units kept */
        mt_trainer_config c = wide_config(dtypes[i], i ? "mxfp8; layers=*qkv* nvfp4" : "none");
        c.optim.master = dtypes[i] == MT_F64 ? MT_MASTER_REAL : MT_MASTER_SPLIT;
        c.model.tie_word_embeddings = i != 1;
        c.quantized_init = i == 2;
        c.keep_gathered = i == 1;
        MT_TRY(compare_copies(comm, &c));
    }
    static const char *const halves[] = {
        "none", "fprop=bf16/bf16 dgrad=mxfp8/bf16 wgrad=bf16",
        "fprop=bf16/bf16 dgrad=bf16/bf16 wgrad=bf16; layers=*qkv* nvfp4"
    };
    for (int i = 0; i < 3; i++) { /* ranks exchange what split masters hold in bf16 */
        mt_trainer_config c = wide_config(MT_BF16, halves[i]);
        c.optim.master = MT_MASTER_SPLIT, c.optim.offload = i == 2;
        MT_TRY(compare_copies(comm, &c));
    }
    static const char *const chained[] = {
        "fprop=nvfp4:1d/bf16 dgrad=nvfp4:1d+source=dequantized/bf16 wgrad=bf16",
        "fprop=nvfp4:1d+sr/bf16 dgrad=mxfp8:source=dequantized/bf16 wgrad=bf16",
        "fprop=mxfp4/bf16 dgrad=nvfp4:1d+sr+source=dequantized/bf16 wgrad=bf16",
        "fprop=fp8_tensor/bf16 dgrad=nvfp4:1d+source=dequantized/bf16 wgrad=bf16"
    };
    for (int i = 0; i < 4; i++) { /* columns from what rows hold, which may need an amax itself */
        mt_trainer_config c = wide_config(MT_F32, chained[i]);
        MT_TRY(compare_copies(comm, &c));
    }
    return MT_OK;
}

/* The bytes of every native compute copy, in the order of a pass: to `kept`, or held against it. */
static mt_status visit_native(mt_trainer *t, char *kept, size_t room, bool compare)
{
    mt_param_store *store = mt_model_params(mt_trainer_model(t));
    size_t at = 0;
    for (int64_t i = 0; i < mt_param_store_count(store); i++)
        for (int d = 0; d < MT_DIR_COUNT; d++) {
            mt_param *p = mt_param_store_get(store, i);
            const mt_group *g = &p->group;
            MT_TRY(mt_param_need(p, (mt_dir)d));
            const mt_direction *x = &p->weight.dir[d];
            if (!p->packed || x->layout != MT_LAYOUT_PACKED) continue;
            size_t bytes = rank_device->kernels[p->compute]->packed_bytes(p->compute, (mt_dir)d,
                                                                          g->members, g->m, g->k);
            rank_check(at + bytes <= room, "%s: no room for %zu bytes", p->name, bytes);
            if (compare) MT_TRY(same(p, "copies", x->codes, kept + at, bytes));
            if (!compare) MT_TRY(mt_device_copy(rank_device, kept + at, x->codes, bytes));
            at += bytes;
        }
    return MT_OK;
}

/* What an update writes of the own wires is what a refresh makes of the masters, in steps that are
 * made and in one that is skipped, and where a recipe changes. */
static mt_status follow_updates(mt_comm *comm, const char *recipe, bool keep)
{
    enum { ROOM = 4 << 20 };
    mt_trainer_config c = wide_config(MT_BF16, recipe);
    mt_trainer *t;
    mt_stream stream = { rank_device, NULL };
    int32_t tokens[BATCH * SEQUENCE], targets[BATCH * SEQUENCE];
    char *kept = malloc(ROOM);
    rank_check(kept, "no memory for %d bytes", ROOM);
    c.comm = comm, c.keep_gathered = keep;
    MT_TRY(mt_trainer_create(&t, rank_device, &c));
    mt_param_store *store = mt_model_params(mt_trainer_model(t));
    int64_t casts = 0;
    for (int64_t i = 0; i < mt_param_store_count(store); i++)
        casts += mt_param_store_get(store, i)->cast != NULL;
    MT_TRY(mt_comm_all_reduce(comm, NULL, &casts, 1, MT_I64, MT_REDUCE_SUM, "casts"));
    rank_check(casts, "no update writes a wire");
    mt_param *norm = mt_param_store_find(store, "model.norm");
    for (int s = 0; s < 5; s++) {
        const float value = s == 3 ? INFINITY : 1;
        mt_step_result result;
        MT_TRY(mt_param_write_master(store, norm, 0, 1, &value));
        MT_TRY(mt_model_refresh(mt_trainer_model(t), &stream));
        draw_batch(&c, s, tokens, targets);
        MT_TRY(mt_trainer_step(t, tokens, targets, &result));
        rank_check(result.skipped == (s == 3), "step %d: skipped %d", s, (int)result.skipped);
        rank_check(strchr(recipe, ';') || mt_param_store_get(store, 0)->master,
                   "step %d: what passes begin with was not fetched", s);
        MT_TRY(visit_native(t, kept, ROOM, false));
        MT_TRY(mt_model_refresh(mt_trainer_model(t), &stream));
        MT_TRY(visit_native(t, kept, ROOM, true));
    }
    mt_trainer_destroy(&t);
    free(kept);
    return MT_OK;
}

static mt_status updates(mt_comm *comm)
{
    static const char *const recipes[] = {
        "none", "fprop=bf16/bf16 dgrad=mxfp8/bf16 wgrad=bf16; steps=2..3 mxfp8",
        "mxfp8; layers=*qkv* fprop=mxfp8/bf16 dgrad=bf16/bf16 wgrad=bf16"
    };
    for (int i = 0; i < 4; i++) MT_TRY(follow_updates(comm, recipes[i % 3], i == 3));
    return MT_OK;
}

/* ---- copies that others write to ---------------------------------------------------------------
 * What GPUs of one host do to memory of any size, with whatever moves bytes here. */

enum { WINDOWS = 8, RUNS = 256 };

static struct {
    const struct mt_comm_ops *ops; /* of the comm itself */
    struct {
        char *memory;
        size_t bytes;
    } windows[WINDOWS];
    int spreads;
} placing;

/* Which window memory is in; -1: none. */
static int64_t window_of(const void *memory, size_t bytes)
{
    const char *p = memory;
    for (int i = 0; p && i < WINDOWS; i++)
        if (p >= placing.windows[i].memory &&
            p + bytes <= placing.windows[i].memory + placing.windows[i].bytes)
            return i;
    return -1;
}

static mt_status share(mt_comm *c, void *memory, size_t bytes)
{
    int i = 0;
    (void)c;
    while (i < WINDOWS && placing.windows[i].memory) i++;
    rank_check(i < WINDOWS, "more than %d memories are shared", WINDOWS);
    placing.windows[i].memory = memory, placing.windows[i].bytes = bytes;
    return MT_OK;
}

static void unshare(mt_comm *c, const void *memory)
{
    int64_t i = window_of(memory, 0);
    (void)c;
    if (i >= 0) placing.windows[i].memory = NULL, placing.windows[i].bytes = 0;
}

static bool reaches(const mt_comm *c, const void *memory, size_t bytes)
{
    return c->size > 1 && window_of(memory, bytes) >= 0;
}

/* Every rank says where its runs go, and then they are broadcast. */
static mt_status place_runs(mt_comm *c, mt_stream *stream, const mt_comm_run *runs, int count)
{
    typedef struct told {
        int64_t count, window[RUNS], at[RUNS], bytes[RUNS];
    } told;
    told own = { .count = count }, *all = calloc((size_t)c->size, sizeof *all);
    rank_check(all && count <= RUNS, "%d runs", count);
    for (int i = 0; i < count; i++) {
        own.window[i] = window_of(runs[i].to, runs[i].bytes);
        rank_check(own.window[i] >= 0, "run %d goes to memory that is not shared", i);
        own.at[i] = (char *)runs[i].to - placing.windows[own.window[i]].memory;
        own.bytes[i] = (int64_t)runs[i].bytes;
        MT_TRY(mt_device_copy_async(stream, runs[i].to, runs[i].from, runs[i].bytes));
    }
    MT_TRY(placing.ops->all_gather(c, NULL, all, &own, sizeof own));
    for (int r = 0; r < c->size; r++)
        for (int i = 0; i < all[r].count; i++)
            MT_TRY(placing.ops->broadcast(c, stream,
                                          placing.windows[all[r].window[i]].memory + all[r].at[i],
                                          (size_t)all[r].bytes[i], r));
    free(all);
    placing.spreads++;
    return MT_OK;
}

static mt_status placed(mt_comm *comm)
{
    struct mt_comm_ops ops = *comm->ops;
    placing.ops = comm->ops;
    ops.share = share, ops.unshare = unshare, ops.reaches = reaches, ops.spread = place_runs;
    comm->ops = &ops;
    mt_status status = copies(comm);
    if (status == MT_OK) status = updates(comm);
    comm->ops = placing.ops;
    rank_check(status != MT_OK || placing.spreads > 1000, "%d gathers", placing.spreads);
    for (int i = 0; status == MT_OK && i < WINDOWS; i++)
        rank_check(!placing.windows[i].memory, "memory is shared that is freed");
    return status;
}

/* Where hosts have uneven numbers of ranks, some columns of the mesh are on one and others not. */
static bool reaches_even(const mt_comm *c, const void *memory, size_t bytes)
{
    return c->world && c->world->rank % 2 == 0 && reaches(c, memory, bytes);
}

/* Experts are the largest units, and larger as values than as codes: at the third step ranks that
 * do not reach each other need more staging than before. All still make the same collectives. */
static mt_status uneven(mt_comm *comm)
{
    mt_trainer_config c =
        wide_config(MT_BF16, "none; layers=*experts* mxfp8; layers=*experts* steps=..2 nvfp4");
    mt_trainer *t;
    int32_t tokens[BATCH * SEQUENCE], targets[BATCH * SEQUENCE];
    static struct mt_comm_ops ops; /* parts are closed by it, with the world */
    placing.ops = comm->ops, ops = *comm->ops;
    ops.share = share, ops.unshare = unshare, ops.reaches = reaches_even, ops.spread = place_runs;
    comm->ops = &ops;
    c.comm = comm, c.expert_parallel = 2;
    c.model.num_experts = 8, c.model.moe_intermediate_size = 256;
    MT_TRY(mt_trainer_create(&t, rank_device, &c));
    for (int s = 0; s < 4; s++) {
        mt_step_result result;
        draw_batch(&c, s, tokens, targets);
        MT_TRY(mt_trainer_step(t, tokens, targets, &result));
        MT_TRY(mt_comm_barrier(comm, "the step's end"));
    }
    mt_trainer_destroy(&t);
    comm->ops = placing.ops;
    return MT_OK;
}

static const rank_case cases[] = {
    { "copies", copies },
    { "updates", updates },
    { "placed", placed },
    { "uneven", uneven },
};
enum { CASES = sizeof cases / sizeof cases[0] };

int main(int argc, char **argv)
{
    if (argc > 3 && !strcmp(argv[1], "--ranks")) return ranks_main(argv);
    if (argc > 1) return rank_main(cases, CASES, argv[1], on_gpus() ? 60 : 20);
    const struct CMUnitTest tests[] = {
        RANKS_TEST(on_two_and_four, "copies"),
        RANKS_TEST(on_two_and_four, "updates"),
        RANKS_TEST(on_two_and_four, "placed"),
        RANKS_TEST(on_two_and_four, "uneven"),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
