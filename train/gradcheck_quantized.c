/* Gradient checks of quantized linear layers by the straight-through rule: rounding counts as the
 * identity in backward, so what differences must find are the gradients of a linear surrogate
 *
 *   <dY row, x Wcol^T> + <dY col, Xcol W^T> + <dY, b>
 *
 * in which the capitals are dequantized operands at the point, and x, W and b vary. */
#include <stdio.h>
#include <stdlib.h>

#include "core/rng.h"
#include "train/gradcheck_priv.h"

enum { PAIRINGS = 20, SEED = 11, STREAM = 60, PASS = 3 };

/* ---- recipes ------------------------------------------------------------------------------------
 */

static const char *const formats[] = {
    "bf16",
    "f16",
    "f32",
    "fp8_tensor",
    "fp8_tensor:e5m2+pow2",
    "fp8_delayed",
    "fp8_block",
    "mxfp8",
    "mxfp8:e5m2",
    "mxfp8:sr",
    "mxfp6_e3m2",
    "mxfp6_e2m3",
    "mxfp6_e2m3:sr",
    "mxfp4",
    "nvfp4",
    "nvfp4:sr",
    "nvfp4:4over6",
    "nvfp4:1d",
    "mxfp8:scale=floor",
    "fp8_block:pow2=off",
};

static const char *drawn(int i, int slot)
{
    enum { FORMATS = sizeof formats / sizeof *formats };
    return formats[mt_rng_below(SEED, 0, (uint64_t)(6 * i + slot), FORMATS)];
}

mt_status mt_gradcheck_recipe(mt_recipe *recipe, char name[MT_RECIPE_TEXT], int i, bool *found)
{
    int presets = 0;
    while (mt_recipe_preset(presets)) presets++;
    *found = i < presets + PAIRINGS;
    if (!*found) return MT_OK;
    bool rotated = i % 4 == 0; /* now and then, on both operands */
    if (i < presets)
        snprintf(name, MT_RECIPE_TEXT, "%s", mt_recipe_preset(i));
    else
        snprintf(name, MT_RECIPE_TEXT, "fprop=%s/%s dgrad=%s/%s wgrad=%s/%s", drawn(i, 0),
                 drawn(i, 1), drawn(i, 2), drawn(i, 3), rotated ? "mxfp8:rht" : drawn(i, 4),
                 rotated ? "nvfp4:rht" : drawn(i, 5));
    return mt_recipe_parse(recipe, name);
}

/* ---- the surrogate ------------------------------------------------------------------------------
 */

/* Its gradients, which are constants. */
struct mt_surrogate {
    double *x, *w, *b; /* [rows, in], [N, out, in], [N, out] */
};

void mt_surrogate_destroy(struct mt_surrogate **s)
{
    if (!*s) return;
    free((*s)->x), free((*s)->w), free((*s)->b);
    free(*s);
    *s = NULL;
}

/* The sizes of a case, and which rows are whose. */
struct sizes {
    int64_t members, in, out, rows;
    const int64_t *counts; /* NULL: dense */
    int64_t in_offsets[CHECK_MEMBERS + 1], out_offsets[CHECK_MEMBERS + 1];
};

static struct sizes sizes_of(const check *c)
{
    const mt_group *g = &c->linear.weight->group;
    struct sizes s = { g->members, g->k, g->m, mt_tensor_rows(&c->inputs[0]), NULL, { 0 }, { 0 } };
    s.counts = mt_check_linear_counts(c);
    for (int64_t e = 0; s.counts && e < s.members; e++) {
        s.in_offsets[e + 1] = s.in_offsets[e] + s.counts[e] * s.in;
        s.out_offsets[e + 1] = s.out_offsets[e] + s.counts[e] * s.out;
    }
    return s;
}

/* What a slot's codes hold: *values f64, freed by the caller. */
static mt_status decode(double **values, check *c, const struct sizes *s, mt_operand operand,
                        mt_dir dir, const double *from)
{
    const mt_param *w = c->linear.weight;
    mt_status status = MT_OK;
    bool x = operand == MT_OPERAND_X;
    mt_group group = operand == MT_OPERAND_W ? w->group
                     : !s->counts
                         ? mt_group_uniform(1, s->rows, x ? s->in : s->out)
                         : mt_group_ragged_rows(s->members, s->rows, x ? s->in : s->out, s->counts,
                                                x ? s->in_offsets : s->out_offsets);
    mt_qtensor plain = mt_qtensor_plain(group, MT_F64, (void *)(uintptr_t)from),
               q = { .group = group };
    q.dir[dir] = mt_direction_of(*mt_recipe_direction(&c->state.recipe, operand, dir));
    struct mt_quantize_args args = mt_linear_quantize_args(w, operand);
    args.src = &plain, args.out = &q;
    void *memory = calloc(1, mt_qtensor_bytes(&q) + 1);
    *values = calloc((size_t)mt_group_capacity(&group) + 1, sizeof **values);
    if (!memory || !*values) {
        status = MT_FAIL(MT_ENOMEM, "gradcheck: out of memory");
        goto cleanup;
    }
    mt_qtensor_place(&q, memory);
    MT_TRY_CLEANUP(mt_quantize(&c->stream, &args));
    MT_TRY_CLEANUP(mt_dequantize(
        &c->stream, &(struct mt_dequantize_args){
                        .dtype = MT_F64, .src = &q, .dir = dir, .y = *values, .y_dtype = MT_F64 }));
cleanup:
    free(memory);
    return status;
}

