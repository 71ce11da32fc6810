"""The samples that other trainers stored: token ids, a loss mask, and hidden states.

A reader opens the directory of one tool and says how a sample is read (`READERS`); what all of them
must hold is checked here. Which layers the states are of is not asked of the tool: `evidence`
finds it. Nothing that could run code is loaded.

Shapes: T tokens of a sample, n stored layers, H hidden size.
"""

import gzip
import io
import itertools
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import datasets
import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from spec_data.capture.evidence import SampleStates
from spec_data.corpus.bad_rows import BadRow
from spec_data.models.torch_files import BadTensorsError, load_tensors
from spec_data.shards.errors import (
    CorpusError,
    DatasetError,
    MissingError,
    RunError,
    TargetError,
    an,
)
from spec_data.shards.files import cause, sha256_json
from spec_data.shards.regular_files import read_bounded

logger = logging.getLogger(__name__)

TOKEN, NEXT = "token", "next"
"""Entry t of a stored mask is about token t, or about token t + 1."""


class Stored(NamedTuple):
    """A sample as its tool stored it: mapped tensors, perhaps with an axis of 1 before the others.

    `None` where it stored nothing.
    """

    ids: object  # [T]
    mask: object  # [T]
    aux: object  # [T, n * H]
    last: object  # [T, H]
    scale: Tensor | None = None  # [T, 1], which states of 8-bit floats are multiplied by


@dataclass(frozen=True, kw_only=True)
class Opened:
    """The directory of a tool; `read` returns a sample by its number, or raises BadRow."""

    tool: str
    names: Sequence[str]  # of every sample, for messages: its file below the directory
    files: Sequence[Path]  # that hold the samples
    read: Callable[[int], Stored]
    layers: tuple[int, ...] | None = None  # ids (outputs of blocks) that the tool recorded
    row: Callable[[int], tuple[Tensor | None, Tensor | None]] | None = None
    """Ids and mask of a sample whose states are perhaps not written yet."""
    padded: bool = False  # samples may end with a run of one token id that is not supervised


