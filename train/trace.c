/* One pass with everything kept, and a run of steps. */
#include "train/trace.h"

#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { IGNORE = -100, NAME_BYTES = 256, LISTED = 8 };

/* ---- input -------------------------------------------------------------------------------------
 */

/* Reads an int64 dataset as int32 tokens below `vocab` (IGNORE too where `ignorable`). */
static mt_status read_tokens(mt_h5 *file, const char *name, const mt_h5_info *info, bool ignorable,
                             int64_t vocab, int32_t **tokens)
{
    mt_status status = MT_OK;
    size_t count = (size_t)info->count;
    int64_t *wide = malloc(count * sizeof *wide);
    *tokens = malloc(count * sizeof **tokens);
    if (!wide || !*tokens)
        MT_TRY_CLEANUP(MT_FAIL(MT_ENOMEM, "trace: no memory for %zu tokens", count));
    MT_TRY_CLEANUP(mt_h5_read(file, name, info, wide));
    for (size_t i = 0; i < count; i++) {
        bool fine = (wide[i] >= 0 && wide[i] < vocab) || (ignorable && wide[i] == IGNORE);
        if (!fine)
            MT_TRY_CLEANUP(MT_FAIL(MT_EIO, "%s: %s element %zu is %lld, outside [0, %lld)%s",
                                   mt_h5_path(file), name, i, (long long)wide[i], (long long)vocab,
                                   ignorable ? " and not -100" : ""));
        (*tokens)[i] = (int32_t)wide[i];
    }
cleanup:
    free(wide);
    return status;
}

static mt_status shift_targets(mt_trace_input *in)
{
    int64_t rows = in->steps * in->batch, s = in->sequence;
    in->shifted = true;
    in->targets = malloc((size_t)(rows * s) * sizeof *in->targets);
    MT_REQUIRE(in->targets, MT_ENOMEM, "trace: no memory for %lld targets", (long long)(rows * s));
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < s; i++)
            in->targets[r * s + i] = i + 1 < s ? in->tokens[r * s + i + 1] : IGNORE;
    return MT_OK;
}

/* Describes a dataset, which is of tokens; other files are not damaged. `like`: the extents that it
 * must have, or NULL. */
static mt_status find_tokens(mt_h5_info *info, mt_h5 *file, const char *name, bool stepped,
                             const mt_h5_info *like)
{
    const char *must = stepped ? "i64 [N,B,S], for N steps" : "i64 [B,S], without steps";
    char found[96], wanted[96];
    bool there;
    MT_TRY(mt_h5_exists(file, name, &there));
    MT_REQUIRE(there, MT_EIO, "'%s' has no dataset %s: it must be %s", mt_h5_path(file), name,
               must);
    mt_status status = mt_h5_dataset_info(file, name, info); /* of what is no dataset of ours */
    if (status == MT_EDAMAGED)
        return MT_FAIL(MT_EIO, "%s; it must be %s", mt_error_message(), must);
    MT_TRY(status);
    mt_h5_format(found, info->type, info->ndim, info->shape);
    MT_REQUIRE(info->type == MT_I64 && info->ndim == (stepped ? 3 : 2), MT_EIO,
               "'%s', %s: it is %s, must be %s", mt_h5_path(file), name, found, must);
    MT_REQUIRE(info->count > 0, MT_EIO, "'%s', %s: it is %s, which is empty", mt_h5_path(file),
               name, found);
    if (!like) return MT_OK;
    mt_h5_format(wanted, like->type, like->ndim, like->shape);
    MT_REQUIRE(!memcmp(info->shape, like->shape, sizeof *info->shape * (size_t)info->ndim), MT_EIO,
               "'%s', %s: it is %s, must be %s like tokens", mt_h5_path(file), name, found, wanted);
    return MT_OK;
}

static mt_status read_input(mt_trace_input *in, mt_h5 *file, bool stepped, int64_t vocab)
{
    mt_h5_info info, targets;
    bool has_targets;
    MT_TRY(find_tokens(&info, file, "tokens", stepped, NULL));
    in->steps = stepped ? info.shape[0] : 1;
    in->batch = info.shape[stepped];
    in->sequence = info.shape[stepped + 1];
    MT_TRY(read_tokens(file, "tokens", &info, false, vocab, &in->tokens));
    MT_TRY(mt_h5_exists(file, "targets", &has_targets));
    if (!has_targets) return shift_targets(in);
    MT_TRY(find_tokens(&targets, file, "targets", stepped, &info));
    return read_tokens(file, "targets", &targets, true, vocab, &in->targets);
}

