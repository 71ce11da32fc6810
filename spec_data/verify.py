"""`spec-data verify`: prove a dataset, from the bytes up, and name what fails.

1. every shard's size and checksum;  2. schema, row counts, index against shards;  3. every state
finite and not constant, masks and turns consistent;  4. on sampled documents, logits re-derived
from `hidden.final` and the stored head against `target_argmax` and `target_logsumexp`;  5. with
`--target`, a fresh forward of sampled documents, one per row, against every stored column. Lossy
columns may differ by the error that the manifest declares, and their tables must be its tables.
"""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_data.identity import config_hash, resolve_model, weights_hash
from spec_data.options import VerifyConfig
from spec_data.progress import progress
from spec_data.report import error_text
from spec_data.shards.errors import DatasetError, SpecDataError
from spec_data.shards.files import sha256_file
from spec_data.shards.head import apply_head
from spec_data.shards.reader import HiddenStatesDataset, load_head_tensors
from spec_data.shards.schema import FINAL, SUPERVISED, layer_column, predicts_supervised
from spec_data.shards.tables import TABLES
from spec_data.target import Target, pick_device

logger = logging.getLogger(__name__)

_SHOWN = 20
# Largest believable difference between two kernels' rounding, relative, by the dtype of capture.
_STATE_TOLERANCE = {"float32": 6e-3, "float16": 1e-2, "bfloat16": 5e-2}
_LOGIT_TOLERANCE = {"float32": 2e-2, "float16": 2e-2, "bfloat16": 4e-2}


@dataclass
class Findings:
    """What was checked and what failed, in words."""

    failures: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)

    def fail(self, message: str) -> None:
        """Note a failure."""
        self.failures.append(message)


def verify(config: VerifyConfig) -> int:
    """Run every check, print the findings, give 0 when all pass and 1 when any fails."""
    dataset = HiddenStatesDataset(config.data)
    findings = Findings()
    good = _check_checksums(dataset, findings)
    if not findings.failures:
        _guarded(findings, lambda: _check_codecs(dataset, findings))
    if not findings.failures:
        _guarded(findings, lambda: _check_documents(dataset, findings))
        sampled = sample_documents(len(dataset), config.samples, config.seed)
        _guarded(findings, lambda: _check_logits(dataset, sampled, config.device, findings))
        if config.target is not None:
            _guarded(findings, lambda: _check_fresh(dataset, sampled, config, findings))
    for fact in findings.facts:
        print(f"ok    {fact}")
    for failure in findings.failures[:_SHOWN]:
        print(f"FAIL  {failure}")
    if len(findings.failures) > _SHOWN:
        print(f"FAIL  and {len(findings.failures) - _SHOWN} more")
    if findings.failures:
        print(f"{config.data}: {len(findings.failures)} failures ({good} shards are whole)")
        return 1
    print(f"{config.data}: verified, fingerprint {dataset.manifest.fingerprint[:16]}")
    return 0


def _guarded(findings: Findings, check: Callable[[], None]) -> None:
    """A check that meets unreadable data is a failure in words, not the end of verify."""
    try:
        check()
    except SpecDataError as error:
        findings.fail(str(error))


def sample_documents(count: int, samples: int, seed: int) -> list[int]:
    """`samples` document numbers without replacement, ascending, the same for the same seed."""
    rng = np.random.default_rng(seed)
    return sorted(rng.choice(count, size=min(samples, count), replace=False).tolist())


def _check_checksums(dataset: HiddenStatesDataset, findings: Findings) -> int:
    good = 0
    for record in progress(dataset.manifest.shards, desc="checksums", unit=" shards", leave=False):
        found = sha256_file(dataset.path / record.file)
        if found == record.sha256:
            good += 1
        else:
            findings.fail(
                f"{record.file}: sha256 {found[:16]}..., the manifest says "
                f"{record.sha256[:16]}...: the file was changed; copy or generate it again"
            )
    if good == len(dataset.manifest.shards):
        findings.facts.append(f"checksums of {good} shards")
    return good


def _check_codecs(dataset: HiddenStatesDataset, findings: Findings) -> None:
    """The tables' hash and numbers; says what each lossy column was measured to lose."""
    for name, table in dataset.tables.items():  # the hash is checked as they are read
        if not bool((table.mean.isfinite() & table.std.isfinite()).all()):
            findings.fail(f"{TABLES}: tables of column {name} are not finite; copy it again")
    for column in dataset.manifest.raw["columns"]:
        if "error" in column:
            findings.facts.append(
                f"{column['name']}: {error_text(column['codec'], column['error'])} (measured when "
                "it was made; its tables are unchanged)"
            )