class Samples:
    """The samples of a directory, by their numbers. To read a malformed one raises BadRow.

    Attributes:
        frame: whether entry t of a stored mask is about `TOKEN` t or the `NEXT` one.
        numbers: of samples whose rows were read, by the digest of the tokens of their documents.
    """

    def __init__(
        self, tool: str, root: Path, hidden_size: int, *, every_token: bool = False
    ) -> None:
        """Open the directory that a tool (a key of `READERS`) wrote; `every_token` is supervised.

        Raises:
            MissingError, DatasetError: it is no such directory, or of a release that is not read.
            CorpusError: no sample can be read.
            TargetError: the states have another width than those of the target.
        """
        if not root.is_dir():
            raise MissingError(f"{root}: no such directory")
        self.root, self.hidden_size, self.every_token = root, hidden_size, every_token
        self.frame = TOKEN
        self.numbers = dict[bytes, int]()
        self.opened = self._open(tool)
        if not self.opened.names:
            raise MissingError(f"{root}: no sample")
        self.layers = self._layers()

    def __len__(self) -> int:
        return len(self.opened.names)

    def _open(self, tool: str) -> Opened:
        return READERS[tool](self.root)

    def candidates(self) -> Sequence[int]:
        """Return the numbers of the samples whose states can be read now."""
        return range(len(self))

    def where(self, number: int) -> str:
        """Return where a sample is, for messages."""
        return f"{self.root}/{self.opened.names[number]}"

    def digest(self) -> str:
        """Return a hash of the names and sizes of all files; no file is read."""
        files = [f for f in self.opened.files if f.is_file()]
        return sha256_json([[f.relative_to(self.root).as_posix(), f.stat().st_size] for f in files])

    def tokens(self, number: int) -> tuple[Tensor, Tensor]:
        """Return ids and mask, int64 [T], entry t about token t; check the shapes of the states."""
        ids, stored = self._row(number)
        if self.every_token:
            return ids, torch.ones_like(ids)
        if stored is None:
            raise BadRow("no loss mask is stored; supervise every token with --mask all")
        mask = _mask_of(stored, ids)
        return ids, mask if self.frame == TOKEN else _one_later(mask)

    def _row(self, number: int) -> tuple[Tensor, object]:
        stored, ids, _, _ = self._read(number)
        return ids, stored.mask

    def states(self, number: int) -> SampleStates:
        """Return the states of a sample."""
        stored, _, aux, last = self._read(number)
        if stored.scale is not None:
            aux, last = (x.float() * stored.scale.float() for x in (aux, last))
        elif aux.element_size() == 1:
            aux, last = aux.bfloat16(), last.bfloat16()
        return SampleStates(aux.unflatten(-1, (self.layers, self.hidden_size)), last)

    def _read(self, number: int) -> tuple[Stored, Tensor, Tensor, Tensor]:
        """Return a sample; and its ids [T] and states [T, n * H] and [T, H], with known shapes."""
        stored = self.opened.read(number)
        if self.opened.padded:
            stored = _without_padding(stored, self.frame)
        ids = _one_row(stored.ids, "input_ids").long()
        aux = _matrix(stored.aux, "the aux states", len(ids), self.layers * self.hidden_size)
        return stored, ids, aux, _matrix(stored.last, "the last state", len(ids), self.hidden_size)

    def _layers(self) -> int:
        """Return how many layers are stored per token, by the first sample that can be read."""
        problem = ""
        for number in self.candidates():
            try:
                width = _dense(self.opened.read(number).aux, "the aux states").shape[-1]
            except BadRow as error:
                problem = problem or f"{self.where(number)}: {error}"
                continue
            if width % self.hidden_size or not width:
                raise TargetError(
                    f"{self.where(number)}: aux states of width {width}, but those of the target "
                    f"have {self.hidden_size} per layer; give the target that was captured"
                )
            return width // self.hidden_size
        raise CorpusError(f"{self.root}: no sample can be read ({problem})")


def _mask_of(value: object, ids: Tensor) -> Tensor:
    """Return a stored mask as int64 [T], one entry for each of the ids."""
    mask = _one_row(value, "loss_mask").long()
    if len(mask) != len(ids):
        raise BadRow(f"loss_mask has {len(mask)} entries for {len(ids)} tokens")
    if int(mask.min()) < 0 or int(mask.max()) > 1:
        raise BadRow("the loss mask holds more than 0 and 1")
    return mask


def _one_later(mask: Tensor) -> Tensor:
    """Return the mask [T] whose entry t is about token t of one whose entry is about t + 1."""
    return torch.cat([mask.new_zeros(1), mask[:-1]])


def _without_padding(stored: Stored, frame: str) -> Stored:
    """Cut a sample after its last token that is supervised, or another one than the very last."""
    ids = _one_row(stored.ids, "input_ids")
    mask = _mask_of(stored.mask, ids)
    supervised = (mask if frame == TOKEN else _one_later(mask)).bool()
    filled = ((ids != ids[-1]) | supervised).nonzero()
    if not len(filled):
        raise BadRow("it has nothing but padding")
    length = int(filled.max()) + 1
    aux, last = (_dense(x, "the states")[:length] for x in (stored.aux, stored.last))
    return Stored(ids[:length], mask[:length], aux, last)


