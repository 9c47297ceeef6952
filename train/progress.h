/* What a person sees of a run: on a terminal a bar with the time left, otherwise a line per
 * interval. */
#pragma once

#include "train/metrics.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mt_progress {
    bool silent; /* set after begin: another rank speaks */
    bool terminal, bar_drawn;
    int64_t first_step, steps; /* of this session, of the run */
    double began, drawn;       /* seconds of mt_now */
} mt_progress;

void mt_progress_begin(mt_progress *progress, int64_t first_step, int64_t steps);
/* After each step. `interval`: a line is due where there is no terminal. */
void mt_progress_step(mt_progress *progress, const mt_metrics_step *line, bool interval);
/* A line of its own, printf-like, above the bar. */
void mt_progress_note(mt_progress *progress, const char *format, ...) MT_PRINTF(2, 3);
/* The bar ends as a finished line. */
void mt_progress_end(mt_progress *progress);

#ifdef __cplusplus
}
#endif
