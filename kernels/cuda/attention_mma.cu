/* Causal attention on tensor cores: bf16, heads of a multiple of 8 up to 128, which zeros widen to
 * the next of 16, 32, 64, 96 and 128 in shared memory.
 *
 * A block owns rows (queries, or keys with their gradients) and passes over tiles of STEP columns,
 * copied to shared memory one tile ahead. A warp owns 16 MT rows of every product, so that scores
 * turn into the left operand of the next product in its registers, and sums over columns never
 * leave it. Backward computes scores twice, once owning keys and once owning queries: every sum has
 * one writer and a fixed order. Source: arXiv 2307.08691. */
#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/mma.cuh"

/* Probabilities and the gradients of scores are rounded to bf16 where they meet the next product,
 * as on the CPU's tiles. */
enum { STEP = 64, TILES = STEP / 8 };

/* Rows of D elements in shared memory, padded so that the same columns of eight rows lie in
 * different banks. */
template <int D> struct padded {
    enum { PITCH = D + 8 };
};

/* ---- copies -----------------------------------------------------------------------------------
 */

/* to [ROWS][PITCH] = `count` rows of `dim`, `pitch` apart; the others, and columns up to D, 0. A
 * tile spans less than 2^31 elements (suits). */
template <int D, int ROWS, int THREADS>
static __device__ __forceinline__ void copy_rows(mt_bf16 *to, const mt_bf16 *from, int64_t pitch,
                                                 int64_t count, int64_t dim)
{
    enum { EACH = D / 8, LINES = THREADS / EACH };
    int r = (int)threadIdx.x / EACH, c = (int)threadIdx.x % EACH * 8, line = (int)pitch;
    int rows = c < dim ? (int)(count < ROWS ? count : ROWS) : 0;
    if (THREADS % EACH && r >= LINES) return;
    to += r * padded<D>::PITCH + c;
#pragma unroll
    for (int i = 0; i < ROWS; i += LINES) {
        bool valid = i + r < rows;
        if (ROWS % LINES && i + r >= ROWS) break;
        mt_copy_ask<16>(to + i * padded<D>::PITCH, from + (valid ? (i + r) * line + c : 0),
                        valid ? 16 : 0);
    }
}

/* ---- products ---------------------------------------------------------------------------------
 */

/* sum [16 MT, STEP] = a b^T: a [16 MT, D], b [STEP, D] in shared memory. */
template <int D, int MT>
static __device__ __forceinline__ void inner_products(float (*sum)[TILES][4], const mt_bf16 *a,
                                                      const mt_bf16 *b)
{
    enum { PITCH = padded<D>::PITCH };
    int lane = threadIdx.x % 32;
    a += (lane % 16) * PITCH + lane / 16 * 8;
    b += (lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 8;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) sum[m][n][e] = 0;
#pragma unroll
    for (int d = 0; d < D; d += 16) {
        uint32_t left[MT][4], right[4];
#pragma unroll
        for (int m = 0; m < MT; m++) mt_load_matrices(left[m], a + m * 16 * PITCH + d);
#pragma unroll
        for (int n = 0; n < TILES; n += 2) {
            mt_load_matrices(right, b + n * 8 * PITCH + d);
#pragma unroll
            for (int m = 0; m < MT; m++) {
                mt_mma(sum[m][n], left[m], right[0], right[1]);
                mt_mma(sum[m][n + 1], left[m], right[2], right[3]);
            }
        }
    }
}

/* Of sum [16 MT, D] the columns of tiles n to n + 3, if there are so many. */
template <int D, int MT>
static __device__ __forceinline__ void multiply(float (*sum)[D / 8][4], const uint32_t (*left)[4],
                                                const uint32_t (*right)[4], int n)
{
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int j = 0; j < 4 && n + j < D / 8; j++)
            mt_mma(sum[m][n + j], left[m], right[j / 2][j % 2 * 2], right[j / 2][j % 2 * 2 + 1]);
}

