/* Reading, checking and writing configurations, driven by the table of config_schema.c. */
#include "train/config_priv.h"

#include <errno.h>
#include <stdlib.h>
#include <yaml.h>

#include "train/kind.h"

enum { FILE_MAX = 1 << 20, LIST_MAX = 256, DEPTH_MAX = 16, ANCHORS_MAX = 256 };

/* ---- YAML
 * ----------------------------------------------------------------------------------------
 */

static const char *scalar_of(const yaml_node_t *node)
{
    const char *text = (const char *)node->data.scalar.value;
    return strlen(text) == node->data.scalar.length ? text : NULL; /* a NUL within */
}

static int line_of(const yaml_node_t *node)
{
    return (int)node->start_mark.line + 1;
}

/* An empty value: the default stays. */
static bool is_null(const yaml_node_t *node)
{
    if (node->type != YAML_SCALAR_NODE || node->data.scalar.style != YAML_PLAIN_SCALAR_STYLE)
        return false;
    const char *text = (const char *)node->data.scalar.value;
    return !*text || strcmp(text, "~") == 0 || strcmp(text, "null") == 0;
}

/* "A-B" as the rules of core/recipe.h write it. */
static void put_steps(char *to, size_t room, const char *steps)
{
    const char *dash = strchr(steps, '-');
    if (dash && !strstr(steps, ".."))
        snprintf(to, room, "steps=%.*s..%s ", (int)(dash - steps), steps, dash + 1);
    else
        snprintf(to, room, "steps=%s ", steps);
}

enum { RULE_LAYERS, RULE_STEPS, RULE_USE, RULE_KEYS };

/* The values of one rule {layers, steps, use}; NULL: not given. One that would end its clause, or
 * its selector, is none. */
static mt_status read_rule(mt_config_reader *r, yaml_document_t *document, yaml_node_t *rule,
                           const char *values[RULE_KEYS])
{
    static const char *const names[RULE_KEYS] = { "layers", "steps", "use" };
    static const char *const ends[RULE_KEYS] = { "; \t\n", "; \t\n", ";" };
    yaml_node_pair_t *pair = rule->data.mapping.pairs.start;
    for (; pair < rule->data.mapping.pairs.top; pair++) {
        yaml_node_t *key = yaml_document_get_node(document, pair->key);
        yaml_node_t *node = yaml_document_get_node(document, pair->value);
        const char *name = key->type == YAML_SCALAR_NODE ? scalar_of(key) : NULL;
        const char *value = node->type == YAML_SCALAR_NODE ? scalar_of(node) : NULL;
        int line = line_of(key), i = 0;
        if (!name || !value)
            return MT_CONFIG_FAIL(r, line, MT_ECONFIG, "recipe: a rule's values are texts");
        while (i < RULE_KEYS && strcmp(name, names[i]) != 0) i++;
        if (i == RULE_KEYS)
            return MT_CONFIG_FAIL(r, line, MT_ECONFIG,
                                  "recipe: a rule has layers, steps and use, not '%.40s'", name);
        if (values[i])
            return MT_CONFIG_FAIL(r, line, MT_ECONFIG, "recipe: '%s' of a rule is given twice",
                                  name);
        if (strpbrk(value, ends[i]))
            return MT_CONFIG_FAIL(r, line, MT_ECONFIG,
                                  "recipe: '%s' of a rule is '%.60s': it holds no %s", name, value,
                                  i == RULE_USE ? "';'" : "blank and no ';'");
        values[i] = value;
    }
    return MT_OK;
}

/* The last rule of `text`, whose line is known here; the others were checked before it. Rules that
 * a --set replaces are not. */
static mt_status check_rules(mt_config_reader *r, int line, const char *text)
{
    mt_recipe_rules *rules;
    mt_status status = mt_recipe_rules_create(&rules, text, MT_F32); /* as good as any for `none` */
    if (status != MT_OK) return mt_config_fail_at(r, line, status);
    mt_recipe_rules_destroy(&rules);
    return MT_OK;
}

