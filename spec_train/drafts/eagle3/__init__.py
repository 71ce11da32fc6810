"""EAGLE-3 (arXiv 2503.01840)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={"draft": ["Eagle3Draft"]}
)
