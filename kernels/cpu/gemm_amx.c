/* One block of a grouped GEMM on AMX tiles: operands bf16, sums f32. Compiled once, beside the bf16
 * variant of avx512, whose packed weights it shares and which takes what it does not: operands of
 * f32.
 *
 * A step multiplies 32 rows of A by 32 columns of B over 32 depths: tiles 0 to 3 are the sums (two
 * by two), 4 and 5 A, 6 and 7 B. The tiles flush subnormals, of operands and of sums. */
#define MT_ISA  avx512
#define MT_ELEM bf16
#include "kernels/cpu/gemm_priv.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

mt_status MT_CPU(gemm)(mt_stream *stream, const struct mt_gemm_args *args);
mt_status MT_CPU(pack_weight)(mt_stream *stream, const struct mt_pack_weight_args *args);
size_t MT_CPU(packed_bytes)(mt_dtype dtype, mt_dir dir, int64_t members, int64_t m, int64_t k);

/* ROWS, COLS: of the largest block. CHUNK: rows of dY and X that NT packs at a time. STEP: the edge
 * of a step. */
enum { ROWS = 256, COLS = 512, CHUNK = 512, STEP = 32, HALF = STEP / 2 };
_Static_assert((int)STEP == PAIR_DEPTH && (int)HALF == PAIR_COLS,
               "a step takes two tiles of pairs");

struct scratch {
    _Alignas(64) float sums[4][HALF * HALF];
    _Alignas(64) mt_elem edge[STEP * STEP]; /* an operand's last lines, zeros past them */
    _Alignas(64) mt_elem a[ROWS * CHUNK];
    _Alignas(64) mt_elem b[COLS * CHUNK];
};

/* ---- tiles -------------------------------------------------------------------------------------
 */

/* The compilers' tile loads do not say that they read memory, nor ldtilecfg how much: stores before
 * this happen before it. */
MT_INLINE void visible(const void *p)
{
    __asm__ volatile("" ::"r"(p) : "memory");
}

/* Tiles for 1 to STEP rows of A: fewer rows take less time, and nothing past them is read. */
static void shape_tiles(int64_t rows)
{
    _Alignas(64) struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = { .palette = 1 };
    uint8_t upper = (uint8_t)mt_min(rows, HALF);
    uint8_t lower = (uint8_t)(rows > HALF ? rows - HALF : HALF);
    const uint8_t heights[8] = { upper, upper, lower, lower, upper, lower, HALF, HALF };
    for (int t = 0; t < 8; t++) config.bytes[t] = 64, config.rows[t] = heights[t];
    visible(&config);
    _tile_loadconfig(&config);
}

