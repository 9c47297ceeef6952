/* The grouped GEMM of the cuda backend: the choice of a path.
 *
 * A tile of the result has one block, which takes the products in order of the depth; rows and
 * offsets are read on the device. */
#include <stdio.h>

#include "kernels/check.h"
#include "kernels/cuda/cublaslt.h"
#include "kernels/cuda/gemm_mma.cuh"
#include "kernels/cuda/gemm_planes.cuh"
#include "kernels/cuda/gemm_simt.cuh"
#include "kernels/cuda/gemm_sm90_plan.cuh"
#include "kernels/cuda/scratch.h"

enum {
    LARGE_TILES = 3,        /* for two processors */
    FEW_PRODUCTS = 1 << 27, /* see is_small */
    FEW_RAGGED = 1 << 26,
    SHORT_SUMS = 512
};

/* ---- the product -------------------------------------------------------------------------------
 */

static mt_status check_operand(const mt_direction *dir, const char *name, mt_dtype dtype,
                               bool weight)
{
    MT_REQUIRE(dir->layout == MT_LAYOUT_COMPACT ||
                   (weight && dir->layout == MT_LAYOUT_PACKED && dir->format->dtype == dtype),
               MT_EUNSUPPORTED, "gemm: %s has layout %d, which cuda does not read", name,
               (int)dir->layout);
    return MT_OK;
}

/* Packed weights are plain elements in the master's layout. */
static gemm_operand operand(const mt_qtensor *q, const mt_direction *d, mt_dtype dtype, bool ragged)
{
    gemm_operand x = { d->codes, d->format->dtype != dtype, false, ragged, q->group.k };
    return x;
}

/* All but the operands. */
static void describe_result(gemm_problem *g, const struct mt_gemm_args *args)
{
    const mt_group *rows = &args->b->group, *other = &args->a->group;
    const bool along = args->layout == MT_GEMM_TN;
    g->layout = args->layout;
    g->rows = *rows;
    g->height = args->layout == MT_GEMM_NT ? rows->k : 0;
    g->cols = along ? other->m : other->k;
    g->depth = along ? other->k : other->m;
    g->c = args->c, g->d = args->d, g->d_width = g->cols, g->bias = args->bias;
    g->d_real = args->d_dtype != args->dtype || args->dtype == mt_dtype_wide(args->dtype);
}

mt_status mt_cuda_gemm_describe(gemm_problem *g, const struct mt_gemm_args *args)
{
    const mt_direction *a = mt_gemm_b(args), *b = mt_gemm_a(args);
    const bool wgrad = args->layout == MT_GEMM_NT;
    MT_TRY(check_operand(b, "a", args->dtype, !wgrad));
    MT_TRY(check_operand(a, "b", args->dtype, false));
    describe_result(g, args);
    g->a = operand(args->b, a, args->dtype, true);
    g->b = operand(args->a, b, args->dtype, wgrad);
    return MT_OK;
}

static bool aligned(const void *p, int64_t width, size_t size, int run)
{
    return width % run == 0 && (uintptr_t)p % (size * run) == 0;
}

/* What may be moved in runs, as many elements of an operand as `run`, of the result as `put`. */
template <typename T> static void align(gemm_problem *g, int run, int put)
{
    for (gemm_operand *x : { &g->a, &g->b })
        x->vectors = aligned(x->data, x->width, x->real ? sizeof(mt_real<T>) : sizeof(T), run);
    size_t size = g->d_real ? sizeof(mt_real<T>) : sizeof(T);
    g->d_vectors = aligned(g->d, g->d_width, size, put) && aligned(g->c, g->d_width, size, put);
}

/* A result's last run may go past its columns, to where its rows have room, but not a bias's. */
static gemm_problem *align_mma(gemm_problem *g)
{
    const int64_t whole = mt_ceil_div(g->cols, MMA_RUN) * MMA_RUN;
    align<mt_bf16>(g, MMA_RUN, g->d_real ? MMA_RUN / 2 : MMA_RUN);
    g->d_vectors = g->d_vectors && whole <= (g->bias ? g->cols : g->d_width);
    return g;
}