static void accumulate(struct mt_surrogate *g, const struct sizes *s, double *const q[4],
                       const double *dy)
{
    int64_t t = 0;
    for (int64_t e = 0; e < s->members; e++) {
        int64_t end = t + (s->counts ? s->counts[e] : s->rows);
        for (; t < end; t++)
            for (int64_t j = 0; j < s->out; j++) {
                int64_t line = e * s->out + j, at = t * s->out + j;
                g->b[line] += dy[at];
                for (int64_t k = 0; k < s->in; k++) {
                    g->x[t * s->in + k] += q[0][at] * q[1][line * s->in + k];
                    g->w[line * s->in + k] += q[2][at] * q[3][t * s->in + k];
                }
            }
    }
}

static mt_status capture(check *c)
{
    struct sizes s = sizes_of(c);
    const mt_param *w = c->linear.weight;
    double *q[4] = { 0 };
    mt_status status = MT_OK;
    struct mt_surrogate *g = c->surrogate = calloc(1, sizeof *g);
    MT_REQUIRE(g, MT_ENOMEM, "gradcheck: out of memory");
    g->x = calloc((size_t)(s.rows * s.in), sizeof(double));
    g->w = calloc((size_t)mt_param_count(w), sizeof(double));
    g->b = calloc((size_t)(s.members * s.out), sizeof(double));
    MT_REQUIRE(g->x && g->w && g->b, MT_ENOMEM, "gradcheck: out of memory");
    const double *dy = c->weights[0], *x = c->inputs[0].data;
    MT_TRY_CLEANUP(decode(&q[0], c, &s, MT_OPERAND_DY, MT_ROW, dy));
    MT_TRY_CLEANUP(decode(&q[1], c, &s, MT_OPERAND_W, MT_COL, w->master));
    MT_TRY_CLEANUP(decode(&q[2], c, &s, MT_OPERAND_DY, MT_COL, dy));
    MT_TRY_CLEANUP(decode(&q[3], c, &s, MT_OPERAND_X, MT_COL, x));
    accumulate(g, &s, q, dy);
cleanup:
    for (int i = 0; i < 4; i++) free(q[i]);
    return status;
}

static long double inner(const double *a, const double *b, int64_t n)
{
    long double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += (long double)a[i] * (long double)b[i];
    return sum;
}

static mt_status evaluate(check *c, double *value)
{
    if (!c->surrogate) {
        MT_TRY(c->evaluate_first(c, value)); /* draws the gradient of the output */
        MT_TRY(capture(c));
    }
    const mt_param *w = c->linear.weight, *b = c->linear.bias;
    int64_t used = c->valid_rows >= 0 ? c->valid_rows : mt_tensor_rows(&c->inputs[0]);
    long double sum = inner(c->inputs[0].data, c->surrogate->x, used * w->group.k);
    sum += inner(w->master, c->surrogate->w, mt_param_count(w));
    if (b) sum += inner(b->master, c->surrogate->b, mt_param_count(b));
    *value = (double)sum;
    return MT_OK;
}

mt_status mt_check_quantized_setup(check *c, int recipe, int options, bool *found)
{
    static const uint32_t pass = PASS;
    char name[MT_RECIPE_TEXT], plain[sizeof c->name];
    mt_recipe r;
    MT_TRY(mt_gradcheck_recipe(&r, name, recipe, found));
    if (!*found) return MT_OK;
    MT_TRY(mt_check_linear_setup(c, options));
    c->state.recipe = r;
    c->state.seed = SEED, c->state.stream = STREAM, c->state.pass = &pass;
    MT_TRY(mt_linear_reserve(c->linear.weight, c->device, &c->state.recipe));
    snprintf(plain, sizeof plain, "%s", c->name);
    snprintf(c->name, sizeof c->name, "%.60s: %.60s", name, plain);
    c->evaluate_first = c->evaluate;
    c->evaluate = evaluate;
    return MT_OK;
}
