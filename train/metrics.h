/* metrics.jsonl: an object a line, written at once and whole. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "train/measure.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What the ranks of a run differ in. Seconds are those of a step since the last line, without the
 * time in collectives, where that is known (mt_comm_waited). */
typedef struct mt_metrics_ranks {
    int ranks, slowest, fullest; /* ranks: 0 or 1, there is nothing to say */
    double slowest_seconds, fastest_seconds;
    int64_t most_bytes, least_bytes; /* of memory */
} mt_metrics_ranks;

/* A training line: the values of the step that made `step` steps complete. */
typedef struct mt_metrics_step {
    int64_t step, tokens; /* both counted from the start of the run */
    double seconds;       /* of training, all sessions of the run together */
    double loss, aux_loss, grad_norm, lr, tokens_per_second, max_vio;
    double mfu;               /* products of bf16 that the model asks for, over what
                                 the GPUs are said to do in that time; 0: not known */
    int64_t dropped, skipped; /* rows, and updates, left out so far */
    int64_t memory_bytes;
    int64_t nan; /* in quantized operands so far */
    mt_metrics_ranks ranks;
} mt_metrics_step;

/* What the lines up to the resumed step say. */
typedef struct mt_metrics_past {
    double seconds;                    /* of the last training line */
    int64_t last_step;                 /* of the last line; 0: none */
    int64_t last_eval, last_full_eval; /* steps; -1: none */
    int64_t unread_line;               /* is cut off; 0: none */
} mt_metrics_past;

typedef struct mt_metrics mt_metrics;

/* Opens the file for appending after dropping every line past `step`: no step stands in it twice. A
 * last one that only lacks its newline gets it. A line that cannot be read, as one that was cut
 * off, is dropped, too, with what follows it, unless that is a line up to `step`, which has been on
 * the disk. Errors: MT_EIO; MT_EDAMAGED names the line. */
mt_status mt_metrics_open(mt_metrics **metrics, mt_metrics_past *past, const char *path,
                          int64_t step);
/* The step of its last line; 0 where it has none, or is not there. */
mt_status mt_metrics_last_step(int64_t *step, const char *path);
/* Whether it would be opened, as far as its lines go; it need not be there. */
mt_status mt_metrics_check(const char *path, int64_t step);
mt_status mt_metrics_train(mt_metrics *metrics, const mt_metrics_step *line);
/* `loss` in nats a `unit` (mt_corpus_unit): valid_loss, and in bits valid_bits_per_byte or
 * valid_bits_per_token. */
mt_status mt_metrics_eval(mt_metrics *metrics, int64_t step, double loss, const char *unit,
                          bool full);
/* What a line of statistics is about. */
typedef struct mt_metrics_subject {
    int64_t step;
    const char *layer, *tensor, *direction, *format;
    bool what_if;   /* the format is not the one in use */
    int64_t member; /* -1: all members together */
} mt_metrics_subject;

/* A line of statistics; a field without a value is null. */
mt_status mt_metrics_statistics(mt_metrics *metrics, const mt_metrics_subject *subject,
                                const mt_measured *measure);
/* What was written reaches the disk. */
mt_status mt_metrics_sync(mt_metrics *metrics);
/* NULL-safe; sets *metrics to NULL. */
void mt_metrics_close(mt_metrics **metrics);

#ifdef __cplusplus
}
#endif
