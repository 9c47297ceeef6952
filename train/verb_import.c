/* mixtape import */
#include <stdio.h>

#include "train/cli.h"
#include "train/fileio.h"
#include "train/hf.h"
#include "train/kind.h"

/* What else is there beside config.json is of no matter. */
static mt_status check_source(const char *path)
{
    char config[MT_PATH_BYTES];
    mt_path_kind kind = mt_path_kind_find(path);
    MT_REQUIRE(kind != MT_KIND_NOTHING, MT_EIO, "there is no directory '%s'", path);
    if (kind == MT_KIND_UNREADABLE) MT_TRY(mt_file_check_readable(path));
    MT_TRY(mt_path_format(config, "%s/config.json", path));
    if (mt_path_exists(config)) return MT_OK;
    MT_REQUIRE(kind == MT_KIND_DIRECTORY, MT_EIO, "'%s' is %s, not a Hugging Face directory", path,
               mt_path_kind_name(kind));
    return MT_FAIL(MT_EIO, "'%s' has no config.json: it is not a Hugging Face directory", path);
}

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
                 "one file or\nan index, experts one by one or fused. Tensors keep their type.\n"
                 "A run begins with them by --set train.init_from=CKPT.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
        .min_arguments = 1,
        .max_arguments = 1,
    };
    MT_TRY(mt_command_parse(&command, argc, argv, &count, &help));
    if (help) return MT_OK;
    MT_REQUIRE(output, MT_ECONFIG, "no -o CKPT given; usage: %s", command.usage);
    MT_TRY(check_source(argv[1]));
    MT_TRY(mt_hf_import(output, argv[1]));
    printf("%s: from %s\n", output, argv[1]);
    return MT_OK;
}
