"""Several processes write one --out at once: one is first, and the others say so in words."""

import collections
from pathlib import Path

import pytest

from spec_data.cli import main as spec_data
from spec_train.cli import main as spec_train
from tests.factory import tiny_dataset
from tests.faults.tools import report, trials
from tests.forked import Forked
from tests.spec_train.training.tools import run, small_run


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    config = small_run(tiny_dataset(folder / "data", n_docs=40), folder / "run")
    run(type(config)(**config.given_values() | {"steps": 1, "eval_every": 1}))
    return folder


RACES = {
    "export": "export --draft {run} --format vllm --out {out}",
    "select": "select {data} {out} --where length>3",
    "copy": "copy {data} {out}",
    "report": "report {run} --out {out}",
    "fit": "fit eagle3 --data {data} --out {out} --preset smoke --steps 1 --seq-len 48 --device cpu"
    " --validation 0.2 --draft-vocab-size 40",
}


@pytest.mark.parametrize("name", RACES)
def test_races_for_one_out(place: Path, tmp_path: Path, name: str) -> None:
    outcomes: collections.Counter[str] = collections.Counter()
    main = spec_data if name in ("select", "copy") else spec_train
    sizes = set()
    for trial, _ in trials(f"races of {name}", 1):
        out = tmp_path / f"out{trial}"
        words = RACES[name].format(run=place / "run", data=place / "data", out=out).split()
        racing = [Forked(lambda: main(words)) for _ in range(3)]  # noqa: B023
        codes = []
        for one in racing:
            output, error = one.communicate()
            codes.append(one.returncode)
            for raw in ("Traceback", "[Errno", "--debug", "os error"):
                assert raw not in output + error, output + error
            outcomes["won" if one.returncode == 0 else "refused in words"] += 1
        assert 0 in codes
        files = [out] if out.is_file() else sorted(p for p in out.rglob("*") if p.is_file())
        sizes.add(tuple((p.name, p.stat().st_size) for p in files if p.suffix == ".safetensors"))
        assert files and not list(tmp_path.rglob(".*.tmp"))
    assert len(sizes) == 1, "a directory is not complete"
    report(f"races of {name}", outcomes)
