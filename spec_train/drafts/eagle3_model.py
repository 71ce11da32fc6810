"""The EAGLE-3 draft as a model: one decoder layer over (known token, carried state).

Row (token x_{t+1}, states of token t) sits at RoPE position t and drafts x_{t+2}. The state fed
back is the layer's output before the final norm (after it with `norm_output`). Parameter names are
the checkpoint's; the embedding is the target's and stays frozen, because engines replace it.

B rows, T slots, n captured layers, H hidden size, h / g query / key-value heads, d head size,
V / Vd target / draft vocabulary.
"""

from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_data.shards.errors import DraftError
from spec_train.drafts.chain import DraftCache
from spec_train.drafts.eagle3_config import Eagle3Config, Eagle3Options
from spec_train.drafts.layers import GatedMLP, RMSNorm, Rotary, rotate
from spec_train.exports.files import DraftFiles, check_tensors, read_files, write_files


class Eagle3Attention(nn.Module):
    """Projections of the layer's attention; the attention itself is the caller's."""

    def __init__(self, config: Eagle3Config) -> None:
        """Make the projections: inputs are 2H wide."""
        super().__init__()
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        wide, size = 2 * config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(wide, config.num_attention_heads * size, bias=False)
        self.k_proj = nn.Linear(wide, config.num_key_value_heads * size, bias=False)
        self.v_proj = nn.Linear(wide, config.num_key_value_heads * size, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * size, config.hidden_size, bias=False)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def queries(self, u: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotated queries [B, h, T, d] of layer inputs [B, T, 2H]."""
        return rotate(self._heads(self.q_proj(u)), cos, sin)

    def keys_values(self, u: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [B, g, T, d] of layer inputs [B, T, 2H]."""
        return rotate(self._heads(self.k_proj(u)), cos, sin), self._heads(self.v_proj(u))

    def join(self, heads: Tensor) -> Tensor:
        """Heads [B, h, T, d] -> [B, T, H]."""
        return self.o_proj(heads.transpose(1, 2).flatten(2))


class Eagle3Layer(nn.Module):
    """The decoder layer, split where the attention sits."""

    def __init__(self, config: Eagle3Config) -> None:
        """Make norms, attention projections and MLP."""
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = Eagle3Attention(config)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = GatedMLP(size, config.intermediate_size)

    def inputs(self, embedding: Tensor, carried: Tensor) -> Tensor:
        """Both [B, T, H] -> attention input [B, T, 2H]."""
        return torch.cat([self.input_layernorm(embedding), self.hidden_norm(carried)], dim=-1)

    def outputs(self, carried: Tensor, heads: Tensor) -> Tensor:
        """Residual [B, T, H] and attention heads [B, h, T, d] -> layer output [B, T, H]."""
        middle = carried + self.self_attn.join(heads)
        return middle + self.mlp(self.post_attention_layernorm(middle))


class Eagle3Model(nn.Module):
    """Modules, serving forward and checkpoint of an EAGLE-3 draft (the loss is in `eagle3`)."""

    d2t: Tensor
    t2d: Tensor
    draft_ids: Tensor
    draft_index: Tensor

    def __init__(self, config: Eagle3Config, options: Eagle3Options | None = None) -> None:
        """Make a draft with random weights and the first Vd tokens as draft vocabulary."""
        super().__init__()
        self.config = config
        self.options = options or Eagle3Options()
        size, eps = config.hidden_size, config.rms_norm_eps
        count, width = len(config.layers), config.target_hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.embed_tokens.weight.requires_grad_(False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(width, eps) for _ in range(count))
        self.fc = nn.Linear(count * width, size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.rotary = Rotary(config.rope)
        self.attention_backend = "auto"  # or one of attention.BACKENDS
        for name in ("d2t", "t2d", "draft_ids", "draft_index"):
            self.register_buffer(name, None, persistent=False)
        self.set_vocabulary(torch.arange(config.draft_vocab_size))

    @property
    def full_vocabulary(self) -> bool:
        """Whether the draft can propose every token of the target (no map is saved then)."""
        return self.config.draft_vocab_size == self.config.vocab_size

    def set_vocabulary(self, ids: Tensor) -> None:
        """Set the target ids of the draft vocabulary, ascending int64 [Vd].

        Raises:
            DraftError: ids are not ascending, unique, within 0..V-1 and Vd in number.
        """
        size, vocab = self.config.draft_vocab_size, self.config.vocab_size
        ids = ids.to(self.fc.weight.device, torch.long)
        ascending = bool((ids[1:] > ids[:-1]).all())
        if ids.shape != (size,) or not ascending or int(ids[0]) < 0 or int(ids[-1]) >= vocab:
            raise DraftError(
                f"draft vocabulary: {tuple(ids.shape)} ids must be {size} ascending unique ids "
                f"in 0..{vocab - 1}"
            )
        rows = torch.arange(size, device=ids.device)
        self.draft_ids = ids
        self.d2t = ids - rows
        self.draft_index = torch.full((vocab,), -1, device=ids.device)  # target id -> row or -1
        self.draft_index[ids] = rows
        self.t2d = self.draft_index >= 0

    def project(self, aux: Tensor) -> Tensor:
        """Aux states [B, T, n*H] -> features [B, T, H]."""
        aux = self._cast(aux)
        if self.config.fc_norm:
            parts = aux.chunk(len(self.fc_norm), dim=-1)
            pairs = zip(self.fc_norm, parts, strict=True)
            aux = torch.cat([norm(part) for norm, part in pairs], dim=-1)
        return self.fc(aux)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Known tokens [B, T] -> [B, T, H]."""
        return self._cast(self.embed_tokens(token_ids))

    def _cast(self, x: Tensor) -> Tensor:
        """To the dtype of the weights; autocast does that itself."""
        autocast = torch.is_autocast_enabled(x.device.type)
        return x if autocast else x.to(self.fc.weight.dtype)

    def feedback(self, output: Tensor) -> Tensor:
        """The layer's output as it is carried to the next step."""
        return self.norm(output) if self.config.norm_output else output

    def head_input(self, carried: Tensor) -> Tensor:
        """A carried state as it enters the LM head."""
        return carried if self.config.norm_output else self.norm(carried)

    def logits(self, carried: Tensor) -> Tensor:
        """Carried states o [..., H] -> draft logits [..., Vd]."""
        return self.lm_head(self.head_input(carried))

    def step(
        self,
        token_ids: Tensor,
        carried: Tensor,
        position_ids: Tensor,
        cache: DraftCache | None = None,
    ) -> Tensor:
        """Process rows as serving does: causal among themselves, after what `cache` holds.

        Args:
            token_ids: known tokens, int64 [B, T].
            carried: features of `project`, or what an earlier `step` returned, [B, T, H].
            position_ids: RoPE positions, int64 [B, T].
            cache: rows processed so far; the new rows are appended to it.

        Returns:
            o [B, T, H]: goes to `logits`, and into the next `step` as `carried`.
        """
        attention = self.midlayer.self_attn
        cos, sin = self.rotary.cos_sin(position_ids, None, carried.dtype)
        u = self.midlayer.inputs(self.embed(token_ids), carried)
        q = attention.queries(u, cos, sin)
        k, v = (cache or DraftCache()).append(*attention.keys_values(u, cos, sin))
        new, held = q.shape[2], k.shape[2]
        mask = None
        if new > 1:
            mask = torch.ones(new, held, dtype=torch.bool, device=q.device).tril(held - new)
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=attention.scale)
        return self.feedback(self.midlayer.outputs(carried, heads))

    def trainable_parameters(self) -> list[nn.Parameter]:
        """All parameters but the frozen embedding."""
        return [p for p in self.parameters() if p.requires_grad]

    def checkpoint_tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors of model.safetensors, on the CPU."""
        tensors = {
            name: value.detach().to("cpu", dtype).contiguous()
            for name, value in self.state_dict().items()
        }
        if not self.full_vocabulary:
            tensors["d2t"], tensors["t2d"] = self.d2t.cpu(), self.t2d.cpu()
        return tensors

    def save_pretrained(self, directory: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write config.json and model.safetensors, each in one step, weights in `dtype`.

        By default the dtype is the target's, so that the embedding is the target's bit for bit.
        """
        dtype = dtype or getattr(torch, self.config.dtype)
        write_files(self.files(dtype, str(directory)), directory)

    def files(self, dtype: torch.dtype, where: str) -> DraftFiles:
        """What `save_pretrained` writes to the directory `where`."""
        raw = self.config.to_json(self.options)
        raw["dtype"] = raw["torch_dtype"] = str(dtype).removeprefix("torch.")
        return DraftFiles(raw, self.checkpoint_tensors(dtype), where)

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> Self:
        """Read a draft that `save_pretrained` wrote, in its stored dtype.

        Raises:
            MissingError: a file is absent.
            DraftError: tensors are missing, unexpected or of another shape; all are named.
        """
        return cls.from_files(read_files(directory))

    @classmethod
    def from_files(cls, files: DraftFiles) -> Self:
        """Make a draft of files in the form of `save_pretrained`, in their dtype.

        Raises:
            DraftError: tensors are missing, unexpected or of another shape; all are named.
        """
        config, options = Eagle3Config.from_json(files.config, files.config_path)
        draft, tensors = cls(config, options), dict(files.tensors)
        expected = {k: tuple(v.shape) for k, v in draft.state_dict().items()}
        if not draft.full_vocabulary:
            expected |= {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
        check_tensors(tensors, expected, files.weights_path)
        if not draft.full_vocabulary:
            d2t, t2d = tensors.pop("d2t"), tensors.pop("t2d")
            draft.set_vocabulary(torch.arange(config.draft_vocab_size) + d2t)
            if not torch.equal(draft.t2d, t2d):
                raise DraftError(f"{files.weights_path}: d2t and t2d disagree")
        draft.to(tensors["fc.weight"].dtype)
        draft.load_state_dict(tensors)
        return draft
