/* The Hopper GEMM on the host: which variant a product takes, from its extents and the room for its
 * rows, and which can run it. */
#include "kernels/cuda/gemm_sm90_plan.cuh"

enum {
    FEW_WAVES = 4,      /* fewer tiles per processor: widths that fill the last round */
    SHORT_DEPTH = 1024, /* sums over this much end before a result is stored: ping-pong, */
    FAIR_DEPTH = 2048,  /* over this much too, but where members have */
    SMALL_PIECES = 2,   /* no more pieces than this */
    FEW_PIECES = 5,     /* an odd number of pieces this small loses by being made even */
    TILE_OVERHEAD = 24, /* columns that a tile's start and end cost */
    NARROWEST = 64,
    FEW_ROWS = 256, /* of a member; see goes_by_rows */
    SOME_ROWS = 512,
    MANY_ROWS = 2048,
    SHORT_CODES = 512, /* depth */
    DEEP_ROWS = 1280,  /* of a member, on average: see deep_suits, goes_broad */
    SCANT_ROWS = 288,  /* of a member, on average: see turned_suits, adding_suits */
    TILE = 256,        /* rows of P, but where tiles are of half as many */
    TOGETHER = 8,
    CODES_TOGETHER = 32,      /* NT of fp8 */
    STAYING_BYTES = 14 << 20, /* see mt_cuda_gemm_sm90_together */
    TALL_ROWS = 192,
    TALL_PAIR = 256,          /* columns of two tiles */
    LEVEL_WIDE = 7168,        /* of the wider operand: see plan_level; */
    LEVEL_WIDE_ADDED = 14336, /* with C or a result of f32 */
    LEVEL_COLUMNS = 2048,     /* see levels_rows */
    LEVEL_WEIGHTS = 12 << 20,
    LEVEL_WEIGHTS_MOST = 32 << 20
};

static bool fits_map(const void *p, int64_t width, size_t size)
{
    return gemm_is_at_16(p, width, size) && width > 0 && width < SM90_MOST;
}

static int64_t most_rows(const mt_group *rows)
{
    return rows->first_dims ? rows->m : rows->members * rows->m;
}

static int64_t mean_rows(const gemm_problem *g)
{
    return mt_ceil_div(most_rows(&g->rows), g->rows.members);
}

static bool is_added_to(const gemm_problem *g)
{
    return g->c || g->bias;
}

static enum sm90_sums sums_of(const gemm_problem *g)
{
    return is_added_to(g) ? SM90_ANY : mt_gemm_has_factor(&g->factor) ? SM90_TIMES : SM90_PLAIN;
}

/* Of NT of codes: MT_CUDA_FP8_E4M3 or another of those. */
static int kind_of_wgrad(const gemm_problem *g)
{
    return g->fp8 - 1 - MT_CUDA_FP8_WGRAD;
}

const gemm_sm90_variant *mt_cuda_gemm_sm90_variant(const gemm_problem *g, int variant)
{
    static const gemm_sm90_variant *const tables[MT_GEMM_LAYOUT_COUNT][SM90_SUMS] = {
        { mt_cuda_gemm_sm90_fwd, mt_cuda_gemm_sm90_fwd_times, mt_cuda_gemm_sm90_fwd_any },
        { mt_cuda_gemm_sm90_dgrad, mt_cuda_gemm_sm90_dgrad_times, mt_cuda_gemm_sm90_dgrad_any },
        { mt_cuda_gemm_sm90_wgrad, mt_cuda_gemm_sm90_wgrad_times, mt_cuda_gemm_sm90_wgrad_any }
    };
    static_assert(MT_GEMM_TN == 0 && MT_GEMM_NN == 1 && MT_GEMM_NT == 2, "the order of `tables`");
    if (variant < MT_CUDA_GEMM_BF16) return &tables[g->layout][sums_of(g)][variant];
    return &mt_cuda_gemm_sm90_codes[variant - MT_CUDA_GEMM_FP8].of[g->fp8 - 1];
}

