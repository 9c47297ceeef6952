#!/bin/sh
# The demo: packs the King James Bible, trains train/configs/demo.yaml, evaluates, writes a sample, draws the curves.
# Called by `make demo` with the time it began; runs from the root of the tree.
set -eu

started=${1:-$(date +%s)}
sha256=cd45f0c9cedab8e4439bd6486c8952c77cc8b0ecc5d1f6ae3513f2039f47229d
run=runs/demo
data=runs/demo-data

# An earlier demo is replaced; anything else that has its name is not ours to remove.
if [ -e "$run" ] && [ ! -f "$run/config.resolved.yaml" ] && [ -n "$(ls -A "$run")" ]; then
    echo "demo: $run is there and is no run of mixtape: move it away" >&2
    exit 2
fi
rm -rf "$run"
mkdir -p "$data"

bible -f Gen1:1-Rev22:21 > "$data/kjv.txt"
./mixtape data pack "$data/kjv.txt" -o "$data/train.h5" --valid "$data/valid.h5" --split kjv --sha256 "$sha256"
training=$(date +%s)
./mixtape train train/configs/demo.yaml --run "$run"
training=$(($(date +%s) - training))
./mixtape eval "$run" >"$run/eval.txt" # not into a pipe, which would hide its failure
cat "$run/eval.txt"
echo
./mixtape sample "$run" --prompt "In the beginning " --tokens 400 --temperature 0.8 --seed 1 >"$run/sample.txt"
cat "$run/sample.txt"
echo
sh train/plot.sh "$run"
bits=$(sed -n 's/.*"valid_bits_per_byte":\([0-9.]*\).*"full":true.*/\1/p' "$run/metrics.jsonl" | tail -n 1)
printf 'demo: %.4f bits per byte on the whole validation set; %d s in all, %d s of them training\n' \
    "$bits" $(($(date +%s) - started)) "$training"
echo "demo: curves in $run/loss.png and $run/balance.png, the run in $run"
