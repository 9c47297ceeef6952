/* The optimizer in a checkpoint: its step state, the storage form of moments, their scales. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "train/checkpoint_priv.h"

/* ---- step state ---------------------------------------------------------------------------------
 */

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

mt_status mt_checkpoint_write_step(mt_h5 *file, const mt_checkpoint_state *s)
{
    struct mt_step_state state;
    MT_TRY(mt_device_copy(mt_param_store_device(s->params), &state, s->step_state, sizeof state));
    for (int i = 0; i < STEP_FIELDS; i++) {
        const step_field *f = &step_fields[i];
        const void *at = (const char *)&state + f->offset;
        MT_TRY(f->integer ? mt_h5_set_i64(file, "/optim", f->name, *(const int64_t *)at)
                          : mt_h5_set_f64(file, "/optim", f->name, *(const double *)at));
    }
    MT_TRY(mt_h5_set_i64(file, "/optim", "dropped", s->dropped));
    return mt_h5_set_string(file, "/optim", "master", "/model");
}

/* Older files do not say what was dropped. */
mt_status mt_checkpoint_read_step(struct mt_step_state *state, mt_checkpoint_state *s, mt_h5 *file)
{
    bool has;
    s->dropped = 0;
    for (int i = 0; i < STEP_FIELDS; i++) {
        const step_field *f = &step_fields[i];
        void *at = (char *)state + f->offset;
        MT_TRY(f->integer ? mt_h5_get_i64(file, "/optim", f->name, at)
                          : mt_h5_get_f64(file, "/optim", f->name, at));
    }
    MT_TRY(mt_h5_has_attribute(file, "/optim", "dropped", &has));
    return has ? mt_h5_get_i64(file, "/optim", "dropped", &s->dropped) : MT_OK;
}

/* ---- scales ------------------------------------------------------------------------------------
 */

/* Scales of a param: their tensor in a checkpoint, those that this rank owns, and where they are on
 * the device. */
typedef struct owned_scales {
    char name[MT_DATASET_NAME];
    int64_t blocks;
    mt_range own;
    float *device;
} owned_scales;

/* Of one of the two moments. */
static mt_status find_scales(owned_scales *x, const mt_checkpoint_state *s, int moment,
                             const mt_param *p)
{
    float *const scales[2] = { s->m_scales, s->v_scales };
    MT_TRY(mt_checkpoint_dataset(x->name, moment ? "/optim/v_scales" : "/optim/m_scales", p->name));
    x->blocks = mt_moments_blocks(s->moments, p->all_members * p->group.m * p->group.k);
    x->own.first = mt_moments_blocks(s->moments, mt_param_base(p) + p->own.first);
    x->own.count = mt_moments_blocks(s->moments, p->own.count);
    x->device = scales[moment] + mt_moments_blocks(s->moments, p->offset);
    return MT_OK;
}

/* Calls `visit` for the scales of each param, with host memory for those that this rank owns. */
typedef mt_status visit_scales(void *user, const owned_scales *scales, float *host);

static mt_status for_each_scales(const mt_checkpoint_state *s, visit_scales *visit, void *user)
{
    owned_scales x;
    if (!mt_moments_forms[s->moments].block) return MT_OK;
    for (int moment = 0; moment < 2; moment++)
        for (int64_t i = 0; i < mt_param_store_count(s->params); i++) {
            const mt_param *p = mt_param_store_get(s->params, i);
            MT_TRY(find_scales(&x, s, moment, p));
            float *host = malloc((size_t)(x.own.count + 1) * sizeof *host);
            MT_REQUIRE(host, MT_ENOMEM, "no memory for the scales of %s", p->name);
            mt_status status = visit(user, &x, host);
            free(host);
            MT_TRY(status);
        }
    return MT_OK;
}

static mt_status put_scales(void *user, const owned_scales *x, float *host)
{
    mt_checkpoint_shard *shard = user;
    mt_device *device = mt_param_store_device(shard->state->params);
    MT_TRY(mt_device_copy(device, host, x->device, (size_t)x->own.count * sizeof *host));
    return mt_checkpoint_put(shard, x->name, MT_F32, 1, &x->blocks, &x->own, x->own.count > 0,
                             host);
}

mt_status mt_checkpoint_put_scales(mt_checkpoint_shard *shard)
{
    return for_each_scales(shard->state, put_scales, shard);
}

static mt_status check_scales(void *file, const owned_scales *x, float *host)
{
    mt_h5_info info;
    (void)host;
    return mt_h5_expect(file, x->name, MT_F32, 1, &x->blocks, &info);
}

typedef struct scales_reader {
    mt_h5 *file;
    mt_device *device;
} scales_reader;

static mt_status read_scales(void *user, const owned_scales *x, float *host)
{
    const scales_reader *r = user;
    MT_TRY(mt_h5_read_slab(r->file, x->name, MT_F32, &x->own.first, &x->own.count, host));
    return mt_device_copy(r->device, x->device, host, (size_t)x->own.count * sizeof *host);
}

/* ---- the form ----------------------------------------------------------------------------------
 */

mt_status mt_checkpoint_write_moments(mt_h5 *file, const mt_checkpoint_state *s)
{
    return mt_h5_set_string(file, "/optim", "moments", mt_moments_forms[s->moments].name);
}

mt_status mt_checkpoint_check_moments(mt_h5 *file, const mt_checkpoint_state *s, const char *path)
{
    const char *ours = mt_moments_forms[s->moments].name;
    char *theirs = NULL;
    bool has;
    MT_TRY(mt_h5_has_attribute(file, "/optim", "moments", &has));
    if (has) MT_TRY(mt_h5_get_string(file, "/optim", "moments", &theirs));
    const char *form = has ? theirs : mt_moments_forms[MT_MOMENTS_REAL].name;
    mt_status status = MT_OK;
    if (strcmp(form, ours) != 0)
        status =
            MT_FAIL(MT_ECONFIG,
                    "checkpoint '%s' keeps its moments in %.40s, this run in %s: optim.moments "
                    "belongs to the run",
                    path, form, ours);
    free(theirs);
    MT_TRY(status);
    return for_each_scales(s, check_scales, file);
}

mt_status mt_checkpoint_read_moments(mt_h5 *file, const mt_checkpoint_state *s)
{
    scales_reader r = { file, mt_param_store_device(s->params) };
    return for_each_scales(s, read_scales, &r);
}
