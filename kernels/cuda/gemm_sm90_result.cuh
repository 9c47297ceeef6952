/* Pieces of the Hopper GEMM's result on their way through shared memory: their places, and how a
 * warp's sums are laid out there. Included by gemm_sm90_kernel.cuh. */
#pragma once

/* One piece of the result: its place among the tile's, its 64 rows of P. */
template <class C> struct sm90_result {
    uint32_t base;
    const gemm_sm90_maps *maps;
    const gemm_sm90_args *args;
    int tile;        /* of the block */
    int buffer;      /* the next one */
    uint32_t parity; /* of its barrier for C */
    float2 factor;   /* C::FACTOR: of the member's sums; TIMES: since its last products began */

    /* Of the multiplying warpgroups; not kept, since all registers hold sums. */
    __device__ __forceinline__ int group() const { return (int)(thread_now() / 128) - 1; }
    __device__ __forceinline__ uint32_t address(int b) const
    {
        return base + C::PIECES + (group() * C::BUFFERS + b) * C::BUFFER;
    }
    __device__ __forceinline__ uint32_t old(int b) const
    {
        return base + C::OLD + (group() * C::BUFFERS + b) * 8;
    }
    /* A word of the tile's description, or of that of the tile after it. */
    __device__ __forceinline__ int word(int i, int after = 0) const
    {
        return shared_now(base + C::TILES + (anew(tile) + after) % C::RING * C::TILE_BYTES + i * 4);
    }
    __device__ __forceinline__ int len() const { return word(1); }
    __device__ __forceinline__ int row() const { return word(2); }
    __device__ __forceinline__ int m(int mi) const
    {
        return word(3) + (C::PINGPONG ? mi : group() * C::BLOCKS_M + mi) * 64;
    }
    __device__ __forceinline__ int member() const { return word(4); }
    __device__ __forceinline__ int n0() const { return word(5); }
    /* The member's factor, asked for where this stands. */
    __device__ __forceinline__ float2 own_factor() const
    {
        return shared_pair_now(base + args->factors + member() * 8);
    }
    /* Of P; BY_ROWS: of the member. */
    __device__ __forceinline__ int rows() const
    {
        return C::BY_ROWS ? shared_now(base + C::TABLE + (member() + 1) * 4) - row() : args->m;
    }
    __device__ __forceinline__ void next()
    {
        if (++buffer == C::BUFFERS) buffer = 0, parity ^= 1;
    }
    /* Whether a piece has the columns of two that are written one after the other: NT in bf16. */
    __device__ __forceinline__ bool pairs() const { return C::WGRAD && args->half; }
    /* Pieces along the columns; x counts them row of pieces by row of pieces. */
    __device__ __forceinline__ int across() const
    {
        int n = (len() + C::PIECE - 1) / C::PIECE;
        return pairs() ? (n + 1) / 2 : n;
    }
    /* The piece from this column of the tile on. */
    __device__ __forceinline__ void store(int mi, int column) const
    {
        if (C::TURNED) {
            copy_out(&maps->d, address(buffer), m(mi), n0() + column, member());
            if (!args->half)
                copy_out(&maps->d, address(buffer) + C::BUFFER / 2, m(mi) + 32, n0() + column,
                         member());
        } else if (C::WGRAD)
            copy_out(&maps->d, address(buffer), n0() + column, m(mi), member());
        else
            copy_out_ragged(&maps->d, address(buffer), m(mi), row() + len(), len(), column);
        copies_commit();
    }
    /* C of piece x on its way to the buffer `ahead` after the next, if there is such a piece. */
    __device__ __forceinline__ void load(int x, int ahead) const
    {
        int per = across(), mi = x >= per;
        int column = (x - mi * per) * (pairs() ? 2 * C::PIECE : (int)C::PIECE);
        if (x >= C::BLOCKS_M * per || m(mi) >= args->m) return;
        int b = buffer + ahead - (buffer + ahead >= C::BUFFERS ? C::BUFFERS : 0);
        barrier_expect(old(b), C::BUFFER);
        if (C::TURNED) {
            copy_in<false>(address(b), &maps->c, old(b), m(mi), n0() + column, member(), 0);
            if (!args->half)
                copy_in<false>(address(b) + C::BUFFER / 2, &maps->c, old(b), m(mi) + 32,
                               n0() + column, member(), 0);
        } else if (C::WGRAD)
            copy_in<false>(address(b), &maps->c, old(b), n0() + column, m(mi), member(), 0);
        else
            copy_in_ragged<false>(address(b), &maps->c, old(b), m(mi), row() + len(), len(), column,
                                  0);
    }
};

/* The factor of a member's sums. They are multiplied as they are stored, never in place: wgmma's
 * registers that other instructions write make the compiler wait after each wgmma. */
struct sm90_factor {
    bool given;
    float first, second;
    bool alone; /* nothing is added, not even a 0, which is an instruction */
    bool whole; /* the first part is all of it, to f32's last bit */

