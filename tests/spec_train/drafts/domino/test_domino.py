"""Parts of Domino by themselves: its GRU, and the share of the backbone's loss along a run."""

import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from spec_train.drafts.domino.stage import PrefixGru
from spec_train.options.training import Training
from spec_train.training.fit import fit
from spec_train.training.trainer import Trainer
from tests.spec_train.drafts import any_draft
from tests.spec_train.drafts.any_draft import build_draft, packed
from tests.tolerance import close, network

dataset, head = any_draft.dataset, any_draft.head


def test_the_gru_is_torchs_and_its_weights_are_read_by_it():
    ours, x = PrefixGru(5, 3).double(), torch.randn(2, 4, 5, dtype=torch.float64)
    theirs = nn.GRU(5, 3, bias=False, batch_first=True).double()
    theirs.load_state_dict(ours.state_dict())
    wanted = theirs(x)[0]
    close(ours.block(x), wanted, terms=network(4))
    state = None
    for d in range(4):
        state = ours(x[:, d], state)
        close(state, wanted[:, d], terms=network(4))


@pytest.mark.parametrize(("progress", "share"), [(0.0, 0.8), (0.25, 0.4), (0.5, 0.0), (1.0, 0.0)])
def test_the_backbones_share_falls_to_nothing_and_is_nothing_outside_of_training(
    dataset, head, progress, share
):
    given = {"base_weight": 0.8, "base_decay": 0.5, "position_weights": "auto"}
    draft = build_draft("domino", dataset, head, **given)
    draft.progress = progress
    close(torch.tensor(draft.base_share), torch.tensor(share), terms=2)
    batch = packed(dataset)
    figures = draft.summarise(draft.loss(batch, head, None).sums)
    assert (figures["base_loss"] is None) == (figures["base_accuracy"] is None) == (share == 0)
    draft.eval()
    assert draft.base_share == 0.0
    measured = draft.summarise(draft.loss(batch, head, None).sums)
    assert measured["base_loss"] is None and measured["loss"] == measured["cross_entropy"]


def test_a_resumed_run_knows_how_far_it_is(dataset, head, tmp_path, monkeypatch):
    """The share that it trains with is that of the uninterrupted run, and so are its weights."""
    told: list[tuple[str, float]] = []
    step, stop = Trainer._train_step, [True]

    def recorded(self, *given):
        step(self, *given)
        told.append((Path(self.config.out).name, self.draft.progress))
        if stop and len(told) == 2:
            self._signals.append(stop.pop() and signal.SIGTERM)

    monkeypatch.setattr(Trainer, "_train_step", recorded)
    options = build_draft("domino", dataset, head).options
    for name in ("parts", "parts", "whole"):
        out = str(tmp_path / name)
        result = fit("domino", Training(data=(str(dataset.path),), out=out, steps=4), options)
        assert result.finished != (len(told) == 2)
    assert told == [(name, x) for name in ("parts", "whole") for x in (0.0, 0.25, 0.5, 0.75)]
    files = [(tmp_path / name / "last" / "model.safetensors") for name in ("parts", "whole")]
    assert files[0].read_bytes() == files[1].read_bytes()
