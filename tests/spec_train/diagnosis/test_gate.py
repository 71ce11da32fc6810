"""`doctor` in the CI of another project: codes, no dataset, JUnit, and the picture."""

import ast
import json
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from scripts.reference import doctor_codes
from spec_data.shards.errors import ConfigError
from spec_train.cli import main
from spec_train.commands.doctor import doctor
from spec_train.diagnosis import capture, drift, examination, trials
from spec_train.diagnosis.checks import CHECKS, FINDING, OK, UNDECIDED, Diagnosis, judged, junit_xml
from spec_train.diagnosis.conventions import KINDS
from tests import api_workspace
from tests.draft_tools import edited
from tests.marks import long_but
from tests.spec_train import fitted
from tests.spec_train.diagnosis.test_conventions import changed, found, planted
from tests.test_docs import anchors

workspace, here, place = api_workspace.workspace, api_workspace.here, fitted.place
DOCS = Path(__file__).parents[3] / "docs"


# --- codes ---


def named_in(module) -> set[str]:
    """The names of checks that a module makes."""
    calls = (
        n for n in ast.walk(ast.parse(Path(module.__file__).read_text())) if type(n) is ast.Call
    )
    made = (c for c in calls if getattr(c.func, "id", "") in ("judged", "undecided"))
    return {c.args[0].value for c in made if isinstance(c.args[0], ast.Constant)}


def test_every_code_is_explained_with_its_anchor():
    rules = {examination.WEIGHTS, examination.MAX_POSITIONS, examination.EMBEDDING}
    made = (
        named_in(examination)
        | named_in(trials)
        | named_in(drift)
        | {*KINDS, *examination._TARGET_CHECKS}
        | rules
    )
    assert {"seal", "data", "trained", "target"} < made <= CHECKS.keys() <= made | {"layer-order"}
    assert doctor_codes() in (DOCS / "doctor.md").read_text(encoding="utf-8"), doctor_codes()
    assert CHECKS.keys() <= anchors(DOCS / "doctor.md")
    for name, code in CHECKS.items():
        assert code.symptom and code.cause, name
        assert code.fix or name in ("ambiguous-keys", "conventions"), name


# --- no dataset ---


@pytest.fixture
def short_answers(monkeypatch):
    """Answers as long as those of the training."""
    monkeypatch.setattr(capture, "_NEW_TOKENS", 20)


def without_data(draft: Path, target: Path, prompts: Path, **options) -> Diagnosis:
    return doctor(draft, target=target, corpus=prompts, documents=24, device="cpu", **options)


def test_prompts_may_have_other_names(sound_dir, chat_dir, prompts, short_answers, tmp_path):
    file = tmp_path / "asked.jsonl"
    rows = [json.loads(line) for line in Path(prompts).read_text().splitlines()]
    file.write_text("".join(json.dumps({"ask_me": row["prompt"]}) + "\n" for row in rows))
    check = without_data(sound_dir("eagle3"), chat_dir, file).named("conventions")
    assert check.state == UNDECIDED
    named = without_data(sound_dir("eagle3"), chat_dir, file, columns="prompt=ask_me")
    assert named.documents > 12
    with pytest.raises(ConfigError, match="write NAME=COLUMN"):
        without_data(sound_dir("eagle3"), chat_dir, file, columns="prompt")
    with pytest.raises(ConfigError, match="--columns names columns of --corpus"):
        doctor(sound_dir("eagle3"), target=chat_dir, columns="prompt=ask_me")


@pytest.mark.parametrize("kind", long_but(["eagle3"], ["eagle3", "mtp"]))
def test_a_sound_draft_has_no_finding_on_answers_of_the_target(
    kind, sound_dir, chat_dir, prompts, short_answers
):
    diagnosis = without_data(sound_dir(kind), chat_dir, prompts)
    assert not diagnosis.findings, str(diagnosis)
    assert diagnosis.named("trained").state == OK and diagnosis.documents > 12
    assert diagnosis.acceptance_length > 1.5
    assert diagnosis.named("data") is None  # nobody gave one


