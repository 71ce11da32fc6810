"""Would the target say this? How well the supervised tokens of a dataset agree with its target.

Generation measures four figures at every supervised token and sums them per document. The manifest
holds them per source:

- first choice: the token is the arg max of the target;
- NLL: its negative log-likelihood under the target, in nats;
- own NLL and own first choice: the expectation of both if the target itself had sampled the token,
  at temperature 1 unless the user states another.

Text of the target has an NLL near its own NLL, or below it where it was sampled at a lower
temperature. A random model has an NLL of about ln V, and token ids of another tokenizer clearly
more, as a trained model is sure of other tokens.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from spec_data.shards.records import Count, JsonRecord

FIGURES = ("first_choice", "nll", "own_nll", "own_first_choice")
SUMS = 3 + len(FIGURES)
ALL_SOURCES = "all sources"
LEAST_TOKENS = 64  # with fewer supervised tokens nothing is concluded
_ERRORS = 4.0  # how many standard errors a mean must lie beyond a bound
_ABOVE_RANDOM = 1.0  # nats; random initialisations of real families lie up to 0.7 above ln V
# What other kernels and a tokenisation of sampled text cost: nats, and a share.
_OWN_NLL_SLACK, _OWN_SHARE_SLACK = 0.1, 0.05
# Greedy answers have a share of 1 but for near-ties that another engine decides otherwise.
GREEDY_SHARE = 0.95
# Samples of instruction-tuned targets lie above, answers of people and other models below.
ON_POLICY_SHARE = 0.75
_LOW_SHARE = 0.7
_SOURCE_GAP = 0.2  # by which a source may lie below the best one
_MOST_SOURCES = 20  # that are listed by name
_CAUSES = (
    "likely causes: another chat template than the one that the answers were made with, a doubled "
    "BOS token, answers shuffled between prompts, or a target with missing or wrongly configured "
    "weights"
)


def indices_by_name(names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the indices of each name, ascending, int64 [n]; names in order of appearance."""
    numbers: dict[str, int] = {}
    codes = np.fromiter((numbers.setdefault(n, len(numbers)) for n in names), np.int64, len(names))
    order = np.argsort(codes, kind="stable")
    bounds = np.searchsorted(codes[order], np.arange(len(numbers) + 1))
    return {name: order[bounds[i] : bounds[i + 1]] for name, i in numbers.items()}


def document_sums(figures: np.ndarray) -> np.ndarray:
    """Return the sums of a document, float64 [SUMS], of its FIGURES, float64 [m, 4].

    They are: tokens, the four figures, squares of the NLL, and squares of NLL - own NLL.
    """
    excess = figures[:, 1] - figures[:, 2]
    squares = (figures[:, 1] ** 2).sum(), (excess**2).sum()
    return np.array([len(figures), *figures.sum(0), *squares])


