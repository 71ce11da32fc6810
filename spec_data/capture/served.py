"""The target of `generate --backend served`: a running vLLM hands over the states of prompts.

Documents are sent to the server as prompts of token ids, many at a time, and their states come back
from the connector inside it (`capture.vllm_connector`), or from a file of vLLM's own connectors.
The server may serve others meanwhile, on another machine, with prefix caching and chunked prefill.

What it hands over is proven before the first shard, and when a run resumes: documents are asked for
twice, so that a cached prefix is used, and every state is compared with what the target's blocks
compute. That says which layers these are, and names tokens whose states are missing or those of
others. Head, final norm and positions are those of the skeleton.

Shapes: T tokens of a document, n layers of the server, H hidden size.
"""

import json
import logging
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec
import torch
from safetensors import SafetensorError
from torch import Tensor

from spec_data.capture.backend import BackendOptions, ForwardBatch
from spec_data.capture.evidence import (
    BEFORE,
    FINAL_STATE,
    SampleStates,
    check_matches,
    matches,
    target_states,
)
from spec_data.capture.hooks import States
from spec_data.capture.mask_forms import REQUESTS
from spec_data.capture.proofs import FLOOR, columns_of, largest_difference, prove_head, token_errors
from spec_data.capture.skeleton import SkeletonTarget
from spec_data.capture.state_server import (
    ASKED,
    IDS,
    STATES,
    fetch_states,
    transfer_config,
)
from spec_data.exchange.client import NoAnswer, Refusal, WrongAnswer, ask, check_url
from spec_data.exchange.frames import HEAD_BYTES, Layout, layout_of
from spec_data.models.devices import use_device
from spec_data.models.engines import engines
from spec_data.models.reading import load_config, text_config
from spec_data.models.resolve import resolve_model
from spec_data.shards.errors import ConfigError, MissingError, RunError, SpecDataError
from spec_data.shards.layer_ids import choose_layers
from spec_data.shards.packing import runs
from spec_data.shards.schema import PackingRecord
from spec_data.terminal.types import comma_list

log = logging.getLogger(__name__)

_REQUESTS = 64  # in flight
_SECONDS = 600.0  # for one answer
_TRIES = 5  # of a request, with growing pauses: 15 s in all
_PROVEN_TOKENS = 2048  # unless the longest document has more
_WRONG = 0.5  # mean relative difference of a token's states from those of the target: not its own
_FEW = 0.02  # of the tokens of a document, which rounding may send to another expert
_MOST = 0.9  # of the tokens: with more wrong ones, it is another layer or another target
_PAGE = 1 << 20  # bytes of an answer of JSON, beside what it repeats of the prompt
_FILE_SUFFIX = ".safetensors"

_Page = TypeVar("_Page")


# What is read of vLLM's answers.
class _Version(msgspec.Struct):
    version: str


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: Annotated[list[_Model], msgspec.Meta(min_length=1)]


class _Choice(msgspec.Struct):
    token_ids: Annotated[list[int], msgspec.Meta(min_length=1)]
    prompt_token_ids: list[int] | None = None


class _Where(msgspec.Struct):
    """Where the states of a request are: in a `StateServer`, or in a file."""

    handle: str = ""
    states_port: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)] | None = None
    hidden_states_path: str | None = None


class _Completion(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]
    kv_transfer_params: _Where | None = None


class _Answer(NamedTuple):
    aux: Tensor  # [T, n, H]
    last: Tensor  # [T, H]
    token: int  # the server's first choice after the document


