/* The ranks as a grid: data-parallel x expert-parallel.
 *
 * World rank r stands at row r / E and column r % E, E the expert-parallel degree. The E ranks of a
 * row share every layer's experts (neighbours, so that they are on one host where E allows it);
 * the ranks of a column hold the same experts. Every rank has a micro-batch of its own, so the
 * params that all ranks share are sharded over the world, experts over their column. */
#pragma once

#include "dist/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mt_mesh {
    mt_comm *world;    /* borrowed */
    mt_comm *experts;  /* this rank's row: it exchanges tokens */
    mt_comm *replicas; /* this rank's column: the same experts on other data */
} mt_mesh;

/* Collective. MT_ECONFIG when the degree does not divide the number of ranks. */
mt_status mt_mesh_create(mt_mesh *mesh, mt_comm *world, int64_t expert_parallel);
/* Closes the parts, which waits for nobody; the world stays. NULL-safe fields. */
void mt_mesh_destroy(mt_mesh *mesh);

#ifdef __cplusplus
}
#endif
