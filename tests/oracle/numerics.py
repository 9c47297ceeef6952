"""The number formats in numpy, a member [M, K] at a time, as they are defined: nothing is shared with
the C code. Elements are cast by ml_dtypes; every arithmetic operation is one f32 operation of numpy.
"""

import dataclasses

import ml_dtypes
import numpy as np

F32_MAX = np.finfo(np.float32).max
TYPES = {
    "e4m3": (ml_dtypes.float8_e4m3fn, 0x80, 8),
    "e5m2": (ml_dtypes.float8_e5m2, 0x80, 15),
    "e3m2": (ml_dtypes.float6_e3m2fn, 0x20, 4),
    "e2m3": (ml_dtypes.float6_e2m3fn, 0x20, 2),
    "e2m1": (ml_dtypes.float4_e2m1fn, 0x08, 2),
}


def f32(x):
    return np.asarray(x, dtype=np.float32)


class Element:
    """An element type: cast with saturation, stochastic cast, decode."""

    def __init__(self, name):
        self.name = name
        self.dtype, self.sign, self.emax = TYPES[name]
        self.max = f32(ml_dtypes.finfo(self.dtype).max)
        codes = np.arange(self.sign, dtype=np.uint8)
        values = codes.view(self.dtype).astype(np.float32)
        self.grid = values[np.isfinite(values)]  # non-negative, ascending; the index is the code
        assert self.grid[-1] == self.max and np.all(np.diff(self.grid) > 0)
        self.nan = 0x7F if self.name in ("e4m3", "e5m2") else len(self.grid) - 1

    def cast(self, x):
        clipped = np.clip(x, -self.max, self.max)
        code = clipped.astype(self.dtype).view(np.uint8)
        return np.where(np.isnan(x), np.uint8(self.nan), code)

    def cast_sr(self, x, u16):
        a = np.minimum(np.abs(np.where(np.isnan(x), f32(0), x)), self.max)
        low = np.searchsorted(self.grid, a, side="right") - 1
        grid = self.grid.astype(np.float64)
        step = np.append(np.diff(grid), 1.0)[low]
        part = np.floor(65536.0 * (a.astype(np.float64) - grid[low]) / step).astype(np.int64)
        code = low + (u16 + part >= 65536)
        code = np.where(np.signbit(x), code | self.sign, code)
        return np.where(np.isnan(x), self.nan, code).astype(np.uint8)

    def decode(self, code):
        return code.astype(np.uint8).view(self.dtype).astype(np.float32)


ELEMENTS = {name: Element(name) for name in TYPES}
E4M3 = ELEMENTS["e4m3"]


@dataclasses.dataclass
class Format:
    """A format's facts: element type, block along a line (0: whole member), kind of scale."""

    name: str
    element: str
    kind: str  # "tensor", "block", "mx", "nv"
    block: int
    pack: int = 1
    transposed: bool = True
    pow2: bool = False
    delayed: bool = False


FORMATS = {f.name: f for f in [
    Format("fp8_tensor", "e4m3", "tensor", 0),
    Format("fp8_delayed", "e4m3", "tensor", 0, delayed=True),
    Format("fp8_block", "e4m3", "block", 128, pow2=True),
    Format("mxfp8", "e4m3", "mx", 32, transposed=False),
    Format("mxfp6_e3m2", "e3m2", "mx", 32, transposed=False),
    Format("mxfp6_e2m3", "e2m3", "mx", 32, transposed=False),
    Format("mxfp4", "e2m1", "mx", 32, pack=2, transposed=False),
    Format("nvfp4", "e2m1", "nv", 16, pack=2),
]}


@dataclasses.dataclass
class Spec:
    """FMT[:OPT+OPT...]"""

    format: object
    element: Element
    pow2: bool
    two_d: bool = False
    sr: bool = False
    mask: object = None  # of rht; None: no rht
    bound: int = 0       # of 4over6; 0: off
    square: bool = False
    floor: bool = False
    dequantized: bool = False


