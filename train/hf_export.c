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

static mt_status write_tensors(exporter *out, mt_st_entry *entries, const char *dir,
                               int64_t shard_bytes)
{
    int64_t count = mt_checkpoint_count(out->checkpoint);
    for (int64_t i = 0; i < count; i++) {
        const char *name = mt_checkpoint_name(out->checkpoint, i);
        mt_tensor *t = &out->tensors[i];
        MT_TRY(mt_checkpoint_tensor(out->checkpoint, "/model", name, t));
        entries[i] = (mt_st_entry){ name, t->dtype, t->ndim, { 0 } };
        memcpy(entries[i].shape, t->shape, sizeof t->shape);
    }
    return mt_safetensors_write_dir(dir, entries, count, shard_bytes, fill, out);
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
    exporter out = { checkpoint, NULL };
    mt_st_entry *entries = NULL;
    bool made = false;
    int lock = -1; /* two exports at once would mix their files */
    mt_status status;
    mt_tensor embed;
    if (left) MT_TRY_CLEANUP(find_left_out(left, out.checkpoint));
    int64_t count = mt_checkpoint_count(out.checkpoint);
    out.tensors = calloc((size_t)(count + 1), sizeof *out.tensors);
    entries = calloc((size_t)(count + 1), sizeof *entries);
    if (!out.tensors || !entries) {
        status = MT_FAIL(MT_ENOMEM, "no memory for %lld tensors", (long long)count);
        goto cleanup;
    }
    MT_TRY_CLEANUP(
        mt_checkpoint_tensor(out.checkpoint, "/model", "model.embed_tokens.weight", &embed));
    made = !mt_path_exists(dir);
    MT_TRY_CLEANUP(mt_dir_create(dir));
    MT_TRY_CLEANUP(mt_dir_lock(&lock, dir));
    MT_TRY_CLEANUP(write_tensors(&out, entries, dir, shard_bytes));
    MT_TRY_CLEANUP(write_config(out.checkpoint, dir, embed.dtype));
cleanup:
    if (status != MT_OK && made && lock >= 0) rmdir(dir); /* where nothing is in it */
    if (lock >= 0) close(lock);
    free(entries);
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
