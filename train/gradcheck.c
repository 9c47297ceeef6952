/* The harness of the gradient checker. */
#include "train/gradcheck.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/rng.h"
#include "train/gradcheck_priv.h"

enum {
    STREAM_INPUT = 101,
    STREAM_WEIGHT = 102,
    STREAM_SAMPLE = 103,
    STREAM_PARAM = 104,
    STREAM_OTHER = 105
};

/* Of the sum of two gradients, whose own sums may be rounded in another order. */
static const double shared_limit = 1e-12;

/* ---- a case -------------------------------------------------------------------------------------
 */

/* Fingerprint of every choice of experts that forward makes. */
static mt_status watch_routing(void *context, const char *name, const mt_tensor *data)
{
    check *c = context;
    size_t n = strlen(name), tail = strlen("chosen_experts");
    if (n < tail || strcmp(name + n - tail, "chosen_experts") != 0) return MT_OK;
    const unsigned char *p = data->data;
    for (size_t i = 0; i < mt_tensor_bytes(data); i++)
        c->chosen_now = (c->chosen_now ^ p[i]) * 0x100000001b3u;
    return MT_OK;
}

static mt_status evaluate_forward(check *c, double *value);
static mt_status gradient_forward(check *c);

mt_status mt_check_create(check **out, mt_device *device, const char *op,
                          const mt_tape_options *options, uint64_t seed)
{
    *out = NULL;
    check *c = calloc(1, sizeof *c);
    MT_REQUIRE(c, MT_ENOMEM, "gradcheck: out of memory");
    c->op = op, c->device = device, c->stream.device = device, c->seed = seed;
    c->passes = 1, c->valid_rows = -1, c->step = 1e-3;
    c->evaluate = evaluate_forward, c->gradient = gradient_forward;
    mt_status status = mt_param_store_create(&c->store, device, MT_F64, MT_F64);
    if (status == MT_OK) status = mt_tape_create(&c->tape, &c->stream, options);
    if (status != MT_OK) {
        mt_check_destroy(&c);
        return mt_error_pass(status, __FILE__, __LINE__);
    }
    mt_tape_set_observer(c->tape, watch_routing, c);
    *out = c;
    return MT_OK;
}

void mt_check_destroy(check **out)
{
    check *c = *out;
    if (!c) return;
    mt_tape_destroy(&c->tape);
    mt_exchange_destroy(&c->exchange);
    mt_comm_close(&c->comm);
    if (c->model) c->store = NULL; /* the model's own */
    mt_model_destroy(&c->model);
    mt_param_store_destroy(&c->store);
    for (int i = 0; i < CHECK_INPUTS; i++) free(c->inputs[i].data), free(c->input_grads[i]);
    for (int i = 0; i < CHECK_OUTPUTS; i++) free(c->weights[i]);
    mt_surrogate_destroy(&c->surrogate);
    free(c->table.data);
    free(c);
    *out = NULL;
}

mt_status mt_check_param(check *c, mt_param **p, const char *name, int64_t members, int64_t m,
                         int64_t k, bool packed, bool frozen)
{
    MT_TRY(mt_param_store_add(c->store, p,
                              &(mt_param_spec){ .name = name,
                                                .members = members,
                                                .m = m,
                                                .k = k,
                                                .packed = packed,
                                                .frozen = frozen,
                                                .init = MT_INIT_NORMAL,
                                                .init_std = 1 }));
    return packed ? mt_linear_reserve(*p, c->device, NULL) : MT_OK;
}

mt_status mt_check_draw(check *c, double shift)
{
    MT_TRY(mt_param_store_allocate(c->store, true));
    for (int64_t i = 0; i < mt_param_store_count(c->store); i++) {
        mt_param *p = mt_param_store_get(c->store, i);
        double *w = p->master;
        if (p->packed) MT_TRY(mt_linear_place(p, c->device));
        for (int64_t j = 0; j < mt_param_count(p); j++)
            w[j] = shift + mt_rng_normal(c->seed, STREAM_PARAM + 1000 * (uint32_t)i, (uint64_t)j);
    }
    return MT_OK;
}

