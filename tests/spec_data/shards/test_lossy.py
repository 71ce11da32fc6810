"""Laws of the lossy codecs: textbook errors, nothing destroyed, the same bits everywhere."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from spec_data.shards.codec_tables import (
    channel_error,
    gaussian_levels,
    load_tables,
    make_tables,
    save_tables,
)
from spec_data.shards.codecs import CODECS, LOSSY, bf16_tensor
from spec_data.shards.errors import ConfigError, DatasetError
from spec_data.shards.schema import Column, predicts_supervised, token_columns
from spec_data.shards.shard import StoredRows, decode_rows, runs
from spec_data.terminal.option_values import HIDDEN_CODECS
from tests.tolerance import close

H = 64
# Gaussian source, unit variance: Lloyd-Max (Max 1960); e4m3 at a random scale; uniform steps of
# E[max of 64]^2 / 127^2 / 12; each and one rounding to bf16 (2.4e-6).
TEXTBOOK = {"lm4c": 0.009501, "lm6c": 6.44e-4, "fp8": 7.0e-4, "int8c": 3.57e-5 + 2.4e-6}


def gaussian(tokens: int, width: int = H, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, width, generator=generator)


def stored(codec, states, tables) -> StoredRows:
    encoded = LOSSY[codec].encode(states, tables)
    return StoredRows(encoded.codes, encoded.scale, encoded.escape_index, encoded.escape)


def round_trip(codec, states, tables, dtype=torch.bfloat16) -> torch.Tensor:
    out = torch.full(states.shape, 7.0, dtype=dtype)
    decode_rows(LOSSY[codec], stored(codec, states, tables), tables, out)
    return out


def error(codec, states, tables) -> np.ndarray:
    return channel_error(states, round_trip(codec, states, tables), tables)


def test_every_name_is_an_option_and_a_codec():
    assert set(HIDDEN_CODECS) == {"bf16", *LOSSY}
    assert not set(CODECS) & set(LOSSY)
    assert all(c.stronger in HIDDEN_CODECS for c in LOSSY.values())


@pytest.mark.parametrize("codec", LOSSY)
def test_gaussian_error_is_the_textbooks(codec):
    states = gaussian(20_000)
    tables = make_tables(gaussian(20_000, seed=1), codec)
    # A token's largest value sits near the top of e4m3's last binade, which is its best place.
    allowed = 0.12 if codec == "fp8" else 0.05
    assert error(codec, states, tables).mean() == pytest.approx(TEXTBOOK[codec], rel=allowed)


@pytest.mark.parametrize("codec", LOSSY)
def test_outlier_channels_lose_no_more_than_others(codec):
    """Six channels hold nearly all energy; every channel keeps its own relative error."""
    spread = torch.ones(H)
    spread[:6] = torch.tensor([50.0, 100, 200, 300, 600, 1000])
    states = gaussian(8000) * spread
    tables = make_tables(gaussian(8000, seed=1) * spread, codec)
    found = error(codec, states, tables)
    if codec == "fp8":  # floating point keeps it by itself
        assert found.max() < 2 * TEXTBOOK[codec]
    else:
        assert np.median(found) == pytest.approx(TEXTBOOK[codec], rel=0.08)
        assert found.max() < 1.5 * TEXTBOOK[codec]


def with_massive_tokens(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One token in 64 is 3,000 deviations away in three channels."""
    states = gaussian(tokens) * torch.linspace(0.5, 20, H) + 3
    massive = torch.zeros(tokens, dtype=torch.bool)
    massive[5::64] = True
    states[massive, 3:6] = states[massive, 3:6] * 3000
    return states.bfloat16().float(), massive


@pytest.mark.parametrize("codec", LOSSY)
def test_massive_tokens_come_back_exactly_and_cost_the_others_nothing(codec):
    states, massive = with_massive_tokens(4096)
    tables = make_tables(states, codec)
    assert stored(codec, states, tables).escape_index.tolist() == massive.nonzero()[:, 0].tolist()
    back = round_trip(codec, states, tables).float()
    assert torch.equal(back[massive], states[massive])
    rest = channel_error(states[~massive], back[~massive].bfloat16(), tables)
    assert np.median(rest) < 1.1 * TEXTBOOK[codec] + 3e-6


