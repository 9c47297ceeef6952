#!/usr/bin/env python3
"""Training steps of small Qwen3-MoE models in PyTorch, written by hand for speed and compiled: f32 masters and moments,
products in bf16, fused AdamW; on a GPU the whole step is one CUDA graph. It stands beside mixtape's step with f32/f32.

Usage: torch_step.py [--mode eager|compiled|tuned]... [--clip NORM] [SHAPE...]   (compiled, 1, every shape)
"tuned" times Triton's products beside cuBLAS's as it compiles. mixtape's step measures the gradients' norm and clips
to 1, as --clip 1 does; 0 leaves that out.
"""

import argparse
import statistics

import torch
import torch.nn.functional as F
from torch import nn

from protocol import DEVICE, GPU, check, clock, report, run, selected

SIZES = {  # D, layers, heads, key heads, head width, experts, top_k, F, V, S, B: those of train/bench_step.c
    "tiny": (128, 4, 4, 2, 32, 8, 2, 128, 256, 256, 16),
    "larger": (512, 8, 8, 4, 64, 16, 2, 512, 256, 512, 8),
    "d64l3": (64, 3, 4, 2, 16, 32, 2, 128, 256, 256, 8),
    "nano": (16, 2, 2, 1, 8, 4, 2, 16, 61, 8, 2),
}
EPS, AUX, STEPS, WARM_UPS = 1e-6, 1e-3, 50 if GPU else 2, 5 if GPU else 1


