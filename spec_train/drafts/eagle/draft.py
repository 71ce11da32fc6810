"""EAGLE-1/2 (arXiv 2401.15077, 2406.16858): layers over W_fc [embedding ; final hidden state].

Everything is in the token frame (row t of a tensor belongs to token x_t). Slot t reads the state
f_t (plus noise, in training) and the known token x_{t+1}, at RoPE position t. It predicts f_{t+1}
and, through the target's frozen head, the distribution of x_{t+2}; the next step reads the
prediction instead of f_{t+1}. The teacher is softmax(head(f_{t+1})). The loss of a slot is

    regression_weight * mean_H SmoothL1(pred_t, f_{t+1})
    + ce_weight * -sum_v softmax(head(f_{t+1}))_v log softmax(head(pred_t))_v

(or another loss of `losses` in place of this cross-entropy) over the slots with m_{t+1} and
m_{t+2}, divided by their number over the whole optimizer step. Teachers have no noise.

The first layer has no norm before its attention, and there is no final norm: f is taken after the
target's final norm, so its prediction enters the head directly.

Training looks one token ahead: it is an unroll of one step. In evaluation mode the metrics are
those of `depth` steps, so `best` is chosen by what serving needs: step s reads the prediction of
step s-1 and the document's token x_{t+1+s}, and is compared with f_{t+1+s}. The loss is that of the
first step in both modes. EAGLE-2 differs from EAGLE-1 only in decoding (see `decoding.trees`).

B packs, T slots, S steps, n supervised slots of a step, H hidden size, V target vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_data.shards.batch import DraftBatch
from spec_data.shards.packing import shift_left
from spec_data.shards.schema import FINAL
from spec_train.drafts.config import DraftConfig
from spec_train.drafts.draft import DraftLoss
from spec_train.drafts.eagle.files import FILES
from spec_train.drafts.eagle.options import EagleOptions
from spec_train.drafts.layers import DecoderLayer, RMSNorm, Rotary
from spec_train.drafts.slots import slot_masks, step_masks
from spec_train.drafts.unroll import FinalStatesDraft, Unroll
from spec_train.formats.draft_seal import SECTION
from spec_train.losses.head import TargetHead
from spec_train.losses.menu import LossKind, RowStats, TeacherRows, head_loss, wide
from spec_train.losses.metrics import chain_sums, summarise
from spec_train.losses.teacher_rows import SlotRows


@dataclass(frozen=True, kw_only=True)
class EagleConfig(DraftConfig):
    """Shapes and arithmetic of the draft.

    Engines read `fc.weight` [H, 2H] over [embedding ; state]; plain Llama layers, of which the
    first has **no** `input_layernorm`; no final norm; and the target's own embedding and head. They
    differ in the bias of `fc`: SafeAILab's loader makes one unless config.json has `"bias": false`,
    vLLM refuses one, and SGLang uses *random values* if there is none (see `formats.write`). Drafts
    that are fitted here have none.

    Drafts of other trainers may have the bias, a norm before the first layer's attention, and a
    norm of the prediction (AutoModel has both norms, under ModelOpt's names of the keys). Such a
    draft is read and can be fitted further; no option makes a new one.
    """

    draft: ClassVar[str] = "eagle"
    architectures: ClassVar[tuple[str, ...]] = FILES.classes[:1]
    reads_layers: ClassVar[bool] = False
    not_keys: ClassVar[tuple[str, ...]] = (
        *DraftConfig.not_keys,
        *("target_hidden_size", "draft_vocab_size"),
    )
    of_files: ClassVar[tuple[str, ...]] = (
        *("bias", "use_input_layernorm_in_first_layer", "use_last_layernorm"),
    )
    switches: ClassVar[tuple[str, ...]] = (*DraftConfig.switches, *of_files)

    bias: bool = False  # of fc
    use_input_layernorm_in_first_layer: bool = False
    use_last_layernorm: bool = False  # of the prediction

    def to_json(self, options: EagleOptions) -> dict[str, Any]:
        return {
            "architectures": list(self.architectures),
            "model_type": "llama",
            **self.shared_json(),
            "bias": self.bias,  # SafeAILab's loader makes one if there is no such key
            "mlp_bias": self.mlp_bias,
            **self.shape_json(),
            SECTION: self.own_json(options),
        }


class EagleDraft(FinalStatesDraft):
    """The draft that `spec-train fit eagle` trains. The head is the target's and is not stored."""

    config_class: ClassVar[type[DraftConfig]] = EagleConfig
    one_step: ClassVar[bool] = True

    def __init__(self, config: EagleConfig, options: EagleOptions | None = None) -> None:
        super().__init__(config, options)
        size = config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=config.bias)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        if not config.use_input_layernorm_in_first_layer:
            self.layers[0].add_module("input_layernorm", nn.Identity())
        if config.use_last_layernorm:
            self.norm = RMSNorm(size, config.rms_norm_eps)
        self.rotary = Rotary(config)

    # -- as a model -------------------------------------------------------------------------------

    @property
    def decoder_layers(self) -> list[Any]:
        return list(self.layers)

    def layer_inputs(self, token_ids: Tensor, carried: Tensor) -> tuple[Tensor, ...]:
        """Join known tokens, int64 [B, T], and carried states [B, T, H]: [B, T, H]."""
        return (self.fc(torch.cat([self.embed(token_ids), self.cast(carried)], dim=-1)),)

    def feedback(self, output: Tensor) -> Tensor:
        return self.norm(output) if self.config.use_last_layernorm else output

    def logits_with(self, head: TargetHead) -> Callable[[Tensor], Tensor]:
        return head.logits

    # -- training ---------------------------------------------------------------------------------

    @property
    def _steps(self) -> int:
        """Number of steps that `loss` computes: metrics need more than the loss."""
        return 1 if self.training else self.options.depth

    @torch.no_grad()
    def slot_counts(self, batch: DraftBatch) -> Tensor:
        """Return the supervised slots per step, float64 [1] in training, [depth] otherwise."""
        masks = supervised_slots(batch.loss_mask, batch.document_ids, self._steps)
        return masks.flatten(1).sum(1).double()

    def batch_loss(self, batch: DraftBatch, head: TargetHead, counts: Tensor | None) -> DraftLoss:
        """Return the loss of a batch over `counts`, float64 [1] in training, [depth] otherwise.

        In training mode, noise from torch's generator is added to the input states.
        """
        options, states, noise = self.options, batch.hidden[FINAL], None
        if self.training and options.noise > 0:
            noise = (torch.rand(states.shape, device=states.device) * 2 - 1) * options.noise
        weights = options.regression_weight, options.ce_weight
        kind, steps = LossKind.of(options), self._steps
        return eagle_loss(
            self, batch, head, counts, kind, weights=weights, steps=steps, noise=noise
        )

    @staticmethod
    def summarise(sums: dict[str, Tensor]) -> dict[str, float | None]:
        """Turn added sums into metrics, with the means of both loss terms at the first step."""
        first = float(sums["supervised"][0])
        parts = {
            name: float(sums[name][0]) / first if first else None
            for name in ("smooth_l1", "cross_entropy", "distribution_loss")
            if name in sums
        }
        return summarise(sums) | parts


