"""Vectors are the same everywhere, each mistake is named by its numbers, our decoder passes."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import spec_train
from spec_data.shards.errors import ConfigError, MissingError
from spec_train.conformance.drafts import make_draft
from spec_train.conformance.recipes import RECIPES
from spec_train.conformance.target import make_target
from tests.marks import long_but
from tests.spec_train.conformance.own_decoder import expected, log_of, write_log

ORDINARY = ["eagle3", "dflash"]
DIGESTS = {"eagle3": "6e198bb0dbf303f1", "dflash": "857452a8825da72d"}
LONG = ["eagle31", "peagle", "dspark", "domino", "xpress", "mtp-mimo", "mtp-deepseek_v3"]
ALL = bool(os.environ.get("SPEC_TEST_VECTORS"))
REST = [recipe.name for recipe in RECIPES if recipe.name not in (*ORDINARY, *LONG)]
SKIP = pytest.mark.skipif(not ALL, reason="takes a minute; set SPEC_TEST_VECTORS=1")
ORDINARY = long_but(["eagle3"], ORDINARY)
EVERY = [
    *ORDINARY,
    *(pytest.param(name, marks=pytest.mark.long) for name in LONG),
    *(pytest.param(name, marks=[pytest.mark.long, SKIP]) for name in REST),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of vectors, to which `made` adds."""
    return tmp_path_factory.mktemp("vectors")


@pytest.fixture
def made(request: pytest.FixtureRequest, root: Path) -> tuple[Path, str]:
    """A directory with one vector, and its name."""
    name = request.param
    if not (root / name).is_dir():
        spec_train.vectors(root / name, only=name)
    return root / name, name


every = pytest.mark.parametrize("made", EVERY, indirect=True)


def verdict(folder: Path, name: str, lines: list[dict[str, Any]]) -> Any:
    """What the check says of a vector's log."""
    return spec_train.vectors(folder, write_log(folder / "log.jsonl", lines)).of(name)


def lines_of(numbers: dict[str, Any], prompts: list[Any], *fields: str) -> list[dict[str, Any]]:
    """A log with these fields of prompts, for a vector."""
    return [
        {"vector": numbers["vector"], "prompt": i} | {name: one[name] for name in fields}
        for i, one in enumerate(prompts)
    ]


def test_a_block_of_a_target_whose_engines_disagree_can_be_made():
    """The options of GLM-4.5's were refused, which ended the command."""
    recipe = next(one for one in RECIPES if one.name == "mtp-glm4_moe")
    draft = make_draft(recipe.kind, make_target(recipe.target), recipe.options, (), 0)
    assert draft.config.norm_output


@every
def test_a_vector_says_enough(made):
    """Choices are clear, counts vary, the files are exact in bfloat16, and every mistake shows."""
    folder, name = made
    numbers = expected(folder, name)
    assert numbers["smallest_gap"] > 5e-4
    counts = [count for one in numbers["prompts"] for count in one["accepted"]]
    assert len(set(counts)) >= 2 and sum(counts) / len(counts) > 0.1
    form = next(iter(numbers["drafts"].values()))
    for path in (folder / form).glob("*.safetensors"):
        for tensor in load_file(path).values():
            if tensor.is_floating_point():
                assert torch.equal(tensor, tensor.bfloat16().float())
    right = [one["accepted"] for one in numbers["prompts"]]
    for twin, wrong in numbers["wrong"].items():
        assert [one["accepted"] for one in wrong["prompts"]] != right, twin


@every
def test_the_check_names_every_mistake(made):
    folder, name = made
    numbers = expected(folder, name)
    for fields in (["drafted"], ["accepted"], ["drafted", "accepted"]):
        assert verdict(folder, name, lines_of(numbers, numbers["prompts"], *fields)).state == "pass"
        for twin, wrong in numbers["wrong"].items():
            found = verdict(folder, name, lines_of(numbers, wrong["prompts"], *fields))
            assert found.state == "FAIL" and twin in found.mistakes
            assert fields == ["accepted"] or len(found.mistakes) == 1


