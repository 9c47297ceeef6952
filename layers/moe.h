/* The feed-forward half of a block: a mixture of experts, or a dense MLP as the case N = 1. */
#pragma once

#include "layers/functional.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mt_moe_layer {
    mt_param *router;                      /* [1; E, D] */
    mt_grouped_linear_layer gate_up, down; /* [E; 2F, D], [E; D, F] */
    mt_router_shape shape;
    double capacity_factor; /* 0: dropless; else an expert takes ceil(factor T k / E) rows */
    int64_t *dropped;       /* device int64 [1] or NULL: += dropped rows, in training */
    mt_exchange *exchange; /* experts are spread over ranks: this one's are in gate_up and down, its
                              tokens go to all of them; NULL: all are here */
} mt_moe_layer;

/* y [T, D] from x [T, D]. routing: references the caller releases (mt_routing_release). `name`
 * prefixes what observers see. */
mt_status mt_moe_forward(mt_tape *tape, mt_value **y, mt_routing *routing, mt_value *x,
                         const mt_moe_layer *layer, const char *name);

typedef struct mt_mlp_layer {
    mt_grouped_linear_layer gate_up, down; /* [1; 2F, D], [1; D, F] */
} mt_mlp_layer;

mt_status mt_mlp_forward(mt_tape *tape, mt_value **y, mt_value *x, const mt_mlp_layer *layer);

#ifdef __cplusplus
}
#endif
