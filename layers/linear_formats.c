/* The formats of a linear layer: its compute copy of the weight, and its operands. */
#include "layers/linear_priv.h"

/* SMALL: elements that a launch more takes longer than. */
enum { ALIGN = 256, NARROW = 512, SMALL = 1 << 22 };

static mt_format_spec spec_of(const mt_recipe *recipe, mt_dtype compute, mt_operand operand,
                              mt_dir dir)
{
    if (recipe) return *mt_recipe_direction(recipe, operand, dir);
    return mt_format_spec_default(mt_format_plain(compute)->id);
}

static const mt_recipe *recipe_of(const mt_param *w)
{
    return w->linear ? &w->linear->recipe : NULL;
}

bool mt_linear_is_native(const mt_param *w, mt_operand operand, mt_dir dir)
{
    return spec_of(recipe_of(w), w->compute, operand, dir).format == mt_format_plain(w->compute);
}

/* Where scales are known beforehand, rows and columns take hardly longer one after the other. Of
 * narrow experts columns are more than the forward's product gains, and less than the backward's
 * do; X is less to keep than they are. */
bool mt_linear_keeps_x(const mt_param *w)
{
    return spec_of(recipe_of(w), w->compute, MT_OPERAND_X, MT_COL).format->delayed &&
           w->group.m <= NARROW;
}

/* ---- the weight --------------------------------------------------------------------------------
 * Native directions are packed for the backend; the others lie in front of them as one qtensor. */

/* Whether a direction of W is kept as what its codes decode to, which GEMMs would decode anew each
 * time. Where columns are made from the rows' codes neither is: both come from one call. */
static bool is_decoded(const struct mt_kernels *kernels, const mt_param *w, const mt_recipe *recipe,
                       mt_dir dir)
{
    mt_format_spec spec = spec_of(recipe, w->compute, MT_OPERAND_W, dir),
                   col = spec_of(recipe, w->compute, MT_OPERAND_W, MT_COL),
                   rows = spec_of(recipe, w->compute, dir == MT_ROW ? MT_OPERAND_X : MT_OPERAND_DY,
                                  MT_ROW);
    mt_gemm_layout layout = dir == MT_ROW ? MT_GEMM_TN : MT_GEMM_NN;
    bool codes = kernels->gemm_codes && kernels->gemm_codes(layout, &spec, &rows);
    return kernels->decoded_weights && w->compute == MT_BF16 && !codes &&
           !col.options.from_dequantized && kernels->gemm_operand(&spec) == MT_BF16;
}

/* Whether native directions of W are its values in bf16, which a split master keeps as they are. */
static bool is_half(const mt_param *w)
{
    return w->high && w->compute == MT_BF16;
}

/* Whether those directions are where the master keeps them. */
static bool is_lent(const mt_param *w, const struct mt_kernels *kernels)
{
    return w->lends && w->compute == MT_BF16 && kernels->packed_shared;
}

/* The directions of `weight` that are packed, or those that are not. */
static mt_qtensor part_of(const mt_qtensor *weight, bool packed)
{
    mt_qtensor part = *weight;
    for (int d = 0; d < MT_DIR_COUNT; d++)
        if ((part.dir[d].layout == MT_LAYOUT_PACKED) != packed) part.dir[d] = (mt_direction){ 0 };
    return part;
}

