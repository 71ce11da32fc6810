"""What must come out of a vector, and what comes out with each mistake, by the slow references."""

import copy
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spec_train.conformance import target as tiny
from spec_train.conformance.drafts import TinyDraft, fit_draft, make_draft
from spec_train.conformance.recipes import RECIPES, twins_of
from spec_train.conformance.target import Answer, TinyTarget
from spec_train.drafts.draft import Draft
from spec_train.drafts.kind_vectors import Reads, Recipe, Twin

OUTPUT = 16
"""Tokens of an answer."""
_PROMPTS, _KEPT, _GAP = 4, 3, 2e-3


@dataclass(frozen=True)
class Decoded:
    """Greedy decoding of one prompt: the verification steps until `OUTPUT` tokens are answered."""

    drafted: list[list[int]]
    accepted: list[int]
    logits: list[Tensor]  # of each step [K, V or Vd]
    gap: float  # the smallest between the two largest logits of a drafted token


@dataclass(frozen=True)
class Vector:
    """A vector in memory."""

    recipe: Recipe
    draft: Draft
    tiny: TinyDraft
    answers: list[Answer]
    decoded: list[Decoded]  # of each answer
    twins: list[tuple[Twin, Draft | None, list[Decoded]]]

    @property
    def gap(self) -> float:
        """The smallest gap of two logits that decides a token, of the target or of the draft."""
        count = OUTPUT + self.tiny.depth
        return min(*(one.gap(count) for one in self.answers), *(one.gap for one in self.decoded))


def decode(draft: TinyDraft, answer: Answer, reads: Reads) -> Decoded:
    """Decode one prompt: a step drafts, and accepts the drafts that are the target's own tokens."""
    states, n, total = draft.states(answer, reads), answer.prompt, 1
    drafted, accepted, logits = [], [], []
    while total < OUTPUT:  # the last step may go on beyond the answer
        made = draft.draft(answer.tokens[: n + 1], states, reads, known=False)
        pairs = zip(made.tokens, answer.tokens[n + 1 :], strict=False)
        count = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        drafted.append(made.tokens)
        accepted.append(count)
        logits.append(made.logits)
        n, total = n + count + 1, total + count + 1
    top = torch.cat(logits).topk(2).values
    return Decoded(drafted, accepted, logits, float((top[:, 0] - top[:, 1]).min()))


@torch.no_grad()
def make_vector(recipe: Recipe, target: TinyTarget) -> Vector:
    """Make a draft, fit it, and decode with it and with its mistakes."""
    generator = torch.Generator().manual_seed(len(recipe.name))
    prompts = torch.randint(tiny.FIRST, tiny.VOCAB, (_PROMPTS, 6), generator=generator).tolist()
    answers = [target.answer(prompt, OUTPUT + 12) for prompt in prompts]
    ids = _vocabulary(answers, recipe.vocabulary)
    draft = make_draft(recipe.kind, target, recipe.options, ids, RECIPES.index(recipe))
    fit_draft(draft, slow_draft(draft, target), answers, OUTPUT)
    exact = slow_draft(draft, target)
    pairs = [(answer, decode(exact, answer, Reads())) for answer in answers]
    pairs = sorted(pairs, key=lambda pair: _rank(*pair))[:_KEPT]
    answers, decoded = [answer for answer, _ in pairs], [one for _, one in pairs]
    twins: list[tuple[Twin, Draft | None, list[Decoded]]] = []
    for twin in twins_of(recipe, draft.config, ids):
        wrong = baked(draft, twin) if twin.in_file else None
        served = exact if wrong is None else slow_draft(wrong, target)
        twins.append((twin, wrong, [decode(served, a, twin.reads) for a in answers]))
    return Vector(recipe, draft, exact, answers, decoded, twins)


def _rank(answer: Answer, one: Decoded) -> tuple[bool, bool, int, float]:
    """Return what is smaller, the more a prompt says: clear choices, counts that vary."""
    unclear = answer.gap(OUTPUT + 4) < _GAP / 4
    return unclear, one.gap < _GAP, -min(len(set(one.accepted)), 3), -one.gap


def _vocabulary(answers: Sequence[Answer], size: int) -> tuple[int, ...]:
    """Return the special tokens and the most frequent tokens of answers, but for every eighth."""
    if not size:
        return ()
    counts = Counter(token for answer in answers for token in answer.tokens[answer.prompt :])
    ranked = sorted(range(tiny.FIRST, tiny.VOCAB), key=lambda token: (-counts[token], token))
    ranked = [t for i, t in enumerate(ranked) if i % 8 != 7] + ranked[7::8]
    return tuple(sorted([*range(tiny.FIRST), *ranked[: size - tiny.FIRST]]))


def baked(draft: Any, twin: Twin) -> Any:
    """Return a copy of a draft that has a mistake in its files."""
    wrong = copy.deepcopy(draft)
    wrong.update_config(**twin.config)
    if twin.edit is not None:
        with torch.no_grad():
            twin.edit(wrong)
    if twin.vocabulary:
        wrong.set_vocabulary(torch.tensor(twin.vocabulary))
    return wrong


def slow_draft(draft: Any, target: TinyTarget) -> TinyDraft:
    """Return a draft for the slow references, with the embedding that its files may leave out."""
    state = target.from_file(draft.checkpoint_tensors(torch.float64))
    state |= {"embed_tokens.weight": target.state["embed_tokens.weight"]}
    return TinyDraft(draft.name, draft.depth, target, draft.config, state)
