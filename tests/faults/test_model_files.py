"""Campaigns of config.json, safetensors headers and indexes that a stranger made.

Of a target and of drafts. Each is read, or refused in words that name the file; nothing ends the
process, and no memory is taken for what a file only claims to hold.
"""

import collections
import json
import resource
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from spec_data.models.config_values import wrong_value
from spec_data.models.families import config_shape
from spec_data.models.identify import read_target
from spec_data.models.loading import load_model
from spec_data.shards.errors import SpecDataError
from spec_train.drafts import load_draft
from spec_train.formats.target_facts import TargetFacts
from spec_train.losses.head import TargetHead
from tests.factory import tiny_dataset
from tests.faults.test_draft_bits import written
from tests.faults.tools import count, report, survived, trials
from tests.spec_data.runs import save_target
from tests.spec_train.formats import own_draft
from tests.spec_train.formats.tools import export

LONG = pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.long)])
SHORT = ("llama", "eagle3")
MORE = [pytest.param(name, marks=pytest.mark.long) for name in ("gemma2", "qwen3_moe", "dspark")]
GIGABYTE = 1 << 30
target = own_draft.target

VALUES: list[Any] = [
    *(0, -1, 1, 3, 2**31, 2**31 - 1, 10**12, 10**30, -(2**40), 0.5, 1e30, -1e-5),
    *(float("nan"), float("inf"), "8", "", "x", "\x1b[2J", None, True, False),
    *([], [0], ["x"], {}, {"a": 1}, [None] * 9, "9" * 400),
]


