/* mixtape bench: the speed of this build on a device, against floors measured in the same run. */
#include <stdio.h>
#include <string.h>

#include "train/bench.h"
#include "train/cli.h"
#include "train/config.h"

enum { RECIPES = 64, MOST_THREADS = 4096 };

/* What would be left aside without a word, where only that family is asked for. */
static mt_status check_family(const mt_bench_family *family, const mt_option_list *recipes,
                              const mt_option_list *sets)
{
    const char *name = family ? family->name : "gemm";
    bool without = !strcmp(name, "quantize") || !strcmp(name, "ops");
    MT_REQUIRE(!recipes->count || !without, MT_ECONFIG,
               "--recipe is of gemm, moe and step: %s has no linear layers", name);
    MT_REQUIRE(sets->count < 2 || !strcmp(name, "gemm"), MT_ECONFIG,
               "--kernels given %d times: only gemm times more than one, not %s", sets->count,
               name);
    return MT_OK;
}

/* "none" where nothing is asked for; "all" stands for "none" and every preset. */
static mt_status choose_recipes(const char *recipes[RECIPES], int *count,
                                const mt_option_list *list)
{
    *count = 0;
    if (!list->count) recipes[(*count)++] = "none";
    for (int i = 0; i < list->count; i++) {
        bool all = !strcmp(list->items[i], "all");
        MT_REQUIRE(*count < RECIPES, MT_ECONFIG, "--recipe: more than %d", RECIPES);
        recipes[(*count)++] = all ? "none" : list->items[i];
        for (int p = 0; all && mt_recipe_preset(p) && *count < RECIPES; p++)
            recipes[(*count)++] = mt_recipe_preset(p);
    }
    return MT_OK;
}

mt_status mt_verb_bench(int argc, char **argv)
{
    const char *device = "auto", *shape = NULL, *dtype = "bf16", *grads = "f32";
    const char *recipes[RECIPES];
    mt_option_list list = { 0 }, sets = { 0 };
    int64_t threads = MT_OPTION_ABSENT;
    mt_bench_options bench = { .launches = MT_BENCH_LAUNCHES, .flushes = 1 };
    const mt_option options[] = {
        { "device", MT_OPTION_TEXT, &device, "NAME", "cpu, cuda, cuda:N or auto (default: auto)" },
        { "shape", MT_OPTION_TEXT, &shape, "NAME", "a shape, a model's shapes, or all" },
        { "dtype", MT_OPTION_TEXT, &dtype, "TYPE", "bf16, f32 or f64 (default: bf16)" },
        { "grad-dtype", MT_OPTION_TEXT, &grads, "TYPE",
          "of weights' gradients in moe and step: f32 (f64 under f64) or bf16 (default: f32)" },
        { "recipe", MT_OPTION_LIST, &list, "RECIPE", "of linear layers; any number; all: presets" },
        { "kernels", MT_OPTION_LIST, &sets, "SET",
          "kernel sets; of those that pack weights alike any number, gemm times each" },
        { "launches", MT_OPTION_INT, &bench.launches, "N", "timed ones of a case (default: 15)" },
        { "flushes", MT_OPTION_INT, &bench.flushes, "N",
          "of caches before each; with many the host is not timed (default: 1)" },
        { "graph", MT_OPTION_FLAG, &bench.graph, NULL, "launch recorded graphs (cuda)" },
        { "threads", MT_OPTION_INT, &threads, "N", "of the cpu (default: every core)" },
        { "json", MT_OPTION_PATH, &bench.json, "FILE",
          "also write an object a line for each case" },
    };
    const mt_command command = {
        .usage = "mixtape bench [gemm|moe|quantize|ops|step] [options]",
        .about =
            "Times families of work on a device: the grouped GEMM, the MoE layer, quantize, "
            "other ops,\nwhole steps; all of them without a name. Caches are flushed before "
            "each launch, inputs are\nrandom and taken in turns, times are the device's, "
            "medians count. First come copy bandwidth\nand a dense product: the floor of a "
            "case is the time that they allow, its share floor / time.\nCases of quantize that "
            "are padded write columns as products of 8-bit codes read them,\ndecoded ones what "
            "products of bf16 read; its copy is of the source.",
        .options = options,
        .option_count = sizeof options / sizeof *options,
        .min_arguments = 0,
        .max_arguments = 1,
    };
    const mt_bench_family *family = NULL;
    int count;
    bool help;
    MT_TRY(mt_command_parse(&command, argc, argv, &count, &help));
    if (help) return MT_OK;
    if (count) MT_TRY(mt_bench_family_find(&family, argv[1]));
    MT_TRY(mt_config_parse_compute(&bench.dtype, dtype));
    bench.bf16_grads = !strcmp(grads, "bf16");
    MT_REQUIRE(bench.bf16_grads || !strcmp(grads, "f32"), MT_ECONFIG,
               "--grad-dtype is %s, must be f32 or bf16", grads);
    MT_REQUIRE(!bench.bf16_grads || bench.dtype == MT_BF16, MT_ECONFIG,
               "--grad-dtype bf16 needs --dtype bf16, which is %s", dtype);
    MT_REQUIRE(threads == MT_OPTION_ABSENT || (threads >= 1 && threads <= MOST_THREADS), MT_ECONFIG,
               "--threads is %lld, must be from 1 to %d", (long long)threads, MOST_THREADS);
    MT_TRY(check_family(family, &list, &sets));
    MT_TRY(choose_recipes(recipes, &bench.recipe_count, &list));
    bench.device = device, bench.shape = shape, bench.recipes = recipes;
    bench.kernels = sets.items, bench.kernel_count = sets.count;
    bench.threads = threads == MT_OPTION_ABSENT ? 0 : (int)threads;
    return mt_bench_run(&bench, family);
}