def parse(text):
    name, _, options = text.partition(":")
    fmt = FORMATS[name]
    spec = Spec(fmt, ELEMENTS[fmt.element], fmt.pow2)
    for option in filter(None, options.split("+")):
        key, _, value = option.partition("=")
        if key == "e5m2":
            spec.element = ELEMENTS["e5m2"]
        elif key == "pow2":
            spec.pow2 = value != "off"
        elif key == "2d":
            spec.two_d = True
        elif key == "sr":
            spec.sr = True
        elif key == "rht":
            spec.mask = int(value, 0) if value else 0xD7E8
        elif key == "4over6":
            spec.bound = int(value) if value else 256
        elif key == "err":
            spec.square = value == "sq"
        elif key == "scale":
            spec.floor = value == "floor"
        elif key == "source":
            spec.dequantized = value == "dequantized"
        else:
            raise ValueError(option)
    return spec


# ---- randomness --------------------------------------------------------------------------------


def philox(counter, key):
    """Philox4x32-10 of four u32 arrays and two u32 numbers."""
    c = [np.asarray(x, dtype=np.uint64) for x in counter]
    k = [int(x) for x in key]
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(b >> np.uint64(32)) ^ c[1] ^ np.uint64(k[0]), b & low,
             (a >> np.uint64(32)) ^ c[3] ^ np.uint64(k[1]), a & low]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def draws(m, k, member, seed, stream, step):
    """The 16 random bits of each element of a member [m, k]."""
    r, c = np.indices((m, k))
    words = philox((c >> 3, r, np.full_like(r, member), np.full_like(r, step)), (seed, stream))
    word = np.choose((c >> 1) & 3, words).astype(np.int64)
    return np.where(c % 2 == 0, word & 0xFFFF, word >> 16)


# ---- blocks ------------------------------------------------------------------------------------


