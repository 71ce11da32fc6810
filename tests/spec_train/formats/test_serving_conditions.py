"""An export says how its draft is served as it was trained: kwargs, system message, sampling."""

import json
import shlex
from pathlib import Path

import pytest

import spec_train
from spec_train.formats.preflight import NOTE, WARN
from tests.spec_train.drafts import any_draft
from tests.spec_train.formats import own_draft

dataset, head, target = any_draft.dataset, any_draft.head, own_draft.target

THINKING, SILENT = '{"enable_thinking": true}', '{"enable_thinking": false}'
SYSTEM = "You are a pirate.\nAnswer in rhymes, and never say why; " + "be brief, " * 20


@pytest.fixture(scope="module")
def drafts(dataset, head, tmp_path_factory):
    """A function that writes an EAGLE-3 draft (or another) whose origin has these facts."""
    folder = tmp_path_factory.mktemp("conditions")
    made = {
        "eagle3": any_draft.build_draft("eagle3", dataset, head, ttt_steps=3),
        "dflash": any_draft.build_draft(
            "dflash", dataset, head, num_layers=1, block_size=4, mask_token_id=5
        ),
    }

    def write(name: str, facts: dict, kind: str = "eagle3") -> Path:
        draft = made[kind]
        draft.update_config(origin={**draft.config.origin, **facts})
        draft.save_pretrained(folder / name)
        return folder / name

    return write


def used(silent: int, thinking: int) -> dict:
    counts = {SILENT: silent, THINKING: thinking}
    counts = {value: n for value, n in counts.items() if n}
    return {"template_kwargs_used": counts, "system_messages": {"": silent + thinking}}


def option(serving, flag: str) -> str | None:
    words = shlex.split(serving.lines[-1])
    return words[words.index(flag) + 1] if flag in words else None


def texts(found, level: str) -> str:
    return "\n".join(f.text for f in found.findings["spec-train"] if f.level == level)


@pytest.mark.parametrize(
    ("silent", "thinking", "served", "warned"),
    [
        (100, 0, SILENT, False),
        (98, 2, SILENT, False),
        (55, 45, SILENT, True),
        (45, 55, THINKING, True),
        (0, 100, THINKING, False),
    ],
)
def test_kwargs_are_in_every_engines_line_and_in_the_card(
    drafts, target, tmp_path, silent, thinking, served, warned
):
    draft = drafts(f"mixed-{silent}", used(silent, thinking))
    found = spec_train.export(draft=draft, out=tmp_path / "out", format="vllm", target=str(target))
    flags = {"vLLM": "--default-chat-template-kwargs", "SGLang": "--default-chat-template-kwargs"}
    flags["llama.cpp"] = "--chat-template-kwargs"
    named = {one.engine.split()[0]: one for one in found.servings}
    assert named.keys() >= flags.keys()
    for engine, flag in flags.items():
        assert option(named[engine], flag) == served
    assert ("several chat template kwargs" in texts(found, WARN)) == warned
    card = (tmp_path / "out" / "README.md").read_text()
    assert "chat template kwargs" in card and shlex.quote(served) in card
    assert ("2 %" in card) == (thinking == 2) and ("55 %" in card) == warned
    assert shlex.quote(served) in shlex.join(found.next_command)


def test_documents_without_kwargs_need_no_option(drafts, target):
    draft = drafts("plain", {"template_kwargs_used": {"{}": 9}, "system_messages": {"": 9}})
    found = spec_train.export(draft=draft, format="vllm", target=str(target))
    assert not any("chat-template-kwargs" in line for one in found.servings for line in one.lines)
    assert "system message" not in found.card


def test_transformers_has_the_kwargs_in_words(drafts, target):
    draft = drafts("words", used(9, 0), "dflash")
    found = spec_train.export(draft=draft, format="transformers", target=str(target))
    (serving,) = found.servings
    assert "apply_chat_template(messages, ..., enable_thinking=False)" in serving.note


def test_a_system_message_of_most_documents_is_named_and_whole_in_the_card(drafts, target):
    most = {"system_messages": {SYSTEM: 9, "": 1}, "template_kwargs_used": {"{}": 10}}
    found = spec_train.export(draft=drafts("pirate", most), format="vllm", target=str(target))
    assert "90 % of the training documents begin with the system message" in texts(found, WARN)
    assert SYSTEM in found.card
    few = most | {"system_messages": {"": 9, SYSTEM: 1}}
    found = spec_train.export(draft=drafts("few", few), format="vllm", target=str(target))
    assert "system message" not in texts(found, WARN) and SYSTEM not in found.card
    own = most | {"default_system": SYSTEM.strip()}  # the template adds it
    found = spec_train.export(draft=drafts("own", own), format="vllm", target=str(target))
    assert "system message" not in texts(found, WARN)