def short_documents(factor: float, share: float = 0.12) -> tuple[torch.Tensor, torch.Tensor]:
    """Documents of about 20 tokens: more than a tenth of the tokens are massive in two channels."""
    states = gaussian(6000) * torch.linspace(0.5, 20, H) + 3
    massive = torch.rand(6000, generator=torch.Generator().manual_seed(3)) < share
    states[massive, 3] += factor * 0.5
    states[massive, 40] -= factor * 12
    return states.bfloat16().float(), massive


@pytest.mark.parametrize("factor", [3.0, 10.0, 30.0, 100.0, 1000.0])
@pytest.mark.parametrize("codec", ["int8c", "lm6c", "lm4c"])
def test_many_massive_tokens_stay_within_the_bound(codec, factor):
    """The other half of the sample is measured, as `calibrate` does."""
    states, massive = short_documents(factor)
    tables = make_tables(states[:3000], codec)
    held_out, is_massive = states[3000:], massive[3000:]
    escaped = torch.zeros(3000, dtype=torch.bool)
    escaped[torch.from_numpy(stored(codec, held_out, tables).escape_index)] = True
    back = round_trip(codec, held_out, tables)
    found = channel_error(held_out[~escaped], back[~escaped], tables)
    bound = LOSSY[codec].bound
    assert found.max() < bound.worst and np.median(found) < bound.median
    ordinary = channel_error(held_out[~is_massive], back[~is_massive], tables)
    assert np.median(ordinary) < 1.2 * TEXTBOOK[codec] + 3e-6
    assert float(escaped[~is_massive].float().mean()) < 0.02  # few others are stored in bf16


@pytest.mark.parametrize("codec", ["int8c", "lm6c", "lm4c"])
def test_a_limit_on_the_error_escapes_exactly_the_tokens_above_it(codec):
    """The escaped tokens, computed token by token in float64."""
    states, _ = short_documents(10.0)
    tables = make_tables(states, codec)
    free = replace(tables, worst=math.inf)
    rows = stored(codec, states, free)
    coded = np.setdiff1d(np.arange(len(states)), rows.escape_index)
    values = LOSSY[codec]._values(torch.from_numpy(rows.values.copy()), free).double()
    values = values * bf16_tensor(rows.scale).double()[:, None]
    z = (states.double() - tables.mean.double()) / tables.std.double()
    gaps = (z - values).square().amax(-1).numpy()
    limit = float(np.quantile(gaps[coded], 0.9))
    chosen = stored(codec, states, replace(tables, worst=limit))
    expected = set(rows.escape_index) | {t for t in coded if gaps[t] > limit}
    # the encoder computes in float32: tokens close to the limit may fall on either side
    unclear = {t for t in coded if abs(gaps[t] / limit - 1) < 1e-3}
    assert set(chosen.escape_index.tolist()) ^ expected <= unclear
    assert len(unclear) < 0.02 * len(states)
    same = np.setdiff1d(coded, chosen.escape_index)
    assert np.array_equal(chosen.values[same], rows.values[same])
    assert not chosen.scale[list(set(chosen.escape_index))].any()


@pytest.mark.parametrize("codec", ["lm6c", "lm4c"])
def test_a_first_token_far_out_in_one_channel_is_stored_as_it_is_in_short_documents_too(codec):
    """The tables are made from long documents; the shards also have short ones."""

    def documents(length, seed):
        states = gaussian(6000, seed=seed)
        states[::length, 5] = 12.0
        return states

    tables = make_tables(documents(1000, 0), codec)
    short = documents(40, 1)
    rows = stored(codec, short, tables)
    assert set(range(0, 6000, 40)) <= set(rows.escape_index.tolist())
    out = torch.empty(short.shape, dtype=torch.bfloat16)
    decode_rows(LOSSY[codec], rows, tables, out)
    assert channel_error(short, out, tables).max() < LOSSY[codec].bound.worst


def test_the_limit_on_the_error_is_stored_only_where_it_is_needed(tmp_path):
    plain = make_tables(gaussian(3000), "lm4c")
    assert plain.worst == math.inf and "x.worst" not in load(save_tables({"x": plain}))
    needed = replace(plain, worst=2.5)
    (tmp_path / "codec.safetensors").write_bytes(save_tables({"x": needed}))
    assert load_tables(tmp_path / "codec.safetensors", [column()], None)["x"].worst == 2.5


