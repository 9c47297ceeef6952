/* Checkpoints of ranks: saved by N and loaded by M they are the same state to the bit; whatever
 * happens to one of their files, or to a rank that writes, is said and nothing wrong is loaded. */
#include "tests/dist/training.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <xxhash.h>

#include "tests/train/program.h"
#include "train/checkpoint.h"
#include "train/h5.h"

static const mt_checkpoint_info info = { .run_config = "a: 1\n", .corpus = "text 1" };

static mt_trainer_config config_of(mt_dtype dtype, const char *recipe)
{
    mt_trainer_config c = small_config(dtype, recipe, 3, 2);
    c.sequence_length = 8, c.delayed_history = 3;
    return c;
}

/* Everything that is sharded in some way: real, split masters, narrow moments, histories. */
enum { CONFIGS = 3 };
static mt_trainer_config config_at(int i)
{
    mt_trainer_config c = config_of(i == 0   ? MT_F64
                                    : i == 1 ? MT_BF16
                                             : MT_F32,
                                    i == 0   ? "none"
                                    : i == 1 ? "fp8_delayed"
                                             : "nvfp4");
    if (i == 1) c.optim.moments = MT_MOMENTS_FP8;
    if (i == 2) {
        c.optim.moments = MT_MOMENTS_BF16, c.optim.moments_sr = true;
        c.optim.master = MT_MASTER_SPLIT;
    }
    return c;
}

static mt_status step(mt_trainer *t)
{
    int32_t tokens[BATCH * SEQUENCE], targets[BATCH * SEQUENCE];
    mt_step_result result;
    draw_batch(mt_trainer_get_config(t), mt_trainer_steps(t), tokens, targets);
    return mt_trainer_step(t, tokens, targets, &result);
}

/* A trainer over `comm`; where `from` is given, as that checkpoint has it; then so many steps, and
 * saved in `to`. */
static mt_status go(mt_comm *comm, mt_trainer_config c, const char *from, int steps, const char *to,
                    char saved[MT_CHECKPOINT_PATH])
{
    mt_trainer *t;
    mt_status status;
    c.comm = comm;
    MT_TRY(mt_trainer_create(&t, rank_device, &c));
    if (from) MT_TRY_CLEANUP(mt_checkpoint_load(t, from, "text 1", false));
    for (int i = 0; i < steps; i++) MT_TRY_CLEANUP(step(t));
    MT_TRY_CLEANUP(mt_checkpoint_save(to, t, &info, saved));
cleanup:
    mt_trainer_destroy(&t);
    return status;
}

/* ---- the same state ----------------------------------------------------------------------------
 */

static mt_status same_dataset(mt_h5 *a, mt_h5 *b, const char *name)
{
    mt_h5_info x, y;
    MT_TRY(mt_h5_dataset_info(a, name, &x));
    MT_TRY(mt_h5_expect(b, name, x.type, x.ndim, x.shape, &y));
    char *p = malloc(2 * (size_t)x.bytes + 1), *q = p + x.bytes;
    rank_check(p, "no memory for %s", name);
    mt_status status = mt_h5_read(a, name, &x, p);
    if (status == MT_OK) status = mt_h5_read(b, name, &y, q);
    if (status == MT_OK && memcmp(p, q, (size_t)x.bytes) != 0)
        status = MT_FAIL(MT_EINTERNAL, "%s differs in '%s' and '%s'", name, mt_h5_path(a),
                         mt_h5_path(b));
    free(p);
    return status;
}

static mt_status same_group(mt_h5 *a, mt_h5 *b, const char *group, int64_t *datasets)
{
    char **ours, **theirs, name[2048];
    int64_t n, m;
    bool has, had;
    MT_TRY(mt_h5_exists(a, group, &has));
    MT_TRY(mt_h5_exists(b, group, &had));
    rank_check(has == had, "only one has %s", group);
    if (!has) return MT_OK;
    MT_TRY(mt_h5_list(a, group, &ours, &n));
    MT_TRY(mt_h5_list(b, group, &theirs, &m));
    rank_check(n == m, "%s has %lld and %lld names", group, (long long)n, (long long)m);
    for (int64_t i = 0; i < n; i++) {
        snprintf(name, sizeof name, "%s/%s", group, ours[i]);
        MT_TRY(same_dataset(a, b, name));
        ++*datasets;
    }
    mt_h5_names_free(&ours, n);
    mt_h5_names_free(&theirs, m);
    return MT_OK;
}

