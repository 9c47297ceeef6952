/* Recipes: presets, roles, syntax, refusals, rules by layer and step. */
#include <string.h>

#include "core/recipe.h"
#include "tests/support/test.h"

static void parsed(char text[MT_RECIPE_TEXT], const char *recipe)
{
    mt_recipe r;
    assert_ok(mt_recipe_parse(&r, recipe));
    mt_recipe_print(text, &r);
    mt_recipe again;
    assert_ok(mt_recipe_parse(&again, text));
    assert_true(mt_recipe_equal(&r, &again));
}

/* Options of a slot as bits. */
static uint32_t options(const mt_recipe *r, mt_pass pass, int i)
{
    return mt_format_spec_options(&r->slot[pass][i]);
}

static void test_presets(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        mt_format_id format;
        uint32_t slots[MT_PASS_COUNT][2]; /* W X, W dY, X dY */
    } rows[] = {
        { "bf16", MT_FORMAT_BF16, { { 0 } } },
        { "fp8_current",
          MT_FORMAT_FP8_TENSOR,
          { { 0, 0 }, { 0, MT_OPT_E5M2 }, { 0, MT_OPT_E5M2 } } },
        { "fp8_delayed",
          MT_FORMAT_FP8_DELAYED,
          { { 0, 0 }, { 0, MT_OPT_E5M2 }, { 0, MT_OPT_E5M2 } } },
        { "fp8_block", MT_FORMAT_FP8_BLOCK, { { MT_OPT_2D, 0 }, { MT_OPT_2D, 0 }, { 0, 0 } } },
        { "mxfp8", MT_FORMAT_MXFP8, { { 0 } } },
        { "nvfp4",
          MT_FORMAT_NVFP4,
          { { MT_OPT_2D, 0 }, { MT_OPT_2D, MT_OPT_SR }, { MT_OPT_RHT, MT_OPT_RHT | MT_OPT_SR } } },
    };
    int count = 0;
    for (; mt_recipe_preset(count); count++) {
        mt_recipe r;
        char text[MT_RECIPE_TEXT];
        assert_string_equal(mt_recipe_preset(count), rows[count].name);
        assert_ok(mt_recipe_parse(&r, rows[count].name));
        for (int pass = 0; pass < MT_PASS_COUNT; pass++)
            for (int i = 0; i < 2; i++) {
                assert_int_equal(r.slot[pass][i].format->id, rows[count].format);
                assert_int_equal(options(&r, (mt_pass)pass, i), rows[count].slots[pass][i]);
            }
        parsed(text, rows[count].name);
        assert_string_equal(text, rows[count].name);
    }
    assert_int_equal(count, sizeof rows / sizeof rows[0]);
}

static void test_slots(void **state)
{
    (void)state;
    mt_recipe r;
    bool seen[MT_OPERAND_COUNT][MT_DIR_COUNT] = { { false } };
    assert_ok(mt_recipe_parse(&r, "mxfp8"));
    for (int pass = 0; pass < MT_PASS_COUNT; pass++)
        for (int i = 0; i < 2; i++) {
            const mt_slot *s = &mt_slots[pass][i];
            assert_false(seen[s->operand][s->dir]); /* six slots, each one direction */
            seen[s->operand][s->dir] = true;
            assert_ptr_equal(mt_recipe_direction(&r, s->operand, s->dir), &r.slot[pass][i]);
        }
}

static void test_text(void **state)
{
    (void)state;
    static const struct {
        const char *text, *printed;
    } rows[] = {
        { "fprop=nvfp4:2d/nvfp4 dgrad=mxfp8 wgrad=bf16",
          "fprop=nvfp4/nvfp4 dgrad=mxfp8/mxfp8 wgrad=bf16/bf16" },
        { "fprop=mxfp8 dgrad=mxfp8/mxfp8 wgrad=mxfp8", "mxfp8" },
        { " fprop=nvfp4 \t dgrad=nvfp4:2d/nvfp4:sr wgrad=nvfp4:rht/nvfp4:sr+rht ", "nvfp4" },
        { "fprop=nvfp4:1d/nvfp4 dgrad=nvfp4/nvfp4:sr=off wgrad=nvfp4",
          "fprop=nvfp4:1d/nvfp4 dgrad=nvfp4/nvfp4:sr=off wgrad=nvfp4/nvfp4" },
        { "fp8_current dgrad=fp8_tensor/fp8_tensor:e4m3",
          "fprop=fp8_tensor/fp8_tensor dgrad=fp8_tensor/fp8_tensor:e4m3 "
          "wgrad=fp8_tensor/fp8_tensor" },
        { "nvfp4 backward=high_precision", "fprop=nvfp4/nvfp4 dgrad=bf16/bf16 wgrad=bf16/bf16" },
        { "bf16 backward=high_precision", "bf16" },
        { "mxfp8 wgrad=mxfp8:rht=0x1234", "fprop=mxfp8/mxfp8 dgrad=mxfp8/mxfp8 "
                                          "wgrad=mxfp8:rht=0x1234/mxfp8:rht=0x1234" },
        /* source concerns column directions */
        { "mxfp8 dgrad=mxfp8:source=dequantized",
          "fprop=mxfp8/mxfp8 dgrad=mxfp8:source=dequantized/mxfp8 wgrad=mxfp8/mxfp8" },
        { "mxfp8 fprop=fp8_block:1d/mxfp4:sr+scale=floor",
          "fprop=fp8_block:1d/mxfp4:sr+scale=floor dgrad=mxfp8/mxfp8 wgrad=mxfp8/mxfp8" },
        { "mxfp8 wgrad=bf16 wgrad=mxfp8", "mxfp8" },
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char text[MT_RECIPE_TEXT];
        parsed(text, rows[i].text);
        assert_string_equal(text, rows[i].printed);
    }
}

