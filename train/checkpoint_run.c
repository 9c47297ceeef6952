/* Checkpoints of training runs and models: the trainer's side. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/ops.h"
#include "train/checkpoint_priv.h"
#include "train/config.h"
#include "train/hf.h"

static void describe_model(mt_checkpoint_state *s, const mt_model *model)
{
    s->config = mt_model_get_config(model);
    s->params = mt_model_params(model);
    s->precision = mt_model_precision(model);
    s->moe_layers = mt_model_moe_layers(model);
    for (int64_t i = 0; i < s->moe_layers; i++) s->router_bias[i] = mt_model_router_bias(model, i);
}

static void describe_trainer(mt_checkpoint_state *s, const mt_trainer *trainer)
{
    const mt_trainer_config *config = mt_trainer_get_config(trainer);
    const mt_optimizer *optimizer = mt_trainer_optimizer(trainer);
    *s = (mt_checkpoint_state){ .m = mt_optimizer_m(optimizer),
                                .v = mt_optimizer_v(optimizer),
                                .moments = mt_optimizer_moments(optimizer),
                                .m_scales = mt_optimizer_m_scales(optimizer),
                                .v_scales = mt_optimizer_v_scales(optimizer),
                                .step_state = mt_optimizer_state(optimizer),
                                .step = mt_trainer_steps(trainer),
                                .tokens = mt_trainer_tokens(trainer),
                                .dropped = mt_trainer_dropped(trainer),
                                .seed = config->seed,
                                .compute = config->dtype,
                                .comm = config->comm };
    describe_model(s, mt_trainer_model(trainer));
}

mt_status mt_checkpoint_save(const char *dir, const mt_trainer *trainer,
                             const mt_checkpoint_info *info, char path[MT_CHECKPOINT_PATH])
{
    char target[MT_PATH_BYTES];
    mt_checkpoint_state state;
    describe_trainer(&state, trainer);
    MT_TRY(mt_path_format(target, "%s/step_%08lld", dir, (long long)state.step));
    MT_TRY(mt_checkpoint_write(target, &state, info));
    if (path) memcpy(path, target, sizeof target);
    return MT_OK;
}

/* What a line of JSON says, between blanks and a comma. */
static int says(const char **line, int length)
{
    while (length && **line == ' ') ++*line, length--;
    return length && (*line)[length - 1] == ',' ? length - 1 : length;
}

/* MT_ECONFIG names the first key in which a checkpoint's model differs from ours; our texts have
 * one key a line, in sorted order. */
static mt_status compare_models(const mt_model_config *was, const mt_model_config *config,
                                const char *path)
{
    char *theirs = NULL, *ours = NULL;
    mt_status status;
    MT_TRY_CLEANUP(mt_hf_config_format(&theirs, was, MT_DTYPE_COUNT, NULL, false));
    MT_TRY_CLEANUP(mt_hf_config_format(&ours, config, MT_DTYPE_COUNT, NULL, false));
    for (const char *a = theirs, *b = ours; *a || *b;) {
        int n = (int)strcspn(a, "\n"), m = (int)strcspn(b, "\n");
        if (n != m || memcmp(a, b, (size_t)n)) {
            n = says(&a, n), m = says(&b, m);
            status = MT_FAIL(MT_ECONFIG,
                             "checkpoint '%s' is of another model: it has %.*s, the run %.*s", path,
                             n, a, m, b);
            break;
        }
        a += n + (a[n] == '\n'), b += m + (b[m] == '\n');
    }
cleanup:
    free(theirs);
    free(ours);
    return status;
}

/* What the loss weighs the balance by is not the model's. */
static mt_status check_same_model(const mt_checkpoint_meta *meta, const mt_model_config *config,
                                  const char *path)
{
    mt_model_config was = meta->config;
    was.router_aux_loss_coef = config->router_aux_loss_coef;
    return compare_models(&was, config, path);
}

/* Keys by which the same weights compute something else; others are of training, or of shapes. */
static mt_status check_same_function(const mt_checkpoint_meta *meta, const mt_model_config *config,
                                     const char *path)
{
    const mt_model_config *theirs = &meta->config;
    mt_model_config was = *config;
    was.architecture = theirs->architecture;
    was.num_attention_heads = theirs->num_attention_heads;
    was.num_key_value_heads = theirs->num_key_value_heads, was.head_dim = theirs->head_dim;
    was.num_experts_per_tok = theirs->num_experts_per_tok;
    was.norm_topk_prob = theirs->norm_topk_prob, was.rms_norm_eps = theirs->rms_norm_eps;
    was.rope_theta = theirs->rope_theta, was.tie_word_embeddings = theirs->tie_word_embeddings;
    return compare_models(&was, config, path);
}

