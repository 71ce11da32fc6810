"""XPress (arXiv 2608.02438): DFlash with a causal refiner."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={"stage": ["XPressDraft"]}
)
