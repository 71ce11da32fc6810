"""EAGLE-3 (arXiv 2503.01840): decoder layers over (token, carried state), unrolled in training.

Slot t of the shifted frame holds the aux states a_t, the known token x_{t+1}, the mask m_{t+1} and
the teacher z_{t+1}. Its row reads token and states, has RoPE position t and drafts x_{t+2}. The
carried state, the last layer's output before the final norm (or after it with `norm_output`), goes
to the LM head and into the next step. The first layer reads token and carried state; later ones, if
there are any, are ordinary layers. One layer is named `midlayer` in a checkpoint, several are
`layers.0`, `layers.1`, ..., as engines name them.

Unroll step s looks s tokens further along the document (the training-time test), so step s of slot
t has the teacher of slot t + s. One teacher row therefore serves up to S chains, and is computed
once. Norm, head and loss run at supervised slots only, in chunks: memory grows with T + S x slots,
never with slots x vocabulary. The price: gradients of gradients do not exist.

A slot whose target's choice is outside the draft vocabulary trains nothing and is never a hit. Its
expected acceptance counts all the same: a sampled draft may be kept there.

B packs, T slots, N slots in the slot mask, S unroll steps, H hidden size, h query heads, d head
size, r rotary dimensions, V / Vd target / draft vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from spec_data.models.devices import sent
from spec_data.models.families import TargetShape
from spec_data.shards.batch import DraftBatch
from spec_data.shards.layer_ids import as_block_inputs
from spec_data.shards.packing import shift_left
from spec_train.attention.unrolled import active_slots
from spec_train.drafts.config import DraftConfig
from spec_train.drafts.draft import AuxDraft, DraftLoss
from spec_train.drafts.drafting import ChainDrafter
from spec_train.drafts.eagle3.files import FILES, WITH_QK_NORM, named_class
from spec_train.drafts.frames import Frame, batch_frame, slots_of
from spec_train.drafts.layers import Attend, Attention, DecoderLayer, GatedMLP, RMSNorm
from spec_train.drafts.slots import document_offsets, step_masks
from spec_train.drafts.unroll import AutoregressiveDraft
from spec_train.formats.draft_seal import SECTION
from spec_train.losses.head import TargetHead
from spec_train.losses.menu import LossKind, RowStats, head_loss, wide
from spec_train.losses.metrics import chain_sums
from spec_train.losses.own import Asked, asked
from spec_train.losses.teacher_rows import SlotRows


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(DraftConfig):
    """Shapes and arithmetic of the draft.

    Every engine can read its config.json: it has both keys for the layer ids (engines disagree on
    the meaning of an id) and no null fields.
    """

    draft: ClassVar[str] = "eagle3"
    architectures: ClassVar[tuple[str, ...]] = (FILES.classes[0], WITH_QK_NORM)
    switches: ClassVar[tuple[str, ...]] = (
        *DraftConfig.switches,
        *("norm_before_fc", "norm_before_residual"),
    )

    num_hidden_layers: int = 1  # only the first one reads the token and the features
    fc_norm: bool = False  # an RMSNorm per captured layer
    norm_output: bool = False  # the carried state is normed
    norm_before_fc: bool = False  # one RMSNorm over all captured layers
    norm_before_residual: bool = False  # the first layer adds to its normalised input

    @classmethod
    def from_options(cls, options: Any, shape: TargetShape) -> dict[str, Any]:
        return {"fc_norm": options.fc_norm, "norm_output": options.norm_output}

    def to_json(self, options: Any) -> dict[str, Any]:
        return {
            **named_class({"qk_norm": self.qk_norm}, self.architectures[0]),
            "num_hidden_layers": self.num_hidden_layers,
            **self.shared_json(),
            "mlp_bias": self.mlp_bias,
            "norm_before_residual": self.norm_before_residual,
            "norm_before_fc": self.norm_before_fc,
            **self.shape_json(),
            # vLLM and llama.cpp take an id as the *input* of that block, SGLang (nested) as its
            # output.
            "eagle_aux_hidden_state_layer_ids": as_block_inputs(self.layers),
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": list(self.layers),
            },
            SECTION: self.own_json(options),
        }


class Eagle3Layer(nn.Module):
    """The first decoder layer, split at its attention, which the caller computes."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = Attention(config, input_size=2 * size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = GatedMLP(config)
        self._norm_before_residual = config.norm_before_residual

    def inputs(self, embedding: Tensor, carried: Tensor) -> Tensor:
        """Join embeddings and carried states, both [B, T, H]: attention input [B, T, 2H]."""
        return torch.cat([self.input_layernorm(embedding), self.hidden_norm(carried)], dim=-1)

    def outputs(self, u: Tensor, carried: Tensor, heads: Tensor) -> Tensor:
        """Return the output [B, T, H] of the attention heads [B, h, T, d].

        `u` [B, T, 2H] is the result of `inputs` for the carried states [B, T, H]. Its second half
        is the normed carried state, which is the residual with `norm_before_residual`.
        """
        residual = u[..., carried.shape[-1] :] if self._norm_before_residual else carried
        middle = residual + self.self_attn.join(heads)
        return middle + self.mlp(self.post_attention_layernorm(middle))

    def forward(
        self, embedding: Tensor, carried: Tensor, cos: Tensor, sin: Tensor, attend: Attend
    ) -> Tensor:
        """Map embeddings and carried states, both [B, T, H], to [B, T, H]; cos, sin [B, T, r]."""
        u, attention = self.inputs(embedding, carried), self.self_attn
        q = attention.queries(u, cos, sin)
        return self.outputs(u, carried, attend(q, *attention.keys_values(u, cos, sin)))


