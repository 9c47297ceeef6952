#!/bin/sh
# On a GPU: 50 steps of a small model give the same bits (metrics and exported weights) in a second run, launched anew
# each step instead of replayed as a graph, with recomputation, with offloading, with deferred weight gradients, with
# validations or statistics in between, and stopped and resumed; under bf16, every preset recipe and recipes that change
# by step. The first step's loss is near the CPU's. All steps but the first of each start and recipe are replayed from a
# recorded graph, into which nothing that waits for the host can be recorded.
#
# Usage: tests/cuda/identity.sh [options] [RECIPE...] (from the root of a built tree; default: none, every preset, and
# three that change by step; a recipe may have rules, "mxfp8; steps=10..30 fp8_delayed")
#   --device D     DEVICE   cuda, or cuda:N; cpu tries the script where there is no GPU
#   --steps N      STEPS    an even number, 8 or more (50)
#   --width N      WIDTH    of an expert (64; at 256 the gradient of its result is gathered, weighted after the product)
#   --jobs N       JOBS     runs at once (6)
#   --set K=V      -        a key of every run's configuration, such as model.num_experts=16; any number of them
#   --variants V   VARIANTS of those below, in one word, to hold against the first
# The second column are variables of the environment that mean the same; MIXTAPE is the program (build/release/mixtape).
set -e
program=${MIXTAPE:-$PWD/build/release/mixtape} device=${DEVICE:-cuda} jobs=${JOBS:-6} steps=${STEPS:-50} width=${WIDTH:-64}
variants=${VARIANTS:-again eager recompute_block recompute_activation offload defer all evaluated measured resumed resumed_all}
sets='' experts=8
while [ $# -gt 0 ]; do
    case $1 in
    --device | --steps | --width | --jobs | --set | --variants)
        [ $# -gt 1 ] || { echo "$1: its value is missing" >&2; exit 2; }
        case $1 in
        --device) device=$2 ;;
        --steps) steps=$2 ;;
        --width) width=$2 ;;
        --jobs) jobs=$2 ;;
        --set)
            sets="$sets --set $2"
            case $2 in model.num_experts=*) experts=${2#*=} ;; esac ;;
        --variants) variants=$2 ;;
        esac
        shift 2 ;;
    --*) echo "$1: no such option" >&2; exit 2 ;;
    *) break ;;
    esac
done
if [ "$steps" -lt 8 ] || [ $((steps % 2)) = 1 ]; then
    echo "--steps is $steps, must be an even number, 8 or more" >&2
    exit 2
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
half=$((steps / 2)) quarter=$((steps / 4)) passed=0 failed=0
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
# By step: amaxes are gathered at steps that do not scale by them; changes come before, at and after the checkpoint.
[ $# -gt 0 ] || set -- none fp8_current fp8_delayed fp8_block mxfp8 nvfp4 \
    "fp8_delayed; steps=$quarter..$((half + quarter)) mxfp8" \
    "nvfp4; layers=*experts* steps=$half.. fp8_delayed" \
    "mxfp8 wgrad=mxfp8:source=dequantized; layers=*mlp* steps=..$quarter none; steps=$((half + quarter)).. fp8_block"
pass() { passed=$((passed + 1)); }
fail() { # what, file with what was said
    failed=$((failed + 1))
    echo "FAILED: $1"
    [ ! -s "$2" ] || tail -n 3 "$2"
}

# Words of a generator of 31 bits: the same text always, since what a sum in another order does to codes depends on it.
awk 'function draw(n) { x = x * 16807 % 2147483647; return x % n }
     BEGIN { x = 1
             for (i = 1; i <= 20000; i++) {
                 word = ""
                 for (j = draw(9) + 2; j > 0; j--) word = word sprintf("%c", 97 + int((draw(1000) / 1000) ^ 2 * 26))
                 printf "%s%s", word, i % 12 ? " " : ".\n"
             } }' >"$work/text"
"$program" data pack "$work/text" -o "$work/train.h5" >/dev/null
head -c 20000 "$work/text" >"$work/held_out"
"$program" data pack "$work/held_out" -o "$work/valid.h5" >/dev/null
cat >"$work/run.yaml" <<EOF
model: { model_type: qwen3_moe, vocab_size: 256, hidden_size: 128, num_hidden_layers: 2, num_attention_heads: 4,
         num_key_value_heads: 2, head_dim: 32, moe_intermediate_size: $width, num_experts: 8, num_experts_per_tok: 2,
         router_bias_update_rate: 1e-3 }
data: { train: $work/train.h5, sequence_length: 128 }
train: { batch_size: 8, micro_batch_size: 4, dtype: bf16, seed: 3, log_every: 1 }
optim: { lr: 1e-3, schedule: constant }
checkpoint: { every: $half, keep_last: 2 }
EOF

# the lines of a run's steps, without what depends on the clock, and its weights
numbers() {
    grep '"loss":' "$1/metrics.jsonl" | sed -E 's/"(time|[a-z_]*seconds|[a-z_]*_s|[a-z_]*_ms|tokens_per_second|mfu|eta|memory_bytes)": *[^,}]*//g'
    "$program" export "$1" "$1.hf" >/dev/null 2>&1
    cksum <"$1.hf/model.safetensors"
}
# what is done in between, now and then just before recipes change
evaluate="--set data.valid=$work/valid.h5 --set train.eval_every=3 --set train.eval_batches=1"
measure="--set statistics.every=7 --set statistics.what_if=[mxfp4]"
# a variant's options of `train`
options() {
    case $1 in
    eager) echo "--set train.eager=true" ;;
    recompute_block) echo "--set memory.recompute=block" ;;
    recompute_activation) echo "--set memory.recompute=activation" ;;
    offload) echo "--set memory.offload=saved" ;;
    defer) echo "--set memory.defer_wgrad=true" ;;
    all) echo "--set memory.recompute=activation --set memory.offload=saved --set memory.defer_wgrad=true" ;;
    evaluated) echo "$evaluate" ;;
    measured) echo "$measure" ;;
    resumed_all) echo "--set memory.recompute=block --set memory.offload=saved --set memory.defer_wgrad=true $evaluate $measure" ;;
    esac
}
# whether a run did what its variant is for
did() { # variant, run
    case $1 in evaluated | resumed_all) grep -q '"valid_loss":' "$2/metrics.jsonl" || return 1 ;; esac
    case $1 in measured | resumed_all) grep -q '"statistics":' "$2/metrics.jsonl" || return 1 ;; esac
}
train() { # number of the recipe, recipe, variant, steps, options...
    run=$work/$1.$3 recipe=$2 variant=$3 until=$4
    shift 4
    # shellcheck disable=SC2086,SC2046
    "$program" train "$work/run.yaml" --run "$run" --device "$device" $sets $(options "$variant") \
        --set "recipe.use=$recipe" --set "train.steps=$until" "$@"
}
one() { # number of the recipe, recipe, variant
    run=$work/$1.$3
    {
        case $3 in
        resumed*) train "$1" "$2" "$3" $half && train "$1" "$2" "$3" "$steps" --resume ;;
        *) train "$1" "$2" "$3" "$steps" ;;
        esac && did "$3" "$run" && numbers "$run" >"$run.bits"
    } >"$run.log" 2>&1 || rm -f "$run.bits"
}
# the first loss on the cpu; in f32 too on both, there by every kernel set that runs here and with every token going to
# all experts, or one that a rounding sends elsewhere would hide what is compared
cpu() { # number, recipe
    f32="--set train.dtype=f32 --set train.steps=1 --set model.num_experts_per_tok=$experts"
    # shellcheck disable=SC2086
    "$program" train "$work/run.yaml" --run "$work/$1.cpu.bf16" --device cpu --set "recipe.use=$2" $sets \
        --set train.dtype=bf16 --set train.steps=1 >"$work/$1.cpu.log" 2>&1 || true
    # shellcheck disable=SC2086
    for set in portable avx2 avx512; do
        MIXTAPE_KERNELS=$set "$program" train "$work/run.yaml" --run "$work/$1.cpu.f32.$set" --device cpu --set "recipe.use=$2" \
            $sets $f32 >"$work/$1.cpu.log" 2>&1 || true
    done
    # shellcheck disable=SC2086
    "$program" train "$work/run.yaml" --run "$work/$1.gpu.f32" --device "$device" --set "recipe.use=$2" \
        $sets $f32 >"$work/$1.gpu.log" 2>&1 || true
}

