"""Format 1.2: the teacher's columns only where the next token is supervised, from file to draft."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import spec_train
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import token_columns
from tests.factory import tiny_dataset
from tests.spec_train import flat
from tests.spec_train.data.rewriting import rewritten

_NAMES = ("path", "text", "figures")  # of a result: where the data are, and what names them
# The drafts that are trained from either form, by supervision.
DRAFTS = {"final-hidden": ("eagle", "eagle3", "dspark"), "topk:5": ("eagle3",), "logits": ()}


def sparse_copy(source: Path, out: Path) -> Path:
    """Copy a dataset; keep the teacher's columns only where the next token is supervised."""
    old = HiddenStatesDataset(source).manifest
    columns = token_columns(
        old.layers, old.hidden_size, old.supervision, old.vocab_size, teacher_tokens="supervised"
    )
    sparse = [column.name for column in columns if column.sparse]

    def cut(row):  # plain loop: t is kept if x_{t+1} exists and is supervised
        mask = row["loss_mask"].tolist()
        kept = [t for t in range(len(mask)) if t + 1 < len(mask) and mask[t + 1]]
        return row | {name: row[name][kept] for name in sparse}

    return rewritten(source, out, cut, teacher="supervised", columns=columns)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """By supervision: a dataset with the teacher at every token, and its sparse copy."""
    path, found = tmp_path_factory.mktemp("pairs"), {}
    for number, supervision in enumerate(DRAFTS):
        whole = tiny_dataset(path / f"whole{number}", n_docs=16, supervision=supervision)
        found[supervision] = whole, sparse_copy(whole, path / f"sparse{number}")
    return found


def _trained(draft: str, data: Path, out: Path) -> tuple[dict[str, torch.Tensor], dict]:
    vocabulary = {} if draft == "eagle" else {"draft_vocab_size": 32}
    given = dict(steps=2, batch_size=2, seq_len=64, validation=0.25, device="cpu", seed=3)
    result = flat.fit(draft, data, out, **given | vocabulary)
    assert result.finished
    found = spec_train.evaluate(out, data=data).data
    assert found is not None
    figures = {name: value for name, value in vars(found).items() if name not in _NAMES}
    return load_file(next(out.rglob("model.safetensors"))), figures


@pytest.mark.parametrize(
    ("supervision", "draft"), [(s, draft) for s, drafts in DRAFTS.items() for draft in drafts]
)
def test_drafts_and_their_figures_are_bit_equal_from_either_form(
    pairs, tmp_path, supervision, draft
):
    (one, figures), (other, same) = (
        _trained(draft, data, tmp_path / str(i)) for i, data in enumerate(pairs[supervision])
    )
    assert one.keys() == other.keys() and len(one) > 3
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert figures == same and figures["acceptance_length"] is not None
