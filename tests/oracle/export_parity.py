#!/usr/bin/env python3
"""A model trained here, exported, and run by transformers: the same logits, losses and gradients.

Usage: export_parity.py [CKPT|RUN]. Without one a small model is trained for 30 steps first. Both
definitions of the balancing loss are compared, in f32 and f64; limits as in hf_parity.py.
"""

import argparse
import pathlib
import sys
import tempfile

import torch

import hf_parity
import models
import program
import reference

CONFIG = """
model: {vocab_size: 256, hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4,
        num_key_value_heads: 2, head_dim: 16, moe_intermediate_size: 48, num_experts: 8,
        num_experts_per_tok: 2}
data: {train: CORPUS, sequence_length: 64}
train: {steps: 30, batch_size: 4}
optim: {lr: 3e-3, warmup_steps: 5}
"""


def text_of(folder, length):
    sources = sorted(program.ROOT.glob("core/*.c"))
    return b"".join(p.read_bytes() for p in sources)[:length]


def train(folder):
    (folder / "text").write_bytes(text_of(folder, 200000))
    program.run("data", "pack", folder / "text", "-o", folder / "corpus.h5")
    (folder / "run.yaml").write_text(CONFIG.replace("CORPUS", str(folder / "corpus.h5")))
    program.run("train", folder / "run.yaml", "--run", folder / "run")
    return folder / "run"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", nargs="?")
    given = parser.parse_args().checkpoint
    bad = hf_parity.Failures()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        checkpoint = given or train(folder)
        program.run("export", checkpoint, folder / "hf")
        text = torch.tensor(list(text_of(folder, 2 * 65))).reshape(2, 65)
        tokens, targets = text[:, :-1], text[:, 1:].clone()
        targets[0, :3] = -100
        program.write_batch(folder / "batch.h5", tokens, targets)
        print(f"{'aux_loss':8} {'dtype':5} {'logits':>9} {'losses':>9} {'gradients':>9}  worst")
        for aux in ("hf", "switch"):
            for dtype, (torch_dtype, *_) in hf_parity.LIMITS.items():
                program.run("trace", checkpoint, "--tokens", folder / "batch.h5", "-o",
                            folder / "out.h5", "--targets", "--grads", "--dtype", dtype, "--set",
                            f"model.aux_loss={aux}")
                model = models.load(folder / "hf", torch_dtype)
                want = reference.evaluate(model, tokens, targets, switch=aux == "switch")
                got = program.read_tree(folder / "out.h5")
                logits, losses, worst, where = hf_parity.compare(got, want, dtype, bad)
                print(f"{aux:8} {dtype:5} {logits:9.2e} {losses:9.2e} {worst:9.2e}  {where}",
                      flush=True)
    for line in bad:
        print(f"FAILED {line}")
    print(f"{len(bad)} failed" if bad else "all equal")
    return len(bad) > 0


if __name__ == "__main__":
    sys.exit(main())
