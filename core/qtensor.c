/* Geometry of quantized tensors: how many bytes, and where each member's lie. */
#include "core/qtensor.h"

#include <inttypes.h>

enum { PLACE_ALIGN = 256, SWIZZLE_LINES = 128, SWIZZLE_BLOCKS = 4, SWIZZLE_BYTES = 512 };

static const size_t scale_sizes[] = {
    [MT_SCALE_NONE] = 0, [MT_SCALE_F32] = sizeof(float), [MT_SCALE_E8M0] = 1, [MT_SCALE_E4M3] = 1
};

static int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

mt_direction_shape mt_direction_shape_of(const mt_direction *d, mt_dir dir, int64_t m, int64_t k)
{
    const mt_format *f = d->format;
    mt_direction_shape s = { .transposed = dir == MT_COL && f->column_transposed,
                             .scale_size = scale_sizes[f->scale] };
    s.code_lines = s.transposed ? k : m;
    s.code_pitch = ceil_div(s.transposed ? m : k, f->codes_per_byte);
    if (f->element == MT_ELEMENT_PLAIN) s.code_pitch *= (int64_t)mt_dtype_size(f->dtype);
    s.code_bytes = s.code_lines * s.code_pitch;
    if (f->scale == MT_SCALE_NONE) return s;
    if (f->block == 0) {
        s.scale_lines = s.scale_blocks = s.scale_count = 1;
        return s;
    }
    int64_t lines = dir == MT_ROW ? m : k, length = dir == MT_ROW ? k : m;
    bool shared = d->options.two_d && f->scale == MT_SCALE_F32;
    s.scale_lines = shared ? ceil_div(lines, f->block) : lines;
    s.scale_blocks = ceil_div(length, f->block);
    bool block_major = f->block_major[dir] && !shared;
    s.line_stride = block_major ? 1 : s.scale_blocks;
    s.block_stride = block_major ? s.scale_lines : 1;
    s.scale_count = d->swizzled ? ceil_div(lines, SWIZZLE_LINES) *
                                      ceil_div(s.scale_blocks, SWIZZLE_BLOCKS) * SWIZZLE_BYTES
                                : s.scale_lines * s.scale_blocks;
    return s;
}

/* At least sum over members of ceil(M_i / a) ceil(K_i / b); exact for uniform groups. */
static int64_t sum_of_products(const mt_group *g, int64_t a, int64_t b)
{
    /* sum of ceil(x_i / a) <= floor((sum x_i + (a - 1) N) / a), and <= sum x_i */
    int64_t rows = (g->m + (a - 1) * g->members) / a, cols = (g->k + (b - 1) * g->members) / b;
    if (mt_group_is_empty(g)) return 0;
    if (rows > g->m) rows = g->m;
    if (cols > g->k) cols = g->k;
    switch (mt_group_mode_of(g)) {
    case MT_GROUP_UNIFORM: return g->members * ceil_div(g->m, a) * ceil_div(g->k, b);
    case MT_GROUP_VARYING_FIRST: return rows * ceil_div(g->k, b);
    case MT_GROUP_VARYING_LAST: return ceil_div(g->m, a) * cols;
    case MT_GROUP_VARYING_BOTH: break;
    }
    return g->m * g->k; /* a member has at least one element for each product */
}

bool mt_direction_pads(const mt_direction *d, mt_dir dir, const mt_group *group)
{
    const mt_format *f = d->format;
    return dir == MT_COL && f && f->column_transposed && f->element != MT_ELEMENT_PLAIN &&
           f->codes_per_byte == 1 && !group->last_dims;
}

size_t mt_direction_code_bytes(const mt_direction *d, mt_dir dir, const mt_group *group)
{
    const mt_format *f = d->format;
    if (d->layout == MT_LAYOUT_PADDED) return (size_t)(group->k * mt_padded_rows(group));
    if (d->layout == MT_LAYOUT_DECODED)
        return (size_t)mt_group_capacity(group) * mt_dtype_size(MT_BF16);
    bool transposed = dir == MT_COL && f->column_transposed;
    int64_t per_byte = f->codes_per_byte;
    int64_t size = f->element == MT_ELEMENT_PLAIN ? (int64_t)mt_dtype_size(f->dtype) : 1;
    return (size_t)(size *
                    sum_of_products(group, transposed ? per_byte : 1, transposed ? 1 : per_byte));
}

size_t mt_direction_scale_bytes(const mt_direction *d, mt_dir dir, const mt_group *group)
{
    const mt_format *f = d->format;
    if (f->scale == MT_SCALE_NONE) return 0;
    if (f->block == 0) return (size_t)group->members * sizeof(float);
    if (d->layout == MT_LAYOUT_DECODED) return 0;
    bool shared = d->options.two_d && f->scale == MT_SCALE_F32;
    int64_t per_line = shared ? f->block : 1, per_block = f->block, unit = 1;
    if (d->swizzled) per_line = SWIZZLE_LINES, per_block *= SWIZZLE_BLOCKS, unit = SWIZZLE_BYTES;
    int64_t count = dir == MT_ROW ? sum_of_products(group, per_line, per_block)
                                  : sum_of_products(group, per_block, per_line);
    return (size_t)(count * unit) * scale_sizes[f->scale];
}

/* Whether columns are the same bytes as rows: plain ones, and what codes of square blocks that both
 * have decode to. */