class Agreement(JsonRecord, frozen=True, kw_only=True):
    """The figures of one source, or of a whole dataset.

    `first_choice` counts tokens, NLLs are means in nats, `nll_error` and `excess_error` standard
    errors of nll and nll - own_nll. `own_share`: first choices in the target's own samples.
    """

    documents: Count
    tokens: Count
    first_choice: Count
    nll: float
    nll_error: float
    own_nll: float
    excess_error: float
    own_share: float

    @classmethod
    def of(cls, sums: np.ndarray) -> "Agreement":
        """Summarise `document_sums` of documents, float64 [D, SUMS], in their order."""
        counts, nlls, excess = sums[:, 0], sums[:, 2], sums[:, 2] - sums[:, 3]
        tokens = int(counts.sum())
        first, *totals = (math.fsum(column) for column in sums.T[1:5])
        nll, own_nll, own_share = (_rounded(total / max(tokens, 1)) for total in totals)
        nll_error, excess_error = (
            _rounded(_standard_error(values, counts, squares))
            for values, squares in ((nlls, sums[:, 5]), (excess, sums[:, 6]))
        )
        return cls(
            documents=int((counts > 0).sum()),
            tokens=tokens,
            first_choice=round(first),
            nll=nll,
            nll_error=nll_error,
            own_nll=own_nll,
            excess_error=excess_error,
            own_share=own_share,
        )

    def __str__(self) -> str:
        """Share and NLL in words."""
        return (
            f"{self.share:.1%} of {self.tokens:,} supervised tokens are the target's first choice, "
            f"mean NLL {self.nll:.2f} nats"
        )

    @property
    def share(self) -> float:
        """Share of tokens that are the target's first choice."""
        return self.first_choice / max(self.tokens, 1)

    @property
    def enough(self) -> bool:
        """Whether there are enough tokens to conclude anything."""
        return self.tokens >= LEAST_TOKENS

    def above_random(self, vocab_size: int) -> bool:
        """Return whether the NLL is clearly above ln V."""
        bound = math.log(vocab_size) + _ABOVE_RANDOM + _ERRORS * self.nll_error
        return self.enough and self.nll > bound

    def contradicts_on_policy(self, temperature: float | None) -> bool:
        """Return whether these tokens cannot be samples of the target: they are less likely.

        `temperature` is that of own NLL and own share; None: not stated, so they are those of 1,
        and a share that only such samples have is refused.
        """
        noise = math.sqrt(self.share * (1 - self.share) / max(self.tokens, 1))
        return self.enough and (
            (temperature is None and self.share < ON_POLICY_SHARE)
            or self.nll - self.own_nll > _OWN_NLL_SLACK + _ERRORS * self.excess_error
            or self.share < self.own_share - _OWN_SHARE_SLACK - _ERRORS * noise
        )

    def contradiction(self, temperature: float | None) -> str:
        """Say why these tokens are not on-policy."""
        at = "1" if temperature is None else f"{temperature:g}"
        return (
            f"{self}; samples of this target at temperature {at} would have "
            f"{self.own_share:.1%} and {self.own_nll:.2f} nats"
        )

    def suspicion(self, vocab_size: int, temperature: float | None, on_policy: bool) -> str | None:
        """Return the strongest suspicion about these tokens, in words; None: there is none."""
        if not self.enough:
            return None
        if self.above_random(vocab_size):
            return f"{self}. {above_random_text(vocab_size)}"
        if self.nll > 0.9 * math.log(vocab_size):
            return (
                f"{self}. The target behaves like a random model, which has an NLL of about ln V = "
                f"{math.log(vocab_size):.2f}: its weights are untrained, or these are not its "
                "token ids"
            )
        if temperature is None and self.own_share + _OWN_SHARE_SLACK < self.share < GREEDY_SHARE:
            return (
                f"{self}. Samples of this target at temperature 1 would have {self.own_share:.1%}, "
                f"its greedy answers {GREEDY_SHARE:.0%} or more. If these are its greedy answers, "
                f"the share is too low; {_CAUSES}"
            )
        if not on_policy and self.share < _LOW_SHARE:
            return (
                f"{self}, which is low. Answers of people or of other models often have no more; "
                f"drafts are accepted longer when the target writes its own. Otherwise, {_CAUSES}"
            )
        return None


def above_random_text(vocab_size: int) -> str:
    """Say what an NLL above ln V means."""
    return (
        f"A random model has an NLL of about ln V = {math.log(vocab_size):.2f}. A higher one means "
        "that these token ids are not this tokenizer's, or that the target never learned such text "
        "(another language)"
    )


def _standard_error(sums: np.ndarray, counts: np.ndarray, squares: np.ndarray) -> float:
    """Return the standard error of sum(sums) / sum(counts), [D] each; infinite for one token.

    It is the larger of two estimates: by the spread between documents, and between tokens.
    """
    tokens, documents = int(counts.sum()), int((counts > 0).sum())
    if tokens < 2:
        return math.inf
    mean = math.fsum(sums) / tokens
    variance = max(0.0, math.fsum(squares) / tokens - mean**2)
    error = math.sqrt(variance / (tokens - 1))
    if documents < 2:
        return error
    between = math.fsum((sums - mean * counts) ** 2) * documents / (documents - 1)
    return max(error, math.sqrt(between) / tokens)


