/* Inside the cuda grouped GEMM. Every layout is D(i, j) = sum_p A(i, p) B(j, p) + C(i, j) +
 * bias[j], member by member; A is the b of mt_gemm_args, B its a (a weight, or X for NT).
 *
 *   gemm.cu           the choice of a path, the entries of the table
 *   gemm_operands.cu  operands of other formats made plain
 *   gemm_parts.cu     gradients of dense weights in parts
 *   gemm_aligned.cu   operands and results that do not lie at 16 bytes, brought there
 *   gemm_codes.cu     operands of fp8 read as they are, on Hopper
 *   gemm_simt.cuh     fused multiply-adds on reals: f64, f32, and whatever mixes bf16 with f32
 *   gemm_planes.cuh   f32 on Hopper, as planes of bf16
 *   gemm_mma.cuh      bf16 on tensor cores, any card from 8.0 on, any size and alignment
 *   gemm_sm90.cuh     bf16 and codes on Hopper: wgmma and TMA (gemm_plan_sm90.cu chooses how)
 *   gemm_pack.cu      compute copies of weights, gradients of biases */
#pragma once

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/gemm_factor.h"

/* An operand in place: member e begins at element `first` of e, and its element (i, p) is at i *
 * width + p, or, for one whose lines run across the depth, at p * width + i. What is in a line past
 * its extent is zeros. */
struct gemm_operand {
    const void *data;
    bool real;     /* mt_real<T>, else T */
    bool vectors;  /* runs of elements, as many as the path moves at once, are aligned */
    bool ragged;   /* its members are those of `rows`; else each has cols (TN) or depth lines */
    int64_t width; /* elements from line to line; of padded codes the rows of all their steps */
};

struct gemm_problem {
    mt_gemm_layout layout;
    mt_group rows;               /* members' rows: of A and D, or, for NT, the depth of A and B */
    int64_t height, cols, depth; /* of D and the sums; height: NT only; depth: TN, NN only */
    gemm_operand a, b;
    const void *c;
    void *d;
    int64_t d_width; /* elements from row to row of D and of C: cols but where they were moved */
    const void *bias;
    mt_gemm_factor factor; /* per member, what its sums are multiplied by */
    int fp8; /* operands are codes, 1 + their kind in mt_cuda_gemm_sm90_codes; 0: plain elements */
    const float *scales_a, *scales_b; /* of blocks of codes */
    const uint8_t *levels;            /* of one operand, see mt_cuda_gemm_level */
    const void *leveled;              /* TN: A's leveled codes */
    bool d_real;
    bool d_vectors;               /* so are runs of D's columns, four or as many as are put */
    int64_t row_tiles, col_tiles; /* of D: row tiles of one member (NT), or of all at most */
};

/* Whether all lines begin at 16 bytes, as tensor maps and copies of 16 bytes ask for. */
static inline bool gemm_is_at_16(const void *p, int64_t width, size_t size)
{
    return (uintptr_t)p % 16 == 0 && width * size % 16 == 0;
}

/* Whether D has no element. */
static inline bool gemm_is_empty(const gemm_problem *g)
{
    const int64_t room = g->rows.first_dims ? g->rows.m : g->rows.members * g->rows.m;
    return !g->rows.members || !g->cols || !(g->layout == MT_GEMM_NT ? g->height : room);
}

/* The same product with operands of dtype or real, in the stream's operand memory where they were
 * neither; what bf16 does not hold of them is the factor. */
struct gemm_plain {
    mt_qtensor a, b;
    struct mt_gemm_args args;
    mt_gemm_factor factor;
};
extern "C" mt_status mt_cuda_gemm_describe(gemm_problem *g, const struct mt_gemm_args *args);
extern "C" mt_status mt_cuda_gemm_plain(mt_stream *stream, gemm_plain *out,
                                        const struct mt_gemm_args *args);
/* What it will be, for the choice of a path: of operands that are not bf16 yet nothing but where
 * they would lie. False: it will not be one of bf16. */
extern "C" bool mt_cuda_gemm_foresee(gemm_problem *g, const struct mt_gemm_args *args);
/* The factor of products in bf16. */
extern "C" mt_gemm_factor mt_cuda_gemm_factor(const struct mt_gemm_args *args);

/* What a thread moves of a tile of an operand: the side and the depth at which its run r of RUN
 * elements begins, of lines ALONG the depth or across it. */
template <int SIDE, int DEPTH, bool ALONG, int RUN, int THREADS> struct gemm_runs {
    enum { RUNS = SIDE * DEPTH / RUN / THREADS };

    static __device__ __forceinline__ int side(int r)
    {
        int t = threadIdx.x + r * THREADS;
        return ALONG ? t / (DEPTH / RUN) : t % (SIDE / RUN) * RUN;
    }
    static __device__ __forceinline__ int deep(int r)
    {
        int t = threadIdx.x + r * THREADS;
        return ALONG ? t % (DEPTH / RUN) * RUN : t / (SIDE / RUN);
    }
};

