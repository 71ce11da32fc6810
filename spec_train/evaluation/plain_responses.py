"""Greedy responses of a target without a draft, kept between evaluations.

They are the same for every draft. Everything that can change a token is part of a file's name: the
target's files, dtype, attention, rope and device, the tokens that end a response, and the versions
of the libraries. What is kept is never trusted alone: a response that differs from the one with the
draft is decoded again before anything is said about the draft.
"""

import contextlib
import json
import logging
import platform
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from spec_data.shards.files import cache_directory, sha256_json, write_atomically

log = logging.getLogger(__name__)

KIND = "plain-responses"
"""Of `cache_directory`."""


class PlainResponses:
    """Responses by prompt and limit, read from a file; a damaged file is ignored.

    `file` None: nothing is kept. `used` counts the responses that did not have to be decoded.
    """

    def __init__(self, file: Path | None = None) -> None:
        """Read what is kept in `file`."""
        self.file = file
        self.used = 0
        self._tokens: dict[str, list[int]] = {}
        self._kept: set[str] = set()
        if file is not None:
            with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
                read = json.loads(file.read_text(encoding="utf-8"))
                self._tokens = {key: list(map(int, tokens)) for key, tokens in read.items()}
        self._kept |= self._tokens.keys()

    @classmethod
    def of(cls, model: Any, identity: Mapping[str, Any], stop: Collection[int]) -> "PlainResponses":
        """Find the responses of a loaded target.

        `identity` are the facts of its files (see `models.identify`); without the hash of its
        weights nothing is kept. `stop` are the token ids that end a response.
        """
        if not identity.get("weights_hash"):
            return cls()
        device = model.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        settings = {
            "identity": dict(identity),
            "stop": sorted(stop),
            "dtype": str(model.dtype),
            "device": name,
            "attention": getattr(model.config, "_attn_implementation", None),
            "rope": getattr(model.config.get_text_config(), "rope_parameters", None),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "machine": [platform.machine(), platform.processor()],
            "threads": torch.get_num_threads(),
        }
        digest = sha256_json(json.loads(json.dumps(settings, default=str)))
        return cls(cache_directory(KIND) / f"{digest.removeprefix('sha256:')[:32]}.json")

    def find(self, prompt: Sequence[int], limit: int) -> list[int] | None:
        """Return the response to a prompt of token ids with this limit, or None."""
        key = _key(prompt, limit)
        self.used += key in self._kept
        return self._tokens.get(key)

    def is_kept(self, prompt: Sequence[int], limit: int) -> bool:
        """Return whether the response to a prompt is of an earlier evaluation."""
        return _key(prompt, limit) in self._kept

    def keep(self, prompt: Sequence[int], limit: int, response: Sequence[int]) -> None:
        """Keep a response, token ids, until `save`.

        If an earlier evaluation kept another one for this prompt, the device does not repeat its
        results, and everything of earlier ones is dropped.
        """
        key, tokens = _key(prompt, limit), list(response)
        if key in self._kept and self._tokens[key] != tokens:
            for old in self._kept:
                del self._tokens[old]
            self._kept.clear()
        self._kept.discard(key)
        self._tokens[key] = tokens

    def save(self) -> None:
        """Write the file. A failure is logged: only time is lost."""
        if self.file is None:
            return
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.file, json.dumps(self._tokens))
        except OSError as error:
            log.info("the responses of the target alone were not kept: %s", error)


def _key(prompt: Sequence[int], limit: int) -> str:
    return sha256_json([limit, *map(int, prompt)]).removeprefix("sha256:")[:32]
