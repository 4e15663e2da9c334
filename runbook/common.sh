# shellcheck shell=bash
# Sourced by quickstart.sh and run_tests.sh: obtains uv, makes .venv, installs from the lock.
# Works from any folder and in paths with spaces; when everything is there it takes no time.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="$ROOT/.venv/bin/python"
LOCK="$ROOT/runbook/requirements-cpu.lock"

fail() {
  echo "error: $1" >&2
  exit 2
}

# Prints the path of uv; installs it into .uv when it is missing.
find_uv() {
  if command -v uv >/dev/null 2>&1; then
    command -v uv
    return
  fi
  if [ ! -x "$ROOT/.uv/bin/uv" ]; then
    local candidate python=""
    for candidate in python3 python3.13 python3.12 python3.11; do
      if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python="$candidate"
        break
      fi
    done
    [ -n "$python" ] || fail "no Python 3.11 or newer found; install one, or uv itself"
    "$python" -m venv "$ROOT/.uv" >&2 ||
      fail "python3 cannot make a virtual environment; install python3-venv, or uv itself"
    "$ROOT/.uv/bin/python" -m pip install --quiet uv >&2 ||
      fail "uv could not be installed with pip; check the network, or install uv yourself"
  fi
  echo "$ROOT/.uv/bin/uv"
}

# Installs the package and what it needs, pinned and hashed by the lock; does nothing the second time.
# $1: "all", or the extras that are wanted, with commas between them.
install() {
  local wanted done_before uv extra flags=()
  wanted="$(cat "$ROOT/pyproject.toml" "$LOCK" | cksum)"
  for done_before in "$1" all; do
    if [ -x "$PYTHON" ] && [ "$(cat "$ROOT/.venv/.installed-$done_before" 2>/dev/null)" = "$wanted" ]; then
      return
    fi
  done
  uv="$(find_uv)"
  echo "Installing the packages of the lock file into .venv ..."
  [ -x "$PYTHON" ] || "$uv" venv --quiet --python '>=3.11,<3.14' "$ROOT/.venv"
  if [ "$1" = all ]; then
    "$uv" pip install --quiet --python "$PYTHON" --no-deps --require-hashes --compile-bytecode \
      --requirements "$LOCK"
  else
    for extra in ${1//,/ }; do flags+=(--extra "$extra"); done
    (cd "$ROOT" && "$uv" pip install --quiet --python "$PYTHON" --compile-bytecode \
      --constraints "$LOCK" --requirements pyproject.toml "${flags[@]}")
  fi
  "$uv" pip install --quiet --python "$PYTHON" --no-deps --editable "$ROOT"
  echo "$wanted" >"$ROOT/.venv/.installed-$1"
}
