/* `mixtape gradcheck`: the tape against central differences. */
#include <stdio.h>
#include <string.h>

#include "train/cli.h"
#include "train/config.h"
#include "train/gradcheck.h"

enum { SAMPLES = 16, BATCH = 2, SEQUENCE = 5 };

/* The worst case of each op, and every case when asked or when it fails. */
struct table {
    bool every, headed;
    int64_t cases, checked;
    mt_gradcheck_result worst; /* of the op being checked */
};

/* The first row brings the head of the table. */
static void print_row(struct table *t, const mt_gradcheck_result *r)
{
    if (!t->headed)
        printf("%-15s %-52s %8s  %9s  %-34s %-16s %s\n", "op", "worst case", "elements", "error",
               "at", "analytic", "numeric");
    t->headed = true;
    bool good = r->worst < MT_GRADCHECK_LIMIT;
    printf("%-15s %-52.52s %8lld  %9.2e  %-34s %+.9e %+.9e%s\n", r->op, r->name,
           (long long)r->checked, r->worst, r->where, r->analytic, r->numeric,
           good ? "" : "  FAILED");
    fflush(stdout);
}

static void flush_worst(struct table *t)
{
    if (!t->every && t->worst.op && t->worst.worst < MT_GRADCHECK_LIMIT) print_row(t, &t->worst);
    t->worst = (mt_gradcheck_result){ 0 };
}

static void take(void *context, const mt_gradcheck_result *r)
{
    struct table *t = context;
    bool next = !t->worst.op || strcmp(t->worst.op, r->op) != 0;
    if (next) flush_worst(t);
    int64_t checked = t->worst.checked + r->checked;
    if (next || r->worst > t->worst.worst) t->worst = *r;
    t->worst.checked = checked;
    t->cases++, t->checked += r->checked;
    if (t->every || !(r->worst < MT_GRADCHECK_LIMIT)) print_row(t, r);
}

static mt_status check_config(mt_device *device, const char *path, const mt_option_list *sets,
                              int64_t samples, struct table *t, int64_t *failed)
{
    static mt_config config;
    MT_TRY(mt_config_load(&config, path, sets->items, sets->count));
    t->every = true;
    const char *recipe = config.trainer.recipe;
    bool quantized = strcmp(recipe, "none") != 0;
    printf("model of %s in f64, %d x %d tokens%s%s\n", path, BATCH, SEQUENCE,
           quantized ? ", unquantized: without its recipe, " : "", quantized ? recipe : "");
    return mt_gradcheck_model(device, &config.trainer, BATCH, SEQUENCE, samples, "model", take, t,
                              failed);
}

mt_status mt_verb_gradcheck(int argc, char **argv)
{
    const char *glob = NULL, *model = NULL;
    bool every = false, help;
    int64_t samples = SAMPLES;
    int count;
    static mt_option_list sets;
    const mt_option options[] = {
        { "op", MT_OPTION_TEXT, &glob, "GLOB",
          "only ops whose name matches ('model': the built-in models)" },
        { "model", MT_OPTION_PATH, &model, "CONFIG",
          "check the model of a configuration instead, unquantized, under its memory options" },
        { "samples", MT_OPTION_INT, &samples, "N", "elements of each of its tensors (0: all; 16)" },
        { "set", MT_OPTION_LIST, &sets, "K=V", "override a key of the configuration" },
        { "all", MT_OPTION_FLAG, &every, NULL, "print every case, not the worst of each op" },
    };
    const mt_command command = {
        "mixtape gradcheck [options]",
        "Compares the tape's gradients with five-point central differences in f64, for every\n"
        "differentiable op and for whole models. The error of an element is |analytic - numeric| "
        "/\n"
        "max(|analytic|, |numeric|, 1e-3 of the tensor's largest), and must stay below 1e-6,\n"
        "unless |analytic - numeric| is what rounding leaves in a difference.",
        options,
        (int)(sizeof options / sizeof *options),
        0,
        0
    };
    MT_TRY(mt_command_parse(&command, argc, argv, &count, &help));
    if (help) return MT_OK;
    MT_REQUIRE(samples >= 0, MT_ECONFIG, "--samples is %lld, must not be negative",
               (long long)samples);
    MT_REQUIRE(model || (samples == SAMPLES && !sets.count), MT_ECONFIG,
               "%s is for the model of a configuration: it needs --model CONFIG",
               sets.count ? "--set" : "--samples");
    MT_REQUIRE(!model || !glob, MT_ECONFIG,
               "--op %s and --model: a model is checked as a whole, without --op", glob);

    struct table t = { .every = every };
    int64_t failed = 0;
    mt_device *device;
    MT_TRY(mt_device_open(&device, "cpu", NULL, 1)); /* tiny shapes: a team only costs */
    mt_status status = MT_OK;
    if (model) {
        status = check_config(device, model, &sets, samples, &t, &failed);
    } else {
        status = mt_gradcheck_ops(device, glob, take, &t, &failed);
        if (status == MT_OK && (!glob || !strcmp(glob, "model")))
            status = mt_gradcheck_models(device, take, &t, &failed);
    }
    flush_worst(&t);
    mt_device_destroy(&device);
    MT_TRY(status);
    MT_REQUIRE(t.cases > 0, MT_ECONFIG,
               "no differentiable op matches '%s': gradcheck without --op lists them",
               glob ? glob : "");
    printf("%lld cases, %lld elements, %lld failed\n", (long long)t.cases, (long long)t.checked,
           (long long)failed);
    MT_REQUIRE(failed == 0, MT_ENUMERIC, "%lld gradient checks failed", (long long)failed);
    return MT_OK;
}
