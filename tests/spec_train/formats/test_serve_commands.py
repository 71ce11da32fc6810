"""How an export is served: the commands of each engine, the card, and forms that are not read."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

import spec_train
from spec_data.shards.errors import DraftError
from spec_train.drafts import load_draft
from spec_train.evaluation.exporting import ExportResult
from tests.factory import hub_snapshot
from tests.spec_train.drafts import any_draft
from tests.spec_train.formats import own_draft

dataset, head, target = any_draft.dataset, any_draft.head, own_draft.target

BLOCK = {"num_layers": 1, "block_size": 4, "mask_token_id": 5}
OPTIONS: dict[str, dict[str, Any]] = {
    "eagle": {"depth": 5},
    "eagle3": {"ttt_steps": 3},
    "eagle3 deep": {"ttt_steps": 3, "num_layers": 2},
    "peagle": {"depths": 4, "num_layers": 1, "mask_token_id": 5},
    "dspark": BLOCK | {"markov_rank": 8},
    "dspark mask": BLOCK | {"markov_rank": 8, "layout": "mask"},
    "dflash": BLOCK,
    "dflash anchor": BLOCK | {"layout": "anchor"},
    "dflash2": BLOCK | {"selector_top_k": 4},
    "domino": BLOCK,
    "lilicorr": BLOCK | {"lilicorr_candidate_topk": 8},
    "xpress": BLOCK,
}
COUNTS = {"eagle": 5, "eagle3": 3, "peagle": 4, "dspark": 4, "dflash": 3, "dflash anchor": 4}
COUNTS |= {"dspark mask": 3, "dflash2": 3, "domino": 4, "lilicorr": 3, "xpress": 3}


@pytest.fixture(scope="module")
def drafts(dataset, head, tmp_path_factory) -> dict[str, Path]:
    """One draft directory of each kind and layout."""
    folder = tmp_path_factory.mktemp("drafts")
    for name, options in OPTIONS.items():
        draft = any_draft.build_draft(name.split()[0], dataset, head, **options)
        draft.save_pretrained(folder / name.replace(" ", "-"))
    return {name: folder / name.replace(" ", "-") for name in OPTIONS}


def checked(draft: Path, form: str, target: Any, out: Path | None = None) -> Any:
    return spec_train.export(draft, out, form, target)


def lines(found: ExportResult, engine: str) -> list[list[str]]:
    """The words of an engine's commands."""
    (serving,) = [one for one in found.servings if one.engine.startswith(engine)]
    return [shlex.split(line) for line in serving.lines]


def after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


SERVED_AS = {
    "eagle": ("eagle", "EAGLE", None),
    "eagle3": ("eagle3", "EAGLE3", None),
    "peagle": ("eagle3", None, None),
    "dspark": ("dspark", "DSPARK", "draft-dspark"),
    "dspark mask": ("dspark", "DSPARK", "draft-dspark"),
    "dflash": ("dflash", "DFLASH", "draft-dflash"),
    "dflash anchor": ("dspark", None, "draft-dspark"),
    "dflash2": ("dflash", "DFLASH", "draft-dflash"),
    "domino": (None, "DFLASH", None),
    "lilicorr": ("dflash", "DFLASH", None),
    "xpress": ("dflash", None, None),
}
"""The method of vLLM, the algorithm of SGLang and the type of llama.cpp."""


