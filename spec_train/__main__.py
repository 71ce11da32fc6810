"""`python -m spec_train`, and so `torchrun ... -m spec_train`."""

from spec_train.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
