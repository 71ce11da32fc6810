"""The command spec-data, and `python -m spec_data`. Ctrl-C while it starts is no traceback."""

import sys
from importlib import import_module


def start(module: str) -> int:
    """Import the module of a program, call its `main`, and return the exit code."""
    try:
        return import_module(module).main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def main() -> int:
    """Run `spec-data` and return its exit code."""
    return start("spec_data.cli")


if __name__ == "__main__":
    raise SystemExit(main())
