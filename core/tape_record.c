/* Recording: nodes, and the params whose gradients they will contribute to. */
#include <string.h>

#include "core/array.h"
#include "core/tape_priv.h"

static int take(value *to[MT_NODE_MAX], mt_value *const from[MT_NODE_MAX])
{
    int n = 0;
    while (n < MT_NODE_MAX && from[n]) to[n] = mt_value_of(from[n]), n++;
    MT_ASSERT(n < MT_NODE_MAX);
    return n;
}

static mt_status append(mt_tape *t, mt_node *node)
{
    MT_TRY(mt_array_reserve(&t->list, &t->reserved, t->count + 1, sizeof *t->list, "nodes"));
    t->list[t->count++] = node;
    return MT_OK;
}

/* Whether a gradient can reach a node with these inputs and params. */
static bool differentiable(const mt_node_spec *spec)
{
    for (int i = 0; i < MT_NODE_MAX && spec->inputs[i]; i++)
        if (mt_value_of(spec->inputs[i])->wants_grad) return true;
    for (int i = 0; i < MT_NODE_MAX && spec->params[i]; i++)
        if (!spec->params[i]->frozen) return true;
    return false;
}

mt_status mt_tape_add_node(mt_tape *tape, const mt_node_spec *spec)
{
    mt_node *n = mt_pool_get(&tape->nodes);
    MT_REQUIRE(n, MT_ENOMEM, "tape: out of memory for a node");
    MT_REQUIRE(spec->attrs_bytes <= ATTRS_BYTES, MT_EINVAL,
               "%s: %zu bytes of attributes, at most %d", spec->op->name, spec->attrs_bytes,
               ATTRS_BYTES);
    n->op = spec->op;
    if (spec->attrs_bytes) {
        n->attrs = mt_pool_get(&tape->attrs);
        MT_REQUIRE(n->attrs, MT_ENOMEM, "tape: out of memory for a node");
        memcpy(n->attrs, spec->attrs, spec->attrs_bytes);
    }
    n->input_count = take(n->inputs, spec->inputs);
    n->output_count = take(n->outputs, spec->outputs);
    n->saved_count = take(n->saved, spec->saved);
    while (n->param_count < MT_NODE_MAX && spec->params[n->param_count]) {
        n->params[n->param_count] = spec->params[n->param_count];
        n->param_count++;
    }
    for (int i = 0; i < n->saved_count; i++) n->saved[i]->saved++;
    for (int i = 0; i < n->output_count; i++) n->outputs[i]->producer = n;
    return append(tape, n);
}

/* Counts a contribution to come, and remembers the param: a segment that keeps nothing has no node
 * to find it by. */
static mt_status touch(mt_tape *t, mt_param *param)
{
    if (param->frozen) return MT_OK;
    MT_REQUIRE(!param->tape || param->tape == t, MT_EINVAL,
               "tape: %s is in a pass of another tape, which has not ended", param->name);
    MT_TRY(mt_array_reserve(&t->touched, &t->touched_room, t->touched_count + 1, sizeof *t->touched,
                            "params"));
    if (!param->tape) t->touched[t->touched_count++] = param;
    param->tape = t;
    param->uses++;
    return MT_OK;
}

static mt_status check_node(const mt_node_spec *spec)
{
    int inputs = 0, outputs = 0, saved = 0, params = 0;
    while (inputs < MT_NODE_MAX && spec->inputs[inputs]) inputs++;
    while (outputs < MT_NODE_MAX && spec->outputs[outputs]) outputs++;
    while (saved < MT_NODE_MAX && spec->saved[saved]) saved++;
    while (params < MT_NODE_MAX && spec->params[params]) params++;
    MT_REQUIRE(inputs < MT_NODE_MAX && outputs < MT_NODE_MAX && saved < MT_NODE_MAX &&
                   params < MT_NODE_MAX,
               MT_EINVAL,
               "%s: %d inputs, %d outputs, %d saved values and %d params, at most %d each",
               spec->op->name, inputs, outputs, saved, params, MT_NODE_MAX - 1);
    return MT_OK;
}

mt_status mt_tape_record(mt_tape *tape, const mt_node_spec *spec)
{
    MT_TRY(check_node(spec));
    if (!tape->training || !differentiable(spec)) return MT_OK;
    for (int i = 0; i < MT_NODE_MAX && spec->outputs[i]; i++)
        mt_value_of(spec->outputs[i])->wants_grad = true;
    if (!tape->recomputing) /* a segment's uses were counted in its first pass */
        for (int i = 0; i < MT_NODE_MAX && spec->params[i]; i++)
            MT_TRY(touch(tape, spec->params[i]));
    return tape->suspended ? MT_OK : mt_tape_add_node(tape, spec);
}