def _dense(value: object, name: str, axes: int = 0) -> Tensor:
    """Return a tensor; one of a batch of 1 without that axis, if it then has so many `axes`."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or not value.ndim:
        raise BadRow(f"{name}: missing, or no dense tensor")
    return value[0] if value.ndim == axes + 1 and value.shape[0] == 1 else value


def _one_row(value: object, name: str) -> Tensor:
    """Return integers [T] that may be stored as [1, T]."""
    value = _dense(value, name, 1)
    if value.ndim != 1 or not len(value):
        raise BadRow(f"{name} has shape {list(value.shape)}, expected [T]")
    if value.is_floating_point() or value.is_complex():
        raise BadRow(f"{name} has dtype {value.dtype}, expected integers")
    return value


def _matrix(value: object, name: str, tokens: int, width: int) -> Tensor:
    """Return states [T, W] that may be stored as [1, T, W]."""
    value = _dense(value, name, 2)
    if tuple(value.shape) != (tokens, width):
        raise BadRow(
            f"{name}: shape {list(value.shape)}, expected [{tokens}, {width}] for {tokens} tokens"
        )
    if not value.is_floating_point():
        raise BadRow(f"{name}: dtype {value.dtype}, expected floating point")
    return value


# -- what readers share ----------------------------------------------------------------------------

_Record = TypeVar("_Record")


def _manifest(file: Path, kind: type[_Record], tool: str) -> _Record:
    """Read a JSON file of a tool."""
    if not file.is_file():
        raise MissingError(f"{file}: missing, so this is not what {tool} stores")
    try:
        return msgspec.json.decode(read_bounded(file), type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DatasetError(f"{file}: no manifest of {tool} that is read here: {error}") from None


_PACKED = 100  # times the bytes of a file that gzip may have packed into it: states pack badly


def _unpacked(file: Path) -> bytes:
    """Return the content of a gzip file."""
    most = _PACKED * file.stat().st_size + (1 << 20)
    with gzip.open(file, "rb") as packed:
        content = packed.read(most)
        if packed.read(1):
            raise BadTensorsError(f"it unpacks to more than {most:,} bytes, as no states do")
    return content


def load_table(file: Path) -> dict[str, Any]:
    """Return the table of tensors in a .pt, .ckpt or .ckpt.gz file: memory-mapped, or decompressed.

    Raises:
        BadRow: the file is missing, damaged, holds code, or holds no table.
    """
    packed = file.suffix == ".gz"
    if not file.is_file():
        raise BadRow("the file is missing")
    try:
        data: Any = io.BytesIO(_unpacked(file)) if packed else file
        table = load_tensors(data, mmap=not packed)
    except MemoryError:
        raise
    except BadTensorsError as error:
        raise BadRow(str(error)) from None
    except Exception as error:  # of many types: the one for refused contents is no torch class
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadRow(
            "the file is damaged, or it holds more than tensors and plain values, which could run "
            f"code when it is loaded ({reason})"
        ) from None
    if not isinstance(table, dict):
        raise BadRow(f"the file holds {an(type(table).__name__)}, not a table of tensors")
    return table


def _tables(tool: str, root: Path, files: Sequence[Path], aux: str, last: str) -> Opened:
    """Open a directory with a table of tensors per sample; `aux` and `last` name its states."""

    def read(number: int) -> Stored:
        table = load_table(files[number])
        ids, mask = _one_row(table.get("input_ids"), "input_ids"), table.get("loss_mask")
        if (packed := table.get("packed_loss_mask")) is not None:
            mask = _unpacked_mask(str(packed), len(ids))
        return Stored(ids, mask, table.get(aux), table.get(last))

    names = [file.relative_to(root).as_posix() for file in files]
    return Opened(tool=tool, names=names, files=files, read=read)


def _numbered_tables(
    tool: str, endings: tuple[str, ...], aux: str, last: str, root: Path
) -> Opened:
    """Open the tables in the files with these endings; data_2 comes before data_10."""

    def key(file: Path) -> list[int | str]:
        parts = re.split(r"(\d+)", file.relative_to(root).as_posix())  # texts and numbers in turn
        return [int(part) if i % 2 else part for i, part in enumerate(parts)]

    files = [p for p in root.rglob("*") if p.name.endswith(endings) and p.is_file()]
    if not files:
        names = " or ".join(f"*{ending}" for ending in endings)
        raise MissingError(f"{root}: no file {names}, so this is not what {tool} stores")
    return _tables(tool, root, sorted(files, key=key), aux, last)


def _expect_files(files: Sequence[Path]) -> None:
    if gone := [file for file in files if not file.is_file()]:
        raise MissingError(f"{gone[0]}: missing, but the manifest names it; copy the cache again")


def _tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, mapped."""
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise BadRow(f"the file is damaged: {cause(error)}") from None


