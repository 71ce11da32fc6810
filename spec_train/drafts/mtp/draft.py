"""The target's own MTP block, trained to draft several tokens (FastMTP, arXiv 2509.18362).

Slot t reads the target's final state f_t and the known token x_{t+1}, each after a norm of its own:

    h_t = block(fc [enorm(embedding of x_{t+1}) ; hnorm(f_t)])

and predicts x_{t+2} by the target's frozen head of norm(h_t). The next step reads the draft's own
state instead of f_t, and the next token: one block, as often as there are steps. The state that is
fed back is norm(h_t), as transformers, vLLM and SGLang do it for DeepSeek-V3; without
`norm_output`, it is h_t. Targets are published with a block that was trained for one step. The loss
of step s, counted from 0, has the weight step_decay ** s, and is divided as that of EAGLE-3.

The block is a decoder layer of the target's family, whatever its attention and experts (see
`spec_data.models.mtp`). Only the attention itself is computed here.

B packs, T slots, A active slots, H hidden size.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from spec_data.models.families import TargetShape, block_count
from spec_data.models.mtp import MTP, make_block, own_tensors
from spec_data.shards.errors import DatasetError, DraftError, TargetError
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.drafts.config import DraftConfig
from spec_train.drafts.eagle3.draft import UnrolledDraft
from spec_train.drafts.layers import Attend, Rotary
from spec_train.drafts.mtp.options import MtpOptions
from spec_train.drafts.slots import gather_slots
from spec_train.drafts.unroll import FinalStatesDraft, Pairs, Unroll
from spec_train.formats.draft_files import check_tensors
from spec_train.formats.draft_seal import SECTION
from spec_train.losses.head import TargetHead

CLASS = "TargetMTP"
_TARGET = "target"
_FED_BACK_OTHERWISE = ("glm4_moe", "glm4_moe_lite")
"""Targets whose blocks get the state after its norm from SGLang (glm4_moe_nextn.py), and before it
from vLLM (glm4_moe_mtp.py)."""


@dataclass(frozen=True, kw_only=True)
class MtpConfig(DraftConfig):
    """The target's config.json, from which the block is made, and what the block reads."""

    draft: ClassVar[str] = "mtp"
    architectures: ClassVar[tuple[str, ...]] = (CLASS,)
    reads_layers: ClassVar[bool] = False
    not_keys: ClassVar[tuple[str, ...]] = (
        *DraftConfig.not_keys,
        *("target_hidden_size", "draft_vocab_size", _TARGET),
    )
    of_files: ClassVar[tuple[str, ...]] = ("states_first",)

    norm_output: bool = True  # the carried state is normed
    states_first: bool = False  # fc reads [state ; embedding]
    target: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_target(cls, target_config: dict[str, Any], **given: Any) -> Self:
        """Derive the configuration as other drafts do, with the target's config.json in it.

        Raises:
            DraftError: see there; or engines disagree on the state that is fed back, and the
                options do not say which of them it is for.
        """
        options, kind = given["options"], target_config.get("model_type")
        if kind in _FED_BACK_OTHERWISE and options.depth > 1 and "norm_output" not in options.given:
            raise DraftError(
                f"{kind}: engines disagree on the state that a block of this target gets from its "
                "own last step, so a block that is trained for several steps is right in one of "
                "them only. Say for which: --norm-output for SGLang and llama.cpp, "
                "--no-norm-output for vLLM; or --depth 1, which is right in all"
            )
        return super().from_target(target_config, **given, target=target_config)

    @classmethod
    def from_options(cls, options: MtpOptions, shape: TargetShape) -> dict[str, Any]:
        return {"norm_output": options.norm_output}

    def to_json(self, options: MtpOptions) -> dict[str, Any]:
        section = self.own_json(options) | {_TARGET: self.target}
        return {"architectures": [CLASS], **self.shared_json(), **self.shape_json()} | {
            SECTION: section
        }

    @classmethod
    def from_json(cls, raw: dict[str, Any], where: str) -> Self:
        config = super().from_json(raw, where)
        if _TARGET not in raw[SECTION]:
            raise DraftError(f"{where}: lacks {SECTION}.{_TARGET}; it was edited or damaged")
        return dataclasses.replace(config, target=raw[SECTION][_TARGET])


