#!/bin/sh
# Weak scaling of a training step over the GPUs of this host, beside torch FSDP2 with the same model,
# tokens a GPU and dtype of the reduction; and the table that follows.
#
# Usage: ranks.sh [-n "1 2 4"] [-s SIZE] [-r RECIPE]... [-t SECONDS] [-o DIR]
#   -n  numbers of GPUs (1 2 4)
#   -s  a size of bench_ranks and of hf_train.py (olmoe4: four blocks of OLMoE-1B-7B's size)
#   -r  recipes of ours; any number (none, which is bf16, and mxfp8)
#   -t  how long one program may take (120)
#   -o  where the lines of JSON and what else was said go (build/ranks)
# BENCH is bench_ranks (build/release/tests/bench/bench_ranks), PYTHON the Python that has torch.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
counts='1 2 4' size=olmoe4 recipes='' limit=120 out=build/ranks
while getopts n:s:r:t:o: option; do
    case $option in
    n) counts=$OPTARG ;;
    s) size=$OPTARG ;;
    r) recipes="$recipes $OPTARG" ;;
    t) limit=$OPTARG ;;
    o) out=$OPTARG ;;
    *) sed -n '2,11s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
    esac
done
: "${BENCH:=build/release/tests/bench/bench_ranks}" "${PYTHON:=python3}"
[ -x "$BENCH" ] || { echo "ranks.sh: no program $BENCH (make $BENCH)" >&2; exit 2; }
mkdir -p "$out"
: > "$out/ranks.jsonl"
for n in $counts; do
    # shellcheck disable=SC2086
    timeout "$limit" "$BENCH" --ranks "$n" "$size" 12 ${recipes:-none mxfp8} >> "$out/ranks.jsonl" \
        2> "$out/ours_$n.txt" || cat "$out/ours_$n.txt" >&2
    timeout "$limit" "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$n" \
        "$here/hf_train.py" --mode compiled "$size" >> "$out/ranks.jsonl" 2> "$out/torch_$n.txt" || tail -5 "$out/torch_$n.txt" >&2
done
"$PYTHON" "$here/ranks.py" "$out/ranks.jsonl"
