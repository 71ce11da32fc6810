"""Drafts of a target with several residual streams: fitted, and decoded with the real target."""

from pathlib import Path

import pytest

from spec_train.training.fit import fit
from tests.spec_data.capture.test_residual_streams import saved
from tests.spec_data.runs import generate_with, options, write_corpus
from tests.spec_train import flat
from tests.spec_train.drafts.any_draft import SMALL
from tests.spec_train.evaluation.tools import run_eval


@pytest.mark.long
@pytest.mark.parametrize("draft", ["eagle3", "dspark"])
def test_a_draft_of_streams_is_fitted_and_decodes_losslessly(draft: str, tmp_path: Path) -> None:
    saved("deepseek_v4", tmp_path / "target")
    corpus = write_corpus(tmp_path / "chats.jsonl", 8)
    generate_with(**options(tmp_path / "target", corpus, tmp_path / "data", layers="0,1,2"))
    values = {"steps": 2, "batch_size": 1, "validation": 0, "device": "cpu", **SMALL[draft]}
    values |= {"data": str(tmp_path / "data"), "out": str(tmp_path / draft)}
    assert fit(draft, *flat.split(draft, **values)).finished
    report = run_eval(
        {
            **{"draft": str(tmp_path / draft), "target": str(tmp_path / "target"), "device": "cpu"},
            **{"prompts": str(corpus), "limit": 2, "max_new_tokens": 8},
        }
    )
    assert report["identical"] == report["responses"] == 2
    assert "compressed" in report["stepwise"] and report["speedup"] is None
    assert not any("streams: " in line for line in report["warnings"])
