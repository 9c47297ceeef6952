/* group_quantize and group_dequantize: bytes of source, codes, scales and result over time, against
 * the copy bandwidth. A format whose scale needs the amax of a whole member reads its source twice.
 * Padded lines of columns count as they are written, zeros and all.
 */
#include "train/bench.h"

/* Activations of a dense layer, and of experts with ragged rows; weights of experts, as many rows
 * each, from masters of the dtype's wide type as their compute copies are made. */
static const struct shape {
    const char *name;
    int64_t members, rows, cols; /* rows of all members */
    unsigned devices;
    bool weights;
} shapes[] = {
    { "dense_gpu", 1, 32768, 4096, MT_BENCH_GPU, false },
    { "experts_gpu", 64, 65536, 2048, MT_BENCH_GPU, false },
    { "weights_gpu", 64, 131072, 2048, MT_BENCH_GPU, true },
    { "dense_cpu", 1, 4096, 4096, MT_BENCH_CPU, false },
    { "experts_cpu", 16, 16384, 512, MT_BENCH_CPU, false },
    { "weights_cpu", 16, 8192, 512, MT_BENCH_CPU, true },
    { "nano", 4, 96, 64, 0, false },
    { "weights_nano", 4, 1024, 384, 0, true },
};
enum { SHAPES = sizeof shapes / sizeof *shapes, MEMBERS = 64 /* at most */ };

const char *mt_bench_quantize_shape(int i)
{
    return i < SHAPES ? shapes[i].name : NULL;
}

/* Of activations; of weights, with what recipes turn on for them. */
static const char *const formats[2][11] = {
    { "fp8_tensor", "fp8_delayed", "fp8_block", "mxfp8", "mxfp4", "nvfp4", "nvfp4:sr", "nvfp4:rht",
      "nvfp4:rht+sr", "nvfp4:4over6" },
    { "fp8_tensor", "fp8_delayed", "fp8_block:2d", "mxfp8", "mxfp4", "nvfp4:2d" }
};
enum { ROTATED = 2 };

/* Columns as products of codes read them, and both directions as those of bf16 do. */
static const struct way {
    const char *name;
    bool quantizes, dir[MT_DIR_COUNT];
    mt_layout layout;
} ways[] = {
    { "quantize_row", true, { true, false }, MT_LAYOUT_COMPACT },
    { "quantize_col", true, { false, true }, MT_LAYOUT_COMPACT },
    { "quantize_both", true, { true, true }, MT_LAYOUT_COMPACT },
    { "quantize_col_padded", true, { false, true }, MT_LAYOUT_PADDED },
    { "quantize_both_padded", true, { true, true }, MT_LAYOUT_PADDED },
    { "quantize_both_decoded", true, { true, true }, MT_LAYOUT_DECODED },
    { "dequantize_row", false, { true, false }, MT_LAYOUT_COMPACT },
    { "dequantize_col", false, { false, true }, MT_LAYOUT_COMPACT },
};
enum { WAYS = sizeof ways / sizeof *ways };

struct job {
    const struct shape *shape;
    mt_dtype from;                     /* of the source */
    mt_qtensor source[ROTATED], q;     /* plain; the directions of this way */
    mt_qtensor laid[MT_LAYOUT_PACKED]; /* both, by layout; where it has no columns there is none */
    int64_t padded_rows;               /* of all members, each rounded up to its next part */
    mt_dir dir;                        /* that is dequantized */
    void *y;
};

static mt_status launch_quantize(mt_bench *b, void *context, int64_t turn)
{
    const struct job *j = context;
    return mt_quantize(&b->stream, &(struct mt_quantize_args){ .dtype = b->options.dtype,
                                                               .src = &j->source[turn % ROTATED],
                                                               .out = &j->q,
                                                               .seed = 1,
                                                               .step = (uint32_t)turn });
}

static mt_status launch_dequantize(mt_bench *b, void *context, int64_t turn)
{
    const struct job *j = context;
    (void)turn;
    return mt_dequantize(&b->stream, &(struct mt_dequantize_args){ .dtype = b->options.dtype,
                                                                   .src = &j->q,
                                                                   .dir = j->dir,
                                                                   .y = j->y,
                                                                   .y_dtype = b->options.dtype });
}

