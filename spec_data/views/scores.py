"""How likely the supervised tokens of a document are under the target, from the stored columns.

`generate` sums these figures over sources, and a sealed dataset has no figures of documents. The
share of first choices is exact. The NLL of token t+1 is logsumexp_t - z_t[x_{t+1}]; the logit z is
computed from `hidden.final` and the stored head, or read from `logits`. With a lossy codec of
`hidden.final` it has the error of the codec.

Shapes: T tokens of a document, m of them predict a supervised token, H, V.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_data.shards.errors import ConfigError
from spec_data.shards.reader import HiddenStatesDataset, load_head_tensors
from spec_data.shards.schema import FINAL, predicts_supervised
from spec_data.terminal.progress import progress


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Per document, float64 [n]: the share of first choices, and the mean NLL in nats.

    Both are nan where no token is supervised; `nll` also where it was not asked for.
    """

    first_choice: np.ndarray
    nll: np.ndarray


def document_scores(dataset: HiddenStatesDataset, documents: np.ndarray, nll: bool) -> Scores:
    """Return the scores of `documents`, int64 [n], with their stored masks.

    Raises:
        ConfigError: an NLL is asked for, and the dataset stores only some of the logits.
        DatasetError: damage.
    """
    if nll and dataset.manifest.supervision.startswith("topk"):
        raise ConfigError(
            f"nll: {dataset.place} stores {dataset.manifest.supervision}, and the other logits "
            "cannot be computed from them; use first_choice"
        )
    columns = ["input_ids", "loss_mask", "target_argmax"]
    if nll:
        columns += ["target_logsumexp", *({FINAL, "logits"} & set(dataset.columns))]
    reader = HiddenStatesDataset(dataset.path, columns)
    head = load_head_tensors(dataset.path, dataset.manifest) if FINAL in columns else {}
    first_choice, means = (np.full(len(documents), np.nan) for _ in range(2))
    bar = progress(documents.tolist(), desc="scores", unit="docs", leave=False)
    for number, document in enumerate(bar):
        row = reader[document]
        mask = row["loss_mask"].numpy()
        asked = torch.from_numpy(predicts_supervised(mask, np.array([0, len(mask)])))  # [T]
        following = row["input_ids"].roll(-1)[asked]  # [m]
        if len(following):
            hits = row["target_argmax"][asked] == following
            first_choice[number] = float(hits.double().mean())
            if nll:
                means[number] = _mean_nll(row, asked, following, head, dataset)
    return Scores(first_choice=first_choice, nll=means)


def _mean_nll(
    row: dict[str, Any],
    asked: Tensor,
    following: Tensor,
    head: dict[str, Tensor],
    dataset: HiddenStatesDataset,
) -> float:
    """Return the mean NLL of the tokens `following` [m] of a document."""
    if not head:
        z = row["logits"][asked].gather(-1, following[:, None])[:, 0].double()
    else:
        spec = dataset.manifest.head
        weight = head["lm_head"][following].double()  # [m, H]
        z = (row[FINAL][asked].double() * weight).sum(-1)  # [m]
        if "lm_head_bias" in head:
            z = z + head["lm_head_bias"][following].double()
        z = z * spec.scale
        if spec.softcap is not None:
            z = spec.softcap * torch.tanh(z / spec.softcap)
    return float((row["target_logsumexp"][asked].double() - z).mean())