# -- tables written by torch.save ------------------------------------------------------------------

SPECFORGE_AUX, SPECFORGE_LAST = "aux_hidden_state", "hidden_state"


class _TorchSpec(msgspec.Struct):
    version: Literal[1]


class _TorchSpecRow(msgspec.Struct):
    split: str
    file: str


def _torchspec(root: Path) -> Opened:
    """TorchSpec: `dataset.json`, `manifest.jsonl` and `samples/*.pt`, version 1, split "train".

    `packed_loss_mask` has lengths such as "2,3,2", of tokens that are alternately not supervised
    and supervised.
    """
    _manifest(root / "dataset.json", _TorchSpec, "TorchSpec")
    manifest = root / "manifest.jsonl"
    if not manifest.is_file():
        raise MissingError(f"{manifest}: missing; the dataset of TorchSpec has no sample")
    try:
        rows = msgspec.json.Decoder(_TorchSpecRow).decode_lines(manifest.read_bytes())
        files = [root / row.file for row in rows if row.split == "train"]
        if outside := [file for file in files if ".." in file.relative_to(root).parts]:
            raise ValueError(f"{outside[0]} lies outside")
        opened = _tables("TorchSpec", root, files, "hidden_states", "last_hidden_states")
    except (msgspec.MsgspecError, ValueError) as error:  # ValueError: a file lies outside
        raise DatasetError(f"{manifest}: not the rows of TorchSpec: {error}") from None
    if len(files) < len(rows):
        others = len(rows) - len(files)
        logger.warning(
            "warning[left-out-samples]: %s: %d samples of other splits are left out", root, others
        )
    return opened


def _unpacked_mask(packed: str, tokens: int) -> Tensor:
    """Return a mask of runs as int64 [T]; as TorchSpec reads it, cut or filled with zeros."""
    try:
        runs = [int(part) for part in packed.split(",")]
    except ValueError:
        raise BadRow(f"packed_loss_mask {packed[:40]!r}: expected lengths") from None
    if min(runs) < 0:
        raise BadRow("packed_loss_mask has a negative length")
    lengths = torch.tensor([min(run, tokens) for run in runs])  # damaged ones may be huge
    mask = (torch.arange(len(runs)) % 2).repeat_interleave(lengths)[:tokens]
    return torch.cat([mask, torch.zeros(tokens - len(mask), dtype=torch.int64)])


# -- speculators -----------------------------------------------------------------------------------

FOLDER, STATES, IDS, SCALES = "hidden_states", "hidden_states", "token_ids", "hidden_states_scales"


