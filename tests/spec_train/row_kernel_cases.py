"""The kernels of losses against float64 loops; `test_row_kernels.py` runs this file."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_train.losses import kernels
from spec_train.losses.menu import LossKind, in_kernel
from spec_train.losses.teacher_rows import SharedRows, TeacherLogits, TeacherRows
from tests.spec_train.drafts import any_draft
from tests.spec_train.drafts.any_draft import build_draft, packed
from tests.tolerance import close, network

BLOCK = 8
# of the interpreter: what `where` leaves out, and what no mask leaves in
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
TRIAL = kernels._works.__wrapped__
dataset, head = any_draft.dataset, any_draft.head


@pytest.fixture(scope="module")
def interpreted() -> Iterator[pytest.MonkeyPatch]:
    """Kernels run on CPUs, by blocks that are shorter than a row."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels.kernels(), "BLOCK", BLOCK)
        patch.setattr(kernels, "KERNELS_ON", ("cpu",))
        patch.setattr(kernels, "_works", lambda *_: True)
        yield patch


# -- the slow formulas -----------------------------------------------------------------------------


def softmax(row: list[float]) -> list[float]:
    peak = max(row)
    parts = [math.exp(x - peak) for x in row]
    return [x / math.fsum(parts) for x in parts]


def slow_row(
    y: list[float], z: list[float], m: float, label: int | None, ce: float, l1: float, name: str
) -> dict[str, Any]:
    """Return the figures of a row, and d weighted / d y, by loops."""
    q, p, size = softmax(y), softmax(z), range(len(y))
    goal = p if label is None else [float(v == label) for v in size]
    cross = -math.fsum(goal[v] * math.log(q[v]) for v in size if goal[v])
    accepted = math.fsum(min(m * p[v], q[v]) for v in size)
    overlap = math.fsum(min(p[v], q[v]) for v in size)
    lost = math.fsum(g * math.log(g) for g in goal if g)
    d_cross = [q[v] - goal[v] for v in size]

    def through(outer: list[float]) -> list[float]:
        """Return d sum(outer q) / d y for numbers `outer`."""
        mean = math.fsum(outer[v] * q[v] for v in size)
        return [q[v] * (outer[v] - mean) for v in size]

    d_accepted = through([float(q[v] < m * p[v]) for v in size])
    signs = [(q[v] > p[v]) - (q[v] < p[v]) for v in size]
    d_l1, r = through(list(map(float, signs))), math.exp(-3 * accepted)
    loss, slope = {
        "ce": (cross, d_cross),
        "kl": (cross + lost, d_cross),
        "tv": (1 - accepted, [-d for d in d_accepted]),
        "lk-alpha": (-math.log(accepted), [-d / accepted for d in d_accepted]),
        "lk-lambda": (
            r * cross + (1 - r) * (1 - accepted),
            [r * d_cross[v] - (1 - r) * d_accepted[v] for v in size],
        ),
        "ce+l1": (cross, d_cross),
    }[name]
    weighted, change = ce * loss, [ce * d for d in slope]
    if name == "ce+l1":
        weighted += l1 * 2 * (1 - overlap)
        change = [change[v] + l1 * d_l1[v] for v in size]
    figures = weighted, loss, accepted, q.index(max(q)), cross, overlap
    return {"figures": figures, "slope": change}


SOFT = ("ce", "kl", "tv", "lk-alpha", "lk-lambda", "ce+l1")
CASES = [(name, False) for name in SOFT] + [(name, True) for name in ("ce", "kl", "ce+l1")]


