"""spec-train: fit speculative-decoding drafts on a spec-data dataset, without the target.

Importing this package is free: the public names below are resolved on first use.
docs/python-api.md shows each of them.
"""

import lazy_loader

from spec_data import __version__ as __version__
from spec_data.shards.errors import SpecDataError as SpecDataError

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
