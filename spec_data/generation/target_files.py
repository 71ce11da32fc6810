"""Write the files of the target into a dataset, and draft the manifest."""

import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec.structs import replace
from safetensors.torch import save
from transformers import AutoModelForCausalLM

from spec_data.capture.backend import TargetBackend
from spec_data.capture.head_form import head_parts
from spec_data.capture.proofs import IsolationProof
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
    proof: IsolationProof,
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
    used = {"template_kwargs_used": counts.pop("kwargs_used")}
    about = target.describe()
    facts = {k: about[k] for k in ("dtype", "rope_factors") if k in about}
    described = {k: v for k, v in setup.target.items() if k not in setup.identity or k in _NAMED}
    return Manifest(
        settings=plan.settings,
        target=msgspec.convert(described | about, TargetRecord),
        identity=setup.identity | facts | used | _system_messages(counts["rendering"]),
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
        packing=PackingRecord(
            **asdict(proof)
            | {"differences": {n: _stated(v) for n, v in proof.differences.items()}},
            pack_length=plan.pack_length,
            utilisation=round(plan.utilisation(), 4),
        ),
        policy="on-policy" if setup.options.on_policy else "off-policy",
        documents=CountsRecord(**counts),
    )


def _stated(difference: float | str) -> float | str:
    """Return a difference as JSON can hold it."""
    return difference if isinstance(difference, str) or isfinite(difference) else "not finite"


def _system_messages(rendering: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Return the fact of the identity on system messages, if there are conversations."""
    found = {
        word: sum(n for name, n in rendering.items() if name.startswith(prefix))
        for word, prefix in (("with", WITH_SYSTEM), ("without", WITHOUT_SYSTEM))
    }
    return {"system_messages": found} if any(found.values()) else {}


# -- disk bytes ------------------------------------------------------------------------------------
# What a dataset needs on disk beside its shards, from config and tokenizer files alone.
#
# The head is counted from a model without memory (torch's meta device), so its tensors are those
# that `generate` writes. Index, tables and tokenizer files are sized as they will be; the manifest
# and the card are approximated. All together are right to within 1 % plus 64 KB.


_INDEX_ROW = 4 + 4 + 5 * 4 + 8  # two text offsets, five int32, a checksum
_MANIFEST, _OF_A_SHARD, _CARD = 9_000, 330, 3_000
_SAFETENSORS_ENTRY, _ARROW_SCHEMA = 110, 2_000
_LEVELS = 64 * 4


def other_files(setup: Setup, plan: Plan) -> dict[str, int]:
    """Return the bytes of everything but the shards, by kind: head, target, index, rest."""
    documents = plan.documents
    lossy = [c for c in setup.columns if c.lossy]
    tables = sum(2 * 4 * (c.width or 1) + _LEVELS + 4 * _SAFETENSORS_ENTRY for c in lossy)
    shards = len(plan.units) * _OF_A_SHARD
    return {
        "head": head_bytes(setup),
        "target": _target_files(setup),
        "index": documents.text_bytes + len(documents) * _INDEX_ROW + _ARROW_SCHEMA,
        "rest": tables + shards + _MANIFEST + _CARD + len(dump_json(plan.settings)),
    }


def head_bytes(setup: Setup) -> int:
    """Return the size of target/head.safetensors; no weights are read."""
    width = torch.empty(0, dtype=_dtype(setup)).element_size()
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


def _target_files(setup: Setup) -> int:
    """Return the bytes of config and tokenizer files, written to a temporary directory."""
    total = len(config_json(setup, _dtype(setup)))
    generation = setup.model_dir / GENERATION_CONFIG
    if generation.is_file():
        total += generation.stat().st_size
    with tempfile.TemporaryDirectory() as scratch:
        with writing(Path(scratch)):
            setup.tokenizer.save_pretrained(scratch)
        return total + sum(p.stat().st_size for p in Path(scratch).rglob("*") if p.is_file())
