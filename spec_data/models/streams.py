"""Targets whose blocks output several residual streams per token, and the one state for drafts.

With hyper-connections (arXiv 2409.19606; mHC, arXiv 2512.24880) a block outputs [B, T, n, H]: n
streams, which each later block mixes anew. A draft reads one state [B, T, H] per layer, so an
engine contracts the streams before it hands them to a draft. States that are contracted otherwise
train without a word, and the draft is then accepted less. So each family has the contraction of the
engines, or is refused. How the families' own heads contract the last block's output is another
matter: what they make is the final state, as of any target.

Read in vLLM 0.33.0 (`models/deepseek_v4/nvidia/model.py`, `models/glm5next/common/model.py`),
SGLang 0.5.23 (`mhc_stream_mean`, `hc_contract`) and llama.cpp 0.5.0 (`build_hc_mean`).
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from spec_data.shards.errors import TargetError

# Config keys for the number of residual streams per token, if there are several (hyper-connections:
# DeepSeek-V4, Hunyuan 4, GLM-5-Next, Qwen4; AltUp: Gemma-3n).
_COUNTS = ("hc_mult", "hc_count", "altup_num_inputs")
MEAN = "mean"
"""The contraction of every family that engines have one for: the mean over the streams."""
_CONTRACTIONS = {"deepseek_v4": MEAN, "glm5_next": MEAN, "glm5_next_text": MEAN}
_NO_STATES = "vLLM 0.33.0 and SGLang 0.5.23 hand no states of its blocks to a draft"
_WHY_NONE = dict.fromkeys(
    ("gemma3n", "gemma3n_text", "hy_v4", "qwen4_exp", "qwen4_exp_text"), _NO_STATES
)


@dataclass(frozen=True)
class Streams:
    """The residual streams of a target: how many per token, and what makes one state of them."""

    count: int = 1
    contraction: str | None = None  # None: one stream, or no engine has a rule

    @property
    def text(self) -> str:
        """The contraction as manifests and drafts record it, such as "mean of 4"; "" of one."""
        return f"{self.contraction} of {self.count}" if self.contraction else ""

    def contract(self, states: Tensor) -> Tensor:
        """Return one state [B, T, H] of the streams [B, T, n, H] of a block; others as they are.

        In the dtype of the target, as engines do.
        """
        several = self.contraction == MEAN and states.dim() == 4 and states.shape[2] == self.count
        return states.mean(dim=2) if several else states


def streams_of(config: Any) -> Streams:
    """Return the residual streams of a target; `config` is its `text_config`."""
    count = max(int(getattr(config, name, None) or 1) for name in _COUNTS)
    known = _CONTRACTIONS.get(getattr(config, "model_type", None) or "")
    return Streams(count, known if count > 1 else None)


def check_streams(name: str, config: Any) -> None:
    """Raise TargetError, beginning with `name`, for streams that no engine contracts.

    `config` is the `text_config` of a target.
    """
    streams = streams_of(config)
    if streams.count > 1 and streams.contraction is None:
        kind = getattr(config, "model_type", None) or ""
        refuse_streams(name, streams.count, _WHY_NONE.get(kind, "no rule of an engine is known"))


def refuse_streams(name: str, count: int, why: str) -> None:
    """Raise TargetError, beginning with `name`, for `count` streams that do not become one."""
    raise TargetError(
        f"{name}: each decoder block outputs {count} residual streams per token "
        f"(hyper-connections), not one state of the hidden size. A draft reads one state per token "
        f"and layer, as its engine makes it of them, and here {why}"
    )


def check_one_stream(name: str, config: Any, what: str) -> None:
    """Raise TargetError for several streams where `what` hands over states of unknown contraction.

    `config` is the `text_config` of a target.
    """
    if (count := streams_of(config).count) > 1:
        refuse_streams(name, count, f"{what} cannot prove it; capture with --backend hf")
