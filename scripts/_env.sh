# The virtual environment of the scripts beside this file. Sourced, not run: defines ROOT and
# prepare_env EXTRA ("" or "dev"), which makes or reuses the environment and sets PY to its Python.
#
# Settings, all optional:
#   VENV    where the environment is or is to be made   (default: .venv in the repository)
#   PYTHON  the Python to make it with, 3.11 or later   (default: the first such on PATH)
#
# PyTorch is installed first, in the build that suits the machine: with an NVIDIA GPU whatever pip
# chooses by default; without one, a build that brings no CUDA packages. No package index is named
# here: pip's own configuration (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, pip.conf) is
# respected, and an environment that already has a fitting PyTorch keeps it.

ROOT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${VENV:-$ROOT/.venv}"
case "$VENV" in /*) ;; *) VENV="$PWD/$VENV" ;; esac
PY="$VENV/bin/python"
# Threads that wait must sleep: spinning ones make PyTorch ten times slower on a shared machine.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
TORCH_TESTED="torch==2.13.0"
TORCH_ANY="torch>=2.9" # as in pyproject.toml

say() { printf '==> %s\n' "$*" >&2; }

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

is_new_python() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then
    is_new_python "$PYTHON" || fail "PYTHON=$PYTHON is not a Python 3.11 or later; point PYTHON at one"
    printf '%s\n' "$PYTHON"
    return
  fi
  for candidate in python3 python3.13 python3.12 python3.11 python3.14 python; do
    if is_new_python "$candidate"; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  fail "no Python 3.11 or later on PATH; install one, or name it: PYTHON=/path/to/python bash $0"
}

make_venv() {
  local python
  python="$(find_python)"
  say "making a virtual environment in $VENV with $("$python" --version)"
  "$python" -m venv "$VENV" ||
    fail "$python cannot make virtual environments; install its venv module (Debian: python3-venv)," \
      "or name another Python: PYTHON=/path/to/python bash $0"
}

has_nvidia_gpu() {
  { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; } ||
    [ -e /proc/driver/nvidia/version ]
}

has_torch() {
  "$PY" - 2>/dev/null <<'PYTHON_END'
import torch
major, minor = torch.__version__.split(".")[:2]
raise SystemExit((int(major), int(minor)) < (2, 9))
PYTHON_END
}

pip_install() { "$PY" -m pip install --quiet --disable-pip-version-check "$@"; }

# Whether pip would install requirement $1 without any CUDA package.
resolves_without_cuda() {
  "$PY" -m pip install --quiet --disable-pip-version-check --dry-run --report - "$1" 2>/dev/null |
    "$PY" -c '
import json, sys
names = {item["metadata"]["name"].lower() for item in json.load(sys.stdin)["install"]}
sys.exit(any(name.startswith(("nvidia-", "cuda-")) for name in names))' 2>/dev/null
}

install_torch() {
  local requirement
  if has_torch; then return; fi
  if has_nvidia_gpu; then
    say "installing PyTorch (NVIDIA GPU found)"
    pip_install "$TORCH_ANY"
    return
  fi
  say "installing PyTorch for the CPU (no NVIDIA GPU found)"
  for requirement in "$TORCH_TESTED" "$TORCH_ANY"; do
    if resolves_without_cuda "$requirement"; then
      pip_install "$requirement"
      return
    fi
  done
  # pip's configured index offers CUDA builds only; uv knows where the CPU builds are.
  if pip_install uv && "$PY" -m uv pip install --quiet --python "$PY" --torch-backend=cpu "$TORCH_ANY"; then
    return
  fi
  fail "no CPU-only build of PyTorch could be reached from this machine, and the default build" \
    "brings several GB of CUDA packages. Point pip at an index that has CPU builds" \
    "(PIP_EXTRA_INDEX_URL), install torch into $VENV yourself, or use another PYTHON"
}

# What an installation of extra $1 depends on; when it is unchanged nothing needs doing.
stamp_of() { printf '%s [%s] %s\n' "$ROOT" "$1" "$(cksum <"$ROOT/pyproject.toml")"; }

is_installed() {
  local stamp
  stamp="$(stamp_of "$1")"
  [ -x "$PY" ] && grep -qxF -- "$stamp" "$VENV/.spec-data-installed" 2>/dev/null
}

prepare_env() {
  local extra="$1"
  if is_installed "$extra" || is_installed dev; then return; fi
  "$PY" -m pip --version >/dev/null 2>&1 || make_venv
  is_new_python "$PY" ||
    fail "$VENV holds $("$PY" --version 2>&1), but 3.11 or later is needed; delete it, or set VENV"
  install_torch
  say "installing spec-data${extra:+ with its $extra tools} into $VENV"
  pip_install --editable "$ROOT${extra:+[$extra]}"
  stamp_of "$extra" >"$VENV/.spec-data-installed"
}
