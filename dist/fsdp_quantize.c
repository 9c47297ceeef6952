/* A rank's own wires from its own masters, and back. */
#include "dist/fsdp_priv.h"

static bool needs_amax(const mt_param *p)
{
    return p->packed && (mt_format_needs_amax(mt_fsdp_spec(p, MT_ROW).format) ||
                         mt_format_needs_amax(mt_fsdp_spec(p, MT_COL).format));
}

/* Whether native directions are what a split master keeps in bf16, and whether both are. */
static bool sends_half(const mt_param *p)
{
    return p->high && p->compute == MT_BF16;
}

static bool is_only_half(const mt_param *p)
{
    return sends_half(p) && mt_fsdp_native(p, MT_ROW) && mt_fsdp_native(p, MT_COL);
}

/* The own piece of a master in its dtype: as it lies there, or joined into the view. NULL: nobody
 * reads it. */
static mt_status own_master(const mt_param *p, mt_stream *stream, void **master)
{
    *master = p->own_master ? p->own_master : (void *)p->view;
    if (is_only_half(p)) *master = NULL;
    if (p->own_master || is_only_half(p)) return MT_OK;
    return mt_join_master(stream, &(struct mt_join_master_args){ .dtype = p->dtype,
                                                                 .count = p->own.count,
                                                                 .y = p->view,
                                                                 .high = p->high,
                                                                 .low = p->low });
}

/* What quantizing a fragment takes from the layer's state. */
static struct mt_quantize_args args_of(const mt_fragment *x, mt_quantize_pass pass)
{
    const mt_linear_state *state = x->param->linear;
    struct mt_quantize_args a = { .dtype = x->param->compute, .pass = pass };
    a.first_member = (uint32_t)(x->param->first_member + x->member), a.first_row = (uint32_t)x->row;
    if (!state) return a;
    for (int d = 0; d < MT_DIR_COUNT; d++) {
        const struct mt_delayed *delayed = &state->delayed[MT_OPERAND_W][d];
        if (delayed->scale) a.scale[d] = delayed->scale + x->member;
        if (delayed->history && pass != MT_QUANTIZE_CODES)
            a.running_amax[d] = delayed->history + x->member;
    }
    if (state->nan[MT_OPERAND_W]) a.running_nan = state->nan[MT_OPERAND_W] + x->member;
    a.seed = state->seed, a.stream = state->stream + MT_OPERAND_W;
    a.step = state->pass ? *state->pass : 0, a.first_step = state->first_pass;
    return a;
}

/* The wire memory of a unit's direction. */
static char *own_wire(const mt_fsdp *f, int64_t unit, mt_dir dir)
{
    return (char *)f->own + f->wire[mt_wire_of(unit, dir)].at;
}

/* The same elements in the other direction's wire. */
static const mt_fragment *twin(const mt_fsdp *f, const mt_fragment *x)
{
    const mt_wire *w = &f->wire[mt_wire_of(x->param->unit, MT_COL)];
    for (int64_t i = w->own; i < w->own + w->own_count; i++)
        if (w->list[i].param == x->param && w->list[i].first == x->first && !w->list[i].real)
            return &w->list[i];
    return NULL;
}

static const void *source_of(const mt_fragment *x, const void *master)
{
    size_t size = mt_dtype_size(x->param->dtype);
    return (const char *)master + (size_t)(x->first - x->param->own.first) * size;
}

/* One pass over a fragment, both directions that are not native. */
static mt_status quantize(mt_fsdp *f, const mt_fragment *x, mt_quantize_pass pass, void *master)
{
    const mt_fragment *sides[MT_DIR_COUNT] = { x, twin(f, x) };
    mt_qtensor out = { .group = mt_fragment_group(x) };
    bool any = false;
    for (int d = 0; d < MT_DIR_COUNT; d++) {
        if (mt_fsdp_native(x->param, (mt_dir)d)) continue;
        out.dir[d] =
            mt_fragment_direction(f, sides[d], (mt_dir)d, own_wire(f, x->param->unit, (mt_dir)d));
        any = true;
    }
    if (!any) return MT_OK;
    mt_qtensor source =
        mt_qtensor_plain(out.group, x->param->dtype, (void *)(uintptr_t)source_of(x, master));
    struct mt_quantize_args a = args_of(x, pass);
    a.src = &source, a.out = &out;
    return mt_quantize(&f->stream, &a);
}

