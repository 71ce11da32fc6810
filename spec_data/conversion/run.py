"""`spec-data convert`: find what the stored states are, then write them as `generate` would.

    out/.generate/evidence.json     what was found about the states

The samples are the corpus, and a backend that reads their states is the target. Everything else is
what `generate` does: a plan, units, resuming, and a sealed dataset.
"""

import hashlib
import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from torch import Tensor

from spec_data.capture.backend import ForwardBatch, TargetBackend
from spec_data.capture.evidence import BEFORE
from spec_data.capture.hooks import States
from spec_data.capture.mask_forms import REQUESTS
from spec_data.capture.proofs import FLOOR
from spec_data.capture.skeleton import SkeletonTarget
from spec_data.conversion.conventions import find_conventions
from spec_data.conversion.samples import FollowedSamples, Samples
from spec_data.corpus.bad_rows import BadRow
from spec_data.corpus.documents import Document
from spec_data.corpus.file_rows import Row
from spec_data.corpus.record_reader import CorpusReader
from spec_data.corpus.sources import Source
from spec_data.generation.options import CaptureOptions
from spec_data.generation.plan import PLAN, Plan, truncate
from spec_data.generation.setup import (
    Setup,
    context_length,
    open_corpus,
    refuse_other_files,
    set_up,
)
from spec_data.models.devices import check_devices, use_device
from spec_data.models.reading import load_config, text_config
from spec_data.models.resolve import resolve_model
from spec_data.models.tokenizer import load_tokenizer
from spec_data.shards.errors import ConfigError, DatasetError, RunError
from spec_data.shards.files import dump_json, write_atomically
from spec_data.shards.follow import WORK
from spec_data.shards.reader import MANIFEST
from spec_data.shards.records import as_record, read_json
from spec_data.shards.schema import Evidence, Manifest, PackingRecord
from spec_data.terminal.paths import make_directory

logger = logging.getLogger(__name__)

_EVIDENCE = "evidence.json"
_LONGEST = 1 << 20  # tokens of a sample, where the context of the target is unknown


def set_up_conversion(
    tool: str,
    target: str,
    out: Path,
    directory: str,
    options: CaptureOptions,
    *,
    every_token: bool = False,
    follow: float | None = None,
) -> tuple[CorpusReader, Setup, Callable[[Setup, Plan], TargetBackend], Evidence]:
    """Find what stored states are; return corpus, setup and target of a `generate` of them.

    What was found is taken from `out` if shards were written with it; nothing is written.

    Args:
        tool: what wrote the samples in `directory`, a key of `samples.READERS`.
        options: of `generate`; layers, mask and length are those that are found.
        every_token: supervise every token, and read no stored mask.
        follow: wait for states that are not written yet, so many seconds for the next file.

    Raises:
        ConfigError, MissingError, DatasetError, CorpusError, TargetError: bad input.
        RunError: the states are not those of the target, or not at their tokens.
    """
    options.check()
    check_devices(options.device, None)
    path, trust = resolve_model(target, options.revision)[0], options.trust_remote_code
    text = text_config(load_config(path, trust))
    root, width = Path(directory), text.hidden_size
    if follow is None:
        samples = Samples(tool, root, width, every_token=every_token)
    elif tool == "speculators":
        samples = FollowedSamples(root, width, every_token=every_token, timeout=follow)
    else:
        raise ConfigError(f"--follow waits for the files of speculators, not for those of {tool}")
    logger.info("%s: %d samples of %s", directory, len(samples), samples.opened.tool)
    evidence = _saved_evidence(out)
    if evidence is None:
        if not (out / WORK / PLAN).is_file():  # else one was killed before its first shard
            refuse_other_files(out)
        skeleton = SkeletonTarget(path, (), options.dtype, trust)
        skeleton.move_to(use_device(options.device))
        evidence = find_conventions(
            *(samples, path, load_tokenizer(path, trust), skeleton.normed),
            blocks=text.num_hidden_layers,
            vocabulary=text.vocab_size,
            dtype=options.dtype,
            trust=trust,
        )
    context = context_length(text)
    options = replace(
        options,
        layers=",".join(map(str, sorted(evidence.stored_layers))),
        mask="all" if every_token else "assistant",
        max_length=context if context >= 2 else _LONGEST,
    )
    setup = set_up(target, [directory], options)
    samples.frame = evidence.mask_frame
    how = {name: getattr(evidence, name) for name in ("stored_layers", "final_norm", "mask_frame")}
    setup = replace(setup, converted={"from": tool, **how})
    corpus = open_corpus([directory], setup.options, partial(_sources, samples, setup))
    return corpus, setup, partial(StoredBackend, samples, evidence), evidence


def keep_evidence(out: Path, evidence: Evidence) -> None:
    """Write what was found beside the plan that is made with it."""
    if not (out / MANIFEST).is_file():
        make_directory("--out", out / WORK)
        write_atomically(out / WORK / _EVIDENCE, dump_json(msgspec.to_builtins(evidence)))


