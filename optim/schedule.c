/* Learning-rate schedules: a function and a name each. */
#include <math.h>

#include "optim/optimizer.h"

static const double pi = 3.14159265358979323846;

/* Each maps progress in [0, 1] after warm-up to the share of the way from min_lr to lr. */
static double constant(double progress)
{
    (void)progress;
    return 1;
}

static double linear(double progress)
{
    return 1 - progress;
}

static double cosine(double progress)
{
    return 0.5 + 0.5 * cos(pi * progress);
}

static double wsd(double progress)
{
    const double decay = 0.2;
    return progress < 1 - decay ? 1 : (1 - progress) / decay;
}

static double (*const shares[MT_SCHEDULE_COUNT])(double progress) = {
    [MT_SCHEDULE_CONSTANT] = constant,
    [MT_SCHEDULE_LINEAR] = linear,
    [MT_SCHEDULE_COSINE] = cosine,
    [MT_SCHEDULE_WSD] = wsd,
};

const char *const mt_schedule_names[MT_SCHEDULE_COUNT + 1] = {
    [MT_SCHEDULE_CONSTANT] = "constant",
    [MT_SCHEDULE_LINEAR] = "linear",
    [MT_SCHEDULE_COSINE] = "cosine",
    [MT_SCHEDULE_WSD] = "wsd",
};

double mt_schedule_lr(const mt_optim_config *c, int64_t step, int64_t total)
{
    if (step < c->warmup_steps) return c->lr * (double)(step + 1) / (double)c->warmup_steps;
    int64_t span = total - c->warmup_steps;
    /* of a run's only step behind the warm-up: it is the last */
    double progress =
        span > 1 ? (double)(step - c->warmup_steps) / (double)(span - 1) : c->warmup_steps > 0;
    if (progress > 1) progress = 1;
    return c->min_lr + (c->lr - c->min_lr) * shares[c->schedule](progress);
}
