#!/usr/bin/env python3
"""PyTorch's fused AdamW on the experts of a layer, f32 parameters, gradients and moments, one tensor.

Usage: torch_adamw.py [SHAPE...]. GB/s of the 28 bytes that an f32 update of a parameter cannot avoid.
"""

import sys

import torch

from protocol import LAYERS, measure, random, report, run, selected


def bench(shape):
    _, d, f, e, _ = LAYERS[shape]
    count = 3 * e * d * f
    p = random(count, scale=0.02, dtype=torch.float32, grad=True)
    p.grad = random(count, scale=1e-3, dtype=torch.float32)
    optimizer = torch.optim.AdamW([p], lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    report("torch_adamw", "ops", shape, "adamw", measure(lambda turn: optimizer.step()), 28 * count * 1e-9, "GB/s")


torch.manual_seed(0)
run("torch_adamw", [(s, lambda s=s: bench(s)) for s in selected(LAYERS, sys.argv[1:] or ["olmoe"])])
