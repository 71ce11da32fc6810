"""The acceptance that training reports is what rejection sampling measures, for Vd < V as well.

Each slot is drafted by the draft's own drafter, after the document's tokens, and many draws are
accepted or rejected by the sampling code of `eval --temperature 1`, with the target's full
distribution. The draft vocabulary is the odd tokens: the target has much of its mass elsewhere.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_train.drafts.block.blocks import Blocks
from spec_train.drafts.frames import teacher_of
from spec_train.losses.sampling import Sampled
from tests.spec_train.drafts.test_references import Forced
from tests.spec_train.evaluation import tools
from tests.spec_train.evaluation.tools import VOCAB, batch_of, draft_for, head_of, respond, teach

target, prompts = tools.target, tools.prompts
DRAFT_IDS = torch.arange(VOCAB // 2) * 2 + 1
DRAWS = 80  # of every slot
OPTIONS: dict[str, dict[str, Any]] = {
    "eagle3": {"ttt_steps": 2},
    "peagle": {"depths": 2, "num_layers": 1},
    "dspark": {"num_layers": 1, "block_size": 3, "markov_rank": 4},
    "dflash": {"num_layers": 1, "block_size": 4},
}


@pytest.fixture(scope="module")
def model(target) -> Any:
    """The tiny target with a sharper head: a few tokens have most of the mass."""
    target.lm_head.weight.data *= 3
    return target


def make(kind: str, model: Any) -> Any:
    return draft_for(kind, model, draft_vocab=len(DRAFT_IDS), **OPTIONS[kind])


def logits_at(draft: Any, head: Any, batch: Any, anchor: int, count: int) -> list[Tensor]:
    """Return the draft logits [Vd] for the tokens after `anchor`, given the document's own."""
    ids = batch.input_ids[0].tolist()
    recorder: Any = Forced(iter(ids[anchor + 1 : anchor + 1 + count]))
    states = batch.aux(draft.config.layers)[:, :anchor]
    with torch.no_grad():
        drafter = draft.drafter(head)
        drafter.propose(ids[1 : anchor + 1], states, count, recorder)
    return recorder.seen


def accepted_draws(sampler: Sampled, draft_logits: Tensor, z: Tensor) -> int:
    """Draw DRAWS drafts and return how many the target's logits `z` [V] keep."""
    kept = 0
    for _ in range(DRAWS):
        token, q = sampler.draft(draft_logits, DRAFT_IDS, VOCAB)
        kept += sampler.verify(token[None], [q], torch.stack([z, z]))[1]
    return kept


def renormalised(draft_logits: Tensor, z: Tensor) -> float:
    p = torch.softmax(z[DRAFT_IDS], -1)
    return float(torch.minimum(p, torch.softmax(draft_logits, -1)).sum())


def anchors_of(batch: Any, depth: int) -> list[int]:
    """Return the anchors of whole supervised blocks."""
    mask = batch.loss_mask[0]
    return [t for t in range(1, len(mask) - depth) if mask[t : t + 1 + depth].all()]


def blocks_at(anchors: list[int]) -> Blocks:
    return Blocks(torch.tensor([anchors]), torch.ones(1, len(anchors), dtype=torch.bool))


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_expected_acceptance_is_the_rate_that_rejection_sampling_measures(kind, model, prompts):
    head, batch = head_of(model), batch_of(model, [respond(model, prompts[0])])
    draft = make(kind, model)
    teach(draft, model, prompts[:1], steps=15, lr=1e-2)
    sums = draft.eval().loss(batch, head, None).sums
    assert torch.equal(sums["measured"], sums["drafted"])
    reported = float(sums["acceptance"][0] / sums["drafted"][0])
    mask, z = batch.loss_mask[0], head.logits(batch.hidden["hidden.final"])[0]
    sampler, kept, wrong, slots = Sampled(1.0, 0), 0, 0.0, 0
    for t in range(1, len(mask) - 1):  # token t is known and token t + 1 is drafted
        if mask[t] and mask[t + 1]:
            (logits,) = logits_at(draft, head, batch, t, 1)
            kept += accepted_draws(sampler, logits, z[t])
            wrong += renormalised(logits, z[t])
            slots += 1
    assert slots == int(sums["drafted"][0])
    assert 0 < int(sums["supervised"][0]) < slots  # misses count in the acceptance as well
    measured = kept / (slots * DRAWS)
    assert abs(reported - measured) < 4 * 0.5 / (slots * DRAWS) ** 0.5
    assert wrong / slots > measured + 0.1


