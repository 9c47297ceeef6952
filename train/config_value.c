/* One value of the configuration: from text, and back. */
#include "train/config_priv.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>

#include "train/nearest.h"

static void *field_of(const mt_config *config, const mt_config_key *key)
{
    return (char *)config + key->offset;
}

/* ---- one value from text ------------------------------------------------------------------------
 * Each fails with the rule broken; the caller puts key and place before it. */

/* Bounds are integers; as a double an integer past 2^53 may seem to be one. */
static bool is_between(int64_t x, double min, double max)
{
    return (min < -0x1p62 || x >= (int64_t)min) && (max > 0x1p62 || x <= (int64_t)max);
}

static mt_status parse_int(int64_t *out, const mt_config_key *key, const char *text)
{
    char *end = NULL;
    errno = 0;
    long long x = strtoll(text, &end, 10);
    MT_REQUIRE(errno != ERANGE, MT_ECONFIG, "%s is not in -2^63..2^63-1", text);
    MT_REQUIRE(end != text && !*end && errno == 0, MT_ECONFIG, "'%s' is not an integer", text);
    MT_REQUIRE((key->min == 0 && key->max == 0) || is_between(x, key->min, key->max), MT_ECONFIG,
               "%lld is not in %.0f..%.0f", x, key->min, key->max);
    *out = x;
    return MT_OK;
}

static mt_status parse_real(double *out, const mt_config_key *key, const char *text)
{
    char *end = NULL;
    double x = strtod(text, &end);
    MT_REQUIRE(end != text && !*end && isfinite(x) && !strpbrk(text, "xX"), MT_ECONFIG,
               "'%s' is not a finite number in decimal", text);
    MT_REQUIRE((key->min == 0 && key->max == 0) || (x >= key->min && x <= key->max), MT_ECONFIG,
               "%g is not in %g..%g", x, key->min, key->max);
    *out = x;
    return MT_OK;
}

static int name_count(const char *const *names)
{
    int n = 0;
    while (names[n]) n++;
    return n;
}

static mt_status parse_name(int *out, const char *const *names, const char *text)
{
    char known[256] = "";
    for (int i = 0; names[i]; i++) {
        if (strcmp(names[i], text) == 0) {
            *out = i;
            return MT_OK;
        }
        size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "", names[i]);
    }
    const char *near = mt_nearest(text, names, name_count(names), sizeof *names);
    return MT_FAIL(MT_ECONFIG, "'%s' is not one of %s%s%s%s", text, known,
                   near ? " (did you mean " : "", near ? near : "", near ? "?)" : "");
}

static const char *const booleans[] = { "false", "true", NULL };

static const char *const *bool_names(const mt_config_key *key)
{
    return key->names ? key->names : booleans;
}

/* The code point at *text, which moves past it; -1 when it is not UTF-8. */
static long next_code_point(const unsigned char **text)
{
    const unsigned char *p = *text;
    int more = *p < 0x80 ? 0 : *p < 0xc2 ? -1 : *p < 0xe0 ? 1 : *p < 0xf0 ? 2 : *p < 0xf5 ? 3 : -1;
    if (more < 0) return -1;
    long code = more ? *p & (0x3f >> more) : *p;
    for (int i = 1; i <= more; i++) {
        if ((p[i] & 0xc0) != 0x80) return -1;
        code = code << 6 | (p[i] & 0x3f);
    }
    bool overlong = (more == 2 && code < 0x800) || (more == 3 && code < 0x10000);
    if (overlong || code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) return -1;
    *text = p + more + 1;
    return code;
}

/* Only what YAML reads back as it is written: no control characters, no line or paragraph
 * separators. */
static mt_status check_text(const char *text)
{
    MT_REQUIRE(strlen(text) < MT_CONFIG_TEXT, MT_ECONFIG, "the text has %zu bytes, at most %d fit",
               strlen(text), MT_CONFIG_TEXT - 1);
    for (const unsigned char *p = (const unsigned char *)text; *p;) {
        long code = next_code_point(&p);
        MT_REQUIRE(code >= 0, MT_ECONFIG, "the text is not UTF-8 at byte %td",
                   (const char *)p - text);
        bool control = code < 0x20 || (code >= 0x7f && code < 0xa0) || code == 0x2028 ||
                       code == 0x2029 || code == 0xfeff || code == 0xfffe || code == 0xffff;
        MT_REQUIRE(!control, MT_ECONFIG, "the text holds the control character U+%04lX", code);
    }
    return MT_OK;
}

static mt_status parse_text(char out[MT_CONFIG_TEXT], const char *text)
{
    MT_TRY(check_text(text));
    memcpy(out, text, strlen(text) + 1);
    return MT_OK;
}

static mt_status parse_texts(char out[MT_CONFIG_TEXT], const mt_config_value *v)
{
    size_t used = 0;
    char joined[MT_CONFIG_TEXT] = "";
    for (int i = 0; i < v->count; i++) {
        MT_TRY(check_text(v->items[i]));
        MT_REQUIRE(*v->items[i] && !strchr(v->items[i], ','), MT_ECONFIG,
                   "item '%s' is empty or holds a comma", v->items[i]);
        used += (size_t)snprintf(joined + used, sizeof joined - used, "%s%s", i ? "," : "",
                                 v->items[i]);
        MT_REQUIRE(used < sizeof joined, MT_ECONFIG, "the list is longer than %d bytes",
                   MT_CONFIG_TEXT - 1);
    }
    memcpy(out, joined, sizeof joined);
    return MT_OK;
}

