/* Products of operands or results that do not lie at 16 bytes, as an LM head's of an odd
 * vocabulary: what copies of 16 bytes and tensor maps cannot reach is moved to lines that they can,
 * and the result back. */
#include "kernels/cuda/gemm.cuh"

enum {
    AT = 16, /* bytes: gemm_is_at_16 */
    APART = 256,
    THREADS = 256,
    WORDS = 8,               /* of four bytes, a thread */
    LEAST_USES = 256,        /* products of an element that is moved, */
    LEAST_PRODUCTS = 1 << 28 /* and in all, of bf16 (f32: mt_cuda_gemm_splits) */
};

/* ---- what is moved -----------------------------------------------------------------------------
 */

struct matrix {
    const void *data;
    int64_t width, columns, lines; /* width: elements from line to line */
    size_t size;
};

static bool lies(const matrix &x)
{
    return gemm_is_at_16(x.data, x.width, x.size);
}

static int64_t padded(const matrix &x)
{
    const int64_t run = AT / (int64_t)x.size;
    return mt_ceil_div(x.columns, run) * run;
}

static size_t room(const matrix &x)
{
    return mt_ceil_div(x.lines * padded(x) * x.size, APART) * APART;
}

static matrix of_a(const gemm_problem *g)
{
    const bool wgrad = g->layout == MT_GEMM_NT;
    return { g->a.data, g->a.width, wgrad ? g->height : g->depth, g->rows.members * g->rows.m,
             g->a.real ? sizeof(float) : sizeof(mt_bf16) };
}

static matrix of_b(const gemm_problem *g)
{
    const bool along = g->layout == MT_GEMM_TN, wgrad = g->layout == MT_GEMM_NT;
    return { g->b.data, g->b.width, along ? g->depth : g->cols,
             g->rows.members * (wgrad   ? g->rows.m
                                : along ? g->cols
                                        : g->depth),
             g->b.real ? sizeof(float) : sizeof(mt_bf16) };
}

static matrix of_result(const gemm_problem *g, const void *data)
{
    const bool wgrad = g->layout == MT_GEMM_NT;
    return { data, g->d_width, g->cols, g->rows.members * (wgrad ? g->height : g->rows.m),
             g->d_real ? sizeof(float) : sizeof(mt_bf16) };
}

/* Of f32 the weights stay, whatever rows there are: bits may not depend on these. */
static bool moves(const gemm_operand *x, const matrix &m)
{
    return !lies(m) && (!x->real || x->ragged);
}

static bool moves_result(const gemm_problem *g)
{
    return !g->a.real && !g->b.real && !(lies(of_result(g, g->d)) && lies(of_result(g, g->c)));
}

bool mt_cuda_gemm_is_odd(const gemm_problem *g)
{
    return !g->rows.first_dims && !g->fp8 &&
           (moves(&g->a, of_a(g)) || moves(&g->b, of_b(g)) || moves_result(g));
}

bool mt_cuda_gemm_aligns(const gemm_problem *g)
{
    if (!mt_cuda_gemm_is_odd(g)) return false;
    const matrix a = of_a(g), b = of_b(g), d = of_result(g, g->d);
    const int64_t products = g->rows.members * g->rows.m * g->cols *
                             (g->layout == MT_GEMM_NT ? g->height : g->depth),
                  moved = (moves(&g->a, a) ? a.lines * a.columns : 0) +
                          (moves(&g->b, b) ? b.lines * b.columns : 0) +
                          (moves_result(g) ? d.lines * d.columns * (g->c ? 2 : 1) : 0);
    return products >= LEAST_PRODUCTS && products / LEAST_USES >= moved;
}

size_t mt_cuda_gemm_aligned_bytes(const gemm_problem *g)
{
    const matrix a = of_a(g), b = of_b(g);
    return (moves(&g->a, a) ? room(a) : 0) + (moves(&g->b, b) ? room(b) : 0) +
           (moves_result(g) ? room(of_result(g, g->d)) : 0);
}

