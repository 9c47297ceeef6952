/* trace: the same numbers as the trainer's own steps, in the shapes and under the names promised.
 */
#include <math.h>

#include "tests/train/verbs.h"
#include "train/h5.h"
#include "train/trace.h"

enum { B = 2, S = 5, COUNT = B * S, V = 29, E = 8, K = 2, STEPS = 4 };

static char line[2048];
#define TRACE(options)                                                                             \
    (snprintf(line, sizeof line, "trace %s --tokens %s -o %s " options, in_dir("ckpt"),            \
              in_dir("in.h5"), in_dir("out.h5")),                                                  \
     line)

/* Tokens of a batch; few different ones, so that some experts stay idle. */
static int64_t token(int64_t i)
{
    return (int64_t)(mt_rng_u32(9, 0, (uint64_t)i) % 5);
}

/* in.h5 with tokens, and targets if there are any: [B, S], or [STEPS, B, S]. */
static void make_input(bool stepped, const int64_t *targets)
{
    mt_h5 *file;
    int64_t shape[3] = { STEPS, B, S }, tokens[STEPS * COUNT];
    for (int64_t i = 0; i < STEPS * COUNT; i++) tokens[i] = token(i);
    assert_ok(mt_h5_create(&file, in_dir("in.h5")));
    assert_ok(mt_h5_write(file, "tokens", MT_I64, stepped ? 3 : 2, shape + !stepped, tokens));
    if (targets)
        assert_ok(mt_h5_write(file, "targets", MT_I64, stepped ? 3 : 2, shape + !stepped, targets));
    assert_ok(mt_h5_commit(&file));
}

static void make_model(bool tied)
{
    mt_model_config c = small_model(tied);
    make_checkpoint(in_dir("ckpt"), &c);
}

/* A dataset of out.h5, freed by the caller. */
static void *get(const char *name, int type, mt_h5_info *info)
{
    mt_h5 *file;
    assert_ok(mt_h5_open(&file, in_dir("out.h5")));
    assert_ok(mt_h5_dataset_info(file, name, info));
    assert_int_equal(info->type, type);
    void *data = malloc((size_t)info->bytes + 1);
    assert_non_null(data);
    assert_ok(mt_h5_read(file, name, info, data));
    mt_h5_close(&file);
    return data;
}

static double get_f64(const char *name)
{
    mt_h5_info info;
    double *x = get(name, MT_F64, &info), value = x[0];
    assert_int_equal(info.ndim, 0);
    free(x);
    return value;
}

/* The number of objects in a group of out.h5. */
static int64_t members(const char *group)
{
    mt_h5 *file;
    char **names;
    int64_t count;
    assert_ok(mt_h5_open(&file, in_dir("out.h5")));
    assert_ok(mt_h5_list(file, group, &names, &count));
    mt_h5_names_free(&names, count);
    mt_h5_close(&file);
    return count;
}

/* A trainer in f64 with the checkpoint's weights. */
static mt_trainer *make_trainer(const mt_optim_config *optim)
{
    mt_trainer_config c = { .model = small_model(false),
                            .optim = *optim,
                            .dtype = MT_F64,
                            .batch_size = B,
                            .micro_batch_size = B,
                            .sequence_length = S,
                            .steps = STEPS };
    mt_trainer *trainer;
    assert_ok(mt_checkpoint_read_model_config(in_dir("ckpt"), &c.model));
    assert_ok(mt_trainer_create(&trainer, test_device(), &c));
    assert_ok(mt_checkpoint_load_model(mt_trainer_model(trainer), in_dir("ckpt")));
    return trainer;
}

static void shifted_batch(int32_t *tokens, int32_t *targets, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        tokens[i] = (int32_t)token(i);
        targets[i] = i % S + 1 < S ? (int32_t)token(i + 1) : -100;
    }
}

/* Every gradient dataset is the param's memory, bit for bit, in the shape of the exported tensor.
 */
