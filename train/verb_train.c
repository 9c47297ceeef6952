/* mixtape train */
#include <stdlib.h>
#include <string.h>

#include "train/cli.h"
#include "train/ranks.h"
#include "train/run.h"

/* What the command line gave. */
typedef struct given {
    mt_rundir_options run;
    mt_option_list sets;
    const char *device;
    int64_t gpus;
} given;

static mt_status train(const char *path, given *g, char *const *words)
{
    char device_set[MT_CONFIG_TEXT];
    mt_config config;
    MT_REQUIRE(g->run.resume || !g->run.force, MT_ECONFIG,
               "--force without --resume: there is nothing to go on with");
    if (g->device) {
        MT_REQUIRE(g->sets.count < MT_OPTION_LIST_MAX, MT_ECONFIG, "too many --set");
        snprintf(device_set, sizeof device_set, "device=%s", g->device);
        g->sets.items[g->sets.count++] = device_set;
    }
    MT_TRY(mt_config_load(&config, path, g->sets.items, g->sets.count));
    MT_TRY(mt_ranks_start(g->gpus, config.device, words));
    g->run.words = words;
    return mt_run_train(&config, &g->run);
}

mt_status mt_verb_train(int argc, char **argv)
{
    given g = { .gpus = MT_OPTION_ABSENT };
    bool help_config = false, help;
    int count;
    char **words = NULL;
    const mt_option options[] = {
        { "run", MT_OPTION_PATH, &g.run.path, "DIR",
          "the run's directory (default: runs/<config name>-<date>[-n])" },
        { "resume", MT_OPTION_FLAG, &g.run.resume, NULL,
          "go on from the newest complete checkpoint in --run" },
        { "force", MT_OPTION_FLAG, &g.run.force, NULL,
          "resume although a key that belongs to the run (the recipe, the seed, a model of the "
          "same shapes) or the corpus is another, or the checkpoints or config.resolved.yaml are "
          "gone" },
        { "set", MT_OPTION_LIST, &g.sets, "a.b=c",
          "override a configuration key; any number of times" },
        { "device", MT_OPTION_TEXT, &g.device, "NAME",
          "auto, cpu, cuda or cuda:N: the key device" },
        { "gpus", MT_OPTION_INT, &g.gpus, "N", "train on N GPUs of this host, a rank on each" },
        { "help-config", MT_OPTION_FLAG, &help_config, NULL,
          "list every configuration key with its default" },
    };
    const mt_command command = {
        .usage = "mixtape train CONFIG.yaml [--run DIR] [--resume] [--gpus N] [--set a.b=c]...",
        .about = "Trains a model. SIGTERM, SIGUSR1 or Ctrl-C end the run after the step, with a "
                 "checkpoint;\na second one ends it at once.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
        .max_arguments = 1,
    };
    MT_TRY(mt_ranks_copy_words(&words, argc, argv));
    mt_status status = mt_command_parse(&command, argc, argv, &count, &help);
    if (status == MT_OK && !help && !help_config && count != 1)
        status = MT_FAIL(MT_ECONFIG, "no configuration given; usage: %s", command.usage);
    if (status == MT_OK && !help)
        status = help_config ? mt_config_help(stdout) : train(argv[1], &g, words);
    free(words);
    return status;
}