/* One rule as a clause behind those in `text`. */
static mt_status add_rule(mt_config_reader *r, yaml_document_t *document, yaml_node_t *rule,
                          char text[MT_CONFIG_TEXT])
{
    char layers[MT_CONFIG_TEXT] = "", steps[MT_CONFIG_TEXT] = "";
    const char *values[RULE_KEYS] = { NULL };
    int line = line_of(rule);
    if (rule->type != YAML_MAPPING_NODE)
        return MT_CONFIG_FAIL(r, line, MT_ECONFIG,
                              "recipe: a rule is a mapping of layers, steps and use");
    MT_TRY(read_rule(r, document, rule, values));
    if (!values[RULE_USE])
        return MT_CONFIG_FAIL(r, line, MT_ECONFIG, "recipe: a rule without 'use'");
    if (values[RULE_LAYERS]) snprintf(layers, sizeof layers, "layers=%s ", values[RULE_LAYERS]);
    if (values[RULE_STEPS]) put_steps(steps, sizeof steps, values[RULE_STEPS]);
    size_t used = strlen(text), room = MT_CONFIG_TEXT - used;
    int n =
        snprintf(text + used, room, "%s%s%s%s", used ? "; " : "", layers, steps, values[RULE_USE]);
    if (n < 0 || (size_t)n >= room)
        return MT_CONFIG_FAIL(r, line, MT_ECONFIG, "recipe: rules of more than %d bytes",
                              MT_CONFIG_TEXT);
    const char *given = r->sets[mt_config_find("recipe.use")];
    return r->type_only || given != r->set ? MT_OK : check_rules(r, line, text);
}

static mt_status read_rules(mt_config_reader *r, yaml_document_t *document, yaml_node_t *node,
                            int index)
{
    char text[MT_CONFIG_TEXT] = "";
    yaml_node_item_t *item = node->data.sequence.items.start;
    for (; item < node->data.sequence.items.top; item++)
        MT_TRY(add_rule(r, document, yaml_document_get_node(document, *item), text));
    const char *items[] = { text };
    return mt_config_set_key(r, line_of(node), index,
                             &(mt_config_value){ .items = items, .count = 1 });
}

static mt_status read_leaf(mt_config_reader *r, yaml_document_t *document, yaml_node_t *node,
                           int index)
{
    const char *items[LIST_MAX], *path = mt_config_keys[index].path;
    mt_config_value v = { .items = items, .is_list = node->type == YAML_SEQUENCE_NODE };
    int line = line_of(node);
    if (is_null(node)) return MT_OK;
    if (node->type == YAML_MAPPING_NODE)
        return MT_CONFIG_FAIL(r, line, MT_ECONFIG, "%s: a value is expected, not a mapping", path);
    if (v.is_list && strcmp(path, "recipe.use") == 0) return read_rules(r, document, node, index);
    if (!v.is_list) {
        items[v.count++] = scalar_of(node);
    } else {
        yaml_node_item_t *first = node->data.sequence.items.start,
                         *end = node->data.sequence.items.top;
        if (end - first > LIST_MAX)
            return MT_CONFIG_FAIL(r, line, MT_ECONFIG, "%s: more than %d items", path, LIST_MAX);
        for (; first < end; first++) {
            yaml_node_t *item = yaml_document_get_node(document, *first);
            if (item->type != YAML_SCALAR_NODE)
                return MT_CONFIG_FAIL(r, line_of(item), MT_ECONFIG, "%s: items are single values",
                                      path);
            items[v.count++] = scalar_of(item);
        }
    }
    for (int i = 0; i < v.count; i++)
        if (!items[i]) return MT_CONFIG_FAIL(r, line, MT_ECONFIG, "%s: the text holds a NUL", path);
    return mt_config_set_key(r, line, index, &v);
}