def supervised_slots(loss_mask: Tensor, document_ids: Tensor, steps: int = 1) -> Tensor:
    """Return the slot masks of all steps, bool [S, B, T], of a `loss_mask` [B, T] of tokens."""
    mask = slot_masks(shift_left(loss_mask, document_ids), document_ids)
    return step_masks(mask, document_ids, steps)


def eagle_loss(
    draft: EagleDraft,
    batch: DraftBatch,
    head: TargetHead,
    counts: Tensor | None,
    kind: LossKind,
    *,
    weights: tuple[float, float],
    steps: int = 1,
    noise: Tensor | None = None,
) -> DraftLoss:
    """Compute the EAGLE-1/2 loss of a batch.

    Args:
        draft, batch, head: the weights, the documents, and the target's head.
        counts: denominators [S] over the whole optimizer step, of which the first is used; None:
            those of this batch.
        kind: loss of the second term.
        weights: of the smooth L1 term and of the second one.
        steps: S; steps after the first have metrics but no loss.
        noise: added to f_t as input of the draft [B, T, H]; None: no noise.
    """
    document_ids, final_hidden = batch.document_ids, batch.hidden[FINAL]
    masks = supervised_slots(batch.loss_mask, document_ids, steps)  # [S, B, T]
    supervised = masks.flatten(1).sum(1).double()  # [S]
    counts = supervised if counts is None else counts.to(supervised)
    fed = final_hidden if noise is None else (wide(final_hidden) + noise).to(final_hidden.dtype)
    tokens = shift_left(batch.input_ids, document_ids)  # [B, T]
    states = final_hidden.flatten(0, 1)  # [B*T, H]
    unroll: Unroll | None = None
    loss = None
    hits = torch.zeros_like(masks).flatten(1)  # [S, B*T]
    distances, entropies, acceptance = (torch.zeros_like(supervised) for _ in range(3))
    for s in range(steps):
        rows = masks[s].flatten().nonzero().squeeze(1)  # [n]
        if not len(rows):
            continue
        unroll = unroll or Unroll(draft, fed, tokens, document_ids, batch.position_ids)
        predicted = unroll.advance(tokens).flatten(0, 1)[rows]  # [n, H]
        tokens = shift_left(tokens, document_ids)
        following = rows + s + 1  # [n], in the same document: the token there is supervised
        choice = batch.target_argmax.flatten()[following]
        factor = (1.0 if s == 0 else 0.0) / counts[s]  # only the first step is trained
        total, distance, stats = _step_loss(
            predicted, states[following], head, factor, weights, kind, choice
        )
        loss = total if loss is None else loss
        hits[s, rows] = stats.best[:, 0] == choice
        distances[s] = distance.double().sum()
        entropies[s] = stats.loss.double().sum()
        acceptance[s] = stats.acceptance.double().sum()
    first = torch.zeros_like(supervised)
    first[0] = 1.0  # the loss is that of the first step
    sums = {
        "loss": weights[0] * distances + weights[1] * entropies,
        "smooth_l1": distances,
        "cross_entropy" if kind.name == "ce" else "distribution_loss": entropies,
        "supervised": supervised,
        "weighted": supervised * first,
        "acceptance": acceptance,
        **chain_sums(hits.view_as(masks), masks),
    }
    return DraftLoss(draft.zero_loss() if loss is None else loss, sums)


