"""Drafts, documents and layouts for comparing the loss of every kind with its slow reference.

Only plain loops: the code that lays out documents for the fast functions must not share its shifts.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from spec_data.shards.batch import DraftBatch
from spec_data.shards.schema import FINAL, HeadSpec, layer_column
from spec_train.drafts import DRAFTS
from spec_train.drafts.block.blocks import Blocks
from spec_train.drafts.draft import DraftLoss
from spec_train.drafts.eagle.draft import eagle_loss
from spec_train.drafts.eagle3.draft import step_shares, unrolled_loss
from spec_train.drafts.frames import batch_frame
from spec_train.drafts.peagle.draft import parallel_loss
from spec_train.losses.head import TargetHead
from spec_train.losses.menu import LossKind
from spec_train.options.kinds import DRAFT_OPTIONS
from tests.spec_train.drafts.any_draft import BLOCK_KINDS
from tests.spec_train.drafts.dflash2 import reference as dflash2
from tests.spec_train.drafts.dspark import reference as dspark
from tests.spec_train.drafts.eagle import reference as eagle
from tests.spec_train.drafts.eagle3 import reference as eagle3
from tests.spec_train.drafts.lilicorr import reference as lilicorr
from tests.spec_train.drafts.peagle import reference as peagle
from tests.spec_train.drafts.slot_loss import CROSS_ENTROPY, KL, SlotLoss
from tests.spec_train.drafts.slow_layer import Document, Sums, slot_counts
from tests.tolerance import close_gradients

HIDDEN, WIDTH, VOCAB, MASK = 12, 10, 14, 13
LAYERS = (1, 3, 4)
DRAFT_IDS = [0, 2, 3, 5, 6, 7, 9, 10, 12]
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 100.0}
REFERENCES: dict[str, ModuleType] = {"eagle": eagle, "eagle3": eagle3, "peagle": peagle}
REFERENCES |= dict.fromkeys(("dspark", "dflash", "domino", "xpress"), dspark)
REFERENCES |= {"dflash2": dflash2, "lilicorr": lilicorr}
BLOCKS = BLOCK_KINDS
BASE: dict[str, dict[str, Any]] = {
    "eagle": {"depth": 3},
    "eagle3": {"ttt_steps": 4, "train_head": True},
    "peagle": {
        **{"depths": 4, "num_layers": 3, "cod_ratio": 0.9, "mask_token_id": MASK},
        "train_head": True,
    },
    "dspark": {"num_layers": 2, "block_size": 4, "markov_rank": 5, "mask_token_id": MASK},
    "dflash": {"num_layers": 2, "block_size": 4, "layout": "anchor", "mask_token_id": MASK},
    "dflash2": {
        **{"num_layers": 2, "block_size": 5, "mask_token_id": MASK, "selector_rank": 3},
        **{"selector_top_k": 5, "conv_group_size": 4},
    },
    "lilicorr": {
        **{"num_layers": 1, "block_size": 4, "mask_token_id": MASK, "margin_weight": 0.3},
        **{"lilicorr_candidate_topk": 6, "lilicorr_hidden_size": 6, "lilicorr_num_heads": 2},
        **{"lilicorr_factor_dim": 5, "lilicorr_logit_scale": 2.0, "lilicorr_num_layers": 2},
        "conv_kernel_size": 0,
    },
    "domino": {
        **{"num_layers": 2, "block_size": 4, "mask_token_id": MASK},
        **{"emb_dim": 5, "gru_hidden_dim": 3, "base_weight": 0.8, "base_decay": 0.5},
    },
    "xpress": {
        **{"num_layers": 2, "block_size": 5, "mask_token_id": MASK},
        **{"xpress_rank": 5, "xpress_mlp_hidden": 3},
    },
}
"""Options of every case of a kind."""
EVERY: dict[str, Any] = {
    **{"hidden_act": "gelu_pytorch_tanh", "attention_bias": "true", "mlp_bias": "true"},
    **{"intermediate_size": 14, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 4},
}
"""A layer that differs from the target's in everything but the norms of heads."""

