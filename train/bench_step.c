/* Whole training steps (forward, backward, AdamW, compute copies), as a training run makes them:
 * tokens per second, the share of the dense product's rate (MFU), and memory beside what the plan
 * device counts for it. */
#include "train/bench.h"

#include <stdlib.h>
#include <string.h>

#include "core/rng.h"
#include "train/plan.h"

/* olmoe is OLMoE-1B-7B, olmoe4 a quarter of it: what a peer without sharding fits. */
static const struct size {
    const char *name;
    int64_t d, layers, heads, kv_heads, head_dim, experts, top_k, f, v, s, b;
    unsigned devices;
} sizes[] = {
    { "tiny", 128, 4, 4, 2, 32, 8, 2, 128, 256, 256, 16, MT_BENCH_CPU | MT_BENCH_GPU },
    { "larger", 512, 8, 8, 4, 64, 16, 2, 512, 256, 512, 8, MT_BENCH_GPU },
    { "d64l2", 64, 2, 4, 2, 16, 32, 2, 128, 256, 256, 8, 0 },
    { "d64l3", 64, 3, 4, 2, 16, 32, 2, 128, 256, 256, 8, 0 },
    { "d96l2", 96, 2, 6, 2, 16, 32, 2, 128, 256, 256, 8, 0 },
    { "olmoe4", 2048, 4, 16, 16, 128, 64, 8, 1024, 50304, 2048, 4, MT_BENCH_GPU },
    { "olmoe", 2048, 16, 16, 16, 128, 64, 8, 1024, 50304, 2048, 4, 0 },
    { "nano", 16, 2, 2, 1, 8, 4, 2, 16, 61, 8, 2, 0 },
};
enum { SIZES = sizeof sizes / sizeof *sizes };

const char *mt_bench_step_shape(int i)
{
    return i < SIZES ? sizes[i].name : NULL;
}

/* How masters and moments are stored. */
static const struct form {
    const char *name;
    mt_master master;
    mt_moments moments;
} forms[] = {
    { "f32/f32", MT_MASTER_REAL, MT_MOMENTS_REAL },
    { "bf16+i16/bf16", MT_MASTER_SPLIT, MT_MOMENTS_BF16 },
};
enum { FORMS = sizeof forms / sizeof *forms };

struct job {
    mt_trainer_config config;
    mt_trainer *trainer;
    int32_t *tokens; /* [B S + 1] */
};

static mt_status launch(mt_bench *b, void *context, int64_t turn)
{
    struct job *j = context;
    mt_step_result result;
    (void)b, (void)turn;
    return mt_trainer_step(j->trainer, j->tokens, j->tokens + 1, &result);
}

static mt_status configure(struct job *j, const mt_bench *b, const struct size *z,
                           const struct form *form, const char *recipe)
{
    const mt_architecture *architecture;
    mt_trainer_config *c = &j->config;
    *c = (mt_trainer_config){ .dtype = b->options.dtype,
                              .grad_dtype = b->options.bf16_grads ? MT_BF16 : MT_F32,
                              .batch_size = z->b,
                              .micro_batch_size = z->b,
                              .sequence_length = z->s,
                              .steps = 1000000,
                              .delayed_history = 16,
                              .seed = 1 };
    snprintf(c->recipe, sizeof c->recipe, "%s", recipe);
    MT_TRY(mt_architecture_find(&architecture, "qwen3_moe"));
    mt_model_config_defaults(&c->model, architecture);
    mt_optim_config_defaults(&c->optim);
    c->optim.lr = 3e-4, c->optim.schedule = MT_SCHEDULE_CONSTANT;
    c->optim.master = form->master, c->optim.moments = form->moments;
    c->model.vocab_size = z->v, c->model.hidden_size = z->d, c->model.num_hidden_layers = z->layers;
    c->model.num_attention_heads = z->heads, c->model.num_key_value_heads = z->kv_heads;
    c->model.head_dim = z->head_dim, c->model.moe_intermediate_size = z->f;
    c->model.num_experts = z->experts, c->model.num_experts_per_tok = z->top_k;
    c->model.max_position_embeddings = z->s;
    return MT_OK;
}

static mt_status make_tokens(struct job *j)
{
    const mt_trainer_config *c = &j->config;
    int64_t count = c->batch_size * c->sequence_length;
    j->tokens = malloc((size_t)(count + 1) * sizeof *j->tokens);
    MT_REQUIRE(j->tokens, MT_ENOMEM, "bench: out of memory");
    for (int64_t i = 0; i <= count; i++)
        j->tokens[i] = (int32_t)mt_rng_below(1, 0, (uint64_t)i, (uint64_t)c->model.vocab_size);
    return MT_OK;
}

