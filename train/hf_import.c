/* A Hugging Face directory to a checkpoint. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "train/checkpoint_priv.h"
#include "train/hf.h"
#include "train/safetensors.h"

enum { MAX_TENSOR_NAME = 512 };

typedef struct importer {
    const char *dir;
    const mt_model_config *config;
    const mt_param_store *params;
    mt_safetensors *set;
    mt_h5 *file;
} importer;

/* Tensors that files hold beside the parameters: constants that everybody recomputes. */
static const char *const ignored_endings[] = { ".rotary_emb.inv_freq" };

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), m = strlen(end);
    return n >= m && !strcmp(text + n - m, end);
}

/* ---- names -------------------------------------------------------------------------------------
 */

/* `name` with the architecture's MoE block called "mlp", as transformers 5 calls it in memory;
 * false if there is nothing to rename. */
static bool rename_block(char to[MAX_TENSOR_NAME], const mt_architecture *architecture,
                         const char *name)
{
    char block[64];
    snprintf(block, sizeof block, ".%s.", architecture->moe_block);
    const char *at = strstr(name, block);
    if (!at || !strcmp(block, ".mlp.")) return false;
    return snprintf(to, MAX_TENSOR_NAME, "%.*s.mlp.%s", (int)(at - name), name,
                    at + strlen(block)) < MAX_TENSOR_NAME;
}

/* The name of the fused tensor that would hold "<prefix>.experts.<e>.<projection>.weight"; false
 * for others. */
static bool fuse_name(char to[MAX_TENSOR_NAME], const mt_architecture *architecture,
                      const char *name)
{
    static const char *const fused[3] = { "gate_up_proj", "gate_up_proj", "down_proj" };
    const char *experts = strstr(name, ".experts.");
    if (!experts) return false;
    const char *p = experts + strlen(".experts.");
    p += strspn(p, "0123456789");
    for (int i = 0; i < 3; i++) {
        char end[64];
        snprintf(end, sizeof end, ".%s.weight", architecture->expert_names[i]);
        if (strcmp(p, end)) continue;
        return snprintf(to, MAX_TENSOR_NAME, "%.*s.experts.%s", (int)(experts - name), name,
                        fused[i]) < MAX_TENSOR_NAME;
    }
    return false;
}

static mt_st_tensor *find_either(const importer *in, const char *name)
{
    char other[MAX_TENSOR_NAME];
    mt_st_tensor *t = mt_safetensors_find(in->set, name);
    if (!t && rename_block(other, in->config->architecture, name))
        t = mt_safetensors_find(in->set, other);
    return t;
}

/* ---- tensors -----------------------------------------------------------------------------------
 */

static mt_status check_shape(const mt_st_tensor *t, int ndim, const int64_t *shape)
{
    bool same = t->ndim == ndim;
    for (int i = 0; same && i < ndim; i++) same = t->shape[i] == shape[i];
    if (same) return MT_OK;
    char got[128] = "", want[96] = "";
    for (int i = 0, n = 0; i < t->ndim && n < 100; i++)
        n += snprintf(got + n, sizeof got - (size_t)n, "%s%lld", i ? "," : "",
                      (long long)t->shape[i]);
    for (int i = 0, n = 0; i < ndim; i++)
        n += snprintf(want + n, sizeof want - (size_t)n, "%s%lld", i ? "," : "",
                      (long long)shape[i]);
    return MT_FAIL(MT_ECONFIG, "'%s': tensor '%s' has shape [%s], must be [%s]", t->file, t->name,
                   got, want);
}

/* Finds a part's bytes, in a tensor of its own or inside a fused one, which has the layout of our
 * group. */
static mt_status find_part(const importer *in, const mt_param *param, const mt_param_part *part,
                           mt_tensor *found)
{
    char fused[MAX_TENSOR_NAME];
    const mt_group *g = &param->group;
    const int64_t group_shape[3] = { g->members, g->m, g->k };
    mt_st_tensor *t = find_either(in, part->name);
    bool whole = t != NULL;
    mt_st_tensor *all =
        fuse_name(fused, in->config->architecture, part->name) ? find_either(in, fused) : NULL;
    MT_REQUIRE(!t || !all, MT_ECONFIG, "'%s' holds tensor '%s' and the same in '%s'", in->dir,
               t->name, all->name);
    if (!t) t = all;
    MT_REQUIRE(t, MT_ECONFIG, "'%s' has no tensor '%s'", in->dir, part->name);
    *found = mt_part_tensor(param, part, MT_F32);
    MT_TRY(mt_st_tensor_dtype(&found->dtype, t));
    MT_REQUIRE(found->dtype <= MT_F16, MT_EUNSUPPORTED,
               "'%s': tensor '%s' is %s, must be F64, F32, BF16 or F16", t->file, t->name, t->type);
    MT_TRY(whole ? check_shape(t, found->ndim, found->shape) : check_shape(t, 3, group_shape));
    int64_t first = whole ? 0 : mt_part_first(param, part);
    found->data =
        (void *)(uintptr_t)((const char *)t->data + (size_t)first * mt_dtype_size(found->dtype));
    t->used = true;
    return MT_OK;
}

