/* mixtape trace: a checkpoint on given tokens, every number written out. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "train/checkpoint.h"
#include "train/cli.h"
#include "train/config.h"
#include "train/fileio.h"
#include "train/nan_watch.h"
#include "train/trace.h"

struct options {
    const char *tokens, *out, *dtype;
    int64_t steps;
    mt_option_list sets;
    mt_trace_options trace;
};

/* *dtype: MT_DTYPE_COUNT where none was given. */
static mt_status check_options(const struct options *o, mt_dtype *dtype)
{
    MT_REQUIRE(o->tokens && o->out, MT_ECONFIG, "trace: %s is missing",
               o->tokens ? "-o OUT.h5" : "--tokens IN.h5");
    *dtype = MT_DTYPE_COUNT;
    if (o->dtype) MT_TRY(mt_config_parse_compute(dtype, o->dtype));
    MT_REQUIRE(!o->trace.grads || o->trace.targets, MT_ECONFIG, "--grads needs --targets");
    MT_REQUIRE(!o->steps || !(o->trace.grads || o->trace.activations), MT_ECONFIG,
               "--steps writes losses only: --grads and --activations are of one batch");
    return MT_OK;
}

/* Whether it is of updates and nothing else: how weights and moments are stored, and eps, are held
 * against the dtype, whatever is made. */
static bool is_of_updates(const char *set)
{
    static const char *const others[] = { "optim.master=", "optim.moments=", "optim.moments_sr=",
                                          "optim.eps=" };
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (strncmp(set, others[i], strlen(others[i])) == 0) return false;
    return strncmp(set, "optim.", 6) == 0;
}

/* Whether it is of what a run has, and a trace does not make. */
static bool is_of_runs(const char *set)
{
    static const char *const runs[] = { "data.train",  "data.valid",
                                        "train.eval_", "train.log_every",
                                        "checkpoint",  "train.init_from",
                                        "statistics",  "recipe.quantized_init" };
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++)
        if (strncmp(set, runs[i], strlen(runs[i])) == 0) return true;
    return false;
}

/* What is meant for runs is not taken, nor what is for updates where none is made. */
static mt_status check_sets(const struct options *o)
{
    for (int i = 0; i < o->sets.count; i++) {
        const char *set = o->sets.items[i];
        MT_REQUIRE(!is_of_runs(set), MT_ECONFIG, "--set %.100s: it means nothing to trace", set);
        MT_REQUIRE(o->steps || !is_of_updates(set), MT_ECONFIG,
                   "--set %.100s: it means nothing without --steps", set);
    }
    return MT_OK;
}

/* --set may change how a model is trained, not what it is. */
static mt_status check_model(const mt_config *config, const mt_config *was)
{
    for (int i = 0; i < mt_config_key_count; i++) {
        const mt_config_key *key = &mt_config_keys[i];
        char now[MT_CONFIG_FORMATTED], before[MT_CONFIG_FORMATTED];
        if (!key->fixed || strncmp(key->path, "model.", 6) != 0) continue;
        mt_config_format(now, config, key);
        mt_config_format(before, was, key);
        MT_REQUIRE(strcmp(now, before) == 0, MT_ECONFIG,
                   "--set %s=%.100s: it is %.100s in the checkpoint", key->path, now, before);
    }
    return MT_OK;
}

/* The batch is the input's, on one rank; only a step divides it. */
static mt_status check_batch(const mt_trainer_config *t, mt_dtype dtype, const mt_trace_input *in,
                             bool steps)
{
    MT_REQUIRE(t->batch_size == in->batch && t->sequence_length == in->sequence &&
                   t->steps == in->steps && t->dtype == dtype,
               MT_ECONFIG,
               "trace: batch, sequence length, steps and dtype come from --tokens, --steps and "
               "--dtype, not from --set");
    MT_REQUIRE(steps || t->micro_batch_size == in->batch, MT_ECONFIG,
               "--set train.micro_batch_size=%lld: without --steps the %lld sequences of --tokens "
               "are computed at once",
               (long long)t->micro_batch_size, (long long)in->batch);
    MT_REQUIRE(t->expert_parallel == 1, MT_ECONFIG,
               "--set parallel.expert=%lld: trace runs on one rank", (long long)t->expert_parallel);
    return MT_OK;
}

/* The checkpoint's model and this batch as a configuration, on which --set works as everywhere. The
 * optimizer is that of the run that made the checkpoint, or the default one, at a constant rate.
 * *first_pass: of the run's next step. */
