"""Small random drafts in the layouts of other trainers, and what independent forwards need.

A layout test makes tensors and a config.json as one project writes them, reads them with
`load_draft`, and compares logits with the slow reference of the draft. All numbers are float64.

H hidden size, D head size, V / Vd target / draft vocabulary, L blocks of the target.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spec_train.drafts import load_draft, slow_layer
from spec_train.formats.target_facts import TargetFacts
from tests.spec_train.drafts.eagle import reference as eagle
from tests.spec_train.drafts.eagle3 import reference as eagle3

H, INNER, HEADS, GROUPS, D = 16, 24, 4, 2, 4
V, VD, L = 48, 20, 12
EPS, THETA = 1e-5, 5e5
TOKENS = 9

SIZES: dict[str, Any] = {
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": D,
    "vocab_size": V,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
}
COMMON: dict[str, Any] = {"attention_bias": False, "attention_dropout": 0.0}
COMMON |= {"initializer_range": 0.02, "use_cache": True}
PLAIN = SIZES | COMMON
"""With what most trainers write besides."""

ROPE = {"rope_parameters": {"rope_theta": THETA, "rope_type": "default"}}
OF_TRANSFORMERS_5 = {k: v for k, v in PLAIN.items() if k != "rope_theta"} | ROPE


def noise(*shape: int) -> Tensor:
    """Random float64 values of a size that keeps all parts of a layer visible."""
    return torch.randn(*shape, dtype=torch.float64) / math.sqrt(shape[-1])


def gain(size: int) -> Tensor:
    """A norm's weight that is far from ones."""
    return 1 + torch.randn(size, dtype=torch.float64) / 3


def layer_tensors(prefix: str, width: int = H, qk_norm: bool = False) -> dict[str, Tensor]:
    """Attention, MLP and the norm between them; queries, keys and values read `width`."""
    found = {
        "self_attn.q_proj": noise(HEADS * D, width),
        "self_attn.k_proj": noise(GROUPS * D, width),
        "self_attn.v_proj": noise(GROUPS * D, width),
        "self_attn.o_proj": noise(H, HEADS * D),
        "mlp.gate_proj": noise(INNER, H),
        "mlp.up_proj": noise(INNER, H),
        "mlp.down_proj": noise(H, INNER),
        "post_attention_layernorm": gain(H),
    }
    if qk_norm:
        found |= {"self_attn.q_norm": gain(D), "self_attn.k_norm": gain(D)}
    return {f"{prefix}{name}.weight": value for name, value in found.items()}


def eagle3_tensors(
    prefix: str = "midlayer.", *, states: int = 3, size: int = VD, qk_norm: bool = False
) -> dict[str, Tensor]:
    """An EAGLE-3 of one layer: `prefix` is the name of its layer, `size` its vocabulary."""
    return {
        "fc.weight": noise(H, states * H),
        **layer_tensors(prefix, 2 * H, qk_norm),
        f"{prefix}hidden_norm.weight": gain(H),
        f"{prefix}input_layernorm.weight": gain(H),
        "norm.weight": gain(H),
        "lm_head.weight": noise(size, H),
    }


def offsets(ids: Tensor) -> Tensor:
    """Return d2t for target ids, in their order."""
    return ids - torch.arange(len(ids))


def mask_of(ids: Tensor) -> Tensor:
    """Return t2d for target ids."""
    found = torch.zeros(V, dtype=torch.bool)
    found[ids] = True
    return found


def maps(ids: Tensor) -> dict[str, Tensor]:
    """Return both maps."""
    return {"d2t": offsets(ids), "t2d": mask_of(ids)}


def some_ids(order: str = "ascending") -> Tensor:
    """Return VD target ids: ascending, or in a random order."""
    ids = torch.randperm(V)[:VD]
    return ids.sort().values if order == "ascending" else ids


def target() -> TargetFacts:
    """A target with an embedding and a head of its own."""
    return TargetFacts(
        name="Some/Target", num_layers=L, embedding=noise(V, H) * 4, head=noise(V, H)
    )


