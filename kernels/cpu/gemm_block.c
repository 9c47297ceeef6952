/* One block of a grouped GEMM. The depth is walked in chunks of equal length, at most GEMM_KC,
 * which depend on the depth alone: for each, A becomes reals in L2, and every panel of B, in L1,
 * meets all tiles of A, or those of one strip after the other. What comes next is asked for while
 * tiles are at work: operands of this size come from afar, and no prefetcher follows their rows. A
 * core waits for few lines at once, so that the next block is asked for line by line, within the
 * tiles: many lines together would hold up the tile that asks. */
#include "kernels/cpu/gemm_priv.h"

#if MT_ISA_LEVEL > 0

/* A panel of A (down the columns) is written in whole vectors: WIDE reals for each depth, of which
 * GEMM_MR count. */
enum {
    WIDE = (GEMM_MR + VL - 1) / VL * VL,
    A_PANEL = GEMM_KC * GEMM_MR + WIDE,
    MOST_TILES = (GEMM_MC + GEMM_MR - 1) / GEMM_MR,
    A_REALS = MOST_TILES * A_PANEL > GEMM_MC *GEMM_LD ? MOST_TILES *A_PANEL : GEMM_MC *GEMM_LD,
    B_COLS = 8 * GEMM_NR,
    B_REALS = GEMM_KC * B_COLS,
    SUM_REALS = MT_ELEM_BITS == 16 ? GEMM_MC * GEMM_NC : 0,
    AT_ONCE = 8,             /* lines of an operand that are copied together */
    MOST_AHEAD = GEMM_L2 / 2 /* bytes that are asked for of one matrix */
};
_Static_assert(GEMM_NC % GEMM_NR == 0, "blocks begin at a panel");
_Static_assert(GEMM_KC % 8 == 0, "chunks hold whole pairs");

/* Memory that tiles ask for, a share each: parts in their order. */
struct ahead {
    struct {
        const char *at;
        int64_t bytes;
    } parts[4];
    int count, part;
    int64_t done, share; /* bytes of the current part; bytes for a tile */
};

struct scratch {
    struct ahead ahead;
    _Alignas(64) mt_real a[(A_REALS + 15) / 16 * 16];
    _Alignas(64) mt_real b[B_REALS];
    _Alignas(64) mt_real sums[SUM_REALS + 16]; /* of the chunks so far, where D cannot hold them */
};

/* Rows of the next tile: the last two share what is left, so that no tile is thin. */
MT_INLINE int64_t tile_rows(int64_t left)
{
    return left <= GEMM_MR ? left : left < 2 * GEMM_MR ? (left + 1) / 2 : GEMM_MR;
}

/* The first `width` of `wide` neighbours of each of `lines` lines of an operand, `ld` apart or
 * where `at` says, to lines of `pitch` reals. Where it may read them all it copies them all, in
 * vectors. Asks for the lines that come next, of the `left` there are. */
MT_INLINE void copy_lines(mt_real *to, int64_t pitch, bool real, const void *from, int64_t ld,
                          const int32_t *at, int64_t left, int wide, int64_t width,
                          bool may_read_all)
{
    int64_t size = (int64_t)(real ? sizeof(mt_real) : sizeof(mt_elem)),
            lines = mt_min(AT_ONCE, left);
    for (int64_t q = 0; q < lines; q++, to += pitch) {
        int64_t next = q + AT_ONCE;
        const char *line = (const char *)from + (at ? at[q] : q) * ld * size;
        if (!at || next < left)
            __builtin_prefetch((const char *)from + (at ? at[next] : next) * ld * size);
        if (!may_read_all) {
            gemm_read(to, real, line, width);
            continue;
        }
        for (int v = 0; v < wide; v += VL)
            vec_store(to + v, real ? vec_load((const mt_real *)(const void *)line + v)
                                   : vec_get((const mt_elem *)(const void *)line + v));
    }
}

