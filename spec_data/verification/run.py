"""`spec-data verify`: check a dataset, from its bytes to its states, and name every failure.

1. Checksums of every file and of every chunk: damage is named by shard, row, document and column.
2. Schema, row counts, and the index against the shards.
3. Every state is finite and not constant; masks and turns are consistent; the share of supervised
   tokens that are the target's first choice is that of the manifest.
4. Of sampled documents, logits of `hidden.final` and the stored head, against `target_argmax` and
   `target_logsumexp`.
5. With `--target`, a fresh forward of sampled documents against every stored column.

Lossy columns may differ by the error that the manifest declares. A "row" is the position of a
document in its shard.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_data.capture.backend import BackendOptions, open_backend
from spec_data.generation.same_command import repair_advice
from spec_data.models.devices import check_devices, usable_device
from spec_data.models.resolve import local_directory, resolve_model
from spec_data.models.target_options import EngineOptions
from spec_data.shards.errors import ConfigError, DatasetError, MissingError
from spec_data.shards.files import MANIFEST
from spec_data.shards.pins import check_digits, check_pin, split_pin
from spec_data.shards.reader import HiddenStatesDataset, load_head_tensors
from spec_data.shards.schema import FINAL, Manifest, apply_head, logit_error
from spec_data.shards.storage import scheme_of
from spec_data.terminal.progress import progress
from spec_data.verification.directory import check_files
from spec_data.verification.findings import VerifyReport, declared_error, stored_tokens
from spec_data.verification.fresh import (
    LOGIT_TOLERANCE,
    check_fresh,
    check_identity,
    check_positions,
)

_TAIL = 3
"""The largest error of all tokens may be so many times that of the measured ones, and so may the
median."""
_FEW_TOKENS = 8  # have no median that could be judged


def examine(
    data: str,
    target: str | None = None,
    *,
    samples: int = 16,
    fingerprint: str = "",
    running: EngineOptions = EngineOptions(),
) -> VerifyReport:
    """Run every check of a dataset; see `spec_data.verify` for the arguments.

    Raises:
        SpecDataError: the dataset cannot be opened, `target` is not a model, or `device` is not
            usable here.
    """
    if running.backend == "served":
        raise ConfigError(
            "--backend served: verify compares logits as well, which no server hands over; leave "
            "--backend and --server out"
        )
    if fingerprint := fingerprint.lower():
        check_digits(f"--fingerprint {fingerprint}", fingerprint)
    spread = running.spread
    check_devices(running.device, spread.device_map)  # before any work
    dataset = _opened(data)
    path = None
    if target is not None:  # report a wrong name before any work
        local = local_directory(target) is not None
        path, _ = resolve_model(target, None if local else dataset.manifest.target.revision)
    findings = VerifyReport(data=data, fingerprint=dataset.manifest.fingerprint)
    if fingerprint or dataset.pin:
        findings.check(lambda: check_pin(MANIFEST, dataset.manifest.fingerprint, fingerprint))
        findings.passed("the fingerprint is the expected one")
    others = len(findings.failures)
    findings.check(lambda: check_files(dataset, findings))
    findings.check(lambda: _check_chunks(dataset, findings))
    if findings.ok:
        findings.check(lambda: _check_codecs(dataset, findings))
    if len(findings.failures) > others:
        findings.repair = _repair(dataset)
    if not findings.ok:
        return findings
    findings.check(lambda: _check_documents(dataset, findings))
    rng = np.random.default_rng(0)
    sampled = rng.choice(len(dataset), size=min(samples, len(dataset)), replace=False).tolist()
    sampled.sort()
    findings.check(lambda: _check_logits(dataset, sampled, running.device, findings))
    if path is None:
        return findings
    trust = running.trust_remote_code
    findings.check(lambda: check_identity(dataset.manifest, path, trust, findings))
    if not findings.ok:
        return findings
    recorded = dataset.manifest.target
    # The attention of another engine is none of transformers, and the reverse.
    by_transformers = recorded.backend == running.backend == "hf"
    options = BackendOptions(
        path=path,
        layers=dataset.manifest.layers,
        dtype=recorded.dtype,
        device=running.device,
        attn=recorded.attn if by_transformers else "auto",
        trust_remote_code=trust,
        rope_factors=recorded.rope_factors,
        spread=spread,
        longest=int(dataset.lengths.max()),
        tensor_parallel=running.vllm_tensor_parallel,
        engine_memory=running.vllm_memory,
    )
    with closing(open_backend(running.backend, options)) as opened:
        findings.check(lambda: check_positions(dataset, opened, findings))
        findings.check(lambda: check_fresh(dataset, sampled, opened, findings))
    return findings


def _opened(data: str) -> HiddenStatesDataset:
    """Open a dataset; where shards are lost, the error names the command that brings them back."""
    try:
        return HiddenStatesDataset(data)
    except (MissingError, DatasetError) as error:
        file = Path(split_pin(data)[0]) / MANIFEST
        if scheme_of(data) or not file.is_file():
            raise
        try:
            manifest = Manifest.read(file)
        except DatasetError:
            raise error from None
        pin = split_pin(data)[1] or ""
        if not manifest.fingerprint.startswith(pin):
            raise  # nothing is lost: it is another dataset
        if advice := repair_advice(manifest, split_pin(data)[0]):
            raise type(error)(f"{error}\n{advice}") from None
        raise


def _repair(dataset: HiddenStatesDataset) -> list[str]:
    """Return the commands that bring back what is damaged, of each stored dataset once."""
    broken = [s for s in dataset.sources if len(dataset.sources) == 1 or _damaged(s)]
    texts = (repair_advice(s.manifest, s.location, s.mirror is not None) for s in broken)
    return list(dict.fromkeys(filter(None, texts)))


def _damaged(source: HiddenStatesDataset) -> bool:
    """Return whether a file of one of several sources of a view is damaged."""
    findings = VerifyReport(data=source.location, fingerprint=source.manifest.fingerprint)
    findings.check(lambda: check_files(source, findings))
    return not findings.ok


def _check_chunks(dataset: HiddenStatesDataset, findings: VerifyReport) -> None:
    """Check every field of every stored document; continue after a shard that cannot be read."""
    _ = dataset.lengths  # the index has the names of the documents
    shards = [(s, number) for s in dataset.sources for number in range(len(s.manifest.shards))]
    for source, number in progress(shards, desc="chunks", unit="shards", leave=False):
        try:
            shard = source.shard(number)
            for row, field in shard.damage():
                findings.fail(
                    f"{shard.record.file} row {row}, document {shard.index.ids[row].as_py()}, "
                    f"column {field}: damaged: its bytes do not match its checksum"
                )
        except DatasetError as error:
            findings.fail(str(error))
    stored = sum(map(len, dataset.sources))
    findings.passed(f"checksums of every column of {stored:,} documents")


def _check_codecs(dataset: HiddenStatesDataset, findings: VerifyReport) -> None:
    """Read the codec tables; report the error of each lossy column."""
    _ = dataset.tables
    for column in dataset.manifest.columns:
        if column.loss:
            findings.passed(
                f"{column.name}: {column.loss} (measured during "
                "generation; the tables are unchanged)"
            )


def _check_documents(dataset: HiddenStatesDataset, findings: VerifyReport) -> None:
    """Check index, mask, turns, token ids and states of every document, and count first choices."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])  # first choices, tokens
    bar = progress(total=int(dataset.lengths.sum()), desc="states", unit="tok", leave=False)
    with bar:
        for index in range(len(dataset)):
            (shard, number), row = dataset.locate(index), dataset[index]
            where = f"{shard.record.file} row {number}"
            for problem in _problems(dataset, index, row):
                findings.fail(f"{where}{problem}")
            asked = row["loss_mask"][1:]
            hits = (row["target_argmax"][:-1] == row["input_ids"][1:]) & asked
            counts[row["source"]][0] += int(hits.sum())
            counts[row["source"]][1] += int(asked.sum())
            bar.update(len(row["input_ids"]))
    findings.passed(
        f"{len(dataset):,} documents: index, masks, turns and token ids are consistent, every "
        "state is finite and not constant"
    )
    findings.check(lambda: _compare_first_choices(dataset, counts, findings))