def write(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    weights: str = "model.safetensors",
) -> Path:
    """Write a draft directory; `weights` may be a .bin file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    plain = {name: value.clone().contiguous() for name, value in tensors.items()}
    if weights.endswith(".bin"):
        torch.save(plain, folder / weights)
    else:
        save_file(plain, folder / weights)
    return folder


def speculators_config(algorithm: str, tokens: int, architecture: str) -> dict[str, Any]:
    """Return the field of this name as speculators 0.9 writes it, for `tokens` per round."""
    proposal = {"accept_tolerance": 0.0, "proposal_type": "greedy", "verifier_accept_k": 1}
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal | {"speculative_tokens": tokens}],
        "verifier": {"architectures": [architecture], "name_or_path": "Some/Target"},
    }


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a draft directory."""
    return json.loads((folder / "config.json").read_text())


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read model.safetensors of a draft directory."""
    return load_file(folder / "model.safetensors")


# --- the slow references ----------------------------------------------------------------------


LAYER: dict[str, Any] = {
    "heads": HEADS,
    "kv_heads": GROUPS,
    "head_dim": D,
    "rms_norm_eps": EPS,
    # float32, as all trainers keep their frequencies
    "rope_inv_freq": 1.0 / THETA ** (torch.arange(0, D, 2, dtype=torch.float32) / D),
}
"""The sizes of `slow_layer.Sizes`."""


def eagle3_logits(
    state: Mapping[str, Tensor],
    tokens: list[int],
    aux: Tensor,
    embedding: Tensor,
    *,
    window: int | None = None,
    act: str = "silu",
    **norms: bool,
) -> tuple[Tensor, Tensor]:
    """Logits [T, rows of lm_head] and carried states [T, H] of an EAGLE-3, by its slow reference.

    Args:
        state: tensors with the project's names.
        tokens: the known token of each row.
        aux: states of the target [T, n*H], in the order in which the trainer concatenates them.
        embedding: [V, H].
        norms: `norm_before_residual` and `norm_output`.
    """
    state = {**state, "embed_tokens.weight": embedding}
    windows = (window,) * sum(name.endswith("o_proj.weight") for name in state)
    config = eagle3.ReferenceConfig(**LAYER, act=act, windows=windows, steps=1, **norms)
    rows = eagle3.unrolled(state, config, [0, *tokens], aux)
    logits, carried = zip(*(rows[t, 0] for t in range(len(tokens))), strict=True)
    return torch.stack(logits), torch.stack(carried)


def eagle_tensors(blocks: int = 1, *, first_norm: bool = False) -> dict[str, Tensor]:
    """An EAGLE-1/2 of plain layers; with `first_norm` also the first one norms its input."""
    found = {"fc.weight": noise(H, 2 * H)}
    for i in range(blocks):
        found |= layer_tensors(f"layers.{i}.")
        if i or first_norm:
            found[f"layers.{i}.input_layernorm.weight"] = gain(H)
    return found


def eagle_states(
    state: Mapping[str, Tensor], tokens: list[int], states: Tensor, embedding: Tensor
) -> Tensor:
    """Predicted states [T, H] of final states [T, H] of an EAGLE-1/2, by its slow reference."""
    state = {**state, "embed_tokens.weight": embedding}
    windows = (None,) * sum(name.endswith("o_proj.weight") for name in state)
    rows = zip(tokens, states, strict=True)
    return torch.stack(eagle.predict(state, slow_layer.Sizes(**LAYER), windows, rows))


def served(folder: Path, facts: TargetFacts, tokens: list[int], aux: Tensor) -> Any:
    """Read a draft and run its serving forward: draft, logits [T, V or Vd], carried [T, H]."""
    draft = load_draft(folder, facts).double()
    with torch.no_grad():
        rows = torch.arange(len(tokens))[None]
        carried = draft.step(torch.tensor([tokens]), draft.project(aux[None]), rows)
        return draft, draft.logits(carried)[0], carried[0]


def eagle3_as_defined(
    folder: Path,
    config: Mapping[str, Any],
    saved: Mapping[str, Tensor],
    facts: TargetFacts,
    *,
    tensors: Mapping[str, Tensor] | None = None,
    ids: Tensor | None = None,
    states: int = 3,
    embedding: Tensor | None = None,
    **how: Any,
) -> Any:
    """Write a draft, compare it with the slow reference, and return it as it is read.

    `tensors` are those of the forward where other names are `saved`; `ids` are the target tokens of
    the file's rows, and `how` arguments of `eagle3_logits`.
    """
    tokens, aux = rows_of(states=states)
    known = facts.embedding if embedding is None else embedding
    want, carried = eagle3_logits(tensors or saved, tokens, aux, known, **how)
    draft, found, state = served(write(folder, config, saved), facts, tokens, aux)
    rows = draft.draft_ids
    assert_same(by_token(found, rows), by_token(want, rows if ids is None else ids))
    assert_same(state, carried)
    return draft


def served_states(
    folder: Path, facts: TargetFacts, tokens: list[int], states: Tensor
) -> tuple[Any, Tensor]:
    """Read an EAGLE-1/2 and run its serving forward: draft, predicted states [T, H]."""
    draft = load_draft(folder, facts).double()
    with torch.no_grad():
        rows = torch.arange(len(tokens))[None]
        return draft, draft.step(torch.tensor([tokens]), draft.project(states[None]), rows)[0]


def by_token(logits: Tensor, ids: Tensor) -> Tensor:
    """Return logits [T, V] by target token; -inf where the draft has no row."""
    found = torch.full((len(logits), V), -torch.inf, dtype=logits.dtype)
    found[:, ids] = logits
    return found


def rows_of(tokens: int = TOKENS, states: int = 3) -> tuple[list[int], Tensor]:
    """Return random known tokens and states of the target."""
    return torch.randint(0, V, (tokens,)).tolist(), torch.randn(tokens, states * H).double()


def assert_same(a: Tensor, b: Tensor) -> None:
    """Assert that two float64 results differ by rounding only."""
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
