#!/bin/sh
# The numerics experiments: trains every recipe of a part with paired seeds, compares, draws.
#
#     tests/experiments/run.sh [presets] [scale] [nvfp4] [grid]      default: all four
#
# Runs from the root of the tree; writes runs/experiments/. A finished run is kept, so that parts share runs and an
# interrupted call goes on where it was; remove runs/experiments to begin anew. From the environment:
#     MIXTAPE   the program (./mixtape)
#     SEEDS     seeds of each recipe ("1 2 3")
#     JOBS      runs at a time, each on one thread (the machine's cores)
set -eu

MIXTAPE=${MIXTAPE:-./mixtape}
SEEDS=${SEEDS:-1 2 3}
JOBS=${JOBS:-$(nproc 2>/dev/null || echo 1)}
export MIXTAPE SEEDS JOBS
here=tests/experiments
out=runs/experiments
data=runs/demo-data
sha256=cd45f0c9cedab8e4439bd6486c8952c77cc8b0ecc5d1f6ae3513f2039f47229d

# ---- what each name trains ---------------------------------------------------------------------

# The text of `--set recipe=`. fwd-A-bwd-B: forward in A, both backward GEMMs in B.
recipe() {
    case $1 in
    nvfp4-no-sr) echo "nvfp4 dgrad=nvfp4/nvfp4:sr=off wgrad=nvfp4:rht/nvfp4:rht+sr=off" ;;
    nvfp4-no-rht) echo "nvfp4 wgrad=nvfp4" ;;
    nvfp4-no-2d) echo "nvfp4 fprop=nvfp4:1d/nvfp4 dgrad=nvfp4:1d/nvfp4" ;;
    nvfp4-plain) echo "fprop=nvfp4:1d/nvfp4 dgrad=nvfp4:1d/nvfp4:sr=off wgrad=nvfp4/nvfp4:sr=off" ;;
    scale-up) echo "fprop=mxfp8 dgrad=mxfp8 wgrad=mxfp8" ;;
    scale-floor) echo "fprop=mxfp8:scale=floor dgrad=mxfp8:scale=floor wgrad=mxfp8:scale=floor" ;;
    fwd-*-bwd-*)
        forward=${1#fwd-}
        forward=${forward%-bwd-*}
        case ${1##*-bwd-} in
        nvfp4) echo "fprop=$forward dgrad=nvfp4 wgrad=nvfp4:rht" ;;
        *) echo "fprop=$forward dgrad=${1##*-bwd-} wgrad=${1##*-bwd-}" ;;
        esac
        ;;
    *) echo "$1" ;; # a preset
    esac
}

# The names of a part; the first one is what the others are compared with.
names() {
    case $1 in
    presets) echo "bf16 fp8_current fp8_delayed fp8_block mxfp8 nvfp4" ;;
    scale) echo "scale-up scale-floor" ;;
    nvfp4) echo "nvfp4 nvfp4-no-sr nvfp4-no-rht nvfp4-no-2d nvfp4-plain" ;;
    grid) echo "bf16 fwd-bf16-bwd-mxfp8 fwd-bf16-bwd-nvfp4 fwd-mxfp8-bwd-bf16 mxfp8 fwd-mxfp8-bwd-nvfp4" \
        "fwd-nvfp4-bwd-bf16 fwd-nvfp4-bwd-mxfp8 nvfp4" ;;
    *)
        echo "run.sh: '$1' is not one of presets scale nvfp4 grid" >&2
        exit 2
        ;;
    esac
}

# ---- one run: run.sh --one NAME SEED -----------------------------------------------------------

