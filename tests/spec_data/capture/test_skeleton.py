"""A skeleton tells what the whole model tells, and its blocks compute what the model's do."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_data.capture.model import Target
from spec_data.capture.skeleton import SkeletonTarget, embedded, load_skeleton, run_block, run_norm
from spec_data.shards.errors import TargetError
from tests.families import tiny_model

FAMILIES = ("gemma3", "qwen3_moe", "gpt2", "granite")
LAYERS = (-1, 0, 2, 3, 5)


@pytest.fixture(scope="module", params=FAMILIES)
def whole(request, tmp_path_factory):
    """A model directory, and the backend of the whole model."""
    path = tmp_path_factory.mktemp(request.param)
    tiny_model(request.param).save_pretrained(path)
    return path, Target.from_pretrained(path, LAYERS, device="cpu")


def test_head_and_positions_are_those_of_the_whole_model(whole):
    path, backend = whole
    rest = SkeletonTarget(path, LAYERS, "auto", False)
    assert rest.head == backend.head and rest.num_layers == backend.num_layers
    assert rest.dtype == backend.dtype and rest.architecture == backend.architecture
    own, found = backend.head_tensors(), rest.head_tensors()
    assert own.keys() == found.keys() and all(torch.equal(own[n], found[n]) for n in own)
    expected, positions = backend.positions(64), rest.positions(64)
    assert positions.record() == expected.record()
    assert all(expected.tables[n].equals(t) for n, t in positions.tables.items())


def test_a_block_of_a_skeleton_computes_what_it_does_in_the_model(whole):
    path, backend = whole
    ids = torch.randint(3, 96, (1, 20), generator=torch.Generator().manual_seed(0))
    layout = torch.zeros_like(ids), torch.arange(20)[None]
    captured = backend.forward(ids, *layout, None)
    states = {k: v[0] for k, v in captured.layers.items()}  # [T, H] each
    model = load_skeleton(path, (3,), dtype="float32")
    assert torch.equal(run_block(model, ids[0], 3, states[2]), states[3])
    assert torch.equal(run_norm(model, ids[0], states[5]), captured.final[0])
    assert torch.equal(embedded(model, ids[0]), states[-1])
    assert not torch.allclose(run_block(model, ids[0], 3, states[0]), states[3], rtol=0.01)


@pytest.mark.parametrize("family", ["falcon_h1", "bamba"])
def test_a_family_whose_blocks_cannot_be_left_out_is_refused(tmp_path, family):
    """The code of one looks into its blocks when it is built, that of the other when it runs."""
    tiny_model(family).save_pretrained(tmp_path)
    with pytest.raises(TargetError, match="blocks of this target cannot be left out"):
        load_skeleton(tmp_path, (), dtype="auto")


def test_weights_of_other_blocks_are_not_read(tmp_path):
    """They need not be there: a file without them is enough."""
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    kept = {n: t for n, t in load_file(file).items() if "layers." not in n or "layers.3." in n}
    save_file(kept, file, metadata={"format": "pt"})
    found = load_skeleton(tmp_path, (3,), dtype="auto")
    assert {n for n, _ in found.named_parameters()} == kept.keys()
    assert all(torch.equal(p, kept[n]) for n, p in found.named_parameters())
