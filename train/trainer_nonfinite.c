/* The first bad tensor: after a loss that is not finite, or of weights that no loss may show. */
#include "train/trainer_priv.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { LOOKED_AT = 1 << 20 }; /* elements of a master at once */

struct watch {
    mt_trainer *trainer;
    char *name;
};

static bool has_nonfinite(const void *data, mt_dtype dtype, int64_t count)
{
    if (dtype == MT_F32) { /* as masters mostly are: many elements at once */
        const float *x = data;
        int64_t bad = 0;
        for (int64_t i = 0; i < count; i++) bad += !isfinite(x[i]);
        return bad > 0;
    }
    for (int64_t i = 0; i < count; i++)
        if (!isfinite(mt_load_f64(data, dtype, i))) return true;
    return false;
}

static mt_status look(void *context, const char *name, const mt_tensor *data)
{
    struct watch *w = context;
    if (w->name[0] || data->dtype > MT_F16) return MT_OK; /* no float */
    size_t bytes = mt_tensor_bytes(data);
    void *host = malloc(bytes ? bytes : 1);
    MT_REQUIRE(host, MT_ENOMEM, "trainer: %zu bytes to look at %s", bytes, name);
    mt_status status = mt_device_copy(w->trainer->device, host, data->data, bytes);
    if (status == MT_OK && has_nonfinite(host, data->dtype, mt_tensor_count(data)))
        snprintf(w->name, 128, "%s", name);
    free(host);
    return status;
}

/* Whether the sum of a master's squares (of a split one, of what its halves show) is finite: where
 * it is so, all of it is. `room`: f64 on the device. */
static mt_status has_finite_sum(bool *finite, const mt_param_store *store, const mt_param *p,
                                double *room)
{
    mt_stream stream = { .device = mt_param_store_device(store) };
    const bool split = !p->own_master;
    const struct mt_grad_norm_args args = { .dtype = p->dtype,
                                            .count = split ? 0 : p->own.count,
                                            .grad = p->own_master,
                                            .bf16_count = split ? p->own.count : 0,
                                            .bf16_grad = p->high,
                                            .pass = MT_NORM_SUM,
                                            .sum = room };
    double sum = 0; /* as it stays on a device that only counts */
    MT_TRY(mt_grad_norm(&stream, &args));
    MT_TRY(mt_device_copy(stream.device, &sum, room, sizeof sum));
    *finite = isfinite(sum);
    return MT_OK;
}

static mt_status look_at_master(char name[128], const mt_param_store *store, const mt_param *p,
                                double *room)
{
    int64_t own = p->own.count, most = own < LOOKED_AT ? own : LOOKED_AT;
    bool finite = false;
    MT_TRY(has_finite_sum(&finite, store, p, room));
    if (finite) return MT_OK;
    void *host = malloc((size_t)most * mt_dtype_size(p->dtype) + 1);
    MT_REQUIRE(host, MT_ENOMEM, "trainer: no memory to look at %s", p->name);
    mt_status status = MT_OK;
    for (int64_t at = 0; at < own && !*name && status == MT_OK; at += most) {
        int64_t n = own - at < most ? own - at : most;
        status = mt_param_read_master(store, p, p->own.first + at, n, host);
        if (status == MT_OK && has_nonfinite(host, p->dtype, n)) snprintf(name, 128, "%s", p->name);
    }
    free(host);
    return status;
}

/* The name that the first rank which has one has found. */
static mt_status agree_on_name(mt_comm *comm, char name[128])
{
    int64_t first = *name ? mt_comm_size(comm) - mt_comm_rank(comm) : 0;
    MT_TRY(mt_comm_all_reduce(comm, NULL, &first, 1, MT_I64, MT_REDUCE_MAX, "a bad tensor"));
    if (!first) return MT_OK;
    return mt_comm_broadcast(comm, NULL, name, 128, mt_comm_size(comm) - (int)first, "its name");
}

/* The first weight that is not finite; "" for none. Collective. */
static mt_status look_at_params(char name[128], const mt_param_store *store, mt_comm *comm)
{
    mt_device *device = mt_param_store_device(store);
    void *room;
    name[0] = '\0';
    MT_TRY(mt_device_alloc(device, &room, sizeof(double), MT_MEMORY_STATE));
    mt_status status = MT_OK;
    for (int64_t i = 0; i < mt_param_store_count(store) && !*name && status == MT_OK; i++)
        status = look_at_master(name, store, mt_param_store_get(store, i), room);
    mt_device_free(device, &room, sizeof(double), MT_MEMORY_STATE);
    MT_TRY(status);
    return comm ? agree_on_name(comm, name) : MT_OK;
}

mt_status mt_trainer_check_weights(mt_model *model, mt_comm *comm)
{
    char name[128];
    MT_TRY(look_at_params(name, mt_model_params(model), comm));
    if (!*name) return MT_OK;
    mt_status status = MT_FAIL(MT_ENUMERIC, "the weight %s holds a NaN or an infinity", name);
    return mt_comm_agree(comm, status, "weights"); /* every rank's */
}

mt_status mt_trainer_find_nonfinite(mt_trainer *t, const int32_t *tokens, const int32_t *targets,
                                    char name[128])
{
    struct watch w = { t, name };
    int64_t counted, s = t->config.sequence_length;
    double loss = 0;
    MT_TRY(look_at_params(name, mt_model_params(t->model), t->config.comm));
    mt_tape_set_observer(t->tape, look, &w);
    mt_status status = MT_OK;
    for (int64_t i = 0; i < t->config.batch_size && !name[0] && status == MT_OK; i++) {
        status = mt_trainer_upload(t, tokens + i * s, targets + i * s, s, &counted);
        if (status == MT_OK) status = mt_trainer_upload_scalar(t, t->scale, 1);
        if (status == MT_OK) status = mt_trainer_forward(t, MT_PASS_EVAL, 1, s, &loss, -1, NULL);
        if (status == MT_OK && !name[0] && !isfinite(loss)) snprintf(name, 128, "loss");
    }
    mt_tape_set_observer(t->tape, NULL, NULL);
    return status;
}
