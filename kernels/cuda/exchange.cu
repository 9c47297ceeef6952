/* Blocks of rows for experts of other ranks: where rows go, packing, and what has arrived. */
#include "kernels/coding.h"
#include "kernels/cuda/rows.cuh"
#include "kernels/cuda/scratch.h"

enum { THREADS = 256, WARPS = THREADS / 32, HEAD_THREADS = 1024, PIECE = 8 };

/* ---- where rows go ----------------------------------------------------------------------------
 */

static __device__ __forceinline__ int64_t room_of(const struct mt_blocks &b)
{
    return b.lines - b.head_lines;
}

/* Heads and `most` by block 0; lines and choices by all. */
static __global__ void __launch_bounds__(THREADS)
    plan_kernel(struct mt_exchange_plan_args a, int64_t line_bytes)
{
    const struct mt_blocks b = a.blocks;
    int64_t room = room_of(b), words = b.experts + 1;
    if (blockIdx.x == 0)
        for (int64_t i = threadIdx.x; i < b.ranks * words; i += THREADS) {
            int64_t r = i / words, e = i % words;
            const int64_t *offsets = a.offsets + r * b.experts;
            int64_t first = offsets[0], all = offsets[b.experts] - first, rows = min(all, room);
            if (e == 0) {
                a.heads[i] = (b.head_lines + rows) * line_bytes - 8;
                atomicMax((unsigned long long *)a.most, (unsigned long long)all);
            } else {
                a.heads[i] = min(offsets[e] - first, rows) - min(offsets[e - 1] - first, rows);
            }
        }
    MT_GRID_STRIDE(l, b.ranks * b.lines)
    {
        int64_t r = l / b.lines, row = l - r * b.lines - b.head_lines;
        int64_t first = a.offsets[r * b.experts];
        int64_t rows = min(a.offsets[(r + 1) * b.experts] - first, room);
        a.line_token[l] = row >= 0 && row < rows ? a.row_token[first + row] : -1;
    }
    MT_GRID_STRIDE(i, a.tokens * a.top_k)
    {
        int64_t r = a.chosen[i] / b.experts, row = a.position[i] - a.offsets[r * b.experts];
        bool kept = a.position[i] >= 0 && row < room;
        a.token_line[i] = kept ? (int32_t)(r * b.lines + b.head_lines + row) : -1;
    }
}

template <typename T>
static mt_status exchange_plan(mt_stream *stream, const struct mt_exchange_plan_args *a)
{
    int64_t lines = a->blocks.ranks * a->blocks.lines, choices = a->tokens * a->top_k;
    unsigned blocks = mt_blocks(stream, lines > choices ? lines : choices, THREADS);
    plan_kernel<<<blocks, THREADS, 0, mt_cuda_stream(stream)>>>(*a, a->width * (int64_t)sizeof(T));
    MT_LAUNCHED(stream, "exchange_plan");
    return MT_OK;
}
MT_CUDA_OP(exchange_plan)

/* ---- packing ----------------------------------------------------------------------------------
 */

/* Heads, so many words from block to block, whose lines become another number of bytes long. */
struct heads_move {
    int64_t *to;
    const int64_t *from;
    int64_t to_pitch, from_pitch, to_line, from_line;
};

static __global__ void __launch_bounds__(THREADS)
    head_kernel(struct heads_move m, struct mt_blocks b)
{
    int64_t words = b.experts + 1;
    MT_GRID_STRIDE(i, b.ranks * words)
    {
        int64_t r = i / words, e = i % words, word = m.from[r * m.from_pitch + e];
        if (e == 0 && m.to_line != m.from_line) word = (word + 8) / m.from_line * m.to_line - 8;
        m.to[r * m.to_pitch + e] = word;
    }
}

static mt_status move_heads(mt_stream *stream, const struct mt_blocks *b, const heads_move &m)
{
    unsigned blocks = mt_blocks(stream, b->ranks * (b->experts + 1), THREADS);
    head_kernel<<<blocks, THREADS, 0, mt_cuda_stream(stream)>>>(m, *b);
    MT_LAUNCHED(stream, "exchange_heads");
    return MT_OK;
}

/* Rows of n pieces V. No head is a row. */
template <typename V>
static __global__ void __launch_bounds__(THREADS)
    pack_kernel(struct mt_exchange_pack_args a, int64_t n)
{
    mt_copy_rows((V *)a.y, (const V *)a.x, a.index, a.blocks.ranks * a.blocks.lines, n, 0, n);
}

