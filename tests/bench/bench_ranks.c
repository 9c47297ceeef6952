/* Weak scaling: whole training steps over ranks, each with as many tokens as one alone, the time
 * that their passes wait for communication, and what is moved.
 * Usage: bench_ranks [--ranks N] [SIZE] [STEPS] [RECIPE]..., N on GPUs of this host; `mpirun -n N
 * bench_ranks ...` on CPU processes. Of a recipe, three runs: units gathered for each pass, kept
 * over a step, and gradients reduced in bf16; of one rank, steps that are recorded and such that
 * are not, as those of several. One line of JSON each: step_ms     median over the steps of rank
 * 0's time; exposed_ms  what the passes' stream stood still for: events of gathers and reductions
 * that it waits for, and collectives in it; by the device's clock, the mean of all ranks;
 *   gathered_mb, reduced_mb  received by a rank in a step;
 *   peak_gb     high-water marks of what was allocated on rank 0, but for the kernels' scratch_gb;
 *   plan_gb     what the plan says of it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/clock.h"
#include "core/rng.h"
#include "dist/comm_priv.h"
#include "train/plan.h"
#include "train/ranks.h"
#include "train/supervise.h"
#include "train/trainer.h"

enum { WARM_UP = 4, MOST_STEPS = 64, MOST_TIMERS = 2048 };

static const struct size {
    const char *name;
    int64_t d, layers, heads, head_dim, experts, top_k, f, v, s, b; /* b: sequences of a rank */
} sizes[] = {
    { "olmoe4", 2048, 4, 16, 128, 64, 8, 1024, 50304, 2048, 4 },
    { "tiny", 128, 4, 4, 32, 8, 2, 128, 256, 256, 2 },
    { "nano", 64, 2, 2, 32, 4, 2, 64, 256, 16, 1 },
};

static const struct kind {
    const char *name;
    bool one, keep_gathered, reduce_bf16, eager; /* one: of a rank alone */
} kinds[] = { { .name = "recorded", .one = true },
              { .name = "eager", .one = true, .eager = true },
              { .name = "gathered" },
              { .name = "kept", .keep_gathered = true },
              { .name = "bf16 reduce", .reduce_bf16 = true } };

/* ---- waiting: events and collectives of the passes' stream, measured around -------------------
 */

static struct {
    bool on, inside; /* inside a collective, which waits for events itself */
    const struct mt_device_ops *device_ops;
    const struct mt_comm_ops *comm_ops;
    mt_timer timers[MOST_TIMERS];
    int made, used;
} waits;

static bool is_measured(const mt_stream *stream)
{
    return waits.on && !waits.inside && stream && !stream->impl && waits.used < MOST_TIMERS;
}

static mt_status begin_wait(mt_stream *stream)
{
    mt_timer *t = &waits.timers[waits.used];
    if (waits.used == waits.made) {
        MT_TRY(mt_timer_create(t, stream->device));
        waits.made++;
    }
    return mt_timer_start(t, stream);
}

static mt_status event_wait(mt_stream *stream, void *event)
{
    if (!is_measured(stream)) return waits.device_ops->event_wait(stream, event);
    MT_TRY(begin_wait(stream));
    MT_TRY(waits.device_ops->event_wait(stream, event));
    return mt_timer_stop(&waits.timers[waits.used++], stream);
}

/* Side streams of a device without any are its own: what they do is waited for, too. */
static mt_status measured(mt_stream *stream, mt_status (*call)(void *arguments), void *arguments)
{
    if (!is_measured(stream)) return call(arguments);
    MT_TRY(begin_wait(stream));
    waits.inside = true;
    mt_status status = call(arguments);
    waits.inside = false;
    MT_TRY(status);
    return mt_timer_stop(&waits.timers[waits.used++], stream);
}

struct call {
    mt_comm *comm;
    mt_stream *stream;
    void *to;
    const void *from;
    const mt_comm_parts *parts;
    size_t bytes;
    int64_t count;
    mt_dtype dtype;
    mt_reduce reduce;
};

