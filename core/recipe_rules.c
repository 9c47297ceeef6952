/* Rules that choose a recipe by layer and step. */
#include <fnmatch.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/recipe.h"

enum { MOST_DIGITS = 18 }; /* of a step: 64 bits hold them */

struct mt_recipe_rules {
    mt_recipe_rule *rules;
    size_t count;
};

static mt_status add_rule(mt_recipe_rules *rules, const char *layers, int64_t first, int64_t end,
                          const mt_recipe *recipe)
{
    MT_REQUIRE(first >= 0 && (end < 0 || first < end), MT_ECONFIG,
               "recipe rule: steps %" PRId64 "..%" PRId64 " are not a range", first, end);
    MT_TRY(mt_recipe_check(recipe));
    mt_recipe_rule *grown = realloc(rules->rules, (rules->count + 1) * sizeof *grown);
    MT_REQUIRE(grown, MT_ENOMEM, "recipe rules: no memory for %zu", rules->count + 1);
    rules->rules = grown;
    char *copy = layers ? strdup(layers) : NULL;
    MT_REQUIRE(copy || !layers, MT_ENOMEM, "recipe rules: no memory for '%.40s'", layers);
    grown[rules->count++] = (mt_recipe_rule){ copy, first, end, *recipe };
    return MT_OK;
}

/* "100..200", "..200", "100.." */
static mt_status read_steps(int64_t *first, int64_t *end, const char *text)
{
    const char *dots = strstr(text, "..");
    bool digits = dots != NULL;
    for (const char *c = text; *c && digits; c++)
        digits = (*c >= '0' && *c <= '9') || c == dots || c == dots + 1;
    MT_REQUIRE(digits && dots - text <= MOST_DIGITS && strlen(dots + 2) <= MOST_DIGITS, MT_ECONFIG,
               "recipe rule: steps '%.60s' are not A..B, or A-B in a list", text);
    *first = strtoll(text, NULL, 10);
    *end = dots[2] ? strtoll(dots + 2, NULL, 10) : -1;
    return MT_OK;
}

/* `none`, and then assignments as after a preset, or what mt_recipe_parse reads. */
static mt_status read_recipe(mt_recipe *recipe, const char *text, mt_dtype compute)
{
    static const char none[] = "none";
    size_t word = strcspn(text, " \t\n");
    char whole[MT_RECIPE_TEXT];
    if (word != strlen(none) || strncmp(text, none, word) != 0)
        return mt_recipe_parse(recipe, text);
    const char *name = mt_dtype_name(compute);
    int n = snprintf(whole, sizeof whole, "fprop=%s dgrad=%s wgrad=%s%s", name, name, name,
                     text + word);
    MT_REQUIRE(n >= 0 && (size_t)n < sizeof whole, MT_ECONFIG,
               "recipe '%.40s...' is longer than %d", text, MT_RECIPE_TEXT - 1);
    return mt_recipe_parse(recipe, whole);
}

/* Reads selectors off the front of a clause; the rest is a recipe. */
static mt_status add_clause(mt_recipe_rules *rules, char *clause, mt_dtype compute)
{
    char *layers = NULL, *steps = NULL;
    for (;;) {
        clause += strspn(clause, " \t\n");
        char **selector = !strncmp(clause, "layers=", 7)  ? &layers
                          : !strncmp(clause, "steps=", 6) ? &steps
                                                          : NULL;
        if (!selector) break;
        MT_REQUIRE(!*selector, MT_ECONFIG, "recipe rule: '%.60s' is given twice", clause);
        *selector = strchr(clause, '=') + 1;
        clause = *selector + strcspn(*selector, " \t\n");
        if (*clause) *clause++ = '\0';
    }
    MT_REQUIRE(rules->count > 0 || (!layers && !steps), MT_ECONFIG,
               "recipe rules: the first clause is for every layer and step: it takes no layers= "
               "or steps= (begin with 'none', which is train.dtype, or with a preset)");
    int64_t first = 0, end = -1;
    if (steps) MT_TRY(read_steps(&first, &end, steps));
    mt_recipe recipe;
    MT_TRY(read_recipe(&recipe, clause, compute));
    return add_rule(rules, layers, first, end, &recipe);
}

mt_status mt_recipe_rules_create(mt_recipe_rules **rules, const char *text, mt_dtype compute)
{
    mt_status status = MT_OK;
    MT_REQUIRE(text, MT_EINVAL, "recipe rules: no text");
    MT_REQUIRE(mt_format_plain(compute), MT_EINVAL, "recipe rules: nothing is computed in %s",
               mt_dtype_name(compute));
    mt_recipe_rules *made = calloc(1, sizeof *made);
    char *copy = strdup(text);
    if (!made || !copy) {
        status = MT_FAIL(MT_ENOMEM, "recipe rules: no memory");
        goto cleanup;
    }
    for (char *clause = copy; clause;) {
        char *next = strchr(clause, ';');
        if (next) *next++ = '\0';
        MT_TRY_CLEANUP(add_clause(made, clause, compute));
        clause = next;
    }
    *rules = made;
    made = NULL;
cleanup:
    free(copy);
    mt_recipe_rules_destroy(&made);
    return status;
}

void mt_recipe_rules_destroy(mt_recipe_rules **rules)
{
    if (!*rules) return;
    for (size_t i = 0; i < (*rules)->count; i++) free((*rules)->rules[i].layers);
    free((*rules)->rules);
    free(*rules);
    *rules = NULL;
}

bool mt_recipe_rule_covers(const mt_recipe_rule *rule, const char *layer)
{
    return !rule->layers || fnmatch(rule->layers, layer, 0) == 0;
}

const mt_recipe *mt_recipe_rules_select(const mt_recipe_rules *rules, const char *layer,
                                        int64_t step)
{
    for (size_t i = rules->count; i-- > 0;) {
        const mt_recipe_rule *r = &rules->rules[i];
        bool in_range = step >= r->first && (r->end < 0 || step < r->end);
        if (in_range && mt_recipe_rule_covers(r, layer)) return &r->recipe;
    }
    return NULL;
}

mt_status mt_recipe_rules_copy(mt_recipe_rules **copy, const mt_recipe_rules *rules)
{
    mt_status status = MT_OK;
    mt_recipe_rules *made = calloc(1, sizeof *made);
    MT_REQUIRE(made, MT_ENOMEM, "recipe rules: no memory");
    for (size_t i = 0; i < rules->count && status == MT_OK; i++) {
        const mt_recipe_rule *r = &rules->rules[i];
        status = add_rule(made, r->layers, r->first, r->end, &r->recipe);
    }
    if (status != MT_OK) mt_recipe_rules_destroy(&made);
    *copy = made;
    return status;
}

const mt_recipe_rule *mt_recipe_rules_get(const mt_recipe_rules *rules, size_t i)
{
    return i < rules->count ? &rules->rules[i] : NULL;
}

int64_t mt_recipe_rules_next_change(const mt_recipe_rules *rules, int64_t step)
{
    int64_t next = -1;
    for (size_t i = 0; i < rules->count; i++) {
        int64_t ends[2] = { rules->rules[i].first, rules->rules[i].end };
        for (int j = 0; j < 2; j++)
            if (ends[j] > step && (next < 0 || ends[j] < next)) next = ends[j];
    }
    return next;
}
