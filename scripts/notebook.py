"""Run docs/examples/first_hour.ipynb on the small target of make_target.py, and store its outputs.

    pip install nbconvert ipykernel matplotlib
    python scripts/make_target.py --out DIR/target
    python scripts/notebook.py DIR

Bars and log lines (stderr) are left out. It takes about a minute on two idle CPU cores.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

NOTEBOOK = Path(__file__).parents[1] / "docs" / "examples" / "first_hour.ipynb"


def main() -> None:
    """Execute the notebook in a folder with a target, and write it back."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder with target/; all results go there")
    folder: Path = parser.parse_args().folder
    (folder / NOTEBOOK.name).write_bytes(NOTEBOOK.read_bytes())
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", "--inplace"]
    subprocess.run([*command, NOTEBOOK.name], cwd=folder, check=True)
    notebook = json.loads((folder / NOTEBOOK.name).read_text(encoding="utf-8"))
    for number, cell in enumerate(notebook["cells"]):
        cell["id"] = f"c{number:02d}"
        cell["metadata"].pop("execution", None)
        if cell["cell_type"] == "code":
            cell["outputs"] = [o for o in cell["outputs"] if o.get("name") != "stderr"]
    text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    NOTEBOOK.write_text(text, encoding="utf-8")
    print(f"wrote {NOTEBOOK}")


if __name__ == "__main__":
    main()
