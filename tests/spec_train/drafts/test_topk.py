"""Teachers of K exact logits: what they know, how far a loss may be off, every draft on a dataset.

The oracle is a coarser vocabulary in plain autograd: the unknown tokens are one token, whose draft
probability is the sum of theirs.
"""

import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_data.shards.reader import HiddenStatesDataset
from spec_train.cli import main
from spec_train.drafts.block.draft import block_rows_loss
from spec_train.drafts.teacher import Teacher, logits_teacher, missing_mass, topk_teacher
from spec_train.evaluation.on_dataset import check_fit
from spec_train.formats.kind_files import files_of
from spec_train.losses.head import TargetHead
from spec_train.losses.menu import LossKind, TeacherRows, distribution_loss
from spec_train.options.draft_options import KINDS
from tests.factory import tiny_dataset
from tests.spec_train.drafts.any_draft import build_draft
from tests.spec_train.drafts.slot_loss import SlotLoss
from tests.spec_train.training.test_trainer_resume import stop_after
from tests.tolerance import LAYER, close

VOCAB, ROWS = 24, 60
DRAFT_IDS = torch.tensor([0, 1, 3, 4, 6, 7, 9, 12, 13, 17, 20, 22])
VOCABULARIES = pytest.mark.parametrize("full", [True, False], ids=["full", "reduced"])


