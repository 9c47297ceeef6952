/* The Hopper GEMM whose P stays. Included by gemm_sm90_kernel.cuh. */
#pragma once

/* NT, ping-pong, of few rows a member: the P of a tile, up to PANEL steps of it, stays for all the
 * tiles of its row, which a block takes one after the other, so that most tiles bring Q alone.
 * Steps of P have a ring of their own; a member with more of them has its P brought for each tile.
 */
template <sm90_sums SUMS> struct sm90_panel : sm90<MT_GEMM_NT, 2, 1, true, SUMS> {
    typedef sm90<MT_GEMM_NT, 2, 1, true, SUMS> plain;
    enum {
        PANEL = 5,
        STAGE = plain::WIDTH * 128,
        STAGES = 4,
        PIECES = PANEL * plain::P_BYTES + STAGES * STAGE,
        TILES = PIECES + 2 * plain::BUFFERS * plain::BUFFER,
        FULL = TILES + plain::RING * plain::TILE_BYTES,
        EMPTY = FULL + STAGES * 8,
        ORDER = EMPTY + STAGES * 8,
        HAND = ORDER + 16,
        OLD = HAND + 16,
        PANEL_FULL = OLD + 2 * plain::BUFFERS * 8,
        PANEL_EMPTY = PANEL_FULL + PANEL * 8,
        TABLE = PANEL_EMPTY + PANEL * 8
    };
};

/* Its producer: one warp. The last word of a tile has its first step's place in P's ring, the
 * parity of that, and how often a warp tells that it has read a step of P: the last two tiles of a
 * row, which are of both warpgroups, once. */
template <class C>
static __device__ __forceinline__ void
sm90_produce_panel(uint8_t *shared, uint32_t base, const gemm_sm90_maps &maps,
                   const gemm_sm90_args &a, sm90_order<C> order, int cm)
{
    const uint16_t column = (uint16_t)((1 << C::CLUSTER_M) - 1);
    int stage = 0, slot = 0, first = 0;
    uint32_t parity = 1, slot_parity = 1, first_parity = 0;
    sm90_tile t;
    for (int tile = 0; order.next(&t, a, cm, 0); tile++) {
        const int steps = t.whole + (t.rest > 0), boxes = (t.n + C::BOX_Q - 1) / C::BOX_Q;
        const int after = (a.n - t.n0 - 1) / a.width; /* tiles of the row */
        const bool stays = steps <= C::PANEL, fresh = !stays || t.n0 == 0;
        const int times = !stays || (after == 0 && t.n0 == 0) ? 2 : after < 2;
        if (fresh) first = slot, first_parity = slot_parity ^ 1;
        const int end = order.start[t.member + 1];
        /* P's rows are whole clusters of tiles */
        if (elected())
            sm90_describe<C>(shared, tile, t, t.n,
                             t.rest | first << 8 | (int)first_parity << 12 | times << 16);
        for (int step = 0; step < steps; step++) {
            const uint32_t full = base + C::FULL + stage * 8;
            barrier_wait(base + C::EMPTY + stage * 8, parity);
            if (elected()) {
                barrier_expect(full, boxes * (C::BOX_Q * 128));
                sm90_bring_q<C>(base + C::PANEL * C::P_BYTES + stage * C::STAGE, maps, full, t,
                                step, end, cm, column);
            }
            if (++stage == C::STAGES) stage = 0, parity ^= 1;
            if (!fresh) continue;
            const uint32_t there = base + C::PANEL_FULL + slot * 8;
            barrier_wait(base + C::PANEL_EMPTY + slot * 8, slot_parity);
            if (elected()) {
                barrier_expect(there, C::P_BYTES);
                sm90_bring_p<C>(base + slot * C::P_BYTES, maps, there, t, step, end, 0, 0);
            }
            if (++slot == C::PANEL) slot = 0, slot_parity ^= 1;
        }
    }
}
