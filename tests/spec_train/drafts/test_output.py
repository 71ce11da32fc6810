"""What a draft returns for a batch beside its loss, and losses of one's own."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spec_data.shards.errors import ConfigError, DraftError
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.losses import menu
from spec_train.losses.head import TargetHead
from tests.factory import tiny_dataset
from tests.spec_train.drafts import any_draft
from tests.spec_train.drafts.any_draft import SMALL, build_draft, packed
from tests.tolerance import close, close_gradients, network

dataset, head = any_draft.dataset, any_draft.head
KINDS = sorted(set(SMALL) - {"mtp"})


def soft(logits, teacher, weights):
    """Cross-entropy with the target's distribution."""
    return -(weights * (teacher.p * logits.log_softmax(-1)).sum(-1)).sum()


def hard(logits, teacher, weights):
    """Cross-entropy with one token, as products."""
    return weights * F.cross_entropy(logits, teacher.label, reduction="none")


def made(name, dataset, head, **options):
    """A draft whose loss has one term, a distribution loss."""
    options = {"loss": "ce", "loss_target": "soft"} | options
    if name == "eagle":
        options = {"noise": 0.0} | options
    return build_draft(name, dataset, head, **options).eval()


def one_term(name):
    """Whether the distribution loss of the logits is all of the loss."""
    return name not in ("eagle", "lilicorr", "dflash2", "domino", "dspark")


def gradients(draft, loss):
    parameters = draft.trainable_parameters()
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {
        str(i): torch.zeros_like(p) if g is None else g
        for i, (p, g) in enumerate(zip(parameters, found, strict=True))
    }


def seeded(call, *args, **options):
    torch.manual_seed(4)
    return call(*args, **options)


@pytest.mark.parametrize("name", KINDS)
def test_a_call_is_the_loss_and_its_rows_are_what_the_loss_is_made_of(dataset, head, name):
    draft, batch = made(name, dataset, head), packed(dataset)
    output = seeded(draft, batch, head)
    plain = seeded(draft.scored, batch, head, None)
    assert torch.equal(output.loss, plain.loss)
    assert draft.summarise(output.sums) == draft.summarise(plain.sums)
    size = draft.config.draft_vocab_size
    count = len(output.weights)
    assert output.logits.shape == output.teacher.p.shape == (count, size) and count > 10
    assert output.labels.shape == (count,) and (output.weights > 0).all()
    assert output.logits.requires_grad and not output.teacher.p.requires_grad
    rest = 0 if output.teacher.rest is None else output.teacher.rest
    close(output.teacher.p.sum(-1) + rest, torch.ones(count), terms=size)
    assert output.logits is output.logits, "computed once"
    if one_term(name):
        mine = soft(output.logits, output.teacher, output.weights)
        close(mine.detach(), output.loss.detach(), terms=network(4))
        close_gradients(
            gradients(draft, mine),
            gradients(draft, seeded(draft, batch, head).loss),
            terms=network(4, True, count),
        )


@pytest.mark.parametrize("name", KINDS)
def test_a_loss_of_ones_own_that_is_the_usual_one_has_its_loss_and_gradients(dataset, head, name):
    batch = packed(dataset)
    for mine, target in ((soft, "soft"), (hard, "hard")):
        draft = made(name, dataset, head, loss_target=target)
        usual = seeded(draft, batch, head)
        own = seeded(draft, batch, head, loss_fn=mine)
        close(own.loss.detach(), usual.loss.detach(), terms=network(4))
        close_gradients(
            gradients(draft, own.loss), gradients(draft, usual.loss), terms=network(4, True, 100)
        )
        figures = draft.summarise(usual.sums)
        for key, value in draft.summarise(own.sums).items():
            if value is not None and key in figures:
                assert value == pytest.approx(figures[key], rel=1e-3, abs=1e-5), key


