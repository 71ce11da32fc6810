"""The proof of an engine's states accepts those of transformers and refuses every mix-up."""

import pytest
import torch

from spec_data.capture.model import Target
from spec_data.capture.skeleton import prove_states
from spec_data.shards.errors import RunError
from tests.families import LAYERS, tiny_model
from tests.tolerance import network, tolerance

WANTED = (-1, 1, 2, 4)


def documents():
    """Token ids of documents, int64 [T] each."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 96, (n,), generator=generator) for n in (5, 30, 17)]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def target(request, tmp_path_factory):
    """A model directory, and the target of transformers in a dtype."""
    path = tmp_path_factory.mktemp("target")
    model = tiny_model("gemma3")  # scaled embeddings, norms of both kinds, windows
    torch.manual_seed(0)
    for name, module in model.named_modules():
        if "norm" in name:
            torch.nn.init.normal_(module.weight, 0.0, 0.3)
    model.save_pretrained(path)
    return path, Target.from_pretrained(path, range(-1, LAYERS), device="cpu", dtype=request.param)


def states_of(target):
    """Each document with its states alone: every layer, and the input of the head."""
    found = []
    for ids in documents():
        layout = torch.zeros_like(ids)[None], torch.arange(len(ids))[None]
        captured = target.forward(ids[None], *layout, None)
        found.append((ids, {k: v[0] for k, v in captured.layers.items()}, captured.final[0]))
    return found


def proven(target, states, layers=WANTED):
    path, model = target
    return prove_states(path, states, layers, blocks=LAYERS, dtype=model.dtype)


def test_the_states_of_transformers_are_proven(target):
    found = proven(target, states_of(target[1]))
    names = {"embedding", "final", "layer 1", "layer 2", "layer 4", f"layer {LAYERS - 1}"}
    assert found.keys() == names
    assert max(found.values()) <= tolerance(torch.float32, network(1))


@pytest.mark.parametrize("shift", [1, -1])
def test_layer_ids_that_are_off_by_one_are_refused(target, shift):
    states = [
        (ids, {k: own[min(max(k + shift, -1), LAYERS - 1)] if 0 <= k < LAYERS - 1 else v
          for k, v in own.items()}, final)
        for ids, own, final in states_of(target[1])
    ]  # fmt: skip
    with pytest.raises(RunError, match=r"layer \d is not the output of that block"):
        proven(target, states, (1, 2, 4))


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        (lambda own, final: (own | {2: own[3]}, final), "layer 2 is not the output"),
        (lambda own, final: (own, own[LAYERS - 1]), "not the final norm of its last block"),
        (lambda own, final: (own | {LAYERS - 1: final}, final), "relative error"),
        (lambda own, final: (own | {-1: own[-1] / 2}, final), "not that of the embedding"),
    ],
)
def test_one_wrong_state_is_refused_by_name(target, spoilt, message):
    with pytest.raises(RunError, match=message):
        proven(target, [(ids, *spoilt(*states)) for ids, *states in states_of(target[1])])


def test_a_document_that_sees_another_one_is_refused(target):
    """The states of a document behind another: its block attends to tokens that are not there."""
    path, model = target
    first, second, _ = documents()
    ids = torch.cat([first, second])[None]
    captured = model.forward(ids, torch.zeros_like(ids), torch.arange(ids.shape[1])[None], None)
    part = slice(len(first), None)
    layers = {k: v[0, part] for k, v in captured.layers.items()}
    leaked = (second, layers, captured.final[0, part])
    with pytest.raises(RunError, match="is not the output of that block"):
        prove_states(path, [leaked], WANTED, blocks=LAYERS, dtype=model.dtype)


def test_documents_with_states_that_are_not_finite_prove_nothing(target):
    states = states_of(target[1])
    states[1][1][2][4] = torch.nan
    assert proven(target, states)
    for _, own, _ in states:
        own[2][0] = torch.inf  # the first token of every document
    with pytest.raises(RunError, match="not finite"):
        proven(target, states)
