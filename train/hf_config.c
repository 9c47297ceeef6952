/* config.json to a model description and back. */
#include <jansson.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "train/fileio.h"
#include "train/hf.h"

enum { MAX_CONFIG = 16 << 20 };

/* ---- tables ------------------------------------------------------------------------------------
 */

typedef enum key_kind { KEY_INT, KEY_REAL, KEY_BOOL } key_kind;

/* Keys that mean the same in every architecture, and in our own description. */
typedef struct key {
    const char *name;
    key_kind kind;
    size_t offset; /* in mt_model_config */
    bool required;
    bool own; /* ours: not a key of Hugging Face */
} key;

#define FIELD(field) offsetof(mt_model_config, field)
static const key keys[] = {
    { "vocab_size", KEY_INT, FIELD(vocab_size), true, false },
    { "hidden_size", KEY_INT, FIELD(hidden_size), true, false },
    { "num_hidden_layers", KEY_INT, FIELD(num_hidden_layers), true, false },
    { "num_attention_heads", KEY_INT, FIELD(num_attention_heads), true, false },
    { "num_key_value_heads", KEY_INT, FIELD(num_key_value_heads), false, false },
    { "head_dim", KEY_INT, FIELD(head_dim), false, false },
    { "num_experts_per_tok", KEY_INT, FIELD(num_experts_per_tok), true, false },
    { "max_position_embeddings", KEY_INT, FIELD(max_position_embeddings), false, false },
    { "norm_topk_prob", KEY_BOOL, FIELD(norm_topk_prob), false, false },
    { "tie_word_embeddings", KEY_BOOL, FIELD(tie_word_embeddings), false, false },
    { "router_aux_loss_coef", KEY_REAL, FIELD(router_aux_loss_coef), false, false },
    { "rms_norm_eps", KEY_REAL, FIELD(rms_norm_eps), false, false },
    { "z_loss_coef", KEY_REAL, FIELD(z_loss_coef), false, true },
    { "router_bias_update_rate", KEY_REAL, FIELD(router_bias_update_rate), false, true },
    { "capacity_factor", KEY_REAL, FIELD(capacity_factor), false, true },
    { "init_std", KEY_REAL, FIELD(init_std), false, true },
    { "embed_init_std", KEY_REAL, FIELD(embed_init_std), false, true },
};
/* Only where layers may be dense. */
static const key dense_keys[] = {
    { "intermediate_size", KEY_INT, FIELD(intermediate_size), false, false },
    { "decoder_sparse_step", KEY_INT, FIELD(decoder_sparse_step), false, false },
};
enum { KEYS = sizeof keys / sizeof *keys, DENSE_KEYS = sizeof dense_keys / sizeof *dense_keys };

/* What transformers takes when a key is absent, where it is not what we would; and whether its
 * model reads use_sliding_window, and without it no sliding_window. */
typedef struct hf_type {
    const char *model_type;
    double rope_theta, router_aux_loss_coef;
    int64_t max_position_embeddings;
    bool window_switch;
} hf_type;
static const hf_type hf_types[] = {
    { "qwen3_moe", 1e4, 0.001, 32768, true },
    { "olmoe", 1e4, 0.01, 4096, false },
    { "mixtral", 1e6, 0.001, 131072, false },
};
enum { HF_TYPES = sizeof hf_types / sizeof *hf_types };

/* Keys that would change what the model computes: read, and refused unless inactive. */
typedef enum refusal { MUST_BE_FALSE, MUST_BE_ZERO, MUST_BE_ONE, MUST_BE_NULL } refusal;
static const struct {
    const char *name;
    refusal rule;
} refusals[] = {
    { "attention_bias", MUST_BE_FALSE },
    { "mlp_bias", MUST_BE_FALSE },
    { "use_sliding_window", MUST_BE_FALSE },
    { "clip_qkv", MUST_BE_NULL },
    { "quantization_config", MUST_BE_NULL },
    { "attn_logit_softcapping", MUST_BE_NULL },
    { "final_logit_softcapping", MUST_BE_NULL },
    { "attention_dropout", MUST_BE_ZERO },
    { "router_jitter_noise", MUST_BE_ZERO },
    { "n_shared_experts", MUST_BE_ZERO },
    { "shared_expert_intermediate_size", MUST_BE_ZERO },
    { "partial_rotary_factor", MUST_BE_ONE },
    { "n_group", MUST_BE_ONE },
    { "topk_group", MUST_BE_ONE },
};
static const char *const refusal_texts[] = {
    [MUST_BE_FALSE] = "false",
    [MUST_BE_ZERO] = "0",
    [MUST_BE_ONE] = "1",
    [MUST_BE_NULL] = "null",
};