@pytest.mark.parametrize("made", ["eagle3"], indirect=True)
def test_a_log_that_does_not_tell_a_mistake_apart_says_so(made):
    folder, name = made
    numbers = expected(folder, name)
    right = numbers["prompts"]
    assert verdict(folder, name, lines_of(numbers, right, "drafted")).text == ""
    found = verdict(folder, name, lines_of(numbers, right, "output"))
    assert found.state == "pass" and found.mistakes == tuple(numbers["wrong"])
    assert "state-shift or final-norm" in found.text and "log drafted, or accepted" in found.text


@pytest.mark.long
@every
def test_our_decoder_passes_and_fails(made):
    """It passes with every form, and with a mistake in the file it has the mistake's numbers."""
    folder, name = made
    numbers = expected(folder, name)
    for form in numbers["drafts"].values():
        found = verdict(folder, name, log_of(folder, name, form))
        assert found.state == "pass", (form, found.text)
    for twin, wrong in numbers["wrong"].items():
        if wrong["draft"] is not None:
            found = verdict(folder, name, log_of(folder, name, wrong["draft"]))
            assert (found.state, found.mistakes) == ("FAIL", (twin,))


@pytest.mark.parametrize("made", ORDINARY, indirect=True)
def test_bytes_are_the_same_on_every_machine(made):
    """Weights and numbers: configs may gain a key."""
    folder, name = made
    numbers = expected(folder, name)
    wrong = [one["prompts"] for one in numbers["wrong"].values()]
    total = hashlib.sha256(json.dumps([numbers["prompts"], wrong]).encode())
    for path in sorted(folder.rglob("model.safetensors")):
        for key, tensor in sorted(load_file(path).items()):
            total.update(key.encode() + tensor.numpy().tobytes())
    assert total.hexdigest()[:16] == DIGESTS[name]


@pytest.mark.parametrize("made", ["eagle3"], indirect=True)
def test_logs_are_read_with_care(made, tmp_path):
    folder, name = made
    numbers = expected(folder, name)
    right = numbers["prompts"]
    lines = lines_of(numbers, right, "output", "drafted", "accepted")
    for line in lines:  # an engine that stops in its last step, and counts totals
        line["drafted"] = [*line["drafted"][:-1], line["drafted"][-1][:1]]
        line["accepted"] = sum(line["accepted"][:-1])
    assert verdict(folder, name, lines).state == "pass"
    lines[1]["output"] = [*lines[1]["output"][:-1], 5]
    assert "output differs at token 15" in verdict(folder, name, lines).text
    lines = lines_of(numbers, right, "drafted")
    lines[0]["drafted"] = [[9] * 4] * 3
    found = verdict(folder, name, lines)
    assert (found.state, found.mistakes) == ("FAIL", ()) and "step 0" in found.text
    for bad, words in {
        "{": "truncated",
        "\udcff": "malformed",
        '{"vector": ["eagle3"], "prompt": 0, "accepted": 3}': "Expected `str`, got `array`",
        '{"vector": "eagle3", "prompt": true, "accepted": 3}': "Expected `int`, got `bool`",
        '{"vector": "eagle3", "prompt": 0, "accepted": [1, "x"]}': "Expected `int`, got `str`",
        '{"vector": "eagle3", "prompt": 0, "drafted": [1, 2]}': "Expected `array`, got `int`",
        '{"vector": "x", "prompt": 0, "accepted": 3}': "no vector 'x'",
        '{"vector": "eagle3", "prompt": 9, "accepted": 3}': "no prompt 9",
        '{"vector": "eagle3", "prompt": 0}': "nothing to compare",
        '{"vector": "eagle3", "prompt": 0, "drafted": 3}': "got `int`.*drafted",
        2 * '{"vector": "eagle3", "prompt": 0, "accepted": 3}\n': "prompt 0 twice",
        "": "is empty",
    }.items():
        log = tmp_path / "bad.jsonl"
        log.write_bytes(bad.encode(errors="surrogateescape"))
        with pytest.raises(ConfigError, match=words):
            spec_train.vectors(folder, log)
    with pytest.raises(MissingError, match="has no vectors"):
        spec_train.vectors(None, log)
    with pytest.raises(ConfigError, match="--only eagle3 is about writing"):
        spec_train.vectors(folder, log, only="eagle3")
    with pytest.raises(ConfigError, match="no such vector"):
        spec_train.vectors(tmp_path / "new", only="other")
