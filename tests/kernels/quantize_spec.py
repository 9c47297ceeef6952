"""NUMERICS sections 2 and 3 once more, in numpy and ml_dtypes, written from the text and apart from
the C code: element by element, with values rather than bit patterns. A development tool: golden.py
makes the golden vectors with it, and check_quantize.py compares files of `mixtape quantize`."""

import warnings

import ml_dtypes
import numpy as np

warnings.filterwarnings("ignore")  # overflow, division by zero and NaN are part of the matter
f32 = np.float32
FLT_MAX = np.finfo(f32).max

ELEMENTS = {
    "e4m3": (ml_dtypes.float8_e4m3fn, 448.0, 0x7F, 8),
    "e5m2": (ml_dtypes.float8_e5m2, 57344.0, 0x7F, 15),
    "e3m2": (ml_dtypes.float6_e3m2fn, 28.0, 0x1F, 4),
    "e2m3": (ml_dtypes.float6_e2m3fn, 7.5, 0x1F, 2),
    "e2m1": (ml_dtypes.float4_e2m1fn, 6.0, 0x07, 2),
}
# name: element, scale, block
FORMATS = {
    "fp8_tensor": ("e4m3", "f32", 0),
    "fp8_delayed": ("e4m3", "f32", 0),
    "fp8_block": ("e4m3", "f32", 128),
    "mxfp8": ("e4m3", "e8m0", 32),
    "mxfp6_e3m2": ("e3m2", "e8m0", 32),
    "mxfp6_e2m3": ("e2m3", "e8m0", 32),
    "mxfp4": ("e2m1", "e8m0", 32),
    "nvfp4": ("e2m1", "e4m3", 16),
}
PLAIN = {"f64": np.float64, "f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}


class Options:
    def __init__(self, fmt, text=""):
        self.e5m2 = self.two_d = self.sr = self.floor = self.dequantized = self.squares = False
        self.pow2 = fmt == "fp8_block"
        self.rht = None
        self.bound = None
        for word in filter(None, text.split("+")):
            name, _, value = word.partition("=")
            if name == "e5m2": self.e5m2 = True
            elif name == "e4m3": self.e5m2 = False
            elif name == "pow2": self.pow2 = value != "off"
            elif name == "2d": self.two_d = True
            elif name == "1d": self.two_d = False
            elif name == "sr": self.sr = value != "off"
            elif name == "rht": self.rht = int(value, 0) if value else 0xD7E8
            elif name == "4over6": self.bound = int(value or 256)
            elif name == "err": self.squares = value == "sq"
            elif name == "scale": self.floor = value == "floor"
            elif name == "source": self.dequantized = value == "dequantized"
            else: raise ValueError(word)


# ---- elements ------------------------------------------------------------------------------------

def positive_values(element):
    """Codes 0.. of an element's non-negative finite values, ascending."""
    dtype, largest, _, _ = ELEMENTS[element]
    count = {"e4m3": 127, "e5m2": 124, "e3m2": 32, "e2m3": 32, "e2m1": 8}[element]
    values = np.arange(count, dtype=np.uint8).view(dtype).astype(np.float64)
    assert values[-1] == largest and np.all(np.diff(values) > 0)
    return values


def decode(element, codes):
    return np.asarray(codes, np.uint8).view(ELEMENTS[element][0]).astype(f32)


def sign_bit(element):
    return {"e4m3": 7, "e5m2": 7, "e3m2": 5, "e2m3": 5, "e2m1": 3}[element]


def cast(element, y):
    """Nearest even, saturating; NaN to its code."""
    dtype, largest, nan_code, _ = ELEMENTS[element]
    y = np.asarray(y, f32)
    clipped = np.clip(np.where(np.isnan(y), f32(0), y), f32(-largest), f32(largest))
    codes = clipped.astype(dtype).view(np.uint8)
    return np.where(np.isnan(y), np.uint8(nan_code), codes)


def cast_stochastic(element, y, random):
    _, largest, nan_code, _ = ELEMENTS[element]
    grid = positive_values(element)
    y = np.asarray(y, f32)
    a = np.minimum(np.abs(np.where(np.isnan(y), f32(0), y)).astype(np.float64), largest)
    low = np.searchsorted(grid, a, side="right") - 1
    above = np.minimum(low + 1, len(grid) - 1)
    step = np.where(above > low, grid[above] - grid[low], 1.0)
    share = np.floor(65536.0 * (a - grid[low]) / step)
    code = low + (random.astype(np.float64) + share >= 65536.0)
    code = (code + (np.signbit(y) << np.int64(sign_bit(element)))).astype(np.uint8)
    return np.where(np.isnan(y), np.uint8(nan_code), code)


def to_bf16(x):
    return np.asarray(x, f32).astype(ml_dtypes.bfloat16).astype(f32)


# ---- random bits ---------------------------------------------------------------------------------

def philox(counter, key):
    c = [np.asarray(v, np.uint64) for v in counter]
    k = [np.uint64(v) for v in key]
    mask = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(p1 >> np.uint64(32)) ^ c[1] ^ k[0], p1 & mask, (p0 >> np.uint64(32)) ^ c[3] ^ k[1],
             p0 & mask]
        k = [(k[0] + np.uint64(0x9E3779B9)) & mask, (k[1] + np.uint64(0xBB67AE85)) & mask]
    return c