static mt_status make_config(mt_config *config, uint32_t *first_pass,
                             const mt_checkpoint_meta *meta, mt_dtype dtype,
                             const mt_trace_input *in, const struct options *o)
{
    mt_status status = MT_OK;
    char *text = NULL;
    MT_TRY(mt_config_defaults(config));
    if (*meta->run_config)
        MT_TRY(mt_config_parse_recorded(config, "run_config", meta->run_config,
                                        strlen(meta->run_config)));
    mt_trainer_config *t = &config->trainer;
    *first_pass = *meta->run_config ? mt_trainer_first_pass(t, meta->step) : 0;
    t->model = meta->config;
    const bool given = dtype != MT_DTYPE_COUNT;
    if (!given) dtype = t->grad_dtype == MT_F32 ? MT_F32 : t->dtype;
    t->dtype = dtype;
    t->sequence_length = in->sequence;
    t->batch_size = t->micro_batch_size = in->batch;
    t->steps = in->steps;
    if (dtype == MT_F64 && !o->steps) { /* which has neither, and updates nothing */
        t->optim.master = MT_MASTER_REAL, t->optim.moments = MT_MOMENTS_REAL;
        t->optim.moments_sr = false;
    }
    t->expert_parallel = 1;
    t->optim.schedule = MT_SCHEDULE_CONSTANT;
    t->optim.warmup_steps = 0;
    config->eval_every = 0;
    snprintf(config->train_corpus, sizeof config->train_corpus, "none");
    const mt_config was = *config;
    MT_TRY(mt_config_text(&text, config));
    MT_TRY_CLEANUP(
        mt_config_parse(config, "checkpoint", text, strlen(text), o->sets.items, o->sets.count));
    MT_TRY_CLEANUP(check_model(config, &was));
    MT_TRY_CLEANUP(check_batch(t, dtype, in, o->steps > 0));
    if (!given && t->grad_dtype == MT_F32) t->dtype = MT_F32; /* or so --set has it */
cleanup:
    free(text);
    return status;
}

/* Whether what was written is numbers, and was computed from such. */
static mt_status check_numbers(mt_nan_watch *nans, double loss)
{
    MT_REQUIRE(isfinite(loss), MT_ENUMERIC, "the total loss is %g", fabs(loss));
    return mt_nan_watch_check(nans);
}

/* *numerics: of numbers that were written, and are none; the last error then. */
static mt_status run_batch(mt_status *numerics, mt_h5 *out, mt_device *device, mt_model *model,
                           const mt_trace_input *in, const mt_trace_options *options)
{
    mt_nan_watch *nans;
    double loss;
    MT_TRY(mt_trainer_check_weights(model, NULL));
    MT_TRY(mt_nan_watch_create_forward(&nans, model));
    mt_status status = mt_trace_batch(&loss, out, device, model, in, options);
    if (status == MT_OK) *numerics = check_numbers(nans, loss);
    mt_nan_watch_destroy(&nans);
    return status;
}

static mt_status trace_batch(mt_status *numerics, mt_h5 *out, mt_device *device,
                             mt_checkpoint *checkpoint, uint32_t first_pass,
                             const mt_trainer_config *c, const mt_trace_input *in,
                             const mt_trace_options *options)
{
    mt_model *model;
    mt_recipe_rules *rules;
    mt_precision_options precision;
    MT_TRY(mt_trainer_precision(&precision, &rules, c));
    mt_status status = mt_model_create(&model, device, &c->model, c->dtype, in->sequence,
                                       options->grads, &precision);
    mt_recipe_rules_destroy(&rules);
    MT_TRY(status);
    status = mt_precision_set_first_pass(mt_model_precision(model), first_pass);
    if (status == MT_OK) status = mt_checkpoint_restore_model(model, checkpoint);
    if (status == MT_OK) status = run_batch(numerics, out, device, model, in, options);
    mt_model_destroy(&model);
    return status;
}

/* Losses of steps that meet NaNs are not written, numbers or not. */
static mt_status run_steps(mt_h5 *out, mt_trainer *trainer, const mt_trace_input *in)
{
    mt_nan_watch *nans;
    MT_TRY(mt_trainer_check_weights(mt_trainer_model(trainer), NULL));
    MT_TRY(mt_nan_watch_create(&nans, mt_trainer_model(trainer)));
    mt_status status = mt_trace_steps(out, trainer, in);
    if (status == MT_OK) status = mt_nan_watch_check(nans);
    mt_nan_watch_destroy(&nans);
    return status;
}

static mt_status trace_steps(mt_h5 *out, mt_device *device, mt_checkpoint *checkpoint,
                             const mt_trainer_config *c, const mt_trace_input *in)
{
    mt_trainer *trainer;
    mt_trainer_config own = *c;
    const int64_t step = mt_checkpoint_get_meta(checkpoint)->step;
    own.weights_come = true;
    MT_TRY(mt_trainer_create(&trainer, device, &own));
    mt_status status = mt_checkpoint_restore_model(mt_trainer_model(trainer), checkpoint);
    if (status == MT_OK) status = mt_trainer_set_steps(trainer, step);
    if (status == MT_OK) status = run_steps(out, trainer, in);
    mt_trainer_destroy(&trainer);
    return status;
}

