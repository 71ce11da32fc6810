"""The commands on the device: capture packed and unpacked, fit, real decoding, kill and resume."""

import contextlib
import dataclasses
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import spec_train
from gpu.bench import Bench
from gpu.target import capture, corpus_of, dataset_of, target_of
from spec_data.capture.backend import ForwardBatch
from spec_data.capture.mask_forms import FLEX, PER_DOCUMENT, VARLEN
from spec_data.capture.model import Target
from spec_data.capture.proofs import prove_isolation
from spec_data.shards.packing import pack_documents
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.training.result import FitResult
from spec_train.training.run_directory import read_checkpoint
from spec_train.training.saving import Saver

STATE_ERROR = {"cuda": 3e-2, "cpu": 1e-4}
"""Largest relative difference of states that were captured packed and one document per row."""
_COST = re.compile(r"^(bare|generate) +([\d,.]+) \(", re.MULTILINE)  # seconds per million tokens
BENCH = Path(__file__).resolve().parents[1] / "bench" / "generate.py"


def prove_capture(bench: Bench) -> None:
    """Capture with the proofs, packed and unpacked; compare the states."""
    target_of(bench)
    parameters = bench.facts["parameters"]
    bench.row("capture", "random Qwen3", None, size=bench.facts["target"], parameters=parameters)
    exact = {"codec": "bf16"}

    def packed() -> tuple[bool, dict[str, Any]]:
        bench.reset_memory()
        start = bench.synchronised()
        capture(bench, bench.fresh("packed"), **exact)
        seconds = bench.synchronised() - start
        manifest = json.loads((bench.out / "packed" / "manifest.json").read_text())
        proof = manifest["packing"]
        return proof["form"] not in ("rows", "single"), {
            "form": proof["form"],
            "seconds": seconds,
            "memory_gb": bench.memory_gb(),
        }

    def unpacked() -> tuple[bool, dict[str, Any]]:
        capture(bench, bench.fresh("rows"), packing="rows", **exact)
        one, two = (HiddenStatesDataset(bench.out / name) for name in ("packed", "rows"))
        worst = max(_difference(one[i], two[i]) for i in range(0, len(one), max(1, len(one) // 50)))
        allowed = STATE_ERROR["cuda" if bench.on_gpu else "cpu"]
        return worst <= allowed, {"worst_difference": worst, "allowed": allowed}

    bench.attempt("capture", "packed, with its proofs", packed)
    bench.attempt("capture", "one document per row, compared", unpacked)
    bench.attempt("capture", "lossy codecs", lambda: (dataset_of(bench).is_dir(), {}))
    _prove_forms(bench)


def _prove_forms(bench: Bench) -> None:
    """Prove and time each form in which the documents of a pack stay apart."""
    target = Target.from_pretrained(target_of(bench), device=bench.device)
    lengths, width = ([5, 30, 11], 48) if bench.tiny else ([150, 2000, 40, 900, 1100] * 4, 4096)
    documents = [torch.randint(9, 200, (n,)) for n in lengths]
    packs = pack_documents(lengths, width)
    batches = [ForwardBatch.of([pack], documents.__getitem__) for pack in packs]

    def prove(form: str) -> tuple[bool, dict[str, Any]]:
        differs = prove_isolation(target, documents, width, form).differences[form]
        bench.reset_memory()
        seconds = bench.seconds(lambda: [target.capture(batch, form) for batch in batches])
        rate = {"tokens_s": sum(lengths) / seconds, "memory_gb": bench.memory_gb()}
        return True, {"differs": differs, **rate}

    for form in (*[VARLEN] * bench.on_gpu, FLEX, PER_DOCUMENT, "block-causal"):
        bench.attempt("capture", f"form {form}", partial(prove, form))


def _difference(one: dict[str, Any], two: dict[str, Any]) -> float:
    """Return the largest relative difference of the states of a document, in the norm."""
    pairs = [(one[k].float(), two[k].float()) for k in one if k.startswith("hidden.")]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def prove_throughput(bench: Bench) -> None:
    """Measure capture against the bare forward of the target."""
    bench.attempt("throughput", "capture and a bare forward", lambda: _capture_speed(bench))


def _capture_speed(bench: Bench) -> tuple[None, dict[str, Any]]:
    command = [sys.executable, str(BENCH), "--target", str(target_of(bench)), "--rounds", "2"]
    command += ["--corpus", str(corpus_of(bench)), "--device", bench.device]
    command += ["--limit", "8" if bench.tiny else "128"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=bench.environment(), timeout=bench.left()
    )
    rates = {k: 1e6 / float(v.replace(",", "")) for k, v in _COST.findall(done.stdout)}
    if len(rates) < 2:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr else "no table")
    flops = 2 * bench.facts["parameters"]
    return None, {
        "bare_tokens_s": rates["bare"],
        "capture_tokens_s": rates["generate"],
        "capture_of_bare": rates["generate"] / rates["bare"],
        "bare_share_of_peak": bench.share_of_peak(flops * rates["bare"], 1),
        "capture_share_of_peak": bench.share_of_peak(flops * rates["generate"], 1),
    }


def _fit_options(bench: Bench, out: Path, steps: int) -> dict[str, Any]:
    options: dict[str, Any] = {"data": str(dataset_of(bench)), "out": str(out), "steps": steps}
    options |= {"device": bench.device, "log_every": 2, "eval_every": steps, "save_every": 2}
    if bench.tiny:
        options |= {"seq_len": 128, "batch_size": 2, "ttt_steps": 2}
    return options | {"draft_vocab_size": 128 if bench.tiny else 8192}


def _fit(options: dict[str, Any]) -> FitResult:
    """Fit EAGLE-3 with options of both kinds in one table, as those of the command line."""
    names = {field.name for field in dataclasses.fields(spec_train.Eagle3Options)}
    own = {name: value for name, value in options.items() if name in names}
    training = spec_train.Training(**{k: v for k, v in options.items() if k not in own})
    return spec_train.fit(training, spec_train.Eagle3Options(**own))


def prove_fit(bench: Bench) -> None:
    """Train EAGLE-3 on the captured states: speed, waiting for data, memory."""

    def fit() -> tuple[bool, dict[str, Any]]:
        steps = 6 if bench.tiny else 60
        options = _fit_options(bench, bench.fresh("run"), steps) | {"save_every": steps}
        bench.reset_memory()
        result = _fit(options)
        lines = result.training
        later = lines[len(lines) // 2 :]
        mean = {
            k: sum(x[k] for x in later) / len(later) for k in ("tokens_per_second", "data_wait")
        }
        return result.finished, {
            "loss": f"{lines[0]['loss']:.3f} to {lines[-1]['loss']:.3f}",
            "tokens_s": mean["tokens_per_second"],
            "data_wait": mean["data_wait"],
            "memory_gb": bench.memory_gb(),
        }

    bench.attempt("fit", "eagle3", fit)


def prove_checkpoint(bench: Bench) -> None:
    """A checkpoint that was copied beside the training holds the bytes of a plain copy."""

    def checkpoint() -> tuple[bool, dict[str, Any]]:
        plain: dict[str, Tensor] = {}
        hold = Saver.hold

        def noting(saver: Saver, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
            given = list(tensors)
            held = hold(saver, given)
            plain.update({name: tensor.detach().cpu().clone() for name, tensor in given})
            return held

        device = "cuda:0" if bench.on_gpu else bench.device
        options = _fit_options(bench, bench.fresh("saved"), 4) | {"device": device}
        with mock.patch.object(Saver, "hold", noting):
            _fit(options)
        stored = read_checkpoint((bench.out / "saved" / "last").resolve()).tensors
        other = [n for n, tensor in plain.items() if not torch.equal(stored[n], tensor)]
        return not other, {"tensors": len(plain), "differing": len(other), "device": device}

    bench.attempt("checkpoint", "against a synchronous copy", checkpoint)


def prove_decoding(bench: Bench) -> None:
    """Real greedy decoding with the draft must say what the target alone says, ties apart."""

    def decode() -> tuple[bool, dict[str, Any]]:
        if not (bench.out / "run").is_dir():
            prove_fit(bench)
        figures = spec_train.evaluate(
            bench.out / "run",
            target=target_of(bench),
            prompts=corpus_of(bench),
            device=bench.device,
            limit=2 if bench.tiny else 8,
            max_new_tokens=8 if bench.tiny else 48,
        ).decoding
        assert figures is not None
        # in bf16 two logits may be equal up to rounding: such a difference is a tie, not an error
        same = figures.identical + (figures.ties or 0) == figures.responses
        names = "identical", "ties", "responses"
        return same, {name: getattr(figures, name) for name in names}

    bench.attempt("decoding", "eagle3, greedy", decode)


def prove_resume(bench: Bench) -> None:
    """Kill a run, resume it, and compare it with one that was not killed."""

    def resume() -> tuple[bool, dict[str, Any]]:
        steps = 8 if bench.tiny else 40
        whole = _fit_options(bench, bench.fresh("whole"), steps)
        with _started(bench, _fit_options(bench, bench.fresh("killed"), steps)) as process:
            _fit(whole)
            killed_at = _kill(process, bench)
        with _started(bench, _fit_options(bench, bench.out / "killed", steps)) as again:
            if again.wait(timeout=max(1, bench.left() + 60)):
                raise RuntimeError(f"the resumed run failed: see {bench.out / 'killed.log'}")
        a, b = (_losses(bench.out / name) for name in ("whole", "killed"))
        worst = max(abs(a[s] - b[s]) / abs(a[s]) for s in a)
        # a CPU resumes to the last bit; a GPU adds gradients in another order
        allowed = 5e-2 if bench.on_gpu else 0.0
        return a.keys() == b.keys() and worst <= allowed, {
            "killed_after_step": killed_at,
            "steps": len(a),
            "worst_difference": worst,
            "allowed": allowed,
        }

    bench.attempt("resume", "eagle3, killed once", resume)


@contextlib.contextmanager
def _started(bench: Bench, options: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    """Run `fit` beside this process; whatever happens, the GPU is free of it in the end."""
    command = [sys.executable, "-m", "spec_train", "fit", "eagle3"]
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    with (bench.out / "killed.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=bench.environment())
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _kill(process: subprocess.Popen[bytes], bench: Bench) -> int:
    """Kill a run once it has saved a checkpoint; return the last step that it logged."""
    run, until = bench.out / "killed", time.monotonic() + 400  # it compiles before its first step
    while not (run / "last").exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    process.kill()
    process.wait()
    return max(_losses(run), default=0)


def _losses(run: Path) -> dict[int, float]:
    path, found = run / "metrics.jsonl", {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            parsed = json.loads(line)
        except ValueError:  # the last line of a killed run
            continue
        if parsed["split"] == "train":
            found[parsed["step"]] = parsed["loss"]
    return found
