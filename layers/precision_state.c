/* What passes leave behind for steps to come, and checkpoints hold: amax histories and scales of
 * delayed scaling, counts of NaN. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "layers/precision_priv.h"

const char *const mt_precision_operands[MT_OPERAND_COUNT] = { "W", "X", "dY" };
const char *const mt_precision_dirs[MT_DIR_COUNT] = { "row", "col" };

/* ---- delayed scaling ---------------------------------------------------------------------------
 */

static struct mt_delayed *delayed_of(mt_precision_layer *l, int slot)
{
    return &l->state.delayed[slot / MT_DIR_COUNT][slot % MT_DIR_COUNT];
}

/* Scales [N] and histories [length, N] for every slot that is ever delayed. */
static mt_status make_delayed(mt_precision *p)
{
    int64_t floats = 0;
    for (int64_t i = 0; i < p->count; i++)
        for (int s = 0; s < MT_PRECISION_SLOTS; s++)
            if (p->layers[i].delayed[s])
                floats += (p->history + 1) * p->layers[i].weight->group.members;
    p->bytes = (size_t)floats * sizeof(float);
    MT_TRY(mt_device_alloc(mt_precision_device(p), &p->memory, p->bytes, MT_MEMORY_STATE));
    float *at = p->memory;
    for (int64_t i = 0; i < p->count; i++)
        for (int s = 0; s < MT_PRECISION_SLOTS; s++) {
            int64_t n = p->layers[i].weight->group.members;
            if (!p->layers[i].delayed[s]) continue;
            *delayed_of(&p->layers[i], s) = (struct mt_delayed){ at, at + n };
            at += (p->history + 1) * n;
        }
    return mt_precision_forget(p);
}

/* The scales of a slot at once: a copy takes a GPU as long as thousands of them. */
mt_status mt_precision_forget(const mt_precision *p)
{
    int64_t most = 0;
    for (int64_t i = 0; i < p->count; i++)
        if (p->layers[i].weight->group.members > most) most = p->layers[i].weight->group.members;
    float *ones = malloc((size_t)(most + 1) * sizeof *ones);
    MT_REQUIRE(ones, MT_ENOMEM, "precision: no memory for %" PRId64 " scales", most);
    for (int64_t e = 0; e < most; e++) ones[e] = 1;
    mt_status status = mt_device_zero(mt_precision_device(p), p->memory, p->bytes);
    for (int64_t i = 0; status == MT_OK && i < p->count; i++)
        for (int s = 0; status == MT_OK && s < MT_PRECISION_SLOTS; s++) {
            mt_precision_layer *l = &p->layers[i];
            if (!l->delayed[s]) continue;
            status = mt_device_copy(mt_precision_device(p), delayed_of(l, s)->scale, ones,
                                    (size_t)l->weight->group.members * sizeof *ones);
        }
    free(ones);
    return status;
}

/* Whether this rank has only some members of a layer's weight. */
static bool has_some(const mt_precision_layer *l)
{
    return l->weight->all_members > l->weight->group.members;
}

