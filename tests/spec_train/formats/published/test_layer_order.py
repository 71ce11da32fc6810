"""Layers in another order than ascending: the parts of fc and of the norms move with them."""

import logging

import pytest
import torch

from spec_data.shards.errors import DraftError
from spec_train.drafts import load_draft
from tests.spec_train.formats.published import tiny
from tests.spec_train.formats.published.test_vocabulary_maps import CONFIG
from tests.spec_train.formats.published.tiny import VD, H

KEY = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize("ids", [[9, 2, 6], [6, 9, 2], [2, 6, 9]], ids=str)
def test_states_in_the_order_of_the_file_give_the_same_logits(tmp_path, ids, caplog):
    torch.manual_seed(3)
    facts, tokens = tiny.target(), [3, 8, 1, 40, 5]
    tensors = tiny.eagle3_tensors() | tiny.maps(tiny.some_ids())
    tensors |= {f"fc_norm.{i}.weight": tiny.gain(H) for i in range(3)}
    states = {k: torch.randn(5, H).double() for k in ids}  # by the key's ids
    in_file = torch.cat([states[k] for k in ids], -1)
    ascending = torch.cat([states[k] for k in sorted(ids)], -1)
    want, _ = tiny.eagle3_logits(tensors, tokens, in_file, facts.embedding)
    config = CONFIG | {KEY: ids, "fc_norm": True}
    with caplog.at_level(logging.WARNING):
        folder = tiny.write(tmp_path / "draft", config, tensors)
        draft, found, _ = tiny.served(folder, facts, tokens, ascending)
    assert draft.config.layers == (1, 5, 8)
    tiny.assert_same(found, want)
    assert ("are not ascending" in caplog.text) == (ids != sorted(ids))
    assert ("warning[layer-order]" in caplog.text) == (ids != sorted(ids))


def test_a_layer_that_repeats_is_refused(tmp_path):
    tensors = tiny.eagle3_tensors() | tiny.maps(torch.arange(VD))
    folder = tiny.write(tmp_path / "draft", CONFIG | {KEY: [2, 2, 9]}, tensors)
    with pytest.raises(DraftError, match=r"config\.json: layers \[1, 1, 8\] repeat an id"):
        load_draft(folder, tiny.target())
