/* mixtape doctor: what was found on this machine, and which code will run. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "dist/comm.h"
#include "kernels/ops.h"
#include "train/build_info.h"
#include "train/cli.h"
#include "train/config.h"
#include "train/fabric.h"
#include "train/fileio.h"
#include "train/h5.h"
#include "train/ranks.h"
#include "train/selfcheck.h"

static void row(const char *name, const char *value)
{
    printf("  %-18s %s\n", name, value);
}

/* ---- the machine -------------------------------------------------------------------------------
 */

enum { LINE = 4096 };

/* The value of the first "key ... : value" line of a file in /proc; "" when there is none. */
static void proc_value(char value[LINE], const char *path, const char *key)
{
    char line[LINE];
    FILE *file = fopen(path, "r");
    *value = '\0';
    while (file && fgets(line, sizeof line, file)) {
        char *colon = strchr(line, ':');
        if (!colon || strncmp(line, key, strlen(key)) != 0) continue;
        colon += 1 + strspn(colon + 1, " \t");
        snprintf(value, LINE, "%.*s", (int)strcspn(colon, "\n"), colon);
        break;
    }
    if (file) fclose(file);
}

/* Those features of the processor that some kernel set asks for. */
static void print_features(void)
{
    static const char *const wanted[] = { "avx2",     "fma",      "f16c",        "avx512f",
                                          "avx512bw", "avx512vl", "avx512_bf16", "amx_tile",
                                          "amx_bf16", "asimd",    "bf16",        "sve" };
    char flags[LINE], found[256] = "";
    proc_value(flags, "/proc/cpuinfo", "flags");
    if (!*flags) proc_value(flags, "/proc/cpuinfo", "Features");
    for (char *flag = strtok(flags, " "); flag; flag = strtok(NULL, " "))
        for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
            if (strcmp(flag, wanted[i]) == 0) strcat(strcat(found, *found ? " " : ""), flag);
    row("features", *found ? found : "none that a kernel set asks for");
}

static void print_memory(void)
{
    char total[LINE], available[LINE], text[256], limit[64] = "";
    proc_value(total, "/proc/meminfo", "MemTotal");
    proc_value(available, "/proc/meminfo", "MemAvailable");
    FILE *file = fopen("/sys/fs/cgroup/memory.max", "r");
    if (file && fscanf(file, "%63s", limit) != 1) *limit = '\0';
    if (file) fclose(file);
    bool limited = *limit && strcmp(limit, "max") != 0;
    snprintf(text, sizeof text, "%.0f MiB, %.0f MiB available", strtod(total, NULL) / 1024,
             strtod(available, NULL) / 1024);
    row("memory", text);
    snprintf(text, sizeof text, "%.0f MiB (control group)", strtod(limit, NULL) / 0x1p20);
    if (limited) row("memory limit", text);
}

static void print_machine(void)
{
    char model[LINE], text[64];
    printf("machine\n");
    proc_value(model, "/proc/cpuinfo", "model name");
    row("processor", *model ? model : "unknown");
    print_features();
    snprintf(text, sizeof text, "%ld online", sysconf(_SC_NPROCESSORS_ONLN));
    row("cores", text);
    print_memory();
}

/* ---- the program -------------------------------------------------------------------------------
 */

/* Every kernel set of the cpu: opening it says whether it can run here. */
static void print_kernel_sets(const char *chosen)
{
    static const char *const sets[] = { "amx", "avx512_bf16", "avx512", "avx2", "portable" };
    for (size_t i = 0; i < sizeof sets / sizeof *sets; i++) {
        mt_device *device;
        mt_status status = mt_device_open(&device, "cpu", sets[i], 0);
        bool in_use = strcmp(sets[i], chosen) == 0;
        char name[32];
        snprintf(name, sizeof name, "kernels %s", sets[i]);
        row(name, status != MT_OK ? mt_error_message()
                  : in_use        ? "available, in use"
                                  : "available");
        mt_device_destroy(&device);
    }
}

static void print_paths(const mt_device *device)
{
    static const mt_dtype dtypes[] = { MT_F32, MT_BF16, MT_F64 };
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++) {
        const struct mt_kernels *kernels;
        char name[32];
        snprintf(name, sizeof name, "GEMM %s", mt_dtype_name(dtypes[i]));
        mt_status status = mt_device_kernels(device, dtypes[i], &kernels);
        row(name, status == MT_OK ? kernels->gemm_path : mt_error_message());
    }
}

