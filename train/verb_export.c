/* mixtape export */
#include <stdio.h>
#include <stdlib.h>

#include "train/checkpoint.h"
#include "train/cli.h"
#include "train/hf.h"

/* Whether any router chooses by biases beside its scores; only runs have them. */
static mt_status look_for_bias(bool *any, mt_checkpoint *c)
{
    const mt_checkpoint_meta *meta = mt_checkpoint_get_meta(c);
    const mt_model_config *m = &meta->config;
    char name[32];
    int64_t moe_layers = 0;
    mt_status status = MT_OK;
    float *bias = calloc((size_t)m->num_experts + 1, sizeof *bias);
    *any = false;
    MT_REQUIRE(bias, MT_ENOMEM, "no memory for %lld biases", (long long)m->num_experts);
    for (int64_t i = 0; meta->training && i < m->num_hidden_layers && !*any; i++) {
        mt_tensor t = mt_tensor_1d(bias, MT_F32, m->num_experts);
        if (!mt_model_layer_is_moe(m, i)) continue;
        snprintf(name, sizeof name, "%lld", (long long)moe_layers++);
        MT_TRY_CLEANUP(mt_checkpoint_read(c, "/state/router_bias", name, &t));
        for (int64_t e = 0; e < m->num_experts; e++) *any |= bias[e] != 0;
    }
cleanup:
    free(bias);
    return status;
}

/* Says what the model computes with here and has no place there. */
static mt_status name_left_out(const char *path)
{
    mt_checkpoint *c;
    bool biased;
    MT_TRY(mt_checkpoint_open(&c, path));
    const double capacity = mt_checkpoint_get_meta(c)->config.capacity_factor;
    mt_status status = look_for_bias(&biased, c);
    if (biased)
        fprintf(stderr, "not in it: the biases that routers choose experts with "
                        "(router_bias_update_rate)\n");
    if (capacity > 0)
        fprintf(stderr, "not in it: experts that drop rows (capacity_factor %g)\n", capacity);
    mt_checkpoint_close(&c);
    return status;
}

mt_status mt_verb_export(int argc, char **argv)
{
    int64_t shard_bytes = 0;
    char path[MT_CHECKPOINT_PATH], skipped[2048];
    bool help;
    int count;
    const mt_option options[] = {
        { "shard-bytes", MT_OPTION_INT, &shard_bytes, "N", "largest file; 0: one file (0)" },
    };
    const mt_command command = {
        .usage = "mixtape export CKPT|RUN DIR",
        .about =
            "Writes config.json and safetensors, one tensor per expert, each in the type it has "
            "in the checkpoint.\nTransformers' models have no selection biases of routers and no "
            "capacity_factor: where the\nmodel computes with them, that is said.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
        .min_arguments = 2,
        .max_arguments = 2,
    };
    MT_TRY(mt_command_parse(&command, argc, argv, &count, &help));
    if (help) return MT_OK;
    MT_REQUIRE(shard_bytes >= 0, MT_ECONFIG, "--shard-bytes is %lld, must not be negative",
               (long long)shard_bytes);
    MT_TRY(mt_checkpoint_resolve(path, skipped, sizeof skipped, argv[1]));
    if (*skipped) fprintf(stderr, "left aside: %s", skipped);
    MT_TRY(mt_hf_export(argv[2], path, shard_bytes));
    MT_TRY(name_left_out(path));
    printf("%s: from %s\n", argv[2], path);
    return MT_OK;
}
