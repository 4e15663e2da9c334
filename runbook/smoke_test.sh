#!/usr/bin/env bash
# Before the long run: the pre-flight, then 20 real steps on 256 photos. Prints seconds a step, the
# steps that fit the budget, and fails when the model does not answer or no group has any spread.
#
#   bash runbook/smoke_test.sh [--config FILE] [--data_dir DIR] [--model NAME] [--output_dir DIR]
#                              [--split NAME] [--budget_hours H] [--skip_preflight] [--set A.B=VALUE]...
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

out="$ROOT/outputs/smoke" split=train_pool hours=8 preflight=true common=()
while [ $# -gt 0 ]; do
  case "$1" in
    --skip_preflight)
      preflight=false
      shift
      continue
      ;;
    --config | --data_dir | --model | --set | --output_dir | --split | --budget_hours) ;;
    *) fail "unknown option $1; the head of runbook/smoke_test.sh names them" ;;
  esac
  [ $# -gt 1 ] || fail "$1 takes a value"
  case "$1" in
    --output_dir) out="$2" ;;
    --split) split="$2" ;;
    --budget_hours) hours="$2" ;;
    *) common+=("$1" "$2") ;;
  esac
  shift 2
done
[ -x "$PYTHON" ] || fail "there is no .venv yet; install the packages of the lock file first"
common+=(--split "$split" --limit 256 --set "trainer.output_dir=$out")

if $preflight; then
  "$PYTHON" "$ROOT/scripts/preflight.py" "${common[@]}"
fi
"$PYTHON" "$ROOT/scripts/train_grpo.py" "${common[@]}" --set trainer.max_steps=20 \
  --set trainer.save_strategy=no --set trainer.report_to=none --set trainer.logging_steps=1
"$PYTHON" "$ROOT/scripts/smoke_verdict.py" "$out" --budget_hours "$hours"
