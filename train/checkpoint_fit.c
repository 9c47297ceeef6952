/* Whether the checkpoints of a configuration can be those of another, of what trainers of both
 * would have. */
#include <string.h>

#include "kernels/ops.h"
#include "train/checkpoint_priv.h"

/* What takes no memory: sizes are all that is asked for. Experts are whole in checkpoints. */
static mt_status create(mt_trainer **trainer, mt_device *device, const mt_trainer_config *config)
{
    mt_trainer_config alone = *config;
    alone.expert_parallel = 1, alone.comm = NULL;
    return mt_trainer_create(trainer, device, &alone);
}

static bool same_parts(const mt_param *a, const mt_param *b)
{
    if (a->part_count != b->part_count || a->dtype != b->dtype) return false;
    for (int64_t i = 0; i < a->part_count; i++) {
        mt_tensor x = mt_part_tensor(a, &a->parts[i], a->dtype);
        mt_tensor y = mt_part_tensor(b, &b->parts[i], b->dtype);
        bool same = !strcmp(a->parts[i].name, b->parts[i].name) && x.ndim == y.ndim;
        for (int d = 0; same && d < x.ndim; d++) same = x.shape[d] == y.shape[d];
        if (!same) return false;
    }
    return true;
}

static bool same_tensors(const mt_trainer *a, const mt_trainer *b)
{
    const mt_param_store *x = mt_model_params(mt_trainer_model(a));
    const mt_param_store *y = mt_model_params(mt_trainer_model(b));
    bool same = mt_param_store_count(x) == mt_param_store_count(y);
    for (int64_t i = 0; same && i < mt_param_store_count(x); i++)
        same = same_parts(mt_param_store_get(x, i), mt_param_store_get(y, i));
    return same && mt_optimizer_moments(mt_trainer_optimizer(a)) ==
                       mt_optimizer_moments(mt_trainer_optimizer(b));
}

/* Histories of delayed scaling, where there are any, are there for all that wants one. */
static bool has_states(const mt_trainer *from, const mt_trainer *to)
{
    const mt_precision *p = mt_model_precision(mt_trainer_model(from));
    const mt_precision *q = mt_model_precision(mt_trainer_model(to));
    int64_t n = p ? mt_precision_state_count(p) : 0, m = q ? mt_precision_state_count(q) : 0;
    char name[256], wanted[256];
    bool all = true;
    for (int64_t i = 0; n && all && i < m; i++) {
        mt_tensor want = mt_precision_state(q, i, wanted);
        all = false;
        for (int64_t j = 0; !all && j < n; j++) {
            mt_tensor has = mt_precision_state(p, j, name);
            all = !strcmp(name, wanted) && has.ndim == want.ndim && has.shape[0] == want.shape[0];
        }
    }
    return all;
}

bool mt_checkpoint_fits(const mt_trainer_config *saved, const mt_trainer_config *now)
{
    mt_device *device = NULL;
    mt_trainer *from = NULL, *to = NULL;
    bool fits = mt_device_open(&device, "plan", NULL, 1) == MT_OK &&
                create(&from, device, saved) == MT_OK && create(&to, device, now) == MT_OK &&
                same_tensors(from, to) && has_states(from, to);
    mt_trainer_destroy(&from);
    mt_trainer_destroy(&to);
    mt_device_destroy(&device);
    mt_error_clear();
    return fits;
}