class MtpDraft(FinalStatesDraft, UnrolledDraft):
    """The draft that `spec-train fit mtp` trains. The head is the target's and is not stored."""

    config_class: ClassVar[type[DraftConfig]] = MtpConfig

    def __init__(self, config: MtpConfig, options: MtpOptions | None = None) -> None:
        super().__init__(config, options)
        size = config.hidden_size
        try:
            self.block, norm = make_block(config.target)
        except TargetError as error:
            raise DraftError(str(error)) from None
        self.enorm, self.hnorm, self.norm = norm(), norm(), norm()
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.rotary = Rotary(config)
        self.make_vocabulary()

    def _apply(self, fn: Any, recurse: bool = True) -> "MtpDraft":
        """Move the module; buffers of the block, such as the bias of a router, stay as exact."""
        exact = dict(self.block.named_buffers())
        super()._apply(fn, recurse)
        for name, moved in list(self.block.named_buffers()):
            folder, _, buffer = name.rpartition(".")
            setattr(self.block.get_submodule(folder), buffer, exact[name].to(moved.device))
        return self

    def checkpoint_tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        tensors = super().checkpoint_tensors(dtype)
        exact = {f"block.{name}": value.cpu() for name, value in self.block.named_buffers()}
        return tensors | {name: exact[name] for name in tensors.keys() & exact.keys()}

    # -- as a model -------------------------------------------------------------------------------

    @property
    def scale(self) -> float:
        attention: Any = self.block.self_attn
        return float(attention.scaling)

    @property
    def decoder_layers(self) -> list[Any]:
        return [self._run_block]

    def _run_block(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        turns = cos.to(x.dtype), sin.to(x.dtype)
        out: Any = self.block(x, position_embeddings=turns, attention_mask=None, attend=attend)
        return out[0] if isinstance(out, tuple) else out

    def layer_inputs(self, token_ids: Tensor, carried: Tensor) -> tuple[Tensor, ...]:
        """Join known tokens, int64 [B, T], and carried states [B, T, H]: [B, T, H]."""
        parts = [self.enorm(self.embed(token_ids)), self.hnorm(self.cast(carried))]
        if self.config.states_first:
            parts.reverse()
        return (self.fc(torch.cat(parts, dim=-1)),)

    def logits_with(self, head: TargetHead) -> Callable[[Tensor], Tensor]:
        return lambda carried: head.logits(self.head_input(carried))

    def unroll(self, *inputs: Any) -> Unroll:
        return _WholeLayers(self, *inputs)

    @classmethod
    def check_fresh(cls, dataset: HiddenStatesDataset) -> None:
        """Raise DatasetError if `generate` has copied no MTP block from the target."""
        if MTP not in dataset.manifest.files:
            raise DatasetError(
                f"{dataset.location}: holds no {MTP}: the target has no MTP block of a known "
                "layout in 16 or 32 bits, or the dataset was generated without it. Generate it "
                "from a checkpoint that has one, or fit eagle3, which needs none"
            )

    @torch.no_grad()
    def adopt_target(self, dataset: HiddenStatesDataset) -> None:
        """Take the MTP block that `generate` has copied from the target.

        Raises:
            DatasetError: the dataset has none, or it does not fit the target's config.json.
        """
        self.check_fresh(dataset)
        file = dataset.file(MTP)
        try:
            tensors, layout = own_tensors(load_file(file), block_count(self.config.target) or 0)
            expected = {k: tuple(v.shape) for k, v in self.state_dict().items()}
            del expected["embed_tokens.weight"]
            check_tensors(tensors, expected, str(file))
        except (SafetensorError, TargetError, DraftError) as error:
            raise DatasetError(f"{file}: not the MTP block of this target ({error})") from None
        self.load_state_dict(tensors, strict=False)
        self.update_config(states_first=layout.states_first)


class _WholeLayers(Unroll):
    """Unrolls a layer that is called whole: step 0 is computed at every slot."""

    def __init__(self, draft: MtpDraft, *inputs: Any) -> None:
        """Take the arguments of `Unroll`, the active slots among them."""
        *others, active = inputs
        super().__init__(draft, *others)
        if active is not None:
            self._first = (gather_slots(self._first[0], active),)
            self.narrow(active)

    def _later_step(
        self,
        token_ids: Tensor,
        carried: Tensor,
        cos: Tensor,
        sin: Tensor,
        diagonals: list[Pairs],
    ) -> tuple[Tensor, list[Pairs]]:
        pairs: Pairs = []

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            pairs[:] = [*diagonals[0], (k, v)]
            return self._queries.attend(q, *self._first_keys[0], pairs, self.draft.scale)

        inputs = self.draft.layer_inputs(token_ids, carried)
        output = self._layers[0](*inputs, cos, sin, attend)
        return self.draft.feedback(output), [pairs]
