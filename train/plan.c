/* Planning is running: the trainer's own passes on a device that counts. */
#include "train/plan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "train/ranks.h"
#include "train/statistics.h"

/* A run's steps from `first` on, in its order: with or without statistics, whichever comes first
 * finds another arena, and what statistics take for themselves they keep. Those that make no
 * difference are left out: a third in a row without, and all behind the second with them and the
 * one after it. */
static mt_status run_steps(mt_trainer *trainer, const mt_config *config, mt_statistics *statistics,
                           int64_t first, int64_t end, const int32_t *tokens)
{
    const int64_t every = config ? config->statistics_every : 0;
    mt_step_result result;
    for (int64_t step = first, plain = 0, looked = 0; step < end; step++) {
        MT_TRY(mt_statistics_begin(statistics, step + 1));
        MT_TRY(mt_trainer_step(trainer, tokens, tokens, &result));
        MT_TRY(mt_statistics_end(statistics));
        if (every && (step + 1) % every == 0)
            plain = 0, looked++;
        else
            plain++;
        if (looked == 2 ? plain || every == 1 : plain == 2 && !every) break;
        if (plain == 2) step = ((step + 1) / every + 1) * every - 2; /* before the next with them */
    }
    return MT_OK;
}

/* As mt_evaluate does: weights are looked at first, and all passes count NaNs. */
static mt_status run_evaluation(mt_trainer *trainer, const int32_t *tokens)
{
    const mt_trainer_config *c = mt_trainer_get_config(trainer);
    mt_model *model = mt_trainer_model(trainer);
    double loss;
    int64_t counted;
    MT_TRY(mt_trainer_check_weights(model, c->comm));
    mt_precision_count_all(mt_model_precision(model), true);
    mt_status status =
        mt_trainer_eval(trainer, tokens, tokens, c->micro_batch_size, &loss, &counted);
    mt_precision_count_all(mt_model_precision(model), false);
    return status;
}

/* What a run does with the recipes of the steps from `step` on; `change`: those of the next ones,
 * or negative. */
static mt_status run_recipe(mt_trainer *trainer, const mt_config *config, mt_statistics *statistics,
                            int64_t step, int64_t change, const int32_t *tokens)
{
    const mt_trainer_config *c = mt_trainer_get_config(trainer);
    int64_t end = change >= 0 && change < c->steps ? change : c->steps;
    if (step) MT_TRY(mt_trainer_set_steps(trainer, step));
    MT_TRY(run_steps(trainer, config, statistics, step, end, tokens));
    return config && *config->valid_corpus ? run_evaluation(trainer, tokens) : MT_OK;
}

mt_status mt_plan_passes(mt_trainer *trainer, const mt_config *config)
{
    const mt_trainer_config *c = mt_trainer_get_config(trainer);
    mt_precision_options options;
    mt_recipe_rules *rules;
    mt_statistics *statistics = NULL;
    MT_TRY(mt_trainer_precision(&options, &rules, c));
    bool read = mt_trainer_device(trainer)->computes; /* where nothing is, no token is either */
    int64_t count = read ? c->batch_size * c->sequence_length : 1;
    int32_t *tokens = calloc((size_t)count, sizeof *tokens);
    mt_status status = tokens
                           ? MT_OK
                           : MT_FAIL(MT_ENOMEM, "plan: no memory for a batch of %lld x %lld tokens",
                                     (long long)c->batch_size, (long long)c->sequence_length);
    if (status == MT_OK && config)
        status = mt_statistics_create(&statistics, trainer, config, NULL, "");
    for (int64_t step = 0, change; status == MT_OK && step >= 0 && step <= c->steps;
         step = change) {
        change = rules ? mt_recipe_rules_next_change(rules, step) : -1;
        status = run_recipe(trainer, config, statistics, step, change, tokens);
    }
    mt_statistics_destroy(&statistics);
    free(tokens);
    mt_recipe_rules_destroy(&rules);
    return status;
}

/* Params that are multiplied: all but norms and an embedding that is only looked up. */
static bool multiplies(const mt_param *p)
{
    return p->packed || p->decay;
}

void mt_plan_count_work(mt_plan *plan, const mt_trainer *trainer)
{
    const mt_trainer_config *c = mt_trainer_get_config(trainer);
    const mt_model_config *m = &c->model;
    mt_param_store *store = mt_model_params(mt_trainer_model(trainer));
    int64_t multiplied = 0;
    for (int64_t i = 0; i < mt_param_store_count(store); i++) {
        const mt_param *p = mt_param_store_get(store, i);
        int64_t members = p->all_members, each = p->group.m * p->group.k;
        int64_t used = members > 1 && members == m->num_experts ? m->num_experts_per_tok : members;
        int64_t active = each * used;
        plan->parameters += each * members;
        plan->active_parameters += active;
        if (multiplies(p)) multiplied += active;
    }
    /* a query meets (S + 1) / 2 keys on average, and as many values */
    double meetings = ((double)c->sequence_length + 1) / 2 * (double)m->num_hidden_layers;
    double attention = 4 * meetings * (double)(m->num_attention_heads * m->head_dim);
    plan->forward_flops = 2 * (double)multiplied + attention;
}

