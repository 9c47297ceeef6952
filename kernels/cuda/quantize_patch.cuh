/* Inside the shortest way of quantize: a thread's patch of a tile, its magnitudes, its codes in
 * rows. */
#pragma once

#include "kernels/cuda/quantize_turns.cuh"

enum { RUN = 8, ROWS = 8 }; /* of a thread's patch: elements, rows */
enum { ROW_CODES = 1, COLUMN_CODES = 2 };

/* A warp has sixteen rows of a tile, half warps eight that follow each other. */
template <int KIND> struct patches {
    enum {
        HALF = kind<KIND>::HALF,
        PLANAR = kind<KIND>::IS_PLANAR,
        WORDS = 2 >> HALF,      /* of eight codes */
        LINE = TILE / 4 >> HALF /* words of a line of codes */
    };
};
static __device__ __forceinline__ int patch_row(void)
{
    return (int)threadIdx.x / 16 * ROWS;
}
static __device__ __forceinline__ int patch_column(void)
{
    return (int)threadIdx.x % 16 * RUN;
}

/* The units of a block's turns. Where codes are turned, several follow each other, down a column as
 * far as it goes: all blocks have as many at a time, at the end what is left. */
struct order {
    int64_t units;
    int run, last; /* units that follow each other; at the end */
    int turns;     /* before the end */
};
enum { RUN_TILES = 8 };

static __device__ __forceinline__ order order_of(int64_t units, int run)
{
    const int64_t rounds = units / (gridDim.x * run), rest = units - rounds * gridDim.x * run;
    return order{ units, run, (int)mt_ceil_div(rest, gridDim.x), (int)(rounds * run) };
}
/* That of turn n; `units` where there is none. */
static __device__ __forceinline__ int64_t unit_at(const order &o, int n)
{
    const int64_t blocks = gridDim.x, block = blockIdx.x;
    if (n < o.turns) return (n / o.run * blocks + block) * o.run + n % o.run;
    const int64_t unit = o.turns * blocks + block * o.last + n - o.turns;
    return n - o.turns < o.last && unit < o.units ? unit : o.units;
}

struct patch_space {
    order turns;
    frame frames[2 * WARPS]; /* of turns; member -1: there is none */
    block_found found[2];
    alignas(16) uint32_t codes[AREA / 2]; /* of columns, turned; of two tiles */
    uint8_t scales[TILE * SEGMENTS];
};

/* A patch; 0 beyond the tile. */
static __device__ __forceinline__ void load_patch(uint32_t x[ROWS][4], const frame &f)
{
    const int first = patch_row(), column = patch_column();
    const int rows = column < f.t.cols ? f.t.rows - first : 0;
    const int64_t pitch = f.t.m.cols;
    const mt_bf16 *from = f.source + first * pitch + column;
#pragma unroll
    for (int i = 0; i < ROWS; i++, from += pitch) {
        uint4 q = make_uint4(0, 0, 0, 0);
        if (i < rows) q = __ldg((const uint4 *)from);
        x[i][0] = q.x, x[i][1] = q.y, x[i][2] = q.z, x[i][3] = q.w;
    }
}

/* ---- magnitudes -------------------------------------------------------------------------------
 */

/* Those of a patch's rows and pairs of columns, two to a word; the number of its NaNs. */
struct extent {
    uint32_t row[ROWS], pair[4], all;
    int nans;
};

/* Two elements, 0 for NaN. */
static __device__ __forceinline__ uint32_t without_nans(uint32_t w)
{
    w = (w & 0x7fff) > 0x7f80 ? w & 0xffff0000u : w;
    return (w & 0x7fff0000u) > 0x7f800000u ? w & 0xffff : w;
}

