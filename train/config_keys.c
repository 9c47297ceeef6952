/* Keys of a configuration: found by name, set, and, where one is unknown, the one that was meant.
 */
#include "train/config_priv.h"

#include <stdio.h>
#include <string.h>

#include "train/nearest.h"

/* ---- places
 * --------------------------------------------------------------------------------------
 */

static void place_now(char text[MT_CONFIG_PLACE], const mt_config_reader *r, int line)
{
    if (r->set)
        snprintf(text, MT_CONFIG_PLACE, "--set %.*s: ", MT_CONFIG_PATH, r->set);
    else
        snprintf(text, MT_CONFIG_PLACE, "%.*s:%d: ", MT_CONFIG_PATH, r->file, line);
}

mt_status mt_config_fail_at(const mt_config_reader *r, int line, mt_status status)
{
    char place[MT_CONFIG_PLACE];
    place_now(place, r, line);
    return MT_FAIL(status, "%s%s", place, mt_error_message());
}

/* ---- keys
 * ----------------------------------------------------------------------------------------
 */

int mt_config_find(const char *path)
{
    for (int i = 0; i < mt_config_key_count; i++)
        if (strcmp(mt_config_keys[i].path, path) == 0) return i;
    return -1;
}

bool mt_config_is_section(const char *path)
{
    size_t length = strlen(path);
    for (int i = 0; i < mt_config_key_count; i++)
        if (strncmp(mt_config_keys[i].path, path, length) == 0 &&
            mt_config_keys[i].path[length] == '.')
            return true;
    return false;
}

const char *mt_config_leaf(const char *path)
{
    const char *dot = strrchr(path, '.');
    return dot ? dot + 1 : path;
}

/* The path a mistaken one was meant to be: the same name in another section, else the most like it
 * in its own, else the most like it anywhere. NULL when none is near. */
static const char *nearest_key(const char *path)
{
    const char *leaf = mt_config_leaf(path), *names[MT_CONFIG_KEYS_MAX], *near = NULL;
    size_t section = (size_t)(leaf - path);
    for (int own = 1; own >= 0 && !near; own--) {
        int count = 0;
        for (int i = 0; i < mt_config_key_count; i++) {
            const char *key = mt_config_keys[i].path;
            if (strcmp(mt_config_leaf(key), leaf) == 0) return key;
            bool inside =
                (size_t)(mt_config_leaf(key) - key) == section && !strncmp(key, path, section);
            if (inside == (own == 1)) names[count++] = mt_config_leaf(key);
        }
        near = count ? mt_nearest(leaf, names, count, sizeof names[0]) : NULL;
    }
    for (int i = 0; near && i < mt_config_key_count; i++) /* leaves point into their paths */
        if (mt_config_leaf(mt_config_keys[i].path) == near) return mt_config_keys[i].path;
    return NULL;
}

static const char *nearest_section(const char *name)
{
    static const char *const sections[] = { "model",  "data",       "train",
                                            "optim",  "recipe",     "statistics",
                                            "memory", "checkpoint", "parallel" };
    return mt_nearest(name, sections, sizeof sections / sizeof *sections, sizeof *sections);
}

mt_status mt_config_unknown_key(const mt_config_reader *r, int line, const char *path)
{
    static const char hugging_face[] = "config.json";
    const char *dot = strchr(path, '.'), *section_meant = NULL, *near = NULL;
    size_t length = strlen(r->file), end = sizeof hugging_face - 1;
    if (!r->set && !dot && length >= end && !strcmp(r->file + length - end, hugging_face))
        return MT_CONFIG_FAIL(
            r, line, MT_ECONFIG,
            "unknown key %s: a configuration holds a Hugging Face config.json's keys "
            "under model:, beside data: and train:",
            path);
    if (!strcmp(path, "recipe.layers") || !strcmp(path, "recipe.steps"))
        return MT_CONFIG_FAIL(r, line, MT_ECONFIG,
                              "unknown key %s: rules are items of a list, recipe: [{use: ..., "
                              "%s: ...}]",
                              path, dot + 1);
    char section[MT_CONFIG_PATH], meant[MT_CONFIG_PATH * 2];
    snprintf(section, sizeof section, "%.*s", dot ? (int)(dot - path) : (int)strlen(path), path);
    if (!mt_config_is_section(section)) section_meant = nearest_section(section);
    snprintf(meant, sizeof meant, "%s%s", section_meant ? section_meant : section, dot ? dot : "");
    if (mt_config_find(meant) >= 0 || mt_config_is_section(meant))
        near = meant;
    else
        near = nearest_key(meant);
    return MT_CONFIG_FAIL(r, line, MT_ECONFIG,
                          "unknown key %s%s%s (`mixtape train --help-config` lists all)", path,
                          near ? ": did you mean " : "", near ? near : "");
}

mt_status mt_config_set_key(mt_config_reader *r, int line, int index, const mt_config_value *v)
{
    const mt_config_key *key = &mt_config_keys[index];
    int to = key->alias_of ? mt_config_find(key->alias_of) : index;
    if (!r->set && r->line[to])
        return MT_CONFIG_FAIL(r, line, MT_ECONFIG, "%s is given twice, first in line %d", key->path,
                              r->line[to]);
    if (r->set) r->sets[to] = r->set;
    if (r->type_only && key->kind != MT_KEY_ARCHITECTURE) return MT_OK;
    mt_status status = mt_config_store(r->config, key, v);
    if (status != MT_OK)
        return MT_CONFIG_FAIL(r, line, status, "%s: %s", key->path, mt_error_message());
    if (!r->set) r->line[to] = line;
    return MT_OK;
}
