/* Tokens per second of a whole training step (forward, backward, AdamW, refresh of compute
 * weights), and the milliseconds that each op takes of it.
 * Usage: bench_step [tiny|larger|...] [f32|bf16|f64] [seconds] [threads]
 *        [f32|bf16|bf16+sr|fp8 (moments)] [f32|bf16+i16 (masters)] [recipe] */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/clock.h"
#include "core/rng.h"
#include "train/trainer.h"

static const struct size {
    const char *name;
    int64_t d, layers, heads, kv_heads, head_dim, experts, top_k, f, v, s, b;
} sizes[] = {
    { "tiny", 128, 4, 4, 2, 32, 8, 2, 128, 256, 256, 16 },
    { "larger", 512, 8, 8, 4, 64, 16, 2, 512, 256, 512, 8 },
    { "d64l2", 64, 2, 4, 2, 16, 32, 2, 128, 256, 256, 8 },
    { "d64l3", 64, 3, 4, 2, 16, 32, 2, 128, 256, 256, 8 },
    { "d96l2", 96, 2, 6, 2, 16, 32, 2, 128, 256, 256, 8 },
};

/* ---- time by op: kernels that measure themselves, without those that they call ---- */

static const struct mt_kernels *measured[MT_DTYPE_COUNT];
static struct {
    const char *name;
    double seconds;
    int64_t calls;
} ops[64];
static int op_count;
static double within; /* time of the ops that the one under way has called */

static void count(int at, double took, double before)
{
    ops[at].seconds += took - within, ops[at].calls++;
    within = before + took;
}

#define MEASURE(op)                                                                                \
    static mt_status measure_##op(mt_stream *stream, const struct mt_##op##_args *args)            \
    {                                                                                              \
        static int at = -1;                                                                        \
        if (at < 0) ops[at = op_count++].name = #op;                                               \
        double start = mt_now(), before = within;                                                  \
        within = 0;                                                                                \
        mt_status status = measured[args->dtype]->op(stream, args);                                \
        count(at, mt_now() - start, before);                                                       \
        return status;                                                                             \
    }
MT_OPS(MEASURE)

/* Of every dtype: the optimizer's ops run in f32 beside bf16. */
static void measure(mt_device *device)
{
    static struct mt_kernels kernels[MT_DTYPE_COUNT];
    for (int d = 0; d < MT_DTYPE_COUNT; d++) {
        if (!device->kernels[d]) continue;
        measured[d] = device->kernels[d];
        kernels[d] = *measured[d];
#define REPLACE(op) kernels[d].op = measure_##op;
        MT_OPS(REPLACE)
        device->kernels[d] = &kernels[d];
    }
}