mt_status mt_check_input(check *c, int64_t rows, int64_t cols)
{
    int i = c->input_count;
    size_t bytes = (size_t)(rows * cols) * sizeof(double);
    double *x = malloc(bytes + 1), *g = malloc(bytes + 1);
    if (!x || !g) {
        free(x), free(g);
        return MT_FAIL(MT_ENOMEM, "gradcheck: out of memory");
    }
    for (int64_t j = 0; j < rows * cols; j++)
        x[j] = mt_rng_normal(c->seed, STREAM_INPUT + 1000 * (uint32_t)i, (uint64_t)j);
    c->inputs[i] = mt_tensor_2d(x, MT_F64, rows, cols), c->input_grads[i] = g;
    c->input_count++;
    return MT_OK;
}

/* ---- the scalar and its gradient by the tape
 * ----------------------------------------------------- */

static mt_status repack(check *c)
{
    for (int64_t i = 0; i < mt_param_store_count(c->store); i++) {
        mt_param *p = mt_param_store_get(c->store, i);
        if (p->packed) MT_TRY(mt_linear_refresh(p, &c->stream));
    }
    return MT_OK;
}

/* Rows of a matrix that somebody owns. */
static int64_t owned(const check *c, const mt_tensor *t)
{
    int64_t rows = t->ndim < 2 ? t->shape[0] : mt_tensor_rows(t);
    return c->valid_rows >= 0 && c->valid_rows < rows ? c->valid_rows : rows;
}

/* Weights of an output: normal, NaN in rows that nobody owns, so that reading one shows. */
static mt_status draw_weights(check *c, int i, const mt_tensor *t)
{
    if (c->weights[i]) return MT_OK;
    int64_t n = mt_tensor_count(t), rows = t->ndim < 2 ? t->shape[0] : mt_tensor_rows(t);
    int64_t used = rows ? n / rows * owned(c, t) : 0;
    c->weights[i] = malloc((size_t)n * sizeof(double) + 1);
    MT_REQUIRE(c->weights[i], MT_ENOMEM, "gradcheck: out of memory");
    for (int64_t j = 0; j < n; j++)
        c->weights[i][j] =
            j < used ? mt_rng_normal(c->seed, STREAM_WEIGHT + 1000 * (uint32_t)i, (uint64_t)j)
                     : (double)NAN;
    c->counts[i] = used;
    return MT_OK;
}

static mt_status segment_run(mt_tape *tape, void *context, mt_value *const *inputs,
                             mt_value **outputs)
{
    check *c = context;
    return c->forward(tape, c, inputs, outputs);
}

static mt_status run_forward(check *c, bool wants_grad, mt_value **in, mt_value **out)
{
    for (int i = 0; i < c->input_count; i++)
        MT_TRY(mt_tape_input(c->tape, &in[i], c->inputs[i], wants_grad));
    if (c->segment)
        MT_TRY(mt_tape_segment(c->tape, segment_run, c, in, c->input_count, out, 1));
    else
        MT_TRY(c->forward(c->tape, c, in, out));
    for (int i = 0; i < CHECK_OUTPUTS; i++)
        if (out[i]) MT_TRY(draw_weights(c, i, &out[i]->data));
    return MT_OK;
}

static mt_status evaluate_pass(check *c, double *value)
{
    mt_value *in[CHECK_INPUTS] = { 0 }, *out[CHECK_OUTPUTS] = { 0 };
    long double sum = 0; /* keeps the differences' noise down */
    MT_TRY(run_forward(c, false, in, out));
    for (int i = 0; i < CHECK_OUTPUTS; i++) {
        const double *y = out[i] ? out[i]->data.data : NULL;
        for (int64_t j = 0; y && j < c->counts[i]; j++)
            sum += (long double)c->weights[i][j] * (long double)y[j];
        mt_value_release(c->tape, &out[i]);
    }
    for (int i = 0; i < CHECK_INPUTS; i++) mt_value_release(c->tape, &in[i]);
    *value = (double)sum;
    return MT_OK;
}

static mt_status evaluate_forward(check *c, double *value)
{
    MT_TRY(repack(c));
    MT_TRY(mt_tape_begin(c->tape, 1, false));
    return mt_tape_close(c->tape, evaluate_pass(c, value));
}

/* The gradient that an input's other consumer gives its element j. */
static double other_gradient(const check *c, int input, int64_t j)
{
    return mt_rng_normal(c->seed, STREAM_OTHER + 1000 * (uint32_t)input, (uint64_t)j);
}

static mt_status share_inputs(check *c, mt_value *const *in)
{
    for (int i = 0; i < c->input_count; i++) {
        mt_tensor room;
        MT_TRY(mt_tape_seed_room(c->tape, in[i], &room));
        double *to = room.data;
        for (int64_t j = 0; j < mt_tensor_count(&room); j++) to[j] = other_gradient(c, i, j);
    }
    return MT_OK;
}

