/* What follows from other keys, and conflicts between keys: everything that can be known before a
 * corpus is opened or memory is allocated. */
#include "train/config_priv.h"
#include "train/nearest.h"
#include "train/statistics.h"

#include <ctype.h>

/* "demo.yaml:12: " or "--set a.b=c: " for a key that was set, else "demo.yaml: ". */
static void place_of(char text[MT_CONFIG_PLACE], const mt_config_reader *r, int key)
{
    const int width = MT_CONFIG_PLACE / 2;
    if (key >= 0 && r->sets[key])
        snprintf(text, MT_CONFIG_PLACE, "--set %.*s: ", width, r->sets[key]);
    else if (key >= 0 && r->line[key])
        snprintf(text, MT_CONFIG_PLACE, "%.*s:%d: ", width, r->file, r->line[key]);
    else
        snprintf(text, MT_CONFIG_PLACE, "%.*s: ", width, r->file);
}

/* The current error again, after the place of `path`. */
static mt_status fail_at(const mt_config_reader *r, const char *path, mt_status status)
{
    char place[MT_CONFIG_PLACE];
    place_of(place, r, mt_config_find(path));
    return MT_FAIL(status, "%s%s", place, mt_error_message());
}

#define RULE(rule, path, ...)                                                                      \
    do {                                                                                           \
        if (!(rule)) return fail_at(r, path, MT_FAIL(MT_ECONFIG, path " " __VA_ARGS__));           \
    } while (0)

/* Where a whole word stands in a sentence, or NULL. */
static const char *find_word(const char *sentence, const char *word)
{
    size_t length = strlen(word);
    for (const char *at = strstr(sentence, word); at; at = strstr(at + 1, word)) {
        bool starts = at == sentence || !(isalnum((unsigned char)at[-1]) || at[-1] == '_');
        bool ends = !(isalnum((unsigned char)at[length]) || at[length] == '_');
        if (starts && ends) return at;
    }
    return NULL;
}

/* An error of another room, which knows keys but not where they were set: the place of the first
 * key it names that was. */
static mt_status fail_where_named(const mt_config_reader *r, const char *section, mt_status status)
{
    char place[MT_CONFIG_PLACE];
    int key = -1;
    const char *first = NULL;
    for (int i = 0; i < mt_config_key_count; i++) {
        const char *path = mt_config_keys[i].path, *leaf = strrchr(path, '.');
        if (!leaf || strncmp(path, section, strlen(section)) != 0) continue;
        if (!r->line[i] && !r->sets[i]) continue;
        const char *at = find_word(mt_error_message(), leaf + 1);
        if (!at) continue;
        if (!first || at < first) key = i, first = at;
    }
    place_of(place, r, key);
    return MT_FAIL(status, "%s%s", place, mt_error_message());
}

static bool is_set(const mt_config_reader *r, int key)
{
    return r->line[key] || r->sets[key];
}

/* What the width of experts may be given by beside its own key. */
static bool has_expert_width(const mt_config_reader *r)
{
    const mt_architecture *a = r->config->trainer.model.architecture;
    char path[64];
    snprintf(path, sizeof path, "model.%s", a->expert_width_key);
    return is_set(r, mt_config_find(path));
}

static mt_status check_present(const mt_config_reader *r)
{
    const bool experts = r->config->trainer.model.num_experts && !has_expert_width(r);
    for (int i = 0; i < mt_config_key_count; i++) {
        const mt_config_key *key = &mt_config_keys[i];
        bool required = key->required || (key->required_of_experts && experts);
        MT_REQUIRE(!required || is_set(r, i), MT_ECONFIG, "%s: %s must be set: %s", r->file,
                   key->path, key->help);
    }
    return MT_OK;
}

static mt_status check_model(const mt_config_reader *r)
{
    mt_trainer_config *t = &r->config->trainer;
    mt_status status = mt_model_config_check(&t->model);
    if (status != MT_OK) return fail_where_named(r, "model", status);
    RULE(t->sequence_length <= t->model.max_position_embeddings, "data.sequence_length",
         "is %lld, above model.max_position_embeddings %lld", (long long)t->sequence_length,
         (long long)t->model.max_position_embeddings);
    return MT_OK;
}

static bool divides(void *of, int64_t n)
{
    return *(const int64_t *)of % n == 0;
}

/* "2 or 4": the divisors of `of` next to `x`, below and above. */
static void nearest_divisors(char text[MT_NEAREST_NUMBERS], int64_t of, int64_t x)
{
    mt_nearest_numbers(text, x, of, divides, &of);
}

