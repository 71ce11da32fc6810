"""Small random drafts in the layouts of other trainers, and what independent forwards need.

A layout test makes tensors and a config.json as one project writes them, reads them with
`load_draft`, and compares logits with a forward that the test writes from that project's
definition. All numbers are float64.

H hidden size, D head size, V / Vd target / draft vocabulary, L blocks of the target.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spec_train.drafts import load_draft
from spec_train.formats.target_facts import TargetFacts
from tests.spec_train.drafts import slow_layer

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


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a draft directory."""
    return json.loads((folder / "config.json").read_text())


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read model.safetensors of a draft directory."""
    return load_file(folder / "model.safetensors")


# --- an independent forward ----------------------------------------------------------------------


LAYER = slow_layer.Sizes(
    heads=HEADS,
    kv_heads=GROUPS,
    head_dim=D,
    rms_norm_eps=EPS,
    # float32, as all trainers keep their frequencies
    rope_inv_freq=1.0 / THETA ** (torch.arange(0, D, 2, dtype=torch.float32) / D),
)


def run_layer(
    state: Mapping[str, Tensor],
    layer: str,
    inputs: list[Tensor],
    residuals: list[Tensor],
    window: int | None = None,
    act: str = "silu",
) -> list[Tensor]:
    """Outputs of a causal layer; `inputs` are those of its attention, one per position from 0."""
    sizes, out = replace(LAYER, act=act), []
    rows = [slow_layer.keys_values(state, layer, x, i, sizes) for i, x in enumerate(inputs)]
    for i, x in enumerate(inputs):
        first = 0 if window is None else max(0, i - window + 1)
        heads = slow_layer.attend(state, layer, x, i, rows[first : i + 1], sizes)
        out.append(slow_layer.finish(state, layer, residuals[i], heads, sizes))
    return out


def eagle3_logits(
    state: Mapping[str, Tensor],
    prefix: str,
    tokens: list[int],
    aux: Tensor,
    embedding: Tensor,
    *,
    layers: int = 1,
    norm_before_residual: bool = False,
    norm_output: bool = False,
    window: int | None = None,
    act: str = "silu",
) -> tuple[Tensor, Tensor]:
    """EAGLE-3 as its trainers define it: logits [T, rows of lm_head] and carried states [T, H].

    Args:
        state: tensors with the project's names; `prefix` is that of layer 0, and later layers have
            the names `layers.N.`.
        tokens: the known token of each row.
        aux: states of the target [T, n*H], in the order in which the trainer concatenates them.
        embedding: [V, H].
    """
    carried = [slow_layer.project(state, row, EPS) for row in aux]
    inputs, residuals, norm = [], [], LAYER.norm
    for token, feature in zip(tokens, carried, strict=True):
        normed = norm(feature, state[f"{prefix}hidden_norm.weight"])
        e = norm(embedding[token], state[f"{prefix}input_layernorm.weight"])
        inputs.append(torch.cat([e, normed]))
        residuals.append(normed if norm_before_residual else feature)
    x = run_layer(state, prefix[:-1], inputs, residuals, window, act)
    for i in range(1, layers):
        inputs = [norm(row, state[f"layers.{i}.input_layernorm.weight"]) for row in x]
        x = run_layer(state, f"layers.{i}", inputs, x, window, act)
    final = [norm(row, state["norm.weight"]) for row in x]
    logits = torch.stack([state["lm_head.weight"] @ row for row in final])
    return logits, torch.stack(final if norm_output else x)


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
    """EAGLE-1/2 as its trainers define it: predicted states [T, H] of final states [T, H]."""
    pairs = zip(tokens, states, strict=True)
    x = [slow_layer.linear(state, "fc", torch.cat([embedding[t], row])) for t, row in pairs]
    for i in range(sum(name.endswith("self_attn.o_proj.weight") for name in state)):
        norm = state.get(f"layers.{i}.input_layernorm.weight")
        inputs = x if norm is None else [LAYER.norm(row, norm) for row in x]
        x = run_layer(state, f"layers.{i}", inputs, x)
    norm = state.get("norm.weight")
    return torch.stack(x if norm is None else [LAYER.norm(row, norm) for row in x])


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
    prefix: str = "midlayer.",
    ids: Tensor | None = None,
    states: int = 3,
    embedding: Tensor | None = None,
    **how: Any,
) -> Any:
    """Write a draft, compare it with the independent forward, and return it as it is read.

    `tensors` are those of the forward where other names are `saved`; `ids` are the target tokens of
    the file's rows, and `how` arguments of `eagle3_logits`.
    """
    tokens, aux = rows_of(states=states)
    known = facts.embedding if embedding is None else embedding
    want, carried = eagle3_logits(tensors or saved, prefix, tokens, aux, known, **how)
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