@pytest.mark.parametrize("codec", LOSSY)
def test_zero_and_constant_channels_come_back_exactly(codec):
    states = gaussian(500).bfloat16().float()
    states[:, 7], states[:, 8] = 0.0, 2.5
    tables = make_tables(states, codec)
    back = round_trip(codec, states, tables).float()
    assert bool((back[:, 7] == 0).all())
    if codec != "fp8":
        assert bool((back[:, 8] == 2.5).all())
        assert np.isnan(channel_error(states, back.bfloat16(), tables)[[7, 8]]).all()
    states[100, 7] = 2.0**-10  # what the sample never saw is not lost: the token escapes
    assert torch.equal(round_trip(codec, states, tables).float()[100], states[100])


@pytest.mark.parametrize("codec", LOSSY)
def test_any_number_of_tokens(codec):
    tables = make_tables(gaussian(300), codec)
    states = gaussian(9, seed=4)
    whole = round_trip(codec, states, tables)
    for count in (0, 1, 2, 9):
        assert torch.equal(round_trip(codec, states[:count], tables), whole[:count])
    alone = make_tables(states[:1], codec)  # a sample of one token: every channel is constant
    assert torch.equal(
        round_trip(codec, states[:1].bfloat16().float(), alone).isfinite().all(), torch.tensor(True)
    )
    zeros = torch.zeros(3, H)
    assert bool((round_trip(codec, zeros, make_tables(zeros, codec)) == 0).all())


@pytest.mark.parametrize("codec", LOSSY)
def test_a_tokens_code_depends_on_the_token_alone(codec):
    states, _ = with_massive_tokens(700)
    tables = make_tables(states, codec)
    order = torch.from_numpy(np.random.default_rng(0).permutation(700))
    assert torch.equal(
        round_trip(codec, states[order], tables), round_trip(codec, states, tables)[order]
    )


@pytest.mark.parametrize("codec", LOSSY)
def test_decoders_agree_to_the_bit(codec):
    """The buffered CPU path, the torch function and numpy, as FORMAT.md writes it."""
    states = gaussian(3000, 192) * torch.logspace(-9, 9, 192) + torch.linspace(-9, 9, 192)
    tables = make_tables(states, codec)
    rows = stored(codec, states, tables)
    codes = torch.from_numpy(rows.values.copy())
    whole = LOSSY[codec].decode(codes, bf16_tensor(rows.scale), tables)
    whole[torch.from_numpy(rows.escape_index)] = bf16_tensor(rows.escape)
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(round_trip(codec, states, tables, dtype), whole.to(dtype))
    bits = numpy_bits(codec, rows, tables)
    assert np.array_equal(bits.view(np.int16), whole.view(torch.int16).numpy())


def test_decoding_works_in_and_after_inference_mode():
    states = gaussian(300)
    tables = make_tables(states, "int8c")
    with torch.inference_mode():
        inside = round_trip("int8c", states, tables).clone()
    assert torch.equal(round_trip("int8c", states, tables), inside)


def numpy_bits(codec, rows, tables) -> np.ndarray:
    mean, std = tables.mean.numpy(), tables.std.numpy()
    levels = None if tables.levels is None else tables.levels.numpy()
    codes, n = rows.values, len(rows)
    if codec == "int8c":
        v = codes.astype(np.float32)
    elif codec == "fp8":
        v = levels[codes]
    else:
        half = len(mean) // 2
        low, high = codes[:, :half], codes[:, half:]
        first, second = low & 15, low >> 4
        if codec == "lm6c":
            high = np.concatenate([high & 15, high >> 4], 1)
            first, second = first | (high & 3) << 4, second | high >> 2 << 4
        v = levels[np.stack([first, second], -1)].reshape(n, -1)
    v = v * (rows.scale.astype(np.uint32) << 16).view(np.float32)[:, None]
    if codec != "fp8":
        v = v * std
        v = v + mean
    u = v.view(np.uint32)
    u = ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16)
    u[rows.escape_index] = rows.escape
    return u


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("codec", LOSSY)
def test_the_device_decodes_the_same_bits(codec):
    states, _ = with_massive_tokens(2000)
    tables = make_tables(states, codec)
    rows = stored(codec, states, tables)
    codes, scale = torch.from_numpy(rows.values.copy()), bf16_tensor(rows.scale)
    here = LOSSY[codec].decode(codes, scale, tables)
    there = LOSSY[codec].decode(codes.cuda(), scale.cuda(), tables)
    assert torch.equal(there.cpu(), here)


@pytest.mark.parametrize(("codec", "width"), [("lm6c", 30), ("lm6c", 33), ("lm4c", 33)])
def test_widths_that_do_not_pack_are_refused_in_words(codec, width):
    with pytest.raises(ConfigError, match=rf"{codec} packs \d channels .* hidden size {width}"):
        token_columns((0,), width, "final-hidden", 50, aux_codec=codec)
    token_columns((0,), 33, "final-hidden", 50, aux_codec="int8c")


