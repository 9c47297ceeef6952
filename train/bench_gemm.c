/* The grouped GEMM, as layers call it: weights in their compute copy, operands in the formats of a
 * recipe, quantized beforehand. */
#include "train/bench.h"

#include "layers/functional.h"

enum { ROTATED = 2 };

/* Of MoE layers of known models: E, K, N, R; a single member is a dense weight. */
static const struct shape {
    const char *name;
    int64_t members, k, n, rows;
    unsigned devices;
} shapes[] = {
    { "mixtral_gate_up", 8, 4096, 28672, 16448, MT_BENCH_GPU },
    { "mixtral_down", 8, 14336, 4096, 16448, MT_BENCH_GPU },
    { "olmoe_gate_up", 64, 2048, 2048, 66016, MT_BENCH_GPU },
    { "olmoe_down", 64, 1024, 2048, 66016, MT_BENCH_GPU },
    { "qwen3_gate_up", 128, 2048, 1536, 66464, MT_BENCH_GPU },
    { "qwen3_down", 128, 768, 2048, 66464, MT_BENCH_GPU },
    { "dsv3_gate_up", 256, 7168, 4096, 67360, MT_BENCH_GPU },
    { "dsv3_down", 256, 2048, 7168, 67360, MT_BENCH_GPU },
    { "fine7b_gate_up", 128, 1536, 512, 197488, MT_BENCH_GPU },
    { "fine7b_down", 128, 256, 1536, 197488, MT_BENCH_GPU },
    { "small_gate_up", 16, 512, 1024, 16496, MT_BENCH_CPU | MT_BENCH_GPU },
    { "small_down", 16, 512, 512, 16496, MT_BENCH_CPU | MT_BENCH_GPU },
    { "tiny_gate_up", 8, 128, 256, 1024, MT_BENCH_CPU },
    { "tiny_down", 8, 128, 128, 1024, MT_BENCH_CPU },
    { "dense_8192", 1, 8192, 8192, 8192, 0 },
    { "dense_attention", 1, 2048, 6144, 16384, 0 },
    { "dense_head", 1, 2048, 50304, 8192, 0 },
    { "dense_head_odd", 1, 2048, 50257, 8192, 0 },
    { "nano_gate_up", 4, 32, 64, 96, 0 },
    { "nano_down", 4, 32, 32, 96, 0 },
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

const char *mt_bench_gemm_shape(int i)
{
    return i < SHAPES ? shapes[i].name : NULL;
}

static const struct pass {
    const char *name;
    mt_gemm_layout layout;
    bool add;  /* to what the result holds already */
    bool bf16; /* wgrad: the result; only where that is the dtype */
} passes[] = {
    { "fprop", MT_GEMM_TN, false, false },     { "dgrad", MT_GEMM_NN, false, false },
    { "wgrad", MT_GEMM_NT, false, false },     { "wgrad_add", MT_GEMM_NT, true, false },
    { "wgrad_bf16", MT_GEMM_NT, false, true }, { "wgrad_bf16_add", MT_GEMM_NT, true, true },
};

struct job {
    const struct shape *shape;
    mt_param_store *store;
    mt_linear_state state;
    mt_param *weight;
    mt_qtensor x[ROTATED], dy[ROTATED];
    void *out;
    mt_dtype real;
    const struct pass *pass;
};

static struct mt_gemm_args arguments(const mt_bench *b, const struct job *j, int64_t turn)
{
    const struct pass *p = j->pass;
    const mt_qtensor *x = &j->x[turn % ROTATED], *dy = &j->dy[turn % ROTATED];
    bool wgrad = p->layout == MT_GEMM_NT;
    return (struct mt_gemm_args){ .dtype = b->options.dtype,
                                  .layout = p->layout,
                                  .a = wgrad ? x : &j->weight->weight,
                                  .b = p->layout == MT_GEMM_TN ? x : dy,
                                  .d = j->out,
                                  .d_dtype = wgrad && !p->bf16 ? j->real : b->options.dtype,
                                  .c = p->add ? j->out : NULL };
}

static mt_status launch(mt_bench *b, void *context, int64_t turn)
{
    struct mt_gemm_args args = arguments(b, context, turn);
    return mt_gemm(&b->stream, &args);
}

/* ---- operands ----------------------------------------------------------------------------------
 */

/* The weight's compute copy under the recipe, from random masters. */
static mt_status make_weight(mt_bench *b, struct job *j, bool plain)
{
    const struct shape *s = j->shape;
    const mt_recipe *recipe = plain ? NULL : &j->state.recipe;
    mt_param_spec spec = {
        .name = "w", .members = s->members, .m = s->n, .k = s->k, .packed = true
    };
    MT_TRY(mt_param_store_create(&j->store, b->device, j->real, b->options.dtype));
    MT_TRY(mt_param_store_add(j->store, &j->weight, &spec));
    MT_TRY(mt_linear_reserve(j->weight, b->device, recipe));
    MT_TRY(mt_param_store_allocate(j->store, false));
    j->weight->linear = plain ? NULL : &j->state;
    MT_TRY(mt_linear_place(j->weight, b->device));
    MT_TRY(mt_bench_fill(b, j->weight->master, mt_param_count(j->weight), j->real, 0.02));
    return mt_linear_refresh(j->weight, &b->stream);
}

/* Directions in a format of their own are quantized; the others are the plain values. */
static mt_status make_operand(mt_bench *b, mt_qtensor *q, const struct job *j, bool plain,
                              mt_operand operand, mt_group group)
{
    mt_dtype dtype = b->options.dtype;
    void *values, *memory;
    mt_qtensor codes = { .group = group };
    MT_TRY(mt_bench_random(b, &values, group.m * group.k, dtype, 0.2));
    *q = mt_qtensor_plain(group, dtype, values);
    if (plain) return MT_OK;
    for (int d = 0; d < MT_DIR_COUNT; d++) {
        mt_format_spec spec = *mt_recipe_direction(&j->state.recipe, operand, (mt_dir)d);
        if (spec.format != mt_format_plain(dtype)) codes.dir[d] = mt_direction_of(spec);
    }
    MT_TRY(mt_bench_alloc(b, &memory, mt_qtensor_bytes(&codes)));
    mt_qtensor_place(&codes, memory);
    mt_qtensor source = *q;
    for (int d = 0; d < MT_DIR_COUNT; d++)
        if (codes.dir[d].format) q->dir[d] = codes.dir[d];
    if (!codes.dir[MT_ROW].format && !codes.dir[MT_COL].format) return MT_OK;
    return mt_quantize(&b->stream, &(struct mt_quantize_args){
                                       .dtype = dtype, .src = &source, .out = &codes, .seed = 1 });
}

static mt_status make_rows(mt_bench *b, mt_group *group, const struct shape *s, int64_t width)
{
    *group = mt_group_uniform(1, s->rows, width);
    return s->members == 1 ? MT_OK : mt_bench_rows(b, group, s->members, s->rows, width);
}

static mt_status make(mt_bench *b, struct job *j, bool plain)
{
    const struct shape *s = j->shape;
    int64_t rows = s->rows * (s->n > s->k ? s->n : s->k), weight = s->members * s->n * s->k;
    size_t size = mt_dtype_size(b->options.dtype);
    size_t bytes = (size_t)rows * size, wide = (size_t)weight * mt_dtype_size(j->real);
    mt_group in, out;
    MT_TRY(make_weight(b, j, plain));
    MT_TRY(make_rows(b, &in, s, s->k));
    MT_TRY(make_rows(b, &out, s, s->n));
    for (int i = 0; i < ROTATED; i++) {
        MT_TRY(make_operand(b, &j->x[i], j, plain, MT_OPERAND_X, in));
        MT_TRY(make_operand(b, &j->dy[i], j, plain, MT_OPERAND_DY, out));
    }
    MT_TRY(mt_bench_alloc(b, &j->out, bytes > wide ? bytes : wide));
    return mt_device_zero(b->device, j->out, bytes > wide ? bytes : wide);
}

/* ---- reports -----------------------------------------------------------------------------------
 */

static double operand_bytes(const mt_direction *d, mt_dir dir, const mt_group *group)
{
    mt_direction compact = *d;
    compact.layout = MT_LAYOUT_COMPACT;
    return (double)(mt_direction_code_bytes(&compact, dir, group) +
                    mt_direction_scale_bytes(&compact, dir, group));
}

/* Operands read, result written, and read where it is added to. */
static double pass_bytes(const mt_bench *b, const struct job *j)
{
    const struct shape *s = j->shape;
    struct mt_gemm_args args = arguments(b, j, 0);
    bool wgrad = args.layout == MT_GEMM_NT;
    mt_dir of_a = args.layout == MT_GEMM_TN ? MT_ROW : MT_COL, of_b = wgrad ? MT_COL : MT_ROW;
    int64_t count = wgrad                       ? s->members * s->n * s->k
                    : args.layout == MT_GEMM_TN ? s->rows * s->n
                                                : s->rows * s->k;
    double result = (double)count * (double)mt_dtype_size(args.d_dtype);
    return operand_bytes(&args.a->dir[of_a], of_a, &args.a->group) +
           operand_bytes(&args.b->dir[of_b], of_b, &args.b->group) +
           result * (j->pass->add ? 2 : 1);
}

/* Times the pass with the kernel set in use. */
static mt_status bench_pass(mt_bench *b, mt_bench_case *c, struct job *j, double flop)
{
    char path[MT_GEMM_TEXT];
    const struct mt_kernels *kernels;
    struct mt_gemm_args args = arguments(b, j, 0);
    double seconds;
    MT_TRY(mt_device_kernels(b->device, b->options.dtype, &kernels));
    if (kernels->gemm_chosen) MT_TRY(kernels->gemm_chosen(path, &b->stream, &args));
    MT_TRY(mt_bench_measure(b, &seconds, launch, j));
    b->path = kernels->gemm_chosen ? path : NULL;
    c->amount = flop * 1e-12, c->floor = mt_bench_floor(b, flop, pass_bytes(b, j));
    mt_status status = mt_bench_report(b, c, seconds);
    b->path = NULL;
    return status;
}

static mt_status bench_shape(mt_bench *b, const struct shape *s, const char *recipe)
{
    struct job j = { .shape = s, .real = mt_dtype_wide(b->options.dtype) };
    mt_bench_case c = { "gemm", s->name, "", recipe, "TFLOP/s", 0, 0, { { NULL, 0 } } };
    double flop = 2 * (double)s->rows * (double)s->n * (double)s->k;
    bool plain;
    mt_status status;
    MT_TRY(mt_bench_recipe(recipe, &j.state.recipe, &plain));
    MT_TRY_CLEANUP(make(b, &j, plain));
    for (size_t i = 0; i < sizeof passes / sizeof *passes; i++) {
        if (passes[i].bf16 && b->options.dtype != MT_BF16) continue;
        j.pass = &passes[i], c.what = passes[i].name;
        for (int k = 0; k < b->set_count; k++) {
            mt_bench_use(b, k);
            MT_TRY_CLEANUP(bench_pass(b, &c, &j, flop));
        }
    }
cleanup:
    mt_bench_use(b, 0);
    mt_param_store_destroy(&j.store);
    if (status != MT_OK) status = mt_bench_give_up(b, &c, status);
    mt_bench_release(b);
    return status;
}

mt_status mt_bench_gemm(mt_bench *b)
{
    for (int i = 0; i < SHAPES; i++)
        for (int r = 0; r < b->options.recipe_count; r++)
            if (mt_bench_selected(b, shapes[i].name, shapes[i].devices))
                MT_TRY(bench_shape(b, &shapes[i], b->options.recipes[r]));
    return MT_OK;
}