def logits_of(seed: int, sharp: float = 2.0) -> Tensor:
    """Return logits [ROWS, V] of all sorts: nearly uniform to nearly certain."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.linspace(0.1, 2 * sharp, ROWS, dtype=torch.float64)[:, None]
    return torch.randn(ROWS, VOCAB, generator=generator, dtype=torch.float64) * scale


def teachers(z: Tensor, k: int, full: bool) -> tuple[TeacherRows, TeacherRows, Tensor]:
    """Return the rows of all logits, those of the K largest, and the missing mass, [n]."""
    ids = None if full else DRAFT_IDS
    place = torch.full((VOCAB,), -1)
    own = torch.arange(VOCAB) if full else DRAFT_IDS
    place[own] = torch.arange(len(own))
    top, total = z.topk(k, -1), z.logsumexp(-1)
    some: Teacher = topk_teacher(top.indices, top.values, total, place, len(own))
    rows = torch.arange(len(z))
    return logits_teacher(z, ids)(rows), some(rows), missing_mass(top.values, total)


@VOCABULARIES
def test_all_logits_as_top_k_are_the_full_teacher(full: bool) -> None:
    exact, found, missing = teachers(logits_of(0), VOCAB, full)
    assert found.rest is not None and not found.rest.any()
    close(missing, torch.zeros_like(missing), terms=VOCAB, magnitude=1.0)
    close(found.p, exact.p, terms=VOCAB)
    close(found.full(), exact.full(), terms=VOCAB)
    assert (found.mass is None) == full
    for name in KINDS:
        draft = logits_of(1)[:, None, : found.p.shape[1]]
        results = [distribution_loss(draft.clone(), t, LossKind(name=name)) for t in (found, exact)]
        for a, b in zip(*results, strict=True):
            close(a, b, terms=LAYER, magnitude=40.0)


@VOCABULARIES
@pytest.mark.parametrize("k", [1, 5, 17])
def test_known_probabilities_are_exact_and_nothing_is_renormalised_away(k: int, full: bool) -> None:
    z = logits_of(2)
    exact, found, missing = teachers(z, k, full)
    assert found.rest is not None
    known = found.p > 0
    close(found.full()[known], exact.full()[known], terms=VOCAB)
    close(missing, 1 - z.softmax(-1).topk(k).values.sum(-1), terms=VOCAB, magnitude=1.0)
    close(found.p.sum(-1) + found.rest, torch.ones(ROWS, dtype=torch.float64), terms=VOCAB)
    mass = torch.ones(ROWS, dtype=torch.float64) if exact.mass is None else exact.mass
    assumed = mass if found.mass is None else found.mass
    inside = found.full().sum(-1)
    assert bool((inside <= mass + 1e-12).all()) and bool((mass <= assumed + 1e-12).all())
    assert bool((assumed <= inside + missing + 1e-12).all())


def coarse_loss(draft: Tensor, rows: TeacherRows, name: str) -> Tensor:
    """Return the slow losses [n] over the known tokens and one more, for autograd."""
    losses = []
    for n, logits in enumerate(draft):
        q, known = logits.softmax(-1), rows.p[n] > 0
        mass = 1.0 if rows.mass is None else rows.mass[n]
        assert rows.rest is not None
        p, full, of_draft = rows.p[n, known], mass * rows.p[n, known], q[known]
        if rows.rest[n] > 0:  # the unknown tokens are rejected
            p, full = torch.cat([p, rows.rest[n : n + 1]]), torch.cat([full, p.new_zeros(1)])
            of_draft = torch.cat([of_draft, q[~known].sum()[None]])
        losses.append(SlotLoss(name=name)(p, full, of_draft.log(), 0))
    return torch.stack(losses)


@VOCABULARIES
@pytest.mark.parametrize("name", KINDS)
def test_values_and_gradients_are_those_of_the_coarser_vocabulary(name: str, full: bool) -> None:
    _, found, _ = teachers(logits_of(3), 5, full)
    known = (found.p > 0).any(-1)  # a slot without a known token is never trained
    found = found[known.nonzero()[:, 0]]
    draft = logits_of(4)[known][:, : found.p.shape[1]].requires_grad_()
    expected = coarse_loss(draft, found, name)
    (slope,) = torch.autograd.grad(expected.sum(), draft)
    loss, accepted, gradient, _ = distribution_loss(
        draft.detach()[:, None].clone(), found, LossKind(name=name)
    )
    close(loss[:, 0], expected.detach(), terms=LAYER)
    close(gradient[:, 0], slope, terms=LAYER, magnitude=1.0)
    lower = torch.minimum(found.full(), draft.softmax(-1)).sum(-1).detach()
    close(accepted[:, 0], lower, terms=LAYER)


def bounds_of(kind: LossKind, t: float, w: float, full: bool) -> tuple[Any, Any, str]:
    """Return the most errors of value and gradient of a loss (None: no bound), and which bound the
    value is."""
    lower = "lower" if full else ""
    jsd = t * (1 + math.log1p(1 / t)) / 2 if full and t else None
    return {
        "ce": (None, 2 * w, lower),
        "kl": (None, 2 * w, lower),
        "reverse-kl": (None, None, lower),
        "jsd": (jsd, 2 * w, lower),
        "tv": (t, 2 * t, "upper"),
        "lk-alpha": (None, None, "upper"),
        "lk-lambda": (None, 2 * w + 4 * kind.scale * kind.decay * t, ""),
    }[kind.name]


@VOCABULARIES
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("k", [1, 3, 8, 20])
def test_errors_are_within_their_bounds(name: str, k: int, full: bool) -> None:
    """For every row; the gradient is for the draft's logits, its error a sum of absolute values."""
    kind, slack = LossKind(name=name), 1e-9
    exact, found, missing = teachers(logits_of(5 + k), k, full)
    rows = (found.p > 0).any(-1).nonzero()[:, 0]
    exact, found, missing = exact[rows], found[rows], missing[rows]
    draft = logits_of(50 + k)[rows][:, None, : found.p.shape[1]]
    wanted, accept, slope, _ = distribution_loss(draft.clone(), exact, kind)
    loss, lower, gradient, _ = distribution_loss(draft.clone(), found, kind)
    assert found.rest is not None
    short = accept - lower
    assert bool((short > -slack).all()) and bool((short[:, 0] <= missing + slack).all())
    errors = (gradient - slope).abs().sum(-1)[:, 0]
    seen = 0.0
    for n, row in enumerate(rows):
        t, w = float(missing[n]), float(found.rest[n])
        value, most, side = bounds_of(kind, t, w, full)
        error = float(loss[n] - wanted[n])
        if value is not None:
            assert abs(error) <= value + slack, int(row)
        if most is not None:
            assert float(errors[n]) <= most + slack, int(row)
            seen = max(seen, float(errors[n]) / max(most, 1e-12))
        if name == "lk-alpha":
            assert float(errors[n]) <= 4 * t / float(lower[n]) + slack, int(row)
        assert side != "lower" or error <= slack, int(row)
        assert side != "upper" or error >= -slack, int(row)
    if name in ("ce", "kl", "jsd", "tv", "lk-lambda") and k < 20:
        assert seen > 0.02  # the bound says something


