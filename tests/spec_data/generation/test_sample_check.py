"""The sample of the corpus that is measured before the first shard, and the sums per source."""

from msgspec import structs

from spec_data.generation.sample_check import sample_of_sources
from spec_data.shards.likelihood import (
    Agreement,
    AgreementTable,
    DocumentFigures,
    places_by_name,
    summarise,
)
from spec_data.shards.likelihood_text import agreement_rows, suspicions
from spec_data.shards.schema import Manifest
from tests.factory import tiny_dataset


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
    assert [p.tolist() for p in places_by_name(["b", "a", "b"]).values()] == [[0, 2], [1]]


def test_many_sources_are_not_all_listed(tmp_path):
    one = Agreement(
        documents=1,
        tokens=100,
        first_choice=50,
        nll=1.0,
        nll_error=0.01,
        own_nll=1.5,
        excess_error=0.01,
        own_share=0.6,
    )
    sources = {
        f"part-{k}.txt": structs.replace(one, tokens=100 + k, first_choice=50 + k // 2)
        for k in range(500)
    }
    measured = AgreementTable(total=one, sources=sources)
    rows = list(agreement_rows(measured))
    assert len(rows) == 22 and rows[1][0] == "part-480.txt"
    assert rows[-1][0] == "all sources, 480 more of them"
    manifest = Manifest.read(tiny_dataset(tmp_path / "data", 2) / "manifest.json")
    lines = suspicions(manifest.changed(agreement=measured))
    assert len(lines) == 21 and lines[-1] == "and 480 more such lines"