static void test_refusals(void **state)
{
    (void)state;
    static const struct {
        const char *text, *words;
    } rows[] = {
        { "", "names no formats for fprop: it names fprop, dgrad and wgrad" },
        { "fprop=mxfp8", "names no formats for dgrad" },
        { "fprop=mxfp8 dgrad=mxfp8", "names no formats for wgrad" },
        { "mxfp9", "'mxfp9' is neither a preset nor an assignment: presets are none bf16 fp8_c" },
        { "nvfp4:rht", "but a format: a GEMM takes it, such as wgrad=nvfp4:rht behind a preset" },
        { "fprop=bf16 mxfp8", "the preset 'mxfp8' must come before" },
        { "mxfp8 sgrad=bf16", "'sgrad' is not one of fprop dgrad wgrad backward" },
        { "mxfp8 backward=low", "must be high_precision" },
        { "mxfp8 fprop=fp9", "fprop W row: format 'fp9' is not one of" },
        { "mxfp8 fprop=bf16/", "fprop X row: format '' is not one of" },
        { "mxfp8 dgrad=mxfp8/nvfp4:pow2", "dgrad dY row: format nvfp4 takes no option pow2" },
        { "mxfp8 wgrad=a/b/c", "wgrad X column: format 'a'" },
        { "mxfp8 dgrad=mxfp8:rht/mxfp8", "dgrad W column: rht rotates the tokens" },
        { "mxfp8 dgrad=mxfp8/mxfp8:rht", "dgrad dY row: rht rotates the tokens" },
        { "nvfp4 fprop=nvfp4/nvfp4:rht", "fprop X row: rht rotates" },
        { "nvfp4 fprop=nvfp4:rht", "fprop W row: rht rotates" }, /* 2d is W's by its role */
        { "bf16 fprop=bf16:rht", "fprop W row: format bf16 takes no option rht" },
        { "mxfp8 wgrad=mxfp8:rht/mxfp8", "wgrad X column has rht and dY column has not" },
        { "mxfp8 wgrad=bf16/mxfp8:rht", "wgrad dY column has rht and X column has not" },
        { "mxfp8 wgrad=mxfp8:rht/mxfp8:rht=1", "rht mask 0xD7E8 and dY column 0x0001" },
        { "nvfp4 dgrad=nvfp4:source=dequantized/nvfp4",
          "dgrad W column: format nvfp4 cannot have source" },
        { "bf16 wgrad=mxfp8:source=dequantized",
          "wgrad X column: source=dequantized takes what the codes of the row direction hold, "
          "which is bf16: it has none" },
        { "mxfp8 dgrad=mxfp8/f32 wgrad=mxfp8:source=dequantized",
          "wgrad dY column: source=dequantized takes what the codes of the row direction hold, "
          "which is f32" },
        { "mxfp8 fprop=f16/mxfp8 dgrad=mxfp8:source=dequantized/mxfp8",
          "dgrad W column: source=dequantized takes" },
        { "mxfp8 fprop=mxfp8:source=dequantized", "fprop W row: source=dequantized is for column" },
        { "mxfp8 fprop=mxfp8/mxfp8:source=dequantized", "fprop X row: source=dequantized is for" },
        { "mxfp8 dgrad=mxfp8/mxfp8:source=dequantized", "dgrad dY row: source=dequantized is for" },
        { "mxfp8 wgrad=mxfp8:2d+rht", "wgrad X column: format mxfp8 cannot have 2d and rht" },
        { "bf16 wgrad=bf16:rht", "wgrad X column: format bf16 takes no option rht" },
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        mt_recipe r;
        assert_fails(mt_recipe_parse(&r, rows[i].text), MT_ECONFIG, rows[i].words);
    }
    char longest[2 * MT_RECIPE_TEXT];
    mt_recipe r;
    memset(longest, ' ', sizeof longest - 1);
    longest[sizeof longest - 1] = '\0';
    assert_fails(mt_recipe_parse(&r, longest), MT_ECONFIG, "is longer than");
    assert_ok(mt_recipe_parse(&r, "mxfp8"));
    r.slot[MT_FPROP][1].options.from_dequantized = true;
    assert_fails(mt_recipe_check(&r), MT_ECONFIG, "fprop X row: source=dequantized is for column");
    assert_fails(mt_recipe_parse(&r, NULL), MT_EINVAL, "recipe: no text");
}