/* What GEMMs of bf16 runs do with each format: "decoded to bf16    in bf16 runs: fp8_tensor, ...".
 */
static void print_operands(const mt_device *device)
{
    const struct mt_kernels *kernels;
    char text[2][LINE] = { "", "" };
    if (mt_device_kernels(device, MT_BF16, &kernels) != MT_OK) return;
    for (int i = 0; i < MT_FORMAT_COUNT; i++) {
        mt_format_spec spec = mt_format_spec_default((mt_format_id)i);
        mt_dtype dtype = kernels->gemm_operand(&spec);
        char *to = text[dtype == MT_BF16];
        if (&mt_formats[i] == mt_format_plain(dtype)) continue;
        snprintf(to + strlen(to), LINE - strlen(to), "%s%s",
                 *to ? " " : "in bf16 runs: ", mt_formats[i].name);
    }
    if (*text[0]) row("decoded to f32", text[0]);
    if (*text[1]) row("decoded to bf16", text[1]);
}

static void print_program(const mt_device *device)
{
    char threads[96];
    const char *omp = getenv("OMP_NUM_THREADS");
    printf("program\n");
    row("revision", mt_build_revision());
    row("compiler", mt_build_compiler());
    row("libraries", mt_build_libraries());
    print_kernel_sets(device->kernel_set);
    print_paths(device);
    print_operands(device);
    snprintf(threads, sizeof threads, "%d (OMP_NUM_THREADS %s)", device->threads,
             omp ? omp : "not set: every core");
    row("threads", threads);
}

/* Of the sets that a GPU of this kind has several of, those that are not in use. */
static void print_cuda_sets(const char *chosen)
{
    static const char *const sets[] = { "cublaslt_grouped", "cublaslt", "cublaslt_loop" };
    for (size_t i = 0; i < sizeof sets / sizeof *sets; i++) {
        mt_device *device;
        char name[32];
        const struct mt_kernels *kernels;
        if (!strcmp(sets[i], chosen)) continue;
        snprintf(name, sizeof name, "%s", sets[i]);
        mt_status status = mt_device_open(&device, "cuda", sets[i], 0);
        if (status == MT_OK) status = mt_device_kernels(device, MT_BF16, &kernels);
        row(name, status == MT_OK ? kernels->gemm_path : mt_error_message());
        mt_device_destroy(&device);
    }
}

static void print_others(void)
{
    mt_device *device;
    printf("beyond one CPU process\n");
    bool gpu = mt_device_open(&device, "cuda", NULL, 0) == MT_OK;
    row("GPU", gpu ? device->kernel_set : mt_error_message());
    if (gpu) print_paths(device);
    if (gpu) print_cuda_sets(device->kernel_set);
    mt_device_destroy(&device);
    row("NCCL",
        mt_comm_has("nccl") ? "in this build: mixtape train --gpus N" : "not in this build");
    row("MPI",
        mt_comm_has("mpi") ? "in this build: mpirun -n N mixtape train" : "not in this build");
}

/* ---- self-check --------------------------------------------------------------------------------
 */

/* A dataset written, read back, and compared. */
static mt_status check_hdf5(void)
{
    enum { COUNT = 1000 };
    const char *dir = getenv("TMPDIR");
    char path[MT_PATH_BYTES];
    int64_t wrote[COUNT], got[COUNT] = { 0 }, shape = COUNT;
    mt_h5 *file = NULL;
    mt_h5_info info;
    mt_status status = MT_OK;
    for (int i = 0; i < COUNT; i++) wrote[i] = (int64_t)i * i;
    MT_TRY(mt_path_format(path, "%s/mixtape-doctor-%ld.h5", dir && *dir ? dir : "/tmp",
                          (long)getpid()));
    MT_TRY_CLEANUP(mt_h5_create(&file, path));
    MT_TRY_CLEANUP(mt_h5_write(file, "x", MT_I64, 1, &shape, wrote));
    MT_TRY_CLEANUP(mt_h5_commit(&file));
    MT_TRY_CLEANUP(mt_h5_open(&file, path));
    MT_TRY_CLEANUP(mt_h5_expect(file, "x", MT_I64, 1, &shape, &info));
    MT_TRY_CLEANUP(mt_h5_read(file, "x", &info, got));
    if (memcmp(got, wrote, sizeof got) != 0)
        MT_TRY_CLEANUP(MT_FAIL(MT_EINTERNAL, "%s: reads back other numbers", path));
cleanup:
    mt_h5_close(&file);
    unlink(path);
    return status;
}

