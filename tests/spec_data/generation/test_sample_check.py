"""The sample of the corpus that is measured before the first shard, and the sums per source."""

from spec_data.generation.proof import sample_of_sources
from spec_data.shards.likelihood import (
    DocumentFigures,
    indices_by_name,
    summarise,
)


def test_a_directory_of_text_files_is_sampled_and_summed():
    """Every document is a source of its own; not all of them run before the first shard."""
    names = [f"{i:05}.txt" for i in range(20_000)]
    figures = DocumentFigures.zeros(len(names))
    figures.tokens[:] = 1
    chosen = sample_of_sources(names, [7])
    found = summarise(figures, names)
    assert 7 in chosen and 100 < len(chosen) <= 257 and chosen[-1] > 19_000
    assert list(found.sources) == names and found.total.tokens == 20_000


def test_a_sample_has_documents_of_every_source_spread_over_it():
    names = ["b"] * 100 + ["a"] + ["b"] * 100
    chosen = sample_of_sources(names, [])
    assert 100 in chosen and len(chosen) == 17
    assert chosen[0] < 20 and chosen[-1] > 180
    assert [p.tolist() for p in indices_by_name(["b", "a", "b"]).values()] == [[0, 2], [1]]
