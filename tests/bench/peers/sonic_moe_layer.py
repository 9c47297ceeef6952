#!/usr/bin/env python3
"""SonicMoE's layer (sonic-moe 0.1.2.post1, quack-kernels 0.3.11, nvidia-cutlass-dsl 4.4.2; pack.sh sonic).

Usage: sonic_moe_layer.py [SHAPE...]. The first call of a shape compiles for minutes. Outputs and gradients are checked
against a plain layer: softmax over the chosen logits, gate and up in alternating rows.
"""

import sys
import time

import torch
import torch.nn.functional as F
from sonicmoe.enums import ActivationType
from sonicmoe.functional import moe_TC_softmax_topk_layer

from protocol import LAYERS, check, measure, random, report_layer, run, selected


def plain(x, w_router, w1, w2, top_k):
    s, e = torch.topk((x @ w_router.t()).float(), top_k, -1)
    s = torch.softmax(s, -1)
    out = torch.zeros_like(x, dtype=torch.float32)
    for i in range(w_router.shape[0]):
        tokens, slot = (e == i).nonzero(as_tuple=True)
        h = (x[tokens] @ w1[i].t()).float()
        y = (F.silu(h[:, ::2]) * h[:, 1::2]).bfloat16() @ w2[i].t()
        out = out.index_add(0, tokens, y.float() * s[tokens, slot, None])
    return out


def bench(shape):
    t, d, f, e, top_k = LAYERS[shape]
    x = [random(t, d, scale=0.2, grad=True) for _ in range(2)]
    dy = [random(t, d, scale=0.2) for _ in range(2)]
    w = [random(*s, scale=0.02, grad=True) for s in ((e, d), (e, 2 * f, d), (e, d, f))]
    stream = torch.cuda.current_stream().cuda_stream

    def layer(turn):
        args = (w[1].permute(1, 2, 0), None, w[2].permute(1, 2, 0), None, top_k, stream, ActivationType.SWIGLU, False)
        return moe_TC_softmax_topk_layer(x[turn % 2], w[0], *args)[0]

    def forget():
        for p in (*x, *w):
            p.grad = None

    def both(turn):
        forget()
        layer(turn).backward(dy[turn % 2])

    began = time.time()
    both(0)
    torch.cuda.synchronize()
    compiled = time.time() - began
    if t * top_k * d < 3e8:
        got = [p.grad.clone() for p in (x[0], *w)]
        forget()
        want = plain(x[0], *w, top_k)
        check("the output", layer(0), want)
        want.backward(dy[0].float())
        for name, g, p in zip(("dx", "dw_router", "dw1", "dw2"), got, (x[0], *w)):
            check(name, g, p.grad, 0.03)
        del want, got
    forget()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    fwd = measure(layer)
    report_layer("sonicmoe", shape, fwd, measure(both), first_call_s=round(compiled, 1))


torch.manual_seed(0)
run("sonicmoe", [(s, lambda s=s: bench(s)) for s in selected(LAYERS, sys.argv[1:])])
