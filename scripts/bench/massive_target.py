"""Make a target with massive activations from a small trained one, and documents of many lengths.

Large targets have massive activations: at the first token and at delimiters, a few channels of the
residual stream are hundreds of times larger than all others, from an early block to the last one
(Sun et al., 2402.17762). Small targets do not have them. This script adds them to a Llama-like one:

1. The residual stream gets four more channels. Norm weights are folded into the layers that follow,
   so the function stays the same under a rotation of the channels; a rotation mixes the new
   channels with old ones, so that the massive channels have ordinary values at other tokens.
2. The embedding of the delimiters gets a large value along one direction. One neuron of the last
   block's MLP removes it again.
3. The norms now make everything else small at these tokens, so some steps of training follow.

    python scripts/bench/massive_target.py --target DIR --corpus gsm8k.jsonl --out DIR

--out gets the target in `target/` and in `corpus.jsonl` chats of about 20 to 2,000 tokens.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

EXTRA = 4  # new channels of the residual stream
DELIMITERS = ("<|im_start|>", ".", "\n", "Ċ")
_CALCULATION = re.compile(r"<<([^=<>]+)=([^<>]+)>>")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, help="a small target of the Llama or Qwen3 kind")
    parser.add_argument("--corpus", required=True, help="JSONL chats")
    parser.add_argument("--out", required=True)
    parser.add_argument("--factor", type=float, default=300, help="of the RMS of other tokens")
    parser.add_argument("--steps", type=int, default=150, help="training after the change")
    parser.add_argument("--documents", type=int, default=2000)
    return parser.parse_args()


def rotation(hidden: int) -> Tensor:
    """Return an orthogonal float64 [H + 4, H + 4] that mixes new channels with old ones."""
    q = torch.eye(hidden + EXTRA, dtype=torch.float64)
    for k in range(EXTRA):
        for partner, angle in ((7 + 11 * k, 0.9), (hidden // 2 + 5 * k, -0.6)):
            g = torch.eye(hidden + EXTRA, dtype=torch.float64)
            cos, sin = torch.cos(torch.tensor(angle)), torch.sin(torch.tensor(angle))
            i, j = hidden + k, partner
            g[i, i], g[j, j], g[i, j], g[j, i] = cos, cos, -sin, sin
            q = g @ q
    return q


def widen(old: Any, factor: float, delimiters: list[int]) -> Any:
    """Return a model with massive activations at the token ids `delimiters`."""
    config = type(old.config).from_dict(old.config.to_dict())
    hidden, inner = config.hidden_size, config.intermediate_size
    config.head_dim = old.config.head_dim
    config.hidden_size, config.intermediate_size = hidden + EXTRA, inner + EXTRA
    config.tie_word_embeddings = False
    new = AutoModelForCausalLM.from_config(config).double()
    q = rotation(hidden)
    old = old.double()
    shrink = (hidden / (hidden + EXTRA)) ** 0.5  # the norm divides by the RMS over more channels

    def reads(weight: Tensor, norm: Tensor) -> Tensor:
        """Weight [out, H] behind a norm, for the new stream: [out, H + 4]."""
        padded = torch.nn.functional.pad(weight * norm * shrink, (0, EXTRA))
        return padded @ q.T

    def writes(weight: Tensor) -> Tensor:
        """Weight [H, in] that adds to the stream, for the new stream: [H + 4, in]."""
        return q @ torch.nn.functional.pad(weight, (0, 0, 0, EXTRA))

    state = {}
    source = old.state_dict()
    for name, value in source.items():
        layer, _, rest = name.rpartition("self_attn.") if "self_attn" in name else ("", "", name)
        if rest in ("q_proj.weight", "k_proj.weight", "v_proj.weight"):
            state[name] = reads(value, source[f"{layer}input_layernorm.weight"])
        elif rest == "o_proj.weight":
            state[name] = writes(value)
        elif name.endswith(("gate_proj.weight", "up_proj.weight")):
            norm = source[f"{name.split('mlp.')[0]}post_attention_layernorm.weight"]
            state[name] = torch.nn.functional.pad(reads(value, norm), (0, 0, 0, EXTRA))
        elif name.endswith("down_proj.weight"):
            state[name] = torch.nn.functional.pad(writes(value), (0, EXTRA))
        elif name.endswith("layernorm.weight") or name == "model.norm.weight":
            state[name] = torch.ones(hidden + EXTRA, dtype=torch.float64)
        elif name == "model.embed_tokens.weight":
            state[name] = torch.nn.functional.pad(value, (0, EXTRA)) @ q.T
        elif name == "lm_head.weight":
            state[name] = reads(value, source["model.norm.weight"])
        else:
            state[name] = value
    direction = q[:, hidden]
    size = factor * middle_rms(old)
    state["model.embed_tokens.weight"][delimiters] += size * direction
    last = f"model.layers.{config.num_hidden_layers - 1}.mlp"
    # y = x / RMS is about sqrt(H + 4) along the direction, and silu(y) * y about H + 4
    state[f"{last}.gate_proj.weight"][inner] = direction
    state[f"{last}.up_proj.weight"][inner] = direction
    state[f"{last}.down_proj.weight"][:, inner] = -direction * size / (hidden + EXTRA)
    new.load_state_dict(state)
    return new.float()


@torch.no_grad()
def middle_rms(model: Any) -> float:
    """Return the RMS of the residual stream in the middle of the model, over random tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (4, 64), generator=generator)
    states = model(input_ids=ids, output_hidden_states=True).hidden_states
    return float(states[len(states) // 2].square().mean().sqrt())


def chats(corpus: str, count: int) -> list[dict[str, Any]]:
    """Return chats of about 20, 200 and up to 2,000 tokens: half, a quarter and a quarter."""
    rows = [json.loads(line)["messages"] for line in Path(corpus).read_text().splitlines()]
    found: list[dict[str, Any]] = []
    for number in range(count):
        row = rows[number % len(rows)]
        if number % 4 < 2:
            sums = _CALCULATION.findall(row[1]["content"]) or [("1+1", "2")]
            question, answer = sums[number % len(sums)]
            messages = [
                {"role": "user", "content": f"{question}?"},
                {"role": "assistant", "content": answer},
            ]
        else:
            turns = 1 if number % 4 == 2 else 2 + number // 4 % 8
            messages = [m for k in range(turns) for m in rows[(number + 997 * k) % len(rows)]]
        found.append({"messages": messages})
    return found


def train(model: Any, documents: list[Tensor], steps: int) -> tuple[float, float]:
    """Train on next tokens, 8 documents a step; return the mean loss of first and last steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-4 * min(1, (step + 1) / 20) * (1 - step / steps)
        part = [d[:512] for d in documents[8 * step % len(documents) :][:8]]
        ids = torch.nn.utils.rnn.pad_sequence(part, batch_first=True)
        real = torch.nn.utils.rnn.pad_sequence([torch.ones_like(d) for d in part], batch_first=True)
        labels = ids.masked_fill(real == 0, -100)
        loss = model(input_ids=ids, attention_mask=real, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses[:5]) / 5, sum(losses[-10:]) / 10


def main() -> None:
    """Make target and corpus, and print what the states look like."""
    args = arguments()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    vocabulary = tokenizer.get_vocab()
    delimiters = sorted(vocabulary[d] for d in DELIMITERS if d in vocabulary)
    old = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    rows = chats(args.corpus, args.documents)
    (out / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    documents = [
        torch.tensor(tokenizer.apply_chat_template(row["messages"], return_dict=True)["input_ids"])
        for row in rows
    ]
    torch.manual_seed(0)
    model = widen(old, args.factor, delimiters)
    before, after = train(model.train(), documents, args.steps)
    model = model.eval().to(torch.bfloat16)
    model.save_pretrained(out / "target")
    tokenizer.save_pretrained(out / "target")
    lengths = sorted(len(d) for d in documents)
    print(f"documents: {len(lengths):,} of {lengths[0]} to {lengths[-1]} tokens")
    print(f"training: loss {before:.2f} -> {after:.2f} nats in {args.steps} steps")
    with torch.no_grad():
        ids = torch.cat(documents[:40])[None, :1500]
        states = model(input_ids=ids, output_hidden_states=True).hidden_states
    massive = torch.isin(ids[0], torch.tensor(delimiters))
    print(f"massive tokens: {float(massive.float().mean()):.1%} of the first {ids.shape[1]:,}")
    for k, state in enumerate(states):
        value = state[0].float().abs()
        print(
            f"hidden_states[{k}]: largest {float(value[massive].max()):,.0f} at massive tokens, "
            f"{float(value[~massive].max()):,.1f} at others, median {float(value.median()):.2f}"
        )


if __name__ == "__main__":
    main()
