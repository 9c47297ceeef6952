/* What a training run needs: bytes by purpose, parameters, work; known before anything is
 * allocated. */
#pragma once

#include "train/config.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mt_plan {
    /* High-water marks of a run's steps and evaluations, by mt_memory. MT_MEMORY_WORKSPACE, the
     * kernels' scratch, is not planned and stays 0. On a GPU also not planned: what CUDA and NCCL
     * take for themselves. */
    int64_t peak[MT_MEMORY_COUNT];
    int64_t parameters;
    int64_t active_parameters; /* of one token: top_k of the experts, everything else */
    double forward_flops; /* of one token, a multiplication and an addition counting 2; attention
                             over half the sequence */
    const char *kernel_set, *gemm_path; /* that will run, static text */
    int threads;
    int ranks;
} mt_plan;

/* Runs the configuration's steps on the plan device: the code of training itself, without memory.
 */
mt_status mt_plan_make(mt_plan *plan, const mt_config *config);
/* The same of one of several ranks, over NCCL where the configuration's device is a GPU; what is
 * exchanged is counted. `parameters` are those of the whole model. */
mt_status mt_plan_make_rank(mt_plan *plan, const mt_config *config, int rank, int ranks);

/* The passes that set a run's high-water marks, on any device: two training steps (the second finds
 * the arena as every later one does) and, with `evaluates`, one evaluation. Tokens are zeros. */
mt_status mt_plan_passes(mt_trainer *trainer, bool evaluates);

#ifdef __cplusplus
}
#endif