static void check_grads(const mt_trainer *trainer)
{
    mt_param_store *store = mt_model_params(mt_trainer_model(trainer));
    int64_t parts = 0;
    for (int64_t i = 0; i < mt_param_store_count(store); i++) {
        const mt_param *p = mt_param_store_get(store, i);
        for (int64_t j = 0; j < p->part_count; j++, parts++) {
            const mt_param_part *part = &p->parts[j];
            int64_t first = (part->member * p->group.m + part->row) * p->group.k;
            char name[256];
            mt_h5_info info;
            snprintf(name, sizeof name, "grads/%s", part->name);
            double *got = get(name, MT_F64, &info);
            assert_int_equal(info.ndim, part->ndim);
            assert_int_equal(info.count, part->rows * p->group.k);
            assert_memory_equal(got, (const double *)p->grad + first, (size_t)info.bytes);
            free(got);
        }
    }
    assert_int_equal(parts, members("grads"));
}

static void a_batch_equals_the_trainer(void **state)
{
    (void)state;
    int32_t tokens[COUNT], targets[COUNT];
    double logits[COUNT * V];
    mt_step_result r;
    mt_h5_info info;
    mt_optim_config optim;
    make_model(false);
    make_input(false, NULL);
    assert_verb(TRACE("--targets --grads --dtype f64"), 0, "");
    shifted_batch(tokens, targets, COUNT);
    mt_optim_config_defaults(&optim);
    mt_trainer *trainer = make_trainer(&optim);
    assert_ok(mt_trainer_logits(trainer, tokens, B, S, -1, logits));
    double *got = get("logits", MT_F64, &info);
    assert_true(info.ndim == 3 && info.shape[0] == B && info.shape[1] == S && info.shape[2] == V);
    assert_memory_equal(got, logits, sizeof logits);
    free(got);
    assert_ok(mt_trainer_gradients(trainer, tokens, targets, &r));
    assert_true(get_f64("loss") == r.loss);
    assert_true(get_f64("aux_loss") == r.aux_loss);
    assert_true(r.aux_loss > 0 && r.z_loss > 0);
    assert_true(get_f64("total_loss") == r.loss + 0.05 * r.aux_loss + 0.01 * r.z_loss);
    check_grads(trainer);
    mt_trainer_destroy(&trainer);
}

/* Central difference of total_loss in one weight of a tied matrix, through both its uses. */
static void a_tied_gradient_is_one_sum(void **state)
{
    (void)state;
    mt_h5_info info;
    make_model(true);
    make_input(false, NULL);
    assert_verb(TRACE("--targets --grads --dtype f64"), 0, "");
    double *grad = get("grads/model.embed_tokens.weight", MT_F64, &info);
    mt_h5 *file;
    bool exists;
    assert_ok(mt_h5_open(&file, in_dir("out.h5")));
    assert_ok(mt_h5_exists(file, "grads/lm_head.weight", &exists));
    assert_false(exists);
    mt_h5_close(&file);
    mt_device *device = test_device();
    mt_model *model;
    mt_model_config config;
    mt_trace_input in;
    assert_ok(mt_checkpoint_read_model_config(in_dir("ckpt"), &config));
    assert_ok(mt_trace_input_read(&in, in_dir("in.h5"), false, V));
    assert_ok(mt_model_create(&model, device, &config, MT_F64, S, false, NULL));
    assert_ok(mt_checkpoint_load_model(model, in_dir("ckpt")));
    mt_stream stream = { .device = device };
    mt_param *embed = mt_param_store_find(mt_model_params(model), "model.embed_tokens");
    double total[2], *weight = (double *)embed->master + 2 * 12 + 5; /* token 2 is in the batch */
    const double h = 1e-5;
    for (int i = 0; i < 2; i++) {
        double was = *weight;
        *weight += i ? -h : h;
        assert_ok(mt_model_refresh(model, &stream));
        assert_ok(mt_h5_create(&file, in_dir("out.h5")));
        assert_ok(mt_trace_batch(&total[i], file, device, model, &in,
                                 &(mt_trace_options){ .targets = true }));
        assert_ok(mt_h5_commit(&file));
        assert_true(get_f64("total_loss") == total[i]);
        *weight = was;
    }
    double want = (total[0] - total[1]) / (2 * h), got = grad[2 * 12 + 5];
    assert_true(fabs(want) > 1e-3);
    assert_true(fabs(got - want) <= 1e-7 * fabs(want) + 1e-9);
    mt_model_destroy(&model);
    mt_trace_input_free(&in);
    free(grad);
}

