/* One block of a grouped GEMM by pairs of bf16 (pairs.h), sums f32. Compiled beside the bf16
 * variant of avx512, whose packed weights it shares and which takes what it does not: operands of
 * f32. */
#include "kernels/cpu/pairs.h"

#include "kernels/cpu/gemm_priv.h"

mt_status MT_CPU(pack_weight)(mt_stream *stream, const struct mt_pack_weight_args *args);
size_t MT_CPU(packed_bytes)(mt_dtype dtype, mt_dir dir, int64_t members, int64_t m, int64_t k);

/* ROWS, COLS: of the largest block. CHUNK: rows of dY and X that NT packs at a time. */
enum { ROWS = 256, COLS = 512, CHUNK = 512 };
_Static_assert((int)STEP == PAIR_DEPTH && (int)HALF == PAIR_COLS,
               "a step takes two tiles of pairs");

struct scratch {
    _Alignas(64) float sums[STEP * STEP];
    _Alignas(64) mt_elem edge[STEP * STEP]; /* an operand's last lines, zeros past them */
    _Alignas(64) mt_elem a[ROWS * CHUNK];
    _Alignas(64) mt_elem b[COLS * CHUNK];
    _Alignas(64) float d[ROWS * COLS]; /* of NT, until the last chunk, where D is not f32 */
};

/* ---- results -----------------------------------------------------------------------------------
 */

MT_INLINE __m512 added(const gemm_tile_io *io, __m512 sum, int64_t r, int64_t j, __mmask16 mask)
{
    sum = _mm512_mul_ps(sum, _mm512_set1_ps(io->factors[0]));
    sum = _mm512_mul_ps(sum, _mm512_set1_ps(io->factors[1]));
    int64_t at = r * io->add_ld + j;
    if (io->add && io->add_real)
        sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, (const float *)io->add + at));
    if (io->add && !io->add_real) {
        __m256i half = _mm256_maskz_loadu_epi16(mask, (const mt_elem *)io->add + at);
        __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
        sum = _mm512_add_ps(sum, _mm512_castsi512_ps(wide));
    }
    if (io->bias) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, io->bias + j));
    return sum;
}

/* The sums of rows x cols, at most STEP x STEP, to where they go. */
static void put(const float *sums, int64_t rows, int64_t cols, const gemm_tile_io *io)
{
    __mmask32 mask = cols == STEP ? ~(__mmask32)0 : ((__mmask32)1 << cols) - 1;
    __mmask16 low = (__mmask16)mask, high = (__mmask16)(mask >> HALF);
    for (int64_t r = 0; r < rows; r++) {
        __m512 a = added(io, _mm512_load_ps(sums + r * STEP), r, 0, low);
        __m512 b = added(io, _mm512_load_ps(sums + r * STEP + HALF), r, HALF, high);
        if (io->out_real) {
            float *to = (float *)io->out + r * io->out_ld;
            _mm512_mask_storeu_ps(to, low, a);
            _mm512_mask_storeu_ps(to + HALF, high, b);
        } else {
            __m512i both = (__m512i)_mm512_cvtne2ps_pbh(b, a);
            _mm512_mask_storeu_epi16((mt_elem *)io->out + r * io->out_ld, mask, both);
        }
    }
}

/* Where the sums of a whole block go, and what they are added to: D and C. */
static gemm_tile_io results(const gemm_block *k)
{
    return (gemm_tile_io){
        .add = k->c,
        .out = k->d,
        .bias = k->bias,
        .add_ld = k->ld,
        .out_ld = k->ld,
        .add_real = k->d_real,
        .out_real = k->d_real,
        .factors = { k->factors[0], k->factors[1] },
    };
}

static size_t bytes_of(bool real)
{
    return real ? sizeof(float) : sizeof(mt_elem);
}

/* The same from row r and column j on. */
static gemm_tile_io place(const gemm_tile_io *whole, int64_t r, int64_t j)
{
    gemm_tile_io io = *whole;
    if (io.add) io.add = (const char *)io.add + (size_t)(r * io.add_ld + j) * bytes_of(io.add_real);
    io.out = (char *)io.out + (size_t)(r * io.out_ld + j) * bytes_of(io.out_real);
    if (io.bias) io.bias += j;
    return io;
}

/* ---- TN and NN: A in place, B packed ------------------------------------------------------------
 */

/* Up to STEP rows of A, from row r on, against every column. */
static void rows_against_all(const gemm_block *k, struct scratch *s, int64_t r, int64_t rows)
{
    int64_t ld = k->a.outer, full = k->depth / STEP, tail = k->depth % STEP;
    int64_t apart = (full + (tail > 0)) * TILE;
    const mt_elem *a = (const mt_elem *)k->a.data + r * ld, *b = k->b.data;
    const gemm_tile_io whole = results(k);
    if (tail) {
        memset(s->edge, 0, sizeof s->edge);
        for (int64_t i = 0; i < rows; i++)
            memcpy(s->edge + i * STEP, a + i * ld + full * STEP, (size_t)tail * sizeof *a);
    }
    for (int64_t j = 0; j < k->cols; j += STEP, b += 2 * apart) {
        multiply(s->sums, STEP, false, rows, &(struct steps){ a, b, ld, STEP, apart, full });
        if (tail)
            multiply(s->sums, STEP, true, rows,
                     &(struct steps){ s->edge, b + full * TILE, STEP, 0, apart, 1 });
        gemm_tile_io io = place(&whole, r, j);
        put(s->sums, rows, mt_min(STEP, k->cols - j), &io);
    }
}