mt_status mt_trace_input_read(mt_trace_input *input, const char *path, bool stepped, int64_t vocab)
{
    *input = (mt_trace_input){ 0 };
    mt_h5 *file;
    MT_TRY(mt_h5_open_given(&file, path, "an HDF5 file with a dataset tokens"));
    mt_status status = read_input(input, file, stepped, vocab);
    mt_h5_close(&file);
    if (status == MT_OK) return MT_OK;
    mt_trace_input_free(input);
    return mt_error_pass(status, __FILE__, __LINE__);
}

void mt_trace_input_free(mt_trace_input *input)
{
    free(input->tokens);
    free(input->targets);
    *input = (mt_trace_input){ 0 };
}

mt_status mt_trace_input_check_targets(const mt_trace_input *in, const char *path)
{
    const int64_t count = in->batch * in->sequence;
    for (int64_t step = 0; step < in->steps; step++) {
        int64_t counted = 0;
        for (int64_t i = 0; i < count; i++) counted += in->targets[step * count + i] != IGNORE;
        MT_REQUIRE(counted || !in->shifted, MT_ECONFIG,
                   "'%s': every target is ignored: without a dataset targets a token is to predict "
                   "the next one, and the last of a sequence, here the only one, has none",
                   path);
        MT_REQUIRE(counted, MT_ECONFIG,
                   "'%s', targets: every target is ignored, all of batch %lld are %d: there is no "
                   "loss",
                   path, (long long)step, IGNORE);
    }
    return MT_OK;
}

/* ---- output ------------------------------------------------------------------------------------
 */

struct tracer {
    mt_h5 *out;
    mt_device *device;
    mt_model *model;
    const mt_trace_input *input;
    const mt_trace_options *options;
    mt_dtype real;                 /* what is written */
    double loss;                   /* the total one */
    int64_t written;               /* activations */
    char seen[LISTED][NAME_BYTES]; /* the first names that the pattern was held against */
    int64_t seen_count;
};

/* Writes device data of any float type as `real`, and integers as they are. */
static mt_status write_data(const struct tracer *t, const char *name, const void *data,
                            mt_dtype dtype, int ndim, const int64_t *shape)
{
    mt_status status = MT_OK;
    int64_t count = 1;
    for (int i = 0; i < ndim; i++) count *= shape[i];
    bool converts = dtype == MT_BF16 && t->real == MT_F32;
    size_t bytes = (size_t)count * mt_dtype_size(dtype);
    void *host = malloc(bytes + 1);
    float *wide = converts ? malloc((size_t)count * sizeof *wide + 1) : NULL;
    if (!host || (converts && !wide))
        MT_TRY_CLEANUP(MT_FAIL(MT_ENOMEM, "trace: no memory for %zu bytes of %s", bytes, name));
    MT_TRY_CLEANUP(mt_device_copy(t->device, host, data, bytes));
    for (int64_t i = 0; converts && i < count; i++)
        wide[i] = mt_bf16_to_f32(((const uint16_t *)host)[i]);
    MT_TRY_CLEANUP(
        mt_h5_write(t->out, name, converts ? MT_F32 : dtype, ndim, shape, converts ? wide : host));
cleanup:
    free(host);
    free(wide);
    return status;
}

static mt_status write_scalar(const struct tracer *t, const char *name, double x)
{
    double bits;
    mt_store_f64(&bits, t->real, 0, x);
    return mt_h5_write(t->out, name, t->real, 0, NULL, &bits);
}

static mt_status read_scalar(const struct tracer *t, const mt_value *value, double *x)
{
    double bits = 0;
    *x = 0;
    if (!value) return MT_OK;
    MT_TRY(mt_device_copy(t->device, &bits, value->data.data, mt_dtype_size(t->real)));
    *x = mt_load_f64(&bits, t->real, 0);
    return MT_OK;
}

