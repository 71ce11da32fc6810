"""A target with massive activations, a corpus that causes them, and a dataset of mixed codecs.

Test modules take the fixtures by assignment: an import would look unused, and shadowed.
"""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.spec_data.runs import run, save_target, write_corpus

MIXED = {"codec": "aux=default,final=fine", "final": "supervised"}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A tiny target whose token "~" makes massive activations in three channels."""
    path = save_target(tmp_path_factory.mktemp("target"))
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(path),
        AutoTokenizer.from_pretrained(path),
    )
    (massive,) = tokenizer("~")["input_ids"]
    with torch.no_grad():
        model.get_input_embeddings().weight[massive, :3] = 3000.0
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Chats, every seventh with one "~" in its question."""
    file = write_corpus(tmp_path_factory.mktemp("corpus") / "chats.jsonl", 40)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows[::7]:
        row["messages"][0]["content"] += " ~ !"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


@pytest.fixture(scope="module")
def mixed(target, corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("mixed") / "data"
    run(target, corpus, out, **MIXED)
    return out