def _speculators(root: Path, *, every_row: bool = False) -> Opened:
    """speculators: a token dataset of `datasets`, and `hidden_states/hs_I.safetensors` per row I.

    A file has `token_ids` [T] and `hidden_states` [T, n + 1, H]: the n layers, then the output of
    the last block. With `hidden_states_scales` [T, 1, 1], the states are 8-bit floats to be
    multiplied. Rows without a file are no samples, but with `every_row`: their files come later.
    `data_I.pt` of older releases is refused: what its last state is changed between them.
    """
    if next(root.glob("data_*.pt"), None) is not None:
        raise DatasetError(
            f"{root}: data_*.pt of an older release of speculators. Its releases disagree on what "
            "the last state is, so these files are not read; make them again with a release that "
            "writes hidden_states/hs_*.safetensors"
        )
    named = (re.fullmatch(r"hs_(\d+)\.safetensors", p.name) for p in root.glob(f"{FOLDER}/*"))
    numbers = sorted(int(match[1]) for match in named if match)
    if not (root / "state.json").is_file() or not numbers:
        raise MissingError(
            f"{root}: expected a token dataset (state.json) and {FOLDER}/hs_0.safetensors, ... "
            "as speculators stores them"
        )
    try:
        rows = datasets.load_from_disk(str(root)).with_format(None)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DatasetError(f"{root}: the token dataset cannot be read: {error!r}") from None
    if numbers[-1] >= len(rows):
        raise DatasetError(
            f"{root}: {FOLDER}/hs_{numbers[-1]}.safetensors has no row: the token dataset has "
            f"{len(rows)}; these states belong to another one"
        )
    if every_row:
        numbers = list(range(len(rows)))
    elif len(numbers) < len(rows):
        logger.warning(
            "warning[left-out-samples]: %s: %d of %d rows have no file of states, and are left out",
            *(root, len(rows) - len(numbers), len(rows)),
        )
    names = [f"{FOLDER}/hs_{number}.safetensors" for number in numbers]

    def read_row(number: int) -> tuple[Tensor | None, Tensor | None]:
        row = rows[numbers[number]]
        return _listed(row.get("input_ids"), "input_ids"), _listed(
            row.get("loss_mask"), "loss_mask"
        )

    def read(number: int) -> Stored:
        (ids, mask), file = read_row(number), root / names[number]
        table = _tensors(file)
        if ids is None or not torch.equal(_one_row(table.get(IDS), IDS), ids):
            raise BadRow("the file has the states of other tokens than its row")
        states, scale = _dense(table.get(STATES), STATES), table.get(SCALES)
        if states.ndim != 3 or states.shape[1] < 2:
            raise BadRow(f"{STATES} has shape {list(states.shape)}, expected [T, n + 1, H]")
        if scale is not None and list(scale.shape) != [len(ids), 1, 1]:
            raise BadRow(f"{SCALES} has shape {list(scale.shape)}, expected [T, 1, 1]")
        scale = None if scale is None else scale[:, 0]
        return Stored(ids, mask, states[:, :-1].flatten(1), states[:, -1], scale)

    files = sorted(root.glob("*.arrow"))
    files += [] if every_row else [root / name for name in names]
    return Opened(tool="speculators", names=names, files=files, read=read, row=read_row)


def _listed(values: object, name: str) -> Tensor | None:
    """Return the list of integers of a row as a tensor [T]; None: it has none."""
    if values is None:
        return None
    try:
        return _one_row(torch.tensor(values), name)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise BadRow(f"{name} of the row is no list of integers: {error}") from None


# -- while speculators' generator writes -----------------------------------------------------------
# The rows of its token dataset are there from the start, so the plan is complete; the files of
# states appear one by one, in any order. A file may be copied to its place: it counts once its
# header and its size agree. The end is told by a file that the user makes.

END = f"{FOLDER}/done"
_FIRST, _MOST_FIRST = 8, 64  # files that must be there before anything is found, and that are used
_POLL = 0.5  # seconds between two looks