/* sum [16 MT, D] += p b: p [16 MT, STEP] as a product left it, b [STEP, D] in shared memory. */
template <int D, int MT>
static __device__ __forceinline__ void add_product(float (*sum)[D / 8][4],
                                                   const float (*p)[TILES][4], const mt_bf16 *b)
{
    enum { PITCH = padded<D>::PITCH };
    int lane = threadIdx.x % 32;
    b += (lane % 16) * PITCH + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < TILES; k += 2) {
        uint32_t left[MT][4], right[2][4];
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float *x = &p[m][k + i / 2][i % 2 * 2];
                left[m][i] = mt_pack(x[0], x[1]);
            }
#pragma unroll
        for (int n = 0; n < D / 8; n += 4) { /* sums that wait for each other lie far apart */
            mt_load_transposed(right[0], b + k * 8 * PITCH + n * 8);
            if (n + 2 < D / 8) mt_load_transposed(right[1], b + k * 8 * PITCH + n * 8 + 16);
            multiply<D, MT>(sum, left, right, n);
        }
    }
}

/* Of a 16 x 8 product a lane holds elements e: row row_in(e), columns column_in(e). */
static __device__ __forceinline__ int row_in(int e)
{
    return threadIdx.x % 32 / 4 + e / 2 * 8;
}
static __device__ __forceinline__ int column_in(int e)
{
    return threadIdx.x % 4 * 2 + e % 2;
}

/* The first `count` rows of to, `pitch` apart, = scale * sum [16, D]; for each of a lane's two. Of
 * D columns the first `dim`. */
template <int D>
static __device__ __forceinline__ void store_rows(mt_bf16 *to, int64_t pitch, int64_t count,
                                                  int64_t dim, const float (*sum)[4],
                                                  const float *scale)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int r = row_in(2 * i);
        if (r >= count) continue;
        uint32_t *row = (uint32_t *)(to + r * pitch + column_in(0));
#pragma unroll
        for (int n = 0; n < D / 8; n++)
            if (n * 8 < dim)
                row[n * 4] = mt_pack(scale[i] * sum[n][2 * i], scale[i] * sum[n][2 * i + 1]);
    }
}

/* What a block owns: the rows from `row` on of head h of sequence b. Blocks with the longest sums
 * are started first, those of one row beside each other. */
struct own {
    int64_t row, h, b;
};

static __device__ __forceinline__ struct own own_of(const struct mt_attention_shape &s,
                                                    int64_t heads, int size, bool last_first)
{
    int64_t tiles = mt_ceil_div(s.sequence, size), each = heads * s.batch;
    int64_t i = blockIdx.x / each, rest = blockIdx.x % each;
    return { (last_first ? tiles - 1 - i : i) * size, rest % heads, rest / heads };
}

/* ---- forward ----------------------------------------------------------------------------------
 */

enum { FWD_WARPS = 4, FWD_MT = 2, FEW_WARPS = 2, WIDE = 96 };

/* FEW_WARPS, for wide heads where a block has too little shared memory for as many as usual: rows
 * are a warp's own, so that their bits are the same. */
template <int WARPS> struct fwd_block {
    enum { THREADS = WARPS * 32, ROWS = WARPS * 16 * FWD_MT };
};

template <int D, int WARPS> static size_t fwd_bytes(void)
{
    return (fwd_block<WARPS>::ROWS + 4 * STEP) * padded<D>::PITCH * sizeof(mt_bf16);
}

/* The largest score of each of a lane's rows, and the sum of its exponentials in this lane. */
struct row_state {
    float most[FWD_MT][2], sum[FWD_MT][2];
};

/* Scores become exp(scale (score - largest so far)); y and sums shrink to that maximum. scale2 =
 * scale log2 e > 0. diagonal: row r sees the columns c <= r + diagonal. */
