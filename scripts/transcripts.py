"""What the commands say: forty of them on a small target, as text files that a diff shows.

    python scripts/transcripts.py             # write tests/transcripts/*.txt
    python scripts/transcripts.py --out DIR   # write them elsewhere, to compare

Results, warnings, errors and the next command of successes and mistakes, with numbers, sums, sizes
and times blanked: they depend on the machine. A text may change on purpose; then run this, and look
at the diff: is something no longer said? All commands run in this one process, in a folder of their
own, so the order matters. Bars are shown as their last lines.
"""

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "tests" / "transcripts"
TARGET = "--target target --device cpu"
MADE = f"{TARGET} --corpus chats.jsonl --layers 0,2,4"
ANSWER = f"{TARGET} --corpus chats.jsonl --limit 3 --max-new-tokens 4"
ODD = "--target deaf --corpus odd --layers 0,2,4 --device cpu"
COMMON = "--seq-len 128 --batch-size 1 --validation 0.4 --device cpu"
FIT = f"{COMMON} --ttt-steps 2 --draft-vocab-size 64 --steps 4 --eval-every 2"
BLOCK = f"{COMMON} --layers 0,2 --block-size 3 --num-layers 1 --mask-token-id 3 --steps 2"
STILL = "--init-from exported --lr 1e-30"
DECODE = f"{TARGET} --prompts prompts.jsonl --max-new-tokens 6"
SEARCH = f"{COMMON} --space draft=eagle3,ttt_steps=1,2 --steps 4"

# -- what the commands are about --------------------------------------------------------------


def odd_corpus() -> None:
    """Write chats with what is counted, and a target whose template does not know a role.

    Bad rows, a column that is not used, files of another split and of no kind that is read.
    """
    rows = Path("chats.jsonl").read_text(encoding="utf-8").splitlines()
    Path("odd").mkdir()
    first = [json.dumps(json.loads(row) | {"topic": "none"}) for row in rows]
    told = {"role": "developer", "content": "be brief"}
    for number in range(3):
        row = json.loads(rows[number])
        first.append(json.dumps({"messages": [told, *row["messages"]]}))
    first += ['{"messages": [}', '{"query": "a"}', first[0]]
    Path("odd/train.jsonl").write_text("\n".join(first), encoding="utf-8")
    Path("odd/test.jsonl").write_text(rows[0], encoding="utf-8")
    Path("odd/table.jsonl.xz").write_text("x", encoding="utf-8")
    shutil.copytree("target", "deaf")
    file = Path("deaf/chat_template.jinja")
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("messages %}", "messages if message.role != 'developer' %}"))


def damaged() -> None:
    """Copy the dataset, and change a byte of a shard."""
    shutil.copytree("data", "damaged")
    shard = next(Path("damaged/shards").iterdir())
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