/* Columns that are made from the rows' values and scaled by an amax of them: it is known only after
 * the rows have codes, which may need an amax of all ranks first. */

static bool follows_rows(const mt_param *p)
{
    mt_format_spec col = mt_fsdp_spec(p, MT_COL);
    return p->packed && col.options.from_dequantized && col.format->second_level;
}

/* The rows that columns are made from. */
static mt_direction rows_of(const mt_fsdp *f, const mt_fragment *x)
{
    return mt_fragment_direction(f, x, MT_ROW, own_wire(f, x->param->unit, MT_ROW));
}

static mt_status quantize_rows(mt_fsdp *f, const mt_fragment *x, mt_quantize_pass pass,
                               void *master, bool count_nans)
{
    mt_qtensor out = { .group = mt_fragment_group(x) };
    mt_qtensor source =
        mt_qtensor_plain(out.group, x->param->dtype, (void *)(uintptr_t)source_of(x, master));
    struct mt_quantize_args a = args_of(x, pass);
    out.dir[MT_ROW] = rows_of(f, x);
    a.src = &source, a.out = &out;
    if (!count_nans) a.running_nan = NULL;
    return mt_quantize(&f->stream, &a);
}

/* From rows that have just been quantized. */
static mt_status quantize_columns(mt_fsdp *f, const mt_fragment *x, mt_quantize_pass pass)
{
    mt_qtensor rows = { .group = mt_fragment_group(x) }, out = rows;
    struct mt_quantize_args a = args_of(x, pass);
    rows.dir[MT_ROW] = rows_of(f, x);
    out.dir[MT_COL] =
        mt_fragment_direction(f, twin(f, x), MT_COL, own_wire(f, x->param->unit, MT_COL));
    out.dir[MT_COL].options.from_dequantized = false;
    a.src = &rows, a.src_dir = MT_ROW, a.out = &out;
    a.running_nan = NULL;
    return mt_quantize(&f->stream, &a);
}

static mt_status measure_columns(mt_fsdp *f, const mt_fragment *x, void *master)
{
    if (!follows_rows(x->param)) return MT_OK;
    MT_TRY(quantize_rows(f, x, MT_QUANTIZE_CODES, master, false));
    return quantize_columns(f, x, MT_QUANTIZE_AMAX);
}

/* The values of a fragment in the dtype of activations: its masters, rounded, or the half that is.
 */
static mt_status write_values(mt_fsdp *f, const mt_fragment *x, void *master, void *to)
{
    const mt_param *p = x->param;
    if (sends_half(p))
        return mt_device_copy_async(&f->stream, to, p->high + (x->first - p->own.first),
                                    (size_t)x->count * sizeof *p->high);
    return mt_cast(&f->stream, &(struct mt_cast_args){ .dtype = p->compute,
                                                       .count = x->count,
                                                       .y = to,
                                                       .x = source_of(x, master),
                                                       .x_dtype = p->dtype });
}

/* Whether an update has written that part of a wire already. */
static bool is_written(const mt_fragment *x, const char *to)
{
    const mt_param *p = x->param;
    return p->cast_written && (const char *)(p->cast + (x->first - p->own.first)) == to;
}

/* The native directions of a fragment. */
static mt_status narrow(mt_fsdp *f, const mt_fragment *x, void *master)
{
    const mt_fragment *sides[MT_DIR_COUNT] = { x, twin(f, x) };
    for (int d = 0; d < MT_DIR_COUNT; d++) {
        if (!mt_fsdp_native(x->param, (mt_dir)d)) continue;
        if (!mt_wire_is_own(f, mt_wire_of(x->param->unit, (mt_dir)d))) continue;
        char *to = own_wire(f, x->param->unit, (mt_dir)d) + sides[d]->codes;
        if (!is_written(x, to)) MT_TRY(write_values(f, x, master, to));
    }
    return MT_OK;
}