/* Reals of lines in use, into the heads that they follow. */
template <typename T>
static __global__ void __launch_bounds__(THREADS) reals_kernel(struct mt_exchange_pack_args a)
{
    const struct mt_blocks b = a.blocks;
    const int64_t line = a.width * (int64_t)sizeof(T), words = b.experts + 1;
    MT_GRID_STRIDE(l, b.ranks * b.lines)
    {
        const int64_t r = l / b.lines, j = l - r * b.lines;
        if (j < b.head_lines || j >= (a.heads[r * words] + 8) / line) continue;
        mt_real<T> *reals = (mt_real<T> *)((char *)a.y + r * b.lines * line + 8 * words);
        reals[j - b.head_lines] = ((const mt_real<T> *)a.reals)[l];
    }
}

template <typename T>
static __global__ void __launch_bounds__(THREADS)
    weights_kernel(struct mt_exchange_weights_bwd_args a)
{
    typedef mt_real<T> real;
    const struct mt_blocks b = a.blocks;
    const int64_t block = b.lines * a.width * (int64_t)sizeof(T);
    MT_GRID_STRIDE(i, a.tokens * a.top_k)
    {
        const int64_t line = a.token_line[i], r = line / b.lines;
        const real *reals = (const real *)((const char *)a.x + r * block + 8 * (b.experts + 1));
        const real w = ((const real *)a.weights)[i];
        ((real *)a.dweights)[i] =
            line >= 0 && w != 0 ? reals[line - r * b.lines - b.head_lines] / w : 0;
    }
}

template <typename T>
static mt_status exchange_weights_bwd(mt_stream *stream,
                                      const struct mt_exchange_weights_bwd_args *a)
{
    const int64_t slots = a->tokens * a->top_k;
    if (!slots) return MT_OK;
    weights_kernel<T>
        <<<mt_blocks(stream, slots, THREADS), THREADS, 0, mt_cuda_stream(stream)>>>(*a);
    MT_LAUNCHED(stream, "exchange_weights_bwd");
    return MT_OK;
}
MT_CUDA_OP(exchange_weights_bwd)

/* ---- coded lines ------------------------------------------------------------------------------
 * A warp has a line, a lane PIECE elements of it at a time: 4 or 16 lanes a block of one scale.
 * WHOLE: pieces are whole, and read or written as vectors. */

/* Whether line l is a row, by its block's head. */
static __device__ __forceinline__ bool in_use(const struct mt_blocks &b, const int64_t *heads,
                                              int64_t pitch, int64_t l, int64_t line_bytes)
{
    int64_t r = l / b.lines, j = l - r * b.lines;
    return j >= b.head_lines && j < (heads[r * pitch] + 8) / line_bytes;
}

template <typename T, bool WHOLE>
static __device__ __forceinline__ void read_piece(float v[PIECE], const T *x, int64_t left)
{
    if constexpr (WHOLE) {
        mt_vec<T, PIECE> in = {};
        constexpr int VECTORS = sizeof in / 16;
#pragma unroll
        for (int i = 0; i < VECTORS; i++)
            if (left > 0) ((uint4 *)&in)[i] = ((const uint4 *)x)[i];
#pragma unroll
        for (int i = 0; i < PIECE; i++) v[i] = (float)mt_get(&in.at[i]);
    } else {
#pragma unroll
        for (int i = 0; i < PIECE; i++) v[i] = i < left ? (float)mt_get(x + i) : 0.0f;
    }
}

/* The codes of a piece: a byte each, or two of them. */
template <bool WHOLE>
static __device__ __forceinline__ void write_codes(uint8_t *y, int64_t left,
                                                   const uint32_t words[2], int per)
{
    if constexpr (WHOLE) {
        if (left > 0) ((uint32_t *)y)[0] = words[0];
        if (left > 0 && per == 1) ((uint32_t *)y)[1] = words[1];
    } else {
#pragma unroll
        for (int i = 0; i < PIECE; i++)
            if (i < PIECE / per && i * per < left) y[i] = (uint8_t)(words[i / 4] >> i % 4 * 8);
    }
}

