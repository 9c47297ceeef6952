/* Devices: opening, kernel sets, accounting, scratch, and subnormals on every thread. */
#include "tests/support/test.h"

#include <float.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "core/clock.h"
#include "kernels/cpu/backend.h"

/* A GPU opens, where the build has the backend and the machine has it; else what is missing is
 * said.
 */
static bool open_gpu(const char *name)
{
    mt_device *device;
    mt_status status = mt_device_open(&device, name, NULL, 0);
    if (status == MT_OK) {
        assert_string_equal(device->name, "cuda");
        mt_device_destroy(&device);
        return true;
    }
#ifdef MT_HAVE_cuda
    assert_fails(status, MT_EDEVICE, "cuda: ");
#else
    assert_fails(status, MT_EUNSUPPORTED, "no cuda backend");
#endif
    assert_null(device);
    return false;
}

static void test_names(void **state)
{
    (void)state;
    mt_device *device;
    assert_ok(mt_device_open(&device, "auto", NULL, 0));
    assert_string_equal(device->name, open_gpu("cuda") ? "cuda" : "cpu");
    mt_device_destroy(&device);
    assert_null(device);
    mt_device_destroy(&device);
    assert_ok(mt_device_open(&device, "cpu", NULL, 0));
    assert_true(device->threads >= 1);
    mt_device_destroy(&device);
    assert_fails(mt_device_open(&device, "tpu", NULL, 0), MT_ECONFIG, "auto cpu cuda plan");
    assert_fails(mt_device_open(&device, "tpu:1", NULL, 0), MT_ECONFIG, "cuda:N");
    assert_fails(mt_device_open(&device, "cpu:1", NULL, 0), MT_ECONFIG, "only cuda has a number");
    open_gpu("cuda:1");
    assert_fails(mt_device_open(&device, "cpu", "sse9", 0), MT_ECONFIG, "'sse9'");
    assert_fails(mt_device_open(&device, "plan", "sse9", 0), MT_ECONFIG, "'sse9'");
    assert_fails(mt_device_open(&device, "cpu", NULL, -1), MT_ECONFIG, "-1");
}

/* Each set either runs here, under its name, or is refused with what it needs. */
static void test_kernel_sets(void **state)
{
    (void)state;
    static const char *const sets[] = {
        "portable",
#ifdef MT_HAVE_avx2
        "avx2",
#endif
#ifdef MT_HAVE_avx512
        "avx512",   "avx512_bf16", "amx",
#endif
    };
    const char *best = NULL;
    mt_device *device;
    for (size_t i = 0; i < sizeof sets / sizeof sets[0]; i++) {
        mt_status status = mt_device_open(&device, "cpu", sets[i], 1);
        if (status != MT_OK) {
            assert_fails(status, MT_EDEVICE, "this machine does not offer");
            continue;
        }
        best = device->kernel_set;
        assert_string_equal(best, sets[i]);
        assert_int_equal(device->threads, 1);
        assert_true(device->computes);
        for (int d = 0; d < MT_DTYPE_COUNT; d++) {
            bool computes = d == MT_F64 || d == MT_F32 || d == MT_BF16;
            assert_int_equal(device->kernels[d] != NULL, computes);
            if (computes) assert_true(strlen(device->kernels[d]->gemm_path) > 0);
        }
        const struct mt_kernels *kernels;
        assert_fails(mt_device_kernels(device, MT_F16, &kernels), MT_EUNSUPPORTED, "f16");
        mt_device_destroy(&device);
    }
    char *forced = getenv("MIXTAPE_KERNELS"), *saved = forced ? strdup(forced) : NULL;
    unsetenv("MIXTAPE_KERNELS");
    assert_ok(mt_device_open(&device, "cpu", NULL, 0));
    assert_string_equal(device->kernel_set, best);
    mt_device_destroy(&device);
    setenv("MIXTAPE_KERNELS", "portable", 1);
    assert_ok(mt_device_open(&device, "cpu", NULL, 0));
    assert_string_equal(device->kernel_set, "portable");
    mt_device_destroy(&device);
    setenv("MIXTAPE_KERNELS", "bogus", 1);
    assert_fails(mt_device_open(&device, "cpu", NULL, 0), MT_ECONFIG, "bogus");
    if (saved)
        setenv("MIXTAPE_KERNELS", saved, 1);
    else
        unsetenv("MIXTAPE_KERNELS");
    free(saved);
}

