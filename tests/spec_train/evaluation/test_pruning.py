"""A trained draft with a smaller vocabulary: which rows stay, what it costs, what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import spec_train
from spec_data.shards.errors import ConfigError, DraftError
from spec_data.shards.reader import HiddenStatesDataset
from spec_train import load_draft
from spec_train.cli import main
from spec_train.drafts import DRAFTS
from spec_train.drafts.vocabulary import choose_draft_vocabulary
from spec_train.evaluation import pruning
from spec_train.evaluation.pruning import prune
from spec_train.losses.head import TargetHead
from spec_train.options.kinds import DRAFT_OPTIONS
from tests.factory import tiny_dataset
from tests.spec_train import flat
from tests.spec_train.drafts.any_draft import build_draft
from tests.tolerance import close, network

VOCAB = 64
KINDS = [kind for kind in DRAFTS if "draft_vocab_size" in DRAFT_OPTIONS[kind]().values()]
SMALL: dict[str, dict[str, Any]] = {
    "eagle3": {"ttt_steps": 2, "draft_vocab_size": 40},
    "dspark": {"num_layers": 1, "block_size": 3, "markov_rank": 4},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return tiny_dataset(tmp_path_factory.mktemp("pruning") / "set", n_docs=24)


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory) -> dict[str, Path]:
    """A run of one step of EAGLE-3 with 40 of the 64 tokens, and of DSpark with all."""
    given = dict(steps=1, batch_size=2, seq_len=48, validation=0.2, device="cpu")
    made = {}
    for kind, options in SMALL.items():
        made[kind] = tmp_path_factory.mktemp("runs") / kind
        flat.fit(kind, data, made[kind], **given | options)
    return made


def logits_of(draft: Any, head: TargetHead) -> Tensor:
    """Logits [256, Vd] that a draft's head computes of random states, with the Markov bias."""
    torch.manual_seed(0)
    states = torch.randn(256, draft.config.hidden_size)
    if draft.name in ("eagle3", "peagle"):
        return draft.logits(states[None])[0]
    logits = states @ draft.head_rows(head).float().T
    if getattr(draft, "markov_head", None) is not None:
        logits = logits + draft.markov_head.markov_w2(
            draft.markov_head.markov_w1(torch.arange(256) % VOCAB)
        )
    return logits


