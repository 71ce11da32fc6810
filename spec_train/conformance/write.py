"""The directory of vectors: targets, drafts in their published forms, expected numbers, README."""

import dataclasses
import importlib.resources
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from spec_data.shards.errors import ConfigError
from spec_data.shards.file_system import link_or_copy
from spec_data.shards.files import atomic_write, dump_json, remove_dead_of, write_atomically
from spec_data.terminal.command import Result
from spec_data.terminal.paths import make_parent_of_new
from spec_data.terminal.progress import progress
from spec_train.conformance.expected import OUTPUT, Decoded, Vector, make_vector
from spec_train.conformance.recipes import RECIPES
from spec_train.conformance.target import BLOCK, INDEX, make_target
from spec_train.drafts.draft import Draft
from spec_train.drafts.kind_vectors import Reads
from spec_train.formats.draft_files import WEIGHTS, write_files
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.target_facts import TargetFacts, read_target
from spec_train.formats.write import write_form

EXPECTED, STATES = "expected.json", "expected.safetensors"
_LOGITS = 4
"""Verification steps whose logits are written."""


@dataclass(frozen=True)
class WrittenVectors(Result):
    """What was written."""

    out: Path
    vectors: dict[str, int]  # the number of mistakes of each
    smallest_gap: float
    bytes: int
    next_command: Sequence[str] = field(default=(), repr=False)

    def __str__(self) -> str:
        return (
            f"{self.out}: {len(self.vectors)} vectors, {sum(self.vectors.values())} mistakes with "
            f"their numbers, {self.bytes / 1e6:.1f} MB\n"
            f"smallest gap  {self.smallest_gap:.4f} between the two best tokens of a choice\n"
            f"how to run them: {self.out / 'README.md'}"
        )


def write_vectors(out: Path, only: list[str]) -> WrittenVectors:
    """Write the vectors named in `only`, or all, to a new directory.

    Raises:
        ConfigError: `out` exists and is not empty, or no vector has such a name.
    """
    names = [recipe.name for recipe in RECIPES]
    if unknown := sorted(set(only) - set(names)):
        raise ConfigError(f"--only {', '.join(unknown)}: no such vector; known: {', '.join(names)}")
    make_parent_of_new("--out", out)
    recipes = [recipe for recipe in RECIPES if not only or recipe.name in only]
    targets = {name: make_target(name) for name in sorted({r.target for r in recipes})}
    made: list[Vector] = []
    remove_dead_of(out)
    with atomic_write(out) as temporary:
        for name, target in targets.items():
            target.write(temporary / "targets" / name)
        for recipe in progress(recipes, desc="vectors", unit="vectors"):
            made.append(make_vector(recipe, targets[recipe.target]))
            _write_vector(made[-1], temporary)
        write_atomically(temporary / "README.md", _readme(made))
    return WrittenVectors(
        out=out,
        vectors={one.recipe.name: len(one.twins) for one in made},
        smallest_gap=min(one.gap for one in made),
        bytes=sum(path.lstat().st_size for path in out.rglob("*") if path.is_file()),
        next_command=["spec-train", "vectors", "--check", "LOG", "--out", str(out)],
    )


def _write_vector(made: Vector, root: Path) -> None:
    recipe, folder = made.recipe, root / made.recipe.name
    name = f"targets/{recipe.target}"
    facts = dataclasses.replace(read_target(root / name), name=name)
    drafts = {form: f"{recipe.name}/{form}" for form in recipe.forms}
    if inside := made.tiny.target.layout is not None:  # the draft is a block of the target
        drafts = dict.fromkeys(recipe.forms, name)
        _write_block(made, made.draft, root / name, root / name)
    for form in () if inside else recipe.forms:
        _write_draft(made.draft, form, facts, folder / form)
    wrong: dict[str, Any] = {}
    for twin, draft, decoded in made.twins:
        if draft is not None and inside:
            _write_block(made, draft, folder / "wrong" / twin.name, root / name)
        elif draft is not None:
            _write_draft(draft, recipe.forms[0], facts, folder / "wrong" / twin.name)
            _share_weights(folder / "wrong" / twin.name, recipe.forms[0])
        wrong[twin.name] = {
            "meaning": twin.meaning,
            "draft": None if draft is None else f"{recipe.name}/wrong/{twin.name}",
            "prompts": [_numbers(one) for one in decoded],
        }
    expected: dict[str, Any] = {
        "vector": recipe.name,
        "what": recipe.what,
        "target": name,
        "drafts": drafts,
        "output_tokens": OUTPUT,
        "draft_tokens": made.tiny.depth,
        "layers": list(getattr(made.draft.config, "layers", ())),
        "smallest_gap": round(made.gap, 6),
        "prompts": [
            {
                "prompt": answer.tokens[: answer.prompt],
                "output": answer.tokens[answer.prompt : answer.prompt + OUTPUT],
                **_numbers(one),
            }
            for answer, one in zip(made.answers, made.decoded, strict=True)
        ],
        "wrong": wrong,
    }
    write_atomically(folder / EXPECTED, dump_json(expected))
    tensors: dict[str, torch.Tensor] = {}
    for i, (answer, one) in enumerate(zip(made.answers, made.decoded, strict=True)):
        states = made.tiny.states(answer, Reads())[: answer.prompt + OUTPUT]
        tensors[f"states.{i}"] = states.float().contiguous()
        tensors[f"logits.{i}"] = torch.stack(one.logits[:_LOGITS]).float()
    save_file(tensors, folder / STATES)


def _write_draft(draft: Draft, form: str, facts: TargetFacts, folder: Path) -> None:
    """Write a draft in float32: its weights are exact in bfloat16 as well."""
    files = write_form(draft.files(torch.float32, str(folder)), form, facts)
    files.config[SECTION].pop("origin", None)
    write_files(files, folder)


def _write_block(made: Vector, draft: Draft, folder: Path, target: Path) -> None:
    """Write an MTP block into its target, or elsewhere, beside links to the rest of the target."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in () if folder == target else target.iterdir():
        if path.name not in (BLOCK, INDEX):
            link_or_copy(Path("../../..", "targets", target.name, path.name), folder / path.name)
    own = draft.checkpoint_tensors(torch.float32)
    own.pop("embed_tokens.weight", None)
    made.tiny.target.write_block(own, folder)


def _share_weights(wrong: Path, form: str) -> None:
    """Make equal weights a link: the archive is small then."""
    one, other = wrong / WEIGHTS, wrong.parents[1] / form / WEIGHTS
    if one.read_bytes() == other.read_bytes():
        one.unlink()
        link_or_copy(Path("../..", form, WEIGHTS), one)


def _numbers(one: Decoded) -> dict[str, Any]:
    return {"drafted": one.drafted, "accepted": one.accepted}


def _readme(made: list[Vector]) -> str:
    """Return the page for engine writers, with tables of these vectors."""
    text = importlib.resources.files(__package__).joinpath("README.md").read_text("utf-8")
    vectors = "\n".join(
        f"| `{v.recipe.name}` | {v.recipe.what} | {v.recipe.target} | {v.tiny.depth} "
        f"| {', '.join(v.recipe.forms)} | {v.gap:.4f} |"
        for v in made
    )
    meanings: dict[str, str] = {}
    for v in made:
        for twin, draft, _ in v.twins:
            mark = "files" if draft is not None else "numbers"
            meanings.setdefault(twin.name, f"| `{twin.name}` | {twin.meaning} | {mark} |")
    mistakes = "\n".join(meanings[name] for name in sorted(meanings))
    return text.replace("<!-- vectors -->", vectors).replace("<!-- mistakes -->", mistakes)
