"""What every peer does as `mixtape bench` does it: the same shapes, random data, caches flushed before each launch,
inputs taken in turns, launches queued without waiting in between, medians of the device's own times, and the same
lines of JSON. A peer names its cases as mixtape does, so that ratios.py can pair them.

Shapes are those of train/bench.c (layers) and train/bench_gemm.c; a peer's arguments are shape names, or what comes
before their '_', as --shape takes them.
"""

import json
import os
import time

import torch

LAYERS = {  # T, D, F, E, top_k
    "mixtral": (8192, 4096, 14336, 8, 2),
    "olmoe": (8192, 2048, 1024, 64, 8),
    "qwen3": (8192, 2048, 768, 128, 8),
    "dsv3": (8192, 7168, 2048, 256, 8),
    "dsv3_half": (4096, 7168, 2048, 128, 8),
    "sonic7b": (24576, 1536, 256, 128, 8),
    "sonic30b": (32768, 4096, 1024, 64, 4),
    "small": (8192, 512, 512, 16, 2),
    "nano": (48, 32, 32, 4, 2),
}
GEMMS = {  # E, K, N, R
    "mixtral_gate_up": (8, 4096, 28672, 16448),
    "mixtral_down": (8, 14336, 4096, 16448),
    "olmoe_gate_up": (64, 2048, 2048, 66016),
    "olmoe_down": (64, 1024, 2048, 66016),
    "qwen3_gate_up": (128, 2048, 1536, 66464),
    "qwen3_down": (128, 768, 2048, 66464),
    "dsv3_gate_up": (256, 7168, 4096, 67360),
    "dsv3_down": (256, 2048, 7168, 67360),
    "fine7b_gate_up": (128, 1536, 512, 197488),
    "fine7b_down": (128, 256, 1536, 197488),
    "small_gate_up": (16, 512, 1024, 16496),
    "small_down": (16, 512, 512, 16496),
    "nano_gate_up": (4, 32, 64, 96),
    "nano_down": (4, 32, 32, 96),
}
UNASKED = ("nano",)  # only by name: for trying a script out

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"  # the cpu only tries a script out
LAUNCHES, WARM_UPS = (15, 4) if GPU else (3, 1)
FLUSH = (256 if GPU else 64) << 20
# Before each launch, as mixtape's --flushes: with many the host queues all of a launch before it begins.
FLUSHES = int(os.environ.get("PEER_FLUSHES", 1))


def selected(shapes, asked):
    """The names in `shapes` that `asked` (a list of words) selects; all but UNASKED when it is empty."""
    if not asked or "all" in asked:
        return [s for s in shapes if not s.startswith(UNASKED)]
    chosen = [s for s in shapes if any(s == a or s.startswith(a + "_") for a in asked)]
    if not chosen:
        raise SystemExit(f"no shape {' '.join(asked)}; there are: {' '.join(shapes)}")
    return chosen


def random(*shape, scale, grad=False, dtype=torch.bfloat16):
    x = (torch.randn(*shape, device=DEVICE) * scale).to(dtype)
    return x.requires_grad_() if grad else x


def row_counts(experts, rows, unit=1):
    """Rows of each expert, drawn evenly in units, on the host; they may sum to a little less than `rows`."""
    draws = torch.multinomial(torch.ones(experts), rows // unit, replacement=True)
    return draws.bincount(minlength=experts) * unit


class HostClock:
    def record(self):
        self.time = time.perf_counter()

    def elapsed_time(self, end):
        return (end.time - self.time) * 1e3


def clock():
    return torch.cuda.Event(enable_timing=True) if GPU else HostClock()


def measure(launch):
    """Median milliseconds of launch(turn)."""
    flush = torch.empty(FLUSH // 4, dtype=torch.int32, device=DEVICE)
    for turn in range(WARM_UPS):
        launch(turn)
    marks = []
    for turn in range(LAUNCHES):
        begin, end = clock(), clock()
        for _ in range(FLUSHES):
            flush.zero_()
        begin.record()
        launch(WARM_UPS + turn)
        end.record()
        marks.append((begin, end))
    if GPU:
        torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) for begin, end in marks)[LAUNCHES // 2]


def report(peer, family, shape, case, ms, amount, unit, recipe="none", **notes):
    """A line of JSON; `amount` over the time is the rate in `unit`, as in mixtape's lines."""
    line = dict(peer=peer, family=family, shape=shape, case=case, recipe=recipe, ms=ms, rate=amount / ms * 1e3)
    print(json.dumps(dict(line, unit=unit, **notes)), flush=True)


def report_layer(peer, shape, fwd, both, recipe="none", **notes):
    """The three lines of a MoE layer: forward, backward (both less forward), both. FLOP of the experts alone."""
    tokens, width, expert_width, _, top_k = LAYERS[shape]
    tflop = 6 * tokens * top_k * width * expert_width * 1e-12
    if GPU:
        notes["peak_gb"] = torch.cuda.max_memory_allocated() * 1e-9
    report(peer, "moe", shape, "fwd", fwd, tflop, "TFLOP/s", recipe, **notes)
    if both > fwd:
        report(peer, "moe", shape, "bwd", both - fwd, 2 * tflop, "TFLOP/s", recipe, **notes)
    report(peer, "moe", shape, "fwd+bwd", both, 3 * tflop, "TFLOP/s", recipe, **notes)


def run(peer, cases):
    """Each of (words that name it, function): one that fails is reported, the others still run."""
    for name, case in cases:
        try:
            case()
        except Exception as error:  # a library that lacks a kernel, or memory that is short
            print(json.dumps(dict(peer=peer, shape=name, error=f"{type(error).__name__}: {error}"[:500])), flush=True)
        if GPU:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def relative(got, want):
    got, want = got.float(), want.float()
    return ((got - want).norm() / want.norm()).item()


def check(what, got, want, limit=0.02):
    """A peer that computes something else is no peer."""
    error = relative(got, want)
    if not error <= limit:
        raise ArithmeticError(f"{what} differs from plain torch by {error:.3g}")