template <typename T, bool WHOLE>
static __global__ void __launch_bounds__(THREADS)
    encode_kernel(struct mt_exchange_pack_args a, struct mt_coding c)
{
    int64_t lines = a.blocks.ranks * a.blocks.lines, warps = (int64_t)gridDim.x * WARPS;
    int64_t words = a.blocks.experts + 1, plain = a.width * (int64_t)sizeof(T);
    int lane = threadIdx.x % 32, lanes = c.block / PIECE, per = c.codes_per_byte;
    for (int64_t l = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / 32; l < lines; l += warps) {
        int64_t from = l;
        if (a.index)
            from = a.index[l];
        else if (!in_use(a.blocks, a.heads, words, l, plain))
            from = -1;
        if (from < 0) continue;
        const T *x = (const T *)a.x + from * a.width;
        uint8_t *y = (uint8_t *)a.y + l * c.line;
        for (int64_t base = 0; base < a.width; base += 32 * PIECE) {
            int64_t at = base + lane * PIECE, left = a.width - at;
            float v[PIECE];
            int32_t most = 0;
            uint32_t stored, codes[2] = { 0, 0 };
            read_piece<T, WHOLE>(v, x + at, left);
#pragma unroll
            for (int i = 0; i < PIECE; i++) most = max(most, mt_magnitude_bits(v[i]));
            for (int step = 1; step < lanes; step *= 2)
                most = max(most, __shfl_xor_sync(~0u, most, step));
            float scale = mt_coding_scale(&c, mt_from_bits(most), &stored);
#pragma unroll
            for (int i = 0; i < PIECE; i++) {
                uint32_t code = (uint32_t)mt_encode(c.codec, v[i] * scale);
                if (per == 1)
                    codes[i / 4] |= code << i % 4 * 8;
                else
                    codes[0] |= code << i * 4;
            }
            write_codes<WHOLE>(y + at / per, left, codes, per);
            if (left <= 0 || lane % lanes) continue;
            if (c.bytes)
                y[c.scales + at / c.block] = (uint8_t)stored;
            else
                ((uint32_t *)(y + c.scales))[at / c.block] = stored;
        }
    }
}

template <typename T, bool WHOLE>
static __device__ __forceinline__ void write_piece(T *y, const float v[PIECE], int64_t left)
{
    if constexpr (WHOLE) {
        mt_vec<T, PIECE> out;
        constexpr int VECTORS = sizeof out / 16;
#pragma unroll
        for (int i = 0; i < PIECE; i++) mt_put(&out.at[i], v[i]);
#pragma unroll
        for (int i = 0; i < VECTORS; i++) ((uint4 *)y)[i] = ((const uint4 *)&out)[i];
    } else {
#pragma unroll
        for (int i = 0; i < PIECE; i++)
            if (i < left) mt_put(y + i, v[i]);
    }
}

/* The codes of a piece, as write_codes leaves them. */
template <bool WHOLE>
static __device__ __forceinline__ void read_codes(uint32_t words[2], const uint8_t *x, int64_t left,
                                                  int per)
{
    words[0] = words[1] = 0;
    if constexpr (WHOLE) {
        words[0] = ((const uint32_t *)x)[0];
        if (per == 1) words[1] = ((const uint32_t *)x)[1];
    } else {
#pragma unroll
        for (int i = 0; i < PIECE; i++)
            if (i < PIECE / per && i * per < left) words[i / 4] |= (uint32_t)x[i] << i % 4 * 8;
    }
}

template <typename T, bool WHOLE>
static __global__ void __launch_bounds__(THREADS)
    decode_kernel(struct mt_exchange_unpack_args a, struct mt_coding c)
{
    int64_t lines = a.blocks.ranks * a.blocks.lines, warps = (int64_t)gridDim.x * WARPS;
    int64_t pitch = a.blocks.lines * c.line / 8;
    int lane = threadIdx.x % 32, per = c.codes_per_byte;
    for (int64_t l = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / 32; l < lines; l += warps) {
        if (!in_use(a.blocks, (const int64_t *)a.x, pitch, l, c.line)) continue;
        const uint8_t *x = (const uint8_t *)a.x + l * c.line;
        T *y = (T *)a.y + l * a.width;
        for (int64_t at = lane * PIECE; at < a.width; at += 32 * PIECE) {
            int64_t left = a.width - at, block = at / c.block;
            uint32_t codes[2];
            float v[PIECE], largest;
            read_codes<WHOLE>(codes, x + at / per, left, per);
            uint32_t stored =
                c.bytes ? x[c.scales + block] : ((const uint32_t *)(x + c.scales))[block];
            float scale = mt_coding_value(&c, stored, &largest);
#pragma unroll
            for (int i = 0; i < PIECE; i++) {
                uint32_t code = per == 1 ? codes[i / 4] >> i % 4 * 8 & 255 : codes[0] >> i * 4 & 15;
                v[i] = mt_coding_decode(&c, (int32_t)code, scale, largest);
            }
            write_piece<T, WHOLE>(y + at, v, left);
        }
    }
}

