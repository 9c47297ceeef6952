#!/usr/bin/env python3
"""Writes golden_quantize.h: golden vectors of NUMERICS sections 2 and 3 from quantize_spec.py (numpy and
ml_dtypes), an implementation apart from the C code. Run from anywhere:  golden_quantize.py

The inputs of whole-tensor cases come from `draw`, which test_quantize.c has too."""

import os

import ml_dtypes
import numpy as np

import quantize_spec as spec

f32 = np.float32
HERE = os.path.dirname(os.path.abspath(__file__))


def bits(x):
    return int(np.array(x, f32).view(np.uint32))


def from_bits(u):
    return np.array(u, np.uint32).view(f32)[()]


# ---- inputs of whole-tensor cases ------------------------------------------------------------------

def mix(index):
    z = (index + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def draw(count, seed, special):
    """f32 bit patterns: 24 binades around 1; with `special`, one in 32 is odd."""
    u = mix(np.arange(count, dtype=np.uint64) + np.uint64(seed << 32))
    sign = (u & np.uint64(1)) << np.uint64(31)
    exponent = (np.uint64(111) + (u >> np.uint64(8)) % np.uint64(24)) << np.uint64(23)
    value = (sign | exponent | u >> np.uint64(41)).astype(np.uint32)
    if special:
        kind = (u >> np.uint64(1) & np.uint64(127)).astype(np.int64)
        odd = np.array([0x7FC00000, 0x7F800000, 0, 0x00000123], np.uint32)
        value = np.where(kind < 4, odd[np.minimum(kind, 3)] | sign.astype(np.uint32), value)
    return value


def fnv(data):
    h = 0xCBF29CE484222325
    for byte in data:
        h = (h ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return h


def hash_of(a):
    if a is None:
        return hash_of(np.zeros(0, np.uint8))
    a = np.ascontiguousarray(a)
    if a.dtype == f32:
        a = np.where(np.isnan(a), np.uint32(0x7FC00000), a.view(np.uint32))
    h = fnv(a.tobytes())
    return h >> 32 ^ h & 0xFFFFFFFF


# ---- tables ----------------------------------------------------------------------------------------

def decode_tables(out):
    for name, size in (("e4m3", 256), ("e5m2", 256), ("e3m2", 64), ("e2m3", 64), ("e2m1", 16)):
        values = spec.decode(name, np.arange(size))
        words = [0x7FC00000 if np.isnan(v) else bits(v) for v in values]
        array(out, f"uint32_t golden_decode_{name}[{size}]", words, "0x%08x")


def array(out, head, words, form, per_line=8):
    out.append(f"static const {head} = {{")
    for i in range(0, len(words), per_line):
        out.append("    " + ",".join(form % w for w in words[i:i + per_line]) + ",")
    out.append("};")


def cast_tables(out):
    """For every positive value v: codes of v - ulp, v, v + ulp, tie - ulp, tie, tie + ulp, where the tie
    is halfway to the next value (past the last: to where it would be) and ulp is f32's."""
    for name in ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1"):
        grid = spec.positive_values(name)
        above = np.append(grid[1:], 2 * grid[-1] - grid[-2])
        codes = []
        for v, tie in zip(grid, (grid + above) / 2):
            assert float(f32(tie)) == tie
            for center in (bits(v), bits(tie)):
                points = np.array([max(center, 1) - 1, center, center + 1], np.uint32).view(f32)
                codes += spec.cast(name, points).tolist()
        array(out, f"uint8_t golden_cast_{name}[{len(codes)}]", codes, "%d", 24)


def e8m0_tables(out):
    """For every exponent e, amaxes a = 2^(e - 127) and max 2^(e - 127), each less an ulp, exact, plus an ulp
    (no further than FLT_MAX): the scale rounded up, then that of scale=floor."""
    for name in ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1"):
        codes = []
        for e in range(255):
            for factor in (1.0, spec.ELEMENTS[name][1]):
                center = bits(f32(min(factor * 2.0 ** (e - 127), float(spec.FLT_MAX))))
                for u in (max(center, 1) - 1, center, min(center + 1, 0x7F7FFFFF)):
                    codes += [spec.scale_mx(from_bits(u), name, False), spec.scale_mx(from_bits(u), name, True)]
        if name in ("e4m3", "e2m1"):
            array(out, f"uint8_t golden_e8m0_{name}[{len(codes)}]", codes, "%d", 24)
        else:
            array(out, f"uint32_t golden_e8m0_{name}[1]", [hash_of(np.array(codes, np.uint8))], "0x%08xu")


def scale_tables(out):
    amaxes = [0, 1, 0x00400000, 0x007FFFFF, 0x00800000, 0x01000000, 0x02000001, 0x3F800000, 0x3FC12345, 0x43E00000,
              0x43DFFFFF, 0x7E800000, 0x7F7F0000, 0x7F7FFFFF, 0x7F800000]
    rows = []
    for u in amaxes:
        for largest in (448.0, 57344.0):
            for pow2 in (False, True):
                s = spec.scale_f(from_bits(u), largest, pow2, spec.FLT_MAX)
                rows.append((u, int(largest), int(pow2), bits(s), bits(f32(1) / s)))
    array(out, "struct golden_f golden_f[]", rows, "{ 0x%08x, %d, %d, 0x%08x, 0x%08x }", 2)
    rows = []
    for u in amaxes:
        for bound in (448, 256):
            level = spec.NvLevel(from_bits(u), bound)
            rows.append((u, bound, bits(level.s_enc), bits(level.s_dec)))
    array(out, "struct golden_nv golden_nv[]", rows, "{ 0x%08x, %d, 0x%08x, 0x%08x }", 3)


# ---- whole tensors ---------------------------------------------------------------------------------

SPECS = [
    "bf16", "f16", "f32", "f64",
    "fp8_tensor", "fp8_tensor:e5m2", "fp8_tensor:pow2", "fp8_tensor:sr", "fp8_tensor:rht",
    "fp8_tensor:e5m2+pow2+sr+rht=0x1234", "fp8_delayed", "fp8_delayed:e5m2+sr",
    "fp8_block", "fp8_block:pow2=off", "fp8_block:2d", "fp8_block:e5m2+2d+sr", "fp8_block:sr+rht",
    "fp8_block:source=dequantized", "fp8_block:pow2=off+source=dequantized",
    "mxfp8", "mxfp8:e5m2", "mxfp8:2d", "mxfp8:scale=floor", "mxfp8:sr", "mxfp8:rht",
    "mxfp8:source=dequantized", "mxfp8:e5m2+sr+rht+scale=floor+source=dequantized",
    "mxfp6_e3m2", "mxfp6_e3m2:2d+sr", "mxfp6_e3m2:rht+scale=floor",
    "mxfp6_e2m3", "mxfp6_e2m3:2d+scale=floor", "mxfp6_e2m3:sr+rht+source=dequantized",
    "mxfp4", "mxfp4:2d", "mxfp4:sr", "mxfp4:scale=floor+sr+2d", "mxfp4:rht+source=dequantized",
    "nvfp4", "nvfp4:2d", "nvfp4:sr", "nvfp4:rht", "nvfp4:rht=0", "nvfp4:sr+rht", "nvfp4:2d+sr",
    "nvfp4:4over6", "nvfp4:4over6=448", "nvfp4:4over6+err=sq", "nvfp4:2d+4over6", "nvfp4:2d+4over6=448+err=sq",
    "nvfp4:sr+rht+4over6", "nvfp4:2d+sr+4over6+err=sq", "nvfp4:source=dequantized",
    "nvfp4:sr+rht+4over6+source=dequantized",
]
# mode: rows and columns of the members; the modes of test_quantize.c
GROUPS = [
    ([33, 33, 33], [50, 50, 50]),
    ([0, 1, 7, 16, 33, 129], [97] * 6),
    ([20] * 6, [0, 1, 7, 16, 33, 130]),
    ([1, 130, 0, 17], [259, 5, 7, 48]),
]
TYPES = ["f32", "bf16", "f16"]


def load(words, kind):
    if kind == "f32":
        return words.view(f32)
    if kind == "bf16":
        return (words >> np.uint32(16)).astype(np.uint16).view(ml_dtypes.bfloat16).astype(f32)
    return (words >> np.uint32(16)).astype(np.uint16).view(np.float16).astype(f32)


def tensor_cases(out):
    """Each spec on the four groups; which type, odd values and scale layout, see there and in the test."""
    words, rows = [], []
    for i, text in enumerate(SPECS):
        fmt, _, options = text.partition(":")
        for mode, (m, k) in enumerate(GROUPS):
            kind, special = TYPES[(i + mode) % 3], (i + mode) % 2 == 1
            swizzled = spec.FORMATS.get(fmt, ("", ""))[1] in ("e8m0", "e4m3") and mode % 2 == 1
            x = load(draw(sum(a * b for a, b in zip(m, k)), 100 + i, special), kind)
            ends = np.cumsum([a * b for a, b in zip(m, k)])
            members = [x[e - a * b:e].reshape(a, b) for e, a, b in zip(ends, m, k)]
            for side in ("row", "col"):
                codes, scales, amax, values = spec.quantize_group(
                    members, fmt, options, side, kind, seed=1 + i, stream=2, step=3, swizzled=swizzled)
                rows += [hash_of(codes.view(np.uint8)),
                         hash_of(scales.view(np.uint8) if scales is not None else None),
                         hash_of(amax), hash_of(values)]
    array(out, f"char *const golden_specs[{len(SPECS)}]", SPECS, '"%s"', 4)
    array(out, f"uint32_t golden_tensors[{len(rows)}]", rows, "0x%08xu")


def main():
    out = ["/* Made by golden_quantize.py; do not edit. */", "#pragma once", "", "#include \"core/dtype.h\"", "",
           "struct golden_f { uint32_t amax; int max, pow2; uint32_t scale, inverse; };",
           "struct golden_nv { uint32_t amax; int bound; uint32_t encode, decode; };",
           "/* golden_tensors: [spec][group][row, col][codes, scales, amax, dequantized values], each FNV-1a 64",
           " * of the bytes, both halves xored; NaN counts as 0x7fc00000. */", ""]
    decode_tables(out)
    cast_tables(out)
    e8m0_tables(out)
    scale_tables(out)
    tensor_cases(out)
    path = os.path.join(HERE, "golden_quantize.h")
    with open(path, "w") as f:
        f.write("\n".join(out) + "\n")
    print(path, os.path.getsize(path), "bytes")


main()
