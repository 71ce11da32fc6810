"""The Python functions: cheap to import, the commands' defaults and results, errors in words."""

import dataclasses
import doctest
import inspect
import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import spec_data
import spec_data.api
import spec_train
import spec_train.api
from spec_data.keywords import from_keywords
from spec_data.options import GenerateConfig, VerifyConfig
from spec_data.shards.errors import ConfigError, DraftError, MissingError, OptionError, RunError
from spec_train.cli import main as train_main
from spec_train.draft_options import DRAFT_OPTIONS, Eagle3Options, PeagleOptions
from spec_train.options import EvalConfig, ExportConfig, FitConfig, resolve_fit, split_config
from spec_train.presets import PRESETS
from spec_train.training.setup import fit as run_fit
from tests.api_workspace import FIT, make_workspace

ROOT = Path(__file__).parent.parent
PACKAGES = (spec_data, spec_train)
FUNCTIONS = [
    *(getattr(spec_data, name) for name in ("open_dataset", "generate", "estimate", "verify")),
    *(getattr(spec_train, name) for name in ("fit", "evaluate", "export", "load_draft")),
    spec_train.simulate_acceptance,
]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    return make_workspace(tmp_path_factory.mktemp("api"))


@pytest.fixture
def here(workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    return workspace


# --- the packages ---


@pytest.mark.parametrize("package", ["spec_data", "spec_train"])
def test_importing_a_package_is_cheap_and_dir_lists_its_names(package):
    program = (
        f"import sys, {package} as package\n"
        "names = dir(package)\n"
        "assert set(package.__all__) <= set(names), names\n"
        "heavy = {'torch', 'transformers', 'datasets', 'pyarrow', 'numpy', 'tqdm'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "assert package.SpecDataError.__name__ == 'SpecDataError'\n"
        "assert not heavy & set(sys.modules), 'an error class needs none of them'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_public_name_exists_and_is_what_type_checkers_see(package):
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = package.nothing
    source = (Path(package.__file__)).read_text(encoding="utf-8")
    block = source[source.index("if TYPE_CHECKING") : source.index("_PUBLIC = {")]
    typed = set(re.findall(r"\b(\w+)(?:,|\n)", re.sub(r"from \S+ import", "", block)))
    lazy = set(package.__all__) - {"__version__"}
    assert lazy <= typed, "a name is missing under TYPE_CHECKING"
    assert lazy == set(package._PUBLIC)


def test_type_checkers_see_the_functions(tmp_path):
    program = tmp_path / "use.py"
    program.write_text(
        "import spec_data, spec_train\n"
        "reveal_type(spec_data.open_dataset('d')[0])\n"
        "reveal_type(spec_data.open_dataset('d')[0:2])\n"
        "reveal_type(spec_train.fit('eagle3', 'd', 'r').validation)\n"
        "reveal_type(spec_train.evaluate('r').acceptance_length)\n"
    )
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(program)]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    found = re.findall(r'Revealed type is "(.*)"', out)
    shown = [re.sub(r"\b(builtins|typing)\.", "", kind) for kind in found]
    assert shown == [
        "dict[str, Any]",
        "dict[str, list[Any]]",
        "list[dict[str, Any]]",
        "float | None",
    ], out


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_every_function_is_documented_and_typed(function):
    text = inspect.getdoc(function)
    assert "Args:" in text and "Returns:" in text and "Raises:" in text and ">>> " in text
    signature = inspect.signature(function)
    assert signature.return_annotation is not inspect.Signature.empty
    for parameter in signature.parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty, parameter.name


@pytest.mark.parametrize(
    "function, config, positional",
    [
        (spec_data.generate, GenerateConfig, {"dry_run"}),
        (spec_data.estimate, GenerateConfig, {"dry_run"}),
        (spec_data.verify, VerifyConfig, {"data"}),
        (spec_train.fit, FitConfig, set()),
        (spec_train.evaluate, EvalConfig, set()),
        (spec_train.export, ExportConfig, set()),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_functions_have_the_options_and_defaults_of_their_command(function, config, positional):
    parameters = inspect.signature(function).parameters
    for field in dataclasses.fields(config):
        if field.name in positional:
            continue
        default = parameters[field.name].default
        if field.default is dataclasses.MISSING:
            assert default in (inspect.Parameter.empty, None), field.name
        else:
            assert default == field.default, field.name
            if parameters[field.name].kind is inspect.Parameter.KEYWORD_ONLY:
                assert f"{field.name}: " in inspect.getdoc(function)


@pytest.mark.parametrize("module", [spec_data.api, spec_train.api], ids=lambda m: m.__name__)
def test_the_examples_of_the_docstrings_run(module, workspace, tmp_path, monkeypatch):
    for name in ("target", "chats.jsonl", "prompts.jsonl", "data", "run"):
        (tmp_path / name).symlink_to(workspace / name)
    monkeypatch.chdir(tmp_path)
    names = {"spec_data": spec_data, "spec_train": spec_train}
    tests = [t for t in doctest.DocTestFinder().find(module, extraglobs=names) if t.examples]
    assert {t.name.rpartition(".")[2] for t in tests} == {
        f.__name__ for f in FUNCTIONS if f.__module__ == module.__name__
    }
    for test in tests:
        lines: list[str] = []
        assert not doctest.DocTestRunner().run(test, out=lines.append).failed, "".join(lines)


def test_the_examples_of_the_page_run_in_order(workspace, tmp_path, monkeypatch):
    for name in ("target", "chats.jsonl", "prompts.jsonl"):
        (tmp_path / name).symlink_to(workspace / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.getLogger("spec_train"), "level", logging.NOTSET)  # a block sets it
    page = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    code = "\n".join(blocks)
    for package in PACKAGES:
        for name in set(package.__all__) - {"__version__"}:
            assert re.search(rf"\b{name}\b", page), f"{name} is not on the page"
    for function in FUNCTIONS:
        assert f".{function.__name__}(" in code, f"{function.__name__} has no example"
    names: dict = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"docs/python-api.md, block {number}", "exec"), names)


# --- keyword arguments ---


def test_unknown_options_are_refused_with_the_nearest_name(here):
    for call, near in (
        (lambda: spec_data.generate("target", "chats.jsonl", "out", layer="1"), "layers"),
        (lambda: spec_data.estimate("target", "chats.jsonl", "out", max_lenght=5), "max_length"),
        (lambda: spec_data.verify("data", sample=3), "samples"),
        (lambda: spec_train.fit("eagle3", "data", "out", step=3), "steps"),
        (lambda: spec_train.fit("peagle", "data", "out", depth=3), "depths"),
        (lambda: spec_train.evaluate("run", data="data", draft_token=3), "draft_tokens"),
        (lambda: spec_train.export("run", checks=True), "check"),
    ):
        with pytest.raises(OptionError, match=f"did you mean {near}\\?") as caught:
            call()
        assert isinstance(caught.value, TypeError) and isinstance(caught.value, ConfigError)
        assert caught.value.exit_code == 2
    with pytest.raises(OptionError, match=r"its options: .*samples"):
        spec_data.verify("data", zzz=1)
    with pytest.raises(ConfigError, match=r"batch_tokens = 'many' in generate\(\): expected int"):
        spec_data.generate("target", "chats.jsonl", "out", batch_tokens="many")
    with pytest.raises(ConfigError, match=r"call spec_data\.estimate"):
        spec_data.generate("target", "chats.jsonl", "out", dry_run=True)
    assert not Path("out").exists()


def test_python_values_become_the_texts_of_the_command():
    given = {
        "target": Path("a"),
        "corpus": [Path("b"), "c"],
        "out": Path("d"),
        "layers": (1, 3, 5),
        "chat_template_kwargs": {"enable_thinking": False},
    }
    config = from_keywords(GenerateConfig, given, "generate")
    assert (config.target, config.corpus, config.out) == ("a", ("b", "c"), "d")
    assert config.layers == "1,3,5" and config.template_kwargs == {"enable_thinking": False}
    one = from_keywords(GenerateConfig, given | {"corpus": "b"}, "generate")
    assert one.corpus == ("b",)
    numbers = {"limit": np.int64(3), "max_length": torch.tensor(64)}
    config = from_keywords(GenerateConfig, given | numbers, "generate")
    assert (config.limit, config.max_length) == (3, 64) and type(config.limit) is int


def test_a_wrong_value_is_shown_in_one_line(here):
    draft = spec_train.load_draft("run")
    with pytest.raises(
        ConfigError, match=r"draft = Eagle3Draft\(.{,90}\.\.\. in evaluate\(\): exp"
    ):
        spec_train.evaluate(draft, data="data")


@pytest.mark.parametrize("every", [0, 256, -1])
def test_checksums_are_checked_at_a_possible_rate(here, every):
    with pytest.raises(ConfigError, match=f"check_every = {every}: expected 1 .* to 255"):
        spec_data.open_dataset("data", check_every=every)


# --- spec_data ---


def test_generate_estimate_and_verify_agree_with_the_dataset(here, tmp_path, capsys):
    common = {"layers": [0, 2, 4], "codec": "bf16", "device": "cpu", "limit": 6}
    sizes = spec_data.estimate(Path("target"), [Path("chats.jsonl")], tmp_path / "new", **common)
    assert not (tmp_path / "new").exists()
    made = spec_data.generate(Path("target"), [Path("chats.jsonl")], tmp_path / "new", **common)
    again = spec_data.generate("target", "chats.jsonl", str(tmp_path / "new"), **common)
    assert made == again and made.sealed and made.path == tmp_path / "new"
    dataset = spec_data.open_dataset(made.path)
    assert made.documents == sizes.documents == len(dataset) == 6
    assert made.tokens == sizes.tokens == int(dataset.lengths.sum())
    assert made.supervised_tokens == sizes.supervised_tokens == int(dataset.supervised.sum())
    assert made.bytes == sizes.bytes == sum(s.bytes for s in dataset.manifest.shards)
    assert made.layers == sizes.layers == (0, 2, 4) and sizes.fits
    assert made.fingerprint == dataset.manifest.fingerprint
    assert "bytes of all shards" in str(sizes) and "fingerprint" in str(made)
    assert "text" not in repr(made) and "documents=6" in repr(made)
    report = spec_data.verify(made.path, target="target", samples=3, device="cpu")
    assert report.ok and not report.failures and len(report.facts) >= 5
    assert str(report).endswith(f"verified, fingerprint {made.fingerprint[:16]}")
    assert capsys.readouterr().out == "", "functions print nothing"


def test_what_is_left_out_is_counted_by_reason(here, tmp_path):
    rows = Path("chats.jsonl").read_text().splitlines()
    corpus = tmp_path / "chats.jsonl"
    corpus.write_text("\n".join([*rows[:4], rows[0], "{not json"] * 40) + "\n" + rows[5] + "\n")
    with pytest.raises(spec_data.SpecDataError):  # a sixth of the rows is bad: over 1 %
        spec_data.estimate("target", corpus, tmp_path / "no", layers="0,2,4")
    corpus.write_text("\n".join([*rows[:4], rows[0]]) + "\n")
    made = spec_data.generate("target", corpus, tmp_path / "new", layers=[0, 2, 4], device="cpu")
    assert made.documents == 4 and made.dropped == {"duplicate": 1} and made.skipped_rows == {}


def test_a_worker_that_is_not_the_last_returns_an_unsealed_directory(here, tmp_path):
    options = {"layers": [0, 2, 4], "device": "cpu"}
    made = spec_data.generate("target", "chats.jsonl", tmp_path, workers="0/2", **options)
    assert not made.sealed and made.documents == 0 and made.path == tmp_path
    with pytest.raises(MissingError, match="not sealed yet"):
        spec_data.open_dataset(tmp_path)


def test_damage_is_in_the_report_of_verify(here, tmp_path):
    made = spec_data.generate(
        "target", "chats.jsonl", tmp_path / "new", layers=[0, 2, 4], device="cpu", limit=3
    )
    shard = next((made.path / "shards").iterdir())
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 255
    shard.write_bytes(data)
    report = spec_data.verify(made.path)
    assert not report.ok and any(shard.name in failure for failure in report.failures)
    assert "FAIL" in str(report)
    with pytest.raises(MissingError, match="no such dataset"):
        spec_data.verify(tmp_path / "nothing")


# --- spec_train ---


def test_fit_shows_its_validation_without_configured_logging(here, tmp_path):
    program = (
        "import spec_train, json\n"
        f"result = spec_train.fit('eagle3', 'data', {str(tmp_path / 'run')!r}, **{FIT!r})\n"
        "print(json.dumps([line['step'] for line in result.validation]))\n"
        "print(result)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    steps, shown = done.stdout.splitlines()[-2:]
    assert json.loads(steps) == [0, 2, 4]
    assert shown.startswith("finished at step 4; best draft: step ")


def test_fit_logs_its_validation_and_returns_it(here, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="spec_train"):
        result = spec_train.fit("eagle3", Path("data"), tmp_path / "run", **FIT)
    lines = [m for m in caplog.messages if m.startswith("validation at step ")]
    assert len(lines) == len(result.validation) == 3
    for text, line in zip(lines, result.validation, strict=True):
        assert f"loss {line['loss']:.4f}" in text
    assert result.finished and result.step == 4 and result.best["step"] in (0, 2, 4)
    assert result.training[-1]["step"] == 4 and "tokens_per_second" in result.training[-1]
    again = spec_train.fit("eagle3", "data", tmp_path / "run", **FIT)
    assert again.finished and again.validation == result.validation


def test_fit_is_the_command(here, tmp_path):
    result = spec_train.fit("eagle3", "data", tmp_path / "a", **FIT)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in FIT.items()]
    out = str(tmp_path / "b")
    assert train_main(["fit", "eagle3", "--data", "data", "--out", out, *flags]) == 0
    tables = [json.loads((tmp_path / name / "fit.json").read_text()) for name in "ab"]
    assert tables[0] | {"out": out} == tables[1]
    other = dataclasses.replace(result, directory=tmp_path / "b")
    assert result.validation == other.validation


def test_a_preset_is_applied_and_options_replace_it(here, tmp_path):
    spec_train.fit("eagle3", "data", tmp_path / "run", preset="smoke", steps=1, device="cpu")
    table = json.loads((tmp_path / "run" / "fit.json").read_text())
    smoke = PRESETS["smoke"].values
    assert table["steps"] == 1 and table["preset"] == "smoke"
    for name in ("ttt_steps", "seq_len", "batch_size", "log_every", "validation_documents"):
        assert table[name] == smoke[name], name
    with pytest.raises(ConfigError, match="choose from smoke, 5k, 50k, 500k"):
        spec_train.fit("eagle3", "data", tmp_path / "no", preset="tiny")


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_that_nothing_applied_is_refused(preset):
    with pytest.raises(ConfigError, match=f"preset '{preset}' has no effect"):
        FitConfig(data="d", out="o", preset=preset)
    joined = resolve_fit("eagle3", {"data": "d", "out": "o", "preset": preset})
    config, options = split_config("eagle3", joined)
    assert config.preset == preset and options.ttt_steps == PRESETS[preset].values["ttt_steps"]
    assert dataclasses.replace(config, device="cpu").preset == preset


def test_wrong_drafts_and_options_are_errors_in_words(here, tmp_path):
    with pytest.raises(DraftError, match="unknown draft None; known"):
        spec_train.fit(None, "data", tmp_path / "run")  # type: ignore[arg-type]
    with pytest.raises(DraftError, match=r"unknown draft 'eagle4'; known: .*eagle3.*did you mean"):
        spec_train.fit("eagle4", "data", tmp_path / "no")
    config = FitConfig(data="data", out=str(tmp_path / "no"), steps=1)
    with pytest.raises(DraftError, match="unknown draft 'eagle4'"):
        run_fit("eagle4", config, Eagle3Options())
    with pytest.raises(ConfigError, match="eagle3 takes Eagle3Options, not PeagleOptions"):
        run_fit("eagle3", config, PeagleOptions())
    with pytest.raises(DraftError, match="ttt_steps = 0"):
        spec_train.fit("eagle3", "data", tmp_path / "no", ttt_steps=0)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("kind", DRAFT_OPTIONS)
def test_every_draft_is_fitted_loaded_and_simulated(kind, here, tmp_path):
    small = {
        "eagle": {"depth": 2},
        "eagle3": {"ttt_steps": 2},
        "peagle": {"depths": 2, "draft_layers": 1},
        "dspark": {"block_size": 2, "num_draft_layers": 1, "mask_token_id": 3},
        "dflash": {"block_size": 3, "num_draft_layers": 1, "mask_token_id": 3},
    }[kind]
    shared = {k: v for k, v in FIT.items() if k not in ("ttt_steps", "draft_vocab_size")}
    result = spec_train.fit(kind, "data", tmp_path / "run", **shared | small | {"steps": 1})
    draft = spec_train.load_draft(result.directory)
    assert draft.name == kind and not draft.training
    open_data = spec_data.open_dataset("data")
    found = spec_train.simulate_acceptance(draft, open_data, limit=5)
    assert found.split == "all" and found.documents == 5 and found.acceptance_length >= 1
    by_path = spec_train.simulate_acceptance(result.directory, "data", split="all", limit=5)
    assert by_path.figures["documents"] == 5 and by_path.accept_rate == found.accept_rate
    held_out = spec_train.simulate_acceptance(tmp_path / "run", Path("data"))
    assert held_out.split == "validation"
    assert "serving-like length" in str(held_out)


def test_simulation_leaves_the_draft_as_it_was(here):
    draft = spec_train.load_draft("run").train()
    before = {name: value.clone() for name, value in draft.state_dict().items()}
    spec_train.simulate_acceptance(draft, "data", limit=3)
    assert draft.training
    assert all(torch.equal(before[name], value) for name, value in draft.state_dict().items())
    peagle_like = spec_train.load_draft("run")
    with pytest.raises(ConfigError, match="only a run directory"):
        spec_train.simulate_acceptance(peagle_like, "data", split="validation")


@pytest.mark.parametrize("stored", [True, False], ids=["path", "draft"])
@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"split": "test"}, "split = 'test' .*choose from auto, validation, train, all"),
        ({"limit": -1}, "limit -1: expected at least 0"),
        ({"draft_tokens": -1}, "draft-tokens -1: expected at least 0"),
    ],
)
def test_simulation_refuses_the_same_values_of_a_path_and_of_a_draft(here, stored, wrong, message):
    draft = "run" if stored else spec_train.load_draft("run")
    with pytest.raises(ConfigError, match=message):
        spec_train.simulate_acceptance(draft, "data", **wrong)