def random_bits(rows, cols, member, seed, stream, step, first_row=0):
    r, c = np.meshgrid(np.arange(rows, dtype=np.uint64) + np.uint64(first_row),
                       np.arange(cols, dtype=np.uint64), indexing="ij")
    ones = np.ones_like(r)
    words = philox((c >> np.uint64(3), r, ones * np.uint64(member), ones * np.uint64(step)),
                   (seed, stream))
    pick = (c >> np.uint64(1)) & np.uint64(3)
    word = np.select([pick == np.uint64(i) for i in range(4)], words)
    return np.where(c & np.uint64(1), word >> np.uint64(16), word & np.uint64(0xFFFF))


# ---- scales --------------------------------------------------------------------------------------

def block_amax(x):
    a = np.abs(x[~np.isnan(x)])
    return f32(a.max()) if a.size else f32(0)


def scale_f(amax, largest, pow2, overflow):
    if amax == 0 or np.isinf(amax) or np.isnan(amax):
        return f32(1)
    s = f32(largest) / f32(amax)
    if np.isinf(s):
        s = f32(overflow)
    if pow2:
        s = (np.array(s, f32).view(np.uint32) & np.uint32(0xFF800000)).view(f32)[()]
    return s


def scale_mx(amax, element, floor):
    largest, emax = ELEMENTS[element][1], ELEMENTS[element][3]
    if amax == 0:
        return 0
    if np.isinf(amax):
        return 0xFE
    if floor:
        return int(np.clip(int(np.frexp(np.float64(amax))[1]) - 1 - emax + 127, 0, 254))
    v = f32(amax) * f32(1.0 / largest)
    bits = int(np.array(v, f32).view(np.uint32))
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    if mantissa and exponent != 0xFE and not (exponent == 0 and mantissa <= 0x400000):
        exponent += 1
    return exponent


def pow2(e):
    return f32(np.ldexp(np.float64(1), e))


class NvLevel:
    def __init__(self, amax, bound):
        self.amax = f32(amax)
        largest = f32(6 * (bound or 448))
        s = min(largest / self.amax, FLT_MAX) if amax != 0 else f32(1)
        self.s_enc = f32(1) if s == 0 else f32(s)
        self.s_dec = f32(1) / self.s_enc
        self.g = self.s_enc * f32(1.0 / 6.0)

    def cell(self, wanted):
        """(code, float scale, multiplier of values, multiplier of codes)"""
        code = cast("e4m3", min(f32(wanted), FLT_MAX)).astype(np.uint8)[()]
        sf = decode("e4m3", [code])[0]
        dec = sf * self.s_dec
        enc = f32(min(f32(1) / dec, FLT_MAX))
        return int(code), sf, enc, dec


