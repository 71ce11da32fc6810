"""No key of a published config is dropped without a word: read, harmless, refused, or named."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import spec_train
from spec_data.shards.errors import DraftError
from spec_train.drafts import load_draft
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.names import HARMLESS, READ, unread_keys
from tests.spec_train.formats.published import (
    test_automodel,
    test_deepspec,
    test_modelopt,
    test_safeailab,
    test_specforge,
    test_speculators,
    tiny,
)
from tests.spec_train.formats.published.tiny import VD

CONFIGS: dict[str, dict[str, Any]] = {
    "SafeAILab": test_safeailab.CONFIG,
    "ModelOpt": test_modelopt.CONFIG,
    "DeepSpec": test_deepspec.CONFIG,
    "speculators": test_speculators.CONFIG | {"transformer_layer_config": test_speculators.LAYER},
    **{f"SpecForge: {n}": test_specforge.TEMPLATE | c for n, c in test_specforge.TEMPLATES.items()},
    **{
        f"AutoModel: {n}": test_automodel.TARGET | c | test_automodel.DRAFT
        for n, c in test_automodel.TARGETS.items()
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_key_of_a_known_trainer_is_known(name):
    assert unread_keys(DraftFiles(CONFIGS[name], {}, "here")) == []


def test_the_keys_that_vllm_writes_for_xpress_are_known():
    keys = {"xpress_topc": 4, "xpress_compile_head": True, "xpress_block_size": 8}
    assert unread_keys(DraftFiles(keys | {"architectures": ["Qwen3XPressModel"]}, {}, "")) == []


def test_the_tables_do_not_overlap():
    assert not READ & HARMLESS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(2)
    odd = {"residual_power": 2, "eagle_config": {"depth_decay": 0.5}, "unused": None}
    tensors = tiny.eagle3_tensors() | tiny.maps(torch.arange(VD))
    tensors["embed_tokens.weight"] = tiny.noise(tiny.V, tiny.H)
    ids = {"eagle_aux_hidden_state_layer_ids": [2, 6, 9]}
    return tiny.write(tmp_path / "draft", test_specforge.TEMPLATE | ids | odd, tensors)


def test_an_unknown_key_is_named_when_the_draft_is_read(folder, caplog):
    with caplog.at_level(logging.WARNING):
        load_draft(folder)
    assert "warning[unread-keys]" in caplog.text
    assert "not read: eagle_config.depth_decay, residual_power." in caplog.text


def test_check_does_not_call_such_a_draft_sound(folder):
    found = spec_train.export(draft=str(folder)).findings["spec-train"]
    assert "ok" not in [finding.level for finding in found]
    (text,) = [f.text for f in found if "residual_power" in f.text]
    assert "another draft than the one that was trained" in text


@pytest.mark.parametrize(
    "odd",
    [
        {"logits_scaling": 8.0},
        {"embedding_multiplier": 12.0},
        {"query_pre_attn_scalar": 256},
        {"attention_multiplier": 0.1},
    ],
    ids=str,
)
def test_arithmetic_of_other_models_is_refused(folder, odd):
    (name,) = odd
    raw = tiny.read_config(folder)
    with pytest.raises(DraftError, match=rf"config\.json: {name} = .* cannot be represented"):
        load_draft(tiny.write(folder, raw | odd, tiny.read_tensors(folder)))


def test_values_that_change_nothing_are_accepted(folder):
    neutral = {"logit_scale": 1.0, "query_pre_attn_scalar": tiny.D, "attention_multiplier": 0.5}
    raw = tiny.read_config(folder) | neutral  # 0.5 = D ** -0.5
    assert load_draft(tiny.write(folder, raw, tiny.read_tensors(folder)))
