/* moe_gemm on a GPU: one kernel against its parts in turn, at the layers of `mixtape bench moe`.
 *
 * Usage: bench_moe_gemm_cuda [LAYER], layers with LAYER in their names. The results are compared
 * bit for bit; times are medians of single launches between events, L2 flushed before each, all
 * taking turns: the op as chosen, its parts, their product alone, the one kernel by every variant.
 * Needs a build with CUDA=1. */
#include "tests/bench/gemm_cuda.h"

#include "kernels/cuda/moe_gemm_path.h"

static const struct layer {
    const char *name;
    int64_t tokens, d, f, experts, top_k;
} layers[] = {
    { "Mixtral", 8192, 4096, 14336, 8, 2 },   { "OLMoE", 8192, 2048, 1024, 64, 8 },
    { "Qwen3-30B", 8192, 2048, 768, 128, 8 }, { "DSv3", 8192, 7168, 2048, 256, 8 },
    { "Sonic-7B", 24576, 1536, 256, 128, 8 }, { "Sonic-30B", 32768, 4096, 1024, 64, 4 },
    { "larger", 4096, 512, 512, 16, 2 },      { "odd", 1000, 264, 192, 9, 3 },
};

static const char *const op_names[MT_GEMM_LAYOUT_COUNT] = { "gate_up", "down dgrad", "wgrad" };

/* bf16 in [-scale, scale): a block of odd length again and again. */
static void *random_bf16(int64_t count, float scale, uint64_t seed)
{
    enum { BLOCK = (1 << 19) - 4099 };
    size_t bytes = (size_t)count * 2, block_bytes = BLOCK * 2;
    uint16_t *block = malloc(block_bytes);
    assert_non_null(block);
    for (int64_t i = 0; i < BLOCK; i++)
        block[i] = mt_f32_to_bf16(scale * (float)(2 * mt_rng_uniform(seed, 0, (uint64_t)i) - 1));
    char *p = device_buffer(bytes);
    for (size_t at = 0; at < bytes; at = at ? 2 * at : block_bytes) {
        size_t n = at ? at : block_bytes;
        if (n > bytes - at) n = bytes - at;
        CUDA_OK(cudaMemcpy(p + at, at ? p : (char *)block, n, cudaMemcpyDefault));
    }
    free(block);
    return p;
}

/* Each row's token, drawn. */
static int32_t *random_tokens(int64_t rows, int64_t tokens)
{
    int32_t *of = malloc((size_t)rows * sizeof *of);
    assert_non_null(of);
    for (int64_t i = 0; i < rows; i++)
        of[i] = (int32_t)(mt_rng_uniform(6, 6, (uint64_t)i) * (double)tokens);
    int32_t *p = upload(of, (size_t)rows * sizeof *of);
    free(of);
    return p;
}

/* One op of a layer; results [0] of one kernel, [1] of the parts. */
struct op {
    mt_gemm_layout layout;
    size_t bytes, act_bytes; /* of the results */
    mt_qtensor a, b;
    void *memory[3], *d[2], *act[2], *scratch;
    struct mt_moe_gemm_args args;
};

