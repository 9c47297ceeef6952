/* The Hopper GEMM for the router: its logits, x by the three planes of its weights
 * (router_tensor.cuh), both along the depth, and dx, an NN whose tiles end while others go on. A
 * tile of logits has the planes of the same experts beside each other, so that one thread has the
 * three sums of a logit, which it adds, the smallest first, before they are stored: f32 [depth
 * parts, tokens, columns]. */
#include "kernels/cuda/gemm_sm90_kernel.cuh"
#include "kernels/cuda/router_sm90.cuh"

struct router_logits : sm90<MT_GEMM_NT, 2, 1, true, SM90_PLAIN> {
    enum { ACROSS_P = false, ACROSS_Q = false, GRAIN = WIDTH / 2, BOX_Q = GRAIN };
};

struct router_result : sm90_result<router_logits> {
};

template <> struct sm90_beside<router_logits> {
    enum { PRODUCES = false, GATHERS = false };
    typedef router_result result;
};

static_assert(router_logits::WIDTH == 3 * MT_ROUTER_EXPERTS &&
                  router_logits::GRAIN == 3 * MT_ROUTER_FEW,
              "tiles of all planes of so many experts");

/* 64 rows of the logits of EXPERTS experts. */
template <int EXPERTS>
static __device__ __forceinline__ void router_store(router_result &r, const float (&d)[WGMMA_SUMS],
                                                    int mi)
{
    constexpr int PIECE = router_logits::PIECE;
    const sm90_factor by = { false, 1, 0 };
    const uint32_t thread = thread_now() % 128;
#pragma unroll
    for (int j = 0; j < EXPERTS / PIECE; j++) {
        float sum[PIECE / 2];
#pragma unroll
        for (int i = 0; i < PIECE / 2; i++) {
            const int at = j * PIECE / 2 + i;
            sum[i] = (d[at + EXPERTS] + d[at + EXPERTS / 2]) + d[at];
        }
        sm90_put_wgrad(r.address(r.buffer), sum, false, 0, false, by);
        shared_to_copies();
        if (thread == 0) copies_read<router_logits::BUFFERS - 2>();
        barrier_threads(1 + r.group(), 128);
        if (thread == 0) {
            copy_out(&r.maps->d, r.address(r.buffer), r.n0() / 3 + j * PIECE, r.m(mi), r.member());
            copies_commit();
        }
        r.next();
    }
}

static __device__ __forceinline__ void
sm90_store_tile(router_result &r, float (&d)[router_logits::BLOCKS_M][WGMMA_SUMS])
{
#pragma unroll
    for (int mi = 0; mi < router_logits::BLOCKS_M; mi++) {
        if (r.m(mi) >= r.args->m) continue;
        if (r.len() == router_logits::WIDTH)
            router_store<MT_ROUTER_EXPERTS>(r, d[mi], mi);
        else
            router_store<MT_ROUTER_FEW>(r, d[mi], mi);
    }
}

const gemm_sm90_variant mt_cuda_router_logits = sm90_variant_of<router_logits>();
const gemm_sm90_variant mt_cuda_router_dx = sm90_variant<MT_GEMM_NN, 2, 1, true, SM90_ANY>();
