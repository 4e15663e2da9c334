#!/usr/bin/env bash
# Every phase of the weekend in order, from the photos to an exported adapter. A phase that is done is
# skipped, the first that fails ends the run, and the same command continues, killed at any moment.
#
#   bash runbook/weekend.sh [--config_dir configs] [--data_dir DIR] [--output_dir DIR]
#                           [--repo_id OWNER/NAME] [--skip_smoke] [--dry_run]
#
# --config_dir configs/embedded runs all of it on drawings, on a laptop. --repo_id pushes the adapter to
# the Hub, private. --dry_run says what is to do, and what training costs.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

configs="$ROOT/configs" data="" out="" push=() smoke=true dry_run=false
while [ $# -gt 0 ]; do
  case "$1" in
    --dry_run) dry_run=true && shift && continue ;;
    --skip_smoke) smoke=false && shift && continue ;;
    --config_dir | --data_dir | --output_dir | --repo_id) ;;
    *) fail "unknown option $1; the head of runbook/weekend.sh names them" ;;
  esac
  [ $# -gt 1 ] || fail "$1 takes a value"
  case "$1" in
    --config_dir) configs="$2" ;;
    --data_dir) data="$2" ;;
    --output_dir) out="$2" ;;
    --repo_id) push=(--push adapter --repo_id "$2") ;;
  esac
  shift 2
done
[ -f "$configs/grpo.yaml" ] || fail "$configs holds no grpo.yaml; give the folder of the configs"
[ -x "$PYTHON" ] || fail "there is no .venv yet; run runbook/runpod_setup.sh or runbook/quickstart.sh first"

embedded=false
[ "$(basename "$configs")" != embedded ] || embedded=true
if $embedded; then
  out="${out:-$ROOT/outputs/weekend-embedded}"
  data="${data:-$out/data}" training="$out/grpo" base=(--model "$out/base")
  export HF_HUB_OFFLINE=1
else
  out="${out:-$ROOT/outputs}"
  data="${data:-$ROOT/data}" training="$out/grpo-qwen3vl4b" base=()
fi
export TENSORBOARD_LOGGING_DIR="$out/runs" TRANSFORMERS_VERBOSITY=error TOKENIZERS_PARALLELISM=false
stamps="$out/weekend"

# Runs a phase unless it was done with the same command and the same configs.
phase() {
  local title="$1" stamp did
  shift
  stamp="$stamps/$(tr ' ' '-' <<<"$title")"
  did="$({ printf '%s\n' "$@" && cat "$configs"/*.yaml; } | cksum)"
  if [ "$(cat "$stamp" 2>/dev/null)" = "$did" ]; then
    echo "done:    $title"
  elif $dry_run; then
    printf 'to do:   %s\n        ' "$title"
    printf ' %q' "${@/#"$ROOT"\//}"
    echo
  else
    printf '\n%s (%dm%02ds)\n' "$title" $((SECONDS / 60)) $((SECONDS % 60))
    "$@"
    mkdir -p "$stamps"
    echo "$did" >"$stamp.partial"
    mv "$stamp.partial" "$stamp"
  fi
}
run() {
  local title="$1" script="$2"
  shift 2
  phase "$title" "$PYTHON" "$ROOT/scripts/$script" "$@"
}
evaluate() { # a title, a run's name, a split, flags
  run "$1" run_eval.py --config "$configs/eval.yaml" --data_dir "$data" --output_dir "$out/eval" \
    "${base[@]}" --run_name "$2" --split "$3" "${@:4}"
}

source_flags=()
if $embedded; then
  run "draw the embedded world" draw_embedded.py "$out/embedded"
  source_flags=(--source "$out/embedded/world")
fi
run "prepare the data" prepare_data.py --config "$configs/data.yaml" --output_dir "$data" "${source_flags[@]}"
if $embedded; then
  run "warm up" warmup_sft.py --config "$configs/warmup.yaml" --data_dir "$data" \
    --model "$out/embedded/tiny" --output_dir "$out/base" --clues "$out/embedded/world/clues.json"
fi
splits=(eval_osv)
$embedded || splits+=(eval_pano)
for split in "${splits[@]}"; do
  evaluate "measure the base on $split" base "$split"
done
if $smoke; then
  phase "smoke test" bash "$ROOT/runbook/smoke_test.sh" --config "$configs/grpo.yaml" \
    --data_dir "$data" "${base[@]}" --output_dir "$out/smoke"
fi
run "filter" filter_learnable.py --config "$configs/filter.yaml" --data_dir "$data" \
  --output_dir "$out/filter" "${base[@]}"
run "train" train_grpo.py --config "$configs/grpo.yaml" --data_dir "$data" "${base[@]}" \
  --output_dir "$training" --resume_from_checkpoint auto
run "measure the checkpoints" eval_checkpoints.py "$training" --config "$configs/eval.yaml" \
  --data_dir "$data" --output_dir "$out/eval" "${base[@]}"
for split in "${splits[@]}"; do
  evaluate "measure the trained model on $split" rl "$split" --lora "$training"
done
run "write the report" write_report.py "$out/eval/base/eval_osv" "$out/eval/rl/eval_osv" \
  --training "$training" --output_dir "$out"
run "export" merge_and_export.py --config "$configs/export.yaml" --data_dir "$data" "${base[@]}" \
  --lora "$training" --output_dir "$out/merged" --set base_run="$out/eval/base/eval_osv" \
  --set tuned_run="$out/eval/rl/eval_osv" "${push[@]}"

if $dry_run; then
  echo
  exec "$PYTHON" "$ROOT/scripts/plan_run.py" --config "$configs/grpo.yaml" "${base[@]}"
fi
echo
echo "report:  $out/report.html"
printf 'next:    %q %q --lora %q --data_dir %q --report %q\n' "$PYTHON" "$ROOT/scripts/demo_gradio.py" \
  "$training" "$data" "$out/report.html"