/* Whether pieces are whole: rows of the plain tensor and codes of a line lie at multiples of a
 * vector. */
static bool whole_pieces(const void *rows, int64_t row_bytes, const void *lines, int64_t width)
{
    const void *operands[] = { rows, lines };
    return width % PIECE == 0 && mt_rows_aligned(operands, 2, row_bytes);
}

template <typename T>
static mt_status pack_coded(mt_stream *stream, const struct mt_exchange_pack_args *a)
{
    const struct mt_blocks *b = &a->blocks;
    struct mt_coding c = mt_coding_of(a->dtype, a->width, &a->coded);
    int64_t bytes = a->width * (int64_t)sizeof(T);
    MT_TRY(move_heads(
        stream, b,
        { (int64_t *)a->y, a->heads, b->lines * c.line / 8, b->experts + 1, c.line, bytes }));
    unsigned blocks = mt_blocks(stream, b->ranks * b->lines * 32, THREADS);
    if (whole_pieces(a->x, bytes, a->y, a->width))
        encode_kernel<T, true><<<blocks, THREADS, 0, mt_cuda_stream(stream)>>>(*a, c);
    else
        encode_kernel<T, false><<<blocks, THREADS, 0, mt_cuda_stream(stream)>>>(*a, c);
    MT_LAUNCHED(stream, "exchange_pack");
    return MT_OK;
}

template <typename T>
static mt_status exchange_unpack(mt_stream *stream, const struct mt_exchange_unpack_args *a)
{
    const struct mt_blocks *b = &a->blocks;
    struct mt_coding c = mt_coding_of(a->dtype, a->width, &a->coded);
    int64_t bytes = a->width * (int64_t)sizeof(T);
    MT_TRY(move_heads(stream, b,
                      { (int64_t *)a->y, (const int64_t *)a->x, b->lines * bytes / 8,
                        b->lines * c.line / 8, bytes, c.line }));
    unsigned blocks = mt_blocks(stream, b->ranks * b->lines * 32, THREADS);
    if (whole_pieces(a->y, bytes, a->x, a->width))
        decode_kernel<T, true><<<blocks, THREADS, 0, mt_cuda_stream(stream)>>>(*a, c);
    else
        decode_kernel<T, false><<<blocks, THREADS, 0, mt_cuda_stream(stream)>>>(*a, c);
    MT_LAUNCHED(stream, "exchange_unpack");
    return MT_OK;
}
MT_CUDA_OP(exchange_unpack)

template <typename T>
static mt_status exchange_pack(mt_stream *stream, const struct mt_exchange_pack_args *a)
{
    if (a->coded.format) return pack_coded<T>(stream, a);
    const struct mt_blocks *b = &a->blocks;
    cudaStream_t on = mt_cuda_stream(stream);
    int64_t bytes = a->width * (int64_t)sizeof(T);
    MT_TRY(move_heads(
        stream, b,
        { (int64_t *)a->y, a->heads, b->lines * bytes / 8, b->experts + 1, bytes, bytes }));
    if (a->reals) {
        reals_kernel<T><<<mt_blocks(stream, b->ranks * b->lines, THREADS), THREADS, 0, on>>>(*a);
        MT_LAUNCHED(stream, "exchange_pack");
    }
    if (!a->index) return MT_OK;
    const void *operands[] = { a->x, a->y };
    unsigned blocks = mt_blocks(stream, b->ranks * b->lines * 8, THREADS);
    if (mt_rows_aligned(operands, 2, bytes))
        pack_kernel<uint4><<<blocks, THREADS, 0, on>>>(*a, bytes / 16);
    else
        pack_kernel<T><<<blocks, THREADS, 0, on>>>(*a, a->width);
    MT_LAUNCHED(stream, "exchange_pack");
    return MT_OK;
}
MT_CUDA_OP(exchange_pack)

/* ---- what has arrived -------------------------------------------------------------------------
 */