/* Rows of A, in place or where they are gathered from: a[(r - begin) * GEMM_LD + p]. */
static void copy_rows(mt_real *to, const gemm_block *k, int64_t begin, int64_t end, int64_t p0,
                      int64_t depth)
{
    for (int64_t r = begin; r < end; r++, to += GEMM_LD)
        gemm_read(to, k->a.real, gemm_at(&k->a, k->a_rows ? k->a_rows[r] : r, p0), depth);
}

/* Whether the tiles may read A where it is: reals, and rows that do not all want the same lines of
 * L1, or columns that few panels pass, in one chunk. */
static bool in_place(const gemm_block *k)
{
    const gemm_matrix *a = &k->a;
    if (!a->real || k->a_rows) return false;
    if (a->step == 1) return a->outer * (int64_t)sizeof(mt_real) % 4096 != 0;
    return k->cols <= GEMM_COLUMNS * GEMM_NR && k->depth <= GEMM_KC &&
           a->step * (int64_t)sizeof(mt_real) <= 2048;
}

/* A down its columns: tile t's rows at a[t * A_PANEL + p * GEMM_MR]. What a vector writes too far
 * is overwritten by the next depth, or falls between two panels; what it reads too far is of the
 * next depths, where there are any. */
MT_INLINE void copy_tiles(mt_real *to, bool real, const gemm_matrix *a, int64_t rows, int64_t p0,
                          int64_t depth)
{
    for (int64_t p = 0; p < depth; p += AT_ONCE) {
        mt_real *panel = to + p * GEMM_MR;
        for (int64_t r = 0, h; r < rows; r += h, panel += A_PANEL) {
            h = tile_rows(rows - r);
            copy_lines(panel, GEMM_MR, real, gemm_at(a, r, p0 + p), a->step, NULL, depth - p, WIDE,
                       h, r + WIDE <= rows || (depth - p - AT_ONCE) * a->step >= WIDE);
        }
    }
}

/* At most B_COLS columns of B, which lies along its columns, as panels [depth][GEMM_NR]. */
MT_INLINE void copy_panels(mt_real *to, bool real, const gemm_block *k, bool gathers, int64_t j,
                           int64_t p0, int64_t depth)
{
    int64_t cols = mt_min(B_COLS, k->cols - j);
    for (int64_t p = 0; p < depth; p += AT_ONCE)
        for (int64_t i = 0; i < cols; i += GEMM_NR)
            copy_lines(to + i * depth + p * GEMM_NR, GEMM_NR, real,
                       gemm_at(&k->b, j + i, gathers ? 0 : p0 + p), k->b.step,
                       gathers ? k->b_depths + p0 + p : NULL, depth - p, GEMM_NR, cols - i,
                       cols - i >= GEMM_NR);
}

#if MT_ELEM_BITS == 16
/* A chunk of packed pairs as a panel of reals; p0 is even. */
static void read_pairs(mt_real *to, const mt_elem *packed, int64_t whole, int64_t p0, int64_t depth)
{
    for (int64_t p = 0; p < depth; p += 2, to += 2 * GEMM_NR)
        for (int v = 0; v < GEMM_NR; v += VL) {
            int64_t panel = v / PAIR_COLS, col = v % PAIR_COLS;
            vec first, second;
            vec_get_pairs(&first, &second,
                          packed + panel * PAIR_COLS * whole + (p0 + p) * PAIR_COLS + col * 2);
            vec_store(to + v, first);
            vec_store(to + GEMM_NR + v, second);
        }
}
#endif

/* The panel of B with column j and the chunk's depths, made in `s` where it is not there yet. */
static const mt_real *panel_of(struct scratch *s, const gemm_block *k, int64_t j, int64_t p0,
                               int64_t depth)
{
    if (k->b.form == GEMM_PLAIN) {
        if (j % B_COLS == 0 && k->b_depths)
            copy_panels(s->b, k->b.real, k, true, j, p0, depth);
        else if (j % B_COLS == 0 && k->b.real)
            copy_panels(s->b, true, k, false, j, p0, depth);
        else if (j % B_COLS == 0)
            copy_panels(s->b, false, k, false, j, p0, depth);
        return s->b + j % B_COLS * depth;
    }
    const void *packed = gemm_panel_at(k->b.form, k->b.data, j, k->depth);
#if MT_ELEM_BITS == 16
    if (k->b.form == GEMM_PAIRS) {
        read_pairs(s->b, packed, gemm_round_up(k->depth, PAIR_DEPTH), p0, depth);
        return s->b;
    }
#endif
    return (const mt_real *)packed + p0 * GEMM_NR;
}

