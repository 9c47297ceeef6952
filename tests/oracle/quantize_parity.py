#!/usr/bin/env python3
"""`mixtape quantize` against numerics.py, bit for bit: every format with every meaningful set of
options, both directions, the four group modes, ragged sizes, special values, the three input types,
both scale layouts, capacity tails. Only a NaN's payload is free.
"""

import itertools
import os
import pathlib
import sys
import tempfile

import h5py
import ml_dtypes
import numpy as np

import numerics
import program

SIZES = [0, 1, 7, 16, 33, 127, 128, 129]
TYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}


# ---- what is asked -----------------------------------------------------------------------------


def every_spec():
    """Texts of all formats with all sets of options that go together."""
    column = ["", "2d", "rht", "rht=0x1B2D", "source=dequantized", "rht+source=dequantized"]
    nv = ["", "4over6", "4over6=448", "4over6+err=sq", "4over6=448+err=sq"]
    axes = {
        "fp8_tensor": [["", "e5m2"], ["", "pow2"], ["", "sr"], ["", "rht", "rht=0x1B2D"]],
        "fp8_delayed": [["", "e5m2"], ["", "sr"]],
        "fp8_block": [["", "e5m2"], ["", "pow2=off"], ["", "sr"], column],
        "mxfp8": [["", "e5m2"], ["", "scale=floor"], ["", "sr"], column],
        "mxfp6_e3m2": [["", "scale=floor"], ["", "sr"], column],
        "mxfp6_e2m3": [["", "scale=floor"], ["", "sr"], column],
        "mxfp4": [["", "scale=floor"], ["", "sr"], column],
        "nvfp4": [nv, ["", "sr"], column],
        "f64": [], "f32": [], "bf16": [], "f16": [],
    }
    for name, options in axes.items():
        for chosen in itertools.product(*options):
            words = "+".join(filter(None, chosen))
            yield f"{name}:{words}" if words else name


def every_refusal():
    """Texts without a meaning."""
    yield from ["fp8", "mxfp4:", "mxfp4:sr+sr", "nvfp4:e5m2", "mxfp8:pow2", "fp8_tensor:2d", "nvfp4:scale=floor",
                "nvfp4:err=sq", "mxfp8:4over6", "fp8_delayed:rht", "fp8_tensor:source=dequantized",
                "fp8_delayed:source=dequantized", "nvfp4:4over6=400", "mxfp8:scale=down", "nvfp4:rht=1x"]
    for name in ["fp8_block", "mxfp8", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "nvfp4"]:
        yield from [f"{name}:2d+rht", f"{name}:2d+source=dequantized"]
    for name in ["f64", "f32", "bf16", "f16"]:
        for option in ["e5m2", "pow2", "2d", "sr", "rht", "4over6", "scale=up", "source=original"]:
            yield f"{name}:{option}"


# ---- inputs ------------------------------------------------------------------------------------


def member_values(rng, m, k, kind):
    """Values that reach a corner of the formats each."""
    x = rng.standard_normal((m, k)).astype(np.float32)
    spread = np.ldexp(x, rng.integers(-20, 20, (m, k)))
    if kind == 1:
        return spread
    if kind == 2:  # single special values among others
        odd = np.array([np.nan, -np.nan, np.inf, -np.inf, 0, -0.0, 1e-45, -1e-45, 1e-39, 3e38, -3e38],
                       np.float32)
        return np.where(rng.random((m, k)) < 0.02, odd[rng.integers(0, len(odd), (m, k))], spread)
    if kind == 3:  # subnormal amaxes
        return np.ldexp(x, rng.integers(-149, -118, (m, k)))
    if kind == 4:  # near the end of the range
        return np.clip(np.ldexp(x, rng.integers(100, 127, (m, k))), -3.4e38, 3.4e38).astype(np.float32)
    if kind == 5:  # ties: few bits, powers of two as amax
        return np.ldexp(rng.integers(-31, 32, (m, k)).astype(np.float32), rng.integers(-3, 2, (m, k)))
    if kind == 6:  # NaN, zeros of both signs, few values
        few = np.array([np.nan, 0, 0, -0.0, -0.0, 1, -6], np.float32)
        return few[rng.integers(0, 7, (m, k))]
    if kind == 7:  # large and small blocks in one member
        return np.ldexp(x, rng.integers(-60, 60, (m, 1)) + rng.integers(-60, 60, (1, k)))
    if kind == 8:
        return np.full((m, k), np.nan, np.float32)
    return x


