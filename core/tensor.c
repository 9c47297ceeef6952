/* Tensor descriptors: checks and names. */
#include "core/tensor.h"

#include <inttypes.h>
#include <stdio.h>

static void format_shape(char text[96], mt_dtype dtype, int ndim, const int64_t *shape)
{
    int used = snprintf(text, 96, "%s[", mt_dtype_name(dtype));
    for (int i = 0; i < ndim && used < 88; i++) {
        int room = 96 - used;
        used += shape[i] < 0
                    ? snprintf(text + used, (size_t)room, "%s*", i ? "," : "")
                    : snprintf(text + used, (size_t)room, "%s%" PRId64, i ? "," : "", shape[i]);
    }
    if (used > 94) used = 94;
    text[used] = ']', text[used + 1] = '\0';
}

void mt_tensor_format(char text[96], const mt_tensor *t)
{
    format_shape(text, t->dtype, t->ndim, t->shape);
}

mt_status mt_tensor_check(const mt_tensor *t, const char *what, mt_dtype dtype, int ndim,
                          const int64_t *shape)
{
    bool same = t->dtype == dtype && t->ndim == ndim;
    int64_t count = 1;
    for (int i = 0; i < ndim && same; i++) {
        same = shape[i] < 0 ? t->shape[i] >= 0 : t->shape[i] == shape[i];
        count *= t->shape[i];
    }
    if (same && (t->data || count == 0)) return MT_OK;
    char want[96], have[96];
    format_shape(want, dtype, ndim, shape);
    mt_tensor_format(have, t);
    return same ? MT_FAIL(MT_EINVAL, "%s: %s has no data", what, have)
                : MT_FAIL(MT_EINVAL, "%s is %s, must be %s", what, have, want);
}
