/* The commonest case of quantize by the shortest way: codes of bf16 rows that begin at multiples of
 * 16 bytes, 1-D blocks or one scale a member. Threads have eight elements each
 * of eight rows in registers; only codes of columns go through shared memory, to be turned. The
 * arithmetic is that of the tiles. */
#include "kernels/cuda/quantize_turns.cuh"

enum { RUN = 8, ROWS = 8 }; /* of a thread's patch: elements, rows */
enum { ROW_CODES = 1, COLUMN_CODES = 2 };

/* A warp has sixteen rows of a tile, half warps eight that follow each other. */
template <int KIND> struct patches {
    enum {
        HALF = kind<KIND>::HALF,
        PLANAR = kind<KIND>::IS_PLANAR,
        WORDS = 2 >> HALF,       /* of eight codes */
        LINE = TILE / 4 >> HALF, /* words of a line of codes */
        /* threads of a row of a block, as far as they share its scales out */
        BLOCK = KIND == LINES ? 16
                : PLANAR      ? 4
                              : 2,
        SHARERS = BLOCK < ROWS ? BLOCK : ROWS,
        EACH = ROWS / SHARERS
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

struct patch_space {
    frame frames[4];
    block_found found[2];
    alignas(16) uint32_t codes[2][AREA / 4]; /* of columns, turned; of the last tile and this one */
    alignas(16) uint32_t partial[WARPS][PAIRS]; /* magnitudes of a warp's rows */
    alignas(16) float enc[PLANAR_BLOCKS][TILE]; /* of columns */
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

/* The bits of a patch's elements, as they lie; a draw is eight elements. */
static __device__ __forceinline__ void draw_patch(uint32_t bits[ROWS][4], const job &j,
                                                  const tile &t)
{
    const uint32_t now = draw_step(j), m = j.first_member + (uint32_t)t.index;
    const uint32_t first = (uint32_t)t.r0 + (t.index ? 0 : j.first_row) + (uint32_t)patch_row();
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const uint32_t counter[4] = { (uint32_t)(t.c0 + patch_column()) / RUN, first + (uint32_t)i,
                                      m, now };
        mt_philox(bits[i], counter, j.key);
    }
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

/* The scales of a patch's rows, which the threads of a block share out; all get what rows are
 * multiplied by. */
template <int KIND>
static __device__ __forceinline__ void make_row_scales(float enc[ROWS], const job &j,
                                                       const frame &f, const extent &it)
{
    typedef patches<KIND> at;
    const side &s = j.p.sides[MT_ROW];
    const target &to = f.to[MT_ROW];
    const int mine = lane_of_warp() % at::SHARERS, first = lane_of_warp() - mine;
    const int column = patch_column() & ~(at::BLOCK * RUN - 1);
    uint32_t rows[4]; /* two rows to a word */
    float own[at::EACH];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t a = it.row[i * 2], b = it.row[i * 2 + 1];
        rows[i] = larger_halves(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
#pragma unroll
        for (int lane = 1; lane < at::BLOCK; lane *= 2)
            rows[i] = larger_halves(rows[i], __shfl_xor_sync(~0u, rows[i], lane));
    }
#pragma unroll
    for (int i = 0; i < at::EACH; i++) {
        const int k = mine * at::EACH + i, r = patch_row() + k;
        cell e = cell_at<KIND>(j, s, to.l, one_of(rows, k / 2) >> k % 2 * 16 & 0xffff);
        own[i] = e.enc;
        if (r < f.t.rows && column < f.t.cols && lane_of_warp() % at::BLOCK == mine)
            put_stored(s, to, e, r, column >> s.block_shift);
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++)
        enc[i] = __shfl_sync(~0u, own[i % at::EACH], first + i / at::EACH);
}

/* Codes in rows: of the row direction, elements times enc of their row, and of planar columns,
 * times that of their column. */
template <int KIND, int DIRS, int CODES, bool SR>
static __device__ __forceinline__ void
store_rows(const job &j, const frame &f, const uint32_t x[ROWS][4], const float row[ROWS],
           const float column[RUN], const uint32_t bits[ROWS][4], bool nans)
{
    typedef patches<KIND> at;
    const int rows = patch_column() < f.t.cols ? f.t.rows - patch_row() : 0;
    uint8_t *to[MT_DIR_COUNT];
#pragma unroll
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
        const int64_t pitch = f.to[dir].pitch;
        to[dir] = f.to[dir].codes + patch_row() * pitch + (patch_column() >> at::HALF);
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        uint32_t q[MT_DIR_COUNT][2];
        float same[RUN];
#pragma unroll
        for (int e = 0; e < RUN; e++) same[e] = row[i];
        if (DIRS & ROW_CODES)
            encode_run<KIND, CODES>(q[MT_ROW], j.p.sides[MT_ROW], x[i], same, nans,
                                    SR ? bits[i] : NULL);
        if (DIRS & COLUMN_CODES)
            encode_run<KIND, CODES>(q[MT_COL], j.p.sides[MT_COL], x[i], column, nans,
                                    SR ? bits[i] : NULL);
        if (i < rows) {
            if (DIRS & ROW_CODES) store_run<KIND>(to[MT_ROW], q[MT_ROW]);
            if (DIRS & COLUMN_CODES) store_run<KIND>(to[MT_COL], q[MT_COL]);
        }
        to[MT_ROW] += f.to[MT_ROW].pitch, to[MT_COL] += f.to[MT_COL].pitch;
    }
}

/* ---- columns ----------------------------------------------------------------------------------
 */

/* Leaves the magnitudes of a warp's columns. */
static __device__ __forceinline__ void leave_magnitudes(patch_space *sp, const extent &it)
{
    uint32_t most[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        most[k] = it.pair[k] & 0x7fff7fffu;
        most[k] = larger_halves(most[k], __shfl_xor_sync(~0u, most[k], 16));
    }
    if (lane_of_warp() < 16)
        *(uint4 *)(sp->partial[threadIdx.x / 32] + lane_of_warp() * 4) =
            make_uint4(most[0], most[1], most[2], most[3]);
}

/* Scales of columns' blocks of some warps' rows, whose magnitudes have been left, and what a
 * patch's columns are multiplied by. The whole thread block comes here. */
template <int KIND>
static __device__ __forceinline__ void make_shared_scales(float enc[RUN], const job &j,
                                                          patch_space *sp, const frame &f)
{
    enum { BLOCK_WARPS = KIND == LINES ? WARPS : 2, BLOCK_ROWS = BLOCK_WARPS * SEGMENT };
    const side &s = j.p.sides[MT_COL];
    __syncthreads(); /* the magnitudes are there */
#pragma unroll
    for (int i = threadIdx.x; i < TILE * TILE / BLOCK_ROWS; i += TILE_THREADS) {
        const int c = i % TILE, block = i / TILE;
        uint32_t most = 0;
#pragma unroll
        for (int w = 0; w < BLOCK_WARPS; w++)
            most = larger_halves(most, sp->partial[block * BLOCK_WARPS + w][c / 2]);
        cell e = cell_at<KIND>(j, s, f.to[MT_COL].l, most >> c % 2 * 16 & 0xffff);
        sp->enc[block][c] = e.enc;
        if (c < f.t.cols && block * BLOCK_ROWS < f.t.rows) put_stored(s, f.to[MT_COL], e, c, block);
    }
    __syncthreads();
#pragma unroll
    for (int e = 0; e < RUN; e += 4) {
        float4 q = *(const float4 *)(sp->enc[patch_row() / BLOCK_ROWS] + patch_column() + e);
        enc[e] = q.x, enc[e + 1] = q.y, enc[e + 2] = q.z, enc[e + 3] = q.w;
    }
}

/* The same where a warp's rows are a block; scales are left. */
static __device__ __forceinline__ void
make_nibble_scales(float enc[RUN], const job &j, patch_space *sp, const frame &f, const extent &it)
{
    const int mine = lane_of_warp() / 16;
    uint8_t *scales = sp->scales + patch_column() * SEGMENTS + threadIdx.x / 32;
    uint32_t most[4];
    float own[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        most[k] = it.pair[k] & 0x7fff7fffu;
        most[k] = larger_halves(most[k], __shfl_xor_sync(~0u, most[k], 16));
    }
#pragma unroll
    for (int i = 0; i < 4; i++) { /* half warps have four of the eight */
        const uint32_t pair = mine ? most[2 + i / 2] : most[i / 2];
        cell e =
            cell_at<NIBBLES>(j, j.p.sides[MT_COL], f.to[MT_COL].l, pair >> i % 2 * 16 & 0xffff);
        own[i] = e.enc;
        scales[(mine * 4 + i) * SEGMENTS] = e.stored;
    }
#pragma unroll
    for (int e = 0; e < RUN; e++)
        enc[e] = __shfl_sync(~0u, own[e % 4], lane_of_warp() % 16 + e / 4 * 16);
}

/* Where the codes of eight rows of a column begin, and of a word of a line: eight columns beside
 * each other have theirs in the same place, the next eight in another, so that they meet in no
 * bank. */
template <int KIND> static __device__ __forceinline__ int turned_place(int c, int group)
{
    return c * patches<KIND>::LINE + (group ^ (c >> 3)) * patches<KIND>::WORDS;
}
template <int KIND> static __device__ __forceinline__ int word_place(int c, int word)
{
    enum { WORDS = patches<KIND>::WORDS };
    return turned_place<KIND>(c, word / WORDS) + word % WORDS;
}

/* Leaves the codes of a patch's columns. */
template <int KIND, int CODES, bool SR>
static __device__ __forceinline__ void turn_patch(uint32_t *codes, const side &s,
                                                  const uint32_t x[ROWS][4], const float enc[RUN],
                                                  const uint32_t bits[ROWS][4], bool nans)
{
    const int group = patch_row() / ROWS, column = patch_column();
#pragma unroll
    for (int c = 0; c < RUN; c++) {
        uint32_t w[4], r[4], q[2];
        float same[RUN];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t half = c % 2 ? 0x7632 : 0x5410;
            w[i] = __byte_perm(x[i * 2][c / 2], x[i * 2 + 1][c / 2], half);
            r[i] = SR ? __byte_perm(bits[i * 2][c / 2], bits[i * 2 + 1][c / 2], half) : 0;
        }
#pragma unroll
        for (int i = 0; i < RUN; i++) same[i] = enc[c];
        encode_run<KIND, CODES>(q, s, w, same, nans, SR ? r : NULL);
        uint32_t *to = codes + turned_place<KIND>(column + c, group);
        if (patches<KIND>::HALF)
            *to = q[0];
        else
            *(uint2 *)to = make_uint2(q[0], q[1]);
    }
}

/* Lines that begin at multiples of 16 bytes. */
template <int KIND>
static __device__ __forceinline__ void put_even_lines(const uint32_t *codes, const target &to,
                                                      int cols, int bytes)
{
    enum { LANES = patches<KIND>::LINE / 4, STEP = TILE_THREADS / LANES };
    const int at = (int)threadIdx.x % LANES, first = (int)threadIdx.x / LANES;
    uint8_t *p = to.codes + first * to.pitch + at * 16;
    if (at * 16 >= bytes) return;
#pragma unroll
    for (int c = first; c < TILE; c += STEP, p += STEP * to.pitch) {
        const int k = c >> 3; /* how its words have changed places */
        uint4 q;
        if (patches<KIND>::HALF) {
            q = *(const uint4 *)(codes + c * patches<KIND>::LINE + (at ^ k >> 2) * 4);
            if (k & 2) q = make_uint4(q.z, q.w, q.x, q.y);
            if (k & 1) q = make_uint4(q.y, q.x, q.w, q.z);
        } else {
            q = *(const uint4 *)(codes + c * patches<KIND>::LINE + (at ^ k >> 1) * 4);
            if (k & 1) q = make_uint4(q.z, q.w, q.x, q.y);
        }
        if (c < cols) store_16(p, q.x, q.y, q.z, q.w);
    }
}

/* Lines that begin anywhere, in sectors of 32 bytes, which are written once and whole: what begins
 * a line's last one is left to the tile below, which follows in the next turn (`on`), unless there
 * is none; this one begins with what was left of `last`, where it is not NULL. Else words that are
 * others' too are written byte by byte. */
template <int KIND>
static __device__ __forceinline__ void put_uneven_lines(const uint32_t *codes, const uint32_t *last,
                                                        const target &to, int cols, int bytes,
                                                        bool on)
{
    enum { LINE = patches<KIND>::LINE, STEP = TILE_THREADS / LINE, SECTOR = 32 };
    const int at = (int)threadIdx.x % LINE, first = (int)threadIdx.x / LINE;
    const uint8_t *p = to.codes + first * to.pitch;
#pragma unroll 2
    for (int c = first; c < cols; c += STEP, p += STEP * to.pitch) {
        /* counted from the sector's begin */
        const int begin = (int)((uintptr_t)p & (SECTOR - 1)), end = on ? LINE * 4 : begin + bytes;
        uint8_t *sector = (uint8_t *)p - begin;
        const auto word = [&](int i) {
            return i >= 0 ? codes[word_place<KIND>(c, i)] : last[word_place<KIND>(c, i + LINE)];
        };
        const auto put = [&](int i) { /* a whole word */
                                      const int w = i - begin / 4, before = w - 1;
                                      if (i * 4 + 4 > end || (!last && i * 4 < begin)) return;
                                      const uint32_t low = begin % 4 ? word(before) : 0;
                                      store_4(sector + i * 4,
                                              __funnelshift_l(low, word(w), begin % 4 * 8));
        };
        put(at);
        if (!on && at < SECTOR / 4) put(LINE + at);
        if (on && last) continue;
        const int whole = last ? 0 : (begin + 3) & ~3, rest = end & ~3; /* words from, to */
        const int tail = rest > whole ? rest : whole;
        const int b = at < 4 ? begin + at : tail + at - 4; /* single bytes before and behind */
        if (at < 4 ? b < whole && b < end : at < 8 && b < end)
            sector[b] = (uint8_t)(word((b - begin) >> 2) >> ((b - begin) & 3) * 8);
    }
}

/* Turned codes, and scales of nibbles, to where they go; on: see above. */
template <int KIND>
static __device__ __forceinline__ void put_turned(const patch_space *sp, const frame &f,
                                                  const uint32_t *codes, const uint32_t *last,
                                                  bool on)
{
    enum { HALF = patches<KIND>::HALF };
    const target &to = f.to[MT_COL];
    const int bytes = ((to.padded ? (int)TILE : f.t.rows) + HALF) >> HALF;
    if (to.even)
        put_even_lines<KIND>(codes, to, f.t.cols, bytes);
    else
        put_uneven_lines<KIND>(codes, last, to, f.t.cols, bytes, on);
    for (int i = threadIdx.x; KIND == NIBBLES && i < f.t.cols * SEGMENTS; i += TILE_THREADS)
        if (i % SEGMENTS * SEGMENT < f.t.rows)
            to.scales.at[scale_offset(to.scales, i / SEGMENTS, i % SEGMENTS)] = sp->scales[i];
}

/* Whether the tile of `next` is below that of f, in the same member. */
static __device__ __forceinline__ bool is_below(const frame &next, const frame &f)
{
    return next.t.index == f.t.index && next.t.c0 == f.t.c0 && next.t.r0 == f.t.r0 + TILE;
}

/* ---- the kernel -------------------------------------------------------------------------------
 */

/* Codes and scales of a patch; those of turned columns are left in shared memory. */
template <int KIND, int DIRS, int CODES, bool SR>
static __device__ __forceinline__ void run_patch(const job &j, patch_space *sp, const frame &f,
                                                 uint32_t *codes, const uint32_t x[ROWS][4],
                                                 found *it)
{
    enum { PLANAR = patches<KIND>::PLANAR };
    extent e = {};
    if (KIND != WHOLE || is_measured(j)) find_extent(&e, x);
    it->nans += e.nans, raise(&it->most[MT_ROW], e.all), raise(&it->most[MT_COL], e.all);
    if ((KIND == LINES || PLANAR) && (DIRS & COLUMN_CODES)) leave_magnitudes(sp, e);
    float row[ROWS] = {}, column[RUN] = {};
    uint32_t bits[ROWS][4];
    if (SR) draw_patch(bits, j, f.t);
    if (DIRS & ROW_CODES) {
        if (KIND != WHOLE) make_row_scales<KIND>(row, j, f, e);
#pragma unroll
        for (int i = 0; KIND == WHOLE && i < ROWS; i++) row[i] = f.to[MT_ROW].l.enc;
    }
    if (PLANAR && (DIRS & COLUMN_CODES)) make_shared_scales<KIND>(column, j, sp, f);
    if (PLANAR || (DIRS & ROW_CODES))
        store_rows<KIND, PLANAR ? DIRS : ROW_CODES, CODES, SR>(j, f, x, row, column, bits,
                                                               e.nans > 0);
    if (PLANAR || !(DIRS & COLUMN_CODES)) return;
    if (KIND == LINES) make_shared_scales<KIND>(column, j, sp, f);
    if (KIND == NIBBLES) make_nibble_scales(column, j, sp, f, e);
#pragma unroll
    for (int i = 0; KIND == WHOLE && i < RUN; i++) column[i] = f.to[MT_COL].l.enc;
    turn_patch<KIND, CODES, SR>(codes, j.p.sides[MT_COL], x, column, bits, e.nans > 0);
}

/* The units of a block's turns: where codes are turned, four follow each other down a column as
 * long as all blocks have four; otherwise each block has every gridDim-th. */
struct order {
    enum { RUN_TILES = 4 };
    int64_t units;
    int runs; /* turns in fours */
};

static __device__ __forceinline__ order order_of(int64_t units, bool turned)
{
    const unsigned fours = gridDim.x * order::RUN_TILES;
    return order{ units, turned ? (int)((uint64_t)units / fours) * order::RUN_TILES : 0 };
}
static __device__ __forceinline__ int64_t unit_at(const order &o, int n)
{
    const int fours = n / order::RUN_TILES;
    if (n < o.runs)
        return (fours * (int64_t)gridDim.x + blockIdx.x) * order::RUN_TILES + n % order::RUN_TILES;
    return n * (int64_t)gridDim.x + blockIdx.x;
}

/* As short_kernel's turns; the patches of the next tile are on their way while turned codes of one
 * go out. */
template <int KIND, int DIRS, int CODES, bool SR>
static __global__ void __launch_bounds__(TILE_THREADS, SR ? 2 : 3)
    patch_kernel(const __grid_constant__ job j)
{
    __shared__ patch_space space;
    patch_space *sp = &space;
    const bool turned = !patches<KIND>::PLANAR && (DIRS & COLUMN_CODES);
    wait_for_results();
    const order o = order_of(j.p.units[j.p.group.members], turned);
    const int warp = (int)threadIdx.x / 32;
    const auto find = [&](int n) {
        const int64_t unit = unit_at(o, n);
        if (unit < o.units) find_tile(&sp->frames[n & 3], j, unit, turned ? order::RUN_TILES : 1);
    };
    const auto set = [&](int n, int dir) {
        frame *f = &sp->frames[n & 3];
        if (unit_at(o, n) < o.units && lane_of_warp() == 0) set_target(&f->to[dir], j, f->t, dir);
    };
    uint32_t x[ROWS][4];
    found it = {};
    int64_t given = -1; /* the member that the block has found something of */
    bool on = false;    /* the tile before this one left it the ends of its lines */
    if (threadIdx.x < 2) sp->found[threadIdx.x] = block_found{};
    if (warp < 3) find(warp);
    __syncthreads();
    if (unit_at(o, 0) < o.units) load_patch(x, sp->frames[0]);
    if (warp < 4) set(warp / 2, warp % 2);
    int n = 0;
    for (; unit_at(o, n) < o.units; n++) {
        const frame &f = sp->frames[n & 3], &next = sp->frames[(n + 1) & 3];
        const bool more = unit_at(o, n + 1) < o.units;
        const int place = (warp - n) & (WARPS - 1);
        __syncthreads(); /* the frame is there; the codes of the last tile have been read */
        if (place == 0)
            find(n + 3);
        else if (place <= MT_DIR_COUNT)
            set(n + 2, place - 1);
        else if (place == WARPS - 1 && given >= 0 && lane_of_warp() == 0)
            pass_on(&sp->found[~n & 1], j, given);
        given = -1;
        run_patch<KIND, DIRS, CODES, SR>(j, sp, f, sp->codes[n & 1], x, &it);
        if (more) load_patch(x, next);
        if (turned) {
            const uint32_t *last = on ? sp->codes[~n & 1] : NULL;
            on = more && !f.to[MT_COL].even && is_below(next, f);
            __syncthreads(); /* all codes are there */
            put_turned<KIND>(sp, f, sp->codes[n & 1], last, on);
        }
        if (more && next.t.index == f.t.index) continue;
        give_found(&sp->found[n & 1], j, &it);
        given = f.t.index;
    }
    __syncthreads(); /* all have given */
    if (threadIdx.x == 0 && given >= 0) pass_on(&sp->found[~n & 1], j, given);
    end_block(j);
}

/* ---- the host's part --------------------------------------------------------------------------
 */

bool mt_cuda_patches_suffice(const job *j)
{
    const side *row = &j->p.sides[MT_ROW], *col = &j->p.sides[MT_COL];
    const mt_group *g = &j->p.group;
    if (!j->codes || j->row_token || j->swiglu || j->sums || g->last_dims || g->k % RUN)
        return false;
    if ((uintptr_t)j->p.sides[SOURCE].codes % 16) return false;
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
        const side *s = &j->p.sides[dir];
        if (!s->present) continue;
        if (s->options.rht || s->options.four_over_six) return false;
        if (!s->transposed && (uintptr_t)s->codes % (s->codes_per_byte == 1 ? 8 : 4)) return false;
    }
    return !row->present || !col->present ||
           (row->options.element == col->options.element && row->options.sr == col->options.sr);
}

