/* GroupedLinear: N linear layers as one, the rows of each member contiguous. */
#include "layers/functional.h"

mt_status mt_linear_reserve(mt_param *weight, const mt_device *device)
{
    const struct mt_kernels *kernels;
    MT_TRY(mt_device_kernels(device, weight->compute, &kernels));
    for (int d = 0; d < MT_DIR_COUNT; d++)
        mt_param_set_compute(weight, (mt_dir)d, mt_format_plain(weight->compute), MT_LAYOUT_PACKED,
                             kernels->packed_bytes(weight->compute, (mt_dir)d,
                                                   weight->group.members, weight->group.m,
                                                   weight->group.k));
    return MT_OK;
}

mt_status mt_linear_refresh(mt_param *weight, mt_stream *stream)
{
    return mt_pack_weight(stream, &(struct mt_pack_weight_args){ .dtype = weight->compute,
                                                                 .master = weight->master,
                                                                 .out = &weight->weight });
}

struct linear_attrs {
    int64_t members;       /* N */
    int64_t in, out;       /* K and N of the GEMM */
    int64_t in_at, out_at; /* where these widths stand among the element offsets; -1: dense */
    bool bias;
};

static int64_t width_index(const mt_ragged *rows, int64_t width)
{
    for (int64_t i = 0; i < MT_ROUTE_WIDTHS; i++)
        if (rows->widths[i] == width) return i;
    return -1;
}

/* The group that a matrix of `rows` rows and `width` columns is. */
static mt_group group_of(const struct linear_attrs *a, int64_t rows, int64_t width, int64_t at,
                         const mt_tensor *counts, const mt_tensor *elements)
{
    if (at < 0) return mt_group_uniform(1, rows, width);
    const int64_t *offsets = (const int64_t *)elements->data + at * (a->members + 1);
    return mt_group_ragged_rows(a->members, rows, width, counts->data, offsets);
}

static mt_status check(const mt_value *x, const mt_grouped_linear_layer *layer,
                       const mt_ragged *rows, const struct linear_attrs *a)
{
    const char *name = layer->weight->name;
    MT_REQUIRE(mt_tensor_cols(&x->data) == a->in, MT_EINVAL,
               "grouped_linear %s: x has %lld columns, the weight takes %lld", name,
               (long long)mt_tensor_cols(&x->data), (long long)a->in);
    MT_REQUIRE(rows || a->members == 1, MT_EINVAL,
               "grouped_linear %s: %lld members need the rows of each", name,
               (long long)a->members);
    MT_REQUIRE(!rows || (a->in_at >= 0 && a->out_at >= 0), MT_EINVAL,
               "grouped_linear %s: the route plan has no offsets for widths %lld and %lld", name,
               (long long)a->in, (long long)a->out);
    MT_REQUIRE(!rows || rows->members == a->members, MT_EINVAL,
               "grouped_linear %s: rows of %lld members for a weight of %lld", name,
               (long long)(rows ? rows->members : 0), (long long)a->members);
    return MT_OK;
}

mt_status mt_grouped_linear(mt_tape *tape, mt_value **y, mt_value *x,
                            const mt_grouped_linear_layer *layer, const mt_ragged *rows)
{
    mt_param *w = layer->weight;
    struct linear_attrs a = {
        w->group.members, w->group.k, w->group.m, -1, -1, layer->bias != NULL
    };
    if (rows) a.in_at = width_index(rows, a.in), a.out_at = width_index(rows, a.out);
    MT_TRY(check(x, layer, rows, &a));
    int64_t count = mt_tensor_rows(&x->data);
    mt_dtype dtype = x->data.dtype;
    MT_TRY(mt_tape_value(tape, y, dtype, 2, (int64_t[]){ count, a.out }));
    mt_qtensor qx =
        mt_qtensor_plain(group_of(&a, count, a.in, a.in_at, rows ? &rows->counts->data : NULL,
                                  rows ? &rows->elements->data : NULL),
                         dtype, x->data.data);
    MT_TRY(mt_gemm(mt_tape_stream(tape),
                   &(struct mt_gemm_args){ .dtype = dtype,
                                           .layout = MT_GEMM_TN,
                                           .a = &w->weight,
                                           .b = &qx,
                                           .d = (*y)->data.data,
                                           .d_dtype = dtype,
                                           .bias = layer->bias ? layer->bias->master : NULL }));
    return mt_tape_record(tape, &(mt_node_spec){ .op = &mt_op_grouped_linear,
                                                 .attrs = &a,
                                                 .attrs_bytes = sizeof a,
                                                 .inputs = { x },
                                                 .outputs = { *y },
                                                 .saved = { x, rows ? rows->counts : NULL,
                                                            rows ? rows->elements : NULL },
                                                 .params = { w, layer->bias } });
}

