/* The plan device: memory is counted, never touched, and every kernel succeeds without computing;
 * arguments that a run would refuse are refused (ops.c).
 * Packed weights have the size that the cpu device of this machine would give them, or, with a
 * kernel set of cuda or "cuda", the sizes of that backend, scratch included. */
#include <omp.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/backends.h"

enum { ALIGN = 256, FIRST_ADDRESS = 1 << 16 }; /* the first page is never mapped: a touch faults */

struct plan {
    mt_device device; /* first; impl is the GPU that is planned for, or NULL */
    uintptr_t next;   /* the next address to hand out */
    struct mt_kernels kernels[MT_DTYPE_COUNT];
};

static mt_status plan_alloc(mt_device *device, void **p, size_t bytes, bool on_host)
{
    (void)on_host;
    struct plan *plan = (struct plan *)device;
    size_t padded = (bytes + ALIGN - 1) / ALIGN * ALIGN;
    if (padded > PTRDIFF_MAX - plan->next) return MT_ENOMEM; /* sums of bytes are int64_t */
    *p = (void *)plan->next;
    plan->next += padded;
    return MT_OK;
}

static void plan_release(mt_device *device, void *p, size_t bytes, bool on_host)
{
    (void)device, (void)p, (void)bytes, (void)on_host;
}

static mt_status plan_copy(mt_device *device, void *to, const void *from, size_t bytes)
{
    (void)device, (void)to, (void)from, (void)bytes;
    return MT_OK;
}

static mt_status plan_zero(mt_device *device, void *p, size_t bytes)
{
    (void)device, (void)p, (void)bytes;
    return MT_OK;
}

static mt_status plan_synchronize(mt_device *device)
{
    (void)device;
    return MT_OK;
}

static mt_status plan_timer_create(mt_device *device, void **timer)
{
    *timer = device; /* nothing to keep, but not NULL */
    return MT_OK;
}

static void plan_timer_destroy(mt_device *device, void *timer)
{
    (void)device, (void)timer;
}

static mt_status plan_timer_mark(mt_stream *stream, void *timer, bool end)
{
    (void)stream, (void)timer, (void)end;
    return MT_OK;
}

static mt_status plan_timer_read(mt_device *device, void *timer, double *seconds)
{
    (void)device, (void)timer;
    *seconds = 0;
    return MT_OK;
}

/* Streams have scratch of their own where a GPU is planned for: they must differ. */
static mt_status plan_stream_create(mt_device *device, void **stream)
{
    (void)device;
    *stream = malloc(1);
    MT_REQUIRE(*stream, MT_ENOMEM, "device plan: no memory for a stream");
    return MT_OK;
}

static void plan_stream_destroy(mt_device *device, void *stream)
{
    (void)device;
    free(stream);
}

static void plan_destroy(mt_device *device)
{
    free(device->impl);
    free(device);
}

static const struct mt_device_ops plan_ops = {
    .alloc = plan_alloc,
    .release = plan_release,
    .copy = plan_copy,
    .zero = plan_zero,
    .synchronize = plan_synchronize,
    .stream_create = plan_stream_create,
    .stream_destroy = plan_stream_destroy,
    .timer_create = plan_timer_create,
    .timer_destroy = plan_timer_destroy,
    .timer_mark = plan_timer_mark,
    .timer_read = plan_timer_read,
    .destroy = plan_destroy,
};

#define PLAN_KERNEL(op)                                                                            \
    static mt_status plan_##op(mt_stream *stream, const struct mt_##op##_args *args)               \
    {                                                                                              \
        (void)stream, (void)args;                                                                  \
        return MT_OK;                                                                              \
    }
MT_OPS(PLAN_KERNEL)

static const struct mt_kernels plan_kernels = {
#define PLAN_ENTRY(op) .op = plan_##op,
    MT_OPS(PLAN_ENTRY)
};

/* As the cpu device of this machine. */
static mt_status plan_cpu(struct plan *plan, const char *kernel_set, int threads)
{
    mt_device *cpu;
    int before = omp_get_max_threads(); /* which is the real devices' affair */
    MT_TRY(mt_cpu_open(&cpu, kernel_set, threads));
    omp_set_num_threads(before);
    plan->device.kernel_set = cpu->kernel_set, plan->device.threads = cpu->threads;
    for (int i = 0; i < MT_DTYPE_COUNT; i++) {
        if (!cpu->kernels[i]) continue;
        plan->kernels[i].packed_bytes = cpu->kernels[i]->packed_bytes;
        plan->kernels[i].packed_shared = cpu->kernels[i]->packed_shared;
        plan->kernels[i].moe_gemm_fuses = cpu->kernels[i]->moe_gemm_fuses;
        plan->kernels[i].gemm_path = cpu->kernels[i]->gemm_path;
        plan->kernels[i].gemm_operand = cpu->kernels[i]->gemm_operand;
        plan->device.kernels[i] = &plan->kernels[i];
    }
    mt_device_destroy(&cpu);
    return MT_OK;
}

static bool is_gpu(const char *name)
{
#define SET(x) #x,
    static const char *const sets[] = { "cuda", MT_CUDA_SETS(SET) };
#undef SET
    for (size_t i = 0; name && i < sizeof sets / sizeof *sets; i++)
        if (!strcmp(sets[i], name)) return true;
    return false;
}

static size_t gpu_packed_bytes(mt_dtype dtype, mt_dir dir, int64_t members, int64_t m, int64_t k)
{
    (void)dir;
    return (size_t)(members * m * k) * mt_dtype_size(dtype);
}

/* As on a GPU, by a build that knows no more of it. */
static mt_status plan_any_gpu(struct plan *plan)
{
    MT_TRY(plan_cpu(plan, NULL, 1));
    plan->device.kernel_set = "cuda";
    for (int i = 0; i < MT_DTYPE_COUNT; i++) {
        plan->kernels[i].packed_bytes = gpu_packed_bytes;
        plan->kernels[i].packed_shared = true;
        plan->kernels[i].gemm_path = "of the GPU, which says it (mixtape doctor)";
    }
    return MT_OK;
}

/* "cuda" stands for the set that the GPU here would get, an H200's where there is none. */
static mt_status plan_gpu(struct plan *plan, const char *kernel_set)
{
    bool any = !strcmp(kernel_set, "cuda");
    const char *asked = any ? mt_kernel_set_asked("cuda") : kernel_set;
    MT_REQUIRE(any || MT_CUDA_BUILT, MT_EUNSUPPORTED,
               "device plan: kernel set %s, but this build has no cuda backend", kernel_set);
    if (!MT_CUDA_BUILT) return plan_any_gpu(plan);
    return mt_cuda_plan(&plan->device, asked ? asked : mt_cuda_usual_set(), plan->kernels);
}

mt_status mt_plan_open(mt_device **device, const char *kernel_set, int threads)
{
    struct plan *plan = calloc(1, sizeof *plan);
    MT_REQUIRE(plan, MT_ENOMEM, "device plan: no %zu bytes for itself", sizeof *plan);
    plan->next = FIRST_ADDRESS;
    plan->device = (mt_device){ .name = "plan", .ops = &plan_ops };
    for (int i = 0; i < MT_DTYPE_COUNT; i++) plan->kernels[i] = plan_kernels;
    mt_status status =
        is_gpu(kernel_set) ? plan_gpu(plan, kernel_set) : plan_cpu(plan, kernel_set, threads);
    if (status == MT_OK)
        *device = &plan->device;
    else
        free(plan);
    return status;
}
