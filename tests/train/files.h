/* Files for tests: a directory of their own, removed at the end; damage. */
#pragma once

#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <signal.h>
#include <unistd.h>

#include "core/rng.h"
#include "tests/support/test.h"
#include "tests/train/folder.h"
#include "train/fileio.h"

/* libhdf5 itself leaks a little when it refuses damaged structure. */
const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void)
{
    return "leak:libhdf5\n";
}

static char files_dir[128];

static inline int files_setup(void **state)
{
    (void)state;
    folder_make(files_dir, sizeof files_dir);
    return 0;
}

static inline int files_teardown(void **state)
{
    (void)state;
    return mt_dir_remove(files_dir) == MT_OK ? 0 : -1;
}

/* "<directory>/name"; four names may be in use at once. */
static inline const char *in_dir(const char *name)
{
    static char paths[4][256];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, 256, "%s/%s", files_dir, name);
    return path;
}

static inline void put_file(const char *path, const void *data, size_t bytes)
{
    unlink(path); /* some file systems flush a file that is rewritten in place */
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, bytes, f), bytes);
    assert_int_equal(fclose(f), 0);
}

static inline void put_text(const char *path, const char *text)
{
    put_file(path, text, strlen(text));
}

static inline char *get_file(const char *path, size_t *bytes)
{
    char *data;
    assert_ok(mt_file_read_all(&data, bytes, path, (size_t)1 << 30));
    return data;
}

/* Runs `body` in a child that cannot write files beyond `bytes`; its return value is the exit code.
 */
static inline int with_file_limit(size_t bytes, int (*body)(void))
{
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        const struct rlimit limit = { bytes, bytes };
        omp_set_num_threads(1); /* OpenMP's threads are the parent's */
        signal(SIGXFSZ, SIG_IGN);
        if (setrlimit(RLIMIT_FSIZE, &limit)) _exit(99);
        _exit(body());
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}