/* An observer: rows of the batch are written as [batch, sequence, columns]. */
static mt_status keep_activation(void *context, const char *name, const mt_tensor *data)
{
    struct tracer *t = context;
    if (t->seen_count < LISTED) snprintf(t->seen[t->seen_count++], NAME_BYTES, "%s", name);
    if (fnmatch(t->options->activations, name, 0) != 0) return MT_OK;
    char path[NAME_BYTES + 16];
    snprintf(path, sizeof path, "activations/%s", name);
    int64_t shape[3] = { t->input->batch, t->input->sequence, mt_tensor_cols(data) };
    t->written++;
    return write_data(t, path, data->data, data->dtype, 3, shape);
}

static mt_status check_pattern(const struct tracer *t)
{
    char names[LISTED * NAME_BYTES] = "";
    for (int64_t i = 0; i < t->seen_count; i++) strcat(strcat(names, i ? ", " : ""), t->seen[i]);
    MT_REQUIRE(t->written > 0, MT_ECONFIG, "activations: %s fits none; the first of them are: %s",
               t->options->activations, names);
    return MT_OK;
}

/* The gradient of every exported tensor: rows of one member of a param. */
static mt_status write_grads(const struct tracer *t)
{
    mt_param_store *store = mt_model_params(t->model);
    MT_TRY(mt_h5_group(t->out, "grads"));
    for (int64_t i = 0; i < mt_param_store_count(store); i++) {
        const mt_param *p = mt_param_store_get(store, i);
        for (int64_t j = 0; j < p->part_count; j++) {
            const mt_param_part *part = &p->parts[j];
            int64_t first = (part->member * p->group.m + part->row) * p->group.k;
            int64_t matrix[2] = { part->rows, p->group.k }, vector = part->rows * p->group.k;
            mt_dtype dtype = p->grad_dtype;
            const void *at = (const char *)p->grad + (size_t)first * mt_dtype_size(dtype);
            char path[NAME_BYTES];
            snprintf(path, sizeof path, "grads/%s", part->name);
            MT_TRY(write_data(t, path, at, dtype, part->ndim, part->ndim == 1 ? &vector : matrix));
        }
    }
    return MT_OK;
}

/* ---- one batch ---------------------------------------------------------------------------------
 */

/* Tokens, targets and the scale of the loss in device memory. */
struct feed {
    void *memory;
    size_t bytes;
    mt_model_batch batch;
};

static mt_status feed_create(struct feed *feed, const struct tracer *t)
{
    const mt_trace_input *in = t->input;
    int64_t count = in->batch * in->sequence, counted = 0;
    size_t row = (size_t)count * sizeof(int32_t);
    double scale;
    for (int64_t i = 0; i < count; i++) counted += in->targets[i] != IGNORE;
    MT_REQUIRE(counted > 0 || !t->options->targets, MT_EINVAL, "trace: every target is ignored");
    mt_store_f64(&scale, t->real, 0, counted ? 1 / (double)counted : 0);
    feed->bytes = sizeof scale + 2 * row;
    MT_TRY(mt_device_alloc(t->device, &feed->memory, feed->bytes, MT_MEMORY_STATE));
    char *tokens = (char *)feed->memory + sizeof scale, *targets = tokens + row;
    MT_TRY(mt_device_copy(t->device, feed->memory, &scale, sizeof scale));
    MT_TRY(mt_device_copy(t->device, tokens, in->tokens, row));
    MT_TRY(mt_device_copy(t->device, targets, in->targets, row));
    feed->batch =
        (mt_model_batch){ .batch = in->batch,
                          .sequence = in->sequence,
                          .tokens = (const int32_t *)(void *)tokens,
                          .targets = t->options->targets ? (const int32_t *)(void *)targets : NULL,
                          .scale = feed->memory };
    return MT_OK;
}

static mt_status write_losses(struct tracer *t, const mt_model_output *out)
{
    const mt_model_config *c = mt_model_get_config(t->model);
    double loss, aux, z;
    MT_TRY(read_scalar(t, out->loss, &loss));
    MT_TRY(read_scalar(t, out->aux_loss, &aux));
    MT_TRY(read_scalar(t, out->z_loss, &z));
    double coefficient = c->aux_loss == MT_AUX_NONE ? 0 : c->router_aux_loss_coef;
    MT_TRY(write_scalar(t, "loss", loss));
    MT_TRY(write_scalar(t, "aux_loss", aux));
    t->loss = loss + coefficient * aux + c->z_loss_coef * z;
    return write_scalar(t, "total_loss", t->loss);
}

