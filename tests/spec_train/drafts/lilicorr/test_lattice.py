"""The lattice of LiLiCorr beside the loss of its backbone."""

from types import SimpleNamespace

from spec_train.drafts.lilicorr import stage as lattice
from tests.spec_train.drafts import any_draft
from tests.spec_train.drafts.any_draft import build_draft, packed
from tests.tolerance import close, network

dataset, head = any_draft.dataset, any_draft.head


def test_the_targets_probabilities_are_of_the_candidates_of_the_lattice(dataset, head, monkeypatch):
    """Two products may round to other candidates. Planted: the last of K is the one behind it."""
    find, judge, seen = lattice._Candidates.apply, lattice.LatticeRows.judged, []

    def others(hidden, weight, top):
        log_q, ids = find(hidden, weight, top + 1)
        kept = [*range(top - 1), top]
        return log_q[:, kept], ids[:, kept]

    def judged(rows, served, scores, probability, figures):
        seen.append((rows.chosen.slot, served, probability))
        return judge(rows, served, scores, probability, figures)

    monkeypatch.setattr(lattice, "_Candidates", SimpleNamespace(apply=others))
    monkeypatch.setattr(lattice.LatticeRows, "judged", judged)
    batch = packed(dataset)
    build_draft("lilicorr", dataset, head).loss(batch, head, None)
    ((slots, served, probability),) = seen
    states = batch.hidden["hidden.final"].flatten(0, 1)[slots]
    wanted = head.logits(states).softmax(-1).gather(1, served)
    assert served.shape[1] == 6 and float(wanted.min()) > 0
    close(probability, wanted, terms=network(1))
