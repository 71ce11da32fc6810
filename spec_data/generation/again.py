"""A finished dataset of which something was lost: what it is, and captured again, it alone.

The same command that made a dataset brings it back. What is on the disk is compared with the
manifest; of shards that are missing or differ, the units are captured again, and every other file
is made again. What was made takes its place only if its bytes are those that were sealed: a machine
or a release that computes other ones changes nothing.
"""

import hashlib
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from spec_data.capture.backend import TargetBackend
from spec_data.capture.mask_forms import VARLEN
from spec_data.corpus.record_reader import CorpusReader
from spec_data.generation.calibrate import calibrate
from spec_data.generation.capture import CaptureSettings, capture_units
from spec_data.generation.plan import PLAN_COLUMNS, Plan
from spec_data.generation.proof import running_facts, target_file_contents
from spec_data.generation.setup import Setup, find_positions, make_plan
from spec_data.generation.transfers import copy_stream
from spec_data.generation.units import check_free_space, explained_failures
from spec_data.generation.workers import Worker, running_workers, worker_lock
from spec_data.shards.checksums import read_batches, row_checksums
from spec_data.shards.codecs import TABLES, load_tables
from spec_data.shards.dataset_card import CARD, dataset_card
from spec_data.shards.errors import DatasetError, RunError
from spec_data.shards.files import cause, unit_name, write_atomically
from spec_data.shards.follow import LEFT_OUT, WORK
from spec_data.shards.index import index_numbers, read_index
from spec_data.shards.pictures import IMAGES
from spec_data.shards.reader import INDEX
from spec_data.shards.schema import OLD_VERSION, Manifest
from spec_data.shards.seal import datasets_files, index_content
from spec_data.shards.writer import write_shard
from spec_data.terminal import NOTICE
from spec_data.terminal.paths import check_directory_to_write
from spec_data.terminal.progress import progress

if TYPE_CHECKING:
    from spec_data.generation.output import LocalOutput

logger = logging.getLogger(__name__)

_STAGE = "again"  # folder in OUT/.generate
_SHOWN = 20  # files that a message names


# -- what is lost ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Lost:
    """A file of a finished dataset that is not what was sealed.

    Attributes:
        name: relative to the dataset. why: what is wrong, in words.
        unit: the unit of a shard; None: it is another file.
    """

    name: str
    why: str
    unit: int | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


def sealed_sums(manifest: Manifest) -> dict[str, str]:
    """Return the SHA-256 of every file of a dataset but the manifest, by name, shards first."""
    made = {name: _sha256(text.encode()) for name, text in datasets_files(manifest).items()}
    card = {CARD: manifest.card} if manifest.card else {}
    return manifest.checksums() | made | card


def lost_files(output: "LocalOutput", manifest: Manifest, worker: Worker) -> list[Lost]:
    """Return what is lost of the shards of a worker, and with the first one of all other files.

    Files are read whole; those on remote storage are compared by their size.
    """
    sums = sealed_sums(manifest)
    units = {record.file: unit for unit, record in enumerate(manifest.shards)}
    mine = set(worker.units(len(units)))
    names = [n for n in sums if (units[n] in mine if n in units else worker.index == 0)]
    lost = []
    for name in progress(names, desc="compare with the seal", unit="files", leave=False):
        if why := output.differs(name, manifest, sums[name]):
            lost.append(Lost(name=name, why=why, unit=units.get(name)))
    return lost


def listed(lost: Sequence[Lost]) -> str:
    """Return the lost files, one a line."""
    more = [f"... and {len(lost) - _SHOWN} more"] if len(lost) > _SHOWN else []
    return "\n".join([*(f"  {one}" for one in lost[:_SHOWN]), *more])


