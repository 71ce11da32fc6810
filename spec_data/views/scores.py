"""How likely the supervised tokens of a document are under the target, from the stored columns.

The share of first choices is exact. The NLL of token t+1 is logsumexp_t - z_t[x_{t+1}]; the logit z
is computed from `hidden.final` and the stored head, or read from `logits`. With a lossy codec of
`hidden.final` it has the error of the codec.
"""

import numpy as np
import torch

from spec_data.shards.errors import ConfigError
from spec_data.shards.reader import HiddenStatesDataset, load_head_tensors
from spec_data.shards.schema import FINAL, predicts_supervised
from spec_data.terminal.progress import progress


def document_scores(
    dataset: HiddenStatesDataset, documents: np.ndarray, nll: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return share of first choices and mean NLL (nats) of `documents` int64 [n], float64 [n] each.

    The masks are the stored ones. A document without a supervised token has nan, as has every NLL
    where `nll` does not ask for them.

    Raises:
        ConfigError: an NLL is asked for, and the dataset stores only some of the logits.
        DatasetError: damage.
    """
    manifest, columns = dataset.manifest, ["input_ids", "loss_mask", "target_argmax"]
    if nll and manifest.supervision.startswith("topk"):
        raise ConfigError(
            f"nll: {dataset.location} stores {manifest.supervision}, and the other logits "
            "cannot be computed from them; use first_choice"
        )
    if nll:
        columns += ["target_logsumexp", *({FINAL, "logits"} & set(dataset.columns))]
    reader = HiddenStatesDataset(dataset.location, columns)
    head = load_head_tensors(dataset) if FINAL in columns else {}
    shares, means = (np.full(len(documents), np.nan) for _ in range(2))
    bar = progress(documents.tolist(), desc="scores", unit="docs", leave=False)
    for number, document in enumerate(bar):
        row = reader[document]
        mask = row["loss_mask"].numpy()
        asked = torch.from_numpy(predicts_supervised(mask, np.array([0, len(mask)])))  # [T]
        following = row["input_ids"].roll(-1)[asked]  # [m]
        if not len(following):
            continue
        shares[number] = float((row["target_argmax"][asked] == following).double().mean())
        if not nll:
            continue
        if head:
            z = (row[FINAL][asked].double() * head["lm_head"][following].double()).sum(-1)  # [m]
            if "lm_head_bias" in head:
                z = z + head["lm_head_bias"][following].double()
            z = z * manifest.head.scale
            if (softcap := manifest.head.softcap) is not None:
                z = softcap * torch.tanh(z / softcap)
        else:
            z = row["logits"][asked].gather(-1, following[:, None])[:, 0].double()
        means[number] = float((row["target_logsumexp"][asked].double() - z).mean())
    return shares, means
