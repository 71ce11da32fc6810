"""Characters of strangers that act on a terminal are shown as escapes, wherever text is shown."""

import json
import logging
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from spec_data import cli
from spec_data.pages.page import Note, Page, Section, Viewer, page_bytes
from spec_data.shards.errors import an
from spec_data.terminal.command import Result
from spec_data.terminal.console import run_cli, start_log_file
from spec_data.terminal.printable import one_line, printable, printable_json
from spec_data.terminal.progress import Bar
from spec_data.terminal.text_table import text_table
from spec_train import cli as train_cli
from spec_train.options.kinds import DRAFT_OPTIONS
from tests.spec_data.runs import flags, options
from tests.terminal_tools import environment

ACTING = ["\x1b", "\x07", "\r", "\x00", "\x7f", "\x9b", "\u202e", "\u2066", "\u2028", "\ud800"]
NASTY = "a\x1b[2J\x07\r\x00b\x9bc\u202e"
FINE = "é 東京\u3000\u00a0👩\u200d🔬\n\tx"


def assert_clean(text: str) -> None:
    """No character of a text acts on a terminal."""
    assert not [c for c in ACTING if c in text], text


def test_what_acts_is_an_escape_and_all_else_stays():
    for acting in ACTING:
        assert_clean(printable(f"a{acting}b"))
        assert json.loads(printable_json(json.dumps(acting, ensure_ascii=False))) == acting
        assert_clean(printable_json(json.dumps(acting, ensure_ascii=False)))
    assert printable(NASTY) == r"a\x1b[2J\x07\r\x00b\x9bc\u202e"
    assert printable(FINE) == FINE
    assert one_line("a\nb\tc") == r"a\nb\tc"


def test_bars_and_cells_of_tables_stay_on_their_line():
    table = text_table([("a\nerror: b", NASTY, "x")], "<")
    assert_clean(table)
    assert table.count("\n") == 0
    meter = Bar.format_meter(1, 2, 1.0, ncols=70, prefix="a\nb\x1b[2J", unit="rows")
    assert_clean(meter)
    assert "\n" not in meter


def test_results_errors_log_lines_and_files_of_both_programs(tmp_path, capsys):
    class Odd(Result):
        def __str__(self) -> str:
            return f"first {NASTY}\nsecond"

    def work() -> int:
        file = start_log_file(tmp_path)
        assert file is not None
        logging.getLogger("spec_data.x").warning("warning[x]: row %s\nsecond", NASTY)
        raise RuntimeError(f"of torch {NASTY}")

    assert run_cli(work, Namespace(quiet=False, verbose=False, debug=False)) == 1
    error = capsys.readouterr().err
    assert "error: RuntimeError: of torch a\\x1b[2J" in error
    assert "\nsecond" in error, "a message of two lines keeps them"
    written = Path(f"{tmp_path}.log").read_text()
    for text in (error, written, Odd()._repr_html_()):
        assert_clean(text)
        assert text.count("\\x1b[2J") == (1 if text.startswith("<pre>") else 2)


def test_a_traceback_of_debug_and_a_warning_of_a_library():
    code = (
        "from argparse import Namespace; from spec_data.terminal.console import run_cli\n"
        "import warnings\n"
        "def work():\n warnings.warn('odd \\x1b[2J'); raise RuntimeError('torch \\x1b[2J')\n"
        "run_cli(work, Namespace(quiet=False, verbose=False, debug=True))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment()
    )
    assert "Traceback" in done.stderr
    assert "torch \\x1b[2J" in done.stderr
    assert "odd \\x1b[2J" in done.stderr
    assert_clean(done.stderr)


def test_pages():
    page = Page(
        title=NASTY,
        kind="Run",
        lead=f"a {NASTY}",
        figures=[("n", NASTY, "text")],
        sections=[Section(title="s", parts=[Note(text=NASTY), Viewer(data={"texts": [NASTY]})])],
    )
    html = page_bytes(page).decode()
    assert_clean(html)
    assert html.count(r"a\x1b[2J") == 5
    assert r'["a\u001b[2J\u0007\r\u0000b\u009bc\u202e"]' in html


