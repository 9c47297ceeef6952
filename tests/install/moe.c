/* A MoE layer against the installed library: one gradient held against a central difference. */
#include <math.h>
#include <stdio.h>

#include "layers/moe.h"

enum { T = 6, D = 8, F = 5, E = 4 };
#define SPEC(name, n, rows, cols, gemm)                                                            \
    {                                                                                              \
        name, n, rows, cols, .packed = gemm, .init = MT_INIT_NORMAL, .init_std = 1                 \
    }
static const mt_param_spec specs[3] = { SPEC("router", 1, E, D, false),
                                        SPEC("gate_up", E, 2 * F, D, true),
                                        SPEC("down", E, D, F, true) };
static double x[T * D];
static mt_stream stream;
static mt_param *p[3];

/* f64 params, and compute copies of the GEMM operands as the device wants them. */
static mt_status make_params(mt_param_store **store)
{
    MT_TRY(mt_param_store_create(store, stream.device, MT_F64, MT_F64));
    for (int i = 0; i < 3; i++) {
        MT_TRY(mt_param_store_add(*store, &p[i], &specs[i]));
        if (specs[i].packed) MT_TRY(mt_linear_reserve(p[i], stream.device, NULL));
    }
    MT_TRY(mt_param_store_allocate(*store, true));
    for (int i = 1; i < 3; i++) MT_TRY(mt_linear_place(p[i], stream.device));
    return mt_param_store_init(*store, 1);
}

/* *value = <x, MoE(x)>, and the gradients of the params for a gradient x of the output. */
static mt_status run(mt_tape *tape, bool training, double *value)
{
    mt_moe_layer layer = { .router = p[0], .shape = { .experts = E, .top_k = 2 } };
    mt_value *in, *y;
    mt_routing routing;
    layer.gate_up.weight = p[1], layer.down.weight = p[2];
    for (int i = 1; i < 3; i++) MT_TRY(mt_linear_refresh(p[i], &stream));
    MT_TRY(mt_tape_begin(tape, training, training));
    MT_TRY(mt_tape_input(tape, &in, mt_tensor_2d(x, MT_F64, T, D), true));
    MT_TRY(mt_moe_forward(tape, &y, &routing, in, &layer, "moe"));
    *value = 0;
    for (int i = 0; i < T * D; i++) *value += x[i] * ((const double *)y->data.data)[i];
    if (training) MT_TRY(mt_tape_seed_tensor(tape, y, mt_tensor_2d(x, MT_F64, T, D)));
    mt_routing_release(tape, &routing);
    mt_value_release(tape, &y);
    mt_value_release(tape, &in);
    if (training) MT_TRY(mt_tape_backward(tape));
    return mt_tape_end(tape);
}

int main(void)
{
    mt_param_store *store;
    mt_tape *tape;
    double value[3], h = 1e-5;
    for (int i = 0; i < T * D; i++) x[i] = cos(i * i);
    if (mt_device_open(&stream.device, "cpu", NULL, 0) || make_params(&store) ||
        mt_tape_create(&tape, &stream, NULL))
        return puts(mt_error_message()), 1;
    double *w = p[1]->master, at[3] = { w[3] - h, w[3] + h, w[3] };
    for (int i = 0; i < 3; i++) {
        w[3] = at[i];
        if (run(tape, i == 2, &value[i])) return puts(mt_error_message()), 1;
    }
    double gradient = *((double *)p[1]->grad + 3), slope = (value[1] - value[0]) / (2 * h);
    printf("gradient %.12g, difference %.12g\n", gradient, slope);
    mt_tape_destroy(&tape);
    mt_param_store_destroy(&store);
    mt_device_destroy(&stream.device);
    return !(gradient != 0 && fabs(gradient - slope) < 1e-7 * fabs(gradient));
}