MASKS = [
    [0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0],  # a chat of two turns
    [1],
    [0, 1],
    [1, 1],
    [1, 1, 1],
    [0, 1, 1],
    [0, 0, 1, 1, 1, 1, 1, 1, 1],
    [0, 1, 1, 0, 1, 0, 1, 1, 1, 1, 0],  # gaps inside an answer
    [0, 0, 0, 0, 0],  # nothing supervised
    [1] * 12,
]
BLOCK_MASKS = [
    [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1],
    [0, 1, 1, 1, 0, 0, 1, 1, 1],
    [1, 1, 1, 0, 1, 1],
    [0, 0, 1],
    [1, 1],
]
# The last two are no candidates: the first slot of a document, and one with nothing after it.
ANCHORS = [[3, 5, 6, 9], [1, 2, 6, 7], [1, 4, 5], [2], [0, 1]]
LAYOUTS = {
    "one row": [[8, 0, 1, 9, 2, 3, 4, 5, 6, 7]],
    "three rows": [[0, 5, 1], [6, 2, 3, 9], [7, 8, 4]],
    "unpacked": [[d] for d in range(len(MASKS))],
}
BLOCK_LAYOUTS = {"two rows": [[0, 1, 4], [2, 3]], "unpacked": [[d] for d in range(5)]}


@dataclass(frozen=True, eq=False, kw_only=True)
class Case:
    """A draft, its target and its loss."""

    kind: str
    options: dict[str, Any]
    reduced: bool  # the draft vocabulary is `DRAFT_IDS`
    loss: SlotLoss | None
    heads: int = 4  # of the target
    kv_heads: int = 2
    rope: dict[str, Any] = field(default_factory=lambda: DEFAULT_ROPE)
    # -- of EAGLE-1/2
    head: dict[str, Any] = field(default_factory=dict)  # fields of the target's `HeadSpec`
    terms: tuple[float, float] = (1.0, 0.1)  # weights of the regression and of the cross-entropy
    noise: bool = False
    steps: int = 1
    # -- of Domino
    progress: float = 1.0  # share of the run's steps that are done
    # -- of P-EAGLE
    floor: float = 0.2

    @functools.cached_property
    def settings(self) -> Any:
        """The options of the draft."""
        values = BASE[self.kind] | self.options
        if self.loss is None:
            values = {"loss": "ce+l1"} | values
        else:
            values = {"loss": self.loss.name} | values
            if self.kind not in BLOCKS:
                values |= {"loss_target": "hard" if self.loss.hard else "soft"}
            if self.loss.weights:
                values |= {"position_weights": ",".join(map(str, self.loss.weights))}
        return DRAFT_OPTIONS[self.kind](**values)

    @property
    def target(self) -> dict[str, Any]:
        return small_target(HIDDEN, self.heads, self.kv_heads, self.rope)


def case(kind: str, reduced: bool = False, loss: SlotLoss | None = None, **given: Any) -> Case:
    """Return a case of a kind; what is no field of `Case` is an option of the draft."""
    names = Case.__dataclass_fields__.keys() - {"options"}
    fields = {name: value for name, value in given.items() if name in names}
    options = {name: value for name, value in given.items() if name not in names}
    if kind not in BLOCKS:
        loss = loss or (KL if kind == "peagle" else CROSS_ENTROPY)
    return Case(kind=kind, options=options, reduced=reduced, loss=loss, **fields)


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