/* Whether GEMMs read weights of this format decoded. */
static mt_status is_decoded(bool *decoded, const mt_bench *b, const mt_format_spec *spec)
{
    const struct mt_kernels *k;
    mt_format_spec x = *spec;
    x.options.two_d = false;
    MT_TRY(mt_device_kernels(b->device, b->options.dtype, &k));
    *decoded = k->decoded_weights && b->options.dtype == MT_BF16 &&
               k->gemm_operand(spec) == MT_BF16 &&
               !(k->gemm_codes && k->gemm_codes(MT_GEMM_TN, spec, &x));
    return MT_OK;
}

/* The rows of all members, each rounded up as padded codes have them. */
static mt_status count_padded(mt_bench *b, int64_t *rows, const mt_group *g)
{
    int64_t count[MEMBERS];
    MT_ASSERT(g->members <= MEMBERS);
    if (g->first_dims)
        MT_TRY(mt_device_copy(b->device, count, g->first_dims, (size_t)g->members * sizeof *count));
    *rows = 0;
    for (int64_t i = 0; i < g->members; i++) {
        int64_t m = g->first_dims ? count[i] : g->m;
        *rows += (m + MT_PADDED_PART - 1) / MT_PADDED_PART * MT_PADDED_PART;
    }
    return MT_OK;
}

/* The same codes, or what they decode to, in a layout that the format and the device may have. */
static mt_status place_laid(mt_bench *b, struct job *j, mt_layout layout)
{
    const mt_group *g = &j->source[0].group;
    mt_direction *col = &j->q.dir[MT_COL];
    void *memory;
    j->q = j->laid[MT_LAYOUT_COMPACT];
    if (j->shape->weights) return MT_OK;
    if (layout == MT_LAYOUT_PADDED) {
        if (!mt_direction_pads(col, MT_COL, g)) return MT_OK;
        col->layout = layout;
        MT_TRY(count_padded(b, &j->padded_rows, g));
        MT_TRY(mt_bench_alloc(b, &col->codes, mt_direction_code_bytes(col, MT_COL, g)));
    } else {
        for (int d = 0; d < MT_DIR_COUNT; d++) j->q.dir[d].layout = layout;
        MT_TRY(mt_bench_alloc(b, &memory, mt_qtensor_bytes(&j->q)));
        mt_qtensor_place(&j->q, memory);
    }
    mt_status status = launch_quantize(b, j, 0);
    if (status == MT_OK) j->laid[layout] = j->q;
    if (status != MT_EUNSUPPORTED) return status;
    mt_error_clear();
    return MT_OK;
}

/* Both directions of a format; rht concerns columns, their rows do without. */
static mt_status place(mt_bench *b, struct job *j, const char *format)
{
    mt_format_spec spec;
    void *memory;
    bool decoded = false;
    MT_TRY(mt_format_spec_parse(&spec, format));
    if (j->shape->weights) MT_TRY(is_decoded(&decoded, b, &spec));
    j->q = (mt_qtensor){ .group = j->source[0].group };
    j->q.dir[MT_ROW] = mt_direction_of(spec);
    if (decoded) j->q.dir[MT_ROW].layout = MT_LAYOUT_DECODED;
    j->q.dir[MT_COL] = j->q.dir[MT_ROW];
    j->q.dir[MT_ROW].options.rht = false, j->q.dir[MT_ROW].options.rht_mask = 0;
    MT_TRY(mt_bench_alloc(b, &memory, mt_qtensor_bytes(&j->q)));
    mt_qtensor_place(&j->q, memory);
    j->laid[MT_LAYOUT_COMPACT] = j->q; /* as they are kept: weights may be decoded */
    MT_TRY(place_laid(b, j, MT_LAYOUT_PADDED));
    MT_TRY(place_laid(b, j, MT_LAYOUT_DECODED));
    j->q = j->laid[MT_LAYOUT_COMPACT];
    return launch_quantize(b, j, 0);
}

static double way_bytes(const struct job *j, const struct way *w)
{
    const mt_qtensor *q = &j->laid[w->layout];
    const mt_group *g = &q->group;
    double plain = (double)mt_group_capacity(g) * (double)mt_dtype_size(j->from);
    double bytes = 0;
    bool amax = false;
    for (int d = 0; d < MT_DIR_COUNT; d++) {
        const mt_direction *dir = &q->dir[d];
        bool twin = d && w->dir[MT_ROW] && dir->codes == q->dir[MT_ROW].codes;
        if (!w->dir[d] || twin) continue;
        bytes += dir->layout == MT_LAYOUT_PADDED
                     ? (double)(j->padded_rows * g->k)
                     : (double)mt_direction_code_bytes(dir, (mt_dir)d, g);
        bytes += (double)mt_direction_scale_bytes(dir, (mt_dir)d, g);
        amax |= mt_format_needs_amax(dir->format);
    }
    return bytes + plain * (w->quantizes && amax ? 2 : 1);
}

