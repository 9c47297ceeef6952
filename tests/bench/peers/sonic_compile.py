#!/usr/bin/env python3
"""Compiles the kernels that SonicMoE's layer tries (quack's GEMMs for sm_90, every tile it may choose), where there is no
GPU: a GPU machine then takes minutes less for the first call.

Usage: sonic_compile.py [--like PYTHON_VERSION] [--part I/N] DIR

There: QUACK_CACHE_DIR=DIR. The cache holds for these very packages and Python's version, which --like gives where the
GPU machine's is another (3.12). Without a GPU, CUTE_DSL_ARCH=sm_90a and QUACK_ARCH=sm_90 are set.
"""

import argparse
import collections
import os
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("--like", help="for example 3.12")
parser.add_argument("--part", default="0/1", help="every N-th kernel from the I-th on: for several processes")
parser.add_argument("cache")
args = parser.parse_args()
os.environ.update(QUACK_CACHE_DIR=args.cache, CUTE_DSL_ARCH="sm_90a", QUACK_ARCH="sm_90")
if args.like:
    version = collections.namedtuple("version", "major minor micro releaselevel serial")
    like = version(*map(int, args.like.split(".")), 0, "final", 0)

import torch

import quack.cache_utils as cache
import quack.gemm_interface as quack
from quack.autotuner import Autotuner

if args.like:  # the fingerprint of the cache names it
    cache.sys = type("like", (), dict(version_info=like, modules=sys.modules))
cache.COMPILE_ONLY = True
part, parts = map(int, args.part.split("/"))
seen = 0


def compile_each(self, *given, **named):
    global seen
    self.nargs = dict(zip(self.arg_names, given))
    for config in self.prune_configs(named):
        seen += 1
        if seen % parts != part:
            continue
        began = time.time()
        for _ in range(2):  # the very first fails for want of a driver, which is looked for once
            try:
                self.fn(*given, **named, **config.all_kwargs())
                state = "compiled"
                break
            except Exception as error:  # the tuner leaves out what does not compile
                state = f"{type(error).__name__}: {error}"[:120].replace("\n", " ")
        print(f"{self.fn.__name__} {config}: {state}, {time.time() - began:.1f} s", flush=True)


Autotuner.__call__ = compile_each
for name in ("gemm_out", "gemm_gated_out", "gemm_dgated_out"):  # the functions behind the ops, which ask for a GPU
    setattr(quack, name, getattr(quack, name)._init_fn)

T, D, F, E, K = 512, 256, 256, 2, 2
mk = lambda *shape: torch.empty(*shape, dtype=torch.bfloat16)
index = lambda count: torch.zeros(count, dtype=torch.int32)
w1, w2 = mk(E, 2 * F, D).permute(1, 2, 0), mk(E, D, F).permute(1, 2, 0)
x, dy, h, a, rows = mk(T, D), mk(T, D), mk(T * K, 2 * F), mk(T * K, F), mk(T * K, D)
ends, token = index(E + 1), index(T * K)
kept = dict(cu_seqlens_m=ends, A_idx=token)

# as sonicmoe/functional/forward.py and backward.py call them
quack.gemm_gated(x, w1.permute(2, 1, 0), activation="swiglu", preact_out=h, postact_out=a, store_preact=True, **kept)
quack.gemm(a, w2.permute(2, 1, 0), out=rows, cu_seqlens_m=ends)
quack.gemm_dgated(
    dy, w2.permute(2, 0, 1), PreAct=h, activation="swiglu", dx_out=torch.empty_like(h), postact_out=a,
    colvec_scale=torch.zeros(T * K), colvec_reduce=True, dynamic_scheduler=False, **kept,
)  # fmt: skip
quack.gemm(h, w1.permute(2, 0, 1), cu_seqlens_m=ends, dynamic_scheduler=False, out=rows)
wgrad = dict(cu_seqlens_k=ends, A_idx=token, batch_idx_permute=None, dynamic_scheduler=False)
quack.gemm(x.T, h, out=torch.empty_like(w1).permute(2, 1, 0), **wgrad)
quack.gemm(dy.T, a, out=torch.empty_like(w2).permute(2, 0, 1), **wgrad)
