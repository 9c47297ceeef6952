/* Recipes: slots, presets, roles, reading, checking and printing. */
#include "core/recipe.h"

#include <stdio.h>

const char *const mt_pass_names[MT_PASS_COUNT] = { "fprop", "dgrad", "wgrad" };

const mt_slot mt_slots[MT_PASS_COUNT][2] = {
    [MT_FPROP] = { { MT_OPERAND_W, MT_ROW, "W row" }, { MT_OPERAND_X, MT_ROW, "X row" } },
    [MT_DGRAD] = { { MT_OPERAND_W, MT_COL, "W column" }, { MT_OPERAND_DY, MT_ROW, "dY row" } },
    [MT_WGRAD] = { { MT_OPERAND_X, MT_COL, "X column" }, { MT_OPERAND_DY, MT_COL, "dY column" } },
};

/* What a role turns on in a format unless the text says otherwise. */
static const uint32_t role_defaults[MT_OPERAND_COUNT][MT_FORMAT_COUNT] = {
    [MT_OPERAND_W] = { [MT_FORMAT_NVFP4] = MT_OPT_2D, [MT_FORMAT_FP8_BLOCK] = MT_OPT_2D },
    [MT_OPERAND_DY] = { [MT_FORMAT_FP8_TENSOR] = MT_OPT_E5M2,
                        [MT_FORMAT_FP8_DELAYED] = MT_OPT_E5M2,
                        [MT_FORMAT_NVFP4] = MT_OPT_SR },
};

/* Presets are texts: the roles add the rest. */
static const struct preset {
    const char *name, *text;
} presets[] = {
    { "bf16", "fprop=bf16 dgrad=bf16 wgrad=bf16" },
    { "fp8_current", "fprop=fp8_tensor dgrad=fp8_tensor wgrad=fp8_tensor" },
    { "fp8_delayed", "fprop=fp8_delayed dgrad=fp8_delayed wgrad=fp8_delayed" },
    { "fp8_block", "fprop=fp8_block dgrad=fp8_block wgrad=fp8_block" },
    { "mxfp8", "fprop=mxfp8 dgrad=mxfp8 wgrad=mxfp8" },
    { "nvfp4", "fprop=nvfp4 dgrad=nvfp4 wgrad=nvfp4:rht" },
};
enum { PRESETS = sizeof presets / sizeof presets[0] };

const char *mt_recipe_preset(int i)
{
    return i >= 0 && i < PRESETS ? presets[i].name : NULL;
}

static mt_status read_slot(mt_recipe *recipe, mt_pass pass, int i, const char *text)
{
    const mt_slot *slot = &mt_slots[pass][i];
    mt_format_spec spec;
    uint32_t given = 0;
    if (mt_format_spec_read(&spec, &given, text) != MT_OK) goto refused;
    uint32_t defaults = role_defaults[slot->operand][spec.format->id] & ~given;
    if (defaults & MT_OPT_2D) spec.options.two_d = true;
    if (defaults & MT_OPT_SR) spec.options.sr = true;
    if (defaults & MT_OPT_E5M2) spec.options.element = MT_ELEMENT_E5M2;
    recipe->slot[pass][i] = spec;
    return MT_OK;
refused:;
    char reason[256];
    snprintf(reason, sizeof reason, "%s", mt_error_message());
    return MT_FAIL(MT_ECONFIG, "recipe: %s %s: %s", mt_pass_names[pass], slot->name, reason);
}

/* "nvfp4:2d/nvfp4", or one format for both operands: its source is that of the one that is a
 * column, where one is. */
static mt_status read_pass(mt_recipe *recipe, mt_pass pass, char *text)
{
    char *second = strchr(text, '/');
    if (second) *second++ = '\0';
    MT_TRY(read_slot(recipe, pass, 0, text));
    MT_TRY(read_slot(recipe, pass, 1, second ? second : text));
    for (int i = 0; i < 2 && !second; i++)
        if (mt_slots[pass][i].dir == MT_ROW && mt_slots[pass][1 - i].dir == MT_COL)
            recipe->slot[pass][i].options.from_dequantized = false;
    return MT_OK;
}

