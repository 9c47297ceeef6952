/* Recipes of linear layers, step by step. */
#include "layers/precision.h"

#include <fnmatch.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "layers/functional.h"

enum { SLOTS = MT_OPERAND_COUNT * MT_DIR_COUNT };
static const char *const operand_names[MT_OPERAND_COUNT] = { "W", "X", "dY" };
static const char *const dir_names[MT_DIR_COUNT] = { "row", "col" };

typedef struct layer {
    mt_param *weight;
    mt_linear_state state;
    bool delayed[SLOTS]; /* some rule makes this slot fp8_delayed */
    mt_element element[SLOTS];
} layer;

struct mt_precision {
    mt_param_store *store;
    mt_recipe_rules *rules; /* NULL: none */
    layer *layers;
    int64_t count;
    int64_t history;
    int margin;
    bool most_recent;
    uint32_t pass;
    void *first_pass; /* device uint32 */
    uint64_t epoch;
    void *memory; /* scales and histories, device f32 */
    size_t bytes;
    void *nans; /* counts of NaN, device int64: layer by layer, W X dY, members */
    int64_t nan_count;
    mt_comm *comm;
    mt_fsdp_options shards;
    mt_fsdp *fsdp; /* NULL with one rank */
    /* With ranks: slot 0 of every history, device f32; those of weights with some members last. */
    void *amaxes;
    int64_t amax_count, amax_shared; /* shared: before those */
    void *kept; /* the same, and behind it the counts of NaN, when a step begins */
    size_t kept_bytes;
};

static bool is_shared(const mt_precision *p)
{
    return p->comm && mt_comm_size(p->comm) > 1;
}

static mt_device *device_of(const mt_precision *p)
{
    return mt_param_store_device(p->store);
}

/* ---- what rules may ask for --------------------------------------------------------------------
 */

static mt_status note_delayed(layer *l, const mt_recipe *recipe)
{
    for (int s = 0; s < SLOTS; s++) {
        const mt_format_spec *spec =
            mt_recipe_direction(recipe, (mt_operand)(s / MT_DIR_COUNT), (mt_dir)(s % MT_DIR_COUNT));
        if (!spec->format->delayed) continue;
        MT_REQUIRE(!l->delayed[s] || l->element[s] == spec->options.element, MT_ECONFIG,
                   "recipe rules: fp8_delayed in %s %s of %s is e4m3 in one rule and e5m2 in "
                   "another: its scale could not pass from one to the other",
                   operand_names[s / MT_DIR_COUNT], dir_names[s % MT_DIR_COUNT], l->weight->name);
        l->delayed[s] = true;
        l->element[s] = spec->options.element;
    }
    return MT_OK;
}

/* Reserves the largest compute copy of all the recipes that may apply to a layer. */
static mt_status reserve(mt_precision *p, layer *l)
{
    const mt_recipe_rule *rule;
    if (!p->rules) return mt_linear_reserve(l->weight, device_of(p), NULL);
    for (size_t i = 0; (rule = mt_recipe_rules_get(p->rules, i)); i++) {
        const mt_recipe *recipe = &rule->recipe;
        if (!mt_recipe_rule_covers(rule, l->weight->name)) continue;
        MT_TRY(mt_linear_reserve(l->weight, device_of(p), recipe));
        MT_TRY(note_delayed(l, recipe));
        for (int d = 0; d < MT_DIR_COUNT; d++)
            mt_param_reserve_atom(
                l->weight,
                mt_recipe_direction(recipe, MT_OPERAND_W, (mt_dir)d)->format->shard_atom);
    }
    return MT_OK;
}

static mt_status check_options(const mt_precision_options *o)
{
    MT_REQUIRE(o->history >= 2, MT_ECONFIG,
               "recipe.delayed.history is %" PRId64 ", must be 2 or "
               "more",
               o->history);
    MT_REQUIRE(o->margin >= 0 && o->margin <= MT_MARGIN_MAX, MT_ECONFIG,
               "recipe.delayed.margin is %" PRId64 ", must be in [0, %d]", o->margin,
               MT_MARGIN_MAX);
    return MT_OK;
}

