"""DFlash 2: DFlash with convolutions inside a block and a selector."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={"stage": ["DFlash2Draft"]}
)