@pytest.mark.parametrize("key", ["model_type", "architectures", "torch_dtype"])
def test_a_config_of_a_stranger(target, corpus, tmp_path, capfd, key):
    odd = tmp_path / "odd"
    shutil.copytree(target, odd)
    config = json.loads((odd / "config.json").read_text())
    config[key] = [NASTY] if key == "architectures" else NASTY
    (odd / "config.json").write_text(json.dumps(config))
    failed = cli.main(["generate", *flags(options(odd, corpus, tmp_path / "out")), "--dry-run"])
    said = capfd.readouterr()
    assert not failed or "x1b[2J" in said.err
    assert_clean(said.out + said.err)


def test_names_and_texts_of_a_corpus_in_every_command(target, tmp_path, capfd):
    """A file name with an escape sequence and a line end, ids and answers with controls."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": f"answer {NASTY}"}]
    rows = [{"messages": turns + turns[:1] * (n % 2) + turns[1:] * (n % 2)} for n in range(9)]
    odd = [{"id": NASTY, NASTY: 1, **row} for row in rows] + [{"messages": NASTY}]
    (folder / "chats\x1b[2J\nerror: x.jsonl").write_text("\n".join(map(json.dumps, odd)))
    (folder / "plain.jsonl").write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "out"
    assert cli.main(["generate", *flags(options(target, folder, out)), "--verbose"]) == 0
    said = capfd.readouterr()
    texts = [said.out + said.err, Path(f"{out}.log").read_text()]
    assert "chats\\x1b[2J\\nerror: x.jsonl" in texts[0]
    assert "chats\\x1b[2J\\nerror: x.jsonl" in texts[1]
    for line in (
        f"inspect {out} --verbose",
        f"inspect {out} --document 0",
        f"inspect {out} --json",
        f"report {out} --out {tmp_path}/page.html",
        f"status {out}",
        f"verify {out}",
    ):
        cli.main(line.split())
        said = capfd.readouterr()
        texts += [said.out + said.err]
    assert any("\\x1b[2J" in text for text in texts[2:])
    page = (tmp_path / "page.html").read_text()
    assert "chats\\x1b[2J\\nerror: x.jsonl" in page
    for text in [*texts, page]:
        assert_clean(text)
        assert "\nerror: x" not in text


def test_a_draft_of_a_stranger(tmp_path, capfd):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [NASTY], "model_type": "x"}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    for line in (f"export --draft {tmp_path}", f"doctor {tmp_path}", f"eval --draft {tmp_path}"):
        assert train_cli.main(line.split())
        said = capfd.readouterr()
        assert_clean(said.out + said.err)


def test_a_name_has_the_article_with_which_it_is_spoken():
    spoken = "an eagle,an eagle3,a peagle,a dspark,a dflash,a domino,a lilicorr,an xpress,an mtp"
    assert {an(kind) for kind in DRAFT_OPTIONS if kind != "dflash2"} == set(spoken.split(","))
    others = "an int,a str,a dict,an OrderedDict,a list,an MTPBlock,a Tensor,a Qwen3Config,a union"
    for text in f"{others},an EAGLE,a DSpark,a one_of,an Ernie4_5ForCausalLM".split(","):
        assert an(text.partition(" ")[2]) == text


def test_no_message_has_an_article_before_a_name_that_varies():
    """`an(name)` is the one place that knows it."""
    root = Path(__file__).parents[2]
    files = [f for package in ("spec_data", "spec_train") for f in (root / package).rglob("*.py")]
    found = [
        f"{file.relative_to(root)}: {line.strip()}"
        for file in files
        for line in file.read_text().splitlines()
        if re.search(r"\b[Aa]n? \{(?!kind\} table of options)", line)
    ]
    assert not found