/* Lays the compute copy out in `memory` (NULL: only counts what it needs) and returns its bytes. */
static size_t lay_out(mt_qtensor *out, const mt_param *w, const struct mt_kernels *kernels,
                      const mt_recipe *recipe, char *memory)
{
    const mt_group *g = &w->group;
    *out = (mt_qtensor){ .group = *g };
    for (int d = 0; d < MT_DIR_COUNT; d++) {
        mt_format_spec spec = spec_of(recipe, w->compute, MT_OPERAND_W, (mt_dir)d);
        out->dir[d] = mt_direction_of(spec);
        if (is_decoded(kernels, w, recipe, (mt_dir)d)) out->dir[d].layout = MT_LAYOUT_DECODED;
        if (spec.format == mt_format_plain(w->compute)) out->dir[d].layout = MT_LAYOUT_PACKED;
    }
    mt_qtensor codes = part_of(out, false);
    size_t at = mt_qtensor_bytes(&codes);
    if (memory) mt_qtensor_place(&codes, memory);
    for (int d = 0; d < MT_DIR_COUNT; d++) {
        if (out->dir[d].layout != MT_LAYOUT_PACKED) {
            out->dir[d] = codes.dir[d];
            continue;
        }
        if (is_lent(w, kernels)) {
            out->dir[d].codes = w->high;
            continue;
        }
        if (d && kernels->packed_shared && out->dir[MT_ROW].layout == MT_LAYOUT_PACKED) {
            out->dir[d].codes = out->dir[MT_ROW].codes;
            continue;
        }
        at = (at + ALIGN - 1) / ALIGN * ALIGN;
        if (memory) out->dir[d].codes = memory + at;
        at += kernels->packed_bytes(w->compute, (mt_dir)d, g->members, g->m, g->k);
    }
    return at;
}

mt_status mt_linear_reserve(mt_param *weight, const mt_device *device, const mt_recipe *recipe)
{
    const struct mt_kernels *kernels;
    mt_qtensor unused;
    MT_TRY(mt_device_kernels(device, weight->compute, &kernels));
    mt_param_reserve_compute(weight, lay_out(&unused, weight, kernels, recipe, NULL));
    return MT_OK;
}

/* Where the native directions of a placed weight are, NULL: it has none. */
static void *packed_at(const mt_qtensor *packed)
{
    return packed->dir[packed->dir[MT_ROW].codes ? MT_ROW : MT_COL].codes;
}

/* Where AdamW can write the compute copy as it writes the master. */
static uint16_t *cast_of(const mt_param *w, const struct mt_kernels *kernels)
{
    mt_qtensor packed = part_of(&w->weight, true);
    bool cast = w->dtype == MT_F32 && w->compute == MT_BF16 && !w->high && kernels->packed_shared;
    return cast ? packed_at(&packed) : NULL;
}

mt_status mt_linear_place(mt_param *weight, const mt_device *device)
{
    const struct mt_kernels *kernels;
    mt_qtensor placed;
    MT_TRY(mt_device_kernels(device, weight->compute, &kernels));
    size_t bytes = lay_out(&placed, weight, kernels, recipe_of(weight), NULL);
    MT_REQUIRE(weight->compute_memory || !bytes, MT_EINVAL,
               "%s: its compute copy has no memory (mt_linear_reserve, before allocation)",
               weight->name);
    MT_REQUIRE(bytes <= weight->compute_bytes, MT_EINTERNAL,
               "%s: a compute copy of %zu bytes, %zu are reserved", weight->name, bytes,
               weight->compute_bytes);
    lay_out(&weight->weight, weight, kernels, recipe_of(weight), weight->compute_memory);
    weight->cast = cast_of(weight, kernels), weight->cast_written = false;
    return MT_OK;
}

struct mt_quantize_args mt_linear_quantize_args(const mt_param *w, mt_operand operand)
{
    const mt_linear_state *state = w->linear;
    struct mt_quantize_args args = { .dtype = w->compute };
    if (!state) return args;
    for (int d = 0; d < MT_DIR_COUNT; d++) {
        args.scale[d] = state->delayed[operand][d].scale;
        args.running_amax[d] = state->delayed[operand][d].history;
    }
    args.first_member = (uint32_t)w->first_member;
    args.seed = state->seed;
    args.stream = state->stream + (uint32_t)operand;
    args.step = state->pass ? *state->pass : 0, args.first_step = state->first_pass;
    return args;
}

mt_status mt_linear_master(const mt_param *weight, mt_stream *stream, void **master)
{
    *master = weight->master ? weight->master : (void *)weight->view;
    if (weight->master) return MT_OK;
    return mt_join_master(stream, &(struct mt_join_master_args){ .dtype = weight->dtype,
                                                                 .count = mt_param_count(weight),
                                                                 .y = weight->view,
                                                                 .high = weight->high,
                                                                 .low = weight->low });
}