static __device__ __forceinline__ void find_extent(extent *it, const uint32_t x[ROWS][4])
{
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        it->row[i] = magnitudes<4>(x[i]);
#pragma unroll
        for (int k = 0; k < 4; k++) it->pair[k] = i ? larger_pair(it->pair[k], x[i][k]) : x[i][k];
    }
    it->all = larger_half(magnitudes<4>(it->pair));
    it->nans = 0;
    if (it->all <= 0x7f80) return;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        uint32_t w[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            w[k] = without_nans(x[i][k]);
            it->nans += (w[k] ^ x[i][k]) & 0x7fff ? 1 : 0;
            it->nans += (w[k] ^ x[i][k]) & 0x7fff0000u ? 1 : 0;
            it->pair[k] = i ? larger_pair(it->pair[k], w[k]) : w[k];
        }
        it->row[i] = magnitudes<4>(w);
    }
    it->all = larger_half(magnitudes<4>(it->pair));
}

/* The k-th of four: registers have no index. */
template <typename T> static __device__ __forceinline__ T one_of(const T x[4], int k)
{
    return k & 2 ? (k & 1 ? x[3] : x[2]) : (k & 1 ? x[1] : x[0]);
}

/* ---- codes ------------------------------------------------------------------------------------
 */

/* fp8 codes of four products. */
template <int CODES>
static __device__ __forceinline__ uint32_t encode_four(const side &s, const uint32_t w[2],
                                                       const float enc[4])
{
#if MT_CONVERTS_FP8
    const mt_element element = CODES == CODES_E4M3 ? MT_ELEMENT_E4M3 : MT_ELEMENT_E5M2;
    return native_pair(element, element_of(w, 0) * enc[0], element_of(w, 1) * enc[1]) |
           native_pair(element, element_of(w, 2) * enc[2], element_of(w, 3) * enc[3]) << 16;
#else
    uint32_t q = 0;
    for (int e = 0; e < 4; e++)
        q |= (uint32_t)mt_encode(s.codec, element_of(w, e) * enc[e]) << 8 * e;
    return q;
#endif
}

/* Of eight with one scale. */
template <int CODES>
static __device__ __forceinline__ void encode_row(uint32_t q[2], const side &s, const uint32_t w[4],
                                                  float enc)
{
    const float same[4] = { enc, enc, enc, enc };
#pragma unroll
    for (int h = 0; h < 2; h++) q[h] = encode_four<CODES>(s, w + h * 2, same);
}

/* What the draws of a patch's rows share: of Philox's first three rounds what the row has no part
 * in. */
struct draws {
    uint32_t first, row, upper, word, lower, last;
};

static __device__ __forceinline__ draws draws_of(const job &j, const tile &t, int row, int column)
{
    const uint32_t m0 = 0xD2511F53u, m1 = 0xCD9E8D57u, w0 = 0x9E3779B9u, w1 = 0xBB67AE85u;
    const uint32_t member = j.first_member + (uint32_t)t.index;
    const uint32_t place = (uint32_t)(t.c0 + column) / RUN;
    const uint32_t k0 = j.key[0], k1 = j.key[1];
    const uint32_t second = __umulhi(m0, place) ^ draw_step(j) ^ k1;
    const uint32_t third = __umulhi(m1, second) ^ m1 * member ^ (k0 + w0);
    draws d;
    d.first = (uint32_t)t.r0 + (t.index ? 0 : j.first_row) + (uint32_t)row;
    d.row = __umulhi(m1, member) ^ k0;
    d.upper = m0 * place ^ (k1 + w1);
    d.word = m1 * second ^ (k0 + 2 * w0);
    d.lower = __umulhi(m0, third) ^ (k1 + 2 * w1);
    d.last = m0 * third;
    return d;
}

/* The bits of row i of a patch's elements, as they lie: a draw is eight elements. */
static __device__ __forceinline__ void draw_row(uint32_t bits[4], const job &j, const draws &d,
                                                int i)
{
    const uint32_t m0 = 0xD2511F53u, m1 = 0xCD9E8D57u, w0 = 0x9E3779B9u, w1 = 0xBB67AE85u;
    const uint64_t p = (uint64_t)m0 * ((d.first + (uint32_t)i) ^ d.row);
    const uint64_t q = (uint64_t)m1 * ((uint32_t)(p >> 32) ^ d.upper);
    uint32_t c0 = (uint32_t)(q >> 32) ^ d.word, c1 = (uint32_t)q, c2 = (uint32_t)p ^ d.lower,
             c3 = d.last;
#pragma unroll
    for (uint32_t round = 3; round < 10; round++) {
        const uint64_t p0 = (uint64_t)m0 * c0, p1 = (uint64_t)m1 * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ (j.key[0] + round * w0), c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ (j.key[1] + round * w1), c3 = (uint32_t)p0;
    }
    bits[0] = c0, bits[1] = c1, bits[2] = c2, bits[3] = c3;
}