static void check_accounting(const char *name)
{
    mt_device *device;
    void *p[4];
    static const size_t bytes[4] = { 1, 64, 1000, 4097 };
    assert_ok(mt_device_open(&device, name, NULL, 1));
    int64_t sum = 0;
    for (int i = 0; i < 4; i++) {
        assert_ok(mt_device_alloc(device, &p[i], bytes[i], MT_MEMORY_GRAD));
        assert_non_null(p[i]);
        assert_int_equal((uintptr_t)p[i] % 64, 0);
        sum += (int64_t)bytes[i];
        assert_int_equal(device->bytes[MT_MEMORY_GRAD], sum);
        for (int j = 0; j < i; j++) /* apart by at least the sizes */
            assert_true((char *)p[i] + bytes[i] <= (char *)p[j] ||
                        (char *)p[j] + bytes[j] <= (char *)p[i]);
    }
    void *none = &none;
    assert_ok(mt_device_alloc(device, &none, 0, MT_MEMORY_STATE));
    assert_null(none);
    for (int i = 0; i < 4; i++) mt_device_free(device, &p[i], bytes[i], MT_MEMORY_GRAD);
    assert_null(p[0]);
    mt_device_free(device, &p[0], bytes[0], MT_MEMORY_GRAD);
    assert_int_equal(device->bytes[MT_MEMORY_GRAD], 0);
    assert_int_equal(device->peak[MT_MEMORY_GRAD], sum);
    assert_int_equal(device->peak[MT_MEMORY_STATE], 0);
    assert_fails(mt_device_alloc(device, &none, SIZE_MAX - 8, MT_MEMORY_MOMENTS), MT_ENOMEM,
                 "optimizer moments");
    assert_int_equal(device->bytes[MT_MEMORY_MOMENTS], 0);
    assert_fails(mt_device_alloc(device, &none, 8, MT_MEMORY_COUNT), MT_EINVAL, "purpose");
    assert_ok(mt_device_synchronize(device));
    mt_device_destroy(&device);
}

static void test_accounting(void **state)
{
    (void)state;
    check_accounting("cpu");
    check_accounting("plan");
    for (int i = 0; i < MT_MEMORY_COUNT; i++) assert_true(strlen(mt_memory_name((mt_memory)i)) > 0);
}

static void test_copy_and_zero(void **state)
{
    (void)state;
    mt_device *device = test_device();
    void *p;
    char host[16] = "0123456789abcde", back[16];
    assert_ok(mt_device_alloc(device, &p, 16, MT_MEMORY_STATE));
    assert_ok(mt_device_copy(device, p, host, 16));
    assert_ok(mt_device_copy(device, back, p, 16));
    assert_memory_equal(back, host, 16);
    assert_ok(mt_device_zero(device, (char *)p + 4, 4));
    assert_ok(mt_device_copy(device, back, p, 16));
    assert_memory_equal(back,
                        "0123\0\0\0\0"
                        "89abcde",
                        16);
    assert_ok(mt_device_copy(device, NULL, NULL, 0));
    assert_fails(mt_device_copy(device, NULL, p, 4), MT_EINVAL, "to NULL");
    assert_fails(mt_device_copy(device, p, NULL, 4), MT_EINVAL, "from NULL");
    assert_fails(mt_device_zero(device, NULL, 4), MT_EINVAL, "NULL");
    mt_device_free(device, &p, 16, MT_MEMORY_STATE);
}

