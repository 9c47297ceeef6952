/* A new directory for a test's files, in TMPDIR or /tmp, of a name that no process before had. */
#pragma once

#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/stat.h>

#include "tests/support/test.h"

static inline void folder_make(char *path, size_t size)
{
    const char *parent = getenv("TMPDIR");
    unsigned long long number;
    assert_int_equal(getrandom(&number, sizeof number, 0), sizeof number);
    int n = snprintf(path, size, "%s/mixtape_test_%016llx", parent && *parent ? parent : "/tmp",
                     number);
    assert_true(n > 0 && (size_t)n < size);
    assert_int_equal(mkdir(path, 0700), 0);
}
