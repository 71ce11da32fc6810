"""A target, a dataset of it and a draft, as files; and changes of the target that must be named."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from spec_train.drafts.eagle3.options import Eagle3Options
from spec_train.options.training import Training
from spec_train.training.fit import fit
from tests.spec_data.runs import run, save_target, write_corpus

ROWS = {"enable_thinking": False}
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A target, data of it whose rows have template kwargs of their own, and a draft."""
    folder = tmp_path_factory.mktemp("same")
    save_target(folder / "target", template="qwen3")
    lines = write_corpus(folder / "c.jsonl", 8).read_text().splitlines()
    rows = [json.loads(line) | {"chat_template_kwargs": ROWS} for line in lines]
    (folder / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "p.jsonl").write_text('{"prompt": "question 99"}\n')
    run(folder / "target", folder / "c.jsonl", folder / "data", layers="0,2")
    config = Training(
        data=str(folder / "data"), out=str(folder / "run"), steps=1, seq_len=128, device="cpu"
    )
    fit("eagle3", config, Eagle3Options(ttt_steps=2, draft_vocab_size=100))
    return folder


@pytest.fixture
def target(place, tmp_path) -> Path:
    """A copy of the target, to be changed."""
    shutil.copytree(place / "target", tmp_path / "changed")
    return tmp_path / "changed"


def edit(file: Path, **changes) -> None:
    """Change keys of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def fine_tune(target: Path) -> None:
    """Change weights of a target, but not its embedding."""
    tensors = load_file(target / WEIGHTS)
    tensors |= {k: 1.01 * v for k, v in tensors.items() if k.endswith("norm.weight")}
    save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})


def round_to_3_bits(target: Path) -> None:
    """Round every weight of a target but its embedding to seven values."""
    tensors = load_file(target / WEIGHTS)
    for name, value in tensors.items():
        if "embed" not in name:
            step = value.abs().amax().clamp_min(1e-9) / 3
            tensors[name] = (value / step).round() * step
    save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})


def switch_yarn_on(target: Path) -> None:
    """Extend the context of a target."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    rope["original_max_position_embeddings"] = 64
    edit(target / "config.json", rope_parameters=rope)


def split_otherwise(target: Path) -> None:
    """Let the tokenizer of a target cut text into other pieces, with the same vocabulary."""
    pieces = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
    edit(target / "tokenizer.json", pre_tokenizer=pieces | {"use_regex": False})