def _problems(dataset: HiddenStatesDataset, index: int, row: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with a document `row`, number `index` of the dataset."""
    ids, mask, vocab = row["input_ids"], row["loss_mask"], dataset.manifest.vocab_size
    supervised = mask.nonzero()
    if row["doc_id"] != dataset.doc_ids[index] or len(ids) != dataset.lengths[index]:
        yield ": the index has another document here; seal again"
    if len(supervised) != dataset.supervised[index]:
        yield (
            f", column loss_mask: {len(supervised)} supervised tokens, but the index has "
            f"{int(dataset.supervised[index])}"
        )
    first = int(supervised[0]) if len(supervised) else len(ids)
    if first != dataset.first_supervised[index]:
        yield (
            f", column loss_mask: the first supervised token is {first}, but the index has "
            f"{int(dataset.first_supervised[index])}"
        )
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        yield f", column input_ids: token ids outside 0..{vocab - 1}"
    if any(not 0 <= t["start"] <= t["end"] <= len(ids) for t in row["turns"]):
        yield ", column turns: spans outside the document"
    for name, value in row.items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        low, high = (value, value) if value.ndim == 1 else (value.amin(-1), value.amax(-1))
        stored = stored_tokens(dataset, name, row)
        bad = ~(torch.isfinite(low) & torch.isfinite(high)) & stored
        flat = (low == high) & stored
        if bool(bad.any()):
            yield f", column {name}: not finite at token {int(bad.nonzero()[0])}"
        elif bool(flat.any()) and not dataset.declared[name].may_be_constant:
            yield f", column {name}: a constant vector at token {int(flat.nonzero()[0])}"


def _compare_first_choices(
    dataset: HiddenStatesDataset, counts: dict[str, list[int]], findings: VerifyReport
) -> None:
    """Compare first choices and supervised tokens of each source, as counted, with the manifest.

    Arg max, token ids and masks are stored exactly, so the counts must be equal.
    """
    if dataset.manifest.agreement is None:
        first, tokens = (sum(c[i] for c in counts.values()) for i in (0, 1))
        findings.passed(
            f"{first / max(tokens, 1):.1%} of {tokens:,} supervised tokens are the target's first "
            "choice; their NLL is not recorded (a merge, part of a source or other masks)"
        )
        return
    measured = dataset.manifest.agreement.sources
    for name, (first, tokens) in counts.items():
        stated = measured.get(name)
        if stated is None or (first, tokens) != (stated.first_choice, stated.tokens):
            recorded = f"{stated.first_choice} of {stated.tokens}" if stated else "nothing"
            findings.fail(
                f"manifest.json, agreement of {name}: {recorded}, but the stored columns have "
                f"{first} first choices of {tokens} supervised tokens; generate the dataset again"
            )
        else:
            findings.passed(f"{name}: {stated} (first choices counted again)")
    for name in sorted(measured.keys() - counts.keys()):
        findings.fail(f"manifest.json, agreement: {name} is no source of this dataset")
    for message in dataset.manifest.suspicions:
        findings.warn(message)


def _check_logits(
    dataset: HiddenStatesDataset, sampled: list[int], device: str, findings: VerifyReport
) -> None:
    """Compare argmax and logsumexp with head(hidden.final), or with the stored logits.

    Exact states must agree up to rounding at every token. A lossy codec changes few tokens by much,
    so the bounds are what generation measured: of a token, of the median of a document, and of all
    tokens together.
    """
    used, manifest = usable_device(device), dataset.manifest
    if manifest.supervision.startswith("topk"):
        _check_topk(dataset, sampled, findings)
        return
    rounding = LOGIT_TOLERANCE.get(manifest.target.dtype, 4e-2)
    allowed = allowed_document = allowed_together = rounding
    head: dict[str, Tensor] = {}
    if FINAL in dataset.columns:
        head = {k: v.float().to(used) for k, v in load_head_tensors(dataset).items()}
        allowed += _TAIL * declared_error(dataset, FINAL, "logit_max")
        allowed_document += declared_error(dataset, FINAL, "logit_q99")
        allowed_together += _TAIL * declared_error(dataset, FINAL, "logit_median")
    columns = f"columns {FINAL if head else 'logits'} / target_argmax / target_logsumexp"

    def fail(what: str, error: float, bound: float) -> None:
        findings.fail(
            f"{what} by {error:.1e} of the largest logit{' or more' * ('half' in what)} (allowed "
            f"{bound:.0e})"
        )

    errors = [torch.zeros(0)]
    for index in sampled:
        row = dataset[index]
        # bool [T], n of them True
        present = stored_tokens(dataset, FINAL, row) & stored_tokens(dataset, "target_argmax", row)
        if not bool(present.any()):
            continue
        logits = row[FINAL if head else "logits"].float().to(used)[present]  # [n, H] or [n, V]
        if head:
            logits = apply_head(logits, head["lm_head"], head.get("lm_head_bias"), manifest.head)
        given = row["target_argmax"][present], row["target_logsumexp"][present]
        error = logit_error(logits.cpu(), *given)  # [n]
        errors.append(error)
        worst, where = float(error.max()), f"document {index}, {columns}"
        if worst > allowed:
            token = int(present.nonzero()[error.argmax()])
            fail(f"{where}: token {token} disagrees", worst, allowed)
        elif len(error) >= _FEW_TOKENS and (median := float(error.median())) > allowed_document:
            fail(f"{where}: half of its {len(error)} tokens disagree", median, allowed_document)
    error = torch.cat(errors)
    if len(error) >= _FEW_TOKENS and (median := float(error.median())) > allowed_together:
        what = f"half of the {len(error):,} tokens of {len(sampled)} documents disagree"
        fail(f"{columns}: {what}", median, allowed_together)
    worst = float(error.max()) if len(error) else 0.0
    findings.passed(
        f"logits of {len(sampled)} documents agree with argmax and logsumexp; relative to the "
        f"largest logit, they differ by at most {worst:.1e} (allowed {allowed:.1e})"
    )


def _check_topk(dataset: HiddenStatesDataset, sampled: list[int], findings: VerifyReport) -> None:
    """Compare the stored top-k ids and logits, [T, K] each, with argmax and logsumexp, [T] each."""
    for index in sampled:
        row = dataset[index]
        present = stored_tokens(dataset, "topk_logits", row)
        ids, logits = row["topk_ids"][present], row["topk_logits"][present]
        equal = torch.equal(ids[:, 0], row["target_argmax"][present])
        if not equal and bool((logits[:, 0] != logits.amax(-1)).any()):
            findings.fail(f"document {index}, column topk_ids: the first id is not the argmax")
        if bool((logits.logsumexp(-1) > row["target_logsumexp"][present] + 1e-3).any()):
            findings.fail(
                f"document {index}, column topk_logits: its logsumexp is larger than that of all "
                "logits"
            )
    findings.passed(f"top-k of {len(sampled)} documents agrees with argmax and logsumexp")
