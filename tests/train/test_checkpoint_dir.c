/* Checkpoint directories: the newest complete one is found whatever happened, and holds what was
 * saved. */
#include <time.h>
#include <xxhash.h>

#include "tests/train/files.h"
#include "train/checkpoint.h"
#include "train/metrics.h"

enum { EXPERTS = 4 };

static const mt_checkpoint_info info = { .run_config = "a: 1\n", .corpus = "text 1" };

/* ---- a small state without a trainer ------------------------------------------------------------
 */

typedef struct small {
    mt_checkpoint_state s;
    mt_model_config config;
    struct mt_step_state step_state;
    float bias[EXPERTS + 1];
} small;

/* What of it may be otherwise. */
typedef struct variant {
    const char *words; /* of the error when it is read as the usual one */
    mt_dtype dtype;
    int64_t members, rest, experts, moe_layers;
    int vector_ndim;
    bool extra;
} variant;

static const variant usual = {
    .dtype = MT_F32, .members = 3, .rest = 4, .experts = EXPERTS, .moe_layers = 1, .vector_ndim = 1
};

static mt_status small_params(small *x, const variant *how)
{
    mt_param *p;
    MT_TRY(mt_param_store_create(&x->s.params, test_device(), how->dtype, how->dtype));
    const mt_param_spec matrix = {
        .name = "w", .members = how->members, .m = 3 + how->rest, .k = 50
    };
    const mt_param_spec vector = { .name = "v", .members = 1, .m = 1, .k = 33 };
    const mt_param_spec extra = { .name = "extra", .members = 1, .m = 1, .k = 2 };
    MT_TRY(mt_param_store_add(x->s.params, &p, &matrix));
    for (int i = 0; i < how->members; i++) {
        MT_TRY(mt_param_add_part(p, i, 0, 3, 2, "w.%d.top", i));
        MT_TRY(mt_param_add_part(p, i, 3, how->rest, 2, "w.%d.rest", i));
    }
    MT_TRY(mt_param_store_add(x->s.params, &p, &vector));
    MT_TRY(mt_param_add_part(p, 0, 0, 1, how->vector_ndim, "v"));
    if (how->extra) {
        MT_TRY(mt_param_store_add(x->s.params, &p, &extra));
        MT_TRY(mt_param_add_part(p, 0, 0, 1, 1, "extra"));
    }
    return mt_param_store_allocate(x->s.params, false);
}

static mt_status small_create(small *x, const variant *how)
{
    const mt_architecture *architecture;
    *x = (small){ .s.compute = MT_F32 };
    MT_TRY(mt_architecture_find(&architecture, "qwen3_moe"));
    mt_model_config_defaults(&x->config, architecture);
    x->config.vocab_size = 9, x->config.hidden_size = 8, x->config.num_hidden_layers = 1;
    x->config.num_attention_heads = 2, x->config.num_experts_per_tok = 2;
    x->config.moe_intermediate_size = 4;
    MT_TRY(small_params(x, how));
    size_t bytes = (size_t)mt_param_store_elements(x->s.params) * mt_dtype_size(how->dtype);
    x->s.m = calloc(1, bytes), x->s.v = calloc(1, bytes);
    x->config.num_experts = how->experts;
    x->s.config = &x->config;
    x->s.step_state = &x->step_state;
    x->s.moe_layers = how->moe_layers;
    x->s.router_bias[0] = x->bias;
    return MT_OK;
}

static void small_destroy(small *x)
{
    free(x->s.m);
    free(x->s.v);
    mt_param_store_destroy(&x->s.params);
}

/* Contents that tell their step. */
static void small_fill(small *x, int64_t n)
{
    float *flat[3] = { mt_param_store_master(x->s.params), x->s.m, x->s.v };
    for (int64_t i = 0; i < mt_param_store_count(x->s.params); i++) {
        const mt_param *p = mt_param_store_get(x->s.params, i);
        for (int k = 0; k < 3; k++)
            for (int64_t j = 0; j < mt_param_count(p); j++)
                flat[k][p->offset + j] =
                    (float)mt_rng_uniform((uint64_t)n, (uint32_t)k, (uint64_t)(100000 * i + j));
    }
    for (int i = 0; i < EXPERTS; i++) x->bias[i] = (float)(n + i);
    x->step_state = (struct mt_step_state){ .power1 = 0.1 * (double)n, .applied = n, .skipped = 3 };
    x->s.step = n;
}