static int64_t rounded_up(int64_t x, int64_t unit)
{
    return mt_ceil_div(x, unit) * unit;
}

/* What is cut into pieces: `columns` of each member, exactly, or of ragged rows on average. */
struct extent {
    int64_t members, columns;
    bool ragged;
};

/* Time of a product in columns of a tile: rounds of all processors, each as long as a tile. Even
 * pieces of a member; of ragged ones half a piece more for each on average, and a little, so that
 * a round more is seldom. */
static int64_t cost(const extent &x, int64_t tiles_m, int64_t width, int64_t processors)
{
    int64_t pieces = x.members * mt_ceil_div(x.columns, width), each = width;
    if (x.ragged)
        pieces = mt_ceil_div(x.members * x.columns, width) + mt_ceil_div(9 * x.members, 16);
    else
        each = rounded_up(mt_ceil_div(x.columns, mt_ceil_div(x.columns, width)), 8);
    return mt_ceil_div(pieces * tiles_m, processors) * (each + TILE_OVERHEAD);
}

/* The width of the fewest columns of work in the last round, for products of few tiles. */
static int filling_width(const extent &x, int64_t tiles_m, int grain, int processors)
{
    int best = SM90_WIDTH;
    for (int width = SM90_WIDTH - grain; width >= NARROWEST; width -= grain)
        if (cost(x, tiles_m, width, processors) < cost(x, tiles_m, best, processors)) best = width;
    return best;
}

/* Whether there is a kernel, and its table of members has room. */
static bool has_room(const gemm_problem *g, int variant)
{
    const gemm_sm90_variant *v = mt_cuda_gemm_sm90_variant(g, variant);
    return v->kernel && gemm_sm90_has_room(v, g);
}

static int variant_of_rest(const gemm_problem *g);

/* Whether the variant is one of codes that has a kernel for these, and for such a result. */
static bool suits_codes(const gemm_problem *g, int variant)
{
    if (!g->fp8 || !mt_cuda_gemm_of_codes(variant)) return false;
    const gemm_sm90_variant *v = mt_cuda_gemm_sm90_variant(g, variant);
    const bool rests = v->leveled && g->layout != MT_GEMM_NT;
    return v->kernel && (!v->plain || (!g->d_real && !is_added_to(g))) &&
           (!rests || has_room(g, variant_of_rest(g)));
}

/* fp8, of members of so many rows. Measured on an H200: scales of blocks are cheaper by rows, which
 * pays for the padding of members that are not small; without scales it pays where there is next to
 * none, or where the depth is so short that the ends of tiles, hidden there, are what counts. */
static bool goes_by_rows(const gemm_problem *g, int64_t rows)
{
    if (!suits_codes(g, MT_CUDA_GEMM_FP8_ROWS)) return false;
    if (g->fp8 > MT_CUDA_FP8_BLOCKS)
        return rows >= SOME_ROWS || (rows >= FEW_ROWS && g->cols > g->depth);
    return rows >= MANY_ROWS || (rows >= SOME_ROWS && g->depth <= SHORT_CODES);
}

/* Measured on an H200: three chains of multiplying and adding are 1 to 16 % faster, but for a depth
 * in whose few steps a tile's end weighs more, and members of few tiles, which are padded more. */
static int variant_by_rows(const gemm_problem *g, int64_t rows)
{
    bool scaled = g->fp8 > MT_CUDA_FP8_BLOCKS;
    return g->depth > SHORT_CODES && rows >= (scaled ? SOME_ROWS : MANY_ROWS)
               ? MT_CUDA_GEMM_FP8_ROWS_TALL
               : MT_CUDA_GEMM_FP8_ROWS;
}

/* Members of 145 to 288 rows: two pieces, which are a pair's. Measured on an H200 with 263 rows on
 * average: shared memory holds products of codes whose tiles are narrow, and 256 x 136 moves a
 * fifth less through it than 128 x 136 does; 14 to 16 % faster, with scales of blocks mostly 3 to
 * 5. */
