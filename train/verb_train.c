/* mixtape train */
#include "train/cli.h"
#include "train/run.h"

mt_status mt_verb_train(int argc, char **argv)
{
    mt_rundir_options run = { .path = NULL };
    mt_option_list sets = { .count = 0 };
    const char *device = NULL;
    bool help_config = false, help;
    int count;
    const mt_option options[] = {
        { "run", MT_OPTION_TEXT, &run.path, "DIR",
          "the run's directory (default: runs/<config name>-<date>)" },
        { "resume", MT_OPTION_FLAG, &run.resume, NULL,
          "go on from the newest complete checkpoint in --run" },
        { "force", MT_OPTION_FLAG, &run.force, NULL,
          "resume although the model or the corpus is another" },
        { "set", MT_OPTION_LIST, &sets, "a.b=c",
          "override a configuration key; any number of times" },
        { "device", MT_OPTION_TEXT, &device, "NAME", "auto, cpu or cuda: the key device" },
        { "help-config", MT_OPTION_FLAG, &help_config, NULL,
          "list every configuration key with its default" },
    };
    const mt_command command = {
        .usage = "mixtape train CONFIG.yaml [--run DIR] [--resume] [--set a.b=c]...",
        .about = "Trains a model. SIGTERM, SIGUSR1 or Ctrl-C end the run after the step, with a "
                 "checkpoint;\na second one ends it at once.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
        .max_arguments = 1,
    };
    MT_TRY(mt_command_parse(&command, argc, argv, &count, &help));
    if (help) return MT_OK;
    if (help_config) return mt_config_help(stdout);
    MT_REQUIRE(count == 1, MT_ECONFIG, "no configuration given; usage: %s", command.usage);
    char device_set[MT_CONFIG_TEXT];
    if (device) {
        MT_REQUIRE(sets.count < MT_OPTION_LIST_MAX, MT_ECONFIG, "too many --set");
        snprintf(device_set, sizeof device_set, "device=%s", device);
        sets.items[sets.count++] = device_set;
    }
    mt_config config;
    MT_TRY(mt_config_load(&config, argv[1], sets.items, sets.count));
    return mt_run_train(&config, &run);
}
