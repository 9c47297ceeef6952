/* Quantize of gathered bf16 rows in the row direction alone: a warp reads a token once, whose codes
 * go to each of its rows. Blocks of 128 or one scale a member. The arithmetic is that of the tiles.
 */
#include "kernels/cuda/quantize_bytes.cuh"

enum { READERS = 256, READING_WARPS = READERS / 32, STEP = 32 * RUN, MANY = 3, PER_CARD = 4 };

/* What a kernel knows of tokens beside the call. */
struct token_job {
    job j;
    const int32_t *position;
    int64_t tokens;
    int top_k;
};

/* Of members, in shared memory. */
struct token_space {
    int *first;     /* rows before each, and all */
    uint32_t *most; /* what the block has found of each */
    int *nans;
};

static __device__ __forceinline__ token_space spaces_of(int *shared, int members)
{
    return { shared, (uint32_t *)shared + members + 1, shared + 2 * members + 1 };
}

/* The last member that begins at or before a row and has rows. */
static __device__ __forceinline__ int member_of(const int *first, int members, int row)
{
    int low = 0, high = members;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (first[middle] <= row)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* A lane's row among those of the token. */
struct token_row {
    int64_t row; /* -1: none */
    int member;
    float whole;     /* what its elements are multiplied by */
    uint8_t *scales; /* of blocks */
    int64_t block;   /* from one to the next, in bytes */
};

template <int KIND>
static __device__ __forceinline__ token_row row_of(const token_job &t, const int *first,
                                                   int64_t token)
{
    const job &j = t.j;
    const side &s = j.p.sides[MT_ROW];
    const int lane = lane_of_warp(), members = (int)j.p.group.members;
    token_row r = { -1, 0, 0, NULL, 0 };
    if (lane < t.top_k) r.row = t.position[token * t.top_k + lane];
    if (r.row < 0) return r;
    r.member = member_of(first, members, (int)r.row);
    if (KIND == WHOLE) {
        r.whole = whole_scale(j, MT_ROW, r.member);
    } else {
        const member &m = j.p.members[r.member];
        const shape p = shape_of(s, m.rows, m.cols);
        r.scales =
            s.scales + (m.at[AT_SCALES + MT_ROW] + (r.row - first[r.member]) * p.line_stride) * 4;
        r.block = p.block_stride * 4;
    }
    return r;
}

/* Sixteen bytes of a token: what is found of them, their codes to its rows. */
template <int KIND>
static __device__ __forceinline__ void run_chunk(const token_job &t, const token_row &own,
                                                 const uint4 &x, int column, uint32_t *most,
                                                 int *nans)
{
    const side &s = t.j.p.sides[MT_ROW];
    const int cols = (int)t.j.p.group.k, lane = lane_of_warp();
    const uint32_t w[4] = { x.x, x.y, x.z, x.w };
    uint32_t q[2], m = larger_half(magnitudes<4>(w));
    float2 e = make_float2(0, 0);
    if (m > 0x7f80) {
        m = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) m = found_among_nans(w[i], m);
        *nans += (int)(m >> 16), m &= 0xffff;
    }
    *most = m > *most ? m : *most;
    if (KIND == LINES) {
#pragma unroll
        for (int far = 1; far < TILE / RUN; far *= 2) {
            const uint32_t other = __shfl_xor_sync(~0u, m, far);
            m = other > m ? other : m;
        }
        e = line_cell(s, m);
        encode_row<CODES_E4M3>(q, s, w, e.x);
        const float left = __shfl_sync(~0u, e.y, 0), right = __shfl_sync(~0u, e.y, TILE / RUN);
        const int block = (column - lane * RUN) / TILE;
        if (own.row >= 0) {
            store_4(own.scales + block * own.block, mt_f32_bits(left));
            if ((block + 1) * TILE < cols)
                store_4(own.scales + (block + 1) * own.block, mt_f32_bits(right));
        }
    }
#pragma unroll 4
    for (int i = 0; i < t.top_k; i++) {
        const int row = __shfl_sync(~0u, (int)own.row, i);
        if (KIND == WHOLE) encode_row<CODES_E4M3>(q, s, w, __shfl_sync(~0u, own.whole, i));
        if (row >= 0 && column < cols)
            store_8(s.codes + (uint64_t)(uint32_t)row * (uint32_t)cols + column, q[0], q[1]);
    }
}