def what_would_be_done(manifest: Manifest, lost: Sequence[Lost]) -> str:
    """Say what `capture_again` does; nothing is done."""
    shards = [manifest.shards[one.unit] for one in lost if one.unit is not None]
    if not lost:
        return "complete: every file is what was sealed, and nothing would be captured"
    tokens, size = sum(s.tokens for s in shards), sum(s.bytes for s in shards)
    return (
        f"{listed(lost)}\n{len(shards)} of {len(manifest.shards)} shards would be captured again "
        f"({sum(s.rows for s in shards):,} documents, {tokens:,} tokens, {size:,} bytes), and "
        f"{len(lost) - len(shards)} other files made again"
    )


# -- again -----------------------------------------------------------------------------------------


def capture_again(
    corpus: CorpusReader,
    setup: Setup,
    output: "LocalOutput",
    manifest: Manifest,
    worker: Worker,
    lost: Sequence[Lost],
    load: Callable[[Setup, Plan], TargetBackend],
) -> None:
    """Make the lost files of a finished dataset again, and put back those with the sealed bytes.

    Raises:
        RunError: some have other bytes here; the others were put back.
        ConfigError: the directory cannot be written. CorpusError, TargetError: as `generate`.
    """
    logger.log(NOTICE, "%s: not what was sealed, and made again:\n%s", output.name, listed(lost))
    if not output.remote:
        check_directory_to_write("--out", output.directory)
    with explained_failures(output.directory), _stage(output, worker) as stage:
        shards = [manifest.shards[one.unit] for one in lost if one.unit is not None]
        needed = max((shard.bytes for shard in shards), default=0)
        needed *= 1 if output.remote else len(shards)
        check_free_space(stage, needed, output.remote)
        work = _Again(setup, output, manifest, stage, tuple(lost))
        work.make_what_follows_from_the_manifest()
        if work.left:
            work.plan = _planned(corpus, setup, manifest, output.name)
            work.make_left_out()
            if shards or any(name.startswith("target/") or name == TABLES for name in work.left):
                with closing(load(setup, work.plan)) as target:
                    work.make_files_of_target(target)
                    work.make_shards(target)
            work.make_index()
    back = [one.name for one in lost if one.name not in work.left]
    if back:
        logger.log(
            NOTICE, "%s: put back, with the sealed bytes: %s", output.name, ", ".join(back[:_SHOWN])
        )
    if work.left:
        raise RunError(work.problem())


@contextmanager
def _stage(output: "LocalOutput", worker: Worker) -> Iterator[Path]:
    """Give an empty folder on the disk of the dataset; no two processes take one unit."""
    with worker_lock(output.directory, str(worker)):
        stage = output.directory / WORK / f"{_STAGE}-{worker.index}"
        shutil.rmtree(stage, ignore_errors=True)  # what a killed process left
        stage.mkdir(parents=True)
        try:
            yield stage
        finally:
            shutil.rmtree(stage, ignore_errors=True)
    if not running_workers(output.directory / WORK):
        shutil.rmtree(output.directory / WORK, ignore_errors=True)


def _planned(corpus: CorpusReader, setup: Setup, manifest: Manifest, where: str) -> Plan:
    """Make the plan of a finished dataset again, and compare its units with the shards.

    Raises:
        RunError: these are not the documents of the dataset.
    """
    sizes = {"max_shard_size": manifest.settings["max_shard_size"]}
    sizes["batch_tokens"] = manifest.settings["batch_tokens"]  # "auto" cuts units by it
    plan = make_plan(corpus, replace(setup, options=replace(setup.options, **sizes)))
    left_out = np.zeros(len(plan.lengths), bool)
    places = [place for place in manifest.left_out.places if place < len(left_out)]
    left_out[places] = True
    planned = [
        (int((~left_out[a:b]).sum()), int(plan.lengths[a:b][~left_out[a:b]].sum()))
        for a, b in plan.units
    ]
    if planned != [(shard.rows, shard.tokens) for shard in manifest.shards]:
        raise RunError(
            f"{where}: the corpus gives other documents here than were captured "
            f"({len(plan.lengths):,} in {len(planned)} units; sealed "
            f"{manifest.totals.documents:,} in {len(manifest.shards)}), so nothing can be put "
            f"back. {_what_differs(manifest, {})}. {_OLD_WAY}"
        )
    return plan