template <int D>
static __device__ __forceinline__ void soften(float (*p)[TILES][4], struct row_state *state,
                                              float (*y)[D / 8][4], float scale2, int64_t diagonal)
{
    bool whole = diagonal >= STEP - 1; /* each row sees all */
    int last = (int)(whole ? STEP : diagonal);
#pragma unroll
    for (int m = 0; m < FWD_MT; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float largest = state->most[m][i];
            if (!whole) {
#pragma unroll
                for (int n = 0; n < TILES; n++)
#pragma unroll
                    for (int e = 2 * i; e < 2 * i + 2; e++)
                        if (n * 8 + column_in(e) > m * 16 + row_in(e) + last)
                            p[m][n][e] = -INFINITY;
            }
#pragma unroll
            for (int n = 0; n < TILES; n++)
                largest = fmaxf(largest, fmaxf(p[m][n][2 * i], p[m][n][2 * i + 1]));
            largest = mt_row_max(largest);
            /* all -Inf so far: any finite base will do */
            float base = largest == -INFINITY ? 0 : largest * scale2, total = 0;
            float shrink = mt_exp2(__fmaf_rn(state->most[m][i], scale2, -base));
#pragma unroll
            for (int n = 0; n < TILES; n++)
#pragma unroll
                for (int e = 2 * i; e < 2 * i + 2; e++) {
                    p[m][n][e] = mt_exp2(__fmaf_rn(p[m][n][e], scale2, -base));
                    total += p[m][n][e];
                }
            state->most[m][i] = largest;
            state->sum[m][i] = state->sum[m][i] * shrink + total;
            if (!__any_sync(~0u, shrink != 1)) continue; /* more and more often, further on */
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                y[m][n][2 * i] *= shrink;
                y[m][n][2 * i + 1] *= shrink;
            }
        }
}

/* The keys and values from `k` on, to their place in shared memory. */
template <int D, int THREADS>
static __device__ __forceinline__ void copy_keys(mt_bf16 *to, const mt_bf16 *keys,
                                                 const mt_bf16 *values, int64_t k,
                                                 const struct mt_attention_shape &s)
{
    copy_rows<D, STEP, THREADS>(to, keys + k * s.width, s.width, s.sequence - k, s.dim);
    copy_rows<D, STEP, THREADS>(to + STEP * padded<D>::PITCH, values + k * s.width, s.width,
                                s.sequence - k, s.dim);
}

