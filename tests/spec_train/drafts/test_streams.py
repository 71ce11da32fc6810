"""Drafts of a target with several residual streams: fitted, and decoded with the real target."""

from pathlib import Path

import pytest
import torch

import spec_train
from spec_data.shards.errors import TargetError
from spec_train.commands.doctor import doctor
from spec_train.diagnosis.checks import OK
from spec_train.training.fit import fit
from tests.current_families import CONTRACTED
from tests.spec_data.capture.test_residual_streams import saved
from tests.spec_data.runs import generate_with, options, write_corpus
from tests.spec_train import flat
from tests.spec_train.drafts.any_draft import SMALL
from tests.spec_train.evaluation.tools import run_eval


@pytest.mark.long
@pytest.mark.parametrize("draft", ["eagle3", "dspark"])
@pytest.mark.parametrize("family", CONTRACTED)
def test_a_draft_of_streams_is_fitted_decodes_losslessly_and_is_examined(
    family: str, draft: str, tmp_path: Path
) -> None:
    """And `doctor` names one that was trained on another contraction."""
    saved(family, tmp_path / "target")
    corpus = write_corpus(tmp_path / "chats.jsonl", 8)
    generate_with(**options(tmp_path / "target", corpus, tmp_path / "data", layers="0,1,2"))
    values = {"steps": 2, "batch_size": 1, "validation": 0, "device": "cpu", **SMALL[draft]}
    values |= {"data": str(tmp_path / "data"), "out": str(tmp_path / draft)}
    assert fit(draft, *flat.split(draft, **values)).finished
    asked = {"draft": str(tmp_path / draft), "target": str(tmp_path / "target"), "device": "cpu"}
    asked |= {"prompts": str(corpus), "limit": 2, "max_new_tokens": 8}
    if family == "deepseek_v4":
        report = run_eval(asked)
        assert report["identical"] == report["responses"] == 2
        assert "compressed" in report["stepwise"] and report["speedup"] is None
        assert not any("streams: " in line for line in report["warnings"])
    else:  # transformers decodes other states of this family than those of one forward
        with pytest.raises(TargetError, match="other logits than in one forward"):
            run_eval(asked)
    given = {"target": tmp_path / "target", "documents": 0, "device": "cpu"}
    assert doctor(tmp_path / draft, **given).named("streams").state == OK
    other = spec_train.load_draft(tmp_path / draft)
    other.update_config(origin={**other.config.origin, "streams": "first of 4"})
    other.save_pretrained(tmp_path / "planted", torch.float32)
    named = doctor(tmp_path / "planted", **given)
    assert [check.name for check in named.findings] == ["streams"], str(named)
    assert "first of 4" in named.named("streams").text
