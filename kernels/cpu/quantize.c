/* group_quantize: tiles through load, scale, cast, store; whole-member amaxes in passes before. */
#include "kernels/cpu/quantize_priv.h"

/* What one sweep over the source does. */
typedef struct sweep {
    bool measure[MT_DIR_COUNT]; /* gather members' amaxes */
    bool codes;                 /* write codes, scales, and the bias gradient's parts */
    bool nans;                  /* the first sweep: count them */
} sweep;

typedef struct job {
    const struct mt_quantize_args *args;
    side sides[SIDES];
    bool write[MT_DIR_COUNT]; /* the direction is in `out` and not the source's own bytes */
    bool dequantized;         /* the column direction reads the row direction's values */
    bool rows_only;           /* quantize_rows does all */
    bool count_nans;
    int strip; /* rows worked on at a time */
    unit_size unit;
    int threads;
    int64_t count, units;
    member *members;
    float *amax[MT_DIR_COUNT]; /* of members */
    bool known[MT_DIR_COUNT];  /* amax is final */
    float *unit_amax[MT_DIR_COUNT];
    int32_t *unit_nans;
    float *unit_sums; /* column sums of units, NULL: no bias gradient */
    workspace *spaces;
} job;

/* ---- one tile ----------------------------------------------------------------------------------
 */

static void raise_to(float *most, float amax)
{
    if (amax > *most) *most = amax;
}

/* Codes and scales of a direction into the workspace; amax of the tile into *most. */
static void make_codes(workspace *ws, const job *j, const sweep *w, mt_dir dir, const level *l,
                       const tile *t, const float *x, bool codes, float *most)
{
    const side *s = &j->sides[dir];
    bool blocks = codes && !s->plain && !s->whole;
    if (w->measure[dir] || blocks) {
        float amax = measure_tile(ws, s, t, x, blocks);
        if (w->measure[dir]) raise_to(most, amax);
    }
    if (!codes || s->plain) return;
    scale_tile(ws, s, l, t, x);
    encode_tile(ws, s, t, x);
}

static void write_direction(workspace *ws, const job *j, mt_dir dir, const tile *t, const float *x)
{
    const side *s = &j->sides[dir];
    if (!j->write[dir]) return;
    if (s->plain) {
        store_plain(s, t, x);
        return;
    }
    write_codes(ws, s, t);
    if (!s->whole) write_scales(ws, s, t);
}

static uint32_t draw_step(const struct mt_quantize_args *a)
{
    return a->step + (a->first_step ? *a->first_step : 0);
}

static void run_tile(workspace *ws, const job *j, const sweep *w, const level levels[SIDES],
                     const tile *t, int64_t unit)
{
    const struct mt_quantize_args *a = j->args;
    const side *row = &j->sides[MT_ROW], *col = &j->sides[MT_COL];
    float *x = ws->x;
    bool columns = col->present && (w->codes || w->measure[MT_COL]);
    bool dequantize = columns && j->dequantized;
    load_tile(ws, &j->sides[SOURCE], &levels[SOURCE], t);
    ws->nan = true; /* until someone measures */
    if (w->codes && j->unit_sums) add_row_sums(ws->sums, x, t);
    bool draws = (row->present && row->d.options.sr) || (col->present && col->d.options.sr);
    if (draws && (w->codes || dequantize)) {
        const uint32_t key[2] = { a->seed, a->stream };
        uint32_t index = (uint32_t)t->index;
        draw_tile(ws, t, key, index ? 0 : a->first_row, a->first_member + index, draw_step(a));
    }
    if (row->present && (w->codes || w->measure[MT_ROW] || dequantize)) {
        make_codes(ws, j, w, MT_ROW, &levels[MT_ROW], t, x, w->codes || dequantize,
                   &j->unit_amax[MT_ROW][unit]);
        if (w->codes) write_direction(ws, j, MT_ROW, t, x);
    }
    if (w->nans && j->count_nans && ws->nan)
        for (int r = 0; r < t->rows; r++)
            j->unit_nans[unit] += (int32_t)count_nans(x + r * TILE, t->width);
    if (!columns) return;
    if (dequantize) {
        decode_tile(ws->other, ws, row, t);
        x = ws->other;
    }
    if (col->d.options.rht) {
        rotate_tile(ws->rotated, x, t, col->d.options.rht_mask);
        x = ws->rotated;
    }
    if (x != ws->x) pad_rows(x, t);
    make_codes(ws, j, w, MT_COL, &levels[MT_COL], t, x, w->codes, &j->unit_amax[MT_COL][unit]);
    if (w->codes) write_direction(ws, j, MT_COL, t, x);
}