template <int D, int WARPS>
static __global__ void __launch_bounds__(fwd_block<WARPS>::THREADS)
    attention_fwd_mma_kernel(struct mt_attention_fwd_args a, struct mt_attention_shape s)
{
    enum {
        THREADS = fwd_block<WARPS>::THREADS,
        ROWS = fwd_block<WARPS>::ROWS,
        PITCH = padded<D>::PITCH,
        PAIR = 2 * STEP * PITCH
    };
    extern __shared__ __align__(16) mt_bf16 shared[];
    mt_bf16 *q = shared, *pairs = shared + ROWS * PITCH;
    struct own o = own_of(s, s.nq, ROWS, true);
    int64_t g = o.h / (s.nq / s.nkv), first = threadIdx.x / 32 * 16 * FWD_MT, row = o.row + first;
    int64_t end = o.row + ROWS < s.sequence ? o.row + ROWS : s.sequence;
    const mt_bf16 *qkv = (const mt_bf16 *)a.qkv;
    const mt_bf16 *keys = qkv + mt_head_at(s, o.b, s.nq + g);
    const mt_bf16 *values = qkv + mt_head_at(s, o.b, s.nq + s.nkv + g);
    float y[FWD_MT][D / 8][4] = {}, p[FWD_MT][TILES][4], scale2 = (float)(a.scale * M_LOG2E);
    struct row_state state;
#pragma unroll
    for (int i = 0; i < FWD_MT * 2; i++) {
        state.most[i / 2][i % 2] = -INFINITY;
        state.sum[i / 2][i % 2] = 0;
    }
    copy_rows<D, ROWS, THREADS>(q, qkv + mt_head_at(s, o.b, o.h) + o.row * s.width, s.width,
                                s.sequence - o.row, s.dim);
    copy_keys<D, THREADS>(pairs, keys, values, 0, s);
    int now = 0;
    for (int64_t k = 0; k < end; k += STEP, now ^= 1) {
        mt_copies_wait_all();
        __syncthreads(); /* these are there, and those before them are done with */
        if (k + STEP < end)
            copy_keys<D, THREADS>(pairs + (now ^ 1) * PAIR, keys, values, k + STEP, s);
        if (k >= row + 16 * FWD_MT) continue; /* no row of this warp sees them */
        const mt_bf16 *pair = pairs + now * PAIR;
        inner_products<D, FWD_MT>(p, q + first * PITCH, pair);
        soften<D>(p, &state, y, scale2, row - k);
        add_product<D, FWD_MT>(y, p, pair + STEP * PITCH);
    }
    float *lse = (float *)a.lse + (o.b * s.nq + o.h) * s.sequence;
    mt_bf16 *to = (mt_bf16 *)a.y + o.b * s.sequence * s.pitch + o.h * s.dim;
#pragma unroll
    for (int m = 0; m < FWD_MT; m++) {
        float inverse[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float sum = mt_row_sum(state.sum[m][i]);
            int64_t r = row + m * 16 + row_in(2 * i);
            inverse[i] = 1 / sum;
            if (threadIdx.x % 4 == 0 && r < s.sequence)
                lse[r] = state.most[m][i] * (float)a.scale + logf(sum);
        }
        store_rows<D>(to + (row + m * 16) * s.pitch, s.pitch, s.sequence - row - m * 16, s.dim,
                      y[m], inverse);
    }
}

/* ---- backward ---------------------------------------------------------------------------------
 */

enum { BWD_WARPS = 8 };

template <int WARPS> struct bwd_block {
    enum { THREADS = WARPS * 32, ROWS = WARPS * 16 };
};

/* Own rows of two matrices, two stages of STEP rows of two others and their lse and dot. */
template <int D, int WARPS> static size_t bwd_bytes(void)
{
    return (2 * bwd_block<WARPS>::ROWS + 4 * STEP) * padded<D>::PITCH * sizeof(mt_bf16) +
           4 * STEP * sizeof(float);
}

/* The rows of query head h and its key head in qkv and dy, their lse and dot. */
struct heads {
    const mt_bf16 *q, *dy, *key, *value;
    const float *lse, *dot;
};

static __device__ __forceinline__ struct heads heads_of(const struct mt_attention_bwd_args &a,
                                                        const float *dot, int64_t b, int64_t h,
                                                        const struct mt_attention_shape &s)
{
    int64_t g = h / (s.nq / s.nkv), sums = (b * s.nq + h) * s.sequence;
    const mt_bf16 *qkv = (const mt_bf16 *)a.qkv;
    return { qkv + mt_head_at(s, b, h),
             (const mt_bf16 *)a.dy + b * s.sequence * s.pitch + h * s.dim,
             qkv + mt_head_at(s, b, s.nq + g),
             qkv + mt_head_at(s, b, s.nq + s.nkv + g),
             (const float *)a.lse + sums,
             dot + sums };
}

/* A stage: rows from `from` on of queries and dy, with lse and dot, or of keys and values. */
template <int D, bool KEYS, int THREADS>
static __device__ __forceinline__ void copy_step(mt_bf16 *to, float *sums, const struct heads &of,
                                                 int64_t from, const struct mt_attention_shape &s)
{
    int64_t count = s.sequence - from, pitch = KEYS ? s.pitch : s.width;
    copy_rows<D, STEP, THREADS>(to, (KEYS ? of.q : of.key) + from * s.width, s.width, count, s.dim);
    copy_rows<D, STEP, THREADS>(to + STEP * padded<D>::PITCH,
                                (KEYS ? of.dy : of.value) + from * pitch, pitch, count, s.dim);
#pragma unroll
    for (int first = 0; KEYS && first < 2 * STEP; first += THREADS) {
        const int at = first + (int)threadIdx.x, i = at % STEP;
        if (at >= 2 * STEP) return;
        const float *p = (at < STEP ? of.lse : of.dot) + from;
        mt_copy_ask<4>(sums + at, i < count ? p + i : p, i < count ? 4 : 0);
    }
}

