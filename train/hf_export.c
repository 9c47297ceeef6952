/* A checkpoint to a Hugging Face directory. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "train/checkpoint_priv.h"
#include "train/hf.h"
#include "train/safetensors.h"

typedef struct exporter {
    mt_checkpoint *checkpoint;
    mt_tensor *tensors; /* without data */
    bool *placed;       /* those that the model has */
} exporter;

static mt_status fill(void *user, int64_t i, void *data, size_t bytes)
{
    const exporter *out = user;
    mt_tensor t = out->tensors[i];
    MT_REQUIRE(mt_tensor_bytes(&t) == bytes, MT_EINTERNAL, "tensor %lld has two sizes",
               (long long)i);
    t.data = data;
    return mt_checkpoint_read(out->checkpoint, "/model", mt_checkpoint_name(out->checkpoint, i),
                              &t);
}

static mt_status describe_tensors(exporter *out, mt_st_entry *entries)
{
    for (int64_t i = 0; i < mt_checkpoint_count(out->checkpoint); i++) {
        const char *name = mt_checkpoint_name(out->checkpoint, i);
        mt_tensor *t = &out->tensors[i];
        MT_TRY(mt_checkpoint_tensor(out->checkpoint, "/model", name, t));
        entries[i] = (mt_st_entry){ name, t->dtype, t->ndim, { 0 } };
        memcpy(entries[i].shape, t->shape, sizeof t->shape);
    }
    return MT_OK;
}

/* ---- the tensors of the configuration ----------------------------------------------------------
 */

/* Among the checkpoint's, which are sorted; -1 for none. */
static int64_t find_tensor(const mt_checkpoint *checkpoint, const char *name)
{
    int64_t low = 0, high = mt_checkpoint_count(checkpoint);
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        int order = strcmp(name, mt_checkpoint_name(checkpoint, middle));
        if (!order) return middle;
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return -1;
}

static mt_status check_part(exporter *out, const mt_param *param, const mt_param_part *part)
{
    const char *path = mt_checkpoint_path(out->checkpoint);
    int64_t i = find_tensor(out->checkpoint, part->name);
    char has[96], must[96];
    MT_REQUIRE(i >= 0, MT_EDAMAGED,
               "checkpoint '%s' has no tensor '%s', which its configuration has", path, part->name);
    const mt_tensor *got = &out->tensors[i];
    mt_tensor want = mt_part_tensor(param, part, got->dtype);
    bool same = got->dtype <= MT_F16 && got->ndim == want.ndim;
    for (int d = 0; same && d < want.ndim; d++) same = got->shape[d] == want.shape[d];
    out->placed[i] = true;
    if (same) return MT_OK;
    if (got->dtype > MT_F16) want.dtype = param->dtype;
    mt_tensor_format(has, got);
    mt_tensor_format(must, &want);
    return MT_FAIL(MT_EDAMAGED,
                   "checkpoint '%s': tensor '%s' is %s, must be %s by its configuration", path,
                   part->name, has, must);
}

static mt_status check_parts(exporter *out, const mt_param_store *params)
{
    for (int64_t i = 0; i < mt_param_store_count(params); i++) {
        const mt_param *param = mt_param_store_get(params, i);
        for (int64_t j = 0; j < param->part_count; j++)
            MT_TRY(check_part(out, param, &param->parts[j]));
    }
    for (int64_t i = 0; i < mt_checkpoint_count(out->checkpoint); i++)
        MT_REQUIRE(out->placed[i], MT_EDAMAGED,
                   "checkpoint '%s': tensor '%s' has no place in the %s of its configuration",
                   mt_checkpoint_path(out->checkpoint), mt_checkpoint_name(out->checkpoint, i),
                   mt_checkpoint_get_meta(out->checkpoint)->config.architecture->model_type);
    return MT_OK;
}

/* The model's layout is needed, not its memory. */
static mt_status check_tensors(exporter *out)
{
    mt_device *plan;
    mt_model *model;
    MT_TRY(mt_device_open(&plan, "plan", NULL, 1));
    mt_status status = mt_model_create(
        &model, plan, &mt_checkpoint_get_meta(out->checkpoint)->config, MT_F32, 1, false, NULL);
    if (status == MT_OK) {
        status = check_parts(out, mt_model_params(model));
        mt_model_destroy(&model);
    }
    mt_device_destroy(&plan);
    return status;
}

/* ---- the whole ---------------------------------------------------------------------------------
 */

/* Neither among a checkpoint's files nor in a folder beside them, which goes with it. */
static mt_status check_place(const char *dir)
{
    char path[MT_PATH_BYTES];
    MT_TRY(mt_path_format(path, "%s/config.json", dir));
    MT_TRY(mt_file_check_place(path));
    return mt_file_check_place(dir);
}

