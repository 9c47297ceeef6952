/* Inside the cpu grouped GEMM. A product is cut into blocks of its result, D(i, j) = sum_p A(i, p)
 * B(j, p):
 *
 *   gemm.c        the members' shapes, the cut into blocks, the threads
 *   gemm_pack.c   weights in the order the kernels read them
 *   gemm_block.c  one block: operands to reals in cache order, then tiles
 *   moe_gemm.c    what is beside a product of an expert layer
 *   gemm_tile.c   the micro-kernel: a tile of the result in registers
 *   gemm_decode.c operands of other formats, made plain
 *   gemm_blas.c   one block by BLAS: the portable instruction set
 *   gemm_pairs.c  one block by pairs of bf16: AMX tiles, dot products */
#pragma once

#include "kernels/cpu/backend.h"
#include "kernels/cpu/gemm_vec.h"

typedef enum gemm_form {
    GEMM_PLAIN,  /* in place, two strides */
    GEMM_PANELS, /* reals: panels of GEMM_NR columns, each [depth][GEMM_NR], zeros past the last
                    column */
    GEMM_PAIRS /* elements, bf16: an even number of panels of 16 columns, each depth / 32 rounded up
                  tiles of [16 depth pairs][16 columns][2], zeros past the last column and depth
                */
} gemm_form;

/* An operand seen as X(i, p), i a row or column of the result, p the depth. In place, X(i, p) is
 * data[i * outer + p * step], and one of the strides is 1. */
typedef struct gemm_matrix {
    const void *data;
    gemm_form form;
    bool real; /* mt_real, else mt_elem */
    int64_t outer, step;
} gemm_matrix;

/* D(i, j) = sum_p A(i, p) B(j, p) + C(i, j) + bias[j]. C may be D, or NULL; bias may be NULL. */
typedef struct gemm_block {
    int64_t rows, cols, depth;
    gemm_matrix a, b;
    const int32_t *a_rows;   /* where row i of A stands: A(i, p) is at (a_rows[i], p). NULL: at i */
    const int32_t *b_depths; /* where depth p of B stands; NULL: at p */
    const void *c;
    void *d;
    bool d_real; /* C and D */
    int64_t ld;  /* of C and D */
    const mt_real *bias;
    /* With D complete, its SwiGLU [rows, cols / 2]: D is all columns then. Or D, elements, is the
     * second half of rows whose first half is `half` elements before: what z, rows of the same
     * pitch and halves, makes of it as the gradient of its SwiGLU is written to both. NULL:
     * neither.
     */
    void *act;
    const void *z;
    int64_t half;
    float factors[2];              /* of the sums, one after the other */
    const struct gemm_block *next; /* what the same thread may compute after it; NULL: nothing */
} gemm_block;

/* What computes blocks. */
typedef struct gemm_kernel {
    int64_t rows, cols;  /* of the largest block */
    int64_t unit;        /* blocks begin at columns that are multiples of this */
    int64_t fewest_rows; /* smaller blocks cost more than another thread brings */
    int64_t fewest_deep; /* the same of a lone member's NT */
    int cut_for; /* threads that products are cut for; 0: those there are, as no sum depends on the
                    cut */
    gemm_form weight; /* the form that a compact weight gets before any block runs */
    size_t scratch;   /* bytes for each thread, a multiple of 64 */
    void (*block)(const gemm_block *block, void *scratch);
    void (*prepare)(void); /* before the blocks of a product, on the calling thread; may be NULL */
} gemm_kernel;

/* The geometry of panels and tiles: GEMM_MR x GEMM_NR sums in registers, GEMM_KC of depth at a time
 * (a panel of B in L1), GEMM_MC rows of A (in L2), GEMM_STRIP bytes of them beside that panel,
 * GEMM_NC columns of B. GEMM_LD is the pitch of A's rows: an odd number of cache lines.
 * GEMM_COLUMNS: panels of B for which A is read down its columns in place, if they are no more. */
#if MT_ISA_LEVEL == 512
enum { GEMM_MR = 14, GEMM_L2 = 344064, GEMM_STRIP = 28672, GEMM_COLUMNS = 4 };
#else
enum { GEMM_MR = 6, GEMM_L2 = 262144, GEMM_STRIP = 16384, GEMM_COLUMNS = 0 };
#endif
#if MT_ISA_LEVEL > 0
enum { GEMM_VECS = 2, GEMM_NR = GEMM_VECS * VL };
#else
enum { GEMM_NR = 1 };
#endif
enum {
    GEMM_KC = 256,
    GEMM_LD = GEMM_KC + 64 / sizeof(mt_real),
    GEMM_MC = GEMM_L2 / (GEMM_KC * sizeof(mt_real)),
    GEMM_NC = 4096 / sizeof(mt_real)
};
enum { PAIR_COLS = 16, PAIR_DEPTH = 32, PAIR_TILE = PAIR_COLS * PAIR_DEPTH };

