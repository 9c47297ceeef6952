/* Wires: which bytes of which param each rank sends, and how they become compute copies. */
#include <stdlib.h>

#include "core/array.h"
#include "dist/fsdp_priv.h"

enum { WIRE_ALIGN = 64, COPY_ALIGN = 256 };

static size_t align(size_t bytes, size_t to)
{
    return (bytes + to - 1) / to * to;
}

mt_format_spec mt_fsdp_spec(const mt_param *p, mt_dir dir)
{
    if (p->linear) return *mt_recipe_direction(&p->linear->recipe, MT_OPERAND_W, dir);
    return mt_format_spec_default(mt_format_plain(p->compute)->id);
}

bool mt_fsdp_native(const mt_param *p, mt_dir dir)
{
    return mt_fsdp_spec(p, dir).format == mt_format_plain(p->compute);
}

float *mt_fsdp_amax(const mt_fsdp *f, const mt_param *p, mt_dir dir)
{
    int64_t i = mt_param_store_unit(f->store, p->unit).first;
    while (mt_param_store_get(f->store, i) != p) i++;
    return f->amax + f->amax_at[i] + (int64_t)dir * p->group.members;
}

mt_direction mt_fragment_direction(const mt_fsdp *f, const mt_fragment *x, mt_dir dir, char *wire)
{
    mt_direction d = mt_direction_of(mt_fsdp_spec(x->param, dir));
    d.codes = wire + x->codes;
    d.scales = x->scale_bytes ? wire + x->scales : NULL;
    d.amax = mt_fsdp_amax(f, x->param, dir) + x->member;
    return d;
}

/* Whether a packed weight is its values in their order: then both directions may be one. */
static bool packs_plainly(const mt_fsdp *f, const mt_param *p)
{
    return f->device->kernels[p->compute]->packed_shared;
}

/* Whether a unit has weights, all of which are the same bytes in both directions. */
static bool is_single(const mt_fsdp *f, const mt_unit *u)
{
    bool any = false;
    for (int64_t i = u->first; i < u->first + u->count; i++) {
        const mt_param *p = mt_param_store_get(f->store, i);
        if (!p->packed) continue;
        if (!mt_fsdp_native(p, MT_ROW) || !mt_fsdp_native(p, MT_COL) || !packs_plainly(f, p))
            return false;
        any = true;
    }
    return any;
}

/* Whether a fragment's bytes lie in the copies as they are sent: values in their order, or whole
 * members of codes. */
static bool is_plain(const mt_fsdp *f, const mt_fragment *x, mt_dir dir)
{
    if (x->real) return true;
    if (mt_fsdp_native(x->param, dir)) return packs_plainly(f, x->param);
    return x->members > 1 || x->rows == x->param->group.m;
}

/* ---- cutting -----------------------------------------------------------------------------------
 */

static mt_status append(mt_wire *w, const mt_fragment *x)
{
    MT_TRY(mt_array_reserve(&w->list, &w->room, w->count + 1, sizeof *w->list, "fragments"));
    w->list[w->count++] = *x;
    return MT_OK;
}

/* Adds a fragment whose elements, members and rows are known behind *at bytes of its rank's wire.
 */
static mt_status add(mt_wire *w, mt_fragment *x, mt_dir dir, size_t *at)
{
    const mt_param *p = x->param;
    mt_group group = mt_fragment_group(x);
    mt_direction d = mt_direction_of(mt_fsdp_spec(p, dir));
    x->code_bytes = x->real ? (size_t)x->count * mt_dtype_size(p->dtype)
                            : mt_direction_code_bytes(&d, dir, &group);
    x->scale_bytes = x->real ? 0 : mt_direction_scale_bytes(&d, dir, &group);
    x->codes = *at;
    x->scales = *at += align(x->code_bytes, WIRE_ALIGN);
    *at += align(x->scale_bytes, WIRE_ALIGN);
    return append(w, x);
}

