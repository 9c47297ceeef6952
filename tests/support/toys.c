/* Toy ops. */
#include "tests/support/toys.h"

#include <stdio.h>
#include <string.h>

struct toy_log toy_log;

static mt_status blown(const char *op)
{
    if (toy_log.fuse > 0 && --toy_log.fuse == 0) return MT_FAIL(MT_ENUMERIC, "%s: blown fuse", op);
    return MT_OK;
}

static mt_status vector_like(mt_tape *tape, mt_value **y, const mt_value *x)
{
    return mt_tape_value(tape, y, MT_F64, 1, x->data.shape);
}

/* Gradient of input i = (what it has) + a * b, b NULL for 1. */
static mt_status contribute(mt_tape *tape, mt_node *node, int i, const double *a, const double *b)
{
    mt_tensor grad, add;
    MT_TRY(mt_node_grad_in(tape, node, i, &grad, &add));
    if (!grad.data) return MT_OK;
    *(add.data ? grad.data == add.data ? &toy_log.in_place : &toy_log.separate : &toy_log.first) +=
        1;
    double *g = grad.data;
    const double *old = add.data;
    for (int64_t j = 0; j < mt_tensor_count(&grad); j++)
        g[j] = (old ? old[j] : 0) + a[j] * (b ? b[j] : 1);
    return MT_OK;
}

static mt_status add_backward(mt_tape *tape, mt_node *node)
{
    MT_TRY(blown("toy_add"));
    for (int i = 0; i < 2; i++) {
        bool wanted;
        if (mt_node_grad_pass(tape, node, 0, i, &wanted))
            toy_log.passed++;
        else if (wanted)
            MT_TRY(contribute(tape, node, i, mt_node_grad_out(node, 0).data, NULL));
    }
    return MT_OK;
}

mt_status toy_add(mt_tape *tape, mt_value **y, mt_value *a, mt_value *b)
{
    static const mt_op op = { "toy_add", add_backward, NULL };
    MT_TRY(vector_like(tape, y, a));
    double *out = (*y)->data.data;
    const double *p = a->data.data, *q = b->data.data;
    for (int64_t i = 0; i < a->data.shape[0]; i++) out[i] = p[i] + q[i];
    return mt_tape_record(tape,
                          &(mt_node_spec){ .op = &op, .inputs = { a, b }, .outputs = { *y } });
}

static mt_status mul_backward(mt_tape *tape, mt_node *node)
{
    mt_tensor a, b, dy = mt_node_grad_out(node, 0);
    MT_TRY(blown("toy_mul"));
    MT_TRY(mt_node_saved(tape, node, 0, &a));
    MT_TRY(mt_node_saved(tape, node, 1, &b));
    MT_TRY(contribute(tape, node, 0, dy.data, b.data));
    return contribute(tape, node, 1, dy.data, a.data);
}

mt_status toy_mul(mt_tape *tape, mt_value **y, mt_value *a, mt_value *b)
{
    static const mt_op op = { "toy_mul", mul_backward, NULL };
    MT_TRY(vector_like(tape, y, a));
    double *out = (*y)->data.data;
    const double *p = a->data.data, *q = b->data.data;
    for (int64_t i = 0; i < a->data.shape[0]; i++) out[i] = p[i] * q[i];
    return mt_tape_record(
        tape,
        &(mt_node_spec){ .op = &op, .inputs = { a, b }, .outputs = { *y }, .saved = { a, b } });
}

static void square(mt_tensor *y, const mt_tensor *x)
{
    double *out = y->data;
    const double *p = x->data;
    for (int64_t i = 0; i < x->shape[0]; i++) out[i] = p[i] * p[i];
}

static mt_status square_backward(mt_tape *tape, mt_node *node)
{
    mt_tensor x, dy = mt_node_grad_out(node, 0);
    void *twice;
    MT_TRY(blown("toy_square"));
    MT_TRY(mt_node_saved(tape, node, 0, &x));
    MT_TRY(mt_node_scratch(tape, node, &twice, mt_tensor_bytes(&x)));
    for (int64_t i = 0; i < x.shape[0]; i++) ((double *)twice)[i] = 2 * ((const double *)x.data)[i];
    return contribute(tape, node, 0, dy.data, twice);
}

static mt_status square_again(mt_tape *tape, mt_node *node, mt_tensor *out)
{
    mt_tensor x;
    MT_TRY(mt_node_saved(tape, node, 0, &x));
    toy_log.again++;
    square(out, &x);
    return MT_OK;
}

mt_status toy_square(mt_tape *tape, mt_value **y, mt_value *x)
{
    static const mt_op op = { "toy_square", square_backward, square_again };
    MT_TRY(vector_like(tape, y, x));
    square(&(*y)->data, &x->data);
    MT_TRY(mt_tape_record(
        tape, &(mt_node_spec){ .op = &op, .inputs = { x }, .outputs = { *y }, .saved = { x } }));
    mt_value_recompute(tape, *y);
    return MT_OK;
}