static void idle_experts_have_zero_gradients(void **state)
{
    (void)state;
    mt_h5_info info;
    bool busy[E] = { false };
    int64_t idle = 0;
    make_model(false);
    make_input(false, NULL);
    assert_verb(TRACE("--targets --grads --activations *.chosen_experts"), 0, "");
    assert_int_equal(members("activations"), 2); /* the layers with experts */
    int32_t *chosen = get("activations/model.layers.0.mlp.chosen_experts", MT_I32, &info);
    assert_true(info.ndim == 3 && info.shape[0] == B && info.shape[1] == S && info.shape[2] == K);
    for (int64_t i = 0; i < COUNT * K; i++) busy[chosen[i]] = true;
    free(chosen);
    for (int e = 0; e < E; e++) {
        char name[128];
        double most = 0;
        snprintf(name, sizeof name, "grads/model.layers.0.mlp.experts.%d.up_proj.weight", e);
        float *grad = get(name, MT_F32, &info);
        for (int64_t i = 0; i < info.count; i++) most = fmax(most, fabs((double)grad[i]));
        assert_int_equal(most > 0, busy[e]);
        idle += !busy[e];
        free(grad);
    }
    assert_true(idle > 0 && idle < E);
}

/* A trace into the checkpoint that it reads would end it. */
static void a_trace_stays_out_of_its_checkpoint(void **state)
{
    (void)state;
    static const char *const names[] = { "model.h5", "trace.h5" };
    make_model(false);
    make_input(false, NULL);
    for (int i = 0; i < 2; i++) {
        mt_checkpoint *c = NULL;
        snprintf(line, sizeof line, "trace %s --tokens %s -o %s/%s", in_dir("ckpt"),
                 in_dir("in.h5"), in_dir("ckpt"), names[i]);
        assert_verb(line, MT_EXIT_USAGE, "is a complete checkpoint and would be changed by");
        assert_ok(mt_checkpoint_open(&c, in_dir("ckpt")));
        mt_checkpoint_close(&c);
    }
}

/* One counted target: the loss is -log softmax of the logits that were written. */
static void ignored_targets_do_not_count(void **state)
{
    (void)state;
    mt_h5_info info;
    int64_t targets[COUNT];
    for (int i = 0; i < COUNT; i++) targets[i] = i == 7 ? 11 : -100;
    make_model(false);
    make_input(false, targets);
    assert_verb(TRACE("--targets --dtype f64"), 0, "");
    double *logits = get("logits", MT_F64, &info), sum = 0;
    for (int j = 0; j < V; j++) sum += exp(logits[7 * V + j]);
    double want = log(sum) - logits[7 * V + 11];
    /* V additions and a logarithm */
    assert_true(fabs(get_f64("loss") - want) <= (V + 8) * 0x1p-53 * (want + 1));
    free(logits);
}

static void activations_follow_the_pattern(void **state)
{
    (void)state;
    mt_h5_info info, same;
    make_model(false);
    make_input(false, NULL);
    assert_verb(TRACE("--activations lm_head"), 0, "");
    assert_int_equal(members("activations"), 1);
    float *head = get("activations/lm_head", MT_F32, &info), *logits = get("logits", MT_F32, &same);
    assert_memory_equal(head, logits, (size_t)same.bytes);
    assert_memory_equal(info.shape, same.shape, 3 * sizeof info.shape[0]);
    free(head), free(logits);
    assert_verb(TRACE("--activations model.layers.2*"), 0, "");
    int64_t one_layer = members("activations");
    assert_verb(TRACE("--activations *"), 0, "");
    assert_true(one_layer >= 6 && members("activations") >= 3 * 6 + 3);
    assert_int_equal(members("/"), 2); /* and logits: no targets, no losses */
}