/* A piece of a GEMM weight: the rest of a member, whole members, the beginning of another. */
static mt_status add_rows(mt_wire *w, mt_param *p, int rank, mt_piece piece, mt_dir dir, size_t *at)
{
    int64_t m = p->group.m, k = p->group.k, row = piece.first / k, left = piece.count / k;
    while (left > 0) {
        mt_fragment x = { .param = p, .rank = rank, .member = row / m, .row = row % m };
        bool whole = x.row == 0 && left >= m;
        x.members = whole ? left / m : 1;
        x.rows = whole ? m : left < m - x.row ? left : m - x.row;
        x.first = row * k, x.count = x.members * x.rows * k;
        MT_TRY(add(w, &x, dir, at));
        row += x.members * x.rows, left -= x.members * x.rows;
    }
    return MT_OK;
}

/* Whether the masters of a param travel with this direction. */
static bool sends_master(const mt_param *p, mt_dir dir)
{
    return !p->packed || (p->direct && dir == MT_ROW);
}

static mt_status cut_rank(mt_fsdp *f, mt_wire *w, const mt_unit *u, mt_dir dir, int rank)
{
    size_t at = 0;
    int64_t before = w->count;
    for (int64_t i = u->first; i < u->first + u->count; i++) {
        mt_param *p = mt_param_store_get(f->store, i);
        mt_piece piece = mt_param_piece(f->store, p, rank);
        mt_fragment x = { p, rank, true, piece.first, piece.count, 0, 1, 0, 1, 0, 0, 0, 0 };
        if (piece.count && sends_master(p, dir)) MT_TRY(add(w, &x, dir, &at));
        if (piece.count && p->packed) MT_TRY(add_rows(w, p, rank, piece, dir, &at));
    }
    for (int64_t i = before; i < w->count; i++)
        w->plain = w->plain && is_plain(f, &w->list[i], dir);
    if (rank == u->rank) w->own = before, w->own_count = w->count - before;
    if (at > w->bytes) w->bytes = at;
    return MT_OK;
}

mt_status mt_fsdp_cut_wires(mt_fsdp *f)
{
    size_t own = 0, real = 0;
    for (int64_t i = 0; i < f->wires; i++) {
        mt_wire *w = &f->wire[i];
        mt_dir dir = (mt_dir)(i % MT_DIR_COUNT);
        mt_unit u = mt_param_store_unit(f->store, i / MT_DIR_COUNT);
        w->count = w->own_count = 0, w->bytes = 0, w->at = own, w->plain = true;
        if (dir == MT_ROW) f->single[i / MT_DIR_COUNT] = is_single(f, &u);
        if (!mt_wire_is_own(f, i)) continue;
        for (int r = 0; r < u.ranks; r++) MT_TRY(cut_rank(f, w, &u, dir, r));
        own += w->bytes;
        for (int64_t j = u.first; j < u.first + u.count; j++) {
            const mt_param *p = mt_param_store_get(f->store, j);
            size_t bytes = (size_t)mt_param_count(p) * mt_dtype_size(p->dtype);
            bool widened = p->packed && mt_fsdp_native(p, dir) && !packs_plainly(f, p);
            if (widened && bytes > real) real = bytes;
        }
    }
    f->own_bytes = own, f->real_bytes = real;
    return MT_OK;
}

/* The first native direction of a param whose bytes are one run of its own wire; NULL: none. */
static uint16_t *cast_at(const mt_fsdp *f, const mt_param *p, mt_dir dir)
{
    const mt_wire *w = &f->wire[mt_wire_of(p->unit, dir)];
    char *first = NULL, *end = NULL;
    if (!mt_fsdp_native(p, dir)) return NULL;
    for (int64_t i = w->own; i < w->own + w->own_count; i++) {
        const mt_fragment *x = &w->list[i];
        char *at = (char *)f->own + w->at + x->codes;
        if (x->param != p || x->real) continue;
        if (first && at != end) return NULL;
        first = first ? first : at, end = at + x->code_bytes;
    }
    return (uint16_t *)(void *)first;
}

