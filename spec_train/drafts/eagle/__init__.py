"""EAGLE-1 and EAGLE-2 (arXiv 2401.15077, 2406.16858)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submod_attrs={"draft": ["EagleDraft"]})
