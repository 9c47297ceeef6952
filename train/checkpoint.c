/* Checkpoints: reading and restoring. */
#include "train/checkpoint.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "train/checkpoint_priv.h"
#include "train/hf.h"

_Static_assert((int)MT_CHECKPOINT_PATH == (int)MT_PATH_BYTES, "paths of one length");

struct mt_checkpoint {
    char path[MT_PATH_BYTES];
    mt_h5 *file;
    mt_checkpoint_meta meta;
    char **names;
    int64_t count;
};

/* ---- opening -----------------------------------------------------------------------------------
 */

static mt_status read_tokens(mt_checkpoint *c)
{
    bool has;
    c->meta.tokens = -1;
    MT_TRY(mt_h5_exists(c->file, "/data", &has));
    if (has) MT_TRY(mt_h5_has_attribute(c->file, "/data", "tokens", &has));
    if (!has) return MT_OK;
    MT_TRY(mt_h5_get_i64(c->file, "/data", "tokens", &c->meta.tokens));
    MT_REQUIRE(c->meta.tokens >= 0, MT_EDAMAGED, "'%s': tokens of /data is %lld", c->path,
               (long long)c->meta.tokens);
    return MT_OK;
}

static mt_status read_meta(mt_checkpoint *c)
{
    mt_checkpoint_meta *m = &c->meta;
    const struct {
        const char *name;
        char **text;
    } texts[] = {
        { "config", &m->config_text },
        { "run_config", &m->run_config },
        { "source_config", &m->source_config },
        { "git_revision", &m->git_revision },
        { "kernel_set", &m->kernel_set },
        { "compute", &m->compute },
        { "corpus", &m->corpus },
    };
    int64_t version;
    MT_TRY(mt_h5_get_i64(c->file, "/meta", "format_version", &version));
    MT_REQUIRE(version == MT_CHECKPOINT_VERSION, MT_EDAMAGED,
               "'%s': format_version %lld, this program reads %d", c->path, (long long)version,
               MT_CHECKPOINT_VERSION);
    MT_TRY(mt_h5_get_i64(c->file, "/meta", "step", &m->step));
    MT_REQUIRE(m->step >= 0, MT_EDAMAGED, "'%s': step is %lld", c->path, (long long)m->step);
    MT_TRY(mt_h5_get_u64(c->file, "/meta", "seed", &m->seed));
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        MT_TRY(mt_h5_get_string(c->file, "/meta", texts[i].name, texts[i].text));
    MT_TRY(mt_h5_exists(c->file, "/optim", &m->training));
    MT_TRY(read_tokens(c));
    return mt_hf_config_parse(&m->config, m->config_text, strlen(m->config_text), c->path, true);
}

/* That DONE, which lists so many files, knows all that model.h5 shows. `hold`: they may be removed
 * at any time. */
static mt_status check_files(const mt_checkpoint *c, int64_t files, bool hold)
{
    char name[MT_SEAL_NAME];
    int64_t ranks = 0;
    bool has;
    MT_TRY(mt_h5_has_attribute(c->file, "/meta", "ranks", &has));
    if (has) MT_TRY(mt_h5_get_i64(c->file, "/meta", "ranks", &ranks));
    MT_REQUIRE(files == 1 + ranks, MT_EDAMAGED,
               "'%s/DONE' lists %lld files, model.h5 is of %lld ranks' beside itself", c->path,
               (long long)files, (long long)ranks);
    for (int rank = 0; hold && rank < ranks; rank++) {
        mt_checkpoint_shard_name(name, rank);
        MT_TRY(mt_h5_hold_beside(c->file, name));
    }
    return MT_OK;
}

mt_status mt_checkpoint_open_among(mt_checkpoint **checkpoint, const char *path, mt_comm *comm,
                                   bool hold)
{
    int64_t files;
    *checkpoint = NULL;
    MT_TRY(mt_checkpoint_verify(path, comm, &files));
    return mt_checkpoint_open_verified(checkpoint, path, files, comm, hold);
}