@pytest.fixture
def tuned(chat_dir, tmp_path) -> Path:
    """A copy of the target whose weights have moved."""
    folder = tmp_path / "tuned"
    shutil.copytree(chat_dir, folder)
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    for name, value in weights.items():
        if "layers." in name and value.ndim == 2:
            weights[name] = value + 0.4 * value.std() * torch.randn_like(value)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_drift_is_the_targets_or_the_drafts(
    sound_dir, sound, chat_dir, tuned, prompts, short_answers, tmp_path
):
    """A target that moved, the same target again, and a draft that is wrong with both."""
    copy = tmp_path / "copy"
    shutil.copytree(chat_dir, copy)
    draft = sound_dir("eagle3")
    same = without_data(draft, [chat_dir, copy], prompts)
    assert same.named("drift").state == OK and not same.findings, str(same)
    assert "+0.00" in same.named("drift").text
    moved = without_data(draft, [chat_dir, tuned], prompts)
    check = moved.named("drift")
    assert found(moved) == {"drift"} and check.text.startswith("the target's: "), str(moved)
    assert str(tuned) in check.text and moved.exit_code == 1 and not moved.next_command
    alone = [without_data(draft, place, prompts).acceptance_length for place in (chat_dir, tuned)]
    lengths = f"{alone[1]:.2f} with {tuned}, {alone[0]:.2f} with {chat_dir}"
    assert lengths in check.evidence[0] and alone[1] < alone[0]
    wrong = planted(sound("mtp"), tmp_path, changed(norm_output=False))
    both = without_data(wrong, [chat_dir, tuned], prompts)
    assert found(both) == {"carried-norm", "drift"}
    assert both.named("drift").text.startswith("the draft's: ")
    with pytest.raises(ConfigError, match="several --target are compared on their own answers"):
        doctor(draft, target=[chat_dir, tuned], documents=0, device="cpu")


def test_the_difference_of_two_targets_is_that_of_their_documents():
    rng = np.random.default_rng(0)
    slots = rng.integers(5, 30, (2, 40))
    tokens = slots + rng.binomial(slots, [[0.6], [0.3]])
    one, other = (
        Diagnosis(draft="d", kind="eagle3", checks=(), per_document=tuple(zip(a, b, strict=True)))
        for a, b in zip(slots.tolist(), tokens.tolist(), strict=True)
    )
    difference, (low, high) = drift.length_difference(one, other)
    lengths = [sum(b.tolist()) / sum(a.tolist()) for a, b in zip(slots, tokens, strict=True)]
    assert difference == pytest.approx(lengths[1] - lengths[0])
    assert low < difference < high < 0
    nothing = Diagnosis(draft="d", kind="eagle3", checks=())
    assert drift.drift(nothing, one, "a", "b").state == UNDECIDED


def test_a_planted_convention_is_found_on_answers_of_the_target(
    sound, chat_dir, prompts, short_answers, tmp_path
):
    draft = planted(sound("mtp"), tmp_path, changed(norm_output=False))
    diagnosis = without_data(draft, chat_dir, prompts)
    assert found(diagnosis) == {"carried-norm"}, str(diagnosis)
    assert "norm_output = true" in diagnosis.named("carried-norm").text


def test_what_cannot_be_captured_is_said(sound_dir, target_dir, place, prompts):
    """A target without a tokenizer answers nothing; one of other sizes is not even asked."""
    draft = sound_dir("eagle3")
    check = without_data(draft, target_dir, prompts).named("conventions")
    assert check.state == UNDECIDED and "give --data: answers of the target" in check.text
    other = without_data(draft, place / "target", prompts)
    assert "target" in found(other) and "vocabulary" in other.named("target").text
    files = doctor(draft, target=target_dir, documents=0, device="cpu").named("conventions")
    assert files.state == UNDECIDED and "--documents" in files.text
    for wrong in ({"documents": 11}, {"corpus": prompts}, {"junit": "/no/such/folder/x.xml"}):
        with pytest.raises(ConfigError, match=f"--{next(iter(wrong))}"):
            doctor(draft, device="cpu", **wrong)


def test_built_in_prompts_are_of_every_sort():
    prompts = capture.built_in_prompts()
    assert len(prompts) == len(set(prompts)) == 64
    for begin in (0, 8, 56):
        beginnings = {tuple(text.split()[:3]) for text in prompts[begin : begin + 8]}
        assert len(beginnings) == 8


# --- CI ---


