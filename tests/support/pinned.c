/* With MIXTAPE_TEST_DEVICE=cuda, makes the whole memory of a test program (heap, stack, data)
 * readable and writable by the GPU at its own addresses, before main runs. So the tests of kernels
 * are the same on both devices: they hand plain pointers to an op and look at them afterwards. */
#include "tests/support/test.h"

#ifdef MT_HAVE_cuda

#include <alloca.h>
#include <cuda_runtime_api.h>
#include <limits.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

/* Defined by programs that copy between host and device themselves (tests/dist). */
extern const bool test_own_memory __attribute__((weak));

/* The runtime's own memory comes out of it, too: that of the kernels that it loads. */
enum { HEAP = 1800 << 20, STACK = 6 << 20 };

static const char *heap_end; /* of what was pinned; NULL: nothing was */

bool test_is_seen(const void *p, size_t bytes)
{
    return !heap_end || (const char *)p + bytes <= heap_end;
}

/* One heap that is never given back to the system, and never a mapping of its own. */
static void grow_heap(void)
{
    mallopt(M_ARENA_MAX, 1);
    mallopt(M_MMAP_MAX, 0);
    mallopt(M_TRIM_THRESHOLD, INT_MAX);
    mallopt(M_TOP_PAD, HEAP);
    void *volatile p = malloc(64 << 20); /* more than what the heap has left */
    free(p);
}

__attribute__((noinline)) static void grow_stack(void)
{
    volatile char *p = alloca(STACK);
    for (size_t i = 0; i < STACK; i += 4096) p[i] = 0;
}

/* Private mappings of the program's file, its heap and its stack. */
static void pin(const char *line)
{
    unsigned long from, to;
    char rights[8] = "", path[4096] = "", self[4096] = "";
    if (sscanf(line, "%lx-%lx %7s %*s %*s %*s %4095s", &from, &to, rights, path) < 3) return;
    if (!realpath("/proc/self/exe", self)) return;
    static unsigned long end; /* of the program's last mapping: its zeroed data follow, nameless */
    bool program = (!strcmp(path, self) || (!*path && from == end)) && rights[2] != 'x';
    if (program) end = to;
    if (!program && strcmp(path, "[heap]") != 0 && strcmp(path, "[stack]") != 0) return;
    if (!strcmp(path, "[heap]")) heap_end = (const char *)to;
    void *p = (void *)from; /* constants too: a private copy that may be written can be pinned */
    size_t bytes = to - from;
    if (rights[1] != 'w' && mprotect(p, bytes, PROT_READ | PROT_WRITE)) perror("mprotect");
    cudaError_t error = cudaHostRegister(p, bytes, cudaHostRegisterMapped);
    if (error != cudaSuccess)
        fprintf(stderr, "pinned: %s: %s", cudaGetErrorString(error), line),
            (void)cudaGetLastError();
}

__attribute__((constructor)) static void pin_everything(void)
{
    static char maps[256][512];
    if (&test_own_memory || strcmp(test_device_name(), "cuda") != 0) return;
    setenv("MT_SYNC", "1", 1); /* tests look at results as soon as an op returns */
    grow_heap();
    grow_stack();
    FILE *file = fopen("/proc/self/maps", "r");
    int lines = 0;
    while (file && lines < 256 && fgets(maps[lines], sizeof maps[0], file)) lines++;
    if (file) fclose(file);
    for (int i = 0; i < lines; i++) pin(maps[i]);
}

#else

bool test_is_seen(const void *p, size_t bytes)
{
    (void)p, (void)bytes;
    return true;
}

#endif
