# shellcheck shell=bash
# The virtual environment of the scripts beside this file. Sourced, not run. Defines ROOT and
# prepare_env EXTRA ("" or "test"), which makes or reuses the environment and sets PY to its Python.
#
# Settings, all optional:
#   VENV    where the environment is or will be made   (default: .venv in the repository)
#   PYTHON  the Python to make it with, 3.11 or later  (default: the first one on PATH)
#
# PyTorch is kept if the environment has a fitting one, else the tested version is tried before any
# newer one. pip installs if its configuration names an index or a folder of wheels, else uv, which
# takes the build for this machine (pip takes what the index offers, often several GB). uv is taken
# from PATH, or pip installs it. No index is named in this file.

ROOT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${VENV:-$ROOT/.venv}"
case "$VENV" in /*) ;; *) VENV="$PWD/$VENV" ;; esac
PY="$VENV/bin/python"
# Threads that wait must sleep: spinning ones make PyTorch ten times slower on a shared machine.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
# These scripts start dozens of processes: each would compile all modules again, which takes seconds.
unset PYTHONDONTWRITEBYTECODE
TORCH_TESTED="torch==2.13.0"
TORCH_ANY="torch>=2.13" # as in pyproject.toml

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

# Decides what installs: UV is the command, or empty for pip. (Not `grep -q`: it stops reading at the
# first match, and under pipefail the broken pipe of the writer would count as "no".)
choose_tool() {
  UV=""
  if "$PY" -m pip config list 2>/dev/null |
    grep -E '^[^=]*(index-url|find-links|no-index)=' >/dev/null; then return; fi
  if command -v uv >/dev/null; then
    UV=uv
  elif "$PY" -m pip install --quiet --disable-pip-version-check --only-binary :all: uv; then
    UV="$VENV/bin/uv"
  fi
}

install() {
  if [ -z "$UV" ]; then
    "$PY" -m pip install --quiet --disable-pip-version-check "$@"
  else
    "$UV" pip install --quiet --torch-backend=auto --python "$PY" "$@"
  fi
}

has_torch() {
  "$PY" -c 'import torch
major, minor = torch.__version__.split(".")[:2]
raise SystemExit((int(major), int(minor)) < (2, 13))' 2>/dev/null
}

install_torch() {
  local requirement
  if has_torch; then return; fi
  for requirement in "$TORCH_TESTED" "$TORCH_ANY"; do
    say "installing PyTorch: trying $requirement with ${UV:-pip}"
    if install "$requirement"; then return; fi
  done
  fail "${UV:-pip} could not install PyTorch into $VENV (see above). Check the network and the index" \
    "(PIP_INDEX_URL or pip.conf), or install torch 2.13 or later yourself; then run this again"
}

install_project() {
  say "installing spec-data${1:+ with its $1 tools} into $VENV with ${UV:-pip}"
  if [ "$1" = test ]; then # a release of today must not break the tests
    if install --editable "$ROOT[test]" --constraint "$ROOT/.ci/constraints.txt"; then return; fi
    say "not to be had in the tested versions: trying any that fit"
  fi
  install --editable "$ROOT${1:+[$1]}" ||
    fail "${UV:-pip} could not install what spec-data needs into $VENV (see above). Check the network" \
      "and the index (PIP_INDEX_URL or pip.conf), then run this again"
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
  if is_installed "$extra" || is_installed test; then return; fi
  trap 'exit 130' INT # pip ends Ctrl-C with an ordinary error: the next attempt must not start
  # An environment that uv made has no pip yet.
  "$PY" -m pip --version >/dev/null 2>&1 || "$PY" -m ensurepip >/dev/null 2>&1 || make_venv
  is_new_python "$PY" ||
    fail "$VENV holds $("$PY" --version 2>&1), but 3.11 or later is needed; delete it, or set VENV"
  choose_tool
  install_torch
  install_project "$extra"
  stamp_of "$extra" >"$VENV/.spec-data-installed"
  trap - INT
}
