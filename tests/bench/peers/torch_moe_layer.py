#!/usr/bin/env python3
"""A MoE layer in PyTorch with _grouped_mm, forward and backward, eager and compiled.

Usage: torch_moe_layer.py [--mode eager|compiled]... [SHAPE...]. Timed: router, softmax, top-k, routing metadata, layer.
The forward pass keeps what backward needs, as mixtape's does.
"""

import argparse

import torch
import torch.nn.functional as F

from protocol import LAYERS, check, measure, random, report_layer, run, selected


def route(x, w_router, top_k):
    p = torch.softmax((x @ w_router.t()).float(), -1)
    s, e = torch.topk(p, top_k, -1)
    return (s / s.sum(-1, keepdim=True)).to(x.dtype), e


def layer(x, w_router, w1, w2, top_k):
    s, e = route(x, w_router, top_k)
    flat = e.reshape(-1)
    order = torch.argsort(flat, stable=True)
    tokens = order // top_k
    offs = torch.cumsum(torch.bincount(flat, minlength=w_router.shape[0]), 0).to(torch.int32)
    h = torch._grouped_mm(x[tokens], w1.transpose(-2, -1), offs=offs)
    g, u = h.chunk(2, -1)
    y = torch._grouped_mm(F.silu(g) * u, w2.transpose(-2, -1), offs=offs)
    return torch.zeros_like(x).index_add(0, tokens, y * s.reshape(-1)[order].unsqueeze(-1))


def plain(x, w_router, w1, w2, top_k):
    """The same, expert by expert: what a peer's layer is checked against."""
    s, e = route(x, w_router, top_k)
    out = torch.zeros_like(x, dtype=torch.float32)
    for i in range(w_router.shape[0]):
        tokens, slot = (e == i).nonzero(as_tuple=True)
        g, u = (x[tokens] @ w1[i].t()).chunk(2, -1)
        y = (F.silu(g) * u) @ w2[i].t()
        out = out.index_add(0, tokens, y.float() * s[tokens, slot, None].float())
    return out


def weights(shape):
    _, d, f, e, _ = LAYERS[shape]
    mk = lambda *s: random(*s, scale=0.02, grad=True)
    return [mk(e, d), mk(e, 2 * f, d), mk(e, d, f)]


def bench(shape, mode):
    t, d, _, _, top_k = LAYERS[shape]
    x = [random(t, d, scale=0.2, grad=True) for _ in range(2)]
    dy = [random(t, d, scale=0.2) for _ in range(2)]
    w = weights(shape)
    f = torch.compile(layer) if mode == "compiled" else layer

    def both(turn):
        for p in (*x, *w):
            p.grad = None
        f(x[turn % 2], *w, top_k).backward(dy[turn % 2])

    if t * top_k * d < 3e8:
        with torch.no_grad():
            check("the layer", f(x[0], *w, top_k), plain(x[0], *w, top_k))
    fwd = measure(lambda turn: f(x[turn % 2], *w, top_k))
    report_layer("torch_" + mode, shape, fwd, measure(both))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", action="append", choices=["eager", "compiled"])
    parser.add_argument("shape", nargs="*")
    args = parser.parse_args()
    torch.manual_seed(0)
    modes = args.mode or ["eager", "compiled"]
    cases = [(s, m) for s in selected(LAYERS, args.shape) for m in modes]
    run("torch_moe_layer", [(s, lambda s=s, m=m: bench(s, m)) for s, m in cases])