MT_INLINE int64_t gemm_max(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

MT_INLINE int64_t gemm_round_up(int64_t x, int64_t unit)
{
    return mt_ceil_div(x, unit) * unit;
}

MT_INLINE const void *gemm_at(const gemm_matrix *x, int64_t i, int64_t p)
{
    int64_t at = i * x->outer + p * x->step;
    return x->real ? (const void *)((const mt_real *)x->data + at)
                   : (const void *)((const mt_elem *)x->data + at);
}

/* `count` neighbouring elements as reals. */
MT_INLINE void gemm_read(mt_real *to, bool real, const void *from, int64_t count)
{
    if (real)
        memcpy(to, from, (size_t)count * sizeof(mt_real));
    else
        for (int64_t i = 0; i < count; i++) to[i] = mt_get((const mt_elem *)from + i);
}

/* The form of weights in MT_LAYOUT_PACKED. */
#if MT_ISA_LEVEL == 0
#define GEMM_PACKED GEMM_PLAIN
#elif MT_ELEM_BITS == 16
#define GEMM_PACKED GEMM_PAIRS
#else
#define GEMM_PACKED GEMM_PANELS
#endif

/* How many columns are packed at once: packing starts at multiples of it. */
MT_INLINE int64_t gemm_form_cols(gemm_form form)
{
    return form == GEMM_PAIRS ? 2 * PAIR_COLS : form == GEMM_PANELS ? GEMM_NR : 64;
}

/* Bytes of a matrix of this form; plain ones are elements here. */
MT_INLINE size_t gemm_form_bytes(gemm_form form, int64_t cols, int64_t depth)
{
    if (form == GEMM_PANELS)
        return (size_t)(gemm_round_up(cols, GEMM_NR) * depth) * sizeof(mt_real);
    if (form == GEMM_PLAIN) return (size_t)(cols * depth) * sizeof(mt_elem);
    return (size_t)(gemm_round_up(cols, 2 * PAIR_COLS) * gemm_round_up(depth, PAIR_DEPTH)) *
           sizeof(mt_elem);
}

/* The address of the panel that column j is the first of. */
MT_INLINE const void *gemm_panel_at(gemm_form form, const void *packed, int64_t j, int64_t depth)
{
    if (form == GEMM_PAIRS) return (const mt_elem *)packed + j * gemm_round_up(depth, PAIR_DEPTH);
    return (const mt_real *)packed + j * depth;
}

/* Packs the gemm_form_cols columns from j on of w, a matrix of `cols` columns in place. */
void MT_CPU(gemm_pack_columns)(gemm_form form, void *packed, const gemm_matrix *w, int64_t j,
                               int64_t cols, int64_t depth);

/* The same product with plain operands: those that are neither elements nor reals are decoded to
 * reals, or, for `pairs` and if elements hold both operands exactly but for factors of members, to
 * elements, in the stream's operand scratch. `out` must stay where it is. */
struct gemm_decoded {
    mt_qtensor a, b;
    struct mt_gemm_args args;
    bool pairs;              /* both are elements */
    const float *factors[2]; /* [N] of a's and of b's members, or NULL */
};
mt_status MT_CPU(gemm_decode)(mt_stream *stream, struct gemm_decoded *out,
                              const struct mt_gemm_args *args, bool pairs);

/* The dtype that blocks read an operand of this format as; pairs: beside another that elements
 * hold.
 */
mt_dtype MT_CPU(decoded)(const mt_format_spec *spec, bool pairs);

/* What is beside a product: of an expert layer (mt_moe_gemm_args), and factors of members' sums,
 * [N] or NULL each. */
typedef struct gemm_beside {
    const int32_t *row_token;
    void *act;
    const void *z;
    const float *factors[2];
} gemm_beside;

/* What the gemm entry of a kernel table does with plain operands and the blocks of `kernel`; beside
 * may be NULL: gemm_blocks take all there but factors, those of gemm_pairs.c factors alone. *whole:
 * no block was cut along its columns, so that `act` is done; NULL where there is none. */
mt_status MT_CPU(gemm_run)(mt_stream *stream, const struct mt_gemm_args *args,
                           const gemm_kernel *kernel, const gemm_beside *beside, bool *whole);
extern const gemm_kernel MT_CPU(gemm_blocks);

/* Tile of at most GEMM_MR x GEMM_NR. `add` and `bias` may be NULL; `add` may be `out`. */
typedef struct gemm_tile_io {
    const void *add;
    void *out;
    const mt_real *bias;
    int64_t add_ld, out_ld;
    bool add_real, out_real;
    const char *ask; /* what the tile asks for: at each depth, this plus ask_step bytes for each one
                        before */
    int64_t ask_step;
    float factors[2]; /* of the sums, in gemm_pairs.c */
} gemm_tile_io;

/* out = a b + add + bias for `rows` rows and `cols` columns. b is a panel [depth][GEMM_NR]; a holds
 * A(r, p) at a[r * pitch + p], or, in columns, at a[p * pitch + r]. */
void MT_CPU(gemm_tile)(bool columns, int64_t pitch, int64_t rows, int64_t cols, int64_t depth,
                       const mt_real *a, const mt_real *b, const gemm_tile_io *io);
