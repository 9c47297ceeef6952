/* GEMM paths in words. */
#include "train/paths.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { LINE = 512 };

/* "mxfp8", or "mxfp8 decoded to f32". */
static void describe(char text[LINE / 4], const struct mt_kernels *kernels,
                     const mt_format_spec *spec)
{
    char format[MT_FORMAT_SPEC_TEXT];
    mt_dtype dtype = kernels->gemm_operand(spec);
    bool in_place = spec->format == mt_format_plain(dtype);
    mt_format_spec_print(format, spec, 0);
    snprintf(text, LINE / 4, "%.60s%s%s", format, in_place ? "" : " decoded to ",
             in_place ? "" : mt_dtype_name(dtype));
}

static void describe_recipe(const mt_recipe *recipe, const struct mt_kernels *kernels,
                            mt_paths_line line, void *context)
{
    for (int pass = 0; pass < MT_PASS_COUNT; pass++) {
        char text[LINE], operands[2][LINE / 4];
        for (int i = 0; i < 2; i++) describe(operands[i], kernels, &recipe->slot[pass][i]);
        snprintf(text, sizeof text, "  %s: %s %s, %s %s", mt_pass_names[pass],
                 mt_slots[pass][0].name, operands[0], mt_slots[pass][1].name, operands[1]);
        if (kernels->gemm_codes && kernels->gemm_codes((mt_gemm_layout)pass, &recipe->slot[pass][0],
                                                       &recipe->slot[pass][1]))
            snprintf(text, sizeof text, "  %s: %s by %s, codes on fp8 tensor cores",
                     mt_pass_names[pass], recipe->slot[pass][0].format->name,
                     recipe->slot[pass][1].format->name);
        line(context, text);
    }
}

/* "recipe of every layer", "recipe of layers *experts*, steps 900..": the rules' own words; and why
 * no step is made with it, or "". */
static void describe_rule(const mt_recipe_rule *rule, const char *idle, mt_paths_line line,
                          void *context)
{
    char text[LINE], steps[64] = "";
    if (rule->end >= 0)
        snprintf(steps, sizeof steps, ", steps %" PRId64 "..%" PRId64, rule->first, rule->end);
    else if (rule->first > 0)
        snprintf(steps, sizeof steps, ", steps %" PRId64 "..", rule->first);
    snprintf(text, sizeof text, "recipe of %s%.300s%s%s", rule->layers ? "layers " : "every layer",
             rule->layers ? rule->layers : "", steps, idle);
    line(context, text);
}

/* Whether a later rule holds wherever this one would: the last that matches counts. */
static bool is_covered(const mt_recipe_rules *rules, size_t i)
{
    const mt_recipe_rule *rule = mt_recipe_rules_get(rules, i), *later;
    while ((later = mt_recipe_rules_get(rules, ++i))) {
        bool layers = !later->layers || (rule->layers && strcmp(rule->layers, later->layers) == 0);
        bool ends = later->end < 0 || (rule->end >= 0 && rule->end <= later->end);
        if (layers && ends && later->first <= rule->first) return true;
    }
    return false;
}

mt_status mt_gemm_paths(const mt_trainer_config *config, const mt_device *device,
                        mt_paths_line line, void *context)
{
    const struct mt_kernels *kernels;
    mt_recipe_rules *rules;
    const mt_recipe_rule *rule;
    if (!*config->recipe || strcmp(config->recipe, "none") == 0) return MT_OK;
    MT_TRY(mt_device_kernels(device, config->dtype, &kernels));
    MT_TRY(mt_recipe_rules_create(&rules, config->recipe, config->dtype));
    for (size_t i = 0; (rule = mt_recipe_rules_get(rules, i)); i++) {
        char idle[96] = "";
        if (is_covered(rules, i))
            snprintf(idle, sizeof idle, ": never in use, a later rule is for all of it");
        else if (rule->first == config->steps)
            snprintf(idle, sizeof idle, ": for the last evaluation alone, train.steps is %" PRId64,
                     config->steps);
        else if (rule->first > config->steps)
            snprintf(idle, sizeof idle, ": never in use, train.steps is %" PRId64, config->steps);
        describe_rule(rule, idle, line, context);
        if (!*idle) describe_recipe(&rule->recipe, kernels, line, context);
    }
    mt_recipe_rules_destroy(&rules);
    return MT_OK;
}
