"""A draft records the RoPE factors of its longrope target; eval uses them, export names them."""

import json
from pathlib import Path

import pytest
import torch

from spec_train import export
from spec_train.evaluation import evaluate
from tests.spec_data.runs import run, save_target, write_corpus
from tests.spec_train import flat
from tests.spec_train.evaluation.tools import run_eval

LIMIT = 128


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A longrope target with a corpus of short documents."""
    folder = tmp_path_factory.mktemp("longrope")
    path = save_target(folder / "target", "phi3-longrope")
    config = json.loads((path / "config.json").read_text())
    config["original_max_position_embeddings"] = LIMIT
    config["rope_parameters"]["original_max_position_embeddings"] = LIMIT
    (path / "config.json").write_text(json.dumps(config))
    return path, write_corpus(folder / "chats.jsonl", 12)


@pytest.mark.parametrize("factors", ["short", "long"])
def test_eval_decodes_with_the_factors_of_the_capture(
    made: tuple[Path, Path], factors: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, corpus = made
    run(target, corpus, tmp_path / "data", rope_factors=factors)
    flat.fit("eagle3", tmp_path / "data", tmp_path / "run", steps=1, ttt_steps=2, device="cpu")
    origin = json.loads((tmp_path / "run/last/config.json").read_text())["spec_train"]["origin"]
    assert origin["rope_factors"] == factors
    loaded = []
    load = evaluate.load_target

    def loading(*arguments: object) -> object:
        loaded.append(load(*arguments))  # type: ignore[arg-type]
        return loaded[-1]

    monkeypatch.setattr(evaluate, "load_target", loading)
    given = dict(
        draft=str(tmp_path / "run"),
        target=str(target),
        prompts=str(corpus),
        limit=1,
        max_new_tokens=4,
        device="cpu",
    )
    found = run_eval(given)
    assert not any("rope_factors" in line for line in found["warnings"])
    (model,) = loaded
    rope = model.config.rope_parameters
    rotary = model.model.rotary_emb
    dim = rotary.inv_freq.shape[0] * 2
    theta = rope["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim)
    wanted = 1 / (torch.tensor(rope[f"{factors}_factor"]) * theta)
    assert torch.allclose(rotary.inv_freq.float(), wanted, rtol=1e-5)
    lines = [f.text for f in export(tmp_path / "run", target=target).of("spec-train")]
    named = any("short factors of longrope" in line for line in lines)
    assert named == (factors == "short")