def test_evaluate_returns_the_figures_of_the_command(here, tmp_path, capsys):
    both = spec_train.evaluate(
        "run", "data", "target", "prompts.jsonl", max_new_tokens=6, device="cpu", limit=2,
        json=tmp_path / "figures.json",
    )  # fmt: skip
    assert capsys.readouterr().out == "", "functions print nothing"
    stored = json.loads((tmp_path / "figures.json").read_text())
    assert both.figures == stored and both.acceptance_length == stored["acceptance_length"]
    assert both.decoding.acceptance_length == both.acceptance_length
    assert both.decoding.identical == both.decoding.responses == 2
    assert both.data.documents == stored["data"]["documents"] and both.draft_tokens == 2
    text = str(both)
    assert "real decoding" in text and "serving-like length" in text
    with pytest.raises(ConfigError, match="nothing to evaluate on"):
        spec_train.evaluate("run")
    with pytest.raises(RunError, match="nothing was measured"):
        Path(tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "so " * 400}) + "\n")
        spec_train.evaluate("run", target="target", prompts=tmp_path / "long.jsonl", device="cpu")


def test_export_writes_and_checks(here, tmp_path, capsys):
    written = spec_train.export(Path("run"), tmp_path / "out", "vllm", Path("target"))
    assert written.path == tmp_path / "out" and written.format == "vllm"
    assert (written.path / "config.json").is_file() and written.tensors > 5 and written.bytes > 0
    checked = spec_train.export("run")
    assert checked.path is None and checked.format is None and "eagle3" in str(checked)
    for engine in ("vllm", "sglang", "speculators", "spec-train"):
        assert checked.of(engine), f"no word about {engine}"
    assert checked.of("other") == ()
    with pytest.raises(ConfigError, match="exists already"):
        spec_train.export("run", tmp_path / "out", "vllm")
    with pytest.raises(ConfigError, match="needs --format"):
        spec_train.export("run", tmp_path / "other")
    back = spec_train.load_draft(written.path)
    assert back.config.layers == spec_train.load_draft("run").config.layers
    assert capsys.readouterr().out == "", "functions print nothing"


def test_drafts_are_loaded_where_and_as_asked(here):
    stored = spec_train.load_draft("run")
    assert stored.embed_tokens.weight.dtype == getattr(torch, stored.config.dtype)
    half = spec_train.load_draft(Path("run"), dtype="bf16")
    assert half.embed_tokens.weight.dtype == torch.bfloat16 and not half.training
    with pytest.raises(ConfigError, match="choose from auto"):
        spec_train.load_draft("run", dtype="int3")
    with pytest.raises(MissingError, match="no such draft"):
        spec_train.load_draft("nothing")