static mt_status call_all_gather(void *arguments)
{
    struct call *c = arguments;
    return waits.comm_ops->all_gather(c->comm, c->stream, c->to, c->from, c->bytes);
}

static mt_status call_reduce_scatter(void *arguments)
{
    struct call *c = arguments;
    return waits.comm_ops->reduce_scatter(c->comm, c->stream, c->to, c->from, c->parts, c->dtype,
                                          c->reduce);
}

static mt_status call_all_reduce(void *arguments)
{
    struct call *c = arguments;
    return waits.comm_ops->all_reduce(c->comm, c->stream, c->to, c->count, c->dtype, c->reduce);
}

static mt_status all_gather(mt_comm *comm, mt_stream *stream, void *to, const void *from,
                            size_t bytes)
{
    struct call c = { .comm = comm, .stream = stream, .to = to, .from = from, .bytes = bytes };
    return measured(stream, call_all_gather, &c);
}

static mt_status reduce_scatter(mt_comm *comm, mt_stream *stream, void *to, const void *from,
                                const mt_comm_parts *parts, mt_dtype dtype, mt_reduce reduce)
{
    struct call c = { comm, stream, to, from, parts, 0, 0, dtype, reduce };
    return measured(stream, call_reduce_scatter, &c);
}

static mt_status all_reduce(mt_comm *comm, mt_stream *stream, void *data, int64_t count,
                            mt_dtype dtype, mt_reduce reduce)
{
    struct call c = { comm, stream, data, NULL, NULL, 0, count, dtype, reduce };
    return measured(stream, call_all_reduce, &c);
}

static void watch_waits(mt_device *device, mt_comm *comm)
{
    static struct mt_device_ops device_ops;
    static struct mt_comm_ops comm_ops;
    waits.device_ops = device->ops, waits.comm_ops = comm->ops;
    device_ops = *device->ops, comm_ops = *comm->ops;
    if (device_ops.event_wait) device_ops.event_wait = event_wait;
    comm_ops.all_gather = all_gather, comm_ops.reduce_scatter = reduce_scatter;
    comm_ops.all_reduce = all_reduce;
    device->ops = &device_ops, comm->ops = &comm_ops;
}

/* Seconds of all waits since the last time. */
static mt_status read_waits(double *seconds)
{
    double one;
    *seconds = 0;
    for (int i = 0; i < waits.used; i++) {
        MT_TRY(mt_timer_read(&waits.timers[i], &one));
        *seconds += one;
    }
    waits.used = 0;
    return MT_OK;
}

/* ---- a run -------------------------------------------------------------------------------------
 */

static mt_trainer_config configure(const struct size *z, const struct kind *kind, mt_comm *comm,
                                   const char *recipe)
{
    const mt_architecture *architecture = NULL;
    int64_t ranks = mt_comm_size(comm);
    mt_trainer_config c = { .dtype = MT_BF16,
                            .grad_dtype = MT_F32,
                            .batch_size = z->b * ranks,
                            .micro_batch_size = z->b,
                            .sequence_length = z->s,
                            .steps = 1000000,
                            .delayed_history = 16,
                            .seed = 1,
                            .comm = comm,
                            .keep_gathered = kind->keep_gathered,
                            .reduce_bf16 = kind->reduce_bf16,
                            .eager = kind->eager };
    snprintf(c.recipe, sizeof c.recipe, "%s", recipe);
    if (mt_architecture_find(&architecture, "qwen3_moe") != MT_OK) return c;
    mt_model_config_defaults(&c.model, architecture);
    mt_optim_config_defaults(&c.optim);
    c.optim.lr = 3e-4, c.optim.schedule = MT_SCHEDULE_CONSTANT;
    c.model.vocab_size = z->v, c.model.hidden_size = z->d, c.model.num_hidden_layers = z->layers;
    c.model.num_attention_heads = c.model.num_key_value_heads = z->heads;
    c.model.head_dim = z->head_dim, c.model.moe_intermediate_size = z->f;
    c.model.num_experts = z->experts, c.model.num_experts_per_tok = z->top_k;
    c.model.max_position_embeddings = z->s;
    return c;
}

