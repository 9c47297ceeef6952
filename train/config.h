/* The configuration of a run: one table of keys, read from YAML and --set, written back, explained.
 *
 * Every key is a row of mt_config_keys: its path, type, bounds, default, one line of help and where
 * it goes in struct mt_config. Reading, --set, --help-config, config.resolved.yaml and the
 * comparison on resume are loops over that table; a new key is a new row. */
#pragma once

#include <stdio.h>

#include "train/trainer.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    MT_CONFIG_TEXT = 1024,     /* bytes of a text value, its end included */
    MT_CONFIG_FORMATTED = 4096 /* bytes of any value as it is written back */
};

/* A plain value: it owns nothing and may be copied. */
typedef struct mt_config {
    char name[64]; /* of the file, without folder and ending: "demo" */
    mt_trainer_config
        trainer; /* sections model, optim, memory, and what a step needs of the others */
    char train_corpus[MT_CONFIG_TEXT], valid_corpus[MT_CONFIG_TEXT]; /* valid: "" for none */
    char init_from[MT_CONFIG_TEXT]; /* checkpoint or run that the weights begin as; "": drawn */
    int64_t eval_every, eval_batches,
        log_every; /* eval_every 0: only at the end; eval_batches 0: all */
    int64_t checkpoint_every, keep_last, keep_every; /* checkpoint_every 0: only at the end */
    char device[MT_CONFIG_TEXT];
    double rank_timeout; /* seconds that a rank waits for the others */
    char statistics_layers[MT_CONFIG_TEXT], statistics_tensors[MT_CONFIG_TEXT];
    char statistics_what_if[MT_CONFIG_TEXT];
    int64_t statistics_every;
} mt_config;

typedef enum mt_key_kind {
    MT_KEY_BOOL,         /* bool; `names` may rename false and true */
    MT_KEY_INT,          /* int64_t, or a uint64_t below 2^63 */
    MT_KEY_REAL,         /* double */
    MT_KEY_ENUM,         /* any enum: the index in `names` */
    MT_KEY_TEXT,         /* char[MT_CONFIG_TEXT] */
    MT_KEY_TEXTS,        /* the same, a list joined with commas */
    MT_KEY_LAYERS,       /* mt_model_config.mlp_only_layers and its count */
    MT_KEY_ARCHITECTURE, /* const mt_architecture *: model_type */
    MT_KEY_KIND_COUNT
} mt_key_kind;

typedef struct mt_config_key {
    const char *path; /* "train.batch_size" */
    mt_key_kind kind;
    size_t offset;            /* in mt_config */
    double min, max;          /* of numbers, inclusive; both 0: no bounds */
    const char *const *names; /* of an enum, NULL-terminated */
    const char *value;        /* default; NULL: that of the model type or the optimizer, "" or 0 */
    bool required;
    bool required_of_experts; /* of a model that has any */
    bool fixed;               /* a run cannot be resumed with another value */
    bool neutral;             /* weights and losses do not depend on it by a bit */
    const char *alias_of;     /* only another name of that key: read, not written */
    const char *help;
} mt_config_key;

extern const mt_config_key mt_config_keys[];
extern const int mt_config_key_count;

/* Every default; the model's sizes and data.train stay empty. */
mt_status mt_config_defaults(mt_config *config);

/* Reads a file, then `sets` ("a.b=c", later ones win), then checks everything that can be known
 * without opening a corpus or allocating. Errors: MT_ECONFIG with file and line, key, value and
 * rule; MT_EIO. */
mt_status mt_config_load(mt_config *config, const char *path, const char *const *sets,
                         int set_count);
/* Whether `name` may stand for the key device: auto, cpu, cuda or cuda:N. Which of them there are
 * is known where the device is opened. */
mt_status mt_config_check_device(const char *name);

/* A type to compute in. Errors: MT_ECONFIG lists those that there are. */
mt_status mt_config_parse_compute(mt_dtype *dtype, const char *name);
/* The same from text; `name` stands for the file in errors. */
mt_status mt_config_parse(mt_config *config, const char *name, const char *text, size_t length,
                          const char *const *sets, int set_count);
/* The same of what a run has recorded, in config.resolved.yaml or a checkpoint: each value is read,
 * but not whether they go together, which the program of then has judged by its own rules. A file
 * without the keys that have no default is damaged: MT_EDAMAGED. */
mt_status mt_config_load_recorded(mt_config *config, const char *path);
mt_status mt_config_parse_recorded(mt_config *config, const char *name, const char *text,
                                   size_t length);

/* A key's value as it is written back; numbers read back to the same bits. */
void mt_config_format(char text[MT_CONFIG_FORMATTED], const mt_config *config,
                      const mt_config_key *key);
/* The whole configuration as YAML: reading it gives the same configuration. */
void mt_config_write(const mt_config *config, FILE *file);
/* The same as text, freed by the caller. */
mt_status mt_config_text(char **text, const mt_config *config);
/* All keys with defaults and explanations. */
mt_status mt_config_help(FILE *file);

#ifdef __cplusplus
}
#endif
