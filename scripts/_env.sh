# shellcheck shell=bash
# The virtual environment of the scripts beside this file. Sourced, not run. Defines ROOT and
# prepare_env EXTRA ("" or "dev"), which makes or reuses the environment and sets PY to its Python.
#
# Settings, all optional:
#   VENV    where the environment is or will be made   (default: .venv in the repository)
#   PYTHON  the Python to make it with, 3.11 or later  (default: the first one on PATH)
#
# How PyTorch is installed. An environment that has a fitting PyTorch keeps it. Otherwise the rows
# are tried in order, each with both tools, and with the tested version before any from 2.9 on:
#
#   machine        row  build
#   NVIDIA GPU      1   auto: uv's choice for the driver; pip's, checked to be no CPU build
#                   2   default: what the index offers
#   no NVIDIA GPU   1   cpu: checked to bring no CUDA packages
#                   2   default: several GB on most indexes; it works on CPUs too
#   any                 no row worked: an error, exit code 2
#
#   pip's configuration names an index or a folder of wheels:  first pip, then uv
#   otherwise:                                                 first uv, then pip
#
# uv is faster and knows where all builds of PyTorch are, but it does not read pip's configuration.
# It is taken from PATH, or pip installs it into the environment. No index is named in this file.

ROOT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${VENV:-$ROOT/.venv}"
case "$VENV" in /*) ;; *) VENV="$PWD/$VENV" ;; esac
PY="$VENV/bin/python"
# Threads that wait must sleep: spinning ones make PyTorch ten times slower on a shared machine.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
TORCH_TESTED="torch==2.13.0"
TORCH_ANY="torch>=2.9" # as in pyproject.toml
FOUND_UV=""            # the command that has_uv found, or "none"

say() { printf '==> %s\n' "$*" >&2; }

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

is_new_python() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

make_venv() {
  local python names=(python3 python3.13 python3.12 python3.11 python3.14 python)
  if [ -n "${PYTHON:-}" ]; then names=("$PYTHON"); fi
  say "making a virtual environment in $VENV"
  for python in "${names[@]}"; do
    if is_new_python "$python" && "$python" -m venv "$VENV"; then return; fi
  done
  # uv needs neither Python's venv module nor, unless PYTHON names one, a Python.
  if command -v uv >/dev/null &&
    uv venv --quiet --seed --allow-existing --python "${PYTHON:->=3.11}" "$VENV"; then return; fi
  fail "cannot make a virtual environment in $VENV with ${PYTHON:-any Python on PATH}. This needs" \
    "Python 3.11 or later with its venv module (Debian: python3-venv); name one with" \
    "PYTHON=/path/to/python bash $0"
}

# Runs a command for at most $1 seconds. The alarm is Python's, because macOS has no `timeout`.
bounded() {
  "$PY" -c 'import os, signal, sys
signal.alarm(int(sys.argv[1]))
os.execvp(sys.argv[2], sys.argv[2:])' "$@"
}

has_uv() {
  if [ -z "$FOUND_UV" ]; then
    FOUND_UV=none
    if command -v uv >/dev/null; then
      FOUND_UV=uv
    elif install_with pip 120 --retries 1 --only-binary :all: uv 2>/dev/null; then
      FOUND_UV="$VENV/bin/uv"
    fi
  fi
  [ "$FOUND_UV" != none ]
}

# Installs with tool $1 in at most $2 seconds. The other arguments are the tool's own.
install_with() {
  local tool="$1" seconds="$2"
  shift 2
  case "$tool" in
    pip) bounded "$seconds" "$PY" -m pip install --quiet --disable-pip-version-check "$@" ;;
    uv) has_uv && bounded "$seconds" "$FOUND_UV" pip install --python "$PY" "$@" ;;
  esac
}

# Prints both tools in the order in which they are tried. (Here and below not `grep -q`: it stops
# reading at the first match, and under pipefail the broken pipe of the writer would count as "no".)
tools() {
  if "$PY" -m pip config list 2>/dev/null |
    grep -E '^[^=]*(index-url|find-links|no-index)=' >/dev/null; then
    echo pip uv
  else
    echo uv pip
  fi
}

has_nvidia_gpu() {
  if command -v nvidia-smi >/dev/null; then
    nvidia-smi -L 2>/dev/null | grep GPU >/dev/null
  else
    [ -e /proc/driver/nvidia/version ]
  fi
}

has_torch() {
  "$PY" -c 'import torch
major, minor = torch.__version__.split(".")[:2]
raise SystemExit((int(major), int(minor)) < (2, 9))' 2>/dev/null
}

# Whether tool $1 would install requirement $2 without any CUDA package. A dry run of pip downloads
# what it would install, so it is asked for the wheel of torch alone, which names the others.
is_cpu_build() {
  local found
  case "$1" in
    pip) install_with pip 300 --retries 1 --dry-run --no-deps --report - "$2" 2>/dev/null |
      "$PY" -c 'import json, sys
from pip._vendor.packaging.requirements import Requirement
(torch,) = json.load(sys.stdin)["install"]
needs = map(Requirement, torch["metadata"].get("requires_dist", ()))
names = [need.name for need in needs if not need.marker or need.marker.evaluate({"extra": ""})]
sys.exit(any(name.lower().startswith(("nvidia-", "cuda-")) for name in names))' 2>/dev/null ;;
    uv) has_uv && found="$(install_with uv 60 --dry-run --torch-backend=cpu "$2" 2>&1)" &&
      ! grep -qiE '^ *\+ (nvidia|cuda)-' <<<"$found" ;;
  esac
}

# Installs build $2 of requirement $3 with tool $1.
try_torch() {
  local tool="$1" build="$2" requirement="$3" options=(--quiet)
  say "installing PyTorch: trying $requirement, $build build, with $tool"
  case "$build $tool" in
    cpu*) is_cpu_build "$tool" "$requirement" || return 1 ;;
    "auto pip") if is_cpu_build pip "$requirement"; then return 1; fi ;;
  esac
  if [ "$tool" = uv ] && [ "$build" != default ]; then options+=("--torch-backend=$build"); fi
  install_with "$tool" 3600 "${options[@]}" "$requirement"
}

install_torch() {
  local rows="cpu default" build tool requirement
  if has_torch; then return; fi
  if has_nvidia_gpu; then rows="auto default"; fi
  for build in $rows; do
    if [ "$rows $build" = "cpu default default" ]; then
      say "found no PyTorch without CUDA packages: installing the default build, several GB in all." \
        "It works on CPUs too"
    fi
    for tool in $(tools); do
      for requirement in "$TORCH_TESTED" "$TORCH_ANY"; do
        if try_torch "$tool" "$build" "$requirement"; then return; fi
      done
    done
  done
  fail "neither uv nor pip could install PyTorch into $VENV (see above). Check the network and pip's" \
    "index (PIP_INDEX_URL or pip.conf), or install torch 2.9 or later yourself; then run this again"
}

install_project() {
  local extra="$1" tool
  for tool in $(tools); do
    say "installing spec-data${extra:+ with its $extra tools} into $VENV with $tool"
    if install_with "$tool" 3600 --quiet --editable "$ROOT${extra:+[$extra]}"; then return; fi
  done
  fail "neither uv nor pip could install what spec-data needs into $VENV (see above). Check the" \
    "network and pip's index (PIP_INDEX_URL or pip.conf), then run this again"
}

# What an installation of extra $1 depends on. While it is unchanged, nothing has to be done.
stamp_of() { printf '%s [%s] %s\n' "$ROOT" "$1" "$(cksum <"$ROOT/pyproject.toml")"; }

is_installed() {
  local stamp
  stamp="$(stamp_of "$1")"
  [ -x "$PY" ] && grep -qxF -- "$stamp" "$VENV/.spec-data-installed" 2>/dev/null
}

prepare_env() {
  local extra="$1"
  if is_installed "$extra" || is_installed dev; then return; fi
  trap 'exit 130' INT # pip ends Ctrl-C with an ordinary error: the next attempt must not start
  # An environment that uv made has no pip yet.
  "$PY" -m pip --version >/dev/null 2>&1 || "$PY" -m ensurepip >/dev/null 2>&1 || make_venv
  is_new_python "$PY" ||
    fail "$VENV holds $("$PY" --version 2>&1), but 3.11 or later is needed; delete it, or set VENV"
  install_torch
  install_project "$extra"
  stamp_of "$extra" >"$VENV/.spec-data-installed"
  trap - INT
}