static bool goes_high(const gemm_problem *g, int64_t rows)
{
    const int width = mt_cuda_gemm_sm90_variant(g, MT_CUDA_GEMM_FP8_HIGH)->width;
    return suits_codes(g, MT_CUDA_GEMM_FP8_HIGH) && mt_ceil_div(rows, width) == 2;
}

/* How members go that are not leveled. */
static int variant_of_rest(const gemm_problem *g)
{
    return variant_by_rows(g, MT_GEMM_FP8_LEVELED + 1);
}

/* TN of codes with scales of blocks on both sides: rows of members that have few of them are
 * brought to one scale each, so that a step has none of a column; other members go by rows in a
 * launch of their own. That is a pass over the codes, some 300 / `cols` of the product's time.
 * Measured on an H200 with members of 263 rows: 9 to 13 % faster with 4096 and 7168 columns, 1 to 2
 * with 2048; of 1,024 rows and more 14 to 28 % slower than by rows. As plan_level's it has bits of
 * its own, so that extents and a member's own rows decide, not the room: where a member has so many
 * weights, two launches more do not count. */
static bool levels_rows(const gemm_problem *g)
{
    const int64_t weights = g->cols * g->depth;
    return suits_codes(g, MT_CUDA_GEMM_FP8_HIGH_LEVEL) && g->cols >= LEVEL_COLUMNS &&
           weights >= LEVEL_WEIGHTS && weights <= LEVEL_WEIGHTS_MOST;
}

/* Whether sums are so long that a store by one buffer ends meanwhile. Measured on an H200: with
 * shorter ones the buffers are worth more than a fifth stage. */
static bool deep_suits(const gemm_problem *g)
{
    bool wgrad = g->layout == MT_GEMM_NT;
    return (wgrad ? mean_rows(g) >= DEEP_ROWS : g->depth >= SHORT_DEPTH) &&
           has_room(g, MT_CUDA_GEMM_DEEP);
}

/* Measured on H200s and an H100: one piece is faster in TN of 8.4 MB of weights a member, of one
 * member 12.6; eight are in NN of 16.8 and TN of 206, what lies between was not. An L2 of 50 MB has
 * two halves, which both keep what both read, and results pass through. */
int mt_cuda_gemm_sm90_together(const gemm_problem *g)
{
    const int64_t weights = g->cols * g->depth * (int64_t)sizeof(mt_bf16);
    return weights <= STAYING_BYTES ? 1 : TOGETHER;
}

/* TN, NN. Measured on an H200: pairs that share weights keep in step, so that HBM is read once, but
 * an odd number of pieces loses by being made even; a depth that is not long hides a tile's end but
 * beside another tile, unless members are so small that ping-pong moves too much; products of few
 * tiles live by their last round. */
