/* What a training run needs: bytes by purpose, parameters, work; known before anything is
 * allocated. */
#pragma once

#include "train/config.h"
#include "train/paths.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mt_plan {
    /* High-water marks of a run's steps and evaluations, by mt_memory. MT_MEMORY_WORKSPACE, the
     * kernels' scratch, is planned for cuda (by a build that has it), and stays 0 for the cpu. What
     * CUDA and NCCL take for themselves is not planned. */
    int64_t peak[MT_MEMORY_COUNT];
    bool gpu; /* planned for cuda: all but MT_MEMORY_HOST_POOL is the card's */
    int64_t parameters;
    int64_t active_parameters; /* of one token: top_k of the experts, everything else */
    double forward_flops; /* of one token, a multiplication and an addition counting 2; attention
                             over half the sequence */
    const char *kernel_set, *gemm_path; /* that will run, static text */
    int threads;
    int ranks;
} mt_plan;

/* Runs the configuration's steps on the plan device: the code of training itself, without memory.
 * For the device that the configuration names; "cuda" where there is no GPU is an H200. Of several
 * ranks one, over NCCL where that is a GPU; what is exchanged is counted. `parameters` are those of
 * the whole model. */
mt_status mt_plan_make(mt_plan *plan, const mt_config *config, int rank, int ranks);
/* Fails as a run would for a configuration that one of so many ranks cannot train: where the ranks
 * do not share the batch or the experts, a rule fits no layer, and so on. */
mt_status mt_plan_check(const mt_config *config, int rank, int ranks);
/* Of a trainer's model: parameters, active_parameters, forward_flops. */
void mt_plan_count_work(mt_plan *plan, const mt_trainer *trainer);
/* The plan device that the configuration's device calls for. */
mt_status mt_plan_device(mt_device **device, const mt_config *config);
/* Bytes on the device, and in pinned memory of the host (cuda). */
int64_t mt_plan_device_bytes(const mt_plan *plan);
int64_t mt_plan_pinned_bytes(const mt_plan *plan);
/* The table of bytes, a line at a time. */
void mt_plan_print_bytes(const mt_plan *plan, mt_paths_line line, void *context);

/* The passes that set a run's high-water marks, on any device: with the recipes of the beginning
 * and of every step at which they change, two training steps, if there are as many (the second
 * finds the arena as every later one does), and, where the configuration has them, two with
 * statistics, when their turn comes, and an evaluation; NULL: it has neither. Tokens are zeros. */
mt_status mt_plan_passes(mt_trainer *trainer, const mt_config *config);

#ifdef __cplusplus
}
#endif
