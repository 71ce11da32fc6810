"""The drafts, one folder per kind, and what they share.

`kinds` knows them by name. The names below are what a draft of your own is made of
(docs/own-draft.md); each is imported on first use, so that `--help` needs no torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