def _saved_evidence(out: Path) -> Evidence | None:
    """Return what was found when the shards in `out` were begun; None if there is no shard."""
    file = out / WORK / _EVIDENCE
    if (out / MANIFEST).is_file():
        evidence = Manifest.read(out / MANIFEST).target.converted
        if evidence is None:
            raise ConfigError(f"{out} holds a dataset that was not converted; use another --out")
        return evidence
    if file.is_file() and next((out / WORK).glob("unit-*.json"), None) is not None:
        return as_record(read_json(file), Evidence, file, f"Delete {out} and convert again")
    return None


def _sources(samples: Samples, setup: Setup, name: str, *_given: object) -> list[Source]:
    """Return samples as the one source of a corpus; see `corpus.sources.resolve`."""
    return [
        Source(
            name=Path(name).resolve().name,
            path=name,
            kind=f"states of {samples.opened.tool}",
            rows=lambda _columns: _rows(samples, setup),
            digest=samples.digest,
            count=lambda: len(samples),
        )
    ]


def _rows(samples: Samples, setup: Setup) -> Generator[Row]:
    """Yield the tokens of every sample; note which sample the document of a row is made from."""
    for number in range(len(samples)):
        where = samples.where(number)
        try:
            ids, mask = samples.tokens(number)
        except BadRow as reason:
            yield where, reason
            continue
        row = {"input_ids": ids.tolist(), "loss_mask": mask.tolist()}
        if int(ids.min()) >= 0 and int(ids.max()) < setup.vocab_size:
            document = Document(
                input_ids=row["input_ids"],
                loss_mask=row["loss_mask"],
                turns=(),
                source="",
                where="",
            )
            planned = truncate(document, setup.options.max_length)
            samples.numbers.setdefault(_digest(np.frombuffer(planned.ids, np.int32)), number)
        yield where, row


class StoredBackend(SkeletonTarget):
    """A `backend.TargetBackend` whose states were stored by another tool.

    Generation asks for the states of documents; this one finds the sample that a document was made
    from, and reads them. A document may be a beginning of its sample: the target is causal, so its
    states are the first ones.
    """

    def __init__(self, samples: Samples, evidence: Evidence, setup: Setup, plan: Plan) -> None:
        """Load what the target's weights tell; `samples` are those of the plan."""
        options = setup.options
        super().__init__(setup.model_dir, setup.layers, options.dtype, options.trust_remote_code)
        self.move_to(use_device(options.device))
        self._samples, self._evidence, self._documents = samples, evidence, plan.documents
        if isinstance(samples, FollowedSamples):  # proven with those that are written first
            self.ready = plan.units[0][1]
        if not samples.numbers:  # the plan was made before: only its rows tell their samples
            for _ in _rows(samples, setup):
                pass

    def describe(self) -> dict[str, Any]:
        """Return what the manifest records."""
        return super().describe() | {
            "attn": "auto",
            "backend": "stored",
            "backend_version": self._evidence.tool,
            "devices": self.device.type,
            "converted": msgspec.to_builtins(self._evidence),
        }

    def prove(
        self, documents: Sequence[Tensor], pack_length: int, packing: str = "auto"
    ) -> PackingRecord:
        """Return the form in which nothing is packed; the largest difference found is the noise."""
        return PackingRecord(
            form=REQUESTS,
            tolerance=FLOOR.get(self.dtype, 3e-2),
            noise=max(self._evidence.differences.values()),
            differences={REQUESTS: 0.0},
            documents=len(documents),
            longest=max(map(len, documents)),
        )

    def capture(self, batch: ForwardBatch, form: str, *, full_logits: bool = False) -> States:
        """Read the states of the documents of a batch."""
        if full_logits:
            raise RunError("logits are not stored, so they cannot be read; compute them afterwards")
        real = batch.input_ids[batch.document_ids >= 0]  # int64 [N]
        return States.joined([self._read(ids) for ids in real.split(batch.lengths)])

    def _read(self, ids: Tensor) -> States:
        """Return the states of tokens int64 [T]."""
        number = self._number(ids.numpy().astype(np.int32))
        try:
            states = self._samples.states(number)
        except BadRow as error:
            if not isinstance(self._samples, FollowedSamples):
                where = self._samples.where(number)
                raise DatasetError(
                    f"{where}: changed since the conversion began: {error}"
                ) from None
            states = self._samples.without_states(number, f"is left out: {error}")
        aux, last = (values[: len(ids)] for values in states)
        about = self._evidence
        return self.received(ids, about.stored_layers, aux, last, about.final_norm == BEFORE)

    def _number(self, ids: np.ndarray) -> int:
        """Return the number of the sample that has these tokens, int32 [T], or begins with them."""
        number = self._samples.numbers.get(_digest(ids))
        if number is not None:
            return number
        for d in range(len(self._documents)):  # a proof cuts a few documents
            planned = self._documents.tokens(d, d + 1)["input_ids"]
            if np.array_equal(planned[: len(ids)], ids):
                return self._samples.numbers[_digest(planned)]
        raise RunError("states of tokens that are not planned; this is a bug, please report it")


def _digest(ids: np.ndarray) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(ids, np.int32).tobytes()).digest()[:16]