/* Every kernel of the plan device succeeds on addresses that are not memory. */
/* Work handed from stream to stream by events, in lines and whole. */
static void test_streams(void **state)
{
    (void)state;
    enum { LINES = 5, BYTES = 12, PITCH = 20, WIDE = 32 };
    mt_stream own = { .device = test_device() }, side;
    mt_event ready;
    bool done = false;
    unsigned char *from = test_alloc(LINES * PITCH, MT_U8), *to = test_alloc(LINES * WIDE, MT_U8);
    unsigned char *packed = test_alloc(LINES * BYTES, MT_U8);
    for (int i = 0; i < LINES * PITCH; i++) from[i] = (unsigned char)(i * 7);
    assert_ok(mt_stream_create(&side, own.device));
    assert_ok(mt_event_create(&ready, own.device));
    assert_ok(mt_event_done(&ready, &done));
    assert_true(done);
    assert_ok(mt_device_zero_async(&own, to, LINES * WIDE));
    assert_ok(mt_event_record(&ready, &own));
    assert_ok(mt_event_wait(&ready, &side));
    struct mt_copy_lines spread = { to, from, WIDE, PITCH, BYTES, LINES };
    struct mt_copy_lines gather = { packed, to, BYTES, WIDE, BYTES, LINES };
    assert_ok(mt_device_copy_lines(&side, &spread));
    assert_ok(mt_event_record(&ready, &side));
    assert_ok(mt_event_wait(&ready, &own));
    assert_ok(mt_device_copy_lines(&own, &gather));
    assert_ok(mt_stream_synchronize(&own));
    assert_ok(mt_event_done(&ready, &done));
    assert_true(done);
    for (int i = 0; i < LINES; i++)
        for (int j = 0; j < WIDE; j++) {
            int want = j < BYTES ? from[i * PITCH + j] : 0;
            assert_int_equal(to[i * WIDE + j], want);
            if (j < BYTES) assert_int_equal(packed[i * BYTES + j], want);
        }
    spread.to_pitch = BYTES - 1;
    assert_fails(mt_device_copy_lines(&own, &spread), MT_EINVAL, "lines of 12 bytes, 11 and 20");
    spread.lines = 0;
    assert_ok(mt_device_copy_lines(&own, &spread));
    mt_event_destroy(&ready);
    mt_stream_destroy(&side);
    mt_stream_destroy(&side);
    test_free(from);
    test_free(to);
    test_free(packed);
}

static void test_plan_computes_nothing(void **state)
{
    (void)state;
    mt_device *plan, *cpu;
    void *p;
    assert_ok(mt_device_open(&cpu, "cpu", NULL, 2));
    assert_ok(mt_device_open(&plan, "plan", NULL, 1));
    assert_int_equal(omp_get_max_threads(), 2); /* the cpu's */
    mt_device_destroy(&plan);
    assert_ok(mt_device_open(&plan, "plan", NULL, 2));
    assert_false(plan->computes);
    assert_string_equal(plan->kernel_set, cpu->kernel_set);
    assert_int_equal(plan->threads, 2);
    assert_ok(
        mt_device_alloc(plan, &p, (size_t)1 << 40, MT_MEMORY_MASTER)); /* more than there is */
    assert_int_equal(plan->peak[MT_MEMORY_MASTER], (int64_t)1 << 40);
    mt_stream stream = { plan, NULL };
    static const mt_dtype dtypes[] = { MT_F64, MT_F32, MT_BF16 };
    for (int i = 0; i < 3; i++) {
        mt_dtype d = dtypes[i];
#define CALL(op) assert_ok(plan->kernels[d]->op(&stream, &(struct mt_##op##_args){ .dtype = d }));
        MT_OPS(CALL)
#undef CALL
        assert_ok(mt_fill(&stream, &(struct mt_fill_args){ .dtype = d, .count = 1 << 20, .y = p }));
        assert_fails(mt_fill(&stream, &(struct mt_fill_args){ .dtype = d, .count = -1, .y = p }),
                     MT_EINVAL, "count is -1"); /* what a run would refuse */
        for (int dir = 0; dir < MT_DIR_COUNT; dir++)
            assert_int_equal(plan->kernels[d]->packed_bytes(d, (mt_dir)dir, 4, 96, 128),
                             cpu->kernels[d]->packed_bytes(d, (mt_dir)dir, 4, 96, 128));
    }
    assert_ok(mt_device_zero(plan, p, 4096));
    assert_ok(mt_device_copy(plan, p, (char *)p + 4096, 4096));
    mt_device_free(plan, &p, (size_t)1 << 40, MT_MEMORY_MASTER);
    mt_device_destroy(&plan);
    mt_device_destroy(&cpu);
}