static void assert_selects(const mt_recipe_rules *rules, const char *layer, int64_t step,
                           const char *want)
{
    char text[MT_RECIPE_TEXT];
    mt_recipe_print(text, mt_recipe_rules_select(rules, layer, step));
    assert_string_equal(text, want);
}

static void test_rules(void **state)
{
    (void)state;
    mt_recipe_rules *rules;
    assert_ok(mt_recipe_rules_create(&rules,
                                     "nvfp4; layers=layers.[67].* bf16;"
                                     "steps=100.. layers=*.mlp.* mxfp8;steps=..10 fp8_current;"
                                     "layers=lm_head  none ;"
                                     "steps=20..30 layers=*qkv* none\twgrad=mxfp8 fprop=bf16/nvfp4",
                                     MT_F32));
    assert_selects(rules, "layers.0.mlp.experts.down_proj", 10, "nvfp4");
    assert_selects(rules, "layers.0.mlp.experts.down_proj", 99, "nvfp4");
    assert_selects(rules, "layers.0.mlp.experts.down_proj", 100, "mxfp8");
    assert_selects(rules, "layers.0.attention.qkv_proj", 100, "nvfp4");
    assert_selects(rules, "layers.7.attention.qkv_proj", 100, "bf16");
    assert_selects(rules, "layers.7.mlp.experts.down_proj", 100, "mxfp8");
    assert_selects(rules, "layers.7.mlp.experts.down_proj", 9, "fp8_current");
    assert_selects(rules, "lm_head", 9, "fprop=f32/f32 dgrad=f32/f32 wgrad=f32/f32");
    assert_selects(rules, "layers.0.attention.qkv_proj", 20,
                   "fprop=bf16/nvfp4 dgrad=f32/f32 wgrad=mxfp8/mxfp8");
    assert_int_equal(mt_recipe_rules_next_change(rules, 0), 10);
    assert_int_equal(mt_recipe_rules_next_change(rules, 10), 20);
    assert_int_equal(mt_recipe_rules_next_change(rules, 30), 100);
    assert_int_equal(mt_recipe_rules_next_change(rules, 100), -1);
    const mt_recipe_rule *third = mt_recipe_rules_get(rules, 2);
    assert_string_equal(third->layers, "*.mlp.*");
    assert_true(third->first == 100 && third->end < 0);
    assert_null(mt_recipe_rules_get(rules, 0)->layers);
    assert_null(mt_recipe_rules_get(rules, 6));
    mt_recipe_rules_destroy(&rules);
    assert_null(rules);
    mt_recipe_rules_destroy(&rules);
}

static void test_bad_rules(void **state)
{
    (void)state;
    static const struct {
        const char *text, *words;
    } rows[] = {
        { "", "names no formats" },
        { "bf16;", "names no formats" },
        { "layers=* bf16", "or steps= (begin with 'none', which is train.dtype" },
        { "bf16; steps=5 mxfp8", "steps '5' are not A..B, or A-B in a list" },
        { "bf16; steps=a..b mxfp8", "are not A..B, or A-B in a list" },
        { "bf16; steps=1...3 mxfp8", "are not A..B, or A-B in a list" },
        { "bf16; steps=9999999999999999999.. mxfp8", "are not A..B, or A-B in a list" },
        { "bf16; steps=7..7 mxfp8", "steps 7..7 are not a range" },
        { "bf16; layers=a layers=b mxfp8", "given twice" },
        { "bf16; layers=a mxfp9", "neither a preset" },
        { "bf16; layers=a nonesuch", "'nonesuch' is neither a preset" },
        { "none mxfp8", "the preset 'mxfp8' must come before" },
        { "none fprop=bf16/mxfp9", "fprop X row: format 'mxfp9'" },
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        mt_recipe_rules *rules = NULL;
        assert_fails(mt_recipe_rules_create(&rules, rows[i].text, MT_F32), MT_ECONFIG,
                     rows[i].words);
        assert_null(rules);
    }
    mt_recipe_rules *rules = NULL;
    assert_fails(mt_recipe_rules_create(&rules, "none", MT_I32), MT_EINVAL, "computed in i32");
    assert_fails(mt_recipe_rules_create(&rules, NULL, MT_F32), MT_EINVAL, "no text");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_presets), cmocka_unit_test(test_slots),
        cmocka_unit_test(test_text),    cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_rules),   cmocka_unit_test(test_bad_rules),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
