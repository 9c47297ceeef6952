/* What a checkpoint holds: writing, reading, restoring. */
#include "train/checkpoint.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "train/checkpoint_priv.h"
#include "train/hf.h"

_Static_assert((int)MT_CHECKPOINT_PATH == (int)MT_PATH_BYTES, "paths of one length");

enum { MAX_DATASET_NAME = 1024 };

struct mt_checkpoint {
    char path[MT_PATH_BYTES];
    mt_h5 *file;
    mt_checkpoint_meta meta;
    char **names;
    int64_t count;
};

/* Fields of the step state, as attributes of /optim. */
typedef struct step_field {
    const char *name;
    size_t offset;
    bool integer; /* int64_t, else double */
} step_field;

#define FIELD(field) offsetof(struct mt_step_state, field)
static const step_field step_fields[] = {
    { "lr", FIELD(lr), false },
    { "power1", FIELD(power1), false },
    { "power2", FIELD(power2), false },
    { "bias1", FIELD(bias1), false },
    { "bias2", FIELD(bias2), false },
    { "clip", FIELD(clip), false },
    { "grad_norm", FIELD(grad_norm), false },
    { "skip", FIELD(skip), true },
    { "applied", FIELD(applied), true },
    { "skipped", FIELD(skipped), true },
    { "skipped_in_a_row", FIELD(skipped_in_a_row), true },
};
enum { STEP_FIELDS = sizeof step_fields / sizeof *step_fields };
_Static_assert(sizeof(struct mt_step_state) == STEP_FIELDS * 8, "a row for every field");

/* ---- parts -------------------------------------------------------------------------------------
 */

mt_tensor mt_part_tensor(const mt_param *param, const mt_param_part *part, mt_dtype dtype)
{
    int64_t k = param->group.k;
    return part->ndim == 1 ? mt_tensor_1d(NULL, dtype, part->rows * k)
                           : mt_tensor_2d(NULL, dtype, part->rows, k);
}

int64_t mt_part_offset(const mt_param *param, const mt_param_part *part)
{
    return param->offset + (part->member * param->group.m + part->row) * param->group.k;
}

/* Calls `visit` for every part, with memory for its largest one, in the params' dtype. Fails when
 * the parts of a param do not add up to it: something would be left out. */
typedef mt_status visit_part(void *user, const mt_param *param, const mt_param_part *part,
                             void *buffer);

static mt_status for_each_part(const mt_param_store *params, visit_part *visit, void *user)
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
        MT_REQUIRE(covered == mt_param_count(p), MT_EINTERNAL,
                   "the parts of '%s' have %lld elements of its %lld", p->name, (long long)covered,
                   (long long)mt_param_count(p));
    }
    void *buffer = malloc(most + sizeof(int32_t));
    MT_REQUIRE(buffer, MT_ENOMEM, "no memory for a tensor of %zu bytes", most);
    mt_status status = MT_OK;
    for (int64_t i = 0; i < n && status == MT_OK; i++) {
        const mt_param *p = mt_param_store_get(params, i);
        for (int64_t j = 0; j < p->part_count && status == MT_OK; j++)
            status = visit(user, p, &p->parts[j], buffer);
    }
    free(buffer);
    return status;
}

static mt_status dataset_name(char text[MAX_DATASET_NAME], const char *group, const char *name)
{
    int n = snprintf(text, MAX_DATASET_NAME, "%s/%s", group, name);
    MT_REQUIRE(n < MAX_DATASET_NAME && !strchr(name, '/'), MT_EINVAL,
               "'%.80s' is too long for a tensor's name, or has a '/'", name);
    return MT_OK;
}

static void bias_name(char text[32], int64_t layer)
{
    snprintf(text, 32, "%lld", (long long)layer);
}

/* The type that a part is stored in: of its master, or of a moment. */
static mt_dtype part_dtype(const mt_checkpoint_state *s, const mt_param *param, const void *moment)
{
    return moment ? mt_moments_dtype(s->moments, param->dtype) : param->dtype;
}

/* ---- ranks -------------------------------------------------------------------------------------
 */

bool mt_checkpoint_leads(const mt_checkpoint_state *s)
{
    return !s->comm || mt_comm_rank(s->comm) == 0;
}

/* Integers: every pattern of bits comes through a sum with zeros. */
mt_status mt_checkpoint_collect(const mt_checkpoint_state *s, void *whole, size_t bytes)
{
    int64_t words = (int64_t)((bytes + sizeof(int32_t) - 1) / sizeof(int32_t));
    if (!s->comm) return MT_OK;
    return mt_comm_all_reduce(s->comm, NULL, whole, words, MT_I32, MT_REDUCE_SUM,
                              "a checkpoint's tensor");
}

/* What this rank owns of a part: its first element in the part, how many, and where they begin
 * among the own ones of the param. */
