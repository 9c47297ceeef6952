#!/bin/sh
# On a GPU: 50 steps of a small model give the same bits (metrics and exported weights) in a second run, launched anew
# each step instead of replayed as a graph, with recomputation, with offloading, with deferred weight gradients, and
# stopped and resumed; under bf16 and every preset recipe. The first step's loss is near the CPU's. All steps but the
# first of each start are replayed from a recorded graph, into which nothing that waits for the host can be recorded.
#
# Usage: tests/cuda/identity.sh [RECIPE...] (from the root of a built tree; default: none and every preset)
# MIXTAPE: the program (build/release/mixtape), DEVICE: cuda or cuda:N, JOBS: runs at once (6), STEPS: an even number (50),
# WIDTH: of an expert (64; at 256 the gradient of its result is gathered, weighted after the product)
set -e
program=${MIXTAPE:-$PWD/build/release/mixtape} device=${DEVICE:-cuda} jobs=${JOBS:-6} steps=${STEPS:-50} width=${WIDTH:-64}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
half=$((steps / 2)) passed=0 failed=0
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
[ $# -gt 0 ] || set -- none fp8_current fp8_delayed fp8_block mxfp8 nvfp4
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
    sed -E 's/"(time|[a-z_]*seconds|[a-z_]*_s|[a-z_]*_ms|tokens_per_second|mfu|eta|memory_bytes)": *[^,}]*//g' "$1/metrics.jsonl"
    "$program" export "$1" "$1.hf" >/dev/null 2>&1
    cksum <"$1.hf/model.safetensors"
}
variants="first again eager recompute_block recompute_activation offload defer all resumed"
# a variant's options of `train`
options() {
    case $1 in
    eager) echo "--set train.eager=true" ;;
    recompute_block) echo "--set memory.recompute=block" ;;
    recompute_activation) echo "--set memory.recompute=activation" ;;
    offload) echo "--set memory.offload=saved" ;;
    defer) echo "--set memory.defer_wgrad=true" ;;
    all) echo "--set memory.recompute=activation --set memory.offload=saved --set memory.defer_wgrad=true" ;;
    esac
}
one() { # number of the recipe, recipe, variant
    run=$work/$1.$3
    begin="$program train $work/run.yaml --run $run --device $device"
    {
        if [ "$3" = resumed ]; then
            $begin --set "recipe.use=$2" --set train.steps=$half &&
                $begin --set "recipe.use=$2" --set train.steps=$steps --resume
        else
            # shellcheck disable=SC2046
            $begin --set "recipe.use=$2" --set train.steps=$steps $(options "$3")
        fi && numbers "$run" >"$run.bits"
    } >"$run.log" 2>&1 || rm -f "$run.bits"
}
# the first loss on the cpu; in f32 too on both, there by every kernel set that runs here and with every token going to
# all experts, or one that a rounding sends elsewhere would hide what is compared
cpu() { # number, recipe
    f32="--set train.dtype=f32 --set train.steps=1 --set model.num_experts_per_tok=8"
    "$program" train "$work/run.yaml" --run "$work/$1.cpu.bf16" --device cpu --set "recipe.use=$2" \
        --set train.dtype=bf16 --set train.steps=1 >"$work/$1.cpu.log" 2>&1 || true
    # shellcheck disable=SC2086
    for set in portable avx2 avx512; do
        MIXTAPE_KERNELS=$set "$program" train "$work/run.yaml" --run "$work/$1.cpu.f32.$set" --device cpu --set "recipe.use=$2" \
            $f32 >"$work/$1.cpu.log" 2>&1 || true
    done
    # shellcheck disable=SC2086
    "$program" train "$work/run.yaml" --run "$work/$1.gpu.f32" --device "$device" --set "recipe.use=$2" \
        $f32 >"$work/$1.gpu.log" 2>&1 || true
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
    for variant in $variants; do start one $number "$recipe" "$variant"; done
    start cpu $number "$recipe"
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
    for variant in $variants; do
        run=$work/$number.$variant
        if [ ! -s "$run.bits" ]; then
            fail "$recipe, $variant: the run" "$run.log"
        elif ! cmp -s "$first.bits" "$run.bits"; then
            fail "$recipe, $variant: other bits than $recipe, first; lines $(diff "$first.bits" "$run.bits" | grep -c '^>')" /dev/null
        else
            pass
        fi
    done
    replayed=$(sed -n "s/.* \([0-9]*\) of $steps steps replayed.*/\1/p; s/^\([0-9]*\) of $steps steps replayed.*/\1/p" "$first.log")
    # a start's first step runs as it is; a checkpoint may begin it anew
    if [ "${replayed:-0}" -ge $((steps - 4)) ]; then pass; else fail "$recipe: only ${replayed:-0} of $steps steps replayed" /dev/null; fi
    near "$recipe, bf16" 0.00390625 "$first" "$work/$number.cpu.bf16"
    near "$recipe, f32" "$([ "$recipe" = none ] && echo 1e-6 || echo 1e-4)" "$work/$number.gpu.f32" "$work/$number".cpu.f32.*
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