@pytest.mark.parametrize(("codec", "width"), [("int8c", 33), ("fp8", 5), ("lm4c", 6), ("lm6c", 4)])
def test_odd_widths_work_where_they_can(codec, width):
    states = gaussian(400, width)
    tables = make_tables(states, codec)
    assert error(codec, states, tables).max() < 10 * TEXTBOOK[codec]


def test_levels_are_lloyd_and_max():
    """Max (1960), table I: 4 bits; and the fixed-point property for 64 levels."""
    known = [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733]
    assert gaussian_levels(16)[8:].tolist() == pytest.approx(known, abs=6e-4)
    levels = gaussian_levels(64).double().numpy()
    assert np.array_equal(levels, -levels[::-1])
    grid = np.linspace(-9, 9, 2_000_001)
    weight = np.exp(-(grid**2) / 2)
    cell = np.searchsorted((levels[1:] + levels[:-1]) / 2, grid)
    centroids = np.bincount(cell, weight * grid, 64) / np.bincount(cell, weight, 64)
    assert centroids == pytest.approx(levels, abs=1e-4)


def test_the_same_states_give_the_same_tables_in_any_thread_count(monkeypatch):
    states, massive = with_massive_tokens(3000)
    one = save_tables({"x": make_tables(states, "lm4c")})
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert save_tables({"x": make_tables(states, "lm4c")}) == one
    finally:
        torch.set_num_threads(threads)
    tables = make_tables(states, "lm4c")
    close(tables.std, states[~massive].std(0, correction=0), terms=len(states))


def column(name="x", codec="lm4c"):
    return Column(name=name, codec=codec, width=H)


def test_tables_are_checked_when_they_are_read(tmp_path):
    tables = make_tables(gaussian(100), "lm4c")
    file = tmp_path / "codec.safetensors"
    file.write_bytes(save_tables({"x": tables}))
    back = load_tables(file, [column()], None)["x"]
    assert torch.equal(back.mean, tables.mean) and torch.equal(back.std, tables.std)
    assert back.limit == tables.limit and torch.equal(back.levels, tables.levels)
    with pytest.raises(DatasetError, match="these are the tables of another dataset"):
        load_tables(file, [column()], "0" * 64)
    with pytest.raises(DatasetError, match=r"column y .*: mean is missing"):
        load_tables(file, [column("y")], None)
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(DatasetError, match="damaged"):
        load_tables(file, [column()], None)
    file.unlink()
    with pytest.raises(DatasetError.__mro__[1], match="missing"):
        load_tables(file, [column()], None)


@pytest.mark.parametrize("codec", ["int8c", "lm4c", "fp8"])
@pytest.mark.parametrize(
    ("part", "value"),
    [
        *(("std", -1.0), ("std", math.inf), ("mean", math.nan)),
        *(("limit", math.inf), ("limit", -1.0), ("worst", math.nan)),
    ],
)
def test_tables_that_cannot_be_are_refused(tmp_path, codec, part, value):
    file = tmp_path / "codec.safetensors"
    tensors = load(save_tables({"x": make_tables(gaussian(100), codec)}))
    file.write_bytes(save(tensors))
    assert set(load_tables(file, [column(codec=codec)], None)) == {"x"}
    other = tensors.get(f"x.{part}", torch.ones(1)).clone()
    other[-1] = value
    file.write_bytes(save(tensors | {f"x.{part}": other}))
    with pytest.raises(DatasetError, match=f"column x .*: {part} is (not finite|below 0)"):
        load_tables(file, [column(codec=codec)], None)


def test_tables_of_another_codec_are_refused(tmp_path):
    file = tmp_path / "codec.safetensors"
    file.write_bytes(save_tables({"x": make_tables(gaussian(100), "lm4c")}))
    with pytest.raises(DatasetError, match=r"levels is float32 \[16\] instead of float32 \[64\]"):
        load_tables(file, [column(codec="lm6c")], None)


def test_runs_and_kept_tokens():
    mask, offsets = np.array([0, 1, 1, 0, 1, 1, 0, 0, 1], np.uint8), np.array([0, 5, 9])
    kept = predicts_supervised(mask, offsets)
    assert kept.tolist() == [True, True, False, True, False, False, False, True, False]
    assert runs(kept) == [(0, 2), (3, 4), (7, 8)]
    assert runs(np.zeros(3, bool)) == []