void mt_fsdp_place_casts(mt_fsdp *f)
{
    for (int64_t i = 0; i < mt_param_store_count(f->store); i++) {
        mt_param *p = mt_param_store_get(f->store, i);
        bool casts = p->packed && p->dtype == MT_F32 && p->compute == MT_BF16 && !p->high;
        p->cast = casts ? cast_at(f, p, MT_ROW) : NULL;
        if (casts && !p->cast) p->cast = cast_at(f, p, MT_COL);
        p->cast_written = false;
    }
}

/* ---- compute copies ----------------------------------------------------------------------------
 */

/* The next part of a copy's memory. */
static void *take(char *memory, size_t *at, size_t bytes)
{
    void *p = memory ? memory + *at : NULL;
    *at += align(bytes, COPY_ALIGN);
    return p;
}

static void place_weight(mt_fsdp *f, mt_param *p, mt_dir dir, char *memory, size_t *at)
{
    const struct mt_kernels *kernels = f->device->kernels[p->compute];
    mt_direction *d = &p->weight.dir[dir];
    mt_group g = p->group;
    *d = mt_direction_of(mt_fsdp_spec(p, dir));
    if (mt_fsdp_native(p, dir)) {
        d->layout = MT_LAYOUT_PACKED;
        d->codes = take(memory, at, kernels->packed_bytes(p->compute, dir, g.members, g.m, g.k));
        return;
    }
    size_t scales = mt_direction_scale_bytes(d, dir, &g);
    d->codes = take(memory, at, mt_direction_code_bytes(d, dir, &g));
    if (scales) d->scales = take(memory, at, scales);
    d->amax = memory ? mt_fsdp_amax(f, p, dir) : NULL;
}

void mt_fsdp_place(mt_fsdp *f, int64_t wire, char *memory)
{
    mt_unit u = mt_param_store_unit(f->store, wire / MT_DIR_COUNT);
    mt_dir dir = (mt_dir)(wire % MT_DIR_COUNT);
    size_t at = 0;
    f->wire[wire].copy_bytes = 0;
    if (!mt_wire_is_own(f, wire)) return;
    for (int64_t i = u.first; i < u.first + u.count; i++) {
        mt_param *p = mt_param_store_get(f->store, i);
        size_t bytes = (size_t)mt_param_count(p) * mt_dtype_size(p->dtype);
        if (sends_master(p, dir)) p->master = take(memory, &at, bytes);
        if (p->packed) place_weight(f, p, dir, memory, &at);
        if (p->packed && f->single[wire / MT_DIR_COUNT]) p->weight.dir[!dir] = p->weight.dir[dir];
    }
    f->wire[wire].copy_bytes = at;
}

/* Masters that travel in both directions of a unit are then those of the direction that stays. */
void mt_fsdp_evict(mt_fsdp *f, mt_copy_slot *slot)
{
    int64_t wire = slot->wire;
    if (wire < 0) return;
    const mt_wire *other = &f->wire[wire ^ 1];
    f->wire[wire].slot = -1;
    slot->wire = -1;
    mt_fsdp_place(f, wire, NULL);
    if (other->slot >= 0) mt_fsdp_place(f, wire ^ 1, f->slots[other->slot].memory);
}

/* ---- unpacking ---------------------------------------------------------------------------------
 */

/* A run of bytes of a wire, and where it comes to lie. */
typedef struct run {
    void *to;
    size_t at, bytes; /* in the wire */
} run;