/* out[i] = sum of in[0 .. i), out[n] the total: by one warp. */
static __device__ void warp_sums(int64_t *out, const int64_t *in, int64_t n)
{
    int lane = threadIdx.x % 32;
    int64_t before = 0;
    for (int64_t base = 0; base < n; base += 32) {
        int64_t x = base + lane < n ? in[base + lane] : 0, sum = x;
        for (int step = 1; step < 32; step *= 2) {
            int64_t other = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += other;
        }
        if (base + lane < n) out[base + lane] = before + sum - x;
        before += __shfl_sync(~0u, sum, 31);
    }
    if (lane == 0) out[n] = before;
}

/* One block. starts [P, S + 1]: where the rows of each expert start in a block; bases [P, S]: the
 * row that the first of them becomes. */
static __global__ void __launch_bounds__(HEAD_THREADS)
    heads_kernel(struct mt_exchange_arrivals_args a, int64_t pitch, int64_t *starts, int64_t *bases)
{
    int64_t s = a.blocks.experts, ranks = a.blocks.ranks, words = s + 1;
    for (int64_t i = threadIdx.x; i < ranks * words; i += HEAD_THREADS)
        a.heads[i] = ((const int64_t *)a.y)[i / words * pitch + i % words];
    __syncthreads();
    for (int64_t e = threadIdx.x; e < s; e += HEAD_THREADS) {
        int64_t count = 0;
        for (int64_t r = 0; r < ranks; r++) count += a.heads[r * words + 1 + e];
        a.counts[e] = count;
    }
    __syncthreads();
    for (int64_t r = threadIdx.x / 32; r <= ranks; r += HEAD_THREADS / 32)
        if (r < ranks)
            warp_sums(starts + r * words, a.heads + r * words + 1, s);
        else
            warp_sums(a.offsets, a.counts, s);
    __syncthreads();
    for (int64_t e = threadIdx.x; e <= s; e += HEAD_THREADS) {
        int64_t row = a.offsets[e];
        for (int i = 0; a.element_offsets && i < MT_ROUTE_WIDTHS; i++)
            a.element_offsets[i * words + e] = row * a.widths[i];
        for (int64_t r = 0; e < s && r < ranks; r++) {
            bases[r * s + e] = row;
            row += a.heads[r * words + 1 + e];
        }
    }
}

static __global__ void __launch_bounds__(THREADS)
    arrivals_kernel(struct mt_exchange_arrivals_args a, const int64_t *starts, const int64_t *bases)
{
    const struct mt_blocks b = a.blocks;
    MT_GRID_STRIDE(l, b.ranks * b.lines)
    {
        int64_t r = l / b.lines, j = l - r * b.lines - b.head_lines;
        const int64_t *start = starts + r * (b.experts + 1);
        if (j < 0 || j >= start[b.experts]) {
            a.line_row[l] = -1;
            continue;
        }
        int64_t low = 0, high = b.experts; /* the last expert that starts at j or before */
        while (high - low > 1) {
            int64_t middle = (low + high) / 2;
            if (start[middle] <= j)
                low = middle;
            else
                high = middle;
        }
        int64_t row = bases[r * b.experts + low] + j - start[low];
        a.line_row[l] = (int32_t)row;
        a.row_line[row] = (int32_t)l;
    }
}

/* Starts of each rank's experts, one past the last among them, and their rows' bases. */
template <typename T>
static size_t exchange_arrivals_scratch(const mt_stream *stream,
                                        const struct mt_exchange_arrivals_args *a)
{
    (void)stream;
    return (size_t)(a->blocks.ranks * (2 * a->blocks.experts + 1)) * sizeof(int64_t);
}
MT_CUDA_SCRATCH(exchange_arrivals)

template <typename T>
static mt_status exchange_arrivals(mt_stream *stream, const struct mt_exchange_arrivals_args *a)
{
    const struct mt_blocks *b = &a->blocks;
    cudaStream_t on = mt_cuda_stream(stream);
    const int64_t starts = b->ranks * (b->experts + 1);
    void *scratch;
    MT_TRY(mt_cuda_scratch(stream, &scratch, exchange_arrivals_scratch<T>(stream, a)));
    int64_t *at = (int64_t *)scratch;
    heads_kernel<<<1, HEAD_THREADS, 0, on>>>(*a, b->lines * a->width * (int64_t)sizeof(T) / 8, at,
                                             at + starts);
    MT_LAUNCHED(stream, "exchange_arrivals");
    arrivals_kernel<<<mt_blocks(stream, b->ranks * b->lines, THREADS), THREADS, 0, on>>>(
        *a, at, at + starts);
    MT_LAUNCHED(stream, "exchange_arrivals");
    return MT_OK;
}
MT_CUDA_OP(exchange_arrivals)