static const char *const aux_names[] = {
    [MT_AUX_NONE] = "none",
    [MT_AUX_SWITCH] = "switch",
    [MT_AUX_HF] = "hf",
};
enum { AUX_KINDS = sizeof aux_names / sizeof *aux_names };

static const char *const hf_dtypes[MT_DTYPE_COUNT] = {
    [MT_F64] = "float64",
    [MT_F32] = "float32",
    [MT_BF16] = "bfloat16",
    [MT_F16] = "float16",
};

/* ---- reading -----------------------------------------------------------------------------------
 */

/* A value as an error shows it; in a static-sized buffer of the caller. */
static const char *show(char text[64], const json_t *value)
{
    char *json = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT);
    snprintf(text, 64, "%.60s", json ? json : "?");
    free(json);
    return text;
}

/* The value of a key, NULL when absent or null. */
static json_t *value_of(const json_t *json, const char *name)
{
    json_t *value = json_object_get(json, name);
    return json_is_null(value) ? NULL : value;
}

static mt_status wrong(const char *what, const char *name, const json_t *value, const char *rule)
{
    char text[64];
    return MT_FAIL(MT_ECONFIG, "%s: %s is %s, must be %s", what, name, show(text, value), rule);
}

static mt_status read_int(int64_t *x, const json_t *value, const char *name, const char *what)
{
    if (json_is_integer(value)) {
        *x = (int64_t)json_integer_value(value);
        return MT_OK;
    }
    double real = json_real_value(value); /* 0 unless it is a real */
    if (!json_is_real(value) || fabs(real) > 0x1p53 || real != floor(real))
        return wrong(what, name, value, "an integer");
    *x = (int64_t)real;
    return MT_OK;
}

static mt_status read_key(mt_model_config *config, const json_t *json, const key *k,
                          const char *what)
{
    void *at = (char *)config + k->offset;
    const json_t *value = value_of(json, k->name);
    MT_REQUIRE(value || !k->required, MT_ECONFIG, "%s has no key %s", what, k->name);
    if (!value) return MT_OK;
    if (k->kind == KEY_INT) return read_int(at, value, k->name, what);
    if (k->kind == KEY_REAL && !json_is_number(value))
        return wrong(what, k->name, value, "a number");
    if (k->kind == KEY_BOOL && !json_is_boolean(value))
        return wrong(what, k->name, value, "true or false");
    if (k->kind == KEY_REAL)
        *(double *)at = json_number_value(value);
    else
        *(bool *)at = json_is_true(value);
    return MT_OK;
}

static mt_status check_refusals(const json_t *json, const char *what)
{
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        const json_t *value = value_of(json, refusals[i].name);
        if (!value) continue;
        refusal rule = refusals[i].rule;
        double want = rule == MUST_BE_ONE ? 1 : 0;
        if (rule == MUST_BE_FALSE && json_is_false(value)) continue;
        if (rule >= MUST_BE_ZERO && rule <= MUST_BE_ONE && json_is_number(value) &&
            json_number_value(value) == want)
            continue;
        char text[64];
        return MT_FAIL(MT_EUNSUPPORTED, "%s: %s is %s, which is not implemented: must be %s", what,
                       refusals[i].name, show(text, value), refusal_texts[rule]);
    }
    const json_t *act = value_of(json, "hidden_act"), *score = value_of(json, "scoring_func");
    if (act && (!json_is_string(act) || strcmp(json_string_value(act), "silu")))
        return wrong(what, "hidden_act", act, "\"silu\"");
    if (score && (!json_is_string(score) || strcmp(json_string_value(score), "softmax")))
        return wrong(what, "scoring_func", score, "\"softmax\"");
    return MT_OK;
}