static int64_t own_of(const mt_param *param, const mt_param_part *part, int64_t *first,
                      int64_t *from)
{
    int64_t begin = (part->member * param->group.m + part->row) * param->group.k;
    int64_t end = begin + part->rows * param->group.k, own = param->own.first;
    int64_t low = begin > own ? begin : own, high = own + param->own.count;
    if (end < high) high = end;
    *first = low - begin, *from = low - own;
    return high > low ? high - low : 0;
}

/* ---- writing -----------------------------------------------------------------------------------
 */

typedef struct part_writer {
    mt_h5 *file;
    const mt_checkpoint_state *state;
    const char *group;
    const char *moment; /* device, flat; NULL: masters */
} part_writer;

static mt_status write_part(void *user, const mt_param *param, const mt_param_part *part,
                            void *buffer)
{
    const part_writer *w = user;
    const mt_checkpoint_state *s = w->state;
    char name[MAX_DATASET_NAME];
    mt_tensor t = mt_part_tensor(param, part, part_dtype(s, param, w->moment));
    size_t size = mt_dtype_size(t.dtype);
    int64_t first, from, count = own_of(param, part, &first, &from);
    char *to = (char *)buffer + (size_t)first * size;
    if (s->comm) memset(buffer, 0, mt_tensor_bytes(&t) + sizeof(int32_t));
    if (count && w->moment)
        MT_TRY(mt_device_copy(mt_param_store_device(s->params), to,
                              w->moment + (size_t)(param->offset + from) * size,
                              (size_t)count * size));
    else if (count)
        MT_TRY(mt_param_read_master(s->params, param, param->own.first + from, count, to));
    MT_TRY(mt_checkpoint_collect(s, buffer, mt_tensor_bytes(&t)));
    if (!w->file) return MT_OK;
    MT_TRY(dataset_name(name, w->group, part->name));
    return mt_h5_write(w->file, name, t.dtype, t.ndim, t.shape, buffer);
}

static mt_status write_parts(mt_h5 *file, const mt_checkpoint_state *s, const char *group,
                             const void *moment)
{
    part_writer w = { file, s, group, moment };
    if (file) MT_TRY(mt_h5_group(file, group));
    return for_each_part(s->params, write_part, &w);
}

static mt_status write_step_state(mt_h5 *file, const mt_checkpoint_state *s)
{
    struct mt_step_state state;
    MT_TRY(mt_device_copy(mt_param_store_device(s->params), &state, s->step_state, sizeof state));
    for (int i = 0; i < STEP_FIELDS; i++) {
        const step_field *f = &step_fields[i];
        const void *at = (const char *)&state + f->offset;
        MT_TRY(f->integer ? mt_h5_set_i64(file, "/optim", f->name, *(const int64_t *)at)
                          : mt_h5_set_f64(file, "/optim", f->name, *(const double *)at));
    }
    return mt_h5_set_string(file, "/optim", "master", "/model");
}

static mt_status write_router_bias(mt_h5 *file, const mt_checkpoint_state *s)
{
    int64_t experts = s->config->num_experts;
    char name[MAX_DATASET_NAME], layer[32];
    mt_status status = MT_OK;
    if (!s->moe_layers) return MT_OK;
    MT_TRY(mt_h5_group(file, "/state/router_bias"));
    float *bias = malloc((size_t)(experts + 1) * sizeof *bias);
    MT_REQUIRE(bias, MT_ENOMEM, "no memory for %lld biases", (long long)experts);
    for (int64_t i = 0; i < s->moe_layers; i++) {
        bias_name(layer, i);
        MT_TRY_CLEANUP(dataset_name(name, "/state/router_bias", layer));
        MT_TRY_CLEANUP(mt_device_copy(mt_param_store_device(s->params), bias, s->router_bias[i],
                                      (size_t)experts * sizeof *bias));
        MT_TRY_CLEANUP(mt_h5_write(file, name, MT_F32, 1, &experts, bias));
    }
cleanup:
    free(bias);
    return status;
}

mt_status mt_checkpoint_write_meta(mt_h5 *file, const mt_checkpoint_state *s,
                                   const mt_checkpoint_info *info)
{
    const mt_device *device = mt_param_store_device(s->params);
    char *config;
    MT_TRY(mt_hf_config_format(&config, s->config, MT_DTYPE_COUNT, NULL, true));
    const struct {
        const char *name, *text;
    } texts[] = {
        { "config", config },
        { "run_config", info->run_config },
        { "source_config", info->source_config },
        { "git_revision", info->git_revision },
        { "corpus", info->corpus },
        { "kernel_set", s->m ? device->kernel_set : NULL },
        { "compute", s->m ? mt_dtype_name(s->compute) : NULL },
    };
    mt_status status;
    MT_TRY_CLEANUP(mt_h5_group(file, "/meta"));
    MT_TRY_CLEANUP(mt_h5_set_i64(file, "/meta", "format_version", MT_CHECKPOINT_VERSION));
    MT_TRY_CLEANUP(mt_h5_set_i64(file, "/meta", "step", s->step));
    MT_TRY_CLEANUP(mt_h5_set_u64(file, "/meta", "seed", s->seed));
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        MT_TRY_CLEANUP(
            mt_h5_set_string(file, "/meta", texts[i].name, texts[i].text ? texts[i].text : ""));
cleanup:
    free(config);
    return status;
}