class FollowedSamples(Samples):
    """The samples of speculators, whose states are waited for while its generator runs.

    A sample without states when `END` exists is left out.
    """

    def __init__(
        self, root: Path, hidden_size: int, *, every_token: bool, timeout: float = 3600.0
    ) -> None:
        """Wait for the first files. `timeout` are seconds without a new file.

        Raises:
            RunError: no file appeared in time. Others: see `Samples`.
        """
        self._timeout, self._complete = timeout, set[int]()
        super().__init__("speculators", root, hidden_size, every_token=every_token)

    def _open(self, tool: str) -> Opened:
        self._wait(lambda: next(self.root.glob(f"{FOLDER}/hs_*.safetensors"), None) is not None)
        return _speculators(self.root, every_row=True)

    def candidates(self) -> Sequence[int]:
        least = min(_FIRST, len(self))
        self._wait(lambda: len(self._present()) >= least)
        return self._present()

    def _present(self) -> list[int]:
        numbers = (n for n in range(len(self)) if self._is_complete(n))
        return list(itertools.islice(numbers, _MOST_FIRST))

    def _row(self, number: int) -> tuple[Tensor, object]:
        assert self.opened.row is not None
        ids, mask = self.opened.row(number)
        return _one_row(ids, "input_ids").long(), mask

    def states(self, number: int) -> SampleStates:
        if self._wait(lambda: self._is_complete(number)):
            return super().states(number)
        return self.without_states(number, "was never written")

    def without_states(self, number: int, why: str) -> SampleStates:
        """Return states that are not finite, so that the sample is left out, and log `why`."""
        logger.warning("warning[left-out-samples]: %s %s", self.where(number), why)
        tokens = len(self._row(number)[0])
        aux = torch.full((tokens, self.layers, self.hidden_size), torch.nan)
        return SampleStates(aux, aux[:, 0])

    def _is_complete(self, number: int) -> bool:
        if number in self._complete:
            return True
        try:
            with safe_open(self.root / self.opened.names[number], "pt"):
                self._complete.add(number)
        except (SafetensorError, OSError):
            return False
        return True

    def _wait(self, there: Callable[[], bool]) -> bool:
        """Wait until something is there; return False if the end was told before."""
        folder, started = self.root / FOLDER, time.time()
        while True:
            ended = (self.root / END).exists()
            if there():
                return True
            if ended:
                return False
            newest = folder.stat().st_mtime if folder.is_dir() else started
            if time.time() - max(started, newest) > self._timeout:
                raise RunError(
                    f"{folder}: no new file for {self._timeout:g} s; see whether the generator of "
                    f"speculators still runs. The same command resumes. If it has ended: `touch "
                    f"{self.root / END}`, and run the same command again"
                )
            time.sleep(_POLL)


# -- DeepSpec --------------------------------------------------------------------------------------

_INDEX = np.dtype(
    [("sample", "<u8"), ("shard", "<u4"), ("length", "<u4")]
    + [(name, "<u8") for name in ("ids", "attention", "mask", "aux", "last")]
)


class _DeepSpecShard(msgspec.Struct):
    file_name: str


class _DeepSpec(msgspec.Struct):
    version: Literal[2]
    num_samples: int
    hidden_size: int
    hidden_dtype: Literal["bfloat16", "float8_e4m3fn", "float8_e5m2"]
    target_layer_ids: tuple[int, ...]
    shards: list[_DeepSpecShard]
    token_dtype: Literal["int32"]
    mask_dtype: Literal["uint8"]
    index_record_size: Literal[56]


def _deepspec(root: Path) -> Opened:
    """DeepSpec: `manifest.json`, `samples.idx` and raw `shard-*.bin`, version 2.

    A record of samples.idx has the sample, its shard, T, and the offsets of five arrays in that
    shard: token ids (int32 [T]), attention mask and loss mask (uint8 [T]), aux states [T, n, H] and
    last state [T, H], in bfloat16 or a plain cast to 8-bit floating point.
    """
    about = _manifest(root / "manifest.json", _DeepSpec, "DeepSpec")
    file = root / "samples.idx"
    if not file.is_file() or file.stat().st_size != about.num_samples * _INDEX.itemsize:
        raise DatasetError(f"{file}: missing, or not of {about.num_samples} samples")
    index = np.fromfile(file, _INDEX)
    shards = [root / shard.file_name for shard in about.shards]
    _expect_files(shards)
    hidden, layers = about.hidden_size, len(about.target_layer_ids)

    def read(number: int) -> Stored:
        record = index[number]
        length = int(record["length"])
        if record["sample"] != number or record["shard"] >= len(shards):
            raise BadRow(f"the record names sample {record['sample']}, shard {record['shard']}")
        if not length:
            raise BadRow("the record has no token")
        shard = shards[int(record["shard"])]

        def array(name: str, dtype: torch.dtype, width: int = 1) -> Tensor:
            size, start = length * width * dtype.itemsize, int(record[name])
            if start + size > shard.stat().st_size:
                raise BadRow(
                    f"{name} ends beyond {shard.name}: the shard is truncated, or the index"
                )
            data = np.memmap(shard, np.uint8, "c", start, (size,))  # copied where it is written
            return torch.from_numpy(data).view(dtype).view(length, width)

        return Stored(
            array("ids", torch.int32)[:, 0],
            array("mask", torch.uint8)[:, 0],
            array("aux", getattr(torch, about.hidden_dtype), layers * hidden),
            array("last", getattr(torch, about.hidden_dtype), hidden),
        )

    return Opened(
        tool="DeepSpec",
        names=[f"samples.idx record {number}" for number in range(len(index))],
        files=[file, *shards],
        read=read,
        layers=about.target_layer_ids,
    )