static mt_status same_attributes(mt_h5 *a, mt_h5 *b)
{
    static const char *const reals[] = { "lr",    "power1", "power2",   "bias1",
                                         "bias2", "clip",   "grad_norm" };
    static const char *const integers[] = { "skip", "applied", "skipped", "skipped_in_a_row" };
    for (int i = 0; i < 7; i++) {
        double x, y;
        MT_TRY(mt_h5_get_f64(a, "/optim", reals[i], &x));
        MT_TRY(mt_h5_get_f64(b, "/optim", reals[i], &y));
        rank_check(!memcmp(&x, &y, sizeof x), "%s is %.17g and %.17g", reals[i], x, y);
    }
    for (int i = 0; i < 4; i++) {
        int64_t x, y;
        MT_TRY(mt_h5_get_i64(a, "/optim", integers[i], &x));
        MT_TRY(mt_h5_get_i64(b, "/optim", integers[i], &y));
        rank_check(x == y, "%s is %lld and %lld", integers[i], (long long)x, (long long)y);
    }
    return MT_OK;
}

/* Two checkpoints show the same, whoever wrote them. */
static mt_status same_state(const char *path, const char *other)
{
    static const char *const groups[] = { "/model",          "/optim/m",
                                          "/optim/v",        "/optim/m_scales",
                                          "/optim/v_scales", "/state/router_bias",
                                          "/state/delayed" };
    char file[MT_CHECKPOINT_PATH + 16];
    mt_h5 *a, *b;
    int64_t datasets = 0;
    snprintf(file, sizeof file, "%s/model.h5", path);
    MT_TRY(mt_h5_open(&a, file));
    snprintf(file, sizeof file, "%s/model.h5", other);
    MT_TRY(mt_h5_open(&b, file));
    for (size_t i = 0; i < sizeof groups / sizeof groups[0]; i++)
        MT_TRY(same_group(a, b, groups[i], &datasets));
    bool nan;
    MT_TRY(mt_h5_exists(a, "/state/nan", &nan));
    if (nan) MT_TRY(same_dataset(a, b, "/state/nan"));
    MT_TRY(same_attributes(a, b));
    rank_check(datasets > 100, "only %lld datasets", (long long)datasets);
    mt_h5_close(&a);
    mt_h5_close(&b);
    return MT_OK;
}

/* Every world of 1, 2 and 4 ranks saves what every such world loads, and saves again as it was. */
static mt_status counts_case(mt_comm *world)
{
    static const int sizes[] = { 1, 2, 4 };
    int rank = mt_comm_rank(world);
    mt_comm *parts[3];
    for (int i = 0; i < 3; i++) MT_TRY(mt_comm_split(&parts[i], world, rank >= sizes[i]));
    for (int config = 0; config < CONFIGS; config++)
        for (int n = 0; n < 3; n++) {
            char dir[64], from[MT_CHECKPOINT_PATH] = "", to[MT_CHECKPOINT_PATH];
            mt_trainer_config c = config_at(config);
            snprintf(dir, sizeof dir, "counts/%d_%d", config, sizes[n]);
            mt_status status = rank < sizes[n] ? go(parts[n], c, NULL, 2, dir, from) : MT_OK;
            MT_TRY(mt_comm_agree(world, status, "saving"));
            MT_TRY(mt_comm_broadcast(world, NULL, from, sizeof from, 0, "its path"));
            for (int m = 0; m < 3; m++) {
                snprintf(dir, sizeof dir, "counts/%d_%d_%d", config, sizes[n], sizes[m]);
                status = rank < sizes[m] ? go(parts[m], c, from, 0, dir, to) : MT_OK;
                if (status == MT_OK && rank == 0) status = same_state(from, to);
                MT_TRY(mt_comm_agree(world, status, dir));
            }
        }
    for (int i = 0; i < 3; i++) mt_comm_close(&parts[i]);
    return MT_OK;
}

