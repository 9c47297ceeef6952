/* What the benchmark holds times against: the rates of a copy and of a dense product. */
#include "train/bench.h"

struct copy {
    void *to, *from;
    size_t bytes;
};

static mt_status launch_copy(mt_bench *b, void *context, int64_t turn)
{
    const struct copy *c = context;
    return turn % 2 ? mt_device_copy_async(&b->stream, c->from, c->to, c->bytes)
                    : mt_device_copy_async(&b->stream, c->to, c->from, c->bytes);
}

static mt_status launch_cast(mt_bench *b, void *context, int64_t turn)
{
    const struct copy *c = context;
    return mt_cast(&b->stream, &(struct mt_cast_args){ .dtype = MT_F32,
                                                       .count = (int64_t)(c->bytes / 4),
                                                       .y = turn % 2 ? c->from : c->to,
                                                       .x = turn % 2 ? c->to : c->from,
                                                       .x_dtype = MT_F32 });
}

mt_status mt_bench_measure_copy(mt_bench *b, size_t bytes)
{
    static const mt_bench_launch ways[] = { launch_copy, launch_cast };
    struct copy c = { .bytes = bytes };
    mt_status status = MT_OK;
    MT_TRY_CLEANUP(mt_bench_random(b, &c.from, (int64_t)(c.bytes / 4), MT_F32, 1));
    MT_TRY_CLEANUP(mt_bench_alloc(b, &c.to, c.bytes));
    for (int i = 0; i < 2; i++) {
        double seconds;
        MT_TRY_CLEANUP(mt_bench_measure(b, &seconds, ways[i], &c));
        double rate = 2 * (double)c.bytes / seconds;
        if (rate > b->bandwidth) b->bandwidth = rate;
    }
cleanup:
    mt_bench_release(b);
    return status;
}

/* y = x W^T, all of n x n; W packed as a layer's is. */
struct dense {
    struct mt_gemm_args args;
    mt_qtensor w, x[2];
};

static mt_status launch_dense(mt_bench *b, void *context, int64_t turn)
{
    struct dense *d = context;
    d->args.b = &d->x[turn % 2];
    return mt_gemm(&b->stream, &d->args);
}

mt_status mt_bench_measure_dense(mt_bench *b, int64_t n)
{
    mt_dtype dtype = b->options.dtype, real = mt_dtype_wide(dtype);
    const struct mt_kernels *kernels;
    struct dense d = { .args = { .dtype = dtype, .layout = MT_GEMM_TN, .d_dtype = dtype } };
    mt_group square = mt_group_uniform(1, n, n);
    mt_status status = MT_OK;
    void *master, *packed, *x;
    double seconds;
    MT_TRY_CLEANUP(mt_device_kernels(b->device, dtype, &kernels));
    MT_TRY_CLEANUP(mt_bench_random(b, &master, n * n, real, 0.02));
    MT_TRY_CLEANUP(mt_bench_alloc(b, &packed, kernels->packed_bytes(dtype, MT_ROW, 1, n, n)));
    d.w = mt_qtensor_plain(square, dtype, packed);
    d.w = mt_qtensor_select(&d.w, MT_ROW);
    d.w.dir[MT_ROW].layout = MT_LAYOUT_PACKED;
    MT_TRY_CLEANUP(mt_pack_weight(&b->stream, &(struct mt_pack_weight_args){
                                                  .dtype = dtype, .master = master, .out = &d.w }));
    for (int i = 0; i < 2; i++) {
        MT_TRY_CLEANUP(mt_bench_random(b, &x, n * n, dtype, 0.2));
        d.x[i] = mt_qtensor_plain(square, dtype, x);
    }
    d.args.a = &d.w;
    MT_TRY_CLEANUP(mt_bench_alloc(b, &d.args.d, (size_t)(n * n) * mt_dtype_size(dtype)));
    MT_TRY_CLEANUP(mt_bench_measure(b, &seconds, launch_dense, &d));
    b->peak = 2 * (double)n * (double)n * (double)n / seconds;
cleanup:
    mt_bench_release(b);
    return status;
}