# -- AutoModel -------------------------------------------------------------------------------------


class _AutoModel(msgspec.Struct):
    format_version: Literal[1]
    num_samples: Annotated[int, msgspec.Meta(ge=1)]
    shard_size: Annotated[int, msgspec.Meta(ge=1)]
    target_layer_ids: tuple[int, ...]
    complete: bool = True
    target_probs_topk: int | None = None


def _automodel(root: Path) -> Opened:
    """NVIDIA AutoModel: `manifest.json` and `shard-*.safetensors` of its DSpark cache, version 1.

    A shard has samples padded to one length S: `input_ids` and `loss_mask` [B, S],
    `target_hidden_states` [B, S, n * H] and `target_last_hidden_states` [B, S, H]. Lengths are not
    stored: padding is the last run of one token id that is not supervised. What a tokenizer pads on
    the left stays, because the target attended to it. The cache of its EAGLE-3 recipe holds
    probabilities over a draft vocabulary and no final state: it cannot be converted.
    """
    about = _manifest(root / "manifest.json", _AutoModel, "AutoModel's cache of states")
    if about.target_probs_topk is not None:
        raise DatasetError(
            f"{root}: a cache of AutoModel with target_probs_topk: it holds probabilities over a "
            "draft vocabulary and no final state, so it cannot be converted. AutoModel's cache of "
            "states has none"
        )
    if not about.complete:
        raise DatasetError(
            f"{root}: marked as not complete: AutoModel was stopped, or is still writing. Run its "
            "precompute to the end first"
        )
    count = -(-about.num_samples // about.shard_size)
    shards = [root / f"shard-{number:06d}.safetensors" for number in range(count)]
    _expect_files(shards)

    def read(number: int) -> Stored:
        shard, row = divmod(number, about.shard_size)
        try:
            table = {name: tensor[row] for name, tensor in _tensors(shards[shard]).items()}
        except IndexError:
            raise BadRow(f"{shards[shard].name} has no row {row}") from None
        names = ("target_hidden_states", "target_last_hidden_states")
        return Stored(*(table.get(name) for name in ("input_ids", "loss_mask", *names)))

    return Opened(
        tool="AutoModel",
        names=[
            f"{shards[shard].name} row {row}"
            for shard, row in (divmod(n, about.shard_size) for n in range(about.num_samples))
        ],
        files=shards,
        read=read,
        layers=about.target_layer_ids,
        padded=True,
    )


READERS: dict[str, Callable[[Path], Opened]] = {
    "speculators": _speculators,
    # `rows_A-B/data_I.ckpt` or `.ckpt.gz`, by scripts/prepare_hidden_states.py
    "specforge": partial(
        _numbered_tables, "SpecForge", (".ckpt", ".ckpt.gz"), SPECFORGE_AUX, SPECFORGE_LAST
    ),
    "deepspec": _deepspec,
    "automodel": _automodel,
    # a `CONVERSATION.pt` each, by compute_hidden_states_hf.py, with masks if --answer-only-loss
    "modelopt": partial(
        _numbered_tables, "Model-Optimizer", (".pt",), "aux_hidden_states", "hidden_states"
    ),
    "torchspec": _torchspec,
}
"""The reader of each tool, by the name of `convert --from`."""