static mt_status check_same_run(const mt_checkpoint_meta *meta, const mt_trainer_config *config,
                                const char *corpus, const char *path)
{
    MT_TRY(check_same_model(meta, &config->model, path));
    MT_REQUIRE(meta->seed == config->seed, MT_ECONFIG,
               "checkpoint '%s' is of a run with seed %llu, this one has %llu", path,
               (unsigned long long)meta->seed, (unsigned long long)config->seed);
    MT_REQUIRE(!corpus || !strcmp(corpus, meta->corpus), MT_ECONFIG,
               "data.train: checkpoint '%s' was trained on corpus '%s', this run's is '%s'", path,
               meta->corpus, corpus);
    return MT_OK;
}

/* What is refused (the last error) is offered to be forced where it can be. */
static mt_status offer_force(mt_status status, const mt_checkpoint_state *s,
                             mt_checkpoint *checkpoint)
{
    char why[MT_ERROR_BYTES];
    mt_checkpoint_state tried = *s;
    struct mt_step_state step;
    if (status != MT_ECONFIG || !mt_checkpoint_get_meta(checkpoint)->training) return status;
    snprintf(why, sizeof why, "%s", mt_error_message());
    bool fits = mt_checkpoint_check_fit(&tried, checkpoint, &step) == MT_OK;
    return MT_FAIL(status, "%.960s%s", why, fits ? " (--force to go on all the same)" : "");
}

/* What does not fit (the last error) into another model than the checkpoint's, or into one that is
 * computed in another type, is no damage. */
static mt_status blame_config(const mt_checkpoint_meta *meta, const mt_trainer_config *config,
                              const char *path)
{
    char why[1024];
    snprintf(why, sizeof why, "%s", mt_error_message());
    bool same_compute = !strcmp(meta->compute, mt_dtype_name(config->dtype));
    if (same_compute && check_same_model(meta, &config->model, path) != MT_ECONFIG)
        return MT_FAIL(MT_EDAMAGED, "%s", why);
    return MT_FAIL(MT_ECONFIG,
                   "%s: tensors, their types and shapes must be the checkpoint's, --force or not",
                   why);
}

/* Tokens of the steps made. Older checkpoints do not say them: they went on after so many batches
 * of the run as it was configured then, whatever the size of those to come. */
static mt_status count_tokens(int64_t *tokens, const mt_checkpoint_meta *meta, const char *path)
{
    mt_config run;
    *tokens = meta->tokens;
    if (*tokens >= 0 || !meta->training) return MT_OK;
    MT_REQUIRE(
        *meta->run_config, MT_EDAMAGED,
        "checkpoint '%s' says neither how many tokens its %lld steps had (tokens of /data) "
        "nor how large a batch was (run_config of /meta): the place in the data is not known",
        path, (long long)meta->step);
    MT_TRY(mt_config_parse_recorded(&run, path, meta->run_config, strlen(meta->run_config)));
    *tokens = meta->step * run.trainer.batch_size * run.trainer.sequence_length;
    return MT_OK;
}

/* Closes it. */
static mt_status load(mt_trainer *trainer, mt_checkpoint *checkpoint, const char *corpus,
                      bool force)
{
    const char *path = mt_checkpoint_path(checkpoint);
    mt_checkpoint_state state;
    int64_t tokens = 0;
    mt_status status = MT_OK;
    describe_trainer(&state, trainer);
    const mt_checkpoint_meta *meta = mt_checkpoint_get_meta(checkpoint);
    if (!force) status = check_same_run(meta, mt_trainer_get_config(trainer), corpus, path);
    status = offer_force(status, &state, checkpoint);
    if (status == MT_OK) status = count_tokens(&tokens, meta, path);
    if (status == MT_OK) status = mt_checkpoint_restore(&state, checkpoint);
    if (status == MT_OK) status = mt_model_use_router_bias(mt_trainer_model(trainer));
    if (status == MT_EDAMAGED && state.misfit)
        status = blame_config(meta, mt_trainer_get_config(trainer), path);
    MT_TRY_CLEANUP(mt_comm_agree(state.comm, status, "reading a checkpoint"));
    MT_TRY_CLEANUP(mt_trainer_set_steps(trainer, state.step));
    mt_trainer_set_tokens(trainer, tokens);
    mt_trainer_set_dropped(trainer, state.dropped);
    MT_TRY_CLEANUP(mt_checkpoint_read_nans(&state, checkpoint));
cleanup:
    mt_checkpoint_close(&checkpoint);
    return status;
}

mt_status mt_checkpoint_load(mt_trainer *trainer, const char *path, const char *corpus, bool force)
{
    mt_checkpoint *checkpoint;
    mt_comm *comm = mt_trainer_get_config(trainer)->comm;
    MT_TRY(mt_checkpoint_open_among(&checkpoint, path, comm, false));
    return load(trainer, checkpoint, corpus, force);
}