static bool is_twin(const mt_direction *col, const mt_direction *row)
{
    mt_format_spec a = mt_direction_spec(row), b = mt_direction_spec(col);
    if (!row->format || row->format != col->format) return false;
    if (col->format->element == MT_ELEMENT_PLAIN) return true;
    return col->layout == MT_LAYOUT_DECODED && row->layout == MT_LAYOUT_DECODED &&
           col->options.two_d && mt_format_spec_equal(&a, &b);
}

/* Gives each part of `q` its place from `at` on; returns where the parts end. */
static size_t place(mt_qtensor *q, char *memory)
{
    size_t at = 0;
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
        mt_direction *d = &q->dir[dir];
        if (!d->format) continue;
        const mt_direction *row = &q->dir[MT_ROW];
        size_t codes = mt_direction_code_bytes(d, (mt_dir)dir, &q->group);
        size_t scales = mt_direction_scale_bytes(d, (mt_dir)dir, &q->group);
        size_t amax = (size_t)q->group.members * sizeof(float);
        size_t parts[] = { dir == MT_COL && is_twin(d, row) ? 0 : codes, scales, amax };
        char *pointers[3];
        for (int i = 0; i < 3; i++) {
            pointers[i] = memory ? memory + at : NULL;
            at += (parts[i] + PLACE_ALIGN - 1) / PLACE_ALIGN * PLACE_ALIGN;
        }
        if (!memory) continue;
        d->codes = parts[0] || !codes ? pointers[0] : row->codes;
        d->scales = scales ? pointers[1] : NULL;
        d->amax = (float *)(void *)pointers[2];
    }
    return at;
}

size_t mt_qtensor_bytes(const mt_qtensor *q)
{
    mt_qtensor copy = *q;
    return place(&copy, NULL);
}

void mt_qtensor_place(mt_qtensor *q, void *memory)
{
    place(q, memory);
}

mt_qtensor mt_qtensor_select(const mt_qtensor *q, mt_dir dir)
{
    mt_qtensor one = { .group = q->group };
    one.dir[dir] = q->dir[dir];
    return one;
}

/* Sets `view` to a member of q whose codes and scales begin `at[dir]` bytes in, and moves past it.
 */
static void take_member(mt_qtensor *view, const mt_qtensor *q, int64_t i,
                        size_t at[MT_DIR_COUNT][2])
{
    int64_t m = mt_group_rows(&q->group, i), k = mt_group_cols(&q->group, i);
    *view = (mt_qtensor){ .group = mt_group_uniform(1, m, k) };
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
        const mt_direction *d = &q->dir[dir];
        if (!d->format) continue;
        mt_direction_shape s = mt_direction_shape_of(d, (mt_dir)dir, m, k);
        view->dir[dir] = *d;
        view->dir[dir].codes = d->codes ? (char *)d->codes + at[dir][0] : NULL;
        view->dir[dir].scales = d->scales ? (char *)d->scales + at[dir][1] : NULL;
        view->dir[dir].amax = d->amax ? d->amax + i : NULL;
        at[dir][0] += (size_t)s.code_bytes;
        at[dir][1] += (size_t)s.scale_count * s.scale_size;
    }
}

static mt_status check_views(const mt_qtensor *q)
{
    MT_TRY(mt_group_check_members(&q->group, "qtensor"));
    for (int dir = 0; dir < MT_DIR_COUNT; dir++)
        MT_REQUIRE(!q->dir[dir].format || q->dir[dir].layout == MT_LAYOUT_COMPACT, MT_EUNSUPPORTED,
                   "qtensor: members of a direction that is not compact cannot be viewed");
    return MT_OK;
}

mt_status mt_qtensor_member(mt_qtensor *view, const mt_qtensor *q, int64_t i)
{
    MT_TRY(check_views(q));
    MT_REQUIRE(i >= 0 && i < q->group.members, MT_EINVAL,
               "qtensor: member %" PRId64 " of %" PRId64 " does not exist", i, q->group.members);
    size_t at[MT_DIR_COUNT][2] = { { 0 } };
    for (int64_t j = 0; j <= i; j++) take_member(view, q, j, at);
    return MT_OK;
}

mt_status mt_qtensor_split(mt_qtensor *views, const mt_qtensor *q)
{
    MT_TRY(check_views(q));
    size_t at[MT_DIR_COUNT][2] = { { 0 } };
    for (int64_t j = 0; j < q->group.members; j++) take_member(&views[j], q, j, at);
    return MT_OK;
}

mt_status mt_qtensor_check(const mt_qtensor *q, const char *what)
{
    MT_TRY(mt_group_check(&q->group, what));
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
        const mt_direction *d = &q->dir[dir];
        if (!d->format) continue;
        mt_format_spec spec = mt_direction_spec(d);
        MT_TRY(mt_format_spec_check(&spec));
        MT_REQUIRE(
            !d->swizzled || d->format->scale == MT_SCALE_E8M0 || d->format->scale == MT_SCALE_E4M3,
            MT_EINVAL, "%s: scales of format %s have no swizzled layout", what, d->format->name);
        unsigned past = d->layout == MT_LAYOUT_PADDED ? (uintptr_t)d->codes % MT_PADDED_ALIGN : 0;
        MT_REQUIRE(past == 0, MT_EINVAL,
                   "%s: padded codes begin %u bytes past a multiple of %d, must begin at one", what,
                   past, MT_PADDED_ALIGN);
    }
    return MT_OK;
}