def test_it_is_called_for_some_rows_at_a_time_and_not_only_once(dataset, head, monkeypatch):
    draft, batch = made("eagle3", dataset, head), packed(dataset)
    whole = seeded(draft, batch, head, loss_fn=soft).loss
    default = menu.head_loss.__defaults__
    sizes = []

    def watched(logits, teacher, weights):
        assert logits.shape == teacher.p.shape and len(teacher.label) == len(weights)
        sizes.append(len(logits))
        return soft(logits, teacher, weights)

    monkeypatch.setattr(menu.head_loss, "__defaults__", (12, *default[1:]))  # 4 slots of 3 steps
    assert default[0] is None
    close(seeded(draft, batch, head, loss_fn=watched).loss, whole.detach(), terms=network(4))
    assert max(sizes) <= 4 and len(sizes) > 10


def test_the_teacher_of_k_logits_has_its_rest(tmp_path, head):
    path = tiny_dataset(tmp_path / "data", n_docs=6, supervision="topk:4")
    dataset = HiddenStatesDataset(path)
    draft = made("eagle3", dataset, TargetHead.from_dataset(path))
    output = draft(dataset[0:4])
    assert output.teacher.rest is not None and (output.teacher.rest > 0).any()
    assert float(output.teacher.p.sum(-1).max()) <= 1.001
    assert draft.loss(dataset[0:4], loss_fn=hard).loss > 0


def mean(logits, teacher, weights):
    return (weights * F.cross_entropy(logits, teacher.label, reduction="none")).mean()


def normalised(logits, teacher, weights):
    return hard(logits, teacher, weights).sum() / weights.sum()


def without_weights(logits, teacher, weights):
    return F.cross_entropy(logits, teacher.label, reduction="none")


BAD = {
    "does not add up over rows": mean,
    "with weights of 0 nan": normalised,
    "is not weights \\* loss": without_weights,
    "does not depend on the logits": lambda logits, teacher, weights: weights,
    r"expected a tensor \[\] or": lambda logits, teacher, weights: logits,
    "found float": lambda logits, teacher, weights: 1.0,
    "expected a function": 5,
    "it has parameters": nn.Bilinear(2, 2, 1),
}


@pytest.mark.parametrize("said", BAD)
@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_a_loss_that_would_be_wrong_in_parts_is_refused(dataset, head, name, said):
    draft = made(name, dataset, head)
    with pytest.raises(ConfigError, match=said):
        draft.loss(packed(dataset), head, loss_fn=BAD[said])


def test_pace_weights_of_a_block_are_the_usual_ones(dataset, head):
    batch = packed(dataset)
    for target in ("soft", "hard"):
        options = {"position_weights": "dpace", "loss_target": target}
        draft = made("dflash", dataset, head, **options)
        usual = seeded(draft, batch, head)
        own = seeded(draft, batch, head, loss_fn=soft if target == "soft" else hard)
        close(own.loss.detach(), usual.loss.detach(), terms=network(4))


def test_segments_have_rows_without_a_graph_and_the_same_loss(dataset, head):
    draft = made("peagle", dataset, head, segments=2)
    batch = packed(dataset)
    output = seeded(draft, batch, head)
    whole = seeded(made("peagle", dataset, head), batch, head)
    assert not output.logits.requires_grad and whole.logits.requires_grad
    close(
        soft(output.logits, output.teacher, output.weights), output.loss.detach(), terms=network(4)
    )


def test_no_row_no_logits(dataset, head):
    draft, batch = made("eagle3", dataset, head), packed(dataset)
    batch = copy.copy(batch)
    batch.loss_mask = torch.zeros_like(batch.loss_mask)
    output = draft(batch, head)
    assert output.loss == 0 and output.logits.shape == (0, 40) and len(output.labels) == 0
    assert output.teacher.p.shape == (0, 40) and len(output.weights) == 0
    with pytest.raises(DraftError, match="not kept"):
        _ = type(output)(output.loss, output.sums).logits


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the compiler about itself
def test_a_compiled_draft_has_the_same_loss(dataset, head):
    draft, batch = made("eagle3", dataset, head), packed(dataset)
    loss = draft(batch, head).loss
    close(torch.compile(draft, backend="eager")(batch, head).loss, loss.detach(), terms=network(4))