/* A switch that is on is refused already. */
static mt_status check_window(const json_t *json, const mt_model_config *config,
                              const hf_type *type, const char *what)
{
    const json_t *window = value_of(json, "sliding_window");
    if (!window || type->window_switch) return MT_OK;
    if (json_is_integer(window) && json_integer_value(window) >= config->max_position_embeddings)
        return MT_OK;
    char text[64];
    return MT_FAIL(MT_EUNSUPPORTED,
                   "%s: sliding_window is %s, which is not implemented: must be null, or at least "
                   "max_position_embeddings %lld",
                   what, show(text, window), (long long)config->max_position_embeddings);
}

static mt_status check_layer_types(const json_t *json, const char *what)
{
    const json_t *types = value_of(json, "layer_types");
    if (types && !json_is_array(types)) return wrong(what, "layer_types", types, "a list");
    for (size_t i = 0; i < json_array_size(types); i++) {
        const char *type = json_string_value(json_array_get(types, i));
        if (!type || strcmp(type, "full_attention"))
            return wrong(what, "layer_types", types, "\"full_attention\" throughout");
    }
    return MT_OK;
}

/* rope_parameters (new) and rope_scaling (old): the kind must be the default one. */
static mt_status read_rope(mt_model_config *config, const json_t *json, const char *what)
{
    static const char *const sections[] = { "rope_scaling", "rope_parameters" };
    const json_t *theta = value_of(json, "rope_theta");
    for (int i = 0; i < 2; i++) {
        const json_t *rope = value_of(json, sections[i]);
        if (!rope) continue;
        if (!json_is_object(rope)) return wrong(what, sections[i], rope, "an object");
        const json_t *kind = value_of(rope, "rope_type");
        if (!kind) kind = value_of(rope, "type");
        if (kind && (!json_is_string(kind) || strcmp(json_string_value(kind), "default"))) {
            char text[64];
            return MT_FAIL(MT_EUNSUPPORTED,
                           "%s: %s.rope_type is %s, which is not implemented: must be \"default\"",
                           what, sections[i], show(text, kind));
        }
        const char *name;
        json_t *value;
        json_object_foreach((json_t *)(uintptr_t)rope, name, value)
        {
            if (json_is_object(value)) /* of layers of one type */
                return wrong(what, name, value, "no object: all layers have the same rope");
        }
        const json_t *part = value_of(rope, "partial_rotary_factor");
        if (part && json_number_value(part) != 1)
            return wrong(what, "rope_parameters.partial_rotary_factor", part, "1");
        const json_t *inner = value_of(rope, "rope_theta");
        if (inner && theta && json_number_value(inner) != json_number_value(theta))
            return wrong(what, "rope_parameters.rope_theta", inner, "the same as rope_theta");
        if (inner) theta = inner;
    }
    if (theta && !json_is_number(theta)) return wrong(what, "rope_theta", theta, "a number");
    if (theta) config->rope_theta = json_number_value(theta);
    return MT_OK;
}

static mt_status read_experts(mt_model_config *config, const json_t *json, const char *what)
{
    static const char *const names[] = { "num_experts", "num_local_experts" };
    const char *width_key = config->architecture->expert_width_key;
    int64_t found[2] = { 0, 0 };
    const json_t *values[2];
    for (int i = 0; i < 2; i++) {
        values[i] = value_of(json, names[i]);
        if (values[i]) MT_TRY(read_int(&found[i], values[i], names[i], what));
    }
    MT_REQUIRE(values[0] || values[1], MT_ECONFIG,
               "%s has neither num_experts nor num_local_experts", what);
    MT_REQUIRE(!values[0] || !values[1] || found[0] == found[1], MT_ECONFIG,
               "%s: num_experts is %lld but num_local_experts %lld", what, (long long)found[0],
               (long long)found[1]);
    config->num_experts = found[values[0] ? 0 : 1];
    const json_t *width = value_of(json, width_key);
    MT_REQUIRE(width, MT_ECONFIG, "%s has no key %s", what, width_key);
    return read_int(&config->moe_intermediate_size, width, width_key, what);
}