@pytest.mark.parametrize("width", [1, BLOCK, 3 * BLOCK + 3])
@pytest.mark.parametrize(("name", "hard"), CASES)
def test_losses_figures_and_gradients_are_those_of_loops(
    name: str, hard: bool, width: int, interpreted: Any
) -> None:
    """Slots share teachers and biases, have two steps each, and some a weight of 0; some tokens
    have no probability, as the whole first block; one mass is not measured."""
    draw = torch.Generator().manual_seed(width)
    dtype = torch.float32 if name == "ce+l1" else torch.bfloat16
    steps = 1 if name == "ce+l1" else 2
    z = (3 * torch.randn(3, width, generator=draw)).to(dtype)
    y = (3 * torch.randn(5, steps, width, generator=draw)).to(dtype)
    if width > BLOCK:
        z[0, :BLOCK], y[0, 0, :BLOCK] = -math.inf, -math.inf
        z[2, 4], y[3, 0, width - 1] = -math.inf, y.max() + 1
    index, label = torch.tensor([0, 0, 1, 2, 2]), torch.randint(width, (5,), generator=draw)
    label[0] = width - 1
    values = torch.randn(2, width, generator=draw).to(dtype) if name == "ce+l1" else None
    value_of = None if values is None else torch.tensor([0, 0, 1, 1, 1])
    ce, l1 = torch.rand(2, 5, steps, generator=draw)
    ce[1, 0] = 0
    unmeasured = math.nan if name in ("ce", "kl", "ce+l1") else 0.5
    mass = torch.tensor([0.8, unmeasured, 1.0])
    sums = kernels.kernels().row_sums(z)
    rows = SharedRows(TeacherLogits(z, sums[0], mass, sums[1]), index)
    kind = None if name == "ce+l1" else LossKind(name=name, hard=hard)
    given, labels = y.clone(), label if hard else None
    ce, l1 = (ce[:, 0], l1[:, 0]) if steps == 1 else (ce, l1)
    given = given[:, 0] if steps == 1 else given
    found = in_kernel(given, rows, labels, (ce, l1), kind, None, (values, value_of))
    for n, s in itertools.product(range(5), range(steps)):
        at: Any = n if steps == 1 else (n, s)
        row = y[n, s].double()
        if values is not None and value_of is not None:
            row = row + values[value_of[n]].double()
        m = float(mass[index[n]])
        wanted = slow_row(
            row.tolist(), z[index[n]].double().tolist(), m, int(label[n]) if hard else None,
            float(ce[at]), float(l1[at]), name,
        )  # fmt: skip
        for i, (value, expected) in enumerate(zip(found, wanted["figures"], strict=True)):
            if i == 2 and math.isnan(m):
                assert value[at].isnan()
            elif i == 3:
                assert int(value[at]) == expected
            else:
                exact = torch.tensor(expected, dtype=torch.float32)
                close(value[at], exact, terms=4 * width, magnitude=10)
        slope = torch.tensor(wanted["slope"])
        close(given[at].float(), slope, terms=4 * width, magnitude=1, stored=dtype)


def test_sums_of_rows_and_of_groups(interpreted: Any) -> None:
    draw = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(6, 2 * BLOCK + 5, generator=draw)).bfloat16()
    x[1, : BLOCK + 1] = -math.inf
    sums, entropies = kernels.kernels().row_sums(x)
    for row, total, entropy in zip(x.double().tolist(), sums, entropies, strict=True):
        peak = max(row)
        exact = peak + math.log(math.fsum(math.exp(v - peak) for v in row))
        close(total, torch.tensor(exact, dtype=torch.float32), terms=40, magnitude=10)
        spread = -math.fsum(v * math.log(v) for v in softmax(row) if v)
        close(entropy, torch.tensor(spread, dtype=torch.float32), terms=40, magnitude=10)
    x[1] = 1
    groups = torch.tensor([0, 0, 0, 1, 2, 2])
    made = kernels.kernels().group_sums(x, groups, 3, torch.float32)
    expected = torch.stack([x[:3].double().sum(0), x[3].double(), x[4:].double().sum(0)])
    close(made, expected.float(), terms=3)