/* A rule that is for no layer was meant for one. */
static mt_status check_rules(const mt_precision *p)
{
    const mt_recipe_rule *rule;
    for (size_t i = 0; p->rules && (rule = mt_recipe_rules_get(p->rules, i)); i++)
        if (rule->layers)
            MT_TRY(mt_param_store_check_pattern(p->store, "recipe rules: layers=", rule->layers));
    return MT_OK;
}

static mt_status build(mt_precision *p, const mt_precision_options *o)
{
    int64_t params = mt_param_store_count(p->store);
    p->layers = calloc((size_t)params + 1, sizeof *p->layers);
    MT_REQUIRE(p->layers, MT_ENOMEM, "precision: out of memory for %" PRId64 " layers", params);
    if (o && o->rules) {
        MT_TRY(check_options(o));
        MT_TRY(mt_recipe_rules_copy(&p->rules, o->rules));
        p->history = o->history, p->margin = (int)o->margin, p->most_recent = o->most_recent;
    }
    for (int64_t i = 0; i < params; i++) {
        mt_param *w = mt_param_store_get(p->store, i);
        if (!w->packed) continue;
        layer *l = &p->layers[p->count++];
        l->weight = w;
        if (o) {
            l->state.save_original_input = o->save_original_input;
            l->state.save_expert_output = o->save_expert_output;
            l->state.seed = (uint32_t)o->seed ^ (uint32_t)(o->seed >> 32);
            l->state.stream = (uint32_t)i * MT_OPERAND_COUNT;
            l->state.pass = &p->pass;
        }
        MT_TRY(reserve(p, l));
    }
    return check_rules(p);
}

mt_status mt_precision_create(mt_precision **precision, mt_param_store *store,
                              const mt_precision_options *options)
{
    *precision = NULL;
    mt_precision *p = calloc(1, sizeof *p);
    MT_REQUIRE(p, MT_ENOMEM, "precision: out of memory");
    p->store = store;
    if (options) p->comm = options->comm, p->shards = options->shards;
    if (is_shared(p)) mt_param_store_shard(store, mt_comm_rank(p->comm), mt_comm_size(p->comm));
    if (is_shared(p) && options->mesh) {
        mt_comm *replicas = p->shards.replicas = options->mesh->replicas;
        mt_param_store_shard_members(store, mt_comm_rank(replicas), mt_comm_size(replicas));
    }
    if (options && options->offload) mt_param_store_offload(store);
    mt_status status = options ? mt_param_store_set_master(store, options->master) : MT_OK;
    if (status == MT_OK) status = build(p, options);
    if (status == MT_OK && options && options->bf16_grads)
        status = mt_param_store_set_grad_dtype(store, MT_BF16);
    if (status != MT_OK) {
        mt_precision_destroy(&p);
        return mt_error_pass(status, __FILE__, __LINE__);
    }
    *precision = p;
    return MT_OK;
}

void mt_precision_destroy(mt_precision **precision)
{
    mt_precision *p = *precision;
    if (!p) return;
    mt_fsdp_destroy(&p->fsdp);
    mt_device_free(device_of(p), &p->memory, p->bytes, MT_MEMORY_STATE);
    mt_device_free(device_of(p), &p->first_pass, sizeof(uint32_t), MT_MEMORY_STATE);
    mt_device_free(device_of(p), &p->amaxes, (size_t)p->amax_count * sizeof(float),
                   MT_MEMORY_STATE);
    mt_device_free(device_of(p), &p->kept, p->kept_bytes, MT_MEMORY_STATE);
    mt_device_free(device_of(p), &p->nans, (size_t)p->nan_count * sizeof(int64_t), MT_MEMORY_STATE);
    mt_recipe_rules_destroy(&p->rules);
    free(p->layers);
    free(p);
    *precision = NULL;
}

/* ---- delayed scaling ---------------------------------------------------------------------------
 */

static struct mt_delayed *delayed_of(layer *l, int slot)
{
    return &l->state.delayed[slot / MT_DIR_COUNT][slot % MT_DIR_COUNT];
}