typedef struct figures {
    double step[MOST_STEPS], wait;
    mt_fsdp_counts moved;
} figures;

static mt_fsdp_counts counts_of(const mt_trainer *t)
{
    mt_fsdp *fsdp = mt_precision_fsdp(mt_model_precision(mt_trainer_model(t)));
    return fsdp ? mt_fsdp_get_counts(fsdp) : (mt_fsdp_counts){ 0 };
}

static mt_status make_steps(mt_trainer *t, int steps, const int32_t *tokens, figures *f)
{
    mt_step_result result;
    for (int i = 0; i < WARM_UP; i++) MT_TRY(mt_trainer_step(t, tokens, tokens + 1, &result));
    mt_fsdp_counts before = counts_of(t);
    for (int i = 0; i < steps; i++) {
        double began = mt_now();
        MT_TRY(mt_trainer_step(t, tokens, tokens + 1, &result));
        f->step[i] = mt_now() - began;
    }
    mt_fsdp_counts after = counts_of(t);
    f->moved = (mt_fsdp_counts){ .gathered_bytes = after.gathered_bytes - before.gathered_bytes,
                                 .reduced_bytes = after.reduced_bytes - before.reduced_bytes };
    waits.on = true; /* not in the steps above: what measures costs a little */
    for (int i = 0; i < steps; i++) {
        double wait;
        MT_TRY(mt_trainer_step(t, tokens, tokens + 1, &result));
        MT_TRY(read_waits(&wait));
        f->wait += wait / steps;
    }
    waits.on = false;
    return MT_OK;
}