/* A word that is neither a preset nor an assignment: most often a format, maybe with options. */
static mt_status refuse_word(const char *word)
{
    char known[128] = "none";
    mt_format_spec spec;
    for (int i = 0; i < PRESETS; i++) {
        size_t at = strlen(known);
        snprintf(known + at, sizeof known - at, " %s", presets[i].name);
    }
    if (mt_format_spec_parse(&spec, word) == MT_OK)
        return MT_FAIL(
            MT_ECONFIG,
            "recipe: '%.100s' is neither a preset nor an assignment but a format: a GEMM "
            "takes it, such as wgrad=%.100s behind a preset",
            word, word);
    return MT_FAIL(MT_ECONFIG,
                   "recipe: '%.100s' is neither a preset nor an assignment: presets are %s, "
                   "assignments fprop=FORMAT dgrad=FORMAT wgrad=FORMAT",
                   word, known);
}

static mt_status read_assignment(mt_recipe *recipe, bool given[MT_PASS_COUNT], char *word)
{
    char *value = strchr(word, '=');
    if (!value) return refuse_word(word);
    *value++ = '\0';
    for (int pass = 0; pass < MT_PASS_COUNT; pass++)
        if (!strcmp(word, mt_pass_names[pass])) {
            given[pass] = true;
            return read_pass(recipe, (mt_pass)pass, value);
        }
    MT_REQUIRE(!strcmp(word, "backward"), MT_ECONFIG,
               "recipe: '%s' is not one of fprop dgrad wgrad backward", word);
    MT_REQUIRE(!strcmp(value, "high_precision"), MT_ECONFIG,
               "recipe: backward is '%s', must be high_precision", value);
    for (int pass = MT_DGRAD; pass <= MT_WGRAD; pass++) {
        given[pass] = true;
        for (int i = 0; i < 2; i++) MT_TRY(read_slot(recipe, (mt_pass)pass, i, "bf16"));
    }
    return MT_OK;
}

/* The text of a preset of this name, or NULL. */
static const char *preset_text(const char *name)
{
    for (int i = 0; i < PRESETS; i++)
        if (!strcmp(presets[i].name, name)) return presets[i].text;
    return NULL;
}

static mt_status read_words(mt_recipe *recipe, bool given[MT_PASS_COUNT], const char *text)
{
    char copy[MT_RECIPE_TEXT];
    MT_REQUIRE(strlen(text) < sizeof copy, MT_ECONFIG, "recipe '%.40s...' is longer than %d", text,
               MT_RECIPE_TEXT - 1);
    strcpy(copy, text);
    char *rest = NULL;
    bool first = true;
    for (char *word = strtok_r(copy, " \t\n", &rest); word; word = strtok_r(NULL, " \t\n", &rest)) {
        const char *preset = preset_text(word);
        MT_REQUIRE(!preset || first, MT_ECONFIG,
                   "recipe: the preset '%s' must come before the assignments", word);
        MT_TRY(preset ? read_words(recipe, given, preset) : read_assignment(recipe, given, word));
        first = false;
    }
    return MT_OK;
}

mt_status mt_recipe_parse(mt_recipe *recipe, const char *text)
{
    bool given[MT_PASS_COUNT] = { false };
    mt_recipe read;
    MT_REQUIRE(text, MT_EINVAL, "recipe: no text");
    MT_TRY(read_words(&read, given, text));
    for (int pass = 0; pass < MT_PASS_COUNT; pass++)
        MT_REQUIRE(given[pass], MT_ECONFIG,
                   "recipe '%.100s' names no formats for %s: it names fprop, "
                   "dgrad and wgrad, or begins with a preset, of which it changes some",
                   text, mt_pass_names[pass]);
    MT_TRY(mt_recipe_check(&read));
    *recipe = read;
    return MT_OK;
}

mt_recipe mt_recipe_plain(mt_dtype dtype)
{
    mt_recipe recipe;
    for (int pass = 0; pass < MT_PASS_COUNT; pass++)
        for (int i = 0; i < 2; i++)
            recipe.slot[pass][i] = mt_format_spec_default(mt_format_plain(dtype)->id);
    return recipe;
}

