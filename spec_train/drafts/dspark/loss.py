"""The loss of DSpark and DFlash: which blocks are trained, on which teacher, and their metrics.

Everything is in the token frame. A block starts at an anchor a: its token x_a is known, and the
target's states are known strictly before a. Draft d of the block (d = 0..D-1) is for x_{a+1+d}. Its
previous token is x_{a+d}, and its teacher is the target's distribution at position a+d. Serving
starts blocks where x_a and x_{a+1} are both in the response and a is not the first token: these are
the slots t = a - 1 of EAGLE drafts.

For draft d of the block at anchor a, with p the target's distribution at position a+d renormalised
over the draft vocabulary, m the target's probability of that vocabulary, q the draft's (head and
Markov bias over the document's previous token) and c its confidence, the loss is

    0.1 * cross-entropy + 0.9 * |q - p|_1 + 1.0 * BCE(c, c*),    c* = sum_v min(m p, q), detached

That is --loss ce+l1. Any other loss of `losses` replaces the cross-entropy and the L1 term by one
term of weight 1, between p (or a hard target) and q.

c* is the probability that sampling with the target's full distribution keeps the draft. It equals
1 - |q - p|_1 / 2, as published, if m = 1. Each term is a mean over the drafts that count, weighted
by exp(-d / gamma). The cross-entropy is taken with the document's token, as published, with p, or
with the target's choice. The first term (the cross-entropy, or the other loss) has a denominator of
its own, because it may count at fewer drafts.
If the draft vocabulary is a selection of the target's, a draft whose target's choice is outside it
is not trained and counts as a miss; its c* still counts in tau and in the acceptance. A
cross-entropy with a token outside the draft vocabulary is left out.

Denominators are sums of weights over the whole optimizer step. Blocks are drawn at random, and the
denominators of a step are needed before the draw. So they are the expectation over the draw, which
makes the sampled loss an unbiased estimate of the loss over all blocks. They are exact if every
candidate is an anchor.

B packs, T tokens of a pack, N blocks of a pack, S slots of a block, D drafts of a block, R drafts
that count, n captured layers, H hidden size, V / Vd target / draft vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_data.shards.errors import DraftError
from spec_data.shards.packing import PADDING, shift_left
from spec_train.attention.masked import Attending
from spec_train.attention.masks import BlockWindow, block_mask
from spec_train.data.batch import DraftBatch
from spec_train.drafts.draft import DraftLoss
from spec_train.drafts.dspark.head_loss import block_rows_loss
from spec_train.drafts.dspark.model import Context, DSparkModel
from spec_train.drafts.frames import require_frame, teacher_of
from spec_train.drafts.layers import argmax_by_chunks
from spec_train.drafts.slots import document_offsets, rope_lengths, settle_documents
from spec_train.drafts.teacher import SharedTeacher, Teacher, head_teacher, logits_teacher
from spec_train.losses.head import TargetHead
from spec_train.losses.menu import LossKind, LowRank, RowStats
from spec_train.losses.metrics import Sums, chain_sums
from spec_train.losses.metrics import summarise as summarise_chains

# -- blocks ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Blocks:
    """The blocks of every pack."""

    anchors: Tensor  # int64 [B, N]
    kept: Tensor  # bool [B, N]: False where a pack has fewer blocks

    def places(self, depth: int) -> Tensor:
        """Return the slots a+d of previous tokens and teachers, int64 [B, N, depth]."""
        return self.anchors[..., None] + torch.arange(depth, device=self.anchors.device)


def anchor_candidates(loss_mask: Tensor, document_ids: Tensor) -> Tensor:
    """Return the slots that can be anchors, bool [B, T].

    The slot and the next one are supervised, and the slot is not the first of its document.
    `loss_mask` [B, T] is in the token frame; `document_ids` is int64 [B, T].
    """
    mask = loss_mask.bool() & (document_ids != PADDING)
    return mask & shift_left(mask, document_ids) & (document_offsets(document_ids) > 0)


def sample_blocks(loss_mask: Tensor, document_ids: Tensor, limit: int) -> Blocks:
    """Draw up to `limit` anchors of every pack without replacement, ascending.

    N is the largest number of anchors that a pack has, so packs with few supervised tokens are
    cheap. The draw takes one number per pack from torch's default CPU generator. So it depends
    neither on the device, nor on the padding, nor on the other packs.

    Args:
        loss_mask: [B, T], in the token frame.
        document_ids: int64 [B, T].
        limit: most blocks of a pack.
    """
    rows = []
    for candidates in anchor_candidates(loss_mask, document_ids).cpu():
        places = candidates.nonzero().squeeze(1)  # [candidates of the pack]
        seed = int(torch.randint(1 << 62, ()))
        if len(places) > limit:
            order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))
            places = places[order[:limit]].sort().values
        rows.append(places)
    counts = torch.tensor([len(row) for row in rows])  # [B]
    kept = torch.arange(int(counts.max())) < counts[:, None]  # [B, N]
    anchors = torch.zeros(kept.shape, dtype=torch.long)  # [B, N]
    anchors[kept] = torch.cat(rows)
    device = loss_mask.device
    return Blocks(anchors.to(device, non_blocking=True), kept.to(device, non_blocking=True))


def drafted_mask(loss_mask: Tensor, document_ids: Tensor, depth: int) -> Tensor:
    """Return whether draft d of a block that starts at a slot counts, bool [B, T, depth].

    Its token must be in the document and supervised, and all earlier drafts of the block must
    count. `loss_mask` [B, T] is in the token frame; `document_ids` is int64 [B, T].
    """
    alive = loss_mask.bool() & (document_ids != PADDING)
    alive = shift_left(alive, document_ids)  # [B, T], for the token after each slot
    parts = [alive]
    for _ in range(depth - 1):
        parts.append(alive & shift_left(parts[-1], document_ids))
    return torch.stack(parts, dim=-1)


def expected_weights(
    loss_mask: Tensor, document_ids: Tensor, inside: Tensor, weights: Tensor, limit: int
) -> Tensor:
    """Return the summed weights of all drafts of a batch, float64 []: the mean over the draw.

    Exact if no pack has more than `limit` candidates.

    Args:
        loss_mask: [B, T], in the token frame.
        document_ids: int64 [B, T].
        inside: slots whose teacher (or label) can be learned, bool [B, T]; read at a+d.
        weights: of draft d, float64 [D].
        limit: most blocks of a pack.
    """
    candidates = anchor_candidates(loss_mask, document_ids)  # [B, T]
    counted = drafted_mask(loss_mask, document_ids, len(weights))  # [B, T, D]
    total = weights.new_zeros(len(candidates))  # [B]
    for d, weight in enumerate(weights):
        # Draft d of the block at a reads slot a+d, which is in the document if the draft counts.
        at = torch.zeros_like(inside)  # [B, T], `inside` moved left by d
        at[:, : inside[:, d:].shape[1]] = inside[:, d:]  # nothing is left of a shorter pack
        total += weight * (candidates & counted[..., d] & at).sum(1)
    count = candidates.sum(1).double()  # [B]
    return (total * (count.clamp(max=limit) / count.clamp(min=1))).sum()


def batch_context(
    draft: DSparkModel, aux: Tensor, document_ids: Tensor, position_ids: Tensor
) -> Context:
    """Return the context, keys and values of every layer, of all tokens of a batch.

    Args:
        draft: the model.
        aux: aux states [B, T, n*H].
        document_ids: int64 [B, T].
        position_ids: int64 [B, T].
    """
    return draft.context(aux, position_ids, rope_lengths(draft.rotary, document_ids))


def block_states(
    draft: DSparkModel,
    context: Context,
    input_ids: Tensor,
    document_ids: Tensor,
    position_ids: Tensor,
    blocks: Blocks,
) -> Tensor:
    """Return the states y [B, N, D, H] that make the drafts of blocks.

    Args:
        draft: the model.
        context: of `batch_context`.
        input_ids: in the token frame, int64 [B, T].
        document_ids: int64 [B, T].
        position_ids: int64 [B, T].
        blocks: N blocks of every pack.
    """
    config = draft.config
    anchors, size = blocks.anchors, config.block_size
    shape = *anchors.shape, size  # [B, N, S]
    ids = torch.full(shape, config.mask_token_id, device=anchors.device)  # [B, N, S]
    ids[..., 0] = input_ids.gather(1, anchors)
    steps = torch.arange(size, device=anchors.device)  # [S]
    positions = position_ids.gather(1, anchors)[..., None] + steps  # [B, N, S]
    lengths = rope_lengths(draft.rotary, document_ids, anchors)  # [B, N]
    if lengths is not None:
        lengths = lengths.repeat_interleave(size, dim=1)  # [B, N*S]

    def attending(window: BlockWindow | None) -> Attending:
        mask = block_mask(document_ids, anchors, blocks.kept, size, window)
        return Attending.prepare(mask, config.head_dim, draft.attention_backend)

    attends = draft.per_layer(attending)
    states = draft.forward_blocks(ids.flatten(1), positions.flatten(1), context, attends, lengths)
    # states: [B, N*S, H]; the slots from `first` on make the D drafts.
    return states.unflatten(1, (anchors.shape[1], size))[:, :, config.first :]


# -- frame -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BlockFrame:
    """A batch in the token frame with its blocks, defaults filled in."""

    aux: Tensor  # a_t [B, T, n*H]
    input_ids: Tensor  # x_t, int64 [B, T]
    loss_mask: Tensor  # m_t [B, T]
    target_argmax: Tensor  # argmax of z_t, int64 [B, T]
    document_ids: Tensor  # int64 [B, T], -1 in padding
    position_ids: Tensor  # int64 [B, T]
    blocks: Blocks
    teacher: Teacher  # of flat slots b * T + t


def batch_block_frame(
    draft: DSparkModel, batch: DraftBatch, head: TargetHead, blocks: Blocks
) -> BlockFrame:
    """Return the frame of a batch with given blocks."""
    return BlockFrame(
        aux=batch.aux(draft.config.layers),
        input_ids=batch.input_ids,
        loss_mask=batch.loss_mask,
        target_argmax=batch.target_argmax,
        document_ids=batch.document_ids,
        position_ids=batch.position_ids,
        blocks=blocks,
        teacher=teacher_of(draft, batch, head, shift=0),
    )


# -- which drafts are trained ----------------------------------------------------------------------


def draft_weights(draft: DSparkModel) -> Tensor:
    """Return the weights of the drafts of a block, float64 [D].

    They are exp(-d / gamma), or the options' `position_weights`.
    """
    device, depth = draft.fc.weight.device, draft.config.depth
    given = draft.options.weights_of(depth)
    if given is not None:
        return torch.tensor(given, dtype=torch.float64, device=device)
    steps = torch.arange(depth, dtype=torch.float64, device=device)
    return torch.exp(-steps / draft.options.loss_decay_gamma)


def learnable(
    draft: DSparkModel, target_argmax: Tensor, following: Tensor
) -> tuple[Tensor, Tensor]:
    """Return where the first term and where the others can be learned, bool [B, T] each.

    Args:
        draft: decides the draft vocabulary, and what the first term of the loss compares with.
        target_argmax: the target's choice after every token, int64 [B, T].
        following: the document's token after every token, int64 [B, T].
    """
    inside = draft.draft_index[target_argmax] >= 0
    if draft.options.compared_with != "tokens":
        return inside, inside
    return inside & (draft.draft_index[following] >= 0), inside


@dataclass(frozen=True)
class TrainedRows:
    """The R drafts of a batch that count, sorted by their teacher's slot."""

    drafted: Tensor  # bool [B, N, D]: the draft counts
    trained: Tensor  # bool [R]: the target's choice is in the draft vocabulary
    rows: Tensor  # flat index in [B, N, D], int64 [R]
    slot: Tensor  # flat slot of the teacher, ascending, int64 [R]; overlapping blocks share slots
    weight: Tensor  # exp(-d / gamma), float64 [R]; 0 for drafts that are not trained
    choice: Tensor  # the target's choice as a draft index, -1 outside, int64 [R]
    has_token: Tensor  # bool [R]: the first term of the loss counts
    token: Tensor  # the document's token as a draft index, int64 [R]; 0 where it is outside
    previous: Tensor  # the token before every draft, int64 [B, N, D]

    @classmethod
    def select(cls, draft: DSparkModel, frame: BlockFrame) -> "TrainedRows":
        """Select the drafts of a frame that count."""
        blocks, documents = frame.blocks, frame.document_ids
        depth, length = draft.config.depth, frame.input_ids.shape[1]
        at = blocks.anchors[..., None].expand(-1, -1, depth)
        drafted = drafted_mask(frame.loss_mask, documents, depth).gather(1, at)  # [B, N, D]
        drafted = drafted & blocks.kept[..., None]
        # A slot beyond the pack belongs to a draft that does not count: any slot will do for it.
        places = blocks.places(depth).clamp_max(length - 1)  # [B, N, D], slots a + d
        following = shift_left(frame.input_ids, documents)  # [B, T]
        with_token, inside = learnable(draft, frame.target_argmax, following)
        first = length * torch.arange(len(places), device=places.device)  # [B]: flat starts
        rows = drafted.flatten().nonzero().squeeze(1)  # [R], in block order
        slot, order = (places + first[:, None, None]).flatten()[rows].sort(stable=True)  # [R] each
        rows = rows[order]
        trained = inside.flatten()[slot]  # [R]
        return cls(
            drafted=drafted,
            trained=trained,
            rows=rows,
            slot=slot,
            weight=draft_weights(draft).to(rows.device)[rows % depth] * trained,
            choice=draft.draft_index[frame.target_argmax.flatten()[slot]],
            has_token=with_token.flatten()[slot],
            token=draft.draft_index[following.flatten()[slot]].clamp_min(0),
            previous=frame.input_ids.gather(1, places.flatten(1)).view_as(places),
        )

    def token_before(self, slots: Tensor) -> Tensor:
        """Return the token before the drafts of flat slots, int64 [M]; each is a slot of a row."""
        first = torch.searchsorted(self.slot, slots)  # a row of every slot
        return self.previous.flatten()[self.rows[first]]

    def totals(self) -> Tensor:
        """Return the summed weights of the first term and of the other terms, float64 [2]."""
        return torch.stack([(self.weight * self.has_token).sum(), self.weight.sum()])


