#!/usr/bin/env bash
# Set up the environment if needed, then lint, type-check and test.
set -euo pipefail

usage() {
  cat <<'END'
usage: bash scripts/test.sh [PYTEST ARGUMENT ...]

Makes or reuses a virtual environment, then runs ruff, mypy and the tests. Arguments go to pytest,
for example:
  bash scripts/test.sh tests/spec_data -k packing
  bash scripts/test.sh -m 'not long'

Environment: VENV (default .venv in the repository), PYTHON (3.11 or later, for a new one),
TEST_WORKERS (default 2).
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
"$PY" -m pytest -n "${TEST_WORKERS:-2}" --dist worksteal "$@"
