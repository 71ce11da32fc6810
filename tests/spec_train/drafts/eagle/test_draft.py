"""The EAGLE-1/2 draft: its data and its noise."""

import functools
from typing import Any

import pytest
import torch

from spec_data.shards.errors import DatasetError
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import Manifest
from spec_train.drafts.eagle.draft import EagleDraft, eagle_loss
from spec_train.drafts.eagle.options import EagleOptions
from spec_train.losses.menu import LossKind
from tests.spec_train.drafts import any_draft
from tests.spec_train.drafts.any_draft import build_draft, packed
from tests.tolerance import close, network

dataset, head = any_draft.dataset, any_draft.head

FORWARD = {"terms": network(4), "dtype": torch.float32}  # up to four steps; sums are float64


def test_datasets_without_every_final_state_are_refused(dataset: HiddenStatesDataset) -> None:
    raw = dataset.manifest.to_json()

    def check(**changes: Any) -> None:
        EagleDraft.check_data(EagleOptions(), Manifest.of(raw | changes))

    check()
    with pytest.raises(DatasetError, match=r"--final supervised does not keep.*--final all"):
        check(final="supervised")
    others = [c for c in raw["columns"] if c["name"] != "hidden.final"]
    with pytest.raises(DatasetError, match=r"--supervision logits .*final-hidden"):
        check(columns=others, supervision="logits")


def test_noise_is_in_training_alone_and_can_be_passed_in(dataset, head) -> None:
    draft, batch = build_draft("eagle", dataset, head), packed(dataset)
    states = batch.hidden["hidden.final"]
    plain = functools.partial(eagle_loss, draft, batch, head, None, LossKind(), weights=(1.0, 0.1))
    torch.manual_seed(7)
    drawn = draft.loss(batch, head, draft.slot_counts(batch)).loss
    torch.manual_seed(7)
    noise = (torch.rand(states.shape) * 2 - 1) * 0.1
    given = plain(noise=noise).loss
    close(drawn, given, **FORWARD)
    draft.eval()
    quiet = draft.loss(batch, head, draft.slot_counts(batch))
    close(quiet.loss, plain().loss, **FORWARD)
    assert abs(float((quiet.loss - drawn).detach())) > 1e-4
    figures = EagleDraft.summarise(quiet.sums)
    assert "accept_rate/4" in figures and "accept_rate/5" not in figures
    parts = 1.0 * figures["smooth_l1"] + 0.1 * figures["cross_entropy"]
    close(figures["loss"], float(quiet.loss.detach()), **FORWARD)
    close(figures["loss"], parts, **FORWARD)
