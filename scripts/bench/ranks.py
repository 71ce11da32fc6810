"""Do short runs rank drafts as long ones do? Rank correlations of held-out lengths.

    python scripts/bench/ranks.py --data quickstart/dataset --steps 50 100 200 800 \\
        --space draft=eagle3,peagle,dspark,dflash,num_layers=1,2

Every draft of the space trains by `fit`, anew for each number of steps, as the arms of a `search`
with these --steps. The last number of steps is the run that counts. "rank" is Spearman's
correlation with it; "loses" is what the draft that the short runs put first lacks there of the
best one's length. With --results a run that stands in that file is not run again.
"""

import argparse

import torch
from rates import known_length

from spec_train.training.search import arms_of
from spec_train.training.search_space import SearchTraining, read_space


def main() -> None:
    """Print the length of each draft after each number of steps, then the correlations."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--space", default="draft=eagle3,peagle,dspark,dflash,num_layers=1,2")
    parser.add_argument("--steps", type=int, nargs="+", default=[50, 100, 200, 800])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--validation", type=float, default=0.05)
    parser.add_argument("--results", help="file of finished runs, a JSON object per line")
    args = parser.parse_args()
    torch.set_num_threads(1)
    shared = SearchTraining(
        data=args.data,
        seed=args.seed,
        seq_len=args.seq_len,
        batch_size=1,
        validation=args.validation,
    )
    arms = arms_of(shared, read_space(args.space))
    print(f"{'draft':<36}{''.join(f'{steps:>9}' for steps in args.steps)}")
    rows = []
    for arm in arms:
        row = []
        for steps in args.steps:
            plan = shared.of_arm(**arm.changes, steps=steps)
            row.append(known_length(args.results, plan, arm.options))
        rows.append(row)
        print(f"{arm.name:<36}{''.join(f'{length:>9.3f}' for length in row)}", flush=True)
    lengths = torch.tensor(rows, dtype=torch.float64)
    long = lengths[:, -1]
    for column, steps in enumerate(args.steps[:-1]):
        short = lengths[:, column]
        lost = 1 - long[short.argmax()] / long.max()
        print(f"{steps} steps: rank {spearman(short, long):.2f}, loses {lost:.1%}")


def spearman(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the correlation of the ranks of two vectors [n] without equal values."""
    ranks = torch.stack([x.argsort().argsort().double() for x in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])


if __name__ == "__main__":
    main()