# -- metrics ---------------------------------------------------------------------------------------
# The sums of `losses.metrics`, and some that only blocks have:
#
#     terms        [3] weighted sums of cross-entropy, L1 and the confidence's BCE
#     term_weights [3] sums of their weights
#     term_shares  [3] those, times the terms' weights in the loss
#     tau, blocks  [] expected tokens per round, 1 + sum_d prod_{j<=d} c*_j, summed over the blocks
#     kind, kind_weight []  with another loss than ce+l1: its weighted sum, and the sum of its
#                  weights
#     confidence_* [10] of trained drafts by their confidence, in tenths, weighted like their loss:
#                  sum of weights (number), of confidence (sum) and of acceptance (accepted)
#
# c*_j is the acceptance of draft j, also where the target's choice is outside the draft vocabulary.
# A chain of `metrics` is a block here: draft d is a hit if it is the target's choice after the
# document's own tokens up to it. So `acceptance_length` is comparable with that of other drafts.


BINS = 10
TERMS = ("cross_entropy", "l1", "confidence_bce")


@dataclass(frozen=True)
class Forecasts:
    """What the confidence head forecasts for the R drafts that count, no gradients."""

    confidence: Tensor  # probability of acceptance [R]
    bce: Tensor  # its binary cross-entropy with the acceptance [R]


