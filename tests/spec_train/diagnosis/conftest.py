"""One trained target, its data, and one sound draft per kind, for all modules of this folder."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from spec_train.drafts import Draft
from tests.spec_train.diagnosis.trained import VOCAB, make_data, texts, train_draft, train_target
from tests.spec_train.fitted import edit


@pytest.fixture(scope="session")
def target() -> PreTrainedModel:
    return train_target()


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("doctor")


@pytest.fixture(scope="session")
def data(target, folder) -> Path:
    return make_data(target, folder / "data")


@pytest.fixture(scope="session")
def narrow(target, folder) -> Path:
    """The same data with the layers of the drafts alone."""
    return make_data(target, folder / "narrow", layers=(1, 3))


@pytest.fixture(scope="session")
def target_dir(target, folder) -> Path:
    target.save_pretrained(folder / "target")
    return folder / "target"


@pytest.fixture(scope="session")
def chat_dir(target, folder) -> Path:
    """The target with a tokenizer, whose words are w1 to w38, and a chat template."""
    names = ["<answer>", *(f"w{i}" for i in range(1, VOCAB - 1)), "<end>"]
    words = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token="<answer>"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<end>", additional_special_tokens=["<answer>"]
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<answer> ' if m.role == 'assistant' }}{{ m.content }} "
        "{{- ' <end> ' if m.role == 'assistant' }}{% endfor %}"
        "{{ ' <answer>' if add_generation_prompt }}"
    )
    target.save_pretrained(folder / "chat")
    tokenizer.save_pretrained(folder / "chat")
    edit(folder / "chat" / "generation_config.json", eos_token_id=VOCAB - 1)
    edit(folder / "chat" / "config.json", eos_token_id=VOCAB - 1)
    return folder / "chat"


@pytest.fixture(scope="session")
def prompts(folder) -> Path:
    """Prompts that the target understands."""
    rows = [" ".join(f"w{i}" for i in ids) for ids in texts(24, 10, seed=99).tolist()]
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": row}) for row in rows))
    return file


@pytest.fixture(scope="session")
def sound(data) -> Callable[[str], Draft]:
    """Return a function that returns the trained draft of a kind; do not change it."""
    return functools.cache(lambda kind: train_draft(kind, data))


@pytest.fixture(scope="session")
def sound_dir(sound, folder) -> Callable[[str], Path]:
    """Return a function that returns the directory of the trained draft of a kind."""

    @functools.cache
    def saved(kind: str) -> Path:
        sound(kind).save_pretrained(folder / kind, torch.float32)
        return folder / kind

    return saved
