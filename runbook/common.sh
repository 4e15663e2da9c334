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
    local python
    python="$(command -v python3.13 || command -v python3.12 || command -v python3.11 ||
      command -v python3)" || fail "no python3 found; install Python 3.11 or newer"
    "$python" -m venv "$ROOT/.uv" >&2 ||
      fail "python3 cannot make a virtual environment; install python3-venv, or uv itself"
    "$ROOT/.uv/bin/python" -m pip install --quiet uv >&2 ||
      fail "uv could not be installed with pip; check the network, or install uv yourself"
  fi
  echo "$ROOT/.uv/bin/uv"
}

# The lock without vLLM and what only vLLM needs, for machines that sample with transformers.
# $1: comma-separated extras that are wanted.
install() {
  local extras="$1" stamp wanted uv
  stamp="$ROOT/.venv/.installed-$extras"
  wanted="$(cat "$ROOT/pyproject.toml" "$LOCK" | cksum)"
  if [ -x "$PYTHON" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    return
  fi
  uv="$(find_uv)" || exit 2
  echo "Installing the packages of the lock file into .venv ..."
  [ -x "$PYTHON" ] || "$uv" venv --quiet --python '>=3.11,<3.14' "$ROOT/.venv"
  if [ "$extras" = all ]; then
    "$uv" pip install --quiet --python "$PYTHON" --no-deps --require-hashes --compile-bytecode \
      --requirements "$LOCK"
  else
    # The lock pins and hashes whatever these extras need; what they do not need stays out.
    (cd "$ROOT" && "$uv" pip install --quiet --python "$PYTHON" --compile-bytecode \
      --constraints "$LOCK" --requirements pyproject.toml --extra "$extras")
  fi
  "$uv" pip install --quiet --python "$PYTHON" --no-deps --editable "$ROOT"
  rm -f "$ROOT"/.venv/.installed-*
  echo "$wanted" >"$stamp"
}