/* The member and place of a block's tile. */
struct gemm_tile {
    int64_t member;
    int64_t start, rows; /* the member's first row and number of rows in `rows` */
    int64_t i0, j0;      /* first row and column of D */
    int64_t height;      /* rows of D */
    int64_t depth;
    float2 factor; /* before gemm_put */
};

/* Inclusive sums over a warp. */
static __device__ __forceinline__ int gemm_warp_scan(int x, int lane)
{
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        int y = __shfl_up_sync(~0u, x, step);
        if (lane >= step) x += y;
    }
    return x;
}

/* Finds the tile_rows high tile `at` among those of all members, as each warp by itself; false: it
 * is past the last. */
static __device__ __forceinline__ bool gemm_find_rows(gemm_tile *t, const mt_group *rows, int at,
                                                      int tile_rows)
{
    const int lane = threadIdx.x % 32, members = (int)rows->members;
    if (!rows->first_dims) {
        const int tiles = (int)mt_ceil_div(rows->m, tile_rows);
        t->member = at / tiles, t->rows = rows->m, t->i0 = (int64_t)(at % tiles) * tile_rows;
        return true;
    }
    int seen = 0;
#pragma unroll 1
    for (int base = 0; base < members; base += 32) {
        const int e = base + lane;
        const int64_t n = e < members ? rows->first_dims[e] : 0;
        const int tiles = (int)mt_ceil_div(n, tile_rows), end = seen + gemm_warp_scan(tiles, lane);
        const unsigned after = __ballot_sync(~0u, at < end);
        if (after) {
            const int owner = __ffs((int)after) - 1;
            t->member = base + owner;
            t->rows = __shfl_sync(~0u, n, owner);
            t->i0 = (int64_t)(at - __shfl_sync(~0u, end - tiles, owner)) * tile_rows;
            return true;
        }
        seen = __shfl_sync(~0u, end, 31);
    }
    return false;
}

/* gemm_parts.cu: whether a product is a dense weight's gradient whose rows may be cut into so many
 * parts; into how many they are, 1: not; what their results take; the product that they are; what
 * adds them. */
extern "C" bool mt_cuda_gemm_divides(const gemm_problem *g, int parts);
extern "C" int mt_cuda_gemm_parts(const gemm_problem *g);
extern "C" size_t mt_cuda_gemm_parts_bytes(const gemm_problem *g, int parts);
extern "C" gemm_problem mt_cuda_gemm_part(const gemm_problem *g, int parts, void *results);
extern "C" mt_status mt_cuda_gemm_add_parts(mt_stream *stream, const gemm_problem *g,
                                            const float *results, int parts);

/* gemm_aligned.cu: whether anything of a product of equal members does not lie at 16 bytes, and
 * whether it is so many products that moving it first pays; what that takes; the product as it is
 * then, of memory at 256 bytes (none: for a choice); to there, and its result back. Products of
 * f32 have operands moved alone. */
extern "C" bool mt_cuda_gemm_is_odd(const gemm_problem *g);
extern "C" bool mt_cuda_gemm_aligns(const gemm_problem *g);
extern "C" size_t mt_cuda_gemm_aligned_bytes(const gemm_problem *g);
extern "C" gemm_problem mt_cuda_gemm_aligned(const gemm_problem *g, void *memory);
extern "C" mt_status mt_cuda_gemm_align(mt_stream *stream, const gemm_problem *g,
                                        const gemm_problem *aligned);
extern "C" mt_status mt_cuda_gemm_restore(mt_stream *stream, const gemm_problem *g,
                                          const gemm_problem *aligned);

/* A member's factor in two parts: one that is cut, and what is missing, which is never 0 (so that
 * it is no NaN times Inf). */
static __device__ __forceinline__ float2 gemm_factor(const mt_gemm_factor *f, int64_t member)
{
    const double x = mt_gemm_factor_of(f, member);
    const float first = __double2float_rz(x), rest = (float)(x - (double)first);
    return make_float2(first, fminf(fmaxf(rest, 0x1p-149f), 0x1p104f));
}

/* A sum by its factor, whose second part is above 0 and below the first's last bit: rounded once,
 * and an infinite sum stays what it is. */
template <typename R>
static __host__ __device__ __forceinline__ R gemm_scaled(R sum, float first, float second)
{
    return fma(sum, (R)first, sum * (R)second);
}