@pytest.mark.parametrize("name", SERVED_AS)
def test_the_commands_of_the_servers(drafts, target, name):
    method, algorithm, kind = SERVED_AS[name]
    count, result = COUNTS[name], checked(drafts[name], "vllm" if method else "sglang", target)
    if method:
        (words,) = lines(result, "vLLM")
        assert words[:3] == ["vllm", "serve", str(target)]
        config = json.loads(after(words, "--speculative-config"))
        assert config.pop("parallel_drafting", False) == (name == "peagle")
        expected = {"model": drafts[name].name, "method": method, "num_speculative_tokens": count}
        assert config == expected
    if kind:
        _, convert, serve = lines(result, "llama.cpp")
        assert after(convert, "--target-model-dir") == str(target)
        assert after(serve, "--spec-type") == kind
        assert after(serve, "--spec-draft-n-max") == str(count)  # its default of 3 is less
    if algorithm:
        (words,) = lines(checked(drafts[name], "sglang", target), "SGLang")
        assert after(words, "--model-path") == str(target)
        assert after(words, "--speculative-algorithm") == algorithm
        if algorithm.startswith("EAGLE"):
            assert after(words, "--speculative-num-steps") == str(count)
            assert after(words, "--speculative-num-draft-tokens") == str(count + 1)
        if algorithm == "DSPARK":  # else block_size, which counts the anchor's slot, too
            assert after(words, "--speculative-dspark-block-size") == str(count)


def test_the_engine_of_the_form_is_the_first_and_only_those_that_serve_have_commands(
    drafts, target
):
    """The first one is also the next command that `export` names."""
    for form in ("vllm", "sglang"):
        found = checked(drafts["dspark"], form, target)
        assert len(found.servings) > 1 and found.servings[0].engine.lower().startswith(form)
    found = checked(drafts["peagle"], "vllm", target)
    assert {one.engine.split()[0] for one in found.servings} == {"vLLM"}
    assert checked(drafts["dspark"], "hf", target).servings == []


@pytest.mark.parametrize(
    ("name", "form", "engine", "text"),
    [
        ("dflash", "speculators", "llama.cpp", "--format vllm"),
        ("dflash", "speculators", "sglang", "--format sglang"),
        ("eagle3", "speculators", "sglang", "--format sglang"),
        ("eagle3 deep", "vllm", "sglang", "--format sglang"),
        ("eagle3 deep", "sglang", "vllm", "--format vllm"),
        ("dflash", "transformers", "vllm", "--format vllm"),
        ("dspark", "vllm", "deepspec", "--format deepspec"),
    ],
)
def test_the_check_honours_the_format(drafts, target, name, form, engine, text):
    """Each of these was found by converting or serving; without one, engines have their own."""
    (finding,) = checked(drafts[name], form, target).findings[engine]
    assert finding.level == "refuse" and text in finding.text
    plain = spec_train.export(draft=str(drafts[name]), target=str(target))
    assert not any(text in f.text for f in plain.findings[engine] if f.level == "refuse")


class Tokenizer:
    """Instead of one: the target of the fixture has none."""

    def __call__(self, text: str, return_tensors: str) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([[3, 9, 14, 2, 7]])}

    def decode(self, ids: torch.Tensor) -> str:
        return str(ids.tolist())


def test_an_export_for_transformers_needs_no_target_to_be_read_back(drafts, tmp_path):
    spec_train.export(draft=str(drafts["dflash"]), out=tmp_path / "out", format="transformers")
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.filterwarnings("ignore")  # those of generate
def test_the_lines_for_transformers_run(drafts, target, tmp_path, monkeypatch, capsys):
    found = checked(drafts["dflash"], "transformers", target, tmp_path / "out")
    model, info = transformers.MuseGlimmerAssistantModel.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.config.block_size == 4 and model.config.mask_token_id == 5
    (serving,) = found.servings
    monkeypatch.setattr(
        transformers.AutoTokenizer, "from_pretrained", lambda *_: Tokenizer(), raising=True
    )
    capsys.readouterr()
    exec(compile("\n".join(serving.lines), "serving", "exec"), {})
    plain = transformers.AutoModelForCausalLM.from_pretrained(target).generate(
        Tokenizer()("", "pt")["input_ids"], max_new_tokens=64, do_sample=False
    )
    assert capsys.readouterr().out.strip().splitlines()[-1] == str(plain[0].tolist())


