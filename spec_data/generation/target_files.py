"""Write the files of the target into a dataset, and draft the manifest."""

import tempfile
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec.structs import replace
from safetensors.torch import save

from spec_data.capture.backend import TargetBackend
from spec_data.generation.plan import Plan
from spec_data.generation.setup import Setup, config_json
from spec_data.models.devices import DTYPES
from spec_data.models.reading import text_config
from spec_data.shards.files import dump_json, write_atomically, writing
from spec_data.shards.position_data import POSITIONS, Positions
from spec_data.shards.schema import (
    CodecTables,
    Manifest,
    PackingRecord,
    SourceRecord,
    TargetRecord,
)

GENERATION_CONFIG = "generation_config.json"
_NAMED = ("architectures",)  # in the manifest's `target` and in its `identity`


def save_target_files(
    setup: Setup, target: TargetBackend, positions: Positions, folder: Path
) -> None:
    """Write config, tokenizer, head.safetensors and positions.safetensors, each atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    made = config_json(setup, target.dtype, target.architecture)
    write_atomically(folder / "config.json", made)
    generation = setup.model_dir / GENERATION_CONFIG
    if generation.is_file():
        write_atomically(folder / GENERATION_CONFIG, generation.read_bytes())
    for name, content in _tokenizer_files(setup).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / name, content)
    write_atomically(folder / "head.safetensors", save(target.head_tensors()))
    if positions.tables:
        write_atomically(folder / Path(POSITIONS).name, save(positions.tensors()))


def _tokenizer_files(setup: Setup) -> dict[Path, bytes]:
    with tempfile.TemporaryDirectory() as scratch:
        with writing(Path(scratch)):
            setup.tokenizer.save_pretrained(scratch)
        files = sorted(p for p in Path(scratch).rglob("*") if p.is_file())
        return {file.relative_to(scratch): file.read_bytes() for file in files}


def manifest_draft(
    setup: Setup,
    plan: Plan,
    target: TargetBackend,
    proof: PackingRecord,
    head_error: float | None,
    positions: Positions,
    codec: CodecTables | None,
) -> Manifest:
    """Return the manifest without shards and totals.

    Args:
        setup, plan, target: what is captured.
        proof: the isolation proof.
        head_error: the largest relative error of the head as data; None with full logits.
        positions: of the target.
        codec: the tables of the lossy columns.
    """
    facts: dict[str, Any] = {"template_kwargs_used": plan.kwargs_used}
    about = target.describe()
    facts = {k: about[k] for k in ("dtype", "rope_factors") if k in about} | facts
    described = {k: v for k, v in setup.target.items() if k not in setup.identity or k in _NAMED}
    return Manifest(
        settings=plan.settings,
        target=msgspec.convert(described | about, TargetRecord),
        identity=setup.identity | facts,
        corpus=msgspec.convert(plan.corpus, list[SourceRecord]),
        mask=setup.options.mask,
        layers=tuple(setup.layers),
        draft_layers={draft: tuple(own) for draft, own in setup.draft_layers.items()},
        supervision=setup.options.supervision,
        final=setup.options.final,
        teacher=setup.options.teacher,
        codec=codec,
        columns=tuple(
            replace(c, exact=not c.lossy and (c.codec != "bf16" or target.dtype == torch.bfloat16))
            for c in setup.columns
        ),
        head=target.head,
        head_error=head_error,
        positions=positions.record(),
        packing=replace(
            proof, pack_length=plan.pack_length, utilisation=round(plan.utilisation(), 4)
        ),
        policy="on-policy" if setup.options.on_policy else "off-policy",
        documents=plan.counts,
    )


# -- disk bytes ------------------------------------------------------------------------------------
# What a dataset needs on disk beside its shards, from config and tokenizer files alone: to within
# 1 % and 64 KB. Manifest and card are approximated, everything else is sized as it will be.


_INDEX_ROW = 4 + 4 + 5 * 4 + 8  # two text offsets, five int32, a checksum
_MANIFEST, _OF_A_SHARD, _CARD = 9_000, 330, 3_000
_SAFETENSORS_ENTRY, _ARROW_SCHEMA = 110, 2_000


def other_files(setup: Setup, plan: Plan) -> dict[str, int]:
    """Return the bytes of everything but the shards, by kind: head, target, index, rest."""
    documents, configs = plan.documents, (setup.model_config, text_config(setup.model_config))
    stored = next((c.dtype for c in configs if getattr(c, "dtype", None)), torch.float32)
    name = setup.options.dtype if setup.options.dtype != "auto" else str(stored)
    dtype = DTYPES.get(name.removeprefix("torch."), torch.float32)
    matrices = 1 if getattr(configs[1], "tie_word_embeddings", False) else 2  # and a norm
    head = (matrices * setup.vocab_size + 1) * setup.target["hidden_size"] * dtype.itemsize
    generation = setup.model_dir / GENERATION_CONFIG
    target = sum(map(len, _tokenizer_files(setup).values())) + len(config_json(setup, dtype))
    widths = [c.width or 1 for c in setup.columns if c.lossy]
    tables = sum(10 * width + width**2 + 4 * _SAFETENSORS_ENTRY for width in widths)
    shards = len(plan.units) * _OF_A_SHARD
    return {
        "head": head + 3 * _SAFETENSORS_ENTRY,
        "target": target + (generation.stat().st_size if generation.is_file() else 0),
        "index": documents.text_bytes + len(documents) * _INDEX_ROW + _ARROW_SCHEMA,
        "rest": tables + shards + _MANIFEST + _CARD + len(dump_json(plan.settings)),
    }
