#!/usr/bin/env python3
"""torch._grouped_mm in bf16 (fprop, dgrad, wgrad to bf16) and torch._scaled_grouped_mm in fp8, a scale for each row (fprop).

Usage: torch_grouped_mm.py [SHAPE...]. Row counts are drawn evenly; for fp8 in units of 16, which it asks for. Results
of the first expert are checked against a plain product.
"""

import sys

import torch

from protocol import DEVICE, GEMMS, check, measure, random, report, row_counts, run, selected

PEER = "torch_grouped_mm"


def offsets(counts):
    return counts.cumsum(0).to(torch.int32).to(DEVICE)


def bf16(shape):
    experts, k, n, rows = GEMMS[shape]
    counts = row_counts(experts, rows)
    first, offs = int(counts[0]), offsets(counts)
    x = [random(rows, k, scale=0.2) for _ in range(2)]
    dy = [random(rows, n, scale=0.2) for _ in range(2)]
    w = random(experts, n, k, scale=0.02)
    passes = {
        "fprop": lambda t: torch._grouped_mm(x[t % 2], w.transpose(-2, -1), offs=offs),
        "dgrad": lambda t: torch._grouped_mm(dy[t % 2], w, offs=offs),
        "wgrad_bf16": lambda t: torch._grouped_mm(dy[t % 2].transpose(-2, -1), x[t % 2], offs=offs),
    }
    want = {
        "fprop": lambda: x[0][:first].float() @ w[0].float().t(),
        "dgrad": lambda: dy[0][:first].float() @ w[0].float(),
        "wgrad_bf16": lambda: dy[0][:first].float().t() @ x[0][:first].float(),
    }
    for case, launch in passes.items():
        y = launch(0)
        check(case, y[0] if case == "wgrad_bf16" else y[:first], want[case]())
        report(PEER, "gemm", shape, case, measure(launch), 2 * rows * k * n * 1e-12, "TFLOP/s")


def rowwise(x):
    """e4m3 codes and the scale of each row."""
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (x.float() / scale).to(torch.float8_e4m3fn), scale.squeeze(-1)


def fp8(shape):
    experts, k, n, rows = GEMMS[shape]
    counts = row_counts(experts, rows, 16)
    rows, first, offs = int(counts.sum()), int(counts[0]), offsets(counts)
    plain, w = random(rows, k, scale=0.2), random(experts, n, k, scale=0.02)
    x = [rowwise(plain), rowwise(random(rows, k, scale=0.2))]
    codes = torch.empty(experts, n, k, dtype=torch.float8_e4m3fn, device=DEVICE)
    scales = torch.empty(experts, n, device=DEVICE)
    for e in range(experts):  # one at a time: the f32 values of all would not fit
        codes[e], scales[e] = rowwise(w[e])

    def launch(turn):
        a, scale = x[turn % 2]
        return torch._scaled_grouped_mm(
            a, codes.transpose(-2, -1), scale, scales, offs=offs, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    check("fprop", launch(0)[:first], plain[:first].float() @ w[0].float().t(), 0.06)
    ms = measure(launch)
    report(PEER, "gemm", shape, "fprop", ms, 2 * rows * k * n * 1e-12, "TFLOP/s", "fp8_tensor", scales="row")


torch.manual_seed(0)
run(PEER, [(s, lambda s=s, f=f: f(s)) for s in selected(GEMMS, sys.argv[1:]) for f in (bf16, fp8)])