/* Asks for depths `begin` .. `end` - 1 of B's panel at column j, while the one before it is at
 * work. */
static void fetch_panel(const gemm_block *k, int64_t j, int64_t begin, int64_t end)
{
    if (k->b.form == GEMM_PLAIN) return;
    size_t line = GEMM_NR * (k->b.form == GEMM_PAIRS ? sizeof(mt_elem) : sizeof(mt_real));
    const char *panel = gemm_panel_at(k->b.form, k->b.data, j, k->depth);
    for (size_t at = (size_t)begin * line; at < (size_t)end * line; at += 64)
        __builtin_prefetch(panel + at, 0, 2);
}

/* Asks for panel j's share of rows [begin, end) of A, those in place into L1. */
MT_INLINE void fetch_rows(const gemm_block *k, int64_t begin, int64_t end, int64_t p0,
                          int64_t depth, int64_t j)
{
    const int32_t *at = k->a_rows;
    int64_t line = 64 / (int64_t)sizeof(mt_real), rows = end - begin, ld = k->a.outer;
    int64_t r = begin + rows * j / k->cols;
    int64_t to = begin + rows * mt_min(j + GEMM_NR, k->cols) / k->cols;
    if (!at) {
        const mt_real *a = (const mt_real *)k->a.data + r * ld + p0;
        for (; r < to; r++, a += ld)
            for (int64_t p = 0; p < depth; p += line) __builtin_prefetch(a + p);
        return;
    }
    const mt_elem *a = (const mt_elem *)k->a.data + p0;
    for (; r < to; r++)
        for (int64_t p = 0; p < depth; p += line) __builtin_prefetch(a + at[r] * ld + p, 0, 2);
}

/* Asks for panel j's share of depths `begin` .. `end` - 1 of an operand down its columns, at their
 * places or where `at` says. */
static void fetch_lines(const gemm_matrix *x, const int32_t *at, int64_t width, int64_t begin,
                        int64_t end, int64_t j, int64_t cols)
{
    int64_t line = 64 / (int64_t)(x->real ? sizeof(mt_real) : sizeof(mt_elem));
    int64_t depth = end - begin, next = mt_min(j + GEMM_NR, cols);
    for (int64_t p = begin + depth * j / cols; p < begin + depth * next / cols; p++)
        for (int64_t i = 0; i < width; i += line)
            __builtin_prefetch(gemm_at(x, i, at ? at[p] : p), 0, 2);
}

/* Rows of A that stay in L1 while all panels of B pass, if those wait in L2 as reals. Other forms
 * of B are made panel by panel, each for all rows. */
static int64_t strip_rows(const gemm_block *k, int64_t depth)
{
    if (k->b.form != GEMM_PANELS) return k->rows;
    int64_t rows = GEMM_STRIP / (gemm_max(depth, 1) * (int64_t)sizeof(mt_real));
    return gemm_max(rows / GEMM_MR, 1) * GEMM_MR;
}

/* Element (r, j) of a result or of what is added to it. */
MT_INLINE const void *moved(const void *base, bool real, int64_t at)
{
    return real ? (const void *)((const mt_real *)base + at)
                : (const void *)((const mt_elem *)base + at);
}

/* The SwiGLU of rows [begin, end) of D, or its gradient, while they are in a cache. */
static void beside(const gemm_block *k, int64_t begin, int64_t end)
{
    mt_elem *d = (mt_elem *)k->d + begin * k->ld;
    int64_t width = k->act ? k->cols / 2 : k->cols;
    for (int64_t r = begin; r < end; r++, d += k->ld)
        if (k->act)
            MT_CPU(swiglu_row)((mt_elem *)k->act + r * width, d, d + width, width);
        else {
            const mt_elem *z = (const mt_elem *)k->z + r * k->ld;
            MT_CPU(swiglu_row_bwd)(d - k->half, d, d, z, z + k->half, width);
        }
}