@pytest.mark.parametrize("size", [40, 0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pruned_draft_keeps_rows_and_changes_none(kind, size, data, tmp_path):
    dataset = HiddenStatesDataset(data)
    head = TargetHead.from_dataset(data)
    draft = build_draft(kind, dataset, head, draft_vocab_size=size).eval().float()
    ids = draft.draft_ids[::2]
    smaller = prune(draft, ids, head)
    assert torch.equal(smaller.draft_ids, ids)
    kept = draft.draft_index[ids]
    with torch.no_grad():
        before, after = logits_of(draft, head), logits_of(smaller, head)
    close(after, before[:, kept], terms=network(1))
    best = draft.draft_ids[before.argmax(-1)]
    inside = torch.isin(best, ids)
    assert inside.any() and not inside.all()
    assert torch.equal(smaller.draft_ids[after.argmax(-1)][inside], best[inside])
    for name, value in smaller.state_dict().items():  # the rows themselves, bit for bit
        other = dict(draft.state_dict()).get(name, head.head_weight.float())
        assert torch.equal(value, other if value.shape == other.shape else other[kept]), name
    smaller.save_pretrained(tmp_path / "small", torch.float32)
    back = load_draft(tmp_path / "small")
    assert torch.equal(back.draft_ids, ids) and back.options.draft_vocab_size == len(ids)


def test_a_draft_never_gains_tokens(runs, data):
    draft = load_draft(runs["eagle3"])
    outside = torch.tensor([i for i in range(VOCAB) if int(draft.draft_index[i]) < 0][:3])
    with pytest.raises(DraftError, match="3 of the 4 tokens are not among the 40"):
        prune(
            draft,
            torch.cat([draft.draft_ids[:1], outside]).sort().values,
            TargetHead.from_dataset(data),
        )


def counts_of(data: Path) -> Tensor:
    """How often each token is supervised, by a plain loop."""
    counts = torch.zeros(VOCAB, dtype=torch.int64)
    dataset = HiddenStatesDataset(data)
    for i in range(len(dataset)):
        for token, learned in zip(dataset[i]["input_ids"], dataset[i]["loss_mask"], strict=True):
            counts[token] += int(learned)
    return counts


def test_export_prunes_and_prints_what_it_costs(runs, data, tmp_path, capsys):
    draft, out = load_draft(runs["eagle3"]), str(tmp_path / "small")
    words = ["export", "--draft", str(runs["eagle3"]), "--format", "vllm", "--out", out]
    words += ["--draft-vocab-size", "12", "--data", str(data)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    counts = counts_of(data)
    small = load_draft(out)
    before, after = (int(counts[d.draft_ids].sum()) / int(counts.sum()) for d in (draft, small))
    assert "vocabulary 40 -> 12 tokens" in printed
    assert f"{before:.3%} -> {after:.3%}" in printed
    assert "simulated acceptance length: " in printed and "validation)" in printed
    listed = draft.config.token_ids.values()
    special = [i for v in listed for i in (v if isinstance(v, list) else [v])]
    rows = choose_draft_vocabulary(
        counts[draft.draft_ids], 12, [int(draft.draft_index[i]) for i in special]
    )
    assert torch.equal(small.draft_ids, draft.draft_ids[rows])
    raw = load_file(Path(out) / "model.safetensors")
    assert raw["lm_head.weight"].shape[0] == 12 and raw["t2d"].sum() == 12
    assert "acceptance length" not in (Path(out) / "README.md").read_text(), "of the larger draft"


def test_export_in_python_returns_the_cost_and_the_command_that_writes(runs, data, tmp_path):
    given = {"draft_vocab_size": 20, "data": data}
    made = spec_train.export(runs["dspark"], tmp_path / "small", "hf", **given)
    assert made.pruning is not None
    assert (made.pruning.tokens_before, made.pruning.tokens) == (VOCAB, 20)
    assert made.pruning.coverage_before == 1.0 > made.pruning.coverage > 0
    plain = spec_train.evaluate(draft=runs["dspark"], data=data, device="cpu")
    assert made.pruning.acceptance_before == plain.acceptance_length
    small = spec_train.evaluate(draft=tmp_path / "small", data=data, device="cpu", split="all")
    assert small.acceptance_length >= 1
    share = spec_train.export(runs["eagle3"], draft_vocab_coverage=0.5, data=data)
    assert 0.5 <= share.pruning.coverage < 0.6
    words = list(share.next_command)
    assert words[words.index("--draft-vocab-coverage") + 1] == "0.5" and str(data) in words


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"draft_vocab_size": 9}, "which tokens to keep: add --data"),
        ({"draft_vocab_coverage": 0.9}, "which tokens to keep: add --data"),
        ({"data": "DATA"}, "--data has no effect without"),
        ({"draft_vocab_size": 9, "draft_vocab_coverage": 0.9, "data": "DATA"}, "each of them"),
        ({"draft_vocab_size": 0, "data": "DATA"}, "--draft-vocab-size 0"),
        ({"draft_vocab_coverage": 1.5, "data": "DATA"}, "--draft-vocab-coverage 1.5"),
    ],
)
def test_options_that_mean_nothing_are_refused(runs, data, given, named):
    given = {name: data if value == "DATA" else value for name, value in given.items()}
    with pytest.raises(ConfigError, match=named):
        spec_train.export(runs["dspark"], **given)


def test_a_vocabulary_that_prunes_nothing_is_refused(runs, data, tmp_path):
    with pytest.raises(ConfigError, match="nothing to prune"):
        spec_train.export(runs["eagle3"], data=data, draft_vocab_size=40)
    with pytest.raises(DraftError, match="the draft itself holds only"):
        spec_train.export(runs["eagle3"], data=data, draft_vocab_coverage=1.0)
    dataset, head = HiddenStatesDataset(data), TargetHead.from_dataset(data)
    build_draft("eagle", dataset, head).save_pretrained(tmp_path / "e")
    with pytest.raises(DraftError, match="no vocabulary to prune"):
        spec_train.export(tmp_path / "e", data=data, draft_vocab_size=9)
    assert not (tmp_path / "out").exists()


def test_a_part_that_follows_the_vocabulary_otherwise_is_refused():
    """As a stage of somebody else may: two sides of a table, or a size of its own."""
    rows = torch.arange(4)
    assert pruning._rows(torch.ones(8, 3), (4, 3), rows, "x").shape == (4, 3)
    for shape, wanted in (((8, 8), (4, 4)), ((9, 2), (5, 2))):
        with pytest.raises(DraftError, match="x: its shape"):
            pruning._rows(torch.ones(shape), wanted, rows, "x")