def places(table: dict[str, Any], inside: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the path of every value of a config."""
    found = []
    for key, value in table.items():
        found += [(*inside, key)]
        found += places(value, (*inside, key)) if isinstance(value, dict) else []
    return found


def odd_config(rng: np.random.Generator, folder: Path) -> str:
    """Change one or two values of a config.json; return which."""
    file = folder / "config.json"
    config, said = json.loads(file.read_text()), []
    for _ in range(int(rng.integers(1, 3))):
        paths = places(config)
        path, value = paths[rng.integers(len(paths))], VALUES[rng.integers(len(VALUES))]
        table = config
        for key in path[:-1]:
            table = table[key]
        table[path[-1]] = value
        said += [f"{'.'.join(path)} = {value!r}"[:80]]
    file.write_text(json.dumps(config))
    return ", ".join(said)


def odd_entry(rng: np.random.Generator, entry: dict[str, Any], size: int) -> None:
    """Change what a header says of one tensor."""
    huge = [2**40, 2**62, 2**63, 2**64, -1, 0, 1.5, "3", None, size, size + 1]
    one = huge[rng.integers(len(huge))]
    ways: list[Callable[[], Any]] = [
        lambda: entry.update(dtype=rng.choice(["F64", "I32", "BOOL", "F4", "", "x" * 999, "U8"])),
        lambda: entry.update(dtype=one),
        lambda: entry.update(shape=[one, *entry["shape"][1:]]),
        lambda: entry.update(shape=[*entry["shape"], one]),
        lambda: entry.update(shape=[0] * 40 + [2**31] * 3),
        lambda: entry.update(shape=one),
        lambda: entry.update(data_offsets=[one, entry["data_offsets"][1]]),
        lambda: entry.update(data_offsets=[entry["data_offsets"][0], one]),
        lambda: entry.update(data_offsets=entry["data_offsets"][::-1]),
        lambda: entry.update(data_offsets=[0, size]),
        lambda: entry.update(data_offsets=[]),
        lambda: entry.pop(["dtype", "shape", "data_offsets"][rng.integers(3)]),
    ]
    ways[rng.integers(len(ways))]()


def odd_header(rng: np.random.Generator, folder: Path) -> str:
    """Change the header of a safetensors file, or its length; return how."""
    file = folder / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    text, data = content[8 : 8 + length], content[8 + length :]
    way = ["length", "bytes", "text", "entry", "entry", "entry", "names", "data"][rng.integers(8)]
    new = length
    if way == "length":
        new = [0, 1, 7, len(content), 2**31, 2**62, 2**63, 2**64 - 1, length + 1, length - 1][
            rng.integers(10)
        ]
    elif way == "bytes":
        odd = bytearray(text)
        for _ in range(int(rng.integers(1, 6))):
            odd[rng.integers(len(odd))] = rng.integers(256)
        text = bytes(odd)
    elif way == "text":
        texts = [b"", b"[]", b"null", b"{", b'{"a":' * 9000, b"\xff" * 64, b'{"__metadata__":3}']
        text = texts[rng.integers(len(texts))]
        new = len(text)
    elif way == "data":
        data = data[: rng.integers(len(data))] if rng.integers(2) else data + b"\0" * 64
    else:
        header = json.loads(text)
        names = [name for name in header if name != "__metadata__"]
        name = names[rng.integers(len(names))]
        if way == "entry":
            odd_entry(rng, header[name], len(data))
        elif rng.integers(2):
            header[["", "\x1b[2J", "../x", "x" * 5000, "__metadata__"][rng.integers(5)]] = (
                header.pop(name)
            )
        else:
            header[name] = header[names[rng.integers(len(names))]]
        text = json.dumps(header).encode()
        new = len(text)
    file.write_bytes(new.to_bytes(8, "little") + text + data)
    return way


def odd_index(rng: np.random.Generator, folder: Path) -> str:
    """Write an index of weight files that has something wrong; return what."""
    place = folder / "model-1.safetensors"
    (folder / "model.safetensors").rename(place)
    text = place.read_bytes()
    header = json.loads(text[8 : 8 + int.from_bytes(text[:8], "little")])
    names: Any = {name: place.name for name in header if name != "__metadata__"}
    files = ["../x", "/etc/passwd", "", None, 3, "absent.safetensors", ".", "\x1b[2J", "a\0b", []]
    way = int(rng.integers(7))
    if way < 3:
        one = list(names)[rng.integers(len(names))]
        names[one] = files[rng.integers(len(files))]
    elif way == 3:
        names |= {"another.weight": place.name}
    elif way == 4:
        del names[next(iter(names))]
    elif way == 5:
        names = [[], None, 3, {}, "x", [names]][rng.integers(6)]
    index: Any = {"metadata": {"total_size": 3}, "weight_map": names}
    whole = json.dumps(index if rng.integers(8) else [index])
    whole = whole if rng.integers(8) else whole[: rng.integers(len(whole))]
    (folder / "model.safetensors.index.json").write_text(whole)
    return f"index {way}"


def open_target(folder: Path) -> None:
    """Read a target as commands do, up to its weights."""
    files = read_target(str(folder), None, {}, False, True)
    config = json.loads((folder / "config.json").read_text())
    config_shape(config)
    load_model(str(folder), device="cpu")
    assert files.target["num_layers"] > 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Callable[[str], Any]:
    """Return what gives the directory of a target or of a draft, and what opens it."""
    folder = tmp_path_factory.mktemp("whole")
    made: dict[str, Any] = {}

    def of(name: str) -> Any:
        if name not in made and name in ("eagle3", "dspark"):
            data = tiny_dataset(folder / f"data-{name}", n_docs=8)
            head = TargetHead.from_dataset(data)
            facts = TargetFacts(num_layers=4, embedding=head.embed_weight, head=head.head_weight)
            own = written(data, name, folder / f"own-{name}", 1)
            form = {"eagle3": "vllm", "dspark": "deepspec"}[name]
            place = export(own, form, folder / f"{name}-{form}", target)
            config = json.loads((place / "config.json").read_text())
            config.pop("spec_train", None)  # as others write them: without a seal
            (place / "config.json").write_text(json.dumps(config))
            made[name] = place, lambda where: load_draft(where, facts, accept_edited=True)
        elif name not in made:
            made[name] = save_target(folder / name, name), open_target
        return made[name]

    return of


@LONG
@pytest.mark.parametrize("change", [odd_config, odd_header, odd_index])
@pytest.mark.parametrize("name", [*SHORT, *MORE])
def test_odd_files_are_read_or_refused_in_words(
    whole: Any, tmp_path: Path, name: str, change: Callable[..., str], times: int
) -> None:
    place, open_it = whole(name)
    open_it(place)  # what is imported and kept is not counted
    campaign = f"{change.__name__} of {name} x{times}"
    rngs = [rng for _, rng in trials(campaign, (15 if change is odd_config else 10) * times)]

    def run(trial: int) -> str:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + GIGABYTE, resource.RLIM_INFINITY))
        odd = tmp_path / f"odd{trial}"
        shutil.copytree(place, odd)
        said = change(rngs[trial], odd)
        try:
            open_it(odd)
        except SpecDataError as error:
            words = str(error)
            return (
                "refused"
                if str(odd) in words or "config.json" in words
                else f"{said}: no file: {words}"
            )
        except Exception as error:
            stack = traceback.extract_tb(error.__traceback__)
            ours = [frame for frame in stack if "/spec_" in frame.filename][-1]
            where = f"{ours.name} {ours.lineno}, {stack[-1].name}"
            return f"{said}: {type(error).__name__}: {error} at {where}"[:600]
        finally:
            shutil.rmtree(odd)
        return "read"

    results = survived(run, count(15 if change is odd_config else 10) * times)
    outcomes = collections.Counter(r if r in ("read", "refused") else "raw" for r in results)
    report(campaign, outcomes)
    raw = [result for result in results if result not in ("read", "refused")]
    assert not raw, "\n".join(raw)
    assert outcomes["refused"]


@pytest.mark.parametrize("value", [0, -1, 10**12, "8", float("nan"), 2**21 + 0.5])
@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads"])
def test_a_number_that_no_model_has_is_named(
    whole: Any, tmp_path: Path, key: str, value: Any
) -> None:
    """File, key, value, and what is expected; `num_hidden_layers` 1e12 took all memory."""
    odd = tmp_path / "odd"
    shutil.copytree(whole("llama")[0], odd)
    config = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(SpecDataError, match=rf"odd/config\.json: .*{key}"):
        open_target(odd)


def test_a_config_of_a_far_larger_model_is_refused_before_memory_is_taken(
    whole: Any, tmp_path: Path
) -> None:
    odd = tmp_path / "odd"
    shutil.copytree(whole("llama")[0], odd)
    config = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps(config | {"hidden_size": 1 << 20}))
    with pytest.raises(
        SpecDataError, match=r"odd/config\.json: describes a model of .* parameters"
    ):
        open_target(odd)


def test_experts_that_do_not_fit_each_other_are_refused_in_words(tmp_path: Path) -> None:
    """A RuntimeError of transformers before, found by the campaign."""
    file = save_target(tmp_path / "moe", "qwen3_moe") / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if ".experts.1.gate_proj" in name)
    tensors[name] = tensors[name].reshape(-1, tensors[name].shape[1] // 2)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(SpecDataError, match=r"moe: .*(do not fit each other|another shape)"):
        load_model(str(file.parent), device="cpu")


def test_what_models_have_is_no_wrong_value():
    rope = {"rope_theta": 1e6, "partial_rotary_factor": 0.5}
    config = {"architectures": ["X"], "num_experts": 0, "sliding_window": False, "head_dim": None}
    assert wrong_value(config | {"rope_parameters": rope, "num_key_value_heads": [4, 2]}) is None
    vision = {"vision_config": {"hidden_size": 0}}
    assert wrong_value(config | vision, ("vision",)) is None
    assert "vision_config.hidden_size is 0" in (wrong_value(config | vision) or "")
