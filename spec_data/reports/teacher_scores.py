"""What the target predicts for every token of a document, from the stored columns.

The first choice is stored. Entropy and NLL need all logits: they are computed from `hidden.final`
and the stored head (with the error of the codec), or read from `logits`.

Shapes: T tokens of a document, K of them with a stored prediction, H, V.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_data.reports.token_viewer import TeacherView
from spec_data.shards.head_spec import apply_head
from spec_data.shards.reader import HiddenStatesDataset, load_head_tensors
from spec_data.shards.schema import ALL, FINAL

_AT_ONCE = 64  # tokens whose logits are in memory


def known_tokens(mask: np.ndarray, teacher: str) -> np.ndarray:
    """Return the tokens for which the dataset holds a prediction of the target.

    Args:
        mask: the loss mask [T]. teacher: "all" or "supervised", as in the manifest.

    Returns:
        bool [T]; the first token has none.
    """
    known = np.ones(len(mask), bool) if teacher == ALL else np.asarray(mask) != 0
    known[:1] = False
    return known


@dataclass
class TeacherScores:
    """Entropies and NLLs of documents of one dataset; None where not all logits can be known."""

    weight: Tensor | None
    bias: Tensor | None
    dataset: HiddenStatesDataset

    @classmethod
    def of(cls, dataset: HiddenStatesDataset) -> "TeacherScores | None":
        """Read the head of a dataset; None: it stores only some of the logits (topk).

        Raises:
            MissingError, DatasetError: the head is missing or damaged.
        """
        supervision = dataset.manifest.supervision
        if supervision.startswith("topk"):
            return None
        if supervision != "final-hidden":
            return cls(None, None, dataset)
        head = load_head_tensors(dataset.path, dataset.manifest)
        bias = head.get("lm_head_bias")
        return cls(head["lm_head"].float(), None if bias is None else bias.float(), dataset)

    def view(self, row: dict[str, Any]) -> TeacherView:
        """Return the predictions for a document, with entropies and NLLs.

        Args:
            row: of the dataset, with ids, mask, `target_argmax`, and `hidden.final` or `logits`.

        Returns:
            First choice, entropy and NLL of the K known tokens.
        """
        ids, mask = row["input_ids"], row["loss_mask"].numpy()
        known = known_tokens(mask, self.dataset.teacher)
        before = torch.from_numpy(np.flatnonzero(known) - 1)  # [K]
        entropies, nlls = (
            [torch.zeros(0, dtype=torch.float64)],
            [torch.zeros(0, dtype=torch.float64)],
        )
        for places in before.split(_AT_ONCE):
            log_p = self._logits(row, places).double().log_softmax(-1)  # [k, V]
            entropies.append(-(log_p.exp() * log_p).nan_to_num(0.0).sum(-1))
            nlls.append(-log_p.gather(-1, ids[places + 1].long()[:, None])[:, 0])
        return TeacherView(
            known=known,
            choice=row["target_argmax"][before].numpy().astype(np.int64),
            entropy=torch.cat(entropies).numpy(),
            nll=torch.cat(nlls).numpy(),
        )

    def _logits(self, row: dict[str, Any], places: Tensor) -> Tensor:
        """Return the logits [k, V] that the target has after the tokens at `places` [k]."""
        if self.weight is None:
            logits: Tensor = row["logits"][places]
            return logits
        spec = self.dataset.manifest.head
        return apply_head(row[FINAL][places].float(), self.weight, self.bias, spec)
