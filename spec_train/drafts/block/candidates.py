"""What second stages share that choose from the K most probable tokens of a slot.

All metrics (hits, acceptance, tau) are of what serving drafts: from the K candidates of the logits.

R drafts that count, K candidates.
"""

from dataclasses import replace

import torch
from torch import Tensor

from spec_train.drafts.block.draft import BlockDraft, StageRows
from spec_train.losses.menu import RowStats
from spec_train.losses.metrics import Sums, chain_sums, summarise


class CandidateDraft(BlockDraft):
    """A draft with such a stage."""

    @classmethod
    def summarise(cls, sums: Sums) -> dict[str, float | None]:
        """Add to the metrics of blocks, over the drafts that count:

        - "candidate_recall": the share of target's choices that are among the K candidates;
        - "candidate_mass": the target's probability of the candidates;
        - "selector_accuracy": the share of them that the stage chooses, where it can;
        - "oracle_length": the acceptance length of a stage that always chooses right.

        The length of the stage's own path is "acceptance_length".
        """
        out = super().summarise(sums)
        values = {
            name: float(sums[f"selector_{name}"]) for name in ("number", "among", "mass", "right")
        }
        number, among = values["number"], values["among"]
        out["candidate_recall"] = among / number if number else None
        out["candidate_mass"] = values["mass"] / number if number else None
        out["selector_accuracy"] = values["right"] / among if among else None
        start = "oracle_"
        oracle = {n.removeprefix(start): v for n, v in sums.items() if n.startswith(start)}
        out["oracle_length"] = summarise(sums | oracle)["acceptance_length"]
        return out


class CandidateRows(StageRows):
    """A stage that chooses from candidates, at the R drafts of a batch that count."""

    @torch.no_grad()
    def judged(
        self, served: Tensor, scores: Tensor, probability: Tensor, figures: RowStats
    ) -> tuple[RowStats, Sums]:
        """Return the figures of drafts chosen from candidates, and the sums of the stage.

        `served` are the candidates, int64 [R, K], with the stage's scores and the target's
        probabilities [R, K].
        """
        q, best = scores.softmax(-1), scores.argmax(-1)  # [R, K], [R]
        drafted = served.gather(1, best[:, None])[:, 0]
        acceptance = torch.minimum(q, probability.to(q)).sum(-1)
        sums = self._sums(served, drafted, probability)
        return replace(figures, best=drafted, acceptance=acceptance.to(figures.acceptance)), sums

    def _sums(self, served: Tensor, drafted: Tensor, probability: Tensor) -> Sums:
        chosen = self.chosen
        among = (served == chosen.choice[:, None]).any(1)
        blocks = torch.zeros_like(chosen.drafted)  # [B, N, D]
        blocks.view(-1)[chosen.rows] = among
        oracle = chain_sums(blocks.movedim(-1, 0), chosen.drafted.movedim(-1, 0))
        return {
            "selector_number": torch.ones_like(among, dtype=torch.float64).sum(),
            "selector_among": among.sum().double(),
            "selector_right": (drafted == chosen.choice).sum().double(),
            "selector_mass": probability.double().sum(),
            "oracle_survive": oracle["survive"],
        }