/* `prefix` is "" or "section."; as deep as the table's paths and no deeper. */
static mt_status read_mapping(mt_config_reader *r, yaml_document_t *document, yaml_node_t *node,
                              const char *prefix)
{
    yaml_node_pair_t *pair = node->data.mapping.pairs.start;
    for (; pair < node->data.mapping.pairs.top; pair++) {
        yaml_node_t *name = yaml_document_get_node(document, pair->key);
        yaml_node_t *child = yaml_document_get_node(document, pair->value);
        int line = line_of(name);
        char path[MT_CONFIG_PATH];
        const char *text = name->type == YAML_SCALAR_NODE ? scalar_of(name) : NULL;
        if (!text || snprintf(path, sizeof path - 1, "%s%s", prefix, text) >= MT_CONFIG_PATH - 1)
            return MT_CONFIG_FAIL(r, line, MT_ECONFIG, "%sthis is no name of a key", prefix);
        int index = mt_config_find(path);
        if (index < 0 && strcmp(path, "recipe") == 0 && child->type != YAML_MAPPING_NODE)
            index = mt_config_find("recipe.use");
        if (index >= 0) {
            MT_TRY(read_leaf(r, document, child, index));
        } else if (!mt_config_is_section(path)) {
            return mt_config_unknown_key(r, line, path);
        } else if (child->type == YAML_MAPPING_NODE) {
            strcat(path, ".");
            MT_TRY(read_mapping(r, document, child, path));
        } else if (!is_null(child)) {
            return MT_CONFIG_FAIL(r, line, MT_ECONFIG, "%s: a mapping of keys is expected", path);
        }
    }
    return MT_OK;
}

static mt_status yaml_failure(const mt_config_reader *r, const yaml_parser_t *parser)
{
    MT_REQUIRE(parser->error != YAML_MEMORY_ERROR, MT_ENOMEM, "%s: no memory to read it", r->file);
    return MT_CONFIG_FAIL(r, (int)parser->problem_mark.line + 1, MT_ECONFIG, "not YAML: %s%s%s",
                          parser->problem ? parser->problem : "unreadable",
                          parser->context ? ", " : "", parser->context ? parser->context : "");
}

/* The whole file (index < 0), or the value of one key. */
static mt_status read_document(mt_config_reader *r, yaml_document_t *document, int index)
{
    yaml_node_t *root = yaml_document_get_root_node(document);
    if (!root) return MT_OK;
    if (index >= 0) return read_leaf(r, document, root, index);
    if (root->type != YAML_MAPPING_NODE)
        return MT_CONFIG_FAIL(r, line_of(root), MT_ECONFIG,
                              "sections with keys are expected, such as model: and "
                              "data: (those in train/configs are examples)");
    return read_mapping(r, document, root, "");
}

static bool has_anchor(const yaml_event_t *event)
{
    switch (event->type) {
    case YAML_SCALAR_EVENT: return event->data.scalar.anchor != NULL;
    case YAML_SEQUENCE_START_EVENT: return event->data.sequence_start.anchor != NULL;
    case YAML_MAPPING_START_EVENT: return event->data.mapping_start.anchor != NULL;
    default: return false;
    }
}

/* Before a document is built: libyaml takes minutes where brackets are nested tens of thousands
 * deep, or where there are as many anchors, and no key needs them. What is not YAML ends this too,
 * and is named by who builds the document. */
static mt_status check_structure(const mt_config_reader *r, const char *text, size_t length)
{
    yaml_parser_t parser;
    yaml_event_t event;
    int depth = 0, anchors = 0, line = 0;
    MT_REQUIRE(yaml_parser_initialize(&parser), MT_ENOMEM, "%s: no memory to read it", r->file);
    yaml_parser_set_input_string(&parser, (const unsigned char *)text, length);
    for (bool more = true; more && depth <= DEPTH_MAX && anchors <= ANCHORS_MAX;) {
        if (!yaml_parser_parse(&parser, &event)) break;
        more = event.type != YAML_STREAM_END_EVENT;
        line = (int)event.start_mark.line + 1;
        depth += event.type == YAML_SEQUENCE_START_EVENT || event.type == YAML_MAPPING_START_EVENT;
        depth -= event.type == YAML_SEQUENCE_END_EVENT || event.type == YAML_MAPPING_END_EVENT;
        anchors += has_anchor(&event);
        yaml_event_delete(&event);
    }
    yaml_parser_delete(&parser);
    if (depth > DEPTH_MAX)
        return MT_CONFIG_FAIL(r, line, MT_ECONFIG, "lists and mappings nested more than %d deep",
                              DEPTH_MAX);
    if (anchors > ANCHORS_MAX)
        return MT_CONFIG_FAIL(r, line, MT_ECONFIG, "more than %d anchors", ANCHORS_MAX);
    return MT_OK;
}

