#!/bin/sh
# On a GPU: compute-sanitizer over a quick subset of every op. memcheck: a training step of a small model
# with sizes that are no multiples of anything, under bf16 and every preset (a first step has each block in an allocation
# of its own, so that what is read past one is seen), and small test programs. racecheck: the same, for kernels
# without asynchronous copies, which it does not follow: the set without wgmma and TMA, beside whose kernels it
# loses the device even where they are left out.
#
# Usage: tests/cuda/sanitize.sh [memcheck|racecheck]... (from the root of a built tree; default: both)
# MIXTAPE: the program (build/release/mixtape), SANITIZER: compute-sanitizer, JOBS: at once (8), LIMIT: seconds of each (200)
program=${MIXTAPE:-$PWD/build/release/mixtape} jobs=${JOBS:-8} limit=${LIMIT:-200}
sanitizer=${SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
tests=$(dirname "$program")/tests/kernels
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export OMP_NUM_THREADS=1 MIXTAPE_TEST_DEVICE=cuda
[ -x "$sanitizer" ] || { echo "no compute-sanitizer (SANITIZER names it)"; exit 2; }
[ $# -gt 0 ] || set -- memcheck racecheck

cat README.md Makefile >"$work/text"
"$program" data pack "$work/text" -o "$work/train.h5" >/dev/null
cat >"$work/run.yaml" <<EOF
model: { model_type: qwen3_moe, vocab_size: 259, hidden_size: 72, num_hidden_layers: 1, num_attention_heads: 3,
         num_key_value_heads: 1, head_dim: 24, moe_intermediate_size: 40, num_experts: 5, num_experts_per_tok: 2,
         router_bias_update_rate: 1e-3 }
data: { train: $work/train.h5, sequence_length: 37 }
train: { steps: 1, batch_size: 2, micro_batch_size: 1, dtype: bf16, seed: 3, log_every: 1 }
optim: { lr: 1e-3, schedule: constant }
EOF
# cases: a name and a command
cases() {
    for recipe in none fp8_current fp8_delayed fp8_block mxfp8 nvfp4; do
        echo "train_$recipe $program train $work/run.yaml --run $work/RUN.$recipe --device cuda --set recipe.use=$recipe --set train.eager=true"
    done
    echo "train_f32 $program train $work/run.yaml --run $work/RUN.f32 --device cuda --set train.dtype=f32 --set train.eager=true"
    echo "train_kept $program train $work/run.yaml --run $work/RUN.kept --device cuda --set memory.recompute=block --set memory.offload=saved --set memory.defer_wgrad=true --set optim.moments=fp8 --set optim.master=bf16+i16"
    # wgmma and TMA want 16-byte lines
    echo "train_aligned $program train $work/run.yaml --run $work/RUN.aligned --device cuda --set model.hidden_size=128 --set model.head_dim=64 --set model.num_attention_heads=2 --set model.moe_intermediate_size=64 --set train.eager=true"
    for t in elementwise loss norm rope moments optimizer; do
        [ ! -x "$tests/test_$t" ] || echo "test_$t $tests/test_$t"
    done
}
run() { # tool, name, command...
    tool=$1 name=$2 code=0
    shift 2
    log=$work/$tool.$name.log
    exclude= kernels=
    if [ "$tool" = racecheck ]; then
        kernels=generic
        # names of kernels with cp.async
        for k in mma tile rows_kernel gemm; do exclude="$exclude --kernel-name-exclude kernel_substring=$k"; done
    fi
    # shellcheck disable=SC2046,SC2086
    MIXTAPE_KERNELS=${kernels:-${MIXTAPE_KERNELS-}} timeout "$limit" "$sanitizer" --tool "$tool" --error-exitcode 99 --launch-timeout 60 $exclude $(echo "$@" | sed "s/RUN/$tool/") >"$log" 2>&1 || code=$?
    echo "$code" >"$work/$tool.$name.code"
}
running=0
for tool in "$@"; do
    cases >"$work/cases"
    while read -r name command; do
        # shellcheck disable=SC2086
        run "$tool" "$name" $command </dev/null &
        running=$((running + 1))
        [ "$running" -lt "$jobs" ] || { wait; running=0; }
    done <"$work/cases"
done
wait
passed=0 failed=0 unfinished=0
for tool in "$@"; do
    while read -r name _; do
        code=$(cat "$work/$tool.$name.code" 2>/dev/null || echo none)
        log=$work/$tool.$name.log
        if [ "$code" = 124 ] && ! grep -q "ERROR SUMMARY: [1-9]\|Invalid\|hazard" "$log"; then
            unfinished=$((unfinished + 1))
            echo "$tool $name: nothing found in $limit s, not finished"
        elif [ "$code" = 0 ] && grep -q "ERROR SUMMARY: 0 errors\|RACECHECK SUMMARY: 0 hazards" "$log"; then
            passed=$((passed + 1))
        else
            failed=$((failed + 1))
            echo "FAILED: $tool $name ($code)"
            grep -m 8 "=========" "$log" || tail -n 3 "$log"
        fi
    done <"$work/cases"
done
echo "$passed passed, $failed failed, $unfinished unfinished"
[ "$failed" = 0 ]
