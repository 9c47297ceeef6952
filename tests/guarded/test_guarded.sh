#!/bin/sh
# Every verb that computes, with the program whose device memory the host cannot touch, beside the plain program: the
# same losses, weights, logits and statistics. A line of the library that reads a device value on the host dies here,
# without a GPU. Usage: tests/guarded/test_guarded.sh (from the root, after `make` and build/release/tests/guarded/mixtape)
set -e
plain=$PWD/build/release/mixtape guarded=$PWD/build/release/tests/guarded/mixtape
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
. tests/support/runs.sh
export OMP_NUM_THREADS=1 # opening and closing memory costs most where threads run

cat README.md Makefile >"$work/text"
"$plain" data pack "$work/text" -o "$work/train.h5" >/dev/null
cat >"$work/run.yaml" <<EOF
model: { model_type: qwen3_moe, vocab_size: 256, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4,
         num_key_value_heads: 2, head_dim: 8, moe_intermediate_size: 32, num_experts: 4, num_experts_per_tok: 2,
         router_bias_update_rate: 1e-3 }
data: { train: $work/train.h5, valid: $work/train.h5, sequence_length: 32 }
train: { steps: 8, batch_size: 4, micro_batch_size: 2, dtype: bf16, seed: 3, log_every: 1, eval_every: 4, eval_batches: 2 }
optim: { lr: 1e-3, warmup_steps: 2 }
checkpoint: { every: 4, keep_last: 2 }
statistics: { every: 2, what_if: [nvfp4], tensors: [W, X, dY] }
EOF

# losses, norms and statistics, without what depends on the clock
numbers() { sed -E 's/"(time|[a-z_]*seconds|[a-z_]*_s|[a-z_]*_ms|tokens_per_second|mfu|eta|memory_bytes)": *[^,}]*//g' "$1/metrics.jsonl"; }

for recipe in none fp8_delayed "nvfp4; steps=3..5 mxfp8"; do
    for program in plain guarded; do
        eval "exe=\$$program"
        run=$work/$program
        rm -rf "$run"
        "$exe" train "$work/run.yaml" --run "$run" --set "recipe.use=$recipe" --set train.steps=4 >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
        "$exe" train "$work/run.yaml" --run "$run" --resume --set "recipe.use=$recipe" --set train.steps=8 --set memory.recompute=block --set memory.offload=saved >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
        "$exe" eval "$run" 2>&1 | sed "s|$run/||" >"$work/$program.eval"
        "$exe" sample "$run" --prompt "In the" --tokens 20 --seed 1 >"$work/$program.sample" 2>&1
        rm -rf "$work/$program.hf"
        "$exe" export "$run" "$work/$program.hf" >/dev/null 2>&1
    done
    numbers "$work/plain" >"$work/a"
    numbers "$work/guarded" >"$work/b"
    is "$recipe: the same numbers" cmp "$work/a" "$work/b"
    is "$recipe: the same evaluation" cmp "$work/plain.eval" "$work/guarded.eval"
    is "$recipe: the same samples" cmp "$work/plain.sample" "$work/guarded.sample"
    is "$recipe: the same weights" cmp "$work/plain.hf/model.safetensors" "$work/guarded.hf/model.safetensors"
done
[ "$failed" = 0 ] || { echo "[  FAILED  ] $failed test(s)."; exit 1; }
echo "[  PASSED  ] $passed test(s)."
