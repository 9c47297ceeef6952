/* What recipes leave in checkpoints: delayed scaling,
 * /state/delayed/<layer>.<slot>.{scale,history}; counts of NaN, /state/nan, i64. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "layers/precision.h"
#include "train/checkpoint_priv.h"

static const char *const group = "/state/delayed";

/* State i: this rank's part of it, on the device; and its shape with all members. */
typedef struct state {
    char name[256];
    mt_tensor here, whole;
    int64_t first; /* of its members among all */
} state;

static state state_of(const mt_precision *p, int64_t i)
{
    state x;
    const mt_param *w = mt_precision_state_weight(p, i);
    x.here = x.whole = mt_precision_state(p, i, x.name);
    x.whole.shape[x.whole.ndim - 1] = w->all_members;
    x.first = w->first_member;
    return x;
}

/* Between this rank's part, packed, and the whole. */
static void move_part(const state *x, float *part, float *whole, bool back)
{
    int64_t n = mt_tensor_cols(&x->here), all = mt_tensor_cols(&x->whole);
    for (int64_t l = 0; l < mt_tensor_rows(&x->here); l++) {
        float *a = part + l * n, *b = whole + l * all + x->first;
        memcpy(back ? a : b, back ? b : a, (size_t)n * sizeof *a);
    }
}

/* Bytes of these tensors, and of the largest. */
static size_t state_bytes(const mt_precision *p, size_t *most)
{
    size_t sum = 0;
    *most = 0;
    for (int64_t i = 0; p && i < mt_precision_state_count(p); i++) {
        state x = state_of(p, i);
        size_t bytes = mt_tensor_bytes(&x.whole);
        sum += bytes;
        if (bytes > *most) *most = bytes;
    }
    return sum;
}

/* One after another, with zeros, which no scale and no amax is below, where other ranks' are. */
static mt_status copy_states(float *to, size_t bytes, const mt_checkpoint_state *s)
{
    size_t most;
    state_bytes(s->precision, &most);
    float *part = malloc(most);
    MT_REQUIRE(part, MT_ENOMEM, "no memory for an amax history of %zu bytes", most);
    mt_status status = MT_OK;
    memset(to, 0, bytes);
    for (int64_t i = 0; i < mt_precision_state_count(s->precision); i++) {
        state x = state_of(s->precision, i);
        MT_TRY_CLEANUP(mt_device_copy(mt_param_store_device(s->params), part, x.here.data,
                                      mt_tensor_bytes(&x.here)));
        move_part(&x, part, to, false);
        to += mt_tensor_count(&x.whole);
    }
cleanup:
    free(part);
    return status;
}

mt_status mt_checkpoint_gather_delayed(float **values, const mt_checkpoint_state *s)
{
    size_t most, bytes = state_bytes(s->precision, &most);
    *values = NULL;
    if (!bytes) return MT_OK;
    *values = malloc(bytes);
    mt_status status = *values
                           ? copy_states(*values, bytes, s)
                           : MT_FAIL(MT_ENOMEM, "no memory for amax histories of %zu bytes", bytes);
    MT_TRY(mt_comm_agree(s->comm, status, "amax histories"));
    if (mt_comm_size(s->comm) == 1) return MT_OK;
    return mt_comm_all_reduce(s->comm, NULL, *values, (int64_t)(bytes / sizeof **values), MT_F32,
                              MT_REDUCE_MAX, "amax histories");
}