/* Of eight products; rounded stochastically where there are bits. */
template <int KIND, int CODES>
static __device__ __forceinline__ void encode_run(uint32_t q[2], const side &s, const uint32_t w[4],
                                                  const float enc[RUN], bool nans,
                                                  const uint32_t *bits)
{
    if (CODES == CODES_E2M1) {
        q[0] = patches<KIND>::PLANAR ? shifted_nibbles(w, enc) : magnitude_nibbles(w, enc, bits);
        q[0] |= nibble_signs(w, nans);
    } else {
#pragma unroll
        for (int i = 0; i < 2; i++) q[i] = encode_four<CODES>(s, w + i * 2, enc + i * 4);
    }
}

template <int KIND>
static __device__ __forceinline__ void store_run(uint8_t *to, const uint32_t q[2])
{
    if (patches<KIND>::HALF)
        store_4(to, q[0]);
    else
        store_8(to, q[0], q[1]);
}

/* Scales of a patch's rows of NIBBLES, which two threads share out; both get what rows are
 * multiplied by. */
static __device__ __forceinline__ void make_row_scales(float enc[ROWS], const job &j,
                                                       const frame &f, const extent &it)
{
    enum { SHARERS = SEGMENT / RUN, EACH = ROWS / SHARERS };
    const side &s = j.p.sides[MT_ROW];
    const target &to = f.to[MT_ROW];
    const int mine = lane_of_warp() % SHARERS, first = lane_of_warp() - mine;
    const int column = patch_column() & ~(SEGMENT - 1), row0 = patch_row() + mine * EACH;
    const int count = column < f.t.cols ? f.t.rows - row0 : 0;
    uint32_t rows[4]; /* two rows to a word */
    float own[EACH];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t a = it.row[i * 2], b = it.row[i * 2 + 1];
        rows[i] = larger_halves(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
        rows[i] = larger_halves(rows[i], __shfl_xor_sync(~0u, rows[i], 1));
    }
    const int64_t step = line_step(to.scales);
    uint8_t *p = to.scales.at + scale_offset(to.scales, row0, column / SEGMENT);
#pragma unroll
    for (int i = 0; i < EACH; i++, p += step) {
        const int k = mine * EACH + i;
        cell e = cell_at<NIBBLES>(j, s, to.l, one_of(rows, k / 2) >> k % 2 * 16 & 0xffff);
        own[i] = e.enc;
        if (i < count) store_1(p, e.stored);
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) enc[i] = __shfl_sync(~0u, own[i % EACH], first + i / EACH);
}

/* Codes of rows, elements times enc of their row. Leaves the bits. */
template <int KIND, int CODES, bool SR>
static __device__ __forceinline__ void store_rows(const job &j, const frame &f,
                                                  const uint32_t x[ROWS][4], const float row[ROWS],
                                                  const draws &d, uint32_t bits[ROWS][4], bool nans)
{
    const int rows = patch_column() < f.t.cols ? f.t.rows - patch_row() : 0;
    const int64_t pitch = f.to[MT_ROW].pitch;
    uint8_t *to =
        f.to[MT_ROW].codes + patch_row() * pitch + (patch_column() >> patches<KIND>::HALF);
#pragma unroll
    for (int i = 0; i < ROWS; i++, to += pitch) {
        uint32_t q[2];
        float same[RUN];
        if (SR) draw_row(bits[i], j, d, i);
#pragma unroll
        for (int e = 0; e < RUN; e++) same[e] = row[i];
        encode_run<KIND, CODES>(q, j.p.sides[MT_ROW], x[i], same, nans, SR ? bits[i] : NULL);
        if (i < rows) store_run<KIND>(to, q);
    }
}
