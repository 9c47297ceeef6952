/* The cpu device: memory, the choice of a kernel set, threads, scratch. Compiled once. */
#include <float.h>
#include <omp.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include "kernels/backends.h"
#include "kernels/cpu/backend.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <xmmintrin.h>
#endif

/* Blocks of LARGE bytes and more start at a huge page and ask for huge pages. */
enum { ALIGN = 64, HUGE_PAGE = 2 << 20, LARGE = 4 << 20, MAX_THREADS = 4096, COMPUTE_DTYPES = 3 };

static const mt_dtype compute_dtypes[COMPUTE_DTYPES] = { MT_F64, MT_F32, MT_BF16 };

struct cpu {
    mt_device device;
    struct mt_kernels kernels[COMPUTE_DTYPES];
    struct scratch {
        void *p;
        size_t bytes;
    } scratch, operands;
};

/* ---- kernel sets ------------------------------------------------------------------------------
 */

static bool always(void)
{
    return true;
}

#ifdef MT_HAVE_avx2
/* What x86-64-v3 has beyond what __builtin_cpu_supports knows in every compiler. */
static bool has_v3_scalars(void)
{
    unsigned a, b, c, d, movbe = 1u << 22, f16c = 1u << 29, lzcnt = 1u << 5;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & (movbe | f16c)) != (movbe | f16c)) return false;
    return __get_cpuid(0x80000001u, &a, &b, &c, &d) && (c & lzcnt);
}

static bool has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && has_v3_scalars();
}
#endif

#ifdef MT_HAVE_avx512
static bool has_avx512(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
}

static bool has_avx512_bf16(void)
{
    unsigned a, b, c, d, bf16 = 1u << 5;
    return has_avx512() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & bf16);
}

/* AMX on bf16, and this process may use its tiles: those it must ask the operating system for. */
static bool has_amx(void)
{
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    const unsigned amx = 1u << 22 | 1u << 24;
    unsigned a, b, c, d;
    return has_avx512_bf16() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & amx) == amx &&
           syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

#define USE_PAIRS(way)                                                                             \
    static void use_##way(struct mt_kernels *bf16)                                                 \
    {                                                                                              \
        bf16->attention_fwd = mt_cpu_attention_fwd_##way##_bf16;                                   \
        bf16->attention_bwd = mt_cpu_attention_bwd_##way##_bf16;                                   \
        bf16->gemm = mt_cpu_gemm_##way##_bf16;                                                     \
        bf16->gemm_operand = mt_cpu_gemm_operand_##way##_bf16;                                     \
        bf16->pack_weight = mt_cpu_pack_weight_##way##_bf16;                                       \
        bf16->packed_bytes = mt_cpu_packed_bytes_##way##_bf16;                                     \
    }
MT_CPU_PAIRS(USE_PAIRS)
#endif

struct kernel_set {
    const char *name;
    const char *needs; /* what the machine must have */
    bool (*runs_here)(void);
    void (*replace)(struct mt_kernels *bf16); /* NULL: the bf16 table as it is */
    const struct mt_kernels *kernels[COMPUTE_DTYPES];
    const char *gemm_path[COMPUTE_DTYPES];
};

#define SET(isa)                                                                                   \
    {                                                                                              \
        &mt_cpu_kernels_##isa##_f64, &mt_cpu_kernels_##isa##_f32, &mt_cpu_kernels_##isa##_bf16     \
    }

#define AVX512_PATHS "avx512 f64, 14x16 micro-kernel", "avx512 f32, 14x32 micro-kernel"

/* Best first. */
static const struct kernel_set sets[] = {
#ifdef MT_HAVE_avx512
    { "amx",
      "AVX-512 and AMX bf16 tiles",
      has_amx,
      use_amx,
      SET(avx512),
      { AVX512_PATHS, "AMX bf16 tiles" } },
    { "avx512_bf16",
      "AVX-512 with BF16",
      has_avx512_bf16,
      use_dots,
      SET(avx512),
      { AVX512_PATHS, "avx512 dot products of bf16 pairs, 12x32 micro-kernel" } },
    { "avx512",
      "AVX-512 (x86-64-v4)",
      has_avx512,
      NULL,
      SET(avx512),
      { AVX512_PATHS, "avx512 f32 from bf16, 14x32 micro-kernel" } },
#endif
#ifdef MT_HAVE_avx2
    { "avx2",
      "AVX2 and FMA (x86-64-v3)",
      has_avx2,
      NULL,
      SET(avx2),
      { "avx2 f64, 6x8 micro-kernel", "avx2 f32, 6x16 micro-kernel",
        "avx2 f32 from bf16, 6x16 micro-kernel" } },
#endif
    { "portable",
      "nothing",
      always,
      NULL,
      SET(portable),
      { "OpenBLAS f64", "OpenBLAS f32", "OpenBLAS f32 from bf16" } },
};
enum { SETS = sizeof sets / sizeof sets[0] };