@VOCABULARIES
def test_the_l1_distance_of_block_drafts_is_within_its_bound(full: bool) -> None:
    exact, found, missing = teachers(logits_of(6), 4, full)
    rows = (found.p > 0).any(-1).nonzero()[:, 0]
    exact, found, missing = exact[rows], found[rows], missing[rows]
    hidden = logits_of(7)[rows][:, : found.p.shape[1]].requires_grad_()
    weight = torch.eye(found.p.shape[1], dtype=torch.float64)
    ones, nothing = torch.ones(len(rows), dtype=torch.float64), torch.zeros(len(rows))
    results = []
    for teacher in (exact, found):
        total, figures = block_rows_loss(
            hidden, weight, lambda _, whole=teacher: whole, None, nothing, ones, chunk_rows=100
        )
        results.append((figures, torch.autograd.grad(total, hidden)[0]))
    (right, slope), (loose, gradient) = results
    assert found.rest is not None
    distance = 2 * (right.overlap - loose.overlap).abs()
    assert bool((distance <= 2 * found.rest + 1e-9).all()) and float(distance.max()) > 0.01
    short = right.acceptance - loose.acceptance
    assert bool((short >= -1e-9).all()) and bool((short <= missing + 1e-9).all())
    if full:
        assert bool(((gradient - slope).abs().sum(-1) <= 4 * missing + 1e-9).all())


# -- whole runs -----------------------------------------------------------------------------------

SMALL: dict[str, tuple[str, ...]] = {
    "eagle3": ("--ttt-steps", "2"),
    "peagle": ("--num-layers", "1", "--depths", "2"),
    "dspark": ("--num-layers", "1", "--markov-rank", "4", "--block-size", "4"),
    "dflash": ("--num-layers", "1", "--block-size", "4", "--loss-target", "soft"),
    "dflash2": ("--num-layers", "1", "--block-size", "4", "--loss", "kl"),
    "lilicorr": ("--num-layers", "1", "--block-size", "4", "--penalty-weight", "0"),
    "domino": ("--num-layers", "1", "--block-size", "4", "--loss", "kl"),
    "xpress": ("--num-layers", "1", "--block-size", "4"),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return tiny_dataset(tmp_path_factory.mktemp("data") / "set", n_docs=14, supervision="topk:8")


def command(draft: str, data: Path, out: Path, *more: str) -> list[str]:
    flags = ["fit", draft, "--data", str(data), "--out", str(out), "--seq-len", "48"]
    vocabulary = () if files_of(draft).keys else ("--draft-vocab-size", "40")
    flags += [*SMALL.get(draft, ()), *(vocabulary if draft in SMALL else ())]
    return [*flags, "--log-every", "1", "--validation", "0.3", *more]


@pytest.mark.parametrize("draft", SMALL)
def test_every_draft_trains_and_resumes_on_k_logits(data, tmp_path, draft, monkeypatch):
    out = tmp_path / "run"
    flags = command(draft, data, out, "--steps", "2")
    with monkeypatch.context() as patch:
        stop_after(1, patch)
        assert main(flags) == 128 + signal.SIGTERM
    assert main(flags) == 0
    assert (out / "last").resolve().name == "checkpoint-00000002"
    line = json.loads((out / "metrics.jsonl").read_text().splitlines()[-2])
    assert line["split"] == "train" and line["grad_norm"] > 0 and line["loss"] > 0


def test_a_penalty_in_training_does_not_keep_a_draft_from_being_measured(data: Path, tmp_path):
    full = HiddenStatesDataset(tiny_dataset(tmp_path / "full", n_docs=4))
    draft = build_draft("lilicorr", full, TargetHead.from_dataset(full))
    assert draft.options.penalty_weight > 0
    check_fit(draft, HiddenStatesDataset(data))
    assert draft.options.penalty_weight == 0


def test_eagle_needs_the_states_that_k_logits_replace(data: Path, tmp_path, capsys):
    assert main(command("eagle", data, tmp_path / "run")) == 2
    said = capsys.readouterr().err
    assert "--supervision topk:8 --final" in said and "fit eagle3" in said
    assert not (tmp_path / "run").exists()
