/* Weights in the order that the GEMM kernels read them, straight from the master or from a matrix
 * in place. */
#include "kernels/cpu/gemm_priv.h"
#include "kernels/cpu/lanes.h"

#if MT_ISA_LEVEL > 0

/* Lines of w (rows of memory) to lines of `pitch` reals. */
MT_INLINE void read_lines(mt_real *to, int64_t pitch, const gemm_matrix *w, int64_t j,
                          int64_t width, int64_t p, int64_t height)
{
    if (w->step == 1)
        for (int64_t i = 0; i < width; i++)
            gemm_read(to + i * pitch, w->real, gemm_at(w, j + i, p), height);
    else
        for (int64_t q = 0; q < height; q++)
            gemm_read(to + q * pitch, w->real, gemm_at(w, j, p + q), width);
}

/* VL neighbours of w's memory. */
MT_INLINE vec read_vector(const gemm_matrix *w, int64_t j, int64_t p)
{
    const void *from = gemm_at(w, j, p);
    return w->real ? vec_load(from) : vec_get(from);
}

/* VL columns from j on at depths [p, p + VL), of which `width` and `height` are in the matrix,
 * turned from lines of w down to rows of a panel. */
MT_INLINE void pack_square(mt_real *to, const gemm_matrix *w, int64_t j, int64_t width, int64_t p,
                           int64_t height)
{
    vec x[VL];
    if (width == VL && height == VL) {
        MT_UNROLL
        for (int i = 0; i < VL; i++) x[i] = read_vector(w, j + i, p);
    } else {
        mt_real edge[VL][VL] = { { 0 } };
        read_lines(edge[0], VL, w, j, width, p, height);
        for (int i = 0; i < VL; i++) x[i] = vec_load(edge[i]);
    }
    transpose(x);
    MT_UNROLL
    for (int q = 0; q < VL; q++)
        if (q < height) vec_store(to + q * GEMM_NR, x[q]);
}

static void pack_panel(mt_real *to, const gemm_matrix *w, int64_t j, int64_t cols, int64_t depth)
{
    int64_t width = mt_min(GEMM_NR, cols - j);
    if (w->step == 1) {
        for (int64_t p = 0; p < depth; p += VL, to += VL * GEMM_NR)
            for (int64_t v = 0; v < GEMM_NR; v += VL)
                pack_square(to + v, w, j + v, gemm_max(0, mt_min(VL, width - v)), p,
                            mt_min(VL, depth - p));
        return;
    }
    if (width < GEMM_NR) {
        memset(to, 0, (size_t)(depth * GEMM_NR) * sizeof(mt_real));
        read_lines(to, GEMM_NR, w, j, width, 0, depth);
        return;
    }
    for (int64_t p = 0; p < depth; p++, to += GEMM_NR)
        for (int64_t v = 0; v < GEMM_NR; v += VL) vec_store(to + v, read_vector(w, j + v, p));
}

#if MT_ELEM_BITS == 16
/* 16 columns at depths [p, p + PAIR_DEPTH), whose memory lies along the depth: a line's pairs are
 * turned into a column of the tile. */
static void pack_tile_along(mt_elem *to, const gemm_matrix *w, int64_t j, int64_t p)
{
    _Alignas(64) mt_elem lines[PAIR_COLS][PAIR_DEPTH];
    for (int64_t i = 0; i < PAIR_COLS; i++)
        for (int64_t v = 0; v < PAIR_DEPTH; v += VL)
            vec_put(lines[i] + v, read_vector(w, j + i, p + v));
    for (int64_t i = 0; i < PAIR_COLS; i += VL)
        for (int64_t q = 0; q < PAIR_DEPTH; q += 2 * VL) {
            vec x[VL];
            MT_UNROLL
            for (int r = 0; r < VL; r++) x[r] = vec_load((const void *)(lines[i + r] + q));
            transpose(x);
            MT_UNROLL
            for (int r = 0; r < VL; r++)
                vec_store((void *)(to + (q + 2 * r) * PAIR_COLS + 2 * i), x[r]);
        }
}

/* The same across the depth. */
static void pack_tile_across(mt_elem *to, const gemm_matrix *w, int64_t j, int64_t p)
{
    for (int64_t q = 0; q < PAIR_DEPTH; q += 2)
        for (int64_t v = 0; v < PAIR_COLS; v += VL)
            vec_put_pairs(to + q * PAIR_COLS + 2 * v, read_vector(w, j + v, p + q),
                          read_vector(w, j + v, p + q + 1));
}