static void bf16_is_written_as_f32(void **state)
{
    (void)state;
    mt_h5_info info;
    make_model(false);
    make_input(false, NULL);
    assert_verb(TRACE("--targets --grads --dtype bf16"), 0, "");
    float *logits = get("logits", MT_F32, &info);
    for (int64_t i = 0; i < info.count; i++)
        assert_true(mt_bf16_to_f32(mt_f32_to_bf16(logits[i])) == logits[i]);
    free(logits);
}

static float get_f32(const char *name)
{
    mt_h5_info info;
    float *x = get(name, MT_F32, &info), value = x[0];
    free(x);
    return value;
}

/* A run whose gradients are bf16 computes in bf16: nobody has to say so. */
static void gradients_are_those_of_the_run(void **state)
{
    (void)state;
    static const char run[] =
        "model: {vocab_size: 29, hidden_size: 12, num_hidden_layers: 3, num_attention_heads: 4, "
        "head_dim: 6, moe_intermediate_size: 10, num_experts: 8, num_experts_per_tok: 2}\n"
        "data: {train: none.h5}\n"
        "train: {dtype: bf16, grad_dtype: bf16}\n";
    mt_h5_info info;
    mt_model_config c = small_model(false);
    make_run_checkpoint(in_dir("ckpt"), &c, run);
    make_input(false, NULL);
    assert_verb(TRACE("--targets --grads"), 0, "");
    float *grad = get("grads/model.layers.0.mlp.experts.0.up_proj.weight", MT_F32, &info);
    for (int64_t i = 0; i < info.count; i++)
        assert_true(mt_bf16_to_f32(mt_f32_to_bf16(grad[i])) == grad[i]);
    free(grad);
    float loss = get_f32("loss");
    assert_verb(TRACE("--targets --grads --dtype bf16"), 0, "");
    assert_true(get_f32("loss") == loss);
    assert_verb(TRACE("--targets --dtype f32"), MT_EXIT_USAGE, "train.grad_dtype is bf16");
    assert_verb(TRACE("--targets --dtype f32 --set train.grad_dtype=f32"), 0, "");
    const float real = get_f32("loss");
    assert_true(real != loss);
    assert_verb(TRACE("--targets --set train.grad_dtype=f32"), 0, "");
    assert_true(get_f32("loss") == real);
}

/* The losses of steps are those of a trainer at the same rate; the first is that of the batch. */
static void steps_equal_the_trainer(void **state)
{
    (void)state;
    enum { N = STEPS * COUNT };
    int32_t tokens[N], targets[N];
    mt_h5_info info;
    mt_optim_config optim;
    make_model(false);
    make_input(true, NULL);
    assert_verb(TRACE("--steps 4 --dtype f64 --set optim.lr=0.01 --set optim.weight_decay=0.3"), 0,
                "");
    shifted_batch(tokens, targets, N);
    mt_optim_config_defaults(&optim);
    optim.lr = 0.01, optim.weight_decay = 0.3, optim.schedule = MT_SCHEDULE_CONSTANT;
    mt_trainer *trainer = make_trainer(&optim);
    double *losses = get("losses", MT_F64, &info);
    assert_true(info.ndim == 1 && info.shape[0] == STEPS);
    for (int64_t i = 0; i < STEPS; i++) {
        mt_step_result r;
        assert_ok(mt_trainer_step(trainer, tokens + i * COUNT, targets + i * COUNT, &r));
        assert_true(r.lr == 0.01);
        assert_true(losses[i] == r.loss);
    }
    double first = losses[0];
    free(losses);
    mt_trainer_destroy(&trainer);
    make_input(false, NULL);
    assert_verb(TRACE("--targets --dtype f64"), 0, "");
    assert_true(get_f64("loss") == first);
}