/* Whether a configuration's device is a GPU here. */
static bool is_gpu(const char *name)
{
    int count;
    if (strcmp(name, "auto") != 0) return !strncmp(name, "cuda", 4);
    bool any = mt_device_count(&count, "cuda") == MT_OK && count > 0;
    mt_error_clear();
    return any;
}

mt_status mt_plan_device(mt_device **device, const mt_config *config)
{
    return mt_device_open(device, "plan", is_gpu(config->device) ? "cuda" : NULL, 0);
}

/* A rank's trainer on a device that counts. */
struct counted {
    mt_device *device;
    mt_comm *comm; /* NULL with one rank */
    mt_trainer *trainer;
};

static mt_status open_counted(struct counted *t, const mt_config *config, int rank, int ranks)
{
    mt_trainer_config c = config->trainer;
    MT_TRY(mt_plan_device(&t->device, config));
    if (ranks > 1)
        MT_TRY(mt_comm_open_plan(&t->comm, t->device, rank, ranks, is_gpu(config->device)));
    if (t->comm) MT_TRY(mt_ranks_share(&c, t->comm));
    return mt_trainer_create(&t->trainer, t->device, &c);
}

static void close_counted(struct counted *t)
{
    mt_trainer_destroy(&t->trainer);
    mt_comm_close(&t->comm);
    mt_device_destroy(&t->device);
}

mt_status mt_plan_check(const mt_config *config, int rank, int ranks)
{
    struct counted t = { NULL, NULL, NULL };
    mt_status status = open_counted(&t, config, rank, ranks);
    if (status == MT_OK) status = mt_statistics_check_layers(config, t.trainer);
    close_counted(&t);
    return status;
}

mt_status mt_plan_make(mt_plan *plan, const mt_config *config, int rank, int ranks)
{
    *plan = (mt_plan){ .ranks = ranks, .gpu = is_gpu(config->device) };
    struct counted t = { NULL, NULL, NULL };
    const struct mt_kernels *kernels;
    mt_status status = MT_OK;
    MT_TRY_CLEANUP(open_counted(&t, config, rank, ranks));
    MT_TRY_CLEANUP(mt_device_kernels(t.device, config->trainer.dtype, &kernels));
    MT_TRY_CLEANUP(mt_plan_passes(t.trainer, config));
    mt_plan_count_work(plan, t.trainer);
    plan->kernel_set = t.device->kernel_set;
    plan->gemm_path = kernels->gemm_path;
    plan->threads = t.device->threads;
    memcpy(plan->peak, t.device->peak, sizeof plan->peak);
cleanup:
    close_counted(&t);
    return status;
}

/* ---- in words -----------------------------------------------------------------------------------
 */

int64_t mt_plan_pinned_bytes(const mt_plan *plan)
{
    return plan->gpu ? plan->peak[MT_MEMORY_HOST_POOL] : 0;
}

int64_t mt_plan_device_bytes(const mt_plan *plan)
{
    int64_t total = 0;
    for (int i = 0; i < MT_MEMORY_COUNT; i++) total += plan->peak[i];
    return total - mt_plan_pinned_bytes(plan);
}

static void print_row(const char *name, int64_t bytes, mt_paths_line line, void *context)
{
    char text[96];
    snprintf(text, sizeof text, "  %-17s %13lld  %10.2f MiB", name, (long long)bytes,
             (double)bytes / 0x1p20);
    line(context, text);
}

void mt_plan_print_bytes(const mt_plan *plan, mt_paths_line line, void *context)
{
    char text[96];
    snprintf(text, sizeof text,
             "bytes%s at the high-water mark%s:", plan->gpu ? " of the GPU's memory" : "",
             plan->ranks > 1 ? " of each rank" : "");
    line(context, text);
    for (int i = 0; i < MT_MEMORY_COUNT; i++) {
        if (plan->gpu ? i == MT_MEMORY_HOST_POOL : i == MT_MEMORY_WORKSPACE) continue;
        print_row(mt_memory_name((mt_memory)i), plan->peak[i], line, context);
    }
    print_row("total", mt_plan_device_bytes(plan), line, context);
    if (plan->gpu) print_row("pinned host", plan->peak[MT_MEMORY_HOST_POOL], line, context);
    line(context, plan->gpu ? "not in it: what CUDA and NCCL take for themselves, and recorded "
                              "graphs (about 0.6 GiB); a checkpoint being written"
                            : "not in it: the kernels' scratch, the program, a "
                              "checkpoint being written");
}
