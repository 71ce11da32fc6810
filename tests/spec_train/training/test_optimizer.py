"""Optimizers and schedules: their formulas, what each of them moves, resume."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from spec_data.shards.errors import ConfigError
from spec_train.options.kinds import DRAFT_OPTIONS
from spec_train.options.training import Training
from spec_train.training.fit import fit
from spec_train.training.optimizer import Masters, learning_rate, table_factor
from spec_train.training.trainer import Trainer
from tests.marks import long_but
from tests.spec_train.training import tools as trainer_tools
from tests.spec_train.training.ranks_tools import fit_well
from tests.spec_train.training.test_trainer_resume import assert_same_run, stop_after
from tests.spec_train.training.tools import assert_close_runs, change, run
from tests.tolerance import close, close_in_norm

data, config = trainer_tools.data, trainer_tools.config


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("total", [1, 2, 40])
def test_rates_are_those_of_the_formula(schedule: str, total: int) -> None:
    end = {} if schedule == "constant" else {"min_lr_ratio": 0.2}
    plan = Training(data="d", out="o", lr=0.1, warmup_ratio=0.1, schedule=schedule, **end)
    warm = -(-total // 10)
    expected = []
    for step in range(total):
        done = max(0.0, (step - warm) / max(1, total - 1 - warm))
        share = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "constant": 1.0}[
            schedule
        ]
        low = 1.0 if schedule == "constant" else 0.2
        rate = 0.1 * (low + (1 - low) * share)
        expected.append(0.1 * (step + 1) / (warm + 1) if step < warm else rate)
    close([learning_rate(s, total, plan) for s in range(total)], expected, terms=8)


class Net(nn.Module):
    """A draft as far as `Masters` knows it."""

    not_muon = frozenset[str]()

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(24, 16, bias=True)
        self.tall = nn.Linear(8, 20, bias=False)
        self.lm_head = nn.Linear(16, 12, bias=False)

    def trainable_parameters(self) -> list[nn.Parameter]:
        return list(self.parameters())


def muon_by_definition(weight: Tensor, gradients: Sequence[Tensor], lr: float, decay: float):
    """Muon with Nesterov momentum 0.95 and five Newton-Schulz steps, in float64."""
    weight, momentum = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
    for gradient in gradients:
        momentum = 0.95 * momentum + 0.05 * gradient.double()  # an average of the gradients
        x = 0.05 * gradient.double() + 0.95 * momentum
        x = x / x.norm()
        for _ in range(5):  # odd polynomial of the singular values
            gram = x @ x.T
            x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
        weight = weight * (1 - lr * decay) - lr * 0.2 * math.sqrt(max(weight.shape)) * x
    return weight


def test_muon_moves_matrices_as_its_definition_says_and_adamw_the_rest() -> None:
    plan = Training(data="d", out="o", lr=0.02, optimizer="muon", weight_decay=0.1)
    net, gradients = Net(), {}
    net.markov_w1 = nn.Embedding(20, 4)
    net.config = SimpleNamespace(hidden_size=16)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    masters = Masters(net, plan)  # type: ignore[arg-type]
    for step in range(3):
        for name, parameter in net.named_parameters():
            torch.manual_seed(step)
            parameter.grad = torch.randn_like(parameter) * (1 + step)
            gradients.setdefault(name, []).append(parameter.grad.clone())
        masters.step(0.02)
    for name in ("fc.weight", "tall.weight"):
        expected = muon_by_definition(before[name], gradients[name], 0.02, 0.1)
        found = dict(net.named_parameters())[name].detach() - before[name]
        # five Newton-Schulz steps of three products each; a step makes a small value 3.4 times
        moved = expected - before[name].double()
        close_in_norm(found, moved, torch.float32, terms=24 * 5 * 3 * (3.4445**5) ** 2)
    table = ("markov_w1.weight", 0.1, 0.02 * 8 * math.sqrt(16) / 4)  # at a rate of its own
    for name, decay, lr in (("fc.bias", 0.0, 0.02), ("lm_head.weight", 0.1, 0.02), table):
        weight = before[name].double()
        first, second = torch.zeros_like(weight), torch.zeros_like(weight)
        for t, gradient in enumerate(map(Tensor.double, gradients[name]), start=1):
            first, second = 0.9 * first + 0.1 * gradient, 0.95 * second + 0.05 * gradient**2
            step = first / (1 - 0.9**t) / ((second / (1 - 0.95**t)).sqrt() + 1e-8)
            weight = weight * (1 - lr * decay) - lr * step
        found = dict(net.named_parameters())[name].detach()
        close(found.double(), weight, terms=60, dtype=torch.float32)
    assert table_factor(4096, 1024) == 1
    adamw = Masters(net, replace(plan, optimizer="adamw")).optimizers[0]  # type: ignore[arg-type]
    assert {group["factor"] for group in adamw.param_groups} == {1}


def experts() -> nn.Module:
    """The matrices of three experts in one tensor, as those of an MTP block."""
    torch.manual_seed(7)
    made = nn.Module()
    made.gate_up_proj = nn.Parameter(torch.randn(3, 12, 8))
    return made


def test_the_experts_of_a_block_move_each_as_a_matrix_of_its_own() -> None:
    """AdamW would move nearly all weights of such a block, at Muon's rate."""
    net = Net()
    net.experts = experts()
    weight = net.experts.gate_up_proj
    before, gradients = weight.detach().clone(), []
    masters = Masters(net, Training(data="d", out="o", lr=0.02, weight_decay=0.1))  # type: ignore[arg-type]
    for step in range(2):
        torch.manual_seed(step)
        gradients.append(torch.randn_like(weight) * (1 + step))
        gradients[-1][2] = 0  # no token has chosen this one
        masters.clip()
        weight.grad = gradients[-1].clone()
        masters.step(0.02)
    for e in (0, 1):
        expected = muon_by_definition(before[e], [g[e] for g in gradients], 0.02, 0.1)
        moved = expected - before[e].double()
        bound = 24 * 5 * 3 * (3.4445**5) ** 2  # as above
        close_in_norm(weight[e].detach() - before[e], moved, torch.float32, terms=bound)
    close(weight[2].detach(), before[2] * (1 - 0.02 * 0.1) ** 2, terms=4)


