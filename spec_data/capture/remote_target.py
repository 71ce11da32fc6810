"""A target in a process elsewhere, asked for one batch at a time by a trainer that stores nothing.

`TargetServer` holds the target, `RemoteTarget` is the trainer's side. A request says what it wants,
its draft vocabulary included, so trainers of different drafts share a server. Both sides know rows,
slots and columns before they read: another shape, dtype or name is refused by its name.

    GET  /target              what the target is, as JSON: `Description`
    POST /batch/SUPERVISION   tensors of a request -> tensors of a batch (`exchange.frames`)
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated

import msgspec
import torch
from torch import Tensor

from spec_data.exchange.access import no_entry
from spec_data.exchange.client import (
    NoAnswer,
    Refusal,
    WrongAnswer,
    ask_tensors,
    asked,
    check_protocol,
    check_url,
    own_headers,
    shown,
)
from spec_data.exchange.frames import (
    CHECKSUM_HEADER,
    HEAD_BYTES,
    FrameError,
    Layout,
    checksum,
    decode,
    encode,
)
from spec_data.exchange.server import Answer, Refused, Request, WebServer
from spec_data.shards.batch import MASS, PROBABILITIES, DraftBatch, as_rows, batch_layout
from spec_data.shards.errors import ConfigError, RunError, SpecDataError, TargetError
from spec_data.shards.packing import PADDING
from spec_data.shards.schema import FINAL, layer_column

if TYPE_CHECKING:
    from spec_data.capture.model import Target

_SECONDS = 600.0  # for one batch
_QUICK = 60.0  # for what the target is
_MAX_TOKENS = 1 << 18  # slots of one request
_IDS, _ATTENTION, _LOSS = "input_ids", "attention_mask", "loss_mask"
_LENGTHS, _VOCABULARY = "seq_lens", "draft_vocabulary"
_SUPERVISIONS = ("final-hidden", "logits", "target-probs")
_ROUNDED = 1e-3  # by which probabilities in float32 may add up to another sum than 1

_Positive = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]


class Description(msgspec.Struct, frozen=True):
    """What a target hands over: layers and sizes; the dtype in which it runs; the largest batch."""

    layers: Annotated[
        list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]], msgspec.Meta(max_length=4096)
    ]
    hidden_size: _Positive
    vocab_size: _Positive
    dtype: str
    max_tokens: _Positive


class TargetServer(WebServer):
    """Answers batches at `url` while `serve_forever` runs; `shutdown` and `server_close` end it."""

    at_once = 4  # answers in memory

    def __init__(
        self,
        target: "Target",
        host: str = "127.0.0.1",
        port: int = 8001,
        *,
        token: str | None = None,
        hosts: Collection[str] = (),
        max_tokens: int = _MAX_TOKENS,
    ) -> None:
        """Listen; port 0 takes a free one, and the host 0.0.0.0 lets other machines ask.

        Args:
            token: the access token; None: that of SPEC_SERVER_TOKEN, else a new one, which clients
                of the same user find in a file.
            hosts: names under which it is asked, beside addresses and the name of this machine.
            max_tokens: rows x slots of the largest batch that it takes.

        Raises:
            OSError: the port is taken, or may not be used. ConfigError: the token is none, or
                its file cannot be written.
        """
        super().__init__(host, port, token=token, hosts=hosts)
        self.target, self.max_tokens = target, max_tokens
        # a target runs one forward at a time
        self._turn = ThreadPoolExecutor(1, "target")

    def __repr__(self) -> str:
        return f"TargetServer({self.url}, {self.target})"

    def server_close(self) -> None:
        super().server_close()
        self._turn.shutdown(wait=False, cancel_futures=True)

    def describe(self) -> Description:
        """Return what a trainer must know of the target."""
        head, dtype = self.target.head, str(self.target.dtype).removeprefix("torch.")
        sizes = (head.hidden_size, head.vocab_size)
        return Description(list(self.target.layers), *sizes, dtype, self.max_tokens)

    async def respond(self, request: Request) -> Answer:
        """Return what the target is, or a batch."""
        place, _, supervision = request.path.removeprefix("/").partition("/")
        if request.path == "/target":
            request.must_be("GET")
            return Answer([msgspec.json.encode(self.describe())])
        if place != "batch":
            raise Refused(404, f"{shown(request.path)[:80]}: there are /target and /batch/NAME")
        request.must_be("POST")
        if supervision not in _SUPERVISIONS:
            raise Refused(
                400, f"supervision {shown(supervision)[:80]!r}: {', '.join(_SUPERVISIONS)}"
            )
        # ids and lengths are int64, masks bool
        most = HEAD_BYTES + 18 * self.max_tokens + 8 * self.target.head.vocab_size
        body = await request.body(most)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._turn, self._batch, body, supervision)

    def _batch(self, body: bytes, supervision: str) -> Answer:
        """Return the batch that is asked for."""
        try:
            given = decode(body, self._check_request)
            self.target.supervise(supervision, given.get(_VOCABULARY))
            ids, attention, loss = (given[name] for name in (_IDS, _ATTENTION, _LOSS))
            batch = self.target.generate_batch(ids, attention, loss, given.get(_LENGTHS))
        except (FrameError, SpecDataError) as error:  # of the request
            raise Refused(400, str(error)) from None
        parts = encode(batch.plain() | batch.hidden)
        return Answer(parts, {CHECKSUM_HEADER: checksum(parts)})

    def _check_request(self, found: Mapping[str, Layout]) -> None:
        """Raise FrameError unless these are the tensors of a request."""
        needed = {_IDS: torch.int64, _ATTENTION: torch.bool, _LOSS: torch.bool}
        others = {_LENGTHS: torch.int64, _VOCABULARY: torch.int64}
        if not set(needed) <= set(found) <= set(needed | others):
            raise FrameError(
                f"a request has {', '.join(needed)}, and perhaps {' and '.join(others)}; this one "
                f"has {shown(', '.join(found))[:200] or 'nothing'}"
            )
        for name, layout in found.items():
            dtype, axes = (needed | others)[name], 1 if name == _VOCABULARY else 2
            if layout.dtype != dtype or len(layout.shape) != axes:
                raise FrameError(f"{name} is {layout}, expected {axes} axes of {dtype}")
        rows, slots = found[_IDS].shape
        for name in (_ATTENTION, _LOSS):
            if found[name].shape != (rows, slots):
                raise FrameError(f"{name} is {found[name]}, and {_IDS} {found[_IDS]}")
        if not 0 < rows * slots <= self.max_tokens:
            raise FrameError(
                f"a batch of {rows} x {slots} tokens; this server takes 1 to {self.max_tokens:,} "
                "(max_tokens of TargetServer)"
            )
        if _LENGTHS in found and not (
            found[_LENGTHS].shape[0] == rows and found[_LENGTHS].shape[1] <= slots
        ):
            raise FrameError(f"{_LENGTHS} is {found[_LENGTHS]} for {rows} rows of {slots} tokens")


class RemoteTarget:
    """The target of a `TargetServer`: `generate_batch` returns what `Target`'s returns there."""

    def __init__(
        self,
        url: str,
        layers: Sequence[int],
        *,
        supervision: str = "final-hidden",
        draft_vocabulary: Tensor | None = None,
        device: torch.device | str = "cpu",
        token: str | None = None,
    ) -> None:
        """Find the server.

        Args:
            url: of the server, such as http://host:8001.
            layers: those that the draft reads, ascending; the server captures no others.
            supervision, draft_vocabulary: as of `Target`. "final-hidden" and "logits" are states;
                "target-probs" is what EAGLE-3 and P-EAGLE learn, without the target's head.
            device: where batches go.
            token: the server's access token; None: that of SPEC_SERVER_TOKEN, else that of the
                file that a server of the same user on this machine leaves.

        Raises:
            ConfigError: the server captures other layers, wants another access token, or is of
                another release. RunError: it does not answer.
        """
        self.url, self.layers = check_url(url), tuple(map(int, layers))
        self.device = torch.device(device)
        if draft_vocabulary is not None:
            draft_vocabulary = torch.as_tensor(draft_vocabulary)
        self.supervision, self.draft_vocabulary = supervision, draft_vocabulary
        self._headers = own_headers(self.url, token)
        self._dtypes = dict[str, torch.dtype]()  # of the first batch, by column
        self._there = self._description()
        if (there := tuple(self._there.layers)) != self.layers:
            raise ConfigError(
                f"{url} hands over layers {there}, and the draft reads {self.layers}; start the "
                "server with a Target of these layers"
            )

    def __repr__(self) -> str:
        return f"RemoteTarget({self.url}, layers {self.layers})"

    def generate_batch(
        self,
        input_ids: Tensor | Sequence[Sequence[int]],
        attention_mask: Tensor | Sequence[Sequence[int]],
        loss_mask: Tensor | Sequence[Sequence[int]],
        seq_lens: Sequence[Sequence[int]] | Tensor | None = None,
    ) -> DraftBatch:
        """Ask for a batch; arguments and result are those of `Target.generate_batch`.

        Raises:
            TargetError: the target refuses it. RunError: the server fails, does not answer, or
                answers with other tokens, shapes or dtypes, or with numbers that are none.
        """
        masks = {_ATTENTION: attention_mask, _LOSS: loss_mask}
        ids = as_rows(_IDS, input_ids).cpu().long()
        given = {_IDS: ids} | {n: as_rows(n, mask).cpu() != 0 for n, mask in masks.items()}
        _, plain = batch_layout(ids, given[_ATTENTION], given[_LOSS], seq_lens)
        if ids.numel() > self._there.max_tokens:
            raise TargetError(
                f"a batch of {ids.shape[0]} x {ids.shape[1]} tokens; {self.url} takes "
                f"{self._there.max_tokens:,} at most (max_tokens of TargetServer)"
            )
        if self.draft_vocabulary is not None:
            given[_VOCABULARY] = self.draft_vocabulary.cpu().long()
        if seq_lens is not None:  # zero-padded [B, D]
            rows = [torch.as_tensor(row).long() for row in seq_lens]
            given[_LENGTHS] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        expected = self._expected(*ids.shape)
        table = self._asked(given, expected)
        self._check_values(table, plain)
        self._dtypes |= {name: values.dtype for name, values in table.items()}
        return DraftBatch.of({name: value.to(self.device) for name, value in table.items()})

    # -- what is asked for ------------------------------------------------------------------------

    def _expected(self, rows: int, slots: int) -> dict[str, tuple[Layout, ...]]:
        """Return what every column of a batch may be."""
        there = self._there
        own = getattr(torch, there.dtype)
        # a residual stream or logits may be float32 where weights are not
        wide = tuple(dict.fromkeys((own, torch.float32)))

        def column(name: str, *size: int) -> dict[str, tuple[Layout, ...]]:
            dtypes = (self._dtypes[name],) if name in self._dtypes else wide
            return {name: tuple(Layout(dtype, (rows, slots, *size)) for dtype in dtypes)}

        def one(name: str, dtype: torch.dtype, *size: int) -> dict[str, tuple[Layout, ...]]:
            return {name: (Layout(dtype, (rows, slots, *size)),)}

        whole = torch.int64
        found = one(_IDS, whole) | one(_LOSS, torch.bool) | one("position_ids", whole)
        found |= one("document_ids", whole) | one("target_argmax", whole)
        for layer in self.layers:
            found |= column(layer_column(layer), there.hidden_size)
        if self.draft_vocabulary is not None:
            size = len(self.draft_vocabulary)
            return found | one(PROBABILITIES, torch.float32, size) | one(MASS, torch.float32)
        if self.supervision == "logits":
            return found | column("logits", there.vocab_size)
        found |= column(FINAL, there.hidden_size)
        return found | one("target_logsumexp", torch.float32)

    def _check_values(self, table: Mapping[str, Tensor], plain: Mapping[str, Tensor]) -> None:
        """Raise RunError for values that no target computes for these tokens."""
        for name, values in plain.items():
            if not torch.equal(table[name], values):
                raise RunError(f"{self.url} answers with other {name} than were asked for")
        padding = plain["document_ids"] == PADDING
        choices = table["target_argmax"]
        if not bool(((choices >= 0) & (choices < self._there.vocab_size)).all()):
            raise RunError(f"{self.url}: target_argmax has ids that the target does not have")
        for name, values in table.items():
            if name in plain:
                continue
            if padding.any() and bool(values[padding].any()):
                raise RunError(f"{self.url}: {name} has values in padding")
            if values.is_floating_point():
                self._check_numbers(name, values)
        if PROBABILITIES in table:
            sums = table[PROBABILITIES].sum(-1) + padding
            mass = table[MASS]
            if (
                float(table[PROBABILITIES].min()) < 0
                or float((sums - 1).abs().max()) > _ROUNDED
                or not 0 <= float(mass.min()) <= float(mass.max()) <= 1 + _ROUNDED
            ):
                raise RunError(f"{self.url}: {PROBABILITIES} are no probabilities")

    def _check_numbers(self, name: str, values: Tensor) -> None:
        """Raise RunError for NaN and infinite values; -inf is a logit that a target may have."""
        # a sum is finite only of finite values, and needs no memory
        if bool(values.sum(dtype=torch.float32).isfinite()):
            return
        bad = values.isnan() | (values == torch.inf)
        if name != "logits":
            bad |= values == -torch.inf
        if bad.any():
            row, slot = (int(x) for x in bad.nonzero()[0, :2])
            raise RunError(
                f"{self.url}: {name} of row {row}, token {slot} is not finite: the target computes "
                "no numbers there. In float16 states overflow: load the target in bfloat16"
            )

    # -- asking -----------------------------------------------------------------------------------

    def _description(self) -> Description:
        try:
            with asked(
                f"{self.url}/target", headers=self._headers, seconds=_QUICK, most=1 << 17
            ) as answer:
                check_protocol(answer)
                found = msgspec.json.decode(answer.read(1 << 17), type=Description)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise RunError(f"{self.url}: what answers there is no TargetServer") from None
        except WrongAnswer as error:
            raise ConfigError(f"{self.url}: {error}") from None
        except (NoAnswer, Refusal) as error:
            raise self._named(error) from None
        if not isinstance(getattr(torch, found.dtype, None), torch.dtype):
            raise RunError(f"{self.url}: what answers there is no TargetServer")
        return found

    def _asked(
        self, given: Mapping[str, Tensor], expected: Mapping[str, tuple[Layout, ...]]
    ) -> dict[str, Tensor]:
        def check(found: dict[str, Layout]) -> None:
            if found.keys() != expected.keys():
                other = shown(", ".join(sorted(found.keys() ^ expected.keys())))[:200]
                raise RunError(
                    f"{self.url}: columns that are missing or were not asked for: {other}"
                )
            for name, layout in found.items():
                if layout not in expected[name]:
                    ours = " or ".join(map(str, expected[name]))
                    raise RunError(f"{self.url}: {name} is {layout}, and {ours} was asked for")

        most = HEAD_BYTES + sum(max(one.bytes for one in some) for some in expected.values())
        place, body = f"{self.url}/batch/{self.supervision}", b"".join(encode(given))
        headers = self._headers | {"Content-Type": "application/octet-stream"}
        try:
            return ask_tensors(place, body, headers, check, seconds=_SECONDS, most=most)
        except WrongAnswer as error:
            raise RunError(f"{self.url}: {error}") from None
        except (NoAnswer, Refusal) as error:
            raise self._named(error) from None

    def _named(self, error: NoAnswer | Refusal) -> SpecDataError:
        """Return what an answer that is none means for the run."""
        if isinstance(error, NoAnswer):
            return RunError(f"{self.url}: no target answers there ({error})")
        if error.status == 401:
            return ConfigError(no_entry(self.url))
        text = f"{self.url}: {error.text}"
        if error.status in (400, 413):
            return TargetError(text)
        return RunError(text) if error.status >= 500 else ConfigError(text)