static mt_status choose_set(const struct kernel_set **set, const char *name)
{
    if (!name) name = mt_kernel_set_asked("cpu");
    bool any = !name || !*name;
    for (int i = 0; i < SETS; i++) {
        if (any ? !sets[i].runs_here() : strcmp(sets[i].name, name) != 0) continue;
        MT_REQUIRE(any || sets[i].runs_here(), MT_EDEVICE,
                   "kernel set %s needs %s, which this machine does not offer", name,
                   sets[i].needs);
        *set = &sets[i];
        return MT_OK;
    }
    char known[64] = "";
    for (int i = 0; i < SETS; i++) strcat(strcat(known, " "), sets[i].name);
    return MT_FAIL(MT_ECONFIG, "kernel set '%s' is not one of%s", name, known);
}

/* ---- threads ----------------------------------------------------------------------------------
 */

static mt_status choose_threads(int *chosen, int threads)
{
    MT_REQUIRE(threads >= 0 && threads <= MAX_THREADS, MT_ECONFIG,
               "threads is %d, must be in 0..%d (0: OMP_NUM_THREADS, or every core)", threads,
               MAX_THREADS);
    const char *env = getenv("OMP_NUM_THREADS");
    if (threads == 0 && env) threads = (int)strtol(env, NULL, 10);
    if (threads <= 0 || threads > MAX_THREADS) threads = omp_get_num_procs();
    *chosen = threads;
    return MT_OK;
}

/* True when this thread computes with subnormals, after asking for it where the hardware has a
 * switch. */
static bool keep_subnormals(void)
{
#if defined(__x86_64__)
    const unsigned flush = 0x8040u; /* MXCSR: FTZ, DAZ */
    _mm_setcsr(_mm_getcsr() & ~flush);
#endif
    volatile float least = FLT_MIN, half = 0.5f;
    volatile float subnormal = least * half;
    volatile float restored = subnormal / half;
    return restored == least;
}

static mt_status set_up_threads(int threads)
{
    int flushing = !keep_subnormals(); /* runtimes may hand this thread's state on to the others */
    omp_set_num_threads(threads);
#pragma omp parallel num_threads(threads) reduction(+ : flushing)
    flushing += !keep_subnormals();
    MT_REQUIRE(flushing == 0, MT_EDEVICE,
               "device cpu: %d of %d threads flush subnormal numbers to zero", flushing, threads);
    return MT_OK;
}

/* ---- memory -----------------------------------------------------------------------------------
 */

static mt_status cpu_alloc(mt_device *device, void **p, size_t bytes, bool on_host)
{
    (void)device, (void)on_host;
    size_t align = bytes < LARGE ? ALIGN : HUGE_PAGE;
    if (bytes > SIZE_MAX - align) return MT_ENOMEM;
    size_t padded = (bytes + align - 1) / align * align;
    *p = aligned_alloc(align, padded);
    if (!*p) return MT_ENOMEM;
    if (align == HUGE_PAGE) madvise(*p, padded, MADV_HUGEPAGE); /* a wish: works without */
    return MT_OK;
}

static void cpu_release(mt_device *device, void *p, size_t bytes, bool on_host)
{
    (void)device, (void)bytes, (void)on_host;
    free(p);
}

static mt_status cpu_copy(mt_device *device, void *to, const void *from, size_t bytes)
{
    (void)device;
    memmove(to, from, bytes);
    return MT_OK;
}

static mt_status cpu_zero(mt_device *device, void *p, size_t bytes)
{
    (void)device;
    memset(p, 0, bytes);
    return MT_OK;
}