def _declared(dataset: HiddenStatesDataset, name: str, figure: str) -> float:
    """Declared relative error of a column's states: root of a channel-normalised MSE."""
    entry = next(c for c in dataset.manifest.raw["columns"] if c["name"] == name)
    return math.sqrt(entry.get("error", {}).get(figure, 0.0))


def _stored_tokens(dataset: HiddenStatesDataset, name: str, row: dict[str, Any]) -> Tensor:
    """Tokens of a document that have a state in a column, bool [T]."""
    mask = row["loss_mask"].numpy()
    if name == FINAL and dataset.final == SUPERVISED:
        return torch.from_numpy(predicts_supervised(mask, np.array([0, len(mask)])))
    return torch.ones(len(mask), dtype=torch.bool)


def _check_documents(dataset: HiddenStatesDataset, findings: Findings) -> None:
    """Every document: index, mask, turns, token ids, and states token by token."""
    vocab = dataset.manifest.vocab_size
    bar = progress(total=int(dataset.lengths.sum()), desc="states", unit=" tok", leave=False)
    with bar:
        for index, row, where in _rows(dataset):
            mask, ids = row["loss_mask"], row["input_ids"]
            if row["doc_id"] != dataset.doc_ids[index] or len(ids) != dataset.lengths[index]:
                findings.fail(f"{where}: the index names another document here; seal again")
            if int(mask.sum()) != dataset.supervised[index]:
                findings.fail(f"{where}, column loss_mask: not the count that the index has")
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
                findings.fail(f"{where}, column input_ids: ids outside 0..{vocab - 1}")
            if any(not 0 <= t["start"] <= t["end"] <= len(ids) for t in row["turns"]):
                findings.fail(f"{where}, column turns: spans outside the document")
            for name, value in row.items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    tokens = _stored_tokens(dataset, name, row)
                    _check_states(value, tokens, f"{where}, column {name}", findings)
            bar.update(len(ids))
    findings.facts.append(
        f"{len(dataset):,} documents: index, masks, turns, token ids, every state finite and "
        "not constant"
    )


def _rows(dataset: HiddenStatesDataset) -> Iterator[tuple[int, dict[str, Any], str]]:
    """Every document with words that say where it is."""
    first = 0
    for record in dataset.manifest.shards:
        for row in range(record.rows):
            yield first + row, dataset[first + row], f"{record.file} row {row}"
        first += record.rows


def _check_states(value: Tensor, tokens: Tensor, where: str, findings: Findings) -> None:
    low, high = (value, value) if value.ndim == 1 else (value.amin(-1), value.amax(-1))
    bad = ~(torch.isfinite(low) & torch.isfinite(high))
    if bool(bad.any()):
        findings.fail(f"{where}: not finite at token {int(bad.nonzero()[0])}")
    elif value.ndim == 2 and value.shape[1] > 1 and bool((flat := (low == high) & tokens).any()):
        findings.fail(f"{where}: a constant vector at token {int(flat.nonzero()[0])}")


def _check_logits(
    dataset: HiddenStatesDataset, sampled: list[int], device: str, findings: Findings
) -> None:
    """argmax and logsumexp of head(hidden.final), or of the stored logits."""
    place = pick_device(device)
    manifest = dataset.manifest
    allowed = _LOGIT_TOLERANCE.get(manifest.target.get("dtype", ""), 4e-2)
    if FINAL in dataset.columns:
        allowed += 3 * _declared(dataset, FINAL, "mse_median")
    if manifest.supervision.startswith("topk"):
        _check_topk(dataset, sampled, findings)
        return
    head: dict[str, Tensor] = {}
    if FINAL in dataset.columns:
        head = {k: v.float().to(place) for k, v in load_head_tensors(dataset.path).items()}
    worst = 0.0
    for index in sampled:
        row = dataset[index]
        kept = _stored_tokens(dataset, FINAL, row)
        if head:
            logits = apply_head(
                row[FINAL].float().to(place)[kept],
                head["lm_head"],
                head.get("lm_head_bias"),
                manifest.head,
            )
        else:
            logits = row["logits"].float().to(place)
        argmax, logsumexp = row["target_argmax"][kept], row["target_logsumexp"][kept]
        error = _logit_error(logits.cpu(), argmax, logsumexp)
        worst = max(worst, float(error.max()))
        if float(error.max()) > allowed:
            findings.fail(
                f"document {index}, columns {FINAL if head else 'logits'} / target_argmax / "
                f"target_logsumexp: token {int(kept.nonzero()[error.argmax()])} disagrees by "
                f"{float(error.max()):.1e} of the largest logit (allowed {allowed:.0e})"
            )
    findings.facts.append(
        f"logits of {len(sampled)} documents against argmax and logsumexp: off by at most "
        f"{worst:.1e} of the largest logit"
    )


