/* What recipes leave in checkpoints: delayed scaling,
 * /state/delayed/<layer>.<slot>.{scale,history}; counts of NaN, /state/nan, i64. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "layers/precision.h"
#include "train/checkpoint_priv.h"

static const char *const group = "/state/delayed";

/* Bytes of these tensors, and of the largest. */
static size_t state_bytes(const mt_precision *p, size_t *most)
{
    size_t sum = 0;
    char name[256];
    *most = 0;
    for (int64_t i = 0; p && i < mt_precision_state_count(p); i++) {
        mt_tensor t = mt_precision_state(p, i, name);
        size_t bytes = mt_tensor_bytes(&t);
        sum += bytes;
        if (bytes > *most) *most = bytes;
    }
    return sum;
}

/* This rank's, one after another. */
static mt_status copy_states(char *to, const mt_checkpoint_state *s)
{
    char name[256];
    for (int64_t i = 0; i < mt_precision_state_count(s->precision); i++) {
        mt_tensor t = mt_precision_state(s->precision, i, name);
        MT_TRY(mt_device_copy(mt_param_store_device(s->params), to, t.data, mt_tensor_bytes(&t)));
        to += mt_tensor_bytes(&t);
    }
    return MT_OK;
}

mt_status mt_checkpoint_gather_delayed(float **values, const mt_checkpoint_state *s)
{
    size_t most, bytes = state_bytes(s->precision, &most);
    *values = NULL;
    if (!bytes) return MT_OK;
    *values = malloc(bytes);
    mt_status status = *values
                           ? copy_states((char *)*values, s)
                           : MT_FAIL(MT_ENOMEM, "no memory for amax histories of %zu bytes", bytes);
    MT_TRY(mt_checkpoint_agree(s, status, "amax histories"));
    if (mt_checkpoint_ranks(s) == 1) return MT_OK;
    return mt_comm_all_reduce(s->comm, NULL, *values, (int64_t)(bytes / sizeof **values), MT_F32,
                              MT_REDUCE_MAX, "amax histories");
}

mt_status mt_checkpoint_write_delayed(mt_h5 *file, const mt_checkpoint_state *s,
                                      const float *values)
{
    char name[256], path[300];
    if (!values) return MT_OK;
    MT_TRY(mt_h5_group(file, group));
    for (int64_t i = 0; i < mt_precision_state_count(s->precision); i++) {
        mt_tensor t = mt_precision_state(s->precision, i, name);
        snprintf(path, sizeof path, "%s/%s", group, name);
        MT_TRY(mt_h5_write(file, path, MT_F32, t.ndim, t.shape, values));
        values += mt_tensor_bytes(&t) / sizeof *values;
    }
    return MT_OK;
}

/* Fails where the checkpoint is of a run with another recipe. */
static mt_status check_slot(mt_checkpoint *c, const char *name, const mt_tensor *want)
{
    char path[300];
    bool has;
    mt_tensor got;
    snprintf(path, sizeof path, "%s/%s", group, name);
    MT_TRY(mt_checkpoint_has(c, path, &has));
    MT_REQUIRE(has, MT_ECONFIG,
               "the checkpoint has no %s: its run's recipe was another, without fp8_delayed there",
               path);
    MT_TRY(mt_checkpoint_tensor(c, group, name, &got));
    MT_REQUIRE(want->ndim != 2 || got.ndim != 2 || got.shape[0] == want->shape[0], MT_ECONFIG,
               "recipe.delayed.history is %lld, the checkpoint's %s has %lld steps",
               (long long)want->shape[0], path, (long long)got.shape[0]);
    got.data = want->data; /* where it goes */
    return mt_tensor_check(&got, path, MT_F32, want->ndim, want->shape);
}

/* A model that was no run, or one in other formats, has no histories: scales begin at 1. */
mt_status mt_checkpoint_delayed(const mt_checkpoint_state *s, mt_checkpoint *c, bool read)
{
    char name[256];
    void *buffer;
    size_t most;
    bool has;
    mt_status status = MT_OK;
    MT_TRY(mt_checkpoint_has(c, group, &has));
    if (!has || !s->precision) return MT_OK;
    state_bytes(s->precision, &most);
    buffer = malloc(most + 1);
    MT_REQUIRE(buffer, MT_ENOMEM, "no memory for an amax history of %zu bytes", most);
    for (int64_t i = 0; i < mt_precision_state_count(s->precision); i++) {
        mt_tensor t = mt_precision_state(s->precision, i, name), got = t;
        got.data = buffer;
        MT_TRY_CLEANUP(check_slot(c, name, &t));
        if (!read) continue;
        MT_TRY_CLEANUP(mt_checkpoint_read(c, group, name, &got));
        MT_TRY_CLEANUP(
            mt_device_copy(mt_param_store_device(s->params), t.data, buffer, mt_tensor_bytes(&t)));
    }
cleanup:
    free(buffer);
    return status;
}

/* ---- counts of NaN ------------------------------------------------------------------------------
 */

mt_status mt_checkpoint_sum_nans(int64_t **counts, const mt_checkpoint_state *s)
{
    mt_tensor t = s->precision ? mt_precision_nans(s->precision) : (mt_tensor){ 0 };
    *counts = NULL;
    if (!t.data) return MT_OK;
    int64_t *x = *counts = malloc(mt_tensor_bytes(&t));
    mt_status status =
        x ? mt_device_copy(mt_param_store_device(s->params), x, t.data, mt_tensor_bytes(&t))
          : MT_FAIL(MT_ENOMEM, "no memory for %lld counts of NaN", (long long)t.shape[0]);
    MT_TRY(mt_checkpoint_agree(s, status, "counts of NaN"));
    if (mt_checkpoint_ranks(s) == 1) return MT_OK;
    return mt_comm_all_reduce(s->comm, NULL, x, t.shape[0], MT_I64, MT_REDUCE_SUM, "counts of NaN");
}

mt_status mt_checkpoint_write_nans(mt_h5 *file, const mt_checkpoint_state *s, const int64_t *counts)
{
    if (!counts) return MT_OK;
    mt_tensor t = mt_precision_nans(s->precision);
    return mt_h5_write(file, "/state/nan", MT_I64, 1, t.shape, counts);
}

/* A checkpoint of a run without recipes has none: they begin at 0. */
mt_status mt_checkpoint_read_nans(const mt_checkpoint_state *s, mt_checkpoint *c)
{
    mt_tensor t = s->precision ? mt_precision_nans(s->precision) : (mt_tensor){ 0 }, got;
    bool has;
    mt_status status = MT_OK;
    if (!t.data) return MT_OK;
    MT_TRY(mt_checkpoint_has(c, "/state/nan", &has));
    mt_device *device = mt_param_store_device(s->params);
    if (!has) return mt_device_zero(device, t.data, mt_tensor_bytes(&t));
    MT_TRY(mt_checkpoint_tensor(c, "/state", "nan", &got));
    int64_t *counts = got.data = malloc(mt_tensor_bytes(&t));
    MT_REQUIRE(counts, MT_ENOMEM, "no memory for %lld counts of NaN", (long long)t.shape[0]);
    MT_TRY_CLEANUP(mt_tensor_check(&got, "/state/nan", MT_I64, 1, t.shape));
    MT_TRY_CLEANUP(mt_checkpoint_read(c, "/state", "nan", &got));
    if (!mt_checkpoint_leads(s)) memset(counts, 0, mt_tensor_bytes(&t)); /* the sum counts once */
    MT_TRY_CLEANUP(mt_device_copy(device, t.data, counts, mt_tensor_bytes(&t)));
cleanup:
    free(counts);
    return status;
}