static mt_status write_state(mt_h5 *file, const mt_checkpoint_state *s,
                             const mt_checkpoint_info *info)
{
    MT_TRY(mt_checkpoint_write_meta(file, s, info));
    MT_TRY(write_parts(file, s, "/model", NULL));
    MT_TRY(write_router_bias(file, s));
    if (!s->m) return MT_OK;
    MT_TRY(mt_checkpoint_write_delayed(file, s));
    MT_TRY(mt_checkpoint_write_nans(file, s));
    MT_TRY(write_parts(file, s, "/optim/m", s->m));
    MT_TRY(write_parts(file, s, "/optim/v", s->v));
    MT_TRY(mt_checkpoint_write_moments(file, s));
    MT_TRY(write_step_state(file, s));
    MT_TRY(mt_h5_group(file, "/rng"));
    MT_TRY(mt_h5_set_u64(file, "/rng", "seed", s->seed));
    MT_TRY(mt_h5_set_i64(file, "/rng", "step", s->step));
    MT_TRY(mt_h5_group(file, "/data"));
    return mt_h5_set_i64(file, "/data", "step", s->step);
}

/* What another rank gives to write_state, in its order. */
static mt_status send_state(const mt_checkpoint_state *s)
{
    MT_TRY(write_parts(NULL, s, "/model", NULL));
    if (!s->m) return MT_OK;
    MT_TRY(mt_checkpoint_write_nans(NULL, s));
    MT_TRY(write_parts(NULL, s, "/optim/m", s->m));
    MT_TRY(write_parts(NULL, s, "/optim/v", s->v));
    return mt_checkpoint_write_moments(NULL, s);
}

mt_status mt_checkpoint_write(const char *path, const mt_checkpoint_state *state,
                              const mt_checkpoint_info *info)
{
    mt_checkpoint_stage stage;
    if (!mt_checkpoint_leads(state)) return send_state(state);
    mt_status status = mt_checkpoint_stage_begin(&stage, path);
    if (status == MT_OK) status = write_state(stage.file, state, info);
    if (status == MT_OK) status = mt_checkpoint_stage_publish(&stage);
    mt_checkpoint_stage_abandon(&stage);
    return status == MT_OK ? MT_OK : mt_error_pass(status, __FILE__, __LINE__);
}

/* ---- opening -----------------------------------------------------------------------------------
 */

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
    return mt_hf_config_parse(&m->config, m->config_text, strlen(m->config_text), c->path, true);
}

mt_status mt_checkpoint_open(mt_checkpoint **checkpoint, const char *path)
{
    char file[MT_PATH_BYTES];
    mt_status status;
    mt_checkpoint *c = calloc(1, sizeof *c);
    *checkpoint = NULL;
    MT_REQUIRE(c, MT_ENOMEM, "no memory to open checkpoint '%s'", path);
    MT_TRY_CLEANUP(mt_path_format(c->path, "%s", path));
    MT_TRY_CLEANUP(mt_checkpoint_verify(path));
    MT_TRY_CLEANUP(mt_path_format(file, "%s/model.h5", path));
    MT_TRY_CLEANUP(mt_h5_open(&c->file, file));
    MT_TRY_CLEANUP(read_meta(c));
    MT_TRY_CLEANUP(mt_h5_list(c->file, "/model", &c->names, &c->count));
cleanup:
    *checkpoint = c;
    if (status != MT_OK) mt_checkpoint_close(checkpoint);
    return status;
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
    char path[MAX_DATASET_NAME];
    mt_h5_info info;
    MT_TRY(dataset_name(path, group, name));
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
    char path[MAX_DATASET_NAME];
    MT_TRY(dataset_name(path, group, name));
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
    const mt_checkpoint_state *state;
    const char *group;
    char *moment;  /* device, flat; NULL: masters */
    bool convert;  /* another float dtype is converted, else refused */
    int64_t found; /* parts */
} part_reader;

static bool is_float(mt_dtype dtype)
{
    return dtype == MT_F64 || dtype == MT_F32 || dtype == MT_BF16 || dtype == MT_F16;
}

