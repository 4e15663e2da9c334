#!/usr/bin/env bash
# Sets up a rented GPU machine with the PyTorch image and a network volume, checking first what would
# fail later. Safe to run again; what is there already takes no time.
#
#   bash runbook/runpod_setup.sh
#   source /workspace/geoguessr-rl.env       # in every new shell
#
# WORKSPACE      the network volume, /workspace unless set
# FLASH_ATTN     a prebuilt flash-attn wheel for this torch, as a file or an address
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

WORKSPACE="${WORKSPACE:-/workspace}"
LOCK="$ROOT/requirements.lock"
ENVIRONMENT="$WORKSPACE/geoguessr-rl.env"
NEEDED_GB=60           # packages 12, weights 9, data and zips 25, checkpoints and a merged model 14
GPU_MB=78000           # what the plan counts with: 80 GB
FLASH_ATTN_SECONDS=300 # a wheel is downloaded in less; a build from source would take an hour

[ -d "$WORKSPACE" ] || fail "there is no $WORKSPACE; attach the network volume there, or set WORKSPACE"
probe="$(mktemp -p "$WORKSPACE" 2>/dev/null)" || # as root, -w is true of anything
  fail "$WORKSPACE cannot be written; attach the volume for writing, or set WORKSPACE"
rm "$probe"

command -v nvidia-smi >/dev/null || fail "this machine has no nvidia-smi; rent one with an NVIDIA GPU"
gpu="$(nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader,nounits | head -n 1)" ||
  fail "nvidia-smi finds no GPU that works; restart the machine, or rent another"
IFS=',' read -r name memory driver <<<"$gpu"
[[ "$memory" =~ ^\ *[0-9]+$ ]] || fail "nvidia-smi finds no GPU that works (it says: $gpu); rent another"
driver="${driver# }"

# A driver runs every CUDA of its own major version and older ones.
cuda="$(sed -n 's/^nvidia-cuda-runtime\(-cu12\)\{0,1\}==\([0-9]*\)\..*/\2/p' "$LOCK" | head -n 1)"
case "$cuda" in
  12) needed_driver=525 ;;
  13) needed_driver=580 ;;
  *) fail "$LOCK names no CUDA runtime of version 12 or 13; check out the repository again" ;;
esac
[ "${driver%%.*}" -ge "$needed_driver" ] ||
  fail "driver $driver does not run CUDA $cuda, which torch needs; rent a machine with driver $needed_driver or newer"

free_gb="$(df --output=avail -B 1000000000 "$WORKSPACE" | tail -n 1 | tr -d ' ')"
if [ ! -x "$PYTHON" ] && [ "$free_gb" -lt "$NEEDED_GB" ]; then
  fail "$WORKSPACE has $free_gb GB free and $NEEDED_GB are needed; make the volume larger"
fi
echo "gpu:     $name,$memory MB, driver $driver; CUDA $cuda fits"
echo "volume:  $WORKSPACE, $free_gb GB free"
[ "$memory" -ge "$GPU_MB" ] ||
  echo "note:    the plan is made for 80 GB; scripts/plan_run.py says what fits this one"

# Everything large goes to the volume, which outlives the machine.
export UV_CACHE_DIR="$WORKSPACE/uv-cache" UV_LINK_MODE=copy
if [ ! -e "$ROOT/.venv" ]; then
  case "$ROOT/" in
    "$WORKSPACE"/*) ;;
    *)
      mkdir -p "$WORKSPACE/geoguessr-rl-venv"
      ln -sfn "$WORKSPACE/geoguessr-rl-venv" "$ROOT/.venv"
      ;;
  esac
fi
if [ ! -x "$PYTHON" ]; then
  uv="$(find_uv)"
  echo uv | timeout 60 "$uv" pip compile --quiet --no-header - >/dev/null 2>&1 ||
    fail "the package index cannot be reached; check the machine's network and proxy"
fi
install all

attention=sdpa
if "$PYTHON" -c 'import flash_attn' 2>/dev/null; then
  attention="flash_attention_2"
elif timeout "$FLASH_ATTN_SECONDS" "$(find_uv)" pip install --quiet --python "$PYTHON" --no-deps \
  --only-binary :all: "${FLASH_ATTN:-flash-attn}" >/dev/null 2>&1 &&
  "$PYTHON" -c 'import flash_attn' 2>/dev/null; then
  attention="flash_attention_2"
fi
echo "attention: $attention"

cat >"$ENVIRONMENT.partial" <<EOF
# Written by runbook/runpod_setup.sh; source it in every new shell.
export HF_HOME="$WORKSPACE/huggingface"
export HF_XET_HIGH_PERFORMANCE=1
export VLLM_WORKER_MULTIPROC_METHOD=spawn
export TOKENIZERS_PARALLELISM=false
export UV_CACHE_DIR="$UV_CACHE_DIR" UV_LINK_MODE=copy
cd "$ROOT"
EOF
mv "$ENVIRONMENT.partial" "$ENVIRONMENT"

"$(find_uv)" pip freeze --python "$PYTHON" >"$WORKSPACE/geoguessr-rl-versions.txt"
"$PYTHON" - <<'EOF'
from importlib.metadata import PackageNotFoundError, version
for name in ("torch", "vllm", "transformers", "trl", "peft", "flash-attn"):
    try:
        print(f"  {name:14} {version(name)}")
    except PackageNotFoundError:
        print(f"  {name:14} not installed")
EOF
echo "versions: $WORKSPACE/geoguessr-rl-versions.txt"
echo "next:    source $ENVIRONMENT; then bash runbook/weekend.sh --dry_run"