/* Where the tiles read A's rows [0, rows) or, where they are gathered, [begin, end), and their
 * pitch: made in `s` where they are not in place. */
static const mt_real *rows_of(struct scratch *s, const gemm_block *k, int64_t *ld, int64_t begin,
                              int64_t end, int64_t p0, int64_t depth)
{
    *ld = k->a.outer;
    if (in_place(k)) return gemm_at(&k->a, 0, p0);
    *ld = GEMM_LD;
    copy_rows(s->a, k, begin, end, p0, depth);
    return s->a;
}

static int64_t size_of(bool real)
{
    return (int64_t)(real ? sizeof(mt_real) : sizeof(mt_elem));
}

static void add_ahead(struct ahead *a, const void *at, int64_t bytes)
{
    if (!at || bytes <= 0) return;
    a->parts[a->count].at = at;
    a->parts[a->count++].bytes = mt_min(bytes, MOST_AHEAD);
}

/* The lines in memory of an operand's first `count` rows and `depth` depths. */
static void add_operand(struct ahead *a, const gemm_matrix *x, int64_t count, int64_t depth)
{
    int64_t bytes = (x->step == 1 ? count * x->outer : depth * x->step) * size_of(x->real);
    if (x->form != GEMM_PLAIN) bytes = (int64_t)gemm_form_bytes(x->form, count, depth);
    add_ahead(a, x->data, bytes);
}

/* What the tiles of a block ask for: its z, and the next block's operands and results. Gathered
 * rows are many times in the product, and in a cache. */
static void plan_ahead(struct ahead *a, const gemm_block *k)
{
    const gemm_block *n = k->next;
    int64_t bytes = 0, tiles = mt_ceil_div(k->rows, GEMM_MR) * mt_ceil_div(k->cols, GEMM_NR) *
                               gemm_max(1, mt_ceil_div(k->depth, GEMM_KC));
    *a = (struct ahead){ 0 };
    if (k->z) add_ahead(a, k->z, k->rows * k->ld * size_of(false));
    if (n && !n->b_depths && n->b.data != k->b.data) add_operand(a, &n->b, n->cols, n->depth);
    if (n && !n->a_rows) add_operand(a, &n->a, n->rows, n->depth);
    if (n && !n->z) add_ahead(a, n->d, n->rows * n->ld * size_of(n->d_real));
    for (int i = 0; i < a->count; i++) bytes += a->parts[i].bytes;
    a->share = bytes / tiles + 64;
}

/* A tile's share, of one part: at most a line for each depth. */
static void ask(gemm_tile_io *io, struct ahead *a, int64_t depth)
{
    if (a->part == a->count || depth == 0) return;
    io->ask = a->parts[a->part].at + a->done;
    io->ask_step = mt_min(64, mt_ceil_div(a->share, depth));
    a->done += io->ask_step * depth;
    if (a->done >= a->parts[a->part].bytes) a->part++, a->done = 0;
}

/* All panels of B against rows [begin, end) of A, of which `lines` is the first. Returns what
 * follows the last. */