@torch.no_grad()
def block_sums(
    figures: RowStats,
    forecasts: Forecasts | None,
    chosen: TrainedRows,
    weights: Tensor,
    options: Any,
) -> Sums:
    """Return the sums of a batch.

    Args:
        figures: of the R drafts that count.
        forecasts: of the same; None without a confidence head.
        chosen: which drafts these are, and which of them are trained.
        weights: of draft d, float64 [D].
        options: of the draft, with the weights of the three terms in the loss.
    """
    assert figures.overlap is not None and figures.cross_entropy is not None
    depth, rows, drafted = len(weights), chosen.rows, chosen.drafted
    d = rows % depth  # [R], depth of each draft
    w = weights[d] * chosen.trained  # [R]
    hit = figures.best == chosen.choice  # [R]
    acceptance, overlap = figures.acceptance.double(), figures.overlap.double()
    cross_entropy = figures.cross_entropy.double()
    bce = torch.zeros_like(acceptance) if forecasts is None else forecasts.bce.double()
    ce_weights = w * chosen.has_token
    forecast_weight = w.sum() if forecasts is not None else w.new_zeros(())
    alphas = options.ce_weight, options.l1_weight, options.confidence_weight
    if not options.mixed:  # cross-entropy and L1 are only measured
        alphas = 0.0, 0.0, options.confidence_weight
    terms = [(ce_weights * cross_entropy).sum(), (w * 2 * (1 - overlap)).sum(), (w * bce).sum()]
    term_weights = torch.stack([ce_weights.sum(), w.sum(), forecast_weight])  # [3]
    hits, shares = (torch.zeros_like(drafted, dtype=kind) for kind in (torch.bool, torch.float64))
    hits.view(-1)[rows] = hit  # [B, N, D]
    shares.view(-1)[rows] = acceptance  # [B, N, D]; 0 where no draft counts
    expected = 1 + torch.cumprod(shares, dim=-1).sum(-1)  # [B, N]
    live = drafted.any(-1)  # [B, N]

    def by_depth(values: Tensor) -> Tensor:
        """Sum values [R] by the depth of their draft: [D]."""
        return torch.zeros_like(weights).index_add_(0, d, values.double())

    supervised = by_depth(chosen.trained)
    sums = {
        "loss": by_depth(cross_entropy * chosen.has_token),
        "supervised": supervised,
        "weighted": supervised * weights,
        "drafted": drafted.sum((0, 1)).double(),
        "hits": by_depth(hit),
        "acceptance": by_depth(acceptance),
        "terms": torch.stack(terms),
        "term_weights": term_weights,
        "term_shares": torch.stack([x * a for x, a in zip(term_weights, alphas, strict=True)]),
        "tau": (expected * live).sum(),
        "blocks": live.sum().double(),
        **chain_sums(hits.movedim(-1, 0), drafted.movedim(-1, 0)),
    }
    if not options.mixed:
        weight = chosen.weight * chosen.has_token  # [R]
        sums |= {"kind": (weight * figures.loss.double()).sum(), "kind_weight": weight.sum()}
    if forecasts is not None:
        confidence = forecasts.confidence.double()
        index = (confidence * BINS).long().clamp(max=BINS - 1)  # [R]
        zero = torch.zeros(BINS, dtype=torch.float64, device=confidence.device)
        sums |= {
            "confidence_number": zero.index_add(0, index, w),
            "confidence_sum": zero.index_add(0, index, w * confidence),
            "confidence_accepted": zero.index_add(0, index, w * acceptance),
        }
    return sums


