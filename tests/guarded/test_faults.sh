#!/bin/sh
# Runs whose device fails: memory runs out, or a kernel faults and nothing works any more. Each must end with the code of
# its class, say what and what stands, leave the last checkpoint as it is, and go on from it to the bits of a run that
# nothing happened to. Usage: tests/guarded/test_faults.sh (from the root, after `make` and build/release/tests/guarded/mixtape)
set -e
program=$PWD/build/release/tests/guarded/mixtape
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
. tests/support/runs.sh
export OMP_NUM_THREADS=1
cat README.md Makefile >"$work/text"
"$program" data pack "$work/text" -o "$work/train.h5" >/dev/null
cat >"$work/run.yaml" <<EOF
model: { model_type: qwen3_moe, vocab_size: 256, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 4,
         num_key_value_heads: 2, head_dim: 8, moe_intermediate_size: 32, num_experts: 4, num_experts_per_tok: 2 }
data: { train: $work/train.h5, sequence_length: 32 }
train: { steps: 9, batch_size: 4, dtype: bf16, seed: 3, log_every: 1 }
optim: { lr: 1e-3, schedule: constant }
checkpoint: { every: 3, keep_last: 9 }
EOF
train() { # run, code, fault, options...
    run=$1 wanted=$2 fault=$3 code=0
    shift 3
    GUARD_FAULT=$fault "$program" train "$work/run.yaml" --run "$work/$run" "$@" >"$work/log" 2>&1 || code=$?
    is "$run with $fault ends with $wanted, not $code" test "$code" = "$wanted"
}

train straight 0 none
last=step_00000009

# a kernel faults in step 7, then one where the run goes on: nothing is saved, step 6 stands
train kernel 6 cross_entropy_bwd:7
says "cross_entropy_bwd: an illegal address"
says "the checkpoint of step 6 stands: .*step_00000006"
is "no later checkpoint" test ! -e "$work/kernel/ckpt/$last"
before=$(saved kernel)
train kernel 6 gemm:1 --resume
is "the checkpoints are as before" test "$before" = "$(saved kernel)"
train kernel 0 none --resume

# copies fail: those of a batch, of metrics, of a checkpoint that is being written
train copied 0 none --set train.steps=6
before=$(saved copied)
for n in 40 60 80; do
    train copied 6 copy:$n --resume --set train.steps=9
    is "the checkpoints are as before (copy $n)" test "$before" = "$(saved copied)"
done
train copied 0 none --resume --set train.steps=9

# memory runs out where the run begins, and where its steps grow: the plan is printed
train memory 1 alloc:1
says "bytes at the high-water mark"
says "no [0-9]* bytes for"
train memory 0 none --set train.steps=3
before=$(saved memory)
for n in 5 9; do
    train memory 1 alloc:$n --resume --set train.steps=9
    says "bytes at the high-water mark"
    is "the checkpoints are as before (allocation $n)" test "$before" = "$(saved memory)"
done
train memory 0 none --resume --set train.steps=9

for run in kernel copied memory; do
    same_files $run straight $last
done
[ "$failed" = 0 ] || { echo "[  FAILED  ] $failed test(s)."; exit 1; }
echo "[  PASSED  ] $passed test(s)."