/* Whether a sweep wants no more than the largest of the source's elements, as they are or rotated.
 */
static bool measures_source(const job *j, const sweep *w)
{
    return !w->codes && j->sides[SOURCE].plain && !(w->measure[MT_COL] && j->dequantized);
}

/* The elements as they are stored; only what is rotated is loaded. */
static void measure_unit(workspace *ws, const job *j, const sweep *w, int64_t unit, const tile *t)
{
    const side *source = &j->sides[SOURCE], *col = &j->sides[MT_COL];
    int32_t nans = 0;
    float amax = measure_rows(ws, source, &nans, t);
    for (int dir = 0; dir < MT_DIR_COUNT; dir++)
        if (w->measure[dir]) j->unit_amax[dir][unit] = amax;
    if (w->nans) j->unit_nans[unit] = nans;
    if (!w->measure[MT_COL] || !col->d.options.rht) return;
    load_tile(ws, source, NULL, t);
    j->unit_amax[MT_COL][unit] = measure_rotated(ws, t, ws->x, col->d.options.rht_mask);
}

static void run_unit(workspace *ws, const job *j, const sweep *w, int64_t unit)
{
    tile whole = tile_at(j->members, j->count, j->unit, unit);
    level levels[SIDES];
    for (int i = 0; i < SIDES; i++) {
        const side *s = &j->sides[i];
        if (!s->present) continue;
        bool out = i != SOURCE;
        const float *amax = out ? j->amax[i] : s->d.amax;
        const float *given = out ? j->args->scale[i] : NULL;
        levels[i] =
            member_level(s, amax ? amax[whole.index] : 0, given ? &given[whole.index] : NULL);
    }
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) j->unit_amax[dir][unit] = 0;
    if (w->nans) j->unit_nans[unit] = 0;
    if (measures_source(j, w)) {
        measure_unit(ws, j, w, unit, &whole);
        return;
    }
    if (j->rows_only) {
        struct rows_task task = { .source = &j->sides[SOURCE],
                                  .row = &j->sides[MT_ROW],
                                  .level = &levels[MT_ROW],
                                  .amax = w->measure[MT_ROW] ? &j->unit_amax[MT_ROW][unit] : NULL,
                                  .nans = &j->unit_nans[unit],
                                  .count = w->nans };
        quantize_rows(ws, &task, &whole);
        return;
    }
    memset(ws->sums, 0, sizeof ws->sums);
    for (int r = 0; r < whole.rows; r += j->strip) {
        tile t = whole;
        t.r0 += r;
        t.rows = whole.rows - r < j->strip ? whole.rows - r : j->strip;
        run_tile(ws, j, w, levels, &t, unit);
    }
    if (w->codes && j->unit_sums) memcpy(j->unit_sums + unit * TILE, ws->sums, sizeof ws->sums);
}

/* ---- sweeps ------------------------------------------------------------------------------------
 */

static int64_t units_end(const job *j, int64_t i)
{
    return i + 1 < j->count ? j->members[i + 1].unit : j->units;
}

static void write_nans(const job *j)
{
    const struct mt_quantize_args *a = j->args;
    for (int64_t i = 0; i < j->count; i++) {
        int64_t nans = 0;
        for (int64_t u = j->members[i].unit; u < units_end(j, i); u++) nans += j->unit_nans[u];
        if (a->nan) a->nan[i] = nans;
        if (a->running_nan && a->pass != MT_QUANTIZE_AMAX) a->running_nan[i] += nans;
    }
}

static void run_sweep(job *j, const sweep *w)
{
#pragma omp parallel for schedule(dynamic, 4) num_threads(j->threads) if (j->units > 1)
    for (int64_t u = 0; u < j->units; u++) run_unit(&j->spaces[omp_get_thread_num()], j, w, u);
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
        if (!w->measure[dir]) continue;
        for (int64_t i = 0; i < j->count; i++) {
            j->amax[dir][i] = 0;
            for (int64_t u = j->members[i].unit; u < units_end(j, i); u++)
                raise_to(&j->amax[dir][i], j->unit_amax[dir][u]);
        }
        j->known[dir] = true;
    }
    if (w->nans && j->count_nans) write_nans(j);
}

/* Whether codes need the member's amax before them. */
static bool needs_amax(const side *s)
{
    return s->present &&
           ((s->whole && !s->d.format->delayed) || (!s->plain && s->d.format->second_level));
}

