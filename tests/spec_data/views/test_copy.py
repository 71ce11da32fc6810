"""`copy` and `recode`: kills, disks, and states that are encoded anew against plain Python."""

import shutil

import pytest
import torch

import spec_data
from spec_data.shards.codecs import decode, encode_tensors
from spec_data.shards.errors import ConfigError, DatasetError, RunError
from spec_data.shards.files import MANIFEST
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.resumable import ResumableDirectory, process_lock
from spec_data.views import copy as copying
from tests.spec_data.runs import digests
from tests.spec_data.views.view_tools import (
    assert_same_documents,
    assert_verified,
    documents_of,
    killed_after,
)


@pytest.fixture
def view(data, tmp_path):
    spec_data.select(data, tmp_path / "view", where="length < 35", mask="roles=user")
    return tmp_path / "view"


def test_a_killed_copy_goes_on_to_the_same_bytes(view, tmp_path, monkeypatch):
    spec_data.copy(view, tmp_path / "whole")
    expected = digests(tmp_path / "whole")
    spec_data.select(view, tmp_path / "other", sample="3")
    for step, allowed in [("write_shard", 0), ("write_shard", 1), ("save", 1), ("seal", 0)]:
        out = tmp_path / f"{step}-{allowed}"
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            owner = ResumableDirectory if step == "save" else copying
            patch.setattr(owner, step, killed_after(getattr(owner, step), allowed))
            spec_data.copy(view, out)
        assert not (out / MANIFEST).exists()
        (out / ".unit-00000.arrow.abc012345678.tmp").write_bytes(b"half")
        if (out / ".view/begun.json").exists():
            with pytest.raises(ConfigError, match="begun with other settings"):
                spec_data.copy(tmp_path / "other", out)
        spec_data.copy(view, out)
        assert digests(out) == expected, step
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ResumableDirectory, "finish", killed_after(ResumableDirectory.finish, 0))
        spec_data.copy(view, tmp_path / "late")
    spec_data.copy(view, tmp_path / "late")
    assert digests(tmp_path / "late") == expected
    with pytest.raises(ConfigError, match="holds another dataset"):
        spec_data.copy(tmp_path / "other", tmp_path / "whole")
    shutil.rmtree(tmp_path / "whole/shards")
    with pytest.raises(Exception, match="was finished before, and is damaged now"):
        spec_data.copy(view, tmp_path / "whole")


def test_a_copy_needs_room_and_the_directory_for_itself(view, tmp_path, monkeypatch):
    needed = spec_data.copy(view, tmp_path / "c", dry_run=True).bytes
    assert needed > 0 and not (tmp_path / "c").exists()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(copying.shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    with pytest.raises(RunError, match=r"bytes are still to be written"):
        spec_data.copy(view, tmp_path / "c")
    monkeypatch.setattr(copying.shutil, "disk_usage", lambda _: usage._replace(free=needed))
    with (
        process_lock(tmp_path / "c/.view/lock", "busy"),
        pytest.raises(RunError, match="another process"),
    ):
        spec_data.copy(view, tmp_path / "c")
    spec_data.copy(view, tmp_path / "c")
    assert needed <= spec_data.open_dataset(tmp_path / "c").manifest.totals.bytes


def test_datasets_opens_a_copy(view, tmp_path):
    datasets = pytest.importorskip("datasets")
    spec_data.copy(view, tmp_path / "c")
    found = datasets.load_from_disk(str(tmp_path / "c"))
    assert found["doc_id"] == HiddenStatesDataset(view).doc_ids


# -- recode ---------------------------------------------------------------------------------------


def coded(dataset: HiddenStatesDataset, name: str, values: torch.Tensor) -> torch.Tensor:
    """States as a reader returns them after encoding: the codec's own words, row by row."""
    tables, rows = dataset.tables[name], []
    for row in values:
        codes, away = encode_tensors(row[None], tables)
        rows.append(row if bool(away) else decode(codes, tables)[0])
    return torch.stack(rows) if rows else values


@pytest.fixture(scope="module")
def small(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("recode") / "small"
    spec_data.recode(data, out, codec="default,final=fine")
    return out


def test_recoded_states_are_those_of_the_codec(data, small, tmp_path):
    dataset = HiddenStatesDataset(small)
    expected = [
        d | {n: coded(dataset, n, v) for n, v in d.items() if n.startswith("hidden")}
        for d in documents_of(data)
    ]
    assert_same_documents(small, expected)
    assert_verified(small)
    states = {n: torch.cat([d[n] for d in documents_of(data)]).float() for n in dataset.tables}
    own = {n: torch.cat([d[n] for d in expected]).float() for n in dataset.tables}
    for name, values in states.items():
        error = (own[name] - values).square().mean(0) / values.var(0)
        declared = next(c for c in dataset.manifest.columns if c.name == name)
        assert declared.error.mse_median == pytest.approx(float(error.median()), rel=0.5)
        assert not declared.exact
    assert dataset.manifest.columns[5].error.kl > 0
    planned = spec_data.recode(data, tmp_path / "v", "default,final=fine", dry_run=True)
    made = spec_data.recode(data, tmp_path / "v", "default,final=fine")
    assert digests(tmp_path / "v") == digests(small)
    bf16 = HiddenStatesDataset(data).manifest.totals.bytes
    assert made.bytes < bf16 and planned.bytes < bf16


def test_what_would_lose_twice_or_look_exact_is_refused(small, tmp_path):
    for codec in ("bf16", "small", "aux=fine"):
        with pytest.raises(DatasetError, match="encoded before"):
            spec_data.recode(small, tmp_path / "v", codec)
    with pytest.raises(ConfigError, match="nothing would change"):
        spec_data.recode(small, tmp_path / "v", "aux=default")


def test_documents_of_other_tables_are_not_recoded_together(data, other, tmp_path):
    """Their codes would be copied beside the tables of the first document."""
    for source, name in ((data, "a"), (other, "b")):
        spec_data.recode(source, tmp_path / name, "aux=default")
    spec_data.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "view")
    for codec in ("final=default", "aux=default,final=default"):
        with pytest.raises(DatasetError, match="L2: the documents come from datasets that"):
            spec_data.recode(tmp_path / "view", tmp_path / "small", codec)


def test_a_view_of_parts_is_recoded_as_a_dataset(data, captured, tmp_path):
    spec_data.merge([captured / "sparse", captured / "dense"], tmp_path / "view")
    spec_data.copy(tmp_path / "view", tmp_path / "copied")
    for name in ("view", "copied"):
        spec_data.recode(tmp_path / name, tmp_path / f"{name}8", "fine")
        assert_verified(tmp_path / f"{name}8")
    assert_same_documents(tmp_path / "view8", documents_of(tmp_path / "copied8"))
