"""The learning rate of every step."""

import math

from spec_train.config import FitConfig


def learning_rate(step: int, total: int, config: FitConfig) -> float:
    """Rate of step 0..total-1: linear warm-up, then a cosine that ends at min_lr_ratio * lr."""
    peak = config.lr or 0.0
    warm = math.ceil(config.warmup_ratio * total)
    if step < warm:
        return peak * (step + 1) / (warm + 1)
    progress = (step - warm) / max(1, total - 1 - warm)
    low = config.min_lr_ratio
    return peak * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
