"""A tiny dataset and a small draft of any kind, built on it.

Test modules assign the fixtures to names: linters would flag imports as unused and shadowed.
"""

import json
from typing import Any

import pytest
import torch

from spec_data.shards.reader import HiddenStatesDataset
from spec_train.drafts import DRAFTS
from spec_train.losses.head import TargetHead
from spec_train.options.draft_options import DRAFT_OPTIONS
from tests.factory import tiny_dataset
from tests.spec_train.evaluation import tools

SMALL: dict[str, dict[str, Any]] = {
    "eagle": {},
    "eagle3": {"draft_vocab_size": 40, "ttt_steps": 3},
    "peagle": {"draft_vocab_size": 40, "depths": 3, "num_layers": 2, "mask_token_id": 5},
    "dspark": {"num_layers": 2, "block_size": 3, "markov_rank": 4, "mask_token_id": 5},
    "dflash": {"num_layers": 2, "block_size": 3, "mask_token_id": 5},
}
"""Options of a small draft of each kind."""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> HiddenStatesDataset:
    return HiddenStatesDataset(tiny_dataset(tmp_path_factory.mktemp("any") / "data", n_docs=6))


@pytest.fixture(scope="module")
def head(dataset: HiddenStatesDataset) -> TargetHead:
    return TargetHead.from_dataset(dataset.path)


def build_draft(name: str, dataset: HiddenStatesDataset, head: TargetHead, **options: Any) -> Any:
    """Return a fresh draft of kind `name` with `SMALL` options, changed by `options`."""
    torch.manual_seed(1)
    return DRAFTS[name].build(
        DRAFT_OPTIONS[name](**SMALL[name] | options),
        target_config=json.loads((dataset.target_dir / "config.json").read_text()),
        manifest=dataset.manifest,
        head=head,
        token_counts=torch.arange(head.spec.vocab_size).flip(0),
    )


def draft_for(
    kind: str,
    model: Any,
    *,
    vocab: int = tools.VOCAB,
    draft_vocab: int | None = None,
    layers: tuple[int, ...] = tools.LAYERS,
    **options: Any,
) -> Any:
    """Return a random float32 draft for a target, without a dataset.

    With `draft_vocab` it can propose the first odd ids, or, if these do not suffice, the first ids.
    """
    torch.manual_seed(1)
    chosen = DRAFT_OPTIONS[kind](**options)
    own: dict[str, Any] = {} if kind == "eagle" else {"layers": layers}
    if kind not in ("eagle", "eagle3"):
        own["mask_token_id"] = 3
    config = DRAFTS[kind].config_class.from_target(
        model.config.to_dict(),
        vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        options=chosen,
        dtype="float32",
        origin={"chat_template_kwargs": {}},
        **own,
    )
    draft: Any = DRAFTS[kind](config, chosen)
    if draft_vocab is not None:
        step = 2 if 2 * draft_vocab <= vocab else 1
        draft.set_vocabulary(torch.arange(draft_vocab) * step + (step - 1))
    draft.adopt(tools.head_of(model))
    return draft.eval()
