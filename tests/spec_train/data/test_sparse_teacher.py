"""Format 1.2: the teacher's columns only where the next token is supervised, from file to draft."""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import spec_train
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import token_columns
from spec_train.options.kinds import draft_options
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


def test_a_document_marks_tokens_without_a_row_and_no_loss_reads_them(pairs, tmp_path):
    whole, sparse = map(HiddenStatesDataset, pairs["topk:5"])
    names = [column.name for column in sparse.manifest.columns if column.sparse]
    assert len(names) == 4
    for row, other in zip(whole, sparse, strict=True):
        mask = row["loss_mask"].tolist()
        for t, name in ((t, name) for t in range(len(mask)) for name in names):
            value, kept = other[name][t], t + 1 < len(mask) and mask[t + 1]
            marked = value.isnan() if value.is_floating_point() else value == -1
            assert torch.equal(value, row[name][t]) if kept else marked.all()


def test_read_into_has_what_a_document_has_and_zeros_on_request(pairs):
    for _, place in pairs.values():
        sparse = HiddenStatesDataset(place)
        for index in (0, 5):
            document, declared = sparse[index], sparse.declared
            length = len(document["input_ids"])
            for name, wanted in document.items():
                if not isinstance(wanted, torch.Tensor):
                    continue
                for dtype in {wanted.dtype, torch.float32}:
                    out = torch.full((length + 3, *wanted.shape[1:]), 7).to(dtype)
                    zeros = out.clone()
                    sparse.read_into(index, {name: out}, 2, length - 1)
                    sparse.read_into(index, {name: zeros}, 2, length - 1, marked=False)
                    found, plain = out[2:-2], zeros[2:-2]
                    kept = wanted[:-1].to(dtype)
                    assert torch.equal(found.nan_to_num(9), kept.nan_to_num(9)), name
                    around = torch.cat([out[:2], out[-2:]])
                    assert torch.equal(around, torch.full_like(around, 7)), "outside of it"
                    absent = found.isnan() if wanted.is_floating_point() else found == -1
                    assert bool(absent.any()) == declared[name].sparse, name
                    assert torch.equal(plain, found.masked_fill(absent, 0)), name


KINDS = ("eagle", "eagle3", "peagle", "dspark", "dflash", "dflash2", "domino", "lilicorr", "xpress")


@pytest.mark.parametrize(
    ("supervision", "kind"),
    [
        ("topk:5", "eagle3"),
        ("final-hidden", "dspark"),
        *(pytest.param("final-hidden", kind, marks=pytest.mark.long) for kind in KINDS),
        *(pytest.param("logits", kind, marks=pytest.mark.long) for kind in ("eagle3", "peagle")),
    ],
)
def test_no_loss_and_no_gradient_reads_a_token_without_a_row(pairs, tmp_path, supervision, kind):
    given = dict(seq_len=64, steps=0, validation=0.25, device="cpu")
    given |= {"noise": 0.0} if kind == "eagle" else {}  # drawn anew in every call
    own = {field.name for field in dataclasses.fields(draft_options(kind))}
    vocabulary = {"draft_vocab_size": 32} if "draft_vocab_size" in own else {}
    flat.fit(kind, pairs[supervision][0], tmp_path / "run", **given | vocabulary)
    draft = spec_train.load_draft(tmp_path / "run", dtype="float32").train()
    found = []
    for place in pairs[supervision]:
        output = draft(HiddenStatesDataset(place)[0:3])
        output.loss.backward()
        gradients = {n: p.grad.clone() for n, p in draft.named_parameters() if p.grad is not None}
        draft.zero_grad()
        sums = {f"sum of {name}": value for name, value in output.sums.items()}
        found.append({"loss": output.loss.detach()} | gradients | sums)
    one, other = found
    assert one.keys() == other.keys() and one["loss"].isfinite() and len(one) > 5
    for name, value in one.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[name])), name