/* Slot 0 of every history to `memory`, or back. */
static mt_status move_amaxes(mt_precision *p, mt_stream *stream, void *memory, bool back)
{
    float *at = memory;
    for (int64_t i = 0; i < 2 * p->count; i++)
        for (int s = 0; s < MT_PRECISION_SLOTS; s++) {
            mt_precision_layer *l = &p->layers[i % p->count];
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
        for (int s = 0; s < MT_PRECISION_SLOTS; s++)
            if (p->layers[i].delayed[s] && !has_some(&p->layers[i]))
                p->amax_shared += p->layers[i].weight->group.members;
    p->amax_count = count_amaxes(p);
    return mt_device_alloc(mt_precision_device(p), &p->amaxes,
                           (size_t)p->amax_count * sizeof(float), MT_MEMORY_STATE);
}

/* The step's amaxes over all ranks, those of experts over all that have them. */
static mt_status reduce_amaxes(mt_precision *p, mt_stream *stream)
{
    if (!mt_precision_is_shared(p) || !count_amaxes(p)) return MT_OK;
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

mt_status mt_precision_end_step(mt_precision *p, mt_stream *stream)
{
    MT_TRY(reduce_amaxes(p, stream));
    for (int64_t i = 0; i < p->count; i++) {
        mt_precision_layer *l = &p->layers[i];
        for (int s = 0; s < MT_PRECISION_SLOTS; s++) {
            const struct mt_delayed *d = delayed_of(l, s);
            const bool both = s % MT_DIR_COUNT == MT_ROW && l->delayed[s + MT_COL - MT_ROW];
            if (!l->delayed[s]) continue;
            MT_TRY(mt_delayed_update(stream, &(struct mt_delayed_update_args){
                                                 .dtype = l->weight->compute,
                                                 .members = l->weight->group.members,
                                                 .length = p->history,
                                                 .margin = p->margin,
                                                 .element = l->element[s],
                                                 .most_recent = p->most_recent,
                                                 .history = d->history,
                                                 .scale = d->scale,
                                                 .other = both ? d[MT_COL].history : NULL }));
        }
    }
    return MT_OK;
}

int64_t mt_precision_state_count(const mt_precision *p)
{
    int64_t count = 0;
    for (int64_t i = 0; i < p->count; i++)
        for (int s = 0; s < MT_PRECISION_SLOTS; s++) count += 2 * p->layers[i].delayed[s];
    return count;
}

const mt_param *mt_precision_state_weight(const mt_precision *p, int64_t i)
{
    for (int64_t l = 0; l < p->count; l++)
        for (int s = 0; s < MT_PRECISION_SLOTS; s++)
            if (p->layers[l].delayed[s] && (i -= 2) < 0) return p->layers[l].weight;
    return NULL;
}

mt_tensor mt_precision_state(const mt_precision *p, int64_t i, char name[256])
{
    for (int64_t l = 0; l < p->count; l++)
        for (int s = 0; s < MT_PRECISION_SLOTS; s++) {
            mt_precision_layer *at = &p->layers[l];
            if (!at->delayed[s] || (i -= 2) >= 0) continue;
            const struct mt_delayed *d = delayed_of(at, s);
            bool scale = i == -2;
            snprintf(name, 256, "%s.%s_%s.%s", at->weight->name,
                     mt_precision_operands[s / MT_DIR_COUNT], mt_precision_dirs[s % MT_DIR_COUNT],
                     scale ? "scale" : "history");
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
    MT_TRY(mt_device_alloc(mt_precision_device(p), &p->nans, bytes, MT_MEMORY_STATE));
    p->nan_count = count;
    MT_TRY(mt_device_zero(mt_precision_device(p), p->nans, bytes));
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

void mt_precision_count_all(mt_precision *p, bool all)
{
    for (int64_t i = 0; i < p->count; i++) p->layers[i].state.counts_all = all;
}

bool mt_precision_counts_all(const mt_precision *p)
{
    return p->nan_count && p->layers[0].state.counts_all;
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
            MT_TRY(mt_device_copy(mt_precision_device(p), back ? own : here, back ? here : own,
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
    if (!mt_precision_is_shared(p)) return MT_OK;
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
            *operand = mt_precision_operands[first / n];
            *members = n;
            return w->name;
        }
        first -= MT_OPERAND_COUNT * n;
    }
    return NULL;
}

/* ---- both --------------------------------------------------------------------------------------
 */

mt_status mt_precision_make_state(mt_precision *p)
{
    MT_TRY(make_delayed(p));
    return make_nans(p);
}

void mt_precision_free_state(mt_precision *p)
{
    mt_device_free(mt_precision_device(p), &p->memory, p->bytes, MT_MEMORY_STATE);
    mt_device_free(mt_precision_device(p), &p->amaxes, (size_t)p->amax_count * sizeof(float),
                   MT_MEMORY_STATE);
    mt_device_free(mt_precision_device(p), &p->kept, p->kept_bytes, MT_MEMORY_STATE);
    mt_device_free(mt_precision_device(p), &p->nans, (size_t)p->nan_count * sizeof(int64_t),
                   MT_MEMORY_STATE);
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
        MT_TRY(mt_device_alloc(mt_precision_device(p), &p->kept, p->kept_bytes, MT_MEMORY_STATE));
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
