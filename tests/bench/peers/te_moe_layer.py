#!/usr/bin/env python3
"""A MoE layer of TransformerEngine's modules: moe_permute, GroupedLinear, moe_unpermute.

Usage: te_moe_layer.py [--way loop|grouped]... [--recipe none|fp8_tensor|fp8_block]... [SHAPE...]. FP8 goes through
Fp8Padding, as TransformerEngine asks; weights are quantized in every step. The grouped way has bf16 only.
"""

import argparse

import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te

from protocol import LAYERS, measure, random, report_layer, run, selected
from te import RECIPES, WAYS, context, linear


def bench(shape, way, recipe):
    t, d, f, e, top_k = LAYERS[shape]
    fc1, fc2 = linear(e, d, 2 * f, way), linear(e, f, d, way)
    fp8 = recipe != "none"
    pad, unpad = te.Fp8Padding(e), te.Fp8Unpadding(e)
    x = [random(t, d, scale=0.2, grad=True) for _ in range(2)]
    dy = [random(t, d, scale=0.2) for _ in range(2)]
    w_router = random(e, d, scale=0.02, grad=True)

    def layer(turn):
        p = torch.softmax((x[turn % 2] @ w_router.t()).float(), -1)
        s, chosen = torch.topk(p, top_k, -1)
        s = s / s.sum(-1, keepdim=True)
        rows, places = te.moe_permute(x[turn % 2], chosen.to(torch.int32), num_out_tokens=t * top_k, map_type="index")
        counts = torch.bincount(chosen.reshape(-1), minlength=e)
        m = padded = counts if way == "grouped" else counts.tolist()
        with context(recipe):
            if fp8:
                rows, padded = pad(rows, m)
            g, u = fc1(rows, padded).chunk(2, -1)
            y = fc2(F.silu(g) * u, padded)
            if fp8:
                y = unpad(y, m)
        return te.moe_unpermute(y, places, s, map_type="index")

    def both(turn):
        for p in (*x, w_router, *fc1.parameters(), *fc2.parameters()):
            p.grad = None
        layer(turn).backward(dy[turn % 2])

    both(0)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    fwd = measure(layer)
    report_layer("te_" + way, shape, fwd, measure(both), recipe)


parser = argparse.ArgumentParser()
parser.add_argument("--way", action="append", choices=WAYS)
parser.add_argument("--recipe", action="append", choices=RECIPES)
parser.add_argument("shape", nargs="*")
args = parser.parse_args()
torch.manual_seed(0)
cases = [(s, w, r) for s in selected(LAYERS, args.shape) for w in args.way or WAYS for r in args.recipe or RECIPES]
cases = [c for c in cases if c[1] == "loop" or c[2] == "none"]
run("te_moe_layer", [(f"{s} {w} {r}", lambda s=s, w=w, r=r: bench(s, w, r)) for s, w, r in cases])
