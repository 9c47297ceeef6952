/* The configuration as YAML, and its explanation. */
#include "train/config_priv.h"

#include <stdlib.h>
#include <string.h>

enum { INDENT = 2 };

/* Characters that two paths share up to and with a dot. */
static size_t shared_sections(const char *a, const char *b)
{
    size_t shared = 0;
    for (size_t i = 0; a[i] && a[i] == b[i]; i++)
        if (a[i] == '.') shared = i + 1;
    return shared;
}

/* Headings of the sections that `path` is in and `last` was not; returns the depth of the key. */
static int write_sections(FILE *file, const char *path, const char *last)
{
    size_t shared = shared_sections(path, last);
    int depth = 0;
    const char *part = path;
    for (const char *dot = strchr(part, '.'); dot; dot = strchr(part, '.')) {
        if ((size_t)(dot - path) >= shared)
            fprintf(file, "%*s%.*s:\n", depth * INDENT, "", (int)(dot - part), part);
        part = dot + 1;
        depth++;
    }
    return depth;
}

void mt_config_write(const mt_config *config, FILE *file)
{
    char text[MT_CONFIG_FORMATTED];
    const char *last = "";
    for (int i = 0; i < mt_config_key_count; i++) {
        const mt_config_key *key = &mt_config_keys[i];
        if (key->alias_of) continue;
        int depth = write_sections(file, key->path, last);
        mt_config_format(text, config, key);
        fprintf(file, "%*s%s: %s\n", depth * INDENT, "", mt_config_leaf(key->path), text);
        last = key->path;
    }
}

mt_status mt_config_text(char **text, const mt_config *config)
{
    size_t length = 0;
    *text = NULL;
    FILE *file = open_memstream(text, &length);
    MT_REQUIRE(file, MT_ENOMEM, "configuration: no memory to write it");
    mt_config_write(config, file);
    bool failed = ferror(file) != 0;
    if (fclose(file) == 0 && !failed) return MT_OK;
    free(*text);
    *text = NULL;
    return MT_FAIL(MT_ENOMEM, "configuration: no memory to write it");
}

mt_status mt_config_help(FILE *file)
{
    mt_config defaults;
    char text[MT_CONFIG_FORMATTED];
    const char *last = "";
    MT_TRY(mt_config_defaults(&defaults));
    fprintf(file, "# Every configuration key with its default (of model_type qwen3_moe).\n");
    for (int i = 0; i < mt_config_key_count; i++) {
        const mt_config_key *key = &mt_config_keys[i];
        int depth = write_sections(file, key->path, last), names = 0;
        mt_config_format(text, &defaults, key);
        const bool required = key->required || key->required_of_experts;
        int width = fprintf(file, "%*s%s: %s", depth * INDENT, "", mt_config_leaf(key->path),
                            required || key->alias_of ? "" : text);
        fprintf(file, "%*s  # %s%s", width < 36 ? 36 - width : 0, "", required ? "required: " : "",
                key->help);
        while (key->names && key->names[names]) names++;
        for (int n = 0; n < names; n++)
            fprintf(file, "%s%s%s", n ? "|" : " (", key->names[n], n + 1 < names ? "" : ")");
        fprintf(file, "\n");
        last = key->path;
    }
    return MT_OK;
}