def to_blocks(x, shape, fill=0):
    """[M, K] as [ceil(M/a), ceil(K/b), a, b] with the missing elements filled in."""
    a, b = shape
    m, k = x.shape
    rows, cols = -(-m // a), -(-k // b)
    padded = np.full((rows * a, cols * b), fill, dtype=x.dtype)
    padded[:m, :k] = x
    return padded.reshape(rows, a, cols, b).transpose(0, 2, 1, 3)


def from_blocks(x, m, k):
    rows, cols, a, b = x.shape
    return x.transpose(0, 2, 1, 3).reshape(rows * a, cols * b)[:m, :k]


def amax_of(x, axis=None):
    return f32(np.max(np.where(np.isnan(x), f32(0), np.abs(x)), axis=axis, initial=0))


def spread(scales):
    """Block scales [rows, cols] against blocks [rows, cols, a, b]."""
    return scales[:, :, None, None]


# ---- scales ------------------------------------------------------------------------------------


def f32_scale(amax, largest, pow2, overflow):
    """The function F: encoding scales of amaxes."""
    usable = (amax != 0) & np.isfinite(amax)
    a = np.where(usable, amax, f32(1))
    s = f32(largest / a)
    s = np.where(np.isinf(s), f32(overflow), s)
    if pow2:
        s = (s.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
    return np.where(usable, s, f32(1))


def e8m0(amax, element, floor):
    if floor:
        finite = np.where((amax == 0) | np.isinf(amax), f32(1), amax).astype(np.float64)
        e = np.clip(np.frexp(finite)[1] - 1 - element.emax + 127, 0, 254)
    else:
        bits = f32(amax * f32(1 / np.float64(element.max))).view(np.uint32).astype(np.int64)
        e, mantissa = bits >> 23 & 0xFF, bits & 0x7FFFFF
        stays = (mantissa == 0) | (e == 0xFE) | ((e == 0) & (mantissa <= 0x400000))
        e = np.where(stays, e, e + 1)
    e = np.where(amax == 0, 0, e)
    return np.where(np.isinf(amax), 0xFE, e).astype(np.int64)


def exp2(e):
    return f32(np.ldexp(np.float64(1), e))


def nv_encode_scale(spec, amax):
    """S_enc of a member."""
    if amax == 0:
        return f32(1)
    s = f32(min(f32(f32(6 * (spec.bound or 448)) / amax), F32_MAX))
    return f32(1) if s == 0 else s


# ---- a direction of a member -------------------------------------------------------------------


@dataclasses.dataclass
class Direction:
    codes: np.ndarray      # as stored: u8, flat
    scales: np.ndarray     # as stored
    amax: np.float32
    values: np.ndarray     # f32 [M, K]


def rotate(x, mask):
    """Random Hadamard transform along the rows; the last M mod 16 are only rounded to bf16."""
    x = x.copy()
    m = x.shape[0] // 16 * 16
    blocks = x[:m].reshape(m // 16, 16, x.shape[1])
    out = np.empty_like(blocks)
    for j in range(16):
        acc = np.zeros_like(blocks[:, 0])
        for i in range(16):
            negative = (mask >> i & 1) ^ (bin(i & j).count("1") & 1)
            acc = f32(acc + f32(blocks[:, i] * f32(-0.25 if negative else 0.25)))
        out[:, j] = acc
    x[:m] = out.reshape(m, x.shape[1])
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def encode(spec, scaled, u16):
    return spec.element.cast_sr(scaled, u16) if spec.sr else spec.element.cast(scaled)


def nv_candidate(spec, blocks, u16, sf, s_dec):
    value = E4M3.decode(sf)
    enc = np.minimum(f32(f32(1) / f32(value * s_dec)), F32_MAX)
    return encode(spec, f32(blocks * spread(enc)), u16)


def nv_error(spec, blocks, code, sf, amax):
    """Sequential f32 sums of a block's errors: along each of its rows, then of the rows' sums; a 1-D
    block is one line."""
    rows, cols, a, b = blocks.shape
    q = f32(spec.element.decode(code) * spread(E4M3.decode(sf)))
    error = f32(f32(f32(q * amax) / f32(6 * spec.bound)) - blocks)
    error = f32(error * error) if spec.square else np.abs(error)
    lines = error if a == b else error.reshape(rows, cols, 1, a * b)
    total = np.zeros((rows, cols), np.float32)
    for i in range(lines.shape[2]):
        line = np.zeros((rows, cols), np.float32)
        for j in range(lines.shape[3]):
            line = f32(line + lines[:, :, i, j])
        total = f32(total + line)
    return total


def nv_quantize(spec, blocks, block_amax, u16, amax):
    s_enc = nv_encode_scale(spec, amax)
    s_dec = f32(f32(1) / s_enc)
    if not spec.bound:
        g = f32(s_enc * f32(1 / 6))
        sf = E4M3.cast(np.minimum(f32(block_amax * g), F32_MAX))
        code = nv_candidate(spec, blocks, u16, sf, s_dec)
    else:
        base = f32(f32(block_amax / f32(6)) * s_enc)
        sf = E4M3.cast(np.minimum(base, f32(448)))
        sf4 = E4M3.cast(np.minimum(f32(f32(1.5) * base), f32(448)))
        code = nv_candidate(spec, blocks, u16, sf, s_dec)
        code4 = nv_candidate(spec, blocks, u16, sf4, s_dec)
        better = (nv_error(spec, blocks, code4, sf4, amax) < nv_error(spec, blocks, code, sf, amax))
        sf = np.where(better, sf4, sf)
        code = np.where(spread(better), code4, code)
    values = f32(spec.element.decode(code) * spread(f32(E4M3.decode(sf) * s_dec)))
    return code, sf, values


def swizzle(scales):
    """Scales [lines, blocks] in tiles of 128 x 4."""
    lines, blocks = scales.shape
    tiles = -(-blocks // 4)
    out = np.zeros(-(-lines // 128) * tiles * 512, np.uint8)
    i, b = np.indices(scales.shape)
    tile = i // 128 * tiles + b // 4
    out[tile * 512 + i % 32 * 16 + i % 128 // 32 * 4 + b % 4] = scales
    return out


def pack(codes):
    """Two codes a byte, even index low."""
    even, odd = codes[:, 0::2], np.zeros_like(codes[:, 0::2])
    odd[:, : codes.shape[1] // 2] = codes[:, 1::2]
    return even | odd << 4


def stored_scales(spec, scales, column, m, k, swizzled):
    """Block scales, one per block, in the shape they are stored in."""
    fmt = spec.format
    if spec.two_d and fmt.kind != "block":  # repeated: one per line of the direction
        scales = np.repeat(scales, fmt.block, axis=1 if column else 0)
        scales = scales[:, :k] if column else scales[:m]
    lines = scales.T if column else scales  # [lines, blocks along them]
    if swizzled:
        return swizzle(lines)
    if fmt.kind == "block" and not spec.two_d:
        return lines.T.ravel()  # [blocks, lines] in both directions
    if fmt.kind == "mx" and column:
        return lines.T.ravel()  # [ceil(M/32), K]
    return lines.ravel()


def quantize(spec, x, column, u16, overflow, swizzled):
    """x: f32 [M, K], rotated already if it is to be."""
    fmt, element = spec.format, spec.element
    m, k = x.shape
    amax = amax_of(x)
    if fmt.kind == "tensor":
        s = f32(1) if fmt.delayed else f32(f32_scale(f32([amax]), element.max, spec.pow2, F32_MAX)[0])
        inverse = f32(f32(1) / s)
        code = encode(spec, f32(x * s), u16)
        values, scales = f32(element.decode(code) * inverse), f32([inverse])
    else:
        n = fmt.block
        shape = (n, n) if spec.two_d else (n, 1) if column else (1, n)
        blocks = to_blocks(x, shape)
        bits = None if u16 is None else to_blocks(u16, shape)
        block_amax = amax_of(blocks, axis=(2, 3))
        if fmt.kind == "block":
            s = f32_scale(block_amax, element.max, spec.pow2, overflow)
            inverse = f32(f32(1) / s)
            code = encode(spec, f32(blocks * spread(s)), bits)
            values, scales = f32(element.decode(code) * spread(inverse)), inverse
        elif fmt.kind == "mx":
            e = e8m0(block_amax, element, spec.floor)
            code = encode(spec, f32(blocks * spread(exp2(127 - e))), bits)
            values, scales = f32(element.decode(code) * spread(exp2(e - 127))), e.astype(np.uint8)
        else:
            code, scales, values = nv_quantize(spec, blocks, block_amax, bits, amax)
        code, values = from_blocks(code, m, k), from_blocks(values, m, k)
        scales = stored_scales(spec, scales, column, m, k, swizzled)
    stored = code.T if column and fmt.transposed else code
    if fmt.pack == 2:
        stored = pack(stored)
    return Direction(np.ascontiguousarray(stored).ravel(), scales, amax, values)


def quantize_member(text, x, column, overflow, swizzled, draw):
    """A direction of a member. x f32; overflow: the largest finite number of the source's type; draw:
    a function that gives the random bits of the member's elements."""
    spec = parse(text)
    with np.errstate(all="ignore"):
        u16 = draw() if spec.sr else None
        if column and spec.dequantized:
            x = quantize(spec, x, False, u16, overflow, False).values
            overflow = F32_MAX
        if column and spec.mask is not None:
            x = rotate(x, spec.mask)
        return quantize(spec, x, column, u16, overflow, swizzled)


def plain_member(name, x):
    """A member in a plain format."""
    with np.errstate(all="ignore"):
        if name in ("bf16", "f16"):
            narrow = x.astype(ml_dtypes.bfloat16 if name == "bf16" else np.float16)
            codes = np.where(np.isnan(x), np.uint16(0x7FFF), narrow.view(np.uint16))
            values = narrow.astype(np.float32)
        else:
            codes = x.astype(np.float64 if name == "f64" else np.float32)
            values = x
        return Direction(codes.ravel(), None, amax_of(x), values)