/* p, scores, becomes the probabilities, dp the gradient of the scores, masked ones 0. lse (times
 * log2 e) and dot are those of a lane's two rows, or, for KEYS, in `sums` by column. Queries past
 * the last have zeros everywhere: their p meets dy = 0, their dp is 0. seen: query - key of the
 * first row and column. */
template <bool KEYS>
static __device__ __forceinline__ void soften_bwd(float (*p)[4], float (*dp)[4], const float *lse,
                                                  const float *dot, const float *sums, float scale2,
                                                  int64_t seen)
{
    bool whole = KEYS ? seen >= 15 : seen >= STEP - 1; /* each query sees each key */
    int first = (int)(whole ? 0 : seen);
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int row = row_in(e), column = n * 8 + column_in(e);
            float l = KEYS ? sums[column] * (float)M_LOG2E : lse[e / 2];
            float d = KEYS ? sums[STEP + column] : dot[e / 2];
            float x = mt_exp2(__fmaf_rn(p[n][e], scale2, -l));
            bool sees = whole || (KEYS ? row <= column + first : column <= row + first);
            p[n][e] = sees ? x : 0;
            dp[n][e] = sees ? x * (dp[n][e] - d) : 0;
        }
}

/* Owning keys: dk and dv, over the query heads of their group in order and the queries that see
 * them. Owning queries: dq, over the keys that they see. */
template <int D, bool KEYS, int WARPS>
static __global__ void __launch_bounds__(bwd_block<WARPS>::THREADS, 1)
    attention_bwd_mma_kernel(struct mt_attention_bwd_args a, const float *dot,
                             struct mt_attention_shape s)
{
    enum {
        THREADS = bwd_block<WARPS>::THREADS,
        ROWS = bwd_block<WARPS>::ROWS,
        PITCH = padded<D>::PITCH,
        PAIR = 2 * STEP * PITCH
    };
    extern __shared__ __align__(16) mt_bf16 shared[];
    mt_bf16 *left = shared, *right = left + ROWS * PITCH, *pairs = right + ROWS * PITCH;
    float *sums = (float *)(pairs + 2 * PAIR);
    struct own o = own_of(s, KEYS ? s.nkv : s.nq, ROWS, !KEYS);
    int64_t group = KEYS ? s.nq / s.nkv : 1, h = o.h * group, last = h + group;
    int64_t place = threadIdx.x / 32 * 16, row = o.row + place, count = s.sequence - o.row;
    int64_t begin = KEYS ? o.row : 0;
    int64_t end = KEYS || o.row + ROWS > s.sequence ? s.sequence : o.row + ROWS;
    struct heads of = heads_of(a, dot, o.b, h, s);
    copy_rows<D, ROWS, THREADS>(left, (KEYS ? of.key : of.q) + o.row * s.width, s.width, count,
                                s.dim);
    copy_rows<D, ROWS, THREADS>(right, KEYS ? of.value + o.row * s.width : of.dy + o.row * s.pitch,
                                KEYS ? s.width : s.pitch, count, s.dim);
    copy_step<D, KEYS, THREADS>(pairs, sums, of, begin, s);
    float dleft[1][D / 8][4] = {}, dright[1][KEYS ? D / 8 : 1][4] = {}, p[1][TILES][4],
                       dp[1][TILES][4], scale2 = (float)(a.scale * M_LOG2E), row_lse[2] = {},
                       row_dot[2] = {};
#pragma unroll
    for (int i = 0; i < 2 && !KEYS; i++) {
        int64_t r = row + row_in(2 * i);
        row_lse[i] = r < s.sequence ? of.lse[r] * (float)M_LOG2E : 0;
        row_dot[i] = r < s.sequence ? of.dot[r] : 0;
    }
    int now = 0;
    for (int64_t at = begin; h < last; now ^= 1) {
        int64_t next = at + STEP;
        bool more = next < end;
        mt_copies_wait_all();
        __syncthreads(); /* these are there, and those before them are done with */
        if (!more) {
            next = begin;
            if (++h < last) of = heads_of(a, dot, o.b, h, s);
        }
        if (h < last)
            copy_step<D, KEYS, THREADS>(pairs + (now ^ 1) * PAIR, sums + (now ^ 1) * 2 * STEP, of,
                                        next, s);
        int64_t seen = KEYS ? at - row : row - at;
        const mt_bf16 *pair = pairs + now * PAIR, *other = pair + STEP * PITCH;
        at = next;
        if (seen <= (KEYS ? -STEP : -16)) continue; /* no query here sees a key here */
        inner_products<D, 1>(p, left + place * PITCH, pair);
        inner_products<D, 1>(dp, right + place * PITCH, other);
        soften_bwd<KEYS>(p[0], dp[0], row_lse, row_dot, sums + now * 2 * STEP, scale2, seen);
        if constexpr (KEYS) add_product<D, 1>(dright, p, other);
        add_product<D, 1>(dleft, dp, pair);
    }
    const float scale[2] = { (float)a.scale, (float)a.scale }, one[2] = { 1, 1 };
    mt_bf16 *to = (mt_bf16 *)a.dqkv + row * s.width;
    store_rows<D>(to + mt_head_at(s, o.b, KEYS ? s.nq + o.h : o.h), s.width, s.sequence - row,
                  s.dim, dleft[0], scale);
    if constexpr (KEYS)
        store_rows<D>(to + mt_head_at(s, o.b, s.nq + s.nkv + o.h), s.width, s.sequence - row, s.dim,
                      dright[0], one);
}

