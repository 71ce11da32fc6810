"""Positions and final norm as the target's modules compute them: read, proven, stored, compared."""

import copy
import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_data.capture.live_positions import read_positions
from spec_data.models.families import fitted_shape
from spec_data.models.loading import fix_rope_factors
from spec_data.models.rope_settings import rotary_table
from spec_data.shards.position_data import Positions
from spec_train.drafts.layers import Rotary
from tests.current_families import EVERY_DRAFT, EVERY_DRAFT_LONG, WITHOUT_ROPE
from tests.families import FAMILIES, MORE_FAMILIES, tiny_model
from tests.tolerance import close

ROTARY = sorted(set(FAMILIES | MORE_FAMILIES) - {"gpt2"})  # which has learned positions
OFFSET = {"gemma2", "gemma3", "gemma3-nested"}  # RMSNorm by 1 + weight
LAYER_NORM = {"gpt2", "cohere"}


def reference(positions: Tensor, inv_freq: Tensor, factor: float) -> Tensor:
    """Cosines, then sines, of int64 [P] and float32 [r/2], one by one in float64: [2, P, r]."""
    found = torch.zeros(2, len(positions), 2 * len(inv_freq), dtype=torch.float64)
    for row, position in enumerate(positions.tolist()):
        for column, frequency in enumerate(inv_freq.tolist() * 2):
            found[0, row, column] = factor * math.cos(position * frequency)
            found[1, row, column] = factor * math.sin(position * frequency)
    return found


def rotary_of(model: Any) -> Any:
    """The rotary module of a model."""
    (module,) = [m for n, m in model.named_modules() if n.endswith("rotary_emb")]
    return module