static mt_status plan_memory(double *bytes, const mt_trainer *t)
{
    const mt_trainer_config *c = mt_trainer_get_config(t);
    mt_config config = { .trainer = *c };
    mt_plan plan;
    config.trainer.comm = NULL;
    snprintf(config.device, sizeof config.device, "%s", mt_trainer_device(t)->name);
    MT_TRY(mt_plan_make(&plan, &config, mt_comm_rank(c->comm), mt_comm_size(c->comm)));
    for (int i = 0; i < MT_MEMORY_COUNT; i++) *bytes += (double)plan.peak[i];
    return MT_OK;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static mt_status report(const struct size *z, const struct kind *kind, const mt_trainer *t,
                        const char *recipe, int steps, figures *f)
{
    mt_comm *comm = mt_trainer_get_config(t)->comm;
    const mt_device *device = mt_trainer_device(t);
    double ranks = mt_comm_size(comm), wait = f->wait, peak = 0, planned = 0;
    MT_TRY(mt_comm_all_reduce(comm, NULL, &wait, 1, MT_F64, MT_REDUCE_SUM, "waits"));
    qsort(f->step, (size_t)steps, sizeof *f->step, compare);
    double step = f->step[steps / 2], tokens = (double)(z->b * z->s);
    MT_TRY(plan_memory(&planned, t));
    for (int i = 0; i < MT_MEMORY_COUNT; i++)
        if (i != MT_MEMORY_WORKSPACE) peak += (double)device->peak[i];
    if (mt_comm_rank(comm) == 0)
        printf(
            "{\"bench\":\"ranks\",\"size\":\"%s\",\"ranks\":%d,\"over\":\"%s\",\"recipe\":\"%s\","
            "\"kind\":\"%s\",\"step_ms\":%.2f,\"fastest_ms\":%.2f,\"tokens_s_rank\":%.0f,"
            "\"exposed_ms\":%.2f,\"gathered_mb\":%.1f,\"reduced_mb\":%.1f,\"peak_gb\":%.2f,"
            "\"plan_gb\":%.2f,\"scratch_gb\":%.2f}\n",
            z->name, (int)ranks, mt_comm_backend(comm), recipe, kind->name, step * 1e3,
            f->step[0] * 1e3, tokens / step, wait / ranks * 1e3,
            (double)f->moved.gathered_bytes / steps / 1e6,
            (double)f->moved.reduced_bytes / steps / 1e6, peak / 1e9, planned / 1e9,
            (double)device->peak[MT_MEMORY_WORKSPACE] / 1e9);
    fflush(stdout);
    return MT_OK;
}

static mt_status bench(mt_device *device, mt_comm *comm, const struct size *z,
                       const struct kind *kind, const char *recipe, int steps)
{
    mt_trainer_config c = configure(z, kind, comm, recipe);
    mt_trainer *t = NULL;
    mt_status status = MT_OK;
    figures f = { .wait = 0 };
    int64_t count = c.batch_size * c.sequence_length + 1;
    int32_t *tokens = malloc((size_t)count * sizeof *tokens);
    MT_REQUIRE(tokens, MT_ENOMEM, "bench: out of memory");
    for (int64_t i = 0; i < count; i++)
        tokens[i] = (int32_t)mt_rng_below(1, 0, (uint64_t)i, (uint64_t)z->v);
    for (int i = 0; i < MT_MEMORY_COUNT; i++) device->peak[i] = device->bytes[i];
    MT_TRY_CLEANUP(mt_trainer_create(&t, device, &c));
    MT_TRY_CLEANUP(make_steps(t, steps, tokens, &f));
    MT_TRY_CLEANUP(report(z, kind, t, recipe, steps, &f));
cleanup:
    mt_trainer_destroy(&t);
    free(tokens);
    return status;
}

static mt_status run(mt_device *device, mt_comm *comm, int argc, char **argv)
{
    static char none[] = "none", *plain[] = { none };
    const struct size *z = sizes;
    int steps = argc > 2 ? atoi(argv[2]) : 10, recipes = argc > 3 ? argc - 3 : 1;
    char **recipe = argc > 3 ? argv + 3 : plain;
    for (size_t i = 0; argc > 1 && i < sizeof sizes / sizeof *sizes; i++)
        if (!strcmp(argv[1], sizes[i].name)) z = &sizes[i];
    MT_REQUIRE(steps > 0 && steps <= MOST_STEPS, MT_ECONFIG, "steps: %d, must be from 1 to %d",
               steps, MOST_STEPS);
    watch_waits(device, comm);
    for (int r = 0; r < recipes; r++)
        for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
            if (kinds[k].one == (mt_comm_size(comm) == 1))
                MT_TRY(bench(device, comm, z, &kinds[k], recipe[r], steps));
    for (int i = 0; i < waits.made; i++) mt_timer_destroy(&waits.timers[i]);
    return MT_OK;
}

int main(int argc, char **argv)
{
    mt_device *device = NULL;
    mt_comm *comm = NULL;
    int code = 0, rank;
    mt_status status;
    if (argc > 2 && !strcmp(argv[1], "--ranks") && strcmp(argv[2], "1") != 0) {
        int ranks = atoi(argv[2]);
        argv[2] = argv[0];
        status = mt_supervise(&code, &rank, "/proc/self/exe", argv + 2, ranks, 10);
        if (status != MT_OK) fprintf(stderr, "bench_ranks: %s\n", mt_error_message());
        return status == MT_OK ? code : 1;
    }
    if (argc > 2 && !strcmp(argv[1], "--ranks")) argc -= 2, argv += 2;
    status = mt_ranks_open_device(&device, "auto");
    if (status == MT_OK) status = mt_ranks_open(&comm, device, 60);
    if (status == MT_OK) status = run(device, comm, argc, argv);
    if (status != MT_OK) fprintf(stderr, "bench_ranks: %s\n", mt_error_message());
    mt_ranks_close(&comm, status);
    mt_device_destroy(&device);
    return status != MT_OK;
}