def make_head(case: Case) -> TargetHead:
    """Return the target's embedding and head; every call returns the same."""
    generator = torch.Generator().manual_seed(7)
    embed, weight = torch.randn(2, VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    bias = torch.randn(VOCAB, generator=generator, dtype=torch.float64)
    spec = HeadSpec(vocab_size=VOCAB, hidden_size=HIDDEN, tied=False, **case.head)
    return TargetHead(spec, embed, 0.5 * weight, bias if spec.has_bias else None)


def make_draft(case: Case, seed: int = 0) -> Any:
    """Return a random float64 draft with weights so large that every term matters."""
    options, cls, fields = case.settings, DRAFTS[case.kind], {}
    if case.kind != "eagle":
        fields["layers"] = LAYERS
        fields["draft_vocab_size"] = len(DRAFT_IDS) if case.reduced else VOCAB
    if "mask_token_id" in BASE[case.kind]:
        fields["mask_token_id"] = MASK
    config = cls.config_class.from_target(case.target, options=options, vocab_size=VOCAB, **fields)
    if case.kind != "eagle":
        config = replace(config, target_hidden_size=WIDTH)
    draft: Any = cls(config, options).double()
    draft.progress = case.progress
    if case.reduced:
        draft.set_vocabulary(torch.tensor(DRAFT_IDS))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            scale = 1.0 if name == "mask_hidden" else 0.3 if parameter.ndim > 1 else 0.2
            parameter.copy_(noise * scale + ("norm" in name))
    if case.kind in BLOCKS:
        draft.adopt(make_head(case))
    return draft


def reference_state(draft: Any) -> dict[str, Tensor]:
    """Return the checkpoint's tensors as float64 leaves of a graph of their own."""
    return {
        name: value.clone().requires_grad_(value.is_floating_point())
        for name, value in draft.checkpoint_tensors(torch.float64).items()
    }


def reference_config(case: Case) -> Any:
    """Return the setting for the reference; frequencies come from the target's rotary code."""
    options, target, head = case.settings, case.target, make_head(case)
    size = options.head_dim or target["head_dim"]
    rotary = LlamaRotaryEmbedding(LlamaConfig(**target | {"head_dim": size}))
    types = options.layer_types.split(",")
    if options.layer_types == "auto":
        types = ["sliding_attention"] * options.num_layers
    window = options.sliding_window or None
    fields: dict[str, Any] = {
        "heads": options.num_attention_heads or case.heads,
        "kv_heads": options.num_key_value_heads or case.kv_heads,
        "head_dim": size,
        "act": options.hidden_act,
        "rms_norm_eps": 1e-5,
        "rope_inv_freq": rotary.inv_freq,
        "rope_factor": rotary.attention_scaling,
        "windows": tuple(window if kind == "sliding_attention" else None for kind in types),
        "loss": case.loss,
    }
    if case.kind == "eagle":
        fields |= {"head_weight": head.head_weight, "head_bias": head.head_bias}
        fields |= {"head_scale": head.spec.scale, "head_softcap": head.spec.softcap}
        fields |= {"regression_weight": case.terms[0], "ce_weight": case.terms[1]}
        fields |= {"steps": case.steps}
    elif case.kind == "eagle3":
        fields |= {"norm_output": options.norm_output, "steps": options.ttt_steps}
        fields |= {"decay": options.step_decay}
        fields |= {"norm_before_residual": options.norm_before_residual}
    elif case.kind == "peagle":
        fields |= {"mask_token_id": MASK, "depths": options.depths}
        fields |= {"norm_before_residual": options.norm_before_residual}
    else:
        rank, weights = options.markov_rank, options.position_weights
        fields |= {
            "head_rows": head.head_weight[DRAFT_IDS] if case.reduced else head.head_weight,
            "block_size": options.block_size,
            "mask_token_id": MASK,
            "sample_from_anchor": options.layout == "anchor",
            "non_causal": options.sliding_window_non_causal,
            "kind": options.markov_head_type if rank else "none",
            "confidence_reads_markov": getattr(options, "confidence_head_with_markov", False),
            "gamma": options.loss_decay_gamma,
            "ce_weight": options.ce_weight,
            "l1_weight": options.l1_weight,
            "confidence_weight": getattr(options, "selector_weight", options.confidence_weight),
            "against": options.compared_with,
            "smoothing": options.smoothing,
        }
        listed = weights == "auto" or options.smoothing is not None
        fields |= {
            "weights": () if listed else tuple(map(float, weights.split(","))),
        }
    if case.kind == "domino":
        left = options.base_weight * max(0.0, 1 - case.progress / options.base_decay)
        fields |= {"prefix": options.pure_draft_prefix_len, "base_share": left}
    if case.kind == "lilicorr":
        fields |= {"stage": lilicorr, "top_k": options.lilicorr_candidate_topk}
        fields |= {"vector_eps": options.lilicorr_vector_eps, "confidence_weight": 1.0}
        fields["logit_scale"] = options.lilicorr_logit_scale
        weights = (options.lattice_weight, options.margin_weight, options.penalty_weight)
        fields["lattice_weights"] = weights
    if case.kind == "dflash2":
        fields |= {"stage": dflash2, "top_k": options.selector_top_k}
    return REFERENCES[case.kind].ReferenceConfig(**fields)


# -- documents -------------------------------------------------------------------------------------


def make_documents(
    case: Case, masks: Sequence[Sequence[int]], seed: int = 0, agreeing: bool = True
) -> list[Document]:
    """Return random documents with these loss masks.

    `agreeing`: the target often agrees with the draft. The states of EAGLE-1/2 are half the draft's
    predictions, so the distances reach both branches of smooth L1.
    """
    generator, draft = torch.Generator().manual_seed(seed), make_draft(case)
    config, state, options = reference_config(case), reference_state(draft), case.settings
    width = HIDDEN if case.kind == "eagle" else len(LAYERS) * WIDTH

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    documents = []
    for number, m in enumerate(masks):
        length = len(m)
        x = torch.randint(MASK, (length,), generator=generator).tolist()
        document = Document(x=x, m=m, aux=draw(length, width), z=draw(length, VOCAB))
        with torch.no_grad():
            if case.kind == "eagle":
                f, noise = document.aux.mul_(0.5), 0.1 * draw(length, width)
                for t in range(length - 1 if agreeing else 0):
                    rows = [(x[j + 1], f[j]) for j in range(t + 1)]
                    f[t + 1] += 0.7 * eagle.predict(state, config, config.windows, rows, True)[-1]
                document = replace(document, noise=noise if case.noise else None)
            elif agreeing:
                agree(case, draft, state, config, document)
        if case.kind == "peagle":
            supervised = [slot_counts(m, t) for t in range(length)]
            u = torch.rand(options.depths - 1, length, generator=generator).tolist()
            picks = peagle.reference_cod(supervised, u, options.cod_ratio, case.floor)
            document = replace(document, picks=picks)
        if case.kind in BLOCKS:
            known = masks is BLOCK_MASKS
            document = replace(document, picks=ANCHORS[number] if known else range(1, length))
        documents.append(document)
    return documents


def agree(case: Case, draft: Any, state: Any, config: Any, document: Document) -> None:
    """Add the draft's logits to the target's of a document."""
    length, ids, z = len(document.x), draft.draft_ids, document.z
    single = case.kind == "peagle"  # every teacher agrees with one depth
    step = 3 if case.kind in BLOCKS else draft.depth if single else 1
    anchors = range(1, length, step)
    made = REFERENCES[case.kind].reference_logits(state, config, document, anchors, draft.depth)
    for (anchor, d), logits in made.items():
        if anchor + d < length:
            z[anchor + d, ids] += 5.0 * logits if single else 3.0 * logits / (d + 1)
    if case.reduced:
        z[3::5, 1] += 9.0  # a choice outside the draft vocabulary


def lay_out(
    case: Case, documents: Sequence[Document], rows: Sequence[Sequence[int]]
) -> dict[str, Tensor]:
    """Columns of a batch of the given documents, and what its loss draws; padding holds garbage."""
    shape = len(rows), max(sum(len(documents[d].x) for d in row) for row in rows) + 2
    garbage = torch.Generator().manual_seed(99)

    def noise(*size: int) -> Tensor:
        return torch.randn(*size, generator=garbage, dtype=torch.float64)

    out = {
        "input_ids": torch.zeros(shape, dtype=torch.long),
        "loss_mask": torch.ones(shape, dtype=torch.bool),
        "document_ids": torch.full(shape, -1),
        "position_ids": torch.zeros(shape, dtype=torch.long),
    }
    states = noise(*shape, documents[0].aux.shape[1])
    if case.kind == "eagle":
        out["noise"] = noise(*shape, HIDDEN)
    else:
        out["logits"] = noise(*shape, VOCAB)
    if case.kind == "peagle":
        out["sample"] = torch.zeros(shape[0], case.settings.depths, shape[1], dtype=torch.bool)
    blocks: list[list[int]] = [[] for _ in rows]
    for b, row in enumerate(rows):
        start = 0
        for number, document in enumerate(documents[d] for d in row):
            length = len(document.x)
            for t in range(length):
                at = start + t
                out["document_ids"][b, at], out["position_ids"][b, at] = number, t
                out["input_ids"][b, at] = document.x[t]
                out["loss_mask"][b, at] = bool(document.m[t])
                states[b, at] = document.aux[t]
                if case.kind == "eagle":
                    out["noise"][b, at] = 0 if document.noise is None else document.noise[t]
                else:
                    out["logits"][b, at] = document.z[t]
            if case.kind == "peagle":
                for t, d in document.picks:
                    out["sample"][b, d, start + t] = True
            blocks[b] += [start + a for a in document.picks] if case.kind in BLOCKS else []
            start += length
    if case.kind in BLOCKS:
        most = max(map(len, blocks)) + 1  # one more block than any row needs
        out["anchors"] = torch.tensor([row + [0] * (most - len(row)) for row in blocks])
        out["real"] = torch.tensor([[n < len(row) for n in range(most)] for row in blocks])
    if case.kind == "eagle":
        choices = make_head(case).logits(states).argmax(-1)
        return out | {FINAL: states, "target_argmax": choices}
    captured = zip(map(layer_column, LAYERS), states.split(WIDTH, -1), strict=True)
    return out | dict(captured) | {"target_argmax": out["logits"].argmax(-1)}


# -- losses ----------------------------------------------------------------------------------------


def loss_of(
    case: Case,
    draft: Any,
    *,
    head: TargetHead | None = None,
    counts: Tensor | None = None,
    **inputs: Any,
) -> DraftLoss:
    """Compute the loss of what `lay_out` returns by the fast code."""
    names = ("noise", "sample", "anchors", "real")
    noise, sample, anchors, real = (inputs.pop(name, None) for name in names)
    batch, options, loss = DraftBatch.of(inputs), case.settings, case.loss
    head = head or make_head(case)
    if case.kind in BLOCKS:
        return draft.batch_loss(batch, head, counts, Blocks(anchors, real))
    kind = replace(LossKind.of(options), scale=loss.scale, decay=loss.decay)
    weights = loss.weights or None
    if case.kind == "eagle":
        given = {"weights": case.terms, "steps": case.steps, "noise": noise}
        return eagle_loss(draft, batch, head, None, kind, **given)
    # in evaluation: the acceptance of every slot
    frame = batch_frame(draft.eval(), batch, head, kind, batch.aux(LAYERS))
    if case.kind == "eagle3":
        shares = step_shares(options.ttt_steps, options.step_decay, weights)
        return unrolled_loss(draft, frame, shares=shares, kind=kind, counts=None)
    given = {"segments": options.segments, "position_weights": weights, "count": None}
    return parallel_loss(draft, frame, sample=sample, kind=kind, **given)


def layouts_of(case: Case) -> dict[str, list[list[int]]]:
    return BLOCK_LAYOUTS if case.kind in BLOCKS else LAYOUTS


@functools.cache
def expectation(case: Case) -> tuple[list[Document], dict[str, Tensor], Tensor, Sums]:
    """Return documents, the reference's weights with their gradients, its loss and its sums."""
    documents = make_documents(case, BLOCK_MASKS if case.kind in BLOCKS else MASKS)
    state = reference_state(make_draft(case))
    reference = REFERENCES[case.kind].reference_loss
    loss, sums = reference(state, reference_config(case), documents)
    loss.backward()
    return documents, state, loss.detach(), sums


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
    trained = getattr(draft.options, "train_head", False)
    frozen = {"embed_tokens.weight", *(() if trained else ("lm_head.weight",))}
    unread = {"mask_hidden"} if draft.depth == 1 else set()  # no element reads it
    floats = {name for name, value in state.items() if value.is_floating_point()}
    assert set(found) == floats - frozen
    assert all(not found.pop(name).any() for name in unread & set(found))
    wanted = {name: state[name].grad for name in found}
    assert all(x is not None and x.abs().max() > 1e-6 for x in wanted.values())
    close_gradients(found, wanted, terms=terms)


# -- what a slot may see ---------------------------------------------------------------------------


def moved(document: Document, what: str, start: int) -> Document:
    """Return a document with other tokens "x", or other values of a field, from `start` on."""
    if what == "x":
        other = [(i + 1) % MASK if t >= start else i for t, i in enumerate(document.x)]
        return replace(document, x=other)
    values = getattr(document, what).clone()
    values[start:] = values[start:].flip(-1) + 1.0
    return replace(document, **{what: values})


def only_the_past_counts(
    run: Callable[[list[Document]], Any], draft: Any, documents: list[Any], what: str, last: int
) -> None:
    """Other documents of a pack, and what serving cannot know, change nothing, bit for bit.

    `run` computes a loss of documents, of which the second is supervised; `last` is the last token
    of it whose `what` counts.
    """

    def result(changed: list[Any]) -> list[Tensor]:
        loss = run(changed).loss
        loss.backward()
        return [loss.detach(), *gradients(draft).values()]

    first, second, third = documents
    expected = result(documents)
    for other in (
        [moved(first, what, 0), second, moved(third, what, 0)],
        [first, moved(second, what, last + 1), third],
    ):
        assert all(torch.equal(a, b) for a, b in zip(expected, result(other), strict=True))
    changed = result([first, moved(second, what, last), third])
    assert abs(float(changed[0] - expected[0])) > 1e-9


def each_in_one_layout(cases: Iterable[str], layouts: Iterable[str]) -> list[tuple[str, str]]:
    """Return every case with one of the layouts in turn, and the first one with all of them."""
    names, forms = list(cases), list(layouts)
    pairs = [(name, forms[i % len(forms)]) for i, name in enumerate(names)]
    return pairs + [(names[0], form) for form in forms[1:]]