template <int KIND>
static __global__ void __launch_bounds__(READERS, PER_CARD)
    tokens_kernel(const __grid_constant__ token_job t)
{
    extern __shared__ int shared[];
    const job &j = t.j;
    const int members = (int)j.p.group.members, cols = (int)j.p.group.k;
    const token_space sp = spaces_of(shared, members);
    const mt_bf16 *x = (const mt_bf16 *)j.p.sides[SOURCE].codes;
    for (int m = threadIdx.x; m < members; m += READERS) {
        sp.first[m] = (int)(j.p.members[m].offset / cols);
        sp.most[m] = 0, sp.nans[m] = 0;
    }
    __syncthreads();
    int64_t token = (int64_t)blockIdx.x * READING_WARPS + threadIdx.x / 32;
    for (; token < t.tokens; token += (int64_t)gridDim.x * READING_WARPS) {
        const token_row own = row_of<KIND>(t, sp.first, token);
        const mt_bf16 *from = x + token * cols;
        uint32_t most = 0;
        int nans = 0;
        for (int first = lane_of_warp() * RUN; first - lane_of_warp() * RUN < cols;
             first += MANY * STEP) {
            uint4 in[MANY];
#pragma unroll
            for (int i = 0; i < MANY; i++)
                in[i] = first + i * STEP < cols ? __ldg((const uint4 *)(from + first + i * STEP))
                                                : make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int i = 0; i < MANY; i++)
                if (first + i * STEP - lane_of_warp() * RUN < cols)
                    run_chunk<KIND>(t, own, in[i], first + i * STEP, &most, &nans);
        }
        if (!j.measure[MT_ROW] && !j.nans) continue;
        most = __reduce_max_sync(~0u, most), nans = __reduce_add_sync(~0u, nans);
        if (own.row < 0) continue;
        if (most > sp.most[own.member]) atomicMax(sp.most + own.member, most);
        if (nans) atomicAdd(sp.nans + own.member, nans);
    }
    __syncthreads(); /* all have given */
    for (int m = threadIdx.x; m < members; m += READERS) {
        if (j.measure[MT_ROW] && sp.most[m])
            atomicMax((int *)j.amax[MT_ROW] + m, (int)(sp.most[m] << 16));
        if (j.nans && sp.nans[m]) atomicAdd(j.nans + m, (unsigned long long)sp.nans[m]);
    }
}

/* ---- the host's part --------------------------------------------------------------------------
 */

enum { MOST_MEMBERS = 2048 }; /* that have room */

bool mt_cuda_tokens_suffice(const job *j, const struct mt_quantize_args *args)
{
    const side *row = &j->p.sides[MT_ROW];
    const mt_group *g = &j->p.group;
    const int kind = mt_cuda_short_kind(j);
    if (!j->row_token || j->row_weight || !args->position || args->top_k < 1 || args->top_k > 32)
        return false;
    if (!row->present || row->decoded || j->p.sides[MT_COL].present || !j->codes || j->sums)
        return false;
    if ((kind != WHOLE && kind != LINES) || mt_codes_kind(*row) != CODES_E4M3) return false;
    return !g->last_dims && g->k % RUN == 0 && g->k <= INT32_MAX && g->m <= INT32_MAX &&
           g->members <= MOST_MEMBERS && (uintptr_t)row->codes % RUN == 0 &&
           (uintptr_t)j->p.sides[SOURCE].codes % 16 == 0;
}

mt_status mt_cuda_quantize_tokens(mt_stream *stream, const job *j,
                                  const struct mt_quantize_args *args)
{
    const token_job t = { *j, args->position, args->tokens, (int)args->top_k };
    const size_t bytes = (3 * (size_t)j->p.group.members + 1) * sizeof(int);
    const int64_t most = (int64_t)mt_cuda_multiprocessors(stream) * PER_CARD;
    const int64_t blocks = mt_ceil_div(args->tokens, READING_WARPS);
    if (blocks == 0) return MT_OK;
    (mt_cuda_short_kind(j) == LINES ? tokens_kernel<LINES> : tokens_kernel<WHOLE>)<<<
        (unsigned)(blocks < most ? blocks : most), READERS, bytes, mt_cuda_stream(stream)>>>(t);
    MT_LAUNCHED(stream, "quantize: tokens");
    return MT_OK;
}