one() {
    run=$out/$1-s$2
    if grep -qs '"full":true' "$run/metrics.jsonl"; then return; fi
    rm -rf "$run"
    set -- "$1" "$2" --set "recipe=$(recipe "$1")" --set "train.seed=$2"
    case $1 in # only these are measured: statistics change no result, but they cost time
    scale-*) set -- "$@" --set 'statistics.layers=*' --set 'statistics.tensors=[W, X, dY]' --set statistics.every=50 ;;
    esac
    echo "$1, seed $2"
    shift 2
    if ! OMP_NUM_THREADS=1 "$MIXTAPE" train "$here/small.yaml" --run "$run" "$@" >"$run.log" 2>&1; then
        tail -n 3 "$run.log" >&2
        exit 255 # xargs starts no further run
    fi
}

# ---- tables ------------------------------------------------------------------------------------

# Mean share of saturated and of underflowing elements over layers and lines, by tensor and direction.
saturation() {
    for name in $(names scale); do
        cat "$out/$name"-s*/metrics.jsonl | awk -v name="$name" '
        function value(key,   at, rest) {
            at = index($0, "\"" key "\":")
            rest = substr($0, at + length(key) + 3)
            sub(/^"/, "", rest)
            sub(/[",}].*/, "", rest)
            return rest
        }
        /"statistics"/ && /"member":-1/ && /"what_if":false/ {
            key = value("tensor") " " value("direction")
            n[key]++
            saturated[key] += value("saturated")
            underflow[key] += value("underflow")
            snr[key] += value("snr")
        }
        END {
            for (key in n)
                printf "%-12s %-8s saturated %.4f %%  underflow %.4f %%  SNR %.2f dB\n",
                    name, key, 100 * saturated[key] / n[key], 100 * underflow[key] / n[key], snr[key] / n[key]
        }' | sort
    done
}

# The grid of mean differences and standard errors, from the table for other programs.
grid() {
    awk -F, '
    BEGIN {
        split("bf16 mxfp8 nvfp4", format, " ")
        printf "%-10s", "forward"
        for (b = 1; b <= 3; b++) printf " %22s", "backward " format[b]
        print ""
    }
    NR > 1 {
        run = $2
        gsub(/^"|"$|-s[0-9]+"?$/, "", run)
        sub(/.*\//, "", run)
        cell[run] = $7 == "" ? "0 (baseline)" : sprintf("%+.4f +- %s", $7, $8 == "" ? "?" : sprintf("%.4f", $8))
    }
    END {
        for (f = 1; f <= 3; f++) {
            printf "%-10s", format[f]
            for (b = 1; b <= 3; b++)
                printf " %22s", cell[f == b ? format[f] : "fwd-" format[f] "-bwd-" format[b]]
            print ""
        }
    }' "$out/grid.csv"
}

report() {
    set -- "$1" "$(for name in $(names "$1"); do for seed in $SEEDS; do echo "$out/$name-s$seed"; done; done)"
    # shellcheck disable=SC2086 # the runs are many words
    "$MIXTAPE" compare $2 -o "$out/$1.csv" --plot "$out/$1.png" >"$out/$1.txt"
    case $1 in
    scale) saturation >>"$out/$1.txt" ;;
    grid) grid >>"$out/$1.txt" ;;
    esac
    echo
    echo "== $1"
    cat "$out/$1.txt"
}

# ---- all of it ---------------------------------------------------------------------------------

if [ "${1:-}" = --one ]; then
    one "$2" "$3"
    exit
fi
[ $# -gt 0 ] || set -- presets scale nvfp4 grid
for part; do names "$part" >/dev/null; done
mkdir -p "$out" "$data"
if [ ! -f "$data/train.h5" ] || [ ! -f "$data/valid.h5" ]; then
    bible -f Gen1:1-Rev22:21 >"$data/kjv.txt"
    "$MIXTAPE" data pack "$data/kjv.txt" -o "$data/train.h5" --valid "$data/valid.h5" --split kjv --sha256 "$sha256"
fi
for part; do
    for name in $(names "$part"); do for seed in $SEEDS; do echo "$name $seed"; done; done
done | awk '!seen[$0]++' | xargs -P "$JOBS" -L 1 sh "$0" --one
for part; do report "$part"; done
