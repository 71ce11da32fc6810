"""Write the files of the target into a dataset, and draft the manifest."""

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec.structs import replace
from safetensors.torch import save
from transformers import AutoModelForCausalLM

from spec_data.capture.backend import TargetBackend
from spec_data.capture.head_form import head_parts
from spec_data.corpus.documents import WITH_SYSTEM, WITHOUT_SYSTEM
from spec_data.generation.plan import Plan
from spec_data.generation.setup import Setup, config_json
from spec_data.models.devices import DTYPES
from spec_data.models.reading import text_config
from spec_data.shards.files import dump_json, write_atomically, writing
from spec_data.shards.position_data import POSITIONS, Positions
from spec_data.shards.schema import (
    CodecTables,
    CountsRecord,
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
    with tempfile.TemporaryDirectory() as scratch:
        with writing(Path(scratch)):
            setup.tokenizer.save_pretrained(scratch)
        for file in sorted(p for p in Path(scratch).rglob("*") if p.is_file()):
            place = folder / file.relative_to(scratch)
            place.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(place, file.read_bytes())
    write_atomically(folder / "head.safetensors", save(target.head_tensors()))
    if positions.tables:
        write_atomically(folder / Path(POSITIONS).name, save(positions.tensors()))


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
    counts = asdict(plan.counts)
    counts["read"] = counts.pop("rows")
    facts: dict[str, Any] = {"template_kwargs_used": counts.pop("kwargs_used")}
    system_messages = {
        word: sum(n for name, n in counts["rendering"].items() if name.startswith(prefix))
        for word, prefix in (("with", WITH_SYSTEM), ("without", WITHOUT_SYSTEM))
    }
    if any(system_messages.values()):  # there are conversations
        facts["system_messages"] = system_messages
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
        documents=CountsRecord(**counts),
    )


# -- disk bytes ------------------------------------------------------------------------------------
# What a dataset needs on disk beside its shards, from config and tokenizer files alone: to within
# 1 % and 64 KB. Manifest and card are approximated, everything else is sized as it will be.


_INDEX_ROW = 4 + 4 + 5 * 4 + 8  # two text offsets, five int32, a checksum
_MANIFEST, _OF_A_SHARD, _CARD = 9_000, 330, 3_000
_SAFETENSORS_ENTRY, _ARROW_SCHEMA = 110, 2_000
_LEVELS = 64 * 4


def other_files(setup: Setup, plan: Plan) -> dict[str, int]:
    """Return the bytes of everything but the shards, by kind: head, target, index, rest."""
    documents, dtype = plan.documents, _dtype(setup)
    lossy = [c for c in setup.columns if c.lossy]
    tables = sum(2 * 4 * (c.width or 1) + _LEVELS + 4 * _SAFETENSORS_ENTRY for c in lossy)
    shards = len(plan.units) * _OF_A_SHARD
    generation = setup.model_dir / GENERATION_CONFIG
    with tempfile.TemporaryDirectory() as scratch:
        with writing(Path(scratch)):
            setup.tokenizer.save_pretrained(scratch)
        files = [*(p for p in Path(scratch).rglob("*") if p.is_file()), generation]
        target = sum(p.stat().st_size for p in files if p.is_file())
    return {
        "head": _head_bytes(setup, torch.empty(0, dtype=dtype).element_size()),
        "target": target + len(config_json(setup, dtype)),
        "index": documents.text_bytes + len(documents) * _INDEX_ROW + _ARROW_SCHEMA,
        "rest": tables + shards + _MANIFEST + _CARD + len(dump_json(plan.settings)),
    }


def _head_bytes(setup: Setup, width: int) -> int:
    """Return the size of target/head.safetensors with values of `width` bytes; without weights."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                setup.model_config, trust_remote_code=setup.options.trust_remote_code
            )
        tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
        sizes = [p.numel() for p in head_parts(model, tied).values()]
    except Exception:
        # A family that cannot be built without weights, for any reason of its own: embedding and
        # head, as the config has them. The size is only an estimate.
        tied = bool(getattr(setup.model_config, "tie_word_embeddings", False))
        sizes = [setup.vocab_size * setup.target["hidden_size"]] * (1 if tied else 2)
    return sum(sizes) * width + len(sizes) * _SAFETENSORS_ENTRY


def _dtype(setup: Setup) -> torch.dtype:
    """Return the dtype in which the target will run, as far as its config tells."""
    if setup.options.dtype != "auto":
        return DTYPES[setup.options.dtype]
    for config in (setup.model_config, text_config(setup.model_config)):
        found: Any = getattr(config, "dtype", None)
        if isinstance(found, str):
            found = getattr(torch, found, None)
        if isinstance(found, torch.dtype):
            return found
    return torch.float32
