"""Read the commands and options of other trainers' released packages, for docs/moving.md.

The packages are installed without their dependencies into a temporary folder, beside those of this
environment, and asked: `speculators COMMAND --help`, and SpecForge's class of config files. Of NeMo
AutoModel, whose recipes have no such class, the sources are searched for the keys that they read,
and for the names of classes and functions; of ModelOpt, for the fields of its recipes. What is
found is written to tests/peer_options.json; a test compares docs/moving.md with it. For another
release, change `PACKAGES`, run this, and correct the page where the test says so.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

RECORD = Path(__file__).parents[1] / "tests" / "peer_options.json"
PACKAGES = {
    "SpecForge": "specforge==0.2.0",
    "speculators": "speculators==0.9.0",
    "NeMo AutoModel": "nemo-automodel==0.7.0",
    "ModelOpt": "nvidia-modelopt==0.47.0",
}
NEEDED = (
    "hs-connectors==0.9.0",
    "loguru",
    "pydantic-settings",
    "python-dotenv",
    "httpx",
    "httpcore",
    "h11",
)
"""What the commands import before they print their help, and this environment may lack."""

COMMANDS = ("prepare-data", "generate-offline-data", "regenerate-responses", "train", "convert")
KEYS = """
import json, typing
from specforge.cli import main
from specforge.config import Config

def keys(model, prefix=""):
    for name, field in model.model_fields.items():
        parts = [field.annotation, *typing.get_args(field.annotation)]
        inner = [part for part in parts if hasattr(part, "model_fields")]
        for part in inner:
            yield from keys(part, prefix + name + ".")
        if not inner:
            yield prefix + name

print(json.dumps(sorted(set(keys(Config)))))
"""


_SOURCES = ("components/speculative", "recipes/llm")
_NAMES = re.compile(
    r"recipe_cfg\.get\(\s*[\"'](\w+)[\"']|recipe_cfg\.(\w+)|cfg\.get\([\"']([\w.]+)[\"']"
    r"|^\s*(?:class|def) (\w+)",
    re.M,
)


_RECIPES = ("config.py", "plugins/hf_training_args.py")
_FIELD = re.compile(r"^    (\w+): ", re.M)


def fields_of_recipes(package: Path) -> set[str]:
    """Return the keys of ModelOpt's recipes for drafts."""
    texts = [(package / "torch/speculative" / name).read_text() for name in _RECIPES]
    return {name for text in texts for name in _FIELD.findall(text)}


def names_in_sources(package: Path) -> set[str]:
    """Return the keys, classes and functions in AutoModel's sources about drafts."""
    texts = [f.read_text() for place in _SOURCES for f in (package / place).rglob("*.py")]
    found = {name for text in texts for names in _NAMES.findall(text) for name in names}
    return {name for name in found if name and not name.startswith("_")}


def main() -> None:
    """Write the record."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
        subprocess.run([*pip, *PACKAGES.values(), *NEEDED], check=True)
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200"}

        def printed(*words: str) -> str:
            return subprocess.run(
                [sys.executable, *words], env=environment, check=True, stdout=subprocess.PIPE
            ).stdout.decode()

        names = {"SpecForge": set(json.loads(printed("-c", KEYS))), "speculators": set()}
        names["NeMo AutoModel"] = names_in_sources(Path(folder) / "nemo_automodel")
        names["ModelOpt"] = fields_of_recipes(Path(folder) / "modelopt")
        of_specforge = (
            "import sys; sys.argv[0] = 'specforge'; from specforge.cli import main; main()"
        )
        for command in ("train", "export", "benchmark"):
            text = printed("-c", of_specforge, command, "--help")
            names["SpecForge"] |= {f"specforge {command}", *re.findall(r"--[a-z][a-z0-9-]+", text)}
        for command in COMMANDS:
            text = printed("-m", "speculators", command, "--help")
            names["speculators"] |= {f"speculators {command}"}
            names["speculators"] |= {*re.findall(r"--[a-z][a-z0-9-]+", text)}
    record = {
        peer: {"package": package, "names": sorted(names[peer])}
        for peer, package in PACKAGES.items()
    }
    lines = [f' "{peer}": {json.dumps(facts)}' for peer, facts in record.items()]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"wrote {RECORD}: " + ", ".join(f"{p} {len(f['names'])}" for p, f in record.items()))


if __name__ == "__main__":
    main()