static void make_op(struct op *o, const struct layer *l, mt_gemm_layout layout,
                    const struct rows *r, const int32_t *row_token, const int64_t *used)
{
    bool tn = layout == MT_GEMM_TN, nn = layout == MT_GEMM_NN, nt = layout == MT_GEMM_NT;
    int64_t rows = r->total, n = 2 * l->f;
    mt_group of_x = mt_group_ragged_rows(r->members, rows, l->d, r->first_dims, r->offsets_k);
    mt_group of_z = mt_group_ragged_rows(r->members, rows, n, r->first_dims, r->offsets_n);
    void *x = o->memory[0] = random_bf16((nn ? rows : l->tokens) * l->d, 1, 1);
    void *w = o->memory[1] = nt ? NULL : random_bf16(r->members * n * l->d, 0.05f, 2);
    void *z = o->memory[2] = tn ? NULL : random_bf16(rows * n, 2, 3);
    o->layout = layout;
    o->bytes = nt ? (size_t)(r->members * n * l->d) * 4 : (size_t)(rows * n) * 2;
    o->act_bytes = tn ? (size_t)(rows * l->f) * 2 : 0;
    mt_group weight =
        tn ? mt_group_uniform(r->members, n, l->d) : mt_group_uniform(r->members, l->d, l->f);
    o->a = nt ? mt_qtensor_plain(of_x, MT_BF16, x) : mt_qtensor_plain(weight, MT_BF16, w);
    o->b = nt ? mt_qtensor_plain(of_z, MT_BF16, z) : mt_qtensor_plain(of_x, MT_BF16, x);
    for (int i = 0; i < 2; i++) {
        o->d[i] = device_buffer(o->bytes);
        o->act[i] = tn ? device_buffer(o->act_bytes) : NULL;
    }
    o->scratch = device_buffer((size_t)(rows * (nn ? l->f : l->d)) * 2);
    o->args = (struct mt_moe_gemm_args){
        .dtype = MT_BF16,
        .gemm = { .dtype = MT_BF16,
                  .layout = layout,
                  .a = &o->a,
                  .b = &o->b,
                  .d_dtype = nt ? MT_F32 : MT_BF16 },
        .row_token = nn ? NULL : row_token,
        .tokens = l->tokens,
        .rows_used = used,
        .z = nn ? z : NULL,
    };
}

static void free_op(struct op *o)
{
    for (int i = 0; i < 3; i++) device_free(o->memory[i]);
    for (int i = 0; i < 2; i++) device_free(o->d[i]), device_free(o->act[i]);
    device_free(o->scratch);
}

/* What is timed: the op by the variants from 0 on, eight pieces of rows together, ping-pong with a
 * piece at a time, and these. */
enum { PIECE_BY_PIECE = MT_CUDA_GEMM_VARIANTS, CHOSEN, PARTS, PRODUCT, WAYS };

/* The product that the parts have, of the rows that they gathered. */
static mt_status run_product(const struct op *o, struct mt_moe_gemm_args args)
{
    mt_qtensor rows = o->layout == MT_GEMM_NT ? o->a : o->b;
    if (o->layout != MT_GEMM_NN) rows = mt_qtensor_plain(rows.group, MT_BF16, o->scratch);
    *(o->layout == MT_GEMM_NT ? &args.gemm.a : &args.gemm.b) = &rows;
    if (o->layout == MT_GEMM_NN) args.gemm.d = o->scratch;
    return mt_gemm(&stream, &args.gemm);
}

static mt_status run_way(struct op *o, int way)
{
    struct mt_moe_gemm_args args = o->args;
    mt_cuda_gemm_path path = { .variant = way, .width = 192, .super = 8 };
    if (way == PIECE_BY_PIECE) path.variant = MT_CUDA_GEMM_PINGPONG, path.super = 1;
    args.gemm.d = o->d[way == PARTS], args.act = o->act[way == PARTS], args.scratch = o->scratch;
    if (way == PARTS) return mt_moe_gemm_parts(&stream, &args);
    if (way == PRODUCT) return run_product(o, args);
    return way == CHOSEN ? mt_moe_gemm(&stream, &args) : mt_cuda_moe_gemm_by(&stream, &args, &path);
}

/* Negative: there is no such way. */
static double run(struct op *o, int way, void *flush, cudaEvent_t begin, cudaEvent_t end)
{
    float ms;
    CUDA_OK(cudaMemsetAsync(flush, 0, FLUSH, queue));
    CUDA_OK(cudaEventRecord(begin, queue));
    if (run_way(o, way) != MT_OK) return -1;
    CUDA_OK(cudaEventRecord(end, queue));
    CUDA_OK(cudaEventSynchronize(end));
    CUDA_OK(cudaEventElapsedTime(&ms, begin, end));
    return (double)ms;
}

