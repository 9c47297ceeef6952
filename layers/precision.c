/* Recipes of linear layers, step by step. */
#include "layers/precision.h"

#include <fnmatch.h>
#include <inttypes.h>
#include <stdlib.h>

#include "layers/linear_priv.h"
#include "layers/precision_priv.h"

/* ---- what rules may ask for --------------------------------------------------------------------
 */

static mt_status note_delayed(mt_precision_layer *l, const mt_recipe *recipe)
{
    for (int s = 0; s < MT_PRECISION_SLOTS; s++) {
        const mt_format_spec *spec =
            mt_recipe_direction(recipe, (mt_operand)(s / MT_DIR_COUNT), (mt_dir)(s % MT_DIR_COUNT));
        if (!spec->format->delayed) continue;
        MT_REQUIRE(!l->delayed[s] || l->element[s] == spec->options.element, MT_ECONFIG,
                   "recipe rules: fp8_delayed in %s %s of %s is e4m3 in one rule and e5m2 in "
                   "another: its scale could not pass from one to the other",
                   mt_precision_operands[s / MT_DIR_COUNT], mt_precision_dirs[s % MT_DIR_COUNT],
                   l->weight->name);
        l->delayed[s] = true;
        l->element[s] = spec->options.element;
    }
    return MT_OK;
}