/* Scales [N] of 1 and histories [length, N] of 0 for every slot that is ever delayed. */
static mt_status make_delayed(mt_precision *p)
{
    int64_t floats = 0;
    for (int64_t i = 0; i < p->count; i++)
        for (int s = 0; s < SLOTS; s++)
            if (p->layers[i].delayed[s])
                floats += (p->history + 1) * p->layers[i].weight->group.members;
    p->bytes = (size_t)floats * sizeof(float);
    MT_TRY(mt_device_alloc(device_of(p), &p->memory, p->bytes, MT_MEMORY_STATE));
    MT_TRY(mt_device_zero(device_of(p), p->memory, p->bytes));
    float *at = p->memory, one = 1;
    for (int64_t i = 0; i < p->count; i++)
        for (int s = 0; s < SLOTS; s++) {
            int64_t n = p->layers[i].weight->group.members;
            if (!p->layers[i].delayed[s]) continue;
            *delayed_of(&p->layers[i], s) = (struct mt_delayed){ at, at + n };
            for (int64_t e = 0; e < n; e++)
                MT_TRY(mt_device_copy(device_of(p), at + e, &one, sizeof one));
            at += (p->history + 1) * n;
        }
    return MT_OK;
}

/* Whether this rank has only some members of a layer's weight. */
static bool has_some(const layer *l)
{
    return l->weight->all_members > l->weight->group.members;
}

/* Slot 0 of every history to `memory`, or back. */
static mt_status move_amaxes(mt_precision *p, mt_stream *stream, void *memory, bool back)
{
    float *at = memory;
    for (int64_t i = 0; i < 2 * p->count; i++)
        for (int s = 0; s < SLOTS; s++) {
            layer *l = &p->layers[i % p->count];
            if (!l->delayed[s] || has_some(l) != (i >= p->count)) continue;
            float *slot = delayed_of(l, s)->history;
            int64_t n = l->weight->group.members;
            MT_TRY(mt_device_copy_async(stream, back ? slot : at, back ? at : slot,
                                        (size_t)n * sizeof *at));
            at += n;
        }
    return MT_OK;
}

/* Amaxes of delayed scaling: the same number in slot 0 of every history. */
static int64_t count_amaxes(const mt_precision *p)
{
    return (int64_t)(p->bytes / sizeof(float)) / (p->history + 1);
}

static mt_status make_amaxes(mt_precision *p)
{
    if (p->amaxes) return MT_OK;
    for (int64_t i = 0; i < p->count; i++)
        for (int s = 0; s < SLOTS; s++)
            if (p->layers[i].delayed[s] && !has_some(&p->layers[i]))
                p->amax_shared += p->layers[i].weight->group.members;
    p->amax_count = count_amaxes(p);
    return mt_device_alloc(device_of(p), &p->amaxes, (size_t)p->amax_count * sizeof(float),
                           MT_MEMORY_STATE);
}

/* The step's amaxes over all ranks, those of experts over all that have them. */
static mt_status reduce_amaxes(mt_precision *p, mt_stream *stream)
{
    if (!is_shared(p) || !count_amaxes(p)) return MT_OK;
    MT_TRY(make_amaxes(p));
    MT_TRY(move_amaxes(p, stream, p->amaxes, false));
    MT_TRY(mt_comm_all_reduce(p->comm, stream, p->amaxes, p->amax_shared, MT_F32, MT_REDUCE_MAX,
                              "amaxes of delayed scaling"));
    if (p->amax_count > p->amax_shared)
        MT_TRY(mt_comm_all_reduce(p->shards.replicas, stream, (float *)p->amaxes + p->amax_shared,
                                  p->amax_count - p->amax_shared, MT_F32, MT_REDUCE_MAX,
                                  "amaxes of experts"));
    return move_amaxes(p, stream, p->amaxes, true);
}

