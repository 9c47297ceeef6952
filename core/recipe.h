/* A recipe: the number formats of a linear layer's three GEMMs, and rules that choose one by layer
 * and step (NUMERICS section 4).
 *
 * | pass  | operand 0 | operand 1 |
 * |-------|-----------|-----------|
 * | fprop | W row     | X row     |
 * | dgrad | W column  | dY row    |
 * | wgrad | X column  | dY column |
 *
 * A column under source=dequantized holds what the codes of its tensor's row hold: where the row is
 * plain, which has no codes, the option is refused.
 *
 * Text of a recipe: a preset's name, or assignments `fprop=FMT[:OPTS]/FMT[:OPTS] dgrad=...
 * wgrad=...` (one FMT means both operands), or a preset followed by assignments that replace its
 * own. A later assignment wins; backward=high_precision is dgrad=bf16 wgrad=bf16. */
#pragma once

#include "core/qtensor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum mt_pass { MT_FPROP, MT_DGRAD, MT_WGRAD, MT_PASS_COUNT } mt_pass;
typedef enum mt_operand { MT_OPERAND_W, MT_OPERAND_X, MT_OPERAND_DY, MT_OPERAND_COUNT } mt_operand;

typedef struct mt_recipe {
    mt_format_spec slot[MT_PASS_COUNT][2];
} mt_recipe;

enum { MT_RECIPE_TEXT = 3 * (2 * MT_FORMAT_SPEC_TEXT + 8) };

/* Which direction of which tensor a slot is. */
typedef struct mt_slot {
    mt_operand operand;
    mt_dir dir;
    const char *name; /* "W row" */
} mt_slot;
extern const mt_slot mt_slots[MT_PASS_COUNT][2];
extern const char *const mt_pass_names[MT_PASS_COUNT];

/* The name of preset i, NULL past the last. */
const char *mt_recipe_preset(int i);

/* Errors: MT_ECONFIG names the GEMM, the slot, and the rule. A recipe without preset must name all
 * three GEMMs. An option that only concerns columns (source) is dropped in a row slot where one FMT
 * stands for both operands and the other one is a column; any other row slot with it is refused. */
mt_status mt_recipe_parse(mt_recipe *recipe, const char *text);

/* Every slot in one plain type (f64, f32, bf16 or f16): nothing is quantized. */
mt_recipe mt_recipe_plain(mt_dtype dtype);

/* Fails with the slot named where six slots are not a recipe. */
mt_status mt_recipe_check(const mt_recipe *recipe);

/* The preset's name where the slots are a preset's, else all six slots; reads back as `recipe`. */
void mt_recipe_print(char text[MT_RECIPE_TEXT], const mt_recipe *recipe);

bool mt_recipe_equal(const mt_recipe *a, const mt_recipe *b);

/* The slot that a direction of a tensor is: the one GEMM that reads it. */
const mt_format_spec *mt_recipe_direction(const mt_recipe *recipe, mt_operand operand, mt_dir dir);

/* ---- rules --------------------------------------------------------------------------------------
 * Text: clauses separated by ';', each `[layers=GLOB] [steps=FIRST..END] RECIPE`, where RECIPE may
 * begin with `none`, the compute dtype in every slot; of the clauses that match a layer's name and
 * a step in [FIRST, END) the last one counts. Either end may be left out. The first clause names
 * neither layers nor steps, so there is always one. */
typedef struct mt_recipe_rules mt_recipe_rules;

typedef struct mt_recipe_rule {
    char *layers;       /* NULL: every layer */
    int64_t first, end; /* end < 0: none */
    mt_recipe recipe;
} mt_recipe_rule;

/* `compute`: what `none` stands for. Errors: MT_ECONFIG names what is no clause, and the rule;
 * MT_EINVAL a dtype without a plain format. */
mt_status mt_recipe_rules_create(mt_recipe_rules **rules, const char *text, mt_dtype compute);
void mt_recipe_rules_destroy(mt_recipe_rules **rules);

/* The recipe of a layer at a step; borrowed from the rules. */
const mt_recipe *mt_recipe_rules_select(const mt_recipe_rules *rules, const char *layer,
                                        int64_t step);

mt_status mt_recipe_rules_copy(mt_recipe_rules **copy, const mt_recipe_rules *rules);

/* Clause `i`, from 0, borrowed from the rules; NULL past the last. */
const mt_recipe_rule *mt_recipe_rules_get(const mt_recipe_rules *rules, size_t i);

/* Whether it is for a layer of this name, at some step. */
bool mt_recipe_rule_covers(const mt_recipe_rule *rule, const char *layer);

/* The next step after `step` at which some layer's recipe may change; -1: none. */
int64_t mt_recipe_rules_next_change(const mt_recipe_rules *rules, int64_t step);

#ifdef __cplusplus
}
#endif