def edited() -> None:
    """Copy an export, and change a field of its config."""
    shutil.copytree("exported", "edited")
    config = json.loads(Path("edited/config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = 128
    Path("edited/config.json").write_text(json.dumps(config))


def other_evaluation() -> None:
    """Copy an evaluation, as if it had been sampled."""
    report = json.loads(Path("real.json").read_text(encoding="utf-8"))
    Path("sampled.json").write_text(json.dumps(report | {"temperature": 1.0}))


def config_files() -> None:
    """Write options as files: good ones, and one with a key that no command has."""
    Path("fit.yaml").write_text(
        "data: data\nout: run\npreset: smoke\nseq-len: 128\nsteps: 4\nvalidation: 0.4\n"
    )
    Path("typo.yaml").write_text("data: data\nout: run\nbatch-sise: 1\n")


def notes() -> None:
    """Make a folder that holds something else."""
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("mine")


Case = tuple[str, str] | tuple[str, str, Callable[[], None]]
CASES: list[Case] = [
    # successes, in the order in which a user types them
    ("estimate", f"spec-data estimate {MADE} --out data"),
    ("generate", f"spec-data generate {MADE} --out data"),
    ("generate-again", f"spec-data generate {MADE} --out data"),
    ("generate-verbose", f"spec-data generate {MADE} --out exact --codec bf16 --limit 6 --verbose"),
    ("status", "spec-data status data"),
    ("inspect", "spec-data inspect data"),
    ("inspect-document", "spec-data inspect data --doc 0"),
    ("verify", "spec-data verify data --target target --samples 4 --device cpu"),
    ("report-dataset", "spec-data report data --out data.html"),
    ("regenerate", f"spec-data regenerate {ANSWER} --out own.jsonl"),
    ("select", "spec-data select data short --where 'length < 60' --mask last-turn"),
    ("merge", "spec-data merge data exact --out both"),
    ("copy", "spec-data copy both copied"),
    ("recode", "spec-data recode exact recoded --codec default"),
    ("export-dataset", "spec-data export --to specforge exact --out stored"),
    ("convert", f"spec-data convert --from specforge stored {TARGET} --out converted"),
    ("fit-dry-run", f"spec-train fit eagle3 --data data --out run {FIT} --dry-run"),
    ("fit", f"spec-train fit eagle3 --data data --out run {FIT}"),
    ("fit-verbose", f"spec-train fit dspark --data data --out block {BLOCK} --verbose"),
    ("fit-config", "spec-train fit eagle3 --config fit.yaml --dry-run", config_files),
    ("eval-data", "spec-train eval --draft run --data data --device cpu"),
    ("eval-target", f"spec-train eval --draft run {DECODE} --json real.json"),
    ("compare", "spec-train compare real.json sampled.json", other_evaluation),
    ("export-check", "spec-train export --draft run --target target"),
    ("export", "spec-train export --draft run --format vllm --target target --out exported"),
    ("doctor", "spec-train doctor --draft exported --data data --device cpu --documents 16"),
    ("doctor-files", "spec-train doctor --draft exported --target target --documents 0"),
    ("report-runs", "spec-train report run real.json --out runs.html"),
    ("search-dry-run", f"spec-train search --data data --out found {SEARCH} --dry-run"),
    ("search", f"spec-train search --data data --out found {SEARCH}"),
    ("help-spec-data", "spec-data --help"),
    ("help-generate", "spec-data generate -h"),
    ("help-fit", "spec-train fit eagle3 -h"),
    ("help-eval", "spec-train eval --help-all"),
    # warnings
    ("warn-corpus", f"spec-data generate {ODD} --out counted --max-bad-rows 4", odd_corpus),
    ("warn-init-from", f"spec-train fit eagle3 --data exact --out more {FIT} {STILL}"),
    ("warn-edited", "spec-train eval --draft edited --accept-edited --data data", edited),
    # mistakes
    ("wrong-command", "spec-data generat --target target"),
    ("wrong-option", f"spec-data generate {MADE} --out data --batch-token 5"),
    ("wrong-value", f"spec-data generate {MADE} --out NEW --max-length 0"),
    (
        "wrong-layers",
        "spec-data generate --target target --corpus chats.jsonl --out NEW"
        " --layers 0,9 --device cpu",
    ),
    ("missing-target", "spec-data generate --target targt --corpus chats.jsonl --out NEW"),
    ("missing-corpus", "spec-data generate --target target --corpus chat.jsonl --out NEW"),
    ("bad-rows", f"spec-data generate {ODD} --out NEW"),
    ("on-policy-refused", f"spec-data generate {MADE} --out NEW --on-policy"),
    ("changed-settings", f"spec-data generate {MADE} --out data --max-length 64"),
    ("other-files", f"spec-data generate {MADE} --out mine", notes),
    ("regenerate-changed", f"spec-data regenerate {ANSWER} --out own.jsonl --temperature 1"),
    ("verify-damaged", "spec-data verify damaged --device cpu", damaged),
    ("select-condition", "spec-data select data NEW --where 'lenght < 60'"),
    ("join-other", "spec-data join data data --out NEW"),
    ("push-nothing", "spec-data push mine me/states --dry-run"),
    ("pull-name", "spec-data pull a/b/c NEW"),
    ("convert-other", f"spec-data convert --from speculators mine {TARGET} --out NEW"),
    ("fit-no-dataset", "spec-train fit eagle3 --data mine --out NEW"),
    ("fit-no-block", "spec-train fit mtp --data data --out NEW"),
    ("fit-layers", "spec-train fit eagle3 --data data --out NEW --layers 1,3"),
    ("fit-config-typo", "spec-train fit eagle3 --config typo.yaml"),
    ("fit-changed", f"spec-train fit eagle3 --data data --out run {FIT} --lr 0.1"),
    ("eval-nothing", "spec-train eval --draft run"),
    ("eval-edited", "spec-train eval --draft edited --data data"),
    ("eval-damaged", "spec-train eval --draft run --data damaged --device cpu --split all"),
    ("export-refused", "spec-train export --draft run --format deepspec --out NEW"),
    ("search-axis", "spec-train search --data data --out found --space dratf=eagle3"),
    ("vectors-none", "spec-train vectors --check engine.jsonl --out nothing"),
]

# -- what is blanked --------------------------------------------------------------------------

_wrap = textwrap.TextWrapper.wrap  # before `without_width`
_HASH = re.compile(r"\b(?:sha256:)?(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{8,64}\b")
_NUMBER = r"(?<![\w-])[-+]?\d+(?:,\d{3})*(?:\.\d+)*(?:e[-+]?\d+)?"
_BAR = re.compile(r"^(\w+: # of # ?\w* \(#%\)), .* elapsed.*$", re.M)
_OF_LIBRARIES = re.compile(r"(from the Hub|name of a repository): .*")
_TIME = re.compile(r"(?:# h )?# (?:s|ms|min|seconds?|minutes?|hours?)\b")
_SIZE = re.compile(r"# (?:bytes?|kB|MB|GB|TB)\b")


def fold(words: str, indent: str) -> list[str]:
    """Return a line as lines of 100 columns, so that a diff shows what changed in it."""
    wrapper = textwrap.TextWrapper(
        90, initial_indent=indent, subsequent_indent=indent + "    ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return _wrap(wrapper, words) or [""]


def blanked(text: str, folder: Path) -> str:
    """Return a text without what depends on the machine."""
    for path, name in ((folder, "DIR"), (ROOT, "REPOSITORY"), (Path(sys.prefix), "ENVIRONMENT")):
        text = text.replace(str(path.resolve()), name).replace(str(path), name)
    text = _OF_LIBRARIES.sub(r"\1: WORDS OF A LIBRARY", text)
    text = re.sub(_NUMBER, "#", _HASH.sub("HASH", text))
    text = re.sub(r"#(?::#)+", "TIME", _SIZE.sub("SIZE", _TIME.sub("TIME", text)))
    text = re.sub(r"^# +█.*\n(?:# +█.*\n|    .*\n)*", "# CHART\n", text, flags=re.M)
    text, lines = _BAR.sub(r"\1", text), []
    for line in text.splitlines():
        indent = "  " if line.startswith("  ") else ""
        words = re.sub(r" {2,}", "  ", line.strip())
        lines += fold(words, indent)
    return "\n".join(lines) + "\n" if lines else ""


# -- running ----------------------------------------------------------------------------------


def without_width() -> None:
    """Break no line: where it breaks depends on the length of numbers."""
    import spec_data.terminal
    from spec_data.terminal import progress

    spec_data.terminal.WIDTH = 1 << 20  # before other modules read it
    progress.LINE_SECONDS = 1e9  # no line about a bar but its last one

    def wide(self: textwrap.TextWrapper, text: str) -> list[str]:
        self.width = 1 << 20 if self.width >= 60 else self.width  # those of whole lines
        return _wrap(self, text)

    textwrap.TextWrapper.wrap = wide  # type: ignore[method-assign]


def said(words: list[str]) -> tuple[int, str, str]:
    """Run a command in this process; return exit code, stdout and stderr."""
    import spec_data.cli
    import spec_train.cli

    main = {"spec-data": spec_data.cli.main, "spec-train": spec_train.cli.main}[words[0]]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(words[1:])
        except SystemExit as stopped:
            code = int(stopped.code or 0)
    return code, out.getvalue(), err.getvalue()


def write_all(out: Path, folder: Path) -> None:
    """Run every case in `folder`, and write what it says to `out`."""
    sys.path.insert(0, str(ROOT))
    without_width()
    from tests.api_workspace import make_workspace

    make_workspace(folder, fitted=False)
    os.chdir(folder)
    out.mkdir(parents=True, exist_ok=True)
    for name, command, *before in CASES:
        command = command.replace("NEW", name)
        for prepare in before:
            prepare()
        code, result, rest = said(shlex.split(command))
        parts = [f"$ {command}\n"]
        for title, text in (("stdout", result), ("stderr", rest)):
            if text.strip():
                shown = text if name.startswith("help-") else blanked(text, folder)
                parts.append(f"--- {title}\n{shown}")
        parts.append(f"--- exit code {code}\n")
        (out / f"{name}.txt").write_text("".join(parts), encoding="utf-8")


def main() -> None:
    """Write the transcripts, and remove those of no case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR")
    out = parser.parse_args().out.resolve()
    with tempfile.TemporaryDirectory(prefix="transcripts-") as folder:
        write_all(out, Path(folder))
    for file in out.glob("*.txt"):
        if file.stem not in {name for name, *_ in CASES}:
            file.unlink()


if __name__ == "__main__":
    main()
