/* Parts of params: the tensors that a checkpoint has. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "train/checkpoint_priv.h"

mt_tensor mt_part_tensor(const mt_param *param, const mt_param_part *part, mt_dtype dtype)
{
    int64_t k = param->group.k;
    return part->ndim == 1 ? mt_tensor_1d(NULL, dtype, part->rows * k)
                           : mt_tensor_2d(NULL, dtype, part->rows, k);
}

int64_t mt_part_first(const mt_param *param, const mt_param_part *part)
{
    return (part->member * param->group.m + part->row) * param->group.k;
}

mt_status mt_checkpoint_each_part(const mt_param_store *params, mt_checkpoint_visit *visit,
                                  void *user)
{
    size_t most = 1;
    int64_t n = mt_param_store_count(params);
    for (int64_t i = 0; i < n; i++) {
        const mt_param *p = mt_param_store_get(params, i);
        int64_t covered = 0;
        for (int64_t j = 0; j < p->part_count; j++) {
            int64_t count = p->parts[j].rows * p->group.k;
            size_t bytes = (size_t)count * mt_dtype_size(p->dtype);
            most = bytes > most ? bytes : most;
            covered += count;
        }
        int64_t all = p->all_members * p->group.m * p->group.k;
        MT_REQUIRE(covered == all, MT_EINTERNAL, "the parts of '%s' have %lld elements of its %lld",
                   p->name, (long long)covered, (long long)all);
    }
    void *buffer = malloc(most);
    MT_REQUIRE(buffer, MT_ENOMEM, "no memory for a tensor of %zu bytes", most);
    mt_status status = MT_OK;
    for (int64_t i = 0; i < n && status == MT_OK; i++) {
        mt_param *p = mt_param_store_get(params, i);
        for (int64_t j = 0; j < p->part_count && status == MT_OK; j++)
            status = visit(user, p, &p->parts[j], buffer);
    }
    free(buffer);
    return status;
}

mt_status mt_checkpoint_dataset(char text[MT_DATASET_NAME], const char *group, const char *name)
{
    int n = snprintf(text, MT_DATASET_NAME, "%s/%s", group, name);
    MT_REQUIRE(n < MT_DATASET_NAME && !strchr(name, '/'), MT_EINVAL,
               "'%.80s' is too long for a tensor's name, or has a '/'", name);
    return MT_OK;
}

mt_dtype mt_checkpoint_dtype(const mt_checkpoint_state *s, const mt_param *param,
                             const void *moment)
{
    return moment ? mt_moments_dtype(s->moments, param->dtype) : param->dtype;
}

mt_range mt_checkpoint_own(const mt_param *param, const mt_param_part *part, int64_t *from)
{
    int64_t begin = mt_part_first(param, part);
    int64_t end = begin + part->rows * param->group.k;
    int64_t own = mt_param_base(param) + param->own.first;
    int64_t low = begin > own ? begin : own, high = own + param->own.count;
    if (end < high) high = end;
    *from = low - own;
    return (mt_range){ low - begin, high > low ? high - low : 0 };
}