KINDS = 9


class Case:
    """A group in one of the four modes with its values, in a file."""

    def __init__(self, path, dtype, mode, rows, cols, seed, tail=0, arguments=()):
        rng = np.random.default_rng(seed)
        n = len(rows)
        self.path, self.dtype, self.mode = path, dtype, mode
        self.rows = list(rows) if mode in ("first", "both") else [rows[0]] * n
        self.cols = list(cols) if mode in ("last", "both") else [cols[0]] * n
        with np.errstate(over="ignore", invalid="ignore"):
            self.x = [member_values(rng, m, k, (i + seed) % KINDS).astype(TYPES[dtype])
                      for i, (m, k) in enumerate(zip(self.rows, self.cols))]
        flat = np.concatenate([x.ravel() for x in self.x])
        shape = {"uniform": (n * self.rows[0], self.cols[0]),
                 "first": (sum(self.rows) + tail, self.cols[0]),
                 "last": (self.rows[0], sum(self.cols) + tail),
                 "both": (1, len(flat) + tail)}[mode]
        buffer = np.full(shape, np.nan, TYPES[dtype]).ravel()
        buffer[: len(flat)] = flat
        with h5py.File(path, "w") as f:
            stored = buffer.view(np.uint16) if dtype == "bf16" else buffer
            f["x"] = stored.reshape(shape)
            if dtype == "bf16":
                f["x"].attrs["dtype"] = "bf16"
        self.arguments = {
            "uniform": ["--members", n],
            "first": ["--first-dims", ",".join(map(str, self.rows))],
            "last": ["--last-dims", ",".join(map(str, self.cols))],
            "both": ["--first-dims", ",".join(map(str, self.rows)),
                     "--last-dims", ",".join(map(str, self.cols))],
        }[mode] + list(arguments)


# ---- comparison --------------------------------------------------------------------------------


def same(got, want):
    """Equal bits; where both are a float's NaN any payload."""
    want = np.asarray(want)
    if got.dtype != want.dtype or got.shape != want.shape:
        return f"{got.dtype}{list(got.shape)}, not {want.dtype}{list(want.shape)}"
    bits = f"u{got.dtype.itemsize}"
    bad = got.view(bits) != want.view(bits)
    if got.dtype.kind == "f":
        bad &= ~(np.isnan(got) & np.isnan(want))
    if not bad.any():
        return None
    i = int(np.argmax(bad))
    return f"{int(bad.sum())} of {bad.size} differ, first at {i}: {got[i]!r}, not {want[i]!r}"


def expected(case, text, directions, swizzled, random):
    """The datasets of the file, by name."""
    n = len(case.x)
    sizes = [m * k for m, k in zip(case.rows, case.cols)]
    f32 = [x.astype(np.float32) for x in case.x]
    want = {
        "group/first_dims": np.array(case.rows, np.int64),
        "group/last_dims": np.array(case.cols, np.int64),
        "group/offsets": np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        "group/nan": np.array([np.isnan(x).sum() for x in f32], np.int64),
    }
    largest = np.float32(ml_dtypes.finfo(TYPES[case.dtype]).max)
    plain = text in ("f64", "f32", "bf16", "f16")
    for side in directions:
        parts = []
        for i, x in enumerate(f32):
            if plain:
                parts.append(numerics.plain_member(text, x))
                continue
            parts.append(numerics.quantize_member(
                text, x, side == "col", largest, swizzled,
                lambda i=i, x=x: numerics.draws(*x.shape, i, *random)))
        want[f"{side}/codes"] = np.concatenate([p.codes for p in parts])
        want[f"{side}/amax"] = np.array([p.amax for p in parts], np.float32)
        want[f"{side}/dequantized"] = np.concatenate([p.values.ravel() for p in parts])
        if not plain:
            want[f"{side}/scales"] = np.concatenate([p.scales for p in parts])
        assert len(parts) == n
    return want


