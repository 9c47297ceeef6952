/* Inside the configuration: values as text, and what one reading knows. */
#pragma once

#include "train/config.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MT_CONFIG_KEYS_MAX = 128, MT_CONFIG_PLACE = 256, MT_CONFIG_PATH = 128 };

/* A scalar, or a list of scalars. */
typedef struct mt_config_value {
    const char *const *items;
    int count;
    bool is_list;
} mt_config_value;

/* Stores a value under its key. Errors: MT_ECONFIG with the rule broken; the caller puts place and
 * key before it. */
mt_status mt_config_store(mt_config *config, const mt_config_key *key,
                          const mt_config_value *value);
/* The index of a path in mt_config_keys, or -1. */
int mt_config_find(const char *path);

/* What one reading knows beside the configuration: where each key was set. */
typedef struct mt_config_reader {
    mt_config *config;
    const char *file;
    const char *set;              /* the --set being read, or NULL */
    bool type_only;               /* only model.model_type, which sets other defaults, is read */
    int line[MT_CONFIG_KEYS_MAX]; /* of each key in the file; 0: not there */
    const char *sets[MT_CONFIG_KEYS_MAX]; /* the last --set that gives it, or NULL; known when types
                                           * have been read */
} mt_config_reader;

/* Fails with the place of what is being read, a line of the file or a --set, before the message. */
#define MT_CONFIG_FAIL(r, line, code, ...)                                                         \
    mt_config_fail_at((r), (line), MT_FAIL((code), __VA_ARGS__))
/* The current error again, so. */
mt_status mt_config_fail_at(const mt_config_reader *r, int line, mt_status status);

/* What is behind the sections of a path. */
const char *mt_config_leaf(const char *path);
/* Whether keys begin with "path.". */
bool mt_config_is_section(const char *path);
/* Sets the index-th key, unless only types are read and it is none. Errors: MT_ECONFIG for one that
 * is given twice, or what mt_config_store says. */
mt_status mt_config_set_key(mt_config_reader *r, int line, int index, const mt_config_value *v);
/* Fails, naming the key that `path` may have meant. */
mt_status mt_config_unknown_key(const mt_config_reader *r, int line, const char *path);

/* Fills what follows from other keys. */
void mt_config_settle(mt_config *config);
/* Finds conflicts in a settled configuration. Errors: as mt_config_load. */
mt_status mt_config_check(const mt_config_reader *reader);

#ifdef __cplusplus
}
#endif
