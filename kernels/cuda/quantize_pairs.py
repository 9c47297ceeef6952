#!/usr/bin/env python3
"""Prints the tables of quantize_pairs.cuh: the f16 factors under which every bf16 element becomes
the E2M1 code of its product with enc. They depend on the mantissas of the member's amax and of the
scale alone, so that each is tried with all elements that they can meet. Doubles hold every
product."""
import numpy as np

MORE = sorted(range(-7, 8), key=lambda d: (abs(d), d))  # eighths of an element's last bit
REACH = 8  # of factors around enc, in their last bits


def code(a):
    """E2M1, ties to even."""
    steps = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True),
             (5.0, False))
    return sum((a >= t if up else a > t).astype(int) for t, up in steps)


def elements(enc):
    """Elements whose codes are not plainly 0, in units of their last bit, and its exponent."""
    last = int(np.floor(np.log2(0.2 / enc))) - 7
    m, e = np.meshgrid(np.arange(128, 256.0), np.arange(last - 2, last + 8))
    m, e = m.ravel(), e.ravel()
    a = (np.ldexp(m, e.astype(int)).astype(np.float32) * np.float32(enc)).astype(float)
    keep = (a > 0.05) & (a < 10)  # less than subnormal scales bring
    return m[keep], e[keep].astype(int), code(a[keep])


def f16(v):
    """Its last bits, counted from 0."""
    e = int(np.floor(np.log2(v)))
    return int(np.rint(v * 2.0 ** (10 - e))) + 1024 * e


def value(bits):
    return (1024 + bits % 1024) * 2.0 ** (bits // 1024 - 1 - 10)


def rounded(s):
    """A sum to f16, about 2048 and 4096."""
    last = np.where(s < 2048, 1, np.where(s < 4096, 2, 4))
    return np.rint(s / last) * last


def above(s):
    """Of a rounded sum about 4096, the code that its bits are."""
    return np.where(s < 4096, s / 2 - 2048, s / 4 - 1024) + 6


def factors(enc, more):
    """By how much the first line's factor and the second one's are above 2 enc, and the first one's
    other factor above its first; None: there are none."""
    m, e, want = elements(enc)
    x = np.ldexp(8 * m + more, e - 3)
    low = f16(2 * enc)
    product = {o: x * value(low + o) for o in range(-REACH, REACH + 1)}
    near = sorted(product, key=lambda o: (abs(o), o))
    ones = {o: rounded(p + 2042) for o, p in product.items()}
    second = [o for o in near if (lambda q: np.all(np.where(want < 4, q >= want, q == want)))(
        np.minimum(above(rounded(product[o] + 4088)), 7))]
    for gap in range(4):
        for o in near if second else []:
            if o + gap > REACH:
                continue
            q = above(rounded(ones[o] + ones[o + gap]))
            if np.all(np.where(want < 4, q == want, q >= want)):
                return o, second[0], gap
    return None


def entry(mantissa):
    f = np.float32
    s_enc = f(2688) / f((128 + mantissa) / 128)
    s_dec = f(1) / s_enc
    encs = [float(f(1) / (f(sf) * s_dec)) for sf in range(8, 16)]
    for more in MORE:
        found = [factors(enc, more) for enc in encs]
        if None in found:
            continue
        least = min(min(a, b) for a, b, _ in found)
        if max(max(a, b) for a, b, _ in found) - least > 7:
            continue
        ways = [a - least | b - least << 3 | gap << 6 for a, b, gap in found]
        return sum(w << 8 * i for i, w in enumerate(ways)), more + 8 << 4 | least + 8
    return 0, 0


def main():
    entries = [entry(m) for m in range(128)]
    for i in range(0, 128, 4):
        print("    " + " ".join(f"0x{w:016x}," for w, _ in entries[i:i + 4]))
    print()
    for i in range(0, 128, 16):
        print("    " + " ".join(f"0x{b:02x}," for _, b in entries[i:i + 16]))


main()
