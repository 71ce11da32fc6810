"""How few bits could hidden states take at the error of a codec: bounds, and what each would cost.

    python scripts/bench/rate_distortion.py --data DATASET [--codec lm4c] [--tokens 40000]

DATASET holds exact states (`spec-data generate --codec bf16`). The error of the codec, in units of
the channels' variances, is measured on its states. The table then has the bits per value that a
Gaussian source with the same covariance needs for that mean error (reverse water-filling; Cover and
Thomas, Elements of Information Theory, section 10.3.3), if the coder may

  channel       give each channel its own bits
  blocks of 64  rotate 64 correlated channels at a time
  rotation      rotate all channels (H x H products to decode)

and if it stores either the states, or what a prediction from the next lower captured layer leaves:
`delta` predicts each channel from the same channel, `matrix` from all (H x H). The predictor sees
the lower layer with the codec's error, as a decoder would. Predictors and rotations are fitted on
one half of the documents; all figures are of the other half. Scalar quantizers need more than the
bound: 0.25 bits per value with an entropy code, about 0.6 at four bits without one. The first
token of a document is left out: its state is often a hundred times as large, and codecs store it
exactly.
"""

import argparse

import numpy as np
import torch
from torch import Tensor

from spec_data.shards.codec_tables import make_tables
from spec_data.shards.codecs import LOSSY
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.terminal.text_table import text_table

BLOCK = 64  # channels that a cheap rotation mixes


def main() -> None:
    """Print one row per column and way of storing it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, help="a dataset with exact states")
    parser.add_argument("--codec", default="lm4c", choices=sorted(LOSSY))
    parser.add_argument("--tokens", type=int, default=40_000, help="about how many are read")
    args = parser.parse_args()
    torch.set_num_threads(1)
    columns = [
        name for name in HiddenStatesDataset(args.data).columns if name.startswith("hidden.")
    ]
    head = ("column", "stored", "error", f"{args.codec} bits")
    rows: list[tuple] = [(*head, "channel", f"blocks of {BLOCK}", "rotation")]
    below: tuple[str, Halves] | None = None
    generator = torch.Generator().manual_seed(0)
    for name in columns:
        states = read(args.data, name, args.tokens)
        error, bits = measured(args.codec, states)
        halves = standardised(states)
        rows.append((name, "states", *figures(halves, error, bits)))
        if below is not None:
            lower, seen = below
            for kind, left in predicted(seen, halves):
                rows.append((name, f"{kind} to {lower}", *figures(left, error, bits)))
        noise = [torch.randn(half.shape, generator=generator) * error**0.5 for half in halves]
        below = name, (halves[0] + noise[0], halves[1] + noise[1])
    print(f"{args.data}: about {args.tokens:,} tokens\n\n{text_table(rows)}")


Halves = tuple[Tensor, Tensor]  # float32 [N, H] each: to fit on, to measure on


def read(data: str, column: str, tokens: int) -> Halves:
    """Return the states of even and of odd documents, without first tokens."""
    dataset = HiddenStatesDataset(data, [column])
    halves: tuple[list[Tensor], list[Tensor]] = ([], [])
    total = 0
    for index in range(len(dataset)):
        states = dataset[index][column][1:].float()
        halves[index % 2].append(states)
        total += len(states)
        if total >= tokens:
            break
    return torch.cat(halves[0]), torch.cat(halves[1])


def measured(codec: str, states: Halves) -> tuple[float, float]:
    """Return a codec's mean error per channel variance, and its bits per value with scales."""
    lossy, given = LOSSY[codec], states[1].bfloat16()
    tables = make_tables(states[0].bfloat16(), codec)
    encoded, out = lossy.encode(given, tables), torch.empty_like(given)
    lossy.decode_into(encoded.codes, encoded.scale, tables, out)
    error = (out.float() - states[1]).square().mean(0) / states[1].var(0)
    nbytes = encoded.codes.nbytes + encoded.scale.nbytes
    return float(error.mean()), nbytes * 8 / given.numel()


def standardised(states: Halves) -> Halves:
    """Return both halves with the mean 0 and the variance 1 of the first one, per channel."""
    mean, deviation = states[0].mean(0), states[0].std(0)
    return (states[0] - mean) / deviation, (states[1] - mean) / deviation


def predicted(below: Halves, halves: Halves) -> list[tuple[str, Halves]]:
    """Return what is left of `halves` after two predictions from the layer below."""
    factor = (below[0] * halves[0]).mean(0) / below[0].square().mean(0)
    weight = torch.linalg.lstsq(below[0], halves[0]).solution
    return [
        ("delta", (halves[0] - below[0] * factor, halves[1] - below[1] * factor)),
        ("matrix", (halves[0] - below[0] @ weight, halves[1] - below[1] @ weight)),
    ]


def figures(halves: Halves, error: float, bits: float) -> tuple[str, ...]:
    """Return the cells of a row: the codec's error and bits, and the three bounds."""
    width = halves[0].shape[1]
    bounds = [
        water_filled(variances(halves, size), error) for size in (1, min(BLOCK, width), width)
    ]
    return f"{error:.2e}", f"{bits:.2f}", *(f"{bound:.2f}" for bound in bounds)


def variances(halves: Halves, size: int) -> np.ndarray:
    """Return the variances, [H], of the second half along the first one's axes.

    `size` channels that are correlated in the first half are rotated together.
    """
    if size == 1:
        return halves[1].square().mean(0).double().numpy()
    found = []
    covariance = halves[0].T @ halves[0] / len(halves[0])
    for channels in groups(covariance.abs(), size):
        _, axes = torch.linalg.eigh(covariance[channels][:, channels])
        found.append((halves[1][:, channels] @ axes).square().mean(0))
    return torch.cat(found).double().numpy()


def groups(likeness: Tensor, size: int) -> list[Tensor]:
    """Split channels into groups of `size`: each takes the one left over and those most like it."""
    free, found = torch.ones(len(likeness), dtype=torch.bool), []
    while free.any():
        first = int(free.nonzero()[0])
        near = torch.where(free, likeness[first], -1.0)
        near[first] = torch.inf
        chosen = near.topk(min(size, int(free.sum()))).indices
        free[chosen] = False
        found.append(chosen)
    return found


def water_filled(spectrum: np.ndarray, error: float) -> float:
    """Return the bits per value of independent Gaussians [H] at a mean squared error.

    Components below the water level get no bits; all others get the level as their error.
    """
    if error >= spectrum.mean():
        return 0.0
    low, high = 0.0, float(spectrum.max())
    for _ in range(100):
        level = (low + high) / 2
        low, high = (low, level) if np.minimum(spectrum, level).mean() > error else (level, high)
    return float(0.5 * np.log2(np.maximum(spectrum, level) / level).mean())


if __name__ == "__main__":
    main()