/* The same where ranks share experts: whatever part of the ranks that wrote a state, and whatever
 * part of those that load it, have the same experts. */
static mt_status experts_case(mt_comm *world)
{
    static const struct {
        int ranks, degree;
    } meshes[] = { { 1, 1 }, { 2, 2 }, { 4, 2 }, { 4, 4 } };
    enum { MESHES = sizeof meshes / sizeof meshes[0] };
    int rank = mt_comm_rank(world);
    mt_comm *parts[MESHES];
    for (int i = 0; i < MESHES; i++)
        MT_TRY(mt_comm_split(&parts[i], world, rank >= meshes[i].ranks));
    for (int config = 1; config < CONFIGS; config++)
        for (int n = 0; n < MESHES; n++) {
            char dir[64], from[MT_CHECKPOINT_PATH] = "", to[MT_CHECKPOINT_PATH];
            mt_trainer_config c = config_at(config);
            c.model.num_experts = 4, c.expert_parallel = meshes[n].degree;
            snprintf(dir, sizeof dir, "experts/%d_%d", config, n);
            bool here = rank < meshes[n].ranks;
            mt_status status = here ? go(parts[n], c, NULL, 2, dir, from) : MT_OK;
            MT_TRY(mt_comm_agree(world, status, "saving"));
            MT_TRY(mt_comm_broadcast(world, NULL, from, sizeof from, 0, "its path"));
            for (int turn = 1; turn < MESHES; turn++) {
                int m = (n + turn) % MESHES;
                snprintf(dir, sizeof dir, "experts/%d_%d_%d", config, n, m);
                c.expert_parallel = meshes[m].degree;
                status = rank < meshes[m].ranks ? go(parts[m], c, from, 0, dir, to) : MT_OK;
                if (status == MT_OK && rank == 0) status = same_state(from, to);
                MT_TRY(mt_comm_agree(world, status, dir));
            }
        }
    for (int i = 0; i < MESHES; i++) mt_comm_close(&parts[i]);
    return MT_OK;
}

/* What a run does after it was loaded does not depend on who saved the same state. */
static mt_status going_on_case(mt_comm *world)
{
    int rank = mt_comm_rank(world);
    char four[MT_CHECKPOINT_PATH], one[MT_CHECKPOINT_PATH] = "", a[MT_CHECKPOINT_PATH],
                                   b[MT_CHECKPOINT_PATH];
    mt_comm *alone;
    MT_TRY(mt_comm_split(&alone, world, rank));
    for (int config = 0; config < CONFIGS; config++) {
        char dirs[4][32];
        for (int i = 0; i < 4; i++) snprintf(dirs[i], sizeof dirs[i], "on/%d_%d", config, i);
        mt_trainer_config c = config_at(config);
        MT_TRY(go(world, c, NULL, 2, dirs[0], four));
        mt_status status = rank == 0 ? go(alone, c, four, 0, dirs[1], one) : MT_OK;
        MT_TRY(mt_comm_agree(world, status, "converting"));
        MT_TRY(mt_comm_broadcast(world, NULL, one, sizeof one, 0, "its path"));
        MT_TRY(go(world, c, four, 2, dirs[2], a));
        MT_TRY(go(world, c, one, 2, dirs[3], b));
        if (rank == 0) status = same_state(a, b);
        MT_TRY(mt_comm_agree(world, status, "going on"));
    }
    mt_comm_close(&alone);
    return MT_OK;
}

/* ---- damage ------------------------------------------------------------------------------------
 */

static mt_status shell(const char *line)
{
    rank_check(system(line) == 0, "failed: %s", line);
    return MT_OK;
}

