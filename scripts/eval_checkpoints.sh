#!/usr/bin/env bash
# Measures every checkpoint of a training run on eval_quick with one engine:
#
#   bash scripts/eval_checkpoints.sh outputs/grpo-qwen3vl4b [flags of eval_checkpoints.py]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="$root/.venv/bin/python"
[ -x "$python" ] || python=python3
exec "$python" "$root/scripts/eval_checkpoints.py" "$@"
