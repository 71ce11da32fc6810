"""Acceptance by source, and sampled responses: against plain loops over documents."""

from collections import Counter

import numpy as np
import pytest

from spec_train.decoding.chains import Generation, VerificationStep
from spec_train.evaluation.decoding_metrics import Response, decoding_metrics
from spec_train.simulation import breakdown
from spec_train.simulation.breakdown import Breakdown
from spec_train.simulation.intervals import resampled
from spec_train.simulation.ranges import EDGES, range_of
from spec_train.simulation.samples import document_sample, token_texts
from spec_train.simulation.simulated_decoding import (
    ON_POLICY,
    TOKENS,
    SimulatedDocument,
    figures,
    no_counts,
)
from tests.spec_data.corpus.templates import tokenizer
from tests.spec_train.simulation.test_simulated_decoding import outcome, random_document

DEPTHS = 4


def added(documents, sources, sampled=()):
    """The breakdown of some documents."""
    found = Breakdown(DEPTHS, sampled)
    for number, (arrays, source) in enumerate(zip(documents, sources, strict=True)):
        found.add(number, source, arrays)
    return found.figures()


def positions_by_hand(drafted, ids, best, mask):
    """The position in its answer, and in the document, of every round, token by token."""
    found = []
    for start in range(len(ids)):
        if not mask[start] or (start and mask[start - 1]):
            continue
        end = start
        while end < len(ids) and mask[end]:
            end += 1
        slot = max(start - 1, 0)
        while slot + 2 < end:
            _, accepted, censored = outcome(drafted, ids, best, mask, slot)
            found.append((slot + 2 - start, slot + 2))
            slot += accepted if censored else accepted + 1
    return found


@pytest.mark.parametrize("seed", range(4))
def test_positions_and_contexts_are_those_of_steps_by_hand(seed):
    """Also where documents leave the target's choice."""
    documents = [random_document(10 * seed + k, 0.85, 0.6, length=90) for k in range(3)]
    found = added(documents, "abc")
    by_hand = [pair for document in documents for pair in positions_by_hand(*document)]
    for which, name in enumerate(("by_position", "by_context")):
        expected = Counter(range_of(pair[which]) for pair in by_hand)
        lines = found[name]
        assert {EDGES.index(line["start"]): line["rounds"] for line in lines} == expected
        assert len(lines) > 1 and sum(line["rounds"] for line in lines) == len(by_hand)
        for line in lines:
            assert line["end"] == EDGES[EDGES.index(line["start"]) + 1]
    rounds = found["simulated"]["rounds"]
    assert rounds == len(by_hand)


def accepted_at(context):
    """What the planted draft has right: all in short contexts, nothing from 65,536 tokens on."""
    return max(0, DEPTHS - max(0, range_of(context) - range_of(4096)))


def long_document(length, seed):
    """A document of the target's own tokens, and chains that are right as far as `accepted_at`."""
    ids = np.random.default_rng(seed).integers(0, 50, length)
    best = np.append(ids[1:], 0)
    drafted = np.full((length, DEPTHS), 99)
    for slot in range(length):
        for depth in range(1, 1 + accepted_at(slot + 2)):
            if slot + depth < length:
                drafted[slot, depth - 1] = best[slot + depth]
    mask = np.zeros(length, dtype=bool)
    mask[20:] = True
    return drafted, ids, best, mask


def test_a_draft_that_depends_on_the_length_is_found_up_to_128k():
    """Each range has exactly the planted length, and its interval no width."""
    lengths = [200_000, *[9_000 + 13 * k for k in range(8)]]
    documents = [long_document(length, k) for k, length in enumerate(lengths)]
    found = added(documents, ["long", *["short"] * 8])
    lines = {line["start"]: line for line in found["by_context"]}
    assert list(lines) == [start for start in EDGES if start >= 16]
    assert lines[131072]["end"] is None
    for start, line in lines.items():
        expected = 1 + accepted_at(start)
        ends = sum(start <= length < (line["end"] or length + 1) for length in lengths)
        cut = ends * DEPTHS / line["rounds"]  # the end of a document cuts its last step
        assert line["acceptance_length"] == pytest.approx(expected, abs=cut + 1e-12), start
        if start > 8192:
            assert line["interval"] is None, "one document alone"
        else:
            assert line["interval"] == pytest.approx([expected] * 2, abs=0.05), start
    assert [lines[k]["acceptance_length"] for k in (4096, 16384, 65536)] == [5, 3, 1]
    by_source = {line["source"]: line for line in found["by_source"]}
    assert by_source["long"]["interval"] is None
    low, high = by_source["short"]["interval"]
    assert low <= by_source["short"]["acceptance_length"] <= high < 5


