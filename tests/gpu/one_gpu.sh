#!/bin/bash
# Test and measure Cairn's engines on one GPU in at most 470 seconds: docs/gpus.md.
#
#   tests/gpu/one_gpu.sh wheels [3.12]    where there is a network: load what the other machine lacks, for its Python
#   tests/gpu/one_gpu.sh                  on the machine with the GPU, from the root of a copy of this tree
#
# The other machine needs bash, and a Python with torch, transformers, peft, pyarrow, pillow, psutil, pytest,
# pytest-timeout and pytest-xdist; it needs no network, Ray, Prefect or SGLang. Environment variables:
#
#   PYTHON   its interpreter (python3)
#   OUT      the folder for log and findings.jsonl (build/gpu); both grow while the script runs
#   WHEELS   the folder of the wheels (build/wheels)
#   LIMIT    seconds that everything may take (470)
#   DEVICE   cuda, or cpu with tiny models, to try the script itself
set -u
CARRIED="pydantic pydantic_core annotated-types typing-inspection tenacity megatron-core transformers tokenizers"
ROOT=$(cd "$(dirname "$0")/../.." && pwd)
WHEELS=${WHEELS:-$ROOT/build/wheels}
PYTHON=${PYTHON:-python3}

if [ "${1:-}" = wheels ]; then
  rm -rf "$WHEELS" && mkdir -p "$WHEELS"
  for package in $CARRIED; do
    "$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --python-version "${2:-3.12}" --implementation cp \
      --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 \
      --platform manylinux2014_x86_64 --dest "$WHEELS" "$(grep "^$package==" "$ROOT/constraints.txt")" || exit 1
  done
  du -ch "$WHEELS"/*
  exit
fi

OUT=${OUT:-$ROOT/build/gpu}
LIMIT=${LIMIT:-470}
DEVICE=${DEVICE:-cuda}
WORK=$(mktemp -d)
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
: > "$OUT/log"
: > "$OUT/findings.jsonl"
[ -w /dev/shm ] && [ "$(df --output=avail -BG /dev/shm | tail -1 | tr -dc 0-9)" -ge 8 ] && MODELS=$(mktemp -d -p /dev/shm)
MODELS=${MODELS:-$WORK/models}
trap 'rm -rf "$WORK" "$MODELS"' EXIT
FAILED=""

say() { echo "=== $SECONDS s: $*" | tee -a "$OUT/log"; }

# section NAME SECONDS COMMAND…: run a command for so long at most, and no longer than the whole limit permits.
section() {
  local name=$1 limit=$2 left=$((LIMIT - SECONDS)) status
  shift 2
  if [ $left -lt 10 ]; then
    say "$name: left out, no time"
    FAILED="$FAILED $name"
    return
  fi
  [ "$limit" -gt $left ] || [ "$DEVICE" = cpu ] && limit=$left
  say "$name: at most $limit s"
  timeout --kill-after=5 "$limit" "$@" 2>&1 | tee -a "$OUT/log"
  status=${PIPESTATUS[0]}
  [ "$status" -ne 0 ] && FAILED="$FAILED $name"
  say "$name: ended with status $status"
}

measure() { section "$1" "$2" "$PYTHON" -m bench.gpu "$1" --device "$DEVICE" --models "$MODELS" --json "$OUT/findings.jsonl" $SMALL; }

# The folder `cairn` of the tree lacks the subpackages; in this copy it has them, as an installed one does.
mkdir -p "$WORK/tree/cairn" "$WORK/site"
cp -r "$ROOT"/cairn/. "$WORK/tree/cairn/"
for folder in configs engines flows storage tasks; do cp -r "$ROOT/$folder" "$WORK/tree/cairn/"; done
cp -r "$ROOT"/{tests,bench,pyproject.toml} "$WORK/tree/"
cd "$WORK/tree" || exit 1
if compgen -G "$WHEELS/*.whl" > /dev/null; then
  "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$WORK/site" "$WHEELS"/*.whl || exit 1
fi
export PYTHONPATH="$WORK/site:$WORK/tree" PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
SMALL="" WORKERS=6
[ "$DEVICE" = cpu ] && SMALL=--smoke WORKERS=0

section machine 60 "$PYTHON" -m tests.gpu.machine --json "$OUT/findings.jsonl"
# Several processes share the GPU, so nothing here is timed. Without a compiler's minutes: the models are tiny.
TORCHDYNAMO_DISABLE=1 section tests 140 "$PYTHON" -m pytest --noconftest -c pyproject.toml --rootdir . -p no:cacheprovider -n $WORKERS --dist load \
  --timeout 100 -v tests/gpu/test_torch_engine.py tests/gpu/test_transformers_engine.py tests/gpu/test_megatron_engine.py tests/gpu/test_memory.py
# From here on each section is alone on the GPU; those that the most depends on come first.
TORCHDYNAMO_DISABLE=1 measure logprobs 50
measure broadcast 30
measure handles 40
measure torch 80
TORCHDYNAMO_DISABLE=1 measure megatron 90
measure deterministic 50
measure nondeterministic 50
measure rollout 45
measure absent 45
say "done; failed or cut:${FAILED:- none}"
[ -z "$FAILED" ]