mt_status mt_checkpoint_write_delayed(mt_h5 *file, const mt_checkpoint_state *s,
                                      const float *values)
{
    char path[300];
    if (!values) return MT_OK;
    MT_TRY(mt_h5_group(file, group));
    for (int64_t i = 0; i < mt_precision_state_count(s->precision); i++) {
        state x = state_of(s->precision, i);
        snprintf(path, sizeof path, "%s/%s", group, x.name);
        MT_TRY(mt_h5_write(file, path, MT_F32, x.whole.ndim, x.whole.shape, values));
        values += mt_tensor_count(&x.whole);
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

/* A model that was no run, or one in other formats, has no histories: they begin with its weights.
 */
mt_status mt_checkpoint_delayed(const mt_checkpoint_state *s, mt_checkpoint *c, bool read)
{
    size_t most;
    bool has;
    mt_status status = MT_OK;
    MT_TRY(mt_checkpoint_has(c, group, &has));
    if (!s->precision) return MT_OK;
    if (!has) return read ? mt_precision_forget(s->precision) : MT_OK;
    state_bytes(s->precision, &most);
    float *whole = malloc(most + 1), *part = malloc(most + 1);
    if (!whole || !part)
        status = MT_FAIL(MT_ENOMEM, "no memory for an amax history of %zu bytes", most);
    MT_TRY_CLEANUP(status);
    for (int64_t i = 0; i < mt_precision_state_count(s->precision); i++) {
        state x = state_of(s->precision, i);
        mt_tensor got = x.whole;
        got.data = whole;
        MT_TRY_CLEANUP(check_slot(c, x.name, &x.whole));
        if (!read) continue;
        MT_TRY_CLEANUP(mt_checkpoint_read(c, group, x.name, &got));
        move_part(&x, part, whole, true);
        MT_TRY_CLEANUP(mt_device_copy(mt_param_store_device(s->params), x.here.data, part,
                                      mt_tensor_bytes(&x.here)));
    }
cleanup:
    free(whole);
    free(part);
    return status;
}

/* ---- counts of NaN ------------------------------------------------------------------------------
 */

/* Counts of all members, without data; none without rules. */
static mt_tensor nans_of(const mt_checkpoint_state *s)
{
    return mt_tensor_1d(NULL, MT_I64, s->precision ? mt_precision_nan_count(s->precision) : 0);
}

mt_status mt_checkpoint_sum_nans(int64_t **counts, const mt_checkpoint_state *s)
{
    mt_tensor t = nans_of(s);
    *counts = NULL;
    if (!t.shape[0]) return MT_OK;
    *counts = malloc(mt_tensor_bytes(&t));
    mt_status status =
        *counts ? MT_OK
                : MT_FAIL(MT_ENOMEM, "no memory for %lld counts of NaN", (long long)t.shape[0]);
    MT_TRY(mt_comm_agree(s->comm, status, "counts of NaN"));
    return mt_precision_sum_nans(s->precision, *counts);
}

mt_status mt_checkpoint_write_nans(mt_h5 *file, const mt_checkpoint_state *s, const int64_t *counts)
{
    if (!counts) return MT_OK;
    mt_tensor t = nans_of(s);
    return mt_h5_write(file, "/state/nan", MT_I64, 1, t.shape, counts);
}

/* A checkpoint of a run without recipes has none: they begin at 0. */
mt_status mt_checkpoint_read_nans(const mt_checkpoint_state *s, mt_checkpoint *c)
{
    mt_tensor t = nans_of(s), got;
    bool has;
    mt_status status = MT_OK;
    if (!t.shape[0]) return MT_OK;
    int64_t *counts = calloc(1, mt_tensor_bytes(&t));
    MT_REQUIRE(counts, MT_ENOMEM, "no memory for %lld counts of NaN", (long long)t.shape[0]);
    MT_TRY_CLEANUP(mt_checkpoint_has(c, "/state/nan", &has));
    if (has) MT_TRY_CLEANUP(mt_checkpoint_tensor(c, "/state", "nan", &got));
    got.data = counts;
    if (has) MT_TRY_CLEANUP(mt_tensor_check(&got, "/state/nan", MT_I64, 1, t.shape));
    if (has) MT_TRY_CLEANUP(mt_checkpoint_read(c, "/state", "nan", &got));
    MT_TRY_CLEANUP(mt_precision_set_nans(s->precision, counts));
cleanup:
    free(counts);
    return status;
}