/* One rank has all experts of a run in which ranks shared them, and the run's optimizer. */
static void steps_of_a_run_over_ranks(void **state)
{
    (void)state;
    static const char *const degrees[] = { "", "parallel: {expert: 2}\n" };
    mt_h5_info info;
    mt_model_config c = small_model(false);
    double *losses[2];
    char text[512];
    make_input(true, NULL);
    for (int i = 0; i < 2; i++) {
        snprintf(text, sizeof text,
                 "model: {vocab_size: 29, hidden_size: 12, num_hidden_layers: 3, "
                 "num_attention_heads: 4, head_dim: 6, moe_intermediate_size: 10, num_experts: 8, "
                 "num_experts_per_tok: 2}\n"
                 "data: {train: none.h5}\n"
                 "train: {steps: 9, batch_size: 4}\n"
                 "optim: {lr: 0.01, weight_decay: 0.3, warmup_steps: 3}\n%s",
                 degrees[i]);
        make_run_checkpoint(in_dir("ckpt"), &c, text);
        assert_verb(TRACE("--steps 4 --dtype f64"), 0, "");
        losses[i] = get("losses", MT_F64, &info);
    }
    assert_memory_equal(losses[1], losses[0], STEPS * sizeof *losses[0]);
    free(losses[0]);
    make_checkpoint(in_dir("ckpt"), &c);
    assert_verb(TRACE("--steps 4 --dtype f64 --set optim.lr=0.01 --set optim.weight_decay=0.3"), 0,
                "");
    losses[0] = get("losses", MT_F64, &info);
    assert_memory_equal(losses[1], losses[0], STEPS * sizeof *losses[0]);
    free(losses[0]), free(losses[1]);
    /* and a batch of it */
    make_run_checkpoint(in_dir("ckpt"), &c, text);
    make_input(false, NULL);
    assert_verb(TRACE("--targets --grads --dtype f64"), 0, "");
}

/* A batch is computed in the formats that a step is. */
static void a_recipe_holds_for_a_batch(void **state)
{
    (void)state;
    mt_h5_info info;
    make_model(false);
    make_input(true, NULL);
    assert_verb(TRACE("--steps 4 --dtype f64 --set recipe=mxfp8"), 0, "");
    double *losses = get("losses", MT_F64, &info), first = losses[0];
    free(losses);
    make_input(false, NULL);
    assert_verb(TRACE("--targets --grads --dtype f64 --set recipe=mxfp8"), 0, "");
    assert_true(get_f64("loss") == first);
    assert_verb(TRACE("--targets --dtype f64"), 0, "");
    assert_true(get_f64("loss") != first);
}

/* The run's was allowed then. */
static void a_refused_recipe_is_replaced(void **state)
{
    (void)state;
    static const char run[] =
        "model: {vocab_size: 29, hidden_size: 12, num_hidden_layers: 3, num_attention_heads: 4, "
        "head_dim: 6, moe_intermediate_size: 10, num_experts: 8, num_experts_per_tok: 2}\n"
        "data: {train: none.h5}\n"
        "recipe: {use: fprop=bf16 dgrad=bf16 wgrad=mxfp8:source=dequantized}\n";
    mt_model_config c = small_model(false);
    make_run_checkpoint(in_dir("ckpt"), &c, run);
    make_input(false, NULL);
    assert_verb(TRACE("--targets"), MT_EXIT_USAGE, "recipe: wgrad X column: source=dequantized");
    assert_verb(TRACE("--targets --set recipe=mxfp8"), 0, "");
}

/* How the run kept its weights and moments does not go with f64: where none is updated, it does not
 * matter. */
static void storage_is_replaced(void **state)
{
    (void)state;
    static const char run[] =
        "model: {vocab_size: 29, hidden_size: 12, num_hidden_layers: 3, num_attention_heads: 4, "
        "head_dim: 6, moe_intermediate_size: 10, num_experts: 8, num_experts_per_tok: 2}\n"
        "data: {train: none.h5}\n"
        "optim: {moments: bf16, moments_sr: true, master: bf16+i16}\n";
    mt_model_config c = small_model(false);
    make_run_checkpoint(in_dir("ckpt"), &c, run);
    make_input(false, NULL);
    assert_verb(TRACE("--targets"), 0, "");
    assert_verb(TRACE("--targets --dtype f64"), 0, "");
    assert_verb(TRACE("--targets --dtype f64 --set optim.moments=fp8"), MT_EXIT_USAGE,
                "optim.moments is fp8, must be");
    make_input(true, NULL);
    assert_verb(TRACE("--steps 4 --dtype f64"), MT_EXIT_USAGE, "optim.moments is bf16, must be");
    assert_verb(TRACE("--steps 4 --dtype f64 --set optim.moments=f32 --set optim.moments_sr=false "
                      "--set optim.master=f32"),
                0, "");
}

