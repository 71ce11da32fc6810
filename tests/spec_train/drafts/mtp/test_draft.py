"""The target's MTP block: against slow loops, and against transformers' own MTP model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from spec_data.models.mtp import mtp_tensors, own_tensors
from spec_data.shards.batch import DraftBatch
from spec_data.shards.schema import FINAL, HeadSpec
from spec_train.drafts.mtp.draft import MtpConfig, MtpDraft
from spec_train.drafts.mtp.options import MtpOptions
from spec_train.losses.head import TargetHead
from tests.spec_train.drafts.mtp.reference import Reference, Sizes
from tests.spec_train.drafts.mtp.targets import (
    BLOCKS,
    FAMILIES,
    HIDDEN,
    config_of,
    write_target,
)
from tests.tolerance import close, close_gradients, network, same_choice

VOCAB = 14
MASKS = [[0, 0, 1, 1, 1, 0, 1, 1, 1], [0, 1, 1, 1, 1], [1, 1], [0, 1, 1, 0, 1, 1], [1]]
LAYOUTS = [[[1, 0, 4], [3, 2]], [[d] for d in range(len(MASKS))]]
EXACT: dict[str, Any] = {"dtype": torch.float32}  # transformers' norms and routers compute in it


def draft_of(family: str, options: MtpOptions | None = None, **changes: Any) -> MtpDraft:
    """A random draft of a family, without a dataset."""
    options = options or MtpOptions(norm_output=True)
    config = MtpConfig.from_target(
        config_of(family, VOCAB).to_dict(), options=options, vocab_size=VOCAB
    )
    draft = MtpDraft(replace(config, states_first=family == "mimo", **changes), options).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in [*draft.named_parameters(), *draft.block.named_buffers()]:
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            value.copy_(noise * (0.3 if value.ndim > 1 else 0.2) + ("norm" in name))
    return draft


def reference_of(draft: MtpDraft, family: str) -> Reference:
    config = config_of(family, VOCAB)
    state = {
        name: value.double().clone().requires_grad_()
        for name, value in draft.checkpoint_tensors(torch.float64).items()
    }
    sizes = Sizes(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "qk_head_dim", None)
        or getattr(config, "head_dim", None)
        or HIDDEN // config.num_attention_heads,
        rms_norm_eps=config.rms_norm_eps,
        rope_inv_freq=draft.rotary.inv_freq,
        zero_centred=family.startswith("qwen"),
    )
    first, fed_back = draft.config.states_first, draft.config.norm_output
    return Reference(state, config, sizes, first, fed_back)


def documents_of(seed: int = 0) -> list[tuple[list[int], list[int], Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randint(VOCAB, (len(m),), generator=generator).tolist(),
            m,
            torch.randn(len(m), HIDDEN, generator=generator, dtype=torch.float64),
        )
        for m in MASKS
    ]


def head_of(seed: int = 3) -> TargetHead:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    spec = HeadSpec(vocab_size=VOCAB, hidden_size=HIDDEN, tied=False)
    return TargetHead(spec, weight, 0.5 * weight)


def batch_of(documents: list, rows: list[list[int]], head: TargetHead) -> DraftBatch:
    """The documents in rows; padding holds garbage."""
    width = max(sum(len(documents[d][0]) for d in row) for row in rows) + 1
    shape = len(rows), width
    states = torch.randn(*shape, HIDDEN, dtype=torch.float64)
    ids, positions = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    masks, numbers = torch.ones(shape, dtype=torch.bool), torch.full(shape, -1)
    for b, row in enumerate(rows):
        t = 0
        for number, d in enumerate(row):
            for i, (token, mask, state) in enumerate(zip(*documents[d], strict=True)):
                ids[b, t], masks[b, t], states[b, t] = token, bool(mask), state
                positions[b, t], numbers[b, t] = i, number
                t += 1
    return DraftBatch(
        input_ids=ids,
        loss_mask=masks,
        position_ids=positions,
        document_ids=numbers,
        hidden={FINAL: states},
        target_argmax=head.logits(states).argmax(-1),
        rows=rows,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_slow_loops(family: str) -> None:
    weights = {"position_weights": "0.5,0.2,0.3"} if family == "glm" else {}
    options = MtpOptions(norm_output=True, **weights)
    changes = {"norm_output": False} if family == "qwen3_5" else {}
    draft, head, documents = draft_of(family, options, **changes), head_of(), documents_of()
    draft.embed_tokens.weight.requires_grad_()
    slow = reference_of(draft, family)
    total = 1 + 0.6 + 0.36
    shares = [0.5, 0.2, 0.3] if family == "glm" else [1 / total, 0.6 / total, 0.36 / total]
    expected = slow.loss(documents, head.head_weight, shares)
    names = [n for n in slow.state if "correction_bias" not in n]
    gradients = torch.autograd.grad(expected, [slow.state[n] for n in names])
    wanted = dict(zip(names, gradients, strict=True))
    for rows in LAYOUTS:
        batch = batch_of(documents, rows, head)
        loss = draft.loss(batch, head, draft.slot_counts(batch)).loss
        close(loss, expected, terms=network(4), **EXACT)
        parameters = dict(draft.named_parameters())
        assert parameters.keys() == set(names)
        found = torch.autograd.grad(loss, [parameters[n] for n in names])
        terms = network(4, backward=True, slots=25)
        close_gradients(dict(zip(names, found, strict=True)), wanted, terms=terms, **EXACT)


@pytest.mark.parametrize("family", FAMILIES)
def test_chains_are_those_of_slow_loops_in_packs_and_in_serving(family: str) -> None:
    draft, head, documents = draft_of(family).eval(), head_of(), documents_of(1)
    batch, slow = batch_of(documents, LAYOUTS[0], head), reference_of(draft, family)
    chains, made = draft.chains(batch, head, 3), 0
    for b, row in enumerate(batch.rows):
        t = 0
        for d in row:
            x, _, f = documents[d]
            for slot in range(len(x) - 1):
                chain = chains[b, t + slot].tolist()
                states = slow.chain(x, f, slot, chain, 3)
                logits = torch.stack([head.head_weight @ state for state in states])
                same_choice(logits, torch.tensor(chain), network(4), torch.float32)
                made += 1
            t += len(x)
    assert made > 15
    x, _, f = documents[0]
    with torch.no_grad():
        caches = draft.new_caches()
        first = draft.step(torch.tensor([x[1:6]]), f[None, :5], torch.arange(5)[None], caches)
        known = torch.tensor([[7]])
        second = draft.step(known, first[:, -1:], torch.tensor([[5]]), caches)
        wanted = slow.chain(x, f, 4, [7], 2)
    close(first[0, -1], wanted[0], terms=network(4), **EXACT)
    close(second[0, -1], wanted[1], terms=network(4), **EXACT)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "mimo"])
def test_a_checkpoint_computes_what_transformers_computes(family: str, tmp_path: Path) -> None:
    written = write_target(tmp_path, family)
    stored = mtp_tensors(tmp_path, BLOCKS)
    assert stored.keys() == written.keys()  # neither the copies nor the target's other tensors
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{BLOCKS}\.", "^mtp"]
    model.config.num_mtp_layers = 1
    if family.startswith("qwen"):
        model.config.mtp_layer_types = ["full_attention"]
    theirs = MtpModel.from_pretrained(model).eval()
    vocab = model.config.vocab_size
    config = MtpConfig.from_target(
        model.config.to_dict(),
        options=MtpOptions(norm_output=True),
        vocab_size=vocab,
        dtype="float32",
    )
    draft = MtpDraft(config).eval()
    own, layout = own_tensors(stored, BLOCKS)
    assert draft.load_state_dict(own, strict=False).missing_keys == ["embed_tokens.weight"]
    assert not layout.states_first
    draft.adopt(TargetHead.from_model(model))
    ids, positions = torch.arange(9)[None] * 7, torch.arange(8)[None]
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states[-1][:, :-1]
        ours = draft.step(ids[:, 1:], states, positions)
        expected = theirs.forward_layer(0, states, positions, None, input_ids=ids[:, 1:])
    close(ours, expected, terms=network(4))
