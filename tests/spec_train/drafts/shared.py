"""What the cases of all drafts share: a small target, its sizes, tensors, gradients, layouts."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.tolerance import close, close_gradients

DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 100.0}


def small_target(
    hidden: int, heads: int, kv_heads: int, rope: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return config.json of a Llama target of 8 blocks with heads of size 6."""
    return {
        "hidden_size": hidden,
        "intermediate_size": 20,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": 8,
        "head_dim": 6,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "architectures": ["LlamaForCausalLM"],
        "rope_parameters": rope or DEFAULT_ROPE,
    }


def windows_of(types: str, window: int, layers: int) -> tuple[int | None, ...]:
    """Return the window of every layer from the options `layer_types` and `sliding_window`."""
    if types == "auto":
        return (window or None,) * layers
    return tuple(window if kind == "sliding_attention" else None for kind in types.split(","))


def reference_state(draft: Any) -> dict[str, Tensor]:
    """Return the checkpoint's tensors as float64 leaves of a graph of their own."""
    return {
        name: value.clone().requires_grad_(value.is_floating_point())
        for name, value in draft.checkpoint_tensors(torch.float64).items()
    }


def reference_sizes(
    target: dict[str, Any], changes: Iterable[tuple[str, Any]], heads: int, kv_heads: int
) -> dict[str, Any]:
    """Return the sizes of a reference: the target's, changed by the options of a shape.

    Frequencies come from the target's rotary code.
    """
    shape = dict(changes)
    fields = target | {k: v for k, v in shape.items() if k == "head_dim"}
    return {
        "heads": shape.get("num_attention_heads", heads),
        "kv_heads": shape.get("num_key_value_heads", kv_heads),
        "head_dim": shape.get("head_dim", 6),
        "act": shape.get("hidden_act", "silu"),
        "rms_norm_eps": 1e-5,
        "rope_inv_freq": LlamaRotaryEmbedding(LlamaConfig(**fields)).inv_freq,
    }


def randomize(draft: Any, seed: int = 0) -> None:
    """Give a float64 draft weights so large that every term matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            scale = 1.0 if name == "mask_hidden" else 0.3 if parameter.ndim > 1 else 0.2
            parameter.copy_(noise * scale + ("norm" in name))


def lay_out(
    documents: Sequence[Any],
    rows: Sequence[Sequence[int]],
    padding: Callable[[tuple[int, int]], dict[str, Tensor]],
    slot: Callable[[Any, int], dict[str, Any]],
) -> dict[str, Tensor]:
    """Return tensors for rows of documents, by plain loops that share no shift with the code.

    `padding` makes tensors [B, T, ...] of garbage; `slot` returns what token t of a document puts
    into them.
    """
    shape = len(rows), max(sum(len(documents[d].x) for d in row) for row in rows) + 2
    out = padding(shape)
    out |= {"document_ids": torch.full(shape, -1), "position_ids": torch.zeros(shape).long()}
    for b, row in enumerate(rows):
        start = 0
        for number, d in enumerate(row):
            for t in range(len(documents[d].x)):
                values = {"document_ids": number, "position_ids": t, **slot(documents[d], t)}
                for name, value in values.items():
                    out[name][b, start + t] = value
            start += len(documents[d].x)
    return out


def noise_of(*shape: int) -> Tensor:
    """Return garbage for padding, always the same."""
    generator = torch.Generator().manual_seed(99)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def moved(document: Any, what: str, start: int, vocab: int) -> Any:
    """Return a document with other tokens "x", or other values of a field, from `start` on."""
    if what == "x":
        other = [(i + 1) % vocab if t >= start else i for t, i in enumerate(document.x)]
        return replace(document, x=other)
    values = getattr(document, what).clone()
    values[start:] = values[start:].flip(-1) + 1.0
    return replace(document, **{what: values})


def only_the_past_counts(
    run: Callable[[list[Any]], Any], draft: Any, documents: list[Any], what: str, last: int, v: int
) -> None:
    """Other documents of a pack, and what serving cannot know, change nothing, bit for bit.

    `run` computes a loss of documents, of which the second is supervised; `last` is the last token
    of it whose `what` counts; v is the vocabulary.
    """

    def result(changed: list[Any]) -> list[Tensor]:
        loss = run(changed).loss
        loss.backward()
        return [loss.detach(), *gradients(draft).values()]

    first, second, third = documents
    expected = result(documents)
    for other in (
        [moved(first, what, 0, v), second, moved(third, what, 0, v)],
        [first, moved(second, what, last + 1, v), third],
    ):
        assert all(torch.equal(a, b) for a, b in zip(expected, result(other), strict=True))
    changed = result([first, moved(second, what, last, v), third])
    assert abs(float(changed[0] - expected[0])) > 1e-9


def gradients(draft: Any) -> dict[str, Tensor]:
    """Return the gradient of every trained parameter, and forget them."""
    named = {n: p for n, p in draft.named_parameters() if p.requires_grad}
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named.items()}
    for parameter in named.values():
        parameter.grad = None
    return found


def same_gradients(draft: Any, state: dict[str, Tensor], terms: float) -> None:
    """Compare the gradients of all trained parameters; none is zero by accident."""
    found = gradients(draft)
    floats = {name for name, value in state.items() if value.is_floating_point()}
    assert set(found) == floats - {"embed_tokens.weight"}
    wanted = {name: state[name].grad for name in found}
    assert all(x is not None and x.abs().max() > 1e-6 for x in wanted.values())
    close_gradients(found, wanted, terms=terms)


def same_sums(found: dict[str, Tensor], expected: dict[str, Any], terms: float) -> None:
    """Compare the sums of a loss."""
    for name, value in expected.items():
        close(found[name], torch.tensor(value, dtype=torch.float64), terms=terms, name=name)


def each_in_one_layout(cases: Iterable[str], layouts: Iterable[str]) -> list[tuple[str, str]]:
    """Return every case with one of the layouts in turn, and the first one with all of them."""
    names, forms = list(cases), list(layouts)
    pairs = [(name, forms[i % len(forms)]) for i, name in enumerate(names)]
    return pairs + [(names[0], form) for form in forms[1:]]