static mt_status gradient_pass(check *c)
{
    mt_value *in[CHECK_INPUTS] = { 0 }, *out[CHECK_OUTPUTS] = { 0 };
    MT_TRY(run_forward(c, true, in, out));
    if (c->shared) MT_TRY(share_inputs(c, in));
    for (int i = 0; i < CHECK_OUTPUTS; i++) {
        if (!out[i]) continue;
        mt_tensor seed = out[i]->data;
        seed.data = c->weights[i];
        MT_TRY(mt_tape_seed_tensor(c->tape, out[i], seed));
        mt_value_release(c->tape, &out[i]);
    }
    MT_TRY(mt_tape_backward(c->tape));
    MT_TRY(mt_tape_run_deferred(c->tape));
    for (int i = 0; i < c->input_count; i++) {
        mt_tensor g = mt_value_grad(in[i]);
        MT_REQUIRE(g.data, MT_EINTERNAL, "gradcheck %s: no gradient reached input %d", c->op, i);
        memcpy(c->input_grads[i], g.data, mt_tensor_bytes(&g));
    }
    for (int i = 0; i < CHECK_INPUTS; i++) mt_value_release(c->tape, &in[i]);
    return MT_OK;
}

static mt_status gradient_forward(check *c)
{
    MT_TRY(repack(c));
    for (int pass = 0; pass < c->passes; pass++) {
        MT_TRY(mt_tape_begin(c->tape, 2, true));
        MT_TRY(mt_tape_close(c->tape, gradient_pass(c)));
    }
    return MT_OK;
}

/* ---- differences
 * --------------------------------------------------------------------------------- */

static mt_status evaluate_at(check *c, double *x, double at, double *value)
{
    double kept = *x;
    *x = at;
    c->chosen_now = 0xcbf29ce484222325u;
    mt_status status = c->evaluate(c, value);
    *x = kept;
    MT_TRY(status);
    MT_REQUIRE(c->chosen_now == c->chosen, MT_ENUMERIC, "gradcheck %s: the routing moved", c->op);
    return MT_OK;
}

/* Five-point central difference: error O(h^4), and what rounding of the values leaves in it. */
static mt_status difference(check *c, double *x, double *slope, double *rounding)
{
    double f[4], h = c->step, x0 = *x, largest = 0;
    static const double at[4] = { -2, -1, 1, 2 };
    for (int i = 0; i < 4; i++) {
        MT_TRY(evaluate_at(c, x, x0 + at[i] * h, &f[i]));
        largest = fmax(largest, fabs(f[i]));
    }
    *slope = ((f[0] - f[3]) + 8 * (f[2] - f[1])) / (12 * h);
    *rounding = 4 * DBL_EPSILON * largest / h;
    return MT_OK;
}

/* least: what a smaller gradient's error is relative to. */
static void note(mt_gradcheck_result *r, const char *tensor, int64_t i, double analytic,
                 double numeric, double least)
{
    double size = fmax(fmax(fabs(analytic), fabs(numeric)), least);
    double error = analytic == numeric ? 0 : fabs(analytic - numeric) / size;
    /* compares as worse than any other, and stays the worst */
    if (isnan(error)) error = (double)INFINITY;
    r->checked++;
    if (r->checked > 1 && error <= r->worst) return;
    r->worst = error, r->analytic = analytic, r->numeric = numeric;
    snprintf(r->where, sizeof r->where, "%s[%lld]", tensor, (long long)i);
}

/* Compares the gradient of one tensor, scaled by `times` in the tape's. */
static mt_status compare(check *c, mt_gradcheck_result *r, const char *tensor, double *x,
                         const double *gradient, int64_t count, double times, uint32_t stream)
{
    double largest = 0;
    for (int64_t i = 0; i < count; i++) largest = fmax(largest, fabs(gradient[i]));
    int64_t n = c->samples && c->samples < count ? c->samples : count;
    for (int64_t j = 0; j < n; j++) {
        int64_t i = n == count ? j
                               : (int64_t)mt_rng_below(c->seed, STREAM_SAMPLE + stream, (uint64_t)j,
                                                       (uint64_t)count);
        double slope = 0, rounding = 0;
        MT_TRY(difference(c, &x[i], &slope, &rounding));
        note(r, tensor, i, gradient[i], slope * times,
             fmax(1e-3 * largest, rounding * times / MT_GRADCHECK_LIMIT));
    }
    return MT_OK;
}