def summarise_blocks(sums: Sums) -> dict[str, float | None]:
    """Turn added sums into metrics: those of `metrics.summarise`, and the following.

    "loss" is the whole loss; "cross_entropy", "l1" and "confidence_bce" are its terms, unweighted.
    With another loss than ce+l1, "distribution_loss" replaces the first two in it, and they are
    only measured.
    "tau" is the expected number of tokens per round if drafts are sampled.
    """
    out = summarise_chains(sums)
    values = {name: value.double().cpu() for name, value in sums.items()}
    weight = values["term_weights"]
    means = torch.where(weight > 0, values["terms"] / weight.clamp_min(1e-30), 0.0)
    alphas = torch.where(weight > 0, values["term_shares"] / weight.clamp_min(1e-30), 0.0)
    out["loss"] = float((alphas * means).sum())
    if "kind" in values:
        weighed = float(values["kind_weight"])
        mean = float(values["kind"]) / weighed if weighed else 0.0
        out["distribution_loss"] = mean if weighed else None
        out["loss"] = float((alphas * means).sum()) + mean
    for name, mean, some in zip(TERMS, means.tolist(), weight.tolist(), strict=True):
        out[name] = mean if some else None
    blocks = float(values["blocks"])
    out["tau"] = float(values["tau"]) / blocks if blocks else None
    return out


