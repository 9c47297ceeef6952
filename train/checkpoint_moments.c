/* The storage form of moments in a checkpoint, and their scales. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "train/checkpoint_priv.h"

/* ---- scales ------------------------------------------------------------------------------------
 */

typedef enum direction { WRITE, CHECK, READ } direction;

/* device_scales: of the blocks that this rank owns of the param. */
static mt_status move_scales_of(mt_h5 *file, const mt_checkpoint_state *s, direction how,
                                const char *group, const mt_param *p, float *device_scales)
{
    mt_device *device = mt_param_store_device(s->params);
    int64_t blocks = mt_moments_blocks(s->moments, mt_param_count(p));
    size_t bytes = (size_t)blocks * sizeof(float);
    size_t own = (size_t)mt_moments_blocks(s->moments, p->own.count) * sizeof(float);
    char name[512];
    mt_h5_info info;
    int n = snprintf(name, sizeof name, "%s/%s", group, p->name);
    MT_REQUIRE(n < (int)sizeof name && !strchr(p->name, '/'), MT_EINVAL,
               "'%.80s' is too long for a tensor's name, or has a '/'", p->name);
    if (how == CHECK) return mt_h5_expect(file, name, MT_F32, 1, &blocks, &info);
    float *host = calloc(1, bytes + 1);
    MT_REQUIRE(host, MT_ENOMEM, "no memory for the scales of %s", p->name);
    float *owned = host + mt_moments_blocks(s->moments, p->own.first);
    mt_status status = MT_OK;
    if (how == WRITE) {
        MT_TRY_CLEANUP(mt_device_copy(device, owned, device_scales, own));
        MT_TRY_CLEANUP(mt_checkpoint_collect(s, host, bytes));
        if (file) MT_TRY_CLEANUP(mt_h5_write(file, name, MT_F32, 1, &blocks, host));
    } else {
        MT_TRY_CLEANUP(mt_h5_expect(file, name, MT_F32, 1, &blocks, &info));
        MT_TRY_CLEANUP(mt_h5_read(file, name, &info, host));
        MT_TRY_CLEANUP(mt_device_copy(device, device_scales, owned, own));
    }
cleanup:
    free(host);
    return status;
}

static mt_status move_scales(mt_h5 *file, const mt_checkpoint_state *s, direction how)
{
    static const char *const groups[2] = { "/optim/m_scales", "/optim/v_scales" };
    float *const scales[2] = { s->m_scales, s->v_scales };
    if (!mt_moments_forms[s->moments].block) return MT_OK;
    for (int k = 0; k < 2; k++) {
        if (how == WRITE && file) MT_TRY(mt_h5_group(file, groups[k]));
        for (int64_t i = 0; i < mt_param_store_count(s->params); i++) {
            const mt_param *p = mt_param_store_get(s->params, i);
            MT_TRY(move_scales_of(file, s, how, groups[k], p,
                                  scales[k] + mt_moments_blocks(s->moments, p->offset)));
        }
    }
    return MT_OK;
}

/* ---- the form ----------------------------------------------------------------------------------
 */

mt_status mt_checkpoint_write_moments(mt_h5 *file, const mt_checkpoint_state *s)
{
    if (file)
        MT_TRY(mt_h5_set_string(file, "/optim", "moments", mt_moments_forms[s->moments].name));
    return move_scales(file, s, WRITE);
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
    return move_scales(file, s, CHECK);
}

mt_status mt_checkpoint_read_moments(mt_h5 *file, const mt_checkpoint_state *s)
{
    return move_scales(file, s, READ);
}