static mt_status read_yaml(mt_config_reader *r, const char *text, size_t length, int index)
{
    yaml_parser_t parser;
    yaml_document_t document;
    MT_TRY(check_structure(r, text, length));
    MT_REQUIRE(yaml_parser_initialize(&parser), MT_ENOMEM, "%s: no memory to read it", r->file);
    yaml_parser_set_input_string(&parser, (const unsigned char *)text, length);
    mt_status status = MT_OK;
    if (!yaml_parser_load(&parser, &document)) {
        status = yaml_failure(r, &parser);
        goto cleanup;
    }
    status = read_document(r, &document, index);
    yaml_document_delete(&document);
    if (status != MT_OK) goto cleanup;
    if (!yaml_parser_load(&parser, &document)) {
        status = yaml_failure(r, &parser);
        goto cleanup;
    }
    yaml_node_t *second = yaml_document_get_root_node(&document);
    if (second) status = MT_CONFIG_FAIL(r, line_of(second), MT_ECONFIG, "a second document");
    yaml_document_delete(&document);
cleanup:
    yaml_parser_delete(&parser);
    return status;
}

/* "a.b=c" */
static mt_status read_set(mt_config_reader *r, const char *set)
{
    const char *equals = strchr(set, '=');
    char path[MT_CONFIG_PATH];
    MT_REQUIRE(equals && equals > set && equals - set < MT_CONFIG_PATH, MT_ECONFIG,
               "--set %.100s: section.key=value is expected", set);
    snprintf(path, sizeof path, "%.*s", (int)(equals - set), set);
    r->set = set;
    mt_status status;
    int index = mt_config_find(strcmp(path, "recipe") == 0 ? "recipe.use" : path);
    const char *text = equals + 1;
    if (index < 0)
        status = mt_config_is_section(path)
                     ? MT_CONFIG_FAIL(r, 0, MT_ECONFIG, "%s is a section of keys", path)
                     : mt_config_unknown_key(r, 0, path);
    else if (*text == '[')
        status = read_yaml(r, text, strlen(text), index);
    else
        status = mt_config_set_key(r, 0, index, &(mt_config_value){ .items = &text, .count = 1 });
    r->set = NULL;
    return status;
}

/* ---- reading
 * -------------------------------------------------------------------------------------
 */

static void default_name(mt_config *config, const char *path)
{
    const char *slash = strrchr(path, '/'), *base = slash ? slash + 1 : path;
    const char *dot = strrchr(base, '.');
    size_t length = dot && dot > base ? (size_t)(dot - base) : strlen(base);
    snprintf(config->name, sizeof config->name, "%.*s", (int)(length < 63 ? length : 63), base);
}

/* The defaults of every key but model.model_type, which is set. */
static mt_status set_defaults(mt_config *config)
{
    mt_model_config_defaults(&config->trainer.model, config->trainer.model.architecture);
    mt_optim_config_defaults(&config->trainer.optim);
    for (int i = 0; i < mt_config_key_count; i++) {
        const mt_config_key *key = &mt_config_keys[i];
        if (key->value && key->kind != MT_KEY_ARCHITECTURE)
            MT_TRY(mt_config_store(config, key,
                                   &(mt_config_value){ .items = &key->value, .count = 1 }));
    }
    return MT_OK;
}

mt_status mt_config_defaults(mt_config *config)
{
    *config = (mt_config){ 0 };
    const mt_config_key *type = &mt_config_keys[mt_config_find("model.model_type")];
    MT_TRY(mt_config_store(config, type, &(mt_config_value){ .items = &type->value, .count = 1 }));
    return set_defaults(config);
}

static mt_status read_all(mt_config_reader *r, const char *text, size_t length,
                          const char *const *sets, int set_count)
{
    MT_TRY(read_yaml(r, text, length, -1));
    for (int i = 0; i < set_count; i++) MT_TRY(read_set(r, sets[i]));
    return MT_OK;
}