/* The runs of a plain fragment: how many. */
static int runs_of(const mt_fragment *x, mt_dir dir, run runs[2])
{
    const mt_param *p = x->param;
    const mt_direction *d = &p->weight.dir[dir];
    mt_group g = p->group;
    bool values = x->real || d->layout == MT_LAYOUT_PACKED;
    if (values) {
        char *to = x->real ? p->master : d->codes;
        size_t size = mt_dtype_size(x->real ? p->dtype : p->compute);
        runs[0] = (run){ to + (size_t)x->first * size, x->codes, x->code_bytes };
        return 1;
    }
    mt_direction_shape all = mt_direction_shape_of(d, dir, g.m, g.k);
    runs[0] = (run){ (char *)d->codes + x->member * all.code_bytes, x->codes, x->code_bytes };
    if (!x->scale_bytes) return 1;
    size_t scales = (size_t)(x->member * all.scale_count) * (size_t)all.scale_size;
    runs[1] = (run){ (char *)d->scales + scales, x->scales, x->scale_bytes };
    return 2;
}

static mt_status copy_bytes(mt_fsdp *f, void *to, const void *from, size_t bytes)
{
    return mt_device_copy_async(&f->gathering, to, from, bytes);
}

/* `lines` runs of `bytes`, from one pitch to another. */
static mt_status copy_lines(mt_fsdp *f, char *to, int64_t to_pitch, const char *from,
                            int64_t from_pitch, int64_t bytes, int64_t lines)
{
    const struct mt_copy_lines c = {
        to, from, (size_t)to_pitch, (size_t)from_pitch, (size_t)bytes, lines
    };
    return mt_device_copy_lines(&f->gathering, &c);
}

/* Scales of rows [row, row + rows) of a member into those of all of it. */
static mt_status unpack_scales(mt_fsdp *f, const mt_fragment *x, mt_dir dir, const mt_direction *d,
                               const char *from, char *to)
{
    int64_t k = x->param->group.k, block = d->format->block;
    mt_direction_shape part = mt_direction_shape_of(d, dir, x->rows, k);
    mt_direction_shape all = mt_direction_shape_of(d, dir, x->param->group.m, k);
    int64_t size = (int64_t)part.scale_size;
    to += x->member * all.scale_count * size;
    if (block == 0) return copy_bytes(f, to, from, (size_t)size);
    bool shared = all.scale_lines != (dir == MT_ROW ? x->param->group.m : k);
    int64_t line = dir == MT_ROW ? x->row / (shared ? block : 1) : 0;
    int64_t along = dir == MT_COL ? x->row / block : 0;
    to += (line * all.line_stride + along * all.block_stride) * size;
    if (all.line_stride == 1 && all.block_stride != 1)
        return copy_lines(f, to, all.block_stride * size, from, part.block_stride * size,
                          part.scale_lines * size, part.scale_blocks);
    return copy_lines(f, to, all.line_stride * size, from, part.line_stride * size,
                      part.scale_blocks * size, part.scale_lines);
}

/* Rows of a member. */
static mt_status unpack_lines(mt_fsdp *f, const mt_fragment *x, mt_dir dir, const char *rank_wire)
{
    const mt_direction *d = &x->param->weight.dir[dir];
    mt_group g = x->param->group;
    mt_direction_shape all = mt_direction_shape_of(d, dir, g.m, g.k);
    char *codes = (char *)d->codes + x->member * all.code_bytes;
    const char *from = rank_wire + x->codes, *scales = rank_wire + x->scales;
    mt_direction_shape part = mt_direction_shape_of(d, dir, x->rows, g.k);
    int64_t skip = all.transposed ? x->row / d->format->codes_per_byte : x->row * all.code_pitch;
    MT_TRY(copy_lines(f, codes + skip, all.code_pitch, from, part.code_pitch, part.code_pitch,
                      part.code_lines));
    return x->scale_bytes ? unpack_scales(f, x, dir, d, scales, d->scales) : MT_OK;
}

/* A native fragment, into the weight in masters' dtype. */
static mt_status widen(mt_fsdp *f, const mt_fragment *x, const char *from)
{
    const mt_param *p = x->param;
    char *to = (char *)f->real + (size_t)x->first * mt_dtype_size(p->dtype);
    return mt_cast(
        &f->gathering,
        &(struct mt_cast_args){
            .dtype = p->dtype, .count = x->count, .y = to, .x = from, .x_dtype = p->compute });
}

