"""How far apart two results of the same mathematics may lie: the one rule of all tests.

Two computations of one number round differently where their sums run in another order: other batch
shapes, packs or chunks, fused kernels, other CPUs, other numbers of threads. A sum of n terms x_i,
rounded to a dtype of machine epsilon e at every step, is off by at most n * e/2 * sum |x_i|. As
rounding errors are nearly independent, L * sqrt(n) * e/2 * sum |x_i| holds too, except with a
probability of 2 * exp(-L**2 / 2) (Higham and Mary, SIAM J. Sci. Comput. 41, 2019). The difference
of two such results has twice this bound:

    tolerance = SAFETY * e * sqrt(terms), times the magnitude of what is summed

- e belongs to the dtype in which the result was COMPUTED. A float64 total of float32 losses has the
  epsilon of float32: name that dtype.
- `terms` is the number of roundings one after the other on the longest path from the inputs to the
  result. The lengths of sums in sequence add up, as do the layers of a network. A product of
  matrices in bfloat16 sums in float32, so it is one rounding of bfloat16 at any length. A mean
  over N slots with errors of their own has terms / N.
- The magnitude is the sum of the absolute values of the terms, not the result: they may cancel.
  Entries of one tensor are sums of like terms, so its largest absolute value is the default. For a
  total of signed terms, pass the sum of their absolute values.

The same operations on the same shapes in the same order (resume, recomputing, saving, codecs) give
the same bits: such tests use `torch.equal`. A choice (argmax) between values that lie closer than
the tolerance is a tie: either choice is right (`same_choice`).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

SAFETY = 6  # probability of a false alarm: 2 * exp(-18) per number

LAYER = 512
"""Terms of one layer, or one unrolled step, of the tests' tiny networks: projections of up to 96
inputs, softmax over up to 100 slots, norms and an MLP of up to 64 units in sequence."""


def network(layers: int, backward: bool = False, slots: int = 0) -> int:
    """Terms of a pass through `layers` layers; of gradients, summed over `slots` slots."""
    return LAYER * layers * (2 if backward else 1) + slots


def tolerance(dtype: torch.dtype, terms: float) -> float:
    """The allowed difference, relative to the magnitude, of results computed in `dtype`."""
    return SAFETY * torch.finfo(dtype).eps * math.sqrt(terms)


def close(
    actual: Any,
    expected: Any,
    *,
    terms: float,
    dtype: torch.dtype | None = None,
    magnitude: Tensor | float | None = None,
    stored: torch.dtype | None = None,
    name: str = "",
) -> None:
    """Assert that two results (tensors, floats, or mappings and sequences of them) obey the rule.

    `dtype` is that of the arithmetic, by default that of `expected` (float64 for a float). A tensor
    as `magnitude` counts element by element. Values that were rounded to `stored` at the end may be
    one of its steps apart besides. Other values, such as None and integers, must be equal.
    """
    more: dict[str, Any] = {
        "terms": terms, "dtype": dtype, "magnitude": magnitude, "stored": stored,
    }  # fmt: skip
    if isinstance(expected, Mapping):
        assert actual.keys() == expected.keys(), name
        for key, value in expected.items():
            close(actual[key], value, name=f"{name}[{key!r}]", **more)
    elif isinstance(expected, Sequence) and not isinstance(expected, str):
        assert len(actual) == len(expected), name
        for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
            close(a, b, name=f"{name}[{i}]", **more)
    elif isinstance(expected, Tensor) and expected.is_floating_point():
        assert actual.dtype == expected.dtype, f"{name}: {actual.dtype} is not {expected.dtype}"
        _check(actual, expected, **more | {"dtype": dtype or expected.dtype}, name=name)
    elif isinstance(expected, float):
        assert isinstance(actual, float | int | Tensor), f"{name}: {actual} is no number"
        value = torch.as_tensor(actual, dtype=torch.float64)
        _check(value, torch.tensor(expected, dtype=torch.float64), **more, name=name)
    else:
        same = torch.equal(actual, expected) if isinstance(expected, Tensor) else actual == expected
        assert same, f"{name}: {actual} is not {expected}"


def close_gradients(
    actual: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    *,
    terms: float,
    dtype: torch.dtype | None = None,
) -> None:
    """Assert that the gradients of all parameters of one network obey the rule.

    They are sums of like terms, some of which cancel: softmax and norms subtract nearly equal
    parts, a bias of one number sums over all slots. The magnitude is the largest gradient of all.
    """
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    close(actual, expected, terms=terms, dtype=dtype, magnitude=largest)


def _check(
    actual: Tensor,
    expected: Tensor,
    terms: float,
    dtype: torch.dtype | None,
    magnitude: Tensor | float | None,
    stored: torch.dtype | None,
    name: str,
) -> None:
    assert actual.shape == expected.shape, f"{name}: {actual.shape} is not {expected.shape}"
    actual, expected = actual.detach().double(), expected.detach().double()
    relative = tolerance(dtype or torch.float64, terms)
    finite = expected.isfinite()
    assert torch.equal(actual[~finite], expected[~finite]), f"{name}: not finite in other places"
    if not finite.any():
        return
    if magnitude is None:
        magnitude = expected[finite].abs().max()
    allowed = relative * torch.as_tensor(magnitude, dtype=torch.float64).expand_as(expected)
    if stored is not None:
        allowed = allowed + torch.finfo(stored).eps * expected.abs()
    difference = torch.where(finite, (actual - expected).abs(), 0.0)
    if bool((difference <= allowed).all()):
        return
    where = int((difference - allowed).nan_to_num(math.inf).argmax())
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(where), expected.shape))
    raise AssertionError(
        f"{name}: {actual.flatten()[where]:.9g} is not {expected.flatten()[where]:.9g} at {at}: "
        f"they differ by {difference.flatten()[where]:.3g}, {allowed.flatten()[where]:.3g} allowed"
    )


def roundings(layers: int, backward: bool = False) -> int:
    """Roundings to a low dtype, one after the other, in a pass through `layers` layers.

    Norms, products, rotations, softmax and residual sums of a layer round once each: 12 in all;
    the products that enter and leave the network (the head among them) are one layer more.
    """
    return 12 * (layers + 1) * (2 if backward else 1)


def close_in_norm(actual: Tensor, expected: Tensor, dtype: torch.dtype, terms: float) -> None:
    """Assert that tensors computed in `dtype` and exactly are close as vectors.

    A rounding to e/2 has a standard deviation below 0.3 e. The norm averages over the errors of all
    elements, so that three standard deviations are enough; SAFETY is for the largest error of all.
    """
    actual, expected = actual.detach().double(), expected.detach().double()
    allowed = torch.finfo(dtype).eps * math.sqrt(terms)
    found = float((actual - expected).norm() / expected.norm())
    assert found <= allowed, f"relative error {found:.3g}, {allowed:.3g} allowed"


def same_choice(values: Tensor, chosen: Tensor | int, terms: float, dtype: torch.dtype) -> None:
    """Assert that `chosen` [...] are the largest of `values` [..., n], or tied with them.

    A tie is a distance within the tolerance of the largest absolute value of each row.
    """
    values = values.detach().double()
    found = values.gather(-1, torch.as_tensor(chosen)[..., None])[..., 0]
    largest, scale = values.amax(-1), values.abs().amax(-1)
    short = largest - found
    assert bool((short <= tolerance(dtype, terms) * scale).all()), f"short by {float(short.max())}"


def same_but_for_a_tie(actual: Sequence[Any], expected: Sequence[Any]) -> None:
    """Assert that of many results that follow from choices at most one differs.

    A tie among a test's choices is rare (about one run in a thousand, with trained weights), so
    that two of them are an error, as is any mistake that is not confined to one result.
    """
    assert len(actual) == len(expected) > 5
    wrong = [i for i, (a, b) in enumerate(zip(actual, expected, strict=True)) if a != b]
    assert len(wrong) <= 1, f"results {wrong} of {len(expected)} differ"


def close_weights(
    actual: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    lr: float,
    steps: int,
    terms: float = network(2, backward=True, slots=320),
) -> None:
    """Assert that two trainings with Adam, equal but for rounding, end in close float32 weights.

    Adam divides a gradient by its size: an error d of the gradients, relative to their largest,
    moves a weight by lr * d * largest / |g| per step, and by up to 2 * lr where g is nearly 0. The
    largest difference therefore says nothing. The mean over weights whose gradients are spread
    evenly, up to four times their root mean square, is lr * 4 * d * (1 + log(1 / d)).
    """
    assert actual.keys() == expected.keys()
    d = tolerance(torch.float32, terms)
    allowed = lr * steps * 4 * d * (1 + math.log(1 / d))
    differences = [(actual[n].double() - expected[n].double()).abs().flatten() for n in expected]
    found = float(torch.cat(differences).mean())
    assert found <= allowed, f"weights differ by {found:.3g} in the mean, {allowed:.3g} allowed"


def decided(values: Tensor, terms: float, dtype: torch.dtype) -> bool:
    """Whether every row of `values` [..., n] has one largest by more than the tolerance.

    Then greedy choices are the same on every machine. Tests that compare whole sequences of a
    target with fixed weights choose prompts of which this is true.
    """
    values = values.detach().double()
    top = values.topk(2, -1).values
    gaps = (top[..., 0] - top[..., 1]) / values.abs().amax(-1)
    return bool((gaps > tolerance(dtype, terms)).all())
