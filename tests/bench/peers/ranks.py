#!/usr/bin/env python3
"""The table of ranks.sh: tokens a second and GPU, efficiency, exposed communication, bytes moved.

Usage: ranks.py LINES.jsonl
Efficiency is against one GPU of the same program and recipe (ours: a recorded step).
"""

import json
import sys


def read(path):
    rows = []
    for line in open(path):
        if not line.startswith("{"):
            continue
        row = json.loads(line)
        if row.get("bench") == "ranks":
            rows.append(row | dict(who="mixtape " + row["recipe"]))
        elif row.get("world"):
            figures = dict(ranks=row["world"], tokens_s_rank=row["rate"], peak_gb=row.get("memory_gb", 0))
            rows.append(dict(who="FSDP2", kind=row["peer"]) | figures)
    return rows


rows = read(sys.argv[1])
alone = {}
for row in rows:
    if row["ranks"] == 1:
        alone.setdefault(row["who"], row["tokens_s_rank"])
print(f"{'':16} {'':12} GPUs  tokens/s a GPU  efficiency  exposed ms  gathered MB  reduced MB  peak GB")
for row in sorted(rows, key=lambda r: (r["who"], r["kind"], r["ranks"])):
    share = row["tokens_s_rank"] / alone[row["who"]] if row["who"] in alone else float("nan")
    print(f"{row['who']:16} {row['kind']:12} {row['ranks']:4}  {row['tokens_s_rank']:14.0f}  {share:10.3f}"
          f"  {row.get('exposed_ms', float('nan')):10.2f}  {row.get('gathered_mb', float('nan')):11.1f}"
          f"  {row.get('reduced_mb', float('nan')):10.1f}  {row['peak_gb']:7.1f}")  # fmt: skip
