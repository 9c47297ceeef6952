/* Gradients of inputs by kernels that overwrite them: where another consumer of the input has left
 * its gradient already, the kernel writes beside it, and both are added. */
#pragma once

#include "layers/functional.h"

typedef struct mt_contribution {
    mt_tensor grad;     /* of the input, that of no data where it takes none */
    const void *before; /* what it is so far, NULL: nothing */
    void *to;           /* where the kernel writes; NULL: nowhere */
} mt_contribution;

mt_status mt_contribution_begin(mt_tape *tape, mt_node *node, int input, mt_contribution *c);
/* When the kernel is on the stream. */
mt_status mt_contribution_end(mt_tape *tape, const mt_contribution *c);