@pytest.mark.parametrize("family", [*ROTARY, *sorted({*EVERY_DRAFT, *EVERY_DRAFT_LONG})])
def test_stored_frequencies_are_those_of_the_live_module(family: str, caplog) -> None:
    model = tiny_model(family)
    found = read_positions(model, 40)
    if family in WITHOUT_ROPE:
        assert (found.kind, found.proven) == ("unknown", False)
        return
    assert (found.kind, found.proven, found.reason, found.proven_to) == ("rope", True, "", 256)
    (live,) = [m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding")]
    for name, table in found.tables.items():
        prefix = f"{name}_" if hasattr(live, f"{name}_inv_freq") else ""
        assert torch.equal(table.inv_freq, getattr(live, prefix + "inv_freq"))
        assert table.factor == getattr(live, prefix + "attention_scaling")
    if family in ROTARY:
        assert set(found.tables) >= {"full_attention"}
        assert found.norm["offset"] == float(family in OFFSET)
        assert found.norm["kind"] == ("layer" if family in LAYER_NORM else "rms")
    # the config says the same, so a draft stores nothing more, and computes the same in float64
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    with caplog.at_level(logging.WARNING):
        shape = fitted_shape(config, found)
    assert "module" not in caplog.text and shape.positions == {}
    assert math.isclose(shape.rms_norm_eps, found.norm.get("eps", 1e-6), rel_tol=1e-6)
    table = found.of_draft
    assert table is not None
    positions = torch.tensor([0, 1, 5, 100, 255])
    rotary = Rotary(shape)
    lengths = torch.full((1, 5), 256)
    inv_freq = table.inv_freq
    if table.limit is not None and table.limit < 256:
        inv_freq = table.long_inv_freq
    for ours, other in zip(
        rotary(positions[None], lengths, torch.float64),
        reference(positions, inv_freq, table.factor),
        strict=True,
    ):
        close(ours[0], other, terms=4)


@pytest.mark.parametrize("factors", ["short", "long", None])
def test_longrope_has_both_sets_and_the_factors_of_the_capture(factors: str | None) -> None:
    model = tiny_model("phi3-longrope")
    config = copy.deepcopy(model.config)
    limit = config.rope_parameters["original_max_position_embeddings"]
    fix_rope_factors(model, factors)
    before = rotary_of(model).inv_freq.clone()
    found = read_positions(model, limit + 8).of_draft
    assert torch.equal(rotary_of(model).inv_freq, before)  # reading changes nothing
    plain = read_positions(tiny_model("phi3-longrope"), 40).of_draft
    assert found is not None and plain is not None and plain.long_inv_freq is not None
    assert found.equals(plain) and (found.limit, found.factors) == (limit, factors)
    assert not torch.equal(plain.inv_freq, plain.long_inv_freq)
    shape = fitted_shape(model.config.to_dict(), read_positions(model, 40))
    assert shape.positions == ({} if factors is None else {"factors": factors})
    own = Rotary(shape)
    # both documents have the chosen factors, the short and the long one
    mixed = own(torch.tensor([[7, 7]]), torch.tensor([[limit, limit + 1]]))[0][0].double()
    assert torch.equal(mixed[0], mixed[1]) == (factors is not None)
    for slot, wanted in enumerate((factors or "short", factors or "long")):
        inv_freq = plain.inv_freq if wanted == "short" else plain.long_inv_freq
        expected = reference(torch.tensor([7]), inv_freq, plain.factor)[0, 0]
        close(mixed[slot], expected, terms=4, dtype=torch.float32)


def _lying(change: Any) -> tuple[Any, dict[str, Any], Positions]:
    """A model whose frequencies `change` was applied to, its config, and its positions."""
    model = tiny_model("llama")
    change(rotary_of(model).inv_freq)
    return model, model.config.to_dict(), read_positions(model, 40)


def test_data_decide_where_the_config_lies_and_settings_that_express_them_are_found(caplog) -> None:
    powers = torch.arange(0, 8, 2, dtype=torch.float) / 8
    for wanted in (
        {"rope_type": "default", "rope_theta": 5e5},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    ):
        factor = wanted.get("factor", 1.0)
        true = 1.0 / (wanted["rope_theta"] ** powers) / factor
        _, config, found = _lying(lambda f, true=true: f.copy_(true))
        assert found.proven
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            shape = fitted_shape(config, found)
        assert shape.rope_parameters == wanted and shape.positions == {}
        assert "warning[rope]" in caplog.text
        assert "'rope_theta': 10000.0" in caplog.text and str(wanted) in caplog.text
        assert torch.equal(rotary_table(shape).inv_freq, true)


def test_data_that_no_settings_express_are_stored_bit_for_bit(caplog) -> None:
    _, config, found = _lying(lambda f: f.mul_(1 + torch.arange(4) / 7))
    table = found.of_draft
    with caplog.at_level(logging.WARNING):
        shape = fitted_shape(config, found)
    assert "warning[rope]" in caplog.text and "engines cannot serve it" in caplog.text
    assert shape.rope_parameters["rope_theta"] == 1e4  # what the config says
    assert table is not None
    assert torch.equal(rotary_table(shape).inv_freq, table.inv_freq)


def test_a_smaller_rotary_part_than_the_config_says_is_expressed() -> None:
    config = tiny_model("llama").config.to_dict()
    found = read_positions(tiny_model("glm4"), 40)  # half of each head
    shape = fitted_shape(config, found)
    assert shape.rope_parameters["partial_rotary_factor"] == 0.5 and shape.positions == {}
    assert shape.head_dim == 8 and rotary_table(shape).size == 4


def _without_positions(model: Any) -> None:
    """As older code of families does, which asks for a table of the first T cosines."""
    rotary = rotary_of(model)
    forward = rotary.forward
    rotary.forward = lambda x, count: forward(x, torch.arange(count)[None])
    model.forward = lambda **_: rotary(torch.zeros(1), 4)


def _without_angles(model: Any) -> None:
    rotary = rotary_of(model)
    forward = rotary.forward
    rotary.forward = lambda x, position_ids: [v.clone() for v in forward(x, position_ids)] * 2


def _two_tables(model: Any) -> None:
    forward, model.other = model.forward, copy.deepcopy(rotary_of(model))
    model.other.inv_freq *= 2
    model.forward = lambda **given: (
        model.other(torch.zeros(1), torch.arange(4)[None]),
        forward(**given),
    )


@pytest.mark.parametrize(
    ("family", "change", "kind", "reason"),
    [
        ("gpt2", None, "learned", ""),
        ("mamba", None, "unknown", "no module with inverse frequencies ran"),
        ("llama", _without_positions, "rope", "has inverse frequencies, but is called"),
        ("llama", _two_tables, "rope", "two modules for full_attention have different"),
        ("llama", _without_angles, "unknown", "ValueError: too many values"),
    ],
)
def test_what_is_not_proven_has_a_reason(family: str, change: Any, kind: str, reason: str) -> None:
    model = tiny_model(family)
    if change:
        change(model)
    found = read_positions(model, 40)
    assert (found.kind, found.proven) == (kind, kind == "learned") and reason in found.reason


def test_a_module_that_does_not_use_its_frequencies_is_not_proven(caplog) -> None:
    model = tiny_model("llama")
    rotary = rotary_of(model)
    forward = rotary.forward
    rotary.forward = lambda x, position_ids: forward(x, position_ids.clamp(max=200))
    found = read_positions(model, 40)
    assert not found.proven and found.tables == {}
    assert "at position 255, dimension" in found.reason
    with caplog.at_level(logging.WARNING):
        shape = fitted_shape(model.config.to_dict(), found)
    assert "warning[rope]" in caplog.text and "not proven (at position 255" in caplog.text
    assert shape.rope_parameters["rope_theta"] == 1e4


def test_the_eps_of_the_final_norm_decides(caplog) -> None:
    model = tiny_model("llama")
    model.model.norm.variance_epsilon = 1e-3
    with caplog.at_level(logging.WARNING):
        shape = fitted_shape(model.config.to_dict(), read_positions(model, 9))
    assert shape.rms_norm_eps == 1e-3
    assert "warning[rope]" in caplog.text
    assert "eps 1e-06" in caplog.text and "final norm has 0.001" in caplog.text