/* Reserves the largest compute copy of all the recipes that may apply to a layer. */
static mt_status reserve(mt_precision *p, mt_precision_layer *l)
{
    const mt_recipe_rule *rule;
    if (!p->rules) return mt_linear_reserve(l->weight, mt_precision_device(p), NULL);
    for (size_t i = 0; (rule = mt_recipe_rules_get(p->rules, i)); i++) {
        const mt_recipe *recipe = &rule->recipe;
        if (!mt_recipe_rule_covers(rule, l->weight->name)) continue;
        MT_TRY(mt_linear_reserve(l->weight, mt_precision_device(p), recipe));
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
    MT_REQUIRE(o->history >= 2 && o->history <= MT_HISTORY_MAX, MT_ECONFIG,
               "recipe.delayed.history is %" PRId64 ", must be from 2 to %d", o->history,
               MT_HISTORY_MAX);
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

static mt_status open_lanes(mt_precision *p)
{
    mt_device *device = mt_precision_device(p);
    MT_TRY(mt_event_create(&p->begun, device));
    for (int i = 0; i < MT_PRECISION_LANES; i++) {
        MT_TRY(mt_stream_create(&p->lanes[i], device));
        MT_TRY(mt_event_create(&p->ended[i], device));
    }
    return MT_OK;
}

static mt_status build(mt_precision *p, const mt_precision_options *o)
{
    int64_t params = mt_param_store_count(p->store);
    p->layers = calloc((size_t)params + 1, sizeof *p->layers);
    MT_REQUIRE(p->layers, MT_ENOMEM, "precision: out of memory for %" PRId64 " layers", params);
    if (o && o->rules) {
        MT_TRY(check_options(o));
        if (!mt_precision_is_shared(p)) MT_TRY(open_lanes(p)); /* ranks refresh unit by unit */
        MT_TRY(mt_recipe_rules_copy(&p->rules, o->rules));
        p->history = o->history, p->margin = (int)o->margin, p->most_recent = o->most_recent;
    }
    for (int64_t i = 0; i < params; i++) {
        mt_param *w = mt_param_store_get(p->store, i);
        if (!w->packed) continue;
        mt_precision_layer *l = &p->layers[p->count++];
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
    if (mt_precision_is_shared(p))
        mt_param_store_shard(store, mt_comm_rank(p->comm), mt_comm_size(p->comm));
    if (mt_precision_is_shared(p) && options->mesh) {
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
    mt_device_free(mt_precision_device(p), &p->first_pass, sizeof(uint32_t), MT_MEMORY_STATE);
    mt_precision_free_state(p);
    for (int i = 0; i < MT_PRECISION_LANES; i++)
        mt_stream_destroy(&p->lanes[i]), mt_event_destroy(&p->ended[i]);
    mt_event_destroy(&p->begun);
    mt_recipe_rules_destroy(&p->rules);
    free(p->layers);
    free(p);
    *precision = NULL;
}

/* ---- steps -------------------------------------------------------------------------------------
 */

/* Compute copies of recipes that have just been set. */
static mt_status lay_out(mt_precision *p)
{
    if (p->fsdp) return mt_fsdp_layout(p->fsdp);
    if (mt_precision_is_shared(p)) return mt_fsdp_create(&p->fsdp, p->store, p->comm, &p->shards);
    for (int64_t i = 0; i < p->count; i++)
        MT_TRY(mt_linear_place(p->layers[i].weight, mt_precision_device(p)));
    return MT_OK;
}

mt_fsdp *mt_precision_fsdp(const mt_precision *p)
{
    return p->fsdp;
}

mt_status mt_precision_set_step(mt_precision *p, int64_t step, bool *changed)
{
    *changed = false;
    MT_REQUIRE(step >= 0, MT_EINVAL, "precision: step %" PRId64 ", must not be negative", step);
    for (int64_t i = 0; p->rules && i < p->count; i++) {
        mt_precision_layer *l = &p->layers[i];
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
    MT_TRY(
        mt_device_alloc(mt_precision_device(p), &p->first_pass, sizeof(uint32_t), MT_MEMORY_STATE));
    MT_TRY(mt_device_zero(mt_precision_device(p), p->first_pass, sizeof(uint32_t)));
    for (int64_t i = 0; i < p->count; i++)
        if (p->layers[i].state.pass) p->layers[i].state.first_pass = p->first_pass;
    MT_TRY(mt_precision_make_state(p));
    if (p->rules) return mt_precision_set_step(p, 0, &changed);
    for (int64_t i = 0; i < p->count; i++) {
        mt_precision_layer *l = &p->layers[i];
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
    return mt_device_copy(mt_precision_device(p), p->first_pass, &first, sizeof first);
}

/* Whether fprop may level rows of some members. */
static bool may_level(mt_device *device, const mt_precision_layer *l, const mt_format_spec *x)
{
    const struct mt_kernels *kernels = device->kernels[l->weight->compute];
    const mt_format_spec *w = mt_recipe_direction(&l->state.recipe, MT_OPERAND_W, MT_ROW);
    return kernels->gemm_codes && kernels->gemm_codes(MT_GEMM_TN, w, x) == MT_GEMM_LEVELS;
}

bool mt_precision_rows_share(const mt_precision *p)
{
    for (int64_t i = 0; i < p->count; i++) {
        const mt_format_spec *x =
            mt_recipe_direction(&p->layers[i].state.recipe, MT_OPERAND_X, MT_ROW);
        if (mt_format_needs_amax(x->format) || x->options.two_d ||
            may_level(mt_precision_device(p), &p->layers[i], x))
            return true;
    }
    return false;
}

bool mt_precision_changes_after(const mt_precision *p, int64_t step)
{
    return p->rules && mt_recipe_rules_next_change(p->rules, step) == step + 1;
}

/* What begins on the lanes comes after what the stream was given; the stream goes on behind it. */
static mt_status fork_lanes(mt_precision *p, mt_stream *stream)
{
    MT_TRY(mt_event_record(&p->begun, stream));
    for (int i = 0; i < MT_PRECISION_LANES; i++) MT_TRY(mt_event_wait(&p->begun, &p->lanes[i]));
    return MT_OK;
}
static mt_status join_lanes(mt_precision *p, mt_stream *stream)
{
    for (int i = 0; i < MT_PRECISION_LANES; i++) {
        MT_TRY(mt_event_record(&p->ended[i], &p->lanes[i]));
        MT_TRY(mt_event_wait(&p->ended[i], stream));
    }
    return MT_OK;
}

mt_status mt_precision_refresh(mt_precision *p, mt_stream *stream)
{
    int64_t aside = 0;
    if (p->fsdp) return mt_fsdp_refresh(p->fsdp, stream);
    MT_TRY(mt_param_store_refresh(p->store, stream));
    for (int64_t i = 0; p->lanes[0].impl && i < p->count; i++)
        aside += mt_linear_goes_aside(p->layers[i].weight);
    if (aside) MT_TRY(fork_lanes(p, stream));
    mt_status status = MT_OK;
    for (int64_t i = 0, n = 0; status == MT_OK && i < p->count; i++) {
        mt_param *w = p->layers[i].weight;
        int lane = aside && mt_linear_goes_aside(w) ? (int)(n++ % (MT_PRECISION_LANES + 1)) : 0;
        status = mt_linear_refresh(w, lane ? &p->lanes[lane - 1] : stream);
    }
    if (status == MT_OK) return aside ? join_lanes(p, stream) : MT_OK;
    mt_error_kept why; /* a graph that is being recorded is left whole */
    mt_error_keep(&why);
    if (aside) (void)join_lanes(p, stream);
    mt_error_put_back(&why);
    return mt_error_pass(status, __FILE__, __LINE__);
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
    if (p->fsdp) MT_TRY(mt_fsdp_quantized_masters(p->fsdp, stream));
    for (int64_t i = 0; !p->fsdp && i < p->count; i++) {
        mt_param *w = p->layers[i].weight;
        int dir = 0;
        while (dir < MT_DIR_COUNT && w->weight.dir[dir].layout == MT_LAYOUT_PACKED) dir++;
        if (dir == MT_DIR_COUNT) continue;
        MT_TRY(dequantize_master(stream, w, (mt_dir)dir));
        if (!w->own_master) MT_TRY(mt_param_split_view(p->store, w));
    }
    return mt_precision_forget(p);
}
