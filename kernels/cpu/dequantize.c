/* group_dequantize, scale layouts, delayed scales. */
#include <float.h>
#include <math.h>

#include "kernels/cpu/quantize_priv.h"

static void dequantize_unit(workspace *ws, const side *source, const side *out, const level *l,
                            const tile *whole)
{
    if (rows_suffice(source)) {
        dequantize_rows(ws, source, out, l, whole);
        return;
    }
    int strip = source->dir == MT_COL && !source->plain ? TILE : CHUNK;
    for (int r = 0; r < whole->rows; r += strip) {
        tile t = *whole;
        t.r0 += r;
        t.rows = whole->rows - r < strip ? whole->rows - r : strip;
        if (source->plain) {
            load_tile(ws, source, l, &t);
        } else {
            read_tile(ws, source, l, &t);
            if (save_tile_bf16(ws, source, out, &t)) continue;
            decode_tile(ws->x, ws, source, &t);
        }
        store_plain(out, &t, ws->x);
    }
}

/* Takes the members' factors out of the source: scales of 1 in their place, in `ones`. */
static void take_factors(side *source, float *factors, float *ones, int64_t members)
{
    for (int64_t i = 0; i < members; i++) {
        factors[i] = ones[i] = 1;
        if (source->whole) factors[i] = ((const float *)source->d.scales)[i];
        if (source->d.format->second_level)
            factors[i] = member_level(source, source->d.amax[i], NULL).s_dec;
    }
    if (source->whole) source->d.scales = ones;
}

mt_status MT_CPU_ISA(decode)(mt_stream *stream, const struct mt_dequantize_args *args,
                             float *factors)
{
    const mt_group *group = &args->src->group;
    MT_REQUIRE(args->src->dir[args->dir].layout == MT_LAYOUT_COMPACT, MT_EUNSUPPORTED,
               "dequantize: the direction is padded, cpu takes compact ones");
    MT_TRY(mt_group_check_members(group, "dequantize: the group"));
    mt_direction y = mt_direction_of(mt_format_spec_default(mt_format_plain(args->y_dtype)->id));
    y.codes = args->y;
    side source = side_of(&args->src->dir[args->dir], args->dir, SOURCE, true);
    const side out = side_of(&y, MT_ROW, MT_ROW, false), none = { 0 };
    const side *const sides[SIDES] = { &out, &none, &source };
    unit_size size = { TILE, TILE };
    if (rows_suffice(&source)) size = (unit_size){ LONG_ROWS, LONG_COLS };
    int64_t count = group->members, units = plan_members(NULL, group, sides, size);
    size_t spaces = (size_t)stream->device->threads * sizeof(workspace);
    char *p;
    MT_TRY(mt_cpu_scratch(stream, (void **)&p,
                          spaces + (size_t)count * (sizeof(member) + sizeof(float))));
    workspace *space = (workspace *)(void *)p;
    member *members = (member *)(void *)(p + spaces);
    plan_members(members, group, sides, size);
    if (factors) take_factors(&source, factors, (float *)(void *)(members + count), count);
    const bool second = source.d.format->second_level;
#pragma omp parallel for schedule(dynamic, 4) num_threads(stream->device->threads) if (units > 1)
    for (int64_t u = 0; u < units; u++) {
        tile t = tile_at(members, count, size, u);
        level l = member_level(&source, second ? source.d.amax[t.index] : 0, NULL);
        if (factors) l.s_dec = 1;
        dequantize_unit(&space[omp_get_thread_num()], &source, &out, &l, &t);
    }
    return MT_OK;
}

mt_status MT_CPU_ISA(dequantize)(mt_stream *stream, const struct mt_dequantize_args *args)
{
    return MT_CPU_ISA(decode)(stream, args, NULL);
}

mt_status MT_CPU_ISA(swizzle_scales)(mt_stream *stream, const struct mt_swizzle_scales_args *args)
{
    (void)stream;
    const mt_group *group = &args->src->group;
    MT_TRY(mt_group_check_members(group, "swizzle_scales: the group"));
    const mt_direction *from = &args->src->dir[args->dir];
    mt_direction to = *from;
    to.swizzled = !from->swizzled;
    const uint8_t *in = from->scales;
    uint8_t *out = args->out;
    for (int64_t i = 0; i < group->members; i++) {
        int64_t m = mt_group_rows(group, i), k = mt_group_cols(group, i);
        mt_direction_shape s = mt_direction_shape_of(from, args->dir, m, k);
        mt_direction_shape d = mt_direction_shape_of(&to, args->dir, m, k);
        memset(out, 0, (size_t)d.scale_count);
        for (int64_t line = 0; line < s.scale_lines; line++)
            for (int64_t b = 0; b < s.scale_blocks; b++)
                out[mt_scale_place(&to, &d, line, b)] = in[mt_scale_place(from, &s, line, b)];
        in += s.scale_count;
        out += d.scale_count;
    }
    return MT_OK;
}

/* NUMERICS section 2: s = (max 2^-margin) / A where A is finite and above 0, else as before. */
static float delayed_scale(float before, float most, float max, int margin)
{
    if (!(most > 0.0f && most <= FLT_MAX)) return before;
    float s = ldexpf(max, -margin) / most;
    return s > FLT_MAX ? FLT_MAX : s;
}

mt_status MT_CPU_ISA(delayed_update)(mt_stream *stream, const struct mt_delayed_update_args *args)
{
    (void)stream;
    int64_t n = args->members, slots = args->length;
    for (int64_t i = 0; i < n; i++) {
        float *slot = args->history + i, last = slot[0];
        if (args->other) {
            const float other = args->other[i];
            if (other > last || other != other) last = other;
            args->other[i] = last;
        }
        if (last == 0.0f) continue;
        float most = last;
        for (int64_t t = 1; t < slots && !args->most_recent; t++)
            if (slot[t * n] > most) most = slot[t * n];
        for (int64_t t = 1; t + 1 < slots; t++) slot[t * n] = slot[(t + 1) * n];
        slot[(slots - 1) * n] = last;
        slot[0] = 0;
        args->scale[i] =
            delayed_scale(args->scale[i], most, mt_elements[args->element].max, args->margin);
    }
    return MT_OK;
}