@pytest.mark.parametrize("loss", ["ce", "tv"])
@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_a_training_step_measures_the_acceptance_of_some_slots_unless_its_loss_needs_it(
    kind: str, loss: str, model: Any, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    head, batch = head_of(model), batch_of(model, [respond(model, prompts[0])])
    draft = make(kind, model)
    draft.use_options(replace(draft.options, loss=loss))

    def step(every: int) -> tuple[Any, list[Tensor]]:
        monkeypatch.setattr("spec_train.drafts.frames.MEASURED", every)
        torch.manual_seed(1)  # of the elements that P-EAGLE draws
        result = draft.train().loss(batch, head, None)
        return result.sums, list(torch.autograd.grad(result.loss, draft.trainable_parameters()))

    sums, gradients = step(3)
    everywhere, same = step(1)
    assert all(torch.equal(a, b) for a, b in zip(gradients, same, strict=True))
    mask, z = batch.loss_mask[0], head.logits(batch.hidden["hidden.final"])[0]
    total, count = 0.0, 0
    for t in range(1, len(mask) - 1):  # the slot before t drafts token t + 1
        if mask[t] and mask[t + 1] and (loss == "tv" or (t - 1) % 3 == 0):
            (logits,) = logits_at(draft, head, batch, t, 1)
            p = torch.softmax(z[t], -1)[DRAFT_IDS]
            total += float(torch.minimum(p, torch.softmax(logits, -1)).sum())
            count += 1
    assert 0 < count == int(sums["measured"][0])
    assert abs(total - float(sums["acceptance"][0])) < 1e-4 * count
    assert torch.equal(everywhere["measured"], everywhere["drafted"])
    assert (loss == "tv") == bool(sums["measured"][0] == sums["drafted"][0])
    for name in ("loss", "supervised", "drafted", "hits", "kept"):
        assert torch.equal(sums[name], everywhere[name])


@pytest.mark.parametrize("kind", ["dspark", "dflash"])
def test_tau_is_the_length_that_rejection_sampling_measures(kind, model, prompts):
    head, batch = head_of(model), batch_of(model, [respond(model, prompts[0])])
    draft = make(kind, model)
    depth = draft.depth
    teach(draft, model, prompts[:1], steps=15, lr=1e-2)
    z, anchors = head.logits(batch.hidden["hidden.final"])[0], anchors_of(batch, depth)
    result = draft.batch_loss(batch, head, None, blocks=blocks_at(anchors))
    figures = draft.summarise(result.sums)
    sampler, tokens, wrong_tokens = Sampled(1.0, 0), 0, 0.0
    for anchor in anchors:
        seen, product = logits_at(draft, head, batch, anchor, depth), 1.0
        tokens += DRAWS
        wrong_tokens += 1
        for _ in range(DRAWS):
            for d, logits in enumerate(seen):  # until the first rejection
                token, q = sampler.draft(logits, DRAFT_IDS, VOCAB)
                row = z[anchor + d]
                if not sampler.verify(token[None], [q], torch.stack([row, row]))[1]:
                    break
                tokens += 1
        for d, logits in enumerate(seen):
            product *= renormalised(logits, z[anchor + d])
            wrong_tokens += product
    rounds = len(anchors) * DRAWS
    measured, reported = tokens / rounds, figures["tau"]
    assert 0 < float(result.sums["supervised"].sum()) < len(anchors) * depth  # there are misses
    assert reported is not None
    assert abs(reported - measured) < 4 * depth / 2 / rounds**0.5
    assert wrong_tokens / len(anchors) > measured + 0.1


def test_the_confidence_label_is_the_rate_that_rejection_sampling_measures(model, prompts):
    """Over the drafts that the confidence head is trained on, with the weights of its loss."""
    head, batch = head_of(model), batch_of(model, [respond(model, prompts[0])])
    draft = make("dspark", model)
    teach(draft, model, prompts[:1], steps=15, lr=1e-2)
    anchors = anchors_of(batch, draft.depth)
    sums = draft.batch_loss(batch, head, None, blocks=blocks_at(anchors)).sums
    reported = float(sums["confidence_accepted"].sum() / sums["confidence_number"].sum())
    z, choice = head.logits(batch.hidden["hidden.final"])[0], batch.target_argmax[0]
    sampler, kept, wrong, total = Sampled(1.0, 0), 0.0, 0.0, 0.0
    for anchor in anchors:
        for d, logits in enumerate(logits_at(draft, head, batch, anchor, draft.depth)):
            if int(choice[anchor + d]) in DRAFT_IDS:
                weight = math.exp(-d / 4)
                total += weight
                kept += weight * accepted_draws(sampler, logits, z[anchor + d]) / DRAWS
                wrong += weight * renormalised(logits, z[anchor + d])
    assert abs(total - float(sums["confidence_number"].sum())) < 1e-6 * total
    assert abs(reported - kept / total) < 4 * 0.5 / (total * DRAWS) ** 0.5
    assert wrong / total > kept / total + 0.05


@pytest.mark.parametrize("kind", OPTIONS)
def test_rounded_states_do_not_change_how_much_the_target_has_in_the_draft_vocabulary(
    kind: str, model: Any, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A codec rounds states; the stored logsumexp is exact, so a quotient of the two is wrong."""
    monkeypatch.setattr("spec_train.drafts.teacher.rows_per_chunk", lambda width, device: 5)
    head, batch = head_of(model), batch_of(model, [respond(model, prompts[0])])
    draft, final = make(kind, model), batch.hidden["hidden.final"]
    true = head.logits(final)[0].softmax(-1)[:, DRAFT_IDS].sum(-1)  # [T]
    torch.manual_seed(4)
    noise = torch.randn_like(final) * final.square().mean(-1, keepdim=True).sqrt()
    batch.hidden["hidden.final"] = rounded = 0.9 * final + 0.02 * noise
    z = head.logits(rounded)[0]
    rows = teacher_of(draft, batch, head, 0)(torch.arange(len(true)))
    assert torch.allclose(rows.full(), z.softmax(-1)[:, DRAFT_IDS], atol=1e-6)
    assert torch.allclose(rows.p.sum(-1), torch.ones(len(true)))
    assert rows.mass is not None and batch.target_logsumexp is not None
    quotient = (z[:, DRAFT_IDS].logsumexp(-1) - batch.target_logsumexp[0]).exp().clamp(max=1)
    assert (rows.mass - true).abs().mean() < 0.04
    assert (quotient - true).abs().mean() > 0.08
    assert "target_logsumexp" not in draft.columns()
