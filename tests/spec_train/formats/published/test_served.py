"""The column "served by" of docs/published-drafts.md is what `export` reports of each form."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from spec_train.drafts import load_draft, own_files
from spec_train.formats.preflight import REFUSE, Subject, preflight
from tests.spec_train.formats.published import (
    test_automodel,
    test_deepspec,
    test_modelopt,
    test_safeailab,
    test_specforge,
    test_speculators,
    test_zlab_blocks,
    tiny,
)
from tests.spec_train.formats.published.blocks import block_tensors
from tests.spec_train.formats.published.tiny import VD, H
from tests.test_failures_page import tables

Made = tuple[dict[str, Any], dict[str, torch.Tensor]]
ENGINES = {
    "vLLM": ("vllm", "vllm"),
    "SGLang": ("sglang", "sglang"),
    "llama.cpp": ("llama.cpp", "hf"),
}
FACTS = tiny.target()


def eagle3(config: dict[str, Any], **changes: Any) -> Made:
    tensors = tiny.eagle3_tensors() | tiny.maps(torch.arange(VD))
    if changes.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": tiny.gain(H) for i in range(3)}
    return config | changes, tensors


def automodel_eagle1() -> Made:
    own = {"architectures": ["LlamaEagleDraftModel"], "draft_num_hidden_layers": 1}
    tensors = tiny.eagle_tensors(first_norm=True) | {"norm.weight": tiny.gain(H)}
    return test_automodel.TARGET | test_automodel.TARGETS["llama"] | own, tensors


def automodel_eagle3() -> Made:
    tensors = tiny.eagle3_tensors("layers.0.") | tiny.maps(torch.arange(VD))
    config = test_automodel.TARGET | test_automodel.TARGETS["llama"] | test_automodel.DRAFT
    return config, test_automodel.in_its_form(tensors)


ROWS: dict[str, Callable[[], Made]] = {
    "SafeAILab EAGLE-1/2 without a bias of `fc`": lambda: (
        test_safeailab.EAGLE | test_safeailab.FORMS["without"],
        test_safeailab.eagle_draft("without", FACTS),
    ),
    "SafeAILab EAGLE-1/2 with a bias of `fc`": lambda: (
        test_safeailab.EAGLE,
        test_safeailab.eagle_draft("with a bias of fc", FACTS),
    ),
    "NVIDIA AutoModel EAGLE-1/2": automodel_eagle1,
    "SafeAILab EAGLE-3": lambda: eagle3(test_safeailab.CONFIG),
    "SpecForge EAGLE-3 and TorchSpec": lambda: eagle3(test_specforge.TEMPLATE),
    "SpecForge and TorchSpec EAGLE-3.1": lambda: eagle3(
        test_specforge.TEMPLATE, fc_norm=True, norm_output=True
    ),
    "speculators EAGLE-3 with its trainer's defaults": lambda: test_speculators.published(
        "the trainer's defaults"
    ),
    "speculators EAGLE-3 without switches": lambda: test_speculators.published("no switch at all"),
    "NVIDIA AutoModel EAGLE-3": automodel_eagle3,
    "NVIDIA ModelOpt EAGLE-3": lambda: (
        test_modelopt.CONFIG,
        tiny.eagle3_tensors("layers.0.") | {"d2t": torch.arange(VD)},
    ),
    "JetSpec": lambda: (test_zlab_blocks.CONFIG | test_zlab_blocks.JETSPEC, block_tensors()),
    "DeepSpec EAGLE-3 (": lambda: (test_deepspec.CONFIG, test_deepspec.published(FACTS)),
}
"""The start of a row's first cell, and a draft of that form."""


def row_of(start: str) -> list[str]:
    found = [
        row
        for header, *rows in tables("published-drafts.md")
        if "served by" in header
        for row in rows
        if row[0].startswith(start)
    ]
    assert len(found) == 1, f"{len(found)} rows start with {start!r}"
    return found[0]


@pytest.mark.parametrize("start", ROWS)
def test_the_engines_of_a_row_are_those_that_the_check_finds(tmp_path, start):
    torch.manual_seed(61)
    folder = tiny.write(tmp_path / "eagle3-draft", *ROWS[start]())
    own = own_files(load_draft(folder, FACTS), str(folder))
    serving = [
        name
        for name, (engine, form) in ENGINES.items()
        if REFUSE not in [f.level for f in preflight(Subject(own, FACTS, form))[engine]]
    ]
    listed = [name for name in ENGINES if name in row_of(start)[-1]]
    assert serving == listed
