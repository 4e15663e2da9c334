#!/usr/bin/env bash
# Lints, type-checks and tests from a fresh clone. --all adds the slow tests; other arguments go to
# pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install all
cd "$ROOT"
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
# A process a core, each with one thread: more threads than cores slow each other many times over.
export OMP_NUM_THREADS=1
chosen=(-m "not slow")
if [ "${1:-}" = "--all" ]; then
  shift
  chosen=()
fi
# A file's tests share what they set up; the files with few and long tests must not come last.
exec "$PYTHON" -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder \
  --durations 10 "${chosen[@]}" "$@"
