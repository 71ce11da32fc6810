"""The notebook of the first hour: every cell runs, in order, and its plots have what they say."""

import json
from pathlib import Path

import pytest

from tests.api_workspace import make_workspace

NOTEBOOK = Path(__file__).parents[2] / "docs" / "examples" / "first_hour.ipynb"
PARAMETERS = """
TARGET, CORPUS, PROMPTS = "target", "chats.jsonl", "prompts.jsonl"
DRAFT = {"ttt_steps": 4, "draft_vocab_size": 64}
DOCUMENTS, NEW_TOKENS, LAYERS = 12, 16, [0, 2, 4]
GENERATE = {"device": "cpu"}
FIT = {
    "steps": 6, "eval_every": 3, "batch_size": 1, "seq_len": 128,
    "validation": 0.4, "device": "cpu",
}
"""


@pytest.mark.long
def test_every_cell_runs(tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    make_workspace(tmp_path, fitted=False)
    monkeypatch.chdir(tmp_path)
    shown = []
    monkeypatch.setattr(pyplot, "show", lambda: shown.append(pyplot.gcf()))
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    tagged = [c for c in cells if "parameters" in c["metadata"].get("tags", ())]
    assert ["".join(cell["source"]) for cell in tagged] == [code[0]]
    defined = {line.split(" = ")[0] for line in code[0].splitlines() if " = " in line}
    names: dict = {}
    exec(PARAMETERS, names)
    assert defined == names.keys() - {"__builtins__"}
    for number, text in enumerate(code[1:], 1):
        exec(compile(text, f"cell {number}", "exec"), names)
    assert len(shown) == 3
    for figure in shown:
        assert all(axis.get_xlabel() and axis.get_ylabel() for axis in figure.axes)
    hist, losses, rates = (figure.axes for figure in shown)
    # an answer that is written as token ids is a document of its own
    assert sum(bar.get_height() for bar in hist[0].patches) == len(names["ds"]) >= 12
    assert [list(line.get_xdata()) for line in losses[1].lines][1] == [0, 3, 6]
    assert len(rates[0].patches) == names["real"].draft_tokens == 4
    assert names["real"].decoding.identical == names["real"].decoding.responses
    assert (tmp_path / "draft" / "README.md").is_file()
    pyplot.close("all")


def test_outputs_of_every_cell_are_stored():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    kinds = [output["output_type"] for output in outputs]
    assert kinds.count("display_data") == 3 and "error" not in kinds
    for cell in code:
        shows = any(word in "".join(cell["source"]) for word in ("print(", "plt.show("))
        assert bool(cell["outputs"]) == shows
