"""P-EAGLE (arXiv 2602.01469)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={"draft": ["PeagleDraft"]}
)
