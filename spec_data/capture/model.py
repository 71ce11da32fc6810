"""The target: a causal LM of transformers under hooks.

A forward returns the raw states of the chosen layers and the input of the head. Logits are computed
from that input with the head described as data, which `prove_head` compares with the model's own
logits. So no [B, T, V] tensor exists unless full logits are requested. Shapes: B rows, T slots of a
row, N real tokens of a batch, H hidden size, V vocabulary size.
"""

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from spec_data.capture.attention_in_parts import LONG_ROW, attention_in_parts, needs_chunks
from spec_data.capture.backend import BackendOptions, ForwardBatch
from spec_data.capture.hooks import (
    States,
    capturing,
    check_captured,
    decoder_layers,
    describe_head,
    head_parts,
    input_embedding,
    output_head,
    prove_streams,
)
from spec_data.capture.live_positions import read_positions
from spec_data.capture.mask_forms import (
    ROWS,
    SINGLE,
    WITHOUT_MASK,
    mask_forms,
    packed_mask,
    view_of,
)
from spec_data.capture.proofs import head_error, prove_head, prove_isolation, why_no_chunks
from spec_data.models.devices import sent
from spec_data.models.loading import device_of, devices_of, fix_rope_factors, load_model, whole
from spec_data.models.reading import (
    drops_softcap,
    load_config,
    loaded_quantisation,
    text_config,
)
from spec_data.models.resolve import resolve_model
from spec_data.models.streams import streams_of
from spec_data.models.target_options import Spread
from spec_data.models.vision import Vision, takes_images
from spec_data.shards.batch import MASS, PROBABILITIES, DraftBatch, as_rows, batch_layout
from spec_data.shards.errors import TargetError
from spec_data.shards.layer_ids import choose_layers, recipe_count
from spec_data.shards.packing import PADDING
from spec_data.shards.position_data import Positions
from spec_data.shards.schema import FINAL, PackingRecord, Quantised, apply_head, layer_column

logger = logging.getLogger(__name__)

# Largest block of float32 logits in memory: small enough for the cache of a CPU, large enough to
# keep a GPU busy.
_LOGIT_BYTES = {"cpu": 8 << 20}
_LOGIT_BYTES_OF_DEVICES = 256 << 20
# Fewer tokens at a time would read the head, the widest matrix of the target, too often.
_LEAST_LOGIT_ROWS = 128
_STREAM_TOKENS = 64  # on which several residual streams are proven