static mt_status self_check(mt_device *device)
{
    static const mt_dtype dtypes[] = { MT_F32, MT_BF16, MT_F64 };
    printf("self-check\n");
    row("subnormals", "kept by every thread"); /* a device that flushes them does not open */
    MT_TRY(mt_selfcheck_philox());
    row("philox", "equals the published vectors");
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++) {
        double worst;
        char name[32], text[96];
        MT_TRY(mt_selfcheck_gemm(device, dtypes[i], &worst));
        snprintf(name, sizeof name, "GEMM %s", mt_dtype_name(dtypes[i]));
        snprintf(text, sizeof text, "against f64: worst error %.3f of its limit", worst);
        row(name, text);
    }
    MT_TRY(check_hdf5());
    row("HDF5", "writes and reads back, checksums on");
    return MT_OK;
}

/* ---- the fabric --------------------------------------------------------------------------------
 */

static void fabric_row(void *context, const char *name, const char *text)
{
    (void)context;
    row(name, text);
    fflush(stdout);
}

/* What the ranks that this process was started with exchange. A rank that does not come, or does
 * not answer, ends all of them with a line that names it. */
static mt_status check_fabric(const char *name, const mt_launch *launch)
{
    const double patience_s = 60;
    mt_device *device = NULL;
    mt_comm *comm = NULL;
    char text[160];
    mt_status status = mt_ranks_open_device(&device, name);
    if (status == MT_OK) status = mt_ranks_open(&comm, device, patience_s);
    if (status == MT_OK) {
        printf("fabric\n");
        snprintf(text, sizeof text, "%d of %s over %s, on %s", launch->world, launch->launcher,
                 mt_comm_backend(comm), device->name);
        row("ranks", text);
        status = mt_fabric_check(comm, device, fabric_row, NULL);
    }
    mt_ranks_close(&comm, status);
    mt_device_destroy(&device);
    return status;
}

/* The one that was asked for by name; others were looked at where they are. */
static mt_status check_gpu(const char *name)
{
    mt_device *device;
    mt_status status = mt_ranks_open_device(&device, name);
    if (status == MT_OK) row("device", device->name);
    mt_device_destroy(&device);
    return status;
}

static mt_status check_all(void)
{
    mt_device *device;
    print_machine();
    MT_TRY(mt_device_open(&device, "cpu", NULL, mt_ranks_threads()));
    print_program(device);
    print_others();
    mt_status status = self_check(device);
    mt_device_destroy(&device);
    return status;
}

mt_status mt_verb_doctor(int argc, char **argv)
{
    const char *device = "auto";
    int64_t gpus = MT_OPTION_ABSENT;
    const mt_option options[] = {
        { "gpus", MT_OPTION_INT, &gpus, "N", "start N ranks, one on each GPU of this host" },
        { "device", MT_OPTION_TEXT, &device, "NAME", "auto, cpu or cuda, which must be there" },
    };
    const mt_command command = {
        .usage = "mixtape doctor [--gpus N] [--device NAME]",
        .about =
            "What was found on this machine, which kernels will run, and a self-check that runs "
            "them.\nStarted as one of several ranks (torchrun, srun, mpirun, --gpus) it also makes "
            "each of their\ncollectives, checks every byte, and says how fast they are.\n"
            "MIXTAPE_KERNELS and OMP_NUM_THREADS count as they do in training.",
        .options = options,
        .option_count = sizeof options / sizeof *options,
    };
    int count;
    bool help;
    char **words = NULL;
    mt_launch launch;
    MT_TRY(mt_ranks_copy_words(&words, argc, argv));
    mt_status status = mt_command_parse(&command, argc, argv, &count, &help);
    if (status == MT_OK && !help) status = mt_config_check_device(device);
    if (status == MT_OK && !help) status = mt_ranks_start(gpus, device, words);
    free(words);
    MT_TRY(status);
    if (help) return MT_OK;
    MT_TRY(mt_launch_detect(&launch));
    if (launch.rank > 0 && !freopen("/dev/null", "w", stdout))
        return MT_FAIL(MT_EIO, "rank %d: cannot be silent", launch.rank);
    status = check_all();
    if (status == MT_OK && launch.world > 1) return check_fabric(device, &launch);
    return status == MT_OK && !strncmp(device, "cuda", 4) ? check_gpu(device) : status;
}