/* DONE without its line for `name`, whole otherwise. */
static mt_status leave_out(const char *dir, const char *name)
{
    char path[256], *text, kept[4096];
    size_t bytes, used = 0;
    snprintf(path, sizeof path, "%s/DONE", dir);
    MT_TRY(mt_file_read_all(&text, &bytes, path, sizeof kept - 64));
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n"))
        if (!strstr(line, name) && strncmp(line, "end ", 4) != 0)
            used += (size_t)snprintf(kept + used, sizeof kept - used, "%s\n", line);
    used += (size_t)snprintf(kept + used, sizeof kept - used, "end %016llx\n",
                             (unsigned long long)XXH3_64bits(kept, used));
    free(text);
    return mt_file_write_all(path, kept, used);
}

/* What happens to the newest of two checkpoints, and the words that say so. */
typedef struct damage {
    const char *line; /* of the shell */
    const char *words[2];
} damage;
static const damage damages[] = {
    { "rm x/step_00000002/rank_0001.h5", { "rank_0001.h5", "No such file" } },
    { "truncate -s 20000 x/step_00000002/rank_0001.h5", { "rank_0001.h5", "has 20000 bytes" } },
    { "truncate -s 0 x/step_00000002/rank_0001.h5", { "rank_0001.h5", "has 0 bytes" } },
    { "printf x | dd of=x/step_00000002/rank_0000.h5 bs=1 seek=30000 conv=notrunc 2>/dev/null",
      { "rank_0000.h5", "does not match its checksum" } },
    { "cp x/step_00000001/rank_0001.h5 x/step_00000002",
      { "rank_0001.h5", "is of another save: of 'step 1, " } },
    { "mv x/step_00000002/rank_0000.h5 x/h && mv x/step_00000002/rank_0001.h5 "
      "x/step_00000002/rank_0000.h5 && mv x/h x/step_00000002/rank_0001.h5",
      { "rank_000", "bytes" } },
    { "printf x | dd of=x/step_00000002/model.h5 bs=1 seek=9000 conv=notrunc 2>/dev/null",
      { "model.h5", "does not match its checksum" } },
    { "rm x/step_00000002/DONE", { "step_00000002", "no DONE" } },
    { "sed -i /rank_0001/d x/step_00000002/DONE", { "DONE", "its own checksum" } },
    { "mv x/step_00000002 x/step_00000002.tmp", { "", "" } },
};
enum { DAMAGES = sizeof damages / sizeof damages[0] };

/* Every rank hears of it, and the checkpoint before it is taken. */
static mt_status check_damage(mt_comm *world, const damage *d)
{
    char path[MT_CHECKPOINT_PATH], skipped[2048];
    mt_trainer *t;
    mt_trainer_config c = config_at(0);
    c.comm = world;
    mt_status status = mt_comm_rank(world) == 0 ? shell("rm -rf x && cp -r damaged x") : MT_OK;
    if (status == MT_OK && mt_comm_rank(world) == 0) status = shell(d->line);
    MT_TRY(mt_comm_agree(world, status, d->line));
    MT_TRY(mt_checkpoint_find_latest(path, skipped, sizeof skipped, "x", world));
    rank_check(!strcmp(path, "x/step_00000001"), "after %s, %s was taken", d->line, path);
    for (int i = 0; i < 2; i++)
        rank_check(strstr(skipped, d->words[i]), "after %s, '%s' does not say %s", d->line, skipped,
                   d->words[i]);
    MT_TRY(mt_trainer_create(&t, rank_device, &c));
    status = mt_checkpoint_load(t, "x/step_00000002", NULL, false);
    rank_check(status == MT_EDAMAGED || status == MT_EIO, "after %s it was loaded", d->line);
    for (int i = 0; i < 2; i++)
        rank_check(strstr(mt_error_message(), d->words[i]), "after %s: %s", d->line,
                   mt_error_message());
    mt_error_clear();
    MT_TRY(mt_checkpoint_load(t, path, NULL, false));
    mt_trainer_destroy(&t);
    return MT_OK;
}

