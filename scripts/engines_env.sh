#!/usr/bin/env bash
# Make the environment in which the tests compare our exports with real engines, on a CPU.
set -euo pipefail

usage() {
  cat <<'END'
usage: bash scripts/engines_env.sh [--run [PYTEST ARGUMENT ...]]

Makes or reuses a virtual environment with the releases of tests/engines/requirements.txt (vLLM for
CPUs, the speculators library, llama.cpp's bindings) and llama.cpp's converter; about 4 GB. With
--run it then runs the tests that need them, for example:
  bash scripts/engines_env.sh --run -k eagle3

Environment: ENGINES_VENV (default .venv-engines in the repository), PYTHON (3.11 or later).
END
}

case "${1:-}" in -h | --help)
  usage
  exit 0
  ;;
esac

VENV="${ENGINES_VENV:-$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)/.venv-engines}"
# shellcheck source=scripts/_env.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/_env.sh"
cd "$ROOT"
CONVERTER="$(sed -n 's/^package = "\(llama-cpp-python==[^"]*\)".*/\1/p' spec_data/models/engines.toml)"
[ -x "$PY" ] || make_venv
if ! "$PY" -c 'import vllm, speculators, xllamacpp, pytest' 2>/dev/null; then
  choose_tool
  install_torch
  say "installing the engines"
  "$PY" -m pip install --quiet -r tests/engines/requirements.txt --editable .
  # These come as CUDA builds only, and transformers fails to import where one is installed.
  "$PY" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
fi
if [ ! -d "$VENV/llama.cpp" ]; then
  say "fetching llama.cpp's converter"
  fetched="$(mktemp -d)"
  "$PY" -m pip download --quiet --no-deps --no-binary :all: --dest "$fetched" "$CONVERTER"
  tar -xzf "$fetched"/*.tar.gz -C "$fetched" --wildcards \
    '*/llama.cpp/convert_hf_to_gguf.py' '*/llama.cpp/conversion' '*/llama.cpp/gguf-py'
  mv "$fetched"/*/vendor/llama.cpp "$VENV/llama.cpp"
  rm -r "$fetched"
fi
say "$("$PY" -c 'import torch, transformers, vllm; print("vLLM", vllm.__version__,
  "PyTorch", torch.__version__, "transformers", transformers.__version__)' 2>/dev/null)"
if [ "${1:-}" = --run ]; then
  shift
  PYTHONPATH="$ROOT" "$PY" -m pytest -p no:xdist -m engines tests/engines "$@"
fi
