/* How the GEMMs of a run's recipes multiply, in words: for `plan` and the log of a run. */
#pragma once

#include "train/trainer.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef void (*mt_paths_line)(void *context, const char *text);

/* A line for each rule, the layers and steps that it is for, then one for each GEMM: its operands'
 * formats and what they are decoded to; of one that no step is made with, why. No line without
 * rules. */
mt_status mt_gemm_paths(const mt_trainer_config *config, const mt_device *device,
                        mt_paths_line line, void *context);

#ifdef __cplusplus
}
#endif