/* The first quarter of a gigabyte. */
static void expect_same(const char *what, const void *a, const void *b, size_t bytes)
{
    if (bytes > (size_t)1 << 28) bytes = (size_t)1 << 28;
    char *x = malloc(bytes), *y = malloc(bytes);
    assert_true(x && y);
    CUDA_OK(cudaMemcpy(x, a, bytes, cudaMemcpyDefault));
    CUDA_OK(cudaMemcpy(y, b, bytes, cudaMemcpyDefault));
    for (size_t i = 0; i < bytes; i++)
        if (x[i] != y[i]) fail_msg("%s: byte %zu of %zu differs", what, i, bytes);
    free(x), free(y);
}

static void time_op(const struct layer *l, mt_gemm_layout layout, const struct rows *r,
                    const int32_t *row_token, const int64_t *used)
{
    struct op o;
    double ms[WAYS][LAUNCHES], median[WAYS];
    char text[MT_CUDA_MOE_GEMM_TEXT];
    mt_cuda_gemm_path path;
    cudaEvent_t begin, end;
    void *flush = device_buffer(FLUSH);
    CUDA_OK(cudaEventCreate(&begin));
    CUDA_OK(cudaEventCreate(&end));
    make_op(&o, l, layout, r, row_token, used);
    struct mt_moe_gemm_args args = o.args;
    args.gemm.d = o.d[0], args.act = o.act[0];
    bool fused = mt_cuda_moe_gemm_choose(&stream, &args, &path);
    if (!fused) assert_ok(mt_cuda_gemm_choose(&stream, &args.gemm, &path));
    mt_cuda_moe_gemm_print(text, &args, &path, fused);
    for (int i = -2; i < LAUNCHES; i++)
        for (int way = 0; way < WAYS; way++) {
            double t = run(&o, way, flush, begin, end);
            if (i >= 0) ms[way][i] = t;
            if (i == -1 && way == PARTS) {
                expect_same(op_names[layout], o.d[0], o.d[1], o.bytes);
                if (o.act_bytes) expect_same("act", o.act[0], o.act[1], o.act_bytes);
            }
        }
    for (int way = 0; way < WAYS; way++) {
        qsort(ms[way], LAUNCHES, sizeof(double), by_value);
        median[way] = ms[way][LAUNCHES / 2];
    }
    double products = (double)r->total * (double)l->d * (double)l->f;
    double gflop = (layout == MT_GEMM_NN ? 2 : 4) * products / 1e9;
    printf("%-10s %-10s one %7.3f ms %4.0f TFLOP/s  parts %7.3f ms %4.0f  ratio %.3f  %s;"
           " product alone %.3f ms; pairs, alone, ping-pong, piece by piece:",
           l->name, op_names[layout], median[CHOSEN], gflop / median[CHOSEN], median[PARTS],
           gflop / median[PARTS], median[PARTS] / median[CHOSEN], text, median[PRODUCT]);
    for (int way = 0; way < CHOSEN; way++) printf(" %.3f", median[way]);
    printf("\n");
    fflush(stdout);
    free_op(&o);
    device_free(flush);
    CUDA_OK(cudaEventDestroy(begin));
    CUDA_OK(cudaEventDestroy(end));
}

static void time_layer(const struct layer *l)
{
    struct rows r;
    struct timed_shape shape = { l->name, l->experts, l->d, 2 * l->f, l->tokens * l->top_k };
    draw_rows(&r, &shape);
    int32_t *row_token = random_tokens(r.total, l->tokens);
    int64_t *used = upload(&r.total, sizeof r.total);
    for (int layout = 0; layout < MT_GEMM_LAYOUT_COUNT; layout++)
        time_op(l, (mt_gemm_layout)layout, &r, row_token, used);
    device_free(row_token), device_free(used);
    free_rows(&r);
}

static const char *wanted = "";

static void time_layers(void **state)
{
    (void)state;
    open_gpu();
    for (size_t i = 0; i < sizeof layers / sizeof *layers; i++)
        if (strstr(layers[i].name, wanted)) time_layer(&layers[i]);
    close_gpu();
}

int main(int argc, char **argv)
{
    if (argc > 1) wanted = argv[1];
    const struct CMUnitTest tests[] = { cmocka_unit_test(time_layers) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