static void mistakes_are_refused(void **state)
{
    (void)state;
    static const struct {
        const char *options, *words;
        int code;
    } cases[] = {
        { "--grads", "--grads needs --targets", MT_EXIT_USAGE },
        { "--dtype f16", "dtype 'f16' is not one of f64, f32, bf16", MT_EXIT_USAGE },
        { "--dtype f23", "dtype 'f23' is not one of f64, f32, bf16", MT_EXIT_USAGE },
        { "--activations nothing.*",
          "activations: nothing.* fits none; the first of them are: model.embed", MT_EXIT_USAGE },
        { "--steps 4", "must be i64 [N,B,S], for N steps", MT_EXIT_FILES }, /* it has a batch */
        { "--steps -1", "--steps is -1", MT_EXIT_USAGE },
        { "--steps 0", "--steps is 0, must be positive", MT_EXIT_USAGE },
        { "--targets --set optim.lrr=1", "did you mean optim.lr", MT_EXIT_USAGE },
        { "--targets --set optim.lr=1", "--set optim.lr=1: it means nothing without --steps",
          MT_EXIT_USAGE },
        { "--set train.init_from=elsewhere", "init_from=elsewhere: it means nothing to trace",
          MT_EXIT_USAGE },
        { "--set statistics.every=1", "statistics.every=1: it means nothing to trace",
          MT_EXIT_USAGE },
        { "--set train.dtype=bf16", "not from --set", MT_EXIT_USAGE },
        { "--set train.micro_batch_size=1",
          "micro_batch_size=1: without --steps the 2 sequences of --tokens are computed at once",
          MT_EXIT_USAGE },
        { "--set parallel.expert=2", "parallel.expert=2: trace runs on one rank", MT_EXIT_USAGE },
        { "--set model.num_experts=4", "it is 8 in the checkpoint", MT_EXIT_USAGE },
        { "--target", "did you mean --targets", MT_EXIT_USAGE },
    };
    make_model(false);
    make_input(false, NULL);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        unlink(in_dir("out.h5"));
        snprintf(line, sizeof line, "trace %s --tokens %s -o %s %s", in_dir("ckpt"),
                 in_dir("in.h5"), in_dir("out.h5"), cases[i].options);
        assert_verb(line, cases[i].code, cases[i].words);
        assert_false(mt_path_exists(in_dir("out.h5")));
    }
    int64_t targets[COUNT] = { [3] = V };
    make_input(false, targets);
    assert_verb(TRACE("--targets"), MT_EXIT_FILES, "targets element 3 is 29, outside [0, 29)");
    for (int i = 0; i < COUNT; i++) targets[i] = -100;
    make_input(false, targets);
    assert_verb(TRACE("--targets"), MT_EXIT_USAGE,
                "in.h5', targets: every target is ignored, all of batch 0 are -100");
    assert_verb(TRACE(""), 0, "");
    make_input(true, NULL);
    assert_verb(TRACE("--steps 3"), MT_EXIT_USAGE, "holds 4 batches");
    const int64_t longer[33] = { 0 };
    mt_h5 *file;
    assert_ok(mt_h5_create(&file, in_dir("in.h5")));
    assert_ok(mt_h5_write(file, "tokens", MT_I64, 2, (int64_t[]){ 3, 1 }, longer));
    assert_ok(mt_h5_commit(&file));
    assert_verb(TRACE("--targets"), MT_EXIT_USAGE,
                "in.h5': every target is ignored: without a dataset targets a token is to");
    assert_ok(mt_h5_create(&file, in_dir("in.h5")));
    assert_ok(mt_h5_write(file, "tokens", MT_I64, 2, (int64_t[]){ 1, 33 }, longer));
    assert_ok(mt_h5_commit(&file));
    assert_verb(TRACE(""), MT_EXIT_USAGE,
                "in.h5', tokens: sequences of 33; the model takes 1 to 32 (its max_position");
    snprintf(line, sizeof line, "trace %s --tokens %s -o %s", in_dir("none"), in_dir("in.h5"),
             in_dir("out.h5"));
    assert_verb(line, MT_EXIT_FILES, "none");
    snprintf(line, sizeof line, "trace %s --tokens %s -o %s", in_dir("ckpt"), in_dir("in.h5"),
             in_dir("in.h5"));
    assert_verb(line, MT_EXIT_USAGE, "the result needs another name");
    snprintf(line, sizeof line, "trace %s -o %s", in_dir("ckpt"), in_dir("out.h5"));
    assert_verb(line, MT_EXIT_USAGE, "--tokens IN.h5 is missing");
}

