/* Inside the configuration: values as text, and what one reading knows. */
#pragma once

#include "train/config.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MT_CONFIG_KEYS_MAX = 128, MT_CONFIG_PLACE = 256 };

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
    const char *sets[MT_CONFIG_KEYS_MAX]; /* the --set that gave it, or NULL */
} mt_config_reader;

/* Fills what follows from other keys. */
void mt_config_settle(mt_config *config);
/* Finds conflicts in a settled configuration. Errors: as mt_config_load. */
mt_status mt_config_check(const mt_config_reader *reader);

#ifdef __cplusplus
}
#endif