static mt_status parse_layers(mt_model_config *model, const mt_config_value *v)
{
    const mt_config_key layer = { .min = 0, .max = MT_MAX_LAYERS - 1 };
    MT_REQUIRE(v->count <= MT_MAX_LAYERS, MT_ECONFIG, "%d layers, at most %d fit", v->count,
               MT_MAX_LAYERS);
    for (int i = 0; i < v->count; i++)
        MT_TRY(parse_int(&model->mlp_only_layers[i], &layer, v->items[i]));
    model->mlp_only_layer_count = v->count;
    return MT_OK;
}

mt_status mt_config_store(mt_config *config, const mt_config_key *key, const mt_config_value *v)
{
    void *field = field_of(config, key);
    bool takes_list = key->kind == MT_KEY_TEXTS || key->kind == MT_KEY_LAYERS;
    MT_REQUIRE(v->is_list == takes_list, MT_ECONFIG, "%s is expected",
               takes_list ? "a list" : "a single value");
    const char *text = takes_list ? "" : v->items[0];
    int index = 0;
    switch (key->kind) {
    case MT_KEY_BOOL:
        MT_TRY(parse_name(&index, bool_names(key), text));
        *(bool *)field = index == 1;
        return MT_OK;
    case MT_KEY_INT: return parse_int(field, key, text);
    case MT_KEY_REAL: return parse_real(field, key, text);
    case MT_KEY_ENUM: return parse_name(field, key->names, text);
    case MT_KEY_TEXT: return parse_text(field, text);
    case MT_KEY_TEXTS: return parse_texts(field, v);
    case MT_KEY_LAYERS: return parse_layers(field, v);
    case MT_KEY_ARCHITECTURE: return mt_architecture_find(field, text);
    case MT_KEY_KIND_COUNT: break;
    }
    return MT_FAIL(MT_EINTERNAL, "key %s has no kind", key->path);
}

/* ---- and back
 * ------------------------------------------------------------------------------------
 */

typedef struct text_out {
    char *text;
    size_t used;
} text_out;

static void put(text_out *out, const char *format, ...) MT_PRINTF(2, 3);
static void put(text_out *out, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int n = vsnprintf(out->text + out->used, MT_CONFIG_FORMATTED - out->used, format, args);
    va_end(args);
    if (n > 0) out->used += (size_t)n;
    MT_ASSERT(out->used < MT_CONFIG_FORMATTED);
}

/* The fewest digits that read back to the same bits, whole numbers below a million without
 * exponent. Before an exponent YAML 1.1, which PyYAML reads, wants a point: 1e-06 is a text there.
 */
static void put_real(text_out *out, double x)
{
    char text[32];
    bool plain = fabs(x) < 1e6 && x == trunc(x);
    for (int digits = plain ? 6 : 1; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, x);
        if (strtod(text, NULL) == x) break;
    }
    size_t mantissa = strcspn(text, "e");
    bool point = text[mantissa] && !memchr(text, '.', mantissa);
    put(out, "%.*s%s%s", (int)mantissa, text, point ? ".0" : "", text + mantissa);
}

static void put_text(text_out *out, const char *text, size_t length)
{
    static const char safe[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./-";
    bool plain = length && strspn(text, safe) >= length && text[0] != '-' &&
                 !(length == 4 && strncmp(text, "null", 4) == 0);
    if (!plain) put(out, "\"");
    for (size_t i = 0; i < length; i++)
        put(out, "%s%c", text[i] == '"' || text[i] == '\\' ? "\\" : "", text[i]);
    if (!plain) put(out, "\"");
}

static void put_texts(text_out *out, const char *joined)
{
    put(out, "[");
    for (const char *item = joined; *item;) {
        size_t length = strcspn(item, ",");
        if (item != joined) put(out, ", ");
        put_text(out, item, length);
        item += length + (item[length] == ',');
    }
    put(out, "]");
}

static void put_layers(text_out *out, const mt_model_config *model)
{
    put(out, "[");
    for (int64_t i = 0; i < model->mlp_only_layer_count; i++)
        put(out, "%s%lld", i ? ", " : "", (long long)model->mlp_only_layers[i]);
    put(out, "]");
}

void mt_config_format(char text[MT_CONFIG_FORMATTED], const mt_config *config,
                      const mt_config_key *key)
{
    const void *field = field_of(config, key);
    text_out out = { text, 0 };
    text[0] = '\0';
    switch (key->kind) {
    case MT_KEY_BOOL: put(&out, "%s", bool_names(key)[*(const bool *)field]); break;
    case MT_KEY_INT: put(&out, "%lld", (long long)*(const int64_t *)field); break;
    case MT_KEY_REAL: put_real(&out, *(const double *)field); break;
    case MT_KEY_ENUM: put(&out, "%s", key->names[*(const int *)field]); break;
    case MT_KEY_TEXT: put_text(&out, field, strlen(field)); break;
    case MT_KEY_TEXTS: put_texts(&out, field); break;
    case MT_KEY_LAYERS: put_layers(&out, field); break;
    case MT_KEY_ARCHITECTURE:
        put(&out, "%s", (*(const mt_architecture *const *)field)->model_type);
        break;
    case MT_KEY_KIND_COUNT: break;
    }
}