MT_INLINE void zero_sums(void)
{
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

/* `steps` steps. A's two tiles have rows `pitch` bytes apart and move by `stride` bytes; B's are
 * packed pairs. B streams, so that it does not push A's rows out of L1. */
MT_INLINE void multiply(const mt_elem *a0, const mt_elem *a1, int64_t pitch, int64_t stride,
                        const mt_elem *b0, const mt_elem *b1, int64_t steps, bool two)
{
    const char *p0 = (const char *)a0, *p1 = (const char *)a1;
    visible(p0);
    for (int64_t s = 0; s < steps; s++) {
        _tile_stream_loadd(6, b0 + s * PAIR_TILE, 64);
        _tile_loadd(4, p0 + s * stride, pitch);
        _tile_stream_loadd(7, b1 + s * PAIR_TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (two) _tile_loadd(5, p1 + s * stride, pitch);
        _tile_dpbf16ps(1, 4, 7);
        if (two) _tile_dpbf16ps(2, 5, 6);
        if (two) _tile_dpbf16ps(3, 5, 7);
    }
}

MT_INLINE void store_sums(float sums[4][HALF * HALF], bool two)
{
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    if (two) _tile_stored(2, sums[2], 64);
    if (two) _tile_stored(3, sums[3], 64);
    visible(sums);
}

/* ---- results -----------------------------------------------------------------------------------
 */

MT_INLINE __m512 added(const gemm_tile_io *io, __m512 sum, int64_t r, int64_t j, __mmask16 mask)
{
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
static void put(float sums[4][HALF * HALF], int64_t rows, int64_t cols, const gemm_tile_io *io)
{
    __mmask32 mask = cols == STEP ? ~(__mmask32)0 : ((__mmask32)1 << cols) - 1;
    __mmask16 low = (__mmask16)mask, high = (__mmask16)(mask >> HALF);
    for (int64_t r = 0; r < rows; r++) {
        const float *line = sums[r / HALF * 2] + r % HALF * HALF;
        __m512 a = added(io, _mm512_load_ps(line), r, 0, low);
        __m512 b = added(io, _mm512_load_ps(line + HALF * HALF), r, HALF, high);
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

/* Where the sums from row r and column j of block k go; `add` is what they are added to. */
static gemm_tile_io place(const gemm_block *k, const void *add, int64_t r, int64_t j)
{
    size_t at = (size_t)(r * k->ld + j) * (k->d_real ? sizeof(float) : sizeof(mt_elem));
    return (gemm_tile_io){
        .add = add ? (const char *)add + at : NULL,
        .out = (char *)k->d + at,
        .bias = k->bias ? k->bias + j : NULL,
        .add_ld = k->ld,
        .out_ld = k->ld,
        .add_real = k->d_real,
        .out_real = k->d_real,
    };
}

/* ---- TN and NN: A in place, B packed ------------------------------------------------------------
 */

/* Up to STEP rows of A, from row r on, against every column. `two`: more than HALF of them. */
MT_INLINE void rows_against_all(const gemm_block *k, struct scratch *s, int64_t r, int64_t rows,
                                bool two)
{
    int64_t ld = k->a.outer, full = k->depth / STEP, tail = k->depth % STEP,
            steps = full + (tail > 0);
    const mt_elem *a = (const mt_elem *)k->a.data + r * ld, *b = k->b.data;
    if (tail) {
        memset(s->edge, 0, sizeof s->edge);
        for (int64_t i = 0; i < rows; i++)
            memcpy(s->edge + i * STEP, a + i * ld + full * STEP, (size_t)tail * sizeof *a);
    }
    for (int64_t j = 0; j < k->cols; j += STEP, b += 2 * steps * PAIR_TILE) {
        const mt_elem *b1 = b + steps * PAIR_TILE;
        zero_sums();
        multiply(a, a + HALF * ld, ld * 2, STEP * 2, b, b1, full, two);
        if (tail)
            multiply(s->edge, s->edge + HALF * STEP, STEP * 2, 0, b + full * PAIR_TILE,
                     b1 + full * PAIR_TILE, 1, two);
        store_sums(s->sums, two);
        gemm_tile_io io = place(k, k->c, r, j);
        put(s->sums, rows, mt_min(STEP, k->cols - j), &io);
    }
}

static void packed_block(const gemm_block *k, struct scratch *s)
{
    int64_t shaped = 0;
    for (int64_t r = 0; r < k->rows; r += STEP) {
        int64_t rows = mt_min(STEP, k->rows - r);
        if (rows != shaped) shape_tiles(shaped = rows);
        if (rows > HALF)
            rows_against_all(k, s, r, rows, true);
        else
            rows_against_all(k, s, r, rows, false);
    }
}

/* ---- NT: both operands packed, a chunk of rows at a time ----------------------------------------
 */

/* 4 x 4 32-bit units transposed in each 128-bit lane. */
MT_INLINE void transpose_lanes(__m512i r[4])
{
    __m512i a = _mm512_unpacklo_epi32(r[0], r[1]), b = _mm512_unpackhi_epi32(r[0], r[1]);
    __m512i c = _mm512_unpacklo_epi32(r[2], r[3]), d = _mm512_unpackhi_epi32(r[2], r[3]);
    r[0] = _mm512_unpacklo_epi64(a, c), r[1] = _mm512_unpackhi_epi64(a, c);
    r[2] = _mm512_unpacklo_epi64(b, d), r[3] = _mm512_unpackhi_epi64(b, d);
}

/* Lane l is the 16 bytes at p + l * pitch. */
MT_INLINE __m512i load_lanes(const mt_elem *p, int64_t pitch)
{
    __m512i v = _mm512_castsi128_si512(_mm_loadu_si128((const void *)p));
    v = _mm512_mask_broadcast_i32x4(v, 0x00f0, _mm_loadu_si128((const void *)(p + pitch)));
    v = _mm512_mask_broadcast_i32x4(v, 0x0f00, _mm_loadu_si128((const void *)(p + 2 * pitch)));
    return _mm512_mask_broadcast_i32x4(v, 0xf000, _mm_loadu_si128((const void *)(p + 3 * pitch)));
}

/* A tile of A: STEP lines of HALF columns become HALF rows of STEP depths. */
static void transpose_tile(mt_elem *to, const mt_elem *from, int64_t ld)
{
    for (int64_t h = 0; h < HALF; h += 8) {
        __m512i low[4], high[4];
        for (int64_t q = 0; q < 4; q++) {
            __m512i even = load_lanes(from + 2 * q * ld + h, 8 * ld);
            __m512i odd = load_lanes(from + (2 * q + 1) * ld + h, 8 * ld);
            low[q] = _mm512_unpacklo_epi16(even, odd), high[q] = _mm512_unpackhi_epi16(even, odd);
        }
        transpose_lanes(low);
        transpose_lanes(high);
        for (int64_t i = 0; i < 4; i++) {
            _mm512_store_si512(to + (h + i) * STEP, low[i]);
            _mm512_store_si512(to + (h + 4 + i) * STEP, high[i]);
        }
    }
}

static void transpose_step(mt_elem *to0, mt_elem *to1, const mt_elem *from, int64_t ld)
{
    transpose_tile(to0, from, ld);
    transpose_tile(to1, from + HALF, ld);
}

/* Two tiles of B: STEP lines of STEP columns, neighbouring lines interleaved. */
static void pair_step(mt_elem *to0, mt_elem *to1, const mt_elem *from, int64_t ld)
{
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    for (int64_t q = 0; q < HALF; q++) {
        __m512i even = _mm512_loadu_si512(from + 2 * q * ld);
        __m512i odd = _mm512_loadu_si512(from + (2 * q + 1) * ld);
        even = _mm512_permutexvar_epi64(order, even), odd = _mm512_permutexvar_epi64(order, odd);
        _mm512_store_si512(to0 + q * STEP, _mm512_unpacklo_epi16(even, odd));
        _mm512_store_si512(to1 + q * STEP, _mm512_unpackhi_epi16(even, odd));
    }
}

/* Lines of an operand (a line is one depth) as pairs of panels of HALF columns, each ceil(lines /
 * STEP) tiles. */
static void pack_lines(mt_elem *to, const gemm_matrix *from, mt_elem *edge, int64_t p0,
                       int64_t lines, int64_t cols,
                       void (*step)(mt_elem *, mt_elem *, const mt_elem *, int64_t))
{
    int64_t steps = mt_ceil_div(lines, STEP);
    for (int64_t j = 0; j < cols; j += STEP, to += 2 * steps * PAIR_TILE)
        for (int64_t q = 0; q < steps; q++) {
            const mt_elem *at = gemm_at(from, j, p0 + q * STEP);
            int64_t ld = from->step, height = mt_min(STEP, lines - q * STEP);
            int64_t width = mt_min(STEP, cols - j);
            if (height < STEP || width < STEP) {
                memset(edge, 0, STEP * STEP * sizeof *edge);
                for (int64_t i = 0; i < height; i++)
                    memcpy(edge + i * STEP, at + i * ld, (size_t)width * sizeof *edge);
                at = edge, ld = STEP;
            }
            step(to + q * PAIR_TILE, to + (steps + q) * PAIR_TILE, at, ld);
        }
}

static void multiply_chunk(const gemm_block *k, struct scratch *s, int64_t steps, const void *add)
{
    for (int64_t i = 0; i < k->rows; i += STEP)
        for (int64_t j = 0; j < k->cols; j += STEP) {
            const mt_elem *a = s->a + i * steps * STEP, *b = s->b + j * steps * STEP;
            zero_sums();
            multiply(a, a + steps * PAIR_TILE, 64, PAIR_TILE * 2, b, b + steps * PAIR_TILE, steps,
                     true);
            store_sums(s->sums, true);
            gemm_tile_io io = place(k, add, i, j);
            put(s->sums, mt_min(STEP, k->rows - i), mt_min(STEP, k->cols - j), &io);
        }
}

static void depth_block(const gemm_block *k, struct scratch *s)
{
    shape_tiles(STEP);
    int64_t p = 0;
    do {
        int64_t lines = mt_min(CHUNK, k->depth - p);
        pack_lines(s->a, &k->a, s->edge, p, lines, k->rows, transpose_step);
        pack_lines(s->b, &k->b, s->edge, p, lines, k->cols, pair_step);
        multiply_chunk(k, s, mt_ceil_div(lines, STEP), p ? k->d : k->c);
        p += CHUNK;
    } while (p < k->depth);
}

static void block(const gemm_block *k, void *scratch)
{
    if (k->b.form == GEMM_PAIRS)
        packed_block(k, scratch);
    else
        depth_block(k, scratch);
    _tile_release();
}

static const gemm_kernel amx_blocks = {
    .rows = ROWS,
    .cols = COLS,
    .unit = STEP,
    .fewest_rows = 2 * STEP,
    .weight = GEMM_PAIRS,
    .scratch = sizeof(struct scratch),
    .block = block,
};

/* ---- entry points -------------------------------------------------------------------------------
 */

/* Asked before the machine's instruction set is known: nothing here may need more than x86-64. */
__attribute__((target("arch=x86-64"))) bool mt_cpu_amx_enable(void)
{
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    const unsigned amx = 1u << 22 | 1u << 24, osxsave = 1u << 27, avx512_bf16 = 1u << 5;
    unsigned a, b, c, d;
    __cpuid(0, a, b, c, d);
    if (a < 7) return false;
    __cpuid(1, a, b, c, d);
    if (!(c & osxsave)) return false;
    __cpuid_count(7, 0, a, b, c, d);
    if ((d & amx) != amx || a < 1) return false;
    __cpuid_count(7, 1, a, b, c, d);
    if (!(a & avx512_bf16)) return false;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

mt_status mt_cpu_gemm_amx_bf16(mt_stream *stream, const struct mt_gemm_args *args)
{
    const mt_format *bf16 = mt_format_plain(MT_BF16);
    if (mt_gemm_a(args)->format != bf16 || mt_gemm_b(args)->format != bf16)
        return MT_CPU(gemm)(stream, args);
    return MT_CPU(gemm_run)(stream, args, &amx_blocks);
}

mt_status mt_cpu_pack_weight_amx_bf16(mt_stream *stream, const struct mt_pack_weight_args *args)
{
    return MT_CPU(pack_weight)(stream, args);
}

size_t mt_cpu_packed_bytes_amx_bf16(mt_dtype dtype, mt_dir dir, int64_t members, int64_t m,
                                    int64_t k)
{
    return MT_CPU(packed_bytes)(dtype, dir, members, m, k);
}
