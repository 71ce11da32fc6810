"""The table of engines: every row can be read and filled in, and a new row needs no code."""

import re
from dataclasses import replace

import pytest
import torch

from spec_data.models import engines as table
from spec_data.models.engines import engines
from spec_data.shards.errors import DraftError
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.drafts import DRAFTS
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.kind_files import every_kind
from spec_train.formats.names import READ
from spec_train.formats.preflight import (
    REFUSE,
    START,
    UNREAD,
    WARN,
    Subject,
    draft_facts,
    holds,
    preflight,
)
from spec_train.formats.read import refuse_other_drafts
from spec_train.formats.target_facts import TargetFacts
from spec_train.losses.head import TargetHead
from tests.spec_train.drafts import any_draft
from tests.spec_train.drafts.any_draft import build_draft

dataset, head = any_draft.dataset, any_draft.head
EAGLE1_NORMS = {"use_input_layernorm_in_first_layer", "use_last_layernorm"}


@pytest.fixture(scope="module")
def subjects(dataset: HiddenStatesDataset, head: TargetHead) -> dict[str, Subject]:
    """A draft of each kind."""
    return {
        kind: Subject(
            build_draft(kind, dataset, head).files(torch.float32, "x"), TargetFacts(), "vllm"
        )
        for kind in DRAFTS
    }


def test_every_row_is_about_known_things(subjects):
    known = set(READ) | EAGLE1_NORMS | {"engine"}
    for row in engines().facts.rows:
        assert row.verdict in (REFUSE, WARN, UNREAD, START) and row.source, row
        assert {*row.engines.split()} <= {"*", *engines().engine}, row
        assert {*row.drafts.split()} <= {"*", *DRAFTS}, row
        kinds = [kind for kind in DRAFTS if row.drafts == "*" or kind in row.drafts.split()]
        for kind in kinds:
            facts = draft_facts(subjects[kind]) | {"engine": "vllm", "draft": "DIR"}
            for term in re.split(r" and | or ", row.condition) if row.condition else ():
                assert term.removeprefix("not ").split()[0] in known | facts.keys(), row
            row.text.format_map({"sliding_window": 0} | facts)
    for start in engines().start:
        assert start.engine in engines().engine and {*start.drafts.split()} <= {*DRAFTS}


@pytest.mark.parametrize(
    ("condition", "value"),
    [
        ("", True),
        ("a", True),
        ("not a", False),
        ("missing", False),
        ("a and n > 2", True),
        ("a and n < 2", False),
        ("missing or n == 3", True),
        ("not n in 1,2", True),
        ("word in x,silu", True),
        ("word != silu", False),
        ("n != m", True),
        ("missing and n > none", False),
    ],
)
def test_conditions(condition, value):
    facts = {"a": True, "n": 3, "m": 4, "word": "silu", "none": None}
    assert holds(condition, facts) is value


BEFORE, AFTER = ["back before its norm"], ["back after its norm"]


@pytest.mark.parametrize(
    ("target", "norm_output", "words", "of_others"),
    [
        ("glm4_moe", True, BEFORE, []),
        ("glm4_moe_lite", True, BEFORE, []),
        ("glm4_moe", False, [], AFTER),
        ("deepseek_v3", True, [], []),
        ("deepseek_v3", False, AFTER, AFTER),
    ],
)
def test_engines_feed_some_mtp_blocks_otherwise_than_they_were_trained(
    subjects, target, norm_output, words, of_others
):
    draft, section = subjects["mtp"].draft, subjects["mtp"].config[SECTION]
    section = section | {"target": section["target"] | {"model_type": target}}
    config = draft.config | {"norm_output": norm_output, SECTION: section}
    subject = Subject(replace(draft, config=config), TargetFacts(), "target")
    for engine, expected in (("vllm", words), ("sglang", of_others), ("llama.cpp", of_others)):
        found = [f.text for f in preflight(subject)[engine] if "feeds" in f.text]
        assert len(found) == len(expected)
        assert all(w in text for w, text in zip(expected, found, strict=True))


def test_engines_that_take_one_mtp_block_are_named_where_the_target_has_more(subjects):
    draft, section = subjects["mtp"].draft, subjects["mtp"].config[SECTION]
    changes = {"model_type": "deepseek_v3", "num_nextn_predict_layers": 2}
    section = section | {"target": section["target"] | changes}
    subject = Subject(
        replace(draft, config=draft.config | {SECTION: section}), TargetFacts(), "target"
    )
    checked = preflight(subject)
    for engine, verdict in (("vllm", WARN), ("sglang", REFUSE), ("llama.cpp", REFUSE)):
        assert [f.level for f in checked[engine] if "has 2 MTP blocks" in f.text] == [verdict]


def test_a_new_engine_needs_only_rows(subjects, tmp_path, monkeypatch):
    text = table.TABLE.read_text(encoding="utf-8")
    new = (
        '[engine.mine]\nrelease = "Mine 1.0"\nread = 2026-01-01\ndrafts = {eagle3 = []}\n'
        'forms = ["vllm"]\nserves = ["vllm"]\n[facts]\nrows = [\n'
        '["mine", "eagle3", "aux_states > 1", "refuse", "{aux_states} states", "mine.py"],\n'
    )
    (tmp_path / "engines.toml").write_text(text.replace("[facts]\nrows = [\n", new))
    monkeypatch.setattr(table, "TABLE", tmp_path / "engines.toml")
    engines.cache_clear()
    try:
        found = {kind: preflight(subject)["mine"] for kind, subject in subjects.items()}
    finally:
        monkeypatch.undo()
        engines.cache_clear()
    assert [f.text for f in found["eagle3"]] == ["3 states"]
    assert [f.text for f in found["dspark"]] == ["does not support dspark drafts"]


OF_VLLM = re.compile(r"(Eagle3|Peagle)\w+ForCausalLM$")
OF_NOBODY = {"ExtractHiddenStatesModel"}  # vLLM's tool that writes hidden states


def test_every_draft_class_of_an_engine_is_read_or_refused_with_a_reason(tmp_path):
    """A new release brings new classes: the script lists them, and this names those without one."""
    listed = {
        name
        for lists in table.target_classes().engines.values()
        for name in lists.get("drafts", "").split()
    }
    assert len(listed) > 80
    read = {name for one in every_kind().values() for name in one.classes}
    for name in sorted(listed - read - OF_NOBODY):
        if name.removeprefix("DFlash") in read:  # vLLM puts it before the name in the file
            continue
        files = DraftFiles({"architectures": [name]}, {}, str(tmp_path))
        if OF_VLLM.match(name) and name not in every_kind()["eagle3"].others:
            continue  # its name for EAGLE-3 with Llama's layers beside some target
        with pytest.raises(DraftError, match="the draft has "):
            refuse_other_drafts(files)