static mt_status read_dense(mt_model_config *config, const json_t *json, const char *what)
{
    if (!config->architecture->dense_layers) return MT_OK;
    for (int i = 0; i < DENSE_KEYS; i++) MT_TRY(read_key(config, json, &dense_keys[i], what));
    const json_t *layers = value_of(json, "mlp_only_layers");
    if (!layers) return MT_OK;
    if (!json_is_array(layers) || json_array_size(layers) > MT_MAX_LAYERS)
        return wrong(what, "mlp_only_layers", layers, "a list of layer numbers");
    config->mlp_only_layer_count = (int64_t)json_array_size(layers);
    for (size_t i = 0; i < json_array_size(layers); i++)
        MT_TRY(read_int(&config->mlp_only_layers[i], json_array_get(layers, i), "mlp_only_layers",
                        what));
    return MT_OK;
}

static mt_status read_aux(mt_model_config *config, const json_t *json, const char *what, bool own)
{
    config->aux_loss = MT_AUX_HF;
    const json_t *value = own ? value_of(json, "aux_loss") : NULL;
    if (!value) return MT_OK;
    for (int i = 0; i < AUX_KINDS; i++)
        if (json_is_string(value) && !strcmp(aux_names[i], json_string_value(value))) {
            config->aux_loss = (mt_aux_kind)i;
            return MT_OK;
        }
    return wrong(what, "aux_loss", value, "none, switch or hf");
}

/* An error of another room, which knows keys but not whose they are. */
static mt_status fail_in(const char *what, mt_status status)
{
    return MT_FAIL(status, "%s: %s", what, mt_error_message());
}

/* Of a known architecture. */
static const hf_type *find_hf_type(const char *model_type)
{
    int i = 0;
    while (i < HF_TYPES - 1 && strcmp(hf_types[i].model_type, model_type) != 0) i++;
    MT_ASSERT(strcmp(hf_types[i].model_type, model_type) == 0);
    return &hf_types[i];
}

static mt_status read_config(mt_model_config *config, const json_t *json, const char *what,
                             bool own)
{
    const mt_architecture *architecture;
    const json_t *named = json_object_get(json, "model_type");
    const char *type = json_string_value(named);
    MT_REQUIRE(named, MT_ECONFIG, "%s has no model_type", what);
    MT_REQUIRE(type, MT_ECONFIG, "%s: model_type is not a string", what);
    mt_status status = mt_architecture_find(&architecture, type);
    if (status != MT_OK) return fail_in(what, status);
    mt_model_config_defaults(config, architecture);
    config->norm_topk_prob = architecture->norm_topk_fixed && architecture->norm_topk_prob;
    const hf_type *theirs = find_hf_type(type);
    config->rope_theta = theirs->rope_theta;
    config->router_aux_loss_coef = theirs->router_aux_loss_coef;
    config->max_position_embeddings = theirs->max_position_embeddings;
    for (int i = 0; i < KEYS; i++)
        if (own || !keys[i].own) MT_TRY(read_key(config, json, &keys[i], what));
    MT_TRY(check_refusals(json, what));
    MT_TRY(check_window(json, config, theirs, what));
    MT_TRY(check_layer_types(json, what));
    MT_TRY(read_rope(config, json, what));
    MT_TRY(read_experts(config, json, what));
    MT_TRY(read_dense(config, json, what));
    MT_TRY(read_aux(config, json, what, own));
    status = mt_model_config_check(config);
    return status == MT_OK ? MT_OK : fail_in(what, status);
}

static mt_status load_json(json_t **json, const char *text, size_t bytes, const char *what)
{
    json_error_t error;
    json_t *loaded = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &error);
    *json = NULL;
    MT_REQUIRE(loaded || json_error_code(&error) != json_error_out_of_memory, MT_ENOMEM,
               "no memory for %s", what);
    MT_REQUIRE(loaded, MT_ECONFIG, "%s is not JSON: %s (line %d)", what, error.text, error.line);
    if (json_is_object(loaded)) {
        *json = loaded;
        return MT_OK;
    }
    json_decref(loaded);
    return MT_FAIL(MT_ECONFIG, "%s is not a JSON object", what);
}

mt_status mt_hf_config_parse(mt_model_config *config, const char *text, size_t bytes,
                             const char *what, bool own)
{
    json_t *json;
    MT_TRY(load_json(&json, text, bytes, what));
    mt_status status = read_config(config, json, what, own);
    json_decref(json);
    return status == MT_OK ? MT_OK : mt_error_pass(status, __FILE__, __LINE__);
}