/* Bytes of the amaxes in what is kept of a step's beginning. */
static size_t kept_amaxes(const mt_precision *p)
{
    enum { ALIGN = 256 };
    size_t bytes = (size_t)count_amaxes(p) * sizeof(float);
    return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

mt_status mt_precision_keep(mt_precision *p, mt_stream *stream)
{
    size_t nans = (size_t)p->nan_count * sizeof(int64_t);
    if (!p->rules) return MT_OK;
    if (!p->kept) {
        p->kept_bytes = kept_amaxes(p) + nans;
        MT_TRY(mt_device_alloc(device_of(p), &p->kept, p->kept_bytes, MT_MEMORY_STATE));
    }
    MT_TRY(move_amaxes(p, stream, p->kept, false));
    return mt_device_copy_async(stream, (char *)p->kept + kept_amaxes(p), p->nans, nans);
}

mt_status mt_precision_restore(mt_precision *p, mt_stream *stream)
{
    if (!p->rules) return MT_OK;
    MT_TRY(move_amaxes(p, stream, p->kept, true));
    return mt_device_copy_async(stream, p->nans, (char *)p->kept + kept_amaxes(p),
                                (size_t)p->nan_count * sizeof(int64_t));
}

mt_status mt_precision_end_step(mt_precision *p, mt_stream *stream)
{
    MT_TRY(reduce_amaxes(p, stream));
    for (int64_t i = 0; i < p->count; i++) {
        layer *l = &p->layers[i];
        for (int s = 0; s < SLOTS; s++) {
            const struct mt_delayed *d = delayed_of(l, s);
            if (!l->delayed[s]) continue;
            MT_TRY(mt_delayed_update(
                stream, &(struct mt_delayed_update_args){ .dtype = l->weight->compute,
                                                          .members = l->weight->group.members,
                                                          .length = p->history,
                                                          .margin = p->margin,
                                                          .element = l->element[s],
                                                          .most_recent = p->most_recent,
                                                          .history = d->history,
                                                          .scale = d->scale }));
        }
    }
    return MT_OK;
}

int64_t mt_precision_state_count(const mt_precision *p)
{
    int64_t count = 0;
    for (int64_t i = 0; i < p->count; i++)
        for (int s = 0; s < SLOTS; s++) count += 2 * p->layers[i].delayed[s];
    return count;
}

const mt_param *mt_precision_state_weight(const mt_precision *p, int64_t i)
{
    for (int64_t l = 0; l < p->count; l++)
        for (int s = 0; s < SLOTS; s++)
            if (p->layers[l].delayed[s] && (i -= 2) < 0) return p->layers[l].weight;
    return NULL;
}

mt_tensor mt_precision_state(const mt_precision *p, int64_t i, char name[256])
{
    for (int64_t l = 0; l < p->count; l++)
        for (int s = 0; s < SLOTS; s++) {
            layer *at = &p->layers[l];
            if (!at->delayed[s] || (i -= 2) >= 0) continue;
            const struct mt_delayed *d = delayed_of(at, s);
            bool scale = i == -2;
            snprintf(name, 256, "%s.%s_%s.%s", at->weight->name, operand_names[s / MT_DIR_COUNT],
                     dir_names[s % MT_DIR_COUNT], scale ? "scale" : "history");
            int64_t n = at->weight->group.members;
            return scale ? mt_tensor_1d(d->scale, MT_F32, n)
                         : mt_tensor_2d(d->history, MT_F32, p->history, n);
        }
    return (mt_tensor){ 0 };
}

/* ---- NaNs --------------------------------------------------------------------------------------
 */

/* Counts for every operand of every layer, 0; none where nothing is ever quantized. */
static mt_status make_nans(mt_precision *p)
{
    int64_t count = 0;
    for (int64_t i = 0; p->rules && i < p->count; i++)
        count += MT_OPERAND_COUNT * p->layers[i].weight->group.members;
    size_t bytes = (size_t)count * sizeof(int64_t);
    MT_TRY(mt_device_alloc(device_of(p), &p->nans, bytes, MT_MEMORY_STATE));
    p->nan_count = count;
    MT_TRY(mt_device_zero(device_of(p), p->nans, bytes));
    int64_t *at = p->nans;
    for (int64_t i = 0; count && i < p->count; i++)
        for (int o = 0; o < MT_OPERAND_COUNT; o++) {
            p->layers[i].state.nan[o] = at;
            at += p->layers[i].weight->group.members;
        }
    return MT_OK;
}

mt_tensor mt_precision_nans(const mt_precision *p)
{
    return mt_tensor_1d(p->nans, MT_I64, p->nan_count);
}

int64_t mt_precision_nan_count(const mt_precision *p)
{
    int64_t count = 0;
    for (int64_t i = 0; p->nan_count && i < p->count; i++)
        count += MT_OPERAND_COUNT * p->layers[i].weight->all_members;
    return count;
}

/* Between this rank's counts and those of all members. */
static mt_status copy_nans(const mt_precision *p, int64_t *counts, bool back)
{
    for (int64_t i = 0; p->nan_count && i < p->count; i++)
        for (int o = 0; o < MT_OPERAND_COUNT; o++) {
            const mt_param *w = p->layers[i].weight;
            int64_t *own = p->layers[i].state.nan[o], *here = counts + w->first_member;
            MT_TRY(mt_device_copy(device_of(p), back ? own : here, back ? here : own,
                                  (size_t)w->group.members * sizeof *own));
            counts += w->all_members;
        }
    return MT_OK;
}

mt_status mt_precision_sum_nans(const mt_precision *p, int64_t *counts)
{
    int64_t n = mt_precision_nan_count(p);
    memset(counts, 0, (size_t)n * sizeof *counts);
    MT_TRY(copy_nans(p, counts, false));
    if (!is_shared(p)) return MT_OK;
    return mt_comm_all_reduce(p->comm, NULL, counts, n, MT_I64, MT_REDUCE_SUM, "counts of NaN");
}

/* The first of the ranks that have a weight's members. */
mt_status mt_precision_set_nans(const mt_precision *p, const int64_t *counts)
{
    int64_t n = mt_precision_nan_count(p), *own = malloc((size_t)(n + 1) * sizeof *own), at = 0;
    MT_REQUIRE(own, MT_ENOMEM, "no memory for %" PRId64 " counts of NaN", n);
    for (int64_t i = 0; n && i < p->count; i++) {
        const mt_param *w = p->layers[i].weight;
        bool first = mt_param_store_unit(p->store, w->unit).rank == 0;
        for (int64_t j = 0; j < MT_OPERAND_COUNT * w->all_members; j++, at++)
            own[at] = first ? counts[at] : 0;
    }
    mt_status status = copy_nans(p, own, true);
    free(own);
    return status;
}

const char *mt_precision_nans_of(const mt_precision *p, int64_t first, const char **operand,
                                 int64_t *members)
{
    for (int64_t i = 0; i < p->count; i++) {
        const mt_param *w = p->layers[i].weight;
        int64_t n = w->all_members;
        if (first < MT_OPERAND_COUNT * n) {
            *operand = operand_names[first / n];
            *members = n;
            return w->name;
        }
        first -= MT_OPERAND_COUNT * n;
    }
    return NULL;
}

/* ---- steps -------------------------------------------------------------------------------------
 */

/* Compute copies of recipes that have just been set. */
static mt_status lay_out(mt_precision *p)
{
    if (p->fsdp) return mt_fsdp_layout(p->fsdp);
    if (is_shared(p)) return mt_fsdp_create(&p->fsdp, p->store, p->comm, &p->shards);
    for (int64_t i = 0; i < p->count; i++)
        MT_TRY(mt_linear_place(p->layers[i].weight, device_of(p)));
    return MT_OK;
}

mt_fsdp *mt_precision_fsdp(const mt_precision *p)
{
    return p->fsdp;
}

mt_status mt_precision_set_step(mt_precision *p, int64_t step, bool *changed)
{
    *changed = false;
    for (int64_t i = 0; p->rules && i < p->count; i++) {
        layer *l = &p->layers[i];
        const mt_recipe *recipe = mt_recipe_rules_select(p->rules, l->weight->name, step);
        if (l->weight->linear && mt_recipe_equal(recipe, &l->state.recipe)) continue;
        l->state.recipe = *recipe;
        l->weight->linear = &l->state;
        *changed = true;
    }
    p->epoch += *changed;
    return *changed ? lay_out(p) : MT_OK;
}

mt_status mt_precision_start(mt_precision *p)
{
    bool changed;
    MT_TRY(mt_device_alloc(device_of(p), &p->first_pass, sizeof(uint32_t), MT_MEMORY_STATE));
    MT_TRY(mt_device_zero(device_of(p), p->first_pass, sizeof(uint32_t)));
    for (int64_t i = 0; i < p->count; i++)
        if (p->layers[i].state.pass) p->layers[i].state.first_pass = p->first_pass;
    MT_TRY(make_delayed(p));
    MT_TRY(make_nans(p));
    if (p->rules) return mt_precision_set_step(p, 0, &changed);
    for (int64_t i = 0; i < p->count; i++) {
        layer *l = &p->layers[i];
        l->state.recipe = mt_recipe_plain(l->weight->compute);
        l->weight->linear = &l->state;
    }
    return lay_out(p);
}

void mt_precision_observe(mt_precision *p, const char *layers,
                          mt_status (*observe)(void *observer, const mt_param *weight,
                                               mt_operand operand, const mt_qtensor *plain),
                          void *observer)
{
    for (int64_t i = 0; i < p->count; i++) {
        bool chosen = fnmatch(layers, p->layers[i].weight->name, 0) == 0;
        p->layers[i].state.observe = chosen ? observe : NULL;
        p->layers[i].state.observer = observer;
    }
}

bool mt_precision_observed(const mt_precision *p)
{
    for (int64_t i = 0; i < p->count; i++)
        if (p->layers[i].state.observe) return true;
    return false;
}

uint64_t mt_precision_epoch(const mt_precision *p)
{
    return p->epoch;
}

void mt_precision_set_pass(mt_precision *p, uint32_t pass)
{
    p->pass = pass;
}

mt_status mt_precision_set_first_pass(mt_precision *p, uint32_t first)
{
    p->pass = 0;
    return mt_device_copy(device_of(p), p->first_pass, &first, sizeof first);
}

bool mt_precision_rows_share(const mt_precision *p)
{
    for (int64_t i = 0; i < p->count; i++) {
        const mt_format_spec *x =
            mt_recipe_direction(&p->layers[i].state.recipe, MT_OPERAND_X, MT_ROW);
        if (mt_format_needs_amax(x->format) || x->options.two_d) return true;
    }
    return false;
}

bool mt_precision_changes_after(const mt_precision *p, int64_t step)
{
    return p->rules && mt_recipe_rules_next_change(p->rules, step) == step + 1;
}

mt_status mt_precision_refresh(mt_precision *p, mt_stream *stream)
{
    if (p->fsdp) return mt_fsdp_refresh(p->fsdp, stream);
    MT_TRY(mt_param_store_refresh(p->store, stream));
    for (int64_t i = 0; i < p->count; i++) MT_TRY(mt_linear_refresh(p->layers[i].weight, stream));
    return MT_OK;
}

/* The master of a weight from codes of a direction: those of its compute copy, or, where that holds
 * what they decode to, codes made for the moment. */
static mt_status dequantize_master(mt_stream *stream, const mt_param *w, mt_dir dir)
{
    void *master = w->own_master ? w->own_master : (void *)w->view, *memory = NULL;
    mt_qtensor q = mt_qtensor_select(&w->weight, dir);
    mt_qtensor source = mt_qtensor_plain(w->group, w->dtype, master);
    struct mt_quantize_args args = mt_linear_quantize_args(w, MT_OPERAND_W);
    bool decoded = q.dir[dir].layout == MT_LAYOUT_DECODED;
    mt_status status = MT_OK;
    size_t bytes = 0;
    if (decoded) {
        if (!w->own_master) MT_TRY(mt_linear_master(w, stream, &master));
        q.dir[dir] = mt_direction_of(mt_direction_spec(&q.dir[dir]));
        bytes = mt_qtensor_bytes(&q);
        MT_TRY(mt_device_alloc(stream->device, &memory, bytes, MT_MEMORY_STATE));
        mt_qtensor_place(&q, memory);
        args.src = &source, args.out = &q;
        MT_TRY_CLEANUP(mt_quantize(stream, &args));
    }
    MT_TRY_CLEANUP(mt_dequantize(
        stream,
        &(struct mt_dequantize_args){
            .dtype = w->compute, .src = &q, .dir = dir, .y = master, .y_dtype = w->dtype }));
    if (decoded) MT_TRY_CLEANUP(mt_device_synchronize(stream->device));
cleanup:
    mt_device_free(stream->device, &memory, bytes, MT_MEMORY_STATE);
    return status;
}

mt_status mt_precision_quantized_init(mt_precision *p, mt_stream *stream)
{
    MT_TRY(mt_precision_refresh(p, stream));
    if (p->fsdp) return mt_fsdp_quantized_masters(p->fsdp, stream);
    for (int64_t i = 0; i < p->count; i++) {
        mt_param *w = p->layers[i].weight;
        int dir = 0;
        while (dir < MT_DIR_COUNT && w->weight.dir[dir].layout == MT_LAYOUT_PACKED) dir++;
        if (dir == MT_DIR_COUNT) continue;
        MT_TRY(dequantize_master(stream, w, (mt_dir)dir));
        if (!w->own_master) MT_TRY(mt_param_split_view(p->store, w));
    }
    return MT_OK;
}