static mt_status bench_way(mt_bench *b, struct job *j, const struct way *w, mt_bench_case *c)
{
    double seconds, bytes = way_bytes(j, w);
    j->q = j->laid[w->layout];
    for (int d = 0; d < MT_DIR_COUNT; d++)
        if (!w->dir[d]) j->q.dir[d] = (mt_direction){ 0 };
    j->dir = w->dir[MT_ROW] ? MT_ROW : MT_COL;
    MT_TRY(mt_bench_measure(b, &seconds, w->quantizes ? launch_quantize : launch_dequantize, j));
    c->what = w->name, c->amount = bytes * 1e-9, c->floor = mt_bench_floor(b, 0, bytes);
    return mt_bench_report(b, c, seconds);
}

static mt_status bench_format(mt_bench *b, const struct shape *s, const char *format)
{
    struct job j = { .shape = s,
                     .from = s->weights ? mt_dtype_wide(b->options.dtype) : b->options.dtype };
    mt_bench_case c = { "quantize", s->name, "all", format, "GB/s", 0, 0, { { NULL, 0 } } };
    int64_t count = s->rows * s->cols;
    mt_group group = mt_group_uniform(s->members, s->rows / s->members, s->cols);
    mt_status status = MT_OK;
    void *x;
    if (s->members > 1 && !s->weights)
        MT_TRY_CLEANUP(mt_bench_rows(b, &group, s->members, s->rows, s->cols));
    for (int i = 0; i < ROTATED; i++) {
        MT_TRY_CLEANUP(mt_bench_random(b, &x, count, j.from, 1));
        j.source[i] = mt_qtensor_plain(group, j.from, x);
    }
    if (!s->weights)
        MT_TRY_CLEANUP(mt_bench_alloc(b, &j.y, (size_t)count * mt_dtype_size(b->options.dtype)));
    MT_TRY_CLEANUP(place(b, &j, format));
    for (int w = 0; w < WAYS; w++) {
        if (!j.laid[ways[w].layout].dir[MT_COL].format) continue;
        if (ways[w].quantizes || !s->weights) MT_TRY_CLEANUP(bench_way(b, &j, &ways[w], &c));
    }
cleanup:
    if (status != MT_OK) status = mt_bench_give_up(b, &c, status);
    mt_bench_release(b);
    return status;
}

struct copy {
    void *to, *from[ROTATED];
    size_t bytes;
};

static mt_status launch_copy(mt_bench *b, void *context, int64_t turn)
{
    const struct copy *c = context;
    return mt_device_copy_async(&b->stream, c->to, c->from[turn % ROTATED], c->bytes);
}

/* What a copy of the source takes: launches and caches full of others' bytes cost it, too. */
static mt_status bench_copy(mt_bench *b, const struct shape *s)
{
    mt_dtype from = s->weights ? mt_dtype_wide(b->options.dtype) : b->options.dtype;
    struct copy copy = { .bytes = (size_t)(s->rows * s->cols) * mt_dtype_size(from) };
    mt_bench_case c = { "quantize", s->name, "copy", NULL, "GB/s", 0, 0, { { NULL, 0 } } };
    mt_status status = MT_OK;
    double seconds, bytes = 2 * (double)copy.bytes;
    for (int i = 0; i < ROTATED; i++)
        MT_TRY_CLEANUP(mt_bench_random(b, &copy.from[i], s->rows * s->cols, from, 1));
    MT_TRY_CLEANUP(mt_bench_alloc(b, &copy.to, copy.bytes));
    MT_TRY_CLEANUP(mt_bench_measure(b, &seconds, launch_copy, &copy));
    c.amount = bytes * 1e-9, c.floor = mt_bench_floor(b, 0, bytes);
    MT_TRY_CLEANUP(mt_bench_report(b, &c, seconds));
cleanup:
    if (status != MT_OK) status = mt_bench_give_up(b, &c, status);
    mt_bench_release(b);
    return status;
}

mt_status mt_bench_quantize(mt_bench *b)
{
    for (int i = 0; i < SHAPES; i++) {
        if (!mt_bench_selected(b, shapes[i].name, shapes[i].devices)) continue;
        MT_TRY(bench_copy(b, &shapes[i]));
        for (const char *const *format = formats[shapes[i].weights]; *format; format++)
            MT_TRY(bench_format(b, &shapes[i], *format));
    }
    return MT_OK;
}
