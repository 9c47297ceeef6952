#!/usr/bin/env python3
"""Ratios of mixtape's rates to its peers', from the lines that run.sh has gathered.

Usage: ratios.py FILE.jsonl...    one file a round: mixtape's lines (no "peer"), then those of the peers

A ratio is taken within a round; the median over the rounds is printed with the least and the largest, and for each
family, case and peer the geometric mean over the shapes. Times of cases joined by '+' that mixtape does not have as one
(dgrad+wgrad_bf16) are added up. '*': the peer quantizes within its time, mixtape's GEMM does not. Peers write weight gradients
in bf16, and are held against mixtape's in bf16.
"""

import collections
import json
import math
import statistics
import sys

KEY = ("family", "shape", "case", "recipe")


def read(path):
    ours, peers = {}, []
    for line in open(path):
        line = json.loads(line)
        if "error" in line:
            words = (line.get("peer", "mixtape"), line.get("shape", ""), line.get("case", ""), line["error"])
            print("  not measured: {} {} {}: {}".format(*words)[:200])
        elif "peer" in line:
            peers.append(line)
        elif line["family"] != "machine":
            ours[tuple(line[k] for k in KEY)] = line
        else:
            print("{device} {kernel_set}, {revision}: copy {copy_gbs:.0f} GB/s, dense {dense_tflops:.4g} TFLOP/s".format(**line))
    return ours, peers


def joined(ours, peer):
    """Milliseconds of ours for what the peer did, None where there are none, and our line (of its last part)."""
    whole = ours.get(tuple(peer[k] for k in KEY))
    if whole:
        return whole["ms"], whole
    parts = [ours.get((peer["family"], peer["shape"], part, peer["recipe"])) for part in peer["case"].split("+")]
    return (sum(p["ms"] for p in parts), parts[-1]) if all(parts) else (None, None)


def amount(line):
    return line["rate"] * line["ms"]


def collect(paths):
    """For each (peer, case): our rates, the peer's rates, their ratios, over the rounds."""
    found = collections.defaultdict(lambda: ([], [], [], {}))
    for path in paths:
        ours, peers = read(path)
        for peer in peers:
            ms, line = joined(ours, peer)
            if ms is None:
                continue
            work = amount(line) * (peer["case"].count("+") + 1 if line["case"] != peer["case"] else 1)
            mine, theirs, ratios, notes = found[(peer["peer"],) + tuple(peer[k] for k in KEY)]
            mine.append(work / ms), theirs.append(peer["rate"]), ratios.append(work / ms / peer["rate"])
            notes.update(peer)
    return found


def main(paths):
    found, means = collect(paths), collections.defaultdict(list)
    print(f"{'family':8} {'shape':16} {'case':16} {'recipe':10} {'peer':18} {'ours':>10} {'peer':>10} {'ratio':>6}  least..largest")
    for key in sorted(found, key=lambda k: k[1:] + k[:1]):
        mine, theirs, ratios, notes = found[key]
        peer, family, shape, case, recipe = key
        mark, middle = "*" if notes.get("quantizes") else " ", statistics.median(ratios)
        rates = f"{statistics.median(mine):10.5g} {statistics.median(theirs):10.5g} {middle:6.3f}{mark}"
        print(f"{family:8} {shape:16} {case:16} {recipe:10} {peer:18} {rates} {min(ratios):.3f}..{max(ratios):.3f} {notes['unit']}")
        means[(family, case, recipe, peer)].append(middle)
    print("\ngeometric means over shapes")
    for (family, case, recipe, peer), ratios in sorted(means.items()):
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        print(f"{family:8} {case:16} {recipe:10} {peer:18} {mean:.3f}  (least {min(ratios):.3f}, {len(ratios)} shapes)")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    main(sys.argv[1:])
