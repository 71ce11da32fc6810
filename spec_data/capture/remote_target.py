"""A target in a process elsewhere, asked for one batch at a time by a trainer that stores nothing.

`TargetServer` holds the target, `RemoteTarget` is the trainer's side. A request says what it wants,
its draft vocabulary included, so trainers of different drafts share a server. Bodies are those of
safetensors files, over HTTP: no code can come with them, and there is no password.
"""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from http.server import ThreadingHTTPServer
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from spec_data.capture.state_server import QuietHandler
from spec_data.shards.batch import DraftBatch, as_rows
from spec_data.shards.errors import ConfigError, RunError, SpecDataError, TargetError

if TYPE_CHECKING:
    from spec_data.capture.model import Target

_SECONDS = 600.0  # for one batch


class TargetServer(ThreadingHTTPServer):
    """Answers batches at `url` while `serve_forever` runs; `shutdown` and `server_close` end it."""

    daemon_threads = True

    def __init__(self, target: "Target", host: str = "127.0.0.1", port: int = 8001) -> None:
        """Listen; port 0 takes a free one, and the host 0.0.0.0 lets other machines ask.

        Raises:
            OSError: the port is taken, or may not be used.
        """
        super().__init__((host, port), _Handler)
        self.target, self._turn = target, threading.Lock()

    def __repr__(self) -> str:
        return f"TargetServer({self.url}, {self.target})"

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}"

    def answer(self, asked: dict[str, Tensor], supervision: str) -> dict[str, Tensor]:
        """Return the columns of the batch that is asked for, on the CPU."""
        names = ("input_ids", "attention_mask", "loss_mask")
        with self._turn:  # a target runs one forward at a time
            self.target.supervise(supervision, asked.get("draft_vocabulary"))
            ids, attention, mask = (asked[name] for name in names)
            batch = self.target.generate_batch(ids, attention, mask, asked.get("seq_lens"))
        return _whole(batch.plain() | batch.hidden)


class _Handler(QuietHandler):
    server: TargetServer

    def do_GET(self) -> None:
        self.answer(200, json.dumps(list(self.server.target.layers)).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            supervision = self.path.rpartition("/")[2]
            self.answer(200, save(self.server.answer(load(body), supervision)))
        except SpecDataError as error:  # of the request
            self.answer(400, str(error).encode())
        except Exception as error:
            self.answer(500, f"{type(error).__name__}: {error}".encode())


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
    ) -> None:
        """Find the server.

        Args:
            url: of the server, such as http://host:8001.
            layers: those that the draft reads, ascending; the server captures no others.
            supervision, draft_vocabulary: as of `Target`. "final-hidden" and "logits" are states;
                "target-probs" is what EAGLE-3 and P-EAGLE learn, without the target's head.
            device: where batches go.

        Raises:
            ConfigError: the server captures other layers. RunError: it does not answer.
        """
        self.url, self.layers = url.rstrip("/"), tuple(map(int, layers))
        self.device = torch.device(device)
        if draft_vocabulary is not None:
            draft_vocabulary = torch.as_tensor(draft_vocabulary)
        self.supervision, self.draft_vocabulary = supervision, draft_vocabulary
        try:
            there = tuple(json.loads(self._ask("layers")))
        except ValueError:
            raise RunError(f"{url}: what answers there is no TargetServer") from None
        if there != self.layers:
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
            TargetError: the target refuses it. RunError: the server fails, or does not answer.
        """
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "loss_mask": loss_mask}
        asked = {name: as_rows(name, values) for name, values in given.items()}
        if self.draft_vocabulary is not None:
            asked["draft_vocabulary"] = self.draft_vocabulary
        if seq_lens is not None:  # zero-padded [B, D]
            rows = [torch.as_tensor(row) for row in seq_lens]
            asked["seq_lens"] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        try:
            table = load(self._ask(f"batch/{self.supervision}", save(_whole(asked))))
        except SafetensorError as error:
            raise RunError(f"{self.url}: its answer is damaged ({error})") from None
        return DraftBatch.of({name: value.to(self.device) for name, value in table.items()})

    def _ask(self, what: str, body: bytes | None = None) -> bytes:
        try:
            with urllib.request.urlopen(f"{self.url}/{what}", body, _SECONDS) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            text = f"{self.url}: {error.read().decode(errors='replace')}"
            raise (TargetError if error.code == 400 else RunError)(text) from None
        except (OSError, ValueError, HTTPException) as error:  # the last: cut in its middle
            raise RunError(f"{self.url}: no target answers there ({error})") from None


def _whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies on the CPU that share no memory, as safetensors wants them."""
    return {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}