/* Forward and backward products of a token: active matrices, and the causal half of attention. */
static double flop_per_token(const struct size *z)
{
    double qkv = (double)(z->d * (z->heads + 2 * z->kv_heads) * z->head_dim);
    double o = (double)(z->heads * z->head_dim * z->d);
    double experts = (double)(z->top_k * 3 * z->d * z->f + z->experts * z->d);
    double attention = (double)(6 * z->layers * z->s * z->heads * z->head_dim);
    return 6 * ((double)z->layers * (qkv + o + experts) + (double)(z->v * z->d)) + attention;
}

/* ---- memory ------------------------------------------------------------------------------------
 */

/* High-water marks begin anew at what is in use. */
static void mark_memory(mt_device *device)
{
    for (int i = 0; i < MT_MEMORY_COUNT; i++) device->peak[i] = device->bytes[i];
}

/* Scratch is planned for cuda alone, and counted there. */
static double peak_memory(const mt_device *device, bool scratch)
{
    int64_t peak = 0;
    for (int i = 0; i < MT_MEMORY_COUNT; i++)
        if (i != MT_MEMORY_WORKSPACE || scratch) peak += device->peak[i];
    return (double)peak;
}

static bool on_gpu(const mt_device *device)
{
    return !strcmp(device->name, "cuda");
}

static mt_status plan_memory(double *bytes, const mt_device *like, const mt_trainer_config *config)
{
    mt_device *device;
    mt_trainer *trainer = NULL;
    mt_status status = MT_OK;
    MT_TRY(mt_device_open(&device, "plan", on_gpu(like) ? like->kernel_set : NULL, 1));
    MT_TRY_CLEANUP(mt_trainer_create(&trainer, device, config));
    MT_TRY_CLEANUP(mt_plan_passes(trainer, NULL));
    *bytes = peak_memory(device, on_gpu(like));
cleanup:
    mt_trainer_destroy(&trainer);
    mt_device_destroy(&device);
    return status;
}

/* ---- reports -----------------------------------------------------------------------------------
 */

static mt_status measure(mt_bench *b, struct job *j, const struct size *z, mt_bench_case *c)
{
    double seconds, planned = 0, tokens = (double)(z->b * z->s), flop = flop_per_token(z) * tokens;
    bool gpu = on_gpu(b->device);
    mark_memory(b->device);
    double before = peak_memory(b->device, gpu);
    MT_TRY(plan_memory(&planned, b->device, &j->config));
    MT_TRY(mt_trainer_create(&j->trainer, b->device, &j->config));
    MT_TRY(mt_bench_measure(b, &seconds, launch, j));
    c->amount = tokens, c->floor = flop / b->peak;
    c->notes[0].name = "mfu", c->notes[0].value = c->floor / seconds;
    c->notes[1].name = "tflops", c->notes[1].value = flop / seconds * 1e-12;
    c->notes[2].name = "memory_gb",
    c->notes[2].value = (peak_memory(b->device, gpu) - before) * 1e-9;
    c->notes[3].name = "plan_gb", c->notes[3].value = planned * 1e-9;
    return mt_bench_report(b, c, seconds);
}

static mt_status bench_size(mt_bench *b, const struct size *z, const struct form *form,
                            const char *recipe)
{
    struct job j = { 0 };
    mt_bench_case c = { "step", z->name, form->name, recipe, "tok/s", 0, 0, { { NULL, 0 } } };
    mt_status status = MT_OK;
    MT_TRY_CLEANUP(configure(&j, b, z, form, recipe));
    MT_TRY_CLEANUP(make_tokens(&j));
    MT_TRY_CLEANUP(measure(b, &j, z, &c));
cleanup:
    mt_trainer_destroy(&j.trainer);
    free(j.tokens);
    return status == MT_OK ? MT_OK : mt_bench_give_up(b, &c, status);
}

/* f64 stores masters and moments as they are. */
static bool stores(const struct form *form, mt_dtype dtype)
{
    return dtype != MT_F64 || (form->master == MT_MASTER_REAL && form->moments == MT_MOMENTS_REAL);
}

mt_status mt_bench_step(mt_bench *b)
{
    for (int i = 0; i < SIZES; i++)
        for (int f = 0; f < FORMS; f++)
            for (int r = 0; r < b->options.recipe_count; r++)
                if (mt_bench_selected(b, sizes[i].name, sizes[i].devices) &&
                    stores(&forms[f], b->options.dtype))
                    MT_TRY(bench_size(b, &sizes[i], &forms[f], b->options.recipes[r]));
    return MT_OK;
}
