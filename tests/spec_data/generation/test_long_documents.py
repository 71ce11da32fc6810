"""A long document among short ones costs its own forward: no pack and no proof is as long as it."""

import json
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from spec_data.capture import attention_in_parts
from spec_data.capture import model as model_module
from spec_data.capture.mask_forms import REQUESTS, ROWS, SINGLE
from spec_data.capture.model import Target
from spec_data.generation import plan as plan_module
from spec_data.generation.capture import unit_batches
from spec_data.shards.reader import HiddenStatesDataset
from tests.families import WINDOW
from tests.spec_data.runs import run, save_target
from tests.tolerance import close, network

LENGTHS = [9, 300, 12, 7, 64, 65]


@pytest.mark.parametrize("form", ["block-causal", ROWS])
def test_a_document_longer_than_a_pack_has_a_batch_of_its_own(form):
    batches = unit_batches(LENGTHS, form, pack_length=64, batch_tokens=256)
    assert sorted(d for rows in batches for row in rows for d in row) == list(range(6))
    assert batches[-2:] == [[[1]], [[5]]]
    assert all(sum(LENGTHS[d] for d in row) <= 64 for rows in batches[:-2] for row in rows)
    if form != ROWS:
        assert any(len(row) > 1 for rows in batches[:-2] for row in rows)


def test_without_longer_documents_nothing_is_different():
    lengths = [9, 30, 12, 7, 64]
    assert unit_batches(lengths, "block-causal", 64, 128) == [[[0, 1, 2, 3], [4]]]
    assert unit_batches(lengths, ROWS, 64, 128) == [[[4], [1]], [[2], [0], [3]]]
    assert unit_batches(lengths, SINGLE, 8, 128) == [[[d]] for d in range(5)]
    requests = [[[0], [1]], [[2], [3]], [[4]], [[5]], [[6]]]  # together until one is too much
    assert unit_batches([5, 3, 9, 1, 1, 20, 2], REQUESTS, 8, 10) == requests


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gpt_oss"])
def test_one_long_document_among_short_ones(family, tmp_path, monkeypatch):
    """The planted failure: every row of proof and capture was as long as the longest document."""
    monkeypatch.setattr(plan_module, "_LEAST_PACK", 64)
    monkeypatch.setattr(plan_module, "_MOST_PACK", 64)
    monkeypatch.setattr(model_module, "LONG_ROW", 64)
    monkeypatch.setattr(attention_in_parts, "QUERIES", 16)
    shapes: list[tuple[int, int]] = []
    forward = Target.forward

    def counted(self: Target, input_ids: torch.Tensor, *args: Any, **more: Any) -> Any:
        if not more.get("full_logits"):  # the proof of the head reads 512 tokens at most
            shapes.append((input_ids.shape[0], input_ids.shape[1]))
        return forward(self, input_ids, *args, **more)

    monkeypatch.setattr(Target, "forward", counted)
    target, corpus = save_target(tmp_path / "target", family), tmp_path / "c.jsonl"
    answers = [f"{i} yes" for i in range(8)] + ["so " * 170]
    rows = [
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]}
        for answer in answers
    ]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    manifest = run(target, corpus, tmp_path / "data", max_length=256)
    dataset = HiddenStatesDataset(tmp_path / "data")
    longest = int(dataset.lengths.max())
    assert longest > 2 * 64 > WINDOW
    # Alone: once as part of the sample, and once as data.
    assert [shape for shape in shapes if shape[1] > 64] == [(1, longest)] * 2
    packing = manifest.packing
    assert packing.pack_length == packing.longest == 64
    assert packing.form not in (ROWS, SINGLE)
    assert 0.3 < packing.utilisation <= 1
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    for index in (0, int(dataset.lengths.argmax())):
        row = dataset[index]
        with torch.no_grad():
            plain = model(row["input_ids"][None].long(), output_hidden_states=True)
        for k in (0, 2, 4):
            close(
                row[f"hidden.L{k}"].float(),
                plain.hidden_states[k + 1][0],
                terms=network(6),
                dtype=torch.float32,
                stored=torch.bfloat16,
            )