/* What is rotated, or made of another direction's codes, has an amax that is not the operand's. */
static void leave_amaxes(struct mt_quantize_args *args)
{
    for (int d = 0; d < MT_DIR_COUNT; d++) {
        const mt_format_options *o = &args->out->dir[d].options;
        if (o->rht || o->from_dequantized) args->running_amax[d] = NULL;
    }
}

/* Directions that are not packed, from the master. */
static mt_status make_codes(mt_stream *stream, const mt_qtensor *codes, const mt_param *weight)
{
    void *master;
    if (!codes->dir[MT_ROW].format && !codes->dir[MT_COL].format) return MT_OK;
    MT_TRY(mt_linear_master(weight, stream, &master));
    mt_qtensor source = mt_qtensor_plain(weight->group, weight->dtype, master);
    struct mt_quantize_args args = mt_linear_quantize_args(weight, MT_OPERAND_W);
    args.src = &source, args.out = codes;
    leave_amaxes(&args);
    if (weight->linear) args.running_nan = weight->linear->nan[MT_OPERAND_W];
    return mt_quantize(stream, &args);
}

/* Directions that are packed: of what a split master keeps, nothing where they are that or written
 * already. */
static mt_status pack(mt_stream *stream, mt_qtensor *packed, const mt_param *weight)
{
    const void *to = packed_at(packed);
    void *master = weight->high;
    if (!to || to == weight->high || weight->cast_written) return MT_OK;
    if (!is_half(weight)) MT_TRY(mt_linear_master(weight, stream, &master));
    return mt_pack_weight(stream, &(struct mt_pack_weight_args){ .dtype = weight->compute,
                                                                 .master = master,
                                                                 .out = packed,
                                                                 .halves = is_half(weight) });
}

mt_status mt_linear_refresh(mt_param *weight, mt_stream *stream)
{
    mt_qtensor packed = part_of(&weight->weight, true), codes = part_of(&weight->weight, false);
    MT_TRY(pack(stream, &packed, weight));
    weight->cast_written = false;
    return make_codes(stream, &codes, weight);
}

bool mt_linear_goes_aside(const mt_param *w)
{
    mt_qtensor codes = part_of(&w->weight, false);
    bool coded = codes.dir[MT_ROW].format || codes.dir[MT_COL].format;
    return coded && w->master && mt_param_count(w) <= SMALL;
}

/* ---- operands ----------------------------------------------------------------------------------
 */

/* Whether the product that reads this direction of X or dY multiplies the codes of both its
 * operands; those of wgrad it reads padded. */
static bool multiplies_codes(const mt_device *device, const mt_param *w, mt_operand operand,
                             mt_dir dir)
{
    const struct mt_kernels *kernels = device->kernels[w->compute];
    const bool wgrad = dir == MT_COL, fprop = !wgrad && operand == MT_OPERAND_X;
    mt_format_spec a = spec_of(recipe_of(w), w->compute, wgrad ? MT_OPERAND_X : MT_OPERAND_W,
                               fprop ? MT_ROW : MT_COL),
                   b = spec_of(recipe_of(w), w->compute, fprop ? MT_OPERAND_X : MT_OPERAND_DY, dir);
    mt_gemm_layout layout = wgrad ? MT_GEMM_NT : fprop ? MT_GEMM_TN : MT_GEMM_NN;
    return kernels && kernels->gemm_codes && kernels->gemm_codes(layout, &a, &b);
}

/* Whether the backend keeps what it makes of an operand as what it decodes to, which the GEMM would
 * decode at once. */
static bool decodes(const mt_device *device, const mt_param *w, mt_operand operand,
                    const mt_group *group)
{
    const struct mt_kernels *kernels = device->kernels[w->compute];
    if (!kernels || !kernels->quantize_decodes || w->compute != MT_BF16 || group->k % 8)
        return false;
    for (int d = 0; d < MT_DIR_COUNT; d++) {
        mt_format_spec spec = spec_of(recipe_of(w), w->compute, operand, (mt_dir)d);
        if (!mt_linear_is_native(w, operand, (mt_dir)d) && !kernels->quantize_decodes(&spec))
            return false;
    }
    return true;
}