running=0
start() { # command...
    "$@" &
    running=$((running + 1))
    [ "$running" -lt "$jobs" ] || { wait; running=0; }
}
number=0
for recipe in "$@"; do
    number=$((number + 1))
    for variant in first $variants; do start one $number "$recipe" "$variant"; done
    [ "$device" = cpu ] || start cpu $number "$recipe"
done
wait

loss() { sed -n '1s/.*"loss": *\([0-9.e+-]*\).*/\1/p' "$1/metrics.jsonl" 2>/dev/null; }
# Under recipes a sum in another order may round a code the other way: kernel sets of the CPU differ by up to 4e-5 then
# (by 2.4e-4 where that sends a token to another expert), so the loss has to be near that of one of them.
near() { # what, most: that of one rounding of the loss in the type, a run, those one of which it has to be so near to
    what=$1 most=$2 a=$(loss "$3") near='' all=''
    shift 3
    for run; do
        b=$(loss "$run") all="$all $b"
        if awk -v a="$a" -v b="$b" -v most="$most" 'BEGIN { d = a - b; if (d < 0) d = -d; exit !(a + 0 > 0 && b + 0 > 0 && d <= most * b) }'; then
            near=yes
        fi
    done
    if [ "$near" ]; then pass; else fail "$what: first loss $a, on the CPU$all" /dev/null; fi
}
number=0
for recipe in "$@"; do
    number=$((number + 1))
    first=$work/$number.first
    for variant in first $variants; do
        run=$work/$number.$variant
        if [ ! -s "$run.bits" ]; then
            fail "$recipe, $variant: the run" "$run.log"
        elif ! cmp -s "$first.bits" "$run.bits"; then
            fail "$recipe, $variant: other bits than $recipe, first; lines $(diff "$first.bits" "$run.bits" | grep -c '^>')" /dev/null
        else
            pass
        fi
    done
    [ "$device" != cpu ] || continue
    replayed=$(sed -n "s/.* \([0-9]*\) of $steps steps replayed.*/\1/p; s/^\([0-9]*\) of $steps steps replayed.*/\1/p" "$first.log")
    # a start's first step runs as it is; a checkpoint may begin it anew; so do other recipes, and the step before them
    changes=$(echo "$recipe" | sed 's/steps=/\n/g' | sed -n 's/^\([0-9]*\)\.\.\([0-9]*\).*/\1 \2/p' | wc -w)
    if [ "${replayed:-0}" -ge $((steps - 4 - 3 * changes)) ]; then pass; else fail "$recipe: only ${replayed:-0} of $steps steps replayed" /dev/null; fi
    near "$recipe, bf16" 0.00390625 "$first" "$work/$number.cpu.bf16"
    near "$recipe, f32" "$([ "$recipe" = none ] && echo 1e-6 || echo 1e-4)" "$work/$number.gpu.f32" "$work/$number".cpu.f32.*
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
