"""The laws of drafts, for anyone's draft: `check_draft` tries them on a tiny random target.

    from spec_train.testing import check_draft

    def test_medusa():
        check_draft("medusa.py:Medusa")

A law is broken without a word otherwise: the loss falls, and the engine accepts few tokens. All is
computed in float64 on the CPU, in seconds; a message names the law, the place and the numbers.

T slots of a document, H hidden size, V vocabulary.
"""

import dataclasses
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spec_data.shards.batch import DraftBatch, padding_batch
from spec_data.shards.errors import DraftError
from spec_data.shards.packing import row_layout
from spec_data.shards.schema import FINAL, HeadSpec
from spec_train.drafts import Draft, DraftLoss, load_draft
from spec_train.drafts.kinds import kind_named, kind_of_class
from spec_train.losses.head import TargetHead
from spec_train.losses.sampling import Greedy
from spec_train.options.draft_options import DraftOptions

VOCAB, HIDDEN, BLOCKS, LAYERS, MASK = 64, 32, 4, (0, 1, 2), 5
LENGTHS = (9, 4, 12, 3, 7)
"""Tokens of the documents."""
_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "hidden_act": "silu",
}


class LawError(AssertionError):
    """A draft breaks a law."""


def check_draft(
    kind: str | type[Draft], options: DraftOptions | None = None, *, seed: int = 0
) -> list[str]:
    """Try every law on a draft of random weights; return the laws, one sentence each.

    Args:
        kind: a name as `spec-train fit` takes it, or a class.
        options: of the draft; None: the `example` of its options.
        seed: of the weights and the documents.

    Raises:
        LawError: a law is broken.
        DraftError: there is no such draft.
    """
    found = kind_named(kind) if isinstance(kind, str) else kind_of_class(kind)
    options = options or found.options(**found.options.example)
    subject = _Subject(found.draft_class(), options, seed)
    for law in LAWS:
        try:
            law(subject)
        except Exception as error:
            error.add_note(f"{found.name}, while this law was tried: {_sentence(law)}")
            raise
    return list(map(_sentence, LAWS))


def _sentence(law: Callable[..., None]) -> str:
    return (law.__doc__ or "").partition("\n")[0]


@dataclass(frozen=True)
class _Document:
    """A document of random tokens and states, each of its columns with T rows."""

    columns: dict[str, Tensor]

    def __len__(self) -> int:
        return len(self.columns["input_ids"])

    def changed(self, generator: torch.Generator, **firsts: int) -> "_Document":
        """Return a document with other values of a column from a row on; `state` is all states."""
        result = dict(self.columns)
        for name, values in self.columns.items():
            first = firsts.get(name, firsts.get("state", len(self)) if "hidden" in name else None)
            if first is None or first >= len(self):
                continue
            values = values.clone()
            if values.is_floating_point():
                new = torch.randn(values[first:].shape, generator=generator, dtype=values.dtype)
                values[first:] = new * 2
            else:
                step = torch.randint(1, VOCAB, values[first:].shape, generator=generator)
                values[first:] = (values[first:] + step) % VOCAB
            result[name] = values
        return _Document(result)

    def supervised(self, *tokens: int) -> "_Document":
        """Return a document in which only these tokens are supervised."""
        mask = torch.zeros(len(self), dtype=torch.bool)
        mask[list(tokens)] = True
        return _Document(self.columns | {"loss_mask": mask})


