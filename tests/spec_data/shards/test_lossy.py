"""Laws of the lossy codec: bounded errors, nothing destroyed, the same bits everywhere."""

from threading import Thread

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch.autograd.graph import Node

from spec_data.shards import codecs
from spec_data.shards.blobs import decompress
from spec_data.shards.codecs import (
    Basis,
    Tables,
    decode,
    encode,
    load_tables,
    save_tables,
)
from spec_data.shards.errors import DatasetError
from spec_data.shards.shard import CodedRows, StoredRows, decode_rows

H = 48


def correlated(tokens: int, width: int = H, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    """States with a falling spectrum, off-centre, whose channels differ by up to `spread`."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width, generator=torch.Generator().manual_seed(9))
    falling = 0.9 ** torch.arange(width)
    noise = torch.randn(tokens, width, generator=generator)
    return (noise * falling) @ mixing * torch.logspace(0, np.log10(spread), width) + 3


def stored(states: torch.Tensor, tables: Tables) -> StoredRows:
    made = encode(states, tables)
    return StoredRows(decompress(made.blob, *states.shape), made.rows, made.states)


def round_trip(states: torch.Tensor, tables: Tables, dtype=torch.bfloat16) -> torch.Tensor:
    out = torch.full(states.shape, 7.0, dtype=dtype)
    decode_rows(stored(states, tables), tables, out)
    return out


def total_error(states: torch.Tensor, found: torch.Tensor) -> float:
    return float((states - found.float()).square().sum() / (states - states.mean(0)).square().sum())


# -- a second implementation ----------------------------------------------------------------------


def slow_codes(states: torch.Tensor, tables: Tables) -> tuple[list[list[float]], list[int]]:
    """Solve for the coordinates of each token in float64, one at a time, and round them."""
    matrix = tables.factors.double().numpy()[:, None] * tables.basis.double().numpy()
    codes, escaped = [], []
    for number, state in enumerate(states.double().numpy()):
        wanted = (state - tables.mean.double().numpy()) / tables.scale.double().numpy()
        coordinates = np.linalg.solve(matrix.T, wanted)
        codes.append(coordinates.tolist())
        if not all(abs(round(c)) <= 127 for c in coordinates):
            escaped.append(number)
    return codes, escaped


def slow_values(codes: np.ndarray, tables: Tables) -> np.ndarray:
    """Multiply out in Python's integers, then round to float32 after each operation."""
    basis, factors = tables.basis.tolist(), tables.factors.tolist()
    out = np.zeros(codes.shape, np.float32)
    for n, row in enumerate(codes.tolist()):
        for h in range(len(basis)):
            total = sum(c * f * line[h] for c, f, line in zip(row, factors, basis, strict=True))
            assert abs(total) < 1 << 24
            value = np.float32(np.float32(total) * np.float32(tables.scale[h]))
            out[n, h] = np.float32(value + np.float32(tables.mean[h]))
    return out


@pytest.mark.parametrize("step", [0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_and_values_are_those_of_plain_loops(step, dtype):
    tables = Basis(correlated(500)).tables(step)
    states = correlated(40, seed=1).to(dtype)
    states[7] *= 1000
    coordinates, escaped = slow_codes(states, tables)
    rows = stored(states, tables)
    assert rows.escape_index.tolist() == escaped == [7]
    for n, (mine, theirs) in enumerate(zip(rows.values.tolist(), coordinates, strict=True)):
        if n not in escaped:
            distance = np.abs(np.array(theirs) - np.array(mine))
            assert distance.max() < 0.5001  # half-way, float32 may round to either side
    rows = rows.cut(8, 40)
    values = torch.from_numpy(slow_values(rows.values, tables)).to(torch.bfloat16)
    assert torch.equal(decode(torch.from_numpy(rows.values), tables), values)


# -- laws -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [1.0, 100.0])
@pytest.mark.parametrize("tokens", [4000, 3 * H, H // 2, 5, 1])
def test_the_error_is_that_of_the_step_however_small_the_sample(tokens, spread):
    """Components that the sample says nothing about cost bits, and are no worse than the others."""
    states = correlated(2000, seed=1, spread=spread)
    tables = Basis(correlated(tokens, spread=spread)).tables(0.5)
    found = round_trip(states, tables).float()
    escaped = stored(states, tables).escape_index
    rest = np.setdiff1d(np.arange(2000), escaped)
    if len(rest) > 100:
        assert total_error(states[rest], found[rest]) < 0.03
        steps = (
            tables.scale.double() * tables.factors.max() * tables.basis.double().norm(dim=0)
        ).float()
        assert bool(((states - found)[rest].abs() < 4 * steps).all())  # the error of each channel
    raw = torch.from_numpy(escaped).long()
    assert torch.equal(found[raw], states[raw].bfloat16().float())
    assert tokens > 1 or len(escaped) > 1900  # nothing is lost of what the tables cannot hold


def test_a_smaller_step_has_a_smaller_error_and_more_bits():
    states, basis = correlated(3000), Basis(correlated(3000, seed=1))
    error = [total_error(states, round_trip(states, basis.tables(s))) for s in (0.25, 0.5, 1.0)]
    size = [encode(states, basis.tables(s)).nbytes for s in (0.25, 0.5, 1.0)]
    assert error == sorted(error) and size == sorted(size, reverse=True)
    assert error[1] == pytest.approx(4 * error[0], rel=0.2)


@pytest.mark.parametrize("share", [0.01, 0.12])
def test_massive_tokens_come_back_exactly_and_cost_the_others_nothing(share):
    states = correlated(4000)
    massive = torch.rand(4000, generator=torch.Generator().manual_seed(3)) < share
    plain = round_trip(states[~massive], Basis(states[~massive]).tables(0.5))
    states[massive, 3:6] *= 3000
    states = states.bfloat16().float()
    tables = Basis(states).tables(0.5)
    assert stored(states, tables).escape_index.tolist() == massive.nonzero()[:, 0].tolist()
    found = round_trip(states, tables).float()
    assert torch.equal(found[massive], states[massive])
    rest = states[~massive]
    assert total_error(rest, found[~massive]) < 1.1 * total_error(rest, plain)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_is_kept_raw(bad):
    states = correlated(20)
    states[3, 4] = bad
    rows = stored(states, Basis(correlated(500)).tables(0.5))
    assert 3 in rows.escape_index and not rows.values[3].any()


def test_sums_that_float32_could_not_hold_are_kept_raw(monkeypatch):
    tables = Basis(correlated(500)).tables(0.5)
    states = correlated(200, seed=1)
    integers = codecs.encode_tensors(states, tables)[0].float().abs() @ tables.reach
    monkeypatch.setattr(codecs, "_EXACT", float(integers.median()))
    away = codecs.encode_tensors(states, tables)[1]
    assert torch.equal(away, integers >= integers.median())


# -- the same bits --------------------------------------------------------------------------------


def test_any_part_of_a_document_decodes_to_the_same_bits():
    tables = Basis(correlated(500, 160)).tables(0.4)
    codes = torch.from_numpy(stored(correlated(300, 160, seed=1), tables).values)
    whole = decode(codes, tables)
    for rows in (slice(0, 1), slice(3, 4), slice(7, 30), slice(100, 300), slice(None, None, 3)):
        assert torch.equal(decode(codes[rows], tables), whole[rows])
    exact = (codes.double() @ tables.matrix.double()).float()
    assert torch.equal((exact * tables.scale + tables.mean).to(torch.bfloat16), whole)


def test_autocast_around_it_changes_no_bit():
    states = correlated(200)
    tables = Basis(states).tables(0.5)
    made, values = encode(states, tables), round_trip(states, tables)
    with torch.autocast("cpu", torch.bfloat16):
        assert np.array_equal(encode(states, tables).blob, made.blob)
        assert torch.equal(round_trip(states, tables), values)


def test_a_reader_beside_it_leaves_a_trainer_its_cast_weights():
    """All threads share them: cast again, a step's gradients add up in another order, by chance."""
    states = correlated(200)
    tables = Basis(states).tables(0.5)
    weight = torch.randn(4, 4, requires_grad=True)

    def cast() -> Node:
        node = torch.nn.functional.linear(torch.ones(2, 4), weight).grad_fn
        while node.name() != "ToCopyBackward0":
            node = next(before for before, _ in node.next_functions if before is not None)
        return node

    with torch.autocast("cpu", torch.bfloat16):
        made = cast()
        reader = Thread(target=round_trip, args=(states, tables))
        reader.start()
        reader.join()
        assert cast() is made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cut_and_take_choose_rows_with_their_escapes(dtype):
    states = correlated(50)
    states[[0, 9, 10, 49]] *= 10_000
    tables = Basis(correlated(500)).tables(0.5)
    rows, whole = stored(states, tables), round_trip(states, tables, dtype)
    for chosen in (np.arange(50), np.arange(9, 11), np.array([0, 10, 11, 49]), np.arange(3, 3)):
        for part in (
            rows.take(chosen),
            *([rows.cut(chosen[0], chosen[-1] + 1)] if len(chosen) > 40 else []),
        ):
            out = torch.zeros(len(chosen), H, dtype=dtype)
            decode_rows(part, tables, out)
            assert torch.equal(out, whole[torch.from_numpy(chosen)])


def test_gathered_rows_of_several_tables_are_decoded_with_their_own():
    parts = []
    for seed in (1, 2):
        states = correlated(30, seed=seed)
        states[4] *= 10_000
        tables = Basis(correlated(500, seed=seed)).tables(0.3 * seed)
        parts.append((stored(states, tables), tables, round_trip(states, tables)))
    rows = CodedRows(H, 100, pin=False)
    rows.begin_pack(10)
    for number, (part, tables, _) in enumerate([parts[0], parts[1], parts[0]]):
        rows.add(part, tables, np.arange(30) + 30 * number - 5)
    found = rows.states(100, "cpu", torch.bfloat16, False)
    for number, (_, _, whole) in enumerate([parts[0], parts[1], parts[0]]):
        start = 10 + 30 * number - 5
        assert torch.equal(found[start : start + 30], whole)
    assert not found[:5].any() and not found[95:].any()


# -- tables on disk -------------------------------------------------------------------------------


def test_tables_survive_the_disk(tmp_path):
    tables = Basis(correlated(100)).tables(0.5)
    file = tmp_path / "codec.safetensors"
    file.write_bytes(save_tables({"hidden.L0": tables}))
    found = load_tables(file, {"hidden.L0": H}, None)["hidden.L0"]
    states = correlated(40, seed=1)
    assert encode(states, found).blob.tobytes() == encode(states, tables).blob.tobytes()
    assert file.stat().st_size < 1.5 * H * H + 2000


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("mean", None, "mean is missing"),
        ("mean", torch.zeros(H - 1), r"mean is float32 \[47\] instead of float32 \[48\]"),
        ("mean", torch.full((H,), torch.nan), "mean is not finite"),
        ("scale", torch.zeros(H), "scale is not above 0"),
        ("factors", torch.zeros(H, dtype=torch.int16), "factors is not above 0"),
        ("basis", torch.zeros(H, H), "basis is float32"),
    ],
)
def test_tables_that_decode_nothing_are_refused(tmp_path, part, value, message):
    tensors = load(save_tables({"hidden.L0": Basis(correlated(100)).tables(0.5)}))
    del tensors[f"hidden.L0.{part}"]
    if value is not None:
        tensors[f"hidden.L0.{part}"] = value
    file = tmp_path / "codec.safetensors"
    file.write_bytes(save(tensors))
    with pytest.raises(DatasetError, match=message):
        load_tables(file, {"hidden.L0": H}, None)