/* What is no file of tokens is called what it is, not damaged. */
static void other_files_are_called_what_they_are(void **state)
{
    (void)state;
    static const int64_t numbers[6] = { 0 };
    static const struct {
        const char *name;
        int type, ndim;
        int64_t shape[3];
        const char *words;
    } cases[] = {
        { "x", MT_F32, 2, { 2, 3 }, "has no dataset tokens: it must be i64 [B,S]" },
        { "tokens", MT_I64, 2, { 0, 3 }, "tokens: it is i64[0,3], which is empty" },
        { "tokens", MT_I64, 1, { 6 }, "tokens: it is i64[6], must be i64 [B,S], without steps" },
        { "tokens",
          MT_I64,
          3,
          { 1, 2, 3 },
          "tokens: it is i64[1,2,3], must be i64 [B,S], without" },
        { "tokens", MT_U16, 2, { 2, 3 }, "tokens: it is u16[2,3], must be i64 [B,S], without" },
    };
    make_model(false);
    snprintf(line, sizeof line, "trace %s --tokens %s -o %s", in_dir("ckpt"), in_dir("other"),
             in_dir("out.h5"));
    put_text(in_dir("other"), "");
    assert_verb(line, MT_EXIT_FILES, "other' is an empty file, not an HDF5 file with a dataset");
    put_text(in_dir("other"), "In the beginning");
    assert_verb(line, MT_EXIT_FILES, "other' is a text, not an HDF5 file with a dataset tokens");
    assert_null(strstr(verb_output, "damaged"));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mt_h5 *file;
        assert_ok(mt_h5_create(&file, in_dir("other")));
        assert_ok(mt_h5_write(file, cases[i].name, cases[i].type, cases[i].ndim, cases[i].shape,
                              numbers));
        assert_ok(mt_h5_commit(&file));
        assert_verb(line, MT_EXIT_FILES, cases[i].words);
        assert_null(strstr(verb_output, "damaged"));
    }
    mt_h5 *file;
    assert_ok(mt_h5_create(&file, in_dir("other")));
    assert_ok(mt_h5_group(file, "tokens"));
    assert_ok(mt_h5_commit(&file));
    assert_verb(line, MT_EXIT_FILES, "tokens: is not a dataset; it must be i64 [B,S]");
    assert_null(strstr(verb_output, "damaged"));
    put_text(in_dir("other"), "\211HDF\r\n"); /* what is left of one */
    assert_verb(line, MT_EXIT_FILES, "damaged");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_batch_equals_the_trainer),
        cmocka_unit_test(a_tied_gradient_is_one_sum),
        cmocka_unit_test(idle_experts_have_zero_gradients),
        cmocka_unit_test(ignored_targets_do_not_count),
        cmocka_unit_test(a_trace_stays_out_of_its_checkpoint),
        cmocka_unit_test(activations_follow_the_pattern),
        cmocka_unit_test(bf16_is_written_as_f32),
        cmocka_unit_test(gradients_are_those_of_the_run),
        cmocka_unit_test(storage_is_replaced),
        cmocka_unit_test(steps_equal_the_trainer),
        cmocka_unit_test(steps_of_a_run_over_ranks),
        cmocka_unit_test(a_recipe_holds_for_a_batch),
        cmocka_unit_test(a_refused_recipe_is_replaced),
        cmocka_unit_test(mistakes_are_refused),
        cmocka_unit_test(other_files_are_called_what_they_are),
    };
    return cmocka_run_group_tests(tests, files_setup, files_teardown);
}
