/* Writing checkpoints. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "train/checkpoint_priv.h"
#include "train/hf.h"

typedef struct part_writer {
    mt_checkpoint_shard *shard;
    const char *group;
    const char *moment; /* device, flat; NULL: masters */
} part_writer;

static mt_status write_part(void *user, mt_param *param, const mt_param_part *part, void *buffer)
{
    const part_writer *w = user;
    const mt_checkpoint_state *s = w->shard->state;
    char name[MT_DATASET_NAME];
    mt_tensor t = mt_part_tensor(param, part, mt_checkpoint_dtype(s, param, w->moment));
    int64_t from;
    mt_range own = mt_checkpoint_own(param, part, &from);
    MT_TRY(mt_checkpoint_dataset(name, w->group, part->name));
    if (own.count && w->moment)
        MT_TRY(mt_device_copy(mt_param_store_device(s->params), buffer,
                              w->moment + (size_t)(param->offset + from) * mt_dtype_size(t.dtype),
                              (size_t)own.count * mt_dtype_size(t.dtype)));
    else if (own.count)
        MT_TRY(mt_param_read_master(s->params, param, param->own.first + from, own.count, buffer));
    return mt_checkpoint_put(w->shard, name, t.dtype, t.ndim, t.shape, &own, own.count > 0, buffer);
}

static mt_status write_parts(mt_checkpoint_shard *shard, const char *group, const void *moment)
{
    part_writer w = { shard, group, moment };
    return mt_checkpoint_each_part(shard->state->params, write_part, &w);
}

/* What is sharded. */
static mt_status write_tensors(mt_checkpoint_shard *shard)
{
    const mt_checkpoint_state *s = shard->state;
    MT_TRY(write_parts(shard, "/model", NULL));
    if (!s->m) return MT_OK;
    MT_TRY(write_parts(shard, "/optim/m", s->m));
    MT_TRY(write_parts(shard, "/optim/v", s->v));
    return mt_checkpoint_put_scales(shard);
}

static mt_status write_router_bias(mt_h5 *file, const mt_checkpoint_state *s)
{
    int64_t experts = s->config->num_experts;
    char name[MT_DATASET_NAME], layer[32];
    mt_status status = MT_OK;
    if (!s->moe_layers) return MT_OK;
    MT_TRY(mt_h5_group(file, "/state/router_bias"));
    float *bias = malloc((size_t)(experts + 1) * sizeof *bias);
    MT_REQUIRE(bias, MT_ENOMEM, "no memory for %lld biases", (long long)experts);
    for (int64_t i = 0; i < s->moe_layers; i++) {
        snprintf(layer, sizeof layer, "%lld", (long long)i);
        MT_TRY_CLEANUP(mt_checkpoint_dataset(name, "/state/router_bias", layer));
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

/* What the ranks have together, in host memory. */
typedef struct reduced {
    float *delayed;
    int64_t *nans;
} reduced;

/* What is not sharded. */
static mt_status write_state(mt_h5 *file, const mt_checkpoint_state *s,
                             const mt_checkpoint_info *info, const reduced *all)
{
    MT_TRY(mt_checkpoint_write_meta(file, s, info));
    MT_TRY(write_router_bias(file, s));
    if (!s->m) return MT_OK;
    MT_TRY(mt_checkpoint_write_delayed(file, s, all->delayed));
    MT_TRY(mt_checkpoint_write_nans(file, s, all->nans));
    MT_TRY(mt_h5_group(file, "/optim"));
    MT_TRY(mt_checkpoint_write_moments(file, s));
    MT_TRY(mt_checkpoint_write_step(file, s));
    MT_TRY(mt_h5_group(file, "/rng"));
    MT_TRY(mt_h5_set_u64(file, "/rng", "seed", s->seed));
    MT_TRY(mt_h5_set_i64(file, "/rng", "step", s->step));
    MT_TRY(mt_h5_group(file, "/data"));
    MT_TRY(mt_h5_set_i64(file, "/data", "step", s->step));
    return mt_h5_set_i64(file, "/data", "tokens", s->tokens);
}

/* All ranks' files are there: makes a checkpoint of them. */
static mt_status publish(mt_checkpoint_stage *stage, const mt_checkpoint_shard *shard,
                         const mt_checkpoint_info *info, const reduced *all)
{
    int ranks = mt_comm_size(shard->state->comm);
    MT_TRY(write_state(stage->file, shard->state, info, all));
    MT_TRY(mt_checkpoint_show_shards(shard, stage));
    return mt_checkpoint_stage_publish(stage, shard->seals, ranks > 1 ? ranks : 0);
}

mt_status mt_checkpoint_write(const char *path, const mt_checkpoint_state *s,
                              const mt_checkpoint_info *info)
{
    mt_checkpoint_stage stage;
    mt_checkpoint_shard shard = { .state = s };
    reduced all = { NULL, NULL };
    bool lead = mt_comm_rank(s->comm) == 0;
    mt_status status =
        lead ? mt_checkpoint_stage_begin(&stage, path) : mt_checkpoint_stage_join(&stage, path);
    MT_TRY_CLEANUP(mt_comm_agree(s->comm, status, "beginning a checkpoint"));
    if (s->m) MT_TRY_CLEANUP(mt_checkpoint_gather_delayed(&all.delayed, s));
    if (s->m) MT_TRY_CLEANUP(mt_checkpoint_sum_nans(&all.nans, s));
    status = mt_checkpoint_shard_begin(&shard, &stage, s, info);
    if (status == MT_OK) status = write_tensors(&shard);
    MT_TRY_CLEANUP(mt_checkpoint_shard_end(&shard, status));
    status = lead ? publish(&stage, &shard, info, &all) : MT_OK;
    MT_TRY_CLEANUP(mt_comm_agree(s->comm, status, "publishing a checkpoint"));
cleanup:
    mt_checkpoint_shard_close(&shard);
    if (lead) mt_checkpoint_stage_abandon(&stage);
    free(all.delayed);
    free(all.nans);
    return status;
}