mt_status mt_hf_config_read(mt_model_config *config, char **text, const char *dir)
{
    char path[MT_PATH_BYTES], *own_text = NULL;
    size_t bytes;
    MT_TRY(mt_path_format(path, "%s/config.json", dir));
    MT_TRY(mt_file_read_all(&own_text, &bytes, path, MAX_CONFIG));
    mt_status status = mt_hf_config_parse(config, own_text, bytes, path, false);
    if (status == MT_OK && text)
        *text = own_text;
    else
        free(own_text);
    return status;
}

/* ---- writing -----------------------------------------------------------------------------------
 */

static bool put(json_t *json, const char *name, json_t *value)
{
    return !json_object_set_new(json, name, value);
}

static json_t *make_value(const mt_model_config *config, const key *k)
{
    const void *at = (const char *)config + k->offset;
    if (k->kind == KEY_INT) return json_integer((json_int_t) * (const int64_t *)at);
    if (k->kind == KEY_REAL) return json_real(*(const double *)at);
    return json_boolean(*(const bool *)at);
}

static bool put_dense(json_t *json, const mt_model_config *c)
{
    bool done = true;
    for (int i = 0; i < DENSE_KEYS; i++)
        done &= put(json, dense_keys[i].name, make_value(c, &dense_keys[i]));
    json_t *layers = json_array();
    for (int64_t i = 0; i < c->mlp_only_layer_count; i++)
        done &= !json_array_append_new(layers, json_integer((json_int_t)c->mlp_only_layers[i]));
    return put(json, "mlp_only_layers", layers) && done;
}

/* All keys of the model into `json`, replacing what is there. */
static bool put_config(json_t *json, const mt_model_config *c, mt_dtype dtype, bool own)
{
    const mt_architecture *a = c->architecture;
    bool done = put(json, "model_type", json_string(a->model_type)) &&
                put(json, "architectures", json_pack("[s]", a->hf_class)) &&
                put(json, "hidden_act", json_string("silu")) &&
                put(json, "attention_bias", json_false()) &&
                put(json, "attention_dropout", json_real(0)) &&
                put(json, "num_experts", json_integer((json_int_t)c->num_experts)) &&
                put(json, "num_local_experts", json_integer((json_int_t)c->num_experts)) &&
                put(json, "rope_theta", json_real(c->rope_theta)) &&
                put(json, "rope_parameters",
                    json_pack("{s:s, s:f}", "rope_type", "default", "rope_theta", c->rope_theta));
    if (a->dense_layers) done = put_dense(json, c) && done;
    done =
        put(json, a->expert_width_key, json_integer((json_int_t)c->moe_intermediate_size)) && done;
    for (int i = 0; i < KEYS; i++)
        if (own || !keys[i].own) done = put(json, keys[i].name, make_value(c, &keys[i])) && done;
    if (own) done = put(json, "aux_loss", json_string(aux_names[c->aux_loss])) && done;
    if (dtype == MT_DTYPE_COUNT || !hf_dtypes[dtype]) return done;
    return put(json, "dtype", json_string(hf_dtypes[dtype])) &&
           put(json, "torch_dtype", json_string(hf_dtypes[dtype])) && done;
}

/* Text with the fewest digits, of 15 or more, that reads back to the same numbers. */
static char *dump(const json_t *json)
{
    char *text = NULL;
    for (size_t digits = 15; digits <= 17; digits++) {
        json_error_t error;
        free(text);
        text = json_dumps(json, JSON_INDENT(2) | JSON_SORT_KEYS | JSON_REAL_PRECISION(digits));
        json_t *back = text ? json_loads(text, 0, &error) : NULL;
        bool same = json_equal(json, back);
        json_decref(back);
        if (same) break;
    }
    return text;
}

mt_status mt_hf_config_format(char **text, const mt_model_config *config, mt_dtype dtype,
                              const char *base, bool own)
{
    json_t *json;
    *text = NULL;
    if (base)
        MT_TRY(load_json(&json, base, strlen(base), "the recorded config.json"));
    else
        json = json_object();
    if (json && put_config(json, config, dtype, own)) *text = dump(json);
    json_decref(json);
    MT_REQUIRE(*text, MT_ENOMEM, "no memory to write a model description");
    return MT_OK;
}