static bool small_equal(const small *a, const small *b)
{
    size_t bytes = (size_t)mt_param_store_elements(a->s.params) * sizeof(float);
    return !memcmp(mt_param_store_master(a->s.params), mt_param_store_master(b->s.params), bytes) &&
           !memcmp(a->s.m, b->s.m, bytes) && !memcmp(a->s.v, b->s.v, bytes) &&
           !memcmp(&a->step_state, &b->step_state, sizeof a->step_state) &&
           !memcmp(a->bias, b->bias, sizeof a->bias) && a->s.step == b->s.step;
}

static mt_status small_save(small *x, const char *dir, int64_t n)
{
    char path[300];
    snprintf(path, sizeof path, "%s/step_%08lld", dir, (long long)n);
    small_fill(x, n);
    MT_TRY(mt_dir_create(dir));
    return mt_checkpoint_write(path, &x->s, &info);
}

static mt_status small_load(small *x, const char *path)
{
    mt_checkpoint *c;
    MT_TRY(mt_checkpoint_open(&c, path));
    mt_status status = mt_checkpoint_restore(&x->s, c);
    mt_checkpoint_close(&c);
    return status;
}

/* The newest complete checkpoint of dir is that of step n, and holds what step n had. */
static void expect_latest(const char *dir, int64_t n, const char *skipped_words)
{
    char path[MT_CHECKPOINT_PATH], skipped[2000], name[40];
    small want, got;
    assert_ok(small_create(&want, &usual));
    assert_ok(small_create(&got, &usual));
    assert_ok(mt_checkpoint_find_latest(path, skipped, sizeof skipped, dir, NULL));
    snprintf(name, sizeof name, "step_%08lld", (long long)n);
    assert_non_null(strstr(path, name));
    if (!strstr(skipped, skipped_words)) fail_msg("'%s' does not say '%s'", skipped, skipped_words);
    if (!*skipped_words) assert_string_equal(skipped, "");
    small_fill(&want, n);
    assert_ok(small_load(&got, path));
    assert_true(small_equal(&want, &got));
    small_destroy(&want);
    small_destroy(&got);
}

static void flip_byte(const char *path, int64_t at)
{
    size_t bytes;
    char *text = get_file(path, &bytes);
    text[at < 0 ? (int64_t)bytes + at : at] ^= 16;
    put_file(path, text, bytes);
    free(text);
}

static void test_fall_back(void **state)
{
    (void)state;
    small x;
    char dir[256];
    snprintf(dir, sizeof dir, "%s/fall", files_dir);
    char path[MT_CHECKPOINT_PATH], skipped[100];
    assert_ok(small_create(&x, &usual));
    assert_fails(mt_checkpoint_find_latest(path, skipped, sizeof skipped, dir, NULL), MT_EIO,
                 "fall");
    assert_ok(mt_dir_create(dir));
    assert_fails(mt_checkpoint_find_latest(path, skipped, sizeof skipped, dir, NULL), MT_EIO,
                 "no complete checkpoint");
    for (int64_t n = 1; n <= 7; n++) assert_ok(small_save(&x, dir, n));
    assert_ok(mt_dir_create(in_dir("fall/step_00000099.tmp")));
    put_text(in_dir("fall/step_notes.txt"), "");
    expect_latest(dir, 7, "");
    flip_byte(in_dir("fall/step_00000007/model.h5"), 3000);
    expect_latest(dir, 6, "step_00000007/model.h5' does not match its checksum");
    assert_int_equal(unlink(in_dir("fall/step_00000006/DONE")), 0);
    expect_latest(dir, 5, "has no DONE");
    assert_int_equal(truncate(in_dir("fall/step_00000005/model.h5"), 5000), 0);
    expect_latest(dir, 4, "has 5000 bytes, DONE says");
    flip_byte(in_dir("fall/step_00000004/DONE"), 30);
    expect_latest(dir, 3, "does not match its own checksum");
    assert_int_equal(truncate(in_dir("fall/step_00000003/DONE"), 40), 0);
    expect_latest(dir, 2, "is not whole");
    assert_int_equal(unlink(in_dir("fall/step_00000002/model.h5")), 0);
    expect_latest(dir, 1, "No such file");
    put_text(in_dir("fall/step_00000001/DONE"), "");
    assert_fails(mt_checkpoint_find_latest(path, skipped, sizeof skipped, dir, NULL), MT_EIO,
                 "no complete checkpoint");
    assert_fails(small_load(&x, in_dir("fall/step_00000006")), MT_EDAMAGED, "no DONE");
    assert_fails(small_load(&x, in_dir("fall/step_00000008")), MT_EIO, "no checkpoint");
    small_destroy(&x);
}

