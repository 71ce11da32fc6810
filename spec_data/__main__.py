"""`python -m spec_data`: the same as the command spec-data."""

from spec_data.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