/* What is given, over the defaults. */
static mt_status read_config(mt_config_reader *r, const char *text, size_t length,
                             const char *const *sets, int set_count)
{
    MT_ASSERT(mt_config_key_count <= MT_CONFIG_KEYS_MAX);
    MT_TRY(mt_config_defaults(r->config));
    mt_config_reader types = { .config = r->config, .file = r->file, .type_only = true };
    MT_TRY(read_all(&types, text, length, sets, set_count));
    MT_TRY(set_defaults(r->config));
    memcpy(r->sets, types.sets, sizeof r->sets);
    MT_TRY(read_all(r, text, length, sets, set_count));
    default_name(r->config, r->file);
    mt_config_settle(r->config);
    return MT_OK;
}

mt_status mt_config_parse(mt_config *config, const char *name, const char *text, size_t length,
                          const char *const *sets, int set_count)
{
    mt_config_reader reader = { .config = config, .file = name };
    MT_TRY(read_config(&reader, text, length, sets, set_count));
    return mt_config_check(&reader);
}

mt_status mt_config_parse_recorded(mt_config *config, const char *name, const char *text,
                                   size_t length)
{
    mt_config_reader reader = { .config = config, .file = name };
    return read_config(&reader, text, length, NULL, 0);
}

/* What is known to be something else is said to be that, where it would be called bad YAML. */
static mt_status check_kind(const char *path)
{
    mt_path_kind kind = mt_path_kind_find(path);
    const char *name = mt_path_kind_name(kind);
    if (kind < MT_KIND_DIRECTORY || kind == MT_KIND_EMPTY || kind == MT_KIND_TEXT) return MT_OK;
    MT_REQUIRE(kind != MT_KIND_RUN, MT_ECONFIG,
               "'%s' is %s, not a configuration, which is %s/config.resolved.yaml", path, name,
               path);
    MT_REQUIRE(kind == MT_KIND_OTHER, MT_ECONFIG,
               "'%s' is %s, not a configuration: that is a YAML text", path, name);
    return MT_OK;
}

/* Freed by the caller. */
static mt_status read_file(char **text, size_t *length, const char *path)
{
    mt_status status = MT_OK;
    FILE *file = fopen(path, "rb");
    MT_REQUIRE(file, MT_EIO, "configuration %s: %s", path, strerror(errno));
    *text = malloc(FILE_MAX + 1);
    if (!*text) MT_TRY_CLEANUP(MT_FAIL(MT_ENOMEM, "configuration %s: no memory to read it", path));
    *length = fread(*text, 1, FILE_MAX + 1, file);
    if (ferror(file))
        MT_TRY_CLEANUP(MT_FAIL(MT_EIO, "configuration %s: %s", path, strerror(errno)));
    if (*length > FILE_MAX)
        MT_TRY_CLEANUP(MT_FAIL(MT_ECONFIG, "configuration %s: more than %d bytes", path, FILE_MAX));
cleanup:
    fclose(file);
    return status;
}

mt_status mt_config_load(mt_config *config, const char *path, const char *const *sets,
                         int set_count)
{
    char *text = NULL;
    size_t length;
    MT_TRY(check_kind(path));
    mt_status status = read_file(&text, &length, path);
    if (status == MT_OK) status = mt_config_parse(config, path, text, length, sets, set_count);
    free(text);
    return status;
}

/* A run records every key: where one without a default is missing, the rest may be as well. */
static mt_status check_whole(const mt_config_reader *r, size_t length)
{
    MT_REQUIRE(length, MT_EDAMAGED, "configuration %s: the file is empty", r->file);
    for (int i = 0; i < mt_config_key_count; i++)
        MT_REQUIRE(!mt_config_keys[i].required || r->line[i], MT_EDAMAGED,
                   "configuration %s: the file is not whole: it has no %s", r->file,
                   mt_config_keys[i].path);
    return MT_OK;
}

mt_status mt_config_load_recorded(mt_config *config, const char *path)
{
    char *text = NULL;
    size_t length;
    mt_config_reader reader = { .config = config, .file = path };
    mt_status status = read_file(&text, &length, path);
    if (status == MT_OK) status = read_config(&reader, text, length, NULL, 0);
    if (status == MT_ECONFIG) /* a run's record is no one's to write: it has been damaged */
        status = MT_FAIL(MT_EDAMAGED, "%.1200s", mt_error_message());
    if (status == MT_OK) status = check_whole(&reader, length);
    free(text);
    return status;
}