class UnrolledDraft(AutoregressiveDraft):
    """What EAGLE-3 and MTP share: a final norm, before or after what is fed back, and the slots."""

    norm: Any

    def feedback(self, output: Tensor) -> Tensor:
        return self.norm(output) if self.config.norm_output else output

    def head_input(self, carried: Tensor) -> Tensor:
        """Map a carried state [..., H] to the input of the LM head [..., H]."""
        return carried if self.config.norm_output else self.norm(carried)

    @torch.no_grad()
    def slot_counts(self, batch: DraftBatch) -> Tensor:
        """Return the number of supervised slots of every unroll step, float64 [S]."""
        _, rows, choice = slots_of(self, batch)
        return Teachers.select(rows, choice, batch.document_ids, self.depth).counts()

    def batch_loss(self, batch: DraftBatch, head: TargetHead, counts: Tensor | None) -> DraftLoss:
        """Return the loss of a batch over `counts`, float64 [S]."""
        options, kind = self.options, LossKind.of(self.options)
        shares = step_shares(self.depth, options.step_decay, options.weights_of(self.depth))
        frame = batch_frame(self, batch, head, kind, self.states_of(batch))
        target_head = None if hasattr(self, "lm_head") else head
        return unrolled_loss(self, frame, shares=shares, kind=kind, counts=counts, head=target_head)


class Eagle3Draft(AuxDraft, UnrolledDraft):
    """The draft that `spec-train fit eagle3` trains."""

    config_class: ClassVar[type[DraftConfig]] = Eagle3Config

    def make_layers(self) -> None:
        first, count = Eagle3Layer(self.config), self.config.num_hidden_layers
        if count == 1:
            self.midlayer = first
        else:
            later = (DecoderLayer(self.config) for _ in range(1, count))
            self.layers = nn.ModuleList([first, *later])

    @property
    def decoder_layers(self) -> list[Any]:
        """The layers, the first one an `Eagle3Layer`, the others `DecoderLayer`s."""
        return [self.midlayer] if self.config.num_hidden_layers == 1 else list(self.layers)

    def layer_inputs(self, token_ids: Tensor, carried: Tensor) -> tuple[Tensor, ...]:
        """Return embeddings and carried states, both [B, T, H]."""
        return self.embed(token_ids), carried

    def logits(self, carried: Tensor) -> Tensor:
        """Map carried states [..., H] to draft logits [..., Vd]."""
        return self.lm_head(self.head_input(carried))

    def logits_with(self, head: TargetHead) -> Callable[[Tensor], Tensor]:
        return self.logits

    def states_of(self, batch: DraftBatch) -> Tensor:
        return batch.aux(self.config.layers)

    def drafter(self, head: TargetHead) -> ChainDrafter:
        return ChainDrafter(self, self.config.vocab_size, self.new_caches())


def step_shares(steps: int, decay: float, weights: Sequence[float] | None = None) -> Tensor:
    """Return the normalised weights of the steps, float64 [S]: powers of `decay`, or `weights`."""
    share = decay ** torch.arange(steps, dtype=torch.float64)
    if weights is not None:
        share = torch.tensor(weights, dtype=torch.float64)
    return share / share.sum()


@dataclass(frozen=True)
class Teachers:
    """The N slots of the slot mask; those with a choice in the draft vocabulary train the draft."""

    rows: Tensor  # flat slots, int64 [N]
    choice: Tensor  # the target's choice as a draft index, -1 outside, int64 [N]
    valid: Tensor  # bool [N, S]: the document has a slot rows - s, whose step s it teaches
    trained: Tensor  # bool [N, S]: valid, and the choice is in the draft vocabulary

    @classmethod
    def select(cls, rows: Tensor, choice: Tensor, document_ids: Tensor, steps: int) -> "Teachers":
        """Make them from `rows` and `choice` of a `Frame`; `document_ids` is int64 [B, T]."""
        reach = document_offsets(document_ids).flatten()[rows]  # [N]: slots before it
        valid = reach[:, None] >= torch.arange(steps, device=rows.device)  # [N, S]
        return cls(rows, choice, valid, valid & (choice >= 0)[:, None])

    def counts(self) -> Tensor:
        """Return the number of supervised slots of every step, float64 [S]."""
        return self.trained.sum(0).double()


