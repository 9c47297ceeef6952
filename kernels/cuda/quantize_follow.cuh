/* Turns of a thread block whose tiles follow each other: what the tile before knows of the member
 * is taken from it, and nothing is looked up but where a member begins. */
#pragma once

#include "kernels/cuda/quantize_turns.cuh"

/* As find_turn, `last` being the turn's before it. */
static __device__ __forceinline__ void follow_turn(frame *f, const frame &last, const job &j,
                                                   int64_t units, int64_t turn)
{
    if (turn >= units) return;
    const int64_t unit = j.codes ? turn : units - 1 - turn;
    const int64_t at = unit - last.t.m.at[AT_UNIT];
    const unsigned across = (unsigned)shift_up(last.t.m.cols, 7);
    const int64_t count = shift_up(last.t.m.rows, 7) * across;
    if (at < 0 || at >= count) return find_tile(f, j, unit);
    if (lane_of_warp()) return;
    const tile &before = last.t;
    tile *t = &f->t;
    const unsigned down = (unsigned)at / across, right = (unsigned)at - down * across;
    t->m = before.m, t->index = before.index;
    t->r0 = (int64_t)down * TILE, t->c0 = (int64_t)right * TILE;
    t->rows = (int)(t->m.rows - t->r0 < TILE ? t->m.rows - t->r0 : TILE);
    t->cols = (int)(t->m.cols - t->c0 < TILE ? t->m.cols - t->c0 : TILE);
    const int64_t rows = t->r0 - before.r0, cols = t->c0 - before.c0;
    f->row0 = last.row0 + rows;
    f->source = last.source + cols + (j.row_token ? 0 : rows * t->m.cols * (j.swiglu ? 2 : 1));
    f->aligned = last.aligned;
}

/* As set_turn. */
static __device__ __forceinline__ void set_next(frame *f, const frame &last, const job &j,
                                                int64_t units, int64_t turn, int dir)
{
    if (turn >= units || lane_of_warp()) return;
    set_target(&f->to[dir], j, f->t, dir, last.t.index == f->t.index ? &last.to[dir].l : NULL);
}