static void run_sweeps(job *j)
{
    const struct mt_quantize_args *a = j->args;
    const side *row = &j->sides[MT_ROW], *col = &j->sides[MT_COL];
    bool all = a->pass == MT_QUANTIZE_AMAX, nans = true;
    bool want_row = row->present && !j->known[MT_ROW] && (all || needs_amax(row));
    bool want_col = col->present && !j->known[MT_COL] && (all || needs_amax(col));
    if (want_row || (want_col && !j->dequantized)) {
        run_sweep(j,
                  &(sweep){ .measure = { want_row, want_col && !j->dequantized }, .nans = nans });
        nans = false;
    }
    if (want_col && j->dequantized) {
        run_sweep(j, &(sweep){ .measure = { false, true }, .nans = nans });
        nans = false;
    }
    if (a->pass == MT_QUANTIZE_AMAX) return;
    run_sweep(j, &(sweep){ .measure = { row->present && !j->known[MT_ROW],
                                        col->present && !j->known[MT_COL] },
                           .codes = true,
                           .nans = nans });
}

/* ---- the whole call ----------------------------------------------------------------------------
 */

/* db of the columns whose first unit is `first`, from the units below it. */
static void add_bias_columns(const job *j, int64_t first)
{
    tile t = tile_at(j->members, j->count, j->unit, first);
    if (t.r0 > 0) return;
    int64_t across = (t.m->cols + TILE - 1) / TILE, end = units_end(j, t.index);
    float *db = j->args->bias_grad + t.m->column + t.c0;
    float sums[TILE];
    memcpy(sums, j->unit_sums + first * TILE, sizeof sums);
    for (int64_t u = first + across; u < end; u += across)
        for (int c = 0; c < TILE; c++) sums[c] += j->unit_sums[u * TILE + c];
    for (int c = 0; c < t.cols; c++) db[c] = (j->args->accumulate ? db[c] : 0) + sums[c];
}

static void write_bias(const job *j)
{
    for (int64_t i = 0; i < j->count && !j->args->accumulate; i++) {
        const member *m = &j->members[i];
        if (m->rows == 0)
            memset(j->args->bias_grad + m->column, 0, (size_t)m->cols * sizeof(float));
    }
#pragma omp parallel for schedule(static) num_threads(j->threads) if (j->units > 64)
    for (int64_t u = 0; u < j->units; u++) add_bias_columns(j, u);
}

/* What there is one of per member: scales, amaxes. */
static void write_members(const job *j, mt_dir dir)
{
    const struct mt_quantize_args *a = j->args;
    const side *s = &j->sides[dir];
    float *amax = a->out->dir[dir].amax, *running = a->running_amax[dir];
    if (!a->out->dir[dir].format) return;
    for (int64_t i = 0; i < j->count; i++) {
        const float *given = a->scale[dir] ? &a->scale[dir][i] : NULL;
        if (amax && a->pass != MT_QUANTIZE_CODES) amax[i] = j->amax[dir][i];
        if (running) raise_to(&running[i], j->amax[dir][i]);
        if (s->whole && a->pass != MT_QUANTIZE_AMAX)
            ((float *)s->d.scales)[i] = member_level(s, j->amax[dir][i], given).dec;
    }
}

/* The padding of swizzled tiles; tiles then write their own scales. */
static void clear_swizzled(const job *j, mt_dir dir)
{
    const side *s = &j->sides[dir];
    if (!j->write[dir] || !s->d.swizzled || j->count == 0) return;
    const member *m = &j->members[j->count - 1];
    mt_direction_shape last = mt_direction_shape_of(&s->d, dir, m->rows, m->cols);
    int64_t bytes = m->scales[dir] + last.scale_count;
    if (bytes) memset(s->d.scales, 0, (size_t)bytes);
}

/* F's overflow value: the largest finite value of the type that is quantized. */
static float largest_of(const side *source)
{
    static const float largest[MT_DTYPE_COUNT] = { [MT_F64] = 0x1.fffffep127f,
                                                   [MT_F32] = 0x1.fffffep127f,
                                                   [MT_BF16] = 0x1.fep127f,
                                                   [MT_F16] = 65504.0f };
    return largest[source->plain ? source->d.format->dtype : MT_F32];
}

