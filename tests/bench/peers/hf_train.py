#!/usr/bin/env python3
"""Training steps of an OLMoE-size model in transformers' OlmoeForCausalLM with PyTorch's fused AdamW.

Usage: hf_train.py [--mode eager|compiled]... [--clip NORM] [SHAPE...]  bf16 parameters, gradients and moments
       torchrun --nproc-per-node 1 hf_train.py [...]                 FSDP2: f32 parameters, moments and reduction
The first stands beside mixtape's step with bf16+i16 masters and bf16 moments, the second beside f32/f32. mixtape's step
measures the gradients' norm and clips to 1; here only --clip does (transformers' Trainer has --clip 1).
"""

import argparse
import os
import statistics

import torch
import torch.distributed as dist
from transformers import OlmoeConfig, OlmoeForCausalLM

from protocol import DEVICE, GPU, clock, report, run, selected

SIZES = {  # D, layers, heads, experts, top_k, F, V, S, B: those of train/bench_step.c
    "olmoe4": (2048, 4, 16, 64, 8, 1024, 50304, 2048, 4),
    "olmoe": (2048, 16, 16, 64, 8, 1024, 50304, 2048, 4),
    "nano": (16, 2, 2, 4, 2, 16, 61, 8, 2),
}
SHARDED = "RANK" in os.environ
STEPS, WARM_UPS = (12, 5) if GPU else (2, 1)


def build(size):
    d, layers, heads, experts, top_k, f, v, s, _ = size
    config = OlmoeConfig(
        vocab_size=v, hidden_size=d, intermediate_size=f, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, num_experts=experts, num_experts_per_tok=top_k, max_position_embeddings=s,
        output_router_logits=True, use_cache=False,
    )  # fmt: skip
    options = dict(attn_implementation="sdpa", experts_implementation="grouped_mm")
    with torch.device(DEVICE):
        model = OlmoeForCausalLM._from_config(config, dtype=torch.float32 if SHARDED else torch.bfloat16, **options)
    if SHARDED:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    return model.train()


def bench(name, mode):
    v, s, b = SIZES[name][6:]
    model = build(SIZES[name])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if mode == "compiled":
        for layer in model.model.layers:
            layer.compile()
    tokens = torch.randint(0, v, (b, s), device=DEVICE)
    times = []
    for step in range(WARM_UPS + STEPS):
        begin, end = clock(), clock()
        begin.record()
        model(input_ids=tokens, labels=tokens).loss.backward()
        if args.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        end.record()
        if GPU:
            torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    if SHARDED and dist.get_rank():
        return
    case, world = ("f32/f32", dist.get_world_size()) if SHARDED else ("bf16+i16/bf16", 1)
    notes = dict(world=world, clip=args.clip, parameters=sum(p.numel() for p in model.parameters()))
    if GPU:
        notes["memory_gb"] = torch.cuda.max_memory_allocated() * 1e-9
    report("hf_" + mode, "step", name, case, statistics.median(times[WARM_UPS:]), b * s, "tok/s", **notes)


parser = argparse.ArgumentParser()
parser.add_argument("--mode", action="append", choices=["eager", "compiled"])
parser.add_argument("--clip", type=float, default=0.0)
parser.add_argument("shape", nargs="*")
args = parser.parse_args()
if SHARDED:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
torch.manual_seed(0)
names = selected(SIZES, args.shape or ["olmoe4"])
cases = [(n, m) for n in names for m in args.mode or ["eager", "compiled"]]
run("hf_train", [(f"{n} {m}", lambda n=n, m=m: bench(n, m)) for n, m in cases])
if SHARDED:
    dist.destroy_process_group()