/* Describes a part's tensor and fails unless its shape and dtype fit. */
static mt_status check_part(void *user, const mt_param *param, const mt_param_part *part,
                            void *buffer)
{
    part_reader *r = user;
    (void)buffer;
    mt_dtype dtype = part_dtype(r->state, param, r->moment);
    mt_tensor got, want = mt_part_tensor(param, part, dtype);
    MT_TRY(mt_checkpoint_tensor(r->checkpoint, r->group, part->name, &got));
    bool same =
        got.ndim == want.ndim && (got.dtype == want.dtype || (r->convert && is_float(got.dtype)));
    for (int i = 0; same && i < want.ndim; i++) same = got.shape[i] == want.shape[i];
    r->found++;
    if (same) return MT_OK;
    char has[96], must[96];
    mt_tensor_format(has, &got);
    mt_tensor_format(must, &want);
    return MT_FAIL(MT_EDAMAGED, "checkpoint '%s': %s/%s is %s, must be %s", r->checkpoint->path,
                   r->group, part->name, has, must);
}

/* What this rank owns of a part, from host memory to where it belongs. */
static mt_status place_part(const part_reader *r, const mt_param *param, const mt_param_part *part,
                            const void *from)
{
    mt_param_store *params = r->state->params;
    size_t size = mt_dtype_size(part_dtype(r->state, param, r->moment));
    int64_t first, to, count = own_of(param, part, &first, &to);
    const char *own = (const char *)from + (size_t)first * size;
    if (!r->moment) return mt_param_write_master(params, param, param->own.first + to, count, own);
    return mt_device_copy(mt_param_store_device(params),
                          r->moment + (size_t)(param->offset + to) * size, own,
                          (size_t)count * size);
}

static mt_status read_part(void *user, const mt_param *param, const mt_param_part *part,
                           void *buffer)
{
    part_reader *r = user;
    mt_tensor t;
    int64_t count = part->rows * param->group.k;
    mt_dtype dtype = part_dtype(r->state, param, r->moment);
    MT_TRY(mt_checkpoint_tensor(r->checkpoint, r->group, part->name, &t));
    if (t.dtype == dtype) {
        t.data = buffer;
        MT_TRY(mt_checkpoint_read(r->checkpoint, r->group, part->name, &t));
        return place_part(r, param, part, buffer);
    }
    t.data = malloc(mt_tensor_bytes(&t));
    MT_REQUIRE(t.data, MT_ENOMEM, "no memory for a tensor of %zu bytes", mt_tensor_bytes(&t));
    mt_status status = mt_checkpoint_read(r->checkpoint, r->group, part->name, &t);
    for (int64_t i = 0; status == MT_OK && i < count; i++)
        mt_store_f64(buffer, dtype, i, mt_load_f64(t.data, t.dtype, i));
    if (status == MT_OK) status = place_part(r, param, part, buffer);
    free(t.data);
    return status;
}

/* Passes over /model, and over the moments where there are any. */
static mt_status for_each_group(mt_checkpoint_state *s, mt_checkpoint *c, visit_part *visit)
{
    part_reader r = { .checkpoint = c, .state = s, .group = "/model", .convert = !s->m };
    MT_TRY(for_each_part(s->params, visit, &r));
    MT_REQUIRE(visit != check_part || r.found == c->count, MT_EDAMAGED,
               "checkpoint '%s' has %lld tensors, the model %lld", c->path, (long long)c->count,
               (long long)r.found);
    if (!s->m) return MT_OK;
    r.group = "/optim/m", r.moment = s->m;
    MT_TRY(for_each_part(s->params, visit, &r));
    r.group = "/optim/v", r.moment = s->v;
    return for_each_part(s->params, visit, &r);
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
        bias_name(name, i);
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

static mt_status read_step_state(struct mt_step_state *state, mt_checkpoint *c)
{
    for (int i = 0; i < STEP_FIELDS; i++) {
        const step_field *f = &step_fields[i];
        void *at = (char *)state + f->offset;
        MT_TRY(f->integer ? mt_h5_get_i64(c->file, "/optim", f->name, at)
                          : mt_h5_get_f64(c->file, "/optim", f->name, at));
    }
    return MT_OK;
}

mt_status mt_checkpoint_restore(mt_checkpoint_state *state, mt_checkpoint *checkpoint)
{
    struct mt_step_state step_state;
    MT_REQUIRE(!state->m || checkpoint->meta.training, MT_ECONFIG,
               "checkpoint '%s' is a model without optimizer state: a run cannot go on from it",
               checkpoint->path);
    if (state->m) MT_TRY(mt_checkpoint_check_moments(checkpoint->file, state, checkpoint->path));
    MT_TRY(for_each_group(state, checkpoint, check_part));
    MT_TRY(router_bias(state, checkpoint, false));
    if (state->m) MT_TRY(mt_checkpoint_delayed(state, checkpoint, false));
    if (state->m) MT_TRY(read_step_state(&step_state, checkpoint));
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