/* Whether tiles of 128 x 128 leave no processors idle. */
static bool fills(mt_stream *stream, gemm_problem g)
{
    return 2 * gemm_blocks(&g, 128, 128) >= LARGE_TILES * mt_cuda_multiprocessors(stream);
}

/* By planes of f32 where they pay; else tiles of 64 where those of 128 would leave processors idle,
 * and for f64. */
template <typename T> static mt_status simt_tiles(mt_stream *stream, gemm_problem *g)
{
    align<T>(g, SIMT_RUN, SIMT_RUN);
    if constexpr (sizeof(T) < sizeof(float))
        if (mt_cuda_gemm_splits(stream, g)) return mt_cuda_gemm_planes(stream, g);
    if constexpr (sizeof(T) < sizeof(double))
        if (fills(stream, *g)) return simt_launch<T, 128>(stream, g);
    return simt_launch<T, 64>(stream, g);
}

/* What lies in scratch: what is moved, then what parts make. */
static size_t moved_bytes(const gemm_problem *g, const mt_cuda_gemm_path *path)
{
    return path->aligned ? mt_cuda_gemm_aligned_bytes(g) : 0;
}
static size_t scratch_of(const gemm_problem *g, const mt_cuda_gemm_path *path)
{
    return moved_bytes(g, path) + mt_cuda_gemm_parts_bytes(g, path->parts);
}

/* The product that runs: of parts, whose results lie at 16 bytes, of what is moved; *whole: not in
 * parts. */
static gemm_problem product_of(gemm_problem *whole, const gemm_problem *g,
                               const mt_cuda_gemm_path *path, void *scratch)
{
    *whole = path->aligned ? mt_cuda_gemm_aligned(g, scratch) : *g;
    return path->parts > 1
               ? mt_cuda_gemm_part(whole, path->parts, (char *)scratch + moved_bytes(g, path))
               : *whole;
}

/* By `multiply`, of the product that runs. */
template <typename F>
static mt_status multiply_prepared(mt_stream *stream, const gemm_problem *g,
                                   const mt_cuda_gemm_path *path, const F &multiply)
{
    const size_t bytes = scratch_of(g, path);
    void *scratch = NULL;
    if (bytes) MT_TRY(mt_cuda_scratch(stream, &scratch, bytes));
    gemm_problem whole, p = product_of(&whole, g, path, scratch);
    if (path->aligned) MT_TRY(mt_cuda_gemm_align(stream, g, &whole));
    MT_TRY(multiply(&p));
    if (path->parts > 1)
        MT_TRY(mt_cuda_gemm_add_parts(stream, &whole, (const float *)p.d, path->parts));
    return path->aligned ? mt_cuda_gemm_restore(stream, g, &whole) : MT_OK;
}

/* Of f32 or f32 and bf16: in parts, whose sums are f32, where that makes more tiles; what planes
 * cannot read so is moved, as extents say. */
static mt_cuda_gemm_path choose_real(const mt_stream *stream, const gemm_problem *g)
{
    mt_cuda_gemm_path path = {};
    path.parts = mt_cuda_gemm_parts(g);
    if (!mt_cuda_gemm_is_odd(g) || mt_cuda_gemm_splits(stream, g)) return path;
    const gemm_problem aligned = mt_cuda_gemm_aligned(g, NULL);
    path.aligned = mt_cuda_gemm_splits(stream, &aligned);
    return path;
}

template <typename T> static mt_status simt(mt_stream *stream, gemm_problem *g)
{
    if constexpr (sizeof(mt_real<T>) == sizeof(float)) {
        const mt_cuda_gemm_path path = choose_real(stream, g);
        return multiply_prepared(stream, g, &path,
                                 [=](gemm_problem *p) { return simt_tiles<T>(stream, p); });
    }
    return simt_tiles<T>(stream, g);
}

