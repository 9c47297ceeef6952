/* mixtape plan: what a configuration will need, before anything is allocated. */
#include <stdio.h>

#include "train/cli.h"
#include "train/paths.h"
#include "train/plan.h"

enum { MOST_RANKS = 1 << 16, PLANNED = 8 /* ranks, at most */ };

static void print_line(void *context, const char *text)
{
    (void)context;
    printf("%s\n", text);
}

static void print_plan(const mt_config *config, const mt_plan *plan)
{
    const mt_trainer_config *c = &config->trainer;
    int64_t share = c->batch_size / plan->ranks;
    int64_t at_once = c->micro_batch_size < share ? c->micro_batch_size : share;
    printf("%s: %s, %lld layers, D %lld, %lld experts (top %lld) of F %lld, V %lld\n", config->name,
           c->model.architecture->model_type, (long long)c->model.num_hidden_layers,
           (long long)c->model.hidden_size, (long long)c->model.num_experts,
           (long long)c->model.num_experts_per_tok, (long long)c->model.moe_intermediate_size,
           (long long)c->model.vocab_size);
    printf("batch %lld x %lld tokens, %lld sequence%s at once, %s, kernel set %s, %d thread%s\n",
           (long long)c->batch_size, (long long)c->sequence_length, (long long)at_once,
           at_once == 1 ? "" : "s", mt_dtype_name(c->dtype), plan->kernel_set, plan->threads,
           plan->threads == 1 ? "" : "s");
    if (plan->ranks > 1)
        printf("%d ranks, %lld sequence%s each; masters, gradients and moments in shards\n",
               plan->ranks, (long long)share, share == 1 ? "" : "s");
    printf("GEMM path: %s\n", plan->gemm_path);
    printf("parameters: %lld, active for a token: %lld\n", (long long)plan->parameters,
           (long long)plan->active_parameters);
    printf("FLOP per token: %.4g forward, %.4g training\n", plan->forward_flops,
           3 * plan->forward_flops);
    mt_plan_print_bytes(plan, print_line, NULL);
}

static mt_status print_paths(const mt_config *config)
{
    mt_device *device;
    MT_TRY(mt_plan_device(&device, config));
    mt_status status = mt_gemm_paths(&config->trainer, device, print_line, NULL);
    mt_device_destroy(&device);
    return status;
}

/* The most that any rank needs of each purpose, of some between the first and the last where they
 * are many: shards and what is computed differ by little. */
static mt_status plan_ranks(mt_plan *plan, const mt_config *config, int64_t ranks)
{
    MT_REQUIRE(ranks > 0 && ranks <= MOST_RANKS, MT_ECONFIG, "--ranks %lld: must be from 1 to %d",
               (long long)ranks, MOST_RANKS);
    MT_TRY(mt_plan_make(plan, config, 0, (int)ranks));
    for (int64_t i = 1; i < PLANNED && i < ranks; i++) {
        mt_plan other;
        const int64_t rank = ranks <= PLANNED ? i : i * (ranks - 1) / (PLANNED - 1);
        MT_TRY(mt_plan_make(&other, config, (int)rank, (int)ranks));
        for (int m = 0; m < MT_MEMORY_COUNT; m++)
            if (other.peak[m] > plan->peak[m]) plan->peak[m] = other.peak[m];
    }
    return MT_OK;
}

/* Blocks of rows for other ranks' experts grow with what is routed, which no plan knows: what there
 * is of it at most. */
static mt_status print_growth(const mt_plan *plan, const mt_config *config)
{
    mt_config any = *config;
    mt_plan most;
    any.trainer.expert_capacity = 0;
    if (plan->ranks == 1 || config->trainer.expert_parallel == 1) return MT_OK;
    MT_TRY(plan_ranks(&most, &any, plan->ranks));
    int64_t bytes = mt_plan_device_bytes(&most);
    if (bytes > mt_plan_device_bytes(plan))
        printf("not in it: where a rank's experts get more than parallel.expert_capacity, %g mean "
               "loads, blocks grow; for any routing the total is %lld, %.2f MiB\n",
               config->trainer.expert_capacity, (long long)bytes, (double)bytes / 0x1p20);
    return MT_OK;
}

mt_status mt_verb_plan(int argc, char **argv)
{
    mt_option_list sets = { 0 };
    int64_t ranks = 1;
    const char *device = NULL;
    char device_set[MT_CONFIG_TEXT];
    const mt_option options[] = {
        { "device", MT_OPTION_TEXT, &device, "NAME",
          "auto, cpu, cuda or cuda:N: the key device; cuda without a GPU: an H200's sizes" },
        { "set", MT_OPTION_LIST, &sets, "K=V", "a configuration key, such as train.dtype=bf16" },
        { "ranks", MT_OPTION_INT, &ranks, "N",
          "memory of each of N ranks: GPUs, or with device=cpu processes" },
    };
    const mt_command command = {
        .usage = "mixtape plan CONFIG.yaml [--device NAME] [--ranks N] [--set a.b=c]...",
        .about = "Memory by category, parameters, work per token and the GEMM path of a training "
                 "run,\nfound by running its steps on a device that only counts, as the cpu or "
                 "as cuda.",
        .options = options,
        .option_count = sizeof options / sizeof *options,
        .min_arguments = 1,
        .max_arguments = 1,
    };
    int count;
    bool help;
    mt_config config;
    mt_plan plan = { .ranks = 0 };
    MT_TRY(mt_command_parse(&command, argc, argv, &count, &help));
    if (help) return MT_OK;
    if (device) {
        MT_REQUIRE(sets.count < MT_OPTION_LIST_MAX, MT_ECONFIG, "too many --set");
        snprintf(device_set, sizeof device_set, "device=%s", device);
        sets.items[sets.count++] = device_set;
    }
    MT_TRY(mt_config_load(&config, argv[1], sets.items, sets.count));
    MT_TRY(plan_ranks(&plan, &config, ranks));
    print_plan(&config, &plan);
    MT_TRY(print_growth(&plan, &config));
    return print_paths(&config);
}