def check(case, text, direction, swizzled, random, out):
    options = ["--format", text, *case.arguments]
    if direction != "default":
        options += ["--direction", direction]
    if swizzled:
        options.append("--swizzled")
    if any(random):
        options += ["--seed", random[0], "--stream", random[1], "--step", random[2]]
    program.run("quantize", case.path, "-o", out, *options)
    got = program.read_tree(out)
    sides = ["row", "col"] if direction in ("both", "default") else [direction]
    want = expected(case, text, sides, swizzled, random)
    problems = [f"{name}: {problem}" for name in sorted(want.keys() & got.keys())
                if (problem := same(got[name], want[name]))]
    problems += [f"{name}: {'missing' if name in want else 'not expected'}"
                 for name in sorted(want.keys() ^ got.keys())]
    for problem in problems:
        print(f"  {text} {case.dtype} {case.mode} {direction}{' swizzled' if swizzled else ''}: {problem}")
    return not problems


def refused(case, text, out):
    try:
        program.run("quantize", case.path, "-o", out, "--format", text)
    except RuntimeError as error:
        return "exit 2" in str(error) and not os.path.exists(out)
    return False


def make_cases(directory):
    """The cases that every format is run on."""
    grid = [(m, k) for m in SIZES for k in SIZES]
    rows, cols = [m for m, _ in grid], [k for _, k in grid]
    few = [5, 0, 129, 16, 1, 33, 127, 7, 128]
    flat = {
        "both f32": Case(directory / "a.h5", "f32", "both", rows, cols, 0, tail=11),
        "first bf16": Case(directory / "b.h5", "bf16", "first", few, [129] * 9, 1, tail=3),
        "last f16": Case(directory / "c.h5", "f16", "last", [33] * 9, few, 2, tail=2),
        "uniform f32": Case(directory / "d.h5", "f32", "uniform", [40] * 9, [49] * 9, 3),
        "both bf16": Case(directory / "e.h5", "bf16", "both", rows[::3], cols[::3], 4),
        "last f32": Case(directory / "f.h5", "f32", "last", [17] * 9, few, 5),
        "first f16": Case(directory / "g.h5", "f16", "first", few, [31] * 9, 6),
        "uniform bf16": Case(directory / "h.h5", "bf16", "uniform", [129] * 9, [128] * 9, 7),
        "first f32": Case(directory / "i.h5", "f32", "first", few, [160] * 9, 8, tail=1),
        "empty": Case(directory / "j.h5", "f32", "first", [0, 0], [64] * 2, 0),
        "no columns": Case(directory / "k.h5", "f32", "uniform", [5] * 3, [0] * 3, 0),
        "300 members": Case(directory / "l.h5", "f32", "first", [i % 19 for i in range(300)],
                            [33] * 300, 1),
    }
    return flat


def main():
    good = total = 0
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        cases = list(make_cases(directory).values())
        out = directory / "out.h5"
        # Every text on the grid of sizes; and on others in turn, so that each format meets each.
        for i, text in enumerate(every_spec()):
            swizzles = numerics.FORMATS.get(text.partition(":")[0])
            swizzles = swizzles is not None and swizzles.kind in ("mx", "nv")
            runs = [(cases[0], "both", False, (7, 1, 2))]
            for j in range(3):
                case = cases[1 + (3 * i + j) % (len(cases) - 1)]
                direction = ["default", "row", "col"][(i + j) % 3]
                random = [(0, 0, 0), (4294967295, 9, 4000000000), (3, 4294967295, 1)][j]
                runs.append((case, direction, swizzles and (i + j) % 2 == 0, random))
            for run in runs:
                total += 1
                good += check(run[0], text, *run[1:], out)
        out.unlink()
        for text in every_refusal():
            total += 1
            if refused(cases[3], text, out):
                good += 1
            else:
                print(f"  {text}: not refused")
    print(f"{good} of {total} agree")
    return good != total


if __name__ == "__main__":
    sys.exit(main())