template <typename T> static mt_status multiply(mt_stream *stream, gemm_problem *g)
{
    return simt<T>(stream, g);
}

/* Of f32: the kernels of bf16 read both. */
template <> mt_status multiply<float>(mt_stream *stream, gemm_problem *g)
{
    g->a.real = g->b.real = true;
    return simt<mt_bf16>(stream, g);
}

/* On Hopper: what has so few products, and no long sums, takes as long as a block from its begin to
 * its end, which is shorter here than by wgmma. Measured on an H200, depths (NT: rows of a member)
 * of 64 to 512: up to 11 % faster, ragged gradients up to 18; not dense gradients, whose parts are
 * of many rows; of ragged rows, some tiles of which are nearly empty, from twice FEW_RAGGED on no
 * longer. */
static bool is_small(const gemm_problem *g)
{
    const bool wgrad = g->layout == MT_GEMM_NT, ragged = g->rows.first_dims != NULL;
    const int64_t rows = ragged ? g->rows.m : g->rows.members * g->rows.m,
                  other = wgrad ? g->height : g->depth,
                  depth = wgrad ? mt_ceil_div(rows, g->rows.members) : g->depth;
    return !g->fp8 && (ragged || !wgrad) && depth <= SHORT_SUMS &&
           rows * g->cols * other <= (ragged && !wgrad ? FEW_RAGGED : FEW_PRODUCTS);
}

static void choose(mt_stream *stream, const gemm_problem *g, mt_cuda_gemm_path *path)
{
    path->parts = mt_cuda_gemm_parts(g);
    path->aligned = mt_cuda_gemm_aligns(g);
    gemm_problem whole, p = product_of(&whole, g, path, NULL);
    const bool aligned = mma_aligned(align_mma(&p));
    const int tiled = aligned && fills(stream, p) ? MT_CUDA_GEMM_TILED : MT_CUDA_GEMM_SMALL;
    path->variant = tiled;
    if (!mt_cuda_is_hopper(stream) || gemm_is_empty(g) || (aligned && is_small(&p))) return;
    mt_cuda_gemm_sm90_plan(path, &p, mt_cuda_multiprocessors(stream));
    if (!mt_cuda_gemm_sm90_suits(&p, path)) path->variant = tiled;
}

/* The product as cuBLASLt's, which the kernel set may have; *why: it does not take it. */
static mt_status try_cublaslt(mt_stream *stream, const gemm_problem *g, bool run, int *variant,
                              const char **why)
{
    static const int ragged[] = { MT_CUDA_GEMM_TILED, MT_CUDA_GEMM_CUBLASLT_GROUPED,
                                  MT_CUDA_GEMM_CUBLASLT_LOOP };
    static_assert(MT_LT_OURS == 0 && MT_LT_GROUPED == 1 && MT_LT_LOOP == 2,
                  "the order of `ragged`");
    mt_cublaslt *lt = mt_cuda_cublaslt(stream);
    bool along = g->layout == MT_GEMM_TN, wgrad = g->layout == MT_GEMM_NT;
    mt_lt_product p = {};
    *variant = MT_CUDA_GEMM_TILED, *why = NULL;
    if (!lt) return MT_OK;
    p.layout = g->layout, p.rows = g->rows;
    p.n = along ? g->cols : wgrad ? g->height : g->depth;
    p.k = along ? g->depth : g->cols;
    p.a = g->b.data, p.b = g->a.data, p.c = g->c, p.d = g->d;
    p.d_real = g->d_real, p.bias = g->bias != NULL, p.factor = g->factor;
    MT_TRY(mt_cublaslt_gemm(stream, lt, &p, run, why));
    if (*why) return MT_OK;
    *variant = mt_cublaslt_is_uniform(&p) ? MT_CUDA_GEMM_CUBLASLT : ragged[mt_cublaslt_groups(lt)];
    return MT_OK;
}

