"""The target's own MTP block, trained for several steps (FastMTP, arXiv 2509.18362)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submod_attrs={"draft": ["MtpDraft"]})
