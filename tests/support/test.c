/* The numeric layer of the tests. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/test.h"

#include "core/rng.h"

enum { CANARY = 64, POISON = 0xff };

void test_assert_fails(mt_status got, mt_status want, const char *words, const char *file, int line)
{
    if (got == want && strstr(mt_error_message(), words)) return;
    print_error("got '%s': %s\nwant '%s' with '%s'\n", mt_status_name(got), mt_error_message(),
                mt_status_name(want), words);
    _fail(file, line);
}

const char *test_device_name(void)
{
    const char *name = getenv("MIXTAPE_TEST_DEVICE");
    return name && *name ? name : "cpu";
}

bool test_small(void)
{
#if defined(__SANITIZE_ADDRESS__)
    return strcmp(test_device_name(), "cpu") == 0;
#else
    return false;
#endif
}

/* Device memory that the host sees too, whatever the device. Copies: a device's table ends with it.
 */
static struct mt_device_ops visible, own;

static mt_status visible_alloc(mt_device *device, void **p, size_t bytes, bool on_host)
{
    (void)on_host;
    return own.alloc(device, p, bytes, true);
}

static void visible_release(mt_device *device, void *p, size_t bytes, bool on_host)
{
    (void)on_host;
    own.release(device, p, bytes, true);
}

mt_status test_open(mt_device **device, const char *name, const char *kernel_set, int threads)
{
    MT_TRY(mt_device_open(device, name, kernel_set, threads));
    if (strcmp(name, "cuda") != 0) return MT_OK;
    own = *(*device)->ops;
    visible = own;
    visible.alloc = visible_alloc, visible.release = visible_release;
    (*device)->ops = &visible;
    return MT_OK;
}

bool test_open_set(mt_device **device, const char **name, int i, int threads)
{
    static const struct {
        const char *device, *name;
    } sets[TEST_GEMM_SETS] = { { "cpu", "avx512" },    { "cpu", "avx2" },
                               { "cpu", "portable" },  { "cpu", "avx512_bf16" },
                               { "cpu", "amx" },       { "cuda", "sm_90a" },
                               { "cuda", "generic" },  { "cuda", "cublaslt_grouped" },
                               { "cuda", "cublaslt" }, { "cuda", "cublaslt_loop" } };
    *name = sets[i].name;
    bool tested = !strcmp(sets[i].device, "cpu") || !strcmp(sets[i].device, test_device_name());
    mt_status status =
        tested ? test_open(device, sets[i].device, sets[i].name, threads) : MT_EDEVICE;
    if (status != MT_EDEVICE && status != MT_ECONFIG) assert_ok(status);
    return status == MT_OK;
}

bool test_multiplies_pairs(const mt_device *device, mt_dtype dtype)
{
    return dtype == MT_BF16 &&
           (!strcmp(device->kernel_set, "amx") || !strcmp(device->kernel_set, "avx512_bf16"));
}

mt_device *test_device(void)
{
    static mt_device *device;
    if (!device) {
        const char *threads = getenv("MIXTAPE_THREADS");
        assert_ok(test_open(&device, test_device_name(), getenv("MIXTAPE_KERNELS"),
                            threads ? atoi(threads) : 0));
    }
    return device;
}

void *test_alloc(int64_t count, mt_dtype dtype)
{
    size_t bytes = (size_t)count * mt_dtype_size(dtype),
           total = (bytes + 3 * CANARY + 63) / 64 * 64;
    unsigned char *p = aligned_alloc(64, total);
    if (!p) fail_msg("out of memory: %zu bytes", total);
    if (!test_is_seen(p, total)) fail_msg("%zu bytes past what the GPU sees of the heap", total);
    memset(p, POISON, total);
    memcpy(p, &bytes, sizeof bytes);
    return p + CANARY;
}

void test_free(void *q)
{
    if (!q) return;
    unsigned char *p = (unsigned char *)q - CANARY;
    size_t bytes;
    memcpy(&bytes, p, sizeof bytes);
    for (size_t i = sizeof bytes; i < CANARY; i++)
        if (p[i] != POISON) fail_msg("canary before a buffer overwritten at -%zu", CANARY - i);
    for (size_t i = 0; i < CANARY; i++)
        if (p[CANARY + bytes + i] != POISON)
            fail_msg("canary after a buffer overwritten at +%zu", i);
    free(p);
}

void test_random(void *p, int64_t count, mt_dtype dtype, double scale, uint64_t seed)
{
    for (int64_t i = 0; i < count; i++)
        mt_store_f64(p, dtype, i, scale * (2 * mt_rng_uniform(seed, 7, (uint64_t)i) - 1));
}

void test_assert_near(const char *what, const void *got, mt_dtype dtype, const double *want,
                      int64_t count, double absolute, double relative)
{
    int64_t worst = -1;
    double most = 1;
    for (int64_t i = 0; i < count; i++) {
        double g = mt_load_f64(got, dtype, i), limit = absolute + relative * fabs(want[i]);
        if (g == want[i] || (isnan(g) && isnan(want[i]))) continue;
        double share = fabs(g - want[i]) / limit;
        if (!(share <= most)) worst = i, most = isnan(share) ? (double)INFINITY : share;
    }
    if (worst >= 0)
        fail_msg("%s[%lld] is %.17g, must be %.17g within %.3g", what, (long long)worst,
                 mt_load_f64(got, dtype, worst), want[worst],
                 absolute + relative * fabs(want[worst]));
}

double test_epsilon(mt_dtype dtype)
{
    return dtype == MT_F64   ? 0x1p-53
           : dtype == MT_F32 ? 0x1p-24
           : dtype == MT_F16 ? 0x1p-11
                             : 0x1p-8;
}
