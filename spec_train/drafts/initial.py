"""Initial weights of a new draft's matrices: normal with one standard deviation, or torch's own."""

import torch
from torch import nn


@torch.no_grad()
def draw_weights(draft: nn.Module, deviation: float) -> None:
    """Draw the matrices of all trained linear layers, [out, in], from N(0, deviation ** 2).

    Biases become zero. Norms, tables of embeddings, vectors of their own and frozen weights stay as
    they are. 0 leaves everything as torch made it: uniform, standard deviation 1 / sqrt(3 in).
    Random numbers come from torch's default generator.
    """
    if not deviation:
        return
    for module in draft.modules():
        if isinstance(module, nn.Linear) and module.weight.requires_grad:
            module.weight.normal_(0.0, deviation)
            if module.bias is not None:
                module.bias.zero_()
