"""DFlash (arXiv 2602.06036): a block draft without a second stage."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={"draft": ["DFlashDraft"]}
)