static void plan_rows(mt_cuda_gemm_path *path, const gemm_problem *g, int processors)
{
    int64_t members = g->rows.members, rows = mean_rows(g);
    int64_t pieces = mt_ceil_div(rows, SM90_WIDTH), tiles_m = mt_ceil_div(g->cols, 256);
    bool tn = g->layout == MT_GEMM_TN;
    bool alone = pieces <= FEW_PIECES && (pieces % 2 || (tn && g->depth <= FAIR_DEPTH));
    if (g->fp8) tiles_m = mt_ceil_div(g->cols, 128);
    const struct extent extent = { members, rows, g->rows.first_dims != NULL };
    bool few = members * pieces * tiles_m < FEW_WAVES * processors;
    bool hides = g->depth > FAIR_DEPTH || (g->depth > SHORT_DEPTH && pieces <= SMALL_PIECES);
    path->variant = alone ? MT_CUDA_GEMM_ALONE : MT_CUDA_GEMM_WIDE;
    path->width = SM90_WIDTH, path->super = TOGETHER;
    if (!g->fp8 && !hides && !(few && (tn || g->depth > SHORT_DEPTH))) {
        path->variant = deep_suits(g) ? MT_CUDA_GEMM_DEEP : MT_CUDA_GEMM_PINGPONG;
        path->super = tn ? mt_cuda_gemm_sm90_together(g) : TOGETHER;
        if (few) path->width = filling_width(extent, mt_ceil_div(g->cols, 128), 8, processors);
    } else if (few) {
        path->variant = MT_CUDA_GEMM_ALONE;
        path->width = filling_width(extent, tiles_m, 8, processors);
    }
    if (!g->fp8) {
        if (!has_room(g, path->variant)) path->variant = MT_CUDA_GEMM_PINGPONG;
        return;
    }
    if (levels_rows(g))
        path->variant = MT_CUDA_GEMM_FP8_HIGH_LEVEL, few = false;
    else if (few)
        path->variant = MT_CUDA_GEMM_FP8;
    else if (goes_high(g, rows))
        path->variant = MT_CUDA_GEMM_FP8_HIGH;
    else
        path->variant = goes_by_rows(g, rows) ? variant_by_rows(g, rows) : MT_CUDA_GEMM_FP8;
    if (!few) path->width = mt_cuda_gemm_sm90_variant(g, path->variant)->width;
}

/* Percent that pieces of SM90_WIDTH are more than what they cover. */
static int64_t excess(int64_t extent)
{
    return 100 * mt_ceil_div(extent, SM90_WIDTH) * SM90_WIDTH / extent - 100;
}

/* Whether the result turned is cut better. Measured on an H200: from 2 % on, but not of members of
 * scant rows; where C is read as well, of members of many or a result as narrow as tiles are high.
 */
static bool turned_suits(const gemm_problem *g)
{
    return g->cols % TILE == 0 && excess(g->cols) >= excess(g->height) + 2 &&
           mean_rows(g) > SCANT_ROWS &&
           (!is_added_to(g) || g->cols == TILE || mean_rows(g) >= MANY_ROWS);
}

static int turned_variant(const gemm_problem *g)
{
    return deep_suits(g) ? MT_CUDA_GEMM_TURNED_DEEP : MT_CUDA_GEMM_TURNED;
}

/* Of members of few rows C of f32 is most of what there is to bring. */
static bool adding_suits(const gemm_problem *g)
{
    return g->c && g->d_real && mean_rows(g) <= SCANT_ROWS && has_room(g, MT_CUDA_GEMM_ADDING);
}

/* Elements that pairs of tall tiles cover. */
static int64_t tall_area(int64_t height, int64_t columns)
{
    return rounded_up(height, TALL_ROWS) * rounded_up(columns, TALL_PAIR);
}

/* Of members of scant rows a tile's end is most of it, and broad tiles, which have fewer, are 4 to
 * 8 % faster (measured on an H200; of more, 1 to 8 % slower), if they cover no more. Where
 * tall ones cover 3 % more they are 2 to 3 % faster with 1,024 rows, too. */
static bool goes_broad(const gemm_problem *g, int64_t tall)
{
    const int64_t area = rounded_up(g->height, TILE) * rounded_up(g->cols, TILE);
    return 100 * area <= 102 * g->height * g->cols &&
           (mean_rows(g) <= SCANT_ROWS || (mean_rows(g) < DEEP_ROWS && 100 * tall >= 103 * area));
}

/* NT of codes. Measured on an H200: three chains of multiplying and adding are a little faster
 * where nothing is scaled, and 6 % with scales of blocks, for which tall tiles may cover more than
 * pairs of 128 x `width` do, unless C of f32 is most of what there is to move. Turned, C and f32
 * come and go slowly; adding by scales hides the latter. */