# ---- one member, one direction --------------------------------------------------------------------

def rotate(x, mask):
    """Each 16 tokens of a column times diag(s) H16 / 4, rounded to bf16; the rest only rounded."""
    h = np.array([[1.0]])
    for _ in range(4):
        h = np.block([[h, h], [h, -h]])
    signs = np.array([-1.0 if mask >> i & 1 else 1.0 for i in range(16)])
    c = (signs[:, None] * h * 0.25).astype(f32)
    out = to_bf16(x)
    for r in range(0, x.shape[0] // 16 * 16, 16):
        for j in range(16):
            acc = np.zeros(x.shape[1], f32)
            for i in range(16):
                acc = acc + x[r + i] * c[i, j]
            out[r + j] = to_bf16(acc)
    return out


class Direction:
    """codes: u8 in the source's orientation (plain: values); scales: as stored; dequantized f32."""


def block_shape(block, direction, two_d, shape):
    if block == 0:
        return max(shape[0], 1), max(shape[1], 1)
    if two_d:
        return block, block
    return (1, block) if direction == "row" else (block, 1)


def four_over_six(level, amax, x, u, o, element):
    """The better of two cells for one block."""
    base = amax / f32(6) * level.s_enc
    best = None
    for wanted in (base, f32(1.5) * base):
        cell = level.cell(min(wanted, f32(448)))
        y = x * cell[2]
        codes = cast_stochastic(element, y, u) if o.sr else cast(element, y)
        value = decode(element, codes) * cell[1] * level.amax / f32(6 * o.bound)
        e = np.abs(value - x)
        e = e * e if o.squares else e
        total = f32(0)
        if o.two_d:
            for line in e:
                part = f32(0)
                for v in line:
                    part = part + v
                total = total + part
        else:
            for v in e.ravel():
                total = total + v
        if best is None or total < best[0]:
            best = (total, cell)
    return best[1]


def quantize_member(x, fmt, o, direction, u, overflow, amax=None, delayed_scale=1.0):
    """x: f32 [M, K] as this direction sees it."""
    m, k = x.shape
    element, kind, block = FORMATS[fmt]
    if o.e5m2:
        element = "e5m2"
    largest = ELEMENTS[element][1]
    d = Direction()
    d.amax = block_amax(x) if amax is None else f32(amax)
    br, bc = block_shape(block, direction, o.two_d, x.shape)
    rows, cols = -(-m // br), -(-k // bc)
    d.codes = np.zeros((m, k), np.uint8)
    d.dequantized = np.zeros((m, k), f32)
    grid = np.zeros((rows, cols), f32 if kind == "f32" else np.uint8)
    level = NvLevel(d.amax, o.bound) if fmt == "nvfp4" else None
    if block == 0:  # one scale even for a member without elements
        s = scale_f(d.amax, largest, o.pow2, FLT_MAX) if fmt == "fp8_tensor" else f32(delayed_scale)
        grid = np.array([[f32(1) / s]], f32)
    for i in range(rows):
        for j in range(cols):
            at = np.s_[i * br:(i + 1) * br, j * bc:(j + 1) * bc]
            b, ub = x[at], u[at]
            most = block_amax(b)
            if block == 0:
                enc, dec = s, grid[0, 0]
            elif kind == "f32":
                enc = scale_f(most, largest, o.pow2, overflow)
                dec = grid[i, j] = f32(1) / enc
            elif kind == "e8m0":
                e = scale_mx(most, element, o.floor)
                grid[i, j] = e
                enc, dec = pow2(127 - e), pow2(e - 127)
            else:
                if o.bound:
                    cell = four_over_six(level, most, b, ub, o, element)
                else:
                    cell = level.cell(most * level.g)
                grid[i, j], _, enc, dec = cell
            y = b * enc
            d.codes[at] = cast_stochastic(element, y, ub) if o.sr else cast(element, y)
            d.dequantized[at] = decode(element, d.codes[at]) * dec
    d.scales = stored_scales(grid, fmt, o, direction, m, k, br, bc)
    d.stored = stored_codes(d.codes, fmt, direction)
    return d


def stored_scales(grid, fmt, o, direction, m, k, br, bc):
    """Section 3's shape of a member's scales."""
    _, kind, block = FORMATS[fmt]
    if block == 0:
        return grid.reshape(-1)
    if fmt == "fp8_block":
        if o.two_d:
            return (grid if direction == "row" else grid.T).reshape(-1)
        return (grid.T if direction == "row" else grid).reshape(-1)  # [blocks, lines]
    if o.two_d:  # 1-D shapes, values repeated
        grid = np.repeat(grid, br, 0)[:m] if direction == "row" else np.repeat(grid, bc, 1)[:, :k]
    if direction == "row" or fmt != "nvfp4":
        return grid.reshape(-1)  # [M, blocks]; mx column [blocks, K]
    return grid.T.reshape(-1)  # nvfp4 column [K, blocks]


def stored_codes(codes, fmt, direction):
    if direction == "col" and FORMATS[fmt][1] != "e8m0":
        codes = codes.T
    if FORMATS[fmt][0] != "e2m1":
        return codes.reshape(-1)
    if codes.shape[1] % 2:
        codes = np.pad(codes, ((0, 0), (0, 1)))
    return (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8).reshape(-1)


def swizzle(scales, lines, blocks, line_stride, block_stride):
    out = np.zeros(-(-lines // 128) * -(-blocks // 4) * 512, np.uint8)
    for i in range(lines):
        for b in range(blocks):
            at = (i // 128 * -(-blocks // 4) + b // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + b % 4
            out[at] = scales[i * line_stride + b * block_stride]
    return out


# ---- a group --------------------------------------------------------------------------------------

LARGEST = {"f32": FLT_MAX, "bf16": f32(3.3895313892515355e38), "f16": f32(65504.0)}


def quantize_group(members, fmt, options, direction, input_type, seed=0, stream=0, step=0,
                   swizzled=False, first_member=0):
    """members: list of f32 [M, K]. Returns codes, scales, amax, dequantized as `mixtape quantize`
    stores them; plain formats have codes of their own type."""
    codes, scales, amaxes, values = [], [], [], []
    for index, x in enumerate(members):
        if fmt in PLAIN:
            stored = x.astype(PLAIN[fmt])
            if stored.dtype.itemsize == 2:
                stored = np.where(np.isnan(x), np.uint16(0x7FFF), stored.view(np.uint16)).view(
                    stored.dtype)
            codes.append(stored.reshape(-1))
            values.append(stored.astype(f32).reshape(-1))
            amaxes.append(block_amax(x))
            continue
        o = Options(fmt, options)
        u = random_bits(*x.shape, first_member + index, seed, stream, step) if x.size else \
            np.zeros(x.shape, np.uint64)
        overflow = LARGEST[input_type]
        if direction == "col" and o.dequantized:
            x = quantize_member(x, fmt, o, "row", u, overflow).dequantized
            overflow = FLT_MAX
        if direction == "col" and o.rht is not None:
            x = rotate(x, o.rht)
        d = quantize_member(x, fmt, o, direction, u, overflow)
        if swizzled:
            m, k = x.shape
            lines, length = (m, k) if direction == "row" else (k, m)
            blocks = -(-length // FORMATS[fmt][2])
            block_major = direction == "col" and fmt != "nvfp4"
            strides = (1, lines) if block_major else (blocks, 1)
            d.scales = swizzle(d.scales, lines, blocks, *strides)
        codes.append(d.stored)
        scales.append(d.scales)
        amaxes.append(d.amax)
        values.append(d.dequantized.reshape(-1))
    join = lambda parts, empty: np.concatenate(parts) if parts else empty
    return (join(codes, np.zeros(0, np.uint8)), join(scales, None) if scales else None,
            np.array(amaxes, f32), join(values, np.zeros(0, f32)))
