"""How fast drafts train and how much memory a step takes, against straightforward formulations.

    python scripts/bench/fit.py                      every draft, T = 512 ... 4096, two vocabularies
    python scripts/bench/fit.py --drafts eagle3 --lengths 1024 2048 --vocabs 4096

One row of T tokens is one document, its last 60 % supervised; forward, loss and backward of one
micro-batch in float32. "eager": the same loss with T x T scores and all logits (`fit_eager.py`).
"recomputed": ours with --gradient-checkpointing, as a share of ours. The first line is the plain
loops of the tests in float64 on the CPU (`fit_reference.py`). Losses must agree within 1e-5. Each
measurement runs in a process of its own, because a peak of memory is per process. tokens/s are per
CPU-second, the best of three. Peak is resident memory above weights and batch. A dash means that
memory did not suffice.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from fit_eager import EAGER  # noqa: E402
from fit_reference import reference_loss  # noqa: E402

from spec_data.shards.head_spec import HeadSpec  # noqa: E402
from spec_data.shards.schema import FINAL, layer_column  # noqa: E402
from spec_train.data.batch import DraftBatch  # noqa: E402
from spec_train.drafts import DRAFTS  # noqa: E402
from spec_train.head import TargetHead  # noqa: E402

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 256, 8, 4, 32, 32768
LAYERS = (1, 4, 6)
SUPERVISED = 0.6
FREQUENT = 4096
ROUNDS, ENOUGH = 3, 20  # repetitions, and the seconds after which no further one starts
PLAIN, WARM = 32, 16  # most tokens for the plain loops, and tokens of the unmeasured first step


def main() -> None:
    """Print the table, or measure one cell of it (--cell)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drafts", nargs="+", default=sorted(DRAFTS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048, 4096])
    parser.add_argument("--vocabs", nargs="+", type=int, default=[4096, VOCAB])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory-limit", type=float, default=16, help="GiB of a measurement")
    parser.add_argument("--cell", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.cell:
        draft, way, length, vocab = args.cell
        print(json.dumps(cell(draft, way, int(length), int(vocab), args.device)))
        return
    print(f"hidden {HIDDEN}, vocabulary {VOCAB}, torch {torch.__version__}, {args.device}\n")
    for name in args.drafts:
        for vocab in args.vocabs:
            rows(name, vocab, args)
            print()


def rows(name: str, vocab: int, args: argparse.Namespace) -> None:
    """The lines of one draft and draft vocabulary."""
    print(f"{name}, draft vocabulary {vocab}")
    compare(name, "reference", PLAIN, vocab, args)
    print("     T  tok/cpu-s  peak MB    of eager's      recomputed")
    print("                            speed  memory   speed  memory")
    peaks: dict[int, float] = {}
    for length in args.lengths:
        ours = compare(name, "ours", length, vocab, args)
        if ours is not None:
            peaks[length] = ours["peak"]
    for short in peaks:
        if 4 * short in peaks:
            print(f"memory from T = {short} to {4 * short}: {peaks[4 * short] / peaks[short]:.2f}x")


def compare(
    name: str, way: str, length: int, vocab: int, args: argparse.Namespace
) -> dict[str, float] | None:
    """Print a line that compares our step with others of the same loss; return ours."""
    ours = measured(name, "ours", length, vocab, args)
    if ours is None:
        print(f"{length:>6} did not finish")
        return None
    if way == "reference":
        plain = measured(name, way, length, vocab, args)
        check(name, length, ours, plain)
        if plain is not None:
            print(f"{ours['speed'] / plain['speed']:,.0f} times the plain loops at T = {length}")
        return ours
    line = f"{length:>6} {ours['speed']:>10,.0f} {ours['peak']:>8,.0f}"
    eager = measured(name, "eager", length, vocab, args)
    line += " " + shares(ours, eager)
    check(name, length, ours, eager)
    if recomputes(name):
        recomputed = measured(name, "recomputed", length, vocab, args)
        check(name, length, ours, recomputed)
        line += " " + shares(recomputed, ours)
    print(line, flush=True)
    return ours


def shares(one: dict[str, float] | None, other: dict[str, float] | None) -> str:
    """Return speed and memory of one as multiples of the other's."""
    if one is None or other is None:
        return f"{'-':>7} {'-':>7}"
    return f"{one['speed'] / other['speed']:>6.2f}x {one['peak'] / other['peak']:>6.2f}x"


def check(name: str, length: int, ours: dict[str, float], other: dict[str, float] | None) -> None:
    """Refuse a comparison of unequal losses."""
    if other is not None and abs(other["loss"] - ours["loss"]) > 1e-5 * abs(ours["loss"]):
        raise SystemExit(f"{name} at T = {length}: {other['loss']}, but ours is {ours['loss']}")


def recomputes(name: str) -> bool:
    """Whether the draft offers --gradient-checkpointing."""
    return "gradient_checkpointing" in DRAFTS[name].options_class.__dataclass_fields__


def measured(
    name: str, way: str, length: int, vocab: int, args: argparse.Namespace
) -> dict[str, float] | None:
    """Measure one cell in a process of its own; return None when memory did not suffice."""
    command = [sys.executable, __file__, "--device", args.device, "--threads", str(args.threads)]
    command += ["--cell", name, way, str(length), str(vocab)]
    # freed large tensors return to the system, so that the peak counts live ones only
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": str(args.threads)}
    limit = int(args.memory_limit * 2**30)
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=env,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
        if done.returncode > 0 and "memory" not in reason:
            raise SystemExit(f"{name} {way}, T = {length}:\n{done.stderr}")
        print(f"{way}, T = {length}: {reason}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def cell(name: str, way: str, length: int, vocab: int, device: str) -> dict[str, float]:
    """Return speed and peak of `ROUNDS` steps, after an unmeasured one for torch's lazy loading."""
    device = "cpu" if way == "reference" else device
    if way != "reference":
        steps(way, name, [x.to(device) for x in problem(name, WARM, vocab)], device, 1)
    inputs = [x.to(device) for x in problem(name, length, vocab)]
    before = memory(device, reset=True)
    seconds, loss = steps(way, name, inputs, device, 1 if way == "reference" else ROUNDS)
    return {"speed": length / min(seconds), "peak": memory(device) - before, "loss": loss}


def steps(
    way: str, name: str, inputs: list[Any], device: str, rounds: int
) -> tuple[list[float], float]:
    """Seconds of forward and backward passes, and their loss."""
    draft, head, batch = inputs
    if way == "recomputed":
        draft.use_options(replace(draft.options, gradient_checkpointing=True))
    loss_of: Callable[[], Tensor]
    if way == "eager":
        loss_of = lambda: EAGER[name](draft, batch, head)  # noqa: E731
    elif way == "reference":
        loss_of = lambda: reference_loss(name, draft, batch, head)  # noqa: E731
    else:
        loss_of = lambda: draft.loss(batch, head, draft.slot_counts(batch)).loss  # noqa: E731
    seconds = []
    for _ in range(rounds):
        torch.manual_seed(0)  # drafts that sample draw the same numbers
        start = clock(device)
        loss = loss_of()
        loss.backward()
        seconds.append(clock(device) - start)
        value = float(loss.detach())
        del loss
        draft.zero_grad()
        if sum(seconds) > ENOUGH:
            break
    return seconds, value


def clock(device: str) -> float:
    """Processor seconds of this process, or synchronised wall seconds on a GPU."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def memory(device: str, reset: bool = False) -> float:
    """MB: now, after a reset of the peak; else the peak since then."""
    if device != "cpu":
        if reset:
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated() / 2**20
        return torch.cuda.max_memory_allocated() / 2**20
    if reset and Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    key = "VmRSS" if reset else "VmHWM"
    return int(status.read_text().split(key + ":")[1].split()[0]) / 1024


def problem(name: str, length: int, vocab: int) -> tuple[Any, TargetHead, DraftBatch]:
    """A random draft, the head of a random target, and one row of random states."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator) * scale

    spec = HeadSpec(vocab_size=VOCAB, hidden_size=HIDDEN, tied=False)
    rows = draw(VOCAB, HIDDEN, scale=0.1)
    rows[FREQUENT:] *= 0.5  # targets choose frequent tokens, which draft vocabularies contain
    head = TargetHead(spec, draw(VOCAB, HIDDEN, scale=0.02), rows)
    final = draw(1, length, HIDDEN)
    figures = [(z.argmax(-1), z.logsumexp(-1)) for z in map(head.logits, final.split(256, 1))]
    choice, sums = (torch.cat(part, 1) for part in zip(*figures, strict=True))
    slots = torch.arange(length)[None]
    batch = DraftBatch(
        input_ids=torch.randint(VOCAB, (1, length), generator=generator),
        loss_mask=slots >= (1 - SUPERVISED) * length,
        position_ids=slots,
        document_ids=torch.zeros_like(slots),
        hidden={layer_column(k): draw(1, length, HIDDEN) for k in LAYERS} | {FINAL: final},
        target_argmax=choice,
        target_logsumexp=sums,
        rows=[[0]],
    )
    torch.manual_seed(0)
    return build(name, head, vocab), head, batch


def build(name: str, head: TargetHead, vocab: int) -> Any:
    """A fresh draft of the kind `name` for the random target."""
    kind = DRAFTS[name]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": 3 * HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 8,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 8192,
        "rope_theta": 1e4,
        "dtype": "float32",
    }
    manifest = SimpleNamespace(
        layers=LAYERS,
        supervision="final-hidden",
        final="all",
        columns=[SimpleNamespace(name=FINAL)],
        where="random",
        target={"dtype": "float32"},
        raw={"tokenizer": {}},
        head=head.spec,
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
    )
    fields = kind.options_class.__dataclass_fields__
    options = kind.options_class(
        **({"draft_vocab_size": vocab} if "draft_vocab_size" in fields else {})
    )
    counts = torch.arange(VOCAB, 0, -1)
    return kind.build(
        options, target_config=config, manifest=manifest, head=head, token_counts=counts
    )


if __name__ == "__main__":
    main()