# -- loss ------------------------------------------------------------------------------------------


def dspark_loss(
    draft: DSparkModel,
    *,
    head: TargetHead,
    aux_hidden_states: Tensor,
    input_ids: Tensor,
    loss_mask: Tensor,
    anchors: Tensor,
    kept: Tensor | None = None,
    final_hidden: Tensor | None = None,
    logits: Tensor | None = None,
    target_argmax: Tensor | None = None,
    target_logsumexp: Tensor | None = None,
    document_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
    counts: Tensor | None = None,
    frame: str = "token",
) -> DraftLoss:
    """Compute the loss of given blocks. The weights of the terms and gamma are `draft.options`.

    Everything is in the token frame: index t is token t, nothing is shifted.

    Args:
        draft: the weights, as `DSparkDraft.from_pretrained` reads them.
        head: the target's; its rows also make the draft's logits.
        aux_hidden_states: a_t, layers ascending, [B, T, n*H].
        input_ids: x_t, int64 [B, T].
        loss_mask: m_t [B, T].
        anchors: slots that blocks start at, int64 [B, N].
        kept: bool [B, N], False: not a real block; None: all are real.
        final_hidden, logits: the teacher, one of the two: f_t [B, T, H], or z_t [B, T, V].
        target_argmax: argmax of z_t, int64 [B, T]; None: from the teacher.
        target_logsumexp: of z_t over V [B, T]; None: from the teacher.
        document_ids: int64 [B, T], -1 in padding; None: a row is one document.
        position_ids: int64 [B, T]; None: from 0 in each document.
        counts: denominators [2], of the first term and of the other terms, over the whole
            optimizer step; None: those of these blocks.
        frame: as `TargetBatch.to_trainer_inputs` names it; another one is refused.

    Raises:
        DraftError: not exactly one teacher, anchors outside the pack, or inputs of the other frame.
    """
    require_frame(frame, "token")
    length, ids = input_ids.shape[1], draft.proposed_ids
    if (final_hidden is None) == (logits is None):
        raise DraftError("give exactly one of final_hidden and logits")
    if anchors.numel() and not 0 <= int(anchors.min()) <= int(anchors.max()) < length:
        raise DraftError(
            f"anchors: expected slots in 0..{length - 1}, found {int(anchors.min())} to "
            f"{int(anchors.max())}"
        )
    documents, positions = settle_documents(input_ids, document_ids, position_ids)
    real = torch.ones_like(anchors, dtype=torch.bool) if kept is None else kept.bool()
    real = real & (documents.gather(1, anchors) != PADDING)  # [B, N]
    choice = target_argmax
    if logits is not None:
        choice = logits.argmax(-1) if choice is None else choice
        teacher = logits_teacher(logits.flatten(0, 1), ids)
    else:
        assert final_hidden is not None  # there is exactly one teacher
        choice = argmax_by_chunks(head.logits, final_hidden) if choice is None else choice
        sums = None if target_logsumexp is None else target_logsumexp.flatten()  # [B*T]
        teacher = head_teacher(head, final_hidden.flatten(0, 1), ids, sums)
    made = BlockFrame(
        aux=aux_hidden_states,
        input_ids=input_ids,
        loss_mask=loss_mask,
        target_argmax=choice,
        document_ids=documents,
        position_ids=positions,
        blocks=Blocks(anchors, real),
        teacher=teacher,
    )
    return blocks_loss(draft, made, head, counts)


