/* Inside the gradient checker: a scalar function of inputs and params, differentiated in two ways.
 */
#pragma once

#include "layers/functional.h"
#include "train/gradcheck.h"

enum { CHECK_INPUTS = 3, CHECK_OUTPUTS = 5, CHECK_MEMBERS = 4 };

typedef struct check check;
/* Makes outputs (up to CHECK_OUTPUTS, NULL where absent) from inputs; must be pure. */
typedef mt_status (*check_forward)(mt_tape *tape, check *c, mt_value *const *inputs,
                                   mt_value **outputs);

/* One case. The scalar is the sum over outputs of <weights, output>. All memory is the host's. */
struct check {
    const char *op;
    char name[128];
    mt_device *device;
    mt_stream stream;
    mt_param_store *store;
    mt_tape *tape;
    uint64_t seed;

    mt_tensor inputs[CHECK_INPUTS]; /* f64 matrices, owned */
    double *input_grads[CHECK_INPUTS];
    int input_count;

    check_forward forward;
    bool segment;       /* run forward as a recompute segment */
    bool shared;        /* every input has another consumer, which gives other_gradient */
    int passes;         /* passes whose param gradients accumulate, at least 1 */
    int64_t valid_rows; /* of outputs with more rows: the tail belongs to nobody; -1: all */
    double *weights[CHECK_OUTPUTS]; /* drawn when the shapes are first seen */
    int64_t counts[CHECK_OUTPUTS];

    mt_status (*evaluate)(check *c, double *value); /* the default runs `forward` */
    mt_status (*gradient)(check *c);
    mt_status (*evaluate_first)(
        check *c, double *value);   /* of quantized layers: before the surrogate is known */
    struct mt_surrogate *surrogate; /* NULL: `evaluate` runs the tape */

    double step;     /* of the differences */
    int64_t samples; /* elements per tensor, 0: all */
    uint64_t chosen,
        chosen_now; /* fingerprints of the routing at the point and in this evaluation */

    /* Constants of a case. */
    struct mt_grouped_linear_layer linear;
    mt_linear_state state; /* of linear.weight */
    mt_param *params[3];
    mt_attention_shape attention;
    mt_router_shape router;
    mt_tensor table;
    mt_ragged ragged;
    int32_t tokens[64];
    int64_t experts, top_k, capacity;
    mt_comm *comm; /* of this process alone */
    mt_exchange *exchange;
    const void *scale;
    int64_t loss_chunk;
    struct mt_model *model;
};

mt_status mt_check_create(check **c, mt_device *device, const char *op,
                          const mt_tape_options *options, uint64_t seed);
void mt_check_destroy(check **c);
mt_status mt_check_param(check *c, mt_param **p, const char *name, int64_t members, int64_t m,
                         int64_t k, bool packed, bool frozen);
/* Allocates the params and draws them: normal around `shift`. */
mt_status mt_check_draw(check *c, double shift);
/* An input of normal values. */
mt_status mt_check_input(check *c, int64_t rows, int64_t cols);
/* Compares both gradients element by element. MT_ENUMERIC when the routing moved within a step: the
 * caller takes another seed. */
mt_status mt_check_run(check *c, mt_gradcheck_report report, void *context, bool per_tensor,
                       int64_t *failed);

/* GroupedLinear over the cross product of its options and routings; the rows of each member, NULL
 * for a dense case; and the same layers quantized, in recipe number `recipe`. */
enum { CHECK_LINEAR_OPTIONS = 64 };
mt_status mt_check_linear_setup(check *c, int variant);
const int64_t *mt_check_linear_counts(const check *c);
mt_status mt_check_quantized_setup(check *c, int recipe, int variant, bool *found);
void mt_surrogate_destroy(struct mt_surrogate **surrogate);

/* What the cases of an op are run with. */
typedef struct mt_check_session {
    mt_device *device;
    mt_gradcheck_report report;
    void *context;
    int64_t *failed;
} mt_check_session;

/* Sets a case up: params and inputs, after which it is drawn and run. */
typedef mt_status (*mt_check_setup)(check *c, int variant);

mt_status mt_check_variants(const mt_check_session *s, const char *op, mt_check_setup setup,
                            int variants, double shift);
mt_status mt_check_rope_cases(const mt_check_session *s);
mt_status mt_check_attention_cases(const mt_check_session *s);
mt_status mt_check_router_cases(const mt_check_session *s);
mt_status mt_check_gather_cases(const mt_check_session *s);
mt_status mt_check_combine_cases(const mt_check_session *s);
mt_status mt_check_dispatch_cases(const mt_check_session *s);
mt_status mt_check_collect_cases(const mt_check_session *s);