static void send(mt_gradcheck_report report, void *context, const mt_gradcheck_result *r,
                 int64_t *failed)
{
    *failed += !(r->worst < MT_GRADCHECK_LIMIT);
    if (report) report(context, r);
}

/* A frozen param must not be written at all. */
static mt_status check_frozen(const mt_param *p)
{
    const double *g = p->grad;
    for (int64_t i = 0; i < mt_param_count(p); i++)
        MT_REQUIRE(g[i] == 0, MT_EINTERNAL, "gradcheck: frozen %s has a gradient", p->name);
    return MT_OK;
}

/* Beside another consumer of each input, its gradient is the sum of both. */
static mt_status check_shared(check *c)
{
    double *alone[CHECK_INPUTS] = { 0 };
    mt_status status = MT_OK;
    for (int i = 0; i < c->input_count; i++) {
        size_t bytes = mt_tensor_bytes(&c->inputs[i]);
        alone[i] = malloc(bytes + 1);
        if (!alone[i]) MT_TRY_CLEANUP(MT_FAIL(MT_ENOMEM, "gradcheck: out of memory"));
        memcpy(alone[i], c->input_grads[i], bytes);
    }
    mt_param_store_begin_step(c->store);
    c->shared = true;
    MT_TRY_CLEANUP(c->gradient(c));
    MT_TRY_CLEANUP(mt_param_store_end_step(c->store));
    for (int i = 0; i < c->input_count; i++) {
        int64_t used = owned(c, &c->inputs[i]) * mt_tensor_cols(&c->inputs[i]);
        for (int64_t j = 0; j < used && status == MT_OK; j++) {
            double other = other_gradient(c, i, j), sum = alone[i][j] + other;
            double got = c->input_grads[i][j], bound = fabs(alone[i][j]) + fabs(other);
            if (isnan(got) && isnan(sum)) continue; /* found by the differences */
            if (!(fabs(got - sum) <= shared_limit * bound))
                status = MT_FAIL(MT_EINTERNAL,
                                 "gradcheck %s %s: the gradient of input%d[%lld] is %g beside "
                                 "another consumer's %g, alone %g",
                                 c->op, c->name, i, (long long)j, got, other, alone[i][j]);
        }
        if (status == MT_OK) memcpy(c->input_grads[i], alone[i], mt_tensor_bytes(&c->inputs[i]));
    }
cleanup:
    c->shared = false;
    for (int i = 0; i < CHECK_INPUTS; i++) free(alone[i]);
    return status;
}

mt_status mt_check_run(check *c, mt_gradcheck_report report, void *context, bool per_tensor,
                       int64_t *failed)
{
    mt_gradcheck_result r = { .op = c->op };
    double value;
    snprintf(r.name, sizeof r.name, "%s", c->name);
    c->chosen_now = 0xcbf29ce484222325u;
    MT_TRY(c->evaluate(c, &value));
    c->chosen = c->chosen_now;
    MT_REQUIRE(isfinite(value), MT_ENUMERIC, "gradcheck %s %s: the function is %g", c->op, c->name,
               value);
    mt_param_store_begin_step(c->store);
    MT_TRY(c->gradient(c));
    MT_TRY(mt_param_store_end_step(c->store));
    if (c->input_count) MT_TRY(check_shared(c));
    for (int i = 0; i < c->input_count; i++) {
        char tensor[32];
        snprintf(tensor, sizeof tensor, "input%d", i);
        int64_t used = owned(c, &c->inputs[i]) * mt_tensor_cols(&c->inputs[i]);
        MT_TRY(compare(c, &r, tensor, c->inputs[i].data, c->input_grads[i], used, 1,
                       (uint32_t)i * 1000));
    }
    for (int64_t i = 0; i < mt_param_store_count(c->store); i++) {
        mt_param *p = mt_param_store_get(c->store, i);
        if (p->frozen) {
            MT_TRY(check_frozen(p));
            continue;
        }
        MT_TRY(compare(c, &r, p->name, p->master, p->grad, mt_param_count(p), c->passes,
                       (uint32_t)(100 + i) * 1000));
        if (!per_tensor) continue;
        snprintf(r.name, sizeof r.name, "%.50s %.70s", c->name, p->name);
        send(report, context, &r, failed);
        r = (mt_gradcheck_result){ .op = c->op };
    }
    if (!per_tensor) send(report, context, &r, failed);
    return MT_OK;
}
