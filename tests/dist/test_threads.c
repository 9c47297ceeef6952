/* A process that can have no more threads: what needs one says so, and leaves nothing behind. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "tests/support/test.h"

#include "dist/comm.h"
#include "dist/host.h"
#include "dist/watch.h"
#include "tests/support/fault.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define NO_LIMIT 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define NO_LIMIT 1
#endif

static int mutexes; /* made and not destroyed */

typedef int init_function(pthread_mutex_t *mutex, const pthread_mutexattr_t *attributes);
typedef int destroy_function(pthread_mutex_t *mutex);

/* In place of libc's, to count. */
int pthread_mutex_init(pthread_mutex_t *mutex, const pthread_mutexattr_t *attributes)
{
    init_function *next;
    *(void **)&next = dlsym(RTLD_NEXT, "pthread_mutex_init");
    mutexes++;
    return next(mutex, attributes);
}

int pthread_mutex_destroy(pthread_mutex_t *mutex)
{
    destroy_function *next;
    *(void **)&next = dlsym(RTLD_NEXT, "pthread_mutex_destroy");
    mutexes--;
    return next(mutex);
}

static void never(void *context, int by, const char *sentence)
{
    (void)context;
    print_error("rank %d is blamed: %s\n", by, sentence);
    abort();
}

/* From now on there is no room for the stack of a thread: another library's may have had more
 * mapped for the moment when it was counted, so that is tried. */
static struct rlimit forbid_threads(void)
{
    enum { STACK = 4 << 20, ROOM = 1 << 20 };
    struct rlimit was;
    void *stack;
    assert_int_equal(getrlimit(RLIMIT_AS, &was), 0);
    do {
        struct rlimit none = was;
        long pages = 0;
        FILE *file = fopen("/proc/self/statm", "r");
        assert_non_null(file);
        assert_int_equal(fscanf(file, "%ld", &pages), 1);
        fclose(file);
        none.rlim_cur = (rlim_t)(pages * sysconf(_SC_PAGESIZE)) + ROOM;
        assert_int_equal(setrlimit(RLIMIT_AS, &none), 0);
        stack = mmap(NULL, STACK, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (stack != MAP_FAILED) assert_int_equal(munmap(stack, STACK), 0);
    } while (stack != MAP_FAILED);
    return was;
}

static mt_status start_watch(void)
{
    int listener;
    char address[MT_HOST_ADDRESS];
    mt_watch *watch;
    const mt_watch_options options = { .world = 2, .timeout_s = 5, .on_fault = never };
    MT_TRY(mt_watch_listen(&listener, address));
    return mt_watch_start(&watch, &options, listener, "");
}

static mt_status look_up(void)
{
    int connection;
    return mt_host_connect(&connection, "nobody.invalid:80", 5);
}

#ifdef MT_HAVE_mpi
static mt_status open_comm(void)
{
    mt_comm *comm;
    const mt_launch launch = { .rank = 1, .world = 2, .launcher = "Open MPI" };
    const mt_comm_options options = { .timeout_s = 5, .on_fault = never };
    return mt_comm_open(&comm, &launch, &options);
}
#endif

static void test_no_thread(void **state)
{
    (void)state;
#ifdef NO_LIMIT
    skip(); /* the sanitizer needs room for itself */
#endif
    static const struct {
        mt_status (*start)(void);
        const char *words;
    } rows[] = {
        { start_watch, "watchdog: cannot start a thread: Resource temporarily unavailable" },
        { look_up, "cannot start a thread to look up 'nobody.invalid': Resource" },
#ifdef MT_HAVE_mpi
        { open_comm, "rank 1: comm: cannot start a thread: Resource temporarily unavailable" },
#endif
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        int before = mutexes;
        int64_t live = fault_live();
        struct rlimit was = forbid_threads();
        mt_status status = rows[i].start();
        assert_int_equal(setrlimit(RLIMIT_AS, &was), 0);
        assert_fails(status, MT_EDEVICE, rows[i].words);
        assert_int_equal(mutexes, before);
        assert_int_equal(fault_live(), live);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_no_thread) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
