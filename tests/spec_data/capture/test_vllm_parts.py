"""What the backend of vLLM does without vLLM: order tokens, record a model, refuse its absence.

`tests/engines/test_capture_vllm.py` runs the real engine.
"""

import importlib.util

import pytest
import torch
from torch import nn

from spec_data.capture.backend import BackendOptions, open_backend, vllm_version
from spec_data.capture.vllm_backend import spans_of
from spec_data.capture.vllm_worker import Recorder, block_output, head_input
from spec_data.shards.errors import MissingError, RunError, TargetError

H = 4


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def forward(*documents: torch.Tensor, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and positions of a forward; the first document begins at position `start`."""
    positions = [torch.arange(len(d)) for d in documents]
    positions[0] = positions[0] + start
    return torch.cat(documents), torch.cat(positions)


def test_documents_are_where_they_ran_in_any_order_and_forward():
    a, b, c = ids(5, 6, 7), ids(8), ids(5, 6)
    found = spans_of([forward(c, a), forward(b)], [a, b, c])
    assert found == [(0, slice(2, 5)), (1, slice(0, 1)), (0, slice(0, 2))]
    assert spans_of([forward(c, c)], [c, c]) == [(0, slice(0, 2)), (0, slice(2, 4))]


def test_a_prefix_from_a_cache_is_refused():
    """As are a split prefill and a document that did not run."""
    a, b = ids(5, 6, 7, 8), ids(9)
    for forwards in (
        [forward(a[2:], b, start=2)],
        [forward(a[:2]), forward(a[2:], b, start=2)],
        [forward(b)],
    ):
        with pytest.raises(RunError, match=r"document 0 of the batch \(4 tokens\) as a whole"):
            spans_of(forwards, [a, b])


class Block(nn.Module):
    """As vLLM's: the residual is added by the next block, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)

    def forward(self, positions, hidden_states, residual):
        if residual is None:
            residual = hidden_states.clone()
        else:
            residual.add_(hidden_states)
        return self.linear(residual), residual


class LogitsProcessor(nn.Module):
    def forward(self, head, hidden_states):
        return hidden_states @ head.T


class Model(nn.Module):
    """A model as vLLM has them, with three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.config = type("Config", (), {"num_hidden_layers": 3})()
        self.embed = nn.Embedding(10, H)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.logits_processor = LogitsProcessor()

    def forward(self, input_ids, positions):
        states, residual = self.embed(input_ids), None
        for block in self.layers:
            states, residual = block(positions, states, residual)
        return (states + residual).tanh()

    def compute_logits(self, hidden_states):
        return self.logits_processor(self.embed.weight, hidden_states / 2)[:, :9]


@torch.no_grad()
def test_the_recorder_keeps_raw_outputs_and_the_input_of_the_head():
    torch.manual_seed(0)
    model = Model()
    recorder = Recorder(model, (-1, 0, 2))
    recorder.full_logits = True
    tokens, positions = ids(3, 1, 4), torch.arange(3)
    output = model(input_ids=tokens, positions=positions)
    x = model.embed(tokens)
    expected = {-1: x}
    for k, block in enumerate(model.layers):
        x = x + block.linear(x)
        expected[k] = x
    (found,) = recorder.forwards
    assert torch.equal(found["ids"], tokens) and torch.equal(found["positions"], positions)
    assert found["layers"].keys() == {-1, 0, 2}
    for k, value in found["layers"].items():
        torch.testing.assert_close(value, expected[k])
    assert torch.equal(found["final"], output / 2)
    assert torch.equal(found["logits"], model.compute_logits(output))
    recorder.remove()
    model(input_ids=tokens, positions=positions)
    assert len(recorder.forwards) == 1


def test_models_that_cannot_be_recorded_are_refused():
    model = Model()
    Recorder(model, (0,))
    model.forward = lambda input_ids, positions: torch.zeros(1, H)
    with pytest.raises(TargetError, match="embeddings"):
        model(input_ids=None, positions=ids(0))
    model.compute_logits = lambda hidden: hidden
    with pytest.raises(TargetError, match="runs no logits processor"):
        head_input(model, torch.ones(1, H))
    with pytest.raises(TargetError, match="returns str"):
        block_output(("states",))
    x = torch.ones(2, H)
    assert torch.equal(block_output((x, None)), x) and block_output(x) is not x
    assert torch.equal(block_output((x, x)), x * 2)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_the_extra_is_named(tmp_path):
    with pytest.raises(MissingError, match="pip install vllm"):
        vllm_version()
    with pytest.raises(MissingError, match="environment of its own"):
        open_backend("vllm", BackendOptions(path=tmp_path))
