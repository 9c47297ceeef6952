/* Runs held against each other: grouped by their configuration without the seed and without keys
 * that change no result (`neutral` in mt_config_keys), where not runs of one seed differ in just
 * these, or in how they came to it; runs of one seed in two groups are a pair, so that what the
 * seed does to both cancels. */
#pragma once

#include <stdio.h>

#include "train/changes.h"
#include "train/config.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MT_COMPARE_RUNS = 10000 }; /* most runs of a comparison */

typedef struct mt_compare_point {
    int64_t step;
    double loss; /* nats a token */
} mt_compare_point;

typedef struct mt_compare_run {
    const char *path; /* borrowed */
    mt_config config;
    int64_t group;
    double bits;              /* bits a unit of the whole validation set after the last step */
    const char *unit;         /* "byte" or "token" */
    const char *unit_from;    /* the run that it was taken from, which says another one; or NULL */
    mt_compare_point *points; /* finite training losses, steps ascending */
    int64_t point_count;
    char origin[128];                          /* revision and kernel set; "" where unknown */
    char device[16];                           /* that it ran on; "" where unknown */
    char train_corpus[256], valid_corpus[256]; /* what they held; "" where unknown */
    mt_changes changes;                        /* since it began: its configuration is the last */
} mt_compare_run;

/* A mean over pairs. */
typedef struct mt_compare_mean {
    int64_t pairs;
    double mean, error; /* standard error; NaN with fewer than 2 pairs */
} mt_compare_mean;

typedef struct mt_compare_group {
    int64_t first, count;       /* index of its first run; runs */
    double bits;                /* mean over its runs */
    mt_compare_mean difference; /* to the baseline, in bits; of the baseline: 0 pairs */
} mt_compare_group;

typedef enum mt_compare_verdict {
    MT_COMPARE_BASELINE,
    MT_COMPARE_UNKNOWN, /* fewer than 2 pairs */
    MT_COMPARE_EQUAL,   /* every pair has one loss, to the bit */
    MT_COMPARE_NOISE,   /* |mean| below 2 standard errors */
    MT_COMPARE_LOWER,
    MT_COMPARE_HIGHER,
    MT_COMPARE_VERDICTS
} mt_compare_verdict;
extern const char *const mt_compare_verdicts[MT_COMPARE_VERDICTS]; /* "within noise" */

typedef struct mt_comparison {
    mt_compare_run *runs;
    mt_compare_group *groups; /* in the order of their first runs */
    int64_t run_count, group_count, baseline;
    bool apart; /* groups may differ in keys alone that change no result */
} mt_comparison;

/* Reads run directories. `baseline`: one of `paths`, whose group the others are held against; NULL:
 * the first. `paths` must outlive the comparison. Errors: MT_ECONFIG names what is no run, is not
 * finished, has no validation loss, occurs twice, shares no seed with the baseline, is per token
 * where another is per byte, or was validated on another corpus; MT_EDAMAGED names the line;
 * MT_EIO. */
mt_status mt_compare_open(mt_comparison **comparison, char *const *paths, int count,
                          const char *baseline);
/* NULL-safe; sets *comparison to NULL. */
void mt_compare_close(mt_comparison **comparison);

mt_compare_verdict mt_compare_judge(const mt_comparison *c, int64_t group);

/* The next run of a group after run `after` (-1: the first one); -1: no more. */
int64_t mt_compare_next(const mt_comparison *c, int64_t group, int64_t after);

/* Whether the result of a run may depend on one of its changes. */
bool mt_compare_change_counts(const mt_compare_run *run, const mt_change *change);
/* Writes those of a run, "after step 10: optim.lr 1 -> 2, ...": `first` before the first step's,
 * `next` before each later one's. false: there are none. */
bool mt_compare_put_changes(FILE *to, const mt_compare_run *run, const char *first,
                            const char *next);

/* Mean training loss of a group at a step (nats a token; NaN where a run of it has none), and its
 * difference to the baseline over the pairs that have the step; 0 pairs where there are none. */
double mt_compare_loss_at(const mt_comparison *c, int64_t group, int64_t step);
mt_compare_mean mt_compare_difference_at(const mt_comparison *c, int64_t group, int64_t step);

/* "recipe.use: mxfp8, ...": the keys in which a group differs from the baseline, those that change
 * no result only where groups are apart by them; of the baseline, all in which any group does.
 * Where another group came to the same configuration, how this one did. Freed by the caller. */
mt_status mt_compare_configuration(char **text, const mt_comparison *c, int64_t group);

/* A file for other programs: .json, or .csv with a row a group. */
mt_status mt_compare_write(const mt_comparison *c, const char *path);
/* Training losses and differences as a picture, without these where no group shares a logged step
 * with the baseline; gnuplot draws it. MT_ECONFIG where there is no loss to draw. */
mt_status mt_compare_plot(const mt_comparison *c, const char *path);

#ifdef __cplusplus
}
#endif