/* A tied model's file may hold the shared matrix twice, if both are the same. */
static mt_status check_tied(const importer *in, mt_st_tensor *head)
{
    const mt_st_tensor *embed = mt_safetensors_find(in->set, "model.embed_tokens.weight");
    MT_REQUIRE(embed && embed->type == head->type && embed->bytes == head->bytes &&
                   !memcmp(embed->data, head->data, head->bytes),
               MT_ECONFIG,
               "'%s': tie_word_embeddings is true, but lm_head.weight differs from "
               "model.embed_tokens.weight",
               head->file);
    head->used = true;
    return MT_OK;
}

/* Everything in the files must have gone somewhere. */
static mt_status check_leftovers(const importer *in)
{
    for (int64_t i = 0; i < mt_safetensors_count(in->set); i++) {
        mt_st_tensor *t = mt_safetensors_get(in->set, i);
        if (!t->used && in->config->tie_word_embeddings && !strcmp(t->name, "lm_head.weight"))
            MT_TRY(check_tied(in, t));
        bool ignored = t->used;
        for (size_t k = 0; k < sizeof ignored_endings / sizeof *ignored_endings; k++)
            ignored |= ends_with(t->name, ignored_endings[k]);
        MT_REQUIRE(ignored, MT_ECONFIG, "'%s': tensor '%s' has no place in this %s model", t->file,
                   t->name, in->config->architecture->model_type);
    }
    return MT_OK;
}

/* ---- the whole ---------------------------------------------------------------------------------
 */

/* Visits every part; with no file it only checks. */
static mt_status copy_parts(const importer *in)
{
    char name[MT_DATASET_NAME];
    for (int64_t i = 0; i < mt_param_store_count(in->params); i++) {
        const mt_param *param = mt_param_store_get(in->params, i);
        for (int64_t j = 0; j < param->part_count; j++) {
            mt_tensor t;
            MT_TRY(find_part(in, param, &param->parts[j], &t));
            if (!in->file) continue;
            MT_TRY(mt_checkpoint_dataset(name, "/model", param->parts[j].name));
            MT_TRY(mt_h5_write(in->file, name, t.dtype, t.ndim, t.shape, t.data));
        }
    }
    return MT_OK;
}

static mt_status write_checkpoint(importer *in, const char *checkpoint, const char *config_text)
{
    mt_checkpoint_stage stage;
    mt_checkpoint_state state = { .config = in->config,
                                  .params = (mt_param_store *)(uintptr_t)in->params };
    mt_checkpoint_info info = { .source_config = config_text };
    MT_TRY(mt_checkpoint_check_untrained(checkpoint));
    mt_status status = mt_checkpoint_stage_begin(&stage, checkpoint);
    in->file = stage.file;
    if (status == MT_OK) status = mt_checkpoint_write_meta(stage.file, &state, &info);
    if (status == MT_OK) status = copy_parts(in);
    if (status == MT_OK) status = mt_checkpoint_stage_publish(&stage, NULL, 0);
    mt_checkpoint_stage_abandon(&stage);
    return status;
}

mt_status mt_hf_import_params(const char *checkpoint, const char *dir,
                              const mt_model_config *config, const mt_param_store *params,
                              const char *config_text)
{
    importer in = { .dir = dir, .config = config, .params = params };
    mt_status status;
    MT_TRY_CLEANUP(mt_safetensors_open_dir(&in.set, dir));
    MT_TRY_CLEANUP(copy_parts(&in));
    MT_TRY_CLEANUP(check_leftovers(&in));
    MT_TRY_CLEANUP(write_checkpoint(&in, checkpoint, config_text));
cleanup:
    mt_safetensors_close(&in.set);
    return status;
}

mt_status mt_hf_import(const char *checkpoint, const char *dir)
{
    mt_model_config config;
    mt_device *plan = NULL; /* the model's layout is needed, not its memory */
    mt_model *model = NULL;
    char *text = NULL;
    mt_status status;
    MT_TRY_CLEANUP(mt_hf_config_read(&config, &text, dir));
    MT_TRY_CLEANUP(mt_device_open(&plan, "plan", NULL, 1));
    status = mt_model_create(&model, plan, &config, MT_F32, 1, false, NULL);
    if (status != MT_OK)
        MT_TRY_CLEANUP(MT_FAIL(status, "%s/config.json: %s", dir, mt_error_message()));
    MT_TRY_CLEANUP(mt_hf_import_params(checkpoint, dir, mt_model_get_config(model),
                                       mt_model_params(model), text));
cleanup:
    if (model) mt_model_destroy(&model);
    if (plan) mt_device_destroy(&plan);
    free(text);
    return status;
}
