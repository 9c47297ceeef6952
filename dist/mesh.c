/* The grid of ranks. */
#include "dist/mesh.h"

mt_status mt_mesh_create(mt_mesh *mesh, mt_comm *world, int64_t expert_parallel)
{
    int rank = mt_comm_rank(world), size = mt_comm_size(world);
    *mesh = (mt_mesh){ .world = world };
    MT_REQUIRE(expert_parallel > 0 && size % expert_parallel == 0, MT_ECONFIG,
               "parallel.expert is %lld, must divide the number of ranks, %d",
               (long long)expert_parallel, size);
    int degree = (int)expert_parallel;
    mt_status status = mt_comm_split(&mesh->experts, world, rank / degree);
    if (status == MT_OK) status = mt_comm_split(&mesh->replicas, world, rank % degree);
    if (status != MT_OK) mt_mesh_destroy(mesh);
    return status;
}

void mt_mesh_destroy(mt_mesh *mesh)
{
    mt_comm_close(&mesh->replicas);
    mt_comm_close(&mesh->experts);
}
