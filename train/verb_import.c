/* mixtape import */
#include <stdio.h>

#include "train/cli.h"
#include "train/hf.h"

mt_status mt_verb_import(int argc, char **argv)
{
    const char *output = NULL;
    bool help;
    int count;
    const mt_option options[] = {
        { "o", MT_OPTION_PATH, &output, "CKPT", "the checkpoint to write" },
    };
    const mt_command command = {
        .usage = "mixtape import DIR -o CKPT",
        .about = "Reads a Hugging Face directory (qwen3_moe, olmoe, mixtral): config.json and "
                 "safetensors, "
                 "one file or\nan index, experts one by one or fused. Tensors keep their type.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
        .min_arguments = 1,
        .max_arguments = 1,
    };
    MT_TRY(mt_command_parse(&command, argc, argv, &count, &help));
    if (help) return MT_OK;
    MT_REQUIRE(output, MT_ECONFIG, "no -o CKPT given; usage: %s", command.usage);
    MT_TRY(mt_hf_import(output, argv[1]));
    printf("%s: from %s\n", output, argv[1]);
    return MT_OK;
}