/* cuBLASLt where the kernel set has it and it can, else ours. */
static mt_status choose_any(mt_stream *stream, const gemm_problem *g, mt_cuda_gemm_path *path)
{
    path->width = path->super = 0, path->parts = 1, path->aligned = false;
    MT_TRY(try_cublaslt(stream, g, false, &path->variant, &path->why));
    if (path->variant == MT_CUDA_GEMM_TILED) choose(stream, g, path);
    return MT_OK;
}

static mt_status multiply_by(mt_stream *stream, gemm_problem *g, const mt_cuda_gemm_path *path)
{
    return multiply_prepared(stream, g, path, [=](gemm_problem *p) {
        return mt_cuda_gemm_is_tiled(path->variant)
                   ? mma_launch(stream, align_mma(p), path->variant == MT_CUDA_GEMM_SMALL)
                   : mt_cuda_gemm_sm90(stream, p, path);
    });
}

template <> mt_status multiply<mt_bf16>(mt_stream *stream, gemm_problem *g)
{
    mt_cuda_gemm_path path;
    if (g->a.real || g->b.real) return simt<mt_bf16>(stream, g);
    MT_TRY(try_cublaslt(stream, g, true, &path.variant, &path.why));
    if (path.variant != MT_CUDA_GEMM_TILED) return MT_OK;
    choose(stream, g, &path);
    return multiply_by(stream, g, &path);
}

/* Codes as they are, where the kernel set reads them so and a kernel suits. */
static mt_status multiply_codes(mt_stream *stream, const struct mt_gemm_args *args, bool *done)
{
    gemm_problem g = {};
    mt_cuda_gemm_path path;
    *done = false;
    if (!mt_cuda_reads_fp8(stream) || !mt_cuda_gemm_codes(&g, args)) return MT_OK;
    choose(stream, &g, &path);
    if (!mt_cuda_gemm_of_codes(path.variant)) return MT_OK;
    *done = true;
    MT_TRY(mt_cuda_gemm_place_codes(stream, &g, args, &path));
    return mt_cuda_gemm_sm90(stream, &g, &path);
}

template <typename T> static mt_status gemm(mt_stream *stream, const struct mt_gemm_args *args)
{
    bool done;
    gemm_plain plain;
    gemm_problem g = {};
    MT_TRY(multiply_codes(stream, args, &done));
    if (done) return MT_OK;
    MT_TRY(mt_cuda_gemm_plain(stream, &plain, args));
    MT_TRY(mt_cuda_gemm_describe(&g, &plain.args));
    g.factor = plain.factor;
    if (gemm_is_empty(&g)) return MT_OK;
    return multiply<T>(stream, &g);
}
MT_CUDA_OP(gemm)

/* As it will be, but for where operands lie that are decoded first. */
static void foresee_real(gemm_problem *g, const struct mt_gemm_args *args)
{
    const mt_direction *a = mt_gemm_b(args), *b = mt_gemm_a(args);
    const mt_format_spec of_a = mt_direction_spec(a), of_b = mt_direction_spec(b);
    const auto decoded =
        args->dtype == MT_F32 ? mt_cuda_gemm_operand_f32 : mt_cuda_gemm_operand_bf16;
    describe_result(g, args);
    g->a = operand(args->b, a, args->dtype, true);
    g->b = operand(args->a, b, args->dtype, args->layout == MT_GEMM_NT);
    g->a.real = decoded(&of_a) == MT_F32, g->b.real = decoded(&of_b) == MT_F32;
    if (a->format->dtype != decoded(&of_a)) g->a.data = NULL;
    if (b->format->dtype != decoded(&of_b)) g->b.data = NULL;
}

