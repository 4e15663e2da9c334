#!/usr/bin/env bash
# The whole job on the embedded world, on a laptop without a GPU: draw photos, prepare, warm up a
# tiny model, measure it, filter, train it with GRPO, measure again, and write the report.
#
#   bash runbook/quickstart.sh [--seed N] [--vllm] [--output_dir DIR]
#
# --vllm samples with vLLM in the training process (Linux, x86-64). Killed at any moment, the same
# command continues.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

seed=0 backend=transformers use_vllm=false extras=train,demo out=""
while [ $# -gt 0 ]; do
  case "$1" in
    --seed | --output_dir)
      [ $# -gt 1 ] || fail "$1 takes a value"
      if [ "$1" = --seed ]; then seed="$2"; else out="$2"; fi
      shift 2
      ;;
    --vllm)
      backend=vllm use_vllm=true extras=all
      shift
      ;;
    *) fail "unknown option $1; use --seed N, --vllm or --output_dir DIR" ;;
  esac
done
[[ "$seed" =~ ^[0-9]+$ ]] || fail "--seed $seed is not a whole number; give one from 0 on"

# A given folder is relative to where you are, the default to the checkout.
case "$out" in
  "") out="outputs/quickstart/seed-$seed-$backend" ;;
  /*) ;;
  *) out="$PWD/$out" ;;
esac
install "$extras"
cd "$ROOT"
configs=configs/embedded
tiny="$out/base"
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error TOKENIZERS_PARALLELISM=false
export TENSORBOARD_LOGGING_DIR="$out/runs"

step=0
phase() {
  step=$((step + 1))
  printf '\n[%d/8] %s (%dm%02ds)\n' "$step" "$1" $((SECONDS / 60)) $((SECONDS % 60))
  shift
  "$PYTHON" "$@"
}
evaluate() {
  phase "$1" scripts/run_eval.py --config $configs/eval.yaml --data_dir "$out/data" \
    --output_dir "$out/eval" --model "$tiny" --backend $backend "${@:2}"
}

phase "Draw the embedded world" scripts/draw_embedded.py "$out/embedded" --seed "$seed"
phase "Prepare the data" scripts/prepare_data.py --config $configs/data.yaml \
  --source "$out/embedded/world" --output_dir "$out/data"
phase "Warm up: teach the format, and a bias" scripts/warmup_sft.py \
  --config $configs/warmup.yaml --data_dir "$out/data" --output_dir "$tiny" \
  --model "$out/embedded/tiny" --clues "$out/embedded/world/clues.json" --set seed="$seed"
evaluate "Measure the base model" --run_name base
phase "Filter for learnable photos" scripts/filter_learnable.py --config $configs/filter.yaml \
  --data_dir "$out/data" --output_dir "$out/filter" --model "$tiny" --backend $backend
phase "Train with GRPO" scripts/train_grpo.py --config $configs/grpo.yaml \
  --data_dir "$out/data" --model "$tiny" --output_dir "$out/grpo" \
  --set trainer.seed="$seed" --set trainer.use_vllm=$use_vllm --resume_from_checkpoint auto
evaluate "Measure the trained model" --run_name rl --lora "$out/grpo"
phase "Write the report" scripts/write_report.py "$out/eval/base/eval_osv" "$out/eval/rl/eval_osv" \
  --training "$out/grpo" --output_dir "$out"
echo "next:   open the report; play against the model: .venv/bin/python scripts/demo_gradio.py"