def test_decay_shrinks_matrices_alone() -> None:
    """A kernel that starts as the identity would lose it otherwise."""
    net = Net()
    net.kernel = nn.Parameter(torch.ones(2, 3, 4))
    net.experts = experts()
    net.relative_slot_bias = nn.Parameter(torch.ones(2, 5))  # LiLiCorr's
    masters = Masters(net, Training(data="d", out="o", lr=0.1, weight_decay=0.5))  # type: ignore[arg-type]
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    masters.clip()  # all gradients are zero
    masters.step(0.1)
    for name, parameter in net.named_parameters():
        matrix = name.endswith("weight") or name.startswith("experts")
        share = 0.95 if matrix else 1
        close(parameter.detach(), before[name] * share, terms=2)


@pytest.mark.parametrize("name", long_but(["eagle3", "dspark"], DRAFT_OPTIONS))
def test_muon_never_moves_embeddings_heads_norms_or_biases(name: str, config, monkeypatch) -> None:
    kept: list[Trainer] = []
    original = Trainer.run
    monkeypatch.setattr(Trainer, "run", lambda self: kept.append(self) or original(self))
    fit(name, change(config, optimizer="muon", steps=1), DRAFT_OPTIONS[name]())
    draft, masters = kept[0].draft, kept[0].masters
    adamw, muon = ({id(p) for g in o.param_groups for p in g["params"]} for o in masters.optimizers)
    assert not adamw & muon and adamw | muon == {id(p) for p in masters.params}
    for parameter_name, parameter in draft.named_parameters():
        matrix = parameter.ndim == 2 and parameter_name.endswith(
            ("_proj.weight", "kernel_projection.weight", "in_proj_weight", "h_l0")
        )
        # of LiLiCorr, a "head" makes vectors of candidates, and none of tokens
        allowed = matrix or parameter_name.endswith(("fc.weight", "lilicorr.out_head.weight"))
        allowed |= parameter_name.endswith(("lilicorr.in_head.weight", "anchor_out_head.weight"))
        allowed |= parameter_name.endswith(("down_h.weight", "down_g.weight"))  # of XPress
        assert (id(parameter) in muon) in (matrix, allowed), parameter_name


def test_a_run_with_muon_resumes_bit_for_bit(config, tmp_path: Path, monkeypatch) -> None:
    config = change(config, optimizer="muon", schedule="linear")
    run(change(config, out=str(tmp_path / "whole")))
    with monkeypatch.context() as patch:
        stop_after(7, patch)
        assert not run(config).finished
    state = load_file(Path(config.out) / "last" / "training_state.safetensors")
    assert "optimizer.momentum_buffer.fc.weight" in state
    assert "optimizer.exp_avg.norm.weight" in state
    assert run(config).finished
    assert_same_run(tmp_path / "whole", config.out)
    with pytest.raises(ConfigError, match="optimizer: 'muon' -> 'adamw'"):
        run(change(config, optimizer="adamw"))


def test_muon_of_sharded_matrices_is_muon_of_whole_ones(config, tmp_path: Path) -> None:
    config = change(config, optimizer="muon", lr=1e-4, steps=6, batch_size=2, accumulation=1)
    run(change(config, out=str(tmp_path / "alone")))
    fit_well(change(config, batch_size=1, sharding="fsdp2"))
    assert_close_runs(tmp_path / "alone", config.out)