class ServedBackend(SkeletonTarget):
    """A target in a running server, see `backend.TargetBackend`."""

    def __init__(self, options: BackendOptions) -> None:
        """Find the server; `options.path` is the same target, of which head and norm are read.

        Raises:
            ConfigError: no --server. RunError: it does not answer.
            MissingError, TargetError: the target cannot be read.
        """
        if options.server is None:
            raise ConfigError("--backend served needs --server URL, of the vLLM that runs")
        self._path, _ = resolve_model(str(options.path))
        self._trust = options.trust_remote_code
        blocks = text_config(load_config(self._path, self._trust)).num_hidden_layers
        layers, _ = choose_layers(options.layers, (), blocks)
        super().__init__(
            self._path, layers, options.dtype, self._trust, rope_factors=options.rope_factors
        )
        self.move_to(use_device(options.device))
        self._url = check_url(options.server).removesuffix("/v1")
        self._states_dir = None if options.states_dir is None else Path(options.states_dir)
        self._lost = False  # a connection, or other layers: whether to compare it with the proof
        self._version = self._ask("/version", _Version, tries=1).version
        self._model = self._ask("/v1/models", _Models).data[0].id
        self._stored: list[int] = []  # layer ids in the order of the server, once they are proven
        self._norm, self._differences = "", dict[str, float]()
        self._repeated = 0.0  # the largest difference of a document that was asked for twice

    @classmethod
    def open(cls, options: BackendOptions) -> "ServedBackend":
        return cls(options)

    def describe(self) -> dict[str, Any]:
        """Return what the manifest records; `state_proof` once it is proven."""
        proof = {"state_proof": self._differences} if self._differences else {}
        about = {"attn": "auto", "backend": "served", "backend_version": f"vLLM {self._version}"}
        return super().describe() | about | {"devices": "another process"} | proof

    def close(self) -> None:
        """Leave the server as it is."""

    # -- proofs -----------------------------------------------------------------------------------

    def prove(
        self, documents: Sequence[Tensor], pack_length: int, packing: str = "auto"
    ) -> PackingRecord:
        """Prove what the server's states are, and that it hands over those of every token."""
        if not self._stored:
            self._prove_states(documents)
        return PackingRecord(
            form=REQUESTS,
            tolerance=FLOOR.get(self.dtype, 3e-2),
            noise=self._repeated,
            differences={REQUESTS: self._repeated},
            documents=len(documents),
            longest=max(map(len, documents)),
        )

    def _prove_states(self, documents: Sequence[Tensor]) -> None:
        """Find layers and norm, and compare every state of some documents with the target's."""
        some = list[Tensor]()
        for ids in sorted(documents, key=len, reverse=True):
            if not some or sum(map(len, some)) + len(ids) <= _PROVEN_TOKENS:
                some.append(ids)
        first, again = self._answers(some), self._answers(some)
        computed = target_states(
            self._path, some, self.num_layers, dtype=_name(self.dtype), trust=self._trust
        )
        stored = [SampleStates(answer.aux, answer.last) for answer in first]
        normed = [self.normed(ids, a.last).cpu() for ids, a in zip(some, first, strict=True)]
        chunks = matches(stored, normed, computed, self.num_layers)
        if not any(match.convention.shift for match in chunks):
            states = [match.convention.state for match in chunks]
            for ids, expected, *answers in zip(some, computed, first, again, strict=True):
                for answer, when in zip(answers, ("", " when it was asked for again"), strict=True):
                    self._check_tokens(ids, answer, expected, states, when)
        layers, self._norm = check_matches(chunks, None, "the server", self.num_layers)
        last = {self.num_layers - 1} if self._norm == BEFORE else set()
        if lacking := sorted(set(self.layers) - set(layers) - last):
            raise ConfigError(
                f"--server {self._url} hands over the outputs of blocks {comma_list(layers)}, and "
                f"{comma_list(lacking)} of {comma_list(self.layers)} are missing. Give --layers, "
                f"or start it so:\n  {self._start_line()}"
            )
        self._stored, self._witness = layers, (some[-1], first[-1])  # the shortest
        self._repeated = max(
            largest_difference(*(columns_of(self._states(ids, answer)) for answer in answers))
            for ids, *answers in zip(some, first, again, strict=True)
        )
        self._differences = {
            f"layer {k}" if k in layers else "final": float(f"{match.difference:.2g}")
            for k, match in zip([*layers, "final"], chunks, strict=True)
        }
        log.info(
            "states: layers %s of the server, the last state %s the final norm; on %d documents "
            "(%d tokens, each asked for twice) they differ from the target's own by %.1e at most",
            *(comma_list(layers), self._norm, len(some), sum(map(len, some))),
            max(self._differences.values()),
        )

    def _check_tokens(
        self,
        ids: Tensor,
        answer: _Answer,
        computed: States,
        states: Sequence[int | str],
        when: str,
    ) -> None:
        """Refuse a document whose tokens have, in part, states that are not their own.

        `states` says what each chunk of the answer is: a layer id, or `FINAL_STATE`.

        Raises:
            RunError: see above; it names the tokens.
        """
        found = [*answer.aux.unbind(1), answer.last]
        wanted = [computed.final if k == FINAL_STATE else computed.layers[int(k)] for k in states]
        errors = [token_errors(a, b) for a, b in zip(found, wanted, strict=True)]
        wrong = (torch.stack(errors).mean(0) > _WRONG).numpy()
        if not _FEW < wrong.sum() / len(wrong) < _MOST:
            return
        parts = [f"{start} to {stop - 1}" for start, stop in runs(wrong).tolist()]
        raise RunError(
            f"--server {self._url}: of a document of {len(ids)} tokens{when}, the states of tokens "
            f"{', '.join(parts[:4])} are not those that the target computes: they are missing, or "
            "those of other tokens. Start vLLM with --no-enable-prefix-caching and "
            "--no-enable-chunked-prefill, or take another release. Nothing was written"
        )

    def prove_head(self, documents: Sequence[Tensor]) -> float:
        """Compare the head's first choice after each document with the token that the server took.

        The error is what its logit lacks to the largest one, relative to that.
        """
        if not self._stored:
            self._prove_states(documents)

        def error(ids: Tensor) -> float:
            (answer,) = self._answers([ids])
            logits = self.logits_of(self._states(ids, answer).final[-1:]).float()[0]  # [V]
            return float((logits.amax() - logits[answer.token]) / logits.abs().amax())

        return prove_head(error, documents, self.dtype, "the server's")

    # -- states -----------------------------------------------------------------------------------

    def capture(self, batch: ForwardBatch, form: str, *, full_logits: bool = False) -> States:
        if full_logits:
            raise RunError("a server hands over no logits: use --supervision final-hidden or topk")
        documents = batch.input_ids[batch.document_ids >= 0].split(batch.lengths)
        if not self._stored:  # a run that resumes: it is perhaps another server now
            self._prove_states(documents)
        answers = self._answers(documents)
        while self._lost:  # perhaps it was started again, with other layers
            self._lost = False
            if not self._is_as_proven():
                self._prove_states(documents)
                answers = self._answers(documents)
        parts = [self._states(ids, a) for ids, a in zip(documents, answers, strict=True)]
        return States.joined(parts)

    def _is_as_proven(self) -> bool:
        """Ask again for a document of the proof; return whether its states are the same."""
        ids, proven = self._witness
        (now,) = self._answers([ids])
        if now.aux.shape != proven.aux.shape:
            return False
        states = (columns_of(self._states(ids, answer)) for answer in (proven, now))
        return largest_difference(*states) <= FLOOR.get(self.dtype, 3e-2)

    def _states(self, ids: Tensor, answer: _Answer) -> States:
        return self.received(ids, self._stored, answer.aux, answer.last, self._norm == BEFORE)

    def _answers(self, documents: Sequence[Tensor]) -> list[_Answer]:
        """Ask for documents, int64 [T] each, together; return their states in the same order."""
        with ThreadPoolExecutor(_REQUESTS, "served") as pool:
            return list(pool.map(self._answer, documents))

    def _answer(self, ids: Tensor) -> _Answer:
        prompt = ids.tolist()
        asked = {"model": self._model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        asked |= {"return_token_ids": True, "kv_transfer_params": {ASKED: True}}
        reply = self._ask("/v1/completions", _Completion, asked, room=64 * len(prompt))
        where, choice = reply.kv_transfer_params or _Where(), reply.choices[0]
        if where.states_port is None and where.hidden_states_path is None:
            raise ConfigError(
                f"--server {self._url} hands over no states. Start it so:\n  {self._start_line()}"
            )
        try:
            table, delete = self._fetch(where, prompt)
        except SpecDataError:
            raise
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise RunError(
                f"--server {self._url}: the states of a request did not arrive ({error}); the same "
                "command resumes"
            ) from None
        own_ids = table[IDS].tolist() == prompt == (choice.prompt_token_ids or prompt)
        if not own_ids:
            raise RunError(f"--server {self._url} handed over the states of other tokens")
        if not 0 <= choice.token_ids[0] < self.head.vocab_size:
            raise RunError(
                f"--server {self._url} chose token {choice.token_ids[0]}, which the target lacks"
            )
        delete()
        states = table[STATES]
        self._lost |= bool(self._stored) and states.shape[1] - 1 != len(self._stored)
        return _Answer(states[:, :-1], states[:, -1], choice.token_ids[0])

    def _check_layouts(self, found: Mapping[str, Layout], tokens: int) -> None:
        """Refuse what cannot be the states of a document, before its values are read.

        Raises:
            RunError: states of some tokens. ConfigError: of another target, or in another dtype.
        """
        ids, states = (found.get(n, Layout(torch.uint8, ())) for n in (IDS, STATES))
        shape, hidden = list(states.shape), self.head.hidden_size
        if {(tokens,)} != {ids.shape, states.shape[:1]}:
            raise RunError(
                f"--server {self._url} handed over token ids of shape {list(ids.shape)} with "
                f"states of shape {shape} for {tokens} tokens: some are missing. Nothing was "
                "written"
            )
        others = {torch.int32, torch.int64}
        if len(found) != 2 or ids.dtype not in others:
            raise RunError(
                f"--server {self._url} handed over "
                f"{', '.join(f'{n!r}: {layout}' for n, layout in found.items())[:500]}, expected "
                f"{IDS} and {STATES}"
            )
        if len(shape) != 3 or not 2 <= shape[1] <= self.num_layers + 1 or shape[2] != hidden:
            raise ConfigError(
                f"--server {self._url}: states of shape {shape}, expected [{tokens}, layers + 1, "
                f"{hidden}]: it serves another target, or one layer. Start it so:\n  "
                f"{self._start_line()}"
            )
        if states.dtype != self.dtype:
            raise ConfigError(
                f"--server {self._url} runs in {_name(states.dtype)}, and the target is read in "
                f"{_name(self.dtype)}: give --dtype {_name(states.dtype)}"
            )

    def _fetch(
        self, where: _Where, prompt: Sequence[int]
    ) -> tuple[dict[str, Tensor], Callable[[], None]]:
        """Return the tensors that an answer tells of, and what deletes them."""

        def check(found: Mapping[str, Layout]) -> None:
            self._check_layouts(found, len(prompt))

        if where.states_port is not None:
            host = urlsplit(self._url).hostname or "127.0.0.1"
            # `check` says which target it is before a large answer is read
            table = fetch_states(host, where.states_port, where.handle, check, most=1 << 40)
            return table, lambda: None
        try:  # files of vLLM's own connector, or of hs-connectors
            from hs_connectors import FP8Transfer  # reads plain ones as well
        except ImportError:
            raise MissingError(
                f"--server {self._url} writes files of states: pip install hs-connectors"
            ) from None
        file = self._file_of(str(where.hidden_states_path))
        transfer = FP8Transfer(file, self.dtype)
        most = HEAD_BYTES + len(prompt) * 8 * (2 + self.head.hidden_size * (self.num_layers + 1))
        if (size := file.stat().st_size) > most:
            raise WrongAnswer(f"{file} has {size:,} bytes, and {most:,} are enough")
        table = transfer.get_generated({"hidden_states_path": str(file)}) or {}
        table = {name: table[name] for name in (IDS, STATES)}
        check({name: layout_of(tensor) for name, tensor in table.items()})
        return table, lambda: transfer.delete(str(file))

    def _file_of(self, named: str) -> Path:
        """Return the file that the server names, if it lies where the user lets it write.

        Raises:
            ConfigError: it lies elsewhere, also by a link.
        """
        if self._states_dir is None:
            raise ConfigError(
                f"--server {self._url} writes files of states ({named!r}): give --states-dir DIR, "
                "the directory of the shared disk into which it writes them"
            )
        plain = named.replace("\0", "")
        folder, file = (Path(os.path.realpath(path)) for path in (self._states_dir, plain))
        if plain != named or not (
            file.is_relative_to(folder) and file.suffix == _FILE_SUFFIX and file.is_file()
        ):
            raise ConfigError(
                f"--server {self._url} names {named!r}, which is no {_FILE_SUFFIX} file below "
                f"--states-dir {self._states_dir}: it was neither read nor deleted"
            )
        return file

    def _start_line(self) -> str:
        """Return the command that starts vLLM so that it hands over what is asked for."""
        ids = [*(k + 1 for k in self.layers if k + 1 < self.num_layers), self.num_layers]
        config = {"hf_config": {engines().engine["vllm"].aux_layers: ids}}
        draft = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
        options = {
            "--dtype": _name(self.dtype),
            "--speculative-config": json.dumps(draft | {"draft_model_config": config}),
            "--kv-transfer-config": json.dumps(transfer_config(8001)),
        }
        return shlex.join(["vllm", "serve", str(self._path), *sum(options.items(), ())])

    def _ask(
        self,
        path: str,
        kind: type[_Page],
        body: dict[str, Any] | None = None,
        *,
        tries: int = _TRIES,
        room: int = 0,
    ) -> _Page:
        """Return an answer of the server; what may pass is tried again.

        Raises:
            ConfigError: it refuses the request. RunError: it does not answer, or in another form.
        """
        for pause in (*(2.0**n for n in range(tries - 1)), None):
            try:
                page = self._ask_once(path, body, _PAGE + room)
                break
            except RunError as error:
                if pause is None:
                    raise
                log.info("%s; trying again in %g s", error, pause)
                time.sleep(pause)
        try:
            return msgspec.json.decode(page, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise RunError(
                f"--server {self._url}{path}: an answer has not the form of vLLM's ({error})"
            ) from None

    def _ask_once(self, path: str, body: dict[str, Any] | None, most: int) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        try:
            return ask(self._url + path, data, headers=headers, seconds=_SECONDS, most=most)
        except Refusal as error:
            self._lost |= error.status in (502, 503, 504)  # of a proxy before it
            passing = error.status >= 500 or error.status in (408, 429)
            said = f"--server {self._url}{path}: {error.status} {error.text[:500]}"
            raise (RunError if passing else ConfigError)(said) from None
        except NoAnswer as error:
            self._lost = True
            raise RunError(
                f"--server {self._url} does not answer ({error}); the same command resumes. vLLM "
                f"hands over states if it is started so:\n  {self._start_line()}"
            ) from None
        except WrongAnswer as error:
            raise ConfigError(f"--server {self._url}{path}: {error}") from None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
