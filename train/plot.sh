#!/bin/sh
# Draws RUN/loss.png and RUN/balance.png from RUN/metrics.jsonl: plot.sh RUN
set -eu

run=${1:?a run directory}
points=$(mktemp -d)
trap 'rm -rf "$points"' EXIT

# Columns of the training lines (step, loss, MaxVio, dropped) with means over the last 20, and of the evaluation lines.
awk -v out="$points" '
function value(key,   at, rest) {
    at = index($0, "\"" key "\":")
    if (!at) return "nan"
    rest = substr($0, at + length(key) + 3)
    sub(/[,}].*/, "", rest)
    return rest == "null" ? "nan" : rest
}
/"valid_loss"/ {
    print value("step"), value("valid_loss") > (out "/valid")
    next
}
{
    slot = n++ % 20
    loss_sum += value("loss") - loss[slot]
    vio_sum += value("max_vio") - vio[slot]
    loss[slot] = value("loss")
    vio[slot] = value("max_vio")
    used = n < 20 ? n : 20
    print value("step"), loss[slot], loss_sum / used, vio[slot], vio_sum / used, value("dropped") > (out "/train")
}' "$run/metrics.jsonl"
touch "$points/train" "$points/valid"

gnuplot - <<GNUPLOT
set terminal pngcairo size 1000,600 font "sans,11"
set grid
set xlabel "step"
set key top right
set output "$run/loss.png"
set ylabel "bits per token"
plot "$points/train" using 1:(\$2/log(2)) with lines lc rgb "#c8d4e8" title "training", \
     "$points/train" using 1:(\$3/log(2)) with lines lw 2 lc rgb "#2050a0" title "training, mean of 20 lines", \
     "$points/valid" using 1:(\$2/log(2)) with linespoints lw 2 pt 7 lc rgb "#c04020" title "validation"
set output "$run/balance.png"
set ylabel "MaxVio = max load / mean load - 1, mean over layers"
set yrange [0:*]
plot "$points/train" using 1:4 with lines lc rgb "#cfe3cf" title "a step", \
     "$points/train" using 1:5 with lines lw 2 lc rgb "#207040" title "mean of 20 lines"
GNUPLOT
