/* The grid of ranks. */
#include "dist/mesh.h"

#include <string.h>

#include "dist/comm_priv.h"

/* Of a world whose other ranks are not there, and cannot say where they belong. */
static mt_status plan_parts(mt_mesh *mesh, int degree)
{
    int rank = mt_comm_rank(mesh->world), size = mt_comm_size(mesh->world);
    mt_status status = mt_comm_plan_part(&mesh->experts, mesh->world, rank % degree, degree, 1);
    if (status == MT_OK)
        status =
            mt_comm_plan_part(&mesh->replicas, mesh->world, rank / degree, size / degree, degree);
    if (status != MT_OK) mt_mesh_destroy(mesh);
    return status;
}

mt_status mt_mesh_create(mt_mesh *mesh, mt_comm *world, int64_t expert_parallel)
{
    int rank = mt_comm_rank(world), size = mt_comm_size(world);
    *mesh = (mt_mesh){ .world = world };
    MT_REQUIRE(expert_parallel > 0 && size % expert_parallel == 0, MT_ECONFIG,
               "parallel.expert is %lld, must divide the number of ranks, %d",
               (long long)expert_parallel, size);
    int degree = (int)expert_parallel;
    if (!strcmp(mt_comm_backend(world), "plan")) return plan_parts(mesh, degree);
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