class _Subject:
    """A draft of random weights, the head of its target, and documents."""

    def __init__(self, draft: type[Draft], options: Any, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        embed, weight = self._normal(VOCAB, HIDDEN), self._normal(VOCAB, HIDDEN) / HIDDEN**0.5
        self.head = TargetHead(
            HeadSpec(vocab_size=VOCAB, hidden_size=HIDDEN, tied=False), embed, weight
        )
        counts = torch.arange(VOCAB) * 7 % VOCAB
        chosen = draft.choose_vocabulary(options, VOCAB, _CONFIG, counts)
        fields: dict[str, Any] = {"layers": LAYERS} if draft.config_class.reads_layers else {}
        if chosen is not None:
            fields["draft_vocab_size"] = len(chosen)
        if hasattr(options, "mask_token_id"):
            fields["mask_token_id"] = MASK
        config = draft.config_class.from_target(
            _CONFIG, options=options, vocab_size=VOCAB, dtype="float32", **fields
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = draft(config, options)
        if chosen is not None:
            made.set_vocabulary(chosen)
        self.draft = made.double()
        self.draft.adopt(self.head)
        with torch.no_grad():  # what starts as zero hides what it does
            for parameter in self.draft.trainable_parameters():
                parameter.add_(0.1 * self._normal(*parameter.shape))
        self.documents = [self._document(length) for length in LENGTHS]

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def _document(self, length: int) -> _Document:
        final = self._normal(length, HIDDEN)
        logits = self.head.logits(final)
        mask = torch.ones(length, dtype=torch.bool)
        mask[:1] = False
        mask[length // 2] = length < 8  # two answers
        columns = {
            "input_ids": torch.randint(0, VOCAB, (length,), generator=self.generator),
            "loss_mask": mask,
            "target_argmax": logits.argmax(-1),
            "target_logsumexp": logits.logsumexp(-1),
            FINAL: final,
        }
        for name in self.draft.state_columns:
            columns.setdefault(name, self._normal(length, HIDDEN))
        return _Document(columns)

    def batch(
        self, rows: Sequence[Sequence[int]], width: int, documents: Sequence[_Document] = ()
    ) -> DraftBatch:
        """Return the documents `rows` of each pack, with the columns that the draft asks for."""
        documents = documents or self.documents
        lengths = [[len(documents[i]) for i in row] for row in rows]
        document_ids, position_ids = row_layout(lengths, width)
        columns: dict[str, Tensor] = {}
        wanted = {*self.draft.columns("final-hidden"), "input_ids", "loss_mask", "target_argmax"}
        for name, example in documents[0].columns.items():
            if name not in wanted:
                continue
            whole = torch.zeros(len(rows), width, *example.shape[1:], dtype=example.dtype)
            for pack, row in zip(whole, rows, strict=True):
                joined = torch.cat([documents[i].columns[name] for i in row])
                pack[: len(joined)] = joined
            columns[name] = whole
        given = {"document_ids": document_ids, "position_ids": position_ids}
        batch = DraftBatch.of(columns | given)
        return dataclasses.replace(batch, rows=[list(row) for row in rows])

    def loss(self, batch: DraftBatch, counts: Tensor | None = None) -> DraftLoss:
        """Return the loss of a batch; every call draws the same random numbers."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            if counts is None:
                counts = self.draft.slot_counts(batch.without_hidden())
            torch.manual_seed(3)
            return self.draft.batch_loss(batch, self.head, counts)

    def gradients(self, loss: Tensor) -> dict[str, Tensor | None]:
        """Return the gradient of every trainable parameter."""
        names = {n: p for n, p in self.draft.named_parameters() if p.requires_grad}
        found = torch.autograd.grad(loss, list(names.values()), allow_unused=True)
        return dict(zip(names, found, strict=True))

    def chains(self, batch: DraftBatch) -> Tensor:
        return self.draft.chains(batch, self.head, self.draft.depth)


PACKED, WIDTH = ((2, 1), (3, 0, 4)), 24
"""Documents side by side in two packs, with padding."""


# -- the laws --------------------------------------------------------------------------------------


def _drafts_are_tokens(subject: _Subject) -> None:
    """chains are ids of the draft's vocabulary, or -1: one per slot and depth"""
    batch = subject.batch(PACKED, WIDTH)
    chains, draft = subject.chains(batch), subject.draft.eval()
    if chains.shape != (*batch.input_ids.shape, draft.depth) or chains.dtype != torch.int64:
        raise LawError(f"chains: {chains.dtype} {list(chains.shape)}, not int64 [B, T, depth]")
    known = torch.arange(VOCAB) if draft.proposed_ids is None else draft.proposed_ids
    if odd := sorted(set(chains.flatten().tolist()) - {-1, *known.tolist()}):
        raise LawError(f"chains has {odd[:5]}, which the draft cannot propose")


def _sums_add_up(subject: _Subject) -> None:
    """documents alone, packed, reordered and padded have the same loss, gradients and sums"""
    draft = subject.draft.eval()
    whole = subject.batch(PACKED, WIDTH)
    alone = [subject.batch([[i]], len(subject.documents[i])) for i in range(len(LENGTHS))]
    with torch.random.fork_rng(devices=[]):
        parts = [draft.slot_counts(batch.without_hidden()) for batch in alone]
    counts = torch.stack(parts).sum(0)
    _same("the counts of slots", draft.slot_counts(whole.without_hidden()), counts)
    expected = subject.loss(whole, counts)
    found = [subject.loss(batch, counts) for batch in alone]
    total = torch.stack([one.loss for one in found]).sum()
    _same("the loss", total, expected.loss)
    ours, theirs = subject.gradients(total), subject.gradients(expected.loss)
    for name, gradient in theirs.items():
        if gradient is None or not gradient.any():
            raise LawError(f"{name} is trainable, and has no gradient")
        _same(f"the gradient of {name}", ours[name], gradient)
    for name, value in expected.sums.items():
        _same(f"sums[{name!r}]", torch.stack([one.sums[name] for one in found]).sum(0), value)


def _nothing_supervised(subject: _Subject) -> None:
    """a batch without a supervised slot, or of padding, has loss 0 and gradients of 0"""
    subject.draft.train()
    batch = subject.batch(PACKED, WIDTH)
    names = {name: value.shape for name, value in subject.loss(batch).sums.items()}
    batch.loss_mask.zero_()
    if subject.draft.slot_counts(padding_batch()).any():
        raise LawError("slot_counts of padding is not 0")
    found = subject.loss(batch)
    if float(found.loss.detach()):
        raise LawError(f"the loss is {float(found.loss.detach())}")
    if {name: value.shape for name, value in found.sums.items()} != names:
        raise LawError(f"its sums are {sorted(found.sums)}, with slots they are {sorted(names)}")
    for name, gradient in subject.gradients(found.loss).items():
        if gradient is None or gradient.any():
            raise LawError(f"the gradient of {name} is {'none' if gradient is None else 'not 0'}")


def _drafts_do_not_peek(subject: _Subject) -> None:
    """what comes after a slot changes no draft at it, nor those of other documents in its pack"""
    subject.draft.eval()
    before = subject.chains(subject.batch(PACKED, WIDTH))
    for number, pack, start in _places():
        document = subject.documents[number]
        for slot in range(len(document) - 1):
            after = {"input_ids": slot + 2, "state": slot + 1, "target_argmax": slot + 1}
            other = document.changed(subject.generator, **after, target_logsumexp=slot + 1)
            documents = [*subject.documents]
            documents[number] = other
            now = subject.chains(subject.batch(PACKED, WIDTH, documents))
            differs = (now != before).any(-1)
            differs[pack, start + slot + 1 : start + len(document)] = False
            if differs.any():
                where, at = differs.nonzero()[0].tolist()
                inside = where == pack and start <= at < start + len(document)
                raise LawError(
                    f"tokens and states after slot {slot} of a document change the draft "
                    + (f"at its slot {at - start}" if inside else "of another document")
                )


def _losses_do_not_peek(subject: _Subject) -> None:
    """what comes after a drafted token, and states after its slot, change no loss of it"""
    options = subject.draft.options
    soft = getattr(options, "loss_target", "") == "soft" and not hasattr(options, "compared_with")
    for training in (False, True):
        subject.draft.train(training)
        for number, document in enumerate(subject.documents):
            for known in range(1, len(document) - 1):
                one = document.supervised(known, known + 1)
                firsts = {"input_ids": known + 2 - soft, "state": known, FINAL: known + 1}
                firsts |= {"target_argmax": known + 1, "target_logsumexp": known + 1}
                losses = []
                for version in (one, one.changed(subject.generator, **firsts)):
                    documents = [*subject.documents]
                    documents[number] = version
                    losses.append(subject.loss(subject.batch([[number]], WIDTH, documents)))
                what = f"of token {known + 1} in {'training' if training else 'validation'}"
                _same(f"the loss {what}", losses[1].loss, losses[0].loss)
                for name, value in losses[0].sums.items():
                    _same(f"sums[{name!r}] {what}", losses[1].sums[name], value)


def _alone_as_in_packs(subject: _Subject) -> None:
    """a drafter proposes token by token what chains says of a whole document"""
    draft = subject.draft.eval()
    for number, document in enumerate(subject.documents):
        chains = subject.chains(subject.batch([[number]], len(document)))[0]
        states = torch.cat([document.columns[name] for name in draft.state_columns], -1)
        drafter, tokens = draft.drafter(subject.head), document.columns["input_ids"].tolist()
        for slot in range(len(document) - 1):
            with torch.no_grad():
                ids, _ = drafter.propose(
                    [tokens[slot + 1]], states[None, slot : slot + 1], draft.depth, Greedy()
                )
            if (found := ids.tolist()) != (wanted := chains[slot].tolist())[: len(found)]:
                raise LawError(f"at slot {slot} the drafter proposes {found}, chains has {wanted}")


def _same_numbers_again(subject: _Subject) -> None:
    """a batch has the same loss whenever torch's generator has the same state"""
    subject.draft.train()
    batch = subject.batch(PACKED, WIDTH)
    first, second = subject.loss(batch).loss, subject.loss(batch).loss
    if not torch.equal(first, second):
        raise LawError(f"the losses are {float(first.detach())} and {float(second.detach())}")


def _low_precision(subject: _Subject) -> None:
    """under autocast the loss stays near, and float32 weights have float32 gradients"""
    draft, batch = subject.draft.float().eval(), subject.batch(PACKED, WIDTH)
    head, embedding = subject.head, draft.embed_tokens.weight.data
    batch = batch.to("cpu", torch.float32)
    try:
        subject.head = head.float()
        exact = float(subject.loss(batch).loss.detach())
        with torch.autocast("cpu", torch.bfloat16):
            low = subject.loss(batch)
        for name, gradient in subject.gradients(low.loss).items():
            if gradient is None or gradient.dtype != torch.float32:
                raise LawError(f"the gradient of {name} is {getattr(gradient, 'dtype', None)}")
        if not abs(float(low.loss.detach()) - exact) <= 0.1 * abs(exact):
            raise LawError(f"the loss is {float(low.loss.detach())}, in float32 {exact}")
    finally:
        subject.head = head.double()
        draft.embed_tokens.weight.data = embedding
        draft.double()


def _files_are_the_draft(subject: _Subject) -> None:
    """what is saved is read back bit for bit; lacking, other or edited tensors are refused"""
    draft, before = subject.draft.float(), logging.root.manager.disable
    logging.disable(logging.WARNING)  # that a file was edited is what is tried
    try:
        with tempfile.TemporaryDirectory() as folder:
            _check_files(draft, Path(folder))
    finally:
        logging.disable(before)
        draft.double()


def _check_files(draft: Draft, folder: Path) -> None:
    draft.save_pretrained(folder, torch.float32)
    again = load_draft(folder)
    if again.config != draft.config or again.options != draft.options:
        raise LawError("its configuration or its options are others after it was read back")
    for name, value in draft.state_dict().items():
        if not torch.equal(value, again.state_dict()[name]):
            raise LawError(f"{name} has other values after it was read back")
    path = folder / "model.safetensors"
    kept = load_file(path)
    name = next(n for n, v in kept.items() if v.is_floating_point() and "embed" not in n)
    others = {
        f"without {name}": {n: v for n, v in kept.items() if n != name},
        "with a tensor of another name": kept | {"another": kept[name].clone()},
        f"with {name} of another shape": kept | {name: kept[name].flatten()[:-1].clone()},
    }
    for what, tensors in others.items():
        save_file(tensors, path)
        _refused(folder, what, accept_edited=True)
    changed = kept[name].clone()
    changed.view(-1)[0] = float("nan")
    save_file(kept | {name: changed}, path, metadata={"spec_train": "sealed"})
    _refused(folder, f"with a NaN in {name}", accept_edited=False)


def _refused(folder: Path, what: str, accept_edited: bool) -> None:
    try:
        load_draft(folder, accept_edited=accept_edited)
    except DraftError:
        return
    raise LawError(f"a file {what} is read as a draft")


LAWS: tuple[Callable[[_Subject], None], ...] = (
    *(_drafts_are_tokens, _sums_add_up, _nothing_supervised, _drafts_do_not_peek),
    *(_losses_do_not_peek, _alone_as_in_packs, _same_numbers_again, _low_precision),
    _files_are_the_draft,
)


def _places() -> Iterator[tuple[int, int, int]]:
    """Yield the number of every document of PACKED, its pack, and the slot where it starts."""
    for pack, row in enumerate(PACKED):
        start = 0
        for number in row:
            yield number, pack, start
            start += LENGTHS[number]


def _same(what: str, found: Tensor | None, wanted: Tensor) -> None:
    """Refuse numbers that differ by more than rounding in float64."""
    if found is None or found.shape != wanted.shape:
        shape = None if found is None else list(found.shape)
        raise LawError(f"{what} has shape {shape}, expected {list(wanted.shape)}")
    found, wanted = found.detach().double(), wanted.detach().double()
    limit = 1e-9 * float(wanted.abs().max()) + 1e-12
    difference = float((found - wanted).abs().nan_to_num(nan=torch.inf).max())
    if difference > limit:
        raise LawError(
            f"{what} is {_shown(found)}, expected {_shown(wanted)}: they differ by {difference:.3g}"
        )


def _shown(values: Tensor) -> str:
    return f"{float(values):.9g}" if not values.ndim else f"{values.flatten()[:4].tolist()} ..."