static void print_ops(int steps, double step)
{
    double rest = step;
    for (int i = 0; i < op_count; i++) {
        int most = i;
        for (int j = i; j < op_count; j++)
            if (ops[j].seconds > ops[most].seconds) most = j;
        double seconds = ops[most].seconds / steps;
        printf("    %-20s %8.2f ms  %4.1f %%  %4.0f calls\n", ops[most].name, seconds * 1e3,
               100 * seconds / step, (double)ops[most].calls / steps);
        rest -= seconds;
        ops[most] = ops[i];
    }
    printf("    %-20s %8.2f ms\n", "between them", rest * 1e3);
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Forward and backward products of a token: active matrices, and the causal half of attention. */
static double flops_per_token(const struct size *z)
{
    double qkv = (double)(z->d * (z->heads + 2 * z->kv_heads) * z->head_dim);
    double o = (double)(z->heads * z->head_dim * z->d);
    double experts = (double)(z->top_k * 3 * z->d * z->f + z->experts * z->d);
    double attention = (double)(6 * z->layers * z->s * z->heads * z->head_dim);
    return 6 * ((double)z->layers * (qkv + o + experts) + (double)(z->v * z->d)) + attention;
}

/* Optimizer state: "bf16+sr" and the like for moments. */
static mt_status set_forms(mt_optim_config *c, const char *moments, const char *master)
{
    size_t n = strcspn(moments, "+");
    int m = 0;
    while (m < MT_MOMENTS_COUNT && (strlen(mt_moments_forms[m].name) != n ||
                                    strncmp(moments, mt_moments_forms[m].name, n) != 0))
        m++;
    MT_REQUIRE(m < MT_MOMENTS_COUNT, MT_ECONFIG, "moments '%s' are not f32, bf16 or fp8", moments);
    c->moments = (mt_moments)m, c->moments_sr = strcmp(moments + n, "+sr") == 0;
    c->master = strcmp(master, mt_master_name(MT_MASTER_SPLIT)) ? MT_MASTER_REAL : MT_MASTER_SPLIT;
    return MT_OK;
}

static mt_status run(const struct size *z, mt_dtype dtype, double seconds, int threads,
                     const char *moments, const char *master, const char *recipe)
{
    mt_device *device;
    mt_trainer *trainer;
    const mt_architecture *architecture;
    mt_trainer_config c = { .dtype = dtype,
                            .batch_size = z->b,
                            .micro_batch_size = z->b,
                            .sequence_length = z->s,
                            .steps = 1000000,
                            .delayed_history = 16,
                            .seed = 1 };
    snprintf(c.recipe, sizeof c.recipe, "%s", recipe);
    MT_TRY(mt_architecture_find(&architecture, "qwen3_moe"));
    mt_model_config_defaults(&c.model, architecture);
    mt_optim_config_defaults(&c.optim);
    MT_TRY(set_forms(&c.optim, moments, master));
    c.optim.lr = 3e-4, c.optim.schedule = MT_SCHEDULE_CONSTANT;
    c.model.vocab_size = z->v, c.model.hidden_size = z->d, c.model.num_hidden_layers = z->layers;
    c.model.num_attention_heads = z->heads, c.model.num_key_value_heads = z->kv_heads;
    c.model.head_dim = z->head_dim, c.model.moe_intermediate_size = z->f;
    c.model.num_experts = z->experts, c.model.num_experts_per_tok = z->top_k;
    MT_TRY(mt_device_open(&device, "cpu", NULL, threads));
    measure(device);
    MT_TRY(mt_trainer_create(&trainer, device, &c));

    int64_t tokens = z->b * z->s;
    int32_t *x = malloc((size_t)(tokens + 1) * sizeof *x);
    MT_REQUIRE(x, MT_ENOMEM, "bench: out of memory");
    for (int64_t i = 0; i <= tokens; i++)
        x[i] = (int32_t)mt_rng_below(1, 0, (uint64_t)i, (uint64_t)z->v);
    enum { MOST = 100000 };
    static double times[MOST];
    int n = 0;
    double total = 0;
    mt_step_result result;
    for (int i = 0; i < 3; i++) MT_TRY(mt_trainer_step(trainer, x, x + 1, &result));
    for (int i = 0; i < op_count; i++) ops[i].seconds = 0, ops[i].calls = 0;
    for (double start = mt_now(); mt_now() - start < seconds && n < MOST; n++) {
        double t = mt_now();
        MT_TRY(mt_trainer_step(trainer, x, x + 1, &result));
        total += times[n] = mt_now() - t;
    }
    qsort(times, (size_t)n, sizeof *times, compare);
    double median = times[n / 2], gflop = flops_per_token(z) * (double)tokens * 1e-9;
    printf("{\"size\": \"%s\", \"dtype\": \"%s\", \"moments\": \"%s\", \"master\": \"%s\", "
           "\"master_bytes\": %lld, \"moment_bytes\": %lld, \"kernels\": \"%s\", \"steps\": %d, "
           "\"step_ms\": "
           "%.2f, "
           "\"best_ms\": %.2f, \"tok_s\": %.0f, \"tok_s_best\": %.0f, \"gflops\": %.1f, \"loss\": "
           "%.4f, \"max_vio\": %.2f}\n",
           z->name, mt_dtype_name(dtype), moments, master,
           (long long)device->peak[MT_MEMORY_MASTER], (long long)device->peak[MT_MEMORY_MOMENTS],
           device->kernel_set, n, median * 1e3, times[0] * 1e3, (double)tokens / median,
           (double)tokens / times[0], gflop / median, result.loss, result.max_vio);
    print_ops(n, total / n);
    free(x);
    mt_trainer_destroy(&trainer);
    mt_device_destroy(&device);
    return MT_OK;
}

int main(int argc, char **argv)
{
    const char *name = argc > 1 ? argv[1] : "tiny";
    mt_dtype dtype = MT_F32;
    mt_status status = argc > 2 ? mt_dtype_parse(&dtype, argv[2]) : MT_OK;
    double seconds = argc > 3 ? atof(argv[3]) : 10;
    int threads = argc > 4 ? atoi(argv[4]) : 0;
    const char *moments = argc > 5 ? argv[5] : "f32", *master = argc > 6 ? argv[6] : "f32";
    const char *recipe = argc > 7 ? argv[7] : "none";
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes && status == MT_OK; i++)
        if (!strcmp(sizes[i].name, name))
            status = run(&sizes[i], dtype, seconds, threads, moments, master, recipe);
    if (status != MT_OK) fprintf(stderr, "%s: %s\n", mt_status_name(status), mt_error_message());
    return status != MT_OK;
}