static mt_status scale_wgrad(mt_tape *tape, const struct mt_wgrad *job, bool accumulate)
{
    (void)tape;
    double *dw = job->param->grad, tag;
    const double *x = job->x.data, *dy = job->dy.data;
    for (int64_t i = 0; i < job->x.shape[0]; i++) dw[i] = (accumulate ? dw[i] : 0) + dy[i] * x[i];
    memcpy(&tag, job->attrs, sizeof tag);
    if (toy_log.wgrads < 64) toy_log.order[toy_log.wgrads] = tag;
    toy_log.wgrads++;
    return MT_OK;
}

static mt_status scale_backward(mt_tape *tape, mt_node *node)
{
    mt_param *w = mt_node_param(node, 0);
    struct mt_wgrad job = { .run = scale_wgrad, .param = w };
    MT_TRY(blown("toy_scale"));
    MT_TRY(contribute(tape, node, 0, mt_node_grad_out(node, 0).data, w->master));
    memcpy(job.attrs, mt_node_attrs(node), sizeof(double));
    return mt_tape_wgrad(tape, node, &job, 0, NULL, (int[MT_WGRAD_EXTRAS]){ -1, -1, -1, -1 });
}

mt_status toy_scale(mt_tape *tape, mt_value **y, mt_value *x, mt_param *w, double tag)
{
    static const mt_op op = { "toy_scale", scale_backward, NULL };
    MT_TRY(vector_like(tape, y, x));
    double *out = (*y)->data.data;
    const double *p = x->data.data, *q = w->master;
    for (int64_t i = 0; i < x->data.shape[0]; i++) out[i] = p[i] * q[i];
    return mt_tape_record(tape, &(mt_node_spec){ .op = &op,
                                                 .attrs = &tag,
                                                 .attrs_bytes = sizeof tag,
                                                 .inputs = { x },
                                                 .outputs = { *y },
                                                 .saved = { x },
                                                 .params = { w } });
}

static mt_status shift_backward(mt_tape *tape, mt_node *node)
{
    mt_param *b = mt_node_param(node, 0);
    const double *dy = mt_node_grad_out(node, 0).data;
    bool accumulate, skip, wanted;
    MT_TRY(blown("toy_shift"));
    MT_TRY(mt_param_grad_begin(tape, b, &accumulate, &skip));
    double *db = b->grad;
    for (int64_t i = 0; !skip && i < mt_param_count(b); i++)
        db[i] = (accumulate ? db[i] : 0) + dy[i];
    MT_TRY(mt_param_grad_end(tape, b));
    if (!mt_node_grad_pass(tape, node, 0, 0, &wanted) && wanted)
        return contribute(tape, node, 0, dy, NULL);
    return MT_OK;
}

mt_status toy_shift(mt_tape *tape, mt_value **y, mt_value *x, mt_param *b)
{
    static const mt_op op = { "toy_shift", shift_backward, NULL };
    MT_TRY(vector_like(tape, y, x));
    double *out = (*y)->data.data;
    const double *p = x->data.data, *q = b->master;
    for (int64_t i = 0; i < x->data.shape[0]; i++) out[i] = p[i] + q[i];
    return mt_tape_record(
        tape, &(mt_node_spec){ .op = &op, .inputs = { x }, .outputs = { *y }, .params = { b } });
}

mt_param_store *toy_store(int64_t count, int64_t n, uint64_t seed)
{
    mt_param_store *store;
    mt_param *p;
    char name[32];
    assert_ok(mt_param_store_create(&store, test_device(), MT_F64, MT_F64));
    for (int64_t i = 0; i < count; i++) {
        snprintf(name, sizeof name, "w%lld", (long long)i);
        mt_param_spec spec = { .name = name, .members = 1, .m = 1, .k = n };
        assert_ok(mt_param_store_add(store, &p, &spec));
    }
    assert_ok(mt_param_store_allocate(store, true));
    for (int64_t i = 0; i < count; i++) {
        p = mt_param_store_get(store, i);
        test_random(p->master, n, MT_F64, 1, seed + (uint64_t)i);
        memset(p->grad, 0xff, (size_t)n * sizeof(double));
    }
    return store;
}

mt_tape *toy_tape(mt_stream *stream, const mt_tape_options *options)
{
    mt_tape *tape;
    stream->device = test_device();
    assert_ok(mt_tape_create(&tape, stream, options));
    memset(&toy_log, 0, sizeof toy_log);
    return tape;
}

mt_value *toy_input(mt_tape *tape, double *x, int64_t n)
{
    mt_value *v;
    assert_ok(mt_tape_input(tape, &v, mt_tensor_1d(x, MT_F64, n), true));
    return v;
}