static void test_scratch(void **state)
{
    (void)state;
    mt_device *device;
    assert_ok(mt_device_open(&device, "cpu", NULL, 1));
    mt_stream stream = { device, NULL };
    void *a, *b;
    assert_ok(mt_cpu_scratch(&stream, &a, 1000));
    assert_int_equal((uintptr_t)a % 64, 0);
    memset(a, 1, 1000);
    assert_ok(mt_cpu_scratch(&stream, &b, 10));
    assert_ptr_equal(a, b);
    assert_int_equal(device->bytes[MT_MEMORY_WORKSPACE], 1000);
    assert_ok(mt_cpu_scratch(&stream, &b, 100000));
    memset(b, 1, 100000);
    assert_int_equal(device->bytes[MT_MEMORY_WORKSPACE], 100000);
    assert_fails(mt_cpu_scratch(&stream, &b, SIZE_MAX), MT_ENOMEM, "workspace");
    assert_ok(mt_cpu_scratch(&stream, &b, 50));
    mt_device_destroy(&device);
}

static int keeps_subnormals(void)
{
    volatile float least = FLT_MIN, half = 0.5f, small = least * half, back = small / half;
    return small != 0 && back == least;
}

/* A caller that flushes subnormals to zero does not after a device is open, and no worker does. */
static void test_subnormals(void **state)
{
    (void)state;
    mt_device *device;
#if defined(__x86_64__)
    _mm_setcsr(_mm_getcsr() | 0x8040u);
    if (keeps_subnormals()) skip(); /* an emulator without the switch */
#endif
    assert_ok(mt_device_open(&device, "cpu", NULL, 3));
    int keeping = 0, threads = 0;
#pragma omp parallel num_threads(3) reduction(+ : keeping, threads)
    keeping += keeps_subnormals(), threads++;
    assert_int_equal(keeping, threads);
    assert_true(keeps_subnormals());
    mt_device_destroy(&device);
}

/* A timer covers what lies between its marks, and can be used again. */
static void test_timer(void **state)
{
    (void)state;
    static const char *const names[] = { "cpu", "plan" };
    for (int i = 0; i < 2; i++) {
        mt_device *device;
        mt_timer timer;
        double first = -1, second = -1;
        const struct timespec pause = { 0, 20000000 };
        assert_ok(mt_device_open(&device, names[i], NULL, 1));
        mt_stream stream = { device, NULL };
        assert_ok(mt_timer_create(&timer, device));
        assert_ok(mt_timer_start(&timer, &stream));
        nanosleep(&pause, NULL);
        assert_ok(mt_timer_stop(&timer, &stream));
        assert_ok(mt_timer_read(&timer, &first));
        double began = mt_now();
        assert_ok(mt_timer_start(&timer, &stream));
        assert_ok(mt_timer_stop(&timer, &stream));
        double passed = mt_now() - began;
        assert_ok(mt_timer_read(&timer, &second));
        mt_timer_destroy(&timer);
        assert_null(timer.impl);
        mt_timer_destroy(&timer);
        assert_true(device->computes ? first >= 0.02 : first == 0);
        assert_true(second >= 0 && second <= passed);
        mt_device_destroy(&device);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names),         cmocka_unit_test(test_timer),
        cmocka_unit_test(test_kernel_sets),   cmocka_unit_test(test_accounting),
        cmocka_unit_test(test_copy_and_zero), cmocka_unit_test(test_plan_computes_nothing),
        cmocka_unit_test(test_streams),       cmocka_unit_test(test_scratch),
        cmocka_unit_test(test_subnormals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
