"""Drafts from outside: docs/examples/medusa.py by the commands alone; what is no such draft."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import spec_train
from spec_data.shards import draft_code
from spec_data.shards.errors import DraftError, MissingError
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.cli import main
from spec_train.drafts import kinds
from spec_train.drafts.draft import Draft
from spec_train.losses.head import TargetHead
from spec_train.losses.sampling import Greedy
from spec_train.training.fit import fit
from tests import api_workspace

workspace = api_workspace.workspace
EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "medusa.py"
CODE = ["--draft-code", "medusa.py:Medusa"]
FIT = "--data data --steps 4 --eval-every 2 --save-every 2 --batch-size 1 --seq-len 128"
FIT += " --validation 0.4 --device cpu --heads 3"


@pytest.fixture(autouse=True)
def here(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The workspace with the example in it, in a process that knows no draft from outside."""
    shutil.copy(EXAMPLE, workspace)
    monkeypatch.chdir(workspace)
    unknown(monkeypatch)
    return workspace


def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget every draft from outside, as a new process does."""
    monkeypatch.setattr(kinds, "_REGISTERED", {})
    monkeypatch.setattr(draft_code, "_LOADED", {})
    for name in [name for name in sys.modules if name.startswith("draft_code_")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def run(here: Path) -> Path:
    """A run of Medusa."""
    if not (here / "medusa").exists():
        assert main(["fit", "medusa.py:Medusa", *FIT.split(), "--out", "medusa"]) == 0
    return here / "medusa"


def test_it_is_a_file_that_a_reader_takes_in_at_once() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 80


def test_it_is_trained_and_validated_and_its_options_have_a_help(run: Path, capsys) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lengths = [line for line in lines if line.get("product_limit_length") is not None]
    assert [line["step"] for line in lengths] and lines[-1]["step"] == 4
    assert main(["fit", "medusa.py:Medusa", "--help"]) == 0
    text = capsys.readouterr().out
    assert "--heads" in text and "--head-decay" in text and "--ttt-steps N" not in text


def test_a_resumed_run_is_the_same_bit_for_bit(run: Path) -> None:
    options = kinds.kind_named("medusa.py:Medusa").options(heads=3)
    training = spec_train.Training(
        data="data", out="resumed", steps=4, eval_every=2, save_every=2, batch_size=1,
        seq_len=128, validation=0.4, device="cpu",
    )  # fmt: skip
    assert not fit("medusa", training, options, until=2).finished
    assert fit("medusa", training, options).finished
    whole, resumed = (spec_train.load_draft(path / "last") for path in (run, Path("resumed")))
    for (name, one), two in zip(
        whole.state_dict().items(), resumed.state_dict().values(), strict=True
    ):
        assert torch.equal(one, two), name


def test_its_loss_is_that_of_plain_loops(run: Path) -> None:
    """Head k at slot t: the target's distribution after x_{t+1+k}, where both tokens count."""
    kinds.kind_named("medusa.py:Medusa")
    dataset = HiddenStatesDataset("data")
    draft = spec_train.load_draft(run).double().train()
    head = TargetHead.from_dataset(dataset, torch.float64)
    document = dataset[0]
    batch = spec_train.collate(document, draft.columns(), torch.float64)
    found = draft.loss(batch, head)
    found.loss.backward()
    states, mask = batch.hidden["hidden.final"][0], batch.loss_mask[0]
    expected, shares = torch.zeros((), dtype=torch.float64), torch.tensor([1.0, 0.8, 0.64]).double()
    twin = spec_train.load_draft(run).double()
    for k in range(3):
        terms = []
        for t in range(len(mask) - 2 - k):
            if mask[t + 1 + k] and mask[t + 2 + k]:
                x = states[t]
                y = twin.lm_head[k](x + F.silu(twin.blocks[k](x)))
                p = head.logits(states[t + 1 + k]).softmax(-1)
                terms.append(-(p * y.log_softmax(-1)).sum())
        assert float(found.sums["supervised"][k]) == len(terms) > 0
        expected = expected + shares[k] / shares.sum() * torch.stack(terms).mean()
    expected.backward()
    torch.testing.assert_close(found.loss, expected)
    for one, two in zip(draft.parameters(), twin.parameters(), strict=True):
        if one.requires_grad:
            torch.testing.assert_close(one.grad, two.grad)


def test_it_drafts_alone_what_it_drafts_in_packs(run: Path) -> None:
    kinds.kind_named("medusa.py:Medusa")
    dataset, draft = HiddenStatesDataset("data"), spec_train.load_draft(run, dtype="float32")
    head, document = TargetHead.from_dataset(dataset), dataset[1]
    chains, states = draft.propose(document), document["hidden.final"].float()
    drafter, tokens = draft.drafter(head), document["input_ids"].tolist()
    for t in range(len(tokens) - 1):
        ids, _ = drafter.propose([tokens[t + 1]], states[None, t : t + 1], 3, Greedy())
        assert ids.tolist() == chains[t].tolist()


