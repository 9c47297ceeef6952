/* AdamW on flat buffers, learning-rate schedules, clipping, skipping of non-finite steps. */
#pragma once

#include "core/param.h"
#include "dist/comm.h"
#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum mt_schedule {
    MT_SCHEDULE_CONSTANT,
    MT_SCHEDULE_LINEAR, /* to min_lr at the last step */
    MT_SCHEDULE_COSINE,
    MT_SCHEDULE_WSD, /* warm-up, stable, then linear decay over the last fifth */
    MT_SCHEDULE_COUNT
} mt_schedule;

/* Each one's, then NULL. */
extern const char *const mt_schedule_names[MT_SCHEDULE_COUNT + 1];

typedef struct mt_optim_config {
    double lr, min_lr;
    mt_schedule schedule;
    int64_t warmup_steps; /* linear from lr / warmup_steps at step 0 */
    double weight_decay, beta1, beta2, eps;
    double grad_clip;   /* global L2 norm; 0: none */
    mt_moments moments; /* how m and v, and the masters, are stored; real under f64 compute */
    bool moments_sr;    /* bf16 moments are rounded stochastically */
    mt_master master;
    bool offload;  /* masters and moments wait in the host's memory (mt_param_store_offload) */
    uint64_t seed; /* with the index of a param in its store: of stochastic rounding */
} mt_optim_config;

void mt_optim_config_defaults(mt_optim_config *config);
/* MT_ECONFIG names key, value and rule. */
mt_status mt_optim_config_check(const mt_optim_config *config);
/* The rules that depend on what is computed in: `real` is f32, or f64, which stores nothing else.
 */
mt_status mt_optim_config_check_real(const mt_optim_config *config, mt_dtype real);

/* Learning rate of step 0 <= step < total. */
double mt_schedule_lr(const mt_optim_config *config, int64_t step, int64_t total);

typedef struct mt_optimizer mt_optimizer;

/* Moments for every param of the store (zero), whose masters must have the form that the
 * configuration names (mt_param_store_set_master). Of a sharded store, this rank's. Ownership:
 * store borrowed. */
mt_status mt_optimizer_create(mt_optimizer **optimizer, mt_param_store *store,
                              const mt_optim_config *config);
/* The ranks that hold the other shards: the norm is of all of them. Borrowed. */
void mt_optimizer_set_comm(mt_optimizer *optimizer, mt_comm *comm);
/* Told of every param that a step updates, in the order of the store, once the stream has been
 * given its update. */
typedef mt_status (*mt_optimizer_updated)(void *context, mt_param *param);
void mt_optimizer_set_updated(mt_optimizer *optimizer, mt_optimizer_updated updated, void *context);
void mt_optimizer_destroy(mt_optimizer **optimizer);

/* The learning rate of the updates to come. */
mt_status mt_optimizer_set_lr(mt_optimizer *optimizer, double lr);
/* One update from the store's gradients. Collective where it is sharded. Nothing is read back: a
 * non-finite norm, or a non-finite *loss (device scalar of the params' dtype, may be NULL), makes
 * the update a no-op on the device and is counted there. MT_EINVAL, with nothing counted: the store
 * has no gradients. */
mt_status mt_optimizer_step(mt_optimizer *optimizer, mt_stream *stream, const void *loss);

/* Device step state (kernels/optimizer.h). */
struct mt_step_state *mt_optimizer_state(const mt_optimizer *optimizer);
/* The flat moments: elements of the form's dtype in the places of the store's flat buffers; and
 * their scales, one for each block of the flat buffer, or NULL. Params begin at blocks' edges. */
mt_moments mt_optimizer_moments(const mt_optimizer *optimizer);
void *mt_optimizer_m(const mt_optimizer *optimizer);
void *mt_optimizer_v(const mt_optimizer *optimizer);
float *mt_optimizer_m_scales(const mt_optimizer *optimizer);
float *mt_optimizer_v_scales(const mt_optimizer *optimizer);

#ifdef __cplusplus
}
#endif