/* ---- launches ---------------------------------------------------------------------------------
 */

template <int D, int WARPS>
static mt_status forward_by(mt_stream *stream, const struct mt_attention_fwd_args *a,
                            const struct mt_attention_shape &s, bool *done)
{
    typedef fwd_block<WARPS> block;
    const size_t bytes = fwd_bytes<D, WARPS>();
    const void *kernel = (const void *)attention_fwd_mma_kernel<D, WARPS>;
    *done = bytes <= (size_t)mt_cuda_block_shared(stream);
    if (!*done) return MT_OK;
    MT_TRY(mt_cuda_give_shared(stream, kernel, bytes, "attention_fwd"));
    const unsigned blocks = (unsigned)(mt_ceil_div(s.sequence, block::ROWS) * s.nq * s.batch);
    attention_fwd_mma_kernel<D, WARPS>
        <<<blocks, block::THREADS, bytes, mt_cuda_stream(stream)>>>(*a, s);
    MT_LAUNCHED(stream, "attention_fwd");
    return MT_OK;
}

template <int D, int WARPS>
static mt_status backward_by(mt_stream *stream, const struct mt_attention_bwd_args *a,
                             const float *dot, const struct mt_attention_shape &s, bool *done)
{
    typedef bwd_block<WARPS> block;
    const size_t bytes = bwd_bytes<D, WARPS>();
    const void *keys = (const void *)attention_bwd_mma_kernel<D, true, WARPS>;
    const void *queries = (const void *)attention_bwd_mma_kernel<D, false, WARPS>;
    const int64_t tiles = mt_ceil_div(s.sequence, block::ROWS) * s.batch;
    cudaStream_t on = mt_cuda_stream(stream);
    *done = bytes <= (size_t)mt_cuda_block_shared(stream);
    if (!*done) return MT_OK;
    MT_TRY(mt_cuda_give_shared(stream, keys, bytes, "attention_bwd"));
    MT_TRY(mt_cuda_give_shared(stream, queries, bytes, "attention_bwd"));
    attention_bwd_mma_kernel<D, true, WARPS>
        <<<(unsigned)(tiles * s.nkv), block::THREADS, bytes, on>>>(*a, dot, s);
    MT_LAUNCHED(stream, "attention_bwd");
    attention_bwd_mma_kernel<D, false, WARPS>
        <<<(unsigned)(tiles * s.nq), block::THREADS, bytes, on>>>(*a, dot, s);
    MT_LAUNCHED(stream, "attention_bwd");
    return MT_OK;
}

