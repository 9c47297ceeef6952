#!/usr/bin/env python3
"""TransformerEngine's GroupedLinear: forward, and backward (dgrad and wgrad together), quantization included.

Usage: te_grouped_linear.py [--way loop|grouped]... [--recipe none|fp8_tensor|fp8_block]... [SHAPE...]. Row counts are
drawn in units of 16, of 128 for fp8_block, as it asks for.
"""

import argparse

import torch

from protocol import GEMMS, check, measure, random, report, row_counts, run, selected
from te import RECIPES, WAYS, context, linear


def bench(shape, way, recipe):
    experts, k, n, rows = GEMMS[shape]
    counts = row_counts(experts, rows, 128 if recipe == "fp8_block" else 16)
    rows, first = int(counts.sum()), int(counts[0])
    m = counts.cuda() if way == "grouped" else counts.tolist()
    layer = linear(experts, k, n, way)
    x = [random(rows, k, scale=0.2, grad=True) for _ in range(2)]
    dy = [random(rows, n, scale=0.2) for _ in range(2)]

    def fwd(turn):
        with context(recipe):
            return layer(x[turn % 2], m)

    def both(turn):
        for p in (*x, *layer.parameters()):
            p.grad = None
        fwd(turn).backward(dy[turn % 2])

    if way == "loop" and recipe == "none":  # its weights are plain tensors
        w = next(layer.parameters()).detach().reshape(-1)[: n * k].reshape(n, k)
        check("fprop", fwd(0)[:first], x[0][:first].float() @ w.float().t())
    peer, tflop = "te_" + way, 2 * rows * k * n * 1e-12
    ms = measure(fwd)
    report(peer, "gemm", shape, "fprop", ms, tflop, "TFLOP/s", recipe, quantizes=recipe != "none")
    ms = measure(both) - ms
    report(peer, "gemm", shape, "dgrad+wgrad_bf16", ms, 2 * tflop, "TFLOP/s", recipe, quantizes=recipe != "none")


parser = argparse.ArgumentParser()
parser.add_argument("--way", action="append", choices=WAYS)
parser.add_argument("--recipe", action="append", choices=RECIPES)
parser.add_argument("shape", nargs="*")
args = parser.parse_args()
torch.manual_seed(0)
cases = [(s, w, r) for s in selected(GEMMS, args.shape) for w in args.way or WAYS for r in args.recipe or RECIPES]
run("te_grouped_linear", [(f"{s} {w} {r}", lambda s=s, w=w, r=r: bench(s, w, r)) for s, w, r in cases])
