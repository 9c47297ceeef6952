/* The guarded device. Its memory is one reserved range; freed blocks are not used again. */
#include "tests/support/guard.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "kernels/backends.h"

static const size_t RANGE = (size_t)1 << 36, PAGE = 4096;

struct guard {
    mt_device device;
    mt_device *cpu;
    struct mt_kernels kernels[MT_DTYPE_COUNT];
    char *range;
    size_t used;
};

static void protect(const struct guard *g, int rights)
{
    if (g->used) MT_ASSERT(mprotect(g->range, g->used, rights) == 0);
}

static void unlock(const struct guard *g)
{
    protect(g, PROT_READ | PROT_WRITE);
}

static void lock(const struct guard *g)
{
    protect(g, PROT_NONE);
}

/* ---- faults on demand ---------------------------------------------------------------------------
 * GUARD_FAULT=WHAT:N in the environment: the N-th of WHAT (alloc, copy, or an op) fails. An
 * allocation for want of memory; the others as a card does whose kernel has faulted: nothing works
 * on it any more. */

static bool broken;

static bool fault_due(const char *what)
{
    static long seen;
    const char *fault = getenv("GUARD_FAULT"), *colon = fault ? strchr(fault, ':') : NULL;
    if (!colon || strlen(what) != (size_t)(colon - fault) || strncmp(fault, what, strlen(what)))
        return false;
    return ++seen == atol(colon + 1);
}

static mt_status fault(const char *what)
{
    broken = broken || fault_due(what);
    return broken ? MT_FAIL(MT_EDEVICE, "guarded: %s: an illegal address (on demand)", what)
                  : MT_OK;
}

#define GUARDED(op)                                                                                \
    static mt_status guarded_##op(mt_stream *stream, const struct mt_##op##_args *args)            \
    {                                                                                              \
        const struct guard *g = stream->device->impl;                                              \
        mt_stream inner = { g->cpu, NULL };                                                        \
        MT_TRY(fault(#op));                                                                        \
        unlock(g);                                                                                 \
        mt_status status = g->cpu->kernels[args->dtype]->op(&inner, args);                         \
        lock(g);                                                                                   \
        return status;                                                                             \
    }
MT_OPS(GUARDED)

static mt_status guard_alloc(mt_device *device, void **p, size_t bytes, bool on_host)
{
    struct guard *g = device->impl;
    if (on_host) return g->cpu->ops->alloc(g->cpu, p, bytes, true);
    size_t padded = (bytes + PAGE - 1) / PAGE * PAGE;
    if (fault_due("alloc") || padded > RANGE - g->used) return MT_ENOMEM;
    *p = g->range + g->used;
    g->used += padded;
    lock(g);
    return MT_OK;
}

static void guard_release(mt_device *device, void *p, size_t bytes, bool on_host)
{
    struct guard *g = device->impl;
    if (on_host)
        g->cpu->ops->release(g->cpu, p, bytes, true);
    else
        (void)madvise(p, (bytes + PAGE - 1) / PAGE * PAGE, MADV_DONTNEED);
}

static mt_status guard_copy(mt_device *device, void *to, const void *from, size_t bytes)
{
    const struct guard *g = device->impl;
    MT_TRY(fault("copy"));
    unlock(g);
    mt_status status = g->cpu->ops->copy(g->cpu, to, from, bytes);
    lock(g);
    return status;
}

static mt_status guard_zero(mt_device *device, void *p, size_t bytes)
{
    const struct guard *g = device->impl;
    unlock(g);
    mt_status status = g->cpu->ops->zero(g->cpu, p, bytes);
    lock(g);
    return status;
}

static mt_status guard_synchronize(mt_device *device)
{
    (void)device;
    return MT_OK;
}

static mt_status guard_timer_create(mt_device *device, void **timer)
{
    const struct guard *g = device->impl;
    return g->cpu->ops->timer_create(g->cpu, timer);
}

static void guard_timer_destroy(mt_device *device, void *timer)
{
    const struct guard *g = device->impl;
    g->cpu->ops->timer_destroy(g->cpu, timer);
}

static mt_status guard_timer_mark(mt_stream *stream, void *timer, bool end)
{
    const struct guard *g = stream->device->impl;
    mt_stream inner = { g->cpu, NULL };
    return g->cpu->ops->timer_mark(&inner, timer, end);
}

static mt_status guard_timer_read(mt_device *device, void *timer, double *seconds)
{
    const struct guard *g = device->impl;
    return g->cpu->ops->timer_read(g->cpu, timer, seconds);
}

static void guard_destroy(mt_device *device)
{
    struct guard *g = device->impl;
    munmap(g->range, RANGE);
    mt_device_destroy(&g->cpu);
    free(g);
}

static const struct mt_device_ops guard_ops = {
    .alloc = guard_alloc,
    .release = guard_release,
    .copy = guard_copy,
    .zero = guard_zero,
    .synchronize = guard_synchronize,
    .timer_create = guard_timer_create,
    .timer_destroy = guard_timer_destroy,
    .timer_mark = guard_timer_mark,
    .timer_read = guard_timer_read,
    .destroy = guard_destroy,
};

mt_status guard_open(mt_device **device, const char *kernel_set, int threads)
{
    mt_device *cpu;
    MT_TRY(mt_cpu_open(&cpu, kernel_set, threads));
    struct guard *g = calloc(1, sizeof *g);
    void *range =
        g ? mmap(NULL, RANGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
          : MAP_FAILED;
    if (range == MAP_FAILED) {
        free(g);
        mt_device_destroy(&cpu);
        return MT_FAIL(MT_ENOMEM, "guard: no range of %zu bytes", RANGE);
    }
    g->cpu = cpu, g->range = range, g->device = *cpu;
    g->device.name = "guarded", g->device.ops = &guard_ops, g->device.impl = g;
    for (int i = 0; i < MT_DTYPE_COUNT; i++) {
        if (!cpu->kernels[i]) continue;
        g->kernels[i] = *cpu->kernels[i];
#define ENTRY(op) g->kernels[i].op = guarded_##op;
        MT_OPS(ENTRY)
#undef ENTRY
        g->device.kernels[i] = &g->kernels[i];
    }
    *device = &g->device;
    return MT_OK;
}
