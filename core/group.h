/* The layout of N matrices laid back to back in one buffer (NUMERICS section 1).
 *
 * | mode          | first_dims | last_dims | m                  | k                      |
 * |---------------|------------|-----------|--------------------|------------------------|
 * | uniform       | NULL       | NULL      | rows of a member   | columns of a member    |
 * | varying first | int64[N]   | NULL      | rows of the buffer | columns of a member    |
 * | varying last  | NULL       | int64[N]  | rows of a member   | columns of the buffer  |
 * | varying both  | int64[N]   | int64[N]  | 1                  | elements of the buffer |
 *
 * Of the buffer: what it has room for, the members' sum or more.
 *
 * `offsets` are CSR in elements, int64[N+1], NULL only when both dims are uniform. All three arrays
 * live on the device. Members of size zero and a capacity tail past the last member are legal. */
#pragma once

#include "core/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum mt_group_mode {
    MT_GROUP_UNIFORM,
    MT_GROUP_VARYING_FIRST,
    MT_GROUP_VARYING_LAST,
    MT_GROUP_VARYING_BOTH
} mt_group_mode;

typedef struct mt_group {
    int64_t members;
    int64_t m, k;
    const int64_t *first_dims, *last_dims, *offsets;
} mt_group;

static inline mt_group mt_group_uniform(int64_t members, int64_t m, int64_t k)
{
    mt_group g = { members, m, k, NULL, NULL, NULL };
    return g;
}

/* The ragged rows of a MoE layer: `first_dims` and `offsets` are device arrays of the route plan.
 */
static inline mt_group mt_group_ragged_rows(int64_t members, int64_t rows, int64_t k,
                                            const int64_t *first_dims, const int64_t *offsets)
{
    mt_group g = { members, rows, k, first_dims, NULL, offsets };
    return g;
}

MT_HOST_DEVICE mt_group_mode mt_group_mode_of(const mt_group *g)
{
    return g->first_dims ? (g->last_dims ? MT_GROUP_VARYING_BOTH : MT_GROUP_VARYING_FIRST)
                         : (g->last_dims ? MT_GROUP_VARYING_LAST : MT_GROUP_UNIFORM);
}

/* Elements of the whole buffer, capacity tail included. */
MT_HOST_DEVICE int64_t mt_group_capacity(const mt_group *g)
{
    return mt_group_mode_of(g) == MT_GROUP_UNIFORM ? g->members * g->m * g->k : g->m * g->k;
}

/* Whether it has no elements, whatever there is room for. */
MT_HOST_DEVICE bool mt_group_is_empty(const mt_group *g)
{
    return g->members == 0 || mt_group_capacity(g) == 0;
}

/* Rows, columns and first element of member i; reads device memory, for CPU devices and host
 * mirrors. */
MT_HOST_DEVICE int64_t mt_group_rows(const mt_group *g, int64_t i)
{
    return g->first_dims ? g->first_dims[i] : g->m;
}
MT_HOST_DEVICE int64_t mt_group_cols(const mt_group *g, int64_t i)
{
    return g->last_dims ? g->last_dims[i] : g->k;
}
MT_HOST_DEVICE int64_t mt_group_offset(const mt_group *g, int64_t i)
{
    return g->offsets ? g->offsets[i] : i * g->m * g->k;
}

/* Fails unless the descriptor is one of the four modes with non-negative extents. Reads no device
 * memory. */
mt_status mt_group_check(const mt_group *g, const char *what);

/* Fails unless host arrays describe members that fit: dims >= 0, offsets their running product,
 * total within the capacity. For host mirrors and CPU devices. */
mt_status mt_group_check_members(const mt_group *g, const char *what);

#ifdef __cplusplus
}
#endif