static mt_status write_config(const mt_checkpoint *checkpoint, const char *dir, mt_dtype dtype)
{
    const mt_checkpoint_meta *meta = mt_checkpoint_get_meta(checkpoint);
    char path[MT_PATH_BYTES], *text;
    MT_TRY(mt_path_format(path, "%s/config.json", dir));
    MT_TRY(mt_hf_config_format(&text, &meta->config, dtype,
                               meta->source_config[0] ? meta->source_config : NULL, false));
    size_t n = strlen(text);
    text[n] = '\n'; /* in place of the NUL */
    mt_status status = mt_file_write_all(path, text, n + 1);
    free(text);
    return status;
}

static mt_status find_left_out(mt_hf_left_out *left, mt_checkpoint *c)
{
    const mt_model_config *m = &mt_checkpoint_get_meta(c)->config;
    mt_tensor bias;
    mt_status status = MT_OK;
    bool any;
    *left = (mt_hf_left_out){ .capacity_factor = m->capacity_factor };
    if (m->architecture->qk_norm == MT_QK_NORM_PROJECTION &&
        m->head_dim * m->num_attention_heads != m->hidden_size)
        left->head_dim = m->head_dim;
    MT_TRY(mt_checkpoint_has(c, "/state/router_bias", &any));
    float *values = calloc((size_t)m->num_experts + 1, sizeof *values);
    MT_REQUIRE(values, MT_ENOMEM, "no memory for %lld biases", (long long)m->num_experts);
    for (int64_t i = 0, moe_layers = 0; any && i < m->num_hidden_layers; i++) {
        char name[32];
        if (!mt_model_layer_is_moe(m, i)) continue;
        snprintf(name, sizeof name, "%lld", (long long)moe_layers++);
        MT_TRY_CLEANUP(mt_checkpoint_tensor(c, "/state/router_bias", name, &bias));
        bias.data = values; /* where it will be read to */
        MT_TRY_CLEANUP(mt_tensor_check(&bias, "router bias", MT_F32, 1, &m->num_experts));
        MT_TRY_CLEANUP(mt_checkpoint_read(c, "/state/router_bias", name, &bias));
        for (int64_t e = 0; e < m->num_experts; e++) left->router_bias |= values[e] != 0;
    }
cleanup:
    free(values);
    return status;
}

mt_status mt_hf_export_checkpoint(const char *dir, mt_checkpoint *checkpoint, int64_t shard_bytes,
                                  mt_hf_left_out *left)
{
    exporter out = { .checkpoint = checkpoint };
    mt_st_entry *entries = NULL;
    bool made = false;
    int lock = -1; /* two exports at once would mix their files */
    mt_status status;
    mt_tensor embed;
    MT_TRY_CLEANUP(check_place(dir));
    if (left) MT_TRY_CLEANUP(find_left_out(left, out.checkpoint));
    int64_t count = mt_checkpoint_count(out.checkpoint);
    out.tensors = calloc((size_t)(count + 1), sizeof *out.tensors);
    out.placed = calloc((size_t)(count + 1), sizeof *out.placed);
    entries = calloc((size_t)(count + 1), sizeof *entries);
    if (!out.tensors || !out.placed || !entries) {
        status = MT_FAIL(MT_ENOMEM, "no memory for %lld tensors", (long long)count);
        goto cleanup;
    }
    MT_TRY_CLEANUP(describe_tensors(&out, entries));
    MT_TRY_CLEANUP(check_tensors(&out));
    MT_TRY_CLEANUP(
        mt_checkpoint_tensor(out.checkpoint, "/model", "model.embed_tokens.weight", &embed));
    made = !mt_path_exists(dir);
    MT_TRY_CLEANUP(mt_dir_create(dir));
    MT_TRY_CLEANUP(mt_dir_lock(&lock, dir));
    MT_TRY_CLEANUP(mt_safetensors_write_dir(dir, entries, count, shard_bytes, fill, &out));
    MT_TRY_CLEANUP(write_config(out.checkpoint, dir, embed.dtype));
cleanup:
    if (status != MT_OK && made && lock >= 0) rmdir(dir); /* where nothing is in it */
    if (lock >= 0) close(lock);
    free(entries);
    free(out.placed);
    free(out.tensors);
    return status;
}

mt_status mt_hf_export(const char *dir, const char *checkpoint, int64_t shard_bytes,
                       mt_hf_left_out *left)
{
    mt_checkpoint *c;
    MT_TRY(mt_checkpoint_open(&c, checkpoint));
    mt_status status = mt_hf_export_checkpoint(dir, c, shard_bytes, left);
    mt_checkpoint_close(&c);
    return status == MT_OK ? MT_OK : mt_error_pass(status, __FILE__, __LINE__);
}