typedef mt_status visit_fragment(mt_fsdp *f, const mt_fragment *x, void *master);

/* Visits the own fragments of a unit's GEMM weights, each once, with the own piece of their master.
 */
static mt_status for_own(mt_fsdp *f, int64_t unit, visit_fragment *visit)
{
    const mt_wire *w = &f->wire[mt_wire_of(unit, MT_ROW)];
    const mt_param *last = NULL;
    void *master = NULL;
    for (int64_t i = w->own; i < w->own + w->own_count; i++) {
        const mt_fragment *x = &w->list[i];
        if (x->real) continue;
        if (x->param != last) MT_TRY(own_master(x->param, &f->stream, &master));
        last = x->param;
        MT_TRY(visit(f, x, master));
    }
    return MT_OK;
}

static mt_status for_each_own(mt_fsdp *f, visit_fragment *visit)
{
    for (int64_t u = 0; u < f->units; u++) MT_TRY(for_own(f, u, visit));
    return MT_OK;
}

static mt_status measure(mt_fsdp *f, const mt_fragment *x, void *master)
{
    if (follows_rows(x->param)) return quantize_rows(f, x, MT_QUANTIZE_AMAX, master, false);
    return needs_amax(x->param) ? quantize(f, x, MT_QUANTIZE_AMAX, master) : MT_OK;
}

static mt_status write_codes(mt_fsdp *f, const mt_fragment *x, void *master)
{
    bool measured = needs_amax(x->param);
    MT_TRY(narrow(f, x, master));
    if (follows_rows(x->param)) {
        MT_TRY(quantize_rows(f, x, MT_QUANTIZE_CODES, master, true));
        return quantize_columns(f, x, MT_QUANTIZE_CODES);
    }
    return quantize(f, x, measured ? MT_QUANTIZE_CODES : MT_QUANTIZE_ALL, master);
}

/* One measurement of every own fragment, and its largest over all ranks that have the param. */
static mt_status reduce_measured(mt_fsdp *f, visit_fragment *visit)
{
    int64_t shared = f->amax_shared, some = (int64_t)(f->amax_bytes / sizeof(float)) - shared;
    MT_TRY(for_each_own(f, visit));
    MT_TRY(mt_comm_all_reduce(f->comm, &f->stream, f->amax, shared, MT_F32, MT_REDUCE_MAX,
                              "amaxes of weights"));
    if (!some) return MT_OK;
    return mt_comm_all_reduce(f->options.replicas, &f->stream, f->amax + shared, some, MT_F32,
                              MT_REDUCE_MAX, "amaxes of experts");
}

/* Members' amaxes over all ranks, where some format is scaled by them. */
static mt_status reduce_amaxes(mt_fsdp *f)
{
    bool any = false, follow = false;
    for (int64_t i = 0; i < mt_param_store_count(f->store); i++) {
        any |= needs_amax(mt_param_store_get(f->store, i));
        follow |= follows_rows(mt_param_store_get(f->store, i));
    }
    if (!any) return MT_OK;
    MT_TRY(mt_device_zero(f->device, f->amax, f->amax_bytes));
    MT_TRY(reduce_measured(f, measure));
    return follow ? reduce_measured(f, measure_columns) : MT_OK;
}

/* Masters that travel as they are. */
static mt_status write_masters(mt_fsdp *f, int64_t unit)
{
    for (int d = 0; d < MT_DIR_COUNT; d++) {
        const mt_wire *w = &f->wire[mt_wire_of(unit, (mt_dir)d)];
        for (int64_t j = w->own; j < w->own + w->own_count; j++) {
            const mt_fragment *x = &w->list[j];
            if (!x->real) continue;
            MT_TRY(mt_device_copy_async(&f->stream, (char *)f->own + w->at + x->codes,
                                        source_of(x, x->param->own_master), x->code_bytes));
        }
    }
    return MT_OK;
}