@pytest.mark.parametrize("name", ["eagle3", "dspark", "dflash2"])
def test_a_step_of_a_draft_is_the_step_without(
    name: str, interpreted: Any, dataset: Any, head: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, batch = build_draft(name, dataset, head), packed(dataset)
    calls: list[str] = []
    run = kernels.kernels().row_loss

    def counted(*args: Any) -> Any:
        calls.append(args[5])
        return run(*args)

    def step(on: str) -> tuple[Any, dict[str, Any]]:
        monkeypatch.setattr(kernels, "KERNELS_ON", (on,))
        monkeypatch.setattr(kernels.kernels(), "row_loss", counted)
        draft.zero_grad()
        torch.manual_seed(3)
        result = draft.loss(batch, head)
        result.loss.backward()
        return result, {n: p.grad for n, p in draft.named_parameters() if p.grad is not None}

    plain, gradients = step("cuda")
    assert not calls
    monkeypatch.setattr(kernels.kernels(), "BLOCK", 128)
    result, found = step("cpu")
    assert calls
    terms = network(4, backward=True, slots=64)
    close(result.loss.detach(), plain.loss.detach(), terms=terms)
    for key, value in plain.sums.items():
        close(result.sums[key], value, terms=terms, dtype=torch.float32)
    for key, gradient in gradients.items():
        close(found[key], gradient, terms=terms, magnitude=float(gradient.abs().max()) + 1e-4)


def test_what_no_kernel_computes_is_left_to_the_chains(interpreted: Any) -> None:
    logits, label = torch.randn(4, 1, 9), torch.zeros(4, dtype=torch.int64)
    rows = TeacherRows.of_logits(logits[:, 0].clone(), None)
    assert isinstance(rows, TeacherLogits)
    weights = torch.ones(4, 1), None
    for kind in (LossKind(name="jsd"), LossKind(name="tv", hard=True)):
        assert in_kernel(logits, rows, label, weights, kind) == ()
    assert in_kernel(logits, rows.spread(), None, weights, LossKind()) == ()
    assert in_kernel(logits, rows, None, weights, LossKind()) != ()


def test_the_trial_of_each_kernel_decides_for_it_alone(
    interpreted: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Planted: a wrong gradient of one loss, then wrong sums; the other kernels serve on."""
    module, device = kernels.kernels(), torch.device("cpu")
    monkeypatch.setattr(module, "BLOCK", 64)
    names = [*module.FORMS, kernels.SUMS, kernels.GROUPS]
    monkeypatch.setattr(kernels, "_works", lambda *given: TRIAL(*given))
    run, groups = module.row_loss, module.group_sums

    def serving() -> list[str]:
        return [name for name in names if kernels.serves(device, torch.bfloat16, name)]

    def wrong(logits: Tensor, *rest: Any) -> Any:
        out = run(logits, *rest)
        logits *= 1.1 if rest[4] == "lk-alpha" else 1
        return out

    monkeypatch.setattr(module, "row_loss", wrong)
    monkeypatch.setattr(module, "group_sums", lambda *given: 2 * groups(*given))
    assert serving() == [name for name in names if name not in ("lk-alpha", kernels.GROUPS)]
    said = "warning[kernel]: the kernel of losses 'lk-alpha' (torch.bfloat16) is wrong on this"
    assert said in caplog.text and "'groups'" in caplog.text
    monkeypatch.setattr(module, "row_sums", lambda x: (x[:, 0].float(), x[:, 0].float()))
    assert not kernels.serves(device, torch.bfloat16, kernels.SUMS)


def test_a_loss_whose_kernel_is_wrong_runs_as_a_chain(
    interpreted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its teacher has logits, as the sums of rows serve; others of its losses keep their kernel."""
    monkeypatch.setattr(kernels, "_works", lambda device, dtype, kernel: kernel != "tv")
    logits = torch.randn(4, 1, 9)
    rows = TeacherRows.of_logits(logits[:, 0].clone(), None)
    weights = torch.ones(4, 1), None
    assert in_kernel(logits, rows, None, weights, LossKind(name="tv")) == ()
    assert in_kernel(logits, rows, None, weights, LossKind(name="lk-alpha")) != ()
