/* Inside GroupedLinear: the formats of its operands. */
#pragma once

#include "layers/functional.h"

#ifdef __cplusplus
extern "C" {
#endif

/* X or dY on its way to the GEMMs. */
struct mt_linear_operand {
    mt_qtensor q;              /* plain on entry; quantized directions replace the plain ones */
    bool wanted[MT_DIR_COUNT]; /* directions that a GEMM will read */
    bool again;                /* the same values were quantized before, other directions of them */
    int64_t first_row;         /* of mt_grouped_linear_part */
    mt_value *memory[MT_DIR_COUNT]; /* of the quantized ones; NULL: the plain tensor is read */
    const int32_t *row_token;       /* of rows that are gathered from `tokens`, else NULL */
    int64_t tokens, top_k;
    const void *weights; /* of the slots of tokens at `position`, which gathered rows are weighted
                            by, or see dweights */
    const int32_t *position;
    bool swiglu;              /* q is what the operand is the SwiGLU of */
    const void *z;            /* q is the gradient of its SwiGLU, the operand its own, or NULL */
    void *dweights;           /* with z: the gradient of the weights at `position`, or NULL */
    const int64_t *rows_used; /* device; with either, NULL: all there is room for */
    float *bias_grad;         /* NULL, or where the gradient of the bias goes, in the same pass */
    bool accumulate;
};

/* mt_grouped_linear of the rows from first_row on of an x that is worked through in parts: each row
 * is rounded by the draws of its place in the whole. */
mt_status mt_grouped_linear_part(mt_tape *tape, mt_value **y, mt_value *x,
                                 const mt_grouped_linear_layer *layer, int64_t first_row);

/* Whether a GEMM reads this direction as it is, in the activations' dtype. */
bool mt_linear_is_native(const mt_param *weight, mt_operand operand, mt_dir dir);

/* Whether the refresh of a weight is a few small launches that share nothing with other weights':
 * split masters are joined in one place. */
bool mt_linear_goes_aside(const mt_param *weight);

/* Whether X, which is gathered, is kept for wgrad to quantize its columns, rather than these. */
bool mt_linear_keeps_x(const mt_param *weight);

/* The directions that are wanted and not native, in one pass over the plain tensor, whose rows may
 * be gathered or SwiGLU's on the way, and the row that a column under source=dequantized is made
 * from. Without any it does nothing, and leaves
 * bias_grad alone. */
mt_status mt_linear_quantize(mt_tape *tape, const mt_param *weight, mt_operand operand,
                             struct mt_linear_operand *o);
void mt_linear_operand_release(mt_tape *tape, struct mt_linear_operand *o);

/* Whether an operand may reach the rank that reads it as codes of its row direction, *spec, to be
 * decoded there before it is quantized: no bit of the pass depends on it, nor of what it counts. */
bool mt_linear_travels_coded(const mt_tape *tape, const mt_grouped_linear_layer *layer,
                             mt_operand operand, mt_format_spec *spec);

/* Records the SwiGLU y of x, which a GEMM has made already. */
mt_status mt_swiglu_record(mt_tape *tape, mt_value *y, mt_value *x, const mt_ragged *rows);

/* Shows an operand to whoever watches the layer, if anyone does. */
bool mt_linear_observed(const mt_param *weight);
mt_status mt_linear_observe(mt_tape *tape, const mt_param *weight, mt_operand operand,
                            const mt_qtensor *plain);

/* A direction that mt_linear_quantize made, found again in its memory. */
mt_qtensor mt_linear_codes(const mt_device *device, const mt_param *weight, mt_operand operand,
                           mt_dir dir, mt_group group, void *memory);

#ifdef __cplusplus
}
#endif