class Target:
    """A frozen causal LM under hooks, and the backend "hf"; see `backend.TargetBackend`.

    Inputs go to `input_device`, states come from `device`: they differ where a target is spread
    over devices. `supervision` is what `generate_batch` puts in its batches: "final-hidden",
    "logits", or "target-probs" over the token ids `draft_vocabulary` (int64 [Vd], ascending).
    """

    ready: int | None = None

    def __init__(
        self,
        model: Any,
        layers: Sequence[int] | str = "auto",
        *,
        for_drafts: Sequence[str] = (),
        supervision: str = "final-hidden",
        draft_vocabulary: Tensor | None = None,
        rope_factors: str | None = None,
        quantisation: Quantised | None = None,
    ) -> None:
        """Wrap a loaded model and put it in evaluation mode, in which it stays.

        Args:
            model: a decoder-only causal language model of transformers.
            layers: layer ids, or a text as `--layers` takes it: "auto" (the EAGLE-3 recipe),
                "spread:5", "1,3,5".
            for_drafts: drafts to capture for, such as ("eagle3", "dspark"), instead of `layers`:
                the layers that any of their recipes reads. `draft_layers` has those of each.
            supervision, draft_vocabulary: see the class.
            rope_factors: see `from_pretrained`.
            quantisation: of the checkpoint, see `quantisation_of`.

        Raises:
            TargetError: layer ids that do not exist, a target that has too few blocks for "auto",
                an attention that leaves out the target's softcapping, or an unknown supervision.
        """
        self.model = model.eval()  # dropout in a forward would change the states
        fix_rope_factors(model, rope_factors)
        self.rope_factors = rope_factors
        self.quantisation = quantisation
        self.config = model.config
        self.architecture = type(model).__name__
        self.num_layers = len(decoder_layers(model))
        self.layers, self.draft_layers = choose_layers(layers, for_drafts, self.num_layers)
        self._mask_form: str | None = None  # of packed rows, once proven on a batch
        self.attn = getattr(self.config, "_attn_implementation", None) or "eager"
        if drops_softcap(self.config, self.attn):
            raise TargetError(
                f"{self.architecture} was loaded with sdpa, which leaves out its softcapping: "
                "engines compute other states. Load it with attn_implementation='eager'"
            )
        self.head = describe_head(model)
        self.supervise(supervision, draft_vocabulary)
        self.dtype: torch.dtype = output_head(model).weight.dtype
        self.input_device: torch.device = device_of(input_embedding(model))
        self.device: torch.device = device_of(output_head(model))
        self.vision: Vision | None = None  # its image processor, where it was opened from files
        self._head_tensors: dict[str, Tensor | None] = {}
        # Whether long documents attend in chunks, once proven; by whether they exceed a window.
        self._chunks: dict[bool, bool] = {}
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    def __repr__(self) -> str:
        return f"Target({self.architecture}, layers {self.layers}, {self.dtype}, {self.device})"

    def get_input_embeddings(self) -> torch.nn.Module:
        """Return the input embedding of the target, whatever its family calls it."""
        return input_embedding(self.model)

    def supervise(self, supervision: str, draft_vocabulary: Tensor | None = None) -> None:
        """Choose what `generate_batch` puts in its batches, see the class.

        Raises:
            TargetError: an unknown supervision, or one that contradicts the rest; or a draft
                vocabulary that is not some of the target's ids, each once and ascending.
        """
        if supervision not in ("final-hidden", "logits", "target-probs"):
            raise TargetError(f"supervision {supervision!r}: final-hidden, logits or target-probs")
        for draft in self.draft_layers:
            if recipe_count(draft) == 0 and supervision != "final-hidden":
                raise TargetError(
                    f"draft {draft} needs final-hidden, not supervision {supervision!r}"
                )
        if (supervision == "target-probs") != (draft_vocabulary is not None):
            raise TargetError("target-probs goes with draft_vocabulary, and only with it")
        if draft_vocabulary is not None:
            draft_vocabulary = torch.as_tensor(draft_vocabulary)
            self._check_vocabulary(draft_vocabulary)
        self.supervision, self.draft_vocabulary = supervision, draft_vocabulary

    def _check_vocabulary(self, ids: Tensor) -> None:
        """Raise TargetError unless `ids` are ids of the head: a loss could not tell."""
        whole = ids.ndim == 1 and len(ids) and not ids.is_floating_point()
        if not whole or ids.dtype == torch.bool:
            raise TargetError(
                f"draft_vocabulary: expected token ids [Vd], not {ids.dtype} {list(ids.shape)}"
            )
        steps = ids[1:] <= ids[:-1]
        if steps.any():
            n = int(steps.nonzero()[0])
            raise TargetError(
                f"draft_vocabulary: ids are ascending, each once, and {int(ids[n + 1])} comes "
                f"after {int(ids[n])}"
            )
        if (least := int(ids[0])) < 0 or (most := int(ids[-1])) >= self.head.vocab_size:
            raise TargetError(
                f"draft_vocabulary: {least if least < 0 else most} is no id of this target, whose "
                f"head has {self.head.vocab_size:,}"
            )

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        layers: Sequence[int] | str = "auto",
        *,
        dtype: str = "auto",
        device: str = "auto",
        attn: str = "auto",
        trust_remote_code: bool = False,
        rope_factors: str | None = None,
        spread: Spread | None = None,
        **options: Any,
    ) -> "Target":
        """Load a model directory (or Hub id) and wrap it.

        Args:
            path, dtype, device, attn, trust_remote_code, spread: see `load_model`.
            rope_factors: "short" or "long" of a longrope target, for every document; None leaves
                the choice to transformers, which makes it for each batch.
            layers, options: see the constructor.

        Raises:
            TargetError: the model cannot be loaded, or does not have these layers.
        """
        model = load_model(
            str(path), dtype=dtype, device=device, attn=attn, trust=trust_remote_code, spread=spread
        )
        config = load_config(resolve_model(str(path))[0], trust_remote_code)
        options["quantisation"] = loaded_quantisation(config, model)
        return cls(model, layers, rope_factors=rope_factors, **options)

    @classmethod
    def open(cls, options: BackendOptions) -> "Target":
        """Load a target as `backend.open_backend` does."""
        names = ("dtype", "device", "attn", "trust_remote_code", "rope_factors", "spread")
        given = {name: getattr(options, name) for name in names}
        target = cls.from_pretrained(options.path, options.layers, **given)
        if takes_images(target.config):
            directory = resolve_model(str(options.path))[0]
            target.vision = Vision(directory, options.trust_remote_code)
        return target

    def describe(self) -> dict[str, Any]:
        chosen = {"rope_factors": self.rope_factors, "quantised_as": self.quantisation}
        chosen["streams"] = streams_of(text_config(self.config)).text
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "attn": self.attn,
            "backend": "hf",
            "backend_version": transformers.__version__,
            "devices": self._devices(),
            **{name: value for name, value in chosen.items() if value},
        }

    def _devices(self) -> str:
        """Return the kinds of devices that hold the target, such as "cuda" or "2 cuda, cpu"."""
        kinds = Counter(d.type for d in devices_of(self.model))
        if any(p.device.type == "meta" for p in self.model.parameters()):
            kinds["offloaded"] = 1
        return ", ".join(k if n == 1 else f"{n} {k}" for k, n in sorted(kinds.items()))

    def prove(
        self, documents: Sequence[Tensor], pack_length: int, packing: str = "auto"
    ) -> PackingRecord:
        prove_streams(self.model, documents[0][:_STREAM_TOKENS].to(self.input_device))
        return prove_isolation(self, documents, pack_length, packing)

    def prove_head(self, documents: Sequence[Tensor]) -> float:
        def error(ids: Tensor) -> float:
            layout = torch.zeros_like(ids)[None], torch.arange(len(ids))[None]  # [1, T] each
            states = self.forward(ids[None], *layout, None, full_logits=True)
            return head_error(self.logits_of(states.final), states.logits)

        return prove_head(error, documents, self.dtype)

    def capture(self, batch: ForwardBatch, form: str, *, full_logits: bool = False) -> States:
        packed = None if form in (ROWS, SINGLE) else form
        slots = (batch.input_ids, batch.document_ids, batch.position_ids)
        given = self._image_inputs(batch.input_ids, batch.images)
        states = self.forward(*slots, packed, full_logits=full_logits, images=given)
        # The slots of real tokens are known on the host; a mask on the device would be waited for.
        real = sent((batch.document_ids >= 0).flatten().nonzero()[:, 0], self.device)  # [N]
        return states.each(lambda values: values.flatten(0, 1)[real])

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        document_ids: Tensor,
        position_ids: Tensor,
        form: str | None,
        *,
        full_logits: bool = False,
        images: dict[str, Tensor] | None = None,
    ) -> States:
        """Run one forward under hooks; return states [B, T, H] of all slots.

        Args:
            input_ids: int64 [B, T], on any device, like the next two.
            document_ids: int64 [B, T], -1 in padding.
            position_ids: int64 [B, T], restarting at 0 in each document.
            form: a packed mask form, or None for one document per row (right-padded, 2-D mask).
            full_logits: run the head on every slot and return its logits.
            images: what the model reads of the images of the one document that fills the batch.

        Raises:
            TargetError: the target does not produce the states of a layer.
        """
        # One document fills each row: asked where the ids are, which is the host in generate.
        alone = bool((document_ids == 0).all())
        ids, documents = (sent(x, self.input_device) for x in (input_ids, document_ids))
        given: dict[str, Any] = {"attention_mask": None}
        if not alone:  # else the model makes its own causal mask, which sdpa does not need at all
            if form is None:
                given["attention_mask"] = (documents >= 0).long()
            else:
                mask = packed_mask(form, self.config, self.attn, documents, self.dtype)
                given["attention_mask"] = mask
            if self._takes_positions:
                given["position_ids"] = sent(position_ids, self.input_device)
        attention: Any = nullcontext()
        if images:  # with the positions and the mask that the model gives them
            return self._forward(ids, given | images, full_logits, attention)
        if alone and len(ids) == 1 and ids.shape[1] > LONG_ROW and self._attends_in_chunks(ids):
            attention = attention_in_parts(self.model, self.attn)
        elif form in WITHOUT_MASK and not alone:
            attention = attention_in_parts(self.model, self.attn, document_ids, form)
        return self._forward(ids, given, full_logits, attention)

    def _forward(
        self, ids: Tensor, given: dict[str, Any], full_logits: bool, attention: Any
    ) -> States:
        """Run the model on int64 [B, T], with `attention_in_parts` or its own attention."""
        hooks = capturing(self.model, self.layers, skip_head=not full_logits, device=self.device)
        with hooks as captured, attention:
            output = self.model(input_ids=ids, use_cache=False, **given)
        check_captured(captured, self.layers, (*ids.shape, self.head.hidden_size))
        captured.logits = output.logits.to(self.device) if full_logits else None
        return captured

    def _image_inputs(self, ids: Tensor, images: tuple[bytes, ...]) -> dict[str, Tensor]:
        """Return what the model reads of the images of a document, int64 [1, T].

        Raises:
            TargetError: this class reads none, or the processor fails.
        """
        if not images:
            return {}
        if (
            self.vision is None
            or hasattr(self.model.base_model, "get_rope_index")  # positions of several kinds
            or "pixel_values" not in inspect.signature(self.model.forward).parameters
        ):
            raise TargetError(
                f"{self.architecture} reads no images, as transformers loads it; leave rows with "
                "images out"
            )
        given = self.vision.inputs(ids, images)
        return {
            name: sent(value.to(self.dtype) if value.is_floating_point() else value, self.device)
            for name, value in given.items()
        }

    def prove_images(self, ids: Tensor, images: tuple[bytes, ...]) -> None:
        """Prove that the states of a document, int64 [T], depend on what its images show.

        Raises:
            TargetError: they do not, so the target ignores its images here.
        """
        given = self._image_inputs(ids[None], images)
        others = {k: -v - 1 if v.is_floating_point() else v for k, v in given.items()}
        layout = torch.zeros_like(ids)[None], torch.arange(len(ids))[None]
        finals = [
            self.forward(ids[None], *layout, None, images=inputs).final
            for inputs in (given, others)
        ]
        if torch.equal(*finals):
            raise TargetError(
                f"{self.architecture} computes the same states whatever its images show; leave "
                "rows with images out"
            )

    def _attends_in_chunks(self, ids: Tensor) -> bool:
        """Whether long documents attend in chunks: proven on the first one, int64 [1, T].

        The first document that is longer than a sliding window is compared as well, because the one
        before it could not show whether the window is kept.
        """
        if not needs_chunks(self.config, self.attn):
            return False
        beyond = ids.shape[1] > (view_of(self.config) or 0)
        if beyond not in self._chunks:

            def run(part: Tensor, chunks: bool) -> States:
                attention = attention_in_parts(self.model, self.attn) if chunks else nullcontext()
                return self._forward(part, {"attention_mask": None}, False, attention)

            reason = why_no_chunks(run, ids, self.config, self.dtype)
            self._chunks[beyond] = reason is None
            if reason is not None:
                logger.warning(
                    "warning[long-rows]: documents of over %d tokens are captured without chunks "
                    "(%s): memory grows with the square of their length",
                    *(LONG_ROW, reason),
                )
        return self._chunks[beyond]

    def logits_of(self, final: Tensor) -> Tensor:
        weight, bias = self.head_tensor("weight"), self.head_tensor("bias")
        assert weight is not None
        return apply_head(final.to(weight.device, weight.dtype), weight, bias, self.head)

    def head_tensor(self, name: str) -> Tensor | None:
        """Return `weight` or `bias` of the head; all processes must call it together at first."""
        if name not in self._head_tensors:
            self._head_tensors[name] = whole(output_head(self.model), name)
        return self._head_tensors[name]

    def logit_chunks(self, tokens: int) -> list[slice]:
        """Return slices of an axis of `tokens` tokens, so that float32 logits [n, V] of a slice
        take at most 8 MB on a CPU and 256 MB elsewhere, or have 128 tokens.
        """
        limit = _LOGIT_BYTES.get(self.device.type, _LOGIT_BYTES_OF_DEVICES)
        step = max(_LEAST_LOGIT_ROWS, limit // (4 * self.head.vocab_size))
        return [slice(a, min(a + step, tokens)) for a in range(0, tokens, step)]

    def head_tensors(self) -> dict[str, Tensor]:
        parts = head_parts(self.model, self.head.tied)
        return {name: part.detach().cpu().contiguous() for name, part in parts.items()}

    def positions(self, length: int) -> Positions:
        return read_positions(self.model, length)

    def peak_memory(self, run: Callable[[], None]) -> float | None:
        devices = [d for d in devices_of(self.model) if d.type == "cuda"]
        if not devices:
            return None
        torch.cuda.empty_cache()  # of what ran before
        for device in devices:
            torch.cuda.reset_peak_memory_stats(device)
        try:
            run()
            return max(map(_peak_share, devices))
        finally:
            torch.cuda.empty_cache()

    def close(self) -> None:
        vars(self).pop("model", None)  # the last reference to it
        self._head_tensors.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @torch.no_grad()  # not inference_mode: autograd of a trainer must be able to save these tensors
    def generate_batch(
        self,
        input_ids: Tensor | Sequence[Sequence[int]],
        attention_mask: Tensor | Sequence[Sequence[int]],
        loss_mask: Tensor | Sequence[Sequence[int]],
        seq_lens: Sequence[Sequence[int]] | Tensor | None = None,
    ) -> DraftBatch:
        """Run the target and return the batch that a draft learns from; padding is zero.

        Args:
            input_ids: int64 [B, T], right-padded; a tensor, an array of numpy, or lists, as are the
                masks.
            attention_mask: bool or int [B, T], nonzero at real tokens.
            loss_mask: bool or int [B, T], nonzero at supervised tokens.
            seq_lens: document lengths per row, for packed rows with a block-causal mask; a [B, D]
                tensor may be zero-padded. None: one document per row with the plain 2-D mask.

        Raises:
            TargetError: shapes that do not match, documents that do not fill the attention mask,
                rows that are not right-padded, or a target that leaks between packed documents.
        """
        input_ids = as_rows("input_ids", input_ids).long()
        attention_mask, loss_mask = (
            as_rows(name, values)
            for name, values in (("attention_mask", attention_mask), ("loss_mask", loss_mask))
        )
        lengths, plain = batch_layout(input_ids, attention_mask, loss_mask, seq_lens)
        self._check_ids(input_ids)
        document_ids, positions = plain["document_ids"], plain["position_ids"]
        form = self._packed_form(input_ids, lengths) if seq_lens is not None else None
        states = self.forward(
            input_ids, document_ids, positions, form, full_logits=self.supervision == "logits"
        )
        columns = self._supervise(states)
        columns |= {layer_column(k): states.layers[k] for k in self.layers}
        padding = document_ids == PADDING  # [B, T], on the host; the target ran over it as well
        if padding.any():  # else no copy is made, which logits would double
            padding = padding.to(self.device)
            for name, values in columns.items():
                empty = padding if values.ndim == 2 else padding[..., None]
                columns[name] = values.to(self.device).masked_fill(empty, 0)
        return DraftBatch.of(plain | columns).to(self.device)

    def _check_ids(self, input_ids: Tensor) -> None:
        """Raise TargetError for ids that the embedding lacks: on a GPU they end the process."""
        embedding: Any = self.get_input_embeddings()
        size = len(embedding.weight)
        wrong = (input_ids < 0) | (input_ids >= size)
        if wrong.any():
            row, slot = wrong.nonzero()[0].tolist()
            raise TargetError(
                f"input_ids: {int(input_ids[row, slot])} in row {row}, slot {slot} is no id of "
                f"this target, which has {size:,}; padding too needs one, such as 0"
            )

    def _packed_form(self, input_ids: Tensor, lengths: list[list[int]]) -> str:
        """Return the mask form of packed rows, proven on the first batch that can show a leak.

        `input_ids` is int64 [B, T]; `lengths` has the document lengths of each row.
        """
        if self._mask_form is not None:
            return self._mask_form
        rows = zip(input_ids.cpu(), lengths, strict=True)
        documents = [part for ids, row in rows for part in ids[: sum(row)].split(row)]
        form = prove_isolation(self, documents, input_ids.shape[1]).form
        if form not in (ROWS, SINGLE):
            self._mask_form = form
            return form
        if any(len(row) > 1 for row in lengths):
            raise TargetError(
                f"{self.architecture} carries state from one packed document into the next under "
                "every mask; pass one document per row (seq_lens=None)"
            )
        forms = mask_forms(self.config, self.attn, self.device.type)
        tried = self.device.type == "cpu"  # elsewhere a kernel may be missing
        return next(f for f in forms if tried or f not in WITHOUT_MASK)  # one per row cannot leak

    def _supervise(self, states: States) -> dict[str, Tensor]:
        """Return the columns [B, T, ...] of the teacher, and `target_argmax` int64 [B, T].

        The argmax covers the full vocabulary, and so do the sums from which a loss over a reduced
        draft vocabulary takes the target's probabilities.
        """
        if states.logits is not None:
            return {"target_argmax": states.logits.argmax(-1), "logits": states.logits}
        final, shape = states.final.flatten(0, 1), states.final.shape[:2]
        choices, sums, probs = [], [], []
        for part in self.logit_chunks(len(final)):
            logits = self.logits_of(final[part])  # [n, V]
            choices.append(logits.argmax(-1))
            sums.append(logits.float().logsumexp(-1))
            if self.draft_vocabulary is not None:
                chosen = logits[:, self.draft_vocabulary.to(logits.device)].float()  # [n, Vd]
                probs.append(chosen.softmax(-1))
                sums[-1] = (chosen.logsumexp(-1) - sums[-1]).exp()
        argmax, total = torch.cat(choices).view(shape), torch.cat(sums).view(shape)
        if self.draft_vocabulary is None:
            teacher = {FINAL: states.final, "target_logsumexp": total}
        else:
            probabilities = torch.cat(probs).view(*shape, -1)
            teacher = {PROBABILITIES: probabilities, MASS: total}
        return {"target_argmax": argmax} | teacher


def _peak_share(device: torch.device) -> float:
    """Return the share of a GPU that was in use at the peak, that of other processes included."""
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return (torch.cuda.max_memory_reserved(device) + others) / total