template <int KIND, int DIRS, int CODES, bool SR>
static mt_status launch(mt_stream *stream, const job *j)
{
    int64_t units = mt_cuda_plan_units(&j->p.group);
    int64_t most = (int64_t)mt_cuda_multiprocessors(stream) * (SR ? 2 : 3);
    MT_TRY(follow(stream, patch_kernel<KIND, DIRS, CODES, SR>,
                  (unsigned)(units < most ? units : most), TILE_THREADS, 0, *j));
    MT_LAUNCHED(stream, "quantize: patches");
    return MT_OK;
}

typedef mt_status (*launcher)(mt_stream *, const job *);

template <int KIND, int CODES, bool SR> static launcher launcher_of(int dirs)
{
    static const launcher launches[] = { launch<KIND, ROW_CODES, CODES, SR>,
                                         launch<KIND, COLUMN_CODES, CODES, SR>,
                                         launch<KIND, ROW_CODES | COLUMN_CODES, CODES, SR> };
    return launches[dirs - 1];
}

mt_status mt_cuda_quantize_patches(mt_stream *stream, const job *j)
{
    /* each to nearest E4M3 or E2M1; to E5M2, or stochastically */
    static launcher (*const kinds[KINDS][2])(int) = {
        { launcher_of<WHOLE, CODES_E4M3, false>, launcher_of<WHOLE, CODES_E5M2, false> },
        { launcher_of<LINES, CODES_E4M3, false>, launcher_of<LINES, CODES_E5M2, false> },
        { launcher_of<PLANAR, CODES_E4M3, false>, launcher_of<PLANAR, CODES_E5M2, false> },
        { launcher_of<NIBBLES, CODES_E2M1, false>, launcher_of<NIBBLES, CODES_E2M1, true> },
        { launcher_of<PLANAR_NIBBLES, CODES_E2M1, false> }
    };
    const side *row = &j->p.sides[MT_ROW], *col = &j->p.sides[MT_COL];
    const side *any = row->present ? row : col;
    const int dirs = (row->present ? ROW_CODES : 0) + (col->present ? COLUMN_CODES : 0);
    const bool second = any->options.sr || mt_codes_kind(*any) == CODES_E5M2;
    return kinds[mt_cuda_short_kind(j)][second](dirs)(stream, j);
}