/* Everything but reading the input. A batch whose loss is no number is written, and an error. */
static mt_status write_trace(mt_checkpoint *checkpoint, uint32_t first_pass,
                             const mt_config *config, const mt_trace_input *in,
                             const struct options *o)
{
    mt_status status = MT_OK, numerics = MT_OK;
    mt_h5 *out = NULL;
    mt_device *device = NULL;
    char sentence[512];
    const mt_trainer_config *c = &config->trainer;
    MT_TRY_CLEANUP(mt_device_open(&device, config->device, NULL, 0));
    MT_TRY_CLEANUP(mt_h5_create(&out, o->out));
    if (o->steps)
        MT_TRY_CLEANUP(trace_steps(out, device, checkpoint, c, in));
    else
        MT_TRY_CLEANUP(
            trace_batch(&numerics, out, device, checkpoint, first_pass, c, in, &o->trace));
    snprintf(sentence, sizeof sentence, "%s", mt_error_message());
    MT_TRY_CLEANUP(mt_h5_commit(&out));
    if (numerics != MT_OK)
        status = MT_FAIL(numerics, "%s; all that was computed is in '%s'", sentence, o->out);
cleanup:
    mt_h5_close(&out);
    mt_device_destroy(&device);
    return status;
}

static mt_status trace(const char *given, const struct options *o)
{
    char skipped[1024];
    mt_dtype dtype;
    mt_checkpoint *checkpoint = NULL;
    mt_trace_input in = { 0 };
    mt_config config;
    uint32_t first_pass = 0;
    MT_TRY(check_options(o, &dtype));
    MT_TRY(mt_file_check_result(o->out, o->tokens));
    mt_status status = MT_OK;
    MT_TRY(mt_checkpoint_open_given(&checkpoint, skipped, sizeof skipped, given));
    if (*skipped) fprintf(stderr, "left aside: %s\n", skipped);
    const mt_checkpoint_meta *meta = mt_checkpoint_get_meta(checkpoint);
    MT_TRY_CLEANUP(mt_trace_input_read(&in, o->tokens, o->steps > 0, meta->config.vocab_size));
    if (in.sequence > meta->config.max_position_embeddings)
        MT_TRY_CLEANUP(MT_FAIL(MT_ECONFIG,
                               "'%s', tokens: sequences of %lld; the model takes 1 to %lld (its "
                               "max_position_embeddings)",
                               o->tokens, (long long)in.sequence,
                               (long long)meta->config.max_position_embeddings));
    if (o->steps || o->trace.targets) MT_TRY_CLEANUP(mt_trace_input_check_targets(&in, o->tokens));
    if (o->steps && in.steps != o->steps)
        MT_TRY_CLEANUP(MT_FAIL(MT_ECONFIG, "--steps is %lld, %s holds %lld batches",
                               (long long)o->steps, o->tokens, (long long)in.steps));
    MT_TRY_CLEANUP(make_config(&config, &first_pass, meta, dtype, &in, o));
    MT_TRY_CLEANUP(check_sets(o));
    MT_TRY_CLEANUP(write_trace(checkpoint, first_pass, &config, &in, o));
cleanup:
    mt_trace_input_free(&in);
    mt_checkpoint_close(&checkpoint);
    return status;
}

mt_status mt_verb_trace(int argc, char **argv)
{
    struct options o = { .dtype = NULL };
    const mt_option options[] = {
        { "tokens", MT_OPTION_PATH, &o.tokens, "IN.h5",
          "dataset tokens int64 [B,S], maybe targets [B,S] (-100: ignored)" },
        { "o", MT_OPTION_PATH, &o.out, "OUT.h5", "where to write" },
        { "targets", MT_OPTION_FLAG, &o.trace.targets, NULL,
          "loss, aux_loss and total_loss too; without a dataset targets, of the next token" },
        { "grads", MT_OPTION_FLAG, &o.trace.grads, NULL,
          "grads/<name> of total_loss, for every tensor as it is exported" },
        { "activations", MT_OPTION_TEXT, &o.trace.activations, "GLOB",
          "activations/<name> of those that fit, [B,S,width]" },
        { "dtype", MT_OPTION_TEXT, &o.dtype, "DTYPE",
          "compute in f32 (default; a run with other gradients in its own), bf16 or f64; f64 is "
          "written as f64, the others as f32" },
        { "steps", MT_OPTION_COUNT, &o.steps, "N",
          "tokens are [N,B,S]: one AdamW step each; losses, aux_losses, grad_norms f64 [N]" },
        { "set", MT_OPTION_LIST, &o.sets, "K=V", "a configuration key, such as optim.lr=1e-3" },
    };
    const mt_command command = {
        .usage = "mixtape trace CKPT|RUN --tokens IN.h5 -o OUT.h5 [options]",
        .about =
            "Runs a checkpoint on given tokens and writes what it computes into an HDF5 file, for\n"
            "comparison with other programs: logits, losses, gradients, activations, or the\n"
            "losses of some optimizer steps; in the recipe and with the optimizer of its run, "
            "from\n"
            "moments of zero on and at a constant rate.",
        .options = options,
        .option_count = sizeof options / sizeof *options,
        .min_arguments = 1,
        .max_arguments = 1,
    };
    int count;
    bool help;
    MT_TRY(mt_command_parse(&command, argc, argv, &count, &help));
    if (help) return MT_OK;
    return trace(argv[1], &o);
}