static void set_sides(job *j)
{
    const struct mt_quantize_args *a = j->args;
    const mt_direction *source = &a->src->dir[a->src_dir];
    mt_direction row = a->out->dir[MT_ROW], col = a->out->dir[MT_COL];
    j->dequantized = col.format && col.options.from_dequantized;
    if (j->dequantized && !row.format) { /* the row direction that the column's values come from */
        row = (mt_direction){ .format = col.format, .options = col.options };
        row.options.rht = row.options.from_dequantized = false;
    }
    j->sides[MT_ROW] = side_of(&row, MT_ROW, MT_ROW, false);
    j->sides[MT_COL] = side_of(&col, MT_COL, MT_COL, false);
    j->sides[SOURCE] = side_of(source, a->src_dir, SOURCE, true);
    float overflow = largest_of(&j->sides[SOURCE]);
    j->sides[MT_ROW].overflow = overflow;
    j->sides[MT_COL].overflow = j->dequantized ? 0x1.fffffep127f : overflow;
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
        const mt_direction *d = &a->out->dir[dir];
        j->write[dir] = d->format && d->codes != source->codes;
        j->known[dir] = d->format && a->pass == MT_QUANTIZE_CODES;
    }
    if (j->sides[MT_COL].plain && col.codes == row.codes) j->write[MT_COL] = false;
    const side *r = &j->sides[MT_ROW];
    bool tall = j->sides[MT_COL].present || (r->present && r->block_rows > 1 && !r->whole) ||
                (a->src_dir == MT_COL && !j->sides[SOURCE].plain);
    j->strip = tall ? TILE : CHUNK;
    j->count_nans = a->nan || a->running_nan;
    j->rows_only = rows_suffice(r) && !r->d.options.sr && !r->d.options.four_over_six &&
                   !j->sides[MT_COL].present && j->sides[SOURCE].plain && !a->bias_grad;
    j->unit = j->rows_only ? (unit_size){ LONG_ROWS, LONG_COLS } : (unit_size){ TILE, TILE };
}

static size_t rounded(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

/* Lays the job's arrays out in the stream's scratch. */
static mt_status take_scratch(job *j, mt_stream *stream)
{
    size_t members = rounded((size_t)j->count * sizeof(member));
    size_t amax = rounded((size_t)j->count * sizeof(float));
    size_t per_unit = rounded((size_t)j->units * sizeof(float));
    size_t sums = j->args->bias_grad ? (size_t)j->units * TILE * sizeof(float) : 0;
    size_t spaces = (size_t)stream->device->threads * sizeof(workspace);
    char *p;
    MT_TRY(mt_cpu_scratch(stream, (void **)&p, spaces + members + 2 * amax + 3 * per_unit + sums));
    j->spaces = (workspace *)(void *)p, p += spaces;
    j->members = (member *)(void *)p, p += members;
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
        j->amax[dir] = (float *)(void *)p, p += amax;
        j->unit_amax[dir] = (float *)(void *)p, p += per_unit;
    }
    j->unit_nans = (int32_t *)(void *)p, p += per_unit;
    j->unit_sums = j->args->bias_grad ? (float *)(void *)p : NULL;
    return MT_OK;
}

mt_status MT_CPU_ISA(quantize)(mt_stream *stream, const struct mt_quantize_args *args)
{
    if (args->row_token || args->swiglu || args->z) return mt_quantize_parts(stream, args);
    for (int dir = 0; dir < MT_DIR_COUNT; dir++)
        MT_REQUIRE(args->out->dir[dir].layout == MT_LAYOUT_COMPACT &&
                       args->src->dir[args->src_dir].layout == MT_LAYOUT_COMPACT,
                   MT_EUNSUPPORTED, "quantize: a direction is padded, cpu takes compact ones");
    MT_TRY(mt_group_check_members(&args->src->group, "quantize: the source's group"));
    job j = { .args = args, .threads = stream->device->threads, .count = args->src->group.members };
    set_sides(&j);
    const side *const sides[SIDES] = { &j.sides[MT_ROW], &j.sides[MT_COL], &j.sides[SOURCE] };
    j.units = plan_members(NULL, &args->src->group, sides, j.unit);
    MT_TRY(take_scratch(&j, stream));
    plan_members(j.members, &args->src->group, sides, j.unit);
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
        const float *given = args->out->dir[dir].amax;
        for (int64_t i = 0; i < j.count; i++) j.amax[dir][i] = j.known[dir] && given ? given[i] : 0;
        if (args->pass != MT_QUANTIZE_AMAX) clear_swizzled(&j, (mt_dir)dir);
    }
    run_sweeps(&j);
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) write_members(&j, (mt_dir)dir);
    if (j.unit_sums && args->pass != MT_QUANTIZE_AMAX) write_bias(&j);
    return MT_OK;
}