mt_status mt_checkpoint_open_verified(mt_checkpoint **checkpoint, const char *path, int64_t files,
                                      mt_comm *comm, bool hold)
{
    char file[MT_PATH_BYTES];
    mt_status status = MT_OK;
    mt_checkpoint *c = calloc(1, sizeof *c);
    if (!c) MT_TRY_CLEANUP(MT_FAIL(MT_ENOMEM, "no memory to open checkpoint '%s'", path));
    MT_TRY_CLEANUP(mt_path_format(c->path, "%s", path));
    MT_TRY_CLEANUP(mt_path_format(file, "%s/model.h5", path));
    MT_TRY_CLEANUP(mt_h5_open(&c->file, file));
    MT_TRY_CLEANUP(read_meta(c));
    MT_TRY_CLEANUP(check_files(c, files, hold));
    MT_TRY_CLEANUP(mt_h5_list(c->file, "/model", &c->names, &c->count));
cleanup:
    *checkpoint = c;
    status = mt_comm_agree(comm, status, "opening a checkpoint");
    if (status != MT_OK) mt_checkpoint_close(checkpoint);
    return status;
}

mt_status mt_checkpoint_open(mt_checkpoint **checkpoint, const char *path)
{
    return mt_checkpoint_open_among(checkpoint, path, NULL, true);
}

void mt_checkpoint_close(mt_checkpoint **checkpoint)
{
    mt_checkpoint *c = *checkpoint;
    if (!c) return;
    mt_checkpoint_meta *m = &c->meta;
    char *texts[] = { m->config_text, m->run_config, m->source_config, m->git_revision,
                      m->kernel_set,  m->compute,    m->corpus };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) free(texts[i]);
    mt_h5_names_free(&c->names, c->count);
    mt_h5_close(&c->file);
    free(c);
    *checkpoint = NULL;
}

const mt_checkpoint_meta *mt_checkpoint_get_meta(const mt_checkpoint *checkpoint)
{
    return &checkpoint->meta;
}

const char *mt_checkpoint_path(const mt_checkpoint *checkpoint)
{
    return checkpoint->path;
}

int64_t mt_checkpoint_count(const mt_checkpoint *checkpoint)
{
    return checkpoint->count;
}

const char *mt_checkpoint_name(const mt_checkpoint *checkpoint, int64_t i)
{
    return checkpoint->names[i];
}

mt_status mt_checkpoint_tensor(mt_checkpoint *checkpoint, const char *group, const char *name,
                               mt_tensor *tensor)
{
    char path[MT_DATASET_NAME];
    mt_h5_info info;
    MT_TRY(mt_checkpoint_dataset(path, group, name));
    MT_TRY(mt_h5_dataset_info(checkpoint->file, path, &info));
    MT_REQUIRE(info.type != MT_H5_U64, MT_EDAMAGED, "checkpoint '%s': %s is u64, not a tensor",
               checkpoint->path, path);
    *tensor = (mt_tensor){ .dtype = (mt_dtype)info.type, .ndim = info.ndim };
    memcpy(tensor->shape, info.shape, sizeof tensor->shape);
    return MT_OK;
}

mt_status mt_checkpoint_read(mt_checkpoint *checkpoint, const char *group, const char *name,
                             const mt_tensor *tensor)
{
    char path[MT_DATASET_NAME];
    MT_TRY(mt_checkpoint_dataset(path, group, name));
    mt_h5_info info = { .type = tensor->dtype, .ndim = tensor->ndim };
    memcpy(info.shape, tensor->shape, sizeof info.shape);
    return mt_h5_read(checkpoint->file, path, &info, tensor->data);
}

mt_status mt_checkpoint_read_model_config(const char *path, mt_model_config *config)
{
    mt_checkpoint *checkpoint;
    MT_TRY(mt_checkpoint_open(&checkpoint, path));
    *config = checkpoint->meta.config;
    mt_checkpoint_close(&checkpoint);
    return MT_OK;
}

/* ---- restoring ---------------------------------------------------------------------------------
 */

typedef struct part_reader {
    mt_checkpoint *checkpoint;
    mt_checkpoint_state *state;
    const char *group;
    char *moment;  /* device, flat; NULL: masters */
    bool convert;  /* another float dtype is converted, else refused */
    int64_t found; /* parts */
} part_reader;