    __device__ __forceinline__ float operator()(float sum) const
    {
        return !given ? sum : whole ? sum * first : gemm_scaled(sum, first, second);
    }
};

/* Both parts as one, of which a result of bf16 does not show the rounding. A NaN stays one. */
static __device__ __forceinline__ float sm90_whole(const float2 &factor)
{
    const float both = factor.x + factor.y, most = 0x1.fffffep127f;
    return both > most ? most : both;
}

/* A thread's two sums of a row and what is added, in f32 [64][32]. */
static __device__ __forceinline__ void sm90_put_real(uint32_t address, const float *sum, bool add,
                                                     const sm90_factor &by)
{
    float x = 0, y = 0;
    if (add)
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                     : "=f"(x), "=f"(y)
                     : "r"(address)
                     : "memory");
    put_shared_pair(address, by.alone ? by(sum[0]) : by(sum[0]) + x,
                    by.alone ? by(sum[1]) : by(sum[1]) + y);
}

/* A warp's 16 x 16 sums in bf16; ACROSS: transposed. bias: of the thread's two rows. */
template <bool ACROSS>
static __device__ __forceinline__ void sm90_put_bf16(uint32_t address, const float *sum, bool add,
                                                     const sm90_factor &by, float bias0,
                                                     float bias1)
{
    uint32_t out[4], old[4] = { 0, 0, 0, 0 };
    if (add && ACROSS)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(old[0]), "=r"(old[1]), "=r"(old[2]), "=r"(old[3])
                     : "r"(address)
                     : "memory");
    if (add && !ACROSS)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(old[0]), "=r"(old[1]), "=r"(old[2]), "=r"(old[3])
                     : "r"(address)
                     : "memory");
#pragma unroll
    for (int x = 0; x < 4; x++) {
        float bias = x % 2 ? bias1 : bias0;
        float first = by(sum[2 * x]), second = by(sum[2 * x + 1]);
        if (!by.alone) {
            first += __uint_as_float(old[x] << 16) + bias;
            second += __uint_as_float(old[x] & 0xffff0000u) + bias;
        }
        __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
        out[x] = *(uint32_t *)&pair;
    }
    if (ACROSS)
        asm volatile(
            "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
            "r"(out[0]), "r"(out[1]), "r"(out[2]), "r"(out[3])
            : "memory");
    else
        asm volatile(
            "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
            "r"(out[0]), "r"(out[1]), "r"(out[2]), "r"(out[3])
            : "memory");
}

/* A warp's 16 x 32 sums of NT turned: in bf16 a piece's lines from 32 `part` on, of 64 rows of P;
 * in f32 its 32 lines, of 32 rows in each half of the buffer. */
static __device__ __forceinline__ void sm90_put_turned(uint32_t to, const float *sum, bool half,
                                                       int part, bool add, const sm90_factor &by)
{
    const uint32_t lane = thread_now() % 32, warp = thread_now() % 128 / 32;
    if (half) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint32_t line = part * 32 + i * 16 + lane / 16 * 8 + lane % 8;
            uint32_t at = (warp * 2 + lane / 8 % 2) ^ (lane % 8);
            sm90_put_bf16<true>(to + line * 128 + at * 16, sum + i * 8, add, by, 0, 0);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < 16; i++) { /* 8-column groups, two rows of each, two columns */
        uint32_t row = warp % 2 * 16 + i / 2 % 2 * 8 + lane / 4;
        uint32_t line = i / 4 * 8 + lane % 4 * 2 + i % 2;
        uint32_t at =
            to + warp / 2 * 4096 + line * 128 + ((row / 4) ^ (line % 8)) * 16 + row % 4 * 4;
        float old = add ? __int_as_float(shared_now(at)) : 0;
        put_shared(at, by.alone ? by(sum[i]) : by(sum[i]) + old);
    }
}

/* A warp's 16 x 32 sums of NT: in f32 all of a piece's columns, in bf16 those from `part`, in 16
 * bytes, on. */
static __device__ __forceinline__ void sm90_put_wgrad(uint32_t to, const float *sum, bool half,
                                                      int part, bool add, const sm90_factor &by)
{
    const uint32_t lane = thread_now() % 32, first = thread_now() % 128 / 32 * 16;
    if (half) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint32_t at = (part + i * 2 + lane / 16) ^ (lane % 8);
            sm90_put_bf16<false>(to + (first + lane % 16) * 128 + at * 16, sum + i * 8, add, by, 0,
                                 0);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) { /* 8-column groups, two rows of each */
        uint32_t line = first + i % 2 * 8 + lane / 4, q = lane % 4, g = i / 2;
        sm90_put_real(to + line * 128 + ((g * 2 + q / 2) ^ (line % 8)) * 16 + q % 2 * 8,
                      sum + i * 2, add, by);
    }
}
