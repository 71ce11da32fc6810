"""Codes of lossy columns as bytes: what each codec stores, against plain loops, and damage."""

import math

import numpy as np
import pyarrow as pa
import pytest

from spec_data.shards import codecs, schema
from spec_data.shards.blobs import LOSSY, PACKED, ROTATED, compress, decompress
from spec_data.shards.errors import DatasetError
from spec_data.shards.reader import open_dataset
from tests.spec_data.shards.format_files import FILES

WIDTHS = (1, 2, 3, 4, 5, 7, 14, 30, 127, 128, 129, 193, 330)
SIZES = ("falling", "rising", "all", "none", "ones", "one outlier", "a late outlier", "steps")


def codes_of(kind: str, tokens: int, width: int) -> np.ndarray:
    """Codes int8 [tokens, width] whose size depends on the component as `kind` says."""
    random = np.random.default_rng([tokens, width, SIZES.index(kind)])
    rank = np.arange(width) / width
    sigma = {
        "falling": 30 * 0.01**rank,
        "rising": 30 * 0.01 ** (1 - rank),
        "steps": np.select([rank < 0.2, rank < 0.4, rank < 0.6, rank < 0.8], [40, 3, 0.8, 0.3], 0),
    }.get(kind, np.zeros(width))
    codes = np.rint(random.normal(size=(tokens, width)) * sigma).clip(-127, 127)
    if kind == "all":
        codes = random.integers(-127, 128, (tokens, width))
    if kind == "ones":
        codes = random.integers(-1, 2, (tokens, width))
    if kind.endswith("outlier"):
        codes = random.integers(-1, 2, (tokens, width))
        codes[tokens // 2 :, -1 if "late" in kind else 0] = 127
    return codes.astype(np.int8)


def inflated(frames: bytes, size: int) -> list[int]:
    """The bytes that zstd frames hold."""
    return list(pa.Codec("zstd").decompress(frames, decompressed_size=size)) if size else []


KINDS = ((1, 255, 8, 127), (2, 15, 3, 7), (3, 5, 2, 2), (5, 3, 1, 1))
"""Codes to a byte, their base, the least and the largest of the largest codes that have it."""


def slow_packed(codes: np.ndarray) -> tuple[list[int], list[int]]:
    """The bytes of the first frame of a packed blob, and of all others together."""
    rows, width = codes.tolist(), codes.shape[1]
    largest = [max(abs(row[k]) for row in rows) for k in range(width)]
    head, content = [0] * width, []
    for digits, base, least, most in KINDS:
        chosen = [k for k in range(width) if least <= largest[k] <= most]
        for k in chosen:
            head[k] = digits
        m = math.ceil(len(chosen) / digits)
        for first in range(0, m, 128):
            for row in rows:
                for b in range(first, min(first + 128, m)):
                    mine = chosen[b::m]  # components b, b + m, ...
                    content.append(sum((row[k] + base // 2) * base**p for p, k in enumerate(mine)))
    return head, content


def slow_unpacked(blob: bytes, tokens: int, width: int) -> list[list[int]]:
    """The codes of a packed blob, digit by digit."""
    start = 4 + int.from_bytes(blob[:4], "little")
    head = inflated(blob[4:start], width)
    chosen = {digits: [k for k in range(width) if head[k] == digits] for digits in (0, 1, 2, 3, 5)}
    steps = {digits: math.ceil(len(of) / digits) for digits, of in chosen.items() if digits}
    left = iter(inflated(blob[start:], tokens * sum(steps.values())))
    codes = [[0] * width for _ in range(tokens)]
    for digits, base, _, _ in KINDS:
        m = steps[digits]
        for first in range(0, m, 128):
            for token in range(tokens):
                for b in range(first, min(first + 128, m)):
                    value = next(left)
                    for k in chosen[digits][b::m]:
                        codes[token][k] = value % base - base // 2
                        value //= base
    assert next(left, None) is None and sum(map(len, chosen.values())) == width
    return codes


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_packed_codes_are_those_of_plain_loops_both_ways(kind, tokens):
    for width in WIDTHS:
        codes = codes_of(kind, tokens, width)
        blob = compress(codes, PACKED)
        head, content = slow_packed(codes)
        start = 4 + int(blob[:4].view("<u4")[0])
        assert inflated(blob[4:start].tobytes(), width) == head
        assert inflated(blob[start:].tobytes(), len(content)) == content
        assert slow_unpacked(blob.tobytes(), tokens, width) == codes.tolist()
        assert decompress(blob, tokens, width, PACKED).tolist() == codes.tolist()


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("tokens", [0, 1, 77, 300])
def test_every_blob_gives_its_codes_back(codec, tokens):
    for width in WIDTHS:
        for kind in SIZES:
            codes = codes_of(kind, tokens, width)
            blob = compress(codes, codec)
            assert blob.dtype == np.uint8 and bool(tokens) == bool(len(blob))
            found = decompress(blob, tokens, width, codec)
            assert found.dtype == np.int8 and np.array_equal(found, codes), (width, kind)
            found[:] = 0  # a reader may write to it


def test_rotated_blobs_are_what_they_have_always_been():
    """Datasets of the codec are repaired and resumed with equal bytes."""
    for width in WIDTHS:
        codes = codes_of("falling", 40, width)
        expected = b""
        for first in range(0, width, 128):
            sink = pa.BufferOutputStream()
            with pa.CompressedOutputStream(sink, "zstd") as stream:
                stream.write(np.ascontiguousarray(codes[:, first : first + 128]).tobytes())
            expected += sink.getvalue().to_pybytes()
        assert compress(codes, ROTATED).tobytes() == expected


def test_small_codes_take_fewer_bytes_packed():
    codes = np.rint(np.random.default_rng(0).normal(size=(300, 330)) * 0.3).astype(np.int8)
    assert len(compress(codes, PACKED)) < 0.8 * len(compress(codes, ROTATED))


@pytest.mark.parametrize("codec", LOSSY)
def test_a_blob_that_does_not_fit_is_an_error(codec):
    codes = codes_of("steps", 20, 129)
    blob = compress(codes, codec)
    for tokens, width in ((19, 129), (21, 129), (0, 129), (20, 60)):
        with pytest.raises(ValueError):
            decompress(blob, tokens, width, codec)
    for damaged in (blob[:-1], blob[:9], blob[:0], np.append(blob, blob[-9:]), blob[17:]):
        with pytest.raises(ValueError):
            decompress(damaged, 20, 129, codec)


@pytest.mark.parametrize("wrong", [4, 6, 255])
def test_a_packed_blob_of_impossible_bytes_is_an_error(wrong):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(bytes([wrong] + [0] * 8))
    frame = sink.getvalue().to_pybytes()
    blob = np.frombuffer(len(frame).to_bytes(4, "little") + frame, np.uint8)
    with pytest.raises(ValueError, match="another number of codes to a byte than 0, 1, 2, 3, 5"):
        decompress(blob, 20, 9, PACKED)
    for length in (0, len(frame) - 1, len(frame) + 1, 2**32 - 1):
        head = np.frombuffer(length.to_bytes(4, "little"), np.uint8)
        with pytest.raises(ValueError):
            decompress(np.append(head, blob[4:]), 20, 9, PACKED)


@pytest.mark.parametrize("unknown", LOSSY)
def test_a_release_without_a_codec_refuses_it_by_name(unknown, monkeypatch):
    for module in (codecs, schema):
        monkeypatch.setattr(module, "LOSSY", tuple(name for name in LOSSY if name != unknown))
    with pytest.raises(DatasetError, match=rf"hidden\.L1' is stored with codec '{unknown}', which"):
        open_dataset(FILES / unknown)