gemm_problem mt_cuda_gemm_aligned(const gemm_problem *g, void *memory)
{
    char *at = memory ? (char *)memory : (char *)(uintptr_t)APART;
    const matrix a = of_a(g), b = of_b(g), d = of_result(g, g->d);
    gemm_problem p = *g;
    if (moves(&g->a, a)) p.a.data = at, p.a.width = padded(a), at += room(a);
    if (moves(&g->b, b)) p.b.data = at, p.b.width = padded(b), at += room(b);
    if (moves_result(g)) p.d = at, p.d_width = padded(d), p.c = g->c ? at : NULL;
    return p;
}

/* ---- moving it ---------------------------------------------------------------------------------
 */

/* Whole words of a line of `to`, each of one or two elements of `from`; what is past `columns`, up
 * to `end`, becomes 0. */
template <typename E>
static __global__ void __launch_bounds__(THREADS)
    move_kernel(E *to, int64_t to_width, const E *from, int64_t from_width, int columns, int end,
                unsigned segments)
{
    enum { N = sizeof(uint32_t) / sizeof(E) };
    const int64_t line = blockIdx.x / segments;
    to += line * to_width, from += line * from_width;
    const int before = N == 2 ? (int)((uintptr_t)to / sizeof(E) % 2) : 0;
    const bool whole = N == 1 || ((uintptr_t)(from - before) / sizeof(E)) % 2 == 0;
    const int first = (int)(blockIdx.x % segments * WORDS * THREADS + threadIdx.x) * N - before;
    uint32_t word[WORDS];
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
        const int i = first + w * THREADS * N;
        if (whole ? i >= 0 && i + N <= columns : i > 0 && i + N < columns) {
            const uint32_t *at = (const uint32_t *)(whole ? from + i : from + i - 1);
            word[w] = whole ? *at : __funnelshift_r(at[0], at[1], 16);
        }
    }
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
        const int i = first + w * THREADS * N;
        if (whole ? i >= 0 && i + N <= columns : i > 0 && i + N < columns) {
            *(uint32_t *)(to + i) = word[w];
            continue;
        }
#pragma unroll
        for (int x = i; x < i + N; x++)
            if (x >= 0 && x < end) to[x] = x < columns ? from[x] : E(0);
    }
}

template <typename E>
static mt_status move(mt_stream *stream, void *to, int64_t to_width, const matrix &from, bool fill)
{
    enum { PER = WORDS * THREADS * (int)(sizeof(uint32_t) / sizeof(E)) };
    const int64_t end = fill ? to_width : from.columns, segments = mt_ceil_div(end + 1, PER),
                  blocks = segments * from.lines;
    MT_REQUIRE(end < INT32_MAX - PER && blocks <= INT32_MAX, MT_EUNSUPPORTED,
               "gemm: %lld lines of %lld elements to be aligned, at most %d are",
               (long long)from.lines, (long long)from.columns, INT32_MAX);
    if (!blocks) return MT_OK;
    move_kernel<E><<<(unsigned)blocks, THREADS, 0, mt_cuda_stream(stream)>>>(
        (E *)to, to_width, (const E *)from.data, from.width, (int)from.columns, (int)end,
        (unsigned)segments);
    MT_LAUNCHED(stream, "gemm: aligned");
    return MT_OK;
}

static mt_status move_any(mt_stream *stream, const void *to, int64_t to_width, const matrix &from,
                          bool fill)
{
    return from.size == sizeof(float) ? move<uint32_t>(stream, (void *)to, to_width, from, fill)
                                      : move<uint16_t>(stream, (void *)to, to_width, from, fill);
}

mt_status mt_cuda_gemm_align(mt_stream *stream, const gemm_problem *g, const gemm_problem *aligned)
{
    if (aligned->a.data != g->a.data)
        MT_TRY(move_any(stream, aligned->a.data, aligned->a.width, of_a(g), true));
    if (aligned->b.data != g->b.data)
        MT_TRY(move_any(stream, aligned->b.data, aligned->b.width, of_b(g), true));
    if (aligned->c != g->c)
        MT_TRY(move_any(stream, aligned->c, aligned->d_width, of_result(g, g->c), false));
    return MT_OK;
}

mt_status mt_cuda_gemm_restore(mt_stream *stream, const gemm_problem *g,
                               const gemm_problem *aligned)
{
    return aligned->d == g->d
               ? MT_OK
               : move_any(stream, g->d, g->d_width, of_result(aligned, aligned->d), false);
}