def test_the_card(drafts, tmp_path, target, caplog, monkeypatch):
    folder = drafts["eagle3"]
    measured = {"step": 90, "serving_like_length": 2.345, "acceptance_length": 3.5}  # of training
    (folder / "validation.json").write_text(json.dumps(measured))
    try:
        found = checked(folder, "vllm", target, tmp_path / "out")
    finally:
        (folder / "validation.json").unlink()
    card = (tmp_path / "out" / "README.md").read_text()
    _, front, body = card.split("---\n", 2)
    header = yaml.safe_load(front)
    assert header == {"library_name": "spec-train", "tags": ["speculative-decoding", "eagle3"]}
    assert f"# EAGLE-3 draft for {target.name}\n" in body  # no path of this machine
    assert "2.35 tokens per verification" in body and "at step 90" in body
    assert "3.5" not in body
    for serving in found.servings:
        assert all(line in body for line in serving.lines)
        assert all(line in found.details() for line in serving.lines)
        assert f"<td>{serving.engine}</td>" in found._repr_html_()
    assert load_draft(tmp_path / "out").name == "eagle3"
    (folder / "validation.json").write_text(json.dumps(measured | {"serving_like_length": "x"}))
    monkeypatch.chdir(target)
    here = checked(folder, "vllm", ".", tmp_path / "here")
    assert "warning[card]" not in caplog.text
    (folder / "validation.json").write_text("{")
    assert "acceptance length" not in checked(folder, "vllm", ".", tmp_path / "damaged").card
    assert "warning[card]" in caplog.text
    (folder / "validation.json").unlink()
    assert f"# EAGLE-3 draft for {target.name}\n" in here.card
    assert "acceptance length" not in here.card
    again = checked(drafts["eagle3"], "vllm", "org/some-model", tmp_path / "hub")
    assert "base_model: org/some-model\n" in again.card and "acceptance length" not in again.card


def test_a_strangers_name_of_the_target_is_only_a_name_in_the_card(drafts, tmp_path):
    name = "org/x\nlicense: mit\n```\n---\n# a | b <img src=x> ![y](z)"
    card = checked(drafts["eagle3"], "vllm", name, tmp_path / "out").card
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front).keys() == {"library_name", "tags", "base_model"}
    assert yaml.safe_load(front)["base_model"] == " ".join(name.split())
    title, *rows = re.sub(r"\\.", "", body.split("## Serve")[0]).strip().splitlines()
    assert title.startswith("# EAGLE-3 draft for org/x license: mit ")
    assert all(row.count("|") == 3 for row in rows if row.startswith("|"))
    assert not any(row.startswith(("#", "`", "---")) for row in rows)
    shown = re.sub(r"(?ms)^(`{3,}).*?^\1$", "", body)  # without the blocks of code
    assert shown.count("\n# ") == 1 and not re.search(r"(?m)^(---|`{3,}[^`]*$)", shown)


@pytest.mark.parametrize(
    "key, factor, text",
    [
        ("hidden_size", 2, "hidden size"),
        ("vocab_size", 2, "vocabulary of"),
        ("eos_token_id", 1, ""),
    ],
)
def test_sizes_of_a_hub_name_are_checked_with_its_cached_config(
    drafts, tmp_path, target, monkeypatch, key, factor, text
):
    """Only config.json is in the cache of the Hub, as after a look at the model."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot = hub_snapshot(tmp_path)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config[key] = (config.get(key) or 0) * factor
    (snapshot / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name, draft in drafts.items():
        found = spec_train.export(draft=str(draft), target="some/model")
        texts = [f.text for f in found.findings["spec-train"] if "another target" in f.text]
        assert bool(texts) == bool(text) and all(text in line for line in texts), (name, texts)
    if key == "hidden_size":
        with pytest.raises(DraftError, match="hidden size"):
            checked(drafts["eagle3"], "vllm", "some/model", tmp_path / "out")