MT_INLINE const mt_real *strip(const gemm_block *k, struct scratch *s, const gemm_tile_io *whole,
                               const mt_real *lines, int64_t ld, int64_t begin, int64_t end,
                               int64_t p0, int64_t depth)
{
    bool columns = k->a.step != 1, stays = k->a_rows || ld == k->a.outer;
    bool paneled = columns && lines == s->a;          /* columns have one strip */
    int64_t after = mt_min(p0 + 2 * depth, k->depth); /* of the next chunk */
    int64_t next = mt_min(2 * end - begin, k->rows);  /* of the next strip */
    const mt_real *a = lines;
    for (int64_t j = 0; j < k->cols; j += GEMM_NR) {
        const mt_real *b = panel_of(s, k, j, p0, depth);
        a = lines;
        if (columns) {
            fetch_lines(&k->a, NULL, k->rows, p0 + depth, after, j, k->cols);
            fetch_lines(&k->b, k->b_depths, k->cols, p0 + depth, after, j, k->cols);
        } else if (stays)
            fetch_rows(k, end, next, p0, depth, j);
        for (int64_t r = begin, h; r < end; r += h) {
            gemm_tile_io io = *whole;
            io.ask = (const char *)b;
            ask(&io, &s->ahead, depth);
            h = tile_rows(k->rows - r);
            if (io.add) io.add = moved(io.add, io.add_real, r * io.add_ld + j);
            io.out = (void *)(uintptr_t)moved(io.out, io.out_real, r * io.out_ld + j);
            if (p0 == 0 && k->bias) io.bias = k->bias + j;
            if (begin == 0 && j + GEMM_NR < k->cols)
                fetch_panel(k, j + GEMM_NR, p0 + depth * r / end, p0 + depth * (r + h) / end);
            MT_CPU(gemm_tile)(columns, ld, h, mt_min(GEMM_NR, k->cols - j), depth, a, b, &io);
            a += paneled ? A_PANEL : columns ? h : h * ld;
        }
    }
    return a;
}

/* Where a strip that begins there ends: after whole tiles. */
static int64_t strip_end(const gemm_block *k, int64_t begin, int64_t depth)
{
    int64_t end = begin, most = mt_min(begin + strip_rows(k, depth), k->rows);
    while (end < most) end += tile_rows(k->rows - end);
    return end;
}

/* Depths p0 .. p0 + depth - 1: the first chunk adds C and the bias, every later one what is there.
 */
static void chunk(const gemm_block *k, struct scratch *s, int64_t p0, int64_t depth)
{
    bool columns = k->a.step != 1, first = p0 == 0, last = p0 + depth == k->depth;
    gemm_tile_io whole = { .add = k->c, .add_ld = k->ld, .add_real = k->d_real };
    if (!first) whole = (gemm_tile_io){ .add = s->sums, .add_ld = GEMM_NC, .add_real = true };
    whole.out = s->sums, whole.out_ld = GEMM_NC, whole.out_real = true;
    if (k->d_real || last) whole.out = k->d, whole.out_ld = k->ld, whole.out_real = k->d_real;
    if (k->d_real && !first) whole.add = k->d, whole.add_ld = k->ld;

    const mt_real *lines = s->a;
    int64_t ld = GEMM_MR;
    if (columns && in_place(k))
        lines = gemm_at(&k->a, 0, p0), ld = k->a.step;
    else if (columns && k->a.real)
        copy_tiles(s->a, true, &k->a, k->rows, p0, depth);
    else if (columns)
        copy_tiles(s->a, false, &k->a, k->rows, p0, depth);
    else if (!k->a_rows)
        lines = rows_of(s, k, &ld, 0, k->rows, p0, depth);
    for (int64_t begin = 0, end = 0; begin < k->rows; begin = end) {
        end = strip_end(k, begin, depth);
        if (k->a_rows) lines = rows_of(s, k, &ld, begin, end, p0, depth);
        lines = strip(k, s, &whole, lines, ld, begin, end, p0, depth);
        if (last && (k->act || k->z)) beside(k, begin, end);
    }
}

static void block(const gemm_block *k, void *scratch)
{
    int64_t chunks = gemm_max(1, mt_ceil_div(k->depth, GEMM_KC));
    int64_t length = gemm_round_up(mt_ceil_div(k->depth, chunks), 8), p = 0;
    plan_ahead(&((struct scratch *)scratch)->ahead, k);
    do {
        chunk(k, scratch, p, mt_min(length, k->depth - p));
        p += length;
    } while (p < k->depth);
}

const gemm_kernel MT_CPU(gemm_blocks) = {
    .rows = GEMM_MC,
    .cols = GEMM_NC,
    .unit = GEMM_NR,
    .fewest_rows = 8 * GEMM_MR,
    .fewest_deep = 2 * GEMM_MR,
    .weight = GEMM_PANELS,
    .scratch = sizeof(struct scratch),
    .block = block,
};
#endif
