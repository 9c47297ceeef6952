/* One block of a grouped GEMM by BLAS, one thread each: the portable instruction set. */
#include "kernels/cpu/gemm_priv.h"

#if MT_ISA_LEVEL == 0
#include <cblas.h>

#if MT_ELEM_BITS == 64
#define BLAS_GEMM cblas_dgemm
#else
#define BLAS_GEMM cblas_sgemm
#endif

enum { ROWS = 512, COLS = 512, DEPTH = 256 };

/* Where operands or results are not reals: chunks of DEPTH of them. */
struct scratch {
    mt_real a[ROWS * DEPTH], b[COLS * DEPTH], d[ROWS * COLS];
};

/* An operand as BLAS takes it. */
struct blas_matrix {
    const mt_real *data;
    bool along; /* X(i, p) = data[i * ld + p], else data[p * ld + i] */
    int ld;
};

/* Depths p0 .. p0 + depth - 1 of `count` rows of x, in place where they are reals already. */
static struct blas_matrix blas_matrix(mt_real *to, const gemm_matrix *x, int64_t count, int64_t p0,
                                      int64_t depth)
{
    bool along = x->step == 1;
    if (x->real) { /* BLAS wants ld to span a line even where there is only one */
        int64_t ld = along ? gemm_max(x->outer, depth) : gemm_max(x->step, count);
        return (struct blas_matrix){ gemm_at(x, 0, p0), along, (int)gemm_max(ld, 1) };
    }
    int64_t lines = along ? count : depth, length = along ? depth : count;
    for (int64_t i = 0; i < lines; i++)
        gemm_read(to + i * length, false, along ? gemm_at(x, i, p0) : gemm_at(x, 0, p0 + i),
                  length);
    return (struct blas_matrix){ to, along, (int)gemm_max(length, 1) };
}

/* Fills the block with C and the bias. */
static void fill(const gemm_block *k, mt_real *d, int64_t ld)
{
    for (int64_t r = 0; r < k->rows; r++)
        for (int64_t j = 0; j < k->cols; j++) {
            mt_real x = k->bias ? k->bias[j] : 0;
            int64_t at = r * k->ld + j;
            if (k->c)
                x += k->d_real ? ((const mt_real *)k->c)[at] : mt_get((const mt_elem *)k->c + at);
            d[r * ld + j] = x;
        }
}

static void block(const gemm_block *k, void *scratch)
{
    struct scratch *s = scratch;
    mt_real *d = k->d_real ? k->d : s->d;
    int64_t ld = k->d_real ? k->ld : k->cols, length = k->a.real && k->b.real ? k->depth : DEPTH;
    bool filled = k->c || k->bias || !k->depth;
    if (filled) fill(k, d, ld);
    for (int64_t p = 0; p < k->depth; p += length) {
        int64_t depth = mt_min(length, k->depth - p);
        struct blas_matrix a = blas_matrix(s->a, &k->a, k->rows, p, depth);
        struct blas_matrix b = blas_matrix(s->b, &k->b, k->cols, p, depth);
        BLAS_GEMM(CblasRowMajor, a.along ? CblasNoTrans : CblasTrans,
                  b.along ? CblasTrans : CblasNoTrans, (int)k->rows, (int)k->cols, (int)depth, 1,
                  a.data, a.ld, b.data, b.ld, filled || p ? 1 : 0, d, (int)ld);
    }
    if (!k->d_real)
        for (int64_t r = 0; r < k->rows; r++)
            for (int64_t j = 0; j < k->cols; j++)
                mt_put((mt_elem *)k->d + r * k->ld + j, d[r * ld + j]);
}

static void prepare(void)
{
    openblas_set_num_threads(1);
}

const gemm_kernel MT_CPU(gemm_blocks) = {
    .rows = ROWS,
    .cols = COLS,
    .unit = 1,
    .fewest_rows = 64,
    .fewest_deep = 64,
    .cut_for = 4, /* BLAS may add in another order at the edges of a block */
    .weight = GEMM_PLAIN,
    .scratch = (sizeof(struct scratch) + 63) / 64 * 64,
    .block = block,
    .prepare = prepare,
};
#endif
