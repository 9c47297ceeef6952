/* The gradient checker: the tape against five-point central differences in f64, for every
 * differentiable op and for whole models. */
#pragma once

#include "train/trainer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* |analytic - numeric| / max(|analytic|, |numeric|, 1e-3 max |gradient|) must stay below this,
 * unless |analytic - numeric| is what rounding leaves in a difference. */
#define MT_GRADCHECK_LIMIT 1e-6

typedef struct mt_gradcheck_result {
    const char *op;  /* "grouped_linear", "model" */
    char name[128];  /* what is particular about this case */
    int64_t checked; /* elements compared */
    double worst;    /* worst relative error */
    char where[128]; /* "weight[17]" */
    double analytic, numeric;
} mt_gradcheck_result;

typedef void (*mt_gradcheck_report)(void *context, const mt_gradcheck_result *result);

/* Runs every case of the ops whose name matches `glob` (NULL: all) on the cpu device; reports each.
 * *failed counts cases over the limit. MT_EINTERNAL when a differentiable op has no case. */
mt_status mt_gradcheck_ops(mt_device *device, const char *glob, mt_gradcheck_report report,
                           void *context, int64_t *failed);

/* Checks the model of a configuration, under its memory options: `samples` elements of every param
 * (0: all), one result per param. */
mt_status mt_gradcheck_model(mt_device *device, const mt_trainer_config *config, int64_t batch,
                             int64_t sequence, int64_t samples, const char *name,
                             mt_gradcheck_report report, void *context, int64_t *failed);

/* The built-in two-block models: three architectures, ragged, empty-expert and all-in-one routings.
 */
mt_status mt_gradcheck_models(mt_device *device, mt_gradcheck_report report, void *context,
                              int64_t *failed);

/* The recipes that quantized layers are checked in: the presets, then pairings drawn slot by slot.
 * *found false: there is no recipe i. */
mt_status mt_gradcheck_recipe(mt_recipe *recipe, char name[MT_RECIPE_TEXT], int i, bool *found);

#ifdef __cplusplus
}
#endif
