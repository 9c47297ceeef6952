/* A checkpoint to a Hugging Face directory. */
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

mt_status mt_hf_export(const char *dir, const char *checkpoint, int64_t shard_bytes)
{
    exporter out = { NULL, NULL };
    mt_st_entry *entries = NULL;
    int lock = -1; /* two exports at once would mix their files */
    mt_status status;
    mt_tensor embed;
    MT_TRY_CLEANUP(mt_checkpoint_open(&out.checkpoint, checkpoint));
    int64_t count = mt_checkpoint_count(out.checkpoint);
    out.tensors = calloc((size_t)(count + 1), sizeof *out.tensors);
    entries = calloc((size_t)(count + 1), sizeof *entries);
    if (!out.tensors || !entries) {
        status = MT_FAIL(MT_ENOMEM, "no memory for %lld tensors", (long long)count);
        goto cleanup;
    }
    MT_TRY_CLEANUP(
        mt_checkpoint_tensor(out.checkpoint, "/model", "model.embed_tokens.weight", &embed));
    MT_TRY_CLEANUP(mt_dir_create(dir));
    MT_TRY_CLEANUP(mt_dir_lock(&lock, dir));
    MT_TRY_CLEANUP(write_tensors(&out, entries, dir, shard_bytes));
    MT_TRY_CLEANUP(write_config(out.checkpoint, dir, embed.dtype));
cleanup:
    if (lock >= 0) close(lock);
    free(entries);
    free(out.tensors);
    mt_checkpoint_close(&out.checkpoint);
    return status;
}