template <int D>
static mt_status forward(mt_stream *stream, const struct mt_attention_fwd_args *a,
                         const struct mt_attention_shape &s, bool *done)
{
    MT_TRY((forward_by<D, FWD_WARPS>(stream, a, s, done)));
    if constexpr (D >= WIDE)
        if (!*done) return forward_by<D, FEW_WARPS>(stream, a, s, done);
    return MT_OK;
}

template <int D>
static mt_status backward(mt_stream *stream, const struct mt_attention_bwd_args *a,
                          const float *dot, const struct mt_attention_shape &s, bool *done)
{
    MT_TRY((backward_by<D, BWD_WARPS>(stream, a, dot, s, done)));
    if constexpr (D >= WIDE)
        if (!*done) return backward_by<D, FEW_WARPS>(stream, a, dot, s, done);
    return MT_OK;
}

/* The widths of a head, ascending, the kernels for them. */
static const struct {
    int64_t dim;
    mt_status (*forward)(mt_stream *, const struct mt_attention_fwd_args *,
                         const struct mt_attention_shape &, bool *);
    mt_status (*backward)(mt_stream *, const struct mt_attention_bwd_args *, const float *,
                          const struct mt_attention_shape &, bool *);
} widths[] = { { 16, forward<16>, backward<16> },
               { 32, forward<32>, backward<32> },
               { 64, forward<64>, backward<64> },
               { 96, forward<96>, backward<96> },
               { 128, forward<128>, backward<128> } };
enum { WIDTHS = sizeof widths / sizeof widths[0] };

/* Whether all lies on 16 bytes, heads among them, and a tile's elements are counted in 32 bits. */
static bool suits(const struct mt_attention_shape &s, uintptr_t addresses, double scale)
{
    enum {
        FWD = fwd_block<FWD_WARPS>::ROWS,
        BWD = bwd_block<BWD_WARPS>::ROWS,
        MOST = (int)FWD > (int)BWD ? (int)FWD : (int)BWD
    };
    return s.dim % 8 == 0 && addresses % 16 == 0 && scale > 0 && s.width <= INT32_MAX / MOST;
}

mt_status mt_attention_fwd_mma(mt_stream *stream, const struct mt_attention_fwd_args *a, bool *done)
{
    struct mt_attention_shape s =
        mt_attention_shape_of(a->batch, a->sequence, a->query_heads, a->kv_heads, a->head_dim);
    *done = false;
    if (!suits(s, (uintptr_t)a->qkv | (uintptr_t)a->y, a->scale)) return MT_OK;
    for (int i = 0; i < WIDTHS; i++)
        if (widths[i].dim >= s.dim) return widths[i].forward(stream, a, s, done);
    return MT_OK;
}

mt_status mt_attention_bwd_mma(mt_stream *stream, const struct mt_attention_bwd_args *a,
                               const float *dot, bool *done)
{
    struct mt_attention_shape s =
        mt_attention_shape_of(a->batch, a->sequence, a->query_heads, a->kv_heads, a->head_dim);
    *done = false;
    if (!suits(s, (uintptr_t)a->qkv | (uintptr_t)a->dqkv | (uintptr_t)a->dy, a->scale))
        return MT_OK;
    for (int i = 0; i < WIDTHS; i++)
        if (widths[i].dim >= s.dim) return widths[i].backward(stream, a, dot, s, done);
    return MT_OK;
}
