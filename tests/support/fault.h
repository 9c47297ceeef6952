/* Counts the allocations of the code under test, and makes chosen ones fail. Test programs are
 * linked with --wrap for every allocating function of libc that the sources call, so what shared
 * libraries allocate for themselves (OpenMP, BLAS, HDF5) is neither counted nor failed. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

typedef enum fault_mode {
    FAULT_ONCE, /* only the n-th allocation fails */
    FAULT_FROM  /* the n-th and all later ones fail */
} fault_mode;

/* Arms: the n-th allocation from now on (n = 1 is the next) fails. */
void fault_arm(int64_t n, fault_mode mode);
/* Disarms. True when an allocation has failed since it was armed. */
bool fault_disarm(void);
/* Allocations since the program began. */
int64_t fault_allocations(void);
/* Allocations that have not been freed. Exact for code that frees what it has allocated itself. */
int64_t fault_live(void);
