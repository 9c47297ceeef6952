/* Formats with options: the option table, the rules between options, reading and printing. */
#include "core/format_spec.h"

#include <stdio.h>
#include <stdlib.h>

typedef struct option_row {
    const char *name, *values; /* NULL: takes none */
    uint32_t bit;
    /* False when the value is not one of `values`; `value` is NULL when the text has none. */
    bool (*set)(mt_format_options *options, const char *value);
} option_row;

static bool set_e4m3(mt_format_options *o, const char *value)
{
    o->element = MT_ELEMENT_E4M3;
    return !value;
}

static bool set_e5m2(mt_format_options *o, const char *value)
{
    o->element = MT_ELEMENT_E5M2;
    return !value;
}

/* *on: whether `value` is the second of two words. */
static bool choose(bool *on, const char *value, const char *no, const char *yes)
{
    *on = value && !strcmp(value, yes);
    return *on || (value && !strcmp(value, no));
}

static bool set_pow2(mt_format_options *o, const char *value)
{
    return choose(&o->pow2, value ? value : "on", "off", "on");
}

static bool set_1d(mt_format_options *o, const char *value)
{
    o->two_d = false;
    return !value;
}

static bool set_2d(mt_format_options *o, const char *value)
{
    o->two_d = true;
    return !value;
}

static bool set_sr(mt_format_options *o, const char *value)
{
    return choose(&o->sr, value ? value : "on", "off", "on");
}

/* Decimal, with leading zeros or without, or 0x and hexadecimal. */
static bool set_rht(mt_format_options *o, const char *value)
{
    char *end = NULL;
    int base = value && (!strncmp(value, "0x", 2) || !strncmp(value, "0X", 2)) ? 16 : 10;
    unsigned long mask = value ? strtoul(value, &end, base) : mt_rht_default_mask;
    o->rht = true;
    o->rht_mask = (uint16_t)mask;
    return mask <= 0xffff && (!value || (value[0] >= '0' && value[0] <= '9' && !*end));
}

static bool set_4over6(mt_format_options *o, const char *value)
{
    bool wide = false;
    bool known = choose(&wide, value ? value : "256", "256", "448");
    o->four_over_six = wide ? 448 : 256;
    return known;
}

static bool set_err(mt_format_options *o, const char *value)
{
    return choose(&o->squared_error, value, "abs", "sq");
}

static bool set_scale(mt_format_options *o, const char *value)
{
    return choose(&o->scale_floor, value, "up", "floor");
}

static bool set_source(mt_format_options *o, const char *value)
{
    return choose(&o->from_dequantized, value, "original", "dequantized");
}

static const option_row option_rows[] = {
    { "e4m3", NULL, MT_OPT_E5M2, set_e4m3 },
    { "e5m2", NULL, MT_OPT_E5M2, set_e5m2 },
    { "pow2", "on or off", MT_OPT_POW2, set_pow2 },
    { "1d", NULL, MT_OPT_2D, set_1d },
    { "2d", NULL, MT_OPT_2D, set_2d },
    { "sr", "on or off", MT_OPT_SR, set_sr },
    { "rht", "a 16-bit mask such as 0xD7E8", MT_OPT_RHT, set_rht },
    { "4over6", "256 or 448", MT_OPT_4OVER6, set_4over6 },
    { "err", "abs or sq", MT_OPT_ERR, set_err },
    { "scale", "up or floor", MT_OPT_SCALE, set_scale },
    { "source", "original or dequantized", MT_OPT_SOURCE, set_source },
};
enum { OPTIONS = sizeof option_rows / sizeof option_rows[0] };

/* Why a format has no such option; indexed by the bit's place. */
static const char *const without[] = {
    "its elements have one type",
    "only fp8_tensor and fp8_block choose between exact and power-of-two scales",
    "square blocks are for mx, nvfp4 and fp8_block",
    "it has no codes to round to",
    "it has no codes of a column direction",
    "only nvfp4 blocks choose between 6 and 4",
    "only nvfp4 blocks choose between 6 and 4",
    "only mx scales are rounded up or down",
    "it has no codes of a row direction",
};
enum { OPTION_BITS = sizeof without / sizeof without[0] };

