"""The EAGLE-3 draft as a model: one decoder layer over (known token, carried state).

Row (token x_{t+1}, states of token t) sits at RoPE position t and drafts x_{t+2}. The state fed
back is the layer's output before the final norm (after it with `norm_output`). Parameter names are
the checkpoint's; the embedding is the target's and stays frozen, because engines replace it.

B rows, T slots, n captured layers, H hidden size, h / g query / key-value heads, d head size,
V / Vd target / draft vocabulary.
"""

import json
import os
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from spec_data.shards.errors import DraftError, MissingError
from spec_data.shards.files import dump_json, replace_durably, write_atomically
from spec_train.drafts.chain import DraftCache
from spec_train.drafts.eagle3_config import Eagle3Config, Eagle3Options
from spec_train.drafts.layers import GatedMLP, RMSNorm, Rotary, rotate


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
        seen: Tensor | None = None,
    ) -> Tensor:
        """Process rows as serving does, after what `cache` holds.

        Args:
            token_ids: known tokens, int64 [B, T].
            carried: features of `project`, or what an earlier `step` returned, [B, T, H].
            position_ids: RoPE positions, int64 [B, T].
            cache: rows processed so far; the new rows are appended to it.
            seen: which rows, old and new, a new row sees, bool [T, length]; None: causal.

        Returns:
            o [B, T, H]: goes to `logits`, and into the next `step` as `carried`.
        """
        attention = self.midlayer.self_attn
        cos, sin = self.rotary.cos_sin(position_ids, None, carried.dtype)
        u = self.midlayer.inputs(self.embed(token_ids), carried)
        q = attention.queries(u, cos, sin)
        k, v = attention.keys_values(u, cos, sin)
        heads = (cache or DraftCache()).attend(q, k, v, attention.scale, seen)
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
        raw = self.config.to_json(self.options)
        save_draft(Path(directory), self.checkpoint_tensors(dtype), raw, dtype)

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> Self:
        """Read a draft that `save_pretrained` wrote, in its stored dtype.

        Raises:
            MissingError: a file is absent.
            DraftError: tensors are missing, unexpected or of another shape; all are named.
        """
        folder = Path(directory)
        raw = read_config(folder)
        config, options = Eagle3Config.from_json(raw, str(folder / "config.json"))
        tensors = read_tensors(folder / "model.safetensors")
        draft = cls(config, options)
        expected = {k: tuple(v.shape) for k, v in draft.state_dict().items()}
        if not draft.full_vocabulary:
            expected |= {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
        check_tensors(tensors, expected, str(folder / "model.safetensors"))
        if not draft.full_vocabulary:
            d2t, t2d = tensors.pop("d2t"), tensors.pop("t2d")
            draft.set_vocabulary(torch.arange(config.draft_vocab_size) + d2t)
            if not torch.equal(draft.t2d, t2d):
                raise DraftError(f"{folder / 'model.safetensors'}: d2t and t2d disagree")
        draft.to(tensors["fc.weight"].dtype)
        draft.load_state_dict(tensors)
        return draft


def save_draft(
    folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], dtype: torch.dtype
) -> None:
    """Write model.safetensors and config.json (which says `dtype`), each in one step."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".model.safetensors.{os.getpid()}.tmp"
    save_file(tensors, temporary, metadata={"format": "pt"})
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    replace_durably(temporary, folder / "model.safetensors")
    name = str(dtype).removeprefix("torch.")
    config = config | {"dtype": name, "torch_dtype": name}
    write_atomically(folder / "config.json", dump_json(config))


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a draft directory, as plain values."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MissingError(f"{path}: no such file; give the directory of a draft") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DraftError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise DraftError(f"{path}: expected an object, found a {type(raw).__name__}")
    return raw


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file."""
    if not path.is_file():
        raise MissingError(f"{path}: no such file; the draft's weights are missing")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise DraftError(f"{path}: damaged ({error}); copy it again") from None


def check_tensors(
    tensors: dict[str, Tensor], expected: dict[str, tuple[int, ...]], where: str
) -> None:
    """Raise DraftError unless names and shapes are exactly the `expected` ones."""
    faults = [f"missing {name}" for name in expected if name not in tensors]
    faults += [f"unexpected {name}" for name in tensors if name not in expected]
    faults += [
        f"{name} has shape {list(tensors[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    if faults:
        raise DraftError(f"{where} does not fit its config.json: {'; '.join(faults)}")
