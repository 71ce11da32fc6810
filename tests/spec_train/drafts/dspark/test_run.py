"""Block drafts from the command line: fit, resume, evaluate on data and against the target."""

import json
from pathlib import Path

import pytest

from spec_train.cli import main
from spec_train.drafts import load_draft
from tests.factory import tiny_dataset
from tests.spec_train.evaluation import tools as evaluate_tools
from tests.spec_train.evaluation.tools import respond

target, prompts = evaluate_tools.target, evaluate_tools.prompts
trained, workplace = evaluate_tools.trained, evaluate_tools.workplace

SMALL = ["--num-layers", "1", "--block-size", "4", "--mask-token-id", "3"]
STEPS = ["--batch-size", "2", "--seq-len", "64", "--lr", "0.003", "--validation", "0.15"]


@pytest.fixture(scope="module")
def data(tmp_path_factory, target, prompts) -> Path:
    """Return a dataset of the target's own responses."""
    documents = [(*respond(target, p), [("user", 0, 1)]) for p in prompts]
    folder = tmp_path_factory.mktemp("data") / "own"
    return tiny_dataset(folder, layers=(0, 2), model=target, documents=documents)


def fit(name: str, data: Path, out: Path, *more: str) -> int:
    """Fit with flags; "key=value" is an option without one, in a config file."""
    table = dict(word.split("=") for word in more if not word.startswith("-") and "=" in word)
    file = out.with_suffix(".json")
    file.write_text(json.dumps(table))
    more = ("--config", str(file), *(word for word in more if word.split("=")[0] not in table))
    flags = ["fit", name, "--data", str(data), "--out", str(out), "--device", "cpu"]
    return main([*flags, *STEPS, *SMALL, *more])


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("dspark", ("--markov-rank", "8", "--draft-vocab-size", "40", "markov_head_type=rnn")),
        ("dflash", ()),
        ("dflash2", ("selector_top_k=4",)),
        ("domino", ("--base-decay", "0.5")),
        ("xpress", ()),
        ("lilicorr", ("lilicorr_candidate_topk=4", "conv_kernel_size=2")),
    ],
    ids=str,
)
def test_fit_and_eval_end_to_end(name, more, data, workplace, tmp_path, capsys) -> None:
    out = tmp_path / "run"
    assert fit(name, data, out, "--steps", "12", "--eval-every", "6", *more) == 0
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    held_out = [line for line in lines if line["split"] == "validation"]
    assert [line["step"] for line in held_out] == [0, 6, 12]
    assert held_out[-1]["loss"] < held_out[0]["loss"]
    best = max(held_out, key=lambda line: line["product_limit_length"] or 1)
    kept = json.loads((out / "best" / "validation.json").read_text())
    assert kept["product_limit_length"] == best["product_limit_length"]
    draft = load_draft(out / "best")
    assert (draft.name, draft.depth) == (name, 4 if draft.config.sample_from_anchor else 3)
    common = ["eval", "--draft", str(out), "--device", "cpu", "--json", str(tmp_path / "out.json")]
    real = ["--target", str(workplace / "target"), "--prompts", str(workplace / "prompts.jsonl")]
    real += ["--max-new-tokens", "16"]
    assert main([*common, "--data", str(data), "--split", "all", *real]) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["identical"] == report["responses"] == 8 and report["different"] == []
    assert report["draft_tokens"] == draft.depth
    assert report["draft_passes"] <= report["rounds"]  # one forward pass per round that drafts
    assert report["data"]["on_policy"] == 1.0
    assert main([*common, *real, "--temperature", "0.8", "--limit", "2"]) == 0
    assert main([*common, *real, "--draft-tokens", "9"]) == 2
    assert f"drafts at most {draft.depth} tokens" in capsys.readouterr().err
    threshold = ["--confidence-threshold", "0.9"]
    if name != "dspark":
        assert main([*common, *real, *threshold]) == 2
        assert "has no confidence head" in capsys.readouterr().err
    else:
        assert main([*common, *real, *threshold]) == 0
        cut = json.loads((tmp_path / "out.json").read_text())
        assert cut["drafted"] < report["drafted"] and cut["identical"] == cut["responses"]
