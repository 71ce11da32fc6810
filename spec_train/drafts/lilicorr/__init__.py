"""LiLiCorr (arXiv 2608.20530): DFlash with a transformer over candidates."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={"stage": ["LiLiCorrDraft"]}
)