static mt_status check_slot(const mt_recipe *recipe, mt_pass pass, int i)
{
    const mt_slot *slot = &mt_slots[pass][i];
    const mt_format_spec *spec = &recipe->slot[pass][i];
    /* Before what the format allows: W's 2d, which excludes rht, may be there by its role only. */
    MT_REQUIRE(!spec->options.rht || pass == MT_WGRAD, MT_ECONFIG,
               "recipe: %s %s: rht rotates the tokens of both wgrad operands; %s does not sum "
               "over tokens",
               mt_pass_names[pass], slot->name, mt_pass_names[pass]);
    if (mt_format_spec_check(spec) != MT_OK) {
        char reason[256];
        snprintf(reason, sizeof reason, "%s", mt_error_message());
        return MT_FAIL(MT_ECONFIG, "recipe: %s %s: %s", mt_pass_names[pass], slot->name, reason);
    }
    MT_REQUIRE(slot->dir == MT_COL || !spec->options.from_dequantized, MT_ECONFIG,
               "recipe: %s %s: source=dequantized is for column directions", mt_pass_names[pass],
               slot->name);
    const mt_format *row = mt_recipe_direction(recipe, slot->operand, MT_ROW)->format;
    MT_REQUIRE(!spec->options.from_dequantized || row->element != MT_ELEMENT_PLAIN, MT_ECONFIG,
               "recipe: %s %s: source=dequantized takes what the codes of the row direction hold, "
               "which is %s: it has none",
               mt_pass_names[pass], slot->name, row->name);
    return MT_OK;
}

mt_status mt_recipe_check(const mt_recipe *recipe)
{
    for (int pass = 0; pass < MT_PASS_COUNT; pass++)
        for (int i = 0; i < 2; i++) MT_TRY(check_slot(recipe, (mt_pass)pass, i));
    const mt_format_options *x = &recipe->slot[MT_WGRAD][0].options;
    const mt_format_options *dy = &recipe->slot[MT_WGRAD][1].options;
    MT_REQUIRE(x->rht == dy->rht, MT_ECONFIG,
               "recipe: wgrad %s has rht and %s has not: both operands rotate or neither",
               mt_slots[MT_WGRAD][x->rht ? 0 : 1].name, mt_slots[MT_WGRAD][x->rht ? 1 : 0].name);
    MT_REQUIRE(x->rht_mask == dy->rht_mask, MT_ECONFIG,
               "recipe: wgrad X column has the rht mask 0x%04X and dY column 0x%04X: both rotate "
               "with one mask",
               x->rht_mask, dy->rht_mask);
    return MT_OK;
}

bool mt_recipe_equal(const mt_recipe *a, const mt_recipe *b)
{
    bool same = true;
    for (int pass = 0; pass < MT_PASS_COUNT; pass++)
        for (int i = 0; i < 2; i++)
            same = same && mt_format_spec_equal(&a->slot[pass][i], &b->slot[pass][i]);
    return same;
}

/* True when `recipe` is the preset; presets are read without error, the tests see to it. */
static bool is_preset(const mt_recipe *recipe, const struct preset *preset)
{
    mt_recipe other;
    return mt_recipe_parse(&other, preset->text) == MT_OK && mt_recipe_equal(recipe, &other);
}

void mt_recipe_print(char text[MT_RECIPE_TEXT], const mt_recipe *recipe)
{
    size_t used = 0;
    for (int i = 0; i < PRESETS; i++)
        if (is_preset(recipe, &presets[i])) {
            snprintf(text, MT_RECIPE_TEXT, "%s", presets[i].name);
            return;
        }
    for (int pass = 0; pass < MT_PASS_COUNT; pass++) {
        char words[2][MT_FORMAT_SPEC_TEXT];
        for (int i = 0; i < 2; i++) {
            const mt_format_spec *spec = &recipe->slot[pass][i];
            uint32_t defaults = role_defaults[mt_slots[pass][i].operand][spec->format->id];
            mt_format_spec_print(words[i], spec, defaults);
        }
        used += (size_t)snprintf(text + used, MT_RECIPE_TEXT - used, "%s%s=%s/%s", pass ? " " : "",
                                 mt_pass_names[pass], words[0], words[1]);
    }
}

const mt_format_spec *mt_recipe_direction(const mt_recipe *recipe, mt_operand operand, mt_dir dir)
{
    for (int pass = 0; pass < MT_PASS_COUNT; pass++)
        for (int i = 0; i < 2; i++)
            if (mt_slots[pass][i].operand == operand && mt_slots[pass][i].dir == dir)
                return &recipe->slot[pass][i];
    return NULL;
}