/* A list that does not name a rank's file, and model.h5 read alone. */
static mt_status check_lists(mt_comm *world)
{
    mt_checkpoint *c = NULL;
    mt_h5 *file;
    mt_h5_info x;
    if (mt_comm_rank(world) != 0) return MT_OK;
    MT_TRY(shell("rm -rf x && cp -r damaged x"));
    MT_TRY(leave_out("x/step_00000002", "rank_0001.h5"));
    rank_check(mt_checkpoint_open(&c, "x/step_00000002") == MT_EDAMAGED &&
                   strstr(mt_error_message(), "lists 2 files, model.h5 is of 2 ranks'"),
               "it was opened: %s", mt_error_message());
    MT_TRY(shell("cp x/step_00000001/rank_0001.h5 x/step_00000002"));
    MT_TRY(mt_h5_open(&file, "x/step_00000002/model.h5"));
    rank_check(mt_h5_dataset_info(file, "/model/lm_head.weight", &x) == MT_EDAMAGED &&
                   strstr(mt_error_message(), "rank_0001.h5") &&
                   strstr(mt_error_message(), "of another save"),
               "it was read: %s", mt_error_message());
    mt_h5_close(&file);
    mt_error_clear();
    return MT_OK;
}

/* A checkpoint that is open is read to its end, though its files are removed: the run prunes. */
static mt_status check_removed(mt_comm *world)
{
    mt_checkpoint *c;
    mt_tensor x;
    if (mt_comm_rank(world) != 0) return MT_OK;
    MT_TRY(shell("rm -rf x && cp -r damaged x"));
    MT_TRY(mt_checkpoint_open(&c, "x/step_00000002"));
    MT_TRY(shell("rm -r x"));
    for (int64_t i = 0; i < mt_checkpoint_count(c); i++) {
        const char *name = mt_checkpoint_name(c, i);
        MT_TRY(mt_checkpoint_tensor(c, "/model", name, &x));
        x.data = malloc(mt_tensor_bytes(&x) + 1);
        mt_status status = mt_checkpoint_read(c, "/model", name, &x);
        free(x.data);
        MT_TRY(status);
    }
    mt_checkpoint_close(&c);
    return MT_OK;
}

static mt_status damage_case(mt_comm *world)
{
    char path[MT_CHECKPOINT_PATH];
    MT_TRY(go(world, config_at(0), NULL, 1, "damaged", path));
    MT_TRY(go(world, config_at(0), path, 1, "damaged", path));
    for (int i = 0; i < DAMAGES; i++) MT_TRY(check_damage(world, &damages[i]));
    MT_TRY(check_lists(world));
    return check_removed(world);
}

/* ---- saves that fail ---------------------------------------------------------------------------
 */

static mt_status limit_files(rlim_t bytes)
{
    struct rlimit limit;
    signal(SIGXFSZ, SIG_IGN); /* a write past it then fails with EFBIG */
    rank_check(getrlimit(RLIMIT_FSIZE, &limit) == 0, "no limit to be had");
    limit.rlim_cur = bytes;
    rank_check(setrlimit(RLIMIT_FSIZE, &limit) == 0, "no limit of %zu", (size_t)bytes);
    return MT_OK;
}

/* Rank `which` cannot write more than `bytes`: nobody has saved, and everyone says why. */
static mt_status check_full(mt_comm *world, int which, rlim_t bytes, const char *file)
{
    char path[MT_CHECKPOINT_PATH], skipped[512], name[32];
    int rank = mt_comm_rank(world);
    if (rank == which) MT_TRY(limit_files(bytes));
    mt_status status = go(world, config_at(2), "full/step_00000001", 1, "full", path);
    if (rank == which) MT_TRY(limit_files(RLIM_INFINITY));
    snprintf(name, sizeof name, "rank %d: ", which);
    rank_check(status == MT_EIO && strstr(mt_error_message(), file) &&
                   strstr(mt_error_message(), "File too large") &&
                   (rank == which || strstr(mt_error_message(), name)),
               "rank %d with %zu bytes: %d, %s", which, (size_t)bytes, (int)status,
               mt_error_message());
    mt_error_clear();
    rank_check(access("full/step_00000002", F_OK) != 0, "it is there");
    MT_TRY(mt_comm_barrier(world, "looking"));
    rank_check(access("full/step_00000002.tmp", F_OK) != 0, "something of it is left");
    MT_TRY(mt_checkpoint_find_latest(path, skipped, sizeof skipped, "full", world));
    rank_check(!strcmp(path, "full/step_00000001") && !*skipped, "latest is %s", path);
    return mt_comm_barrier(world, "looked");
}

