"""Which layers of a draft have a sliding window, from the keys of any program's config.json.

A window of W positions: a query at position p sees the keys at p - W + 1 to p. The keys mean what
the config class of their `model_type` makes of them (transformers 5):

- qwen2, qwen3: without `use_sliding_window` there is no window, even if `sliding_window` is set.
  With it, the window is `sliding_window` (4096 if absent, none if null). Without `layer_types`, the
  layers from `max_window_layers` (28) on slide.
- llama and other types: transformers' Llama has no windows and ignores all four keys. The
  speculators library and vLLM read `layer_types` and `sliding_window` of such a draft as they are,
  so a layer slides if both say so.
- `dflash_config.use_swa` (ModelOpt, MiMo): vLLM slides every layer, with `swa_window_size`. The
  two keys mean the same at the top level.

`docs/windows.md` compares trainers and engines.
"""

import logging
from dataclasses import dataclass
from typing import Any

from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.names import BLOCK_TABLE, table_of
from spec_train.options.draft_options import FULL, SLIDING

log = logging.getLogger(__name__)

_QWEN = ("qwen2", "qwen3")
_QWEN_WINDOW, _QWEN_FULL_LAYERS = 4096, 28  # defaults of transformers' Qwen2Config and Qwen3Config


@dataclass(frozen=True)
class Windows:
    """The windows of a draft's layers; without a sliding layer, both fields are empty."""

    sliding_window: int | None = None
    layer_types: tuple[str, ...] = ()

    def keys(self) -> dict[str, Any]:
        """Return the keys of our config.json that say so; none if every layer is full."""
        if not self.layer_types:
            return {}
        return {
            "sliding_window": self.sliding_window,
            "layer_types": list(self.layer_types),
            "use_sliding_window": True,
        }


def windows_of(files: DraftFiles, layers: int | None = None) -> Windows:
    """Return the windows of a flat config (of speculators files: the unwrapped one).

    `layers` is the draft's number of decoder layers; None: `num_hidden_layers`, or 1. A config that
    was copied from the target's may have more entries in `layer_types`: the first ones are read, as
    engines do. A DraftError names a value that no reader accepts.
    """
    raw = files.config
    count = layers or raw.get("num_hidden_layers") or 1
    swa = raw | table_of(raw, BLOCK_TABLE)
    if swa.get("use_swa") and SLIDING not in _types(files, raw, count):
        window = swa.get("swa_window_size", raw.get("sliding_window"))
        if window is None:
            raise files.bad_config(
                f"{BLOCK_TABLE}.use_swa = true needs swa_window_size or sliding_window"
            )
        return Windows(_positive(files, window), (SLIDING,) * count)
    types, window = _types(files, raw, count), raw.get("sliding_window")
    if raw.get("model_type") in _QWEN:
        window = None
        if raw.get("use_sliding_window"):
            window = raw.get("sliding_window", _QWEN_WINDOW)
        if not types and window is not None:
            start = raw.get("max_window_layers", _QWEN_FULL_LAYERS)
            types = tuple(SLIDING if i >= start else FULL for i in range(count))
    if window is None or SLIDING not in types:
        return Windows()
    if len(raw.get("layer_types") or ()) > count:
        log.warning(
            "warning[assumed]: %s: layer_types has more entries than the draft has layers, so it "
            "may be a copy of the target's; the draft is read with a window of %s in its first "
            "layers, as vLLM serves it. Remove layer_types if it was trained without a window",
            files.config_path,
            window,
        )
    return Windows(_positive(files, window), types)


def slides_non_causal(files: DraftFiles, windows: Windows) -> bool:
    """Return whether slots of a block draft see later slots of their block in sliding layers.

    In full layers they always do (see `causal_windows`). `is_causal` and `dflash_config.causal`, in
    this order, are for all layers. Then `sliding_window_non_causal` of the speculators library is
    read. Without any of them sliding layers are causal, which is the default of that library, vLLM
    and SGLang.
    """
    raw = files.config
    if (causal := _said_causal(raw)[1]) is not None:
        return not causal
    swa = raw | table_of(raw, BLOCK_TABLE)
    if swa.get("use_swa") and raw.get("layer_types") is None:
        return True
    return bool(raw.get("sliding_window_non_causal", False))


def causal_windows(files: DraftFiles, windows: Windows, layers: int) -> Windows:
    """Return the windows of a block draft whose full layers may be causal inside a block.

    Such a layer is one that slides, with a window as long as the context.
    """
    name, causal = _said_causal(files.config)
    if not causal or set(windows.layer_types) == {SLIDING}:
        return windows
    length = files.config.get("max_position_embeddings")
    if windows.layer_types or length is None:
        raise files.bad_config(
            f"{name} = true: full layers that are causal inside a block are read as sliding ones "
            "with a window of max_position_embeddings; this draft "
            + ("has other sliding layers" if windows.layer_types else "does not have that key")
        )
    return Windows(_positive(files, length), (SLIDING,) * layers)


def _said_causal(raw: dict[str, Any]) -> tuple[str, bool | None]:
    """Return what a config says of all layers, and under which key; None: nothing."""
    table = table_of(raw, BLOCK_TABLE)
    for where, name, said in (
        ("", "is_causal", raw),
        (f"{BLOCK_TABLE}.", "causal", table),
        ("", "causal", raw),
    ):
        if (causal := said.get(name)) is not None:
            return where + name, bool(causal)
    return "", None


def _types(files: DraftFiles, raw: dict[str, Any], count: int) -> tuple[str, ...]:
    """Return the first `count` entries of `layer_types`; () if the key is absent or null."""
    types_given = raw.get("layer_types")
    if types_given is None:
        return ()
    if not isinstance(types_given, list | tuple) or len(types_given) < count:
        raise files.bad_config(
            f"layer_types = {types_given}: expected an entry for each of the draft's {count} layers"
        )
    types = tuple(types_given[:count])
    if odd := sorted({str(kind) for kind in types} - {FULL, SLIDING}):
        raise files.bad_config(
            f"layer_types has {', '.join(odd)}; drafts have {FULL} and {SLIDING} only"
        )
    return types


def _positive(files: DraftFiles, window: Any) -> int:
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise files.bad_config(f"sliding_window = {window}: expected a number of positions")
    return window