/* 16 columns from j on, of which `width` are in the matrix. */
static void pack_pairs(mt_elem *to, const gemm_matrix *w, int64_t j, int64_t width, int64_t depth)
{
    for (int64_t p = 0; p < depth; p += PAIR_DEPTH, to += PAIR_TILE) {
        int64_t height = mt_min(PAIR_DEPTH, depth - p);
        mt_real edge[PAIR_TILE];
        gemm_matrix part = { edge, GEMM_PLAIN, true, w->outer, w->step };
        bool along = w->step == 1, whole = width == PAIR_COLS && height == PAIR_DEPTH;
        if (!whole) {
            memset(edge, 0, sizeof edge);
            read_lines(edge, along ? PAIR_DEPTH : PAIR_COLS, w, j, width, p, height);
            *(along ? &part.outer : &part.step) = along ? PAIR_DEPTH : PAIR_COLS;
        }
        if (along)
            pack_tile_along(to, whole ? w : &part, whole ? j : 0, whole ? p : 0);
        else
            pack_tile_across(to, whole ? w : &part, whole ? j : 0, whole ? p : 0);
    }
}
#endif

void MT_CPU(gemm_pack_columns)(gemm_form form, void *packed, const gemm_matrix *w, int64_t j,
                               int64_t cols, int64_t depth)
{
    void *to = (char *)packed + gemm_form_bytes(form, j, depth);
#if MT_ELEM_BITS == 16
    if (form == GEMM_PAIRS) {
        int64_t panel = PAIR_COLS * gemm_round_up(depth, PAIR_DEPTH);
        pack_pairs(to, w, j, mt_min(PAIR_COLS, cols - j), depth);
        pack_pairs((mt_elem *)to + panel, w, j + PAIR_COLS,
                   gemm_max(0, mt_min(PAIR_COLS, cols - j - PAIR_COLS)), depth);
        return;
    }
#endif
    pack_panel(to, w, j, cols, depth);
}

#else

/* Packed is the matrix in place as elements. */
void MT_CPU(gemm_pack_columns)(gemm_form form, void *packed, const gemm_matrix *w, int64_t j,
                               int64_t cols, int64_t depth)
{
    mt_elem *to = packed;
    int64_t end = mt_min(j + gemm_form_cols(form), cols);
    for (int64_t i = j; i < end; i++)
        for (int64_t p = 0; p < depth; p++) {
            mt_real x;
            gemm_read(&x, w->real, gemm_at(w, i, p), 1);
            mt_put(to + i * w->outer + p * w->step, x);
        }
}
#endif

size_t MT_CPU(packed_bytes)(mt_dtype dtype, mt_dir dir, int64_t members, int64_t m, int64_t k)
{
    (void)dtype;
    int64_t cols = dir == MT_ROW ? m : k, depth = dir == MT_ROW ? k : m;
    return (size_t)members * gemm_form_bytes(GEMM_PACKED, cols, depth);
}

/* One direction of a packed weight: `parts` tasks for each member. */
struct packing {
    char *codes;
    int64_t cols, depth, parts;
    gemm_matrix master; /* of member 0 */
};

static struct packing packing(const struct mt_pack_weight_args *args, mt_dir dir)
{
    const mt_group *g = &args->out->group;
    bool row = dir == MT_ROW;
    struct packing p = {
        .codes = args->out->dir[dir].codes,
        .cols = row ? g->m : g->k,
        .depth = row ? g->k : g->m,
        .master = { .data = args->master, .real = !args->halves, .outer = 1, .step = 1 },
    };
    *(row ? &p.master.outer : &p.master.step) = g->k;
    if (p.codes) p.parts = mt_ceil_div(p.cols, gemm_form_cols(GEMM_PACKED));
    return p;
}

static void pack_part(const struct packing *p, int64_t member, int64_t part)
{
    gemm_matrix w = p->master;
    int64_t first = member * p->cols * p->depth;
    w.data = w.real ? (const void *)((const mt_real *)w.data + first)
                    : (const void *)((const mt_elem *)w.data + first);
    char *to = p->codes + (size_t)member * gemm_form_bytes(GEMM_PACKED, p->cols, p->depth);
    MT_CPU(gemm_pack_columns)
    (GEMM_PACKED, to, &w, part * gemm_form_cols(GEMM_PACKED), p->cols, p->depth);
}

mt_status MT_CPU(pack_weight)(mt_stream *stream, const struct mt_pack_weight_args *args)
{
    struct packing row = packing(args, MT_ROW), col = packing(args, MT_COL);
    int64_t parts =
        row.parts + col.parts; /* a member's two directions in turn, while it is in a cache */
#pragma omp parallel for num_threads(stream->device->threads) schedule(static)
    for (int64_t t = 0; t < args->out->group.members * parts; t++) {
        int64_t part = t % parts;
        if (part < row.parts)
            pack_part(&row, t / parts, part);
        else
            pack_part(&col, t / parts, part - row.parts);
    }
    return MT_OK;
}
