#!/usr/bin/env bash
# Compiles both lock files from pyproject.toml. Arguments go to uv, --upgrade for example.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
uv="$(find_uv)"
cd "$ROOT"
compile() {
  "$uv" pip compile pyproject.toml --extra train --extra api --extra demo --extra screen --extra ray --extra dev \
    --python-version 3.11 --generate-hashes --no-header --quiet "$@"
}
compile --extra cpu --universal --output-file runbook/requirements-cpu.lock "$@"
compile --extra gpu --python-platform x86_64-unknown-linux-gnu --output-file requirements.lock "$@"
