"""The mask token of a new draft, and those that other trainers take."""

import json
from pathlib import Path

import pytest
import torch

from spec_data.shards.errors import DraftError
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.drafts.mask_token import choose_mask_token, usual_mask_tokens
from spec_train.losses.head import TargetHead
from tests.spec_train.drafts import any_draft
from tests.spec_train.drafts.any_draft import build_draft

dataset = any_draft.dataset


def write_tokenizer(folder: Path, words: dict[str, int], added: dict[str, int]) -> None:
    raw = {
        "model": {"type": "BPE", "vocab": words},
        "added_tokens": [{"id": i, "content": text} for text, i in added.items()],
    }
    (folder / "tokenizer.json").write_text(json.dumps(raw))


def test_the_mask_token_is_unused_then_reserved_then_padding_then_unseen(tmp_path: Path) -> None:
    embedding = torch.ones(8, 4)
    counts = torch.tensor([5, 5, 0, 5, 5, 0, 0, 5])
    words = {f"w{i}": i for i in range(4)}
    ends = {"eos_token_id": [5], "pad_token_id": 2}
    write_tokenizer(tmp_path, words, {"<|im_end|>": 4, "<end>": 5})
    assert choose_mask_token(tmp_path, ends, embedding, counts) == 6  # 6 and 7 have no text
    embedding[6] = 0  # with a zero embedding, the slots could not be told apart
    assert choose_mask_token(tmp_path, ends, embedding, counts) == 2
    write_tokenizer(tmp_path, words, {"<|a|>": 4, "<b>": 5, "<|reserved_0|>": 6, "<c>": 7})
    assert choose_mask_token(tmp_path, ends, torch.ones(8, 4), counts) == 6
    (tmp_path / "tokenizer.json").unlink()
    assert choose_mask_token(tmp_path, ends, torch.ones(8, 4), counts) == 2
    assert choose_mask_token(tmp_path, {"eos_token_id": 5}, torch.ones(8, 4), counts) == 6
    counts[3] = 2
    assert choose_mask_token(tmp_path, {}, torch.ones(8, 4), counts + 5 * (counts == 0)) == 3
    with pytest.raises(DraftError, match="every embedding"):
        choose_mask_token(tmp_path, {}, torch.zeros(8, 4), counts)


def test_an_ordinary_word_is_no_reserved_token(tmp_path: Path) -> None:
    """A vocabulary of words has "mask", "unused" and "reserved" among them."""
    words = {"a": 0, "Ġmask": 1, "unused": 2, "b": 3, "z": 5}
    write_tokenizer(tmp_path, words, {"<repo_name>": 4})
    counts = torch.tensor([5, 0, 0, 5, 0, 0])
    assert choose_mask_token(tmp_path, {}, torch.ones(6, 4), counts) == 4
    usual = usual_mask_tokens(tmp_path, {}, torch.ones(6, 4), counts)
    assert "a reserved token" not in usual.values()
    write_tokenizer(tmp_path, words, {"<mask>": 4})
    assert "a reserved token" in usual_mask_tokens(tmp_path, {"pad_token_id": 1}, torch.ones(6, 4),
                                                   counts + 1).values()  # fmt: skip


def test_the_usual_mask_tokens_are_those_of_other_trainers_too(tmp_path: Path) -> None:
    special = {"<pad>": 3, "[MASK]": 4, "<|reserved_0|>": 5, "<|reserved_1|>": 6}
    write_tokenizer(tmp_path, {f"w{i}": i for i in range(3)}, special)
    named = {"mask_token": "[MASK]", "pad_token": {"content": "<pad>"}, "unk_token": "<unknown>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    counts = torch.tensor([5, 5, 5, 5, 5, 5, 5, 5, 0, 5])
    found = usual_mask_tokens(tmp_path, {"eos_token_id": [2, 99]}, torch.ones(10, 4), counts)
    assert found == {
        8: "the choice of spec-train",
        7: "the first id that the tokenizer leaves unused",
        4: "the mask token",
        3: "the pad token",
        2: "the eos token",
        6: "a reserved token",  # the first one that is named so is [MASK]
        0: "the first id of the vocabulary",
        9: "the last id of the vocabulary",
    }
    assert list(found)[:3] == [8, 7, 4], "the likeliest first"
    (tmp_path / "tokenizer.json").unlink()
    zero = usual_mask_tokens(tmp_path, {"bos_token_id": 1}, torch.zeros(3, 4), None)
    assert set(zero) == {0, 1, 2}, "a target whose embedding is zero is another check's finding"


def test_a_mask_token_of_no_use_is_refused(dataset: HiddenStatesDataset) -> None:
    head = TargetHead.from_dataset(dataset.path)
    with pytest.raises(DraftError, match="vocabulary has 64 tokens"):
        build_draft("dspark", dataset, head, mask_token_id=64)
    head.embed_weight[7] = 0
    with pytest.raises(DraftError, match="its embedding is zero"):
        build_draft("dspark", dataset, head, mask_token_id=7)
    assert build_draft("dspark", dataset, head, mask_token_id=9).config.mask_token_id == 9