def _logit_error(logits: Tensor, argmax: Tensor, logsumexp: Tensor) -> Tensor:
    """How far stored argmax and logsumexp [T] are from logits [T, V], relative to max |logit|."""
    scale = logits.abs().amax(-1).clamp_min(1e-6)
    gap = logits.amax(-1) - logits.gather(-1, argmax[:, None])[:, 0]
    return torch.maximum(gap, (logits.logsumexp(-1) - logsumexp).abs()) / scale


def _check_topk(dataset: HiddenStatesDataset, sampled: list[int], findings: Findings) -> None:
    for index in sampled:
        row = dataset[index]
        top = row["topk_logits"].logsumexp(-1)
        if not torch.equal(row["topk_ids"][:, 0], row["target_argmax"]) and bool(
            (row["topk_logits"][:, 0] != row["topk_logits"].amax(-1)).any()
        ):
            findings.fail(f"document {index}, column topk_ids: its first id is not the argmax")
        if bool((top > row["target_logsumexp"] + 1e-3).any()):
            findings.fail(f"document {index}, column topk_logits: more mass than the logsumexp")
    findings.facts.append(f"top-k of {len(sampled)} documents against argmax and logsumexp")


def _check_fresh(
    dataset: HiddenStatesDataset, sampled: list[int], config: VerifyConfig, findings: Findings
) -> None:
    """A fresh, unpacked forward of sampled documents against every stored column."""
    manifest = dataset.manifest
    path, _ = resolve_model(config.target or "", manifest.target.get("revision"))
    _check_identity(manifest.target, path, findings)
    target = Target.from_pretrained(
        str(path),
        manifest.layers,
        dtype=manifest.target["dtype"],
        device=config.device,
        attn=manifest.target["attn"],
        trust_remote_code=config.trust_remote_code,
    )
    allowed = _STATE_TOLERANCE.get(manifest.target["dtype"], 5e-2)
    worst = 0.0
    for index in progress(sampled, desc="fresh forward", unit=" docs", leave=False):
        row = dataset[index]
        ids = row["input_ids"][None]
        layout = torch.zeros_like(ids), torch.arange(ids.shape[1])[None]
        captured, _ = target.capture(ids, *layout, None)
        fresh = {layer_column(k): captured.layers[k][0] for k in target.layers}
        if captured.final is not None and FINAL in row:
            fresh[FINAL] = captured.final[0]
        for name, value in fresh.items():
            kept = _stored_tokens(dataset, name, row)
            error = _relative(row[name][kept], value.cpu()[kept])
            worst = max(worst, error)
            limit = allowed + 1.5 * _declared(dataset, name, "mse_max")
            if not error <= limit:
                findings.fail(
                    f"document {index}, column {name}: differs from a fresh forward by {error:.1e} "
                    f"(allowed {limit:.0e})"
                )
    findings.facts.append(
        f"fresh forward of {len(sampled)} documents: states differ by at most {worst:.1e}"
    )


def _relative(stored: Tensor, fresh: Tensor) -> float:
    """Mean over tokens of |difference| / |state|."""
    a, b = stored.float(), fresh.float()
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1).clamp_min(1e-30)).mean())


def _check_identity(recorded: dict[str, Any], path: Path, findings: Findings) -> None:
    for name, found in (("config_hash", config_hash(path)), ("weights_hash", weights_hash(path))):
        if recorded.get(name) not in (None, found):
            raise DatasetError(
                f"{path}: its {name.replace('_', ' ')} is not that of the dataset's target "
                f"({recorded['name']}): another model, revision or quantisation"
            )
    findings.facts.append("the given target is the one that was captured (config and weights)")
