#!/usr/bin/env bash
# Set up the environment if needed, then lint, type-check and test.
set -euo pipefail

usage() {
  cat <<'END'
usage: bash scripts/test.sh [--changed [BASE]] [PYTEST ARGUMENT ...]

Makes or reuses a virtual environment, then runs ruff, mypy and the tests, without those that are
marked as long. Arguments go to pytest instead of that, for example:
  bash scripts/test.sh tests/spec_data -k packing
  bash scripts/test.sh -m long       # the long ones
  bash scripts/test.sh -m ''         # all of them
--changed runs the test files that what changed since BASE needs, by the import graph; without BASE,
since this branch left main (scripts/graph.py).

Environment: VENV (default .venv in the repository), PYTHON (3.11 or later, for a new one),
TEST_WORKERS (default 2), TMPDIR (default /dev/shm where it has room for 8 GB).
END
}

case "${1:-}" in -h | --help)
  usage
  exit 0
  ;;
esac

# shellcheck source=scripts/_env.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/_env.sh"
prepare_env test
cd "$ROOT"
"$PY" -m ruff check .
"$PY" -m ruff format --check .
"$PY" -m mypy
if [ "${1:-}" = --changed ]; then
  shift
  base=()
  case "${1:-}" in '' | -*) ;; *)
    base=("$1")
    shift
    ;;
  esac
  files="$("$PY" scripts/graph.py changed "${base[@]}")"
  if [ -z "$files" ]; then
    say "no test depends on what changed"
    exit 0
  fi
  # shellcheck disable=SC2086  # a file a line
  if [ $# -gt 0 ]; then set -- $files "$@"; else set -- $files -m 'not long'; fi
fi
[ $# -gt 0 ] || set -- -m 'not long'
# The tests start hundreds of processes. Where the environment forbids bytecode, each of them would
# compile the product, and each worker would rewrite all tests.
unset PYTHONDONTWRITEBYTECODE
# The tests write tens of thousands of small files, which memory takes faster than most disks.
if [ -z "${TMPDIR:-}" ] && [ "$(df -k --output=avail /dev/shm 2>/dev/null | tail -n 1)" -gt 8000000 ] 2>/dev/null; then
  export TMPDIR=/dev/shm
fi
"$PY" -m pytest -n "${TEST_WORKERS:-2}" --dist worksteal "$@"