/* A DONE whose first line names `version`, with a guard that fits. */
static void put_version(const char *path, const char *version)
{
    size_t bytes, used;
    char text[4096], *old;
    assert_ok(mt_file_read_all(&old, &bytes, path, sizeof text / 2));
    size_t head = strcspn(old, "\n"), end = (size_t)(strstr(old, "\nend ") - old);
    used = (size_t)snprintf(text, sizeof text, "mixtape checkpoint %s%.*s\n", version,
                            (int)(end - head), old + head);
    used += (size_t)snprintf(text + used, sizeof text - used, "end %016llx\n",
                             (unsigned long long)XXH3_64bits(text, used));
    put_file(path, text, used);
    free(old);
}

/* It is not damaged: a run does not fall back to one before it. */
static void test_newer_version(void **state)
{
    (void)state;
    small x;
    char path[MT_CHECKPOINT_PATH], skipped[200];
    assert_ok(small_create(&x, &usual));
    for (int64_t n = 1; n <= 2; n++) assert_ok(small_save(&x, in_dir("newer"), n));
    put_version(in_dir("newer/step_00000002/DONE"), "12");
    assert_fails(small_load(&x, in_dir("newer/step_00000002")), MT_EUNSUPPORTED,
                 "written by a newer version: its DONE is of version 12, this program reads 1");
    assert_fails(mt_checkpoint_find_latest(path, skipped, sizeof skipped, in_dir("newer"), NULL),
                 MT_EUNSUPPORTED, "step_00000002' was written by a newer version");
    flip_byte(in_dir("newer/step_00000002/DONE"), 30);
    expect_latest(in_dir("newer"), 1, "does not match its own checksum");
    put_version(in_dir("newer/step_00000001/DONE"), "1");
    assert_ok(small_load(&x, in_dir("newer/step_00000001")));
    static const char *const none[] = { "0", "-1", "two", "1.5", "" };
    for (size_t i = 0; i < sizeof none / sizeof *none; i++) {
        put_version(in_dir("newer/step_00000001/DONE"), none[i]);
        assert_fails(small_load(&x, in_dir("newer/step_00000001")), MT_EDAMAGED, "is not whole");
    }
    small_destroy(&x);
}

/* Whatever bit of a checkpoint is flipped, it is refused. */
static void test_bit_flips(void **state)
{
    (void)state;
    small x;
    static const char *const names[] = { "flips/step_00000001/model.h5",
                                         "flips/step_00000001/DONE" };
    assert_ok(small_create(&x, &usual));
    assert_ok(small_save(&x, in_dir("flips"), 1));
    for (int f = 0; f < 2; f++) {
        size_t bytes;
        char *text = get_file(in_dir(names[f]), &bytes);
        for (uint64_t i = 0; i < 500; i++) {
            size_t at = f ? i % bytes : mt_rng_below(6, 1, i, bytes);
            char bit = (char)(1 << mt_rng_below(6, 2, i, 8));
            text[at] ^= bit;
            put_file(in_dir(names[f]), text, bytes);
            text[at] ^= bit;
            assert_int_equal(small_load(&x, in_dir("flips/step_00000001")), MT_EDAMAGED);
        }
        put_file(in_dir(names[f]), text, bytes);
        free(text);
    }
    assert_ok(small_load(&x, in_dir("flips/step_00000001")));
    small_destroy(&x);
}

