"""The confidence of DSpark after training: temperatures of held-out forecasts, in the weights."""

import json
import math

import pytest
import torch

import spec_train
from spec_train.drafts import load_draft
from spec_train.drafts.dspark import stage as markov
from spec_train.drafts.dspark.stage import TEMPERATURES
from tests.spec_train.drafts import any_draft
from tests.spec_train.drafts.any_draft import build_draft, packed

dataset, head = any_draft.dataset, any_draft.head


def forecasts(draft, batch, head, monkeypatch):
    """The logit, the label and the depth of every forecast that the loss trains."""
    seen = []
    original = markov.MarkovRows._by_temperature

    def recorded(self, logits, acceptance):
        some = (self.chosen.weight > 0).tolist()
        depths = (self.chosen.rows % draft.depth).tolist()
        rows = zip(some, depths, logits.tolist(), acceptance.tolist(), strict=True)
        seen.extend(row[1:] for row in rows if row[0])
        return original(self, logits, acceptance)

    with monkeypatch.context() as patch:
        patch.setattr(markov.MarkovRows, "_by_temperature", recorded)
        torch.manual_seed(0)
        return draft.summarise(draft.loss(batch, head, None).sums), seen


def likelihood(rows, temperature: float) -> float:
    """The negative log-likelihood of forecasts, one after another."""
    total = 0.0
    for _, logit, label in rows:
        c = 1 / (1 + math.exp(-logit / temperature))
        total -= label * math.log(c) + (1 - label) * math.log(1 - c)
    return total


@pytest.fixture
def draft(dataset, head, monkeypatch):
    """A draft whose confidence is about three times as sure as it may be."""
    monkeypatch.setattr(markov, "LEAST_FORECASTS", 8)
    draft = build_draft("dspark", dataset, head, markov_rank=4, draft_vocab_size=40).eval()
    with torch.no_grad():
        weight = draft.confidence_head.proj.weight
        weight.copy_(0.05 * torch.randn(weight.shape))
        rows = forecasts(draft, packed(dataset), head, monkeypatch)[1]
        mean = sum(label for *_, label in rows) / len(rows)
        draft.confidence_head.proj.bias.fill_(3 * math.log(mean / (1 - mean)))
    return draft


def test_the_temperatures_are_the_most_likely_ones(draft, dataset, head, monkeypatch):
    figures, rows = forecasts(draft, packed(dataset), head, monkeypatch)
    assert len(rows) > 50

    def slow(rows):
        return min(TEMPERATURES, key=lambda t: likelihood(rows, t))

    assert figures["confidence_temperature"] == slow(rows)
    assert 2 < slow(rows) < 4  # it was too sure
    for d in range(draft.depth):
        of_depth = [row for row in rows if row[0] == d]
        expected = slow(of_depth) if len(of_depth) >= 8 else None
        assert figures[f"confidence_temperature/{d + 1}"] == expected
    draft.train()
    assert "confidence_nll" not in draft.loss(packed(dataset), head, None).sums


def test_few_forecasts_change_nothing(draft, dataset, head, monkeypatch, tmp_path):
    monkeypatch.setattr(markov, "LEAST_FORECASTS", 10**6)
    figures, _ = forecasts(draft, packed(dataset), head, monkeypatch)
    assert figures["confidence_temperature"] is None
    for name, given in (("a", figures), ("b", None)):
        draft.save_pretrained(tmp_path / name, figures=given)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b")]
    assert weights[0] == weights[1]


def test_what_engines_read_is_calibrated(draft, dataset, head, monkeypatch, tmp_path):
    """vLLM's confidence is the sigmoid of the stored head: it forecasts better."""
    figures, rows = forecasts(draft, packed(dataset), head, monkeypatch)
    draft.save_pretrained(tmp_path / "best", torch.float32, figures)
    stored = load_draft(tmp_path / "best").eval()
    again, calibrated = forecasts(stored, packed(dataset), head, monkeypatch)
    assert again["confidence_temperature"] == 1.0
    assert likelihood(calibrated, 1.0) < likelihood(rows, 1.0)
    temperature = figures["confidence_temperature"]
    for (_, before, _), (_, after, _) in zip(rows, calibrated, strict=True):
        assert math.isclose(before / temperature, after, rel_tol=1e-4, abs_tol=1e-5)
    by_depth = [figures[f"confidence_temperature/{d + 1}"] for d in range(draft.depth)]
    assert None not in by_depth
    (text,) = stored.files_beside("sglang", figures, calibrated=True).values()
    # SGLang divides the logits of the stored head by them
    assert json.loads(text)["temperatures"] == [t / temperature for t in by_depth]
    assert stored.files_beside("vllm", figures, calibrated=True) == {}
    same = {name: 2.0 for name in figures if name.startswith("confidence_temperature")}
    assert stored.files_beside("sglang", figures | same, calibrated=True) == {}
    few = figures | {"confidence_temperature/1": None}
    assert stored.files_beside("sglang", few, calibrated=True) == {}
    others = {n: p for n, p in stored.named_parameters() if "confidence" not in n}
    assert all(torch.equal(p, dict(draft.named_parameters())[n]) for n, p in others.items())


def test_an_export_for_sglang_has_the_temperatures_by_depth(dataset, head, tmp_path):
    draft = build_draft("dspark", dataset, head, markov_rank=4)
    figures = {f"confidence_temperature/{d + 1}": 1.0 + d for d in range(draft.depth)}
    draft.save_pretrained(tmp_path / "draft", torch.float32)
    validation = figures | {"confidence_temperature": 2.0}
    (tmp_path / "draft" / "validation.json").write_text(json.dumps(validation))
    notes = {}
    for form in ("sglang", "vllm"):
        out = tmp_path / form
        result = spec_train.export(draft=str(tmp_path / "draft"), format=form, out=str(out))
        notes[form] = next(s.note for s in result.servings if s.engine.startswith("SGLang"))
        assert (out / "confidence_temperatures.json").exists() == (form == "sglang")
    flag = f"--speculative-dspark-confidence-sts-path {tmp_path / 'sglang'}/confidence_temperatures"
    assert flag in notes["sglang"] and "sts-path" not in notes["vllm"]
    found = json.loads((tmp_path / "sglang" / "confidence_temperatures.json").read_text())
    assert found == {"temperatures": [1.0 + d for d in range(draft.depth)]}