def test_the_commands_read_it_by_the_users_word(run: Path, capsys) -> None:
    assert main(["eval", "--draft", "medusa", "--data", "data", *CODE]) == 0
    said = capsys.readouterr()
    assert "acceptance length" in said.out and "--draft-code medusa.py:Medusa" in said.err
    decode = "eval --draft medusa --target target --prompts prompts.jsonl --max-new-tokens 12"
    assert main([*decode.split(), *CODE, "--json", "decoded.json"]) == 0
    assert "2/2" in capsys.readouterr().out  # lossless
    for page, draft in (("medusa", "medusa"), ("decoded.json", "medusa/best --target target")):
        assert main(["report", page]) == 0
        said = " ".join(capsys.readouterr().err.replace("\\", "").split())
        assert f"next: spec-train export --draft {draft} {' '.join(CODE)}" in said
    assert main(["doctor", "--draft", "medusa", "--fail-on", "never", *CODE]) == 0
    assert main(["export", "--draft", "medusa", *CODE]) == 0
    assert "does not support medusa drafts" in capsys.readouterr().out
    assert main(["export", "--draft", "medusa", "--format", "hf", "--out", "own", *CODE]) == 0
    assert main(["export", "--draft", "medusa", "--format", "vllm", "--out", "x", *CODE]) == 2
    assert main(["eval", "--draft", "own", "--data", "data", *CODE]) == 0


def test_a_run_alone_never_runs_its_code(run: Path, monkeypatch, capsys) -> None:
    unknown(monkeypatch)
    Path("medusa.py").write_text("raise SystemExit('the code ran')")
    for words in ("eval --draft medusa --data data", "export --draft medusa", "report medusa"):
        assert main(words.split()) == (0 if words.startswith("report") else 2)
    said = capsys.readouterr().err
    assert "--draft-code medusa.py:Medusa" in said and "If you trust that code" in said
    with pytest.raises(DraftError, match="register_draft"):
        spec_train.load_draft("medusa")
    assert not [name for name in sys.modules if name.startswith("draft_code_")]


def test_code_that_no_draft_was_read_with_is_named(run: Path, capsys) -> None:
    built_in = "fit eagle --data data --out eagle --steps 1 --batch-size 1 --seq-len 128"
    assert main([*built_in.split(), "--validation", "0", "--device", "cpu", *CODE]) == 0
    said = capsys.readouterr().err
    assert "warning[draft-code]: --draft-code medusa.py:Medusa: this command read no" in said
    assert main(["eval", "--draft", "eagle", "--data", "data", *CODE]) == 0
    assert "read no draft of that code" in capsys.readouterr().err
    assert main(["eval", "--draft", "medusa", "--data", "data", *CODE]) == 0
    assert "warning[draft-code]" not in capsys.readouterr().err


