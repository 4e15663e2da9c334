#!/usr/bin/env bash
# Trains the three runs of a published ablation from one base, measures them on the same photos, and
# prints what each one gained:
#
#   bash scripts/run_ablation.sh [--config_dir configs/ablations] [--eval_config configs/eval.yaml]
#     [--data_dir data] [--model M] [--output_dir outputs/ablation] [--limit N] [--backend B]
#     [-- flags of train_grpo.py for all three, like --set trainer.max_steps=100]
#
# --limit measures the first N photos only. Stopped at any moment, the same command continues.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="$root/.venv/bin/python"
[ -x "$python" ] || python=python3

fail() {
  echo "error: $1" >&2
  exit 2
}

config_dir="$root/configs/ablations" out=outputs/ablation
measure=(--config "$root/configs/eval.yaml") train=(--resume_from_checkpoint auto)
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  case "$1" in
    --config_dir | --eval_config | --data_dir | --model | --output_dir | --limit | --backend) ;;
    *) fail "unknown option $1; flags of train_grpo.py go behind --" ;;
  esac
  [ $# -gt 1 ] || fail "$1 takes a value"
  case "$1" in
    --config_dir) config_dir="$2" ;;
    --output_dir) out="$2" ;;
    --eval_config) measure+=(--config "$2") ;;
    --limit | --backend) measure+=("$1" "$2") ;;
    *) measure+=("$1" "$2") train+=("$1" "$2") ;;
  esac
  shift 2
done
[ $# -eq 0 ] || shift

# The base first: a fault in how it is measured shows before the hours of training.
"$python" "$root/scripts/run_eval.py" "${measure[@]}" --run_name base --output_dir "$out/eval"
for run in run1 run2 run3; do
  printf '\n%s\n' "$run"
  "$python" "$root/scripts/train_grpo.py" --config "$config_dir/$run.yaml" "${train[@]}" "$@" \
    --output_dir "$out/$run"
done
echo
exec "$python" "$root/scripts/compare_ablation.py" "$out/run1" "$out/run2" "$out/run3" \
  "${measure[@]}" --output_dir "$out"