static void packed_block(const gemm_block *k, struct scratch *s)
{
    int64_t shaped = 0;
    for (int64_t r = 0; r < k->rows; r += STEP) {
        int64_t rows = mt_min(STEP, k->rows - r);
        if (rows != shaped) begin_steps(shaped = rows);
        rows_against_all(k, s, r, rows);
    }
}

/* ---- NT: both operands packed, a chunk of rows at a time ----------------------------------------
 */

static void multiply_chunk(const gemm_block *k, struct scratch *s, int64_t steps,
                           const gemm_tile_io *whole)
{
    for (int64_t i = 0; i < k->rows; i += STEP)
        for (int64_t j = 0; j < k->cols; j += STEP) {
            multiply(s->sums, STEP, false, STEP,
                     &(struct steps){ .a = s->a + i * steps * STEP,
                                      .b = s->b + j * steps * STEP,
                                      .pitch = STEP,
                                      .stride = 2 * TILE,
                                      .apart = steps * TILE,
                                      .count = steps });
            gemm_tile_io io = place(whole, i, j);
            put(s->sums, mt_min(STEP, k->rows - i), mt_min(STEP, k->cols - j), &io);
        }
}

/* The first chunk is added to C, every later one to the sums so far: where D holds no f32, in
 * scratch, so that D is rounded once. */
static gemm_tile_io chunk_results(const gemm_block *k, struct scratch *s, bool first, bool last)
{
    gemm_tile_io io = results(k);
    if (!first) io.add = k->d_real ? k->d : s->d;
    if (k->d_real) return io;
    if (!first) io.add_ld = COLS, io.add_real = true;
    if (!last) io.out = s->d, io.out_ld = COLS, io.out_real = true;
    return io;
}

static void pack_chunk(const gemm_block *k, struct scratch *s, int64_t p, int64_t lines)
{
    int64_t apart = mt_ceil_div(lines, STEP) * TILE;
    pack_lines(s->a, gemm_at(&k->a, 0, p), k->a.step, s->edge, lines, k->rows, TILE,
               transpose_step);
    pack_lines(s->b, gemm_at(&k->b, 0, p), k->b.step, s->edge, lines, k->cols, apart, pair_step);
}

static void depth_block(const gemm_block *k, struct scratch *s)
{
    begin_steps(STEP);
    int64_t p = 0;
    do {
        gemm_tile_io whole = chunk_results(k, s, p == 0, p + CHUNK >= k->depth);
        int64_t lines = mt_min(CHUNK, k->depth - p), steps = mt_ceil_div(lines, STEP);
        if (lines) pack_chunk(k, s, p, lines); /* where there are no rows there is no memory */
        multiply_chunk(k, s, steps, &whole);
        p += CHUNK;
    } while (p < k->depth);
}

static void block(const gemm_block *k, void *scratch)
{
    if (k->b.form == GEMM_PAIRS)
        packed_block(k, scratch);
    else
        depth_block(k, scratch);
    end_steps();
}

static const gemm_kernel blocks = {
    .rows = ROWS,
    .cols = COLS,
    .unit = STEP,
    .fewest_rows = 2 * STEP,
    .fewest_deep = 2 * STEP,
    .weight = GEMM_PAIRS,
    .scratch = sizeof(struct scratch),
    .block = block,
};

/* ---- entry points -------------------------------------------------------------------------------
 */

mt_status MT_PAIRS_CPU(gemm)(mt_stream *stream, const struct mt_gemm_args *args)
{
    struct gemm_decoded plain;
    MT_TRY(MT_CPU(gemm_decode)(stream, &plain, args, true));
    const gemm_beside beside = { .factors = { plain.factors[0], plain.factors[1] } };
    return MT_CPU(gemm_run)(stream, &plain.args, plain.pairs ? &blocks : &MT_CPU(gemm_blocks),
                            &beside, NULL);
}

mt_status MT_PAIRS_CPU(pack_weight)(mt_stream *stream, const struct mt_pack_weight_args *args)
{
    return MT_CPU(pack_weight)(stream, args);
}

size_t MT_PAIRS_CPU(packed_bytes)(mt_dtype dtype, mt_dir dir, int64_t members, int64_t m, int64_t k)
{
    return MT_CPU(packed_bytes)(dtype, dir, members, m, k);
}

mt_dtype MT_PAIRS_CPU(gemm_operand)(const mt_format_spec *spec)
{
    return MT_CPU(decoded)(spec, true);
}