static mt_status cpu_synchronize(mt_device *device)
{
    (void)device;
    return MT_OK;
}

struct timer {
    struct timespec mark[2];
};

static mt_status cpu_timer_create(mt_device *device, void **timer)
{
    (void)device;
    *timer = calloc(1, sizeof(struct timer));
    MT_REQUIRE(*timer, MT_ENOMEM, "device cpu: no %zu bytes for a timer", sizeof(struct timer));
    return MT_OK;
}

static void cpu_timer_destroy(mt_device *device, void *timer)
{
    (void)device;
    free(timer);
}

static mt_status cpu_timer_mark(mt_stream *stream, void *timer, bool end)
{
    (void)stream;
    clock_gettime(CLOCK_MONOTONIC, &((struct timer *)timer)->mark[end]);
    return MT_OK;
}

static mt_status cpu_timer_read(mt_device *device, void *timer, double *seconds)
{
    (void)device;
    const struct timespec *mark = ((const struct timer *)timer)->mark;
    *seconds = (double)(mark[1].tv_sec - mark[0].tv_sec) +
               1e-9 * (double)(mark[1].tv_nsec - mark[0].tv_nsec);
    return MT_OK;
}

static void cpu_destroy(mt_device *device)
{
    struct cpu *cpu = device->impl;
    mt_device_free(device, &cpu->scratch.p, cpu->scratch.bytes, MT_MEMORY_WORKSPACE);
    mt_device_free(device, &cpu->operands.p, cpu->operands.bytes, MT_MEMORY_WORKSPACE);
    free(cpu);
}

static const struct mt_device_ops cpu_ops = {
    .alloc = cpu_alloc,
    .release = cpu_release,
    .copy = cpu_copy,
    .zero = cpu_zero,
    .synchronize = cpu_synchronize,
    .timer_create = cpu_timer_create,
    .timer_destroy = cpu_timer_destroy,
    .timer_mark = cpu_timer_mark,
    .timer_read = cpu_timer_read,
    .destroy = cpu_destroy,
};

static mt_status grow(mt_device *device, struct scratch *s, size_t bytes)
{
    if (bytes <= s->bytes) return MT_OK;
    mt_device_free(device, &s->p, s->bytes, MT_MEMORY_WORKSPACE);
    s->bytes = 0;
    MT_TRY(mt_device_alloc(device, &s->p, bytes, MT_MEMORY_WORKSPACE));
    s->bytes = bytes;
    return MT_OK;
}

mt_status mt_cpu_scratch(mt_stream *stream, void **p, size_t bytes)
{
    struct cpu *cpu = stream->device->impl;
    MT_TRY(grow(&cpu->device, &cpu->scratch, bytes));
    *p = cpu->scratch.p;
    return MT_OK;
}

mt_status mt_cpu_operands(mt_stream *stream, void **p, size_t bytes)
{
    struct cpu *cpu = stream->device->impl;
    MT_TRY(grow(&cpu->device, &cpu->operands, bytes));
    *p = cpu->operands.p;
    return MT_OK;
}

mt_status mt_cpu_open(mt_device **device, const char *kernel_set, int threads)
{
    const struct kernel_set *set = NULL;
    MT_TRY(choose_set(&set, kernel_set));
    MT_TRY(choose_threads(&threads, threads));
    MT_TRY(set_up_threads(threads));
    struct cpu *cpu = calloc(1, sizeof *cpu);
    MT_REQUIRE(cpu, MT_ENOMEM, "device cpu: no %zu bytes for itself", sizeof *cpu);
    cpu->device = (mt_device){
        .name = "cpu",
        .kernel_set = set->name,
        .computes = true,
        .threads = threads,
        .ops = &cpu_ops,
        .impl = cpu,
    };
    for (int i = 0; i < COMPUTE_DTYPES; i++) {
        cpu->kernels[i] = *set->kernels[i];
        if (set->replace && compute_dtypes[i] == MT_BF16) set->replace(&cpu->kernels[i]);
        cpu->kernels[i].gemm_path = set->gemm_path[i];
        cpu->device.kernels[compute_dtypes[i]] = &cpu->kernels[i];
    }
    *device = &cpu->device;
    return MT_OK;
}
