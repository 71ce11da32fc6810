"""The draft vocabulary of a draft: which tokens of the target it can propose.

V / Vd target / draft vocabulary. Files hold `d2t` int64 [Vd], *offsets* (target id = i + d2t[i]),
and `t2d` bool [V]; a draft that can propose everything has neither.
"""

from typing import Any

import torch
from torch import Tensor, nn

from spec_data.shards.errors import DraftError


class WithVocabulary(nn.Module):
    """Base of drafts whose `config` names `vocab_size` and `draft_vocab_size`, and with an `fc`."""

    config: Any
    fc: nn.Linear
    d2t: Tensor
    t2d: Tensor
    draft_ids: Tensor  # int64 [Vd], ascending
    draft_index: Tensor  # int64 [V], row of a target id or -1

    def make_vocabulary(self) -> None:
        """Begin with the first Vd tokens."""
        for name in ("d2t", "t2d", "draft_ids", "draft_index"):
            self.register_buffer(name, None, persistent=False)
        self.set_vocabulary(torch.arange(self.config.draft_vocab_size))

    @property
    def full_vocabulary(self) -> bool:
        """Whether the draft can propose every token of the target (no map is saved then)."""
        return self.config.draft_vocab_size == self.config.vocab_size

    def set_vocabulary(self, ids: Tensor) -> None:
        """Set the target ids of the draft vocabulary, ascending int64 [Vd].

        Raises:
            DraftError: ids are not ascending, unique, within 0..V-1 and Vd in number.
        """
        size, vocab = self.config.draft_vocab_size, self.config.vocab_size
        ids = ids.to(self.fc.weight.device, torch.long)
        ascending = bool((ids[1:] > ids[:-1]).all())
        if ids.shape != (size,) or not ascending or int(ids[0]) < 0 or int(ids[-1]) >= vocab:
            raise DraftError(
                f"draft vocabulary: {tuple(ids.shape)} ids must be {size} ascending unique ids "
                f"in 0..{vocab - 1}"
            )
        rows = torch.arange(size, device=ids.device)
        self.draft_ids = ids
        self.d2t = ids - rows
        self.draft_index = torch.full((vocab,), -1, device=ids.device)
        self.draft_index[ids] = rows
        self.t2d = self.draft_index >= 0