/* Whole checkpoints of something else. Nothing of them is taken over. */
static void test_wrong_contents(void **state)
{
    (void)state;
    enum { CASES = 7 };
    variant cases[CASES];
    for (int i = 0; i < CASES; i++) cases[i] = usual;
    cases[0].members = 2, cases[0].words = "/model/w.2.top: there is no such object";
    cases[1].rest = 5, cases[1].words = "f32[5,50], must be f32[4,50]";
    cases[2].dtype = MT_F64, cases[2].words = "f64[3,50], must be f32[3,50]";
    cases[3].vector_ndim = 2, cases[3].words = "f32[1,33], must be f32[33]";
    cases[4].extra = true, cases[4].words = "has 8 tensors, the model 7";
    cases[5].experts = EXPERTS + 1, cases[5].words = "f32[5], must be f32[4]";
    cases[6].moe_layers = 0, cases[6].words = "router_bias/0: there is no such object";
    small x, before;
    assert_ok(small_create(&x, &usual));
    assert_ok(small_create(&before, &usual));
    small_fill(&x, 9);
    small_fill(&before, 9);
    for (int i = 0; i < CASES; i++) {
        small y;
        assert_ok(small_create(&y, &cases[i]));
        assert_ok(mt_checkpoint_write(in_dir("wrong"), &y.s, &info));
        mt_status status = small_load(&x, in_dir("wrong"));
        assert_fails(status, status == MT_EINVAL ? MT_EINVAL : MT_EDAMAGED, cases[i].words);
        assert_true(small_equal(&x, &before));
        small_destroy(&y);
    }
    small_destroy(&x);
    small_destroy(&before);
}

/* A model without moments: read into one without, not into a run. */
static void test_without_moments(void **state)
{
    (void)state;
    small x, y;
    assert_ok(small_create(&x, &usual));
    assert_ok(small_create(&y, &usual));
    small_fill(&x, 5);
    void *m = x.s.m, *v = x.s.v;
    x.s.m = x.s.v = NULL;
    assert_ok(mt_checkpoint_write(in_dir("weights"), &x.s, &info));
    x.s.m = m, x.s.v = v;
    assert_fails(small_load(&y, in_dir("weights")), MT_ECONFIG, "without optimizer state");
    m = y.s.m, v = y.s.v;
    y.s.m = y.s.v = NULL;
    assert_ok(small_load(&y, in_dir("weights")));
    y.s.m = m, y.s.v = v;
    assert_memory_equal(mt_param_store_master(y.s.params), mt_param_store_master(x.s.params),
                        (size_t)mt_param_store_elements(x.s.params) * sizeof(float));
    assert_memory_equal(x.bias, y.bias, EXPERTS * sizeof(float));
    small_destroy(&x);
    small_destroy(&y);
}

/* Parts that leave elements of a param out are caught when saving, not when the elements are
 * missed. */
static void test_parts_must_cover(void **state)
{
    (void)state;
    small x;
    assert_ok(small_create(&x, &usual));
    mt_param_store_get(x.s.params, 0)->parts[1].rows = 3;
    assert_fails(mt_checkpoint_write(in_dir("cover"), &x.s, &info), MT_EINTERNAL,
                 "1000 elements of its 1050");
    assert_false(mt_path_exists(in_dir("cover")));
    assert_false(mt_path_exists(in_dir("cover.tmp")));
    small_destroy(&x);
}