def blocks_loss(
    draft: DSparkModel, frame: BlockFrame, head: TargetHead, counts: Tensor | None
) -> DraftLoss:
    """Compute the loss of a frame; `head` is the target's, `counts` [2] (see `dspark_loss`)."""
    chosen = TrainedRows.select(draft, frame)
    own = chosen.totals()  # [2]
    counts = own if counts is None else counts.to(own)
    shares = torch.where(counts > 0, 1 / counts, 0.0)  # [2]
    if chosen.rows.numel():
        documents, positions = frame.document_ids, frame.position_ids
        context = batch_context(draft, frame.aux, documents, positions)
        y = block_states(draft, context, frame.input_ids, documents, positions, frame.blocks)
        loss, figures, forecasts = _rows_loss(draft, y, chosen, head, frame.teacher, shares)
    else:
        loss, empty = draft.zero_loss(), own.new_zeros(0)
        figures = RowStats(empty, empty, chosen.rows, empty, empty)
        forecasts = None if draft.confidence_head is None else Forecasts(empty, empty)
    weights = draft_weights(draft).to(own.device)  # [D]
    return DraftLoss(loss, block_sums(figures, forecasts, chosen, weights, draft.options))


def _rows_loss(
    draft: DSparkModel,
    y: Tensor,
    chosen: TrainedRows,
    head: TargetHead,
    teacher: Teacher,
    shares: Tensor,
) -> tuple[Tensor, RowStats, Forecasts | None]:
    """Return the loss of the chosen drafts with a graph, their figures, and their confidence.

    Args:
        draft: the weights.
        y: states of the blocks [B, N, D, H].
        chosen: the R drafts.
        head: the target's.
        teacher: of flat slots.
        shares: one over the denominators, float64 [2].
    """
    options, rows = draft.options, chosen.rows
    hidden, low_rank, known = y.flatten(0, 2)[rows], None, None  # hidden: [R, H]
    shared = SharedTeacher(teacher, chosen.slot)
    if draft.markov_head is not None:
        markov, w2 = draft.markov_head, draft.markov_head.markov_w2.weight
        if markov.of_token_alone:  # drafts of one slot follow the same token
            latent = markov.markov_w1(chosen.token_before(shared.slots))  # [M, r], M slots
            low_rank = LowRank(latent, w2, (shared.index, shared.bounds))
            known = latent[shared.index]  # [R, r]
        else:
            e = markov.markov_w1(chosen.previous)  # [B, N, D, r]
            low_rank = LowRank(markov.block(e, y).flatten(0, 2)[rows], w2)
            known = e.flatten(0, 2)[rows]
    head_rows = draft.head_rows(head)  # [Vd, H]
    label = {"tokens": chosen.token, "hard": chosen.choice.clamp_min(0), "soft": None}
    first = chosen.weight * chosen.has_token * shares[0]  # [R]
    mixed = options.mixed
    loss, figures = block_rows_loss(
        hidden.to(head_rows.dtype),
        head_rows,
        shared,
        label[options.compared_with],
        options.ce_weight * first if mixed else first,
        options.l1_weight * chosen.weight * shares[1],
        low_rank,
        None if mixed else LossKind.of(options),
    )
    if draft.confidence_head is None:
        return loss, figures, None
    logits = draft.confidence_head(hidden, known).to(figures.acceptance.dtype)  # [R]
    bce = F.binary_cross_entropy_with_logits(logits, figures.acceptance, reduction="none")  # [R]
    weight = options.confidence_weight * chosen.weight * shares[1]  # [R]
    loss = loss + (weight.to(bce.dtype) * bce).sum()
    return loss, figures, Forecasts(logits.detach().sigmoid(), bce.detach())