static mt_status full_case(mt_comm *world)
{
    char path[MT_CHECKPOINT_PATH];
    int last = mt_comm_size(world) - 1;
    snprintf(path, sizeof path, "rank_%04d.h5", last);
    MT_TRY(mt_comm_agree(world, mt_comm_rank(world) ? MT_OK : shell("rm -rf full"), "rm"));
    MT_TRY(go(world, config_at(2), NULL, 1, "full", NULL));
    MT_TRY(check_full(world, last, 100, path));
    MT_TRY(check_full(world, last, 30000, path));
    MT_TRY(check_full(world, 0, 30000, "rank_0000.h5"));
    MT_TRY(go(world, config_at(2), "full/step_00000001", 1, "full", path));
    return same_state(path, "full/step_00000002");
}

/* ---- loads that fail ---------------------------------------------------------------------------
 */

/* Rank `which` can have one more file open: enough to verify files, and to open model.h5, not those
 * that it shows. Nobody has loaded, and everyone says why. */
static mt_status unread_case(mt_comm *world)
{
    char path[MT_CHECKPOINT_PATH], name[32];
    int rank = mt_comm_rank(world), which = mt_comm_size(world) - 1;
    struct rlimit before, limit;
    MT_TRY(go(world, config_at(2), NULL, 1, "unread", path));
    int next = dup(0);
    rank_check(next >= 0 && close(next) == 0 && getrlimit(RLIMIT_NOFILE, &before) == 0,
               "no limit to be had");
    limit = before, limit.rlim_cur = (rlim_t)next + 1;
    if (rank == which)
        rank_check(setrlimit(RLIMIT_NOFILE, &limit) == 0, "no limit of %d", next + 1);
    mt_status status = go(world, config_at(2), path, 0, "unread", NULL);
    rank_check(setrlimit(RLIMIT_NOFILE, &before) == 0, "the limit stays");
    snprintf(name, sizeof name, "rank %d: ", which);
    rank_check(status == MT_EIO && strstr(mt_error_message(), "rank_0000.h5': Too many open") &&
                   (rank == which || strstr(mt_error_message(), name)),
               "%d, %s", (int)status, mt_error_message());
    mt_error_clear();
    return go(world, config_at(2), path, 1, "unread", NULL);
}

static const rank_case cases[] = {
    { "counts", counts_case }, { "experts", experts_case }, { "going_on", going_on_case },
    { "damage", damage_case }, { "full", full_case },       { "unread", unread_case },
};
enum { CASES = sizeof cases / sizeof cases[0] };

/* ---- the runner --------------------------------------------------------------------------------
 */

static void test_counts(void **state)
{
    (void)state;
    need_ranks(4);
    assert_ranks(4, "counts");
}

static void test_experts(void **state)
{
    (void)state;
    need_ranks(4);
    assert_ranks(4, "experts");
}

static void test_going_on(void **state)
{
    (void)state;
    need_ranks(4);
    assert_ranks(4, "going_on");
}

int main(int argc, char **argv)
{
    if (argc > 3 && !strcmp(argv[1], "--ranks")) return ranks_main(argv);
    if (argc > 1) return rank_main(cases, CASES, argv[1], on_gpus() ? 60 : 20);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_counts),       cmocka_unit_test(test_experts),
        cmocka_unit_test(test_going_on),     RANKS_TEST(on_two, "damage"),
        RANKS_TEST(on_two_and_four, "full"), RANKS_TEST(on_two, "unread"),
    };
    return cmocka_run_group_tests(tests, program_setup, program_teardown);
}