static void test_prune(void **state)
{
    (void)state;
    small x;
    char dir[256];
    snprintf(dir, sizeof dir, "%s/prune", files_dir);
    char name[64];
    assert_ok(small_create(&x, &usual));
    for (int64_t n = 10; n <= 80; n += 10) assert_ok(small_save(&x, dir, n));
    assert_int_equal(unlink(in_dir("prune/step_00000070/DONE")), 0);
    assert_ok(mt_dir_create(in_dir("prune/step_00000090.tmp/deeper")));
    assert_ok(mt_dir_create(in_dir("prune/other")));
    assert_ok(mt_checkpoint_prune(dir, 2, 30));
    /* the newest two complete ones, multiples of 30, nothing half-made, nothing of others */
    static const struct {
        const char *name;
        bool kept;
    } want[] = { { "step_00000010", false },     { "step_00000020", false },
                 { "step_00000030", true },      { "step_00000040", false },
                 { "step_00000050", false },     { "step_00000060", true },
                 { "step_00000070", false },     { "step_00000080", true },
                 { "step_00000090.tmp", false }, { "other", true } };
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        snprintf(name, sizeof name, "prune/%s", want[i].name);
        assert_int_equal(mt_path_exists(in_dir(name)), want[i].kept);
    }
    assert_ok(mt_checkpoint_prune(dir, 0, 0)); /* the newest always stays */
    assert_true(mt_path_exists(in_dir("prune/step_00000080")));
    assert_false(mt_path_exists(in_dir("prune/step_00000060")));
    assert_fails(mt_checkpoint_prune(in_dir("nowhere"), 1, 0), MT_EIO, "nowhere");
    small_destroy(&x);
}

/* A checkpoint that was moved to another place, and is linked to from where it was. */
static void test_prune_links(void **state)
{
    (void)state;
    small x;
    char dir[256];
    snprintf(dir, sizeof dir, "%s/links", files_dir);
    assert_ok(small_create(&x, &usual));
    for (int64_t n = 10; n <= 40; n += 10) assert_ok(small_save(&x, dir, n));
    assert_int_equal(rename(in_dir("links/step_00000020"), in_dir("moved")), 0);
    assert_int_equal(symlink("../moved", in_dir("links/step_00000020")), 0);
    assert_ok(mt_checkpoint_prune(dir, 2, 0));
    assert_false(mt_path_exists(in_dir("links/step_00000010")));
    assert_fails(mt_checkpoint_prune_after(dir, 15), MT_EIO, "step_00000020' is a symbolic link");
    assert_true(mt_path_exists(in_dir("moved/DONE")));
    small_destroy(&x);
}

/* ---- interruptions -----------------------------------------------------------------------------
 */

/* A child saves and prunes until it is killed; whenever that is, the newest complete checkpoint is
 * whole, and no older than the last one the child reported. */
static void test_kill(void **state)
{
    (void)state;
    enum { KILLS = 40 };
    char dir[256];
    snprintf(dir, sizeof dir, "%s/kill", files_dir);
    small x;
    int64_t saved = 0;
    assert_ok(small_create(&x, &usual));
    assert_ok(small_save(&x, dir, 0));
    for (uint64_t k = 0; k < KILLS; k++) {
        int report[2];
        assert_int_equal(pipe(report), 0);
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) {
            for (int64_t n = saved + 1;; n++) {
                if (small_save(&x, dir, n) != MT_OK) _exit(1);
                if (write(report[1], &n, sizeof n) != sizeof n) _exit(1);
                if (mt_checkpoint_prune(dir, 2, 0) != MT_OK) _exit(1);
            }
        }
        close(report[1]);
        const struct timespec wait = { 0, (long)mt_rng_below(7, 1, k, 60) * 1000000 };
        nanosleep(&wait, NULL);
        assert_int_equal(kill(child, SIGKILL), 0);
        int status;
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFSIGNALED(status));
        for (int64_t n; read(report[0], &n, sizeof n) == sizeof n;) saved = n;
        close(report[0]);
        char path[MT_CHECKPOINT_PATH], skipped[500];
        assert_ok(mt_checkpoint_find_latest(path, skipped, sizeof skipped, dir, NULL));
        int64_t newest = strtoll(strrchr(path, '_') + 1, NULL, 10);
        assert_true(newest == saved || newest == saved + 1);
        expect_latest(dir, newest, "");
        saved = newest;
    }
    small_destroy(&x);
}

/* Saves and prunes until it is killed. */
static pid_t begin_run(small *x, const char *dir)
{
    pid_t child = fork();
    assert_true(child >= 0);
    for (int64_t n = 2; child == 0; n++)
        if (small_save(x, dir, n) != MT_OK || mt_checkpoint_prune(dir, 1, 0) != MT_OK) _exit(1);
    return child;
}