@dataclass
class _Again:
    """The lost files while they are made again.

    Attributes:
        left: names of those that are not put back, with the reason.
        facts: what this run captures with.
    """

    setup: Setup
    output: "LocalOutput"
    manifest: Manifest
    stage: Path
    lost: tuple[Lost, ...]
    plan: Plan = field(init=False)
    left: dict[str, str] = field(default_factory=dict)
    facts: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.left = {one.name: "not made" for one in self.lost}
        self._sums = sealed_sums(self.manifest)

    def _offer(self, name: str, content: bytes) -> None:
        """Put back a small file if its bytes are the sealed ones."""
        if name not in self.left:
            return
        if _sha256(content) != self._sums[name]:
            self.left[name] = "made again, its bytes are others"
            return
        file = self.stage / "file"
        write_atomically(file, content)
        self.output.put(name, file)
        del self.left[name]

    def make_what_follows_from_the_manifest(self) -> None:
        """Make again what `datasets` reads, and the card."""
        for name, text in datasets_files(self.manifest).items():
            self._offer(name, text.encode())
        self._offer(CARD, dataset_card(self.manifest).encode())
        self.left.pop(CARD, None)  # another release writes another one, and nothing reads it

    def make_left_out(self) -> None:
        """Make again the documents that were left out, and the list of images."""
        if IMAGES in self.left:
            self._offer(IMAGES, self.plan.documents.images_text())
        if LEFT_OUT in self.left:
            file = self.stage / LEFT_OUT
            documents = self.plan.documents.select(self.manifest.left_out.places)
            write_shard(file, documents, PLAN_COLUMNS)
            self._offer(LEFT_OUT, file.read_bytes())

    def make_files_of_target(self, target: TargetBackend) -> None:
        """Make again the files of the target, and the tables of the codec."""
        if any(name.startswith("target/") for name in self.left):
            positions = find_positions(self.setup, self.plan, target)
            for name, content in target_file_contents(self.setup, target, positions).items():
                self._offer(f"target/{name}", content)
        if TABLES in self.left:
            size, form = self._sizes()[0], self.manifest.packing.form
            calibrate(self.setup, self.plan, target, form, size, self.stage)
            file = self.stage / TABLES
            self._offer(TABLES, file.read_bytes() if file.is_file() else b"")

    def make_shards(self, target: TargetBackend) -> None:
        """Capture the lost units, with each number of tokens per forward that was captured with."""
        units = [one.unit for one in self.lost if one.unit is not None]
        if not units:
            return
        if TABLES in self.left:
            for unit in units:
                name = self.manifest.shards[unit].file
                self.left[name] = f"not captured: {TABLES} is lost, too"
            return
        if self.manifest.packing.form == VARLEN and target.device.type == "cpu":
            raise RunError(
                f"{self.output.name} was captured on a GPU, with a kernel ({VARLEN}) that no CPU "
                "has: run this on a GPU"
            )
        for size in self._sizes():
            if units:
                self.facts = running_facts(target, size)
                units = self._captured(target, units, size)

    def _sizes(self) -> list[int]:
        """Return the numbers of tokens per forward to try."""
        runs = [self.manifest.captured_with, *self.manifest.also_captured_with]
        given = self.setup.options.tokens_per_forward
        sizes = [run["batch_tokens"] for run in runs] + ([given] if given else [])
        return list(dict.fromkeys(sizes))

    def _captured(self, target: TargetBackend, units: list[int], size: int) -> list[int]:
        """Capture units and put back those with the sealed bytes; return the others."""
        columns, codec = self.manifest.columns, self.manifest.codec
        widths = {c.name: c.width or 1 for c in columns if c.lossy}
        tables = self.output.fetch_file(TABLES) if widths else Path()
        settings = CaptureSettings(
            columns=columns,
            form=self.manifest.packing.form,
            batch_tokens=size,
            tables=load_tables(tables, widths, codec.sha256 if codec else "") if widths else {},
            temperature=self.setup.options.temperature,
            stream=copy_stream(target.device, [c.name for c in columns]),
        )
        wrong, total = [], self.plan.unit_set_tokens(units)
        with progress(total=total, desc="capture again", unit="tok") as bar:
            for unit, captured in capture_units(target, self.plan, units, settings, bar.update):
                record = self.manifest.shards[unit]
                file = self.stage / f"{unit_name(unit)}.arrow"
                made = write_shard(file, captured.data, columns)
                if made.sha256 == record.sha256:
                    self.output.put(record.file, file)
                    del self.left[record.file]
                    continue
                wrong.append(unit)
                self.left[record.file] = self._compared(unit, file)
                file.unlink()
        return wrong

    def _compared(self, unit: int, file: Path) -> str:
        """Say how many documents of a shard that was captured again are not those of the index."""
        text = "captured again, its bytes are others"
        if INDEX in self.left or self.output.remote:
            return text
        try:
            index = read_index(self.output.directory / INDEX, self.manifest)
        except DatasetError:
            return text
        rows = np.flatnonzero(index_numbers(index, "shard") == unit)
        sealed = index_numbers(index, "checksum")[rows]
        made = np.concatenate([row_checksums(batch) for batch in read_batches(file)[1]])
        if len(made) != len(sealed):
            return f"{text} ({len(made)} documents, sealed {len(sealed)})"
        return f"{text} (of {int((made != sealed).sum())} of {len(made)} documents)"

    def make_index(self) -> None:
        """Make the index again from the shards, which must all be there."""
        if INDEX not in self.left:
            return
        missing = [r.file for r in self.manifest.shards if r.file in self.left]
        if missing or self.output.remote:
            self.left[INDEX] = "made again from all shards in a local directory, and there alone"
            return
        prompts = None
        if self.manifest.format_version != OLD_VERSION:
            places = np.array(self.manifest.left_out.places, np.int64)
            prompts = np.delete(self.plan.documents.prompts, places)
        try:
            content = index_content(self.output.directory, self.manifest, None, prompts)
        except (pa.ArrowException, OSError) as error:  # of a worker that is not done
            self.left[INDEX] = (
                f"the shards cannot be read ({cause(error)}); run the same command again"
            )
            return
        self._offer(INDEX, content)

    def problem(self) -> str:
        """Say what is not put back, and what to do."""
        left = [Lost(name=name, why=why) for name, why in self.left.items()]
        return (
            f"{self.output.name}: nothing was replaced of\n{listed(left)}\n"
            f"{_what_differs(self.manifest, self.facts)}. {_OLD_WAY}"
        )


_OLD_WAY = (
    "Run this where the dataset was captured, restore the files from a copy, or capture the whole "
    "dataset again: into another --out, or after deleting this one"
)


def _what_differs(manifest: Manifest, facts: Mapping[str, object]) -> str:
    """Say in what this run differs from those that captured a dataset."""
    from spec_data.models.identify import versions

    runs: Iterable[Mapping[str, object]] = [
        manifest.captured_with,
        *manifest.also_captured_with,
    ]
    here = {"spec_data": versions()["spec_data"], "transformers": versions()["transformers"]}
    sealed = manifest.settings.get("versions", {})
    pairs: list[tuple[str, object, object]] = [
        (n, sealed.get(n), v) for n, v in here.items() if sealed.get(n) != v
    ]
    for name, value in facts.items():
        values = [run.get(name) for run in runs]
        if value not in values:
            pairs.append((name, values[0], value))
    if not pairs:
        return (
            "Nothing that the manifest records differs here: another kind of processor or number "
            "of threads may round otherwise"
        )
    return "Sealed with " + "; ".join(f"{n} {old}, here {new}" for n, old, new in pairs)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