HUB, COMMIT = "org/target", "0123abcd" * 5


def test_the_commit_of_the_hub_and_its_code_are_in_every_line(drafts, target):
    facts = {"target_name": HUB, "target_revision": COMMIT, "code_hash": "0" * 64}
    draft = drafts("hub", facts)
    found = spec_train.export(draft=draft, format="vllm", target=HUB)
    named = {one.engine.split()[0]: one for one in found.servings}
    for engine in ("vLLM", "SGLang"):
        assert option(named[engine], "--revision") == COMMIT
        assert "--trust-remote-code" in shlex.split(named[engine].lines[-1])
    assert f"in the local Hub cache as of commit {COMMIT}" in texts(found, NOTE)
    assert f"--revision {COMMIT}" in found.card
    elsewhere = spec_train.export(draft=draft, format="vllm", target=str(target))
    assert "--revision" not in elsewhere.card  # the files of a directory are what they are
    assert "--trust-remote-code" in elsewhere.card
    flash = drafts("hub-flash", facts, "dflash")
    (serving,) = spec_train.export(draft=flash, format="transformers", target=HUB).servings
    loads = [line for line in serving.lines if f"from_pretrained({HUB!r}, " in line]
    assert len(loads) == 2
    assert all(f"revision={COMMIT!r}, trust_remote_code=True)" in line for line in loads)


def test_the_target_in_the_cache_is_that_of_the_captured_commit(drafts, target, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "spec_train.evaluation.exporting.cached_model",
        lambda name, revision=None: asked.append((name, revision)) or target,
    )
    facts = {"target_name": HUB, "target_revision": COMMIT}
    spec_train.export(draft=drafts("hub", facts), format="vllm", target=HUB)
    spec_train.export(draft=drafts("hub", facts), format="vllm", target="org/finetune")
    assert asked == [(HUB, COMMIT), ("org/finetune", None)]


@pytest.mark.parametrize("factors", ["short", "long"])
def test_the_length_of_the_short_factors_is_in_the_line(drafts, factors):
    facts = {"rope_factors": factors, "rope.original_max_position_embeddings": 4096}
    found = spec_train.export(draft=drafts(factors, facts), format="vllm")
    named = {one.engine.split()[0]: one for one in found.servings}
    length = "4096" if factors == "short" else None
    assert option(named["vLLM"], "--max-model-len") == length
    assert option(named["SGLang"], "--context-length") == length


@pytest.mark.parametrize(("tools", "said"), [(9, True), (5, True), (2, False), (0, False)])
def test_lists_of_tools_of_most_documents_are_named(drafts, tools, said):
    counts = {"tools": tools, "": 10 - tools}
    found = spec_train.export(draft=drafts("tools", {"tools_used": counts}), format="vllm")
    line = f"{tools * 10} % of the training documents have a list of tools"
    assert (line in texts(found, NOTE)) == said


@pytest.mark.parametrize(
    ("config", "level"),
    [
        ({"repetition_penalty": 1.05, "top_k": 20, "temperature": 0.7}, WARN),
        ({"top_p": 0.8}, NOTE),
        ({"temperature": 1.0, "eos_token_id": 1}, None),
        (None, None),
    ],
)
def test_the_sampling_that_engines_apply_is_named(drafts, target, tmp_path, config, level):
    draft = drafts("sampling", {"generation_defaults": {}})
    file = target / "generation_config.json"
    before = file.read_text() if file.is_file() else None
    file.unlink(missing_ok=True)
    try:
        if config is not None:
            file.write_text(json.dumps(config))
        found = spec_train.export(draft=draft, format="vllm", target=str(target))
    finally:
        file.unlink(missing_ok=True)
        if before is not None:
            file.write_text(before)
    said = {one: "generation_config.json sets" in texts(found, one) for one in (WARN, NOTE)}
    assert said == {WARN: level == WARN, NOTE: level == NOTE}
    if level is not None:
        assert "--generation-config vllm; SGLang: --sampling-defaults openai" in found.card
    assert ("changes the target's distribution" in texts(found, WARN)) == (level == WARN)


def test_without_the_target_the_sampling_is_that_of_the_capture(drafts):
    draft = drafts("recorded", {"generation_defaults": {"repetition_penalty": 1.1}})
    found = spec_train.export(draft=draft)
    assert "repetition_penalty 1.1" in texts(found, WARN)