static mt_status bias_backward(mt_tape *tape, mt_param *bias, const mt_qtensor *dy, mt_dtype dtype)
{
    bool accumulate, skip;
    MT_TRY(mt_param_grad_begin(tape, bias, &accumulate, &skip));
    if (!skip)
        MT_TRY(mt_bias_grad(
            mt_tape_stream(tape),
            &(struct mt_bias_grad_args){
                .dtype = dtype, .dy = dy, .accumulate = accumulate, .db = bias->grad }));
    return mt_param_grad_end(tape, bias);
}

static mt_status run_wgrad(mt_tape *tape, const struct mt_wgrad *job, bool accumulate)
{
    const struct linear_attrs *a = (const void *)job->attrs;
    int64_t rows = mt_tensor_rows(&job->x);
    mt_qtensor x =
        mt_qtensor_plain(group_of(a, rows, a->in, a->in_at, &job->extra[0], &job->extra[1]),
                         job->x.dtype, job->x.data);
    mt_qtensor dy =
        mt_qtensor_plain(group_of(a, rows, a->out, a->out_at, &job->extra[0], &job->extra[1]),
                         job->dy.dtype, job->dy.data);
    return mt_gemm(mt_tape_stream(tape),
                   &(struct mt_gemm_args){ .dtype = job->x.dtype,
                                           .layout = MT_GEMM_NT,
                                           .a = &x,
                                           .b = &dy,
                                           .d = job->param->grad,
                                           .d_dtype = job->param->dtype,
                                           .c = accumulate ? job->param->grad : NULL });
}

static mt_status linear_backward(mt_tape *tape, mt_node *node)
{
    const struct linear_attrs *a = mt_node_attrs(node);
    mt_param *w = mt_node_param(node, 0);
    mt_tensor dy = mt_node_grad_out(node, 0), counts = { 0 }, elements = { 0 }, dx, add;
    bool ragged = a->in_at >= 0;
    if (ragged) {
        MT_TRY(mt_node_saved(tape, node, 1, &counts));
        MT_TRY(mt_node_saved(tape, node, 2, &elements));
    }
    mt_qtensor qdy = mt_qtensor_plain(
        group_of(a, mt_tensor_rows(&dy), a->out, a->out_at, &counts, &elements), dy.dtype, dy.data);
    if (a->bias) MT_TRY(bias_backward(tape, mt_node_param(node, 1), &qdy, dy.dtype));
    MT_TRY(mt_node_grad_in(tape, node, 0, &dx, &add));
    if (dx.data)
        MT_TRY(mt_gemm(mt_tape_stream(tape), &(struct mt_gemm_args){ .dtype = dy.dtype,
                                                                     .layout = MT_GEMM_NN,
                                                                     .a = &w->weight,
                                                                     .b = &qdy,
                                                                     .d = dx.data,
                                                                     .d_dtype = dy.dtype,
                                                                     .c = add.data }));
    struct mt_wgrad job = { .run = run_wgrad, .param = w };
    _Static_assert(sizeof *a <= sizeof job.attrs, "the job carries the node's attributes");
    for (size_t i = 0; i < sizeof *a; i++) job.attrs[i] = ((const unsigned char *)a)[i];
    return mt_tape_wgrad(tape, node, &job, 0, (int[]){ ragged ? 1 : -1, ragged ? 2 : -1 });
}

const mt_op mt_op_grouped_linear = { "grouped_linear", linear_backward, NULL };