void mt_cuda_gemm_bytes(mt_stream *stream, const struct mt_gemm_args *args, size_t *scratch,
                        size_t *operands)
{
    gemm_problem g = {};
    mt_cuda_gemm_path path = {};
    path.variant = MT_CUDA_GEMM_TILED;
    if (mt_cuda_reads_fp8(stream) && mt_cuda_gemm_codes(&g, args)) choose(stream, &g, &path);
    if (mt_cuda_gemm_of_codes(path.variant)) {
        *scratch = 0, *operands = mt_cuda_gemm_codes_bytes(&g, &path);
        return;
    }
    *scratch = mt_cuda_gemm_plain_scratch(stream, args), *operands = mt_cuda_gemm_plain_bytes(args);
    g = {};
    if (mt_cuda_gemm_foresee(&g, args)) {
        choose(stream, &g, &path);
    } else if (args->dtype != MT_F64) {
        foresee_real(&g, args);
        path = choose_real(stream, &g);
    }
    const size_t own = scratch_of(&g, &path);
    if (own > *scratch) *scratch = own;
}

/* ---- paths by name -----------------------------------------------------------------------------
 */

const char *mt_cuda_gemm_path_name(const mt_cuda_gemm_path *path)
{
    static const char *const bf16[MT_CUDA_GEMM_BF16] = {
        "wgmma 256x192, pairs",
        "wgmma 256x192",
        "wgmma 128x192, ping-pong",
        "wgmma 128x192, ping-pong by five stages",
        "wgmma 128x192 turned, ping-pong",
        "wgmma 128x192 turned, ping-pong by five stages",
        "wgmma 128x192, ping-pong, more of C ahead",
    };
    static const char *const cublaslt[MT_CUDA_GEMM_NAMES - MT_CUDA_GEMM_CUBLASLT] = {
        "cuBLASLt",
        "cuBLASLt, grouped",
        "cuBLASLt, a call per member",
    };
    const int v = path->variant;
    return v == MT_CUDA_GEMM_SMALL     ? "mma.sync 64x64"
           : v == MT_CUDA_GEMM_TILED   ? "mma.sync 128x128"
           : v < MT_CUDA_GEMM_BF16     ? bf16[v]
           : v < MT_CUDA_GEMM_CUBLASLT ? mt_cuda_gemm_sm90_codes[v - MT_CUDA_GEMM_FP8].name
                                       : cublaslt[v - MT_CUDA_GEMM_CUBLASLT];
}

/* Of codes as they are, or of operands that bf16 will hold. */
static mt_status foresee_native(gemm_problem *g, const struct mt_gemm_args *args)
{
    MT_TRY(mt_gemm_check(args));
    if (mt_cuda_gemm_codes(g, args)) return MT_OK;
    *g = gemm_problem();
    MT_REQUIRE(mt_cuda_gemm_foresee(g, args), MT_EUNSUPPORTED,
               "gemm: a path is chosen among those of bf16 and fp8, not of %s by %s in %s",
               mt_gemm_a(args)->format->name, mt_gemm_b(args)->format->name,
               mt_dtype_name(args->dtype));
    return MT_OK;
}

mt_status mt_cuda_gemm_choose(mt_stream *stream, const struct mt_gemm_args *args,
                              mt_cuda_gemm_path *path)
{
    gemm_problem g = {};
    MT_TRY(foresee_native(&g, args));
    if (!g.fp8) return choose_any(stream, &g, path);
    path->why = NULL;
    choose(stream, &g, path);
    return MT_OK;
}

static void print_path(char text[MT_GEMM_TEXT], const mt_cuda_gemm_path *path)
{
    char parts[40] = "";
    if (path->parts > 1) snprintf(parts, sizeof parts, ", %d parts of the rows", path->parts);
    snprintf(text, MT_GEMM_TEXT, "%s%s%s%s%s", mt_cuda_gemm_path_name(path), parts,
             path->aligned ? ", moved to 16 bytes" : "", path->why ? ", not cuBLASLt: " : "",
             path->why ? path->why : "");
}

