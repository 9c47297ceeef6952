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
        UNROLL
        for (int i = 0; i < VL; i++) x[i] = read_vector(w, j + i, p);
    } else {
        mt_real edge[VL][VL] = { { 0 } };
        read_lines(edge[0], VL, w, j, width, p, height);
        for (int i = 0; i < VL; i++) x[i] = vec_load(edge[i]);
    }
    transpose(x);
    UNROLL
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
static uint32_t pair(mt_real first, mt_real second)
{
    return (uint32_t)mt_f32_to_bf16(first) | (uint32_t)mt_f32_to_bf16(second) << 16;
}

/* 16 columns from j on, of which `width` are in the matrix. */
static void pack_pairs(uint32_t *to, const gemm_matrix *w, int64_t j, int64_t width, int64_t depth)
{
    for (int64_t p = 0; p < depth; p += PAIR_DEPTH, to += PAIR_TILE / 2) {
        mt_real tile[PAIR_TILE] = { 0 };
        int64_t height = mt_min(PAIR_DEPTH, depth - p);
        if (w->step == 1) {
            uint32_t lines[PAIR_COLS][PAIR_DEPTH / 2];
            read_lines(tile, PAIR_DEPTH, w, j, width, p, height);
            for (int64_t i = 0; i < PAIR_COLS; i++)
                for (int64_t q = 0; q < PAIR_DEPTH / 2; q++)
                    lines[i][q] =
                        pair(tile[i * PAIR_DEPTH + 2 * q], tile[i * PAIR_DEPTH + 2 * q + 1]);
            for (int64_t q = 0; q < PAIR_DEPTH / 2; q++)
                for (int64_t i = 0; i < PAIR_COLS; i++) to[q * PAIR_COLS + i] = lines[i][q];
        } else {
            read_lines(tile, PAIR_COLS, w, j, width, p, height);
            for (int64_t q = 0; q < PAIR_DEPTH / 2; q++)
                for (int64_t i = 0; i < PAIR_COLS; i++)
                    to[q * PAIR_COLS + i] =
                        pair(tile[2 * q * PAIR_COLS + i], tile[(2 * q + 1) * PAIR_COLS + i]);
        }
    }
}
#endif

void MT_CPU(gemm_pack_columns)(gemm_form form, void *packed, const gemm_matrix *w, int64_t j,
                               int64_t cols, int64_t depth)
{
    void *to = (char *)packed + gemm_form_bytes(form, j, depth);
#if MT_ELEM_BITS == 16
    if (form == GEMM_PAIRS) {
        int64_t panel = PAIR_COLS * gemm_round_up(depth, PAIR_DEPTH) / 2;
        pack_pairs(to, w, j, mt_min(PAIR_COLS, cols - j), depth);
        pack_pairs((uint32_t *)to + panel, w, j + PAIR_COLS,
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
