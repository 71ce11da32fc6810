"""Greedy responses of a target without a draft, kept between evaluations.

They are the same for every draft, so they are decoded once and kept in a file per target and
settings, in the cache directory (see `shards.cache_directory`). Everything that can change a token
is part of the file's name: the target's weights, config, dtype, attention and device, the longest
response, and the versions of the libraries. A file that is damaged in any way is ignored.
"""

import hashlib
import json
import logging
import platform
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from spec_data.shards.cache_directory import cache_directory
from spec_data.shards.files import sha256_json, write_atomically

log = logging.getLogger(__name__)

_MOST_FILES = 64


class PlainResponses:
    """Responses by prompt; read from a file when made, written back by `save`."""

    def __init__(self, file: Path | None) -> None:
        """Read what is kept in `file`; None keeps nothing between evaluations."""
        self._file = file
        self._kept: dict[str, list[int]] = _read(file) if file else {}
        self._new = False
        self.used = 0
        """Responses that did not have to be decoded."""

    @classmethod
    def of(
        cls,
        model: Any,
        identity: Mapping[str, Any],
        limit: int,
        stop: Collection[int],
        batch: int = 1,
    ) -> "PlainResponses":
        """Find the responses of a target.

        Args:
            model: the loaded target.
            identity: the facts of its files (see `models.identify`).
            limit: the longest response, in tokens.
            stop: the token ids that end a response.
            batch: prompts per forward. In half precision, where near-ties are common, another
                batch has other responses.
        """
        settings = {
            "identity": dict(identity),
            "limit": limit,
            "stop": sorted(stop),
            "dtype": str(model.dtype),
            "device": model.device.type,
            "attention": getattr(model.config, "_attn_implementation", None),
            "rope": getattr(model.config.get_text_config(), "rope_parameters", None),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
        }
        if batch > 1 and model.dtype not in (torch.float32, torch.float64):
            settings["batch"] = batch
        name = sha256_json(settings).removeprefix("sha256:")[:32]
        return cls(cache_directory("plain-responses") / f"{name}.json")

    def find(self, prompt: Sequence[int], limit: int) -> list[int] | None:
        """Return the kept response to a prompt of token ids with this limit, or None."""
        found = self._kept.get(_key(prompt, limit))
        self.used += found is not None
        return found

    def keep(self, prompt: Sequence[int], limit: int, response: Sequence[int]) -> None:
        """Keep a response, token ids, until `save`.

        If another one is kept for this prompt, the device does not repeat its results, and all
        kept responses are dropped.
        """
        key, tokens = _key(prompt, limit), list(response)
        if self._kept.get(key, tokens) != tokens:
            log.info("this device does not repeat its responses: kept ones are not used")
            self._kept.clear()
        self._new |= key not in self._kept
        self._kept[key] = tokens

    def save(self) -> None:
        """Write the file if there is something new. A failure is logged: only time is lost."""
        if self._file is None or not self._new:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            others = sorted(self._file.parent.glob("*.json"), key=lambda f: f.stat().st_mtime)
            for old in others[: max(0, len(others) - _MOST_FILES + 1)]:
                old.unlink(missing_ok=True)
            body = {"sha256": sha256_json(self._kept), "responses": self._kept}
            write_atomically(self._file, json.dumps(body))
        except OSError as error:
            log.info("the responses of the target alone were not kept: %s", error)


def _key(prompt: Sequence[int], limit: int) -> str:
    return hashlib.sha256(json.dumps([limit, *map(int, prompt)]).encode()).hexdigest()[:32]


def _read(file: Path) -> dict[str, list[int]]:
    """Return the responses of a file; none if it does not exist or is damaged."""
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
        responses = body["responses"]
        if body["sha256"] != sha256_json(responses):
            raise ValueError("wrong checksum")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.info("%s is not used: %s", file, error)
        return {}
    return responses