def test_fail_on_says_what_fails(here):
    """Files alone: nothing is tried, which is no finding."""
    files = ["doctor", "--draft", "run", "--documents", "0"]
    codes = {name: main([*files, "--fail-on", name]) for name in ("finding", "untried", "never")}
    assert codes == {"finding": 0, "untried": 1, "never": 0}
    (here / "bad").mkdir()
    for file in (here / "run" / "best").iterdir():
        (here / "bad" / file.name).write_bytes(file.read_bytes())
    edited(here / "bad", lambda raw: raw.update(rms_norm_eps=0.5))
    files[2] = "bad"
    assert [main([*files, "--fail-on", name]) for name in codes] == [1, 1, 0]


def test_the_lines_for_ci_run_as_they_are(here):
    """Here with the prompts that are built in, and a draft of four steps."""
    page = (DOCS / "doctor.md").read_text(encoding="utf-8")
    block = re.search(r"^```yaml\n(.*?)^```", page, re.M | re.S)[1]
    assert len(block.splitlines()) <= 10
    job = yaml.safe_load(block)["draft"]
    (line,) = (words.split() for words in job["script"] if words.startswith("spec-train"))
    (here / "draft").symlink_to(here / "run")
    code = main([*line[1:], "--device", "cpu", "--documents", "16"])
    suite = ElementTree.parse(here / job["artifacts"]["reports"]["junit"]).getroot()[0]
    report = json.loads((here / job["artifacts"]["paths"][0]).read_text())
    assert code == int(suite.get("failures") != "0") == int(bool(report["findings"]))
    assert [case.get("name") for case in suite] == [check["name"] for check in report["checks"]]
    assert report["documents"] >= 12 and report["tried"]
    assert all(check["page"] == f"docs/doctor.md#{check['name']}" for check in report["checks"])


def test_junit_has_a_case_per_check():
    evidence = ("length 1.2 < 1.9", "odd \x00 \ud800 text")
    checks = (
        judged("rope", ["theta is 1 & not 2"], *evidence),
        judged("seal", [], sound="as it was sealed"),
        examination.undecided("target", "give --target"),
    )
    xml = junit_xml(Diagnosis(draft="my \x1b draft", kind="eagle3", checks=checks))
    suite = ElementTree.fromstring(xml)[0]
    counts = {key: suite.get(key) for key in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "3", "failures": "1", "errors": "0", "skipped": "1"}
    failed, sound, skipped = suite
    assert failed[0].tag == "failure" and failed[0].get("type") == failed.get("name") == "rope"
    assert failed[0].get("message") == "theta is 1 & not 2"
    for text in ("length 1.2 < 1.9", "odd ? ? text", CHECKS["rope"].fix, "docs/doctor.md#rope"):
        assert text in failed[0].text
    assert len(sound) == 0 and skipped[0].tag == "skipped"
    assert failed.get("classname") == "my ? draft"


# --- the picture ---


def test_every_convention_has_its_length_and_the_declared_one_is_marked(sound, data, tmp_path):
    draft = planted(sound("eagle3"), tmp_path, changed(layers=(2, 4)))
    diagnosis = doctor(draft, data=data, documents=13, device="cpu")
    rows = diagnosis.conventions()
    assert len(rows) == len(diagnosis.tried) + 1
    lengths = [length for length, _, _ in rows]
    assert rows[0][0] == diagnosis.acceptance_length and rows[0][2] == "as declared"
    assert lengths[1:] == sorted(lengths[1:], reverse=True)
    assert "layer-ids: layers 1, 3" in rows[1][2] and lengths[1] > lengths[0]
    assert [len(bar) for _, bar, _ in rows[1:]] == sorted((len(b) for _, b, _ in rows[1:]))[::-1]
    printed, everything = str(diagnosis), diagnosis.details()
    assert "acceptance length by convention" in printed and " more (--verbose)" in printed
    assert everything.count("█ ") == sum(bool(bar) for _, bar, _ in rows)
    html = diagnosis._repr_html_()
    assert re.search(
        r'class="best">\s*<td[^>]*>[\d.]+</td>\s*<td[^>]*>█+</td>\s*<td[^>]*>as d', html
    )
    assert FINDING.upper() in html and all(one.text in html for one in diagnosis.tried[:3])
