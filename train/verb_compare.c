/* mixtape compare: loss differences between runs with paired seeds. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "train/cli.h"
#include "train/compare.h"
#include "train/fileio.h"

static mt_status print_group(const mt_comparison *c, int64_t g)
{
    const mt_compare_group *group = &c->groups[g];
    const mt_compare_mean *d = &group->difference;
    mt_compare_verdict verdict = mt_compare_judge(c, g);
    char *configuration, error[32] = "?";
    MT_TRY(mt_compare_configuration(&configuration, c, g));
    if (isfinite(d->error)) snprintf(error, sizeof error, "%.4f", d->error);
    printf("%5" PRId64 " %5" PRId64 " %10.4f ", g + 1, group->count, group->bits);
    if (verdict == MT_COMPARE_BASELINE)
        printf("%11s %10s %5s", "", "", "");
    else
        printf("%+11.4f %10s %5" PRId64, d->mean, error, d->pairs);
    printf("  %-14s  %s\n", mt_compare_verdicts[verdict], configuration);
    free(configuration);
    return MT_OK;
}

/* Runs that were not made with their configuration from the beginning on. */
static void print_changes(const mt_comparison *c)
{
    char first[MT_PATH_BYTES + 16], next[sizeof first + 2];
    for (int64_t i = 0; i < c->run_count; i++) {
        snprintf(first, sizeof first, "%s changed ", c->runs[i].path);
        snprintf(next, sizeof next, ".\n%s", first);
        if (mt_compare_put_changes(stdout, &c->runs[i], first, next)) printf(".\n");
    }
}

/* Of two corpora that lay under one name the configurations know nothing. */
static void print_replaced_corpus(const mt_comparison *c)
{
    for (int64_t i = 1; i < c->run_count; i++)
        for (int64_t j = 0; j < i; j++) {
            const mt_compare_run *a = &c->runs[j], *b = &c->runs[i];
            if (!*a->train_corpus || !*b->train_corpus ||
                strcmp(a->config.train_corpus, b->config.train_corpus) != 0 ||
                strcmp(a->train_corpus, b->train_corpus) == 0)
                continue;
            printf("Not all runs read the same in %s: %s %s, %s %s.\n", a->config.train_corpus,
                   a->path, a->train_corpus, b->path, b->train_corpus);
            return;
        }
}

/* Units that are not what the metrics call them. */
static void print_settled_units(const mt_comparison *c)
{
    const mt_compare_run *first = NULL;
    int64_t settled = 0;
    for (int64_t i = 0; i < c->run_count; i++) {
        if (!c->runs[i].unit_from) continue;
        if (!settled++) first = &c->runs[i];
    }
    if (!settled) return;
    printf("Bits per byte of %s", first->path);
    if (settled > 1) printf(" and %" PRId64 " more", settled - 1);
    printf(" are taken for bits per token, as %s has them on the same data.valid.\n",
           first->unit_from);
}

/* What a reader of the table must know beside it. */
static void print_notes(const mt_comparison *c)
{
    for (int64_t i = 1; i < c->run_count; i++) {
        if (strcmp(c->runs[i].origin, c->runs[0].origin) == 0) continue;
        printf("Not all runs are of one build: %s is of %s, %s of %s.\n", c->runs[0].path,
               *c->runs[0].origin ? c->runs[0].origin : "an unknown build", c->runs[i].path,
               *c->runs[i].origin ? c->runs[i].origin : "an unknown build");
        break;
    }
    print_changes(c);
    print_replaced_corpus(c);
    print_settled_units(c);
    if (c->group_count == 1) {
        printf("All runs have one configuration: there is nothing to compare.\n");
        return;
    }
    int64_t single = 0, noise = 0, alone = 0;
    for (int64_t g = 0; g < c->group_count; g++) {
        mt_compare_verdict verdict = mt_compare_judge(c, g);
        single += verdict == MT_COMPARE_UNKNOWN;
        noise += verdict == MT_COMPARE_NOISE;
        if (g != c->baseline) alone += c->groups[g].count - c->groups[g].difference.pairs;
    }
    printf("bits/%s: whole validation set after the last step, mean over runs. difference: to "
           "the\nbaseline, mean over pairs of one seed. within noise: below 2 standard errors.\n",
           c->runs[0].unit);
    if (noise)
        printf("%" PRId64 " of the differences %s within noise.\n", noise,
               noise == 1 ? "is" : "are");
    if (single)
        printf("%" PRId64 " of the differences %s on one pair: no error is known, so nothing is "
               "said yet.\n",
               single, single == 1 ? "rests" : "rest");
    if (alone)
        printf("%" PRId64 " %s no run of the same seed in the baseline, and no part in the "
               "differences.\n",
               alone, alone == 1 ? "run has" : "runs have");
}

static mt_status print_table(const mt_comparison *c)
{
    char bits[16];
    snprintf(bits, sizeof bits, "bits/%s", c->runs[0].unit);
    printf("%5s %5s %10s %11s %10s %5s  %-14s  %s\n", "group", "runs", bits, "difference",
           "std error", "pairs", "verdict", "configuration");
    MT_TRY(print_group(c, c->baseline));
    for (int64_t g = 0; g < c->group_count; g++)
        if (g != c->baseline) MT_TRY(print_group(c, g));
    print_notes(c);
    return MT_OK;
}

mt_status mt_verb_compare(int argc, char **argv)
{
    const char *baseline = NULL, *out = NULL, *plot = NULL;
    const mt_option options[] = {
        { "baseline", MT_OPTION_PATH, &baseline, "RUN",
          "one of the runs: the others are held against its group (default: the first)" },
        { "o", MT_OPTION_PATH, &out, "FILE", "the table for other programs: .json or .csv" },
        { "plot", MT_OPTION_PATH, &plot, "OUT.png",
          "draw the training losses and their differences (gnuplot)" },
    };
    const mt_command command = {
        .usage = "mixtape compare RUN... [options]",
        .about =
            "Groups finished runs by their configuration without the seed, and without keys that\n"
            "change no result (such as train.log_every, checkpoint.* or memory.recompute), pairs\n"
            "the runs of two groups that have the same seed (weights and data begin alike, so the\n"
            "seed's own effect cancels), and prints each group's validation loss, its mean\n"
            "difference to the baseline and the standard error of that mean. A difference below 2\n"
            "standard errors is within noise. With few pairs that is a weak bound: of 3 pairs\n"
            "without any effect about one in five passes it by chance, of 10 pairs one in\n"
            "thirteen.",
        .options = options,
        .option_count = sizeof options / sizeof *options,
        .min_arguments = 1,
        .max_arguments = MT_COMPARE_RUNS,
    };
    int count;
    bool help;
    mt_comparison *c;
    MT_TRY(mt_command_parse(&command, argc, argv, &count, &help));
    if (help) return MT_OK;
    MT_TRY(mt_compare_open(&c, argv + 1, count, baseline));
    mt_status status = print_table(c);
    fflush(stdout);
    if (status == MT_OK && out) status = mt_compare_write(c, out);
    if (status == MT_OK && plot) status = mt_compare_plot(c, plot);
    mt_compare_close(&c);
    return status;
}