def unrolled_loss(
    draft: Any,
    frame: Frame,
    *,
    shares: Tensor,
    kind: LossKind,
    counts: Tensor | None,
    head: TargetHead | None = None,
) -> DraftLoss:
    """Compute the loss of a frame, of slots with the loss `kind`.

    `draft` is one with `head_input`; `head` is the target's, for a draft without its own. `shares`
    are those of `step_shares` [S], `counts` the denominators [S] over the whole optimizer step;
    None: those of this frame.
    """
    steps = len(shares)
    drafted = step_masks(frame.mask, frame.document_ids, steps)  # [S, B, T]
    teachers = Teachers.select(frame.rows, frame.choice, frame.document_ids, steps)
    rows, trained = teachers.rows, teachers.counts()
    counts = trained if counts is None else counts.to(trained)
    share = sent(shares, rows.device)
    if rows.numel():
        hidden = _chain_states(draft, frame, teachers)  # [N, S, H]

        labelled = kind.hard or asked() != Asked()

        def teacher(part: slice) -> SlotRows:
            taught = frame.teacher(rows[part])
            return taught.labelled(teachers.choice[part]) if labelled else taught

        weights = teachers.trained * torch.where(counts > 0, share / counts, 0.0)  # [N, S]
        states, weight = draft.head_input(hidden), None
        if head is not None:
            weight = head.head_weight
            states = states.to(weight.dtype)
        loss, stats = head_loss(
            states,
            draft.lm_head.weight if weight is None else weight,
            teacher,
            weights.to(wide(hidden).dtype),
            kind,
            bias=None if head is None else head.head_bias,
            spec=None if head is None else head.spec,
        )
    else:
        loss = draft.zero_loss()
        empty = torch.zeros(0, steps, device=rows.device)
        stats = RowStats(empty, empty, empty.long())
    return DraftLoss(loss, _sums(stats, teachers, drafted, share))


def _chain_states(draft: Any, frame: Frame, teachers: Teachers) -> Tensor:
    """Return states [N, S, H]: entry (n, s) is step s of the chain from slot rows[n] - s."""
    rows, valid = teachers.rows, teachers.valid
    steps = valid.shape[1]
    used = step_masks(frame.mask, frame.document_ids, steps).any(0)  # [B, T]: starts a chain
    active = active_slots(used)  # [B, A]
    unroll = draft.unroll(
        frame.aux, frame.input_ids, frame.document_ids, frame.position_ids, active
    )
    # The row of every used slot in the flattened states [B*A, H].
    state_row = (used.cumsum(1) - 1).clamp_min(0)  # [B, T], in 0..A-1
    state_row = state_row + active.shape[1] * torch.arange(len(used), device=used.device)[:, None]
    tokens, states = frame.input_ids, []
    for _ in range(steps):
        states.append(unroll.advance(tokens.gather(1, active)).flatten(0, 1))  # [B*A, H]
        tokens = shift_left(tokens, frame.document_ids)  # [B, T]
    # [N, S]: flat slots; -1 or less: none
    slots = rows[:, None] - torch.arange(steps, device=rows.device)
    index = torch.where(valid, state_row.flatten()[slots.clamp_min(0)], 0)  # [N, S], in 0..B*A-1
    return torch.stack([state[index[:, s]] for s, state in enumerate(states)], dim=1)


@torch.no_grad()
def _sums(stats: RowStats, teachers: Teachers, drafted: Tensor, share: Tensor) -> dict[str, Tensor]:
    """Return the additive metrics of a batch (see `metrics`).

    `drafted` are the slot masks of all steps, bool [S, B, T]; `share` their weights, float64 [S].
    """
    rows, valid, supervised = teachers.rows, teachers.valid, teachers.counts()
    hit = (stats.best == teachers.choice[:, None]) & valid  # [N, S]
    measured = valid & ~stats.acceptance.isnan()  # [N, S]
    steps, slots = len(drafted), drafted[0].numel()
    # [N, S]: the slot that starts the chain; one more slot takes the rows that have none. Selecting
    # the others with a mask would make the host wait for their number.
    start = rows[:, None] - torch.arange(steps, device=rows.device)
    start = torch.where(valid, start, slots)
    hits = torch.zeros(steps, slots + 1, dtype=torch.bool, device=rows.device)
    hits = hits.scatter_(1, start.T, hit.T)[:, :slots]  # [S, B*T]
    return {
        "loss": (stats.loss.double() * teachers.trained).sum(0),
        "supervised": supervised,
        "weighted": supervised * share,
        "acceptance": torch.where(measured, stats.acceptance, 0).double().sum(0),
        "measured": measured.sum(0).double(),
        **chain_sums(hits.view_as(drafted), drafted),
    }
