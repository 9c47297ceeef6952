#!/usr/bin/env python3
"""Models made by transformers, imported, traced and exported: everything must be equal.

For every case: save_pretrained -> `mixtape import` -> `mixtape trace` in f32 and f64 against
transformers in f32 and (lifted) f64; then `mixtape export`, whose tensors must be the same bytes.

Limits: logits 1e-4 absolute in f32 and 1e-10 in f64; losses 1e-5 and 1e-12 relative; every gradient
tensor 1e-4 and 1e-10 in relative Frobenius norm.
"""

import argparse
import dataclasses
import pathlib
import sys
import tempfile

import numpy as np
import torch

import models
import program
import reference

LIMITS = {  # logits (absolute), losses (relative), gradients (relative Frobenius)
    "f32": (torch.float32, 1e-4, 1e-5, 1e-4),
    "f64": (torch.float64, 1e-10, 1e-12, 1e-10),
}
GAP = 1e-5  # of routing probabilities: 100 times f32 rounding


class Failures(list):
    def check(self, ok, what):
        if not ok:
            self.append(what)


def frobenius(got, want):
    norm = np.linalg.norm(want)
    difference = np.linalg.norm(got.astype(np.float64) - want.astype(np.float64))
    return difference / norm if norm > 0 else (0.0 if difference == 0 else np.inf)


def compare(got, want, dtype, bad):
    """Checks a trace against the reference; returns worst logit, loss and gradient error."""
    _, logit_limit, loss_limit, grad_limit = LIMITS[dtype]
    bad.check(set(got) == set(want), f"{dtype}: datasets differ: {sorted(set(got) ^ set(want))[:4]}")
    expected = np.float64 if dtype == "f64" else np.float32
    worst, where = 0.0, ""
    for name in sorted(set(got) & set(want)):
        g, w = got[name], want[name]
        bad.check(g.dtype == expected, f"{dtype} {name}: written as {g.dtype}")
        bad.check(g.shape == w.shape, f"{dtype} {name}: shape {g.shape}, not {w.shape}")
        if g.shape != w.shape or not name.startswith("grads/"):
            continue
        error = frobenius(g, w)
        bad.check(error <= grad_limit, f"{dtype} {name}: relative error {error:.3g}")
        if not error <= worst:
            worst, where = error, name[6:]
    logits = np.abs(got["logits"].astype(np.float64) - want["logits"]).max()
    bad.check(logits <= logit_limit, f"{dtype} logits: error {logits:.3g}")
    losses = 0.0
    for name in ("loss", "aux_loss", "total_loss"):
        error = abs(float(got[name]) - float(want[name])) / abs(float(want[name]))
        bad.check(error <= loss_limit, f"{dtype} {name}: relative error {error:.3g}")
        losses = max(losses, error)
    return logits, losses, worst, where


def same_bytes(left, right, bad):
    a, b = program.read_safetensors(left), program.read_safetensors(right)
    bad.check(set(a) == set(b), f"export: tensors differ: {sorted(set(a) ^ set(b))[:4]}")
    for name in set(a) & set(b):
        bad.check(a[name] == b[name], f"export: {name} has other dtype, shape or bytes")


def make_batch(case, seed, vocab):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab, case.batch, generator=generator)
    targets = torch.randint(0, vocab, case.batch, generator=generator)
    targets[0, 1] = -100
    targets[-1, -1] = -100
    return tokens, targets


def make_decisive(case):
    """A model and a batch whose routing does not hang on rounding."""
    for seed in range(20):
        model = models.make(case, seed)
        tokens, targets = make_batch(case, seed, case.config["vocab_size"])
        exact = model.to(torch.float64).eval()
        exact.config._attn_implementation = "eager"
        exact.config._experts_implementation = "eager"
        if reference.decisive(exact, tokens) > GAP:
            return models.make(case, seed), tokens, targets
    raise RuntimeError(f"{case.name}: no seed routes decisively")


def check(case, folder, bad):
    model, tokens, targets = make_decisive(case)
    hf, ckpt, back = folder / "hf", folder / "ckpt", folder / "back"
    batch, out = folder / "batch.h5", folder / "trace.h5"
    model.save_pretrained(hf, max_shard_size=case.shard)
    program.run("import", hf, "-o", ckpt)
    program.write_batch(batch, tokens, targets)
    results = {}
    for dtype, (torch_dtype, *_) in LIMITS.items():
        program.run("trace", ckpt, "--tokens", batch, "-o", out, "--targets", "--grads", "--dtype",
                    dtype)
        want = reference.evaluate(models.load(hf, torch_dtype), tokens, targets)
        results[dtype] = compare(program.read_tree(out), want, dtype, bad)
    program.run("export", ckpt, back)
    same_bytes(hf, back, bad)
    reloaded = models.load(back, torch.float32)
    with torch.no_grad():
        a = reloaded(input_ids=tokens).logits
        b = models.load(hf, torch.float32)(input_ids=tokens).logits
    bad.check(torch.equal(a, b), "export: transformers reads another model")
    return results


