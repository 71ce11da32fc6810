"""Biases of a draft follow the target's config; who drops them is said by fit and by export."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import spec_train
from spec_train.formats.preflight import REFUSE, refusing
from spec_train.options.draft_options import ShapeOptions
from spec_train.training.fit import fit
from tests.current_families import current_config
from tests.families import FAMILIES, MORE_FAMILIES
from tests.spec_data.runs import run, save_target, write_corpus
from tests.spec_train import flat
from tests.spec_train.drafts.any_draft import SHAPED, SMALL

BIASES = ("attention_bias", "mlp_bias")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of GLM-4, whose config has attention_bias = true."""
    folder = tmp_path_factory.mktemp("glm")
    save_target(folder / "target", "glm")
    write_corpus(folder / "chats.jsonl", 4)
    run(folder / "target", folder / "chats.jsonl", folder / "data", layers="0,1,2")
    return folder / "data"


def train(draft: str, data: Path, out: Path, **options: Any) -> tuple[dict[str, Any], set[str]]:
    """Fit one step; return config.json and the names of the tensors that are biases."""
    values = {"steps": 1, "batch_size": 1, "validation": 0, "device": "cpu"} | SMALL[draft]
    joined = flat.split(draft, data=str(data), out=str(out), **values | options)
    result = fit(draft, *joined)
    assert result.step == 1 or result.finished
    config = json.loads((out / "last" / "config.json").read_text())
    names = {n for n in load_file(out / "last" / "model.safetensors") if n.endswith("proj.bias")}
    of_stages = ("confidence", "lilicorr")  # these have biases whatever the target has
    return config, {n for n in names if not any(part in n for part in of_stages)}


@pytest.mark.parametrize("draft", SHAPED)
def test_a_draft_has_the_biases_of_its_target_and_fit_names_who_drops_them(
    draft: str, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, biases = train(draft, data, tmp_path / "run")
    assert config["attention_bias"] is True and not config.get("mlp_bias")
    assert {n.split(".")[-2] for n in biases} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    said = [r.getMessage() for r in caplog.records if "has attention_bias" in r.getMessage()]
    dropped = refusing(draft, "attention_bias")
    assert all(text.startswith("warning[engines]: ") for text in said)
    assert len(said) == bool(dropped)
    assert all(engine in said[0] for engine in dropped)

    checked = spec_train.export(draft=str(tmp_path / "run"))
    for engine, findings in checked.findings.items():
        of_bias = [f for f in findings if "attention_bias" in f.text]
        name = findings[0].engine
        assert len(of_bias) == (name in dropped), engine  # one rule, one finding
        assert all(f.level == REFUSE for f in of_bias)


def test_a_switch_overrides_the_target(data: Path, tmp_path: Path) -> None:
    config, biases = train("eagle3", data, tmp_path / "without", attention_bias="false")
    assert config["attention_bias"] is False and not biases
    config, biases = train("eagle3", data, tmp_path / "both", mlp_bias="true")
    assert config["attention_bias"] and config["mlp_bias"]
    assert {n.split(".")[-2] for n in biases} >= {"gate_proj", "up_proj", "down_proj", "o_proj"}


def test_a_draft_without_biases_is_continued_without_them(data: Path, tmp_path: Path) -> None:
    """A draft may have none; "auto" does not ask it for any."""
    train("eagle3", data, tmp_path / "old", attention_bias="false")
    config, biases = train("eagle3", data, tmp_path / "new", init_from=str(tmp_path / "old"))
    assert config["attention_bias"] is False and not biases


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES, "jais2", "seed_oss", "glm"])
def test_auto_reads_the_keys_of_the_targets_config(family: str) -> None:
    known = FAMILIES | MORE_FAMILIES
    raw = (known[family]() if family in known else current_config(family)).to_dict()
    sizes = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), 8)
    fields = ShapeOptions().layer_fields(raw | sizes | {"intermediate_size": 8}, 1)
    of_config = {name for name in BIASES if raw.get(name)}
    assert {name for name in BIASES if fields[name]} == of_config
    biased = {"gpt_oss", "gpt_oss-yarn", "glm4", "jais2", "seed_oss", "glm"}
    assert bool(of_config) == (family in biased)
