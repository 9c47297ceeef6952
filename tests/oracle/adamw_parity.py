#!/usr/bin/env python3
"""Twenty AdamW steps in PyTorch and in `mixtape trace --steps 20`: the losses must agree.

Same weights, same batches, constant learning rate, clipping, decoupled decay on matrices, experts,
router and lm_head, none on norms and embeddings (a tied matrix counts as an embedding). The experts
of a layer are one tensor in both, so that those without tokens decay and keep their moments moving.

Limits: losses 1e-4 relative in f32; 1e-9 in f64, with transformers lifted to f64.
"""

import pathlib
import sys
import tempfile

import torch

import models
import program
import reference

STEPS = 20
LIMITS = {"f32": (torch.float32, 1e-4), "f64": (torch.float64, 1e-9)}
OPTIM = dict(lr=3e-3, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8, grad_clip=1.0)

CASES = [
    models.Case("qwen", "qwen3_moe", models.qwen(), batch=(4, 24)),
    models.Case("qwen tied", "qwen3_moe", models.qwen(tie_word_embeddings=True), batch=(4, 24)),
    models.Case("qwen idle experts", "qwen3_moe", models.qwen(num_experts=60), batch=(1, 12)),
    models.Case("qwen dense layers", "qwen3_moe",
                models.qwen(num_hidden_layers=3, mlp_only_layers=[1]), batch=(4, 24)),
    models.Case("olmoe", "olmoe", models.olmoe(), batch=(4, 24)),
    models.Case("mixtral bf16", "mixtral", models.mixtral(), batch=(4, 24), storage="bfloat16"),
]


def make_batches(case, seed):
    """Windows of one random text, so that there is something to learn. Some targets are ignored."""
    generator = torch.Generator().manual_seed(seed)
    b, s = case.batch
    text = torch.randint(0, case.config["vocab_size"], (200,), generator=generator)
    first = torch.randint(0, 200 - s - 1, (STEPS, b), generator=generator)
    windows = text[first[..., None] + torch.arange(s + 1)]
    targets = windows[..., 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.1] = -100
    return windows[..., :-1].clone(), targets


def decays(name, p):
    return p.ndim > 1 and not name.endswith("embed_tokens.weight")


def train(model, tokens, targets):
    named = list(model.named_parameters())
    groups = [{"params": [p for n, p in named if decays(n, p)],
               "weight_decay": OPTIM["weight_decay"]},
              {"params": [p for n, p in named if not decays(n, p)], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=OPTIM["lr"], betas=(OPTIM["beta1"], OPTIM["beta2"]),
                                  eps=OPTIM["eps"])
    losses, norms = [], []
    for x, y in zip(tokens, targets):
        optimizer.zero_grad(set_to_none=True)
        with reference.lifted(model):
            _, loss, total = reference.forward(model, x, y)
            total.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIM["grad_clip"])
        losses.append(loss.item())
        norms.append(norm.item())
        optimizer.step()
    return losses, norms


def idle(model, tokens):
    """Experts of the first batch without a token."""
    with torch.no_grad():
        logits = model(input_ids=tokens, output_router_logits=True).router_logits
    k = model.config.num_experts_per_tok
    return sum(l.shape[-1] - len(l.topk(k).indices.unique()) for l in logits if l is not None)


def main():
    failed = 0
    sets = [x for k, v in OPTIM.items() for x in ("--set", f"optim.{k}={v}")]
    print(f"{'case':20} {'dtype':5} {'first':>8} {'last':>8} {'losses':>9} {'norms':>9}  idle experts")
    for case in CASES:
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            tokens, targets = make_batches(case, 1)
            models.make(case, 1).save_pretrained(folder / "hf")
            program.run("import", folder / "hf", "-o", folder / "ckpt")
            program.write_batch(folder / "batches.h5", tokens, targets)
            for dtype, (torch_dtype, limit) in LIMITS.items():
                model = models.load(folder / "hf", torch_dtype)
                without = idle(model, tokens[0])
                losses, norms = train(model, tokens, targets)
                program.run("trace", folder / "ckpt", "--tokens", folder / "batches.h5", "-o",
                            folder / "out.h5", "--steps", STEPS, "--targets", "--dtype", dtype, *sets)
                got = program.read_tree(folder / "out.h5")
                worst = max(abs(a - b) / abs(b) for a, b in zip(got["losses"], losses, strict=True))
                norm = max(abs(a - b) / b for a, b in zip(got["grad_norms"], norms, strict=True))
                print(f"{case.name:20} {dtype:5} {losses[0]:8.4f} {losses[-1]:8.4f} {worst:9.2e} "
                      f"{norm:9.2e}  {without}", flush=True)
                if not worst <= limit:
                    failed += 1
                    print(f"  FAILED {dtype} losses: relative error {worst:.3g}, at most {limit:g}")
    print(f"{failed} failed" if failed else "all equal")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
