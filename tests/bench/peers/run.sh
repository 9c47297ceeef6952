#!/bin/sh
# mixtape bench and its peers, interleaved on one machine, and the ratios of their rates.
#
# Usage: run.sh [-n ROUNDS] [-s SHAPE] [-q RECIPE]... [-g] [-o DIR] [PEER...]
#   -n  rounds; each runs mixtape, then the peers, family by family (3)
#   -s  a shape or a model's shapes (mixtape's --shape); without it every shape of the device
#   -q  recipes to measure, "none" for bf16; any number (none)
#   -g  mixtape launches recorded graphs, which eager peers cannot (its --graph)
#   -o  where the lines of JSON and the peers' own output go (build/peers)
# Peers: those below whose packages Python finds, or those named. MIXTAPE is the program (./mixtape), PYTHON the Python.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
rounds=3 shape='' recipes='' graph='' out=build/peers
while getopts n:s:q:go: option; do
    case $option in
    n) rounds=$OPTARG ;;
    s) shape=$OPTARG ;;
    q) recipes="$recipes --recipe $OPTARG" ;;
    g) graph=--graph ;;
    o) out=$OPTARG ;;
    *) sed -n '2,11s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
    esac
done
shift $((OPTIND - 1))
: "${MIXTAPE:=./mixtape}" "${PYTHON:=python3}"
[ -x "$MIXTAPE" ] || { echo "run.sh: no program $MIXTAPE (set MIXTAPE)" >&2; exit 2; }
[ -n "$recipes" ] || recipes=" --recipe none"

# name, family, package it needs, whether it takes recipes, command
peers="torch_grouped_mm gemm torch - $PYTHON
te_grouped_linear gemm transformer_engine recipes $PYTHON
torch_moe_layer moe torch - $PYTHON
sonic_moe_layer moe sonicmoe - $PYTHON
te_moe_layer moe transformer_engine recipes $PYTHON
torch_adamw ops torch - $PYTHON
torch_step step torch - $PYTHON
hf_train step transformers - $PYTHON
hf_train_f32 step transformers - torchrun --nproc-per-node 1"

for name in "$@"; do
    echo "$peers" | grep -q "^$name " ||
        { echo "run.sh: no peer $name; there are: $(echo "$peers" | cut -d' ' -f1 | tr '\n' ' ')" >&2; exit 2; }
done
named=$*
wanted() { # name, package
    if [ -n "$named" ]; then
        case " $named " in *" $1 "*) return 0 ;; *) return 1 ;; esac
    fi
    "$PYTHON" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$2') is None)"
}
chosen=$(echo "$peers" | while read -r line; do
    # shellcheck disable=SC2086
    set -- $line
    if wanted "$1" "$3"; then echo "$line"; fi
done)
[ -n "$chosen" ] || { echo "run.sh: no peer's package is installed" >&2; exit 1; }

mkdir -p "$out"
rm -f "$out"/round*.jsonl
round=1
while [ "$round" -le "$rounds" ]; do
    lines=$out/round$round.jsonl
    for family in $(echo "$chosen" | cut -d' ' -f2 | uniq); do
        echo "== round $round: $family" >&2
        [ "$family" = moe ] && grads="--grad-dtype bf16" || grads=
        # shellcheck disable=SC2086
        "$MIXTAPE" bench "$family" $grads ${shape:+--shape "$shape"} $recipes $graph --json "$out/ours.jsonl" >"$out/$family.txt" ||
            { echo "   mixtape bench $family failed: no ratios for it in this round" >&2; continue; }
        cat "$out/ours.jsonl" >>"$lines"
        echo "$chosen" | grep "^[^ ]* $family " | while read -r name _ _ takes command; do
            echo "   $name" >&2
            [ "$takes" = recipes ] && asked=$recipes || asked=
            # A peer that fails is reported and left out; the others count.
            # shellcheck disable=SC2086
            $command "$here/${name%_f32}.py" $asked ${shape:+"$shape"} </dev/null >"$out/peer.jsonl" 2>"$out/$name.log" ||
                echo "   $name failed: $(tail -n 1 "$out/$name.log")" >&2
            grep '^{' "$out/peer.jsonl" >>"$lines" || echo "   $name: no result, see $out/$name.log" >&2
        done
    done
    round=$((round + 1))
done
"$PYTHON" "$here/ratios.py" "$out"/round*.jsonl
