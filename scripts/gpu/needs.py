"""Which packages `prove_gpu.py` lacks, and what to carry. Imports nothing but Python's own."""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

NEEDED = {
    "torch": "2.9",
    "transformers": "5.10",
    "tokenizers": "0",
    "safetensors": "0.6",
    "numpy": "1.26",
    "pyarrow": "20",
    "accelerate": "1.10",
    "datasets": "5.0",
    "dill": "0.3",
    "multiprocess": "0.70",
    "pandas": "1",
    "fsspec": "2023.1",
    "filelock": "3.31",
    "tqdm": "4.66",
    "xxhash": "3.4",
    "jinja2": "3.1",
    "yaml": "6",
}
"""Modules and least versions: our dependencies, and those of `datasets` that images lack."""
COMPILED = ("torch", "tokenizers", "safetensors", "numpy", "pyarrow", "pandas", "xxhash", "yaml")
_PACKAGES = {"yaml": "PyYAML", "jinja2": "Jinja2"}


def missing_packages() -> str:
    """Return a message that names missing or old packages and how to bring them; "" if none."""
    needs = [(name, least) for name, least in NEEDED.items() if _lacks(name, least)]
    lacking = [f"{_package(name)}>={least}" for name, least in needs]
    if not lacking:
        return ""
    plain = [need for need in lacking if need.partition(">=")[0].lower() not in COMPILED]
    built = [need for need in lacking if need not in plain]
    lines = [f"packages are missing or too old: {', '.join(lacking)}"]
    if plain:
        names = " ".join(f"'{need}'" for need in plain)
        lines.append(
            "carry the pure-Python ones in a folder, made on a machine with a package index:\n"
            f"  pip install --no-deps --target carried {names}\n"
            "and set PYTHONPATH=carried"
        )
    if built:
        lines.append(
            f"{', '.join(built)}: compiled for one Python version and machine type; carry wheels "
            "made for those of this machine"
        )
    return "\n".join(lines)


def _package(module: str) -> str:
    return _PACKAGES.get(module, module)


def _lacks(module: str, least: str) -> bool:
    """Whether a module is absent or older than `least`."""
    if find_spec(module) is None:
        return True
    try:
        found = version(_package(module))
    except PackageNotFoundError:  # a copied folder without metadata
        return False
    return _numbers(found) < _numbers(least)


def _numbers(text: str) -> list[int]:
    """Return the leading numbers of a version: 2.11.0+cu130 is [2, 11, 0]."""
    numbers = []
    for part in text.partition("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return numbers