static mt_status check_micro_batch(const mt_config_reader *r)
{
    const mt_trainer_config *t = &r->config->trainer;
    int64_t micro = t->micro_batch_size, batch = t->batch_size;
    char sizes[MT_NEAREST_NUMBERS], below[32] = "";
    if (batch % micro == 0) return MT_OK;
    nearest_divisors(sizes, batch, micro);
    if (batch > micro)
        snprintf(below, sizeof below, "%lld or ", (long long)(batch / micro * micro));
    return fail_at(
        r, "train.micro_batch_size",
        MT_FAIL(MT_ECONFIG,
                "train.micro_batch_size %lld does not divide train.batch_size %lld: take "
                "a micro_batch_size of %s, or a batch_size of %s%lld",
                (long long)micro, (long long)batch, sizes, below,
                (long long)((batch / micro + 1) * micro)));
}

static mt_status check_parallel(const mt_config_reader *r)
{
    const mt_trainer_config *t = &r->config->trainer;
    char degrees[MT_NEAREST_NUMBERS];
    nearest_divisors(degrees, t->model.num_experts, t->expert_parallel);
    RULE(t->model.num_experts % t->expert_parallel == 0, "parallel.expert",
         "is %lld, must divide model.num_experts %lld: take %s", (long long)t->expert_parallel,
         (long long)t->model.num_experts, degrees);
    return MT_OK;
}

static mt_status check_steps(const mt_config_reader *r)
{
    const mt_config *c = r->config;
    const mt_trainer_config *t = &c->trainer;
    MT_TRY(check_micro_batch(r));
    RULE(t->grad_dtype == MT_F32 || t->grad_dtype == t->dtype, "train.grad_dtype",
         "is %s, must be f32 or the same as train.dtype, %s", mt_dtype_name(t->grad_dtype),
         mt_dtype_name(t->dtype));
    RULE(t->optim.warmup_steps <= t->steps, "optim.warmup_steps", "is %lld, above train.steps %lld",
         (long long)t->optim.warmup_steps, (long long)t->steps);
    RULE(*c->train_corpus, "data.train",
         "is empty: `mixtape data pack` makes a corpus to train on");
    RULE(!c->eval_every || *c->valid_corpus, "train.eval_every",
         "is %lld, but data.valid names no corpus (0: no evaluations)", (long long)c->eval_every);
    return MT_OK;
}

static mt_status check_recipe(const mt_config_reader *r)
{
    const mt_trainer_config *t = &r->config->trainer;
    mt_recipe_rules *rules;
    mt_status status = mt_recipe_rules_create(&rules, t->recipe, t->dtype);
    if (status != MT_OK) return fail_at(r, "recipe.use", status);
    mt_recipe_rules_destroy(&rules);
    return MT_OK;
}

/* auto, cpu, cuda, or cuda:N; which N there are is known where the run is. */
static bool device_known(const char *name)
{
    static const char *const devices[] = { "auto", "cpu", "cuda" };
    for (size_t i = 0; i < sizeof devices / sizeof *devices; i++)
        if (!strcmp(devices[i], name)) return true;
    size_t digits = strncmp(name, "cuda:", 5) ? 0 : strspn(name + 5, "0123456789");
    return digits > 0 && digits <= 4 && !name[5 + digits];
}

mt_status mt_config_check_device(const char *name)
{
    MT_REQUIRE(device_known(name), MT_ECONFIG,
               "device '%s' is not one of auto, cpu, cuda, cuda:N (N from 0)", name);
    return MT_OK;
}

mt_status mt_config_parse_compute(mt_dtype *dtype, const char *name)
{
    static const mt_dtype known[] = { MT_F64, MT_F32, MT_BF16 };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        *dtype = known[i];
        if (!strcmp(mt_dtype_name(*dtype), name)) return MT_OK;
    }
    return MT_FAIL(MT_ECONFIG, "dtype '%s' is not one of f64, f32, bf16", name);
}

void mt_config_settle(mt_config *config)
{
    mt_trainer_config *t = &config->trainer;
    if (!t->model.max_position_embeddings) t->model.max_position_embeddings = t->sequence_length;
    if (!t->micro_batch_size) t->micro_batch_size = t->batch_size;
}

mt_status mt_config_check(const mt_config_reader *r)
{
    MT_TRY(check_present(r));
    MT_TRY(check_model(r));
    const mt_trainer_config *t = &r->config->trainer;
    mt_status status = mt_optim_config_check(&t->optim);
    if (status == MT_OK) status = mt_optim_config_check_real(&t->optim, mt_dtype_wide(t->dtype));
    if (status != MT_OK) return fail_where_named(r, "optim", status);
    MT_TRY(check_steps(r));
    MT_TRY(check_recipe(r));
    MT_TRY(check_parallel(r));
    status = mt_statistics_check(r->config);
    if (status != MT_OK) return fail_where_named(r, "statistics", status);
    status = mt_config_check_device(r->config->device);
    return status == MT_OK ? MT_OK : fail_at(r, "device", status);
}
