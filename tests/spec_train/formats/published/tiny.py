"""Small random drafts in the layouts of other trainers, and what independent forwards need.

A layout test makes tensors and a config.json as one project writes them, reads them with
`load_draft`, and compares logits with a forward that the test writes from that project's
definition. All numbers are float64.

H hidden size, D head size, V / Vd target / draft vocabulary, L blocks of the target.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spec_train.drafts import load_draft
from spec_train.formats.target_facts import TargetFacts

H, INNER, HEADS, GROUPS, D = 16, 24, 4, 2, 4
V, VD, L = 48, 20, 12
EPS, THETA = 1e-5, 5e5
TOKENS = 9
Norms = Callable[[Tensor, Tensor], Tensor]

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


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean() + EPS) * weight


def rope(head: Tensor, position: int, theta: float = THETA) -> Tensor:
    """Rotate pairs (i, i + D/2) of one head."""
    half = len(head) // 2
    # float32, as all trainers keep their frequencies
    steps = torch.arange(0, len(head), 2, dtype=torch.float32) / len(head)
    angle = position * (1.0 / theta**steps).double()
    a, b = head[:half], head[half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])


def linear(state: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    y = state[f"{name}.weight"] @ x
    return y + state[f"{name}.bias"] if f"{name}.bias" in state else y


def attention(
    state: Mapping[str, Tensor], prefix: str, rows: list[Tensor], window: int | None = None
) -> list[Tensor]:
    """Causal attention of all rows; `rows` are its inputs, one per position from 0."""
    queries, keys, values = [], [], []
    for position, row in enumerate(rows):
        q = linear(state, f"{prefix}self_attn.q_proj", row).view(HEADS, D)
        k = linear(state, f"{prefix}self_attn.k_proj", row).view(GROUPS, D)
        v = linear(state, f"{prefix}self_attn.v_proj", row).view(GROUPS, D)
        if f"{prefix}self_attn.q_norm.weight" in state:
            q = torch.stack([rms(h, state[f"{prefix}self_attn.q_norm.weight"]) for h in q])
            k = torch.stack([rms(h, state[f"{prefix}self_attn.k_norm.weight"]) for h in k])
        queries.append(torch.stack([rope(h, position) for h in q]))
        keys.append(torch.stack([rope(h, position) for h in k]))
        values.append(v)
    out = []
    for position in range(len(rows)):
        first = 0 if window is None else max(0, position - window + 1)
        heads = []
        for h in range(HEADS):
            g = h * GROUPS // HEADS
            scores = torch.stack(
                [queries[position][h] @ keys[j][g] for j in range(first, position + 1)]
            )
            weights = torch.softmax(scores / math.sqrt(D), 0)
            parts = zip(weights, range(first, position + 1), strict=True)
            heads.append(sum(w * values[j][g] for w, j in parts))
        out.append(linear(state, f"{prefix}self_attn.o_proj", torch.cat(heads)))
    return out


def mlp(state: Mapping[str, Tensor], prefix: str, x: Tensor, act: Any = None) -> Tensor:
    act = act or torch.nn.functional.silu
    gate = act(linear(state, f"{prefix}mlp.gate_proj", x))
    inside = gate * linear(state, f"{prefix}mlp.up_proj", x)
    return linear(state, f"{prefix}mlp.down_proj", inside)


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
    act: Any = None,
) -> tuple[Tensor, Tensor]:
    """EAGLE-3 as its trainers define it: logits [T, rows of lm_head] and carried states [T, H].

    Args:
        state: tensors with the project's names; `prefix` is that of layer 0, and later layers have
            the names `layers.N.`.
        tokens: the known token of each row.
        aux: states of the target [T, n*H], in the order in which the trainer concatenates them.
        embedding: [V, H].
    """
    carried = []
    for row in aux:
        if "input_norm.weight" in state:
            row = rms(row, state["input_norm.weight"])
        if "fc_norm.0.weight" in state:
            parts = row.chunk(len(row) // H)
            row = torch.cat([rms(p, state[f"fc_norm.{i}.weight"]) for i, p in enumerate(parts)])
        carried.append(state["fc.weight"] @ row)
    inputs, residuals = [], []
    for token, feature in zip(tokens, carried, strict=True):
        normed = rms(feature, state[f"{prefix}hidden_norm.weight"])
        e = rms(embedding[token], state[f"{prefix}input_layernorm.weight"])
        inputs.append(torch.cat([e, normed]))
        residuals.append(normed if norm_before_residual else feature)
    attended = attention(state, prefix, inputs, window)
    x = [_after(state, prefix, r, a, act) for r, a in zip(residuals, attended, strict=True)]
    for i in range(1, layers):
        name = f"layers.{i}."
        normed_rows = [rms(row, state[f"{name}input_layernorm.weight"]) for row in x]
        attended = attention(state, name, normed_rows, window)
        x = [_after(state, name, r, a, act) for r, a in zip(x, attended, strict=True)]
    final = [rms(row, state["norm.weight"]) for row in x]
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
    rows = zip(tokens, states, strict=True)
    x = [linear(state, "fc", torch.cat([embedding[token], row])) for token, row in rows]
    blocks = sum(name.endswith("self_attn.o_proj.weight") for name in state)
    for i in range(blocks):
        name = f"layers.{i}."
        norm = state.get(f"{name}input_layernorm.weight")
        inputs = x if norm is None else [rms(row, norm) for row in x]
        attended = attention(state, name, inputs)
        x = [_after(state, name, r, a, None) for r, a in zip(x, attended, strict=True)]
    norm = state.get("norm.weight")
    return torch.stack(x if norm is None else [rms(row, norm) for row in x])


def _after(
    state: Mapping[str, Tensor], prefix: str, residual: Tensor, attended: Tensor, act: Any
) -> Tensor:
    middle = residual + attended
    normed = rms(middle, state[f"{prefix}post_attention_layernorm.weight"])
    return middle + mlp(state, prefix, normed, act)


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