/* What is opened of a run that goes on is the newest at some time, and whole, however soon it is
 * removed. */
static void test_read_while_pruned(void **state)
{
    (void)state;
    enum { READS = 1000 };
    const char *dir = in_dir("run/ckpt");
    char skipped[500];
    small want, got;
    int64_t last = 0;
    int status;
    assert_ok(mt_dir_create(in_dir("run")));
    assert_ok(small_create(&want, &usual));
    assert_ok(small_create(&got, &usual));
    assert_ok(small_save(&want, dir, 1));
    pid_t child = begin_run(&want, dir);
    for (int i = 0; i < READS; i++) {
        mt_checkpoint *c;
        assert_ok(mt_checkpoint_open_given(&c, skipped, sizeof skipped, in_dir("run")));
        assert_string_equal(skipped, "");
        assert_ok(mt_checkpoint_restore(&got.s, c));
        assert_true(got.s.step >= last);
        small_fill(&want, last = got.s.step);
        assert_true(small_equal(&want, &got));
        mt_checkpoint_close(&c);
    }
    assert_true(last > 1);
    assert_int_equal(kill(child, SIGKILL), 0);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status)); /* until then it ran */
    small_destroy(&want);
    small_destroy(&got);
}

static int save_limited(void)
{
    small x;
    if (small_create(&x, &usual) != MT_OK) return 1;
    mt_status status = small_save(&x, in_dir("limit"), 2);
    if (status != MT_EIO || !strstr(mt_error_message(), "File too large")) return 2;
    if (!strstr(mt_error_message(), "step_00000002")) return 3;
    if (mt_path_exists(in_dir("limit/step_00000002"))) return 4;
    if (mt_path_exists(in_dir("limit/step_00000002.tmp"))) return 5;
    /* over an older checkpoint of the same step, too */
    if (small_save(&x, in_dir("limit"), 1) != MT_EIO) return 6;
    small_destroy(&x);
    return 0;
}

static void test_full_disk(void **state)
{
    (void)state;
    static const size_t limits[] = { 10, 5000, 20000 };
    small x;
    assert_ok(small_create(&x, &usual));
    assert_ok(small_save(&x, in_dir("limit"), 1));
    for (int i = 0; i < 3; i++) {
        assert_int_equal(with_file_limit(limits[i], save_limited), 0);
        expect_latest(in_dir("limit"), 1, "");
    }
    assert_ok(small_save(&x, in_dir("limit"), 2));
    expect_latest(in_dir("limit"), 2, "");
    small_destroy(&x);
}

/* They may be there. */
static void test_out_of_sight(void **state)
{
    (void)state;
    int64_t count, step;
    assert_int_equal(symlink("loop", in_dir("loop")), 0); /* to itself */
    assert_fails(mt_checkpoint_count_dirs(&count, in_dir("loop/ckpt")), MT_EIO, "cannot look at '");
    assert_fails(mt_checkpoint_check_moved(in_dir("loop/ckpt")), MT_EIO, "cannot look at '");
    assert_fails(mt_metrics_last_step(&step, in_dir("loop/metrics.jsonl")), MT_EIO,
                 "cannot look at '");
    assert_fails(mt_metrics_check(in_dir("loop/metrics.jsonl"), 1), MT_EIO, "cannot look at '");
    assert_ok(mt_checkpoint_count_dirs(&count, in_dir("nowhere/ckpt")));
    assert_int_equal(count, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fall_back),
        cmocka_unit_test(test_newer_version),
        cmocka_unit_test(test_bit_flips),
        cmocka_unit_test(test_wrong_contents),
        cmocka_unit_test(test_without_moments),
        cmocka_unit_test(test_parts_must_cover),
        cmocka_unit_test(test_prune),
        cmocka_unit_test(test_prune_links),
        cmocka_unit_test(test_kill),
        cmocka_unit_test(test_read_while_pruned),
        cmocka_unit_test(test_full_disk),
        cmocka_unit_test(test_out_of_sight),
    };
    return cmocka_run_group_tests(tests, files_setup, files_teardown);
}