static void plan_tall(mt_cuda_gemm_path *path, const gemm_problem *g)
{
    bool scaled = kind_of_wgrad(g) == MT_CUDA_FP8_BLOCKS;
    int64_t pieces = mt_ceil_div(g->cols, path->width);
    int64_t now = rounded_up(g->height, 2 * 128) * pieces * path->width;
    int64_t tall = tall_area(g->height, g->cols), turned = tall_area(g->cols, g->height);
    bool turns = turned < tall && !g->c && (scaled || !g->d_real);
    double more = g->c && g->d_real ? 1 : scaled ? 1.06 : g->c ? 1.02 : 1;
    if (!suits_codes(g, MT_CUDA_GEMM_FP8_TALL) ||
        (double)(turns ? turned : tall) > more * (double)now)
        return;
    path->variant = turns ? MT_CUDA_GEMM_FP8_TALL_TURNED : MT_CUDA_GEMM_FP8_TALL;
    if (suits_codes(g, MT_CUDA_GEMM_FP8_BROAD) && goes_broad(g, turns ? turned : tall))
        path->variant = turns ? MT_CUDA_GEMM_FP8_BROAD_TURNED : MT_CUDA_GEMM_FP8_BROAD;
    path->width = mt_cuda_gemm_sm90_variant(g, path->variant)->width;
    path->super = TOGETHER;
}

/* NT of codes with scales of blocks on both sides, of which the narrower operand's are brought to
 * one for a column of a member. That is a pass over it, and what it saves is of each product: it
 * pays where the other operand is wide and the result is not most of what there is to move.
 * Measured on an H200: 29 to 37 % faster with an operand of 14336 or more, 6 to 25 % with C; of
 * 7168 5 and 6 % to bf16, but to f32 or with C from as fast to 16 % slower; of 2048 4 to 17 %
 * slower. Unlike most ways it has bits of its own, so that extents decide, not rows, for which
 * ranks that share experts have other room. Broad tiles give the same bits. */
static bool plan_level(mt_cuda_gemm_path *path, const gemm_problem *g)
{
    const bool turns = g->height < g->cols;
    const int64_t wide = turns ? g->cols : g->height, narrow = turns ? g->height : g->cols;
    const int64_t least = g->d_real || g->c ? LEVEL_WIDE_ADDED : LEVEL_WIDE;
    const int64_t tall = tall_area(wide, narrow);
    if (!suits_codes(g, MT_CUDA_GEMM_FP8_LEVEL) || wide < least || 12 * tall > 13 * wide * narrow)
        return false;
    path->variant = turns ? MT_CUDA_GEMM_FP8_LEVEL_TURNED : MT_CUDA_GEMM_FP8_LEVEL;
    if (suits_codes(g, MT_CUDA_GEMM_FP8_LEVEL_BROAD) && goes_broad(g, tall))
        path->variant = turns ? MT_CUDA_GEMM_FP8_LEVEL_BROAD_TURNED : MT_CUDA_GEMM_FP8_LEVEL_BROAD;
    path->width = mt_cuda_gemm_sm90_variant(g, path->variant)->width;
    path->super = TOGETHER;
    return true;
}

/* NT, by tiles of so many rows: even pieces, or where tiles are few, what fills the last round. */
static bool wgrad_width(int *width, const gemm_problem *g, int tile, int processors)
{
    int64_t members = g->rows.members, n = g->cols, pieces = mt_ceil_div(n, SM90_WIDTH);
    int64_t tiles_m = mt_ceil_div(g->height, tile);
    bool few = members * pieces * tiles_m < FEW_WAVES * processors;
    *width = few ? filling_width({ members, n, false }, tiles_m, 64, processors)
                 : (int)rounded_up(mt_ceil_div(n, pieces), 64);
    return few;
}

int mt_cuda_gemm_sm90_wgrad_width(const gemm_problem *g, int multiprocessors)
{
    int width;
    wgrad_width(&width, g, TILE, multiprocessors);
    return width;
}

/* NT: the depth is short, a tile's result large: ping-pong, of the result turned where that is cut
 * better. Of few tiles five stages were faster whatever the depth. */