def test_modes_have_the_verifications_of_their_answers():
    """Random documents of two answers each; also over two processes."""
    documents = [random_document(k, 0.9, 0.7, length=60) for k in range(20)]
    modes = [[("turn 1", "with tools"), ("turn 2", "with tools")]] * 10
    modes += [[("turn 1",), ("turn 2", "with tools")]] * 10
    halves = [Breakdown(DEPTHS), Breakdown(DEPTHS)]
    expected = {}
    for number, (arrays, own) in enumerate(zip(documents, modes, strict=True)):
        halves[number % 2].add(number, "s", arrays, own)
        document = SimulatedDocument(arrays)
        for span, names in zip(document.spans, own, strict=True):
            for name in names:
                expected.setdefault(name, []).append(document.counts_of([span]))
    halves[0].add_all(halves[1].as_json())
    lines = {line["mode"]: line for line in halves[0].figures()["by_mode"]}
    assert list(lines) == ["turn 1", "turn 2"], "all with tools: that says nothing"
    for name, line in lines.items():
        total = figures(np.sum(expected[name], axis=0))
        assert line["rounds"] == total["rounds"]
        assert line["acceptance_length"] == total["acceptance_length"]
        assert line["interval"][0] < line["acceptance_length"] < line["interval"][1]


def test_real_decoding_is_told_by_mode_and_context_with_intervals():
    responses, rng = [], np.random.default_rng(0)
    for k in range(48):
        emitted = rng.integers(1, 4, 12).tolist()
        steps = [VerificationStep(drafted=3, tried=3, accepted=n - 1, emitted=n) for n in emitted]
        made = Generation(tokens=[1] * (1 + sum(emitted)), steps=steps, stopped=True)
        mode = "with thinking" if k % 3 else "without thinking"
        # every prompt is asked twice
        ids = [k // 2] * (20 if k % 2 else 3000)
        responses.append(
            Response(where=f"p:{k:02}", group="", ids=ids, generation=made, modes=(mode,))
        )
    found = decoding_metrics(responses, 3)
    assert [line["mode"] for line in found["by_mode"]] == ["without thinking", "with thinking"]
    for line in found["by_mode"]:
        own = [s for r in responses if line["mode"] in r.modes for s in r.generation.steps]
        assert line["rounds"] == len(own)
        assert line["acceptance_length"] == sum(s.emitted for s in own) / len(own)
        assert line["interval"][0] < line["acceptance_length"] < line["interval"][1]
    expected = {}
    for r in responses:
        done = len(r.ids) + 1
        for step in r.generation.steps:
            expected.setdefault(EDGES[range_of(done)], []).append(step.emitted)
            done += step.emitted
    lines = {line["start"]: line for line in found["by_context"]}
    assert {k: (one["rounds"], one["acceptance_length"]) for k, one in lines.items()} == {
        k: (len(some), sum(some) / len(some)) for k, some in expected.items()
    }
    low, high = lines[2048]["interval"]
    assert low < lines[2048]["acceptance_length"] < high


def test_sources_add_up_and_many_are_joined(monkeypatch):
    monkeypatch.setattr(breakdown, "MOST_SOURCES", 2)
    documents = [random_document(seed, 0.8, 0.6, length=20 + 10 * seed) for seed in range(5)]
    sources = ["small", "b", "a", "b", "a"]
    found = added(documents, sources)["by_source"]
    assert [line["source"] for line in found] == ["a", "b", breakdown.OTHERS]
    for line, wanted in zip(found, ("a", "b", "small"), strict=True):
        total = no_counts(DEPTHS)
        for document, source in zip(documents, sources, strict=True):
            if source == wanted:
                total += SimulatedDocument(document).counts()
        assert line["documents"] == sources.count(wanted)
        assert line["supervised_tokens"] == total[TOKENS]
        assert line["acceptance_length"] == figures(total)["acceptance_length"]
        assert line["on_policy"] == pytest.approx(total[ON_POLICY] / total[TOKENS])


@pytest.mark.parametrize("on_policy", [1.0, 0.7])
@pytest.mark.parametrize("seed", range(4))
def test_a_sample_repeats_its_document(seed, on_policy):
    drafted, ids, best, mask = random_document(seed, on_policy, 0.7, length=60)
    drafted[5::7, 2:] = -1  # chains that ended early
    document = SimulatedDocument((drafted, ids, best, mask))
    sample = document_sample("d", "s", document)
    told, rounds = [], iter([step for _, steps in document.spans for step in steps])
    for part in sample["parts"]:
        if part["kind"] != "round":
            told += part["tokens"]
            continue
        slot, _ = next(rounds)
        assert len(told) == slot + 2  # what the round knows
        accepted, own, emitted = part["accepted"], part["drafted"], part["emitted"]
        assert own[:accepted] == best[slot + 1 : slot + 1 + accepted].tolist()
        assert -1 not in own and len(own) <= DEPTHS
        same = [a == b for a, b in zip(own[:accepted], emitted, strict=False)]
        assert all(same[:-1])
        if accepted < len(emitted):
            assert part["choice"] == best[slot + 1 + accepted]
        else:  # the last accepted draft is not the document's token, or nothing was left to add
            assert part["choice"] is None
        if accepted < len(own):
            assert own[accepted] != part["choice"] or part["choice"] is None
        told += emitted
    assert next(rounds, None) is None
    last = int(np.flatnonzero(mask)[-1]) + 1
    assert told == ids[:last].tolist()


def rounds_of(tokens):
    """Two rounds after the first token: one rejects its second draft, one is ended by a stop."""
    return [
        VerificationStep(drafted=3, tried=2, accepted=1, emitted=2, tokens=(tokens[1], 99, 98)),
        VerificationStep(drafted=2, tried=2, accepted=2, emitted=2, tokens=(tokens[3], tokens[4])),
    ]


def test_a_response_is_sampled_with_its_rejected_drafts():
    tokens = [5, 6, 7, 8, 9]
    made = Generation(tokens=tokens, steps=rounds_of(tokens), stopped=True)
    sample = response([1, 2, 3], made).sample()
    context, first, one, two = sample["parts"]
    assert context["tokens"] == [1, 2, 3] and first["tokens"] == [5]
    assert one == {
        "kind": "round", "drafted": [6, 99, 98], "accepted": 1, "emitted": [6, 7], "choice": 7,
    }  # fmt: skip
    assert two["emitted"] == [8, 9] and two["choice"] is None
    assert token_texts([sample], None) == {}
    known = token_texts([sample], tokenizer("qwen3"))
    assert list(map(int, known)) == [1, 2, 3, 5, 6, 7, 8, 9, 98, 99]


def response(ids, generation, where="p:1"):
    return Response(where=where, group="", ids=ids, generation=generation)


def test_the_interval_is_that_of_resampled_documents():
    documents = [random_document(k, 0.8, 0.7, length=40) for k in range(9)]
    found = added(documents, "abcabcabc")["simulated"]
    counts = np.stack([SimulatedDocument(document).counts() for document in documents])
    often = resampled(np.eye(9, dtype=np.int64))[:500].astype(int)
    lengths = []
    for row in often:
        total = no_counts(DEPTHS)
        for count, own in zip(row, counts, strict=True):
            for _ in range(count):
                total += own
        lengths.append(figures(total)["acceptance_length"])
    low, high = np.quantile(lengths, [0.025, 0.975])
    assert found["interval"] == pytest.approx([low, high], abs=0.15 * (high - low))
    assert low < found["acceptance_length"] < high
    assert added(documents[:7], "aaaaaaa")["simulated"]["interval"] is None


def test_verifications_are_counted_by_position_and_by_context():
    tokens = [5, 6, 7, 8, 9]
    made = Generation(tokens=tokens, steps=rounds_of(tokens), stopped=True)
    assert response([1, 2, 3], made).positions() == [(1, 2), (3, 2)]
    found = decoding_metrics([response(list(range(14)), made)], 3)
    (line,) = found["by_position"]
    assert line == {"start": 0, "end": 16, "rounds": 2, "acceptance_length": 2.0, "interval": None}
    assert [(line["start"], line["rounds"]) for line in found["by_context"]] == [(0, 1), (16, 1)]