def _step_loss(
    predicted: Tensor,  # predicted states [n, H]
    teacher: Tensor,  # the target's states [n, H]
    head: TargetHead,
    factor: Tensor,  # the sum over slots is multiplied by it, []
    weights: tuple[float, float],  # of both terms
    kind: LossKind,  # of the second term
    choice: Tensor,  # the target's, int64 [n]
) -> tuple[Tensor, Tensor, RowStats]:
    """Return the loss of a step, [] with a graph, and what it consists of.

    That is smooth L1 [n], and the head's figures.
    """
    distance = F.smooth_l1_loss(wide(predicted), wide(teacher), reduction="none").mean(-1)  # [n]

    def distribution(part: slice) -> SlotRows:
        logits = head.logits(teacher[part], narrow=True)
        rows = TeacherRows.of_logits(logits, None)  # the draft has the full vocabulary
        return rows.labelled(choice[part])

    entropy, stats = head_loss(
        predicted[:, None].to(head.head_weight.dtype),
        head.head_weight,
        distribution,
        (weights[1] * factor).to(distance.dtype).expand(len(distance), 1),
        kind,
        bias=head.head_bias,
        spec=head.spec,
    )
    total = entropy + (weights[0] * factor).to(distance.dtype) * distance.sum()
    return total, distance.detach(), stats