/* Options that exclude each other, or a format that the table grants the option to. */
static const struct clash {
    uint32_t options;
    uint32_t formats; /* bits 1 << id; 0: every format */
    const char *reason;
} clashes[] = {
    { MT_OPT_2D | MT_OPT_RHT, 0,
      "2d and rht: a square block has the same codes in both directions, a rotation changes one" },
    { MT_OPT_SOURCE | MT_OPT_2D, 0,
      "source=dequantized and 2d: a square block has the same codes in both directions" },
    { MT_OPT_SOURCE, 1u << MT_FORMAT_FP8_TENSOR | 1u << MT_FORMAT_FP8_DELAYED,
      "source=dequantized: both directions share one scale and the same codes" },
    { MT_OPT_RHT, 1u << MT_FORMAT_FP8_DELAYED,
      "rht: the amax history is that of the values before rotation" },
};
enum { CLASHES = sizeof clashes / sizeof clashes[0] };

mt_format_spec mt_format_spec_default(mt_format_id id)
{
    return (mt_format_spec){ &mt_formats[id], mt_format_defaults(&mt_formats[id]) };
}

uint32_t mt_format_spec_options(const mt_format_spec *spec)
{
    const mt_format_options *o = &spec->options;
    uint32_t bits = 0;
    if (o->element != spec->format->element) bits |= MT_OPT_E5M2;
    if (o->pow2 != spec->format->pow2) bits |= MT_OPT_POW2;
    if (o->two_d) bits |= MT_OPT_2D;
    if (o->sr) bits |= MT_OPT_SR;
    if (o->rht) bits |= MT_OPT_RHT;
    if (o->four_over_six) bits |= MT_OPT_4OVER6;
    if (o->squared_error) bits |= MT_OPT_ERR;
    if (o->scale_floor) bits |= MT_OPT_SCALE;
    if (o->from_dequantized) bits |= MT_OPT_SOURCE;
    return bits;
}

/* An option's name as `spec` would write it, for messages. */
static const char *option_name(uint32_t bit)
{
    for (int i = OPTIONS - 1; i >= 0; i--)
        if (option_rows[i].bit == bit) return option_rows[i].name;
    return "?";
}

/* option: the name that was read; NULL: none was. */
static mt_status check_meaning(const mt_format *format, uint32_t options, const char *option)
{
    for (int i = 0; i < OPTION_BITS; i++) {
        uint32_t bit = 1u << i;
        if (!(options & bit & ~format->options)) continue;
        return MT_FAIL(MT_ECONFIG, "format %s takes no option %s: %s", format->name,
                       option ? option : option_name(bit),
                       format->element == MT_ELEMENT_PLAIN ? "a plain format has no options"
                                                           : without[i]);
    }
    return MT_OK;
}

mt_status mt_format_spec_check(const mt_format_spec *spec)
{
    const mt_format *format = spec->format;
    const mt_format_options *o = &spec->options;
    uint32_t options = mt_format_spec_options(spec);
    MT_TRY(check_meaning(format, options, NULL));
    for (int i = 0; i < CLASHES; i++) {
        const struct clash *c = &clashes[i];
        bool all = (options & c->options) == c->options;
        MT_REQUIRE(!all || (c->formats && !(c->formats >> format->id & 1)), MT_ECONFIG,
                   "format %s cannot have %s", format->name, c->reason);
    }
    MT_REQUIRE(!o->squared_error || o->four_over_six, MT_ECONFIG,
               "format %s: err= chooses the error of 4over6, which is not on", format->name);
    MT_REQUIRE(!o->four_over_six || o->four_over_six == 256 || o->four_over_six == 448, MT_ECONFIG,
               "format %s: 4over6 has the bound 256 or 448, not %d", format->name,
               o->four_over_six);
    MT_REQUIRE(!(options & MT_OPT_E5M2) || o->element == MT_ELEMENT_E5M2, MT_ECONFIG,
               "format %s has no elements of type %d", format->name, (int)o->element);
    return MT_OK;
}

