"""Every current family: one dataset that trains and evaluates every draft; rotary frequencies."""

import json
import os
from pathlib import Path

import pytest
import torch

from spec_data.models.families import TARGETS
from spec_data.models.reading import text_config
from spec_data.shards.errors import TargetError
from spec_train.drafts.layers import Rotary
from spec_train.training.fit import fit
from tests.current_families import (
    CURRENT,
    EVERY_DRAFT,
    EVERY_DRAFT_LONG,
    NESTED,
    NOT_DECODED,
    ONE_PER_ROW,
    WITHOUT_ROPE,
)
from tests.families import FAMILIES, MORE_FAMILIES, tiny_model
from tests.spec_data.runs import run, save_target, write_corpus
from tests.spec_train import flat
from tests.spec_train.drafts.any_draft import SHAPED, SMALL
from tests.spec_train.evaluation.tools import run_eval

ALL = bool(os.environ.get("SPEC_TEST_FAMILIES"))
ALL_FAMILIES = (*CURRENT, *NESTED)
CAPTURED = "0,1,2"  # the last of the four blocks is left out, as serving asks


def train(draft: str, place: Path, steps: int = 1) -> Path:
    """Fit a draft to the dataset in `place`; return its run."""
    options = {"steps": steps, "batch_size": 1, "validation": 0, "device": "cpu"}
    values = options | SMALL[draft] | {"data": str(place / "data")}
    joined = flat.split(draft, **values, out=str(place / draft))
    assert fit(draft, *joined).finished
    return place / draft


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Return a function that makes, once per family, a target, a corpus and a dataset on disk."""
    made: dict[str, Path] = {}

    def place(family: str) -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            save_target(folder / "target", family)
            write_corpus(folder / "chats.jsonl", 6)
            run(folder / "target", folder / "chats.jsonl", folder / "data", layers=CAPTURED)
            made[family] = folder
        return made[family]

    return place


def drafts_of(family: str) -> list[str]:
    """Return the drafts to fit: all, or one in turn (see `EVERY_DRAFT`)."""
    names = sorted(SHAPED)
    if ALL or family in EVERY_DRAFT:
        return names
    return [names[ALL_FAMILIES.index(family) % len(names)]]


PLAIN = [f for f in CURRENT if f not in {*EVERY_DRAFT, *ONE_PER_ROW, *WITHOUT_ROPE}]
LATER = set(PLAIN) - set(PLAIN[::6])
"""Five of six of them: tests of every family hold its capture and its rope."""


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=pytest.mark.long) if f in LATER else f for f in ALL_FAMILIES],
)
def test_generate_fit_and_eval(family: str, places) -> None:
    """One dataset of a registered family trains and evaluates every draft (see `drafts_of`)."""
    place = places(family)
    (name,) = json.loads((place / "data" / "target" / "config.json").read_text())["architectures"]
    assert name in TARGETS
    manifest = json.loads((place / "data" / "manifest.json").read_text())
    assert (manifest["packing"]["form"] == "rows") == (family in ONE_PER_ROW)
    for draft in drafts_of(family):
        is_trained_and_evaluated(draft, place)


def is_trained_and_evaluated(draft: str, place: Path) -> None:
    at, data = train(draft, place), str(place / "data")
    report = run_eval(dict(draft=str(at), data=data, split="all", device="cpu"))
    assert report["data"]["simulated"]["acceptance_length"] >= 1


@pytest.mark.long
@pytest.mark.parametrize("family", EVERY_DRAFT_LONG)
def test_every_draft_is_trained_and_evaluated(family: str, places) -> None:
    for draft in SHAPED:
        is_trained_and_evaluated(draft, places(family))


@pytest.mark.long
@pytest.mark.skipif(not ALL, reason="takes minutes; set SPEC_TEST_FAMILIES=1")
@pytest.mark.parametrize("family", ALL_FAMILIES if ALL else ["all"])
def test_decoding_with_the_target_is_lossless(family: str, places) -> None:
    """Real decoding emits what the target alone does; a running state verifies token by token."""
    place = places(family)
    settings = {"prompts": str(place / "chats.jsonl"), "limit": 2, "device": "cpu"}
    settings |= {"target": str(place / "target")}
    for draft in SHAPED:
        config = dict(draft=str(train(draft, place)), max_new_tokens=8, **settings)
        if family in ("bamba", "jamba"):
            with pytest.raises(TargetError, match=r"one by one|token by token"):
                run_eval(config)
            continue
        report = run_eval(config)
        assert (report["stepwise"] is not None) == (family in NOT_DECODED)
        assert report["identical"] + report["ties"] == report["responses"] == 2


def live_frequencies(model: torch.nn.Module) -> list[tuple[torch.Tensor, float]]:
    """Return the inverse frequencies and factors of the live module, of its full attention."""
    found = []
    for path, module in model.named_modules():
        if "vision" in path or "visual" in path:
            continue
        names = [n for n, _ in module.named_buffers(recurse=False) if n.endswith("inv_freq")]
        wanted = [n for n in names if "original" not in n and "sliding" not in n]
        for name in wanted:
            factor = name.replace("inv_freq", "attention_scaling")
            found.append((getattr(module, name), getattr(module, factor, 1.0)))
        assert not names or wanted, path
    return found


@pytest.mark.parametrize("family", [*ALL_FAMILIES, *FAMILIES, *MORE_FAMILIES])
def test_the_drafts_rope_is_the_live_rotary_module(family: str) -> None:
    model = tiny_model(family)
    config = model.config.to_dict()
    shape = TARGETS[config["architectures"][0]](config)
    ours = Rotary(shape)
    found = live_frequencies(model)
    assert bool(found) == (family not in (*WITHOUT_ROPE, "gpt2"))
    for frequencies, factor in found:
        torch.testing.assert_close(ours.inv_freq, frequencies, rtol=0, atol=0)
        assert ours.factor == pytest.approx(factor)
    assert shape.num_hidden_layers == text_config(model.config).num_hidden_layers
    assert shape.rms_norm_eps == norm_eps(model)
    assert shape.hidden_size == text_config(model.config).hidden_size


def norm_eps(model: torch.nn.Module) -> float:
    """Return the epsilon of the final norm; 1e-6 where that norm has none."""
    norms = [m for n, m in model.named_modules() if n.rpartition(".")[2] in NORMS]
    names = ("variance_epsilon", "eps")
    return next((getattr(norms[-1], n) for n in names if hasattr(norms[-1], n)), 1e-6)


NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm", "norm_f", "embedding_norm")