/* As gemm goes about it, up to the product itself. */
mt_status mt_cuda_gemm_chosen_bf16(char text[MT_GEMM_TEXT], mt_stream *stream,
                                   const struct mt_gemm_args *args)
{
    gemm_plain plain;
    gemm_problem g = {};
    mt_cuda_gemm_path path = {};
    MT_TRY(mt_gemm_check(args));
    if (mt_cuda_reads_fp8(stream) && mt_cuda_gemm_codes(&g, args)) choose(stream, &g, &path);
    if (!mt_cuda_gemm_of_codes(path.variant)) {
        g = {};
        MT_TRY(mt_cuda_gemm_plain(stream, &plain, args));
        MT_TRY(mt_cuda_gemm_describe(&g, &plain.args));
        g.factor = plain.factor;
        if (g.a.real || g.b.real) {
            const mt_cuda_gemm_path real = choose_real(stream, &g);
            snprintf(text, MT_GEMM_TEXT, "%s",
                     real.aligned ? "wgmma 128x128, planes of f32, moved to 16 bytes"
                     : mt_cuda_gemm_splits(stream, &g) ? "wgmma 128x128, planes of f32"
                                                       : "tiled, operands of f32");
            return MT_OK;
        }
        MT_TRY(choose_any(stream, &g, &path));
    }
    print_path(text, &path);
    return MT_OK;
}

/* cuBLASLt says itself, as it is asked for the product. */
static bool can(mt_stream *stream, const gemm_problem *g, const mt_cuda_gemm_path *path)
{
    const bool lt = path->variant >= MT_CUDA_GEMM_CUBLASLT;
    gemm_problem whole, p = product_of(&whole, g, path, NULL);
    if (lt) return !g->fp8;
    if (path->parts > 1 && !mt_cuda_gemm_divides(g, path->parts)) return false;
    if (path->aligned && !mt_cuda_gemm_is_odd(g)) return false;
    if (mt_cuda_gemm_is_tiled(path->variant)) /* no codes */
        return !g->fp8 && (path->variant == MT_CUDA_GEMM_SMALL || mma_aligned(align_mma(&p)));
    return mt_cuda_is_hopper(stream) && mt_cuda_gemm_sm90_suits(&p, path);
}

bool mt_cuda_gemm_can(mt_stream *stream, const struct mt_gemm_args *args,
                      const mt_cuda_gemm_path *path)
{
    gemm_problem g = {};
    return foresee_native(&g, args) == MT_OK && can(stream, &g, path);
}

int mt_cuda_gemm_leveled(const struct mt_gemm_args *args, const mt_cuda_gemm_path *path)
{
    gemm_problem g = {};
    if (!mt_cuda_gemm_of_codes(path->variant) || !mt_cuda_gemm_codes(&g, args)) return 0;
    const gemm_sm90_variant *variant = mt_cuda_gemm_sm90_variant(&g, path->variant);
    return !variant->leveled ? 0 : g.layout == MT_GEMM_NT && !variant->turned ? 1 : 2;
}

mt_status mt_cuda_gemm_by(mt_stream *stream, const struct mt_gemm_args *args,
                          const mt_cuda_gemm_path *path)
{
    gemm_plain plain;
    gemm_problem g = {};
    MT_TRY(foresee_native(&g, args));
    MT_REQUIRE(can(stream, &g, path), MT_EUNSUPPORTED,
               "gemm: variant %d, width %d, %d together cannot run this product", path->variant,
               path->width, path->super);
    if (g.fp8) {
        MT_TRY(mt_cuda_gemm_place_codes(stream, &g, args, path));
    } else {
        MT_TRY(mt_cuda_gemm_plain(stream, &plain, args));
        MT_TRY(mt_cuda_gemm_describe(&g, &plain.args));
        g.factor = plain.factor;
    }
    if (path->variant >= MT_CUDA_GEMM_CUBLASLT) {
        int variant;
        const char *why = NULL;
        MT_TRY(try_cublaslt(stream, &g, true, &variant, &why));
        MT_REQUIRE(variant == path->variant, MT_EUNSUPPORTED, "gemm: not by %s: %s",
                   mt_cuda_gemm_path_name(path), why ? why : "another way of the kernel set's");
        return MT_OK;
    }
    return multiply_by(stream, &g, path);
}