/* Describes a part's tensor and fails unless its shape and dtype fit. */
static mt_status check_part(void *user, mt_param *param, const mt_param_part *part, void *buffer)
{
    part_reader *r = user;
    (void)buffer;
    mt_dtype dtype = mt_checkpoint_dtype(r->state, param, r->moment);
    mt_tensor got, want = mt_part_tensor(param, part, dtype);
    MT_TRY(mt_checkpoint_tensor(r->checkpoint, r->group, part->name, &got));
    bool same =
        got.ndim == want.ndim && (got.dtype == want.dtype || (r->convert && got.dtype <= MT_F16));
    for (int i = 0; same && i < want.ndim; i++) same = got.shape[i] == want.shape[i];
    r->found++;
    if (same) return MT_OK;
    char has[96], must[96];
    mt_tensor_format(has, &got);
    mt_tensor_format(must, &want);
    return MT_FAIL(MT_EDAMAGED, "checkpoint '%s': %s/%s is %s, must be %s", r->checkpoint->path,
                   r->group, part->name, has, must);
}

/* Reads the rows of a part that `own`, elements of it, lie in; *skip: elements before these. */
static mt_status read_rows(const part_reader *r, const char *name, const mt_tensor *t, mt_range own,
                           int64_t *skip)
{
    char path[MT_DATASET_NAME];
    int64_t k = t->ndim == 2 ? t->shape[1] : 1, row = own.first / k;
    const int64_t start[2] = { row, 0 };
    const int64_t count[2] = { (own.first + own.count - 1) / k + 1 - row, k };
    MT_TRY(mt_checkpoint_dataset(path, r->group, name));
    *skip = own.first - row * k;
    return mt_h5_read_slab(r->checkpoint->file, path, t->dtype, start, count, t->data);
}

/* What this rank owns of a part, from host memory to where it belongs. */
static mt_status place_part(const part_reader *r, mt_param *param, int64_t to, int64_t count,
                            const void *from)
{
    mt_param_store *params = r->state->params;
    size_t size = mt_dtype_size(mt_checkpoint_dtype(r->state, param, r->moment));
    if (!r->moment) return mt_param_write_master(params, param, param->own.first + to, count, from);
    return mt_device_copy(mt_param_store_device(params),
                          r->moment + (size_t)(param->offset + to) * size, from,
                          (size_t)count * size);
}

static mt_status read_part(void *user, mt_param *param, const mt_param_part *part, void *buffer)
{
    part_reader *r = user;
    int64_t to, skip;
    mt_range own = mt_checkpoint_own(param, part, &to);
    mt_dtype dtype = mt_checkpoint_dtype(r->state, param, r->moment);
    mt_tensor t = mt_part_tensor(param, part, dtype);
    if (!own.count) return MT_OK;
    if (r->convert) MT_TRY(mt_checkpoint_tensor(r->checkpoint, r->group, part->name, &t));
    if (t.dtype == dtype) {
        t.data = buffer;
        MT_TRY(read_rows(r, part->name, &t, own, &skip));
        return place_part(r, param, to, own.count,
                          (char *)buffer + (size_t)skip * mt_dtype_size(dtype));
    }
    t.data = malloc(mt_tensor_bytes(&t));
    MT_REQUIRE(t.data, MT_ENOMEM, "no memory for a tensor of %zu bytes", mt_tensor_bytes(&t));
    mt_status status = read_rows(r, part->name, &t, own, &skip);
    for (int64_t i = 0; status == MT_OK && i < own.count; i++)
        mt_store_f64(buffer, dtype, i, mt_load_f64(t.data, t.dtype, skip + i));
    if (status == MT_OK) status = place_part(r, param, to, own.count, buffer);
    free(t.data);
    return status;
}

