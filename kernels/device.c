/* The list of backends. */
#include <stdio.h>
#include <stdlib.h>

#include "kernels/backends.h"

/* In the order "auto" tries them; a backend that this build leaves out has no open function. */
static const struct backend {
    const char *name;
    mt_backend_open open;
    bool automatic; /* "auto" may choose it */
    /* Where there can be several ("cuda:1"): makes one the thread's, and counts them. */
    mt_status (*select)(int index);
    mt_status (*count)(int *count);
    const char *sets; /* its kernel sets, each with a space before and behind */
} backends[] = {
#define SET(name) " " #name " "
    { "cuda", mt_cuda_open, true, mt_cuda_select, mt_cuda_count, MT_CUDA_SETS(SET) },
    { "cpu", mt_cpu_open, true, NULL, NULL, MT_CPU_SETS(SET) },
    { "plan", mt_plan_open, false, NULL, NULL, MT_CPU_SETS(SET) },
#undef SET
};
enum { BACKENDS = sizeof backends / sizeof backends[0] };

static bool has_set(const struct backend *b, const char *name)
{
    char word[32];
    return name && snprintf(word, sizeof word, " %s ", name) < (int)sizeof word &&
           strstr(b->sets, word);
}

const char *mt_kernel_set_asked(const char *backend)
{
    const char *name = getenv("MIXTAPE_KERNELS");
    bool others = false;
    if (!name || !*name) return NULL;
    for (int i = 0; i < BACKENDS; i++) {
        bool has = has_set(&backends[i], name);
        if (has && !strcmp(backends[i].name, backend)) return name;
        others |= has;
    }
    return others ? NULL : name; /* what nobody has is the backend's to refuse */
}

/* "cuda:1": the second GPU that this process sees. */
static mt_status open_numbered(mt_device **device, const char *name, const char *kernel_set,
                               int threads)
{
    const char *colon = strchr(name, ':');
    char *end;
    long index = strtol(colon + 1, &end, 10);
    for (int i = 0; i < BACKENDS; i++) {
        const struct backend *b = &backends[i];
        if (strlen(b->name) != (size_t)(colon - name) || strncmp(b->name, name, strlen(b->name)))
            continue;
        MT_REQUIRE(b->open, MT_EUNSUPPORTED, "device %s: this build has no %s backend", name,
                   b->name);
        MT_REQUIRE(b->select && end != colon + 1 && !*end && index >= 0 && index < 1 << 16,
                   MT_ECONFIG, "device '%s': only cuda has a number behind it, from 0", name);
        MT_TRY(b->select((int)index));
        return b->open(device, kernel_set, threads);
    }
    return MT_FAIL(MT_ECONFIG, "device '%s' is not one of auto cpu cuda cuda:N plan", name);
}

mt_status mt_device_count(int *count, const char *name)
{
    *count = 1;
    for (int i = 0; i < BACKENDS; i++) {
        if (strcmp(backends[i].name, name) != 0) continue;
        MT_REQUIRE(backends[i].open, MT_EUNSUPPORTED, "device %s: this build has no %s backend",
                   name, name);
        if (backends[i].count) return backends[i].count(count);
    }
    return MT_OK;
}

mt_status mt_device_open(mt_device **device, const char *name, const char *kernel_set, int threads)
{
    *device = NULL;
    MT_REQUIRE(name, MT_EINVAL, "device: no name");
    if (strchr(name, ':')) return open_numbered(device, name, kernel_set, threads);
    bool automatic = !strcmp(name, "auto");
    for (int i = 0; i < BACKENDS; i++) {
        const struct backend *b = &backends[i];
        if (automatic ? !(b->automatic && b->open) : strcmp(b->name, name) != 0) continue;
        MT_REQUIRE(b->open, MT_EUNSUPPORTED, "device %s: this build has no %s backend", name, name);
        mt_status status = b->open(device, kernel_set, threads);
        bool asked = has_set(b, kernel_set ? kernel_set : mt_kernel_set_asked(b->name));
        if (!automatic || status == MT_OK || asked || i + 1 == BACKENDS ||
            !backends[i + 1].automatic)
            return status;
        mt_error_clear(); /* no such device here: the next */
    }
    return MT_FAIL(MT_ECONFIG, "device '%s' is not one of auto cpu cuda plan", name);
}
