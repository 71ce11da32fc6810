"""What a training step of other trainers costs on a GPU, counted as `costs.py` counts ours.

    pip install --no-deps speculators==0.9.0 specforge==0.2.0
    python scripts/bench/peer_costs.py

Their own models run on ghosts: one document, their defaults, but the sizes, steps, layers, anchors
and slots of ours, and flex_attention. Weights are as each trains them: float32 under autocast, at
SpecForge bf16. What they compile or have kernels for (norms, rotations, gates, losses) is a kernel
each way, as ours is. speculators compiles the whole forward: its smaller figure leaves out all
sums, copies and casts, as if they were part of other kernels. Tables of all pairs of query and key,
from which both make the blocks of masks, are not counted.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from costs import QWEN, Cost, World, _Flex, size_of, step_cost, world_of  # noqa: E402
from fit_problem import LAYERS, Size  # noqa: E402

from spec_train.attention import fused  # noqa: E402
from spec_train.attention.flex import BLOCK  # noqa: E402

STEPS, DRAFT_LAYERS, ANCHORS, SLOTS, RANK = 7, 5, 512, 7, 256


@dataclass
class Blocks:
    """How many blocks of keys each block of queries visits, [1, 1, R]; all of them seen in part."""

    kv_num_blocks: Tensor
    full_kv_num_blocks: Tensor

    @classmethod
    def of(cls, counts: Tensor) -> "Blocks":
        return cls(counts[None, None], torch.zeros(1, 1, len(counts), dtype=torch.long))

    @classmethod
    def causal(cls, tokens: int, diagonals: int = 0) -> "Blocks":
        """Return those of a causal mask, and of as many later steps that see their own slot."""
        return cls.of(torch.arange(1, -(-tokens // BLOCK) + 1) + diagonals)

    def longer(self) -> "Blocks":
        return Blocks(self.kv_num_blocks + 1, self.full_kv_num_blocks)

    @classmethod
    def of_anchors(cls, anchors: Tensor, slots: int) -> "Blocks":
        """Return those of blocks of slots that see the tokens before their anchor, and each
        other.
        """
        last = anchors.repeat_interleave(slots)
        last = F.pad(last, (0, -len(last) % BLOCK)).view(-1, BLOCK).amax(1)
        return cls.of((last + BLOCK - 1) // BLOCK + 1)


class _Loss(torch.autograd.Function):
    """A fused loss: reads draft and target logits, [1, N, V] each, and writes one gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, world: World) -> Tensor:
        ctx.world = world
        ctx.save_for_backward(logits, target)
        _count(world, logits, target)
        return world.ghost(*logits.shape[:2], dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        logits, target = ctx.saved_tensors
        made = torch.empty_like(logits)
        _count(ctx.world, logits, target, made)
        return made, None, None


def _count(world: World, *tensors: Tensor) -> None:
    world.cost.kernels["loss"] += 1
    world.cost.bytes["loss"] += sum(map(size_of, tensors))


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _gate(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _run_norm(module: Any, x: Tensor) -> Tensor:
    return fused.run_fused(_norm, x, module.weight, module.variance_epsilon)


def _run_mlp(module: Any, x: Tensor) -> Tensor:
    return module.down_proj(fused.run_fused(_gate, module.gate_proj(x), module.up_proj(x)))


def _chained(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: fused.run_fused(function, *args, *kwargs.values())


@contextmanager
def ghosts_of(
    make: Callable[[], nn.Module], patches: list[tuple[Any, str, Any]], dtype: torch.dtype
) -> Iterator[Any]:
    """Enter a world with a draft of ghosts, and `patches` (owner, name, value) in place; a value
    takes the world.
    """
    with torch.device("meta"):
        draft = make()
    with world_of("cuda") as world, ExitStack() as stack:
        for owner, name, value in patches:
            stack.enter_context(mock.patch.object(owner, name, value(world)))
        for part in draft.modules():
            for key, x in part._parameters.items():
                if x is not None:
                    given = world.ghost(*x.shape, dtype=dtype), x.requires_grad
                    part._parameters[key] = nn.Parameter(*given)
            for key, x in part._buffers.items():
                if x is not None:
                    part._buffers[key] = torch.ones(x.shape, dtype=x.dtype)
        yield draft, world


def attention(world: World) -> Callable[..., Tensor]:
    """Return flex_attention of ghosts."""

    def attend(query: Tensor, key: Tensor, value: Tensor, block_mask: Blocks, **_: Any) -> Tensor:
        return _Flex.apply(query, key, value, block_mask, world)[0]

    return attend


def batch_of(size: Size, world: World) -> dict[str, Tensor]:
    """Return a document as speculators' drafts take it; the last 60 % are supervised."""
    slots = torch.arange(size.tokens)[None]
    dtype, wide = torch.bfloat16, size.hidden * len(LAYERS)
    return {
        "hidden_states": world.ghost(1, size.tokens, wide, dtype=dtype),
        "input_ids": torch.zeros_like(slots),
        "document_ids": torch.zeros_like(slots),
        "loss_mask": slots >= 0.4 * size.tokens,
        "verifier_last_hidden_states": world.ghost(1, size.tokens, size.hidden, dtype=dtype),
    }


def layer_config(kind: type, size: Size, layers: int, attn: str = "simple_flex_attention") -> Any:
    """Return the configuration of a draft's layers, of a class of transformers."""
    return kind(
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_heads,
        head_dim=size.head_dim,
        num_hidden_layers=layers,
        vocab_size=size.vocab,
        attn_implementation=attn,
    )


def backward(world: World, run: Callable[[], Tensor], autocast: bool) -> Cost:
    """Return the cost of a forward, which returns the loss, and its backward."""
    world.cost = Cost(peak=world._held)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        loss = run()
    loss.backward()
    return world.cost


def speculators(name: str, size: Size) -> Cost:
    """Return the cost of a step of speculators' EAGLE-3 or DSpark."""
    from speculators import losses
    from speculators.losses import utils
    from speculators.models import attention as attending
    from speculators.models.dflash import model_definitions as block_layers
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.models.eagle3 import core as unrolled
    from transformers.models.llama import modeling_llama as llama
    from transformers.models.qwen3 import modeling_qwen3 as qwen

    patches: list[tuple[Any, str, Any]] = [
        (attending, "flex_attention", attention),
        (utils, "_fused_kernel", lambda w: lambda _: lambda x, y, **_o: _Loss.apply(x, y, w)),
        (unrolled, "extend_mask_for_draft_tokens", lambda _: Blocks.longer),
    ]
    for module, prefix in ((llama, "Llama"), (qwen, "Qwen3")):
        patches.append((getattr(module, f"{prefix}RMSNorm"), "forward", lambda _: _run_norm))
        patches.append((getattr(module, f"{prefix}MLP"), "forward", lambda _: _run_mlp))
    for module in (llama, qwen, block_layers):
        rotate = _chained(module.apply_rotary_pos_emb)
        patches.append((module, "apply_rotary_pos_emb", lambda _, rotate=rotate: rotate))
    shared = {"draft_vocab_size": size.draft_vocab}
    if name == "eagle3":
        config = Eagle3SpeculatorConfig(
            transformer_layer_config=layer_config(llama.LlamaConfig, size, 1),
            eagle_aux_hidden_state_layer_ids=list(LAYERS),
            **shared,
        )
        causal = Blocks.causal(size.tokens)
        patches.append((Eagle3DraftModel, "_build_attn_mask", lambda _: lambda *_given: causal))
        with ghosts_of(lambda: Eagle3DraftModel(config), patches, torch.float32) as (draft, world):
            batch = batch_of(size, world)
            return backward(world, lambda: draft(**batch, ttt_steps=STEPS)[1], True)
    config = DSparkSpeculatorConfig(
        transformer_layer_config=layer_config(qwen.Qwen3Config, size, DRAFT_LAYERS),
        aux_hidden_state_layer_ids=list(LAYERS),
        block_size=SLOTS,
        mask_token_id=5,
        markov_rank=RANK,
        **shared,
    )

    def mask(_draft: Any, anchor_positions: Tensor, **_: Any) -> Blocks:
        return Blocks.of_anchors(anchor_positions, SLOTS)

    patches.append((DSparkDraftModel, "_create_attention_mask", lambda _: mask))
    with ghosts_of(lambda: DSparkDraftModel(config), patches, torch.float32) as (draft, world):
        batch, terms = batch_of(size, world), losses.resolve_loss_config("kl_div", "fused")
        given = {"max_anchors": ANCHORS, "loss_config": terms}
        return backward(world, lambda: draft(**batch, **given)[1], True)


def specforge_eagle3(size: Size) -> Cost:
    """Return the cost of a step of SpecForge's EAGLE-3, whose teacher is the full logits."""
    from specforge.algorithms.eagle3 import model as training
    from specforge.modeling.draft import llama3_eagle as modeling
    from transformers.models.llama import LlamaConfig

    def blocks(mask_mod: Any, *, Q_LEN: int, KV_LEN: int, **_: Any) -> Blocks:
        return Blocks.causal(Q_LEN, KV_LEN // Q_LEN - 1)

    def loss(world: World) -> Any:
        def apply(logits: Tensor, target: Tensor, _mask: Tensor) -> Tensor:
            return _Loss.apply(logits, target, world).mean()

        return type("LogSoftmaxLoss", (), {"apply": staticmethod(apply)})

    plain: Any = training._compute_target_p
    rotate: Any = modeling.apply_rotary_pos_emb
    teach, rotate = (_chained(f._torchdynamo_orig_callable) for f in (plain, rotate))
    sines: Any = modeling.LlamaRotaryEmbedding.forward
    patches: list[tuple[Any, str, Any]] = [
        (modeling, "compile_friendly_flex_attention", attention),
        (modeling, "compile_friendly_create_block_mask", lambda _: blocks),
        (modeling, "apply_rotary_pos_emb", lambda _: rotate),
        (modeling.LlamaRotaryEmbedding, "forward", lambda _: sines._torchdynamo_orig_callable),
        (modeling.LlamaRMSNorm, "forward", lambda _: _run_norm),
        (training, "_compute_target_p", lambda _: teach),
        (training, "LogSoftmaxLoss", loss),
        (torch.cuda, "empty_cache", lambda _: lambda: None),
    ]
    config = layer_config(LlamaConfig, size, 1, attn="eager")
    config.draft_vocab_size, config.pretraining_tp = size.draft_vocab, 1
    config.max_position_embeddings = size.tokens

    def make() -> nn.Module:
        return modeling.LlamaForCausalLMEagle3(config, attention_backend="flex_attention")

    with ghosts_of(make, patches, torch.bfloat16) as (draft, world):
        draft.embed_tokens.weight.requires_grad_(False)
        draft.t2d = torch.arange(size.vocab) < size.draft_vocab
        draft.d2t = torch.zeros(size.draft_vocab, dtype=torch.long)
        batch = batch_of(size, world)
        model = training.OnlineEagle3Model(draft, STEPS, "flex_attention")
        head = world.ghost(size.vocab, size.hidden, dtype=torch.bfloat16)

        def run() -> Tensor:
            with torch.no_grad():
                logits = F.linear(batch.pop("verifier_last_hidden_states"), head)
            given = batch["input_ids"], torch.ones_like(batch["input_ids"]), logits
            losses = model(*given, batch["loss_mask"][..., None], batch["hidden_states"])[0]
            return torch.stack([0.8**i * x for i, x in enumerate(losses)]).sum()

        return backward(world, run, False)


def specforge_dspark(size: Size) -> Cost:
    """Return the cost of a step of SpecForge's DSpark, over the full vocabulary."""
    from specforge.algorithms.common import dflash_family_model as training
    from specforge.modeling.draft import dflash as modeling
    from specforge.modeling.draft.dspark import DSparkDraftModel
    from transformers.models.qwen3 import modeling_qwen3 as qwen

    def blocks(anchor_positions: Tensor, **_: Any) -> Blocks:
        return Blocks.of_anchors(anchor_positions[0], SLOTS)

    def attend(world: World) -> Any:
        def function(_module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Blocks, **_: Any) -> Any:
            return attention(world)(q, k, v, mask).transpose(1, 2), None

        return {"flex_attention": function}

    config = layer_config(qwen.Qwen3Config, size, DRAFT_LAYERS, attn="eager")
    config.block_size, config.num_target_layers = SLOTS, 36
    config.dflash_config = {
        "target_layer_ids": list(LAYERS),
        "markov_rank": RANK,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    patches: list[tuple[Any, str, Any]] = [
        (training, "create_dflash_block_mask", lambda _: blocks),
        (modeling, "ALL_ATTENTION_FUNCTIONS", attend),
    ]
    with ghosts_of(lambda: DSparkDraftModel(config), patches, torch.bfloat16) as (draft, world):
        draft.config._attn_implementation = "flex_attention"
        batch, tables = batch_of(size, world), []
        for kind in (nn.Linear(1, 1, bias=False), nn.Embedding(1, 1)):
            weight = world.ghost(size.vocab, size.hidden, dtype=torch.bfloat16)
            kind.weight = nn.Parameter(weight, requires_grad=False)
            tables.append(kind)
        model = training.OnlineDSparkModel(draft, *tables, 5, block_size=SLOTS, num_anchors=ANCHORS)
        states = batch["hidden_states"], batch["loss_mask"].float()
        given = batch["input_ids"], *states, batch["verifier_last_hidden_states"]
        return backward(world, lambda: model(*given)[0], False)


MOVING = {"add", "add_", "cat", "clone", "copy_", "mul", "slice_backward", "_to_copy"}
"""Operations of aten that a compiler makes part of the kernels before or after them."""
TRAINERS: dict[str, dict[str, Callable[[Size], Cost]]] = {
    "eagle3": {
        "ours": lambda size: step_cost("eagle3", size, "flex"),
        "speculators": lambda size: speculators("eagle3", size),
        "SpecForge": specforge_eagle3,
    },
    "dspark": {
        "ours": lambda size: step_cost("dspark", size, "flex"),
        "speculators": lambda size: speculators("dspark", size),
        "SpecForge": specforge_dspark,
    },
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drafts", nargs="+", default=list(TRAINERS), choices=list(TRAINERS))
    parser.add_argument("--operations", type=int, default=0, help="of most bytes, to be printed")
    args = parser.parse_args()
    print("| draft, trainer | TFLOP | GB of elementwise passes | kernels | peak GiB |")
    print("| --- | --: | --: | --: | --: |")
    for name in args.drafts:
        for trainer, count in TRAINERS[name].items():
            cost = count(QWEN)
            gb, kernels = f"{sum(cost.bytes.values()) / 1e9:.0f}", sum(cost.kernels.values())
            if trainer == "speculators":
                moving = sum(n for k, n in cost.bytes.items() if k.removeprefix("aten.") in MOVING)
                gb = f"{(sum(cost.bytes.values()) - moving) / 1e9:.0f} to {gb}"
            figures = f"{cost.flops / 1e12:.0f} | {gb} | {kernels} | {cost.peak / 2**30:.1f}"
            print(f"| {name}, {trainer} | {figures} |", flush=True)
            for operation, count_ in cost.bytes.most_common(args.operations):
                print(f"    {count_ / 1e9:8.1f} GB  {cost.kernels[operation]:5}  {operation}")


if __name__ == "__main__":
    main()