static mt_status pack(mt_fsdp *f, const mt_param *p, mt_dir dir)
{
    mt_qtensor packed = mt_qtensor_select(&p->weight, dir);
    return mt_pack_weight(
        &f->gathering,
        &(struct mt_pack_weight_args){ .dtype = p->compute, .master = f->real, .out = &packed });
}

/* From what the ranks sent. */
static mt_status unpack(mt_fsdp *f, int64_t wire, bool reached)
{
    const mt_wire *w = &f->wire[wire];
    mt_dir dir = (mt_dir)(wire % MT_DIR_COUNT);
    run runs[2];
    for (int64_t i = 0; i < w->count; i++) {
        const mt_fragment *x = &w->list[i];
        const mt_param *p = x->param;
        const char *sent = (const char *)f->staging + (size_t)x->rank * w->bytes;
        if (is_plain(f, x, dir)) {
            int count = reached ? 0 : runs_of(x, dir, runs);
            for (int j = 0; j < count; j++)
                MT_TRY(copy_bytes(f, runs[j].to, sent + runs[j].at, runs[j].bytes));
        } else if (mt_fsdp_native(p, dir)) {
            MT_TRY(widen(f, x, sent + x->codes));
            if (x->first + x->count == mt_param_count(p)) MT_TRY(pack(f, p, dir));
        } else {
            MT_TRY(unpack_lines(f, x, dir, sent));
        }
    }
    return MT_OK;
}

/* ---- fetching ----------------------------------------------------------------------------------
 */

bool mt_fsdp_reaches(const mt_fsdp *f, int64_t unit)
{
    return mt_comm_reaches(mt_fsdp_comm(f, unit), f->copies, f->copies_bytes);
}

/* Own fragments to their places in the copies, or, as they are, in staging. */
static mt_status spread(mt_fsdp *f, int64_t wire, const char *label)
{
    const mt_wire *w = &f->wire[wire];
    mt_dir dir = (mt_dir)(wire % MT_DIR_COUNT);
    mt_comm_run *list = calloc((size_t)(2 * w->own_count) + 1, sizeof *list);
    int count = 0;
    MT_REQUIRE(list, MT_ENOMEM, "fsdp: out of memory");
    for (int64_t i = w->own; i < w->own + w->own_count; i++) {
        const mt_fragment *x = &w->list[i];
        const char *own = (const char *)f->own + w->at;
        char *staged = (char *)f->staging + (size_t)x->rank * w->bytes;
        size_t end = x->scale_bytes ? x->scales + x->scale_bytes : x->codes + x->code_bytes;
        run runs[2] = { { staged + x->codes, x->codes, end - x->codes } };
        int n = is_plain(f, x, dir) ? runs_of(x, dir, runs) : 1;
        for (int j = 0; j < n; j++)
            list[count++] = (mt_comm_run){ runs[j].to, own + runs[j].at, runs[j].bytes };
    }
    mt_status status = mt_comm_spread(mt_fsdp_comm(f, wire / MT_DIR_COUNT), &f->gathering, list,
                                      count, w->bytes, label);
    free(list);
    return status;
}

mt_status mt_fsdp_fetch(mt_fsdp *f, int64_t wire, const char *label)
{
    const mt_wire *w = &f->wire[wire];
    mt_comm *comm = mt_fsdp_comm(f, wire / MT_DIR_COUNT);
    bool reached = mt_fsdp_reaches(f, wire / MT_DIR_COUNT) &&
                   (w->plain || mt_comm_reaches(comm, f->staging, f->staging_bytes));
    MT_TRY(reached ? spread(f, wire, label)
                   : mt_comm_all_gather(comm, &f->gathering, f->staging, (char *)f->own + w->at,
                                        w->bytes, label));
    return unpack(f, wire, reached);
}
