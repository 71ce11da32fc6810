"""`recode` against plain Python: values, errors, bounds, refusals."""

import dataclasses

import numpy as np
import pytest
import torch

from spec_data.options.view_options import MergeConfig, RecodeConfig, SelectConfig
from spec_data.shards.errors import ConfigError, DatasetError, RunError
from spec_data.shards.lossy import LOSSY, Bound
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import Manifest
from spec_data.views.joining import plan_merge
from spec_data.views.recoding import plan_recode
from spec_data.views.select_view import plan_select
from spec_data.views.write_view import view_sizes, write_view
from tests.spec_data.runs import digests
from tests.spec_data.views.view_tools import (
    assert_same_documents,
    assert_verified,
    documents_of,
)


def recode(data, out, **options) -> Manifest:
    return write_view(out, plan_recode(RecodeConfig(data=str(data), out=str(out), **options)))


def coded(dataset: HiddenStatesDataset, name: str, values: torch.Tensor) -> torch.Tensor:
    """States as a reader returns them after encoding: the codec's own words, row by row."""
    tables = dataset.tables[name]
    codec = next(c for c in dataset.manifest.columns if c.name == name).lossy
    rows = []
    for row in values:
        made = codec.encode(row[None], tables)
        if len(made.escape_index):
            rows.append(row)
            continue
        scale = torch.from_numpy(made.scale.view(np.int16).copy()).view(torch.bfloat16)
        codes = torch.from_numpy(made.codes.copy())
        rows.append(codec.decode(codes, scale, tables)[0])
    return torch.stack(rows) if rows else values


@pytest.fixture(scope="module")
def small(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("recode") / "small"
    recode(data, out, codec="aux=lm4c,final=int8c")
    return out


def test_recoded_states_are_those_of_the_codec(data, small):
    dataset = HiddenStatesDataset(small)
    expected = [
        d | {n: coded(dataset, n, v) for n, v in d.items() if n.startswith("hidden")}
        for d in documents_of(data)
    ]
    assert_same_documents(small, expected)
    assert_verified(small)
    states = {n: torch.cat([d[n] for d in documents_of(data)]).float() for n in dataset.tables}
    own = {n: torch.cat([d[n] for d in expected]).float() for n in dataset.tables}
    for entry in dataset.manifest.columns:
        name = entry.name
        if name in states:
            error = (own[name] - states[name]).square().mean(0) / states[name].var(0)
            assert entry.error.mse_median == pytest.approx(float(error.median()), rel=0.5)
            assert not entry.exact
    assert dataset.manifest.columns[5].error.kl > 0


def test_bytes_are_reproducible_and_counted_before(data, small, tmp_path):
    config = RecodeConfig(
        data=str(data), out=str(tmp_path / "v"), codec="aux=lm4c,final=int8c", dry_run=True
    )
    sizes = view_sizes(plan_recode(config))
    manifest = recode(data, tmp_path / "v", codec="aux=lm4c,final=int8c")
    assert digests(tmp_path / "v") == digests(small)
    escaped = sum(
        len(shard.values(c.escape_parts[0], shard.place(row)))
        for number in range(len(manifest.shards))
        for shard in [HiddenStatesDataset(small).shard(number)]
        for row in range(shard.record.rows)
        for c in manifest.columns
        if c.lossy
    )
    extra = manifest.totals.bytes - sizes.bytes
    assert 0 <= extra <= escaped * (2 * 32 + 4) + 64 * len(manifest.shards)
    assert sizes.bytes < HiddenStatesDataset(data).manifest.totals.bytes


def test_what_would_lose_twice_or_look_exact_is_refused(data, small, tmp_path, monkeypatch):
    for codec in ("bf16", "lm6c", "aux=int8c"):
        with pytest.raises(DatasetError, match="recode the bf16 dataset"):
            recode(small, tmp_path / "v", codec=codec)
    with pytest.raises(ConfigError, match="nothing would change"):
        recode(small, tmp_path / "v", codec="aux=lm4c")
    strict = dataclasses.replace(LOSSY["lm4c"], bound=Bound(1e-9, 1e-9, 1e-9))
    monkeypatch.setitem(LOSSY, "lm4c", strict)
    with pytest.raises(RunError, match="above its bound"):
        recode(data, tmp_path / "v", codec="lm4c")
    assert not (tmp_path / "v").exists()


def test_parts_of_one_recoded_dataset_can_be_merged_and_other_tables_cannot(data, tmp_path):
    whole, a, b = tmp_path / "whole", tmp_path / "a8", tmp_path / "b8"
    recode(data, whole, codec="int8c")
    for source, out, options in (
        (whole, a, {"max_length": 20}),
        (whole, b, {"min_length": 21}),
        (data, tmp_path / "b", {"min_length": 21}),
    ):
        config = SelectConfig(data=str(source), out=str(out), **options)
        write_view(out, plan_select(config))
    recode(tmp_path / "b", tmp_path / "own", codec="int8c")

    def merge(*paths):
        config = MergeConfig(data=tuple(map(str, paths)), out=str(tmp_path / "v"))
        return write_view(tmp_path / "v", plan_merge(config))

    with pytest.raises(DatasetError, match=r"decoded by other tables.*with --codec bf16, merge"):
        merge(a, tmp_path / "own")
    with pytest.raises(DatasetError, match="has the codec bf16"):
        merge(a, tmp_path / "b")
    merge(a, b)
    assert_same_documents(tmp_path / "v", documents_of(a) + documents_of(b))
    assert_verified(tmp_path / "v")