def prepare(case, folder):
    model, tokens, targets = make_decisive(case)
    model.save_pretrained(folder / "hf")
    program.run("import", folder / "hf", "-o", folder / "ckpt")
    return tokens, targets


def trace(folder, *options):
    program.run("trace", folder / "ckpt", "--tokens", folder / "batch.h5", "-o",
                folder / "trace.h5", *options)
    return program.read_tree(folder / "trace.h5")


def check_shift(folder, bad):
    """Without targets, position s predicts token s + 1, as transformers shifts its labels."""
    tokens, _ = prepare(models.CASES[0], folder)
    program.write_batch(folder / "batch.h5", tokens)
    want = models.load(folder / "hf", torch.float32)(input_ids=tokens, labels=tokens).loss.item()
    got = float(trace(folder, "--targets")["loss"])
    print(f"shifted labels: loss {got:.6f}, transformers {want:.6f}")
    bad.check(abs(got - want) <= 1e-5 * want, f"shifted labels: loss {got}, not {want}")


def check_activations(folder, bad):
    """Every activation that is the output of a module there: five of a layer, three around them."""
    tokens, _ = prepare(models.CASES[0], folder)
    program.write_batch(folder / "batch.h5", tokens)
    got = trace(folder, "--activations", "*", "--dtype", "f64")
    model, seen = models.load(folder / "hf", torch.float64), {}

    def keep(name):
        def hook(module, args, output):
            seen[name] = output[0] if isinstance(output, tuple) else output
        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(keep(name))
    with torch.no_grad(), reference.lifted(model):
        model(input_ids=tokens)
    worst, compared = 0.0, 0
    for name in got:
        module = name.removeprefix("activations/")
        if module in seen and name != module:
            worst = max(worst, frobenius(got[name], seen[module].numpy()))
            compared += 1
    print(f"activations: {compared} compared in f64, worst relative error {worst:.2e}")
    bad.check(compared == 5 * model.config.num_hidden_layers + 3, f"{compared} activations")
    bad.check(worst <= LIMITS["f64"][3], f"activations: relative error {worst:.3g}")


def check_bf16(folder, bad):
    """In bf16 no two programs round alike: ours must be as near to f64 as twice transformers' own
    bf16. Every expert is chosen, so that no rounding changes a route."""
    case = next(c for c in models.CASES if c.name == "qwen all experts chosen")
    tokens, targets = prepare(dataclasses.replace(case, storage="bfloat16"), folder)
    program.write_batch(folder / "batch.h5", tokens, targets)
    exact = reference.evaluate(models.load(folder / "hf", torch.float64), tokens, targets)
    got = trace(folder, "--targets", "--grads", "--dtype", "bf16")
    theirs = models.load(folder / "hf", torch.bfloat16)
    peer = reference.evaluate(theirs, tokens, targets)
    for kind in ("logits", "grads/"):
        names = [n for n in exact if n.startswith(kind)]
        ours = max(frobenius(got[n], exact[n]) for n in names)
        other = max(frobenius(peer[n], exact[n]) for n in names)
        print(f"bf16 {kind:6}: worst relative error {ours:.2e}, transformers {other:.2e}")
        bad.check(ours <= 2 * other, f"bf16 {kind}: {ours:.3g}, transformers {other:.3g}")


def report(bad):
    for line in bad:
        print(f"  FAILED {line}")
    return bool(bad)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", help="only cases whose name holds this")
    chosen = parser.parse_args().case
    failed = 0
    print(f"{'case':26} {'dtype':5} {'logits':>9} {'losses':>9} {'gradients':>9}  worst gradient")
    for case in models.CASES:
        if chosen and chosen not in case.name:
            continue
        bad = Failures()
        with tempfile.TemporaryDirectory() as folder:
            for dtype, (logits, losses, worst, where) in check(case, pathlib.Path(folder), bad).items():
                print(f"{case.name:26} {dtype:5} {logits:9.2e} {losses:9.2e} {worst:9.2e}  {where}",
                      flush=True)
        failed += report(bad)
    for extra in () if chosen else (check_shift, check_activations, check_bf16):
        bad = Failures()
        with tempfile.TemporaryDirectory() as folder:
            extra(pathlib.Path(folder), bad)
        failed += report(bad)
    print(f"{failed} cases failed" if failed else "all equal")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
