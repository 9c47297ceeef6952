/* The list of backends. */
#include "kernels/backends.h"

/* In the order "auto" tries them; a backend that this build leaves out has no open function. */
static const struct backend {
    const char *name;
    mt_backend_open open;
    bool automatic; /* "auto" may choose it */
} backends[] = {
    { "cuda", mt_cuda_open, true },
    { "cpu", mt_cpu_open, true },
    { "plan", mt_plan_open, false },
};
enum { BACKENDS = sizeof backends / sizeof backends[0] };

mt_status mt_device_open(mt_device **device, const char *name, const char *kernel_set, int threads)
{
    *device = NULL;
    MT_REQUIRE(name, MT_EINVAL, "device: no name");
    bool automatic = !strcmp(name, "auto");
    for (int i = 0; i < BACKENDS; i++) {
        const struct backend *b = &backends[i];
        if (automatic ? !(b->automatic && b->open) : strcmp(b->name, name) != 0) continue;
        MT_REQUIRE(b->open, MT_EUNSUPPORTED, "device %s: this build has no %s backend", name, name);
        mt_status status = b->open(device, kernel_set, threads);
        if (!automatic || status == MT_OK || i + 1 == BACKENDS || !backends[i + 1].automatic)
            return status;
        mt_error_clear(); /* no such device here: the next */
    }
    return MT_FAIL(MT_ECONFIG, "device '%s' is not one of auto cpu cuda plan", name);
}