static mt_status run_pass(struct tracer *t, mt_tape *tape, const struct feed *feed)
{
    const mt_trace_input *in = t->input;
    mt_model_output out;
    MT_TRY(mt_model_begin_step(t->model));
    MT_TRY(mt_model_forward(t->model, tape, &feed->batch, true, &out));
    int64_t shape[3] = { in->batch, in->sequence, mt_model_get_config(t->model)->vocab_size };
    MT_TRY(write_data(t, "logits", out.logits->data.data, out.logits->data.dtype, 3, shape));
    if (t->options->targets) MT_TRY(write_losses(t, &out));
    if (t->options->grads) MT_TRY(mt_model_seed(t->model, tape, &out, 1));
    mt_model_output_release(tape, t->model, &out);
    if (!t->options->grads) return MT_OK;
    MT_TRY(mt_tape_backward(tape));
    MT_TRY(mt_tape_run_deferred(tape));
    MT_TRY(mt_param_store_end_step(mt_model_params(t->model)));
    return write_grads(t);
}

static mt_status run(struct tracer *t, mt_tape *tape, const struct feed *feed)
{
    if (t->options->activations) mt_tape_set_observer(tape, keep_activation, t);
    MT_TRY(mt_tape_begin(tape, 0, t->options->grads));
    MT_TRY(mt_tape_close(tape, run_pass(t, tape, feed)));
    return t->options->activations ? check_pattern(t) : MT_OK;
}

mt_status mt_trace_batch(double *loss, mt_h5 *out, mt_device *device, mt_model *model,
                         const mt_trace_input *input, const mt_trace_options *options)
{
    MT_REQUIRE(options->targets || !options->grads, MT_ECONFIG, "trace: gradients need targets");
    mt_stream stream = { .device = device };
    mt_tape *tape = NULL;
    struct feed feed = { 0 };
    struct tracer t = { .out = out,
                        .device = device,
                        .model = model,
                        .input = input,
                        .options = options,
                        .real = mt_param_store_get(mt_model_params(model), 0)->dtype };
    mt_status status = MT_OK;
    MT_TRY_CLEANUP(feed_create(&feed, &t));
    MT_TRY_CLEANUP(mt_tape_create(&tape, &stream, &(mt_tape_options){ 0 }));
    MT_TRY_CLEANUP(run(&t, tape, &feed));
    *loss = t.loss;
cleanup:
    mt_tape_destroy(&tape);
    mt_device_free(device, &feed.memory, feed.bytes, MT_MEMORY_STATE);
    return status;
}

/* ---- steps -------------------------------------------------------------------------------------
 */

mt_status mt_trace_steps(mt_h5 *out, mt_trainer *trainer, const mt_trace_input *input)
{
    enum { LOSS, AUX, NORM, SERIES };
    static const char *const names[SERIES] = { "losses", "aux_losses", "grad_norms" };
    int64_t n = input->steps, count = input->batch * input->sequence;
    mt_status status = MT_OK;
    double *series = malloc(SERIES * (size_t)n * sizeof *series);
    MT_REQUIRE(series, MT_ENOMEM, "trace: no memory for %lld losses", (long long)n);
    for (int64_t i = 0; i < n; i++) {
        mt_step_result r;
        MT_TRY_CLEANUP(
            mt_trainer_step(trainer, input->tokens + i * count, input->targets + i * count, &r));
        if (!r.loss_finite || r.skipped)
            MT_TRY_CLEANUP(MT_FAIL(MT_ENUMERIC, "step %lld: loss %g, gradient norm %g",
                                   (long long)i, r.loss, r.grad_norm));
        series[LOSS * n + i] = r.loss;
        series[AUX * n + i] = r.aux_loss;
        series[NORM * n + i] = r.grad_norm;
    }
    for (int i = 0; i < SERIES; i++)
        MT_TRY_CLEANUP(mt_h5_write(out, names[i], MT_F64, 1, &n, series + i * n));
cleanup:
    free(series);
    return status;
}