def test_other_code_than_a_draft_was_trained_with_is_named(
    run: Path, here: Path, monkeypatch, capsys
) -> None:
    shutil.copy(EXAMPLE, here / "changed.py")
    unknown(monkeypatch)
    code = ["--draft-code", "changed.py:Medusa"]
    assert main(["eval", "--draft", "medusa", "--data", "data", *code]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "trained as medusa.py:Medusa, and read as changed.py:Medusa" in said


def test_a_class_in_memory_is_known_once_it_is_registered(run: Path, monkeypatch) -> None:
    medusa = kinds.kind_named("medusa.py:Medusa").draft_class()
    unknown(monkeypatch)
    training = spec_train.Training(data="data", out="memory", steps=1, seq_len=128, batch_size=1)
    with pytest.raises(DraftError, match="register_draft"):
        spec_train.fit(training, medusa.options_class(heads=3))
    spec_train.register_draft(medusa)
    assert isinstance(spec_train.load_draft(run), medusa)
    assert spec_train.fit(training, medusa.options_class(heads=3)).finished


def test_init_from_brings_its_shape(run: Path) -> None:
    words = FIT.replace("--heads 3", "--steps 1").replace("--steps 4 ", "").split()
    again = ["fit", "medusa.py:Medusa", *words, "--out", "again", "--init-from", "medusa"]
    assert main(again) == 0 and main(again) == 0  # the second one: nothing is left to do
    assert spec_train.load_draft("again").config.heads == 3
    assert main([*again, "--heads", "2", "--out", "other"]) == 2


def test_search_compares_it_with_others(capsys) -> None:
    space = "--space draft=medusa.py:Medusa,eagle3,heads=2,ttt_steps=2"
    words = f"search --data data {space} --out found --steps 2 --batch-size 1 --seq-len 128"
    assert main([*words.split(), "--validation", "0.4", "--device", "cpu"]) == 0
    assert {p.name for p in Path("found").glob("arm-*")} == {"arm-01-medusa", "arm-02-eagle3"}


@pytest.mark.long
def test_search_starts_it_in_other_processes(capsys) -> None:
    words = "search --data data --space draft=medusa.py:Medusa,heads=2,3 --out two --steps 2"
    more = "--batch-size 1 --seq-len 128 --validation 0.4 --devices cpu,cpu"
    assert main([*words.split(), *more.split()]) == 0


def test_a_capture_is_made_for_it() -> None:
    words = "generate --target target --corpus chats.jsonl --device cpu --for medusa.py:Medusa"
    assert main([*words.split(), "--out", "for-medusa"]) == 2  # it is a command of spec-data
    from spec_data.cli import main as spec_data

    assert spec_data([*words.split(), "--out", "for-medusa"]) == 0
    manifest = HiddenStatesDataset("for-medusa").manifest
    assert manifest.layers == () and manifest.draft_layers == {"medusa": ()}
    assert spec_data([*words.split(), "--final", "supervised", "--out", "less"]) == 2


def test_a_package_declares_a_draft_by_an_entry_point(tmp_path, monkeypatch, capsys) -> None:
    info = tmp_path / "medusa_heads-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: medusa-heads\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[spec_train.drafts]\nmedusa = medusa_heads:Medusa\n")
    shutil.copy(EXAMPLE, tmp_path / "medusa_heads.py")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["fit", "--help"]) == 0
    assert "medusa-heads" in capsys.readouterr().out and "medusa_heads" not in sys.modules
    assert main(["fit", "medusa", *FIT.split(), "--out", "installed"]) == 0
    unknown(monkeypatch)
    assert spec_train.load_draft("installed").name == "medusa"  # installing it was the user's word


GOOD = EXAMPLE.read_text(encoding="utf-8")
FAULTS = {
    "no class": ("Medusa", "Heads", "there is no Medusa in it; its classes: "),
    "no import": ("import torch\n", "import torchh\n", "does not import: ModuleNotFoundError"),
    "no syntax": ("heads: int\n", "heads: int =\n", "does not import: line"),
    "no draft": ("class Medusa(HeadsDraft)", "class Medusa", "name a subclass of"),
    "a method": ("def at_depth", "def at_depths", "does not define at_depth"),
    "options": ("(LossOptions)", "", "options_class is no subclass of"),
    "frozen": ('@Parameter(name="*")\n@dataclass(frozen=True, kw_only=True)\nclass', "class",
               "MedusaOptions needs @dataclass"),
    "default": ("heads: Positive = 4", "heads: Positive", "options without a default: heads"),
    "rounds": ('str] = "heads"', 'str] = "tokens"', "has no tokens"),
    "ours": ('str] = "medusa"', 'str] = "eagle3"', "is one of spec-train"),
    "name": ('str] = "medusa"', 'str] = "Me Dusa"', "small letters"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS)
def test_what_is_no_draft_is_named(case: str, tmp_path: Path, monkeypatch, capsys) -> None:
    old, new, said = FAULTS[case]
    assert old in GOOD
    (tmp_path / "mine.py").write_text(GOOD.replace(old, new), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DraftError) as caught:
        kinds.kind_named("mine.py:Medusa")
    assert said in str(caught.value) and "mine.py" in str(caught.value)
    assert main(["fit", "mine.py:Medusa", "--data", "x", "--out", "y"]) == 2
    assert said in capsys.readouterr().err
    assert main(["fit", "mine.py", "--data", "x", "--out", "y"]) == 2
    assert (
        "mine.py: add the class of the draft in it, as in mine.py:NAME" in capsys.readouterr().err
    )


@pytest.mark.parametrize("name", ["none.py:Medusa", "no.such.module:Medusa", "nowhere:Medusa"])
def test_code_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(MissingError, match=name.partition(":")[0].replace(".", r"\.")):
        kinds.kind_named(name)


def test_names_that_are_none() -> None:
    for name in ("medusa.py:", ":Medusa", "medusa.py:A b"):
        with pytest.raises(DraftError, match=r"FILE\.py:NAME"):
            kinds.kind_named(name)
    with pytest.raises(DraftError, match="did you mean eagle3"):
        kinds.kind_named("eagel3")
    with pytest.raises(DraftError, match="is no kind of draft"):
        spec_train.register_draft(Draft)
