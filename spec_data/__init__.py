"""spec-data: run a target once, keep what its drafts need to learn in a small Arrow dataset.

Importing this package is free: the public names below are resolved on first use, so that
`spec-data --help` never pays for torch. docs/python-api.md shows each of them.
"""

import lazy_loader

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