/* Passes over /model, and over the moments where there are any. */
static mt_status for_each_group(mt_checkpoint_state *s, mt_checkpoint *c,
                                mt_checkpoint_visit *visit)
{
    part_reader r = { .checkpoint = c, .state = s, .group = "/model", .convert = !s->m };
    MT_TRY(mt_checkpoint_each_part(s->params, visit, &r));
    MT_REQUIRE(visit != check_part || r.found == c->count, MT_EDAMAGED,
               "checkpoint '%s' has %lld tensors, the model %lld", c->path, (long long)c->count,
               (long long)r.found);
    if (!s->m) return MT_OK;
    r.group = "/optim/m", r.moment = s->m;
    MT_TRY(mt_checkpoint_each_part(s->params, visit, &r));
    r.group = "/optim/v", r.moment = s->v;
    return mt_checkpoint_each_part(s->params, visit, &r);
}

mt_status mt_checkpoint_has(mt_checkpoint *c, const char *group, bool *has)
{
    return mt_h5_exists(c->file, group, has);
}

/* Models without a run's state may have no biases: theirs are 0. `read` false: only checks. */
static mt_status router_bias(mt_checkpoint_state *s, mt_checkpoint *c, bool read)
{
    int64_t experts = s->config->num_experts;
    char name[32];
    bool has;
    mt_status status = MT_OK;
    MT_TRY(mt_h5_exists(c->file, "/state/router_bias", &has));
    has |= c->meta.training; /* a run's biases cannot be missing */
    float *bias = calloc((size_t)(experts + 1), sizeof *bias);
    MT_REQUIRE(bias, MT_ENOMEM, "no memory for %lld biases", (long long)experts);
    for (int64_t i = 0; i < s->moe_layers; i++) {
        mt_tensor t = mt_tensor_1d(bias, MT_F32, experts), got;
        snprintf(name, sizeof name, "%lld", (long long)i);
        if (has) {
            MT_TRY_CLEANUP(mt_checkpoint_tensor(c, "/state/router_bias", name, &got));
            got.data = bias; /* where it will be read to */
            MT_TRY_CLEANUP(mt_tensor_check(&got, "router bias", MT_F32, 1, &experts));
        }
        if (!read) continue;
        if (has) MT_TRY_CLEANUP(mt_checkpoint_read(c, "/state/router_bias", name, &t));
        MT_TRY_CLEANUP(mt_device_copy(mt_param_store_device(s->params), s->router_bias[i], bias,
                                      (size_t)experts * sizeof *bias));
    }
cleanup:
    free(bias);
    return status;
}

mt_status mt_checkpoint_check_fit(mt_checkpoint_state *state, mt_checkpoint *checkpoint,
                                  struct mt_step_state *step)
{
    if (state->m) MT_TRY(mt_checkpoint_check_moments(checkpoint->file, state, checkpoint->path));
    MT_TRY(for_each_group(state, checkpoint, check_part));
    MT_TRY(router_bias(state, checkpoint, false));
    if (state->m) MT_TRY(mt_checkpoint_delayed(state, checkpoint, false));
    return state->m ? mt_checkpoint_read_step(step, state, checkpoint->file) : MT_OK;
}

mt_status mt_checkpoint_restore(mt_checkpoint_state *state, mt_checkpoint *checkpoint)
{
    struct mt_step_state step_state;
    MT_REQUIRE(
        !state->m || checkpoint->meta.training, MT_ECONFIG,
        "checkpoint '%s' is a model without optimizer state: a run cannot go on from it, but "
        "a new one can begin with it (train.init_from)",
        checkpoint->path);
    state->misfit = true; /* until all is found to fit */
    MT_TRY(mt_checkpoint_check_fit(state, checkpoint, &step_state));
    state->misfit = false;
    MT_TRY(for_each_group(state, checkpoint, read_part));
    if (state->m) MT_TRY(mt_checkpoint_read_moments(checkpoint->file, state));
    MT_TRY(router_bias(state, checkpoint, true));
    if (state->m) MT_TRY(mt_checkpoint_delayed(state, checkpoint, true));
    if (state->m)
        MT_TRY(mt_device_copy(mt_param_store_device(state->params), state->step_state, &step_state,
                              sizeof step_state));
    state->step = checkpoint->meta.step;
    state->seed = checkpoint->meta.seed;
    return MT_OK;
}
