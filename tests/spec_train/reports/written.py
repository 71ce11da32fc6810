"""Runs and evaluations as files with figures drawn at random, for the tests of pages."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from spec_data.shards.resumable import write_record
from spec_train.simulation.breakdown import mode_json
from spec_train.simulation.ranges import range_json

DEPTHS = 3
ATTACK = "</script><img src=x onerror=alert(1)><!--\u2028"


def metrics_lines(seed: int, steps: int = 40) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl as `fit` writes them: training every 2 steps, validation every 10."""
    random = np.random.default_rng(seed)
    lines: list[dict[str, Any]] = []
    for step in range(0, steps + 1, 2):
        rates = random.random(DEPTHS)
        own = {
            "tokens": 1000 * step,
            "loss": float(random.random() + 1),
            "acceptance_length": 1 + float(np.cumprod(rates).sum()),
            "product_limit_length": 1 + float(random.random()),
            "chains": 9.0,
            **{f"accept_rate/{d + 1}": float(rate) for d, rate in enumerate(rates)},
        }
        if step:
            speed = {"lr": float(random.random()), "grad_norm": float(random.random())}
            speed |= {"tokens_per_second": float(1000 * random.random()), "data_wait": 0.25}
            lines.append({"step": step, "split": "train", **own, **speed})
        if step % 10 == 0:
            held = {"step": step, "split": "validation", **own, "loss": own["loss"] + 1}
            held["serving_like_length"] = 1 + float(random.random())
            held["serving_like_interval"] = [1.25, 1.75]
            held |= {"every_slot_length": own["product_limit_length"], "serving_like_rounds": 300}
            lines.append(held)
    return lines


def write_run(place: Path, seed: int = 0, **options: Any) -> list[dict[str, Any]]:
    """Write a run directory with `options` in fit.json; return its lines of metrics."""
    place.mkdir(parents=True)
    lines = metrics_lines(seed)
    (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (place / "fit.json").write_text(json.dumps({"data": "data", "lr": 0.1, "clip": 0.5} | options))
    run = {"identity": {"draft": "eagle3"}, "total_steps": 40}
    write_record(place / "run.json", run)
    return lines


def sample(name: str, text: bool = False) -> dict[str, Any]:
    """A sampled response with a round of every kind; `text`: of a document."""
    rounds = [
        {"drafted": [11, 12, 13, 16], "accepted": 2, "emitted": [11, 12, 14], "choice": 14},
        {"drafted": [15, 16], "accepted": 2, "emitted": [15, 16, 17], "choice": 17},
        {"drafted": [18], "accepted": 0, "emitted": [19], "choice": 19},
    ]
    if text:
        rounds += [
            {"drafted": [20, 21], "accepted": 1, "emitted": [22], "choice": None},
            {"drafted": [23], "accepted": 0, "emitted": [24], "choice": 25},
        ]
    parts: list[dict[str, Any]] = [
        {"kind": "context", "tokens": [1, 2, 3], "left_out": 5},
        {"kind": "first", "tokens": [10]},
        *({"kind": "round", **own} for own in rounds),
    ]
    return {"name": name, "source": "corpus.jsonl", "parts": parts}


def texts(text: str = "") -> dict[str, str]:
    """The texts of the tokens of `sample`: "t11 " and so on; token 12 ends a line."""
    found = {str(i): f"t{i} " for i in (*range(1, 4), *range(10, 26))} | {"12": "\n"}
    return found | {"2": text or "t2 "}


def ranges(*lengths: float | None) -> list[dict[str, Any]]:
    """Ranges of positions or contexts that begin at 16, with these lengths."""
    return [
        range_json(n, 10 * n, length, None if length is None else (length - 0.5, length + 0.5))
        for n, length in enumerate(lengths, 1)
    ]


def data_figures(seed: int = 0, text: str = "", sources: int = 3) -> dict[str, Any]:
    """The part "data" of a file of --json."""
    random = np.random.default_rng(seed)
    rates = random.random(DEPTHS).tolist()
    walk = {"acceptance_length": 1.5, "accept_rate": rates, "rounds": 90, "censored": 0.1}
    by_source = [
        {
            "source": f"source {i} {text}",
            **{"documents": i + 1, "supervised_tokens": 100 * i, "on_policy": 0.5, "rounds": 30},
            **{"acceptance_length": 1 + float(random.random()), "accept_rate": rates},
        }
        for i in range(sources)
    ]
    return {
        **{"path": f"data {text}", "split": "validation", "mask": "assistant", "documents": 12},
        **{"supervised_tokens": 600, "on_policy": 0.75, "missing_mass": None},
        **{"teacher_forced": None, "simulated": walk},
        "by_source": by_source,
        **{"by_position": ranges(1.75, 1.25, None), "by_context": ranges(1.5)},
        "by_mode": [
            mode_json("without thinking", 40, 2.5, None),
            mode_json("with thinking", 30, 1.5, (1.25, 1.75)),
        ],
        "samples": [sample(f"document {i} {text}", text=True) for i in range(3)],
        "texts": texts(text),
    }


def real_figures(text: str = "") -> dict[str, Any]:
    """The figures of real decoding in a file of --json."""
    return {
        **{"draft": "run/best", "warnings": [f"a warning {text}"], "target": f"target {text}"},
        **{"acceptance_length": 2.5, "interval": [2.25, 2.75], "accept_rate": [0.5, None, None]},
        **{"temperature": 0.0, "dtype": "float32", "draft_tokens": 3, "options": {}},
        "per_prompt": [{"prompt": "0f", "rounds": 40, "emitted": 100}],
        **{"rounds": 40, "responses": 8, "identical": 8, "speedup": 1.5, "tree_tokens": 0},
        "by_set": [
            {"set": f"{name} {text}", "prompts": 4, "rounds": 20, "acceptance_length": length}
            | {"interval": [1.0, 3.0]}
            for name, length in (("maths", 2.75), ("chat", 2.25))
        ],
        **{"by_position": ranges(2.5), "by_context": ranges(2.75, 2.25), "by_mode": []},
        "samples": [sample(f"prompts.jsonl:{i}") for i in range(2)],
        "texts": texts(text),
    }