/* kept: from the forward to wgrad, which is memory: as codes then, but where the operand is small.
 */
static mt_qtensor one_direction(const mt_device *device, const mt_param *w, mt_operand operand,
                                mt_dir dir, mt_group group, bool kept)
{
    mt_qtensor q = { .group = group };
    kept &= mt_group_capacity(&group) > SMALL;
    const bool codes = multiplies_codes(device, w, operand, dir);
    /* both directions are made in one pass: of dY codes or what they decode to, of X columns of
     * codes beside either */
    const bool other = (operand == MT_OPERAND_DY || dir == MT_COL) &&
                       multiplies_codes(device, w, operand, dir == MT_ROW ? MT_COL : MT_ROW);
    q.dir[dir] = mt_direction_of(spec_of(recipe_of(w), w->compute, operand, dir));
    if (!kept && !codes && !other && decodes(device, w, operand, &group))
        q.dir[dir].layout = MT_LAYOUT_DECODED;
    if (mt_direction_pads(&q.dir[dir], dir, &group) && codes) q.dir[dir].layout = MT_LAYOUT_PADDED;
    return q;
}

mt_qtensor mt_linear_codes(const mt_device *device, const mt_param *w, mt_operand operand,
                           mt_dir dir, mt_group group, void *memory)
{
    mt_qtensor q = one_direction(device, w, operand, dir, group, operand == MT_OPERAND_X);
    mt_qtensor_place(&q, memory);
    return q;
}

/* Whether this pass counts NaNs. */
static bool is_counting(const mt_tape *tape, const mt_param *w)
{
    return mt_tape_training(tape) || w->linear->counts_all;
}

/* Where the NaNs of an operand are counted, NULL: not in this call. Of a micro-batch each operand
 * is counted once: dY is quantized once; X a second time where its forward runs again or where
 * wgrad quantizes it anew, but where its row is native, its column once. */
static int64_t *nan_counts(mt_tape *tape, const mt_param *w, mt_operand operand, bool again)
{
    if (!w->linear || !is_counting(tape, w)) return NULL;
    bool first = operand == MT_OPERAND_DY || mt_linear_is_native(w, operand, MT_ROW) ||
                 (!again && !mt_tape_recomputing(tape));
    return first ? w->linear->nan[operand] : NULL;
}

/* Whether a direction is made: one that is wanted, or the row that a wanted column is made from. */
static bool is_made(const mt_param *w, mt_operand operand, const struct mt_linear_operand *o, int d)
{
    if (mt_linear_is_native(w, operand, (mt_dir)d)) return false;
    if (o->wanted[d] || d == MT_COL || !o->wanted[MT_COL]) return o->wanted[d];
    return spec_of(recipe_of(w), w->compute, operand, MT_COL).options.from_dequantized;
}

static mt_status quantize(mt_tape *tape, struct mt_quantize_args *args)
{
    mt_stream *stream = mt_tape_stream(tape);
    mt_value *scratch = NULL;
    size_t bytes;
    MT_TRY(mt_quantize_scratch(stream, args, &bytes));
    if (bytes) {
        MT_TRY(mt_tape_value(tape, &scratch, MT_U8, 1, (int64_t[]){ (int64_t)bytes }));
        args->scratch = scratch->data.data;
    }
    MT_TRY(mt_quantize(stream, args));
    mt_value_release(tape, &scratch);
    return MT_OK;
}

