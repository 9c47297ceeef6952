/* mixtape export */
#include <stdio.h>

#include "train/checkpoint.h"
#include "train/cli.h"
#include "train/hf.h"

static void report(const char *dir, const mt_checkpoint *checkpoint, const mt_hf_left_out *left)
{
    if (left->router_bias)
        fprintf(stderr, "not in it: the biases that routers choose experts with "
                        "(router_bias_update_rate)\n");
    if (left->capacity_factor > 0)
        fprintf(stderr, "not in it: experts that drop rows (capacity_factor %g)\n",
                left->capacity_factor);
    if (left->head_dim)
        fprintf(stderr,
                "not in it: heads of %lld, which are hidden_size / num_attention_heads in "
                "transformers' OLMoE: it does not load this model\n",
                (long long)left->head_dim);
    printf("%s: from %s\n", dir, mt_checkpoint_path(checkpoint));
}

mt_status mt_verb_export(int argc, char **argv)
{
    int64_t shard_bytes = 0;
    mt_hf_left_out left;
    mt_checkpoint *checkpoint;
    char skipped[2048];
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
            "capacity_factor, and OLMoE has no\nhead_dim: where the model computes with them, "
            "that is said.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
        .min_arguments = 2,
        .max_arguments = 2,
    };
    MT_TRY(mt_command_parse(&command, argc, argv, &count, &help));
    if (help) return MT_OK;
    MT_REQUIRE(shard_bytes >= 0, MT_ECONFIG, "--shard-bytes is %lld, must not be negative",
               (long long)shard_bytes);
    MT_TRY(mt_checkpoint_open_given(&checkpoint, skipped, sizeof skipped, argv[1]));
    if (*skipped) fprintf(stderr, "left aside: %s\n", skipped);
    mt_status status = mt_hf_export_checkpoint(argv[2], checkpoint, shard_bytes, &left);
    if (status == MT_OK) report(argv[2], checkpoint, &left);
    mt_checkpoint_close(&checkpoint);
    return status;
}
