/* Checks of group descriptors. */
#include "core/group.h"

#include <inttypes.h>

mt_status mt_group_check(const mt_group *g, const char *what)
{
    MT_REQUIRE(g->members >= 0 && g->m >= 0 && g->k >= 0, MT_EINVAL,
               "%s: members %" PRId64 ", m %" PRId64 ", k %" PRId64 " must not be negative", what,
               g->members, g->m, g->k);
    bool uniform = mt_group_mode_of(g) == MT_GROUP_UNIFORM;
    MT_REQUIRE(uniform || g->offsets, MT_EINVAL, "%s: a group with varying dims needs offsets",
               what);
    MT_REQUIRE(mt_group_mode_of(g) != MT_GROUP_VARYING_BOTH || g->m == 1, MT_EINVAL,
               "%s: a group varying in both dims has m = 1, not %" PRId64, what, g->m);
    return MT_OK;
}

mt_status mt_group_check_members(const mt_group *g, const char *what)
{
    MT_TRY(mt_group_check(g, what));
    int64_t at = 0, capacity = mt_group_capacity(g);
    for (int64_t i = 0; i < g->members; i++) {
        int64_t rows = mt_group_rows(g, i), cols = mt_group_cols(g, i);
        MT_REQUIRE(rows >= 0 && cols >= 0, MT_EINVAL,
                   "%s: member %" PRId64 " is %" PRId64 " x %" PRId64 ", dims must not be negative",
                   what, i, rows, cols);
        MT_REQUIRE(mt_group_offset(g, i) == at, MT_EINVAL,
                   "%s: member %" PRId64 " starts at %" PRId64
                   ", the members before it end at %" PRId64,
                   what, i, mt_group_offset(g, i), at);
        MT_REQUIRE(cols == 0 || rows <= (capacity - at) / cols, MT_EINVAL,
                   "%s: members 0..%" PRId64 " exceed the capacity of %" PRId64 " elements", what,
                   i, capacity);
        at += rows * cols;
    }
    MT_REQUIRE(mt_group_offset(g, g->members) == at, MT_EINVAL,
               "%s: offsets end at %" PRId64 ", the members at %" PRId64, what,
               mt_group_offset(g, g->members), at);
    return MT_OK;
}
