/* The micro-kernel: GEMM_MR x GEMM_NR sums in registers, walked through the depth in order. Every
 * element of a tile is one chain of fused multiply-adds from zero, whatever the tile's shape. */
#include "kernels/cpu/gemm_priv.h"

#if MT_ISA_LEVEL > 0
_Static_assert(GEMM_VECS == 2, "tile holds two vectors of a row");

/* Sum i of a tile: which row, and which column the vector begins at. */
enum { SUMS = GEMM_MR * GEMM_VECS };
#define ROW(i) ((i) / GEMM_VECS)
#define COL(i) ((i) % GEMM_VECS * VL)

/* A tile that stops short of a panel's columns. */
__attribute__((noinline)) static void put_edge(const mt_real *sums, int64_t rows, int64_t cols,
                                               const gemm_tile_io *io)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < cols; j++) {
            mt_real x = sums[r * GEMM_NR + j];
            int64_t from = r * io->add_ld + j, to = r * io->out_ld + j;
            if (io->add)
                x += io->add_real ? ((const mt_real *)io->add)[from]
                                  : mt_get((const mt_elem *)io->add + from);
            if (io->bias) x += io->bias[j];
            if (io->out_real)
                ((mt_real *)io->out)[to] = x;
            else
                mt_put((mt_elem *)io->out + to, x);
        }
}

MT_INLINE void put_full(int rows, vec sums[], const gemm_tile_io *io)
{
    const int count = rows * GEMM_VECS;
    if (io->add && io->add_real) {
        const mt_real *add = io->add;
        MT_UNROLL
        for (int i = 0; i < count; i++)
            sums[i] = vec_add(sums[i], vec_load(add + ROW(i) * io->add_ld + COL(i)));
    } else if (io->add) {
        const mt_elem *add = io->add;
        MT_UNROLL
        for (int i = 0; i < count; i++)
            sums[i] = vec_add(sums[i], vec_get(add + ROW(i) * io->add_ld + COL(i)));
    }
    if (io->bias) {
        MT_UNROLL
        for (int i = 0; i < count; i++) sums[i] = vec_add(sums[i], vec_load(io->bias + COL(i)));
    }
    if (io->out_real) {
        mt_real *out = io->out;
        MT_UNROLL
        for (int i = 0; i < count; i++) vec_store(out + ROW(i) * io->out_ld + COL(i), sums[i]);
    } else {
        mt_elem *out = io->out;
        MT_UNROLL
        for (int i = 0; i < count; i++) vec_put(out + ROW(i) * io->out_ld + COL(i), sums[i]);
    }
}

/* Three lines of A are within reach of one pointer: at 0, ld and 2 ld. */
enum { REACH = 3, POINTERS = (GEMM_MR + REACH - 1) / REACH };

enum { SOON = 6 /* depths until columns of A that are asked for */ };

/* columns: A's rows are neighbours, its depths may be far from each other. */
MT_INLINE void tile(bool columns, int rows, int64_t ld, int64_t step, int64_t cols, int64_t depth,
                    const mt_real *a, const mt_real *b, const gemm_tile_io *io)
{
    vec sums[SUMS];
    const mt_real *lines[POINTERS];
    MT_UNROLL
    for (int i = 0; i < rows * GEMM_VECS; i++) sums[i] = vec_zero();
    MT_UNROLL
    for (int i = 0; i * REACH < rows; i++) lines[i] = a + i * REACH * ld;
    const char *ask = io->ask;
    int64_t ask_step = io->ask_step;
    for (int64_t p = 0; p < depth; p++, b += GEMM_NR, ask += ask_step) {
        __builtin_prefetch(ask, 0, 2);
        if (columns && GEMM_COLUMNS > 0) {
            __builtin_prefetch(lines[0] + SOON * step);
            __builtin_prefetch(lines[0] + SOON * step + rows - 1);
        }
        vec b0 = vec_load(b), b1 = vec_load(b + VL);
        MT_UNROLL
        for (int r = 0; r < rows; r++) {
            vec x = vec_all(lines[r / REACH][r % REACH * ld]);
            sums[2 * r] = vec_fma(x, b0, sums[2 * r]);
            sums[2 * r + 1] = vec_fma(x, b1, sums[2 * r + 1]);
        }
        MT_UNROLL
        for (int i = 0; i * REACH < rows; i++) lines[i] += step;
    }
    if (cols == GEMM_NR) {
        put_full(rows, sums, io);
        return;
    }
    mt_real edge[GEMM_MR * GEMM_NR];
    MT_UNROLL
    for (int i = 0; i < rows * GEMM_VECS; i++) vec_store(edge + ROW(i) * GEMM_NR + COL(i), sums[i]);
    put_edge(edge, rows, cols, io);
}

/* One function for each number of rows and each way A lies. */
#if MT_ISA_LEVEL == 512
#define TILES(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14)
#else
#define TILES(X) X(1) X(2) X(3) X(4) X(5) X(6)
#endif

#define TILE(R)                                                                                    \
    static void by_row_##R(int64_t pitch, int64_t cols, int64_t depth, const mt_real *a,           \
                           const mt_real *b, const gemm_tile_io *io)                               \
    {                                                                                              \
        tile(false, R, pitch, 1, cols, depth, a, b, io);                                           \
    }                                                                                              \
    static void by_column_##R(int64_t pitch, int64_t cols, int64_t depth, const mt_real *a,        \
                              const mt_real *b, const gemm_tile_io *io)                            \
    {                                                                                              \
        tile(true, R, 1, pitch, cols, depth, a, b, io);                                            \
    }
TILES(TILE)

typedef void tile_function(int64_t pitch, int64_t cols, int64_t depth, const mt_real *a,
                           const mt_real *b, const gemm_tile_io *io);
static tile_function *const tiles[2][GEMM_MR + 1] = {
#define BY_ROW(R)    [R] = by_row_##R,
#define BY_COLUMN(R) [R] = by_column_##R,
    { TILES(BY_ROW) },
    { TILES(BY_COLUMN) },
};

void MT_CPU(gemm_tile)(bool columns, int64_t pitch, int64_t rows, int64_t cols, int64_t depth,
                       const mt_real *a, const mt_real *b, const gemm_tile_io *io)
{
    tiles[columns][rows](pitch, cols, depth, a, b, io);
}
#endif
