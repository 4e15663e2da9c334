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
if [ "${1:-}" = "--all" ]; then
  shift
  exec "$PYTHON" -m pytest "$@"
fi
exec "$PYTHON" -m pytest -m "not slow" "$@"
