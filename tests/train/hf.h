/* Texts of config.json, and what comes of them: what tests of Hugging Face directories share. */
#pragma once

#include "tests/train/files.h"
#include "train/hf.h"

/* The keys that must be there; `more` begins with a comma. */
#define BASE(type, experts, width, more)                                                           \
    "{\"model_type\":\"" type "\",\"vocab_size\":97,\"hidden_size\":32,\"num_hidden_layers\":3,"   \
    "\"num_attention_heads\":4,\"num_experts_per_tok\":2,\"" experts "\":6,\"" width "\":24" more  \
    "}"
#define QWEN(more)    BASE("qwen3_moe", "num_experts", "moe_intermediate_size", more)
#define OLMOE(more)   BASE("olmoe", "num_experts", "intermediate_size", more)
#define MIXTRAL(more) BASE("mixtral", "num_local_experts", "intermediate_size", more)

static inline mt_status parse(mt_model_config *config, const char *text)
{
    return mt_hf_config_parse(config, text, strlen(text), "config.json", false);
}

/* Every key of two descriptions, ours included; numbers are written so that they read back to the
 * same bits. */
static inline void expect_same(const mt_model_config *a, const mt_model_config *b)
{
    char *x, *y;
    assert_ok(mt_hf_config_format(&x, a, MT_DTYPE_COUNT, NULL, true));
    assert_ok(mt_hf_config_format(&y, b, MT_DTYPE_COUNT, NULL, true));
    assert_string_equal(x, y);
    free(x);
    free(y);
}