mt_status mt_linear_quantize(mt_tape *tape, const mt_param *w, mt_operand operand,
                             struct mt_linear_operand *o)
{
    mt_qtensor plain = o->q, made = { .group = o->q.group };
    bool any = false;
    for (int d = 0; d < MT_DIR_COUNT; d++) {
        if (!is_made(w, operand, o, d)) continue;
        bool kept = operand == MT_OPERAND_X && d == MT_COL && !o->again;
        mt_qtensor one =
            one_direction(mt_tape_stream(tape)->device, w, operand, (mt_dir)d, o->q.group, kept);
        int64_t bytes = (int64_t)mt_qtensor_bytes(&one);
        MT_TRY(mt_tape_value(tape, &o->memory[d], MT_U8, 1, &bytes));
        mt_qtensor_place(&one, o->memory[d]->data.data);
        made.dir[d] = o->q.dir[d] = one.dir[d];
        any = true;
    }
    if (!any) return MT_OK;
    struct mt_quantize_args args = mt_linear_quantize_args(w, operand);
    args.src = &plain, args.out = &made;
    leave_amaxes(&args);
    args.first_row = (uint32_t)o->first_row;
    args.bias_grad = o->bias_grad, args.accumulate = o->accumulate;
    args.row_token = o->row_token, args.tokens = o->tokens;
    args.weights = o->weights, args.position = o->position, args.top_k = o->top_k;
    args.swiglu = o->swiglu, args.rows_used = o->rows_used;
    args.z = o->z, args.dweights = o->dweights;
    args.running_nan = nan_counts(tape, w, operand, o->again);
    for (int d = 0; d < MT_DIR_COUNT && !mt_tape_training(tape); d++)
        args.running_amax[d] = NULL; /* an evaluation leaves no trace in training */
    return quantize(tape, &args);
}

/* Whether an amax history of some step's recipe gathers what this pass makes of an operand. */
static bool is_gathered(const mt_tape *tape, const mt_param *w, mt_operand operand)
{
    const struct mt_delayed *d = w->linear->delayed[operand];
    return mt_tape_training(tape) && (d[MT_ROW].history || d[MT_COL].history);
}

/* The rule. The row that the GEMM reads decodes to the same values when it is quantized again from
 * what it decodes to (mt_exchange_codes), so the rest asks who reads the operand's own values
 * beside it: wgrad, unless its column is made from the row's values, or no wgrad follows (the
 * weight is frozen; of X also where this forward records nothing); a bias, whose gradient sums dY;
 * whoever watches the layer, amax histories among them, also at steps that do not scale by them;
 * and the count of NaNs, which elements without a NaN lose: X is counted when a pass that counts
 * comes by first, dY whenever there is one. All of it is the same on every rank of a pass. */
bool mt_linear_travels_coded(const mt_tape *tape, const mt_grouped_linear_layer *layer,
                             mt_operand operand, mt_format_spec *spec)
{
    const mt_param *w = layer->weight;
    bool dy = operand == MT_OPERAND_DY, training = mt_tape_training(tape);
    if (!w->linear || mt_linear_observed(w) || (dy && (!training || layer->bias))) return false;
    if (is_gathered(tape, w, operand)) return false;
    *spec = spec_of(recipe_of(w), w->compute, operand, MT_ROW);
    if (!mt_exchange_codes(spec)) return false;
    bool column = !w->frozen && (dy || mt_tape_recording(tape));
    if (column && !spec_of(recipe_of(w), w->compute, operand, MT_COL).options.from_dequantized)
        return false;
    const mt_element_info *e = &mt_elements[spec->options.element];
    bool counted =
        w->linear->nan[operand] && is_counting(tape, w) && (dy || !mt_tape_recomputing(tape));
    return !counted || e->nan_code != e->max_code;
}

bool mt_linear_observed(const mt_param *w)
{
    return w->linear && w->linear->observe;
}

mt_status mt_linear_observe(mt_tape *tape, const mt_param *w, mt_operand operand,
                            const mt_qtensor *plain)
{
    if (!mt_linear_observed(w)) return MT_OK;
    if (operand == MT_OPERAND_X && mt_tape_recomputing(tape)) return MT_OK; /* seen already */
    return w->linear->observe(w->linear->observer, w, operand, plain);
}

void mt_linear_operand_release(mt_tape *tape, struct mt_linear_operand *o)
{
    for (int d = 0; d < MT_DIR_COUNT; d++) mt_value_release(tape, &o->memory[d]);
}