class Experts(torch.autograd.Function):
    """Rows sorted by expert once; what is summed over a token's experts is gathered: no atomics."""

    @staticmethod
    def forward(ctx, x, s, e, w1, w2):
        flat = e.reshape(-1)
        order = torch.argsort(flat, stable=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        experts = torch.arange(w1.shape[0], device=order.device)
        offs = torch.searchsorted(flat[order], experts, right=True).to(torch.int32)
        rows = x[order // e.shape[1]]
        h = torch._grouped_mm(rows, w1.transpose(-2, -1), offs=offs)
        g, u = h.chunk(2, -1)
        a = F.silu(g) * u
        y = torch._grouped_mm(a, w2.transpose(-2, -1), offs=offs)
        ctx.save_for_backward(s, order, place, offs, rows, h, a, y, w1, w2)
        return (y[place].view(*s.shape, -1).float() * s.unsqueeze(-1)).sum(1).to(x.dtype)

    @staticmethod
    def backward(ctx, dout):
        s, order, place, offs, rows, h, a, y, w1, w2 = ctx.saved_tensors
        top_k = s.shape[1]
        ds = (dout.unsqueeze(1).float() * y[place].view(*s.shape, -1).float()).sum(-1)
        dy = (dout[order // top_k].float() * s.reshape(-1)[order].unsqueeze(-1)).to(dout.dtype)
        da = torch._grouped_mm(dy, w2, offs=offs).float()
        g, u = h.float().chunk(2, -1)
        p = torch.sigmoid(g)
        dh = torch.cat((da * u * p * (1 + g * (1 - p)), da * g * p), -1).to(h.dtype)
        dw1 = torch._grouped_mm(dh.t(), rows, offs=offs)
        dw2 = torch._grouped_mm(dy.t(), a, offs=offs)
        dx = torch._grouped_mm(dh, w1, offs=offs)[place].view(*s.shape, -1).float().sum(1)
        return dx.to(dout.dtype), ds, None, dw1, dw2


def plain_experts(x, s, e, w1, w2):
    """The same, expert by expert: what the step is checked against."""
    out = torch.zeros_like(x, dtype=torch.float32)
    for i in range(w1.shape[0]):
        tokens, slot = (e == i).nonzero(as_tuple=True)
        g, u = (x[tokens] @ w1[i].t()).chunk(2, -1)
        y = (F.silu(g) * u) @ w2[i].t()
        out = out.index_add(0, tokens, y.float() * s[tokens, slot, None])
    return out.to(x.dtype)


def rms(x, w):
    f = x.float()
    return (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype) * w.to(x.dtype)


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def matrix(*shape):
    return nn.Parameter(torch.randn(*shape, device=DEVICE) * 0.02)


def ones(n):
    return nn.Parameter(torch.ones(n, device=DEVICE))


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        d, _, self.heads, self.kv, self.width, self.experts, self.top_k, f, *_ = size
        self.norm1, self.norm2, self.q_norm, self.k_norm = ones(d), ones(d), ones(self.width), ones(self.width)
        self.qkv = matrix((self.heads + 2 * self.kv) * self.width, d)
        self.o = matrix(d, self.heads * self.width)
        self.router, self.w1, self.w2 = matrix(self.experts, d), matrix(self.experts, 2 * f, d), matrix(self.experts, d, f)

    def forward(self, h, cos, sin, experts):
        b, s, d = h.shape
        x = rms(h, self.norm1)
        qkv = (x @ self.qkv.to(x.dtype).t()).view(b, s, self.heads + 2 * self.kv, self.width)
        q, k, v = qkv.split((self.heads, self.kv, self.kv), 2)
        q, k = rotate(rms(q, self.q_norm), cos, sin), rotate(rms(k, self.k_norm), cos, sin)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv)
        h = h + o.transpose(1, 2).reshape(b, s, -1) @ self.o.to(h.dtype).t()
        x = rms(h, self.norm2).view(b * s, d)
        p = torch.softmax((x @ self.router.to(x.dtype).t()).float(), -1)
        top, e = torch.topk(p, self.top_k, -1)
        top = top / top.sum(-1, keepdim=True)
        y = experts(x, top, e, self.w1.to(x.dtype), self.w2.to(x.dtype))
        chosen = F.one_hot(e, self.experts).sum((0, 1)).float()
        return h + y.view_as(h), p.sum(0), chosen


class Model(nn.Module):
    def __init__(self, size):
        super().__init__()
        d, layers, _, _, width, self.experts, _, _, v, s, _ = size
        self.embedding, self.head, self.norm = matrix(v, d), matrix(v, d), ones(d)
        self.blocks = nn.ModuleList(Block(size) for _ in range(layers))
        angle = torch.arange(s, device=DEVICE).float()[:, None] / 1e4 ** (torch.arange(0, width, 2, device=DEVICE) / width)
        self.cos, self.sin = (t.to(torch.bfloat16)[None, :, None] for t in (angle.cos(), angle.sin()))

    def forward(self, tokens, targets, experts=Experts.apply):
        h = F.embedding(tokens, self.embedding).to(torch.bfloat16)
        probs, chosen = 0, 0
        for block in self.blocks:
            h, p, c = block(h, self.cos, self.sin, experts)
            probs, chosen = probs + p, chosen + c
        logits = (rms(h, self.norm) @ self.head.to(h.dtype).t()).float()
        rows = tokens.numel() * len(self.blocks)
        balance = self.experts * ((chosen / rows) * (probs / rows)).sum()
        return F.cross_entropy(logits.view(tokens.numel(), -1), targets.reshape(-1)) + AUX * balance


def check_gradients(model, tokens, targets):
    """The experts' own gradients against those that autograd makes of the plain ones."""
    got = torch.autograd.grad(model(tokens, targets), list(model.parameters()))
    want = torch.autograd.grad(model(tokens, targets, plain_experts), list(model.parameters()))
    for (name, _), g, w in zip(model.named_parameters(), got, want):
        check("gradient of " + name, g, w, limit=0.05)


def graphed(step):
    """The step as one CUDA graph, recorded after warm-ups on a stream beside."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def bench(name, mode):
    size = SIZES[name]
    v, s, b = size[8:]
    model = Model(size)
    tokens, targets = (torch.randint(0, v, (b, s), device=DEVICE) for _ in range(2))
    check_gradients(model, tokens, targets)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True, capturable=GPU)
    modes = dict(compiled="default", tuned="max-autotune-no-cudagraphs")
    loss = torch.compile(model, dynamic=False, mode=modes[mode]) if mode in modes else model
    losses = torch.zeros(1, device=DEVICE)

    def step():
        optimizer.zero_grad(set_to_none=True)
        value = loss(tokens, targets)
        value.backward()
        if args.clip:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip, foreach=True)
        optimizer.step()
        losses.copy_(value.detach())

    launch = graphed(step) if GPU else step
    times = []
    for _ in range(WARM_UPS + STEPS):
        begin, end = clock(), clock()
        begin.record()
        launch()
        end.record()
        if GPU:
            torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    notes = dict(clip=args.clip, graph=GPU, loss=losses.item())
    if GPU:
        notes["memory_gb"] = torch.cuda.max_memory_allocated() * 1e-9
    report("torch_" + mode, "step", name, "f32/f32", statistics.median(times[WARM_UPS:]), b * s, "tok/s", **notes)


parser = argparse.ArgumentParser()
parser.add_argument("--mode", action="append", choices=["eager", "compiled", "tuned"])
parser.add_argument("--clip", type=float, default=1.0)
parser.add_argument("shape", nargs="*")
args = parser.parse_args()
torch.manual_seed(0)
cases = [(n, m) for n in selected(SIZES, args.shape) for m in args.mode or ["compiled"]]
run("torch_step", [(f"{n} {m}", lambda n=n, m=m: bench(n, m)) for n, m in cases])
