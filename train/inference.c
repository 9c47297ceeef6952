/* The checkpoint's own configuration, where it came from a run, decides what the caller does not.
 */
#include "train/inference.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "train/fileio.h"

enum { SEQUENCE = 512, BATCH = 8, MOST_SEQUENCES = 1 << 20 };

static mt_status read_config(mt_inference *n, const mt_checkpoint *checkpoint)
{
    const mt_checkpoint_meta *meta = mt_checkpoint_get_meta(checkpoint);
    MT_TRY(mt_path_format(n->path, "%s", mt_checkpoint_path(checkpoint)));
    n->has_run = *meta->run_config != '\0';
    mt_status status = n->has_run ? mt_config_parse_recorded(&n->config, n->path, meta->run_config,
                                                             strlen(meta->run_config))
                                  : mt_config_defaults(&n->config);
    n->config.trainer.model = meta->config;
    if (n->has_run && status == MT_OK)
        n->first_pass = mt_trainer_first_pass(&n->config.trainer, meta->step);
    return status;
}

/* What a run was allowed to compute in may be refused by now: then another recipe has to be given.
 */
static mt_status settle_recipe(mt_inference *n, const char *given)
{
    mt_trainer_config *t = &n->config.trainer;
    mt_recipe_rules *rules = NULL;
    MT_REQUIRE(!given || strlen(given) < sizeof t->recipe, MT_ECONFIG,
               "a recipe of %zu bytes, at most %zu", strlen(given), sizeof t->recipe - 1);
    if (given) snprintf(t->recipe, sizeof t->recipe, "%s", given);
    mt_status status = mt_recipe_rules_create(&rules, t->recipe, t->dtype);
    mt_recipe_rules_destroy(&rules);
    if (status != MT_ECONFIG || given) return status;
    return MT_FAIL(status,
                   "%.300s: the recipe of its run is refused: %s; the recipe none computes in %s, "
                   "another one in other formats",
                   n->path, mt_error_message(), mt_dtype_name(t->dtype));
}

static mt_status settle(mt_inference *n, const mt_inference_options *options)
{
    mt_trainer_config *t = &n->config.trainer;
    if (!n->has_run) {
        t->sequence_length = SEQUENCE;
        t->micro_batch_size = BATCH;
    }
    if (options->sequence_length) t->sequence_length = options->sequence_length;
    if (options->batch_size) t->micro_batch_size = options->batch_size;
    if (t->sequence_length > t->model.max_position_embeddings && !options->sequence_length)
        t->sequence_length = t->model.max_position_embeddings;
    MT_REQUIRE(t->sequence_length > 0 && t->sequence_length <= t->model.max_position_embeddings,
               MT_ECONFIG,
               "sequences of %lld tokens: the model takes 1 to %lld (its max_position_embeddings)",
               (long long)t->sequence_length, (long long)t->model.max_position_embeddings);
    MT_REQUIRE(t->micro_batch_size > 0 && t->micro_batch_size <= MOST_SEQUENCES, MT_ECONFIG,
               "batches of %lld sequences, must be from 1 to %d", (long long)t->micro_batch_size,
               MOST_SEQUENCES);
    t->batch_size = t->micro_batch_size;
    if (options->dtype) MT_TRY(mt_config_parse_compute(&t->dtype, options->dtype));
    if (t->dtype == MT_F64) t->optim.master = MT_MASTER_REAL; /* which f64 keeps in f64 alone */
    MT_TRY(settle_recipe(n, options->recipe));
    t->recompute = MT_RECOMPUTE_NONE;
    t->offload = false;
    t->expert_parallel = 1;
    t->forward_only = t->weights_come = true;
    return MT_OK;
}

static mt_status build(mt_inference *n, mt_checkpoint *checkpoint,
                       const mt_inference_options *options)
{
    MT_TRY(read_config(n, checkpoint));
    MT_TRY(settle(n, options));
    const char *device = options->device ? options->device : n->config.device;
    MT_TRY(mt_config_check_device(device));
    MT_TRY(mt_device_open(&n->device, device, NULL, 0));
    MT_TRY(mt_trainer_create(&n->trainer, n->device, &n->config.trainer));
    mt_precision *precision = mt_model_precision(mt_trainer_model(n->trainer));
    MT_TRY(mt_precision_set_first_pass(precision, n->first_pass));
    return mt_checkpoint_restore_model(mt_trainer_model(n->trainer), checkpoint);
}

/* It stays open in between: a run that goes on may remove it. */
static mt_status open_and_build(mt_inference *n, const char *given,
                                const mt_inference_options *options)
{
    mt_checkpoint *checkpoint;
    MT_TRY(mt_checkpoint_open_given(&checkpoint, n->skipped, sizeof n->skipped, given));
    mt_status status = build(n, checkpoint, options);
    mt_checkpoint_close(&checkpoint);
    return status;
}

mt_status mt_inference_open(mt_inference **inference, const char *given,
                            const mt_inference_options *options)
{
    *inference = calloc(1, sizeof **inference);
    MT_REQUIRE(*inference, MT_ENOMEM, "no memory to open %.300s", given);
    mt_status status = open_and_build(*inference, given, options);
    if (status != MT_OK) mt_inference_close(inference);
    return status;
}

void mt_inference_close(mt_inference **inference)
{
    mt_inference *n = *inference;
    if (!n) return;
    mt_trainer_destroy(&n->trainer);
    mt_device_destroy(&n->device);
    free(n);
    *inference = NULL;
}
