"""A replica: one loaded target, proven, that captures units of a plan.

Every engine uses it: the local worker in its own process, and others in processes of a cluster. It
decides nothing about which units it captures.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from spec_data.capture.backend import BackendOptions, TargetBackend, open_backend
from spec_data.capture.proofs import proof_documents, proof_length
from spec_data.generation.batch_size import choose_batch_tokens, longest_row
from spec_data.generation.calibrate import calibrate
from spec_data.generation.capture import (
    CapturedUnit,
    CaptureSettings,
    capture_unit,
)
from spec_data.generation.fitting import find_positions
from spec_data.generation.plan import BATCH_TOKENS, Plan
from spec_data.generation.running import Witness, check_running, running_facts
from spec_data.generation.sample_check import check_agreement
from spec_data.generation.sealing import finish_unit
from spec_data.generation.setup import Setup
from spec_data.generation.target_files import manifest_draft, rope_factors, save_target_files
from spec_data.generation.transfers import transfers_for
from spec_data.shards.codec_tables import TABLES, load_tables
from spec_data.shards.errors import RunError
from spec_data.shards.files import dump_json, write_once
from spec_data.shards.follow import WORK
from spec_data.shards.records import read_json
from spec_data.shards.schema import Manifest
from spec_data.shards.seal import file_records, target_file_names

# -- loaded target ---------------------------------------------------------------------------------
# The target of a plan: load it as the plan asks, and choose the documents that prove its masks.


def load_target(setup: Setup, plan: Plan) -> TargetBackend:
    """Load the target with the backend and the options of the run, or open what was stored.

    Raises:
        TargetError: the target cannot be loaded.
    """
    if setup.stored is not None:
        return setup.stored.load(setup, plan)
    return open_backend(setup.config.backend, backend_options(setup, plan))


def backend_options(setup: Setup, plan: Plan) -> BackendOptions:
    """Return which target a backend loads, and how."""
    config = setup.config
    return BackendOptions(
        path=setup.model_dir,
        layers=setup.layers,
        dtype=config.dtype,
        device=config.device,
        attn=config.attn,
        trust_remote_code=config.trust_remote_code,
        rope_factors=rope_factors(setup, plan),
        spread=config.spread,
        longest=int(plan.lengths.max()),
        batch_tokens=config.forward_tokens or BATCH_TOKENS,
        tensor_parallel=config.vllm_tensor_parallel,
        engine_memory=config.vllm_memory,
    )


def documents_to_prove(setup: Setup, plan: Plan) -> tuple[list[int], list[Tensor]]:
    """Return the documents of the proofs: their numbers in the plan, and their ids int64 [T_d]."""
    offsets, ids = plan.documents.offsets, plan.documents.tokens["input_ids"]
    limit = proof_length(setup.model_config, plan.pack_length)
    chosen = proof_documents(plan.lengths.tolist(), plan.pack_length, limit=limit)
    return chosen, [torch.from_numpy(ids[offsets[d] : offsets[d + 1]]).long() for d in chosen]


# -- replica ---------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)


class Replica:
    """One loaded target, proven, that captures units of a plan."""

    def __init__(
        self,
        setup: Setup,
        plan: Plan,
        out: Path,
        share: Callable[[], bool] | None = None,
    ) -> None:
        """Load the target of `setup` and prove it, or read what was proven before, in `out`.

        `share` is called after the proof; it returns False if it has replaced the proof in `out`
        by that of another worker.

        Raises:
            TargetError, RunError, CorpusError, ConfigError: as `prove_target`.
        """
        self.setup, self.plan, self.out = setup, plan, out
        self.target = load_target(setup, plan)
        try:
            self.draft = draft = prove_target(setup, plan, self.target, out)
            if share is not None and not share():
                self.draft = draft = prove_target(setup, plan, self.target, out)
        except BaseException:
            self.close()
            raise
        self.setup = setup = replace(setup, columns=draft.columns)
        lossy = [c for c in setup.columns if c.lossy]
        sha256 = draft.codec.sha256 if draft.codec else None
        tables = load_tables(out / TABLES, lossy, sha256) if lossy else {}
        self.settings = CaptureSettings(
            columns=setup.columns,
            form=draft.packing.form,
            batch_tokens=self._batch_tokens(),
            tables=tables,
            temperature=setup.config.own_temperature,
            transfers=transfers_for(self.target.device, [c.name for c in setup.columns]),
        )
        self._check_running()

    def _batch_tokens(self) -> int:
        """Return the tokens per forward: those of the proof, unless this run has other devices."""
        asked, form = self.setup.config.forward_tokens, self.draft.packing.form
        proven = self.draft.captured_with
        if proven | {"batch_tokens": 0} == running_facts(self.target, 0):
            return asked or proven["batch_tokens"]
        return choose_batch_tokens(self.target, self.plan, form, self.setup.columns, asked)

    def _check_running(self) -> None:
        """Prove, and record, that this run captures what the proven one did; see `running`."""
        _, documents = documents_to_prove(self.setup, self.plan)
        witness = Witness(self.out, documents, self.settings.form, self.plan.pack_length)
        mine = running_facts(self.target, self.settings.batch_tokens)
        check_running(self.out, self.draft, mine, witness, self.target)

    def capture(self, unit: int, done: Callable[[int], None]) -> CapturedUnit:
        """Capture a unit; `done` is called with the tokens of each batch.

        Out of memory, the unit is captured again in forwards of half as many tokens, and so are
        those after it. `done` is then called with the tokens that do not count, negative.

        Raises:
            RunError: not even the longest row fits.
        """
        while True:
            counted = 0

            def count(tokens: int) -> None:
                nonlocal counted
                counted += tokens
                done(tokens)

            try:
                return capture_unit(self.target, self.plan, unit, self.settings, count)
            except torch.OutOfMemoryError as error:
                problem = str(error).splitlines()[0]
            done(-counted)
            self._halve(problem)  # outside the handler, which keeps the tensors of the forward

    def _halve(self, problem: str) -> None:
        """Go on with half as many tokens per forward, or fewer; see `capture`."""
        row, fits = longest_row(self.plan, self.settings.form), False
        while not fits:
            before = self.settings.batch_tokens
            if before <= row:
                raise RunError(
                    f"out of device memory ({problem}) with one row of {row:,} tokens per forward. "
                    "Finished shards are kept: run the same command again where more memory is "
                    "free, or with the target on several GPUs (--device-map auto)"
                )
            self.settings = replace(self.settings, batch_tokens=max(row, before // 2))
            logger.warning(
                "warning: out of device memory (%s): forwards have %d tokens from now on, not %d",
                *(problem, self.settings.batch_tokens, before),
            )
            fits = self._proves_running()

    def _proves_running(self) -> bool:
        """Free what the allocator keeps, and run `_check_running`; return whether that fits."""
        self.target.peak_memory(lambda: None)
        try:
            self._check_running()
        except torch.OutOfMemoryError:
            return False
        return True

    def finish(self, unit: int, captured: CapturedUnit) -> int:
        """Write the shard of a captured unit, then its record; return the bytes written."""
        return finish_unit(self.out, unit, captured, self.setup.columns)

    def close(self) -> None:
        """Free the memory of the target; nothing can be captured afterwards."""
        self.target.close()


def prove_target(
    setup: Setup,
    plan: Plan,
    target: TargetBackend,
    out: Path,
) -> Manifest:
    """Prove head and packing, check a sample of the corpus, choose codecs, make their tables, and
    save the files of the target, once.

    The result, a manifest without shards, is stored in target.json, so that every worker and every
    resumed run captures in the same way.

    Raises:
        TargetError, RunError: a proof fails.
        CorpusError, ConfigError: the target could not have written the corpus.
    """
    file = out / WORK / "target.json"
    if file.is_file():
        return Manifest.of(read_json(file), str(file))
    positions = find_positions(setup, plan, target)
    chosen, documents = documents_to_prove(setup, plan)
    head_error = None
    if not setup.config.supervision.startswith("logits"):
        head_error = target.prove_head(documents)
    proof = target.prove(documents, plan.pack_length, setup.config.packing)
    level = logging.INFO if "rows" not in proof.form else logging.WARNING
    logger.log(level, "packing: %s", proof)
    asked = setup.config.forward_tokens
    batch_tokens = choose_batch_tokens(target, plan, proof.form, setup.columns, asked)
    check_agreement(setup, plan, target, proof.form, batch_tokens, chosen)
    save_target_files(setup, target, positions, out / "target")
    columns, codec = calibrate(setup, plan, target, proof.form, batch_tokens, out)
    setup = replace(setup, columns=columns)
    Witness(out, documents, proof.form, plan.pack_length).save(target, batch_tokens)
    draft = manifest_draft(setup, plan, target, proof, head_error, positions, codec).changed(
        captured_with=running_facts(target, batch_tokens),
        files=file_records(out, target_file_names(out)),
    )
    write_once(file, dump_json(draft.to_json()))
    return Manifest.of(read_json(file), str(file))
