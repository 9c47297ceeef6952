#!/bin/sh
# On a GPU: what goes wrong with it ends a run with the code of its class, says what and what stands, and leaves the last
# checkpoint as it was: no such GPU, a model that is too large, memory that runs out in between, a kernel that faults,
# eager or within a graph, named under MT_SYNC=1. The plan is held against what such a run takes. Where there are two
# GPUs: a rank whose memory runs out ends both, named, within a minute.
#
# Usage: tests/cuda/faults.sh (from the root, after `make CUDA=1 build/release/tests/cuda/mixtape`). DEVICE: cuda or cuda:N
program=${MIXTAPE:-$PWD/build/release/tests/cuda/mixtape} device=${DEVICE:-cuda}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
. tests/support/runs.sh
cat README.md Makefile core/*.c >"$work/text"
"$program" data pack "$work/text" -o "$work/train.h5" >/dev/null
cat >"$work/run.yaml" <<EOF
model: { model_type: qwen3_moe, vocab_size: 256, hidden_size: 256, num_hidden_layers: 2, num_attention_heads: 4,
         num_key_value_heads: 2, head_dim: 64, moe_intermediate_size: 128, num_experts: 8, num_experts_per_tok: 2 }
data: { train: $work/train.h5, sequence_length: 128 }
train: { steps: 12, batch_size: 16, dtype: bf16, seed: 3, log_every: 1 }
optim: { lr: 1e-3, schedule: constant }
checkpoint: { every: 4, keep_last: 9 }
EOF
train() { # run, code or codes, options...
    run=$1 wanted=$2 code=0
    shift 2
    timeout 60 "$program" train "$work/run.yaml" --run "$work/$run" --device "$device" "$@" >"$work/log" 2>&1 || code=$?
    is "$run, $*: ends with $wanted, not $code" expr " $wanted " : ".* $code " >/dev/null
}

CUDA_VISIBLE_DEVICES='' train none 6
says "no GPU was found"
device=cuda:99 train none 6
says "GPU 99 is not one of the"

train straight 0
# the plan, of all but the workspace exact; the run's own count is what the device was asked for
planned=$("$program" plan "$work/run.yaml" --device "$device" | awk '$1 == "total" { print $2 }')
measured=$(sed -n '$s/.*"memory_bytes": *\([0-9]*\).*/\1/p' "$work/straight/metrics.jsonl")
is "planned $planned, in use $measured: within 5 %" awk -v p="$planned" -v m="$measured" 'BEGIN { exit !(m > 0 && p >= 0.95 * m && p <= 1.05 * m) }'

train large 1 --set model.num_hidden_layers=64 --set model.num_experts=512 --set model.hidden_size=8192 --set model.moe_intermediate_size=8192
says "bytes of the GPU's memory at the high-water mark"
says "device cuda: no [0-9]* bytes for"

train memory 0 --set train.steps=4
before=$(saved memory)
for leave in 2 24 40; do
    GPU_LEAVE=$leave train memory 1 --resume
    says "bytes of the GPU's memory at the high-water mark"
    is "the checkpoints are as before ($leave MiB left)" test "$before" = "$(saved memory)"
done

train kernel 0 --set train.steps=4
before=$(saved kernel)
for how in train.eager=true train.eager=false; do
    GPU_FAULT=rmsnorm_fwd:7 train kernel 6 --resume --set $how
    says "an illegal memory access"
    says "MT_SYNC=1"
    says "the checkpoint of step 4 stands"
    is "the checkpoints are as before ($how)" test "$before" = "$(saved kernel)"
done
MT_SYNC=1 GPU_FAULT=rmsnorm_fwd:7 train kernel 6 --resume
says "bad (a test's): an illegal memory access"

for run in memory kernel; do
    train $run 0 --resume
    same_files $run straight step_00000012
done

if [ -e /dev/nvidia1 ] && [ -z "${CUDA_VISIBLE_DEVICES:-}" ]; then
    train two 0 --gpus 2
    train ranks 0 --gpus 2 --set train.steps=4
    before=$(saved ranks)
    # 6: of the other one, where it was the first to end
    GPU_LEAVE=2:1 train ranks "1 6" --gpus 2 --resume
    says "rank 1: .*out of memory"
    is "the checkpoints are as before (a rank)" test "$before" = "$(saved ranks)"
    GPU_LEAVE=2000:1 train none "1 6" --gpus 2 --set model.num_experts=64 --set model.hidden_size=1024 --set model.moe_intermediate_size=4096
    says "rank 1: .*no [0-9]* bytes for"
    train ranks 0 --gpus 2 --resume
    same_files ranks two step_00000012
fi
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
