"""The command spec-train, `python -m spec_train`, and so `torchrun ... -m spec_train`."""

from spec_data.__main__ import start


def main() -> int:
    """Run `spec-train` and return its exit code."""
    return start("spec_train.cli")


if __name__ == "__main__":
    raise SystemExit(main())