static mt_status read_option(mt_format_spec *spec, uint32_t *given, char *option)
{
    char *value = strchr(option, '=');
    if (value) *value++ = '\0';
    for (int i = 0; i < OPTIONS; i++) {
        const option_row *row = &option_rows[i];
        if (strcmp(row->name, option)) continue;
        MT_REQUIRE(!(*given & row->bit), MT_ECONFIG,
                   "format %s: option %s is given twice or contradicts another", spec->format->name,
                   option);
        MT_TRY(check_meaning(spec->format, row->bit, option));
        *given |= row->bit;
        if (row->set(&spec->options, value)) return MT_OK;
        return row->values ? MT_FAIL(MT_ECONFIG, "format %s: option %s is %s, must be %s",
                                     spec->format->name, option, value ? value : "without a value",
                                     row->values)
                           : MT_FAIL(MT_ECONFIG, "format %s: option %s takes no value, not '%s'",
                                     spec->format->name, option, value);
    }
    char known[128];
    size_t used = 0;
    for (int i = 0; i < OPTIONS; i++)
        used += (size_t)snprintf(known + used, sizeof known - used, " %s", option_rows[i].name);
    return MT_FAIL(MT_ECONFIG, "format %s: option '%s' is not one of%s", spec->format->name, option,
                   known);
}

mt_status mt_format_spec_read(mt_format_spec *spec, uint32_t *given, const char *text)
{
    char copy[MT_FORMAT_SPEC_TEXT];
    MT_REQUIRE(text, MT_EINVAL, "format: no text");
    MT_REQUIRE(strlen(text) < sizeof copy, MT_ECONFIG, "format '%.40s...' is longer than %d", text,
               MT_FORMAT_SPEC_TEXT - 1);
    strcpy(copy, text);
    char *option = strchr(copy, ':');
    if (option) *option++ = '\0';
    const mt_format *format = NULL;
    MT_TRY(mt_format_find(&format, copy));
    *spec = mt_format_spec_default(format->id);
    *given = 0;
    while (option) {
        char *next = strchr(option, '+');
        if (next) *next++ = '\0';
        MT_TRY(read_option(spec, given, option));
        option = next;
    }
    MT_REQUIRE(!(*given & MT_OPT_ERR) || spec->options.four_over_six, MT_ECONFIG,
               "format %s: err= chooses the error of 4over6, which is not on", format->name);
    return MT_OK;
}

mt_status mt_format_spec_parse(mt_format_spec *spec, const char *text)
{
    uint32_t given;
    MT_TRY(mt_format_spec_read(spec, &given, text));
    return mt_format_spec_check(spec);
}

mt_format_spec mt_format_spec_of_rows(mt_format_spec spec)
{
    spec.options.rht = spec.options.from_dequantized = false;
    spec.options.rht_mask = 0;
    return spec;
}

bool mt_format_spec_equal(const mt_format_spec *a, const mt_format_spec *b)
{
    const mt_format_options *x = &a->options, *y = &b->options;
    return a->format == b->format && mt_format_spec_options(a) == mt_format_spec_options(b) &&
           x->rht_mask == y->rht_mask && x->four_over_six == y->four_over_six;
}

void mt_format_spec_print(char text[MT_FORMAT_SPEC_TEXT], const mt_format_spec *spec,
                          uint32_t defaults)
{
    const mt_format_options *o = &spec->options;
    uint32_t options = mt_format_spec_options(spec), differ = options ^ defaults;
    char words[OPTION_BITS][24];
    int count = 0;
#define WORD(...) snprintf(words[count++], sizeof words[0], __VA_ARGS__)
    if (differ & MT_OPT_E5M2) WORD("%s", mt_elements[o->element].name);
    if (differ & MT_OPT_POW2) WORD("pow2=%s", o->pow2 ? "on" : "off");
    if (differ & MT_OPT_2D) WORD("%s", o->two_d ? "2d" : "1d");
    if (differ & MT_OPT_SR) WORD("%s", o->sr ? "sr" : "sr=off");
    if (o->rht && o->rht_mask == mt_rht_default_mask) WORD("rht");
    if (o->rht && o->rht_mask != mt_rht_default_mask) WORD("rht=0x%04X", o->rht_mask);
    if (o->four_over_six) WORD("4over6%s", o->four_over_six == 448 ? "=448" : "");
    if (o->squared_error) WORD("err=sq");
    if (o->scale_floor) WORD("scale=floor");
    if (o->from_dequantized) WORD("source=dequantized");
#undef WORD
    size_t used = (size_t)snprintf(text, MT_FORMAT_SPEC_TEXT, "%s", spec->format->name);
    for (int i = 0; i < count; i++)
        used += (size_t)snprintf(text + used, MT_FORMAT_SPEC_TEXT - used, "%c%s", i ? '+' : ':',
                                 words[i]);
}
