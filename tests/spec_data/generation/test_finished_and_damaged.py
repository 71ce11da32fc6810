"""A finished dataset that has lost something since is not "complete already"."""

import os
import shutil

import pytest

from spec_data.shards.errors import DatasetError, MissingError, SpecDataError
from tests.spec_data.runs import digests, run


def truncate(file):
    os.truncate(file, file.stat().st_size // 2)


DAMAGE = {
    "missing": (lambda out: sorted(out.glob("shards/*"))[1].unlink(), MissingError),
    "truncated": (lambda out: truncate(sorted(out.glob("shards/*"))[0]), DatasetError),
    "index": (lambda out: truncate(out / "index.arrow"), DatasetError),
    "no-index": (lambda out: (out / "index.arrow").unlink(), SpecDataError),
}


@pytest.fixture(scope="module")
def data(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("data") / "data"
    run(*source, out)
    return out


def test_generate_refuses_a_finished_dataset_that_is_damaged(source, data, tmp_path, caplog):
    caplog.set_level("INFO")
    assert run(*source, data) is not None
    assert "is complete already: nothing to do" in caplog.text
    for damage, (break_it, error) in DAMAGE.items():
        out = shutil.copytree(data, tmp_path / damage)
        break_it(out)
        before = digests(out)
        with pytest.raises(error, match="was finished before, and is damaged now"):
            run(*source, out)
        assert digests(out) == before
