"""The command that made a dataset, from its manifest: what it has lost comes back by the same."""

import json
import shlex
from typing import Any

from spec_data.generation.options import AUTO, QUALITIES, CaptureOptions
from spec_data.shards.errors import TargetError
from spec_data.shards.files import parse_size
from spec_data.shards.layer_ids import SEARCH, choose_layers
from spec_data.shards.schema import Manifest

_AS_STORED = (
    *("limit", "mask", "max_length", "supervision", "final", "teacher", "max_shard_size"),
    *("backend", "dtype", "attn", "rope_factors", "packing", "batch_tokens", "device_map"),
    *("tp_plan", "context_parallel"),
)
"""Settings that are options of the same name."""


def same_command(manifest: Manifest, out: str) -> list[str]:
    """Return the words of the `spec-data generate` that made a dataset; empty: another command did.

    Options with their default values are left out. A target or a corpus that was a path is there by
    its last name, for the manifest knows no paths of a machine.
    """
    settings, default = manifest.settings, CaptureOptions()
    if manifest.provenance or manifest.view or "converted" in settings or not settings:
        return []
    try:
        words = ["spec-data", "generate", "--target", settings["target_name"], "--corpus"]
        words += [source["source"] for source in settings["corpus"]]
        words += ["--out", out, *_layer_words(manifest), *_codec_words(manifest)]
        for name in _AS_STORED:
            value = settings.get(name, getattr(default, name))
            if str(value) != str(getattr(default, name)):
                words += [_flag(name), value if isinstance(value, str) else json.dumps(value)]
        if settings.get("tensor_parallel", 1) > 1:
            words += ["--vllm-tensor-parallel", str(settings["tensor_parallel"])]
        if manifest.target.revision:
            words += ["--revision", manifest.target.revision]
        if "code_hash" in settings["target"]:
            words.append("--trust-remote-code")
        if kwargs := settings["tokenizer"].get("chat_template_kwargs"):
            words += ["--chat-template-kwargs", json.dumps(kwargs)]
        if columns := settings.get("columns"):
            words += ["--columns", ",".join(f"{n}={column}" for n, column in columns.items())]
        if (most := settings["max_row_bytes"]) != parse_size(str(default.max_row_bytes)):
            words += ["--max-row-bytes", str(most)]
        counts = manifest.documents
        if bad := counts.bad_rows + sum(counts.unrendered.values()):
            words += ["--max-bad-rows", str(bad)]
        if settings["on_policy"]:
            words.append("--on-policy")
            if (temperature := settings.get("sampling_temperature")) is not None:
                words += ["--sampling-temperature", f"{temperature:g}"]
        if not {"device_map", "tp_plan", "context_parallel"} & settings.keys():
            words += ["--device", settings["device"]]
    except (KeyError, TypeError, AttributeError):  # of another release
        return []
    return [str(word) for word in words]


def repair_advice(manifest: Manifest, out: str, remote: bool = False) -> str:
    """Say how a dataset of which files are lost or damaged gets them back; nothing: no command."""
    what = "captures again what is lost, it alone, and puts back what has the sealed bytes"
    if "converted" in manifest.settings and not manifest.provenance:
        return f"The same `spec-data convert` {what}"
    if not (words := same_command(manifest, out)):
        return ""
    first = " Delete the damaged objects first: on remote storage only sizes are compared." * remote
    return (
        f"The command that made it {what}.{first} With the target and the corpus where they are "
        f"now:\n  {shlex.join(words)}"
    )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _layer_words(manifest: Manifest) -> list[str]:
    """Return the --layers or --for that choose the layers of a dataset."""
    made = tuple(manifest.layers), {n: tuple(v) for n, v in manifest.draft_layers.items()}
    drafts = list(manifest.draft_layers)
    for layers, names, words in (
        (AUTO, [], []),
        (AUTO, drafts, ["--for", ",".join(drafts)]),
        (SEARCH, [], ["--layers", SEARCH]),
    ):
        try:
            if choose_layers(layers, names, manifest.target.num_layers or 0) == made:
                return list(words)
        except TargetError:
            pass  # too few blocks for this recipe
    return ["--layers", ",".join(map(str, manifest.layers))]


def _codec_words(manifest: Manifest) -> list[str]:
    """Return the --codec that gives the qualities of a dataset."""
    qualities: dict[str, Any] = dict(manifest.settings["codec"])
    names = {quality: name for name, quality in QUALITIES.items()}
    if manifest.supervision != "final-hidden":
        qualities.pop("final", None)
    base = qualities.pop("aux")
    parts = [f"{n}={names.get(q, q)}" for n, q in qualities.items() if q != base]
    if base != QUALITIES["default"] or not parts:
        parts.insert(0, str(names.get(base, base)))
    return [] if parts == ["default"] else ["--codec", ",".join(parts)]
