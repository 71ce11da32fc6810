"""The figures of README.md are those of the code, of docs/performance.md and of docs/evidence."""

import re
from pathlib import Path

import pytest

from spec_data.models.families import TARGETS
from spec_data.shards.layer_ids import RECIPES, recipe_layers
from tests.test_failures_page import KNOWN, tables

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
WORDS = " ".join(TEXT.split())
TARGETS_OF_ROWS = {
    "Qwen3-8B, Llama-3.1-8B": [(4096, 36), (4096, 32)],
    "gpt-oss-20b": [(2880, 24)],
    "Llama-3.3-70B": [(8192, 80)],
}
"""Hidden size and blocks of the public configs."""


def test_the_quickstarts_screen_is_the_recorded_one():
    recorded = (ROOT / "docs" / "evidence" / "quickstart.txt").read_text(encoding="utf-8")
    assert f"```\n{recorded}```\n" in TEXT


def test_what_doctor_prints_is_that_of_its_page():
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^FINDING.*?(?=^```)", TEXT, re.S | re.M)
    assert shown in page


def test_counts_are_those_of_the_code():
    assert f"[{KNOWN} known silent failures]" in WORDS
    assert f"{len(TARGETS)} target architectures are registered" in WORDS


def test_bytes_and_lengths_are_those_of_the_measured_tables():
    (columns, *size), (_, *cost) = (
        next(table for table in tables("performance.md") if name in table[0])
        for name in ("shards, of `bf16`", "real length")
    )
    start = next(i for i, row in enumerate(size) if row[0].startswith("SmolLM2"))
    row = next(row for row in size[start:] if row[0] == "`default`")
    share = f"{float(row[columns.index('shards, of `bf16`')].strip('*')):.2f}"
    assert f"takes {share} of the bytes of bf16 on SmolLM2-135M-Instruct" in WORDS
    assert len(re.findall(rf"(?<!\+){share}", WORDS)) == WORDS.count(f"{share} of") == 2
    start = next(i for i, row in enumerate(cost) if row[0].startswith("SmolLM2"))
    exact, row = cost[start], next(row for row in cost[start:] if row[1] == "`default`")
    found = f"reached length {float(exact[-1]):.2f} ({row[-1]} of that on bf16, three seeds;"
    assert found in WORDS and row[2] == "3"


@pytest.mark.parametrize("name", TARGETS_OF_ROWS)
def test_bytes_of_a_capture_are_those_of_the_recipes(name):
    """bf16 values of the layers and the final state; the drafts of a column read equally many."""
    cells = next(
        row for header, *rows in readme_tables() for row in rows if row[0].startswith(name)
    )
    for width, blocks in TARGETS_OF_ROWS[name]:
        layers = {draft: recipe_layers(draft, blocks) or () for draft in RECIPES}
        counts = [len(layers[draft]) for draft in ("eagle", "eagle3", "dflash2")]
        counts.append(len(set().union(*layers.values())))
        for count, cell in zip(counts, cells[1:], strict=True):
            kilobytes, terabytes = map(float, re.findall(r"[\d.]+", cell))
            exact = 2 * width * (count + 1) / 1000
            assert kilobytes == pytest.approx(exact, rel=0.025), (cell, exact)
            assert terabytes == pytest.approx(exact / 10, rel=0.025), (cell, exact)


def readme_tables() -> list[list[list[str]]]:
    return tables("../README.md")