mt_status mt_checkpoint_load_latest(mt_trainer *trainer, char path[MT_CHECKPOINT_PATH],
                                    char *skipped, size_t skipped_bytes, const char *dir,
                                    const char *corpus, bool force)
{
    mt_checkpoint *checkpoint;
    mt_comm *comm = mt_trainer_get_config(trainer)->comm;
    MT_TRY(mt_checkpoint_open_latest(&checkpoint, skipped, skipped_bytes, dir, comm, false));
    snprintf(path, MT_CHECKPOINT_PATH, "%s", mt_checkpoint_path(checkpoint));
    return load(trainer, checkpoint, corpus, force);
}

/* Of the model's layout, which takes no memory. */
static mt_status check_source(mt_checkpoint *source, const mt_model_config *config)
{
    struct mt_step_state step;
    mt_checkpoint_state state = { .m = NULL };
    mt_device *plan = NULL;
    mt_model *model = NULL;
    mt_status status;
    MT_TRY_CLEANUP(mt_device_open(&plan, "plan", NULL, 1));
    MT_TRY_CLEANUP(mt_model_create(&model, plan, config, MT_F32, 1, false, NULL));
    MT_TRY_CLEANUP(check_same_function(mt_checkpoint_get_meta(source), mt_model_get_config(model),
                                       mt_checkpoint_path(source)));
    describe_model(&state, model);
    status = mt_checkpoint_check_fit(&state, source, &step);
    if (status == MT_EDAMAGED)
        status =
            MT_FAIL(MT_ECONFIG, "%s: tensors and shapes must be the model's", mt_error_message());
cleanup:
    mt_model_destroy(&model);
    mt_device_destroy(&plan);
    return status;
}

mt_status mt_checkpoint_open_source(mt_checkpoint **source, char *skipped, size_t skipped_bytes,
                                    const char *given, const mt_model_config *config, mt_comm *comm)
{
    mt_status status = mt_checkpoint_open_given_among(source, skipped, skipped_bytes, given, comm);
    if (status == MT_OK) status = check_source(*source, config);
    if (status != MT_OK) status = MT_FAIL(status, "train.init_from: %s", mt_error_message());
    return mt_comm_agree(comm, status, "a checkpoint to begin with");
}

mt_status mt_checkpoint_begin(mt_trainer *trainer, mt_checkpoint *source)
{
    mt_checkpoint_state state;
    mt_model *model = mt_trainer_model(trainer);
    const mt_trainer_config *config = mt_trainer_get_config(trainer);
    describe_trainer(&state, trainer);
    mt_stream stream = { .device = mt_param_store_device(state.params) };
    state.m = state.v = NULL;
    mt_status status = mt_checkpoint_restore(&state, source);
    if (status != MT_OK) status = MT_FAIL(status, "train.init_from: %s", mt_error_message());
    MT_TRY(mt_comm_agree(state.comm, status, "reading weights to begin with"));
    MT_TRY(mt_model_use_router_bias(model));
    MT_TRY(mt_precision_forget(mt_model_precision(model)));
    if (config->quantized_init)
        MT_TRY(mt_precision_quantized_init(mt_model_precision(model), &stream));
    return mt_model_refresh(model, &stream);
}

/* What the run's passes compute in after that step: its recipes, and the scales that its formats
 * carry. In other formats than the run's they begin at 1. */
static mt_status load_formats(mt_model *model, const mt_checkpoint_state *state, mt_checkpoint *c)
{
    bool changed;
    MT_TRY(mt_precision_set_step(mt_model_precision(model), state->step, &changed));
    mt_status status = mt_checkpoint_delayed(state, c, false);
    if (status == MT_OK) return mt_checkpoint_delayed(state, c, true);
    if (status != MT_ECONFIG) return status;
    mt_error_clear();
    return mt_precision_forget(mt_model_precision(model));
}

mt_status mt_checkpoint_restore_model(mt_model *model, mt_checkpoint *checkpoint)
{
    mt_checkpoint_state state = { .m = NULL };
    describe_model(&state, model);
    mt_stream stream = { .device = mt_param_store_device(state.params) };
    MT_TRY(mt_checkpoint_restore(&state, checkpoint));
    MT_TRY(mt_model_use_router_bias(model));
    MT_TRY(load_formats(model, &state, checkpoint));
    return mt_model_refresh(model, &stream);
}

mt_status mt_checkpoint_load_model(mt_model *model, const char *path)
{
    mt_checkpoint *checkpoint;
    MT_TRY(mt_checkpoint_open(&checkpoint, path));
    mt_status status = mt_checkpoint_restore_model(model, checkpoint);
    mt_checkpoint_close(&checkpoint);
    return status == MT_OK ? MT_OK : mt_error_pass(status, __FILE__, __LINE__);
}