static void plan_wgrad(mt_cuda_gemm_path *path, const gemm_problem *g, int processors)
{
    bool few = wgrad_width(&path->width, g, TILE / 2, processors);
    path->super = g->fp8 ? CODES_TOGETHER : TOGETHER;
    path->variant = g->fp8                    ? MT_CUDA_GEMM_FP8
                    : turned_suits(g) && !few ? turned_variant(g)
                    : adding_suits(g)         ? MT_CUDA_GEMM_ADDING
                    : (few && has_room(g, MT_CUDA_GEMM_DEEP)) || deep_suits(g)
                        ? MT_CUDA_GEMM_DEEP
                        : MT_CUDA_GEMM_PINGPONG;
    if (mt_cuda_gemm_sm90_variant(g, path->variant)->turned) path->width = SM90_WIDTH;
    if (g->fp8 && !plan_level(path, g) && !few) plan_tall(path, g);
}

mt_cuda_gemm_path mt_cuda_gemm_sm90_plan_rest(const gemm_problem *g)
{
    mt_cuda_gemm_path path = {};
    path.variant = variant_of_rest(g);
    path.width = mt_cuda_gemm_sm90_variant(g, path.variant)->width, path.super = TOGETHER;
    return path;
}

void mt_cuda_gemm_sm90_plan(mt_cuda_gemm_path *path, const gemm_problem *g, int multiprocessors)
{
    if (g->layout == MT_GEMM_NT)
        plan_wgrad(path, g, multiprocessors);
    else
        plan_rows(path, g, multiprocessors);
    if (!g->fp8 && !mt_cuda_gemm_sm90_variant(g, path->variant)->kernel) {
        path->variant = g->layout == MT_GEMM_NT ? MT_CUDA_GEMM_PINGPONG : MT_CUDA_GEMM_ALONE;
        path->super = TOGETHER;
    }
}

static bool suits_operands(const gemm_problem *g)
{
    bool wgrad = g->layout == MT_GEMM_NT;
    size_t result = gemm_sm90_result_size(g), size = g->fp8 ? 1 : sizeof(mt_bf16);
    int64_t rows = most_rows(&g->rows);
    return !g->a.real && !g->b.real && (wgrad || !g->d_real) && rows > 0 && rows < SM90_MOST &&
           fits_map(g->a.data, g->a.width, size) && fits_map(g->b.data, g->b.width, size) &&
           fits_map(g->d, g->d_width, result) && fits_map(g->c, g->d_width, result) &&
           (wgrad ? g->height : g->depth) < SM90_MOST;
}

bool mt_cuda_gemm_sm90_fits(const gemm_problem *g, const mt_cuda_gemm_path *path,
                            const gemm_sm90_variant *variant)
{
    bool wgrad = g->layout == MT_GEMM_NT;
    int grain = wgrad || variant->by_rows ? 64 : 8;
    if (!variant->kernel || path->width < grain || path->width > variant->width ||
        path->width % grain || path->super < 1 || !suits_operands(g))
        return false;
    int64_t tiles = mt_ceil_div(wgrad ? g->height : g->cols, 128);
    int64_t pieces = wgrad ? g->rows.members * (mt_ceil_div(g->cols, path->width) + 1)
                           : most_rows(&g->rows) / path->width + 2 * g->rows.members;
    return gemm_sm90_has_room(variant, g) && tiles * pieces < SM90_MOST / path->super;
}

bool mt_cuda_gemm_sm90_suits(const gemm_problem *g, const mt_cuda_gemm_path *path)
{
    bool bf16 = path->variant >= 0 && path->variant < MT_CUDA_GEMM_BF16;
    if (g->fp8 ? !suits_codes(g, path->variant) : !bf16) return false;
    return mt_cuda_gemm_sm90_fits(g, path, mt_cuda_gemm_sm90_variant(g, path->variant));
}