def _rounded(value: float) -> float:
    """Six digits; infinity (too few tokens for a standard error) is written as -1."""
    return float(f"{value:.6g}") if math.isfinite(value) else -1.0


class AgreementTable(JsonRecord, frozen=True, kw_only=True):
    """The agreement of a dataset: of all documents, and of each source by name."""

    total: Agreement
    sources: dict[str, Agreement]

    def judged(self) -> dict[str, Agreement]:
        """Return what conclusions are drawn from: sources with enough tokens, else all of them."""
        judged = {name: a for name, a in self.sources.items() if a.enough}
        if self.total.enough and len(judged) < len(self.sources):
            judged[ALL_SOURCES] = self.total
        return judged

    def contradictions(self, temperature: float | None) -> list[str]:
        """Return, in words, which sources cannot be samples of the target at a temperature."""
        return [
            f"{name}: {agreement.contradiction(temperature)}"
            for name, agreement in self.judged().items()
            if agreement.contradicts_on_policy(temperature)
        ]

    def suspicions(
        self, vocab_size: int, temperature: float | None, on_policy: bool, claimed: bool
    ) -> list[str]:
        """Return what is suspicious, in words; `claimed`: --on-policy was given."""
        refused = self.contradictions(temperature) if claimed else []
        texts = [f"--on-policy was not accepted: {text}" for text in refused]
        judged = self.judged()
        single = {name: a for name, a in judged.items() if name in self.sources}
        best = max(single, key=lambda name: single[name].share, default="")
        for name, agreement in judged.items():
            if text := agreement.suspicion(vocab_size, temperature, on_policy):
                texts.append(f"{name}: {text}")
            elif name in single and agreement.share < single[best].share - _SOURCE_GAP:
                texts.append(
                    f"{name}: {agreement.share:.1%} first choices, but {best} has "
                    f"{single[best].share:.1%}: compare how the two are rendered (template, BOS, "
                    "order of answers) and who wrote the answers"
                )
        more = len(texts) - _MOST_SOURCES  # a folder of files is many sources
        return [*texts[:_MOST_SOURCES], *([f"and {more:,} more such lines"] if more > 0 else [])]

    def rows(self) -> Iterator[Sequence[str]]:
        """Yield the cells of a table, header first. Of many sources, the largest are listed."""
        yield ("source", "supervised", "top-1", "NLL", "own top-1", "own NLL")
        largest = set(sorted(self.sources, key=lambda n: -self.sources[n].tokens)[:_MOST_SOURCES])
        rows = {name: a for name, a in self.sources.items() if name in largest}
        if len(self.sources) != 1:
            more = len(self.sources) - len(rows)
            rows[f"{ALL_SOURCES}, {more:,} more of them" if more else ALL_SOURCES] = self.total
        for name, a in rows.items():
            own = (f"{a.own_share:.1%}", f"{a.own_nll:.3f}")
            yield (name, f"{a.tokens:,}", f"{a.share:.1%}", f"{a.nll:.3f}", *own)

    def policy(self, on_policy: bool, temperature: float | None) -> str:
        """Return the label that the measurement allows: "on-policy" or "off-policy".

        Data is on-policy if --on-policy says so and no source contradicts it, or if every source
        consists of the target's greedy answers.
        """
        sources = self.judged().values()
        if on_policy:
            return "off-policy" if self.contradictions(temperature) else "on-policy"
        greedy = bool(sources) and all(a.share >= GREEDY_SHARE for a in sources)
        return "on-policy" if greedy else "off-policy"


def summarise(sums: np.ndarray, sources: Sequence[str]) -> AgreementTable:
    """Return the agreement of documents, whose sources are `sources`, in order of appearance."""
    return AgreementTable(
        total=Agreement.of(sums),
        sources={
            name: Agreement.of(sums[indices]) for name, indices in indices_by_name(sources).items()
        },
    )