static mt_status write_unit(mt_fsdp *f, int64_t unit)
{
    mt_unit u = mt_param_store_unit(f->store, unit);
    MT_TRY(for_own(f, unit, write_codes));
    for (int64_t i = u.first; i < u.first + u.count; i++)
        mt_param_store_get(f->store, i)->cast_written = false;
    f->written[unit] = true;
    return write_masters(f, unit);
}

bool mt_fsdp_is_native(const mt_fsdp *f, const mt_unit *u)
{
    for (int64_t i = u->first; i < u->first + u->count; i++) {
        const mt_param *p = mt_param_store_get(f->store, i);
        if (p->packed && !(mt_fsdp_native(p, MT_ROW) && mt_fsdp_native(p, MT_COL))) return false;
    }
    return true;
}

mt_status mt_fsdp_begin_update(mt_fsdp *f, mt_stream *stream)
{
    f->stream = *stream;
    MT_TRY(mt_event_wait(&f->gathered, stream)); /* gathers read the own wires */
    for (int64_t i = 0; i < f->slot_count; i++) mt_fsdp_evict(f, &f->slots[i]);
    if (f->current >= 0) f->end[0] = f->previous, f->end[1] = f->current;
    f->previous = f->current = -1;
    for (int64_t i = 0; i < f->units; i++)
        f->written[i] = mt_param_store_unit(f->store, i).count == 0;
    f->updating = true;
    return MT_OK;
}

mt_status mt_fsdp_updated(void *fsdp, mt_param *param)
{
    mt_fsdp *f = fsdp;
    mt_unit u = mt_param_store_unit(f->store, param->unit);
    int64_t last = u.first + u.count - 1;
    while (mt_param_store_get(f->store, last)->frozen) last--;
    if (mt_param_store_get(f->store, last) != param || !mt_fsdp_is_native(f, &u)) return MT_OK;
    MT_TRY(write_unit(f, param->unit));
    return mt_fsdp_start(f);
}

mt_status mt_fsdp_refresh(mt_fsdp *f, mt_stream *stream)
{
    bool all = true;
    if (!f->updating) MT_TRY(mt_fsdp_begin_update(f, stream));
    f->stream = *stream, f->updating = false;
    for (int64_t u = 0; u < f->units; u++) all &= f->written[u];
    if (all) return MT_OK;
    MT_TRY(mt_event_wait(&f->gathered, stream)); /* gathers fill staging */
    MT_TRY(reduce_amaxes(f));
    for (int64_t u = 0; u < f->units; u++)
        if (!f->written[u]) MT_TRY(write_unit(f, u));
    return mt_fsdp_start(f);
}

static mt_status read_back(mt_fsdp *f, const mt_fragment *x, void *master)
{
    int dir = 0;
    while (dir < MT_DIR_COUNT && mt_fsdp_native(x->param, (mt_dir)dir)) dir++;
    if (dir == MT_DIR_COUNT) return MT_OK;
    const mt_fragment *side = dir == MT_ROW ? x : twin(f, x);
    mt_qtensor q = { .group = mt_fragment_group(x) };
    q.dir[dir] =
        mt_fragment_direction(f, side, (mt_dir)dir, own_wire(f, x->param->unit, (mt_dir)dir));
    MT_TRY(mt_dequantize(&f->stream,
                         &(struct mt_dequantize_args){ .dtype = x->param->compute,
                                                       .src = &q,
                                                       .dir = (mt_dir)dir,
                                                       .y = (void *)(uintptr_t)source_of(x, master),
                                                       .y_dtype = x->param->dtype }));
    bool last = x->first + x->count == x->param->own.first + x->param->own.count;
    return last && !x->param->own_master ? mt_param_split_view(f->store, x->param) : MT_OK;
}

mt_status mt_fsdp_quantized_masters(mt_fsdp *f, mt_stream *stream)
{
    f->stream = *stream;
    return for_each_own(f, read_back);
}
