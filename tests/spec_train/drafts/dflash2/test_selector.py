"""Parts of DFlash 2 by themselves, and the smallest second stage, which CONTRIBUTING.md shows."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spec_train.drafts.block.draft import BlockDraft, StageRows, Walk
from spec_train.drafts.dflash import DFlashDraft
from spec_train.drafts.dflash2 import stage as selector
from spec_train.losses.menu import LowRank
from tests.spec_train.drafts import any_draft
from tests.spec_train.drafts.any_draft import build_draft, packed
from tests.tolerance import close, network

dataset, head = any_draft.dataset, any_draft.head


def test_a_fresh_draft_has_the_states_of_the_dflash_with_its_weights(dataset, head):
    """Its convolutions start as the identity, bit for bit."""
    ours, plain = (build_draft(name, dataset, head) for name in ("dflash2", "dflash"))
    missing, unexpected = plain.load_state_dict(ours.state_dict(), strict=False)
    assert not missing and all("conv" in n or "selector" in n for n in unexpected)
    batch = packed(dataset)
    results = []
    for draft in (ours, plain):
        torch.manual_seed(3)
        sums = draft.loss(batch, head, None).sums
        results.append([float(sums["terms"][0]), *sums["supervised"].tolist()])
    assert results[0] == results[1]


def test_candidate_logits_in_parts_are_those_of_the_whole_product(monkeypatch):
    hidden = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, dtype=torch.float64)
    ids, slope = torch.randint(0, 11, (7, 3)), torch.randn(7, 3, dtype=torch.float64)
    wanted = (hidden @ weight.T).gather(1, ids)
    (gradient,) = torch.autograd.grad((wanted * slope).sum(), hidden)
    monkeypatch.setattr(selector, "_GATHERED", 2 * 3 * 5)  # two rows at a time
    found = selector.candidate_logits(hidden, weight, ids)
    (again,) = torch.autograd.grad((found * slope).sum(), hidden)
    close(found, wanted, terms=5)
    close(again, gradient, terms=15)
    assert selector.candidate_logits(hidden[:0], weight, ids[:0]).shape == (0, 3)


def test_candidate_logits_of_bfloat16_are_rounded_once():
    """Planted: each product of two numbers rounded before they are summed."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 512, generator=draw).bfloat16() for n in (40, 90))
    ids = torch.randint(90, (40, 3), generator=draw)
    exact = (hidden.double() @ weight.double().T).gather(1, ids)
    found = selector.candidate_logits(hidden, weight, ids).double()
    early = (hidden[:, None] * weight[ids]).double().sum(-1)
    step = torch.finfo(torch.bfloat16).eps * exact.abs() / 2 + 1e-4  # sums are of float32
    assert bool(((found - exact).abs() <= step).all())
    assert bool(((early - exact).abs() > step).any())


def test_figures_of_the_selector_are_shares_of_what_was_counted():
    """Two blocks of two drafts; the selector is right once where it can be, three choices are
    candidates, and in one block both are."""
    counts = torch.tensor([2.0, 2.0], dtype=torch.float64)
    single, ones = torch.tensor(1.0, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    sums = {
        **{name: counts for name in ("loss", "supervised", "weighted", "drafted", "acceptance")},
        **{name: counts / 2 for name in ("hits", "survive", "kept")},
        **{"at_risk": counts, "chains": 2 * single, "tau": 3 * single, "blocks": 2 * single},
        **dict.fromkeys(("terms", "term_weights", "term_shares"), ones),
        "part_weights": ones / 2,  # D-PACE: a mean is by weights, and the loss by the number
        **{"selector_number": 4 * single, "selector_among": 3 * single},
        **{"selector_right": single, "selector_mass": 2.4 * single},
        "oracle_survive": torch.tensor([2.0, 1.0], dtype=torch.float64),
    }
    figures = selector.DFlash2Draft.summarise(sums)
    assert figures["candidate_recall"] == 0.75 and figures["selector_accuracy"] == 1 / 3
    close(figures["candidate_mass"], 0.6, terms=2)
    assert figures["oracle_length"] == 1 + 1.0 + 0.5
    assert figures["acceptance_length"] == 1 + 0.5 + 0.5
    assert figures["selector_loss"] == 2.0 and "confidence_bce" not in figures
    assert figures["loss"] == 3.0


def test_the_smallest_stage_trains_and_drafts_what_it_was_trained_for(dataset, head):
    """The code that CONTRIBUTING.md shows: a number per token is added to the logits."""
    page = (Path(__file__).parents[4] / "CONTRIBUTING.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(class BiasedWalk.*?)```", page, re.DOTALL)
    known: dict[str, Any] = {"BlockDraft": BlockDraft, "Walk": Walk, "StageRows": StageRows}
    known |= {"LowRank": LowRank, "nn": nn, "torch": torch}
    exec(code, known)
    plain = build_draft("dflash", dataset, head)
    biased = type("Biased", (known["BiasedDraft"], DFlashDraft), {})(plain.config, plain.options)
    biased.load_state_dict(plain.state_dict(), strict=False)
    biased.share(head)
    batch, token = packed(dataset), 7
    with torch.no_grad():
        assert torch.equal(biased.chains(batch, head, 2), plain.chains(batch, head, 2))
        biased.bias[token] = 1e4  # it drafts nothing else now
        assert bool((biased.chains(batch, head, 2) == token).all())
    biased.bias.data.zero_()
    torch.manual_seed(3)
    loss = biased.loss(batch, head, None).loss
    torch.manual_seed(3)
    close(loss.detach(), plain.loss(batch, head, None).loss.detach(), terms=network(4))
    loss.backward()
    assert float(biased.bias.grad.abs().max()) > 1e-4
    assert abs(float(biased.bias.grad.sum())) < 1e-4  # softmax: a shift of all logits is nothing