/* The first row of a member; offsets of no columns do not tell. */
static __device__ __forceinline__ int64_t gemm_start(const mt_group *rows, int64_t member)
{
    if (!rows->first_dims) return member * rows->m;
    if (rows->k) return mt_group_offset(rows, member) / rows->k;
    int64_t start = 0;
#pragma unroll 1
    for (int64_t e = 0; e < member; e++) start += rows->first_dims[e];
    return start;
}

static __device__ __forceinline__ bool gemm_find_tile(gemm_tile *t, const gemm_problem *g,
                                                      int tile_rows, int tile_cols)
{
    const unsigned tiles = (unsigned)g->col_tiles;
    const int at = (int)(blockIdx.x / tiles);
    t->j0 = (int64_t)(blockIdx.x % tiles) * tile_cols;
    if (g->layout == MT_GEMM_NT) {
        const unsigned high = (unsigned)g->row_tiles;
        t->member = at / high;
        t->i0 = (int64_t)(at % high) * tile_rows;
        t->rows = mt_group_rows(&g->rows, t->member);
    } else if (!gemm_find_rows(t, &g->rows, at, tile_rows)) {
        return false;
    }
    t->start = gemm_start(&g->rows, t->member);
    t->height = g->layout == MT_GEMM_NT ? g->height : t->rows;
    t->depth = g->layout == MT_GEMM_NT ? t->rows : g->depth;
    return true;
}

/* The first element of the tile's member. */
static __device__ __forceinline__ int64_t gemm_member_at(const gemm_problem *g,
                                                         const gemm_operand *x, const gemm_tile *t)
{
    if (x->ragged) return t->start * x->width;
    return t->member * (g->layout == MT_GEMM_TN ? g->cols : g->depth) * x->width;
}
static __device__ __forceinline__ int64_t gemm_result_row(const gemm_problem *g, const gemm_tile *t)
{
    return g->layout == MT_GEMM_NT ? t->member * g->height : t->start;
}

static __device__ __forceinline__ void gemm_ask_factor(const gemm_problem *g, gemm_tile *t)
{
    if (mt_gemm_has_factor(&g->factor)) t->factor = gemm_factor(&g->factor, t->member);
}

/* N neighbouring columns of row i of a result that was not moved, from column j on, of which those
 * inside are written. */
template <typename D, int N, typename R>
static __device__ __forceinline__ void gemm_put(const gemm_problem *g, const gemm_tile *t,
                                                int64_t i, int64_t j, const R (&sum)[N])
{
    if (i >= t->height) return;
    int64_t at = gemm_result_row(g, t) * g->cols + i * g->cols + j, count = g->cols - j;
    const R *bias = g->bias ? (const R *)g->bias + t->member * g->cols + j : NULL;
    const D *c = g->c ? (const D *)g->c + at : NULL;
    D *d = (D *)g->d + at;
    bool whole = g->d_vectors && count >= N;
    R add[N], value[N];
    const bool scaled = mt_gemm_has_factor(&g->factor);
#pragma unroll
    for (int x = 0; x < N; x++) {
        add[x] = bias && x < count ? bias[x] : 0;
        value[x] = scaled ? gemm_scaled(sum[x], t->factor.x, t->factor.y) : sum[x];
    }
    if (whole) {
        mt_vec<D, N> out;
        if (c) {
            mt_vec<D, N> old = *(const mt_vec<D, N> *)c;
#pragma unroll
            for (int x = 0; x < N; x++) add[x] += mt_get(&old.at[x]);
        }
#pragma unroll
        for (int x = 0; x < N; x++) mt_put(&out.at[x], value[x] + add[x]);
        *(mt_vec<D, N> *)d = out;
    } else {
#pragma unroll
        for (int x = 0; x < N; x++) {
            if (x >= count) continue;
            if (c) add[x] += mt_get(c + x);
            mt_put(d + x, value[x] + add[x]);
        }
    }
}

/* Rows of D in the largest number of row tiles that members of these rows can have. */
static inline int64_t gemm_most_row_tiles(const mt_group *rows, int tile_rows)
{
    if (!rows->first_dims) return rows->members * mt_ceil_div(rows->m, tile_rows);
    return rows->m / tile_rows + rows->members;
}

/* Blocks of a grid whose tiles have this size; sets the problem's numbers of tiles. */
static inline int64_t gemm_blocks(gemm_problem *g, int tile_rows, int tile_cols)
{
    bool wgrad = g->layout == MT_GEMM_NT;
    g->col_tiles = mt_ceil_div(g->cols, tile_cols);
    g->row_tiles =
        wgrad ? mt_ceil_div(g->height, tile_rows) : gemm_most_row_tiles(&g->rows, tile_rows);
    return g->row_tiles * g->col_tiles * (wgrad ? g->rows.members : 1);
}
